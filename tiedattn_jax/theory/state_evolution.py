"""State evolution: the saddle-point equations as a map of the overlaps, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from ..averages.rule import Points, Replicate, average_of_weighted
from ..model import Model
from ..overlaps import Conjugates, Coordinates, Overlaps, impose
from .potentials import channel_gradient, conjugates, free_energy, gradient_at, overlaps


class Evaluation(eqx.Module):
    """What an evaluation of the map sees besides the new overlaps.

    Attributes:
        conjugates: hats at the overlaps.
        channel: channel potential M.
        train_loss: minus the free energy; the training loss where the overlaps are a fixed point.
        sums: what was asked for, from the same pass over the nodes.
    """

    conjugates: Conjugates
    channel: jax.Array
    train_loss: jax.Array
    sums: Any


Sums = Callable[[Model, Overlaps, Points], Any]


def no_sums(model: Model, x: Overlaps, points: Points) -> tuple:
    """No further sums."""
    return ()


def saddle_map(
    model: Model, alpha: jax.Array, x: Overlaps, replicate: Replicate, free: jax.Array, sums: Sums = no_sums
) -> tuple[Overlaps, Evaluation]:
    """One undamped step of state evolution, eqs. (7)-(8): new overlaps, and what was seen on the way.

    Args:
        replicate: of an averaging rule.
        free: what the branch leaves free, (2,); what it sets to zero in the overlaps is zero in the conjugates, too.
        sums: further sums over the nodes; they carry no derivative.
    """
    return _step(model, alpha, x, free, *channel_gradient(model, x, replicate, _held(sums, model, x)))


def _held(sums: Sums, model: Model, x: Overlaps) -> Callable[[Points], Any]:
    held = lax.stop_gradient((model, x))
    return lambda points: sums(*held, lax.stop_gradient(points))


def _step(
    model: Model, alpha: jax.Array, x: Overlaps, free: jax.Array, M: jax.Array, gradient: Overlaps, more: Any
) -> tuple[Overlaps, Evaluation]:
    """`saddle_map` after the averages."""
    hats = impose(conjugates(alpha, gradient), free)
    return overlaps(model, hats), Evaluation(hats, M, -free_energy(model, alpha, x, hats, M), more)


def image(
    model: Model, alpha: jax.Array, replicate: Replicate, v: jax.Array, coordinates: Coordinates
) -> tuple[jax.Array, Evaluation]:
    """Undamped map on coordinates."""
    new, seen = saddle_map(model, alpha, coordinates.unpack(v), replicate, coordinates.free)
    return coordinates.pack(new), seen


Setting = Callable[[jax.Array], tuple[Model, jax.Array, Overlaps]]


def expansion(
    setting: Setting, replicate: Replicate, u: jax.Array, free: jax.Array, sums: Sums = no_sums
) -> tuple[jax.Array, jax.Array, Evaluation]:
    """The undamped map on coordinates F(u), its derivatives dF/du, and what the evaluation sees.

    Every block is differentiated by itself: what jax then transforms is small.

    Args:
        setting: model, alpha and overlaps as a function of some numbers u, (k,).

    Returns:
        F (n,), dF/du (n, k), and the `Evaluation`.
    """

    def block_sums(block: Any) -> Any:
        model, _, x = setting(u)
        found = replicate.search(*lax.stop_gradient((model, x)), block)

        def at(u: jax.Array) -> Any:
            model, _, x = setting(u)
            points = replicate.points(model, x, block, found)
            M, gradient, more = gradient_at(points, model, x, _held(sums, model, x))
            return (M, gradient), more

        return _columns(at, u)

    def finish(u: jax.Array, M: jax.Array, gradient: Overlaps) -> Any:
        model, alpha, x = setting(u)
        new, seen = _step(model, alpha, x, free, M, gradient, more)
        return Coordinates(model, free).pack(new), seen

    moved, slopes, more = average_of_weighted(replicate, block_sums)
    eye = jnp.eye(u.shape[0], dtype=u.dtype)
    return jax.vmap(
        lambda *d: jax.jvp(finish, (u, *moved), d, has_aux=True), in_axes=(0, -1, -1), out_axes=(None, -1, None)
    )(eye, *slopes)


def _columns(fn: Callable[[jax.Array], Any], u: jax.Array) -> Any:
    """Value of ``fn(u) = value, aux``, its derivatives in u (leaves (..., k)), and aux."""

    def column(d: jax.Array) -> Any:
        return jax.jvp(fn, (u,), (d,), has_aux=True)

    return jax.vmap(column, out_axes=(None, -1, None))(jnp.eye(u.shape[0], dtype=u.dtype))


@partial(jax.jit, static_argnames="sums")  # traced once for all its uses
def image_and_jacobian(
    model: Model, alpha: jax.Array, replicate: Replicate, v: jax.Array, free: jax.Array, sums: Sums = no_sums
) -> tuple[jax.Array, jax.Array, Evaluation]:
    """The undamped map on coordinates, its Jacobian DF, and what the evaluation sees."""
    unpack = Coordinates(model, free).unpack
    return expansion(lambda v: (model, alpha, unpack(v)), replicate, v, free, sums)


def deflated_solve(matrix: jax.Array, gauge: jax.Array, b: jax.Array) -> jax.Array:
    """Solve ``(I - DF + sum_a tau_a tau_a^T) d = b``: I - DF is singular along the orbit of a gauge, tau its tangents.

    A matrix with entries that are not finite is replaced by the identity: the derivatives of a lane that failed are
    then finite, and cannot spoil the sum that another lane's gradient is taken of.
    """
    matrix = matrix + gauge.T @ gauge
    matrix = jnp.where(jnp.all(jnp.isfinite(matrix)), matrix, jnp.eye(matrix.shape[0], dtype=matrix.dtype))
    return jnp.linalg.solve(matrix, b)


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
    value, slopes, _ = _columns(lambda u: (fn(*setting(u)), ()), u)
    matrix = jnp.eye(n, dtype=v.dtype) - columns[:, :n]
    gauge = coordinates.gauge(model, x, jnp.ones_like(v))
    return _Linearised(value, matrix, gauge, columns[:, n:], slopes[:n], slopes[n:], numbers)
