"""Natural continuation: a branch from one setting to the next, with one predictor and one test of existence.

`Follower.advance` is the step, as a path, see `theory.paths`. The predictor is the secant through the last two states,
in every replicate of the averages, so that a setting costs two or three Newton steps. `Follower.search` decides whether
the branch exists. Curves and rows of a diagram are made of such steps; `trace` and `places` use the same predictor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..averages.rules import Rule
from ..base.arrays import GivenArray, Number, either, spread_to
from ..base.results import Settings, Status, classify, mean_of_existing, quorum
from ..model.model import Model
from ..model.overlaps import BRANCHES, PAIR, Overlaps, admissible, branch_of, order_size
from ..theory.paths import Path
from ..theory.setting import Setting, branch_start
from ..theory.states import FixedPoint, State
from .family import Family


def with_replicate_axis(x: Overlaps, replicates: int) -> Overlaps:
    """Give overlaps a leading replicate axis, on the host, unless they have one.

    Overlaps of another number of replicates become those of the mean of the finite ones.
    """
    if x.m.ndim == 3 and len(x.m) == replicates:
        return x
    if x.m.ndim == 3:
        rows = np.concatenate([np.asarray(a).reshape(len(x.m), -1) for a in jax.tree.leaves(x)], 1)
        is_finite = np.isfinite(rows).all(1)
        x = jax.tree.map(lambda a: np.mean(np.asarray(a)[is_finite | ~is_finite.any()], 0), x)
    return jax.tree.map(lambda a: np.broadcast_to(np.asarray(a), (replicates, *np.shape(a))), x)


def is_absent(states: State) -> Bool[np.ndarray, "..."]:
    """Return whether searches, on the last axis, established that there is no state: fewer than half of them failed."""
    exists, absent = np.asarray(states.has_state), np.asarray(states.status) == Status.absent
    return np.asarray(~quorum(exists) & ~quorum(~(exists | absent)))


CURVE_SETTINGS = Settings(tol=1e-4, max_steps=20)
_SMALL = 0.2  # relative size of an order parameter below which it may be an artefact of few nodes
_NOTHING = 0.01  # tr q / tr rho below which a student that does not settle is shrinking to zero
_DAMPED_STEPS = 60  # least number of damped steps of a search from the start of the branch


class WarmStart(NamedTuple):
    """Warm start of every replicate at the next setting; the leading axis of every array is the replicate.

    Attributes:
        before, last: the last two states of the replicate.
        value_before, value: parameter values at these states.
        count: how many of the two lie on the current branch; negative if the branch is absent, because the states are
            uninformed then.
    """

    before: Overlaps
    last: Overlaps
    value_before: Float[GivenArray, "*R"]
    value: Float[GivenArray, "*R"]
    count: Int[GivenArray, "*R"]

    @classmethod
    def begin(cls, start: Overlaps, value: float, replicates: int) -> WarmStart:
        """Return the warm start of the first setting, from overlaps for all replicates or with a leading axis."""
        start, values = with_replicate_axis(start, replicates), np.full(replicates, value)
        return cls(start, start, values - 1, values, np.ones(replicates, int))

    @property
    def was_absent(self) -> bool:
        """Whether the branch was absent at the last setting."""
        return bool(np.any(np.asarray(self.count) < 0))


@jax.jit
def predict(model: Model, warm: WarmStart, value: Number) -> Overlaps:
    """Extrapolate the last two states of every replicate; return the last state if the secant is not usable.

    The secant is usable if both states lie on the branch, the extrapolation is admissible, and its order parameters do
    not point against those of the last state.
    """

    def predict_replicate(warm: WarmStart) -> Overlaps:
        ratio = (value - warm.value) / (warm.value - warm.value_before)
        prediction = jax.tree.map(lambda a, b: a + ratio.astype(a.dtype) * (a - b), warm.last, warm.before)
        alignment = jnp.sum(prediction.theta * warm.last.theta) + jnp.sum(prediction.m * warm.last.m)
        is_usable = (jnp.abs(warm.count) >= 2) & admissible(model, prediction) & (alignment >= 0)
        return either(is_usable, prediction, warm.last)

    return jax.vmap(predict_replicate)(warm)


@jax.jit
def update(warm: WarmStart, value: Number, state: State) -> WarmStart:
    """Return the warm start after a setting.

    A replicate that lost the branch continues from the mean of those that have it. If none has it, the next search
    starts from the uninformed state that was found instead, or, if nothing was found, from the last solved setting.
    """
    x, has_state, absent = state.overlaps, state.has_state, jnp.all(state.status == Status.absent)
    mean = jax.tree.map(lambda a: mean_of_existing(a, has_state), x)
    usable = has_state | absent

    def pick(
        a: Shaped[Array, "R *shape"], b: Shaped[Array, "*_shape"], c: Shaped[Array, "R *shape"]
    ) -> Shaped[Array, "R *shape"]:
        return jnp.where(spread_to(usable, a), a, jnp.where(jnp.any(has_state), b, c))

    values, ones = jnp.broadcast_to(value, has_state.shape), jnp.ones_like(warm.count)
    same_branch = (warm.count < 0) == absent
    count = jnp.where(same_branch, jnp.minimum(jnp.abs(warm.count) + 1, 2), 1)
    updated = WarmStart(warm.last, x, warm.value, values, jnp.where(absent, -count, count))
    return jax.tree.map(pick, updated, WarmStart(warm.last, mean, warm.value, values, ones), warm)


@jax.jit
def _size_and_growth(
    model: Model, state: State, free: Float[Array, " 2"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Return means over the replicates: size of the branch's order parameter, its growth, and tr q / tr rho."""
    size = jnp.mean(jax.vmap(lambda x: order_size(model, x, free))(state.overlaps))
    growth = jnp.mean(free[0] * state.diagnostics.growth_theta + free[1] * state.diagnostics.growth_m)
    q = jnp.mean(jnp.trace(state.overlaps.q, axis1=2, axis2=3))
    return size, growth, q / jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2))


@dataclass(frozen=True)
class Follower:
    """Solver of a branch at a sequence of settings.

    Attributes:
        nodes: averaging rule.
        settings: tolerances.
        free: mask of the free order parameters of the branch.
        start: overlaps from which damped iteration reaches the branch if it has to be found anew.
    """

    nodes: Rule
    settings: Settings
    free: Float[GivenArray, " 2"]
    start: Overlaps

    def advance(self, model: Model, alpha: Number, value: float, warm: WarmStart) -> Path:
        """Path of one step: solves the setting at parameter `value`; returns the next warm start and the state."""
        state = yield from self.search(model, alpha, predict(model, warm, value), warm.was_absent)
        return update(warm, value, state), state

    def search(self, model: Model, alpha: Number, guess: Overlaps, was_absent: bool) -> Path:
        """Path that solves one setting; returns the branch, or the uninformed state with status `absent`.

        1. The search near the guess is accepted if it finds a state with an order parameter that is not small. With few
           nodes, a small one may be an artefact.
        2. Otherwise we solve for the uninformed state. If the branch's order parameter does not grow on it, the branch
           is absent: it has ended in a pitchfork, or in a fold beyond it.
        3. If the order parameter grows, a state of step 1 is accepted. Without one, a search with damped steps begins
           at the start of the branch.

        The branch is also absent if step 2 or 3 settles on no state while q shrinks to zero. Only a branch with an
        order parameter of its own can be absent, and only where the nodes resolve the state.

        Args:
            guess: overlaps of every replicate near the state.
            was_absent: whether the branch is not expected here; step 1 is then skipped.
        """
        setting, has_order = Setting(model, alpha, self.nodes, self.free, self.settings), np.sum(self.free) == 1
        state = None
        if not was_absent:
            state = yield from setting.solve_replicates(guess)
            small = has_order and _size_and_growth(model, state, self.free)[0] < _SMALL
            if quorum(state.has_state) and not small:
                return state
        if has_order or was_absent:
            uninformed = yield from setting._replace(free=np.zeros(2)).solve_replicates(guess)
            if has_order and self._absent(model, uninformed, True):
                return _with_status(uninformed, Status.absent)
            if state is not None and quorum(state.has_state):
                return state
        steps = np.maximum(self.settings.warm_steps, _DAMPED_STEPS)
        damped = eqx.tree_at(lambda a: a.warm_steps, self.settings, steps)
        state = yield from setting._replace(settings=damped).solve_replicates(self.start)
        return _with_status(state, Status.absent) if has_order and self._absent(model, state, False) else state

    def _absent(self, model: Model, state: State, uninformed: bool) -> bool:
        """Return whether the branch is absent: q shrinks to zero, or nothing grows on the uninformed state."""
        _, growth, q = _size_and_growth(model, state, self.free)
        resolved = not quorum(classify(Status.converged, state.diagnostics.unresolved) == Status.unresolved)
        has_state = quorum(state.has_state)
        return bool(resolved and (q < _NOTHING if not has_state else uninformed and growth < 1))


def _with_status(state: State, status: Status) -> State:
    return replace(state, status=jnp.full_like(state.status, status))


def walk(family: Family, places: Sequence[tuple[Model, Number, float]], branch: str | None) -> Iterator[Path]:
    """Return one path per place that solves a branch there; they run in the order given, each returns a `FixedPoint`.

    Only the first place uses the damped steps of the settings, because only its start may be far from the branch.

    Args:
        family: gives the averages and tolerances.
        places: model, alpha, and the value of the number that changes.
    """
    model, _, value = places[0]
    start, free = branch_start(model, branch), np.asarray(branch_of(branch).free(model))
    warm = WarmStart.begin(start, value, family.nodes.replicates)
    follower = Follower(family.nodes, family.settings, free, start)

    def step(model: Model, alpha: Number, value: float) -> Path:
        nonlocal warm, follower
        alpha = np.asarray(alpha, model.lam.dtype)
        warm, state = yield from follower.advance(model, alpha, value, warm)
        follower = replace(follower, settings=eqx.tree_at(lambda s: s.warm_steps, family.settings, np.asarray(0)))
        return FixedPoint(model, jnp.asarray(alpha), state, branch)

    return (step(*place) for place in places)


def along_alpha(model: Model, alphas: Sequence[float] | Float[np.ndarray, " A"]) -> list[tuple[Model, Number, float]]:
    """Return the places of a walk through these alphas."""
    return [(model, alpha, float(alpha)) for alpha in alphas]


@eqx.filter_jit
def pair_start(model: Model) -> list[Overlaps]:
    """Return the starts of the positional and the semantic branch."""
    return [BRANCHES[b].start(model) for b in PAIR]


def pair_free(model: Model) -> list[Float[np.ndarray, " 2"]]:
    """Return the masks of the free order parameters of both branches."""
    return [np.asarray(BRANCHES[b].free(model)) for b in PAIR]
