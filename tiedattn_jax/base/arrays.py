"""Arrays: types that many signatures share, one operation on every array of a tree, and algebra of small matrices.

The shapes in a signature bind their names within one call; the tests check them.

Small matrices are of two kinds. Order parameters are matrices (..., r, r), and plain numbers for r = 1; calls to LAPACK
would dominate the compile time. Matrices at N nodes have the node axis last, (n, n, N); batched products of tiny
matrices are slow.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Real, Shaped

AnyArray: TypeAlias = Array | np.ndarray  # on a device or on the host
ARRAYS = (jax.Array, np.ndarray, np.generic)  # their types, and that of numpy's numbers
# Arrays of results, and arrays that requests for results hand on: jax's, or numpy's where they are on the host. Both
# have the methods that the package uses. To mypy those of results are jax's, and it lets the others pass.
if TYPE_CHECKING:
    StateArray: TypeAlias = Array
    GivenArray: TypeAlias = Any
else:
    StateArray = GivenArray = AnyArray
Scalar: TypeAlias = float | Float[StateArray, ""]
# A real number of Python, numpy or jax.
Number: TypeAlias = float | Real[Array | np.ndarray | np.floating | np.integer, ""]


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
    return jax.tree.map(lambda *leaves: np.array([np.asarray(a) for a in leaves]), *trees)


def unstacked(tree: PyTree, count: int) -> list[PyTree]:
    """Split a tree along its leading axis, on the host: (count, ...) -> count times (...)."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(a) for a in leaves]
    return [jax.tree.unflatten(structure, [a[k] for a in arrays]) for k in range(count)]


def unravelled(rows: Real[np.ndarray, "N k"], example: PyTree) -> list[PyTree]:
    """Return the trees whose numbers, in the order of `ravel_pytree`, are rows; on the host, shaped as an example."""
    leaves, structure = jax.tree.flatten(example)
    parts = np.split(rows, np.cumsum([np.size(a) for a in leaves])[:-1], 1)
    arrays = [part.reshape(-1, *a.shape).astype(a.dtype) for part, a in zip(parts, leaves, strict=True)]
    return unstacked(jax.tree.unflatten(structure, arrays), len(rows))


def either(condition: Bool[AnyArray, "..."], a: PyTree, b: PyTree) -> PyTree:
    """Choose between trees: `a` where `condition` holds, `b` elsewhere; it broadcasts against all arrays (...)."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def spread_to(values: AnyArray | np.generic, a: Any) -> Any:
    """Append axes of size one to values (*axes), so that they broadcast against an array (*axes, ...)."""
    return values.reshape((*values.shape, *[1] * (np.ndim(a) - values.ndim)))


def zeros(shapes: PyTree, *axes: int) -> PyTree:
    """Fill arrays with zeros, with leading `axes` added to the shapes of a tree: (...) -> (*axes, ...)."""
    return jax.tree.map(lambda a: jnp.zeros((*axes, *a.shape), a.dtype), shapes)


P = ParamSpec("P")
T = TypeVar("T")


def precise(fn: Callable[P, T]) -> Callable[P, T]:
    """Compute all matrix products inside a function with the precision of their dtype.

    By default GPUs round the factors of a product in float32 to TF32 and TPUs round them to bfloat16. jax reads the
    precision while it traces a product, so this decorator belongs inside `jit`, and on every rule of a `custom_jvp`:
    jax traces the rule on its own.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return call


def inner_products(a: Float[Array, "*batch i n"], b: Float[Array, "*batch j n"]) -> Float[Array, "*batch i j"]:
    """Return inner products over a long last axis.

    A GPU computes a matrix product with a small result on few of its cores, one step of n after the other; a sum uses
    all cores. CPUs are faster with the product.
    """

    def product(a: Array, b: Array) -> Array:
        return jnp.einsum("...in,...jn->...ij", a, b)

    def by_sums(a: Array, b: Array) -> Array:
        return jnp.sum(a[..., :, None, :] * b[..., None, :, :], -1)

    return lax.platform_dependent(a, b, cpu=precise(product), default=by_sums)


def inverse(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Return the inverse over the last two axes; `a` must be as in `solve`."""
    n = a.shape[-1]
    return jnp.reciprocal(a) if n == 1 else solve(a, jnp.broadcast_to(jnp.eye(n, dtype=a.dtype), a.shape))


def cholesky(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Return the lower Cholesky root over the last two axes; NaN where there is none."""
    return jnp.sqrt(a) if a.shape[-1] == 1 else jnp.linalg.cholesky(a)


def positive_definite(a: Float[Array, "*batch n n"]) -> Bool[Array, ""]:
    """Return whether all matrices over the last two axes are positive definite."""
    return jnp.all(jnp.diagonal(cholesky(a), axis1=-2, axis2=-1) > 0)  # also False for NaN


_UNROLLED = 4  # largest order that is solved entry by entry, in one kernel; larger ones would compile slowly


def solve(
    a: Float[Array, "*#batch n n"], b: Float[Array, "*#batch n k"], unrolled: int = _UNROLLED
) -> Float[Array, "*#batch n k"]:
    """Solve ``a x = b`` over the last two axes without pivoting.

    `a` must have positive leading minors or be triangular. Matrices up to the order `unrolled` are solved entry by
    entry: LAPACK compiles slowly, and two batched LAPACK solves in one program can deadlock on two or more cores
    (jaxlib 0.10.2).
    """
    if a.shape[-1] == 1:
        return b / a
    if a.shape[-1] > unrolled:
        return jnp.linalg.solve(a, b)
    rows, sides = (jnp.moveaxis(m, (-2, -1), (0, 1)) for m in (a, jnp.broadcast_to(b, (*a.shape[:-2], *b.shape[-2:]))))
    return jnp.moveaxis(_solve_entries(rows, sides, None), (0, 1), (-2, -1))


def one_by_one(fn: Callable[[Array], PyTree], a: Shaped[Array, "N ..."]) -> PyTree:
    """Apply a function of LAPACK to every matrix of a batch, on a CPU to one after the other.

    On a CPU a batched call of LAPACK waits for tasks in the pool of threads that it occupies itself. Two of them, in
    one program or in two, can wait for ever (jaxlib 0.10.2).
    """
    return lax.platform_dependent(a, cpu=functools.partial(lax.map, fn), default=jax.vmap(fn))


def apply(matrix: Float[Array, "L a b"], v: Float[Array, "L b N"]) -> Float[Array, "L a N"]:
    """Return ``matrix_l v_l`` for every token and node."""
    rows, columns = matrix.shape[1:]
    return jnp.stack([sum(matrix[:, i, j, None] * v[:, j] for j in range(columns)) for i in range(rows)], 1)


def total(terms: Iterable[Array]) -> Float[Array, "..."]:
    """Sum terms, or an array over its short leading axis, one by one: XLA fuses this with the operations around it."""
    return functools.reduce(operator.add, terms)


def matvec(matrix: Float[Array, "a b *#N"], v: Float[Array, "b *#N"]) -> Float[Array, "a *#N"]:
    """Multiply matrices, or one matrix (a, b, 1) that all nodes share, with vectors."""
    return total(matrix[:, j] * v[j] for j in range(v.shape[0]))


def determinant(matrix: Float[Array, "n n N"]) -> Float[Array, " N"]:
    """Return the determinants of symmetric matrices whose leading minors are not zero."""
    return functools.reduce(operator.mul, _pivots(matrix))


def definite(matrix: Float[Array, "n n N"]) -> Bool[Array, " N"]:
    """Return whether symmetric matrices are positive definite: whether all pivots are positive."""
    return functools.reduce(operator.and_, (pivot > 0 for pivot in _pivots(matrix)))


def eigenvalues_exceed(matrices: Float[AnyArray, "K n n"], bound: Number) -> Bool[AnyArray, " K"]:
    """Return whether all eigenvalues of symmetric matrices exceed a bound, on the host unless jax traces them."""
    if isinstance(matrices, jax.core.Tracer) or isinstance(bound, jax.core.Tracer):
        eye = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
        return definite(jnp.moveaxis(matrices - bound * eye, 0, -1))
    known = np.all(np.isfinite(matrices), (1, 2))
    return known & (np.linalg.eigvalsh(np.where(known[:, None, None], matrices, 0.0))[:, 0] > bound)


def ldl_solve(
    rows: Float[Array, "n n *#N"], b: Float[Array, "n *sides"], floor: Float[Array, " n"] | None = None
) -> Float[Array, "n *sides"]:
    """Solve symmetric n x n systems at N nodes.

    Args:
        rows: matrices. Up to 4 x 4 only the entries on and below the diagonal are read, so the others need not be
            computed.
        b: right-hand sides, (n, N) or (n, K, N).
        floor: least pivots; each pivot is replaced by max(|pivot|, floor).
    """
    n = len(b)
    if n > _UNROLLED:
        return _solve_arrays(rows, b, floor)
    return _solve_entries([[rows[max(i, j)][min(i, j)] for j in range(n)] for i in range(n)], b, floor)


def _pivot(
    diagonal: Float[Array, "..."], floor: Float[Array, " n"] | None, k: int | Int[Array, ""]
) -> Float[Array, "..."]:
    return diagonal if floor is None else jnp.maximum(jnp.abs(diagonal), floor[k])


def _pivots(matrix: Float[Array, "n n N"]) -> Sequence[Float[Array, " N"]] | Float[Array, "n N"]:
    """Return the pivots of symmetric matrices; up to 4 x 4 only entries on and below the diagonal are read."""
    n = len(matrix)
    if n > _UNROLLED:

        def clear(matrix: Float[Array, "n n N"], k: Int[Array, ""]) -> tuple[Float[Array, "n n N"], Float[Array, " N"]]:
            row = lax.dynamic_index_in_dim(matrix, k, 0)
            pivot = lax.dynamic_index_in_dim(row, k, 1)
            return matrix - lax.dynamic_index_in_dim(matrix, k, 1) * (row / pivot), pivot[0, 0]

        return lax.scan(clear, matrix, jnp.arange(n))[1]
    a, pivots = [list(row) for row in matrix], []
    for k in range(n):
        pivots.append(a[k][k])
        for i in range(k + 1, n):
            for j in range(k + 1, i + 1):
                a[i][j] = a[i][j] - a[i][k] / a[k][k] * a[j][k]
    return pivots


def _solve_entries(
    rows: Float[Array, "n n ..."] | Sequence[Sequence[Array]],
    b: Float[Array, "n ..."],
    floor: Float[Array, " n"] | None,
) -> Float[Array, "n ..."]:
    n = len(b)
    a, x = [list(row) for row in rows], list(b)
    pivots: list[Array] = []
    for k in range(n):
        pivot = _pivot(a[k][k], floor, k)
        pivots.append(pivot)
        for i in range(k + 1, n):
            factor = a[i][k] / pivot
            for j in range(k + 1, n):
                a[i][j] = a[i][j] - factor * a[k][j]
            x[i] = x[i] - factor * x[k]
    for k in reversed(range(n)):
        for j in range(k + 1, n):
            x[k] = x[k] - a[k][j] * x[j]
        x[k] = x[k] / pivots[k]
    return jnp.stack(x)


def _solve_arrays(
    a: Float[Array, "n n N"], b: Float[Array, "n *sides"], floor: Float[Array, " n"] | None
) -> Float[Array, "n *sides"]:
    """Solve with the same pivots in a loop that clears whole columns (Gauss-Jordan): no back substitution is needed."""
    n, sides = a.shape[0], b.reshape(b.shape[0], -1, b.shape[-1])
    row_index = jnp.arange(n)[:, None, None]

    def clear(k: Int[Array, ""], augmented: Float[Array, "n sides N"]) -> Float[Array, "n sides N"]:
        row = lax.dynamic_index_in_dim(augmented, k, 0)
        row = row / _pivot(lax.dynamic_index_in_dim(row, k, 1), floor, k)
        column = lax.dynamic_index_in_dim(augmented, k, 1)
        return jnp.where(row_index == k, row, augmented - column * row)

    return lax.fori_loop(0, n, clear, jnp.concatenate([a, sides], 1))[:, n:].reshape(b.shape)
