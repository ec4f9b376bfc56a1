"""Grids of settings: both branches in every cell, computed over many devices and processes, kept on disk."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Real, Shaped

from ..averages.recipes import SIZES, AnyNodes, default_recipe, make_rule
from ..averages.rules import Rule
from ..base import VERSION
from ..base.arrays import AnyArray, GivenArray, indexed, stacked
from ..base.errors import require, require_count
from ..base.files import Store, fingerprint, named
from ..base.pieces import computed
from ..base.progress import Progress, Report, reporter
from ..base.results import Settings, Status, has_state, quorum
from ..model.model import Model, identity
from ..model.overlaps import PAIR, Overlaps
from ..model.parameters import MODELS, Axis
from ..theory import engine
from ..theory.paths import Failure, Path
from ..theory.setting import Setting
from ..theory.states import FixedPoint, State
from .cells import Batch
from .diagram import PhaseDiagram
from .events import EVENTS
from .family import Family, prepared
from .follow import Follower, WarmStart, pair_free, pair_start, with_replicate_axis
from .locate import zero_path
from .pair import Pair
from .sweep import Grid

# An error of 5e-4 in the overlaps is negligible in the losses, which are stationary in the overlaps.
GRID_SETTINGS = Settings(tol=5e-4, max_steps=15, warm_steps=0)
_COARSE = 1e-3  # least tolerance of the search for the first cells, on the coarse replicate
_PATIENCE = 2  # factor of the Newton steps in the first cells and when a cell is tried again
_WARM_STEPS = 300  # least number of damped steps from a start that may be far


def phase_diagram(
    model: Model | Sequence[Model | tuple[Model, Any]],
    *axes: Axis,
    nodes: AnyNodes = None,
    settings: Settings | None = None,
    devices: int | None = None,
    width: int | None = None,
    executor: Executor | None = None,
    out: pathlib.Path | str | None = None,
    resume: bool = False,
    progress: Progress = None,
    **numbers: float | Sequence[float] | Real[GivenArray, "..."],
) -> PhaseDiagram:
    """Compute the positional and the semantic branch on a grid of two numbers of the model, or of one and alpha.

        phase_diagram(model, alpha=alphas, omega=omegas)
        phase_diagram(model, omega=omegas, sigma=sigmas, alpha=2.0)
        phase_diagram(model, Axis("alpha", alphas), Axis("mixing[0,1]", shares))
        phase_diagram(models, alpha=alphas)

    A track is one branch along one row of cells. Tracks run along alpha, downwards from the largest, if alpha is an
    axis, and along the first axis of numbers otherwise. Cells that a track did not solve are tried again from the
    states of their neighbours and from the default starts. If that fails as well, their status says so.

    Under `jax.distributed` every process computes a share of the tracks, and all processes return the whole diagram. If
    one process ends early, the others finish their shares and raise a RuntimeError that names it; with `out`, all
    finished tracks are kept. This requires ``jax.config.update("jax_enable_recoverability", True)`` before
    ``jax.distributed.initialize``. Otherwise JAX aborts the other processes, without an exception, when the
    ``heartbeat_timeout_seconds`` of ``initialize`` are over, by default 100. JAX aborts them at once if process 0 ends,
    which coordinates them; the finished tracks are kept in that case, too.

    Args:
        model: attention layer and data; supplies the numbers that are not axes. Or a list of models, as in `sweep`.
        axes: axes that a keyword cannot name, see `Axis`.
        numbers: values of alpha or of numbers of the model by name. A single value fixes the number, several are an
            axis. The first axis of the diagram points to the right, the second one upwards.
        nodes: recipe of the averages, or number of nodes; by default `SIZES["grid"]`.
        settings: tolerances; by default `GRID_SETTINGS`. More steps are allowed where a start may be far: in the first
            cells of tracks and in cells that are tried again.
        devices: number of this process's devices to use; by default all. A CPU counts as one device, each of whose
            cores works on one search.
        width: number of simultaneous searches; by default the number of cores on a CPU, and on other devices as many as
            fill them.
        executor: any `concurrent.futures.Executor`: its workers follow the tracks, see `sweep`. Cells are tried again
            in this process.
        out: folder in which finished tracks and repeated cells are kept.
        resume: whether to continue from the content of `out`.
        progress: None, True for a bar, or a function of the numbers of finished and of all states: two in every cell,
            and one for every repetition, which makes the second number larger.

    Raises:
        RuntimeError: another process ended early.
        KeyboardInterrupt: the user has interrupted the call; a note says what is kept and how to go on.
        InputError: there are not two axes, or one is empty, not increasing, not finite or out of the model's range;
            alpha is given twice or not at all; there are fewer devices than requested; `out` cannot be written or holds
            tracks of other settings; nodes, settings, width or `out` are of the wrong kind.
    """
    cells, given = Grid.of(model, axes, numbers, asked="phase_diagram", with_alpha=True, planar=True), nodes
    _, nodes, settings, *_ = prepared(cells.models[0], nodes, settings, GRID_SETTINGS, size=SIZES["grid"])
    if width is not None:
        require_count(width, "width")
    engine = _Engine(_devices(devices), width)
    grid, (x, y) = _Tracks.of(cells, nodes, settings), cells.axes
    # Only files outlive the definition of the model, whose text takes some tenths of a second.
    text = "" if out is None else identity(grid.at(0, 0)[0])
    digest = fingerprint(text, grid.models, grid.alphas, nodes, settings, VERSION)
    requirement = "hold pieces of the same model, nodes, axes and version only"
    store = Store(out, {"fingerprint": digest}, "out", requirement)
    store.open_folder(resume)
    report = reporter(progress, "states")
    states = grid.solve(engine, store, report, executor, given)
    try:
        (states,) = engine.run([grid.retry(states, store, report)])
        alphas: Any = grid.alphas
        points = [FixedPoint(grid.models, alphas, indexed(states, branch), name) for branch, name in enumerate(PAIR)]
        crossings = engine.run([grid.crossings(states, Pair(*points))])[0] if "alpha" in (x.name, y.name) else None
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"The call was interrupted; {store.hint}")
        raise
    pair = Pair(*points)
    if grid.columns is y:
        pair = jax.tree.map(lambda a: np.swapaxes(a, 0, 1), pair)
    names = x.name, y.name
    constant = {name: a[0, 0].tolist() for name, a in named(grid.models).items() if np.all(a == a[:1, :1])}
    attrs = {
        "model": type(cells.models[0]).__name__,
        "numbers": {name: value for name, value in constant.items() if name not in names},
        "alpha": float(grid.alphas[0, 0]) if "alpha" not in names and np.ptp(grid.alphas) == 0 else None,
        "nodes": nodes.described(),
        "settings": {name: a.tolist() for name, a in named(settings).items()},
        "version": VERSION,
        "fingerprint": digest,
    }
    pairs = Batch(pair, (y.values.size, x.values.size))
    return PhaseDiagram("phase_diagram", names[::-1], (y.values, x.values), pairs, attrs=attrs, crossings=crossings)


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
        """Run paths on the devices; see `theory.engine.run`."""
        return engine.run(paths, width=self.width, devices=self.devices, **options)


def with_more_steps(settings: Settings) -> Settings:
    """Return a caller's settings with more steps, for starts that may be far."""
    warm_steps = np.maximum(settings.warm_steps, _WARM_STEPS)
    return Settings(settings.tol, _PATIENCE * settings.max_steps, warm_steps, settings.damping)


class CellIndex(NamedTuple):
    """Index of a branch in a cell."""

    branch: int
    row: int
    column: int


class _Tracks(NamedTuple):
    """All settings: models (leaves (rows, columns, ...)) and alphas; a track runs along a row."""

    models: Model
    alphas: Float[np.ndarray, "rows columns"]
    columns: Axis
    nodes: Rule
    settings: Settings

    @classmethod
    def of(cls, cells: Grid, nodes: Rule, settings: Settings) -> _Tracks:
        """Build the rows from the cells over x and y: along y if this is alpha or if x are models, and along x else."""
        x, y = cells.axes
        shape, along_y = (x.values.size, y.values.size), y.name == "alpha" or x.name == MODELS

        def rows(a: Shaped[AnyArray, "cells ..."]) -> Shaped[np.ndarray, "rows columns ..."]:
            a = np.asarray(a).reshape(*shape, *a.shape[1:])
            return a if along_y else np.swapaxes(a, 0, 1)

        models, alphas = jax.tree.map(rows, (stacked(cells.models), stacked(cells.alphas)))
        return cls(models, alphas, y if along_y else x, nodes, settings)

    @property
    def order(self) -> slice:
        """Order in which a track visits its cells: downwards in alpha, upwards in any other parameter."""
        return slice(None, None, -1 if self.columns.parameter.name == "alpha" else 1)

    def solve(
        self, engine: _Engine, store: Store, progress: Report, executor: Executor | None, given: AnyNodes
    ) -> State:
        """Solve the tracks that are not in the store; return all cells, arrays (branch, rows, columns, R, ...).

        Args:
            executor: workers of the tracks; by default this process and those of `jax.distributed`.
            given: averages as the caller gave them, which are smaller than their nodes.
        """
        rows, width = self.alphas.shape
        places = [(k % len(PAIR), k // len(PAIR)) for k in range(rows * len(PAIR))]
        cells = np.zeros(len(places), int)

        def report(number: int, count: int = width) -> None:
            if count > cells[number]:
                cells[number] = count
                progress(int(cells.sum()), cells.size * width)

        @functools.cache
        def first_cells() -> list[list[Overlaps]]:
            return engine.run([self.first_cells(branch) for branch in range(len(PAIR))])

        def here(numbers: Sequence[int], finish: Callable[[int, Any], None]) -> None:
            def done(place: int, track: State | Failure) -> None:
                if not isinstance(track, Failure):
                    finish(numbers[place], track)

            first = first_cells() if numbers else []
            tracks = (self.track(*places[k], first[places[k][0]], functools.partial(report, k)) for k in numbers)
            engine.run(tracks, done=done, names=[self.name_of(*places[k]) for k in numbers])

        progress(0, cells.size * width)

        def piece(number: int) -> tuple:
            return self.piece(*places[number], first_cells(), given)

        tracks = computed(_solved_track, piece, len(places), store, executor, report, here)
        for place, track in zip(places, tracks, strict=True):
            if isinstance(track, BaseException):
                track.add_note(f"This happened at {self.name_of(*place)}.")
                raise track
        shape = rows, len(PAIR)
        return jax.tree.map(
            lambda a: np.swapaxes(a.reshape(*shape, *a.shape[1:]), 0, 1)[:, :, self.order], stacked(tracks)
        )

    def piece(self, branch: int, row: int, first_overlaps: list[list[Overlaps]], given: AnyNodes) -> tuple:
        """Return the arguments of `_solved_track`."""
        models, alphas = indexed((self.models, self.alphas), slice(row, row + 1))
        columns = Axis(self.columns.name, self.columns.values)
        return models, alphas, columns, given, self.settings, branch, first_overlaps[branch][row]

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
            state = yield Setting.of(model, alpha, self.nodes, PAIR[branch], coarse_settings).coarse_lane(x)
            # An absent branch returns overlaps near the uninformed state, which fit this row but no other one.
            x = state.overlaps if state.status <= Status.stalled else start
            first_overlaps.append(state.overlaps if state.status == Status.absent else x)
        return first_overlaps

    def track(self, branch: int, row: int, first_overlaps: list[Overlaps], cell_done: Callable[[int], Any]) -> Path:
        """Path that follows a branch along a row; returns the states of the cells, arrays (columns, R, ...).

        Args:
            cell_done: told after every cell how many are done.
        """
        first_model = self.at(row, 0)[0]
        follower = Follower(self.nodes, self.settings, pair_free(first_model)[branch], pair_start(first_model)[branch])
        values = self.columns.values[self.order]
        warm, cells = WarmStart.begin(first_overlaps[row], values[0], self.nodes.replicates), []
        for column, value in enumerate(values):
            warm, state = yield from follower.advance(*self.at(row, column), value, warm)
            cells.append(state)
            cell_done(len(cells))
        return stacked(cells)

    def retry(self, cells: State, store: Store, progress: Report) -> Path:
        """Path that repeats cells that are not solved, and cells that lack a branch which a neighbour has.

        Unsolved cells start from the states of their neighbours and from the default start. Cells that lack a branch
        may lie between a fold and a pitchfork; they start from one neighbour only. The store keeps all attempts.

        Args:
            cells: states of all cells, arrays (branch, rows, columns, R, ...), which the path changes and returns.
        """
        cells, names, structure = jax.tree.map(np.array, cells), list(named(cells)), jax.tree.structure(cells)
        attempts = {
            k: jax.tree.unflatten(structure, [a[name] for name in names])
            for k, a in store.pieces().items()
            if k.startswith(_RETRY)
        }
        tried: set[tuple[CellIndex, CellIndex | None]] = set()
        done = total = cells.status[..., 0].size

        def is_absent(cell: CellIndex) -> bool:
            return bool(np.all(cells.status[cell] == Status.absent))

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
            total += len(pending)
            for cell, sources in pending:
                progress(done, total)
                done += 1
                was_absent = is_absent(cell)
                for source in sources:
                    tried.add((cell, source))
                    origin = "start" if source is None else "-".join(map(str, source))
                    name = f"{_RETRY}{'-'.join(map(str, cell))}-from-{origin}"
                    if name not in attempts:
                        guess = None if source is None else _mean_overlaps(indexed(cells, source))
                        attempts[name] = yield from self.attempt(cell, guess, was_absent)
                        if jax.process_index() == 0:
                            store.put(name, named(attempts[name]))
                    state = attempts[name]
                    is_settled = _exists(state) or np.all(state.status == Status.absent)
                    if quorum(state.status <= Status.stalled) if was_absent else is_settled:
                        for array, new in zip(jax.tree.leaves(cells), jax.tree.leaves(state), strict=True):
                            array[cell] = new
                        break
            progress(done, total)
        return cells

    def attempt(self, cell: CellIndex, source: Overlaps | None, was_absent: bool) -> Path:
        """Path of `Follower.search` in a cell, from a state for all replicates or from the default start."""
        model, first_model = (indexed(self.models, place) for place in ((cell.row, cell.column), (0, 0)))
        default, free = pair_start(first_model)[cell.branch], pair_free(first_model)[cell.branch]
        guess = with_replicate_axis(default if source is None else source, self.nodes.replicates)
        settings = self.settings if was_absent else with_more_steps(self.settings)
        alpha = np.asarray(self.alphas[cell.row, cell.column], model.lam.dtype)
        state = yield from Follower(self.nodes, settings, free, default).search(model, alpha, guess, False)
        return jax.tree.map(np.asarray, state)

    def crossings(self, cells: State, pair: Pair) -> Path:
        """Path that searches alpha_c where the grid does not tell it; returns `PhaseDiagram.crossings`.

        It searches between neighbouring cells of a row, if the global minimum turns from positional to semantic there
        and one of the cells lacks a branch; in every row between the last such cells.

        Args:
            cells: states of all cells, arrays (branch, rows, columns, R, ...).
            pair: the same states as both branches, (rows, columns).
        """
        exists, turns = pair.exists, (pair.winner[:, :-1] == 0) & (pair.winner[:, 1:] == 1)
        places = {int(row): int(column) for row, column in np.argwhere(turns)}
        places = {row: k for row, k in places.items() if not exists[:, row, k : k + 2].all()}
        zeros = yield [self.crossing(cells, exists, row, k) for row, k in places.items()]
        crossings = np.full((len(self.alphas), 3, self.nodes.replicates), np.nan)
        for row, zero in zip(places, zeros, strict=True):
            if zero.converged:
                gains = [s.gen_error_linear - s.gen_error for s in zero.states]
                crossings[row] = np.where(np.isnan(zero.value), np.nan, [zero.at - zero.value / zero.slopes, *gains])
        return crossings

    def crossing(self, cells: State, exists: Bool[np.ndarray, "branch rows columns"], row: int, column: int) -> Path:
        """Path that searches alpha_c between a cell and the next one, from states of either; returns a `Reading`."""
        low, high = self.alphas[row, column : column + 2].tolist()
        family = Family(indexed(self.models, (row, column)), self.nodes, with_more_steps(self.settings))
        places = [(b, row, column if exists[b, row, column] else column + 1) for b in range(len(PAIR))]
        starts = [_mean_overlaps(indexed(cells, place)) for place in places]
        return (yield from zero_path(EVENTS["alpha_c"], family, bracket=(low, high), starts=starts))


_RETRY = "retry-"


def _solved_track(
    models: Model,
    alphas: Float[np.ndarray, "1 columns"],
    columns: Axis,
    nodes: AnyNodes,
    settings: Settings,
    branch: int,
    first_overlaps: Overlaps,
) -> State:
    """Return the states of a track, whose cells have models with leaves (1, columns, ...), in a worker."""
    model = indexed(models, (0, 0))
    rule = make_rule(nodes, model, default_recipe(model, SIZES["grid"]))
    path = _Tracks(models, alphas, columns, rule, settings).track(branch, 0, [first_overlaps], lambda count: None)
    return engine.run_one(path)


def _exists(states: State) -> Bool[np.ndarray, "..."]:
    """Return whether half of the replicates or more have a state."""
    return np.asarray(quorum(has_state(states.status, states.residual)))


def _neighbours(cell: CellIndex, shape: tuple[int, ...]) -> list[CellIndex]:
    """Return the adjacent cells, those of the same track last."""
    _, rows, columns = shape
    adjacent = [cell._replace(row=cell.row + d) for d in (1, -1)] + [
        cell._replace(column=cell.column + d) for d in (1, -1)
    ]
    return [c for c in adjacent if 0 <= c.row < rows and 0 <= c.column < columns]


def _mean_overlaps(state: State) -> Overlaps:
    """Return the mean overlaps over the replicates that have a state."""
    usable = np.asarray(has_state(state.status, state.residual))
    return jax.tree.map(lambda a: jnp.asarray(a[usable].mean(0)), state.overlaps)
