"""Averages over the sign channel in closed form: labels that give the teacher's noisy fields up to a common sign.

# notation: one teacher column, L tokens that are alike, U = Y + noise, W the variance of U given its mean w, c = |w|^2
# / (L W) on average, x = |w| / sqrt(W) = sqrt(c) chi with chi of the chi law of L degrees, a a standard normal.

The score is ``g = (U tanh(U.w / W) - w) / W`` with ``U.w / W = x (x + a)``, so that averages over sentences are
averages over x and a. They are smooth, and a product rule is accurate to 1e-11 for any c.
"""

from __future__ import annotations

import math
from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_LARGEST = 10.0  # beyond x = 10 the sign is known but for a probability of exp(-50)
_RADII = 48  # nodes of x
_STEP, _RANGE = 0.2, 9.0  # trapezoidal rule of a; it converges exponentially


@cache
def _rules() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return nodes and weights on [0, 1] for the radius and those of a standard normal."""
    x, w = np.polynomial.legendre.leggauss(_RADII)
    a = np.arange(-_RANGE, _RANGE + _STEP / 2, _STEP)
    return (x + 1) / 2, w / 2, a, _STEP * np.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)


def _grid(L: int, c: Float[Array, ""]) -> tuple[Array, Array, Array]:
    """Return x (X, 1), a (A,) and the weights (X, A) of the averages."""
    unit, unit_weight, a, normal = _rules()
    reach = jnp.minimum(math.sqrt(L) + 9, _LARGEST / jnp.sqrt(c))
    chi = reach * unit
    density = chi ** (L - 1) * jnp.exp(-(chi**2) / 2) / (2 ** (L / 2 - 1) * math.gamma(L / 2))
    weight = (reach * unit_weight * density)[:, None] * normal
    return (jnp.sqrt(c) * chi)[:, None], jnp.asarray(a, c.dtype), weight.astype(c.dtype)


def information(L: int, c: Float[Array, ""]) -> Float[Array, ""]:
    """Return ``I_L(c) = W E|g|^2``: about ``L (L + 1) c`` for small c, and L for large c.

    It is ``L - E[((x + a)^2 + L - 1) sech^2(x (x + a))]``. For small c it is computed as
    ``E[((x + a)^2 + L - 1) tanh^2(x (x + a))] - L c``, where large terms have cancelled.
    """
    x, a, weight = _grid(L, c)
    factor, argument = (x + a) ** 2 + (L - 1), x * (x + a)
    small = jnp.sum(weight * factor * jnp.tanh(argument) ** 2) - L * c
    return jnp.where(c < 1, small, L - jnp.sum(weight * factor / jnp.cosh(argument) ** 2))


def log_evidence(L: int, c: Float[Array, ""], W: Float[Array, ""]) -> Float[Array, ""]:
    """Return E log Z of a sentence, normalised as `channel.log_evidence`."""
    x, a, weight = _grid(L, c)
    # log(1 + exp(-2 x (x + a))), which vanishes where the sign is known
    unknown = jnp.sum(weight * jnp.logaddexp(0.0, -2 * x * (x + a)))
    return unknown - math.log(2) - L / 2 * (1 + jnp.log(2 * jnp.pi * W))
