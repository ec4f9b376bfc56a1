"""The engine: many root searches at once, none of which waits for the slowest.

A `Lane` is one root search: a model, an alpha, a replicate of the averages, the free order parameters, and a start. A
*path* is a Python generator that yields requests: a lane, another path, a `Call`, or a list of these. It is sent their
results: the `State` of a lane, the return value of a path or of a call. Everything that needs several states is a path:
a branch that is continued in alpha, a transition, a row of a phase diagram.

    def difference(model, alpha, starts):
        positional, semantic = yield [Lane(...), Lane(...)]
        return positional.train_loss - semantic.train_loss

`run` runs many paths, whose lanes share one pool.

On a CPU every core works on one lane at a time, and one program takes a lane from its start to its end. If Python
called every step instead, a diagram of 9 x 9 cells would take 1.3 times as long.

On accelerators, and on several devices, one call evaluates all lanes of one kind. The axis of the lanes is sharded over
the devices. Waiting lanes replace lanes that have ended. Newton's method needs only a few numbers per lane, so it runs
on the host's CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from ..base.errors import require_count
from ..base.programs import default_device, settings as jax_settings
from .paths import Failure, Job, Path, Scheduler, result_of
from .slots import work_in_slots


def run(
    paths: Iterable[Path],
    *,
    width: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    names: Sequence[str] | None = None,
    keep: bool = False,
    done: Callable[[int, Any], None] = lambda number, result: None,
) -> list[Any]:
    """Run paths to their ends, with their lanes in one pool.

    Paths start in the order in which they are given, as soon as the pool has room for them. An exception ends only its
    own path. After the other paths have ended, the first exception is raised, with the name of its path.

    Args:
        paths: generators.
        width: number of lanes at once. The default is the number of cores on a CPU; elsewhere it is the number of lanes
            that fill the device.
        devices: devices to compute on; by default jax's default device.
        names: names of the paths in exceptions.
        keep: whether to return a `Failure` for a path that an exception ended, instead of raising the exception. If all
            paths failed, it is raised nevertheless.
        done: function that is called when a path has ended, with the index of the path and its result or `Failure`. It
            is called in the thread of the caller.

    Returns:
        The return values of the paths.

    Raises:
        InputError: if `width` is not a positive integer, or a path yields something that is not a request.
    """
    if width is not None:
        require_count(width, "width")
    devices = [default_device()] if devices is None else list(devices)
    scheduler = Scheduler(paths, done)
    in_slots = len(devices) > 1 or devices[0].platform != "cpu"
    work = work_in_slots if in_slots else _in_threads
    work(scheduler, width, devices)
    keeps_failures = keep and not all(isinstance(result, Failure) for result in scheduler.results)
    for number, result in enumerate(scheduler.results):
        if isinstance(result, Failure) and not keeps_failures:
            if names is not None:
                result.error.add_note(f"This happened at {names[number]}.")
            raise result.error
    return scheduler.results


def run_one(path: Path) -> Any:
    """Run one path and return its result."""
    return run([path])[0]


def cores() -> int:
    """Return the number of cores that this process may use, which on a cluster can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_threads(scheduler: Scheduler, width: int | None, devices: Sequence[jax.Device]) -> None:
    """Work on one CPU: one thread per core, and one lane per thread.

    XLA's own threads gain little on the arrays of a block. On two cores, two threads of this pool halve the time of
    four replicates. An interrupt waits only for the lanes that are running.
    """
    running: dict[Future, Job] = {}
    width = width or cores()
    with ThreadPoolExecutor(width) as executor:
        # Other threads do not see settings of jax that a context manager changed. Jobs then run in this thread.
        same_settings = executor.submit(jax_settings).result() == jax_settings()
        capacity = width if same_settings else 1
        while True:
            while len(running) < capacity and (job := scheduler.next()) is not None:
                if same_settings:
                    running[executor.submit(result_of, job.request)] = job
                else:
                    scheduler.answer(job.task, job.position, result_of(job.request))
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in [f for f in list(running) if f in ended]:  # in the order in which they began
                job = running.pop(future)
                scheduler.answer(job.task, job.position, future.result())
