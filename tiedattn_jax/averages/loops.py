"""Loops inside an evaluation of the averages: with a condition on CPUs, with a fixed number of steps elsewhere.

On a CPU a loop stops when its slowest node is done; the few slow nodes are gathered and finished apart. An accelerator
would wait for the host to read the condition of every step: in a default `solve` on an H200 this happened 6,231 times,
and the device computed for a fifth of the time. There, every loop has a number of steps that is fixed when it is
compiled, and all nodes take all of them side by side.

Either way a node that is done keeps its values. Both ways therefore agree to rounding, and a node does not depend on
the others in its block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ..base.arrays import either

State = TypeVar("State")

_choices: list[bool] = []  # choices of the open `counted_loops`, the innermost last


def counted() -> bool:
    """Return whether loops have a number of steps that is fixed when they are compiled: everywhere but on CPUs."""
    return _choices[-1] if _choices else jax.default_backend() != "cpu"


@contextlib.contextmanager
def counted_loops(counted: bool = True) -> Iterator[None]:
    """Trace functions with counted loops, or without them, inside this context, whatever the device.

    This serves tests, and lowers a program for another device than that of this process. Entry and exit clear the
    functions that jax has traced.
    """
    jax.clear_caches()
    _choices.append(counted)
    try:
        yield
    finally:
        _choices.pop()
        jax.clear_caches()


def repeat(
    body: Callable[[State], State],
    state: State,
    unfinished: Callable[[State], Array],
    most: int,
    *,
    count: int,
    least: int = 0,
) -> State:
    """Apply `body` repeatedly to the nodes that are `unfinished`.

    Args:
        body: returns the state after one step of all nodes.
        state: a tree of arrays (..., N).
        unfinished: returns the nodes (N,) that take the next step; the others keep their state.
        most: largest number of steps of a loop with a condition.
        count: number of steps of a loop without one.
        least: number of first steps, which all nodes take.
    """

    def step(k: int | Int[Array, ""], state: State) -> State:
        active = unfinished(state)
        active = active | (k < least) if least else active
        return either(active, body(state), state)

    if counted():
        return lax.fori_loop(0, count, step, state)

    def condition(carry: tuple[int | Int[Array, ""], State]) -> Bool[Array, ""]:
        k, state = carry
        return (k < least) | ((k < most) & jnp.any(unfinished(state)))

    return lax.while_loop(condition, lambda s: (s[0] + 1, step(*s)), (0, state))[1]
