"""Time an epoch of the counting task, and its compilation.

    python benchmarks/histogram.py [--runs 1] [--epochs 5] [--samples 50000] [--mechanism semantic]

Prints one JSON object. An epoch is 35,000 sequences in batches of 32, and the test on 15,000 others. Times are given
for all runs together and per run. `XLA_FLAGS=--xla_cpu_multi_thread_eigen=false` restricts the run to one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from typing import Any

import jax
import numpy as np

from tiedattn_jax import counting


def main() -> None:
    """Train for a few epochs and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--mechanism", default="semantic", choices=counting.MECHANISMS)
    args = parser.parse_args()
    data = counting.sample(jax.random.key(0), args.samples)
    keys = jax.random.split(jax.random.key(1), args.runs)

    ticks: list[float] = []
    options: Any = {"epochs": 1 + args.epochs, "progress": lambda done, total: ticks.append(time.perf_counter())}
    frozen = counting.train(keys, data, args.mechanism, **options)
    counting.unfreeze(keys, frozen, data, **options)
    times = {}
    for stage, stage_ticks in zip(("adam", "sgd"), np.split(np.array(ticks), 2), strict=True):
        first, *later = np.diff(stage_ticks).tolist()
        times[stage] = {
            "compile_s": first - min(later),
            "epoch_s_best": min(later),
            "epoch_s_median": float(np.median(later)),
            "epoch_s_per_run": float(np.median(later)) / args.runs,
        }
    metadata = {
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "runs": args.runs,
        "sequences": [len(data.train), len(data.test)],
    }
    print(json.dumps({**metadata, **times}, indent=1))


if __name__ == "__main__":
    main()
