"""A pair: the positional and the semantic branch at one setting, or at all settings of a grid, as one batch.

The numbers of a pair decide the region, the global minimum, and whether it beats the linear baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from ..base.arrays import AnyArray, spread_to
from ..base.report import Description
from ..base.results import Column, Result, Status, quorum
from ..model.overlaps import PAIR
from ..theory.states import FixedPoint, State, states_table
from .boundaries import summary
from .follow import is_absent

REGIONS = (
    "unsolved",
    "neither",
    "unique positional",
    "unique semantic",
    "bistable, positional global",
    "bistable, semantic global",
    "uninformed",
)
MINIMA = (*PAIR, "uninformed")  # names of the states that `Pair.winner` counts
# Relative difference of the losses above which the searches for two absent branches did not end in the same state.
_AGREEMENT = 1e-3


class Pair(Result):
    """The positional and the semantic branch at one setting, or at a batch of settings.

    Attributes:
        positional, semantic: states of the branches, batches (*shape). Where a branch is absent, these are numbers of
            the uninformed state, in which its search ended.
    """

    batch_probe = "solved", 0
    positional: FixedPoint
    semantic: FixedPoint

    def _both(self, read: Callable[[FixedPoint], Any]) -> Shaped[np.ndarray, "branch ..."]:
        """Return what `read` returns for the branches in the order of `PAIR`."""
        return np.stack([np.asarray(read(branch)) for branch in (self.positional, self.semantic)])

    @cached_property
    def _has_state(self) -> Bool[np.ndarray, "branch *shape R"]:
        """Whether a replicate has a state."""
        return self._both(lambda branch: branch.replicates.has_state)

    @cached_property
    def _statuses(self) -> Int[np.ndarray, "branch *shape R"]:
        """`Status` of every replicate."""
        return self._both(lambda branch: branch.replicates.status)

    def where_a_state(self, read: Callable[[State], Any]) -> Float[np.ndarray, "branch *shape R"]:
        """Return a number of all replicates; NaN in those that have no state, and in cells without the branch."""
        known = self._has_state & self.exists[..., None]
        return np.where(known, self._both(lambda branch: read(branch.replicates)), np.nan)

    @cached_property
    def exists(self) -> Bool[np.ndarray, "branch *shape"]:
        """Whether a branch has a state, whether or not the nodes resolve it."""
        return np.asarray(quorum(self._has_state))

    @property
    def absent(self) -> Bool[np.ndarray, "branch *shape"]:
        """Whether the search established that a branch is absent."""
        return self._both(lambda branch: is_absent(branch.replicates))

    @property
    def solved(self) -> Bool[Any, "*shape"]:
        """Whether each branch is known to exist or to be absent."""
        return np.all(self.exists | self.absent, 0)

    has_result = solved  # what a table calls `found`

    @property
    def alpha(self) -> Float[Any, "*shape"]:
        """Samples per dimension, n / d."""
        return self.positional.alpha

    @property
    def stderr(self) -> SimpleNamespace:
        """Error bars of the states of the branches, as `FixedPoint.stderr`."""
        return SimpleNamespace(positional=self.positional.stderr, semantic=self.semantic.stderr)

    @property
    def branch_status(self) -> Int[np.ndarray, "branch *shape"]:
        """`Status` of each branch: the worst of the replicates that agree with the majority."""
        worst = np.where(self._statuses == Status.absent, -1, self._statuses).max(-1)
        return np.where(self.absent, int(Status.absent), worst).astype(int)

    @property
    def status(self) -> Int[Any, "*shape"]:
        """The worst `Status` of both branches; that a branch is absent is an answer."""
        status = self.branch_status
        return np.where(status == Status.absent, int(Status.converged), status).max(0)

    @property
    def reason(self) -> Shaped[Any, "*shape"]:
        """Which branches are not solved, and how their searches ended; empty if both are solved."""
        texts = [[f"the {branch} branch is not solved: {Status.name_of(s)}" for s in Status] for branch in PAIR]
        first, second = (np.array(text)[status] for text, status in zip(texts, self.branch_status, strict=True))
        unsolved = ~(self.exists | self.absent)
        both = np.strings.add(np.strings.add(first, "; "), second)
        return np.select([unsolved.all(0), *unsolved], [both, first, second], "")

    @cached_property
    def stable(self) -> Bool[np.ndarray, "branch *shape"]:
        """Whether a branch exists and the other branch's order parameter does not grow on it."""
        return self._both(lambda branch: branch.stable)

    @property
    def loss_difference(self) -> tuple[Float[Any, "*shape"], Float[Any, "*shape"]]:
        """Training loss, positional minus semantic, and its error bar; NaN where a branch is missing."""
        return summary(np.subtract(*self.where_a_state(lambda state: state.train_loss)))

    @property
    def uninformed(self) -> Bool[Any, "*shape"]:
        """Whether a cell lacks both branches, so that its global minimum is the uninformed state, theta = m = 0.

        The search for an absent branch ends in the uninformed state, or in the limit of a student that vanishes. The
        searches for both branches must have ended at the same training loss.
        """
        losses = self._both(lambda branch: branch.replicates.train_loss)
        first, second = np.where(self._statuses == Status.absent, losses, np.nan)
        agree = np.abs(first - second) <= _AGREEMENT * np.abs(first)
        return np.all(self.absent, 0) & np.asarray(quorum(agree))

    @cached_property
    def winner(self) -> Int[Any, "*shape"]:
        """State with the lowest training loss, an index into `MINIMA`: 0 positional, 1 semantic, 2 uninformed, -1 none.

        The uninformed state counts in cells that lack both branches; see `uninformed`. It is not known in a cell where
        the search for a branch failed.
        """
        loss = np.where(self.exists, summary(self.where_a_state(lambda state: state.train_loss))[0], np.inf)
        known = self.solved & np.isfinite(loss).any(0)
        return np.where(known, loss.argmin(0), np.where(self.uninformed, 2, -1))

    @cached_property
    def global_minimum(self) -> FixedPoint:
        """The state of the global minimum of the training loss in all cells, a batch (*shape).

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
    def gen_difference(self) -> tuple[Float[Any, "*shape"], Float[Any, "*shape"]]:
        """Test error of the global minimum minus that of the linear baseline, and its error bar."""
        states = self.global_minimum.replicates
        return summary(np.where(states.has_state, states.gen_error - states.gen_error_linear, np.nan))

    @property
    def region(self) -> Int[Any, "*shape"]:
        """Index into `REGIONS`: which branches are stable, and which of them is the global minimum.

        Cells that lack both branches are "uninformed". Others are "neither" if no branch is stable there.
        """
        positional, semantic = self.stable
        bistable = np.where(self.winner == 0, 4, 5)
        uninformed = self.winner == MINIMA.index("uninformed")
        code = np.select([positional & semantic, positional, semantic, uninformed], [bistable, 2, 3, 6], 1)
        return np.where(self.solved, code, 0)

    @property
    def region_names(self) -> Shaped[Any, "*shape"]:
        """The `region` of every cell in words."""
        return np.array(REGIONS)[self.region]

    @property
    def beats_linear(self) -> Bool[Any, "*shape"]:
        """Whether the global minimum generalises better than the linear baseline."""
        return self.gen_difference[0] < 0

    @property
    def settled(self) -> Bool[Any, "*shape"]:
        """Whether most replicates of each branch are solved to the accuracy of the nodes, or show that it is absent.

        Other cells may count as states if their residual is small; their status says how the search ended.
        """
        resolved = ~quorum(self._statuses > Status.stalled) | ~quorum(self._statuses != Status.absent)
        return self.solved & np.all(resolved, 0)

    @property
    def trusted(self) -> Bool[Any, "*shape"]:
        """Whether a cell can be relied on.

        Three conditions hold: the cell is `settled`, the losses of the branches differ by more than two error bars, and
        the replicon of the global minimum is below one.
        """
        difference, bar = self.loss_difference
        replicon = np.asarray(self.global_minimum.diagnostics.replicon)
        decided = ~np.all(self.exists, 0) | ~np.isfinite(bar) | (np.abs(difference) > 2 * bar)
        return self.settled & decided & ~(replicon >= 1)

    def numbers(self) -> dict[str, Column]:
        """Region, and numbers of the global minimum and of both branches, with their error bars, (*shape, ...)."""
        losses = self.global_minimum.numbers()
        columns: dict[str, Column] = {
            "region": (self.region_names, None),
            "beats_linear": (self.beats_linear, None),
            "trusted": (self.trusted, None),
            "loss_difference": self.loss_difference,
            "global_minimum": (np.array([*MINIMA, ""])[self.winner], None),
            **{f"global_minimum_{name}": losses[name] for name in ("train_loss", "gen_error")},
        }
        for branch, point, status in zip(PAIR, (self.positional, self.semantic), self.branch_status, strict=True):
            columns[f"{branch}_status"] = np.vectorize(Status.name_of)(status), None
            columns |= {f"{branch}_{name}": column for name, column in point.numbers().items()}
        return columns

    def describe(self) -> Description:
        what = f"{self.region_names} at alpha = {self.alpha:g}"
        rows = states_table([self.positional, self.semantic], "branch")
        return Description(what, self.status_name, tables=[("", rows)])
