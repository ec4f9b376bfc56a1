"""`tiedattn transition`, `solve` and `diagram`: the theory at a transition, at one setting, and on a grid."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from ..averages.recipes import SIZES
from ..base.errors import InputError, require_memory
from ..base.files import csv_of
from ..base.report import with_error
from ..base.saved import pack
from ..bayes.fixed_points import solve as solve_optimal
from ..bayes.thresholds import perfect_recovery, weak_recovery
from ..model.overlaps import BRANCHES, PAIR
from ..model.parameters import Axis
from ..phases.diagram import PhaseDiagram
from ..phases.grid import phase_diagram
from ..phases.join import join
from ..phases.sweep import sweep
from ..phases.table import Table
from ..phases.transitions import branch_ends, critical_alpha, linear_crossing
from ..plotting.theory import branch_figure
from ..theory.quantities import Quantity
from ..theory.solve import solve
from .options import (
    ALPHA,
    MODEL,
    OPTIMAL,
    Command,
    Report,
    averages,
    integer,
    model_of,
    nodes_of,
    option,
    part,
    png,
    positive,
    progress_bars,
    under_options,
)

RECOVERIES = weak_recovery, perfect_recovery
CURVE_POINTS = 23
CURVE_RANGE = (0.05, 2.25)


def run_transition(args: argparse.Namespace) -> Report:
    """Follow both branches, find their ends, alpha_c and alpha_l."""
    model = model_of(args)
    nodes, coarse_nodes = nodes_of(args, model), nodes_of(args, model, SIZES["curve"])
    alphas = np.linspace(*CURVE_RANGE, CURVE_POINTS)
    curves: list[Table] = []
    ends: dict[str, list[Quantity]] = {}
    with progress_bars(args, "solve") as stage:
        recoveries: list[Quantity] = []
        if args.optimal:
            stage("optimal learner")(0, 1)
            recoveries = [recovery(model) for recovery in RECOVERIES]
            places = np.sort([*alphas, *(float(recovery.alpha) for recovery in recoveries)])  # the curve's corners, too
            optimal = jax.vmap(lambda alpha: solve_optimal(model, alpha))(jnp.asarray(places, model.lam.dtype))
        for branch in PAIR:
            bar = stage(f"{branch} branch")
            curves.append(
                sweep(solve, model, alpha=alphas, branch=branch, nodes=coarse_nodes, follow=True, progress=bar)
            )
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
        full_curves = [_to_its_ends(curve, ends[str(curve.question)]) for curve in curves]
        figure = branch_figure(
            *full_curves,
            alpha_c=critical,
            alpha_l=crossing,
            optimal=optimal if args.optimal else None,
            recoveries=recoveries,
        )
        files = {"transition.png": png(figure), "curves.csv": _curves_csv(curves)}
        text += f"\nFigure, table and JSON: {args.out / 'transition.png'}, curves.csv, transition.json"
    report = transition_report(critical, crossing, ends) | {r.event: float(r.alpha) for r in recoveries}
    return Report(report, text, files, bool(critical.ok), nodes)


def _to_its_ends(curve: Table, ends: list[Quantity]) -> Table:
    """Add the states at its ends to a curve, for a picture."""
    states = [state for end in ends if end.ok for state in end.branches]
    return Table.of_states(curve.question, sorted((*curve.points, *states), key=lambda point: float(point.alpha)))


def transition_report(critical: Quantity, crossing: Quantity, ends: dict[str, list[Quantity]]) -> dict[str, Any]:
    """Return the JSON object of `tiedattn transition`."""
    events = {name: q.to_dict() if q.ok else {} for name, q in (("alpha_c", critical), ("alpha_l", crossing))}
    report: dict[str, Any] = {}
    for name, numbers in events.items():
        report |= {name: numbers.get("alpha"), f"{name}_stderr": numbers.get("stderr")}
    report |= {f"alpha_c_{kind}": events["alpha_c"].get(kind) for kind in ("rs_shift", "rs_shift_stderr")}
    main_ends = {branch: main_end(end_list) for branch, end_list in ends.items()}
    report["spinodals"] = {branch: None if end is None else _end_report(end) for branch, end in main_ends.items()}
    report["ends"] = {branch: [_end_report(end) for end in end_list] for branch, end_list in ends.items()}
    for kind in ("sensitivities", "sensitivities_stderr"):
        report[kind] = {name: _scalars(numbers.get(kind)) for name, numbers in events.items()}
    report["at_alpha_c"] = {b.branch: b.to_dict() for b in critical.branches}
    report["status"], report["reason"] = critical.status_name, critical.reason
    return report


def _end_report(end: Quantity) -> dict[str, Any]:
    return {"alpha": float(end.alpha), "stderr": float(end.stderr)} | dict(end.labels) | {"status": end.status_name}


def _scalars(numbers: dict[str, Any] | None) -> dict[str, float] | None:
    """Keep the entries that are single numbers; these are the options of the command line."""
    return numbers and {name: value for name, value in numbers.items() if isinstance(value, float)}


def main_end(ends: list[Quantity]) -> Quantity | None:
    """Return the end next to the stable range: the highest lower end, else the lowest upper end; None without ends."""
    lower = [e for e in ends if e.side == "lower"]
    return max(lower, key=lambda e: e.alpha) if lower else min(ends, key=lambda e: e.alpha, default=None)


# Descriptions of the kinds of ends.
_ENDS = {
    "pitchfork": "ends at {where}: {order} falls continuously to zero",
    "instability": "turns unstable towards {order} at {where}",
    "fold": "ends at {where} with {order} finite",
}


def _end_lines(ends: dict[str, list[Quantity]], curves: list[Table]) -> list[str]:
    """Describe how the branches end, in one line for each end."""
    lines = []
    for curve in curves:
        end_list = ends[str(curve.question)]
        for end in end_list:
            where = f"alpha = {with_error(end.alpha, end.stderr)}"
            if not end.ok:  # the error bar is then half of the interval in which the end lies
                low, high = float(end.alpha - end.stderr), float(end.alpha + end.stderr)
                where = f"a place between alpha = {low:.4g} and {high:.4g}, where it was not located,"
            sentence = _ENDS[end.kind].format(where=where, order=end.direction)
            lines.append(f"{curve.question} branch, {end.side} end: {sentence}")
        if not end_list:
            range_text = f"{curve.at[0]:g} <= alpha <= {curve.at[-1]:g}"
            lines.append(f"{curve.question} branch: neither end nor loss of stability in {range_text}")
    return lines


def _curves_csv(curves: list[Table]) -> bytes:
    """Return the curves as CSV: `FixedPoint.to_dict` of every point, under the name of the branch that was followed."""
    rows = []
    for curve in curves:
        for point in curve.points:
            report = point.to_dict()
            bars = {f"{name}_stderr": bar for name, bar in report.pop("stderr").items()}
            del report["affected_by_jumps"]
            rows.append({**report, "branch": curve.question, **bars})
    return csv_of(rows)


_ANY = "any"  # option value for the branch None, which imposes no symmetry
_BRANCH = "branch; `any` sets no overlap to zero, as the lowest state of a student of rank two requires"
_RTOL = "refine the averages until the relative error bars are this small; not with --rule, --nodes, --replicates"
_SOLVE = {
    **ALPHA,
    **MODEL,
    **averages(),
    "branch": option(_BRANCH, default="semantic", choices=[name or _ANY for name in BRANCHES]),
    "rtol": option(_RTOL, positive),
}


def run_solve(args: argparse.Namespace) -> Report:
    """Solve one branch at one alpha.

    Raises:
        InputError: if an option of the averages is given together with `--rtol`, which chooses the averages.
    """
    model = model_of(args)
    nodes = nodes_of(args, model) if args.rtol is None else None
    for name, default in {**{k: form["default"] for k, form in averages().items()}, "seed": 0}.items():
        if args.rtol is not None and (value := getattr(args, name)) != default:
            raise InputError(name, f"must be left out beside --rtol, which chooses the averages, got --{name} {value}")
    branch = None if args.branch == _ANY else args.branch
    point = solve(model, args.alpha, branch, nodes, rtol=args.rtol)
    return Report(point.to_dict(), point.summary(), {}, bool(point.ok), nodes)


AXES = {"x": "alpha 0.1 2.0 25", "y": "omega 0.02 0.5 25"}
_CELL_BYTES = 20_000  # memory of a cell: two states, their replicates and a row of the table


_AXIS = "NAME", "LOW", "HIGH", "POINTS"
_GRID_AXIS = "{} axis of the grid: alpha, a number of the model, or an entry such as mixing[0,1]"
_ALPHA = f"samples per dimension n/d if alpha is not an axis; by default {ALPHA['alpha']['default']}"
_PART = "compute the K-th of N parts of the rows, for `tiedattn join`; the files are named after it"
_DIAGRAM = {
    **MODEL,
    **averages("grid"),
    **{k: option(_GRID_AXIS.format(k), default=axis.split(), nargs=4, metavar=_AXIS) for k, axis in AXES.items()},
    "alpha": option(_ALPHA, positive),
    "devices": option("number of devices for the grid; by default all; a CPU is one", integer()),
    "resume": option("continue from the finished tracks in the folder of --out", action="store_true"),
    "part": option(_PART, part, metavar="K/N"),
    **OPTIMAL,
}


def _grid_axis(option: str, words: list[str]) -> tuple[str, float, float, int]:
    """Parse the words `NAME LOW HIGH POINTS` of an axis.

    Raises:
        InputError: if the words do not have this form.
    """
    name, *limits, points = words
    try:
        low, high, size = *map(float, limits), int(points)
        is_valid = -np.inf < low < high < np.inf and size >= 1
    except ValueError:
        is_valid = False
    if not is_valid:
        requirement = "NAME LOW HIGH POINTS with LOW < HIGH and POINTS >= 1"
        raise InputError(option, f"must be {requirement}, got {' '.join(words)!r}")
    return name, low, high, size


def run_diagram(args: argparse.Namespace) -> Report:
    """Solve both branches on the grid; with `--out`, draw the diagram and write its table and arrays."""
    model, axes = model_of(args), {option: _grid_axis(option, getattr(args, option)) for option in AXES}
    larger, cells = max(AXES, key=lambda option: axes[option][3]), axes["x"][3] * axes["y"][3]
    require_memory(_CELL_BYTES * cells, larger, " ".join(getattr(args, larger)), f"{cells} cells")
    x, y = (Axis(name, np.linspace(low, high, size)) for name, low, high, size in axes.values())
    alpha_is_free, suffix = "alpha" not in (x.name, y.name), ""
    if args.part is not None:
        (number, count), rows = args.part, x if y.name == "alpha" else y
        if count > rows.values.size:
            requirement = f"of as many parts as there are values of {rows.name} at most, {rows.values.size}"
            raise InputError("part", f"must be {requirement}, got {number}/{count}")
        own = dataclasses.replace(rows, values=np.array_split(rows.values, count)[number - 1])
        x, y, suffix = (own, y, f"-{number}-of-{count}") if rows is x else (x, own, f"-{number}-of-{count}")
    if x.name == y.name:
        raise InputError("y", f"must be an axis of another number than --x, got {' '.join(args.y)!r}")
    if args.alpha is not None and not alpha_is_free:
        raise InputError("alpha", f"must be left out where alpha is an axis of the grid, got {args.alpha}")
    if args.optimal and alpha_is_free:
        raise InputError("optimal", "must be left out where alpha is not an axis of the grid")
    nodes = nodes_of(args, model)
    with progress_bars(args, "solve") as stage:
        recoveries: list[Any] = []
        with under_options(**{x.name: "x", y.name: "y"}):
            if args.optimal:
                other = x if y.name == "alpha" else y
                for recovery in RECOVERIES:
                    swept = stage(recovery.__name__.replace("_", " "))
                    recoveries.append(sweep(recovery, model, other, progress=swept))
            diagram = phase_diagram(
                model,
                x,
                y,
                nodes=nodes,
                **({"alpha": args.alpha or ALPHA["alpha"]["default"]} if alpha_is_free else {}),
                devices=args.devices,
                out=None if args.out is None else args.out / f"tracks{suffix}",
                resume=args.resume,
                progress=stage("both branches"),
            )
    files = {} if args.out is None else _files(f"diagram{suffix}", diagram, diagram.plot(boundaries=recoveries))
    report = diagram.to_dict() | {str(table.question): table.values().tolist() for table in recoveries}
    text = "\n\n".join(result.summary() for result in (diagram, *recoveries))
    return Report(report, text, files, bool(diagram.found.any()), nodes, f"diagram{suffix}")


def _files(name: str, result: Table, figure: Figure) -> dict[str, bytes]:
    """Return the picture, the table and the arrays of a result, by the names of their files."""
    return {f"{name}.png": png(figure), f"{name}.csv": result.to_csv().encode(), f"{name}.npz": pack(result)}


_JOIN = {"parts": option("files of parts, such as diagram-1-of-2.npz", nargs="+", metavar="FILE")}


def run_join(args: argparse.Namespace) -> Report:
    """Put the parts of a diagram or a table together; with `--out`, draw it and write its table and arrays."""
    with under_options(path="parts"):
        whole = join(args.parts)
    name = "diagram" if isinstance(whole, PhaseDiagram) else "table"
    files = {} if args.out is None else _files(name, whole, whole.plot())
    return Report(whole.to_dict(), whole.summary(), files, bool(whole.found.any()), name=name)


COMMANDS = (
    Command(
        "transition",
        run_transition,
        "find alpha_c and alpha_l, and follow both branches",
        {**MODEL, **averages("transition"), **OPTIMAL},
    ),
    Command("solve", run_solve, "compute one fixed point of the theory", _SOLVE),
    Command(
        "diagram",
        run_diagram,
        "compute a phase diagram: both branches on a grid of settings",
        _DIAGRAM,
        "finished tracks are kept: go on with --resume --out {out}",
    ),
    Command("join", run_join, "put parts of a diagram together, which separate jobs have computed", _JOIN),
)
