"""Branches followed along the rows of a grid of settings, many rows at once, over many devices.

A *track* is one branch along one row. Every cell starts from its solved neighbours on the track, each replicate of the
averages from its own, so that a cell costs two or three Newton steps; tracks do not know of each other, so that what is
found does not depend on how they are spread over lanes, devices and processes.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .model import Model, is_concrete
from .nodes import Rule
from .overlaps import FREE, Overlaps, admissible, magnitudes
from .overlaps import start as branch_start
from .solve import State, solve_replicates
from .state_evolution import Settings, Status, fixed_point, has_state, vanished
from .transitions import PAIR


class Track(eqx.Module):
    """A branch along one row of C cells; every array has more leading axes when there are many.

    Attributes:
        models: the model of every cell, leaves (C, ...).
        alphas: (C,).
        places: where the cells lie along the row, (C,), strictly monotonic.
        start: overlaps near the branch at the first cell.
        free: the branch's pair of `overlaps.FREE`.
    """

    models: Model
    alphas: jax.Array
    places: jax.Array
    start: Overlaps
    free: jax.Array


class _Warm(eqx.Module):
    """The last two solved cells of one replicate: states, their places, and how many there are; none where the branch is absent."""

    before: Overlaps
    last: Overlaps
    place_before: jax.Array
    place: jax.Array
    count: jax.Array


class _Search(eqx.Module):
    """The stage that comes next, and what was found so far."""

    stage: jax.Array
    found: State


_BRANCH, _BARE, _ANEW, _DONE = range(4)
_DAMPED_STEPS = 60
_NOTHING = 0.01  # share of rho in q below which a student that does not settle is on its way to zero
_SMALL = 0.2  # share of the largest possible order parameter


def _predict(model: Model, warm: _Warm, place: jax.Array) -> Overlaps:
    """The secant through the last two solved cells, or the last one where that leads nowhere."""
    ratio = (place - warm.place) / (warm.place - warm.place_before)
    ahead = jax.tree.map(lambda a, b: a + ratio * (a - b), warm.last, warm.before)
    along = jnp.sum(ahead.theta * warm.last.theta) + jnp.sum(ahead.m * warm.last.m)
    use = (warm.count >= 2) & admissible(model, ahead) & (along >= 0)
    return jax.tree.map(lambda a, b: jnp.where(use, a, b), ahead, warm.last)


def _own(state: State, free: jax.Array) -> jax.Array:
    """Growth of a branch's own order parameter on a state."""
    return free[0] * state.diagnostics.growth_theta + free[1] * state.diagnostics.growth_m


def _mostly(found: jax.Array) -> jax.Array:
    return jnp.mean(found) >= 0.5


def _states(state: State) -> jax.Array:
    return has_state(state.status, state.residual)


def search(
    model: Model,
    alpha: jax.Array,
    nodes: Rule,
    near: Overlaps,
    start: Overlaps,
    free: jax.Array,
    settings: Settings,
    lost: jax.Array,
) -> State:
    """A branch at one setting, or the uninformed state with status `absent`.

    The branch is looked for near where it is expected. Where it is not found, or with a small order parameter, which few
    nodes may leave where there is none, the uninformed state is asked whether that order parameter grows on it. If not, the branch is
    absent: it has ended in a pitchfork, or in a fold beyond it. If so, a branch that was not found is looked for again from
    its start, with damped steps. A student that shrinks to nothing all the while is absent, too.

    Args:
        near: overlaps of every replicate near the state.
        start: overlaps from which damped iteration reaches the branch.
        lost: whether the branch is not expected at all; then the uninformed state comes first.
    """

    def advance(s: _Search) -> _Search:
        bare, again = s.stage == _BARE, s.stage == _ANEW
        xs = jax.tree.map(lambda a, b: jnp.where(again, a, b), start, near)
        damped = eqx.tree_at(lambda a: a.warm_steps, settings, jnp.where(again, _DAMPED_STEPS, settings.warm_steps))
        state = solve_replicates(model, alpha, nodes, xs, jnp.where(bare, 0.0, free), damped)
        kept = jax.tree.map(lambda a, b: jnp.where(bare, a, b), s.found, state)
        known, size = _mostly(_states(state)), jnp.mean(jnp.trace(state.overlaps.q, axis1=2, axis2=3))
        collapsed = ~known & (size < _NOTHING * jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2)))
        gone = bare & known & (jnp.mean(_own(state, free)) < 1) | (bare | again) & collapsed
        absent = eqx.tree_at(lambda a: a.status, state, jnp.full_like(state.status, Status.absent))
        positional, semantic = jax.vmap(lambda x: magnitudes(model, x))(kept.overlaps)
        small = jnp.mean(free[0] * semantic + free[1] * positional) < _SMALL
        settled = jnp.select(
            [bare, again], [gone | _mostly(_states(kept)), jnp.array(True)], _mostly(_states(kept)) & ~small
        )
        return _Search(
            stage=jnp.where(settled, _DONE, s.stage + 1),
            found=jax.tree.map(lambda a, b: jnp.where(gone, a, b), absent, kept),
        )

    shapes = jax.eval_shape(lambda: solve_replicates(model, alpha, nodes, near, free, settings))
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    nothing = eqx.tree_at(lambda a: a.status, nothing, jnp.full_like(nothing.status, Status.nonfinite))
    s = _Search(jnp.where(lost, _BARE, _BRANCH), nothing)
    if not is_concrete((model, alpha)):
        return lax.while_loop(lambda s: s.stage != _DONE, advance, s).found
    while s.stage != _DONE:  # with the compiled `solve_replicates`
        s = advance(s)
    return s.found


def _learn(warm: _Warm, place: jax.Array, state: State) -> _Warm:
    """What the next cell starts from, in every replicate.

    A replicate that lost the branch joins the mean of those that have it. Where none has it, the next search is from the
    uninformed state that was found instead, or, if nothing was found, from the last cell that was solved.
    """
    x = state.overlaps
    found, absent = _states(state), jnp.all(state.status == Status.absent)
    share = found / jnp.maximum(jnp.sum(found), 1)
    mean = jax.tree.map(lambda a: jnp.einsum("r,r...->...", share, jnp.where(_wide(found, a), a, 0.0)), x)
    own = found | absent

    def pick(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.where(_wide(own, a), a, jnp.where(jnp.any(found), b, c))

    places, one = jnp.broadcast_to(place, found.shape), jnp.ones_like(warm.count)
    fresh = _Warm(warm.last, x, warm.place, places, jnp.where(absent, 0, jnp.minimum(warm.count + 1, 2)))
    return jax.tree.map(pick, fresh, _Warm(warm.last, mean, warm.place, places, one), warm)


def _wide(a: jax.Array, like: jax.Array) -> jax.Array:
    """(R,) to (R, 1, ...), to go with an array that leads with the replicate axis."""
    return a.reshape(-1, *[1] * (like.ndim - 1))


def _follow(track: Track, nodes: Rule, settings: Settings) -> dict[str, jax.Array]:
    def cell(warm: _Warm, at: tuple[Model, jax.Array, jax.Array]) -> tuple[_Warm, dict[str, jax.Array]]:
        model, alpha, place = at
        near = jax.vmap(lambda w: _predict(model, w, place))(warm)
        lost = jnp.any(warm.count == 0)
        state = search(model, alpha, nodes, near, track.start, track.free, settings, lost)
        return _learn(warm, place, state), numbers(state)

    one = _Warm(track.start, track.start, track.places[0] - 1, track.places[0], jnp.array(1))
    warm = jax.tree.map(lambda a: jnp.broadcast_to(a, (nodes.replicates, *a.shape)), one)
    return lax.scan(cell, warm, (track.models, track.alphas, track.places))[1]


def numbers(state: State) -> dict[str, jax.Array]:
    """What is kept of a state, by name; see `PhaseDiagram`."""
    names = ("train_loss", "gen_error", "gen_error_linear", "residual", "status")
    more = ("replicon", "jump_mass", "second_minimum", "unconverged", "growth_m", "growth_theta")
    return {
        **{name: getattr(state.overlaps, name) for name in ("q", "V", "theta", "m")},
        **{name: getattr(state, name) for name in names},
        **{name: getattr(state.diagnostics, name) for name in more},
        "train_loss_by_alpha": state.train_loss_partials[1],
    }


@eqx.filter_jit
def follow(tracks: Track, nodes: Rule, settings: Settings, mesh: Mesh, lanes: int) -> dict[str, jax.Array]:
    """Solve every cell of many tracks, spread over the devices of a mesh.

    Args:
        tracks: T of them, T a multiple of the mesh's size.
        lanes: tracks that a device solves in lockstep. One suits a CPU, whose cores a single track keeps busy;
            accelerators want many. Memory grows with it, and with nothing else but the nodes of a block.

    Returns:
        The `numbers` of the cells, (T, C, R, ...).
    """

    def share(tracks: Track, nodes: Rule) -> dict[str, jax.Array]:
        batch = lanes if lanes > 1 else None
        return lax.map(lambda track: _follow(track, nodes, settings), tracks, batch_size=batch)

    rows, everywhere = PartitionSpec(*mesh.axis_names), PartitionSpec()
    spread = jax.shard_map(share, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows, check_vma=False)
    return spread(tracks, nodes)


@eqx.filter_jit
def seeds(models: Model, alphas: jax.Array, coarse: Rule, settings: Settings) -> Overlaps:
    """Overlaps near both branches in the first cell of every row, on coarse averages: leaves (branches, rows, ...).

    Args:
        models, alphas: of these cells, (rows, ...).
        coarse: one replicate.
    """

    def branch(args: tuple[Overlaps, jax.Array]) -> Overlaps:
        start, free = args

        def row(x0: Overlaps, at: tuple[Model, jax.Array]) -> tuple[Overlaps, Overlaps]:
            x, _, _, status = fixed_point(*at, coarse, x0, free, settings)
            usable = (status <= Status.stalled) & ~vanished(at[0], x, free)
            x = jax.tree.map(lambda a, b: jnp.where(usable, a, b), x, start)
            return x, x

        return lax.scan(row, start, (models, alphas))[1]

    first = jax.tree.map(lambda a: a[0], models)
    return lax.map(branch, (starts(first), frees(first)))


def starts(model: Model) -> Overlaps:
    """Default starts of both branches, leaves (branches, ...)."""
    return jax.tree.map(lambda *a: jnp.stack(a), *(branch_start(model, b) for b in PAIR))


def frees(model: Model) -> jax.Array:
    """What the two branches leave free, (branches, 2)."""
    return jnp.asarray([FREE[b] for b in PAIR], model.lam.dtype)


def tracks_of(models: Model, alphas: np.ndarray, places: np.ndarray, coarse: Rule, settings: Settings) -> Track:
    """Both branches along every row of a grid, row by row: a `Track` whose leaves lead with rows x branches.

    Args:
        models: leaves (rows, C, ...).
        alphas: (rows, C).
        places: (C,).
    """
    rows, columns = alphas.shape
    dtype = models.lam.dtype
    every = jnp.asarray(alphas, dtype)
    near = seeds(jax.tree.map(lambda a: a[:, 0], models), every[:, 0], coarse, settings)
    pairs = len(PAIR)

    def both(tree: Any) -> Any:
        return jax.tree.map(lambda a: jnp.repeat(a, pairs, 0), tree)

    return Track(
        models=both(models),
        alphas=both(every),
        places=jnp.broadcast_to(jnp.asarray(places, dtype), (rows * pairs, columns)),
        start=jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1).reshape(-1, *a.shape[2:]), near),
        free=jnp.tile(frees(models), (rows, 1)),
    )
