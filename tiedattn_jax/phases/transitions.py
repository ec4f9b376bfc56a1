"""The doors to events in alpha: the paper's transitions, any event near a guess, and the ends of a branch.

At alpha_c the positional and the semantic branch have the same training loss, so that the global minimum changes its
mechanism there. At alpha_l the test error of the global minimum falls below that of the linear baseline; it is alpha_c,
or the event of a branch on one side of it. Both are first located on the coarse replicate of the averaging rule, by a
search in the bracket, and then on all replicates, by Newton's method from there. Arguments are checked here, and not
again inside; see `locate` for the search.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..averages.recipes import SIZES, AnyNodes
from ..base.errors import InputError, as_flag, require, require_choice, require_kind
from ..base.progress import Progress
from ..base.results import Settings, Status
from ..model.model import Model
from ..model.overlaps import BRANCHES, PAIR
from ..theory.engine import PathMaker, published, run_one
from ..theory.paths import Path
from ..theory.quantities import Quantity
from ..theory.states import FixedPoint
from .events import ALPHA_L, CROSSING, EVENTS, as_event, event_of
from .family import Family, ends_of, prepared
from .follow import CURVE_SETTINGS, along_alpha, pair_start, walk
from .locate import Guess, Start, crossings, event_path, guess_of, is_usable, number_of, transition_of, zero_path
from .table import Table

RANGE = (0.1, 4.0)  # default bracket of alpha
# The search on all replicates stops when the relative Newton step in alpha is below this. The next step would be
# smaller than the error that `Settings.tol` leaves in the states.
_FINAL = 1e-5
# Fraction of the largest order parameter along a curve. If the last one before an end exceeds it, the order parameter
# does not fall to zero like a square root there, and we search for a fold.
_NOT_SMALL = 0.7
# Largest ratio of neighbouring alphas of a curve between which one event is expected at most.
_WIDEST = 1.26


@published
def critical_alpha(
    model: Model,
    nodes: AnyNodes = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: Start | None = None,
    settings: Settings | None = None,
    progress: Progress = None,
) -> PathMaker[Quantity]:
    """Find the sample complexity alpha_c at which the positional and the semantic branch have the same training loss.

    The global minimum is positional below alpha_c and semantic above it. `jax.grad` of this function works (first
    derivatives). `jit` and `vmap` do not; `sweep` treats many models at once. The derivative in any number p of the
    model is the envelope formula ``-(d_p Delta Phi) / (d_alpha Delta Phi)`` at fixed overlaps, which stays exact when
    the proximal operator jumps.

    Args:
        model: attention layer and data.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.
        bracket: range of alpha that is searched if there is no start, or if curves do not cross in it. It does not
            limit a search that starts from states.
        start: guess for the crossing: the positional and the semantic `FixedPoint` at one alpha near it, such as the
            `branches` of a neighbouring model's transition, or both branches as curves, the tables that `sweep`
            returns. By default the bracket is searched on the coarse replicate.
        settings: tolerances; by default `Settings()`.
        progress: as in `solve`.

    Returns:
        A `Quantity` with both branches at alpha_c. If no crossing lies in the bracket, its status is `absent`,
        `alpha` is NaN, `ended_at` is the end of the bracket beyond which the crossing would lie, and `reason` says what
        was found there.

    Raises:
        InputError: the bracket is not 0 < low < high; nodes, settings or start are of the wrong kind.
    """
    family, ends = prepared(model, nodes, settings), ends_of(bracket)
    guess = guess_of(EVENTS["alpha_c"], start, *ends)

    def path(model: Model, alpha: None) -> Path:
        zero = yield from _alpha_c(family.of(model), ends, guess)
        return transition_of(EVENTS["alpha_c"], model, zero)

    return path


@published
def linear_crossing(
    model: Model,
    transition: Quantity | None = None,
    nodes: AnyNodes = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: Start | None = None,
    settings: Settings | None = None,
    progress: Progress = None,
) -> PathMaker[Quantity]:
    """Find the sample complexity alpha_l at which the global minimum starts to beat the linear baseline (Result 5.1).

    There are three cases. If the positional state beats the baseline at alpha_c, alpha_l lies on the positional branch
    below alpha_c. If only the semantic state does, alpha_l equals alpha_c. If neither does, alpha_l lies on the
    semantic branch above alpha_c. `jax.grad` of this function works (first derivatives). On a branch, the implicit
    function theorem gives the derivatives, which contain the jumps of the proximal operator.

    Args:
        model: as in `critical_alpha`; it must have a `target`.
        transition: the result of `critical_alpha` for the same model; by default it is computed first.
        nodes, settings: as in `critical_alpha`.
        progress: as in `solve`.
        bracket: range of alpha for alpha_c if it is computed here, and for alpha_l on its side of alpha_c.
        start: guess for the crossing: the `FixedPoint` of the branch that alpha_l lies on, or that branch as a curve.
            By default the bracket is searched on the coarse replicate.

    Returns:
        A `Quantity` with the branch that crosses the baseline. If there is no alpha_c, it lies on the branch that is
        the global minimum beyond the alpha where the search for alpha_c ended. If a branch was not settled there, or
        is not the global minimum at the crossing, the `transition` itself, renamed to alpha_l.

    Raises:
        InputError: as `critical_alpha`; the transition is of the wrong kind, or the model has no `target`.
    """
    family, ends = prepared(model, nodes, settings), ends_of(bracket)
    event_of("semantic baseline", family.model)  # the model must have a target
    if transition is not None:
        require_kind(transition, "transition", Quantity, "the result of critical_alpha")
        require_choice(transition.event, "transition.event", ["alpha_c"])

    def path(model: Model, alpha: None) -> Path:
        here, critical = family.of(model), transition
        if critical is None:
            critical = transition_of(EVENTS["alpha_c"], model, (yield from _alpha_c(here, ends)))
        elif critical.branches and not _same_numbers(critical.state.model, here.model):
            raise InputError("transition", "must be the result of critical_alpha for the same model")
        return (yield from _alpha_l(model, critical, here, ends, start))

    return path


def _same_numbers(first: Model, second: Model) -> bool:
    """Return whether two models have the same numbers, which jax may trace in the first one."""
    a, b = map(jax.tree.leaves, (lax.stop_gradient(first), second))
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@published
def find_event(
    model: Model,
    event: str,
    nodes: AnyNodes = None,
    *,
    start: Start | None = None,
    settings: Settings | None = None,
    sensitivities: bool = True,
    progress: Progress = None,
) -> PathMaker[Quantity]:
    """Find an event, with its exact derivatives in every number of the model.

    "alpha_c": the losses of the positional and the semantic branch are equal. "semantic baseline", "positional
    baseline": the branch's test error falls below that of the linear baseline. "semantic instability", "positional
    instability": the branch stops being a minimum. "semantic pitchfork", "positional pitchfork": it bifurcates from the
    uninformed state. "semantic fold", "positional fold": it turns back. "crossing": the losses of two states are equal
    that `start` gives, of any branches or of none, also for a loss that is not even.

    Args:
        model: attention layer and data.
        event: one of these names.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.
        start: a `FixedPoint` of every branch of the event, all at one alpha; or curves of these branches with the event
            between two of their points. By default the event is searched for alpha from .05 to 3; only a crossing needs
            its two states.
        settings: tolerances.
        progress: as in `solve`.
        sensitivities: whether to differentiate the event in the numbers of the model and to search with the exact slope
            in alpha. Otherwise the secant method finds the event, with less to compile.

    Returns:
        A `Quantity`; status `absent` when there is no such event near the start.

    Raises:
        InputError: the event is unknown, or the start does not belong to it; or there is no start, and the event does
            not happen.
    """
    family = prepared(model, nodes, settings, even=event != CROSSING)
    exact, definition = as_flag(sensitivities, "sensitivities"), event_of(event, family.model)
    guess = guess_of(definition, start)
    if guess is None and start is not None:
        text = f"must enclose the event, got curves between whose points {event} does not change sign"
        raise InputError("start", text)

    def path(model: Model, alpha: None) -> Path:
        here = family.of(model)
        if guess is None and event == "alpha_c":
            zero = yield from _alpha_c(here, RANGE)
        else:
            zero = yield from event_path(definition, here, guess, exact=exact)
        return transition_of(definition, model, zero)

    return path


def branch_ends(
    curve: Table,
    nodes: AnyNodes = None,
    *,
    settings: Settings | None = None,
    sensitivities: bool = False,
    progress: Progress = None,
) -> list[Quantity]:
    """Find all ends of a branch, and its losses of stability, in the range of its curve.

    The ends do not depend on the points of the curve: where neighbouring alphas differ by more than 26 %, points are
    added between them.

    A branch disappears in one of two ways. It ends in a pitchfork where its own order parameter starts to grow on the
    uninformed branch m = theta = 0. If it reaches further than that, it ends in a fold, which continuation in arclength
    locates. A branch turns unstable where the other order parameter starts to grow on it. The growth is an eigenvalue
    of the linearised map; it uses the score function of the Gaussian fields and thus stays exact when the proximal
    operator jumps.

    Every end is the `Quantity` of an event with labels: `kind` "pitchfork" (the order parameter falls continuously to
    zero), "instability" (the other order parameter starts to grow), or "fold" (the solution is lost at a finite order
    parameter); `direction`, the order parameter concerned, "m" or "theta"; `side`, the "lower" or "upper" end of the
    stable range. A fold that continuation did not find is the middle between the neighbouring points, its error bar is
    half their distance, and its status is `max_steps`.

    Args:
        curve: the positional or the semantic branch.
        nodes: recipe of the averages, or number of nodes; by default `SIZES["curve"]`.
        settings: tolerances; by default `CURVE_SETTINGS`.
        progress: as in `solve`.
        sensitivities: whether to differentiate the ends in the numbers of the model, see `find_event`.

    Raises:
        InputError: the curve is of another branch or has no points; nodes or settings are of the wrong kind.
    """
    require_kind(curve, "curve", Table, "what sweep returns")
    require_choice(curve.question, "curve.question", PAIR)
    require(len(curve.points) > 0, "curve.points", [], "one or more")
    model, exact = curve.points[0].model, as_flag(sensitivities, "sensitivities")
    family = prepared(model, nodes, settings, CURVE_SETTINGS, size=SIZES["curve"])
    return run_one(_Ends(curve, family, exact).find_all(), progress)


def _alpha_c(family: Family, bracket: tuple[float, float], guess: Guess | None = None) -> Path:
    """Path of `critical_alpha`; returns a `Reading`."""
    starts = pair_start(family.model) if guess is None else ()
    return (yield from zero_path(EVENTS["alpha_c"], family, guess, bracket=bracket, starts=starts, tol=_FINAL))


def _alpha_l(
    model: Model, critical: Quantity, family: Family, bracket: tuple[float, float], start: Start | None = None
) -> Path:
    """Path of `linear_crossing`; returns a `Quantity`.

    If alpha_l equals alpha_c, all numbers but the state are those of alpha_c. The semantic state at alpha_c beats the
    baseline already, so the search on its branch ends there, and only serves to solve this state.

    If the losses do not cross, one branch is the global minimum on its side of the alpha where that search ended.
    Alpha_l is then searched there, and counts if the other branch has no state below it.

    Args:
        model: the caller's model, which derivatives are taken in.
        critical: the result of `critical_alpha`.
    """
    fixed = lax.stop_gradient(critical)
    if not (fixed.ok or (fixed.status == Status.absent and fixed.branches)):  # the global minimum is unknown
        return as_event(critical, ALPHA_L, critical.branches)
    if fixed.ok:
        alpha = float(fixed.alpha)
        early, late = (bool(b.gen_error < b.gen_error_linear) for b in fixed.branches)
    else:
        alpha, (positional, semantic) = float(fixed.ended_at), (_loss_if_any(b) for b in fixed.branches)
        early, late = positional < semantic, False
    branch = 0 if early else 1
    event = EVENTS[f"{PAIR[branch]} baseline"]
    # The caller's alpha_c may lie beyond the end of the bracket; the range on either side of it must not be empty.
    ends = (min(bracket[0], 0.99 * alpha), alpha) if early else (alpha, max(bracket[1], 1.01 * alpha))
    guess, first = None if start is None else guess_of(event, start, *ends), pair_start(family.model)
    known = fixed.branches[branch]
    starts = [known.overlaps if known.exists else first[branch]]
    zero = yield from zero_path(event, family, guess, bracket=ends, starts=starts, tol=_FINAL)
    # The state has no branch name, whichever branch it is.
    crossing = transition_of(event._replace(branches=(None,)), model, zero)
    if crossing.ok and not fixed.ok:
        rival = family.at(float(zero.at), PAIR[1 - branch])
        states = yield from rival.solve_from_far(first[1 - branch])
        if _loss_if_any(FixedPoint(family.model, zero.at, states, PAIR[1 - branch])) < crossing.state.train_loss:
            return as_event(critical, ALPHA_L, critical.branches)
    numbers = critical if late and not early else crossing
    return as_event(numbers, ALPHA_L, crossing.branches)


def _loss_if_any(state: FixedPoint) -> float:
    """Return the training loss of a branch, infinite if it does not exist."""
    return float(state.train_loss) if state.exists else np.inf


class _Ends:
    """The search for the ends of one branch; the methods with paths return what they find."""

    def __init__(self, curve: Table, family: Family, exact: bool):
        self.curve, self.family, self.exact = curve, family, exact
        self.name = str(curve.question)
        self.order = str(BRANCHES[curve.question].order)
        self.other_order = "m" if self.order == "theta" else "theta"
        self.instability_event = EVENTS[f"{self.name} instability"]

    @property
    def resolved(self) -> list[FixedPoint]:
        """The points at which growth is reliable."""
        return [p for p in self.curve.points if is_usable(p)]

    def find_all(self) -> Path:
        """Path that finds all ends; returns them in the order of alpha."""
        yield from self.fill()
        # The event's number rises with alpha where the branch is unstable below the event.
        guesses = crossings(self.instability_event, [self.curve])
        paths = [self.instability(guess, "lower" if guess.slope > 0 else "upper") for guess in guesses]
        for p, q in pairwise(self.curve.points):
            if bool(p.exists) != bool(q.exists):
                paths.append(self.disappearance(*((q, p, "lower") if q.exists else (p, q, "upper"))))
        ends = yield paths
        return sorted((end for group in ends for end in group), key=lambda end: end.alpha)

    def fill(self) -> Path:
        """Path that adds points to the curve where neighbours are so far apart that events between them can hide."""
        known = sorted(self.curve.points, key=lambda point: float(point.alpha))
        counts = [np.ceil(np.log(q.alpha / p.alpha) / np.log(_WIDEST)) for p, q in pairwise(known)]
        gaps = zip(pairwise(known), counts, strict=True)
        alphas = [a for (p, q), n in gaps for a in np.geomspace(p.alpha, q.alpha, int(n) + 1)[1:-1]]
        added = []
        if alphas:
            places = along_alpha(self.family.model, alphas[::-1])
            for step in walk(self.family, places, self.name):
                added.append((yield from step))
        self.curve = Table.of_states(self.name, sorted([*known, *added], key=lambda point: float(point.alpha)))

    def instability(self, guess: Guess, side: str) -> Path:
        """Path that finds where the other order parameter starts to grow; returns a list of one end."""
        transition = yield from self.find_event("instability", guess)
        if not jnp.isfinite(transition.alpha):
            transition = _between(transition, float(guess.low), float(guess.high))
        return [_end(transition, "instability", self.other_order, side)]

    def find_event(self, kind: str, guess: Guess) -> Path:
        event = EVENTS[f"{self.name} {kind}"]
        zero = yield from event_path(event, self.family, guess, exact=self.exact)
        return transition_of(event, self.family.model, zero)

    def disappearance(self, state: FixedPoint, absent_point: FixedPoint, side: str) -> Path:
        """Path that finds the ends between a state and an alpha at which the branch does not exist."""
        # The uninformed states at both alphas.
        outer, inner = yield [self.uninformed(e, state) for e in (absent_point, state)]
        guesses = []
        if self.growth(outer, self.order) < 1 < self.growth(inner, self.order):
            guesses = crossings(EVENTS[f"{self.name} pitchfork"], [Table.of_states("uninformed", [outer, inner])])
        fork = (yield from self.find_event("pitchfork", guesses[0])) if guesses else None
        fork = fork if fork is not None and jnp.isfinite(fork.alpha) else None
        if fork is None or self.size(state) > _NOT_SMALL * max(self.size(e) for e in self.curve.points if e.exists):
            # The order parameter is not small next to the end, so the branch may turn back in a fold beyond the fork.
            fold = yield from self.fold(state, absent_point)
            outward = 1 if side == "upper" else -1
            if fork is None or outward * (fold.alpha - fork.alpha) > 3 * np.hypot(fold.stderr, fork.stderr):
                return [_end(fold, "fold", self.order, side)]
        ends = [_end(fork, "pitchfork", self.order, side)]
        # At the pitchfork the branch coincides with the uninformed state and is as unstable.
        nearest = min(self.resolved, key=lambda e: abs(float(e.alpha) - float(fork.alpha)), default=state)
        if self.growth(nearest, self.other_order) < 1 < self.growth(fork.state, self.other_order):
            a, b = float(fork.alpha), float(nearest.alpha)
            g, h = (number_of(self.instability_event, [p]) for p in (fork.state, nearest))
            low, high = sorted((a, b))
            guess = Guess(a + g / (g - h) * (b - a), (nearest.replicates.overlaps,), (h - g) / (b - a), low, high, b)
            ends += yield from self.instability(guess, side)
        return ends

    def uninformed(self, point: FixedPoint, state: FixedPoint) -> Path:
        setting = self.family.at(float(point.alpha), "uninformed")
        states = yield from setting.solve_replicates(state.replicates.overlaps)
        return FixedPoint(point.model, point.alpha, states, "uninformed")

    def fold(self, state: FixedPoint, absent_point: FixedPoint) -> Path:
        a, b = sorted((float(state.alpha), float(absent_point.alpha)))
        margin = 0.5 * (b - a)
        low, high = max(a - margin, 0.5 * a), b + margin
        guess = Guess(float(state.alpha), (state.replicates.overlaps,), low=low, high=high)
        fold = yield from self.find_event("fold", guess)
        return fold if bool(fold.ok) else _between(fold, a, b)

    def growth(self, point: FixedPoint, order: str) -> float:
        return float(getattr(point.diagnostics, f"growth_{order}"))

    def size(self, point: FixedPoint) -> float:
        return float(jnp.max(jnp.abs(getattr(point.overlaps, self.order))))


def _end(transition: Quantity, kind: str, direction: str, side: str) -> Quantity:
    """Return an event as the end of a branch."""
    return dataclasses.replace(transition, labels=(("kind", kind), ("direction", direction), ("side", side)))


def _between(transition: Quantity, low: float, high: float) -> Quantity:
    """Return an event that lies between two alphas but was not located; half of their distance is its error bar."""
    middle, margin, status = 0.5 * (low + high), 0.5 * (high - low), int(Status.max_steps)
    numbers = {"value": middle, "stderr": margin, "status": status}
    return dataclasses.replace(transition, **jax.tree.map(jnp.asarray, numbers), further={}, note="")
