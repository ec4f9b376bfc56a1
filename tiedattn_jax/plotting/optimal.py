"""Pictures of the Bayes-optimal learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from ..base.errors import require
from ..base.types import AnyArray
from .style import COLOURS, ERROR, LABELS, MARKS, OTHER, SYMBOLS, Target, frame, line, panels, scale


def optimal_figure(
    points: Any,
    recoveries: Sequence[Any] = (),
    spectral: Float[AnyArray, " alphas"] | None = None,
    ax: Target = None,
) -> Any:
    """Plot overlap and test error of the optimal learner against alpha.

    In a hard phase the state that message passing reaches from a random start is drawn as well.

    Args:
        points: `bayes.fixed_points.BayesPoint` under `vmap` along alpha.
        recoveries: thresholds to mark, `bayes.recovery.Recovery`.
        spectral: cosines of the spectral start with the teacher at the same alphas, to draw their squares.
        ax: axes for the panels "overlap" and "gen_error", see `style.panels`.

    Raises:
        InputError: there is one alpha only.
    """
    require(
        np.ndim(points.alpha) == 1, "alpha", points.alpha, "an axis: call jax.vmap(lambda a: bayes(model, a))(alphas)"
    )
    ylabels, names = ("overlap $q / \\rho$", ERROR), ("overlap", "gen_error")
    options = {"xlabel": LABELS["alpha"], "ylabels": ylabels, "names": names, "ax": ax}
    with panels(7.6, 3.6, [""] * 2, **options) as (drawing, axes):
        overlap, error = axes[0]
        line(overlap, points.alpha, _relative_overlap(points.replicates), COLOURS["optimal"], "optimal learner")
        if np.any(points.hard):
            other = np.where(points.hard, _relative_overlap(points.other), np.nan)
            line(overlap, points.alpha, other, OTHER, "hard phase: state from the other start", dash="--")
        if spectral is not None:
            line(overlap, points.alpha, np.square(spectral), COLOURS["spectral"], "spectral start")
        optimal_error(error, points)
        for axis in axes[0]:
            scale(axis, points.alpha)
            mark_recoveries(axis, recoveries)
            frame(axis)
    return drawing


def _relative_overlap(state: Any) -> Float[np.ndarray, " alphas"]:
    """Return q / rho, a mean over replicates, tokens and columns."""
    q, rho = (np.trace(np.mean(a, 1), axis1=-2, axis2=-1).mean(-1) for a in (state.q, state.q + state.V))
    return np.asarray(q / rho)


def optimal_error(axis: Axes, points: Any) -> None:
    """Draw the test error of the optimal learner, with its error bar; alphas of `points` may be in any order."""
    order = np.argsort(points.alpha)
    alpha, error, bar = (np.asarray(a)[order] for a in (points.alpha, points.gen_error, points.stderr.gen_error))
    line(axis, alpha, error, COLOURS["optimal"], "optimal learner", bar=bar)


def mark_recoveries(axis: Axes, recoveries: Sequence[Any]) -> None:
    """Mark thresholds of the optimal learner by vertical lines."""
    for recovery in recoveries:
        axis.axvline(
            float(recovery.alpha),
            label=SYMBOLS[recovery.event],
            gid=recovery.event,
            **{**MARKS[recovery.event], "lw": 0.9},
        )
