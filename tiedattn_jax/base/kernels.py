"""A loop over nodes as one kernel of a GPU, which keeps the state of a node in registers.

XLA does not fuse loops. It cuts every step into kernels, and each of them writes its results to memory: four fifths of
what an evaluation of the averages wrote. The steps there are chains of operations on single entries, see `nodewise`, so
a thread can take its node through all of them, and write only the end.

The kernel is written in Pallas for Triton, the compiler of NVIDIA's GPUs. It agrees with `lax.scan` to rounding. Every
process that computes on such a GPU proves this first, see `Proof`, because a compiler or a GPU of another version may
disagree.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, PyTree, Shaped

from .nodewise import interpreted, operations

KERNELS = "TIEDATTN_KERNELS"  # environment variable that is 0 if programs shall have no kernels of this library
BLOCK = 128  # nodes of one program of a kernel, one in each thread
_MOST_OPERATIONS = 4_000  # in a step of a kernel; two tokens need 500, three 1,600


def loop_kernel(
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    arguments: tuple[PyTree[Shaped[Array, "... N"]], PyTree[Shaped[Array, "... N"]], PyTree[Shaped[Array, "K ... N"]]],
    count: int,
    unfinished: Callable[[Any], Bool[Array, " N"]] | None = None,
    least: int = 0,
    *,
    interpret: bool = False,
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]] | None:
    """Return a kernel that takes every node through the steps of a loop, or None if the steps do not allow one.

    Args:
        step: ``step(k, nodes, state, x)`` returns the next state and a tree of arrays to keep. All nodes share the
            arrays that it closes over, and no node looks at another one.
        arguments: what every step reads, the first state, and what each of the steps reads along a leading axis; only
            their shapes count.
        count: number K of steps.
        unfinished: returns the nodes whose state still changes after the `least` first steps. A block of nodes without
            any ends its loop.
        interpret: whether to run the kernel one operation after the other, on any device.

    Returns:
        A function of `arguments` that returns the last state, and what the steps kept along a leading axis.
    """
    nodes, state, xs = arguments
    size = jax.tree.leaves(state)[0].shape[-1]
    at_one_node = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((*a.shape[:-1], 1), a.dtype), (nodes, state, jax.tree.map(lambda a: a[0], xs))
    )
    kept = jax.eval_shape(lambda *at: step(jnp.int32(0), *at)[1], *at_one_node)
    leaves, structure = jax.tree.flatten(at_one_node)
    # A row (N,) holds an entry of an array at all nodes. The numbers of rows of all arrays, tree by tree:
    heights = [[math.prod(a.shape) for a in jax.tree.leaves(tree)] for tree in (*at_one_node, kept)]

    def step_of_rows(k: Array, rows: Sequence[Array]) -> tuple[list[Array], list[Array], Array | None]:
        rest = iter(rows)
        arrays = [jnp.concatenate([*itertools.islice(rest, math.prod(a.shape))]).reshape(a.shape) for a in leaves]
        state, kept = step(k, *jax.tree.unflatten(structure, arrays))
        return _rows(state), _rows(kept), None if unfinished is None else unfinished(state)

    one_row = [jax.ShapeDtypeStruct((1,), a.dtype) for a in leaves for _ in range(math.prod(a.shape))]
    program = jax.make_jaxpr(step_of_rows)(jnp.int32(0), one_row)
    if operations(program) > _MOST_OPERATIONS:
        return None
    # Constants of the program that jax traces are read; the others are known, and part of the kernel.
    is_read = [isinstance(c, jax.core.Tracer) for c in program.consts]

    def body(*refs: Any) -> None:
        """Take a block of nodes through the loop."""
        counts = sum(is_read), *map(len, heights[:3]), len(heights[1]), len(heights[3])
        rest = iter(refs)
        of_shared, of_nodes, of_state, of_xs, of_end, of_kept = ([*itertools.islice(rest, n)] for n in counts)
        columns = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
        exists = columns < size

        def places(refs: list, heights: list[int], step: Any = 0) -> list[Any]:
            return [ref.at[step * n + k, columns] for ref, n in zip(refs, heights, strict=True) for k in range(n)]

        def read(places: list) -> list[Array]:
            return [triton.load(place, mask=exists, other=0) for place in places]

        def write(places: list, rows: list) -> None:
            for place, row in zip(places, rows, strict=True):
                triton.store(place, row, mask=exists)

        known = iter(of_shared)
        constants = [_entries(next(known), c.shape) if m else c for c, m in zip(program.consts, is_read, strict=True)]
        at_nodes, first = read(places(of_nodes, heights[0])), read(places(of_state, heights[1]))

        def take(k: Any, state: list) -> tuple[list, Any]:
            rows = [*at_nodes, *state, *read(places(of_xs, heights[2], k))]
            outs = iter(interpreted(program, constants, [k, *rows], BLOCK))
            state = [*itertools.islice(outs, len(state))]
            write(places(of_kept, heights[3], k), [*itertools.islice(outs, sum(heights[3]))])
            return state, next(outs, None)

        def take_while(carry: tuple) -> tuple:
            state, going = take(carry[1], carry[0])
            return state, carry[1] + 1, jnp.max((going & exists).astype(jnp.int32))

        def goes_on(carry: tuple) -> Array:
            return (carry[1] < count) & (jnp.where(carry[1] < least, 1, carry[2]) > 0)

        if unfinished is not None:  # Triton's compiler crashes if the numbers of a loop come before its arrays.
            end, _, _ = lax.while_loop(goes_on, take_while, (first, jnp.int32(0), jnp.int32(1)))
        else:
            end = lax.fori_loop(0, count, lambda k, state: take(k, state)[0], first)
        write(places(of_end, heights[1]), end)

    def run(*arguments: PyTree) -> tuple[PyTree, PyTree]:
        stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[:-1], size), a.dtype), kept)
        results, result_structure = jax.tree.flatten((arguments[1], stacked))
        call = pl.pallas_call(
            body,
            [jax.ShapeDtypeStruct((math.prod(a.shape[:-1]), size), a.dtype) for a in results],
            grid=(pl.cdiv(size, BLOCK),),
            compiler_params=triton.CompilerParams(num_warps=BLOCK // 32),
            interpret=interpret,
            name="loop",
        )
        shared = [jnp.ravel(c) for c in itertools.compress(program.consts, is_read)]
        arrays = call(*shared, *(a.reshape(-1, size) for a in jax.tree.leaves(arguments)))
        return jax.tree.unflatten(result_structure, [a.reshape(b.shape) for a, b in zip(arrays, results, strict=True)])

    return run


def loop_scan(
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]], arguments: tuple, count: int, *_: Any
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Return what `loop_kernel` does, but by `lax.scan`, of all `count` steps."""

    def run(nodes: PyTree, state: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        return lax.scan(lambda state, kx: step(kx[0], nodes, state, kx[1]), state, (jnp.arange(count), xs))

    return run


def _rows(tree: PyTree[Shaped[Array, "..."]]) -> list[Shaped[Array, " 1"]]:
    """Return the entries of arrays at one node."""
    return [a.reshape(-1)[k : k + 1] for a in jax.tree.leaves(tree) for k in range(a.size)]


def _entries(ref: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the entries of an array that all nodes share."""
    return np.fromiter((ref[k] for k in range(math.prod(shape))), object).reshape(shape)


class Proof:
    """Whether kernels work on a device: small loops give the same as kernels and by `lax.scan`.

    This is found out once, at the first call. If kernels do not work, a warning says why.

    Args:
        make: makes kernels as `loop_kernel` does.
        device: returns the device, or None if there is none; kernels then count as working, as in programs that are
            only lowered.
    """

    def __init__(self, make: Callable[..., Any], device: Callable[[], jax.Device | None]) -> None:
        self.make, self.device = make, device
        self.lock = threading.Lock()
        self.works: bool | None = None

    def __call__(self) -> bool:
        with self.lock:
            if self.works is None:
                device = self.device()
                self.works = device is None or self._holds(device)
            return self.works

    def _holds(self, device: jax.Device) -> bool:
        precisions = ("float32", "float64") if jax.config.values["jax_enable_x64"] else ("float32",)
        # A program may be traced just now. jax traces, and has contexts of its settings, thread by thread.
        with ThreadPoolExecutor(1) as executor:
            problem = executor.submit(self.problem, device, precisions).result()
        if problem:
            text = f"kernels do not work on {device.device_kind}, and loops run without them: {problem}"
            warnings.warn(text, stacklevel=3)
        return not problem

    def problem(self, device: jax.Device, precisions: Sequence[str]) -> str:
        """Return what is wrong with the kernels on a device; empty if nothing is."""
        try:
            for dtype in precisions:
                with jax.enable_x64(dtype == "float64"), jax.default_device(device):
                    tolerance = _PROOF_TOLERANCE * float(jnp.finfo(dtype).eps)
                    for loop, arguments in _loops_of_proof(dtype):
                        ends = [jax.jit(functools.partial(loop, make))(*arguments) for make in (self.make, loop_scan)]
                        for a, b in zip(*map(jax.tree.leaves, jax.device_get(ends)), strict=True):
                            if not np.allclose(a, b, rtol=tolerance, atol=tolerance):
                                return f"in {dtype} a number is off by {np.max(np.abs(a - b)):.1e}"
        except Exception as error:  # a compiler or a driver can fail in any way
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return ""


_PROOF_TOLERANCE = 1e4  # units of rounding, which a few steps with exponentials and roots multiply


def _loops_of_proof(dtype: str) -> Iterator[tuple[Callable[..., PyTree], tuple]]:
    """Yield small loops over three blocks, the last of which is not full, with their arguments.

    Each is a function of `loop_kernel`, or of `loop_scan`, and of its arguments. The first one has the operations of a
    softmax, reads one row in every step and keeps one. In the second one blocks end at different steps.
    """
    size, count, rng = 2 * BLOCK + 5, 3, np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal((*shape, size)), dtype)

    def softmax(make: Any, shared: Array, *arguments: Any) -> PyTree:
        def step(k: Any, matrix: Array, v: Array, x: Array) -> tuple[Array, Array]:
            scores = jnp.einsum("abn,bn->an", matrix, v) + shared[:, None] / (1.0 + k)
            shares = jnp.exp(scores - jnp.max(scores, 0))
            shares = shares / jnp.sum(shares, 0)
            return jnp.where(shares > 0.5, jnp.sqrt(shares), shares + x), shares[0]

        return make(step, arguments, count)(*arguments)

    def halvings(make: Any, *arguments: Any) -> PyTree:
        def unfinished(z: Array) -> Array:
            return z[0] > 1

        def step(k: Any, nodes: Any, z: Array, x: Any) -> tuple[Array, None]:
            return jnp.where(unfinished(z) | (k < 1), z / 2, z), None

        return make(step, arguments, 2 * count, unfinished, 1)(*arguments)

    yield softmax, (jnp.asarray(rng.standard_normal(2), dtype), draw(2, 2), draw(2), draw(count, 2))
    powers = 2.0 ** (np.arange(size) % 6 * (np.arange(size) >= BLOCK))  # the first block ends after one step
    yield halvings, ((), jnp.asarray(powers[None], dtype), None)


def _cuda_device() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # there is none
        return None


_works = Proof(loop_kernel, _cuda_device)


def kernels_in_use() -> bool:
    """Return whether loops may be kernels: they work here, and the environment variable TIEDATTN_KERNELS is not 0."""
    return os.environ.get(KERNELS) != "0" and _works()
