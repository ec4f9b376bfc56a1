"""Penalties of the weights besides the ridge: separable, convex, and given by their value and proximal operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..base.arrays import Number, inverse
from ..base.derivatives import derivative_along, with_tangent
from ..base.errors import Condition, InputError, Ranges, require_kind, require_not_negative, require_takes
from ..base.report import Description, Printed, entries

_MOST_SWEEPS = 500


class Penalty(Printed):
    """A convex penalty ``sum_i p(Q_i)`` of the weights besides the ridge. Subclass it, and write `value` and `prox`.

    Numbers that theory should be differentiable in must be array fields of the subclass.
    """

    def value(self, w: Float[Array, "*w"]) -> Float[Array, "*w"]:
        """Return p of every entry of `w`; p must be convex, and even for named branches."""
        raise NotImplementedError

    def prox(self, v: Float[Array, "*w"], c: Float[Array, "*w"]) -> Float[Array, "*w"]:
        """Return ``argmin_w (w - v)^2 / 2 + c p(w)`` for each entry of `v` and `c` > 0; it must be differentiable."""
        raise NotImplementedError

    @property
    def kinks(self) -> tuple[float | Float[Array, ""], ...]:
        """Weights at which p or its derivatives jump; averages are broken where the minimiser reaches them."""
        return ()

    def in_range(self) -> Ranges:
        """Return names and ranges of numbers, as `Model.in_range` does."""
        return []

    def describe(self) -> Description:
        return Description("", numbers=[(name, entries(a)) for name, a in vars(self).items() if eqx.is_array(a)])


class L1(Penalty):
    """The penalty ``p(w) = strength |w|``; together with the ridge of the model it is the elastic net.

    Attributes:
        strength: zero or positive.

    Raises:
        InputError: the strength is not one number, or is negative.
    """

    strength: Float[Array, ""]

    def __init__(self, strength: Number):
        self.strength = require_not_negative(strength, "strength", jnp.result_type(float))

    def in_range(self) -> Ranges:
        holds = (self.strength >= 0) & (self.strength < np.inf)
        return [("strength", holds, "zero or positive, and finite")]

    @property
    def kinks(self) -> tuple[float, ...]:
        return (0.0,)

    def value(self, w: Float[Array, "*w"]) -> Float[Array, "*w"]:
        return self.strength * jnp.abs(w)

    def prox(self, v: Float[Array, "*w"], c: Float[Array, "*w"]) -> Float[Array, "*w"]:
        return jnp.sign(v) * jnp.maximum(jnp.abs(v) - c * self.strength, 0.0)


def minimiser(
    penalty: Penalty, Lam: Float[Array, "*#batch r r"], b: Float[Array, "*#batch r"]
) -> Float[Array, "... r"]:
    """Return ``argmin_w w^T Lam w / 2 - b . w + sum_a p(w_a)`` over the columns of a weight; it is differentiable.

    Args:
        Lam: positive definite.
        b: fields.
    """
    return _minimised(penalty, Lam, b)[0]


def minimiser_and_response(
    penalty: Penalty, Lam: Float[Array, "*#batch r r"], b: Float[Array, "*#batch r"]
) -> tuple[Float[Array, "*w r"], Float[Array, "*w r r"]]:
    """Return `minimiser` and its derivative in b, the variance of a weight in message passing."""
    w, u = _minimised(penalty, Lam, b)
    slope = _slope(penalty, u, Lam)
    return w, slope[..., None] * inverse(_field_jacobian(slope, Lam))


def _minimised(
    penalty: Penalty, Lam: Float[Array, "*#batch r r"], b: Float[Array, "*#batch r"]
) -> tuple[Float[Array, "*w r"], Float[Array, "*w r"]]:
    """Return the minimiser, and u with ``w_a = prox(u_a, 1 / Lam_aa)``.

    u_a is the field of column a minus the contributions of the other columns, divided by Lam_aa.
    """
    u = b / _diagonal(Lam)
    if b.shape[-1] > 1:
        u = _with_implicit_derivative(_coordinate_descent(*lax.stop_gradient((penalty, Lam, b))), penalty, Lam, b)
    return _prox(penalty, u, Lam), u


def _diagonal(Lam: Float[Array, "*batch r r"]) -> Float[Array, "*batch r"]:
    return jnp.diagonal(Lam, axis1=-2, axis2=-1)


def _prox(penalty: Penalty, u: Float[Array, "*w r"], Lam: Float[Array, "... r r"]) -> Float[Array, "*w r"]:
    return penalty.prox(u, jnp.broadcast_to(1 / _diagonal(Lam), u.shape))


def _slope(penalty: Penalty, u: Float[Array, "*w r"], Lam: Float[Array, "... r r"]) -> Float[Array, "*w r"]:
    """Return the derivative of `_prox` in u."""
    return jax.jvp(lambda u: _prox(penalty, u, Lam), (u,), (jnp.ones_like(u),))[1]


def _field(u: Float[Array, "*w r"], penalty: Penalty, Lam: Float[Array, "... r r"]) -> Float[Array, "*w r"]:
    """Return the field b that belongs to u."""
    w, stiffness = _prox(penalty, u, Lam), _diagonal(Lam)
    return stiffness * (u - w) + jnp.sum(Lam * w[..., None, :], -1)


def _field_jacobian(slope: Float[Array, "*w r"], Lam: Float[Array, "... r r"]) -> Float[Array, "*w r r"]:
    """Return the derivative of the field b in u, given the derivative `slope` of w in u."""
    diagonal = _diagonal(Lam) * (1 - slope)
    return Lam * slope[..., None, :] + diagonal[..., None] * jnp.eye(slope.shape[-1], dtype=slope.dtype)


def _coordinate_descent(
    penalty: Penalty, Lam: Float[Array, "*#batch r r"], b: Float[Array, "*#batch r"]
) -> Float[Array, "... r"]:
    """Find u by coordinate descent: sweeps that minimise over one column after the other, until none moves."""
    stiffness, columns = _diagonal(Lam), np.arange(b.shape[-1])

    def sweep(u: Float[Array, "*w r"]) -> Float[Array, "*w r"]:
        for a in columns:
            other_weights = jnp.where(columns == a, 0.0, _prox(penalty, u, Lam))
            field = b[..., a] - jnp.sum(Lam[..., a, :] * other_weights, -1)
            u = jnp.where(columns == a, (field / stiffness[..., a])[..., None], u)
        return u

    def unsettled(state: tuple[Float[Array, "*w r"], Float[Array, "*w r"], Int[Array, ""]]) -> Bool[Array, ""]:
        u, before, k = state
        return (jnp.max(jnp.abs(u - before)) > 4 * jnp.finfo(b.dtype).eps * jnp.max(jnp.abs(u))) & (k < _MOST_SWEEPS)

    start = b / stiffness
    return lax.while_loop(unsettled, lambda s: (sweep(s[0]), s[0], s[2] + 1), (sweep(start), start, jnp.asarray(0)))[0]


@with_tangent
def _with_implicit_derivative(primals: Any, tangents: Any) -> Float[Array, "... r"]:
    """Return a u that a search found, with its derivatives by the implicit function theorem."""
    u, penalty, Lam, _ = primals
    forcing = derivative_along(lambda penalty, Lam, b: b - _field(u, penalty, Lam), primals[1:], tangents[1:])
    jacobian = _field_jacobian(_slope(penalty, u, Lam), Lam)
    return jnp.sum(inverse(jacobian) * forcing[..., None, :], -1)


def penalty_conditions(penalty: Any, lam: Number, even: bool) -> Iterator[Condition]:
    """Yield the conditions on the numbers of a penalty.

    They are: its values are finite, convex and even; its `prox` is the minimiser; ridge or penalty bound the weights.

    Args:
        lam: ridge strength beside the penalty.
        even: whether ``p(-w) = p(w)`` must hold.

    Raises:
        InputError: it is no `Penalty`; it lacks `value` or `prox`, or they take other arguments or return other shapes.
    """
    require_kind(penalty, "penalty", Penalty, "a tiedattn_jax.Penalty, such as L1(0.01), or None")
    name = type(penalty).__name__
    for method, form in (("value", "value(w)"), ("prox", "prox(v, c)")):
        if getattr(type(penalty), method) is getattr(Penalty, method):
            raise InputError("penalty", f"must have a method `{form}`, got {name} without it: see tiedattn_jax.Penalty")
    require_takes(penalty.value, "penalty.value", ("w",))
    require_takes(penalty.prox, "penalty.prox", ("v", "c"))
    dtype = jnp.result_type(lam)
    w = jnp.asarray(np.concatenate([3 * np.random.default_rng(0).standard_normal(30), [0.0]]), dtype)
    c = jnp.full_like(w, 0.7)
    values, minimisers = penalty.value(w), penalty.prox(w, c)
    for method, out in (("value", values), ("prox", minimisers)):
        problem = f"must have a finite {method} for every entry of an array, got {name}: {out!r}"
        is_whole = np.shape(out) == w.shape
        yield Condition(jnp.isfinite(out) if is_whole else False, "penalty", problem=problem)
    rounding = float(jnp.finfo(dtype).eps) ** 0.5 * (1 + jnp.max(jnp.abs(values)))
    middle = penalty.value(0.5 * (w[:, None] + w).ravel()).reshape(w.size, w.size)
    is_convex = middle <= 0.5 * (values[:, None] + values) + rounding
    yield Condition(is_convex, "penalty", problem=f"must be convex, got {name}, whose value lies above a chord")
    if even:
        problem = f"must be even for a branch by name, got {name}: use branch=None with a start"
        is_even = jnp.abs(penalty.value(-w) - values) <= rounding + 1e-5 * jnp.abs(values)
        yield Condition(is_even, "penalty", problem=problem)

    def cost(weights: Float[Array, " N"]) -> Float[Array, " N"]:
        return 0.5 * (weights - w) ** 2 + c * penalty.value(weights)

    is_lowest = jnp.stack([cost(minimisers + s) >= cost(minimisers) - rounding for s in (-0.1, -0.01, 0.01, 0.1)])
    problem = f"must have prox(v, c) = argmin_w (w - v)^2 / 2 + c value(w), got {name}"
    yield Condition(is_lowest, "penalty", problem=problem)
    growth = lam + penalty.value(jnp.full((1,), 10.0, dtype))[0] - penalty.value(jnp.zeros(1, dtype))[0]
    yield Condition(growth > 0, "lam", lam, "positive where the penalty does not grow")
