"""An event in alpha over two numbers of the model, with error bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int, Real

from ..averages.recipes import AnyNodes
from ..base.arrays import AnyArray
from ..base.files import Tabular
from ..base.report import Description, Row, Settings, Status, with_error
from ..model.model import Model
from ..model.parameters import PlaneResult, models_of_plane
from .boundaries import MODELS
from .follow import Progress, silent
from .independent import collected
from .labelled import dataset
from .sweep import check_one_kind, events_of

_COLUMNS = 8  # number of columns that are printed


class EventMap(PlaneResult, Tabular):
    """The alpha of an event over two numbers of the model.

    Attributes:
        x, y: values along the axes.
        names: names of the two numbers.
        event: a name in `EVENTS`, "alpha_l", or a threshold.
        alpha, stderr: the alpha of every cell and its error bar; NaN where the event was not found.
        status: `Status` of every cell.
        failures: cells where the event was not found, each with the reason in one sentence.
    """

    event: str = eqx.field(static=True)
    alpha: Float[np.ndarray, "Y X"]
    stderr: Float[np.ndarray, "Y X"]
    status: Int[np.ndarray, "Y X"]
    failures: tuple[str, ...] = eqx.field(static=True, default=())

    def table(self) -> list[dict[str, Any]]:
        """Return one row per cell: both numbers, alpha with its error bar, and the status in words."""
        return [
            {
                self.names[0]: self.x[i],
                self.names[1]: self.y[j],
                self.event: self.alpha[j, i],
                f"{self.event}_stderr": self.stderr[j, i],
                "status": Status.name_of(self.status[j, i]),
            }
            for j, i in np.ndindex(self.alpha.shape)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, arrays as lists."""
        status = {"status": self.status_name}
        return {name: a.tolist() if isinstance(a, np.ndarray) else a for name, a in vars(self).items()} | status

    def to_xarray(self) -> Any:
        """Return alpha, its error bar (suffix _stderr) and the status as an xarray dataset; needs the extra `xarray`.

        The dimensions are the two numbers. The variable of alpha has the name of the event.
        """
        coordinates = {self.names[1]: self.y, self.names[0]: self.x}
        attrs = {"event": self.event, "failures": self.failures}
        alpha, bar = (lambda _: self.alpha), (lambda _: self.stderr)
        return dataset(coordinates, [self.event], alpha, bar, {"status": self.status}, attrs)

    def describe(self) -> Description:
        has_event, (name_x, name_y) = np.isfinite(self.alpha), self.names
        outcome = f"found in {int(has_event.sum())}"
        if self.failures:
            outcome += f"; not found in {len(self.failures)}, the first: {self.failures[0]}"
        numbers: list[Row] = []
        for word, index in (("smallest", np.argmin), ("largest", np.argmax)) if has_event.any() else ():
            places = np.argwhere(has_event)
            j, i = places[index(self.alpha[has_event])]
            where = f"at {name_x} = {self.x[i]:.4g}, {name_y} = {self.y[j]:.4g}"
            numbers.append((word, with_error(self.alpha[j, i], self.stderr[j, i]), where))
        more = ("...",) * (len(self.x) > _COLUMNS)
        rows: list[Row] = [(rf"{name_y} \ {name_x}", *(f"{a:.4g}" for a in self.x[:_COLUMNS]), *more)]
        for value, alphas, bars in zip(self.y, self.alpha, self.stderr, strict=True):
            cells = [with_error(a, b) for a, b in zip(alphas[:_COLUMNS], bars[:_COLUMNS], strict=True)]
            rows.append((f"{value:.4g}", *cells, *more))
        what = f"{self.event} in {len(self.y)} x {len(self.x)} cells"
        return Description(what, outcome, numbers, tables=[("", rows)])

    def plot(self, ax: Any = None) -> Any:
        """Draw alpha as colours with contour lines; see `plotting.diagrams.event_map_figure`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.diagrams import event_map_figure

        return event_map_figure(self, ax=ax)


def event_map(
    model: Callable[[float, float], Model],
    x: Sequence[float] | Real[AnyArray, " X"],
    y: Sequence[float] | Real[AnyArray, " Y"],
    event: str = "alpha_c",
    *,
    names: tuple[str, str] = ("x", "y"),
    nodes: AnyNodes = None,
    settings: Settings | None = None,
    progress: Progress = silent,
) -> EventMap:
    """Find an event over two numbers, every cell by itself, all in one pool.

    Every cell is computed as by `critical_alpha`, `linear_crossing` or ``sweep(models, event=...)``. A cell without the
    event does not affect the others.

    Args:
        model: function of a value of x and a value of y that returns a model, for example
            ``lambda a, b: ta.dot_product(mixing=[[1 - a, a], [b, 1 - b]])``. All models must be of one class, with
            arrays of the same shapes.
        x, y: values of the two numbers, increasing, at least two each.
        event: a name in `EVENTS`, "alpha_l", a threshold of the optimal learner, "weak_recovery" or
            "perfect_recovery", or of small starts of gradient descent, "encodings separate" or "teacher separates".
        names: names of the two numbers, for pictures and tables.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.
        settings: tolerances; by default `Settings()`. Thresholds need none.
        progress: called with the number of finished cells and the number of all cells.

    Raises:
        InputError: x or y is not increasing; the event is unknown; model is no function of two numbers that returns
            models of one kind; names, nodes or settings are of the wrong kind; or the search failed in all cells.
    """
    grid_x, grid_y, models = models_of_plane(model, x, y, names)
    check_one_kind(models)
    cells = [f"{names[0]} = {a:g}, {names[1]} = {b:g}" for b in grid_y for a in grid_x]
    results = events_of(event, models, cells, nodes, settings, progress)
    boundary = collected(event, MODELS, np.arange(len(models), dtype=float), models, results)
    failures = tuple(
        f"{cell}: {reason}" for cell, reason in zip(cells, boundary.reason.tolist(), strict=True) if reason
    )
    shape = grid_y.size, grid_x.size
    alpha, bar, status = (a.reshape(shape) for a in (boundary.alpha, boundary.stderr, boundary.status))
    return EventMap(grid_x, grid_y, names, event, alpha, bar, status, failures)
