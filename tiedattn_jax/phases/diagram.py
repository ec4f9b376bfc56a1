"""Phase diagrams as results: regions, boundaries and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int, Real, Shaped
from scipy.interpolate import CubicHermiteSpline, CubicSpline, PPoly

from ..base.errors import InputError, require_choice
from ..base.files import Tabular
from ..base.report import Average, Description, Result, Status, error_bar, has_state, quorum, with_error
from ..model.overlaps import PAIR
from .boundaries import Boundary
from .events import ALPHA_L, baseline_branch
from .labelled import ORDER_AXES, columns, dataset

_Scale: TypeAlias = Callable[[Any], Any]  # of numbers or arrays

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


class PhaseDiagram(Result, Tabular):
    """The positional and the semantic branch on a grid of settings.

    Attributes:
        x, y: names and values of the two parameters.
        cells: the `State.numbers` of every cell by name, arrays (branch, y, x, replicate, ...), the branches in the
            order of `PAIR`. Where a branch is absent, these are numbers of the uninformed state, in which its search
            ended.
        attrs: all settings: the model and its numbers, alpha, nodes, tolerances, version, and their fingerprint.
    """

    x: tuple[str, Float[np.ndarray, " X"]]
    y: tuple[str, Float[np.ndarray, " Y"]]
    cells: dict[str, Real[np.ndarray, "branch Y X R *shape"]]
    attrs: dict[str, Any]

    def _masked(self, name: str) -> Real[np.ndarray, "branch Y X R *shape"]:
        """Return a number of the cells, NaN in the replicates that have no state."""
        require_choice(name, "name", self.cells)
        values = self.cells[name]
        if name in ("status", "residual", "gen_error_linear"):
            return values
        return np.where(self._has_state.reshape(*self._has_state.shape, *[1] * (values.ndim - 4)), values, np.nan)

    def mean(self, name: str) -> Float[np.ndarray, "branch Y X *shape"]:
        """Return the mean of a number of the cells over the replicates that have a state.

        Raises:
            InputError: there is no number of this name.
        """
        return _mean_without_nan(self._masked(name), 3)

    def stderr(self, name: str) -> Float[np.ndarray, "branch Y X *shape"]:
        """Return the error bar of the mean; raises as `mean`."""
        return _error_bar(self._masked(name), 3)

    @property
    def _has_state(self) -> Bool[np.ndarray, "branch Y X R"]:
        """Whether a replicate has a state."""
        return np.asarray(has_state(self.cells["status"], self.cells["residual"]))

    @property
    def exists(self) -> Bool[np.ndarray, "branch Y X"]:
        """Whether a branch has a state in a cell, whether or not the nodes resolve it."""
        return np.asarray(quorum(self._has_state))

    @property
    def absent(self) -> Bool[np.ndarray, "branch Y X"]:
        """Whether the search established that a cell lacks a branch."""
        return np.asarray(~quorum(~(self._has_state | (self.cells["status"] == Status.absent)))) & ~self.exists

    @property
    def solved(self) -> Bool[np.ndarray, "Y X"]:
        """Whether each branch of a cell is known to exist or to be absent."""
        return np.all(self.exists | self.absent, 0)

    @property
    def status(self) -> Int[np.ndarray, "branch Y X"]:
        """`Status` of every cell: the worst of the replicates that agree with the majority."""
        status = self.cells["status"]
        worst = np.where(status == Status.absent, -1, status).max(-1)
        return np.where(self.absent, int(Status.absent), worst).astype(int)

    @property
    def stable(self) -> Bool[np.ndarray, "branch Y X"]:
        """Whether a branch exists and the other branch's order parameter does not grow on it."""
        growth = np.stack([self.mean("growth_theta")[0], self.mean("growth_m")[1]])
        return self.exists & (growth < 1)

    @property
    def loss_difference(self) -> tuple[Float[np.ndarray, "Y X"], Float[np.ndarray, "Y X"]]:
        """Training loss, positional minus semantic, and its error bar; NaN where a branch is missing."""
        both_exist = np.all(self.exists, 0)[..., None]
        return _summary(np.where(both_exist, np.subtract(*self._masked("train_loss")), np.nan))

    @property
    def uninformed(self) -> Bool[np.ndarray, "Y X"]:
        """Whether a cell lacks both branches, so that its global minimum is the uninformed state, theta = m = 0.

        The search for an absent branch ends in the uninformed state, or in the limit of a student that vanishes. The
        searches for both branches must have ended at the same training loss.
        """
        first, second = np.where(self._ended_uninformed, self.cells["train_loss"], np.nan)
        agree = np.abs(first - second) <= _AGREEMENT * np.abs(first)
        return np.all(self.absent, 0) & np.asarray(quorum(agree))

    @property
    def _ended_uninformed(self) -> Bool[np.ndarray, "branch Y X R"]:
        """Whether the search for a branch ended in the uninformed state."""
        return self.cells["status"] == Status.absent

    def _of_minimum(self, name: str) -> Real[np.ndarray, "Y X R *shape"]:
        """Return a number of the global minimum in every replicate; NaN where there is none."""
        values = self._masked(name)

        def extended(a: Bool[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
            return a.reshape(*a.shape, *[1] * (values.ndim - 1 - a.ndim))

        uninformed = np.where(extended(np.all(self._ended_uninformed, 0)), self.cells[name].mean(0), np.nan)
        return np.select([extended(self.winner == k) for k in range(len(MINIMA))], [*values, uninformed], np.nan)

    def global_minimum(self, name: str) -> Average:
        """Return a number of the global minimum of the training loss, (y, x, ...); NaN where none is known.

        The global minimum is the branch with the lower training loss, or the uninformed state in cells that lack both.

        Raises:
            InputError: there is no number of this name.
        """
        values = self._of_minimum(name)
        return Average(_mean_without_nan(values, 2), _error_bar(values, 2))

    @property
    def gen_difference(self) -> tuple[Float[np.ndarray, "Y X"], Float[np.ndarray, "Y X"]]:
        """Test error of the global minimum minus that of the linear baseline, and its error bar."""
        return _summary(self._of_minimum("gen_error") - self._of_minimum("gen_error_linear"))

    @property
    def winner(self) -> Int[np.ndarray, "Y X"]:
        """State with the lowest training loss, an index into `MINIMA`: 0 positional, 1 semantic, 2 uninformed, -1 none.

        The uninformed state counts in cells that lack both branches; see `uninformed`.
        """
        loss = np.where(self.exists, self.mean("train_loss"), np.inf)
        return np.where(np.isfinite(loss).any(0), loss.argmin(0), np.where(self.uninformed, 2, -1))

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
    def beats_linear(self) -> Bool[np.ndarray, "Y X"]:
        """Whether the global minimum generalises better than the linear baseline."""
        return self.gen_difference[0] < 0

    @property
    def settled(self) -> Bool[np.ndarray, "Y X"]:
        """Whether most replicates of each branch are solved to the accuracy of the nodes, or show that it is absent.

        Other cells may count as states if their residual is small; their status says how the search ended.
        """
        status = self.cells["status"]
        resolved = ~quorum(status > Status.stalled) | ~quorum(status != Status.absent)
        return self.solved & np.all(resolved, 0)

    @property
    def trusted(self) -> Bool[np.ndarray, "Y X"]:
        """Whether a cell can be relied on.

        Three conditions hold: the cell is `settled`, the losses of the branches
        differ by more than two error bars, and the replicon of the global minimum is below one.
        """
        difference, bar = self.loss_difference
        replicon = self.global_minimum("replicon").value
        decided = ~np.all(self.exists, 0) | ~np.isfinite(bar) | (np.abs(difference) > 2 * bar)
        return self.settled & decided & ~(replicon >= 1)

    # Boundaries

    def alpha_c(self) -> Boundary:
        """Return where the losses of the branches cross, by cubic Hermite interpolation with exact slopes.

        Raises:
            InputError: alpha is not an axis.
        """
        return self._boundaries[0]

    def alpha_l(self) -> Boundary:
        """Return where the global minimum starts to beat the linear baseline; raises as `alpha_c`.

        The crossing lies on the positional branch below alpha_c, at alpha_c itself, or on the semantic branch above it.
        It is the root of cubic splines in 1 / alpha through the test errors of each branch. The error bars include the
        difference to splines in alpha, which estimates the error of interpolating between too few cells.
        """
        return self._boundaries[1]

    @cached_property
    def _boundaries(self) -> tuple[Boundary, Boundary]:
        names = self.x[0], self.y[0]
        if "alpha" not in names:
            raise InputError("alpha", f"must be one of the axes for curves in alpha, got axes={names}")
        (_, alpha), other_axis = (self.x, self.y) if names[0] == "alpha" else (self.y, self.x)
        gain = self._masked("gen_error_linear") - self._masked("gen_error")
        numbers = self._masked("train_loss"), self._masked("train_loss_by_alpha"), gain
        masked = (np.where(self.exists[..., None], a, np.nan) for a in numbers)
        loss, slope, gain = (a if names[0] == "alpha" else np.swapaxes(a, 1, 2) for a in masked)
        difference, rate = np.subtract(*loss), np.subtract(*slope)
        critical, linear, linear_check = np.full((3, len(other_axis[1]), loss.shape[-1]), np.nan)
        for i, j in np.ndindex(critical.shape):
            critical[i, j] = _rise(_spline(alpha, difference[i, :, j], rate[i, :, j]))
        critical_boundary = Boundary.of("alpha_c", *other_axis, *_summary(critical))

        def beats(i: int, j: int, scale: _Scale, inverse: _Scale) -> float:
            splines, exchange = [_spline(scale(alpha), branch[i, :, j]) for branch in gain], critical_boundary.alpha[i]
            early, late = (spline is not None and spline(scale(exchange)) >= 0 for spline in splines)
            before, after = (inverse(_rise(spline)) for spline in splines)
            return (before, exchange, after)[int(baseline_branch(early, late))]

        for i, j in np.ndindex(linear.shape):
            linear[i, j] = beats(i, j, lambda a: -1 / a, lambda u: -1 / u)
            linear_check[i, j] = beats(i, j, lambda a: a, lambda u: u)
        alpha_l, bar = _summary(linear)
        bar = np.hypot(bar, np.nan_to_num(np.abs(_summary(linear_check)[0] - alpha_l)))
        return critical_boundary, Boundary.of(ALPHA_L, *other_axis, alpha_l, bar)

    # Files

    def table(self) -> list[dict[str, Any]]:
        """Return one row per cell: settings, region, and numbers of the global minimum and of both branches."""
        difference, bar = self.loss_difference
        names = [k for k in self.cells if k not in ("status", *ORDER_AXES)]
        means, bars = ({k: get(k) for k in names} for get in (self.mean, self.stderr))
        order_parameters = {k: self.mean(k) for k in ORDER_AXES}
        region, beats, trusted, status = self.region, self.beats_linear, self.trusted, self.status
        minimum = self._minimum_columns()
        rows = []
        for j, i in np.ndindex(difference.shape):
            row: dict[str, Any] = {self.x[0]: self.x[1][i], self.y[0]: self.y[1][j]}
            row |= {"region": REGIONS[region[j, i]], "beats_linear": bool(beats[j, i]), "trusted": bool(trusted[j, i])}
            row |= {"loss_difference": difference[j, i], "loss_difference_stderr": bar[j, i]}
            row |= {name: values[j, i] for name, values in minimum.items()}
            for b, branch in enumerate(PAIR):
                row[f"{branch}_status"] = Status.name_of(status[b, j, i])
                for k, a in order_parameters.items():
                    row |= columns(f"{branch}_{k}", a[b, j, i])
                for k in names:
                    row |= {f"{branch}_{k}": means[k][b, j, i], f"{branch}_{k}_stderr": bars[k][b, j, i]}
            rows.append(row)
        return rows

    def _minimum_columns(self) -> dict[str, Shaped[np.ndarray, "Y X"]]:
        """Return the name of the global minimum in every cell, empty if there is none, and its losses."""
        columns = {"global_minimum": np.array([*MINIMA, ""])[self.winner]}
        for name in ("train_loss", "gen_error"):
            number = self.global_minimum(name)
            columns |= {f"global_minimum_{name}": number.value, f"global_minimum_{name}_stderr": number.stderr}
        return columns

    def to_dict(self) -> dict[str, Any]:
        """Return settings, axes, cells per region, and, if alpha is an axis, alpha_c and alpha_l.

        `untrusted` and `unsettled` are numbers of cells, see `trusted` and `settled`.
        """
        fields: dict[str, Any] = {**self.attrs, **{name: values.tolist() for name, values in (self.x, self.y)}}
        for boundary in self._boundaries_if_any():
            fields |= {boundary.event: boundary.alpha.tolist(), f"{boundary.event}_stderr": boundary.stderr.tolist()}
        counts = {"untrusted": int(np.sum(~self.trusted)), "unsettled": int(np.sum(~self.settled))}
        return {**fields, "regions": self._shares(), **counts, "status": self._outcome()}

    def describe(self) -> Description:
        headline = f"{self.x[0]} x {self.y[0]}: {len(self.x[1])} x {len(self.y[1])} cells"
        counts = {**self._shares(), "not trusted, in any region": int(np.sum(~self.trusted))}
        tables: list[tuple[str, list]] = [("", [(f"{count:6d}", name) for name, count in counts.items()])]
        if boundaries := self._boundaries_if_any():
            rows = [(boundaries[0].parameter, *(b.event for b in boundaries))]
            for k, value in enumerate(boundaries[0].values):
                rows.append((f"{value:.4g}", *(with_error(b.alpha[k], b.stderr[k]) for b in boundaries)))
            tables.append(("", rows))
        return Description(headline, self._outcome(), tables=tables)

    def _boundaries_if_any(self) -> list[Boundary]:
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
        cell, (difference, bar) = (self.y[0], self.x[0]), self.loss_difference
        by_cell = {
            "loss_difference": difference,
            "loss_difference_stderr": bar,
            "region": np.array(REGIONS)[self.region],
            **self._minimum_columns(),
        }
        by_cell |= {k: getattr(self, k) for k in ("beats_linear", "solved", "trusted")}
        labels = {k: getattr(self, k) for k in ("exists", "stable", "status")}
        labels |= {k: (cell, values) for k, values in by_cell.items()}
        return dataset(coordinates, self.cells, self.mean, self.stderr, labels, self.attrs)

    def plot(self, boundaries: Sequence[Boundary] = (), ax: Any = None) -> Any:
        """Plot the diagram, and further boundaries on it; see `plotting.diagrams.diagram_figure`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure: one for each of the panels "train_loss" and
                "gen_error", or a dict of some of them.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.diagrams import diagram_figure

        return diagram_figure(self, boundaries, ax=ax)


def _spline(
    alpha: Float[np.ndarray, " A"], values: Float[np.ndarray, " A"], slopes: Float[np.ndarray, " A"] | None = None
) -> PPoly | None:
    """Interpolate the finite values of a function by cubics, with its slopes if given; None if there are too few."""
    finite = np.isfinite(values)
    if finite.sum() < (4 if slopes is None else 2):
        return None
    if slopes is None:
        return CubicSpline(alpha[finite], values[finite])
    return CubicHermiteSpline(alpha[finite], values[finite], slopes[finite])


def _rise(spline: PPoly | None) -> float:
    """Return the last root at which a function rises, NaN if there is none."""
    if spline is None:
        return np.nan
    roots = spline.roots(extrapolate=False)
    rising = roots[spline(roots, 1) > 0]
    return rising[-1] if len(rising) else np.nan


def _mean_without_nan(values: Real[np.ndarray, "..."], axis: int) -> Float[np.ndarray, "..."]:
    """Return the mean over an axis, ignoring NaN; NaN where all values are."""
    return np.ma.masked_invalid(values).mean(axis).filled(np.nan)


def _summary(values: Float[np.ndarray, "*shape R"]) -> tuple[Float[np.ndarray, "*shape"], Float[np.ndarray, "*shape"]]:
    """Return the mean over the last axis (replicates) and its error bar."""
    return _mean_without_nan(values, -1), _error_bar(values, -1)


def _error_bar(values: Real[np.ndarray, "..."], axis: int) -> Float[np.ndarray, "..."]:
    """Return the error bar of the mean over an axis, in the dtype of the values.

    Without `jax_enable_x64` jax computes in float32. Deviations from the mean keep their digits there.
    """
    deviations = values - np.expand_dims(_mean_without_nan(values, axis), axis)
    return np.asarray(error_bar(np.moveaxis(deviations, axis, 0)), deviations.dtype)
