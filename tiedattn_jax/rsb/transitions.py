"""Shift of the transitions by replica symmetry breaking."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..averages.rules import REPLICATES
from ..base.arrays import Number
from ..base.errors import InputError, require_choice, require_kind
from ..base.report import Description, Result, Settings, error_bar, with_error
from ..model.checks import check
from ..model.model import Model
from ..model.overlaps import PAIR
from ..model.parameters import scalar_parameters
from ..phases.events import EVENTS, Transition, baseline_branch
from ..phases.locate import Search, guess_of, root_rates, zero_path
from ..phases.transitions import critical_alpha, linear_crossing
from ..theory.engine import run_one
from ..theory.quantities import with_sensitivities
from ..theory.solve import solve_checked
from ..theory.states import FixedPoint
from .fixed_points import ORDER, OneRSBPoint, check_breaking, lines_1rsb, solve_1rsb

_FINAL = 1e-7  # last relative step in alpha: the sensitivities of each theory are taken at its own root


class OneRSBTransition(Result):
    """alpha_c or alpha_l with one step of replica symmetry breaking (1RSB), and its replica-symmetric (RS) value.

    Attributes:
        rs: the RS transition.
        branches: the 1RSB ground states that define the transition. Those of alpha_c are solved at the RS alpha_c, that
            of alpha_l at the 1RSB alpha_l.
        shifts: 1RSB minus RS transition in every replicate of the averages.
        sensitivities: d alpha / d (every number of the model), a pytree like the model; those of the RS theory are
            `rs.sensitivities`.
        sensitivities_stderr: error bars of the sensitivities.
    """

    rs: Transition
    branches: tuple[OneRSBPoint, ...]
    shifts: Float[Array, " R"]
    sensitivities: Model
    sensitivities_stderr: Model

    @property
    def shift(self) -> Float[Array, ""]:
        """Shift of the transition, 1RSB minus RS; its error bar is `shift_stderr`."""
        return jnp.mean(self.shifts)

    @property
    def shift_stderr(self) -> Float[Array, ""]:
        """Error bar of `shift`; see `results.error_bar`."""
        return error_bar(self.shifts)

    @property
    def alpha(self) -> Float[Array, ""]:
        """Transition with 1RSB."""
        return self.rs.alpha + self.shift

    @property
    def stderr(self) -> Float[Array, ""]:
        """Error bar of `alpha` from the averages; it does not cover the effect of further steps of breaking."""
        return jnp.hypot(self.rs.stderr, self.shift_stderr)

    @property
    def status(self) -> Int[Array, ""]:
        """Worst `Status` of the RS transition and of the 1RSB states, as an integer."""
        return jnp.max(jnp.stack([self.rs.status, *(b.status for b in self.branches)]))

    def to_dict(self) -> dict[str, Any]:
        """Return the transition in both theories, its derivatives, the shift and the states, ready for JSON."""
        name = self.rs.event
        return {
            name: float(self.alpha),
            f"{name}_stderr": float(self.stderr),
            f"{name}_rs": float(self.rs.alpha),
            f"{name}_rs_stderr": float(self.rs.stderr),
            "shift": float(self.shift),
            "shift_stderr": float(self.shift_stderr),
            **self._derivatives(),
            "status": self.status_name,
            "branches": {b.branch: b.to_dict() for b in self.branches},
        }

    def describe(self) -> Description:
        elevations = [
            (f"elevation, {b.branch}", with_error(b.elevation, b.stderr.elevation), "of the loss above the RS state's")
            for b in self.branches
        ]
        values, bars, rs_values, rs_bars = self._derivatives().values()
        sensitivities = [
            (f"d/d{name}", with_error(a, bars[name]), f"RS: {with_error(rs_values[name], rs_bars[name])}")
            for name, a in values.items()
        ]
        return Description(
            "transition with 1RSB",
            self.status_name,
            [
                (self.rs.event, with_error(self.alpha, self.stderr), "with one step of replica symmetry breaking"),
                (f"{self.rs.event}, RS", with_error(self.rs.alpha, self.rs.stderr), "of the replica-symmetric theory"),
                ("shift", with_error(self.shift, self.shift_stderr), "between them"),
                *sensitivities,
            ],
            elevations,
        )

    def _derivatives(self) -> dict[str, dict[str, float]]:
        """Return the sensitivities of both theories and their error bars, each by the names of the numbers."""
        trees: dict[str, Any] = {
            "sensitivities": self.sensitivities,
            "sensitivities_stderr": self.sensitivities_stderr,
            "sensitivities_rs": self.rs.sensitivities,
            "sensitivities_rs_stderr": self.rs.sensitivities_stderr,
        }
        return {name: scalar_parameters(tree) for name, tree in trees.items()}


def critical_alpha_1rsb(
    model: Model,
    transition: Transition | None = None,
    *,
    order: int = ORDER,
    lines: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> OneRSBTransition:
    """Compute alpha_c with one step of replica symmetry breaking, and its shift from the replica-symmetric value.

    The 1RSB ground states of both branches are solved at the RS alpha_c. To first order, the shift is minus the
    difference of their elevations over the slope in alpha of the difference of their losses. The sensitivities are the
    envelope formula ``-(d_p Delta Phi_s) / (d_alpha Delta Phi_s)`` at fixed order parameters and s. They refer to the
    1RSB alpha_c: the change of the derivatives on the way there from the RS alpha_c is that of the RS states.

    Args:
        model: attention layer and data.
        transition: the result of `critical_alpha` for the same model; by default it is computed first.
        order, lines, replicates, seed: as in `solve_1rsb`.

    Raises:
        InputError: as `solve_1rsb`; the transition is of the wrong kind or was not found.
    """
    primal = lax.stop_gradient(model)
    transition = _alpha_c(primal, transition)
    rule: dict[str, Any] = {"order": order, "lines": lines, "replicates": replicates, "seed": seed}
    pair = tuple(solve_1rsb(primal, transition.alpha, branch, **rule) for branch in PAIR)
    a, b = (point.replicates for point in pair)
    shifts = -(a.elevation - b.elevation) / (a.loss_by_alpha - b.loss_by_alpha)
    alpha, nodes = transition.alpha + jnp.mean(shifts), lines_1rsb(primal, **rule)
    rs_points = [solve_checked(primal, alpha, point.branch, nodes, point.rs.overlaps, Settings()) for point in pair]
    return _moved(model, transition, pair, shifts, _shift_sensitivities(pair, rs_points))


def linear_crossing_1rsb(
    model: Model,
    transition: Transition | None = None,
    *,
    order: int = ORDER,
    lines: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> OneRSBTransition:
    """Compute alpha_l, where the global minimum starts to beat the linear baseline, with one step of breaking.

    The RS theory decides whether alpha_l lies on a branch or at alpha_c itself; see `linear_crossing`. On a branch, two
    steps of Newton's method find it, the first with the RS slope, and the implicit function theorem gives its
    sensitivities. The shift is the difference to the RS alpha_l on the same lines.

    Args:
        model, transition, order, lines, replicates, seed: as in `critical_alpha_1rsb`.

    Raises:
        InputError: as `critical_alpha_1rsb`; there is no RS alpha_l; the model has no `target`.
    """
    primal = lax.stop_gradient(model)
    transition = _alpha_c(primal, transition)
    rs = lax.stop_gradient(linear_crossing(primal, transition))
    rule: dict[str, Any] = {"order": order, "lines": lines, "replicates": replicates, "seed": seed}
    early, late = (bool(b.gen_error < b.gen_error_linear) for b in transition.branches)
    owner = baseline_branch(early, late)
    if owner == 1:
        exchange = critical_alpha_1rsb(model, transition, **rule)
        return dataclasses.replace(exchange, rs=dataclasses.replace(exchange.rs, event=rs.event))
    if not rs.ok:
        raise InputError("transition", f"must have an alpha_l beside alpha_c, got status {rs.status_name}")
    branch = PAIR[0] if owner == 0 else PAIR[1]
    event = EVENTS[f"{branch} baseline"]
    guess = guess_of(event, rs.branches)
    assert guess is not None
    zero = run_one(zero_path(event, Search(primal, lines_1rsb(primal, **rule), Settings()), guess, tol=_FINAL))

    def excess(model: Model, alpha: Number) -> tuple[Float[Array, " R"], OneRSBPoint]:
        point = solve_1rsb(model, alpha, branch, **rule)
        return point.rs.replicates.gen_error_linear - point.replicates.gen_error, point

    alpha = zero.at - jnp.mean(excess(primal, zero.at)[0] / zero.slopes)
    (by_model, by_alpha), point = jax.jacrev(excess, (0, 1), has_aux=True)(primal, alpha)
    value = point.rs.replicates.gen_error_linear - point.replicates.gen_error
    shifts = alpha - value / by_alpha - (zero.at - zero.value / zero.slopes)
    slopes, rs_slopes = (root_rates(*partials) for partials in ((by_model, by_alpha), (zero.rates, zero.slopes)))
    return _moved(model, rs, (point,), shifts, jax.tree.map(jnp.subtract, slopes, rs_slopes))


def _alpha_c(model: Model, transition: Transition | None) -> Transition:
    """Return the RS alpha_c without derivatives: the caller's, or that of `critical_alpha`."""
    if transition is None:
        check(model)
        check_breaking(model)
        transition = critical_alpha(model)
    require_kind(transition, "transition", Transition, "the result of critical_alpha")
    require_choice(transition.event, "transition.event", ["alpha_c"])
    if not transition.ok or transition.sensitivities is None:
        raise InputError("transition", f"must have been found, got status {transition.status_name}")
    return lax.stop_gradient(transition)


def _moved(
    model: Model, rs: Transition, branches: tuple[OneRSBPoint, ...], shifts: Float[Array, " R"], slopes: Model
) -> OneRSBTransition:
    """Return the RS transition moved by `shifts`, whose sensitivities are `slopes`, with a leading axis R."""
    rs_slopes = jax.tree.map(lambda a: a[None], rs.sensitivities)
    alpha = with_sensitivities(rs.alpha[None], rs_slopes, model)[0]
    return OneRSBTransition(
        rs=dataclasses.replace(rs, value=alpha),
        branches=branches,
        shifts=with_sensitivities(shifts, slopes, model),
        sensitivities=jax.tree.map(lambda a, d: a + jnp.mean(d, 0), rs.sensitivities, slopes),
        sensitivities_stderr=jax.tree.map(lambda a, d: jnp.hypot(a, error_bar(d)), rs.sensitivities_stderr, slopes),
    )


def _shift_sensitivities(broken: Sequence[OneRSBPoint], shifted: Sequence[FixedPoint]) -> Model:
    """Return the derivatives of the shift of alpha_c in the model, (R, ...), both theories on the same lines.

    Args:
        broken: 1RSB states of both branches at the RS alpha_c.
        shifted: RS states of both branches at the 1RSB alpha_c; they give the change of the derivatives on the way.
    """
    difference = partial(jax.tree.map, jnp.subtract)
    rs_partials = difference(*(b.rs.replicates.train_loss_partials for b in broken))
    shifted_partials = difference(*(state.replicates.train_loss_partials for state in shifted))
    broken_partials = difference(*((b.replicates.loss_by_model, b.replicates.loss_by_alpha) for b in broken))
    by_model, by_alpha = jax.tree.map(
        lambda broken, shifted, rs: broken + shifted - rs, broken_partials, shifted_partials, rs_partials
    )
    return difference(root_rates(by_model, by_alpha), root_rates(*rs_partials))
