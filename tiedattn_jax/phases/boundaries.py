"""Boundaries of the phase diagram as curves: results, and where they intersect."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Real, Shaped
from scipy.interpolate import CubicHermiteSpline, CubicSpline, PPoly

from ..base.errors import InputError, require
from ..base.report import Description, Result, Status, with_error

# Meaning of the points where two boundaries intersect.
INTERSECTIONS = {
    frozenset(("alpha_c", "semantic baseline")): "from here on attention beats the linear baseline at alpha_c",
    frozenset(("alpha_c", "positional baseline")): "from here on attention beats the linear baseline before alpha_c",
    frozenset(("alpha_c", "semantic instability")): "the semantic state is stable only where it is global",
    frozenset(("alpha_c", "positional instability")): "the positional state is stable only where it is global",
    frozenset(("semantic instability", "positional instability")): "end of the bistable region",
    frozenset(("semantic pitchfork", "positional pitchfork")): "the uninformed state turns unstable to both at once",
}
MODELS = "model"  # parameter of a sweep over a list of models: the index in the list


class Boundary(Result):
    """The alpha of an event as a function of a second parameter.

    Attributes:
        event: a name in `EVENTS`, or "alpha_l".
        parameter, values: name and values of the second parameter, increasing.
        alpha, stderr: the boundary and its error bar; NaN where the event was not found.
        slope: d alpha / d parameter.
        exact: whether the slope is exact, as for alpha_c and where sensitivities were requested. Other slopes are
            those of a spline through the points and may be far off where the points are few.
        status: the worst `Status` of the states.
        reason: why the event was not found, in one sentence; empty where it was found and for boundaries of a
            grid.
    """

    event: str
    parameter: str
    values: Float[np.ndarray, " A"]
    alpha: Float[np.ndarray, " A"]
    stderr: Float[np.ndarray, " A"]
    slope: Float[np.ndarray, " A"]
    exact: Bool[np.ndarray, " A"]
    status: Int[np.ndarray, " A"]
    reason: Shaped[np.ndarray, " A"]

    @classmethod
    def of(
        cls,
        event: str,
        parameter: str,
        values: Float[np.ndarray, " A"],
        alpha: Float[np.ndarray, " A"],
        stderr: Float[np.ndarray, " A"],
        slope: Float[np.ndarray, " A"] | None = None,
        status: Real[np.ndarray, " A"] | None = None,
        reason: Shaped[np.ndarray, " A"] | None = None,
        exact: Bool[np.ndarray, " A"] | None = None,
    ) -> Boundary:
        """Build a boundary from points in any order; missing slopes are taken from a cubic spline."""
        order = np.argsort(values)
        slope = np.full(len(values), np.nan) if slope is None else slope
        exact = np.isfinite(slope) if exact is None else exact
        status = np.where(np.isfinite(alpha), Status.converged, Status.absent) if status is None else status
        reason = np.full(len(values), "") if reason is None else reason
        columns = (np.asarray(a)[order] for a in (values, alpha, stderr, slope, exact, status, reason))
        values, alpha, stderr, slope, exact, status, reason = columns
        finite = np.isfinite(alpha)
        # Indices of a list are no coordinate, so that slopes between models mean nothing.
        if parameter != MODELS and finite.sum() > 1 and not np.all(np.isfinite(slope[finite])):
            exact[:] = False
            slope[finite] = CubicSpline(values[finite], alpha[finite])(values[finite], 1)
        return cls(event, parameter, values, alpha, stderr, slope, exact, status.astype(int), reason)

    @cached_property
    def interpolant(self) -> PPoly:
        """Cubic Hermite interpolant through the points that were found, without extrapolation.

        Raises:
            InputError: fewer than two points were found.
        """
        finite = np.isfinite(self.alpha)
        if finite.sum() < 2:
            raise InputError("boundary", f"must have two points or more, {self.event} has {finite.sum()}")
        return CubicHermiteSpline(self.values[finite], self.alpha[finite], self.slope[finite], extrapolate=False)

    def intersections(self, other: Boundary) -> list[tuple[float, float]]:
        """Return the intersections with another boundary as pairs (parameter, alpha), the parameter increasing.

        Raises:
            InputError: the two boundaries are in different parameters.
        """
        require(other.parameter == self.parameter, "parameter", other.parameter, f"{self.parameter} as in the other")
        if min(np.isfinite(self.alpha).sum(), np.isfinite(other.alpha).sum()) < 2:
            return []
        first, second = self.interpolant, other.interpolant
        knots = np.union1d(first.x, second.x)
        knots = knots[(knots >= max(first.x[0], second.x[0])) & (knots <= min(first.x[-1], second.x[-1]))]
        if len(knots) < 2:
            return []
        difference = CubicHermiteSpline(knots, first(knots) - second(knots), first(knots, 1) - second(knots, 1))
        roots = difference.roots(discontinuity=False, extrapolate=False)
        return [(float(v), float(first(v))) for v in np.unique(roots[np.isfinite(roots)])]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, arrays as lists."""
        status = {"status": self.status_name}
        return {name: a.tolist() if isinstance(a, np.ndarray) else a for name, a in vars(self).items()} | status

    def describe(self) -> Description:
        count = int(np.isfinite(self.alpha).sum())
        headline = f"{self.event} at {len(self.values)} values of {self.parameter}"
        rows = [(self.parameter, self.event, "slope", "status")]
        for k, (slope, status) in enumerate(zip(self.slope, self.status_name, strict=True)):
            slope_text = f"{slope:#.5g}" if self.exact[k] or np.isnan(slope) else f"{slope:.2g} (spline)"
            status_text = f"{status}: {self.reason[k]}" if self.reason[k] else status
            rows.append((f"{self.values[k]:.4g}", with_error(self.alpha[k], self.stderr[k]), slope_text, status_text))
        return Description(headline, f"found at {count}", tables=[("", rows)])

    def plot(self, ax: Any = None) -> Any:
        """Plot alpha against the parameter; see `plotting.events.boundary_figure`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.diagrams import boundary_figure

        return boundary_figure([self], ax=ax)


class Intersection(NamedTuple):
    """Intersection of two boundaries (a codimension-two point): both events, parameter value, alpha, and meaning."""

    events: tuple[str, str]
    value: float
    alpha: float
    meaning: str


def intersections(boundaries: Iterable[Boundary]) -> list[Intersection]:
    """Return all pairwise intersections of boundaries in the same parameter, in the order of its values."""
    return sorted(
        (
            Intersection((a.event, b.event), *point, INTERSECTIONS.get(frozenset((a.event, b.event)), ""))
            for a, b in combinations(boundaries, 2)
            for point in a.intersections(b)
        ),
        key=lambda meeting: meeting.value,
    )
