"""Pictures of branches: along alpha, or in arclength."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from ..base.types import AnyArray, Number
from ..model.overlaps import BRANCHES
from .optimal import mark_recoveries, optimal_error
from .style import (
    BASELINE,
    COLOURS,
    DASHES,
    ERROR,
    LABELS,
    LOSS,
    MARKS,
    ORDER_COLOURS,
    ORDERS,
    OTHER,
    SYMBOLS,
    TURNS,
    Target,
    frame,
    line,
    panels,
    scale,
)


def branch_figure(
    curves: Sequence[Any],
    alpha_c: Any = None,
    alpha_l: Any = None,
    optimal: Any = None,
    recoveries: Sequence[Any] = (),
    ax: Target = None,
) -> Any:
    """Plot order parameters, training loss and test error of branches against alpha (content of the paper's Fig. 2).

    If another number changes along the curves, the x axis shows that number.

    Dotted stretches are unstable towards an order parameter that the branch lacks.

    Args:
        curves: `phases.follow.Curve`, one for each branch.
        alpha_c, alpha_l: `phases.events.Transition` to mark; one that was not found is left out.
        optimal: the Bayes-optimal learner along alpha, `bayes.fixed_points.BayesPoint` under `vmap`, to draw its error.
        recoveries: its thresholds to mark beside its error, `bayes.recovery.Recovery`.
        ax: axes for the panels "order", "train_loss" and "gen_error", see `style.panels`.
    """
    parameter = curves[0].parameter
    xlabel = LABELS.get(parameter, parameter)
    names = "order", "train_loss", "gen_error"
    options = {"xlabel": xlabel, "ylabels": (ORDERS, LOSS, ERROR), "names": names, "ax": ax}
    with panels(11, 3.6, [""] * 3, **options) as (drawing, axes):
        orders, losses, errors = axes[0]
        for curve in curves:
            name = curve.branch or "any state"
            colour = COLOURS.get(name, OTHER)
            for order, order_colour in ORDER_COLOURS.items():
                if getattr(BRANCHES[curve.branch], order):
                    label = name if order_colour == colour else f"{SYMBOLS[order]}, {name}"
                    _along_alpha(orders, curve, _first_of(order), order_colour, label)
            _along_alpha(losses, curve, lambda s: s.train_loss, colour, name)
            _along_alpha(errors, curve, lambda s: s.gen_error, colour, name)
        baseline = float(curves[0].points[-1].gen_error_linear)
        if np.isfinite(baseline):
            errors.axhline(baseline, **BASELINE)
        if optimal is not None:
            optimal_error(errors, optimal)
        mark_recoveries(errors, recoveries)
        for axis in axes.flat:
            scale(axis, curves[0].at)
            for transition, name in ((alpha_c, "alpha_c"), (alpha_l, "alpha_l")):
                if transition is not None and transition.ok:
                    axis.axvline(float(transition.alpha), label=SYMBOLS[name], gid=name, **{**MARKS[name], "lw": 0.9})
            frame(axis)
    return drawing


def _along_alpha(axis: Axes, curve: Any, get: Callable[[Any], Number], colour: str, label: str) -> None:
    """Draw a number of every `FixedPoint` of a curve, with its error bar; `get` reads the number from a state."""
    value = curve.values(get)
    bar = np.array([float(get(point.stderr)) for point in curve.points])
    stable = np.ones(len(value), bool)
    for order in ORDER_COLOURS:
        if not getattr(BRANCHES[curve.branch], order):
            stable &= curve.values(lambda point, k=order: getattr(point.diagnostics, f"growth_{k}")) < 1
    line(axis, curve.at, value, colour, label, bar=bar, stable=stable, dash=DASHES.get(curve.branch, "-"))


def _first_of(order: str) -> Callable[[Any], Number]:
    """Return a function that reads the first entry of an order parameter from a state."""
    return lambda state: getattr(state.overlaps, order).ravel()[0]


def path_figure(paths: Sequence[Any], ax: Target = None) -> Any:
    """Plot order parameters and training loss along a branch that may turn back, and mark its folds and pitchforks.

    There is one line for every replicate of the averages. Unstable stretches are dotted.

    Args:
        paths: `phases.arclength.BranchPath` of one branch, one for each replicate.
        ax: axes for the panels "order" and "train_loss", see `style.panels`.
    """
    parameter = paths[0].parameter
    xlabel = LABELS.get(parameter, parameter)
    options = {"xlabel": xlabel, "ylabels": (ORDERS, LOSS), "names": ("order", "train_loss"), "ax": ax}
    with panels(7.6, 3.6, ("", ""), **options) as (drawing, axes):
        orders, losses = axes[0]
        labels: set[str | tuple[Axes, str] | None] = set()
        for path in paths:
            # Rotations of the student's columns have eigenvalue one up to rounding, and do not make a state unstable.
            stable = path.eigenvalues[:, 0].real < 1 + 1e-6
            lines: list[Any] = [(losses, path.states.train_loss, [s.train_loss for s in path.fold_states], OTHER, None)]
            kinds = ["fold"] * len(path.folds)
            for order, colour in ORDER_COLOURS.items():
                if np.any(getattr(path.states.overlaps, order)):
                    values, *turns = (_first_of_each(s, order) for s in (path.states, *path.fold_states))
                    kinds = ["pitchfork" if _mirrored(values, a) else k for a, k in zip(turns, kinds, strict=True)]
                    lines.append((orders, values, turns, colour, SYMBOLS[order]))
            for axis, values, turns, colour, name in lines:
                line(axis, path.values, values, colour, None if name in labels else name, stable=stable)
                labels.add(name)
                for fold, value, kind in zip(path.folds, turns, kinds, strict=True):
                    label = None if (axis, kind) in labels else kind
                    axis.plot(fold, value[0], ls="", color=colour, label=label, gid=kind, **TURNS[kind])
                    labels.add((axis, kind))
    return drawing


def _first_of_each(states: Any, order: str) -> Float[AnyArray, " n"]:
    """Return the first entry of an order parameter in every state."""
    values = getattr(states.overlaps, order)
    return np.reshape(values, (len(values), -1))[:, 0]


def _mirrored(values: Float[AnyArray, " n"], turn: Float[AnyArray, "1"]) -> bool:
    """Return whether an order parameter changes sign along a path within two steps that contain a turn."""
    windows = np.stack([values[:-2], values[1:-1], values[2:]])
    low, high = windows.min(0), windows.max(0)
    return bool(np.any((low <= 0) & (0 <= high) & (low <= turn) & (turn <= high)))
