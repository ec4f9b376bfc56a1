"""The command `tiedattn`: parses, runs a subcommand, writes what it hands back."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .commands import diagram, finite, histogram, solve, transition
from .commands.common import Parser
from .store import write_whole

COMMANDS = (transition, solve, finite, diagram, histogram)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a solve that failed, 130 for an interrupt; 2 exits."""
    parser = Parser(prog="tiedattn", description="Positional and semantic learning in dot-product attention.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.register(commands)
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    _use_compilation_cache()
    try:
        _check_out(args.out)
        report = args.run(args)
    except ValueError as problem:
        name = str(problem).split()[0].rstrip(":")
        if name not in args:
            raise
        parser.error(f"argument --{name}{str(problem).removeprefix(name)}")
    except KeyboardInterrupt as stop:
        print(f"tiedattn: interrupted, {str(stop) or 'nothing was written'}", file=sys.stderr)
        return 130
    numbers = _finite(report.numbers)
    if args.out is not None:
        try:
            for name, content in {
                **report.files,
                f"{args.command}.json": json.dumps(numbers, indent=1).encode(),
            }.items():
                write_whole(args.out / name, content)
        except OSError as problem:
            parser.error(f"argument --out: must be a folder that can be written, got '{args.out}' ({problem.strerror})")
    print(json.dumps(numbers) if args.json else report.text)
    return 0 if report.ok else 1


def _use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless TIEDATTN_CACHE is 0; another value is the folder to keep them in."""
    where = os.environ.get("TIEDATTN_CACHE", str(Path.home() / ".cache" / "tiedattn_jax"))
    if where != "0":
        jax.config.update("jax_compilation_cache_dir", where)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    there = out
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"out: must be a folder that can be written, got '{out}'")
