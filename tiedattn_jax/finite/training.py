"""Training the attention layer on the empirical risk: gradient descent, Adam, L-BFGS.

# notation: Q (d, r) the weights, X_l (n, d) the rows (x_l + p_l) / sqrt(d), lambda the ridge.

    risk(Q) = sum_mu loss(Z^mu, Y^mu) + lambda / 2 ||Q||_F^2,    z_l = X_l Q
    gradient = sum_l X_l^T dloss/dz_l + lambda Q

Only products of X with Q and of X^T with a field occur, one of each for a gradient; a prediction of the size of the
inputs, (n, L, d), is never built, not even for the exact labels. Training losses are given per dimension, risk / d, as
in the theory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..errors import is_concrete, require, require_choice, require_count
from ..model import Model
from ..overlaps import Overlaps
from ..results import Status
from .data import Data, check_estimate, start, student_fields
from .evaluation import sentence_losses

OPTIMIZERS = {"gd": optax.sgd, "adam": optax.adam, "lbfgs": optax.lbfgs}
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
        InputError: `Q` of the wrong shape, or `exact` for data without labels.
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
        init: "semantic", "positional", "random", or an array (d, r); see `tiedattn_jax.finite.data.start`.
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
    require_choice(optimizer, "optimizer", OPTIMIZERS)
    require_count(steps, "steps")
    rate = RATES[optimizer] if rate is None else rate
    if is_concrete(rate):
        require(np.isfinite(rate) and rate > 0, "rate", rate, "positive and finite")
    if is_concrete(tol):
        require(np.isfinite(tol) and tol >= 0, "tol", tol, "zero or positive")
    Q = start(model, data, init, key, scale)
    return _run(model, data, Q, optimizer, int(steps), jnp.asarray(rate, Q.dtype), jnp.asarray(tol, Q.dtype), exact)


class _Descent:
    """The risk of one instance, and one optimiser on it."""

    def __init__(self, model: Model, data: Data, optimizer: str, rate: jax.Array, exact: bool):
        self.objective = partial(_risk, model, data, exact=exact)
        self.tool = OPTIMIZERS[optimizer](rate)
        self.searches = optimizer == "lbfgs"  # along a line: it takes values, and has the value and gradient at its end

    def step(self, p: _Loop) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """Weights, risk, gradient and the optimiser's state after one step."""
        if not self.searches:
            update, inner = self.tool.update(p.gradient, p.inner, p.Q)
            Q = optax.apply_updates(p.Q, update)
            return Q, *jax.value_and_grad(self.objective)(Q), inner
        along = {"value": p.value, "grad": p.gradient, "value_fn": self.objective}
        update, inner = self.tool.update(p.gradient, p.inner, p.Q, **along)
        Q = optax.apply_updates(p.Q, update)
        return Q, *optax.value_and_grad_from_state(self.objective)(Q, state=inner), inner

    def first(self, Q: jax.Array, steps: int) -> _Loop:
        """Before the first step."""
        value, gradient = jax.value_and_grad(self.objective)(Q)
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient))
        blank = jnp.full(steps + 1, jnp.nan, Q.dtype)
        return _Loop(
            Q=Q,
            value=value,
            gradient=gradient,
            inner=self.tool.init(Q),
            steps=jnp.array(0, jnp.int32),
            failure=jnp.where(finite, Status.converged, Status.nonfinite).astype(jnp.int32),
            losses=blank.at[0].set(value / Q.shape[0]),
            norms=blank.at[0].set(_largest(gradient)),
        )

    def after(self, p: _Loop) -> _Loop:
        """After one step more; of one that is not finite nothing is kept but its failure."""
        Q, value, gradient, inner = self.step(p)
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(Q))
        still = finite & jnp.all(Q == p.Q)
        kept = (jnp.where(finite, a, b) for a, b in ((Q, p.Q), (value, p.value), (gradient, p.gradient)))
        Q, value, gradient = kept
        failure = jnp.where(finite, jnp.where(still, Status.stalled, Status.converged), Status.nonfinite)
        k = p.steps + 1
        return _Loop(
            Q=Q,
            value=value,
            gradient=gradient,
            inner=inner,
            steps=k,
            failure=failure.astype(jnp.int32),
            losses=p.losses.at[k].set(value / Q.shape[0]),
            norms=p.norms.at[k].set(_largest(gradient)),
        )


def _largest(gradient: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(gradient))


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
    descent = _Descent(model, data, optimizer, rate, exact)

    def unfinished(p: _Loop) -> jax.Array:
        return (p.failure == Status.converged) & (_largest(p.gradient) > tol) & (p.steps < steps)

    p = lax.while_loop(unfinished, descent.after, descent.first(Q, steps))
    norm = _largest(p.gradient)
    # A run without a failure that is not at its tolerance has had its steps.
    ended = jnp.where(p.failure == Status.converged, Status.max_steps, p.failure)
    converged = (norm <= tol) & (p.failure != Status.nonfinite)
    return Training(
        Q=p.Q,
        overlaps=data.overlaps(p.Q),
        train_loss=p.value / Q.shape[0],
        gradient_norm=norm,
        iterations=p.steps,
        status=jnp.where(converged, Status.converged, ended).astype(jnp.int32),
        losses=p.losses,
        gradient_norms=p.norms,
    )
