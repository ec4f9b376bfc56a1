"""The paper's transitions: where the global minimum changes its mechanism, and where it beats the baseline."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..averages.rule import Rule
from ..errors import array_of, require_choice, require_kind
from ..model import Model
from ..overlaps import PAIR, Overlaps
from ..results import Settings, Status
from ..theory.pool import Path, run_one
from ..theory.solve import Problem
from .events import EVENTS, LOOKS, Event, Near, Start, Transition, Zero, event_of, near_of, transition_of, zero_near
from .follow import pair_free, pair_start
from .inputs import prepared
from .secant import zero_between

ALPHA_L = "alpha_l"  # no name of `EVENTS`, but one of its baselines or alpha_c
RANGE = (0.1, 4.0)
_COARSE = 1e-3  # relative accuracy of a transition on coarse averages, which are themselves right to about that
# Stop when the relative Newton step in alpha is below this: the next step would be smaller than the error that
# `Settings.tol` leaves in the states.
_FINAL = 1e-5


def critical_alpha(
    model: Model,
    nodes: Rule | None = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: Start | None = None,
    settings: Settings | None = None,
) -> Transition:
    """Sample complexity alpha_c at which the positional and the semantic branch have the same training loss.

    Below it the global minimum is positional, above it semantic. `jax.grad` of it works (first derivatives). It does
    not run under `jit` or `vmap`: `sweep` finds it for many models at once. The derivative in any number p of the model
    is the envelope formula
    ``-(d_p Delta Phi) / (d_alpha Delta Phi)`` at fixed overlaps, which the jumps of the proximal operator leave exact.

    Args:
        model: attention layer and data.
        nodes: averaging rule; by default `default_nodes`.
        bracket: range of alpha in which the crossing is looked for.
        start: where it is expected: the positional and the semantic `FixedPoint` at one alpha near it, such as the
            `branches` of a neighbouring model's transition, or both branches as curves; by default it is looked for in
            the bracket, on coarse averages.
        settings: tolerances; by default `Settings()`.

    Returns:
        A `Transition` with both branches at alpha_c. Status `absent` when no crossing lies in the bracket; `alpha` is
        then the end that it would lie beyond, and `reason` says what is there instead.

    Raises:
        InputError: a bracket that is not 0 < low < high; nodes, settings or a start of another kind.
    """
    nodes, settings, ends = _prepared(model, nodes, bracket, settings)
    near = None if start is None else near_of(EVENTS["alpha_c"], start, *ends)
    zero = run_one(critical_path(lax.stop_gradient(model), nodes, ends, near, settings))
    return transition_of(EVENTS["alpha_c"], model, zero)


def critical_path(
    model: Model, nodes: Rule, bracket: tuple[float, float], near: Near | None, settings: Settings
) -> Path:
    """Path of `critical_alpha`, to a `Zero`."""
    met = True
    if near is None:
        near, met = yield from _coarse_alpha_c(model, nodes, bracket, settings)
    zero = yield from zero_near(
        EVENTS["alpha_c"], model, near, nodes, settings, exact=True, tol=_FINAL, looks=_looks(met)
    )
    return zero._replace(met=zero.met and met)


def linear_crossing(
    model: Model,
    transition: Transition | None = None,
    nodes: Rule | None = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: Start | None = None,
    settings: Settings | None = None,
) -> Transition:
    """Sample complexity alpha_l at which the global minimum starts to beat the linear baseline (Result 5.1).

    It lies on the semantic branch when the test error there still exceeds the baseline at alpha_c, on the positional
    one when the baseline is beaten before alpha_c, and equals alpha_c when the exchange of the minima itself crosses
    it. `jax.grad` of it works (first derivatives). The derivatives are those of the implicit function theorem and
    contain the jumps of the proximal operator.

    Args:
        transition: the result of `critical_alpha` for the same model; by default it is found first.
        start: where it is expected: the `FixedPoint` of the branch that it lies on, or both branches as curves; by
            default looked for.
        model, nodes, bracket, settings: as there.

    Returns:
        A `Transition` with the one branch that crosses; without alpha_c, what is known of alpha_c.

    Raises:
        InputError: as there; a transition of another kind, a model without `target`.
    """
    nodes, settings, bracket = _prepared(model, nodes, bracket, settings)
    event_of("semantic baseline", model)  # the model must have a target
    if transition is None:
        transition = critical_alpha(model, nodes, bracket=bracket, settings=settings)
    require_kind(transition, "transition", Transition, "the result of critical_alpha")
    require_choice(transition.event, "transition.event", ["alpha_c"])
    held, known = lax.stop_gradient((model, transition))
    if not known.ok:  # which minimum is global is not known
        return dataclasses.replace(transition, event=ALPHA_L)
    crossing = _Crossing.of(held, known, bracket)
    near = None if start is None else near_of(crossing.event, start, *crossing.bracket)
    zero = run_one(crossing.path(held, nodes, near, settings))
    return crossing.transition(model, transition, zero)


def crossing_path(
    model: Model, transition: Transition, nodes: Rule, bracket: tuple[float, float], settings: Settings
) -> Path:
    """Path of `linear_crossing` of concrete numbers, to a `Transition`."""
    if not transition.ok:
        return dataclasses.replace(transition, event=ALPHA_L)
    crossing = _Crossing.of(model, transition, bracket)
    zero = yield from crossing.path(model, nodes, None, settings)
    return crossing.transition(model, transition, zero)


class _Crossing(NamedTuple):
    """Where alpha_l lies: on a branch, whose state at alpha_c is `start`, or at alpha_c itself.

    Attributes:
        owner: see `baseline_owner`.
        event: of the branch.
        start: overlaps of the branch at alpha_c.
        free: what the branch leaves free.
        bracket: range of alpha.
    """

    owner: int
    event: Event
    start: Overlaps
    free: Any
    bracket: tuple[float, float]

    @classmethod
    def of(cls, model: Model, transition: Transition, bracket: tuple[float, float]) -> _Crossing:
        """By which of the two states at alpha_c beats the baseline."""
        early, late = (bool(b.gen_error < b.gen_error_linear) for b in transition.branches)
        alpha, k = float(transition.alpha), 0 if early else 1
        ends = (bracket[0], alpha) if early else (alpha, max(bracket[1], 1.01 * alpha))
        start = jax.tree.map(np.asarray, transition.branches[k].overlaps)
        return cls(int(baseline_owner(early, late)), EVENTS[f"{PAIR[k]} baseline"], start, pair_free(model)[k], ends)

    def path(self, model: Model, nodes: Rule, near: Near | None, settings: Settings) -> Path:
        """Path to where the branch starts to beat the baseline."""
        met = True
        if near is None:
            near, met = yield from _coarse_alpha_l(model, nodes, self.start, self.free, self.bracket, settings)
        zero = yield from zero_near(self.event, model, near, nodes, settings, exact=True, tol=_FINAL, looks=_looks(met))
        return zero._replace(met=zero.met and met)

    def transition(self, model: Model, critical: Transition, zero: Zero) -> Transition:
        """alpha_l, with the state of the branch."""
        crossing = transition_of(self.event._replace(branches=(None,)), model, zero)
        if self.owner != 1:
            return dataclasses.replace(crossing, event=ALPHA_L)
        names = "alpha", "stderr", "sensitivities", "sensitivities_stderr", "status"
        exchanged = {name: getattr(critical, name) for name in names}
        return dataclasses.replace(crossing, event=ALPHA_L, **exchanged)


def baseline_owner(early: Any, late: Any) -> Any:
    """Where the global minimum starts to beat the linear baseline: 0 positional, 1 at alpha_c itself, 2 semantic.

    Args:
        early, late: whether the positional and the semantic state beat it at alpha_c.
    """
    return jnp.where(early, 0, jnp.where(late, 1, 2))


def _prepared(
    model: Model, nodes: Rule | None, bracket: tuple, settings: Settings | None
) -> tuple[Rule, Settings, tuple[float, float]]:
    nodes, settings = prepared(model, nodes, settings)
    low, high = array_of(bracket, "bracket", "two numbers 0 < low < high", lambda a: a.size == 2 and 0 < a[0] < a[1])
    return nodes, settings, (float(low), float(high))


def _looks(met: bool) -> int:
    """Maximum number of evaluations on the full rule: only the end of the bracket if there was no coarse zero."""
    return LOOKS if met else 1


def _coarse_alpha_c(model: Model, nodes: Rule, bracket: tuple[float, float], settings: Settings) -> Path:
    """Path of alpha_c and both branches there on cheap averages, and whether it lies in the bracket."""
    frees, starts = pair_free(model), [jax.tree.map(np.asarray, start) for start in pair_start(model)]

    def difference(alpha: float, xs: list[Overlaps]) -> Path:
        """Positional minus semantic loss; where only one of the branches exists, that one wins."""
        place = np.asarray(alpha, model.lam.dtype)
        problems = [Problem(model, place, nodes, free, settings) for free in frees]
        states = yield [p.coarsely(x) for p, x in zip(problems, xs, strict=True)]
        loss, there = np.array([s.train_loss for s in states]), [bool(s.has_state) for s in states]
        alone = (1.0 if there[1] and not there[0] else -1.0) * np.mean(np.abs(loss))
        # A branch that is not here is looked for from its start the next time.
        settled = [s.status <= Status.stalled for s in states]
        xs = [s.overlaps if ok else x for s, ok, x in zip(states, settled, starts, strict=True)]
        return loss[0] - loss[1] if all(there) else alone, xs

    alpha, xs, met = yield from zero_between(difference, *bracket, starts, _COARSE)
    return Near(alpha, tuple(xs)), met


def _coarse_alpha_l(
    model: Model, nodes: Rule, x0: Overlaps, free: Any, bracket: tuple[float, float], settings: Settings
) -> Path:
    """Path of where a branch starts to beat the linear baseline on cheap averages, its state there, and if it does."""

    def excess(alpha: float, x: Overlaps) -> Path:
        state = yield Problem(model, np.asarray(alpha, model.lam.dtype), nodes, free, settings).coarsely(x)
        return state.gen_error_linear - state.gen_error, state.overlaps

    alpha, x, met = yield from zero_between(excess, *bracket, x0, _COARSE)
    return Near(alpha, (x,)), met
