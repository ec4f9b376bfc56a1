"""Directions of the scores that the loss of a wide layer sees, found from its gradients at random scores.

The functions take a `layer` with its `loss`, `pairs`, `tokens`, `sides` and `teacher`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import InputError

_SEEN = 1e-6  # singular value over the largest above which the loss sees a direction of the scores; 1e3 eps if larger


def _echelon(rows: Float[np.ndarray, "n k"], digits: int) -> Float[np.ndarray, "n k"]:
    """Return the reduced echelon form: the same rows for equal spaces, so that equal losses share programs."""
    rows, n = rows.copy(), 0
    for column in rows.T:  # a view, which follows the rows
        pivot = n + np.argmax(np.abs(column[n:]))
        if abs(column[pivot]) > _SEEN:
            rows[np.array([n, pivot])] = rows[np.array([pivot, n])]
            rows[n] /= column[n]
            others = np.arange(len(rows)) != n
            rows[others] -= np.outer(column[others], rows[n])
            n += 1
        if n == len(rows):
            break
    return np.round(rows, digits)


_SAME = 1e-5  # difference of losses, over their spread, from which on they are not equal
_SIZES = 1.0, 1 / 30  # of random scores, over the teacher's: large ones saturate a softmax
_PROBES = 4  # random scores for each pair of tokens


@eqx.filter_jit
def _probed_losses(layer: Any, H: Float[Array, "K L L"], Y: Float[Array, "K L L"]) -> tuple[Float[Array, " K"], Array]:
    """Return losses, and their slopes in the student's scores, (K, L, L)."""
    return jax.vmap(jax.value_and_grad(layer.loss))(H, Y)


def probe(layer: Any) -> tuple[Callable[[Array, Array], tuple[Array, Array]], Array, Array]:
    """Return a function of scores of student and teacher (K, L, L) to losses and their slopes, and random scores.

    The scores have the teacher's size. Traced numbers are replaced, because the form of the loss matters only.
    """
    units, variance = _units(layer)
    draws = np.random.default_rng(0).standard_normal((_PROBES * len(units), 2, len(units))) * np.sqrt(variance)
    known = jax.tree.map(lambda a: 0.7 * jnp.ones(a.shape, a.dtype) if isinstance(a, jax.core.Tracer) else a, layer)
    sizes = np.sqrt(float(known.teacher.rho)) * np.resize(_SIZES, len(draws))[:, None, None]
    H, Y = np.moveaxis(np.tensordot(draws * sizes, units, 1), 1, 0)
    return partial(_probed_losses, known), jnp.asarray(H), jnp.asarray(Y)


def _units(layer: Any) -> tuple[Float[np.ndarray, "K L L"], Float[np.ndarray, " K"]]:
    """Return the scores with a one for every pair of tokens, and the variances of random scores."""
    rows, columns = layer.pairs
    units = np.zeros((len(rows), layer.tokens, layer.tokens))
    units[np.arange(len(rows)), rows, columns] = 1.0
    if layer.sides == 2:
        return units, np.ones(len(rows))
    units[np.arange(len(rows)), columns, rows] = 1.0
    return units, np.where(rows == columns, 2.0, 1.0)


def _is_sum_of_rows(losses: Callable[[Array, Array], tuple[Array, Array]], H: Array, Y: Array) -> bool:
    """Return whether a loss is a sum of one function for each row of both scores."""
    one = losses(H, Y)[0]
    both = one + one[::-1]  # with those of the draws in reversed order
    rows = np.eye(H.shape[1], dtype=bool)[:, :, None]
    mixed = [losses(*(jnp.where(row, a[::-1], a) for a in (H, Y)))[0] for row in rows]
    return all(are_same(swapped + swapped[::-1], both) for swapped in mixed)


def are_same(a: Any, b: Any) -> bool:
    """Return whether numbers are equal but for rounding, relative to how much they differ among each other."""
    a, b = np.asarray(a), np.asarray(b)
    return bool(np.max(np.abs(a - b)) <= _SAME * max(np.ptp(b), np.finfo(b.dtype).tiny))


def other_tokens(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the scores of every token with the others, (L, 1) and (L, L - 1)."""
    rows = np.arange(tokens)[:, None]
    return rows, (rows + np.arange(1, tokens)) % tokens


def is_balanced(layer: Any) -> bool:
    """Return whether scores that are drawn alike for all tokens push those of the student nowhere in the mean.

    The mean is that over the orders of the other tokens and over the signs of the scores.
    """
    rows, columns = other_tokens(layer.tokens)

    def orders(scores: Array) -> Float[np.ndarray, "V K L L"]:
        """Return scores in all orders of the other tokens that are rotations, with both signs."""
        rotated = np.repeat(np.asarray(scores)[None], columns.shape[1], 0)
        for k, one in enumerate(rotated):
            one[:, rows, columns] = one[:, rows, np.roll(columns, k, 1)]
        return np.concatenate([rotated, -rotated])

    with jax.ensure_compile_time_eval():
        losses, H, Y = probe(layer)
        labels = orders(Y)
        for start in (orders(0 * H), orders(H)):
            _, slopes = losses(*(jnp.asarray(scores.reshape(-1, *H.shape[1:])) for scores in (start, labels)))
            parts = np.asarray(layer.coordinates(jnp.moveaxis(slopes, 0, -1)))
            push = parts.reshape(*parts.shape[:2], *labels.shape[:2]).sum(2)
            if np.max(np.abs(push)) > _SAME * np.max(np.abs(parts)):
                return False
    return True


def blocks_of(layer: Any) -> str:
    """Return, as text, bases of the directions that the loss sees, orthonormal in the metric of random scores.

    These are the directions of its gradients at random scores. If the loss is a sum over the rows of an untied layer,
    every row has a basis of its own.

    Raises:
        InputError: the loss is no finite number, is constant, or depends on scores of the teacher in a direction in
            which it does not depend on those of the student.
    """
    units, variance = _units(layer)
    with jax.ensure_compile_time_eval():
        losses, H, Y = probe(layer)
        shape = jax.eval_shape(layer.loss, H[0], Y[0]).shape
        if shape:
            raise InputError("loss", f"must return one number, got shape {shape}")
        values, gradients = map(np.asarray, losses(H, Y))
        by_row = layer.sides == 2 and layer.tokens > 1 and _is_sum_of_rows(losses, H, Y)
    if not (np.all(np.isfinite(values)) and np.all(np.isfinite(gradients))):
        raise InputError("loss", "must be finite and smooth for all scores, got a value or slope that is not finite")
    if not np.any(gradients):
        raise InputError("loss", "must depend on the scores, got a constant")
    slopes = np.einsum("nab,pab->np", gradients, units.astype(gradients.dtype))
    # Slopes of any size show directions, but for those of a saturated softmax, which are rounding errors.
    sizes, eps = np.linalg.norm(slopes, axis=1), float(np.finfo(slopes.dtype).eps)
    share = max(_SEEN, 1e3 * eps)
    exact = sizes > 10 * eps / share * np.max(sizes)
    slopes = slopes[exact] / sizes[exact, None]
    parts = [slopes * (layer.pairs[0] == row) for row in range(layer.tokens)] if by_row else [slopes]
    least = share * float(np.linalg.norm(slopes, 2))
    blocks = [_basis_of(part, least, units, variance) for part in parts if np.linalg.norm(part, 2) > least]
    most = max(map(len, blocks))
    padded = [np.pad(block, ((0, most - len(block)), (0, 0), (0, 0))) for block in blocks]
    squares = np.sum(units, (1, 2))
    seen = np.einsum("nab,pab->np", np.concatenate(blocks), units) / squares
    unseen = np.eye(len(units)) - np.linalg.pinv(seen) @ seen
    with jax.ensure_compile_time_eval():
        moved = np.tensordot(np.einsum("nab,pab->np", Y, units) / squares @ unseen, units, 1)
        if not are_same(losses(H, Y - moved)[0], values):
            text = "must depend on all scores of the teacher that it sees through those of the student, too"
            raise InputError("loss", f"{text}, got one whose labels use others")
    return json.dumps((np.round(padded, 15) + 0.0).tolist())  # no negative zeros


def _basis_of(slopes: np.ndarray, least: float, units: np.ndarray, variance: np.ndarray) -> Float[np.ndarray, "n L L"]:
    """Return a basis of the directions along which slopes (K, pairs) have a singular value above the least."""
    _, sizes, seen = np.linalg.svd(slopes, full_matrices=False)
    B = _echelon(seen[sizes > least], 12 if slopes.dtype == np.float64 else 5).T
    # Random scores have covariance diag(variance); u = B^T h has K = B^T diag(variance) B = C C^T, and h ~ B^+^T u.
    values_, vectors = np.linalg.eigh(B.T @ (variance[:, None] * B))
    C = vectors * np.sqrt(values_) @ vectors.T
    return np.einsum("in,iab->nab", np.linalg.pinv(B).T @ C, units)


def sees_diagonal(layer: Any) -> bool:
    """Return whether a loss depends on the student's scores of tokens with themselves."""
    with jax.ensure_compile_time_eval():
        losses, H, Y = probe(layer)
        own = jnp.eye(layer.tokens, dtype=H.dtype)
        return not are_same(losses(H + own, Y)[0], losses(H, Y)[0])
