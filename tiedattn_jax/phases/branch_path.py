"""A branch that was followed through a parameter: the result of continuation in arclength."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Inexact

from ..base.arrays import StateArray
from ..base.report import Description, Printed, entries, picture
from ..base.results import error_bar
from ..model.overlaps import Overlaps
from ..theory.states import State


class BranchPath(Printed):
    """A branch as a curve in arclength, on one replicate of the averages.

    Attributes:
        parameter: name of the parameter.
        values: parameter at every point; not monotonic when there are folds.
        states: the `State` at every point, leaves (n, ...).
        eigenvalues: eigenvalues of DF, largest real part first; real numbers if all of them are real. Rotations of the
            student's columns change no state, so that their eigenvalues are zero here instead of one.
        labels: branch that every point belongs to.
        folds: values of the parameter at which the branch turns back; `mean_folds` adds their error bars.
        fold_states: the states at the folds, leaves (1, ...).
        pitchforks: values at which theta or m falls to zero and the branch turns into its mirror image.
        pitchfork_states: the states there.
        crossings: values at which an eigenvalue passes one away from a fold, so that another branch is born. One next
            to which Newton's method fails is interpolated linearly between the neighbouring points.
        ends: why the path ends, on either side.
    """

    parameter: str
    values: Float[np.ndarray, " n"]
    states: State
    eigenvalues: Inexact[np.ndarray, "n k"]
    labels: tuple[str, ...]
    folds: tuple[float, ...]
    fold_states: tuple[State, ...]
    pitchforks: tuple[float, ...]
    pitchfork_states: tuple[State, ...]
    crossings: tuple[float, ...]
    ends: tuple[str, str]

    @property
    def overlaps(self) -> Overlaps:
        """Order parameters along the path, leaves (n, ...)."""
        return self.states.overlaps

    def mean_folds(self, *others: BranchPath) -> list[tuple[float, float]]:
        """Return the folds of a branch, (mean, error bar) in the order along it, from the paths of all replicates.

        Paths with another number of folds than most, for instance shorter ones, are left out.
        """
        paths = self, *others
        counts = [len(p.folds) for p in paths]
        usual_count = max(set(counts), key=counts.count)
        folds = zip(*(p.folds for p in paths if len(p.folds) == usual_count), strict=True)
        return [(float(np.mean(v)), float(error_bar(jnp.array(v)))) for v in folds]

    @property
    def train_loss(self) -> Float[StateArray, " n"]:
        """Training loss / d along the path."""
        return self.states.train_loss

    def describe(self) -> Description:
        headline = f"{len(self.values)} points from {self.parameter} = {self.values[0]:g} to {self.values[-1]:g}"
        numbers = [(name, entries(getattr(self, name))) for name in ("folds", "pitchforks", "crossings")]
        details = [("branches", ", ".join(dict.fromkeys(self.labels))), ("ends", ", ".join(self.ends))]
        return Description(headline, "", numbers, details)

    plot = picture(
        "theory.path_figure",
        "order parameters and training loss along the path",
        "order",
        "train_loss",
        many=lambda path: [path],
    )
