"""`tiedattn transition`: where the global minimum changes its mechanism, and both branches around it."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from tqdm import tqdm

from ..branches import CURVE_NODES, Curve, Spinodal, spinodals, sweep
from ..overlaps import Overlaps
from ..plotting import branch_figure
from ..state_evolution import Status
from ..transitions import PAIR, Transition, critical_alpha, linear_crossing
from .common import Report, model_of, model_options, node_options, nodes_of, output_options, ticking, with_error
from .solve import state_report, state_text

CURVE_POINTS = 23
CURVE_RANGE = (0.05, 2.25)


def register(commands: Any) -> None:
    """Add the subcommand."""
    parents = [model_options(), node_options(2**14), output_options()]
    parser = commands.add_parser("transition", parents=parents, help="find the transition, draw both branches")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Report:
    """Find alpha_c and alpha_l, follow both branches, find where they end."""
    model = model_of(args)
    nodes = nodes_of(args, model)
    rough = nodes_of(args, model, CURVE_NODES)
    grid = np.linspace(*CURVE_RANGE, CURVE_POINTS)
    with tqdm(total=2 * len(grid) + 24, disable=args.json, file=sys.stderr, unit="solve", leave=False) as bar:
        curves, ends = {}, {}
        for branch in PAIR:
            bar.set_description(f"{branch} branch")
            curves[branch] = sweep(model, grid, branch, rough, progress=partial(ticking, bar=bar))
            ends[branch] = spinodals(curves[branch], rough)
            bar.update(6)
        bar.set_description("alpha_c")
        critical = critical_alpha(model, nodes, start=_near_alpha_c(curves))
        bar.update(8)
        bar.set_description("alpha_l")
        crossing = linear_crossing(model, critical, nodes, start=_near_alpha_l(curves, critical))
        bar.update(4)
    text, files = _text(critical, crossing, ends, curves), {}
    if args.out is not None:
        picture = io.BytesIO()
        branch_figure(curves, critical, crossing).savefig(picture, format="png", dpi=150)
        files = {"transition.png": picture.getvalue(), "curves.csv": _table(curves).encode()}
        text += f"\nFigure, table and JSON: {args.out / 'transition.png'}, curves.csv, transition.json"
    return Report(transition_report(critical, crossing, ends), text, files, int(critical.status) <= Status.stalled)


def _near_alpha_c(curves: dict[str, Curve]) -> tuple[float, list[Overlaps]] | None:
    """Where the losses of the curves cross, and the states there."""
    loss = [curves[b].by_alpha(lambda p: p.train_loss) for b in PAIR]
    shared = sorted(set(loss[0]) & set(loss[1]))
    alpha = _rising_zero(shared, [loss[0][a] - loss[1][a] for a in shared])
    return None if alpha is None else (alpha, [curves[b].at(alpha) for b in PAIR])


def _near_alpha_l(curves: dict[str, Curve], critical: Transition) -> tuple[float, Overlaps] | None:
    """Where the curve of the global minimum starts to beat the linear baseline, and its state there."""
    positional = critical.branches[0]
    early = bool(positional.gen_error < positional.gen_error_linear)
    curve = curves[PAIR[0 if early else 1]]
    excess = curve.by_alpha(lambda p: p.gen_error_linear - p.gen_error)
    alphas = [a for a in excess if (a < float(critical.alpha)) == early]
    alpha = _rising_zero(alphas, [excess[a] for a in alphas])
    return None if alpha is None else (alpha, curve.at(alpha))


def _rising_zero(x: list[float], y: list[float]) -> float | None:
    """First place where a piecewise linear function turns positive."""
    for (x0, y0), (x1, y1) in pairwise(zip(x, y, strict=True)):
        if y0 < 0 <= y1:
            return x0 - y0 * (x1 - x0) / (y1 - y0)
    return None


def transition_report(critical: Transition, crossing: Transition, ends: dict[str, list[Spinodal]]) -> dict[str, Any]:
    """The JSON object of `tiedattn transition`."""
    good = [int(t.status) <= Status.stalled for t in (critical, crossing)]
    names = ("omega", "sigma", "lam")

    def numbers(tree: Any) -> dict[str, float]:
        return {k: float(getattr(tree, k)) for k in names}

    found = {"alpha_c": (critical, good[0]), "alpha_l": (crossing, good[0] and good[1])}
    report: dict[str, Any] = {}
    for name, (t, ok) in found.items():
        report[name] = float(t.alpha) if ok else None
        report[f"{name}_stderr"] = float(t.stderr) if ok else None
    first = {name: main_end(found) for name, found in ends.items()}
    report["spinodals"] = {name: None if end is None else end._asdict() for name, end in first.items()}
    report["ends"] = {name: [end._asdict() for end in found] for name, found in ends.items()}
    report["sensitivities"] = {n: numbers(t.sensitivities) if ok else None for n, (t, ok) in found.items()}
    report["sensitivities_stderr"] = {
        n: numbers(t.sensitivities_stderr) if ok else None for n, (t, ok) in found.items()
    }
    report["at_alpha_c"] = {b.branch: state_report(b) for b in critical.branches}
    report["status"] = Status.name_of(critical.status)
    return report


def main_end(ends: list[Spinodal]) -> Spinodal | None:
    """The end of the stable stretch of a branch that is met first: the highest lower end, else the lowest upper end."""
    lower = [e for e in ends if e.side == "lower"]
    upper = [e for e in ends if e.side == "upper"]
    return max(lower, key=lambda e: e.alpha) if lower else min(upper, key=lambda e: e.alpha, default=None)


def _text(critical: Transition, crossing: Transition, ends: dict[str, list[Spinodal]], curves: dict[str, Curve]) -> str:
    if int(critical.status) > Status.stalled:
        text = f"no transition: {Status.name_of(critical.status)} (the branches' losses do not cross)"
    else:
        text = f"alpha_c = {with_error(critical.alpha, critical.stderr)}   positional minimum below, semantic above"
        if int(crossing.status) <= Status.stalled:
            text += (
                f"\nalpha_l = {with_error(crossing.alpha, crossing.stderr)}   attention beats the linear baseline above"
            )
        for name, t in (("alpha_c", critical), ("alpha_l", crossing)):
            if int(t.status) > Status.stalled:
                continue
            text += f"\n\nsensitivities of {name}"
            for k in ("omega", "sigma", "lam"):
                pair = getattr(t.sensitivities, k), getattr(t.sensitivities_stderr, k)
                text += f"\n  d {name} / d {k:<8}{with_error(*pair)}"
        for branch in critical.branches:
            text += "\n\n" + state_text(f"{branch.branch} branch at alpha_c", branch)
    text += "\n"
    for name, curve in curves.items():
        inside = f"{curve.alphas[0]:g} <= alpha <= {curve.alphas[-1]:g}"
        for end in ends[name]:
            where = f"alpha = {with_error(end.alpha, end.stderr)}"
            what = {
                "pitchfork": f"ends at {where}: {end.direction} falls continuously to zero",
                "instability": f"turns unstable towards {end.direction} at {where}",
                "fold": f"ends at {where} with {end.direction} finite",
            }[end.kind]
            text += f"\n{name} branch {what}"
        if not ends[name]:
            text += f"\n{name} branch: neither end nor loss of stability in {inside}"
    return text


def _table(curves: dict[str, Curve]) -> str:
    """The curves as CSV."""
    out = io.StringIO()
    names = ["q", "V", "theta", "m", "train_loss", "gen_error"]
    more = ["gen_error_linear", "replicon", "jump_mass", "growth_m", "growth_theta", "residual", "status"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["branch", "alpha", *names, *[f"{n}_stderr" for n in names], *more])
    for curve in curves.values():
        for point in curve.points:
            row = state_report(point)
            bars = [row["stderr"][n] for n in names]
            writer.writerow([curve.branch, row["alpha"], *[row[n] for n in names], *bars, *[row[n] for n in more]])
    return out.getvalue()
