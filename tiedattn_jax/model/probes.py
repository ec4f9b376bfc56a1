"""Probes of a loss along random lines through the fields: kinks, and a fall that no square holds.

The Moreau envelope of a loss has no minimum if the loss falls faster than a square rises. At a kink that opens upwards,
as that of ``|z|``, minima sit in the kink, where Newton's method does not end. At a kink that opens downwards, as that
of ``-|z|``, there is no minimum; but minima on both sides have to be looked for, see `Model.nonsmooth`.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import InputError
from ..base.linalg import precise
from .model import Model

_LINES = 4
_POINTS = 257  # places on a line; each zoom divides an interval into one less
_LENGTH = 4.0  # a line goes so far to both sides, in units of the fields at which the loss bends
_SIZES = 1e2, 1e3  # factors of the fields between which a loss may fall like a square, but not faster
_FASTER = 5.0  # ratio of loss / |Z|^2 at these sizes that counts as faster; that of a cubic loss is 10


@eqx.filter_jit
@precise
def _slopes(
    model: Model,
    origin: Float[Array, "lines L r"],
    direction: Float[Array, "lines L r"],
    s: Float[Array, "lines points"],
    *labels: Float[Array, "L _"],
) -> tuple[Float[Array, "lines points"], Float[Array, "lines points"]]:
    """Return the first and the second derivative of the loss along lines, at places s."""

    def at(origin: Float[Array, "L r"], direction: Float[Array, "L r"], s: Float[Array, ""]) -> tuple[Array, Array]:
        slope = jax.grad(lambda s: model.loss(origin + s * direction, *labels))
        return slope(s), jax.jvp(slope, (s,), (jnp.ones_like(s),))[1]

    return jax.vmap(jax.vmap(at, (None, None, 0)))(origin, direction, s)


def kinks(
    model: Model, labels: list[Float[Array, "L _"]], rng: np.random.Generator
) -> list[tuple[float, Float[np.ndarray, "L r"]]]:
    """Return the largest jumps of the slope of the loss along random lines, upwards and downwards, and their places.

    Args:
        model: gives `loss`.
        labels: fields of the teacher, and of the noise if there is any.
        rng: draws the lines.

    Returns:
        Two jumps, relative to the largest slope on their line and never negative, each with its place. A jump is zero,
        to rounding, without such a kink.
    """
    (L, r, _), dtype = model.shape, model.lam.dtype
    lines = rng.standard_normal((2, _LINES, L, r)) * float(model.field_scale)
    origin, direction = np.tile(lines, (1, 2, 1, 1))  # one copy zooms into jumps upwards, the other downwards
    sign = np.repeat([1.0, -1.0], _LINES)
    low, width, scale = np.full(2 * _LINES, -_LENGTH), 2 * _LENGTH, np.zeros(2 * _LINES)
    resolution = 1e3 * float(jnp.finfo(dtype).eps)
    while True:
        s = low[:, None] + width * np.linspace(0, 1, _POINTS)
        arrays = (jnp.asarray(a, dtype) for a in (origin, direction, s))
        slope, bend = (np.nan_to_num(np.asarray(a, float)) for a in _slopes(model, *arrays, *labels))
        scale, width = np.maximum(scale, np.max(np.abs(slope), 1)), width / (_POINTS - 1)
        # How much more the slope changes from one place to the next than its derivatives there explain.
        excess = sign[:, None] * (np.diff(slope) - 0.5 * width * (bend[:, 1:] + bend[:, :-1]))
        place = np.argmax(excess, 1)
        low = s[np.arange(len(s)), place]
        if width < resolution:
            break
    jump = np.maximum(np.max(excess, 1), 0.0) / np.where(scale > 0, scale, 1.0)
    largest = (np.argmax(jump[:_LINES]), _LINES + np.argmax(jump[_LINES:]))
    return [(float(jump[k]), origin[k] + low[k] * direction[k]) for k in largest]


@eqx.filter_jit
@precise
def _at_sizes(model: Model, Z: Float[Array, "L r"], *labels: Float[Array, "L _"]) -> Float[Array, " sizes"]:
    """Return loss / size^2 for fields that are multiples of Z."""
    return jnp.stack([model.loss(size * Z, *labels) / size**2 for size in _SIZES])


def check_shape(model: Model, Z: Float[Array, "L r"], labels: list[Float[Array, "L _"]]) -> None:
    """Check that the loss has a proximal operator that Newton's method finds.

    Raises:
        InputError: the loss falls faster than a square; it has a kink that opens upwards; or it has one that opens
            downwards and `nonsmooth` does not say so.
    """
    small, large = np.asarray(_at_sizes(model, Z, *labels), float)
    if small < 0 and large < _FASTER * small:
        values = ", ".join(f"{v * size**2:.3g}" for v, size in zip((small, large), _SIZES, strict=True))
        text = f"must not fall faster than -|Z|^2, or it has no proximal operator, got {values} for fields of size"
        raise InputError("loss", f"{text} {_SIZES[0]:g}, {_SIZES[1]:g}")
    tolerance = float(jnp.finfo(model.lam.dtype).eps) ** 0.5
    (up, up_place), (down, down_place) = kinks(model, labels, np.random.default_rng(1))
    if up > tolerance:
        text = f"must not have a slope that jumps upwards, as it does {_at(up_place)}: minima would sit in the kink"
        raise InputError("loss", f"{text}; smooth it, as softplus(8 * x) / 8 does relu(x)")
    if down > tolerance and not model.nonsmooth:
        raise InputError("nonsmooth", f"must be True for a loss whose slope jumps, as it does {_at(down_place)}")


def _at(place: Float[np.ndarray, "L r"]) -> str:
    return f"at Z = {np.array2string(place.ravel(), precision=2)}"
