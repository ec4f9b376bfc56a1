"""Error against time for every averaging rule, at a state without jumps and at two with: what the default should be.

For each rule and size: four replicates of the fixed point, each from the exact state at an alpha 2 % off. The error is
the root mean square over the replicates, relative; the truth is the finest rule of lines. Time is that of one
replicate, the median of three solves after one that compiles. Prints JSON lines and writes `work_precision.json` and
`.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import jax
import matplotlib
import numpy as np

import tiedattn_jax as ta

STATES = ((2.0, "semantic"), (2.0, "positional"), (1.0, "semantic"))
NAMES = {"semantic": ("q", "V", "theta", "train_loss"), "positional": ("q", "V", "m", "train_loss")}
RULES = {
    "lines": [lambda m, k=k: ta.line_nodes(m, k) for k in (5, 7, 9, 11, 15)],
    "Sobol": [lambda m, k=k: ta.sobol_nodes(m, 2**k) for k in (12, 14, 16)],
    "Monte Carlo": [lambda m, k=k: ta.monte_carlo_nodes(m, 2**k) for k in (12, 14, 16)],
    "Gauss-Hermite": [lambda m, k=k: ta.gauss_hermite_nodes(m, k) for k in (8, 12, 16)],
}


def numbers(point: ta.FixedPoint) -> np.ndarray:
    """The numbers of every replicate, (R, 4)."""
    x, s = point.replicates.overlaps, point.replicates
    columns = {"q": x.q[:, 0, 0, 0], "V": x.V[:, 0, 0, 0], "theta": x.theta[:, 0, 0, 0], "m": x.m[:, 0, 0]}
    columns["train_loss"] = s.train_loss
    return np.stack([columns[k] for k in NAMES[point.branch]], 1)


def main() -> None:
    """Run all rules at all states."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--truth", type=int, default=21, help="order of the lines taken for the truth (default 21)")
    parser.add_argument("--sizes", type=int, default=5, help="at most so many sizes of each rule (default 5)")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    model = ta.dot_product()
    truth, start = {}, {}
    for alpha, branch in STATES:
        truth[alpha, branch] = numbers(ta.solve(model, alpha, branch, ta.line_nodes(model, args.truth, replicates=1)))[
            0
        ]
        start[alpha, branch] = ta.solve(model, 1.02 * alpha, branch, ta.line_nodes(model, 5)).overlaps
    rows = []
    for rule, sizes in RULES.items():
        for make in sizes[: args.sizes]:
            nodes = make(model)
            for alpha, branch in STATES:
                times = []
                for _ in range(4):
                    before = time.perf_counter()
                    point = jax.block_until_ready(
                        ta.solve(
                            model, alpha, branch, nodes, start=start[alpha, branch], settings=ta.Settings(tol=1e-7)
                        )
                    )
                    times.append(time.perf_counter() - before)
                off = numbers(point) / truth[alpha, branch] - 1
                rows.append(
                    {
                        "rule": rule,
                        "nodes": nodes.size,
                        "alpha": alpha,
                        "branch": branch,
                        "seconds": float(np.median(times[1:])) / nodes.replicates,
                        "status": ta.Status.name_of(point.status),
                        "error": dict(zip(NAMES[branch], np.sqrt(np.mean(off**2, 0)).tolist(), strict=True)),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "work_precision.json").write_text(json.dumps({**machine, **versions, "rows": rows}, indent=1))
    draw(rows, args.out / "work_precision.png")


def draw(rows: list[dict], path: Path) -> None:
    """One panel for each state and number."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 4, figsize=(13, 9), sharex=True, sharey=True, layout="constrained")
    for line, (alpha, branch) in zip(axes, STATES, strict=True):
        for ax, name in zip(line, NAMES[branch], strict=True):
            for rule in RULES:
                mine = [r for r in rows if r["rule"] == rule and (r["alpha"], r["branch"]) == (alpha, branch)]
                ax.loglog([r["seconds"] for r in mine], [r["error"][name] for r in mine], "o-", ms=3, label=rule)
            ax.set_title(f"{name}, {branch}, alpha = {alpha:g}", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("seconds a replicate")
    for ax in axes[:, 0]:
        ax.set_ylabel("relative error")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
