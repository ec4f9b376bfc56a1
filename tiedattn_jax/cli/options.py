"""What the subcommands share: groups of options, checks of their values, progress bars, and what they hand back."""

from __future__ import annotations

import argparse
import contextlib
import csv
import inspect
import io
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from tqdm import tqdm

from ..averages.default import default_nodes
from ..averages.nodes import sobol_nodes
from ..averages.rule import Rule
from ..averages.sizes import REPLICATES, SIZES
from ..layers import DotProduct, dot_product

NUMBERS = ("omega", "sigma", "lam")  # of the model, as options and in reports
ALPHA = 2.0
RULES = {"lines": default_nodes, "sobol": sobol_nodes}


class Report(NamedTuple):
    """What a subcommand hands back.

    Attributes:
        numbers: the JSON object.
        text: the readable summary.
        files: names and contents for the folder of `--out`.
        ok: False when a solve failed.
    """

    numbers: dict[str, Any]
    text: str
    files: dict[str, bytes]
    ok: bool


class Parser(argparse.ArgumentParser):
    """One line on stderr and exit code 2 for bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _number(text: str, kind: Callable[[str], Any], want: str, ok: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and ok(value)):
        raise argparse.ArgumentTypeError(f"must be {want}, got {text!r}")
    return value


positive = partial(_number, kind=float, want="a positive number", ok=lambda v: v > 0)
share = partial(_number, kind=float, want="a number in [0, 1]", ok=lambda v: 0 <= v <= 1)
count = partial(_number, kind=int, want="a positive integer", ok=lambda v: v > 0)
seed = partial(_number, kind=int, want="an integer of at least 0", ok=lambda v: v >= 0)
power_of_two = partial(
    _number, kind=int, want="a power of two, for instance 65536", ok=lambda v: v > 0 and v & (v - 1) == 0
)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function of the library takes for the arguments that are left out: the options' defaults are no others."""
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


def output_options() -> Parser:
    """`--seed --json --out`, which every subcommand has."""
    parser = Parser(add_help=False)
    parser.add_argument("--seed", type=seed, default=0, help="seed of all that is random (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, no progress bars")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures and tables into this folder")
    return parser


def model_options() -> Parser:
    """The numbers of the model: `--omega --sigma --lam --mixing`."""
    parser, default = Parser(add_help=False), defaults_of(dot_product)
    texts = {
        "omega": (share, "positional share of the target"),
        "sigma": (positive, "standard deviation of the tokens"),
        "lam": (positive, "ridge strength lambda"),
    }
    for name, (kind, text) in texts.items():
        parser.add_argument(f"--{name}", type=kind, default=default[name], help=f"{text} (default %(default)s)")
    mixing = np.ravel(default["mixing"]).tolist()
    text = f"positional part of the target, rows summing to 1 (default {' '.join(map(str, mixing))})"
    names = ("A11", "A12", "A21", "A22")
    parser.add_argument("--mixing", type=share, nargs=len(names), default=mixing, metavar=names, help=text)
    return parser


def node_options(default: int = SIZES["solve"]) -> Parser:
    """The averages: `--rule --nodes --replicates`."""
    parser = Parser(add_help=False)
    text = "averaging rule: lines, which are broken where the proximal operator jumps, or sobol (default %(default)s)"
    parser.add_argument("--rule", choices=RULES, default="lines", help=text)
    text = "nodes in a replicate, about (default %(default)s)"
    parser.add_argument("--nodes", type=power_of_two, default=default, help=text)
    text = "replicates for error bars (default %(default)s)"
    parser.add_argument("--replicates", type=count, default=REPLICATES, help=text)
    return parser


def alpha_options() -> Parser:
    """`--alpha`, of one setting."""
    parser = Parser(add_help=False)
    text = "samples per dimension n/d (default %(default)s)"
    parser.add_argument("--alpha", type=positive, default=ALPHA, help=text)
    return parser


def model_of(args: argparse.Namespace) -> DotProduct:
    """The model that the options describe.

    Raises:
        InputError: a mixing matrix whose rows do not sum to one.
    """
    return dot_product(args.omega, args.sigma, args.lam, np.reshape(args.mixing, (2, 2)))


def nodes_of(args: argparse.Namespace, model: DotProduct, most: int | None = None) -> Rule:
    """The averaging rule that the options describe, with about `most` nodes at most."""
    size = args.nodes if most is None else min(args.nodes, most)
    return RULES[args.rule](model, size, seed=args.seed, replicates=args.replicates)


@contextlib.contextmanager
def progress_bars(
    args: argparse.Namespace, unit: str, delay: float = 0.0
) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Progress on stderr, nothing with `--json`: one bar for each stage of a command, which replaces the one before.

    Args:
        unit: what is counted.
        delay: seconds before a bar is shown, where input may still turn out to be bad after the first call.

    Yields:
        A function of the stage's name, which returns the callback ``progress(done, total)`` that shows and moves its
        bar. Nothing is shown before its first call, so that bad input is told in one line.
    """
    with contextlib.ExitStack() as shown:

        def stage(name: str) -> Callable[[int, int], None]:
            bars: list[tqdm] = []

            def progress(done: int, total: int) -> None:
                if not bars:  # what is done before the first call says nothing about the rate
                    shown.close()
                    form = {"desc": name, "unit": unit, "file": sys.stderr, "leave": False, "delay": delay}
                    bars.append(shown.enter_context(tqdm(total=total, initial=done, disable=args.json, **form)))
                bars[0].update(done - bars[0].n)

            return progress

        yield stage


def with_error(value: Any, error: Any) -> str:
    """A number with its error bar in the last digits: 1.25154(12)."""
    value, error = float(value), float(error)
    if not math.isfinite(error) or error <= 0:
        return f"{value:.6g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f}({round(error * 10**digits)})"


def png(figure: Any) -> bytes:
    """A figure as the content of a file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def csv_of(rows: list[dict[str, Any]]) -> bytes:
    """Rows with the same names as the content of a CSV file."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()
