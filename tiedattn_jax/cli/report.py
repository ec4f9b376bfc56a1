"""What the subcommands hand back and show: reports, progress bars, pictures."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tqdm import tqdm

from ..averages.rule import Rule


class Report(NamedTuple):
    """What a subcommand hands back.

    Attributes:
        numbers: the JSON object.
        text: the readable summary.
        files: names and contents for the folder of `--out`.
        ok: False when a solve failed.
        nodes: the averages that were used, where the command has chosen them.
        name: of the JSON file; by default the subcommand's.
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
    """Progress on stderr, nothing with `--json` or where nobody looks: one bar for each stage of a command.

    Args:
        unit: what is counted.
        delay: seconds before a bar is shown, where input may still turn out to be bad after the first call.

    Yields:
        A function of the stage's name, which returns the callback ``progress(done, total)`` that shows and moves its
        bar, in the place of the bar before. Nothing is shown before its first call, so that bad input is told in one
        line.
    """
    with contextlib.ExitStack() as shown:

        def stage(name: str) -> Callable[[int, int], None]:
            bars: list[tqdm] = []

            def progress(done: int, total: int) -> None:
                if not bars:  # what is done before the first call says nothing about the rate
                    shown.close()
                    off = args.json or None  # None: on a terminal only
                    form = {"desc": name, "unit": unit, "file": sys.stderr, "leave": False, "delay": delay}
                    bars.append(shown.enter_context(tqdm(total=total, initial=done, disable=off, **form)))
                bars[0].update(done - bars[0].n)

            return progress

        yield stage


def png(figure: Any) -> bytes:
    """A figure as the content of a file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
