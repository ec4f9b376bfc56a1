"""The fields that M_s is averaged over: dense at the jumps, and in two groups, with and without a jump nearby."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ..averages.fields import fields, whiten
from ..averages.lines import LineNodes
from ..base.trees import indexed, zeros
from ..base.types import AnyArray
from ..model.model import Model
from ..model.overlaps import Overlaps
from .cluster_jumps import find_rough_jump
from .clusters import by_field, find as find_jumps, find_smooth
from .near_jumps import lay_nodes
from .potentials import Averages, OneRSBOverlaps, Outer, searched

_BLOCK = 256  # number of fields near a jump whose inner averages are taken together
_SMOOTH_BLOCK = 1024  # the same for fields without a jump nearby
_ROUND = 32  # the number of blocks is rounded up to a multiple of this, so that replicates share one program


def averages_at(model: Model, rs: Overlaps, x: OneRSBOverlaps, s: Float[Array, ""], lines: LineNodes) -> Averages:
    """Lay fields along the lines, dense at the jumps of the RS state, in groups with and without a jump nearby."""
    width = float(jnp.sqrt(jnp.trace(x.q1 - x.q0, axis1=1, axis2=2).sum() / jnp.trace(rs.q, axis1=1, axis2=2).sum()))
    nodes = lay_nodes(model, rs, lines, width)
    h, log_density = _outer_fields(model, rs, *map(jnp.asarray, nodes[:2]))
    outer = Outer(h, jnp.asarray(nodes.teacher), jnp.asarray(nodes.weight), log_density)
    blocks = _in_blocks(outer, _SMOOTH_BLOCK)
    blocks = blocks._replace(searches=_searched(model, x, s, blocks, find_rough_jump))
    flat = jax.tree.map(lambda a: np.moveaxis(np.asarray(a), 0, -2).reshape(*a.shape[1:-1], -1), blocks)
    has_jump, is_weighted = np.any(flat.searches[0].jump != 0, (0, 1)), flat.weight > 0

    def group(find: Callable[..., tuple], mask: Bool[np.ndarray, " fields"], width: int) -> Outer:
        subset = _in_blocks(indexed(flat, (..., mask)), width)
        return subset._replace(searches=_searched(model, x, s, subset, find))

    return Averages(
        group(find_jumps, has_jump & is_weighted, _BLOCK),
        group(find_smooth, ~has_jump & is_weighted, _SMOOTH_BLOCK),
        lines,
    )


@eqx.filter_jit
def _outer_fields(
    model: Model, x: Overlaps, student: Float[Array, "L r N"], teacher: Float[Array, "L t N"]
) -> tuple[Float[Array, "L r N"], Float[Array, " N"]]:
    """Return the student's fields, and their log density given the teacher's."""
    h, y = fields(model, x, student, teacher)
    return h, whiten(model, x, h, y)[1]


@eqx.filter_jit
def _searched(model: Model, x: OneRSBOverlaps, s: Float[Array, ""], blocks: Outer, find: Callable[..., tuple]) -> tuple:
    """Apply a search of `clusters` to all blocks that have fields with a weight."""

    def search_block(block: Outer) -> PyTree:
        return by_field(searched(model, x, s, block, find), len(block.weight))

    def fill(k: Int[Array, ""], values: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: a.at[k].set(b), values, search_block(indexed(blocks, k)))

    shapes = jax.eval_shape(search_block, indexed(blocks, 0))
    zero = zeros(shapes, len(blocks.weight))
    return (lax.fori_loop(0, jnp.sum(jnp.any(blocks.weight > 0, 1)), fill, zero),)


def _in_blocks(outer: Outer, width: int) -> Outer:
    """Return the fields in whole blocks, a multiple of `_ROUND`; fields that fill up the last blocks have no weight."""
    size = outer.weight.shape[-1]
    count = -(-max(size, 1) // (width * _ROUND)) * _ROUND

    def split(a: Shaped[AnyArray, "*axes size"]) -> Shaped[Array, "count *axes width"]:
        pad = [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)]
        padded = jnp.pad(jnp.asarray(a), pad, mode="edge" if size else "constant")
        return jnp.moveaxis(padded.reshape(*a.shape[:-1], count, width), -2, 0)

    blocks = jax.tree.map(split, outer)
    is_field = (jnp.arange(count * width) < size).reshape(count, width)
    return blocks._replace(weight=jnp.where(is_field, blocks.weight, 0.0))
