"""The minimiser of a penalised weight and its response, and what a penalty must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penalties import Quadratic

import tiedattn_jax as ta
from tiedattn_jax.model.penalties import check_penalty, minimiser, minimiser_and_response

pytestmark = pytest.mark.usefixtures("fast_compilation")
STRENGTH = 0.6


def problem(r, count=6, seed=0):
    """Positive definite matrices and fields, of which some give weights that are zero."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(count, r, r))
    return root @ root.swapaxes(1, 2) + 0.5 * np.eye(r), 1.2 * rng.normal(size=(count, r))


def test_the_l1_penalty():
    penalty = ta.L1(0.3)
    w = jnp.array([-2.0, -0.1, 0.0, 0.1, 2.0])
    np.testing.assert_allclose(penalty.value(w), [0.6, 0.03, 0, 0.03, 0.6], rtol=1e-12)
    np.testing.assert_allclose(penalty.prox(w, jnp.full(5, 0.5)), [-1.85, 0, 0, 0, 1.85], rtol=1e-12)
    assert penalty.kinks == (0.0,) and ta.Penalty().kinks == () and float(ta.L1(0.0).strength) == 0.0
    assert "0.3" in str(penalty)
    assert float(ta.DotProduct(penalty=penalty).penalty_of(w[:, None])) == pytest.approx(1.26)
    assert ta.DotProduct().penalty_of(w) == 0.0


@pytest.mark.parametrize("r", [1, 2, 3])
def test_the_slope_at_the_minimiser_is_balanced(r):
    Lam, b = problem(r)
    w, response = jax.jit(minimiser_and_response)(ta.L1(STRENGTH), jnp.asarray(Lam), jnp.asarray(b))
    np.testing.assert_allclose(minimiser(ta.L1(STRENGTH), jnp.asarray(Lam), jnp.asarray(b)), w, rtol=1e-10)
    w = np.asarray(w)
    assert np.any(w == 0) and np.any(w != 0)
    # The slope of the other terms is balanced by that of the penalty, which is anything up to its strength at zero.
    slope = np.einsum("kab,kb->ka", Lam, w) - b
    np.testing.assert_allclose(slope[w != 0], -STRENGTH * np.sign(w[w != 0]), rtol=1e-9)
    assert np.all(np.abs(slope[w == 0]) <= STRENGTH)
    for k in range(len(b)):
        active = np.flatnonzero(np.asarray(w[k]))
        expected = np.zeros((r, r))
        expected[np.ix_(active, active)] = np.linalg.inv(Lam[k][np.ix_(active, active)])
        np.testing.assert_allclose(response[k], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("r", [1, 2])
def test_derivatives_of_a_minimiser(r):
    """They are those of the inverse matrix for a quadratic penalty, in fields, matrices and the penalty's number."""
    Lam, b = map(jnp.asarray, problem(r, seed=1))

    def exact(k, Lam, b):
        return jnp.linalg.solve(Lam + k * jnp.eye(r), b[..., None])[..., 0]

    point, direction = (jnp.asarray(0.7), Lam, b), (jnp.asarray(0.3), 0.1 * jnp.ones_like(Lam), b[::-1])
    actual = jax.jit(lambda p, d: jax.jvp(lambda k, Lam, b: minimiser(Quadratic(k), Lam, b), p, d))(point, direction)
    for a, e in zip(actual, jax.jvp(exact, point, direction), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-12)


class Huber(ta.Penalty):
    """A penalty that bends by `bend` at zero, less `dent` times a square."""

    dent: float = 0.0
    odd: float = 0.0

    def value(self, w):
        return jnp.abs(w) - self.dent * w**2 + self.odd * w

    def prox(self, v, c):
        shifted = (v - c * self.odd) / (1 - 2 * c * self.dent)
        return jnp.sign(shifted) * jnp.maximum(jnp.abs(shifted) - c / (1 - 2 * c * self.dent), 0)


class Shifted(ta.Penalty):
    """The penalty |w| with a proximal operator that is off by `error`."""

    error: float

    def value(self, w):
        return jnp.abs(w)

    def prox(self, v, c):
        return jnp.sign(v) * jnp.maximum(jnp.abs(v) - c, 0) + self.error


class Falling(ta.Penalty):
    """The convex penalty ``-k w``, which no ridge less than its slope bounds."""

    k: float

    def value(self, w):
        return self.k * w

    def prox(self, v, c):
        return v - c * self.k


@pytest.mark.usefixtures("unchecked")
def test_what_a_penalty_must_be():
    """Small departures from a convex and even penalty with its own proximal operator are refused."""
    check_penalty(Huber(), 0.01, True)
    check_penalty(Huber(odd=0.2), 0.01, False)
    check_penalty(Falling(-0.1), 1.01, False)
    check_penalty(Shifted(1e-10), 0.01, True)
    for penalty, even, message in (
        (Huber(dent=0.01), True, "penalty must be convex, got Huber, whose value lies above a chord"),
        (Huber(odd=1e-3), True, "penalty must be even for a branch by name, got Huber: use branch=None with a start"),
        (Shifted(0.05), True, r"penalty must have prox\(v, c\) = argmin_w .* got Shifted"),
        (Shifted(-0.05), True, r"penalty must have prox\(v, c\)"),
        (Shifted(0.005), True, r"penalty must have prox\(v, c\)"),
        (Falling(-0.1), False, "lam must be positive where the penalty does not grow"),
        (3.0, True, "penalty must be a tiedattn_jax.Penalty"),
    ):
        with pytest.raises(ta.InputError, match=message):
            check_penalty(penalty, 0.99 if isinstance(penalty, Falling) else 0.01, even)
