"""Grids of settings: both branches in every cell, computed over many devices and processes, kept on disk."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, PyTree, Real

from ..averages.recipes import SIZES, AnyNodes
from ..averages.rules import Rule
from ..base.arrays import GivenArray, indexed, stacked
from ..base.errors import InputError, as_flag, require, require_count, require_kind
from ..base.files import VERSION, Store, fingerprint, named
from ..base.report import Settings, Status, has_state, quorum
from ..model.checks import identity
from ..model.model import Model
from ..model.overlaps import PAIR, Overlaps
from ..model.parameters import Axis, axis_of
from ..theory import engine as pool
from ..theory.paths import Failure, Path
from ..theory.solve import Problem, check_alpha, with_replicate_axis
from ..theory.states import number_shapes
from .diagram import PhaseDiagram
from .follow import Follower, Progress, WarmStart, pair_free, pair_start, silent
from .inputs import prepared

# An error of 5e-4 in the overlaps is negligible in the losses, which are stationary in the overlaps.
GRID_SETTINGS = Settings(tol=5e-4, max_steps=15, warm_steps=0)
_COARSE = 1e-3  # least tolerance of the search for the first cells, on the coarse replicate
_PATIENCE = 2  # factor of the Newton steps in the first cells and when a cell is tried again
_WARM_STEPS = 300  # least number of damped steps from a start that may be far


def phase_diagram(
    model: Model,
    x: Any,
    y: Any,
    nodes: AnyNodes = None,
    *,
    alpha: float | None = None,
    settings: Settings | None = None,
    devices: int | None = None,
    width: int | None = None,
    out: pathlib.Path | str | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> PhaseDiagram:
    """Compute the positional and the semantic branch on a grid of two numbers of the model, or of one and alpha.

    A track is one branch along one row of cells. Tracks run along alpha, downwards from the largest, if alpha is an
    axis, and along x otherwise. Cells that a track did not solve are tried again from the states of their neighbours
    and from the default starts. If that fails as well, their status says so.

    Under `jax.distributed` every process computes a share of the tracks, and all processes return the whole diagram. If
    one process ends early, the others finish their shares and raise a RuntimeError; with `out`, all finished tracks are
    kept. This requires ``jax.config.update("jax_enable_recoverability", True)`` before ``jax.distributed.initialize``.
    Otherwise JAX aborts the other processes, without an exception, about 100 s after one has ended. JAX may abort them
    at once if process 0 ends, which coordinates them; the finished tracks are kept in that case, too.

    Args:
        model: attention layer and data; supplies the numbers that are not axes.
        x, y: axes, ``(name, values)`` with "alpha", the name of a scalar field of the model or an entry such as
            "mixing[0,1]"; or ``(name, values, put)``, where ``put(model, value)`` returns the model with that value.
            Plain values mean alpha for x and omega for y.
        nodes: recipe of the averages, or number of nodes; by default `SIZES["grid"]`.
        alpha: samples per dimension, if alpha is not an axis.
        settings: tolerances; by default `GRID_SETTINGS`. More steps are allowed where a start may be far: in the first
            cells of tracks and in cells that are tried again.
        devices: number of this process's devices to use; by default all. A CPU counts as one device, each of whose
            cores works on one search.
        width: number of simultaneous searches; by default the number of cores on a CPU, and on other devices as many as
            fill them.
        out: folder in which finished tracks and repeated cells are kept.
        resume: whether to continue from the content of `out`.
        progress: called with the number of finished cells and the number of all cells, counting both branches.

    Raises:
        RuntimeError: another process ended early.
        KeyboardInterrupt: the user has interrupted the call; a note says what is kept and how to go on.
        InputError: an axis is empty, not increasing, not finite or out of the model's range; alpha is given twice or
            not at all; there are fewer devices than requested; `out` cannot be written or holds tracks of other
            settings; nodes, settings, width or `out` are of the wrong kind.
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
    if width is not None:
        require_count(width, "width")
    require_kind(out, "out", (str, pathlib.Path, type(None)), "a folder")
    resume = as_flag(resume, "resume")
    if resume and out is None:
        raise InputError("out", "must name the folder of the run to resume, got out=None with resume=True")
    engine = _Engine(_devices(devices), width)
    grid = _Grid.of(model, *(axes if names[1] == "alpha" else axes[::-1]), alpha, nodes, settings)
    # Only files outlive the definition of the model, whose text takes some tenths of a second.
    text = "" if out is None else identity(grid.at(0, 0)[0])
    digest = fingerprint(text, grid.models, grid.alphas, nodes, settings, VERSION)
    store = Store(out, digest, resume)
    try:
        cells = grid.solve(engine, store, progress)
        (cells,) = engine.run([grid.retry(cells, store)])
    except KeyboardInterrupt as interrupt:
        hint = "nothing is kept: a folder out= keeps finished tracks"
        if out is not None:
            hint = f"finished tracks are in out='{out}': the same call with resume=True goes on from there"
        interrupt.add_note(f"phase_diagram was interrupted; {hint}")
        raise
    if names[1] == "alpha":
        cells = {k: np.swapaxes(a, 1, 2) for k, a in cells.items()}
    attrs = {
        "model": type(model).__name__,
        "numbers": {name: np.asarray(a).tolist() for name, a in named(model).items() if name not in names},
        "alpha": None if alpha is None else float(alpha),
        "nodes": {"rule": type(nodes.stack).__name__, "size": nodes.size, "replicates": nodes.replicates},
        "settings": {name: a.tolist() for name, a in named(settings).items()},
        "version": VERSION,
        "fingerprint": digest,
    }
    x_axis, y_axis = ((axis.parameter.name, axis.values) for axis in axes)
    return PhaseDiagram(x_axis, y_axis, cells, attrs)


def _devices(count: int | None) -> list[jax.Device]:
    available = jax.local_devices()
    count = len(available) if count is None else count
    require_count(count, "devices")
    require(count <= len(available), "devices", count, f"between 1 and {len(available)}")
    return available[:count]


class _Engine(NamedTuple):
    """The devices and the number of searches that run on them at once."""

    devices: list[jax.Device]
    width: int | None

    def run(self, paths: Iterable[Path], **options: Any) -> list[Any]:
        """Run paths on the devices; see `pool.run`."""
        return pool.run(paths, width=self.width, devices=self.devices, **options)


def with_more_steps(settings: Settings) -> Settings:
    """Return a caller's settings with more steps, for starts that may be far."""
    warm_steps = np.maximum(settings.warm_steps, _WARM_STEPS)
    return Settings(settings.tol, _PATIENCE * settings.max_steps, warm_steps, settings.damping)


class CellIndex(NamedTuple):
    """Index of a branch in a cell."""

    branch: int
    row: int
    column: int


class _Grid(NamedTuple):
    """All settings: models (leaves (rows, columns, ...)) and alphas; a track runs along a row."""

    models: Model
    alphas: Float[np.ndarray, "rows columns"]
    columns: Axis
    nodes: Rule
    settings: Settings

    @classmethod
    def of(cls, model: Model, rows: Axis, columns: Axis, alpha: float | None, nodes: Rule, settings: Settings) -> _Grid:
        """Build the settings from two axes; `alpha` holds everywhere if it is not an axis."""

        def cell(row: Float[Array, ""], column: Float[Array, ""]) -> tuple[Model, Float[Array, ""]]:
            return columns.parameter.set(*rows.parameter.set(model, start, row), column)

        dtype = model.lam.dtype
        start = jnp.asarray(1.0 if alpha is None else alpha, dtype)
        values = jnp.meshgrid(*(jnp.asarray(a.values, dtype) for a in (rows, columns)), indexing="ij")
        models, alphas = jax.tree.map(np.asarray, jax.vmap(jax.vmap(cell))(*values))
        return cls(models, alphas, columns, nodes, settings)

    @property
    def order(self) -> slice:
        """Order in which a track visits its cells: downwards in alpha, upwards in any other parameter."""
        return slice(None, None, -1 if self.columns.parameter.name == "alpha" else 1)

    def solve(
        self, engine: _Engine, store: Store, progress: Progress
    ) -> dict[str, Real[np.ndarray, "branch rows columns R ..."]]:
        """Solve the tracks that are not in the store; return all cells."""
        rows, width = self.alphas.shape
        total, processes, rank = rows * len(PAIR), jax.process_count(), jax.process_index()
        finished = {int(k.removeprefix(_TRACK)): a for k, a in store.load().items() if k.startswith(_TRACK)}
        if processes > 1:  # every process uses the tracks in the folder of process 0
            finished = self._shared_tracks(finished, total, store)
        unsolved = [number for number in range(total) if number not in finished]
        assigned, cells = unsolved[rank::processes], len(finished) * width

        def cell_done() -> None:
            nonlocal cells
            cells += processes
            progress(min(cells, total * width), total * width)

        def store_track(index: int, arrays: dict[str, Real[np.ndarray, "columns R ..."]] | Failure) -> None:
            if isinstance(arrays, Failure):
                return
            store.put(f"{_TRACK}{assigned[index]:05d}", arrays)
            finished[assigned[index]] = arrays

        progress(cells, total * width)
        first_overlaps = engine.run([self.first_cells(branch) for branch in range(len(PAIR))]) if assigned else []
        tracks = (self.track(k % len(PAIR), k // len(PAIR), first_overlaps[k % len(PAIR)], cell_done) for k in assigned)
        engine.run(tracks, done=store_track, names=[self.name_of(k % len(PAIR), k // len(PAIR)) for k in assigned])
        if processes > 1:
            share = self._stacked_tracks(finished, total)
            shares = _together(multihost_utils.process_allgather, share, store)
            owner = np.zeros(total, int)
            owner[unsolved] = np.arange(len(unsolved)) % processes
            all_tracks = {k: a[owner, np.arange(total)] for k, a in shares.items()}
        else:
            all_tracks = self._stacked_tracks(finished, total)
        shape = rows, len(PAIR)
        return {k: np.swapaxes(a.reshape(*shape, *a.shape[1:]), 0, 1)[:, :, self.order] for k, a in all_tracks.items()}

    def _stacked_tracks(
        self, tracks: dict[int, dict[str, Real[np.ndarray, "columns R ..."]]], total: int
    ) -> dict[str, Float[np.ndarray, "tracks columns R ..."]]:
        """Return arrays of all tracks, NaN for missing ones, so that shapes are the same in every process."""
        R, width = self.nodes.replicates, self.alphas.shape[1]
        shapes = {name: (R, *shape) for name, shape in number_shapes(self.at(0, 0)[0]).items()}
        arrays = {name: np.full((total, width, *shape), np.nan) for name, shape in shapes.items()}
        for number, track in tracks.items():
            for name, a in track.items():
                arrays[name][number] = a
        return arrays

    def _shared_tracks(
        self, tracks: dict[int, dict[str, Real[np.ndarray, "columns R ..."]]], total: int, store: Store
    ) -> dict[int, dict[str, Real[np.ndarray, "columns R ..."]]]:
        """Return the finished tracks of process 0 in every process."""
        finished = np.isin(np.arange(total), list(tracks))
        finished, arrays = _together(
            multihost_utils.broadcast_one_to_all, (finished, self._stacked_tracks(tracks, total)), store
        )
        return {int(k): {name: a[k] for name, a in arrays.items()} for k in np.flatnonzero(finished)}

    def at(self, row: int, column: int) -> tuple[Model, Float[np.ndarray, ""]]:
        """Return model and alpha of a cell; `column` counts in the order in which a track runs."""
        column = np.arange(self.alphas.shape[1])[self.order][column]
        alpha = np.asarray(self.alphas[row, column], self.models.lam.dtype)
        return indexed(self.models, (row, column)), alpha

    def name_of(self, branch: int, row: int) -> str:
        """Return the name of a track for an exception."""
        return f"the {PAIR[branch]} branch in row {row}, alpha = {self.alphas[row, 0]:g} to {self.alphas[row, -1]:g}"

    def first_cells(self, branch: int) -> Path:
        """Path that finds overlaps near a branch in the first cell of every row, on the coarse replicate."""
        settings, tol = with_more_steps(self.settings), np.maximum(self.settings.tol, _COARSE)
        coarse_settings = eqx.tree_at(lambda s: s.tol, settings, tol)
        start = x = pair_start(self.at(0, 0)[0])[branch]
        first_overlaps = []
        for row in range(len(self.alphas)):
            model, alpha = self.at(row, 0)
            state = yield Problem(model, alpha, self.nodes, pair_free(model)[branch], coarse_settings).coarse_lane(x)
            # An absent branch returns overlaps near the uninformed state, which fit this row but no other one.
            x = state.overlaps if state.status <= Status.stalled else start
            first_overlaps.append(state.overlaps if state.status == Status.absent else x)
        return first_overlaps

    def track(self, branch: int, row: int, first_overlaps: list[Overlaps], cell_done: Callable[[], None]) -> Path:
        """Path that follows a branch along a row; returns `State.numbers` of the cells, arrays (columns, R, ...)."""
        first_model = self.at(row, 0)[0]
        follower = Follower(self.nodes, self.settings, pair_free(first_model)[branch], pair_start(first_model)[branch])
        values = self.columns.values[self.order]
        warm, cells = WarmStart.begin(first_overlaps[row], values[0], self.nodes.replicates), []
        for column, value in enumerate(values):
            warm, state = yield from follower.advance(*self.at(row, column), value, warm)
            cells.append(state.numbers())
            cell_done()
        return stacked(cells)

    def retry(self, cells: dict[str, Real[np.ndarray, "branch rows columns R ..."]], store: Store) -> Path:
        """Path that repeats cells that are not solved, and cells that lack a branch which a neighbour has.

        Unsolved cells start from the states of their neighbours and from the default start. Cells that lack a branch
        may lie between a fold and a pitchfork; they start from one neighbour only. The store keeps all attempts.
        """
        cells, attempts = {k: a.copy() for k, a in cells.items()}, store.load()
        tried: set[tuple[CellIndex, CellIndex | None]] = set()

        def is_absent(cell: CellIndex) -> bool:
            return bool(np.all(cells["status"][cell] == Status.absent))

        def untried() -> Iterator[tuple[CellIndex, list[CellIndex | None]]]:
            """Yield cells without a state and their untried starts: neighbours, or None for the default start."""
            solved = _exists(cells)
            for cell in map(CellIndex, *np.nonzero(~solved)):
                neighbours: list[CellIndex | None] = [c for c in _neighbours(cell, solved.shape) if solved[c]]
                if sources := [
                    c for c in (neighbours[:1] if is_absent(cell) else [*neighbours, None]) if (cell, c) not in tried
                ]:
                    yield cell, sources

        while pending := list(untried()):
            for cell, sources in pending:
                was_absent = is_absent(cell)
                for source in sources:
                    tried.add((cell, source))
                    origin = "start" if source is None else "-".join(map(str, source))
                    name = f"{_RETRY}{'-'.join(map(str, cell))}-from-{origin}"
                    if name not in attempts:
                        guess = None if source is None else _state_of(cells, source)
                        attempts[name] = yield from self.attempt(cell, guess, was_absent)
                        if jax.process_index() == 0:
                            store.put(name, attempts[name])
                    numbers = attempts[name]
                    status = np.asarray(numbers["status"])
                    is_settled = _exists(numbers) or np.all(status == Status.absent)
                    if quorum(status <= Status.stalled) if was_absent else is_settled:
                        for k, a in numbers.items():
                            cells[k][cell] = a
                        break
        return cells

    def attempt(self, cell: CellIndex, source: Overlaps | None, was_absent: bool) -> Path:
        """Path of `Follower.search` in a cell, from a state for all replicates or from the default start."""
        model, first_model = (indexed(self.models, place) for place in ((cell.row, cell.column), (0, 0)))
        default, free = pair_start(first_model)[cell.branch], pair_free(first_model)[cell.branch]
        guess = with_replicate_axis(default if source is None else source, self.nodes.replicates)
        settings = self.settings if was_absent else with_more_steps(self.settings)
        alpha = np.asarray(self.alphas[cell.row, cell.column], model.lam.dtype)
        state = yield from Follower(self.nodes, settings, free, default).search(model, alpha, guess, False)
        return {name: np.asarray(a) for name, a in state.numbers().items()}


_TRACK, _RETRY = "track-", "retry-"


def _together(exchange: Callable[[PyTree], PyTree], share: PyTree, store: Store) -> PyTree:
    """Exchange the shares of all processes; return numpy arrays.

    Raises:
        RuntimeError: a process has ended.
    """
    try:
        return jax.tree.map(np.array, exchange(share))
    except (ValueError, RuntimeError) as error:  # raised by the communication layer: gloo, NCCL
        hint = "nothing is kept: start all processes again, with a folder out"
        if store.folder is not None:
            hint = f"finished tracks are in out='{store.folder}': start all processes again with resume=True"
        raise RuntimeError(f"another process ended before the grid was done; {hint}") from error


def _exists(cells: Mapping[str, Real[GivenArray, "..."]]) -> Bool[np.ndarray, "..."]:
    """Return whether half of the replicates or more have a state."""
    return np.asarray(quorum(has_state(cells["status"], cells["residual"])))


def _neighbours(cell: CellIndex, shape: tuple[int, ...]) -> list[CellIndex]:
    """Return the adjacent cells, those of the same track last."""
    _, rows, columns = shape
    adjacent = [cell._replace(row=cell.row + d) for d in (1, -1)] + [
        cell._replace(column=cell.column + d) for d in (1, -1)
    ]
    return [c for c in adjacent if 0 <= c.row < rows and 0 <= c.column < columns]


def _state_of(cells: dict[str, Real[np.ndarray, "branch rows columns R ..."]], cell: CellIndex) -> Overlaps:
    """Return the mean overlaps over the replicates that have a state."""
    usable = np.asarray(has_state(cells["status"][cell], cells["residual"][cell]))
    return Overlaps(*(jnp.asarray(cells[k][cell][usable].mean(0)) for k in ("q", "V", "theta", "m")))
