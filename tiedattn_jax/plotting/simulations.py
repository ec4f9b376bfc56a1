"""Pictures of simulations at finite size."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from ..base.types import AnyArray
from ..model.overlaps import PAIR
from .style import COLOURS, LABELS, LOSS, OTHER, ROOM, Target, line, panels

_THEORY = "theory"  # the name, in legends, of what is drawn beside simulations


def training_figure(trainings: dict[str, Any], ax: Target = None) -> Any:
    """Plot training loss and gradient, step by step.

    Args:
        trainings: `finite.training.Training` by name; one with the name of a branch has the colour of the branch.
        ax: axes for the panels "train_loss" and "gradient_norm", see `style.panels`.
    """
    ylabels, names = (LOSS, "largest entry of the gradient"), ("train_loss", "gradient_norm")
    with panels(8, 3.6, ["", ""], xlabel="step", ylabels=ylabels, names=names, ax=ax) as (drawing, axes):
        loss, gradient = axes[0]
        for name, training in trainings.items():
            _by_step(loss, training.losses, name)
            _by_step(gradient, training.gradient_norms, name)
        gradient.set_yscale("log")
        for axis in axes[0]:
            axis.set_xscale("symlog", linthresh=1)
            axis.set_xlim(left=0)
    return drawing


def _by_step(axis: Axes, values: Float[AnyArray, " n"], name: str, first: int = 0) -> None:
    """Draw a number of every step, with NaN for steps that were not taken; the first step has index `first`."""
    steps = np.flatnonzero(np.isfinite(values))
    dash: Any = (0, (4, 2)) if name == _THEORY else "-"
    line(axis, first + steps, np.asarray(values)[steps], COLOURS.get(name, OTHER), name, dash=dash)


def gamp_figure(runs: dict[str, Any], theory: Any = None, ax: Target = None) -> Any:
    """Plot order parameters of the estimate and residual of message passing, iteration by iteration.

    The order parameters are means over the tokens of tr q and of the norms of theta and m.

    Args:
        runs: `finite.message_passing.GAMP` by name; one with the name of a branch has the colour of the branch.
        theory: `theory.state_evolution.StateEvolution` to draw beside them, dashed.
        ax: axes for the panels "q", "theta", "m" and "residual", see `style.panels`.
    """
    histories = {name: run.history for name, run in runs.items()}
    if theory is not None:
        histories[_THEORY] = theory.history
    ylabels = [LABELS["q"], LABELS["theta"], LABELS["m"], "residual of the step"]
    names = "q", "theta", "m", "residual"
    with panels(12, 3.6, [""] * 4, xlabel="iteration", ylabels=ylabels, names=names, ax=ax) as (drawing, axes):
        q, theta, m, residual = axes[0]
        for name, x in histories.items():
            _by_step(q, np.trace(x.q, axis1=2, axis2=3).mean(axis=1), name)
            _by_step(theta, np.linalg.norm(x.theta, axis=(2, 3)).mean(axis=1), name)
            _by_step(m, np.linalg.norm(x.m, axis=2).mean(axis=1), name)
        for name, run in runs.items():
            _by_step(residual, run.residuals, name, first=1)
        residual.set_yscale("log")
    return drawing


def instances_figure(instances: Any, ax: Target = None) -> Any:
    """Plot every instance against the theory at its own teacher, in the colour of its branch.

    Points on the diagonal line agree with the theory. Bars are two error bars of the theory. Hollow points ran out of
    steps. Instances that are unsettled or ended on neither branch have no theory and are left out.

    Args:
        instances: `finite.instances.Instances`, with its theory.
        ax: axes for the panels "train_loss", "gen_error", "q", "theta" and "m", see `style.panels`.
    """
    names = "train_loss", "gen_error", "q", "theta", "m"
    titles = [LABELS[name] for name in names]
    with panels(13, 3.4, titles, xlabel="theory", names=names, ax=ax) as (drawing, axes):
        for axis, name in zip(axes[0], names, strict=True):
            measured, theory, bars = (
                np.asarray(getattr(part, name))
                for part in (instances.simulation, instances.theory, instances.theory_stderr)
            )
            for branch in PAIR:
                on_branch = instances.usable & (instances.branch == branch)
                for mask, fill in ((on_branch & instances.ok, None), (on_branch & ~instances.ok, "white")):
                    style: dict[str, Any] = {"fmt": "o", "ms": 4, "mfc": fill, "color": COLOURS[branch]}
                    label = branch if fill is None else f"{branch}, out of steps"
                    if mask.any():
                        widths = np.where(np.isfinite(bars[mask]), 2 * bars[mask], 0.0)
                        axis.errorbar(theory[mask], measured[mask], xerr=widths, label=label, gid=label, **style)
            axis.axline((0, 0), slope=1, color=OTHER, lw=0.8, zorder=0)
            coordinates = np.concatenate([measured, theory])[
                np.tile(instances.usable & np.isin(instances.branch, PAIR), 2)
            ]
            if coordinates.size:
                low, high = np.nanmin(coordinates), np.nanmax(coordinates)
                margin = ROOM * (high - low or 1)
                axis.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
        axes[0, 0].set_ylabel("instance")
    return drawing
