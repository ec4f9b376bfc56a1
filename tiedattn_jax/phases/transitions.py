"""The paper's transitions: where the global minimum changes its mechanism, and where it beats the baseline."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..averages.rule import Rule
from ..errors import array_of, is_concrete, require_choice, require_kind
from ..model import Model
from ..overlaps import PAIR, Overlaps
from ..results import Settings
from ..theory.fixed_points import solve_coarsely
from .events import EVENTS, LOOKS, Near, Start, Transition, event_of, near_of, transition_of, zero_near
from .follow import found_or, map_each, pair_free, pair_start, unstacked
from .inputs import prepared
from .secant import zero_between

ALPHA_L = "alpha_l"  # no name of `EVENTS`, but one of its baselines or alpha_c
RANGE = (0.1, 4.0)
_COARSE = 1e-3  # relative accuracy of a transition on coarse averages, which are themselves right to about that
# A Newton step, relative, that is the last: the next one would be of the size of what `Settings.tol` leaves of the
# states, which start so near then that they are not solved again.
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

    Below it the global minimum is positional, above it semantic. Works under `jit`, `vmap` and `grad` (first
    derivatives); the derivative in any number p of the model is the envelope formula
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
    held, event = lax.stop_gradient(model), EVENTS["alpha_c"]
    near, met = None if start is None else near_of(event, start, *bracket), jnp.array(True)
    if near is None:
        near, met = _coarse_alpha_c(held, nodes, ends, settings)
    zero = zero_near(event, held, near, nodes, settings, exact=True, tol=_FINAL, looks=_looks(met))
    return transition_of(event, model, zero._replace(met=zero.met & met))


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
    it. Works under `jit` and `grad` (first derivatives); the derivatives are those of the implicit function
    theorem and contain the jumps of the proximal operator.

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
    nodes, settings, (low, high) = _prepared(model, nodes, bracket, settings)
    event = event_of("semantic baseline", model)  # whichever the branch is, it is data here
    if transition is None:
        transition = critical_alpha(model, nodes, bracket=bracket, settings=settings)
    require_kind(transition, "transition", Transition, "the result of critical_alpha")
    require_choice(transition.event, "transition.event", ["alpha_c"])
    held, known = lax.stop_gradient((model, transition))
    if is_concrete(known.status) and not known.ok:  # which minimum is global is not known
        return dataclasses.replace(transition, event=ALPHA_L)
    early, late = (b.gen_error < b.gen_error_linear for b in known.branches)
    choose = partial(jax.tree.map, partial(jnp.where, early))  # of two trees, the first one where `early`
    ends = choose((low, known.alpha), (known.alpha, jnp.maximum(high, 1.01 * known.alpha)))
    free = choose(*pair_free(held))
    near, met = None, jnp.array(True)
    if start is not None:
        name = PAIR[0 if is_concrete(early) and early else 1]
        near = near_of(EVENTS[f"{name} baseline"], start, *ends)
    if near is None:
        x0 = choose(*(b.overlaps for b in known.branches))
        near, met = _coarse_alpha_l(held, nodes, x0, free, ends, settings)
    zero = zero_near(event, held, near, nodes, settings, exact=True, tol=_FINAL, frees=[free], looks=_looks(met))
    crossing = transition_of(event._replace(branches=(None,)), model, zero._replace(met=zero.met & met))
    exchanged = baseline_owner(early, late) == 1
    names = "alpha", "stderr", "sensitivities", "sensitivities_stderr", "status"
    both = ({name: getattr(t, name) for name in names} for t in (transition, crossing))
    picked = jax.tree.map(partial(jnp.where, exchanged), *both)
    picked["status"] = jnp.where(known.ok, picked["status"], known.status)  # as above
    return dataclasses.replace(crossing, event=ALPHA_L, **picked)


def baseline_owner(early: Any, late: Any) -> Any:
    """Where the global minimum starts to beat the linear baseline: 0 positional, 1 at alpha_c itself, 2 semantic.

    Args:
        early, late: whether the positional and the semantic state beat it at alpha_c.
    """
    return jnp.where(early, 0, jnp.where(late, 1, 2))


def _prepared(
    model: Model, nodes: Rule | None, bracket: tuple, settings: Settings | None
) -> tuple[Rule, Settings, tuple[jax.Array, jax.Array]]:
    nodes, settings = prepared(model, nodes, settings, traced=True)
    if is_concrete(bracket):
        array_of(bracket, "bracket", "two numbers 0 < low < high", lambda a: a.size == 2 and 0 < a[0] < a[1])
    low, high = (jnp.asarray(a, model.lam.dtype) for a in bracket)
    return nodes, settings, (low, high)


def _looks(met: jax.Array) -> int:
    """Places at which a zero is looked for on all nodes: only the end of the range where coarse ones found none."""
    return 1 if is_concrete(met) and not met else LOOKS


def _coarse_alpha_c(
    model: Model, nodes: Rule, bracket: tuple[jax.Array, jax.Array], settings: Settings
) -> tuple[Near, jax.Array]:
    """alpha_c and both branches there on cheap averages, and whether it lies in the bracket."""
    frees, starts = pair_free(model), pair_start(model)

    def difference(alpha: jax.Array, xs: Overlaps) -> tuple[jax.Array, Overlaps]:
        def one(args: Any) -> Any:
            x0, start, free = args
            found = solve_coarsely(model, alpha, nodes, x0, free, settings)
            # A branch that is not here is looked for from its start the next time.
            return found.train_loss, found.has_state, found_or(start, found)

        loss, there, xs = map_each(one, (xs, starts, frees))
        return _difference(loss, there), xs

    alpha, xs, met = zero_between(difference, bracket, starts, _COARSE)
    return Near(alpha, tuple(unstacked(xs))), met


@jax.jit
def _difference(loss: jax.Array, there: jax.Array) -> jax.Array:
    """Positional minus semantic loss; where only one of them exists, that one wins."""
    alone = jnp.where(there[1] & ~there[0], 1.0, -1.0) * jnp.mean(jnp.abs(loss))
    return jnp.where(jnp.all(there), loss[0] - loss[1], alone)


def _coarse_alpha_l(
    model: Model, nodes: Rule, x0: Overlaps, free: jax.Array, bracket: tuple[jax.Array, jax.Array], settings: Settings
) -> tuple[Near, jax.Array]:
    """Where a branch starts to beat the linear baseline on cheap averages, its state there, and whether it does."""

    def excess(alpha: jax.Array, x: Overlaps) -> tuple[jax.Array, Overlaps]:
        found = solve_coarsely(model, alpha, nodes, x, free, settings)
        return found.gen_error_linear - found.gen_error, found.overlaps

    alpha, x, met = zero_between(excess, bracket, x0, _COARSE)
    return Near(alpha, (x,)), met
