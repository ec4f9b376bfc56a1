"""Averages over the sign channel in closed form: labels that give the teacher's noisy fields up to a common sign.

# notation: one teacher column, L tokens that are alike, U = Y + noise, W the variance of U given its mean w, c = |w|^2
# / (L W) on average, x = |w| / sqrt(W) = sqrt(c) chi with chi of the chi law of L degrees, a a standard normal.

The score is ``g = (U tanh(U.w / W) - w) / W`` with ``U.w / W = x (x + a)``, so that averages over sentences are
averages over x and a. They are smooth, and a product rule is accurate to 1e-11 for any c.
"""

from __future__ import annotations

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_LARGEST = 10.0  # beyond x = 10 the sign is known but for a probability of exp(-50)
_RADII = 48  # nodes of x
_STEP, _RANGE = 0.2, 9.0  # trapezoidal rule of a; it converges exponentially


@cache
def _unit_rule(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the Gauss-Legendre nodes and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(order)
    return (x + 1) / 2, w / 2


def chi_rule(L: int, reach: Float[Array, ""], order: int) -> tuple[Float[Array, " {order}"], Float[Array, " {order}"]]:
    """Return nodes and weights of averages over the chi law of L degrees, up to the radius `reach`."""
    unit, weight = (jnp.asarray(a, reach.dtype) for a in _unit_rule(order))
    chi = reach * unit
    density = chi ** (L - 1) * jnp.exp(-(chi**2) / 2) / (2 ** (L / 2 - 1) * math.gamma(L / 2))
    return chi, reach * weight * density


def largest_radius(L: int) -> float:
    """Return a radius beyond which the chi law of L degrees has no weight that a float sees."""
    return math.sqrt(L) + 9


def _grid(L: int, c: Float[Array, ""]) -> tuple[Array, Array, Array]:
    """Return x (X, 1), a (A,) and the weights (X, A) of the averages."""
    chi, weight = chi_rule(L, jnp.minimum(largest_radius(L), _LARGEST / jnp.sqrt(c)), _RADII)
    a = jnp.asarray(np.arange(-_RANGE, _RANGE + _STEP / 2, _STEP), c.dtype)
    normal = _STEP * jnp.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
    return (jnp.sqrt(c) * chi)[:, None], a, weight[:, None] * normal


def information(L: int, c: Float[Array, ""]) -> Float[Array, ""]:
    """Return ``I_L(c) = W E|g|^2``: about ``L (L + 1) c`` for small c, and L for large c.

    It is ``L - E[((x + a)^2 + L - 1) sech^2(x (x + a))]``. For small c it is computed as
    ``E[((x + a)^2 + L - 1) tanh^2(x (x + a))] - L c``, where large terms have cancelled.
    """
    x, a, weight = _grid(L, c)
    factor, argument = (x + a) ** 2 + (L - 1), x * (x + a)
    small = jnp.sum(weight * factor * jnp.tanh(argument) ** 2) - L * c
    sech_square = 4 * jax.nn.sigmoid(2 * argument) * jax.nn.sigmoid(-2 * argument)  # cosh overflows in float32
    return jnp.where(c < 1, small, L - jnp.sum(weight * factor * sech_square))


def log_evidence(L: int, c: Float[Array, ""], W: Float[Array, ""]) -> Float[Array, ""]:
    """Return E log Z of a sentence, normalised as `channel.log_evidence`."""
    x, a, weight = _grid(L, c)
    # log(1 + exp(-2 x (x + a))), which vanishes where the sign is known
    unknown = jnp.sum(weight * jnp.logaddexp(0.0, -2 * x * (x + a)))
    return unknown - math.log(2) - L / 2 * (1 + jnp.log(2 * jnp.pi * W))
