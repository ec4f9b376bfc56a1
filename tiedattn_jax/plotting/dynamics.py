"""Pictures of learning dynamics."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap

from ..base.errors import require
from .style import COLOURS, ERROR, LABELS, OTHER, Target, frame, line, panels

# Fill colours of the labels of a landscape: semantic minima are blue, positional ones red, several minima darker.
_LABEL_COLOURS = ["#cfe0f1", "#f3d0c7", "#a9c9e8", "#eab4a6", "#9fb9d6", "#dd9c8c", "#7f9fc6", "#cc7a66"]


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


def emergence_figure(path: Any, ax: Target = None) -> Any:
    """Draw the variances of the overlaps of a student without overlaps against time, and their growth rates.

    Args:
        path: `dynamics.emergence.Emergence`.
        ax: axes for the panels "square" and "growth", see `style.panels`.

    Raises:
        InputError: it is a batch.
    """
    require(np.ndim(path.t) == 1, "t", path.t, "those of one run, not of a batch")
    mean, bars, t = path.mean, path.stderr, np.asarray(path.t)
    ylabels = "$d$ times the mean square of the overlap", "growth rate of the overlap"
    options = {"xlabel": "time $t$ = steps / $d$", "ylabels": ylabels, "names": ("square", "growth"), "ax": ax}
    with panels(7.6, 3.4, [""] * 2, **options) as (drawing, axes):
        for name, branch in (("teacher", "semantic"), ("encodings", "positional")):
            for axis, number in zip(axes[0], (name, f"growth_{name}"), strict=True):
                value, bar = (np.asarray(getattr(s, number)) for s in (mean, bars))
                line(axis, t, value, COLOURS[branch], f"along the {name}", bar=bar)
        axes[0][0].set_yscale("log")
        for axis in axes[0]:
            frame(axis)
    return drawing


def landscape_figure(landscapes: Any, ax: Target = None) -> Any:
    """Draw the labels of the population risk over two numbers, and the lines along which they change.

    Args:
        landscapes: `dynamics.landscape.LandscapeMap`.
        ax: axes for the one panel "label", see `style.panels`.
    """
    x, y, label = landscapes.x, landscapes.y, np.asarray(landscapes.label)
    present = np.unique(label)
    lines = {
        "global": ("-", "global minimum changes"),
        "steepest": ("--", "steepest descent changes"),
        "several": (":", "number of minima changes"),
    }
    xlabel, ylabel = (LABELS.get(name, name) for name in landscapes.names)
    with panels(6.4, 4.6, xlabel=xlabel, ylabels=[ylabel], names=["label"], ax=ax) as (drawing, axes):
        axis = axes[0, 0]
        colours = [_LABEL_COLOURS[value] for value in present]
        axis.pcolormesh(x, y, np.searchsorted(present, label), cmap=ListedColormap(colours), rasterized=True)
        for value, colour in zip(present, colours, strict=True):
            axis.fill([], [], color=colour, label=landscapes.words_of(int(value)))
        for change, (style, name) in lines.items():
            for k, points in enumerate(landscapes.boundary(change)):
                axis.plot(*points.T, color="k", ls=style, lw=1.2, label=name if k == 0 else None, gid=change)
    return drawing
