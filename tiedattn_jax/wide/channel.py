"""Averages of a wide layer's channel: the proximal operator of the loss over the scores of student and teacher.

The scores of a fresh sentence are Gaussian, in the coordinates of `Layer.blocks` independent with the covariance
[[q, m], [m, rho]] of the student's w and the teacher's y. The proximal point minimises ``loss(h) + |h - w|^2 / (2 V)``.
Every node is for one block of directions, and the averages are sums over the blocks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..averages.nodes import sobol_normals
from ..averages.recipes import Sobol
from ..base.arrays import determinant, ldl_solve, total
from ..base.derivatives import with_root
from ..base.errors import InputError, is_concrete
from ..base.nodewise import nodewise
from .layer import Layer

# A trapezoid rule on a lattice in a ball. The loss of softmax scores has poles at a distance pi / beta, which
# Gauss-Hermite rules meet slowly: with 12 nodes a dimension q is wrong by 2 %. With these steps, for a spread of one of
# the fields times beta, the averages are right to 1e-7.
_RADIUS = 6.2  # of the ball
_TEACHER_STEP = 0.6
_STUDENT_STEP = 1.0
_SPREAD = 2.5  # of scores times beta at the standard setting, for which the student's step was chosen
_FINER = 2  # by so much the steps of a lattice in two dimensions are shorter: its points cost little
_DIGITS = 4  # binary digits of the number of points, so that layers share their compiled programs
_MOST_FIELDS = 4  # of student and teacher together, on a lattice
_MOST_POINTS = 4_000_000  # of a lattice in the cube around its ball
_SOBOL = Sobol(2**14)
_PROX_STEPS = 60
_PROX_TOL = 1e-12  # a step of this length, in units of the scores, is the last; in single precision 20 eps
_SAME = 1e-6  # relative difference of the energies of two proximal points below which none is lower; 1e3 eps if larger
_APART = 1e-3  # distance of two proximal points, in units of the scores, above which they differ
_ROUNDING = 1e-6  # a step below this length is taken even if rounding errors raise the energy; 1e3 eps if larger


class WideNodes(eqx.Module):
    """Standard normal fields of student and teacher with their weights, in every replicate.

    Attributes:
        weight: sums to one over the nodes of a block, or to the number of equal blocks that share them.
        row: one for the block of the node, zero for the others.
        along: projections of the tokens on the encodings' line, if their length is of order one; else empty.
    """

    student: Float[Array, "R n N"]
    teacher: Float[Array, "R n N"]
    along: Float[Array, "R t N"]
    weight: Float[Array, "R N"]
    row: Float[Array, "R B N"]

    @classmethod
    def of_blocks(
        cls, layer: Layer, student: Any, teacher: Any, along: Any, weight: Any, merge: bool = False
    ) -> WideNodes:
        """Return the nodes of all blocks from those of one, or with `merge` of one for each set of equal blocks."""
        kept, counts = layer.equal_blocks if merge else (np.arange(len(layer.blocks)), np.ones(len(layer.blocks)))
        count, (replicates, size) = len(kept), weight.shape
        row = np.repeat(np.eye(len(layer.blocks))[:, kept], size, 1)
        row = np.broadcast_to(row, (replicates, *row.shape))
        student, teacher, along, weight = (np.tile(a, count) for a in (student, teacher, along, weight))
        weight = weight * np.repeat(counts, size)
        return cls(*(jnp.asarray(a, layer.tau.dtype) for a in (student, teacher, along, weight, row)))


class Inside(NamedTuple):
    """How the coordinates of every node enter the loss.

    Attributes:
        shift: what the encodings add to them, (n, N).
        row: block of the node, see `WideNodes`.
    """

    shift: Float[Array, "n N"]
    row: Float[Array, "B N"]


def wide_nodes(layer: Layer, nodes: Any, *, whole: bool = False) -> WideNodes:
    """Return the nodes of a layer's averages.

    Args:
        nodes: a `Sobol` recipe; None for a lattice if a block has at most two directions and no encodings have a
            length of order one, unless large scores times beta ask for millions of points; else 2^14 Sobol points.
            The lattice has two replicates, shifted by half of a step; their difference is the error of the rule.
            `WideNodes` are returned as they are.
        whole: whether to keep both of two opposite points of the lattice if the loss is even, and all blocks if some
            are equal. Derivatives in numbers of the layer need them.
    """
    n, tokens = layer.blocks.shape[1], 0 if layer.length is None else layer.tokens
    if isinstance(nodes, WideNodes):
        actual, expected = (nodes.student.shape[1], nodes.row.shape[1]), (n, len(layer.blocks))
        if actual != expected:
            text = f"must be of a layer with {expected[0]} directions in {expected[1]} blocks"
            raise InputError("nodes", f"{text}, got nodes of {actual[0]} and {actual[1]}")
        return nodes
    whole = whole or not is_concrete(layer)
    if nodes is None and 2 * n + tokens <= _MOST_FIELDS:
        steps = _steps(layer)
        if np.prod(2 * np.ceil(_RADIUS / steps) + 1) <= _MOST_POINTS:
            return _lattice(layer, steps, whole)
    recipe = _SOBOL if nodes is None else nodes
    if not isinstance(recipe, Sobol):
        raise InputError("nodes", f"must be None or a Sobol recipe for a wide layer, got nodes={nodes!r}")
    normals = sobol_normals(2 * n + tokens, recipe.n, recipe.seed, recipe.replicates, "n")
    weight = np.full((recipe.replicates, recipe.n), 1 / recipe.n)
    return WideNodes.of_blocks(layer, normals[:, n : 2 * n], normals[:, :n], normals[:, 2 * n :], weight, not whole)


def _steps(layer: Layer) -> Float[np.ndarray, " k"]:
    """Return the steps of a lattice along the teacher's and the student's fields."""
    n = layer.blocks.shape[1]
    # The teacher's scores, times beta, are spread over sqrt(rho) along the longest direction.
    gram = np.einsum("biac,bjac->bij", layer.blocks, layer.blocks)
    longest = float(np.sqrt(np.linalg.eigvalsh(gram).max() / 2))
    beta, rho = getattr(layer, "beta", 1.0), layer.teacher.rho + layer.noise
    spread = float(beta * jnp.sqrt(rho)) * longest if is_concrete(beta, rho) else _SPREAD
    steps = np.repeat([_TEACHER_STEP / max(spread, 1.0), _STUDENT_STEP / max(spread / _SPREAD, 1.0)], n)
    return steps / (_FINER if n == 1 else 1)


def _lattice(layer: Layer, steps: Float[np.ndarray, " k"], whole: bool) -> WideNodes:
    """Return the points of two lattices in a ball; the second one is shifted by half of a step along every axis.

    Args:
        steps: along the axes.
        whole: as in `wide_nodes`.
    """
    half, n = layer.is_even and not whole, layer.blocks.shape[1]
    counts = np.ceil(_RADIUS / steps).astype(int)
    points = []
    for shift in (0.0, 0.5):
        axes = [s * (np.arange(-count, count + 1) + shift) for s, count in zip(steps, counts, strict=True)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(2 * n, -1)
        grid = grid[:, (grid**2).sum(0) <= _RADIUS**2]
        if half:  # one point of every pair of opposite ones
            grid = grid[:, np.sign(grid).T @ 3.0 ** np.arange(2 * n)[::-1] >= 0]
        points.append(grid)
    size = max(grid.shape[1] for grid in points)
    unit = 2 ** max(size.bit_length() - _DIGITS, 0)
    size = math.ceil(size / unit) * unit
    padded = np.stack([np.pad(grid, ((0, 0), (0, size - grid.shape[1]))) for grid in points])
    weight = np.exp(-0.5 * (padded**2).sum(1)) * (np.arange(size) < np.array([[grid.shape[1]] for grid in points]))
    if half:
        weight *= np.where((padded != 0).any(1), 2, 1)
    weight /= weight.sum(1, keepdims=True)
    return WideNodes.of_blocks(layer, padded[:, n:], padded[:, :n], padded[:, :0], weight, not whole)


class ChannelAverages(NamedTuple):
    """Averages of the channel; the coordinates of the scores make the fields isotropic, and g = (h - w) / V.

    Attributes:
        moreau: E min_h [loss(h) + |h - w|^2 / (2 V)].
        train_loss: E loss(h) at the proximal point.
        information: What = - E Tr dg / dw.
        signal: mhat = E Tr dg / dy.
        force: qhat = E |g|^2.
        curvature: E Tr (dg / dw)^2.
        push: minus the derivative of `moreau` by the numbers that shift the scores, (k,): E D^T g with the D of
            `shift_directions`.
        stiffness: its second derivative, - E D^T dg / dw D, (k, k).
        margin: smallest determinant of 1 + V d^2 loss / dh^2 over the nodes; the proximal point is unique where it is
            positive.
    """

    moreau: Float[Array, ""]
    train_loss: Float[Array, ""]
    information: Float[Array, ""]
    signal: Float[Array, ""]
    force: Float[Array, ""]
    curvature: Float[Array, ""]
    push: Float[Array, " k"]
    stiffness: Float[Array, "k k"]
    margin: Float[Array, ""]


def score_fields(nodes: WideNodes, q: Array, m: Array, rho: Array) -> tuple[Float[Array, "n N"], Float[Array, "n N"]]:
    """Return the student's and the teacher's fields (n, N) at the nodes of one replicate."""
    residual = jnp.maximum(q - m**2 / rho, 0.0)
    # The square root has no derivative at zero, where the student's own part vanishes.
    spread = jnp.where(residual > 0, jnp.sqrt(jnp.where(residual > 0, residual, 1.0)), 0.0)
    return m / jnp.sqrt(rho) * nodes.teacher + spread * nodes.student, jnp.sqrt(rho) * nodes.teacher


def shift_directions(layer: Layer, nodes: WideNodes) -> Float[Array, "n k N"]:
    """Return D: the numbers t of the encodings shift the student's scores by D t inside the loss.

    Encodings whose length grows with d shift all coordinates freely. Those of length P, p_1 = -p_2, have a spike of S
    along their line, of eigenvalue sqrt(d) R. With the tokens' projections z_a on this line it shifts the scores by
    R ((z_a + p_a) (z_b + p_b) - delta_ab).
    """
    if layer.length is None:
        block, place = (index[: layer.shifts] for index in layer.directions)
        return jnp.eye(len(nodes.student), dtype=layer.tau.dtype)[:, place, None] * nodes.row[block]
    z = nodes.along + layer.length * jnp.asarray([[1.0], [-1.0]], layer.tau.dtype)
    return layer.coordinates(z[:, None] * z - jnp.eye(2, dtype=z.dtype)[..., None])[0, :, None]


def channel_averages(
    layer: Layer,
    nodes: WideNodes,
    q: Array,
    m: Array,
    V: Array,
    t: Float[Array, " k"],
    guess: Float[Array, "n N"] | None = None,
) -> tuple[ChannelAverages, Float[Array, "n N"]]:
    """Return the averages over the nodes of one replicate, and the proximal points.

    Args:
        t: numbers that shift the student's scores inside the loss, see `shift_directions`; empty for none.
        guess: points from which the proximal points are searched, by default the student's fields.
    """
    w, y = score_fields(nodes, q, m, layer.teacher.rho + layer.noise)
    D = shift_directions(layer, nodes)
    inside = Inside(_shift(D, t), nodes.row)
    h = score_prox(layer, w, y, V, inside, guess)
    gradient, H, C = (at_nodes(fn)(layer, h, y, inside) for fn in (_score_gradient, _score_hessian, _score_cross))
    n = len(h)
    eye = jnp.eye(n, dtype=h.dtype)[..., None]
    matrix = eye + V * H
    # dg/dw = -(1 + V H)^-1 H and dg/dy = -(1 + V H)^-1 C
    solved = -ldl_solve(matrix, jnp.concatenate([H, C], 1))
    by_w, by_y = solved[:, :n], solved[:, n:]

    def mean(values: Array) -> Array:
        return jnp.sum(nodes.weight * values, -1)

    def trace(a: Array) -> Array:
        return total(a[i, i] for i in range(n))

    train_loss = mean(at_nodes(_score_loss)(layer, h, y, inside)) - layer.excess
    square = jnp.sum(gradient**2, 0)
    twice = total(by_w[i, j] * by_w[j, i] for i in range(n) for j in range(n))
    means = ChannelAverages(
        moreau=train_loss + 0.5 * V * mean(square),
        train_loss=train_loss,
        information=-mean(trace(by_w)),
        signal=mean(trace(by_y)),
        force=mean(square),
        curvature=mean(twice),
        push=-mean(jnp.einsum("ikN,iN->kN", D, gradient)),
        stiffness=-mean(jnp.einsum("ikN,ijN,jlN->klN", D, by_w, D)),
        margin=lax.stop_gradient(jnp.min(determinant(matrix))),
    )
    return means, h


def response(layer: Layer, h: Array, y: Array, V: Array, inside: Inside) -> tuple[Float[Array, "n N"], Array]:
    """Return what message passing needs at proximal points h: g, and - Tr dg / dw at every node, (N,)."""
    H = at_nodes(_score_hessian)(layer, h, y, inside)
    n = len(h)
    solved = ldl_solve(jnp.eye(n, dtype=h.dtype)[..., None] + V * H, H)
    return -at_nodes(_score_gradient)(layer, h, y, inside), total(solved[i, i] for i in range(n))


def second_start(
    layer: Layer, nodes: WideNodes, q: Array, m: Array, V: Array, t: Float[Array, " k"], points: Array
) -> tuple[Float[Array, "n N"], Float[Array, ""]]:
    """Return proximal points, or those that are found from the fields where they are lower, and their share if unequal.

    The loss of softmax rows is flat far from zero. A search from the student's fields then ends nearby although another
    point may be lower, and a search from zero can miss a point near the fields. Of 150,000 nodes with V beta^2 up to
    200, the two starts together miss the lowest point at two, the fields alone at 97.
    """
    w, y = score_fields(nodes, q, m, layer.teacher.rho + layer.noise)
    inside = Inside(_shift(shift_directions(layer, nodes), t), nodes.row)

    other, value = score_prox(layer, w, y, V, inside), _prox_energy(points, layer, w, y, V, inside)
    unit = jnp.max(jnp.abs(w), 0) + jnp.sqrt(layer.teacher.rho)
    differ = jnp.max(jnp.abs(other - points), 0) > _APART * unit
    is_lower = differ & (
        _prox_energy(other, layer, w, y, V, inside) < value - tolerance(_SAME, 1e3, w) * jnp.abs(value)
    )
    return jnp.where(is_lower, other, points), jnp.sum(nodes.weight * differ) / len(nodes.row)


def tolerance(least: float, units: float, a: Array) -> float:
    """Return a tolerance for numbers like a: `least`, or so many units in the last place if these are larger."""
    return max(least, units * float(jnp.finfo(a.dtype).eps))


def _shift(D: Float[Array, "n k N"], t: Float[Array, " k"]) -> Float[Array, "n N"]:
    return jnp.einsum("ikN,k->iN", D, t)


def test_error(layer: Layer, nodes: WideNodes, q: Array, m: Array, t: Float[Array, " k"]) -> Array:
    """Return the loss on fresh sentences without noise."""
    w, y = score_fields(nodes, q, m, layer.teacher.rho)
    inside = Inside(_shift(shift_directions(layer, nodes), t), nodes.row)
    return jnp.sum(nodes.weight * at_nodes(_score_loss)(layer, w, y, inside)) - layer.excess


def score_prox(
    layer: Layer, w: Array, y: Array, V: Array, inside: Inside, guess: Array | None = None
) -> Float[Array, "n N"]:
    """Return the proximal points, with their implicit derivatives.

    Newton's method for h - w + V dloss/dh = 0 with the damping of Levenberg and Marquardt where the energy increases.
    """
    problem = layer_, w_, y_, V_, inside_ = lax.stop_gradient((layer, w, y, V, inside))
    n = len(w)
    eye = jnp.eye(n, dtype=w.dtype)[..., None]
    least, tol = tolerance(_ROUNDING, 1e3, w), tolerance(_PROX_TOL, 20.0, w)
    unit = jnp.sqrt(jnp.mean(y_**2)) + jnp.max(jnp.abs(w_), 0)

    def body(state: tuple) -> tuple:
        h, value, damping, _, count = state
        residual = _prox_residual(h, *problem)
        matrix = (1 + damping) * eye + V_ * at_nodes(_score_hessian)(layer_, h, y_, inside_)
        step = ldl_solve(matrix, residual, 0.1 * jnp.ones(n, w.dtype))
        length = jnp.max(jnp.abs(step), 0) / unit
        trial = h - step
        new = _prox_energy(trial, *problem)
        better = (new <= value) | (length < least)
        damping = jnp.where(better, jnp.where(damping > 1e-3, damping / 8, 0.0), jnp.maximum(4 * damping, 1.0))
        is_done = jnp.all(length <= tol)
        return jnp.where(better, trial, h), jnp.where(better, new, value), damping, is_done, count + 1

    first = w_ if guess is None else lax.stop_gradient(guess)
    start = (first, _prox_energy(first, *problem), jnp.zeros_like(w_[0]), jnp.asarray(False), 0)
    h = lax.while_loop(lambda s: ~s[3] & (s[4] < _PROX_STEPS), body, start)[0]
    return with_root(_prox_residual, h, layer, w, y, V, inside, solve=_prox_solve)


def _prox_energy(h: Array, layer: Layer, w: Array, y: Array, V: Array, inside: Inside) -> Float[Array, " N"]:
    """Return V loss + |h - w|^2 / 2, which the proximal points minimise."""
    return V * at_nodes(_score_loss)(layer, h, y, inside) + 0.5 * jnp.sum((h - w) ** 2, 0)


def _prox_residual(h: Array, layer: Layer, w: Array, y: Array, V: Array, inside: Inside) -> Float[Array, "n N"]:
    """Return the gradient of the energy."""
    return h - w + V * at_nodes(_score_gradient)(layer, h, y, inside)


def _prox_solve(
    change: Array, h: Array, layer: Layer, w: Array, y: Array, V: Array, inside: Inside
) -> Float[Array, "n N"]:
    """Return the steps that change the residual by `change`."""
    matrix = jnp.eye(len(h), dtype=h.dtype)[..., None] + V * at_nodes(_score_hessian)(layer, h, y, inside)
    return ldl_solve(matrix, change[:, None])[:, 0]


def at_nodes(fn: Any) -> Any:
    """Map a function of one node over the last axis of the fields."""
    return lambda layer, h, y, inside: nodewise(fn)(layer, h + inside.shift, y, inside.row)


def _score_loss(layer: Layer, h: Array, y: Array, row: Array) -> Array:
    return layer.node_loss(h, y, row)


_score_gradient = jax.grad(_score_loss, 1)
_score_hessian = jax.hessian(_score_loss, 1)
_score_cross = jax.jacfwd(_score_gradient, 2)
