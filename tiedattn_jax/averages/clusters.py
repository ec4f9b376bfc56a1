"""Averages within a cluster of minima: the inner average of one step of replica symmetry breaking.

Around a student field h the minima of one cluster see fields h + C xi, with C C^T = q1 - q0, and weigh them with
exp(-s E), E the Moreau envelope. The envelope is smooth on the two sides of a jump of the proximal operator, and so the
average is broken there: Gauss-Legendre nodes on either side along the line that crosses the jump, Gauss-Hermite nodes
across it. The place of the jump moves with the state; derivatives contain that.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from ..linalg import apply, inverse, total
from ..model import Model
from .lines import reference_axis, vectors_across
from .prox import attach, descend, moreau, prox_jacobian, search, well_axis

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


class Smooth(NamedTuple):
    """What has to be looked for at fields without a jump within reach."""

    normals: jax.Array  # (n, K N)
    log_weight: jax.Array  # (K, N)
    z: jax.Array  # minimisers at the nodes, (L, r, K N)


def find_smooth(model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array) -> Smooth:
    """`find` where there is no jump within reach: a product of Gauss-Hermite rules."""
    L, r, _ = h.shape
    n = L * r
    low = search(model, h, V, y).z
    centre, values, vectors = _quadratic(model, V, spread, h, y, s, low)
    root = jnp.moveaxis(vectors / jnp.sqrt(values)[:, None], 0, -1)
    places, weights = _places(n + 1, _SMOOTH)
    eta = jnp.asarray(places.T, h.dtype)[..., None]
    xi = centre[:, None] + total(root[:, k, None] * eta[k] for k in range(n))
    size = np.log(weights) + 0.5 * np.sum(places**2, 1)
    log_weight = jnp.asarray(size, h.dtype)[:, None] - 0.5 * jnp.sum(jnp.log(values), 1) - 0.5 * total(xi**2)
    xi = xi.reshape(n, -1)
    count = len(weights)
    fields = jnp.tile(h, count) + apply(spread, xi.reshape(L, r, -1))
    z = descend(model, jnp.tile(low, count), fields, V, jnp.tile(y, count), 1e-9, 2 * _STEPS)[0]
    return Smooth(xi, log_weight, z)


def _quadratic(
    model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weight of the sheet of the minimisers `low` to second order: centre (n, N), eigenvalues and -vectors."""
    L, r, N = h.shape
    n = L * r
    precision, block = inverse(V), jax.scipy.linalg.block_diag(*spread)[..., None]
    stiff = apply(precision, (jnp.eye(n, dtype=h.dtype)[..., None] - prox_jacobian(model, low, V, y)).reshape(L, r, -1))
    stiff = jnp.einsum("abn,bcn,cdn->nad", jnp.swapaxes(block, 0, 1), stiff.reshape(n, n, N), block)
    values, vectors = jnp.linalg.eigh(jnp.eye(n, dtype=h.dtype) + 0.5 * s * (stiff + jnp.swapaxes(stiff, 1, 2)))
    values = jnp.maximum(values, _LEAST)
    inverse_weight = jnp.moveaxis((vectors / values[:, None]) @ jnp.swapaxes(vectors, 1, 2), 0, -1)
    pull = apply(jnp.swapaxes(spread, -1, -2), apply(precision, h - low)).reshape(n, -1)
    return -s * _times(inverse_weight, pull), values, vectors


class Found(NamedTuple):
    """What has to be looked for, and has no derivative by itself; J places across, n = L r.

    Around a field the weight of the lower sheet is nearly the Gaussian c + R eta, and the nodes lie in eta.
    """

    centre: jax.Array  # c, (n, N)
    root: jax.Array  # R, (n, n, N)
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
        eta = self.across[:, None] + x * self.direction[:, None, None]
        xi = self.centre[:, None, None] + total(self.root[:, k, None, None] * eta[k] for k in range(len(eta)))
        return xi.reshape(len(xi), -1)


def find(model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, s: jax.Array) -> Found:
    """The jump next to each field, and the minimisers at all nodes around it.

    Args:
        V: response, (L, r, r).
        spread: Cholesky root C of q1 - q0, (L, r, r).
        h, y: student and teacher fields, (L, r, N) and (L, t, N).
        s: Parisi parameter.
    """
    L, r, N = h.shape
    n, dtype = L * r, h.dtype
    precision = inverse(V)

    def pull(z: jax.Array) -> jax.Array:
        """C^T V^{-1} z, (n, N)."""
        return apply(jnp.swapaxes(spread, -1, -2), apply(precision, z)).reshape(n, -1)

    def at(xi: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Fields at standard normals (n, K N), and the teacher's."""
        count = xi.shape[-1] // N
        return jnp.tile(h, count) + apply(spread, xi.reshape(L, r, -1)), jnp.tile(y, count)

    def follow(z: jax.Array, xi: jax.Array, steps: int = _STEPS) -> tuple[jax.Array, jax.Array]:
        """The minimiser next to z at standard normals xi, and its energy."""
        fields, teacher = at(xi)
        return descend(model, z, fields, V, teacher, 1e-9, steps)[:2]

    def probe(xi: jax.Array) -> tuple[jax.Array, ...]:
        """Energy gap of the two lowest minima at standard normals xi, xi, and these minima."""
        fields, teacher = at(xi)
        found = search(model, fields, V, teacher)
        return found.gap, xi, found.z, found.other

    origin = probe(jnp.zeros((n, N), dtype))
    low, has = origin[2], jnp.isfinite(origin[0])
    centre, values, vectors = _quadratic(model, V, spread, h, y, s, low)
    root = jnp.moveaxis(vectors / jnp.sqrt(values)[:, None], 0, -1)
    transposed = jnp.swapaxes(root, 0, 1)

    # The jump is where the two lowest minima are closest, at the field itself or beside it.
    u, _ = _unit(_times(transposed, jnp.where(has, pull(origin[3] - low), pull(well_axis(model, y, r, 12)))))
    probes = [origin, *(probe(centre + x * _times(root, u)) for x in _PROBES)]
    gaps = jnp.stack([p[0] for p in probes])
    best, breaks = jnp.argmin(gaps, 0), jnp.any(jnp.isfinite(gaps), 0)
    gap, place, a, b = (jnp.select([best == k for k in range(len(probes))], list(p)) for p in zip(*probes, strict=True))
    b = follow(b, place)[0]
    push, size = _unit(_times(transposed, pull(b - a)))
    u = jnp.where(breaks, push, u)
    inverse_root = jnp.moveaxis(vectors * jnp.sqrt(values)[:, None], 0, -1).swapaxes(0, 1)
    x = total(u * _times(inverse_root, place - centre)) + gap / jnp.where(size > 0, size, 1.0)
    # The sheet of the field itself is the one on the left.
    turned = breaks & (total(u * _times(inverse_root, -centre)) > x)
    u, x = jnp.where(turned, -u, u), jnp.where(turned, -x, x)
    a, b = jnp.where(turned, b, a), jnp.where(turned, a, b)
    x = jnp.where(breaks, jnp.clip(x, -_FAR, _FAR), 0.0)

    places, weights = _places(n)
    axis = jnp.asarray(reference_axis(n), dtype)[:, None]
    v = jnp.where(total(u * axis) < 0, -u, u)
    across = jnp.stack([vectors_across(v, jnp.broadcast_to(p[:, None], (n - 1, N))) for p in places], 1)
    J = len(places)
    normal = 0.5 * (n - 1) * np.log(2 * np.pi) + 0.5 * np.sum(places**2, 1) + np.log(weights)
    log_weight = jnp.asarray(normal, dtype)[:, None] - 0.5 * jnp.sum(jnp.log(values), 1)
    held = Found(centre, root, u, across, log_weight, x, (a, b), breaks, x, a)

    def differ(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jnp.max(jnp.abs(a - b), (0, 1)) > 1e-2).reshape(J, N)

    def rate(a: jax.Array, b: jax.Array) -> jax.Array:
        """How fast the energy of the sheet of b falls below that of a, along the lines, (J, N)."""
        return total(jnp.tile(_times(root, u), J) * pull(b - a)).reshape(J, N)

    def refine(_: int, state: tuple) -> tuple:
        x, a, b = state
        xi = held.normals(x[None])
        (a, low_energy), (b, high_energy) = follow(a, xi), follow(b, xi)
        slope, rise = rate(a, b), (high_energy - low_energy).reshape(J, N)
        moved = x + rise / jnp.where(slope > 0, slope, 1.0)
        return jnp.where((slope > 0) & differ(a, b), jnp.clip(moved, -_FAR, _FAR), x), a, b

    x, a, b = lax.fori_loop(0, _ROOT_STEPS, refine, (jnp.tile(x, (J, 1)), jnp.tile(a, J), jnp.tile(b, J)))
    a, b = (follow(z, held.normals(x[None]))[0] for z in (a, b))
    slope = rate(a, b)
    breaks = breaks & differ(a, b) & (slope > 0)
    held = held._replace(
        jump=jnp.where(breaks, x, 0.0), sides=(a, b), breaks=breaks, other=jnp.where(breaks, s * slope, 0.0)
    )
    near = _nodes(held, held.jump)[0]
    plain = (~breaks | (jnp.abs(x) > 2 * _REACH)).ravel()
    a, b = jnp.where(plain, jnp.tile(low, J), a), jnp.where(~breaks.ravel(), jnp.tile(low, J), b)
    z = follow(jnp.concatenate([jnp.tile(a, _ALONG), jnp.tile(b, _ALONG)], -1), held.normals(near), 2 * _STEPS)[0]
    return held._replace(z=z)


def _unit(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unit vectors (n, N) and lengths."""
    size = jnp.sqrt(total(v**2))
    return v / jnp.where(size > 0, size, 1.0), size


def _times(matrix: jax.Array, v: jax.Array) -> jax.Array:
    """Products of matrices (n, n, N) and vectors (n, N)."""
    return total(matrix[:, k] * v[k] for k in range(len(v)))


def points(model: Model, V: jax.Array, spread: jax.Array, h: jax.Array, y: jax.Array, found: Found | Smooth) -> Cluster:
    """The nodes of the inner average, and how they move with the state."""
    L, r, N = h.shape
    if isinstance(found, Smooth):
        normals, count = found.normals.reshape(L, r, -1), len(found.log_weight)
        z = attach(found.z, model, jnp.tile(h, count) + apply(spread, normals), V, jnp.tile(y, count))
        return Cluster(normals, found.log_weight, z)
    J = found.jump.shape[0]
    held = lax.stop_gradient(found.jump)
    xi = found.normals(held[None]).reshape(L, r, -1)
    at = jnp.tile(h, J) + apply(spread, xi)
    low, high = (moreau(model, z, at, V, jnp.tile(y, J)) for z in found.sides)
    step = apply(spread, jnp.tile(_times(found.root, found.direction), J).reshape(L, r, -1))
    slope = jnp.sum(step * apply(inverse(V), found.sides[1] - found.sides[0]), (0, 1))
    rise = high - low
    move = (rise - lax.stop_gradient(rise)) / lax.stop_gradient(jnp.where(slope > 0, slope, jnp.inf))
    jump = held + jnp.where(found.breaks, move.reshape(J, N), 0.0)
    x, weight = _nodes(found, jump)
    xi = found.normals(x)
    K = x.shape[0] * J
    log_weight = (
        jnp.log(weight) + found.log_weight - 0.5 * total(xi**2).reshape(x.shape) - 0.5 * xi.shape[0] * np.log(2 * np.pi)
    )
    normals = xi.reshape(L, r, -1)
    z = attach(found.z, model, jnp.tile(h, K) + apply(spread, normals), V, jnp.tile(y, K))
    return Cluster(normals, log_weight.reshape(K, N), z)


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
    grid = np.stack(np.meshgrid(*[x] * (n - 1), indexing="ij")).reshape(n - 1, -1).T
    weight = np.stack(np.meshgrid(*[w / w.sum()] * (n - 1), indexing="ij")).prod(0).ravel()
    return grid, weight
