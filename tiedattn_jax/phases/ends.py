"""How branches end: in a pitchfork, in a fold, or by loss of stability."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..averages.rule import Rule
from ..averages.sizes import SIZES
from ..errors import require, require_choice, require_kind
from ..overlaps import BRANCHES, PAIR, branch_of
from ..printing import Description, Printed, with_error
from ..results import Settings, Status
from ..theory.pool import Path, run_one
from ..theory.solve import Problem
from ..theory.states import FixedPoint
from .events import EVENTS, Near, Transition, crossings, located, number_of, transition_of
from .follow import CURVE_SETTINGS, Curve
from .inputs import prepared

# Share of the largest order parameter along a curve above which the one next to an end is not small: it has not fallen
# to zero like a square root, and a fold is looked for.
_NOT_SMALL = 0.7


# How a branch ends, in words.
ENDS = {
    "pitchfork": "ends at {where}: {order} falls continuously to zero",
    "instability": "turns unstable towards {order} at {where}",
    "fold": "ends at {where} with {order} finite",
}


class BranchEnd(Printed):
    """Where a branch, followed in alpha from where it is stable, ends or loses its stability.

    Attributes:
        transition: where, with its sensitivities if they were asked for. For a fold that continuation did not find, the
            middle of the bracket and half of its width, with status `max_steps`.
        kind: "pitchfork" (its order parameter falls continuously to zero), "instability" (another order parameter
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
        """Where."""
        return float(self.transition.alpha)

    @property
    def stderr(self) -> float:
        """Its error bar."""
        return float(self.transition.stderr)

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {name: getattr(self, name) for name in ("alpha", "stderr", "kind", "direction", "side")}

    def describe(self) -> Description:
        words = ENDS[self.kind].format(where=f"alpha = {with_error(self.alpha, self.stderr)}", order=self.direction)
        return Description(f"{self.side} end: {words}")


def branch_ends(
    curve: Curve, nodes: Rule | None = None, *, settings: Settings | None = None, sensitivities: bool = False
) -> list[BranchEnd]:
    """All ends of a branch, and losses of its stability, between neighbouring points of its curve.

    A branch that disappears does so in a pitchfork where its own order parameter starts to grow on the uninformed
    branch m = theta = 0 in between, or, if it reaches further than that, in a fold, which continuation in arclength
    locates. It turns unstable where the other order parameter starts to grow on it. Growth is read off the linearised
    map with the score function of the Gaussian fields, which jumps of the proximal operator leave exact.

    Args:
        curve: the positional or the semantic branch.
        nodes: averaging rule; by default `default_nodes` of `SIZES["curve"]`.
        settings: tolerances; by default `CURVE_SETTINGS`.
        sensitivities: whether to derive the ends in the numbers of the model, see `locate`.

    Raises:
        InputError: a curve of another branch or without points; nodes or settings of another kind.
    """
    require_kind(curve, "curve", Curve, "what sweep returns")
    require_choice(curve.branch, "curve.branch", PAIR)
    require(len(curve.points) > 0, "curve.points", [], "one or more")
    nodes, settings = prepared(curve.points[0].model, nodes, settings, CURVE_SETTINGS, size=SIZES["curve"])
    return run_one(_Ends(curve, nodes, settings, sensitivities).all())


class _Ends:
    def __init__(self, curve: Curve, nodes: Rule, settings: Settings, sensitivities: bool):
        self.curve, self.nodes, self.settings, self.sensitivities = curve, nodes, settings, sensitivities
        self.name = str(curve.branch)
        self.own = str(BRANCHES[curve.branch].order)
        self.other = "m" if self.own == "theta" else "theta"
        self.losing = EVENTS[f"{self.name} instability"]
        self.resolved = [p for p in curve.points if bool(p.ok)]  # elsewhere growth means little

    def all(self) -> Path:
        """Path of all ends, in the order of alpha."""
        # The number of the event rises with alpha where the branch is unstable below.
        losses = crossings(self.losing, [self.curve])
        paths = [self.instability(near, "lower" if near.slope > 0 else "upper") for near in losses]
        for p, q in pairwise(self.curve.points):
            if bool(p.exists) != bool(q.exists):
                paths.append(self.disappearance(*((q, p, "lower") if q.exists else (p, q, "upper"))))
        ends = yield paths
        return sorted((end for several in ends for end in several), key=lambda end: end.alpha)

    def instability(self, near: Near, side: str) -> Path:
        """Path of where the other order parameter starts to grow."""
        transition = yield from self.locate("instability", near)
        return [BranchEnd(transition, "instability", self.other, side)]

    def locate(self, kind: str, near: Near) -> Path:
        model, event = self.curve.points[0].model, EVENTS[f"{self.name} {kind}"]
        zero = yield from located(event, model, near, self.nodes, self.settings, self.sensitivities)
        return transition_of(event, model, zero)

    def disappearance(self, inside: FixedPoint, outside: FixedPoint, side: str) -> Path:
        """Path of what happens between a state and an alpha at which the branch has none."""
        beyond, before = yield [self.uninformed(e, inside) for e in (outside, inside)]
        forks = []
        if self.growth(beyond, self.own) < 1 < self.growth(before, self.own):
            forks = crossings(EVENTS[f"{self.name} pitchfork"], [Curve("uninformed", (beyond, before))])
        fork = (yield from self.locate("pitchfork", forks[0])) if forks else None
        if fork is None or self.size(inside) > _NOT_SMALL * max(self.size(e) for e in self.curve.points if e.exists):
            # The order parameter is not small next to the end: does the branch turn back, and further out than the
            # fork?
            fold = yield from self.fold(inside, outside)
            outward = 1 if side == "upper" else -1
            if fork is None or outward * (fold.alpha - fork.alpha) > 3 * np.hypot(fold.stderr, fork.stderr):
                return [BranchEnd(fold, "fold", self.own, side)]
        ends = [BranchEnd(fork, "pitchfork", self.own, side)]
        # At the pitchfork the branch is as unstable as the uninformed state.
        nearest = min(self.resolved, key=lambda e: abs(float(e.alpha) - float(fork.alpha)), default=inside)
        if self.growth(nearest, self.other) < 1 < self.growth(beyond, self.other):
            a, b = float(fork.alpha), float(nearest.alpha)
            g, h = (number_of(self.losing, [p]) for p in (beyond, nearest))
            low, high = sorted((a, b))
            near = Near(a + g / (g - h) * (b - a), (nearest.replicates.overlaps,), (h - g) / (b - a), low, high, b)
            ends += yield from self.instability(near, side)
        return ends

    def uninformed(self, at: FixedPoint, near: FixedPoint) -> Path:
        free = branch_of("uninformed").free(at.model)
        problem = Problem(at.model, at.alpha, self.nodes, free, self.settings)
        states = yield from problem.finely(near.replicates.overlaps)
        return FixedPoint(at.model, at.alpha, states, "uninformed")

    def fold(self, inside: FixedPoint, outside: FixedPoint) -> Path:
        a, b = sorted((float(inside.alpha), float(outside.alpha)))
        margin = 0.5 * (b - a)
        low, high = max(a - margin, 0.5 * a), b + margin
        near = Near(float(inside.alpha), (inside.replicates.overlaps,), low=low, high=high)
        found = yield from self.locate("fold", near)
        if bool(found.ok):
            return found
        middle, status = jnp.array(0.5 * (a + b)), jnp.asarray(int(Status.max_steps))
        return dataclasses.replace(found, alpha=middle, stderr=jnp.array(margin), status=status)

    def growth(self, point: FixedPoint, order: str) -> float:
        return float(getattr(point.diagnostics, f"growth_{order}"))

    def size(self, point: FixedPoint) -> float:
        return float(jnp.max(jnp.abs(getattr(point.overlaps, self.own))))
