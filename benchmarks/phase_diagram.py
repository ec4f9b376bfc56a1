"""Measure time and accuracy of phase diagrams and boundary curves, and check them against simulations.

    python benchmarks/phase_diagram.py grid 5 25
    python benchmarks/phase_diagram.py boundaries --published
    python benchmarks/phase_diagram.py simulation --d 1000

Each command prints its results as lines of text.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PRNGKeyArray

import tiedattn_jax as ta
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.theory.equations import Equations

BOUNDARIES = [name for name, event in EVENTS.items() if event.value is not None]
ALPHA_C = 1.25154  # at omega = .3; see tests/cases.py
# (alpha, omega) on either side of alpha_c, near it and far from it.
POINTS = ((1.2, 0.4), (0.9, 0.2), (1.15, 0.3), (1.35, 0.3), (2.0, 0.3), (2.0, 0.4))


def grid(a: argparse.Namespace) -> None:
    """Print seconds per cell after compilation, and alpha_c at omega = .3 as read from the grid."""
    model = ta.DotProduct()
    for size in a.sizes:
        ticks: list[tuple[float, int]] = []
        diagram = ta.phase_diagram(
            model,
            alpha=np.linspace(0.1, 2.0, size),
            omega=np.linspace(0.02, 0.5, size),
            nodes=ta.Sobol(a.sobol).rule(model) if a.sobol else ta.Lines(a.order).rule(model),
            devices=a.devices,
            progress=lambda done, total, ticks=ticks: ticks.append((time.perf_counter(), done)),
        )
        end = time.perf_counter()
        (t0, n0), (t1, n1) = ticks[1], ticks[-1]  # the first chunk compiles
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        curve = diagram.alpha_c()
        alpha, bar = (float(np.interp(0.3, curve.at, v)) for v in (curve.alpha, curve.stderr()))
        print(
            f"{size} x {size}: {2 * (t1 - t0) / (n1 - n0):.4f} s per cell, both branches; "
            f"{(t1 - t0) * n1 / (n1 - n0):.1f} s for the grid and {end - t1:.1f} s for retries; "
            f"{np.mean(diagram.solved):.1%} solved, {np.mean(diagram.trusted):.1%} trusted; "
            f"alpha_c(.3) = {alpha:.4f}({bar:.4f}), off by {alpha / ALPHA_C - 1:+.2%}; "
            f"peak memory {memory:.2f} GiB; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def boundaries(a: argparse.Namespace) -> None:
    """Trace boundaries over omega; print them, their intersections, and alpha_c by the published quadrature."""
    model = ta.DotProduct()
    omegas = np.linspace(0.43, 0.0, a.points)
    curves: dict[str, Any] = {}
    for name in a.names:
        start = time.perf_counter()
        try:
            nodes = ta.Lines(a.order).rule(model)
            curves[name] = curve = ta.sweep(ta.find_event, model, event=name, omega=omegas, nodes=nodes, follow=True)
        except ValueError as error:
            print(f"{name}: {error}")
            continue
        print(f"{name}: {time.perf_counter() - start:.1f} s with compilation, load {os.getloadavg()[0]:.1f}")
        for row in zip(curve.at, curve.alpha, curve.stderr(), strict=True):
            print("  omega = {:.4f}: {:.6f} +- {:.1e}".format(*row))
        print(f"  largest error bar {np.nanmax(curve.stderr()):.1e}", flush=True)
    first, *others = curves.values()
    for meeting in first.intersections(*others):
        print(meeting)
    if a.published:
        import published_method as published

        replicate = ta.Lines(a.order, replicates=1).rule(model).replicate(0)

        def exact(x: published.Overlaps, p: published.Problem) -> float:
            """Return the training loss that precise averages give at the published method's overlaps."""
            ones = jnp.ones((2, 1, 1))
            overlaps = ta.Overlaps(x.q * ones, x.V * ones, x.theta * ones, x.m * jnp.array([[1.0], [-1.0]]))
            m = ta.DotProduct(omega=p.omega)
            return float(Equations(m, jnp.asarray(p.alpha), replicate, jnp.ones(2)).step(overlaps)[1].train_loss)

        for omega, alpha in list(zip(curves["alpha_c"].at, curves["alpha_c"].alpha, strict=True))[:: a.points // 4]:
            coarse, fine = (published.critical_alpha(omega, alpha, loss) for loss in (published.train_loss, exact))
            print(
                f"published quadrature, omega = {omega:.3f}: alpha_c = {coarse:.4f} ({coarse / alpha - 1:+.1%}); "
                f"its overlaps, exact losses: {fine:.4f} ({fine / alpha - 1:+.1%})",
                flush=True,
            )


def simulation(a: argparse.Namespace) -> None:
    """Print the loss difference of the branches: theory, and training from both starts on common instances."""
    for alpha, omega in POINTS:
        model = ta.DotProduct(omega=omega)
        points = {b: ta.solve(model, alpha, b) for b in ("positional", "semantic")}
        keys = jax.random.split(jax.random.key(0), a.instances)

        def ends(
            branch: str, model: ta.Model = model, alpha: float = alpha, keys: Key[Array, " K"] = keys
        ) -> ta.results.Table:
            def run(data: ta.Data, key: PRNGKeyArray) -> ta.results.Training:
                return ta.train(model, data, branch, optimizer="lbfgs", key=key, steps=a.steps)

            return ta.run_instances(model, a.d, alpha, run, keys, theory=False, normalise=True)

        runs = {b: ends(b) for b in points}
        counts = {b: r.groups.get(b, 0) for b, r in runs.items()}
        gap = runs["positional"].values("train_loss") - runs["semantic"].values("train_loss")
        theory = float(points["positional"].train_loss - points["semantic"].train_loss)
        solved = all(bool(p.ok) for p in points.values())
        print(
            f"alpha = {alpha}, omega = {omega}: theory {theory if solved else np.nan:+.2e} "
            f"({', '.join(f'{b} {ta.Status.name_of(p.status)}' for b, p in points.items())}); "
            f"simulation {gap.mean():+.2e}, scatter {gap.std(ddof=1):.1e}, of {gap.size} instances at d = {a.d}; "
            f"still on their branch: {counts}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("grid", help=grid.__doc__)
    sub.add_argument("sizes", type=int, nargs="+", help="cells along either axis")
    sub.add_argument("--order", type=int, default=5, help="of the lines")
    sub.add_argument("--sobol", type=int, help="so many Sobol nodes instead of lines")
    sub.add_argument("--devices", type=int)
    sub.set_defaults(run=grid)
    sub = commands.add_parser("boundaries", help=boundaries.__doc__)
    sub.add_argument("--points", type=int, default=8)
    sub.add_argument("--order", type=int, default=7, help="of the lines")
    sub.add_argument("--names", nargs="+", choices=BOUNDARIES, default=BOUNDARIES, metavar="NAME")
    sub.add_argument("--published", action="store_true", help="the published method beside it")
    sub.set_defaults(run=boundaries, devices=None)
    sub = commands.add_parser("simulation", help=simulation.__doc__)
    sub.add_argument("--d", type=int, default=1000)
    sub.add_argument("--instances", type=int, default=6)
    sub.add_argument("--steps", type=int, default=3000)
    sub.set_defaults(run=simulation, devices=None)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", args.devices or 1)
    args.run(args)


if __name__ == "__main__":
    main()
