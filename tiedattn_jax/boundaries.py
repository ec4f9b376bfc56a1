"""Boundaries of the phase diagram as curves: continuation in a second parameter of what happens at one alpha."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.interpolate import CubicHermiteSpline, CubicSpline, PPoly
from scipy.optimize import brentq

from .lines import default_nodes
from .model import Model, require, scalar, with_scalar
from .nodes import Rule
from .overlaps import Overlaps
from .solve import State, branch_start, error_bar, free_of, solve_replicates
from .state_evolution import Settings, has_state

# What crosses zero at a boundary, and on which branches.
BOUNDARIES: dict[str, tuple[tuple[str, ...], Callable[..., jax.Array]]] = {
    "alpha_c": (("positional", "semantic"), lambda p, s: p.train_loss - s.train_loss),
    "semantic baseline": (("semantic",), lambda s: s.gen_error_linear - s.gen_error),
    "positional baseline": (("positional",), lambda p: p.gen_error_linear - p.gen_error),
    "semantic instability": (("semantic",), lambda s: 1 - s.diagnostics.growth_m),
    "positional instability": (("positional",), lambda p: p.diagnostics.growth_theta - 1),
    "semantic end": (("uninformed",), lambda u: u.diagnostics.growth_theta - 1),
    "positional end": (("uninformed",), lambda u: u.diagnostics.growth_m - 1),
}
# What it means that two boundaries meet.
MEETINGS = {
    frozenset(("alpha_c", "semantic baseline")): "from here on attention beats the linear baseline at alpha_c",
    frozenset(("alpha_c", "positional baseline")): "from here on attention beats the linear baseline before alpha_c",
    frozenset(("alpha_c", "semantic instability")): "the semantic state is stable only where it is global",
    frozenset(("alpha_c", "positional instability")): "the positional state is stable only where it is global",
    frozenset(("semantic instability", "positional instability")): "end of the bistable region",
    frozenset(("semantic end", "positional end")): "the uninformed state turns unstable towards both at once",
}
SEARCH = np.geomspace(3.0, 0.05, 19)
_AROUND = np.array([1.1, 1.03, 0.97, 0.91])
_FURTHER = np.geomspace(1.8, 0.4, 9)  # where a prediction has failed
_HALVINGS = 5  # of an interval in which a branch ends
_TOLERANCE = 1e-3  # a step in alpha, relative, after which a secant or Newton step is final


@dataclass(frozen=True)
class Boundary:
    """alpha as a function of a parameter.

    Attributes:
        name: of `BOUNDARIES`.
        parameter, values: the second parameter and where it was solved, (n,).
        alpha, stderr: the boundary and its error bar, (n,); NaN from where it could not be followed.
        slope: d alpha / d parameter, (n,), exact for alpha_c; else that of a spline through the points.
        status: the worst `Status` of the states, (n,).
    """

    name: str
    parameter: str
    values: np.ndarray
    alpha: np.ndarray
    stderr: np.ndarray
    slope: np.ndarray
    status: np.ndarray

    @property
    def curve(self) -> PPoly:
        """Cubic interpolation with the slopes, between the ends of what was found."""
        good = np.isfinite(self.alpha)
        if good.sum() < 2:
            raise ValueError(f"a curve needs two points or more, {self.name} has {good.sum()}")
        return CubicHermiteSpline(self.values[good], self.alpha[good], self.slope[good], extrapolate=False)

    def meets(self, other: Boundary) -> list[tuple[float, float]]:
        """Where two boundaries have the same alpha: pairs (parameter, alpha), increasing."""
        if min(np.isfinite(self.alpha).sum(), np.isfinite(other.alpha).sum()) < 2:
            return []
        first, second = self.curve, other.curve
        low, high = max(first.x[0], second.x[0]), min(first.x[-1], second.x[-1])
        places = np.linspace(low, high, 400) if low < high else np.zeros(0)
        gap = first(places) - second(places)
        turns = np.flatnonzero(gap[:-1] * gap[1:] < 0)
        found = [brentq(lambda v: first(v) - second(v), places[i], places[i + 1]) for i in turns]
        return [(float(v), float(first(v))) for v in found]


class Meeting(NamedTuple):
    """Where two boundaries have the same alpha: their names, the parameter's value, alpha, and what that means."""

    names: tuple[str, str]
    value: float
    alpha: float
    meaning: str


def meetings(boundaries: Iterable[Boundary]) -> list[Meeting]:
    """All points where two of some boundaries in the same parameter meet, in the order of its values."""
    return sorted(
        (
            Meeting((a.name, b.name), *place, MEETINGS.get(frozenset((a.name, b.name)), ""))
            for a, b in combinations(boundaries, 2)
            for place in a.meets(b)
        ),
        key=lambda meeting: meeting.value,
    )


class _Row(NamedTuple):
    alpha: float
    stderr: float
    slope: float
    status: int


class _Point(NamedTuple):
    value: float
    alpha: float
    states: tuple[Overlaps, ...]  # leaves lead with the replicate axis


def trace_boundary(
    model: Model,
    name: str,
    parameter: str,
    values: Sequence[float] | np.ndarray,
    nodes: Rule | None = None,
    *,
    guess: float | None = None,
    settings: Settings | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Boundary:
    """Follow a boundary through the values of a parameter, in the order in which they are given.

    Every point starts from a prediction out of the points before it (for alpha_c with the envelope formula
    ``d alpha_c / dp = -(d_p Delta Phi) / (d_alpha Delta Phi)``), of alpha and of the states of every replicate; one evaluation is
    then enough where the prediction was good.

    Args:
        name: "alpha_c", where the losses cross; "semantic baseline" or "positional baseline", where the branch's test
            error crosses that of the linear baseline (alpha_l is the semantic one where it lies above alpha_c);
            "semantic instability" or "positional instability", where the branch stops being a minimum, the other order
            parameter growing on it; "semantic end" or "positional end", where the branch leaves the uninformed state in a pitchfork.
        parameter: name of a scalar field of the model, or an entry such as "mixing[0,1]".
        values: monotonic.
        nodes: averaging rule; by default `default_nodes`.
        guess: alpha within 10 % of the boundary at the first value; by default it is searched for in `SEARCH`.
        settings: tolerances.
        progress: wraps the loop over the values.

    Raises:
        ValueError: unknown name or parameter, values that are not monotonic or finite, no boundary at the first value.
    """
    if name not in BOUNDARIES:
        raise ValueError(f"name must be one of {', '.join(BOUNDARIES)}, got name={name!r}")
    scalar(model, parameter, "parameter")
    values = np.asarray(values, float)
    steps = np.diff(values)
    good = values.ndim == 1 and values.size and np.all(np.isfinite(values)) and (np.all(steps > 0) or np.all(steps < 0))
    require(good, "values", values, "finite and monotonic")
    nodes = default_nodes(model) if nodes is None else nodes
    settings = settings or Settings(tol=1e-4, warm_steps=20)
    branches, value_of = BOUNDARIES[name]

    def at(value: Any) -> Model:
        return with_scalar(model, value, parameter)

    def along(value: float) -> Model:
        """d model / d parameter."""
        one = jnp.ones((), model.lam.dtype)
        return jax.jvp(at, (value * one,), (one,))[1]

    def evaluate(value: float, alpha: float, xs: tuple[Overlaps, ...]) -> tuple[State, ...]:
        here, a = at(value), jnp.asarray(alpha, model.lam.dtype)
        frees = [free_of(model, b) for b in branches]
        return tuple(solve_replicates(here, a, nodes, x, free, settings) for x, free in zip(xs, frees, strict=True))

    steepness = np.nan  # d g / d alpha, kept from one value to the next

    def settle(value: float, alpha: float, xs: tuple[Overlaps, ...]) -> tuple[_Row, _Point | None]:
        nonlocal steepness
        before: tuple[float, np.ndarray] | None = None
        for _ in range(8):
            states = evaluate(value, alpha, xs)
            g, xs = np.asarray(value_of(*states)), tuple(s.overlaps for s in states)
            status = max(int(s.status.max()) for s in states)
            if not _usable(states):
                return _Row(np.nan, np.nan, np.nan, status), None
            slope = np.nan
            if name == "alpha_c":
                by_model, by_alpha = jax.tree.map(jnp.subtract, *(s.train_loss_partials for s in states))
                steepness = float(by_alpha.mean())
                mean = jax.tree.map(lambda a: a.mean(0), by_model)
                slope = -float(sum(map(jnp.vdot, jax.tree.leaves(mean), jax.tree.leaves(along(value))))) / steepness
            elif before is not None and abs(alpha - before[0]) > 1e-9:
                steepness = float((g - before[1]).mean()) / (alpha - before[0])
            before = alpha, g
            step = -g.mean() / steepness if np.isfinite(steepness) else 0.02 * alpha
            if np.isfinite(steepness) and abs(step) < _TOLERANCE * alpha:
                break
            alpha += float(np.clip(step, -0.2 * alpha, 0.2 * alpha))
        roots = jnp.asarray(alpha - g / steepness)
        row = _Row(float(roots.mean()), float(error_bar(roots)), slope, status)
        return row, _Point(value, row.alpha, xs)

    def search(value: float, around: np.ndarray) -> tuple[float, tuple[Overlaps, ...]]:
        starts = tuple(
            jax.tree.map(lambda a: jnp.broadcast_to(a, (nodes.replicates, *a.shape)), branch_start(at(value), b))
            for b in branches
        )
        return _first(partial(evaluate, value), value_of, starts, around)

    alpha, xs = search(values[0], SEARCH if guess is None else guess * _AROUND)
    points: list[_Point] = [_Point(values[0], alpha, xs)]
    rows: list[_Row] = []
    for value in progress(values):
        row, point = settle(value, *_predict(points, value, rows))
        if point is None:
            with contextlib.suppress(ValueError):
                row, point = settle(value, *search(value, points[-1].alpha * _FURTHER))
        rows.append(row)
        if point is not None:
            points = [*points[-2:], point] if len(rows) > 1 else [point]
    found, bars, slopes, statuses = np.array(rows).T
    order = np.argsort(values)
    values, found, bars, slopes, statuses = (a[order] for a in (values, found, bars, slopes, statuses))
    good = np.isfinite(found)
    if name != "alpha_c" and good.sum() > 1:
        slopes[good] = CubicSpline(values[good], found[good])(values[good], 1)
    return Boundary(name, parameter, values, found, bars, slopes, statuses.astype(int))


def _predict(points: list[_Point], value: float, rows: list[_Row]) -> tuple[float, tuple[Overlaps, ...]]:
    """alpha and states at a new value: polynomial extrapolation of the last points, of at most three."""
    places = np.array([p.value for p in points])

    def weight(i: int) -> float:  # of Lagrange
        others = np.delete(places, i)
        return float(np.prod((value - others) / (places[i] - others)))

    weights = [weight(i) for i in range(len(points))]

    def mix(*a: Any) -> Any:
        return sum(w * b for w, b in zip(weights, a, strict=True))

    alpha = mix(*(p.alpha for p in points))
    if len(points) == 1 and rows and np.isfinite(rows[-1].slope):
        alpha = points[0].alpha + rows[-1].slope * (value - places[0])
    last = points[-2:]  # the states linearly: theirs is the noise of a replicate
    if len(last) == 2:
        ratio = (value - last[1].value) / (last[1].value - last[0].value)
        states = jax.tree.map(lambda a, b: b + ratio * (b - a), last[0].states, last[1].states)
    else:
        states = last[0].states
    return float(alpha), states


def _usable(states: tuple[State, ...]) -> bool:
    """Whether every replicate has a state on every branch, resolved by its nodes or not."""
    return all(bool(np.all(has_state(s.status, s.residual))) for s in states)


class _Look(NamedTuple):
    """A function of the states at one alpha, and the states."""

    alpha: float
    g: float
    xs: tuple[Overlaps, ...]

    def zero(self, other: _Look) -> tuple[float, tuple[Overlaps, ...]]:
        """Where a line through two of them crosses zero."""
        share = self.g / (self.g - other.g)
        between = jax.tree.map(lambda a, b: a + share * (b - a), self.xs, other.xs)
        return self.alpha + share * (other.alpha - self.alpha), between


def _first(
    evaluate: Callable[[float, tuple[Overlaps, ...]], tuple[State, ...]],
    value_of: Callable[..., jax.Array],
    starts: tuple[Overlaps, ...],
    alphas: np.ndarray,
) -> tuple[float, tuple[Overlaps, ...]]:
    """alpha and states where a function of the states changes its sign, between neighbours in a list of alphas.

    If it does so nowhere, it may between an alpha at which there are states and one at which there are none.

    Raises:
        ValueError: it does not.
    """

    def look(alpha: float, xs: tuple[Overlaps, ...]) -> _Look | None:
        states = evaluate(alpha, xs)
        if not _usable(states):
            return None
        return _Look(alpha, float(value_of(*states).mean()), tuple(s.overlaps for s in states))

    looks: list[_Look | None] = []
    for alpha in map(float, alphas):
        before = looks[-1] if looks else None
        here = look(alpha, starts if before is None else before.xs)
        if here is not None and before is not None and here.g * before.g < 0:
            return here.zero(before)
        looks.append(here)
    for (alpha, one), (beta, other) in pairwise(zip(map(float, alphas), looks, strict=True)):
        inside, outside = one or other, beta if one else alpha
        if inside is None or (one and other):
            continue
        for _ in range(_HALVINGS):
            middle = 0.5 * (inside.alpha + outside)
            here = look(middle, inside.xs)
            if here is None:
                outside = middle
            elif here.g * inside.g < 0:
                return here.zero(inside)
            else:
                inside = here
    raise ValueError(
        f"values must begin where the boundary exists, got none at the first for alpha from {alphas[-1]:g} to {alphas[0]:g}"
    )
