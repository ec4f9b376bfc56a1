"""The two scalar potentials of the Bayes-optimal learner, and the equations that follow from them.

# notation: q_l (t, t) the overlap of the posterior mean with the teacher, V_l = rho_l - q_l its error, qhat_l the
# conjugates, pi_a the second moments of the teacher at atom a of the spectrum, S_a = sum_l gamma_al qhat_l, g_l the
# score.

The structure is that of `theory.potentials`: minus the log evidence takes the place of the Moreau envelope, and the
Gaussian prior of the teacher that of the ridge. The free entropy per dimension is the extremum over q and qhat of

    - 1/2 sum_l tr(qhat_l q_l) + psi(qhat) + alpha Psi(q).

At the extremum ``q = 2 dpsi / dqhat`` and ``qhat = 2 alpha dPsi / dq``, which is ``alpha E[g g^T]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..averages.rule import Replicate
from ..base.linalg import apply, cholesky, inverse, precise
from ..model.model import Model
from ..model.overlaps import symmetric
from ..theory.observables import target_at_nodes
from ..theory.potentials import over_nodes
from . import signs
from .channel import labels_at_nodes, log_evidence, score


class Posterior(eqx.Module):
    """Order parameters of a posterior mean: the overlap q with the teacher and the error V = rho - q, (S, t, t)."""

    q: Float[Array, "S t t"]
    V: Float[Array, "S t t"]


class Channel(NamedTuple):
    """Averages over the labels: ``E[g_l g_l^T]`` (S, t, t), and the mean log evidence Psi, ()."""

    information: Array
    log_evidence: Array


@precise
def prior(model: Model, hats: Float[Array, "S t t"]) -> Float[Array, ""]:
    """Compute ``psi = 1/2 E[tr(pi S) - log det(1 + pi S)]`` over the atoms of the spectrum."""
    law = model.law()
    product = law.pi @ jnp.einsum("kl,lab->kab", law.gamma, hats)
    log_det = jnp.linalg.slogdet(jnp.eye(product.shape[-1], dtype=product.dtype) + product)[1]
    return 0.5 * law.weights @ (jnp.trace(product, axis1=1, axis2=2) - log_det)


@precise
def posterior(model: Model, hats: Float[Array, "S t t"]) -> Posterior:
    """Return the order parameters at the conjugates: q is twice the gradient of `prior`, and V = rho - q.

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


def channel(model: Model, x: Posterior, replicate: Replicate) -> Channel:
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
    """Return `channel` in closed form for labels that give the teacher's fields up to a common sign, see `signs`."""
    L = model.shape[0]
    q, W = jnp.mean(x.q), jnp.mean(x.V) + noise
    information = signs.information(L, q / W) / (L * W)
    return Channel(jnp.broadcast_to(information, x.q.shape), signs.log_evidence(L, q / W, W))


def gen_error(model: Model, x: Posterior, replicate: Replicate) -> Float[Array, ""]:
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
    return -0.5 * jnp.sum(hats * x.q) + prior(model, hats) + alpha * evidence
