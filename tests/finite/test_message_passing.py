"""GAMP ends at critical points of the risk; see test_instances for the theory."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import ProxProblem, gradient_at_nodes
from tiedattn_jax.averages.prox import descend, prox
from tiedattn_jax.base.results import Status
from tiedattn_jax.finite.channels import responses
from tiedattn_jax.finite.message_passing import gamp
from tiedattn_jax.finite.products import student_fields
from tiedattn_jax.finite.sampling import sample_data, start
from tiedattn_jax.finite.training import risk, train


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, 250, 2.0, jax.random.key(6))


@pytest.fixture(scope="module")
def semantic(model, data):
    return gamp(model, data, "semantic")


risk_and_gradient = eqx.filter_jit(lambda model, data, Q: jax.value_and_grad(lambda Q: risk(model, data, Q))(Q))


@pytest.mark.parametrize("init", ["semantic", "positional"])
def test_fixed_points_are_critical_points_of_the_risk(model, data, semantic, init):
    """Gradient descent stays there, and L-BFGS from the same start ends there."""
    result = semantic if init == "semantic" else gamp(model, data, init)
    assert int(result.status) == Status.converged and int(result.iterations) <= 400 and float(result.damping) <= 0.5
    value, gradient = risk_and_gradient(model, data, result.Q)
    assert np.max(np.abs(gradient)) < 1e-10 and float(result.gradient_norm) < 1e-10
    np.testing.assert_allclose(result.train_loss, value / 250, rtol=1e-13)
    descended = train(model, data, result.Q, optimizer="gd", steps=300, tol=0.0)
    assert np.max(np.abs(np.asarray(descended.Q) - result.Q)) < 1e-8
    np.testing.assert_allclose(descended.train_loss, result.train_loss, rtol=1e-10)
    if init == "semantic":
        trained = train(model, data, init, optimizer="lbfgs", steps=1000)
        assert bool(trained.ok) and abs(float(trained.train_loss - result.train_loss)) < 1e-10
        np.testing.assert_allclose(trained.Q, result.Q, atol=1e-6)


def test_variances_and_messages_satisfy_their_equations(model, data, semantic):
    """Variances and messages satisfy their equations, with A from a regression and without the code of the step."""
    V = np.asarray(semantic.overlaps.V)
    np.testing.assert_allclose(V, responses(data, semantic.C), rtol=1e-12)
    Z = np.swapaxes((np.asarray(data.x) @ semantic.Q)[..., 0], 0, 1)
    g = -np.asarray(jax.jit(jax.vmap(lambda z, y: jax.grad(model.loss)(z[:, None], y)[:, 0]))(Z, data.y))
    np.testing.assert_allclose(np.asarray(semantic.g)[:, 0].T, g, atol=1e-12)
    A = 0.0
    for l in range(2):
        regressors = np.stack([np.ones(500), Z[:, l] - V[l, 0, 0] * g[:, l], np.asarray(data.y)[:, l, 0]], 1)
        A -= 0.25 * 2 * np.linalg.lstsq(regressors, g[:, l], rcond=None)[0][1]
    np.testing.assert_allclose(V.ravel(), 0.25 / (model.lam + A), rtol=1e-9)


def test_responses_by_derivatives(model, data, semantic):
    """The responses of Algorithm 1 give another estimate of V, and the same critical point."""
    result = gamp(model, data, "semantic", response="derivative")
    assert bool(result.ok) and float(result.gradient_norm) < 1e-10
    np.testing.assert_allclose(result.Q, semantic.Q, atol=1e-8)
    V = np.asarray(result.overlaps.V)[:, 0]
    assert 1e-6 < abs(np.mean(V) / np.mean(semantic.overlaps.V) - 1) < 0.15
    Z = np.swapaxes((np.asarray(data.x) @ result.Q)[..., 0], 0, 1)
    hess = jax.jit(jax.vmap(lambda z, y: jax.hessian(lambda z: model.loss(z[:, None], y))(z)))(Z, data.y)
    slope = (np.linalg.inv(np.eye(2) + V * np.asarray(hess)) - np.eye(2)) / V
    A = -0.25 / 250 * np.sum(np.trace(slope, axis1=1, axis2=2))
    np.testing.assert_allclose(V[:, 0], 0.25 / (model.lam + A), rtol=1e-9)


@pytest.mark.full
def test_kinds_of_few_sentences():
    """A kind of no sentence, and one of one or two, leave no response undetermined."""
    shares = {(0, 0): 0.4985, (1, 1): 0.4985, (0, 1): 0.001, (1, 0): 0.002}
    model = ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.25, 0.25], shares))
    result = gamp(model, sample_data(model, 200, 2.0, jax.random.key(0)), "semantic")
    assert bool(result.ok) and float(result.gradient_norm) < 1e-10 and np.all(np.isfinite(result.overlaps.V))


@pytest.mark.full
@pytest.mark.parametrize(("lam", "d", "alpha"), [(1.0, 60, 2.0), (0.01, 50, 0.02)])
def test_a_student_that_vanishes(lam, d, alpha):
    """A strong ridge, or a single sentence, leaves no student; zero weights are an end like any other."""
    model = ta.DotProduct(lam=lam)
    result = gamp(model, sample_data(model, d, alpha, jax.random.key(0)), "semantic")
    assert bool(result.ok) and np.max(np.abs(result.Q)) < 1e-20


def test_history_ends_at_the_result(semantic):
    k = int(semantic.iterations)
    for history, last in zip(jax.tree.leaves(semantic.history), jax.tree.leaves(semantic.overlaps), strict=True):
        history = np.asarray(history)
        np.testing.assert_array_equal(history[k], last)
        assert np.all(np.isnan(history[k + 1 :])) and np.all(np.isfinite(history[: k + 1]))
    residuals = np.asarray(semantic.residuals)
    assert semantic.history.q.shape == (1001, 2, 1, 1) and residuals.shape == (1000,)
    assert residuals[k - 1] == semantic.residual and np.all(np.isnan(residuals[k:]))
    assert len(semantic.plot().axes) == 4


@pytest.mark.full
def test_instances_by_vmap_equal_single_ones(model, data, semantic):
    other_data = sample_data(model, 250, 2.0, jax.random.key(2))
    both = jax.tree.map(lambda *a: np.stack(a), other_data, data)
    runs = jax.jit(jax.vmap(lambda data: gamp(model, data, "semantic")))(both)
    np.testing.assert_allclose(runs.Q[1], semantic.Q, atol=1e-9)
    assert runs.status.tolist() == [0, 0] and float(runs.gradient_norm[0]) < 1e-10


def test_undamped_runs_diverge_and_say_so(model, data):
    result = gamp(model, data, "semantic", damping=1.0)
    assert int(result.status) == Status.left_domain and np.isinf(result.residual) and float(result.gradient_norm) > 1e-3
    assert np.all(np.isfinite(result.Q)) and np.isfinite(result.train_loss) and np.all(np.isfinite(result.overlaps.V))
    # At a minimum the ridge term is at most the risk of zero weights.
    teacher = np.asarray(data.teacher)
    bound = max(float(risk_and_gradient(model, data, Q)[0]) for Q in (0 * teacher, teacher))
    assert 0.5 * float(model.lam) * np.sum(np.square(result.Q)) <= bound


def test_a_run_that_blew_up_says_so(model, data):
    result = gamp(model, data, 1e160 * np.asarray(data.teacher))
    assert int(result.status) == Status.nonfinite and int(result.iterations) < 50 and np.all(np.isfinite(result.Q))


def test_the_first_steps_search_for_the_lowest_minimisers(model, data):
    """The first steps search for the lowest minimisers, as wells near a random start are wrong for some sentences."""
    weights = start(model, data, "random", jax.random.key(1))
    result = gamp(model, data, weights, tol=1e300, damping=0.1)
    assert int(result.iterations) == 1 and bool(result.ok)
    V, y = np.full((2, 1, 1), 0.25 / (2 * float(model.lam))), data.fields
    problem, Z = ProxProblem(model, jnp.asarray(V), y), np.asarray(student_fields(data.x, weights))
    g = -np.asarray(gradient_at_nodes(model, Z, y))
    h = Z - V * g
    z = h + V * (g + (np.asarray(result.g) - g) / 0.1)
    np.testing.assert_allclose(z, jax.jit(prox)(problem, h).z, atol=1e-9)
    undamped = gamp(model, data, weights, tol=1e300, damping=1.0)  # it starts with messages zero
    np.testing.assert_allclose(V * undamped.g, jax.jit(prox)(problem, Z).z - Z, atol=1e-9)
    minimisers, _, _ = jax.jit(partial(descend, tol=1e-7))(problem, Z, h)
    assert 0.01 < np.mean(np.max(np.abs(np.asarray(minimisers) - z), (0, 1)) > 0.01) < 0.5


def test_sentences_stay_in_their_wells(model):
    """Guarded Newton steps keep sentences in their wells; with single unguarded ones these two instances diverge."""
    settled, unsettled = (gamp(model, sample_data(model, 250, 2.0, jax.random.key(k)), "positional") for k in (9, 30))
    assert bool(settled.ok) and float(settled.gradient_norm) < 1e-10
    assert int(unsettled.status) == Status.max_steps and 1e-12 < float(unsettled.residual) < 0.2
    assert float(unsettled.gradient_norm) < 1e-2 and np.mean(unsettled.overlaps.q) < 0.1


def test_damping_tolerance_and_a_given_start(model, data, semantic):
    damped = gamp(model, data, "semantic", damping=0.1)
    assert float(damped.damping) == 0.1 and int(damped.iterations) > int(semantic.iterations)
    np.testing.assert_allclose(damped.Q, semantic.Q, atol=1e-8)
    assert int(gamp(model, data, "semantic", tol=1e-4).iterations) < int(semantic.iterations)
    restarted = gamp(model, data, semantic.Q, tol=1e-9)
    np.testing.assert_allclose(restarted.Q, semantic.Q, atol=1e-7)
    q = np.asarray(restarted.history.q)  # at the critical point only the variances move, not the estimate
    np.testing.assert_allclose(q, np.where(np.isnan(q), np.nan, semantic.overlaps.q))


@pytest.mark.full
def test_going_on_from_an_earlier_run_and_random_starts(model, data, semantic):
    interrupted = gamp(model, data, "semantic", steps=60)
    assert int(interrupted.iterations) == 60 and int(interrupted.status) == Status.max_steps
    resumed = gamp(model, data, interrupted)
    np.testing.assert_allclose(resumed.Q, semantic.Q, atol=1e-9)
    assert int(resumed.iterations) < int(semantic.iterations)
    assert int(gamp(model, data, semantic, tol=1e-11).iterations) <= 2
    first, second = (gamp(model, data, "random", key=jax.random.key(k), steps=60) for k in (1, 2))
    assert np.max(np.abs(np.asarray(first.Q) - second.Q)) > 1e-3


@pytest.mark.full
def test_variances_by_coordinate_equal_the_isotropic_ones(model, data, semantic):
    by_coordinate = eqx.tree_at(lambda a: a.gamma, data, jnp.asarray(np.full((2, 250), 0.25)))
    result = gamp(model, by_coordinate, "semantic")
    assert result.C.shape == (250, 1, 1)
    np.testing.assert_allclose(result.Q, semantic.Q, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "d", "tol", "limit"), [({"rank": 2}, 120, 1e-10, 1e-9), ({"dtype": jnp.float32}, 250, None, 1e-5)]
)
def test_two_columns_and_single_precision(options, d, tol, limit):
    model = ta.DotProduct(**options)
    data = sample_data(model, d, 2.0, jax.random.key(0 if tol else 6))
    result = gamp(model, data, "semantic", **({"tol": tol} if tol else {}))
    r, dtype = options.get("rank", 1), options.get("dtype", jnp.float64)
    assert bool(result.ok) and result.overlaps.q.shape == (2, r, r) and result.Q.dtype == dtype
    assert max(float(result.gradient_norm), np.max(np.abs(risk_and_gradient(model, data, result.Q)[1]))) < limit
