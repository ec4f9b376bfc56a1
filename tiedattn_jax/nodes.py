"""Averaging rules: where the Gaussian average of the Moreau envelope is evaluated.

A rule is a set of nodes, in replicates whose scatter is the error bar. It is a pytree whose arrays lead with the
replicate axis; `jax.lax.map` over it hands out one replicate at a time. A rule answers two questions: into which blocks
its nodes fall (memory is bounded by a block, not by the number of nodes), and, for one block at one state, the
`Points`: standard normal fields, weights and proximal minimisers. All of `Points` may depend on the state, and what a
fixed point differentiates is that dependence.

The minimiser jumps on a surface in the space of the fields, and an average that is differentiated node by node misses
what that surface contributes when it moves. For frozen `Nodes` the derivative is made whole in two steps. The overlaps
q, theta and m enter only the law of the fields, so the fields are held and their *weights* carry the derivative (the
score function): no minimiser moves, no jump matters. V and the numbers of the model do move the surface: nodes close to
it carry a second point beyond the jump and share their weight with it, smoothly in the energy gap.
"""

from __future__ import annotations

import abc
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special, stats

from .overlaps import Overlaps, residual_covariance
from .prox import moreau, prox

if TYPE_CHECKING:
    from .model import Model

DEFAULT_NODES = 2**16
DEFAULT_REPLICATES = 4
DEFAULT_BLOCK = 2**15


class Points(eqx.Module):
    """One block of an average.

    Attributes:
        student: standard normal fields of the student given the teacher, (L, r, N).
        teacher: standard normal fields of the teacher, (L, t, N).
        weight: weights, (N,).
        z: proximal minimisers, (L, r, N).
        converged: whether each proximal solve met its tolerance, (N,).
        gap: energy of the next minimum above the global one, (N,), infinite where there is none.
    """

    student: jax.Array
    teacher: jax.Array
    weight: jax.Array
    z: jax.Array
    converged: jax.Array
    gap: jax.Array


def fields(model: Model, x: Overlaps, student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fields h (L, r, N) and y (L, t, N) of standard normals: first the teacher's, then the student's given it.

    ``y = rho^{1/2} v`` and ``h = m + theta rho^{-1} y + (q - theta rho^{-1} theta^T)^{1/2} eta``, Cholesky roots. The
    target attention of a node is then the same for every state.
    """
    root = jnp.linalg.cholesky(model.rho)
    y = _mix(root, teacher)
    slope, spread = _conditional(model, x)
    return x.m[..., None] + _mix(slope, y) + _mix(spread, student), y


def _conditional(model: Model, x: Overlaps) -> tuple[jax.Array, jax.Array]:
    """Regression theta rho^{-1} of h on y, (L, r, t), and Cholesky root of what it leaves, (L, r, r)."""
    slope = jnp.swapaxes(jnp.linalg.solve(model.rho, jnp.swapaxes(x.theta, -1, -2)), -1, -2)
    return slope, jnp.linalg.cholesky(residual_covariance(model, x))


def _whiten(model: Model, x: Overlaps, h: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Standard normals of given student fields, and the log density of these fields given the teacher's, (N,)."""
    slope, spread = _conditional(model, x)
    student = _mix(jnp.linalg.inv(spread), h - x.m[..., None] - _mix(slope, y))
    scale = jnp.sum(jnp.log(jnp.diagonal(spread, axis1=1, axis2=2)))
    return student, -0.5 * jnp.sum(student**2, (0, 1)) - scale


def _mix(matrix: jax.Array, v: jax.Array) -> jax.Array:
    """(L, a, b), (L, b, N) -> (L, a, N), entry by entry: batched products of tiny matrices are slow."""
    rows, columns = matrix.shape[1:]
    return jnp.stack([sum(matrix[:, i, j, None] * v[:, j] for j in range(columns)) for i in range(rows)], 1)


def _bandwidth(size: int) -> float:
    """Width over which `size` nodes spread a jump, in standard deviations of a student field: .1 for 2^12, .05 for 2^16.

    Its bias, of second order in the width, then falls with the number of nodes as fast as their error does.
    """
    return 0.8 * size**-0.25


def _beyond(gap: jax.Array, width: jax.Array) -> jax.Array:
    """Share of a node that lies beyond the jump: from one half where two minima have equal energy to zero at `width`.

    The average is then a smooth function of the state although every minimiser jumps, and its derivative contains the
    boundary term of the jump, which the derivatives at single nodes do not. The kernel is symmetric about the jump: its bias is of
    second order in the width.
    """
    u = jnp.clip(gap / width, 0.0, 1.0)
    return 0.5 - 0.75 * u + 0.25 * u**3


class Rule(eqx.Module):
    """What an averaging rule provides."""

    @property
    @abc.abstractmethod
    def replicates(self) -> int:
        """Number of independent replicates."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Nodes in a replicate."""

    @abc.abstractmethod
    def coarse(self) -> Rule:
        """One cheap replicate of the same rule, to come near a fixed point with; its arrays have no replicate axis."""

    @abc.abstractmethod
    def blocks(self) -> Any:
        """For one replicate: a pytree whose arrays lead with the block axis."""

    @abc.abstractmethod
    def quadrature(self, model: Model, x: Overlaps, block: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For one block at the state `x`: normals (L, r, N) and (L, t, N) and weights (N,), for smooth averages."""

    @abc.abstractmethod
    def points(self, model: Model, x: Overlaps, block: Any) -> Points:
        """For one replicate: nodes, weights and minimisers of one block at the state `x`."""


def in_blocks(arrays: tuple[jax.Array, ...], width: int) -> tuple[jax.Array, ...]:
    """Arrays (..., N), padded with zeros, as (B, ..., W) with W of at most `width`."""
    size = arrays[0].shape[-1]
    width = min(width, size)
    count = -(-size // width)

    def split(a: jax.Array) -> jax.Array:
        pad = [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)]
        return jnp.moveaxis(jnp.pad(a, pad).reshape(*a.shape[:-1], count, width), -2, 0)

    return tuple(map(split, arrays))


class Nodes(Rule):
    """Frozen nodes: fixed standard normal fields.

    Attributes:
        student: (R, L, r, N).
        teacher: (R, L, t, N).
        weight: (R, N), summing to one in every replicate.
        block: nodes in a block.
        kind: the name of the rule.
    """

    student: jax.Array
    teacher: jax.Array
    weight: jax.Array
    block: int = eqx.field(static=True)
    kind: str = eqx.field(static=True)

    @property
    def replicates(self) -> int:
        return self.weight.shape[0]

    @property
    def size(self) -> int:
        return self.weight.shape[-1]

    def coarse(self, size: int = 2**12) -> Nodes:
        if self.kind == "gauss-hermite":  # no part of a tensor grid is a rule
            return jax.tree.map(lambda a: a[0], self)
        part = jax.tree.map(lambda a: a[0, ..., :size], self)
        return eqx.tree_at(lambda n: n.weight, part, part.weight / jnp.sum(part.weight))

    def blocks(self) -> Any:
        return in_blocks((self.student, self.teacher, self.weight), self.block)

    def quadrature(self, model: Model, x: Overlaps, block: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return block

    def points(self, model: Model, x: Overlaps, block: Any) -> Points:
        student, teacher, weight = block
        h, y = fields(model, x, student, teacher)
        # The fields stay; their law moves with the overlaps. So the minimisers move only with V and the model.
        h = lax.stop_gradient(h)
        student, log_density = _whiten(model, x, h, y)
        weight = weight * jnp.exp(log_density - lax.stop_gradient(log_density))
        found = prox(model, h, x.V, y)
        points = Points(student, teacher, weight, found.z, found.converged, found.gap)
        return _beyond_jumps(model, x, points, h, y, found.other, _bandwidth(self.size))


def _beyond_jumps(
    model: Model, x: Overlaps, points: Points, h: jax.Array, y: jax.Array, other: jax.Array, bandwidth: float
) -> Points:
    """Append the nodes close to a jump once more, at their other minimum, and share their weight."""
    size = h.shape[-1]
    count = max(1, size // 8)
    spread = jnp.swapaxes(jnp.linalg.cholesky(residual_covariance(model, x)), -1, -2)
    # Slope of the gap in the standard normals of the student, by which the gap becomes a distance to the surface.
    push = _mix(spread, _mix(jnp.linalg.inv(x.V), other - points.z))
    width = lax.stop_gradient(bandwidth * jnp.sqrt(jnp.sum(push**2, (0, 1))))
    lanes = jnp.nonzero(points.gap < width, size=count, fill_value=size)[0]
    pick = partial(jnp.take, indices=lanes, axis=-1, mode="clip")
    h, y, other, z, width = map(pick, (h, y, other, lax.stop_gradient(points.z), width))
    gap = moreau(model, other, h, x.V, y) - moreau(model, z, h, x.V, y)
    real = lanes < size
    crossed = jnp.where(real, pick(points.weight) * _beyond(gap, jnp.where(real, width, 1.0)), 0.0)
    join = partial(jnp.concatenate, axis=-1)
    return Points(
        student=join([points.student, pick(points.student)]),
        teacher=join([points.teacher, pick(points.teacher)]),
        weight=join([points.weight.at[lanes].add(-crossed, mode="drop"), crossed]),
        z=join([points.z, other]),
        converged=join([points.converged, pick(points.converged)]),
        gap=join([points.gap, pick(points.gap)]),
    )


def sobol_nodes(
    model: Model,
    n: int = DEFAULT_NODES,
    *,
    seed: int = 0,
    replicates: int = DEFAULT_REPLICATES,
    block: int | None = None,
) -> Nodes:
    """Scrambled Sobol points mapped to Gaussians by the inverse cumulative distribution: the default rule.

    Args:
        model: gives the number of fields of a node, L (r + t), and the dtype.
        n: nodes in a replicate, a power of two.
        seed: of the scrambles.
        replicates: independent scrambles; their scatter is the error bar.
        block: nodes that are solved together; bounds the memory.

    Raises:
        ValueError: `n` not a power of two, or `replicates`, `block` or `seed` out of range.
    """
    check_counts(block, n=n, replicates=replicates, seed=seed)
    normals = sobol_normals(_dimension(model), n, seed, replicates)
    return _nodes(model, normals, np.full((replicates, n), 1 / n), block, "sobol")


def sobol_normals(dimension: int, n: int, seed: int, replicates: int, name: str = "n") -> np.ndarray:
    """Scrambled Sobol points as normals, (replicates, dimension, n).

    Raises:
        ValueError: `n` not a power of two.
    """
    if n & (n - 1):
        near = 2 ** (n.bit_length() - 1)
        raise ValueError(f"{name} must be a power of two for Sobol points, got {name}={n}: use {near} or {2 * near}")
    sets = []
    for k in range(replicates):
        engine = stats.qmc.Sobol(dimension, scramble=True, rng=np.random.default_rng([seed, k]))
        sets.append(special.ndtri(np.clip(engine.random(n), 2.0**-33, 1 - 2.0**-33)).T)
    return np.stack(sets)


def monte_carlo_nodes(
    model: Model,
    n: int = DEFAULT_NODES,
    *,
    seed: int = 0,
    replicates: int = DEFAULT_REPLICATES,
    block: int | None = None,
) -> Nodes:
    """Plain Monte Carlo: `n` independent Gaussian draws in each replicate. Arguments and errors as in `sobol_nodes`."""
    check_counts(block, n=n, replicates=replicates, seed=seed)
    rng = np.random.default_rng(seed)
    draws = rng.standard_normal((replicates, _dimension(model), n))
    return _nodes(model, draws, np.full((replicates, n), 1 / n), block, "monte-carlo")


def gauss_hermite_nodes(
    model: Model, order: int = 16, *, seed: int = 0, replicates: int = DEFAULT_REPLICATES, block: int | None = None
) -> Nodes:
    """Tensor Gauss-Hermite rule with `order` points in each of the L (r + t) fields.

    The Gaussian law is invariant under rotations, so the replicates are the grid itself and randomly rotated copies:
    their scatter measures what the grid does not resolve. Exact for polynomials up to degree 2 order - 1.

    Raises:
        ValueError: `order` below one or a grid of more than 2^24 nodes.
    """
    check_counts(block, order=order, replicates=replicates, seed=seed)
    dim = _dimension(model)
    if order**dim > 2**24:
        raise ValueError(
            f"order={order} in {dim} fields makes {order**dim} nodes, over 2^24: use order <= {int(2 ** (24 / dim))}"
        )
    x, w = special.roots_hermitenorm(order)
    grid = np.stack(np.meshgrid(*[x] * dim, indexing="ij")).reshape(dim, -1)
    weight = np.stack(np.meshgrid(*[w / w.sum()] * dim, indexing="ij")).prod(0).ravel()
    rng = np.random.default_rng(seed)
    turns = [np.eye(dim)] + [stats.ortho_group.rvs(dim, random_state=rng) for _ in range(replicates - 1)]
    return _nodes(model, np.stack([t @ grid for t in turns]), np.tile(weight, (replicates, 1)), block, "gauss-hermite")


def _dimension(model: Model) -> int:
    L, r, t = model.shape
    return L * (r + t)


def _nodes(model: Model, normals: np.ndarray, weight: np.ndarray, block: int | None, kind: str) -> Nodes:
    L, r, t = model.shape
    dtype = model.lam.dtype
    teacher, student = normals[:, : L * t], normals[:, L * t :]
    size = normals.shape[-1]
    return Nodes(
        student=jnp.asarray(student.reshape(-1, L, r, size), dtype),
        teacher=jnp.asarray(teacher.reshape(-1, L, t, size), dtype),
        weight=jnp.asarray(weight, dtype),
        block=block or DEFAULT_BLOCK,
        kind=kind,
    )


def check_counts(block: int | None, **counts: int) -> None:
    """Raise a ValueError that names the first count that is not a positive integer; a seed may be zero, `block` None."""
    for name, value in {**counts, "block": 1 if block is None else block}.items():
        least = 0 if name == "seed" else 1
        if not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {name}={value!r}")
