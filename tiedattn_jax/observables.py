"""What a state predicts: losses, test error, baseline, stability, and how much the proximal operator jumps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .model import require
from .nodes import Points, Rule, _mix, fields
from .nodewise import nodewise
from .overlaps import Conjugates, Overlaps, residual_covariance
from .potentials import average, prior
from .prox import loss_at_nodes, prox_jacobian

if TYPE_CHECKING:
    from .model import Model


def _target(model: Model, Y: jax.Array) -> jax.Array:
    return model.target(Y)


target_at_nodes = nodewise(_target)


class Diagnostics(eqx.Module):
    """What one replicate of the averages says about a state besides its losses.

    Attributes:
        replicon: spectral radius of the replicon map; the replica-symmetric state is stable below one. Without the
            contribution of the jumps, which is formally infinite wherever `jump_mass` is not zero.
        jump_mass: the jumps' share of Vhat: the excess of the response form of Vhat, which averages dz/dh node by node,
            over the Stein form, which averages z alone, relative to the larger of the two.
        second_minimum: share of the nodes with another minimum of the proximal problem.
        unconverged: share of the nodes whose proximal solve missed its tolerance.
        growth_m: largest eigenvalue of the map in the direction of m at m = 0; one is where m starts to grow.
        growth_theta: likewise for theta at theta = 0. Both are exact in the presence of jumps.
        train_loss_direct: alpha E[loss(prox)] + lambda/2 tr(Q^T Q)/d, equal to the training loss at a fixed point.
    """

    replicon: jax.Array
    jump_mass: jax.Array
    second_minimum: jax.Array
    unconverged: jax.Array
    growth_m: jax.Array
    growth_theta: jax.Array
    train_loss_direct: jax.Array


def test_error(model: Model, x: Overlaps, rule: Rule) -> jax.Array:
    """Test error ``eps_g = E loss(h, y)``, eq. (10): ``E ||y - f||_F^2 / (2 d)`` on fresh sentences."""

    def block_error(block: Any) -> jax.Array:
        student, teacher, weight = rule.quadrature(model, x, block)
        return jnp.sum(weight * loss_at_nodes(model, *fields(model, x, student, teacher)))

    return average(rule, block_error)


def gen_error_linear(model: Model, rule: Rule) -> jax.Array:
    """Test error of the best linear attention, ``E 1/2 Tr[(T - W) D (T - W)^T]`` with ``W = E T`` (Result 5.1).

    Raises:
        AttributeError: the model does not say what its target attention matrix is.
    """
    L, r, _ = model.shape
    eye = jnp.eye(r, dtype=model.lam.dtype) + jnp.zeros((L, r, r), model.lam.dtype)
    zero = jnp.zeros((L, r), model.lam.dtype)
    x = Overlaps(eye, eye, jnp.zeros((L, r, model.rho.shape[-1]), model.lam.dtype), zero)

    def moments(block: Any) -> tuple[jax.Array, jax.Array]:
        student, teacher, weight = rule.quadrature(model, x, block)
        T = target_at_nodes(model, fields(model, x, student, teacher)[1])
        return jnp.sum(weight * T, -1), jnp.sum(weight * T**2, -1)

    mean, square = average(rule, moments)
    return 0.5 * jnp.sum((square - mean**2) * model.trace)


def second_minimum_share(model: Model, x: Overlaps, nodes: Rule, gap: float) -> jax.Array:
    """Share of the nodes with another minimum of the proximal problem less than `gap` above the lowest, (R,).

    Args:
        x: overlaps, for instance of a fixed point.
        nodes: averaging rule; every replicate gives a number.
        gap: energy; the loss is of order sigma^2.

    Raises:
        ValueError: a gap that is not positive.
    """
    require(gap > 0, "gap", gap, "positive")

    def share(rule: Rule, block: Any) -> jax.Array:
        points = rule.points(model, x, block)
        return jnp.sum(points.weight * (points.gap < gap))

    return lax.map(lambda rule: average(rule, lambda block: share(rule, block)), nodes)


def moments(model: Model, x: Overlaps, points: Points) -> dict[str, jax.Array]:
    """The sums over one block of nodes that `diagnose` asks for."""
    L, r, t = model.shape
    n = L * r
    inverse_V = jnp.linalg.inv(x.V)
    score_root = jnp.swapaxes(jnp.linalg.inv(jnp.linalg.cholesky(residual_covariance(model, x))), -1, -2)
    h, y = fields(model, x, points.student, points.teacher)
    w = points.weight
    g = _mix(inverse_V, points.z - h).reshape(n, -1)
    score = _mix(score_root, points.student).reshape(n, -1)  # of the Gaussian law of h given y
    G = prox_jacobian(model, points.z, x.V, y) - jnp.eye(n, dtype=w.dtype)[..., None]
    G = _mix(inverse_V, G.reshape(L, r, -1)).reshape(L, r, L, r, -1)
    u = _mix(jnp.linalg.inv(model.rho), y)[:, None]
    gy, score_y = ((a.reshape(L, r, 1, -1) * u).reshape(n * t, -1) for a in (g, score))
    return {
        "g_score": _gram(g, score, w),
        "gy_score": _gram(gy, score_y, w),
        "response": jnp.einsum("iaian,n->", G, w),
        "replicon": jnp.einsum("iajcn,ibjdn,n->iabjcd", G, G, w),
        "loss": jnp.sum(w * loss_at_nodes(model, points.z, y)),
        "second": jnp.sum(w * jnp.isfinite(points.gap)),
        "missed": jnp.sum(w * ~points.converged),
    }


def diagnose(model: Model, alpha: jax.Array, x: Overlaps, hats: Conjugates, sums: dict[str, jax.Array]) -> Diagnostics:
    """All `Diagnostics` of a state from its averaged `moments`."""
    L, r, t = model.shape
    n = L * r
    law = model.law()
    resolvents = jnp.linalg.inv(
        model.lam * jnp.eye(r, dtype=model.lam.dtype) + jnp.einsum("kl,lab->kab", law.gamma, hats.V)
    )
    # E_nu over the spectrum of what the prior does to a small mhat, thetahat, or qhat.
    to_m = jnp.einsum("n,nkl,nab->kalb", law.weights, law.tau, resolvents).reshape(n, n)
    to_theta = jnp.einsum("n,nk,nl,nab,nst->kaslbt", law.weights, law.gamma, law.gamma, resolvents, law.pi)
    curvature = alpha * sums["gy_score"] + _block(hats.V, jnp.linalg.inv(model.rho))
    to_delta = jnp.einsum("n,nk,nl,nab,ncd->kadlbc", law.weights, law.gamma, law.gamma, resolvents, resolvents)
    replicon = to_delta.reshape(n * r, n * r) @ (alpha * sums["replicon"]).reshape(n * r, n * r)
    size = -2.0 * prior_slope(model, hats)
    stein = jnp.sum(jnp.trace(hats.V, axis1=1, axis2=2))
    response = -alpha * sums["response"]
    return Diagnostics(
        replicon=_radius(replicon, jnp.tile(jnp.eye(r, dtype=x.q.dtype).ravel(), L)),
        jump_mass=(response - stein) / jnp.maximum(jnp.abs(response), jnp.abs(stein)),
        second_minimum=sums["second"],
        unconverged=sums["missed"],
        growth_m=_largest(to_m, alpha * sums["g_score"]),
        growth_theta=_largest(to_theta.reshape(n * t, n * t), curvature),
        train_loss_direct=alpha * sums["loss"] + 0.5 * model.lam * size,
    )


def prior_slope(model: Model, hats: Conjugates) -> jax.Array:
    """Derivative of psi in a uniform addition to Lam, which is minus half of ``tr(Q^T Q) / d``."""
    return jax.grad(lambda lam: prior(eqx.tree_at(lambda m: m.lam, model, lam), hats))(model.lam)


def _gram(a: jax.Array, b: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.stack([jnp.stack([jnp.sum(w * p * q) for q in b]) for p in a])


def _block(V: jax.Array, inverse_rho: jax.Array) -> jax.Array:
    """The part of d thetahat / d theta that comes from the spread of h given y: Vhat rho^{-1}, token by token."""
    blocks = [jnp.kron(v, p) for v, p in zip(V, inverse_rho, strict=True)]
    return jax.scipy.linalg.block_diag(*blocks)


def _largest(positive: jax.Array, symmetric: jax.Array) -> jax.Array:
    """Largest eigenvalue of the product of a positive semidefinite and a symmetric matrix."""
    values, vectors = jnp.linalg.eigh(positive)
    kept = values > 1e-6 * values[-1]  # the null space is not a direction of the map
    root = vectors * jnp.sqrt(jnp.where(kept, values, 0.0))
    inner = root.T @ (0.5 * (symmetric + symmetric.T)) @ root
    return jnp.linalg.eigvalsh(inner - jnp.diag(jnp.where(kept, 0.0, 1e6)))[-1]


def _radius(positive_map: jax.Array, start: jax.Array, steps: int = 100) -> jax.Array:
    """Spectral radius of a map of the cone of positive matrices into itself, by power iteration from inside it."""
    tiny = jnp.finfo(start.dtype).tiny

    def body(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        image = positive_map @ state[0]
        size = jnp.linalg.norm(image)
        return image / (size + tiny), size

    unit = start / jnp.linalg.norm(start)
    return lax.fori_loop(0, steps, body, (unit, jnp.zeros((), start.dtype)))[1]
