"""`tiedattn transition`: where the global minimum changes its mechanism, and both branches around it."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ..averages.sizes import SIZES
from ..overlaps import PAIR
from ..phases.ends import BranchEnd, branch_ends
from ..phases.events import Transition
from ..phases.follow import Curve, sweep
from ..phases.transitions import critical_alpha, linear_crossing
from ..plotting import branch_figure
from ..results import Status
from ..store import csv_of
from .options import MODEL, NUMBERS, averages, model_of, nodes_of, subcommand
from .report import Report, png, progress_bars, table, with_error
from .solve import state_report, state_text

CURVE_POINTS = 23
CURVE_RANGE = (0.05, 2.25)
MEANING = {
    "alpha_c": "positional minimum below, semantic above",
    "alpha_l": "attention beats the linear baseline above",
}
Found = dict[str, Transition | None]  # by name, None where there is none
# How a branch ends, in words.
ENDS = {
    "pitchfork": "ends at {where}: {order} falls continuously to zero",
    "instability": "turns unstable towards {order} at {where}",
    "fold": "ends at {where} with {order} finite",
}


def register(commands: Any) -> None:
    """Add the subcommand."""
    text = "find the transition, draw both branches"
    subcommand(commands, "transition", run, text, {**MODEL, **averages("transition")})


def run(args: argparse.Namespace) -> Report:
    """Find alpha_c and alpha_l, follow both branches, find where they end."""
    model = model_of(args)
    nodes, rough = nodes_of(args, model), nodes_of(args, model, SIZES["curve"])
    alphas = np.linspace(*CURVE_RANGE, CURVE_POINTS)
    curves: list[Curve] = []
    ends: dict[str, list[BranchEnd]] = {}
    with progress_bars(args, "solve") as stage:
        for branch in PAIR:
            curves.append(sweep(model, alphas, branch, rough, progress=stage(f"{branch} branch")))
            stage(f"ends of the {branch} branch")(0, 1)
            ends[branch] = branch_ends(curves[-1], rough)
        stage("alpha_c")(0, 1)
        critical = critical_alpha(model, nodes, start=curves)
        stage("alpha_l")(0, 1)
        crossing = linear_crossing(model, critical, nodes, start=curves)
    # Without alpha_c nothing is known about alpha_l.
    found: Found = {
        "alpha_c": critical if critical.ok else None,
        "alpha_l": crossing if critical.ok and crossing.ok else None,
    }
    text = "\n".join([_transition_text(critical, found), "", *_end_lines(ends, curves)])
    files = {}
    if args.out is not None:
        files = {"transition.png": png(branch_figure(curves, critical, crossing)), "curves.csv": _table(curves)}
        text += f"\nFigure, table and JSON: {args.out / 'transition.png'}, curves.csv, transition.json"
    return Report(transition_report(critical, found, ends), text, files, bool(critical.ok), nodes)


def transition_report(critical: Transition, found: Found, ends: dict[str, list[BranchEnd]]) -> dict[str, Any]:
    """The JSON object of `tiedattn transition`."""
    report: dict[str, Any] = {}
    for name, t in found.items():
        report[name], report[f"{name}_stderr"] = (None, None) if t is None else (float(t.alpha), float(t.stderr))
    report["spinodals"] = {branch: _end_report(main_end(several)) for branch, several in ends.items()}
    report["ends"] = {branch: [_end_report(end) for end in several] for branch, several in ends.items()}
    for kind in ("sensitivities", "sensitivities_stderr"):
        report[kind] = {name: None if t is None else _numbers(getattr(t, kind)) for name, t in found.items()}
    report["at_alpha_c"] = {b.branch: state_report(b) for b in critical.branches}
    report["status"] = Status.name_of(critical.status)
    return report


def _numbers(tree: Any) -> dict[str, float]:
    return {name: float(getattr(tree, name)) for name in NUMBERS}


def _end_report(end: BranchEnd | None) -> dict[str, Any] | None:
    names = ("alpha", "stderr", "kind", "direction", "side")
    return None if end is None else {name: getattr(end, name) for name in names}


def main_end(ends: list[BranchEnd]) -> BranchEnd | None:
    """The end that is met first on leaving the stable range: the highest lower end, else the lowest upper one."""
    lower = [e for e in ends if e.side == "lower"]
    upper = [e for e in ends if e.side == "upper"]
    return max(lower, key=lambda e: e.alpha) if lower else min(upper, key=lambda e: e.alpha, default=None)


def _transition_text(critical: Transition, found: Found) -> str:
    """alpha_c and alpha_l, their sensitivities, and both branches at alpha_c."""
    known = {name: t for name, t in found.items() if t is not None}
    if not known:
        return f"no transition: {Status.name_of(critical.status)} (the branches' losses do not cross)"
    parts = ["\n".join(f"{name} = {with_error(t.alpha, t.stderr)}   {MEANING[name]}" for name, t in known.items())]
    for name, t in known.items():
        pairs = zip(_numbers(t.sensitivities).items(), _numbers(t.sensitivities_stderr).values(), strict=True)
        rows = [(f"d {name} / d {number}", with_error(value, bar)) for (number, value), bar in pairs]
        parts.append(f"sensitivities of {name}\n{table(rows)}")
    parts += [state_text(f"{branch.branch} branch at alpha_c", branch) for branch in critical.branches]
    return "\n\n".join(parts)


def _end_lines(ends: dict[str, list[BranchEnd]], curves: list[Curve]) -> list[str]:
    """How the branches end, a line for each end."""
    lines = []
    for curve in curves:
        several = ends[str(curve.branch)]
        for end in several:
            where = f"alpha = {with_error(end.alpha, end.stderr)}"
            lines.append(f"{curve.branch} branch {ENDS[end.kind].format(where=where, order=end.direction)}")
        if not several:
            inside = f"{curve.alphas[0]:g} <= alpha <= {curve.alphas[-1]:g}"
            lines.append(f"{curve.branch} branch: neither end nor loss of stability in {inside}")
    return lines


def _table(curves: list[Curve]) -> bytes:
    """The curves as CSV: what `state_report` says of their points, under the name of the branch that was followed."""
    rows = []
    for curve in curves:
        for report in map(state_report, curve.points):
            bars = {f"{name}_stderr": bar for name, bar in report.pop("stderr").items()}
            del report["affected_by_jumps"]
            rows.append({**report, "branch": curve.branch, **bars})
    return csv_of(rows)
