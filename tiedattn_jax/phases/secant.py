"""The zero of a number in alpha, by the secant method inside a bracket that shrinks; the same step traced or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ..errors import is_concrete

_REACH = 0.2  # of a step without a bracket, relative
_FIRST_STEP = 0.02  # where no slope is known, relative
_LOOKS = 40


class Secant(eqx.Module):
    """Where a search stands.

    Attributes:
        alpha, value: the last place where there were states, and the number there; NaN where it is not known.
        slope: of the number there; NaN where it is not known.
        low, high: the zero lies between; the ends are not evaluated.
        rising: the sign of the slope at the zero.
    """

    alpha: jax.Array
    value: jax.Array
    slope: jax.Array
    low: jax.Array
    high: jax.Array
    rising: jax.Array

    @classmethod
    def begin(cls, alpha: Any, slope: Any, low: Any, high: Any, dtype: Any) -> Secant:
        """Before the first look."""
        alpha, slope, low, high = (jnp.asarray(a, dtype) for a in (alpha, slope, low, high))
        return cls(alpha, jnp.full_like(alpha, jnp.nan), slope, low, high, jnp.where(slope < 0, -1, 1).astype(dtype))

    @property
    def step(self) -> jax.Array:
        """To where the tangent, or the secant, is zero."""
        return -self.value / self.slope

    @eqx.filter_jit
    def next(self) -> jax.Array:
        """Where to look next: half-way to an end that the step would pass, in the middle where there is no step."""
        bracketed = (self.low > 0) & jnp.isfinite(self.high)
        known = (self.slope * self.rising > 0) & jnp.isfinite(self.value)
        down = jnp.sign(self.value * self.rising)
        middle = jnp.where(bracketed, jnp.sqrt(self.low * self.high), (1 - _FIRST_STEP * down) * self.alpha)
        reach = jnp.where(bracketed, jnp.inf, _REACH * self.alpha)
        trial = jnp.where(known, self.alpha + jnp.clip(self.step, -reach, reach), middle)
        trial = jnp.where(trial >= self.high, 0.5 * (self.alpha + self.high), trial)
        return jnp.where(trial <= self.low, 0.5 * (self.alpha + self.low), trial)

    @eqx.filter_jit
    def learn(self, alpha: jax.Array, value: jax.Array, slope: Any = jnp.nan) -> Secant:
        """After a look; without a slope, that of the secant through the last two."""
        secant = (value - self.value) / (alpha - self.alpha)
        slope = jnp.where(jnp.isfinite(slope), slope, jnp.where(jnp.isfinite(secant), secant, self.slope))
        free = (self.low == 0) & jnp.isinf(self.high) & jnp.isfinite(slope)
        rising = jnp.where(free, jnp.sign(slope), self.rising)
        below = value * rising < 0
        low, high = jnp.where(below, alpha, self.low), jnp.where(below, self.high, alpha)
        return Secant(alpha, value, slope, low, high, rising)

    @eqx.filter_jit
    def done(self, trial: jax.Array, tol: float) -> jax.Array:
        """Whether the next place to look at is as near as asked for, or the last one is the zero."""
        return (self.value == 0) | (jnp.abs(trial - self.alpha) <= tol * trial)

    @eqx.filter_jit
    def blocked(self, alpha: jax.Array) -> Secant:
        """After a look at a place where there is no state: the zero, if any, is on this side of it."""
        above = alpha > self.alpha
        low, high = jnp.where(above, self.low, alpha), jnp.where(above, alpha, self.high)
        return Secant(self.alpha, self.value, self.slope, low, high, self.rising)


def zero_between(
    fn: Callable[[jax.Array, Any], tuple[jax.Array, Any]], bracket: tuple[jax.Array, jax.Array], state: Any, tol: float
) -> tuple[jax.Array, Any, jax.Array]:
    """Zero of an increasing function of alpha in a bracket, in traced code as in Python.

    Args:
        fn: (alpha, state) -> (value, state), the state being a warm start.
        tol: step, relative, that is small enough.

    Returns:
        The zero, the state next to it, and whether it is one rather than an end of the bracket.
    """
    low, high = bracket

    def look(loop: tuple) -> tuple:
        search, trial, state, k = loop
        value, state = fn(trial, state)
        search = search.learn(trial, value)
        return search, search.next(), state, k + 1

    def unfinished(loop: tuple) -> jax.Array:
        search, trial, _, k = loop
        return (k < _LOOKS) & ~search.done(trial, tol)

    # The last place is not a number before the first look, so that the loop goes on.
    search = Secant.begin(jnp.nan, jnp.nan, low, high, low.dtype)
    loop = search, jnp.sqrt(low * high), state, jnp.array(0)
    if is_concrete((bracket, state)):  # with programs that are compiled
        while unfinished(loop):
            loop = look(loop)
    else:
        loop = lax.while_loop(unfinished, look, loop)
    search, zero, state, k = loop
    inside = (zero > low * (1 + 1e-3)) & (zero < high * (1 - 1e-3)) & jnp.isfinite(search.value)
    return zero, state, inside & (k < _LOOKS)
