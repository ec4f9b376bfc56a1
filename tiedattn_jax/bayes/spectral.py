"""The spectral start: an eigenvector of a matrix of data alone that overlaps with the teacher, and its theory.

# notation: G = rho^{1/2} Hess rho^{1/2} with the Hessian of the log evidence of a label at w = 0, so that
# 1 + G = E[y y^T | O] for fields y of unit covariance; c = sqrt(alpha / alpha_WR); T = G (c + G)^{-1}.

The matrix is ``M = sum_mu sum_{l l'} x_l T(O^mu)_{l l'} x_{l'}^T / d`` over the tokens of all sentences. Its leading
eigenvector overlaps with the teacher from weak recovery on (Luo, Alghamdi and Lu 2019 for one token: the processing T
is the optimal one).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..averages.program import program
from ..averages.rule import Rule
from ..base.derivatives import bisected_root
from ..base.errors import require
from ..base.linalg import cholesky, inverse, precise
from ..base.results import Average, error_bar
from ..model.model import Model
from ..model.preimages import Preimages
from ..theory.solve import check_alpha
from .channel import curvature, curvatures_at_zero
from .fixed_points import averages_of, check_bayes, has_closed_form, noise_of
from .recovery import thresholds
from .signs import chi_rule, largest_radius

_RADII = 128  # nodes of |U|


@precise
def label_matrix(model: Model, label: Preimages, c: Float[Array, ""]) -> Float[Array, "n n"]:
    """Return ``rho^{-1/2} T rho^{-1/2}`` of one label, which multiplies its n = L t inputs."""
    rho = model.rho
    hessian = curvature(label, jnp.zeros(rho.shape[:2], rho.dtype), rho)
    values, vectors = jnp.linalg.eigh(_whitened(model, hessian))
    inputs = inverse(_root(model)).T @ vectors
    return (inputs * (values / (c + values))) @ inputs.T


def _whitened(model: Model, hessian: Float[Array, "L t L t"]) -> Float[Array, "n n"]:
    """Return G of a Hessian in w."""
    root = _root(model)
    return root.T @ hessian.reshape(root.shape) @ root


def _root(model: Model) -> Float[Array, "n n"]:
    """Return rho^{1/2} of all tokens, a Cholesky factor."""
    return jax.scipy.linalg.block_diag(*cholesky(model.rho))


def spectral_overlap(model: Model, alpha: Any, *, nodes: Rule | None = None) -> Average:
    """Return the cosine between the leading eigenvector of the spectral start and the teacher, for large d.

    With ``G_V = V G (c + (1 - V) G)^{-1}`` and V in (0, 1) from ``alpha E tr(G_V G) = 1`` it is the root of
    ``(1 - alpha E tr G_V^2) / (1 + alpha E tr(G_V^2 G))``. It is zero up to weak recovery.

    Args:
        model, alpha, nodes: as in `bayes`; all eigenvalues of the covariance have to be equal.

    Raises:
        InputError: as `bayes`; also if the law has several eigenvalues, or the teacher more than one column.
    """
    check_spectral(model)
    alpha = check_alpha(model, alpha)
    rule, closed_form = averages_of(model, nodes), has_closed_form(model)
    values = _cosines(model, alpha, jnp.mean(thresholds(model, rule, closed_form)), rule, closed_form)
    return Average(jnp.mean(values), error_bar(values))


def check_spectral(model: Model) -> None:
    """Raise an `InputError` unless `model` has a spectral start: one column of the teacher, isotropic tokens."""
    check_bayes(model)
    require(model.shape[2] == 1, "model", f"t = {model.shape[2]}", "a model whose teacher has one column, t = 1")
    law = model.law()
    isotropic = len(law.weights) == 1 and law.sentences is None
    require(isotropic, "model", f"{len(law.weights)} atoms", "a model whose covariances have one eigenvalue each")


@program
def _cosines(model: Model, alpha: Array, threshold: Array, rule: Rule, closed_form: bool) -> Float[Array, " R"]:
    c = jnp.sqrt(alpha / threshold)
    if closed_form:
        return jnp.broadcast_to(_cosine(alpha, c, *_sign_spectrum(model)), rule.replicates)

    def cosine(replicate: Any) -> Array:
        def spectra(block: Any) -> Array:
            _, teacher, weight = replicate.quadrature(block)
            G = jax.vmap(lambda hessian: _whitened(model, hessian))(curvatures_at_zero(model, teacher))
            return jnp.concatenate([jnp.linalg.eigvalsh(G), weight[:, None]], 1)

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
    return jnp.sqrt(jnp.where(c > 1, jnp.maximum(cosine_square, 0.0), 0.0))
