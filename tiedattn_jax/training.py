"""Training the attention layer on the empirical risk: gradient descent, Adam, L-BFGS.

# notation: Q (d, r) the weights, X_l (n, d) the rows (x_l + p_l) / sqrt(d), lambda the ridge.

    risk(Q) = sum_mu loss(Z^mu, Y^mu) + lambda / 2 ||Q||_F^2,    z_l = X_l Q
    gradient = sum_l X_l^T dloss/dz_l + lambda Q

Only products of X with Q and of X^T with a field occur, one of each for a gradient; a prediction of the size of the
inputs, (n, L, d), is never built, not even for the exact labels. Training losses are given per dimension, risk / d, as
in the theory.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .data import Data, check_estimate, sentence_losses, start, student_fields
from .model import Model, is_concrete, require
from .overlaps import Overlaps
from .state_evolution import Status

OPTIMIZERS = ("gd", "adam", "lbfgs")
# Of gradient descent the paper's; L-BFGS finds its own.
RATES = {"gd": 0.15, "adam": 0.01, "lbfgs": 1.0}


class Training(eqx.Module):
    """Where training ended.

    Attributes:
        Q: weights, (d, r).
        overlaps: q (L, r, r), theta (L, r, t), m (L, r) of the weights on this instance. V is NaN: weights have none.
        train_loss: empirical risk / d.
        gradient_norm: largest entry of the gradient of the empirical risk.
        iterations: steps taken.
        status: a `Status`, as an integer. `stalled`: a step was too small to change the weights.
        losses: train_loss before every step, (steps + 1,); NaN after the last one.
        gradient_norms: likewise.
    """

    Q: jax.Array
    overlaps: Overlaps
    train_loss: jax.Array
    gradient_norm: jax.Array
    iterations: jax.Array
    status: jax.Array
    losses: jax.Array
    gradient_norms: jax.Array

    @property
    def ok(self) -> jax.Array:
        """Whether the gradient is below its tolerance."""
        return self.status == Status.converged


def risk(model: Model, data: Data, Q: Any, *, exact: bool = False) -> jax.Array:
    """Empirical risk of weights Q: ``sum_mu loss(Z^mu, Y^mu) + lambda / 2 ||Q||_F^2``.

    Differentiable; its value and gradient together touch X twice.

    Args:
        Q: weights, (d, r).
        exact: the loss of a sentence is ``||y - f||_F^2 / (2 d)`` on its exact labels. The model's `loss` is its limit
            for large d, from which a sentence deviates by O(1 / sqrt(d)).

    Raises:
        ValueError: `Q` of the wrong shape, or `exact` for data without labels.
    """
    return _risk(model, data, check_estimate("Q", model, data, Q), exact)


def _risk(model: Model, data: Data, Q: jax.Array, exact: bool) -> jax.Array:
    losses = sentence_losses(model, data, student_fields(data.x, Q), exact)
    return jnp.sum(losses) + 0.5 * model.lam * jnp.sum(Q**2)


class _Loop(eqx.Module):
    Q: jax.Array
    value: jax.Array
    gradient: jax.Array
    inner: Any  # state of the optimiser
    steps: jax.Array
    failure: jax.Array  # what ended the run, or `converged` while nothing has
    losses: jax.Array
    norms: jax.Array


def train(
    model: Model,
    data: Data,
    optimizer: str = "gd",
    init: Any = "semantic",
    *,
    steps: int = 5000,
    rate: Any = None,
    tol: float = 1e-10,
    exact: bool = False,
    key: jax.Array | None = None,
    scale: float | None = None,
) -> Training:
    """Minimise the empirical risk from a start, with full batches.

    Works under `jit` and under `vmap` over instances.

    Args:
        model: loss and ridge; the ridge is the weight decay.
        data: the instance.
        optimizer: "gd", plain gradient descent; "adam"; or "lbfgs", L-BFGS with a zoom line search. Gradient descent is
            far from a minimum after the published 5000 steps wherever the ridge holds the weights, at a rate of
            ``lambda rate`` a step; L-BFGS is the one to run to zero gradient.
        init: "semantic", "positional", "random", or an array (d, r); see `tiedattn_jax.data.start`.
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
        ValueError: naming the argument that is unknown, out of range or of the wrong shape.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got optimizer={optimizer!r}")
    require(isinstance(steps, (int, np.integer)) and steps >= 1, "steps", steps, "an integer of at least 1")
    rate = RATES[optimizer] if rate is None else rate
    if is_concrete(rate):
        require(np.isfinite(rate) and rate > 0, "rate", rate, "positive and finite")
    if is_concrete(tol):
        require(np.isfinite(tol) and tol >= 0, "tol", tol, "zero or positive")
    Q = start(model, data, init, key, scale)
    return _run(model, data, Q, optimizer, int(steps), jnp.asarray(rate, Q.dtype), jnp.asarray(tol, Q.dtype), exact)


@eqx.filter_jit
def _run(
    model: Model,
    data: Data,
    Q: jax.Array,
    optimizer: str,
    steps: int,
    rate: jax.Array,
    tol: jax.Array,
    exact: bool,
) -> Training:
    d, dtype = Q.shape[0], Q.dtype
    tool = {"gd": optax.sgd, "adam": optax.adam, "lbfgs": optax.lbfgs}[optimizer](rate)
    none = jnp.asarray(Status.converged, jnp.int32)

    def objective(Q: jax.Array) -> jax.Array:
        return _risk(model, data, Q, exact)

    both = jax.value_and_grad(objective)

    def size(gradient: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(gradient))

    def body(p: _Loop) -> _Loop:
        if optimizer == "lbfgs":
            update, inner = tool.update(p.gradient, p.inner, p.Q, value=p.value, grad=p.gradient, value_fn=objective)
        else:
            update, inner = tool.update(p.gradient, p.inner, p.Q)
        Q = optax.apply_updates(p.Q, update)
        if optimizer == "lbfgs":  # the line search has the value and the gradient at its end
            value, gradient = optax.value_and_grad_from_state(objective)(Q, state=inner)
        else:
            value, gradient = both(Q)
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(Q))
        still = finite & jnp.all(Q == p.Q)
        k = p.steps + 1
        Q, value, gradient = (
            jnp.where(finite, new, old) for new, old in ((Q, p.Q), (value, p.value), (gradient, p.gradient))
        )
        return _Loop(
            Q=Q,
            value=value,
            gradient=gradient,
            inner=inner,
            steps=k,
            failure=jnp.where(finite, jnp.where(still, Status.stalled, none), Status.nonfinite).astype(jnp.int32),
            losses=p.losses.at[k].set(value / d),
            norms=p.norms.at[k].set(size(gradient)),
        )

    def unfinished(p: _Loop) -> jax.Array:
        return (p.failure == none) & (size(p.gradient) > tol) & (p.steps < steps)

    blank = jnp.full(steps + 1, jnp.nan, dtype)
    value, gradient = both(Q)
    first = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
    p = _Loop(
        Q=Q,
        value=value,
        gradient=gradient,
        inner=tool.init(Q),
        steps=jnp.array(0, jnp.int32),
        failure=jnp.where(first, none, Status.nonfinite).astype(jnp.int32),
        losses=blank.at[0].set(value / d),
        norms=blank.at[0].set(size(gradient)),
    )
    p = lax.while_loop(unfinished, body, p)
    norm = size(p.gradient)
    status = jnp.where(p.failure == Status.nonfinite, p.failure, jnp.where(norm <= tol, none, p.failure))
    ran_out = (status == none) & (norm > tol)
    return Training(
        Q=p.Q,
        overlaps=data.overlaps(p.Q),
        train_loss=p.value / d,
        gradient_norm=norm,
        iterations=p.steps,
        status=jnp.where(ran_out, Status.max_steps, status),
        losses=p.losses,
        gradient_norms=p.norms,
    )
