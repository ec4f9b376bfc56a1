"""Averages within a cluster of minima: the inner average of one step of replica symmetry breaking.

Around a student field h the minima of one cluster see fields h + C xi, with C C^T = q1 - q0, and weigh them with
exp(-s E), E the Moreau envelope. The envelope is smooth on the two sides of a jump of the proximal operator, and so the
average is broken there: Gauss-Legendre nodes on either side along the line that crosses the jump, Gauss-Hermite nodes
across it. The place of the jump moves with the state; derivatives contain that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from ..linalg import apply, inverse, total
from ..model import Model
from .lines import vectors_across
from .prox import Prox, attach, descend, moreau, pick, prox_jacobian, reference_axis, search, well_axis

_SMOOTH = 3  # nodes in each direction where there is no jump
_ALONG, _ACROSS = 12, 3  # nodes on each side of the jump, and places in each direction across it
_REACH = 4.5  # standard deviations that the nodes reach beyond the centre of their weight
_FAR = 14.0  # beyond which a jump plays no role
_LEAST = 0.3  # curvature of the weight, relative to that of the Gaussian law, below which it is taken for this
_PROBES = (-4.0, -2.0, 2.0, 4.0)  # places along a line at which a second minimum is looked for
_ROOT_STEPS, _STEPS = 4, 6  # of Newton's method for the place of the jump, and for the minimisers


class Cluster(eqx.Module):
    """Nodes of the inner average at N student fields, K at each.

    Attributes:
        normals: standard normals xi, (L, r, K N).
        log_weight: logarithms of their weights, (K, N).
        z: minimisers of the proximal problem there, (L, r, K N).
    """

    normals: jax.Array
    log_weight: jax.Array
    z: jax.Array


class _Around(NamedTuple):
    """N fields, and those of the minima of their clusters at standard normals around them; n = L r.

    Attributes:
        V: response, (L, r, r).
        spread: Cholesky root C of q1 - q0, (L, r, r).
        h, y: student and teacher fields, (L, r, N) and (L, t, N).
    """

    model: Model
    V: jax.Array
    spread: jax.Array
    h: jax.Array
    y: jax.Array

    def at(self, xi: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Fields at standard normals (n, K N), and the teacher's."""
        count = xi.shape[-1] // self.h.shape[-1]
        shift = apply(self.spread, xi.reshape(*self.h.shape[:2], -1))
        return jnp.tile(self.h, count) + shift, jnp.tile(self.y, count)

    def pull(self, z: jax.Array) -> jax.Array:
        """C^T V^{-1} z, (n, N)."""
        return apply(jnp.swapaxes(self.spread, -1, -2), apply(inverse(self.V), z)).reshape(-1, z.shape[-1])

    def search(self, xi: jax.Array) -> Prox:
        """The global minimisers at standard normals."""
        fields, teacher = self.at(xi)
        return search(self.model, fields, self.V, teacher)

    def follow(self, z: jax.Array, xi: jax.Array, steps: int = _STEPS) -> tuple[jax.Array, jax.Array]:
        """The minimisers next to z at standard normals, and their energies."""
        fields, teacher = self.at(xi)
        return descend(self.model, z, fields, self.V, teacher, 1e-9, steps)[:2]

    def weight_of(self, low: jax.Array, s: jax.Array) -> _Weight:
        """The weight of the sheet of the minimisers `low` to second order."""
        (L, r, N), n = self.h.shape, low.shape[0] * low.shape[1]
        eye, block = jnp.eye(n, dtype=low.dtype), jax.scipy.linalg.block_diag(*self.spread)[..., None]
        slope = eye[..., None] - prox_jacobian(self.model, low, self.V, self.y)
        stiff = apply(inverse(self.V), slope.reshape(L, r, -1)).reshape(n, n, N)
        stiff = jnp.einsum("abn,bcn,cdn->nad", jnp.swapaxes(block, 0, 1), stiff, block)
        values, vectors = jnp.linalg.eigh(eye + 0.5 * s * (stiff + jnp.swapaxes(stiff, 1, 2)))
        values = jnp.maximum(values, _LEAST)
        inverse_weight = jnp.moveaxis((vectors / values[:, None]) @ jnp.swapaxes(vectors, 1, 2), 0, -1)
        root = jnp.moveaxis(vectors / jnp.sqrt(values)[:, None], 0, -1)
        inverse_root = jnp.moveaxis(vectors * jnp.sqrt(values)[:, None], 0, -1).swapaxes(0, 1)
        centre = -s * _times(inverse_weight, self.pull(self.h - low))
        return _Weight(centre, root, inverse_root, -0.5 * jnp.sum(jnp.log(values), 1))


class _Weight(NamedTuple):
    """A Gaussian weight of the standard normals, xi = c + R eta with eta standard normal."""

    centre: jax.Array  # c, (n, N)
    root: jax.Array  # R, (n, n, N)
    inverse_root: jax.Array  # (n, n, N)
    log_det: jax.Array  # log det R, (N,)

    def normals(self, eta: jax.Array) -> jax.Array:
        """xi at eta (n, ..., N)."""
        n, N = self.centre.shape
        axes = (1,) * (eta.ndim - 2)
        root = self.root.reshape(n, n, *axes, N)
        return self.centre.reshape(n, *axes, N) + total(root[:, k] * eta[k] for k in range(n))

    def pulled(self, force: jax.Array) -> jax.Array:
        """A force (n, N) on xi as one on eta: R^T force."""
        return _times(jnp.swapaxes(self.root, 0, 1), force)


class Smooth(NamedTuple):
    """What has to be looked for at fields without a jump within reach."""

    normals: jax.Array  # (n, K N)
    log_weight: jax.Array  # (K, N)
    z: jax.Array  # minimisers at the nodes, (L, r, K N)


def find_smooth(model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array) -> Smooth:
    """`find` where there is no jump within reach: a product of Gauss-Hermite rules."""
    n = h.shape[0] * h.shape[1]
    around, low = _Around(model, V, spread, h, y), search(model, h, V, y).z
    weight = around.weight_of(low, s)
    places, shares = _places(n + 1, _SMOOTH)
    xi = weight.normals(jnp.asarray(places.T, h.dtype)[..., None])
    size = jnp.asarray(np.log(shares) + 0.5 * np.sum(places**2, 1), h.dtype)
    log_weight = size[:, None] + weight.log_det - 0.5 * total(xi**2)
    xi = xi.reshape(n, -1)
    return Smooth(xi, log_weight, around.follow(jnp.tile(low, len(shares)), xi, 2 * _STEPS)[0])


class Found(NamedTuple):
    """What has to be looked for, and has no derivative by itself; J places across, n = L r.

    Around a field the weight of the lower sheet is nearly the Gaussian c + R eta, and the nodes lie in eta.
    """

    weight: _Weight
    direction: jax.Array  # unit vectors of the lines in eta, (n, N)
    across: jax.Array  # places across the lines, (n, J, N)
    log_weight: jax.Array  # of these places, (J, N)
    jump: jax.Array  # where along the line the two minima have equal energy, (J, N)
    sides: tuple[jax.Array, jax.Array]  # the two minimisers there, (L, r, J N)
    breaks: jax.Array  # whether there is a jump, (J, N)
    other: jax.Array  # place of the centre of the weight of the other sheet, (J, N)
    z: jax.Array  # minimisers at the nodes, (L, r, K J N)

    def normals(self, x: jax.Array) -> jax.Array:
        """Standard normals at places x along the lines, (K, J, N), as (n, K J N)."""
        xi = self.weight.normals(self.across[:, None] + x * self.direction[:, None, None])
        return xi.reshape(len(xi), -1)

    @property
    def along(self) -> jax.Array:
        """The direction of the lines in the standard normals, (n, N)."""
        return _times(self.weight.root, self.direction)


def find(model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array) -> Found:
    """The jump next to each field, and the minimisers at all nodes around it.

    Args:
        V: response, (L, r, r).
        spread: Cholesky root C of q1 - q0, (L, r, r).
        h, y: student and teacher fields, (L, r, N) and (L, t, N).
        s: Parisi parameter.
    """
    n, N = h.shape[0] * h.shape[1], h.shape[2]
    around = _Around(model, V, spread, h, y)
    origin = around.search(jnp.zeros((n, N), h.dtype))
    weight = around.weight_of(origin.z, s)
    u, x, pair, breaks = _jump_beside(around, weight, origin)

    places, shares = _places(n)
    axis = jnp.asarray(reference_axis(n), h.dtype)[:, None]
    v = jnp.where(total(u * axis) < 0, -u, u)
    across = jnp.stack([vectors_across(v, jnp.broadcast_to(p[:, None], (n - 1, N))) for p in places], 1)
    size = jnp.asarray(0.5 * (n - 1) * np.log(2 * np.pi) + 0.5 * np.sum(places**2, 1) + np.log(shares), h.dtype)
    held = Found(weight, u, across, size[:, None] + weight.log_det, x, pair, breaks, x, origin.z)

    held, (a, b), x = _settled_jumps(around, held, s)
    J = len(places)
    low, breaks = jnp.tile(origin.z, J), held.breaks.ravel()
    a = jnp.where(breaks & (jnp.abs(x.ravel()) <= 2 * _REACH), a, low)
    starts = jnp.concatenate([jnp.tile(a, _ALONG), jnp.tile(jnp.where(breaks, b, low), _ALONG)], -1)
    return held._replace(z=around.follow(starts, held.normals(_nodes(held, held.jump)[0]), 2 * _STEPS)[0])


def _jump_beside(
    around: _Around, weight: _Weight, origin: Prox
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """The line on which the two lowest minima are closest, at a field itself or beside it.

    Returns:
        Its direction in eta, (n, N); about where on it their energies are equal, (N,); the minimiser of the sheet of the
        field, which is on the left, and the other one; whether there are two, (N,).
    """
    direct = around.pull(origin.other - origin.z)
    axis = around.pull(well_axis(around.model, around.y, around.h.shape[1], 12))
    u, _ = _unit(weight.pulled(jnp.where(jnp.isfinite(origin.gap), direct, axis)))
    probes = weight.normals(jnp.asarray(_PROBES, u.dtype)[:, None] * u[:, None]).reshape(len(u), -1)
    # The field itself and the probes, one behind the other on the last axis.
    seen = jax.tree.map(lambda *a: jnp.concatenate(a, -1), origin, around.search(probes))
    places = jnp.concatenate([jnp.zeros_like(u), probes], -1)
    columns = (p.reshape(*p.shape[:-1], -1, u.shape[-1]) for p in (seen.gap, places, seen.z, seen.other))
    gap, *others = (jnp.moveaxis(p, -2, 0) for p in columns)
    best, breaks = jnp.argmin(gap, 0), jnp.any(jnp.isfinite(gap), 0)
    gap, place, a, b = (pick(p, best) for p in (gap, *others))
    b = around.follow(b, place)[0]
    push, size = _unit(weight.pulled(around.pull(b - a)))
    u = jnp.where(breaks, push, u)
    x = total(u * _times(weight.inverse_root, place - weight.centre)) + gap / jnp.where(size > 0, size, 1.0)
    turned = breaks & (total(u * _times(weight.inverse_root, -weight.centre)) > x)
    u, x = jnp.where(turned, -u, u), jnp.where(turned, -x, x)
    pair = jnp.where(turned, b, a), jnp.where(turned, a, b)
    return u, jnp.where(breaks, jnp.clip(x, -_FAR, _FAR), 0.0), pair, breaks


def _settled_jumps(around: _Around, held: Found, s: jax.Array) -> tuple[Found, tuple[jax.Array, jax.Array], jax.Array]:
    """`held` with the jump on each of the lines, by Newton's method; both minimisers and the place where it ended."""
    J, N = held.log_weight.shape

    def differ(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jnp.max(jnp.abs(a - b), (0, 1)) > 1e-2).reshape(J, N)

    def rate(a: jax.Array, b: jax.Array) -> jax.Array:
        """How fast the energy of the sheet of b falls below that of a, along the lines, (J, N)."""
        return total(jnp.tile(held.along, J) * around.pull(b - a)).reshape(J, N)

    def followed(x: jax.Array, sides: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Both minimisers at x, and their energies."""
        xi = held.normals(x[None])
        both, energy = around.follow(jnp.concatenate(sides, -1), jnp.tile(xi, 2))
        return jnp.split(both, 2, -1), jnp.split(energy, 2)

    def refine(_: int, state: tuple) -> tuple:
        x, *sides = state
        (a, b), (low_energy, high_energy) = followed(x, sides)
        slope, rise = rate(a, b), (high_energy - low_energy).reshape(J, N)
        moved = x + rise / jnp.where(slope > 0, slope, 1.0)
        return jnp.where((slope > 0) & differ(a, b), jnp.clip(moved, -_FAR, _FAR), x), a, b

    x, *sides = lax.fori_loop(
        0, _ROOT_STEPS, refine, (jnp.tile(held.jump, (J, 1)), *(jnp.tile(z, J) for z in held.sides))
    )
    (a, b), _ = followed(x, sides)
    slope = rate(a, b)
    breaks = held.breaks & differ(a, b) & (slope > 0)
    jump, other = jnp.where(breaks, x, 0.0), jnp.where(breaks, s * slope, 0.0)
    return held._replace(jump=jump, sides=(a, b), breaks=breaks, other=other), (a, b), x


def _unit(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unit vectors (n, N) and lengths."""
    size = jnp.sqrt(total(v**2))
    return v / jnp.where(size > 0, size, 1.0), size


def _times(matrix: jax.Array, v: jax.Array) -> jax.Array:
    """Products of matrices (n, n, N) and vectors (n, N)."""
    return total(matrix[:, k] * v[k] for k in range(len(v)))


def points(model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, found: Found | Smooth) -> Cluster:
    """The nodes of the inner average, and how they move with the state."""
    around = _Around(model, V, spread, h, y)
    if isinstance(found, Smooth):
        xi, log_weight = found.normals, found.log_weight
    else:
        x, weight = _nodes(found, _moving_jump(around, found))
        xi = found.normals(x)
        log_density = -0.5 * total(xi**2).reshape(x.shape) - 0.5 * len(xi) * np.log(2 * np.pi)
        log_weight = (jnp.log(weight) + found.log_weight + log_density).reshape(-1, h.shape[-1])
    fields, teacher = around.at(xi)
    return Cluster(xi.reshape(*h.shape[:2], -1), log_weight, attach(found.z, model, fields, V, teacher))


def _moving_jump(around: _Around, found: Found) -> jax.Array:
    """Where the jumps are, (J, N), with their derivatives: the energies of the two sides stay equal."""
    fields, teacher = around.at(found.normals(found.jump[None]))
    low, high = (moreau(around.model, z, fields, around.V, teacher) for z in found.sides)
    pull = around.pull(found.sides[1] - found.sides[0])
    slope = total(jnp.tile(found.along, len(found.jump)) * pull)
    rise = high - low
    move = (rise - lax.stop_gradient(rise)) / lax.stop_gradient(jnp.where(slope > 0, slope, jnp.inf))
    return found.jump + jnp.where(found.breaks, move.reshape(found.jump.shape), 0.0)


def _nodes(found: Found, jump: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places along the lines, (K, J, N), half of them on each side of the jump, and their weights."""
    t, w = (jnp.asarray(a, jump.dtype)[:, None, None] for a in _legendre())
    sides = (
        (jnp.minimum(0.0, jump) - _REACH, jnp.minimum(jump, _REACH)),
        (jnp.maximum(jump, found.other - _REACH), jnp.maximum(jump, found.other) + _REACH),
    )
    return (
        jnp.concatenate([lo + (hi - lo) * t for lo, hi in sides]),
        jnp.concatenate([(hi - lo) * w for lo, hi in sides]),
    )


def _legendre() -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.legendre.leggauss(_ALONG)
    return 0.5 * (x + 1), 0.5 * w


def _places(n: int, order: int = _ACROSS) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Hermite places across a line, (J, n - 1), and their weights."""
    x, w = special.roots_hermitenorm(order)
    grid = list(itertools.product(x, repeat=n - 1))
    weight = list(itertools.product(w / w.sum(), repeat=n - 1))
    return np.array(grid), np.prod(weight, 1)
