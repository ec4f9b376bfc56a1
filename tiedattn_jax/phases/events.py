"""What can happen at one alpha, and where: a table of events, and one way to find any of them.

An event is a zero, in alpha, of a number of one or two states. `locate` finds it near a place where it is expected, by
Newton's method with the exact slope where that is asked for or free, and by the secant method elsewhere, inside a
bracket that shrinks. Its sensitivities are exact: for alpha_c by the envelope formula ``-(d_p Delta Phi) / (d_alpha
Delta Phi)`` at fixed overlaps, else by the implicit function theorem along the branch. Both contain the jumps of the
proximal operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..averages.default import default_nodes
from ..averages.rule import Replicate, Rule
from ..errors import InputError, is_concrete, require_choice
from ..model import Model
from ..overlaps import PAIR, Overlaps, branch_of
from ..results import Settings, Status, error_bar, quorum
from ..theory.fixed_points import FixedPoint, State, solve_replicates
from ..theory.observables import excess_in, growths_in
from ..theory.state_evolution import fold_gradient, implicit_gradient
from .arclength import fold_near
from .follow import Curve, for_each
from .secant import Secant

_LOOKS = 12  # places at which states are solved, at most
_NEWTON_LOOKS = 2  # under a jax transformation, from a good start: the second step moves by 1e-6
_TOLERANCE = 1e-3  # a step in alpha, relative, after which one more is final: it is good to the square of this
_MET = 0.1  # a last step, relative, that is too long: it came to no rest

Observable = Callable[[Model, jax.Array, Overlaps, Replicate, jax.Array], jax.Array]


class Event(NamedTuple):
    """Something that happens where a number of states crosses zero.

    Attributes:
        branches: the states that it looks at.
        value: of one `State` for each of them: the number in every replicate, (R,). None: the branch turns back there.
        observable: the same number of one state's overlaps, to be differentiated: ``(model, alpha, overlaps, replicate,
            free)``. None: the training losses of two states, whose derivatives come with them.
    """

    branches: tuple[str, ...]
    value: Callable[..., jax.Array] | None
    observable: Observable | None = None


def _baseline(branch: str) -> Event:
    """The test error falls below that of the linear baseline."""

    def excess(model: Model, alpha: jax.Array, x: Overlaps, replicate: Replicate, free: jax.Array) -> jax.Array:
        return excess_in(model, x, replicate)

    return Event((branch,), lambda s: s.gen_error_linear - s.gen_error, excess)


def _growth(branch: str, order: str, sign: int = 1) -> Event:
    """The largest eigenvalue of the map in the direction of an order parameter passes one."""

    def growth(model: Model, alpha: jax.Array, x: Overlaps, replicate: Replicate, free: jax.Array) -> jax.Array:
        theta, m = growths_in(model, alpha, x, replicate, free)
        return sign * ({"theta": theta, "m": m}[order] - 1)

    return Event((branch,), lambda s: sign * (getattr(s.diagnostics, f"growth_{order}") - 1), growth)


# The numbers rise with alpha where the branch comes from below.
EVENTS: dict[str, Event] = {
    "alpha_c": Event(PAIR, lambda p, s: p.train_loss - s.train_loss),
    "semantic baseline": _baseline("semantic"),
    "positional baseline": _baseline("positional"),
    "semantic instability": _growth("semantic", "m", -1),
    "positional instability": _growth("positional", "theta"),
    "semantic pitchfork": _growth("uninformed", "theta"),
    "positional pitchfork": _growth("uninformed", "m"),
    "semantic fold": Event(("semantic",), None),
    "positional fold": Event(("positional",), None),
}


def event_of(name: str) -> Event:
    """The event of a name.

    Raises:
        InputError: there is none.
    """
    require_choice(name, "event", EVENTS)
    return EVENTS[name]


class Transition(eqx.Module):
    """An event in alpha.

    Attributes:
        alpha: mean over the replicates of the averages.
        stderr: its error bar.
        sensitivities: d alpha / d (every number of the model), a pytree like the model; None where they were not asked
            for.
        sensitivities_stderr: their error bars.
        status: `Status` as an integer: `absent` when nothing crosses where it was looked for.
        branches: the states at `alpha` that the event looks at.
        event: its name in `EVENTS`.
    """

    alpha: jax.Array
    stderr: jax.Array
    sensitivities: Model | None
    sensitivities_stderr: Model | None
    status: jax.Array
    branches: tuple[FixedPoint, ...]
    event: str = eqx.field(static=True)

    @property
    def ok(self) -> jax.Array:
        """Whether it was found, between usable states."""
        return self.status <= Status.stalled


class Near(NamedTuple):
    """Where an event is expected.

    Attributes:
        alpha: the place.
        overlaps: of every state that the event looks at, one for all replicates or with a leading replicate axis.
        slope: of the event's number in alpha, NaN where it is not known.
        low, high: a bracket.
        there: an alpha at which the states are known to exist, NaN for `alpha` itself.
    """

    alpha: Any
    overlaps: tuple[Overlaps, ...]
    slope: Any = np.nan
    low: Any = 0.0
    high: Any = np.inf
    there: Any = np.nan


# Where to start from: a place, states at one alpha (such as `Transition.branches`), or curves of the branches.
Start = Near | Sequence[FixedPoint] | Sequence[Curve]


def near_of(event: Event, start: Start, low: Any = 0.0, high: Any = np.inf) -> Near | None:
    """What a caller gave to start from, as the place where an event is expected, between two alphas if on curves.

    Raises:
        InputError: it is neither of the kinds, or of other branches than the event looks at.
    """
    if isinstance(start, Near):
        return start
    curves = [s for s in start if isinstance(s, Curve)]
    points = [s for s in start if isinstance(s, FixedPoint)]
    if len(points) == len(event.branches):
        return Near(points[0].alpha, tuple(p.replicates.overlaps for p in points))
    by_name = {curve.branch: curve for curve in curves}
    if not set(event.branches) <= set(by_name):
        want = f"one FixedPoint for each of {', '.join(event.branches)}, or curves of these branches"
        raise InputError("start", f"must be {want}, got {[type(s).__name__ for s in start]}")
    found = [near for near in crossings(event, [by_name[b] for b in event.branches]) if low <= near.alpha <= high]
    return found[0] if found else None


def crossings(event: Event, curves: Sequence[Curve]) -> list[Near]:
    """All places between neighbouring points of the curves of an event's branches where its number changes sign."""
    resolved = [{float(p.alpha): p for p in curve.points if bool(p.ok)} for curve in curves]  # else growth means little
    shared = sorted(set.intersection(*map(set, resolved)))
    return list(changes(event, ([points[a] for points in resolved] for a in shared)))


def changes(event: Event, looks: Iterable[Sequence[FixedPoint]]) -> Iterator[Near]:
    """Where the number of an event changes its sign between neighbours, among states at one alpha after the other."""
    for p, q in pairwise((points, number_of(event, points)) for points in looks):
        if p[1] * q[1] < 0:
            yield between(p[0], q[0], p[1], q[1])


def number_of(event: Event, points: Sequence[FixedPoint]) -> float:
    """The number of an event at concrete states, mean over the replicates that have all of them; NaN where few have."""
    return float(jnp.nanmean(_numbers(event, [p.replicates for p in points])))


def _numbers(event: Event, states: Sequence[State]) -> jax.Array:
    """The number of an event in every replicate, (R,), NaN in those that lack a state, and in all where most do."""
    assert event.value is not None
    there = jnp.all(jnp.stack([s.has_state for s in states]), 0)
    return jnp.where(there & quorum(there), event.value(*states), jnp.nan)


def between(p: Sequence[FixedPoint], q: Sequence[FixedPoint], g: float, h: float) -> Near:
    """Where a number that is g at the states p and h at q is zero, by linear interpolation; the states likewise."""
    a, b = float(p[0].alpha), float(q[0].alpha)
    share = g / (g - h)
    one, other = ([s.replicates.overlaps for s in points] for points in (p, q))
    states = jax.tree.map(lambda u, v: u + share * (v - u), one, other)
    return Near(a + share * (b - a), tuple(states), (h - g) / (b - a), min(a, b), max(a, b), there=b)


@eqx.filter_jit
def _implicit(
    event: Event, model: Model, alpha: jax.Array, nodes: Rule, xs: Overlaps, free: jax.Array
) -> tuple[jax.Array, Model, jax.Array]:
    """In every replicate, at its own fixed point: the event's number, its derivatives in the model and in alpha."""

    assert event.observable is not None
    observable = event.observable

    def one(args: tuple[Replicate, Overlaps]) -> Any:
        replicate, x = args
        return implicit_gradient(model, alpha, replicate, x, free, lambda m, a, x: observable(m, a, x, replicate, free))

    return lax.map(one, (nodes.stack, xs))


class Zero(NamedTuple):
    """Where a search for an event ended.

    Attributes:
        alpha: the last place.
        states: there.
        value: the event's number in every replicate, (R,), NaN where one has no state.
        by_model, by_alpha: its derivatives, (R, ...); None and NaN where they were not asked for.
        slope: in alpha, exact or of the secant.
        met: whether the search came to rest.
    """

    alpha: jax.Array
    states: tuple[State, ...]
    value: jax.Array
    by_model: Model | None
    by_alpha: jax.Array
    slope: Any = jnp.nan
    met: Any = False


def zero_near(
    event: Event,
    model: Model,
    near: Near,
    nodes: Rule,
    settings: Settings,
    *,
    exact: bool,
    tol: float = _TOLERANCE,
    frees: Sequence[jax.Array] | None = None,
) -> Zero:
    """Newton's method, or the secant method where not `exact`, from where an event is expected.

    One loop serves the compiled solves of concrete numbers, until a step is below `tol`, and traced code, which takes
    two steps.
    """
    frees = [branch_of(b).free(model) for b in event.branches] if frees is None else frees
    concrete = is_concrete((model, near))
    search = Secant.begin(near.there, near.slope, near.low, near.high, model.lam.dtype)
    trial, xs = jnp.asarray(near.alpha, model.lam.dtype), tuple(for_each(x, nodes.replicates) for x in near.overlaps)
    last: Zero | None = None
    for _ in range(_LOOKS if concrete else _NEWTON_LOOKS):
        here = _look(event, model, trial, nodes, xs, frees, settings, exact)
        if concrete and jnp.all(jnp.isnan(here.value)):
            if last is None and not np.isfinite(search.alpha):  # no state at the start
                return here
            search = search.blocked(trial)
        else:
            search = search.learn(trial, jnp.nanmean(here.value), jnp.nanmean(here.by_alpha))
            met = jnp.isfinite(search.value) & (jnp.abs(search.step) < _MET * search.alpha)
            last, xs = here._replace(slope=search.slope, met=met), tuple(s.overlaps for s in here.states)
            if concrete and abs(search.step) < tol * search.alpha:
                break
        trial = search.next()
    return here if last is None else last


def _look(
    event: Event,
    model: Model,
    alpha: jax.Array,
    nodes: Rule,
    xs: Sequence[Overlaps],
    frees: Sequence[jax.Array],
    settings: Settings,
    exact: bool,
) -> Zero:
    """The states at one alpha, and the event's number with the derivatives that are asked for, or free."""
    states = tuple(solve_replicates(model, alpha, nodes, x, free, settings) for x, free in zip(xs, frees, strict=True))
    value, by_model = _numbers(event, states), None
    by_alpha = jnp.full_like(value, jnp.nan)
    if event.observable is None:
        by_model, by_alpha = jax.tree.map(jnp.subtract, *(s.train_loss_partials for s in states))
    elif exact:
        _, by_model, by_alpha = _implicit(event, model, alpha, nodes, states[0].overlaps, frees[0])
    return Zero(alpha, states, value, by_model, by_alpha)


def locate(
    model: Model,
    event: str,
    nodes: Rule | None = None,
    *,
    start: Start,
    settings: Settings | None = None,
    sensitivities: bool = True,
) -> Transition:
    """An event near a place where it is expected, with its exact derivatives in every number of the model.

    Args:
        model: attention layer and data.
        event: a name in `EVENTS`.
        nodes: averaging rule; by default `default_nodes`.
        start: a `FixedPoint` of every branch that the event looks at, at one alpha; or curves of these branches,
            between whose points it lies; or a `Near`.
        settings: tolerances.
        sensitivities: whether to derive the event in the numbers of the model, and use the exact slope in alpha to find
            it; otherwise it is found by the secant method, which has less to compile.

    Returns:
        A `Transition`; status `absent` when there is no such event near the start.

    Raises:
        InputError: an unknown event, or a start that does not belong to it.
    """
    what = event_of(event)
    nodes = default_nodes(model) if nodes is None else nodes
    settings = settings or Settings()
    near = near_of(what, start)
    if near is None:
        raise InputError(
            "start", f"must enclose the event, got curves between whose points {event} does not change sign"
        )
    if what.value is None:
        return _fold(event, model, near, nodes, sensitivities)
    zero = zero_near(what, lax.stop_gradient(model), near, nodes, settings, exact=sensitivities)
    return transition_of(event, model, zero, what.branches)


def transition_of(event: str, model: Model, zero: Zero, branches: Sequence[str | None]) -> Transition:
    """What `zero_near` found, as a result; `model` is the caller's, in which it can be differentiated."""
    roots = zero.alpha - zero.value / (zero.slope if zero.by_model is None else zero.by_alpha)
    sensitivities = bars = None
    if zero.by_model is not None:
        each, sensitivities, bars = _derivatives(zero.by_model, zero.by_alpha)
        roots = _with_sensitivities(roots, each, model)
    alpha, held = jnp.mean(zero.alpha), lax.stop_gradient(model)
    states = tuple(FixedPoint(held, alpha, s, b) for s, b in zip(zero.states, branches, strict=True))
    worst = jnp.max(jnp.stack([s.status for s in states]))
    return Transition(
        alpha=jnp.nanmean(roots),
        stderr=error_bar(lax.stop_gradient(roots)),
        sensitivities=sensitivities,
        sensitivities_stderr=bars,
        status=jnp.where(zero.met, worst, Status.absent),
        branches=states,
        event=event,
    )


@eqx.filter_jit
def _derivatives(by_model: Model, by_alpha: jax.Array) -> tuple[Model, Model, Model]:
    """d alpha / d model of every replicate, its mean and its error bar, of the derivatives of what is zero."""
    each = jax.tree.map(lambda g: -g / by_alpha.reshape(-1, *[1] * (g.ndim - 1)), by_model)
    return each, jax.tree.map(lambda a: jnp.nanmean(a, 0), each), jax.tree.map(error_bar, each)


@jax.custom_jvp
def _with_sensitivities(alphas: jax.Array, sensitivities: Model, model: Model) -> jax.Array:
    """Roots (R,), whose first derivatives in the model are the `sensitivities` (leading axis R) found with them."""
    return alphas


@_with_sensitivities.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    alphas, sensitivities, model = primals
    terms = jax.tree.map(
        lambda s, d: jnp.sum((s * d).reshape(alphas.shape[0], -1), 1), _first_order(sensitivities, model), tangents[2]
    )
    return alphas, sum(jax.tree.leaves(terms), jnp.zeros_like(alphas))


@jax.custom_jvp
def _first_order(tree: Any, model: Model) -> Any:
    """A function of the model, as a tree that refuses to be differentiated rather than to pass for a constant."""
    return tree


@_first_order.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise TypeError("transitions have first derivatives only: take differences of `sensitivities` for the second")


def _fold(event: str, model: Model, near: Near, nodes: Rule, sensitivities: bool) -> Transition:
    """A fold, by continuation in arclength."""
    (branch,), held = EVENTS[event].branches, lax.stop_gradient(model)
    alpha, free = float(near.alpha), branch_of(branch).free(held)
    x = jax.tree.map(lambda a: a.mean(0), for_each(near.overlaps[0], nodes.replicates))
    limits = float(near.low) or 0.5 * alpha, float(near.high) if np.isfinite(near.high) else 1.5 * alpha
    found = fold_near(held, alpha, branch, nodes, x, limits)
    if found is None:
        nan = jnp.full((), jnp.nan, model.lam.dtype)
        return Transition(nan, nan, None, None, jnp.asarray(int(Status.absent)), (), event)
    alphas, state = found
    by_model, by_alpha = None, jnp.full_like(alphas, jnp.nan)
    if sensitivities:
        by_model, by_alpha = _fold_gradients(held, alphas, nodes, state.overlaps, free)
    zero = Zero(alphas, (state,), jnp.zeros_like(alphas), by_model, by_alpha, 1.0, True)
    return transition_of(event, model, zero, (branch,))


@eqx.filter_jit
def _fold_gradients(
    model: Model, alphas: jax.Array, nodes: Rule, xs: Overlaps, free: jax.Array
) -> tuple[Model, jax.Array]:
    return lax.map(lambda args: fold_gradient(model, args[0], args[1], args[2], free), (alphas, nodes.stack, xs))
