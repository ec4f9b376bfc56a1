"""Finite dimension: sentences of a wide layer, training over the matrix or its factor, and message passing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from .channel import Inside, response, score_prox, tolerance
from .layer import Layer, require_layer, require_numbers
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
        x: tokens of the student with their encodings, (n, L, d); the queries of an untied layer that sees "cross".
        teacher: the teacher's matrix S*, (d, d).
        scores: the teacher's scores, with noise, (n, L, L).
        encodings: encodings p_l, (L, d); zero without.
        keys: tokens of the keys with their encodings, (n, L, d); those of x but for "cross".
        key_encodings: encodings of the keys, (L, d).
    """

    x: Float[Array, "n L d"]
    teacher: Float[Array, "d d"]
    scores: Float[Array, "n L L"]
    encodings: Float[Array, "L d"]
    keys: Float[Array, "n L d"] | None = None
    key_encodings: Float[Array, "L d"] | None = None

    @property
    def token_pairs(self) -> tuple[Float[Array, "n L d"], Float[Array, "n L d"]]:
        """The tokens of queries and keys."""
        return self.x, self.x if self.keys is None else self.keys

    @property
    def encoding_pairs(self) -> tuple[Float[Array, "L d"], Float[Array, "L d"]]:
        """The encodings of queries and keys."""
        return self.encodings, self.encodings if self.key_encodings is None else self.key_encodings

    @property
    def alpha(self) -> float:
        """Sentences per squared dimension."""
        return len(self.x) / self.x.shape[-1] ** 2


def sample_data(model: Layer, d: int, alpha: Number, key: Array) -> WideData:
    """Draw n = alpha d^2 sentences. The teacher has the quantiles of its law as eigenvalues, in a random basis.

    That of an untied layer has them as singular values, in two random bases. Long encodings are orthogonal, with length
    sqrt(d); those of order one are opposite.

    Raises:
        InputError: d is no count of at least two, alpha is not positive, the sentences do not fit into the memory, or
            there are fewer dimensions than encodings.
    """
    require_layer(model)
    require_numbers(model, alpha)
    require_count(d, "d", minimum=max(2, model.tokens))
    key = require_key(key)
    count = float(require_positive(alpha, "alpha", float)) * d**2
    n, L, dtype = max(1, round(count)), model.tokens, model.tau.dtype
    require_memory(_MEMORY * n * L * d * dtype.itemsize, "d", d, f"{n} sentences of {L} tokens")
    keys = jax.random.split(key, 4)
    crosses = model.has_keys

    def drawn(key: Array, count: int, draw: Callable[[Array], Array]) -> list[Array]:
        """Return what is drawn for queries, and a second draw for keys if the count is two."""
        return [draw(key) for key in (key, jax.random.fold_in(key, 1))[:count]]

    bases = drawn(keys[0], model.sides, lambda key: jnp.linalg.qr(jax.random.normal(key, (d, d), dtype))[0])
    teacher = (bases[0] * jnp.asarray(model.teacher.eigenvalues(d), dtype)) @ bases[-1].T
    x = drawn(keys[1], 1 + crosses, lambda key: jax.random.normal(key, (n, L, d), dtype))
    noise = jax.random.normal(keys[2], (n, L, L), dtype) * jnp.sqrt(model.noise)
    if model.sides == 1:
        noise = jnp.tril(noise) + jnp.swapaxes(jnp.tril(noise), 1, 2)
        noise /= jnp.where(jnp.eye(L) > 0, jnp.sqrt(2.0), 1.0)
    p = [jnp.zeros((L, d), dtype)] * (1 + crosses)
    if model.encodings is not None:
        units = drawn(keys[3], 1 + crosses, lambda key: jnp.linalg.qr(jax.random.normal(key, (d, L), dtype))[0].T)
        length = np.sqrt(d) if model.length is None else model.length * jnp.array([[1.0], [-1.0]], dtype)
        p = [length * (unit if model.length is None else unit[0]) for unit in units]
    labels = scores(model, (x[0], x[-1]), teacher) + noise
    tokens = [a + b for a, b in zip(x, p, strict=True)]
    return WideData(tokens[0], teacher, labels, p[0], *((tokens[1], p[1]) if crosses else ()))


@precise
def scores(
    layer: Layer, tokens: tuple[Float[Array, "n L d"], Float[Array, "n L d"]], S: Float[Array, "d d"]
) -> Float[Array, "n L L"]:
    """Return h_ab = x_a^T S y_b / sqrt(d) for every sentence; that of a tied layer is minus delta_ab Tr S / sqrt(d)."""
    x, y = tokens
    n, L, d = x.shape
    product = jnp.einsum("nad,nbd->nab", (x.reshape(n * L, d) @ S).reshape(x.shape), y)
    return (product - (jnp.eye(L, dtype=x.dtype) * jnp.trace(S) if layer.sides == 1 else 0)) / np.sqrt(d)


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
    """Minimise the risk: over S by accelerated proximal gradients, whose zeros are exact, or over factors by L-BFGS.

    Args:
        over: "S" for matrices of any rank, positive semidefinite in a tied layer; "Q" for the factor Q with kappa d
            columns, and K in an untied layer. With long encodings an untied layer trains faster over its factors.
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
        require_numbers(model.kappa)
        d = data.x.shape[-1]
        columns = max(1, round(float(model.kappa) * d))
        first = jax.random.normal(key, (model.sides, d, columns), data.x.dtype) / d**0.25
        S, count, done = _factor_descent(model, data, first, steps)
    return _training_of(model, data, S, count, done, key)


def _require_data(model: Layer, data: WideData) -> None:
    require_layer(model)
    require_kind(data, "data", WideData, "sentences from wide.sample_data")
    have_keys, tokens = data.keys is not None, data.x.shape[1]
    if (have_keys, tokens) != (model.has_keys, model.tokens):
        kinds = {True: "keys of their own", False: "keys that are their queries"}
        text = f"must be sentences of {model.tokens} tokens with {kinds[model.has_keys]}, like the layer"
        raise InputError("data", f"{text}, got {tokens} tokens with {kinds[have_keys]}")


def _empirical(layer: Layer, data: WideData, S: Array) -> Float[Array, ""]:
    """Return the summed losses of the training sentences over d^2."""
    d = data.x.shape[-1]
    return jnp.sum(jax.vmap(layer.loss)(scores(layer, data.token_pairs, S), data.scores)) / d**2


def _relative_change(change: Float[Array, "a b"], value: Float[Array, "a b"]) -> Float[Array, ""]:
    """Return the length of a change over that of the value; zero if both vanish."""
    return jnp.linalg.norm(change) / jnp.maximum(jnp.linalg.norm(value), jnp.finfo(value.dtype).tiny)


class _Spectral(NamedTuple):
    """A matrix left diag(values) right^T: eigenvalues of a tied layer's, singular values of an untied one's."""

    left: Float[Array, "d d"]
    values: Float[Array, " d"]
    right: Float[Array, "d d"]

    @classmethod
    def of(cls, layer: Layer, S: Float[Array, "d d"]) -> _Spectral:
        """Decompose a matrix, that of a tied layer after it is made symmetric."""
        if layer.sides == 1:
            values, vectors = jnp.linalg.eigh((S + S.T) / 2)
            return cls(vectors, values, vectors)
        left, values, right = jnp.linalg.svd(S)
        return cls(left, values, right.T)

    def beyond(self, tau: Float[Array, ""]) -> Float[Array, "d d"]:
        """Return the matrix with the part of every value beyond tau, zero below."""
        return (self.left * jnp.maximum(self.values - tau, 0.0)) @ self.right.T


@program
@precise
def _proximal_gradient(layer: Layer, data: WideData, steps: int) -> tuple[Array, Any, Array]:
    """Minimise the risk of a tied layer over S = W S' W, that of an untied one over S.

    W shrinks the span of long encodings, whose length makes the problem ill-conditioned. The trace norm of an untied S
    has no proximal operator in S'.
    """
    x, p = data.x, data.encodings
    d = x.shape[-1]
    W = jnp.eye(d, dtype=x.dtype)
    if layer.is_long and layer.sides == 1:
        unit = jnp.linalg.qr(p.T)[0]
        W = W - (1 - 1 / jnp.sqrt(jnp.sum(p[0] ** 2))) * unit @ unit.T
    # The trace is linear, so that it may be taken out of the threshold.
    penalty, threshold = (layer.tau / d * W @ W, 0.0) if layer.sides == 1 else (0.0, layer.tau / d)
    tol, rounding = tolerance(_TOL, _ROUNDING, x), tolerance(1e-13, 10.0, x)

    def smooth(S: Array) -> Array:
        return _empirical(layer, data, W @ S @ W)

    value_and_slope = jax.value_and_grad(smooth)

    def body(state: tuple) -> tuple:
        S, Z, momentum, curvature, value_Z, gradient, _, count = state
        after = _Spectral.of(layer, Z - (gradient + penalty) / curvature).beyond(threshold / curvature)
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
def _factor_descent(layer: Layer, data: WideData, first: Float[Array, "f d k"], steps: int) -> tuple:
    """Minimise the risk over the f = 1 or 2 factors of S."""
    _, d, columns = first.shape
    tol = tolerance(_TOL, _ROUNDING, first)
    scale = d * jnp.sqrt(columns / d)

    def matrix(factors: Array) -> Array:
        return factors[0] @ factors[-1].T / scale

    def risk(factors: Array) -> Array:
        ridge = layer.tau * jnp.sum(factors**2) / (len(factors) * scale * d)
        return _empirical(layer, data, matrix(factors)) + ridge

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
    return matrix(Q), count, change <= tol


@program
@precise
def _training_of(layer: Layer, data: WideData, S: Array, count: Array, done: Array, key: Array) -> WideTraining:
    """Return the result of a search that ended at S after `count` steps, within its tolerance if it is `done`."""
    n, _, d = data.x.shape
    values = _Spectral.of(layer, S).values
    largest = jnp.max(values)
    risk, trace = _empirical(layer, data, S), jnp.sum(values) / d
    p, r = data.encoding_pairs
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
        share=jnp.mean(jnp.where(values > 1e-6 * largest, 1.0, 0.0).astype(S.dtype)),
        largest=largest,
        offset=p @ S @ r.T / np.sqrt(d),
        iterations=count,
        status=jnp.where(jnp.all(jnp.isfinite(S)), status, Status.nonfinite),
    )


def _fresh_losses(layer: Layer, data: WideData, S: Array, key: Array, blocks: int) -> Float[Array, " n"]:
    """Return the losses of fresh sentences without noise, `_BLOCK` for each block."""
    # `split` and `fold_in` of small numbers derive equal keys from a key; the tokens would be those of `sample_data`.
    key, shape = jax.random.fold_in(key, _FRESH), (_BLOCK, *data.encodings.shape)

    def losses(k: Int[Array, ""]) -> Float[Array, " block"]:
        key_k = jax.random.fold_in(key, k)
        x = y = jax.random.normal(key_k, shape, S.dtype)
        if data.keys is not None:
            y = jax.random.normal(jax.random.fold_in(key_k, 1), shape, S.dtype)
        p, r = data.encoding_pairs
        return jax.vmap(layer.loss)(scores(layer, (x + p, y + r), S), scores(layer, (x, y), data.teacher))

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
        losses = jax.vmap(layer.loss)(scores(layer, data.token_pairs, S), data.scores)
    else:
        losses = _fresh_losses(layer, data, S, key, blocks)
    scale = float(student_factor(losses.size) / np.sqrt(losses.size))  # as in `error_bar`, for one number of losses
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

    def coordinates(scores: Array) -> Array:  # (n, L, L) -> (directions of a block, blocks n)
        parts = layer.coordinates(jnp.moveaxis(scores, 0, -1))
        return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)

    y = coordinates(data.scores)
    _, adjoint = jax.vjp(lambda S: coordinates(scores(layer, data.token_pairs, S)), jnp.zeros((d, d), data.x.dtype))
    row = jnp.repeat(jnp.eye(len(layer.blocks), dtype=data.x.dtype), len(data.x), 1)
    inside = Inside(jnp.zeros_like(y), row)

    def body(state: tuple) -> tuple:
        S, V, g, Lam, _, count = state
        w = coordinates(scores(layer, data.token_pairs, S)) - V * g
        h = score_prox(layer, w, y, V, inside)
        message, information = response(layer, h, y, V, inside)
        before, g = g, damping * g + (1 - damping) * message
        Lam = damping * Lam + (1 - damping) * jnp.sum(information) / d**2
        (pull,) = adjoint(g)
        pull = (pull + pull.T) / 2 if layer.sides == 1 else pull
        Y = _Spectral.of(layer, pull / d + Lam * S)
        after = Y.beyond(layer.tau) / Lam
        V = damping * V + (1 - damping) * _divergence(layer, Y.values) / Lam
        # The matrix may stay empty while damped messages grow.
        change = jnp.where(jnp.any(after != 0), _relative_change(after - S, after), _relative_change(g - before, g))
        return after, V, g, Lam, change, count + 1

    one = jnp.ones((), data.x.dtype)
    start = (jnp.zeros((d, d), data.x.dtype), one, jnp.zeros_like(y), one, jnp.inf * one, 0)
    S, *_, change, count = lax.while_loop(lambda s: (s[-2] > tol) & (s[-1] < steps), body, start)
    return S, count, change <= tol


def _divergence(layer: Layer, values: Float[Array, " d"]) -> Float[Array, ""]:
    """Return the divergence of the threshold f over d^2, from eigenvalues or singular values y.

    It is the sum over pairs i <= j of f[y_i, y_j] for symmetric matrices. For others it is the sum over all i and j of
    the mean of f[y_i, y_j] and f[y_i, -y_j], and of the slope f'(y_i) for i = j.
    """
    f = jnp.maximum(values - layer.tau, 0.0)
    gap = values[:, None] - values
    slope = jnp.where(gap != 0, (f[:, None] - f) / jnp.where(gap != 0, gap, 1.0), (values > layer.tau)[:, None])
    if layer.sides == 1:
        return jnp.sum(jnp.triu(slope)) / values.size**2
    both = values[:, None] + values
    mirrored = (f[:, None] + f) / jnp.where(both > 0, both, 1.0)
    return jnp.mean(jnp.where(jnp.eye(values.size) > 0, slope, (slope + mirrored) / 2))
