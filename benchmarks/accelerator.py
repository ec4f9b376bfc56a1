"""Time the library on the device at hand, in at most five minutes, and print the accuracy beside each time.

    python -m benchmarks.accelerator                    # every row that fits into the budget
    python -m benchmarks.accelerator solve gamp --budget 120
    python -m benchmarks.accelerator --small            # small sizes, as a test of the script

Every row is printed as one line of JSON when it is done, and all rows are written to DIR/DATE-DEVICE-accelerator.json.
A row that does not fit into the remaining time is left out and says how long it would take. The rows:
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import tiedattn_jax as ta
from tiedattn_jax.base import VERSION
from tiedattn_jax.base.files import write_whole
from tiedattn_jax.finite.products import back_project, student_fields

ALPHA_C = 1.2515373  # on lines of order 15, accurate to 1e-6
STATE = {"q": 0.11481726, "V": 12.66853, "theta": 0.15815827}  # semantic, alpha = 2; another rule, accurate to 3e-6
_STEPS = 16  # iterations of message passing in a call; even twice as many do not converge

Row = dict[str, Any]
START = time.perf_counter()


def clock(fn: Callable[[], Any], repeat: int) -> tuple[float, float, Any]:
    """Return the seconds of the first call, the median of `repeat` more, and the last result."""
    times = []
    for _ in range(1 + repeat):
        start = time.perf_counter()
        result = jax.block_until_ready(fn())
        times.append(time.perf_counter() - start)
    return times[0], float(np.median(times[1:] or times)), result


def deviation(state: ta.results.FixedPoint) -> float:
    """Return the largest relative error of the order parameters of the semantic state at alpha = 2."""
    return max(abs(float(getattr(state, name)) / value - 1) for name, value in STATE.items())


def solve(small: bool) -> Iterator[Row]:
    """Solve a state on lines of order 9, without a given start."""
    model = ta.DotProduct()
    nodes = ta.Lines(3 if small else 9).rule(model)
    first, seconds, state = clock(lambda: ta.solve(model, 2.0, "semantic", nodes), 1 if small else 5)
    yield {"case": "solve", "first": first, "seconds": seconds, "error": deviation(state), "status": state.status_name}


def gradient(small: bool) -> Iterator[Row]:
    """Differentiate theta of a solved state in sigma."""
    nodes = ta.Lines(3 if small else 9).rule(ta.DotProduct())

    def theta(sigma: Float[Array, ""]) -> Float[Array, ""]:
        return ta.solve(ta.DotProduct(sigma=sigma), 2.0, "semantic", nodes).theta

    first, seconds, slope = clock(lambda: jax.grad(theta)(jnp.asarray(0.5)), 1 if small else 3)
    yield {"case": "gradient of a solve", "first": first, "seconds": seconds, "value": float(slope)}


def transition(small: bool) -> Iterator[Row]:
    """Find alpha_c with its sensitivities, without a given start."""
    model = ta.DotProduct()
    nodes = ta.Lines(3 if small else 9).rule(model)
    first, seconds, critical = clock(lambda: ta.critical_alpha(model, nodes), 1 if small else 3)
    row = {"case": "critical_alpha", "first": first, "seconds": seconds, "error": float(critical.alpha) - ALPHA_C}
    yield row | {"stderr": float(critical.stderr), "by_sigma": float(critical.sensitivities.sigma)}


def states(small: bool) -> Iterator[Row]:
    """Solve states at 1000 settings, about a quarter of them absent, on one replicate of order 5."""
    count = 8 if small else 1000
    rng = np.random.default_rng(0)
    omegas, alphas = rng.uniform(0.05, 0.9, count), rng.uniform(0.3, 2.5, count)
    models = [ta.DotProduct(omega=omega) for omega in omegas]
    nodes = ta.Lines(3 if small else 5, replicates=1).rule(models[0])
    pairs = list(zip(models, alphas, strict=True))
    first, seconds, curve = clock(lambda: ta.sweep(ta.solve, pairs, branch="semantic", nodes=nodes), 1)
    absent = float(np.mean([status == ta.Status.absent for status in curve.status]))
    exist = float(np.mean(curve.found))
    yield {"case": "states", "count": count, "first": first, "a second": count / seconds, "exist": exist} | {
        "absent": absent
    }


def diagram(small: bool) -> Iterator[Row]:
    """Solve both branches on a grid of alpha and omega, on four replicates of order 5."""
    side = 3 if small else 25
    model = ta.DotProduct()
    nodes = ta.Lines(3 if small else 5).rule(model)
    x, y = np.linspace(0.25, 2.5, side), np.linspace(0.05, 0.8, side)
    first, seconds, result = clock(lambda: ta.phase_diagram(model, alpha=x, omega=y, nodes=nodes), 1)
    loss = float(np.mean([branch.replicates.train_loss for branch in (result.positional, result.semantic)]))
    yield {"case": "diagram", "cells": side**2, "first": first, "seconds": seconds, "mean loss": loss}


def gamp(small: bool) -> Iterator[Row]:
    """Time an iteration of message passing next to its two passes over X, and measure its peak memory."""
    for d in (50,) if small else (4000, 10000):
        for double in (True, False):
            with jax.enable_x64(double):
                yield _gamp(d)


def _gamp(d: int) -> Row:
    model = ta.DotProduct()
    data = ta.sample_data(model, d, 2.0, jax.random.key(0))
    size = sum(a.nbytes for a in jax.tree.leaves(data))

    def iterations(steps: int) -> Callable[[], Any]:
        return lambda: ta.gamp(model, data, steps=steps, damping=0.5).Q

    @jax.jit
    def passes(x: Float[Array, "L n d"], Q: Float[Array, "d r"]) -> Float[Array, "d r"]:
        with jax.default_matmul_precision("highest"):
            return jax.lax.fori_loop(0, _STEPS, lambda _, Q: 1e-6 * back_project(x, student_fields(x, Q)), Q)

    _, long, Q = clock(iterations(2 * _STEPS), 2)
    _, short, _ = clock(iterations(_STEPS), 2)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", np.nan)
    _, bare, _ = clock(lambda: passes(data.x, Q), 2)
    estimate = ta.gamp(model, data, steps=400)
    step, pair = (long - short) / _STEPS, bare / _STEPS
    dtype = str(Q.dtype)
    row = {"case": "gamp", "d": d, "dtype": dtype, "iteration": step, "two passes": pair, "ratio": step / pair}
    outcome = {"status": estimate.status_name, "iterations": int(estimate.iterations)}
    return row | {"peak over data": float(peak) / size} | outcome


def train(small: bool) -> Iterator[Row]:
    """Time a gradient step, and measure the peak memory of training."""
    d = 50 if small else 10000
    model = ta.DotProduct()
    data = ta.sample_data(model, d, 2.0, jax.random.key(0))
    size = sum(a.nbytes for a in jax.tree.leaves(data))
    before = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", np.nan)
    _, long, _ = clock(lambda: ta.train(model, data, steps=2 * _STEPS).Q, 2)
    _, short, _ = clock(lambda: ta.train(model, data, steps=_STEPS).Q, 2)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", np.nan)
    row = {"case": "train", "d": d, "step": (long - short) / _STEPS, "peak over data": float(peak) / size}
    yield row | {"peak over data before": float(before) / size}


# Rows, each with the approximate seconds that it takes on an H100 with nothing compiled.
ROWS: dict[str, tuple[Callable[[bool], Iterator[Row]], float]] = {
    "solve": (solve, 25),
    "transition": (transition, 10),
    "gamp": (gamp, 50),
    "train": (train, 15),
    "states": (states, 90),
    "diagram": (diagram, 40),
    "gradient": (gradient, 40),
}


def run(names: list[str], small: bool, budget: float, out: Path) -> Path:
    """Measure and print the rows, write them to a file, and return its path."""
    device = jax.local_devices()[0]
    header = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    header |= {"version": VERSION, "date": datetime.date.today().isoformat(), "x64": bool(jax.config.jax_enable_x64)}
    name = re.sub(r"\W+", "-", device.device_kind.lower()).strip("-")
    path, rows = out / f"{header['date']}-{name}-accelerator.json", []
    for key in names:
        fn, duration = ROWS[key]
        remaining = budget - (time.perf_counter() - START)
        if not small and duration > remaining:
            rows.append({"case": key, "left out": f"it takes about {duration:g} s, {max(remaining, 0):.0f} s are left"})
            print(json.dumps(rows[-1]), flush=True)
            continue
        try:
            for row in fn(small):
                rows.append(row | {"at": time.perf_counter() - START})
                print(json.dumps(rows[-1]), flush=True)
        except Exception as problem:  # one failure must not lose the other rows
            rows.append({"case": key, "failed": f"{type(problem).__name__}: {str(problem)[:500]}"})
            print(json.dumps(rows[-1]), flush=True)
        write_whole(path, json.dumps({"about": header, "rows": rows}, indent=1).encode())
    return path


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
    listing = "".join(f"    {name:11} {fn.__doc__}\n" for name, (fn, _) in ROWS.items())
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.accelerator", description=__doc__ + listing, formatter_class=formatter
    )
    parser.add_argument("rows", nargs="*", metavar="row", help="all by default")
    parser.add_argument("--budget", type=float, default=300, metavar="S", help="seconds, 300 by default")
    parser.add_argument("--small", action="store_true", help="small sizes")
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results, metavar="DIR", help="benchmarks/results by default")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"row must be one of {', '.join(ROWS)}, got {unknown[0]!r}")
    print(run(args.rows or list(ROWS), args.small, args.budget, args.out))
    return 0


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    raise SystemExit(main())
