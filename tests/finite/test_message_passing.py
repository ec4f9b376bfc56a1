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
from tiedattn_jax.finite.channels import responses, risk_minimiser
from tiedattn_jax.finite.message_passing import Damping, gamp
from tiedattn_jax.finite.products import student_fields
from tiedattn_jax.finite.sampling import sample_data, start
from tiedattn_jax.finite.training import risk, train

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, 250, 2.0, jax.random.key(6))


@pytest.fixture(scope="module")
def semantic(model, data):
    return gamp(model, data, "semantic")


def gradient(model, data, Q):
    return jax.jit(jax.grad(lambda Q: risk(model, data, Q)))(Q)


@pytest.mark.parametrize("init", ["semantic", "positional"])
def test_fixed_points_are_critical_points_of_the_risk(model, data, semantic, init):
    result = semantic if init == "semantic" else gamp(model, data, init)
    assert int(result.status) == Status.converged and int(result.iterations) <= 400 and float(result.damping) <= 0.5
    assert float(jnp.max(jnp.abs(gradient(model, data, result.Q)))) < 1e-10
    assert float(result.gradient_norm) < 1e-10
    np.testing.assert_allclose(result.train_loss, risk(model, data, result.Q) / 250, rtol=1e-13)
    trained = train(model, data, result.Q, optimizer="gd", steps=300, tol=0.0)
    assert float(jnp.max(jnp.abs(trained.Q - result.Q))) < 1e-8
    np.testing.assert_allclose(trained.train_loss, result.train_loss, rtol=1e-10)


def test_training_ends_where_message_passing_does(model, data, semantic):
    trained = train(model, data, "semantic", optimizer="lbfgs", steps=1000)
    assert bool(trained.ok) and bool(semantic.ok)
    assert abs(float(trained.train_loss - semantic.train_loss)) < 1e-10
    np.testing.assert_allclose(trained.Q, semantic.Q, atol=1e-6)


def test_variances_and_messages_satisfy_their_equations(model, data, semantic):
    """Variances and messages satisfy their equations, with A from a regression and without the code of the step."""
    V = np.asarray(semantic.overlaps.V)
    np.testing.assert_allclose(V, responses(data, semantic.C), rtol=1e-12)
    Z = np.swapaxes((data.x @ semantic.Q)[..., 0], 0, 1)
    g = -np.asarray(jax.jit(jax.vmap(lambda z, y: jax.grad(model.loss)(z[:, None], y)[:, 0]))(Z, data.y))
    np.testing.assert_allclose(semantic.g[:, 0].T, g, atol=1e-12)
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
    V = result.overlaps.V
    ratio = float(jnp.mean(V) / jnp.mean(semantic.overlaps.V))
    assert 1e-6 < abs(ratio - 1) < 0.15
    Z = np.swapaxes((data.x @ result.Q)[..., 0], 0, 1)
    hess = jax.jit(jax.vmap(lambda z, y: jax.hessian(lambda z: model.loss(z[:, None], y))(z)))(Z, data.y)
    variances = np.asarray(V)[:, 0]
    slope = (np.linalg.inv(np.eye(2) + variances * np.asarray(hess)) - np.eye(2)) / variances
    A = -0.25 / 250 * np.sum(np.trace(slope, axis1=1, axis2=2))
    np.testing.assert_allclose(V.ravel(), 0.25 / (model.lam + A), rtol=1e-9)


def test_history_ends_at_the_result(semantic):
    k = int(semantic.iterations)
    for history, last in zip(jax.tree.leaves(semantic.history), jax.tree.leaves(semantic.overlaps), strict=True):
        np.testing.assert_array_equal(history[k], last)
        assert np.all(np.isnan(history[k + 1 :])) and np.all(np.isfinite(history[: k + 1]))
    assert semantic.history.q.shape == (1001, 2, 1, 1) and semantic.residuals.shape == (1000,)
    assert semantic.residuals[k - 1] == semantic.residual and np.all(np.isnan(semantic.residuals[k:]))


def test_instances_by_vmap_equal_single_ones(model, data, semantic):
    other_data = sample_data(model, 250, 2.0, jax.random.key(2))
    both = jax.tree.map(lambda *a: np.stack(a), other_data, data)
    runs = jax.jit(jax.vmap(lambda data: gamp(model, data, "semantic")))(both)
    np.testing.assert_allclose(runs.Q[1], semantic.Q, atol=1e-9)
    assert runs.status.tolist() == [0, 0] and float(runs.gradient_norm[0]) < 1e-10


def test_how_the_damping_is_found():
    def updated(damping, *residuals, possible=True, search=False, automatic=True):
        for residual in residuals:
            damping = damping.after(*map(jnp.asarray, (residual, possible, search, automatic)))
        return damping

    initial = Damping(*map(jnp.asarray, (0.3, 0.5, 1.0, 1.0, 0)))
    np.testing.assert_allclose(updated(initial, 0.9, 0.8).share, 0.3 * 1.03**2)
    np.testing.assert_allclose(updated(initial, 0.9, search=True).share, 0.3)
    np.testing.assert_allclose(updated(initial, 1.2, 1.6).share, 0.3 * 1.03**2)  # two rises
    np.testing.assert_allclose(updated(initial, 1.2, 1.3, 1.4).share, 0.3 * 1.03**3)  # three small ones
    reduced = updated(initial, 1.2, 1.4, 1.6)
    np.testing.assert_allclose([reduced.share, reduced.ceiling, reduced.lowest], [0.15 * 1.03**2, 0.24 * 1.03**2, 1.6])
    np.testing.assert_allclose(updated(initial, 0.9, 1.2, 1.4).share, 0.3 * 1.03**3)  # two, after a fall
    np.testing.assert_allclose(updated(reduced, 1.0).ceiling, reduced.ceiling * 1.002)
    np.testing.assert_allclose(updated(initial, *[0.5] * 60).share, 0.5)
    low = eqx.tree_at(lambda d: d.share, initial, jnp.asarray(0.06))
    np.testing.assert_allclose(updated(low, 1.2, 1.4, 1.6).share, 0.05)
    np.testing.assert_allclose(updated(low, jnp.inf, jnp.inf, possible=False).share, 0.015)
    np.testing.assert_allclose(updated(low, jnp.inf, possible=False, automatic=False).share, 0.06)


def test_undamped_runs_diverge_and_say_so(model, data):
    result = gamp(model, data, "semantic", damping=1.0)
    assert int(result.status) == Status.left_domain and np.isinf(result.residual) and float(result.gradient_norm) > 1e-3
    assert np.all(np.isfinite(result.Q)) and np.isfinite(result.train_loss) and np.all(np.isfinite(result.overlaps.V))
    # At a minimum the ridge term is at most the risk of zero weights.
    bound = max(float(risk(model, data, Q)) for Q in (0 * data.teacher, data.teacher))
    assert 0.5 * float(model.lam) * float(jnp.sum(result.Q**2)) <= bound


@pytest.mark.parametrize("strength", [0.0, 0.002])
def test_weights_are_too_large_beyond_the_risks_of_the_start_and_of_zero(model, data, semantic, strength):
    """Ridge and penalty alone are then larger than the risk at a minimum can be."""
    if strength:
        model = ta.DotProduct(lam=model.lam, penalty=ta.L1(strength))
    fields = student_fields(data.x, semantic.Q)
    learner, state = risk_minimiser(model, data, semantic.Q, fields, None, jnp.asarray(True), jnp.asarray(False))
    low, high = (risk(model, data, Q) for Q in (semantic.Q, 0 * semantic.Q))
    ridge = 0.5 * model.lam * jnp.sum(semantic.Q**2)
    size = strength * jnp.sum(jnp.abs(semantic.Q))
    assert low < high
    for cost, status in (((low + high) / 2, Status.converged), (1.1 * high, Status.left_domain)):
        factor = (jnp.sqrt(size**2 + 4 * ridge * cost) - size) / (2 * ridge)  # ridge factor^2 + size factor = cost
        trial = eqx.tree_at(lambda s: s.Q, state, factor * semantic.Q)
        assert int(learner.outcome(state, state, trial)[1]) == status


def test_a_run_that_blew_up_says_so(model, data):
    result = gamp(model, data, 1e160 * data.teacher)
    assert int(result.status) == Status.nonfinite and int(result.iterations) < 50 and np.all(np.isfinite(result.Q))


def test_the_first_steps_search_for_the_lowest_minimisers(model, data):
    """The first steps search for the lowest minimisers, as wells near a random start are wrong for some sentences."""
    weights = start(model, data, "random", jax.random.key(1))
    result = gamp(model, data, weights, tol=1e300, damping=0.1)
    assert int(result.iterations) == 1 and bool(result.ok)
    V = 0.25 / (2 * model.lam) * jnp.ones((2, 1, 1))
    Z, y = student_fields(data.x, weights), data.fields
    g = -gradient_at_nodes(model, Z, y)
    h = Z - V * g
    z = h + V * (g + (result.g - g) / 0.1)
    np.testing.assert_allclose(z, jax.jit(prox)(ProxProblem(model, V, y), h).z, atol=1e-9)
    undamped = gamp(model, data, weights, tol=1e300, damping=1.0)  # it starts with messages zero
    np.testing.assert_allclose(V * undamped.g, jax.jit(prox)(ProxProblem(model, V, y), Z).z - Z, atol=1e-9)
    minimisers, _, _ = jax.jit(partial(descend, tol=1e-7))(ProxProblem(model, V, y), Z, h)
    assert 0.01 < float(jnp.mean(jnp.max(jnp.abs(minimisers - z), (0, 1)) > 0.01)) < 0.5


def test_sentences_stay_in_their_wells(model):
    """Guarded Newton steps keep sentences in their wells; with single unguarded ones these two instances diverge."""
    settled, unsettled = (gamp(model, sample_data(model, 250, 2.0, jax.random.key(k)), "positional") for k in (9, 21))
    assert bool(settled.ok) and float(settled.gradient_norm) < 1e-10
    assert int(unsettled.status) == Status.max_steps and 1e-12 < float(unsettled.residual) < 0.2
    assert float(unsettled.gradient_norm) < 1e-2 and float(jnp.mean(unsettled.overlaps.q)) < 0.1


def test_a_fixed_damping_is_used(model, data, semantic):
    damped = gamp(model, data, "semantic", damping=0.1)
    assert float(damped.damping) == 0.1 and int(damped.iterations) > int(semantic.iterations)
    np.testing.assert_allclose(damped.Q, semantic.Q, atol=1e-8)
    assert int(gamp(model, data, "semantic", tol=1e-4).iterations) < int(semantic.iterations)


def test_given_starts(model, data, semantic):
    restarted = gamp(model, data, semantic.Q, tol=1e-9)
    np.testing.assert_allclose(restarted.Q, semantic.Q, atol=1e-7)
    q = restarted.history.q  # at the critical point only the variances move, not the estimate
    np.testing.assert_allclose(q, jnp.where(jnp.isnan(q), jnp.nan, semantic.overlaps.q))
    first, second = (gamp(model, data, "random", key=jax.random.key(k), steps=60) for k in (1, 2))
    assert float(jnp.max(jnp.abs(first.Q - second.Q))) > 1e-3


def test_going_on_from_an_earlier_run(model, data, semantic):
    interrupted = gamp(model, data, "semantic", steps=60)
    assert int(interrupted.iterations) == 60 and int(interrupted.status) == Status.max_steps
    resumed = gamp(model, data, interrupted)
    np.testing.assert_allclose(resumed.Q, semantic.Q, atol=1e-9)
    assert int(resumed.iterations) < int(semantic.iterations)
    assert int(gamp(model, data, semantic, tol=1e-11).iterations) <= 2


def test_variances_by_coordinate_equal_the_isotropic_ones(model, data, semantic):
    by_coordinate = eqx.tree_at(lambda a: a.gamma, data, jnp.full((2, 250), 0.25))
    result = gamp(model, by_coordinate, "semantic")
    assert result.C.shape == (250, 1, 1)
    np.testing.assert_allclose(result.Q, semantic.Q, atol=1e-9)


@pytest.mark.slow
def test_a_student_of_rank_two():
    model = ta.DotProduct(rank=2)
    data = sample_data(model, 120, 2.0, jax.random.key(0))
    result = gamp(model, data, "semantic", tol=1e-10)
    assert bool(result.ok) and result.overlaps.q.shape == (2, 2, 2)
    assert float(jnp.max(jnp.abs(gradient(model, data, result.Q)))) < 1e-9


def test_single_precision():
    model = ta.DotProduct(dtype=jnp.float32)
    data = sample_data(model, 250, 2.0, jax.random.key(6))
    result = gamp(model, data, "semantic")
    assert result.Q.dtype == jnp.float32 and bool(result.ok) and float(result.gradient_norm) < 1e-5
