"""Branches along alpha: their curves, and where they end or lose stability."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .continuation import folds_of, trace_branch
from .lines import default_nodes
from .model import Model, require
from .nodes import Rule
from .overlaps import BRANCHES, Overlaps, admissible
from .solve import FixedPoint, branch_start, error_bar, solve_from
from .state_evolution import Settings, Status

CURVE_NODES = 2**12
CURVE_SETTINGS = Settings(tol=1e-4, max_steps=20)
# The order parameter by which a branch differs from the uninformed one.
OWN = {"positional": "m", "semantic": "theta"}


def curve_nodes(model: Model) -> Rule:
    """The default rule for curves."""
    return default_nodes(model, CURVE_NODES)


class Curve(eqx.Module):
    """A branch at increasing alphas.

    Attributes:
        branch: its name.
        points: a `FixedPoint` at every alpha it was looked for at, the first one beyond its end included, whose status
            says that it is not there.
    """

    branch: str = eqx.field(static=True)
    points: tuple[FixedPoint, ...]

    @property
    def alphas(self) -> np.ndarray:
        """Where it was solved, increasing."""
        return np.array([float(p.alpha) for p in self.points])

    @property
    def exists(self) -> np.ndarray:
        """Whether there is a state at each alpha; see `FixedPoint.exists`."""
        return np.array([p.exists for p in self.points])

    def at(self, alpha: float) -> Overlaps:
        """Overlaps between the points, by linear interpolation."""
        k = int(np.clip(np.searchsorted(self.alphas, alpha), 1, len(self.points) - 1))
        p, q = self.points[k - 1], self.points[k]
        t = (alpha - p.alpha) / (q.alpha - p.alpha)
        return jax.tree.map(lambda a, b: (1 - t) * a + t * b, p.overlaps, q.overlaps)

    def by_alpha(self, get: Callable[[FixedPoint], jax.Array]) -> dict[float, float]:
        """A number of every point where the branch exists, by its alpha."""
        return {float(p.alpha): float(get(p)) for p in self.points if p.exists}

    def values(self, get: Callable[[FixedPoint], jax.Array]) -> np.ndarray:
        """A number of every point, NaN where the branch does not exist."""
        return np.array([float(get(p)) if e else np.nan for p, e in zip(self.points, self.exists, strict=True)])


class Spinodal(NamedTuple):
    """Where a branch, followed in alpha from where it is stable, ends or loses its stability.

    Attributes:
        alpha: where.
        stderr: its error bar; half of the bracket for a fold that continuation did not find.
        kind: "pitchfork" (its order parameter falls continuously to zero), "instability" (another order parameter starts to
            grow), or "fold" (the solution is lost at a finite order parameter).
        direction: the order parameter concerned, "m" or "theta".
        side: "lower" or "upper" end of the stable range.
    """

    alpha: float
    stderr: float
    kind: str
    direction: str
    side: str


def sweep(
    model: Model,
    alphas: Sequence[float] | np.ndarray,
    branch: str,
    nodes: Rule | None = None,
    *,
    settings: Settings | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Curve:
    """Follow a branch through many alphas, from the largest one down to where it ends.

    Each state starts from the secant through its neighbours above. Alphas below the end are left out, but for the first.

    Args:
        alphas: where; sorted by the call.
        nodes: averaging rule; by default `curve_nodes`.
        progress: wraps the loop, for instance `tqdm.tqdm`.

    Raises:
        ValueError: an alpha that is not positive and finite, or an unknown branch.
    """
    if branch not in BRANCHES:
        raise ValueError(f"branch must be one of {', '.join(BRANCHES)}, got branch={branch!r}")
    grid = np.sort(np.asarray(alphas, float).ravel())
    require(grid.size and np.all(np.isfinite(grid)) and grid[0] > 0, "alphas", alphas, "positive and finite")
    nodes = curve_nodes(model) if nodes is None else nodes
    settings = CURVE_SETTINGS if settings is None else settings
    own = OWN.get(branch)
    points: list[FixedPoint] = []
    largest = 0.0
    for alpha in progress(list(grid[::-1])):
        followed = points[-1] if points and points[-1].exists else None
        if followed is None and len(points) > 1 and points[-2].exists:
            continue  # below the end
        if followed is not None and own and _size(followed, own) < 0.5 * largest:
            # Does it still grow on the uninformed branch? Frozen nodes would leave a trace of it where it does not.
            bare = solve_from(model, alpha, "uninformed", nodes, followed.replicates.overlaps, settings)
            if _growth(bare, own) < 1:
                points.append(_absent(bare, branch))
                continue
        start = _ahead(points, alpha) if followed else branch_start(model, branch)
        point = solve_from(model, alpha, branch, nodes, start, settings)
        if own and point.exists:
            largest = max(largest, _size(point, own))
        points.append(point)
    return Curve(branch, tuple(points[::-1]))


def _absent(point: FixedPoint, branch: str) -> FixedPoint:
    """The uninformed state where a branch has run into it."""
    status = jnp.full_like(point.replicates.status, Status.absent)
    return FixedPoint(point.model, point.alpha, eqx.tree_at(lambda s: s.status, point.replicates, status), branch)


def _ahead(points: list[FixedPoint], alpha: float) -> Overlaps:
    """Where the secants through the last two states of a branch come to at `alpha`, if those are states at all."""
    last, before = points[-1], points[-2] if len(points) > 1 and points[-2].exists else points[-1]
    step = (alpha - last.alpha) / (last.alpha - before.alpha) if before is not last else jnp.zeros_like(last.alpha)
    return _secant(last.model, last.replicates.overlaps, before.replicates.overlaps, step)


@eqx.filter_jit
def _secant(model: Model, here: Overlaps, before: Overlaps, step: jax.Array) -> Overlaps:
    guess = jax.tree.map(lambda a, b: a + step * (a - b), here, before)
    inside = jnp.all(jax.vmap(partial(admissible, model))(guess))
    return jax.tree.map(lambda a, b: jnp.where(inside, a, b), guess, here)


def _size(point: FixedPoint, order: str) -> float:
    return float(jnp.max(jnp.abs(getattr(point.overlaps, order))))


def _growth(point: FixedPoint, order: str) -> float:
    return float(getattr(point.diagnostics, f"growth_{order}"))


def spinodals(curve: Curve, nodes: Rule | None = None, *, settings: Settings | None = None) -> list[Spinodal]:
    """All ends of a branch, and losses of its stability, between neighbouring points of its curve.

    A branch that disappears does so in a pitchfork where its own order parameter starts to grow on the uninformed
    branch m = theta = 0 in between, or, if it reaches further than that, in a fold, which `trace_branch` locates. It
    turns unstable where the other order parameter starts to grow on it. Growth is read off the linearised map with the
    score function of the Gaussian fields, which jumps of the proximal operator leave exact.

    Args:
        curve: the positional or the semantic branch.
        nodes: averaging rule; by default `curve_nodes`.
    """
    own, other = OWN[curve.branch], OWN["positional" if curve.branch == "semantic" else "semantic"]
    model = curve.points[0].model
    nodes = curve_nodes(model) if nodes is None else nodes
    settings = CURVE_SETTINGS if settings is None else settings
    follow = partial(_crossing, nodes=nodes, settings=settings)
    found = []
    resolved = [p for p in curve.points if p.ok]  # elsewhere growth means little
    for p, q in pairwise(resolved):
        if (_growth(p, other) - 1) * (_growth(q, other) - 1) < 0:
            side = "lower" if _growth(p, other) > 1 else "upper"
            found.append(Spinodal(*follow(p, q, other), "instability", other, side))
    for p, q in pairwise(curve.points):
        if p.exists == q.exists:
            continue
        side, inside, outside = ("lower", q, p) if q.exists else ("upper", p, q)
        beyond, before = (
            solve_from(model, e.alpha, "uninformed", nodes, inside.replicates.overlaps, settings)
            for e in (outside, inside)
        )
        fork = follow(beyond, before, own) if _growth(beyond, own) < 1 < _growth(before, own) else None
        if fork is None or _size(inside, own) > 0.7 * max(_size(e, own) for e in curve.points if e.exists):
            # The order parameter is not small next to the end: does the branch turn back, and further out than the fork?
            fold = _fold(inside, outside, nodes)
            outward = 1 if side == "upper" else -1
            if fork is None or outward * (fold[0] - fork[0]) > 3 * np.hypot(fold[1], fork[1]):
                found.append(Spinodal(*fold, "fold", own, side))
                continue
        found.append(Spinodal(*fork, "pitchfork", own, side))
        # At the pitchfork the branch is as unstable as the uninformed state.
        nearest = min(resolved, key=lambda e: abs(float(e.alpha) - fork[0]), default=inside)
        if _growth(nearest, other) < 1 < _growth(beyond, other):
            birth = eqx.tree_at(lambda e: e.alpha, beyond, jnp.asarray(fork[0], model.lam.dtype))
            found.append(Spinodal(*follow(birth, nearest, other), "instability", other, side))
    return sorted(found, key=lambda end: end.alpha)


def _fold(inside: FixedPoint, outside: FixedPoint, nodes: Rule) -> tuple[float, float]:
    """Where a branch turns back between a state of it and an alpha where it has none, and the error bar.

    By continuation in arclength, and if that finds no fold in between, the middle and half of the bracket.
    """
    a, b = sorted((float(inside.alpha), float(outside.alpha)))
    margin, start = 0.5 * (b - a), inside.overlaps
    limits = max(a - margin, 0.5 * a), b + margin
    with contextlib.suppress(ValueError):  # no state with these nodes
        paths = trace_branch(
            inside.model, "alpha", limits, inside.branch, alpha=float(inside.alpha), start=start, nodes=nodes
        )
        between = [fold for fold in folds_of(paths) if limits[0] < fold[0] < limits[1]]
        if between:
            return min(between, key=lambda fold: abs(fold[0] - float(inside.alpha)))
    return 0.5 * (a + b), 0.5 * (b - a)


def _crossing(
    first: FixedPoint, second: FixedPoint, direction: str, nodes: Rule, settings: Settings, steps: int = 8
) -> tuple[float, float]:
    """Where the growth in a direction crosses one between two states, on the branch of the second, and its error bar."""
    model, branch, x = second.model, second.branch, second.replicates.overlaps
    (a0, g0), (a1, g1) = ((float(p.alpha), _growth(p, direction) - 1) for p in (first, second))
    alpha, bar, kept, blocked = a1, np.inf, None, a0
    mean_slope = (g1 - g0) / (a1 - a0)
    for _ in range(steps):  # regula falsi; an end that stays twice counts for half (Illinois)
        trial = a1 - g1 * (a1 - a0) / (g1 - g0)
        if (trial - blocked) * (a1 - blocked) <= 0:
            trial = 0.5 * (blocked + a1)
        point = solve_from(model, trial, branch, nodes, x, settings)
        if not point.exists:  # too near the end of the branch for these nodes: come from the good side
            blocked = trial
            continue
        growth = getattr(point.replicates.diagnostics, f"growth_{direction}") - 1
        mean = float(jnp.mean(growth))
        alpha, bar = trial - mean / mean_slope, float(error_bar(growth)) / abs(mean_slope)
        if abs(alpha - trial) < max(0.2 * bar, 1e-6):
            break
        x = point.replicates.overlaps
        if mean * g1 > 0:
            a1, g1, g0, kept = trial, mean, 0.5 * g0 if kept == 0 else g0, 0
        else:
            a0, g0, g1, kept = trial, mean, 0.5 * g1 if kept == 1 else g1, 1
    return alpha, bar
