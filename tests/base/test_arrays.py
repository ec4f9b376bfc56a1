"""The operations on trees of arrays, and on small matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from tiedattn_jax.base import arrays

A, B = np.arange(6.0).reshape(2, 3), np.array([True, False])


@pytest.mark.parametrize("kind", [np, jnp])
@pytest.mark.parametrize("index", [1, slice(1), np.array([1, 0, 1]), (..., None)], ids=str)
def test_indexed_arrays_keep_their_kind(kind, index):
    tree = {"a": kind.asarray(A), "b": (kind.asarray(B), None)}
    result = arrays.indexed(tree, index)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    np.testing.assert_array_equal(result["a"], A[index])
    np.testing.assert_array_equal(result["b"][0], B[index])
    assert isinstance(result["a"], np.ndarray if kind is np else jax.Array)


def test_repeated_leads_with_the_copies_and_tiled_ends_with_them():
    tree = A, jnp.asarray(2.0)
    copies = arrays.repeated(tree, 4)
    assert copies[0].shape == (4, 2, 3) and copies[1].shape == (4,)
    np.testing.assert_array_equal(copies[0][3], A)
    np.testing.assert_array_equal(arrays.tiled((A,), 2)[0], np.concatenate([A, A], -1))


def test_unstacked_inverts_stacked_on_the_host():
    lanes = [(A, jnp.float32(1)), (jnp.asarray(2 * A), jnp.float32(2))]
    stack = arrays.stacked(lanes)
    assert all(type(a) is np.ndarray for a in stack) and stack[0].shape == (2, 2, 3) and stack[1].dtype == np.float32
    for lane, expected in zip(arrays.unstacked(stack, 2), lanes, strict=True):
        jax.tree.map(np.testing.assert_array_equal, lane, expected)
    assert isinstance(arrays.unstacked((jnp.asarray(A),), 2)[1][0], np.ndarray)


def test_unravelled_inverts_ravel_pytree_for_many_rows():
    """Shapes and dtypes are those of the example, and the arrays are on the host."""
    trees = [{"a": k + A, "b": (jnp.asarray(3 + k, jnp.int32), k + np.arange(4.0))} for k in range(3)]
    rows = np.stack([ravel_pytree(tree)[0] for tree in trees])
    for tree, expected in zip(arrays.unravelled(rows, trees[0]), trees, strict=True):
        jax.tree.map(np.testing.assert_array_equal, tree, expected)
        assert tree["b"][0].dtype == np.int32 and all(not isinstance(a, jax.Array) for a in jax.tree.leaves(tree))


def test_either_chooses_entry_by_entry():
    chosen = arrays.either(jnp.asarray([True, False, True]), (A, 0.0 * A[0]), (-A, A[0]))
    np.testing.assert_array_equal(chosen[0], A * [1, -1, 1])
    np.testing.assert_array_equal(chosen[1], [0.0, 1.0, 0.0])


def test_zeros_take_shapes_and_dtypes():
    shapes = jax.eval_shape(lambda: (jnp.ones((2, 3), jnp.float32), jnp.ones((), int)))
    plain, led = arrays.zeros(shapes), arrays.zeros(shapes, 5, 1)
    assert [(a.shape, a.dtype) for a in plain] == [(a.shape, a.dtype) for a in shapes]
    assert led[0].shape == (5, 1, 2, 3) and led[1].dtype == shapes[1].dtype and not np.any(led[0])


@pytest.mark.parametrize("unrolled", [0, 4])
def test_small_linear_algebra(monkeypatch, unrolled):
    """`ldl_solve` and `apply` agree with numpy, entry by entry and with a loop over the pivots."""
    monkeypatch.setattr(arrays, "_UNROLLED", unrolled)
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(3, 3, 5)), rng.normal(size=(3, 5))
    A = A + A.swapaxes(0, 1)
    expected = np.stack([np.linalg.solve(A[..., k], b[:, k]) for k in range(5)], -1)
    A, b = jnp.asarray(A), jnp.asarray(b)
    np.testing.assert_allclose(arrays.ldl_solve(A, b), expected, rtol=1e-9)
    np.testing.assert_allclose(arrays.ldl_solve(A, jnp.stack([b, 2 * b], 1))[:, 1], 2 * expected, rtol=1e-9)
    indefinite = jnp.array([[-4.0, 0.0], [0.0, 0.1]])[..., None]
    np.testing.assert_allclose(arrays.ldl_solve(indefinite, jnp.ones((2, 1)), jnp.array([1.0, 0.5])), [[0.25], [2.0]])
    matrix, v = rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 2, 5))
    np.testing.assert_allclose(arrays.apply(jnp.asarray(matrix), jnp.asarray(v)), matrix @ v, rtol=1e-12)


@pytest.mark.parametrize("r", [1, 2, 3, 4, 5])
def test_matrices_of_order_parameters(r):
    """Cholesky factors, inverses and solves agree with numpy; up to four columns they are done by arithmetic.

    The matrices are symmetric, triangular, or unsymmetric with positive leading minors.
    """
    rng = np.random.default_rng(r)
    root, b = np.tril(rng.normal(size=(3, r, r))), rng.normal(size=(3, r, 2))
    diagonal = np.arange(r)
    root[:, diagonal, diagonal] = np.abs(root[:, diagonal, diagonal]) + 0.1
    a = root @ root.swapaxes(1, 2)
    np.testing.assert_allclose(arrays.cholesky(jnp.asarray(a)), root, rtol=1e-9, atol=1e-12)
    for matrix in (a, root, np.eye(r) + a * rng.uniform(size=(3, 1, r))):
        np.testing.assert_allclose(arrays.inverse(jnp.asarray(matrix)), np.linalg.inv(matrix), rtol=1e-9, atol=1e-12)
        expected = np.linalg.solve(matrix, b)
        np.testing.assert_allclose(arrays.solve(jnp.asarray(matrix), jnp.asarray(b)), expected, rtol=1e-9)
    assert arrays.positive_definite(jnp.asarray(a))
    for entry in (-1.0, 0.0, np.nan):
        a[1, -1, -1] = entry
        assert not arrays.positive_definite(jnp.asarray(a))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_definite_and_determinant(n):
    a = np.random.default_rng(n).normal(size=(n, n, 64))
    a = a + a.swapaxes(0, 1) + 2 * np.eye(n)[..., None]
    expected = np.linalg.eigvalsh(np.moveaxis(a, -1, 0))[:, 0] > 0
    assert 0 < expected.sum() < 64
    np.testing.assert_array_equal(arrays.definite(jnp.asarray(a)), expected)
    np.testing.assert_allclose(arrays.determinant(jnp.asarray(a)), np.linalg.det(np.moveaxis(a, -1, 0)), rtol=1e-9)


def test_lapack_takes_one_matrix_after_the_other_on_a_cpu():
    """Two batched calls wait for each other's threads for ever, in one program or in two."""
    a = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 3)))
    a = a + jnp.swapaxes(a, 1, 2)

    def largest(a: jax.Array) -> jax.Array:
        return arrays.one_by_one(jnp.linalg.eigh, a)[0][:, -1]

    np.testing.assert_allclose(largest(a), np.linalg.eigvalsh(a)[:, -1], rtol=1e-14)
    vectors = np.linalg.eigh(a)[1][:, :, -1]
    slopes = jax.grad(lambda a: largest((a + jnp.swapaxes(a, 1, 2)) / 2).sum())(a)
    np.testing.assert_allclose(slopes, vectors[:, :, None] * vectors[:, None, :], atol=1e-13)
    program = jax.jit(largest).lower(a).compile().as_text()
    calls = [line for line in program.splitlines() if "syevd" in line and "custom-call(" in line]
    assert calls and all("[5,3,3]" not in line for line in calls)
