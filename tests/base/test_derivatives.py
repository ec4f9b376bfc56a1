"""Roots that a search found have the derivatives of the function whose zero they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.base.derivatives import bisected_root, derivative_along, with_root, with_tangent

A, B = jnp.array([0.5, 2.0]), jnp.array([3.0, 5.0])


def cubic(z, a, b):
    """Its root is b^(1/3) / a, element by element."""
    return (a * z) ** 3 - b


def slope(z, a, b):
    return 3 * a**3 * z**2


def root(a, b, **options):
    return with_root(cubic, jnp.cbrt(b) / a, a, b, **options)


@pytest.mark.parametrize("options", [{}, {"slope": slope}], ids=["differentiated", "given"])
def test_a_root_has_implicit_derivatives(options):
    def fn(a, b):
        return root(a, b, **options)

    np.testing.assert_allclose(fn(A, B), jnp.cbrt(B) / A)
    for k, expected in enumerate((-jnp.cbrt(B) / A**2, B ** (-2 / 3) / (3 * A))):
        np.testing.assert_allclose(jax.jacfwd(fn, k)(A, B), jnp.diag(expected), rtol=1e-12)
        np.testing.assert_allclose(jax.jacrev(fn, k)(A, B), jnp.diag(expected), rtol=1e-12)
    bend = jax.vmap(jax.grad(jax.grad(lambda b: root(2.0, b, **options))))(B)
    np.testing.assert_allclose(bend, -(B ** (-5 / 3)) / 9, rtol=1e-12)


def test_derivatives_of_lanes():
    """Under `vmap` over either argument, or both, every lane has its own derivative."""
    for axes, args in (((0, None), (A, 3.0)), ((None, 0), (0.5, B)), ((0, 0), (A, B))):
        slopes = jax.vmap(jax.grad(lambda a, b: root(a, b), 1), axes)(*args)
        np.testing.assert_allclose(slopes, args[1] ** (-2 / 3) / (3 * args[0]), rtol=1e-12)
    matrix = jax.vmap(lambda a: root(a, B), 0, 1)(A)  # z has a batch axis behind
    np.testing.assert_allclose(matrix, jnp.cbrt(B)[:, None] / A)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_bisected_root(dtype):
    def fn(b):
        return bisected_root(lambda z: z**3 - b, jnp.zeros((), dtype), jnp.asarray(4.0, dtype))

    b = jnp.asarray(5.0, dtype)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(fn(b), 5 ** (1 / 3), rtol=2 * eps)
    np.testing.assert_allclose(jax.grad(fn)(b), 5 ** (-2 / 3) / 3, rtol=8 * eps)
    assert fn(b).dtype == dtype


def test_tangents_of_what_does_not_move():
    """A rule is told what moves: an argument that does not has no tangent, and no share of the derivative."""
    seen = []

    @with_tangent
    def attach(primals, tangents):
        _, a, b = primals
        seen.append([tangent is None for tangent in tangents])
        return 2 * derivative_along(lambda a, b: a * b, (a, b), tangents[1:])

    z = jnp.asarray(7.0)
    value, tangent = jax.jvp(lambda a: attach(z, a, 3.0), (5.0,), (1.0,))
    assert (value, tangent) == (7.0, 6.0) and seen == [[True, False, True]]
    assert jax.grad(lambda a, b: attach(z, a, b), 1)(5.0, 3.0) == 10.0
    assert derivative_along(lambda a: a**2, (3.0,), (None,)) == 0.0
