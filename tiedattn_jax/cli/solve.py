"""`tiedattn solve`: one fixed point of the theory."""

from __future__ import annotations

import argparse

from ..base.errors import InputError
from ..model.overlaps import BRANCHES
from ..theory.solve import solve
from .options import ALPHA, MODEL, averages, model_of, nodes_of, positive, subcommand
from .report import Report

_ANY = "any"  # option value for the branch None, which imposes no symmetry


def register(commands: argparse._SubParsersAction) -> None:
    text = "refine the averages until the relative error bars are this small; not with --rule, --nodes, --replicates"
    options = {
        "branch": {
            "choices": [name or _ANY for name in BRANCHES],
            "default": "semantic",
            "help": "branch; `any` sets no overlap to zero, as the lowest state of a student of rank two requires",
        },
        "rtol": {"type": positive, "help": text},
    }
    options = {**ALPHA, **MODEL, **averages(), **options}
    subcommand(commands, "solve", run, "compute one fixed point of the theory", options)


def run(args: argparse.Namespace) -> Report:
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
