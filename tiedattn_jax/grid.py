"""Grids of settings: both branches in every cell, computed over many devices and processes, kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from .diagram import PhaseDiagram
from .lines import default_nodes
from .model import Model, require, scalar, with_scalar
from .nodes import Rule
from .overlaps import Overlaps
from .solve import check_model
from .state_evolution import Settings, Status, has_state
from .store import Store, fingerprint
from .tracks import follow, frees, numbers, search, starts, tracks_of
from .transitions import PAIR

GRID_NODES = 2**11
# Losses are stationary in the overlaps: an error of 5e-4 there is none in them.
GRID_SETTINGS = Settings(tol=5e-4, max_steps=15, warm_steps=0)
ACCELERATOR_LANES = 64


class Axis(NamedTuple):
    """A parameter of a grid, its increasing values, and how a model is given one of them (None for alpha)."""

    name: str
    values: np.ndarray
    put: Callable[[Model, Any], Model] | None


def as_axis(given: Any, name: str, argument: str, model: Model) -> Axis:
    """An axis from what `phase_diagram` accepts for one."""
    values, put = given, None
    if isinstance(given, tuple) and given and isinstance(given[0], str):
        name, values, *rest = given
        put = rest[0] if rest else None
    values = np.atleast_1d(np.asarray(values, float))
    good = values.ndim == 1 and values.size and np.all(np.isfinite(values)) and np.all(np.diff(values) > 0)
    require(good, argument, values, "one or more finite, increasing values")
    if name == "alpha":
        require(values[0] > 0, argument, values, "positive for alpha")
        return Axis(name, values, None)
    if put is None:
        scalar(model, name, argument, "alpha or ")
        put = partial(with_scalar, name=name)
    for end in (values[0], values[-1]):  # both ends are checked as the model checks its own numbers
        getattr(put(model, end), "__check_init__", lambda: None)()
    return Axis(name, values, put)


def phase_diagram(
    model: Model,
    x: Any,
    y: Any,
    nodes: Rule | None = None,
    *,
    alpha: float | None = None,
    settings: Settings = GRID_SETTINGS,
    devices: int | None = None,
    lanes: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PhaseDiagram:
    """Positional and semantic branch on a grid of any two numbers of the model, or of one and alpha.

    Tracks run along alpha, from the largest, where it is an axis; else along x. Cells that a track did not solve are
    tried again from the states of their neighbours and from the default starts, and marked by their status if that fails, too.
    Under `jax.distributed` every process computes a share of the tracks and all of them return the whole diagram.

    Args:
        model: attention layer and data; the numbers that are not axes.
        x, y: axes, ``(name, values)`` with "alpha", the name of a scalar field of the model or an entry such as
            "mixing[0,1]", or ``(name, values, put)`` with ``put(model, value)`` giving the model that value; plain values mean alpha for
            x and omega for y.
        nodes: averaging rule; by default `default_nodes` of 2^11, 4 replicates.
        alpha: samples per dimension, when it is not an axis.
        settings: tolerances.
        devices: how many of this process's devices to use; by default all. A CPU is one device unless
            ``jax.config.update("jax_num_cpu_devices", cores)`` came before any computation.
        lanes: tracks that a device solves in lockstep; by default 1 on a CPU, up to 64 elsewhere.
        out: folder in which finished tracks are kept.
        resume: whether to go on with the tracks that `out` holds.
        progress: called with the number of cells that are done, and of all, both branches counted.

    Raises:
        ValueError: an axis that is empty, not increasing, not finite or out of the model's range; alpha given twice or
            never; more devices than there are; an `out` that cannot be written, or with tracks of other settings.
    """
    axes = as_axis(x, "alpha", "x", model), as_axis(y, "omega", "y", model)
    if axes[0].name == axes[1].name:
        raise ValueError(f"y must be another parameter than x, got y={axes[1].name!r}")
    if (alpha is None) != any(a.name == "alpha" for a in axes):
        raise ValueError(f"alpha must be given if and only if it is not an axis, got alpha={alpha}")
    check_model(model, PAIR[0])
    nodes = default_nodes(model, GRID_NODES) if nodes is None else nodes
    mesh = _mesh(devices)
    turned = axes[1].name == "alpha"
    rows, columns = axes if turned else axes[::-1]
    models, alphas = _settings_of(model, rows, columns, alpha)
    version = metadata.version("tiedattn_jax")
    mark = fingerprint(models, alphas, nodes, repr(settings), version)
    store = Store(out, mark, resume)
    cells = _solve(models, alphas, columns, nodes, settings, mesh, lanes, store, progress)
    cells = _mended(cells, models, alphas, nodes, settings)
    if turned:
        cells = {k: np.swapaxes(a, 1, 2) for k, a in cells.items()}
    leaves = jax.tree_util.tree_leaves_with_path(model)
    attrs = {
        "model": type(model).__name__,
        "numbers": {jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist() for path, leaf in leaves},
        "alpha": alpha,
        "nodes": {"rule": type(nodes).__name__, "size": nodes.size, "replicates": nodes.replicates},
        "settings": repr(settings),
        "version": version,
        "fingerprint": mark,
    }
    x_axis, y_axis = ((a.name, a.values) for a in axes)
    return PhaseDiagram(x_axis, y_axis, cells, attrs)


def _mesh(devices: int | None) -> Mesh:
    there = jax.local_devices()
    count = len(there) if devices is None else devices
    require(isinstance(count, int) and 1 <= count <= len(there), "devices", count, f"between 1 and {len(there)}")
    return Mesh(np.array(there[:count]), ("tracks",))


def _settings_of(model: Model, rows: Axis, columns: Axis, alpha: float | None) -> tuple[Model, np.ndarray]:
    """The model (leaves (rows, columns, ...)) and alpha (rows, columns) of every cell."""
    shape = len(rows.values), len(columns.values)
    grid = np.meshgrid(rows.values, columns.values, indexing="ij")

    def cell(*values: jax.Array) -> Model:
        made = model
        for axis, value in zip((rows, columns), values, strict=True):
            made = made if axis.put is None else axis.put(made, value)
        return made

    models = jax.vmap(jax.vmap(cell))(*(jnp.asarray(g, model.lam.dtype) for g in grid))
    given = [g for g, axis in zip(grid, (rows, columns), strict=True) if axis.name == "alpha"]
    return models, given[0] if given else np.full(shape, alpha, float)


def _solve(
    models: Model,
    alphas: np.ndarray,
    columns: Axis,
    nodes: Rule,
    settings: Settings,
    mesh: Mesh,
    lanes: int | None,
    store: Store,
    progress: Callable[[int, int], None],
) -> dict[str, np.ndarray]:
    """All tracks, those in the store excepted: arrays (branch, row, column, replicate, ...)."""
    back = slice(None, None, -1 if columns.name == "alpha" else 1)
    ahead = jax.tree.map(lambda a: a[:, back], models)
    tracks = tracks_of(ahead, alphas[:, back], columns.values[back], nodes.coarse(), Settings(tol=1e-3))
    total, width = tracks.alphas.shape
    if lanes is None:
        lanes = 1 if mesh.devices.flat[0].platform == "cpu" else min(ACCELERATOR_LANES, -(-total // mesh.size))
    shapes = eqx.filter_eval_shape(follow, jax.tree.map(lambda a: a[: mesh.size], tracks), nodes, settings, mesh, 1)
    found = {k: np.full((total, *s.shape[1:]), np.nan) for k, s in shapes.items()}
    done = np.zeros(total, bool)
    for number, arrays in store.load().items():
        done[number] = True
        for k, a in arrays.items():
            found[k][number] = a
    processes, here = jax.process_count(), jax.process_index()
    if processes > 1:  # all see what process 0 found in its folder
        done, found = jax.tree.map(np.array, multihost_utils.broadcast_one_to_all((done, found)))
    mine = np.flatnonzero(~done)[here::processes]
    finished = int(done.sum())
    progress(finished * width, total * width)
    chunk = mesh.size * lanes
    for first in range(0, len(mine), chunk):
        batch = mine[first : first + chunk]
        padded = np.resize(batch, chunk)  # the last chunk is filled up with copies
        solved = follow(jax.tree.map(lambda a, i=padded: a[i], tracks), nodes, settings, mesh, lanes)
        part = {k: np.asarray(a) for k, a in solved.items()}
        for slot, number in enumerate(batch):
            arrays = {k: a[slot] for k, a in part.items()}
            store.put(int(number), arrays)
            for k, a in arrays.items():
                found[k][number] = a
        finished += processes * len(batch)
        progress(min(finished, total) * width, total * width)
    if processes > 1:
        shares = multihost_utils.process_allgather(found)
        owner = np.zeros(total, int)
        owner[np.flatnonzero(~done)] = np.arange(np.sum(~done)) % processes
        found = {k: np.asarray(a)[owner, np.arange(total)] for k, a in shares.items()}
    rows = total // len(PAIR)
    return {k: np.swapaxes(a.reshape(rows, len(PAIR), *a.shape[1:]), 0, 1)[:, :, back] for k, a in found.items()}


def _mended(
    cells: dict[str, np.ndarray], models: Model, alphas: np.ndarray, nodes: Rule, settings: Settings
) -> dict[str, np.ndarray]:
    """Try again the cells that are not solved, and those where a branch is absent that a neighbour has.

    The first from the states of the neighbours and from the default start; the others, which may lie between a fold and
    a pitchfork, from the neighbours only.
    """
    cells = {k: a.copy() for k, a in cells.items()}
    patient = Settings(settings.tol, 2 * settings.max_steps)
    begin = starts(jax.tree.map(lambda a: a[0, 0], models))
    tried: set[tuple[Place, Place | None]] = set()

    def sources(at: Place, has: np.ndarray) -> list[Place | None]:
        """Where to start from in a cell: neighbours, None for the default start."""
        near: list[Place | None] = [c for c in _neighbours(at, has.shape) if has[c]]
        every = near[:1] if np.all(cells["status"][at] == Status.absent) else [*near, None]
        return [c for c in every if (at, c) not in tried]

    def untried() -> list[tuple[Place, list[Place | None]]]:
        has = _has(cells)
        return [(at, near) for at in map(Place, *np.nonzero(~has)) if (near := sources(at, has))]

    while todo := untried():
        for at, near in todo:
            b, i, j = at
            model = jax.tree.map(lambda a, i=i, j=j: a[i, j], models)
            alpha, free = jnp.asarray(alphas[i, j], model.lam.dtype), frees(model)[b]
            default = jax.tree.map(lambda a, b=b: a[b], begin)
            was_absent = np.all(cells["status"][at] == Status.absent)
            for source in near:
                tried.add((at, source))
                x = default if source is None else _state_of(cells, source)
                found = _retried(model, alpha, nodes, x, default, free, settings if was_absent else patient)
                status = np.asarray(found["status"])
                settled = _has(found) or np.all(status == Status.absent)
                if np.mean(status <= Status.stalled) >= 0.5 if was_absent else settled:
                    for k, a in found.items():
                        cells[k][at] = a
                    break
    return cells


class Place(NamedTuple):
    """A cell of one branch."""

    branch: int
    row: int
    column: int


def _has(cells: dict[str, Any]) -> np.ndarray:
    """Whether there is a state, in half of the replicates or more."""
    return np.asarray(has_state(cells["status"], cells["residual"])).mean(-1) >= 0.5


def _retried(
    model: Model, alpha: jax.Array, nodes: Rule, x: Overlaps, default: Overlaps, free: jax.Array, settings: Settings
) -> dict[str, jax.Array]:
    """`search` from one state for all replicates."""
    near = jax.tree.map(lambda a: jnp.broadcast_to(a, (nodes.replicates, *a.shape)), x)
    return numbers(search(model, alpha, nodes, near, default, free, settings, jnp.array(False)))


def _neighbours(at: Place, shape: tuple[int, ...]) -> list[Place]:
    """The cells beside a cell, those of its track last."""
    _, rows, columns = shape
    beside = [at._replace(row=at.row + d) for d in (1, -1)] + [at._replace(column=at.column + d) for d in (1, -1)]
    return [c for c in beside if 0 <= c.row < rows and 0 <= c.column < columns]


def _state_of(cells: dict[str, np.ndarray], at: Place) -> Overlaps:
    """Mean overlaps of the replicates that have a state."""
    found = np.asarray(has_state(cells["status"][at], cells["residual"][at]))
    return Overlaps(*(jnp.asarray(cells[k][at][found].mean(0)) for k in ("q", "V", "theta", "m")))
