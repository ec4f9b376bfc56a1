"""The step of message passing, and its two learners: the student that minimises the risk, and the Bayes-optimal one.

# notation: Q (d, r) the estimate and C its variances, V_l the responses, h_l (r, n) the fields of the sentences without
# what they themselves contribute to Q, g_l (r, n) their messages; X_l (n, d) the rows of token l, with
# Var(X_li) = gamma_li / d. A_i (r, r) and b_i (r) are the precision and the field that the messages give to row i of Q.
# O is a label, Z(O, h) its evidence, see `bayes.channel`.

One step of the algorithm is

    V_l = sum_i Var(X_li) C_i        h_l = X_l Q - V_l g_l        g_l = channel(h, V)_l
    A_i = - sum_l Var(X_li) sum_mu dg_l/dh_l                      b_i = sum_l X_li^T g_l + A_i Q_i
    Q_i = prior(A_i, b_i)                                         C_i = dQ_i / db_i

with a channel, which makes messages of fields, and a prior, which makes an estimate of what the messages say:

    risk:   g = V^{-1} (prox(h) - h)      Q_i = argmin_w w^T (lambda + A_i) w / 2 - b_i . w + p(w)
    Bayes:  g = d log Z(O, h) / dh        Q_i = (P^{-1} + A_i)^{-1} b_i

P is the variance of a row of the teacher before the labels are seen, and the estimate of the Bayes-optimal learner is
one of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..averages.moreau import ProxProblem, gradient_at_nodes
from ..averages.prox import descend, prox
from ..base.arrays import apply, inner_products, inverse, positive_definite, precise, solve
from ..base.results import Status
from ..bayes.channel import curvature, labels_at_nodes, score, solve_general
from ..model.model import Model, Preimages, over_kinds
from ..model.overlaps import symmetric
from ..model.penalties import minimiser_and_response
from .data import Data, Sample
from .evaluation import kind_mask, loss_unit, map_kinds, sentence_losses
from .products import weight_unit

# Number of first steps in which the minimisers are searched for globally; afterwards each sentence stays in its well.
# A sentence near the surface where the minimiser jumps could otherwise alternate between two wells for ever. On the
# positional branch at d = 1000, alpha = 2, about one sentence in a thousand does, which keeps the residual at 1e-2 to
# 1e-1.
# After these steps each sentence descends to the bottom of its well in every step. Of 40 runs at d = 500 and 1000 (both
# branches, alpha from 1 to 2) 37 settle and none diverges. With one unguarded step of Newton's method in its place, 33
# settle, 6 diverge, and one stops at a point that is not critical.
_BURN_IN = 20
# A regression on fewer sentences than this many times its unknowns is singular, or its errors have no variance.
_FEW_SENTENCES = 3
_COLLINEAR = 10  # first steps take derivatives: fields of the student may be multiples of the teacher's (singular fit)


class Iterate(eqx.Module):
    """State of message passing, from which a step makes the next one: estimate, variances, messages."""

    Q: Float[Array, "d r"]
    C: Float[Array, "#d r r"]
    g: Float[Array, "L r n"]
    z: Float[Array, "L r n"] | None  # minimisers of the last step, the starts of the next search; None for Bayes


class Learner(NamedTuple):
    """A channel and a prior, with the products of the data that they are run on.

    Attributes:
        fields: fields of an estimate Q, and the memory of the data after them, from Q and the memory.
        back_project: the transpose of `fields`, and the memory after it.
        messages: channel: g, the sums over the sentences of its derivatives dg_l/dh_l, and z, from h, V, the z of the
            last step, and the number of steps before this one.
        estimate: prior: Q and C, from A and b.
        outcome: residual of a step, and the `Status` that says why it cannot be taken, `converged` if it can; from the
            state before the step, its undamped image, and the state after the damped step.
        burn_in: number of first steps in which the damping must not grow.
    """

    model: Model
    data: Sample
    fields: Callable[[Array, PyTree], tuple[Array, PyTree]]
    back_project: Callable[[Array, PyTree], tuple[Array, PyTree]]
    messages: Callable[[Array, Array, PyTree, Array], tuple[Array, Array, PyTree]]
    estimate: Callable[[Array, Array], tuple[Array, Array]]
    outcome: Callable[[Iterate, Iterate, Iterate], tuple[Array, Array]]
    burn_in: int = 0


def responses(data: Sample, C: Float[Array, "#d r r"]) -> Float[Array, "S r r"]:
    """Return the responses ``V_l = sum_i Var(X_li) C_i``."""
    return jnp.mean(data.gamma[:, :, None, None] * C, 1)


def step(learner: Learner, s: Iterate, memory: PyTree, number: Int[Array, ""]) -> tuple[Iterate, PyTree]:
    """Return the undamped image of a state, and the memory of the data after it.

    Args:
        number: number of steps before this one.
    """
    data, V = learner.data, responses(learner.data, s.C)
    Z, memory = learner.fields(s.Q, memory)
    h = Z - map_kinds(learner.model, data.classes, lambda m: apply(m.sentence.to_tokens(V), s.g))
    g, slope, z = learner.messages(h, V, s.z, number)
    A = -jnp.einsum("li,lab->iab", data.gamma, symmetric(slope)) / s.Q.shape[0]
    product, memory = learner.back_project(g, memory)
    return Iterate(*learner.estimate(A, product + jnp.einsum("iab,ib->ia", A, s.Q)), g, z), memory


def risk_minimiser(
    model: Model,
    data: Sample,
    Q: Float[Array, "d r"],
    Z: Float[Array, "L r n"],
    warm_start: tuple[Float[Array, "#d r r"], Float[Array, "L r n"]] | None,
    damped: Bool[Array, ""],
    derivative: Bool[Array, ""],
) -> tuple[Learner, Iterate]:
    """Return the student that minimises the empirical risk, and its state before the first step.

    Without variances and messages of an earlier run, the messages of a damped run are minus the gradient of the loss at
    X Q. The proximal operator then maps h to X Q, so a start that is a critical point of the risk does not move.
    Messages of an undamped run are zero, so that it follows state evolution from the first iteration on. The variances
    are half the prior's, as if the data added as much curvature as the ridge.

    Args:
        Q, Z: start and its fields.
        warm_start: C and g of an earlier run.
        derivative: whether the slope of the messages is computed from derivatives, not by regression.
    """
    r, dtype = Q.shape[1], Q.dtype
    by_kind, y = partial(map_kinds, model, data.classes), data.fields
    burn_in, collinear = (_BURN_IN, _COLLINEAR) if warm_start is None else (0, 0)
    if warm_start is None:
        gradient = by_kind(lambda m: gradient_at_nodes(m, Z, y))
        warm_start = _first_variances(model, data, Q), jnp.where(damped, -gradient, 0.0)

    def cost(Q: Float[Array, "d r"]) -> Float[Array, ""]:
        return 0.5 * model.lam * jnp.sum(Q**2) + model.penalty_of(Q)

    def risk(Q: Float[Array, "d r"], Z: Float[Array, "L r n"]) -> Float[Array, ""]:
        return jnp.sum(sentence_losses(model, data, Z)) + cost(Q)

    bound = jnp.maximum(risk(Q, Z), risk(0 * Q, 0 * Z))

    def messages(h: Array, V: Array, z: Array, number: Array) -> tuple[Array, Array, Array]:
        """Take the lowest minimisers in the first steps, else those of the same wells."""
        tol = 4 * float(jnp.finfo(h.dtype).eps) ** 0.5
        start = z

        def problem(m: Model) -> ProxProblem:
            return ProxProblem(m, m.sentence.to_tokens(V), y)

        z = lax.cond(
            number < burn_in,
            lambda: by_kind(lambda m: prox(problem(m), h, extra_starts=start[None]).z.astype(h.dtype)),
            lambda: by_kind(lambda m: descend(problem(m), start, h, tol)[0]),
        )
        g = by_kind(lambda m: apply(inverse(m.sentence.to_tokens(V)), z - h))
        return g, _slope(model, data, h, g, z, V, derivative | (number < collinear)), z

    def estimate(A: Array, b: Array) -> tuple[Array, Array]:
        Lam = model.lam * jnp.eye(r, dtype=dtype) + A
        if model.penalty is not None:
            return minimiser_and_response(model.penalty, Lam, b)
        C = inverse(Lam)
        return jnp.einsum("iab,ib->ia", C, b), C

    # Weights and messages of a student that vanishes are measured in their units: they have no relative change.
    sizes = jnp.stack([weight_unit(model, data.variance), loss_unit(model, data) / model.field_scale])
    floors = jnp.finfo(dtype).eps * sizes

    def outcome(state: Iterate, image: Iterate, trial: Iterate) -> tuple[Array, Array]:
        """Return the largest relative change of Q, C and g; the variances of a possible image are positive."""
        triples = (image.Q, state.Q, floors[0]), (image.C, state.C, 0.0), (image.g, state.g, floors[1])
        squares = [jnp.sum((a - b) ** 2) / jnp.sum(a**2 + floor**2) for a, b, floor in triples]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a, *_ in triples]))
        if model.penalty is None:
            positive = positive_definite(image.C)
        else:  # a weight that a penalty holds at zero may have no variance
            variances = jnp.diagonal(image.C, axis1=1, axis2=2)
            positive = jnp.all(variances >= 0) & jnp.any(variances > 0)
        failure = jnp.where(finite, Status.left_domain, Status.nonfinite)
        is_possible = finite & positive & ~(cost(trial.Q) > bound)
        return jnp.sqrt(jnp.max(jnp.stack(squares))), jnp.where(is_possible, Status.converged, failure)

    products = data.student_fields, data.back_project
    return Learner(model, data, *products, messages, estimate, outcome, burn_in), Iterate(Q, *warm_start, Z)


def _first_variances(model: Model, data: Sample, Q: Float[Array, "d r"]) -> Float[Array, "#d r r"]:
    """Return half the variances of the prior, of which a penalty needs one for every row of Q."""
    r, curvature, count = Q.shape[1], model.lam, data.gamma.shape[1]
    if model.penalty is not None:  # add its average curvature over weights of the size of their unit
        unit = weight_unit(model, data.variance)
        curvature, count = curvature + jax.grad(model.penalty.value)(unit) / unit, Q.shape[0]
    return jnp.broadcast_to(jnp.eye(r, dtype=Q.dtype) / (2 * curvature), (count, r, r))


def _slope(
    model: Model,
    data: Sample,
    h: Float[Array, "L r n"],
    g: Float[Array, "L r n"],
    z: Float[Array, "L r n"],
    V: Float[Array, "S r r"],
    derivative: Bool[Array, ""],
) -> Float[Array, "S r r"]:
    """Return ``sum_mu dg_l/dh_l``, by regression, or from derivatives of the proximal operator.

    A kind with few sentences takes derivatives.
    """
    unknowns = h.shape[1] + data.fields.shape[1] + 1

    def slope_of(m: Model) -> Float[Array, "S r r"]:
        mask = jnp.broadcast_to(jnp.asarray(kind_mask(m, data.classes), bool), h.shape[-1:])
        slope = lax.cond(
            derivative | (jnp.sum(mask) < _FEW_SENTENCES * unknowns),
            lambda: _derivative_slope(m, data, z, m.sentence.to_tokens(V), mask),
            lambda: _regression_slope(data, h, g, mask),
        )
        return m.sentence.to_classes(slope)

    return over_kinds(model, slope_of)


def _regression_slope(
    data: Sample, h: Float[Array, "L r n"], g: Float[Array, "L r n"], mask: Bool[Array, " n"]
) -> Float[Array, "L r r"]:
    """Estimate ``sum_mu dg_l/dh_l`` as n times the coefficient of h_l in a regression of g_l on h_l, y_l.

    By Gaussian integration by parts, the coefficients of the linear regression of a function of Gaussian fields are the
    means of its derivatives, jumps included.

    Args:
        mask: marks the sentences that count, those of one kind.
    """
    r, n = h.shape[1], jnp.sum(mask, dtype=h.dtype)
    regressors = jnp.concatenate([h, data.fields], 1)
    regressors, g = (mask * (a - jnp.sum(mask * a, -1, keepdims=True) / n) for a in (regressors, g))
    gram = inner_products(regressors, regressors)
    return n * jnp.swapaxes(solve(gram, inner_products(regressors, g))[:, :r], 1, 2)


def _derivative_slope(
    model: Model, data: Sample, z: Float[Array, "L r n"], V: Float[Array, "L r r"], mask: Bool[Array, " n"]
) -> Float[Array, "L r r"]:
    """Return ``sum_mu dg_l/dh_l`` from derivatives of the proximal operator at the sentences that count."""
    (L, r, _), n = z.shape, jnp.sum(mask, dtype=z.dtype)
    # The other sentences are no minima of this kind, and may have no derivative.
    jacobian = jnp.where(mask, ProxProblem(model, V, data.fields).jacobian(z), 0.0).reshape(L, r, L, r, -1)
    slope = jnp.stack([jnp.sum(jacobian[l, :, l], -1) for l in range(L)]) - n * jnp.eye(r, dtype=z.dtype)
    return inverse(V) @ slope


@precise
def teacher_moment(model: Model) -> Float[Array, "t t"]:
    """Return ``Q*^T Q* / d`` of the model's law, the second moment of the teacher's entries."""
    law = model.law()
    return jnp.tensordot(law.weights, law.pi, 1)


def bayes_learner(model: Model, data: Data, Q: Float[Array, "d t"]) -> tuple[Learner, Iterate]:
    """Return the Bayes-optimal learner, and its state before the first step: no messages, and variances of the prior.

    It knows the encodings, so its fields are those of the tokens alone.
    """
    d, t = Q.shape
    P, labels = teacher_moment(model), labels_at_nodes(model, data.fields)

    def messages(h: Array, V: Array, _: None, number: Array) -> tuple[Array, Array, None]:
        def scores(label: Preimages, w: Array) -> tuple[Array, Array]:
            return score(label, w, V), curvature(label, w, V)

        g, slope = jax.vmap(scores, (0, -1), (-1, 0))(labels, h)
        return g, jnp.einsum("nlalb->lab", slope), None

    def estimate(A: Array, b: Array) -> tuple[Array, Array]:
        C = solve_general(jnp.eye(t, dtype=Q.dtype) + P @ A, jnp.broadcast_to(P, A.shape))
        return jnp.einsum("iab,ib->ia", jnp.broadcast_to(C, (d, t, t)), b), C

    def outcome(state: Iterate, image: Iterate, trial: Iterate) -> tuple[Array, Array]:
        """Return the relative change of Q; the step can be taken if that is finite."""
        change = jnp.linalg.norm(image.Q - state.Q) / jnp.linalg.norm(image.Q)
        return change, jnp.where(jnp.isfinite(change), Status.converged, Status.nonfinite)

    products = lambda Q, memory: (data.token_fields(Q), memory), lambda g, memory: (data.token_projection(g), memory)
    C = P[None] * jnp.ones((data.gamma.shape[1], 1, 1), Q.dtype)
    first = Iterate(Q, C, jnp.zeros((data.shape[0], t, data.count), Q.dtype), None)
    return Learner(model, data, *products, messages, estimate, outcome), first
