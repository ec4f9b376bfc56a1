"""The elevation: how much one step of replica symmetry breaking raises the training loss, estimated from the RS state.

The estimate is of leading order. Let q1 - q0 = delta V, and hold the whole response V + s (q1 - q0) at its
replica-symmetric (RS) value. The RS free energy is stationary, so the free energy of `rsb` differs from it by a
function of s and delta. With v = s delta and beta = s delta^{1/2} it is

    elevation = (v / beta^2) [ alpha (v / beta) K(beta) - v^2 / 4 (1 / (X^2 - 2 v X / 3) - alpha k(v)) ]

The 1RSB state is stationary in v and beta; here we take the largest value.

The first term is that of the jumps. K(beta) is the sum of the `jump_cost` j(beta a) over the jumps, where
a = |V^{-1/2} (z_2 - z_1)| is the slope of the energy difference at a jump. The second term is of second order in v and
is that of the replicon. X is the contribution of the prior. k(v) is the average of ``tr e^2`` with e = dz/dh - 1; it is
softened where e is large, next to the ends of jumps.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import special

from ..averages.rule import Points
from ..base.linalg import apply, inverse
from ..base.types import Number, Scalar, StateArray
from ..model.overlaps import Conjugates, Overlaps

_SOFT = (0.01, 0.1)  # v at which k(v) is averaged; elsewhere it is linear in log v
_LOWEST = 1e-3  # v below which k(v) is constant
_COSTS = np.geomspace(1e-2, 1e2, 400)  # b at which `jump_cost` is tabulated
# Grid on which the elevation is maximised: b at the mean slope, and v / X.
_B, _V = np.geomspace(0.5, 10.0, 24), np.geomspace(1e-8, 0.8, 400)


def jump_cost(b: Number | Float[np.ndarray, "..."]) -> Float[np.ndarray | np.floating, "..."]:
    """Compute the cost of a jump, j(b).

    The energy at a jump is -(a/2)|x| on a line x that is measured in the inner spread, and b = s a. Then
    ``j(b) = int dx { b/2 E|x + xi| + b^2 / 8 - log E exp(b/2 |x + xi|) }``. It tends to b^2 / (3 pi^{1/2}) for small b
    and to b / 2 for large b.
    """
    t, w = np.polynomial.legendre.leggauss(400)
    b = np.asarray(b)[..., None]
    end = 8 + 0.5 * b
    x, w = 0.5 * end * (t + 1), end * w  # both sides
    size = np.sqrt(2 / np.pi) * np.exp(-0.5 * x**2) + x * special.erf(x / 2**0.5)
    sides = (side * 0.5 * b * x + special.log_ndtr(0.5 * b + side * x) for side in (1, -1))
    return np.sum(w * (0.5 * b * size - np.logaddexp(*sides)), -1)


@functools.cache
def _costs() -> Float[np.ndarray, " b"]:
    return jump_cost(_COSTS) / _COSTS**2


def elevation_moments(x: Overlaps, points: Points, e: Float[Array, "L L N"]) -> dict[str, Float[Array, " _"]]:
    """Return the sums over one block of nodes that `elevation` needs.

    Args:
        e: dz/dh - 1.
    """
    square = jnp.einsum("ijn,jkn->ikn", e, e)
    second, third = jnp.einsum("iin->n", square), jnp.einsum("ijn,jin->n", square, e)
    # Eigenvalues are large next to the end of a jump. Those below -1 are due to rounding.
    third = jnp.where(third < -1.001 * second, -third, third)
    soft = jnp.stack([second / (1 + 2 / 3 * v * third / jnp.where(second > 0, second, 1.0)) for v in _SOFT])
    step = points.jumps.step
    a = jnp.sqrt(jnp.sum(step * apply(inverse(x.V), step), (0, 1)))
    slopes = jnp.stack([points.jumps.density @ a**k for k in range(3, 7)])
    return {"soft": soft @ points.weight, "slopes": slopes}


def elevation(
    alpha: Scalar,
    x: Overlaps,
    hats: Conjugates,
    to_delta: Float[Array, "S S"],
    sums: dict[str, Float[Array, "..."]],
) -> Float[Array, ""]:
    """Return the elevation. It is zero without jumps, and NaN if the state is unstable even without jumps.

    Args:
        to_delta: response of q1 - q0 to the same difference of the conjugates.
        sums: averages of `elevation_moments`.
    """
    # Replica symmetry breaking is considered in the direction of the conjugate of q only.
    X = jnp.sum(x.V * hats.q) / jnp.sqrt(hats.q.ravel() @ to_delta @ hats.q.ravel())
    a, weight = two_values(sums["slopes"])
    mean = jnp.where(sums["slopes"][0] > 0, sums["slopes"][1] / sums["slopes"][0], 1.0)
    beta, v = (jnp.asarray(_B, a.dtype) / mean)[:, None], jnp.asarray(_V, a.dtype) * X
    b = beta * a
    table = jnp.interp(jnp.log(b), jnp.asarray(np.log(_COSTS), a.dtype), jnp.asarray(_costs(), a.dtype))
    jumps = jnp.sum(weight * table, 1, keepdims=True) * beta**2
    smooth = 0.25 * v**2 * (1 / (X**2 - 2 / 3 * v * X) - alpha * softened(sums["soft"], v))
    values = v / beta**2 * (alpha * v / beta * jumps - smooth)
    maximum = jnp.max(values)
    # A maximum at an end of the range means instability even without jumps: v grows, and s falls to zero.
    is_interior = maximum > jnp.max(jnp.append(values[0], values[:, -1]))
    is_known = ~jnp.any(jnp.isnan(values)) & (is_interior | (maximum <= 0))  # XLA's maximum of NaN may be -inf
    return jnp.where(is_known, jnp.maximum(maximum, 0.0), jnp.nan)


def softened(soft: Float[Array, " 2"], v: Float[StateArray, "*shape"]) -> Float[Array, "*shape"]:
    """Return k(v), interpolated and extrapolated in log v from the two v at which it was averaged."""
    low, high = soft
    return low + (high - low) * jnp.log(jnp.maximum(v, _LOWEST) / _SOFT[0]) / np.log(_SOFT[1] / _SOFT[0])


def two_values(moments: Float[Array, " 4"]) -> tuple[Float[Array, " 2"], Float[Array, " 2"]]:
    """Return two values and their weights, with given moments 0 to 3 of a law of positive numbers."""
    size = jnp.where(moments[0] > 0, moments[0], 1.0)
    mean, square, cube = moments[1:] / size
    spread, rounding = square - mean**2, jnp.finfo(mean.dtype).eps ** 0.5 * square
    variance = jnp.maximum(spread, rounding)
    third = jnp.where(spread > rounding, cube - 3 * mean * square + 2 * mean**3, 0.0)
    skewness = third / jnp.where(variance > 0, variance, 1.0) ** 1.5
    half = 0.5 * skewness
    root = jnp.sqrt(1 + half**2)
    values = mean + jnp.sqrt(variance) * (half + root * jnp.array([-1.0, 1.0], mean.dtype))
    return values, moments[0] * 0.5 * (1 + jnp.array([1.0, -1.0], mean.dtype) * half / root)
