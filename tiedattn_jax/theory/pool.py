"""The engine: many root searches at once, none of which waits for the slowest.

A `Lane` is one root search: a model, an alpha, a replicate of the averages, what the branch leaves free, a start. A
*path* is a Python generator that yields lanes, other paths, or calls, one or a list of them, and is sent what became of
them: a `State` for a lane, what the path returned for a path. Everything that needs several states is a path: a branch
followed through alpha, a transition, a row of a diagram.

    def difference(model, alpha, starts):
        positional, semantic = yield [Lane(...), Lane(...)]
        return positional.train_loss - semantic.train_loss

`run` runs many paths; their lanes share the pool. On a CPU every core works on one lane at a time. On accelerators, and
on several devices, all lanes of one kind are evaluated in one call, which the lanes' axis spreads over the devices;
lanes that ended leave, and lanes that wait take their places. Newton's method itself is a few numbers a lane, and runs
on the host's CPU. A core takes a lane from its start to its end in one program: called step by step from Python, 9 x 9
cells of a diagram took 1.3 times as long.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..averages.rule import COARSE, Rule
from ..averages.sizes import block_size
from ..base.errors import InputError, require_count
from ..base.linalg import precise
from ..base.programs import settings as jax_settings
from ..base.results import Settings
from ..model.model import Model
from ..model.overlaps import Coordinates, Overlaps
from .equations import Equations, search
from .newton import Newton, Search, either, stall_of

# Lanes in one call on an accelerator: few sizes, so that few programs are compiled. The smallest serves the replicates
# of one state, the largest fills the device: on an H100 a lane of order 5 takes .95 ms of 4, and .13 of 256 or 1024.
WIDTHS = 4, 32, 256
_NODE_BYTES = 1024  # memory that an evaluation takes for each of its nodes: 870 on an H100, order 9
_SHARE = 0.5  # of the device's memory that an evaluation may take

Path = Generator[Any, Any, Any]


class Lane(NamedTuple):
    """One root search.

    Attributes:
        model, alpha: the setting, of concrete numbers.
        rule: averaging rule.
        replicate: number of its replicate, or `COARSE`.
        free: what the branch leaves free, (2,).
        start: overlaps to start from.
        settings: tolerances.
        attempts: number of starts that are tried, made from this one.
    """

    model: Model
    alpha: Any
    rule: Rule
    replicate: int
    free: Any
    start: Overlaps
    settings: Settings
    attempts: int = 1

    @property
    def equations(self) -> Equations:
        """The equations that the lane solves."""
        return Equations(self.model, self.alpha, self.rule.replicate(self.replicate), self.free)

    @property
    def search(self) -> tuple:
        """The arguments of Newton's method: start, tolerances, number of attempts, and the residual that stalls."""
        stall = np.asarray(stall_of(self.rule.size), self.model.lam.dtype)
        # On the host, where no array has a weak type, which would ask for another program.
        start = jax.tree.map(np.asarray, self.start)
        return start, self.settings, np.asarray(self.attempts), stall


class Call(NamedTuple):
    """A function of arrays that takes long: its arguments have values, and its result is sent to the path."""

    function: Callable[..., Any]
    arguments: tuple


class Failure(NamedTuple):
    """The exception that ended a path."""

    error: Exception

    @property
    def reason(self) -> str:
        """What it says; bad input speaks for itself."""
        name = "" if isinstance(self.error, InputError) else f"{type(self.error).__name__}: "
        return f"{name}{self.error}"


def run(
    paths: Iterable[Path],
    *,
    width: int | None = None,
    devices: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    keep: bool = False,
    done: Callable[[int, Any], None] = lambda number, result: None,
) -> list[Any]:
    """Run paths to their ends, their lanes in one pool.

    Paths start in the order in which they are given, as soon as there is room in the pool. An exception ends its own
    path; when the others have ended, the first one is raised, with the name of its path.

    Args:
        paths: generators.
        width: lanes at once; by default the cores of a CPU, and elsewhere as many as fill the device.
        devices: to compute on; by default the default one.
        names: what a path is called in an exception.
        keep: whether a `Failure` is returned for a path that an exception ended, as long as another one did not fail.
        done: called with the number and the result of every path that ends, or its `Failure`, in the thread of the
            caller.

    Returns:
        What the paths return.

    Raises:
        InputError: a width that is not a positive integer; a path that yields something else.
    """
    if width is not None:
        require_count(width, "width")
    devices = [_default_device()] if devices is None else list(devices)
    scheduler = _Scheduler(paths, done)
    several = len(devices) > 1 or devices[0].platform != "cpu"
    work = functools.partial(_in_slots if several else _in_threads, scheduler, width, devices)
    with jax.default_device(_host()) if several else contextlib.nullcontext():
        work()
    kept = keep and not all(isinstance(result, Failure) for result in scheduler.results)
    for number, result in enumerate(scheduler.results):
        if isinstance(result, Failure) and not kept:
            if names is not None:
                result.error.add_note(f"This happened at {names[number]}.")
            raise result.error
    return scheduler.results


def run_one(path: Path) -> Any:
    """The result of one path.

    Raises:
        InputError: jax traces a function here, so that no number has a value.
    """
    return run([path])[0]


def together(wanted: Sequence[Lane | Call | Path]) -> Path:
    """A path of several lanes, calls or paths that run at once; returns the list of their results."""
    return (yield list(wanted))


def replicates_of(lane: Lane, starts: Overlaps | None = None) -> list[Lane]:
    """A lane in every replicate of its rule.

    Args:
        starts: of every replicate, with a leading axis; by default that of the lane.
    """
    parts = [lane.start] * lane.rule.replicates if starts is None else _unstacked(starts, lane.rule.replicates)
    return [lane._replace(replicate=k, start=start) for k, start in enumerate(parts)]


def _unstacked(tree: Any, count: int) -> list[Any]:
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(a) for a in leaves]
    return [jax.tree.unflatten(structure, [a[k] for a in arrays]) for k in range(count)]


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of arrays as one, whose arrays have a leading axis more; on the host."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(a) for a in leaves]), *trees)


class _Task:
    """A path on its way, and where its result goes."""

    def __init__(self, path: Path, parent: _Task | None, place: int):
        self.path, self.parent, self.place = path, parent, place
        self.several, self.missing = False, 0
        self.answers: list[Any] = []

    def expects(self, count: int, several: bool) -> None:
        """Wait for so many answers."""
        self.several, self.answers, self.missing = several, [None] * count, count


class _Waiting(NamedTuple):
    """A lane or a call, and whose answer it is."""

    request: Any
    task: _Task
    place: int


class _Scheduler:
    """Steps paths; hands out the lanes and calls that they wait for, in order."""

    def __init__(self, paths: Iterable[Path], done: Callable[[int, Any], None]):
        self.unstarted: Iterator[tuple[int, Path]] = iter(enumerate(paths))
        self.done = done
        self.ready: deque[tuple[_Task, Any]] = deque()
        self.waiting: deque[_Waiting] = deque()
        self.results: list[Any] = []

    def next(self) -> _Waiting | None:
        """The next lane or call; None where all paths have ended, or wait for what was handed out."""
        while not self.waiting:
            if self.ready:
                self._step(*self.ready.popleft())
            elif not self._start():
                return None
        return self.waiting.popleft()

    def _start(self) -> bool:
        """Start one more path, if there is one."""
        for number, path in self.unstarted:
            self.results.append(None)
            self.ready.append((_Task(path, None, number), None))
            return True
        return False

    def _step(self, task: _Task, answer: Any) -> None:
        try:
            if isinstance(answer, Failure):
                wanted = task.path.throw(answer.error)
            else:
                wanted = task.path.send(answer)
            several = isinstance(wanted, list)
            requests = wanted if several else [wanted]
            for request in requests:
                if not isinstance(request, (Lane, Call, Generator)):
                    text = f"must yield lanes, calls or paths, got {type(request).__name__}: {request!r:.60}"
                    raise InputError("path", text)
        except StopIteration as stop:
            self._end(task, stop.value)
        except Exception as error:  # it ends this path only
            task.path.close()
            self._end(task, Failure(error))
        else:
            task.expects(len(requests), several)
            if not requests:
                self.ready.append((task, []))
            for place, request in enumerate(requests):
                if isinstance(request, Generator):
                    self.ready.append((_Task(request, task, place), None))
                else:
                    self.waiting.append(_Waiting(request, task, place))

    def _end(self, task: _Task, result: Any) -> None:
        if task.parent is None:
            self.results[task.place] = result
            self.done(task.place, result)
        else:
            self.answer(task.parent, task.place, result)

    def answer(self, task: _Task, place: int, result: Any) -> None:
        """Deliver what a path waits for. It goes on when nothing is missing, with the first failure if there is one."""
        task.answers[place] = result
        task.missing -= 1
        if task.missing == 0:
            failures = [a for a in task.answers if isinstance(a, Failure)]
            self.ready.append((task, failures[0] if failures else task.answers if task.several else task.answers[0]))


def _in_threads(scheduler: _Scheduler, width: int | None, devices: Sequence[Any]) -> None:
    """On one CPU: in as many threads as there are cores, each with one lane at a time.

    XLA's own threads gain little on the arrays of a block: on two cores four replicates take half the time in two
    threads. An interrupt waits for the lanes that are in progress only.
    """
    running: dict[Future, _Waiting] = {}
    with ThreadPoolExecutor(width or os.cpu_count() or 1) as pool:
        # Context managers that change a setting of jax are not seen by other threads.
        alike = pool.submit(jax_settings).result() == jax_settings()
        room = (width or os.cpu_count() or 1) if alike else 1
        while True:
            while len(running) < room and (item := scheduler.next()) is not None:
                if alike:
                    running[pool.submit(_work, item.request)] = item
                else:
                    scheduler.answer(item.task, item.place, _work(item.request))
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in [f for f in list(running) if f in ended]:  # in the order in which they began
                item = running.pop(future)
                scheduler.answer(item.task, item.place, future.result())


def _work(request: Lane | Call) -> Any:
    """The state at the end of a lane, or the result of a call."""
    try:
        if isinstance(request, Call):
            return jax.block_until_ready(request.function(*request.arguments))
        return jax.tree.map(np.asarray, search(request.equations, *request.search))
    except Exception as error:
        return Failure(error)


def _in_slots(scheduler: _Scheduler, width: int | None, devices: Sequence[Any]) -> None:
    """On accelerators, or several devices: all lanes of one kind in one call; calls one after the other.

    A kind is a class of models, shapes and a rule. While lanes of one kind are on their way those of others wait.
    """
    groups: dict[Any, _Slots] = {}
    while True:
        item = scheduler.next()
        if item is not None:
            if isinstance(item.request, Call):
                scheduler.answer(item.task, item.place, _work(item.request))
                continue
            kind = _kind(item.request)
            if kind not in groups:
                groups[kind] = _Slots(item.request, width, devices)
            groups[kind].waiting.append(item)
            if len(groups[kind].waiting) < groups[kind].room:
                continue
        busy = [group for group in groups.values() if group.waiting or group.lanes]
        if not busy:
            return
        for item, result in max(busy, key=lambda group: len(group.waiting) + len(group.lanes)).turn():
            scheduler.answer(item.task, item.place, result)


def _kind(lane: Lane) -> Any:
    """What lanes must share to be evaluated in one call."""
    leaves, structure = jax.tree.flatten((lane.model, lane.start, lane.settings))
    return structure, tuple(np.shape(a) for a in leaves), id(lane.rule)


def begin(
    model: Model, free: jax.Array, start: Overlaps, settings: Settings, attempts: Any, stall: Any, unseen: jax.Array
) -> tuple[Newton, Search]:
    """Newton's method of a lane, and its search before the first answer."""
    newton = Newton(Coordinates(model, free), settings, stall, attempts)
    return newton, newton.begin(newton.coordinates.pack(start), unseen)


def _unseen(equations: Equations, start: Overlaps) -> jax.Array:
    """`Equations.unseen` of a lane."""
    return equations.unseen(equations.coordinates.pack(start))


# On the host's CPU; the axis of the lanes leads all arrays.
_begin_all, _advance_all = jax.jit(jax.vmap(precise(begin))), jax.jit(jax.vmap(precise(Newton.advance)))


class _Slots:
    """The lanes of one kind: their numbers in arrays of the host whose first axis counts the lanes."""

    def __init__(self, like: Lane, width: int | None, devices: Sequence[Any]):
        self.rule = like.rule
        self.waiting: deque[_Waiting] = deque()
        self.lanes: list[_Waiting] = []
        mesh = Mesh(np.array(devices), ("lanes",))
        self.spread, everywhere = NamedSharding(mesh, PartitionSpec("lanes")), NamedSharding(mesh, PartitionSpec())
        self.on_devices = jax.device_put(like.rule, everywhere)
        most = width or _most(like, devices)
        sizes = [w for w in WIDTHS if w <= most] or [most]
        self.widths = sorted({-(-w // len(devices)) * len(devices) for w in ([width] if width else sizes)})
        self.numbers: Any = None  # (model, alpha, free, number of the replicate)
        self.newton: Any = None
        self.search: Any = None
        self.unseen = jax.tree.map(np.asarray, jax.jit(_unseen)(like.equations, like.start))
        self.placed: Any = None  # the equations on the devices, until a lane enters or leaves

    @property
    def room(self) -> int:
        """Lanes that the largest call still has room for."""
        return self.widths[-1] - len(self.lanes)

    def turn(self) -> list[tuple[_Waiting, Any]]:
        """One evaluation of all lanes, and one step of their searches; the lanes that ended, with their states."""
        try:
            return self._turn()
        except Exception as error:  # of the evaluation of all of them
            ended = [(item, Failure(error)) for item in [*self.lanes, *self.waiting]]
            self.lanes, self.waiting = [], deque()
            self.numbers = self.newton = self.search = self.placed = None
            return ended

    def _turn(self) -> list[tuple[_Waiting, Any]]:
        self._enter()
        count = len(self.lanes)
        if self.placed is None:
            self.placed = self._equations(self.numbers)
        trial = self._put(self._padded(self.search.trial))
        answer = jax.device_get(_on_devices(Equations.answer)(self.placed, trial))
        search = _advance_all(*self._padded((self.newton, self.search)), answer)
        self.search = jax.tree.map(lambda a: np.asarray(a)[:count], search)
        return self._leave()

    def _enter(self) -> None:
        """Take in lanes that wait, as many as there is room for."""
        new = [self.waiting.popleft() for _ in range(min(self.room, len(self.waiting)))]
        if not new:
            return
        lanes = [item.request for item in new]
        numbers = stacked([(lane.model, lane.alpha, lane.free, np.asarray(lane.replicate)) for lane in lanes])
        searches = stacked([(lane.model, lane.free, *lane.search, self.unseen) for lane in lanes])
        begun = _begin_all(*self._padded(searches))
        newton, search = jax.tree.map(lambda a: np.asarray(a)[: len(new)], begun)
        self.numbers = self._joined(self.numbers, numbers)
        self.newton, self.search = self._joined(self.newton, newton), self._joined(self.search, search)
        self.lanes += new
        self.placed = None

    def _leave(self) -> list[tuple[_Waiting, Any]]:
        """Take out the lanes that ended, with their states."""
        ended = np.flatnonzero(self.search.ended)
        if not len(ended):
            return []
        numbers, outcome = jax.tree.map(lambda a: a[ended], (self.numbers, self.search.outcome))
        outcome = self._put(self._padded(outcome))
        states = jax.device_get(_on_devices(Equations.state)(self._equations(numbers), outcome))
        states = _unstacked(states, len(ended))
        left = [(self.lanes[k], state) for k, state in zip(ended, states, strict=True)]
        stay, self.placed = np.flatnonzero(~self.search.ended), None
        self.lanes = [self.lanes[k] for k in stay]
        kept = (self.numbers, self.newton, self.search)
        self.numbers, self.newton, self.search = jax.tree.map(lambda a: a[stay], kept)
        return left

    def _joined(self, old: Any, new: Any) -> Any:
        return new if old is None else jax.tree.map(lambda a, b: np.concatenate([a, b]), old, new)

    def _padded(self, tree: Any) -> Any:
        """Arrays of lanes, filled up with copies of the last one to the next width."""
        count = len(jax.tree.leaves(tree)[0])
        width = next(w for w in self.widths if w >= count)
        index = np.minimum(np.arange(width), count - 1)
        return jax.tree.map(lambda a: np.asarray(a)[index], tree)

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.spread)

    def _equations(self, numbers: Any) -> Equations:
        """The equations of lanes, on the devices."""
        return _equations_all(self.on_devices, *self._put(self._padded(numbers)))


def _most(like: Lane, devices: Sequence[Any]) -> int:
    """Lanes that the memory of the devices has room for.

    Raises:
        InputError: it has no room for one.
    """
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in one for one in stats):
        return WIDTHS[-1]
    nodes = min(like.rule.size, block_size())
    rule = sum(a.nbytes for a in jax.tree.leaves(like.rule.stack))
    each = _NODE_BYTES * nodes + rule / like.rule.replicates
    room = _SHARE * sum(one["bytes_limit"] for one in stats) - rule
    if room < each:
        text = f"must fit into the memory of the device, one lane takes {each / 2**30:.3g} GiB"
        raise InputError("nodes", f"{text} of {max(room, 0) / 2**30:.3g}: use fewer nodes, or a smaller block")
    return int(room // each)


def _graphs() -> dict[str, str]:
    """Options of the compiler: on GPUs the loops of a program run without the host, as graphs of kernels."""
    kinds = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
    if jax.default_backend() != "gpu":
        return {}
    return {"xla_gpu_enable_command_buffer": kinds, "xla_gpu_graph_min_graph_size": "1"}


@jax.jit
def _equations_all(rule: Rule, model: Model, alpha: jax.Array, free: jax.Array, number: jax.Array) -> Equations:
    """The equations of many lanes, whose axis leads all arrays."""
    coarse = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(number), *a.shape)), rule.coarse)
    own = jax.tree.map(lambda a: a[jnp.maximum(number, 0)], rule.stack)
    return Equations(model, alpha, jax.vmap(either)(number == COARSE, coarse, own), free)


@functools.cache
def _on_devices(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `Equations` for many lanes at once, compiled for the devices that there are."""
    return jax.jit(jax.vmap(precise(method)), compiler_options=_graphs())


def _default_device() -> Any:
    chosen = jax.config.values["jax_default_device"]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


@functools.cache
def _host() -> Any:
    """The CPU of the host, also where the default device is another one."""
    return jax.local_devices(backend="cpu")[0]
