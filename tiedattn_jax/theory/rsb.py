"""One step of replica symmetry breaking (1RSB) at zero temperature.

Wherever the proximal operator jumps the replicon of the replica-symmetric (RS) state is infinite, and the minima fall into
clusters: q1 is the overlap of two minima of one cluster, q0 that of two clusters, and the Parisi parameter s, an inverse
energy, weighs the clusters. With the Moreau envelope E_V of the loss,

    M_s = -(1/s) E_{y, xi0} log E_{xi1} exp(-s E_V(h, y))
    h = m + theta rho^{-1} y + (q0 - theta rho^{-1} theta^T)^{1/2} xi0 + (q1 - q0)^{1/2} xi1

and the equations are again gradients of two potentials. The loss is largest, as a function of s, at the ground state.

M_s is written as the RS potential at the response V + s (q1 - q0), which is what it is without jumps to the first order in
q1 - q0, and a rest: the rule of lines gives the first one to many digits, and the rest is small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from ..averages import clusters
from ..averages.fields import fields, teacher_fields, whiten
from ..averages.lines import LineNodes, line_nodes
from ..averages.near_jumps import lay_nodes
from ..averages.program import program
from ..averages.prox import moreau
from ..averages.rule import Rule, average_of_weighted, sum_of_weighted
from ..averages.sizes import REPLICATES
from ..errors import InputError, is_concrete, require_choice, require_count, require_number
from ..linalg import apply, cholesky, positive_definite, solve
from ..model import Model
from ..overlaps import PAIR, Conjugates, Overlaps, admissible, branch_of, symmetric
from ..printing import Description, rows_of
from ..results import Result, Status, error_bar
from .fixed_points import FixedPoint, check_alpha, check_model
from .fixed_points import solve as solve_rs
from .implicit import first_order
from .potentials import block_envelope, stationary, weight_moments
from .potentials import overlaps as rs_overlaps
from .state_evolution import value_and_columns

ORDER = 5  # of the rule of lines: the elevation to 5 % with four replicates
_POINTS = 64  # on a line: the RS potential has to be exact along them
_BLOCK = 256  # fields whose inner averages are taken together; there are jumps at them
_WIDE = 1024  # likewise, without jumps
_ROUND = 32  # blocks: their number is rounded up to a multiple, for replicates to share one program
_SAME = 1e-5  # of M: an inner average that a smooth rule gives to that is taken by it
_TOL, _STALLED = 1e-4, 3e-3  # residuals at which a state has converged, and at which the nodes resolve it no further
_SLOPE = 0.01  # weight, in the residual, of d loss / d log s over the elevation, which is off by the square of that
_STEEP = 0.1  # of that derivative over the elevation: above, s moves in the direction in which the loss rises
_NOISE = 1e-5  # of the loss: elevations below say nothing
_STEPS, _FIRST = 16, 1  # Newton steps, and at which s starts to move
_SEEN = 0.02  # jump mass above which jumps are broken at although the averages cannot tell them from their error
_SHARE = 1e-3, 0.5  # range of the jumps' share of the response that a start is made of
_PATIENCE = 4, 2  # steps in which the residual has not halved: it will not, if it is large, and if it is small
_SLOW = 0.5  # a residual that falls by less asks for a new matrix
_LONGEST = 0.5  # relative, of a Newton step
_FAR = 0.02  # likewise, above which it says more of the matrix than of how rough the averages are
_START = 1.2  # times the part of the response that the jumps carry, at which q1 - q0 starts
_GROUND = 2.0  # over the training loss, where s starts


class BrokenOverlaps(eqx.Module):
    """Order parameters of 1RSB; as conjugates, their hats.

    Attributes:
        q1: overlap of two minima of one cluster, (L, r, r).
        q0: overlap of minima of different clusters, (L, r, r).
        V: response within a cluster, (L, r, r).
        theta: overlap with the teacher, (L, r, t).
        m: overlap with the encodings, (L, r).
    """

    q1: jax.Array
    q0: jax.Array
    V: jax.Array
    theta: jax.Array
    m: jax.Array

    @property
    def spread(self) -> jax.Array:
        """Cholesky root of q1 - q0."""
        return cholesky(self.q1 - self.q0)

    @property
    def between(self) -> Overlaps:
        """What clusters share."""
        return Overlaps(self.q0, self.V, self.theta, self.m)

    def joined(self, s: jax.Array) -> Overlaps:
        """The RS order parameters that these become where nothing jumps: V + s (q1 - q0) is the whole response."""
        return Overlaps(self.q1, self.V + s * (self.q1 - self.q0), self.theta, self.m)


class Outer(NamedTuple):
    """Fields of the clusters, which stay; their weights move with the law. Leaves lead with the block axis."""

    h: jax.Array  # (L, r, N)
    teacher: jax.Array  # standard normals of the teacher, (L, t, N)
    weight: jax.Array  # (N,)
    log_density: jax.Array  # of h given y where they were laid, (N,)


class Averages(NamedTuple):
    """Everything that M_s is averaged with: fields with a jump near them, others, and lines for its RS part."""

    near: Outer
    smooth: Outer
    lines: LineNodes


# The channel potential


def _inner(points: Any, p: tuple[Model, BrokenOverlaps, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """At fields of one block, (N,): ``-(1/s) log E exp(-s E_V)``, and the RS counterpart that `_rest` takes off it."""
    outer, broken, plain = points
    model, x, s = p
    y = teacher_fields(model, outer.teacher)

    def energies(cluster: clusters.Cluster, V: jax.Array) -> jax.Array:
        count = len(cluster.log_weight)
        at = jnp.tile(outer.h, count) + apply(x.spread, cluster.normals)
        return moreau(model, cluster.z, at, V, jnp.tile(y, count)).reshape(count, -1)

    energy = energies(broken, x.V)
    least = lax.stop_gradient(jnp.min(energy, 0))  # keeps the exponents small
    tilted = least - jax.scipy.special.logsumexp(broken.log_weight - s * (energy - least), axis=0) / s
    share = jnp.exp(plain.log_weight)
    return tilted, jnp.sum(share * energies(plain, x.joined(s).V), 0) / jnp.sum(share, 0)


def _rest(points: Any, p: tuple[Model, BrokenOverlaps, jax.Array]) -> jax.Array:
    """One block's share of M_s less the RS potential at `BrokenOverlaps.joined`.

    The latter is the average over xi0 and xi1 of the envelope at the response V + s (q1 - q0); at each field its average
    over xi1 is taken off.
    """
    outer, (model, x, _) = points[0], p
    y = teacher_fields(model, outer.teacher)
    tilted, whole = _inner(points, p)
    log_density = whiten(model, x.between, outer.h, y)[1]
    return jnp.sum(outer.weight * jnp.exp(log_density - outer.log_density) * (tilted - whole))


_rest_envelope = stationary(_rest)


def _searched(model: Model, x: BrokenOverlaps, s: jax.Array, block: Outer, jumps: bool) -> tuple:
    find = clusters.find if jumps else clusters.find_smooth
    y = teacher_fields(model, block.teacher)
    return tuple(find(model, V, x.spread, block.h, y, t) for V, t in ((x.V, s), (x.joined(s).V, 0 * s)))


def _points(model: Model, x: BrokenOverlaps, s: jax.Array, block: Outer, found: tuple) -> tuple:
    y = teacher_fields(model, block.teacher)
    pairs = zip((x.V, x.joined(s).V), found, strict=True)
    return block, *(clusters.points(model, V, x.spread, block.h, y, f) for V, f in pairs)


def _channel_expansion(
    setting: Callable[[jax.Array], tuple[BrokenOverlaps, jax.Array]],
    model: Model,
    averages: Averages,
    v: jax.Array,
    wanted: jax.Array,
) -> tuple[tuple, tuple, Model]:
    """M_s with its gradients in the order parameters and in s, the derivatives of these in v, and dM_s / d model.

    Args:
        wanted: whether the derivatives in v, (..., k), are; they are zero otherwise, and most of the work.
    """

    def sums(find: Callable[..., Any], share: Callable[..., Any]) -> Callable[[Any], Any]:
        def block_sums(block: Any) -> Any:
            found = find(*lax.stop_gradient(setting(v)), block)

            def at(v: jax.Array) -> Any:
                x, s = setting(v)
                M, (by_model, *gradients) = jax.value_and_grad(share(x, s, block, found), (0, 1, 2))(model, x, s)
                return (M, *gradients), by_model

            def alone(v: jax.Array) -> Any:
                values, by_model = at(v)
                return values, jax.tree.map(lambda a: jnp.zeros((*a.shape, len(v)), a.dtype), values), by_model

            return lax.cond(wanted, partial(value_and_columns, at), alone, v)

        return block_sums

    def of_rest(x: BrokenOverlaps, s: jax.Array, block: Outer, found: tuple) -> Any:
        points = _points(model, x, s, block, found)
        return lambda model, x, s: _rest_envelope(points, (model, x, s))

    def of_lines(x: BrokenOverlaps, s: jax.Array, block: Any, found: Any) -> Any:
        points = averages.lines.points(model, x.joined(s), block, found)
        return lambda model, x, s: block_envelope(points, (model, x.joined(s)))

    def lines_found(x: BrokenOverlaps, s: jax.Array, block: Any) -> Any:
        return averages.lines.search(model, x.joined(s), block)

    shares = (
        sum_of_weighted(averages.near, sums(partial(_searched, model, jumps=True), of_rest)),
        sum_of_weighted(averages.smooth, sums(partial(_searched, model, jumps=False), of_rest)),
        average_of_weighted(averages.lines, sums(lines_found, of_lines)),
    )
    return jax.tree.map(lambda *parts: sum(parts), *shares)


# The prior potential and the equations


def prior_1rsb(model: Model, hats: BrokenOverlaps, s: jax.Array) -> jax.Array:
    """Prior potential psi_s of the ridge.

    ``1/2 E tr[D^{-1} (b b^T + sum_k gamma_k qhat0_k)] - 1/(2 s) E log det(1 - s Lam^{-1} c2)`` with
    ``c2 = sum_k gamma_k (qhat1_k - qhat0_k)``, ``D = Lam - s c2`` and b, Lam as in `potentials.prior`.
    """
    law = model.law()
    Lam, square = weight_moments(model, Conjugates(hats.q0, hats.V, hats.theta, hats.m))
    D = Lam - s * jnp.einsum("nk,kab->nab", law.gamma, hats.q1 - hats.q0)
    ratio = 2 * jnp.sum(jnp.log(_diagonal(cholesky(D))) - jnp.log(_diagonal(cholesky(Lam))), -1)
    return law.weights @ (0.5 * jnp.trace(solve(D, square), axis1=1, axis2=2) - 0.5 * ratio / s)


def _diagonal(a: jax.Array) -> jax.Array:
    return jnp.diagonal(a, axis1=-2, axis2=-1)


def free_energy_1rsb(
    model: Model, alpha: jax.Array, x: BrokenOverlaps, hats: BrokenOverlaps, s: jax.Array, M: jax.Array
) -> jax.Array:
    """Free energy Phi_s, minus the training loss at a fixed point.

    ``1/2 sum_l tr(Vhat q1 - qhat1 V) - s/2 sum_l tr(qhat1 q1 - qhat0 q0) - mhat . m - tr(thetahat theta^T) + psi_s -
    alpha M_s``
    """
    pairing = 0.5 * jnp.sum(hats.V * x.q1 - hats.q1 * x.V) - jnp.sum(hats.m * x.m) - jnp.sum(hats.theta * x.theta)
    entropic = 0.5 * s * jnp.sum(hats.q1 * x.q1 - hats.q0 * x.q0)
    return pairing - entropic + prior_1rsb(model, hats, s) - alpha * M


def conjugates_1rsb(alpha: jax.Array, s: jax.Array, g: BrokenOverlaps, free: jax.Array) -> BrokenOverlaps:
    """The conjugates as gradients of M_s."""
    q1 = -2 * alpha * symmetric(g.V)
    return BrokenOverlaps(
        q1=q1,
        q0=2 * alpha / s * symmetric(g.q0),
        V=2 * alpha * symmetric(g.q1) + s * q1,
        theta=-alpha * free[0] * g.theta,
        m=-alpha * free[1] * g.m,
    )


def overlaps_1rsb(model: Model, hats: BrokenOverlaps, s: jax.Array) -> BrokenOverlaps:
    """The order parameters as gradients of psi_s."""
    g = jax.grad(lambda hats: prior_1rsb(model, hats, s))(hats)
    q1 = -2 * symmetric(g.V)
    return BrokenOverlaps(q1, -2 / s * symmetric(g.q0), 2 * symmetric(g.q1) - s * q1, g.theta, g.m)


# Newton's method


def _pack(x: BrokenOverlaps, s: jax.Array, last: Any) -> jax.Array:
    """A state as one vector: q1, s (q1 - q0), V, theta, m, and log s or what takes its place.

    s (q1 - q0) is the response of the clusters, which hardly depends on s.
    """
    return ravel_pytree((x.q1, s * (x.q1 - x.q0), x.V, x.theta, x.m, last))[0]


def _unpacker(like: BrokenOverlaps, s: jax.Array) -> Callable[[jax.Array], tuple[BrokenOverlaps, jax.Array]]:
    back = ravel_pytree((like.q1, like.q1, like.V, like.theta, like.m, s))[1]

    def unpack(v: jax.Array) -> tuple[BrokenOverlaps, jax.Array]:
        q1, response, V, theta, m, log_s = back(v)
        s = jnp.exp(log_s)
        return BrokenOverlaps(q1, q1 - response / s, V, theta, m), s

    return unpack


class _Look(NamedTuple):
    """The equations at one place: a residual for each coordinate and, last, d loss / d log s."""

    v: jax.Array  # the place
    residual: jax.Array
    matrix: jax.Array  # of Newton's method, where it was asked for
    columns: jax.Array  # sizes of the coordinates
    rows: jax.Array  # and of the residuals
    loss: jax.Array
    loss_by_model: Model
    loss_by_alpha: jax.Array
    loss_by_log_s: jax.Array
    hats: BrokenOverlaps


@program
def _look(
    model: Model,
    alpha: jax.Array,
    averages: Averages,
    x: BrokenOverlaps,
    s: jax.Array,
    free: jax.Array,
    wanted: jax.Array,
) -> _Look:
    """The equations around a place, to first order where that is `wanted`."""
    v, setting = _pack(x, s, jnp.log(s)), _unpacker(x, s)
    values, slopes, M_by_model = _channel_expansion(setting, model, averages, v, wanted)

    def equations(v: jax.Array, M: jax.Array, by_x: BrokenOverlaps, by_s: jax.Array) -> Any:
        x, s = setting(v)
        hats = conjugates_1rsb(alpha, s, by_x, free)
        explicit = jax.grad(lambda s: free_energy_1rsb(model, alpha, x, hats, s, 0 * M))(s)
        by_log_s = s * (explicit - alpha * by_s)
        loss = -free_energy_1rsb(model, alpha, x, hats, s, M)
        return _pack(overlaps_1rsb(model, hats, s), s, 0.0).at[-1].set(by_log_s), (loss, hats)

    def column(*d: Any) -> Any:
        return jax.jvp(equations, (v, *values), d, has_aux=True)

    image, image_slopes, (loss, hats) = jax.vmap(column, in_axes=(0, -1, -1, -1), out_axes=(None, -1, None))(
        jnp.eye(len(v), dtype=v.dtype), *slopes
    )
    sizes = [jnp.sqrt(jnp.mean(a**2)) * jnp.ones_like(a) for a in (x.q1, s * (x.q1 - x.q0), x.V)]
    order = [
        jnp.where(kept > 0, jnp.sqrt(jnp.mean(a**2)), 1.0) * jnp.ones_like(a)
        for kept, a in zip(free, (x.theta, x.m), strict=True)
    ]
    columns = ravel_pytree((*sizes, *order, jnp.ones_like(s)))[0]
    by_prior = jax.grad(prior_1rsb)(model, hats, s)
    return _Look(
        v=v,
        residual=image - v.at[-1].set(0.0),
        matrix=jnp.diag(jnp.ones_like(v).at[-1].set(0.0)) - image_slopes,
        columns=columns,
        rows=columns.at[-1].set(0.5 * s * jnp.sum(hats.q1 * (x.q1 - x.q0))),
        loss=loss,
        # Partial derivatives, since Phi_s is stationary elsewhere.
        loss_by_model=jax.tree.map(lambda a, b: alpha * a - b, M_by_model, by_prior),
        loss_by_alpha=values[0],
        loss_by_log_s=-image[-1],
        hats=hats,
    )


class BrokenState(eqx.Module):
    """A 1RSB state in every replicate of the averages: all arrays lead with the replicate axis.

    `loss_by_model` are the derivatives of the training loss in the numbers of the model, as a `Model`.
    """

    overlaps: BrokenOverlaps
    conjugates: BrokenOverlaps
    s: jax.Array
    train_loss: jax.Array
    elevation: jax.Array
    loss_by_model: Model
    loss_by_alpha: jax.Array
    loss_by_log_s: jax.Array
    residual: jax.Array
    status: jax.Array

    @property
    def energy(self) -> jax.Array:
        """Training loss / d of the minima that s selects, ``d (s loss) / ds``."""
        return self.train_loss + self.loss_by_log_s

    @property
    def complexity(self) -> jax.Array:
        """Complexity Sigma of these minima, the logarithm of their number over d: ``s^2 d loss / ds``."""
        return self.s * self.loss_by_log_s

    def numbers(self) -> dict[str, jax.Array]:
        """Everything that is shown of a state, by name."""
        own = ("s", "train_loss", "elevation", "energy", "complexity")
        return {**vars(self.overlaps), **{name: getattr(self, name) for name in own}}


class BrokenPoint(Result):
    """A state with one step of replica symmetry breaking, beside the replica-symmetric (RS) one that it comes from.

    Numbers are means over independent replicates of the averages, and error bars those of these means.

    Attributes:
        model, alpha, branch: what was asked for.
        ground: whether s is that of the ground state.
        rs: the RS state, on the same lines.
        replicates: the state in every replicate.
    """

    model: Model
    alpha: jax.Array
    rs: FixedPoint
    replicates: BrokenState
    branch: str = eqx.field(static=True)
    ground: bool = eqx.field(static=True)

    @property
    def mean(self) -> BrokenState:
        """Means over the replicates, in the fields of `BrokenState`."""
        return jax.tree.map(lambda a: jnp.mean(a, 0), self.replicates)

    @property
    def stderr(self) -> BrokenState:
        """Error bars of these means; see `results.error_bar`."""
        return jax.tree.map(error_bar, self.replicates)

    @property
    def status(self) -> jax.Array:
        """The worst `Status` over the replicates, as an integer."""
        return jnp.max(self.replicates.status)

    @property
    def ok(self) -> jax.Array:
        """Whether every replicate can be used: converged, or stalled at the accuracy of the averages."""
        return self.status <= Status.stalled

    @property
    def overlaps(self) -> BrokenOverlaps:
        """Order parameters."""
        return self.mean.overlaps

    @property
    def s(self) -> jax.Array:
        """Parisi parameter, an inverse energy."""
        return self.mean.s

    @property
    def train_loss(self) -> jax.Array:
        """Training loss / d."""
        return self.mean.train_loss

    @property
    def elevation(self) -> jax.Array:
        """By how much the training loss lies above that of the RS state on the same averages."""
        return self.mean.elevation

    @property
    def energy(self) -> jax.Array:
        """Training loss / d of the minima that s selects; see `BrokenState`."""
        return jnp.mean(self.replicates.energy)

    @property
    def complexity(self) -> jax.Array:
        """Complexity of these minima; see `BrokenState`."""
        return jnp.mean(self.replicates.complexity)

    def numbers(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Means of all that is shown of the state, and their error bars."""
        each = self.replicates.numbers()
        return {name: jnp.mean(a, 0) for name, a in each.items()}, {name: error_bar(a) for name, a in each.items()}

    def to_dict(self) -> dict[str, Any]:
        """Setting, numbers and error bars, ready for JSON."""
        means, bars = ({k: np.asarray(a).tolist() for k, a in part.items()} for part in self.numbers())
        return {"alpha": float(self.alpha), "branch": self.branch, **means, "status": self.status_name, "stderr": bars}

    def describe(self) -> Description:
        what = "ground state" if self.ground else "state"
        status = f"{self.status_name}, residual {float(jnp.max(self.replicates.residual)):.1e}"
        return Description(
            f"{self.branch} branch at alpha = {self.alpha:g}, 1RSB {what}", status, rows_of(*self.numbers())
        )


def solve_1rsb(
    model: Model,
    alpha: Any,
    branch: str = "positional",
    *,
    s: Any = None,
    order: int = ORDER,
    lines: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> BrokenPoint:
    """A state with one step of replica symmetry breaking: how far off the replica-symmetric one is.

    The RS state is solved first; its minima are then let fall into clusters. Without jumps of the proximal operator
    (`FixedPoint.jumps`, and a jump mass below 2 %) there is nothing to break: q1 = q0, and the elevation is zero. Takes
    concrete numbers in float64: the elevation is a small part of the loss. Inner averages take 24 * 3^(L r - 1) nodes;
    what was checked is two fields.

    The training loss and the elevation have first derivatives, in both modes, by the envelope theorem. Those of all else
    are NaN: order parameters and s move along a soft direction, of which the averages give no second derivatives.

    Args:
        model: attention layer and data.
        alpha: samples per dimension, n / d.
        branch: "positional" or "semantic".
        s: Parisi parameter, an inverse energy; by default that of the ground state, ``d loss / d s = 0``. Smaller ones
            select more numerous minima of higher energy.
        order, lines, seed: of the rule of lines, see `line_nodes`.
        replicates: of the averages; their scatter is the error bar.

    Raises:
        InputError: as `solve`; a model in float32 or with traced numbers, an `s` that is not positive.
    """
    check_model(model, branch)
    require_choice(branch, "branch", PAIR)
    alpha = check_alpha(model, alpha)
    held = lax.stop_gradient((model, alpha))
    if not is_concrete(held):
        raise InputError(
            "model", "must have concrete numbers for solve_1rsb, got traced ones: call it outside of jax.jit"
        )
    if model.lam.dtype != jnp.float64:
        want = "must be in float64 for solve_1rsb: use jax.config.update('jax_enable_x64', True)"
        raise InputError("model", f"{want}, got {model.lam.dtype}")
    if model.penalty is not None:
        raise InputError("model", f"must have no penalty besides the ridge for solve_1rsb, got {model.penalty!r}")
    if model.kinds is not None:
        raise InputError("model", "must have tokens without classes for solve_1rsb, got a law with sentences")
    require_count(replicates, "replicates", 2)
    if s is not None:
        require_number(s, "s", "positive", lambda v: v > 0)
        s = jnp.asarray(s, model.lam.dtype)
    rule = lines_1rsb(model, order, lines, replicates, seed)
    rs = solve_rs(model, alpha, branch, rule)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *_solve_replicates(rs, rule, s))
    return BrokenPoint(model, alpha, rs, stacked, branch, s is None)


def lines_1rsb(model: Model, order: int, lines: int | None, replicates: int, seed: int) -> Rule:
    """The lines of `solve_1rsb`, on which its RS state is solved too."""
    return line_nodes(model, order, lines=lines, points=_POINTS, seed=seed, replicates=replicates)


class _Near(NamedTuple):
    """Where a replicate starts that others went before: what breaking did to one of them."""

    shift: BrokenOverlaps  # of the order parameters
    s: jax.Array
    matrix: np.ndarray  # of Newton's method there


def _solve_replicates(rs: FixedPoint, rule: Rule, s: jax.Array | None) -> list[BrokenState]:
    """All replicates, from where one of them was found as soon as there is one; then from there those that failed before."""
    near, states, before = None, [], []
    for k in range(rule.replicates):
        state, found = _solve_replicate(rs, k, rule.replicate(k), s, near)
        states.append(state)
        before += [k] if near is None and int(state.status) > Status.stalled else []
        near = near if found is None else found
    for k in before if near is not None else []:
        again, _ = _solve_replicate(rs, k, rule.replicate(k), s, near)
        states[k] = again if int(again.status) < int(states[k].status) else states[k]
    return states


def _solve_replicate(
    rs: FixedPoint, k: int, lines: Any, s: jax.Array | None, near: _Near | None
) -> tuple[BrokenState, _Near | None]:
    """A replicate, and what it hands to the next ones if it was found.

    Args:
        near: where to start; the nodes are laid for a place of its own, of wider clusters, which leaves them less rough.
    """
    moving, rs = rs, lax.stop_gradient(rs)
    model, alpha = rs.model, rs.alpha
    free = branch_of(rs.branch).free(model)
    moving_state, state = (jax.tree.map(lambda a: a[k], point.replicates) for point in (moving, rs))
    unbroken = _unbroken_overlaps(state.overlaps)
    ground = s is None
    s = _GROUND / state.train_loss if s is None else s
    x = _start(model, state, s, free)
    found = int(state.status) <= Status.stalled
    if not found or not (bool(rs.jumps) or float(rs.diagnostics.jump_mass) > _SEEN):
        return _unbroken(moving_state, s, found), None
    averages = _averages(model, state.overlaps, x, s, lines)
    if near is not None:
        x, s = jax.tree.map(jnp.add, unbroken, near.shift), near.s

    def look(x: BrokenOverlaps, s: jax.Array, wanted: bool) -> _Look:
        return _look(model, alpha, averages, x, s, free, jnp.asarray(wanted))

    best = _newton(model, look, x, s, free, ground, float(state.train_loss), None if near is None else near.matrix)
    if best is None:
        return _unbroken(moving_state, s, False), None
    x, s, seen, residual, matrix = best
    status = Status.converged if residual <= _TOL else Status.stalled if residual <= _STALLED else Status.max_steps
    broken = BrokenState(
        overlaps=x,
        conjugates=seen.hats,
        s=s,
        train_loss=seen.loss,
        elevation=jnp.zeros_like(seen.loss),
        loss_by_model=seen.loss_by_model,
        loss_by_alpha=seen.loss_by_alpha,
        loss_by_log_s=seen.loss_by_log_s,
        residual=jnp.asarray(residual),
        status=jnp.asarray(int(status)),
    )
    broken = with_derivatives((moving.model, moving.alpha), broken)
    broken = eqx.tree_at(lambda b: b.elevation, broken, broken.train_loss - moving_state.train_loss)
    shift = jax.tree.map(jnp.subtract, x, unbroken)
    return broken, _Near(shift, s, matrix) if status <= Status.stalled else None


@jax.custom_jvp
def with_derivatives(numbers: tuple[Model, jax.Array], state: BrokenState) -> BrokenState:
    """A state of one replicate, whose loss moves with the model and alpha; the derivatives of the rest are NaN."""
    return state


@with_derivatives.defjvp
def _(primals: Any, tangents: Any) -> tuple[BrokenState, BrokenState]:
    numbers, state = primals
    slopes = first_order((state.loss_by_model, state.loss_by_alpha), numbers)
    terms = jax.tree.map(lambda a, d: jnp.sum(a * d), slopes, tangents[0])
    loss = sum(jax.tree.leaves(terms), jnp.zeros_like(state.train_loss))
    unknown = jax.tree.map(
        lambda a, d: jnp.full_like(a, jnp.nan) * loss if eqx.is_inexact_array(a) else d, state, tangents[1]
    )
    return with_derivatives(*primals), eqx.tree_at(lambda s: s.train_loss, unknown, loss)


def _start(model: Model, state: Any, s: jax.Array, free: jax.Array) -> BrokenOverlaps:
    """Where the first replicate starts: within a cluster jumps do not respond."""
    x, share = state.overlaps, jnp.clip(state.diagnostics.jump_mass, *_SHARE)
    hats = eqx.tree_at(lambda h: h.V, state.conjugates, state.conjugates.V / (1 - share))
    apart = _START * (x.V - rs_overlaps(model, hats).V) / s
    return BrokenOverlaps(x.q, x.q - apart, x.V, free[0] * x.theta, free[1] * x.m)


def _newton(
    model: Model,
    look: Callable[[BrokenOverlaps, jax.Array, bool], _Look],
    x: BrokenOverlaps,
    s: jax.Array,
    free: jax.Array,
    ground: bool,
    rs_loss: float,
    matrix: np.ndarray | None,
) -> tuple[BrokenOverlaps, jax.Array, _Look, float, np.ndarray] | None:
    """The place with the smallest residual that Newton's method came to, with the last matrix; None: there is none.

    Derivatives are most of the work: the matrix is corrected by Broyden's formula, and laid anew where that does not do.

    Args:
        matrix: that of another replicate.
    """
    first = 0 if matrix is not None else _FIRST
    best, waiting, residual, size, half, last = None, 0, np.inf, np.inf, np.inf, None
    renew = matrix is None
    for step in range(_STEPS):
        seen = jax.tree.map(np.asarray, look(x, s, renew))
        vary = ground and step >= first
        n = len(seen.v) if vary else len(seen.v) - 1
        if renew or matrix is None:
            matrix = seen.matrix
        elif last is not None and np.max(np.abs(seen.v - last.v) / seen.columns) > _FAR:
            matrix = corrected_matrix(matrix, seen.v - last.v, last.residual - seen.residual, seen.columns)
        before, size = size, float(np.max(np.abs((seen.residual / seen.rows)[:-1])))
        steep = seen.loss_by_log_s / max(abs(seen.loss - rs_loss), _NOISE * seen.loss) if vary else 0.0
        size = max(size, float(_SLOPE * abs(steep)))
        anew = vary and step == first
        if np.isfinite(size) and (size < residual or anew):
            best, residual = (x, s, seen), size
        waiting, half = (0, 0.5 * size) if size < half or anew else (waiting + 1, half)
        done = residual <= _TOL and vary == ground
        if done or not np.isfinite(size) or waiting > _PATIENCE[residual <= _STALLED]:
            break
        renew = step > first and size > max(_SLOW * before, _STALLED)
        last = seen
        x, s = _moved(model, x, s, free, _newton_step(seen, matrix, n, steep) * seen.columns)
    if best is None or matrix is None:
        return None
    return (*best[:2], jax.tree.map(jnp.asarray, best[2]), residual, matrix)


def _newton_step(seen: _Look, matrix: np.ndarray, n: int, steep: Any) -> np.ndarray:
    """A step in the first n coordinates, in units of the sizes of all; log s goes uphill where the loss is `steep`."""
    scaled, target = (matrix * seen.columns / seen.rows[:, None])[:n, :n], (seen.residual / seen.rows)[:n]
    # Least squares: the matrix is singular along the orbit of a gauge.
    move = np.linalg.lstsq(scaled, target, rcond=1e-10)[0]
    if abs(steep) > _STEEP and move[-1] * steep < 0:  # Newton's method would look for the smallest loss
        move[-1] = _LONGEST * np.sign(steep)
        move[:-1] = np.linalg.lstsq(scaled[:-1, :-1], target[:-1] - scaled[:-1, -1] * move[-1], rcond=1e-10)[0]
    return np.append(move * min(1.0, _LONGEST / np.max(np.abs(move))), np.zeros(len(seen.v) - n))


def corrected_matrix(matrix: np.ndarray, moved: np.ndarray, change: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """A matrix with which a move, in coordinates of these sizes, gives the change that was seen: Broyden's update."""
    along = moved / sizes**2
    length = along @ moved
    return matrix + np.outer(change - matrix @ moved, along) / length if length > 0 else matrix


def _moved(
    model: Model, x: BrokenOverlaps, s: jax.Array, free: jax.Array, move: np.ndarray
) -> tuple[BrokenOverlaps, jax.Array]:
    """The place after a Newton step, cut until it lies in the domain; the old one where it never does."""
    v, unpack = _pack(x, s, jnp.log(s)), _unpacker(x, s)
    for cut in 0.5 ** np.arange(6):
        trial, t = unpack(v + cut * move)
        trial = eqx.tree_at(lambda x: (x.theta, x.m), trial, (free[0] * trial.theta, free[1] * trial.m))
        if bool(positive_definite(trial.q1 - trial.q0)) and bool(admissible(model, trial.between)):
            return trial, t
    return x, s


def _unbroken_overlaps(x: Overlaps) -> BrokenOverlaps:
    """RS order parameters as those of 1RSB without breaking."""
    return BrokenOverlaps(x.q, x.q, x.V, x.theta, x.m)


def _unbroken(state: Any, s: jax.Array, ok: bool) -> BrokenState:
    """The RS state as one without breaking, with its own status; `max_steps` where breaking was not found."""
    hats, zero = state.conjugates, jnp.zeros_like(state.train_loss)
    return BrokenState(
        overlaps=_unbroken_overlaps(state.overlaps),
        conjugates=BrokenOverlaps(hats.q, hats.q, hats.V, hats.theta, hats.m),
        s=s,
        train_loss=state.train_loss,
        elevation=zero,
        loss_by_model=state.train_loss_partials[0],
        loss_by_alpha=state.train_loss_partials[1],
        loss_by_log_s=zero,
        residual=state.residual,
        status=state.status if ok else jnp.maximum(state.status, int(Status.max_steps)),
    )


# The averages


def _averages(model: Model, rs: Overlaps, x: BrokenOverlaps, s: jax.Array, lines: LineNodes) -> Averages:
    """Fields along the lines, dense at the jumps of the RS state, by whether a smooth inner rule does for them."""
    width = float(jnp.sqrt(jnp.trace(x.q1 - x.q0, axis1=1, axis2=2).sum() / jnp.trace(rs.q, axis1=1, axis2=2).sum()))
    laid = lay_nodes(model, rs, lines, width)
    h, log_density = _fields(model, rs, *map(jnp.asarray, laid[:2]))
    outer = Outer(h, jnp.asarray(laid.teacher), jnp.asarray(laid.weight), log_density)
    blocks = _in_blocks(outer, _WIDE)
    differ, size = (np.asarray(a).ravel() for a in _missed(model, x, s, blocks))
    weight = np.asarray(blocks.weight).ravel()
    near = (differ > _SAME * np.sum(weight * size)) & (weight > 0)
    near[np.argmax(weight * differ)] = True  # no group is empty
    flat = jax.tree.map(lambda a: np.moveaxis(np.asarray(a), 0, -2).reshape(*a.shape[1:-1], -1), blocks)
    parts = [jax.tree.map(lambda a, keep=keep: jnp.asarray(a[..., keep]), flat) for keep in (near, ~near)]
    return Averages(_in_blocks(parts[0], _BLOCK), _in_blocks(parts[1], _WIDE), lines)


@eqx.filter_jit
def _fields(model: Model, x: Overlaps, student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
    h, y = fields(model, x, student, teacher)
    return h, whiten(model, x, h, y)[1]


@eqx.filter_jit
def _missed(model: Model, x: BrokenOverlaps, s: jax.Array, blocks: Outer) -> tuple[jax.Array, jax.Array]:
    """By how much the smooth inner rule is off at every field, and the envelope's size."""

    def fill(k: jax.Array, values: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block = jax.tree.map(lambda a: a[k], blocks)
        fine, rough = (
            _inner(_points(model, x, s, block, _searched(model, x, s, block, jumps)), (model, x, s))[0]
            for jumps in (True, False)
        )
        return values[0].at[k].set(jnp.abs(fine - rough)), values[1].at[k].set(jnp.abs(fine))

    zero = jnp.zeros_like(blocks.weight)
    return lax.fori_loop(0, jnp.sum(jnp.any(blocks.weight > 0, 1)), fill, (zero, zero))


def _in_blocks(outer: Outer, width: int) -> Outer:
    """Fields in whole blocks, of a number that is a multiple of `_ROUND`; those that fill them up have no weight."""
    size = outer.weight.shape[-1]
    count = -(-max(size, 1) // (width * _ROUND)) * _ROUND

    def split(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)], mode="edge")
        return jnp.moveaxis(padded.reshape(*a.shape[:-1], count, width), -2, 0)

    blocks = jax.tree.map(split, outer)
    real = (jnp.arange(count * width) < size).reshape(count, width)
    return blocks._replace(weight=jnp.where(real, blocks.weight, 0.0))
