"""Trees of arrays: one operation on every array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def indexed(tree: Any, index: Any) -> Any:
    """Index every array: (N, ...) -> (...) for a number; arrays of the host stay there."""
    return jax.tree.map(lambda a: a[index], tree)


def repeated(tree: Any, count: int) -> Any:
    """Repeat every array along a new leading axis: (...) -> (count, ...)."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *jnp.shape(a))), tree)


def tiled(tree: Any, count: int) -> Any:
    """Repeat every array along its last axis: (..., N) -> (..., count N)."""
    return jax.tree.map(lambda a: jnp.tile(a, count), tree)


def stacked(trees: Sequence[Any]) -> Any:
    """Stack trees along a new leading axis, on the host: N times (...) -> (N, ...)."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(a) for a in leaves]), *trees)


def unstacked(tree: Any, count: int) -> list[Any]:
    """Split a tree along its leading axis, on the host: (count, ...) -> count times (...)."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(a) for a in leaves]
    return [jax.tree.unflatten(structure, [a[k] for a in arrays]) for k in range(count)]


def either(condition: Any, a: Any, b: Any) -> Any:
    """Choose between trees: `a` where `condition` holds, `b` elsewhere; it broadcasts against all arrays (...)."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def zeros(shapes: Any, *axes: int) -> Any:
    """Fill arrays with zeros, with leading `axes` added to the shapes of a tree: (...) -> (*axes, ...)."""
    return jax.tree.map(lambda a: jnp.zeros((*axes, *a.shape), a.dtype), shapes)
