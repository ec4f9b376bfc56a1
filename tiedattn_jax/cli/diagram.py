"""`tiedattn diagram`: both branches on a grid of settings."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import jax
import numpy as np

from ..averages.sizes import SIZES
from ..phases.boundaries import Boundary
from ..phases.diagram import REGIONS, PhaseDiagram
from ..phases.grid import phase_diagram
from .options import (
    ALPHA,
    NUMBERS,
    Report,
    count,
    model_of,
    model_options,
    node_options,
    nodes_of,
    output_options,
    png,
    positive,
    progress_bars,
    with_error,
)

NAMES = ("alpha", *NUMBERS)
X = ("alpha", 0.1, 2.0, 25)
Y = ("omega", 0.02, 0.5, 25)


class _Range(argparse.Action):
    """`NAME LOW HIGH POINTS` as (name, values)."""

    def __call__(self, parser: Any, namespace: Any, words: Any, option: str | None = None) -> None:
        name, *limits, points = words
        want = f"NAME LOW HIGH POINTS with NAME one of {', '.join(NAMES)}, LOW < HIGH and POINTS >= 1"
        try:
            low, high, size = *map(float, limits), int(points)
        except ValueError:
            low, high, size = np.nan, np.nan, 0
        if name not in NAMES or not (np.isfinite([low, high]).all() and low < high and size >= 1):
            raise argparse.ArgumentError(self, f"must be {want}, got {' '.join(words)!r}")
        setattr(namespace, self.dest, (name, np.linspace(low, high, size)))


def register(commands: Any) -> None:
    """Add the subcommand."""
    parents = [model_options(), node_options(SIZES["grid"]), output_options()]
    parser = commands.add_parser("diagram", parents=parents, help="phase diagram: both branches on a grid of settings")
    form = {"nargs": 4, "metavar": ("NAME", "LOW", "HIGH", "POINTS"), "action": _Range}
    for option, default in (("--x", X), ("--y", Y)):
        name, low, high, size = default
        text = f"default {' '.join(map(str, default))}"
        parser.add_argument(option, **form, default=(name, np.linspace(low, high, size)), help=text)
    text = f"samples per dimension, when it is not an axis (default {ALPHA})"
    parser.add_argument("--alpha", type=positive, help=text)
    text = "devices to spread the grid over (default: all; on a CPU, its cores)"
    parser.add_argument("--devices", type=count, help=text)
    parser.add_argument("--resume", action="store_true", help="go on with the finished tracks in the folder of --out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Report:
    """Solve the grid, read alpha_c and alpha_l from it, draw it."""
    model = model_of(args)
    _use_cores(args.devices)
    free = "alpha" not in (args.x[0], args.y[0])
    try:
        with progress_bars(args, "solve") as stage:
            diagram = phase_diagram(
                model,
                args.x,
                args.y,
                nodes_of(args, model),
                alpha=(args.alpha or ALPHA) if free else args.alpha,
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
    return Report(_numbers(diagram, boundaries), _text(diagram, boundaries), files, bool(diagram.solved.any()))


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
    report: dict[str, Any] = dict(diagram.attrs)
    report |= {name: values.tolist() for name, values in (diagram.x, diagram.y)}
    for boundary in boundaries:
        report |= {boundary.event: boundary.alpha.tolist(), f"{boundary.event}_stderr": boundary.stderr.tolist()}
    report["regions"] = _shares(diagram)
    report["status"] = "converged" if diagram.solved.all() else "some cells unsolved"
    return report


def _text(diagram: PhaseDiagram, boundaries: list[Boundary]) -> str:
    lines = [f"{diagram.x[0]} x {diagram.y[0]}: {' x '.join(map(str, diagram.region.shape[::-1]))} cells"]
    lines += [f"  {number:6d} {name}" for name, number in _shares(diagram).items()]
    if boundaries:
        lines.append(f"{boundaries[0].parameter:>9}  " + "".join(f"{b.event:<14}" for b in boundaries).rstrip())
        for k, value in enumerate(boundaries[0].values):
            cells = [f"{with_error(b.alpha[k], b.stderr[k]):<14}" for b in boundaries]
            lines.append(f"{value:9.4g}  " + "".join(cells).rstrip())
    return "\n".join(lines)
