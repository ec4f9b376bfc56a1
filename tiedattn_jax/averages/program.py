"""Programs that average: what jax compiles, as fast as it runs no slower for it, and the cores that it runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..compiled import kept
from ..errors import is_concrete, is_tracing
from ..linalg import precise
from .rule import Replicate

_QUICK = {"xla_cpu_use_fusion_emitters": False}
_AS_WRITTEN = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


def program(fn: Callable[..., Any], *, nested: bool = False) -> Callable[..., Any]:
    """`eqx.filter_jit` of a function that averages; at top level its programs are `kept`.

    At top level on a CPU, and for replicates that say so, without XLA's emitters of fused kernels: that takes a third
    to a half less time to compile. Programs of lines take up to 8 % longer to run then, those of single nodes 70 %.

    Args:
        nested: whether solving is itself within loops. XLA would carry what does not change out of them, one after the
            other, which is a third of compiling and gains nothing; where there is but the solve it gains up to 15 %.
    """
    fn = precise(fn)
    inner, full, loops = eqx.filter_jit(fn), kept(fn), _AS_WRITTEN if nested else {}
    on_cpu = {quick: kept(fn, compiler_options=loops | (_QUICK if quick else {})) for quick in (True, False)}

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        every = jax.tree.leaves(args, is_leaf=lambda a: isinstance(a, Replicate))
        quick = all(a.quick for a in every if isinstance(a, Replicate))
        run = (on_cpu[quick] if _known() else full) if at_top_level(args) else inner
        return run(*jax.tree.map(_strong, args))

    return call


def _strong(a: Any) -> Any:
    """An array of a strong type: of a weak one, such as `jnp.full` of a number has,
    the program would be another one.
    """
    return jnp.asarray(a, a.dtype) if getattr(a, "weak_type", False) else a


def at_top_level(*values: Any) -> bool:
    """Whether arrays have values and what is computed of them has, too: jax traces no function."""
    return is_concrete(values) and not is_tracing()


def lane_by_lane(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a rule of its own for `jax.vmap`: on a CPU one lane is computed after the other.

    Batched control flow makes every lane wait for the slowest one, and runs both sides of every condition: on a CPU 16
    solves in one batch take seven times as long as one after the other. Accelerators compute the lanes together.
    """

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if jax.default_backend() != "cpu":
            return fn(*args)
        arrays, static = eqx.partition(args, eqx.is_array)
        return jax.custom_batching.sequential_vmap(lambda arrays: fn(*eqx.combine(arrays, static)))(arrays)

    return call


@functools.cache
def _known() -> bool:
    """Whether this is a CPU, and its compiler knows the options."""
    if jax.default_backend() != "cpu":
        return False
    try:
        jax.jit(lambda: 0, compiler_options=_QUICK | _AS_WRITTEN)()
    except jax.errors.JaxRuntimeError:
        return False
    return True
