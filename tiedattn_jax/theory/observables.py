"""Predictions of a state: test error, linear baseline, stability, jumps of the proximal operator, and the elevation.

The *elevation* is how much one step of replica symmetry breaking raises the training loss, estimated from the
replica-symmetric (RS) state. The estimate is of leading order. Let q1 - q0 = delta V, and hold the whole response
V + s (q1 - q0) at its RS value. The RS free energy is stationary, so the free energy of `rsb` differs from it by a
function of s and delta. With v = s delta and beta = s delta^{1/2} it is

    elevation = (v / beta^2) [ alpha (v / beta) K(beta) - v^2 / 4 (1 / (X^2 - 2 v X / 3) - alpha k(v)) ]

The 1RSB state is stationary in v and beta; here we take the largest value.

The first term is that of the jumps. K(beta) is the sum of the `jump_cost` j(beta a) over the jumps, where
a = |V^{-1/2} (z_2 - z_1)| is the slope of the energy difference at a jump. The second term is of second order in v and
is that of the replicon. X is the contribution of the prior. k(v) is the average of ``tr e^2`` with e = dz/dh - 1; it is
softened where e is large, next to the ends of jumps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from scipy import special

from ..averages.moreau import ProxProblem, loss_at_nodes
from ..averages.rules import Points, Replicate, Rule, fields, legendre, teacher_fields
from ..base.arrays import Number, Scalar, StateArray, apply, cholesky, inverse
from ..base.errors import require
from ..base.nodewise import nodewise
from ..base.report import Printed
from ..base.results import Average, error_bar
from ..model.checks import check_provides
from ..model.model import Model
from ..model.overlaps import Conjugates, Overlaps, impose, residual_covariance, sentence_overlaps
from ..model.penalties import minimiser_and_response
from .potentials import channel_gradient, conjugates, over_nodes, points_in, prior, weight_fields, weight_law


class Diagnostics(Printed):
    """Diagnostics of a state in one replicate of the averages.

    To add a diagnostic it is enough to add a field here: grids, paths, tables and reports list the fields of this
    class. Diagnostics have no derivatives; under `jax.grad` they count as constants.

    Attributes:
        replicon: spectral radius of the replicon map. The replica-symmetric state is stable below one. The jumps are
            left out: their contribution is formally infinite wherever `jump_mass` is not zero.
        jump_mass: share of the jumps in Vhat. It compares two forms of Vhat: the response form, which averages dz/dh
            node by node, and the Stein form, which averages z alone. The first minus the second is divided by the
            larger one.
        second_minimum: share of the nodes whose proximal problem has another minimum.
        unresolved: share of the nodes whose proximal solve missed its tolerance or whose line is not resolved. Above
            5 % the status is `unresolved`.
        growth_m: largest eigenvalue of the map in the direction of m at m = 0. Above one m grows from zero.
        growth_theta: likewise for theta at theta = 0. Both are exact in the presence of jumps.
        train_loss_direct: alpha E[loss(prox)] + lambda/2 tr(Q^T Q)/d + the mean penalty of a weight. It equals the
            training loss at a fixed point.
        rs_error: estimate, to leading order, of how much one step of replica symmetry breaking raises the training
            loss; see `elevation`. It is NaN if the replica-symmetric state is unstable even without jumps, and at rank
            r > 1.
    """

    batch_probe = "replicon", 0
    replicon: Float[StateArray, "*R"]
    jump_mass: Float[StateArray, "*R"]
    second_minimum: Float[StateArray, "*R"]
    unresolved: Float[StateArray, "*R"]
    growth_m: Float[StateArray, "*R"]
    growth_theta: Float[StateArray, "*R"]
    train_loss_direct: Float[StateArray, "*R"]
    rs_error: Float[StateArray, "*R"]


def diagnose(
    model: Model, alpha: Scalar, x: Overlaps, hats: Conjugates, sums: dict[str, Float[Array, "..."]]
) -> Diagnostics:
    """Return the `Diagnostics` of a state from the averages of its `moments`."""
    (S, r, _), law = hats.q.shape, model.law()
    n = S * r
    squares, mean_penalty = _squares(model, hats)
    to_delta = jnp.einsum("n,nk,nl,nabcd->kadlbc", law.weights, law.gamma, law.gamma, squares)
    to_delta = to_delta.reshape(n * r, n * r)
    replicon = to_delta @ (alpha * sums["replicon"]).reshape(n * r, n * r)
    # The ridge is a term of Lam, so d psi / d lambda is minus half of tr(Q^T Q) / d.
    size = -2.0 * jax.grad(lambda lam: prior(eqx.tree_at(lambda m: m.lam, model, lam), hats))(model.lam)
    stein = jnp.sum(jnp.trace(hats.V, axis1=1, axis2=2))
    response = -alpha * sums["response"]
    growth_theta, growth_m = growths(model, alpha, hats, sums)
    return Diagnostics(
        replicon=_radius(replicon, jnp.tile(jnp.eye(r, dtype=x.q.dtype).ravel(), S)),
        jump_mass=(response - stein) / jnp.maximum(jnp.abs(response), jnp.abs(stein)),
        second_minimum=sums["second"],
        unresolved=sums["unresolved"],
        growth_m=growth_m,
        growth_theta=growth_theta,
        train_loss_direct=alpha * sums["loss"] + 0.5 * model.lam * size + mean_penalty,
        rs_error=elevation(alpha, x, hats, to_delta, sums) if r == 1 else jnp.full_like(size, jnp.nan),
    )


def moments(model: Model, x: Overlaps, points: Points) -> dict[str, Float[Array, "..."]]:
    """Return the sums over one block of nodes that `diagnose` needs."""
    (L, r, _), sentence = model.shape, model.sentence
    n = L * r
    growth_sums, x = growth_moments(model, x, points), sentence_overlaps(model, x)
    points = _shared(model, points)
    w = points.weight
    _, y = fields(model, x, points.student, points.teacher)
    e = ProxProblem(model, x.V, y).jacobian(points.z) - jnp.eye(n, dtype=w.dtype)[..., None]
    G = apply(inverse(x.V), e.reshape(L, r, -1)).reshape(L, r, L, r, -1)
    replicon = jnp.einsum("iajcn,ibjdn,n->iabjcd", G, G, w)
    return {
        **growth_sums,
        **(elevation_moments(x, points, e) if r == 1 else {}),
        "response": jnp.einsum("iaian,n->", G, w),
        "replicon": sentence.to_classes(sentence.to_classes(replicon), 3),
        "loss": jnp.sum(w * loss_at_nodes(model, points.z, y)),
        "second": jnp.sum(w * jnp.isfinite(points.gap)),
        "unresolved": jnp.sum(w * ~points.resolved),
    }


def _shared(model: Model, points: Points) -> Points:
    """Multiply the weights of the points by the share of the kind of sentences."""
    share = model.sentence.share
    weights = points.weight * share, points.jumps.density * share
    return eqx.tree_at(lambda p: (p.weight, p.jumps.density), points, weights)


def growth_moments(model: Model, x: Overlaps, points: Points) -> dict[str, Float[Array, "..."]]:
    """Return the sums over one block of nodes that `growths` needs."""
    x, points, (_, _, t) = sentence_overlaps(model, x), _shared(model, points), model.shape
    h, y = fields(model, x, points.student, points.teacher)
    score_root = jnp.swapaxes(inverse(cholesky(residual_covariance(model, x))), -1, -2)
    g = apply(inverse(x.V), points.z - h)
    score = apply(score_root, points.student)  # score of the Gaussian law of h given y
    y = y[:, :t] if model.teacher_mean is None else y[:, :t] - model.teacher_mean[..., None]
    u = apply(inverse(model.rho), y)
    if model.kind is not None:  # overlaps with the means of classes grow together with theta
        u = jnp.concatenate([u, jnp.ones_like(u[:, :1])], 1)
    gy, score_y = (model.sentence.to_classes(a[:, :, None] * u[:, None]) for a in (g, score))
    return {"g_score": _gram(g, score, points.weight), "gy_score": _gram(gy, score_y, points.weight)}


def _gram(a: Float[Array, "*shape N"], b: Float[Array, "*shape N"], w: Float[Array, " N"]) -> Float[Array, "n n"]:
    a, b = (c.reshape(-1, c.shape[-1]) for c in (a, b))
    return jnp.stack([jnp.sum(w * p * b, -1) for p in a])


def growths(
    model: Model, alpha: Scalar, hats: Conjugates, sums: dict[str, Float[Array, "..."]]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the largest eigenvalues of the map in the directions of theta, at theta = 0, and of m, at m = 0.

    They are exact in the presence of jumps, and have first derivatives.

    Args:
        sums: averages of `growth_moments`.
    """
    L, (S, r, _), law = model.shape[0], hats.q.shape, model.law()
    # Response of theta and m to a small thetahat or mhat in the prior, averaged over the spectral law.
    if model.penalty is None and law.sentences is None:
        resolvents = _resolvents(model, hats)
        to_theta = jnp.einsum("n,nk,nl,nab,nst->kaslbt", law.weights, law.gamma, law.gamma, resolvents, law.pi)
        to_m = jnp.einsum("n,nkl,nab->kalb", law.weights, law.tau, resolvents)
    else:
        # Conjugates of theta and, if there are any, of the overlaps with the means of classes.
        teacher = hats.theta if law.sentences is None else jnp.concatenate([hats.theta, hats.m[L:, :, None]], 2)

        def psi(teacher: Float[Array, "S r _"], m: Float[Array, "L r"]) -> Float[Array, ""]:
            theta, class_means = jnp.split(teacher, [hats.theta.shape[2]], 2)
            return prior(model, replace(hats, theta=theta, m=jnp.concatenate([m, *jnp.moveaxis(class_means, 2, 0)])))

        origin = jnp.zeros_like(teacher), jnp.zeros_like(hats.m[:L])
        to_theta, to_m = (jax.hessian(psi, k)(*origin) for k in range(2))
    n = S * r * to_theta.shape[2]
    inverse_rho = inverse(model.rho)
    inverse_rho = jnp.pad(inverse_rho, ((0, 0), *[(0, to_theta.shape[2] - inverse_rho.shape[1])] * 2))
    # theta changes the spread of h given y. This part of d thetahat / d theta is Vhat rho^{-1}, token by token.
    spread_part = jax.scipy.linalg.block_diag(*(jnp.kron(v, p) for v, p in zip(hats.V, inverse_rho, strict=True)))
    curvature = alpha * sums["gy_score"] + spread_part
    return (
        largest_eigenvalue(to_theta.reshape(n, n), curvature),
        largest_eigenvalue(to_m.reshape(L * r, L * r), alpha * sums["g_score"]),
    )


def growths_in(
    model: Model, alpha: Scalar, x: Overlaps, replicate: Replicate, free: Float[StateArray, " 2"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return `growths` at overlaps x of a branch, in one replicate; differentiable in the model, alpha and x."""
    _, gradient, sums = channel_gradient(model, x, replicate, growth_moments)
    return growths(model, alpha, impose(conjugates(alpha, gradient), free), sums)


def _resolvents(model: Model, hats: Conjugates) -> Float[Array, "K r r"]:
    """Return Lam^{-1} at every atom of the spectrum: the response of the ridge's weights to their field."""
    law, eye = model.law(), jnp.eye(hats.m.shape[-1], dtype=model.lam.dtype)
    return inverse(model.lam * eye + jnp.einsum("kl,lab->kab", law.gamma, hats.V))


def _squares(model: Model, hats: Conjugates) -> tuple[Float[Array, "K r r r r"], Float[Array, ""]]:
    """Return the squared response of a weight at every atom, E[R_ab R_cd], and its mean penalty."""
    if model.penalty is None:
        R = _resolvents(model, hats)
        return jnp.einsum("nab,ncd->nabcd", R, R), jnp.zeros((), R.dtype)
    Lam, *field = weight_law(model, hats)
    b, share = weight_fields(model.penalty, Lam, *field)
    w, R = minimiser_and_response(model.penalty, Lam[:, None], b)
    mean_penalty = model.law().weights @ jnp.sum(share * jnp.sum(model.penalty.value(w), -1), 1)
    return jnp.einsum("nk,nkab,nkcd->nabcd", share, R, R), mean_penalty


def largest_eigenvalue(positive: Float[Array, "n n"], symmetric: Float[Array, "n n"]) -> Float[Array, ""]:
    """Return the largest eigenvalue of the product P S of a positive semidefinite and a symmetric matrix.

    Its derivative is l (dP S + P dS) r / (l . r), with the right eigenvector r and the left eigenvector l = S r. This
    is exact to first order, and finite if eigenvalues of P itself are degenerate. It is zero for P = 0.
    """
    P, S = lax.stop_gradient((positive, 0.5 * (symmetric + symmetric.T)))
    values, vectors = jnp.linalg.eigh(P)
    nonzero = values > 1e-6 * values[-1]  # directions in the null space of P do not count
    root = vectors * jnp.sqrt(jnp.where(nonzero, values, 0.0))
    inner_values, inner = jnp.linalg.eigh(root.T @ S @ root - jnp.diag(jnp.where(nonzero, 0.0, 1e6)))
    value, right = jnp.where(jnp.any(nonzero), inner_values[-1], 0.0), root @ inner[:, -1]
    left = S @ right  # l . r is the eigenvalue
    quotient = left @ positive @ symmetric @ right / jnp.where(value == 0, 1.0, value)
    return value + quotient - lax.stop_gradient(quotient)


def _radius(positive_map: Float[Array, "n n"], start: Float[Array, " n"]) -> Float[Array, ""]:
    """Return the spectral radius of a map of the cone of positive matrices into itself, by power iteration."""
    tiny = jnp.finfo(start.dtype).tiny

    def body(_: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Float[Array, " n"], Float[Array, ""]]:
        image = positive_map @ state[0]
        size = jnp.linalg.norm(image)
        return image / (size + tiny), size

    unit = start / jnp.linalg.norm(start)
    return lax.fori_loop(0, 100, body, (unit, jnp.zeros((), start.dtype)))[1]


def gen_error(model: Model, x: Overlaps, nodes: Rule) -> Average:
    """Compute the test error ``eps_g = E loss(h, y)``, eq. (10): ``E ||y - f||_F^2 / (2 d)`` on fresh sentences.

    Args:
        x: overlaps, for instance of a fixed point.
        nodes: averaging rule; its replicates give the error bar.
    """
    return _over(nodes, lambda replicate: gen_error_in(model, x, replicate))


def gen_error_linear(model: Model, nodes: Rule) -> Average:
    """Compute the test error of the best linear attention, ``E 1/2 Tr[(T - W) D (T - W)^T]``, ``W = E T`` (Result 5.1).

    Args:
        nodes: averaging rule.

    Raises:
        InputError: if the model has no method `target`.
    """
    check_provides(model, "target", "for the linear baseline")
    return _over(nodes, lambda replicate: gen_error_linear_in(model, replicate))


def second_minimum_share(model: Model, x: Overlaps, nodes: Rule, gap: float) -> Average:
    """Compute the share of the nodes whose proximal problem has another minimum, less than `gap` above the lowest.

    Args:
        x: overlaps, for instance of a fixed point.
        nodes: averaging rule.
        gap: energy difference; the loss is of order sigma^2.

    Raises:
        InputError: if `gap` is not positive.
    """
    require(gap > 0, "gap", gap, "positive")

    def share(replicate: Replicate, model: Model, block: Any) -> Float[Array, ""]:
        points = points_in(model, x, replicate, block)
        return model.sentence.share * jnp.sum(points.weight * (points.gap < gap))

    return _over(nodes, lambda replicate: over_nodes(model, replicate, partial(share, replicate)))


def _over(nodes: Rule, number: Callable[[Replicate], Float[Array, ""]]) -> Average:
    values = nodes.each(number)
    return Average(jnp.mean(values, 0), error_bar(values))


def gen_error_in(model: Model, x: Overlaps, replicate: Replicate) -> Float[Array, ""]:
    """Compute `gen_error` in one replicate of the averages."""
    return over_nodes(model, replicate, lambda model, block: error_in_block(model, x, replicate, block))


def error_in_block(model: Model, x: Overlaps, replicate: Replicate, block: Any) -> Float[Array, ""]:
    """Return the contribution of one block to `gen_error`, for the kind of sentences that `model` is conditioned on."""
    h, y, weight = fields_in_block(model, x, replicate, block)
    return model.sentence.share * jnp.sum(weight * loss_at_nodes(model, h, y))


def fields_in_block(
    model: Model, x: Overlaps, replicate: Replicate, block: Any
) -> tuple[Float[Array, "L r N"], Float[Array, "L t N"], Float[Array, " N"]]:
    """Return the fields of student and teacher, and the weights, at the nodes of one block."""
    student, teacher, weight = replicate.quadrature(block)
    return *fields(model, sentence_overlaps(model, x), student, teacher), weight


def gen_error_linear_in(model: Model, replicate: Replicate) -> Float[Array, ""]:
    """Compute `gen_error_linear` in one replicate of the averages; NaN for a model without a target."""
    if not model.provides("target"):
        return jnp.full((), jnp.nan, model.lam.dtype)

    def moments(model: Model, block: Any) -> tuple[Float[Array, "L L"], Float[Array, "L L"], Float[Array, " L"]]:
        _, teacher, weight = replicate.quadrature(block)
        T = target_at_nodes(model, teacher_fields(model, teacher))
        D = model.sentence.share * model.trace
        return D * jnp.sum(weight * T, -1), D * jnp.sum(weight * T**2, -1), D * jnp.sum(weight)

    mean, square, D = over_nodes(model, replicate, moments)
    return 0.5 * jnp.sum(square - mean**2 / D)


@nodewise
def target_at_nodes(model: Model, Y: Float[Array, "L t"]) -> Float[Array, "L L"]:
    """Return the target attention matrices at the teacher's fields Y; all arrays get a last axis of nodes."""
    return model.target(*model.label(Y))


def elevation(
    alpha: Scalar, x: Overlaps, hats: Conjugates, to_delta: Float[Array, "S S"], sums: dict[str, Float[Array, "..."]]
) -> Float[Array, ""]:
    """Return the elevation. It is zero without jumps, and NaN if the state is unstable even without jumps.

    Args:
        to_delta: response of q1 - q0 to the same difference of the conjugates.
        sums: averages of `elevation_moments`.
    """
    # Replica symmetry breaking is considered in the direction of the conjugate of q only.
    X = jnp.sum(x.V * hats.q) / jnp.sqrt(hats.q.ravel() @ to_delta @ hats.q.ravel())
    a, weight = two_values(sums["slopes"])
    mean = jnp.where(sums["slopes"][0] > 0, sums["slopes"][1] / sums["slopes"][0], 1.0)
    beta, v = (jnp.asarray(_B, a.dtype) / mean)[:, None], jnp.asarray(_V, a.dtype) * X
    b = beta * a
    table = jnp.interp(jnp.log(b), jnp.asarray(np.log(_COSTS), a.dtype), jnp.asarray(_costs(), a.dtype))
    jumps = jnp.sum(weight * table, 1, keepdims=True) * beta**2
    smooth = 0.25 * v**2 * (1 / (X**2 - 2 / 3 * v * X) - alpha * softened(sums["soft"], v))
    values = v / beta**2 * (alpha * v / beta * jumps - smooth)
    maximum = jnp.max(values)
    # A maximum at an end of the range means instability even without jumps: v grows, and s falls to zero.
    is_interior = maximum > jnp.max(jnp.append(values[0], values[:, -1]))
    is_known = ~jnp.any(jnp.isnan(values)) & (is_interior | (maximum <= 0))  # XLA's maximum of NaN may be -inf
    return jnp.where(is_known, jnp.maximum(maximum, 0.0), jnp.nan)


def elevation_moments(x: Overlaps, points: Points, e: Float[Array, "L L N"]) -> dict[str, Float[Array, " _"]]:
    """Return the sums over one block of nodes that `elevation` needs.

    Args:
        e: dz/dh - 1.
    """
    square = jnp.einsum("ijn,jkn->ikn", e, e)
    second, third = jnp.einsum("iin->n", square), jnp.einsum("ijn,jin->n", square, e)
    # Eigenvalues are large next to the end of a jump. Those below -1 are due to rounding.
    third = jnp.where(third < -1.001 * second, -third, third)
    soft = jnp.stack([second / (1 + 2 / 3 * v * third / jnp.where(second > 0, second, 1.0)) for v in _SOFT])
    step = points.jumps.step
    a = jnp.sqrt(jnp.sum(step * apply(inverse(x.V), step), (0, 1)))
    slopes = jnp.stack([points.jumps.density @ a**k for k in range(3, 7)])
    return {"soft": soft @ points.weight, "slopes": slopes}


_SOFT = (0.01, 0.1)  # v at which k(v) is averaged; elsewhere it is linear in log v
_LOWEST = 1e-3  # v below which k(v) is constant
_COSTS = np.geomspace(1e-2, 1e2, 400)  # b at which `jump_cost` is tabulated
# Grid on which the elevation is maximised: b at the mean slope, and v / X.
_B, _V = np.geomspace(0.5, 10.0, 24), np.geomspace(1e-8, 0.8, 400)


def jump_cost(b: Number | Float[np.ndarray, "..."]) -> Float[np.ndarray | np.floating, "..."]:
    """Compute the cost of a jump, j(b).

    The energy at a jump is -(a/2)|x| on a line x that is measured in the inner spread, and b = s a. Then
    ``j(b) = int dx { b/2 E|x + xi| + b^2 / 8 - log E exp(b/2 |x + xi|) }``. It tends to b^2 / (3 pi^{1/2}) for small b
    and to b / 2 for large b.
    """
    t, w = legendre(400)
    b = np.asarray(b)[..., None]
    end = 8 + 0.5 * b
    x, w = end * t, 2 * end * w  # both sides
    size = np.sqrt(2 / np.pi) * np.exp(-0.5 * x**2) + x * special.erf(x / 2**0.5)
    sides = (side * 0.5 * b * x + special.log_ndtr(0.5 * b + side * x) for side in (1, -1))
    return np.sum(w * (0.5 * b * size - np.logaddexp(*sides)), -1)


@functools.cache
def _costs() -> Float[np.ndarray, " b"]:
    return jump_cost(_COSTS) / _COSTS**2


def softened(soft: Float[Array, " 2"], v: Float[StateArray, "*shape"]) -> Float[Array, "*shape"]:
    """Return k(v), interpolated and extrapolated in log v from the two v at which it was averaged."""
    low, high = soft
    return low + (high - low) * jnp.log(jnp.maximum(v, _LOWEST) / _SOFT[0]) / np.log(_SOFT[1] / _SOFT[0])


def two_values(moments: Float[Array, " 4"]) -> tuple[Float[Array, " 2"], Float[Array, " 2"]]:
    """Return two values and their weights, with given moments 0 to 3 of a law of positive numbers."""
    size = jnp.where(moments[0] > 0, moments[0], 1.0)
    mean, square, cube = moments[1:] / size
    spread, rounding = square - mean**2, jnp.finfo(mean.dtype).eps ** 0.5 * square
    variance = jnp.maximum(spread, rounding)
    third = jnp.where(spread > rounding, cube - 3 * mean * square + 2 * mean**3, 0.0)
    skewness = third / jnp.where(variance > 0, variance, 1.0) ** 1.5
    half = 0.5 * skewness
    root = jnp.sqrt(1 + half**2)
    values = mean + jnp.sqrt(variance) * (half + root * jnp.array([-1.0, 1.0], mean.dtype))
    return values, moments[0] * 0.5 * (1 + jnp.array([1.0, -1.0], mean.dtype) * half / root)
