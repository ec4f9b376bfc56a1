"""The risk and its gradient against raw arrays; the optimisers against each other and against steps by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.report import with_error
from tiedattn_jax.base.results import Status
from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.finite.training import default_optimizer, risk, train

D = 40
risk_and_gradient = eqx.filter_jit(
    lambda model, data, Q, exact=False: jax.value_and_grad(lambda Q: risk(model, data, Q, exact=exact))(Q)
)


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, D, 1.5, jax.random.key(0))


@pytest.fixture(scope="module")
def minima(model, data):
    return {init: train(model, data, init) for init in ("semantic", "positional")}


@eqx.filter_jit
def raw_risk(model, data, Q, exact):
    """The risk from raw arrays, sentence by sentence, and its gradient."""
    x, p = data.inputs(), data.encodings

    def sentence_risk(Q, x, y, label):
        Z = (x + p) @ Q / D**0.5
        if not exact:
            return model.loss(Z, y)
        return jnp.sum((label - model.student(Z) @ (x + p)) ** 2) / (2 * D)

    def total(Q):
        losses = jax.vmap(sentence_risk, (None, 0, 0, 0))(Q, x, data.y, data.raw_labels(model))
        return jnp.sum(losses) + 0.5 * model.lam * jnp.sum(Q**2)

    return jax.value_and_grad(total)(Q)


@pytest.mark.parametrize("exact", [False, True])
def test_risk_and_gradient_equal_those_of_the_raw_arrays(model, data, exact):
    Q = 0.7 * np.random.default_rng(1).standard_normal((D, 1))
    (value, gradient), (raw, raw_gradient) = (f(model, data, Q, exact) for f in (risk_and_gradient, raw_risk))
    np.testing.assert_allclose(value, raw, rtol=1e-12)
    np.testing.assert_allclose(gradient, raw_gradient, atol=1e-12)


@pytest.mark.parametrize(("optimizer", "rate"), [("gd", 0.15), ("adam", 0.01)])
def test_the_first_steps_by_hand(model, data, optimizer, rate):
    """Gradient descent is the paper's rule; the first step of Adam moves all weights by the rate."""
    Q, losses, norms = np.asarray(data.teacher), [], []
    for _ in range(2 if optimizer == "adam" else 5):
        value, gradient = map(np.asarray, risk_and_gradient(model, data, Q))
        losses.append(value / D)
        norms.append(np.max(abs(gradient)))
        Q = Q - rate * (np.sign(gradient) if optimizer == "adam" else gradient)
    result = train(model, data, "semantic", optimizer=optimizer)
    np.testing.assert_allclose(result.losses[: len(losses)], losses, rtol=1e-6 if optimizer == "adam" else 1e-12)
    np.testing.assert_allclose(result.gradient_norms[: len(norms)], norms, rtol=1e-5)


def test_the_published_steps_do_not_end_at_a_minimum(model, data, minima):
    published = train(model, data, minima["semantic"].Q + 0.3, optimizer="gd")
    assert int(published.status) == Status.max_steps and int(published.iterations) == 5000
    distance = np.linalg.norm(published.Q - minima["semantic"].Q) / np.linalg.norm(minima["semantic"].Q)
    assert 1e-5 < distance < 0.2


def test_the_default_optimiser(model, data):
    """Gradient descent is for what has no line search, and for those who give a rate; L-BFGS for all others."""
    assert default_optimizer(model) == "lbfgs" and default_optimizer(model, stored=False) == "gd"
    assert default_optimizer(model, rate=0.1) == default_optimizer(ta.DotProduct(penalty=ta.L1(0.1))) == "gd"
    runs = (train(model, data, rate=0.1, **options) for options in ({}, {"optimizer": "gd"}))
    np.testing.assert_array_equal(*(run.Q for run in runs))
    stalled = train(model, data, rate=1e-30)  # steps that change nothing
    assert int(stalled.status) == Status.stalled and int(stalled.iterations) == 1


@pytest.mark.parametrize("init", ["semantic", "positional"])
def test_optimisers_reach_the_same_minimum(model, data, minima, init):
    best = minima[init]
    assert int(best.status) == Status.converged and float(best.gradient_norm) <= 1e-10 and best.iterations < 500
    value, gradient = map(np.asarray, risk_and_gradient(model, data, best.Q))
    np.testing.assert_allclose(best.train_loss, value / D, rtol=1e-13)
    assert np.max(abs(gradient)) < 1e-9
    start = np.asarray(best.Q) + 1e-3
    adam = train(model, data, start, optimizer="adam", tol=1e-9)
    assert bool(adam.ok) and np.max(abs(np.asarray(adam.Q) - best.Q)) < 1e-5
    gd = train(model, data, start, optimizer="gd", rate=1.0, tol=1e-9)
    assert bool(gd.ok) and abs(float(gd.train_loss - best.train_loss)) < 1e-12
    assert np.all(np.diff(gd.losses[: int(gd.iterations) + 1]) < 1e-15)


def test_histories_and_a_start_at_the_minimum_that_stops_at_once(model, data, minima):
    result = minima["semantic"]
    k, losses, norms = int(result.iterations), np.asarray(result.losses), np.asarray(result.gradient_norms)
    assert np.all(np.isfinite(losses[: k + 1])) and np.all(np.isnan(losses[k + 1 :]))
    assert losses[k] == result.train_loss and norms[k] == result.gradient_norm
    np.testing.assert_allclose(result.overlaps.q[0, 0, 0], 0.25 * np.sum(np.square(result.Q)) / D, rtol=1e-12)
    restarted = train(model, data, result.Q, optimizer="gd")
    assert int(restarted.iterations) == 0 and bool(restarted.ok) and len(result.plot().axes) == 2


def test_no_step_measures_the_weights(model, data):
    Q = 0.7 * np.random.default_rng(2).standard_normal((D, 1))
    found = train(model, data, Q, steps=0, exact=True)
    value, gradient = raw_risk(model, data, Q, True)
    np.testing.assert_array_equal(found.Q, Q)
    assert float(found.train_loss) == pytest.approx(float(value) / D, rel=1e-12)
    assert float(found.gradient_norm) == pytest.approx(float(jnp.max(jnp.abs(gradient))), rel=1e-9)
    assert int(found.iterations) == 0 and found.losses.shape == (1,) and found.status_name == "max steps"


def test_training_on_exact_labels(model, data, minima):
    exact = train(model, data, "semantic", exact=True)
    assert bool(exact.ok) and np.max(abs(np.asarray(exact.Q) - minima["semantic"].Q)) > 1e-3
    assert np.max(abs(np.asarray(raw_risk(model, data, exact.Q, True)[1]))) < 1e-9


@pytest.mark.parametrize(("optimizer", "rate"), [("gd", 1e4), ("adam", 1e307)])
def test_a_diverging_run_keeps_its_last_finite_state(model, data, optimizer, rate):
    result = train(model, data, "semantic", optimizer=optimizer, rate=rate)
    assert int(result.status) == Status.nonfinite and int(result.iterations) < 1000
    assert np.all(np.isfinite(result.Q)) and np.isfinite(result.train_loss)


@pytest.mark.full
def test_instances_by_vmap_and_one_bad_entry(model, data):
    both = jax.tree.map(lambda *a: np.stack(a), data, sample_data(model, D, 1.5, jax.random.key(1)))
    rates = np.array([0.3, 1e4])
    runs = jax.jit(jax.vmap(lambda data, rate: train(model, data, "semantic", optimizer="gd", rate=rate)))(both, rates)
    single = train(model, data, "semantic", optimizer="gd", rate=0.3)
    np.testing.assert_allclose(runs.Q[0], single.Q, atol=1e-9)
    assert runs.status.tolist() == [int(single.status), Status.nonfinite] and np.all(np.isfinite(runs.Q))


@pytest.mark.full
def test_single_precision():
    single = ta.DotProduct(dtype=jnp.float32)
    data = sample_data(single, 100, 1.5, jax.random.key(0))
    result = train(single, data, "semantic", optimizer="lbfgs", steps=200, tol=1e-6)
    assert result.Q.dtype == jnp.float32 and float(result.gradient_norm) < 1e-5


def test_printed_runs_on_data(data, minima):
    assert repr(data).startswith("Data(60 sentences of 2 tokens in 40 dimensions, alpha = 1.5, float64, with teacher")
    run, q = minima["semantic"], float(minima["semantic"].overlaps.q[0, 0, 0])
    assert repr(run).startswith(f"Training(Q of shape (40, 1) after {run.iterations} iterations; q=")
    names = ["q", "theta", "m", "train_loss", "gradient_norm", "iterations", "status"]  # training weights have no V
    assert list(run.to_dict()) == names and run.to_dict()["q"] == q
    mean = ta.results.Average(jnp.array(0.5), jnp.array(0.01))
    assert repr(mean) == "Average(0.500(10))" and f"{mean:.2f} {mean}" == "0.50 0.500(10)"
    baseline = ta.finite.linear_baseline(data)
    assert repr(baseline) == f"Quantity(gen_error = {with_error(baseline.value, baseline.stderr)}; converged)"
    assert "W            [[" in str(baseline) and "train_error" in str(baseline)
    assert baseline.to_dict()["W"] == baseline.W.tolist()
