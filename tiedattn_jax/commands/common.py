"""What the subcommands share: option groups, checks of their values, reports, numbers with error bars."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .. import nodes as averaging
from ..lines import default_nodes
from ..model import DotProduct, dot_product
from ..overlaps import BRANCHES


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


def output_options() -> Parser:
    """`--seed --json --out`, which every subcommand has."""
    parser = Parser(add_help=False)
    parser.add_argument("--seed", type=seed, default=0, help="seed of all that is random (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, no progress bars")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures and tables into this folder")
    return parser


def model_options() -> Parser:
    """The numbers of the model: `--omega --sigma --lam --mixing`."""
    parser = Parser(add_help=False)
    parser.add_argument("--omega", type=share, default=0.3, help="positional share of the target (default .3)")
    parser.add_argument("--sigma", type=positive, default=0.5, help="standard deviation of the tokens (default .5)")
    parser.add_argument("--lam", type=positive, default=0.01, help="ridge strength lambda (default .01)")
    parser.add_argument(
        "--mixing",
        type=share,
        nargs=4,
        default=[0.6, 0.4, 0.4, 0.6],
        metavar=("A11", "A12", "A21", "A22"),
        help="positional part of the target, rows summing to 1 (default .6 .4 .4 .6)",
    )
    return parser


def node_options(default: int = 2**15) -> Parser:
    """The averages: `--rule --nodes --replicates`."""
    parser = Parser(add_help=False)
    parser.add_argument(
        "--rule",
        choices=("lines", "sobol"),
        default="lines",
        help="averaging rule: jump-aware lines (default), or Sobol",
    )
    parser.add_argument(
        "--nodes", type=power_of_two, default=default, help=f"nodes in a replicate, about (default {default})"
    )
    parser.add_argument(
        "--replicates",
        type=count,
        default=averaging.DEFAULT_REPLICATES,
        help="replicates for error bars (default 4)",
    )
    return parser


def state_options() -> Parser:
    """Which state: `--alpha --branch`."""
    parser = Parser(add_help=False)
    parser.add_argument("--alpha", type=positive, default=2.0, help="samples per dimension n/d (default 2)")
    parser.add_argument("--branch", choices=BRANCHES, default="semantic", help="branch (default semantic)")
    return parser


def model_of(args: argparse.Namespace) -> DotProduct:
    """The model that the options describe.

    Raises:
        ValueError: a mixing matrix whose rows do not sum to one.
    """
    return dot_product(args.omega, args.sigma, args.lam, np.reshape(args.mixing, (2, 2)))


def nodes_of(args: argparse.Namespace, model: DotProduct, limit: int | None = None) -> averaging.Rule:
    """The averaging rule that the options describe, with about `limit` nodes at most."""
    make = averaging.sobol_nodes if args.rule == "sobol" else default_nodes
    return make(model, min(args.nodes, limit or args.nodes), seed=args.seed, replicates=args.replicates)


def with_error(value: Any, error: Any) -> str:
    """A number with its error bar in the last digits: 1.25154(12)."""
    value, error = float(value), float(error)
    if not math.isfinite(error) or error <= 0:
        return f"{value:.6g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f}({round(error * 10**digits)})"


def ticking(items: Iterable, bar: Any) -> Iterable:
    """The items, with one tick of a progress bar for each that is done."""
    for item in items:
        yield item
        bar.update()
