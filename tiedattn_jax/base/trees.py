"""Trees of arrays: one operation on every array."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, PyTree

from .types import AnyArray


def indexed(tree: PyTree, index: ArrayLike | slice | tuple) -> PyTree:
    """Index every array: (N, ...) -> (...) for a number; arrays of the host stay there."""
    return jax.tree.map(lambda a: a[index], tree)


def repeated(tree: PyTree, count: int) -> PyTree:
    """Repeat every array along a new leading axis: (...) -> (count, ...)."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *jnp.shape(a))), tree)


def tiled(tree: PyTree, count: int) -> PyTree:
    """Repeat every array along its last axis: (..., N) -> (..., count N)."""
    return jax.tree.map(lambda a: jnp.tile(a, count), tree)


def stacked(trees: Sequence[PyTree]) -> PyTree:
    """Stack trees along a new leading axis, on the host: N times (...) -> (N, ...)."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(a) for a in leaves]), *trees)


def unstacked(tree: PyTree, count: int) -> list[PyTree]:
    """Split a tree along its leading axis, on the host: (count, ...) -> count times (...)."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(a) for a in leaves]
    return [jax.tree.unflatten(structure, [a[k] for a in arrays]) for k in range(count)]


def either(condition: Bool[AnyArray, "..."], a: PyTree, b: PyTree) -> PyTree:
    """Choose between trees: `a` where `condition` holds, `b` elsewhere; it broadcasts against all arrays (...)."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def zeros(shapes: PyTree, *axes: int) -> PyTree:
    """Fill arrays with zeros, with leading `axes` added to the shapes of a tree: (...) -> (*axes, ...)."""
    return jax.tree.map(lambda a: jnp.zeros((*axes, *a.shape), a.dtype), shapes)
