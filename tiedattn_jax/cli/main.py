"""The command `tiedattn`: it parses the options, runs a subcommand and writes its report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax

from ..base import VERSION
from ..base.errors import InputError
from ..base.files import folder_error, write_whole
from ..base.programs import use_compilation_cache
from . import check, diagram, ended, finite, histogram, solve, transition
from .options import ORIGIN, Parser
from .report import Report

COMMANDS = (transition, solve, finite, diagram, histogram)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0; 1 for a solve that failed; 130 for an interrupt; 70 for a defect of the program. A defect is
        reported in two lines on stderr; it is raised instead if the environment variable TIEDATTN_TRACEBACK is set.

    Raises:
        SystemExit: with exit code 2 after bad input, which is reported in one line on stderr; after ``--check`` with 0,
            or 1 if the numbers of this machine are wrong.
    """
    if signal.getsignal(signal.SIGINT) is ended:  # this handler was for the import of the library only
        signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = Parser(
        prog="tiedattn",
        description="Theory and simulations of positional and semantic learning in dot-product attention.",
    )
    parser.add_argument("--version", action="version", version=f"tiedattn_jax {VERSION}")
    check.register(parser)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.register(commands)
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    try:
        use_compilation_cache()
        report = _with_provenance(args, args.run(args))
        if args.out is not None:
            report_json = json.dumps(report.numbers, indent=1).encode()
            for name, content in {**report.files, f"{report.name or args.command}.json": report_json}.items():
                write_whole(args.out / name, content)
    except InputError as problem:
        parser.error(_line(problem, args))
    except KeyboardInterrupt:
        message = args.resume_hint.format(out=args.out) if args.resume_hint and args.out else "nothing was written"
        print(f"tiedattn: interrupted, {message}", file=sys.stderr)
        return 130
    except Exception as defect:
        if args.out is not None and isinstance(defect, OSError):
            complaint = _line(folder_error(args.out, defect), args)
            parser.error(f"{complaint}: free space or use another one, what was finished is there")
        if isinstance(defect, MemoryError) or "RESOURCE_EXHAUSTED" in str(defect):
            parser.error("the memory is not enough, ask for less: fewer nodes, replicates, cells, samples, dimensions")
        if os.environ.get("TIEDATTN_TRACEBACK"):
            raise
        first_line = (str(defect).splitlines() or [""])[0]
        print(f"tiedattn: a defect of the program: {type(defect).__name__}: {first_line}", file=sys.stderr)
        print("tiedattn: TIEDATTN_TRACEBACK=1 before the same call shows where, for a report", file=sys.stderr)
        return 70
    try:
        print(json.dumps(report.numbers) if args.json else report.text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing may be left to write at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report.ok else 1


def _line(problem: InputError, args: argparse.Namespace) -> str:
    """Return bad input as one line, under the name of its option if this subcommand has one."""
    name = problem.argument
    if name not in set(vars(args)) - {"command", "run", "resume_hint"}:
        return str(problem)
    return f"argument --{name.replace('_', '-')}: {problem.problem.replace(f'got {name}=', 'got ')}"


def _with_provenance(args: argparse.Namespace, report: Report) -> Report:
    """Return the report with its provenance: version, seed, layer, ranks, teacher and averages."""
    origin: dict[str, Any] = {"version": VERSION, "seed": args.seed}
    text = report.text
    if "layer" in args:
        origin |= {name: getattr(args, name) for name in ORIGIN}
        for name, default in ORIGIN.items():
            text += "" if origin[name] == default else f"\n{name.replace('_', ' ')}: {origin[name]}"
    if report.nodes is not None:
        rule, size, replicates = type(report.nodes.stack).__name__, report.nodes.size, report.nodes.replicates
        origin["nodes"] = {"rule": rule, "size": size, "replicates": replicates}
        text += f"\naverages: {size} nodes in each of {replicates} replicates ({rule})"
    # JSON has no NaN and no infinity; they become null.
    numbers = json.loads(json.dumps({**origin, **report.numbers}), parse_constant=lambda _: None)
    return report._replace(numbers=numbers, text=text)
