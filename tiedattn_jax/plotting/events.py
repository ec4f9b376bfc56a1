"""Pictures of events: a transition, and boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from .style import COLOURS, LABELS, LOSS, MARKS, OTHER, SYMBOLS, Target, line, panels, scale

# Line styles of boundaries by the kind of the event; the colour is that of the branch of the event.
_EVENT_STYLES = {"baseline": MARKS["alpha_l"]["ls"], "instability": ":", "pitchfork": "-."}


def boundary_figure(boundaries: Sequence[Any], ax: Target = None) -> Any:
    """Plot the alpha of events against another parameter, with error bars.

    Between neighbouring points that were found, the lines follow the exact slopes. If these are not known, the lines
    have maxima and minima only at points.

    Args:
        boundaries: `phases.boundaries.Boundary`, all in the same parameter.
        ax: axes for the only panel, "alpha", see `style.panels`.
    """
    parameter = boundaries[0].parameter
    xlabel = LABELS.get(parameter, parameter)
    options = {"xlabel": xlabel, "ylabels": (LABELS["alpha"],), "names": ("alpha",), "ax": ax}
    with panels(5.5, 3.8, **options) as (drawing, ((axis,),)):
        for boundary in boundaries:
            branch, kind = boundary.event.split()[0], boundary.event.split()[-1]
            bars = np.where(np.isfinite(boundary.stderr), 2 * boundary.stderr, 0.0)
            style: dict[str, Any] = {"color": COLOURS.get(branch, "k"), "ls": _EVENT_STYLES.get(kind, "-"), "lw": 1.4}
            style |= MARKS.get(boundary.event, {})
            name = boundary.event
            axis.plot(*_smooth_lines(boundary), label=SYMBOLS.get(name, name), gid=name, **style)
            points: dict[str, Any] = {"fmt": "o", "ms": 2.5, "capsize": 2, "color": style["color"]}
            axis.errorbar(boundary.values, boundary.alpha, yerr=bars, gid=f"{name}, error bars", **points)
        scale(axis, boundaries[0].values)
    return drawing


def _smooth_lines(boundary: Any) -> Float[np.ndarray, "2 n"]:
    """Return many points on smooth lines through the points of a boundary, with NaN between separate lines."""
    parts = [np.empty((2, 0))]
    for run in np.ma.clump_unmasked(np.ma.masked_invalid(boundary.alpha)):
        x, y, slope = (a[run] for a in (boundary.values, boundary.alpha, boundary.slope))
        if x.size > 1:
            curve = CubicHermiteSpline(x, y, slope) if boundary.exact[run].all() else PchipInterpolator(x, y)
            grid = np.linspace(x[0], x[-1], 20 * (x.size - 1) + 1)
            parts += [np.array([grid, curve(grid)]), np.full((2, 1), np.nan)]
    return np.concatenate(parts, axis=1)


def transition_figure(transition: Any, ax: Target = None) -> Any:
    """Plot an event in alpha: the training losses that cross there, and how every number of the model moves it.

    If the event compares two states, the left panel shows the tangents of their training losses minus the loss at which
    they cross. If the transition has sensitivities, the right panel shows the relative ones, ``(p / alpha) d alpha / d
    p``, with bars of two error bars. Numbers p that are zero or do not move the event are left out.

    Args:
        transition: `phases.events.Transition`.
        ax: axes for the panels "losses" and "sensitivities", those of them that there are; see `style.panels`.
    """
    alpha, bar, points = float(transition.alpha), float(transition.stderr), transition.branches
    symbol = SYMBOLS.get(transition.event, r"$\alpha$")
    event = "" if transition.event in SYMBOLS else f"{transition.event}: "
    rows = _relative(transition) if transition.sensitivities is not None else []
    crossing = len(points) == 2
    parts = ["losses"] * crossing + ["sensitivities"] * bool(rows) or ["losses"]
    titles = [rf"{event}{symbol} = {alpha:.6g} $\pm$ {bar:.1g}", *[""] * (len(parts) - 1)]
    with panels(4.6 * len(parts), 3.6, titles, names=parts, ax=ax) as (drawing, axes):
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
            axis.set_ylabel(f"{LOSS} minus that at {symbol}")
        if rows:
            axis = axes[0, -1]
            names, values, bars = zip(*rows, strict=True)
            axis.barh(names, values, xerr=2 * np.array(bars), color=OTHER, height=0.6, capsize=2, gid="sensitivities")
            axis.invert_yaxis()
            axis.axvline(0, color="k", lw=0.8)
            axis.set_xlabel(rf"relative sensitivity $(p / \alpha)\, \partial \alpha / \partial p$ of {symbol}")
            axis.set_ylabel("number $p$ of the model")
    return drawing


def _relative(transition: Any) -> list[tuple[str, float, float]]:
    """Return the relative sensitivities of an event, largest first: names of numbers, values and error bars."""
    rows = []
    for name, value in vars(transition.branches[0].model).items():
        if not hasattr(value, "dtype"):
            continue  # not a number but a part of the model's structure
        slopes, bars = (getattr(t, name) for t in (transition.sensitivities, transition.sensitivities_stderr))
        for index in np.ndindex(np.shape(value)):
            ratio, entry = float(value[index]) / float(transition.alpha), ",".join(map(str, index))
            slope, bar = float(slopes[index]) * ratio, abs(float(bars[index]) * ratio)
            if slope:
                label = SYMBOLS.get(name, name) + (f"[{entry}]" if entry else "")
                rows.append((label, slope, bar if np.isfinite(bar) else 0.0))
    return sorted(rows, key=lambda row: -abs(row[1]))
