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

A search goes in three stages. `find_rough_jump` tells which fields have a jump or step within reach. `find`, or
`find_smooth` at the other fields, lays the nodes; `update_minima` does so again when the order parameters have changed.
`points` returns the nodes with their derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..averages.lines import vectors_across
from ..averages.minima import reference_axis
from ..averages.moreau import with_implicit_derivative
from ..averages.rules import hermite_grid, legendre
from ..base.arrays import apply, inverse, matvec, total
from ..model.model import Model
from .cluster_law import MAX_DISTANCE, Cluster, ClusterLaw, RoughJump, SheetWeight

_SMOOTH = 4  # nodes in each direction where there is no jump
_ALONG, _ACROSS = 12, 3  # nodes on each side of the jump along a line, and places in each direction across the line
_ROOT_STEPS = 4  # Newton steps for the place of the jump
_REACH = 4.5  # how far the nodes reach beyond the centre of a sheet's weight, in its standard deviations


class Smooth(NamedTuple):
    """Search results at N fields without a jump within reach, K nodes at each; n = L r, M = K N."""

    low: Float[Array, "L r N"]  # minimisers at the fields
    normals: Float[Array, "n M"]  # standard normals xi of the nodes
    log_weight: Float[Array, "K N"]  # logarithms of the weights
    z: Float[Array, "L r M"]  # minimisers at the nodes


def find_smooth(
    model: Model,
    V: Float[Array, "L r r"],
    spread: Float[Array, "L r r"],
    h: Float[Array, "L r N"],
    y: Float[Array, "L t N"],
    s: Float[Array, ""],
    rough_jump: RoughJump,
) -> Smooth:
    """Lay the nodes at fields without a jump or step within reach: a product of Gauss-Hermite rules in eta.

    The arguments are those of `find`.
    """
    z = jnp.tile(rough_jump.low, _SMOOTH ** (h.shape[0] * h.shape[1]))
    return _smooth(ClusterLaw(model, V, spread, h, y), rough_jump.low, z, s)


def _smooth(law: ClusterLaw, low: Float[Array, "L r N"], z: Float[Array, "L r M"], s: Float[Array, ""]) -> Smooth:
    """Lay the nodes of the smooth rule, by following minima; M = K N.

    Args:
        law: fields and law of the clusters.
        low: starts for the minimisers at the fields.
        z: starts for those at the nodes.
        s: Parisi parameter.
    """
    n = low.shape[0] * low.shape[1]
    low = law.follow(low, jnp.zeros((n, low.shape[-1]), low.dtype))[0]
    weight = law.weight_of(low, s)
    places, shares = hermite_grid(_SMOOTH, n)
    xi = weight.normals(jnp.asarray(places, low.dtype)[..., None])
    size = jnp.asarray(np.log(shares) + 0.5 * np.sum(places**2, 0), low.dtype)
    log_weight = size[:, None] + weight.log_det - 0.5 * total(xi**2)
    xi = xi.reshape(n, -1)
    return Smooth(low, xi, log_weight, law.follow(z, xi)[0])


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

    @property
    def along(self) -> Float[Array, "n N"]:
        """Direction of the lines in the standard normals xi."""
        return matvec(self.weight.root, self.direction)


def find(
    model: Model,
    V: Float[Array, "L r r"],
    spread: Float[Array, "L r r"],
    h: Float[Array, "L r N"],
    y: Float[Array, "L t N"],
    s: Float[Array, ""],
    rough_jump: RoughJump,
) -> JumpSearch:
    """Find the jumps on the lines of each field, and the minimisers at all nodes.

    Args:
        model, V, spread, h, y, s: as in `find_rough_jump`.
        rough_jump: the result of `find_rough_jump`.
    """
    law, J = ClusterLaw(model, V, spread, h, y), _ACROSS ** (h.shape[0] * h.shape[1] - 1)
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
    return _refined_jumps(law, guess, s)


def by_field(results: PyTree, N: int) -> PyTree:
    """Reshape arrays (..., M N) of results at N fields to (..., M, N); arrays (..., N) become (..., 1, N)."""
    return jax.tree.map(lambda a: a.reshape(*a.shape[:-1], -1, N), results)


def update_minima(
    model: Model,
    V: Float[Array, "L r r"],
    spread: Float[Array, "L r r"],
    h: Float[Array, "L r N"],
    y: Float[Array, "L t N"],
    s: Float[Array, ""],
    result: JumpSearch | Smooth,
) -> JumpSearch | Smooth:
    """Update results of `find` or `find_smooth` to other order parameters, by following the minima.

    Args:
        model, V, spread, h, y, s: as in `find_rough_jump`, at the new order parameters.
        result: results at the old ones.
    """
    law = ClusterLaw(model, V, spread, h, y)
    if isinstance(result, Smooth):
        return _smooth(law, result.low, result.z, s)
    low = law.follow(result.low, jnp.zeros_like(result.direction))[0]
    weight = law.weight_of(low, s)
    # In the fields a jump stays about where it is, while the nodes move with the weight. Its place in eta therefore
    # changes, except for a jump of exactly zero, which says that there is none.
    xi = apply(inverse(spread), result.place).reshape(len(result.direction), *result.jump.shape)
    jump = jnp.clip(weight.along(result.direction, xi), -MAX_DISTANCE, MAX_DISTANCE)
    guess = result._replace(low=low, weight=weight, jump=jnp.where(result.jump == 0, 0.0, jump))
    return _refined_jumps(law, guess, s)


def _refined_jumps(law: ClusterLaw, guess: JumpSearch, s: Float[Array, ""]) -> JumpSearch:
    """Return `guess` with the jump on each of the lines, found by Newton's method, and the minimisers at the nodes.

    Args:
        law: fields and law of the clusters.
        guess: its `jump`, `sides` and `z` are starts; `place` and `other` are not used.
        s: Parisi parameter.
    """
    J, N = guess.jump.shape

    def differ(a: Float[Array, "L r JN"], b: Float[Array, "L r JN"]) -> Bool[Array, "J N"]:
        """Return whether two minimisers are different ones."""
        return (jnp.max(jnp.abs(a - b), (0, 1)) > 1e-2).reshape(J, N)

    def rate(a: Float[Array, "L r JN"], b: Float[Array, "L r JN"]) -> Float[Array, "J N"]:
        """Return how fast the energy of b's sheet falls below that of a's along the lines."""
        return total(jnp.tile(guess.along, J) * law.pull(b - a)).reshape(J, N)

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
        slope, rise = rate(a, b), (high_energy - low_energy).reshape(J, N)
        root = x + rise / jnp.where(slope > 0, slope, 1.0)
        return jnp.where((slope > 0) & differ(a, b), jnp.clip(root, -MAX_DISTANCE, MAX_DISTANCE), x), a, b

    x, *sides = lax.fori_loop(0, _ROOT_STEPS, refine, (guess.jump, *guess.sides))
    (a, b), _ = follow_sides(x, sides)
    slope = rate(a, b)
    breaks = guess.breaks & differ(a, b) & (slope > 0)
    place = apply(law.spread, guess.normals(x[None]).reshape(a.shape))
    # Along the line the upper sheet's energy falls at the rate `slope` relative to the lower one's. Its weight is
    # therefore centred at s times this rate, if the lower one's is centred at zero.
    guess = guess._replace(jump=x, place=place, sides=(a, b), breaks=breaks, other=jnp.where(breaks, s * slope, 0.0))
    return guess._replace(z=law.follow(guess.z, guess.normals(_nodes_around(guess, x)[0]))[0])


def points(
    model: Model,
    V: Float[Array, "L r r"],
    spread: Float[Array, "L r r"],
    h: Float[Array, "L r N"],
    y: Float[Array, "L t N"],
    result: JumpSearch | Smooth,
) -> Cluster:
    """Return the nodes of the inner average, differentiable in the order parameters, the fields and the model.

    Args:
        model, V, spread, h, y: as in `find_rough_jump`; the point at which derivatives are taken.
        result: results of `find`, `find_smooth` or `update_minima` there, which count as constants.
    """
    law = ClusterLaw(model, V, spread, h, y)
    if isinstance(result, Smooth):
        xi, log_weight = result.normals, result.log_weight
    else:
        x, weight = _nodes_around(result, _moving_jump(law, result))
        xi = result.normals(x)
        log_density = -0.5 * total(xi**2).reshape(x.shape) - 0.5 * len(xi) * np.log(2 * np.pi)
        log_weight = (jnp.log(weight) + result.log_weight + log_density).reshape(-1, h.shape[-1])
    problem, fields = law.at(xi)
    return Cluster(
        xi.reshape(*h.shape[:2], -1),
        log_weight,
        with_implicit_derivative(result.z, problem, fields),
    )


def _moving_jump(law: ClusterLaw, result: JumpSearch) -> Float[Array, "J N"]:
    """Return the places of the jumps, with derivatives: a jump moves so that the two energies stay equal."""
    problem, fields = law.at(result.normals(result.jump[None]))
    low, high = (problem.energy(z, fields) for z in result.sides)
    pull = law.pull(result.sides[1] - result.sides[0])
    slope = total(jnp.tile(result.along, len(result.jump)) * pull)
    rise = high - low
    move = (rise - lax.stop_gradient(rise)) / lax.stop_gradient(jnp.where(slope > 0, slope, jnp.inf))
    return result.jump + jnp.where(result.breaks, move.reshape(result.jump.shape), 0.0)


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
