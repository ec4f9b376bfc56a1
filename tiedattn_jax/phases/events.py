"""Events: a table of all of them, and the result of a search for one in alpha.

An event is a zero of a number that is computed from one or two states; see `locate` for the search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Real

from ..averages.rules import Replicate
from ..base.arrays import AnyArray, StateArray
from ..base.errors import require_choice
from ..base.results import Average, Status, error_bar
from ..model.checks import check_provides
from ..model.model import Model
from ..model.overlaps import PAIR, Overlaps
from ..theory.observables import gen_error_in, gen_error_linear_in, growths_in
from ..theory.quantities import Quantity
from ..theory.states import FixedPoint, State

CROSSING = "crossing"  # of the losses of two states that the caller gives, whose branches need no name
_SAME = 1e-4  # relative difference below which two states are the same
Observable = Callable[[Model, Float[Array, ""], Overlaps, Replicate, Float[Array, " 2"]], Float[Array, ""]]


class Event(NamedTuple):
    """An event: a number computed from states of one or two branches crosses zero.

    Attributes:
        name: key in `EVENTS`.
        branches: branches whose states define the event.
        value: function of one `State` per branch that returns the number in every replicate. None for a fold.
        observable: the same number as a differentiable function ``(model, alpha, overlaps, replicate, free)`` of the
            overlaps of one state. None if the number is a difference of training losses, whose derivatives the states
            contain.
        meaning: what changes at the event, in words.
    """

    name: str
    branches: tuple[str | None, ...]
    value: Callable[..., Float[StateArray, " R"]] | None
    observable: Observable | None = None
    meaning: str = ""


def _baseline(branch: str) -> Event:
    """Return the event at which a branch's test error falls below that of the linear baseline."""
    meaning = f"the {branch} state beats the linear baseline above"
    return Event(f"{branch} baseline", (branch,), lambda s: s.gen_error_linear - s.gen_error, _excess, meaning)


def _excess(
    model: Model, alpha: Float[Array, ""], x: Overlaps, replicate: Replicate, free: Float[Array, " 2"]
) -> Float[Array, ""]:
    return gen_error_linear_in(model, replicate) - gen_error_in(model, x, replicate)


class _Growth(eqx.Module):
    """Largest eigenvalue of the map in the direction of theta or m, minus one.

    The direction is data, so that all events of growth share one compiled program.
    """

    weights: Real[np.ndarray, " 2"]  # weights of theta and m

    def __call__(
        self, model: Model, alpha: Float[Array, ""], x: Overlaps, replicate: Replicate, free: Float[Array, " 2"]
    ) -> Float[Array, ""]:
        return self.of(*growths_in(model, alpha, x, replicate, free))

    def of(self, theta: Float[StateArray, "*R"], m: Float[StateArray, "*R"]) -> Float[Array, "*R"]:
        a, b = jnp.asarray(self.weights, theta.dtype)
        return a * (theta - 1) + b * (m - 1)


def _growth(name: str, branch: str, *weights: float) -> Event:
    """Return the event at which the largest eigenvalue of the map along an order parameter passes one."""
    growth = _Growth(np.array(weights))
    side, order = "below" if sum(weights) < 0 else "above", "theta" if weights[0] else "m"
    return Event(
        name,
        (branch,),
        lambda s: growth.of(s.diagnostics.growth_theta, s.diagnostics.growth_m),
        growth,
        f"{order} grows on the {branch} state {side}",
    )


def _of_two_states(first: State, second: State) -> Float[Array, " *R"]:
    """Return the difference of the losses of two states; NaN where both are one state, whose losses are always equal.

    Two states are one if traces of q and test errors agree, which a rotation of the columns does not change.
    """
    traces = [jnp.trace(s.overlaps.q, axis1=-2, axis2=-1) for s in (first, second)]
    errors = [s.gen_error[..., None] for s in (first, second)]
    a, b = (jnp.concatenate(each, -1) for each in zip(traces, errors, strict=True))
    is_one = jnp.all(jnp.abs(a - b) <= _SAME * jnp.maximum(jnp.abs(a), jnp.abs(b)), -1)
    return jnp.where(is_one, jnp.nan, first.train_loss - second.train_loss)


EVENTS = {
    event.name: event
    for event in (  # signs are such that the numbers usually rise with alpha
        Event(
            "alpha_c",
            PAIR,
            lambda p, s: p.train_loss - s.train_loss,
            meaning="the global minimum is positional below, semantic above",
        ),
        Event(CROSSING, (None, None), _of_two_states, meaning="the lower one of the two given states changes"),
        # The branch's test error falls below that of the linear baseline; alpha_l may be one of these.
        _baseline("semantic"),
        _baseline("positional"),
        # The branch stops being a minimum, because the other order parameter grows on it.
        _growth("semantic instability", "semantic", 0, -1),
        _growth("positional instability", "positional", 1, 0),
        # The branch bifurcates from the uninformed state.
        _growth("semantic pitchfork", "uninformed", 1, 0),
        _growth("positional pitchfork", "uninformed", 0, 1),
        Event("semantic fold", ("semantic",), None, meaning="the semantic branch turns back"),
        Event("positional fold", ("positional",), None, meaning="the positional branch turns back"),
    )
}

ALPHA_L = "alpha_l"  # not in `EVENTS`, because it coincides with the baseline event of a branch or with alpha_c
_ALPHA_L_MEANING = "the global minimum beats the linear baseline above"


def baseline_branch(
    early: bool | Bool[AnyArray | np.bool, "*shape"], late: bool | Bool[AnyArray | np.bool, "*shape"]
) -> Int[np.ndarray, "*shape"]:
    """Return where alpha_l lies: 0 on the positional branch, 1 at alpha_c itself, 2 on the semantic branch.

    Args:
        early, late: whether the positional and the semantic state beat the linear baseline at alpha_c.
    """
    return np.where(early, 0, np.where(late, 1, 2))


def event_of(name: str, model: Model) -> Event:
    """Return the event of a name.

    Raises:
        InputError: there is no such event, or the model lacks the `target` that it needs.
    """
    require_choice(name, "event", EVENTS)
    if "baseline" in name:
        check_provides(model, "target", "for the linear baseline")
    return EVENTS[name]


def as_event(number: Quantity, event: str, branches: tuple[FixedPoint, ...] = ()) -> Quantity:
    """Return a number as the alpha of an event, with what follows from the states that define it.

    If no event was found, all numbers are NaN but `ended_at`, the alpha where the search ended. The status is then
    `absent` if there is no event where the search looked. If a branch was not settled there, the question is open: the
    status is that of the branch. Where two losses cross, `rs_shift` estimates the shift by one step of replica symmetry
    breaking.

    Args:
        event: name in `EVENTS`, or "alpha_l".
        branches: the states at the alpha, or those where the search ended.
    """
    fixed = lax.stop_gradient(number)
    last = float(branches[0].alpha) if branches else np.nan
    further: dict[str, Any] = {"ended_at": np.asarray(last if np.isnan(fixed.value) else np.nan)}
    missing = fixed.status == Status.absent or not np.isfinite(fixed.value)
    if event in ("alpha_c", CROSSING) and len(branches) == len(PAIR) and not missing:
        further["rs_shift"] = rs_shift(*branches)
    meaning = EVENTS[event].meaning if event in EVENTS else _ALPHA_L_MEANING
    note = _why_not_found(branches) if missing else ""
    words: dict[str, Any] = {"name": "alpha", "event": event, "meaning": meaning, "note": note}
    return dataclasses.replace(number, branches=branches, further=further, **words)


def rs_shift(first: FixedPoint, second: FixedPoint) -> Average:
    """Return the estimated shift of the crossing of two losses by one step of replica symmetry breaking.

    It is minus the difference of the states' `Diagnostics.rs_error` over the slope in alpha of the difference of
    their losses. It has no derivatives.
    """
    a, b = first.replicates, second.replicates
    lift = a.diagnostics.rs_error - b.diagnostics.rs_error
    slope = a.train_loss_partials[1] - b.train_loss_partials[1]
    shifts = jnp.where(a.has_state & b.has_state, -lift / slope, jnp.nan)
    return Average(jnp.nanmean(shifts), error_bar(shifts))


def _why_not_found(branches: Sequence[FixedPoint]) -> str:
    """Return why an event was not found, in one sentence, from the states where the search ended."""
    if not branches:
        return "there is none near the start"
    where = f"at alpha = {branches[0].alpha:.4g}, where the search ended"
    missing_states = [state for state in branches if not state.exists]
    for state in missing_states:
        if state.status != Status.absent:
            name = f"the {state.branch} branch" if state.branch else "one of the two states"
            return f"{name} was not settled {where}: {state.status_name}"
    if all(state.branch is None for state in branches):
        return f"one of the two states is lost, or both have become one, {where}"
    if missing_states:
        return f"there is {' and '.join(f'no {state.branch} branch' for state in missing_states)} {where}"
    if len(branches) == len(PAIR):
        lower = min(branches, key=lambda state: float(state.train_loss))
        return f"the losses do not cross in the range: that of the {lower.branch} branch is lower {where}"
    return f"nothing changes in the range, up to the state {where}"
