"""Programs that average over nodes: their compilation, as fast as possible without slowing the run, and their loops.

A loop has a condition on CPUs and a fixed number of steps elsewhere. On a CPU a loop stops when its slowest node is
done; the few slow nodes are gathered and finished apart. An accelerator would wait for the host to read the condition
of every step: in a default `solve` on an H200 this happened 6,231 times, and the device computed for a fifth of the
time. There, every loop has a number of steps that is fixed when it is compiled, and all nodes take all of them side by
side.

Either way a node that is done keeps its values. Both ways therefore agree to rounding, and a node does not depend on
the others in its block.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ..base.arrays import AnyArray, either, precise
from ..base.errors import is_concrete, is_tracing, require_unchecked_axes
from ..base.kernels import kernels_in_use, loop_kernel, loop_scan
from ..base.programs import stored_program

Carry = TypeVar("Carry")

_choice: bool | None = None  # whether tests want loops to be `counted`, whatever the device


def counted() -> bool:
    """Return whether loops have a number of steps that is fixed when they are compiled: everywhere but on CPUs."""
    return jax.default_backend() != "cpu" if _choice is None else _choice


def repeat(
    body: Callable[[Any, Carry], Carry],
    nodes: PyTree[Shaped[Array, "... N"]],
    state: Carry,
    unfinished: Callable[[Carry], Array],
    most: int,
    *,
    count: int,
    least: int = 0,
) -> Carry:
    """Apply `body` repeatedly to the nodes that are `unfinished`.

    Args:
        body: returns the state after one step of all nodes, from `nodes` and the state. All nodes share the arrays that
            it closes over.
        nodes: what every step reads, a tree of arrays (..., N).
        state: a tree of arrays (..., N).
        unfinished: returns the nodes (N,) that take the next step; the others keep their state.
        most: largest number of steps of a loop with a condition.
        count: number of steps of a loop without one.
        least: number of first steps, which all nodes take.
    """

    def step(k: int | Int[Array, ""], nodes: PyTree, state: Carry, _: None) -> tuple[Carry, None]:
        active = unfinished(state)
        active = active | (k < least) if least else active
        return either(active, body(nodes, state), state), None

    if counted():
        return loop(step, nodes, state, count=count, unfinished=unfinished, least=least)[0]

    def condition(carry: tuple[int | Int[Array, ""], Carry]) -> Bool[Array, ""]:
        k, state = carry
        return (k < least) | ((k < most) & jnp.any(unfinished(state)))

    return lax.while_loop(condition, lambda s: (s[0] + 1, step(s[0], nodes, s[1], None)[0]), (0, state))[1]


def loop(
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    nodes: PyTree[Shaped[Array, "... N"]],
    state: Carry,
    xs: PyTree[Shaped[Array, "K ... N"]] = None,
    *,
    count: int,
    unfinished: Callable[[Carry], Array] | None = None,
    least: int = 0,
) -> tuple[Carry, PyTree[Shaped[Array, "K ... N"]]]:
    """Apply ``step(k, nodes, state, x)`` K = `count` times, as `lax.scan` does; on an NVIDIA GPU in one kernel.

    The kernel serves where a step is a chain of operations on single entries, see `loop_kernel`, and if
    `kernels_in_use`.
    """
    arguments, has_kernels = (nodes, state, xs), counted() and kernels_in_use()
    scan = loop_scan(step, arguments, count)
    kernel = loop_kernel(step, arguments, count, unfinished, least) if has_kernels else None
    return scan(*arguments) if kernel is None else lax.platform_dependent(*arguments, cuda=kernel, default=scan)


_QUICK = {"xla_cpu_use_fusion_emitters": False}


def program(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Like `eqx.filter_jit`, for a function that averages; outside a trace it is a `stored_program`.

    Outside a trace on a CPU, and if all replicates have `fast_compile`, XLA compiles it without its emitters of fused
    kernels. Compiling then takes a third to a half less time. Programs of lines run up to 8 % longer, and those of
    single nodes 70 %.
    """
    fn = precise(fn)
    full, reduced = stored_program(fn), stored_program(fn, compiler_options=_QUICK)

    @functools.wraps(fn)
    def call(*args: PyTree) -> PyTree:
        require_unchecked_axes(args)
        leaves = jax.tree.leaves(args, is_leaf=_is_replicate)
        quick = all(a.fast_compile for a in leaves if _is_replicate(a))
        run = reduced if quick and at_top_level(args) and _known() else full
        return run(*jax.tree.map(_drop_weak_type, args))

    return call


def _is_replicate(a: Any) -> bool:
    """Return whether `a` is a `Replicate` of an averaging rule, which says how its programs are compiled."""
    return hasattr(a, "fast_compile")


def _drop_weak_type(a: Any) -> Any:
    """Remove the weak type of an array, as `jnp.full(shape, 1.0)` returns: it would trigger a second compilation."""
    return jnp.asarray(a, a.dtype) if getattr(a, "weak_type", False) else a


def at_top_level(*values: PyTree) -> bool:
    """Return whether jax traces no function: the arrays have values, and so have results computed from them."""
    return is_concrete(values) and not is_tracing()


def entry_by_entry(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with its own rule for `jax.vmap`: on a CPU one entry of a batch is computed after the other.

    Batched control flow makes every entry wait for the slowest one, and runs both sides of every condition. On a CPU 16
    solves in one batch take seven times as long as one after the other. Accelerators compute the entries together. The
    derivatives are those of `fn`, without this rule.
    """

    @functools.wraps(fn)
    def call(*args: PyTree) -> PyTree:
        if jax.default_backend() != "cpu" or at_top_level(args):
            return fn(*args)
        require_unchecked_axes(args)
        leaves, structure = jax.tree.flatten(args)
        is_array = [eqx.is_array(a) for a in leaves]
        constants = [None if m else a for a, m in zip(leaves, is_array, strict=True)]
        key = fn, structure, tuple(constants)
        flat = _flat_functions.setdefault(key, _Flat(fn, structure, constants))
        values = _lane.bind(*map(jnp.asarray, compress(leaves, is_array)), fn=flat)
        return jax.tree.unflatten(flat.result_structure, values)

    return call


class _Flat:
    """A function of the arrays among its arguments. Calls with equal constants share it, so that jax traces it once."""

    def __init__(self, fn: Callable[..., Any], structure: Any, constants: list[Any]) -> None:
        self.fn, self.structure, self.constants = fn, structure, constants

    def __call__(self, *arrays: Shaped[AnyArray, "..."]) -> list[Shaped[Array, "..."]]:
        inputs = map(jnp.asarray, arrays)  # constants of a scan are arrays of the host
        leaves = [next(inputs) if a is None else a for a in self.constants]
        result, self.result_structure = jax.tree.flatten(self.fn(*jax.tree.unflatten(self.structure, leaves)))
        return result


# The programs in the caches of jax keep these functions alive. When a cache drops a program, its function and what
# that contains, such as the layers of a user, are freed.
_flat_functions: weakref.WeakValueDictionary[Any, _Flat] = weakref.WeakValueDictionary()


_lane = Primitive("lane")
_lane.multiple_results = True
_lane.def_impl(lambda *leaves, fn: jax.jit(fn)(*leaves))
_lane.def_abstract_eval(
    lambda *leaves, fn: [jax.core.ShapedArray(a.shape, a.dtype) for a in jax.eval_shape(fn, *leaves)]
)
mlir.register_lowering(_lane, mlir.lower_fun(lambda *leaves, fn: fn(*leaves), multiple_results=True))


def _batch_lanes(leaves: Sequence[Any], axes: Sequence[int | None], *, fn: Callable[..., list]) -> tuple[list, list]:
    is_batched = tuple(axis is not None for axis in axes)
    values = _one_after_the_other(
        [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(leaves, axes, strict=True)], is_batched, fn
    )
    return values, [0] * len(values)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _one_after_the_other(leaves: list, is_batched: tuple[bool, ...], fn: Callable[..., list]) -> list:
    def lane(batched: list) -> list:
        slices = iter(batched)
        return _lane.bind(*(next(slices) if m else a for a, m in zip(leaves, is_batched, strict=True)), fn=fn)

    return jax.lax.map(lane, list(compress(leaves, is_batched)))


def _differentiate_lane(
    primals: Sequence[Any], tangents: Sequence[Any], *, fn: Callable[..., list]
) -> tuple[list, list]:
    varies = [not isinstance(d, ad.Zero) for d in tangents]

    def fn_of_varying(varying: list) -> list:
        inputs = iter(varying)
        return fn(*(next(inputs) if m else a for a, m in zip(primals, varies, strict=True)))

    values, directions = (list(compress(group, varies)) for group in (primals, tangents))
    return jax.jvp(fn_of_varying, (values,), (directions,))


batching.primitive_batchers[_lane] = _batch_lanes
ad.primitive_jvps[_lane] = _differentiate_lane


@functools.cache
def _known() -> bool:
    """Return whether this is a CPU whose compiler knows the option of `_QUICK`."""
    if jax.default_backend() != "cpu":
        return False
    try:
        jax.jit(lambda: 0, compiler_options=_QUICK)()
    except jax.errors.JaxRuntimeError:
        return False
    return True
