"""Output of the subcommands: reports, progress bars, pictures."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tqdm import tqdm

from ..averages.rules import Rule


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
                    is_off = args.json or None  # None shows the bar on a terminal only
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
