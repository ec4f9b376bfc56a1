"""The proximal operator of the loss at very many nodes at once: the minima of the proximal energy, and the lowest one.

# notation: at a node, h (L, r) and y (L, t) are the fields of student and teacher, and V (L, r, r) is the response.

For a node with student field ``h`` and teacher field ``y`` the Moreau envelope of the loss is

    min_z  1/2 sum_l (z_l - h_l)^T V_l^{-1} (z_l - h_l) + loss(z, y)

and its minimiser is the proximal operator, the resolvent of eq. (9) of the paper; see `ProxProblem`. The loss is not
convex. The sum is a double well where the target attends to itself so strongly that the quadratic term does not make it
convex. Such a node is solved by Newton's method from several starts, and the lowest minimum wins. The minimiser
therefore *jumps* where two minima have equal energy; the envelope stays continuous.

A *descent* is the search of one node from one start. Arrays carry the axis of the nodes, or of the descents, last:
`(L, r, N)`, see `nodewise`. Loops are `counted`, that is, of a fixed number of steps, on all devices but CPUs; see
`program`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..base.arrays import definite, ldl_solve, matvec, precise, total
from ..model.model import Model
from .moreau import ProxProblem, expansion_at_nodes, inverse_response, with_implicit_derivative
from .program import counted, loop, repeat

_POWER_STEPS = 4  # power iterations for a start: Newton's method finds the well from a rough axis
_COMMON_STEPS = 4  # Newton steps that all nodes take together; they suffice for nearly every node
_SLOW_GROUP = 128  # descents that `local_minima` finishes together
# A node has a single well if the Hessian of the loss at zero plus this share of V^{-1} is positive definite. The full
# V^{-1} would not do, because a well can split while the Hessian is still positive definite. Measured on 400,000 nodes
# with small fields, in 47 states of two to six tokens: two nodes had two minima although the Hessian was positive
# definite with shares of .89 and .86.
_CONVEX_SHARE = 0.75
_MAX_STEPS = 60  # largest number of Newton steps in a loop that ends by a condition
# Numbers of Newton steps in counted loops: from any start, and to refine a minimum from single precision. Measured at
# 14 states (alpha from .5 to 3, both branches, 8,192 nodes): the slowest of 688,128 starts took 26 steps in single
# precision and 27 in double precision; a refinement took one step.
_COUNTED_STEPS, REFINE_STEPS = 32, 4


def local_minima(
    problem: ProxProblem, z: Float[Array, "L r N"], h: Float[Array, "L r N"]
) -> tuple[Float[Array, "L r N"], Float[Array, " N"]]:
    """Return the minimum that a descent from z reaches, and its energy, at every node.

    All nodes take a few Newton steps; those that need more are finished in small groups. The minima have ten digits,
    because the last Newton step squares the error.
    """
    tol = 1e-5
    if counted():
        return descend(problem, z, h, tol)[:2]
    z, energy, converged = descend(problem, z, h, tol, _COMMON_STEPS)

    def finish(take: Callable[[Array], Array]) -> tuple[Array, ...]:
        return descend(problem.map_nodes(take), take(z), take(h), tol)[:2]

    z, energy = in_groups(finish, (z, energy), ~converged, _SLOW_GROUP)
    return z, energy


def newton_tolerance(dtype: DTypeLike) -> float:
    """Return the relative size of a Newton step at which to stop: the error after it is of the size of rounding."""
    return 4 * float(jnp.finfo(dtype).eps) ** 0.5


class Origin(NamedTuple):
    """Expansion of the loss around zero student fields; n = L r.

    It depends on the teacher's fields only, so one expansion serves all student fields of a node.
    """

    slope: Float[Array, "L r N"]  # gradient
    curvature: Float[Array, "n n N"]  # Hessian
    axis: Float[Array, "L r N"]  # unit eigenvector of the lowest eigenvalue: a double well lies along it


def origin_of(model: Model, y: Float[Array, "L t N"], rank: int, steps: int) -> Origin:
    """Return the `Origin` at teacher fields y.

    Args:
        rank: number r of columns of the student.
        steps: power iterations for its axis.
    """
    zero = jnp.zeros((y.shape[0], rank, y.shape[-1]), y.dtype)
    _, slope, curvature = expansion_at_nodes(model, zero, y)
    return Origin(slope, curvature, _lowest_axis(curvature, steps).reshape(zero.shape))


def lowest_minima(
    problem: ProxProblem,
    h: Float[Array, "L r N"],
    extra_starts: Float[Array, "starts L r N"] | None = None,
    origin: Origin | None = None,
) -> tuple[Float[Array, "L r N"], Float[Array, "L r N"], Float[Array, " N"]]:
    """Return the lowest minimum at each node, the second lowest, and the energy gap (infinite if there is only one).

    The search runs in single precision, to about three digits. The result has no derivatives.

    Args:
        extra_starts: points to descend from, besides those that this module chooses.
        origin: the `Origin`, if it is known already.
    """
    dtype = h.dtype
    problem, h, extra_starts, origin = jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a,
        (problem, h, extra_starts, origin),
    )
    z, energy, _ = minima_from_all_starts(problem, h, extra_starts, 1e-3, origin)
    lowest = pick(z, jnp.argmin(energy, 0))
    is_other = jnp.max(jnp.abs(z - lowest), (1, 2)) > 1e-2 * problem.model.field_scale
    excess = jnp.where(is_other, energy - jnp.min(energy, 0), jnp.inf)
    second = pick(z, jnp.argmin(excess, 0))
    return lowest.astype(dtype), second.astype(dtype), jnp.min(excess, 0).astype(dtype)


def minima_from_all_starts(
    problem: ProxProblem,
    h: Float[Array, "L r N"],
    extra: Float[Array, "extra L r N"] | None,
    tol: float,
    origin: Origin | None,
) -> tuple[Float[Array, "starts L r N"], Float[Array, "starts N"], Bool[Array, "starts N"]]:
    """Return minima from several starts at each node, their energies and whether they converged.

    The starts are h itself, both sides of the double well, the points of `_flips`, and `extra`. The first one is tried
    at every node, where a few steps mostly suffice. The others are tried only where they may lead to a lower minimum;
    elsewhere their energy is infinite. All descents that remain are finished in small groups, because in a large group
    a single slow one keeps all others waiting.

    With `counted` loops all starts are finished side by side.

    Args:
        extra: further starts, tried at every node.
        tol: as in `descend`.
        origin: the `Origin`, if it is known already.
    """
    model, (L, r, size) = problem.model, h.shape
    origin = origin_of(model, problem.y, r, _POWER_STEPS) if origin is None else origin
    well = jnp.asarray(model.field_scale, h.dtype) * origin.axis
    other_starts = jnp.concatenate([jnp.stack([well, -well]), _flips(model, h), *([] if extra is None else [extra])])

    def relevance(energy: Float[Array, " N"]) -> Bool[Array, "other_starts N"]:
        """Return which other starts may lead to lower minima than those from h, whose energies are given."""
        wells = jnp.tile(_wells_matter(problem, h, origin), (2, 1))
        extra_matter = () if extra is None else (jnp.ones((len(extra), size), bool),)
        return jnp.concatenate([wells, _flips_matter(problem, h, energy), *extra_matter])

    def split(
        z: Float[Array, "L r descents"], energy: Float[Array, " descents"], converged: Bool[Array, " descents"]
    ) -> tuple[Float[Array, "starts L r N"], Float[Array, "starts N"], Bool[Array, "starts N"]]:
        return jnp.moveaxis(z.reshape(L, r, -1, size), 2, 0), energy.reshape(-1, size), converged.reshape(-1, size)

    def join(starts: Float[Array, "starts L r N"]) -> Float[Array, "L r starts*N"]:
        return jnp.moveaxis(starts, 0, 2).reshape(L, r, -1)

    if counted():
        count = 1 + len(other_starts)
        all_starts = join(jnp.concatenate([h[None], other_starts]))
        repeat_nodes = functools.partial(jnp.tile, reps=count)
        z, energy, converged = split(*descend(problem.map_nodes(repeat_nodes), all_starts, repeat_nodes(h), tol))
        return z, energy.at[1:].set(jnp.where(relevance(energy[0]), energy[1:], jnp.inf)), converged

    z, energy, converged = descend(problem, h, h, tol, _COMMON_STEPS)

    def finish(take: Callable[[Array], Array]) -> tuple[Array, ...]:
        return descend(problem.map_nodes(take), take(all_starts), take(h), tol)

    all_starts = join(jnp.concatenate([z[None], other_starts]))
    pending = jnp.concatenate([~converged[None], relevance(energy)]).ravel()
    no_energy = jnp.full(len(other_starts) * size, jnp.inf, energy.dtype)
    values = all_starts, jnp.concatenate([energy, no_energy]), jnp.tile(converged, 1 + len(other_starts))
    group = max(256 if L * r == 2 else 16, 3 * size // 16)  # small, so that a slow descent keeps few others waiting
    return split(*in_groups(finish, values, pending, group))


def pick(z: Shaped[Array, "values *shape N"], which: Int[Array, " N"]) -> Shaped[Array, "*shape N"]:
    """Return value number `which` of several values at every node."""
    return functools.reduce(lambda a, k: jnp.where(which == k, z[k], a), range(1, z.shape[0]), z[0])


def _plane_normals(L: int) -> Float[np.ndarray, "planes {L}"]:
    """Return unit normals of the planes z_l = 0 and z_k = z_l, on which hard attention flips: its argmax changes."""
    eye = np.eye(L)
    return np.stack([*eye, *((eye[k] - eye[l]) / 2**0.5 for k in range(L) for l in range(k))])


@precise
def _flips(model: Model, h: Float[Array, "L r N"]) -> Float[Array, "planes L r N"]:
    """Return starts near the planes of `_plane_normals`, on which attention flips.

    They are the projections of h onto these planes. A loss with kinks, where a token's fields change their sign, gets
    starts beyond its kinks instead: the reflections of h at the planes, and -h.
    """
    normals = jnp.asarray(_plane_normals(h.shape[0]), h.dtype)
    normal_part = jnp.einsum("kl,krn->klrn", normals, jnp.einsum("kl,lrn->krn", normals, h))
    return jnp.concatenate([h - 2 * normal_part, -h[None]]) if model.nonsmooth else h - normal_part


def _wells_matter(problem: ProxProblem, h: Float[Array, "L r N"], origin: Origin) -> Bool[Array, " N"]:
    """Return the nodes that may have a second well, judged by the loss's gradient and Hessian at zero.

    The energy of an even loss has a single well or a double well along `Origin.axis`. It has a single one if its
    Hessian at zero is positive definite by some margin, see `_CONVEX_SHARE`, and the student's fields are not large. A
    loss with a slope at zero is not even; its nodes always count as possible double wells.
    """
    may_split = ~definite(origin.curvature + inverse_response(problem.V / _CONVEX_SHARE))
    return may_split | jnp.any(origin.slope != 0, (0, 1)) | _has_large_fields(problem.model, h, 1.5)


@precise
def _flips_matter(
    problem: ProxProblem, h: Float[Array, "L r N"], energy: Float[Array, " N"]
) -> Bool[Array, "planes N"]:
    """Return which starts of `_flips` may lead to a minimum lower than the known `energy`.

    For large student fields the attention is nearly an argmax. The loss is then piecewise constant, and its jumps lie
    at the planes. Newton's method does not see them. A minimum behind a plane has at least the energy that the
    quadratic part needs to move one column of z from h to the plane: this is the cost of the plane. A start is tried if
    all of these hold:

    - The cheapest plane costs less than the known energy.
    - Its own plane costs less than four times that energy: once one plane is cheap, others lead to minima, too.
    - The fields are large, and a score changes by more than one on the way to the plane; otherwise nothing jumps there.

    For a loss with kinks the third condition is dropped, and -h is tried where any plane is. Checked on 4,096 nodes at
    each of ten settings of two to eight tokens: this tries half as many starts as all planes do, and loses no minimum.

    Args:
        energy: lowest energy known at each node.
    """
    model, V, _ = problem
    normals, threshold = jnp.asarray(_plane_normals(h.shape[0]), h.dtype), jnp.asarray(model.field_scale, h.dtype) ** 2
    distance, spread = jnp.einsum("kl,lrn->krn", normals, h), jnp.einsum("kl,lrr->kr", normals**2, V)
    cost = jnp.min(0.5 * distance**2 / spread[..., None], 1)
    change = jnp.max(jnp.abs(h), (0, 1)) * jnp.max(jnp.abs(distance), 1)
    relevant = jnp.any(cost < energy, 0) & (cost < 4 * energy)
    if model.nonsmooth:
        return jnp.concatenate([relevant, jnp.any(relevant, 0)[None]])
    return relevant & _has_large_fields(model, h, 3.0) & (change > threshold)


def _has_large_fields(model: Model, h: Float[Array, "L r N"], bound: float) -> Bool[Array, " N"]:
    """Return the nodes at which a token's score with itself, the square of its fields, exceeds `bound`.

    The unit of the score is the square of the model's `field_scale`. For a loss with kinks the bound is zero, so that
    every node counts.
    """
    return jnp.max(jnp.sum(h**2, 1), 0) > (
        0 if model.nonsmooth else bound * jnp.asarray(model.field_scale, h.dtype) ** 2
    )


def reference_axis(n: int) -> Float[np.ndarray, " {n}"]:
    """Return the unit vector from which the power iterations for the axis of an `Origin` start.

    It fixes the signs of the axes, because every one has a positive product with it.
    """
    v = np.linspace(1.0, -0.8, n)
    return v / np.linalg.norm(v)


def _lowest_axis(hess: Float[Array, "n n N"], steps: int) -> Float[Array, "n N"]:
    """Return the unit eigenvector of the lowest eigenvalue of every symmetric matrix, by the power method."""
    # No eigenvalue exceeds the largest row sum of absolute values, so norm - hess has the lowest eigenvector on top.
    norm = jnp.max(total(jnp.abs(hess)), 0)
    # Any axis will do where the Hessian vanishes, as for a purely semantic target at y = 0.
    norm = jnp.where(norm > 0, norm, 1.0)

    def step(_: Any, nodes: tuple[Array, Array], v: Float[Array, "n N"], __: None) -> tuple[Float[Array, "n N"], None]:
        hess, norm = nodes
        product = norm * v - matvec(hess, v)
        square = total(product**2)
        # If all eigenvalues are equal the product may vanish; then, too, any axis will do.
        return jnp.where(square > 0, product / jnp.sqrt(square + jnp.finfo(hess.dtype).tiny), v), None

    start = jnp.asarray(reference_axis(len(hess)), hess.dtype)[:, None]
    return loop(step, (hess, norm), jnp.broadcast_to(start, hess.shape[1:]), count=steps)[0]


def in_groups(
    finish: Callable[[Callable[[Array], Array]], tuple],
    values: tuple[Shaped[Array, "... N"], ...],
    pending: Bool[Array, " N"],
    group: int,
) -> tuple[Shaped[Array, "... N"], ...]:
    """Replace values at the entries that are `pending` by those of `finish`, group by group.

    The last group is filled up with entries that do not exist; their values are dropped. The loop ends when no entry is
    pending, on accelerators, too, because mostly one group suffices. On an H100, finishing all entries instead took
    three quarters of an evaluation.

    Args:
        finish: returns the new values of one group. Its argument is a function that takes the entries of the group out
            of an array (..., M). Entry k takes the value at k modulo M: with M nodes and N = starts * M entries an
            array over the nodes need not be repeated for every start.
        values: the arrays before, over all N entries.
        pending: entries whose values are replaced.
        group: entries in a group.
    """
    size = pending.shape[-1]
    count = jnp.sum(pending)
    entries = jnp.pad(jnp.nonzero(pending, size=size, fill_value=size)[0], (0, group), constant_values=size)

    def body(state: tuple) -> tuple:
        k, values = state
        members = lax.dynamic_slice_in_dim(entries, k, group)
        new = finish(lambda a: jnp.take(a, members % a.shape[-1], axis=-1))
        return k + group, tuple(a.at[..., members].set(b, mode="drop") for a, b in zip(values, new, strict=True))

    return lax.while_loop(lambda state: state[0] < count, body, (jnp.zeros_like(count), values))[1]


def descend(
    problem: ProxProblem,
    z: Float[Array, "L r N"],
    h: Float[Array, "L r N"],
    tol: float,
    steps: int = _MAX_STEPS,
    *,
    count: int | None = None,
) -> tuple[Float[Array, "L r N"], Float[Array, " N"], Bool[Array, " N"]]:
    """Find local minima of the energy by safeguarded Newton steps, all descents together.

    A step uses the Hessian with its pivots made positive, so it always points downhill. Where the energy rose, the step
    is taken back and a quarter of it is tried next. Each step evaluates the loss, its gradient and its Hessian once.

    Args:
        z: starts.
        h: student fields.
        tol: a descent has converged when its Newton step is below this, relative to max |z| + 0.1 `field_scale`.
        steps: largest number of steps in a loop that ends by a condition.
        count: number of steps in a `counted` loop; by default `_COUNTED_STEPS`.

    Returns:
        The minimisers, their energies, and whether they converged.
    """
    centre, floor = h.reshape(-1, h.shape[-1]), problem.least_pivots()
    unit = 0.1 * problem.model.field_scale

    def is_small(z: Float[Array, "n N"], step: Float[Array, "n N"]) -> Bool[Array, " N"]:
        return jnp.max(jnp.abs(step), 0) <= tol * (unit + jnp.max(jnp.abs(z), 0))

    def body(nodes: tuple[Array, Array], state: tuple) -> tuple:
        (y, centre), (z, energy, step, cut) = nodes, state
        trial = z + cut * step
        e = problem._replace(y=y).expand(trial, centre)
        trial_energy, rounding = e.loss + e.quadratic, 64 * jnp.finfo(z.dtype).eps * (jnp.abs(e.loss) + e.quadratic)
        descends = trial_energy <= energy + rounding  # a rise within rounding is no reason to reject a step
        return (
            jnp.where(descends, trial, z),
            jnp.where(descends, trial_energy, energy),
            jnp.where(descends, ldl_solve(e.hessian, -e.slope, floor), step),
            jnp.where(descends, 1.0, 0.25 * cut).astype(z.dtype),
        )

    def unfinished(state: tuple) -> Bool[Array, " N"]:
        z, _, step, _ = state
        return ~is_small(z, step)

    # The first pass of the loop only evaluates: its step is zero, and any energy is below infinity.
    flat = z.reshape(centre.shape)
    infinite = jnp.full_like(flat[0], jnp.inf)
    state = (flat, infinite, jnp.zeros_like(flat), jnp.ones_like(infinite))
    count = _COUNTED_STEPS if count is None else count
    nodes = problem.y, centre
    flat, energy, step, _ = repeat(body, nodes, state, unfinished, steps + 1, count=count + 1, least=1)
    converged = is_small(flat, step)
    flat = flat + jnp.where(converged, step, 0.0)  # the last step needs no evaluation, and squares the error
    return flat.reshape(z.shape), energy, converged


class Prox(eqx.Module):
    """Global minimisers at N nodes."""

    z: Float[Array, "L r N"]  # the proximal operator
    converged: Bool[Array, " N"]  # whether Newton's method met its tolerance
    other: Float[Array, "L r N"]  # second lowest minimum; the proximal operator itself where none was found
    gap: Float[Array, " N"]  # energy of `other` above the global minimum; infinite where none was found


def prox(
    problem: ProxProblem, h: Float[Array, "L r N"], extra_starts: Float[Array, "starts L r N"] | None = None
) -> Prox:
    """Return the proximal operator of the loss at `N` nodes, with its derivative by the implicit function theorem.

    The derivative follows the minimum on its own sheet. Where the minimiser jumps between two sheets, the derivative of
    an average has one more term, which no derivative taken node by node contains.

    Args:
        problem: the loss, the response, positive definite for every token, and the teacher's fields.
        h: student fields.
        extra_starts: optional extra starts, for instance the minimisers of a neighbouring problem.

    Returns:
        A `Prox`; differentiable in the model's numbers, the response and the fields in both modes.
    """
    minima = search(*lax.stop_gradient((problem, h)), extra_starts)
    return eqx.tree_at(lambda p: p.z, minima, with_implicit_derivative(minima.z, problem, h))


def search(
    problem: ProxProblem,
    h: Float[Array, "L r N"],
    extra_starts: Float[Array, "starts L r N"] | None = None,
    origin: Origin | None = None,
) -> Prox:
    """Return `prox` without derivatives; an `origin` is the `Origin`, if it is known already."""
    # The search for the lowest minimum runs in single precision, at half the cost; the minimum is then refined.
    lowest, second, gap = lowest_minima(problem, h, extra_starts, origin)
    z, _, converged = descend(problem, lowest, h, newton_tolerance(h.dtype), count=REFINE_STEPS)
    return Prox(z, converged, jnp.where(jnp.isfinite(gap), second, z), gap)


def proximal(
    problem: ProxProblem, h: Float[Array, "L r N"], origin: Origin | None = None
) -> tuple[Float[Array, "L r N"], Bool[Array, " N"]]:
    """Return only the proximal operator, without derivatives, and whether the search converged."""
    if counted():
        minima = search(problem, h, origin=origin)
        return minima.z, minima.converged
    z, energy, converged = minima_from_all_starts(problem, h, None, newton_tolerance(h.dtype), origin)
    lowest = jnp.argmin(energy, 0)
    return pick(z, lowest), pick(converged, lowest)
