"""Where the test error can be smallest along a number of the model: a walk on the coarse replicate, and its minima.

A branch is walked through a grid of values of the number. Splines through the walk say where the smallest error is
expected: where it is stationary, where the global minimum of the training loss changes its branch, or at an end of the
range. `best` then locates that place on all replicates. Places are in x = log(number).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from scipy.interpolate import CubicSpline

from ..averages.rules import COARSE
from ..base.arrays import indexed, stacked
from ..base.results import Status
from ..model.overlaps import Overlaps
from ..theory.newton import ATTEMPTS
from ..theory.paths import Path
from ..theory.setting import Lane, Setting, branch_start
from ..theory.states import State
from .family import Family
from .follow import WarmStart, predict, update

_PER_DECADE = 3  # values of the walk in a factor of ten


class Walk(NamedTuple):
    """A branch along the values of the number, on the coarse replicate; numbers are NaN where there is no state.

    `status` is `absent` if there was no state wherever the walk ended, else the worst status of the searches there.
    """

    branch: str
    x: Float[np.ndarray, " A"]
    error: Float[np.ndarray, " A"]
    loss: Float[np.ndarray, " A"]
    overlaps: list[Overlaps | None]
    status: int = int(Status.absent)

    def nearest(self, x: float) -> Overlaps:
        """Return the overlaps at the state of the walk that is nearest to x."""
        places = np.flatnonzero(np.isfinite(self.error))
        overlaps = self.overlaps[places[np.argmin(np.abs(self.x[places] - x))]]
        assert overlaps is not None
        return overlaps


def walk_path(family: Family, bracket: tuple[float, float], branch: str) -> Path:
    """Path that walks a branch through the bracket, to both sides of the model's own value; returns a `Walk`.

    Each direction ends at the first value without a state. If there is no state at the model's own value, the walk
    begins at the nearest value with one.
    """
    low, high = np.log(bracket)
    grid = np.linspace(low, high, max(4, 1 + round(_PER_DECADE * (high - low) / np.log(10))))
    error, loss = np.full((2, grid.size), np.nan)
    overlaps: list[Overlaps | None] = [None] * grid.size
    ends = list[int]()  # statuses of the searches that found no state
    start = jax.tree.map(np.asarray, branch_start(family.model, branch))
    middle = np.log(max(family.number.read(family.model, None, "number"), bracket[0]))

    def setting(k: int) -> Setting:
        return family.at(float(np.exp(grid[k])), branch)

    def visit(k: int, *guesses: tuple[Overlaps, int]) -> Path:
        """Path that searches a state from guesses in turn, each with its number of attempts; returns it or None."""
        for guess, attempts in guesses:
            state = yield Lane(setting(k), guess, COARSE, attempts)
            if state.has_state:
                error[k], loss[k], overlaps[k] = state.gen_error, state.train_loss, state.overlaps
                return state
        ends.append(int(state.status))
        return None

    def go(places: range, first: State) -> Path:
        """Path that walks on from a first state until there is none."""
        warm = WarmStart.begin(first.overlaps, grid[places.start - places.step], 1)
        for k in places:
            guess = indexed(predict(setting(k).model, warm, grid[k]), 0)
            state = yield from visit(k, (guess, 1), (start, len(ATTEMPTS)))
            if state is None:
                return
            warm = update(warm, grid[k], stacked([state]))

    # A branch that exists at all does so in a wide range.
    for k in np.argsort(np.abs(grid - middle))[::_PER_DECADE]:
        state = yield from visit(int(k), (start, len(ATTEMPTS)))
        if state is not None and state.status <= Status.stalled:
            yield [go(range(k + 1, grid.size), state), go(range(k - 1, -1, -1), state)]
            break
    return Walk(branch, grid, error, loss, overlaps, merged_status(*ends))


def merged_status(*statuses: int) -> int:
    """Return the status of several searches that found nothing: nothing is absent where one of them failed."""
    return max((status for status in statuses if status != Status.absent), default=int(Status.absent))


class Place(NamedTuple):
    """A point at which the smallest error is expected, in a stretch of values on which one branch counts.

    Attributes:
        branch: index of the walk of the branch.
        x, error, curvature: the point, and on the coarse replicate the error and its second derivative in x there.
        kind: "inside", "transition", "lower end" or "upper end", see `best.PLACES`.
        low, high: the stretch.
        crossings: the ends of the stretch that are transitions.
    """

    branch: int
    x: float
    error: float
    curvature: float
    kind: str
    low: float
    high: float
    crossings: tuple[float, ...]


def places_of(walks: Sequence[Walk]) -> list[Place]:
    """Return the place of the smallest error in every stretch of values, the smallest first.

    With two walks, the branch with the lower training loss counts, and a stretch ends where the losses cross.
    """
    grid = walks[0].x
    losses = np.array([np.where(np.isfinite(w.error), w.loss, np.inf) for w in walks])
    winner = np.where(np.isfinite(losses).any(0), losses.argmin(0), -1)
    places, first = [], 0
    for last in [*np.flatnonzero(np.diff(winner)).tolist(), grid.size - 1]:
        if winner[first] >= 0:
            ends = [_takeover(grid, losses, winner, first - 1), _takeover(grid, losses, winner, last)]
            places.append(_lowest(walks[winner[first]], int(winner[first]), grid[first], grid[last], ends))
        first = last + 1
    return sorted(places, key=lambda place: place.error)


def _takeover(grid: Float[np.ndarray, " A"], losses: Float[np.ndarray, "B A"], winner: Any, k: int) -> float | None:
    """Return where another branch takes over between values k and k + 1; None if there is no other branch."""
    if k < 0 or k + 1 >= grid.size or min(winner[k], winner[k + 1]) < 0:
        return None
    before, after = (losses[winner[k + 1], j] - losses[winner[k], j] for j in (k, k + 1))
    share = before / (before - after) if np.isfinite(before) and np.isfinite(after) else 0.5
    return float(grid[k] + share * (grid[k + 1] - grid[k]))


def _lowest(walk: Walk, branch: int, first: float, last: float, ends: list[float | None]) -> Place:
    """Return the place of the smallest error of a branch between the ends, from a spline through its walk."""
    known = np.isfinite(walk.error)
    low, high = (end if c is None else c for c, end in zip(ends, (first, last), strict=True))
    crossings = tuple(c for c in ends if c is not None)
    if known.sum() < 2:
        return Place(branch, first, walk.error[known][0], np.nan, "lower end", low, high, crossings)
    spline = CubicSpline(
        walk.x[known], np.log(walk.error[known]), bc_type="natural" if known.sum() < 4 else "not-a-knot"
    )
    x = np.linspace(low, high, 1 + max(2, int(100 * (high - low))))
    k = int(np.argmin(spline(x)))
    kind = "inside"
    if k in (0, x.size - 1):
        kind = "transition" if ends[min(k, 1)] is not None else ("lower end", "upper end")[min(k, 1)]
    error = float(np.exp(spline(x[k])))
    curvature = error * float(spline(x[k], 2) + spline(x[k], 1) ** 2)
    return Place(branch, float(x[k]), error, curvature, kind, low, high, crossings)
