"""Pictures of results: functions from results to matplotlib figures.

The docstrings name the types of the results. The functions read fields of these types but do not import them, and they
compute no results. A band or a bar around a number reaches two error bars to either side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator
from scipy.ndimage import binary_dilation

from .overlaps import BRANCHES, PAIR

# Colours that can be told apart with any colour vision (Okabe and Ito). A branch has the same colour in every picture.
COLOURS = {
    "positional": "#D55E00",
    "semantic": "#0072B2",
    "mixed": "#CC79A7",
    "uninformed": "0.55",
    "baseline": "#009E73",
}
# Line styles of branches that are no minimum anywhere; other branches are solid. Unstable stretches of any branch are
# dotted.
DASHES: dict[str | None, Any] = {"mixed": (0, (6, 2)), "uninformed": (0, (4, 2, 1, 2))}
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
MARKS: dict[str, Any] = {
    "alpha_c": {"color": "k", "ls": "-", "lw": 1.3},
    "alpha_l": {"color": "k", "ls": (0, (5, 2)), "lw": 1.3},
}
_BASELINE: Any = {"color": COLOURS["baseline"], "lw": 1.2, "ls": "-.", "label": "linear baseline"}
_UNSTABLE: Any = {"lw": 1.2, "ls": ":"}
_LEGEND: Any = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
_ROOM = 0.05  # margin between the data and the frame, relative


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
    **how: Any,
) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure in the library's style and its axes, (rows, columns).

    Every column has a title, and its lowest panel has the x label. One legend below the panels explains all of them and
    covers nothing.

    Args:
        width, height: size in inches.
        ylabels: y labels of the first panels, row by row.
        legends: whether to draw the legend.
        how: further arguments of `Figure.subplots`.
    """
    style: Any = {
        "font.size": 9,
        "axes.titlesize": "medium",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.6,
        "pdf.fonttype": 42,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, len(titles), squeeze=False, **how)
        yield figure, axes
        for column, title in zip(axes.T, titles, strict=True):
            column[0].set_title(title, loc="left")
            if xlabel:
                column[-1].set_xlabel(xlabel)
        for axis, label in zip(axes.flat, ylabels, strict=False):
            axis.set_ylabel(label)
        if legends:
            _legend(figure, axes, width)


def _legend(figure: Figure, axes: Any, width: float) -> None:
    """Draw one legend for all panels below them, with each label once and dotted stretches explained last."""
    shown: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    if any(line.get_gid() == "unstable" for axis in axes.flat for line in axis.lines):
        shown["unstable"] = Line2D([], [], color=OTHER, **_UNSTABLE)
    if shown:
        longest = max(len(label.replace("\\", "")) for label in shown)
        columns = int(np.clip((width - 0.4) / (0.55 + 0.07 * longest), 1, len(shown)))
        figure.legend(shown.values(), shown.keys(), ncols=columns, **_LEGEND)


def line(
    axis: Any,
    x: Any,
    y: Any,
    colour: str,
    label: str | None = None,
    *,
    bar: Any = None,
    stable: Any = None,
    dash: Any = "-",
) -> None:
    """Draw a line with the band of its error bars. Unstable stretches are dotted up to the next stable points."""
    stable = np.full(np.shape(y), True) if stable is None else stable
    axis.plot(x, np.where(stable, y, np.nan), color=colour, lw=1.6, ls=dash, label=label)
    beside = binary_dilation(~stable)
    if beside.any():
        axis.plot(x, np.where(beside, y, np.nan), color=colour, gid="unstable", **_UNSTABLE)
    if bar is not None and np.all(np.isfinite(bar[np.isfinite(y)])):
        axis.fill_between(x, y - 2 * bar, y + 2 * bar, color=colour, alpha=0.2, lw=0)


def branch_figure(curves: Sequence[Any], alpha_c: Any = None, alpha_l: Any = None) -> Figure:
    """Plot order parameters, training loss and test error of branches against alpha (content of the paper's Fig. 2).

    If another number changes along the curves, the x axis shows that number.

    Dotted stretches are unstable towards an order parameter that the branch lacks.

    Args:
        curves: `phases.follow.Curve`, one for each branch.
        alpha_c, alpha_l: `phases.events.Transition` to mark; one that was not found is left out.
    """
    parameter = curves[0].parameter
    xlabel = LABELS.get(parameter, parameter)
    with panels(11, 3.6, [""] * 3, xlabel=xlabel, ylabels=(ORDERS, LOSS, ERROR)) as (figure, axes):
        orders, losses, errors = axes[0]
        for curve in curves:
            name = curve.branch or "any state"
            colour = COLOURS.get(name, OTHER)
            for order, own in ORDER_COLOURS.items():
                if getattr(BRANCHES[curve.branch], order):
                    label = name if own == colour else f"{SYMBOLS[order]}, {name}"
                    _along_alpha(orders, curve, _first_of(order), own, label)
            _along_alpha(losses, curve, lambda s: s.train_loss, colour, name)
            _along_alpha(errors, curve, lambda s: s.gen_error, colour, name)
        baseline = float(curves[0].points[-1].gen_error_linear)
        if np.isfinite(baseline):
            errors.axhline(baseline, **_BASELINE)
        for axis in axes.flat:
            for found, name in ((alpha_c, "alpha_c"), (alpha_l, "alpha_l")):
                if found is not None and found.ok:
                    axis.axvline(float(found.alpha), label=SYMBOLS[name], **{**MARKS[name], "lw": 0.9})
            _frame(axis)
    return figure


def _frame(axis: Any) -> None:
    """Set the limits of an axis: x is not negative, and y starts at zero if no number lies clearly below zero."""
    axis.set_xlim(left=max(0.0, axis.get_xlim()[0]))
    low, high = axis.dataLim.intervaly
    if 0 < high < np.inf and low > -_ROOM * high:
        axis.set_ylim(0, (1 + _ROOM) * high)


def _along_alpha(axis: Any, curve: Any, get: Callable[[Any], Any], colour: str, label: str) -> None:
    """Draw a number of every `FixedPoint` of a curve, with its error bar; `get` reads the number from a state."""
    value = curve.values(get)
    bar = np.array([float(get(point.stderr)) for point in curve.points])
    stable = np.ones(len(value), bool)
    for order in ORDER_COLOURS:
        if not getattr(BRANCHES[curve.branch], order):
            stable &= curve.values(lambda point, k=order: getattr(point.diagnostics, f"growth_{k}")) < 1
    line(axis, curve.at, value, colour, label, bar=bar, stable=stable, dash=DASHES.get(curve.branch, "-"))


def _first_of(order: str) -> Callable[[Any], Any]:
    """Return a function that reads the first entry of an order parameter from a state."""
    return lambda state: getattr(state.overlaps, order).ravel()[0]


# Markers of the points where a path turns: a fold, or a pitchfork, from which it continues into its mirror state.
_TURNS: Any = {"fold": {"marker": "o", "ms": 4}, "pitchfork": {"marker": "D", "ms": 5, "mfc": "white"}}


def path_figure(paths: Sequence[Any]) -> Figure:
    """Plot order parameters and training loss along a branch that may turn back, and mark its folds and pitchforks.

    There is one line for every replicate of the averages. Unstable stretches are dotted.

    Args:
        paths: `phases.arclength.BranchPath` of one branch, one for each replicate.
    """
    parameter = paths[0].parameter
    xlabel = LABELS.get(parameter, parameter)
    with panels(7.6, 3.6, ("", ""), xlabel=xlabel, ylabels=(ORDERS, LOSS)) as (figure, axes):
        orders, losses = axes[0]
        labels: set[Any] = set()
        for path in paths:
            # Rotations of the student's columns have eigenvalue one up to rounding, and do not make a state unstable.
            stable = path.eigenvalues[:, 0].real < 1 + 1e-6
            shown: list[Any] = [(losses, path.states.train_loss, [s.train_loss for s in path.fold_states], OTHER, None)]
            kinds = ["fold"] * len(path.folds)
            for order, colour in ORDER_COLOURS.items():
                if np.any(getattr(path.states.overlaps, order)):
                    along, *turns = (_first_of_each(s, order) for s in (path.states, *path.fold_states))
                    kinds = ["pitchfork" if _mirrored(along, a) else k for a, k in zip(turns, kinds, strict=True)]
                    shown.append((orders, along, turns, colour, SYMBOLS[order]))
            for axis, along, turns, colour, name in shown:
                line(axis, path.values, along, colour, None if name in labels else name, stable=stable)
                labels.add(name)
                for place, value, kind in zip(path.folds, turns, kinds, strict=True):
                    label = None if (axis, kind) in labels else kind
                    axis.plot(place, value[0], ls="", color=colour, label=label, **_TURNS[kind])
                    labels.add((axis, kind))
    return figure


def _first_of_each(states: Any, order: str) -> np.ndarray:
    """Return the first entry of an order parameter in every state, (n,)."""
    values = getattr(states.overlaps, order)
    return np.reshape(values, (len(values), -1))[:, 0]


def _mirrored(along: np.ndarray, turn: np.ndarray) -> bool:
    """Return whether an order parameter (n,) changes sign along a path within two steps that contain a turn (1,)."""
    near = np.stack([along[:-2], along[1:-1], along[2:]])
    low, high = near.min(0), near.max(0)
    return bool(np.any((low <= 0) & (0 <= high) & (low <= turn) & (turn <= high)))


# Line styles of boundaries by the kind of the event; the colour is that of the branch of the event.
_EVENT_STYLES = {"baseline": MARKS["alpha_l"]["ls"], "instability": ":", "pitchfork": "-."}


def boundary_figure(boundaries: Sequence[Any]) -> Figure:
    """Plot the alpha of events against another parameter, with error bars.

    Between neighbouring points that were found, the lines follow the exact slopes. If these are not known, the lines
    have maxima and minima only at points.

    Args:
        boundaries: `phases.boundaries.Boundary`, all in the same parameter.
    """
    parameter = boundaries[0].parameter
    xlabel = LABELS.get(parameter, parameter)
    with panels(5.5, 3.8, xlabel=xlabel, ylabels=(LABELS["alpha"],)) as (figure, ((axis,),)):
        for boundary in boundaries:
            branch, kind = boundary.event.split()[0], boundary.event.split()[-1]
            bars = np.where(np.isfinite(boundary.stderr), 2 * boundary.stderr, 0.0)
            style: Any = {"color": COLOURS.get(branch, "k"), "ls": _EVENT_STYLES.get(kind, "-"), "lw": 1.4}
            style |= MARKS.get(boundary.event, {})
            axis.plot(*_smooth(boundary), label=SYMBOLS.get(boundary.event, boundary.event), **style)
            points: Any = {"fmt": "o", "ms": 2.5, "capsize": 2, "color": style["color"]}
            axis.errorbar(boundary.values, boundary.alpha, yerr=bars, **points)
    return figure


def _smooth(boundary: Any) -> np.ndarray:
    """Return many points on smooth lines through the points of a boundary, (2, n), with NaN between separate lines."""
    parts = [np.empty((2, 0))]
    for run in np.ma.clump_unmasked(np.ma.masked_invalid(boundary.alpha)):
        x, y, slope = (a[run] for a in (boundary.values, boundary.alpha, boundary.slope))
        if x.size > 1:
            curve = CubicHermiteSpline(x, y, slope) if boundary.exact[run].all() else PchipInterpolator(x, y)
            fine = np.linspace(x[0], x[-1], 20 * (x.size - 1) + 1)
            parts += [np.array([fine, curve(fine)]), np.full((2, 1), np.nan)]
    return np.concatenate(parts, axis=1)


def transition_figure(transition: Any) -> Figure:
    """Plot an event in alpha: the training losses that cross there, and how every number of the model moves it.

    If the event compares two states, the left panel shows the tangents of their training losses minus the loss at which
    they cross. If the transition has sensitivities, the right panel shows the relative ones, ``(p / alpha) d alpha / d
    p``, with bars of two error bars. Numbers p that are zero or do not move the event are left out.

    Args:
        transition: `phases.events.Transition`.
    """
    alpha, bar, points = float(transition.alpha), float(transition.stderr), transition.branches
    symbol = SYMBOLS.get(transition.event, r"$\alpha$")
    event = "" if transition.event in SYMBOLS else f"{transition.event}: "
    rows = _relative(transition) if transition.sensitivities is not None else []
    crossing = len(points) == 2
    count = max(crossing + bool(rows), 1)
    with panels(4.6 * count, 3.6, [""] * count) as (figure, axes):
        if crossing:
            axis = axes[0, 0]
            around = alpha * np.linspace(0.9, 1.1, 21)
            common = float(np.mean([float(point.train_loss) for point in points]))
            for point in points:
                slope = float(np.nanmean(point.replicates.train_loss_partials[1]))
                level = float(point.train_loss) - common + slope * (around - alpha)
                line(axis, around, level, COLOURS.get(point.branch, OTHER), point.branch or "any state")
            axis.axvline(alpha, label=symbol, **{**MARKS["alpha_c"], "lw": 0.9})
            axis.axvspan(alpha - 2 * bar, alpha + 2 * bar, color="k", alpha=0.2)
            axis.set_xlabel(LABELS["alpha"])
            axis.set_ylabel(f"{LOSS} minus that at {symbol}")
        if rows:
            axis = axes[0, -1]
            names, values, bars = zip(*rows, strict=True)
            axis.barh(names, values, xerr=2 * np.array(bars), color=OTHER, height=0.6, capsize=2)
            axis.invert_yaxis()
            axis.axvline(0, color="k", lw=0.8)
            axis.set_xlabel(rf"relative sensitivity $(p / \alpha)\, \partial \alpha / \partial p$ of {symbol}")
            axis.set_ylabel("number $p$ of the model")
        figure.suptitle(rf"{event}{symbol} = {alpha:.6g} $\pm$ {bar:.1g}", x=0.02, ha="left")
    return figure


def _relative(transition: Any) -> list[tuple[str, float, float]]:
    """Return the relative sensitivities of an event, largest first: names of numbers, values and error bars."""
    found = []
    for name, value in vars(transition.branches[0].model).items():
        if not hasattr(value, "dtype"):
            continue  # not a number but a part of the model's structure
        slopes, bars = (getattr(t, name) for t in (transition.sensitivities, transition.sensitivities_stderr))
        for index in np.ndindex(np.shape(value)):
            ratio, entry = float(value[index]) / float(transition.alpha), ",".join(map(str, index))
            slope, bar = float(slopes[index]) * ratio, abs(float(bars[index]) * ratio)
            if slope:
                label = SYMBOLS.get(name, name) + (f"[{entry}]" if entry else "")
                found.append((label, slope, bar if np.isfinite(bar) else 0.0))
    return sorted(found, key=lambda row: -abs(row[1]))


def training_figure(trainings: dict[str, Any]) -> Figure:
    """Plot training loss and gradient, step by step.

    Args:
        trainings: `finite.training.Training` by name; one with the name of a branch has the colour of the branch.
    """
    with panels(8, 3.6, ["", ""], xlabel="step", ylabels=(LOSS, "largest entry of the gradient")) as (figure, axes):
        loss, gradient = axes[0]
        for name, training in trainings.items():
            _by_step(loss, training.losses, name)
            _by_step(gradient, training.gradient_norms, name)
        gradient.set_yscale("log")
        for axis in axes[0]:
            axis.set_xscale("symlog", linthresh=1)
            axis.set_xlim(left=0)
    return figure


def _by_step(axis: Any, values: Any, name: str, first: int = 0) -> None:
    """Draw a number of every step, (n,), with NaN for steps that were not taken; the first step has index `first`."""
    known = np.flatnonzero(np.isfinite(values))
    line(axis, first + known, np.asarray(values)[known], COLOURS.get(name, OTHER), name)


def gamp_figure(runs: dict[str, Any]) -> Figure:
    """Plot order parameters of the estimate and residual of message passing, iteration by iteration.

    The order parameters are means over the tokens of tr q and of the norms of theta and m.

    Args:
        runs: `finite.message_passing.GAMP` by name; one with the name of a branch has the colour of the branch.
    """
    ylabels = [LABELS["q"], LABELS["theta"], LABELS["m"], "residual of the step"]
    with panels(12, 3.6, [""] * 4, xlabel="iteration", ylabels=ylabels) as (figure, axes):
        q, theta, m, residual = axes[0]
        for name, run in runs.items():
            _by_step(q, np.trace(run.history.q, axis1=2, axis2=3).mean(axis=1), name)
            _by_step(theta, np.linalg.norm(run.history.theta, axis=(2, 3)).mean(axis=1), name)
            _by_step(m, np.linalg.norm(run.history.m, axis=2).mean(axis=1), name)
            _by_step(residual, run.residuals, name, first=1)
        residual.set_yscale("log")
    return figure


def instances_figure(instances: Any) -> Figure:
    """Plot every instance against the theory at its own teacher, in the colour of its branch.

    Points on the diagonal line agree with the theory. Bars are two error bars of the theory. Hollow points ran out of
    steps. Instances that are unsettled or ended on neither branch have no theory and are left out.

    Args:
        instances: `finite.instances.Instances`, with its theory.
    """
    names = "train_loss", "gen_error", "q", "theta", "m"
    with panels(13, 3.4, [LABELS[name] for name in names], xlabel="theory") as (figure, axes):
        for axis, name in zip(axes[0], names, strict=True):
            found, theory, bars = (
                np.asarray(getattr(k, name)) for k in (instances.found, instances.theory, instances.theory_stderr)
            )
            for branch in PAIR:
                here = instances.usable & (instances.branch == branch)
                for on, fill in ((here & instances.ok, None), (here & ~instances.ok, "white")):
                    style: Any = {"fmt": "o", "ms": 4, "mfc": fill, "color": COLOURS[branch]}
                    label = branch if fill is None else f"{branch}, out of steps"
                    if on.any():
                        wide = np.where(np.isfinite(bars[on]), 2 * bars[on], 0.0)
                        axis.errorbar(theory[on], found[on], xerr=wide, label=label, **style)
            axis.axline((0, 0), slope=1, color=OTHER, lw=0.8, zorder=0)
            both = np.concatenate([found, theory])[np.tile(instances.usable & np.isin(instances.branch, PAIR), 2)]
            if both.size:
                low, high = np.nanmin(both), np.nanmax(both)
                room = _ROOM * (high - low or 1)
                axis.set(xlim=(low - room, high + room), ylim=(low - room, high + room))
        axes[0, 0].set_ylabel("instance")
    return figure


def attention_figure(attention: dict[str, Any], sequences: Any) -> Figure:
    """Plot attention matrices with their values, and frame pairs of equal tokens (the paper's Figs. 1, 4, 5 and 6).

    Args:
        attention: matrices (n, L, L) of every row of the figure, by name, as from `histogram.attention`.
        sequences: tokens of the columns of the figure, (n, L).
    """
    rows, (n, L) = len(attention), np.shape(sequences)
    side = 0.28 * L + 0.3
    most = max(float(np.max(matrices)) for matrices in attention.values())
    with panels(side * n + 1.3, side * rows + 0.7, [""] * n, rows=rows, xlabel="attended token $j$") as (figure, axes):
        figure.set_layout_engine("compressed")  # keeps square panels close together
        for row, (name, matrices) in zip(axes, attention.items(), strict=True):
            row[0].set_ylabel(f"{name}\nattending token $i$")
            for axis, x, S in zip(row, np.asarray(sequences), np.asarray(matrices), strict=True):
                image = axis.imshow(S, cmap="Blues", vmin=0, vmax=most)
                letters = [token_name(token) for token in x]
                axis.set_xticks(range(L), letters)
                axis.set_yticks(range(L), letters)
                axis.tick_params(length=0, labelsize=8)
                axis.spines[:].set_visible(True)
                for (i, j), value in np.ndenumerate(S):
                    shade = "white" if value > 0.6 * most else "0.15"
                    axis.text(j, i, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=5.5, color=shade)
                    if x[i] == x[j]:
                        axis.add_patch(Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, **_FRAME))
        axes[0, 0].plot([], [], "s", mfc="none", mec=_FRAME["ec"], label="equal tokens")
        figure.colorbar(image, ax=axes, label="attention $S_{ij}$", fraction=0.05 / n)
    return figure


_FRAME: Any = {"fill": False, "ec": COLOURS["positional"], "lw": 1}  # frame of a pair of equal tokens


def token_name(token: int) -> str:
    """Return the letter of a token, or its number if there are not enough letters."""
    return chr(ord("A") + int(token)) if token < 26 else str(int(token))


def learning_figure(trainings: dict[str, Sequence[Any]]) -> Figure:
    """Plot training loss, test error and the shares of attention, epoch by epoch, with one line per run.

    Args:
        trainings: successive stages, `histogram.Training`, by name; a dotted line marks the beginning of the next
            stage.
    """
    ylabels = "training loss, cross-entropy", "test error, 1 - accuracy", "share of the variance of attention $S$"
    with panels(11, 3.6, [""] * 3, xlabel="epoch", ylabels=ylabels) as (figure, axes):
        loss, error, share = axes[0]
        for name, stages in trainings.items():
            for axis, get, label, style in (
                (loss, lambda h: h.train_loss, name, "-"),
                (error, lambda h: 1 - h.test_accuracy, name, "-"),
                (share, lambda h: h.positional_share, f"positional share, {name}", "--"),
                (share, lambda h: h.semantic_share, f"semantic share, {name}", "-"),
            ):
                values = np.concatenate([get(stage.history) for stage in stages], axis=1)
                how: Any = {"color": COLOURS.get(name, OTHER), "lw": 1}
                if values.shape[1] == 1:  # a single epoch is a marker, as it makes no line
                    how |= {"marker": "o", "ms": 4, "mfc": "none" if style == "--" else None}
                lines = axis.plot(1 + np.arange(values.shape[1]), values.T, style, **how)
                lines[0].set_label(label)
            for end in np.cumsum([stage.history.train_loss.shape[1] for stage in stages])[:-1]:
                for axis in axes.flat:
                    axis.axvline(end + 0.5, color="0.6", lw=0.8, ls=":", label="next stage")
        loss.set_yscale("log")
        error.set_yscale("log")
        share.set_ylim(-0.03, 1.03)
        for axis in axes.flat:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


# Labels and colours of the regions in which at most one branch is stable, by their index in `phases.diagram.REGIONS`.
# Both branches are stable from index 4 on.
_NEITHER: Any = ("neither is stable", "0.8")
_ALONE: dict[int, Any] = {2: ("only positional is stable", "#f0cdbb"), 3: ("only semantic is stable", "#bcd5ea")}
_BISTABLE = 4
_HATCHED: Any = {"hatch": "/////", "facecolor": "none", "edgecolor": "0.45", "lw": 0}
_DOTTED: Any = {"hatch": "...", "edgecolor": "white", "lw": 0}  # dots tell these regions from a colour of the scale


def diagram_figure(diagram: Any) -> Figure:
    """Plot the phase diagram (the paper's Figs. 3 and 9): which minimum is global, and whether it beats the baseline.

    The left panel shows the difference of the training losses, positional minus semantic. Cells in which only one of
    the two is a minimum have a light colour with dots; cells in which neither is are grey. The right panel shows the
    test error of the global minimum minus that of the linear baseline. Cells that are unsolved, or in which the
    averages do not decide which minimum is lower, are hatched.

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
    """
    (x_name, x), (y_name, y), region = diagram.x, diagram.y, diagram.region
    boundaries = [diagram.alpha_c(), diagram.alpha_l()] if "alpha" in (x_name, y_name) else []
    titles = "global minimum: positional or semantic", "global minimum: worse or better than the baseline"
    colour_labels = "positional minus semantic training loss / d", "test error minus that of the baseline"
    how: Any = {"xlabel": LABELS.get(x_name, x_name), "ylabels": (LABELS.get(y_name, y_name),), "sharey": True}
    edges = _edges(x), _edges(y)
    with panels(9.5, 4.5, titles, legends=False, **how) as (figure, axes):
        left, right = axes[0]
        figure.set_layout_engine("constrained", wspace=0.1)  # keeps the label of the left scale off the right axis
        legend: dict[str, Any] = {}
        for axis, (values, _), shown, colours, label in (
            (left, diagram.loss_difference, region >= _BISTABLE, "RdBu", colour_labels[0]),
            (right, diagram.gen_difference, region > 1, "RdBu_r", colour_labels[1]),
        ):
            masked = np.ma.masked_where(~shown, values)
            limit = float(np.ma.max(np.abs(masked))) if masked.count() else 1.0
            picture = axis.pcolormesh(*edges, masked, cmap=colours, vmin=-limit, vmax=limit)
            figure.colorbar(picture, ax=axis, shrink=0.9, label=label)
            for code, (name, colour) in {**(_ALONE if axis is left else {}), 1: _NEITHER}.items():
                how = {"facecolor": colour, **(_DOTTED if code in _ALONE else {"lw": 0})}
                _mark(axis, *edges, region == code, how)
                if np.any(region == code):
                    legend[name] = Patch(**how)
            _mark(axis, *edges, ~diagram.trusted, _HATCHED)
            for boundary in boundaries:
                _boundary_line(axis, boundary, across=x_name == "alpha")
            axis.set(xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]])
        if not np.all(diagram.trusted):
            legend["unsolved, or not decided by the averages"] = Patch(**_HATCHED)
        handles, labels = left.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
        figure.legend(legend.values(), legend.keys(), ncols=5, **_LEGEND)
    return figure


def slice_figure(diagram: Any, rows: Sequence[int]) -> Figure:
    """Plot training loss and test error of both branches along x, at some rows of the diagram (the content of Fig. 8).

    Dotted stretches are unstable towards the order parameter that the branch lacks.

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
        rows: indices into the y axis of the diagram.
    """
    (x_name, x), (y_name, y), exists = diagram.x, diagram.y, diagram.exists
    titles = [f"{SYMBOLS.get(y_name, y_name)} = {y[row]:.3g}" for row in rows]
    how: Any = {"rows": 2, "xlabel": LABELS.get(x_name, x_name), "sharex": True, "sharey": "row"}
    with panels(3.2 * len(rows), 5, titles, **how) as (figure, axes):
        for name, across in zip(("train_loss", "gen_error"), axes, strict=True):
            value, bar = np.where(exists, diagram.mean(name), np.nan), diagram.stderr(name)
            across[0].set_ylabel(LABELS[name])
            for axis, row in zip(across, rows, strict=True):
                first = axis is axes[1, 0]  # the only panel that adds labels to the legend
                for b, branch in enumerate(PAIR):
                    label, stable = branch if first else None, diagram.stable[b, row] | ~exists[b, row]
                    line(axis, x, value[b, row], COLOURS[branch], label, bar=bar[b, row], stable=stable)
                if name == "gen_error":
                    style = _BASELINE if first else {**_BASELINE, "label": None}
                    axis.plot(x, np.nanmean(diagram.mean("gen_error_linear")[:, row], 0), **style)
    return figure


def _boundary_line(axis: Any, boundary: Any, *, across: bool) -> None:
    """Draw a boundary on a diagram whose alpha axis points to the right (`across`) or upwards."""
    width = np.where(np.isfinite(boundary.stderr), 2 * boundary.stderr, 0.0)
    place = (boundary.alpha, boundary.values) if across else (boundary.values, boundary.alpha)
    fill = axis.fill_betweenx if across else axis.fill_between
    found = bool(np.any(np.isfinite(boundary.alpha)))
    axis.plot(*place, label=SYMBOLS[boundary.event] if found else None, **MARKS[boundary.event])
    fill(boundary.values, boundary.alpha - width, boundary.alpha + width, color="k", alpha=0.2, lw=0)


def _mark(axis: Any, x: np.ndarray, y: np.ndarray, cells: np.ndarray, how: dict[str, Any]) -> None:
    """Fill or hatch the cells that are True in `cells` (y, x), between the edges `x` and `y`."""
    corners = [Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j]) for j, i in np.argwhere(cells)]
    axis.add_collection(PatchCollection(corners, **how))


def _edges(centres: np.ndarray) -> np.ndarray:
    """Return the edges of cells around increasing centres."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middle = 0.5 * (centres[1:] + centres[:-1])
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])
