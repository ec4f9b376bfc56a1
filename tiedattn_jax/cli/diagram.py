"""`tiedattn diagram`: both branches on a grid of settings."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ..base.errors import InputError, require_memory
from ..base.files import pack
from ..bayes.thresholds import RECOVERIES
from ..model.parameters import Axis
from ..phases.grid import phase_diagram
from ..phases.sweep import sweep
from .options import ALPHA, MODEL, NUMBERS, OPTIMAL, averages, integer, model_of, nodes_of, positive, subcommand
from .report import Report, png, progress_bars

NAMES = ("alpha", *NUMBERS)
AXES = {"x": "alpha 0.1 2.0 25", "y": "omega 0.02 0.5 25"}
_CELL_BYTES = 20_000  # memory of a cell: two states, their replicates and a row of the table


def register(commands: argparse._SubParsersAction) -> None:
    form = {"nargs": 4, "metavar": ("NAME", "LOW", "HIGH", "POINTS")}
    text = f"samples per dimension n/d if alpha is not an axis; by default {ALPHA['alpha']['default']}"
    options = {
        **{name: {**form, "default": axis.split(), "help": f"{name} axis of the grid"} for name, axis in AXES.items()},
        "alpha": {"type": positive, "help": text},
        "devices": {"type": integer(), "help": "number of devices for the grid; by default all; a CPU is one"},
        "resume": {"action": "store_true", "help": "continue from the finished tracks in the folder of --out"},
        **OPTIMAL,
    }
    text = "compute a phase diagram: both branches on a grid of settings"
    message = "finished tracks are kept: go on with --resume --out {out}"
    subcommand(commands, "diagram", run, text, {**MODEL, **averages("grid"), **options}, message)


def _axis(option: str, words: list[str]) -> tuple[str, float, float, int]:
    """Parse the words `NAME LOW HIGH POINTS` of an axis.

    Raises:
        InputError: if the words do not have this form.
    """
    name, *limits, points = words
    try:
        low, high, size = *map(float, limits), int(points)
        is_valid = name in NAMES and -np.inf < low < high < np.inf and size >= 1
    except ValueError:
        is_valid = False
    if not is_valid:
        requirement = f"NAME LOW HIGH POINTS with NAME one of {', '.join(NAMES)}, LOW < HIGH and POINTS >= 1"
        raise InputError(option, f"must be {requirement}, got {' '.join(words)!r}")
    return name, low, high, size


def run(args: argparse.Namespace) -> Report:
    """Solve both branches on the grid; with `--out`, draw the diagram and write its table and arrays."""
    model, axes = model_of(args), {option: _axis(option, getattr(args, option)) for option in AXES}
    larger, cells = max(AXES, key=lambda option: axes[option][3]), axes["x"][3] * axes["y"][3]
    require_memory(_CELL_BYTES * cells, larger, " ".join(getattr(args, larger)), f"{cells} cells")
    x, y = (Axis(name, np.linspace(low, high, size)) for name, low, high, size in axes.values())
    alpha_is_free = "alpha" not in (x.name, y.name)
    if args.optimal and alpha_is_free:
        raise InputError("optimal", "must be left out where alpha is not an axis of the grid")
    nodes = nodes_of(args, model)
    with progress_bars(args, "solve") as stage:
        recoveries: list[Any] = []
        if args.optimal:
            other = x if y.name == "alpha" else y
            for event in RECOVERIES:
                recoveries.append(sweep(model, event, other, progress=stage(event.replace("_", " "))))
        alpha = (args.alpha or ALPHA["alpha"]["default"]) if alpha_is_free else args.alpha
        diagram = phase_diagram(
            model,
            x,
            y,
            nodes=nodes,
            **({} if alpha is None else {"alpha": alpha}),
            devices=args.devices,
            out=None if args.out is None else args.out / "tracks",
            resume=args.resume,
            progress=stage("both branches"),
        )
    files = {}
    if args.out is not None:
        files = {"diagram.png": png(diagram.plot(recoveries)), "diagram.csv": diagram.to_csv().encode()}
        files["diagram.npz"] = pack(diagram)
    report = diagram.to_dict() | {str(table.question): table.values().tolist() for table in recoveries}
    text = "\n\n".join(result.summary() for result in (diagram, *recoveries))
    return Report(report, text, files, bool(diagram.solved.any()), nodes)
