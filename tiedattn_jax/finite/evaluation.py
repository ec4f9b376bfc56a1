"""Estimates of the student on sentences: their losses and test errors; the best linear attention.

# notation: as in `data`. d dimension, n sentences, L tokens, r and t ranks of student and teacher, Q (d, r) an estimate
# of the teacher Q* (d, t); f is the student's prediction for the exact labels y, both (L, d) for a sentence. The inputs
# of the student are x + p, sentence plus encodings; `Data.x` holds them divided by sqrt(d), (L, n, d).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Real

from ..averages.moreau import loss_at_nodes
from ..base.arrays import AnyArray, Number, precise
from ..base.errors import (
    InputError,
    as_flag,
    require,
    require_count,
    require_key,
    require_kind,
    require_not_negative,
    shaped_array,
)
from ..base.nodewise import nodewise
from ..base.report import Description, by_token, rows_of
from ..base.results import Average, Result, Status, student_factor
from ..model.checks import check_provides
from ..model.model import Model, over_kinds
from ..model.overlaps import OrderNumber, Overlaps
from ..theory.quantities import Quantity
from .data import Data, Labels, Population, Sample
from .diagnosis import check_estimate
from .products import covariances, power_of_two, student_fields
from .sampling import draw_classes, draw_sentences, noise_fields

_STANDARD_LOSS = 0.005  # mean loss of weights zero in the standard setting
_TEST_BLOCK = 256  # sentences in memory at a time; 256 x 2 x 1000 normals take 4 MB in float64


class Estimate(Result):
    """Weights at the end of a run on data, with the fields that message passing and training have in common.

    `q`, `V`, `theta` and `m` are the order parameters as numbers, for two tokens and rank one, as in `FixedPoint`.
    """

    batch_probe = "iterations", 0
    USABLE = Status.converged
    NUMBERS: ClassVar[tuple[str, ...]] = ("train_loss", "gradient_norm")  # shown beside the overlaps
    q, V, theta, m = OrderNumber(), OrderNumber(), OrderNumber(), OrderNumber()
    Q: Float[Array, "d r"]
    overlaps: Overlaps
    iterations: Int[Array, ""]
    status: Int[Array, ""]

    def _numbers(self) -> dict[str, Float[AnyArray, "..."]]:
        """Return the known numbers by name. Weights of training have no V; without a teacher there is no theta."""
        numbers = {**vars(self.overlaps), **{name: getattr(self, name) for name in self.NUMBERS}}
        return {name: a for name, a in numbers.items() if a is not None and not np.all(np.isnan(a))}

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, iterations and status, as JSON if all numbers are finite.

        Arrays are written as in `FixedPoint.to_dict`.
        """
        numbers = {name: (by_token(a)[0] if a.ndim else a).tolist() for name, a in self._numbers().items()}
        return {**numbers, "iterations": int(self.iterations), "status": self.status_name}

    def describe(self) -> Description:
        d, r = self.Q.shape
        title = f"Q of shape ({d}, {r}) after {self.iterations} iterations"
        unknown = bool(np.all(np.isnan(self.overlaps.theta))) and bool(np.all(np.isfinite(self.Q)))
        details = [("theta", "", "not known without the teacher")] if unknown else []
        return Description(title, self.status_name, rows_of(self._numbers()), details)


def kind_mask(model: Model, classes: Int[Array, "n L"] | None) -> Bool[Array, " n"] | float:
    """Return a mask of the sentences of the kind that `model` is conditioned on; 1.0 if there is one kind only.

    The classes of its tokens determine the kind of a sentence.
    """
    indicator = model.sentence.indicator
    return 1.0 if indicator is None or classes is None else jnp.all(classes == jnp.argmax(indicator, 1), 1)


def map_kinds(
    model: Model, classes: Int[Array, "n L"] | None, fn: Callable[[Model], Float[Array, "*value n"]]
) -> Float[Array, "*value n"]:
    """Evaluate `fn`, a function of all sentences, for each sentence with the model conditioned on its kind."""
    return over_kinds(model, lambda model: jnp.where(kind_mask(model, classes), fn(model), 0.0))


@nodewise
@precise
def _exact_losses(
    model: Model,
    Z: Float[Array, "L r"],
    energy: Float[Array, ""],
    cross: Float[Array, "L L"],
    gram: Float[Array, "L L"],
) -> Float[Array, ""]:
    """Return the squared error ``||y - S(Z) (x + p)||_F^2 / (2 d)`` of a sentence from the inner products of `Labels`.

    `nodewise` maps this function over the sentences, the last axis of its arguments.
    """
    S = model.student(Z)
    return 0.5 * energy - jnp.sum(S * cross) + 0.5 * jnp.sum((S @ gram) * S)


def sentence_losses(model: Model, data: Sample, Z: Float[Array, "L r n"], exact: bool = False) -> Float[Array, " n"]:
    """Return the loss of every sentence at the student's fields `Z`.

    Args:
        model: gives `loss`, and `student` if `exact`.
        data: n sentences.
        Z: local fields of the student, see `student_fields`.
        exact: whether to return the squared error ``||y - f||_F^2 / (2 d)`` on the exact labels instead of the model's
            `loss`, which is its limit for large d.

    Raises:
        InputError: if `exact` is set but the data have no labels or are drawn on demand, or the model has no method
            `student`.
    """
    if not exact:
        return map_kinds(model, data.classes, lambda model: loss_at_nodes(model, Z, data.fields))
    labels = data.stored("for exact=True").known_labels("for exact=True")
    check_provides(model, "student", "for exact=True")
    return _exact_losses(model, Z, labels.energy, labels.cross, labels.gram)


@precise
def with_value(data: Data, labels: Float[Array, "n L d"], W: Float[Array, "d d"]) -> Data:
    """Return the data with other `Labels`: those of a layer whose attention mixes values instead of the inputs.

    The values of a sentence are ``(x + p) W``. Losses with ``exact=True`` on the returned data are those of the
    layer with this value matrix. All else in the data stays.

    Args:
        data: sentences; their own labels, if any, are replaced.
        labels: exact labels.
        W: value matrix.
    """
    return eqx.tree_at(lambda s: s.labels, data, Labels.of(labels, data.x @ W), is_leaf=lambda leaf: leaf is None)


@precise
def value_risk(
    model: Model,
    data: Data,
    labels: Float[Array, "n L d"],
    Q: Float[Array, "d r"],
    W: Float[Array, "d d"],
    ridge: Number,
) -> Float[Array, ""]:
    """Return ``sum_mu ||y - S (x + p) W||_F^2 / (2 d) + lambda / 2 ||Q||_F^2 + ridge / 2 ||W - 1||_F^2``.

    Args:
        labels: exact labels y.
        ridge: kappa.
    """
    distance = jnp.sum((W - jnp.eye(len(W), dtype=W.dtype)) ** 2)
    losses = sentence_losses(model, with_value(data, labels, W), student_fields(data.x, Q), exact=True)
    return jnp.sum(losses) + 0.5 * model.lam * jnp.sum(Q**2) + 0.5 * ridge * distance


@nodewise
def _student_attention(model: Model, Z: Float[Array, "L r"]) -> Float[Array, "L L"]:
    return model.student(Z)


@precise
def best_value(
    model: Model, data: Data, labels: Float[Array, "n L d"], Q: Float[Array, "d r"], ridge: Number
) -> Float[Array, "d d"]:
    """Return the value matrix that minimises `value_risk` at weights Q, by the smaller of two linear systems.

    W = 1 + (F^T F + ridge)^-1 F^T (y / sqrt(d) - F) = 1 + F^T (F F^T + ridge)^-1 (y / sqrt(d) - F),
    F = S (x + p) / sqrt(d),    with a row for every token of every sentence
    """
    F = jnp.einsum("kln,lni->nki", _student_attention(model, student_fields(data.x, Q)), data.x).reshape(-1, len(Q))
    residual = labels.reshape(F.shape) / len(Q) ** 0.5 - F
    is_wide = len(F) < len(Q)
    gram = F @ F.T if is_wide else F.T @ F
    floor = jnp.finfo(gram.dtype).eps * jnp.trace(gram)  # keeps the system solvable without a ridge
    factor = jax.scipy.linalg.cho_factor(gram + jnp.maximum(ridge, floor) * jnp.eye(len(gram), dtype=gram.dtype))
    solve = partial(jax.scipy.linalg.cho_solve, factor)
    return jnp.eye(len(Q), dtype=gram.dtype) + (F.T @ solve(residual) if is_wide else solve(F.T @ residual))


# An array, or several of one dimension in a tree.
Weights: TypeAlias = PyTree[Float[Array, "d _"]]


class Units(NamedTuple):
    """Units in which a descent measures, so that it does the same in all units; see `products.weight_unit`.

    Attributes:
        weights: unit of the weights, or of each of several arrays.
        loss: unit of the risk.
    """

    weights: PyTree[Float[Array, ""]]
    loss: Float[Array, ""]

    @property
    def rate(self) -> Float[Array, ""]:
        """Unit of the learning rate of gradient descent, and of a proximal step."""
        return self.weights**2 / self.loss

    def of(self, gradient: Weights) -> Weights:
        """Return a gradient in these units."""
        return jax.tree.map(lambda g, a: g * a / self.loss, gradient, self.weights)


def proximal_gradient(model: Model, weights: Weights, gradient: Weights, units: Units) -> Weights:
    """Return the gradient of the risk, or the proximal gradient if there is a penalty.

    Args:
        weights: with a penalty only the array Q.
        gradient: gradient of the `smooth_risk`, of the same structure.
    """
    if model.penalty is None:
        return gradient
    rate = units.rate
    return (weights - model.penalty.prox(weights - rate * gradient, jnp.full_like(weights, rate))) / rate


def largest(weights: Weights) -> Float[Array, ""]:
    """Return the largest absolute value of all entries."""
    return jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(weights)]))


def loss_unit(model: Model, data: Sample, exact: bool = False) -> Float[Array, ""]:
    """Return the unit of losses: the power of two nearest to the mean loss of weights zero, over its standard value."""
    zero = jnp.zeros((*model.shape[:2], data.count), data.dtype)
    return power_of_two(jnp.mean(jnp.abs(sentence_losses(model, data, zero, exact))) / _STANDARD_LOSS)


def linear_baseline(data: Data, *, ridge: Number = 0.0, test: Data | None = None) -> Quantity:
    """Fit linear attention ``f(x) = W (x + p)`` to the exact labels, eqs. (17)-(18), and return its test error.

    The test error `gen_error` is the mean of ``||y - f||_F^2 / (2 d)`` over sentences that W has not seen: those of
    `test`, or the data themselves by cross-validation in at most eight folds. Further numbers of the result:

        W            attention matrix (L, L), the same for all sentences: the minimiser of the sum of
                     ``||y - W (x + p)||_F^2 / (2 d)`` over the data, plus ``ridge / 2 ||W||_F^2``
        train_error  the same mean as `gen_error` over the sentences of the data

    For large d W tends to E T(Y), the mean of the model's `target` over the teacher's fields, and the test error to
    that of Result 5.1, `FixedPoint.gen_error_linear`. The status is `singular` if the sentences do not determine W.

    Args:
        data: sentences with labels; at least two unless `test` is given.
        ridge: strength of the penalty ``ridge / 2 ||W||_F^2``, zero or more.
        test: other sentences to test on.

    Raises:
        InputError: if the data or `test` have no labels, there is a single sentence and no `test`, `test` has another
            number of tokens or dtype than the data, or `ridge` is negative.
    """
    require_kind(data, "data", Data, "a tiedattn_jax.Data")
    labels = data.known_labels("for the linear baseline")
    test_labels = None
    if test is not None:
        require_kind(test, "test", Data, "a tiedattn_jax.Data")
        test_labels = test.known_labels("for the linear baseline", "test")
        is_compatible = test.shape[0] == data.shape[0] and test.x.dtype == data.x.dtype
        require(
            is_compatible,
            "test",
            f"{test.shape[0]} of {test.x.dtype}",
            f"{data.shape[0]} tokens of {data.x.dtype} as data",
        )
    require_not_negative(ridge, "ridge")
    if test is None and data.shape[1] < 2:
        raise InputError("data", "must have two sentences or more for cross-validation, got n=1: or give test=...")
    return _fit_linear(labels, jnp.asarray(ridge, data.x.dtype), test_labels)


@eqx.filter_jit
@precise
def _fit_linear(labels: Labels, ridge: Float[Array, ""], test: Labels | None) -> Quantity:
    """Solve the normal equations ``W (sum gram + ridge) = sum cross`` of `linear_baseline`, and test the solution."""
    n = labels.energy.shape[0]

    def fit(weight: Float[Array, " n"]) -> Float[Array, "L L"]:
        """Return W fitted with weights of the sentences: one, or zero for those that are left out."""
        gram = labels.gram @ weight + ridge * jnp.eye(labels.gram.shape[0], dtype=weight.dtype)
        return jnp.linalg.solve(gram, (labels.cross @ weight).T).T

    def errors(W: Float[Array, "L L"], sample: Labels) -> Float[Array, " n"]:
        """Return ``||y - W (x + p)||_F^2 / (2 d)`` of every sentence."""
        square = jnp.einsum("ak,kln,al->n", W, sample.gram, W)
        return 0.5 * sample.energy - jnp.einsum("kl,kln->n", W, sample.cross) + 0.5 * square

    W = fit(jnp.ones(n, ridge.dtype))
    if test is not None:
        losses = errors(W, test)
    else:
        # A sentence is tested with the W that was fitted without its fold.
        folds = min(8, n)
        fold = jnp.arange(n) % folds
        fold_errors = lax.map(lambda k: errors(fit((fold != k).astype(ridge.dtype)), labels), jnp.arange(folds))
        losses = fold_errors[fold, jnp.arange(n)]
    error = _average(jnp.sum(losses), jnp.sum(losses**2), losses.size)
    value, bar = map(jnp.asarray, (error.value, error.stderr))
    status = jnp.where(jnp.isfinite(value), Status.converged, Status.singular)
    further = {"train_error": jnp.mean(errors(W, labels)), "W": W}
    name, meaning = "gen_error", "test error of the best linear attention"
    return Quantity(value, bar, status, further=further, name=name, meaning=meaning)


def heldout_error(
    model: Model,
    data: Sample,
    Q: Real[AnyArray, "d r"],
    key: PRNGKeyArray | None = None,
    *,
    sentences: int = 50_000,
    exact: bool = False,
    W: Real[AnyArray, "d d"] | None = None,
) -> Average:
    """Estimate the test error eps_g of Q, with its error bar, from sentences that Q has not seen.

    With a key, fresh sentences of the law of the data are drawn in blocks of a few hundred, and only sums over them are
    kept in memory. Without a key, the sentences are those of the data; no teacher is needed.

    Args:
        model: attention layer; it gives the loss, the noise of the labels, and the law of the classes of tokens.
        data: gives the teacher, and the encodings, variances and class means of the law of the fresh sentences.
            Without a key it gives the sentences themselves, which training must not have used.
        Q: estimate.
        key: random key of the fresh sentences, or None for the sentences of the data.
        sentences: number of fresh sentences; above 256 it is rounded up to a multiple of 256.
        exact: whether to average the squared error ``||y - f||_F^2 / (2 d)`` of fully drawn sentences instead of the
            model's `loss`. The `loss` needs the local fields only, which are drawn from their exact Gaussian law.
        W: value matrix, from ``train(..., value=...)``; it implies ``exact=True``.

    Raises:
        InputError: if `Q` or `W` has the wrong shape, `sentences` is below two, or the model lacks `target` or
            `student` where the error is exact. With a key: if the teacher is not known. Without one: if there is a
            single sentence, the sentences are drawn on demand or lack what the error needs (fields or labels), or `W`
            is given.
    """
    Q = check_estimate("Q", model, data, Q)
    if key is None:
        if W is not None:
            raise InputError("key", "must be given beside W, got key=None: the data hold no products of labels with W")
        stored = data.stored("for the error on their sentences, without a key")
        require(stored.count >= 2, "data", "n=1", "two sentences or more for an error bar")
        return _given_error(model, stored, Q, as_flag(exact, "exact"))
    teacher = data.known_teacher("to label fresh sentences")
    key = require_key(key)
    require_count(sentences, "sentences", 2)
    require(sentences < 2**31, "sentences", sentences, "below 2^31")
    matrix = None if W is None else shaped_array("W", W, "d d", {"d": len(Q)}, Q.dtype)
    exact = as_flag(exact, "exact") or W is not None
    if exact:
        check_provides(model, "target", "for exact=True")
    block = min(int(sentences), _TEST_BLOCK)
    return _heldout(model, teacher, data.population, Q, matrix, key, block, -(-int(sentences) // block), exact)


@eqx.filter_jit
@precise
def _given_error(model: Model, data: Data, Q: Float[Array, "d r"], exact: bool) -> Average:
    """Return the mean loss of Q on the sentences of the data, without the penalties of the weights."""
    losses = sentence_losses(model, data, student_fields(data.x, Q), exact)
    return _average(jnp.sum(losses), jnp.sum(losses**2), losses.size)


@eqx.filter_jit
@precise
def _heldout(
    model: Model,
    teacher: Float[Array, "d t"],
    population: Population,
    Q: Float[Array, "d r"],
    W: Float[Array, "d d"] | None,
    key: PRNGKeyArray,
    block: int,
    count: int,
    exact: bool,
) -> Average:
    """Return the test error of `heldout_error` over `count` blocks of `block` sentences.

    Local fields ``(x_l + p_l)^T Q / sqrt(d)`` and ``x_l^T Q* / sqrt(d)`` are Gaussian for given classes of the tokens.
    """
    (L, d), r = population.encodings.shape, Q.shape[1]
    pair = jnp.concatenate([Q, teacher], 1)  # (d, r + t)
    if exact:
        # `sample_data` splits its key in two. Given the same key, these sentences would be those of the data.
        key = jax.random.fold_in(key, 2)
    # A root of the covariance of both fields: (L, r + t, r + t), or for every class (S, r + t, r + t). It is not a
    # Cholesky root, because the covariance is singular where Q and Q* are parallel.
    values, vectors = jnp.linalg.eigh(covariances(population.gamma, pair, pair))
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None]
    # Mean of the fields from the encodings, (L, r + t, 1): only the student sees them.
    m = jnp.pad(population.encodings @ Q / d**0.5, ((0, 0), (0, teacher.shape[1])))[..., None]

    def losses(key: PRNGKeyArray) -> Float[Array, " block"]:
        """Return the losses of fresh sentences."""
        if exact:
            data = draw_sentences(model, teacher, population, block, key)
            if W is not None:
                data = with_value(data, data.raw_labels(model), W)
            return sentence_losses(model, data, student_fields(data.x, Q), exact=True)
        normal = jax.random.normal(key, (L, pair.shape[1], block), Q.dtype)
        classes = draw_classes(model, block, key)
        if classes is None or population.means is None:
            fields = m + jnp.einsum("lab,lbn->lan", root, normal)
        else:
            class_means = (population.means @ pair / d**0.5)[classes]  # (n, L, a)
            fields = m + jnp.einsum("nlab,lbn->lan", root[classes], normal) + jnp.transpose(class_means, (1, 2, 0))
        Z, Y = fields[:, :r], jnp.concatenate([fields[:, r:], noise_fields(model, block, key)], 1)
        return map_kinds(model, classes, lambda model: loss_at_nodes(model, Z, Y))

    def sums(k: Int[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the sum of the losses of block k, and that of their squares."""
        loss = losses(jax.random.fold_in(key, k))
        return jnp.sum(loss), jnp.sum(loss**2)

    total, square = map(jnp.sum, lax.map(sums, jnp.arange(count)))
    return _average(total, square, count * block)


def _average(total: Float[Array, ""], square: Float[Array, ""], n: int) -> Average:
    """Return the mean of n independent numbers and its error bar, from their sum and the sum of their squares."""
    mean = total / n
    return Average(mean, float(student_factor(n)) * jnp.sqrt(jnp.maximum(square / n - mean**2, 0.0) / (n - 1)))
