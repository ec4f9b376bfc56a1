"""Programs that average: what jax compiles, as fast as it runs no slower for it, and the cores that it runs on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..compiled import kept, settings
from ..errors import is_concrete, is_tracing
from .rule import Replicate, Rule, part

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


def over_replicates(fn: Callable[..., Any], nodes: Rule, own: Any, *shared: Any) -> Any:
    """`fn(nodes, own, *shared)` of a function that maps over the replicates of a rule: at top level by one call for
    each.

    One program then serves any number of replicates, and they run `at_once`.

    Args:
        own: a tree whose arrays lead with the replicate axis, like those of the result.
        shared: what all replicates have.
    """
    if nodes.replicates == 1 or not at_top_level(nodes, own, shared):
        return fn(nodes, own, *shared)
    parts = [(nodes.only(k), part(own, k)) for k in range(nodes.replicates)]
    return _joined(at_once(lambda own: fn(*own, *shared), parts))


@jax.jit
def _joined(parts: Sequence[Any]) -> Any:
    """Trees of the replicates as one whose arrays lead with the replicate axis."""
    return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def at_once(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`fn` of every item: on one CPU in as many threads as there are cores.

    XLA's own threads gain little on the arrays of a block: on two cores four replicates take half the time. Of threads
    that need the same program jax lets one compile it. A failure or an interrupt waits for what is in progress only.
    """
    devices = {d for a in jax.tree.leaves(items) if hasattr(a, "devices") for d in a.devices()}
    if len(items) < 2 or [d.platform for d in devices] != ["cpu"]:
        return [fn(item) for item in items]
    with ThreadPoolExecutor(min(len(items), os.cpu_count() or 1)) as pool:
        if pool.submit(settings).result() != settings():
            return [fn(item) for item in items]
        return list(pool.map(lambda item: jax.block_until_ready(fn(item)), items))


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
