"""Pseudo-arclength continuation of a fixed point in one parameter, through folds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

from ..averages.default import default_nodes
from ..averages.rule import Replicate, Rule
from ..averages.sizes import SIZES
from ..errors import InputError, require
from ..model import Model
from ..overlaps import Coordinates, Overlaps, admissible, branch_of, label
from ..parameters import Parameter
from ..results import Settings, Status, error_bar
from ..theory.fixed_points import FixedPoint, State, branch_start, near_branch, solve_replicates
from ..theory.state_evolution import saddle_map

_TOLERANCE = 1e-6  # of the residual, relative: the averages of lines are smooth to that
_STEPS = 8  # of Newton's method; more say that the arc was too long
_STEP = 0.05  # the first one
_LEAST_STEP = 1e-4
_LONGEST_STEP = 0.2  # relative to the sizes of overlaps and parameter at the start
_SHARPEST_TURN = 0.7  # cosine between two tangents: a sharper one is more likely a jump to another branch
_FOLD_POINTS = 200
_OBSERVE = Settings(tol=1e-4, max_steps=0, warm_steps=0)


class BranchPath(eqx.Module):
    """A branch along its arclength, in one replicate of the averages.

    Attributes:
        parameter: its name.
        values: of the parameter at every point, (n,); not monotonic when there are folds.
        states: the `State` at every point, leaves (n, ...).
        eigenvalues: of DF, (n, k), complex, largest real part first.
        labels: of the branches the points belong to.
        folds: values of the parameter at which the branch turns back; with their error bars in `folds_of`.
        fold_states: the states there, leaves (1, ...).
        crossings: values at which an eigenvalue passes one elsewhere: another branch is born.
        ends: why the path ends on either side.
    """

    parameter: str
    values: np.ndarray
    states: State
    eigenvalues: np.ndarray
    labels: tuple[str, ...]
    folds: tuple[float, ...]
    fold_states: tuple[State, ...]
    crossings: tuple[float, ...]
    ends: tuple[str, str]

    @property
    def overlaps(self) -> Overlaps:
        """Order parameters along the path, leaves (n, ...)."""
        return self.states.overlaps

    @property
    def train_loss(self) -> jax.Array:
        """Training loss / d along the path, (n,)."""
        return self.states.train_loss

    @property
    def gen_error(self) -> jax.Array:
        """Test error along the path, (n,)."""
        return self.states.gen_error

    @property
    def status(self) -> jax.Array:
        """`Status` of every point, (n,)."""
        return self.states.status

    def plot(self) -> Any:
        """Order parameters and training loss along the path; see `plotting.path_figure`."""
        from ..plotting import path_figure  # not at the top: only pictures need matplotlib

        return path_figure([self])


@eqx.filter_jit
def _expand(
    model: Model, alpha: jax.Array, parameter: Parameter, replicate: Replicate, u: jax.Array, free: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """At ``u = (overlaps, parameter)``: F(x) - x, its derivatives in u (k, k + 1), and whether x is admissible."""
    coordinates = Coordinates(model, free)

    def residual(u: jax.Array) -> jax.Array:
        here, a = parameter.set(model, alpha, u[-1])
        return coordinates.pack(saddle_map(here, a, coordinates.unpack(u[:-1]), replicate, free)[0]) - u[:-1]

    def column(d: jax.Array) -> Any:
        return jax.jvp(residual, (u,), (d,))

    r, J = jax.vmap(column, out_axes=(None, 1))(jnp.eye(u.shape[0], dtype=u.dtype))
    return r, J, admissible(parameter.set(model, alpha, u[-1])[0], coordinates.unpack(u[:-1]))


class _Point(NamedTuple):
    """A solution: scaled coordinates, Jacobian (k, k + 1), unit tangent (k + 1,), Newton steps."""

    w: np.ndarray
    J: np.ndarray
    tangent: np.ndarray
    steps: int


class _Continuation:
    """The solution curve of one replicate in scaled coordinates, the parameter last."""

    def __init__(
        self,
        model: Model,
        alpha: jax.Array,
        parameter: Parameter,
        value: float,
        replicate: Replicate,
        free: jax.Array,
        x: Overlaps,
    ):
        self.arguments = model, alpha, parameter, replicate
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

    def overlaps(self, w: np.ndarray) -> Overlaps:
        return self.coordinates.unpack(jnp.asarray(self.plain(w)[:-1]))

    def seen(self, w: np.ndarray) -> State:
        """Observables at a solution, leaves (1, ...)."""
        model, alpha, parameter, replicate = self.arguments
        here, a = parameter.set(model, alpha, self.plain(w)[-1])
        return _at_once(here, a, replicate, self.overlaps(w), self.free, _OBSERVE)

    def march(self, first: _Point, step: float, limits: tuple[float, float], count: int) -> tuple[list[_Point], str]:
        """Points from `first` on in the direction of its tangent, and why they end."""
        points = [first]
        while len(points) < count:
            last = points[-1]
            found = self.correct(last.w + step * last.tangent, last.tangent)
            if found is None or found.tangent @ last.tangent < _SHARPEST_TURN:
                step /= 2
                if step < _LEAST_STEP:
                    return points, "no further point was found"
                continue
            points.append(found)
            value = self.plain(found.w)[-1]
            if not limits[0] <= value <= limits[1]:
                return points, "limit of the parameter"
            step = min(step * (1.5 if found.steps <= 3 else 0.7 if found.steps > 5 else 1.0), _LONGEST_STEP)
        return points, "number of points"

    def both_ways(self, limits: tuple[float, float], step: float, count: int) -> tuple[list[_Point], tuple[str, str]]:
        """Points on both sides of the start, in the order along the curve, and why they end.

        Raises:
            InputError: Newton's method finds no state from the start.
        """
        first = self.correct(self.start, np.eye(len(self.start))[-1])
        if first is None:
            raise InputError("start", "must be near a state, Newton's method found none from it")
        ahead, last = self.march(first, step, limits, count)
        behind, end = self.march(first._replace(tangent=-first.tangent), step, limits, count)
        return [*(p._replace(tangent=-p.tangent) for p in behind[:0:-1]), *ahead], (end, last)

    def turns(self, points: list[_Point]) -> list[np.ndarray]:
        """Coordinates of all folds between neighbouring points."""
        return [self.turning(p, q) for p, q in pairwise(points) if p.tangent[-1] * q.tangent[-1] < 0]

    def turning(self, a: _Point, b: _Point) -> np.ndarray:
        """Coordinates where the parameter has an extremum along the curve, between two of its points."""
        best = [a]

        def slope(s: float) -> float:
            found = self.correct(a.w + s * a.tangent, a.tangent)
            best[0] = found or best[0]
            return float(best[0].tangent[-1])

        length = float((b.w - a.w) @ a.tangent)
        with contextlib.suppress(ValueError):  # no change of sign between points that are this close
            brentq(slope, 0.0, length, xtol=1e-6 * length)
        return best[0].w


def trace_branch(
    model: Model,
    parameter: str,
    limits: tuple[float, float],
    branch: str | None = "semantic",
    nodes: Rule | None = None,
    *,
    alpha: float = 2.0,
    start: FixedPoint | Overlaps | None = None,
    settings: Settings | None = None,
    step: float = _STEP,
    points: int = 200,
) -> list[BranchPath]:
    """Follow a fixed point through a parameter in both directions, around folds, in every replicate of the averages.

    Args:
        model, alpha: where the path starts.
        parameter: "alpha", the name of a scalar field of the model, or an entry such as "mixing[0,1]".
        limits: range of the parameter in which it is followed.
        branch: symmetry that is imposed, as in `solve`; None imposes none.
        nodes: averaging rule; by default `default_nodes` of `SIZES["path"]`, 2 replicates.
        start: near the state at the start; by default the branch is looked for on coarse averages.
        settings: tolerances of the solve at the start.
        step: first step of the arclength, relative to the sizes of overlaps and parameter at the start.
        points: at most so many in each direction.

    Returns:
        A `BranchPath` for every replicate; their scatter is the error of its numbers.

    Raises:
        InputError: an unknown parameter, limits that do not contain the start, no state at the start.
    """
    number, free = Parameter(parameter), branch_of(branch).free(model)
    here = number.read(model, alpha, "parameter")
    require(len(limits) == 2 and limits[0] <= here <= limits[1], "limits", limits, f"two numbers around {here}")
    nodes = default_nodes(model, SIZES["path"], replicates=2) if nodes is None else nodes
    a, settings = jnp.asarray(alpha, model.lam.dtype), settings or Settings()
    if start is None:
        start = near_branch(model, a, nodes.coarse, branch_start(model, branch), free, settings)
    elif isinstance(start, FixedPoint):
        start = start.overlaps
    curves = _continuations(model, a, number, here, nodes, free, start, settings)
    return [_path(curve, limits, step, points) for curve in curves]


def _continuations(
    model: Model,
    alpha: jax.Array,
    parameter: Parameter,
    value: float,
    nodes: Rule,
    free: jax.Array,
    start: Overlaps,
    settings: Settings,
) -> Iterator[_Continuation]:
    """The solution curve of every replicate, from a state near the start.

    Raises:
        InputError: there is none.
    """
    for k in range(nodes.replicates):
        replicate = nodes.replicate(k)
        found = _at_once(model, alpha, replicate, start, free, settings)
        if not found.has_state[0]:
            raise InputError("start", f"must be near a state, got one with status {Status.name_of(found.status[0])}")
        x = jax.tree.map(lambda v: v[0], found.overlaps)
        yield _Continuation(model, alpha, parameter, value, replicate, free, x)


def _at_once(
    model: Model, alpha: jax.Array, replicate: Replicate, x: Overlaps, free: jax.Array, settings: Settings
) -> State:
    """`solve_replicates` of a single replicate."""
    stack, starts = jax.tree.map(lambda v: v[None], (replicate, x))
    return solve_replicates(model, alpha, Rule(stack, replicate), starts, free, settings)


def folds_of(paths: Sequence[BranchPath]) -> list[tuple[float, float]]:
    """Folds of a branch with their error bars, in the order along it, out of the paths of `trace_branch`.

    Paths that do not have the usual number of folds, being shorter, are left out.
    """
    counts = [len(p.folds) for p in paths]
    usual = max(set(counts), key=counts.count)
    alike = zip(*(p.folds for p in paths if len(p.folds) == usual), strict=True)
    return [(float(np.mean(v)), float(error_bar(jnp.array(v)))) for v in alike]


def _path(curve: _Continuation, limits: tuple[float, float], step: float, count: int) -> BranchPath:
    points, ends = curve.both_ways(limits, step, count)
    turns = curve.turns(points)
    crossings = [
        0.5 * float(curve.plain(p.w)[-1] + curve.plain(q.w)[-1])
        for p, q in pairwise(points)
        if p.tangent[-1] * q.tangent[-1] > 0 and np.linalg.det(p.J[:, :-1]) * np.linalg.det(q.J[:, :-1]) < 0
    ]
    u = np.array([curve.plain(p.w) for p in points])
    states = jax.tree.map(lambda *a: np.concatenate(a), *(curve.seen(p.w) for p in points))
    # The Jacobian is that of F(x) - x, in scaled coordinates, which have the same eigenvalues.
    eigenvalues = np.array([1 + np.linalg.eigvals(p.J[:, :-1]) for p in points])
    model, _, parameter, _ = curve.arguments
    return BranchPath(
        parameter=parameter.name,
        values=u[:, -1],
        states=states,
        eigenvalues=np.take_along_axis(eigenvalues, np.argsort(-eigenvalues.real, 1), 1),
        labels=tuple(label(model, curve.overlaps(p.w)) for p in points),
        folds=tuple(float(curve.plain(w)[-1]) for w in turns),
        fold_states=tuple(curve.seen(w) for w in turns),
        crossings=tuple(crossings),
        ends=ends,
    )


def fold_near(
    model: Model,
    alpha: float,
    branch: str,
    nodes: Rule,
    start: Overlaps,
    limits: tuple[float, float],
) -> tuple[jax.Array, State] | None:
    """The fold of a branch in alpha that is nearest to a state, between limits: in every replicate.

    Returns:
        alpha (R,) and the states there; None where a path has no fold, or there is no state with these nodes.
    """
    number, free, dtype = Parameter("alpha"), branch_of(branch).free(model), model.lam.dtype
    found = []
    with contextlib.suppress(InputError):
        for curve in _continuations(model, jnp.asarray(alpha, dtype), number, alpha, nodes, free, start, Settings()):
            points, _ = curve.both_ways(limits, _STEP, _FOLD_POINTS)
            turns = {float(curve.plain(w)[-1]): w for w in curve.turns(points)}
            inside = [fold for fold in turns if limits[0] < fold < limits[1]]
            if not inside:
                return None
            fold = min(inside, key=lambda fold: abs(fold - alpha))
            found.append((jnp.asarray(fold, dtype), curve.seen(turns[fold])))
    if len(found) < nodes.replicates:
        return None
    alphas, states = zip(*found, strict=True)
    return jnp.stack(alphas), jax.tree.map(lambda *a: jnp.concatenate(a), *states)
