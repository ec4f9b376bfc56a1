"""Pseudo-arclength continuation of a fixed point in one parameter, through folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..averages.program import program
from ..averages.recipes import SIZES, AnyNodes
from ..averages.rules import Replicate
from ..base.arrays import StateArray, stacked
from ..base.errors import InputError, array_of, require_count, require_kind
from ..base.progress import Progress, in_parts
from ..base.results import Settings, Status
from ..model.checks import check_alpha
from ..model.model import Model
from ..model.overlaps import ZERO, Coordinates, Overlaps, admissible, branch_of, label, magnitudes
from ..model.parameters import Axis, Parameter, moved_number
from ..theory.engine import run, run_one
from ..theory.equations import expansion
from ..theory.paths import Call, Path, together
from ..theory.setting import Lane, branch_start
from ..theory.states import FixedPoint, check_start
from .branch_path import BranchPath
from .family import Family, prepared
from .secant import Secant

_TOLERANCE = 1e-6  # largest relative residual of a point; averages on lines are smooth to this accuracy
_STEPS = 8  # maximum number of Newton steps; a point that needs more is too far along the arc
_STEP = 0.05  # first step along the arc
_SHORTEST_STEP = 1e-4
_LONGEST_STEP = 0.2  # relative to the sizes of overlaps and parameter at the start
_MIN_COSINE = 0.7  # least cosine between two tangents: a sharper turn is more likely a jump to another branch
_FOLD_POINTS = 200
# Relative accuracy along the arc of folds, pitchforks and crossings, and maximum number of evaluations.
_TURN_TOLERANCE, _TURN_EVALUATIONS = 1e-6, 20
_AT_LIMIT = "limit of the parameter"
_OBSERVE = Settings(tol=1e-4, max_steps=0, warm_steps=0)


_Place = Float[np.ndarray, " k1"]  # scaled coordinates of a point


@program
def _expand(
    setting: tuple[Model, Float[StateArray, ""], Parameter, Float[StateArray, " 2"]],
    replicate: Replicate,
    u: Float[Array, " k1"],
) -> tuple[Float[Array, " k1-1"], Float[Array, "k1-1 k1"], Bool[Array, ""]]:
    """Return F(x) - x, its Jacobian, and whether x is admissible, at ``u = (overlaps, parameter)``.

    Rotations of the student's columns change no state. The part of F(x) - x along them is replaced by minus the motion
    along them, so that steps and tangents do not rotate.

    Args:
        setting: model, alpha, the parameter that varies, and the mask of the free order parameters.
    """
    model, alpha, parameter, free = setting
    coordinates = Coordinates(model, free)

    def at(u: Float[Array, " k1"]) -> tuple[Model, Float[StateArray, ""], Overlaps]:
        return *parameter.set(model, alpha, u[-1]), coordinates.unpack(u[:-1])

    F, J, _ = expansion(at, replicate, u, free)
    here, _, x = at(u)
    r, J = F - u[:-1], J - jnp.eye(u.size - 1, u.size, dtype=u.dtype)
    gauge = coordinates.gauge(x, jnp.ones_like(r))
    if len(gauge):
        along = gauge.T @ jnp.linalg.pinv(gauge.T)
        r, J = r - along @ r, J - along @ J - jnp.pad(along, ((0, 0), (0, 1)))
    return r, J, admissible(here, x)


class _ArcPoint(NamedTuple):
    """A solution: scaled coordinates, Jacobian, unit tangent, number of Newton steps."""

    w: Float[np.ndarray, " k+1"]
    J: Float[np.ndarray, "k k+1"]
    tangent: Float[np.ndarray, " k+1"]
    steps: int


class _Continuation:
    """Solution curve of one replicate in scaled coordinates, the parameter last. Methods that solve return paths."""

    def __init__(self, family: Family, branch: str | None, number: int, x: Overlaps, limits: tuple[float, float]):
        self.limits, self.turns = limits, dict[frozenset[bytes], _Place]()
        self.family, self.branch, self.number = family, branch, number
        free = branch_of(branch).free(family.model)
        self.setting, self.replicate = (family.model, family.alpha, family.number, free), family.nodes.replicate(number)
        self.coordinates = Coordinates(family.model, free)
        value = family.value
        ones = jax.tree.map(jnp.ones_like, x)
        # Indices of the coordinates that symmetry does not set to zero.
        self.active = np.flatnonzero(np.append(np.asarray(self.coordinates.pack(ones)), 1.0))
        self.scale = np.append(np.asarray(self.coordinates.scale(x)), abs(value) or 1.0)
        self.start = (np.append(np.asarray(self.coordinates.pack(x)), value) / self.scale)[self.active]
        self.bounds = np.array(limits) / self.scale[-1]

    def unscaled(self, w: Float[np.ndarray, " k1"]) -> Float[np.ndarray, " n1"]:
        # All coordinates in their own units, with zeros where symmetry imposes them.
        u = np.zeros(len(self.scale))
        u[self.active] = w * self.scale[self.active]
        u[-1] = next((limit for limit, w_end in zip(self.limits, self.bounds, strict=True) if w[-1] == w_end), u[-1])
        return u

    def correct(self, w: Float[np.ndarray, " k1"], direction: Float[np.ndarray, " k1"]) -> Path:
        """Path of Newton's method in the plane through `w` normal to `direction`; returns an `_ArcPoint`, or None.

        It gives up where a step leaves the limits, beyond which no model is looked at.
        """
        guess, rows = w, self.active[:-1]
        for k in range(_STEPS):
            if not self.bounds[0] <= w[-1] <= self.bounds[1]:
                return None
            r, J, is_inside = yield Call(_expand, (self.setting, self.replicate, jnp.asarray(self.unscaled(w))))
            r = np.asarray(r)[rows] / self.scale[rows]
            J = np.asarray(J)[np.ix_(rows, self.active)] * self.scale[self.active] / self.scale[rows, None]
            residual = float(np.max(np.abs(r)))
            if not (is_inside and np.isfinite(residual) and np.max(np.abs(w - guess)) < 0.5):
                return None
            if residual < _TOLERANCE:
                tangent = np.linalg.svd(J)[2][-1]
                return _ArcPoint(w, J, tangent * np.sign(tangent @ direction), k)
            try:
                w = w + np.linalg.solve(np.vstack([J, direction]), np.append(-r, -(direction @ (w - guess))))
            except np.linalg.LinAlgError:  # at a point where branches cross
                return None
            if not np.any(direction[:-1]):  # the parameter stays, whatever the rounding error
                w[-1] = guess[-1]
        return None

    def value(self, w: Float[np.ndarray, " k1"]) -> float:
        """Return the parameter at a point."""
        return float(self.unscaled(w)[-1])

    def overlaps(self, w: Float[np.ndarray, " k1"]) -> Overlaps:
        return self.coordinates.unpack(jnp.asarray(self.unscaled(w)[:-1]))

    def state_at(self, w: Float[np.ndarray, " k1"]) -> Path:
        """Path that evaluates the state at a point of the curve."""
        setting = self.family.at(self.value(w), self.branch)._replace(settings=_OBSERVE)
        return (yield Lane(setting, self.overlaps(w), self.number))

    def march(self, first: _ArcPoint, step: float, count: int) -> Path:
        """Path that follows the curve from `first` along its tangent; returns the points and why they end."""
        points = [first]
        while len(points) < count:
            last = points[-1]
            point, at_limit = yield from self.advance(last, step)
            if point is last:
                return points, _AT_LIMIT
            if point is None or point.tangent @ last.tangent < _MIN_COSINE:
                step /= 2
                if step < _SHORTEST_STEP:
                    return points, "no further point was found"
                continue
            points.append(point)
            if at_limit:
                return points, _AT_LIMIT
            step = min(step * (1.5 if point.steps <= 3 else 0.7 if point.steps > 5 else 1.0), _LONGEST_STEP)
        return points, "number of points"

    def advance(self, last: _ArcPoint, step: float) -> Path:
        """Path to the next point, which is on a limit if the tangent reaches it within the step.

        Returns:
            The point, `last` itself if it is on the limit already, or None if there is none, or if the curve turns
            beyond a limit before it; and whether the point is on a limit.
        """
        slope = last.tangent[-1]
        if slope == 0 or self.bounds[0] < last.w[-1] + step * slope < self.bounds[1]:
            point = yield from self.correct(last.w + step * last.tangent, last.tangent)
            if point is not None and point.tangent[-1] * slope < 0:
                turn = yield from self.zero_between(last, point, lambda p: p.tangent[-1])
                if turn is None:
                    return None, False
                self.turns[_key(last, point)] = turn.w
            return point, False
        end = self.bounds[int(slope > 0)]
        if last.w[-1] == end:
            return last, True
        w = last.w + (end - last.w[-1]) / slope * last.tangent
        w[-1] = end
        return (yield from self.correct(w, np.sign(slope) * np.eye(len(w))[-1])), True

    def march_both_ways(self, step: float, count: int) -> Path:
        """Path that follows the curve in both directions; returns the points in order, and why either side ends.

        Raises:
            InputError: Newton's method does not converge from the start.
        """
        first = yield from self.correct(self.start, np.eye(len(self.start))[-1])
        if first is None:
            raise InputError("start", "must be near a state, Newton's method found none from it")
        reversed_first = first._replace(tangent=-first.tangent)
        (forward, forward_end), (backward, backward_end) = yield [
            self.march(p, step, count) for p in (first, reversed_first)
        ]
        return [*(p._replace(tangent=-p.tangent) for p in backward[:0:-1]), *forward], (backward_end, forward_end)

    def turning_points(self, points: list[_ArcPoint]) -> tuple[list[_Place], list[_Place]]:
        """Return the coordinates of all folds and pitchforks, which `march` has located between neighbouring points."""
        folds, forks = list[_Place](), list[_Place]()
        for k, (p, q) in enumerate(pairwise(points)):
            if p.tangent[-1] * q.tangent[-1] < 0:
                turn = self.turns[_key(p, q)]
                around = [self.overlaps(point.w) for point in points[max(k - 1, 0) : k + 3]]
                (forks if _mirrored(self.family.model, around, self.overlaps(turn)) else folds).append(turn)
        return folds, forks

    def crossing_values(self, points: list[_ArcPoint]) -> Path:
        """Path that locates where an eigenvalue of DF passes one away from turning points; returns the parameters."""
        pairs = [
            (p, q)
            for p, q in pairwise(points)
            if p.tangent[-1] * q.tangent[-1] > 0 and _determinant(p) * _determinant(q) < 0
        ]
        located = yield [self.zero_between(p, q, _determinant) for p, q in pairs]
        values = []
        for (p, q), point in zip(pairs, located, strict=True):
            share = _determinant(p) / (_determinant(p) - _determinant(q))
            values.append(self.value(p.w + share * (q.w - p.w) if point is None else point.w))
        return values

    def zero_between(self, a: _ArcPoint, b: _ArcPoint, number: Callable[[_ArcPoint], float]) -> Path:
        """Path that locates where a number of the points of the curve is zero between two points.

        Returns:
            The point, or None if Newton's method fails on the way, or the curve leaves the limits.
        """
        length, nearest = float((b.w - a.w) @ a.tangent), b
        sign = -np.sign(number(a))  # makes the number rise through zero from a to b
        # `Secant` takes positive places only, so the arc from a to b is numbered from length to 2 length.
        search = Secant(length, sign * number(a), np.nan, length, 2 * length, 1.0)
        search = search.updated(2 * length, sign * float(number(b)))
        for _ in range(_TURN_EVALUATIONS):
            trial = search.next()
            if abs(trial - search.x) <= _TURN_TOLERANCE * length:
                return nearest
            nearest = yield from self.correct(a.w + (trial - length) * a.tangent, a.tangent)
            if nearest is None:
                return None
            search = search.updated(trial, sign * float(number(nearest)))
        return None


def _key(a: _ArcPoint, b: _ArcPoint) -> frozenset[bytes]:
    """Return what identifies the arc between two points, in either direction."""
    return frozenset((a.w.tobytes(), b.w.tobytes()))


def _determinant(point: _ArcPoint) -> float:
    """Return the determinant of DF - 1, which is zero at turning points and where another branch is born."""
    return float(np.linalg.det(point.J[:, :-1]))


def _mirrored(model: Model, points: Sequence[Overlaps], turn: Overlaps) -> bool:
    """Return whether theta or m changes its sign along points, within two steps that contain a turn."""
    present = np.max([magnitudes(model, x) for x in points], 0) > ZERO
    for name in np.array(["theta", "m"])[present]:
        *values, there = (float(np.vdot(getattr(points[0], name), getattr(x, name))) for x in (*points, turn))
        for steps in (values[:3], values[1:]):
            if min(steps) <= 0 <= max(steps) and min(steps) <= there <= max(steps):
                return True
    return False


def trace_branch(
    model: Model,
    parameter: str | Axis,
    limits: tuple[float, float],
    branch: str | None = "semantic",
    nodes: AnyNodes = None,
    *,
    alpha: float = 2.0,
    start: FixedPoint | Overlaps | None = None,
    settings: Settings | None = None,
    step: float = _STEP,
    points: int = 200,
    progress: Progress = None,
) -> list[BranchPath]:
    """Follow a branch through a parameter in both directions and around folds, on every replicate of the averages.

    Args:
        model, alpha: setting at which the path starts.
        parameter: "alpha", the name of a number of the model, an entry such as "mixing[0,1]", or a number of your own,
            ``Axis("angle", value, put)`` with its value at the start.
        limits: range of the parameter in which the branch is followed; a path that reaches a limit ends exactly there.
        branch: symmetry that is imposed, as in `solve`; None imposes none.
        nodes: recipe of the averages, or number of nodes; by default `SIZES["path"]`, 2 replicates.
        start: state or overlaps near the first state; by default the branch is searched for on the coarse replicate.
        settings: tolerances of the solve at the start; by default `Settings()`.
        step: first step of the arclength, relative to the sizes of overlaps and parameter at the start.
        points: maximum number of points in each direction.
        progress: as in `solve`.

    Returns:
        A `BranchPath` for every replicate; the scatter between them gives the error bars.

    Raises:
        InputError: the parameter or branch is unknown, the limits do not contain the start or leave the model's range,
            there is no state at the start, or alpha, nodes, start, settings, step or points are of the wrong kind.
    """
    family = prepared(model, nodes, settings, size=SIZES["path"], replicates=2, even=branch is not None)
    branch, number = branch_of(branch).name, moved_number(parameter, model, "parameter")
    family = family._replace(number=number, alpha=check_alpha(model, alpha))
    value = family.value
    requirement = f"two increasing numbers around {value}"
    low, high = array_of(limits, "limits", requirement, lambda a: a.size == 2 and a[0] <= value <= a[1] and a[0] < a[1])
    number.check(family.model, np.array([low, high]), "limits")
    array_of(step, "step", "a positive number", lambda a: a > 0, ndim=0)
    require_count(points, "points")
    require_kind(start, "start", (FixedPoint, Overlaps, type(None)), "a FixedPoint or Overlaps near the state")
    if start is None:
        coarse_lane = family.at(value, branch).coarse_lane(branch_start(model, branch))
        progress = in_parts(progress)
        overlaps = run_one(together([coarse_lane]), progress)[0].overlaps
    else:
        overlaps = check_start(model, start.overlaps if isinstance(start, FixedPoint) else start)
    numbers = range(family.nodes.replicates)
    paths = [_branch_path(family, branch, k, overlaps, (low, high), step, points) for k in numbers]
    return run(paths, progress=progress)


def _continuation(
    family: Family, branch: str | None, number: int, start: Overlaps, limits: tuple[float, float]
) -> Path:
    """Path that solves for the state near the start on one replicate; returns the `_Continuation` from there.

    Raises:
        InputError: there is no state near the start.
    """
    state = yield Lane(family.at(family.value, branch), start, number)
    if not state.has_state:
        raise InputError("start", f"must be near a state, got one with status {Status.name_of(state.status)}")
    return _Continuation(family, branch, number, state.overlaps, limits)


def _branch_path(
    family: Family,
    branch: str | None,
    number: int,
    start: Overlaps,
    limits: tuple[float, float],
    step: float,
    count: int,
) -> Path:
    """Path of `trace_branch` on one replicate; returns a `BranchPath`."""
    curve = yield from _continuation(family, branch, number, start, limits)
    points, ends = yield from curve.march_both_ways(step, count)
    folds, forks = curve.turning_points(points)
    crossings = yield from curve.crossing_values(points)
    states, fold_states, fork_states = yield [
        together([curve.state_at(w) for w in places]) for places in ([p.w for p in points], folds, forks)
    ]
    # The Jacobian is that of F(x) - x in scaled coordinates; scaling leaves its eigenvalues unchanged.
    eigenvalues = np.array([1 + np.linalg.eigvals(p.J[:, :-1]) for p in points])
    return BranchPath(
        parameter=family.number.name,
        values=np.array([curve.value(p.w) for p in points]),
        states=stacked(states),
        eigenvalues=np.take_along_axis(eigenvalues, np.argsort(-eigenvalues.real, 1), 1),
        labels=tuple(label(family.model, curve.overlaps(p.w)) for p in points),
        folds=tuple(map(curve.value, folds)),
        fold_states=tuple(stacked([state]) for state in fold_states),
        pitchforks=tuple(map(curve.value, forks)),
        pitchfork_states=tuple(stacked([state]) for state in fork_states),
        crossings=tuple(crossings),
        ends=ends,
    )


def fold_near(family: Family, branch: str | None, start: Overlaps, limits: tuple[float, float]) -> Path:
    """Path that locates the fold nearest to a state, between limits, on every replicate.

    Returns:
        The parameter (R,) and the states there; None if any replicate has no fold or no state.
    """
    folds = yield [_nearest_fold(family, branch, k, start, limits) for k in range(family.nodes.replicates)]
    if any(fold is None for fold in folds):
        return None
    return np.array([value for value, _ in folds], family.model.lam.dtype), stacked([state for _, state in folds])


def _nearest_fold(
    family: Family, branch: str | None, number: int, start: Overlaps, limits: tuple[float, float]
) -> Path:
    """Path of `fold_near` on one replicate; returns the parameter and the state, or None."""
    try:
        curve = yield from _continuation(family, branch, number, start, limits)
        points, _ = yield from curve.march_both_ways(_STEP, _FOLD_POINTS)
    except InputError:  # there is no state
        return None
    folds, _ = curve.turning_points(points)
    candidates = [w for w in folds if limits[0] < curve.value(w) < limits[1]]
    if not candidates:
        return None
    nearest = min(candidates, key=lambda w: abs(curve.value(w) - family.value))
    return curve.value(nearest), (yield from curve.state_at(nearest))
