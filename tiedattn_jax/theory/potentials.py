"""The two scalar potentials of the theory, whose gradients are the saddle-point equations (7)-(8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..averages.fields import fields
from ..averages.moreau import moreau
from ..averages.rule import Points, Replicate, average, search_block
from ..base.derivatives import derivative_along
from ..base.linalg import precise, solve
from ..base.types import Scalar
from ..model.model import Model, over_kinds
from ..model.overlaps import Conjugates, Overlaps, sentence_overlaps, symmetric
from ..model.penalties import Penalty, minimiser
from .weights import weight_fields, weight_law, weight_moments


def stationary(
    fn: Callable[[PyTree, PyTree], Float[Array, "..."]],
) -> Callable[[PyTree, PyTree], Float[Array, "..."]]:
    """Differentiate `fn(z, p)` by the envelope theorem.

    The function must be evaluated at a `z(p)` where it is stationary in `z`. Its value is `fn(z, p)`, and its
    derivative is the partial derivative in `p`. A second derivative includes the motion of `z(p)`.
    """

    @jax.custom_jvp
    def value(z: PyTree, p: PyTree) -> Float[Array, "..."]:
        return fn(z, p)

    @partial(value.defjvp, symbolic_zeros=True)
    @precise
    def rule(primals: Any, tangents: Any) -> Any:
        z, p = primals
        # The value must again be stationary, so that an outer derivative does not include the motion of z either.
        return value(z, p), derivative_along(lambda p: fn(z, p), (p,), tangents[1:])

    return value


@stationary
def block_envelope(points: Points, args: tuple[Model, Overlaps]) -> Float[Array, ""]:
    """Return the contribution of one block to the channel potential, at the minimisers of its nodes."""
    model, x = args[0], sentence_overlaps(*args)
    h, y = fields(model, x, points.student, points.teacher)
    return model.sentence.share * jnp.sum(points.weight * moreau(model, points.z, h, x.V, y))


def over_nodes(model: Model, replicate: Replicate, fn: Callable[[Model, Any], PyTree]) -> PyTree:
    """Sum ``fn(model, block)`` over the blocks and over the kinds of sentences; `fn` gets the model of one kind."""
    return over_kinds(model, lambda model: average(replicate, partial(fn, model)))


def channel(model: Model, x: Overlaps, replicate: Replicate) -> Float[Array, ""]:
    """Compute the channel potential M(q, V, theta, m), the Gaussian average of the Moreau envelope of the loss.

    ``M = E min_Z { sum_l 1/2 (z_l - h_l)^T V_l^{-1} (z_l - h_l) + loss(Z, Y) }`` with
    ``(h_l - m_l, y_l) ~ N(0, [[q_l, theta_l], [theta_l^T, rho_l]])``, independent over the tokens. If there are several
    kinds of sentences, M is the mean over them.
    """

    def energy(model: Model, block: Any) -> Float[Array, ""]:
        return block_envelope(points_in(model, x, replicate, block), (model, x))

    return over_nodes(model, replicate, energy)


def points_in(model: Model, x: Overlaps, replicate: Replicate, block: Any) -> Points:
    """Return nodes, weights and minimisers of one block, for the kind of sentences that `model` is conditioned on."""
    x = sentence_overlaps(model, x)
    return replicate.points(model, x, block, search_block(replicate, model, x, block))


Sums = Callable[[Model, Overlaps, Points], PyTree]


def no_sums(model: Model, x: Overlaps, points: Points) -> tuple:
    """Return no further sums; the default of `channel_gradient`."""
    return ()


def channel_gradient(
    model: Model, x: Overlaps, replicate: Replicate, extra_sums: Sums = no_sums
) -> tuple[Float[Array, ""], Overlaps, PyTree]:
    """Compute the channel potential M, its symmetrised gradient in the overlaps, and `extra_sums`, in one pass.

    Args:
        extra_sums: further sums over the nodes of a block, for the kind of sentences that its model is conditioned on.
    """

    def block_gradient(model: Model, block: Any) -> tuple[Float[Array, ""], Overlaps, PyTree]:
        return gradient_at(points_in(model, x, replicate, block), model, x, extra_sums)

    return over_nodes(model, replicate, block_gradient)


def gradient_at(
    points: Points, model: Model, x: Overlaps, extra_sums: Sums
) -> tuple[Float[Array, ""], Overlaps, PyTree]:
    """Return the contribution of the points of one block to `channel_gradient`."""
    M, g = jax.value_and_grad(lambda x: block_envelope(points, (model, x)))(x)
    return M, Overlaps(symmetric(g.q), symmetric(g.V), g.theta, g.m), extra_sums(model, x, points)


def prior(model: Model, hats: Conjugates) -> Float[Array, ""]:
    """Compute the prior potential psi, an average over the joint spectral law.

    For the ridge it is ``psi = 1/2 E tr[Lam^{-1} (sum_k gamma_k qhat_k + b b^T)]``, with
    ``Lam = lambda I + sum_k gamma_k Vhat_k`` and ``b = sum_k tau_k mhat_k + sum_k gamma_k thetahat_k pi``.

    With a further penalty p it is ``psi = E max_w { b~ . w - w^T Lam w / 2 - sum_a p(w_a) }``, where
    ``b~ = b + (sum_k gamma_k qhat_k)^{1/2} zeta`` with standard normals zeta.
    """
    if model.penalty is None:
        Lam, square = weight_moments(model, hats)
        atom_values = 0.5 * jnp.trace(solve(Lam, square), axis1=1, axis2=2)
    else:
        law = weight_law(model, hats)
        # `_gains` takes all second derivatives at once. It compiles longer, which pays off for many nodes.
        atom_values = _gains(model.penalty, _packed(*law)) if hats.m.shape[1] > 2 else _mean_gain(model.penalty, *law)
    return model.law().weights @ atom_values


def _packed(
    Lam: Float[Array, "K r r"], mean: Float[Array, "K r"], covariance: Float[Array, "K r r"]
) -> Float[Array, "K r*(r+2)"]:
    """Pack the numbers that a weight's gain depends on into one vector per atom."""
    rows, columns = np.tril_indices(mean.shape[1])
    return jnp.concatenate([symmetric(Lam)[:, rows, columns], mean, symmetric(covariance)[:, rows, columns]], 1)


def _unpacked(
    packed: Float[Array, "K n"],
) -> tuple[Float[Array, "K r r"], Float[Array, "K r"], Float[Array, "K r r"]]:
    r = math.isqrt(packed.shape[1] + 1) - 1
    half = r * (r + 1) // 2
    index = np.zeros((r, r), int)
    index[np.tril_indices(r)] = np.arange(half)
    index = np.maximum(index, index.T)
    return packed[:, index], packed[:, half : half + r], packed[:, half + r + index]


def _mean_gain(
    penalty: Penalty, Lam: Float[Array, "K r r"], mean: Float[Array, "K r"], covariance: Float[Array, "K r r"]
) -> Float[Array, " K"]:
    """Return ``E max_w { b~ . w - w^T Lam w / 2 - sum_a p(w_a) }`` at every atom."""
    b, share = weight_fields(penalty, Lam, mean, covariance)
    Lam = Lam[:, None]
    return jnp.sum(share * _gain(minimiser(penalty, Lam, b), (penalty, Lam, b)), 1)


@jax.custom_jvp
def _gains(penalty: Penalty, packed: Float[Array, "K n"]) -> Float[Array, " K"]:
    """Return `_mean_gain`; its second derivatives in `packed` are computed as one Hessian, see `_slopes`."""
    return _mean_gain(penalty, *_unpacked(packed))


@partial(_gains.defjvp, symbolic_zeros=True)
@precise
def _(primals: Any, tangents: Any) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
    tangent = derivative_along(lambda packed: jnp.sum(_slopes(*primals) * packed, 1), primals[1:], tangents[1:])
    return _gains(*primals), tangent + derivative_along(lambda p: _gains.fun(p, primals[1]), primals[:1], tangents[:1])


@jax.custom_jvp
def _slopes(penalty: Penalty, packed: Float[Array, "K n"]) -> Float[Array, "K n"]:
    """Return the derivatives of `_gains` in `packed`."""
    return jax.grad(lambda packed: jnp.sum(_gains.fun(penalty, packed)))(packed)


@partial(_slopes.defjvp, symbolic_zeros=True)
@precise
def _(primals: Any, tangents: Any) -> tuple[Float[Array, "K n"], Float[Array, "K n"]]:
    """Compute the whole Hessian in `packed` once.

    `packed` has far fewer entries than the conjugates and the numbers of the model on which it depends.
    """
    penalty, packed = primals
    slopes, tangent_map = jax.linearize(lambda packed: _slopes.fun(penalty, packed), packed)
    axes = jnp.broadcast_to(jnp.eye(packed.shape[1], dtype=packed.dtype)[:, None], (packed.shape[1], *packed.shape))
    hessian = jax.vmap(tangent_map)(axes)
    tangent = derivative_along(lambda packed: jnp.einsum("jki,kj->ki", hessian, packed), primals[1:], tangents[1:])
    return slopes, tangent + derivative_along(lambda p: _slopes.fun(p, packed), primals[:1], tangents[:1])


@stationary
def _gain(
    w: Float[Array, "K N r"], args: tuple[Penalty, Float[Array, "K 1 r r"], Float[Array, "K N r"]]
) -> Float[Array, "K N"]:
    penalty, Lam, b = args
    pull = 0.5 * jnp.einsum("...ab,...b->...a", Lam, w)
    return jnp.sum((b - pull) * w - penalty.value(w), -1)


def conjugates(alpha: Scalar, gradient: Overlaps) -> Conjugates:
    """Return the conjugates as gradients of ``alpha M``, eq. (7)."""
    return Conjugates(
        q=-2 * alpha * gradient.V, V=2 * alpha * gradient.q, theta=-alpha * gradient.theta, m=-alpha * gradient.m
    )


def overlaps(model: Model, hats: Conjugates) -> Overlaps:
    """Return the order parameters as gradients of psi, eq. (8)."""
    g = jax.grad(lambda h: prior(model, h))(hats)
    return Overlaps(q=-2 * symmetric(g.V), V=2 * symmetric(g.q), theta=g.theta, m=g.m)


def free_energy(model: Model, alpha: Scalar, x: Overlaps, hats: Conjugates, M: Float[Array, ""]) -> Float[Array, ""]:
    """Compute the free energy Phi at overlaps, conjugates and channel potential `M`.

    ``Phi = 1/2 sum_l tr(Vhat_l q_l - qhat_l V_l) - sum_l mhat_l . m_l - sum_l tr(thetahat_l theta_l^T) + psi
    - alpha M``. At a saddle point it is minus the training loss.
    """
    pairing = 0.5 * jnp.sum(hats.V * x.q - hats.q * x.V) - jnp.sum(hats.m * x.m) - jnp.sum(hats.theta * x.theta)
    return pairing + prior(model, hats) - alpha * M


def train_loss_partials(
    model: Model, alpha: Scalar, M: Float[Array, ""], M_by_model: Model, hats: Conjugates
) -> tuple[Model, Float[Array, ""]]:
    """Return the derivatives of the training loss in the model and in alpha.

    They are the partial derivatives, because Phi is stationary in the overlaps and conjugates.

    Args:
        M: channel potential.
        M_by_model: its partial derivatives in the model's numbers.
    """
    prior_by_model = jax.grad(prior)(model, hats)
    return jax.tree.map(lambda a, b: alpha * a - b, M_by_model, prior_by_model), M


def channel_by_model(model: Model, x: Overlaps, points: Points) -> Model:
    """Return the contribution of one block to the partial derivatives of M in the model's numbers."""
    return jax.grad(lambda m: block_envelope(points, (m.condition_on(model.kind), x)))(model.condition_on(None))
