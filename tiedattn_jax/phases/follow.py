"""A branch from one setting to the next: one predictor, one test whether the branch is there.

`Follower.advance` is the step, as a path of the pool. Every replicate of the averages starts from the secant through
its own last two states, so that a setting costs two or three Newton steps. `Follower.search` says whether the branch is
there. A curve, a row of a diagram and a boundary are made of such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..averages.rule import Rule
from ..model import Model
from ..overlaps import BRANCHES, PAIR, Overlaps, admissible, branch_of, own_size
from ..printing import Description, Printed, pictures
from ..results import Settings, Status, mean_of_found, quorum, settled
from ..theory.pool import Path
from ..theory.solve import Problem, branch_start, for_each
from ..theory.states import FixedPoint, State, states_table

CURVE_SETTINGS = Settings(tol=1e-4, max_steps=20)
_SMALL = 0.2  # share of its largest possible size that few nodes may leave of an order parameter where there is none
_NOTHING = 0.01  # share of rho in q below which a student that does not settle is on its way to zero
_DAMPED_STEPS = 60  # at least, of a search from the start of a branch that has appeared again

Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """No progress is shown."""


class WarmStart(NamedTuple):
    """The warm start of every replicate at the next setting; every array leads with the replicate axis.

    Attributes:
        before, last: its last two states.
        place_before, place: where they were found.
        count: how many of the two lie on the current branch; negative where the branch is absent, as they are
            uninformed states then.
    """

    before: Overlaps
    last: Overlaps
    place_before: Any
    place: Any
    count: Any

    @classmethod
    def begin(cls, start: Overlaps, place: float, replicates: int) -> WarmStart:
        """Before the first setting: from overlaps, one for all replicates or with a leading replicate axis."""
        start, places = for_each(start, replicates), np.full(replicates, place)
        return cls(start, start, places - 1, places, np.ones(replicates, int))

    @property
    def lost(self) -> bool:
        """Whether the branch was absent at the last setting."""
        return bool(np.any(np.asarray(self.count) < 0))


@jax.jit
def predict(model: Model, warm: WarmStart, place: Any) -> Overlaps:
    """The secant through the last two states of every replicate, or the last one where that leads nowhere."""

    def one(warm: WarmStart) -> Overlaps:
        ratio = (place - warm.place) / (warm.place - warm.place_before)
        ahead = jax.tree.map(lambda a, b: a + ratio.astype(a.dtype) * (a - b), warm.last, warm.before)
        along = jnp.sum(ahead.theta * warm.last.theta) + jnp.sum(ahead.m * warm.last.m)
        use = (jnp.abs(warm.count) >= 2) & admissible(model, ahead) & (along >= 0)
        return jax.tree.map(lambda a, b: jnp.where(use, a, b), ahead, warm.last)

    return jax.vmap(one)(warm)


@jax.jit
def update(warm: WarmStart, place: Any, state: State) -> WarmStart:
    """The warm start after a setting.

    A replicate that lost the branch joins the mean of those that have it. Where none has it, the next search is from
    the uninformed state that was found instead, or, if nothing was found, from the last setting that was solved.
    """
    x, there, absent = state.overlaps, state.has_state, jnp.all(state.status == Status.absent)
    mean = jax.tree.map(lambda a: mean_of_found(a, there), x)
    usable = there | absent

    def pick(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return jnp.where(usable.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.where(jnp.any(there), b, c))

    places, one = jnp.broadcast_to(place, there.shape), jnp.ones_like(warm.count)
    alike = (warm.count < 0) == absent
    count = jnp.where(alike, jnp.minimum(jnp.abs(warm.count) + 1, 2), 1)
    fresh = WarmStart(warm.last, x, warm.place, places, jnp.where(absent, -count, count))
    return jax.tree.map(pick, fresh, WarmStart(warm.last, mean, warm.place, places, one), warm)


@jax.jit
def _sizes(model: Model, state: State, free: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Means over the replicates: size of the branch's order parameter, its growth, and tr q / tr rho."""
    size = jnp.mean(jax.vmap(lambda x: own_size(model, x, free))(state.overlaps))
    growth = jnp.mean(free[0] * state.diagnostics.growth_theta + free[1] * state.diagnostics.growth_m)
    q = jnp.mean(jnp.trace(state.overlaps.q, axis1=2, axis2=3))
    return size, growth, q / jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2))


@dataclass(frozen=True)
class Follower:
    """How a branch is solved for, at one setting after the other.

    Attributes:
        nodes: averaging rule.
        settings: tolerances.
        free: what the branch leaves free, (2,).
        start: overlaps from which damped iteration reaches the branch, where it has to be looked for anew.
    """

    nodes: Rule
    settings: Settings
    free: Any
    start: Overlaps

    def advance(self, model: Model, alpha: Any, place: float, warm: WarmStart) -> Path:
        """Path of the step: the branch at the next setting, at a place along the way, and the next warm start."""
        state = yield from self.search(model, alpha, predict(model, warm, place), warm.lost)
        return update(warm, place, state), state

    def search(self, model: Model, alpha: Any, near: Overlaps, lost: bool) -> Path:
        """Path of the branch at one setting, or of the uninformed state with status `absent`.

        The branch is looked for near where it is expected. Where it is not found, or with a small order parameter,
        which few nodes may leave where there is none, the uninformed state is asked whether that order parameter grows
        on it. If not, the branch is absent: it has ended in a pitchfork, or in a fold beyond it. If so, a branch that
        was not found is looked for again from its start, with damped steps. A student that shrinks to nothing all the
        while is absent, too. Only a branch with an order parameter of its own can be absent, and only where the nodes
        resolve what there is.

        Args:
            near: overlaps of every replicate near the state.
            lost: whether the branch is not expected at all; then the uninformed state comes first.
        """
        problem, has_order = Problem(model, alpha, self.nodes, self.free, self.settings), np.sum(self.free) == 1
        state = None
        if not lost:
            state = yield from problem.finely(near)
            small = has_order and _sizes(model, state, self.free)[0] < _SMALL
            if quorum(state.has_state) and not small:
                return state
        if has_order or lost:
            uninformed = yield from problem._replace(free=np.zeros(2)).finely(near)
            if has_order and self._absent(model, uninformed, True):
                return _with_status(uninformed, Status.absent)
            if state is not None and quorum(state.has_state):
                return state
        steps = np.maximum(self.settings.warm_steps, _DAMPED_STEPS)
        patient = problem._replace(settings=eqx.tree_at(lambda a: a.warm_steps, self.settings, steps))
        state = yield from patient.finely(self.start)
        return _with_status(state, Status.absent) if has_order and self._absent(model, state, False) else state

    def _absent(self, model: Model, state: State, uninformed: bool) -> bool:
        """Whether a state says that the branch is absent: it shrinks to nothing, or nothing grows on the uninformed."""
        _, growth, q = _sizes(model, state, self.free)
        resolved = not quorum(settled(Status.converged, state.diagnostics.unresolved) == Status.unresolved)
        known = quorum(state.has_state)
        return bool(resolved and (q < _NOTHING if not known else uninformed and growth < 1))


def _with_status(state: State, status: Status) -> State:
    return replace(state, status=jnp.full_like(state.status, status))


class Curve(Printed):
    """A branch at increasing alphas, or values of another number.

    Attributes:
        branch: its name.
        points: a `FixedPoint` at every place it was looked for at, the first one beyond its end included, whose status
            says that it is not there.
        parameter: the number that changes: "alpha", one of the model, or "model" for a list of models.
        places: its values, where it is not alpha.
        failures: exceptions that ended the search at single places, with the place.
    """

    branch: str | None = eqx.field(static=True)
    points: tuple[FixedPoint, ...]
    parameter: str = eqx.field(static=True, default="alpha")
    places: np.ndarray | None = None
    failures: tuple[str, ...] = eqx.field(static=True, default=())

    @property
    def alphas(self) -> np.ndarray:
        """The alphas of its points, increasing where alpha is what changes."""
        return np.array([float(p.alpha) for p in self.points])

    @property
    def at(self) -> np.ndarray:
        """The values of its parameter, increasing."""
        return self.alphas if self.places is None else self.places

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
        """The branch's name, its parameter with its values, and the `FixedPoint.to_dict` of every point."""
        along = {} if self.places is None else {"parameter": self.parameter, "values": self.at.tolist()}
        return {"branch": self.branch, **along, "points": [point.to_dict() for point in self.points]}

    def describe(self) -> Description:
        places, there = self.at, self.exists
        labels = dict.fromkeys(point.label for point, here in zip(self.points, there, strict=True) if here)
        name = self.branch or ", ".join(labels) or "any"
        values = "alphas" if self.places is None else f"values of {self.parameter}"
        what = f"{name} branch at {places.size} {values} from {places.min():g} to {places.max():g}"
        solved = f"states at {there.sum()}"
        if there.any():
            solved += f", from {places[there].min():g} to {places[there].max():g}"
        if self.failures:
            solved += f"; failed at {len(self.failures)}, the first: {self.failures[0]}"
        return Description(what, solved, tables=[("", states_table(self.points, self.parameter, places))])

    def plot(self) -> Any:
        """Order parameters, training loss and test error against the parameter; see `plotting.branch_figure`."""
        return pictures().branch_figure([self])


def walk(model: Model, alphas: Sequence[float], branch: str | None, nodes: Rule, settings: Settings) -> Iterator[Path]:
    """Paths of a branch at one alpha after the other, in the order in which they are given: each to a `FixedPoint`.

    Damped steps, which `settings` allows, are for the rough start at the first one: the others start near the branch.
    """
    start, free = branch_start(model, branch), np.asarray(branch_of(branch).free(model))
    warm = WarmStart.begin(start, alphas[0], nodes.replicates)
    follower = Follower(nodes, settings, free, start)

    def step(alpha: float) -> Path:
        nonlocal warm, follower
        place = np.asarray(alpha, model.lam.dtype)
        warm, state = yield from follower.advance(model, place, alpha, warm)
        follower = replace(follower, settings=eqx.tree_at(lambda s: s.warm_steps, settings, np.asarray(0)))
        return FixedPoint(model, jnp.asarray(place), state, branch)

    return (step(alpha) for alpha in alphas)


@eqx.filter_jit
def pair_start(model: Model) -> list[Overlaps]:
    """Starts of the two branches that compete."""
    return [BRANCHES[b].start(model) for b in PAIR]


def pair_free(model: Model) -> list[np.ndarray]:
    """The free order parameters of these branches, (2,) each."""
    return [np.asarray(BRANCHES[b].free(model)) for b in PAIR]
