"""Paths, their requests, and the scheduler that hands these to the workers of the engine.

A path is a generator that describes a computation of several states. It yields a request, or a list of them, and is
sent the results. A request is a `Lane`, a `Call` or another path, which is then the child of this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..base.errors import InputError
from ..base.progress import Report, silent
from .equations import searched_state
from .setting import Lane, Path as Path


class Call(NamedTuple):
    """Request for a computation that is no root search: `function(*arguments)`, with arguments that are no tracers."""

    function: Callable[..., Any]
    arguments: tuple


class Failure(NamedTuple):
    """Result of a request that an exception ended."""

    error: Exception

    @property
    def reason(self) -> str:
        """Message of the exception, after its type; the type is left out for an `InputError`."""
        name = "" if isinstance(self.error, InputError) else f"{type(self.error).__name__}: "
        return f"{name}{self.error}"


def together(requests: Sequence[Lane | Call | Path]) -> Path:
    """Path that runs several lanes, calls or paths at once and returns the list of their results."""
    return (yield list(requests))


class _Task:
    """A path that has begun, and the answers that it waits for.

    Attributes:
        path: the generator.
        parent: task of the path that requested it; None for a path that the scheduler was given.
        position: index of its result among the answers to the parent, or among the results of the scheduler.
        as_list: whether the path is sent its answers as a list.
        missing: number of answers that have not arrived.
        answers: results of its requests, in their order.
    """

    def __init__(self, path: Path, parent: _Task | None, position: int):
        self.path, self.parent, self.position = path, parent, position
        self.as_list, self.missing = False, 0
        self.answers: list[Any] = []

    def expects(self, count: int, as_list: bool) -> None:
        """Begin to wait for `count` answers, which the path is sent as a list, or for a single one as it is."""
        self.as_list, self.answers, self.missing = as_list, [None] * count, count


class Job(NamedTuple):
    """A lane or a call, the task that waits for its result, and the position of the result in the task's answers."""

    request: Any  # a `Lane` or a `Call`
    task: _Task
    position: int


class Scheduler:
    """Advances paths until they wait for lanes and calls, and hands these out in the order in which they were yielded.

    The pool takes jobs from `next` and delivers their results by `finish`. A path starts only when those that have
    begun have no job to hand out.

    Attributes:
        unstarted: the paths that have not begun, with their indices.
        report: function that is called with the numbers of jobs that are done and that are known.
        done: function that is called with the index and the result of a path, or its `Failure`, when it has ended.
        ready: tasks that can go on, each with what its path is sent.
        waiting: jobs that have not been handed out.
        results: results of the paths that have begun; None where they have not ended.
    """

    def __init__(self, paths: Iterable[Path], done: Callable[[int, Any], None], report: Report = silent):
        self.unstarted: Iterator[tuple[int, Path]] = iter(enumerate(paths))
        self.done, self.report = done, report
        self.count_done, self.count_known = 0, 0
        self.ready: deque[tuple[_Task, Any]] = deque()
        self.waiting: deque[Job] = deque()
        self.results: list[Any] = []

    def next(self) -> Job | None:
        """Return the next lane or call; None if every path has ended or waits for a job that was handed out."""
        while not self.waiting:
            if self.ready:
                self._step(*self.ready.popleft())
            elif not self._start():
                return None
        return self.waiting.popleft()

    def _start(self) -> bool:
        """Start the next path; return whether there was one."""
        for number, path in self.unstarted:
            self.results.append(None)
            self.ready.append((_Task(path, None, number), None))
            return True
        return False

    def _step(self, task: _Task, answer: Any) -> None:
        """Send a path the answer that it waited for; a `Failure` is raised in it. Then queue its next requests."""
        try:
            if isinstance(answer, Failure):
                yielded = task.path.throw(answer.error)
            else:
                yielded = task.path.send(answer)
            as_list = isinstance(yielded, list)
            requests = yielded if as_list else [yielded]
            for request in requests:
                if not isinstance(request, (Lane, Call, Generator)):
                    text = f"must yield lanes, calls or paths, got {type(request).__name__}: {request!r:.60}"
                    raise InputError("path", text)
        except StopIteration as stop:
            self._end(task, stop.value)
        except Exception as error:  # the exception ends this path only
            task.path.close()
            self._end(task, Failure(error))
        else:
            task.expects(len(requests), as_list)
            if not requests:
                self.ready.append((task, []))
            for position, request in enumerate(requests):
                if isinstance(request, Generator):
                    self.ready.append((_Task(request, task, position), None))
                else:
                    self.waiting.append(Job(request, task, position))
                    self.count_known += 1

    def finish(self, job: Job, result: Any) -> None:
        """Deliver the result of a job that was handed out."""
        self.count_done += 1
        self.answer(job.task, job.position, result)
        self.report(self.count_done, self.count_known)

    def _end(self, task: _Task, result: Any) -> None:
        """Pass the result of a path that has ended to its parent, or to the results of the scheduler."""
        if task.parent is None:
            self.results[task.position] = result
            self.done(task.position, result)
        else:
            self.answer(task.parent, task.position, result)

    def answer(self, task: _Task, position: int, result: Any) -> None:
        """Deliver one result to a task. After the last one the task is ready, with all answers or the first failure.

        A failure, too, waits for the other answers, because they will be delivered to this task.
        """
        task.answers[position] = result
        task.missing -= 1
        if task.missing == 0:
            failures = [a for a in task.answers if isinstance(a, Failure)]
            self.ready.append((task, failures[0] if failures else task.answers if task.as_list else task.answers[0]))


def result_of(request: Lane | Call) -> Any:
    """Compute the state at the end of a lane, or the result of a call; an exception is returned as a `Failure`."""
    try:
        if isinstance(request, Call):
            return jax.block_until_ready(request.function(*request.arguments))
        return jax.tree.map(np.asarray, searched_state(request.equations, *request.search_arguments))
    except Exception as error:
        return Failure(error)
