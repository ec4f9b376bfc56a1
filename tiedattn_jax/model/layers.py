"""The attention layers that the library ships, each a `Model`.

A layer defines its attention as a function of the fields, `AttentionLayer.attention`. The data and the form of the
target are common to all layers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import InputError, as_array, as_number, is_concrete, require, require_count, require_kind
from ..base.linalg import precise
from .law import SpectralLaw
from .model import Model, rotations_of
from .penalties import Penalty

Layer = TypeVar("Layer", bound="AttentionLayer")


class AttentionLayer(Model):
    """A layer whose target has the same kind of attention. Subclass it, and write `attention`; `of` makes a model.

    The student is ``S(Z) = attention(Z)``, the target ``T(Y) = (1 - omega) attention(Y) + omega A``. Tokens have
    isotropic covariances ``Sigma_l = sigma^2 I``; positional encodings span a few directions orthogonal to the teacher.

    Attributes:
        omega: positional share of the target, in [0, 1].
        sigma: standard deviation of the tokens.
        lam: ridge strength.
        penalty: penalty of the weights besides the ridge, or None.
        mixing: the positional part A of the target, (L, L), rows summing to one.
        encodings: coefficients of p_l on orthonormal directions, (L, e).
        teacher: ``Q*^T Q* / d``, (t, t).
        rank: rank r of the student.
        spectrum: law of the data, if it is given instead of sigma, encodings and teacher, which are then None.
    """

    omega: jax.Array
    sigma: jax.Array
    mixing: jax.Array
    encodings: jax.Array
    teacher: jax.Array
    rank: int = eqx.field(static=True, default=1)
    spectrum: SpectralLaw | None = None

    @classmethod
    def of(
        cls: type[Layer],
        omega: Any = 0.3,
        sigma: Any = 0.5,
        lam: Any = 0.01,
        mixing: Any = ((0.6, 0.4), (0.4, 0.6)),
        *,
        encodings: Any = None,
        teacher: Any = 1.0,
        rank: int = 1,
        penalty: Penalty | None = None,
        law: SpectralLaw | None = None,
        dtype: Any = None,
        **extra_fields: Any,
    ) -> Layer:
        """Return a layer of this kind; by default at the paper's standard setting.

        Args:
            omega, sigma, lam, mixing, encodings, teacher, rank, penalty, law, dtype: as in `dot_product`.
            extra_fields: further fields of a subclass, by name; numbers become arrays of the dtype.

        Raises:
            InputError: an argument is out of range; the error names it.
        """
        dtype = jnp.dtype(dtype or jnp.result_type(float))
        if dtype not in (jnp.float32, jnp.float64):
            raise InputError("dtype", f"must be float32 or float64, got dtype={dtype}")
        static_names = {field.name for field in dataclasses.fields(cls) if field.metadata.get("static")}
        extra_fields = {
            name: value if name in static_names else as_number(value, name, dtype)
            for name, value in extra_fields.items()
        }
        numbers: dict[str, Any] = {"omega": as_number(omega, "omega", dtype), "lam": as_number(lam, "lam", dtype)}
        mixing = as_array(mixing, "mixing", dtype)
        if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1] or mixing.shape[0] < 2:
            raise InputError("mixing", f"must be a square L x L matrix with L >= 2, got shape {mixing.shape}")
        if penalty is not None:
            require_kind(penalty, "penalty", Penalty, "a tiedattn_jax.Penalty, such as L1(0.01), or None")
            penalty = jax.tree.map(lambda a: as_array(a, "penalty", dtype), penalty)
        if law is not None:
            require_kind(law, "law", SpectralLaw, "a SpectralLaw, such as SpectralLaw.from_matrices(...)")
            replaced_arguments = ("sigma", sigma, 0.5), ("encodings", encodings, None), ("teacher", teacher, 1.0)
            for name, value, default in replaced_arguments:
                if not (value is default or (isinstance(value, float) and value == default)):
                    raise InputError(name, f"must be left out beside law, which says what it is, got {name}={value!r}")
            sigma = encodings = teacher = None
            law = jax.tree.map(lambda a: jnp.asarray(a, dtype), law)
        else:
            if encodings is None:
                if mixing.shape[0] != 2:
                    raise InputError("encodings", f"must be given for L = {mixing.shape[0]} tokens: an (L, e) matrix")
                encodings = ((1.0,), (-1.0,))
            teacher = jnp.atleast_2d(as_array(teacher, "teacher", dtype))
            sigma, encodings = as_number(sigma, "sigma", dtype), as_array(encodings, "encodings", dtype)
        data: dict[str, Any] = {"sigma": sigma, "encodings": encodings, "teacher": teacher, "spectrum": law}
        return cls(**numbers, **data, mixing=mixing, rank=rank, penalty=penalty, **extra_fields)

    def __check_init__(self) -> None:
        require_count(self.rank, "rank")
        if self.spectrum is None:
            self._check_isotropic()
        elif self.spectrum.gamma.shape[-1] != len(self.mixing):
            requirement = f"must be of as many tokens as mixing, L = {len(self.mixing)}"
            raise InputError("law", f"{requirement}, got L = {self.spectrum.gamma.shape[-1]}")
        if not is_concrete(self):
            return
        omega, lam = np.asarray(self.omega), np.asarray(self.lam)  # numpy compiles nothing for a comparison
        require(np.isfinite(omega) & (0 <= omega) & (omega <= 1), "omega", omega, "in [0, 1]")
        in_range = lam >= 0 if self.penalty is not None else lam > 0
        require(np.isfinite(lam) & in_range, "lam", lam, "positive and finite")
        A = np.asarray(self.mixing, float)
        is_stochastic = np.isfinite(A) & (A >= 0) & (np.abs(A.sum(1, keepdims=True) - 1) < 1e-5)
        require(is_stochastic, "mixing", A, "row-stochastic (entries >= 0, every row summing to 1)")

    def _check_isotropic(self) -> None:
        L = len(self.encodings)
        if self.encodings.ndim != 2 or not self.encodings.size or self.mixing.shape != (L, L):
            requirement = f"of shape (L, e) with L = {self.mixing.shape[0]} as in mixing, e > 0"
            raise InputError("encodings", f"must be {requirement}, got shape {self.encodings.shape}")
        if self.teacher.ndim != 2 or self.teacher.shape[0] != self.teacher.shape[1]:
            raise InputError("teacher", f"must be a number or a (t, t) matrix, got shape {self.teacher.shape}")
        if not is_concrete(self):
            return
        sigma = np.asarray(self.sigma)
        smallest, largest = (float(getattr(np.finfo(sigma.dtype), k)) ** 0.5 for k in ("tiny", "max"))
        require((sigma > smallest) & (sigma < largest), "sigma", sigma, "positive, with a finite square")
        require(np.isfinite(self.encodings), "encodings", self.encodings, "finite")
        gram = np.asarray(self.teacher)
        is_definite = np.all(np.isfinite(gram)) and np.allclose(gram, gram.T) and np.all(np.linalg.eigvalsh(gram) > 0)
        require(is_definite, "teacher", gram, "positive, a matrix symmetric and positive definite")

    @abc.abstractmethod
    def attention(self, fields: jax.Array) -> jax.Array:
        """Return the attention matrix, (L, L), of the fields of a sentence, (L, k); it must be even in the fields."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.mixing), self.rank, self._teachers

    @property
    def _teachers(self) -> int:
        """Number of columns of the teacher."""
        return (self.teacher if self.spectrum is None else self.spectrum.pi).shape[-1]

    @property
    def rotation_invariant(self) -> bool:
        return True

    @precise
    def student(self, Z: jax.Array) -> jax.Array:
        """Return the attention matrix of the student, (L, L)."""
        return self.attention(Z)

    @precise
    def target(self, Y: jax.Array, *noise: jax.Array) -> jax.Array:
        """Return the attention matrix of the target, (L, L); it does not depend on fields of noise."""
        return (1 - self.omega) * self.attention(Y) + self.omega * self.mixing

    def with_teacher(self, gram: jax.Array) -> Model:
        if self.spectrum is None:
            return eqx.tree_at(lambda m: m.teacher, self, gram.astype(self.lam.dtype))
        return eqx.tree_at(lambda m: m.spectrum, self, self.spectrum.with_teacher(gram))

    @precise
    def loss(self, Z: jax.Array, Y: jax.Array, *noise: jax.Array) -> jax.Array:
        error = (self.student(Z) - self.target(Y, *noise)) ** 2
        return 0.5 * self.sigma**2 * jnp.sum(error) if self.spectrum is None else 0.5 * jnp.sum(self.trace * error)

    @eqx.filter_jit
    @precise
    def law(self) -> SpectralLaw:
        if self.spectrum is not None:
            return self.spectrum
        L, _, t = self.shape
        return SpectralLaw(
            weights=jnp.ones((1,), self.sigma.dtype),
            gamma=self.sigma**2 * jnp.ones((1, L), self.sigma.dtype),
            tau=(self.encodings @ self.encodings.T)[None],
            pi=self.teacher[None],
            cross=jnp.zeros((1, L, t), self.sigma.dtype),
            # The first direction of the encodings is 1_d / sqrt(d); the others and the teacher are Gaussian.
            tau_mean=None if self.penalty is None else self.encodings[None, :, 0],
            pi_mean=None if self.penalty is None else jnp.zeros((1, t), self.sigma.dtype),
        )


class DotProduct(AttentionLayer):
    """The dot-product attention of Section 5, for any number of tokens and any rank.

    ``S(Z) = softmax(Z Z^T)`` and ``T(Y) = (1 - omega) softmax(Y Y^T) + omega A``, rows summing to one. Attributes as in
    `AttentionLayer`.
    """

    def attention(self, fields: jax.Array) -> jax.Array:
        return jax.nn.softmax(fields @ fields.T)


class TemperedDotProduct(AttentionLayer):
    """Dot-product attention at a temperature, ``softmax(Z Z^T / temperature)``, in student and target.

    It is equivalent to the dot product with the ridge ``lam temperature`` and with the teacher's ``Q*^T Q* / d``
    divided by the temperature; its weights are larger by the root of the temperature. Attributes as in
    `AttentionLayer`, and the `temperature`.
    """

    temperature: jax.Array = eqx.field(kw_only=True)

    def __check_init__(self) -> None:
        if is_concrete(self.temperature):
            T = np.asarray(self.temperature)
            require(np.isfinite(T) & (T > 0), "temperature", T, "positive and finite")

    @property
    def field_scale(self) -> jax.Array:
        return jnp.sqrt(self.temperature)

    def attention(self, fields: jax.Array) -> jax.Array:
        return jax.nn.softmax(fields @ fields.T / self.temperature)


class CausalDotProduct(AttentionLayer):
    """Dot-product attention with a causal mask, in student and target: a token attends to itself and to earlier ones.

    The positional part A of the target is causal as well: lower triangular. Attributes as in `AttentionLayer`.
    """

    def __check_init__(self) -> None:
        if is_concrete(self.mixing):
            A = np.asarray(self.mixing)
            require(A == np.tril(A), "mixing", A, "lower triangular, zero where a token would attend to a later one")

    def attention(self, fields: jax.Array) -> jax.Array:
        mask = np.tril(np.ones(2 * fields.shape[:1], bool))
        return jax.nn.softmax(jnp.where(mask, fields @ fields.T, -jnp.inf))


class UntiedDotProduct(AttentionLayer):
    """Dot-product attention with queries and keys of their own, ``softmax(Z^Q (Z^K)^T)``.

    The columns of the student are those of the queries, then those of the keys, `rank` of each, so that r = 2 `rank`.
    The columns of the teacher have the same order, unless it is tied. A common rotation of queries and keys changes
    nothing. Attributes as in `AttentionLayer`, and

    Attributes:
        tied_teacher: whether the target is tied, ``(1 - omega) softmax(Y Y^T) + omega A``.
    """

    tied_teacher: bool = eqx.field(static=True, default=False)

    def __check_init__(self) -> None:
        require_kind(self.tied_teacher, "tied_teacher", bool, "True or False")
        if not self.tied_teacher and self._teachers % 2:
            requirement = "must have as many columns for queries as for keys, or tied_teacher=True"
            raise InputError("teacher", f"{requirement}, got t = {self._teachers}")

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.mixing), 2 * self.rank, self._teachers

    @property
    def rotation_invariant(self) -> bool:
        return False

    @property
    def generators(self) -> np.ndarray:
        return np.kron(np.eye(2), rotations_of(self.rank))

    @precise
    def start_columns(self, combined: bool) -> tuple[jax.Array, jax.Array]:
        k, t, law = self.rank, self._teachers, self.law()
        query = np.eye(k, t if self.tied_teacher else t // 2)
        semantic = np.concatenate([query, query]) if self.tied_teacher else np.kron(np.eye(2), query)
        column = np.eye(k)[k - 1 if combined else 0]
        # Query and key get opposite signs if the target attends to other positions rather than to its own.
        gram = jnp.einsum("k,kij->ij", law.weights, law.tau)
        alignment = jnp.sum((self.mixing - 1 / len(gram)) * gram)
        sign = jnp.where(alignment < 0, -1.0, 1.0).astype(self.lam.dtype)
        return jnp.asarray(semantic, self.lam.dtype), jnp.concatenate([column, sign * column])

    def attention(self, fields: jax.Array) -> jax.Array:
        queries, keys = jnp.split(fields, 2, axis=1)
        return jax.nn.softmax(queries @ keys.T)

    def target(self, Y: jax.Array, *noise: jax.Array) -> jax.Array:
        return super().target(jnp.concatenate([Y, Y], 1) if self.tied_teacher else Y)


class LinearAttention(AttentionLayer):
    """Normalised linear attention: the softmax's exponential expanded to second order.

    ``S_kl = k(s_kl) / sum_j k(s_kj)`` with the scores ``s = Z Z^T`` and the kernel ``k(s) = 1 + s + s^2 / 2``. The
    kernel is an inner product of features of single tokens, ``(1, z, z z^T / sqrt(2))``, hence the name. It is at least
    one half, so no denominator vanishes, and rows sum to one. Attributes as in `AttentionLayer`.
    """

    def attention(self, fields: jax.Array) -> jax.Array:
        scores = fields @ fields.T
        kernel = 1 + scores + 0.5 * scores**2
        return kernel / jnp.sum(kernel, 1, keepdims=True)


class ReLUAttention(AttentionLayer):
    """ReLU attention, not normalised: ``S(Z) = max(Z Z^T, 0) / L``.

    Rows need not sum to one; divided by their sum they would have no limit at ``Z = 0``. The gradient of the loss jumps
    where a score changes its sign. Attributes as in `AttentionLayer`.
    """

    @property
    def nonsmooth(self) -> bool:
        return True

    def attention(self, fields: jax.Array) -> jax.Array:
        return jnp.maximum(fields @ fields.T, 0) / fields.shape[0]


def dot_product(
    omega: Any = 0.3,
    sigma: Any = 0.5,
    lam: Any = 0.01,
    mixing: Any = ((0.6, 0.4), (0.4, 0.6)),
    *,
    encodings: Any = None,
    teacher: Any = 1.0,
    rank: int = 1,
    penalty: Penalty | None = None,
    law: SpectralLaw | None = None,
    dtype: Any = None,
) -> DotProduct:
    """Return the dot-product attention of Section 5 of the paper; by default at its standard setting.

    Args:
        omega: positional share of the target, in [0, 1].
        sigma: standard deviation of the tokens, positive.
        lam: ridge strength, positive; it may be zero if there is a penalty.
        mixing: positional part A of the target, L x L, entries in [0, 1], rows summing to one.
        encodings: (L, e) coefficients of the positional encodings p_l on e orthonormal directions, of norm O(1) like
            p_l itself: vectors (L, d) of entries O(1) must be divided by sqrt(d). By default (1, -1) for two tokens,
            the paper's p_1 = -p_2 of unit norm.
        teacher: Q*^T Q* / d: a number, or a (t, t) positive definite matrix. It is one in the paper. To compare the
            theory with one finite instance, give the realised value.
        rank: number of columns of the student.
        penalty: penalty of the weights besides the ridge; ``L1(0.02)``, for instance, makes the elastic net.
        law: law of the data, instead of sigma, encodings and teacher; for instance `SpectralLaw.from_matrices`.
        dtype: dtype of all numbers; by default that of jax for Python floats (float32 unless x64 is enabled).

    Raises:
        ValueError: an argument is out of range; the error names it.
    """
    options = {"encodings": encodings, "teacher": teacher, "rank": rank, "penalty": penalty, "law": law, "dtype": dtype}
    return DotProduct.of(omega, sigma, lam, mixing, **options)


def tempered_dot_product(
    omega: Any = 0.3,
    sigma: Any = 0.5,
    lam: Any = 0.01,
    mixing: Any = ((0.6, 0.4), (0.4, 0.6)),
    *,
    temperature: Any = 1.0,
    **more: Any,
) -> TemperedDotProduct:
    """Return a `TemperedDotProduct`: dot-product attention at a temperature.

    Arguments and errors are those of `dot_product`, and the `temperature`, which is positive.
    """
    return TemperedDotProduct.of(omega, sigma, lam, mixing, temperature=temperature, **more)


def causal_dot_product(
    omega: Any = 0.3, sigma: Any = 0.5, lam: Any = 0.01, mixing: Any = ((1.0, 0.0), (0.4, 0.6)), **more: Any
) -> CausalDotProduct:
    """Return a `CausalDotProduct`: dot-product attention with a causal mask.

    Arguments and errors are those of `dot_product`; `mixing` is lower triangular.
    """
    return CausalDotProduct.of(omega, sigma, lam, mixing, **more)


def untied_dot_product(
    omega: Any = 0.3,
    sigma: Any = 0.5,
    lam: Any = 0.01,
    mixing: Any = ((0.6, 0.4), (0.4, 0.6)),
    *,
    tied_teacher: bool = False,
    teacher: Any = 1.0,
    **more: Any,
) -> UntiedDotProduct:
    """Return an `UntiedDotProduct`: dot-product attention with queries and keys of their own.

    Arguments and errors are those of `dot_product`, except for these.

    Args:
        tied_teacher: whether the target is tied.
        teacher: if the target is not tied, a number is ``|q|^2 / d`` of each of its two columns, one query and one key;
            a matrix has the queries first.
        more: `rank` is the number of columns of the queries, and of the keys.
    """
    if not np.ndim(teacher) and not tied_teacher and more.get("law") is None:
        teacher = as_array(teacher, "teacher", None) * np.eye(2)
    return UntiedDotProduct.of(omega, sigma, lam, mixing, tied_teacher=tied_teacher, teacher=teacher, **more)


def linear_attention(
    omega: Any = 0.3, sigma: Any = 0.5, lam: Any = 0.01, mixing: Any = ((0.6, 0.4), (0.4, 0.6)), **more: Any
) -> LinearAttention:
    """Return a `LinearAttention`: normalised linear attention.

    Arguments and errors are those of `dot_product`.
    """
    return LinearAttention.of(omega, sigma, lam, mixing, **more)


def relu_attention(
    omega: Any = 0.3, sigma: Any = 0.5, lam: Any = 0.01, mixing: Any = ((0.6, 0.4), (0.4, 0.6)), **more: Any
) -> ReLUAttention:
    """Return a `ReLUAttention`: ReLU attention that is not normalised.

    Arguments and errors are those of `dot_product`.
    """
    return ReLUAttention.of(omega, sigma, lam, mixing, **more)


_MAKERS = dot_product, tempered_dot_product, causal_dot_product, untied_dot_product, linear_attention, relu_attention
LAYERS = {make.__name__: make for make in _MAKERS}
