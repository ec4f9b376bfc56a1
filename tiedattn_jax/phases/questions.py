"""The tables of each kind of question: states of a branch, events, best values, landscapes of the risk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from contourpy import contour_generator
from jaxtyping import Bool, Float, Int
from scipy.interpolate import CubicHermiteSpline, CubicSpline, PPoly

from ..base.errors import InputError, require, require_choice
from ..base.report import Row
from ..base.results import error_bar
from ..dynamics.population import CHANGES, words_of
from ..model.parameters import Parameter
from ..theory.states import FixedPoint
from .table import MODELS, ORDER_AXES, Missing, Reader, Table, numbers_of_states

# Meaning of the points where the curves of two events intersect.
INTERSECTIONS = {
    frozenset(("alpha_c", "semantic baseline")): "from here on attention beats the linear baseline at alpha_c",
    frozenset(("alpha_c", "positional baseline")): "from here on attention beats the linear baseline before alpha_c",
    frozenset(("alpha_c", "semantic instability")): "the semantic state is stable only where it is global",
    frozenset(("alpha_c", "positional instability")): "the positional state is stable only where it is global",
    frozenset(("semantic instability", "positional instability")): "end of the bistable region",
    frozenset(("semantic pitchfork", "positional pitchfork")): "the uninformed state turns unstable to both at once",
}


class StateTable(Table):
    """States of a branch. A branch that is absent has a state whose status says so, and no numbers."""

    main, outcome, figures = "train_loss", "states", ("branch_figure", "map_figure")
    shown = "branch", "q", "V", "theta", "m", "train_loss", "gen_error", "replicon", "jump_mass"

    @classmethod
    def of(cls, branch: str | None, points: Sequence[FixedPoint]) -> StateTable:
        """Return the table of states along alpha."""
        return cls(branch, ("alpha",), (np.array([float(point.alpha) for point in points]),), tuple(points))

    @property
    def branch(self) -> str | None:
        """Name of the branch."""
        return self.question

    @property
    def points(self) -> tuple[FixedPoint, ...]:
        """The states, without the settings at which the search failed."""
        return tuple(cell for cell in self.cells if not isinstance(cell, Missing))

    @property
    def exists(self) -> Bool[np.ndarray, "*shape"]:
        """Whether there is a state at every setting; see `FixedPoint.exists`."""
        return self.found

    @property
    def alphas(self) -> Float[np.ndarray, "*shape"]:
        """Alpha at every setting."""
        return self._array([None if isinstance(cell, Missing) else float(cell.alpha) for cell in self.cells])

    def _has_result(self, cell: Any) -> bool:
        return bool(cell.exists)

    def _bar(self, cell: Any, number: Reader) -> Any:
        if number in ORDER_AXES:  # scalars of the whole state: its replicates as a batch of states have one each
            states, count = cell.replicates, cell.replicates.status.size
            one_each = jax.tree.map(lambda a: a[:, None], states)
            batch = FixedPoint(cell.model, jnp.broadcast_to(cell.alpha, count), one_each, cell.branch)
            return error_bar(jnp.where(states.has_state, getattr(batch, str(number)), jnp.nan))
        return super()._bar(cell, number)

    def _read(self, cell: Any) -> dict[str, tuple[Any, Any]]:
        labels = {"alpha": float(cell.alpha), "branch": self.branch or cell.label, "exists": bool(cell.exists)}
        return {name: (value, None) for name, value in labels.items()} | numbers_of_states(cell)

    def _headline(self) -> str:
        labels = dict.fromkeys(cell.label for cell, exists in self._with_found() if exists)
        return f"{self.branch or ', '.join(labels) or 'any'} branch"


class Intersection(NamedTuple):
    """Intersection of two events (a codimension-two point): both events, parameter value, alpha, and meaning."""

    events: tuple[str, str]
    value: float
    alpha: float
    meaning: str


class EventTable(Table):
    """The alpha of an event.

    Attributes:
        slope: d alpha / d axis along the only axis; NaN in a table over two axes or none, and between listed models.
        exact: whether the slope is exact, as for alpha_c and where sensitivities were requested. Other slopes are
            those of a spline through the points and may be far off where the points are few.
    """

    slope: Float[np.ndarray, "*shape"]
    exact: Bool[np.ndarray, "*shape"]
    main, figures = "alpha", ("boundary_figure", "map_figure")

    @classmethod
    def along(
        cls,
        event: str,
        name: str,
        values: Float[np.ndarray, " A"],
        cells: Sequence[Any],
        slope: Float[np.ndarray, " A"],
        exact: Bool[np.ndarray, " A"] | None = None,
    ) -> EventTable:
        """Return a table along one axis from points in any order; missing slopes are taken from a cubic spline."""
        order = np.argsort(values)
        exact = np.isfinite(slope) if exact is None else exact
        values, slope, exact = (np.asarray(a)[order] for a in (values, slope, exact))
        table = cls(event, (name,), (values,), tuple(cells[k] for k in order), slope, exact)
        found = table.found
        # Places in a list are no coordinate, so that slopes between models mean nothing.
        if name != MODELS and found.sum() > 1 and not np.all(np.isfinite(slope[found])):
            exact[:] = False
            slope[found] = CubicSpline(values[found], table.alpha[found])(values[found], 1)
        return table

    @property
    def event(self) -> str:
        """Name of the event."""
        return str(self.question)

    @property
    def alpha(self) -> Float[np.ndarray, "*shape"]:
        """The alpha of the event at every setting; NaN where it was not found."""
        return self.values()

    @cached_property
    def interpolant(self) -> PPoly:
        """Cubic Hermite interpolant through the points that were found, without extrapolation.

        Raises:
            InputError: fewer than two points were found.
        """
        alpha, found = self.alpha, self.found
        if found.sum() < 2:
            raise InputError("table", f"must have two points or more, {self.event} has {found.sum()}")
        return CubicHermiteSpline(self.at[found], alpha[found], self.slope[found], extrapolate=False)

    def intersections(self, *others: EventTable) -> list[Intersection]:
        """Return all intersections among this event and others along the same axis, in the order of its values.

        Raises:
            InputError: the tables have different axes.
        """
        for other in others:
            require(other.names == self.names, "names", list(other.names), f"{self.names[0]} as in the first table")
        return sorted(
            (
                Intersection((a.event, b.event), *point, INTERSECTIONS.get(frozenset((a.event, b.event)), ""))
                for a, b in combinations((self, *others), 2)
                for point in a._meets(b)
            ),
            key=lambda meeting: meeting.value,
        )

    def _meets(self, other: EventTable) -> list[tuple[float, float]]:
        """Return the intersections with another event as pairs (value, alpha), the value increasing."""
        if min(self.found.sum(), other.found.sum()) < 2:
            return []
        first, second = self.interpolant, other.interpolant
        knots = np.union1d(first.x, second.x)
        knots = knots[(knots >= max(first.x[0], second.x[0])) & (knots <= min(first.x[-1], second.x[-1]))]
        if len(knots) < 2:
            return []
        difference = CubicHermiteSpline(knots, first(knots) - second(knots), first(knots, 1) - second(knots, 1))
        roots = difference.roots(discontinuity=False, extrapolate=False)
        return [(float(v), float(first(v))) for v in np.unique(roots[np.isfinite(roots)])]

    def _read(self, cell: Any) -> dict[str, tuple[Any, Any]]:
        known = 1.0 if self._has_result(cell) else np.nan
        return {self.event: (known * float(cell.alpha), known * float(cell.stderr))}

    @cached_property
    def _columns(self) -> dict[str, tuple[Any, Any]]:
        slopes = {"slope": (self.slope, None), "exact": (self.exact, None)} if len(self.names) == 1 else {}
        return super()._columns | slopes


class BestTable(Table):
    """The value of a number of the model with the smallest test error, a `BestRidge` at every setting.

    Attributes:
        branch: the branch, or None for the global minimum of the training loss.
    """

    branch: str | None = eqx.field(static=True)
    main, outcome, figures = "value", "states", ("best_figure", "map_figure")

    @property
    def number(self) -> str:
        """Name of the number."""
        return str(self.question).removeprefix("best ")

    @property
    def jumps(self) -> list[float]:
        """Places between neighbours along the only axis at which the best state changes its branch and the value jumps.

        The smallest test error is continuous there. The tangents of the test error at both points meet at the place.
        """
        places = []
        for (x, (a, has_a)), (y, (b, has_b)) in pairwise(zip(self.at, self._with_found(), strict=True)):
            if has_a and has_b and a.state.branch != b.state.branch:
                (e, s), (f, t) = ((float(p.gen_error.value), self._slope(p, v)) for p, v in ((a, x), (b, y)))
                place = x + (f - e + t * (x - y)) / (s - t) if s != t else np.nan
                places.append(float(place) if x <= place <= y else float(0.5 * (x + y)))
        return places

    def _slope(self, point: Any, value: float) -> float:
        """Return the derivative of the smallest test error along the axis; NaN if that is no number of the model."""
        if self.parameter == "alpha":
            return float(point.gen_error.by_alpha.value)
        with contextlib.suppress(InputError):
            Parameter(self.parameter).read(point.state.model, None, "axis")
            return Parameter(self.parameter).slope(point.gen_error.sensitivities, point.state.model, value)
        return np.nan

    def _has_result(self, cell: Any) -> bool:
        return bool(cell.states)

    def _read(self, cell: Any) -> dict[str, tuple[Any, Any]]:
        numbers = {self.number: (float(cell.value), float(cell.stderr))}
        numbers |= {"gen_error": (float(cell.gen_error.value), float(cell.gen_error.stderr))}
        branch = str(cell.state.branch) if cell.states else ""
        return {**numbers, "branch": (branch, None), "place": (cell.place, None)}

    def _headline(self) -> str:
        jumps = ", ".join(f"{place:.4g}" for place in self.jumps) if len(self.names) == 1 else ""
        branch = f"{self.branch} branch" if self.branch else "global minimum"
        return f"{self.question} of the {branch}{jumps and f' that jumps at {self.parameter} = {jumps}'}"


class LandscapeTable(Table):
    """The population risk, a `Landscape` at every setting."""

    main, figures = "label", ("table_figure", "landscape_figure")

    @property
    def label(self) -> Int[np.ndarray, "*shape"]:
        """Label at every setting, see `Landscape.label`; -1 where there is none."""
        return np.nan_to_num(self.values(), nan=-1).astype(int)

    def boundary(self, change: str) -> list[Float[np.ndarray, "P 2"]]:
        """Return lines in the plane of both axes along which a label changes, interpolated between the cells.

        Args:
            change: "global", "steepest" or "several"; see `Landscape.differences`.

        Raises:
            InputError: the change has another name.
        """
        change = require_choice(change, "change", CHANGES)
        (x, y), values = self.axes, self.values(lambda cell: cell.differences[change])
        return [np.asarray(line) for line in contour_generator(x, y, values.T).lines(0.0)]

    def _has_result(self, cell: Any) -> bool:
        return bool(cell.ok)

    def _read(self, cell: Any) -> dict[str, tuple[Any, Any]]:
        values, bars = cell.numbers()
        return {"label": (int(cell.label), None), **{k: (float(a), float(bars[k])) for k, a in values.items()}}

    def _map(self) -> tuple[list[Row], list[Row]]:
        labels, counts = np.unique(self.label[self.found], return_counts=True)
        return [(str(k), str(count), words_of(int(k))) for k, count in zip(labels, counts, strict=True)], []
