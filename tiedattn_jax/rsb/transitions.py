"""Shift of the transitions by one step of replica symmetry breaking (1RSB)."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..averages.rules import REPLICATES
from ..base.arrays import Number
from ..base.errors import InputError, require_choice, require_kind
from ..base.progress import Progress, in_parts
from ..base.results import Average, Settings, error_bar
from ..model.checks import needs
from ..model.model import Model
from ..model.overlaps import PAIR
from ..phases.events import ALPHA_L, EVENTS, as_event, baseline_branch
from ..phases.family import Family
from ..phases.locate import guess_of, root_rates, zero_path
from ..phases.transitions import critical_alpha, linear_crossing
from ..theory.engine import run_one
from ..theory.quantities import Quantity, if_known, with_sensitivities
from ..theory.solve import Request, solve_checked
from .fixed_points import ORDER, OneRSBPoint, lines_1rsb, solve

_FINAL = 1e-7  # last relative step in alpha: the sensitivities of each theory are taken at its own root


def transition(
    model: Model,
    event: str = "alpha_c",
    transition: Quantity | None = None,
    *,
    order: int = ORDER,
    lines: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
    progress: Progress = None,
) -> Quantity:
    """Compute a transition with one step of replica symmetry breaking, and its shift from the RS value.

    At alpha_c the losses of the two branches cross. The 1RSB ground states of both branches are solved at the RS
    alpha_c. To first order, the shift is minus the difference of their elevations over the slope in alpha of the
    difference of their losses. The sensitivities are the envelope formula ``-(d_p Delta Phi_s) / (d_alpha Delta
    Phi_s)`` at fixed order parameters and s. They refer to the 1RSB alpha_c: the change of the derivatives on the way
    there from the RS alpha_c is that of the RS states.

    At alpha_l the global minimum starts to beat the linear baseline. The RS theory decides whether alpha_l lies on a
    branch or at alpha_c itself; see `linear_crossing`. On a branch, two steps of Newton's method find it, the first
    with the RS slope, and the implicit function theorem gives its sensitivities. The shift is the difference to the RS
    alpha_l on the same lines.

    The error bar of the result is that of the averages; it does not cover the effect of further steps of breaking. Its
    status is the worst of the RS transition and of the 1RSB states, its `branches`. Those of alpha_c are solved at the
    RS alpha_c, that of alpha_l at the 1RSB alpha_l. `rs` is the RS transition, `shift` the 1RSB minus the RS alpha on
    the same averages, and `elevation_positional` the loss of that state above the RS state's.

    Args:
        model: attention layer and data.
        event: "alpha_c" or "alpha_l".
        transition: the result of `critical_alpha` for the same model; by default it is computed first.
        order, lines, replicates, seed: as in `rsb.solve`.
        progress: as in `solve`.

    Raises:
        InputError: as `rsb.solve`; the transition is of the wrong kind or was not found; for alpha_l, the model has no
            `target`, or there is no RS alpha_l.
    """
    event = require_choice(event, "event", ["alpha_c", ALPHA_L])
    needs(model, "rsb.transition", float64=True, independent=True)
    primal, progress = lax.stop_gradient(model), in_parts(progress)
    if transition is None:
        transition = critical_alpha(primal, progress=progress)
    require_kind(transition, "transition", Quantity, "the result of critical_alpha")
    require_choice(transition.event, "transition.event", ["alpha_c"])
    if not transition.ok or transition.sensitivities is None:
        raise InputError("transition", f"must have been found, got status {transition.status_name}")
    critical = lax.stop_gradient(transition)
    rule: dict[str, Any] = {"order": order, "lines": lines, "replicates": replicates, "seed": seed}
    owner = 1
    if event == ALPHA_L:
        owner = int(baseline_branch(*(bool(b.gen_error < b.gen_error_linear) for b in critical.branches)))
    if owner == 1:
        shift = _exchange_shift(primal, critical.alpha, rule, progress)
        return _moved(model, as_event(critical, event, critical.branches), *shift)
    rs = lax.stop_gradient(linear_crossing(primal, critical, progress=progress))
    if not rs.ok:
        raise InputError("transition", f"must have an alpha_l beside alpha_c, got status {rs.status_name}")
    return _moved(model, rs, *_baseline_shift(primal, rs, PAIR[0] if owner == 0 else PAIR[1], rule, progress))


# 1RSB states that define a transition, its shifts in all replicates, and the derivatives of these, (R, ...).
_Shift = tuple[tuple[OneRSBPoint, ...], Float[Array, " R"], Model]


def _exchange_shift(model: Model, alpha: Float[Array, ""], rule: dict[str, Any], progress: Progress) -> _Shift:
    """Return the shift of alpha_c, where the losses of both branches cross, from the RS value `alpha`."""
    pair = tuple(solve(model, alpha, branch, progress=progress, **rule) for branch in PAIR)
    a, b = (point.replicates for point in pair)
    shifts = -(a.elevation - b.elevation) / (a.loss_by_alpha - b.loss_by_alpha)
    # RS states at the 1RSB alpha_c give the change of the derivatives on the way. Both theories are on the same lines.
    shifted_alpha, nodes = alpha + jnp.mean(shifts), lines_1rsb(model, **rule)
    requests = [Request(model, shifted_alpha, p.branch, nodes, p.rs.overlaps) for p in pair]
    shifted_states = [solve_checked(request, progress) for request in requests]
    difference = partial(jax.tree.map, jnp.subtract)
    rs = difference(*(p.rs.replicates.train_loss_partials for p in pair))
    shifted = difference(*(state.replicates.train_loss_partials for state in shifted_states))
    broken = difference(*((p.replicates.loss_by_model, p.replicates.loss_by_alpha) for p in pair))
    partials = jax.tree.map(lambda broken, shifted, rs: broken + shifted - rs, broken, shifted, rs)
    return pair, shifts, difference(root_rates(*partials), root_rates(*rs))


def _baseline_shift(model: Model, rs: Quantity, branch: str, rule: dict[str, Any], progress: Progress) -> _Shift:
    """Return the shift of alpha_l, where a branch starts to beat the baseline, from the RS value on the same lines."""
    event = EVENTS[f"{branch} baseline"]
    guess = guess_of(event, rs.branches)
    assert guess is not None
    family = Family(model, lines_1rsb(model, **rule), Settings())
    zero = run_one(zero_path(event, family, guess, tol=_FINAL), progress)

    def excess(model: Model, alpha: Number) -> tuple[Float[Array, " R"], OneRSBPoint]:
        point = solve(model, alpha, branch, progress=progress, **rule)
        return point.rs.replicates.gen_error_linear - point.replicates.gen_error, point

    alpha = zero.at - jnp.mean(excess(model, zero.at)[0] / zero.slopes)
    (by_model, by_alpha), point = jax.jacrev(excess, (0, 1), has_aux=True)(model, alpha)
    value = point.rs.replicates.gen_error_linear - point.replicates.gen_error
    shifts = alpha - value / by_alpha - (zero.at - zero.value / zero.slopes)
    slopes, rs_slopes = (root_rates(*partials) for partials in ((by_model, by_alpha), (zero.rates, zero.slopes)))
    return (point,), shifts, jax.tree.map(jnp.subtract, slopes, rs_slopes)


def _moved(
    model: Model, rs: Quantity, branches: tuple[OneRSBPoint, ...], shifts: Float[Array, " R"], slopes: Model
) -> Quantity:
    """Return an RS transition moved by `shifts`, differentiable in the caller's `model`; see `_Shift`."""
    rs_slopes = jax.tree.map(lambda a: a[None], rs.sensitivities)
    rs = eqx.tree_at(lambda t: t.value, rs, with_sensitivities(rs.alpha[None], rs_slopes, model)[0])
    shift = Average(jnp.mean(with_sensitivities(shifts, slopes, model)), error_bar(shifts))
    elevations = {f"elevation_{b.branch}": Average(b.elevation, b.stderr.elevation) for b in branches}
    status = jnp.max(jnp.stack([rs.status, *(b.status for b in branches)]))
    numbers = {
        "value": rs.alpha + shift.value,
        "stderr": jnp.hypot(rs.stderr, shift.stderr),
        "sensitivities": jax.tree.map(lambda a, d: a + jnp.mean(d, 0), rs.sensitivities, slopes),
        "sensitivities_stderr": jax.tree.map(lambda a, d: jnp.hypot(a, error_bar(d)), rs.sensitivities_stderr, slopes),
    }
    shift, numbers = if_known((shift, numbers), status)
    return Quantity(
        **numbers,
        status=status,
        further={"rs": rs, "shift": shift, **elevations},
        branches=branches,
        name="alpha",
        event=rs.event,
        meaning=f"{rs.meaning}, with one step of replica symmetry breaking (1RSB)",
    )
