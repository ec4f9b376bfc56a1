"""The command `tiedattn`: parses, runs a subcommand, writes what it hands back."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ..errors import InputError
from ..store import write_whole
from . import diagram, finite, histogram, solve, transition
from .options import Parser, Report

COMMANDS = (transition, solve, finite, diagram, histogram)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, or 1 for a solve that failed, or 130 for an interrupt.

    Raises:
        SystemExit: with exit code 2 after bad input, which is told in one line on stderr.
    """
    parser = Parser(prog="tiedattn", description="Positional and semantic learning in dot-product attention.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.register(commands)
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    _use_compilation_cache()
    try:
        _check_out(args.out)
        report: Report = args.run(args)
        report = report._replace(numbers=_null_for_nan(report.numbers))
        _write(args, report)
    except InputError as problem:
        parser.error(_line(problem, args))
    except KeyboardInterrupt as stop:
        print(f"tiedattn: interrupted, {str(stop) or 'nothing was written'}", file=sys.stderr)
        return 130
    print(json.dumps(report.numbers) if args.json else report.text)
    return 0 if report.ok else 1


def _line(problem: InputError, args: argparse.Namespace) -> str:
    """Bad input in one line: under the name of the option that it is about, if it is one of this subcommand."""
    options = set(vars(args)) - {"command", "run"}
    if problem.argument not in options:
        return str(problem)
    return f"argument --{problem.argument.replace('_', '-')}: {problem.problem}"


def _write(args: argparse.Namespace, report: Report) -> None:
    """The files of a report and its JSON, in the folder of `--out`."""
    if args.out is None:
        return
    files = {**report.files, f"{args.command}.json": json.dumps(report.numbers, indent=1).encode()}
    try:
        for name, content in files.items():
            write_whole(args.out / name, content)
    except OSError as problem:
        raise _not_a_folder(args.out, f" ({problem.strerror})") from None


def _use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless TIEDATTN_CACHE is 0; another value is the folder to keep them in."""
    where = os.environ.get("TIEDATTN_CACHE", str(Path.home() / ".cache" / "tiedattn_jax"))
    if where != "0":
        jax.config.update("jax_compilation_cache_dir", where)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _null_for_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {k: _null_for_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_null_for_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    there = out
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise _not_a_folder(out)


def _not_a_folder(out: Path, why: str = "") -> InputError:
    return InputError("out", f"must be a folder that can be written, got '{out}'{why}")
