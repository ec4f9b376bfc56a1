"""Sentences of finite dimension, sampled from a model or given by the caller.

# notation: d dimension, n = alpha d sentences, L tokens, r and t ranks of student and teacher, Q (d, r) an estimate,
# Q* (d, t) the teacher, p_l the positional encodings. Coordinates are the common eigenvectors of the covariances.

A sentence enters the learning problem through two things only: the rows ``(x_l + p_l) / sqrt(d)``, whose products with
Q are the student's local fields, and the teacher's local fields. `Data` holds these two. The squared error on the
*exact* labels needs in addition a few inner products of vectors of each sentence, `Labels`. No function in this module
therefore builds a prediction of the size of the inputs.
"""

from __future__ import annotations

import abc
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, Real

from ..base.arrays import AnyArray, precise
from ..base.errors import InputError, are_real, is_concrete, require, require_kind, shaped_array
from ..base.report import Description, Printed
from ..model.checks import check_provides
from ..model.model import Model
from ..model.overlaps import Overlaps
from ..theory.observables import target_at_nodes
from .products import back_project, covariances, student_fields, token_gram


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


S = TypeVar("S", bound="Sample")


class Sample(Printed):
    """A sample of sentences, by all but their inputs: `Data` stores these, and `DataOnDemand` draws their products.

    Message passing and training see the inputs X_l through two products only, `student_fields` and `back_project`.
    The memory holds what sentences that are drawn on demand have revealed. It goes through all products in turn, and is
    None for stored sentences.

    Attributes: as in `Data`.
    """

    y: Float[Array, "n L t"] | None
    teacher: Float[Array, "d t"] | None
    encodings: Float[Array, "L d"]
    gamma: Float[Array, "S #d"]
    noise: Float[Array, "n L noise"] | None
    means: Float[Array, "S d"] | None
    classes: Int[Array, "n L"] | None

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """Number of sentences."""

    @abc.abstractmethod
    def stored(self, reason: str) -> Data:
        """Return the data if their inputs are stored.

        Args:
            reason: purpose for which the inputs are needed; the error message names it.

        Raises:
            InputError: if the sentences are drawn on demand.
        """

    @abc.abstractmethod
    def memory(self, products: int, steps: int) -> PyTree:
        """Return the memory before the first product.

        Args:
            products: number of vectors that can be multiplied on each side.
            steps: number of steps that this takes, for the error message.

        Raises:
            InputError: if the memory is too small.
        """

    @abc.abstractmethod
    def student_fields(self, Q: Float[Array, "d r"], memory: PyTree) -> tuple[Float[Array, "L r n"], PyTree]:
        """Return the local fields of the student, ``X_l Q``, and the memory after them."""

    @abc.abstractmethod
    def back_project(self, g: Float[Array, "L r n"], memory: PyTree) -> tuple[Float[Array, "d r"], PyTree]:
        """Return ``sum_l X_l^T g_l``, and the memory after it."""

    @abc.abstractmethod
    def spread_over(self: S, spread: Spread) -> S:
        """Return the sample with its sentences spread over devices."""

    def shard(self: S) -> S:
        """Spread the sentences, the rows of X, over the devices that jax sees.

        The number of devices used is the largest that divides the number of sentences. With one device nothing changes.
        Functions that take the returned data run on these devices, each on its own rows, and sum over the devices.
        """
        count = max(k for k in range(1, len(jax.devices()) + 1) if self.count % k == 0)
        return self if count == 1 else self.spread_over(Spread(count))

    @abc.abstractmethod
    def mean_squares(self) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
        """Return the means of ``|x|^2 / d`` and of the entries of ``Q*^T x / sqrt(d)``; None without a teacher."""

    @property
    def contents(self) -> str:
        """The parts that are known, in words."""
        known = " and ".join(k for k in ("teacher", "labels") if getattr(self, k, None) is not None)
        return f"with {known}{' only' if self.y is None else ''}" if known else ""

    def describe(self) -> Description:
        L, n, d, _ = self.shape
        shape = f"{n} sentences of {L} tokens in {d} dimensions, alpha = {n / d:g}, {self.dtype}"
        return Description(", ".join(filter(None, (shape, self.contents))))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (L, n, d, t); t is one if neither teacher nor fields are known."""
        (L, d), t = self.encodings.shape, 1 if self.y is None else self.y.shape[2]
        return L, self.count, d, t

    @property
    def dtype(self) -> np.dtype:
        """The type of all numbers."""
        return self.encodings.dtype

    @property
    def alpha(self) -> float:
        """Samples per dimension, n / d."""
        _, n, d, _ = self.shape
        return n / d

    def known_teacher(self, reason: str, otherwise: str = "") -> Float[Array, "d t"]:
        """Return the teacher.

        Args:
            reason: purpose for which the teacher is needed; the error message names it.
            otherwise: what helps if there is no teacher, for the end of the error message.

        Raises:
            InputError: if the teacher is not known.
        """
        if self.teacher is None:
            remedy = f"give Data(..., teacher=...) or Data.from_sentences(..., teacher=...){otherwise}"
            raise InputError("teacher", f"must be known {reason}, got teacher=None: {remedy}")
        return self.teacher

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
        """Local fields of the teacher, followed by those of the noise, in the layout of `ProxProblem.y`.

        Raises:
            InputError: if only exact labels are known.
        """
        if self.y is None:
            text = "must have a teacher or its fields for everything but training on exact labels, exact=True"
            raise InputError("data", f"{text}, got labels only: see Data.from_sentences(teacher=..., fields=...)")
        y = self.y if self.noise is None else jnp.concatenate([self.y, self.noise], 2)
        return jnp.stack([y[:, l].T for l in range(y.shape[1])])

    @eqx.filter_jit
    @precise
    def raw_labels(self, model: Model) -> Float[Array, "n L d"]:
        """Return the exact labels ``T(Y) x`` of the sentences.

        Raises:
            InputError: if the model has no `target`, or the sentences are drawn on demand.
        """
        check_provides(model, "target", "for exact labels")
        target = target_at_nodes(model, self.fields)
        return jnp.einsum("kln,nli->nki", target, self.stored("for exact labels").inputs())

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
    def variance(self) -> Float[Array, ""]:
        """Mean variance of the entries of a token, over the tokens of all sentences."""
        return jnp.mean(self.gamma if self.classes is None else jnp.mean(self.gamma, 1)[self.classes])

    @property
    def population(self) -> Population:
        """Encodings, variances and means of the law of the sentences."""
        return Population(self.encodings, self.gamma, self.means)


class Data(Sample):
    """n sentences of L tokens in d dimensions.

    Attributes:
        x: standardised inputs of the student, ``(x_l + p_l) / sqrt(d)``.
        y: local fields of the teacher, ``Q*^T x_l / sqrt(d)``, or None if only exact labels are known.
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
        InputError: if shapes do not fit, entries are not finite, variances are not positive, classes are not integers
            from 0 to S - 1, or there are neither fields nor labels.
    """

    x: Float[Array, "L n d"]
    labels: Labels | None

    def __init__(
        self,
        x: Real[AnyArray, "L n d"],
        y: Real[AnyArray, "n L t"] | None,
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
        if L != n and y is not None and np.shape(y)[:2] == (L, n):
            text = "must have shape (L, n, d), tokens first, beside y of shape (n, L, t)"
            raise InputError("x", f"{text}, got sentences first, shape {x.shape}: use Data.from_sentences for such")
        if y is None and labels is None:
            raise InputError("y", "must be given, (n, L, t), where there are no labels, got y=None")
        if y is None and teacher is not None:
            raise InputError("y", "must be given beside a teacher, got y=None: see Data.from_sentences")
        self.y = None if y is None else fit("y", y, "n L t")
        self.teacher = None if teacher is None else fit("teacher", teacher, "d t")
        self.encodings = jnp.zeros((L, d), x.dtype) if encodings is None else fit("encodings", encodings, "L d")
        self.means, self.classes, axis, kind = None, None, "L", "position"
        if means is not None or classes is not None:
            self.means, self.classes = fit("means", means, "S d"), _classes(classes, n, L, sizes["S"])
            axis, kind = "S", "class"
        estimable = f"given, ({axis}, 1), where a {kind} has no tokens to estimate it from, or zeros only"
        requirement = estimable if gamma is None else "positive"
        gamma = self.variances() if gamma is None else gamma
        self.gamma = fit("gamma", gamma, f"{axis} 1" if jnp.shape(gamma) == (sizes[axis], 1) else f"{axis} d")
        if is_concrete(self.gamma):
            require(np.asarray(self.gamma) > 0, "gamma", self.gamma[:, :4], requirement)
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

        Exact labels alone are enough for `linear_baseline`, and for `train` with ``exact=True`` or with ``value=...``.
        Functions that need the teacher's fields then raise an error, and overlaps with the teacher are NaN.

        Args:
            inputs: sentences x without their positional encodings. They contain the means of their classes.
            labels: exact labels, if there are any.
            teacher: Q*, if it is known.
            fields: local fields of the teacher; by default ``x Q* / sqrt(d)``.
            encodings, gamma, noise, means, classes: as in `Data`.

        Raises:
            InputError: if shapes do not fit, entries are not finite, or labels, teacher and fields are all missing.
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
        elif labels is None:
            raise InputError("labels", "must be given, (n, L, d), or teacher, (d, t), or fields, (n, L, t), got none")
        if labels is not None and np.shape(labels) == (*inputs.shape[:2], L) and L != d:
            requirement = f"must be exact labels, such as T @ inputs, of shape (n, L, d) = {inputs.shape}"
            raise InputError("labels", f"{requirement}, got (n, L, L), the shape of attention matrices T")
        x = jnp.swapaxes(inputs + encodings, 0, 1) / d**0.5
        products = None if labels is None else Labels.of(fit("labels", labels, "n L d"), x)
        return cls(x, fields, teacher, encodings, gamma, products, noise, means, classes)

    @property
    def count(self) -> int:
        return self.x.shape[1]

    def stored(self, reason: str) -> Data:
        return self

    def memory(self, products: int, steps: int) -> None:
        return None

    def student_fields(self, Q: Float[Array, "d r"], memory: None) -> tuple[Float[Array, "L r n"], None]:
        return student_fields(self.x, Q), memory

    def back_project(self, g: Float[Array, "L r n"], memory: None) -> tuple[Float[Array, "d r"], None]:
        return back_project(self.x, g), memory

    def spread_over(self, spread: Spread) -> Data:
        noise = None if self.noise is None else spread(self.noise, 0)
        labels = jax.tree.map(lambda a: spread(a, a.ndim - 1), self.labels)
        sharded = spread(self.x, 1), None if self.y is None else spread(self.y, 0), noise, labels
        return eqx.tree_at(lambda s: (s.x, s.y, s.noise, s.labels), self, sharded, is_leaf=lambda leaf: leaf is None)

    def mean_squares(self) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
        (L, n, d, _), x = self.shape, self.x
        p = self.encodings / d**0.5
        square = (jnp.vdot(x, x) - 2 * jnp.vdot(jnp.sum(x, 1), p) + n * jnp.vdot(p, p)) / (L * n)
        return square, None if self.teacher is None else jnp.mean(self.token_fields(self.teacher) ** 2)

    def token_fields(self, Q: Float[Array, "d r"]) -> Float[Array, "L r n"]:
        """Return the fields ``x_l Q / sqrt(d)`` of the tokens without their encodings."""
        return student_fields(self.x, Q) - (self.encodings / self.x.shape[2] ** 0.5 @ Q)[..., None]

    def token_projection(self, g: Float[Array, "L r n"]) -> Float[Array, "d r"]:
        """Apply the transpose of `token_fields`."""
        encodings = self.encodings / self.x.shape[2] ** 0.5
        return back_project(self.x, g) - jnp.einsum("li,la->ia", encodings, jnp.sum(g, -1))

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

    def inputs(self) -> Float[Array, "n L d"]:
        """Return the raw sentences x without their positional encodings."""
        return jnp.swapaxes(self.x, 0, 1) * self.x.shape[2] ** 0.5 - self.encodings

    def variances(self) -> Float[Array, "S 1"]:
        """Estimate the variance of a coordinate of every token, or of every class of tokens."""
        token = self.x * self.x.shape[2] ** 0.5 - self.encodings[:, None]
        if self.means is None or self.classes is None:
            return jnp.mean(token**2, (1, 2))[:, None]
        classes = self.classes.T  # (L, n)
        square = jnp.mean((token - self.means[classes]) ** 2, 2)
        in_class = classes == jnp.arange(len(self.means))[:, None, None]
        return jnp.sum(in_class * square, (1, 2))[:, None] / jnp.maximum(jnp.sum(in_class, (1, 2)), 1)[:, None]


class Population(eqx.Module):
    """Encodings, variances and means, as in `Data`: with a teacher they determine the law of fresh sentences."""

    encodings: Float[Array, "L d"]
    gamma: Float[Array, "S #d"]
    means: Float[Array, "S d"] | None


def _classes(classes: Any, n: int, L: int, S: int) -> Int[Array, "n L"]:
    requirement = f"integers from 0 to {S - 1}, the class of every token, of shape (n, L) = {(n, L)}"
    valid = are_real(classes) and np.shape(classes) == (n, L) and jnp.issubdtype(jnp.result_type(classes), jnp.integer)
    require(valid, "classes", f"shape {np.shape(classes)}", requirement)
    if is_concrete(classes):
        require((np.asarray(classes) >= 0) & (np.asarray(classes) < S), "classes", np.asarray(classes)[:4], requirement)
    return jnp.asarray(classes)


class Spread(NamedTuple):
    """Spreads arrays over the first devices that jax sees, along their axis of sentences."""

    devices: int  # number of devices

    def __call__(self, a: Float[Array, "*shape"], axis: int) -> Float[Array, "*shape"]:
        devices = jax.devices()[: self.devices]
        mesh = jax.make_mesh((self.devices,), ("sentences",), devices=devices, axis_types=(AxisType.Auto,))
        return lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec(*(None,) * axis, "sentences")))
