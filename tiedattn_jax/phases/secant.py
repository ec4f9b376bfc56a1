"""Root search in one number: the secant method in a shrinking bracket, or Newton's method if slopes are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ..base.arrays import Number
from ..theory.paths import Path

_REACH = 0.2  # longest relative step without a bracket
_FIRST_STEP = 0.02  # relative step if neither slope nor bracket is known
_MAX_EVALUATIONS = 40  # maximum number of evaluations

Warm = TypeVar("Warm")  # what a warm start is made of


@dataclass(frozen=True)
class Secant:
    """State of a search for the zero of a function of a positive number.

    Attributes:
        x, value: last argument at which there was a state, and the function there; NaN if unknown.
        slope: slope of the function there; NaN if unknown.
        low, high: bracket of the zero; its ends are not evaluated.
        rising: sign of the slope at the zero.
        reach: longest relative step. Without a bracket it is `_REACH` at most.
    """

    x: float
    value: float
    slope: float
    low: float
    high: float
    rising: float
    reach: float = np.inf

    @classmethod
    def begin(cls, x: Number, slope: Number, low: Number, high: Number, reach: float = np.inf) -> Secant:
        """Return the search before its first evaluation."""
        return cls(float(x), np.nan, float(slope), float(low), float(high), -1.0 if slope < 0 else 1.0, reach)

    @property
    def step(self) -> float:
        """Step to the zero of the tangent or secant: zero at a zero, and NaN elsewhere if the slope is zero."""
        if self.value == 0:
            return 0.0
        return -self.value / self.slope if self.slope else np.nan

    @property
    def leads_inside(self) -> bool:
        """Whether the step leads to a place inside of the bracket."""
        return bool(self.low <= self.x + self.step <= self.high)

    def next(self) -> float:
        """Return the next argument to evaluate.

        The step leads to the zero of the tangent or secant. A step that would pass an end of the bracket goes half-way
        to that end. Without a usable slope, the next one is the geometric middle of the bracket or, without a
        bracket, a short step towards the zero.
        """
        has_bracket = self.low > 0 and np.isfinite(self.high)
        longest = self.x * (self.reach if has_bracket else min(self.reach, _REACH))
        if self.value == 0 or (self.slope * self.rising > 0 and np.isfinite(self.value)):
            trial = self.x + self.step
        elif has_bracket:
            trial = float(np.sqrt(self.low * self.high))
        else:
            trial = (1 - _FIRST_STEP * np.sign(self.value * self.rising)) * self.x
        trial = float(np.clip(trial, self.x - longest, self.x + longest))
        trial = 0.5 * (self.x + self.high) if trial >= self.high else trial
        return 0.5 * (self.x + self.low) if trial <= self.low else trial

    def updated(self, x: float, value: float, slope: float = np.nan) -> Secant:
        """Return the search after an evaluation; a missing slope is that of the last secant."""
        if not np.isfinite(slope):
            secant = (value - self.value) / (x - self.x) if x != self.x else np.nan
            slope = secant if np.isfinite(secant) else self.slope
        unbracketed = self.low == 0 and np.isinf(self.high) and np.isfinite(slope)
        rising = float(np.sign(slope)) if unbracketed else self.rising
        low, high = (x, self.high) if value * rising < 0 else (self.low, x)
        return replace(self, x=x, value=value, slope=slope, low=low, high=high, rising=rising)

    def shrunk(self, x: float) -> Secant:
        """Return the search with a smaller bracket after there was no state at `x`.

        A zero can only lie between there and the last state.
        """
        return replace(self, high=x) if x > self.x else replace(self, low=x)


def zero_between(number: Callable[[float, Warm], Path], low: float, high: float, state: Warm, tol: float) -> Path:
    """Path that finds the zero of an increasing function in a bracket.

    Args:
        number: function of a place and a warm start; its path returns the value there and the next warm start.
        tol: the search stops when the relative step is below this.

    Returns:
        The zero, the last warm start, and whether the zero is one rather than an end of the bracket.
    """
    search, trial = Secant.begin(np.nan, np.nan, low, high), float(np.sqrt(low * high))
    for _ in range(_MAX_EVALUATIONS):
        value, state = yield from number(trial, state)
        search = search.updated(trial, float(value))
        trial = search.next()
        if abs(trial - search.x) <= tol * trial:
            is_inside = low * (1 + 1e-3) < trial < high * (1 - 1e-3) and np.isfinite(search.value)
            return trial, state, bool(is_inside)
    return trial, state, False
