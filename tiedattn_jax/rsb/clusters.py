"""Averages within a cluster of minima: the inner average of one step of replica symmetry breaking.

Around a student field h the minima of one cluster see fields h + C xi, with xi standard normal and C C^T = q1 - q0, and
have the weight exp(-s E), where E is the Moreau envelope at these fields and s the Parisi parameter; q1 and q0 are the
overlaps of two minima of one cluster and of different clusters. The envelope is smooth on either side of a jump of the
proximal operator. The average is therefore broken at the jump: it takes Gauss-Legendre nodes on either side, along the
line that crosses the jump, and Gauss-Hermite nodes across this line. The jump moves with the state, and derivatives
contain this motion.

A *sheet* is a family of local minimisers that changes smoothly with the field. At a *jump* the energies of two sheets
are equal. A *step* is a place where the only sheet changes steeply; the average is broken there, too, but no derivative
belongs to it. A line is a set of fields in one direction; places on it are coordinates in eta, the normals in which the
weight exp(-|xi|^2 / 2 - s E) of a sheet is nearly a standard one, see `SheetWeight`.

A search goes in three stages. `find_rough_jump` tells which fields have a jump or step within reach. `find_jumps`, or
`find_smooth` at the other fields, lays the nodes; `update_minima` does so again when the order parameters have changed.
`cluster_at` returns the nodes with their derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..averages.lines import vectors_across
from ..averages.moreau import with_implicit_derivative
from ..averages.prox import origin_of, pick, reference_axis
from ..averages.rules import hermite_grid, legendre
from ..base.arrays import apply, either, inverse, matvec, total
from .cluster_law import ClusterLaw, SheetWeight

_MAX_DISTANCE = 14.0  # largest distance of a jump along a line, in standard deviations; further out it plays no role
_PROBES = (-4.0, -2.0, 0.0, 2.0, 4.0)  # places along a line that are searched for a second minimum
_HALVINGS = 5  # halvings of the section between two probes in which the minimiser changes most
# The minimiser makes a step if its change over the last half is more than this share of its change over the whole
# section. After five halvings the share is 1/32 for an even change.
_STEP = 0.045
_SMOOTH = 4  # nodes in each direction where there is no jump
_ALONG, _ACROSS = 12, 3  # nodes on each side of the jump along a line, and places in each direction across the line
_ROOT_STEPS = 4  # Newton steps for the place of the jump
_REACH = 4.5  # how far the nodes reach beyond the centre of a sheet's weight, in its standard deviations


class RoughJump(NamedTuple):
    """Rough place of the jump or step next to N fields, n = L r."""

    low: Float[Array, "L r N"]  # global minimisers at the fields; the "lower sheet" is theirs
    direction: Float[Array, "n N"]  # unit vectors in eta of lines through the centre of the lower sheet's weight
    jump: Float[Array, " N"]  # rough place of a jump or a step on this line, exactly zero without one
    # Minimisers on both sides of it; the lower sheet is the left one.
    sides: tuple[Float[Array, "L r N"], Float[Array, "L r N"]]
    breaks: Bool[Array, " N"]  # whether there is a jump: two minima; False at a step


class _Pair(NamedTuple):
    """Two minima a and b at one place in xi at each of N fields; all arrays may have a leading axis of P places.

    For a step they are the single minima on both sides of it.
    """

    gap: Float[Array, "*P N"]  # energy of b above that of a; infinite where there is only one minimum
    place: Float[Array, "*P n N"]  # standard normals
    a: Float[Array, "*P L r N"]  # the lower minimiser
    b: Float[Array, "*P L r N"]  # the upper one


def find_rough_jump(law: ClusterLaw, s: Float[Array, ""]) -> RoughJump:
    """Find the rough place of the jump or step next to each field, from where two minima are closest in energy.

    Places are probed at the field and along one line through the centre of the lower sheet's weight. Where they all
    have a single minimum, a step on this line is looked for. The line of the result points from sheet to sheet, the
    direction in which their energy difference changes fastest.
    """
    L, r, N = law.h.shape
    origin = law.search(jnp.zeros((L * r, N), law.h.dtype))
    weight = law.weight_of(origin.z, s)
    # The line that is probed points to the second minimum if the field has one, else along the double well of the loss.
    direction = law.pull(origin.other - origin.z)
    axis = law.pull(origin_of(law.model, law.y, r, 12).axis)
    u, _ = _unit_vectors(weight.pulled(jnp.where(jnp.isfinite(origin.gap), direction, axis)))
    pairs, step = _probe_lines(law, weight, u)
    candidates = jax.tree.map(
        lambda p, q: jnp.concatenate([p[None], q]), _Pair(origin.gap, jnp.zeros_like(u), origin.z, origin.other), pairs
    )
    breaks = jnp.any(jnp.isfinite(candidates.gap), 0)
    closest = _Pair(*(pick(p, jnp.argmin(candidates.gap, 0)) for p in candidates))
    closest = closest._replace(b=law.follow(closest.b, closest.place)[0])
    gap, place, a, b = either(breaks, closest, step)
    is_split = breaks | (gap == 0)
    push, size = _unit_vectors(weight.pulled(law.pull(b - a)))
    u = jnp.where(is_split, push, u)
    # Along u the energy difference falls by `size` per unit.
    x = weight.along(u, place) + gap / jnp.where(size > 0, size, 1.0)
    # The field itself, at xi = 0, must be on the left.
    is_turned = is_split & (weight.along(u, jnp.zeros_like(u)) > x)
    u, x = jnp.where(is_turned, -u, u), jnp.where(is_turned, -x, x)
    pair = jnp.where(is_turned, b, a), jnp.where(is_turned, a, b)
    x = jnp.where(is_split, jnp.clip(x, -_MAX_DISTANCE, _MAX_DISTANCE), 0.0)
    return RoughJump(origin.z, u, x, pair, breaks)


def _probe_lines(law: ClusterLaw, weight: SheetWeight, u: Float[Array, "n N"]) -> tuple[_Pair, _Pair]:
    """Search for minima along lines through the centre of the weight, at more places where the lowest changes most.

    There may be a second minimum only close to the jump, so the search closes in on the steepest change.

    Args:
        law: fields and law of the clusters.
        weight: weight of the lower sheet.
        u: directions of the lines in eta.

    Returns:
        Two pairs. The first holds the two lowest minima at all places, with a leading axis. The second holds the
        lowest minima on both sides of the steepest change; its gap is zero if this is a step, and infinite otherwise.
    """

    def at(x: Float[Array, "P N"]) -> _Pair:
        """Return the minima at places along the lines."""
        xi = weight.normals(x * u[:, None]).reshape(len(u), -1)
        prox = law.search(xi)
        arrays = (a.reshape(*a.shape[:-1], *x.shape) for a in (prox.gap, xi, prox.z, prox.other))
        return _Pair(*(jnp.moveaxis(a, -2, 0) for a in arrays))

    def change(a: Float[Array, "P L r N"]) -> Float[Array, "P-1 N"]:
        """Return the largest change of an entry between neighbouring places."""
        return jnp.max(jnp.abs(jnp.diff(a, axis=0)), (1, 2))

    def steepest(
        x: Float[Array, "P N"], z: Float[Array, "P L r N"]
    ) -> tuple[Float[Array, "2 N"], Float[Array, "2 L r N"]]:
        """Return the section with the largest change, by its ends."""
        widest = jnp.argmax(change(z), 0)

        def ends(a: Float[Array, "P *z N"]) -> Float[Array, "2 *z N"]:
            return jnp.stack([pick(a, widest), pick(a, widest + 1)])

        return ends(x), ends(z)

    probes = jnp.broadcast_to(jnp.asarray(_PROBES, u.dtype)[:, None], (len(_PROBES), u.shape[-1]))
    coarse = at(probes)
    section = steepest(probes, coarse.a)

    def halve(
        ends: tuple[Float[Array, "2 N"], Float[Array, "2 L r N"]], _: None
    ) -> tuple[tuple[Float[Array, "2 N"], Float[Array, "2 L r N"]], _Pair]:
        """Return the half of a section with the larger change, and the minima at its middle."""
        (low, high), (a, b) = ends
        middle = 0.5 * (low + high)
        centre = at(middle[None])
        return steepest(jnp.stack([low, middle, high]), jnp.stack([a, centre.a[0], b])), centre

    (x, z), refined = lax.scan(halve, section, length=_HALVINGS)
    pairs = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, 0]]), coarse, refined)
    is_step = change(z)[0] > _STEP * change(section[1])[0]
    return pairs, _Pair(jnp.where(is_step, 0.0, jnp.inf), weight.normals(jnp.mean(x, 0) * u), z[0], z[1])


def _unit_vectors(v: Float[Array, "n N"]) -> tuple[Float[Array, "n N"], Float[Array, " N"]]:
    """Return unit vectors along vectors, and the lengths of the latter."""
    size = jnp.sqrt(total(v**2))
    return v / jnp.where(size > 0, size, 1.0), size


class SmoothSearch(NamedTuple):
    """Search results at N fields without a jump within reach, K nodes at each; n = L r, M = K N."""

    low: Float[Array, "L r N"]  # minimisers at the fields
    normals: Float[Array, "n M"]  # standard normals xi of the nodes
    log_weight: Float[Array, "K N"]  # logarithms of the weights
    z: Float[Array, "L r M"]  # minimisers at the nodes


def find_smooth(law: ClusterLaw, s: Float[Array, ""], rough_jump: RoughJump) -> SmoothSearch:
    """Lay the nodes at fields without a jump or step within reach: a product of Gauss-Hermite rules in eta."""
    L, r, _ = law.h.shape
    return _smooth(law, s, rough_jump.low, jnp.tile(rough_jump.low, _SMOOTH ** (L * r)))


def _smooth(law: ClusterLaw, s: Float[Array, ""], low: Float[Array, "L r N"], z: Float[Array, "L r M"]) -> SmoothSearch:
    """Lay the nodes of the smooth rule, by following minima; M = K N.

    Args:
        low: starts for the minimisers at the fields.
        z: starts for those at the nodes.
    """
    n = low.shape[0] * low.shape[1]
    low = law.follow(low, jnp.zeros((n, low.shape[-1]), low.dtype))[0]
    weight = law.weight_of(low, s)
    places, shares = hermite_grid(_SMOOTH, n)
    xi = weight.normals(jnp.asarray(places, low.dtype)[..., None])
    size = jnp.asarray(np.log(shares) + 0.5 * np.sum(places**2, 0), low.dtype)
    log_weight = size[:, None] + weight.log_det - 0.5 * total(xi**2)
    xi = xi.reshape(n, -1)
    return SmoothSearch(low, xi, log_weight, law.follow(z, xi)[0])


class JumpSearch(NamedTuple):
    """Search results at N fields with a jump or a step, without derivatives; n = L r.

    At each field there are J parallel lines, and K nodes on each, half of them on either side of the jump. Around a
    field the weight of the lower sheet is nearly the Gaussian c + R eta. The nodes are placed in eta. All lines are
    JN = J N, all nodes M = K J N.
    """

    low: Float[Array, "L r N"]  # minimisers of the lower sheet at the fields
    weight: SheetWeight  # weight of the lower sheet
    direction: Float[Array, "n N"]  # unit vectors of the lines in eta
    jump: Float[Array, "J N"]  # place along the line where the two minima have equal energy, or of a step
    place: Float[Array, "L r JN"]  # student fields at the jump minus h
    sides: tuple[Float[Array, "L r JN"], Float[Array, "L r JN"]]  # the two minimisers at the jump
    breaks: Bool[Array, "J N"]  # whether there is a jump
    other: Float[Array, "J N"]  # place along the line of the centre of the upper sheet's weight
    z: Float[Array, "L r M"]  # minimisers at the nodes

    def normals(self, x: Float[Array, "K J N"]) -> Float[Array, "n K*J*N"]:
        """Return the standard normals at places x along the lines."""
        n = len(self.direction)
        # A line has no sense of direction. `vectors_across` needs one, and is singular opposite to the reference axis.
        axis = jnp.asarray(reference_axis(n), x.dtype)[:, None]
        v = jnp.where(total(self.direction * axis) < 0, -self.direction, self.direction)
        places = jnp.asarray(hermite_grid(_ACROSS, n - 1)[0], x.dtype)
        across = [vectors_across(v, p[:, None]) for p in places.T]
        xi = self.weight.normals(jnp.stack(across, 1)[:, None] + x * self.direction[:, None, None])
        return xi.reshape(n, -1)

    @property
    def log_weight(self) -> Float[Array, "J N"]:
        """Logarithms of the weights of the lines: of the places across, in the volume of xi."""
        places, shares = hermite_grid(_ACROSS, len(self.direction) - 1)
        size = 0.5 * len(places) * np.log(2 * np.pi) + 0.5 * np.sum(places**2, 0) + np.log(shares)
        return jnp.asarray(size, self.jump.dtype)[:, None] + self.weight.log_det

    def fall(self, law: ClusterLaw, a: Float[Array, "L r JN"], b: Float[Array, "L r JN"]) -> Float[Array, "J N"]:
        """Return how fast the energy of b's sheet falls below that of a's along the lines."""
        along = matvec(self.weight.root, self.direction)
        return total(jnp.tile(along, len(self.jump)) * law.pull(b - a)).reshape(self.jump.shape)


def find_jumps(law: ClusterLaw, s: Float[Array, ""], rough_jump: RoughJump) -> JumpSearch:
    """Find the jumps on the lines of each field, and the minimisers at all nodes."""
    L, r, _ = law.h.shape
    J = _ACROSS ** (L * r - 1)
    left, right = (jnp.where(rough_jump.breaks, side, rough_jump.low) for side in rough_jump.sides)
    # The searches at the nodes start from the two sides of the jump. If it is far from the left nodes, the minimiser at
    # the field is the better start for these.
    left = jnp.where(jnp.abs(rough_jump.jump) <= 2 * _REACH, left, rough_jump.low)
    z = jnp.concatenate([jnp.tile(side, J * _ALONG) for side in (left, right)], -1)
    jump, breaks = (jnp.tile(a, (J, 1)) for a in (rough_jump.jump, rough_jump.breaks))
    sides = jnp.tile(rough_jump.sides[0], J), jnp.tile(rough_jump.sides[1], J)
    weight = law.weight_of(rough_jump.low, s)
    guess = JumpSearch(
        rough_jump.low, weight, rough_jump.direction, jump, sides[0], sides, breaks, jnp.zeros_like(jump), z
    )
    return _refined_jumps(law, s, guess)


def update_minima(law: ClusterLaw, s: Float[Array, ""], result: JumpSearch | SmoothSearch) -> JumpSearch | SmoothSearch:
    """Update results of `find_jumps` or `find_smooth` to another law and s, by following the minima."""
    if isinstance(result, SmoothSearch):
        return _smooth(law, s, result.low, result.z)
    low = law.follow(result.low, jnp.zeros_like(result.direction))[0]
    weight = law.weight_of(low, s)
    # In the fields a jump stays about where it is, while the nodes move with the weight. Its place in eta therefore
    # changes, except for a jump of exactly zero, which says that there is none.
    xi = apply(inverse(law.spread), result.place).reshape(len(result.direction), *result.jump.shape)
    jump = jnp.clip(weight.along(result.direction, xi), -_MAX_DISTANCE, _MAX_DISTANCE)
    guess = result._replace(low=low, weight=weight, jump=jnp.where(result.jump == 0, 0.0, jump))
    return _refined_jumps(law, s, guess)


def _refined_jumps(law: ClusterLaw, s: Float[Array, ""], guess: JumpSearch) -> JumpSearch:
    """Return `guess` with the jump on each of the lines, found by Newton's method, and the minimisers at the nodes.

    In the guess, `jump`, `sides` and `z` are starts; `place` and `other` are not used.
    """
    J, N = guess.jump.shape

    def differ(a: Float[Array, "L r JN"], b: Float[Array, "L r JN"]) -> Bool[Array, "J N"]:
        """Return whether two minimisers are different ones."""
        return (jnp.max(jnp.abs(a - b), (0, 1)) > 1e-2 * law.model.field_scale).reshape(J, N)

    def follow_sides(
        x: Float[Array, "J N"], sides: Sequence[Float[Array, "L r JN"]]
    ) -> tuple[list[Float[Array, "L r JN"]], list[Float[Array, " JN"]]]:
        """Return both minimisers at places x of the lines, and their energies."""
        xi = guess.normals(x[None])
        minimisers, energy = law.follow(jnp.concatenate(sides, -1), jnp.tile(xi, 2))
        return jnp.split(minimisers, 2, -1), jnp.split(energy, 2)

    def refine(_: Int[Array, ""] | int, state: tuple) -> tuple:
        """Take one Newton step towards equal energies; the place stays where there is no second minimum."""
        x, *sides = state
        (a, b), (low_energy, high_energy) = follow_sides(x, sides)
        slope, rise = guess.fall(law, a, b), (high_energy - low_energy).reshape(J, N)
        root = x + rise / jnp.where(slope > 0, slope, 1.0)
        return jnp.where((slope > 0) & differ(a, b), jnp.clip(root, -_MAX_DISTANCE, _MAX_DISTANCE), x), a, b

    x, *sides = lax.fori_loop(0, _ROOT_STEPS, refine, (guess.jump, *guess.sides))
    (a, b), _ = follow_sides(x, sides)
    slope = guess.fall(law, a, b)
    breaks = guess.breaks & differ(a, b) & (slope > 0)
    place = apply(law.spread, guess.normals(x[None]).reshape(a.shape))
    # Along the line the upper sheet's energy falls at the rate `slope` relative to the lower one's. Its weight is
    # therefore centred at s times this rate, if the lower one's is centred at zero.
    guess = guess._replace(jump=x, place=place, sides=(a, b), breaks=breaks, other=jnp.where(breaks, s * slope, 0.0))
    return guess._replace(z=law.follow(guess.z, guess.normals(_nodes_around(guess, x)[0]))[0])


class Cluster(eqx.Module):
    """Nodes of the inner average at N student fields, K at each, M = K N.

    Axes of size M have the node outermost. The weights are those of the standard normal law; the factor exp(-s E) is
    not in them.
    """

    normals: Float[Array, "n M"]  # standard normals xi
    log_weight: Float[Array, "K N"]  # logarithms of the weights
    z: Float[Array, "L r M"]  # minimisers of the proximal problem at the nodes


def cluster_at(law: ClusterLaw, result: JumpSearch | SmoothSearch) -> Cluster:
    """Return the nodes of the inner average, differentiable in the numbers of the law.

    Args:
        law: the point at which derivatives are taken.
        result: results of `find_jumps`, `find_smooth` or `update_minima` there, which count as constants.
    """
    if isinstance(result, SmoothSearch):
        xi, log_weight = result.normals, result.log_weight
    else:
        x, weight = _nodes_around(result, _moving_jump(law, result))
        xi = result.normals(x)
        log_density = -0.5 * total(xi**2).reshape(x.shape) - 0.5 * len(xi) * np.log(2 * np.pi)
        log_weight = (jnp.log(weight) + result.log_weight + log_density).reshape(-1, law.h.shape[-1])
    return Cluster(xi, log_weight, with_implicit_derivative(result.z, *law.at(xi)))


def _moving_jump(law: ClusterLaw, result: JumpSearch) -> Float[Array, "J N"]:
    """Return the places of the jumps, with derivatives: a jump moves so that the two energies stay equal."""
    xi = result.normals(result.jump[None])
    low, high = (law.energy(z, xi) for z in result.sides)
    rise, slope = (high - low).reshape(result.jump.shape), result.fall(law, *result.sides)
    move = (rise - lax.stop_gradient(rise)) / lax.stop_gradient(jnp.where(slope > 0, slope, jnp.inf))
    return result.jump + jnp.where(result.breaks, move, 0.0)


def _nodes_around(result: JumpSearch, jump: Float[Array, "J N"]) -> tuple[Float[Array, "K J N"], Float[Array, "K J N"]]:
    """Return Gauss-Legendre places along the lines, half of them on each side of the jump, and their weights.

    Each half covers the reach of its own sheet's weight: the lower one is centred at 0, the upper one at
    `result.other`.

    Args:
        result: gives the centre `other` of the upper sheet's weight.
        jump: places of the jumps.
    """
    t, w = (jnp.asarray(a, jump.dtype)[:, None, None] for a in legendre(_ALONG))
    sides = (
        (jnp.minimum(0.0, jump) - _REACH, jnp.minimum(jump, _REACH)),
        (jnp.maximum(jump, result.other - _REACH), jnp.maximum(jump, result.other) + _REACH),
    )
    return (
        jnp.concatenate([lo + (hi - lo) * t for lo, hi in sides]),
        jnp.concatenate([(hi - lo) * w for lo, hi in sides]),
    )
