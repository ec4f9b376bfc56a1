"""Maxwell's construction of the jumps of the proximal operator along a line, and of the pieces between them.

The proximal operator of the loss at a student field h with response V is the z that minimises
1/2 (z - h)^T V^{-1} (z - h) + loss(z); the minimum is the Moreau envelope. The fields here lie on a line
h(s) = o + s g. With c = V^{-1} g, the energy at s = 0 is minimised on each plane c . z = t:

    A(t) = min { 1/2 (z - o)^T V^{-1} (z - o) + loss(z) : c . z = t }.

A is a smooth function of one variable, the *profile* of the line. At its derivative A'(t) = s, the minimiser on the
plane is stationary for the field h(s). The Moreau envelope along the line is
min_t A(t) - s (t - c . o) + 1/2 s^2 c . g. The proximal operator jumps where A is not convex, from one end of a common
tangent to the other: Maxwell's construction.

All computations use t as the variable. At one s there may be several minima, whose branches would have to be told
apart; at one t there is a single minimiser. Near the cusp at which a jump ends, z is singular like the cube root of s,
but s(t) is still smooth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ..base.arrays import either, indexed, ldl_solve, tiled, total
from .moreau import ProxProblem
from .program import counted, loop, repeat
from .prox import Origin, in_groups, lowest_minima, proximal

_GRID = 24  # points of the profile that is searched for common tangents
# In `trace` each point of the profile takes one Newton step, from the tangent of the point before. One is enough,
# because the profile only locates the jumps and its energies are right to second order. All points take the same number
# of steps: a point with more steps than its neighbours has a better energy, and looks like a jump. Uneven steps left
# 2.6 % of the lines of one setting unresolved.
# In `between`, which makes the nodes of the average, a section takes at least two steps, at most eight, and stops when
# the last one is small, relative to z.
_MIN_NEWTON, _MAX_NEWTON, _STEP_TOLERANCE = 2, 8, 1e-4
_TANGENT_STEPS = 16  # Newton steps for a common tangent; so many are needed only where a jump is about to end


class FieldLines(eqx.Module):
    """Proximal problems on N lines h(s) = origin + s direction in the student's fields, flattened: n = L r."""

    problem: ProxProblem  # that of all points of a line
    origin: Float[Array, "n N"]
    direction: Float[Array, "n N"]
    normal: Float[Array, "n N"]  # V^{-1} direction
    origin_of_loss: Origin | None = None  # loss at zero student fields, if it is known, for all points of a line

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What differs from line to line, arrays (..., N); all lines share the model and the response."""
        return self.problem.y, self.origin, self.direction, self.normal, self.origin_of_loss

    def having(self, arrays: tuple[Any, ...]) -> FieldLines:
        """Return lines with other `arrays`."""
        y, *rest = arrays
        return FieldLines(self.problem._replace(y=y), *rest)

    def map_lines(self, fn: Callable[[Array], Array]) -> FieldLines:
        """Return the problems on other lines: `fn` takes them out of an array (..., N)."""
        return self.having(jax.tree.map(fn, self.arrays))

    def tiled(self, count: int) -> FieldLines:
        """Return the lines `count` times, one copy after the other."""
        return self.map_lines(lambda a: tiled(a, count))

    def at(self, s: Float[Array, " #N"] | Float[Array, ""]) -> Float[Array, "L r N"]:
        """Return the student's fields at s."""
        return (self.origin + s * self.direction).reshape(*self.problem.V.shape[:2], -1)


class _Row:
    """One of the first rows of a `Section`."""

    def __init__(self, index: int):
        self.index = index

    def __get__(self, section: Section, owner: type) -> Float[Array, "*places N"]:
        return section.rows[..., self.index, :]


class Section(eqx.Module):
    """The minimiser z on the plane c . z = t of every line, and its energy A(t) with two derivatives.

    All numbers are rows of one array, because each array that a loop carries or indexes costs kernels to compile. The
    properties are the numbers. Leading axes, if any, number the places on a line.

    Attributes:
        rows: t, energy, s, slope, error, z, tangent: 5 + 2 n rows.
        t: place of the plane.
        energy: A(t).
        s: A'(t), the place on the line at which the minimiser on the plane is stationary.
        slope: A''(t).
        error: largest entry of the last Newton step; infinite after a failed search.
    """

    rows: Float[Array, "*places rows N"]
    t = _Row(0)
    energy = _Row(1)
    s = _Row(2)
    slope = _Row(3)
    error = _Row(4)

    @classmethod
    def of(
        cls,
        t: Float[Array, "*places N"],
        z: Float[Array, "*places n N"],
        tangent: Float[Array, "*places n N"],
        energy: Float[Array, "*places N"],
        s: Float[Array, "*places N"],
        slope: Float[Array, "*places N"],
        error: Float[Array, "*places N"],
    ) -> Section:
        """Make a section from its numbers."""
        numbers = (a[..., None, :] for a in (t, energy, s, slope, error))
        return cls(jnp.concatenate([*numbers, z, tangent], -2))

    @property
    def z(self) -> Float[Array, "*places n N"]:
        """The minimiser."""
        return jnp.split(self.rows[..., 5:, :], 2, -2)[0]

    @property
    def tangent(self) -> Float[Array, "*places n N"]:
        """dz/dt."""
        return jnp.split(self.rows[..., 5:, :], 2, -2)[1]

    @property
    def settled(self) -> Bool[Array, "*places N"]:
        """Whether the last Newton step was small."""
        return self.error < _STEP_TOLERANCE * (1 + jnp.max(jnp.abs(self.z), -2))

    def replace(self, **changes: Float[Array, "..."]) -> Section:
        """Return the section with some parts replaced."""
        names = ("t", "z", "tangent", "energy", "s", "slope", "error")
        return Section.of(**{name: getattr(self, name) for name in names} | changes)


def section(lines: FieldLines, t: Float[Array, " N"], z: Float[Array, "n N"]) -> Section:
    """Take one Newton step towards the minimiser on the plane c . z = t.

    The errors of s = A'(t) and A are then of second order in the distance of z from the minimiser; that of A'' is of
    first order.

    Args:
        lines: N lines.
        t: the planes.
        z: points on them.
    """
    c = lines.normal
    e = lines.problem.expand(z, lines.origin)
    # Adding a multiple of c c^T changes no step within the plane, and makes the matrix positive definite there.
    size = total(total(jnp.abs(e.hessian)))
    penalty = 2 * size / total(c**2)
    hessian = e.hessian + penalty * c[:, None] * c
    floor = lines.problem.least_pivots()
    # Without the constraint, Newton's step would be -free_step. A multiple of H^{-1} c brings it back into the plane.
    free_step = ldl_solve(hessian, e.slope, floor)
    normal_step = ldl_solve(hessian, c, floor)
    compliance = total(c * normal_step)
    s = total(c * free_step) / compliance
    step = s * normal_step - free_step
    # A'' is 1 / (c . H^{-1} c); the penalty adds itself to it.
    energy, slope, error = e.loss + e.quadratic, 1 / compliance - penalty, jnp.max(jnp.abs(step), 0)
    return Section.of(t, z + step, normal_step / compliance, energy, s, slope, error)


def trace(lines: FieldLines, start: Section, ts: Float[Array, "places N"]) -> Section:
    """Trace the profile: take sections at one t after the other, each from the tangent of the one before.

    Args:
        start: section from whose tangent the first one starts.
        ts: the places t.

    Returns:
        Sections at the places.
    """

    def step(_: Any, arrays: tuple, last: Section, t: Float[Array, " N"]) -> tuple[Section, Section]:
        point = section(lines.having(arrays), t, last.z + last.tangent * (t - last.t))
        return point, point

    return loop(step, lines.arrays, start, ts, count=len(ts))[1]


def between(lines: FieldLines, profile: Section, t: Float[Array, "places N"]) -> Section:
    """Return converged sections at any t within the profile, each started from the nearest point of the profile.

    Args:
        profile: sections at evenly spaced t, with a leading axis, see `energy_profile`.
        t: the places.

    Returns:
        Sections at the places; those that did not converge are not `settled`.
    """
    count, size = t.shape
    first, last = profile.t[0], profile.t[-1]
    index = jnp.round((t - first) / (last - first) * (len(profile.t) - 1))
    neighbours = _take(profile, jnp.clip(index, 0, len(profile.t) - 1).astype(int))

    def refine(lines: FieldLines, neighbours: Section, t: Float[Array, " N"]) -> Section:
        return repeat(
            lambda nodes, e: section(lines.having(nodes[0]), nodes[1], e.z),
            (lines.arrays, t),
            neighbours.replace(z=neighbours.z + neighbours.tangent * (t - neighbours.t)),
            lambda e: ~e.settled,
            _MAX_NEWTON,
            count=_MAX_NEWTON,
            least=_MIN_NEWTON,
        )

    if not counted():  # one place of all lines at a time, which the caches hold
        return lax.map(lambda starts: refine(lines, *starts), (neighbours, t))
    flat = Section(jnp.moveaxis(neighbours.rows, 0, 1).reshape(-1, count * size))
    flat = refine(lines.tiled(count), flat, t.ravel())
    return Section(jnp.moveaxis(flat.rows.reshape(-1, count, size), 1, 0))


def searched(lines: FieldLines, sections: Section) -> Section:
    """Search the proximal operator at the fields h(s) of the sections that are not `settled`, group by group.

    Only their `z` and `error` are replaced; t, the energy and its derivatives are not. The error is zero if the search
    converged, and infinite otherwise.
    """
    count, n, size = sections.z.shape
    entries = count * size
    group = max(256, entries // 16)

    def finish(take: Callable[[Array], Array]) -> tuple[Float[Array, "n group"], Bool[Array, " group"]]:
        """Return z of the entries that `take` takes out of arrays (..., N) or (..., places N), see `in_groups`."""
        members = lines.map_lines(take)
        z, converged = proximal(members.problem, members.at(take(sections.s.ravel())), members.origin_of_loss)
        return z.reshape(n, -1), converged

    settled = sections.settled.ravel()
    z = jnp.moveaxis(sections.z, 1, 0).reshape(n, entries)
    z, solved = in_groups(finish, (z, settled), ~settled, group)
    error = jnp.where(solved, 0.0, jnp.inf).astype(z.dtype).reshape(count, size)
    return sections.replace(z=jnp.moveaxis(z.reshape(n, count, size), 0, 1), error=error)


def _take(sections: PyTree[Shaped[Array, "_ ... N"]], index: Int[Array, "*P N"]) -> PyTree[Shaped[Array, "... N"]]:
    """Index the leading axis of arrays, for every line by an index of its own.

    An index (N,) gives arrays (..., N), and an index (P, N) gives arrays (P, ..., N).
    """

    def pick(a: Shaped[Array, "_ *shape N"]) -> Shaped[Array, "... N"]:
        indices = index.reshape(-1, *[1] * (a.ndim - 2), index.shape[-1])
        return jnp.take_along_axis(a, indices, 0, mode="clip").reshape(*index.shape[:-1], *a.shape[1:])

    return jax.tree.map(pick, sections)


class Gaps(eqx.Module):
    """The intervals of t over which the proximal operator jumps: P on every line, in increasing order."""

    left: Section  # lower end of the interval, where the common tangent touches; its s is the field of the jump
    right: Section  # upper end
    real: Bool[Array, "P N"]  # whether the interval exists; those that do not come last
    # Lowest and highest s with a second minimum, to the grid of the profile.
    fold: tuple[Float[Array, "P N"], Float[Array, "P N"]]


def common_tangents(lines: FieldLines, profile: Section, count: int) -> tuple[Gaps, Bool[Array, " N"]]:
    """Find the intervals of t where the lower convex hull of a profile leaves it: there the proximal operator jumps.

    The points of the profile tell which intervals there are; Newton's method then finds their ends.

    Args:
        lines: N lines.
        profile: sections at the points of a grid, see `energy_profile`.
        count: largest number P of intervals on a line.

    Returns:
        The intervals, and which lines are resolved. A line is not resolved if the hull leaves the profile at its
        ends or over more than `count` intervals, or if the tangents at the two ends of an interval disagree.
    """
    last = profile.t.shape[0] - 1
    # A point is on the hull if its tangent lies below the whole profile.
    height = profile.energy[:, None] - profile.energy - profile.s * (profile.t[:, None] - profile.t)
    touches = (jnp.min(height, 0) >= -_rounding(profile.energy)) & (profile.slope > 0)
    ends = jnp.array([0, last])
    resolved = jnp.all(touches[ends], 0)
    touches = touches.at[ends].set(True)
    index = jnp.arange(last + 1)[:, None]
    # Index of the next point on the hull, at all places but the first. An interval opens at a point on the hull whose
    # neighbour is not.
    next_touch = lax.cummin(jnp.where(touches, index, last), 0, reverse=True)[1:]
    opens = touches[:-1] & ~touches[1:]
    width = jnp.where(opens, jnp.take_along_axis(profile.t, next_touch, 0, mode="clip") - profile.t[:-1], 0.0)
    starts = []
    for _ in range(count):  # the widest intervals first
        starts.append(jnp.where(jnp.max(width, 0) > 0, jnp.argmax(width, 0), last))
        width = jnp.where(index[:-1] == starts[-1], 0.0, width)
    resolved &= ~jnp.any(width > 0, 0)

    # The interval is between the points j and k of the profile, (P, N); where there is none, both are the last point.
    j = jnp.sort(jnp.stack(starts), 0)
    real = j < last
    k = jnp.where(real, jnp.take_along_axis(next_touch, jnp.minimum(j, last - 1), 0, mode="clip"), last)
    profiles, edge, is_real = tiled(profile, 2), jnp.concatenate([j, k], -1), tiled(real, 2)
    # Each end lies between the neighbours of its point; left ends are in the first half of the last axis (P, 2 N).
    low, high = (_take((profiles.t, profiles.slope), jnp.clip(edge + i, 0, last)) for i in (-1, 1))
    pairs = _take(profiles, edge)

    def touch(state: tuple[Any, Section]) -> tuple[Any, Section]:
        """Find the common tangents of interval number p of all lines."""
        p, pairs = state
        new = _touch(lines, *indexed((pairs, low, high), p))
        return p + 1, jax.tree.map(lambda a, b: a.at[p].set(jnp.where(is_real[p], b, a[p])), pairs, new)

    if counted():
        new = _touch(lines.tiled(count), *jax.tree.map(_merged_jumps, (pairs, low, high)))
        pairs = either(is_real[:, None], _separate_jumps(new, count), pairs)
    else:
        # Few lines have more than one jump: solve for as many tangents as the line with the most jumps has.
        _, pairs = lax.while_loop(lambda s: (s[0] < count) & jnp.any(real[s[0]]), touch, (0, pairs))
    left, right = _halves(pairs)
    # Both ends lie on one tangent if their slopes s are equal.
    disagree = jnp.abs(left.s - right.s) >= max(1e-5, 30 * float(jnp.finfo(left.s.dtype).eps) ** 0.5)
    inside = (index >= j[:, None]) & (index <= k[:, None])
    fold = (jnp.min(jnp.where(inside, profile.s, jnp.inf), 1), jnp.max(jnp.where(inside, profile.s, -jnp.inf), 1))
    return Gaps(left, right, real, fold), resolved & ~jnp.any(real & disagree, 0)


def _rounding(energy: Float[Array, "places N"]) -> Float[Array, " N"]:
    """Return the size of differences of energies that are only rounding."""
    return 100 * jnp.finfo(energy.dtype).eps * jnp.max(jnp.abs(energy), 0)


def _touch(
    lines: FieldLines,
    pair: Section,
    low: tuple[Float[Array, " ends"], Float[Array, " ends"]],
    high: tuple[Float[Array, " ends"], Float[Array, " ends"]],
) -> Section:
    """Find the two places where one tangent touches the profile, by Newton's method.

    Args:
        lines: N lines.
        pair: sections to start from: the left places are in the first half of the last axis, the right ones in the
            second half.
        low, high: t and the slope A'' at the profile points between which each of the two places lies.
    """

    ends = jax.tree.map(lambda *halves: jnp.stack(halves), *_halves((pair, low, high)))

    def step(_: Any, nodes: tuple, pair: Section, __: None) -> tuple[Section, None]:
        arrays, low, high = nodes
        # Slope of the secant through both places; at each place, Newton's step leads to where A' has this slope.
        s = (pair.energy[1] - pair.energy[0]) / (pair.t[1] - pair.t[0])
        t = jnp.clip(pair.t + (s - pair.s) / jnp.maximum(pair.slope, 1e-3 * low[1]), low[0], high[0])
        z = pair.z + pair.tangent * (t - pair.t)[:, None]
        return jax.vmap(functools.partial(section, lines.having(arrays)))(t, z), None

    pair, _ = loop(step, (lines.arrays, *ends[1:]), ends[0], count=_TANGENT_STEPS)
    return Section(jnp.concatenate([*pair.rows], -1))


def _halves(tree: PyTree[Shaped[Array, "..."]]) -> tuple[Any, Any]:
    """Split the last axis into halves, the left and the right ends of intervals on all lines."""
    half = jax.tree.leaves(tree)[0].shape[-1] // 2
    return indexed(tree, jnp.s_[..., :half]), indexed(tree, jnp.s_[..., half:])


def _merged_jumps(a: Float[Array, "P *shape ends"]) -> Float[Array, "*shape P*ends"]:
    """Merge the two ends of P jumps of all lines, all left ends before all right ends."""
    halves = a.reshape(*a.shape[:-1], 2, -1)
    return jnp.moveaxis(halves, 0, -2).reshape(*a.shape[1:-1], -1)


def _separate_jumps(tree: PyTree[Shaped[Array, "... ends"]], count: int) -> PyTree[Shaped[Array, "{count} ..."]]:
    """Invert `_merged_jumps` for P = `count`: arrays (..., 2 P N) become (P, ..., 2 N)."""
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(*a.shape[:-1], 2, count, -1), -2, 0).reshape(count, *a.shape[:-1], -1), tree
    )


def energy_profile(lines: FieldLines, reach: Float[Array, "2"]) -> Section:
    """Return the profile A(t) of every line at evenly spaced t, traced from both ends.

    A trace may stay on a minimum of the plane that is no longer the lowest one. Where the two traces differ, the lower
    one is taken.

    Args:
        lines: N lines.
        reach: how far the lines go below and above s = 0.

    Returns:
        Sections at `_GRID` places.
    """
    (n, size), copies = lines.origin.shape, lines.tiled(2)
    ends_of_lines = jnp.concatenate([lines.at(s) for s in (-reach[0], reach[1])], -1)
    z = lowest_minima(copies.problem, ends_of_lines, origin=copies.origin_of_loss)[0].reshape(n, -1)
    t, zero = jnp.sum(copies.normal * z, 0), jnp.zeros_like(z[0])
    ends = Section.of(t, z, jnp.zeros_like(z), zero, zero, zero, zero)
    grid = t[:size] + (t[size:] - t[:size]) * jnp.linspace(0.0, 1.0, _GRID, dtype=t.dtype)[:, None]
    traces = trace(copies, ends, jnp.concatenate([grid, grid[::-1]], -1))
    forward, backward = _halves(traces)
    backward = indexed(backward, jnp.s_[::-1])
    swap = backward.energy < forward.energy - _rounding(forward.energy)
    return jax.tree.map(lambda a, b: jnp.where(swap.reshape(_GRID, *[1] * (a.ndim - 2), size), b, a), forward, backward)


def energy_gap(gaps: Gaps, s: Float[Array, "places N"]) -> Float[Array, "places N"]:
    """Return the energy of the second minimum above the lowest at fields s, to first order around the jump.

    It is infinite where there is a single minimum.
    """
    numbers = gaps.left.s, gaps.right.t - gaps.left.t, gaps.fold, gaps.real
    position, width, (lowest, highest), real = indexed(numbers, jnp.s_[:, None])
    bistable = real & (s > lowest) & (s < highest)
    return jnp.min(jnp.where(bistable, jnp.abs(s - position) * width, jnp.inf), 0)
