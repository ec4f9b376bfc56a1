"""The fields that M_s is averaged over: dense at the jumps, and in two groups by whether there is one nearby."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...averages.fields import fields, whiten
from ...averages.lines import LineNodes
from ...averages.near_jumps import lay_nodes
from ...model import Model
from ...overlaps import Overlaps
from .potentials import Averages, BrokenOverlaps, Outer, cluster_points, inner, searched

_BLOCK = 256  # fields whose inner averages are taken together; there are jumps at them
_WIDE = 1024  # likewise, without jumps
_ROUND = 32  # blocks: their number is rounded up to a multiple, for replicates to share one program
_SAME = 1e-5  # of M: an inner average that a smooth rule gives to that is taken by it


def averages_at(model: Model, rs: Overlaps, x: BrokenOverlaps, s: jax.Array, lines: LineNodes) -> Averages:
    """Fields along the lines, dense at the jumps of the RS state, by whether a smooth inner rule does for them."""
    width = float(jnp.sqrt(jnp.trace(x.q1 - x.q0, axis1=1, axis2=2).sum() / jnp.trace(rs.q, axis1=1, axis2=2).sum()))
    laid = lay_nodes(model, rs, lines, width)
    h, log_density = _fields(model, rs, *map(jnp.asarray, laid[:2]))
    outer = Outer(h, jnp.asarray(laid.teacher), jnp.asarray(laid.weight), log_density)
    blocks = _in_blocks(outer, _WIDE)
    differ, size = (np.asarray(a).ravel() for a in _missed(model, x, s, blocks))
    weight = np.asarray(blocks.weight).ravel()
    near = (differ > _SAME * np.sum(weight * size)) & (weight > 0)
    near[np.argmax(weight * differ)] = True  # no group is empty
    flat = jax.tree.map(lambda a: np.moveaxis(np.asarray(a), 0, -2).reshape(*a.shape[1:-1], -1), blocks)
    parts = [jax.tree.map(lambda a, keep=keep: jnp.asarray(a[..., keep]), flat) for keep in (near, ~near)]
    return Averages(_in_blocks(parts[0], _BLOCK), _in_blocks(parts[1], _WIDE), lines)


@eqx.filter_jit
def _fields(model: Model, x: Overlaps, student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
    h, y = fields(model, x, student, teacher)
    return h, whiten(model, x, h, y)[1]


@eqx.filter_jit
def _missed(model: Model, x: BrokenOverlaps, s: jax.Array, blocks: Outer) -> tuple[jax.Array, jax.Array]:
    """By how much the smooth inner rule is off at every field, and the envelope's size."""

    def fill(k: jax.Array, values: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block = jax.tree.map(lambda a: a[k], blocks)
        fine, rough = (
            inner(cluster_points(model, x, s, block, searched(model, x, s, block, jumps)), (model, x, s))[0]
            for jumps in (True, False)
        )
        return values[0].at[k].set(jnp.abs(fine - rough)), values[1].at[k].set(jnp.abs(fine))

    zero = jnp.zeros_like(blocks.weight)
    return lax.fori_loop(0, jnp.sum(jnp.any(blocks.weight > 0, 1)), fill, (zero, zero))


def _in_blocks(outer: Outer, width: int) -> Outer:
    """Fields in whole blocks, of a number that is a multiple of `_ROUND`; those that fill them up have no weight."""
    size = outer.weight.shape[-1]
    count = -(-max(size, 1) // (width * _ROUND)) * _ROUND

    def split(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)], mode="edge")
        return jnp.moveaxis(padded.reshape(*a.shape[:-1], count, width), -2, 0)

    blocks = jax.tree.map(split, outer)
    real = (jnp.arange(count * width) < size).reshape(count, width)
    return blocks._replace(weight=jnp.where(real, blocks.weight, 0.0))
