"""Time and accuracy of phase diagrams against their size: seconds per cell after compilation, alpha_c at omega = .3.

python benchmarks/phase_diagram.py 5 25 --nodes 2048
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import jax
import numpy as np

import tiedattn_jax as ta

ALPHA_C = 1.25154  # at omega = .3; see tests/cases.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=int, nargs="+", help="cells along either axis")
    parser.add_argument("--nodes", type=int, default=2**11)
    parser.add_argument("--devices", type=int)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", args.devices or 1)
    model = ta.dot_product()
    nodes = ta.sobol_nodes(model, args.nodes)
    for size in args.sizes:
        ticks: list[tuple[float, int]] = []
        diagram = ta.phase_diagram(
            model,
            np.linspace(0.1, 2.0, size),
            np.linspace(0.02, 0.5, size),
            nodes,
            devices=args.devices,
            progress=lambda done, total, ticks=ticks: ticks.append((time.perf_counter(), done)),
        )
        # The first chunk compiles.
        (t0, n0), (t1, n1) = ticks[1], ticks[-1]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        curve = diagram.alpha_c()
        alpha, bar = (float(np.interp(0.3, curve.values, a)) for a in (curve.alpha, curve.stderr))
        print(
            f"{size} x {size}: {2 * (t1 - t0) / (n1 - n0):.4f} s per cell, both branches; "
            f"{(t1 - t0) * n1 / (n1 - n0):.1f} s for the grid; {np.mean(diagram.solved):.1%} solved, "
            f"{np.mean(diagram.trusted):.1%} trusted; alpha_c(.3) = {alpha:.4f}({bar:.4f}), off by {alpha / ALPHA_C - 1:+.2%}; "
            f"peak memory {memory:.2f} GiB; load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
