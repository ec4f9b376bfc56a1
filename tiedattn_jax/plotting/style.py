"""Colours, labels and panels that all pictures share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from jaxtyping import Bool, Float, Real, Shaped
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.ndimage import binary_dilation

from ..base.arrays import AnyArray
from ..base.errors import InputError
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

OTHER = "0.35"  # colour of everything that has no colour of its library_axes

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
_BAND, _DOTS = ", error bars", ", unstable"  # ends of the names (gid) of bands and of dotted stretches

LEGEND: dict[str, Any] = {"loc": "outside lower center", "frameon": False}

ROOM = 0.05  # margin between the data and the frame, relative

# Settings of matplotlib for the library's own figures. One that the user has changed keeps the user's value.
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}


Panels: TypeAlias = Shaped[np.ndarray, "rows columns"]  # an array of `Axes`
Target: TypeAlias = (
    Any  # `Axes`, a sequence of them, or a mapping from names of panels to `Axes`; None for a new figure
)


@contextlib.contextmanager
def panels(
    width: float,
    height: float,
    titles: Sequence[str] | None = None,
    *,
    rows: int = 1,
    xlabel: str = "",
    ylabels: Sequence[str] | Mapping[str, str] = (),
    legends: bool = True,
    ax: Target = None,
    **options: Any,
) -> Iterator[tuple[Any, Panels]]:
    """Yield what the picture is drawn on, a figure in the library's style or `ax`, and the axes of all panels.

    Every column has a title, and its lowest panel has the x label. Labels are words, or keys of `LABELS`. On a figure
    of the library's one legend below the panels explains all of them and covers nothing. Axes of the caller's get no
    legend: every line has a label, so that ``ax.legend()`` makes one.

    Args:
        width, height: size in inches, unless the user has changed ``figure.figsize``.
        titles: titles of the columns; by default there is a column without one for every y label.
        ylabels: y labels of the first panels, row by row. Keys are names of the panels.
        legends: whether to draw the legend.
        ax: axes of the caller's to draw on, see `_callers_axes`.
        options: further arguments of `Figure.subplots`.
    """
    labels = ylabels if isinstance(ylabels, Mapping) else dict(enumerate(ylabels))
    titles = [""] * max(1, len(labels)) if titles is None else titles
    style: Any = {name: value for name, value in _STYLE.items() if not _changed(name)}
    with matplotlib.rc_context(style):
        size = matplotlib.rcParams["figure.figsize"] if _changed("figure.figsize") else (width, height)
        figure = Figure(figsize=size, layout="constrained")
        library_axes = figure.subplots(rows, len(titles), squeeze=False, **options)
        axes = library_axes if ax is None else _callers_axes(ax, [str(name) for name in labels], library_axes)
        before = [axis.get_legend_handles_labels() for axis in axes.flat]
        yield figure if ax is None else ax, axes
        for column, title in zip(axes.T, titles, strict=True):
            if title:
                column[0].set_title(title, loc="left")
            if xlabel:
                column[-1].set_xlabel(LABELS.get(xlabel, xlabel))
        for axis, label in zip(axes.flat, labels.values(), strict=False):
            if label:
                axis.set_ylabel(LABELS.get(label, label))
        for axis in axes.flat:
            if any((line.get_gid() or "").endswith(_DOTS) for line in axis.lines):
                axis.plot([], [], color=OTHER, label="unstable", **_UNSTABLE)
        for axis, (handles, labels) in zip(axes.flat, before, strict=True):
            _label_once(axis, handles, labels)
        if legends and ax is None:
            _legend(figure, axes, size[0])


def _changed(name: Any) -> bool:
    """Return whether the user has changed a setting of matplotlib."""
    return matplotlib.rcParams[name] != matplotlib.rcParamsDefault[name]


def _callers_axes(ax: Target, names: Sequence[str], library_axes: Panels) -> Panels:
    """Return axes for all panels: those of the caller's where there are any, others from a figure that nobody sees.

    Args:
        ax: one `Axes` for a picture of one panel, a sequence of one for every panel, or a mapping from names of panels
            to `Axes`, which draws these panels only.
        names: names of the panels in the order of `library_axes`.

    Raises:
        InputError: `ax` does not fit the panels.
    """
    sequence = [ax] if isinstance(ax, Axes) else ax
    if not isinstance(sequence, Mapping):
        sequence = list(np.asarray(sequence, object).flat)
        sequence = dict(zip(names, sequence, strict=True)) if len(sequence) == len(names) else {"": None}
    if not sequence.keys() <= set(names) or not all(isinstance(axis, Axes) for axis in sequence.values()):
        one = "one matplotlib Axes" if len(names) == 1 else f"{len(names)} matplotlib Axes, or a dict of some of them"
        raise InputError("ax", f"must be {one}, for the panels {', '.join(names)}, got ax={ax!r}")
    axes = library_axes.copy()
    for k, name in enumerate(names):
        axes.flat[k] = sequence.get(name, library_axes.flat[k])
    return axes


def _label_once(axis: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Hide from a legend what is labelled as something before it; `handles` and their `labels` were there already."""
    known, seen = set(map(id, handles)), set(labels)
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        if id(handle) not in known:
            handle.set_label(f"_{label}" if label in seen else label)
            seen.add(label)


def _legend(figure: Figure, axes: Panels, width: float) -> None:
    """Draw one legend for all panels below them, with each label once and dotted stretches explained last."""
    handles: dict[str, Artist] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if "unstable" in handles:
        handles["unstable"] = handles.pop("unstable")
    if handles:
        longest = max(len(label.replace("\\", "")) for label in handles)
        columns = int(np.clip((width - 0.4) / (0.55 + 0.07 * longest), 1, len(handles)))
        figure.legend(handles.values(), handles.keys(), ncols=columns, **LEGEND)


def is_geometric(values: Real[AnyArray, " n"]) -> bool:
    """Return whether values are spaced geometrically, as by `numpy.geomspace`: their axis is then logarithmic.

    Three values are too few to tell.
    """
    values = np.asarray(values, float)
    if len(values) < 4 or not np.all(values > 0) or np.allclose(np.diff(values), values[1] - values[0], rtol=1e-3):
        return False
    steps = np.diff(np.log(values))
    return bool(np.allclose(steps, steps[0], rtol=1e-3))


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
    """Draw a line with the band of its error bars. Unstable stretches are dotted up to the next stable points.

    Line, dots and band carry the label as their name (gid), the last two followed by what they are.
    """
    stable = np.full(np.shape(y), True) if stable is None else stable
    axis.plot(x, np.where(stable, y, np.nan), color=colour, ls=dash, label=label, gid=label)
    is_dotted = binary_dilation(~stable)
    if is_dotted.any():
        axis.plot(x, np.where(is_dotted, y, np.nan), color=colour, gid=f"{label or ''}{_DOTS}", **_UNSTABLE)
    if bar is not None and np.all(np.isfinite(bar[np.isfinite(y)])):
        band: dict[str, Any] = {"alpha": 0.2, "lw": 0, "gid": f"{label or ''}{_BAND}"}
        axis.fill_between(x, y - 2 * bar, y + 2 * bar, color=colour, **band)


def scale(axis: Axes, x: Real[AnyArray, " n"]) -> None:
    """Make the x axis logarithmic if its values are spaced geometrically."""
    if is_geometric(x):
        axis.set_xscale("log")


def mark(axis: Axes, name: str, alpha: Any) -> None:
    """Mark the alpha of an event by a vertical line."""
    axis.axvline(float(alpha), label=SYMBOLS[name], gid=name, **{**MARKS[name], "lw": 0.9})


def two_bars(bars: Real[AnyArray, " n"]) -> Float[np.ndarray, " n"]:
    """Return the widths of error bars to either side, zero where they are not known."""
    return np.where(np.isfinite(bars), 2 * bars, 0.0)


def frame(axis: Axes) -> None:
    """Set the limits of an axis with lines: x is not negative; y starts at zero if no number is clearly below zero.

    Limits that the caller has set hold. The others make room for what is drawn later, and follow a logarithmic scale.
    """
    zero = axis.lines[-1].sticky_edges  # margins that matplotlib adds later end there
    if axis.get_xscale() == "linear" and axis.get_autoscalex_on():
        axis.set_xlim(left=max(0.0, axis.get_xlim()[0]), auto=True)
        zero.x.append(0.0)
    low, high = axis.dataLim.intervaly
    is_free = axis.get_yscale() == "linear" and axis.get_autoscaley_on()
    if is_free and 0 < high < np.inf and low > -ROOM * high:
        axis.update_datalim([(0.0, 0.0)], updatex=False)
        axis.set_ylim(0, (1 + ROOM) * high, auto=True)
        zero.y.append(0.0)


# Markers of the points where a path turns: a fold, or a pitchfork, from which it continues into its mirror state.
TURNS: dict[str, dict[str, Any]] = {
    "fold": {"marker": "o", "ms": 4},
    "pitchfork": {"marker": "D", "ms": 5, "mfc": "white"},
}

FRAME: dict[str, Any] = {"fill": False, "ec": COLOURS["positional"], "lw": 1}  # frame of a pair of equal tokens

# Labels and colours of the regions in which at most one branch is stable, by their index in `phases.diagram.REGIONS`.
NEITHER: tuple[str, str] = ("neither is stable", "0.8")

ALONE: dict[int, tuple[str, str]] = {
    2: ("only positional is stable", "#f0cdbb"),
    3: ("only semantic is stable", "#bcd5ea"),
    6: ("uninformed: neither branch exists", "0.65"),
}

HATCHED: dict[str, Any] = {"hatch": "/////", "facecolor": "none", "edgecolor": "0.45", "lw": 0}

# Dots tell these regions from a colour of the scale.
DOTTED: dict[str, Any] = {"hatch": "...", "edgecolor": "white", "lw": 0}
