"""Replicates of single nodes, such as Sobol points.

The minimiser jumps on a surface in the space of the fields. An average that is differentiated node by node misses the
contribution of this surface when it moves; this module adds it. Where nothing jumps, the nodes move with the law of the
fields at frozen normals, so their derivatives are those of the average itself. Where minimisers jump, the fields are
held and the *weights* carry the derivative (the score function), as q, theta and m enter only the law of the fields.
V and the numbers of the model do move the surface: nodes close to it carry a second point beyond the jump and share
their weight with it, smoothly in the energy gap.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float
from scipy import special

from ..base.arrays import apply, cholesky, inverse
from ..model.model import Model
from ..model.overlaps import Overlaps, residual_covariance
from .moreau import ProxProblem, with_implicit_derivative
from .prox import Prox, search
from .rules import (
    Fields,
    Jumps,
    Points,
    Replicate,
    Rule,
    block_size,
    block_width,
    check_memory,
    coarse_size,
    fields,
    in_blocks,
    whiten,
)

# Variance of the pathwise estimator (nodes move) over that of the score-function estimator (weights change), per
# fraction of nodes near a jump divided by bandwidth^2. Measured for d/d sigma on 2^12 Sobol points with a bandwidth of
# .1: the ratio is 2 at a fraction of 7e-4 and 4 at 1.2e-3.
_JUMPS = 30.0


class Block(NamedTuple):
    """A block of `Nodes`, or other nodes: standard normals and weights, in arrays of jax or numpy."""

    student: Float[Any, "*B L r N"]
    teacher: Float[Any, "*B L t N"]
    weight: Float[Any, "*B N"]


class Nodes(Replicate):
    """Frozen nodes: fixed standard normal fields."""

    student: Float[Array, "*R L r N"]
    teacher: Float[Array, "*R L t N"]
    weight: Float[Array, "*R N"]  # summing to one
    block: int = eqx.field(static=True)  # nodes in a block

    @property
    def size(self) -> int:
        return self.weight.shape[-1]

    @property
    def fast_compile(self) -> bool:
        """Whether there are more than two student fields.

        XLA's emitters of fused kernels then take twice as long to compile, and their kernels of six or seven fields are
        slow.
        """
        return math.prod(self.student.shape[-3:-1]) > 2

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.student.shape[-3], self.student.shape[-2], self.teacher.shape[-2]

    def blocks(self) -> Block:
        return Block(*in_blocks((self.student, self.teacher, self.weight), self.block))

    def quadrature(self, block: Block) -> tuple[Float[Array, "L r N"], Float[Array, "L t N"], Float[Array, " N"]]:
        return block

    def search(self, model: Model, x: Overlaps, block: Block) -> Prox:
        h, y = fields(model, x, block.student, block.teacher)
        return search(ProxProblem(model, x.V, y), h)

    def points(self, model: Model, x: Overlaps, block: Block, result: Prox) -> Points:
        student, teacher, weight = block
        h, y = fields(model, x, student, teacher)
        # The bandwidth is in standard deviations of a student field: .1 for 2^12 nodes, .05 for 2^16. The bias is of
        # second order in it, and so falls with the number of nodes as fast as their error does.
        bandwidth = 0.8 * self.weighted**-0.25
        width = lax.stop_gradient(bandwidth * _slope_of_gap(model, x, result))
        h, log_density = _partial_fields(model, x, h, y, _carried(result.gap < width, weight, bandwidth))
        weight = weight * jnp.exp(log_density)
        z = with_implicit_derivative(result.z, ProxProblem(model, x.V, y), h)
        no_jumps = Jumps(jnp.zeros(0, weight.dtype), z[..., :0])
        student = whiten(model, x, h, y)[0]
        points = Points(student, teacher, weight, z, result.converged, result.gap, no_jumps)
        return _append_copies(model, x, points, h, y, result.other, width)


def _carried(is_near: Bool[Array, " N"], weight: Float[Array, " N"], bandwidth: Float[Array, ""]) -> Float[Array, ""]:
    """Return the fraction of the derivative that moving nodes carry; the weights carry the rest at fixed fields.

    The derivative of the average is the same for any fraction, but its variance is not. The score function (weights)
    contains the jumps, but scatters with every field. The pathwise derivative (moving nodes) is good for the smooth
    part, and sees a jump only through the nodes within a bandwidth of it (`is_near`). The number that is squared below
    is about the variance of the pathwise estimator over that of the score function where there are jumps; where there
    are none, the true ratio is .03 or less.
    """
    share = jnp.sum(jnp.where(is_near, weight, 0.0)) / jnp.maximum(jnp.sum(weight), jnp.finfo(weight.dtype).tiny)
    return 1 / (1 + (_JUMPS * share / bandwidth**2) ** 2)


def _partial_fields(
    model: Model, x: Overlaps, h: Float[Array, "L r N"], y: Float[Array, "L t N"], fraction: Float[Array, ""]
) -> tuple[Float[Array, "L r N"], Float[Array, " N"]]:
    """Return fields that carry a fraction of the derivative, and the logarithm of the weights that carry the rest.

    This logarithm is zero; it only has a derivative.
    """
    fixed_h = lax.stop_gradient(h)
    log_density = (1 - fraction) * whiten(model, x, fixed_h, y)[1]
    return fixed_h + fraction * (h - fixed_h), log_density - lax.stop_gradient(log_density)


def _slope_of_gap(model: Model, x: Overlaps, minima: Prox) -> Float[Array, " N"]:
    """Return the slope of the gap in the student's standard normals: gap / slope is the distance to the jump."""
    spread = jnp.swapaxes(cholesky(residual_covariance(model, x)), -1, -2)
    push = apply(spread, apply(inverse(x.V), minima.other - minima.z))
    return jnp.sqrt(jnp.sum(push**2, (0, 1)))


def _append_copies(
    model: Model,
    x: Overlaps,
    points: Points,
    h: Float[Array, "L r N"],
    y: Float[Array, "L t N"],
    second: Float[Array, "L r N"],
    width: Float[Array, " N"],
) -> Points:
    """Append a copy, at the second minimum, of each node whose gap is below `width`; the two share its weight."""
    size = h.shape[-1]
    count = max(size // 8, min(size, 16))  # up to 3 % of the nodes are near a jump, and more in a small block by chance
    indices = jnp.nonzero(points.gap < width, size=count, fill_value=size)[0]
    pick = partial(jnp.take, indices=indices, axis=-1, mode="clip")
    h, y, second, z, width = map(pick, (h, y, second, lax.stop_gradient(points.z), width))
    problem = ProxProblem(model, x.V, y)
    gap = problem.energy(second, h) - problem.energy(z, h)
    is_node = indices < size
    weight = jnp.where(is_node, pick(points.weight), 0.0)
    width = jnp.where(is_node, width, 1.0)
    copy_weight = weight * _crossed_share(gap, width)
    join = partial(jnp.concatenate, axis=-1)
    return Points(
        student=join([points.student, pick(points.student)]),
        teacher=join([points.teacher, pick(points.teacher)]),
        weight=join([points.weight.at[indices].add(-copy_weight, mode="drop"), copy_weight]),
        z=join([points.z, second]),
        resolved=join([points.resolved, pick(points.resolved)]),
        gap=join([points.gap, pick(points.gap)]),
        jumps=Jumps(weight * _delta(gap, width), second - z),
    )


def _crossed_share(gap: Float[Array, " N"], width: Float[Array, " N"]) -> Float[Array, " N"]:
    """Return the share of a node that lies beyond the jump: one half at a gap of zero, zero at a gap of `width`.

    The average is then a smooth function of the state although every minimiser jumps. Its derivative contains the
    boundary term of the jump, which the derivatives at single nodes lack. The kernel is symmetric about the jump, so
    its bias is of second order in the width.
    """
    u = jnp.clip(gap / width, 0.0, 1.0)
    return 0.5 - 0.75 * u + 0.25 * u**3


def _delta(gap: Float[Array, " N"], width: Float[Array, " N"]) -> Float[Array, " N"]:
    """Return the delta function of the gap with the same kernel: minus the slope of `_crossed_share`."""
    return 0.75 * (1 - jnp.clip(gap / width, 0.0, 1.0) ** 2) / width


def sobol_normals(
    dimension: int, n: int, seed: int, replicates: int, name: str
) -> Float[np.ndarray, "{replicates} {dimension} {n}"]:
    """Return scrambled Sobol points as standard normals.

    Args:
        name: name of the argument `n` in errors.

    Raises:
        InputError: there are more points than fit into the memory.
    """
    check_memory(n * dimension, replicates, name, n)
    from scipy.stats import qmc  # not at the top: its import takes half as long as that of jax

    scrambles = []
    for k in range(replicates):
        # numpy pads [seed, k] with zeros: a seed of two words would share replicate 0 with a replicate of another seed.
        words = [seed % 2**32, k, seed // 2**32]
        engine = qmc.Sobol(dimension, scramble=True, rng=np.random.default_rng(words))
        scrambles.append(special.ndtri(np.clip(engine.random(n), 2.0**-33, 1 - 2.0**-33)).T)
    return np.stack(scrambles)


def single_nodes(
    fields: Fields,
    normals: Float[np.ndarray, "R fields N"],
    weight: Float[np.ndarray, "R N"],
    block: int | None,
    nested: bool = True,
) -> Rule:
    """Return the rule with given normals, those of the teacher first, and weights.

    Args:
        nested: whether the first nodes are a rule by themselves, as Sobol points are. They then form the coarse
            replicate; otherwise all nodes of the first replicate do.
    """
    L, r, t = fields.shape
    teacher, student = normals[:, : L * t], normals[:, L * t :]
    size = normals.shape[-1]
    student, teacher = (a.reshape(len(normals), L, -1, size) for a in (student, teacher))
    count = block_width(size, coarse_size(L * r)) if nested else size
    coarse_weight = np.where(np.arange(size) < count, weight[0], 0.0)

    def nodes(**arrays: np.ndarray) -> Nodes:
        return Nodes(**{k: jnp.asarray(a, fields.dtype) for k, a in arrays.items()}, block=block or block_size(L * r))

    coarse = nodes(student=student[0], teacher=teacher[0], weight=coarse_weight / coarse_weight.sum())
    return Rule(nodes(student=student, teacher=teacher, weight=weight), coarse)
