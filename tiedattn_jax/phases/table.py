"""Tables: the answers to one question at many settings, with their labels, as numbers, rows, files and pictures.

A `Table` has one cell for every setting. A cell holds the whole result of the question there, or a `Missing` that says
why there is none. The results say their numbers, and how a table shows them; see `InTable`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from contourpy import contour_generator
from jaxtyping import Bool, Float, Int, Shaped
from scipy.interpolate import CubicHermiteSpline, CubicSpline, PPoly

from ..base.arrays import spread_to
from ..base.errors import InputError, require, require_choice, require_kind
from ..base.files import csv_of, write_whole
from ..base.report import Description, Row, by_token, entries, figure_of, with_error
from ..base.results import LINE_FIGURE, MAP_FIGURE, Column, InTable, Result, Status
from ..model.parameters import MODELS
from ..theory.states import FixedPoint
from .cells import (
    Batch,
    Intersection,
    Missing,
    Reader,
    bar_of,
    dataset,
    differences_of,
    has_number,
    intersections_of,
    joined_pieces,
    jumps_of,
    one_a_setting,
    place_of,
    reader_of,
    runs_of,
    with_entries,
)

_COLUMNS = 8  # number of columns of a table over two axes that are printed


class Table(Result):
    """The answers to one question at all settings of a grid with no axis, one or two.

    Attributes:
        question: what was asked for: the event, the branch (None for any), or the name of the function.
        names: names of the axes: "alpha", numbers of the model, a caller's own, or "model" for a list of models.
        axes: values along the axes.
        cells: the result at every setting, or a `Missing`, the last axis running fastest: a tuple, or a `Batch`, from
            which numbers are read at once.
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
    cells: Sequence[Any]
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
        return next((item.in_table for item in self._items if hasattr(item, "in_table")), InTable())

    @property
    def main(self) -> str:
        """Name of the number that was asked for."""
        return self.form.main or next(iter(self.columns))

    # Arrays over the axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values along every axis."""
        return tuple(map(len, self.axes))

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
        return self._array([getattr(item, "has_result", True) for item in self._items])

    @property
    def status(self) -> Int[np.ndarray, "*shape"]:
        """`Status` at every setting."""
        return self._array([getattr(item, "status", Status.converged) for item in self._items]).astype(int)

    @property
    def reason(self) -> Shaped[np.ndarray, "*shape"]:
        """Why there is no result, in one sentence for every setting; empty where there is one."""
        return np.where(self.found, "", self._array([getattr(item, "reason", "") for item in self._items]))

    @property
    def ok(self) -> Bool[np.ndarray, "*shape"]:
        """Whether every result can be used: it converged, or stalled at the accuracy of the averages.

        A run on data must have converged: it is then at a critical point of its risk.
        """
        usable = next((item.USABLE for item in self._items if hasattr(item, "USABLE")), Status.stalled)
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
        return tuple(f"{place_of(names, axes, k)}: {reason}" for k, reason in enumerate(self.reason.ravel()) if reason)

    @property
    def points(self) -> tuple[Any, ...]:
        """The cells, without those that are `Missing`."""
        return tuple(cell for cell in self.cells if not isinstance(cell, Missing))

    @property
    def alpha(self) -> Float[np.ndarray, "*shape"]:
        """Alpha at every setting: that of the state, or that of the event; NaN where the event was not found."""
        return self._read(lambda cell: cell.alpha).astype(float)

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
            column = self._read(reader_of(number), self._has(number), not isinstance(number, str)), None
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
        return self._read(lambda cell: bar_of(cell, number), self._has(number), not isinstance(number, str))

    def _has(self, number: Reader) -> Bool[np.ndarray, "*shape"]:
        return np.asarray(self.found | (number in self.form.always))

    def _found_number(self, number: Reader | None) -> tuple[Reader, Column | None]:
        """Return what reads a number from the cells; and its column, if it is not an attribute of the cells."""
        number = self.main if number is None else number
        is_batch = isinstance(self.cells, Batch)
        first = next((a for a in self._items if is_batch or getattr(a, "has_result", True)), None)
        if not isinstance(number, str) or has_number(first, number):
            return number, None
        if first is not None or number in self.named:
            number = require_choice(number, "number", self.named)
        return number, self.named.get(str(number))

    @property
    def _items(self) -> Sequence[Any]:
        """What numbers are read from: the cells one by one, or all of them as one batch."""
        return (self.cells.whole,) if isinstance(self.cells, Batch) else self.cells

    def _read(self, read: Callable[[Any], Any], known: Any = True, each: bool = False) -> Shaped[np.ndarray, "..."]:
        """Return what a function of a cell, or of a batch of them, returns, (*shape, ...); see `_array`.

        Args:
            known: whether the cells have the number, (*shape); those that are `Missing` have none.
            each: whether the function takes single cells only.
        """
        known, items = np.broadcast_to(known, self.shape), self.cells if each else self._items
        parts = zip(items, known.reshape(len(items), -1).any(1), strict=True)
        rows = [read(a) if has and not isinstance(a, Missing) else None for a, has in parts]
        return self._array(rows, known, each or not isinstance(self.cells, Batch))

    def _array(self, rows: Sequence[Any], known: Any = True, each: bool = False) -> Shaped[np.ndarray, "..."]:
        """Return one row an item as an array over the axes; what is not known becomes an empty text, False or NaN."""
        arrays = [None if row is None else np.asarray(row) for row in rows]
        first = next((a for a in arrays if a is not None), np.asarray(np.nan))
        empty: Any = {"U": "", "b": False}.get(first.dtype.kind, np.nan)
        if not each and isinstance(self.cells, Batch):
            values = np.broadcast_to(first, (*self.shape, *first.shape[len(self.shape) :]))
            return values if np.all(known) else np.where(spread_to(known, values), values, empty)
        stacked = np.stack([np.full(first.shape, empty) if a is None else a for a in arrays])
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

    def contours(self, number: Reader | None = None, level: float = 0.0) -> list[Float[np.ndarray, "P 2"]]:
        """Return the lines in the plane of both axes on which a number has a level, interpolated between the cells.

        Args:
            number: as in `values`, such as ``lambda cell: cell.differences["global"]`` for a change of a landscape.
            level: value of the number on the lines.

        Raises:
            InputError: there are not two axes.
        """
        require(len(self.names) == 2, "axes", list(self.names), "two for contour lines")
        (x, y), values = self.axes, one_a_setting(self, self.main if number is None else number)
        return [np.asarray(line) for line in contour_generator(x, y, values.T).lines(level)]

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
        items = [None if isinstance(item, Missing) else item.numbers() for item in self._items]
        names = next((item for item in items if item is not None), {str(self.question): (np.nan, np.nan)})
        values, bars = ({k: self._array([c and c[k][part] for c in items]) for k in names} for part in (0, 1))
        columns = {k: (values[k], None if bar is None else bars[k]) for k, (_, bar) in names.items()}
        return columns | ({} if self.slope is None else {"slope": (self.slope, None), "exact": (self.exact, None)})

    @cached_property
    def named(self) -> dict[str, Column]:
        """All names: arrays (*shape, ...) of order parameters, and the columns of `table`, (*shape)."""
        grids = np.meshgrid(*self.axes, indexing="ij")
        axes: dict[str, Column] = {name: (grid, None) for name, grid in zip(self.names, grids, strict=True)}
        labels = {"status": (np.array(self.status_name), None), "reason": (self.reason, None)}
        return axes | with_entries(self.columns, self.shape) | labels

    def table(self) -> list[dict[str, Any]]:
        """Return one row per setting: the axes, all numbers with their error bars, and labels.

        Order parameters of several tokens or columns have one entry for each, q_0, q_1, ..., without error bars.
        """
        columns = {name: values for name, (values, _) in self.named.items() if np.ndim(values) == len(self.shape)}
        return [{name: values[index].item() for name, values in columns.items()} for index in np.ndindex(self.shape)]

    def to_csv(self, path: Path | str | None = None) -> str:
        """Return the `table` as CSV, and write it to `path` if given."""
        content = csv_of(self.table())
        if path is not None:
            write_whole(Path(path), content)
        return content.decode()

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
            numbers.append((word, with_error(values.flat[k], bars.flat[k]), f"at {place_of(self.names, self.axes, k)}"))
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
            require_kind(number, "number", str, "the name of one number per setting")
            one_a_setting(self, number)
        figures, named = (self.form.figures, {}) if number is None else ((LINE_FIGURE, MAP_FIGURE), {"number": number})
        return figure_of(figures[len(self.names) - 1])(self, ax=ax, **named, **options)
