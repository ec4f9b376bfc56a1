"""Averages along lines that are broken where the proximal operator jumps.

Given the teacher's fields, the student's are a Gaussian vector, and one direction of it, the one in which the loss is a
double well, is integrated along a line h(s) = o + s g with s standard normal. With c = V^{-1} g, the energy
constrained to the plane c . z = t,

    A(t) = min { 1/2 (z - o)^T V^{-1} (z - o) + loss(z) : c . z = t },

is a smooth function of one variable, A'(t) = s is the field at which that z is stationary, and the Moreau envelope
along the line is min_t A(t) - s t + 1/2 s^2 c . g. The proximal operator jumps where A is not convex, from one end of a
common tangent to the other: Maxwell's construction. So everything happens in t: no branch has to be told from another,
and near the cusp at which a jump ends, where z is as singular as the cube root of s, s(t) is still smooth. The pieces of
the line outside the common tangents are integrated by Gauss-Legendre in t, with weight s'(t) times the normal density.

For an outer derivative the ends of the pieces move as the model and V move them, and the nodes with them, so that what
the jump contributes is contained; q, theta and m enter through the density alone, as they do for frozen `Nodes`.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from .nodes import (
    DEFAULT_BLOCK,
    DEFAULT_REPLICATES,
    Nodes,
    Points,
    Rule,
    _conditional,
    _mix,
    _whiten,
    check_counts,
    in_blocks,
    sobol_nodes,
    sobol_normals,
)
from .prox import _expansion_at_nodes, _inverse, _ldl_solve, attach, lowest_minima, moreau, well_axis

if TYPE_CHECKING:
    from .model import Model
    from .overlaps import Overlaps

DEFAULT_ORDER = 9
_REACH = (5.4, 6.6)  # range of the two ends of a line, in standard deviations
_AXIS_STEPS = 32  # of the power method for the axis of the double well
_GRID = 24  # points of the curve that is searched for common tangents
_NEWTON = 2  # steps at each point: the tangent of the one before leaves little to do
_TANGENT_STEPS = 16  # slow only where a jump is about to end


class _Lines(eqx.Module):
    """N lines h(s) = origin + s direction, flattened over tokens and columns: n = L r."""

    origin: jax.Array  # (n, N)
    direction: jax.Array  # (n, N)
    normal: jax.Array  # V^{-1} direction, (n, N)
    y: jax.Array  # (L, t, N)

    def repeat(self, count: int) -> _Lines:
        return jax.tree.map(lambda a: jnp.tile(a, count), self)


class _Section(eqx.Module):
    """The constrained minimiser at t, and the derivatives of its energy A(t)."""

    t: jax.Array
    z: jax.Array  # (n, N)
    tangent: jax.Array  # dz/dt
    energy: jax.Array  # A
    s: jax.Array  # A'
    slope: jax.Array  # A''
    error: jax.Array  # last Newton step


def _section(model: Model, V: jax.Array, lines: _Lines, t: jax.Array, z: jax.Array) -> _Section:
    """One Newton step within the plane through z; s and A are then exact to second order of the error of z."""
    L, r = V.shape[:2]
    n = L * r
    value, grad, hess = _expansion_at_nodes(model, z.reshape(L, r, -1), lines.y)
    grad, hess = grad.reshape(n, -1), hess.reshape(n, n, -1)
    precision = jax.scipy.linalg.block_diag(*_inverse(V))
    d, c = z - lines.origin, lines.normal
    pd = [sum(precision[i, j] * d[j] for j in range(n)) for i in range(n)]
    rows = [[hess[i, j] + precision[i, j] for j in range(n)] for i in range(n)]
    # Adding a multiple of c c^T changes no step within the plane, and makes the matrix positive definite there.
    size = sum(abs(rows[i][j]) for i in range(n) for j in range(n))
    stiff = 2 * size / sum(c[i] ** 2 for i in range(n))
    rows = [[rows[i][j] + stiff * c[i] * c[j] for j in range(n)] for i in range(n)]
    floor = 1e-3 * jnp.diagonal(precision)
    force = _ldl_solve(rows, [grad[i] + pd[i] for i in range(n)], floor)
    along = _ldl_solve(rows, list(c), floor)
    stiffness = sum(c[i] * along[i] for i in range(n))
    s = sum(c[i] * force[i] for i in range(n)) / stiffness
    step = jnp.stack([s * along[i] - force[i] for i in range(n)])
    return _Section(
        t=t,
        z=z + step,
        tangent=jnp.stack(along) / stiffness,
        energy=value + 0.5 * sum(pd[i] * d[i] for i in range(n)),
        s=s,
        slope=1 / stiffness - stiff,
        error=jnp.max(jnp.abs(step), 0),
    )


def _trace(
    model: Model, V: jax.Array, lines: _Lines, starts: _Section, ts: jax.Array, fresh: jax.Array | None = None
) -> _Section:
    """Sections at one t after the other, (K, N), each from the tangent of the one before.

    Args:
        starts: sections to start from, (S, N): the first, and each later one where `fresh` (K, N) names it.
        fresh: index of the start to use instead of the section before, or -1.
    """
    fresh = jnp.full(ts.shape, -1) if fresh is None else fresh

    def body(last: _Section, at: tuple[jax.Array, jax.Array]) -> tuple[_Section, _Section]:
        t, which = at
        new = _at(starts, jnp.maximum(which, 0))
        last = jax.tree.map(lambda a, b: jnp.where(which >= 0, a, b), new, last)
        z = last.z + last.tangent * (t - last.t)
        here = lax.fori_loop(
            0, _NEWTON, lambda _, e: _section(model, V, lines, t, e.z), eqx.tree_at(lambda e: e.z, last, z)
        )
        return here, here

    return lax.scan(body, jax.tree.map(lambda a: a[0], starts), (ts, fresh))[1]


def _at(curve: Any, index: jax.Array) -> Any:
    """A tree of arrays (K, ..., N) at an index (N,) into the leading axis."""
    return jax.tree.map(lambda a: jnp.take_along_axis(a, index.reshape(1, *[1] * (a.ndim - 2), -1), 0)[0], curve)


class _Gaps(eqx.Module):
    """The intervals of t over which the proximal operator jumps, P on every line in increasing order; (P, N)."""

    left: _Section
    right: _Section
    real: jax.Array  # the others do not exist, and come last
    fold: tuple[jax.Array, jax.Array]  # range of s in which there is a second minimum


def _common_tangents(model: Model, V: jax.Array, lines: _Lines, curve: _Section, count: int) -> tuple[_Gaps, jax.Array]:
    """Maxwell's construction on a traced curve: where the convex hull of A leaves it, and which lines are resolved."""
    last = curve.t.shape[0] - 1
    # A point is on the hull if its tangent lies below the whole curve.
    above = curve.energy[:, None] - curve.energy - curve.s * (curve.t[:, None] - curve.t)
    touches = (jnp.min(above, 0) >= -_rounding(curve.energy)) & (curve.slope > 0)
    ends = jnp.array([0, last])
    whole = jnp.all(touches[ends], 0)
    touches = touches.at[ends].set(True)
    place = jnp.arange(last + 1)[:, None]
    following = lax.cummin(jnp.where(touches, place, last), 0, reverse=True)[1:]
    opens = touches[:-1] & ~touches[1:]
    width = jnp.where(opens, jnp.take_along_axis(curve.t, following, 0) - curve.t[:-1], 0.0)
    starts = []
    for _ in range(count):  # the widest ones
        j = jnp.argmax(width, 0)
        starts.append((j, jnp.max(width, 0) > 0))
        width = jnp.where(place[:-1] == j, 0.0, width)
    resolved = whole & ~jnp.any(width > 0, 0)

    tangents = []
    for j, real in starts:
        k = jnp.take_along_axis(following, j[None], 0)[0]
        inside = (place >= j) & (place <= k)
        fold = (
            jnp.min(jnp.where(inside, curve.s, jnp.inf), 0),
            jnp.max(jnp.where(inside, curve.s, -jnp.inf), 0),
        )
        edges = [_at(curve, jnp.clip(i, 0, last)) for i in (j - 1, j, j + 1, k - 1, k, k + 1)]
        left, right = (
            jax.tree.map(lambda a, b, real=real: jnp.where(real, a, b), found, edges[i])
            for found, i in zip(_touch(model, V, lines, edges), (1, 4), strict=True)
        )
        resolved &= ~real | (jnp.abs(left.s - right.s) < max(1e-5, 30 * float(jnp.finfo(left.s.dtype).eps) ** 0.5))
        tangents.append(_Gaps(left, right, real, fold))
    gaps = jax.tree.map(lambda *a: jnp.stack(a), *tangents)
    order = jnp.argsort(jnp.where(gaps.real, gaps.left.t, jnp.inf), 0)
    return jax.vmap(_at, (None, 0))(gaps, order), resolved


def _rounding(energy: jax.Array) -> jax.Array:
    """Differences of energies (K, N) that say nothing, (N,)."""
    return 100 * jnp.finfo(energy.dtype).eps * jnp.max(jnp.abs(energy), 0)


def _touch(model: Model, V: jax.Array, lines: _Lines, edges: list[_Section]) -> tuple[_Section, _Section]:
    """Where one tangent touches twice: between the first three and between the last three of six sections."""
    size = lines.y.shape[-1]
    join = partial(jax.tree.map, lambda *a: jnp.concatenate(a, -1))
    both, low, high = lines.repeat(2), join(edges[0], edges[3]), join(edges[2], edges[5])

    def sides(pair: _Section) -> tuple[_Section, _Section]:
        return jax.tree.map(lambda a: a[..., :size], pair), jax.tree.map(lambda a: a[..., size:], pair)

    def body(_: int, pair: _Section) -> _Section:
        left, right = sides(pair)
        s = jnp.tile((right.energy - left.energy) / (right.t - left.t), 2)
        t = jnp.clip(pair.t + (s - pair.s) / jnp.maximum(pair.slope, 1e-3 * low.slope), low.t, high.t)
        return _section(model, V, both, t, pair.z + pair.tangent * (t - pair.t))

    return sides(lax.fori_loop(0, _TANGENT_STEPS, body, join(edges[1], edges[4])))


class LineNodes(Rule):
    """Lines through the space of the student's fields, broken where the proximal operator jumps; see the module.

    Attributes:
        teacher: standard normals of the teacher's fields, (R, L, t, N).
        across: those of the student's fields across the line, (R, L r - 1, N).
        weight: (R, N), summing to one in every replicate.
        reach: how far a line goes to either side, in standard deviations, (R, 2).
        direction: of the lines in the space of the student's fields, (R, L, r); None is the axis of the double well.
        rough: a few single nodes, to come near a fixed point with.
        points_per_line: nodes of a line.
        jumps: of a line, at most.
        block: nodes in a block.
    """

    teacher: jax.Array
    across: jax.Array
    weight: jax.Array
    reach: jax.Array
    direction: jax.Array | None
    rough: Nodes
    points_per_line: int = eqx.field(static=True)
    jumps: int = eqx.field(static=True)
    block: int = eqx.field(static=True)

    @property
    def replicates(self) -> int:
        return self.weight.shape[0]

    @property
    def size(self) -> int:
        return self.weight.shape[-1] * self.points_per_line

    def coarse(self) -> Nodes:
        return self.rough.coarse()

    def blocks(self) -> Any:
        split = in_blocks((self.teacher, self.across, self.weight), max(1, self.block // self.points_per_line))
        count = split[0].shape[0]
        shared = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), (self.reach, self.direction))
        return *split, *shared

    def quadrature(self, model: Model, x: Overlaps, block: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        teacher, across, weight, *_ = block
        L, r, _ = model.shape
        u = jnp.asarray(_reference(L * r), weight.dtype)[:, None] + 0 * weight
        s, share = np.polynomial.hermite_e.hermegauss(self.points_per_line // 2)
        student = _across(u, across)[:, None] - u[:, None] * jnp.asarray(s, weight.dtype)[:, None]
        count = s.size
        return (
            student.reshape(L, r, -1),
            jnp.tile(teacher, count),
            (jnp.asarray(share / share.sum(), weight.dtype)[:, None] * weight).ravel(),
        )

    def points(self, model: Model, x: Overlaps, block: Any) -> Points:
        teacher, across, weight, reach, direction = block
        L, r, _ = model.shape
        y = _mix(jnp.linalg.cholesky(model.rho), teacher)
        held = lax.stop_gradient((model, x, y))
        V = held[1].V
        lines = _lay(*held, across, direction)
        curve = _curve(held[0], V, lines, reach)
        gaps, resolved = _common_tangents(held[0], V, lines, curve, self.jumps)
        section, share = _nodes(held[0], V, lines, curve, gaps, self.points_per_line, reach)
        # The ends of the pieces move with V and the model, and the nodes with them.
        shift, stretch = _shift(model, x, y, lines, gaps, section.s)
        h = lines.origin[:, None] + (section.s + shift) * lines.direction[:, None]
        h, z = h.reshape(L, r, -1), jnp.moveaxis(section.z, 1, 0).reshape(L, r, -1)
        teacher, y = (jnp.tile(a, self.points_per_line) for a in (teacher, y))
        student, log_density = _whiten(model, x, h, y)
        good = resolved & (section.error < 1e-4 * (1 + jnp.max(jnp.abs(section.z), 1)))
        return Points(
            student=student,
            teacher=teacher,
            weight=(weight * share * (1 + stretch)).ravel() * jnp.exp(log_density - lax.stop_gradient(log_density)),
            z=attach(z, model, h, x.V, y),
            converged=good.ravel(),
            gap=_energy_gap(gaps, section.s).ravel(),
        )


def _lay(model: Model, x: Overlaps, y: jax.Array, across: jax.Array, direction: jax.Array | None) -> _Lines:
    """Lines through given places across them, (n - 1, N)."""
    L, r, _ = model.shape
    slope, spread = _conditional(model, x)

    def scale(matrix: jax.Array, v: jax.Array) -> jax.Array:
        return _mix(matrix, v.reshape(L, r, -1)).reshape(L * r, -1)

    u = _unit(model, x, y, spread, direction)
    origin = (x.m[..., None] + _mix(slope, y)).reshape(L * r, -1) + scale(spread, _across(u, across))
    g = scale(spread, u)
    return _Lines(origin, g, scale(_inverse(x.V), g), y)


def _curve(model: Model, V: jax.Array, lines: _Lines, reach: jax.Array) -> _Section:
    """A(t) at `_GRID` places (leading axis), traced from both ends; where the two differ, the lower one."""
    L, r = V.shape[:2]
    size = lines.y.shape[-1]
    both = lines.repeat(2)
    far = jnp.concatenate([lines.origin + s * lines.direction for s in (-reach[0], reach[1])], -1)
    z = lowest_minima(model, far.reshape(L, r, -1), V, both.y).reshape(L * r, -1)
    t, zero = jnp.sum(both.normal * z, 0), jnp.zeros_like(z[0])
    ends = _Section(t, z, jnp.zeros_like(z), zero, zero, zero, zero)
    grid = t[:size] + (t[size:] - t[:size]) * jnp.linspace(0.0, 1.0, _GRID, dtype=t.dtype)[:, None]
    traced = _trace(model, V, both, jax.tree.map(lambda a: a[None], ends), jnp.concatenate([grid, grid[::-1]], -1))
    up = jax.tree.map(lambda a: a[..., :size], traced)
    down = jax.tree.map(lambda a: a[::-1, ..., size:], traced)
    lower = down.energy < up.energy - _rounding(up.energy)
    return jax.tree.map(lambda a, b: jnp.where(lower.reshape(_GRID, *[1] * (a.ndim - 2), size), b, a), up, down)


def _nodes(
    model: Model, V: jax.Array, lines: _Lines, curve: _Section, gaps: _Gaps, total: int, reach: jax.Array
) -> tuple[_Section, jax.Array]:
    """Nodes (total, N) and their weights: Gauss-Legendre in t between the gaps, shared out by length in s."""
    cut = jnp.round((gaps.left.s + reach[0]) / jnp.sum(reach) * total).astype(int)
    cut = jnp.where(gaps.real, jnp.clip(cut, 2, total - 2), total)
    cut = jnp.concatenate([jnp.zeros_like(cut[:1]), cut, jnp.full_like(cut[:1], total)])
    number = jnp.arange(total)[:, None]
    piece = sum((number >= c).astype(int) for c in cut[1:-1])
    starts = jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b]), curve, gaps.right)
    end = curve.t[-1:]
    begin, count, lo, hi = (
        jnp.take_along_axis(a, piece, 0)
        for a in (cut[:-1], jnp.diff(cut, axis=0), starts.t, jnp.append(jnp.where(gaps.real, gaps.left.t, end), end, 0))
    )
    node, share = (jnp.asarray(a, end.dtype)[count, number - begin] for a in _legendre(total))
    section = _trace(model, V, lines, starts, lo + (hi - lo) * node, jnp.where(number == begin, piece, -1))
    density = jnp.exp(-0.5 * section.s**2) / (2 * np.pi) ** 0.5
    return section, (hi - lo) * share * section.slope * density


def _legendre(most: int) -> list[np.ndarray]:
    """Gauss-Legendre nodes and weights on [0, 1] for up to `most` points: row n holds the rule of n points."""
    nodes, weights = np.zeros((2, most + 1, most))
    for n in range(1, most + 1):
        x, w = np.polynomial.legendre.leggauss(n)
        nodes[n, :n], weights[n, :n] = 0.5 * (x + 1), 0.5 * w
    return [nodes, weights]


def _energy_gap(gaps: _Gaps, s: jax.Array) -> jax.Array:
    """Energy of the next minimum above the lowest one at fields (K, N), to first order in the distance from the jump."""
    out = jnp.full_like(s, jnp.inf)
    for g in _each(gaps):
        bistable = g.real & (s > g.fold[0]) & (s < g.fold[1])
        out = jnp.minimum(out, jnp.where(bistable, jnp.abs(s - g.left.s) * (g.right.t - g.left.t), jnp.inf))
    return out


def _each(gaps: _Gaps) -> list[_Gaps]:
    """The jumps one by one."""
    return [jax.tree.map(lambda a, p=p: a[p], gaps) for p in range(gaps.real.shape[0])]


def _shift(
    model: Model, x: Overlaps, y: jax.Array, lines: _Lines, gaps: _Gaps, s: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """By how much nodes at fields s (K, N) move along their line, and their intervals stretch: zero, with derivatives.

    A jump moves by what the energies of its two sides, at held minimisers, come apart, over t_right - t_left, which is the
    slope of that difference in s. Nodes between two jumps move by linear interpolation, the others rigidly.
    """
    L, r, _ = model.shape
    shift = stretch = jnp.zeros_like(s)
    before = None
    for g in _each(gaps):
        h = (lines.origin + g.left.s * lines.direction).reshape(L, r, -1)
        low, high = (moreau(model, e.z.reshape(L, r, -1), h, x.V, y) for e in (g.left, g.right))
        rise = high - low
        move = (rise - lax.stop_gradient(rise)) / jnp.where(g.real, g.right.t - g.left.t, jnp.inf)
        if before is None:
            shift = shift + move
        else:
            width = jnp.where(g.real, g.left.s - before[0], jnp.inf)
            part = jnp.clip((s - before[0]) / width, 0.0, 1.0)
            shift = shift + part * jnp.where(g.real, move - before[1], 0.0)
            stretch = stretch + jnp.where((part > 0) & (part < 1), (move - before[1]) / width, 0.0)
        before = g.left.s, move
    return shift, stretch


def _reference(n: int) -> np.ndarray:
    """A unit vector to the side of which all well axes lie: the start of `well_axis`."""
    v = np.linspace(1.0, -0.8, n)
    return v / np.linalg.norm(v)


def _across(u: jax.Array, w: jax.Array) -> jax.Array:
    """Vectors (n, N) of coordinates `w` (n - 1, N) in a frame across unit vectors `u` that turns smoothly with them."""
    n = u.shape[0]
    reference = _reference(n)
    basis = np.linalg.qr(np.concatenate([reference[:, None], np.eye(n)[:, : n - 1]], 1))[0][:, 1:]
    v = u + jnp.asarray(reference, u.dtype)[:, None]
    a = [sum(float(basis[i, k]) * w[k] for k in range(n - 1)) for i in range(n)]
    along = 2 * sum(v[i] * a[i] for i in range(n)) / sum(v[i] ** 2 for i in range(n))
    return jnp.stack([a[i] - v[i] * along for i in range(n)])


def _unit(model: Model, x: Overlaps, y: jax.Array, spread: jax.Array, direction: jax.Array | None) -> jax.Array:
    """Direction of the lines in the space of the standard normals, (n, N): that in which the two wells differ in energy."""
    L, r, _ = model.shape
    n, size = L * r, y.shape[-1]
    if direction is None:
        e = well_axis(model, y, r, _AXIS_STEPS).reshape(n, size)
    else:
        e = jnp.broadcast_to(direction.reshape(n, 1), (n, size))
    u = _mix(jnp.swapaxes(spread, -1, -2), _mix(_inverse(x.V), e.reshape(L, r, -1))).reshape(n, -1)
    return u / jnp.sqrt(jnp.sum(u**2, 0))


def line_nodes(
    model: Model,
    order: int = DEFAULT_ORDER,
    *,
    lines: int | None = None,
    points: int | None = None,
    seed: int = 0,
    replicates: int = DEFAULT_REPLICATES,
    jumps: int | None = None,
    direction: Any = None,
    even: bool = False,
    block: int | None = None,
) -> LineNodes:
    """Lines broken where the proximal operator jumps: the precise rule, and for two teacher fields the default one.

    With two teacher fields (L t = 2) the lines form a product rule in the other dimensions: `order` + 2 angles and 3 `order`
    radii of the teacher's fields, order / 2 + 1 places across the lines in each dimension. At the standard setting order
    5 is right to 5e-4, 7 to 2e-4, 9 to 4e-5, 15 to 4e-6. Otherwise, or with `lines`, they are scrambled Sobol points; the accuracy is then that of the
    Sobol rule in fewer dimensions, and the gain is in the derivatives.

    Args:
        model: gives the number of fields of a node, and the dtype.
        order: of the product rule.
        lines: Sobol lines in a replicate, a power of two, instead of the product rule.
        points: nodes on a line; by default order + 15, and 24 with Sobol lines.
        seed: of what differs between the replicates: angles, places and lengths of the lines, or the scrambles.
        replicates: whose scatter is the error bar.
        jumps: at most so many on a line; a line with more counts as unconverged. By default L r - 1.
        direction: of all lines, (L, r), in the space of the student's fields; by default each line follows the axis of the
            double well at its teacher's fields. A jump along the lines is met as by a rule of single nodes.
        even: whether the product rule has the parity (h, y) -> (-h, -y) and y -> -y of the loss exactly, at twice the nodes.
            Where both m and theta are free, a rule without it turns a pitchfork into an imperfect one.
        block: nodes that are solved together; bounds the memory.

    Raises:
        ValueError: a count that is not a positive integer, `lines` not a power of two, fewer than 8 points, a product
            rule of more than 2^24 nodes, or a direction that is zero or not of shape (L, r).
    """
    L, r, t = model.shape
    across = L * r - 1
    jumps = max(1, across) if jumps is None else jumps
    product = lines is None and L * t == 2
    lines = lines or 2**11
    points = points or (order + 15 if product else 24)
    check_counts(block, replicates=replicates, seed=seed, order=order, lines=lines, points=points, jumps=jumps)
    if points < 8:
        raise ValueError(f"points must be at least 8, got points={points}")
    if direction is not None:
        direction = jnp.asarray(direction, model.lam.dtype)
        if direction.shape != (L, r) or not np.all(np.isfinite(direction)) or not np.any(direction):
            raise ValueError(
                f"direction must be finite, not zero and of shape {(L, r)}, got {np.asarray(direction).tolist()}"
            )
        direction = jnp.broadcast_to(direction, (replicates, L, r))
    if product:
        angles, radii, places = _counts(order, even)
        size = angles * radii * places**across * points
        if size > 2**24:
            raise ValueError(f"order={order} makes {size} nodes, over 2^24: use a smaller one, or lines=2048")
        rng = np.random.default_rng([seed, 1])
        sets = [_polar(order, across, even, rng) for _ in range(replicates)]
    else:
        sets = [(a, np.full(lines, 1 / lines)) for a in sobol_normals(L * t + across, lines, seed, replicates, "lines")]
    normals, weight = map(np.stack, zip(*sets, strict=True))
    size = weight.shape[1]
    dtype = model.lam.dtype
    reach = np.random.default_rng([seed, 2]).uniform(*_REACH, (replicates, 2))
    return LineNodes(
        teacher=jnp.asarray(normals[:, : L * t].reshape(replicates, L, t, size), dtype),
        across=jnp.asarray(normals[:, L * t :], dtype),
        weight=jnp.asarray(weight, dtype),
        reach=jnp.asarray(np.mean(reach, 1, keepdims=True).repeat(2, 1) if even else reach, dtype),
        direction=direction,
        rough=sobol_nodes(model, 2**12, seed=seed, replicates=replicates),
        points_per_line=points,
        jumps=jumps,
        block=block or DEFAULT_BLOCK,
    )


def default_nodes(
    model: Model, n: int = 2**15, *, seed: int = 0, replicates: int = DEFAULT_REPLICATES, block: int | None = None
) -> LineNodes | Nodes:
    """The rule that is used unless another is given, of about `n` nodes in a replicate.

    `line_nodes` of order 5 at least for a student and a teacher of two fields each, `sobol_nodes` for other models.
    """
    L, r, t = model.shape
    check_counts(block, n=n, replicates=replicates, seed=seed)
    if not L * r == L * t == 2:
        return sobol_nodes(model, n, seed=seed, replicates=replicates, block=block)
    order = max(k for k in range(5, 64, 2) if k == 5 or 1.5 * k**3 * (k + 15) <= n)
    return line_nodes(model, order, seed=seed, replicates=replicates, block=block)


def _counts(order: int, even: bool) -> tuple[int, int, int]:
    """Angles and radii of the teacher's fields, and places across the lines in each dimension: errors of equal size."""
    return ((order | 1) + 2) * (1 + even), 3 * order, order // 2 + 1


def _polar(order: int, across: int, even: bool, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Normals and weights: equal angles and Gauss-Legendre radii for the teacher's two fields, Gauss-Hermite across.

    An odd number of angles sees every function that is even under y -> -y as twice as many would.
    """
    angles, radii, places = _counts(order, even)
    angle = 2 * np.pi * (np.arange(angles) + rng.random()) / angles
    end = rng.uniform(5.7, 7.2)
    x, w = np.polynomial.legendre.leggauss(radii)
    radius, w_radius = 0.5 * end * (x + 1), 0.5 * end * w
    w_radius = w_radius * radius * np.exp(-0.5 * radius**2)
    x, w = special.roots_hermitenorm(places)
    # A quarter of a spacing, or of a standard deviation if that is less, turns the sign of the error and makes it hardly larger.
    shift = 0.0 if even else rng.uniform(-0.25, 0.25) * np.min(np.diff(x), initial=1.0)
    w = w * np.exp(-shift * x - 0.5 * shift**2)
    x, w = x + shift, w / w.sum()
    axes = [angle, radius, *[x] * across]
    weights = [np.full(angle.size, 1 / angle.size), w_radius / w_radius.sum(), *[w] * across]
    angle, radius, *rest = (a.ravel() for a in np.meshgrid(*axes, indexing="ij"))
    weight = functools.reduce(np.multiply.outer, weights).ravel()
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), *rest]), weight / weight.sum()
