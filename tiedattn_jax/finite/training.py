"""Training the attention layer on the empirical risk: gradient descent, Adam, L-BFGS.

# notation: Q (d, r) the weights, X_l (n, d) the rows (x_l + p_l) / sqrt(d), lambda the ridge, p a further penalty.

    risk(Q) = sum_mu loss(Z^mu, Y^mu) + lambda / 2 ||Q||_F^2 + sum_i p(Q_i),    z_l = X_l Q
    gradient of all but p = sum_l X_l^T dloss/dz_l + lambda Q

With a penalty, the proximal operator of p follows every step of gradient descent. "Gradient of the risk" then means
the proximal gradient ``(Q - prox_{s p}(Q - s gradient)) / s``, which is zero at critical points and is the gradient
without a penalty. The step s is the unit of learning rates, see `evaluation.Units`.

A gradient takes one product of X with Q and one of X^T with a field. A prediction of the size of the inputs, (n, L, d),
is never built, not even for the exact labels. Training losses are per dimension, risk / d, as in the theory.

With a value matrix W (d, d) of ridge kappa, for which there is no theory, only simulation in finite dimension,

    f(x) = S(Z) (x + p) W,    Z = (x + p) Q / sqrt(d)
    risk(Q, W) = sum_mu ||y - f||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + kappa / 2 ||W - 1||_F^2

A value matrix maps the tokens that attention mixes. The risk is therefore the exact risk of the layer without it, with
other inner products: see `evaluation.with_value`. Arrays (n, L, d) are built then, because W mixes all d coordinates.

The ridge pulls W to the identity, where the layer is the one without a value matrix. A ridge that pulls W to zero would
shrink the tokens that the target copies. The data give each entry of W a curvature ``alpha L sigma^2``, of the order of
that of an entry of Q. So kappa means for W what lambda means for Q. For large kappa W stays at the identity.

For given Q the best W is a ridge regression of y on S (x + p). L-BFGS therefore runs over Q alone, on the risk at the
best W; its gradient is the one at fixed W (variable projection). In the standard model at d = 300, alpha = 1, this
takes 58 steps from either start to a gradient of 1e-8; L-BFGS over Q and W takes 187 and 241.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Real

from ..base.arrays import AnyArray, Number, either, precise
from ..base.errors import (
    InputError,
    as_flag,
    require_choice,
    require_count,
    require_memory,
    require_not_negative,
    require_positive,
    shaped_array,
)
from ..base.report import picture
from ..base.results import Status
from ..model.checks import check_provides
from ..model.model import Model
from .data import Data, Sample
from .diagnosis import check_estimate, check_fit
from .evaluation import (
    Estimate,
    Units,
    Weights,
    best_value,
    largest,
    loss_unit,
    proximal_gradient,
    sentence_losses,
    value_risk,
    with_value,
)
from .products import student_fields, weight_unit
from .sampling import start

OPTIMIZERS = {"gd": optax.sgd, "adam": optax.adam, "lbfgs": optax.lbfgs}
# Default learning rates: gradient descent has the paper's; L-BFGS finds its step by a line search.
RATES = {"gd": 0.15, "adam": 0.01, "lbfgs": 1.0}
_ARRAYS = 8  # peak number of arrays of the size of the sentences, and of W, in the program that trains a value matrix


class Training(Estimate):
    """The weights at the end of training, and the history of the run.

    Attributes:
        Q: weights.
        overlaps: q, theta and m of the weights on this instance. V is NaN: weights have none.
        train_loss: empirical risk / d.
        gradient_norm: largest entry of the gradient of the empirical risk; with a penalty, of the proximal gradient.
        iterations: number of steps taken.
        status: a `Status`, as an integer. `stalled` means that a step was too small to change the weights.
        losses: train_loss before every step and at the end, steps + 1 in all; NaN after the end.
        gradient_norms: gradient_norm at the same points.
        W: value matrix, if one was trained; losses and gradients are then those of the risk on exact labels.
    """

    NUMBERS = "train_loss", "gradient_norm", "shift"
    train_loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    losses: Float[Array, " points"]
    gradient_norms: Float[Array, " points"]
    W: Float[Array, "d d"] | None = None

    plot = picture(
        "simulations.training_figure", "training loss and gradient, step by step", "train_loss", "gradient_norm",
        many=lambda run: {"training": run},
    )  # fmt: skip

    @property
    def shift(self) -> Float[Array, ""] | None:
        """Distance of the value matrix from the identity, ``||W - 1||_F / sqrt(d)``; None without a value matrix."""
        if self.W is None:
            return None
        return jnp.linalg.norm(self.W - jnp.eye(len(self.W), dtype=self.W.dtype)) / len(self.W) ** 0.5


@precise
def risk(model: Model, data: Sample, Q: Real[AnyArray, "d r"], *, exact: bool = False) -> Float[Array, ""]:
    """Return the empirical risk of Q: ``sum_mu loss(Z^mu, Y^mu) + lambda / 2 ||Q||_F^2`` plus the model's penalty.

    The risk without the penalty is differentiable; its value and gradient together read X twice.

    Args:
        Q: weights.
        exact: whether the loss of a sentence is ``||y - f||_F^2 / (2 d)`` on its exact labels. The model's `loss` is
            its limit for large d; a sentence deviates from the limit by O(1 / sqrt(d)).

    Raises:
        InputError: if `Q` has the wrong shape, the data are drawn on demand, or `exact` is set but the data have no
            labels.
    """
    Q, data = check_estimate("Q", model, data, Q), data.stored("for the risk of weights")
    return smooth_risk(model, data, as_flag(exact, "exact"), Q, student_fields(data.x, Q)) + model.penalty_of(Q)


def smooth_risk(
    model: Model, data: Sample, exact: bool, Q: Float[Array, "d r"], Z: Float[Array, "L r n"]
) -> Float[Array, ""]:
    """Return the `risk` without the penalty, of weights and their fields."""
    return jnp.sum(sentence_losses(model, data, Z, exact)) + 0.5 * model.lam * jnp.sum(Q**2)


@precise
def risk_and_gradient(
    model: Model, data: Sample, exact: bool, Q: Float[Array, "d r"], memory: PyTree
) -> tuple[Float[Array, ""], Float[Array, "d r"], PyTree]:
    """Return the `smooth_risk`, its gradient, and the memory of the data after the two products that they take."""
    Z, memory = data.student_fields(Q, memory)
    value, (ridge, slopes) = jax.value_and_grad(partial(smooth_risk, model, data, exact), (0, 1))(Q, Z)
    gradient, memory = data.back_project(slopes, memory)
    return value, ridge + gradient, memory


class Descent(eqx.Module):
    """Options of a minimisation, checked arguments of `train`."""

    optimizer: str = eqx.field(static=True)
    steps: int = eqx.field(static=True)
    rate: Float[Array, ""]
    tol: Float[Array, ""]


def default_optimizer(model: Model, *, stored: bool = True, rate: Number | None = None) -> str:
    """Return "lbfgs", or "gd" where L-BFGS is not possible or a rate is given; `stored` says whether the data are."""
    return "lbfgs" if model.penalty is None and stored and rate is None else "gd"


def train(
    model: Model,
    data: Sample,
    init: str | Real[AnyArray, "d r"] = "semantic",
    *,
    optimizer: str | None = None,
    steps: int = 5000,
    rate: Number | None = None,
    tol: Number = 1e-10,
    exact: bool = False,
    value: Number | None = None,
    labels: Real[AnyArray, "n L d"] | None = None,
    key: PRNGKeyArray | None = None,
    scale: Number | None = None,
) -> Training:
    """Minimise the empirical risk from a start, with full batches.

    With a penalty, the penalty's proximal operator follows every step of gradient descent (ISTA). With `value`, a value
    matrix W is trained, too: L-BFGS sets it to its minimum at the weights of every step; gradient descent and Adam
    train it together with the weights, starting from the identity, and `tol` also applies to the gradient in W.

    The function works under `jit` and under `vmap` over instances.

    Args:
        model: loss, ridge and penalty; the ridge is the weight decay.
        data: the instance, `Data` or `DataOnDemand`. Sentences drawn on demand allow neither the spectral start nor
            L-BFGS nor exact labels.
        init: "semantic", "positional", "random", "spectral", or an array (d, r); see
            `tiedattn_jax.finite.sampling.start`.
        optimizer: "lbfgs", L-BFGS with a zoom line search; "gd", plain gradient descent; or "adam". The default is
            L-BFGS, and gradient descent with a penalty, with sentences drawn on demand, or if a rate is given. A model
            with a penalty allows only "gd", with a rate below the inverse of the risk's largest curvature. In
            directions where only the ridge determines the weights, gradient descent converges at a rate of ``lambda
            rate`` a step and is not at a minimum after the published 5000 steps.
        steps: largest number of steps. Zero measures the weights of the start, with the status `max_steps` unless they
            are at a minimum.
        rate: learning rate; by default the paper's .15 for gradient descent, .01 for Adam, and 1 for L-BFGS, where it
            is the factor of a step before the line search.
        tol: largest entry of the gradient at which to stop, in the unit of gradients, see
            `tiedattn_jax.finite.evaluation.Units`.
        exact: whether to train on the exact labels; see `risk`.
        value: ridge, zero or more, that pulls a value matrix to the identity; None for a layer without a value matrix.
            It is to the matrix what lambda is to the weights: ``value=model.lam``. Training is then on exact labels;
            `data` are stored, and the model has a method `student` and no penalty. Among the other functions only
            `heldout_error` and `run_instances` with ``theory=False`` support a value matrix.
        labels: exact labels that a layer with a value matrix learns; by default ``data.raw_labels(model)``.
        key: random key of the start.
        scale: norm of a named start, as in `tiedattn_jax.finite.sampling.start`.

    Returns:
        A `Training`. A run that diverges has the last finite weights and the status `nonfinite`.

    Raises:
        InputError: if an argument is unknown, out of range or of the wrong shape (the error names it), or a value
            matrix and its data do not fit into memory.
    """
    exact, reason = as_flag(exact, "exact"), "for a value matrix"
    if value is not None:
        check_fit(model, data)
        L, n, d, _ = data.stored(reason).shape
        check_provides(model, "student", reason)
        if model.penalty is not None:
            raise InputError("model", "must have no penalty besides the ridge beside a value matrix: use penalty=None")
        size = _ARRAYS * (L * n * d + d**2) * data.dtype.itemsize
        require_memory(size, "data", data.shape, "training a value matrix on them")
    elif labels is not None:
        raise InputError("labels", "must be None unless a value matrix is trained on them: give value=...")
    Q = start(model, data, init, key, scale)
    if optimizer is None:
        optimizer = default_optimizer(model, stored=isinstance(data, Data), rate=rate)
    optimizer = require_choice(optimizer, "optimizer", OPTIMIZERS)
    require_count(steps, "steps", 0)
    rate = RATES[optimizer] if rate is None else rate
    require_positive(rate, "rate")
    require_not_negative(tol, "tol")
    require_memory(2.0 * steps * Q.dtype.itemsize, "steps", steps, "their history")
    options = Descent(optimizer, int(steps), jnp.asarray(rate, Q.dtype), jnp.asarray(tol, Q.dtype))
    if optimizer == "lbfgs":
        data.stored("for L-BFGS, whose line search needs further products")
    if model.penalty is not None and optimizer != "gd":
        raise InputError("optimizer", f"must be gd for a model with a penalty, got optimizer={optimizer!r}")
    if value is None:
        return _train_weights(model, data, Q, options, exact, None)
    require_not_negative(value, "value")
    exact_labels = data.raw_labels(model) if labels is None else labels
    exact_labels = shaped_array("labels", exact_labels, "n L d", {"n": n, "L": L, "d": d}, Q.dtype)
    return _train_weights(model, data, Q, options, exact, (exact_labels, jnp.asarray(value, Q.dtype)))


class _Point(eqx.Module):
    """Weights, and what is known there; in the units of the descent, but for `risk` and `norm`."""

    weights: Weights
    value: Float[Array, ""]  # of the function without the penalty
    gradient: Weights
    risk: Float[Array, ""]  # value with the penalty, per dimension
    norm: Float[Array, ""]  # largest entry of the proximal gradient
    distance: Float[Array, ""]  # the norm in units of the gradient


class _DescentLoop(eqx.Module):
    point: _Point
    opt_state: PyTree  # state of the optimiser
    steps: Int[Array, ""]
    failure: Int[Array, ""]  # status that ended the run; `converged` while the run goes on
    losses: Float[Array, " points"]
    norms: Float[Array, " points"]
    memory: PyTree  # of the data


@eqx.filter_jit
@precise
def _train_weights(
    model: Model,
    data: Sample,
    Q: Float[Array, "d r"],
    options: Descent,
    exact: bool,
    value: tuple[Float[Array, "n L d"], Float[Array, ""]] | None,
) -> Training:
    """Train the weights, and with labels and the ridge of a value matrix in `value` also this matrix."""
    unit = weight_unit(model, data.variance)
    if value is None:
        memory = data.memory(Q.shape[1] * (options.steps + 1), options.steps)
        units = Units(unit, loss_unit(model, data, exact))
        Q, fields = minimise(model, partial(risk_and_gradient, model, data, exact), Q, options, units, memory)
        return Training(Q=Q, overlaps=data.overlaps(Q), **fields)
    stored, (labels, ridge), W = data.stored("for a value matrix"), value, jnp.eye(len(Q), dtype=Q.dtype)
    units = Units(unit, loss_unit(model, with_value(stored, labels, W), exact=True))
    if options.optimizer == "lbfgs":

        def best_W(Q: Float[Array, "d r"]) -> Float[Array, "d d"]:
            return lax.stop_gradient(best_value(model, stored, labels, Q, ridge))

        objective = differentiated(lambda Q: value_risk(model, stored, labels, Q, best_W(Q), ridge))
        Q, fields = minimise(model, objective, Q, options, units)
        return Training(Q=Q, overlaps=data.overlaps(Q), W=best_W(Q), **fields)
    objective = differentiated(lambda w: value_risk(model, stored, labels, w[0], w[1], ridge))
    (Q, W), fields = minimise(model, objective, (Q, W), options, Units((unit, jnp.ones_like(unit)), units.loss))
    return Training(Q=Q, overlaps=data.overlaps(Q), W=W, **fields)


# The value of a function of weights, its gradient, and the memory after computing them, from weights and memory.
ValueAndGradient: TypeAlias = Callable[[Weights, PyTree], tuple[Float[Array, ""], Weights, PyTree]]


def differentiated(objective: Callable[[Weights], Float[Array, ""]]) -> ValueAndGradient:
    """Return a function of stored arrays, with its gradient, in the form that `minimise` takes."""
    return lambda weights, memory: (*jax.value_and_grad(objective)(weights), memory)


def minimise(
    model: Model,
    value_and_gradient: ValueAndGradient,
    weights: Weights,
    options: Descent,
    units: Units,
    memory: PyTree = None,
) -> tuple[Weights, dict[str, Array]]:
    """Minimise a function of weights, an array or several in a tree.

    The optimisers see weights and function in their units. Learning rates of gradient descent and Adam have none: they
    are those of the weights themselves. The units are powers of two, so that no number is rounded.

    Args:
        model: model whose penalty applies to the weights.
        value_and_gradient: value and gradient of the function to minimise, without the penalty. They are computed once
            before the first step and once a step, and by the line search of L-BFGS.
        memory: memory before the first step; None for L-BFGS.

    Returns:
        The weights at the end, and the other fields of a `Training` but the overlaps.
    """
    optimizer = optax.with_extra_args_support(OPTIMIZERS[options.optimizer](options.rate))
    # Every step is multiplied by this factor, so that the learning rate is that of the weights themselves.
    own_rate = {"gd": lambda a: units.loss / a / a, "adam": lambda a: 1 / a, "lbfgs": jnp.ones_like}
    factors = jax.tree.map(own_rate[options.optimizer], units.weights)

    def unscaled(weights: Weights) -> Weights:
        return jax.tree.map(jnp.multiply, weights, units.weights)

    def in_units(weights: Weights, memory: PyTree) -> tuple[Float[Array, ""], Weights, PyTree]:
        value, gradient, memory = value_and_gradient(unscaled(weights), memory)
        return value / units.loss, units.of(gradient), memory

    def differential(gradient: Weights, slope: Float[Array, ""]) -> tuple[Weights]:
        return (jax.tree.map(lambda g: slope * g, gradient),)

    objective = jax.custom_vjp(lambda weights: in_units(weights, None)[0])  # of L-BFGS, which needs no memory
    objective.defvjp(lambda weights: in_units(weights, None)[:2], differential)

    def evaluated(weights: Weights, opt_state: PyTree, memory: PyTree) -> tuple[_Point, PyTree]:
        if options.optimizer == "lbfgs" and opt_state is not None:  # the line search computed value and gradient here
            value, gradient = optax.value_and_grad_from_state(objective)(weights, state=opt_state)
        else:
            value, gradient, memory = in_units(weights, memory)
        own, own_gradient = unscaled(weights), jax.tree.map(lambda g, a: g * units.loss / a, gradient, units.weights)
        proximal = proximal_gradient(model, own, own_gradient, units)
        risk = (value * units.loss + model.penalty_of(own)) / len(jax.tree.leaves(own)[0])
        return _Point(weights, value, gradient, risk, largest(proximal), largest(units.of(proximal))), memory

    def recorded(p: _DescentLoop) -> _DescentLoop:
        """Return the loop with its point in the histories."""
        losses, norms = p.losses.at[p.steps].set(p.point.risk), p.norms.at[p.steps].set(p.point.norm)
        return replace(p, losses=losses, norms=norms)

    def advanced(p: _DescentLoop) -> _DescentLoop:
        search = {"value": p.point.value, "grad": p.point.gradient, "value_fn": objective}
        update, opt_state = optimizer.update(p.point.gradient, p.opt_state, p.point.weights, **search)
        weights = optax.apply_updates(p.point.weights, jax.tree.map(jnp.multiply, update, factors))
        if model.penalty is not None:
            own = unscaled(weights)
            weights = model.penalty.prox(own, jnp.full_like(own, options.rate)) / units.weights
        trial, memory = evaluated(weights, opt_state, p.memory)
        status = jnp.where(eqx.tree_equal(weights, p.point.weights), Status.stalled, Status.converged)
        finite = _is_finite(trial)
        failure = jnp.where(finite, status, Status.nonfinite).astype(jnp.int32)
        # A step that is not finite is dropped; only its failure is recorded.
        point = either(finite, trial, p.point)
        return recorded(_DescentLoop(point, opt_state, p.steps + 1, failure, p.losses, p.norms, memory))

    def unfinished(p: _DescentLoop) -> Bool[Array, ""]:
        return (p.failure == Status.converged) & (p.point.distance > options.tol) & (p.steps < options.steps)

    blank, zero = jnp.full(options.steps + 1, jnp.nan, options.rate.dtype), jnp.array(0, jnp.int32)
    scaled = jax.tree.map(jnp.divide, weights, units.weights)
    first, memory = evaluated(scaled, None, memory)
    failure = jnp.where(_is_finite(first), Status.converged, Status.nonfinite).astype(jnp.int32)
    p = recorded(_DescentLoop(first, optimizer.init(scaled), zero, failure, blank, blank, memory))
    p = lax.while_loop(unfinished, advanced, p)
    # A run without a failure that has not reached its tolerance ran out of steps.
    status = jnp.where(p.failure == Status.converged, Status.max_steps, p.failure)
    converged = (p.point.distance <= options.tol) & (p.failure != Status.nonfinite)
    return unscaled(p.point.weights), {
        "train_loss": p.point.risk,
        "gradient_norm": p.point.norm,
        "iterations": p.steps,
        "status": jnp.where(converged, Status.converged, status).astype(jnp.int32),
        "losses": p.losses,
        "gradient_norms": p.norms,
    }


def _is_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return whether all numbers of a tree are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree)]))
