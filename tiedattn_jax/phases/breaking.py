"""How far replica symmetry breaking moves the transition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..averages.sizes import REPLICATES
from ..errors import InputError, require_choice, require_kind
from ..model import Model
from ..overlaps import PAIR
from ..printing import Description, with_error
from ..results import Result, Status, error_bar
from ..theory.rsb import ORDER, BrokenPoint, solve_1rsb
from .events import Transition
from .transitions import critical_alpha


class BrokenTransition(Result):
    """alpha_c with one step of replica symmetry breaking (1RSB), beside that of the replica-symmetric (RS) theory.

    Attributes:
        rs: the RS transition.
        branches: the positional and the semantic 1RSB ground state at the RS alpha_c.
        shifts: of alpha_c by the breaking, in every replicate of the averages, (R,).
    """

    rs: Transition
    branches: tuple[BrokenPoint, BrokenPoint]
    shifts: jax.Array

    @property
    def shift(self) -> jax.Array:
        """By how much alpha_c moves; its error bar is `shift_stderr`."""
        return jnp.mean(self.shifts)

    @property
    def shift_stderr(self) -> jax.Array:
        """Error bar of `shift`; see `results.error_bar`."""
        return error_bar(self.shifts)

    @property
    def alpha(self) -> jax.Array:
        """alpha_c with 1RSB."""
        return self.rs.alpha + self.shift

    @property
    def stderr(self) -> jax.Array:
        """Error bar of `alpha`: that of the averages. What further steps of breaking would change is not in it."""
        return jnp.hypot(self.rs.stderr, self.shift_stderr)

    @property
    def status(self) -> jax.Array:
        """The worst `Status` of the RS transition and of both 1RSB states, as an integer."""
        return jnp.max(jnp.stack([self.rs.status, *(b.status for b in self.branches)]))

    @property
    def ok(self) -> jax.Array:
        """Whether all of them can be used: converged, or stalled at the accuracy of the averages."""
        return self.status <= Status.stalled

    def to_dict(self) -> dict[str, Any]:
        """alpha_c of both theories, the shift between them and both states, ready for JSON."""
        return {
            "alpha_c": float(self.alpha),
            "alpha_c_stderr": float(self.stderr),
            "alpha_c_rs": float(self.rs.alpha),
            "alpha_c_rs_stderr": float(self.rs.stderr),
            "shift": float(self.shift),
            "shift_stderr": float(self.shift_stderr),
            "status": self.status_name,
            "branches": {b.branch: b.to_dict() for b in self.branches},
        }

    def describe(self) -> Description:
        elevations = [
            (f"elevation, {b.branch}", with_error(b.elevation, b.stderr.elevation), "of the loss above the RS state's")
            for b in self.branches
        ]
        return Description(
            "transition with 1RSB",
            self.status_name,
            [
                ("alpha_c", with_error(self.alpha, self.stderr), "with one step of replica symmetry breaking"),
                ("alpha_c, RS", with_error(self.rs.alpha, self.rs.stderr), "of the replica-symmetric theory"),
                ("shift", with_error(self.shift, self.shift_stderr), "between them"),
            ],
            elevations,
        )


def critical_alpha_1rsb(
    model: Model,
    transition: Transition | None = None,
    *,
    order: int = ORDER,
    lines: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> BrokenTransition:
    """alpha_c with one step of replica symmetry breaking: how far off the replica-symmetric one is.

    The ground states of both branches are solved at the RS alpha_c. The shift is the difference of their elevations over
    the slope of the difference of their losses, to first order.

    Args:
        model: attention layer and data.
        transition: the result of `critical_alpha` for the same model; by default it is found first.
        order, lines, replicates, seed: as in `solve_1rsb`.

    Raises:
        InputError: as `solve_1rsb`; a transition of another kind, or one that was not found.
    """
    if transition is None:
        transition = critical_alpha(model)
    require_kind(transition, "transition", Transition, "the result of critical_alpha")
    require_choice(transition.event, "transition.event", ["alpha_c"])
    if not transition.ok:
        raise InputError("transition", f"must have been found, got status {transition.status_name}")
    rule: dict[str, Any] = {"order": order, "lines": lines, "replicates": replicates, "seed": seed}
    positional, semantic = (solve_1rsb(model, transition.alpha, branch, **rule) for branch in PAIR)
    a, b = positional.replicates, semantic.replicates
    shifts = -(a.elevation - b.elevation) / (a.loss_by_alpha - b.loss_by_alpha)
    return BrokenTransition(transition, (positional, semantic), shifts)
