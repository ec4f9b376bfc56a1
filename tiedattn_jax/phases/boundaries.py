"""Boundaries of a diagram: alpha_c and alpha_l in every row of cells along alpha, by interpolation between the cells.

Nothing is interpolated over a cell that lacks the branch. If the global minimum changes between two cells that do not
both have both branches, `grid` searches alpha_c there; a boundary that is still unknown names the interval.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.interpolate import CubicHermiteSpline, CubicSpline, PPoly

from ..base.results import Status, error_bar
from ..theory.quantities import Quantity
from .cells import Missing
from .events import ALPHA_L, as_event, baseline_branch
from .table import Table

_Scale: TypeAlias = Callable[[Any], Any]  # a function of numbers or arrays


class CellRows(NamedTuple):
    """The cells of a diagram in rows along alpha: arrays (branch, rows, alphas), numbers with an axis of replicates.

    Attributes:
        axis: name and values of the other axis.
        alpha: values of alpha.
        loss, slope: training loss and its derivative in alpha, NaN where there is no state.
        gain: test error of the linear baseline minus that of the branch, NaN where there is no state.
        absent: whether a cell lacks the branch.
        status: `Status` of every branch in every cell.
        winner: index of the branch that is the global minimum of every cell, see `Pair.winner`.
        beats: whether the global minimum beats the baseline; NaN where that is not known.
        crossings: alpha_c and the gains of both branches there, (rows, 3, replicates), in rows where it was searched.
    """

    axis: tuple[str, Float[np.ndarray, " A"]]
    alpha: Float[np.ndarray, " C"]
    loss: Float[np.ndarray, "B A C R"]
    slope: Float[np.ndarray, "B A C R"]
    gain: Float[np.ndarray, "B A C R"]
    absent: Bool[np.ndarray, "B A C"]
    status: Int[np.ndarray, "B A C"]
    winner: Int[np.ndarray, "A C"]
    beats: Float[np.ndarray, "A C"]
    crossings: Float[np.ndarray, "A 3 R"]

    def boundaries(self) -> tuple[Table, Table]:
        """Return the tables of alpha_c and alpha_l."""
        rows, replicates = len(self.axis[1]), self.loss.shape[-1]
        difference, rate = np.subtract(*self.loss), np.subtract(*self.slope)
        critical, linear, linear_check = np.full((3, rows, replicates), np.nan)
        missing = self.absent | ~np.isfinite(self.loss).any(-1)
        for i, j in np.ndindex(critical.shape):
            spline = hermite_spline(self.alpha, difference[i, :, j], rate[i, :, j])
            critical[i, j] = last_rise(spline, self.alpha, np.any(missing[:, i], 0))
        # A mean without the replicates that cross next to a gap would be biased.
        lacking = np.isnan(critical) & (np.isfinite(self.loss).any(0).sum(1) > 1)
        critical = np.where(lacking.any(1, keepdims=True), self.crossings[:, 0], critical)
        alpha_c = summary(critical)
        for i, j in np.ndindex(linear.shape):
            exchange = float(critical[i, j]), float(alpha_c[0][i])
            linear[i, j] = self._alpha_l(i, j, *exchange, lambda a: -1 / a, lambda u: -1 / u)
            linear_check[i, j] = self._alpha_l(i, j, *exchange, lambda a: a, lambda u: u)
        alpha_l, bar = summary(linear)
        bar = np.hypot(bar, np.nan_to_num(np.abs(summary(linear_check)[0] - alpha_l)))
        changes = np.where(self.winner < 0, np.nan, self.winner)
        return self._table("alpha_c", *alpha_c, changes), self._table(ALPHA_L, alpha_l, bar, self.beats)

    def _alpha_l(self, i: int, j: int, critical: float, exchange: float, scale: _Scale, inverse: _Scale) -> float:
        """Return alpha_l in a row and a replicate, given alpha_c there and its mean `exchange` over the replicates.

        Without alpha_c it lies on the branch that is the global minimum in all cells of the row.
        """
        x = scale(self.alpha)
        splines = [natural_spline(x, branch[i, :, j]) for branch in self.gain]
        before, after = (
            inverse(last_rise(spline, x, absent[i])) for spline, absent in zip(splines, self.absent, strict=True)
        )
        if np.isnan(exchange):
            owners = set(self.winner[i].tolist()) & {0, 1}
            return {frozenset({0}): before, frozenset({1}): after}.get(frozenset(owners), np.nan)
        gains = self.crossings[i, 1:, j]
        if np.isnan(gains).any():
            gains = np.array([np.nan if spline is None else float(spline(scale(exchange))) for spline in splines])
        early, late = gains >= 0
        return float((before, critical, after)[int(baseline_branch(early, late))])

    def _table(
        self,
        event: str,
        alphas: Float[np.ndarray, " A"],
        bars: Float[np.ndarray, " A"],
        sides: Float[np.ndarray, "A C"],
    ) -> Table:
        """Return the table of an event at which the number `sides` of the cells rises from 0 to 1."""
        numbers: Any = zip(map(np.asarray, alphas), map(np.asarray, bars), strict=True)  # jax would round in float32
        cells = [
            as_event(Quantity(alpha, bar, jnp.asarray(int(Status.converged))), event)
            if np.isfinite(alpha)
            else self._missing(event, row, sides[row])
            for row, (alpha, bar) in enumerate(numbers)
        ]
        return Table.of_event(event, *self.axis, cells, np.full(len(alphas), np.nan))

    def _missing(self, event: str, row: int, sides: Float[np.ndarray, " C"]) -> Missing:
        """Return why an event was not found in a row: a cell failed, it was not located, or it is absent."""
        failed = np.where(np.isfinite(self.loss[:, row]).any(-1) | self.absent[:, row], -1, self.status[:, row])
        known = np.flatnonzero(np.isfinite(sides))
        rises = [(k, n) for k, n in pairwise(known) if sides[k] < 0.5 <= sides[n] < 1.5]
        if failed.max() >= 0:
            alpha = self.alpha[int(failed.max(0).argmax())]
            return Missing(f"the cell at alpha = {alpha:.4g} is not solved", int(failed.max()))
        if rises:
            low, high = (self.alpha[k] for k in rises[-1])
            text = f"{event} lies between alpha = {low:.4g} and {high:.4g} and was not located: refine the grid there"
            return Missing(text, int(Status.max_steps))
        ends = f"from alpha = {self.alpha[0]:.4g} to {self.alpha[-1]:.4g}"
        return Missing(f"there is no {event} {ends}", int(Status.absent))


def hermite_spline(
    x: Float[np.ndarray, " A"], values: Float[np.ndarray, " A"], slopes: Float[np.ndarray, " A"]
) -> PPoly | None:
    """Interpolate the finite values of a function by cubics with its slopes; None if there are fewer than two."""
    finite = np.isfinite(values)
    return CubicHermiteSpline(x[finite], values[finite], slopes[finite]) if finite.sum() > 1 else None


def natural_spline(x: Float[np.ndarray, " A"], values: Float[np.ndarray, " A"]) -> PPoly | None:
    """Interpolate the finite values of a function by a cubic spline; None if there are fewer than two."""
    finite = np.isfinite(values)
    return CubicSpline(x[finite], values[finite]) if finite.sum() > 1 else None


def last_rise(spline: PPoly | None, x: Float[np.ndarray, " A"], missing: Bool[np.ndarray, " A"]) -> float:
    """Return the last root at which a function rises, not next to a place where it is missing; NaN if there is none."""
    if spline is None:
        return np.nan
    roots = spline.roots(extrapolate=False)
    right = np.clip(np.searchsorted(x, roots), 1, max(len(x) - 1, 1))
    rising = roots[(spline(roots, 1) > 0) & ~missing[right - 1] & ~missing[right]]
    return float(rising[-1]) if len(rising) else np.nan


def summary(values: Float[np.ndarray, "*shape R"]) -> tuple[Float[Any, "*shape"], Float[np.ndarray, "*shape"]]:
    """Return the mean over the last axis (replicates), ignoring NaN, and its error bar, in the dtype of the values.

    Without `jax_enable_x64` jax computes in float32. Deviations from the mean keep their digits there.
    """
    mean = np.ma.filled(np.ma.masked_invalid(values).mean(-1), np.nan)  # that of a single row is no array
    deviations = np.moveaxis(values - mean[..., None], -1, 0)
    return mean, np.asarray(error_bar(deviations), deviations.dtype)
