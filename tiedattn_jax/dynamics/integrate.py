"""The classical Runge-Kutta method of fourth order with equal steps, for states that are trees of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..base.results import Status

State = TypeVar("State")


@runtime_checkable
class HasStatus(Protocol):
    """A result with a status for every replicate of the averages."""

    status: Any


Run = TypeVar("Run", bound=HasStatus)

# The place of every stage, and its weight, in units of a step.
_STAGES = np.array([[0.0, 1 / 6], [1 / 2, 1 / 3], [1 / 2, 1 / 3], [1.0, 1 / 6]])


def integrated(flow: Callable[[State], State], start: State, until: Float[Array, ""], points: int, steps: int) -> State:
    """Return the states at `points` equal times from zero to `until`, with `steps` steps between two of them.

    Args:
        flow: velocity of a state.
    """
    h = until / ((points - 1) * steps)

    def step(s: State, _: None) -> tuple[State, None]:
        def stage(so_far: tuple[State, State], coefficients: Float[Array, " 2"]) -> tuple[tuple[State, State], None]:
            place, weight = h * coefficients
            velocity = flow(moved(s, so_far[0], place))
            return (velocity, moved(so_far[1], velocity, weight)), None

        rest = jax.tree.map(jnp.zeros_like, s)
        return lax.scan(stage, (rest, s), jnp.asarray(_STAGES, h.dtype))[0][1], None

    def interval(s: State, _: None) -> tuple[State, State]:
        return lax.scan(step, s, None, length=steps)[0], s

    end, path = lax.scan(interval, start, None, length=points - 1)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), path, end)


def refined(run: Callable[[int], Run], least: int, most: int) -> Run:
    """Return ``run(steps)`` for the first number of steps that resolves it: `least`, or four times as many, and so on.

    Args:
        run: function of the number of steps whose result has a status for every replicate.
        most: number of steps from which on the result is returned as it is.
    """
    steps, result = least, run(least)
    while np.any(np.isin(result.status, (Status.unresolved, Status.nonfinite))) and steps < most:
        steps *= 4
        result = run(steps)
    return result


def moved(s: State, velocity: State, time: Any) -> State:
    """Return a state after a time of constant velocity."""
    return jax.tree.map(lambda a, b: a + time * b, s, velocity)
