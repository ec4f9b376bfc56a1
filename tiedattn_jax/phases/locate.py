"""The search for an event along one number of the setting, by default along alpha.

`event_path` finds any event of `EVENTS`, also one about which nothing is known. `zero_path` finds one that is a zero of
a number: without a guess first on the coarse replicate of the averages, then on all replicates. `find_zero` is the last
step, inside a bracket that shrinks. It uses Newton's method if exact slopes are known, and the secant method
otherwise.

The derivatives of an event are exact. For alpha_c they are the envelope formula ``-(d_p Delta Phi) / (d_alpha Delta
Phi)`` at fixed overlaps, for other events they follow from the implicit function theorem along the branch. Both contain
the jumps of the proximal operator.

A `Path` is a generator: it yields the solves that it needs and is sent their states; `run_one` runs it, see
`theory.engine`. "Returns" in the docstring of a path means the value that the generator returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from ..averages.program import program
from ..averages.rules import COARSE
from ..base.arrays import AnyArray, GivenArray, Number, indexed, spread_to, stacked
from ..base.errors import InputError
from ..base.results import Status, quorum
from ..model.model import Model
from ..model.overlaps import Overlaps, check_shapes
from ..theory.equations import Equations
from ..theory.paths import Call, Path
from ..theory.quantities import Quantity
from ..theory.setting import Lane, Setting
from ..theory.states import FixedPoint, State
from .arclength import fold_near
from .events import Event, Observable, as_event
from .family import Family
from .follow import along_alpha, is_absent, walk, with_replicate_axis
from .secant import Secant, zero_between
from .table import Table

MAX_EVALUATIONS = 12  # maximum number of places at which the states of all replicates are solved
SEARCH = np.geomspace(3.0, 0.05, 19)  # alphas that are searched if nothing is known about an event
_TOLERANCE = 1e-3  # relative step that is the last one; the extrapolated zero is accurate to its square
_COARSE = 1e-3  # relative tolerance on the coarse replicate, whose own error is about as large
_LONGEST_FINAL_STEP = 0.1  # relative step above which a zero between two states has not converged


class Guess(NamedTuple):
    """Guess for an event.

    Attributes:
        at: value of the number where the event is expected.
        overlaps: guess for every state that defines the event, for all replicates or with a leading replicate axis.
        slope: d (event's number) / d (number), NaN if unknown.
        low, high: bracket of the number.
        there: a value at which the states are known to exist, NaN for `at` itself.
        reach: longest relative step inside of the bracket.
    """

    at: Number
    overlaps: tuple[Overlaps, ...]
    slope: Number = np.nan
    low: Number = 0.0
    high: Number = np.inf
    there: Number = np.nan
    reach: float = np.inf


# Start of a search: a guess, states at one alpha (such as the `branches` of a transition), or curves of the branches,
# which are tables of their states along alpha.
Start = Guess | FixedPoint | Sequence[FixedPoint] | Sequence[Table]


def guess_of(event: Event, start: Start | None, low: Number = 0.0, high: Number = np.inf) -> Guess | None:
    """Convert a caller's start to a `Guess`; None without a start, and if curves do not cross zero in a range of alpha.

    Raises:
        InputError: the start does not fit the event, or is missing for an event of states that only the caller knows.
    """
    is_of_any = event.branches == (None, None)
    if start is None and not is_of_any:
        return None
    if isinstance(start, Guess) and len(start.overlaps) == len(event.branches):
        return start
    inputs: Any = start if isinstance(start, (list, tuple)) and not isinstance(start, Guess) else [start]
    # A state without a name may stand for the event's only branch.
    only = event.branches[0] if len(event.branches) == 1 else None

    def given(kind: type, label: str) -> list[Any]:
        """Return the inputs of one kind in the order of the event's branches; for any branches as they are."""
        those = [s for s in inputs if isinstance(s, kind)]
        named = {getattr(s, label) or only: s for s in those}
        return those if is_of_any else [named[b] for b in event.branches if b in named]

    tables, states = given(Table, "question"), given(FixedPoint, "branch")
    if len(tables) == len(event.branches):
        guess = next((guess for guess in crossings(event, tables) if low <= guess.at <= high), None)
        if guess is None:
            return None
        # On other averages than those of the curves the event may lie beyond their neighbouring points.
        width = guess.high - guess.low
        return guess._replace(low=max(guess.low - width, 0.5 * guess.low), high=guess.high + width)
    if len(states) == len(event.branches) and np.ptp([p.alpha for p in states]) == 0:
        if is_of_any and np.isnan(number_of(event, states)):
            raise InputError("start", "must be two different states, got one twice, or one that is absent")
        return Guess(states[0].alpha, tuple(p.replicates.overlaps for p in states))
    each = "two FixedPoints of any branches" if is_of_any else f"a FixedPoint for each of {list(event.branches)}"
    places = [f" at alpha = {s.alpha:g}" if isinstance(s, FixedPoint) else "" for s in inputs]
    got = ", ".join(f"{type(s).__name__}{place}" for s, place in zip(inputs, places, strict=True))
    raise InputError("start", f"must be {each} at one alpha, or curves of these branches, got {got}")


def crossings(event: Event, curves: Sequence[Table]) -> list[Guess]:
    """Find all sign changes of an event's number between neighbouring points of the curves of its branches."""
    # Only usable states count, because growth is unreliable at the others.
    resolved = [{float(p.alpha): p for p in curve.points if is_usable(p)} for curve in curves]
    common_points = ([points[a] for points in resolved] for a in sorted(set.intersection(*map(set, resolved))))
    return sign_changes([(points, number_of(event, points)) for points in common_points])


def is_usable(point: FixedPoint) -> bool:
    """Return whether the replicates that have a state have settled, and most have one."""
    return bool(point.settled_status <= Status.stalled)


def sign_changes(visited: Sequence[tuple[Sequence[FixedPoint], float]]) -> list[Guess]:
    """Locate sign changes between neighbouring points by linear interpolation; the states are interpolated too."""
    guesses = []
    for (p, g), (q, h) in pairwise(visited):
        if g * h < 0:
            (a, before), (b, after) = ((float(s[0].alpha), [f.replicates.overlaps for f in s]) for s in (p, q))
            fraction = g / (g - h)
            states = jax.tree.map(lambda u, v, fraction=fraction: u + fraction * (v - u), before, after)
            alpha, slope = a + fraction * (b - a), (h - g) / (b - a)
            guesses.append(Guess(alpha, tuple(states), slope, min(a, b), max(a, b), there=b))
    return guesses


def number_of(event: Event, points: Sequence[FixedPoint]) -> float:
    """Return an event's number at concrete states: the mean over the replicates that have all states."""
    return float(jnp.nanmean(_by_replicate(event, [p.replicates for p in points])))


def _by_replicate(event: Event, states: Sequence[State]) -> Float[Array, " R"]:
    """Return an event's number in every replicate: NaN in those that lack a state, and in all if most do."""
    assert event.value is not None
    has_states = jnp.all(jnp.stack([s.has_state for s in states]), 0)
    return jnp.where(has_states & quorum(has_states), event.value(*states), jnp.nan)


class Reading(NamedTuple):
    """An event's number and its states at one place of a search. The outcome of a search is the last one.

    Attributes:
        at: the place, a value of what is searched, such as alpha; for a fold one of every replicate.
        states: the states there.
        value: the event's number in every replicate, NaN in those that lack a state.
        rates: its derivatives in the other numbers of the setting, see `Family.derivatives`; None if not requested.
        slopes: its derivative in the number that is searched; NaN if not requested, and where the number is NaN.
        slope: mean of `slopes`, or the slope of the secant.
        converged: whether the search converged.
    """

    at: Float[GivenArray, "*R"]
    states: tuple[State, ...]
    value: Float[GivenArray, " R"]
    rates: PyTree[Float[GivenArray, "R ..."]] | None
    slopes: Float[GivenArray, " R"]
    slope: Number = np.nan
    converged: bool | Bool[AnyArray | np.bool, ""] = False

    @property
    def is_known(self) -> bool:
        """Whether most replicates have the states."""
        return not bool(np.all(np.isnan(self.value)))


def event_path(event: Event, family: Family, guess: Guess | None = None, *, exact: bool = True) -> Path:
    """Path that finds any event; returns a `Reading`, or None if the event is a fold and there is none.

    Without a guess, the alphas `SEARCH` are visited.

    Args:
        exact: whether to differentiate the number, so that the search has exact slopes and the result has rates.

    Raises:
        InputError: there is no event at the alphas `SEARCH`.
    """
    unsettled = list[Sequence[FixedPoint]]()
    if guess is None:
        guess = yield from guess_among(event, family, SEARCH, unsettled)
    if guess is None and unsettled:  # the event may be where the search failed
        unknown = np.full(family.nodes.replicates, np.nan)
        return Reading(
            np.asarray(unsettled[0][0].alpha), tuple(p.replicates for p in unsettled[0]), unknown, None, unknown
        )
    if guess is None:
        what = "there is none" if event.value else f"the {event.branches[0]} branch does not end"
        raise InputError("event", f"must happen, {what} for alpha from {SEARCH[-1]:g} to {SEARCH[0]:g}")
    if event.value is None:
        return (yield from _fold(event, family, guess, exact))
    return (yield from zero_path(event, family, guess, exact=exact))


def zero_path(
    event: Event,
    family: Family,
    guess: Guess | None = None,
    *,
    bracket: tuple[float, float] = (0.0, np.inf),
    starts: Sequence[Overlaps] = (),
    exact: bool = True,
    tol: float = _TOLERANCE,
) -> Path:
    """Path that finds where the number of an event is zero; returns a `Reading`.

    Without a guess, the coarse replicate gives one inside the bracket. If it finds no zero there, the states are solved
    at the end of the bracket only, and the `Reading` has not converged.

    Args:
        starts: overlaps from which the branches are searched in the bracket.
        exact: as in `event_path`; the number of a pair has exact slopes in any case.
        tol: the search stops when the relative step is below this.
    """
    limit, in_bracket = MAX_EVALUATIONS, True
    if guess is not None:
        for start in guess.overlaps:
            check_shapes(family.model, start, np.ndim(start.m) - 2)
    else:
        guess, in_bracket = yield from _coarse_guess(event, family, bracket, starts)
        limit = MAX_EVALUATIONS if in_bracket else 1
    read = partial(event_number, event, family, exact=exact)
    zero = yield from find_zero(read, guess, tol=tol, max_evaluations=limit)
    return zero._replace(converged=zero.converged and in_bracket)


def find_zero(
    read: Callable[[float, Sequence[Overlaps]], Path],
    guess: Guess,
    *,
    tol: float = _TOLERANCE,
    max_evaluations: int = MAX_EVALUATIONS,
) -> Path:
    """Path that finds a zero near a guess by Newton's method, or by the secant method where slopes are not known.

    The zero has converged if the last step is short, or if states on both sides enclose it. The step must lead inside
    of the bracket, which excludes the places that were found to have no state: a number that keeps its sign up to the
    end of a branch has short steps there, but no zero.

    Args:
        read: function of a value and of overlaps to start from; its path returns a `Reading`.
        tol: the search stops when the relative step is below this.

    Returns:
        The last `Reading` with states; the first one if there are none at the guess.
    """
    search = Secant.begin(guess.there, guess.slope, guess.low, guess.high, guess.reach)
    trial, xs = float(guess.at), guess.overlaps
    last, signs = None, set[float]()
    for _ in range(max_evaluations):
        reading = yield from read(trial, xs)
        if not reading.is_known:
            if last is None and not np.isfinite(search.x):  # no state at the start
                return reading
            search = search.shrunk(trial)
        else:
            slope = np.nan if np.all(np.isnan(reading.slopes)) else float(np.nanmean(reading.slopes))
            search = search.updated(trial, float(np.nanmean(reading.value)), slope)
            signs.add(np.sign(search.value))
            is_small = abs(search.step) < tol * search.x
            is_enclosed = len(signs) > 1 and abs(search.step) < _LONGEST_FINAL_STEP * search.x
            converged = search.leads_inside and bool(is_small or is_enclosed)
            last = reading._replace(slope=search.slope, converged=converged)
            xs = tuple(s.overlaps for s in reading.states)
            if is_small:
                break
        trial = search.next()
    return reading if last is None else last


def event_number(
    event: Event, family: Family, value: float, xs: Sequence[Overlaps], *, exact: bool = True, coarse: bool = False
) -> Path:
    """Path that solves the states of an event at one value of the number; returns a `Reading`.

    Args:
        xs: overlaps to start from.
        exact: whether to compute derivatives that are not free.
        coarse: whether to use the coarse replicate only, which is then the only one of the `Reading`.
    """
    dtype, replicates = family.model.lam.dtype, family.nodes.replicates
    # Overlaps of a model in another dtype are starts as well.
    starts = jax.tree.map(lambda a: a if a.dtype == dtype else np.asarray(a, dtype), tuple(xs))
    sides = [family.at(value, branch) for branch in event.branches]
    if coarse:
        states = tuple(stacked([s]) for s in (yield [Lane(s, x) for s, x in zip(sides, starts, strict=True)]))
    else:
        starts = [with_replicate_axis(x, replicates) for x in starts]
        states = tuple((yield [s.solve_replicates(x) for s, x in zip(sides, starts, strict=True)]))
    number, rates = np.asarray(_by_replicate(event, states)), None
    slopes, partials = np.full_like(number, np.nan), None
    if event.observable is None:
        partials = jax.tree.map(np.subtract, *(s.train_loss_partials for s in states))
    elif exact:
        replicate_numbers = [COARSE] if coarse else range(replicates)
        _, *partials = yield from _implicit_in(sides[0], states[0].overlaps, event.observable, replicate_numbers)
    if partials is not None:
        rates, slopes = family.derivatives(value, *partials)
        slopes = np.where(np.isnan(number), np.nan, slopes)
    return Reading(np.asarray(value, dtype), states, number, rates, slopes)


def _coarse_guess(event: Event, family: Family, bracket: tuple[float, float], starts: Sequence[Overlaps]) -> Path:
    """Path that finds an event on the coarse replicate.

    Returns:
        A `Guess`, and whether there is a zero inside the bracket; otherwise the guess is an end of the bracket.
    """
    starts = [jax.tree.map(np.asarray, start) for start in starts]

    def number(value: float, xs: Sequence[Overlaps]) -> Path:
        """Path that returns the event's number, and starts for the next value.

        If only one branch of a pair has a state, that branch counts as the lower one: the number is positive for the
        second branch, and negative for the first one. If neither has a state, it is negative. Its size is then the mean
        size of both losses.
        """
        sides = [family.at(value, branch) for branch in event.branches]
        states = yield [s.coarse_lane(x) for s, x in zip(sides, xs, strict=True)]
        has_state = [bool(s.has_state) for s in states]
        # The next search for a branch that was not found begins at the start of that branch.
        is_settled = [s.status <= Status.stalled for s in states]
        xs = [s.overlaps if settled else x for s, settled, x in zip(states, is_settled, starts, strict=True)]
        if len(states) == 1 or all(has_state):
            assert event.value is not None
            return event.value(*states), xs
        size = np.mean(np.abs([s.train_loss for s in states]))
        return (1.0 if has_state[1] and not has_state[0] else -1.0) * size, xs

    value, xs, in_bracket = yield from zero_between(number, *bracket, starts, _COARSE)
    return Guess(value, tuple(xs)), in_bracket


def guess_among(
    event: Event, family: Family, alphas: Float[np.ndarray, " A"], unsettled: list[Sequence[FixedPoint]] | None = None
) -> Path:
    """Path that visits alphas in turn until the number of an event changes its sign; returns a `Guess`, or None.

    If the sign never changes, the event is expected between an alpha with states and a neighbour without, provided that
    the sign of the number at the states is compatible with a zero on that side. A fold is expected where the branch is
    lost.

    Args:
        unsettled: list to which the path adds the points of every alpha where a search failed for a branch.
    """
    visited: list[tuple[Sequence[FixedPoint], float]] = []
    for steps in zip(*(walk(family, along_alpha(family.model, alphas), b) for b in event.branches), strict=True):
        points = yield list(steps)
        if event.value is not None:
            visited.append((points, number_of(event, points)))
            if unsettled is not None and not all(p.exists or is_absent(p.replicates) for p in points):
                unsettled.append(points)
            if guesses := sign_changes(visited[-2:]):
                return guesses[0]
        else:
            visited.append((points, np.nan))
            before = visited[-2][0] if len(visited) > 1 else points
            if before[0].exists and not points[0].exists:
                low, high = float(points[0].alpha), float(before[0].alpha)
                return Guess(high, (before[0].replicates.overlaps,), low=0.5 * low, high=1.5 * high)
    for before, after in pairwise(visited):
        for (points, g), (neighbours, h) in ((before, after), (after, before)):
            a, b = float(points[0].alpha), float(neighbours[0].alpha)
            if np.isnan(h) and g * (b - a) < 0:  # numbers of events rise with alpha
                overlaps = tuple(p.replicates.overlaps for p in points)
                return Guess(0.5 * (a + b), overlaps, low=min(a, b), high=max(a, b), there=a)
    return None


@program
def _implicit(
    equations: Equations, x: Overlaps, observable: Observable
) -> tuple[Float[Array, ""], Model, Float[Array, ""]]:
    """Return an event's number at the fixed point of a replicate, and its derivatives in the model and in alpha."""
    replicate, free = equations.replicate, equations.free
    return equations.gradient(x, lambda model, alpha, x: observable(model, alpha, x, replicate, free))


def _implicit_in(setting: Setting, xs: Overlaps, observable: Observable, replicates: Sequence[int]) -> Path:
    """Path that evaluates `_implicit` in the given replicates; returns arrays (R, ...)."""
    arguments = [(setting.equations(number), indexed(xs, k), observable) for k, number in enumerate(replicates)]
    return stacked((yield [Call(_implicit, each) for each in arguments]))


def _fold(event: Event, family: Family, guess: Guess, exact: bool) -> Path:
    """Path that finds a fold by continuation in arclength; returns a `Reading`, or None if there is no fold."""
    value, dtype = float(guess.at), family.model.lam.dtype
    # Along alpha the start of the path is the guess.
    family = family if family.number.name != "alpha" else family._replace(alpha=np.asarray(value, dtype))
    (start,), (branch,) = guess.overlaps, event.branches
    starts = with_replicate_axis(start, family.nodes.replicates)
    x = jax.tree.map(lambda a: np.mean(np.asarray(a, dtype), 0), starts)
    limits = float(guess.low) or 0.5 * value, float(guess.high) if np.isfinite(guess.high) else 1.5 * value
    fold = yield from fold_near(family, branch, x, limits)
    if fold is None:
        return None
    values, state = fold
    rates, slopes = None, np.full_like(values, np.nan)
    if exact:
        calls = []
        for k, folded in enumerate(values):
            equations = family.at(folded, branch).equations(k)
            calls.append(Call(_fold_gradient, (equations, indexed(state.overlaps, k))))
        rates, slopes = family.derivatives(float(np.mean(values)), *stacked((yield calls)))
    return Reading(values, (state,), np.zeros_like(values), rates, slopes, 1.0, True)


@program
def _fold_gradient(equations: Equations, x: Overlaps) -> tuple[Model, Float[Array, ""]]:
    return equations.fold_gradient(x)


def transition_of(event: Event, model: Model, zero: Reading | None) -> Quantity:
    """Convert the end of a search, None if there is no fold, to a result that is differentiable in `model`.

    The model is that of the caller. The number is one step of Newton's method beyond `zero.at`, in every replicate. The
    states are those at `zero.at`.
    """
    if zero is None:
        nan = jnp.full((1,), jnp.nan, model.lam.dtype)
        return as_event(Quantity.of(nan, status=Status.absent), event.name)
    zero = jax.tree.map(jnp.asarray, zero)
    roots = zero.at - zero.value / (zero.slope if zero.rates is None else zero.slopes)
    rates = None if zero.rates is None else root_rates(zero.rates, zero.slopes)
    alpha, fixed_model = jnp.mean(zero.at), lax.stop_gradient(model)
    states = tuple(FixedPoint(fixed_model, alpha, s, b) for s, b in zip(zero.states, event.branches, strict=True))
    status = jnp.stack([s.status for s in states])
    is_unsettled = jnp.stack([~s.exists for s in states]) & (status != Status.absent)
    failure_status = jnp.where(jnp.any(is_unsettled), jnp.max(jnp.where(is_unsettled, status, 0)), Status.absent)
    worst = jnp.max(jnp.stack([s.settled_status for s in states]))
    status = jnp.where(zero.converged, worst, failure_status)
    known = jnp.asarray(zero.converged)
    return as_event(Quantity.of(roots, rates, model, status=status, known=known), event.name, states)


@eqx.filter_jit
def root_rates(rates: PyTree[Float[Array, "R ..."]], slopes: Float[Array, " R"]) -> PyTree[Float[Array, "R ..."]]:
    """Return the derivatives of the root of a number in every replicate, from those of the number."""
    return jax.tree.map(lambda g: -g / spread_to(slopes, g), rates)
