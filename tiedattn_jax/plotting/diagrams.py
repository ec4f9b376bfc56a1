"""Pictures over two axes: phase diagrams, and maps of tables; and the picture of a transition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ..base.errors import require
from ..dynamics.landscape import words_of
from ..model.overlaps import PAIR
from .style import (
    ALONE,
    BASELINE,
    COLOURS,
    DASHES,
    DOTTED,
    HATCHED,
    LABELS,
    LOSS,
    MARKS,
    NEITHER,
    OTHER,
    SYMBOLS,
    Target,
    is_geometric,
    line,
    panels,
    scale,
    two_bars,
)

_BISTABLE = 4, 5  # regions in which both branches are stable
_UNINFORMED = 2  # index of the state in `PhaseDiagram.winner`

_NOT_TRUSTED = "not trusted: unsolved, not settled, or not decided by the averages"
_PRECISE = 0.01  # relative error bar above which a cell of a map is hatched


def diagram_figure(diagram: Any, boundaries: Sequence[Any] = (), ax: Target = None) -> Any:
    """Plot the phase diagram (the paper's Figs. 3 and 9): which minimum is global, and whether it beats the baseline.

    The left panel shows the difference of the training losses, positional minus semantic. Cells in which only one of
    the two is a minimum have a light colour with dots, and cells that have neither branch are dark grey with dots, as
    their global minimum is the uninformed state; other cells in which neither is a minimum are grey. The right panel
    shows the test error of the global minimum minus that of the linear baseline. Cells that are not `trusted` are
    hatched.

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
        boundaries: further boundaries to draw, tables of events along the other axis.
        ax: axes for the panels "train_loss" and "gen_error", see `style.panels`; each gets a colour bar.

    Raises:
        InputError: a boundary is in another parameter, or alpha is not an axis.
    """
    (x_name, x), (y_name, y), region = diagram.x, diagram.y, diagram.region
    if boundaries:
        for boundary in boundaries:
            axes_names = {"alpha", boundary.parameter}
            require({x_name, y_name} == axes_names, "boundaries", boundary.question, f"in axes {x_name} and {y_name}")
    if "alpha" in (x_name, y_name):
        boundaries = [diagram.alpha_c(), diagram.alpha_l(), *boundaries]
    titles = "global minimum: positional or semantic", "global minimum: worse or better than the baseline"
    colour_labels = "positional minus semantic training loss / d", "test error minus that of the baseline"
    ylabels = {"train_loss": y_name, "gen_error": ""}
    edges = _cell_edges(x), _cell_edges(y)
    with panels(9.5, 4.5, titles, xlabel=x_name, ylabels=ylabels, sharey=True, ax=ax) as (drawing, axes):
        left, right = axes[0]
        if ax is None:
            drawing.set_layout_engine("constrained", wspace=0.1)  # keeps the label of the left scale off the right axis
        for axis, (values, _), is_shown, colours, label in (
            (left, diagram.loss_difference, np.isin(region, _BISTABLE), "RdBu", colour_labels[0]),
            (right, diagram.gen_difference, region > 1, "RdBu_r", colour_labels[1]),
        ):
            masked = np.ma.masked_where(~is_shown, values)
            limit = float(np.ma.max(np.abs(masked))) if masked.count() else 1.0
            picture = axis.pcolormesh(*edges, masked, cmap=colours, vmin=-limit, vmax=limit, gid=label)
            axis.figure.colorbar(picture, ax=axis, shrink=0.9, label=label)
            axis.set(xscale=_scale_of(x), yscale=_scale_of(y))
            for code, (name, colour) in {**(ALONE if axis is left else {}), 1: NEITHER}.items():
                style = {"facecolor": colour, **(DOTTED if code in ALONE else {"lw": 0})}
                _mark(axis, *edges, region == code, name, style)
            _mark(axis, *edges, ~diagram.trusted, _NOT_TRUSTED, HATCHED)
            for boundary in boundaries:
                _boundary_line(axis, boundary, alpha_is_x=x_name == "alpha")
            axis.set(xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]])
    return drawing


def map_figure(table: Any, number: str = "", ax: Target = None) -> Any:
    """Draw a number over two axes as colours, with contour lines.

    Cells without a result are grey. Cells whose error bar is above 1 % of the number are hatched.

    Args:
        table: `phases.table.Table`.
        number: name of the number, by default that which was asked for.
        ax: axes for the only panel, "number", see `style.panels`; it gets a colour bar.
    """
    (x, y), name = table.axes, number or table.kind.main
    symbol = SYMBOLS.get(table.question, table.question) if name in ("alpha", "value") else LABELS.get(name, name)
    values, bars = np.ma.masked_invalid(table.values(name).T), table.stderr(name).T
    xlabel, ylabel = table.names
    edges, found = (_cell_edges(x), _cell_edges(y)), ~np.ma.getmaskarray(values)
    with panels(5.6, 4.2, xlabel=xlabel, ylabels={"number": ylabel}, ax=ax) as (drawing, ((axis,),)):
        picture = axis.pcolormesh(*edges, values, cmap="viridis", gid=f"{table.question} {name}")
        axis.figure.colorbar(picture, ax=axis, label=symbol)
        if found.any():
            low, high = values.min(), values.max()
            levels = [level for level in MaxNLocator(7).tick_values(low, high) if low < level < high]
            if levels:
                lines = axis.contour(x, y, values, levels, colors="white", linewidths=0.9)
                for artist in (lines, *axis.clabel(lines, fontsize=7)):
                    artist.set_path_effects([withStroke(linewidth=2, foreground="0.2")])  # seen on all colours
        _mark(axis, *edges, ~found, f"{symbol} not found", {"facecolor": "0.8", "lw": 0})
        _mark(axis, *edges, found & (bars > _PRECISE * np.abs(values)), "error bar above 1 %", HATCHED)
        axis.set(xscale=_scale_of(x), yscale=_scale_of(y), xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]])
    return drawing


# Fill colours of the labels of a landscape: semantic minima are blue, positional ones red, several minima darker.
_LABEL_COLOURS = ["#cfe0f1", "#f3d0c7", "#a9c9e8", "#eab4a6", "#9fb9d6", "#dd9c8c", "#7f9fc6", "#cc7a66"]


def landscape_figure(landscapes: Any, ax: Target = None) -> Any:
    """Draw the labels of the population risk over two numbers, and the lines along which they change.

    Args:
        landscapes: table of landscapes over two axes.
        ax: axes for the one panel "label", see `style.panels`.
    """
    (x, y), label = landscapes.axes, np.nan_to_num(landscapes.values(), nan=-1).astype(int).T
    present = np.unique(label[label >= 0])
    lines = {
        "global": ("-", "global minimum changes"),
        "steepest": ("--", "steepest descent changes"),
        "several": (":", "number of minima changes"),
    }
    xlabel, ylabel = landscapes.names
    with panels(6.4, 4.6, xlabel=xlabel, ylabels={"label": ylabel}, ax=ax) as (drawing, ((axis,),)):
        colours = [_LABEL_COLOURS[value] for value in present]
        shown = np.ma.masked_where(label < 0, np.searchsorted(present, label))
        axis.pcolormesh(x, y, shown, cmap=ListedColormap(colours), rasterized=True)
        for value, colour in zip(present, colours, strict=True):
            axis.fill([], [], color=colour, label=words_of(int(value)))
        for change, (style, name) in lines.items():
            for k, points in enumerate(landscapes.contours(lambda cell, name=change: cell.differences[name])):
                axis.plot(*points.T, color="k", ls=style, lw=1.2, label=name if k == 0 else None, gid=change)
    return drawing


def slice_figure(diagram: Any, rows: Sequence[int]) -> Figure:
    """Plot training loss and test error of both branches along x, at some rows of the diagram (the content of Fig. 8).

    Where neither branch exists, the line is that of the uninformed state. Dotted stretches are unstable towards the
    order parameter that the branch lacks.

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
        rows: indices into the y axis of the diagram.
    """
    (x_name, x), (y_name, y), exists = diagram.x, diagram.y, diagram.exists
    branches, minimum = (diagram.positional, diagram.semantic), diagram.global_minimum
    uninformed = diagram.winner == _UNINFORMED
    titles = [f"{SYMBOLS.get(y_name, y_name)} = {y[row]:.3g}" for row in rows]
    options: dict[str, Any] = {"rows": 2, "xlabel": x_name, "sharex": True, "sharey": "row"}
    with panels(3.2 * len(rows), 5, titles, **options) as (figure, axes):
        for name, panel_row in zip(("train_loss", "gen_error"), axes, strict=True):
            value = np.where(exists, [getattr(branch.mean, name) for branch in branches], np.nan)
            bar = np.stack([getattr(branch.stderr, name) for branch in branches])
            panel_row[0].set_ylabel(LABELS[name])
            for axis, row in zip(panel_row, rows, strict=True):
                is_labelled = axis is axes[1, 0]  # the only panel that adds labels to the legend
                for b, branch in enumerate(PAIR):
                    label, stable = branch if is_labelled else None, diagram.stable[b, row] | ~exists[b, row]
                    line(axis, x, value[b, row], COLOURS[branch], label, bar=bar[b, row], stable=stable)
                if np.any(uninformed[row]):
                    level, width = (
                        np.where(uninformed[row], getattr(a, name)[row], np.nan) for a in (minimum.mean, minimum.stderr)
                    )
                    line(axis, x, level, COLOURS["uninformed"], "uninformed", bar=width, dash=DASHES["uninformed"])
                scale(axis, x)
                if name == "gen_error":
                    style = BASELINE if is_labelled else {**BASELINE, "label": None}
                    axis.plot(x, np.nanmean([branch.gen_error_linear[row] for branch in branches], 0), **style)
    return figure


def _scale_of(values: Float[np.ndarray, " n"]) -> str:
    """Return the scale of an axis of the plane."""
    return "log" if is_geometric(values) else "linear"


def _boundary_line(axis: Axes, boundary: Any, *, alpha_is_x: bool) -> None:
    """Draw a boundary on a diagram whose alpha axis points to the right (`alpha_is_x`) or upwards."""
    alpha, width = boundary.alpha, two_bars(boundary.stderr())
    points = (alpha, boundary.at) if alpha_is_x else (boundary.at, alpha)
    fill = axis.fill_betweenx if alpha_is_x else axis.fill_between
    exists = bool(np.any(np.isfinite(alpha)))
    label, style = SYMBOLS.get(boundary.question, boundary.question), MARKS.get(boundary.question, {"color": OTHER})
    axis.plot(*points, label=label if exists else None, gid=boundary.question, **style)
    band: dict[str, Any] = {"color": "k", "alpha": 0.2, "lw": 0, "gid": f"{boundary.question}, error bars"}
    fill(boundary.at, alpha - width, alpha + width, **band)


def _mark(
    axis: Axes,
    x: Float[np.ndarray, " columns"],
    y: Float[np.ndarray, " rows"],
    cells: Bool[np.ndarray, "rows-1 columns-1"],
    label: str,
    style: dict[str, Any],
) -> None:
    """Fill or hatch the cells that are True in `cells`, between the edges `x` and `y`."""
    corners = [Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j]) for j, i in np.argwhere(cells)]
    axis.add_collection(PatchCollection(corners, gid=label, **style))
    if corners:
        axis.fill([], [], label=label, **style)  # for the legend, which cannot show a `PatchCollection`


def _cell_edges(centres: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n+1"]:
    """Return the edges of cells around increasing centres: in the middle, or at geometric means."""
    if is_geometric(centres):
        return np.exp(_cell_edges(np.log(centres)))
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middle = 0.5 * (centres[1:] + centres[:-1])
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])


def transition_figure(transition: Any, ax: Target = None) -> Any:
    """Plot an event in alpha: the losses that cross there, and how each number of the model moves it.

    If the event compares two states, the left panel shows the tangents of their training losses minus the loss at which
    they cross. If the transition has sensitivities, the right panel shows the relative ones, ``(p / alpha) d alpha / d
    p``, with bars of two error bars. Numbers p that are zero or do not move the event are left out.

    Args:
        transition: `theory.quantities.Quantity`.
        ax: axes for the panels "losses" and "sensitivities", those of them that there are; see `style.panels`.
    """
    alpha, bar, points = float(transition.value), float(transition.stderr), transition.branches
    points = tuple(point for point in points if hasattr(point.replicates, "train_loss_partials"))
    symbol = SYMBOLS.get(transition.event, r"$\alpha$")
    event = "" if transition.event in SYMBOLS else f"{transition.event}: "
    rows = _relative(transition) if transition.sensitivities is not None and points else []
    crossing = transition.event == "alpha_c" and len(points) == 2
    parts = {"losses": f"{LOSS} minus that at {symbol}"} if crossing else {}
    parts |= {"sensitivities": "number $p$ of the model"} if rows else {}
    parts = parts or {"losses": ""}
    titles = [rf"{event}{symbol} = {alpha:.6g} $\pm$ {bar:.1g}", *[""] * (len(parts) - 1)]
    with panels(4.6 * len(parts), 3.6, titles, ylabels=parts, ax=ax) as (drawing, axes):
        if crossing:
            axis = axes[0, 0]
            alphas = alpha * np.linspace(0.9, 1.1, 21)
            crossing_loss = float(np.mean([float(point.train_loss) for point in points]))
            for point in points:
                slope = float(np.nanmean(point.replicates.train_loss_partials[1]))
                level = float(point.train_loss) - crossing_loss + slope * (alphas - alpha)
                line(axis, alphas, level, COLOURS.get(point.branch, OTHER), point.branch or "any state")
            axis.axvline(alpha, label=symbol, gid=transition.event, **{**MARKS["alpha_c"], "lw": 0.9})
            band: dict[str, Any] = {"color": "k", "alpha": 0.2, "gid": f"{transition.event}, error bars"}
            axis.axvspan(alpha - 2 * bar, alpha + 2 * bar, **band)
            axis.set_xlabel(LABELS["alpha"])
        if rows:
            axis = axes[0, -1]
            names, values, bars = zip(*rows, strict=True)
            axis.barh(names, values, xerr=2 * np.array(bars), color=OTHER, height=0.6, capsize=2, gid="sensitivities")
            axis.invert_yaxis()
            axis.axvline(0, color="k", lw=0.8)
            axis.set_xlabel(rf"relative sensitivity $(p / \alpha)\, \partial \alpha / \partial p$ of {symbol}")
    return drawing


def _relative(transition: Any) -> list[tuple[str, float, float]]:
    """Return the relative sensitivities of an event, largest first: names of numbers, values and error bars."""
    rows = []
    for name, value in vars(transition.branches[0].model).items():
        if not hasattr(value, "dtype"):
            continue  # not a number but a part of the model's structure
        slopes, bars = (getattr(t, name) for t in (transition.sensitivities, transition.sensitivities_stderr))
        for index in np.ndindex(np.shape(value)):
            ratio, entry = float(value[index]) / float(transition.value), ",".join(map(str, index))
            slope, bar = float(slopes[index]) * ratio, abs(float(bars[index]) * ratio)
            if slope:
                label = SYMBOLS.get(name, name) + (f"[{entry}]" if entry else "")
                rows.append((label, slope, bar if np.isfinite(bar) else 0.0))
    return sorted(rows, key=lambda row: -abs(row[1]))
