"""Averages within a cluster of minima: the inner average of one step of replica symmetry breaking.

Around a student field h the minima of one cluster see fields h + C xi, with C C^T = q1 - q0, and have the weight
exp(-s E), where E is the Moreau envelope. The envelope is smooth on either side of a jump of the proximal operator. The
average is therefore broken at the jump: it takes Gauss-Legendre nodes on either side, along the line that crosses the
jump, and Gauss-Hermite nodes across this line. The jump moves with the state, and derivatives contain this motion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..averages.lines import legendre, vectors_across
from ..averages.nodes import hermite_grid
from ..averages.prox import (
    Prox,
    local_minima,
    moreau,
    pick,
    prox_jacobian,
    reference_axis,
    search,
    well_axis,
    with_implicit_derivative,
)
from ..base.linalg import apply, inverse, matvec, precise, total
from ..base.trees import either
from ..model.model import Model

_SMOOTH = 4  # nodes in each direction where there is no jump
_ALONG, _ACROSS = 12, 3  # nodes on each side of the jump along a line, and places in each direction across the line
_REACH = 4.5  # how far the nodes reach beyond the centre of their weight, in standard deviations
_MAX_DISTANCE = 14.0  # largest distance of a jump along a line; further out it plays no role
_MIN_CURVATURE = 0.3  # least curvature of the weight over that of the Gaussian law; smaller ones are raised to it
_PROBES = (-4.0, -2.0, 0.0, 2.0, 4.0)  # places along a line that are searched for a second minimum
_HALVINGS = 5  # halvings of the section between two probes in which the minimiser changes most
# The minimiser makes a step if it does at least this share of that section's change in the last piece. The share is
# 1/32 for an even change.
_STEP = 0.045
_ROOT_STEPS = 4  # Newton steps for the place of the jump


class Cluster(eqx.Module):
    """Nodes of the inner average at N student fields, K at each."""

    normals: jax.Array  # standard normals xi, (L, r, K N)
    log_weight: jax.Array  # logarithms of the weights, (K, N)
    z: jax.Array  # minimisers of the proximal problem at the nodes, (L, r, K N)


class _ClusterLaw(NamedTuple):
    """N fields, and the law of the fields in the clusters around them; n = L r."""

    model: Model
    V: jax.Array  # response, (L, r, r)
    spread: jax.Array  # Cholesky root C of q1 - q0, (L, r, r)
    h: jax.Array  # student fields, (L, r, N)
    y: jax.Array  # teacher fields, (L, t, N)

    def at(self, xi: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the student fields at standard normals (n, K N), and the teacher fields."""
        count = xi.shape[-1] // self.h.shape[-1]
        shift = apply(self.spread, xi.reshape(*self.h.shape[:2], -1))
        return jnp.tile(self.h, count) + shift, jnp.tile(self.y, count)

    def pull(self, z: jax.Array) -> jax.Array:
        """Return C^T V^{-1} z, (n, N)."""
        return apply(jnp.swapaxes(self.spread, -1, -2), apply(inverse(self.V), z)).reshape(-1, z.shape[-1])

    def search(self, xi: jax.Array) -> Prox:
        """Search for the global minimisers at standard normals."""
        fields, teacher = self.at(xi)
        return search(self.model, fields, self.V, teacher)

    def follow(self, z: jax.Array, xi: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the minimisers next to z at standard normals, and their energies."""
        fields, teacher = self.at(xi)
        return local_minima(self.model, z, fields, self.V, teacher)

    @precise
    def weight_of(self, low: jax.Array, s: jax.Array) -> _Weight:
        """Return the weight of the sheet of the minimisers `low`, expanded to second order."""
        (L, r, N), n = self.h.shape, low.shape[0] * low.shape[1]
        eye, block = jnp.eye(n, dtype=low.dtype), jax.scipy.linalg.block_diag(*self.spread)[..., None]
        slope = eye[..., None] - prox_jacobian(self.model, low, self.V, self.y)
        stiff = apply(inverse(self.V), slope.reshape(L, r, -1)).reshape(n, n, N)
        stiff = jnp.einsum("abn,bcn,cdn->nad", jnp.swapaxes(block, 0, 1), stiff, block)
        values, vectors = jnp.linalg.eigh(eye + 0.5 * s * (stiff + jnp.swapaxes(stiff, 1, 2)))
        values = jnp.maximum(values, _MIN_CURVATURE)

        def power(exponent: float) -> jax.Array:
            return jnp.moveaxis((vectors * values[:, None] ** exponent) @ jnp.swapaxes(vectors, 1, 2), 0, -1)

        centre = -s * matvec(power(-1.0), self.pull(self.h - low))
        return _Weight(centre, power(-0.5), power(0.5), -0.5 * jnp.sum(jnp.log(values), 1))


class _Weight(NamedTuple):
    """A Gaussian weight of the standard normals: xi = c + R eta with eta standard normal."""

    centre: jax.Array  # c, (n, N)
    root: jax.Array  # R, symmetric, (n, n, N)
    inverse_root: jax.Array  # (n, n, N)
    log_det: jax.Array  # log det R, (N,)

    def normals(self, eta: jax.Array) -> jax.Array:
        """Return xi at eta (n, ..., N)."""
        n, N = self.centre.shape
        axes = (1,) * (eta.ndim - 2)
        return self.centre.reshape(n, *axes, N) + matvec(self.root.reshape(n, n, *axes, N), eta)

    def along(self, u: jax.Array, xi: jax.Array) -> jax.Array:
        """Return the coordinate (..., N) of standard normals (n, ..., N) along directions u of eta."""
        n, N = self.centre.shape
        axes = (1,) * (xi.ndim - 2)
        return total(matvec(self.inverse_root, u).reshape(n, *axes, N) * (xi - self.centre.reshape(n, *axes, N)))

    def pulled(self, force: jax.Array) -> jax.Array:
        """Turn a force (n, N) on xi into a force on eta."""
        return matvec(self.root, force)


class RoughJump(NamedTuple):
    """Rough place of the jump or step next to N fields, n = L r."""

    low: jax.Array  # minimisers at the fields, (L, r, N)
    direction: jax.Array  # direction of a line through the centre of the weight, as in `JumpSearch`
    jump: jax.Array  # rough place of a jump or a step on this line, zero without one, (N,)
    sides: tuple[jax.Array, jax.Array]  # minimisers on both sides of it, (L, r, N)
    breaks: jax.Array  # whether there are two minima, (N,)


def find_rough_jump(
    model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array
) -> RoughJump:
    """Find the rough place of the jump or step next to each field.

    Args:
        V: response, (L, r, r).
        spread: Cholesky root C of q1 - q0, (L, r, r).
        h, y: student and teacher fields, (L, r, N) and (L, t, N).
        s: Parisi parameter.
    """
    law = _ClusterLaw(model, V, spread, h, y)
    origin = law.search(jnp.zeros((h.shape[0] * h.shape[1], h.shape[2]), h.dtype))
    return RoughJump(origin.z, *_rough_jump(law, law.weight_of(origin.z, s), origin))


class Smooth(NamedTuple):
    """Search results at fields without a jump within reach; n = L r."""

    low: jax.Array  # minimisers at the fields, (L, r, N)
    normals: jax.Array  # standard normals xi of the nodes, (n, K N)
    log_weight: jax.Array  # logarithms of the weights, (K, N)
    z: jax.Array  # minimisers at the nodes, (L, r, K N)


def find_smooth(
    model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array, rough_jump: RoughJump
) -> Smooth:
    """Replace `find` at fields without a jump within reach: the nodes are a product of Gauss-Hermite rules."""
    z = jnp.tile(rough_jump.low, _SMOOTH ** (h.shape[0] * h.shape[1]))
    return _smooth(_ClusterLaw(model, V, spread, h, y), rough_jump.low, z, s)


def _smooth(law: _ClusterLaw, low: jax.Array, z: jax.Array, s: jax.Array) -> Smooth:
    """Return the smooth rule, given minimisers close to `low` at the fields and close to z at the nodes."""
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
    """Search results at fields with a jump, without derivatives; J places across, n = L r.

    Around a field the weight of the lower sheet is nearly the Gaussian c + R eta. The nodes are placed in eta.
    """

    low: jax.Array  # minimisers at the fields, (L, r, N)
    weight: _Weight
    direction: jax.Array  # unit vectors of the lines in eta, (n, N)
    jump: jax.Array  # place along the line where the two minima have equal energy, or of a step, (J, N)
    place: jax.Array  # student fields at the jump minus h, (L, r, J N)
    sides: tuple[jax.Array, jax.Array]  # the two minimisers at the jump, (L, r, J N)
    breaks: jax.Array  # whether there is a jump, (J, N)
    other: jax.Array  # place along the line of the centre of the other sheet's weight, (J, N)
    z: jax.Array  # minimisers at the nodes, (L, r, K J N)

    def normals(self, x: jax.Array) -> jax.Array:
        """Return the standard normals (n, K J N) at places x (K, J, N) along the lines."""
        n = len(self.direction)
        axis = jnp.asarray(reference_axis(n), x.dtype)[:, None]
        v = jnp.where(total(self.direction * axis) < 0, -self.direction, self.direction)
        across = [vectors_across(v, p[:, None]) for p in hermite_grid(_ACROSS, n - 1)[0].T]
        xi = self.weight.normals(jnp.stack(across, 1)[:, None] + x * self.direction[:, None, None])
        return xi.reshape(n, -1)

    @property
    def log_weight(self) -> jax.Array:
        """Logarithms of the weights of the places across, (J, N)."""
        places, shares = hermite_grid(_ACROSS, len(self.direction) - 1)
        size = 0.5 * len(places) * np.log(2 * np.pi) + 0.5 * np.sum(places**2, 0) + np.log(shares)
        return jnp.asarray(size, self.jump.dtype)[:, None] + self.weight.log_det

    @property
    def along(self) -> jax.Array:
        """Direction of the lines in the standard normals xi, (n, N)."""
        return matvec(self.weight.root, self.direction)


def find(
    model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array, rough_jump: RoughJump
) -> JumpSearch:
    """Find the jumps on the lines through each field and beside it, and the minimisers at all nodes.

    The arguments are those of `find_rough_jump`, and its result.
    """
    law, J = _ClusterLaw(model, V, spread, h, y), _ACROSS ** (h.shape[0] * h.shape[1] - 1)
    left, right = (jnp.where(rough_jump.breaks, side, rough_jump.low) for side in rough_jump.sides)
    left = jnp.where(jnp.abs(rough_jump.jump) <= 2 * _REACH, left, rough_jump.low)
    z = jnp.concatenate([jnp.tile(side, J * _ALONG) for side in (left, right)], -1)
    jump, breaks = (jnp.tile(a, (J, 1)) for a in (rough_jump.jump, rough_jump.breaks))
    sides = jnp.tile(rough_jump.sides[0], J), jnp.tile(rough_jump.sides[1], J)
    weight = law.weight_of(rough_jump.low, s)
    guess = JumpSearch(
        rough_jump.low, weight, rough_jump.direction, jump, sides[0], sides, breaks, jnp.zeros_like(jump), z
    )
    return _refined_jumps(law, guess, s)


def by_field(results: Any, N: int) -> Any:
    """Reshape results at N fields so that all last axes are (N,); nodes around a field get an axis before it."""
    return jax.tree.map(lambda a: a.reshape(*a.shape[:-1], -1, N), results)


def update_minima(
    model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array, result: JumpSearch | Smooth
) -> JumpSearch | Smooth:
    """Update results of `find` or `find_smooth` from other order parameters to these, by following the minima."""
    law = _ClusterLaw(model, V, spread, h, y)
    if isinstance(result, Smooth):
        return _smooth(law, result.low, result.z, s)
    low = law.follow(result.low, jnp.zeros_like(result.direction))[0]
    weight = law.weight_of(low, s)
    # In the fields a jump stays about where it is, while the nodes move with the weight.
    xi = apply(inverse(spread), result.place).reshape(len(result.direction), *result.jump.shape)
    jump = jnp.clip(weight.along(result.direction, xi), -_MAX_DISTANCE, _MAX_DISTANCE)
    guess = result._replace(low=low, weight=weight, jump=jnp.where(result.jump == 0, 0.0, jump))
    return _refined_jumps(law, guess, s)


class _Pair(NamedTuple):
    """Two minima at one place; leaves may lead with an axis of places."""

    gap: jax.Array  # energy of b above that of a, (N,); infinite where there is only one minimum
    place: jax.Array  # standard normals, (n, N)
    a: jax.Array  # (L, r, N)
    b: jax.Array  # (L, r, N)


def _rough_jump(
    law: _ClusterLaw, weight: _Weight, origin: Prox
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """Find the line, at a field or beside it, on which the energies of the two lowest minima are closest.

    Where there is a single minimum, find a line on which it makes a step.

    Returns:
        The direction of the line in eta, (n, N); the rough place on it where the energies are equal, or of the step,
        (N,); the minimiser of the sheet of the field, which is on the left, and the other one; whether there are two
        minima, (N,).
    """
    direction = law.pull(origin.other - origin.z)
    axis = law.pull(well_axis(law.model, law.y, law.h.shape[1], 12))
    u, _ = _unit(weight.pulled(jnp.where(jnp.isfinite(origin.gap), direction, axis)))
    pairs, step = _probe(law, weight, u)
    candidates = jax.tree.map(
        lambda p, q: jnp.concatenate([p[None], q]), _Pair(origin.gap, jnp.zeros_like(u), origin.z, origin.other), pairs
    )
    breaks = jnp.any(jnp.isfinite(candidates.gap), 0)
    closest = _Pair(*(pick(p, jnp.argmin(candidates.gap, 0)) for p in candidates))
    closest = closest._replace(b=law.follow(closest.b, closest.place)[0])
    gap, place, a, b = either(breaks, closest, step)
    is_split = breaks | (gap == 0)
    push, size = _unit(weight.pulled(law.pull(b - a)))
    u = jnp.where(is_split, push, u)
    x = weight.along(u, place) + gap / jnp.where(size > 0, size, 1.0)
    is_turned = is_split & (weight.along(u, jnp.zeros_like(u)) > x)
    u, x = jnp.where(is_turned, -u, u), jnp.where(is_turned, -x, x)
    pair = jnp.where(is_turned, b, a), jnp.where(is_turned, a, b)
    return u, jnp.where(is_split, jnp.clip(x, -_MAX_DISTANCE, _MAX_DISTANCE), 0.0), pair, breaks


def _probe(law: _ClusterLaw, weight: _Weight, u: jax.Array) -> tuple[_Pair, _Pair]:
    """Search for minima along lines u through the centre of the weight, at more places where the lowest changes most.

    Returns:
        The two lowest minima at all places (there may be two only next to the jump). The lowest minima on both sides of
        the steepest change; their gap is zero if this is a step, and infinite otherwise.
    """

    def at(x: jax.Array) -> _Pair:
        """Return the minima at places (P, N) along the lines."""
        xi = weight.normals(x * u[:, None]).reshape(len(u), -1)
        prox = law.search(xi)
        arrays = (a.reshape(*a.shape[:-1], *x.shape) for a in (prox.gap, xi, prox.z, prox.other))
        return _Pair(*(jnp.moveaxis(a, -2, 0) for a in arrays))

    def change(a: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(jnp.diff(a, axis=0)), (1, 2))

    def steepest(x: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the ends (2, ..., N) of the section with the largest change."""
        widest = jnp.argmax(change(z), 0)

        def ends(a: jax.Array) -> jax.Array:
            return jnp.stack([pick(a, widest), pick(a, widest + 1)])

        return ends(x), ends(z)

    probes = jnp.broadcast_to(jnp.asarray(_PROBES, u.dtype)[:, None], (len(_PROBES), u.shape[-1]))
    coarse = at(probes)
    section = steepest(probes, coarse.a)

    def halve(ends: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], _Pair]:
        (low, high), (a, b) = ends
        middle = 0.5 * (low + high)
        centre = at(middle[None])
        return steepest(jnp.stack([low, middle, high]), jnp.stack([a, centre.a[0], b])), centre

    (x, z), refined = lax.scan(halve, section, length=_HALVINGS)
    pairs = jax.tree.map(lambda a, b: jnp.concatenate([a, b[:, 0]]), coarse, refined)
    is_step = change(z)[0] > _STEP * change(section[1])[0]
    return pairs, _Pair(jnp.where(is_step, 0.0, jnp.inf), weight.normals(jnp.mean(x, 0) * u), z[0], z[1])


def _refined_jumps(law: _ClusterLaw, guess: JumpSearch, s: jax.Array) -> JumpSearch:
    """Return `guess` with the jump on each of the lines, found by Newton's method, and the minimisers at the nodes."""
    J, N = guess.jump.shape

    def differ(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jnp.max(jnp.abs(a - b), (0, 1)) > 1e-2).reshape(J, N)

    def rate(a: jax.Array, b: jax.Array) -> jax.Array:
        """Return how fast the energy of b's sheet falls below that of a's along the lines, (J, N)."""
        return total(jnp.tile(guess.along, J) * law.pull(b - a)).reshape(J, N)

    def follow_sides(x: jax.Array, sides: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return both minimisers at x, and their energies."""
        xi = guess.normals(x[None])
        minimisers, energy = law.follow(jnp.concatenate(sides, -1), jnp.tile(xi, 2))
        return jnp.split(minimisers, 2, -1), jnp.split(energy, 2)

    def refine(_: int, state: tuple) -> tuple:
        x, *sides = state
        (a, b), (low_energy, high_energy) = follow_sides(x, sides)
        slope, rise = rate(a, b), (high_energy - low_energy).reshape(J, N)
        root = x + rise / jnp.where(slope > 0, slope, 1.0)
        return jnp.where((slope > 0) & differ(a, b), jnp.clip(root, -_MAX_DISTANCE, _MAX_DISTANCE), x), a, b

    x, *sides = lax.fori_loop(0, _ROOT_STEPS, refine, (guess.jump, *guess.sides))
    (a, b), _ = follow_sides(x, sides)
    slope = rate(a, b)
    breaks = guess.breaks & differ(a, b) & (slope > 0)
    place = apply(law.spread, guess.normals(x[None]).reshape(a.shape))
    guess = guess._replace(jump=x, place=place, sides=(a, b), breaks=breaks, other=jnp.where(breaks, s * slope, 0.0))
    return guess._replace(z=law.follow(guess.z, guess.normals(_nodes_around(guess, x)[0]))[0])


def _unit(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return unit vectors (n, N) and lengths (N,)."""
    size = jnp.sqrt(total(v**2))
    return v / jnp.where(size > 0, size, 1.0), size


def points(
    model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, result: JumpSearch | Smooth
) -> Cluster:
    """Return the nodes of the inner average, with the derivatives of their motion with the state."""
    law = _ClusterLaw(model, V, spread, h, y)
    if isinstance(result, Smooth):
        xi, log_weight = result.normals, result.log_weight
    else:
        x, weight = _nodes_around(result, _moving_jump(law, result))
        xi = result.normals(x)
        log_density = -0.5 * total(xi**2).reshape(x.shape) - 0.5 * len(xi) * np.log(2 * np.pi)
        log_weight = (jnp.log(weight) + result.log_weight + log_density).reshape(-1, h.shape[-1])
    fields, teacher = law.at(xi)
    return Cluster(
        xi.reshape(*h.shape[:2], -1), log_weight, with_implicit_derivative(result.z, model, fields, V, teacher)
    )


def _moving_jump(law: _ClusterLaw, result: JumpSearch) -> jax.Array:
    """Return the places of the jumps, (J, N), with derivatives that keep the energies of the two sides equal."""
    fields, teacher = law.at(result.normals(result.jump[None]))
    low, high = (moreau(law.model, z, fields, law.V, teacher) for z in result.sides)
    pull = law.pull(result.sides[1] - result.sides[0])
    slope = total(jnp.tile(result.along, len(result.jump)) * pull)
    rise = high - low
    move = (rise - lax.stop_gradient(rise)) / lax.stop_gradient(jnp.where(slope > 0, slope, jnp.inf))
    return result.jump + jnp.where(result.breaks, move.reshape(result.jump.shape), 0.0)


def _nodes_around(result: JumpSearch, jump: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return places along the lines, (K, J, N), half of them on each side of the jump, and their weights."""
    t, w = (jnp.asarray(a, jump.dtype)[:, None, None] for a in legendre(_ALONG))
    sides = (
        (jnp.minimum(0.0, jump) - _REACH, jnp.minimum(jump, _REACH)),
        (jnp.maximum(jump, result.other - _REACH), jnp.maximum(jump, result.other) + _REACH),
    )
    return (
        jnp.concatenate([lo + (hi - lo) * t for lo, hi in sides]),
        jnp.concatenate([(hi - lo) * w for lo, hi in sides]),
    )
