"""Loops over nodes as one kernel, run operation by operation, against `lax.scan`."""

import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tiedattn_jax.base.kernels import BLOCK, Proof, loop_kernel

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
    """A closure over an array that jax traces; under `vmap` every entry has its own."""
    _, state, _ = problem("float64")
    arguments, shifts = ((), state, None), jnp.asarray(RNG.normal(size=(2, 3)))

    def step_of(shift):
        return lambda k, nodes, state, x: ({"v": state["v"] * shift[:, None], "sum": state["sum"] - shift[1]}, None)

    kernel = jax.vmap(lambda shift: loop_kernel(step_of(shift), arguments, 3, interpret=True)(*arguments))
    scan = jax.vmap(lambda shift: scanned(step_of(shift), *arguments, 3))
    assert_close(jax.jit(kernel)(shifts), jax.jit(scan)(shifts), 1e-14)


def test_a_block_ends_when_its_nodes_are_done():
    """Nodes need 0 to 5 halvings. The kernel takes no step without a node that needs it, but the least number."""
    start = np.tile(2.0 ** np.arange(6), 60)[None]

    def run(step, count, least):
        arguments = (), jnp.asarray(start), None
        return loop_kernel(step, arguments, count, lambda z: z[0] > 1, least, interpret=True)(*arguments)[0]

    def halve(k, nodes, z, x):
        return jnp.where((z > 1) | (k < 1), z / 2, z), None

    np.testing.assert_array_equal(run(halve, 9, 1), np.where(start > 1, 1.0, 0.5))
    np.testing.assert_array_equal(run(halve, 3, 1)[0, :6], [0.5, 1, 1, 1, 2, 4])
    for least, taken in ((0, 5), (7, 7)):
        np.testing.assert_array_equal(run(lambda k, nodes, z, x: (z / 2, None), 9, least), start / 2**taken)


def sines(v):
    for _ in range(2000):
        v = jnp.sin(v)
    return v


@pytest.mark.parametrize(
    "other",
    [lambda v: jnp.sort(v, 0), lambda v: lax.fori_loop(0, 2, lambda _, v: v + 1, v), jax.lax.erf, sines],
    ids=["sort", "loop", "erf", "too long"],
)
def test_other_operations_have_no_kernel(other):
    assert loop_kernel(lambda k, nodes, v, x: (other(v), None), ((), jnp.ones((3, N)), None), 3) is None


def interpreted(*arguments):
    return loop_kernel(*arguments, interpret=True)


def off_by_little(step, arguments, count, *ending):
    """Kernels whose result is wrong at one node, by one in a hundred thousand."""
    kernel = interpreted(step, arguments, count, *ending)

    def wrong(*arguments):
        end, kept = kernel(*arguments)
        return jax.tree.map(lambda a: a.at[..., -1].multiply(1 + 1e-5), end), kept

    return kernel if ending else wrong


def never_ending(step, arguments, count, *ending):
    """Kernels that leave out the last steps of their blocks."""
    return interpreted(step, arguments, count - 2 * bool(ending), *ending)


def raising(*arguments):
    raise MemoryError("no registers\nleft")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (interpreted, None), (off_by_little, "float64 a number is off by"), (never_ending, "float32 a number is off"),
        (raising, "MemoryError: no registers$"), (loop_kernel, "ValueError: .*interpret"),  # a CPU cannot compile it
    ],
)  # fmt: skip
def test_kernels_are_proved_once_also_while_jax_traces(make, problem):
    """A kernel that is wrong, or fails to compile, is given up with one warning; by whichever thread asks first."""
    makes, answers = [], []
    proof = Proof(lambda *arguments: makes.append(arguments) or make(*arguments), lambda: jax.devices("cpu")[0])
    mesh, axis = Mesh(jax.devices("cpu")[:1], "i"), PartitionSpec("i")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=axis, out_specs=axis)
    def traced(x):
        answers.append(proof())
        return 2 * x

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        jax.eval_shape(jax.vmap(jax.grad(lambda x: jnp.sum(traced(x)))), jnp.ones((2, 1)))
        with ThreadPoolExecutor(3) as threads:
            answers += threads.map(lambda _: proof(), range(6))
    assert set(answers) == {problem is None} and len(answers) >= 7
    assert len(makes) <= 4  # two loops in either precision
    messages = [str(c.message) for c in complaints]
    assert len(messages) == (problem is not None)
    assert all(re.search(f"kernels do not work on cpu.*{problem}", message) for message in messages)


def test_without_a_device_there_is_nothing_to_prove():
    assert Proof(raising, lambda: None)()
