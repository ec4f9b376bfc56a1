"""Options and reports, which all subcommands share: parsers, checks, the model and averages that options describe."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from ..averages.recipes import LEAST_SOBOL, SIZES, Sobol, default_recipe
from ..averages.rules import REPLICATES, Rule
from ..base.errors import InputError, require_memory
from ..model.layers import LAYERS, AttentionLayer, DotProduct
from ..model.penalties import L1

NUMBERS = ("omega", "sigma", "lam")  # numbers of the model that are options and can be axes of a diagram
RULES: dict[str, Callable[..., Rule]] = {
    "lines": lambda model, n, **options: default_recipe(model, n, **options).rule(model),
    "sobol": lambda model, n, **options: Sobol(n, **options).rule(model),
}
_MAX_INTEGER = 2**31 - 1  # largest integer option: compiled programs count in 32 bits
_MAX_NODES = 2**24  # largest number of nodes of a product rule
_RULE_BYTES = {
    "lines": 2,
    "sobol": 100,
}  # of a node: four numbers for a line of twenty nodes or more; Sobol points are copied
_TINY, _HUGE = 1e-30, 1e30  # range of numbers whose products neither vanish nor overflow


def complain(message: str) -> None:
    """Write one line on stderr; without a stderr write nothing, where `print` would write on stdout."""
    if sys.stderr is not None:
        print(f"tiedattn: {message}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Parser that reports bad input in one line on stderr and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


Value = TypeVar("Value")


def checked(kind: Callable[[str], Value], requirement: str, holds: Callable[[Value], bool]) -> Callable[[str], Value]:
    """Return a parser of an option, which converts the text by `kind`.

    It reports "must be `requirement`" unless the value satisfies `holds`.
    """

    def parse(text: str) -> Value:
        try:
            value = kind(text)
            is_valid = holds(value)
        except (ValueError, OSError):
            is_valid = False
        if not is_valid:
            raise argparse.ArgumentTypeError(f"must be {requirement}, got {text!r}")
        return value

    return parse


def integer(
    minimum: int = 1, maximum: int = _MAX_INTEGER, suffix: str = "", holds: Callable[[int], bool] = lambda v: True
) -> Callable[[str], int]:
    """Return a parser of an integer between `minimum` and `maximum`; `suffix` says in words what `holds` requires."""
    return checked(
        int, f"an integer from {minimum} to {maximum}{suffix}", lambda v: minimum <= v <= maximum and holds(v)
    )


def _is_writable(text: str) -> bool:
    """Return whether a folder can be written, or can be made if it does not exist."""
    ancestor = next(p for p in (Path(text), *Path(text).parents) if p.exists())
    return bool(text) and "\0" not in text and ancestor.is_dir() and os.access(ancestor, os.W_OK)


positive = checked(float, f"a number from {_TINY:g} to {_HUGE:g}", lambda v: _TINY <= v <= _HUGE)
not_negative = checked(float, f"0, or a number from {_TINY:g} to {_HUGE:g}", lambda v: v == 0 or _TINY <= v <= _HUGE)
share = checked(float, "a number in [0, 1]", lambda v: 0 <= v <= 1)
folder = checked(str, "a folder that can be written", _is_writable)
part = checked(
    lambda text: tuple(map(int, text.split("/"))), "K/N with 1 <= K <= N", lambda v: len(v) == 2 and 0 < v[0] <= v[1]
)
_power_of_two = integer(LEAST_SOBOL, _MAX_NODES, ", a power of two, for instance 65536", lambda v: v & (v - 1) == 0)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the default arguments of a function of the library; they are the defaults of the options, too."""
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


Option = dict[str, Any]  # keywords of `add_argument`


def option(text: str, kind: Callable[[str], Any] | None = None, default: Any = None, **keywords: Any) -> Option:
    """Return an option; the parser adds the default to its help text."""
    given = {"type": kind, "default": default, **keywords}
    return {"help": text} | {name: value for name, value in given.items() if value is not None}


_MODEL = defaults_of(DotProduct)
_MIXING = "positional part A of the target, whose rows sum to 1; by default .6 .4 .4 .6, or 1 0 .4 .6 for the layer "
_L1 = "penalty STRENGTH |w| on every weight w; with the ridge this is the elastic net"
_RANK = "number of columns of the student; for the layer untied_dot_product, of its queries"
_TEACHER = "squared norm Q*^T Q* / d of each column of the teacher"
ALPHA = {"alpha": option("samples per dimension n/d", positive, 2.0)}
MODEL = {
    "layer": option("attention layer", default="dot_product", choices=LAYERS),
    "omega": option("positional share of the target", share, _MODEL["omega"]),
    "sigma": option("standard deviation of the tokens", positive, _MODEL["sigma"]),
    "lam": option("ridge strength lambda; 0 only with --l1", not_negative, _MODEL["lam"]),
    "l1": option(_L1, positive, metavar="STRENGTH"),
    "mixing": option(f"{_MIXING}causal_dot_product", share, nargs=4, metavar=("A11", "A12", "A21", "A22")),
    "rank": option(_RANK, integer(), _MODEL["rank"]),
    "teacher": option(_TEACHER, positive, _MODEL["teacher"]),
    "tied-teacher": option("tie the target of the layer untied_dot_product", action="store_true"),
}
_OPTIMAL = "add the Bayes-optimal learner: the alphas of weak and perfect recovery of the teacher, and its test error "
OPTIMAL = {"optimal": option(f"{_OPTIMAL}where the figure shows test errors", action="store_true")}
# Defaults of the options that reports repeat besides the model's numbers.
ORIGIN = {**{name: MODEL[name]["default"] for name in ("layer", "rank", "teacher")}, "tied_teacher": False}
_FOLDER = "write figures and tables into this folder"
_OUTPUT = {
    "seed": option("seed of the random numbers", integer(0, 2**63 - 1), 0),
    "json": option("print one JSON object on stdout, and show no progress bars", action="store_true"),
    "out": option(_FOLDER, lambda text: Path(folder(text)), metavar="DIR"),
}
_RULE = (
    "averaging rule: lines that are broken where the proximal operator jumps, or single Sobol points; with more "
    "than two fields, lines means Sobol points, too"
)
_REPLICATES = "number of independent replicates; their scatter gives the error bars"


def averages(size: str = "solve") -> dict[str, Option]:
    """Return the options `--rule --nodes --replicates`; `size` is the entry of `SIZES` with the default nodes."""
    return {
        "rule": option(_RULE, default="lines", choices=RULES),
        "nodes": option("approximate number of nodes in a replicate, a power of two", _power_of_two, SIZES[size]),
        "replicates": option(_REPLICATES, integer(), REPLICATES),
    }


@contextlib.contextmanager
def under_options(**options: str) -> Iterator[None]:
    """Report bad input of the library under the options that stand for its arguments.

    Args:
        options: by the name of an argument the option, and words to put before the sentence.
    """
    try:
        yield
    except InputError as problem:
        name, _, words = options.get(problem.argument, problem.argument).partition(" ")
        sentence = problem.problem.replace(f"got {problem.argument}=", "got ")
        raise InputError(name, " ".join(filter(None, (words, sentence)))) from None


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        name: its name.
        run: function of the parsed options that does the work and returns a `Report`.
        text: what it does, for the help.
        options: its options, keywords of `add_argument` by name; `--seed --json --out` are added to all subcommands.
        resume_hint: message after an interrupted call with `--out`; it says how to go on, with {out} for the folder. By
            default the message says that nothing was written.
    """

    name: str
    run: Callable[[argparse.Namespace], Report]
    text: str
    options: dict[str, Option]
    resume_hint: str | None = None

    def add_to(self, commands: argparse._SubParsersAction) -> None:
        """Add the subcommand to the parser of the command."""
        parser = commands.add_parser(self.name, help=self.text, description=self.text)
        for option, form in {**self.options, **_OUTPUT}.items():
            default = form.get("default")
            words = " ".join(default) if isinstance(default, list) else "%(default)s"
            suffix = "" if default is None else f" (default {words})"
            name = option if form.get("nargs") == "+" else f"--{option}"  # a list of files has no dashes
            parser.add_argument(name, **{**form, "help": form["help"] + suffix})
        parser.set_defaults(run=self.run, resume_hint=self.resume_hint)


def model_of(args: argparse.Namespace) -> AttentionLayer:
    """Return the model that the options describe.

    Raises:
        InputError: if the rows of the mixing matrix do not sum to one, the layer does not take the matrix, the layer
            does not have an option, or there is neither a ridge nor a penalty.
    """
    arguments: dict[str, Any] = {} if args.mixing is None else {"mixing": np.reshape(args.mixing, (2, 2))}
    if args.tied_teacher:
        if args.layer != "untied_dot_product":
            requirement = f"must be left out beside --layer {args.layer}, which has none"
            raise InputError("tied_teacher", f"{requirement}, got {args.tied_teacher}")
        arguments["tied_teacher"] = True
    penalty = None if args.l1 is None else L1(args.l1)
    layer = LAYERS[args.layer]
    return layer(args.omega, args.sigma, args.lam, **arguments, rank=args.rank, teacher=args.teacher, penalty=penalty)


def nodes_of(args: argparse.Namespace, model: AttentionLayer, most: int = _MAX_NODES) -> Rule:
    """Return the averaging rule that the options describe, with about `most` nodes or fewer.

    Raises:
        InputError: if nodes and replicates do not fit into memory.
    """
    size = min(args.nodes, most)
    memory = float(args.replicates) * max(size, SIZES["grid"]) * _RULE_BYTES[args.rule]
    require_memory(memory, "replicates", args.replicates, f"averages of {size} nodes in each")
    return RULES[args.rule](model, size, seed=args.seed, replicates=args.replicates)


class Report(NamedTuple):
    """The report that a subcommand returns.

    Attributes:
        numbers: the JSON object.
        text: the readable summary.
        files: contents of the files in the folder of `--out`, by name.
        ok: False if a solve failed.
        nodes: averaging rule that was used, if the command chose it; None otherwise.
        name: name of the JSON file; by default that of the subcommand.
    """

    numbers: dict[str, Any]
    text: str
    files: dict[str, bytes]
    ok: bool
    nodes: Rule | None = None
    name: str | None = None


@contextlib.contextmanager
def progress_bars(
    args: argparse.Namespace, unit: str, delay: float = 0.0
) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show a progress bar on stderr for each stage of a command; none with `--json` or if stderr is no terminal.

    Args:
        unit: name of the unit that is counted.
        delay: seconds before a bar is shown, for commands that may find bad input after the first call.

    Yields:
        A function of the stage's name. It returns the callback ``progress(done, total)``, which shows and moves the bar
        of the stage in place of the previous bar. Nothing is shown before the first call, so that bad input is reported
        in one line.
    """
    with contextlib.ExitStack() as bar_stack:

        def stage(name: str) -> Callable[[int, int], None]:
            bars: list[tqdm] = []

            def progress(done: int, total: int) -> None:
                if not bars:  # work done before the first call says nothing about the rate
                    bar_stack.close()
                    is_off = args.json or sys.stderr is None or None  # None shows the bar on a terminal only
                    style = {"desc": name, "unit": unit, "file": sys.stderr, "leave": False, "delay": delay}
                    bars.append(bar_stack.enter_context(tqdm(total=total, initial=done, disable=is_off, **style)))
                bars[0].update(done - bars[0].n)

            return progress

        yield stage


def png(figure: Figure) -> bytes:
    """Return a figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
