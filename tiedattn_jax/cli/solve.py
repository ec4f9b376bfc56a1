"""`tiedattn solve`: one fixed point of the theory."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from ..errors import InputError
from ..overlaps import BRANCHES
from ..results import Status
from ..theory.fixed_points import FixedPoint, solve
from .options import (
    NUMBERS,
    Report,
    alpha_options,
    model_of,
    model_options,
    node_options,
    nodes_of,
    output_options,
    positive,
    with_error,
)

# What a jump makes infinite, or wrong where it is differentiated node by node.
AFFECTED = ("replicon", "d overlaps", "d gen_error", "d alpha_l", "spinodals")


def register(commands: Any) -> None:
    """Add the subcommand."""
    parents = [alpha_options(), model_options(), node_options(), output_options()]
    parser = commands.add_parser("solve", parents=parents, help="one fixed point of the theory")
    branches = [name for name in BRANCHES if name is not None]
    parser.add_argument("--branch", choices=branches, default="semantic", help="branch (default %(default)s)")
    text = "refine the averages, instead of choosing them, until the error bars are so small"
    parser.add_argument("--rtol", type=positive, help=text)
    averages = {name: parser.get_default(name) for name in ("rule", "nodes", "replicates", "seed")}
    parser.set_defaults(run=partial(run, averages=averages))


def run(args: argparse.Namespace, averages: dict[str, Any]) -> Report:
    """Solve one branch at one alpha.

    Args:
        averages: the defaults of the options that `--rtol` replaces.

    Raises:
        InputError: one of these options beside `--rtol`.
    """
    model = model_of(args)
    if args.rtol is None:
        point = solve(model, args.alpha, args.branch, nodes_of(args, model))
    else:
        for name, default in averages.items():
            if (value := getattr(args, name)) != default:
                text = f"must be left out beside --rtol, which chooses the averages, got --{name} {value}"
                raise InputError(name, text)
        point = solve(model, args.alpha, args.branch, rtol=args.rtol)
    text = state_text(f"{args.branch} branch at alpha = {args.alpha:g}", point)
    return Report(state_report(point), text, {}, bool(point.ok))


def _one(name: str, values: Any) -> float:
    """One number for an observable of two tokens and rank one: the mean over the tokens, but m of the first."""
    values = np.ravel(values)
    return float(values[0] if name == "m" else values.mean())


def state_report(point: FixedPoint) -> dict[str, Any]:
    """The JSON object of a fixed point: its setting, all that is kept of a state, and the error bars."""
    means = {name: _one(name, a) for name, a in point.mean.numbers().items()}
    worst = {"status": Status.name_of(point.status), "residual": float(point.residual)}
    bars = {name: _one(name, a) for name, a in point.stderr.numbers().items() if name not in worst}
    return {
        "alpha": float(point.alpha),
        **{name: float(getattr(point.model, name)) for name in NUMBERS},
        "branch": point.label,
        **means,
        **worst,
        "affected_by_jumps": list(AFFECTED) if point.jumps else [],
        "stderr": bars,
    }


def state_text(title: str, point: FixedPoint) -> str:
    """The readable summary of a fixed point."""
    row = state_report(point)
    lines = [f"{title}: {row['status']}, residual {row['residual']:.1e}"]
    shown = {"train_loss": "training loss / d", "gen_error": "test error"}
    for name in ("q", "V", "theta", "m", *shown):
        lines += [f"  {shown.get(name, name):<18}{with_error(row[name], row['stderr'][name])}"]
    formal = "; formally infinite with the jumps" if point.jumps else ""
    lines += [
        f"  {'linear baseline':<18}{row['gen_error_linear']:.7f}",
        f"  {'replicon':<18}{row['replicon']:.2f} (below 1: stable{formal})",
        f"  {'jump mass':<18}{row['jump_mass']:.1%} of Vhat: the share of the jumps of the proximal operator",
        f"  {'second minimum':<18}{row['second_minimum']:.2%} of the nodes have one",
    ]
    if point.jumps:
        lines += [f"  {'affected':<18}{', '.join(AFFECTED)}: they contain the jumps here, but for the replicon"]
    if row["unconverged"] > 0:
        lines += [f"  {'unresolved':<18}{row['unconverged']:.1e} of the nodes"]
    return "\n".join(lines)
