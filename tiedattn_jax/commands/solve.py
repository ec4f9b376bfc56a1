"""`tiedattn solve`: one fixed point of the theory."""

from __future__ import annotations

import argparse
from typing import Any

from ..solve import FixedPoint, solve
from ..state_evolution import Status
from .common import (
    Report,
    model_of,
    model_options,
    node_options,
    nodes_of,
    output_options,
    positive,
    state_options,
    with_error,
)

DIAGNOSTICS = ("replicon", "jump_mass", "second_minimum", "unconverged", "growth_m", "growth_theta")

# What a jump makes infinite, or wrong where it is differentiated node by node.
AFFECTED = ("replicon", "d overlaps", "d gen_error", "d alpha_l", "spinodals")


def register(commands: Any) -> None:
    """Add the subcommand."""
    parents = [state_options(), model_options(), node_options(), output_options()]
    parser = commands.add_parser("solve", parents=parents, help="one fixed point of the theory")
    parser.add_argument(
        "--rtol", type=positive, help="refine the averages, instead of choosing them, until the error bars are so small"
    )
    averages = {k: parser.get_default(k) for k in ("rule", "nodes", "replicates", "seed")}
    parser.set_defaults(run=run, averages=averages)


def run(args: argparse.Namespace) -> Report:
    """Solve one branch at one alpha."""
    model = model_of(args)
    if args.rtol is None:
        point = solve(model, args.alpha, args.branch, nodes_of(args, model))
    else:
        for name, default in args.averages.items():
            if getattr(args, name) != default:
                value = getattr(args, name)
                raise ValueError(
                    f"{name} must be left out beside --rtol, which chooses the averages, got --{name} {value}"
                )
        point = solve(model, args.alpha, args.branch, rtol=args.rtol)
    text = state_text(f"{args.branch} branch at alpha = {args.alpha:g}", point)
    return Report(state_report(point), text, {}, bool(point.ok))


def _scalars(tree: Any) -> dict[str, float]:
    """The four order parameters of an L = 2, r = t = 1 state as numbers: token means, and m of the first token."""
    x = tree.overlaps
    numbers = {"q": x.q.mean(), "V": x.V.mean(), "theta": x.theta.mean(), "m": x.m[0, 0]}
    return {k: float(v) for k, v in {**numbers, "train_loss": tree.train_loss, "gen_error": tree.gen_error}.items()}


def state_report(point: FixedPoint) -> dict[str, Any]:
    """The JSON object of a fixed point."""
    model, diagnostics = point.model, point.diagnostics
    return {
        "alpha": float(point.alpha),
        **{k: float(getattr(model, k)) for k in ("omega", "sigma", "lam")},
        "branch": point.label,
        **_scalars(point),
        "gen_error_linear": float(point.gen_error_linear),
        "status": Status.name_of(point.status),
        "residual": float(point.residual),
        **{k: float(getattr(diagnostics, k)) for k in DIAGNOSTICS},
        "affected_by_jumps": list(AFFECTED) if point.jumps else [],
        "stderr": _scalars(point.stderr),
    }


def state_text(title: str, point: FixedPoint) -> str:
    """The readable summary of a fixed point."""
    value, error, linear = _scalars(point), _scalars(point.stderr), float(point.gen_error_linear)
    diagnostics = point.diagnostics
    shown = {"train_loss": "training loss / d", "gen_error": "test error"}
    lines = [f"{title}: {Status.name_of(point.status)}, residual {float(point.residual):.1e}"]
    lines += [f"  {shown.get(k, k):<18}{with_error(v, error[k])}" for k, v in value.items()]
    lines += [f"  {'linear baseline':<18}{linear:.7f}"]
    formal = "; formally infinite with the jumps" if point.jumps else ""
    lines += [f"  {'replicon':<18}{float(diagnostics.replicon):.2f} (below 1: stable{formal})"]
    lines += [
        f"  {'jump mass':<18}{float(diagnostics.jump_mass):.1%} of Vhat: the share of the jumps of the proximal operator",
        f"  {'second minimum':<18}{float(diagnostics.second_minimum):.2%} of the nodes have one",
    ]
    if point.jumps:
        lines += [f"  {'affected':<18}{', '.join(AFFECTED)}: they contain the jumps here, but for the replicon"]
    if float(diagnostics.unconverged) > 0:
        lines += [f"  {'unresolved':<18}{float(diagnostics.unconverged):.1e} of the nodes"]
    return "\n".join(lines)
