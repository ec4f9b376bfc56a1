"""Training the attention layer on the empirical risk: gradient descent, Adam, L-BFGS.

# notation: Q (d, r) the weights, X_l (n, d) the rows (x_l + p_l) / sqrt(d), lambda the ridge, p a penalty besides.

    risk(Q) = sum_mu loss(Z^mu, Y^mu) + lambda / 2 ||Q||_F^2 + sum_i p(Q_i),    z_l = X_l Q
    gradient of all but p = sum_l X_l^T dloss/dz_l + lambda Q

With a penalty, a step of gradient descent is followed by the proximal operator of p, and the gradient of the risk means
the proximal gradient ``Q - prox_p(Q - gradient)``: zero at critical points, and the gradient itself without a penalty.

Only products of X with Q and of X^T with a field occur, one of each for a gradient; a prediction of the size of the
inputs, (n, L, d), is never built, not even for the exact labels. Training losses are given per dimension, risk / d, as
in the theory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..errors import InputError, require_choice, require_count, require_memory, require_not_negative, require_positive
from ..linalg import precise
from ..model import Model
from ..printing import pictures
from ..results import Status
from .data import Data, Estimate, check_estimate, start, student_fields
from .evaluation import sentence_losses

OPTIMIZERS = {"gd": optax.sgd, "adam": optax.adam, "lbfgs": optax.lbfgs}
# Of gradient descent the paper's; L-BFGS finds its own.
RATES = {"gd": 0.15, "adam": 0.01, "lbfgs": 1.0}


class Training(Estimate):
    """Where training ended.

    Attributes:
        Q: weights, (d, r).
        overlaps: q (L, r, r), theta (L, r, t), m (L, r) of the weights on this instance. V is NaN: weights have none.
        train_loss: empirical risk / d.
        gradient_norm: largest entry of the gradient of the empirical risk; with a penalty, of the proximal gradient.
        iterations: steps taken.
        status: a `Status`, as an integer. `stalled`: a step was too small to change the weights.
        losses: train_loss before every step, (steps + 1,); NaN after the last one.
        gradient_norms: likewise.
    """

    losses: jax.Array
    gradient_norms: jax.Array

    def plot(self) -> Any:
        """Training loss and gradient, step by step; see `plotting.training_figure`."""
        return pictures().training_figure({"training": self})


def risk(model: Model, data: Data, Q: Any, *, exact: bool = False) -> jax.Array:
    """Empirical risk of weights Q: ``sum_mu loss(Z^mu, Y^mu) + lambda / 2 ||Q||_F^2``, and the model's penalty.

    Differentiable, but for the penalty; its value and gradient together touch X twice.

    Args:
        Q: weights, (d, r).
        exact: the loss of a sentence is ``||y - f||_F^2 / (2 d)`` on its exact labels. The model's `loss` is its limit
            for large d, from which a sentence deviates by O(1 / sqrt(d)).

    Raises:
        InputError: `Q` of the wrong shape, or `exact` for data without labels.
    """
    Q = check_estimate("Q", model, data, Q)
    return smooth_risk(model, data, Q, exact) + model.penalty_of(Q)


@precise
def smooth_risk(model: Model, data: Data, Q: jax.Array, exact: bool = False) -> jax.Array:
    """`risk` without the penalty."""
    losses = sentence_losses(model, data, student_fields(data.x, Q), exact)
    return jnp.sum(losses) + 0.5 * model.lam * jnp.sum(Q**2)


def gradient_norm(model: Model, weights: Any, gradient: Any) -> jax.Array:
    """Largest entry of the gradient of the risk, or of the proximal gradient where there is a penalty.

    Args:
        weights: an array, or several in a tree; with a penalty Q alone.
        gradient: of the `smooth_risk`, alike.
    """
    if model.penalty is not None:
        gradient = weights - model.penalty.prox(weights - gradient, jnp.ones_like(weights))
    return jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(gradient)]))


class Descent(eqx.Module):
    """How to minimise: arguments of `train`."""

    optimizer: str = eqx.field(static=True)
    steps: int = eqx.field(static=True)
    rate: jax.Array
    tol: jax.Array

    @classmethod
    def checked(cls, optimizer: str, steps: Any, rate: Any, tol: Any, dtype: Any) -> Descent:
        """With numbers of a dtype; the rate is by default that of the optimiser.

        Raises:
            InputError: one of the arguments is unknown or out of range.
        """
        require_choice(optimizer, "optimizer", OPTIMIZERS)
        require_count(steps, "steps")
        rate = RATES[optimizer] if rate is None else rate
        require_positive(rate, "rate")
        require_not_negative(tol, "tol")
        require_memory(2.0 * steps * jnp.dtype(dtype).itemsize, "steps", steps, "their history")
        return cls(optimizer, int(steps), jnp.asarray(rate, dtype), jnp.asarray(tol, dtype))


def train(
    model: Model,
    data: Data,
    init: Any = "semantic",
    *,
    optimizer: str = "gd",
    steps: int = 5000,
    rate: Any = None,
    tol: float = 1e-10,
    exact: bool = False,
    key: jax.Array | None = None,
    scale: float | None = None,
) -> Training:
    """Minimise the empirical risk from a start, with full batches.

    With a penalty every step of gradient descent is followed by the penalty's proximal operator (ISTA).

    Works under `jit` and under `vmap` over instances.

    Args:
        model: loss and ridge; the ridge is the weight decay.
        data: the instance.
        init: "semantic", "positional", "random", or an array (d, r); see `tiedattn_jax.finite.data.start`.
        optimizer: "gd", plain gradient descent; "adam"; or "lbfgs", L-BFGS with a zoom line search. With a penalty of
            the model only "gd", whose rate must stay below the inverse of the risk's largest curvature. Gradient
            descent is far from a minimum after the published 5000 steps wherever the ridge holds the weights, at a rate
            of ``lambda rate`` a step; L-BFGS is the one to run to zero gradient.
        steps: at most so many.
        rate: learning rate, the paper's .15 for gradient descent and .01 for Adam by default; for L-BFGS the factor of
            its steps before the line search, 1.
        tol: largest entry of the gradient at which to stop.
        exact: train on the exact labels; see `risk`.
        key: of random starts.
        scale: of a named start.

    Returns:
        A `Training`. A run that diverges has the last finite weights and the status `nonfinite`.

    Raises:
        InputError: naming the argument that is unknown, out of range or of the wrong shape.
    """
    Q = start(model, data, init, key, scale)
    how = Descent.checked(optimizer, steps, rate, tol, Q.dtype)
    if model.penalty is not None and optimizer != "gd":
        raise InputError("optimizer", f"must be gd for a model with a penalty, got optimizer={optimizer!r}")
    return _run(model, data, Q, how, exact)


class _Point(eqx.Module):
    weights: Any  # an array (d, k), or several in a tree
    value: jax.Array
    gradient: Any  # of the smooth risk
    norm: jax.Array

    @property
    def finite(self) -> jax.Array:
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(self)]))

    @property
    def per_dimension(self) -> jax.Array:
        return self.value / jax.tree.leaves(self.weights)[0].shape[0]


class _Loop(eqx.Module):
    at: _Point
    inner: Any  # state of the optimiser
    steps: jax.Array
    failure: jax.Array  # what ended the run, or `converged` while nothing has
    losses: jax.Array
    norms: jax.Array


def _recorded(
    at: _Point, inner: Any, steps: jax.Array, failure: jax.Array, losses: jax.Array, norms: jax.Array
) -> _Loop:
    """After so many steps, with the risk and the gradient there in the histories."""
    losses, norms = losses.at[steps].set(at.per_dimension), norms.at[steps].set(at.norm)
    return _Loop(at, inner, steps, failure.astype(jnp.int32), losses, norms)


@eqx.filter_jit
@precise
def _run(model: Model, data: Data, Q: jax.Array, how: Descent, exact: bool) -> Training:
    Q, ended = descend(model, partial(smooth_risk, model, data, exact=exact), Q, how)
    return Training(Q=Q, overlaps=data.overlaps(Q), **ended)


def descend(
    model: Model, objective: Callable[[Any], jax.Array], weights: Any, how: Descent
) -> tuple[Any, dict[str, jax.Array]]:
    """Minimise a function of weights, an array or several in a tree, each of shape (d, k).

    Args:
        model: its penalty is that of the weights.
        objective: without the penalty.

    Returns:
        The weights at the end, and the fields of a `Training` that say how it was reached.
    """
    tool = optax.with_extra_args_support(OPTIMIZERS[how.optimizer](how.rate))

    def evaluated(weights: Any, inner: Any) -> _Point:
        if how.optimizer == "lbfgs" and inner is not None:  # it has them from the end of its line search
            value, gradient = optax.value_and_grad_from_state(objective)(weights, state=inner)
        else:
            value, gradient = jax.value_and_grad(objective)(weights)
        return _Point(weights, value + model.penalty_of(weights), gradient, gradient_norm(model, weights, gradient))

    def advanced(p: _Loop) -> _Loop:
        along = {"value": p.at.value, "grad": p.at.gradient, "value_fn": objective}
        update, inner = tool.update(p.at.gradient, p.inner, p.at.weights, **along)
        weights = optax.apply_updates(p.at.weights, update)
        if model.penalty is not None:
            weights = model.penalty.prox(weights, jnp.full_like(weights, how.rate))
        new = evaluated(weights, inner)
        still = jnp.where(eqx.tree_equal(weights, p.at.weights), Status.stalled, Status.converged)
        failure = jnp.where(new.finite, still, Status.nonfinite)
        # Of a step that is not finite nothing is kept but its failure.
        at = jax.tree.map(lambda a, b: jnp.where(new.finite, a, b), new, p.at)
        return _recorded(at, inner, p.steps + 1, failure, p.losses, p.norms)

    def unfinished(p: _Loop) -> jax.Array:
        return (p.failure == Status.converged) & (p.at.norm > how.tol) & (p.steps < how.steps)

    blank, zero = jnp.full(how.steps + 1, jnp.nan, how.rate.dtype), jnp.array(0, jnp.int32)
    first = evaluated(weights, None)
    failure = jnp.where(first.finite, Status.converged, Status.nonfinite)
    p = lax.while_loop(unfinished, advanced, _recorded(first, tool.init(weights), zero, failure, blank, blank))
    # A run without a failure that is not at its tolerance has had its steps.
    ended = jnp.where(p.failure == Status.converged, Status.max_steps, p.failure)
    converged = (p.at.norm <= how.tol) & (p.failure != Status.nonfinite)
    return p.at.weights, {
        "train_loss": p.at.per_dimension,
        "gradient_norm": p.at.norm,
        "iterations": p.steps,
        "status": jnp.where(converged, Status.converged, ended).astype(jnp.int32),
        "losses": p.losses,
        "gradient_norms": p.norms,
    }
