"""The value of a number at which the test error is smallest, on all replicates of the averages, with its derivatives.

# notation: the *number* is the one of the model that is varied, such as its ridge, and x = log(number). A *place* is a
# candidate for the best x. `best_search` finds places on the coarse replicate; this module locates them on all.

All derivatives follow from first derivatives along the branch, which contain the jumps of the proximal operator. Second
derivatives, in x twice or in x and another number p, are differences of first derivatives at two values of x. Nothing
is differenced in p, because d/dp d/dx = d/dx d/dp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..averages.rules import COARSE, Replicate
from ..base.arrays import GivenArray, indexed, stacked
from ..base.report import quorum
from ..model.model import Model
from ..model.overlaps import PAIR, Overlaps
from ..theory.observables import gen_error_in
from ..theory.paths import Path
from ..theory.states import State
from .best_search import Place, Task, Walk, places_of, walk_path
from .locate import implicit_derivatives

# Second derivatives are differences between x + this and x - this. Measured for d x / d alpha on the semantic branch at
# alpha = 1.25, on lines of order 5: the finite difference changes it by .2 % at .1 and by 2 % at .2. The noise is 2 % a
# replicate, and grows below .05.
_OFFSET = 0.1
_COARSE_STEPS = 3  # maximum number of Newton steps on the coarse replicate
_MAX_STEPS = 8  # maximum number of Newton steps on all replicates
# The search stops when the step in x is below this. The error of x that remains is about the square of it.
_TOLERANCE = {"inside": 0.02, "transition": 1e-3}
_LONGEST_STEP = 0.7  # longest Newton step in x
# A place is located only if its error on the coarse replicate exceeds the smallest one by at most this share.
_MARGIN = 0.05
_CLOSE = 1.0  # distance in x from a transition below which the losses of both branches are compared on all replicates


def state_error(
    model: Model, alpha: Float[Array, ""], x: Overlaps, replicate: Replicate, free: Float[Array, " 2"]
) -> Float[Array, ""]:
    """Return the test error of a state; an `Observable`, which takes `alpha` and `free`, too, and does not use them."""
    return gen_error_in(model, x, replicate)


class Sample(NamedTuple):
    """States of a branch at one x, and the derivatives of their test errors.

    Attributes:
        x: logarithm of the number.
        state: the states of all replicates, or of the coarse one.
        error: test error in every replicate; NaN in those that lack the state.
        slope: its derivative in x along the branch.
        rates: its derivatives in the other numbers of the model and in alpha, at fixed x; leaves (R, ...).
    """

    x: float
    state: State
    error: Float[GivenArray, " R"]
    slope: Float[GivenArray, " R"]
    rates: PyTree[Float[GivenArray, "R ..."]]


class Optimum(NamedTuple):
    """A located place: the x at which the test error is smallest, in every replicate.

    Attributes:
        kind: see `best_ridge.PLACES`.
        branch: index of the branch in the task.
        x: logarithm of the number in every replicate.
        error: test error there.
        x_rates, error_rates: derivatives of x and error in the other numbers of the model and in alpha; leaves
            (R, ...).
        states: the states at `value` by the name of their branch: those of the branch and, at a transition, those of
            the other branch; empty before `best_path` adds them.
        converged: whether the search converged.
    """

    kind: str
    branch: int
    x: Float[GivenArray, " R"]
    error: Float[GivenArray, " R"]
    x_rates: PyTree[Float[GivenArray, "R ..."]]
    error_rates: PyTree[Float[GivenArray, "R ..."]]
    states: dict[str, State]
    converged: bool

    @property
    def value(self) -> float:
        """The number: the mean over the replicates."""
        return float(np.nanmean(np.exp(self.x)))


def best_path(task: Task) -> Path:
    """Path that finds the value with the smallest test error; returns an `Optimum`, or None if there is no state."""
    walks = yield [walk_path(task, branch) for branch in task.branches]
    places = places_of(walks)
    if not places and task.branches == PAIR:  # neither branch exists: the uninformed state is the global minimum
        return (yield best_path(task._replace(branches=("uninformed",))))
    paths = [_located(task, walks, p) for p in places if p.error <= (1 + _MARGIN) * places[0].error]
    optima = [optimum for optimum in (yield paths) if optimum is not None]
    if not optima:
        return None
    best = min(optima, key=lambda optimum: (not optimum.converged, float(np.nanmean(optimum.error))))
    branches = [best.branch] + ([1 - best.branch] if best.kind == "transition" else [])
    x = float(np.log(best.value))
    paths = [task.problem(task.branches[b], x).solve_replicates(walks[b].nearest(x)) for b in branches]
    states = yield paths
    return best._replace(states={walks[b].branch: state for b, state in zip(branches, states, strict=True)})


def _located(task: Task, walks: Sequence[Walk], place: Place) -> Path:
    """Path that locates a place on all replicates; returns an `Optimum`, or None if a state is lost.

    All replicates may decide otherwise than the coarse one: a transition may turn out to be a minimum before it, and a
    minimum may lie beyond the transition.
    """
    walk = walks[place.branch]
    crossing = min(place.crossings, key=lambda c: abs(c - place.x), default=None)
    if place.kind == "transition":
        assert crossing is not None
        optimum, slope = yield from _at_transition(task, walks, place, crossing)
        # The branch of the place is the global minimum on one side of the transition only. The error is smallest at the
        # transition if it falls towards it on that side.
        falls = slope <= 0 if crossing == place.high else slope >= 0
        return optimum if falls else (yield from _inside(task, walk, place))
    if place.kind == "inside":
        optimum = yield from _inside(task, walk, place)
        if optimum is not None and crossing is not None and abs(np.log(optimum.value) - crossing) < _CLOSE:
            states = yield [_states(task, walks, b, np.log(optimum.value)) for b in range(len(walks))]
            usable = np.logical_and(*(s.has_state for s in states))
            difference = states[1 - place.branch].train_loss - states[place.branch].train_loss
            if quorum(usable) and np.mean(difference[usable]) < 0:
                optimum, _ = yield from _at_transition(task, walks, place, crossing)
        return optimum
    # A place at an end of the range does not move with the other numbers.
    sample = yield from _sample(task, walk.branch, place.x, walk.nearest(place.x))
    if sample is None:
        return None
    at_rest = jax.tree.map(np.zeros_like, sample.rates)
    x = np.where(np.isfinite(sample.error), place.x, np.nan)
    return Optimum(place.kind, place.branch, x, sample.error, at_rest, sample.rates, {}, True)


def _inside(task: Task, walk: Walk, place: Place) -> Path:
    """Path of Newton's method for a zero of the slope of the error; returns an `Optimum`, or None if a state is lost.

    The first steps use the coarse replicate and the curvature of the spline through its walk. Such a step needs one
    sample of one replicate; a later step needs three samples of all replicates.
    """
    low, high = np.log(task.bracket)
    x, overlaps, curvature, converged = place.x, walk.nearest(place.x), place.curvature, False
    for _ in range(_COARSE_STEPS):
        first = yield from _sample(task, walk.branch, x, overlaps, coarse=True)
        if first is None:
            break
        step, overlaps = _newton_step(first.slope, curvature), indexed(first.state.overlaps, 0)
        x = float(np.clip(x + step, low, high))
        if abs(step) < _TOLERANCE["inside"]:
            break
    for _ in range(_MAX_STEPS):
        # The middle sample gives the slope, the outer ones the second derivatives.
        samples = yield [_sample(task, walk.branch, x + d, overlaps) for d in (-_OFFSET, 0.0, _OFFSET)]
        if any(sample is None for sample in samples):
            return None
        before, middle, after = samples
        curvatures = (after.slope - before.slope) / (2 * _OFFSET)
        step, overlaps = _newton_step(middle.slope, float(np.nanmean(curvatures))), middle.state.overlaps
        if converged := np.nanmean(curvatures) > 0 and abs(step) < _TOLERANCE["inside"]:
            break
        x = float(np.clip(x + step, low, high))
    shift = -middle.slope / curvatures  # from the common x to the zero of every replicate
    x_rates = jax.tree.map(lambda a, b: -(b - a) / (2 * _OFFSET) / _extend_to(curvatures, a), before.rates, after.rates)
    error = middle.error + 0.5 * middle.slope * shift
    rates = _total_rates(middle, x_rates)
    return Optimum("inside", place.branch, middle.x + shift, error, x_rates, rates, {}, bool(converged))


def _at_transition(task: Task, walks: Sequence[Walk], place: Place, x: float) -> Path:
    """Path of Newton's method for the x at which the training losses of both branches are equal.

    Args:
        x: where the search starts.

    Returns:
        An `Optimum`, or None if a state is lost; and the mean slope of the error of the place's branch there.
    """
    converged = False
    for _ in range(_MAX_STEPS):
        states = yield [_states(task, walks, b, x) for b in (0, 1)]
        usable = np.logical_and(*(s.has_state for s in states))
        if not quorum(usable):
            return None, np.nan
        difference = np.where(usable, states[0].train_loss - states[1].train_loss, np.nan)
        by_model, by_alpha = jax.tree.map(np.subtract, *(s.train_loss_partials for s in states))
        slope, rates = task.slopes(x, by_model, by_alpha)
        step = _newton_step(difference, float(np.nanmean(slope)))
        if converged := abs(step) < _TOLERANCE["transition"]:
            break
        x += step
    sample = yield from _sample(task, walks[place.branch].branch, x, states[place.branch].overlaps)
    if sample is None:
        return None, np.nan
    shift = -difference / slope
    x_rates = jax.tree.map(lambda a: -a / _extend_to(slope, a), rates)
    error = sample.error + sample.slope * shift
    optimum = Optimum(
        "transition", place.branch, x + shift, error, x_rates, _total_rates(sample, x_rates), {}, converged
    )
    return optimum, float(np.nanmean(sample.slope))


def _states(task: Task, walks: Sequence[Walk], branch: int, x: float) -> Path:
    """Path that solves a branch at x on all replicates; returns the states.

    Args:
        branch: index of the branch in the task.
    """
    return task.problem(walks[branch].branch, x).solve_replicates(walks[branch].nearest(x))


def _sample(task: Task, branch: str, x: float, overlaps: Overlaps, coarse: bool = False) -> Path:
    """Path that solves a branch at x and differentiates its test error; returns a `Sample`, or None without a state.

    Args:
        branch: name of the branch.
        overlaps: start of the search.
        coarse: whether to use the coarse replicate only, which is then the only one of the sample.
    """
    problem = task.problem(branch, x)
    state = stacked([(yield problem.lane(overlaps))]) if coarse else (yield from problem.solve_replicates(overlaps))
    if not quorum(state.has_state):
        return None
    replicates = [COARSE] if coarse else None
    _, by_model, by_alpha = yield from implicit_derivatives(problem, state.overlaps, state_error, replicates)
    slope, rates = task.slopes(x, by_model, by_alpha)
    error, slope = (np.where(state.has_state, a, np.nan) for a in (state.gen_error, slope))
    return Sample(x, state, error, slope, rates)


def _newton_step(value: Float[GivenArray, " R"], slope: float) -> float:
    """Return Newton's step to the zero of a function in x, at most `_LONGEST_STEP`; no step if the slope is zero.

    Args:
        value: the function in every replicate; the step is that of the mean.
        slope: its mean derivative.
    """
    mean = float(np.nanmean(value))
    step = -mean / slope if slope else 0.0
    return float(np.clip(step, -_LONGEST_STEP, _LONGEST_STEP))


def _total_rates(sample: Sample, x_rates: PyTree[Float[GivenArray, "R ..."]]) -> PyTree[Float[GivenArray, "R ..."]]:
    """Return the total derivatives of the test error at a place that moves by x_rates, by the chain rule."""
    return jax.tree.map(lambda a, b: a + _extend_to(sample.slope, a) * b, sample.rates, x_rates)


def _extend_to(values: Float[GivenArray, " R"], a: Float[GivenArray, "R ..."]) -> Float[GivenArray, "R ..."]:
    """Append axes to one value per replicate, so that it multiplies or divides `a`."""
    return values.reshape(-1, *[1] * (np.ndim(a) - 1))
