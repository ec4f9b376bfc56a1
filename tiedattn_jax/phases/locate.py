"""The search for an event in alpha.

`find_event` finds an event near a guess, inside a bracket that shrinks. It uses Newton's method if the exact slope is
requested or free, and the secant method otherwise. The sensitivities are exact. For alpha_c they are the envelope
formula ``-(d_p Delta Phi) / (d_alpha Delta Phi)`` at fixed overlaps, for other events they follow from the implicit
function theorem along the branch. Both contain the jumps of the proximal operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from ..averages.program import program
from ..averages.recipes import AnyNodes
from ..averages.rules import Rule
from ..base.arrays import AnyArray, GivenArray, Number, indexed, stacked
from ..base.errors import InputError, as_flag
from ..base.report import Settings, Status, error_bar, quorum
from ..model.model import Model
from ..model.overlaps import Overlaps, branch_of
from ..model.parameters import Parameter
from ..theory.engine import run_one
from ..theory.equations import Equations, first_order
from ..theory.paths import Call, Path
from ..theory.solve import Problem, with_replicate_axis
from ..theory.states import FixedPoint, State
from .arclength import Setting, fold_near
from .events import Event, Observable, Transition, event_of
from .inputs import prepared
from .questions import StateTable
from .secant import Secant

MAX_EVALUATIONS = 12  # maximum number of alphas at which states are solved
_TOLERANCE = 1e-3  # relative step in alpha that is the last one; the extrapolated zero is accurate to its square
_LONGEST_FINAL_STEP = 0.1  # relative step above which the search has not converged


class Guess(NamedTuple):
    """Guess for an event.

    Attributes:
        alpha: where the event is expected.
        overlaps: guess for every state that defines the event, for all replicates or with a leading replicate axis.
        slope: d (event's number) / d alpha, NaN if unknown.
        low, high: bracket of alpha.
        there: an alpha at which the states are known to exist, NaN for `alpha` itself.
    """

    alpha: Number
    overlaps: tuple[Overlaps, ...]
    slope: Number = np.nan
    low: Number = 0.0
    high: Number = np.inf
    there: Number = np.nan


# Start of a search: a guess, states at one alpha (such as `Transition.branches`), or curves of the branches.
Start = Guess | FixedPoint | Sequence[FixedPoint] | Sequence[StateTable]


def guess_of(event: Event, start: Start, low: Number = 0.0, high: Number = np.inf) -> Guess | None:
    """Convert a caller's start to a `Guess`; None if curves have no sign change at an alpha between `low` and `high`.

    Raises:
        InputError: the start is of the wrong kind, or of other branches than those of the event.
    """
    if isinstance(start, Guess) and len(start.overlaps) == len(event.branches):
        return start
    is_sequence = isinstance(start, (list, tuple)) and not isinstance(start, Guess)
    inputs: Any = start if is_sequence else [start]
    # A state without a name may stand for the event's only branch.
    names: dict[Any, Any] = {None: event.branches[0]} if len(event.branches) == 1 else {}
    curves = {names.get(s.branch, s.branch): s for s in inputs if isinstance(s, StateTable)}
    points = {names.get(s.branch, s.branch): s for s in inputs if isinstance(s, FixedPoint)}
    if set(event.branches) <= set(curves):
        guesses = crossings(event, [curves[b] for b in event.branches])
        return next((guess for guess in guesses if low <= guess.alpha <= high), None)
    states = [points[b] for b in event.branches if b in points]
    alphas = [p.alpha for p in states]
    if len(states) == len(event.branches) and np.ptp(alphas) == 0:
        return Guess(alphas[0], tuple(p.replicates.overlaps for p in states))
    requirement = (
        f"a FixedPoint for each of {list(event.branches)} at one alpha, or curves of these branches, or a Guess"
    )
    raise InputError("start", f"must be {requirement}, got {[type(s).__name__ for s in inputs]}")


def crossings(event: Event, curves: Sequence[StateTable]) -> list[Guess]:
    """Find all sign changes of an event's number between neighbouring points of the curves of its branches."""
    # Only usable states count, because growth is unreliable at the others.
    resolved = [{float(p.alpha): p for p in curve.points if bool(p.ok)} for curve in curves]
    common_points = ([points[a] for points in resolved] for a in sorted(set.intersection(*map(set, resolved))))
    return sign_changes([(points, number_of(event, points)) for points in common_points])


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
    """Return an event's number at concrete states: the mean of `_numbers` over the replicates that have all states."""
    return float(jnp.nanmean(_numbers(event, [p.replicates for p in points])))


def _numbers(event: Event, states: Sequence[State]) -> Float[Array, " R"]:
    """Return an event's number in every replicate: NaN in those that lack a state, and in all if most do."""
    assert event.value is not None
    has_states = jnp.all(jnp.stack([s.has_state for s in states]), 0)
    return jnp.where(has_states & quorum(has_states), event.value(*states), jnp.nan)


@program
def _implicit(
    equations: Equations, x: Overlaps, observable: Observable
) -> tuple[Float[Array, ""], Model, Float[Array, ""]]:
    """Return an event's number at the fixed point of a replicate, and its derivatives in the model and in alpha."""
    replicate, free = equations.replicate, equations.free
    return equations.gradient(x, lambda model, alpha, x: observable(model, alpha, x, replicate, free))


class Zero(NamedTuple):
    """Outcome of a search for an event.

    Attributes:
        alpha: last alpha at which the states were solved.
        states: the states at that alpha.
        value: the event's number in every replicate, NaN in those that lack a state.
        by_model, by_alpha: derivatives of the number in every replicate; None and NaN if not requested.
        slope: d (mean number) / d alpha, exact or from the secant.
        converged: whether the search converged.
    """

    alpha: Float[GivenArray, "*R"]
    states: tuple[State, ...]
    value: Float[GivenArray, " R"]
    by_model: Model | None
    by_alpha: Float[GivenArray, " R"]
    slope: Number = jnp.nan
    converged: bool | Bool[AnyArray | np.bool, ""] = False


def find_zero(
    event: Event,
    model: Model,
    guess: Guess,
    nodes: Rule,
    settings: Settings,
    *,
    exact: bool,
    tol: float = _TOLERANCE,
    masks: Sequence[Float[GivenArray, " 2"]] | None = None,
    max_evaluations: int = MAX_EVALUATIONS,
) -> Path:
    """Path of Newton's method from a guess for an event, or of the secant method if not `exact`; returns a `Zero`.

    Args:
        tol: the search stops when the relative step in alpha is below this.
        masks: masks of the free order parameters of the branches; by default those of the event.
        max_evaluations: maximum number of alphas at which states are solved.
    """
    free_masks = [branch_of(b).free(model) for b in event.branches] if masks is None else masks

    def evaluate(trial_alpha: float, xs: Sequence[Overlaps]) -> Path:
        """Path that solves the states at one alpha; returns a `Zero`, with derivatives if requested or free."""
        alpha = np.asarray(trial_alpha, model.lam.dtype)
        problems = [Problem(model, alpha, nodes, f, settings) for f in free_masks]
        states = tuple((yield [p.solve_replicates(x) for p, x in zip(problems, xs, strict=True)]))
        value, by_model = np.asarray(_numbers(event, states)), None
        by_alpha = np.full_like(value, np.nan)
        if event.observable is None:
            by_model, by_alpha = jax.tree.map(np.subtract, *(s.train_loss_partials for s in states))
        elif exact:
            _, by_model, by_alpha = yield from implicit_derivatives(problems[0], states[0].overlaps, event.observable)
        return Zero(alpha, states, value, by_model, by_alpha)

    search = Secant.begin(guess.there, guess.slope, guess.low, guess.high)
    starts = _in_dtype_of(model, guess.overlaps)
    trial, xs = float(guess.alpha), tuple(with_replicate_axis(x, nodes.replicates) for x in starts)
    last: Zero | None = None
    for _ in range(max_evaluations):
        zero = yield from evaluate(trial, xs)
        if np.all(np.isnan(zero.value)):
            if last is None and not np.isfinite(search.x):  # no state at the start
                return zero
            search = search.shrunk(trial)
        else:
            by_alpha = np.nan if np.all(np.isnan(zero.by_alpha)) else float(np.nanmean(zero.by_alpha))
            search = search.updated(trial, float(np.nanmean(zero.value)), by_alpha)
            converged = np.isfinite(search.value) and abs(search.step) < _LONGEST_FINAL_STEP * search.x
            last, xs = zero._replace(slope=search.slope, converged=converged), tuple(s.overlaps for s in zero.states)
            if abs(search.step) < tol * search.x:
                break
        trial = search.next()
    return zero if last is None else last


def _in_dtype_of(model: Model, starts: tuple[Overlaps, ...]) -> tuple[Overlaps, ...]:
    """Return overlaps in the dtype of the model; those of a model in another dtype are starts as well."""
    dtype = model.lam.dtype
    return jax.tree.map(lambda a: a if a.dtype == dtype else np.asarray(a, dtype), starts)


def implicit_derivatives(
    problem: Problem, xs: Overlaps, observable: Observable, replicates: Sequence[int] | None = None
) -> Path:
    """Path that evaluates `_implicit` in every replicate, or in the given ones; returns arrays (R, ...)."""
    model, alpha, nodes, free, _ = problem
    calls = []
    for k, replicate in enumerate(range(nodes.replicates) if replicates is None else replicates):
        equations = Equations(model, alpha, nodes.replicate(replicate), jnp.asarray(free))
        calls.append(Call(_implicit, (equations, indexed(xs, k), observable)))
    return stacked((yield calls))


def find_event(
    model: Model,
    event: str,
    nodes: AnyNodes = None,
    *,
    start: Start,
    settings: Settings | None = None,
    sensitivities: bool = True,
) -> Transition:
    """Find an event near a guess, with its exact derivatives in every number of the model.

    Args:
        model: attention layer and data.
        event: a name in `EVENTS`.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.
        start: a `FixedPoint` of every branch of the event, all at one alpha; or curves of these branches with the event
            between two of their points; or a `Guess`.
        settings: tolerances.
        sensitivities: whether to differentiate the event in the numbers of the model and to search with the exact slope
            in alpha. Otherwise the secant method finds the event, with less to compile.

    Returns:
        A `Transition`; status `absent` when there is no such event near the start.

    Raises:
        InputError: the event is unknown, or the start does not belong to it.
    """
    nodes, settings = prepared(model, nodes, settings)
    sensitivities = as_flag(sensitivities, "sensitivities")
    definition = event_of(event, model)
    guess = guess_of(definition, start)
    if guess is None:
        text = f"must enclose the event, got curves between whose points {event} does not change sign"
        raise InputError("start", text)
    zero = run_one(locate_path(definition, lax.stop_gradient(model), guess, nodes, settings, sensitivities))
    return transition_of(definition, model, zero)


def locate_path(event: Event, model: Model, guess: Guess, nodes: Rule, settings: Settings, sensitivities: bool) -> Path:
    """Path of `find_event`; returns a `Zero`, or None if the event is a fold and there is none."""
    if event.value is None:
        return (yield from _fold(event, model, guess, nodes, settings, sensitivities))
    return (yield from find_zero(event, model, guess, nodes, settings, exact=sensitivities))


def transition_of(event: Event, model: Model, zero: Zero | None) -> Transition:
    """Convert what `locate_path` returned to a result that is differentiable in `model`, the caller's model."""
    if zero is None:
        nan = jnp.full((), jnp.nan, model.lam.dtype)
        return Transition(nan, nan, None, None, jnp.asarray(int(Status.absent)), (), event.name)
    zero = jax.tree.map(jnp.asarray, zero)
    roots = zero.alpha - zero.value / (zero.slope if zero.by_model is None else zero.by_alpha)
    sensitivities = bars = None
    if zero.by_model is not None:
        gradients, sensitivities, bars = root_derivatives(zero.by_model, zero.by_alpha)
        roots = with_sensitivities(roots, gradients, model)
    alpha, fixed_model = jnp.mean(zero.alpha), lax.stop_gradient(model)
    states = tuple(FixedPoint(fixed_model, alpha, s, b) for s, b in zip(zero.states, event.branches, strict=True))
    status = jnp.stack([s.status for s in states])
    worst = jnp.max(status)
    is_unsettled = jnp.stack([~s.exists for s in states]) & (status != Status.absent)
    failure_status = jnp.where(jnp.any(is_unsettled), jnp.max(jnp.where(is_unsettled, status, 0)), Status.absent)
    # No number of an event that was not found may read like a result. A factor makes the derivatives NaN as well.
    known = jnp.where(zero.converged, 1.0, jnp.nan).astype(roots.dtype)
    sensitivities, bars = jax.tree.map(lambda a: known * a, (sensitivities, bars))
    return Transition(
        alpha=known * jnp.nanmean(roots),
        stderr=known * error_bar(lax.stop_gradient(roots)),
        sensitivities=sensitivities,
        sensitivities_stderr=bars,
        status=jnp.where(zero.converged, worst, failure_status),
        branches=states,
        event=event.name,
    )


@eqx.filter_jit
def root_derivatives(by_model: Model, by_alpha: Float[Array, " R"]) -> tuple[Model, Model, Model]:
    """Return d alpha / d model in every replicate, its mean and its error bar, from the derivatives of the number."""
    gradients = jax.tree.map(lambda g: -g / by_alpha.reshape(-1, *[1] * (g.ndim - 1)), by_model)
    return gradients, jax.tree.map(lambda a: jnp.nanmean(a, 0), gradients), jax.tree.map(error_bar, gradients)


@jax.custom_jvp
def with_sensitivities(
    alphas: Float[Array, " R"], sensitivities: PyTree[Float[Array, "R ..."]], setting: PyTree[Float[Array, "..."]]
) -> Float[Array, " R"]:
    """Return the roots with `sensitivities` (leading axis R) as their first derivatives in the numbers of a setting."""
    return alphas


@with_sensitivities.defjvp
def _(primals: Any, tangents: Any) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    alphas, sensitivities, model = primals
    terms = jax.tree.map(
        lambda s, d: jnp.sum((s * d).reshape(alphas.shape[0], -1), 1), first_order(sensitivities, model), tangents[2]
    )
    return alphas, sum(jax.tree.leaves(terms), jnp.zeros_like(alphas))


def _fold(event: Event, model: Model, guess: Guess, nodes: Rule, settings: Settings, sensitivities: bool) -> Path:
    """Path that finds a fold by continuation in arclength; returns a `Zero`, or None if there is no fold."""
    alpha, free = float(guess.alpha), branch_of(event.branches[0]).free(model)
    setting = Setting(model, jnp.asarray(alpha, model.lam.dtype), Parameter("alpha"), free)
    (start,) = _in_dtype_of(model, guess.overlaps)
    x = jax.tree.map(lambda a: np.mean(a, 0), with_replicate_axis(start, nodes.replicates))
    limits = float(guess.low) or 0.5 * alpha, float(guess.high) if np.isfinite(guess.high) else 1.5 * alpha
    fold = yield from fold_near(setting, nodes, x, settings, limits)
    if fold is None:
        return None
    alphas, state = fold
    by_model, by_alpha = None, np.full_like(alphas, np.nan)
    if sensitivities:
        calls = []
        for k, a in enumerate(alphas):
            equations = Equations(model, jnp.asarray(a), nodes.replicate(k), free)
            calls.append(Call(_fold_gradient, (equations, indexed(state.overlaps, k))))
        by_model, by_alpha = stacked((yield calls))
    return Zero(alphas, (state,), np.zeros_like(alphas), by_model, by_alpha, 1.0, True)


@program
def _fold_gradient(equations: Equations, x: Overlaps) -> tuple[Model, Float[Array, ""]]:
    return equations.fold_gradient(x)
