"""Pseudo-arclength continuation of a fixed point in one parameter, through folds, and a search for states nobody named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .lines import default_nodes
from .model import Model, require, scalar, with_scalar
from .nodes import Rule
from .overlaps import Overlaps, admissible, label, magnitudes
from .solve import FixedPoint, State, branch_start, error_bar, free_of, near_branch, solve_from, solve_replicates
from .state_evolution import Coordinates, Settings, Status, fixed_point, has_state, saddle_map

CONTINUATION_NODES = 2**13
_TOLERANCE = 1e-6
_STEPS = 8
NEWTON = Settings(max_steps=60, warm_steps=0)
_OBSERVE = Settings(tol=1e-4, max_steps=0, warm_steps=0)


@dataclass(frozen=True)
class BranchPath:
    """A branch along its arclength, in one replicate of the averages.

    Attributes:
        parameter: its name.
        values: of the parameter at every point, (n,); not monotonic when there are folds.
        overlaps: the states, leaves (n, ...).
        train_loss, gen_error, residual, replicon, status: (n,).
        eigenvalues: of DF, (n, k), complex, largest real part first.
        labels: of the branches the points belong to.
        folds: values of the parameter at which the branch turns back, with their error bars in `folds_of`.
        crossings: values at which an eigenvalue passes one elsewhere: another branch is born.
        ends: why the path ends on either side.
    """

    parameter: str
    values: np.ndarray
    overlaps: Overlaps
    train_loss: np.ndarray
    gen_error: np.ndarray
    residual: np.ndarray
    replicon: np.ndarray
    status: np.ndarray
    eigenvalues: np.ndarray
    labels: tuple[str, ...]
    folds: tuple[float, ...]
    crossings: tuple[float, ...]
    ends: tuple[str, str]


@eqx.filter_jit
def _expand(
    model: Model, alpha: jax.Array, name: str, rule: Rule, u: jax.Array, free: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """At ``u = (overlaps, parameter)``: F(x) - x, its derivatives in u (k, k + 1), and whether x is admissible."""
    coordinates = Coordinates(model, free)

    def residual(u: jax.Array) -> jax.Array:
        here, a = placed(model, alpha, name, u[-1])
        return coordinates.pack(saddle_map(here, a, coordinates.unpack(u[:-1]), rule, free)[0]) - u[:-1]

    def column(d: jax.Array) -> Any:
        return jax.jvp(residual, (u,), (d,))

    r, J = jax.vmap(column, out_axes=(None, 1))(jnp.eye(u.shape[0], dtype=u.dtype))
    return r, J, admissible(placed(model, alpha, name, u[-1])[0], coordinates.unpack(u[:-1]))


def placed(model: Model, alpha: jax.Array, name: str, value: jax.Array) -> tuple[Model, jax.Array]:
    """Model and alpha with one of their numbers at a value."""
    if name == "alpha":
        return model, value
    return with_scalar(model, value, name), alpha


class _Point(NamedTuple):
    """A solution: scaled coordinates, Jacobian (k, k + 1), unit tangent (k + 1,), Newton steps."""

    w: np.ndarray
    J: np.ndarray
    tangent: np.ndarray
    steps: int


class _Curve:
    """The solution curve of one replicate in scaled coordinates, the parameter last."""

    def __init__(
        self, model: Model, alpha: jax.Array, name: str, value: float, rule: Rule, free: jax.Array, x: Overlaps
    ):
        self.arguments = model, alpha, name, rule
        self.free = free
        self.coordinates = Coordinates(model, self.free)
        ones = jax.tree.map(jnp.ones_like, x)
        self.on = np.flatnonzero(np.append(np.asarray(self.coordinates.pack(ones)), 1.0))  # not zero by symmetry
        self.scale = np.append(np.asarray(self.coordinates.scale(model, x)), abs(value) or 1.0)
        self.start = self.scaled(np.append(np.asarray(self.coordinates.pack(x)), value))

    def scaled(self, u: np.ndarray) -> np.ndarray:
        return (u / self.scale)[self.on]

    def plain(self, w: np.ndarray) -> np.ndarray:
        u = np.zeros(len(self.scale))
        u[self.on] = w * self.scale[self.on]
        return u

    def correct(self, w: np.ndarray, along: np.ndarray) -> _Point | None:
        """Newton's method in the plane through `w` normal to `along`; None if it fails."""
        guess, rows = w, self.on[:-1]
        for k in range(_STEPS):
            r, J, inside = _expand(*self.arguments, jnp.asarray(self.plain(w)), self.free)
            r = np.asarray(r)[rows] / self.scale[rows]
            J = np.asarray(J)[np.ix_(rows, self.on)] * self.scale[self.on] / self.scale[rows, None]
            size = float(np.max(np.abs(r)))
            if not (inside and np.isfinite(size) and np.max(np.abs(w - guess)) < 0.5):
                return None
            if size < _TOLERANCE:
                tangent = np.linalg.svd(J)[2][-1]
                return _Point(w, J, tangent * np.sign(tangent @ along), k)
            w = w + np.linalg.solve(np.vstack([J, along]), np.append(-r, -(along @ (w - guess))))
        return None

    def seen(self, w: np.ndarray) -> State:
        """Observables at a solution, leaves (1, ...)."""
        model, alpha, name, rule = self.arguments
        u = jnp.asarray(self.plain(w))
        return _at_once(*placed(model, alpha, name, u[-1]), rule, self.coordinates.unpack(u[:-1]), self.free, _OBSERVE)

    def march(self, first: _Point, step: float, limits: tuple[float, float], count: int) -> tuple[list[_Point], str]:
        """Points from `first` on in the direction of its tangent, and why they end."""
        points = [first]
        while len(points) < count:
            last = points[-1]
            found = self.correct(last.w + step * last.tangent, last.tangent)
            # A sharp turn is more likely a jump to another branch.
            if found is None or found.tangent @ last.tangent < 0.7:
                step /= 2
                if step < 1e-4:
                    return points, "no further point was found"
                continue
            points.append(found)
            value = self.plain(found.w)[-1]
            if not limits[0] <= value <= limits[1]:
                return points, "limit of the parameter"
            step = min(step * (1.5 if found.steps <= 3 else 0.7 if found.steps > 5 else 1.0), 0.2)
        return points, "number of points"

    def turning(self, a: _Point, b: _Point) -> float:
        """Parameter where it has an extremum along the curve, between two of its points."""
        length = float(np.linalg.norm(b.w - a.w))

        def slope(s: float) -> float:
            found = self.correct(a.w + s * a.tangent, a.tangent)
            return np.nan if found is None else float(found.tangent[-1])

        s = length * a.tangent[-1] / (a.tangent[-1] - b.tangent[-1])
        for _ in range(3):  # the tangent is nearly linear over a step
            t = slope(s)
            if not np.isfinite(t) or abs(t) < 1e-6:
                break
            s *= a.tangent[-1] / (a.tangent[-1] - t)
        found = self.correct(a.w + s * a.tangent, a.tangent)
        return float(self.plain(b.w if found is None else found.w)[-1])


def trace_branch(
    model: Model,
    parameter: str,
    limits: tuple[float, float],
    branch: str | None = "semantic",
    *,
    alpha: float = 2.0,
    start: Overlaps | None = None,
    nodes: Rule | None = None,
    step: float = 0.05,
    points: int = 200,
) -> list[BranchPath]:
    """Follow a fixed point through a parameter in both directions, around folds, in every replicate of the averages.

    Args:
        model, alpha: where the path starts.
        parameter: "alpha", the name of a scalar field of the model, or an entry such as "mixing[0,1]".
        limits: range of the parameter in which it is followed.
        branch: symmetry that is imposed, as in `solve`; None imposes none.
        start: overlaps near the state at the start; by default those of `branch`.
        nodes: averaging rule; by default `default_nodes` of 2^13, 2 replicates.
        step: first step of the arclength, relative to the sizes of overlaps and parameter at the start.
        points: at most so many in each direction.

    Returns:
        A `BranchPath` for every replicate; their scatter is the error of its numbers.

    Raises:
        ValueError: an unknown parameter, limits that do not contain the start, no state at the start.
    """
    here = float(alpha) if parameter == "alpha" else scalar(model, parameter, "parameter", "alpha or ")
    require(len(limits) == 2 and limits[0] <= here <= limits[1], "limits", limits, f"two numbers around {here}")
    nodes = default_nodes(model, CONTINUATION_NODES, replicates=2) if nodes is None else nodes
    a = jnp.asarray(alpha, model.lam.dtype)
    free, settings = free_of(model, branch), Settings()
    if start is None:
        start = near_branch(model, a, nodes.coarse(), branch_start(model, branch), free, settings)
    paths = []
    for k in range(nodes.replicates):
        rule = jax.tree.map(lambda v, k=k: v[k], nodes)
        found = _at_once(model, a, rule, start, free, settings)
        if not has_state(found.status[0], found.residual[0], 0.05):
            raise ValueError(f"start must be near a state, got one with status {Status.name_of(found.status[0])}")
        x = jax.tree.map(lambda v: v[0], found.overlaps)
        paths.append(_path(_Curve(model, a, parameter, here, rule, free, x), limits, step, points))
    return paths


def _at_once(model: Model, alpha: jax.Array, rule: Rule, x: Overlaps, free: jax.Array, settings: Settings) -> State:
    """`solve_replicates` of a single replicate."""
    rules, starts = jax.tree.map(lambda v: v[None], (rule, x))
    return solve_replicates(model, alpha, rules, starts, free, settings)


def folds_of(paths: Sequence[BranchPath]) -> list[tuple[float, float]]:
    """Folds of a branch with their error bars, in the order along it, out of the paths of `trace_branch`.

    Paths that do not have the usual number of folds, being shorter, are left out.
    """
    counts = [len(p.folds) for p in paths]
    usual = max(set(counts), key=counts.count)
    alike = zip(*(p.folds for p in paths if len(p.folds) == usual), strict=True)
    return [(float(np.mean(v)), float(error_bar(jnp.array(v)))) for v in alike]


def _path(curve: _Curve, limits: tuple[float, float], step: float, count: int) -> BranchPath:
    up = np.eye(len(curve.start))[-1]
    first = curve.correct(curve.start, up)
    if first is None:
        raise ValueError("start must be near a state, Newton's method found none from it")
    ahead, last = curve.march(first, step, limits, count)
    behind, end = curve.march(first._replace(tangent=-first.tangent), step, limits, count)
    points = [*(p._replace(tangent=-p.tangent) for p in behind[:0:-1]), *ahead]
    folds, crossings = [], []
    for p, q in pairwise(points):
        if p.tangent[-1] * q.tangent[-1] < 0:
            folds.append(curve.turning(p, q))
        elif np.linalg.det(p.J[:, :-1]) * np.linalg.det(q.J[:, :-1]) < 0:
            crossings.append(0.5 * float(curve.plain(p.w)[-1] + curve.plain(q.w)[-1]))
    u = np.array([curve.plain(p.w) for p in points])
    states = jax.tree.map(lambda *a: np.concatenate(a), *(curve.seen(p.w) for p in points))
    # The Jacobian is that of F(x) - x, in scaled coordinates, which have the same eigenvalues.
    eigenvalues = np.array([1 + np.linalg.eigvals(p.J[:, :-1]) for p in points])
    model, _, name, _ = curve.arguments
    each = [jax.tree.map(lambda a, k=k: a[k], states.overlaps) for k in range(len(points))]
    return BranchPath(
        parameter=name,
        values=u[:, -1],
        overlaps=states.overlaps,
        train_loss=states.train_loss,
        gen_error=states.gen_error,
        residual=states.residual,
        replicon=states.diagnostics.replicon,
        status=states.status,
        eigenvalues=np.take_along_axis(eigenvalues, np.argsort(-eigenvalues.real, 1), 1),
        labels=tuple(label(model, x) for x in each),
        folds=tuple(folds),
        crossings=tuple(crossings),
        ends=(end, last),
    )


@eqx.filter_jit
def _many(model: Model, alpha: jax.Array, rule: Rule, starts: Overlaps, free: jax.Array, settings: Settings) -> Any:
    return lax.map(lambda x: fixed_point(model, alpha, rule, x, free, settings), starts)


def find_states(
    model: Model,
    alpha: float,
    nodes: Rule | None = None,
    *,
    count: int = 64,
    seed: int = 0,
    settings: Settings = NEWTON,
) -> list[FixedPoint]:
    """All states that are reached from many random starts without any symmetry imposed, the lowest training loss first.

    Args:
        alpha: samples per dimension.
        nodes: averaging rule; by default `default_nodes` of 2^13, 4 replicates. The starts are tried on its coarse
            part, what they find is solved on all of it.
        count: random starts.
        seed: of the starts.
        settings: tolerances; by default without the damped steps, which lead to minima and past saddles.

    Returns:
        One `FixedPoint` for every state; states that differ by the signs of m and theta count once.
    """
    nodes = default_nodes(model, CONTINUATION_NODES) if nodes is None else nodes
    a, free = jnp.asarray(alpha, model.lam.dtype), free_of(model, None)
    rng = np.random.default_rng(seed)
    base = branch_start(model, None)

    def draw() -> Overlaps:
        q, V, theta, m = rng.lognormal(-1.5, 1.0), rng.lognormal(0, 0.5), rng.uniform(-1.2, 1.2), rng.uniform(-1.2, 1.2)
        return Overlaps(q * base.q, V * base.V, q**0.5 * theta * base.theta, q**0.5 * m * base.m)

    drawn = [x for x in (draw() for _ in range(4 * count)) if bool(admissible(model, x))][:count]
    starts = jax.tree.map(lambda *v: jnp.stack(v), *drawn)
    xs, _, seen, statuses = _many(model, a, nodes.coarse(), starts, free, settings)
    found: list[FixedPoint] = []
    for k in np.argsort(np.asarray(seen.train_loss)):
        if int(statuses[k]) > Status.max_steps:
            continue
        x = jax.tree.map(lambda v, k=k: v[k], xs)
        if any(_alike(model, x, f.overlaps, 0.05) for f in found):
            continue
        point = solve_from(model, a, None, nodes, x, settings)
        if point.exists and not any(_alike(model, point.overlaps, f.overlaps, 0.02) for f in found):
            found.append(point)
    return sorted(found, key=lambda p: float(p.train_loss))


def _alike(model: Model, x: Overlaps, y: Overlaps, tol: float) -> bool:
    """Whether two states are the same up to the symmetries."""
    sizes = [np.array([float(jnp.trace(s.q.mean(0))), *map(float, magnitudes(model, s))]) for s in (x, y)]
    return bool(np.all(np.abs(sizes[0] - sizes[1]) < tol * np.array([sizes[1][0], 1.0, 1.0])))
