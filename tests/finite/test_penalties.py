"""Penalties on the weights besides the ridge, at finite size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.finite.message_passing import gamp
from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.finite.training import risk, train

pytestmark = pytest.mark.usefixtures("fast_compilation")
STRENGTH = 0.01


@pytest.fixture(scope="module")
def net():
    return ta.DotProduct(lam=0.005, penalty=ta.L1(STRENGTH))


@pytest.fixture(scope="module")
def data(net):
    return sample_data(net, 150, 3.0, jax.random.key(0))


@pytest.fixture(scope="module")
def solution(net, data):
    return gamp(net, data, "semantic")


def slope_without_l1(data, Q):
    """Gradient of the risk without the L1 term, from a model without it."""
    return jax.grad(lambda Q: risk(ta.DotProduct(lam=0.005), data, Q))(Q)


def test_message_passing_ends_at_a_critical_point(net, data, solution):
    """GAMP ends at a critical point: the subgradient of |w| is its sign, or in [-1, 1] where w is exactly 0."""
    assert bool(solution.ok) and float(solution.gradient_norm) < 1e-10
    slope, zero = slope_without_l1(data, solution.Q), solution.Q == 0
    assert 0.1 < jnp.mean(zero) < 0.9
    np.testing.assert_allclose(jnp.where(zero, 0.0, slope + STRENGTH * jnp.sign(solution.Q)), 0, atol=1e-10)
    assert jnp.max(jnp.abs(jnp.where(zero, slope, 0.0))) < STRENGTH
    total = risk(ta.DotProduct(lam=0.005), data, solution.Q) + STRENGTH * jnp.sum(jnp.abs(solution.Q))
    np.testing.assert_allclose([solution.train_loss, risk(net, data, solution.Q) / 150], total / 150, rtol=1e-12)


def test_variances_of_the_weights(net, data, solution):
    """Weights that are zero have no variance, the others 1 / (lambda + A), and V is their mean times sigma^2."""
    C, zero = solution.C[:, 0, 0], solution.Q[:, 0] == 0
    assert np.all(C[zero] < 1e-10) and np.ptp(C[~zero]) < 1e-10
    np.testing.assert_allclose(solution.overlaps.V[:, 0, 0], 0.25 * jnp.mean(C), rtol=1e-10)


def test_training_by_proximal_steps(net, data, solution):
    Q = data.teacher
    for _ in range(3):
        Q = Q - 0.15 * slope_without_l1(data, Q)
        Q = jnp.sign(Q) * jnp.maximum(jnp.abs(Q) - 0.15 * STRENGTH, 0)
    trained = train(net, data, "semantic", steps=3)
    np.testing.assert_allclose(trained.Q, Q, atol=1e-13)
    np.testing.assert_allclose(trained.losses[3], risk(net, data, Q) / 150, rtol=1e-12)
    converged = train(net, data, solution.Q + 1e-3, rate=1.0, tol=1e-9)
    assert bool(converged.ok) and np.all(np.diff(converged.losses[: int(converged.iterations) + 1]) < 1e-15)
    np.testing.assert_allclose(converged.Q, solution.Q, atol=1e-6)
    np.testing.assert_array_equal(converged.Q == 0, solution.Q == 0)


def test_two_columns():
    """With two columns, message passing ends where training stays, and the columns of a weight vanish one by one."""
    model = ta.UntiedDotProduct(lam=0.01, penalty=ta.L1(STRENGTH), tied_teacher=True)
    data = sample_data(model, 60, 4.0, jax.random.key(1))
    result = gamp(model, data, "positional")
    assert bool(result.ok) and float(result.gradient_norm) < 1e-10
    zero = result.Q == 0
    assert 0 < jnp.sum(zero[:, 0] & ~zero[:, 1]) and 0 < jnp.sum(zero[:, 0] & zero[:, 1])
    assert np.all(np.abs(np.where(zero[:, :, None] | zero[:, None, :], result.C, 0)) < 1e-10)
    restarted = train(model, data, result.Q, steps=3)
    np.testing.assert_allclose(restarted.Q, result.Q, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_optimisers_without_proximal_steps_are_refused(net, data, optimizer):
    with pytest.raises(ta.InputError, match="optimizer must be gd for a model with a penalty, got optimizer="):
        train(net, data, "semantic", optimizer=optimizer)


@pytest.mark.slow
def test_theory():
    """Twelve instances at d = 800 agree with the theory of an L1 penalty within error bars."""
    model = ta.DotProduct(lam=0.01, penalty=ta.L1(0.01))
    keys, options = jax.random.split(jax.random.key(0), 12), {"nodes": ta.Lines(5), "normalise": True}
    result = ta.run_instances(model, 800, 3.0, lambda data, key: gamp(model, data, "semantic"), keys, **options)
    assert result.ok.all() and not result.values("finished").any()
    for name, (_, theory, gap, bar) in result.difference("semantic").items():
        assert abs(gap) < 4 * bar + 0.01 * theory or theory == 0, name
