"""Derivatives of fixed points in the model and in alpha: the implicit function theorem on F(x) = x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ..averages.rule import Replicate, average
from ..model import Model
from ..overlaps import Coordinates, Overlaps
from .state_evolution import (
    Evaluation,
    after_averages,
    averages_expansion,
    deflated_solve,
    expansion,
    value_and_columns,
)


def followed(
    model: Model, alpha: jax.Array, replicate: Replicate, x: Overlaps, free: jax.Array, along: tuple[Model, jax.Array]
) -> tuple[Overlaps, Evaluation]:
    """Derivatives of a fixed point, and of what the map sees there, along a direction in (model, alpha).

    ``dv = (I - DF)^{-1} d_p F dp`` with the dense Jacobian. Linear in the direction, and can be transposed.

    Args:
        along: the direction.
    """
    coordinates = Coordinates(model, free)
    v = coordinates.pack(x)

    def derive(at: Callable[[Any], Any], _: tuple[Model, jax.Array]) -> tuple[Any, Any, Any]:
        """The averages, their derivatives in v, and along the direction in the model, which alone has a transpose."""
        value, columns, _ = value_and_columns(lambda v: at((model, v)), v)
        return value, columns, jax.jvp(lambda m: at((m, v))[0], (model,), along[:1])[1]

    averages, slopes, explicit = averages_expansion(
        lambda u: (u[0], alpha, coordinates.unpack(u[1])), replicate, (model, v), derive=derive, over=average
    )

    def image(model: Model, alpha: jax.Array, v: jax.Array, M: jax.Array, gradient: Overlaps) -> Any:
        new, seen = after_averages(model, alpha, coordinates.unpack(v), free, M, gradient, ())
        return coordinates.pack(new), seen

    def moved(along: tuple[Model, jax.Array], dv: jax.Array, by_averages: Any) -> Any:
        return jax.jvp(image, (model, alpha, v, *averages), (*along, dv, *by_averages))[1]

    still = jax.tree.map(jnp.zeros_like, (model, alpha))
    DF = jax.vmap(lambda e, s: moved(still, e, s)[0], (0, -1), -1)(jnp.eye(v.shape[0], dtype=v.dtype), slopes)
    force, _ = moved(along, jnp.zeros_like(v), explicit)
    gauge = coordinates.gauge(model, x, jnp.ones_like(v))
    dv = deflated_solve(jnp.eye(v.shape[0], dtype=v.dtype) - DF, gauge, force)
    _, d_seen = moved(along, dv, jax.tree.map(lambda e, s: e + s @ dv, explicit, slopes))
    return coordinates.unpack(dv), d_seen


def implicit_gradient(
    model: Model,
    alpha: jax.Array,
    replicate: Replicate,
    x: Overlaps,
    free: jax.Array,
    fn: Callable[[Model, jax.Array, Overlaps], jax.Array],
) -> tuple[jax.Array, Model, jax.Array]:
    """Value of `fn(model, alpha, x)` at a fixed point, and its total derivatives in the model and in alpha.

    The overlaps move along the branch, by the implicit function theorem with the dense Jacobian of the residual.
    """
    at = _linearised(model, alpha, replicate, x, free, fn)
    return at.value, *at.numbers(at.by_numbers + at.by_overlaps @ deflated_solve(at.matrix, at.gauge, at.columns))


def fold_gradient(
    model: Model, alpha: jax.Array, replicate: Replicate, x: Overlaps, free: jax.Array
) -> tuple[Model, jax.Array]:
    """At a fold: l . d_p F in the model and in alpha, l the left null vector of I - DF; both vanish along the fold."""
    at = _linearised(model, alpha, replicate, x, free, lambda *_: jnp.zeros((), model.lam.dtype))
    left = jnp.linalg.svd(at.matrix + at.gauge.T @ at.gauge)[0][:, -1]
    return at.numbers(left @ at.columns)


class _Linearised(NamedTuple):
    """The map F and a function of a fixed point to first order in the n overlaps and in the k numbers of a setting."""

    value: jax.Array  # of the function
    matrix: jax.Array  # I - DF, (n, n)
    gauge: jax.Array  # (pairs, n)
    columns: jax.Array  # dF / d numbers, (n, k)
    by_overlaps: jax.Array  # of the function, (n,)
    by_numbers: jax.Array  # (k,)
    numbers: Callable[[jax.Array], tuple[Model, jax.Array]]  # a vector (k,) as (model, alpha)


def _linearised(
    model: Model, alpha: jax.Array, replicate: Replicate, x: Overlaps, free: jax.Array, fn: Callable[..., jax.Array]
) -> _Linearised:
    coordinates = Coordinates(model, free)
    v, (p, numbers) = coordinates.pack(x), ravel_pytree((model, alpha))
    n = v.shape[0]

    def setting(u: jax.Array) -> tuple[Model, jax.Array, Overlaps]:
        return *numbers(u[n:]), coordinates.unpack(u[:n])

    u = jnp.concatenate([v, p])
    _, columns, _ = expansion(setting, replicate, u, free)
    value, slopes, _ = value_and_columns(lambda u: (fn(*setting(u)), ()), u)
    matrix = jnp.eye(n, dtype=v.dtype) - columns[:, :n]
    gauge = coordinates.gauge(model, x, jnp.ones_like(v))
    return _Linearised(value, matrix, gauge, columns[:, n:], slopes[:n], slopes[n:], numbers)


@jax.custom_jvp
def first_order(tree: Any, numbers: Any) -> Any:
    """A function of some numbers, as a tree that refuses to be differentiated rather than to pass for a constant."""
    return tree


@first_order.defjvp
def _(primals: Any, tangents: Any) -> Any:
    text = "transitions and states with 1RSB have first derivatives only"
    raise TypeError(f"{text}: take differences of `sensitivities` or `loss_by_model` for the second")
