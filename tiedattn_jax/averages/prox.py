"""The proximal operator of the loss: the global minimiser, at very many nodes at once.

For a node with student field ``h`` and teacher field ``Y`` the Moreau envelope of the loss is

    min_Z  1/2 sum_l (z_l - h_l)^T V_l^{-1} (z_l - h_l) + loss(Z, Y)

and its minimiser is the proximal operator, the resolvent of eq. (9) of the paper. The loss is not convex: it is a
double well wherever the target attends to itself more than the quadratic can hold. There a node is solved from several
starts, and the lowest minimum wins. The minimiser therefore *jumps* where two minima have equal energy; the envelope
stays continuous.

Arrays carry the node axis last, `(L, r, N)`; see `nodewise`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..derivatives import derivative_along, with_tangent
from ..linalg import apply, definite, inverse, ldl_solve, matvec, precise, total
from ..model import Model
from .loops import counted, repeat
from .nodewise import nodewise

_POWER_STEPS = 4  # of the power method for a start: Newton's method finds the well from a rough axis
_COMMON_STEPS = 4  # of Newton's method, which all nodes take together and which serve nearly every one
_SLOW = 128  # lanes next to given minima that are finished together
# Share of V^{-1} with which a Hessian at zero counts as positive. Wells may part before it is not: of 400,000 nodes
# with small fields, in 47 states of two to six tokens, two had two minima where it was positive with .89 and .86.
_NEARLY = 0.75
_MAX_STEPS = 60  # of Newton's method, where loops have a condition; `_COUNTED` where they have none
# Of those that all nodes take, from any start and for the refinement of a minimum in single precision. At 14 states
# (alpha from .5 to 3, both branches, 8,192 nodes) the slowest of 688,128 starts took 26 and 27 steps in single and
# double precision, and a refinement one.
_COUNTED, _REFINED = 32, 4
_UNROLL = 8  # steps of the power method, a few products each, in one pass of a counted loop
_ALL_COLUMNS = 8  # of a Hessian: those of more fields are computed one by one, for the caches hold no more than one


def _loss(model: Model, Z: jax.Array, Y: jax.Array) -> jax.Array:
    # Constants of a layer may be of another precision than the fields.
    return jnp.asarray(model.loss(Z, *model.label(Y))).astype(Z.dtype)


def _along(model: Model, Z: jax.Array, Y: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss, gradient, and the derivative of the gradient along d, all but the loss (L, r)."""
    (value, gradient), (_, change) = jax.jvp(lambda Z: jax.value_and_grad(_loss, 1)(model, Z, Y), (Z,), (d,))
    return value, gradient, change


def _expansion(model: Model, Z: jax.Array, Y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss, gradient (L, r) and Hessian (n, L, r), from one pass."""
    along = functools.partial(_along, model, Z, Y)
    return jax.vmap(along, out_axes=(None, None, 0))(_basis(Z))


def _basis(Z: jax.Array) -> jax.Array:
    """Of fields (L, r, ...), all along one entry each, (n, L, r)."""
    shape = Z.shape[:2]
    return jnp.eye(math.prod(shape), dtype=Z.dtype).reshape(-1, *shape)


loss_at_nodes = nodewise(_loss)
gradient_at_nodes = nodewise(jax.grad(_loss, 1))
_along_at_nodes = nodewise(_along)
_all_at_nodes = nodewise(_expansion)


def expansion_at_nodes(model: Model, Z: jax.Array, Y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss (N,), gradient (L, r, N) and Hessian (n, n, N) with n = L r; column by column where n is large."""
    n = Z.shape[0] * Z.shape[1]
    if n <= _ALL_COLUMNS:
        value, gradient, hessian = _all_at_nodes(model, Z, Y)
        return value, gradient, hessian.reshape(n, n, -1)

    def column(_: Any, d: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        value, gradient, change = _along_at_nodes(model, Z, Y, jnp.broadcast_to(d[..., None], Z.shape))
        return (value, gradient), change.reshape(n, -1)

    (value, gradient), hessian = lax.scan(column, (jnp.zeros_like(Z[0, 0]), jnp.zeros_like(Z)), _basis(Z))
    return value, gradient, hessian


class Prox(eqx.Module):
    """Global minimisers at N nodes."""

    z: jax.Array  # the proximal operator, (L, r, N)
    converged: jax.Array  # whether Newton's method met its tolerance, (N,)
    other: jax.Array  # the best other minimum, (L, r, N); the proximal operator itself where none was found
    gap: jax.Array  # its energy above the global minimum, (N,); infinite where there is none


def moreau(model: Model, z: jax.Array, h: jax.Array, V: jax.Array, y: jax.Array) -> jax.Array:
    """The objective whose minimum over `z` is the Moreau envelope.

    Args:
        model: gives `loss`.
        z, h: student fields, (L, r, N).
        V: response, (L, r, r).
        y: teacher fields, (L, t, N).

    Returns:
        (N,) values.
    """
    d = z - h
    return 0.5 * total(total(d * apply(inverse(V), d))) + loss_at_nodes(model, z, y)


def prox_gradient(model: Model, z: jax.Array, h: jax.Array, V: jax.Array, y: jax.Array) -> jax.Array:
    """Gradient of `moreau` in `z`, (L, r, N): zero at the proximal operator."""
    return apply(inverse(V), z - h) + gradient_at_nodes(model, z, y)


def prox(model: Model, h: jax.Array, V: jax.Array, y: jax.Array, near: jax.Array | None = None) -> Prox:
    """Proximal operator of the loss at `N` nodes, with its derivative by the implicit function theorem.

    The derivative is that of the minimum on its own sheet. Where the minimiser jumps between two sheets, an average
    over nodes has one more term in its derivative, which no derivative taken node by node contains.

    Args:
        model: gives `loss(Z, Y)`.
        h: (L, r, N) student fields.
        V: (L, r, r) response, positive definite for every token.
        y: (L, t, N) teacher fields.
        near: optional extra starts, (K, L, r, N), for instance the minimisers of a neighbouring problem.

    Returns:
        A `Prox`; differentiable in the model's numbers, `h`, `V` and `y` in both modes.
    """
    found = search(*lax.stop_gradient((model, h, V, y)), near)
    return eqx.tree_at(lambda p: p.z, found, attach(found.z, model, h, V, y))


def prox_jacobian(model: Model, z: jax.Array, V: jax.Array, y: jax.Array) -> jax.Array:
    """Derivative dz/dh of the proximal operator on its own sheet, (n, n, N) with n = L r and tokens outermost."""
    hess, precision = moreau_hessian(model, z, V, y)
    return ldl_solve(hess, jnp.broadcast_to(precision, hess.shape))


def moreau_hessian(model: Model, z: jax.Array, V: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hessian of `moreau` in z, (n, n, N) with n = L r, and the part of it that is V^{-1}, (n, n, 1)."""
    precision = _precision(V)
    return expansion_at_nodes(model, z, y)[2] + precision, precision


class Expansion(eqx.Module):
    """`moreau` at points z to second order; n = L r."""

    loss: jax.Array  # one of its two parts, (N,)
    quadratic: jax.Array  # the other one, (N,)
    slope: jax.Array  # (n, N)
    hessian: jax.Array  # (n, n, N)


def expand(model: Model, z: jax.Array, h: jax.Array, V: jax.Array, y: jax.Array) -> Expansion:
    """`moreau` to second order, from one evaluation of the loss, its gradient and its Hessian.

    Args:
        z, h: flattened over tokens and columns, (n, N).
    """
    L, r, n = V.shape[0], V.shape[1], z.shape[0]
    value, grad, hess = expansion_at_nodes(model, z.reshape(L, r, -1), y)
    precision, d = _precision(V), z - h
    pull = matvec(precision, d)
    return Expansion(value, 0.5 * total(pull * d), grad.reshape(n, -1) + pull, hess + precision)


def least_pivots(V: jax.Array) -> jax.Array:
    """Below these, (n,), pivots of a Hessian of `moreau` are raised where a step has to descend."""
    precision = _precision(V)[..., 0]
    return 1e-3 * jnp.stack([precision[k, k] for k in range(len(precision))])


def _precision(V: jax.Array) -> jax.Array:
    """V^{-1} of all tokens, (n, n, 1) with n = L r."""
    return jax.scipy.linalg.block_diag(*inverse(V))[..., None]


@with_tangent
def attach(primals: Any, tangents: Any) -> jax.Array:
    """Solved minimisers `z` (L, r, N), given their derivative in the model's numbers, `h`, `V` and `y`."""
    z, model, _, V, y = primals
    force = derivative_along(lambda model, *p: prox_gradient(model, z, *p), primals[1:], tangents[1:])
    hess, _ = moreau_hessian(model, z, V, y)
    # The inverse, and not a solve: where there are many tangents, all take the same one.
    unit = jnp.broadcast_to(jnp.eye(len(hess), dtype=z.dtype)[..., None], hess.shape)
    return -matvec(ldl_solve(hess, unit), force.reshape(len(hess), -1)).reshape(z.shape)


def search(model: Model, h: jax.Array, V: jax.Array, y: jax.Array, near: jax.Array | None = None) -> Prox:
    """`prox` without derivatives."""
    # Which minimum is the lowest is settled in single precision, at half the cost; its place is then refined.
    top, second, gap = lowest_minima(model, h, V, y, near)
    z, _, converged = descend(model, top, h, V, y, _tolerance(h.dtype), count=_REFINED)
    return Prox(z, converged, jnp.where(jnp.isfinite(gap), second, z), gap)


def proximal(
    model: Model, h: jax.Array, V: jax.Array, y: jax.Array, origin: Origin | None = None
) -> tuple[jax.Array, jax.Array]:
    """The proximal operator (L, r, N) alone, and whether the search converged, (N,); without derivatives."""
    if counted():  # from every start in single precision, the lowest minimum in full
        top = lowest_minima(model, h, V, y, origin=origin)[0]
        z, _, done = descend(model, top, h, V, y, _tolerance(h.dtype), count=_REFINED)
        return z, done
    z, energy, done = _minima(model, h, V, y, None, _tolerance(h.dtype), origin)
    lowest = jnp.argmin(energy, 0)
    return pick(z, lowest), pick(done, lowest)


def local_minima(model: Model, z: jax.Array, h: jax.Array, V: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The minima (L, r, N) next to z, and their energies: a few steps for all, and small groups of what needs more.

    To ten digits: the last step of Newton's method squares the error.
    """
    tol = 1e-5
    if counted():
        return descend(model, z, h, V, y, tol)[:2]
    z, energy, done = descend(model, z, h, V, y, tol, _COMMON_STEPS)

    def finish(at: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        return descend(model, at(z), at(h), V, at(y), tol)[:2]

    return in_groups(finish, (z, energy), ~done, _SLOW)


def _tolerance(dtype: Any) -> float:
    """Of a Newton step, whose square is then rounding."""
    return 4 * float(jnp.finfo(dtype).eps) ** 0.5


class Origin(NamedTuple):
    """The loss to second order where the student's fields are zero, which depends on the teacher's only; n = L r."""

    slope: jax.Array  # (L, r, N)
    curvature: jax.Array  # (n, n, N)
    axis: jax.Array  # unit vectors along which there is the double well, (L, r, N)


def origin_of(model: Model, y: jax.Array, rank: int, steps: int) -> Origin:
    """The `Origin` at teacher fields (L, t, N), its axis from so many steps of the power method."""
    zero = jnp.zeros((y.shape[0], rank, y.shape[-1]), y.dtype)
    _, slope, curvature = expansion_at_nodes(model, zero, y)
    return Origin(slope, curvature, _lowest_axis(curvature, steps).reshape(zero.shape))


def lowest_minima(
    model: Model,
    h: jax.Array,
    V: jax.Array,
    y: jax.Array,
    near: jax.Array | None = None,
    origin: Origin | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lowest minimum at each node, the next one elsewhere, and how much higher it lies (infinite: there is none).

    In single precision, to about three digits, without derivatives.

    Args:
        near: extra starts, (K, L, r, N).
        origin: where it is known.
    """
    dtype = h.dtype
    model, h, V, y, near, origin = jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a,
        (model, h, V, y, near, origin),
    )
    z, energy, _ = _minima(model, h, V, y, near, 1e-3, origin)
    top = pick(z, jnp.argmin(energy, 0))
    above = jnp.where(jnp.max(jnp.abs(z - top), (1, 2)) > 1e-2, energy - jnp.min(energy, 0), jnp.inf)
    second = pick(z, jnp.argmin(above, 0))
    return top.astype(dtype), second.astype(dtype), jnp.min(above, 0).astype(dtype)


def _minima(
    model: Model,
    h: jax.Array,
    V: jax.Array,
    y: jax.Array,
    near: jax.Array | None,
    tol: float,
    origin: Origin | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Minima from K starts at each node, (K, L, r, N), their energies and whether they converged, (K, N).

    A few steps from the field itself serve nearly every node. What is left is gathered, one lane for every start and
    node, and finished in small groups, because otherwise one slow lane would keep all of them waiting: the nodes that
    need more steps, and the other starts where they matter. Elsewhere their energy is infinite.

    With `counted` loops all starts are finished, side by side.
    """
    L, r, size = h.shape
    origin = origin_of(model, y, r, _POWER_STEPS) if origin is None else origin
    well = jnp.asarray(model.field_scale, h.dtype) * origin.axis
    others = jnp.concatenate([jnp.stack([well, -well]), _flips(model, h), *([] if near is None else [near])])

    def matter(energy: jax.Array) -> jax.Array:
        """Whether the other starts matter, where the energies (N,) of the minima from the fields are known."""
        wells = jnp.tile(_wells_matter(model, h, V, origin), (2, 1))
        rest = () if near is None else (jnp.ones((len(near), size), bool),)
        return jnp.concatenate([wells, _flips_matter(model, h, V, energy), *rest])

    def split(z: jax.Array, energy: jax.Array, done: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.moveaxis(z.reshape(L, r, -1, size), 2, 0), energy.reshape(-1, size), done.reshape(-1, size)

    def joined(starts: jax.Array) -> jax.Array:
        return jnp.moveaxis(starts, 0, 2).reshape(L, r, -1)

    if counted():
        count = 1 + len(others)
        lanes = joined(jnp.concatenate([h[None], others]))
        fields, teacher = jnp.tile(h, count), jnp.tile(y, count)
        z, energy, done = split(*descend(model, lanes, fields, V, teacher, tol))
        return z, energy.at[1:].set(jnp.where(matter(energy[0]), energy[1:], jnp.inf)), done

    z, energy, done = descend(model, h, h, V, y, tol, _COMMON_STEPS)

    def finish(at: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        return descend(model, at(lanes), at(h), V, at(y), tol)

    lanes = joined(jnp.concatenate([z[None], others]))
    left = jnp.concatenate([~done[None], matter(energy)]).ravel()
    blank = jnp.full(len(others) * size, jnp.inf, energy.dtype)
    old = lanes, jnp.concatenate([energy, blank]), jnp.tile(done, 1 + len(others))
    group = max(256 if L * r == 2 else 16, 3 * size // 16)  # so few lanes that the slowest keeps few waiting
    return split(*in_groups(finish, old, left, group))


def pick(z: jax.Array, which: jax.Array) -> jax.Array:
    """One of K values (K, ..., N) at every node."""
    return functools.reduce(lambda a, k: jnp.where(which == k, z[k], a), range(1, z.shape[0]), z[0])


def _normals(L: int) -> np.ndarray:
    """Of the planes where one token vanishes, or two are equal, (K, L): there hard attention flips."""
    eye = np.eye(L)
    return np.stack([*eye, *((eye[k] - eye[l]) / 2**0.5 for k in range(L) for l in range(k))])


@precise
def _flips(model: Model, h: jax.Array) -> jax.Array:
    """The projections of h to these planes, (K, L, r, N); its reflections there, and -h, for a loss with kinks."""
    normals = jnp.asarray(_normals(h.shape[0]), h.dtype)
    away = jnp.einsum("kl,krn->klrn", normals, jnp.einsum("kl,lrn->krn", normals, h))
    return jnp.concatenate([h - 2 * away, -h[None]]) if model.kinked else h - away


def _wells_matter(model: Model, h: jax.Array, V: jax.Array, origin: Origin) -> jax.Array:
    """The nodes, (N,), where there may be a second well, from the loss's gradient and Hessian at zero.

    A well of an even loss splits in two around zero: there is one where the Hessian of `moreau` is positive there, and
    by some margin, unless the student's fields are large. A loss whose slope at zero is not zero is not even.
    """
    split = ~definite(origin.curvature + _precision(V / _NEARLY))
    return split | jnp.any(origin.slope != 0, (0, 1)) | _large(model, h, 1.5)


@precise
def _flips_matter(model: Model, h: jax.Array, V: jax.Array, energy: jax.Array) -> jax.Array:
    """From which of `_flips` a lower minimum may be found than one whose energy is known, (K, N).

    Where the student's fields are large, attention is hard and the loss flat but for steps, beyond which Newton's
    method does not look. A minimum beyond a step costs at least the way of one column to the plane. Where one plane
    costs less than is known, others find minima, too: those up to four times as far in cost, and on the way to which a
    score changes by more than one, as there is no step otherwise. That tries half as many starts as all planes, and of
    4,096 nodes each at ten settings of two to eight tokens loses none.
    """
    normals, hard = jnp.asarray(_normals(h.shape[0]), h.dtype), jnp.asarray(model.field_scale, h.dtype) ** 2
    away, spread = jnp.einsum("kl,lrn->krn", normals, h), jnp.einsum("kl,lrr->kr", normals**2, V)
    cost = jnp.min(0.5 * away**2 / spread[..., None], 1)
    change = jnp.max(jnp.abs(h), (0, 1)) * jnp.max(jnp.abs(away), 1)
    matter = jnp.any(cost < energy, 0) & (cost < 4 * energy)
    if model.kinked:
        return jnp.concatenate([matter, jnp.any(matter, 0)[None]])
    return matter & _large(model, h, 3.0) & (change > hard)


def _large(model: Model, h: jax.Array, bound: float) -> jax.Array:
    """Whether the square of a token's fields, its score with itself, is above a bound, (N,);
    always for a loss with kinks.
    """
    return jnp.max(jnp.sum(h**2, 1), 0) > (0 if model.kinked else bound * jnp.asarray(model.field_scale, h.dtype) ** 2)


def reference_axis(n: int) -> np.ndarray:
    """A unit vector to the side of which all well axes lie: the start of `well_axis`."""
    v = np.linspace(1.0, -0.8, n)
    return v / np.linalg.norm(v)


def well_axis(model: Model, y: jax.Array, rank: int, steps: int) -> jax.Array:
    """Unit vectors (L, r, N) along which the loss has its double well: the lowest eigenvector of its Hessian at zero.

    Args:
        y: teacher fields, (L, t, N).
        rank: r.
        steps: of the power method.
    """
    return origin_of(model, y, rank, steps).axis


def _lowest_axis(hess: jax.Array, steps: int) -> jax.Array:
    """Lowest eigenvectors (n, N) of symmetric matrices (n, n, N), by the power method."""
    # The spectral radius is at most the largest row sum.
    norm = jnp.max(total(jnp.abs(hess)), 0)
    # Any axis will do where the Hessian vanishes, as for a purely semantic target at y = 0.
    norm = jnp.where(norm > 0, norm, 1.0)

    def step(_: int, v: jax.Array) -> jax.Array:
        moved = norm * v - matvec(hess, v)
        square = total(moved**2)
        # Where all eigenvalues are alike nothing is left, and any axis will do again.
        return jnp.where(square > 0, moved / jnp.sqrt(square + jnp.finfo(hess.dtype).tiny), v)

    start = jnp.asarray(reference_axis(len(hess)), hess.dtype)[:, None]
    unroll = min(_UNROLL, steps) if counted() else 1
    return lax.fori_loop(0, steps, step, jnp.broadcast_to(start, hess.shape[1:]), unroll=unroll)


def in_groups(
    finish: Callable[[Callable[[jax.Array], jax.Array]], tuple], old: tuple, left: jax.Array, group: int
) -> tuple:
    """Arrays (..., N) with what `finish` gives at the lanes that are `left`, (N,), so many of them at a time.

    A group that is not full takes lanes beyond the last one, whose values are dropped. The loop over the groups has a
    condition on accelerators, too: it mostly ends after one group, and on an H100 to finish all lanes instead was three
    quarters of an evaluation.

    Args:
        finish: of a function that takes the lanes of a group out of arrays (..., M), where lane k of N has the value
            at k modulo M.
    """
    size = left.shape[-1]
    count = jnp.sum(left)
    lanes = jnp.pad(jnp.nonzero(left, size=size, fill_value=size)[0], (0, group), constant_values=size)

    def body(state: tuple) -> tuple:
        k, old = state
        some = lax.dynamic_slice_in_dim(lanes, k, group)
        new = finish(lambda a: jnp.take(a, some % a.shape[-1], axis=-1))
        return k + group, tuple(a.at[..., some].set(b, mode="drop") for a, b in zip(old, new, strict=True))

    return lax.while_loop(lambda state: state[0] < count, body, (jnp.zeros_like(count), old))[1]


def descend(
    model: Model,
    z: jax.Array,
    h: jax.Array,
    V: jax.Array,
    y: jax.Array,
    tol: float,
    steps: int = _MAX_STEPS,
    *,
    count: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Local minima of `moreau` by safeguarded Newton steps, all lanes together.

    A step solves with the Hessian's pivots made positive, so that it always descends, and is cut by four at the nodes
    where the energy rose. One evaluation of the loss, its gradient and its Hessian a step.

    Args:
        steps: at most, where loops have a condition.
        count: steps where they are `counted`.

    Returns:
        The minimisers (L, r, N), their energies (N,), and whether they converged, (N,).
    """
    centre, floor = h.reshape(-1, h.shape[-1]), least_pivots(V)

    def small(z: jax.Array, step: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(step), 0) <= tol * (0.1 + jnp.max(jnp.abs(z), 0))

    def body(state: tuple) -> tuple:
        z, energy, step, cut = state
        trial = z + cut * step
        at = expand(model, trial, centre, V, y)
        reached, rounding = at.loss + at.quadratic, 64 * jnp.finfo(z.dtype).eps * (jnp.abs(at.loss) + at.quadratic)
        down = reached <= energy + rounding  # energies equal to rounding say nothing against a step
        return (
            jnp.where(down, trial, z),
            jnp.where(down, reached, energy),
            jnp.where(down, ldl_solve(at.hessian, -at.slope, floor), step),
            jnp.where(down, 1.0, 0.25 * cut).astype(z.dtype),
        )

    def unfinished(state: tuple) -> jax.Array:
        z, _, step, _ = state
        return ~small(z, step)

    # The first pass of the loop only evaluates: its step is zero, and any energy is below infinity.
    flat = z.reshape(centre.shape)
    blank = jnp.full_like(flat[0], jnp.inf)
    state = (flat, blank, jnp.zeros_like(flat), jnp.ones_like(blank))
    count = _COUNTED if count is None else count
    flat, energy, step, _ = repeat(body, state, unfinished, steps + 1, count=count + 1, least=1)
    done = small(flat, step)
    flat = flat + jnp.where(done, step, 0.0)  # the last step is free, and squares the error
    return flat.reshape(z.shape), energy, done
