"""`tiedattn diagram`: both branches on a grid of settings."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from ..diagram import REGIONS, PhaseDiagram, Reading
from ..grid import GRID_NODES, phase_diagram
from .common import Report, count, model_of, model_options, node_options, nodes_of, output_options, positive, with_error

NAMES = ("alpha", "omega", "sigma", "lam")


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
    parents = [model_options(), node_options(GRID_NODES), output_options()]
    parser = commands.add_parser("diagram", parents=parents, help="phase diagram: both branches on a grid of settings")
    form = {"nargs": 4, "metavar": ("NAME", "LOW", "HIGH", "POINTS"), "action": _Range}
    parser.add_argument("--x", **form, default=("alpha", np.linspace(0.1, 2.0, 25)), help="default alpha .1 2 25")
    parser.add_argument("--y", **form, default=("omega", np.linspace(0.02, 0.5, 25)), help="default omega .02 .5 25")
    parser.add_argument("--alpha", type=positive, help="samples per dimension, when it is not an axis (default 2)")
    parser.add_argument(
        "--devices", type=count, help="devices to spread the grid over (default: all; on a CPU, its cores)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the finished tracks in the folder of --out")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Report:
    """Solve the grid, read alpha_c and alpha_l from it, draw it."""
    model = model_of(args)
    cores = os.cpu_count() or 1
    if args.devices is None or args.devices <= cores:
        with contextlib.suppress(RuntimeError):  # devices exist already
            jax.config.update("jax_num_cpu_devices", args.devices or cores)
    free = "alpha" not in (args.x[0], args.y[0])
    with contextlib.ExitStack() as closing:
        bars: list[tqdm] = []

        def progress(done: int, total: int) -> None:
            if not bars:  # resumed cells are counted, and say nothing about the rate
                bar = tqdm(total=total, initial=done, disable=args.json, file=sys.stderr, unit="solve", leave=False)
                bars.append(closing.enter_context(bar))
            bars[0].update(done - bars[0].n)

        try:
            diagram = phase_diagram(
                model,
                args.x,
                args.y,
                nodes_of(args, model),
                alpha=(args.alpha or 2.0) if free else args.alpha,
                devices=args.devices,
                out=None if args.out is None else args.out / "tracks",
                resume=args.resume,
                progress=progress,
            )
        except KeyboardInterrupt:
            kept = "" if args.out is None else f"finished tracks are kept: go on with --resume --out {args.out}"
            raise KeyboardInterrupt(kept) from None
    curves = {} if free else {"alpha_c": diagram.alpha_c(), "alpha_l": diagram.alpha_l()}
    files = {}
    if args.out is not None:
        picture = io.BytesIO()
        diagram.plot().savefig(picture, format="png", dpi=150)
        files = {"diagram.png": picture.getvalue(), "diagram.csv": diagram.to_csv().encode()}
        files["diagram.npz"] = diagram.pack()
    return Report(_numbers(diagram, curves), _text(diagram, curves), files, bool(diagram.solved.any()))


def _shares(diagram: PhaseDiagram) -> dict[str, int]:
    return {name: int(np.sum(diagram.region == code)) for code, name in enumerate(REGIONS)}


def _numbers(diagram: PhaseDiagram, curves: dict[str, Reading]) -> dict[str, Any]:
    report: dict[str, Any] = dict(diagram.attrs)
    report |= {name: values.tolist() for name, values in (diagram.x, diagram.y)}
    for name, curve in curves.items():
        report |= {name: curve.alpha.tolist(), f"{name}_stderr": curve.stderr.tolist()}
    report["regions"] = _shares(diagram)
    report["status"] = "converged" if diagram.solved.all() else "some cells unsolved"
    return report


def _text(diagram: PhaseDiagram, curves: dict[str, Reading]) -> str:
    lines = [f"{diagram.x[0]} x {diagram.y[0]}: {' x '.join(map(str, diagram.region.shape[::-1]))} cells"]
    lines += [f"  {number:6d} {name}" for name, number in _shares(diagram).items()]
    if curves:
        critical, linear = curves.values()
        lines += [f"{critical.name:>9}  {'alpha_c':<14}alpha_l"]
        pairs = zip(critical.values, critical.alpha, critical.stderr, linear.alpha, linear.stderr, strict=True)
        lines += [f"{v:9.4g}  {with_error(a, da):<14}{with_error(b, db)}" for v, a, da, b, db in pairs]
    return "\n".join(lines)
