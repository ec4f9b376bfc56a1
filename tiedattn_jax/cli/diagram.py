"""`tiedattn diagram`: both branches on a grid of settings."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import jax
import numpy as np

from ..phases.boundaries import Boundary
from ..phases.diagram import REGIONS, PhaseDiagram
from ..phases.grid import GRID_SETTINGS, phase_diagram
from .options import ALPHA, MODEL, NUMBERS, averages, fits, integer, model_of, nodes_of, positive, subcommand
from .report import Report, png, progress_bars, table, with_error

NAMES = ("alpha", *NUMBERS)
AXES = {"x": ("alpha", 0.1, 2.0, 25), "y": ("omega", 0.02, 0.5, 25)}
_CELL_BYTES = 20_000  # two states, their replicates and a row of the table


class _Range(argparse.Action):
    """`NAME LOW HIGH POINTS` as a tuple of the four."""

    def __call__(self, parser: Any, namespace: Any, words: Any, option: str | None = None) -> None:
        name, *limits, points = words
        try:
            low, high, size = *map(float, limits), int(points)
        except ValueError:
            low, high, size = np.nan, np.nan, 0
        if name not in NAMES or not (np.isfinite([low, high]).all() and low < high and size >= 1):
            want = f"NAME LOW HIGH POINTS with NAME one of {', '.join(NAMES)}, LOW < HIGH and POINTS >= 1"
            raise argparse.ArgumentError(self, f"must be {want}, got {' '.join(words)!r}")
        setattr(namespace, self.dest, (name, low, high, size))


def register(commands: Any) -> None:
    """Add the subcommand."""
    form = {"nargs": 4, "metavar": ("NAME", "LOW", "HIGH", "POINTS"), "action": _Range}
    text = f"samples per dimension, when it is not an axis, else {ALPHA['alpha']['default']}"
    own = {
        **{name: {**form, "default": axis, "help": "axis"} for name, axis in AXES.items()},
        "alpha": {"type": positive, "help": text},
        "devices": {"type": integer(), "help": "devices to spread the grid over, by default all; on a CPU, its cores"},
        "resume": {"action": "store_true", "help": "go on with the finished tracks in the folder of --out"},
    }
    text = "phase diagram: both branches on a grid of settings"
    subcommand(commands, "diagram", run, text, {**MODEL, **averages("grid"), **own})


def run(args: argparse.Namespace) -> Report:
    """Solve the grid, read alpha_c and alpha_l from it, draw it."""
    model = model_of(args)
    _use_cores(args.devices)
    larger = max(AXES, key=lambda name: getattr(args, name)[3])
    fits(larger, " ".join(map(str, getattr(args, larger))), _CELL_BYTES * args.x[3] * args.y[3])
    x, y = ((name, np.linspace(low, high, size)) for name, low, high, size in (args.x, args.y))
    free = "alpha" not in (x[0], y[0])
    nodes = nodes_of(args, model)
    try:
        with progress_bars(args, "solve") as stage:
            diagram = phase_diagram(
                model,
                x,
                y,
                nodes,
                alpha=(args.alpha or ALPHA["alpha"]["default"]) if free else args.alpha,
                devices=args.devices,
                out=None if args.out is None else args.out / "tracks",
                resume=args.resume,
                progress=stage("both branches"),
            )
    except KeyboardInterrupt:
        kept = "" if args.out is None else f"finished tracks are kept: go on with --resume --out {args.out}"
        raise KeyboardInterrupt(kept) from None
    boundaries = [] if free else [diagram.alpha_c(), diagram.alpha_l()]
    files = {}
    if args.out is not None:
        files = {"diagram.png": png(diagram.plot()), "diagram.csv": diagram.to_csv().encode()}
        files["diagram.npz"] = diagram.pack()
    return Report(_numbers(diagram, boundaries), _text(diagram, boundaries), files, bool(diagram.solved.any()), nodes)


def _use_cores(devices: int | None) -> None:
    """Make each core of the machine a device of jax, or as many as are asked for."""
    cores = os.cpu_count() or 1
    if devices is None or devices <= cores:
        with contextlib.suppress(RuntimeError):  # devices exist already
            jax.config.update("jax_num_cpu_devices", devices or cores)


def _shares(diagram: PhaseDiagram) -> dict[str, int]:
    """How many cells lie in each region."""
    return {name: int(np.sum(diagram.region == code)) for code, name in enumerate(REGIONS)}


def _numbers(diagram: PhaseDiagram, boundaries: list[Boundary]) -> dict[str, Any]:
    settings = {name: float(value) for name, value in vars(GRID_SETTINGS).items()}
    report = {**diagram.attrs, "settings": settings}
    report |= {name: values.tolist() for name, values in (diagram.x, diagram.y)}
    for boundary in boundaries:
        report |= {boundary.event: boundary.alpha.tolist(), f"{boundary.event}_stderr": boundary.stderr.tolist()}
    report["regions"] = _shares(diagram)
    report["status"] = "converged" if diagram.solved.all() else "some cells unsolved"
    return report


def _text(diagram: PhaseDiagram, boundaries: list[Boundary]) -> str:
    head = f"{diagram.x[0]} x {diagram.y[0]}: {' x '.join(map(str, diagram.region.shape[::-1]))} cells"
    parts = [head, table([(f"{count:6d}", name) for name, count in _shares(diagram).items()])]
    if boundaries:
        rows = [(boundaries[0].parameter, *(b.event for b in boundaries))]
        for k, value in enumerate(boundaries[0].values):
            rows.append((f"{value:.4g}", *(with_error(b.alpha[k], b.stderr[k]) for b in boundaries)))
        parts.append(table(rows))
    return "\n".join(parts)
