"""Colours, labels and panels that all pictures share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from textwrap import fill
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from jaxtyping import Bool, Float, Real, Shaped
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cbook import normalize_kwargs
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import binary_dilation

from ..base.arrays import AnyArray
from ..base.errors import InputError
from ..model.overlaps import BRANCHES, PAIR
from ..model.parameters import MODELS

Dash: TypeAlias = str | tuple[int, tuple[int, ...]]  # a line style of matplotlib

# Colours that can be told apart with any colour vision (after Okabe and Ito). A branch has the same colour in every
# picture. The two branches of the paper also differ in lightness, for print without colours.
COLOURS = {
    "positional": "#E8741E",
    "semantic": "#00659E",
    "mixed": "#CC79A7",
    "uninformed": "0.55",
    "baseline": "#009E73",
    "optimal": "#8A4FD0",
    "spectral": "#56B4E9",
    "simulation": "#999933",
}

# Line styles of branches that are no minimum anywhere; other branches are solid. Unstable stretches of any branch are
# dotted.
DASHES: dict[str | None, Dash] = {"mixed": (0, (6, 2)), "uninformed": (0, (4, 2, 1, 2))}

OTHER = "0.5"  # colour of everything that has no colour of its own; seen on light and on dark ground
# Drawn in the colours of the axes: the frame, black on light ground and white on dark, and the ground itself.
INK, GROUND = "k", "white"

ORDER_COLOURS = {str(BRANCHES[name].order): COLOURS[name] for name in PAIR}

SYMBOLS = {
    "alpha": r"$\alpha$",
    "omega": r"$\omega$",
    "sigma": r"$\sigma$",
    "lam": r"$\lambda$",
    "tau": r"$\tau$",
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
    "alpha": r"sample complexity $\alpha$",
    "omega": r"positional share of the target $\omega$",
    "sigma": r"standard deviation of the tokens $\sigma$",
    "lam": r"ridge strength $\lambda$",
    "tau": r"strength of the trace norm $\tau$",
    "q": r"size of the student $q$",
    "V": r"response $V$",
    "theta": r"overlap with the teacher $\theta$",
    "m": r"overlap with the encodings $m$",
    "train_loss": r"training loss $\mathcal{R} / d$",
    "gen_error": r"test error $\epsilon_g$",
}

ORDERS, LOSS, ERROR = r"order parameters $m$, $\theta$", LABELS["train_loss"], LABELS["gen_error"]

MARKS: dict[str, dict[str, Any]] = {
    "alpha_c": {"color": INK, "ls": "-", "lw": 1.3},
    "alpha_l": {"color": INK, "ls": (0, (5, 2)), "lw": 1.3},
    "weak_recovery": {"color": COLOURS["optimal"], "ls": (0, (1, 1)), "lw": 1.3},
    "perfect_recovery": {"color": COLOURS["optimal"], "ls": (0, (5, 2)), "lw": 1.3},
}

# Ends of the names (gid) of error bars, of dotted stretches, and of what is drawn beside the lines of the result.
_BARS, _DOTS, BESIDE = ", error bars", ", unstable", ", beside"

BASELINE: dict[str, Any] = {"color": COLOURS["baseline"], "lw": 1.2, "ls": "-."}
_BASELINE = "linear baseline"

_UNSTABLE: dict[str, Any] = {"lw": 1.2, "ls": ":"}

_NARROW = 2.1  # inches of the figure's width below which a panel goes to the next row
_LONG_LABEL = 1.0  # length of a label, relative to its axis, that is too long
_FLAT = 0.75  # least height of panels in several rows, in units of their width
# Shades of lines of one colour in the order in which they are drawn: towards `INK`, or towards `GROUND` (negative).
_SHADES = 0.0, 0.45, -0.4, 0.7, -0.6

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
    look: Mapping[str, Any] | None = None,
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
        look: options of the lines of the result, see `_restyle`.
        options: further arguments of `Figure.subplots`.

    Raises:
        InputError: `ax` does not fit the panels, or `look` is not made of options of lines.
    """
    look, is_own = _checked_look(look or {}), ax is None
    labels = ylabels if isinstance(ylabels, Mapping) else dict(enumerate(ylabels))
    titles = [""] * max(1, len(labels)) if titles is None else titles
    style: Any = {name: value for name, value in _STYLE.items() if not _changed(name)}
    with matplotlib.rc_context(style):
        size = matplotlib.rcParams["figure.figsize"] if _changed("figure.figsize") else (width, height)
        figure, library_axes, across = _arranged(size, rows, len(titles), options)
        axes = library_axes if ax is None else _callers_axes(ax, [str(name) for name in labels], library_axes)
        before = [(axis.get_legend_handles_labels(), set(axis.get_children())) for axis in axes.flat]
        yield figure if is_own else ax, axes
        for k, (column, title) in enumerate(zip(axes.T, titles, strict=True)):
            if title:
                column[0].set_title(title, loc="left")
            if xlabel == MODELS:  # places in a list
                column[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
            if xlabel and (not is_own or k + across >= len(titles)):  # panels below say it
                column[-1].set_xlabel(_word(xlabel, column[-1], 0, is_own))
        for k, (axis, label) in enumerate(zip(axes.flat, labels.values(), strict=False)):
            if label and (not is_own or not options.get("sharey") or k % across == 0):
                axis.set_ylabel(_word(label, axis, 1, is_own))
        for axis, ((handles, labels), artists) in zip(axes.flat, before, strict=True):
            if any((line.get_gid() or "").endswith(_DOTS) for line in axis.lines):
                axis.plot([], [], color=OTHER, label="unstable", **_UNSTABLE)
            _restyle(axis, artists, look)
            _label_once(axis, handles, labels)
        if legends and is_own:
            _legend(figure, axes, size[0])


def _arranged(size: Sequence[float], rows: int, count: int, options: dict[str, Any]) -> tuple[Figure, Panels, int]:
    """Return a figure, its panels (rows, count), and how many of them stand side by side.

    A row that would make its panels narrower than `_NARROW` continues below, and the figure is higher for it.
    """
    down = rows if rows > 1 else -(-count // int(np.clip(size[0] // _NARROW, 1, count)))
    across = count if rows > 1 else -(-count // down)
    height = size[1] if across == count else max(size[1], down * _FLAT * size[0] / across)
    figure = Figure(figsize=(size[0], height), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, **options)
    for axis in axes.flat[rows * count :]:
        axis.remove()
    return figure, axes.ravel()[: rows * count].reshape(rows, count), across


def inches(axis: Axes) -> Float[np.ndarray, "2"]:
    """Return about how wide and high axes are, before the layout is final."""
    box, figure = axis.get_position(), axis.get_figure(root=True)
    assert figure is not None  # that of axes which are drawn on
    return np.maximum([box.width, box.height], 0.05) * figure.get_size_inches()


def _word(label: str, axis: Axes, side: int, short: bool) -> str:
    """Return a label, or its symbols alone if it may be `short` and is longer than the axis: 0 is x, 1 is y."""
    label = LABELS.get(label, label)
    letters = len(label.replace("\\mathcal", "").replace("\\", ""))
    is_long = letters * 0.55 * matplotlib.rcParams["font.size"] / 72 > inches(axis)[side] * _LONG_LABEL
    return label[label.index("$") :] if short and is_long and label in (*LABELS.values(), ORDERS) else label


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
    given = ax if isinstance(ax, Mapping) else dict(zip_longest(names, np.ravel(np.asarray(ax, object))))
    if not given.keys() <= set(names) or not all(isinstance(axis, Axes) for axis in given.values()):
        one = "one matplotlib Axes" if len(names) == 1 else f"{len(names)} matplotlib Axes, or a dict of some of them"
        raise InputError("ax", f"must be {one}, for the panels {', '.join(names)}, got ax={ax!r}")
    axes = [given.get(name, axis) for name, axis in zip(names, library_axes.flat, strict=True)]
    return np.array(axes, object).reshape(library_axes.shape)


def _checked_look(look: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of lines under their full names."""
    for name, value in look.items():
        try:
            Line2D([], []).set(**{name: value})
        except (AttributeError, TypeError, ValueError) as error:
            text = f"must be an option of this picture or of a matplotlib line, got {name}={value!r}"
            raise InputError(name, text) from error
    return normalize_kwargs(dict(look), Line2D)


def _restyle(axis: Axes, before: set[Artist], look: Mapping[str, Any]) -> None:
    """Give the lines of the result the options `look`, and their dots, bands and bars the colour.

    The label replaces the one label of the lines on these axes, or stands before each of several. What was there
    before, and what is drawn beside the result, such as a baseline, stays as it is.
    """

    def is_own(artist: Artist) -> bool:
        return artist not in before and bool(artist.get_gid()) and not str(artist.get_gid()).endswith(BESIDE)

    label, lines = look.get("label"), {name: value for name, value in look.items() if name != "label"}
    colour = {name: value for name, value in lines.items() if name in ("color", "zorder", "visible")}
    for artist in filter(is_own, [*axis.lines, *axis.collections, *axis.patches]):
        is_line = isinstance(artist, Line2D) and not str(artist.get_gid()).endswith((_DOTS, _BARS))
        artist.set(**(lines if is_line else colour))
    if label is not None:
        drawn, _ = axis.get_legend_handles_labels()
        handles = [h for h in drawn if is_own(h if isinstance(h, Artist) else h[0])]  # of points with bars the points
        several = len({handle.get_label() for handle in handles}) > 1
        for handle in handles:
            handle.set_label(f"{label}, {handle.get_label()}" if several else label)


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
        texts = [label if "$" in label else fill(label, max(20, int((width - 0.9) / 0.07))) for label in handles]
        figure.legend(handles.values(), texts, ncols=columns, **LEGEND)


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
    beside: bool = False,
) -> None:
    """Draw a line with the band of its error bars. Unstable stretches are dotted up to the next stable points.

    Line, dots and band carry the label as their name (gid), the last two followed by what they are. A second line of
    the same label has another shade and a number. A legend does not show a line without points.

    Args:
        beside: whether the line is drawn beside those of the result, which a caller's options are for.
    """
    y, name, colour = np.asarray(y), label, shown(axis, colour)
    if label and not beside:
        colour, label = distinct(axis, colour, label)
    is_dotted = np.full(np.shape(y), False) if stable is None else ~stable & np.isfinite(y)
    style: dict[str, Any] = {"color": colour, "ls": dash, "label": label if np.isfinite(y).any() else None}
    axis.plot(x, np.where(is_dotted, np.nan, y), gid=f"{name}{BESIDE}" if beside else name, **style)
    if is_dotted.any():
        is_dotted = binary_dilation(is_dotted)
        axis.plot(x, np.where(is_dotted, y, np.nan), color=colour, gid=f"{name or ''}{_DOTS}", **_UNSTABLE)
    if bar is not None and np.all(np.isfinite(bar[np.isfinite(y)])):
        band: dict[str, Any] = {"alpha": 0.2, "lw": 0, "gid": f"{name or ''}{_BARS}"}
        axis.fill_between(x, y - 2 * bar, y + 2 * bar, color=colour, **band)


def scale(axis: Axes, x: Real[AnyArray, " n"]) -> None:
    """Make the x axis logarithmic if its values are spaced geometrically."""
    if is_geometric(x):
        axis.set_xscale("log")


def shown(axis: Axes, colour: str) -> str:
    """Return a colour as it is drawn on axes: `INK` is that of their frame, `GROUND` that of their ground."""
    if colour == INK:
        return to_hex(axis.spines["left"].get_edgecolor())
    return to_hex(axis.get_facecolor()) if colour == GROUND else colour


def on(axis: Axes, style: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a line with its colours as `shown`."""
    return {**style, **{name: shown(axis, style[name]) for name in ("color", "mfc") if style.get(name)}}


def fresh(axis: Axes, colour: str) -> str:
    """Return the first shade of a colour that no line on the axes has: itself, or a darker or lighter one."""
    colour = shown(axis, colour)
    taken = {to_hex(line.get_color()) for line in axis.lines if np.size(line.get_xdata())}
    base, ink, ground = (np.array(to_rgb(c)) for c in (colour, shown(axis, INK), shown(axis, GROUND)))
    shades = [to_hex(base + abs(s) * ((ink if s > 0 else ground) - base)) for s in _SHADES]
    return next((shade if k else colour for k, shade in enumerate(shades) if shade not in taken), colour)


def distinct(axis: Axes, colour: str, label: str) -> tuple[str, str]:
    """Return a `fresh` shade of a colour, and a label with the first number that makes it the only one on the axes."""
    taken = set(axis.get_legend_handles_labels()[1])
    names = (label if k == 1 else f"{label} ({k})" for k in range(1, len(taken) + 2))
    return fresh(axis, colour), next(name for name in names if name not in taken)


def mark(axis: Axes, name: str, alpha: Any) -> None:
    """Mark the alpha of an event by a vertical line."""
    axis.axvline(float(alpha), label=SYMBOLS[name], gid=f"{name}{BESIDE}", **on(axis, {**MARKS[name], "lw": 0.9}))


def baseline(axis: Axes, x: Real[AnyArray, " n"], errors: Real[AnyArray, " n"], of: str = "") -> None:
    """Draw the test error of the linear baseline, point by point, where it is known, if it is not there already.

    Args:
        of: in what its model differs from others.
    """
    label, errors = ", ".join(filter(None, (_BASELINE, of))), np.asarray(errors)
    lines = [np.array(line.get_xydata()) for line in axis.lines if line.get_gid() == f"{label}{BESIDE}"]
    there = [np.interp(np.asarray(x), a[:, 0], a[:, 1], left=np.nan, right=np.nan) for a in lines]
    is_drawn = any(np.allclose(values, errors, equal_nan=True) for values in there)
    if np.isfinite(errors).any() and not is_drawn:
        style = {**BASELINE, **({"color": fresh(axis, BASELINE["color"])} if of else {})}
        axis.plot(x, errors, label=label, gid=f"{label}{BESIDE}", **style)


def points(
    axis: Axes,
    x: Real[AnyArray, " n"],
    y: Real[AnyArray, " n"],
    bars: Real[AnyArray, " n"],
    name: str,
    *,
    along: str = "y",
    **style: Any,
) -> None:
    """Draw points with bars of two error bars to either side, which have no length where they are not known.

    All parts carry the name (gid), followed by what they are.

    Args:
        along: axis, "x" or "y", that the bars are parallel to.
        style: options of `Axes.errorbar`.
    """
    options = {**on(axis, style), f"{along}err": np.where(np.isfinite(bars), 2 * bars, 0.0)}
    for part in axis.errorbar(x, y, **options).get_children():
        part.set_gid(f"{name}{_BARS}")


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
    "pitchfork": {"marker": "D", "ms": 5, "mfc": GROUND},
}

FRAME: dict[str, Any] = {"fill": False, "ec": COLOURS["positional"], "lw": 1}  # frame of a pair of equal tokens

# Names and colours of regions, by their index in `phases.diagram.REGIONS`: the stable branches, the global one first.
REGION_STYLES: dict[int, tuple[str, str]] = {
    0: ("unsolved", "1.0"),
    1: ("neither is stable", "0.85"),
    2: ("positional", "#f6d9c9"),
    3: ("semantic", "#c6dcef"),
    4: ("positional,\nsemantic", "#e8a987"),
    5: ("semantic,\npositional", "#86b3d9"),
    6: ("uninformed", "0.7"),
}

HATCHED: dict[str, Any] = {"hatch": "/////", "facecolor": "none", "edgecolor": "0.45", "lw": 0}
