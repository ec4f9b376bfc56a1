"""State evolution: the saddle-point equations as a map of the overlaps, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ..averages.rule import Replicate, average_of_weighted, found_in
from ..model import Model, over_kinds
from ..overlaps import Conjugates, Coordinates, Overlaps, impose, of_sentence
from .potentials import Sums, channel_gradient, conjugates, free_energy, gradient_at, no_sums, overlaps


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


def saddle_map(
    model: Model, alpha: jax.Array, x: Overlaps, replicate: Replicate, free: jax.Array
) -> tuple[Overlaps, Evaluation]:
    """One undamped step of state evolution, eqs. (7)-(8): new overlaps, and what was seen on the way.

    Args:
        free: what the branch leaves free, (2,); what it sets to zero in the overlaps is zero in the conjugates, too.
    """
    return after_averages(model, alpha, x, free, *channel_gradient(model, x, replicate))


def after_averages(
    model: Model, alpha: jax.Array, x: Overlaps, free: jax.Array, M: jax.Array, gradient: Overlaps, more: Any
) -> tuple[Overlaps, Evaluation]:
    """`saddle_map` after the averages."""
    hats = impose(conjugates(alpha, gradient), free)
    return overlaps(model, hats), Evaluation(hats, M, -free_energy(model, alpha, x, hats, M), more)


Setting = Callable[[jax.Array], tuple[Model, jax.Array, Overlaps]]


def expansion(
    setting: Setting, replicate: Replicate, u: jax.Array, free: jax.Array, sums: Sums = no_sums
) -> tuple[jax.Array, jax.Array, Evaluation]:
    """The undamped map on coordinates F(u), its derivatives dF/du, and what the evaluation sees.

    Args:
        setting: model, alpha and overlaps as a function of some numbers u, (k,).
        sums: further sums over the nodes; they carry no derivative.

    Returns:
        F (n,), dF/du (n, k), and the `Evaluation`.
    """
    averages, slopes, more = averages_expansion(setting, replicate, u, sums)

    def finish(u: jax.Array, M: jax.Array, gradient: Overlaps) -> Any:
        model, alpha, x = setting(u)
        new, seen = after_averages(model, alpha, x, free, M, gradient, more)
        return Coordinates(model, free).pack(new), seen

    eye = jnp.eye(u.shape[0], dtype=u.dtype)
    return jax.vmap(
        lambda *d: jax.jvp(finish, (u, *averages), d, has_aux=True), in_axes=(0, -1, -1), out_axes=(None, -1, None)
    )(eye, *slopes)


def value_and_columns(fn: Callable[[jax.Array], Any], u: jax.Array) -> Any:
    """Value of ``fn(u) = value, aux``, its derivatives in u (leaves (..., k)), and aux."""

    def column(d: jax.Array) -> Any:
        return jax.jvp(fn, (u,), (d,), has_aux=True)

    return jax.vmap(column, out_axes=(None, -1, None))(jnp.eye(u.shape[0], dtype=u.dtype))


def averages_expansion(
    setting: Callable[[Any], tuple[Model, jax.Array, Overlaps]],
    replicate: Replicate,
    u: Any,
    sums: Sums = no_sums,
    *,
    derive: Callable[[Callable[[Any], Any], Any], Any] = value_and_columns,
    over: Callable[[Replicate, Callable[[Any], Any]], Any] = average_of_weighted,
) -> Any:
    """The averages in `expansion`: channel potential M and its gradient in the overlaps; derivatives, (..., k); sums.

    Every block is differentiated by itself: what jax then transforms is small.

    Args:
        derive: gives what is averaged, of a function ``fn(u) = (M, gradient), sums`` of one block and of u.
        over: averages over the blocks.
    """

    def block_sums(kind: jax.Array | None, block: Any) -> Any:
        def given(u: Any) -> tuple[Model, Overlaps, Overlaps]:
            model, _, x = setting(u)
            model = model.given(kind)
            return model, x, of_sentence(model, x)

        model, x, tokens = lax.stop_gradient(given(u))
        found = found_in(replicate, model, tokens, block)

        def at(u: Any) -> Any:
            moving, y, tokens = given(u)
            points = replicate.points(moving, tokens, block, found)
            M, gradient, more = gradient_at(points, moving, y, lambda *_: sums(model, x, lax.stop_gradient(points)))
            return (M, gradient), more

        return derive(at, u)

    return over_kinds(setting(u)[0], lambda model: over(replicate, partial(block_sums, model.kind)))


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
