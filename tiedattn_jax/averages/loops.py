"""How loops inside an evaluation of the averages end.

On a CPU a loop stops when its slowest node is done, and the few nodes that are slow are gathered and finished apart. An
accelerator would wait for the host to read the condition of every step: of a default `solve` on an H200 that was 6,231
times, while the device computed a fifth of the time. There every loop has a number of steps that is known when it is
compiled, and all nodes take all of them side by side.

Either way a node that is done keeps its values, so that both ways agree to rounding, and a node does not depend on the
others in its block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_forced: list[bool] = []  # the innermost `counted_loops` last


def counted() -> bool:
    """Whether loops have a number of steps that is known when they are compiled: everywhere but on CPUs."""
    return _forced[-1] if _forced else jax.default_backend() != "cpu"


@contextlib.contextmanager
def counted_loops(counted: bool = True) -> Iterator[None]:
    """Within this context functions are traced with counted loops, or without, whatever the device.

    For tests, and to lower a program for another device than that of this process. What was traced before is forgotten
    on entry and on exit.
    """
    jax.clear_caches()
    _forced.append(counted)
    try:
        yield
    finally:
        _forced.pop()
        jax.clear_caches()


def repeat(
    body: Callable[[Any], Any],
    state: Any,
    unfinished: Callable[[Any], jax.Array],
    most: int,
    *,
    count: int,
    least: int = 0,
) -> Any:
    """Apply `body` to the nodes that are `unfinished`.

    Args:
        body: a step of all nodes.
        state: a tree of arrays (..., N).
        unfinished: the nodes, (N,), that the next step is for; the others keep their state.
        most: steps where loops have a condition.
        count: steps where they have none.
        least: steps that all nodes take.
    """

    def step(k: Any, state: Any) -> Any:
        go = unfinished(state)
        go = go | (k < least) if least else go
        return jax.tree.map(lambda new, old: jnp.where(go, new, old), body(state), state)

    if counted():
        return lax.fori_loop(0, count, step, state)

    def going(state: tuple) -> jax.Array:
        k, state = state
        return (k < least) | ((k < most) & jnp.any(unfinished(state)))

    return lax.while_loop(going, lambda s: (s[0] + 1, step(*s)), (0, state))[1]
