"""Pictures along one axis: branches, events, best values and other numbers of tables, and the Bayes-optimal learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from ..base.arrays import AnyArray, Number
from ..base.errors import require
from ..model.overlaps import BRANCHES
from ..model.parameters import scalar_parameters
from .style import (
    BESIDE,
    COLOURS,
    DASHES,
    ERROR,
    GROUND,
    INK,
    LABELS,
    LOSS,
    MARKS,
    ORDER_COLOURS,
    ORDERS,
    OTHER,
    ROOM,
    SYMBOLS,
    TURNS,
    Target,
    baseline,
    distinct,
    frame,
    line,
    mark,
    on,
    panels,
    points,
    scale,
    shown,
)


def branch_figure(
    *curves: Any,
    alpha_c: Any = None,
    alpha_l: Any = None,
    optimal: Any = None,
    recoveries: Sequence[Any] = (),
    ax: Target = None,
    **look: Any,
) -> Any:
    """Plot order parameters, training loss and test error of branches against alpha (content of the paper's Fig. 2).

    If another number changes along the curves, the x axis shows that number.

    Dotted stretches are unstable towards an order parameter that the branch lacks. Curves of one branch have shades of
    one colour, and are named by the numbers in which their models differ.

    Args:
        curves: tables of states along the same axis.
        alpha_c, alpha_l: `theory.quantities.Quantity` to mark; one that was not found is left out.
        optimal: the Bayes-optimal learner along alpha, `bayes.fixed_points.BayesPoint` under `vmap`, to draw its error.
        recoveries: its thresholds to mark beside its error, `theory.quantities.Quantity`.
        ax: axes for the panels "order", "train_loss" and "gen_error", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    labels = {"order": ORDERS, "train_loss": LOSS, "gen_error": ERROR}
    with panels(11, 3.6, xlabel=curves[0].parameter, ylabels=labels, ax=ax, look=look) as (drawing, axes):
        orders, losses, errors = axes[0]
        differences = _differences(curves)
        for curve, difference in zip(curves, differences, strict=True):
            branch, stable = curve.question or "any state", _stability(curve)
            name, colour = ", ".join(filter(None, (branch, difference))), COLOURS.get(branch, OTHER)
            lines: list[Any] = [(losses, "train_loss", colour, name), (errors, "gen_error", colour, name)]
            for order, order_colour in ORDER_COLOURS.items():
                if getattr(BRANCHES[curve.question], order):
                    label = name if order_colour == colour else f"{SYMBOLS[order]}, {name}"
                    lines.append((orders, _first_of(order), order_colour, label))
            for axis, number, line_colour, label in lines:
                style = {"bar": curve.stderr(number), "stable": stable, "dash": DASHES.get(curve.question, "-")}
                line(axis, curve.at, curve.values(number), line_colour, label, **style)
        linear = {d: curve for curve, d in zip(curves[::-1], differences[::-1], strict=True)}
        for difference, curve in reversed(linear.items()):
            baseline(errors, curve.at, np.array([row["gen_error_linear"] for row in curve.table()]), difference)
        if optimal is not None:
            optimal_error(errors, optimal, beside=True)
        for recovery in recoveries:
            mark(errors, recovery.event, recovery.alpha)
        for axis in axes.flat:
            scale(axis, curves[0].at)
            for transition, name in ((alpha_c, "alpha_c"), (alpha_l, "alpha_l")):
                if transition is not None and transition.ok:
                    mark(axis, name, transition.alpha)
            frame(axis)
    return drawing


def _differences(curves: Sequence[Any]) -> list[str]:
    """Return in what the models of several curves differ, in words; the number along the axis does not count."""
    if len(curves) == 1:
        return [""]
    numbers = [scalar_parameters(curve.points[0].model) for curve in curves]
    names = [name for name in numbers[0] if name != curves[0].parameter and len({n.get(name) for n in numbers}) > 1]
    return [", ".join(f"{SYMBOLS.get(name, name)} = {n[name]:.3g}" for name in names if name in n) for n in numbers]


def _first_of(order: str) -> Callable[[Any], Number]:
    """Return a function that reads the first entry of an order parameter from a state."""
    return lambda state: getattr(state.overlaps, order).ravel()[0]


def _stability(curve: Any) -> Bool[np.ndarray, " n"]:
    """Return which states of a table are stable towards the order parameters that their branch lacks."""
    lacking = [order for order in ORDER_COLOURS if not getattr(BRANCHES[curve.question], order)]
    growths = [curve.values(lambda point, k=order: getattr(point.diagnostics, f"growth_{k}")) for order in lacking]
    return np.all([growth < 1 for growth in growths], axis=0) if lacking else np.full(len(curve.at), True)


def path_figure(paths: Sequence[Any], ax: Target = None, **look: Any) -> Any:
    """Plot order parameters and training loss along a branch that may turn back, and mark its folds and pitchforks.

    There is one line for every replicate of the averages. Unstable stretches are dotted.

    Args:
        paths: `phases.branch_path.BranchPath` of one branch, one for each replicate.
        ax: axes for the panels "order" and "train_loss", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    ylabels = {"order": ORDERS, "train_loss": LOSS}
    with panels(7.6, 3.6, xlabel=paths[0].parameter, ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        orders, losses = axes[0]
        for k, path in enumerate(paths):
            # Rotations of the student's columns have eigenvalue one up to rounding, and do not make a state unstable.
            stable = path.eigenvalues[:, 0].real < 1 + 1e-6
            forks, folds = path.pitchfork_states, path.fold_states
            turns = [*((alpha, "fold") for alpha in path.folds), *((alpha, "pitchfork") for alpha in path.pitchforks)]
            losses_there = [s.train_loss for s in (*folds, *forks)]
            lines: list[Any] = [(losses, path.states.train_loss, losses_there, OTHER, None)]
            for order, colour in ORDER_COLOURS.items():
                if np.any(getattr(path.states.overlaps, order)):
                    values, *orders_there = (_first_of_each(s, order) for s in (path.states, *folds, *forks))
                    lines.append((orders, values, orders_there, colour, SYMBOLS[order]))
            for axis, values, values_there, colour, name in lines:
                line(axis, path.values, values, colour, name if k == 0 else None, stable=stable)
                for (place, kind), value in zip(turns, values_there, strict=True):
                    axis.plot(place, value[0], ls="", color=colour, label=kind, gid=kind, **on(axis, TURNS[kind]))
    return drawing


def _first_of_each(states: Any, order: str) -> Float[AnyArray, " n"]:
    """Return the first entry of an order parameter in every state."""
    values = getattr(states.overlaps, order)
    return np.reshape(values, (len(values), -1))[:, 0]


# Markers by the place of the smallest error, each with its meaning.
_MARKERS: dict[str, tuple[dict[str, Any], str]] = {
    "inside": ({"marker": "o", "ms": 4}, "minimum"),
    "transition": ({"marker": "D", "ms": 4.5, "mfc": GROUND}, "limit at the transition"),
    "lower end": ({"marker": "v", "ms": 4.5, "mfc": GROUND}, "falls to the lower end"),
    "upper end": ({"marker": "^", "ms": 4.5, "mfc": GROUND}, "falls to the upper end"),
}


def best_figure(table: Any, ax: Target = None, **look: Any) -> Any:
    """Plot the best value of a number, and the smallest test error, against alpha or another parameter.

    The colour is that of the branch of the best state. Between points on different branches the best value jumps; these
    intervals are grey. Bars are two error bars.

    Args:
        table: table of best values along one axis.
        ax: axes for the panels "best" and "gen_error", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    number = table.points[0].name
    ylabels = {"best": f"best {LABELS.get(number, number)}", "gen_error": f"smallest {ERROR}"}
    with panels(8, 3.6, xlabel=table.parameter, ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        rows = table.table()
        branches, places = (np.array([row[name] for row in rows]) for name in ("branch", "place"))
        columns = ((table.values(name), table.stderr(name)) for name in ("value", "gen_error"))
        for axis, (values, bars) in zip(axes[0], columns, strict=True):
            scale(axis, table.at)
            for branch in dict.fromkeys(branches[branches != ""]):
                colour, of_branch = COLOURS.get(branch, OTHER), branches == branch
                # Lines of one branch do not pass over another branch.
                axis.plot(table.at, np.where(of_branch, values, np.nan), color=colour, lw=1.4, label=branch, gid=branch)
                for place, (marker, _) in _MARKERS.items():
                    here = of_branch & (places == place)
                    if here.any():
                        style = {"ls": "", "color": colour, "capsize": 2, **marker}
                        points(axis, table.at[here], values[here], bars[here], f"{branch}, {place}", **style)
            for interval in table.jumps:
                label = f"{SYMBOLS.get(number, number)} jumps in between"
                axis.axvspan(*interval, color=shown(axis, INK), lw=0, alpha=0.1, label=label, gid=f"jump{BESIDE}")
        lam, error = axes[0]
        for place in dict.fromkeys(places[~np.isin(places, ["", "nowhere"])]):
            marker, meaning = _MARKERS[place]
            lam.plot([], [], ls="", color=OTHER, label=meaning, **on(lam, marker))
        lam.set_yscale("log")
        baseline(error, table.at, table.values("state.gen_error_linear"))
        frame(error)
    return drawing


# Line styles of boundaries by the kind of the event; the colour is that of the branch of the event.
_EVENT_STYLES = {"baseline": MARKS["alpha_l"]["ls"], "instability": ":", "pitchfork": "-."}


def boundary_figure(*boundaries: Any, ax: Target = None, **look: Any) -> Any:
    """Plot the alpha of events against another parameter, with error bars.

    Between neighbouring points that were found, the lines follow the exact slopes. If these are not known, the lines
    have maxima and minima only at points.

    Args:
        boundaries: tables of events, all along the same axis.
        ax: axes for the only panel, "alpha", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    xlabel, ylabels = boundaries[0].parameter, {"alpha": "alpha"}
    with panels(5.5, 3.8, xlabel=xlabel, ylabels=ylabels, ax=ax, look=look) as (drawing, ((axis,),)):
        for boundary in boundaries:
            branch, kind = boundary.question.split()[0], boundary.question.split()[-1]
            style: dict[str, Any] = {"color": COLOURS.get(branch, INK), "ls": _EVENT_STYLES.get(kind, "-"), "lw": 1.4}
            style |= MARKS.get(boundary.question, {})
            style["color"], label = distinct(axis, style["color"], SYMBOLS.get(boundary.question, boundary.question))
            name, colour = boundary.question, style["color"]
            axis.plot(*_smooth_lines(boundary), label=label, gid=name, **style)
            dots = boundary.at, boundary.alpha, boundary.stderr()
            points(axis, *dots, name, fmt="o", ms=2.5, capsize=2, color=colour)
        scale(axis, boundaries[0].at)
    return drawing


def _smooth_lines(boundary: Any) -> Float[np.ndarray, "2 n"]:
    """Return many points on smooth lines through the points of a boundary, with NaN between separate lines."""
    parts = [np.empty((2, 0))]
    for run in np.ma.clump_unmasked(np.ma.masked_invalid(boundary.alpha)):
        x, y, slope = (a[run] for a in (boundary.at, boundary.alpha, boundary.slope))
        if x.size > 1:
            curve = CubicHermiteSpline(x, y, slope) if boundary.exact[run].all() else PchipInterpolator(x, y)
            grid = np.linspace(x[0], x[-1], 20 * (x.size - 1) + 1)
            parts += [np.array([grid, curve(grid)]), np.full((2, 1), np.nan)]
    return np.concatenate(parts, axis=1)


def table_figure(table: Any, number: str = "", ax: Target = None, **look: Any) -> Any:
    """Plot a number of a table against its only axis, with error bars.

    Args:
        table: `phases.table.Table`.
        number: name of the number, by default that which was asked for; for a landscape the risks of both candidates.
        ax: axes for the only panel, "number", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    names = [number] if number else list(table.form.drawn) or [table.main]
    ylabels = {"number": "population risk" if len(names) > 1 else names[0]}
    with panels(5.5, 3.8, xlabel=table.parameter, ylabels=ylabels, ax=ax, look=look) as (drawing, ((axis,),)):
        for name in names:
            colour = COLOURS.get(name, COLOURS.get(table.question, OTHER))
            line(axis, table.at, table.values(name), colour, name, bar=table.stderr(name))
        scale(axis, table.at)
    return drawing


def optimal_figure(
    points: Any,
    recoveries: Sequence[Any] = (),
    spectral: Float[AnyArray, " alphas"] | None = None,
    ax: Target = None,
    **look: Any,
) -> Any:
    """Plot overlap and test error of the optimal learner against alpha.

    In a hard phase the state that message passing reaches from a random start is drawn as well.

    Args:
        points: `bayes.fixed_points.BayesPoint` under `vmap` along alpha.
        recoveries: thresholds to mark, `theory.quantities.Quantity`.
        spectral: cosines of the spectral start with the teacher at the same alphas, to draw their squares.
        ax: axes for the panels "overlap" and "gen_error", see `style.panels`.
        look: options of the lines, see `style.panels`.

    Raises:
        InputError: there is one alpha only.
    """
    requirement = "an axis: call jax.vmap(lambda a: bayes(model, a))(alphas)"
    require(np.ndim(points.alpha) == 1, "alpha", points.alpha, requirement)
    ylabels = {"overlap": "overlap $q / \\rho$", "gen_error": ERROR}
    with panels(7.6, 3.6, xlabel="alpha", ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        overlap, error = axes[0]
        line(overlap, points.alpha, _relative_overlap(points.replicates), COLOURS["optimal"], "optimal learner")
        if np.any(points.hard):
            other = np.where(points.hard, _relative_overlap(points.other), np.nan)
            line(overlap, points.alpha, other, OTHER, "hard phase: state from the other start", dash="--")
        if spectral is not None:
            line(overlap, points.alpha, np.square(spectral), COLOURS["spectral"], "spectral start")
        optimal_error(error, points)
        for axis in axes[0]:
            scale(axis, points.alpha)
            for recovery in recoveries:
                mark(axis, recovery.event, recovery.alpha)
            frame(axis)
    return drawing


def _relative_overlap(state: Any) -> Float[np.ndarray, " alphas"]:
    """Return q / rho, a mean over replicates, tokens and columns."""
    q, rho = (np.trace(np.mean(a, 1), axis1=-2, axis2=-1).mean(-1) for a in (state.q, state.q + state.V))
    return np.asarray(q / rho)


def optimal_error(axis: Axes, points: Any, *, beside: bool = False) -> None:
    """Draw the test error of the optimal learner, with its error bar; alphas of `points` may be in any order."""
    order = np.argsort(points.alpha)
    alpha, error, bar = (np.asarray(a)[order] for a in (points.alpha, points.gen_error, points.stderr.gen_error))
    line(axis, alpha, error, COLOURS["optimal"], "optimal learner", bar=bar, beside=beside)


_NO_ZEROS = 1e-6  # share of the eigenvalues below which none is said to be zero
_SPIKE = 0.1  # a maximum below this share of the largest eigenvalue is a spike at zero
_HIGH = 3.0  # a spike above this many times the density elsewhere is cut off


def spectrum_figure(spectrum: Any, ax: Target = None, **look: Any) -> Any:
    """Plot the density of the eigenvalues or singular values of a wide layer's trained matrix, and the share of zeros.

    The share is the height of the bar at zero, in units of the height of the panel. A spike of the density near zero is
    cut off, and the legend says how high it is.

    Args:
        spectrum: `wide.states.WideSpectrum`.
        ax: axes to draw on instead of a new figure.
        look: options of the lines, see `style.panels`.
    """
    zeros, colour = float(spectrum.zeros), COLOURS["semantic"]
    label = f"density of {1 - zeros:.3g} of all {spectrum.noun}"
    values, density = np.asarray(spectrum.values), np.asarray(spectrum.density)
    peak, body = (np.max(density[part], initial=0.0) for part in (values >= 0, values > _SPIKE * float(spectrum.edge)))
    has_spike = bool(peak > _HIGH * body > 0)
    xlabel, ylabels = f"{spectrum.noun} of $S$", {"density": "density"}
    with panels(3.8, 3.4, xlabel=xlabel, ylabels=ylabels, ax=ax, look=look) as (drawing, ((axis,),)):
        line(axis, values, density, colour, label + f", up to {peak:.2g}" * has_spike)
        is_free = axis.get_autoscaley_on()
        frame(axis)
        if has_spike and is_free:
            axis.set_ylim(0, (1 + ROOM) * body, auto=True)
        if zeros > _NO_ZEROS:
            style: dict[str, Any] = {"color": shown(axis, INK), "lw": 3, "label": f"{zeros:.3g} of all are zero"}
            axis.axvline(0.0, ymax=zeros, gid="zeros", clip_on=False, **style)
    return drawing


def wide_figure(table: Any, ax: Target = None, **look: Any) -> Any:
    """Plot what the states of a wide layer have learned along an axis: overlaps, the spectrum, and the errors.

    Errors have a logarithmic axis if all are positive: the test error is much smaller than the distance.

    Args:
        table: `phases.table.Table` of states along one axis.
        ax: axes for the panels "overlaps", "spectrum" and "errors", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    ylabels = {"overlaps": "overlaps over $\\rho$", "spectrum": "spectrum of $S$", "errors": "errors"}
    rho = table.values(lambda cell: cell.model.teacher.rho)
    # One legend explains all panels, so that no two of them share a line.
    spectrum, error = COLOURS["spectral"], COLOURS["mixed"]
    position = "shift of own scores by position $/ \\sqrt{\\rho}$"
    # Panel, number, label, colour, dash and unit. Only some layers have a position.
    lines: list[tuple[str, str, str, str, str, Any]] = [
        ("overlaps", "q", "$q$", OTHER, "-", rho),
        ("overlaps", "m", "$m$", COLOURS["semantic"], "-", rho),
        ("overlaps", "position", position, COLOURS["positional"], "-", rho**0.5),
        ("spectrum", "share", "rank of $S$ over $d$", spectrum, "-", 1.0),
        ("spectrum", "trace", "trace norm of $S$ over $d$", spectrum, "--", 1.0),
        ("errors", "distance", "distance to the teacher $/ \\rho$", error, "--", rho),
        ("errors", "gen_error", ERROR, error, "-", 1.0),
    ]
    known = table.table()[0]
    with panels(11, 3.6, xlabel=table.parameter, ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        panel = dict(zip(ylabels, axes[0], strict=True))
        for part, name, label, colour, dash, unit in lines:
            if name in known:
                values, bar = table.values(name) / unit, table.stderr(name) / unit
                line(panel[part], table.at, values, colour, label, bar=bar, dash=dash)
        if not np.any([table.values(name) <= 0 for name in ("distance", "gen_error")]):
            panel["errors"].set_yscale("log")
        for axis in axes[0]:
            scale(axis, table.at)
            frame(axis)
    return drawing
