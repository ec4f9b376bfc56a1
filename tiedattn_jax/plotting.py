"""Figures, drawn from results; nothing is computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from .branches import Curve
    from .transitions import Transition

COLOURS = {"positional": "#c8552b", "semantic": "#1f6fb2"}


def branch_figure(
    curves: dict[str, Curve], alpha_c: Transition | None = None, alpha_l: Transition | None = None
) -> Figure:
    """Order parameters, training loss and test error of the branches against alpha (the content of the paper's Fig. 2).

    Dotted stretches are unstable towards the other branch's order parameter. Bands are two error bars wide.

    Args:
        curves: of `branches.sweep`, by the name of their branch.
        alpha_c, alpha_l: transitions to mark.
    """
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        overlaps, losses, errors = figure.subplots(1, 3)
        for name, curve in curves.items():
            colour = COLOURS[name]
            order = "m" if name == "positional" else "theta"
            _line(
                overlaps,
                curve,
                lambda p, o=order: getattr(p.overlaps, o).ravel()[0],
                lambda p, o=order: getattr(p.stderr.overlaps, o).ravel()[0],
                colour,
                r"$m$, positional" if order == "m" else r"$\theta$, semantic",
            )
            _line(losses, curve, lambda p: p.train_loss, lambda p: p.stderr.train_loss, colour, name)
            _line(errors, curve, lambda p: p.gen_error, lambda p: p.stderr.gen_error, colour, name)
        baseline = float(next(iter(curves.values())).points[-1].gen_error_linear)
        if np.isfinite(baseline):
            errors.axhline(baseline, color="0.45", lw=1, ls="-.", label="linear baseline")
        for axis, title in (
            (overlaps, "order parameters"),
            (losses, "training loss / d"),
            (errors, r"test error $\epsilon_g$"),
        ):
            axis.set_title(title, loc="left")
            axis.set_xlabel(r"sample complexity $\alpha = n/d$")
            for transition, text, style in ((alpha_c, r"$\alpha_c$", "--"), (alpha_l, r"$\alpha_l$", ":")):
                if transition is not None and int(transition.status) <= 1:
                    axis.axvline(float(transition.alpha), color="0.2", lw=0.9, ls=style, label=text)
            axis.set_ylim(bottom=0)
            axis.set_xlim(left=0)
            axis.legend(frameon=False, fontsize=8)
    return figure


def _line(axis: Any, curve: Curve, get: Any, bar: Any, colour: str, label: str) -> None:
    alpha, value, width = curve.alphas, curve.values(get), 2 * curve.values(bar)
    other = "m" if curve.branch == "semantic" else "theta"
    stable = curve.values(lambda p: getattr(p.diagnostics, f"growth_{other}")) < 1
    axis.plot(alpha, np.where(stable, value, np.nan), color=colour, lw=1.6, label=label)
    axis.plot(alpha, np.where(stable & np.roll(stable, 1), np.nan, value), color=colour, lw=1.2, ls=":")
    if np.all(np.isfinite(width[np.isfinite(value)])):
        axis.fill_between(alpha, value - width, value + width, color=colour, alpha=0.2, lw=0)
