"""Thresholds of the Bayes-optimal learner, and the spectral start, which works from the first of them on.

# notation: G = rho^{1/2} Hess rho^{1/2} with the Hessian of the log evidence of a label at w = 0, so that
# 1 + G = E[y y^T | O] for fields y of unit covariance; c = sqrt(alpha / alpha_WR); T = G (c + G)^{-1}.

Learning begins at weak recovery, alpha_WR, and the teacher is recovered exactly from perfect recovery on.

The spectral start is the leading eigenvector of a matrix of data alone,
``M = sum_mu sum_{l l'} x_l T(O^mu)_{l l'} x_{l'}^T / d`` over the tokens of all sentences. It overlaps with the teacher
from weak recovery on (Luo, Alghamdi and Lu 2019 for one token: the processing T is the optimal one).
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..averages.program import program
from ..averages.recipes import AnyNodes
from ..averages.rules import Replicate, Rule, teacher_fields
from ..base.arrays import cholesky, inverse, one_by_one, precise
from ..base.derivatives import bisected_root
from ..base.errors import InputError, is_concrete, require, with_values
from ..base.results import Average, error_bar
from ..model.checks import check_alpha
from ..model.model import Model, Preimages
from ..theory.observables import largest_eigenvalue
from ..theory.potentials import over_nodes
from ..theory.quantities import Quantity
from .channel import Posterior, chi_rule, curvature, curvatures_at_zero, largest_radius, posterior, score, sign_channel
from .fixed_points import averages_of, check_bayes, has_closed_form, if_allowed, noise_of

_STEPS = 400  # overlaps on the curve alpha(q); its maximum is then known to 1e-6
_RADII = 128  # nodes of |U| in the spectrum of G


def weak_recovery(model: Model, nodes: AnyNodes = None) -> Quantity:
    """Return the alpha below which the labels say nothing of the teacher's direction, even to an optimal learner.

    Above it the state without overlap is unstable: any small overlap grows. With the Hessian G of the log evidence of a
    label at w = 0, ``1 / alpha`` is the spectral radius of ``q -> E[G q G^T]`` combined with the prior's response. For
    labels that give the fields up to a sign it is ``(1 + Delta)^2 / (L (L + 1))`` for one eigenvalue of the covariance,
    with Delta the variance of the noise over that of the fields. No label of L fields can have a smaller one.

    Args:
        model, nodes: as in `bayes`.

    Raises:
        InputError: as `bayes`; also if labels tell the sign of the teacher, whose overlap is then never zero.
    """
    check_bayes(model)
    _check_signless(model)
    rule, closed_form = averages_of(model, nodes), has_closed_form(model)
    return Quantity.of_model(
        lambda m: if_allowed(model, thresholds(m, rule, closed_form)),
        model,
        name="alpha",
        event="weak_recovery",
        meaning="weak recovery of the teacher",
    )


def _check_signless(model: Model) -> None:
    """Raise an `InputError` if labels tell the sign of the teacher: they have a score where nothing is known."""
    if is_concrete(model):
        with with_values():
            g = np.asarray(_score_of_a_label(model))
        text = "one whose labels do not tell the sign of the teacher: else its overlap is positive at every alpha"
        require(np.abs(g) <= np.finfo(g.dtype).eps ** 0.5, "model", type(model).__name__, text)


@eqx.filter_jit
def _score_of_a_label(model: Model) -> Float[Array, "L t"]:
    """Return the score of one label at w = 0, for fields of unit size."""
    rho = model.rho
    normals = np.random.default_rng(0).standard_normal((rho.shape[0], sum(model.columns[1:])))
    fields = teacher_fields(model, jnp.asarray(normals, rho.dtype)[..., None])[..., 0]
    size = jnp.sqrt(jnp.max(jnp.trace(rho, axis1=1, axis2=2)))
    return size * score(model.preimages(*model.label(fields)), jnp.zeros(rho.shape[:2], rho.dtype), rho)


@program
def thresholds(model: Model, rule: Rule, closed_form: bool) -> Float[Array, " R"]:
    """Return the alpha of `weak_recovery` in every replicate of the averages."""

    def threshold(curvature: Array) -> Array:
        size = curvature.shape[0] * curvature.shape[1] ** 2
        response = jax.jacfwd(lambda hats: posterior(model, hats).q)(jnp.zeros(curvature.shape[:3], curvature.dtype))
        matrices = (a.reshape(size, size) for a in (response, curvature))
        return 1 / largest_eigenvalue(*matrices)

    return rule.each(
        lambda replicate: threshold(_sign_curvature(model) if closed_form else _curvature(model, replicate))
    )


def _sign_curvature(model: Model) -> Float[Array, "S t t S t t"]:
    """Return ``dE[g g^T] / dq`` at q = 0 in closed form: ``I_L(c) = L (L + 1) c`` for small c."""
    rho = model.rho
    L, W = model.shape[0], jnp.mean(rho) + noise_of(model)
    return jnp.full((L, 1, 1, L, 1, 1), (L + 1) / L) / W**2


def _curvature(model: Model, replicate: Replicate) -> Float[Array, "S t t S t t"]:
    """Return ``dE[g g^T] / dq`` at q = 0, ``E[G_lk (x) G_lk]`` with the Hessian G of the log evidence."""

    def block_sum(model: Model, block: Any) -> Array:
        _, teacher, weight = replicate.quadrature(block)
        G, sentence = curvatures_at_zero(model, teacher), model.sentence
        tensor = jnp.einsum("nlakc,nlbkd,n->labkcd", G, G, sentence.share * weight)
        return sentence.to_classes(sentence.to_classes(tensor), 3)

    return over_nodes(model, replicate, block_sum)


def perfect_recovery(model: Model, nodes: AnyNodes = None) -> Quantity:
    """Return the alpha above which the teacher is recovered exactly, for exact labels that give fields up to a sign.

    It is 1 / L: n sentences give n L numbers, and the teacher has d. Message passing from a random start reaches it
    where ``alpha(q) = q / (dq/dqhat . I_L)``, the alpha at which q is a fixed point, has its maximum; for two tokens
    and more the maximum is the limit 1 / L, and for one token (real phase retrieval) it is 1.128.

    Args:
        model: as in `bayes`.
        nodes: not used; the averages have a closed form.

    Raises:
        InputError: as `bayes`; also if labels are noisy, do not give the fields up to a sign, or tokens differ.
    """
    check_bayes(model, "perfect recovery", same=("gamma", "pi"))
    noise = noise_of(model)
    if not has_closed_form(model) or (is_concrete(noise) and float(noise) > 0):
        raise InputError("model", "must have exact labels that give the fields up to a sign, and tokens that are alike")
    information = jnp.full(2, 1 / model.shape[0], model.lam.dtype)  # two replicates that agree: it is known exactly
    information = if_allowed(model, jnp.where(noise > 0, jnp.nan, information))
    return Quantity.of_model(
        lambda _: information,
        model,
        name="alpha",
        event="perfect_recovery",
        meaning="perfect recovery of the teacher",
        further={"algorithmic": jnp.maximum(information[0], jnp.max(_alphas_of_overlaps(model)))},
    )


@program
def _alphas_of_overlaps(model: Model) -> Float[Array, " Q"]:
    """Return alpha(q), the alpha at which an overlap q is a fixed point, on a grid of q."""
    log_odds = jnp.linspace(-8.0, 14.0, _STEPS, dtype=model.lam.dtype)

    def alpha(log_odds: Array) -> Array:
        fraction = jax.nn.sigmoid(log_odds)
        x = Posterior(fraction * model.rho, jax.nn.sigmoid(-log_odds) * model.rho)
        conjugate = jnp.exp(log_odds) / (model.shape[0] * model.rho[0, 0, 0])  # q / rho = L qhat rho / (1 + L qhat rho)
        return conjugate / sign_channel(model, x, jnp.zeros_like(fraction)).information[0, 0, 0]

    return jax.lax.map(alpha, log_odds)


def spectral_overlap(model: Model, alpha: Any, *, nodes: AnyNodes = None) -> Average:
    """Return the cosine between the leading eigenvector of the spectral start and the teacher, for large d.

    With ``G_V = V G (c + (1 - V) G)^{-1}`` and V in (0, 1) from ``alpha E tr(G_V G) = 1`` it is the root of
    ``(1 - alpha E tr G_V^2) / (1 + alpha E tr(G_V^2 G))``. It is zero up to weak recovery.

    Args:
        model, alpha, nodes: as in `bayes`; all eigenvalues of the covariance have to be equal.

    Raises:
        InputError: as `bayes`; also if the law has several eigenvalues, or the teacher more than one column.
    """
    threshold, alpha = spectral_threshold(model, nodes), if_allowed(model, check_alpha(model, alpha))
    values = _cosines(model, alpha, threshold, averages_of(model, nodes), has_closed_form(model))
    return Average(jnp.mean(values), error_bar(values))


def spectral_threshold(model: Model, nodes: AnyNodes = None) -> Float[Array, ""]:
    """Return the alpha of weak recovery, up to which a spectral start is blind.

    Raises:
        InputError: the model has no spectral start: its teacher has more than one column, or tokens are not isotropic.
    """
    check_bayes(model, "a spectral start", independent=True, same=("gamma", "pi"))
    _check_signless(model)
    require(model.shape[2] == 1, "model", f"t = {model.shape[2]}", "a model whose teacher has one column, t = 1")
    return jnp.mean(thresholds(model, averages_of(model, nodes), has_closed_form(model)))


@program
def _cosines(model: Model, alpha: Array, threshold: Array, rule: Rule, closed_form: bool) -> Float[Array, " R"]:
    c = jnp.sqrt(alpha / threshold)
    if closed_form:
        return jnp.broadcast_to(_cosine(alpha, c, *_sign_spectrum(model)), rule.replicates)

    def cosine(replicate: Any) -> Array:
        def spectra(block: Any) -> Array:
            _, teacher, weight = replicate.quadrature(block)
            G = jax.vmap(lambda hessian: _whitened(model, hessian))(curvatures_at_zero(model, teacher))
            return jnp.concatenate([one_by_one(jnp.linalg.eigvalsh, G), weight[:, None]], 1)

        table = lax.map(spectra, replicate.blocks())
        table = table.reshape(-1, table.shape[-1])
        return _cosine(alpha, c, table[:, :-1], table[:, -1])

    return rule.each(cosine)


def _sign_spectrum(model: Model) -> tuple[Float[Array, "N n"], Float[Array, " N"]]:
    """Return eigenvalues of G and weights: along U it is ``(|U|^2 / W - 1) / W`` in units of rho, else ``-1 / W``."""
    L = model.shape[0]
    W = 1 + noise_of(model) / jnp.mean(model.rho)
    chi, weight = chi_rule(L, jnp.asarray(largest_radius(L), W.dtype), _RADII)
    along = (chi**2 - 1) / W
    across = jnp.broadcast_to(-1 / W, (len(chi), L - 1))
    return jnp.concatenate([along[:, None], across], 1), weight


def _cosine(alpha: Array, c: Array, G: Float[Array, "N n"], weight: Float[Array, " N"]) -> Float[Array, ""]:
    def mean(values: Array) -> Array:
        return alpha * weight @ jnp.sum(values, 1)

    def G_V(V: Array) -> Array:
        return V * G / (c + (1 - V) * G)

    def excess(V: Array) -> Array:
        return mean(G_V(V) * G) - 1

    V = bisected_root(excess, jnp.zeros_like(c), jnp.ones_like(c))
    square = G_V(V) ** 2
    cosine_square = (1 - mean(square)) / (1 + mean(square * G))
    vanishes = (c <= 1) | (cosine_square <= 0)  # the root has no derivative at zero
    return jnp.where(vanishes, 0.0, jnp.sqrt(jnp.where(vanishes, 1.0, cosine_square)))


@precise
def label_matrix(model: Model, label: Preimages, c: Float[Array, ""]) -> Float[Array, "n n"]:
    """Return ``rho^{-1/2} T rho^{-1/2}`` of one label, which multiplies its n = L t inputs."""
    rho = model.rho
    hessian = curvature(label, jnp.zeros(rho.shape[:2], rho.dtype), rho)
    values, vectors = jnp.linalg.eigh(_whitened(model, hessian))
    inputs = inverse(_rho_root(model)).T @ vectors
    return (inputs * (values / (c + values))) @ inputs.T


def _whitened(model: Model, hessian: Float[Array, "L t L t"]) -> Float[Array, "n n"]:
    """Return G of a Hessian in w."""
    root = _rho_root(model)
    return root.T @ hessian.reshape(root.shape) @ root


def _rho_root(model: Model) -> Float[Array, "n n"]:
    """Return rho^{1/2} of all tokens, a Cholesky factor."""
    return jax.scipy.linalg.block_diag(*cholesky(model.rho))
