"""Pictures of results: functions from results to matplotlib figures.

They know the fields of the results, which each docstring names, and import none of their modules; nothing is computed
here. A band or a bar around a number reaches two error bars to either side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .overlaps import BRANCHES, PAIR

COLOURS = {"positional": "#c8552b", "semantic": "#1f6fb2"}
OTHER = "0.35"  # of what has no colour of its own
ORDER_COLOURS = {str(BRANCHES[name].order): COLOURS[name] for name in PAIR}
SYMBOLS = {
    "alpha": r"sample complexity $\alpha = n/d$",
    "omega": r"$\omega$",
    "sigma": r"$\sigma$",
    "lam": r"$\lambda$",
    "q": r"$q$",
    "theta": r"$\theta$",
    "m": r"$m$",
    "alpha_c": r"$\alpha_c$",
    "alpha_l": r"$\alpha_l$",
    "train_loss": "training loss / d",
    "gen_error": r"test error $\epsilon_g$",
}
ORDERS, LOSS, ERROR = "order parameters", SYMBOLS["train_loss"], SYMBOLS["gen_error"]
_BASELINE: Any = {"color": "0.45", "lw": 1, "ls": "-.", "label": "linear baseline"}


@contextlib.contextmanager
def panels(
    width: float,
    height: float,
    titles: Sequence[str] = ("",),
    *,
    rows: int = 1,
    xlabel: str = "",
    legends: bool = True,
    **how: Any,
) -> Iterator[tuple[Figure, Any]]:
    """A figure in the house's style and its axes, (rows, columns).

    Every column has a title, every lowest panel the label, and every panel a legend of what was drawn if `legends`.

    Args:
        width, height: in inches.
        how: what else `Figure.subplots` takes.
    """
    style: Any = {"font.size": 9, "axes.titlesize": "medium", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, len(titles), squeeze=False, **how)
        yield figure, axes
        for column, title in zip(axes.T, titles, strict=True):
            column[0].set_title(title, loc="left")
            column[-1].set_xlabel(xlabel)
        for axis in axes.flat if legends else ():
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False, fontsize=8)


def line(
    axis: Any, x: Any, y: Any, colour: str, label: str | None = None, *, bar: Any = None, stable: Any = None
) -> None:
    """A line, solid where stable and dotted elsewhere up to the next stable points, with the band of its error bars."""
    stable = np.full(np.shape(y), True) if stable is None else stable
    axis.plot(x, np.where(stable, y, np.nan), color=colour, lw=1.6, label=label)
    beside = ~stable
    beside[1:] |= ~stable[:-1]
    beside[:-1] |= ~stable[1:]
    if beside.any():
        axis.plot(x, np.where(beside, y, np.nan), color=colour, lw=1.2, ls=":")
    if bar is not None and np.all(np.isfinite(bar[np.isfinite(y)])):
        axis.fill_between(x, y - 2 * bar, y + 2 * bar, color=colour, alpha=0.2, lw=0)


def branch_figure(curves: Sequence[Any], alpha_c: Any = None, alpha_l: Any = None) -> Figure:
    """Order parameters, training loss and test error of branches against alpha (the content of the paper's Fig. 2).

    Dotted stretches are unstable towards an order parameter that the branch lacks.

    Args:
        curves: `phases.follow.Curve`, one for each branch.
        alpha_c, alpha_l: `phases.events.Transition` to mark, where they were found.
    """
    with panels(11, 3.6, (ORDERS, LOSS, ERROR), xlabel=SYMBOLS["alpha"]) as (figure, axes):
        orders, losses, errors = axes[0]
        for curve in curves:
            name = curve.branch or "any state"
            colour = {**COLOURS, "uninformed": "0.65"}.get(name, OTHER)
            for order, own in ORDER_COLOURS.items():
                if getattr(BRANCHES[curve.branch], order):
                    _along_alpha(orders, curve, _first_of(order), own, f"{SYMBOLS[order]}, {name}")
            _along_alpha(losses, curve, lambda s: s.train_loss, colour, name)
            _along_alpha(errors, curve, lambda s: s.gen_error, colour, name)
        baseline = float(curves[0].points[-1].gen_error_linear)
        if np.isfinite(baseline):
            errors.axhline(baseline, **_BASELINE)
        for axis in axes.flat:
            for found, name, style in ((alpha_c, "alpha_c", "--"), (alpha_l, "alpha_l", ":")):
                if found is not None and found.ok:
                    axis.axvline(float(found.alpha), color="0.2", lw=0.9, ls=style, label=SYMBOLS[name])
            axis.set(xlim=(0, None), ylim=(0, None))
    return figure


def _along_alpha(axis: Any, curve: Any, get: Callable[[Any], Any], colour: str, label: str) -> None:
    """A number of every `FixedPoint` of a curve, with the same number of its error bars."""
    value = curve.values(get)
    bar = np.array([float(get(point.stderr)) for point in curve.points])
    stable = np.ones(len(value), bool)
    for order in ORDER_COLOURS:
        if not getattr(BRANCHES[curve.branch], order):
            stable &= curve.values(lambda point, k=order: getattr(point.diagnostics, f"growth_{k}")) < 1
    line(axis, curve.alphas, value, colour, label, bar=bar, stable=stable)


def _first_of(order: str) -> Callable[[Any], Any]:
    """The first entry of an order parameter, of a state."""
    return lambda state: getattr(state.overlaps, order).ravel()[0]


# Where a path turns: a fold, or a pitchfork, in which it goes on into its mirror state.
_TURNS: Any = {"fold": {"marker": "o", "ms": 4}, "pitchfork": {"marker": "D", "ms": 5, "mfc": "white"}}


def path_figure(paths: Sequence[Any]) -> Figure:
    """Order parameters and training loss along a branch that may turn back, its folds and pitchforks marked.

    There is one line for every replicate of the averages. It is dotted where the branch is unstable.

    Args:
        paths: `phases.arclength.BranchPath` of one branch.
    """
    parameter = paths[0].parameter
    with panels(7.6, 3.6, (ORDERS, LOSS), xlabel=SYMBOLS.get(parameter, parameter)) as (figure, axes):
        orders, losses = axes[0]
        labels: set[Any] = set()
        for path in paths:
            stable = (
                path.eigenvalues[:, 0].real < 1 + 1e-6
            )  # rotations of the student's columns have one, up to rounding
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
    """The first entry of an order parameter in every state, (n,)."""
    values = getattr(states.overlaps, order)
    return np.reshape(values, (len(values), -1))[:, 0]


def _mirrored(along: np.ndarray, turn: np.ndarray) -> bool:
    """Whether an order parameter changes its sign along a path, (n,), within two steps that contain its turn, (1,)."""
    near = np.stack([along[:-2], along[1:-1], along[2:]])
    low, high = near.min(0), near.max(0)
    return bool(np.any((low <= 0) & (0 <= high) & (low <= turn) & (turn <= high)))


# Lines of boundaries: in the colour of the branch that their event is about, by what happens.
_EVENT_STYLES = {"alpha_l": "--", "baseline": "--", "instability": ":", "pitchfork": "-."}


def boundary_figure(boundaries: Sequence[Any]) -> Figure:
    """alpha at which something happens against the other parameter, with error bars.

    Args:
        boundaries: `phases.boundaries.Boundary` in one parameter.
    """
    parameter = boundaries[0].parameter
    with panels(5.5, 3.8, xlabel=SYMBOLS.get(parameter, parameter)) as (figure, ((axis,),)):
        for boundary in boundaries:
            branch, kind = boundary.event.split()[0], boundary.event.split()[-1]
            bars = np.where(np.isfinite(boundary.stderr), 2 * boundary.stderr, 0.0)
            style: Any = {"color": COLOURS.get(branch, "k"), "ls": _EVENT_STYLES.get(kind, "-"), "lw": 1.4}
            label = SYMBOLS.get(boundary.event, boundary.event)
            axis.errorbar(boundary.values, boundary.alpha, yerr=bars, label=label, capsize=2, **style)
        axis.set_ylabel(SYMBOLS["alpha"])
    return figure


def attention_figure(attention: dict[str, Any], sequences: Any) -> Figure:
    """Attention matrices with their values, equal tokens framed (the paper's Figs. 1, 4, 5 and 6).

    Args:
        attention: matrices (n, L, L) for every row of the figure, by name, as from `histogram.attention`.
        sequences: its columns, tokens (n, L).
    """
    rows, (n, L) = len(attention), np.shape(sequences)
    side = 0.34 * L + 0.4
    with panels(side * n + 1.1, side * rows + 0.3, [""] * n, rows=rows) as (figure, axes):
        for row, (name, matrices) in zip(axes, attention.items(), strict=True):
            row[0].set_ylabel(name, fontsize=11)
            for axis, x, S in zip(row, np.asarray(sequences), np.asarray(matrices), strict=True):
                image = axis.imshow(S, cmap="Blues", vmin=0, vmax=1)
                letters = [token_name(token) for token in x]
                axis.set_xticks(range(L), letters)
                axis.set_yticks(range(L), letters)
                axis.tick_params(length=0, labelsize=8)
                axis.spines[:].set_visible(True)
                for (i, j), value in np.ndenumerate(S):
                    shade = "white" if value > 0.6 else "0.15"
                    axis.text(j, i, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=6, color=shade)
                    if x[i] == x[j]:
                        frame = Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, ec=COLOURS["positional"], lw=1)
                        axis.add_patch(frame)
        figure.colorbar(image, ax=axes, label="attention", fraction=0.05 / n)
    return figure


def token_name(token: int) -> str:
    """A letter; a number in alphabets longer than the letters."""
    return chr(ord("A") + int(token)) if token < 26 else str(int(token))


def learning_figure(trainings: dict[str, Sequence[Any]]) -> Figure:
    """Training loss, test error and what attention depends on, epoch by epoch, one line per run.

    Args:
        trainings: `histogram.Training` of stages that followed each other, by name; a dotted line marks where the next
            one began.
    """
    titles = ("training loss", "test error", "share of the variance of S")
    with panels(11, 3.4, titles, xlabel="epoch") as (figure, axes):
        loss, error, share = axes[0]
        for name, stages in trainings.items():
            for axis, get, label, style in (
                (loss, lambda h: h.train_loss, name, "-"),
                (error, lambda h: 1 - h.test_accuracy, name, "-"),
                (share, lambda h: h.positional_share, f"positional share, {name}", "--"),
                (share, lambda h: h.semantic_share, f"semantic share, {name}", "-"),
            ):
                values = np.concatenate([get(stage.history) for stage in stages], axis=1)
                lines = axis.plot(1 + np.arange(values.shape[1]), values.T, style, color=COLOURS.get(name, OTHER), lw=1)
                lines[0].set_label(label)
            for end in np.cumsum([stage.history.train_loss.shape[1] for stage in stages])[:-1]:
                for axis in axes.flat:
                    axis.axvline(end + 0.5, color="0.6", lw=0.8, ls=":")
        loss.set_yscale("log")
        error.set_yscale("log")
        share.set_ylim(-0.03, 1.03)
    return figure


# Of the regions in which only one branch is stable, by their place in `phases.diagram.REGIONS`; both are from 4 on.
_ALONE = {2: ("only positional", "#f3d9cd"), 3: ("only semantic", "#cfe0f0")}
_BISTABLE = 4


def diagram_figure(diagram: Any) -> Figure:
    """The phase diagram (the paper's Figs. 3 and 9): which minimum is global, and whether it beats the baseline.

    Left, the difference of the training losses, positional minus semantic; plain colour where only one of the two is a
    minimum. Right, the test error of the global minimum minus that of the linear baseline. Cells that are unsolved, or
    where the averages do not tell which minimum is lower, are hatched.

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
    """
    (x_name, x), (y_name, y), region = diagram.x, diagram.y, diagram.region
    boundaries = []
    if "alpha" in (x_name, y_name):
        boundaries = [(diagram.alpha_c(), "-"), (diagram.alpha_l(), "--")]
    titles = "training loss / d: positional minus semantic", "test error: global minimum minus linear baseline"
    xlabel, edges = SYMBOLS.get(x_name, x_name), (_edges(x), _edges(y))
    with panels(9.5, 4.3, titles, xlabel=xlabel, legends=False, sharey=True) as (figure, axes):
        left, right = axes[0]
        for axis, (values, _), shown, colours in (
            (left, diagram.loss_difference, region >= _BISTABLE, "RdBu"),
            (right, diagram.gen_difference, region > 1, "RdBu_r"),
        ):
            masked = np.ma.masked_where(~shown, values)
            limit = float(np.ma.max(np.abs(masked))) if masked.count() else 1.0
            picture = axis.pcolormesh(*edges, masked, cmap=colours, vmin=-limit, vmax=limit)
            figure.colorbar(picture, ax=axis, shrink=0.9)
            for code, (label, colour) in _ALONE.items() if axis is left else ():
                only = np.ma.masked_where(region != code, np.ones(region.shape))
                axis.pcolormesh(*edges, only, cmap=matplotlib.colors.ListedColormap([colour]))
                axis.plot([], [], "s", color=colour, label=label)
            _hatch(axis, *edges, ~diagram.trusted)
            for boundary, style in boundaries:
                _boundary_line(axis, boundary, style, across=x_name == "alpha")
            axis.set(xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]])
        left.set_ylabel(SYMBOLS.get(y_name, y_name))
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)  # covers no cell
    return figure


def slice_figure(diagram: Any, rows: Sequence[int]) -> Figure:
    """Training loss and test error of both branches along x, at some rows of the diagram (the content of Fig. 8).

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
        rows: indices into its y.
    """
    (x_name, x), (y_name, y), exists = diagram.x, diagram.y, diagram.exists
    titles = [f"{SYMBOLS.get(y_name, y_name)} = {y[row]:.3g}" for row in rows]
    how: Any = {"rows": 2, "xlabel": SYMBOLS.get(x_name, x_name), "sharex": True, "sharey": "row"}
    with panels(3.2 * len(rows), 5, titles, **how) as (figure, axes):
        for name, across in zip(("train_loss", "gen_error"), axes, strict=True):
            value, bar = np.where(exists, diagram.mean(name), np.nan), diagram.stderr(name)
            across[0].set_ylabel(SYMBOLS[name])
            for axis, row in zip(across, rows, strict=True):
                first = axis is axes[1, 0]  # the only one with a legend
                for b, branch in enumerate(PAIR):
                    line(axis, x, value[b, row], COLOURS[branch], branch if first else None, bar=bar[b, row])
                if name == "gen_error":
                    style = _BASELINE if first else {**_BASELINE, "label": None}
                    axis.plot(x, np.nanmean(diagram.mean("gen_error_linear")[:, row], 0), **style)
    return figure


def _boundary_line(axis: Any, boundary: Any, style: str, *, across: bool) -> None:
    """A boundary on a diagram, whose alpha runs to the right (`across`) or upwards."""
    width = np.where(np.isfinite(boundary.stderr), 2 * boundary.stderr, 0.0)
    place = (boundary.alpha, boundary.values) if across else (boundary.values, boundary.alpha)
    fill = axis.fill_betweenx if across else axis.fill_between
    axis.plot(*place, "k", ls=style, lw=1.3, label=SYMBOLS[boundary.event])
    fill(boundary.values, boundary.alpha - width, boundary.alpha + width, color="k", alpha=0.2, lw=0)


def _hatch(axis: Any, x: np.ndarray, y: np.ndarray, cells: np.ndarray) -> None:
    """Hatch the cells (y, x) that are marked."""
    corners = [Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j]) for j, i in np.argwhere(cells)]
    axis.add_collection(PatchCollection(corners, hatch="/////", facecolor="none", edgecolor="0.45", lw=0))


def _edges(centres: np.ndarray) -> np.ndarray:
    """Edges of the cells around increasing centres."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middle = 0.5 * (centres[1:] + centres[:-1])
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])
