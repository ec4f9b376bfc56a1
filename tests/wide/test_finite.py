"""Wide layers in finite dimension: training by two methods, message passing, and the theory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.wide.finite import _report, scores

pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(**options):
    return ta.WideDotProduct(**{"teacher": ta.Wishart(0.5), "tau": 0.05, **options})


@pytest.fixture(scope="module")
def data():
    return ta.sample_data(layer(), 40, 1.0, jax.random.key(0))


@pytest.fixture(scope="module")
def trained(data):
    return ta.train(layer(), data)


def test_scores_have_the_variance_of_the_theory(data):
    law = layer().teacher
    np.testing.assert_allclose(jnp.trace(data.teacher) / 40, law.trace, rtol=0.01)
    h = np.asarray(data.scores)
    np.testing.assert_allclose(h[:, 0, 0].mean(), 0, atol=0.15)
    np.testing.assert_allclose(
        [h[:, 0, 0].var(), h[:, 1, 1].var(), h[:, 0, 1].var()], float(law.rho) * np.array([2, 2, 1]), rtol=0.2
    )
    noisy = ta.sample_data(layer(noise=0.3), 40, 1.0, jax.random.key(0))
    added = np.asarray(noisy.scores - data.scores)
    np.testing.assert_allclose([added[:, 0, 0].var(), added[:, 0, 1].var()], [0.6, 0.3], rtol=0.1)
    np.testing.assert_allclose(added[:, 0, 1], added[:, 1, 0], atol=1e-12)


def test_the_minimum_satisfies_its_conditions(data, trained):
    """The gradient of the loss is tau on the eigenvectors of S, and at most tau beyond."""
    d = 40

    def loss(S):
        return jnp.sum(jax.vmap(layer().loss)(scores(data.x, S), data.scores)) / d

    gradient = -jax.grad(loss)(trained.S)
    gradient = (gradient + gradient.T) / 2
    values, vectors = np.linalg.eigh(trained.S)
    slopes = np.einsum("ik,ij,jk->k", vectors, gradient, vectors)
    np.testing.assert_allclose(slopes[values > 1e-3], 0.05, rtol=1e-5)
    assert np.linalg.eigvalsh(gradient)[-1] < 0.05 * (1 + 1e-5)
    np.testing.assert_allclose(trained.share, np.mean(values > 1e-6))


@pytest.mark.parametrize("kappa", [1.0, 0.6])
def test_training_the_factor_ends_at_the_same_matrix(data, trained, kappa):
    other = ta.train(layer(kappa=kappa), data, over="Q", key=jax.random.key(1))
    assert other.status_name == "converged"
    np.testing.assert_allclose(other.S, trained.S, atol=1e-6)
    np.testing.assert_allclose(other.energy, trained.energy, rtol=1e-9)


def test_a_bound_on_the_rank_costs_energy(data, trained):
    bounded = ta.train(layer(kappa=0.3), data, over="Q")
    assert float(bounded.share) <= 0.3 + 1e-12
    assert float(bounded.energy) > 1.05 * float(trained.energy)


def test_message_passing_ends_at_the_minimum(data, trained):
    for damping in (0.0, 0.3):
        passed = ta.gamp(layer(), data, damping=damping)
        assert passed.status_name == "converged"
        np.testing.assert_allclose(passed.S, trained.S, atol=1e-6)


def test_an_empty_matrix_is_no_end_while_damped_messages_grow(data):
    """The first messages, damped, push no eigenvalue above tau."""
    model = layer(tau=0.6)
    passed = ta.gamp(model, data, damping=0.7)
    assert passed.status_name == "converged" and float(passed.q) > 0.05
    np.testing.assert_allclose(passed.S, ta.train(model, data).S, atol=1e-6)
    empty = ta.gamp(layer(tau=50.0), data, damping=0.3)
    assert empty.status_name == "converged" and float(empty.q) == 0


def test_fresh_sentences_are_not_those_of_training(data, trained):
    """Also with the key that drew the training sentences, and its overfitting shows."""
    same_key = ta.train(layer(), data, key=jax.random.key(0))
    assert float(same_key.gen_error) == float(trained.gen_error)  # zero is the default
    np.testing.assert_allclose([trained.train_loss, trained.gen_error], [0.00408, 0.00583], rtol=0.06)


def test_theory_with_the_eigenvalues_of_this_dimension(trained):
    """The deviations of q at d = 40 are of order 1/d: +.0124(10) beyond the theory of these eigenvalues."""
    theory = ta.solve(layer(teacher=ta.Wishart(0.5).eigenvalues(40)), 1.0)
    for name, tolerance in {"q": 0.025, "m": 0.015, "trace": 0.015, "energy": 0.01, "largest": 0.02}.items():
        np.testing.assert_allclose(getattr(trained, name), getattr(theory, name), rtol=tolerance, err_msg=name)


def test_long_encodings_are_learned_beside_the_content():
    model = layer(tau=0.03, omega=0.4, mixing=[[0.8, 0.2], [0.3, 0.7]], encodings="long")
    data = ta.sample_data(model, 40, 1.0, jax.random.key(0))
    trained = ta.train(model, data)
    assert trained.status_name == "converged"
    assert int(trained.iterations) < 500
    T = trained.offset
    assert 0.3 < float(T[0, 0] - T[0, 1]) < 0.54  # .46 at d = 60, .54 in the limit
    np.testing.assert_allclose(trained.q, 0.2315, rtol=0.1)
    np.testing.assert_allclose(data.encodings @ data.encodings.T, 40 * np.eye(2), atol=1e-9)
    np.testing.assert_allclose(data.x.mean(0), data.encodings, atol=0.12)  # of 1,600 sentences: 5 standard deviations
    np.testing.assert_allclose(T, data.encodings @ trained.S @ data.encodings.T / np.sqrt(40))
    np.testing.assert_allclose([trained.alpha, data.alpha], 1.0)


def test_encodings_of_length_of_order_one_have_a_spike():
    """Deviations from the limit are of order d^(-1/2): for q .119(9), .117(7), .109(8) of it at d = 40, 60, 100."""
    model = layer(tau=0.03, omega=0.4, mixing=[[0.75, 0.25], [0.25, 0.75]], encodings=1.5)
    datasets = [ta.sample_data(model, 40, 1.0, jax.random.key(k)) for k in range(4)]
    p = datasets[0].encodings
    np.testing.assert_allclose(p @ p.T, [[2.25, -2.25], [-2.25, 2.25]], rtol=1e-12)
    runs = [ta.train(model, data) for data in datasets]
    assert all(run.status_name == "converged" for run in runs)
    q, R = np.mean([(run.q, run.offset[0, 0] / 2.25) for run in runs], 0)
    assert 0.07 < (0.2357 - q) * np.sqrt(40) < 0.17
    assert 0 < (0.0448 - R) * np.sqrt(40) < 0.05


def test_single_precision(data, trained):
    with jax.enable_x64(False):
        model = ta.WideDotProduct(tau=0.05)
        same = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float32), data)
        for run in (ta.train(model, same), ta.gamp(model, same)):
            assert run.status_name == "converged" and int(run.iterations) < 100
            np.testing.assert_allclose(run.q, trained.q, rtol=1e-4)
        empty = ta.train(ta.WideDotProduct(tau=50.0), same)
        assert empty.status_name == "converged" and float(empty.q) == 0


def test_the_smallest_data():
    data = ta.sample_data(layer(), 2, 1e-3, jax.random.key(0))
    assert data.x.shape == (1, 2, 2) and data.alpha == 0.25
    assert ta.sample_data(layer(tokens=3), 3, 1.0, jax.random.key(0)).x.shape == (9, 3, 3)


def test_the_parts_of_the_data_are_drawn_from_different_numbers():
    model = layer(noise=1.0)
    d = 6
    data = ta.sample_data(model, d, 2.0, jax.random.key(0))
    noise = (data.scores - scores(data.x, data.teacher))[:, 1, 0].ravel()
    draws = np.asarray(data.x).ravel()
    assert not np.isin(np.round(noise, 9), np.round(draws, 9)).any()
    basis = np.linalg.qr(draws[: d * d].reshape(d, d))[0]
    assert not np.allclose((basis * model.teacher.eigenvalues(d)) @ basis.T, data.teacher, atol=0.1)


@pytest.fixture(scope="module")
def few():
    return _few()


def test_numbers_of_a_matrix(few):
    """Eigenvalues below a millionth of the largest one count as zero."""
    values = np.array([0.0, 0.8e-6, 1.2e-6, 0.3, 0.5, 1.0])
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
    S = jnp.asarray((basis * values) @ basis.T)
    data = eqx.tree_at(lambda data: data.encodings, few, jnp.asarray(np.random.default_rng(1).standard_normal((2, 6))))
    n, key, model = len(few.x), jax.random.key(3), layer()
    found = _report(model, data, S, jnp.asarray(7), jnp.asarray(2), key)
    losses = jax.vmap(model.loss)(scores(data.x, S), data.scores)
    expected = {
        "alpha": n / 36, "q": np.sum(values**2) / 6, "m": np.sum(S * data.teacher) / 6, "trace": values.sum() / 6,
        "train_loss": losses.mean(), "energy": losses.sum() / 36 + 0.05 * values.sum() / 6, "share": 4 / 6,
        "largest": 1.0, "offset": data.encodings @ S @ data.encodings.T / np.sqrt(6), "iterations": 7, "status": 2,
        "gen_error": ta.heldout_error(model, data, S, key, sentences=n).value,
    }  # fmt: skip
    for name, number in expected.items():
        np.testing.assert_allclose(getattr(found, name), number, rtol=1e-9, err_msg=name)
    assert str(found).splitlines()[0] == "Wide layer, d = 6, alpha = 0.5: max steps"
    assert str(found).splitlines()[-1].split() == ["iterations", "7"]
    bad = _report(model, data, S.at[0, 0].set(jnp.nan), jnp.asarray(7), jnp.asarray(0), key)
    assert bad.status_name == "nonfinite"


@pytest.mark.parametrize(
    "run",
    [
        lambda data, steps: ta.train(layer(), data, steps=steps),
        lambda data, steps: ta.train(layer(kappa=0.02), data, over="Q", steps=steps),
        lambda data, steps: ta.gamp(layer(), data, steps=steps),
    ],
    ids=["S", "Q", "gamp"],
)
def test_steps_are_counted_and_bounded(few, run):
    result = run(few, 3)
    assert int(result.iterations) == 3 and result.status_name == "max steps"


def test_a_thin_factor_has_one_column(few):
    assert np.isclose(ta.train(layer(kappa=0.02), few, over="Q", steps=3).share, 1 / 6)


def test_message_passing_has_no_damping_by_default(few):
    plain, damped = ta.gamp(layer(), few, damping=0.0, steps=3), ta.gamp(layer(), few, damping=0.1, steps=3)
    assert ta.gamp(layer(), few, steps=3) == plain != damped
    slow = ta.gamp(layer(), few, damping=0.9999)
    assert int(slow.iterations) == 300 and slow.status_name == "max steps"


def test_fresh_sentences_come_in_blocks(few):
    """Their number is rounded up to a multiple of 256; two are the least for an error bar."""
    S, key = few.teacher, jax.random.key(1)
    values = [float(ta.heldout_error(layer(), few, S / 2, key, sentences=n).value) for n in (2, 256, 257)]
    assert values[0] == values[1] != values[2]
    two = eqx.tree_at(lambda data: (data.x, data.scores), few, (few.x[:2], few.scores[:2]))
    assert np.isfinite(ta.heldout_error(layer(), two, S / 2).stderr)
    one = eqx.tree_at(lambda data: (data.x, data.scores), few, (few.x[:1], few.scores[:1]))
    with pytest.raises(ta.InputError, match="data must be two sentences or more for an error bar, got data=1"):
        ta.heldout_error(layer(), one, S / 2)
    with pytest.raises(ta.InputError, match="sentences must be an integer of at least 2"):
        ta.heldout_error(layer(), few, S / 2, key, sentences=1)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: ta.sample_data(layer(tokens=3), 2, 1.0, jax.random.key(0)), "d must be an integer of at least 3"),
        (lambda: ta.gamp(layer(), _few(), damping=-0.1), "damping must be in"),
        (lambda: ta.gamp(layer(), _few(), steps=0), "steps must be an integer"),
        (lambda: ta.gamp(layer(), 3), "data must be sentences"),
        (lambda: ta.sample_data(layer(), 5000, 1.0, jax.random.key(0)), r"d must be smaller.*7.45e\+03 GiB"),
        (lambda: ta.sample_data(layer(), 1, 1.0, jax.random.key(0)), "d must be an integer of at least 2"),
        (lambda: ta.sample_data(layer(), 10, -1.0, jax.random.key(0)), "alpha must be positive"),
        (lambda: ta.sample_data(layer(), 10, 1.0, 3), "key must be one key"),
        (lambda: ta.train(layer(), 3), "data must be sentences"),
        (lambda: ta.train(layer(), _few(), over="W"), "over must be one of S, Q"),
        (lambda: ta.train(layer(), _few(), steps=0), "steps must be an integer"),
        (lambda: ta.gamp(layer(), _few(), damping=1.0), "damping must be in"),
        (lambda: ta.gamp(layer(encodings="long"), _few()), "model must have no encodings"),
    ],
)
def test_bad_calls(unchecked, call, sentence):
    with pytest.raises(ta.InputError, match=sentence):
        call()


def _few():
    return ta.sample_data(layer(), 6, 0.5, jax.random.key(0))
