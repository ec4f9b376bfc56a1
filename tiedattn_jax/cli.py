"""The command `tiedattn`."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from tqdm import tqdm

from . import nodes as averaging
from .branches import Curve, Spinodal, spinodals, sweep
from .model import DotProduct, dot_product
from .overlaps import BRANCHES
from .plotting import branch_figure
from .solve import FixedPoint, solve
from .state_evolution import Status
from .transitions import Transition, critical_alpha, linear_crossing

CURVE_POINTS = 23
CURVE_RANGE = (0.05, 2.25)


class _Parser(argparse.ArgumentParser):
    """One line on stderr and exit code 2 for bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _number(text: str, want: str, ok: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and ok(value)):
        raise argparse.ArgumentTypeError(f"must be {want}, got {text!r}")
    return value


def _integer(text: str, want: str, ok: Callable[[int], bool]) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not ok(value):
        raise argparse.ArgumentTypeError(f"must be {want}, got {text!r}")
    return value


_positive = partial(_number, want="a positive number", ok=lambda v: v > 0)
_share = partial(_number, want="a number in [0, 1]", ok=lambda v: 0 <= v <= 1)
_count = partial(_integer, want="a positive integer", ok=lambda v: v > 0)
_seed = partial(_integer, want="an integer of at least 0", ok=lambda v: v >= 0)
_power = partial(_integer, want="a power of two, for instance 65536", ok=lambda v: v > 0 and v & (v - 1) == 0)


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    add = common.add_argument
    add("--omega", type=_share, default=0.3, help="positional share of the target (default .3)")
    add("--sigma", type=_positive, default=0.5, help="standard deviation of the tokens (default .5)")
    add("--lam", type=_positive, default=0.01, help="ridge strength lambda (default .01)")
    add(
        "--mixing",
        type=_share,
        nargs=4,
        default=[0.6, 0.4, 0.4, 0.6],
        metavar=("A11", "A12", "A21", "A22"),
        help="positional part of the target, rows summing to 1 (default .6 .4 .4 .6)",
    )
    add("--nodes", type=_power, default=averaging.DEFAULT_NODES, help="Sobol nodes in a replicate (default 65536)")
    add("--replicates", type=_count, default=averaging.DEFAULT_REPLICATES, help="replicates for error bars (default 4)")
    add("--seed", type=_seed, default=0, help="seed of the nodes (default 0)")
    add("--json", action="store_true", help="one JSON object on stdout, no progress bars")
    add("--out", type=Path, metavar="DIR", help="write figure and tables into this folder")
    parser = _Parser(prog="tiedattn", description="Positional and semantic learning in dot-product attention.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    commands.add_parser("transition", parents=[common], help="find the transition, draw both branches")
    one = commands.add_parser("solve", parents=[common], help="one fixed point of the theory")
    one.add_argument("--alpha", type=_positive, default=2.0, help="samples per dimension n/d (default 2)")
    one.add_argument("--branch", choices=BRANCHES, default="semantic", help="branch (default semantic)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a solve that failed, 130 for an interrupt; 2 exits."""
    parser = _parser()
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    _use_compilation_cache()
    try:
        model = dot_product(args.omega, args.sigma, args.lam, np.reshape(args.mixing, (2, 2)))
        _check_out(args.out)
    except ValueError as problem:
        parser.error(f"argument --{problem}")
    nodes = averaging.sobol_nodes(model, args.nodes, seed=args.seed, replicates=args.replicates)
    try:
        report, text, files = {"solve": _solve, "transition": _transition}[args.command](args, model, nodes)
    except KeyboardInterrupt:
        print("tiedattn: interrupted, nothing was written", file=sys.stderr)
        return 130
    if args.out is not None:
        try:
            _write(args.out, {**files, f"{args.command}.json": json.dumps(_finite(report), indent=1).encode()})
        except OSError as problem:
            parser.error(f"argument --out: must be a folder that can be written, got '{args.out}' ({problem.strerror})")
    print(json.dumps(_finite(report)) if args.json else text)
    return 0 if report["status"] in ("converged", Status.name_of(Status.stalled)) else 1


def _use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless TIEDATTN_CACHE is 0; another value is the folder to keep them in."""
    where = os.environ.get("TIEDATTN_CACHE", str(Path.home() / ".cache" / "tiedattn_jax"))
    if where != "0":
        jax.config.update("jax_compilation_cache_dir", where)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _solve(args: argparse.Namespace, model: DotProduct, nodes: averaging.Rule) -> tuple[dict, str, dict]:
    point = solve(model, args.alpha, args.branch, nodes)
    return state_report(point), _point_text(f"{args.branch} branch at alpha = {args.alpha:g}", point), {}


def _transition(args: argparse.Namespace, model: DotProduct, nodes: averaging.Rule) -> tuple[dict, str, dict]:
    grid = np.linspace(*CURVE_RANGE, CURVE_POINTS)
    curve_nodes = averaging.sobol_nodes(
        model, min(args.nodes, averaging.DEFAULT_NODES // 8), seed=args.seed, replicates=args.replicates
    )
    with tqdm(total=2 * len(grid) + 26, disable=args.json, file=sys.stderr, unit="solve", leave=False) as bar:

        def each(alphas: Iterable) -> Iterable:
            for alpha in alphas:
                yield alpha
                bar.update()

        bar.set_description("alpha_c")
        critical = critical_alpha(model, nodes)
        bar.update(12)
        bar.set_description("alpha_l")
        crossing = linear_crossing(model, critical, nodes)
        bar.update(10)
        curves = {}
        for branch in ("positional", "semantic"):
            bar.set_description(f"{branch} curve")
            curves[branch] = sweep(model, grid, branch, curve_nodes, progress=each)
        bar.set_description("spinodals")
        ends = {name: spinodals(curve, curve_nodes) for name, curve in curves.items()}
        bar.update(4)
    report = transition_report(critical, crossing, ends)
    files = {}
    if args.out is not None:
        picture = io.BytesIO()
        branch_figure(curves, critical, crossing).savefig(picture, format="png", dpi=150)
        files = {"transition.png": picture.getvalue(), "curves.csv": _table(curves).encode()}
    text = _transition_text(critical, crossing, ends, curves)
    if args.out is not None:
        text += f"\nFigure, table and JSON: {args.out / 'transition.png'}, curves.csv, transition.json"
    return report, text, files


def _scalars(tree: Any) -> dict[str, float]:
    """The four order parameters of an L = 2, r = t = 1 state as numbers: token means, and m of the first token."""
    x = tree.overlaps
    return {
        "q": float(x.q.mean()), "V": float(x.V.mean()), "theta": float(x.theta.mean()), "m": float(x.m[0, 0])
    }  # fmt: skip


def _errors(tree: Any) -> dict[str, float]:
    return {**_scalars(tree), "train_loss": float(tree.train_loss), "gen_error": float(tree.gen_error)}


def state_report(point: FixedPoint) -> dict[str, Any]:
    """The JSON object of `tiedattn solve`."""
    model, diagnostics = point.model, point.diagnostics
    return {
        **{"alpha": float(point.alpha)},
        **{k: float(getattr(model, k)) for k in ("omega", "sigma", "lam")},
        "branch": point.label,
        **_errors(point),
        "gen_error_linear": float(point.gen_error_linear),
        "status": Status.name_of(point.status),
        "residual": float(point.residual),
        "replicon": float(diagnostics.replicon),
        "jump_mass": float(diagnostics.jump_mass),
        "growth_m": float(diagnostics.growth_m),
        "growth_theta": float(diagnostics.growth_theta),
        "stderr": _errors(point.stderr),
    }


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


def _pm(value: Any, error: Any) -> str:
    """A number with its error bar in the last digits: 1.25154(12)."""
    value, error = float(value), float(error)
    if not math.isfinite(error) or error <= 0:
        return f"{value:.6g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f}({round(error * 10**digits)})"


def _point_text(title: str, point: FixedPoint) -> str:
    value, error, linear = _errors(point), _errors(point.stderr), float(point.gen_error_linear)
    diagnostics = point.diagnostics
    shown = {"train_loss": "training loss / d", "gen_error": "test error"}
    lines = [f"{title}: {Status.name_of(point.status)}, residual {float(point.residual):.1e}"]
    lines += [f"  {shown.get(k, k):<18}{_pm(v, error[k])}" for k, v in value.items()]
    lines += [f"  {'linear baseline':<18}{linear:.7f}"]
    lines += [f"  {'replicon':<18}{float(diagnostics.replicon):.2f} (below 1: stable; without jumps)"]
    lines += [f"  {'jump mass':<18}{float(diagnostics.jump_mass):.1%} of Vhat: what derivatives node by node miss"]
    return "\n".join(lines)


def _transition_text(
    critical: Transition, crossing: Transition, ends: dict[str, list[Spinodal]], curves: dict[str, Curve]
) -> str:
    if int(critical.status) > Status.stalled:
        text = f"no transition: {Status.name_of(critical.status)} (the branches' losses do not cross)"
    else:
        text = f"alpha_c = {_pm(critical.alpha, critical.stderr)}   positional minimum below, semantic above"
        if int(crossing.status) <= Status.stalled:
            text += f"\nalpha_l = {_pm(crossing.alpha, crossing.stderr)}   attention beats the linear baseline above"
        for name, t in (("alpha_c", critical), ("alpha_l", crossing)):
            if int(t.status) > Status.stalled:
                continue
            jump = float(t.branches[-1].diagnostics.jump_mass)
            note = "exact in the presence of jumps" if name == "alpha_c" else f"node by node; jump mass {jump:.1%}"
            text += f"\n\nsensitivities of {name} ({note})"
            for k in ("omega", "sigma", "lam"):
                pair = getattr(t.sensitivities, k), getattr(t.sensitivities_stderr, k)
                text += f"\n  d {name} / d {k:<8}{_pm(*pair)}"
        for branch in critical.branches:
            text += "\n\n" + _point_text(f"{branch.branch} branch at alpha_c", branch)
    text += "\n"
    for name, curve in curves.items():
        inside = f"{curve.alphas[0]:g} <= alpha <= {curve.alphas[-1]:g}"
        for end in ends[name]:
            where = f"alpha = {_pm(end.alpha, end.stderr)}"
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


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    there = out
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"out: must be a folder that can be written, got '{out}'")


def _write(out: Path, files: dict[str, bytes]) -> None:
    """Write every file whole: under another name first, then moved into place."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with tempfile.NamedTemporaryFile(dir=out, delete=False) as part:
            part.write(content)
        os.chmod(part.name, 0o644)
        os.replace(part.name, out / name)
