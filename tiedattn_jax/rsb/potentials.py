"""The two potentials of one step of replica symmetry breaking; the equations are their gradients.

With the Moreau envelope E_V of the loss,

    M_s = -(1/s) E_{y, xi0} log E_{xi1} exp(-s E_V(h, y))
    h = m + theta rho^{-1} y + (q0 - theta rho^{-1} theta^T)^{1/2} xi0 + (q1 - q0)^{1/2} xi1

M_s is split into the RS potential at the response V + s (q1 - q0) and a remainder. Without jumps the remainder vanishes
to first order in q1 - q0. The rule of lines gives the RS potential to many digits, and the remainder is small.

The remainder is smooth in the field of a cluster (xi0), but it changes within a short distance of each jump. The fields
that it is averaged over lie on the lines of the RS rule, densely at the jumps, and in two groups, with and without a
jump nearby. They are laid for one state and then stay where they are; the jumps may move by a part of that distance.
The average over xi1 is that of `clusters`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ..averages.lines import LineNodes, directions, lay
from ..averages.maxwell import FieldLines, common_tangents, energy_profile
from ..averages.rules import average_of_weighted, legendre, sum_of_weighted, teacher_fields, whiten
from ..base.arrays import AnyArray, cholesky, indexed, precise, solve, zeros
from ..model.model import Model
from ..model.overlaps import Conjugates, Overlaps, symmetric
from ..theory.equations import value_and_columns
from ..theory.potentials import block_envelope, stationary, weight_moments
from .cluster_law import ClusterLaw
from .clusters import Cluster, cluster_at, find_jumps, find_rough_jump, find_smooth, update_minima

_REACH = 6.0  # how far the dense nodes go to either side of a jump, in units of the distance
_DENSE = 10  # dense nodes on each side
_DENSITY = 4.0  # other nodes per standard deviation; the minimiser is also steep beyond the end of a jump
_BLOCK = 256  # number of fields near a jump whose inner averages are taken together
_SMOOTH_BLOCK = 1024  # the same for fields without a jump nearby
_ROUND = 32  # the number of blocks is rounded up to a multiple of this, so that replicates share one program


class OneRSBOverlaps(eqx.Module):
    """Order parameters of 1RSB, in one replicate or in several; as conjugates, their hats.

    Attributes:
        q1: overlap of two minima of one cluster.
        q0: overlap of minima of different clusters.
        V: response within a cluster.
        theta: overlap with the teacher.
        m: overlap with the encodings.
    """

    q1: Float[Array, "*R L r r"]
    q0: Float[Array, "*R L r r"]
    V: Float[Array, "*R L r r"]
    theta: Float[Array, "*R L r t"]
    m: Float[Array, "*R L r"]

    @property
    def spread(self) -> Float[Array, "L r r"]:
        """Cholesky root of q1 - q0."""
        return cholesky(self.q1 - self.q0)

    @property
    def between(self) -> Overlaps:
        """The order parameters that clusters share."""
        return Overlaps(self.q0, self.V, self.theta, self.m)

    def joined(self, s: Float[Array, ""]) -> Overlaps:
        """Return the RS order parameters that these become without jumps: V + s (q1 - q0) is then the full response."""
        return Overlaps(self.q1, self.V + s * (self.q1 - self.q0), self.theta, self.m)


class Outer(NamedTuple):
    """Fields of the clusters, which stay in place; their weights move with the law. Leaves lead with the block axis."""

    h: Float[Array, "*B L r N"]
    teacher: Float[Array, "*B L t N"]  # standard normals of the teacher
    weight: Float[Array, "*B N"]
    log_density: Float[Array, "*B N"]  # log density of h given y at the state that they were laid for
    searches: tuple = ()  # results of a search of `clusters` at that state, from which a new search starts


class Averages(NamedTuple):
    """Averages for M_s: fields near a jump, fields without one nearby, and lines for the RS part."""

    near_jumps: Outer
    smooth: Outer
    lines: LineNodes


Point = tuple[Model, OneRSBOverlaps, Float[Array, ""]]  # a model, order parameters and s
BlockNodes = tuple[Outer, Cluster, Cluster]  # the fields of a block, and the nodes of M_s and of its RS counterpart


def _laws(p: Point, block: Outer) -> tuple[ClusterLaw, ClusterLaw]:
    """Return the laws of the clusters around the fields of a block, for M_s and for its RS counterpart."""
    model, x, s = p
    law = ClusterLaw(model, x.V, x.spread, block.h, teacher_fields(model, block.teacher))
    return law, law._replace(V=x.joined(s).V)


def _search_block(find: Callable[..., tuple], p: Point, block: Outer) -> PyTree:
    """Apply a search of `clusters` to the fields of one block, for M_s and for its RS counterpart, which has s = 0.

    The search starts from the results in the block, which have the form of `_by_field`.
    """
    law, rs_law = _laws(p, block)

    def search_part(problem: tuple) -> PyTree:
        V, s, start = problem
        return find(law._replace(V=V), s, *jax.tree.map(lambda a: a.reshape(*a.shape[:-2], -1), start))

    return lax.map(search_part, (jnp.stack([law.V, rs_law.V]), jnp.stack([p[2], jnp.zeros_like(p[2])]), block.searches))


def _by_field(results: PyTree, N: int) -> PyTree:
    """Reshape arrays (..., M N) of results at N fields to (..., M, N); arrays (..., N) become (..., 1, N)."""
    return jax.tree.map(lambda a: a.reshape(*a.shape[:-1], -1, N), results)


def _block_nodes(p: Point, block: Outer, results: PyTree) -> BlockNodes:
    """Return the nodes at the results of a search in one block, differentiable in p."""
    nodes, rs_nodes = (cluster_at(law, indexed(results, k)) for k, law in enumerate(_laws(p, block)))
    return block, nodes, rs_nodes


@stationary
def _remainder(nodes: BlockNodes, p: Point) -> Float[Array, ""]:
    """Return one block's share of M_s minus the RS potential at `OneRSBOverlaps.joined`.

    The RS potential is the average over xi0 and xi1 of the envelope at the response V + s (q1 - q0). At each field its
    average over xi1 is subtracted.
    """
    (outer, *clusters), (model, x, s) = nodes, p
    laws = _laws(p, outer)
    energy, rs_energy = (
        law.energy(c.z, c.normals).reshape(c.log_weight.shape) for law, c in zip(laws, clusters, strict=True)
    )
    log_weight, rs_weight = clusters[0].log_weight, jnp.exp(clusters[1].log_weight)
    lowest = lax.stop_gradient(jnp.min(energy, 0))  # keeps the exponents small
    tilted = lowest - jax.scipy.special.logsumexp(log_weight - s * (energy - lowest), axis=0) / s
    rs_average = jnp.sum(rs_weight * rs_energy, 0) / jnp.sum(rs_weight, 0)
    log_density = whiten(model, x.between, outer.h, laws[0].y)[1]
    return jnp.sum(outer.weight * jnp.exp(log_density - outer.log_density) * (tilted - rs_average))


# Maps numbers to model, alpha, order parameters and s.
PointAt = Callable[[Float[Array, " k"]], tuple[Model, Float[Array, ""], OneRSBOverlaps, Float[Array, ""]]]


def channel_expansion(
    setting: PointAt, averages: Averages, u: Float[Array, " k"], with_slopes: Bool[Array, ""]
) -> tuple[tuple, tuple, Model]:
    """Return M_s with its gradients in the order parameters and in s, their derivatives in u, and dM_s / d model.

    Args:
        setting: function that maps numbers u to model, alpha, order parameters and s.
        with_slopes: whether to compute the derivatives in u, (..., k), most of the work; otherwise they are zero.
    """

    def sums(find: Callable[..., Any], nodes_at: Callable[..., Any], share: Callable[..., Any]) -> Callable:
        def block_sums(block: tuple) -> PyTree:
            model, _, x, s = lax.stop_gradient(setting(u))
            results = find((model, x, s), block)

            def values_at(u: Float[Array, " k"]) -> PyTree:
                model, _, x, s = setting(u)
                nodes = nodes_at((model, x, s), block, results)
                M, (by_model, *gradients) = jax.value_and_grad(lambda *p: share(nodes, p), (0, 1, 2))(model, x, s)
                return (M, *gradients), by_model

            def without_slopes(u: Float[Array, " k"]) -> PyTree:
                values, by_model = values_at(u)
                return values, jax.tree.map(lambda a: jnp.zeros((*a.shape, len(u)), a.dtype), values), by_model

            return lax.cond(with_slopes, partial(value_and_columns, values_at), without_slopes, u)

        return block_sums

    def joined(p: Point) -> tuple[Model, Overlaps]:
        model, x, s = p
        return model, x.joined(s)

    lines = averages.lines
    remainder_sums = sums(partial(_search_block, update_minima), _block_nodes, _remainder)
    line_sums = sums(
        lambda p, block: lines.search(*joined(p), block),
        lambda p, block, result: lines.points(*joined(p), block, result),
        lambda nodes, p: block_envelope(nodes, joined(p)),
    )
    shares = (
        sum_of_weighted(averages.near_jumps, remainder_sums),
        sum_of_weighted(averages.smooth, remainder_sums),
        average_of_weighted(averages.lines, line_sums),
    )
    return jax.tree.map(lambda *parts: sum(parts), *shares)


def prior_1rsb(model: Model, hats: OneRSBOverlaps, s: Float[Array, ""]) -> Float[Array, ""]:
    """Return the prior potential psi_s of the ridge.

    ``1/2 E tr[D^{-1} (b b^T + sum_k gamma_k qhat0_k)] - 1/(2 s) E log det(1 - s Lam^{-1} c2)`` with
    ``c2 = sum_k gamma_k (qhat1_k - qhat0_k)``, ``D = Lam - s c2`` and b, Lam as in `potentials.prior`.
    """
    law = model.law()
    Lam, square = weight_moments(model, Conjugates(hats.q0, hats.V, hats.theta, hats.m))
    D = Lam - s * jnp.einsum("nk,kab->nab", law.gamma, hats.q1 - hats.q0)
    logs = (jnp.log(jnp.diagonal(cholesky(a), axis1=-2, axis2=-1)) for a in (D, Lam))
    ratio = 2 * jnp.sum(jnp.subtract(*logs), -1)
    return law.weights @ (0.5 * jnp.trace(solve(D, square), axis1=1, axis2=2) - 0.5 * ratio / s)


def free_energy_1rsb(
    model: Model,
    alpha: Float[Array, ""],
    x: OneRSBOverlaps,
    hats: OneRSBOverlaps,
    s: Float[Array, ""],
    M: Float[Array, ""],
) -> Float[Array, ""]:
    """Return the free energy Phi_s; at a fixed point it is minus the training loss.

    ``1/2 sum_l tr(Vhat q1 - qhat1 V) - s/2 sum_l tr(qhat1 q1 - qhat0 q0) - mhat . m - tr(thetahat theta^T) + psi_s -
    alpha M_s``
    """
    pairing = 0.5 * jnp.sum(hats.V * x.q1 - hats.q1 * x.V) - jnp.sum(hats.m * x.m) - jnp.sum(hats.theta * x.theta)
    entropic = 0.5 * s * jnp.sum(hats.q1 * x.q1 - hats.q0 * x.q0)
    return pairing - entropic + prior_1rsb(model, hats, s) - alpha * M


def conjugates_1rsb(
    alpha: Float[Array, ""], s: Float[Array, ""], g: OneRSBOverlaps, free: Float[Array, "2"]
) -> OneRSBOverlaps:
    """Return the conjugates, which are gradients of M_s."""
    q1 = -2 * alpha * symmetric(g.V)
    q0, V = 2 * alpha / s * symmetric(g.q0), 2 * alpha * symmetric(g.q1) + s * q1
    return OneRSBOverlaps(q1, q0, V, -alpha * free[0] * g.theta, -alpha * free[1] * g.m)


def overlaps_1rsb(model: Model, hats: OneRSBOverlaps, s: Float[Array, ""]) -> OneRSBOverlaps:
    """Return the order parameters, which are gradients of psi_s."""
    g = jax.grad(lambda hats: prior_1rsb(model, hats, s))(hats)
    q1 = -2 * symmetric(g.V)
    return OneRSBOverlaps(q1, -2 / s * symmetric(g.q0), 2 * symmetric(g.q1) - s * q1, g.theta, g.m)


def averages_at(model: Model, rs: Overlaps, x: OneRSBOverlaps, s: Float[Array, ""], lines: LineNodes) -> Averages:
    """Lay fields along the lines, dense at the jumps of the RS state, in groups with and without a jump nearby."""
    width = float(jnp.sqrt(jnp.trace(x.q1 - x.q0, axis1=1, axis2=2).sum() / jnp.trace(rs.q, axis1=1, axis2=2).sum()))
    blocks = _in_blocks(lay_fields(model, rs, lines, width), _SMOOTH_BLOCK)
    blocks = blocks._replace(searches=_search_blocks(find_rough_jump, (model, x, s), blocks))
    flat = jax.tree.map(lambda a: np.moveaxis(np.asarray(a), 0, -2).reshape(*a.shape[1:-1], -1), blocks)
    has_jump, is_weighted = np.any(flat.searches[0].jump != 0, (0, 1)), flat.weight > 0

    def group(find: Callable[..., tuple], mask: Bool[np.ndarray, " fields"], width: int) -> Outer:
        subset = _in_blocks(indexed(flat, (..., mask)), width)
        return subset._replace(searches=_search_blocks(find, (model, x, s), subset))

    return Averages(
        group(find_jumps, has_jump & is_weighted, _BLOCK),
        group(find_smooth, ~has_jump & is_weighted, _SMOOTH_BLOCK),
        lines,
    )


def lay_fields(model: Model, x: Overlaps, replicate: LineNodes, distance: float) -> Outer:
    """Lay fields at Gauss-Legendre nodes on the lines of a replicate, in pieces that end at the jumps and around them.

    The weights sum to one.

    Args:
        x: overlaps at which the jumps are located.
        distance: distance over which the integrand changes at a jump, in standard deviations of the student's fields.
    """
    lines, teacher, jumps, is_jump = _jumps_of_lines(model, x, replicate)
    low, high = -float(replicate.reach[0]), float(replicate.reach[1])
    rules = [nodes_on_line(np.sort(s[mask]), low, high, distance) for s, mask in zip(jumps.T, is_jump.T, strict=True)]
    line = np.repeat(np.arange(len(rules)), [len(s) for s, _ in rules])
    s, weight = (np.concatenate(parts) for parts in zip(*rules, strict=True))
    weight = weight * np.exp(-0.5 * s**2) * np.asarray(replicate.weight)[line]
    weight /= weight.sum()
    is_significant = weight > 1e-14
    line, s = line[is_significant], s[is_significant]
    h = (lines.origin[:, line] + s * lines.direction[:, line]).reshape(*model.shape[:2], -1)
    teacher = teacher[..., line]
    return Outer(h, teacher, jnp.asarray(weight[is_significant]), _log_density(model, x, h, teacher))


@eqx.filter_jit
def _log_density(
    model: Model, x: Overlaps, h: Float[Array, "L r N"], teacher: Float[Array, "L t N"]
) -> Float[Array, " N"]:
    """Return the log density of the student's fields given the teacher's."""
    return whiten(model, x, h, teacher_fields(model, teacher))[1]


@eqx.filter_jit
@precise
def _jumps_of_lines(
    model: Model, x: Overlaps, replicate: LineNodes
) -> tuple[FieldLines, Float[Array, "L t N"], Float[Array, "jumps N"], Bool[Array, "jumps N"]]:
    """Return all lines of a replicate, their teacher normals, where they jump, and whether they do."""
    y = teacher_fields(model, replicate.teacher)
    lines = lay(model, x, y, replicate.across, *directions(model, x, y, replicate.direction))
    profile = energy_profile(lines, replicate.reach)
    gaps, _ = common_tangents(lines, profile, replicate.jumps)
    return lines, replicate.teacher, gaps.left.s, gaps.real


def nodes_on_line(
    jumps: Float[np.ndarray, " jumps"], low: float, high: float, distance: float
) -> tuple[Float[np.ndarray, " s"], Float[np.ndarray, " s"]]:
    """Return nodes and weights on [low, high], dense around the `jumps`."""
    width = _REACH * distance
    inner = jumps[(low < jumps) & (jumps < high)]
    ends = np.unique(np.clip([low, high, *inner, *(inner - width), *(inner + width)], low, high))
    nodes, weights = [], []
    for a, b in itertools.pairwise(ends):
        is_dense = np.any(np.abs(inner - 0.5 * (a + b)) < width)
        x, w = legendre(_DENSE if is_dense else 2 + int(np.ceil(_DENSITY * (b - a))))
        nodes.append(a + (b - a) * x)
        weights.append((b - a) * w)
    return np.concatenate(nodes), np.concatenate(weights)


def _in_blocks(outer: Outer, width: int) -> Outer:
    """Return the fields in whole blocks, a multiple of `_ROUND`; fields that fill up the last blocks have no weight."""
    size = outer.weight.shape[-1]
    count = -(-max(size, 1) // (width * _ROUND)) * _ROUND

    def split(a: Shaped[AnyArray, "*axes size"]) -> Shaped[Array, "count *axes width"]:
        pad = [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)]
        padded = jnp.pad(jnp.asarray(a), pad, mode="edge" if size else "constant")
        return jnp.moveaxis(padded.reshape(*a.shape[:-1], count, width), -2, 0)

    blocks = jax.tree.map(split, outer)
    is_field = (jnp.arange(count * width) < size).reshape(count, width)
    return blocks._replace(weight=jnp.where(is_field, blocks.weight, 0.0))


@eqx.filter_jit
def _search_blocks(find: Callable[..., tuple], p: Point, blocks: Outer) -> tuple:
    """Apply a search of `clusters` to all blocks that have fields with a weight."""

    def search_block(block: Outer) -> PyTree:
        return _by_field(_search_block(find, p, block), len(block.weight))

    def fill(k: Int[Array, ""], values: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: a.at[k].set(b), values, search_block(indexed(blocks, k)))

    shapes = jax.eval_shape(search_block, indexed(blocks, 0))
    zero = zeros(shapes, len(blocks.weight))
    return (lax.fori_loop(0, jnp.sum(jnp.any(blocks.weight > 0, 1)), fill, zero),)
