"""Pieces of a long computation: in this process or on a caller's executor, and kept in a folder when they are done.

A piece is a call that any process can make. A worker takes the precision and the folder of compiled programs from the
process that asks. Under `jax.distributed` every process computes a share of the pieces, and all get all results.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from .errors import InputError
from .files import Store
from .programs import Traced, use_compilation_cache
from .saved import pack, unpack

# Errors say this of a folder, see `Store`.
PIECES = "hold pieces of the same question, settings, options and version only"
_PIECE, _RESULT = "piece-", "result"  # beginning of the name of a piece, and the name of its array
_MOST, _COUNT = 32, 64  # settings in a piece, at most; pieces that few settings are cut into


def cut(count: int) -> list[slice]:
    """Return the pieces of so many settings: few enough that a lost one is cheap, and many enough for the workers."""
    size = min(max(count // _COUNT, 1), _MOST)
    return [slice(k, min(k + size, count)) for k in range(0, count, size)]


class _Sent(NamedTuple):
    """An array of jax on its way to a worker, which would round it if it came before the precision was set.

    Attributes:
        numbers: its entries; those of random keys are their data.
        keys: name of the generator of random keys, None for numbers.
    """

    numbers: np.ndarray
    keys: str | None

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Return a leaf of the arguments as it is sent."""
        if not isinstance(leaf, jax.Array):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return cls(np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf)))
        return cls(np.asarray(leaf), None)

    def received(self) -> jax.Array:
        """Return the array, in the worker."""
        numbers = jnp.asarray(self.numbers)
        return numbers if self.keys is None else jax.random.wrap_key_data(numbers, impl=self.keys)


class Task(NamedTuple):
    """A call that a worker is sent, with the settings of the process that asks.

    Attributes:
        x64: whether jax computes in double precision.
        programs: folder of the compiled programs, None if they are not kept.
        process: number of the process that asks.
    """

    function: Callable[..., Any]
    arguments: PyTree
    x64: bool
    programs: str | None
    process: int

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple) -> Task:
        """Return the task with the settings of this process."""
        folder = None if Traced.folder is None else str(Traced.folder.parent)
        sent = jax.tree.map(_Sent.of, arguments)
        return cls(function, sent, jax.config.values["jax_enable_x64"], folder, os.getpid())

    def run(self) -> Any:
        """Make the call."""
        if jax.config.values["jax_enable_x64"] != self.x64:
            jax.config.update("jax_enable_x64", self.x64)
        if self.programs is not None and (Traced.folder is None or str(Traced.folder.parent) != self.programs):
            use_compilation_cache(self.programs)

        def received(leaf: Any) -> Any:
            return leaf.received() if isinstance(leaf, _Sent) else leaf

        arguments = jax.tree.map(received, self.arguments, is_leaf=lambda leaf: isinstance(leaf, _Sent))
        for cls in _module_classes(arguments) if os.getpid() != self.process else ():
            known: Any = functools.reduce(_attribute, cls.__qualname__.split("."), sys.modules.get(cls.__module__))
            if known is not cls:  # an engine that sends classes by value sends those of equinox without their fields
                text = f"must find its classes in modules: put {cls.__qualname__} of a script, a notebook or a function"
                raise InputError("executor", f"{text} into one")
        return self.function(*arguments)


def _module_classes(tree: PyTree) -> Iterator[type]:
    """Yield the classes of the modules in a tree, and those that its functions use."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, eqx.Module)):
        if isinstance(leaf, eqx.Module):
            yield type(leaf)
            yield from _module_classes(list(vars(leaf).values()))
        yield from (a for a in getattr(leaf, "__globals__", {}).values() if isinstance(a, type(eqx.Module)))


def _attribute(parent: Any, name: str) -> Any:
    return getattr(parent, name, None)


def computed(
    function: Callable[..., Any],
    piece: Callable[[int], tuple],
    count: int,
    store: Store,
    executor: Executor | None,
    done: Callable[[int], None],
    here: Callable[[Sequence[int], Callable[[int, Any], None]], None] | None = None,
) -> list[Any]:
    """Return what a function returns for every piece, or the exception that a worker ended with instead.

    Args:
        function: called with the arguments of a piece.
        piece: returns the arguments of the piece of this number.
        count: number of pieces.
        store: keeps the results, in files "piece-00000.npz" and so on; those that it has are not computed.
        done: told the number of every piece that is done, also in another process.
        here: computes the pieces of these numbers in this process, and tells the number and the result of each; by
            default one after the other.

    Raises:
        InputError: the executor does not take tasks, or a task cannot be sent to it.
        RuntimeError: another process of `jax.distributed` ended early.
        KeyboardInterrupt: the user has interrupted the call; a note says what is kept.
    """

    def in_turn(numbers: Sequence[int], finish: Callable[[int, Any], None]) -> None:
        for number in numbers:
            finish(number, function(*piece(number)))

    def finish(number: int, result: Any) -> None:
        if not isinstance(result, BaseException):
            store.put(f"{_PIECE}{number:05d}", {_RESULT: np.frombuffer(pack(result), np.uint8)})
        results[number] = result
        done(number)

    results, processes = _finished(store), jax.process_count() if executor is None else 1
    if processes > 1:  # every process uses the pieces that process 0 has found
        results = _gathered(results, store.hint)[0]
    for number in results:
        done(number)
    missing = [number for number in range(count) if number not in results]
    assigned = missing[jax.process_index() % processes :: processes]
    try:
        if executor is None:
            (here or in_turn)(assigned, finish)
        else:
            _on(executor, function, {number: piece(number) for number in assigned}, finish)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"The call was interrupted; {store.hint}")
        raise
    for share in _gathered(results, store.hint) if processes > 1 else ():
        for number in share.keys() - results.keys():
            results[number] = share[number]
            done(number)
    return [results[number] for number in range(count)]


def none_lost(results: list[Any], store: Store) -> list[Any]:
    """Return what `computed` returned.

    Raises:
        RuntimeError: a worker was lost.
    """
    for problem in results:
        if isinstance(problem, BaseException):
            raise RuntimeError(f"a worker was lost: {problem or type(problem).__name__}; {store.hint}") from problem
    return results


def _finished(store: Store) -> dict[int, Any]:
    """Return the results in a store by the number of their piece."""
    refusal = InputError(store.argument, "must hold results of this library")
    return {
        int(name.removeprefix(_PIECE)): unpack(io.BytesIO(arrays[_RESULT].tobytes()), name, refusal)
        for name, arrays in store.pieces().items()
        if name.startswith(_PIECE)
    }


def _on(
    executor: Executor, function: Callable[..., Any], pieces: dict[int, tuple], finish: Callable[[int, Any], None]
) -> None:
    """Compute pieces, the arguments of a function by their number, on an executor."""
    if isinstance(executor, type):
        raise InputError("executor", f"must be an executor, got the class: write {executor.__name__}()")
    try:
        tasks = {number: Task.of(function, arguments) for number, arguments in pieces.items()}
        futures: dict[Any, int] = {executor.submit(task.run): number for number, task in tasks.items()}
    except AttributeError as error:
        text = f"must be a concurrent.futures.Executor, got {type(executor).__name__} without `submit`"
        raise InputError("executor", text) from error
    except RuntimeError as error:
        raise InputError("executor", f"must take tasks, got one that does not: {error}") from error
    try:
        for future in as_completed(futures):
            problem = future.exception()
            if isinstance(problem, InputError):
                raise problem
            if problem is not None and _is_about_pickling(problem):
                text = "must be given what can be sent to it: functions and layers at the top of a module"
                raise InputError("executor", f"{text}, got {problem}") from problem
            if isinstance(problem, BrokenProcessPool) and isinstance(executor, ProcessPoolExecutor):
                none_done = all(other.done() and other.exception() is not None for other in futures)
                if none_done and b"__main__" in pickle.dumps(tasks[futures[future]]):
                    text = "must be given what its workers can import, which have ended: put functions and layers of a"
                    text += " notebook, or below `if __name__`, into a module"
                    raise InputError("executor", f"{text}, got {problem}") from problem
            finish(futures[future], future.result() if problem is None else problem)
    finally:
        for future in futures:
            future.cancel()


def _is_about_pickling(error: BaseException) -> bool:
    return isinstance(error, pickle.PicklingError) or "pickle" in str(error)


def _gathered(results: dict[int, Any], hint: str) -> list[dict[int, Any]]:
    """Return the results that the processes of `jax.distributed` have, in their order.

    Args:
        hint: what is kept, for the error.

    Raises:
        RuntimeError: a process has ended.
    """
    content = np.frombuffer(pickle.dumps(results), np.uint8)
    try:
        sizes = multihost_utils.process_allgather(np.array(content.size))
        rows = multihost_utils.process_allgather(np.pad(content, (0, int(sizes.max()) - content.size)))
    except (ValueError, RuntimeError) as error:  # raised by the communication layer: gloo, NCCL
        raise RuntimeError(f"{_ended()} ended before all was done; {hint}") from error
    return [pickle.loads(row[: int(n)].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def _ended() -> str:
    """Name the processes that have ended, as soon as the others are here, too.

    Process 0 must wait for the others, because JAX ends them with it. JAX says which processes live if it can go on
    without one.
    """
    ended: set[int] = set()
    if jax.config.values["jax_enable_recoverability"]:
        with multihost_utils.live_devices(jax.devices()) as devices:
            ended = {*range(jax.process_count())} - {device.process_index for device in devices}
    return " and ".join(f"process {k}" for k in sorted(ended)) or "another process"
