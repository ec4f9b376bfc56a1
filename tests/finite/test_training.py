"""The risk and its gradient against raw arrays; the optimisers against each other and against steps by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import tiedattn_jax as ta
from tiedattn_jax.base.report import with_error
from tiedattn_jax.base.results import Status
from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.finite.training import risk, train

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, 120, 2.0, jax.random.key(0))


@pytest.fixture(scope="module")
def minima(model, data):
    return {init: train(model, data, init, optimizer="lbfgs", steps=500) for init in ("semantic", "positional")}


def raw_risk(model, data, Q, exact):
    """The risk from raw arrays, sentence by sentence."""
    x, d, p = data.inputs(), data.x.shape[2], data.encodings

    def sentence_risk(x, y, label):
        Z = (x + p) @ Q / d**0.5
        if not exact:
            return model.loss(Z, y)
        return jnp.sum((label - model.student(Z) @ (x + p)) ** 2) / (2 * d)

    return jnp.sum(jax.vmap(sentence_risk)(x, data.y, data.raw_labels(model))) + 0.5 * model.lam * jnp.sum(Q**2)


@pytest.mark.parametrize("exact", [False, True])
def test_risk_and_gradient_equal_those_of_the_raw_arrays(model, data, exact):
    Q = 0.7 * jax.random.normal(jax.random.key(1), (120, 1))
    value, gradient = jax.value_and_grad(lambda Q: risk(model, data, Q, exact=exact))(Q)
    value_raw, gradient_raw = jax.value_and_grad(lambda Q: raw_risk(model, data, Q, exact))(Q)
    np.testing.assert_allclose(value, value_raw, rtol=1e-12)
    np.testing.assert_allclose(gradient, gradient_raw, atol=1e-12)


def test_exact_and_limiting_risk_agree_for_large_d(model):
    def gap(d):
        data = sample_data(model, d, 400 / d, jax.random.key(d))
        Q = 0.5 * data.teacher
        ridge = 0.5 * model.lam * jnp.sum(Q**2)
        limit = risk(model, data, Q) - ridge
        return abs(float((risk(model, data, Q, exact=True) - ridge) / limit - 1))

    assert 1e-4 < gap(2000) < 1.0 / 2000**0.5


@pytest.mark.parametrize("exact", [False, True])
def test_a_gradient_touches_the_data_twice_and_builds_no_prediction(model, data, exact):
    value_and_gradient = jax.value_and_grad(lambda data, Q: risk(model, data, Q, exact=exact), 1)
    jaxpr, products = jax.make_jaxpr(value_and_gradient)(data, data.teacher).jaxpr, 0

    def visit(jaxpr):
        nonlocal products
        for eqn in jaxpr.eqns:
            platforms = eqn.params.get("branches_platforms")  # the first branch is the CPU's
            for inner in list(jaxprs_in_params(eqn.params))[: 1 if platforms else None]:
                visit(inner)
            products += eqn.primitive.name == "dot_general" and any(v.aval.size == data.x.size for v in eqn.invars)

    visit(jaxpr)
    memory = jax.jit(value_and_gradient).lower(data, data.teacher).compile().memory_analysis()
    assert products == 2
    if jax.default_backend() == "cpu":  # sums on a GPU have partial results, as large as these few data
        assert memory.temp_size_in_bytes < data.x.nbytes / 5
    # Outside of programs nothing as large as x is made, either; programs may return x itself.
    large_operations = {
        eqn.primitive.name for eqn in jaxpr.eqns if any(v.aval.size >= data.x.size / 2 for v in eqn.outvars)
    }
    assert large_operations <= {"jit", "pjit"}


def test_gradient_descent_is_the_paper_s_rule(model, data):
    Q = data.teacher
    for _ in range(5):
        Q = Q - 0.15 * jax.grad(lambda Q: risk(model, data, Q))(Q)
    result = train(model, data, "semantic", optimizer="gd", steps=5)
    np.testing.assert_allclose(result.Q, Q, atol=1e-13)
    assert int(result.iterations) == 5 and int(result.status) == Status.max_steps
    slower = train(model, data, "semantic", optimizer="gd", steps=5, rate=0.01)
    assert float(jnp.max(jnp.abs(slower.Q - Q))) > 1e-3
    stalled = train(model, data, "semantic", optimizer="gd", steps=5, rate=1e-30)
    assert int(stalled.status) == Status.stalled and int(stalled.iterations) == 1


def test_the_published_steps_do_not_end_at_a_minimum(model):
    data = sample_data(model, 100, 1.0, jax.random.key(0))
    published = train(model, data, "semantic", optimizer="gd")
    minimum = train(model, data, published.Q, optimizer="lbfgs")
    assert int(published.status) == Status.max_steps and int(minimum.status) == Status.converged
    assert 1e-3 < jnp.linalg.norm(published.Q - minimum.Q) / jnp.linalg.norm(minimum.Q) < 0.2


def test_the_default_optimiser(model, data):
    """It ends at a minimum; gradient descent is for what has no line search, and for those who give a rate."""

    def same(options, others, sentences=data, of=model):
        first, second = (train(of, sentences, "semantic", steps=4, **o) for o in (options, others))
        return bool(jnp.all(first.Q == second.Q))

    drawn, penalised = sample_data(model, 60, 1.0, jax.random.key(0), stored=False), ta.DotProduct(penalty=ta.L1(0.01))
    assert same({}, {"optimizer": "lbfgs"}) and not same({}, {"optimizer": "gd"})
    assert same({"rate": 0.1}, {"optimizer": "gd", "rate": 0.1})
    assert same({}, {"optimizer": "gd"}, drawn) and same({}, {"optimizer": "gd"}, of=penalised)


@pytest.mark.parametrize("init", ["semantic", "positional"])
def test_optimisers_reach_the_same_minimum(model, data, minima, init):
    best = minima[init]
    assert int(best.status) == Status.converged and float(best.gradient_norm) <= 1e-10
    np.testing.assert_allclose(best.train_loss, risk(model, data, best.Q) / 120, rtol=1e-13)
    adam = train(model, data, best.Q + 1e-3, optimizer="adam", steps=5000, tol=1e-9)
    assert bool(adam.ok) and float(jnp.max(jnp.abs(adam.Q - best.Q))) < 1e-5
    gd = train(model, data, best.Q + 1e-3, optimizer="gd", steps=5000, rate=1.0, tol=1e-9)
    assert bool(gd.ok) and abs(float(gd.train_loss - best.train_loss)) < 1e-12
    assert np.all(np.diff(gd.losses[: int(gd.iterations) + 1]) < 1e-15)


def test_histories_and_a_start_at_the_minimum_that_stops_at_once(model, data, minima):
    result = minima["semantic"]
    k = int(result.iterations)
    assert np.all(np.isfinite(result.losses[: k + 1])) and np.all(np.isnan(result.losses[k + 1 :]))
    assert result.losses[k] == result.train_loss and result.gradient_norms[k] == result.gradient_norm
    np.testing.assert_allclose(result.overlaps.q, 0.25 * jnp.sum(result.Q**2) / 120 * jnp.ones((2, 1, 1)), rtol=1e-12)
    restarted = train(model, data, result.Q, optimizer="gd")
    assert int(restarted.iterations) == 0 and bool(restarted.ok)


def test_training_on_exact_labels(model, data, minima):
    exact = train(model, data, "semantic", optimizer="lbfgs", steps=500, exact=True)
    assert bool(exact.ok) and float(jnp.max(jnp.abs(exact.Q - minima["semantic"].Q))) > 1e-3
    gradient = jax.grad(lambda Q: raw_risk(model, data, Q, True))(exact.Q)
    assert float(jnp.max(jnp.abs(gradient))) < 1e-9


@pytest.mark.parametrize("optimizer", ["gd", "adam"])
def test_a_diverging_run_keeps_its_last_finite_state(model, data, optimizer):
    rate = {"gd": 1e4, "adam": 1e307}[optimizer]
    result = train(model, data, "semantic", optimizer=optimizer, steps=5000, rate=rate)
    assert int(result.status) == Status.nonfinite and int(result.iterations) < 1000
    assert np.all(np.isfinite(result.Q)) and np.isfinite(result.train_loss)


def test_instances_by_vmap_and_one_bad_lane(model):
    instances = jax.vmap(lambda k: sample_data(model, 60, 1.0, k))(jax.random.split(jax.random.key(0), 2))

    def run(data, rate):
        return train(model, data, "semantic", optimizer="gd", steps=300, rate=rate)

    runs = jax.jit(jax.vmap(run))(instances, jnp.array([0.15, 1e4]))
    single = run(jax.tree.map(lambda a: a[0], instances), 0.15)
    np.testing.assert_allclose(runs.Q[0], single.Q, atol=1e-12)
    assert runs.status.tolist() == [Status.max_steps, Status.nonfinite] and np.all(np.isfinite(runs.Q))


def test_single_precision(model):
    single = ta.DotProduct(dtype=jnp.float32)
    data = sample_data(single, 100, 1.5, jax.random.key(0))
    result = train(single, data, "semantic", optimizer="lbfgs", steps=200, tol=1e-6)
    assert result.Q.dtype == jnp.float32 and float(result.gradient_norm) < 1e-5


def test_runs_on_data(model):
    data = ta.sample_data(model, 60, 2.0, jax.random.key(0))
    assert repr(data) == "Data(120 sentences of 2 tokens in 60 dimensions, alpha = 2, float64, with teacher and labels)"
    unit = jnp.ones(())
    x = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.5, jnp.nan, 0.25)), jnp.ones((2, 1)))
    counts, losses = (jnp.array(7), jnp.array(2)), (0.5 * unit, 1e-9 * unit, unit[None], unit[None])
    run = ta.results.Training(jnp.ones((60, 1)), x, *counts, *losses)
    words = "Training(Q of shape (60, 1) after 7 iterations; q=0.5, theta=0.25, m=1, train_loss=0.5,"
    assert repr(run).startswith(words) and not run.ok
    assert run.to_dict() == {  # training weights have no V
        "q": 0.5, "theta": 0.25, "m": 1.0, "train_loss": 0.5, "gradient_norm": 1e-9, "iterations": 7,
        "status": "max steps"
    }  # fmt: skip
    mean = ta.Average(jnp.array(0.5), jnp.array(0.01))
    assert repr(mean) == "Average(0.500(10))" and f"{mean:.2f} {mean}" == "0.50 0.500(10)"
    labels = data.raw_labels(model)
    baseline = ta.linear_baseline(ta.Data.from_sentences(data.inputs(), labels, encodings=data.encodings))
    assert repr(baseline) == f"Quantity(gen_error = {with_error(baseline.value, baseline.stderr)}; converged)"
    assert "W            [[" in str(baseline) and "train_error" in str(baseline)
    assert baseline.to_dict()["W"] == baseline.W.tolist()
