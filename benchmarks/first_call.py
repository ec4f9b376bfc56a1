"""Split the time of the first call into import, tracing, lowering, compiling and running, without and with a cache.

    python benchmarks/first_call.py [import|solve|gradient|critical_alpha|transition ...] [--programs 3]

Every row is a separate process. The first row of a call starts with an empty folder for compiled programs, the second
one with the folder that the first one filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter

CALLS = ("import", "solve", "gradient", "critical_alpha", "transition")
PARTS = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")  # jax's names of tracing, lowering and compiling


def child(call: str) -> dict:
    """Make one call in this process; return its seconds by part and by program."""
    start = time.perf_counter()
    import jax

    jax_time = time.perf_counter() - start
    jax.config.update("jax_enable_x64", True)
    import tiedattn_jax as ta

    package_time = time.perf_counter() - start - jax_time
    ta.use_compilation_cache()
    parts, programs = Counter(), Counter()

    def listen(event: str, seconds: float, **details: str) -> None:
        part = event.split("/")[-1].removesuffix("_duration")
        parts[part] += seconds
        programs[details.get("fun_name", "?").removeprefix("jit(").removesuffix(")")] += seconds if part in PARTS else 0

    jax.monitoring.register_event_duration_secs_listener(listen)
    model = ta.DotProduct()

    def transition() -> None:
        from tiedattn_jax.cli.main import main

        with tempfile.TemporaryDirectory() as out:
            main(["transition", "--out", out])

    calls = {
        "import": lambda: None,
        "solve": lambda: ta.solve(model, 2.0).theta,
        "gradient": lambda: jax.grad(lambda sigma: ta.solve(ta.DotProduct(sigma=sigma), 2.0).theta)(0.5),
        "critical_alpha": lambda: ta.critical_alpha(model).alpha,
        "transition": transition,
    }
    times = []
    for _ in range(1 if call == "transition" else 2):
        start = time.perf_counter()
        jax.block_until_ready(calls[call]())
        times.append(time.perf_counter() - start)
    return {
        "import jax": jax_time,
        "import tiedattn_jax": package_time,
        "first": times[0],
        "second": times[-1],
        **{part: parts[part] for part in PARTS},
        "programs": programs.most_common(12),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="*", default=CALLS, help=f"some of {', '.join(CALLS)}")
    parser.add_argument("--programs", type=int, default=0, help="so many programs that take longest, each")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(*args.calls)))
        return
    names = ["import jax", "import tiedattn_jax", "first", *PARTS, "second"]
    print("| call | cache | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 2) + "|")
    for call in args.calls:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "full"):
                command = [sys.executable, __file__, call, "--child"]
                process = subprocess.run(
                    command, env={**os.environ, "TIEDATTN_CACHE": folder}, capture_output=True, text=True, check=True
                )
                row = json.loads(process.stdout.splitlines()[-1])
                print(f"| {call} | {cache} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |", flush=True)
                for name, seconds in row["programs"][: args.programs]:
                    print(f"    {name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
