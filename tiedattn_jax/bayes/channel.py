"""The label channel of the Bayes-optimal learner, and the two scalar potentials that all its equations follow from.

# notation: w (L, t) the mean and V (L, t, t) the covariance of the teacher's fields Y before the label O is seen,
# Z(O, w) = int dY N(Y; w, V) p(O | Y) the evidence, g = d log Z / dw = V^{-1} (E[Y | O, w] - w) the score;
# q_l (t, t) the overlap of the posterior mean with the teacher, V_l = rho_l - q_l its error, qhat_l the conjugates,
# pi_a the second moments of the teacher at atom a of the spectrum, S_a = sum_l gamma_al qhat_l.

The structure is that of `theory.potentials`: minus the log evidence takes the place of the Moreau envelope, and the
Gaussian prior of the teacher that of the ridge. The free entropy per dimension is the extremum over q and qhat of

    - 1/2 sum_l tr(qhat_l q_l) + psi(qhat) + alpha Psi(q).

At the extremum ``q = 2 dpsi / dqhat`` and ``qhat = 2 alpha dPsi / dq``, which is ``alpha E[g g^T]``.

Averages over the labels are over nodes of two draws of the teacher's fields. For labels that give the teacher's noisy
fields U = Y + noise up to a common sign they have a closed form, for one teacher column and L tokens that are alike.
With W the variance of U given its mean w, c = |w|^2 / (L W) on average, x = |w| / sqrt(W) = sqrt(c) chi with chi of the
chi law of L degrees, and a standard normal a, the score is ``g = (U tanh(U.w / W) - w) / W`` with
``U.w / W = x (x + a)``. Averages over sentences are then averages over x and a. They are smooth, and a product rule is
accurate to 1e-11 for any c.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..averages.rules import Replicate, legendre, teacher_fields
from ..base.arrays import apply, cholesky, inverse, precise, solve
from ..model.model import Model, Preimages
from ..model.overlaps import symmetric
from ..theory.observables import target_at_nodes
from ..theory.potentials import over_nodes

_LARGEST = 10.0  # beyond x = 10 the sign is known but for a probability of exp(-50)
_RADII = 48  # nodes of x, in the closed form
_STEP, _RANGE = 0.2, 9.0  # trapezoidal rule of a; it converges exponentially


def log_evidence(label: Preimages, w: Float[Array, "L t"], V: Float[Array, "L t t"]) -> Float[Array, ""]:
    """Return log Z(O, w) of a label, up to a constant of the target."""
    noise, eye = jnp.broadcast_to(label.noise, w.shape[:1])[:, None, None], jnp.eye(V.shape[-1], dtype=V.dtype)
    is_shown = noise < jnp.inf
    covariance = jnp.where(is_shown, V + jnp.where(is_shown, noise, 0.0) * eye, eye)
    distance = jnp.where(is_shown, (label.fields - w)[..., None], 0.0)  # (K, L, t, 1)
    square = jnp.sum(
        distance * solve(jnp.broadcast_to(covariance, (*distance.shape[:2], *V.shape[1:])), distance), (1, 2, 3)
    )
    log_volume = jnp.sum(jnp.log(jnp.diagonal(cholesky(covariance), axis1=-2, axis2=-1)))
    return jax.nn.logsumexp(label.log_weight - 0.5 * square) - log_volume - 0.5 * w.size * np.log(2 * np.pi)


score = jax.grad(log_evidence, argnums=1)
curvature = jax.jacfwd(score, argnums=1)  # Hessian of log Z in w, (L, t, L, t)


def labels_at_nodes(model: Model, Y: Float[Array, "L _ N"]) -> Preimages:
    """Return the preimages of the labels at all nodes, leaves (N, ...); fields of noise follow those of the teacher."""
    return jax.vmap(lambda y: model.preimages(*model.label(y)), -1)(Y)


def curvatures_at_zero(model: Model, normals: Float[Array, "L _ N"]) -> Float[Array, "N L t L t"]:
    """Return the Hessians at w = 0, where nothing is known yet, of the labels at all nodes of standard normals."""
    labels, rho = labels_at_nodes(model, teacher_fields(model, normals)), model.rho
    return jax.vmap(curvature, (0, None, None))(labels, jnp.zeros(rho.shape[:2], rho.dtype), rho)


class Posterior(eqx.Module):
    """Order parameters of a posterior mean: the overlap q with the teacher and the error V = rho - q, (S, t, t)."""

    q: Float[Array, "S t t"]
    V: Float[Array, "S t t"]


class Channel(NamedTuple):
    """Averages over the labels: ``E[g_l g_l^T]`` (S, t, t), and the mean log evidence Psi, ()."""

    information: Array
    log_evidence: Array


@precise
def teacher_prior(model: Model, hats: Float[Array, "S t t"]) -> Float[Array, ""]:
    """Compute ``psi = 1/2 E[tr(pi S) - log det(1 + pi S)]`` over the atoms of the spectrum."""
    law = model.law()
    product = law.pi @ jnp.einsum("kl,lab->kab", law.gamma, hats)
    log_det = jnp.linalg.slogdet(jnp.eye(product.shape[-1], dtype=product.dtype) + product)[1]
    return 0.5 * law.weights @ (jnp.trace(product, axis1=1, axis2=2) - log_det)


@precise
def posterior(model: Model, hats: Float[Array, "S t t"]) -> Posterior:
    """Return the order parameters at the conjugates: q is twice the gradient of `teacher_prior`, and V = rho - q.

    Both are computed without a difference, so that neither a small q nor a small V loses digits.
    """
    law = model.law()
    S = jnp.einsum("kl,lab->kab", law.gamma, hats)
    C = solve_general(jnp.eye(S.shape[-1], dtype=S.dtype) + law.pi @ S, law.pi)  # (pi^{-1} + S)^{-1}
    q, V = (jnp.einsum("k,kl,kab->lab", law.weights, law.gamma, a) for a in (law.pi @ S @ C, C))
    return Posterior(symmetric(q), symmetric(V))


def solve_general(a: Float[Array, "... t t"], b: Float[Array, "... t t"]) -> Float[Array, "... t t"]:
    """Solve ``a x = b`` over the last two axes with pivoting; numbers are divided."""
    return b / a if a.shape[-1] == 1 else jnp.linalg.solve(a, b)


def label_channel(model: Model, x: Posterior, replicate: Replicate) -> Channel:
    """Average over the labels, on the nodes of a replicate; with several kinds of sentences over these as well."""

    def block_sums(model: Model, block: Any) -> Channel:
        student, teacher, weight = replicate.quadrature(block)
        t, sentence = x.q.shape[-1], model.sentence
        q, V = sentence.to_tokens(x.q), sentence.to_tokens(x.V)
        w = apply(cholesky(q), student[:, :t])
        Y = w + apply(cholesky(V), teacher[:, :t])
        labels = labels_at_nodes(model, jnp.concatenate([Y, teacher[:, t:]], 1))
        g = jax.vmap(score, (0, -1, None), -1)(labels, w, V)
        evidence = jax.vmap(log_evidence, (0, -1, None))(labels, w, V)
        weight = sentence.share * weight
        return Channel(sentence.to_classes(jnp.einsum("lan,lbn,n->lab", g, g, weight)), weight @ evidence)

    return over_nodes(model, replicate, block_sums)


def sign_channel(model: Model, x: Posterior, noise: Float[Array, ""]) -> Channel:
    """Return `label_channel` in closed form for labels that give the teacher's fields up to a common sign."""
    L = model.shape[0]
    q, W = jnp.mean(x.q), jnp.mean(x.V) + noise
    information = sign_information(L, q / W) / (L * W)
    return Channel(jnp.broadcast_to(information, x.q.shape), sign_evidence(L, q / W, W))


def posterior_error(model: Model, x: Posterior, replicate: Replicate) -> Float[Array, ""]:
    """Compute the test error of the optimal predictor, ``E 1/2 tr[(T - E[T | w]) D (T - E[T | w])^T]``.

    It is half the mean squared difference of the targets of two draws of the teacher's fields from the same posterior.
    """

    def block_error(model: Model, block: Any) -> Array:
        first, second, weight = replicate.quadrature(block)
        t, sentence = x.q.shape[-1], model.sentence
        rho, q, V = model.rho, sentence.to_tokens(x.q), sentence.to_tokens(x.V)
        Y = apply(cholesky(rho), first[:, :t])
        explained = q @ inverse(rho)
        spread = cholesky(symmetric(V + explained @ V))  # rho - q rho^{-1} q
        other = apply(explained, Y) + apply(spread, second[:, :t])
        T, T_other = (
            target_at_nodes(model, jnp.concatenate([fields, noise[:, t:]], 1))
            for fields, noise in ((Y, first), (other, second))
        )
        return sentence.share * jnp.einsum("kln,l,n->", (T - T_other) ** 2, model.trace, weight) / 4

    return over_nodes(model, replicate, block_error)


def free_entropy(
    model: Model, alpha: Float[Array, ""], x: Posterior, hats: Float[Array, "S t t"], evidence: Float[Array, ""]
) -> Float[Array, ""]:
    """Compute the free entropy per dimension, up to a constant of the target times alpha."""
    return -0.5 * jnp.sum(hats * x.q) + teacher_prior(model, hats) + alpha * evidence


def chi_rule(L: int, reach: Float[Array, ""], order: int) -> tuple[Float[Array, " {order}"], Float[Array, " {order}"]]:
    """Return nodes and weights of averages over the chi law of L degrees, up to the radius `reach`."""
    unit, weight = (jnp.asarray(a, reach.dtype) for a in legendre(order))
    chi = reach * unit
    density = chi ** (L - 1) * jnp.exp(-(chi**2) / 2) / (2 ** (L / 2 - 1) * math.gamma(L / 2))
    return chi, reach * weight * density


def largest_radius(L: int) -> float:
    """Return a radius beyond which the chi law of L degrees has no weight that a float sees."""
    return math.sqrt(L) + 9


def _grid(L: int, c: Float[Array, ""]) -> tuple[Array, Array, Array]:
    """Return x (X, 1), a (A,) and the weights (X, A) of the averages."""
    chi, weight = chi_rule(L, jnp.minimum(largest_radius(L), _LARGEST / jnp.sqrt(c)), _RADII)
    a = jnp.asarray(np.arange(-_RANGE, _RANGE + _STEP / 2, _STEP), c.dtype)
    normal = _STEP * jnp.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
    return (jnp.sqrt(c) * chi)[:, None], a, weight[:, None] * normal


def sign_information(L: int, c: Float[Array, ""]) -> Float[Array, ""]:
    """Return ``I_L(c) = W E|g|^2``: about ``L (L + 1) c`` for small c, and L for large c.

    It is ``L - E[((x + a)^2 + L - 1) sech^2(x (x + a))]``. For small c it is computed as
    ``E[((x + a)^2 + L - 1) tanh^2(x (x + a))] - L c``, where large terms have cancelled.
    """
    x, a, weight = _grid(L, c)
    factor, argument = (x + a) ** 2 + (L - 1), x * (x + a)
    small = jnp.sum(weight * factor * jnp.tanh(argument) ** 2) - L * c
    sech_square = 4 * jax.nn.sigmoid(2 * argument) * jax.nn.sigmoid(-2 * argument)  # cosh overflows in float32
    return jnp.where(c < 1, small, L - jnp.sum(weight * factor * sech_square))


def sign_evidence(L: int, c: Float[Array, ""], W: Float[Array, ""]) -> Float[Array, ""]:
    """Return E log Z of a sentence, normalised as `log_evidence`."""
    x, a, weight = _grid(L, c)
    # log(1 + exp(-2 x (x + a))), which vanishes where the sign is known
    unknown = jnp.sum(weight * jnp.logaddexp(0.0, -2 * x * (x + a)))
    return unknown - math.log(2) - L / 2 * (1 + jnp.log(2 * jnp.pi * W))
