"""Options and defaults of runs, and the memory that they say they need. Nothing is run."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.finite import evaluation, message_passing, on_demand, sampling, training
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.message_passing import gamp, posterior_mean
from tiedattn_jax.finite.training import default_optimizer, train

pytestmark = pytest.mark.usefixtures("fast_compilation", "unchecked")
D, N = 20, 10


def sentences(columns=1, L=2, scale=1.0):
    """Sentences of the standard model, and their teacher."""
    rng = np.random.default_rng(0)
    x, teacher = 0.5 * rng.standard_normal((N, L, D)), scale * rng.standard_normal((D, columns))
    encodings = np.ones((L, D)) / D**0.5
    return Data.from_sentences(*map(jnp.asarray, (x,)), teacher=jnp.asarray(teacher), encodings=jnp.asarray(encodings))


@pytest.fixture
def asked(monkeypatch):
    """Runs return what they are asked to do."""
    for module, name in ((message_passing, "_run"), (message_passing, "_run_posterior"), (training, "_run")):
        monkeypatch.setattr(module, name, lambda *arguments: arguments)
    monkeypatch.setattr(evaluation, "_heldout", lambda *arguments: arguments)


@pytest.fixture
def sizes(monkeypatch):
    """The bytes that are asked for, by module."""
    found = {}

    def note(name, size, *_):
        found[name] = size

    for module in (message_passing, training, sampling, on_demand):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "require_memory", partial(note, name))
    return found


def test_message_passing_by_default_and_by_its_options(model, asked):
    data = sentences()
    _, _, Q, warm_start, derivative, options = gamp(model, data)
    np.testing.assert_array_equal(Q, data.teacher)
    assert warm_start is None and not derivative and options.steps == 1000 and options.automatic
    assert (float(options.tol), float(options.damping)) == (1e-12, 0.2)
    *_, derivative, options = gamp(model, data, response="derivative", damping=1.0, steps=7, tol=1e-300)
    assert derivative and options.steps == 7 and not options.automatic and float(options.damping) == 1.0
    assert float(options.least_residual) == 20 * np.finfo(float).eps and not options.undamped


def test_training_by_default_and_by_its_options(model, asked):
    data = sentences()
    _, _, Q, options, exact, value = train(model, data)
    np.testing.assert_array_equal(Q, data.teacher)
    assert (options.optimizer, options.steps, float(options.tol)) == ("lbfgs", 5000, 1e-10)
    assert exact is False and value is None
    for optimizer, rate in (("lbfgs", 1.0), ("gd", 0.15), ("adam", 0.01)):
        assert float(train(model, data, optimizer=optimizer)[3].rate) == rate
    assert train(model, data, rate=0.3)[3].optimizer == "gd" and float(train(model, data, rate=0.3)[3].rate) == 0.3
    assert default_optimizer(model) == "lbfgs" and default_optimizer(model, stored=False) == "gd"
    assert default_optimizer(ta.DotProduct(penalty=ta.L1(0.1))) == "gd"


@pytest.mark.parametrize(
    ("given", "block", "count"), [(None, 256, 196), (2, 2, 1), (256, 256, 1), (257, 256, 2), (512, 256, 2)]
)
def test_blocks_of_fresh_sentences(model, asked, given, block, count):
    """The default is 50,000, in blocks of 256."""
    data, options = sentences(), {} if given is None else {"sentences": given}
    *_, matrix, _, found, number, exact = evaluation.heldout_error(
        model, data, data.teacher, jax.random.key(0), **options
    )
    assert (found, number, exact, matrix) == (block, count, False, None)


def test_the_starts_of_the_posterior_mean(asked):
    """A random start has a tenth of the size of the teacher."""
    model, data = ta.DotProduct(teacher=9.0), sentences(scale=3.0)
    _, _, Q, options = posterior_mean(model, data)
    np.testing.assert_allclose(Q, 0.3 * jax.random.normal(jax.random.key(0), (D, 1)), rtol=1e-12)
    assert options.steps == 500 and float(options.tol) == 1e-8 and options.undamped and not options.automatic
    np.testing.assert_array_equal(posterior_mean(model, data, "teacher")[2], data.teacher)
    given = np.arange(float(D))[:, None]
    np.testing.assert_array_equal(posterior_mean(model, data, given)[2], given)


def test_a_teacher_that_knows_the_eigenvalues_is_refused(asked):
    def law_of(pi):
        tau = np.array([[[1.0, -1.0], [-1.0, 1.0]]] * 2)
        arrays = [0.5, 0.5], [[0.4, 0.4], [0.1, 0.1]], tau, np.reshape(pi, (2, 1, 1)), np.zeros((2, 2, 1))
        return ta.DotProduct(spectrum=ta.SpectralLaw(*map(jnp.asarray, arrays)))

    data = sentences()
    assert posterior_mean(law_of([1.0, 1.0]), data)[3].steps == 500
    with pytest.raises(ta.InputError, match="model must have a teacher of one second moment pi at all eigenvalues"):
        posterior_mean(law_of([1.2, 0.8]), data)


def test_going_on_with_a_penalty(asked):
    """With a penalty there is a variance for every coordinate."""
    data, zero = sentences(), jnp.zeros(())
    x = data.overlaps(data.teacher)

    def earlier(count):
        arrays = jnp.ones((count, 1, 1)), jnp.ones((2, 1, N)), zero, x, zero[None]
        return ta.results.GAMP(data.teacher, x, jnp.array(1), jnp.array(0), *arrays, damping=zero)

    for model, count in ((ta.DotProduct(), 1), (ta.DotProduct(penalty=ta.L1(0.1)), D)):
        Q, (C, g) = gamp(model, data, earlier(count))[2:4]
        assert C.shape == (count, 1, 1) and g.shape == (2, 1, N) and Q.shape == (D, 1)
        with pytest.raises(ta.InputError, match=r"init.C must have shape \(i, r, r\)"):
            gamp(model, data, earlier(D + 1 - count))


def test_the_memory_of_histories(asked, sizes):
    """The history of message passing holds all overlaps at every step. That of training holds two numbers."""
    mixing = np.full((3, 3), 1 / 3)
    model = ta.DotProduct(rank=4, teacher=np.eye(2), mixing=mixing, encodings=np.eye(3))
    data = sentences(columns=2, L=3)
    Q = jnp.ones((D, 4))
    gamp(model, data, Q, steps=50)
    assert sizes["message_passing"] == 50 * sum(a.nbytes for a in jax.tree.leaves(data.overlaps(Q)))
    train(model, data, Q, steps=50)
    assert sizes["training"] == 50 * 2 * 8


def test_the_memory_of_a_value_matrix(model, asked, monkeypatch):
    """It is that of eight arrays of the size of the sentences and of the matrix."""
    found = []
    monkeypatch.setattr(training, "require_memory", lambda size, *_: found.append(size))
    data = sentences()
    Q, options, _, (labels, ridge) = train(model, data, value=0.25, labels=jnp.ones((N, 2, D)), steps=3)[2:]
    assert found[0] == 8 * (data.x.nbytes + 8 * D**2) and options.steps == 3
    assert labels.shape == (N, 2, D) and float(ridge) == 0.25 and Q.shape == (D, 1)


def test_the_memory_of_sentences(model, sizes):
    """On CPUs six copies are in memory while they are drawn; those on demand take none."""
    for instances in (1, 3):
        assert sampling.sentence_count(model, 50, 2.0, instances) == 100
        copies = 6 if jax.default_backend() == "cpu" else 2
        assert sizes["sampling"] == copies * instances * 100 * 2 * 50 * 8
    assert sampling.sentence_count(model, 50, 2.0, stored=False) == 100 and sizes["sampling"] == 0
    assert sampling.sentence_count(model, 50, 2.0) == 100 and sizes["sampling"] > 0


def test_the_memory_of_products_on_demand(model, two_atoms, sizes):
    """It is that of all vectors and their images, in whole blocks."""
    for kind in (model, two_atoms):
        data = ta.sample_data(kind, 16, 0.5, jax.random.key(0), stored=False)
        memory = data.memory(2 * on_demand.BLOCK, 1)
        stored = sum(a.nbytes for side in (memory.right, memory.left) for a in (side.basis, side.images))
        assert sizes["on_demand"] == stored


@pytest.mark.parametrize(("run", "further"), [(train, 1), (gamp, 3)], ids=["train", "gamp"])
def test_products_of_a_run_on_demand(model, monkeypatch, run, further):
    """Every step takes a product for each column, and so do the risk at the start and at the end."""

    class Asked(Exception):
        pass

    def note(self, products, steps):
        raise Asked(products, steps)

    wide = ta.DotProduct(rank=2)
    data = ta.sample_data(model, 16, 0.5, jax.random.key(0), stored=False)
    monkeypatch.setattr(on_demand.DataOnDemand, "memory", note)
    with pytest.raises(Asked) as asked:
        run(wide, data, jnp.ones((16, 2)), steps=9)
    assert asked.value.args == (2 * (9 + further), 9)


DEFAULTS = {
    "sample_data": {"normalise": False, "stored": True},
    "gamp": {"steps": 1000, "tol": 1e-12, "damping": None, "response": "regression"},
    "posterior_mean": {"init": "random", "steps": 500, "tol": 1e-8, "key": None},
    "train": {"steps": 5000, "rate": None, "tol": 1e-10, "exact": False, "value": None, "labels": None},
    "risk": {"exact": False},
    "heldout_error": {"key": None, "sentences": 50_000, "exact": False, "W": None},
    "linear_baseline": {"ridge": 0.0, "test": None},
    "run_instances": {"theory": True, "normalise": False, "sentences": 50_000, "batch": 1, "progress": None},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_where_nothing_is_said(name):
    parameters = inspect.signature(getattr(ta, name)).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]
