"""Progress of long computations, by one protocol for all functions that can take longer than some seconds.

The argument `progress` of these functions is None, which shows nothing, True, which shows a bar on stderr, or a
function ``progress(done, total)`` of two integers. It counts all work of the call once and in one unit: settings of a
sweep, branches in cells of a diagram, root searches of a single state or event, runs of a trajectory. Work that is
found on the way, such as a repetition, makes `total` larger. Functions that are one compiled program, such as `gamp`,
`train` and `population`, have no progress, because the host does not see their loops.

A derivative is compiled after the function has returned, where no bar is left. Once a bar was shown in a process, one
line on stderr tells of every program that took more than ten seconds to compile.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from tqdm import tqdm

from .errors import InputError

Report: TypeAlias = Callable[[int, int], None]
Progress: TypeAlias = Report | bool | None

_SLOW = 2.0  # seconds to the first result from which on they are shown
_LONG = 10.0  # seconds of a compilation from which on a line tells of it


def silent(done: int, total: int) -> None:
    """Show no progress."""


def reporter(progress: Any, unit: str) -> Report:
    """Return the function that is told what is done, and of how much.

    Args:
        progress: argument of the caller's, a `Progress`; without stderr, as in a service, there is no bar.
        unit: what is counted.

    Raises:
        InputError: `progress` is none of the three.
    """
    if progress is None or progress is False or (progress is True and sys.stderr is None):
        return silent
    if progress is True:
        _tell_of_compilations()
        return _Bar(unit)
    if not callable(progress):
        raise InputError("progress", f"must be None, True or a function of (done, total), got progress={progress!r}")
    return progress


def counter(report: Report, total: int, done: int = 0) -> Callable[[int], None]:
    """Report what is done so far, and return a function that is told how much more is done and reports the sum."""

    def count(more: int) -> None:
        nonlocal done
        done = min(done + more, total)
        report(done, total)

    count(0)
    return count


@contextlib.contextmanager
def one_search(progress: Progress) -> Iterator[None]:
    """Count what is computed inside this context as one search."""
    report = reporter(progress, "searches")
    report(0, 1)
    yield
    report(1, 1)


def in_parts(progress: Progress) -> Progress:
    """Return what consecutive searches of one call are given as `progress`: their counts add up."""
    if progress is None:
        return None
    report = reporter(progress, "searches")
    before = last = np.zeros(2, int)

    def part(done: int, total: int) -> None:
        nonlocal before, last
        if done <= last[0]:  # the next search has begun
            before = before + last
        last = np.array([done, total])
        report(*(before + last).tolist())

    return part


@functools.cache  # once a process
def _tell_of_compilations() -> None:
    """Print a line from now on for every program that takes long to compile."""
    jax.monitoring.register_event_duration_secs_listener(_tell)


def _tell(event: str, duration_secs: float, **about: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration" and duration_secs > _LONG and sys.stderr is not None:
        name = about.get("fun_name", "a program")
        tqdm.write(f"tiedattn_jax: compiled {name} in {duration_secs:.0f} s", file=sys.stderr)


class _Bar:
    """A bar on stderr. It says "compiling" until the first result, and afterwards how long that took."""

    def __init__(self, unit: str):
        self.begin, self.first = time.perf_counter(), -1
        self.bar: Any = tqdm(desc="compiling", unit=f" {unit}", total=1, file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        self.first = done if self.first < 0 else self.first
        if self.bar.desc and done > self.first:
            seconds = time.perf_counter() - self.begin
            self.bar.set_description_str("", refresh=False)
            if seconds > _SLOW and not self.bar.postfix:
                self.bar.set_postfix_str(f"first result after {seconds:.0f} s", refresh=False)
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        if done == total:
            self.bar.refresh()
