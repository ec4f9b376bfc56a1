"""Sentences of finite dimension, sampled from a model or given by the caller, and estimates of the teacher on them.

# notation: d dimension, n = alpha d sentences, L tokens, r and t ranks of student and teacher, Q (d, r) an estimate,
# Q* (d, t) the teacher, p_l the positional encodings. Coordinates are the common eigenvectors of the covariances.

A sentence enters the learning problem through two things only: the rows ``(x_l + p_l) / sqrt(d)``, whose products with
Q are the student's local fields, and the teacher's local fields. `Data` holds these two. The squared error on the
*exact* labels needs in addition a few inner products of vectors of each sentence, `Labels`. No function in this module
therefore builds a prediction of the size of the inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Real

from ..base.errors import (
    InputError,
    is_concrete,
    require,
    require_kind,
    shaped_array,
    with_values,
)
from ..base.linalg import inner_products, precise, total
from ..base.printing import Description, Printed, by_token, rows_of
from ..base.results import Result, Status
from ..base.types import AnyArray
from ..model.model import Model, over_kinds
from ..model.overlaps import Overlaps

_WARN_RATIO = 1.5  # warn when the variance of the inputs and that of the model differ by more than this factor
_LARGE_SAMPLE = 1000  # with more numbers than this, chance does not change their variance noticeably


class Labels(eqx.Module):
    """Inner products by which the squared error of an attention layer depends on exact labels ``y``.

    With ``x~ = x + p`` the inputs of the student, ``||y - S x~||_F^2 / d = energy - 2 tr(S^T cross) + tr(S gram S^T)``.

    Attributes:
        energy: ``||y||_F^2 / d``.
        cross: ``y_k . x~_l / d``.
        gram: ``x~_k . x~_l / d``.
    """

    energy: Float[Array, " n"]
    cross: Float[Array, "L L n"]
    gram: Float[Array, "L L n"]

    @classmethod
    @precise
    def of(cls, labels: Float[Array, "n L d"], x: Float[Array, "L n d"]) -> Labels:
        """Compute the inner products from labels and the rows ``x~_l / sqrt(d)`` of the inputs."""
        d = x.shape[2]
        cross = jnp.einsum("nki,lni->kln", labels, x) / d**0.5
        return cls(energy=jnp.sum(labels**2, (1, 2)) / d, cross=cross, gram=token_gram(x))


class Data(Printed):
    """n sentences of L tokens in d dimensions.

    Attributes:
        x: standardised inputs of the student, ``(x_l + p_l) / sqrt(d)``.
        y: local fields of the teacher, ``Q*^T x_l / sqrt(d)``.
        teacher: Q*, or None if it is not known; the overlap theta is then NaN.
        encodings: the positional encodings p_l, of norm O(1): their entries are O(1 / sqrt(d)). Zero by default.
        gamma: variances of the coordinates of a token, the eigenvalues of Sigma_l: (L, d), or (L, 1) if Sigma_l is a
            multiple of the identity. If the tokens have classes, the variances of the classes: (S, d) or (S, 1). By
            default (L, 1) or (S, 1), estimated from `x`.
        labels: inner products of the exact labels, or None if there are no exact labels.
        noise: fields of noise, for a model with noisy labels; None otherwise.
        means: mean mu_s of every class of tokens, of norm O(1), or None; `x` contains the means.
        classes: class of every token, integers below S; given together with `means`.

    Raises:
        InputError: if shapes do not fit, entries are not finite, variances are not positive, or classes are not
            integers from 0 to S - 1.
    """

    x: Float[Array, "L n d"]
    y: Float[Array, "n L t"]
    teacher: Float[Array, "d t"] | None
    encodings: Float[Array, "L d"]
    gamma: Float[Array, "S #d"]
    labels: Labels | None
    noise: Float[Array, "n L noise"] | None
    means: Float[Array, "S d"] | None
    classes: Int[Array, "n L"] | None

    def __init__(
        self,
        x: Real[AnyArray, "L n d"],
        y: Real[AnyArray, "n L t"],
        teacher: Real[AnyArray, "d t"] | None = None,
        encodings: Real[AnyArray, "L d"] | None = None,
        gamma: Real[AnyArray, "S #d"] | None = None,
        labels: Labels | None = None,
        noise: Real[AnyArray, "n L noise"] | None = None,
        means: Real[AnyArray, "S d"] | None = None,
        classes: Int[AnyArray, "n L"] | None = None,
    ):
        sizes: dict[str, int] = {}
        self.x = x = shaped_array("x", x, "L n d", sizes)
        L, n, d = x.shape
        requirement = "an (L, n, d) array of n >= 1 sentences in d >= 2 dimensions"
        require(n >= 1 and d >= 2, "x", f"shape {x.shape}", requirement)
        fit = partial(shaped_array, sizes=sizes, dtype=x.dtype)
        if L != n and np.shape(y)[:2] == (L, n):
            requirement = "must have shape (L, n, d), tokens first, beside y of shape (n, L, t)"
            raise InputError(
                "x", f"{requirement}, got sentences first, shape {x.shape}: use Data.from_sentences for such"
            )
        self.y = fit("y", y, "n L t")
        self.teacher = None if teacher is None else fit("teacher", teacher, "d t")
        self.encodings = jnp.zeros((L, d), x.dtype) if encodings is None else fit("encodings", encodings, "L d")
        self.means, self.classes = None, None
        if means is not None or classes is not None:
            self.means, self.classes = fit("means", means, "S d"), _classes(classes, n, L, sizes["S"])
        axis = "L" if self.means is None else "S"
        if gamma is None:
            gamma = self._variances()
        self.gamma = fit("gamma", gamma, f"{axis} 1" if jnp.shape(gamma) == (sizes[axis], 1) else f"{axis} d")
        if is_concrete(self.gamma):
            require(np.asarray(self.gamma) > 0, "gamma", self.gamma[:, :4], "positive")
        if labels is not None:
            require_kind(labels, "labels", Labels, "Labels: see Data.from_sentences(inputs, labels, ...)")
            energy, cross = fit("labels.energy", labels.energy, "n"), fit("labels.cross", labels.cross, "L L n")
            labels = Labels(energy, cross, fit("labels.gram", labels.gram, "L L n"))
        self.labels = labels
        self.noise = None if noise is None else fit("noise", noise, "n L k")

    @classmethod
    @precise
    def from_sentences(
        cls,
        inputs: Real[AnyArray, "n L d"],
        labels: Real[AnyArray, "n L d"] | None = None,
        *,
        teacher: Real[AnyArray, "d t"] | None = None,
        fields: Real[AnyArray, "n L t"] | None = None,
        encodings: Real[AnyArray, "L d"] | None = None,
        gamma: Real[AnyArray, "S #d"] | None = None,
        noise: Real[AnyArray, "n L noise"] | None = None,
        means: Real[AnyArray, "S d"] | None = None,
        classes: Int[AnyArray, "n L"] | None = None,
    ) -> Data:
        """Make data from raw sentences, in the notation of the paper.

        Args:
            inputs: sentences x without their positional encodings. They contain the means of their classes.
            labels: exact labels, if there are any.
            teacher: Q*.
            fields: local fields of the teacher; by default ``x Q* / sqrt(d)``.
            encodings, gamma, noise, means, classes: as in `Data`.

        Raises:
            InputError: if shapes do not fit, entries are not finite, or both `teacher` and `fields` are missing.
        """
        sizes: dict[str, int] = {}
        inputs = shaped_array("inputs", inputs, "n L d", sizes)
        _, L, d = inputs.shape
        fit = partial(shaped_array, sizes=sizes, dtype=inputs.dtype)
        encodings = jnp.zeros((L, d), inputs.dtype) if encodings is None else fit("encodings", encodings, "L d")
        if fields is not None:
            fields = fit("fields", fields, "n L t")
        elif teacher is not None:
            teacher = fit("teacher", teacher, "d t")
            fields = inputs @ teacher / d**0.5
        else:
            requirement = "must be given, (n, L, t), where there is no teacher, (d, t), to compute them from"
            raise InputError("fields", requirement)
        x = jnp.swapaxes(inputs + encodings, 0, 1) / d**0.5
        products = None if labels is None else Labels.of(fit("labels", labels, "n L d"), x)
        return cls(x, fields, teacher, encodings, gamma, products, noise, means, classes)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (L, n, d, t)."""
        L, n, d = self.x.shape
        return L, n, d, self.y.shape[-1]

    @property
    def alpha(self) -> float:
        """Samples per dimension, n / d."""
        return self.x.shape[1] / self.x.shape[2]

    def known_teacher(self, reason: str) -> Float[Array, "d t"]:
        """Return the teacher.

        Args:
            reason: purpose for which the teacher is needed; the error message names it.

        Raises:
            InputError: if the teacher is not known.
        """
        if self.teacher is None:
            raise InputError("teacher", f"must be known {reason}, got teacher=None: give Data(..., teacher=...)")
        return self.teacher

    def known_labels(self, why: str, argument: str = "data") -> Labels:
        """Return the inner products of the exact labels.

        Args:
            why: reason why the labels are needed, for the error message.
            argument: name under which the caller received these data, for the error message.

        Raises:
            InputError: if there are no exact labels.
        """
        if self.labels is None:
            raise InputError(argument, f"must have labels {why}: see Data.from_sentences(inputs, labels, ...)")
        return self.labels

    @property
    def rho(self) -> Float[Array, "S t t"]:
        """Realised covariance of the teacher's fields, ``Q*^T Sigma_l Q* / d``, of every token or class of tokens.

        Raises:
            InputError: if the teacher is not known.
        """
        teacher = self.known_teacher("for its overlaps")
        return covariances(self.gamma, teacher, teacher)

    @property
    @precise
    def teacher_gram(self) -> Float[Array, "t t"]:
        """Gram matrix of the teacher, ``Q*^T Q* / d``.

        Raises:
            InputError: if the teacher is not known.
        """
        teacher = self.known_teacher("for its norm")
        return teacher.T @ teacher / len(teacher)

    @property
    def fields(self) -> Float[Array, "L t n"]:
        """Local fields of the teacher, followed by those of the noise, in the layout of `prox`."""
        y = self.y if self.noise is None else jnp.concatenate([self.y, self.noise], 2)
        return jnp.stack([y[:, l].T for l in range(y.shape[1])])

    def inputs(self) -> Float[Array, "n L d"]:
        """Return the raw sentences x without their positional encodings."""
        return jnp.swapaxes(self.x, 0, 1) * self.x.shape[2] ** 0.5 - self.encodings

    def overlaps(self, Q: Float[AnyArray, "d r"], V: Float[Array, "S r r"] | None = None) -> Overlaps:
        """Return the order parameters of an estimate Q, eq. (6).

        Args:
            V: response, if the algorithm provides one; otherwise the V of the result is NaN.
        """
        (_, _, d, t), q = self.shape, covariances(self.gamma, Q, Q)
        unknown = jnp.full((*q.shape[:2], t), jnp.nan, Q.dtype)
        vectors = self.encodings if self.means is None else jnp.concatenate([self.encodings, self.means])
        return Overlaps(
            q=q,
            V=jnp.full_like(q, jnp.nan) if V is None else V,
            theta=unknown if self.teacher is None else covariances(self.gamma, Q, self.teacher),
            m=student_fields(vectors[:, None], Q)[:, :, 0] / d**0.5,
        )

    @property
    def population(self) -> Population:
        """Encodings, variances and means of the law of the sentences."""
        return Population(self.encodings, self.gamma, self.means)

    def _variances(self) -> Float[Array, "S 1"]:
        """Estimate the variance of a coordinate of every token, or of every class of tokens."""
        token = self.x * self.x.shape[2] ** 0.5 - self.encodings[:, None]
        if self.means is None or self.classes is None:
            return jnp.mean(token**2, (1, 2))[:, None]
        classes = self.classes.T  # (L, n)
        square = jnp.mean((token - self.means[classes]) ** 2, 2)
        in_class = classes == jnp.arange(len(self.means))[:, None, None]
        return jnp.sum(in_class * square, (1, 2))[:, None] / jnp.maximum(jnp.sum(in_class, (1, 2)), 1)[:, None]

    def describe(self) -> Description:
        L, n, d = self.x.shape
        contents = " and ".join(k for k in ("teacher", "labels") if getattr(self, k) is not None)
        shape = f"{n} sentences of {L} tokens in {d} dimensions, alpha = {n / d:g}, {self.x.dtype}"
        return Description(f"{shape}, with {contents}" if contents else shape)


class Population(eqx.Module):
    """Encodings, variances and means, as in `Data`: with a teacher they determine the law of fresh sentences."""

    encodings: Float[Array, "L d"]
    gamma: Float[Array, "S #d"]
    means: Float[Array, "S d"] | None


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


def _classes(classes: Any, n: int, L: int, S: int) -> Int[Array, "n L"]:
    requirement = f"integers from 0 to {S - 1}, the class of every token, of shape (n, L) = {(n, L)}"
    valid = np.shape(classes) == (n, L) and jnp.issubdtype(jnp.result_type(classes), jnp.integer)
    require(valid, "classes", f"shape {np.shape(classes)}", requirement)
    if is_concrete(classes):
        require((np.asarray(classes) >= 0) & (np.asarray(classes) < S), "classes", np.asarray(classes)[:4], requirement)
    return jnp.asarray(classes)


class Estimate(Result):
    """Weights at the end of a run on data, with the fields that message passing and training have in common."""

    batch_probe = "train_loss", 0
    Q: Float[Array, "d r"]
    overlaps: Overlaps
    train_loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    iterations: Int[Array, ""]
    status: Int[Array, ""]

    @property
    def ok(self) -> Bool[Any, "*batch"]:
        """Whether the run converged: to a fixed point of message passing, or a critical point of the risk."""
        return self.status == Status.converged

    def _numbers(self) -> dict[str, Float[AnyArray, "..."]]:
        """Return the known numbers by name. Weights of training have no V; without a teacher there is no theta."""
        numbers = {**vars(self.overlaps), "train_loss": self.train_loss, "gradient_norm": self.gradient_norm}
        return {name: a for name, a in numbers.items() if not np.all(np.isnan(a))}

    def to_dict(self) -> dict[str, Any]:
        """Return overlaps, loss, gradient, iterations and status, as JSON if all numbers are finite.

        Arrays are written as in `FixedPoint.to_dict`.
        """
        numbers = {name: (by_token(a)[0] if a.ndim else a).tolist() for name, a in self._numbers().items()}
        return {**numbers, "iterations": int(self.iterations), "status": self.status_name}

    def describe(self) -> Description:
        d, r = self.Q.shape
        title = f"Q of shape ({d}, {r}) after {self.iterations} iterations"
        return Description(title, self.status_name, rows_of(self._numbers()))


@jax.jit
def covariances(gamma: Float[Array, "S #d"], a: Float[Array, "d i"], b: Float[Array, "d j"]) -> Float[Array, "S i j"]:
    """Return ``a^T Sigma_l b / d`` for every token or class, whose variances are `gamma`."""
    return inner_products(gamma[:, None] * a.T, jnp.broadcast_to(b.T, (len(gamma), *b.T.shape))) / len(a)


@jax.jit
@precise
def student_fields(x: Float[Array, "L n d"], Q: Float[Array, "d r"]) -> Float[Array, "L r n"]:
    """Return the local fields of the student, ``x_l Q``, in one pass over `x`.

    The product is computed column by column. A product of a matrix and a vector runs at the speed of memory, a batched
    product of thin matrices at a fraction of it. On GPUs XLA has no fast product of a matrix and a vector: it may pad
    the vector to a matrix of 16 columns. There the product is written as sums, token by token, which XLA computes in
    one kernel. The sums are not written with a token axis, because XLA gives such arrays another order of axes in
    memory and would then copy x.
    """
    return _fields(x, Q)


@jax.custom_jvp
def _fields(x: Float[Array, "L n d"], Q: Float[Array, "d r"]) -> Float[Array, "L r n"]:
    """Return `student_fields` with its own derivative rule; the default rule would keep copies of x for a gradient."""
    return _fields_by_platform(x, Q)


@partial(_fields.defjvp, symbolic_zeros=True)
@precise
def _fields_jvp(primals: tuple, tangents: tuple) -> tuple[Float[Array, "L r n"], Float[Array, "L r n"]]:
    (x, Q), (dx, dQ) = primals, tangents
    value, zero = _fields(x, Q), jax.custom_derivatives.SymbolicZero
    pairs = [pair for pair, tangent in (((dx, Q), dx), ((x, dQ), dQ)) if not isinstance(tangent, zero)]
    product = jax.jit(jax.checkpoint(_fields_by_platform, prevent_cse=False))  # a gradient keeps the arguments only
    return value, total([product(*pair) for pair in pairs]) if pairs else jnp.zeros_like(value)


def _fields_by_platform(x: Float[Array, "L n d"], Q: Float[Array, "d r"]) -> Float[Array, "L r n"]:
    def products(x: Array, Q: Array) -> Float[Array, "L r n"]:
        return jnp.stack([jnp.tensordot(x, Q[:, a], 1) for a in range(Q.shape[1])], 1)

    def by_sums(x: Array, Q: Array) -> Float[Array, "L r n"]:
        return jnp.stack([jnp.stack([jnp.sum(rows * Q[:, a], 1) for a in range(Q.shape[1])]) for rows in x])

    return lax.platform_dependent(x, Q, cpu=products, default=by_sums)


@precise
def back_project(x: Float[Array, "L n d"], g: Float[Array, "L r n"]) -> Float[Array, "d r"]:
    """Apply the transpose of `student_fields`, ``sum_l x_l^T g_l``."""

    def products(x: Array, g: Array) -> Float[Array, "d r"]:
        return jnp.stack([jnp.tensordot(g[:, a], x, 2) for a in range(g.shape[1])], 1)

    def by_sums(x: Array, g: Array) -> Float[Array, "d r"]:
        tokens = range(len(x))
        return jnp.stack([total(g[l, a, :, None] * x[l] for l in tokens).sum(0) for a in range(g.shape[1])], 1)

    return lax.platform_dependent(x, g, cpu=products, default=by_sums)


@jax.jit
def token_gram(x: Float[Array, "L n d"]) -> Float[Array, "L L n"]:
    """Return the inner products ``x_k . x_l`` of the tokens of every sentence."""
    L = x.shape[0]
    upper = {(k, l): jnp.sum(x[k] * x[l], -1) for k in range(L) for l in range(k, L)}
    return jnp.stack([jnp.stack([upper[min(k, l), max(k, l)] for l in range(L)]) for k in range(L)])


def shard(data: Data) -> Data:
    """Spread the sentences of data, the rows of X, over the devices that jax sees.

    The number of devices used is the largest that divides the number of sentences. With one device nothing changes.
    Functions that take the returned `Data` run on these devices, each on its own rows, and sum over the devices.
    """
    n, devices = data.shape[1], jax.devices()
    count = max(k for k in range(1, len(devices) + 1) if n % k == 0)
    if count == 1:
        return data
    mesh = jax.make_mesh((count,), ("sentences",), devices=devices[:count], axis_types=(AxisType.Auto,))

    def put(a: Float[Array, "*shape"], axis: int) -> Float[Array, "*shape"]:
        return lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec(*(None,) * axis, "sentences")))

    noise = None if data.noise is None else put(data.noise, 0)
    labels = jax.tree.map(lambda a: put(a, a.ndim - 1), data.labels)
    sharded = put(data.x, 1), put(data.y, 0), noise, labels
    return eqx.tree_at(lambda s: (s.x, s.y, s.noise, s.labels), data, sharded, is_leaf=lambda leaf: leaf is None)


def check_estimate(name: str, model: Model, data: Data, Q: Real[AnyArray, "d r"]) -> Float[Array, "d r"]:
    """Return an estimate as an array of the data's dtype.

    Args:
        name: name of the argument, for the error message.

    Raises:
        InputError: if the estimate does not have shape (d, r) or is not finite, or the data do not fit the model.
    """
    check_fit(model, data)
    return shaped_array(name, Q, "d r", {"d": data.shape[2], "r": model.shape[1]}, data.x.dtype)


def check_fit(model: Model, data: Data) -> None:
    """Raise an `InputError` if the data differ from the model in tokens, fields, token classes, dtype or scale."""
    require_kind(model, "model", Model, "a tiedattn_jax.Model, such as dot_product()")
    require_kind(data, "data", Data, "a tiedattn_jax.Data")
    (L, _, t), dims = model.shape, (data.shape[0], data.shape[3])
    if dims != (L, t):
        requirement = f"must have L = {L} tokens and t = {t} teacher fields as the model has"
        raise InputError(
            "data", f"{requirement}, got L = {dims[0]}, t = {dims[1]}: inputs of from_sentences are (n, L, d)"
        )
    if (noise := 0 if data.noise is None else data.noise.shape[2]) != model.noise:
        raise InputError("data", f"must have {model.noise} fields of noise a token as the model has, got {noise}")
    _check_classes(model, data)
    dtype = jnp.result_type(model.lam)
    if data.x.dtype != dtype:
        requirement = f"must be {dtype} as the model is, or the model as the data are"
        raise InputError("data", f"{requirement}, got {data.x.dtype}: see dot_product(dtype=...)")
    if is_concrete(model, data):
        with with_values():
            _check_scale(model, data)


def _check_classes(model: Model, data: Data) -> None:
    sentences = model.law().sentences
    if (sentences is None) != (data.classes is None):
        requirement = "must have classes of tokens where the model's law has kinds of sentences, and only there"
        raise InputError("data", f"{requirement}, got {'none' if data.classes is None else 'classes'}")
    if sentences is not None and data.classes is not None and is_concrete(data.classes):
        kinds, allowed = np.unique(np.asarray(data.classes), axis=0).tolist(), [list(k) for k in sentences.classes]
        unknown = [k for k in kinds if k not in allowed]
        require(not unknown, "data.classes", unknown[:3], f"among the kinds of sentences of the model's law, {allowed}")


def _check_scale(model: Model, data: Data) -> None:
    """Raise an `InputError` if a factor sqrt(d) is missing or one too many, so that a variance is wrong by a factor d.

    A variance may differ from the model's by a factor of max(10, sqrt(d)), or more if it is estimated from few numbers.
    If the variance of many inputs differs by more than `_WARN_RATIO`, a warning says that theory and data have
    different settings.
    """
    L, n, d, t = data.shape
    factor = max(10, d**0.5)

    def deviates(ratio: float, count: int) -> bool:
        bound = factor ** (1 + 20 / count)
        return not 1 / bound < ratio < bound

    norm, law_norm, inputs, fields = map(float, _scales(model, data))
    if norm > factor * max(1.0, law_norm):
        requirement = f"must have encodings with |p_l|^2 of order one, as the model's law has them ({law_norm:.3g})"
        raise InputError("data", f"{requirement}, got {norm:.3g}: divide encodings of entries of order one by sqrt(d)")
    if deviates(inputs, L * n * d):
        requirement = (
            "must have inputs of the model's variance / d: x / sqrt(d) in Data, which from_sentences makes of x"
        )
        raise InputError("data", f"{requirement}, got {inputs:.3g} times that")
    if deviates(fields, min(L * n, d) * t):
        requirement = "must have fields y = Q*^T x / sqrt(d) of tokens x that are not divided yet"
        reference = "the model" if data.teacher is None else "those of its teacher"
        raise InputError("data", f"{requirement}, got {fields:.3g} times the variance of {reference}")
    if n * d > _LARGE_SAMPLE and not 1 / _WARN_RATIO < inputs < _WARN_RATIO:
        message = f"data have {inputs:.3g} times the model's variance of inputs: "
        message += "theory and simulation are then of two settings"
        warnings.warn(message, stacklevel=2)


@eqx.filter_jit
@precise
def _scales(model: Model, data: Data) -> tuple[Float[Array, ""], ...]:
    """Return the largest ``|p_l|^2`` of the data and of the law, and the variances of x and y over the expected ones.

    The last ratio is one if the expected variance of y is zero.
    """
    (L, n, d, t), law = data.shape, model.law()
    norm, law_norm = jnp.max(jnp.sum(data.encodings**2, 1)), jnp.max(jnp.einsum("k,kll->l", law.weights, law.tau))
    p = data.encodings / d**0.5
    square = jnp.vdot(data.x, data.x) - 2 * jnp.vdot(jnp.sum(data.x, 1), p) + n * jnp.vdot(p, p)
    if data.teacher is None:
        variance = jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2)) / t
    else:
        variance = jnp.mean((student_fields(data.x, data.teacher) - (p @ data.teacher)[:, :, None]) ** 2)
    fields = jnp.where(variance > 0, jnp.mean(data.y**2) / variance, 1.0)
    return norm, law_norm, square / (L * n * jnp.mean(model.trace)), fields
