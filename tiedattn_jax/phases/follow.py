"""A branch from one setting to the next: one predictor, one test whether the branch is there.

`Follower.advance` is the step: every replicate of the averages starts from the secant through its own last two states,
so that a setting costs two or three Newton steps, and `Follower.search` says whether the branch is there. It runs as a
Python loop over one branch (`walk`, `sweep`), and as a traced loop over many rows of a grid at once, spread over many
devices (`follow`). There a *track* is one branch along one row; tracks do not know of each other, so that what is found
does not depend, but for rounding, on how they are spread over lanes, devices and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..averages.program import at_once, program
from ..averages.rule import Rule
from ..averages.sizes import SIZES
from ..errors import array_of, is_concrete
from ..model import Model
from ..overlaps import BRANCHES, PAIR, Overlaps, admissible, branch_of, own_size
from ..printing import Description, Printed, pictures
from ..results import Settings, Status, mean_of_found, quorum, settled
from ..theory.fixed_points import (
    FixedPoint,
    State,
    branch_start,
    for_each,
    no_state,
    solve_coarsely,
    solve_replicates,
    states_table,
)
from .inputs import prepared

CURVE_SETTINGS = Settings(tol=1e-4, max_steps=20)
_SMALL = 0.2  # share of its largest possible size that few nodes may leave of an order parameter where there is none
_NOTHING = 0.01  # share of rho in q below which a student that does not settle is on its way to zero
_ROOM = 16  # cells of a track at least that its program has room for: shorter ones share it
_DAMPED_STEPS = 60  # at least, of a search from the start of a branch that has appeared again

Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """No progress is shown."""


class Warm(eqx.Module):
    """What a replicate goes on from: its last two states, their places, and how many of them are on one line.

    The count is negative where the branch is absent: they are uninformed states then. Every array has a leading
    replicate axis.
    """

    before: Overlaps
    last: Overlaps
    place_before: jax.Array
    place: jax.Array
    count: jax.Array

    @classmethod
    def begin(cls, start: Overlaps, place: jax.Array, replicates: int) -> Warm:
        """Before the first setting: from overlaps, one for all replicates or with a leading replicate axis."""
        start = for_each(start, replicates)
        places = jnp.broadcast_to(place, (replicates,))
        return cls(start, start, places - 1, places, jnp.ones(replicates, int))


@eqx.filter_jit
def predict(model: Model, warm: Warm, place: jax.Array) -> Overlaps:
    """The secant through the last two states of every replicate, or the last one where that leads nowhere."""

    def one(warm: Warm) -> Overlaps:
        ratio = (place - warm.place) / (warm.place - warm.place_before)
        ahead = jax.tree.map(lambda a, b: a + ratio * (a - b), warm.last, warm.before)
        along = jnp.sum(ahead.theta * warm.last.theta) + jnp.sum(ahead.m * warm.last.m)
        use = (jnp.abs(warm.count) >= 2) & admissible(model, ahead) & (along >= 0)
        return jax.tree.map(lambda a, b: jnp.where(use, a, b), ahead, warm.last)

    return jax.vmap(one)(warm)


@eqx.filter_jit
def learn(warm: Warm, place: jax.Array, state: State) -> Warm:
    """What the next setting starts from, in every replicate.

    A replicate that lost the branch joins the mean of those that have it. Where none has it, the next search is from
    the uninformed state that was found instead, or, if nothing was found, from the last setting that was solved.
    """
    x = state.overlaps
    found, absent = state.has_state, jnp.all(state.status == Status.absent)
    mean = jax.tree.map(lambda a: mean_of_found(a, found), x)
    own = found | absent

    def pick(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.where(own.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.where(jnp.any(found), b, c))

    places, one = jnp.broadcast_to(place, found.shape), jnp.ones_like(warm.count)
    alike = (warm.count < 0) == absent
    count = jnp.where(alike, jnp.minimum(jnp.abs(warm.count) + 1, 2), 1)
    fresh = Warm(warm.last, x, warm.place, places, jnp.where(absent, -count, count))
    return jax.tree.map(pick, fresh, Warm(warm.last, mean, warm.place, places, one), warm)


_BRANCH, _UNINFORMED, _ANEW, _DONE = range(4)


class Searching(eqx.Module):
    """The stage that comes next, and what was found so far."""

    stage: jax.Array
    found: Any  # a `State`, or None before the first solve


@eqx.filter_jit
def settle(model: Model, s: Searching, state: State, free: jax.Array) -> Searching:
    """What one solve adds to a search.

    Only a branch with an order parameter of its own can be absent, and only where the nodes see what there is.
    """
    uninformed, again, own = s.stage == _UNINFORMED, s.stage == _ANEW, jnp.sum(free) == 1
    kept = jax.tree.map(lambda a, b: jnp.where(uninformed, a, b), s.found, state)
    known, size = quorum(state.has_state), jnp.mean(jnp.trace(state.overlaps.q, axis1=2, axis2=3))
    collapsed = ~known & (size < _NOTHING * jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2)))
    growth = jnp.mean(free[0] * state.diagnostics.growth_theta + free[1] * state.diagnostics.growth_m)
    seen = ~quorum(settled(Status.converged, state.diagnostics.unresolved) == Status.unresolved)
    gone = own & seen & (uninformed & known & (growth < 1) | (uninformed | again) & collapsed)
    absent = eqx.tree_at(lambda a: a.status, state, jnp.full_like(state.status, Status.absent))
    small = own & (jnp.mean(jax.vmap(lambda x: own_size(model, x, free))(kept.overlaps)) < _SMALL)
    there = quorum(kept.has_state)
    done = jnp.select([uninformed, again], [gone | there, jnp.array(True)], there & ~small)
    following = jnp.where(own | uninformed, s.stage + 1, _ANEW)
    return Searching(
        stage=jnp.where(done, _DONE, following), found=jax.tree.map(lambda a, b: jnp.where(gone, a, b), absent, kept)
    )


class Follower(eqx.Module):
    """How a branch is solved for, at one setting after the other.

    Attributes:
        nodes: averaging rule.
        settings: tolerances.
        free: what the branch leaves free, (2,).
        start: overlaps from which damped iteration reaches the branch, where it has to be looked for anew.
    """

    nodes: Rule
    settings: Settings
    free: jax.Array
    start: Overlaps

    def advance(self, model: Model, alpha: jax.Array, place: jax.Array, warm: Warm) -> tuple[Warm, State]:
        """The step: the branch at the next setting, at a place along the way, and what to go on from."""
        state = self.search(model, alpha, predict(model, warm, place), jnp.any(warm.count < 0))
        return learn(warm, place, state), state

    def search(self, model: Model, alpha: jax.Array, near: Overlaps, lost: jax.Array) -> State:
        """The branch at one setting, or the uninformed state with status `absent`.

        The branch is looked for near where it is expected. Where it is not found, or with a small order parameter,
        which few nodes may leave where there is none, the uninformed state is asked whether that order parameter grows
        on it. If not, the branch is absent: it has ended in a pitchfork, or in a fold beyond it. If so, a branch that
        was not found is looked for again from its start, with damped steps. A student that shrinks to nothing all the
        while is absent, too.

        Args:
            near: overlaps of every replicate near the state.
            lost: whether the branch is not expected at all; then the uninformed state comes first.
        """

        def stage(s: Searching) -> Searching:
            uninformed, again = s.stage == _UNINFORMED, s.stage == _ANEW
            xs = jax.tree.map(lambda a, b: jnp.where(again, a, b), self.start, near)
            free = jnp.where(uninformed, 0.0, self.free)
            steps = jnp.maximum(self.settings.warm_steps, jnp.where(again, _DAMPED_STEPS, 0))
            settings = eqx.tree_at(lambda a: a.warm_steps, self.settings, steps)
            state = solve_replicates(model, alpha, self.nodes, xs, free, settings)
            return settle(model, Searching(s.stage, no_state(state)) if s.found is None else s, state, self.free)

        s = Searching(jnp.where(lost, _UNINFORMED, _BRANCH), None)
        if is_concrete((model, alpha)):
            while s.stage != _DONE:  # with the compiled `solve_replicates`
                s = stage(s)
        else:
            s = Searching(s.stage, no_state(jax.eval_shape(stage, s).found))
            s = lax.while_loop(lambda s: s.stage != _DONE, stage, s)
        return s.found


class Curve(Printed):
    """A branch at increasing alphas.

    Attributes:
        branch: its name.
        points: a `FixedPoint` at every alpha it was looked for at, the first one beyond its end included, whose status
            says that it is not there.
    """

    branch: str | None = eqx.field(static=True)
    points: tuple[FixedPoint, ...]

    @property
    def alphas(self) -> np.ndarray:
        """Where it was solved, increasing."""
        return np.array([float(p.alpha) for p in self.points])

    @property
    def exists(self) -> np.ndarray:
        """Whether there is a state at each alpha; see `FixedPoint.exists`."""
        return np.array([bool(p.exists) for p in self.points])

    def values(self, get: str | Callable[[FixedPoint], jax.Array]) -> np.ndarray:
        """A number of every point, by its name such as "gen_error" or by a function;
        NaN where the branch does not exist.
        """
        get = attrgetter(get) if isinstance(get, str) else get
        return np.array([float(get(p)) if e else np.nan for p, e in zip(self.points, self.exists, strict=True)])

    def to_dict(self) -> dict[str, Any]:
        """The branch's name, and the `FixedPoint.to_dict` of every point."""
        return {"branch": self.branch, "points": [point.to_dict() for point in self.points]}

    def describe(self) -> Description:
        alphas, there = self.alphas, self.exists
        labels = dict.fromkeys(point.label for point, here in zip(self.points, there, strict=True) if here)
        name = self.branch or ", ".join(labels) or "any"
        what = f"{name} branch at {alphas.size} alphas from {alphas.min():g} to {alphas.max():g}"
        found = f"states at {there.sum()}"
        if there.any():
            found += f", from {alphas[there].min():g} to {alphas[there].max():g}"
        return Description(what, found, tables=[("", states_table(self.points, "alpha"))])

    def plot(self) -> Any:
        """Order parameters, training loss and test error against alpha; see `plotting.branch_figure`."""
        return pictures().branch_figure([self])


def walk(
    model: Model, alphas: Sequence[float], branch: str | None, nodes: Rule, settings: Settings
) -> Iterator[FixedPoint]:
    """A branch at one alpha after the other, in the order in which they are given.

    Damped steps, which `settings` allows, are for the rough start at the first one: the others start near the branch.
    """
    start, places = branch_start(model, branch), [jnp.asarray(alpha, model.lam.dtype) for alpha in alphas]
    warm = Warm.begin(start, places[0], nodes.replicates)
    follower = Follower(nodes, settings, branch_of(branch).free(model), start)
    for alpha in places:
        warm, state = follower.advance(model, alpha, alpha, warm)
        yield FixedPoint(model, alpha, state, branch)
        follower = eqx.tree_at(lambda f: f.settings.warm_steps, follower, np.asarray(0))


def sweep(
    model: Model,
    alphas: Sequence[float] | np.ndarray,
    branch: str | None = "semantic",
    nodes: Rule | None = None,
    *,
    settings: Settings | None = None,
    progress: Progress = silent,
) -> Curve:
    """Follow a branch through many alphas, from the largest one down to where it ends.

    Alphas below the end are left out, but for the first.

    Args:
        alphas: where; sorted by the call.
        nodes: averaging rule; by default `default_nodes` of `SIZES["curve"]`.
        settings: tolerances; by default `CURVE_SETTINGS`.
        progress: called with the number of alphas that are done, and of all.

    Raises:
        InputError: alphas that are not positive and finite, an unknown branch, nodes or settings of another kind.
    """
    nodes, settings = prepared(model, nodes, settings, CURVE_SETTINGS, size=SIZES["curve"], even=branch is not None)
    branch_of(branch)
    grid = np.sort(array_of(alphas, "alphas", "one or more positive, finite numbers", lambda a: a > 0))
    points: list[FixedPoint] = []
    progress(0, grid.size)
    for point in walk(model, list(grid[::-1]), branch, nodes, settings):
        points.append(point)
        progress(len(points), grid.size)
        if not point.exists and len(points) > 1 and points[-2].exists:
            break
    progress(grid.size, grid.size)
    return Curve(branch, tuple(points[::-1]))


class Track(eqx.Module):
    """A branch along one row of C cells; every array has more leading axes when there are many.

    Attributes:
        models: the model of every cell, leaves (C, ...).
        alphas: (C,).
        places: where the cells lie along the row, (C,), strictly monotonic.
        near: overlaps near the branch at the first cell, or what is left of it where it is absent there.
        start, free: as in `Follower`.
    """

    models: Model
    alphas: jax.Array
    places: jax.Array
    near: Overlaps
    start: Overlaps
    free: jax.Array


def follow(tracks: Track, nodes: Rule, settings: Settings, mesh: Mesh | None, lanes: int) -> dict[str, jax.Array]:
    """Solve every cell of many tracks, on one device or spread over those of a mesh.

    Args:
        tracks: T of them, T a multiple of the mesh's size.
        lanes: tracks that a device solves in lockstep. One suits a CPU, whose cores a single track keeps busy;
            accelerators want many. Memory grows with it, and with nothing else but the nodes of a block.

    Returns:
        The `State.numbers` of the cells, (T, C, R, ...).
    """
    cells = tracks.alphas.shape[1]
    found = _follow(_with_room(tracks, cells), jnp.asarray(cells), nodes, settings, mesh, lanes)
    return _first(found, cells)


def _by_cell(track: Track) -> tuple[Model, jax.Array, jax.Array]:
    return track.models, track.alphas, track.places


@partial(jax.jit, static_argnums=1)
def _with_room(tracks: Track, cells: int) -> Track:
    """Tracks of so many cells, followed by copies of the last one."""
    room = max(_ROOM, 1 << (cells - 1).bit_length())

    def longer(a: jax.Array) -> jax.Array:
        return jnp.concatenate([a, jnp.repeat(a[:, -1:], room - cells, 1)], 1)

    return eqx.tree_at(_by_cell, tracks, jax.tree.map(longer, _by_cell(tracks)))


@partial(jax.jit, static_argnums=1)
def _first(found: dict[str, jax.Array], cells: int) -> dict[str, jax.Array]:
    return {name: a[:, :cells] for name, a in found.items()}


@partial(program, nested=True)
def _follow(
    tracks: Track, cells: jax.Array, nodes: Rule, settings: Settings, mesh: Mesh | None, lanes: int
) -> dict[str, jax.Array]:
    """`follow` of tracks with room for more cells than they have; the first `cells` are solved."""

    def one(track: Track, cells: jax.Array, nodes: Rule) -> dict[str, jax.Array]:
        follower, along = Follower(nodes, settings, track.free, track.start), _by_cell(track)

        def step(k: jax.Array | int, warm: Warm) -> tuple[Warm, dict[str, jax.Array]]:
            model, alpha, place = jax.tree.map(lambda a: a[k], along)
            warm, state = follower.advance(model, alpha, place, warm)
            return warm, state.numbers()

        def cell(k: jax.Array, so_far: tuple[Warm, dict[str, jax.Array]]) -> tuple[Warm, dict[str, jax.Array]]:
            warm, numbers = step(k, so_far[0])
            return warm, jax.tree.map(lambda every, a: every.at[k].set(a), so_far[1], numbers)

        warm = Warm.begin(track.near, track.places[0], nodes.replicates)
        like = jax.eval_shape(step, 0, warm)[1]
        found = jax.tree.map(lambda a: jnp.zeros((*track.alphas.shape, *a.shape), a.dtype), like)
        return lax.fori_loop(0, cells, cell, (warm, found))[1]

    def share(tracks: Track, cells: jax.Array, nodes: Rule) -> dict[str, jax.Array]:
        return lax.map(lambda track: one(track, cells, nodes), tracks, batch_size=lanes if lanes > 1 else None)

    if mesh is None:
        return share(tracks, cells, nodes)
    rows, everywhere = PartitionSpec(*mesh.axis_names), PartitionSpec()
    specs = rows, everywhere, everywhere
    return jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(tracks, cells, nodes)


def tracks_of(models: Model, alphas: np.ndarray, places: np.ndarray, nodes: Rule, settings: Settings) -> Track:
    """Both branches along every row of a grid, row by row: a `Track` whose leaves lead with rows x branches.

    Args:
        models: leaves (rows, C, ...).
        alphas: (rows, C).
        places: (C,).
        nodes: on whose coarse replicate the start of every row is looked for.
        settings: of that search.
    """
    rows, dtype = len(alphas), models.lam.dtype
    every = jnp.asarray(alphas, dtype)
    first = jax.tree.map(lambda a: a[:, 0], models)
    starts = _first_cells(first, every[:, 0], nodes, settings), jax.vmap(pair_start, out_axes=1)(first)
    # From (branches, rows, ...) and (rows, ...) to (rows x branches, ...).
    near, start = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:]), starts)
    models_twice, alphas_twice = jax.tree.map(lambda a: jnp.repeat(a, len(PAIR), 0), (models, every))
    along = jnp.broadcast_to(jnp.asarray(places, dtype), alphas_twice.shape)
    return Track(models_twice, alphas_twice, along, near, start, jnp.tile(pair_free(models), (rows, 1)))


def _first_cells(models: Model, alphas: jax.Array, nodes: Rule, settings: Settings) -> Overlaps:
    """Overlaps near both branches in the first cell of every row, on coarse averages: leaves (branches, rows, ...)."""

    def along(branch: tuple[jax.Array, Overlaps]) -> Overlaps:
        free, start = branch
        row, x = [], start
        for i, alpha in enumerate(alphas):
            model = jax.tree.map(lambda a, i=i: a[i], models)
            found = solve_coarsely(model, alpha, nodes, x, free, settings)
            x = found_or(start, found)
            row.append(found.overlaps if found.status == Status.absent else x)
        return _stacked(row)

    first = jax.tree.map(lambda a: a[0], models)
    return map_each(along, (pair_free(first), pair_start(first)))


def found_or(start: Overlaps, found: State) -> Overlaps:
    """The overlaps of what was found on coarse averages, or the start where it is no state of the branch."""
    return jax.tree.map(lambda a, b: jnp.where(found.status <= Status.stalled, a, b), found.overlaps, start)


def map_each(fn: Callable[[Any], Any], args: Any) -> Any:
    """`lax.map` in traced code; calls of programs that are compiled, `at_once`, where all numbers are known."""
    if not is_concrete(args):
        return lax.map(fn, args)
    return _stacked(at_once(fn, unstacked(args)))


@jax.jit
def _stacked(trees: Sequence[Any]) -> Any:
    """Trees as one, whose arrays have a leading axis more."""
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)


@jax.jit
def unstacked(tree: Any) -> list[Any]:
    """A tree whose arrays lead with one more axis, as the trees along it."""
    return [jax.tree.map(lambda a, k=k: a[k], tree) for k in range(len(jax.tree.leaves(tree)[0]))]


@eqx.filter_jit
def pair_start(model: Model) -> Overlaps:
    """Starts of the two branches that compete, leaves (branches, ...)."""
    return _stacked([BRANCHES[b].start(model) for b in PAIR])


def pair_free(model: Model) -> jax.Array:
    """What these branches leave free, (branches, 2)."""
    return jnp.stack([BRANCHES[b].free(model) for b in PAIR])
