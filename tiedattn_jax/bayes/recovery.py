"""Thresholds of the Bayes-optimal learner: where any learning begins, and where the teacher is recovered exactly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..averages.program import program
from ..averages.rule import Replicate, Rule
from ..base.errors import InputError
from ..base.printing import Description, rows_of
from ..base.results import error_bar
from ..model.model import Model
from ..theory.observables import largest_eigenvalue
from ..theory.potentials import over_nodes
from ..theory.thresholds import Threshold
from .channel import curvatures_at_zero
from .fixed_points import averages_of, check_bayes, has_closed_form, noise_of
from .potentials import Posterior, posterior, sign_channel

RECOVERIES = "weak_recovery", "perfect_recovery"
_STEPS = 400  # overlaps on the curve alpha(q); its maximum is then known to 1e-6


class Recovery(Threshold):
    """The threshold "weak_recovery" or "perfect_recovery"; see `Threshold`.

    Attributes:
        algorithmic: for perfect recovery, the alpha above which message passing reaches it from a random start.
    """

    algorithmic: Float[Array, ""] | None = None

    def describe(self) -> Description:
        numbers = {"alpha": self.alpha}
        if self.algorithmic is not None:
            numbers["algorithmic"] = self.algorithmic
        rows = rows_of(numbers, dict.fromkeys(numbers, self.stderr))
        return Description(f"{self.event.replace('_', ' ')} of the teacher", self.status_name, rows)


def weak_recovery(model: Model, *, nodes: Rule | None = None) -> Recovery:
    """Return the alpha below which the labels say nothing of the teacher's direction, even to an optimal learner.

    Above it the state without overlap is unstable: any small overlap grows. With the Hessian G of the log evidence of a
    label at w = 0, ``1 / alpha`` is the spectral radius of ``q -> E[G q G^T]`` combined with the prior's response. For
    labels that give the fields up to a sign it is ``(1 + Delta)^2 / (L (L + 1))`` for one eigenvalue of the covariance,
    with Delta the variance of the noise over that of the fields. No label of L fields can have a smaller one.

    Args:
        model, nodes: as in `bayes`.

    Raises:
        InputError: as `bayes`.
    """
    check_bayes(model)
    rule = averages_of(model, nodes)
    closed_form = has_closed_form(model)

    def mean(model: Model) -> tuple[Array, Array]:
        values = thresholds(model, rule, closed_form)
        return jnp.mean(values), values

    (alpha, values), slopes = jax.value_and_grad(mean, has_aux=True)(model)
    return Recovery("weak_recovery", alpha, error_bar(values), slopes)


def recovery(event: str, model: Model, nodes: Rule | None) -> Threshold:
    """Return one of the two thresholds by its name; perfect recovery needs no nodes."""
    return weak_recovery(model, nodes=nodes) if event == "weak_recovery" else perfect_recovery(model)


@program
def thresholds(model: Model, rule: Rule, closed_form: bool) -> Float[Array, " R"]:
    """Return the alpha of `weak_recovery` in every replicate of the averages."""

    def threshold(curvature: Array) -> Array:
        size = curvature.shape[0] * curvature.shape[1] ** 2
        response = jax.jacfwd(lambda hats: posterior(model, hats).q)(jnp.zeros(curvature.shape[:3], curvature.dtype))
        matrices = (a.reshape(size, size) for a in (response, curvature))
        return 1 / largest_eigenvalue(*matrices)

    if closed_form:
        return jnp.broadcast_to(threshold(_sign_curvature(model)), rule.replicates)
    return rule.each(lambda replicate: threshold(_curvature(model, replicate)))


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


def perfect_recovery(model: Model) -> Recovery:
    """Return the alpha above which the teacher is recovered exactly, for exact labels that give fields up to a sign.

    It is 1 / L: n sentences give n L numbers, and the teacher has d. Message passing from a random start reaches it
    where ``alpha(q) = q / (dq/dqhat . I_L)``, the alpha at which q is a fixed point, has its maximum; for two tokens
    and more the maximum is the limit 1 / L, and for one token (real phase retrieval) it is 1.128.

    Raises:
        InputError: as `bayes`; also if labels are noisy, do not give the fields up to a sign, or tokens differ.
    """
    check_bayes(model)
    if not has_closed_form(model) or float(noise_of(model)) > 0:
        raise InputError("model", "must have exact labels that give the fields up to a sign, and tokens that are alike")
    L, law = model.shape[0], model.law()
    if len(law.weights) > 1:
        raise InputError("model", f"must have one eigenvalue of the covariance, got {len(law.weights)} atoms")
    information = jnp.full((), 1 / L, model.lam.dtype)
    algorithmic = jnp.maximum(information, jnp.max(_alphas(model)))
    slopes = jax.tree.map(jnp.zeros_like, model)
    return Recovery("perfect_recovery", information, jnp.zeros_like(information), slopes, algorithmic)


@program
def _alphas(model: Model) -> Float[Array, " Q"]:
    """Return alpha(q), the alpha at which an overlap q is a fixed point, on a grid of q."""
    log_odds = jnp.linspace(-8.0, 14.0, _STEPS, dtype=model.lam.dtype)

    def alpha(log_odds: Array) -> Array:
        fraction = jax.nn.sigmoid(log_odds)
        x = Posterior(fraction * model.rho, jax.nn.sigmoid(-log_odds) * model.rho)
        conjugate = jnp.exp(log_odds) / (model.shape[0] * model.rho[0, 0, 0])  # q / rho = L qhat rho / (1 + L qhat rho)
        return conjugate / sign_channel(model, x, jnp.zeros_like(fraction)).information[0, 0, 0]

    return jax.lax.map(alpha, log_odds)
