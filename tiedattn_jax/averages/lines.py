"""Replicates of lines through the space of the student's fields, broken where the proximal operator jumps.

Given the teacher's fields, the student's are a Gaussian vector. The direction in which the loss is a double well is
integrated along a line h(s) = o + s g with s standard normal. The pieces of the line outside the common tangents of
Maxwell's construction are integrated by Gauss-Legendre in t = c . z, with weight s'(t) times the normal density; see
`maxwell`.

Under differentiation the lines keep their standard normals, and their fields move with the state and the model. The
ends of the pieces move with the jumps, and the nodes with the ends, so the derivative contains the contribution of the
jumps. On lines that are not resolved the nodes stay where they are, and q, theta and m enter through the density, as
they do for frozen `Nodes`.
"""

from __future__ import annotations

import functools
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..base.arrays import apply, inverse, matvec, repeated, total
from ..base.derivatives import derivative_along, with_tangent
from ..model.model import Model
from ..model.overlaps import Overlaps
from .maxwell import FieldLines, Gaps, Section, between, common_tangents, energy_gap, energy_profile, searched
from .moreau import ProxProblem, with_implicit_derivative
from .prox import Origin, origin_of, reference_axis
from .rules import (
    Jumps,
    Points,
    Replicate,
    conditional,
    hermite,
    in_blocks,
    legendre,
    log_volume,
    teacher_fields,
    whiten,
)

_AXIS_STEPS = 32  # power iterations for the axis of the double well
# Nodes in t do not serve on a line if the sum of their weights differs from one by more than this. At standard states
# it differs by less than .001 with order 5.
_WEIGHT_TOLERANCE = 0.01


class Block(NamedTuple):
    """A block of lines of `LineNodes`; the attributes are explained there."""

    teacher: Float[Array, "*B L t N"]
    across: Float[Array, "*B across N"]
    weight: Float[Array, "*B N"]
    offset: Float[Array, "*B N"]
    reach: Float[Array, "*B 2"]
    direction: Float[Array, "*B L r"] | None


class LineSearch(NamedTuple):
    """Result of the search on the lines of a block."""

    directions: Float[Array, "n N"]
    gaps: Gaps  # the jumps
    section: Section  # the nodes
    share: Float[Array, "places N"]  # their weights on their line
    resolved: Bool[Array, " N"]  # which lines are resolved


class LineNodes(Replicate):
    """Lines, placed in the space of the standard normals."""

    KIND: ClassVar[str] = "lines"
    teacher: Float[Array, "*R L t N"]  # standard normals of the teacher's fields
    across: Float[Array, "*R across N"]  # the L r - 1 of the student's fields across the line
    weight: Float[Array, "*R N"]  # summing to one
    # Nodes of a line that is not resolved lie in parts of equal weight, at this offset from the middles of the parts,
    # in (-1/2, 1/2).
    offset: Float[Array, "*R N"]
    reach: Float[Array, "*R 2"]  # how far a line goes to either side, in standard deviations
    direction: Float[Array, "*R L r"] | None  # of all lines in the student's fields; None: axis of the double well
    points_per_line: int = eqx.field(static=True)
    jumps: int = eqx.field(static=True)  # largest number of jumps of a line
    block: int = eqx.field(static=True)  # nodes in a block

    @property
    def size(self) -> int:
        return self.weight.shape[-1] * self.points_per_line

    @property
    def shape(self) -> tuple[int, int, int]:
        L, t = self.teacher.shape[-3:-1]
        return L, (self.across.shape[-2] + 1) // L, t

    @property
    def fast_compile(self) -> bool:
        return True

    def blocks(self) -> Block:
        width = max(1, self.block // self.points_per_line)
        split = in_blocks((self.teacher, self.across, self.weight, self.offset), width)
        count = split[0].shape[0]
        shared = repeated((self.reach, self.direction), count)
        return Block(*split, *shared)

    def quadrature(self, block: Block) -> tuple[Float[Array, "L r N"], Float[Array, "L t N"], Float[Array, " N"]]:
        teacher, across, weight, *_ = block
        L, r, _ = self.shape
        u = jnp.asarray(reference_axis(L * r), weight.dtype)[:, None] + 0 * weight
        s, share = hermite(self.points_per_line // 2)
        student = vectors_across(u, across)[:, None] - u[:, None] * jnp.asarray(s, weight.dtype)[:, None]
        count = s.size
        return (
            student.reshape(L, r, -1),
            jnp.tile(teacher, count),
            (jnp.asarray(share / share.sum(), weight.dtype)[:, None] * weight).ravel(),
        )

    def search(self, model: Model, x: Overlaps, block: Block) -> LineSearch:
        teacher, across, _, offset, reach, direction = block
        y = teacher_fields(model, teacher)
        u, origin = directions(model, x, y, direction)
        lines = lay(model, x, y, across, u, origin)
        profile = energy_profile(lines, reach)
        gaps, resolved = common_tangents(lines, profile, self.jumps)
        section, share, resolved = _line_quadrature(lines, profile, gaps, resolved, self.points_per_line, reach, offset)
        gaps = jax.tree.map(lambda a: jnp.where(resolved, a, jnp.zeros_like(a)), gaps)
        return LineSearch(u, gaps, section, share, resolved)

    def points(self, model: Model, x: Overlaps, block: Block, result: LineSearch) -> Points:
        teacher, across, weight, *_ = block
        u, gaps, section, share, resolved = result
        repeat = functools.partial(jnp.tile, reps=self.points_per_line)
        L, r, _ = model.shape
        y = teacher_fields(model, teacher)
        lines = lay(model, x, y, across, u)
        # Lines that are not resolved do not move, because their jumps are unknown.
        lines = lines.map_lines(lambda a: jnp.where(resolved, a, lax.stop_gradient(a)))
        shift, stretch = shifts(lines, gaps, section.s)
        h = lines.origin[:, None] + (section.s + shift) * lines.direction[:, None]
        h, z = h.reshape(L, r, -1), jnp.moveaxis(section.z, 1, 0).reshape(L, r, -1)
        problem, teacher = lines.problem.map_nodes(repeat), repeat(teacher)
        student, log_density = whiten(model, x, h, problem.y)
        log_density = log_density + repeat(jnp.where(resolved, log_volume(model, x), 0.0))
        return Points(
            student=student,
            teacher=teacher,
            weight=(weight * share * (1 + stretch)).ravel() * jnp.exp(log_density - lax.stop_gradient(log_density)),
            z=with_implicit_derivative(z, problem, h),
            resolved=(section.settled & resolved).ravel(),
            gap=energy_gap(gaps, section.s).ravel(),
            jumps=_jumps(gaps, weight, L),
        )


def _jumps(gaps: Gaps, weight: Float[Array, " N"], L: int) -> Jumps:
    """Return the jumps of lines with given weights.

    Along a line the energy difference of the two sides changes by t_right - t_left per unit of s.
    """
    slope = gaps.right.t - gaps.left.t
    density = weight * jnp.exp(-0.5 * gaps.left.s**2) / (2 * np.pi) ** 0.5 / jnp.where(slope > 0, slope, jnp.inf)
    step = jnp.moveaxis(gaps.right.z - gaps.left.z, 1, 0)
    return Jumps(jnp.where(gaps.real, density, 0.0).ravel(), step.reshape(L, step.shape[0] // L, -1))


def lay(
    model: Model,
    x: Overlaps,
    y: Float[Array, "L t N"],
    across: Float[Array, "across N"],
    u: Float[Array, "across+1 N"],
    origin_of_loss: Origin | None = None,
) -> FieldLines:
    """Lay lines in directions `u` of the standard normals, through places `across` the lines."""
    L, r, _ = model.shape
    slope, spread = conditional(model, x)

    def scale(matrix: Float[Array, "L r r"], v: Float[Array, "n N"]) -> Float[Array, "n N"]:
        return apply(matrix, v.reshape(L, r, -1)).reshape(L * r, -1)

    origin = (x.m[..., None] + apply(slope, y)).reshape(L * r, -1) + scale(spread, vectors_across(u, across))
    g = scale(spread, u)
    return FieldLines(ProxProblem(model, x.V, y), origin, g, scale(inverse(x.V), g), origin_of_loss)


def _line_quadrature(
    lines: FieldLines,
    profile: Section,
    gaps: Gaps,
    resolved: Bool[Array, " N"],
    total: int,
    reach: Float[Array, "2"],
    offset: Float[Array, " N"],
) -> tuple[Section, Float[Array, "{total} N"], Bool[Array, " N"]]:
    """Return `total` nodes on each line, their weights, and which lines are resolved.

    The nodes are Gauss-Legendre in t, and the pieces get them in proportion to their length in s. They do not serve on
    a line where Maxwell's construction failed, a node did not settle, or the weights do not sum to one, because s(t)
    has features that are narrower than the distance of the nodes. The nodes of such a line are searched for one by one.
    They lie in parts of equal weight, at the line's own offset, so the average along the line is unbiased whatever
    jumps there.

    A line is resolved if the nodes in t serve, or if its jumps are known all the same: Maxwell's construction
    succeeded, all nodes settled, and s(t) increases between the jumps.
    """
    cut = cuts(gaps.left.s, gaps.real, reach, total)
    index = jnp.arange(total)[:, None]
    piece = sum((index >= c).astype(int) for c in cut[1:-1])
    first, last = profile.t[:1], profile.t[-1:]
    start, count, lo, hi = (
        jnp.take_along_axis(a, piece, 0, mode="clip")
        for a in (
            cut[:-1],
            jnp.diff(cut, axis=0),
            jnp.concatenate([first, gaps.right.t]),
            jnp.concatenate([jnp.where(gaps.real, gaps.left.t, last), last]),
        )
    )
    rules = np.zeros((2, total + 1, total))
    for n in range(1, total + 1):
        rules[:, n, :n] = legendre(n)
    node, share = (jnp.asarray(a, lo.dtype)[count, index - start] for a in rules)
    section = between(lines, profile, lo + (hi - lo) * node)
    s = jax.scipy.special.ndtri((index + 0.5 + offset) / total)
    weight = (hi - lo) * share * section.slope * jnp.exp(-0.5 * section.s**2) / (2 * np.pi) ** 0.5
    resolved &= jnp.all(section.settled, 0)
    serves = resolved & (jnp.abs(jnp.sum(weight, 0) - 1) < _WEIGHT_TOLERANCE)
    resolved &= serves | jnp.all(section.slope > 0, 0)
    s, error = jnp.where(serves, section.s, s), jnp.where(serves, section.error, jnp.inf)
    section = searched(lines, section.replace(s=s, error=error))
    return section, jnp.where(serves, weight, 1 / total), resolved


def cuts(s: Float[Array, "P N"], real: Bool[Array, "P N"], reach: Float[Array, "2"], total: int) -> Int[Array, "P+2 N"]:
    """Return the first node of each piece of a line, between jumps at s, and the end of the nodes.

    A piece gets nodes in proportion to its length, but at least two. Jumps that are not `real` come last, and get no
    nodes beyond them.
    """
    lower = 2 * jnp.cumsum(real, 0)
    upper = total - 2 * jnp.sum(real, 0) - 2 + lower
    cut = jnp.round((s + reach[0]) / jnp.sum(reach) * total).astype(int)
    cut = lax.cummax(jnp.clip(cut, lower, upper) - lower, 0) + lower
    cut = jnp.where(real, cut, total)
    return jnp.concatenate([jnp.zeros_like(cut[:1]), cut, jnp.full_like(cut[:1], total)])


@with_tangent
def _jump_positions(primals: tuple, tangents: tuple) -> Float[Array, " N"]:
    """Return the fields s at which lines jump between minimisers `low` and `high`, (n, N), with derivatives.

    A jump stays where the two energies are equal. It moves by the change of their difference, divided by the slope of
    this difference in s, which is t_right - t_left.
    """
    s, lines, low, high, real = primals
    shape = *lines.problem.V.shape[:2], -1
    sides = [with_implicit_derivative(z.reshape(shape), lines.problem, lines.at(s)) for z in (low, high)]

    def difference(lines: FieldLines) -> Float[Array, " N"]:
        low_energy, high_energy = (lines.problem.energy(z, lines.at(s)) for z in sides)
        return high_energy - low_energy

    slope = total(lines.normal * (sides[1] - sides[0]).reshape(low.shape))  # zero where a jump is just about to end
    return derivative_along(difference, primals[1:2], tangents[1:2]) / jnp.where(real & (slope > 0), slope, jnp.inf)


def shifts(
    lines: FieldLines, gaps: Gaps, s: Float[Array, "places N"]
) -> tuple[Float[Array, "places N"], Float[Array, "places N"]]:
    """Return how far nodes at fields s move along their line, and how much their intervals stretch.

    Both are zero, with derivatives. Nodes between two jumps move by linear interpolation between these; all others move
    rigidly with the nearest jump.
    """
    count = gaps.real.shape[0]
    all_lines = lines.tiled(count)
    low, high = (jnp.moveaxis(e.z, 0, 1).reshape(all_lines.origin.shape) for e in (gaps.left, gaps.right))
    positions = _jump_positions(gaps.left.s.ravel(), all_lines, low, high, gaps.real.ravel())
    move = (positions - lax.stop_gradient(positions)).reshape(count, -1)
    # Intervals from each jump to the next one, (P - 1, places, N).
    width = jnp.diff(gaps.left.s, axis=0)
    width = jnp.where(gaps.real[1:] & (width > 0), width, jnp.inf)[:, None]
    fraction = jnp.clip((s - gaps.left.s[:-1, None]) / width, 0.0, 1.0)
    step = jnp.diff(move, axis=0)[:, None]
    stretch = jnp.where((fraction > 0) & (fraction < 1), step / width, 0.0)
    return move[0] + jnp.sum(fraction * step, 0), jnp.sum(stretch, 0)


def vectors_across(u: Float[Array, "n N"], w: Float[Array, "n-1 #N"]) -> Float[Array, "n N"]:
    """Return vectors orthogonal to unit vectors `u`, with coordinates `w` in a frame across `u`.

    The frame turns smoothly with `u`.
    """
    n = u.shape[0]
    if n == 1:
        return jnp.zeros_like(u)
    axis = reference_axis(n)
    basis = np.linalg.qr(np.concatenate([axis[:, None], np.eye(n)[:, : n - 1]], 1))[0][:, 1:]
    v = u + jnp.asarray(axis, u.dtype)[:, None]
    a = matvec(jnp.asarray(basis, u.dtype)[..., None], w)
    return a - v * (2 * jnp.sum(v * a, 0) / jnp.sum(v**2, 0))


def directions(
    model: Model, x: Overlaps, y: Float[Array, "L t N"], direction: Float[Array, "L r"] | None
) -> tuple[Float[Array, "n N"], Origin]:
    """Return the directions of the lines in the standard normals, and the loss at zero student fields.

    In these directions the energies of the two wells come apart. They follow from the double well of the loss at zero,
    unless a `direction` is given.
    """
    L, r, _ = model.shape
    n, spread = L * r, conditional(model, x)[1]
    origin = origin_of(model, y, r, _AXIS_STEPS)
    e = origin.axis if direction is None else jnp.broadcast_to(direction[..., None], origin.axis.shape)
    u = apply(jnp.swapaxes(spread, -1, -2), apply(inverse(x.V), e)).reshape(n, -1)
    return u / jnp.sqrt(jnp.sum(u**2, 0)), origin


NormalsAndWeights = tuple[Float[np.ndarray, "fields _"], Float[np.ndarray, " _"]]


def line_count(order: int, any_parity: bool, across: int) -> int:
    """Return the number of lines of the product rule."""
    angles, radii, places = _counts(order, any_parity)
    return angles * radii * places**across


def _counts(order: int, any_parity: bool) -> tuple[int, int, int]:
    """Return numbers of equal accuracy: of angles and radii of the teacher, and of places in each dimension across."""
    return ((order | 1) + 2) * (1 + any_parity), 3 * order, order // 2 + 1


def polar(order: int, across: int, any_parity: bool, even: bool, rng: np.random.Generator) -> NormalsAndWeights:
    """Return normals and weights of the product rule.

    It has equal angles and Gauss-Legendre radii for the teacher's two fields, and is Gauss-Hermite across the lines. An
    odd number of angles integrates functions that are even under y -> -y as precisely as twice as many would.

    Args:
        any_parity: whether to integrate functions of any parity, with twice as many angles.
    """
    angles, radii, places = _counts(order, any_parity)
    angle = 2 * np.pi * (np.arange(angles) + rng.random()) / angles
    end = rng.uniform(5.7, 7.2)
    radius, w_radius = (end * a for a in legendre(radii))
    w_radius = w_radius * radius * np.exp(-0.5 * radius**2)
    x, w = hermite(places)
    # A shift by a quarter of a spacing, or of a standard deviation if that is less, changes the sign of the error and
    # hardly its size.
    shift = 0.0 if even else rng.uniform(-0.25, 0.25) * np.min(np.diff(x), initial=1.0)
    w = w * np.exp(-shift * x - 0.5 * shift**2)
    x, w = x + shift, w / w.sum()
    axes = [angle, radius, *[x] * across]
    weights = [np.full(angle.size, 1 / angle.size), w_radius / w_radius.sum(), *[w] * across]
    angle, radius, *positions = (a.ravel() for a in np.meshgrid(*axes, indexing="ij"))
    weight = functools.reduce(np.multiply.outer, weights).ravel()
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), *positions]), weight / weight.sum()
