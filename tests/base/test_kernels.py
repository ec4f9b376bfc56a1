"""Loops over nodes as one kernel, run operation by operation, against `lax.scan`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tiedattn_jax.base.kernels import BLOCK, loop_kernel

N = 2 * BLOCK + 5  # the last block is not full
RNG = np.random.default_rng(0)


def scanned(step, nodes, state, xs, count):
    return lax.scan(lambda state, kx: step(kx[0], nodes, state, kx[1]), state, (jnp.arange(count), xs))


def damped(k, nodes, state, x):
    """A step of all kinds of entries: a matrix, products of small arrays, a choice, the number of the step."""
    turned = jnp.einsum("abn,bn->an", nodes["matrix"], state["v"])
    v = jnp.where(turned > x, jnp.tanh(turned), 0.5 * state["v"]) / (1.0 + k)
    return {"v": v, "sum": state["sum"] + jnp.sum(v**2, 0)}, (v[0], state["sum"][None])


def problem(dtype, count=4):
    draw = lambda *shape: jnp.asarray(RNG.normal(size=(*shape, N)), dtype)  # noqa: E731
    return {"matrix": draw(3, 3)}, {"v": draw(3), "sum": draw()}, draw(count, 3)


def assert_close(one, two, rtol):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_kernel_is_a_scan(dtype):
    arguments = problem(dtype)
    kernel = loop_kernel(damped, arguments, 4, interpret=True)
    assert_close(jax.jit(kernel)(*arguments), scanned(damped, *arguments, 4), 1e-14 if dtype == "float64" else 1e-6)


def test_what_all_nodes_share_is_read_once_also_in_a_batch():
    """A closure over an array that jax traces; under `vmap` every lane has its own."""
    _, state, _ = problem("float64")
    shifts = jnp.asarray(RNG.normal(size=(2, 3)))

    def run(way, shift):
        def step(k, nodes, state, x):
            return {"v": state["v"] * shift[:, None], "sum": state["sum"] - shift[1]}, None

        arguments = (), state, None
        return (loop_kernel(step, arguments, 3, interpret=True) if way else lambda *a: scanned(step, *a, 3))(*arguments)

    one, two = (jax.jit(jax.vmap(lambda shift, way=way: run(way, shift)))(shifts) for way in (True, False))
    assert_close(one, two, 1e-14)


def test_a_block_ends_when_its_nodes_are_done():
    """Nodes need 0 to 5 halvings. The kernel takes no step without a node that needs it, but the least number."""
    start = jnp.tile(2.0 ** jnp.arange(6), 60)[None]

    def run(step, count, least):
        arguments = (), start, None
        return loop_kernel(step, arguments, count, lambda z: z[0] > 1, least, interpret=True)(*arguments)[0]

    def halve(k, nodes, z, x):
        return jnp.where((z > 1) | (k < 1), z / 2, z), None

    def count(k, nodes, z, x):
        return z / 2, None

    np.testing.assert_array_equal(run(halve, 9, 1), jnp.where(start > 1, 1.0, 0.5))
    np.testing.assert_array_equal(run(halve, 3, 1)[0, :6], [0.5, 1, 1, 1, 2, 4])
    np.testing.assert_array_equal(run(count, 9, 0), start / 2**5)
    np.testing.assert_array_equal(run(count, 9, 7), start / 2**7)


@pytest.mark.parametrize(
    "other",
    [lambda v: jnp.sort(v, 0), lambda v: lax.fori_loop(0, 2, lambda _, v: v + 1, v), jax.lax.erf],
    ids=["sort", "loop", "erf"],
)
def test_other_operations_have_no_kernel(other):
    _, state, _ = problem("float64")

    def step(k, nodes, state, x):
        return {**state, "v": other(state["v"])}, None

    assert loop_kernel(step, ((), state, None), 3) is None


def test_a_long_step_has_no_kernel():
    def step(k, nodes, v, x):
        for _ in range(2000):
            v = jnp.sin(v)
        return v, None

    assert loop_kernel(step, ((), jnp.ones((3, N)), None), 3) is None
