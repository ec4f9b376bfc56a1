"""The paper's transitions: alpha_c, where the global minimum changes its mechanism, and alpha_l of the baseline.

At alpha_c the positional and the semantic branch have the same training loss. At alpha_l the test error of the global
minimum falls below that of the linear baseline. Both are first located on the coarse replicate of the averaging rule,
by a search in the bracket, and then on all replicates, by Newton's method from there.

A `Path` is a generator: it yields the solves that it needs and is sent their states; `run_one` runs it, see
`theory.pool`. "Returns" in the docstring of a path means the value that the generator returns.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Float

from ..averages.recipes import AnyNodes
from ..averages.rules import Rule
from ..base.arrays import GivenArray
from ..base.errors import array_of, require_choice, require_kind
from ..base.report import Settings, Status
from ..model.model import Model
from ..model.overlaps import PAIR, Overlaps
from ..theory.engine import run_one
from ..theory.paths import Path
from ..theory.solve import Problem
from .events import EVENTS, Event, Transition, event_of
from .follow import pair_free, pair_start
from .inputs import prepared
from .locate import MAX_EVALUATIONS, Guess, Start, Zero, find_zero, guess_of, transition_of
from .questions import ALPHA_L, baseline_branch
from .secant import zero_between

RANGE = (0.1, 4.0)  # default bracket of alpha
_COARSE = 1e-3  # relative tolerance of alpha on the coarse replicate, whose own error is about as large
# The search on all replicates stops when the relative Newton step in alpha is below this. The next step would be
# smaller than the error that `Settings.tol` leaves in the states.
_FINAL = 1e-5


def critical_alpha(
    model: Model,
    nodes: AnyNodes = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: Start | None = None,
    settings: Settings | None = None,
) -> Transition:
    """Find the sample complexity alpha_c at which the positional and the semantic branch have the same training loss.

    The global minimum is positional below alpha_c and semantic above it. `jax.grad` of this function works (first
    derivatives). `jit` and `vmap` do not; `sweep` treats many models at once. The derivative in any number p of the
    model is the envelope formula ``-(d_p Delta Phi) / (d_alpha Delta Phi)`` at fixed overlaps, which stays exact when
    the proximal operator jumps.

    Args:
        model: attention layer and data.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.
        bracket: range of alpha that is searched.
        start: guess for the crossing: the positional and the semantic `FixedPoint` at one alpha near it, such as the
            `branches` of a neighbouring model's transition, or both branches as curves. By default the bracket is
            searched on the coarse replicate.
        settings: tolerances; by default `Settings()`.

    Returns:
        A `Transition` with both branches at alpha_c. If no crossing lies in the bracket, its status is `absent`,
        `alpha` is NaN, `ended_at` is the end of the bracket beyond which the crossing would lie, and `reason` says what
        was found there.

    Raises:
        InputError: the bracket is not 0 < low < high; nodes, settings or start are of the wrong kind.
    """
    nodes, settings, ends = _prepared(model, nodes, bracket, settings)
    guess = None if start is None else guess_of(EVENTS["alpha_c"], start, *ends)
    zero = run_one(critical_path(lax.stop_gradient(model), nodes, ends, guess, settings))
    return transition_of(EVENTS["alpha_c"], model, zero)


def critical_path(
    model: Model, nodes: Rule, bracket: tuple[float, float], guess: Guess | None, settings: Settings
) -> Path:
    """Path of `critical_alpha` for concrete numbers; returns a `Zero`.

    Without a guess, the coarse search gives one. If it finds no crossing in the bracket, the states are solved at the
    end of the bracket only, and the `Zero` has not converged.
    """
    in_bracket = True
    if guess is None:
        guess, in_bracket = yield from _coarse_alpha_c(model, nodes, bracket, settings)
    event, limit = EVENTS["alpha_c"], _max_evaluations(in_bracket)
    zero = yield from find_zero(event, model, guess, nodes, settings, exact=True, tol=_FINAL, max_evaluations=limit)
    return zero._replace(converged=zero.converged and in_bracket)


def linear_crossing(
    model: Model,
    transition: Transition | None = None,
    nodes: AnyNodes = None,
    *,
    bracket: tuple[float, float] = RANGE,
    start: Start | None = None,
    settings: Settings | None = None,
) -> Transition:
    """Find the sample complexity alpha_l at which the global minimum starts to beat the linear baseline (Result 5.1).

    There are three cases. If the positional state beats the baseline at alpha_c, alpha_l lies on the positional branch
    below alpha_c. If only the semantic state does, alpha_l equals alpha_c. If neither does, alpha_l lies on the
    semantic branch above alpha_c. `jax.grad` of this function works (first derivatives). On a branch, the implicit
    function theorem gives the derivatives, which contain the jumps of the proximal operator.

    Args:
        model: as in `critical_alpha`; it must have a `target`.
        transition: the result of `critical_alpha` for the same model; by default it is computed first.
        nodes, settings: as in `critical_alpha`.
        bracket: range of alpha for alpha_c if it is computed here, and for alpha_l on its side of alpha_c.
        start: guess for the crossing: the `FixedPoint` of the branch that alpha_l lies on, or that branch as a curve.
            By default the bracket is searched on the coarse replicate.

    Returns:
        A `Transition` with the branch that crosses the baseline. If alpha_c was not found, the `transition` itself,
        renamed to alpha_l.

    Raises:
        InputError: as `critical_alpha`; the transition is of the wrong kind, or the model has no `target`.
    """
    nodes, settings, bracket = _prepared(model, nodes, bracket, settings)
    event_of("semantic baseline", model)  # the model must have a target
    if transition is None:
        transition = critical_alpha(model, nodes, bracket=bracket, settings=settings)
    require_kind(transition, "transition", Transition, "the result of critical_alpha")
    require_choice(transition.event, "transition.event", ["alpha_c"])
    fixed_model, critical = lax.stop_gradient((model, transition))
    if not critical.ok:  # without alpha_c, the global minimum is unknown
        return dataclasses.replace(transition, event=ALPHA_L)
    crossing = _Crossing.of(fixed_model, critical, bracket)
    guess = None if start is None else guess_of(crossing.event, start, *crossing.bracket)
    zero = run_one(crossing.path(fixed_model, nodes, guess, settings))
    return crossing.transition(model, transition, zero)


def crossing_path(
    model: Model, transition: Transition, nodes: Rule, bracket: tuple[float, float], settings: Settings
) -> Path:
    """Path of `linear_crossing` for concrete numbers; returns a `Transition`.

    Args:
        transition: the result of `critical_alpha`.
    """
    if not transition.ok:
        return dataclasses.replace(transition, event=ALPHA_L)
    crossing = _Crossing.of(model, transition, bracket)
    zero = yield from crossing.path(model, nodes, None, settings)
    return crossing.transition(model, transition, zero)


class _Crossing(NamedTuple):
    """The search for alpha_l, which lies on a branch or at alpha_c itself.

    If alpha_l equals alpha_c, the branch is the semantic one. The state at alpha_c beats the baseline already, so
    the search on it ends there, and only serves to solve this state.

    Attributes:
        owner: where alpha_l lies, 0, 1 or 2 as in `baseline_branch`.
        event: the event at which the branch starts to beat the baseline.
        start: overlaps of the branch at alpha_c.
        free: 1.0 for theta and for m if the branch leaves them free, else 0.0.
        bracket: range of alpha that is searched: the part of the caller's on the side of alpha_c where the branch is
            the global minimum.
    """

    owner: int
    event: Event
    start: Overlaps
    free: Float[GivenArray, " 2"]
    bracket: tuple[float, float]

    @classmethod
    def of(cls, model: Model, transition: Transition, bracket: tuple[float, float]) -> _Crossing:
        """Choose the branch and the bracket by which of the two states at alpha_c beat the baseline.

        Args:
            transition: alpha_c, with the positional and the semantic state there.
            bracket: range of alpha of the caller.
        """
        positional_beats, semantic_beats = (bool(b.gen_error < b.gen_error_linear) for b in transition.branches)
        alpha, k = float(transition.alpha), 0 if positional_beats else 1
        # The caller's alpha_c may lie beyond the end of the bracket; the range above it must not be empty.
        ends = (bracket[0], alpha) if positional_beats else (alpha, max(bracket[1], 1.01 * alpha))
        start = jax.tree.map(np.asarray, transition.branches[k].overlaps)
        return cls(
            int(baseline_branch(positional_beats, semantic_beats)),
            EVENTS[f"{PAIR[k]} baseline"],
            start,
            pair_free(model)[k],
            ends,
        )

    def path(self, model: Model, nodes: Rule, guess: Guess | None, settings: Settings) -> Path:
        """Path that finds where the branch starts to beat the baseline; returns a `Zero`.

        Without a guess, the coarse search gives one, as in `critical_path`.
        """
        in_bracket = True
        if guess is None:
            guess, in_bracket = yield from _coarse_alpha_l(model, nodes, self.start, self.free, self.bracket, settings)
        event, limit = self.event, _max_evaluations(in_bracket)
        zero = yield from find_zero(event, model, guess, nodes, settings, exact=True, tol=_FINAL, max_evaluations=limit)
        return zero._replace(converged=zero.converged and in_bracket)

    def transition(self, model: Model, critical: Transition, zero: Zero) -> Transition:
        """Return alpha_l as a `Transition` with the state of the branch.

        The state has no branch name, whichever branch it is. If alpha_l equals alpha_c, all numbers but the state are
        those of alpha_c.

        Args:
            model: the caller's model, which derivatives are taken in.
            critical: the result of `critical_alpha`.
            zero: result of `path`.
        """
        crossing = transition_of(self.event._replace(branches=(None,)), model, zero)
        if self.owner != 1:
            return dataclasses.replace(crossing, event=ALPHA_L)
        names = "alpha", "stderr", "sensitivities", "sensitivities_stderr", "status"
        critical_fields = {name: getattr(critical, name) for name in names}
        return dataclasses.replace(crossing, event=ALPHA_L, **critical_fields)


def _prepared(
    model: Model, nodes: AnyNodes, bracket: tuple[float, float], settings: Settings | None
) -> tuple[Rule, Settings, tuple[float, float]]:
    """Check the arguments and fill in defaults; return the rule, the settings and the bracket as two floats."""
    nodes, settings = prepared(model, nodes, settings)
    low, high = array_of(bracket, "bracket", "two numbers 0 < low < high", lambda a: a.size == 2 and 0 < a[0] < a[1])
    return nodes, settings, (float(low), float(high))


def _max_evaluations(in_bracket: bool) -> int:
    """Return the largest number of alphas at which all replicates are solved.

    It is one if the coarse search found no zero in the bracket: the result then only reports the states at its end.
    """
    return MAX_EVALUATIONS if in_bracket else 1


def _coarse_alpha_c(model: Model, nodes: Rule, bracket: tuple[float, float], settings: Settings) -> Path:
    """Path that finds alpha_c on the coarse replicate.

    Returns:
        A `Guess`, and whether there is a crossing inside the bracket; otherwise the guess is an end of the bracket.
    """
    masks, starts = pair_free(model), [jax.tree.map(np.asarray, start) for start in pair_start(model)]

    def difference(alpha: float, xs: list[Overlaps]) -> Path:
        """Path that returns the positional minus the semantic training loss, and starts for the next alpha.

        If only one branch has a state, that branch counts as the lower one: the difference is positive for the
        semantic branch, and negative for the positional one. If neither has a state, it is negative. Its size is then
        the mean size of both losses.

        Args:
            alpha: sample complexity.
            xs: overlaps from which the positional and the semantic branch are searched.
        """
        alpha_array = np.asarray(alpha, model.lam.dtype)
        problems = [Problem(model, alpha_array, nodes, free, settings) for free in masks]
        states = yield [p.coarse_lane(x) for p, x in zip(problems, xs, strict=True)]
        loss, has_state = np.array([s.train_loss for s in states]), [bool(s.has_state) for s in states]
        lone_difference = (1.0 if has_state[1] and not has_state[0] else -1.0) * np.mean(np.abs(loss))
        # The next search for a branch that was not found begins at the start of that branch.
        is_settled = [s.status <= Status.stalled for s in states]
        xs = [s.overlaps if settled else x for s, settled, x in zip(states, is_settled, starts, strict=True)]
        return loss[0] - loss[1] if all(has_state) else lone_difference, xs

    alpha, xs, in_bracket = yield from zero_between(difference, *bracket, starts, _COARSE)
    return Guess(alpha, tuple(xs)), in_bracket


def _coarse_alpha_l(
    model: Model,
    nodes: Rule,
    x0: Overlaps,
    free: Float[GivenArray, " 2"],
    bracket: tuple[float, float],
    settings: Settings,
) -> Path:
    """Path that finds where a branch starts to beat the baseline, on the coarse replicate.

    Args:
        x0: overlaps from which the search at the first alpha starts.
        free: 1.0 for theta and for m if the branch leaves them free, else 0.0.

    Returns:
        As `_coarse_alpha_c`.
    """

    def excess(alpha: float, x: Overlaps) -> Path:
        """Path that returns by how much the test error of the baseline exceeds that of the branch, and the overlaps."""
        state = yield Problem(model, np.asarray(alpha, model.lam.dtype), nodes, free, settings).coarse_lane(x)
        return state.gen_error_linear - state.gen_error, state.overlaps

    alpha, x, in_bracket = yield from zero_between(excess, *bracket, x0, _COARSE)
    return Guess(alpha, (x,)), in_bracket
