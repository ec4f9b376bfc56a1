"""Measure time and accuracy of the library on this machine, next to other programs.

    python -m benchmarks                            # all benchmarks
    python -m benchmarks gamp train --repeat 9
    python -m benchmarks solve --sizes 8192 65536   # other sizes than the default ones
    python -m benchmarks compiled --help            # what an accelerator will do, without one

Prints a table and writes DIR/DATE-MACHINE.json, with a picture of error against time and one of time against size
beside it. A later run of the same day replaces the benchmarks that it measures. Ratios are the run time of a comparator
over that of the line; above one, the line's case is faster. Every benchmark compiles its programs anew, in the first
case that needs them.

The benchmarks, what a size is, and the default sizes:
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

from tiedattn_jax.base.errors import InputError, require_choice, require_count

from . import compiled, suite
from .registry import BENCHMARKS


def main(argv: list[str] | None = None) -> int:
    """Measure and return the exit code. Bad input ends with exit code 2 and one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compiled"]:
        return compiled.main(argv[1:])
    formatter: Any = argparse.RawDescriptionHelpFormatter
    listing = "".join(
        f"    {name:15} {b.description}; {b.size}: {' '.join(map(str, b.sizes))}\n" for name, b in BENCHMARKS.items()
    )
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__ + listing, formatter_class=formatter)
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help="all by default")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="of the one benchmark that is named")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="calls after the first one, 5 by default")
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results, metavar="DIR", help="benchmarks/results by default")
    args = parser.parse_args(argv)
    try:
        run(args.benchmarks or list(BENCHMARKS), args.sizes, args.repeat, args.out)
    except InputError as problem:
        parser.error(str(problem))
    return 0


def run(names: list[str], sizes: list[int] | None, repeat: int, out: Path) -> None:
    """Run benchmarks and print the table; write the file and the pictures after each benchmark."""
    for name in names:
        require_choice(name, "benchmark", BENCHMARKS)
    require_count(repeat, "repeat")
    if sizes is not None and len(names) != 1:
        raise InputError(
            "sizes", f"must be for one benchmark, got {len(names)}: name one, as their sizes are not alike"
        )
    for size in sizes or ():
        require_count(size, "sizes")
    metadata = suite.about()
    path = suite.path_in(out, metadata)
    measurements: list[suite.Measurement] = []
    print(suite.HEADER, flush=True)
    for name in dict.fromkeys(names):
        jax.clear_caches()  # makes compile times independent of earlier benchmarks
        for measurement in BENCHMARKS[name].run(sizes or BENCHMARKS[name].sizes, repeat):
            print(measurement, flush=True)
            measurements.append(measurement)
        stored = suite.write(path, metadata, measurements)
        pictures = suite.draw(path, stored, {name: b.size for name, b in BENCHMARKS.items()})
    print("\n".join(map(str, [path, *pictures])))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_enable_compilation_cache", False)
    raise SystemExit(main())
