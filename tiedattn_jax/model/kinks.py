"""How a loss grows and where its slope jumps.

The loss is probed along random lines through the fields. The Moreau envelope of a loss has no minimum if the loss falls
faster than a square rises. At a kink that opens upwards, as that of ``|z|``, minima sit in the kink, where Newton's
method does not end. At a kink that opens downwards, as that of ``-|z|``, there is no minimum; but minima on both sides
have to be looked for, see `Model.nonsmooth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.arrays import precise
from ..base.errors import Condition, InputError, is_concrete
from .model import Model

_LINES = 4  # number of random lines
_POINTS = 257  # places on a line; each zoom divides an interval into one less
_LENGTH = 4.0  # half of the length of a line, in units of the fields at which the loss bends
SIZES = 1e2, 1e3  # factors of the fields between which a loss may fall like a square, but not faster
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


def kink(model: Model, labels: list[Float[Array, "L _"]], sign: int) -> tuple[float, Float[np.ndarray, "L r"]]:
    """Return the largest jump of the slope of the loss along random lines, and its place.

    Args:
        model: gives `loss`.
        labels: fields of the teacher, and of the noise if there is any.
        sign: 1 for jumps upwards, -1 for jumps downwards.

    Returns:
        The jump relative to the largest slope on its line, never negative; it is zero, to rounding, without such a
        kink. The second value is the fields of the student at its place.
    """
    (L, r, _), dtype = model.shape, model.lam.dtype
    lines = np.random.default_rng(1).standard_normal((2, _LINES, L, r)) * float(model.field_scale)
    low, width, scale = np.full(_LINES, -_LENGTH), 2 * _LENGTH, np.zeros(_LINES)
    resolution = 1e3 * float(jnp.finfo(dtype).eps)
    while width >= resolution:  # each pass zooms into the interval with the largest jump on every line
        s = low[:, None] + width * np.linspace(0, 1, _POINTS)
        arrays = (jnp.asarray(a, dtype) for a in (*lines, s))
        slope, bend = (np.nan_to_num(np.asarray(a, float)) for a in _slopes(model, *arrays, *labels))
        scale, width = np.maximum(scale, np.max(np.abs(slope), 1)), width / (_POINTS - 1)
        # The change of the slope from one place to the next, less what its derivatives there explain.
        excess = sign * (np.diff(slope) - 0.5 * width * (bend[:, 1:] + bend[:, :-1]))
        low = s[np.arange(_LINES), np.argmax(excess, 1)]
    jump = np.maximum(np.max(excess, 1), 0.0) / np.where(scale > 0, scale, 1.0)
    k = np.argmax(jump)
    return float(jump[k]), lines[0, k] + low[k] * lines[1, k]


def bounded(losses: Sequence[Any]) -> Condition:
    """Return the condition that the loss falls no faster than a square, so that it has a proximal operator.

    Args:
        losses: the loss at fields of the `SIZES`.
    """
    small, large = (loss / size**2 for loss, size in zip(losses, SIZES, strict=True))
    values = ", ".join(f"{loss:.3g}" for loss in losses if is_concrete(loss))
    text = f"must not fall faster than -|Z|^2, or it has no proximal operator, got {values} for fields of"
    is_bounded = (small >= 0) | (large >= _FASTER * small)
    return Condition(is_bounded, "loss", problem=f"{text} size {SIZES[0]:g}, {SIZES[1]:g}")


def check_kinks(model: Model, labels: list[Float[Array, "L _"]]) -> None:
    """Raise an `InputError` if the loss has a kink that opens upwards, or one downwards that `nonsmooth` hides."""
    tolerance = float(jnp.finfo(model.lam.dtype).eps) ** 0.5
    for sign in (1, -1):
        jump, place = kink(model, labels, sign)
        where = f"as it does at Z = {np.array2string(place.ravel(), precision=2)}"
        if jump > tolerance and sign > 0:
            text = f"must not have a slope that jumps upwards, {where}: minima would sit in the kink"
            hint = "write softplus(8 * x) / 8 for relu(x), and sqrt(x**2 + 0.01) - 0.1 for abs(x)"
            raise InputError("loss", f"{text}; {hint}")
        if jump > tolerance and not model.nonsmooth:
            raise InputError("nonsmooth", f"must be True for a loss whose slope jumps, {where}")
