"""The operations on trees of arrays, and on small matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from tiedattn_jax.base import arrays

A, B = np.arange(6.0).reshape(2, 3), np.array([True, False])
EQUAL, CLOSE = np.testing.assert_array_equal, np.testing.assert_allclose


@pytest.mark.parametrize("index", [1, slice(1), np.array([1, 0, 1]), (..., None)], ids=str)
def test_indexed_arrays_keep_their_kind(index):
    for kind, array in ((np, np.ndarray), (jnp, jax.Array)):
        tree = {"a": kind.asarray(A), "b": (kind.asarray(B), None)}
        result = arrays.indexed(tree, index)
        assert jax.tree.structure(result) == jax.tree.structure(tree) and isinstance(result["a"], array)
        EQUAL(result["a"], A[index])
        EQUAL(result["b"][0], B[index])


def test_stacks_of_trees():
    """Stacked arrays are on the host, and keep their dtypes."""
    copies = arrays.repeated((A, jnp.asarray(2.0)), 4)
    assert copies[0].shape == (4, 2, 3) and copies[1].shape == (4,)
    EQUAL(copies[0][3], A)
    EQUAL(arrays.tiled((A,), 2)[0], np.concatenate([A, A], -1))
    entries = [(A, jnp.float32(1)), (jnp.asarray(2 * A), jnp.float32(2))]
    stack = arrays.stacked(entries)
    assert all(type(a) is np.ndarray for a in stack) and stack[0].shape == (2, 2, 3) and stack[1].dtype == np.float32
    for entry, expected in zip(arrays.unstacked(stack, 2), entries, strict=True):
        jax.tree.map(EQUAL, entry, expected)
    assert isinstance(arrays.unstacked((jnp.asarray(A),), 2)[1][0], np.ndarray)


def test_unravelled_inverts_ravel_pytree_for_many_rows():
    """Shapes and dtypes are those of the example, and the arrays are on the host."""
    trees = [{"a": k + A, "b": (jnp.asarray(3 + k, jnp.int32), k + np.arange(4.0))} for k in range(3)]
    rows = np.stack([ravel_pytree(tree)[0] for tree in trees])
    for tree, expected in zip(arrays.unravelled(rows, trees[0]), trees, strict=True):
        jax.tree.map(EQUAL, tree, expected)
        assert tree["b"][0].dtype == np.int32 and all(not isinstance(a, jax.Array) for a in jax.tree.leaves(tree))


def functions_of_matrices():
    """Yield functions with their arguments, what numpy gives, and the relative error."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 2, 3, 5))
    matrices, matrix, v = rng.normal(size=(2, 3, 7)), rng.normal(size=(2, 2, 3)), rng.normal(size=(2, 3, 7))
    yield arrays.inner_products, (a, b[:, :2]), (a @ b.swapaxes(1, 2))[..., :2], 1e-12
    yield arrays.matvec, (matrices, v[0]), np.einsum("abn,bn->an", matrices, v[0]), 1e-12
    yield arrays.apply, (matrix, v), matrix @ v, 1e-12
    yield arrays.total, (v,), v[0] + v[1], 1e-12
    for n in (1, 2, 3, 5):  # at nodes; up to four entry by entry, else with a loop over the pivots
        a, b = rng.normal(size=(n, n, 64)), rng.normal(size=(n, 64))
        a = a + a.swapaxes(0, 1) + 2 * np.eye(n)[..., None]
        stack = np.moveaxis(a, -1, 0)
        solution = np.moveaxis(np.linalg.solve(stack, b.T[..., None]), 0, -1)
        definite = np.linalg.eigvalsh(stack)[:, 0] > 0
        assert 0 < definite.sum() < 64
        yield arrays.definite, (a,), definite, 0
        yield arrays.determinant, (a,), np.linalg.det(stack), 1e-9
        yield arrays.ldl_solve, (a, np.stack([b, 2 * b], 1)), np.concatenate([solution, 2 * solution], 1), 1e-9
    for n in (2, 5):  # a pivot is replaced by max(|pivot|, floor)
        ones = np.ones(n - 2)
        diagonal = np.diag([-4.0, 0.1, *ones])[..., None]
        expected = np.array([0.25, 2.0, *0.5 * ones])[:, None]
        yield arrays.ldl_solve, (diagonal, np.ones((n, 1)), np.array([1.0, 0.5, *2 * ones])), expected, 1e-7
    for r in (1, 4, 5):  # of order parameters; up to four columns by arithmetic
        root, b, diagonal = np.tril(rng.normal(size=(3, r, r))), rng.normal(size=(3, r, 2)), np.arange(r)
        root[:, diagonal, diagonal] = np.abs(root[:, diagonal, diagonal]) + 0.1
        a = root @ root.swapaxes(1, 2)
        yield arrays.cholesky, (a,), root, 1e-9
        for matrix in (a, root, np.eye(r) + a * rng.uniform(size=(3, 1, r))):  # the last one is not symmetric
            yield arrays.inverse, (matrix,), np.linalg.inv(matrix), 1e-9
            yield arrays.solve, (matrix, b), np.linalg.solve(matrix, b), 1e-9
        yield arrays.positive_definite, (a,), True, 0
        for entry in (-1.0, 0.0, np.nan):
            spoiled = a.copy()
            spoiled[1, -1, -1] = entry
            yield arrays.positive_definite, (spoiled,), False, 0


def test_functions_of_matrices():
    rows = list(functions_of_matrices())
    results = jax.jit(lambda every: [row[0](*a) for row, a in zip(rows, every, strict=True)])([row[1] for row in rows])
    for (fn, _, expected, rtol), result in zip(rows, results, strict=True):
        atol = 1e-12 if fn in (arrays.cholesky, arrays.inverse) else 0  # they have zeros
        CLOSE(result, expected, rtol=rtol, atol=atol, err_msg=fn.__name__)
    assert arrays.spread_to(A, np.ones((2, 3, 4, 5))).shape == (2, 3, 1, 1) and arrays.spread_to(A, A).shape == (2, 3)


def test_lapack_takes_one_matrix_after_the_other_on_a_cpu():
    """Two batched calls wait for each other's threads for ever, in one program or in two."""
    a = np.random.default_rng(0).normal(size=(5, 3, 3))
    a = a + a.swapaxes(1, 2)

    def largest(a: jax.Array) -> jax.Array:
        return arrays.one_by_one(jnp.linalg.eigh, a)[0][:, -1]

    program = jax.jit(largest).lower(a).compile()
    CLOSE(program(a), np.linalg.eigvalsh(a)[:, -1], rtol=1e-14)
    vectors = np.linalg.eigh(a)[1][:, :, -1]
    slopes = jax.jit(jax.grad(lambda a: largest((a + jnp.swapaxes(a, 1, 2)) / 2).sum()))(a)
    CLOSE(slopes, vectors[:, :, None] * vectors[:, None, :], atol=1e-13)
    calls = [line for line in program.as_text().splitlines() if "syevd" in line and "custom-call(" in line]
    assert calls and all("[5,3,3]" not in line for line in calls)
