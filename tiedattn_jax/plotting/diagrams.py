"""Pictures over two axes: phase diagrams, and maps of tables; and the picture of a transition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import distance_transform_edt, minimum_filter

from ..base.errors import require
from ..base.results import Status
from ..model.overlaps import PAIR
from ..model.parameters import MODELS
from ..phases.cells import runs_of
from .style import (
    COLOURS,
    DASHES,
    HATCHED,
    INK,
    LABELS,
    LOSS,
    MARKS,
    OTHER,
    REGION_STYLES,
    SYMBOLS,
    Target,
    baseline,
    inches,
    is_geometric,
    line,
    on,
    panels,
    points,
    scale,
    shown,
)

_BISTABLE = 4, 5  # regions in which both branches are stable
_UNINFORMED = 2  # index of the state in `Pair.winner`

_NOT_TRUSTED = "not trusted"  # see `Pair.trusted`
_PRECISE = 0.01  # relative error bar above which a cell of a map is hatched


def diagram_figure(diagram: Any, boundaries: Sequence[Any] = (), ax: Target = None, *, losses: bool = False) -> Any:
    """Plot the phase diagram (the paper's Figs. 3 and 9): which minimum is global, and whether it beats the baseline.

    The left panel shows the regions. A region has the name of its stable branches, the global one first, or a place in
    the legend where the name does not fit. The right panel shows the test error of the global minimum minus that of the
    linear baseline. Cells that are not `trusted` are hatched. Bars on boundaries are two error bars.

    Args:
        diagram: `phases.diagram.PhaseDiagram`.
        boundaries: further boundaries to draw, tables of events along the other axis.
        ax: axes for the panels "region" and "gen_error", see `style.panels`; the second one gets a colour bar.
        losses: whether the left panel, then "train_loss", shows the difference of the training losses, positional minus
            semantic, in the cells in which both branches are stable.

    Raises:
        InputError: a boundary is in another parameter, or alpha is not an axis.
    """
    (x_name, x), (y_name, y), region = diagram.x, diagram.y, diagram.region
    _check_boundaries(boundaries, x_name, y_name)
    if "alpha" in (x_name, y_name):
        boundaries = [diagram.alpha_c(), diagram.alpha_l(), *boundaries]
    titles = "positional minus semantic loss" if losses else "branches, the global one first", "error minus baseline"
    ylabels = {"train_loss" if losses else "region": y_name, "gen_error": y_name}
    with panels(8.4, 4.2, titles, xlabel=x_name, ylabels=ylabels, sharey=True, ax=ax) as (drawing, axes):
        left, right = axes[0]
        bistable, is_known = np.isin(region, _BISTABLE), region > 1
        edges, _ = (_plane(axis, x, y) for axis in (left, right))
        for code, (name, colour) in REGION_STYLES.items():
            _mark(left, *edges, region == code, name, {"facecolor": colour, "lw": 0}, inside=not losses)
        if losses:
            _colours(left, edges, diagram.loss_difference[0], bistable, "RdBu", titles[0])
        _colours(right, edges, diagram.gen_difference[0], is_known, "RdBu_r", titles[1])
        _mark(right, *edges, ~is_known, "no global minimum", {"facecolor": "0.85", "lw": 0})
        for axis in (left, right):
            _mark(axis, *edges, ~diagram.trusted, _NOT_TRUSTED, HATCHED)
            for boundary in boundaries:
                _boundary_line(axis, boundary, alpha_is_x=x_name == "alpha")
    return drawing


def _colours(axis: Axes, edges: Any, values: Any, is_shown: Any, colours: str, name: str) -> None:
    """Draw a difference as colours that are white at zero, with their scale."""
    masked = np.ma.masked_where(~is_shown, values)
    limit = float(np.ma.max(np.abs(masked))) if masked.count() else 1.0
    picture = axis.pcolormesh(*edges, masked, cmap=colours, vmin=-limit, vmax=limit, gid=name)
    axis.figure.colorbar(picture, ax=axis)


def map_figure(table: Any, number: str = "", ax: Target = None) -> Any:
    """Draw a number over two axes as colours, with contour lines.

    Cells without a result are grey, or crossed where the search failed. Cells are hatched if their error bar is above
    1 % of the number.

    Args:
        table: `phases.table.Table`.
        number: name of the number, by default that which was asked for.
        ax: axes for the only panel, "number", see `style.panels`; it gets a colour bar.
    """
    (x, y), name = table.axes, number or table.main
    is_main = name in ("alpha", "value", table.question)
    symbol = SYMBOLS.get(table.question, table.question) if is_main else LABELS.get(name, name)
    values, bars = np.ma.masked_invalid(table.values(name).T), table.stderr(name).T
    xlabel, ylabel = table.names
    found = ~np.ma.getmaskarray(values)
    with panels(5.6, 4.2, xlabel=xlabel, ylabels={"number": ylabel}, ax=ax) as (drawing, ((axis,),)):
        edges = _plane(axis, x, y)
        picture = axis.pcolormesh(*edges, values, cmap="viridis", gid=f"{table.question} {name}")
        axis.figure.colorbar(picture, ax=axis, label=symbol)
        if found.any():
            low, high = values.min(), values.max()
            levels = [level for level in MaxNLocator(7).tick_values(low, high) if low < level < high]
            if levels:
                lines = axis.contour(x, y, values, levels, colors="white", linewidths=0.9)
                for artist in (lines, *axis.clabel(lines, fontsize=7)):
                    artist.set_path_effects([withStroke(linewidth=2, foreground="0.2")])  # seen on all colours
        absent = (table.status.T == Status.absent) | table.found.T
        _mark(axis, *edges, ~found & absent, f"no {symbol}", {"facecolor": "0.8", "lw": 0})
        _mark(axis, *edges, ~found & ~absent, "the search failed", {**HATCHED, "hatch": "xxxx"})
        _mark(axis, *edges, found & (bars > _PRECISE * np.abs(values)), "error bar above 1 %", HATCHED)
    return drawing


# Colours of a landscape by its label without the part of the steepest descent, and what they mean.
_MINIMA = {
    0: ("#cfe0f1", "semantic minimum"),
    4: ("#9fb9d6", "semantic minimum of two"),
    1: ("#f3d0c7", "positional minimum"),
    5: ("#dd9c8c", "positional minimum of two"),
}
_CHANGES = {"global": "-", "steepest": "--", "several": ":"}  # lines along which a part of a label changes


def landscape_figure(landscapes: Any, ax: Target = None) -> Any:
    """Draw the labels of the population risk over two numbers, and the lines along which they change.

    The colour says which minimum is the global one, and of how many. Where the steepest descent from the origin leads
    to the encodings, cells are hatched.

    Args:
        landscapes: table of landscapes over two axes.
        ax: axes for the one panel "label", see `style.panels`.
    """
    (x, y), label = landscapes.axes, np.nan_to_num(landscapes.values(), nan=-1).astype(int).T
    minima, (xlabel, ylabel) = np.where(label < 0, -1, label & ~2), landscapes.names
    with panels(6.4, 4.6, xlabel=xlabel, ylabels={"label": ylabel}, ax=ax) as (drawing, ((axis,),)):
        edges = _plane(axis, x, y)
        for value, (colour, name) in _MINIMA.items():
            _mark(axis, *edges, minima == value, name, {"facecolor": colour, "lw": 0})
        _mark(axis, *edges, (label >= 0) & (label & 2 > 0), "steepest descent towards the encodings", HATCHED)
        for change, style in _CHANGES.items():
            for points in landscapes.contours(lambda cell, name=change: cell.differences[name]):
                axis.plot(*points.T, color="k", ls=style, lw=1.2, gid=change, path_effects=_RIM)
    return drawing


# Fill colours of regions of wide layers: content is blue, position red, both together violet.
_REGION_COLOURS = {
    "no attention to content": "0.92",
    "content": "#bcd5ea",
    "position, no attention to content": "#f0cdbb",
    "content and position": "#c9b8dc",
}


def region_figure(table: Any, boundaries: Sequence[Any] = (), ax: Target = None) -> Any:
    """Draw the regions of a table of states of a wide layer over two axes. Cells without a state are white.

    Args:
        table: `phases.table.Table` of `wide.solve`.
        boundaries: further boundaries to draw if alpha is an axis: tables of events along the other axis.
        ax: axes for the one panel "region", see `style.panels`.

    Raises:
        InputError: a boundary is in another parameter, or alpha is not an axis.
    """
    (x, y), (xlabel, ylabel), region = table.axes, table.names, table.values("region").T
    _check_boundaries(boundaries, xlabel, ylabel)
    with panels(5.4, 4.2, xlabel=xlabel, ylabels={"region": ylabel}, ax=ax) as (drawing, ((axis,),)):
        edges = _plane(axis, x, y)
        for name, colour in _REGION_COLOURS.items():
            _mark(axis, *edges, region == name, name, {"facecolor": colour, "lw": 0})
        for boundary in boundaries:
            _boundary_line(axis, boundary, alpha_is_x=xlabel == "alpha")
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
    names, unlabelled = ("train_loss", "gen_error"), [""] * (len(rows) - 1)
    ylabels = [label for name in names for label in (name, *unlabelled)]
    with panels(3.2 * len(rows), 5, titles, ylabels=ylabels, **options) as (figure, axes):
        for name, panel_row in zip(names, axes, strict=True):
            value = np.where(exists, [getattr(branch.mean, name) for branch in branches], np.nan)
            bar = np.stack([getattr(branch.stderr, name) for branch in branches])
            for axis, row in zip(panel_row, rows, strict=True):
                for b, branch in enumerate(PAIR):
                    stable = diagram.stable[b, row] | ~exists[b, row]
                    line(axis, x, value[b, row], COLOURS[branch], branch, bar=bar[b, row], stable=stable)
                if np.any(uninformed[row]):
                    level, width = (
                        np.where(uninformed[row], getattr(a, name)[row], np.nan) for a in (minimum.mean, minimum.stderr)
                    )
                    line(axis, x, level, COLOURS["uninformed"], "uninformed", bar=width, dash=DASHES["uninformed"])
                scale(axis, x)
                if name == "gen_error":
                    baseline(axis, x, np.nanmean([branch.gen_error_linear[row] for branch in branches], 0))
    return figure


def _check_boundaries(boundaries: Sequence[Any], x: str, y: str) -> None:
    """Raise an `InputError` unless all boundaries lie in the plane of these axes."""
    for boundary in boundaries:
        require({x, y} == {"alpha", boundary.parameter}, "boundaries", boundary.question, f"in axes {x} and {y}")


def _plane(
    axis: Axes, x: Float[np.ndarray, " columns"], y: Float[np.ndarray, " rows"]
) -> tuple[Float[np.ndarray, " columns+1"], Float[np.ndarray, " rows+1"]]:
    """Set scales and limits for cells around these centres, and return the edges of the cells."""
    edges, scales = (cell_edges(x), cell_edges(y)), ["log" if is_geometric(a) else "linear" for a in (x, y)]
    axis.set(xscale=scales[0], yscale=scales[1], xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]])
    return edges


# Lines over colours are black with a white rim, which is seen on all colours, and on dark ground in the legend.
_RIM = [withStroke(linewidth=2.6, foreground="white")]


def _boundary_line(axis: Axes, boundary: Any, *, alpha_is_x: bool) -> None:
    """Draw a boundary with its bars on a diagram whose alpha axis points to the right (`alpha_is_x`) or upwards."""
    places = (boundary.alpha, boundary.at) if alpha_is_x else (boundary.at, boundary.alpha)
    found, name, is_list = np.isfinite(boundary.alpha), boundary.question, boundary.parameter == MODELS
    style = MARKS.get(name, {"color": OTHER})
    dots = {"color": style["color"], "ls": "none", "ms": 4, "marker": "o" if style.get("ls") == "-" else "D"}
    if is_list:  # there is nothing between its places
        style = dots
    label = SYMBOLS.get(name, name) if found.any() else None
    axis.plot(*places, label=label, gid=name, path_effects=_RIM, **style)
    lone = [run.start for run in runs_of(found) if run.stop - run.start == 1]
    if lone and not is_list:  # a line would not show them
        axis.plot(*(a[lone] for a in places), gid=f"{name}, points", path_effects=_RIM, **dots)
    x, y, bars = (a[found] for a in (*places, boundary.stderr()))
    style = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.8, "label": "_bars"}
    points(axis, x, y, bars, name, along="x" if alpha_is_x else "y", **style)


def _mark(
    axis: Axes,
    x: Float[np.ndarray, " columns"],
    y: Float[np.ndarray, " rows"],
    cells: Bool[np.ndarray, "rows-1 columns-1"],
    label: str,
    style: dict[str, Any],
    *,
    inside: bool = False,
) -> None:
    """Fill or hatch the cells that are True in `cells`, between the edges `x` and `y`.

    Args:
        inside: whether the label stands inside the cells where it fits, instead of in the legend.
    """
    corners = [Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j]) for j, i in np.argwhere(cells)]
    axis.add_collection(PatchCollection(corners, gid=label, **style))
    place = _room_for(axis, cells, label) if inside else None
    if place is not None:
        words: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4, "transform": axis.transAxes}
        rim = withStroke(linewidth=3, foreground=style["facecolor"])  # keeps lines off the letters
        axis.text(*place, label, color="k", gid=f"{label}, name", path_effects=[rim], **words)
    elif corners:
        axis.fill([], [], label=label.replace("\n", " "), **style)  # as a legend cannot show a `PatchCollection`


_FINE = 6  # parts of a cell, along each side, in which the place of a label is looked for


def _room_for(axis: Axes, cells: Bool[np.ndarray, "rows columns"], label: str) -> tuple[float, float] | None:
    """Return where a label is farthest from the ends of a region, in units of the axes; None if it fits nowhere."""
    em, lines, (width, height) = matplotlib.rcParams["font.size"] / 72, label.split("\n"), inches(axis)
    fine = np.pad(np.kron(cells, np.ones((_FINE, _FINE), bool)), 1)
    rows, columns = np.shape(fine)
    share = 0.62 * em * max(map(len, lines)) / width, 1.4 * em * len(lines) / height
    size = [int(np.ceil(part * n)) | 1 for part, n in zip(share[::-1], (rows, columns), strict=True)]
    fits = minimum_filter(fine, size, mode="constant")
    if not fits.any():
        return None
    # Distance to the ends of the region in units of the label, so that wide labels keep from the sides.
    depth = np.where(fits, distance_transform_edt(fine, sampling=[1 / size[0], 1 / size[1]]), 0)
    j, i = np.unravel_index(depth.argmax(), depth.shape)
    return float(i - 0.5) / (columns - 2), float(j - 0.5) / (rows - 2)


def cell_edges(centres: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n+1"]:
    """Return the edges of cells around increasing centres: in the middle, or at geometric means."""
    if is_geometric(centres):
        return np.exp(cell_edges(np.log(centres)))
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middle = 0.5 * (centres[1:] + centres[:-1])
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])


def transition_figure(transition: Any, ax: Target = None, **look: Any) -> Any:
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
    rows = _relative_sensitivities(transition) if transition.sensitivities is not None and points else []
    crossing = transition.event == "alpha_c" and len(points) == 2
    parts = {"losses": f"{LOSS} minus that at {symbol}"} if crossing else {}
    parts |= {"sensitivities": "number $p$ of the model"} if rows else {}
    parts = parts or {"losses": ""}
    titles = [rf"{event}{symbol} = {alpha:.6g} $\pm$ {bar:.1g}", *[""] * (len(parts) - 1)]
    with panels(4.6 * len(parts), 3.6, titles, ylabels=parts, ax=ax, look=look) as (drawing, axes):
        if crossing:
            axis = axes[0, 0]
            alphas = alpha * np.linspace(0.9, 1.1, 21)
            crossing_loss = float(np.mean([float(point.train_loss) for point in points]))
            for point in points:
                slope = float(np.nanmean(point.replicates.train_loss_partials[1]))
                level = float(point.train_loss) - crossing_loss + slope * (alphas - alpha)
                line(axis, alphas, level, COLOURS.get(point.branch, OTHER), point.branch or "any state")
            axis.axvline(alpha, label=symbol, gid=transition.event, **on(axis, {**MARKS["alpha_c"], "lw": 0.9}))
            band = {"color": shown(axis, INK), "lw": 0, "gid": f"{transition.event}, error bars"}
            axis.axvspan(alpha - 2 * bar, alpha + 2 * bar, alpha=0.2, **band)
            axis.set_xlabel(LABELS["alpha"])
        if rows:
            axis = axes[0, -1]
            names, values, bars = zip(*rows, strict=True)
            axis.barh(
                names,
                values,
                xerr=2 * np.array(bars),
                color=OTHER,
                ecolor=shown(axis, INK),
                height=0.6,
                capsize=2,
                gid="sensitivities",
            )
            axis.invert_yaxis()
            axis.axvline(0, color=shown(axis, INK), lw=0.8)
            axis.set_xlabel(rf"relative sensitivity $(p / \alpha)\, \partial \alpha / \partial p$ of {symbol}")
    return drawing


def _relative_sensitivities(transition: Any) -> list[tuple[str, float, float]]:
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
