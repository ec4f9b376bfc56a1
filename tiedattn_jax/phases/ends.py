"""Ends of branches: pitchforks, folds, and losses of stability."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..averages.recipes import SIZES, AnyNodes
from ..averages.rules import Rule
from ..base.errors import as_flag, require, require_choice, require_kind
from ..base.report import Description, Printed, Settings, Status, with_error
from ..model.overlaps import BRANCHES, PAIR, branch_of
from ..theory.engine import run_one
from ..theory.paths import Path
from ..theory.solve import Problem
from ..theory.states import FixedPoint
from .events import EVENTS, Transition
from .follow import CURVE_SETTINGS
from .inputs import prepared
from .locate import Guess, crossings, locate_path, number_of, transition_of
from .questions import StateTable

# Fraction of the largest order parameter along a curve. If the last one before an end exceeds it, the order parameter
# does not fall to zero like a square root there, and we search for a fold.
_NOT_SMALL = 0.7


# Descriptions of the kinds of ends.
ENDS = {
    "pitchfork": "ends at {where}: {order} falls continuously to zero",
    "instability": "turns unstable towards {order} at {where}",
    "fold": "ends at {where} with {order} finite",
}


class BranchEnd(Printed):
    """End of a branch in alpha, or the point where it loses its stability.

    Attributes:
        transition: the place, with its sensitivities if they were requested. If continuation did not find a fold, this
            is the middle between the neighbouring points, its error bar is half their distance, and its status is
            `max_steps`.
        kind: "pitchfork" (the order parameter falls continuously to zero), "instability" (the other order parameter
            starts to grow), or "fold" (the solution is lost at a finite order parameter).
        direction: the order parameter concerned, "m" or "theta".
        side: "lower" or "upper" end of the stable range.
    """

    transition: Transition
    kind: str = eqx.field(static=True)
    direction: str = eqx.field(static=True)
    side: str = eqx.field(static=True)

    @property
    def alpha(self) -> float:
        """Alpha of the end."""
        return float(self.transition.alpha)

    @property
    def stderr(self) -> float:
        """Error bar of `alpha`."""
        return float(self.transition.stderr)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return {name: getattr(self, name) for name in ("alpha", "stderr", "kind", "direction", "side")}

    def describe(self) -> Description:
        sentence = ENDS[self.kind].format(where=f"alpha = {with_error(self.alpha, self.stderr)}", order=self.direction)
        return Description(f"{self.side} end: {sentence}")


def branch_ends(
    curve: StateTable, nodes: AnyNodes = None, *, settings: Settings | None = None, sensitivities: bool = False
) -> list[BranchEnd]:
    """Find all ends of a branch, and its losses of stability, between neighbouring points of its curve.

    A branch disappears in one of two ways. It ends in a pitchfork where its own order parameter starts to grow on the
    uninformed branch m = theta = 0. If it reaches further than that, it ends in a fold, which continuation in arclength
    locates. A branch turns unstable where the other order parameter starts to grow on it. The growth is an eigenvalue
    of the linearised map; it uses the score function of the Gaussian fields and thus stays exact when the proximal
    operator jumps.

    Args:
        curve: the positional or the semantic branch.
        nodes: recipe of the averages, or number of nodes; by default `SIZES["curve"]`.
        settings: tolerances; by default `CURVE_SETTINGS`.
        sensitivities: whether to differentiate the ends in the numbers of the model, see `find_event`.

    Raises:
        InputError: the curve is of another branch or has no points; nodes or settings are of the wrong kind.
    """
    require_kind(curve, "curve", StateTable, "what sweep returns")
    require_choice(curve.branch, "curve.branch", PAIR)
    require(len(curve.points) > 0, "curve.points", [], "one or more")
    nodes, settings = prepared(curve.points[0].model, nodes, settings, CURVE_SETTINGS, size=SIZES["curve"])
    return run_one(_Ends(curve, nodes, settings, as_flag(sensitivities, "sensitivities")).find_all())


class _Ends:
    def __init__(self, curve: StateTable, nodes: Rule, settings: Settings, sensitivities: bool):
        self.curve, self.nodes, self.settings, self.sensitivities = curve, nodes, settings, sensitivities
        self.name = str(curve.branch)
        self.order = str(BRANCHES[curve.branch].order)
        self.other_order = "m" if self.order == "theta" else "theta"
        self.instability_event = EVENTS[f"{self.name} instability"]
        self.resolved = [p for p in curve.points if bool(p.ok)]  # growth is unreliable at the other points

    def find_all(self) -> Path:
        """Path that finds all ends; returns them in the order of alpha."""
        # The event's number rises with alpha where the branch is unstable below the event.
        guesses = crossings(self.instability_event, [self.curve])
        paths = [self.instability(guess, "lower" if guess.slope > 0 else "upper") for guess in guesses]
        for p, q in pairwise(self.curve.points):
            if bool(p.exists) != bool(q.exists):
                paths.append(self.disappearance(*((q, p, "lower") if q.exists else (p, q, "upper"))))
        ends = yield paths
        return sorted((end for group in ends for end in group), key=lambda end: end.alpha)

    def instability(self, guess: Guess, side: str) -> Path:
        """Path that finds where the other order parameter starts to grow; returns a list of one `BranchEnd`."""
        transition = yield from self.find_event("instability", guess)
        if not jnp.isfinite(transition.alpha):
            transition = _between(transition, float(guess.low), float(guess.high))
        return [BranchEnd(transition, "instability", self.other_order, side)]

    def find_event(self, kind: str, guess: Guess) -> Path:
        model, event = self.curve.points[0].model, EVENTS[f"{self.name} {kind}"]
        zero = yield from locate_path(event, model, guess, self.nodes, self.settings, self.sensitivities)
        return transition_of(event, model, zero)

    def disappearance(self, state: FixedPoint, absent_point: FixedPoint, side: str) -> Path:
        """Path that finds the ends between a state and an alpha at which the branch does not exist."""
        # The uninformed states at both alphas.
        outer, inner = yield [self.uninformed(e, state) for e in (absent_point, state)]
        guesses = []
        if self.growth(outer, self.order) < 1 < self.growth(inner, self.order):
            guesses = crossings(EVENTS[f"{self.name} pitchfork"], [StateTable.of("uninformed", (outer, inner))])
        fork = (yield from self.find_event("pitchfork", guesses[0])) if guesses else None
        fork = fork if fork is not None and jnp.isfinite(fork.alpha) else None
        if fork is None or self.size(state) > _NOT_SMALL * max(self.size(e) for e in self.curve.points if e.exists):
            # The order parameter is not small next to the end, so the branch may turn back in a fold beyond the fork.
            fold = yield from self.fold(state, absent_point)
            outward = 1 if side == "upper" else -1
            if fork is None or outward * (fold.alpha - fork.alpha) > 3 * np.hypot(fold.stderr, fork.stderr):
                return [BranchEnd(fold, "fold", self.order, side)]
        ends = [BranchEnd(fork, "pitchfork", self.order, side)]
        # At the pitchfork the branch coincides with the uninformed state and is as unstable.
        nearest = min(self.resolved, key=lambda e: abs(float(e.alpha) - float(fork.alpha)), default=state)
        if self.growth(nearest, self.other_order) < 1 < self.growth(outer, self.other_order):
            a, b = float(fork.alpha), float(nearest.alpha)
            g, h = (number_of(self.instability_event, [p]) for p in (outer, nearest))
            low, high = sorted((a, b))
            guess = Guess(a + g / (g - h) * (b - a), (nearest.replicates.overlaps,), (h - g) / (b - a), low, high, b)
            ends += yield from self.instability(guess, side)
        return ends

    def uninformed(self, point: FixedPoint, state: FixedPoint) -> Path:
        free = branch_of("uninformed").free(point.model)
        problem = Problem(point.model, point.alpha, self.nodes, free, self.settings)
        states = yield from problem.solve_replicates(state.replicates.overlaps)
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


def _between(transition: Transition, low: float, high: float) -> Transition:
    """Return an event that lies between two alphas but was not located; half of their distance is its error bar."""
    middle, margin, status = 0.5 * (low + high), 0.5 * (high - low), int(Status.max_steps)
    return dataclasses.replace(
        transition, alpha=jnp.array(middle), stderr=jnp.array(margin), status=jnp.asarray(status)
    )
