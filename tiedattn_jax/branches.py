"""Branches along alpha: their curves, and where they end or lose stability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .model import Model, require
from .nodes import Rule, sobol_nodes
from .overlaps import BRANCHES, FREE
from .overlaps import start as branch_start
from .solve import FixedPoint, error_bar, near_branch, solve_replicates
from .state_evolution import Settings, Status

CURVE_NODES = 2**13


class Curve(eqx.Module):
    """A branch at increasing alphas.

    Attributes:
        branch: its name.
        points: a `FixedPoint` at every alpha, those where the branch does not exist included, with their status.
    """

    branch: str = eqx.field(static=True)
    points: tuple[FixedPoint, ...]

    @property
    def alphas(self) -> np.ndarray:
        """Where it was solved, increasing."""
        return np.array([float(p.alpha) for p in self.points])

    @property
    def exists(self) -> np.ndarray:
        """Whether there is a state at each alpha: usable, or of a residual below 5 % that these nodes do not resolve."""
        unresolved = [int(p.status) == Status.max_steps and float(p.residual) < 0.05 for p in self.points]
        return np.array([bool(p.ok) for p in self.points]) | np.array(unresolved)

    def values(self, get: Callable[[FixedPoint], jax.Array]) -> np.ndarray:
        """A number of every point, NaN where the branch does not exist."""
        return np.array([float(get(p)) if e else np.nan for p, e in zip(self.points, self.exists, strict=True)])


class Spinodal(NamedTuple):
    """Where a branch, followed in alpha from where it is stable, ends or loses its stability.

    Attributes:
        alpha: where.
        stderr: its error bar; for a fold, which is only bracketed, half of the bracket.
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
    """Solve a branch at many alphas, each from its neighbour above.

    Args:
        alphas: where; sorted by the call.
        nodes: averaging rule; by default 4 scrambles of 2^13 Sobol nodes.
        progress: wraps the loop, for instance `tqdm.tqdm`.

    Raises:
        ValueError: an alpha that is not positive and finite, or an unknown branch.
    """
    if branch not in BRANCHES:
        raise ValueError(f"branch must be one of {', '.join(BRANCHES)}, got branch={branch!r}")
    grid = np.sort(np.asarray(alphas, float).ravel())
    require(grid.size and np.all(np.isfinite(grid)) and grid[0] > 0, "alphas", alphas, "positive and finite")
    nodes = sobol_nodes(model, CURVE_NODES) if nodes is None else nodes
    settings = settings or Settings()
    free = jnp.asarray(FREE[branch], model.lam.dtype)
    first = start = branch_start(model, branch)
    points = []
    for a in progress(list(grid[::-1])):
        alpha = jnp.asarray(a, model.lam.dtype)
        x = near_branch(model, alpha, nodes.coarse(), start, free, settings)
        point = FixedPoint(model, alpha, solve_replicates(model, alpha, nodes, x, free, settings), branch)
        points.append(point)
        start = point.overlaps if point.ok else first
    return Curve(branch, tuple(points[::-1]))


def spinodals(curve: Curve, nodes: Rule | None = None, *, settings: Settings | None = None) -> list[Spinodal]:
    """All ends of a branch, and losses of its stability, between neighbouring points of its curve.

    A branch that disappears does so in a pitchfork where its own order parameter starts to grow on the uninformed
    branch m = theta = 0 in between; otherwise in a fold, which is bracketed by the neighbouring points of the curve. It
    turns unstable where the other order parameter starts to grow on it. Growth is read off the linearised map with the score
    function of the Gaussian fields, which jumps of the proximal operator leave exact.

    Args:
        curve: the positional or the semantic branch.
        nodes: averaging rule; by default that of `sweep`.
    """
    own, other = {"semantic": ("theta", "m"), "positional": ("m", "theta")}[curve.branch]
    model = curve.points[0].model
    nodes = sobol_nodes(model, CURVE_NODES) if nodes is None else nodes
    follow = partial(_crossing, nodes=nodes, settings=settings or Settings())
    alphas, exists, growth = curve.alphas, curve.exists.copy(), curve.values(lambda p: _growth(p, other))
    size = curve.values(lambda p: jnp.max(jnp.abs(getattr(p.overlaps, own))))
    seeds = sweep(model, alphas, "uninformed", nodes, settings=settings).points
    seed = np.array([float(_growth(p, own)) for p in seeds])
    found, forks = [], []
    for i in range(len(alphas) - 1):
        side, inside, outside = ("lower", i + 1, i) if seed[i] < seed[i + 1] else ("upper", i, i + 1)
        # Continuous: the order parameter is small next to the point where the uninformed state starts to grow one.
        if (seed[i] - 1) * (seed[i + 1] - 1) < 0 and exists[inside] and size[inside] < 0.6 * np.nanmax(size):
            forks.append(i)
            place = follow(seeds[i], seeds[i + 1], own)
            found.append(Spinodal(*place, "pitchfork", own, side))
            # Beyond a pitchfork, frozen nodes leave a small order parameter, as any imperfection does.
            beyond = slice(0, i + 1) if side == "lower" else slice(i + 1, None)
            exists[beyond], growth[beyond] = False, np.nan
            # At the pitchfork the branch is as unstable as the uninformed state.
            if growth[inside] < 1 < float(_growth(seeds[outside], other)):
                birth = eqx.tree_at(lambda p: p.alpha, seeds[outside], jnp.asarray(place[0], model.lam.dtype))
                found.append(Spinodal(*follow(birth, curve.points[inside], other), "instability", other, side))
    for i in range(len(alphas) - 1):
        if exists[i] and exists[i + 1] and (growth[i] - 1) * (growth[i + 1] - 1) < 0:
            place = follow(curve.points[i], curve.points[i + 1], other)
            found.append(Spinodal(*place, "instability", other, "lower" if growth[i] > 1 else "upper"))
        if exists[i] != exists[i + 1] and i not in forks:
            middle, half = 0.5 * (alphas[i] + alphas[i + 1]), 0.5 * (alphas[i + 1] - alphas[i])
            found.append(Spinodal(float(middle), float(half), "fold", own, "lower" if exists[i + 1] else "upper"))
    return sorted(found, key=lambda end: end.alpha)


def _growth(point: FixedPoint, direction: str) -> jax.Array:
    return getattr(point.diagnostics, f"growth_{direction}")


def _crossing(
    first: FixedPoint, second: FixedPoint, direction: str, nodes: Rule, settings: Settings, steps: int = 8
) -> tuple[float, float]:
    """Where the growth in a direction crosses one between two states, on the branch of the second, and its error bar."""
    model, branch, x = second.model, second.branch, second.overlaps
    free = jnp.asarray(FREE[branch], model.lam.dtype)
    (a0, g0), (a1, g1) = ((float(p.alpha), float(_growth(p, direction)) - 1) for p in (first, second))
    alpha, bar = a1, np.inf
    for _ in range(steps):
        trial = a1 - g1 * (a1 - a0) / (g1 - g0)
        state = solve_replicates(model, jnp.asarray(trial, model.lam.dtype), nodes, x, free, settings)
        point = FixedPoint(model, jnp.asarray(trial, model.lam.dtype), state, branch)
        if (
            int(point.status) == Status.absent or float(point.residual) > 0.05
        ):  # too near the end of the branch for these nodes: come from the good side
            a0, g0 = trial, g0 * (trial - a1) / (a0 - a1)
            continue
        growth = getattr(state.diagnostics, f"growth_{direction}") - 1
        slope = (float(jnp.mean(growth)) - g1) / (trial - a1)
        roots = trial - growth / slope
        alpha, bar, x = float(jnp.mean(roots)), float(error_bar(roots)), point.overlaps
        if abs(alpha - trial) < 0.2 * bar or abs(alpha - trial) < 1e-6:
            break
        if float(jnp.mean(growth)) * g1 > 0:
            a1, g1 = trial, float(jnp.mean(growth))
        else:
            (a0, g0), (a1, g1) = (a1, g1), (trial, float(jnp.mean(growth)))
    return alpha, bar
