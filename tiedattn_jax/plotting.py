"""Pictures of results: functions from results to matplotlib figures.

They know the fields of the results, which each docstring names, and import none of their modules; nothing is computed
here. A band or a bar around a number reaches two error bars to either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    "theta": r"$\theta$",
    "m": r"$m$",
    "alpha_c": r"$\alpha_c$",
    "alpha_l": r"$\alpha_l$",
    "train_loss": "training loss / d",
    "gen_error": r"test error $\epsilon_g$",
}
_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def branch_figure(curves: Sequence[Any], alpha_c: Any = None, alpha_l: Any = None) -> Figure:
    """Order parameters, training loss and test error of branches against alpha (the content of the paper's Fig. 2).

    Dotted stretches are unstable towards an order parameter that the branch lacks.

    Args:
        curves: `phases.follow.Curve`, one for each branch.
        alpha_c, alpha_l: `phases.events.Transition` to mark, where they were found.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        orders, losses, errors = axes = figure.subplots(1, 3)
        for curve in curves:
            name = curve.branch or "any state"
            colour = {**COLOURS, "uninformed": "0.65"}.get(name, OTHER)
            bars = [point.stderr for point in curve.points]
            for order, own in ORDER_COLOURS.items():
                if getattr(BRANCHES[curve.branch], order):
                    _along_alpha(orders, curve, bars, _first_of(order), own, f"{SYMBOLS[order]}, {name}")
            _along_alpha(losses, curve, bars, lambda s: s.train_loss, colour, name)
            _along_alpha(errors, curve, bars, lambda s: s.gen_error, colour, name)
        baseline = float(curves[0].points[-1].gen_error_linear)
        if np.isfinite(baseline):
            errors.axhline(baseline, color="0.45", lw=1, ls="-.", label="linear baseline")
        titles = ("order parameters", SYMBOLS["train_loss"], SYMBOLS["gen_error"])
        for axis, title in zip(axes, titles, strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel(SYMBOLS["alpha"])
            for found, name, style in ((alpha_c, "alpha_c", "--"), (alpha_l, "alpha_l", ":")):
                if found is not None and found.ok:
                    axis.axvline(float(found.alpha), color="0.2", lw=0.9, ls=style, label=SYMBOLS[name])
            axis.set(xlim=(0, None), ylim=(0, None))
            _legend(axis)
    return figure


def _along_alpha(axis: Any, curve: Any, bars: list[Any], get: Callable[[Any], Any], colour: str, label: str) -> None:
    """A number of every `FixedPoint` of a curve, with the same number of its error bars."""
    value = curve.values(get)
    width = 2 * np.array([float(get(bar)) for bar in bars])
    stable = np.ones(len(value), bool)
    for order in ORDER_COLOURS:
        if not getattr(BRANCHES[curve.branch], order):
            stable &= curve.values(lambda point, k=order: getattr(point.diagnostics, f"growth_{k}")) < 1
    _dotted_where_not(axis, curve.alphas, value, stable, colour, label)
    if np.all(np.isfinite(width[np.isfinite(value)])):
        axis.fill_between(curve.alphas, value - width, value + width, color=colour, alpha=0.2, lw=0)


def _dotted_where_not(axis: Any, x: Any, y: Any, stable: np.ndarray, colour: str, label: str | None) -> None:
    """A line that is solid where stable, and dotted elsewhere up to the next stable points."""
    beside = ~stable
    beside[1:] |= ~stable[:-1]
    beside[:-1] |= ~stable[1:]
    axis.plot(x, np.where(stable, y, np.nan), color=colour, lw=1.6, label=label)
    axis.plot(x, np.where(beside, y, np.nan), color=colour, lw=1.2, ls=":")


def _first_of(order: str) -> Callable[[Any], Any]:
    """The first entry of an order parameter, of a state."""
    return lambda state: getattr(state.overlaps, order).ravel()[0]


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)


def path_figure(paths: Sequence[Any]) -> Figure:
    """Order parameters and training loss along a branch that may turn back, its folds marked by points.

    There is one line for every replicate of the averages. It is dotted where the branch is unstable.

    Args:
        paths: `phases.arclength.BranchPath` of one branch.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, 3.6), layout="constrained")
        orders, losses = axes = figure.subplots(1, 2)
        for k, path in enumerate(paths):
            for order, colour in ORDER_COLOURS.items():
                if np.any(getattr(path.states.overlaps, order)):
                    values, *folds = (_first_of_each(s, order) for s in (path.states, *path.fold_states))
                    _along_path(orders, path, values, folds, colour, None if k else SYMBOLS[order])
            folds = [state.train_loss for state in path.fold_states]
            _along_path(losses, path, path.states.train_loss, folds, OTHER, None)
        for axis, title in zip(axes, ("order parameters", SYMBOLS["train_loss"]), strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel(SYMBOLS.get(paths[0].parameter, paths[0].parameter))
            _legend(axis)
    return figure


def _along_path(axis: Any, path: Any, values: Any, folds: list[Any], colour: str, label: str | None) -> None:
    """A number along a path, (n,), and at its folds, (1,) each."""
    stable = path.eigenvalues[:, 0].real < 1 + 1e-6  # rotations of the student's columns have one, up to rounding
    _dotted_where_not(axis, path.values, values, stable, colour, label)
    for place, value in zip(path.folds, folds, strict=True):
        axis.plot(place, value[0], "o", ms=4, color=colour)


def _first_of_each(states: Any, order: str) -> np.ndarray:
    """The first entry of an order parameter in every state, (n,)."""
    values = getattr(states.overlaps, order)
    return np.reshape(values, (len(values), -1))[:, 0]


# Lines of boundaries: in the colour of the branch that their event is about, by what happens.
_EVENT_STYLES = {"alpha_l": "--", "baseline": "--", "instability": ":", "pitchfork": "-."}


def boundary_figure(boundaries: Sequence[Any]) -> Figure:
    """alpha at which something happens against the other parameter, with error bars.

    Args:
        boundaries: `phases.boundaries.Boundary` in one parameter.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.5, 3.8), layout="constrained")
        axis = figure.subplots()
        for boundary in boundaries:
            branch, kind = boundary.event.split()[0], boundary.event.split()[-1]
            bars = np.where(np.isfinite(boundary.stderr), 2 * boundary.stderr, 0.0)
            axis.errorbar(
                boundary.values,
                boundary.alpha,
                yerr=bars,
                label=SYMBOLS.get(boundary.event, boundary.event),
                color=COLOURS.get(branch, "k"),
                ls=_EVENT_STYLES.get(kind, "-"),
                lw=1.4,
                capsize=2,
            )
        parameter = boundaries[0].parameter
        axis.set(xlabel=SYMBOLS.get(parameter, parameter), ylabel=SYMBOLS["alpha"])
        _legend(axis)
    return figure


def attention_figure(attention: dict[str, Any], sequences: Any) -> Figure:
    """Attention matrices with their values, equal tokens framed (the paper's Figs. 1, 4, 5 and 6).

    Args:
        attention: matrices (n, L, L) for every row of the figure, by name, as from `histogram.attention`.
        sequences: its columns, tokens (n, L).
    """
    with matplotlib.rc_context({"font.size": 8}):
        rows, (n, L) = len(attention), np.shape(sequences)
        side = 0.34 * L + 0.4
        figure = Figure(figsize=(side * n + 1.1, side * rows + 0.3), layout="constrained")
        axes = figure.subplots(rows, n, squeeze=False)
        for row, (name, matrices) in zip(axes, attention.items(), strict=True):
            row[0].set_ylabel(name, fontsize=11)
            for axis, x, S in zip(row, np.asarray(sequences), np.asarray(matrices), strict=True):
                image = axis.imshow(S, cmap="Blues", vmin=0, vmax=1)
                letters = [token_name(token) for token in x]
                axis.set_xticks(range(L), letters)
                axis.set_yticks(range(L), letters)
                axis.tick_params(length=0)
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
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        loss, error, share = axes = figure.subplots(1, 3)
        for name, stages in trainings.items():

            def line(axis: Any, get: Any, label: str, style: str = "-", name: str = name, stages: Any = stages) -> None:
                values = np.concatenate([get(stage.history) for stage in stages], axis=1)
                colour = COLOURS.get(name, OTHER)
                for k, run in enumerate(values):
                    axis.plot(1 + np.arange(len(run)), run, style, color=colour, lw=1, label="" if k else label)

            line(loss, lambda h: h.train_loss, name)
            line(error, lambda h: 1 - h.test_accuracy, name)
            line(share, lambda h: h.positional_share, f"positional share, {name}", "--")
            line(share, lambda h: h.semantic_share, f"semantic share, {name}")
            for end in np.cumsum([stage.history.train_loss.shape[1] for stage in stages])[:-1]:
                for axis in axes:
                    axis.axvline(end + 0.5, color="0.6", lw=0.8, ls=":")
        for axis, title in ((loss, "training loss"), (error, "test error"), (share, "share of the variance of S")):
            axis.set_title(title, loc="left")
            axis.set_xlabel("epoch")
            _legend(axis)
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
    boundaries = []
    if "alpha" in (diagram.x[0], diagram.y[0]):
        boundaries = [(diagram.alpha_c(), "-"), (diagram.alpha_l(), "--")]
    region, trusted = diagram.region, diagram.trusted
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(9.5, 4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        x, y = edges = _edges(diagram.x[1]), _edges(diagram.y[1])
        for axis, values, shown, title, colours in (
            (
                left,
                diagram.loss_difference[0],
                region >= _BISTABLE,
                "training loss / d: positional minus semantic",
                "RdBu",
            ),
            (
                right,
                diagram.gen_difference[0],
                region > 1,
                "test error: global minimum minus linear baseline",
                "RdBu_r",
            ),
        ):
            masked = np.ma.masked_where(~shown, values)
            limit = float(np.ma.max(np.abs(masked))) if masked.count() else 1.0
            picture = axis.pcolormesh(*edges, masked, cmap=colours, vmin=-limit, vmax=limit)
            figure.colorbar(picture, ax=axis, shrink=0.9)
            if axis is left:
                for code, (label, colour) in _ALONE.items():
                    only = np.ma.masked_where(region != code, np.ones(region.shape))
                    axis.pcolormesh(*edges, only, cmap=matplotlib.colors.ListedColormap([colour]))
                    axis.plot([], [], "s", color=colour, label=label)
            _hatch(axis, *edges, ~trusted)
            for boundary, style in boundaries:
                _boundary_line(axis, boundary, style, across=diagram.x[0] == "alpha")
            axis.set(xlim=x[[0, -1]], ylim=y[[0, -1]], xlabel=SYMBOLS.get(diagram.x[0], diagram.x[0]))
            axis.set_title(title, loc="left", fontsize=9)
        left.set_ylabel(SYMBOLS.get(diagram.y[0], diagram.y[0]))
        left.legend(loc="lower right", fontsize=8)
        if boundaries:
            right.legend(loc="upper right", fontsize=8)
    return figure


def slice_figure(diagram: Any, rows: Sequence[int]) -> Figure:
    """Training loss and test error of both branches along x, at some rows of the diagram (the content of Fig. 8).

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
        rows: indices into its y.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3.2 * len(rows), 5), layout="constrained")
        panels = figure.subplots(2, len(rows), sharex=True, sharey="row", squeeze=False)
        x, exists = diagram.x[1], diagram.exists
        for column, row in enumerate(rows):
            for axis, name in zip(panels[:, column], ("train_loss", "gen_error"), strict=True):
                for b, branch in enumerate(PAIR):
                    value = np.where(exists[b, row], diagram.mean(name)[b, row], np.nan)
                    width = 2 * diagram.stderr(name)[b, row]
                    axis.plot(x, value, color=COLOURS[branch], lw=1.6, label=branch)
                    axis.fill_between(x, value - width, value + width, color=COLOURS[branch], alpha=0.2, lw=0)
                if name == "gen_error":
                    linear = np.nanmean(diagram.mean("gen_error_linear")[:, row], 0)
                    axis.plot(x, linear, color="0.45", lw=1, ls="-.", label="linear baseline")
                    axis.set_xlabel(SYMBOLS.get(diagram.x[0], diagram.x[0]))
                if column == 0:
                    axis.set_ylabel(SYMBOLS[name])
            title = f"{SYMBOLS.get(diagram.y[0], diagram.y[0])} = {diagram.y[1][row]:.3g}"
            panels[0, column].set_title(title, loc="left")
        panels[1, 0].legend(frameon=False, fontsize=8)
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
