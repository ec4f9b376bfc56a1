"""Pictures of the best ridge."""

from __future__ import annotations

from typing import Any

import numpy as np

from .style import BASELINE, COLOURS, ERROR, LABELS, OTHER, SYMBOLS, Target, frame, panels, scale

# Markers by the place of the smallest error, each with its meaning.
_MARKERS: dict[str, tuple[dict[str, Any], str]] = {
    "inside": ({"marker": "o", "ms": 4}, "minimum"),
    "transition": ({"marker": "D", "ms": 4.5, "mfc": "white"}, "limit at the transition"),
    "lower end": ({"marker": "v", "ms": 4.5, "mfc": "white"}, "falls to the lower end"),
    "upper end": ({"marker": "^", "ms": 4.5, "mfc": "white"}, "falls to the upper end"),
}


def best_figure(curve: Any, ax: Target = None) -> Any:
    """Plot the best value of a number, and the smallest test error, against alpha or another parameter.

    The colour is that of the branch of the best state. Lines end where it changes its branch: there the best value
    jumps. Bars are two error bars.

    Args:
        curve: `phases.best_curve.BestCurve`.
        ax: axes for the panels "best" and "gen_error", see `style.panels`.
    """
    xlabel = LABELS.get(curve.parameter, curve.parameter)
    ylabels = f"best {LABELS.get(curve.number, curve.number)}", f"smallest {ERROR}"
    options = {"xlabel": xlabel, "ylabels": ylabels, "names": ("best", "gen_error"), "ax": ax}
    with panels(8, 3.6, [""] * 2, **options) as (drawing, axes):
        branches = np.array([point.state.branch if point.states else "" for point in curve.points])
        places = np.array([point.place for point in curve.points])
        numbers = (curve.best, curve.values("stderr")), (curve.gen_error, curve.values("gen_error.stderr"))
        for axis, (values, bars) in zip(axes[0], numbers, strict=True):
            scale(axis, curve.at)
            bars = np.where(np.isfinite(bars), 2 * bars, 0.0)
            for branch in dict.fromkeys(branches[branches != ""]):
                colour, of_branch = COLOURS.get(branch, OTHER), branches == branch
                # The jumps lie between points, so that lines of one branch do not pass over another branch.
                axis.plot(curve.at, np.where(of_branch, values, np.nan), color=colour, lw=1.4, label=branch, gid=branch)
                for place, (marker, _) in _MARKERS.items():
                    here = of_branch & (places == place)
                    if here.any():
                        style = {"ls": "", "color": colour, "capsize": 2, "gid": f"{branch}, {place}", **marker}
                        axis.errorbar(curve.at[here], values[here], bars[here], **style)
            for k, place in enumerate(curve.jumps):
                label = f"{SYMBOLS.get(curve.number, curve.number)} jumps" if k == 0 else None
                axis.axvline(place, color="k", lw=0.8, ls=":", label=label)
        lam, error = axes[0]
        for place in dict.fromkeys(places[places != "nowhere"]):
            marker, meaning = _MARKERS[place]
            lam.plot([], [], ls="", color=OTHER, label=meaning, **marker)
        lam.set_yscale("log")
        baselines = np.array([float(p.state.gen_error_linear) if p.states else np.nan for p in curve.points])
        if np.isfinite(baselines).any():
            error.plot(curve.at, baselines, **BASELINE)
        frame(error)
    return drawing
