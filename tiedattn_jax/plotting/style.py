"""Colours, labels and panels that all pictures share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from jaxtyping import Bool, Real, Shaped
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.ndimage import binary_dilation

from ..base.types import AnyArray
from ..model.overlaps import BRANCHES, PAIR

Dash: TypeAlias = str | tuple[int, tuple[int, ...]]  # a line style of matplotlib

# Colours that can be told apart with any colour vision (Okabe and Ito). A branch has the same colour in every picture.
COLOURS = {
    "positional": "#D55E00",
    "semantic": "#0072B2",
    "mixed": "#CC79A7",
    "uninformed": "0.55",
    "baseline": "#009E73",
    "optimal": "#E69F00",
    "spectral": "#56B4E9",
}

# Line styles of branches that are no minimum anywhere; other branches are solid. Unstable stretches of any branch are
# dotted.
DASHES: dict[str | None, Dash] = {"mixed": (0, (6, 2)), "uninformed": (0, (4, 2, 1, 2))}

OTHER = "0.35"  # colour of everything that has no colour of its own

ORDER_COLOURS = {str(BRANCHES[name].order): COLOURS[name] for name in PAIR}

SYMBOLS = {
    "alpha": r"$\alpha$",
    "omega": r"$\omega$",
    "sigma": r"$\sigma$",
    "lam": r"$\lambda$",
    "q": r"$q$",
    "V": r"$V$",
    "theta": r"$\theta$",
    "m": r"$m$",
    "alpha_c": r"$\alpha_c$",
    "alpha_l": r"$\alpha_l$",
    "weak_recovery": "weak recovery",
    "perfect_recovery": "perfect recovery",
}

# Labels of axes: words and symbol.
LABELS = {
    "alpha": r"sample complexity $\alpha = n/d$",
    "omega": r"positional share of the target $\omega$",
    "sigma": r"standard deviation of the tokens $\sigma$",
    "lam": r"ridge strength $\lambda$",
    "q": r"size of the student $q$",
    "V": r"response $V$",
    "theta": r"overlap with the teacher $\theta$",
    "m": r"overlap with the encodings $m$",
    "train_loss": r"training loss $\mathcal{R} / d$",
    "gen_error": r"test error $\epsilon_g$",
}

ORDERS, LOSS, ERROR = r"order parameters $m$, $\theta$", LABELS["train_loss"], LABELS["gen_error"]

MARKS: dict[str, dict[str, Any]] = {
    "alpha_c": {"color": "k", "ls": "-", "lw": 1.3},
    "alpha_l": {"color": "k", "ls": (0, (5, 2)), "lw": 1.3},
    "weak_recovery": {"color": COLOURS["optimal"], "ls": (0, (1, 1)), "lw": 1.3},
    "perfect_recovery": {"color": COLOURS["optimal"], "ls": (0, (5, 2)), "lw": 1.3},
}

BASELINE: dict[str, Any] = {"color": COLOURS["baseline"], "lw": 1.2, "ls": "-.", "label": "linear baseline"}

_UNSTABLE: dict[str, Any] = {"lw": 1.2, "ls": ":"}

LEGEND: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 8}

ROOM = 0.05  # margin between the data and the frame, relative


Panels: TypeAlias = Shaped[np.ndarray, "rows columns"]  # an array of `Axes`


@contextlib.contextmanager
def panels(
    width: float,
    height: float,
    titles: Sequence[str] = ("",),
    *,
    rows: int = 1,
    xlabel: str = "",
    ylabels: Sequence[str] = (),
    legends: bool = True,
    **options: Any,
) -> Iterator[tuple[Figure, Panels]]:
    """Yield a figure in the library's style and its axes.

    Every column has a title, and its lowest panel has the x label. One legend below the panels explains all of them and
    covers nothing.

    Args:
        width, height: size in inches.
        ylabels: y labels of the first panels, row by row.
        legends: whether to draw the legend.
        options: further arguments of `Figure.subplots`.
    """
    style: Any = {  # matplotlib's own type of settings lists every name
        "font.size": 9,
        "axes.titlesize": "medium",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.6,
        "pdf.fonttype": 42,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, len(titles), squeeze=False, **options)
        yield figure, axes
        for column, title in zip(axes.T, titles, strict=True):
            column[0].set_title(title, loc="left")
            if xlabel:
                column[-1].set_xlabel(xlabel)
        for axis, label in zip(axes.flat, ylabels, strict=False):
            axis.set_ylabel(label)
        if legends:
            _legend(figure, axes, width)


def _legend(figure: Figure, axes: Panels, width: float) -> None:
    """Draw one legend for all panels below them, with each label once and dotted stretches explained last."""
    handles: dict[str, Artist] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if any(line.get_gid() == "unstable" for axis in axes.flat for line in axis.lines):
        handles["unstable"] = Line2D([], [], color=OTHER, **_UNSTABLE)
    if handles:
        longest = max(len(label.replace("\\", "")) for label in handles)
        columns = int(np.clip((width - 0.4) / (0.55 + 0.07 * longest), 1, len(handles)))
        figure.legend(handles.values(), handles.keys(), ncols=columns, **LEGEND)


def line(
    axis: Axes,
    x: Real[AnyArray, " n"],
    y: Real[AnyArray, " n"],
    colour: str,
    label: str | None = None,
    *,
    bar: Real[AnyArray, " n"] | None = None,
    stable: Bool[AnyArray, " n"] | None = None,
    dash: Dash = "-",
) -> None:
    """Draw a line with the band of its error bars. Unstable stretches are dotted up to the next stable points."""
    stable = np.full(np.shape(y), True) if stable is None else stable
    axis.plot(x, np.where(stable, y, np.nan), color=colour, lw=1.6, ls=dash, label=label)
    is_dotted = binary_dilation(~stable)
    if is_dotted.any():
        axis.plot(x, np.where(is_dotted, y, np.nan), color=colour, gid="unstable", **_UNSTABLE)
    if bar is not None and np.all(np.isfinite(bar[np.isfinite(y)])):
        axis.fill_between(x, y - 2 * bar, y + 2 * bar, color=colour, alpha=0.2, lw=0)


def frame(axis: Axes) -> None:
    """Set the limits of an axis: x is not negative, and y starts at zero if no number lies clearly below zero."""
    axis.set_xlim(left=max(0.0, axis.get_xlim()[0]))
    low, high = axis.dataLim.intervaly
    if 0 < high < np.inf and low > -ROOM * high:
        axis.set_ylim(0, (1 + ROOM) * high)


# Markers of the points where a path turns: a fold, or a pitchfork, from which it continues into its mirror state.
TURNS: dict[str, dict[str, Any]] = {
    "fold": {"marker": "o", "ms": 4},
    "pitchfork": {"marker": "D", "ms": 5, "mfc": "white"},
}

FRAME: dict[str, Any] = {"fill": False, "ec": COLOURS["positional"], "lw": 1}  # frame of a pair of equal tokens

# Labels and colours of the regions in which at most one branch is stable, by their index in `phases.diagram.REGIONS`.
# Both branches are stable from index 4 on.
NEITHER: tuple[str, str] = ("neither is stable", "0.8")

ALONE: dict[int, tuple[str, str]] = {
    2: ("only positional is stable", "#f0cdbb"),
    3: ("only semantic is stable", "#bcd5ea"),
}

HATCHED: dict[str, Any] = {"hatch": "/////", "facecolor": "none", "edgecolor": "0.45", "lw": 0}

# Dots tell these regions from a colour of the scale.
DOTTED: dict[str, Any] = {"hatch": "...", "edgecolor": "white", "lw": 0}
