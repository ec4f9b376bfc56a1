"""`tiedattn solve`: one fixed point of the theory."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ..errors import InputError
from ..overlaps import BRANCHES
from ..results import Status
from ..theory.fixed_points import FixedPoint, solve
from .options import ALPHA, MODEL, NUMBERS, averages, model_of, nodes_of, positive, subcommand
from .report import Report, table, with_error

# What a jump makes infinite, or wrong where it is differentiated node by node.
AFFECTED = ("replicon", "d overlaps", "d gen_error", "d alpha_l", "spinodals")


def register(commands: Any) -> None:
    """Add the subcommand."""
    text = "refine the averages, instead of choosing them, until the error bars are so small"
    own = {
        "branch": {"choices": [name for name in BRANCHES if name], "default": "semantic", "help": "branch"},
        "rtol": {"type": positive, "help": text},
    }
    subcommand(commands, "solve", run, "one fixed point of the theory", {**ALPHA, **MODEL, **averages(), **own})


def run(args: argparse.Namespace) -> Report:
    """Solve one branch at one alpha.

    Raises:
        InputError: an option of the averages beside `--rtol`, which chooses them.
    """
    model, nodes = model_of(args), None
    if args.rtol is None:
        nodes = nodes_of(args, model)
    for name, default in {**{k: form["default"] for k, form in averages().items()}, "seed": 0}.items():
        if args.rtol is not None and (value := getattr(args, name)) != default:
            raise InputError(name, f"must be left out beside --rtol, which chooses the averages, got --{name} {value}")
    point = solve(model, args.alpha, args.branch, nodes, rtol=args.rtol)
    text = state_text(f"{args.branch} branch at alpha = {args.alpha:g}", point)
    return Report(state_report(point), text, {}, bool(point.ok), nodes)


def _one(name: str, values: Any) -> float:
    """One number for an observable of two tokens and rank one: the mean over the tokens, but m of the first."""
    values = np.ravel(values)
    return float(values[0] if name == "m" else values.mean())


def state_report(point: FixedPoint) -> dict[str, Any]:
    """The JSON object of a fixed point: its setting, all that is kept of a state, and the error bars."""
    means = {name: _one(name, a) for name, a in point.mean.numbers().items()}
    worst = {"status": Status.name_of(point.status), "residual": float(point.residual)}
    return {
        "alpha": float(point.alpha),
        **{name: float(getattr(point.model, name)) for name in NUMBERS},
        "branch": point.label,
        **means,
        **worst,
        "affected_by_jumps": list(AFFECTED) if point.jumps else [],
        "stderr": {name: _one(name, a) for name, a in point.stderr.numbers().items() if name not in worst},
    }


def state_text(title: str, point: FixedPoint) -> str:
    """The readable summary of a fixed point."""
    row = state_report(point)
    shown = {"train_loss": "training loss / d", "gen_error": "test error"}
    lines = [
        (shown.get(name, name), with_error(row[name], row["stderr"][name]))
        for name in ("q", "V", "theta", "m", "train_loss", "gen_error")
    ]
    formal = "; formally infinite with the jumps" if point.jumps else ""
    lines += [
        ("linear baseline", f"{row['gen_error_linear']:.7f}"),
        ("replicon", f"{row['replicon']:.2f} (below 1: stable{formal})"),
        ("jump mass", f"{row['jump_mass']:.1%} of Vhat: the share of the jumps of the proximal operator"),
        ("second minimum", f"{row['second_minimum']:.2%} of the nodes have one"),
    ]
    if point.jumps:
        lines += [("affected", f"{', '.join(AFFECTED)}: they contain the jumps here, but for the replicon")]
    if row["unconverged"] > 0:
        lines += [("unresolved", f"{row['unconverged']:.1e} of the nodes")]
    return f"{title}: {row['status']}, residual {row['residual']:.1e}\n{table(lines)}"
