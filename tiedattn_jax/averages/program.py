"""Programs that average: what jax compiles, as fast as it runs no slower for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ..errors import is_concrete, is_tracing
from .rule import Replicate

_QUICK = {"xla_cpu_use_fusion_emitters": False}


def program(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`eqx.filter_jit` of a function that averages.

    At top level on a CPU, and for replicates that say so, without XLA's emitters of fused kernels: that takes a third
    less time to compile. Programs of lines in several blocks take 8 % longer to run then, those of one block, which are
    for many settings, 10 to 30 %, those of single nodes 70 %.
    """
    options: Any = {"compiler_options": _QUICK}
    full, quick = eqx.filter_jit(fn), eqx.filter_jit(fn, **options)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        every = jax.tree.leaves(args, is_leaf=lambda a: isinstance(a, Replicate))
        lean = all(a.quick for a in every if isinstance(a, Replicate))
        top = is_concrete(args) and not is_tracing()
        return (quick if lean and top and _known() else full)(*args)

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
