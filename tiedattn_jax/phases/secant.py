"""The root search of this wing: the secant method in a bracket that shrinks, Newton's where slopes are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..theory.pool import Path

_REACH = 0.2  # longest step without a bracket, relative
_FIRST_STEP = 0.02  # step where no slope is known, relative
_LOOKS = 40


@dataclass(frozen=True)
class Secant:
    """Where a search for the zero of a number stands.

    Attributes:
        place, value: the last place where there were states, and the number there; NaN where it is not known.
        slope: of the number there; NaN where it is not known.
        low, high: the zero lies between; the ends are not evaluated.
        rising: the sign of the slope at the zero.
    """

    place: float
    value: float
    slope: float
    low: float
    high: float
    rising: float

    @classmethod
    def begin(cls, place: Any, slope: Any, low: Any, high: Any) -> Secant:
        """Before the first evaluation."""
        return cls(float(place), np.nan, float(slope), float(low), float(high), -1.0 if slope < 0 else 1.0)

    @property
    def step(self) -> float:
        """To where the tangent, or the secant, is zero."""
        return -self.value / self.slope if self.slope else np.nan

    def next(self) -> float:
        """The next place: half-way to an end that the step would pass, in the middle where there is no step."""
        bracketed = self.low > 0 and np.isfinite(self.high)
        if self.slope * self.rising > 0 and np.isfinite(self.value):
            reach = np.inf if bracketed else _REACH * self.place
            trial = self.place + float(np.clip(self.step, -reach, reach))
        elif bracketed:
            trial = float(np.sqrt(self.low * self.high))
        else:
            trial = (1 - _FIRST_STEP * np.sign(self.value * self.rising)) * self.place
        trial = 0.5 * (self.place + self.high) if trial >= self.high else trial
        return 0.5 * (self.place + self.low) if trial <= self.low else trial

    def learn(self, place: float, value: float, slope: float = np.nan) -> Secant:
        """After an evaluation; without a slope, that of the secant through the last two places."""
        if not np.isfinite(slope):
            secant = (value - self.value) / (place - self.place) if place != self.place else np.nan
            slope = secant if np.isfinite(secant) else self.slope
        unbracketed = self.low == 0 and np.isinf(self.high) and np.isfinite(slope)
        rising = float(np.sign(slope)) if unbracketed else self.rising
        low, high = (place, self.high) if value * rising < 0 else (self.low, place)
        return Secant(place, value, slope, low, high, rising)

    def blocked(self, place: float) -> Secant:
        """After a place that turned out to have no state: a zero can only lie between there and the last state."""
        return replace(self, high=place) if place > self.place else replace(self, low=place)


def zero_between(number: Callable[[float, Any], Path], low: float, high: float, state: Any, tol: float) -> Path:
    """Path of the zero of an increasing number in a bracket.

    Args:
        number: a path for a place and a warm start, to the number there and the next warm start.
        tol: relative step that is small enough.

    Returns:
        The zero, the state next to it, and whether it is one rather than an end of the bracket.
    """
    search, trial = Secant.begin(np.nan, np.nan, low, high), float(np.sqrt(low * high))
    for _ in range(_LOOKS):
        value, state = yield from number(trial, state)
        search = search.learn(trial, float(value))
        trial = search.next()
        if search.value == 0 or abs(trial - search.place) <= tol * trial:
            inside = low * (1 + 1e-3) < trial < high * (1 - 1e-3) and np.isfinite(search.value)
            return trial, state, inside
    return trial, state, False
