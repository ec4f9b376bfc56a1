"""`tiedattn transition`: alpha at which the global minimum changes its mechanism, and both branches around it."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..averages.recipes import SIZES
from ..base.files import csv_of
from ..bayes.fixed_points import bayes
from ..bayes.thresholds import Recovery, perfect_recovery, weak_recovery
from ..model.overlaps import PAIR
from ..phases.ends import BranchEnd, branch_ends
from ..phases.events import Transition
from ..phases.follow import Curve
from ..phases.sweep import sweep
from ..phases.transitions import critical_alpha, linear_crossing
from ..plotting.theory import branch_figure
from .options import MODEL, OPTIMAL, averages, model_of, nodes_of, subcommand
from .report import Report, png, progress_bars

CURVE_POINTS = 23
CURVE_RANGE = (0.05, 2.25)


def register(commands: argparse._SubParsersAction) -> None:
    text = "find alpha_c and alpha_l, and follow both branches"
    subcommand(commands, "transition", run, text, {**MODEL, **averages("transition"), **OPTIMAL})


def run(args: argparse.Namespace) -> Report:
    """Follow both branches, find their ends, alpha_c and alpha_l."""
    model = model_of(args)
    nodes, coarse_nodes = nodes_of(args, model), nodes_of(args, model, SIZES["curve"])
    alphas = np.linspace(*CURVE_RANGE, CURVE_POINTS)
    curves: list[Curve] = []
    ends: dict[str, list[BranchEnd]] = {}
    with progress_bars(args, "solve") as stage:
        recoveries: list[Recovery] = []
        if args.optimal:
            stage("optimal learner")(0, 1)
            recoveries = [weak_recovery(model), perfect_recovery(model)]
            places = np.sort([*alphas, *(float(recovery.alpha) for recovery in recoveries)])  # the curve's corners, too
            optimal = jax.vmap(lambda alpha: bayes(model, alpha))(jnp.asarray(places, model.lam.dtype))
        for branch in PAIR:
            curve = sweep(model, alphas, branch, coarse_nodes, progress=stage(f"{branch} branch"))
            assert isinstance(curve, Curve)
            curves.append(curve)
            stage(f"ends of the {branch} branch")(0, 1)
            ends[branch] = branch_ends(curves[-1], coarse_nodes)
        stage("alpha_c")(0, 1)
        critical = critical_alpha(model, nodes, start=curves)
        stage("alpha_l")(0, 1)
        crossing = linear_crossing(model, critical, nodes, start=curves)
    summaries = [result.summary() for result in (critical, crossing, *recoveries)]
    text = "\n\n".join([*summaries, "\n".join(_end_lines(ends, curves))])
    files = {}
    if args.out is not None:
        full_curves = [_to_its_ends(curve, ends[str(curve.branch)]) for curve in curves]
        figure = branch_figure(full_curves, critical, crossing, optimal if args.optimal else None, recoveries)
        files = {"transition.png": png(figure), "curves.csv": _table(curves)}
        text += f"\nFigure, table and JSON: {args.out / 'transition.png'}, curves.csv, transition.json"
    report = transition_report(critical, crossing, ends) | {r.event: float(r.alpha) for r in recoveries}
    return Report(report, text, files, bool(critical.ok), nodes)


def _to_its_ends(curve: Curve, ends: list[BranchEnd]) -> Curve:
    """Add the states at its ends to a curve, for a picture."""
    states = [state for end in ends if end.transition.ok for state in end.transition.branches]
    return Curve(curve.branch, tuple(sorted((*curve.points, *states), key=lambda point: float(point.alpha))))


def transition_report(critical: Transition, crossing: Transition, ends: dict[str, list[BranchEnd]]) -> dict[str, Any]:
    """Return the JSON object of `tiedattn transition`."""
    # alpha_l depends on which minimum is global, and that is not known without alpha_c.
    events = {
        "alpha_c": critical.to_dict() if critical.ok else {},
        "alpha_l": crossing.to_dict() if critical.ok and crossing.ok else {},
    }
    report: dict[str, Any] = {}
    for name, numbers in events.items():
        report |= {name: numbers.get("alpha"), f"{name}_stderr": numbers.get("stderr")}
    for kind in ("rs_shift", "rs_shift_stderr"):
        report[f"alpha_c_{kind}"] = events["alpha_c"].get(kind)
    main_ends = {branch: main_end(end_list) for branch, end_list in ends.items()}
    report["spinodals"] = {branch: None if end is None else end.to_dict() for branch, end in main_ends.items()}
    report["ends"] = {branch: [end.to_dict() for end in end_list] for branch, end_list in ends.items()}
    for kind in ("sensitivities", "sensitivities_stderr"):
        report[kind] = {name: _scalars(numbers.get(kind)) for name, numbers in events.items()}
    report["at_alpha_c"] = {b.branch: b.to_dict() for b in critical.branches}
    report["status"], report["reason"] = critical.status_name, critical.reason
    return report


def _scalars(numbers: dict[str, Any] | None) -> dict[str, float] | None:
    """Keep the entries that are single numbers; these are the options of the command line."""
    return numbers and {name: value for name, value in numbers.items() if isinstance(value, float)}


def main_end(ends: list[BranchEnd]) -> BranchEnd | None:
    """Return the end next to the stable range: the highest lower end, else the lowest upper end; None without ends."""
    lower = [e for e in ends if e.side == "lower"]
    return max(lower, key=lambda e: e.alpha) if lower else min(ends, key=lambda e: e.alpha, default=None)


def _end_lines(ends: dict[str, list[BranchEnd]], curves: list[Curve]) -> list[str]:
    """Describe how the branches end, in one line for each end."""
    lines = []
    for curve in curves:
        end_list = ends[str(curve.branch)]
        lines += [f"{curve.branch} branch, {end.describe().what}" for end in end_list]
        if not end_list:
            range_text = f"{curve.alphas[0]:g} <= alpha <= {curve.alphas[-1]:g}"
            lines.append(f"{curve.branch} branch: neither end nor loss of stability in {range_text}")
    return lines


def _table(curves: list[Curve]) -> bytes:
    """Return the curves as CSV: `FixedPoint.to_dict` of every point, under the name of the branch that was followed."""
    rows = []
    for curve in curves:
        for report in curve.to_dict()["points"]:
            bars = {f"{name}_stderr": bar for name, bar in report.pop("stderr").items()}
            del report["affected_by_jumps"]
            rows.append({**report, "branch": curve.branch, **bars})
    return csv_of(rows)
