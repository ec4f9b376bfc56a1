"""Tables: the answers to one question at many settings, with their labels, as numbers, rows, files and pictures.

A `Table` has one cell for every setting. A cell holds the whole result of the question there, or a `Missing` that says
why there is none. The results say their numbers, and how a table shows them; see `InTable`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.interpolate import CubicHermiteSpline, CubicSpline, PPoly

from ..base.errors import InputError, require, require_choice
from ..base.report import Description, Row, by_token, entries, figure_of, with_error
from ..base.results import LINE_FIGURE, MAP_FIGURE, Average, Column, InTable, Status, error_bar
from ..model.parameters import MODELS
from ..theory.quantities import Quantity
from ..theory.states import FixedPoint
from .cells import (
    ORDER_AXES,
    Gridded,
    Intersection,
    Missing,
    Reader,
    dataset,
    differences_of,
    has_number,
    intersections_of,
    joined_pieces,
    jumps_of,
    reader_of,
    runs_of,
)

_COLUMNS = 8  # number of columns of a table over two axes that are printed


class Table(Gridded):
    """The answers to one question at all settings of a grid with no axis, one or two.

    Attributes:
        question: what was asked for: the event, the branch (None for any), or the name of the function.
        names: names of the axes: "alpha", numbers of the model, a caller's own, or "model" for a list of models.
        axes: values along the axes.
        cells: the result at every setting, or a `Missing`; the last axis runs fastest.
        slope: d alpha / d axis of an event along one axis; NaN between listed models, None for other tables.
        exact: whether the slope is exact, as for alpha_c and where sensitivities were requested. Other slopes are
            those of a spline through neighbouring points and may be far off where these are few; that of a point
            without a neighbour is NaN.
        setting: what `join` compares: a hash of the model, of the fixed numbers and of the options; empty if they are
            not known.
    """

    question: str | None = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    axes: tuple[Float[np.ndarray, " _"], ...]
    cells: tuple[Any, ...]
    slope: Float[np.ndarray, " A"] | None = None
    exact: Bool[np.ndarray, " A"] | None = None
    setting: str = eqx.field(static=True, default="")

    @classmethod
    def of_states(cls, branch: str | None, points: Sequence[FixedPoint]) -> Table:
        """Return the table of states along alpha."""
        return cls(branch, ("alpha",), (np.array([float(point.alpha) for point in points]),), tuple(points))

    @classmethod
    def of_event(
        cls,
        event: str,
        name: str,
        values: Float[np.ndarray, " A"],
        cells: Sequence[Any],
        slope: Float[np.ndarray, " A"],
        exact: Bool[np.ndarray, " A"] | None = None,
    ) -> Table:
        """Return a table along one axis from points in any order; missing slopes are those of splines through them."""
        order = np.argsort(values)
        exact = np.isfinite(slope) if exact is None else exact
        values, slope, exact = (np.asarray(a)[order] for a in (values, slope, exact))
        table = cls(event, (name,), (values,), tuple(cells[k] for k in order), slope, exact)
        found = table.found
        # Places in a list are no coordinate, so that slopes between models mean nothing.
        if name != MODELS and found.sum() > 1 and not np.all(np.isfinite(slope[found])):
            exact[:] = False
            slope[:] = np.nan
            for run in runs_of(found):
                if run.stop - run.start > 1:
                    slope[run] = CubicSpline(values[run], table.alpha[run])(values[run], 1)
        return table

    def of_setting(self, setting: str) -> Table:
        """Return the table with what `join` compares."""
        return dataclasses.replace(self, setting=setting)

    @property
    def form(self) -> InTable:
        """How the cells are read, printed and drawn."""
        return next((cell.in_table for cell in self.points if hasattr(cell, "in_table")), InTable())

    @property
    def main(self) -> str:
        """Name of the number that was asked for."""
        return self.form.main or next(iter(self.columns))

    # Arrays over the axes

    @property
    def at(self) -> Float[np.ndarray, " A"]:
        """Values along the only axis."""
        (values,) = self.axes
        return values

    @property
    def parameter(self) -> str:
        """Name of the only axis."""
        (name,) = self.names
        return name

    @property
    def found(self) -> Bool[np.ndarray, "*shape"]:
        """Whether there is a result at every setting."""
        return self._array([not isinstance(c, Missing) and getattr(c, "has_result", True) for c in self.cells])

    @property
    def status(self) -> Int[np.ndarray, "*shape"]:
        """`Status` at every setting."""
        return self._array([int(getattr(cell, "status", Status.converged)) for cell in self.cells])

    @property
    def reason(self) -> Shaped[np.ndarray, "*shape"]:
        """Why there is no result, in one sentence for every setting; empty where there is one."""
        return self._array(["" if found else getattr(c, "reason", "") for c, found in self._with_found()])

    @property
    def ok(self) -> Bool[np.ndarray, "*shape"]:
        """Whether every result can be used: it converged, or stalled at the accuracy of the averages.

        A run on data must have converged: it is then at a critical point of its risk.
        """
        usable = next((cell.USABLE for cell in self.points if hasattr(cell, "USABLE")), Status.stalled)
        return self.status <= usable

    @property
    def groups(self) -> dict[str, int]:
        """Number of settings by the branch of their result.

        Raises:
            InputError: the results are on no branch.
        """
        if "branch" not in self.columns:
            raise InputError("table", f"must be one of results on branches, got question={self.question!r}")
        names, counts = np.unique(self.columns["branch"][0], return_counts=True)
        return dict(zip(names.tolist(), counts.tolist(), strict=True))

    @property
    def failures(self) -> tuple[str, ...]:
        """The settings without a result, each with the reason; a branch that is absent is a result."""
        names, axes = self.names, self.axes
        return tuple(f"{_place_of(names, axes, k)}: {reason}" for k, reason in enumerate(self.reason.ravel()) if reason)

    @property
    def points(self) -> tuple[Any, ...]:
        """The results, without the settings at which the search failed."""
        return tuple(cell for cell in self.cells if not isinstance(cell, Missing))

    @property
    def alpha(self) -> Float[np.ndarray, "*shape"]:
        """Alpha at every setting: that of the state, or that of the event; NaN where the event was not found."""
        return self._array([None if isinstance(cell, Missing) else float(cell.alpha) for cell in self.cells])

    def values(self, number: Reader | None = None) -> Shaped[np.ndarray, "..."]:
        """Return a number, or a text such as "branch", at every setting, (*shape, ...); NaN where there is no result.

        Args:
            number: dotted name of a number of the cells, such as "gen_error" or "sensitivities.sigma"; the name of a
                column of `table`, such as "replicon"; or a function of a cell. By default what was asked for.

        Raises:
            InputError: neither the cells nor the table have the name.
        """
        number, column = self._found_number(number)
        if column is None:
            read = (reader_of(number)(cell) if found else None for cell, found in self._with_found(number))
            column = self._array([a.value if isinstance(a, (Average, Quantity)) else a for a in read]), None
        values = np.asarray(column[0])
        return values if values.dtype.kind == "U" else values.astype(float)

    def stderr(self, number: Reader | None = None) -> Float[np.ndarray, "..."]:
        """Return the error bar of a number at every setting, (*shape, ...); NaN where there is no result.

        Args:
            number: as in `values`. A function reads the number from the error bars of a state, `FixedPoint.stderr`.
        """
        number, column = self._found_number(number)
        if column is not None:
            return np.zeros(np.shape(column[0])) if column[1] is None else np.asarray(column[1])
        return self._array([_bar_of(cell, number) if found else None for cell, found in self._with_found(number)])

    def _found_number(self, number: Reader | None) -> tuple[Reader, Column | None]:
        """Return what reads a number from the cells; and its column, if it is not an attribute of the cells."""
        number = self.main if number is None else number
        first = next((cell for cell, found in self._with_found() if found), None)
        if not isinstance(number, str) or has_number(first, number):
            return number, None
        if first is not None or number in self.named:
            number = require_choice(number, "number", self.named)
        return number, self.named.get(str(number))

    def _with_found(self, number: Reader | None = None) -> Iterator[tuple[Any, bool]]:
        """Yield every cell, and whether it has a result, or at least a number that cells without one have, too."""
        always = number in self.form.always
        for cell, found in zip(self.cells, self.found.ravel().tolist(), strict=True):
            yield cell, found or (always and not isinstance(cell, Missing))

    def _array(self, rows: Sequence[Any]) -> Shaped[np.ndarray, "..."]:
        """Return one entry a cell as an array over the axes; None becomes an empty text, False or NaN."""
        arrays = [None if row is None else np.asarray(row) for row in rows]
        first = next((a for a in arrays if a is not None), np.asarray(np.nan))
        blank = np.full(first.shape, {"U": "", "b": False}.get(first.dtype.kind, np.nan))
        stacked = np.stack([blank if a is None else a for a in arrays])
        return stacked.reshape((*self.shape, *first.shape))

    # Curves

    @property
    def pieces(self) -> list[CubicHermiteSpline]:
        """Cubic Hermite interpolants through every run of neighbouring points of an event that were found.

        Raises:
            InputError: the table is not that of an event along one axis.
        """
        if self.slope is None:
            raise InputError("table", f"must be that of an event along one axis, got question={self.question!r}")
        runs = [run for run in runs_of(self.found) if run.stop - run.start > 1]
        return [CubicHermiteSpline(self.at[r], self.alpha[r], self.slope[r], extrapolate=False) for r in runs]

    @cached_property
    def interpolant(self) -> PPoly:
        """The `pieces` as one function, which is NaN outside of them and between them.

        Raises:
            InputError: the table is not that of an event along one axis, or no two neighbouring points were found.
        """
        pieces = self.pieces
        if not pieces:
            text = f"must have two neighbouring points or more, {self.question} has {self.found.sum()} of them"
            raise InputError("table", text)
        return joined_pieces(pieces)

    def intersections(self, *others: Table) -> list[Intersection]:
        """Return all intersections among this event and others along the same axis, in the order of its values.

        Raises:
            InputError: the tables have different axes, or are not those of events.
        """
        return intersections_of(self, *others)

    @property
    def jumps(self) -> list[tuple[float, float]]:
        """Intervals of the only axis in which the best state changes its branch, so that the best value jumps.

        Their ends are neighbouring points. The smallest test error is continuous at the jump.

        Raises:
            InputError: the table is not one of best values along one axis.
        """
        if len(self.names) != 1 or "place" not in self.columns:
            raise InputError("table", f"must be one of best values along one axis, got question={self.question!r}")
        return jumps_of(self)

    def difference(self, branch: str | None = None) -> dict[str, tuple[float, ...]]:
        """Return simulation, theory, their difference and its error bar for every quantity of instances, by name.

        All are means over the instances that ended in this branch, or in any, and for which the theory has a state
        there. The error bar combines that of the mean difference over the instances with that of the theory.

        Raises:
            InputError: the table is not one of instances.
        """
        if not all(hasattr(cell, "simulation") for cell in self.cells):
            raise InputError("table", f"must be one of instances, got question={self.question!r}")
        return differences_of(self, branch)

    # Rows, files and text

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Numbers with their error bars, and labels with None, by name, (*shape, ...)."""
        cells = [None if isinstance(cell, Missing) else cell.numbers() for cell in self.cells]
        names = next((cell for cell in cells if cell is not None), {str(self.question): (np.nan, np.nan)})
        values, bars = ({k: self._array([c and c[k][part] for c in cells]) for k in names} for part in (0, 1))
        columns = {k: (values[k], None if bar is None else bars[k]) for k, (_, bar) in names.items()}
        return columns | ({} if self.slope is None else {"slope": (self.slope, None), "exact": (self.exact, None)})

    @cached_property
    def named(self) -> dict[str, Column]:
        return super().named | {"status": (np.array(self.status_name), None), "reason": (self.reason, None)}

    def to_xarray(self) -> Any:
        """Return all numbers, error bars (suffix _stderr) and labels as an xarray dataset; needs the extra `xarray`.

        The dimensions are the axes. Order parameters also have `token`, `column` (a column of the student),
        `other_column` (the second one in q and V) and `teacher_column`.
        """
        axes = dict(zip(self.names, self.axes, strict=True))
        numbers = {name: column for name, column in self.columns.items() if column[1] is not None}
        labels = {name: a for name, (a, bars) in self.columns.items() if bars is None and name not in axes}
        labels |= {"status": self.status, "reason": self.reason}
        return dataset(axes, numbers, labels, {"question": self.question})

    def to_dict(self) -> dict[str, Any]:
        """Return the question, the axes, and all numbers, error bars and labels as lists; NaN where there is none."""
        numbers = {name: values.tolist() for name, (values, _) in self.columns.items()}
        bars = {name: bars.tolist() for name, (_, bars) in self.columns.items() if bars is not None}
        axes = {name: values.tolist() for name, values in zip(self.names, self.axes, strict=True)}
        outcome = {"status": self.status_name, "failures": list(self.failures)}
        return {"question": self.question, "axes": axes, **numbers, "stderr": bars, **outcome}

    def describe(self) -> Description:
        if self.form.page is not None:
            return self.form.page(self)
        count = int(self.found.sum())
        outcome = f"found at {count}"
        if len(self.names) == 1 and 0 < count < len(self.cells):
            outcome += f", from {self.at[self.found].min():g} to {self.at[self.found].max():g}"
        if self.failures:
            outcome += f"; failed at {len(self.failures)}, the first: {self.failures[0]}"
        numbers, rows = self._map() if len(self.names) == 2 else ([], self._rows())
        return Description(f"{self.form.headline(self)} at {self._settings()}", outcome, numbers, tables=[("", rows)])

    def _settings(self) -> str:
        """Return the settings in words."""
        if len(self.names) != 1:
            return f"{' x '.join(map(str, self.shape)) or 1} settings of {' and '.join(self.names) or 'the model'}"
        kind = {"alpha": "alphas", MODELS: "models"}.get(self.parameter, f"values of {self.parameter}")
        ends = "" if self.parameter == MODELS else f" from {self.at.min():g} to {self.at.max():g}"
        return f"{self.at.size} {kind}{ends}"

    def _rows(self) -> list[Row]:
        """Return a header, and one row for every setting of one axis or none."""
        columns = {k: self.columns[k] for k in self.form.shown or self.columns if k not in self.names}
        rows: list[Row] = [(*self.names, *columns, "status")]
        for index in np.ndindex(self.shape):
            texts = [f"{axis[k]:.4g}" for axis, k in zip(self.axes, index, strict=True)]
            for values, bars in columns.values():
                value = values[index]
                is_text = value.dtype.kind in "Ub"
                texts.append(
                    str(value) if is_text else entries(*by_token(value, 0 * value if bars is None else bars[index]))
                )
            status, reason = Status.name_of(self.status[index]), str(self.reason[index])
            rows.append((*texts, f"{status}: {reason}" if reason else status))
        return rows

    def _map(self) -> tuple[list[Row], list[Row]]:
        """Return the smallest and the largest main number, and its values over both axes, the first to the right."""
        if self.form.summary is not None:
            return self.form.summary(self), []
        values, bars, (x, y) = self.values(), self.stderr(), self.axes
        numbers: list[Row] = []
        for word, index in (("smallest", np.nanargmin), ("largest", np.nanargmax)) if self.found.any() else ():
            k = int(index(values))
            numbers.append(
                (word, with_error(values.flat[k], bars.flat[k]), f"at {_place_of(self.names, self.axes, k)}")
            )
        more = ("...",) * (len(x) > _COLUMNS)
        rows: list[Row] = [(rf"{self.names[1]} \ {self.names[0]}", *(f"{a:.4g}" for a in x[:_COLUMNS]), *more)]
        for j, value in enumerate(y):
            rows.append((f"{value:.4g}", *map(with_error, values[:_COLUMNS, j], bars[:_COLUMNS, j]), *more))
        return numbers, rows

    def plot(self, number: str | None = None, *, ax: Any = None, **options: Any) -> Any:
        """Draw lines along the only axis, a map over two axes, or instances against their theory; see `plotting`.

        Args:
            number: name of the number to draw, as in `values`, in place of what is drawn by default.
            ax: matplotlib axes to draw on instead of a new figure: one for each panel, or a dict of some of them by
                the names of the panels.
            options: other arguments of the picture, such as `optimal` for states along alpha; label, color and other
                options of lines.

        Returns:
            The figure, or `ax`.

        Raises:
            InputError: the table has no axis.
        """
        require(len(self.names) > 0, "axes", list(self.names), "one or two for a picture")
        if number is not None:
            values = self.values(number)
            is_drawn = values.dtype.kind != "U" and values.shape == self.shape
            require(is_drawn, "number", number, "the name of one number per setting, such as q_0 for an entry of q")
        figures, named = (self.form.figures, {}) if number is None else ((LINE_FIGURE, MAP_FIGURE), {"number": number})
        return figure_of(figures[len(self.names) - 1])(self, ax=ax, **named, **options)


# A method of a table costs a walk through all of its cells at every call, so that these are functions.


def _bar_of(cell: Any, number: Reader) -> Any:
    """Return the error bar of a number of a cell."""
    if isinstance(number, str):
        value, head = attrgetter(number)(cell), number.partition(".")[0]
        if isinstance(value, (Average, Quantity)):
            return value.stderr
        if np.asarray(value).dtype.kind != "f":  # a label is exact
            return np.zeros(())
        # Scalars of a state: its replicates as a batch of states have one each.
        if number in ORDER_AXES and isinstance(cell, FixedPoint):
            states, count = cell.replicates, cell.replicates.status.size
            one_each = jax.tree.map(lambda a: a[:, None], states)
            batch = FixedPoint(cell.model, jnp.broadcast_to(cell.alpha, count), one_each, cell.branch)
            return error_bar(jnp.where(states.has_state, getattr(batch, number), jnp.nan))
        if hasattr(cell, f"{head}_stderr"):  # such as sensitivities_stderr
            return attrgetter(number.replace(head, f"{head}_stderr", 1))(cell)
    bars = getattr(cell, "stderr", np.zeros(()))  # a result without error bars is exact
    if isinstance(number, str) and not hasattr(bars, "dtype") and not has_number(bars, number):
        return np.zeros(())
    return bars if hasattr(bars, "dtype") else reader_of(number)(bars)


def _place_of(names: Sequence[str], axes: Sequence[Float[np.ndarray, " _"]], index: int) -> str:
    """Return the setting of a cell in words."""
    places = zip(axes, np.unravel_index(index, tuple(map(len, axes))), strict=True)
    return ", ".join(f"{name} = {axis[k]:g}" for name, (axis, k) in zip(names, places, strict=True))
