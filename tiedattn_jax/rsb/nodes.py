"""The fields that M_s is averaged over: dense at the jumps, and in two groups by whether there is one nearby."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..averages.fields import fields, whiten
from ..averages.lines import LineNodes
from ..model.model import Model
from ..model.overlaps import Overlaps
from .clusters import by_field, find as find_jumps, find_smooth, look_beside
from .near_jumps import lay_nodes
from .potentials import Averages, BrokenOverlaps, Outer, searched

_BLOCK = 256  # fields whose inner averages are taken together; there are jumps at them
_WIDE = 1024  # likewise, without jumps
_ROUND = 32  # blocks: their number is rounded up to a multiple, for replicates to share one program


def averages_at(model: Model, rs: Overlaps, x: BrokenOverlaps, s: jax.Array, lines: LineNodes) -> Averages:
    """Fields along the lines, dense at the jumps of the RS state, by whether a smooth inner rule does for them."""
    width = float(jnp.sqrt(jnp.trace(x.q1 - x.q0, axis1=1, axis2=2).sum() / jnp.trace(rs.q, axis1=1, axis2=2).sum()))
    laid = lay_nodes(model, rs, lines, width)
    h, log_density = _fields(model, rs, *map(jnp.asarray, laid[:2]))
    outer = Outer(h, jnp.asarray(laid.teacher), jnp.asarray(laid.weight), log_density)
    blocks = _in_blocks(outer, _WIDE)
    blocks = blocks._replace(found=_searched(model, x, s, blocks, look_beside))
    flat = jax.tree.map(lambda a: np.moveaxis(np.asarray(a), 0, -2).reshape(*a.shape[1:-1], -1), blocks)
    near, real = np.any(flat.found[0].jump != 0, (0, 1)), flat.weight > 0

    def group(find: Callable[..., Any], keep: np.ndarray, width: int) -> Outer:
        some = _in_blocks(jax.tree.map(lambda a: a[..., keep], flat), width)
        return some._replace(found=_searched(model, x, s, some, find))

    return Averages(group(find_jumps, near & real, _BLOCK), group(find_smooth, ~near & real, _WIDE), lines)


@eqx.filter_jit
def _fields(model: Model, x: Overlaps, student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
    h, y = fields(model, x, student, teacher)
    return h, whiten(model, x, h, y)[1]


@eqx.filter_jit
def _searched(model: Model, x: BrokenOverlaps, s: jax.Array, blocks: Outer, find: Callable[..., Any]) -> tuple:
    """What a search of `clusters` finds in all blocks with fields that weigh."""

    def one(block: Outer) -> Any:
        return by_field(searched(model, x, s, block, find), len(block.weight))

    def fill(k: jax.Array, values: Any) -> Any:
        return jax.tree.map(lambda a, b: a.at[k].set(b), values, one(jax.tree.map(lambda a: a[k], blocks)))

    like = jax.eval_shape(one, jax.tree.map(lambda a: a[0], blocks))
    zero = jax.tree.map(lambda a: jnp.zeros((len(blocks.weight), *a.shape), a.dtype), like)
    return (lax.fori_loop(0, jnp.sum(jnp.any(blocks.weight > 0, 1)), fill, zero),)


def _in_blocks(outer: Outer, width: int) -> Outer:
    """Fields in whole blocks, of a number that is a multiple of `_ROUND`; those that fill them up have no weight."""
    size = outer.weight.shape[-1]
    count = -(-max(size, 1) // (width * _ROUND)) * _ROUND

    def split(a: Any) -> jax.Array:
        pad = [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)]
        padded = jnp.pad(jnp.asarray(a), pad, mode="edge" if size else "constant")
        return jnp.moveaxis(padded.reshape(*a.shape[:-1], count, width), -2, 0)

    blocks = jax.tree.map(split, outer)
    real = (jnp.arange(count * width) < size).reshape(count, width)
    return blocks._replace(weight=jnp.where(real, blocks.weight, 0.0))
