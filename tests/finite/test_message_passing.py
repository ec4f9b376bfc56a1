"""GAMP ends at critical points of the risk; see test_instances for the theory."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages.prox import descend, gradient_at_nodes, prox
from tiedattn_jax.base.results import Status
from tiedattn_jax.finite.data import start, student_fields
from tiedattn_jax.finite.message_passing import Damping, gamp, responses
from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.finite.training import risk, train

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, 250, 2.0, jax.random.key(6))


@pytest.fixture(scope="module")
def semantic(model, data):
    return gamp(model, data, "semantic")


def gradient(model, data, Q):
    return jax.jit(jax.grad(lambda Q: risk(model, data, Q)))(Q)


@pytest.fixture(scope="module")
def positional(model, data):
    return gamp(model, data, "positional")


@pytest.mark.parametrize("init", ["semantic", "positional"])
def test_fixed_points_are_critical_points_of_the_risk(model, data, init, request):
    found = request.getfixturevalue(init)
    assert int(found.status) == Status.converged and int(found.iterations) <= 400 and float(found.damping) <= 0.5
    assert float(jnp.max(jnp.abs(gradient(model, data, found.Q)))) < 1e-10
    assert float(found.gradient_norm) < 1e-10
    np.testing.assert_allclose(found.train_loss, risk(model, data, found.Q) / 250, rtol=1e-13)
    moved = train(model, data, found.Q, optimizer="gd", steps=300, tol=0.0)
    assert float(jnp.max(jnp.abs(moved.Q - found.Q))) < 1e-8
    np.testing.assert_allclose(moved.train_loss, found.train_loss, rtol=1e-10)


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
    found = gamp(model, data, "semantic", response="derivative")
    assert bool(found.ok) and float(found.gradient_norm) < 1e-10
    np.testing.assert_allclose(found.Q, semantic.Q, atol=1e-8)
    V = found.overlaps.V
    ratio = float(jnp.mean(V) / jnp.mean(semantic.overlaps.V))
    assert 1e-6 < abs(ratio - 1) < 0.15
    Z = np.swapaxes((data.x @ found.Q)[..., 0], 0, 1)
    hess = jax.jit(jax.vmap(lambda z, y: jax.hessian(lambda z: model.loss(z[:, None], y))(z)))(Z, data.y)
    own = np.asarray(V)[:, 0]
    slope = (np.linalg.inv(np.eye(2) + own * np.asarray(hess)) - np.eye(2)) / own
    A = -0.25 / 250 * np.sum(np.trace(slope, axis1=1, axis2=2))
    np.testing.assert_allclose(V.ravel(), 0.25 / (model.lam + A), rtol=1e-9)


def test_history_ends_at_the_result(semantic):
    k = int(semantic.iterations)
    for past, last in zip(jax.tree.leaves(semantic.history), jax.tree.leaves(semantic.overlaps), strict=True):
        np.testing.assert_array_equal(past[k], last)
        assert np.all(np.isnan(past[k + 1 :])) and np.all(np.isfinite(past[: k + 1]))
    assert semantic.residuals[k - 1] == semantic.residual and np.all(np.isnan(semantic.residuals[k:]))


def test_instances_by_vmap_equal_single_ones(model, data, semantic):
    other = sample_data(model, 250, 2.0, jax.random.key(2))
    both = jax.jit(jax.vmap(lambda data: gamp(model, data, "semantic")))(
        jax.tree.map(lambda *a: np.stack(a), other, data)
    )
    np.testing.assert_allclose(both.Q[1], semantic.Q, atol=1e-9)
    assert both.status.tolist() == [0, 0] and float(both.gradient_norm[0]) < 1e-10


def test_how_the_damping_is_found():
    def after(damping, *residuals, possible=True, search=False, automatic=True):
        for residual in residuals:
            damping = damping.after(*map(jnp.asarray, (residual, possible, search, automatic)))
        return damping

    at = Damping(*map(jnp.asarray, (0.3, 0.5, 1.0, 1.0, 0)))
    np.testing.assert_allclose(after(at, 0.9, 0.8).share, 0.3 * 1.03**2)
    np.testing.assert_allclose(after(at, 0.9, search=True).share, 0.3)
    np.testing.assert_allclose(after(at, 1.2, 1.6).share, 0.3 * 1.03**2)  # two rises
    np.testing.assert_allclose(after(at, 1.2, 1.3, 1.4).share, 0.3 * 1.03**3)  # three small ones
    cut = after(at, 1.2, 1.4, 1.6)
    np.testing.assert_allclose([cut.share, cut.ceiling, cut.least], [0.15 * 1.03**2, 0.24 * 1.03**2, 1.6])
    np.testing.assert_allclose(after(at, *[0.5] * 60).share, 0.5)
    low = eqx.tree_at(lambda d: d.share, at, jnp.asarray(0.06))
    np.testing.assert_allclose(after(low, 1.2, 1.4, 1.6).share, 0.05)
    np.testing.assert_allclose(after(low, jnp.inf, jnp.inf, possible=False).share, 0.015)
    np.testing.assert_allclose(after(low, jnp.inf, possible=False, automatic=False).share, 0.06)


def test_undamped_runs_diverge_and_say_so(model, data):
    found = gamp(model, data, "semantic", damping=1.0)
    assert int(found.status) == Status.left_domain and np.isinf(found.residual) and float(found.gradient_norm) > 1e-3
    assert np.all(np.isfinite(found.Q)) and np.isfinite(found.train_loss) and np.all(np.isfinite(found.overlaps.V))
    # At a minimum the ridge term is at most the risk of zero weights.
    least = max(float(risk(model, data, Q)) for Q in (0 * data.teacher, data.teacher))
    assert 0.5 * float(model.lam) * float(jnp.sum(found.Q**2)) <= least


def test_a_run_that_blew_up_says_so(model, data):
    found = gamp(model, data, 1e160 * data.teacher)
    assert int(found.status) == Status.nonfinite and int(found.iterations) < 50 and np.all(np.isfinite(found.Q))


def test_the_first_steps_search_for_the_lowest_minimisers(model, data):
    """The first steps search for the lowest minimisers, as wells near a random start are wrong for some sentences."""
    begin = start(model, data, "random", jax.random.key(1))
    found = gamp(model, data, begin, tol=1e300, damping=0.1)
    assert int(found.iterations) == 1 and bool(found.ok)
    V = 0.25 / (2 * model.lam) * jnp.ones((2, 1, 1))
    Z, y = student_fields(data.x, begin), data.fields
    g = -gradient_at_nodes(model, Z, y)
    h = Z - V * g
    z = h + V * (g + (found.g - g) / 0.1)
    np.testing.assert_allclose(z, jax.jit(prox)(model, h, V, y).z, atol=1e-9)
    own, _, _ = jax.jit(partial(descend, tol=1e-7))(model, Z, h, V, y)
    assert 0.01 < float(jnp.mean(jnp.max(jnp.abs(own - z), (0, 1)) > 0.01)) < 0.5


def test_sentences_stay_in_their_wells(model):
    """Guarded Newton steps keep sentences in their wells; with single unguarded ones these two instances diverge."""
    settles, rests_not = (gamp(model, sample_data(model, 250, 2.0, jax.random.key(k)), "positional") for k in (9, 21))
    assert bool(settles.ok) and float(settles.gradient_norm) < 1e-10
    assert int(rests_not.status) == Status.max_steps and 1e-12 < float(rests_not.residual) < 0.2
    assert float(rests_not.gradient_norm) < 1e-2 and float(jnp.mean(rests_not.overlaps.q)) < 0.1


def test_a_fixed_damping_is_used(model, data, semantic):
    slow = gamp(model, data, "semantic", damping=0.1)
    assert float(slow.damping) == 0.1 and int(slow.iterations) > int(semantic.iterations)
    np.testing.assert_allclose(slow.Q, semantic.Q, atol=1e-8)
    few = gamp(model, data, "semantic", steps=60)
    assert int(few.iterations) == 60 and int(few.status) == Status.max_steps
    assert int(gamp(model, data, "semantic", tol=1e-4).iterations) < int(semantic.iterations)


def test_given_starts(model, data, semantic):
    stays = gamp(model, data, semantic.Q, tol=1e-9)
    np.testing.assert_allclose(stays.Q, semantic.Q, atol=1e-7)
    # At the critical point only the variances move, not the estimate.
    np.testing.assert_allclose(stays.history.q, jnp.where(jnp.isnan(stays.history.q), jnp.nan, semantic.overlaps.q))
    one, two = (gamp(model, data, "random", key=jax.random.key(k), steps=60) for k in (1, 2))
    assert float(jnp.max(jnp.abs(one.Q - two.Q))) > 1e-3


def test_going_on_from_an_earlier_run(model, data, semantic):
    part = gamp(model, data, "semantic", steps=60)
    assert int(part.status) == Status.max_steps
    rest = gamp(model, data, part)
    np.testing.assert_allclose(rest.Q, semantic.Q, atol=1e-9)
    assert (
        int(rest.iterations) < int(semantic.iterations) and int(gamp(model, data, semantic, tol=1e-11).iterations) <= 2
    )


def test_variances_by_coordinate_equal_the_isotropic_ones(model, data, semantic):
    spread = eqx.tree_at(lambda a: a.gamma, data, jnp.full((2, 250), 0.25))
    found = gamp(model, spread, "semantic")
    assert found.C.shape == (250, 1, 1)
    np.testing.assert_allclose(found.Q, semantic.Q, atol=1e-9)


@pytest.mark.slow
def test_a_student_of_rank_two():
    wide = ta.dot_product(rank=2)
    data = sample_data(wide, 120, 2.0, jax.random.key(0))
    found = gamp(wide, data, "semantic", tol=1e-10)
    assert bool(found.ok) and found.overlaps.q.shape == (2, 2, 2)
    assert float(jnp.max(jnp.abs(gradient(wide, data, found.Q)))) < 1e-9


def test_single_precision():
    small = ta.dot_product(dtype=jnp.float32)
    data = sample_data(small, 250, 2.0, jax.random.key(6))
    found = gamp(small, data, "semantic")
    assert found.Q.dtype == jnp.float32 and bool(found.ok) and float(found.gradient_norm) < 1e-5
