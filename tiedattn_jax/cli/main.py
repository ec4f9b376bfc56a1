"""The command `tiedattn`: it parses the options, runs a subcommand and writes its report; or checks the machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from ..base import VERSION
from ..base.errors import InputError
from ..base.files import folder_error, write_whole
from ..base.machine import cores
from ..base.programs import use_compilation_cache
from ..base.report import table
from ..model.layers import DotProduct
from ..theory.solve import solve
from . import simulations, theory
from .options import ORIGIN, Parser, Report, complain

_FIRST = "tiedattn transition --out results"  # the command to begin with


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0; 1 for a solve that failed; 130 for an interrupt.

    Raises:
        SystemExit: with exit code 2 after bad input, which is reported in one line on stderr; after ``--check`` with 0,
            or 1 if the numbers of this machine are wrong.
    """
    parser = Parser(
        prog="tiedattn",
        description="Theory and simulations of positional and semantic learning in dot-product attention.",
        epilog=f"Begin with: {_FIRST}. Every command lists its options with --help.",
    )
    parser.add_argument("--version", action="version", version=f"tiedattn_jax {VERSION}")
    text = "solve one state twice, compare it with known numbers, and show device, precision, versions and times"
    parser.add_argument("--check", action=CheckAction, nargs=0, help=text)
    commands = parser.add_subparsers(dest="command", parser_class=Parser)
    for command in (*theory.COMMANDS, *simulations.COMMANDS):
        command.add_to(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.error(f"command must be one of {', '.join(commands.choices)}, got none: begin with {_FIRST}")
    jax.config.update("jax_enable_x64", True)
    try:
        _keep_programs()
        report = _with_provenance(args, args.run(args))
        if args.out is not None:
            report_json = json.dumps(report.numbers, indent=1).encode()
            for name, content in {**report.files, f"{report.name or args.command}.json": report_json}.items():
                write_whole(args.out / name, content)
    except InputError as problem:
        parser.error(_line(problem, args))
    except KeyboardInterrupt:
        message = args.resume_hint.format(out=args.out) if args.resume_hint and args.out else "nothing was written"
        complain(f"interrupted, {message}")
        return 130
    except Exception as defect:  # lack of room is input, all else a defect of the program
        if args.out is not None and isinstance(defect, OSError):
            complaint = _line(folder_error(args.out, defect), args)
            parser.error(f"{complaint}: free space or use another one, what was finished is there")
        if isinstance(defect, MemoryError) or "RESOURCE_EXHAUSTED" in str(defect):
            parser.error("the memory is not enough, ask for less: fewer nodes, replicates, cells, samples, dimensions")
        raise
    try:
        print(json.dumps(report.numbers) if args.json else report.text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; nothing may be left to write at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report.ok else 1


def _keep_programs() -> None:
    """Keep compiled programs; print one line on stderr if there is no folder for them."""
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        use_compilation_cache()
    for complaint in complaints:
        complain(str(complaint.message))


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
        origin["nodes"] = report.nodes.described()
        text += "\naverages: {size} nodes in each of {replicates} replicates ({rule})".format(**origin["nodes"])
    # JSON has no NaN and no infinity; they become null.
    numbers = json.loads(json.dumps({**origin, **report.numbers}), parse_constant=lambda _: None)
    return report._replace(numbers=numbers, text=text)


# The semantic state of the standard model at alpha = 2, from an integration rule of another kind than any here.
KNOWN = {"q": 0.11481726, "V": 12.66853, "theta": 0.15815827, "train_loss": 0.0035906160}
_ACCURACY = 1e-4  # relative: the averages are accurate to 4e-5


def check_machine() -> tuple[bool, str]:
    """Solve one state twice; return whether its numbers are the known ones, and a report.

    The first call compiles its programs, or reads them from the folder of the compilation cache.
    """
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        state = solve(DotProduct(), 2.0, "semantic")
        losses = jax.block_until_ready((state.train_loss, state.stderr.train_loss))
        seconds.append(time.perf_counter() - begin)
    device, dtype = jax.devices()[0], losses[0].dtype
    rows: list[tuple[str, ...]] = [("", "here", "known", "off by")]
    works = bool(state.ok)
    for name, known in KNOWN.items():
        value = float(getattr(state, name))
        error = abs(value / known - 1)
        works &= bool(np.isfinite(value)) and error < _ACCURACY
        rows.append((name, f"{value:.8g}", f"{known:.8g}", f"{error:.0e}"))
    jaxlib = metadata.version("jaxlib")
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    setting = [
        ("versions", f"tiedattn_jax {VERSION}, jax {jax.__version__}, jaxlib {jaxlib}"),
        ("device", f"{len(jax.devices())} x {device.device_kind} ({device.platform}), {cores()} cores of the host"),
        ("precision", f"{dtype}"),
        ("programs", f"kept in {folder}" if folder else "not kept"),
        ("first call", f"{seconds[0]:.2f} s, which compiles or reads compiled programs"),
        ("second call", f"{seconds[1]:.2f} s"),
    ]
    verdict = f"the numbers agree with the known ones to {_ACCURACY:.0e}" if works else "the numbers are WRONG here"
    title = f"semantic state at alpha = 2: {state.status_name}; {verdict}"
    return works, "\n".join([table(setting), title, table(rows)])


class CheckAction(argparse.Action):
    """Option that checks the machine instead of running a command; the exit code is 1 if the numbers are wrong."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        jax.config.update("jax_enable_x64", True)
        try:
            jax.devices()
        except Exception as problem:  # jax has no type of its own for it
            reason = (str(problem).splitlines() or [type(problem).__name__])[0] or type(problem).__name__
            parser.error(f"JAX must find a device, got {reason!r}: see JAX_PLATFORMS and the installed plugins of JAX")
        _keep_programs()
        works, text = check_machine()
        print(text)
        parser.exit(0 if works else 1)
