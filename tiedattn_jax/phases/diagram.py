"""Phase diagrams as results: regions, boundaries and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from ..base.arrays import AnyArray, spread_to
from ..base.errors import InputError, require
from ..base.files import write_whole
from ..base.report import Description, with_error
from ..base.results import Column, Status, quorum
from ..model.overlaps import PAIR
from ..theory.states import FixedPoint, State
from .boundaries import CellRows, summary
from .cells import Gridded, dataset
from .follow import is_absent
from .table import Table

REGIONS = (
    "unsolved",
    "neither",
    "unique positional",
    "unique semantic",
    "bistable, positional global",
    "bistable, semantic global",
    "uninformed",
)
MINIMA = (*PAIR, "uninformed")  # names of the states that `PhaseDiagram.winner` counts
# Relative difference of the losses above which the searches for two absent branches did not end in the same state.
_AGREEMENT = 1e-3


class PhaseDiagram(Gridded):
    """The positional and the semantic branch on a grid of settings.

    Attributes:
        x, y: names and values of the two parameters.
        positional, semantic: states of the branches in all cells, batches (y, x). Where a branch is absent, these are
            numbers of the uninformed state, in which its search ended.
        crossings: alpha_c, and by how much both branches beat the linear baseline there, where the grid does not
            tell alpha_c and it was searched: rows along alpha, these three, replicates. NaN in other rows.
        attrs: all settings: the model and its numbers, alpha, nodes, tolerances, version, and their fingerprint.
    """

    x: tuple[str, Float[np.ndarray, " X"]]
    y: tuple[str, Float[np.ndarray, " Y"]]
    positional: FixedPoint
    semantic: FixedPoint
    attrs: dict[str, Any]
    crossings: Float[np.ndarray, "A 3 R"] | None = None

    def _both(self, read: Callable[[FixedPoint], Any]) -> Shaped[np.ndarray, "branch ..."]:
        """Return what `read` returns for the branches in the order of `PAIR`."""
        return np.stack([np.asarray(read(branch)) for branch in (self.positional, self.semantic)])

    @cached_property
    def _has_state(self) -> Bool[np.ndarray, "branch Y X R"]:
        """Whether a replicate has a state."""
        return self._both(lambda branch: branch.replicates.has_state)

    @cached_property
    def _statuses(self) -> Int[np.ndarray, "branch Y X R"]:
        """`Status` of every replicate."""
        return self._both(lambda branch: branch.replicates.status)

    def _where_a_state(self, read: Callable[[State], Any]) -> Float[np.ndarray, "branch Y X R"]:
        """Return a number of all replicates; NaN in those that have no state, and in cells without the branch."""
        known = self._has_state & self.exists[..., None]
        return np.where(known, self._both(lambda branch: read(branch.replicates)), np.nan)

    @cached_property
    def exists(self) -> Bool[np.ndarray, "branch Y X"]:
        """Whether a branch has a state in a cell, whether or not the nodes resolve it."""
        return np.asarray(quorum(self._has_state))

    @property
    def absent(self) -> Bool[np.ndarray, "branch Y X"]:
        """Whether the search established that a cell lacks a branch."""
        return self._both(lambda branch: is_absent(branch.replicates))

    @property
    def solved(self) -> Bool[np.ndarray, "Y X"]:
        """Whether each branch of a cell is known to exist or to be absent."""
        return np.all(self.exists | self.absent, 0)

    @property
    def status(self) -> Int[np.ndarray, "branch Y X"]:
        """`Status` of every cell: the worst of the replicates that agree with the majority."""
        worst = np.where(self._statuses == Status.absent, -1, self._statuses).max(-1)
        return np.where(self.absent, int(Status.absent), worst).astype(int)

    @cached_property
    def stable(self) -> Bool[np.ndarray, "branch Y X"]:
        """Whether a branch exists and the other branch's order parameter does not grow on it."""
        return self._both(lambda branch: branch.stable)

    @property
    def loss_difference(self) -> tuple[Float[np.ndarray, "Y X"], Float[np.ndarray, "Y X"]]:
        """Training loss, positional minus semantic, and its error bar; NaN where a branch is missing."""
        return summary(np.subtract(*self._where_a_state(lambda state: state.train_loss)))

    @property
    def uninformed(self) -> Bool[np.ndarray, "Y X"]:
        """Whether a cell lacks both branches, so that its global minimum is the uninformed state, theta = m = 0.

        The search for an absent branch ends in the uninformed state, or in the limit of a student that vanishes. The
        searches for both branches must have ended at the same training loss.
        """
        losses = self._both(lambda branch: branch.replicates.train_loss)
        first, second = np.where(self._statuses == Status.absent, losses, np.nan)
        agree = np.abs(first - second) <= _AGREEMENT * np.abs(first)
        return np.all(self.absent, 0) & np.asarray(quorum(agree))

    @cached_property
    def winner(self) -> Int[np.ndarray, "Y X"]:
        """State with the lowest training loss, an index into `MINIMA`: 0 positional, 1 semantic, 2 uninformed, -1 none.

        The uninformed state counts in cells that lack both branches; see `uninformed`. It is not known in a cell where
        the search for a branch failed.
        """
        loss = np.where(self.exists, summary(self._where_a_state(lambda state: state.train_loss))[0], np.inf)
        known = self.solved & np.isfinite(loss).any(0)
        return np.where(known, loss.argmin(0), np.where(self.uninformed, 2, -1))

    @cached_property
    def global_minimum(self) -> FixedPoint:
        """The state of the global minimum of the training loss in all cells, a batch (y, x).

        This is the branch with the lower training loss, or the uninformed state in cells that lack both. Where none is
        known its numbers are NaN, and the status is that of the search that failed, or `nonfinite`.
        """
        ended = np.all(self._statuses == Status.absent, 0)  # replicates whose searches ended in the uninformed state
        kinds = np.where(self.winner < 2, self.winner, -1)[..., None] + 0 * ended
        kinds = np.where((self.winner == 2)[..., None] & ended, 2, kinds)

        def pick(positional: AnyArray, semantic: AnyArray) -> AnyArray:
            kind = spread_to(kinds, positional)
            middle = np.mean([positional, semantic], 0)
            return np.select([kind == k for k in range(len(MINIMA))], [positional, semantic, middle], np.nan)

        states = jax.tree.map(pick, self.positional.replicates, self.semantic.replicates)
        failed = np.where(self._has_state | (self._statuses == Status.absent), 0, self._statuses).max(0)
        unknown = np.where(failed > 0, failed, int(Status.nonfinite))
        status = np.select([kinds == 0, kinds == 1, kinds == 2], [*self._statuses, 0 * kinds], unknown)
        return FixedPoint(self.positional.model, self.positional.alpha, replace(states, status=status), None)

    @property
    def gen_difference(self) -> tuple[Float[np.ndarray, "Y X"], Float[np.ndarray, "Y X"]]:
        """Test error of the global minimum minus that of the linear baseline, and its error bar."""
        states = self.global_minimum.replicates
        return summary(np.where(states.has_state, states.gen_error - states.gen_error_linear, np.nan))

    @property
    def region(self) -> Int[np.ndarray, "Y X"]:
        """Index into `REGIONS`: which branches are stable, and which of them is the global minimum.

        Cells that lack both branches are "uninformed". Others are "neither" if no branch is stable there.
        """
        positional, semantic = self.stable
        bistable = np.where(self.winner == 0, 4, 5)
        uninformed = self.winner == MINIMA.index("uninformed")
        code = np.select([positional & semantic, positional, semantic, uninformed], [bistable, 2, 3, 6], 1)
        return np.where(self.solved, code, 0)

    @property
    def region_names(self) -> Shaped[np.ndarray, "Y X"]:
        """The `region` of every cell in words."""
        return np.array(REGIONS)[self.region]

    @property
    def beats_linear(self) -> Bool[np.ndarray, "Y X"]:
        """Whether the global minimum generalises better than the linear baseline."""
        return self.gen_difference[0] < 0

    @property
    def settled(self) -> Bool[np.ndarray, "Y X"]:
        """Whether most replicates of each branch are solved to the accuracy of the nodes, or show that it is absent.

        Other cells may count as states if their residual is small; their status says how the search ended.
        """
        resolved = ~quorum(self._statuses > Status.stalled) | ~quorum(self._statuses != Status.absent)
        return self.solved & np.all(resolved, 0)

    @property
    def trusted(self) -> Bool[np.ndarray, "Y X"]:
        """Whether a cell can be relied on.

        Three conditions hold: the cell is `settled`, the losses of the branches differ by more than two error bars, and
        the replicon of the global minimum is below one.
        """
        difference, bar = self.loss_difference
        replicon = np.asarray(self.global_minimum.diagnostics.replicon)
        decided = ~np.all(self.exists, 0) | ~np.isfinite(bar) | (np.abs(difference) > 2 * bar)
        return self.settled & decided & ~(replicon >= 1)

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
        names = self.x[0], self.y[0]
        if "alpha" not in names:
            raise InputError("alpha", f"must be one of the axes for curves in alpha, got axes={names}")
        (_, alpha), other_axis = (self.x, self.y) if names[0] == "alpha" else (self.y, self.x)
        numbers: tuple[Any, ...] = (
            self._where_a_state(lambda state: state.train_loss),
            self._where_a_state(lambda state: state.train_loss_partials[1]),
            self._where_a_state(lambda state: state.gen_error_linear - state.gen_error),
            self.absent,
            self.status,
        )
        gain = -self.gen_difference[0]
        cells: tuple[Any, ...] = self.winner, np.where(np.isnan(gain), np.nan, gain > 0)
        if names[0] != "alpha":
            numbers = tuple(np.swapaxes(a, 1, 2) for a in numbers)
            cells = tuple(a.T for a in cells)
        blank = np.full((len(other_axis[1]), 3, numbers[0].shape[-1]), np.nan)
        crossings = blank if self.crossings is None else self.crossings
        return CellRows(other_axis, alpha, *(*numbers, *cells, crossings)).boundaries()

    # Files

    @property
    def names(self) -> tuple[str, str]:
        """Names of the axes in the order in which arrays have them: that of y first."""
        return self.y[0], self.x[0]

    @property
    def axes(self) -> tuple[Float[np.ndarray, " Y"], Float[np.ndarray, " X"]]:
        """Values along the axes in this order."""
        return self.y[1], self.x[1]

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Region, and numbers of the global minimum and of both branches, with their error bars, (Y, X, ...)."""
        columns: dict[str, Column] = {"region": (self.region_names, None)}
        columns |= {name: (getattr(self, name), None) for name in ("beats_linear", "trusted")}
        columns |= {"loss_difference": self.loss_difference} | self._minimum_columns()
        for branch, point, status in zip(PAIR, (self.positional, self.semantic), self.status, strict=True):
            columns[f"{branch}_status"] = np.vectorize(Status.name_of)(status), None
            columns |= {f"{branch}_{name}": column for name, column in point.numbers().items()}
        return columns

    def _minimum_columns(self) -> dict[str, Column]:
        """Return the name of the global minimum in every cell, empty if there is none, and its losses."""
        numbers = self.global_minimum.numbers()
        losses = {f"global_minimum_{name}": numbers[name] for name in ("train_loss", "gen_error")}
        return {"global_minimum": (np.array([*MINIMA, ""])[self.winner], None)} | losses

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
                texts = [
                    with_error(b.alpha[k], b.stderr()[k]) if b.found[k] else Status.name_of(b.status[k])
                    for b in boundaries
                ]
                rows.append((f"{value:.4g}", *texts))
            tables.append(("", rows))
        return Description(headline, self._outcome(), tables=tables)

    def _boundaries_if_any(self) -> list[Table]:
        return [self.alpha_c(), self.alpha_l()] if "alpha" in (self.x[0], self.y[0]) else []

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
        the student), `other_column` (the second one in q and V) and `teacher_column`. The attributes of `status`
        explain its integers as the CF conventions prescribe.
        """
        coordinates = {"branch": list(PAIR), self.y[0]: self.y[1], self.x[0]: self.x[1]}
        names = "region", "beats_linear", "trusted", "loss_difference", *self._minimum_columns()
        by_cell = {k: a for k, (a, _) in self.named.items() if k.removesuffix("_stderr") in names}
        labels = {k: getattr(self, k) for k in ("exists", "stable", "status")}
        labels |= {k: (self.names, values) for k, values in by_cell.items()} | {"solved": (self.names, self.solved)}
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
        shape = np.shape(self.positional.alpha)
        if shape != (*np.shape(self.y[1]), *np.shape(self.x[1])) or len(shape) != 2:
            raise InputError("diagram", f"must be one diagram, got a batch with states of shape {shape}")
        content = diagram_page(self).encode()
        try:
            write_whole(Path(path), content)
        except OSError as error:
            text = f"must be a file that can be written, got path={str(path)!r}: {error.strerror}"
            raise InputError("path", text) from error

    def plot(self, boundaries: Sequence[Table] = (), ax: Any = None, *, losses: bool = False) -> Any:
        """Plot the diagram, and further events on it; see `plotting.diagrams.diagram_figure`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure: one for each of the panels "region" (with `losses`
                "train_loss") and "gen_error", or a dict of some of them.
            losses: whether the left panel shows the difference of the training losses instead of the regions.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.diagrams import diagram_figure

        return diagram_figure(self, boundaries, ax=ax, losses=losses)
