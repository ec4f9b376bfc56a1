"""Phase diagrams as results: regions, boundaries and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float

from ..base.errors import InputError, require, require_choice
from ..base.files import write_whole
from ..base.report import Description, with_error
from ..base.results import Column
from ..model.overlaps import PAIR
from .boundaries import CellRows
from .cells import Batch, Reader, dataset
from .pair import REGIONS, Pair
from .table import Table

# What a diagram has of its pair.
_OF_PAIR = {"positional", "semantic", *(k for k, a in vars(Pair).items() if isinstance(a, property | cached_property))}
_OF_PAIR -= {name for name in _OF_PAIR if name.startswith("_") or hasattr(Table, name)} | {"has_result"}


class PhaseDiagram(Table):
    """The positional and the semantic branch on a grid of settings: a table whose cells are a `Pair` each.

    What a `Pair` has, the diagram has of all cells: `region`, `trusted`, `semantic`, and so on, as arrays whose last
    axes are (y, x). `values`, `stderr` and `plot` take a dotted name, such as "semantic.theta", or that of a column of
    `table`.

    Attributes:
        cells: both branches, one batch (y, x); an index makes the pair of a cell.
        crossings: alpha_c, and by how much both branches beat the linear baseline there, where the grid does not
            tell alpha_c and it was searched: rows along alpha, these three, replicates. NaN in other rows.
        attrs: all settings: the model and its numbers, alpha, nodes, tolerances, version, and their fingerprint.
    """

    cells: Batch
    attrs: dict[str, Any] = eqx.field(default_factory=dict)
    crossings: Float[np.ndarray, "A 3 R"] | None = None

    @property
    def pair(self) -> Pair:
        """Both branches in all cells, a batch (y, x)."""
        return self.cells.whole

    def __getattr__(self, name: str) -> Any:
        """Return what the pair has under this name; Python asks for names that a table lacks."""
        if name in _OF_PAIR:
            return getattr(self.pair, name)
        return object.__getattribute__(self, name)  # raises the error of Python, or that of a property

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *_OF_PAIR}

    @property
    def x(self) -> tuple[str, Float[np.ndarray, " X"]]:
        """Name and values of the axis that points to the right, which is the last one of all arrays."""
        return self.names[1], self.axes[1]

    @property
    def y(self) -> tuple[str, Float[np.ndarray, " Y"]]:
        """Name and values of the axis that points upwards."""
        return self.names[0], self.axes[0]

    def _found_number(self, number: Reader | None) -> tuple[Reader, Column | None]:
        number = self.main if number is None else number
        if isinstance(number, str) and "." not in number:  # `region` of a pair is a code, and its column has words
            return number, self.named[require_choice(number, "number", self.named)]
        return super()._found_number(number)

    # Boundaries

    def alpha_c(self) -> Table:
        """Return where the losses of the branches cross, by cubic Hermite interpolation with exact slopes.

        Between cells that do not both have both branches, it is what `phase_diagram` found by a search. An alpha_c that
        is not known has a reason, which names the interval.

        Raises:
            InputError: alpha is not an axis.
        """
        return self._boundaries[0]

    def alpha_l(self) -> Table:
        """Return where the global minimum starts to beat the linear baseline; raises as `alpha_c`.

        The crossing lies on the positional branch below alpha_c, at alpha_c itself, or on the semantic branch above it.
        It is the root of cubic splines in 1 / alpha through the test errors of each branch. The error bars include the
        difference to splines in alpha, which estimates the error of interpolating between too few cells.
        """
        return self._boundaries[1]

    @cached_property
    def _boundaries(self) -> tuple[Table, Table]:
        if "alpha" not in self.names:
            raise InputError("alpha", f"must be one of the axes for curves in alpha, got axes={self.names[::-1]}")
        rows = self if self.x[0] == "alpha" else self._turned
        pair, gain, read = rows.pair, -rows.gen_difference[0], rows.pair.where_a_state
        loss, slope = read(lambda state: state.train_loss), read(lambda state: state.train_loss_partials[1])
        gains = read(lambda state: state.gen_error_linear - state.gen_error)
        beats = np.where(np.isnan(gain), np.nan, gain > 0)
        crossings = np.full((len(rows.y[1]), 3, loss.shape[-1]), np.nan) if self.crossings is None else self.crossings
        numbers = loss, slope, gains, pair.absent, pair.branch_status, pair.winner, beats, crossings
        return CellRows(rows.y, rows.x[1], *numbers).boundaries()

    @property
    def _turned(self) -> PhaseDiagram:
        """The diagram with its axes exchanged."""
        cells = Batch(jax.tree.map(lambda a: np.swapaxes(a, 0, 1), self.pair), self.shape[::-1])
        return dataclasses.replace(self, names=self.names[::-1], axes=self.axes[::-1], cells=cells)

    # Files

    def to_dict(self) -> dict[str, Any]:
        """Return settings, axes, cells per region, and, if alpha is an axis, alpha_c and alpha_l.

        `untrusted` and `unsettled` are numbers of cells, see `trusted` and `settled`.
        """
        fields: dict[str, Any] = {**self.attrs, **{name: values.tolist() for name, values in (self.x, self.y)}}
        for boundary in self._boundaries_if_any():
            name = str(boundary.question)
            fields |= {name: boundary.alpha.tolist(), f"{name}_stderr": boundary.stderr().tolist()}
        counts = {"untrusted": int(np.sum(~self.trusted)), "unsettled": int(np.sum(~self.settled))}
        return {**fields, "regions": self._shares(), **counts, "status": self._outcome()}

    def describe(self) -> Description:
        headline = f"{self.x[0]} x {self.y[0]}: {len(self.x[1])} x {len(self.y[1])} cells"
        counts = {**self._shares(), "not trusted, in any region": int(np.sum(~self.trusted))}
        tables: list[tuple[str, list]] = [("", [(f"{count:6d}", name) for name, count in counts.items()])]
        if boundaries := self._boundaries_if_any():
            rows = [(boundaries[0].parameter, *(str(b.question) for b in boundaries))]
            for k, value in enumerate(boundaries[0].at):
                texts = [with_error(b.alpha[k], b.stderr()[k]) if b.found[k] else b.status_name[k] for b in boundaries]
                rows.append((f"{value:.4g}", *texts))
            tables.append(("", rows))
        return Description(headline, self._outcome(), tables=tables)

    def _boundaries_if_any(self) -> list[Table]:
        return [self.alpha_c(), self.alpha_l()] if "alpha" in self.names else []

    def _shares(self) -> dict[str, int]:
        """Return the number of cells in each region."""
        return {name: int(np.sum(self.region == code)) for code, name in enumerate(REGIONS)}

    def _outcome(self) -> str:
        if not self.solved.all():
            return "some cells unsolved"
        count = int(np.sum(~self.settled))
        return f"{count} of {self.settled.size} cells not settled" if count else "converged"

    def to_xarray(self) -> Any:
        """Return means, error bars (suffix _stderr) and labels as an xarray dataset; needs the extra `xarray`.

        The dimensions are `branch` and the axes of the grid. Order parameters also have `token`, `column` (a column of
        the student), `other_column` (the second one in q and V) and `teacher_column`. The attributes of `status` and
        `branch_status` explain their integers as the CF conventions prescribe.
        """
        coordinates = {"branch": list(PAIR), **dict(zip(self.names, self.axes, strict=True))}
        labels = {name: getattr(self.pair, name) for name in ("exists", "stable", "branch_status")}
        of_cells = {name: a for name, (a, _) in self.named.items() if not name.startswith(PAIR)}
        of_cells |= {"status": self.status, "solved": self.solved}
        labels |= {name: (self.names, a) for name, a in of_cells.items() if name not in self.names}
        branches = [branch.numbers() for branch in (self.positional, self.semantic)]
        numbers = {name: tuple(map(np.stack, zip(*(b[name] for b in branches), strict=True))) for name in branches[0]}
        # Parts of a grid differ in their fingerprints, and xarray would refuse to combine them.
        attrs = {name: value for name, value in self.attrs.items() if name != "fingerprint"}
        return dataset(coordinates, numbers, labels, attrs)

    def to_html(self, path: Path | str) -> None:
        """Write the diagram as one page of HTML, to open in any browser: it needs no network and no library.

        The page shows the map with its boundaries. Pointing at a cell shows the numbers of both branches and of the
        global minimum with error bars and status, a click draws the curves through the cell.

        Raises:
            InputError: the path is not that of an .html file that can be written, or this is a batch of diagrams.
        """
        from ..plotting.page import diagram_page

        require(Path(path).suffix in (".html", ".htm"), "path", str(path), 'that of an .html file: "diagram.html"')
        if (shape := np.shape(self.positional.alpha)) != self.shape:
            raise InputError("diagram", f"must be one diagram, got a batch with states of shape {shape}")
        content = diagram_page(self).encode()
        try:
            write_whole(Path(path), content)
        except OSError as error:
            text = f"must be a file that can be written, got path={str(path)!r}: {error.strerror}"
            raise InputError("path", text) from error

    def plot(self, number: str | None = None, *, ax: Any = None, **options: Any) -> Any:
        """Draw the regions and the test error, see `plotting.diagrams.diagram_figure`, or a map of one number.

        Args:
            number: name of the number of a map, as in `values`; a map has no options.
            ax: matplotlib axes to draw on instead of a new figure: one for each of the panels "region" (with `losses`
                "train_loss") and "gen_error", or a dict of some of them; for a map that of "number".
            options: `boundaries`, tables of further events; `losses`, whether the left panel shows the difference of
                the training losses instead of the regions.

        Returns:
            The figure, or `ax`.

        Raises:
            InputError: a boundary is in another parameter, or alpha is not an axis.
        """
        from ..plotting.diagrams import diagram_figure

        if number is None:
            return diagram_figure(self, ax=ax, **options)
        # The first axis of a map points to the right, as the last one of a diagram does.
        return super(PhaseDiagram, self._turned).plot(number, ax=ax, **options)
