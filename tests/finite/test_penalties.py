"""Penalties on the weights besides the ridge, at finite size."""

import equinox as eqx
import jax
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.finite.message_passing import gamp
from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.finite.training import risk, train

STRENGTH = 0.01
# Value and gradient of the risk without the L1 term, from a model without it.
without_l1 = eqx.filter_jit(lambda data, Q: jax.value_and_grad(lambda Q: risk(ta.DotProduct(lam=0.005), data, Q))(Q))


@pytest.fixture(scope="module")
def net():
    return ta.DotProduct(lam=0.005, penalty=ta.L1(STRENGTH))


@pytest.fixture(scope="module")
def data(net):
    return sample_data(net, 150, 3.0, jax.random.key(0))


@pytest.fixture(scope="module")
def solution(net, data):
    return gamp(net, data, "semantic")


@pytest.mark.full
def test_message_passing_ends_at_a_critical_point(net, data, solution):
    """GAMP ends at a critical point: the subgradient of |w| is its sign, or in [-1, 1] where w is exactly 0."""
    assert bool(solution.ok) and float(solution.gradient_norm) < 1e-10
    Q = np.asarray(solution.Q)
    (value, slope), zero = map(np.asarray, without_l1(data, Q)), Q == 0
    assert 0.1 < np.mean(zero) < 0.9
    np.testing.assert_allclose(np.where(zero, 0.0, slope + STRENGTH * np.sign(Q)), 0, atol=1e-10)
    assert np.max(abs(np.where(zero, slope, 0.0))) < STRENGTH
    total = value + STRENGTH * np.sum(abs(Q))
    np.testing.assert_allclose(solution.train_loss, total / 150, rtol=1e-12)
    np.testing.assert_allclose(eqx.filter_jit(risk)(net, data, Q), total, rtol=1e-12)


@pytest.mark.full
def test_variances_of_the_weights(solution):
    """Weights that are zero have no variance, the others 1 / (lambda + A), and V is their mean times sigma^2."""
    C, zero = np.asarray(solution.C)[:, 0, 0], np.asarray(solution.Q)[:, 0] == 0
    assert np.all(C[zero] < 1e-10) and np.ptp(C[~zero]) < 1e-10
    np.testing.assert_allclose(solution.overlaps.V[:, 0, 0], 0.25 * np.mean(C), rtol=1e-10)


def test_training_by_proximal_steps(net, data):
    """The first steps are those by hand."""
    Q, losses = np.asarray(data.teacher), []
    for _ in range(4):
        value, slope = map(np.asarray, without_l1(data, Q))
        losses.append((value + STRENGTH * np.sum(abs(Q))) / 150)
        Q = Q - 0.15 * slope
        Q = np.sign(Q) * np.maximum(abs(Q) - 0.15 * STRENGTH, 0)
    np.testing.assert_allclose(train(net, data, "semantic").losses[:4], losses, rtol=1e-12)


@pytest.mark.full
def test_training_goes_to_the_minimum_beside_it(net, data, solution):
    converged = train(net, data, np.asarray(solution.Q) + 1e-3, rate=1.0, tol=1e-9)
    assert bool(converged.ok) and np.all(np.diff(converged.losses[: int(converged.iterations) + 1]) < 1e-15)
    np.testing.assert_allclose(converged.Q, solution.Q, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(converged.Q) == 0, np.asarray(solution.Q) == 0)


@pytest.mark.full
def test_two_columns():
    """With two columns, message passing ends where training stays, and the columns of a weight vanish one by one."""
    model = ta.UntiedDotProduct(lam=0.01, penalty=ta.L1(STRENGTH), tied_teacher=True)
    data = sample_data(model, 60, 4.0, jax.random.key(1))
    result = gamp(model, data, "positional")
    assert bool(result.ok) and float(result.gradient_norm) < 1e-10
    zero = np.asarray(result.Q) == 0
    assert 0 < np.sum(zero[:, 0] & ~zero[:, 1]) and 0 < np.sum(zero[:, 0] & zero[:, 1])
    assert np.all(np.abs(np.where(zero[:, :, None] | zero[:, None, :], result.C, 0)) < 1e-10)
    np.testing.assert_allclose(train(model, data, result.Q, steps=3).Q, result.Q, atol=1e-10)


@pytest.mark.full
def test_theory():
    """Twelve instances at d = 800 agree with the theory of an L1 penalty within error bars."""
    model = ta.DotProduct(lam=0.01, penalty=ta.L1(0.01))
    keys, options = jax.random.split(jax.random.key(0), 12), {"nodes": ta.Lines(5), "normalise": True}
    result = ta.run_instances(model, 800, 3.0, lambda data, key: gamp(model, data, "semantic"), keys, **options)
    assert result.ok.all() and not result.values("finished").any()
    for name, (_, theory, gap, bar) in result.difference("semantic").items():
        assert abs(gap) < 4 * bar + 0.01 * theory or theory == 0, name
