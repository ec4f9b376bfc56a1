"""The operations on trees of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_either_chooses_entry_by_entry():
    chosen = arrays.either(jnp.asarray([True, False, True]), (A, 0.0 * A[0]), (-A, A[0]))
    np.testing.assert_array_equal(chosen[0], A * [1, -1, 1])
    np.testing.assert_array_equal(chosen[1], [0.0, 1.0, 0.0])


def test_zeros_take_shapes_and_dtypes():
    shapes = jax.eval_shape(lambda: (jnp.ones((2, 3), jnp.float32), jnp.ones((), int)))
    plain, led = arrays.zeros(shapes), arrays.zeros(shapes, 5, 1)
    assert [(a.shape, a.dtype) for a in plain] == [(a.shape, a.dtype) for a in shapes]
    assert led[0].shape == (5, 1, 2, 3) and led[1].dtype == shapes[1].dtype and not np.any(led[0])
