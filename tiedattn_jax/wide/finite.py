"""Finite dimension: sentences of a wide layer, training over the matrix or its factor, and message passing."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from ..averages.program import program
from ..base.arrays import Number, either, precise
from ..base.errors import (
    InputError,
    as_number,
    require,
    require_choice,
    require_count,
    require_key,
    require_kind,
    require_memory,
    require_positive,
    shaped_array,
)
from ..base.report import Description, rows_of
from ..base.results import Average, Result, Status, student_factor
from .channel import response, score_prox, tolerance
from .layer import Layer, require_layer
from .states import WideNumbers, WidePoint

_TOL = 1e-9  # relative change of the matrix in the last step of training
_PASSED = 1e-8  # the same for message passing
_ROUNDING = 50.0  # units in the last place of such a change in single precision
_MOST_STEPS = 20_000
_GROWTH, _SHRINK = 2.0, 0.95  # of the curvature of a proximal step that fails, and of one that succeeds
_FRESH = 2**30 + 1  # what is folded into the key of fresh sentences
_MEMORY = 4  # copies of the tokens that a step needs
_BLOCK = 256  # number of fresh sentences in memory together


class WideData(eqx.Module):
    """Sentences of a wide layer.

    Attributes:
        x: tokens of the student with their encodings, (n, L, d).
        teacher: the teacher's matrix S*, (d, d).
        scores: the teacher's scores, with noise, (n, L, L).
        encodings: encodings p_l, (L, d); zero without.
    """

    x: Float[Array, "n L d"]
    teacher: Float[Array, "d d"]
    scores: Float[Array, "n L L"]
    encodings: Float[Array, "L d"]

    @property
    def alpha(self) -> float:
        """Sentences per squared dimension."""
        return len(self.x) / self.x.shape[-1] ** 2


def sample_data(model: Layer, d: int, alpha: Number, key: Array) -> WideData:
    """Draw n = alpha d^2 sentences. The teacher has the quantiles of its law as eigenvalues, in a random basis.

    Long encodings are orthogonal, with length sqrt(d); those of order one are opposite.

    Raises:
        InputError: d is no count of at least two, alpha is not positive, the sentences do not fit into the memory, or
            there are fewer dimensions than encodings.
    """
    require_layer(model)
    require_count(d, "d", minimum=max(2, model.tokens))
    key = require_key(key)
    count = float(require_positive(alpha, "alpha", float)) * d**2
    n, L, dtype = max(1, round(count)), model.tokens, model.tau.dtype
    require_memory(_MEMORY * n * L * d * dtype.itemsize, "d", d, f"{n} sentences of {L} tokens")
    keys = jax.random.split(key, 4)
    basis = jnp.linalg.qr(jax.random.normal(keys[0], (d, d), dtype))[0]
    teacher = (basis * jnp.asarray(model.teacher.eigenvalues(d), dtype)) @ basis.T
    x = jax.random.normal(keys[1], (n, L, d), dtype)
    half = jax.random.normal(keys[2], (n, L, L), dtype) * jnp.sqrt(model.noise)
    noise = (jnp.tril(half) + jnp.swapaxes(jnp.tril(half), 1, 2)) / jnp.where(jnp.eye(L) > 0, jnp.sqrt(2.0), 1.0)
    p = jnp.zeros((L, d), dtype)
    if model.encodings is not None:
        units = jnp.linalg.qr(jax.random.normal(keys[3], (d, L), dtype))[0].T
        p = jnp.sqrt(d) * units if model.length is None else model.length * jnp.array([[1.0], [-1.0]], dtype) * units[0]
    return WideData(x + p, teacher, scores(x, teacher) + noise, p)


@precise
def scores(x: Float[Array, "n L d"], S: Float[Array, "d d"]) -> Float[Array, "n L L"]:
    """Return h_ab = (x_a^T S x_b - delta_ab Tr S) / sqrt(d) for every sentence."""
    n, L, d = x.shape
    product = jnp.einsum("nad,nbd->nab", (x.reshape(n * L, d) @ S).reshape(x.shape), x)
    return (product - jnp.eye(L, dtype=x.dtype) * jnp.trace(S)) / np.sqrt(d)


class WideTraining(WideNumbers, Result):
    """A trained or inferred matrix of a wide layer.

    Attributes:
        S: the matrix, (d, d).
        alpha: sentences per squared dimension.
        q, m, trace, train_loss, gen_error, energy, share, largest: its numbers, see `WideNumbers`. The test error is an
            average over as many sentences as were trained on.
        offset: shift of the scores by the encodings, p_a^T S p_b / sqrt(d), (L, L).
        iterations: number of steps.
        status: `Status` as an integer.
    """

    S: Float[Array, "d d"]
    alpha: Float[Array, ""]
    offset: Float[Array, "L L"]
    iterations: Int[Array, ""]
    status: Int[Array, ""]

    def describe(self) -> Description:
        title = f"Wide layer, d = {len(self.S)}, alpha = {float(self.alpha):.4g}"
        rows = rows_of(vars(WideNumbers.of(self)), meanings=WidePoint.SHOWN)
        return Description(title, self.status_name, [*rows, ("iterations", str(int(self.iterations)))])


def train(
    model: Layer, data: WideData, *, over: str = "S", key: Array | None = None, steps: int = _MOST_STEPS
) -> WideTraining:
    """Minimise the risk: over S by accelerated proximal gradients, whose zeros are exact, or over Q by L-BFGS.

    Args:
        over: "S" for positive semidefinite matrices of any rank; "Q" for Q with kappa d columns.
        key: random key of the first Q, and of the sentences of the test error; by default that of zero.
        steps: largest number of steps.
    """
    _require_data(model, data)
    require_choice(over, "over", ("S", "Q"))
    require_count(steps, "steps")
    key = require_key(jax.random.key(0) if key is None else key)
    if over == "S":
        S, count, done = _proximal_gradient(model, data, steps)
    else:
        d = data.x.shape[-1]
        columns = max(1, round(float(model.kappa) * d))
        first = jax.random.normal(key, (d, columns), data.x.dtype) / d**0.25
        S, count, done = _factor_descent(model, data, first, steps)
    return _training_of(model, data, S, count, done, key)


def _require_data(model: Layer, data: WideData) -> None:
    require_layer(model)
    require_kind(data, "data", WideData, "sentences from wide.sample_data")


def _empirical(layer: Layer, data: WideData, S: Array) -> Float[Array, ""]:
    """Return the summed losses of the training sentences over d^2."""
    d = data.x.shape[-1]
    return jnp.sum(jax.vmap(layer.loss)(scores(data.x, S), data.scores)) / d**2


def _relative_change(change: Float[Array, "a b"], value: Float[Array, "a b"]) -> Float[Array, ""]:
    """Return the length of a change over that of the value; zero if both vanish."""
    return jnp.linalg.norm(change) / jnp.maximum(jnp.linalg.norm(value), jnp.finfo(value.dtype).tiny)


def _positive_part(S: Float[Array, "d d"]) -> Float[Array, "d d"]:
    values, vectors = jnp.linalg.eigh((S + S.T) / 2)
    return (vectors * jnp.maximum(values, 0.0)) @ vectors.T


@program
@precise
def _proximal_gradient(layer: Layer, data: WideData, steps: int) -> tuple[Array, Any, Array]:
    """Minimise over S = W S' W. W shrinks the span of the encodings, whose length makes the problem ill-conditioned."""
    x, p = data.x, data.encodings
    d = x.shape[-1]
    W = jnp.eye(d, dtype=x.dtype)
    if layer.is_long:
        unit = jnp.linalg.qr(p.T)[0]
        W = W - (1 - 1 / jnp.sqrt(jnp.sum(p[0] ** 2))) * unit @ unit.T
    penalty = layer.tau / d * W @ W  # of S', over d^2
    tol, rounding = tolerance(_TOL, _ROUNDING, x), tolerance(1e-13, 10.0, x)

    def smooth(S: Array) -> Array:
        return _empirical(layer, data, W @ S @ W)

    def value_and_slope(S: Array) -> tuple[Array, Array]:
        value, gradient = jax.value_and_grad(smooth)(S)
        return value, (gradient + gradient.T) / 2

    def body(state: tuple) -> tuple:
        S, Z, momentum, curvature, value_Z, gradient, _, count = state
        after = _positive_part(Z - (gradient + penalty) / curvature)
        value = smooth(after)
        step = after - Z
        bound = value_Z + jnp.vdot(gradient, step) + 0.5 * curvature * jnp.vdot(step, step)
        fits = value <= bound + rounding * jnp.abs(value)
        # Momentum that points uphill starts anew.
        uphill = jnp.vdot(Z - after, after - S) > 0
        faster = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
        faster = jnp.where(uphill, 1.0, faster)
        ahead = after + jnp.where(uphill, 0.0, (momentum - 1) / faster) * (after - S)
        advanced = after, ahead, faster, _SHRINK * curvature, _relative_change(step, after)
        S, Z, momentum, curvature, change = either(fits, advanced, (S, Z, momentum, _GROWTH * curvature, jnp.inf))
        return S, Z, momentum, curvature, *value_and_slope(Z), change, count + 1

    zero, one = jnp.zeros((d, d), x.dtype), jnp.ones((), x.dtype)
    state = (zero, zero, one, one / d, *value_and_slope(zero), jnp.inf * one, 0)
    S, *_, change, count = lax.while_loop(lambda s: (s[-2] > tol) & (s[-1] < steps), body, state)
    return W @ S @ W, count, change <= tol


@program
@precise
def _factor_descent(layer: Layer, data: WideData, first: Float[Array, "d k"], steps: int) -> tuple:
    d, columns = first.shape
    tol = tolerance(_TOL, _ROUNDING, first)
    scale = d * jnp.sqrt(columns / d)

    def risk(Q: Array) -> Array:
        S = Q @ Q.T / scale
        return _empirical(layer, data, S) + layer.tau * jnp.trace(S) / d

    optimizer = optax.lbfgs(memory_size=20)
    value_and_grad = optax.value_and_grad_from_state(risk)

    def body(state: tuple) -> tuple:
        Q, memory, _, count = state
        value, gradient = value_and_grad(Q, state=memory)
        update, memory = optimizer.update(gradient, memory, Q, value=value, grad=gradient, value_fn=risk)
        change = jnp.linalg.norm(gradient) * jnp.linalg.norm(Q) / jnp.maximum(value, jnp.finfo(value.dtype).tiny)
        return Q + update, memory, change, count + 1

    start = (first, optimizer.init(first), jnp.asarray(jnp.inf, first.dtype), 0)
    Q, _, change, count = lax.while_loop(lambda s: (s[2] > tol) & (s[3] < steps), body, start)
    return Q @ Q.T / scale, count, change <= tol


@program
@precise
def _training_of(layer: Layer, data: WideData, S: Array, count: Array, done: Array, key: Array) -> WideTraining:
    """Return the result of a search that ended at S after `count` steps, within its tolerance if it is `done`."""
    n, _, d = data.x.shape
    values = jnp.linalg.eigvalsh(S)
    risk, trace = _empirical(layer, data, S), jnp.trace(S) / d
    status = jnp.where(done, Status.converged, Status.max_steps)
    return WideTraining(
        S=S,
        alpha=jnp.asarray(n / d**2, S.dtype),
        q=jnp.sum(S**2) / d,
        m=jnp.sum(S * data.teacher) / d,
        trace=trace,
        train_loss=risk * d**2 / n,
        gen_error=jnp.mean(_fresh_losses(layer, data, S, key, -(-n // _BLOCK))),
        energy=risk + layer.tau * trace,
        share=jnp.mean(jnp.where(values > 1e-6 * values[-1], 1.0, 0.0).astype(S.dtype)),
        largest=values[-1],
        offset=data.encodings @ S @ data.encodings.T / np.sqrt(d),
        iterations=count,
        status=jnp.where(jnp.all(jnp.isfinite(S)), status, Status.nonfinite),
    )


def _fresh_losses(layer: Layer, data: WideData, S: Array, key: Array, blocks: int) -> Float[Array, " n"]:
    """Return the losses of fresh sentences without noise, `_BLOCK` for each block."""
    # `split` and `fold_in` of small numbers derive equal keys from a key; the tokens would be those of `sample_data`.
    key, shape = jax.random.fold_in(key, _FRESH), (_BLOCK, *data.encodings.shape)

    def losses(k: Int[Array, ""]) -> Float[Array, " block"]:
        x = jax.random.normal(jax.random.fold_in(key, k), shape, S.dtype)
        return jax.vmap(layer.loss)(scores(x + data.encodings, S), scores(x, data.teacher))

    return lax.map(losses, jnp.arange(blocks)).ravel()


def heldout_error(
    model: Layer, data: WideData, S: Array, key: Array | None = None, *, sentences: int = 50_000
) -> Average:
    """Estimate the test error of a matrix S.

    With a key, the sentences are fresh and their labels without noise. Without one, they are those of the data, which
    training must not have used.

    Args:
        data: gives the teacher and the encodings; without a key also the sentences.
        S: the matrix, (d, d).
        sentences: number of fresh sentences, rounded up to a multiple of 256.

    Raises:
        InputError: S has another shape, or `sentences` is below two.
    """
    _require_data(model, data)
    S = shaped_array("S", S, "d d", {"d": data.x.shape[-1]}, data.x.dtype)
    require_count(sentences, "sentences", 2)
    if key is None:
        require(len(data.x) >= 2, "data", len(data.x), "two sentences or more for an error bar")
        return _mean_loss(model, data, S, None, 0)
    return _mean_loss(model, data, S, require_key(key), -(-int(sentences) // _BLOCK))


@program
@precise
def _mean_loss(layer: Layer, data: WideData, S: Array, key: Array | None, blocks: int) -> Average:
    """Return the mean loss over fresh sentences, or without a key over those of the data."""
    if key is None:
        losses = jax.vmap(layer.loss)(scores(data.x, S), data.scores)
    else:
        losses = _fresh_losses(layer, data, S, key, blocks)
    scale = float(student_factor(losses.size) / np.sqrt(losses.size))
    return Average(jnp.mean(losses), scale * jnp.std(losses, ddof=1))


def gamp(
    model: Layer, data: WideData, *, damping: Number = 0.0, steps: int = 300, key: Array | None = None
) -> WideTraining:
    """Message passing; its fixed point is a minimum of the risk.

    Args:
        damping: share of the old messages that is kept. Below alpha of about .5 it oscillates without damping.
        steps: largest number of iterations.
        key: random key of the sentences of the test error.

    Raises:
        InputError: the layer has encodings, damping is not in [0, 1), or `steps` is no count.
    """
    require_layer(model)
    if model.encodings is not None:
        raise InputError("model", "must have no encodings for message passing: train it instead")
    _require_data(model, data)
    damping = as_number(damping, "damping", model.tau.dtype)
    require((damping >= 0) & (damping < 1), "damping", damping, "in [0, 1)")
    require_count(steps, "steps")
    key = require_key(jax.random.key(0) if key is None else key)
    S, count, done = _message_passing(model, data, damping, steps)
    return _training_of(model, data, S, count, done, key)


@program
@precise
def _message_passing(layer: Layer, data: WideData, damping: Array, steps: int) -> tuple[Array, Any, Array]:
    d, tol = data.x.shape[-1], tolerance(_PASSED, _ROUNDING, data.x)

    def coordinates(scores: Array) -> Array:  # (n, L, L) -> (seen, n)
        return jax.vmap(layer.coordinates, 0, 1)(scores)

    y = coordinates(data.scores)
    _, adjoint = jax.vjp(lambda S: coordinates(scores(data.x, S)), jnp.zeros((d, d), data.x.dtype))
    none = jnp.zeros((len(y), 1), data.x.dtype)

    def body(state: tuple) -> tuple:
        S, V, g, Lam, _, count = state
        w = coordinates(scores(data.x, S)) - V * g
        h = score_prox(layer, w, y, V, none)
        message, information = response(layer, h, y, V, none)
        before, g = g, damping * g + (1 - damping) * message
        Lam = damping * Lam + (1 - damping) * data.x.shape[0] / d**2 * information
        (pull,) = adjoint(g)
        values, vectors = jnp.linalg.eigh((pull + pull.T) / (2 * d) + Lam * S)
        f = jnp.maximum(values - layer.tau, 0.0)
        after = (vectors * (f / Lam)) @ vectors.T
        gap = values[:, None] - values
        slope = jnp.where(gap != 0, (f[:, None] - f) / jnp.where(gap != 0, gap, 1.0), (values > layer.tau)[:, None])
        V = damping * V + (1 - damping) * (jnp.sum(jnp.triu(slope)) / d**2 / Lam)
        # The matrix may stay empty while damped messages grow.
        change = jnp.where(jnp.any(after != 0), _relative_change(after - S, after), _relative_change(g - before, g))
        return after, V, g, Lam, change, count + 1

    one = jnp.ones((), data.x.dtype)
    start = (jnp.zeros((d, d), data.x.dtype), one, jnp.zeros_like(y), one, jnp.inf * one, 0)
    S, *_, change, count = lax.while_loop(lambda s: (s[-2] > tol) & (s[-1] < steps), body, start)
    return S, count, change <= tol
