"""Pictures of learning dynamics."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ..base.errors import require
from .style import COLOURS, ERROR, LABELS, OTHER, frame, line, panels

# Fill colours of the labels of a landscape: semantic minima are blue, positional ones red, several minima darker.
_LABEL_COLOURS = ["#cfe0f1", "#f3d0c7", "#a9c9e8", "#eab4a6", "#9fb9d6", "#dd9c8c", "#7f9fc6", "#cc7a66"]


def trajectory_figure(path: Any) -> Figure:
    """Plot the student's order parameters, and its risk and test error, against time.

    Overlaps are drawn as sizes of projections: the root of what the teacher, or the encodings, explain of tr R.

    Args:
        path: `dynamics.trajectory.Trajectory`.

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
    with panels(7.6, 3.4, [""] * 2, xlabel=xlabel, ylabels=ylabels) as (figure, axes):
        sizes, losses = axes[0]
        for label, (square, colour) in curves.items():
            line(sizes, t, np.sqrt(np.maximum(square, 0.0)), colour, label)
        line(losses, t, np.asarray(mean.risk), OTHER, "risk", bar=np.asarray(bars.risk), dash="--")
        line(losses, t, np.asarray(mean.gen_error), COLOURS["mixed"], ERROR, bar=np.asarray(bars.gen_error))
        for axis in axes[0]:
            frame(axis)
    return figure


def landscape_figure(landscapes: Any) -> Figure:
    """Draw the labels of the population risk over two numbers, and the lines along which they change.

    Args:
        landscapes: `dynamics.landscape.LandscapeMap`.
    """
    from ..dynamics.landscape import CHANGES, words_of

    x, y, label = landscapes.x, landscapes.y, np.asarray(landscapes.label)
    present = np.unique(label)
    styles = dict(zip(CHANGES, ("-", "--", ":"), strict=True))
    names = {"global": "global minimum changes", "steepest": "steepest descent changes", "several": "number of minima"}
    with panels(6.4, 4.6, xlabel=LABELS.get(landscapes.names[0], landscapes.names[0])) as (figure, axes):
        axis = axes[0, 0]
        axis.set_ylabel(LABELS.get(landscapes.names[1], landscapes.names[1]))
        colours = [_LABEL_COLOURS[value] for value in present]
        axis.pcolormesh(x, y, np.searchsorted(present, label), cmap=ListedColormap(colours), rasterized=True)
        for value, colour in zip(present, colours, strict=True):
            axis.fill([], [], color=colour, label=words_of(int(value)))
        for change, style in styles.items():
            for k, points in enumerate(landscapes.boundary(change)):
                axis.plot(*points.T, color="k", ls=style, lw=1.2, label=names[change] if k == 0 else None)
    return figure
