"""Pictures of learning dynamics."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.errors import require
from .style import COLOURS, ERROR, OTHER, Target, frame, line, panels


def trajectory_figure(path: Any, ax: Target = None) -> Any:
    """Plot the student's order parameters, and its risk and test error, against time.

    Overlaps are drawn as sizes of projections: the root of what the teacher, or the encodings, explain of tr R.

    Args:
        path: `dynamics.trajectory.Trajectory`.
        ax: axes for the panels "order" and "loss", see `style.panels`.

    Raises:
        InputError: it is a batch of trajectories.
    """
    require(np.ndim(path.t) == 1, "t", path.t, "one trajectory, not a batch of them")
    mean, bars, t = path.mean, path.stderr, np.asarray(path.t)
    curves = {
        "size $\\sqrt{\\mathrm{tr}\\,R}$": (np.trace(mean.R, axis1=-2, axis2=-1), OTHER),
        "along the teacher": (mean.along_teacher, COLOURS["semantic"]),
        "along the encodings": (mean.along_encodings, COLOURS["positional"]),
    }
    xlabel, ylabels = "time $t$ = steps / $d$", ("size of the student", "loss")
    options = {"xlabel": xlabel, "ylabels": ylabels, "names": ("order", "loss"), "ax": ax}
    with panels(7.6, 3.4, [""] * 2, **options) as (drawing, axes):
        sizes, losses = axes[0]
        for label, (square, colour) in curves.items():
            line(sizes, t, np.sqrt(np.maximum(square, 0.0)), colour, label)
        line(losses, t, np.asarray(mean.risk), OTHER, "risk", bar=np.asarray(bars.risk), dash="--")
        line(losses, t, np.asarray(mean.gen_error), COLOURS["mixed"], ERROR, bar=np.asarray(bars.gen_error))
        for axis in axes[0]:
            frame(axis)
    return drawing
