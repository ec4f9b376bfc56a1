"""Compilation of the functions that average over nodes: as fast as possible without slowing the run."""

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


def program(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`eqx.filter_jit` of a function that averages; at top level its programs are `kept`.

    At top level on a CPU, and for replicates that say so, XLA compiles it without its emitters of fused kernels: that
    takes a third to a half less time. Programs of lines take up to 8 % longer to run then, those of single nodes 70 %.
    """
    fn = precise(fn)
    inner, full, quickly = eqx.filter_jit(fn), kept(fn), kept(fn, compiler_options=_QUICK)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        every = jax.tree.leaves(args, is_leaf=lambda a: isinstance(a, Replicate))
        quick = all(a.quick for a in every if isinstance(a, Replicate))
        run = (quickly if quick and _known() else full) if at_top_level(args) else inner
        return run(*jax.tree.map(_strong, args))

    return call


def _strong(a: Any) -> Any:
    """Remove the weak type of an array, as `jnp.full(shape, 1.0)` returns: it would trigger a second compilation."""
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
    """Whether this is a CPU, and its compiler knows the option."""
    if jax.default_backend() != "cpu":
        return False
    try:
        jax.jit(lambda: 0, compiler_options=_QUICK)()
    except jax.errors.JaxRuntimeError:
        return False
    return True
