"""The best ridge: the value of `lam`, or of another number of the model, at which the test error is smallest.

`best_ridge` finds it at one alpha, for a branch or for the global minimum of the training loss. It is one of two events
in that number, or an end of the range. The error of a branch is stationary where its derivative in x = log(number) is
zero. The global minimum changes its branch where the losses of both branches cross; the test error jumps there, so that
the smallest error may be a limit.

`places` says where the smallest error is expected. The event is then located there by `find_zero`, on all replicates.

All derivatives follow from first derivatives along the branch, which contain the jumps of the proximal operator. Second
derivatives, in x twice or in x and another number p, are differences of first derivatives at two values of x. Nothing
is differenced in p, because d/dp d/dx = d/dx d/dp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..averages.recipes import AnyNodes
from ..averages.rules import Replicate
from ..base.arrays import GivenArray, Number, indexed, spread_to
from ..base.errors import InputError, require, require_choice
from ..base.progress import Progress
from ..base.results import Settings, Status
from ..model.checks import check_alpha
from ..model.model import Model
from ..model.overlaps import PAIR, Overlaps
from ..model.parameters import Axis, moved_number
from ..theory.engine import PathMaker, published
from ..theory.observables import gen_error_in
from ..theory.paths import Path
from ..theory.quantities import Quantity
from ..theory.states import FixedPoint, State
from .events import EVENTS, Event
from .family import Family, check_top_level, ends_of, prepared
from .locate import Guess, Reading, event_number, find_zero, zero_path
from .places import Place, Walk, merged_status, places_of, walk_path

RIDGES = (1e-5, 1.0)  # default range of the ridge

# Meanings of the places at which the error is smallest but not stationary.
PLACES = {
    "transition": "the global minimum changes its branch there, and the test error falls up to it and then jumps",
    "lower end": "no smallest error: it falls down to there, and {end}",
    "upper end": "no smallest error: it falls up to there, and {end}",
}
# Second derivatives are differences between x + this and x - this. Measured for d x / d alpha on the semantic branch at
# alpha = 1.25, on lines of order 5: the finite difference changes it by .2 % at .1 and by 2 % at .2. The noise is 2 % a
# replicate, and grows below .05.
_OFFSET = 0.1
_COARSE_STEPS = 3  # maximum number of Newton steps on the coarse replicate
_MAX_STEPS = 8  # maximum number of Newton steps on all replicates
# The search inside stops when the step in x is below this. The error of x that remains is about the square of it.
_TOLERANCE = 0.02
_LONGEST_STEP = 0.7  # longest step, relative to the number
# A place is located only if its error on the coarse replicate exceeds the smallest one by at most this share.
_MARGIN = 0.05
_CLOSE = 1.0  # distance in x from a transition below which the losses of both branches are compared on all replicates


@published
def best_ridge(
    model: Model,
    alpha: Number,
    branch: str | None = "semantic",
    nodes: AnyNodes = None,
    *,
    number: str | Axis = "lam",
    bracket: tuple[float, float] | None = None,
    settings: Settings | None = None,
    progress: Progress = None,
) -> PathMaker[Quantity]:
    """Find the ridge, or the value of another number of the model, at which the test error is smallest.

    The error is that of a branch, or that of the global minimum of the training loss. This is the positional or the
    semantic state, or the uninformed state if neither of them exists in the bracket. The global minimum changes its
    branch at a value of the ridge, and its error jumps there. If the error falls towards that transition, the smallest
    error is a limit, and the best ridge is the place of the transition. `jax.grad` of this function works, in the model
    and in alpha (first derivatives). `jit` and `vmap` do not; `sweep(best_ridge, model, ...)` treats many settings.

    The range is first walked on the coarse replicate of the averages, in steps of a third of a factor of ten. Minima
    that are narrower than this can be missed.

    The result has `gen_error`, the smallest test error; at a minimum its derivatives are those at a fixed value of the
    number. Its `branches` are the state at the value and, at a transition, that of the other branch, with the same
    training loss and a larger error. Its `place` is "inside" if the error is stationary; "transition"; "lower end" or
    "upper end" if the error falls to the end of the `bracket`, or to the last value with a state; "nowhere" if there is
    no state. `note` says in words why the error has no minimum. The derivatives are None if there is no state, and zero
    at the entry of the number itself.

    Args:
        model: attention layer and data. The value of the number is where the walk begins.
        alpha: samples per dimension.
        branch: "positional", "semantic", or None for the global minimum of the training loss.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.
        number: name of a positive number of the model, such as "lam", "penalty.strength" or "mixing[0,1]", or a
            number of your own, ``Axis("scale", value, put)`` with the value at which the walk begins.
        bracket: range of values; by default `RIDGES` for the ridge.
        settings: tolerances; by default `Settings()`.
        progress: as in `solve`.

    Raises:
        InputError: alpha is not positive; the branch or number is unknown; the bracket is not 0 < low < high, is out of
            the model's range, or is missing for another number than the ridge; nodes or settings are of the wrong kind.
    """
    task = prepared_task(model, branch, nodes, number, bracket, settings)
    check_top_level(check_alpha(model, alpha))

    def path(model: Model, alpha: Number) -> Path:
        alpha = check_alpha(model, alpha)
        optimum = yield from best_path(task.at(*lax.stop_gradient((model, alpha))))
        return best_of(task.at(model, alpha), optimum)

    return path


def prepared_task(
    model: Model,
    branch: str | None,
    nodes: AnyNodes,
    number: str | Axis,
    bracket: tuple[float, float] | None,
    settings: Settings | None,
) -> Task:
    """Check the arguments of `best_ridge` and fill in defaults; the result has no alpha."""
    family = prepared(model, nodes, settings)
    branch = require_choice(branch, "branch", [*PAIR, None])
    parameter = moved_number(number, family.model, "number")
    require(parameter.name != "alpha", "number", parameter.name, "a number of the model")
    parameter.read(family.model, None, "number")
    if bracket is None and parameter.name != "lam":
        raise InputError("bracket", f"must be given for another number than lam, got number={parameter.name!r}")
    ends = ends_of(RIDGES if bracket is None else bracket)
    parameter.check(family.model, np.array(ends), "bracket")
    return Task(family._replace(number=parameter), PAIR if branch is None else (branch,), ends)


class Task(NamedTuple):
    """A search for the best value of a number, whose arguments have been checked.

    Attributes:
        family: the setting, the number, and how states are solved. `best_path` needs concrete numbers.
        branches: the branch, or both branches for the global minimum of the training loss.
        bracket: range of values, positive.
    """

    family: Family
    branches: tuple[str, ...]
    bracket: tuple[float, float]

    def at(self, model: Model, alpha: Float[GivenArray, ""]) -> Task:
        """Return the same search at another setting."""
        return self._replace(family=self.family._replace(model=model, alpha=alpha))


class Optimum(NamedTuple):
    """A located place: the value of the number at which the test error is smallest.

    Attributes:
        kind: see `PLACES`.
        branch: index of the branch in the task.
        zero: the event that defines the place, near it.
        error: test error of the branch there, with its derivatives.
        states: the states at `value` by the name of their branch: those of the branch and, at a transition, those of
            the other branch; empty before `best_path` adds them.
        beyond: for the last value with a state, the next value of the walk, which has none.
    """

    kind: str
    branch: int
    zero: Reading
    error: Reading
    states: dict[str, State]
    beyond: float | None = None

    @property
    def value(self) -> float:
        """The number: the mean over the replicates."""
        return float(np.nanmean(values_of(self.zero)))


def best_path(task: Task) -> Path:
    """Path that finds the value with the smallest test error; returns an `Optimum`.

    If there is no state, it returns the `Status` as an integer: `absent`, or that of the searches that failed.
    """
    walks = yield [walk_path(task.family, task.bracket, branch) for branch in task.branches]
    places = places_of(walks)
    if not places and task.branches == PAIR:  # neither branch exists: the uninformed state is the global minimum
        optimum = yield best_path(task._replace(branches=("uninformed",)))
        return optimum if isinstance(optimum, Optimum) else merged_status(optimum, *(walk.status for walk in walks))
    paths = [_located(task, walks, p) for p in places if p.error <= (1 + _MARGIN) * places[0].error]
    optima = [optimum for optimum in (yield paths) if optimum is not None]
    if not optima:
        return merged_status(*(walk.status for walk in walks)) if not places else int(Status.max_steps)
    best = min(optima, key=lambda o: (not o.zero.converged, float(np.nanmean(numbers_of(o)[1][0]))))
    sides = [walks[best.branch], *([walks[1 - best.branch]] if best.kind == "transition" else [])]
    settings = [task.family.at(best.value, walk.branch) for walk in sides]
    starts = [walk.nearest(np.log(best.value)) for walk in sides]
    states = yield [s.solve_replicates(x) for s, x in zip(settings, starts, strict=True)]
    return best._replace(states={walk.branch: state for walk, state in zip(sides, states, strict=True)})


def _located(task: Task, walks: Sequence[Walk], place: Place) -> Path:
    """Path that locates a place on all replicates; returns an `Optimum`, or None if a state is lost.

    All replicates may decide otherwise than the coarse one: a transition may turn out to be a minimum before it, and a
    minimum may lie beyond the transition.
    """
    walk = walks[place.branch]
    crossing = min(place.crossings, key=lambda c: abs(c - place.x), default=None)
    if place.kind == "transition":
        assert crossing is not None
        optimum = yield from _at_transition(task, walks, place, crossing)
        # The branch of the place is the global minimum on one side of the transition only. The error is smallest at the
        # transition if it falls towards it on that side.
        slope = np.nan if optimum is None else np.nanmean(optimum.error.slopes)
        falls = slope <= 0 if crossing == place.high else slope >= 0
        return optimum if falls else (yield from _inside(task, walk, place))
    if place.kind == "inside":
        optimum = yield from _inside(task, walk, place)
        if optimum is not None and crossing is not None and abs(np.log(optimum.value) - crossing) < _CLOSE:
            starts = [w.nearest(np.log(optimum.value)) for w in walks]
            losses = yield from event_number(EVENTS["alpha_c"], task.family, optimum.value, starts)
            lead = np.nanmean(losses.value) if losses.is_known else 0.0
            if (lead if place.branch == 0 else -lead) > 0:  # the other branch has the lower loss
                optimum = yield from _at_transition(task, walks, place, crossing)
        return optimum
    # A place at an end of the range does not move with the other numbers.
    error = yield from _error(task, walk.branch, float(np.exp(place.x)), walk.nearest(place.x))
    if not error.is_known:
        return None
    at_rest, slopes = jax.tree.map(np.zeros_like, error.rates), -np.ones_like(error.value)  # derivatives 0, not -0
    zero = Reading(error.at, error.states, 0 * error.value, at_rest, slopes, converged=True)
    k = int(np.argmin(np.abs(walk.x - place.x))) + (1 if place.kind == "upper end" else -1)
    beyond = float(np.exp(walk.x[k])) if 0 <= k < walk.x.size else None
    return Optimum(place.kind, place.branch, zero, error, {}, beyond)


def _at_transition(task: Task, walks: Sequence[Walk], place: Place, x: float) -> Path:
    """Path that finds where the training losses of both branches are equal; returns an `Optimum`, or None.

    Args:
        x: where the search starts.
    """
    guess = Guess(np.exp(x), tuple(walk.nearest(x) for walk in walks))
    zero = yield from zero_path(EVENTS["alpha_c"], task.family, guess)
    if not zero.is_known:
        return None
    start = zero.states[place.branch].overlaps
    error = yield from _error(task, walks[place.branch].branch, float(zero.at), start)
    return Optimum("transition", place.branch, zero, error, {}) if error.is_known else None


def _inside(task: Task, walk: Walk, place: Place) -> Path:
    """Path that finds a zero of the slope of the error; returns an `Optimum`, or None if a state is lost.

    The first steps use the coarse replicate and the curvature of the spline through its walk. Such a step needs one
    reading of one replicate; a later step needs three readings of all replicates.
    """
    value, (low, high) = float(np.exp(place.x)), task.bracket
    errors: dict[float, Reading] = {}
    guess = Guess(value, (walk.nearest(place.x),), low=low, high=high, reach=_LONGEST_STEP)

    def read_coarsely(value: float, xs: Sequence[Overlaps]) -> Path:
        error = yield from _error(task, walk.branch, value, *xs, coarse=True)
        slope = abs(place.curvature) / value  # of the derivative in x
        return error._replace(value=value * error.slopes, rates=None, slopes=np.full_like(error.slopes, slope))

    def read(value: float, xs: Sequence[Overlaps]) -> Path:
        """Path that returns the derivative of the error in x as a `Reading`."""
        # The middle value gives the derivative, the outer ones the second derivatives. Next to the end of a branch one
        # of the outer ones has no state, and the middle one takes its place.
        values = value * np.exp([-_OFFSET, 0.0, _OFFSET])
        before, middle, after = readings = yield [_error(task, walk.branch, float(v), *xs) for v in values]
        errors[float(middle.at)] = middle
        by_x = [v * reading.slopes for v, reading in zip(values, readings, strict=True)]
        known = [np.isfinite(slopes) for slopes in by_x]
        width = np.where(known[0] | known[2], _OFFSET * (1.0 * known[0] + known[2]), np.nan)

        def difference(before: Any, middle: Any, after: Any) -> Any:
            ends = [np.where(spread_to(k, a), a, middle) for k, a in ((known[0], before), (known[2], after))]
            return (ends[1] - ends[0]) / spread_to(width, middle)

        rates = jax.tree.map(difference, before.rates, middle.rates, after.rates)
        return middle._replace(value=by_x[1], rates=rates, slopes=difference(*by_x) / value)

    first = yield from find_zero(read_coarsely, guess, tol=_TOLERANCE, max_evaluations=_COARSE_STEPS)
    if first.is_known:
        overlaps = indexed(first.states[0].overlaps, 0)
        (value,) = np.clip(values_of(first), low, high)
        guess = guess._replace(at=value, overlaps=(overlaps,))
    zero = yield from find_zero(read, guess, tol=_TOLERANCE, max_evaluations=_MAX_STEPS)
    if not zero.is_known or np.all(np.isnan(zero.slopes)):
        return None
    step = np.nanmean(zero.value) / (zero.at * zero.slope)
    zero = zero._replace(converged=bool(zero.slope > 0 and abs(step) < _TOLERANCE))
    return Optimum("inside", place.branch, zero, errors[float(zero.at)], {})


def _error(task: Task, branch: str, value: float, start: Overlaps, *, coarse: bool = False) -> Path:
    """Path that solves a branch at one value, and returns its test error with all derivatives as a `Reading`."""
    event = _ERROR._replace(branches=(branch,))
    return (yield from event_number(event, task.family, value, [start], coarse=coarse))


def _gen_error(
    model: Model, alpha: Float[Array, ""], x: Overlaps, replicate: Replicate, free: Float[Array, " 2"]
) -> Float[Array, ""]:
    return gen_error_in(model, x, replicate)


_ERROR = Event("test error", (), lambda state: state.gen_error, _gen_error)


def values_of(zero: Reading) -> Float[np.ndarray, " R"]:
    """Return the number in every replicate: Newton's step in x leads there from the common value."""
    return zero.at * np.exp(-zero.value / (zero.at * zero.slopes))


def numbers_of(optimum: Optimum) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the number in every replicate with its derivatives, and the test error there with its derivatives."""
    zero, error = optimum.zero, optimum.error
    values, by_x = values_of(zero), error.at * error.slopes
    rates = jax.tree.map(lambda a: -a / spread_to(zero.at * zero.slopes, a), zero.rates)  # of x
    # Half of the step to a minimum, because the slope falls to zero on the way.
    step = (0.5 if optimum.kind == "inside" else 1.0) * np.log(values / error.at)
    error_rates = jax.tree.map(lambda a, b: a + spread_to(by_x, a) * b, error.rates, rates)
    value_rates = jax.tree.map(lambda a: spread_to(values, a) * a, rates)
    return (values, value_rates), (error.value + by_x * step, error_rates)


def best_of(task: Task, optimum: Optimum | int) -> Quantity:
    """Convert what `best_path` returned to a result that is differentiable in the model and alpha of the task."""
    family, alpha = task.family, task.family.alpha
    assert alpha is not None
    branch = None if task.branches == PAIR else task.branches[0]
    number, fixed_alpha = family.number.name, lax.stop_gradient(alpha)
    place, note = "nowhere", ""
    states: tuple[FixedPoint, ...] = ()
    if not isinstance(optimum, Optimum):
        status = optimum
        result = smallest = Quantity.of(jnp.full((1,), jnp.nan, family.model.lam.dtype), status=status)
        low, high = task.bracket
        name = branch or "positional, semantic or uninformed"
        note = f"there is no {name} state from {low:g} to {high:g}"
        if status != Status.absent:
            note = f"no {name} state was settled from {low:g} to {high:g}: {Status.name_of(status)}"
    else:
        place = optimum.kind
        at_value, _ = family.number.set(lax.stop_gradient(family.model), None, optimum.value)
        states = tuple(
            FixedPoint(at_value, fixed_alpha, jax.tree.map(jnp.asarray, s), b) for b, s in optimum.states.items()
        )
        worst = max(int(state.settled_status) for state in states)
        status = worst if optimum.zero.converged else max(worst, int(Status.max_steps))
        result, smallest = (
            Quantity.of(values, rates, (family.model, alpha), status=status)
            for values, rates in jax.tree.map(jnp.asarray, numbers_of(optimum))
        )
        if status > Status.stalled:
            note = f"the search near {number} = {optimum.value:.4g} did not settle: {Status.name_of(status)}"
        elif place != "inside":
            at_end = optimum.beyond is None
            end = "the bracket ends there" if at_end else f"there is no state at {number} = {optimum.beyond:.4g}"
            note = PLACES[place].format(end=end)
    return dataclasses.replace(
        result,
        branches=states,
        further={"gen_error": smallest, "alpha": fixed_alpha},
        name=number,
        event=f"best {number}",
        meaning=f"the test error of the {f'{branch} branch' if branch else 'global minimum'} is smallest there",
        note=note,
        labels=(("branch", branch), ("place", place), ("bracket", task.bracket)),
    )
