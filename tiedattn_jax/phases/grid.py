"""Grids of settings: both branches in every cell, computed over many devices and processes, kept on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ..averages.program import at_once
from ..averages.rule import Rule
from ..averages.sizes import SIZES
from ..errors import InputError, require, require_count, require_kind
from ..model import Model
from ..overlaps import PAIR, Overlaps
from ..parameters import Axis, axis_of
from ..results import Settings, Status, has_state, quorum
from ..store import VERSION, Store, fingerprint, named
from ..theory.fixed_points import check_alpha, for_each
from .diagram import PhaseDiagram
from .follow import Follower, Progress, follow, pair_free, pair_start, silent, tracks_of
from .inputs import prepared

# Losses are stationary in the overlaps: an error of 5e-4 there is none in them.
GRID_SETTINGS = Settings(tol=5e-4, max_steps=15, warm_steps=0)
_COARSE = 1e-3  # tolerance at least of the search for the first cells, on coarse averages
_ACCELERATOR_LANES = 64  # tracks in lockstep, at most; a guess: no accelerator was at hand
_PATIENCE = 2  # times as many Newton steps in the first cells, and when a cell is tried again
_WARM_STEPS = 300  # and as many damped steps at least, from a start that may be far


def phase_diagram(
    model: Model,
    x: Any,
    y: Any,
    nodes: Rule | None = None,
    *,
    alpha: float | None = None,
    settings: Settings | None = None,
    devices: int | None = None,
    lanes: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> PhaseDiagram:
    """Positional and semantic branch on a grid of any two numbers of the model, or of one and alpha.

    Tracks run along alpha, from the largest, where it is an axis; else along x. Cells that a track did not solve are
    tried again from the states of their neighbours and from the default starts, and marked by their status if that
    fails, too.

    Under `jax.distributed` every process computes a share of the tracks and all of them return the whole diagram. If
    one ends early, the others finish their shares and say so; with `out`, all tracks that were finished are kept. For
    that ``jax.config.update("jax_enable_recoverability", True)`` has to come before ``jax.distributed.initialize``:
    otherwise JAX aborts the others, without an exception, some 100 s after a process has ended. It may do so at once
    when process 0 ends, which coordinates them; the tracks are kept then, too.

    Args:
        model: attention layer and data; the numbers that are not axes.
        x, y: axes, ``(name, values)`` with "alpha", the name of a scalar field of the model or an entry such as
            "mixing[0,1]", or ``(name, values, put)`` with ``put(model, value)`` giving the model that value; plain
            values mean alpha for x and omega for y.
        nodes: averaging rule; by default `default_nodes` of `SIZES["grid"]`.
        alpha: samples per dimension, when it is not an axis.
        settings: tolerances; by default `GRID_SETTINGS`. Where a start may be far, in the first cells of tracks and in
            cells that are tried again, steps are added to them.
        devices: how many of this process's devices to use; by default all. A CPU is one, on which tracks run in as many
            threads as there are cores.
        lanes: tracks that a device solves in lockstep; by default 1 on a CPU, up to 64 elsewhere.
        out: folder in which finished tracks, and cells that were tried again, are kept.
        resume: whether to go on with what `out` holds.
        progress: called with the number of cells that are done, and of all, both branches counted.

    Raises:
        RuntimeError: another process ended early.
        InputError: an axis that is empty, not increasing, not finite or out of the model's range; alpha given twice or
            never; more devices than there are; an `out` that cannot be written, or with tracks of other settings;
            nodes, settings, lanes or `out` of another kind.
    """
    nodes, settings = prepared(model, nodes, settings, GRID_SETTINGS, size=SIZES["grid"])
    axes = axis_of(x, "alpha", "x", model), axis_of(y, "omega", "y", model)
    names = [axis.parameter.name for axis in axes]
    if names[0] == names[1]:
        raise InputError("y", f"must be another parameter than x, got y={names[1]!r}")
    if (alpha is None) != ("alpha" in names):
        raise InputError("alpha", f"must be given if and only if it is not an axis, got alpha={alpha}")
    if alpha is not None:
        check_alpha(model, alpha)
    if lanes is not None:
        require_count(lanes, "lanes")
    require_kind(out, "out", (str, Path, type(None)), "a folder")
    if resume and out is None:
        raise InputError("out", "must name the folder of the run to resume, got out=None with resume=True")
    mesh = _mesh(devices)
    grid = _Grid.of(model, *(axes if names[1] == "alpha" else axes[::-1]), alpha, nodes, settings)
    mark = fingerprint(grid.models, grid.alphas, nodes, settings, VERSION)
    store = Store(out, mark, resume)
    cells = grid.retried(grid.solved(mesh, lanes, store, progress), store)
    if names[1] == "alpha":
        cells = {k: np.swapaxes(a, 1, 2) for k, a in cells.items()}
    attrs = {
        "model": type(model).__name__,
        "numbers": {name: np.asarray(a).tolist() for name, a in named(model).items() if name not in names},
        "alpha": None if alpha is None else float(alpha),
        "nodes": {"rule": type(nodes.stack).__name__, "size": nodes.size, "replicates": nodes.replicates},
        "settings": {name: a.tolist() for name, a in named(settings).items()},
        "version": VERSION,
        "fingerprint": mark,
    }
    x_axis, y_axis = ((axis.parameter.name, axis.values) for axis in axes)
    return PhaseDiagram(x_axis, y_axis, cells, attrs)


def _mesh(devices: int | None) -> Mesh:
    there = jax.local_devices()
    count = len(there) if devices is None else devices
    require_count(count, "devices")
    require(count <= len(there), "devices", count, f"between 1 and {len(there)}")
    return Mesh(np.array(there[:count]), ("tracks",))


def patient(settings: Settings) -> Settings:
    """A caller's settings with more steps, for starts that may be far."""
    warm_steps = np.maximum(settings.warm_steps, _WARM_STEPS)
    return Settings(settings.tol, _PATIENCE * settings.max_steps, warm_steps, settings.damping)


class Place(NamedTuple):
    """A cell of one branch."""

    branch: int
    row: int
    column: int


class _Grid(NamedTuple):
    """All settings: models (leaves (rows, columns, ...)) and alphas (rows, columns); tracks run along the columns."""

    models: Model
    alphas: np.ndarray
    columns: Axis
    nodes: Rule
    settings: Settings

    @classmethod
    def of(cls, model: Model, rows: Axis, columns: Axis, alpha: float | None, nodes: Rule, settings: Settings) -> _Grid:
        """The settings of two axes; `alpha` where it is none of them."""

        def cell(row: jax.Array, column: jax.Array) -> tuple[Model, Any]:
            return columns.parameter.set(*rows.parameter.set(model, start, row), column)

        dtype = model.lam.dtype
        start = jnp.asarray(1.0 if alpha is None else alpha, dtype)
        values = jnp.meshgrid(*(jnp.asarray(a.values, dtype) for a in (rows, columns)), indexing="ij")
        models, alphas = jax.vmap(jax.vmap(cell))(*values)
        return cls(models, np.asarray(alphas), columns, nodes, settings)

    @property
    def onward(self) -> slice:
        """The order of a track's cells: from the largest alpha down."""
        return slice(None, None, -1 if self.columns.parameter.name == "alpha" else 1)

    def solved(self, mesh: Mesh, lanes: int | None, store: Store, progress: Progress) -> dict[str, np.ndarray]:
        """All tracks, those in the store excepted: arrays (branch, row, column, replicate, ...)."""
        kept = {k: a for k, a in store.load().items() if k.startswith(_TRACK)}
        ahead = jax.tree.map(lambda a: a[:, self.onward], self.models)
        places = self.columns.values[self.onward]
        rough = eqx.tree_at(lambda s: s.tol, patient(self.settings), np.maximum(self.settings.tol, _COARSE))
        tracks = tracks_of(ahead, self.alphas[:, self.onward], places, self.nodes, rough)
        total, width = tracks.alphas.shape
        if lanes is None:
            cpu = mesh.devices.flat[0].platform == "cpu"
            lanes = 1 if cpu else min(_ACCELERATOR_LANES, -(-total // mesh.size))
        several, chunk = mesh if mesh.size > 1 else None, mesh.size * lanes
        done, found = np.zeros(total, bool), {}
        processes, here = jax.process_count(), jax.process_index()
        if processes > 1:  # all have arrays of the same shapes, before any has a track
            some = jax.tree.map(lambda a: a[: mesh.size], tracks)
            shapes = eqx.filter_eval_shape(follow, some, self.nodes, self.settings, several, 1)
            found = {k: np.full((total, *s.shape[1:]), np.nan) for k, s in shapes.items()}

        def put(number: int, arrays: dict[str, np.ndarray]) -> None:
            done[number] = True
            if not found:
                found.update({k: np.full((total, *a.shape), np.nan) for k, a in arrays.items()})
            for k, a in arrays.items():
                found[k][number] = a

        for name, arrays in kept.items():
            put(int(name.removeprefix(_TRACK)), arrays)
        if processes > 1:  # all see what process 0 found in its folder
            done, found = _together(multihost_utils.broadcast_one_to_all, (done, found), store)
        open_ = np.flatnonzero(~done)
        mine, finished, one_by_one = open_[here::processes], int(done.sum()), threading.Lock()

        def solve(some: jax.Array) -> None:
            nonlocal finished
            padded = np.resize(some, chunk)  # the last chunk is filled up with copies
            part = follow(jax.tree.map(lambda a: a[padded], tracks), self.nodes, self.settings, several, lanes)
            part = jax.tree.map(np.asarray, part)
            with one_by_one:
                for slot, number in enumerate(np.asarray(some)):
                    arrays = {k: a[slot] for k, a in part.items()}
                    store.put(f"{_TRACK}{number:05d}", arrays)
                    put(number, arrays)
                finished += processes * len(some)
                progress(min(finished, total) * width, total * width)

        progress(finished * width, total * width)
        chunks = [jnp.asarray(mine[k : k + chunk]) for k in range(0, len(mine), chunk)]
        if several is None:
            at_once(solve, chunks)
        else:
            for some in chunks:
                solve(some)
        if processes > 1:
            shares = _together(multihost_utils.process_allgather, found, store)
            owner = np.zeros(total, int)
            owner[open_] = np.arange(len(open_)) % processes
            found = {k: a[owner, np.arange(total)] for k, a in shares.items()}
        shape = total // len(PAIR), len(PAIR)
        return {k: np.swapaxes(a.reshape(*shape, *a.shape[1:]), 0, 1)[:, :, self.onward] for k, a in found.items()}

    def retried(self, cells: dict[str, np.ndarray], store: Store) -> dict[str, np.ndarray]:
        """Try again the cells that are not solved, and those where a branch is absent that a neighbour has.

        The first from the states of the neighbours and from the default start; the others, which may lie between a fold
        and a pitchfork, from the neighbours only. What was tried is kept in the store, too.
        """
        cells, known = {k: a.copy() for k, a in cells.items()}, store.load()
        tried: set[tuple[Place, Place | None]] = set()

        def absent(at: Place) -> bool:
            return bool(np.all(cells["status"][at] == Status.absent))

        def untried() -> Iterator[tuple[Place, list[Place | None]]]:
            """Cells without a state, and where to start from in them: neighbours, None for the default start."""
            has = _has(cells)
            for at in map(Place, *np.nonzero(~has)):
                near: list[Place | None] = [c for c in _neighbours(at, has.shape) if has[c]]
                if sources := [c for c in (near[:1] if absent(at) else [*near, None]) if (at, c) not in tried]:
                    yield at, sources

        while todo := list(untried()):
            for at, sources in todo:
                was_absent = absent(at)
                for source in sources:
                    tried.add((at, source))
                    name = f"{_RETRY}{len(tried):05d}"
                    if name not in known:
                        known[name] = self.attempt(at, None if source is None else _state_of(cells, source), was_absent)
                        if jax.process_index() == 0:
                            store.put(name, known[name])
                    found = known[name]
                    status = np.asarray(found["status"])
                    settled = _has(found) or np.all(status == Status.absent)
                    if quorum(status <= Status.stalled) if was_absent else settled:
                        for k, a in found.items():
                            cells[k][at] = a
                        break
        return cells

    def attempt(self, at: Place, source: Overlaps | None, was_absent: bool) -> dict[str, np.ndarray]:
        """`search` in a cell from one state for all replicates, or from the default start."""
        b, i, j = at
        model, first = (jax.tree.map(lambda a, at=at: a[at], self.models) for at in ((i, j), (0, 0)))
        default, free = (jax.tree.map(lambda a: a[b], of(first)) for of in (pair_start, pair_free))
        near = for_each(default if source is None else source, self.nodes.replicates)
        settings = self.settings if was_absent else patient(self.settings)
        alpha = jnp.asarray(self.alphas[i, j], model.lam.dtype)
        state = Follower(self.nodes, settings, free, default).search(model, alpha, near, jnp.array(False))
        return jax.tree.map(np.asarray, state.numbers())


_TRACK, _RETRY = "track-", "retry-"


def _together(exchange: Callable[[Any], Any], share: Any, store: Store) -> Any:
    """What all processes have, from the share of each, as numpy arrays; a RuntimeError if one of them has ended."""
    try:
        return jax.tree.map(np.array, exchange(share))
    except (ValueError, RuntimeError) as problem:  # of the layer that carries the numbers: gloo, NCCL
        kept = "nothing is kept: start all processes again, with a folder out"
        if store.folder is not None:
            kept = f"finished tracks are in out='{store.folder}': start all processes again with resume=True"
        raise RuntimeError(f"another process ended before the grid was done; {kept}") from problem


def _has(cells: dict[str, Any]) -> np.ndarray:
    """Whether there is a state."""
    return np.asarray(quorum(has_state(cells["status"], cells["residual"])))


def _neighbours(at: Place, shape: tuple[int, ...]) -> list[Place]:
    """The cells beside a cell, those of its track last."""
    _, rows, columns = shape
    beside = [at._replace(row=at.row + d) for d in (1, -1)] + [at._replace(column=at.column + d) for d in (1, -1)]
    return [c for c in beside if 0 <= c.row < rows and 0 <= c.column < columns]


def _state_of(cells: dict[str, np.ndarray], at: Place) -> Overlaps:
    """Mean overlaps of the replicates that have a state."""
    found = np.asarray(has_state(cells["status"][at], cells["residual"][at]))
    return Overlaps(*(jnp.asarray(cells[k][at][found].mean(0)) for k in ("q", "V", "theta", "m")))
