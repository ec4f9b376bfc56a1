"""The minimiser of a penalised weight and its response, and what a penalty must be."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penalties import Quadratic

import tiedattn_jax as ta
from tiedattn_jax.base.errors import settle
from tiedattn_jax.model.penalties import minimiser, minimiser_and_response, penalty_conditions

STRENGTH = 0.6


def problem(r, seed=0):
    """Positive definite matrices and fields, of which some give weights that are zero."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(6, r, r))
    return root @ root.swapaxes(1, 2) + 0.5 * np.eye(r), 1.2 * rng.normal(size=(6, r))


def test_the_l1_penalty():
    penalty = ta.L1(0.3)
    w = jnp.array([-2.0, -0.1, 0.0, 0.1, 2.0])
    np.testing.assert_allclose(penalty.value(w), [0.6, 0.03, 0, 0.03, 0.6], rtol=1e-12)
    np.testing.assert_allclose(penalty.prox(w, jnp.full(5, 0.5)), [-1.85, 0, 0, 0, 1.85], rtol=1e-12)
    assert "0.3" in str(penalty) and float(ta.L1(0.0).strength) == 0.0
    assert float(ta.DotProduct(penalty=penalty).penalty_of(w[:, None])) == pytest.approx(1.26)
    assert ta.DotProduct().penalty_of(w) == 0.0


@pytest.mark.parametrize("r", [1, 3])
def test_the_slope_at_the_minimiser_is_balanced(r):
    Lam, b = problem(r)
    w, response = map(np.asarray, jax.jit(minimiser_and_response)(ta.L1(STRENGTH), Lam, b))
    assert np.any(w == 0) and np.any(w != 0)
    # The slope of the other terms is balanced by that of the penalty, which is anything up to its strength at zero.
    slope = np.einsum("kab,kb->ka", Lam, w) - b
    np.testing.assert_allclose(slope[w != 0], -STRENGTH * np.sign(w[w != 0]), rtol=1e-9)
    assert np.all(np.abs(slope[w == 0]) <= STRENGTH)
    for k, active in enumerate(w != 0):
        expected = np.zeros((r, r))
        expected[np.ix_(active, active)] = np.linalg.inv(Lam[k][np.ix_(active, active)])
        np.testing.assert_allclose(response[k], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("r", [1, 2])
def test_derivatives_of_a_minimiser(r):
    """They are those of the inverse matrix for a quadratic penalty, in fields, matrices and the penalty's number."""
    Lam, b = problem(r, seed=1)
    inverse, change = np.linalg.inv(Lam + 0.7 * np.eye(r)), 0.1 + 0.3 * np.eye(r)
    w = inverse @ b[..., None]
    slope = inverse @ (b[::-1, :, None] - change @ w)
    point, direction = (np.array(0.7), Lam, b), (np.array(0.3), 0.1 * np.ones_like(Lam), b[::-1])
    actual = jax.jit(lambda p, d: jax.jvp(lambda k, Lam, b: minimiser(Quadratic(k), Lam, b), p, d))(point, direction)
    for a, e in zip(actual, (w, slope), strict=True):
        np.testing.assert_allclose(a, e[..., 0], rtol=1e-9, atol=1e-12)


class Bent(ta.Penalty):
    """The penalty ``|w| - dent w^2 + odd w``, with a proximal operator that is off by `error`."""

    dent: float = 0.0
    odd: float = 0.0
    error: float = 0.0

    def value(self, w):
        return jnp.abs(w) - self.dent * w**2 + self.odd * w

    def prox(self, v, c):
        shifted = (v - c * self.odd) / (1 - 2 * c * self.dent)
        return jnp.sign(shifted) * jnp.maximum(jnp.abs(shifted) - c / (1 - 2 * c * self.dent), 0) + self.error


class Falling(ta.Penalty):
    """The convex penalty ``-w / 10``, which no ridge less than its slope bounds."""

    def value(self, w):
        return -0.1 * w

    def prox(self, v, c):
        return v + 0.1 * c


@pytest.mark.usefixtures("unchecked")
def test_what_a_penalty_must_be():
    """Small departures from a convex and even penalty with its own proximal operator are refused."""
    for penalty, lam, even, message in (
        (Bent(), 0.01, True, None),
        (Bent(odd=0.2), 0.01, False, None),
        (Falling(), 1.01, False, None),
        (Bent(error=1e-10), 0.01, True, None),
        (Bent(dent=0.01), 0.01, True, "penalty must be convex, got Bent, whose value lies above a chord"),
        (
            Bent(odd=1e-3),
            0.01,
            True,
            "penalty must be even for a branch by name, got Bent: use branch=None with",
        ),
        (Bent(error=0.005), 0.01, True, r"penalty must have prox\(v, c\) = argmin_w .* got Bent"),
        (Bent(error=-0.005), 0.01, True, r"penalty must have prox\(v, c\)"),
        (Falling(), 0.99, False, "lam must be positive where the penalty does not grow"),
        (3.0, 0.01, True, "penalty must be a tiedattn_jax.Penalty"),
    ):
        with nullcontext() if message is None else pytest.raises(ta.InputError, match=message):
            settle(penalty_conditions(penalty, lam, even))
