"""Small linear algebra.

Matrices (..., r, r) of the order parameters, which are numbers where r = 1: LAPACK would take most of the time that a
program needs to compile. Then matrices at very many nodes, one array per number: batched products of tiny ones are slow.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp


def inverse(a: jax.Array) -> jax.Array:
    """Inverse over the last two axes."""
    return jnp.reciprocal(a) if a.shape[-1] == 1 else jnp.linalg.inv(a)


def cholesky(a: jax.Array) -> jax.Array:
    """Lower Cholesky root over the last two axes; NaN where there is none."""
    return jnp.sqrt(a) if a.shape[-1] == 1 else jnp.linalg.cholesky(a)


def positive_definite(a: jax.Array) -> jax.Array:
    """Whether all matrices over the last two axes are, a boolean scalar."""
    return jnp.all(jnp.diagonal(cholesky(a), axis1=-2, axis2=-1) > 0)  # also False for NaN


def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a^{-1} b`` over the last two axes."""
    return b / a if a.shape[-1] == 1 else jnp.linalg.solve(a, b)


def apply(matrix: jax.Array, v: jax.Array) -> jax.Array:
    """``matrix_l v_l`` for every token and node: (L, a, b), (L, b, N) -> (L, a, N)."""
    rows, columns = matrix.shape[1:]
    return jnp.stack([sum(matrix[:, i, j, None] * v[:, j] for j in range(columns)) for i in range(rows)], 1)


def dot(a: Any, b: Any) -> jax.Array:
    """``sum_i a_i b_i`` of lanes or numbers, term by term."""
    return functools.reduce(operator.add, (p * q for p, q in zip(a, b, strict=True)))


def matvec(matrix: jax.Array, v: jax.Array) -> list[jax.Array]:
    """A matrix (n, n) that all nodes share times vectors (n, N), as n lanes."""
    n = v.shape[0]
    return [dot(matrix[i], v) for i in range(n)]


def ldl_solve(rows: list, b: list, floor: jax.Array | None = None) -> list:
    """Solve symmetric n x n systems given as lists of lanes; with a `floor`, with pivots max(|pivot|, floor)."""
    n = len(b)
    a, b = [list(row) for row in rows], list(b)
    pivots: list = []
    for k in range(n):
        pivot = a[k][k] if floor is None else jnp.maximum(jnp.abs(a[k][k]), floor[k])
        pivots.append(pivot)
        for i in range(k + 1, n):
            factor = a[i][k] / pivot
            for j in range(k + 1, n):
                a[i][j] = a[i][j] - factor * a[k][j]
            b[i] = b[i] - factor * b[k]
    for k in reversed(range(n)):
        for j in range(k + 1, n):
            b[k] = b[k] - a[k][j] * b[j]
        b[k] = b[k] / pivots[k]
    return b
