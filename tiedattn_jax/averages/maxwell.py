"""Maxwell's construction of the jumps of the proximal operator along a line, and of the pieces between them.

Along a line h(s) = o + s g, with c = V^{-1} g, the energy is constrained to the plane c . z = t:

    A(t) = min { 1/2 (z - o)^T V^{-1} (z - o) + loss(z) : c . z = t }.

A is a smooth function of one variable. Its derivative A'(t) = s is the field at which that z is stationary. The Moreau
envelope along the line is min_t A(t) - s (t - c . o) + 1/2 s^2 c . g. The proximal operator jumps where A is not
convex, from one end of a common tangent to the other: Maxwell's construction. All computations use t as the variable.
No branch then has to be told from another. Near the cusp at which a jump ends, z is singular like the cube root of s,
but s(t) is still smooth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ..base.linalg import ldl_solve, total
from ..base.trees import either, indexed, tiled
from ..model.model import Model
from .loops import counted, repeat
from .prox import Origin, expand, in_groups, least_pivots, lowest_minima, proximal

_GRID = 24  # points of the profile that is searched for common tangents
# Each point of the profile takes one Newton step, from the tangent of the point before. One step is enough, because the
# profile only locates the jumps and its energies are right to second order. All points take the same number of steps: a
# point with more steps than its neighbours has a better energy, and looks like a jump. Uneven steps left 2.6 % of the
# lines of one setting unresolved.
# The nodes take at least two steps, and stop when the last one is small, relative to z.
_MIN_NEWTON, _MAX_NEWTON, _STEP_TOLERANCE = 2, 8, 1e-4
_TANGENT_STEPS = 16  # convergence is slow only where a jump is about to end


class Lines(eqx.Module):
    """N lines h(s) = origin + s direction, flattened over tokens and columns: n = L r."""

    origin: jax.Array  # (n, N)
    direction: jax.Array  # (n, N)
    normal: jax.Array  # V^{-1} direction, (n, N)
    y: jax.Array  # (L, t, N)
    origin_of_loss: Origin | None = None  # loss at zero student fields, if it is known, for all points of a line


class Section(eqx.Module):
    """The constrained minimiser at t, and the derivatives of its energy A(t).

    All numbers are rows of one array, because each array that a loop carries or indexes costs kernels to compile.

    Attributes:
        rows: (..., 5 + 2 n, N).
    """

    rows: jax.Array

    @classmethod
    def of(cls, t: Any, z: Any, tangent: Any, energy: Any, s: Any, slope: Any, error: Any) -> Section:
        """Make a section from arrays (..., N), with `z` and `tangent` (..., n, N)."""
        numbers = (a[..., None, :] for a in (t, energy, s, slope, error))
        return cls(jnp.concatenate([*numbers, z, tangent], -2))

    t = property(lambda self: self.rows[..., 0, :])
    energy = property(lambda self: self.rows[..., 1, :])  # A
    s = property(lambda self: self.rows[..., 2, :])  # A'
    slope = property(lambda self: self.rows[..., 3, :])  # A''
    error = property(lambda self: self.rows[..., 4, :])  # size of the last Newton step
    z = property(lambda self: jnp.split(self.rows[..., 5:, :], 2, -2)[0])  # (..., n, N)
    tangent = property(lambda self: jnp.split(self.rows[..., 5:, :], 2, -2)[1])  # dz/dt, (..., n, N)

    @property
    def settled(self) -> jax.Array:
        """Whether the last Newton step was small."""
        return self.error < _STEP_TOLERANCE * (1 + jnp.max(jnp.abs(self.z), -2))

    def replace(self, **changes: jax.Array) -> Section:
        """Return the section with some parts replaced."""
        names = ("t", "z", "tangent", "energy", "s", "slope", "error")
        return Section.of(**{name: getattr(self, name) for name in names} | changes)


def section(model: Model, V: jax.Array, lines: Lines, t: jax.Array, z: jax.Array) -> Section:
    """Take one Newton step within the plane through z; s and A are then exact to second order in the error of z."""
    c = lines.normal
    e = expand(model, z, lines.origin, V, lines.y)
    # Adding a multiple of c c^T changes no step within the plane, and makes the matrix positive definite there.
    size = total(total(jnp.abs(e.hessian)))
    penalty = 2 * size / total(c**2)
    hessian = e.hessian + penalty * c[:, None] * c
    floor = least_pivots(V)
    force = ldl_solve(hessian, e.slope, floor)
    normal_step = ldl_solve(hessian, c, floor)
    stiffness = total(c * normal_step)
    s = total(c * force) / stiffness
    step = s * normal_step - force
    energy, slope, error = e.loss + e.quadratic, 1 / stiffness - penalty, jnp.max(jnp.abs(step), 0)
    return Section.of(t, z + step, normal_step / stiffness, energy, s, slope, error)


def trace(model: Model, V: jax.Array, lines: Lines, start: Section, ts: jax.Array) -> Section:
    """Trace the profile: sections at one t after the other, (K, N), each from the tangent of the one before."""

    def body(last: Section, t: jax.Array) -> tuple[Section, Section]:
        point = section(model, V, lines, t, last.z + last.tangent * (t - last.t))
        return point, point

    return lax.scan(body, start, ts)[1]


def between(model: Model, V: jax.Array, lines: Lines, profile: Section, t: jax.Array) -> Section:
    """Return sections at any t within the profile, (K, N), each started from the nearest point of the profile."""
    count, size = t.shape
    first, last = profile.t[0], profile.t[-1]
    index = jnp.round((t - first) / (last - first) * (len(profile.t) - 1))
    neighbours = _take(profile, jnp.clip(index, 0, len(profile.t) - 1).astype(int))

    def refine(lines: Lines, neighbours: Section, t: jax.Array) -> Section:
        return repeat(
            lambda e: section(model, V, lines, t, e.z),
            neighbours.replace(z=neighbours.z + neighbours.tangent * (t - neighbours.t)),
            lambda e: ~e.settled,
            _MAX_NEWTON,
            count=_MAX_NEWTON,
            least=_MIN_NEWTON,
        )

    if not counted():  # one place of all lines at a time, which the caches hold
        return lax.map(lambda starts: refine(lines, *starts), (neighbours, t))
    flat = Section(jnp.moveaxis(neighbours.rows, 0, 1).reshape(-1, count * size))
    flat = refine(tiled(lines, count), flat, t.ravel())
    return Section(jnp.moveaxis(flat.rows.reshape(-1, count, size), 1, 0))


def searched(model: Model, V: jax.Array, lines: Lines, sections: Section) -> Section:
    """Replace sections (K, N) that are not `settled` by the proximal operator at their field s, in groups."""
    (count, n, size), L, r = sections.z.shape, *V.shape[:2]
    lanes = count * size
    group = max(256, lanes // 16)

    def finish(take: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        s, group_lines = take(sections.s.ravel()), jax.tree.map(take, lines)
        h = (group_lines.origin + s * group_lines.direction).reshape(L, r, -1)
        z, converged = proximal(model, h, V, group_lines.y, group_lines.origin_of_loss)
        return z.reshape(n, -1), converged

    settled = sections.settled.ravel()
    z = jnp.moveaxis(sections.z, 1, 0).reshape(n, lanes)
    z, solved = in_groups(finish, (z, settled), ~settled, group)
    error = jnp.where(solved, 0.0, jnp.inf).astype(z.dtype).reshape(count, size)
    return sections.replace(z=jnp.moveaxis(z.reshape(n, count, size), 0, 1), error=error)


def _take(sections: Any, index: jax.Array) -> Any:
    """Return a tree of arrays (K, ..., N) at an index (N,) or (P, N) into the leading axis."""

    def pick(a: jax.Array) -> jax.Array:
        indices = index.reshape(-1, *[1] * (a.ndim - 2), index.shape[-1])
        return jnp.take_along_axis(a, indices, 0, mode="clip").reshape(*index.shape[:-1], *a.shape[1:])

    return jax.tree.map(pick, sections)


class Gaps(eqx.Module):
    """The intervals of t over which the proximal operator jumps: P on every line, in increasing order, (P, N)."""

    left: Section
    right: Section
    real: jax.Array  # whether the interval exists; those that do not come last
    fold: tuple[jax.Array, jax.Array]  # range of s in which there is a second minimum


def common_tangents(model: Model, V: jax.Array, lines: Lines, profile: Section, count: int) -> tuple[Gaps, jax.Array]:
    """Return the intervals where the convex hull of a traced profile A leaves it, and which lines are resolved."""
    last = profile.t.shape[0] - 1
    # A point is on the hull if its tangent lies below the whole profile.
    height = profile.energy[:, None] - profile.energy - profile.s * (profile.t[:, None] - profile.t)
    touches = (jnp.min(height, 0) >= -_rounding(profile.energy)) & (profile.slope > 0)
    ends = jnp.array([0, last])
    resolved = jnp.all(touches[ends], 0)
    touches = touches.at[ends].set(True)
    index = jnp.arange(last + 1)[:, None]
    next_touch = lax.cummin(jnp.where(touches, index, last), 0, reverse=True)[1:]
    opens = touches[:-1] & ~touches[1:]
    width = jnp.where(opens, jnp.take_along_axis(profile.t, next_touch, 0, mode="clip") - profile.t[:-1], 0.0)
    starts = []
    for _ in range(count):  # the widest intervals first
        starts.append(jnp.where(jnp.max(width, 0) > 0, jnp.argmax(width, 0), last))
        width = jnp.where(index[:-1] == starts[-1], 0.0, width)
    resolved &= ~jnp.any(width > 0, 0)

    j = jnp.sort(jnp.stack(starts), 0)
    real = j < last
    k = jnp.where(real, jnp.take_along_axis(next_touch, jnp.minimum(j, last - 1), 0, mode="clip"), last)
    profiles, edge, is_real = tiled(profile, 2), jnp.concatenate([j, k], -1), tiled(real, 2)
    low, high = (_take((profiles.t, profiles.slope), jnp.clip(edge + i, 0, last)) for i in (-1, 1))
    pairs = _take(profiles, edge)

    def touch(state: tuple) -> tuple:
        p, pairs = state
        new = _touch(model, V, tiled(lines, 2), *indexed((pairs, low, high), p))
        return p + 1, jax.tree.map(lambda a, b: a.at[p].set(jnp.where(is_real[p], b, a[p])), pairs, new)

    if counted():
        all_lines = tiled(tiled(lines, count), 2)
        new = _touch(model, V, all_lines, *jax.tree.map(_merged_jumps, (pairs, low, high)))
        pairs = either(is_real[:, None], _separate_jumps(new, count), pairs)
    else:
        # Few lines have more than one jump: solve for as many tangents as the line with the most jumps has.
        _, pairs = lax.while_loop(lambda s: (s[0] < count) & jnp.any(real[s[0]]), touch, (0, pairs))
    left, right = _halves(pairs)
    disagree = jnp.abs(left.s - right.s) >= max(1e-5, 30 * float(jnp.finfo(left.s.dtype).eps) ** 0.5)
    inside = (index >= j[:, None]) & (index <= k[:, None])
    fold = (jnp.min(jnp.where(inside, profile.s, jnp.inf), 1), jnp.max(jnp.where(inside, profile.s, -jnp.inf), 1))
    return Gaps(left, right, real, fold), resolved & ~jnp.any(real & disagree, 0)


def _rounding(energy: jax.Array) -> jax.Array:
    """Return the size (N,) of differences of energies (K, N) that are only rounding."""
    return 100 * jnp.finfo(energy.dtype).eps * jnp.max(jnp.abs(energy), 0)


def _touch(model: Model, V: jax.Array, lines: Lines, pair: Section, low: tuple, high: tuple) -> Section:
    """Find the two places where one tangent touches: they are in the first and in the second half of the lanes.

    Args:
        low, high: t and the slope at the profile points between which each of the two places lies.
    """

    def body(_: int, pair: Section) -> Section:
        left, right = _halves(pair)
        s = jnp.tile((right.energy - left.energy) / (right.t - left.t), 2)
        t = jnp.clip(pair.t + (s - pair.s) / jnp.maximum(pair.slope, 1e-3 * low[1]), low[0], high[0])
        return section(model, V, lines, t, pair.z + pair.tangent * (t - pair.t))

    return lax.fori_loop(0, _TANGENT_STEPS, body, pair)


def _halves(pair: Any) -> tuple[Any, Any]:
    """Return the halves of lanes that were tiled twice, for the left and for the right ends of intervals."""
    half = pair.t.shape[-1] // 2
    return indexed(pair, jnp.s_[..., :half]), indexed(pair, jnp.s_[..., half:])


def _merged_jumps(a: jax.Array) -> jax.Array:
    """Turn arrays (P, ..., 2 N) of the two ends of P jumps into (..., 2 P N), all left ends before all right ends."""
    halves = a.reshape(*a.shape[:-1], 2, -1)
    return jnp.moveaxis(halves, 0, -2).reshape(*a.shape[1:-1], -1)


def _separate_jumps(tree: Any, count: int) -> Any:
    """Invert `_merged_jumps`."""
    return jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(*a.shape[:-1], 2, count, -1), -2, 0).reshape(count, *a.shape[:-1], -1), tree
    )


def energy_profile(model: Model, V: jax.Array, lines: Lines, reach: jax.Array) -> Section:
    """Return A(t) at `_GRID` places (leading axis), traced from both ends; where the traces differ, the lower one."""
    L, r = V.shape[:2]
    size = lines.y.shape[-1]
    copies = tiled(lines, 2)
    fields = jnp.concatenate([lines.origin + s * lines.direction for s in (-reach[0], reach[1])], -1)
    z = lowest_minima(model, fields.reshape(L, r, -1), V, copies.y, origin=copies.origin_of_loss)[0].reshape(L * r, -1)
    t, zero = jnp.sum(copies.normal * z, 0), jnp.zeros_like(z[0])
    ends = Section.of(t, z, jnp.zeros_like(z), zero, zero, zero, zero)
    grid = t[:size] + (t[size:] - t[:size]) * jnp.linspace(0.0, 1.0, _GRID, dtype=t.dtype)[:, None]
    traces = trace(model, V, copies, ends, jnp.concatenate([grid, grid[::-1]], -1))
    forward, backward = _halves(traces)
    backward = indexed(backward, jnp.s_[::-1])
    swap = backward.energy < forward.energy - _rounding(forward.energy)
    return jax.tree.map(lambda a, b: jnp.where(swap.reshape(_GRID, *[1] * (a.ndim - 2), size), b, a), forward, backward)


def energy_gap(gaps: Gaps, s: jax.Array) -> jax.Array:
    """Return the energy of the next minimum above the lowest at fields (K, N), to first order around the jump."""
    numbers = gaps.left.s, gaps.right.t - gaps.left.t, gaps.fold, gaps.real
    position, width, (lowest, highest), real = indexed(numbers, jnp.s_[:, None])
    bistable = real & (s > lowest) & (s < highest)
    return jnp.min(jnp.where(bistable, jnp.abs(s - position) * width, jnp.inf), 0)
