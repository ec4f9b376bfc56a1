"""The attention layers that the library ships, each a `Model`.

A layer defines its attention as a function of the fields, `AttentionLayer.attention`. The data and the form of the
target are common to all layers.
"""

from __future__ import annotations

import abc
import dataclasses
from functools import partial
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from ..base.arrays import AnyArray, Number, StateArray, eigenvalues_exceed, precise
from ..base.errors import (
    InputError,
    Ranges,
    as_array,
    as_flag,
    as_number,
    float_dtype,
    require_count,
    require_kind,
    require_promotion,
)
from .law import DType, Rows, SpectralLaw
from .model import Model, Preimages, orbit, rotations_of
from .penalties import Penalty

Layer = TypeVar("Layer", bound="AttentionLayer")


class AttentionLayer(Model):
    """A layer whose target has the same kind of attention. Subclass it, and write `attention`.

    The student is ``S(Z) = attention(Z)``, the target ``T(Y) = (1 - omega) attention(Y) + omega A``. Tokens have
    isotropic covariances ``Sigma_l = sigma^2 I``; positional encodings span a few directions orthogonal to the teacher.

    Attributes:
        omega: positional share of the target, in [0, 1].
        sigma: standard deviation of the tokens.
        lam: ridge strength.
        penalty: penalty of the weights besides the ridge, or None.
        mixing: the positional part A of the target, rows summing to one.
        encodings: coefficients of p_l on e orthonormal directions.
        teacher: ``Q*^T Q* / d``.
        rank: rank r of the student.
        spectrum: law of the data, if it is given instead of sigma, encodings and teacher, which are then None.
    """

    omega: Float[Array, ""]
    sigma: Float[Array, ""] | None
    mixing: Float[Array, "L L"]
    encodings: Float[Array, "L e"] | None
    teacher: Float[Array, "t t"] | None
    rank: int = eqx.field(static=True, default=1, kw_only=True)
    spectrum: SpectralLaw | None = eqx.field(default=None, kw_only=True)
    default_mixing: ClassVar[tuple[tuple[float, ...], ...]] = ((0.6, 0.4), (0.4, 0.6))

    def __init__(
        self,
        omega: Number = 0.3,
        sigma: Number | None = 0.5,
        lam: Number = 0.01,
        mixing: Real[AnyArray, "L L"] | Rows | None = None,
        *,
        encodings: Real[AnyArray, "L e"] | Rows | None = None,
        teacher: Number | Real[AnyArray, "t t"] | Rows | None = 1.0,
        rank: int = 1,
        penalty: Penalty | None = None,
        spectrum: SpectralLaw | None = None,
        dtype: DType | None = None,
        **extra_fields: Any,
    ):
        """Make a layer of this kind; by default at the paper's standard setting.

        Args:
            omega: positional share of the target, in [0, 1].
            sigma: standard deviation of the tokens, positive.
            lam: ridge strength, positive; it may be zero if there is a penalty.
            mixing: positional part A of the target, entries in [0, 1], rows summing to one. By default
                ((0.6, 0.4), (0.4, 0.6)), and ((1, 0), (0.4, 0.6)) for causal attention, which takes lower triangular
                ones.
            encodings: coefficients of the positional encodings p_l on e orthonormal directions, of norm O(1)
                like p_l itself: vectors (L, d) of entries O(1) must be divided by sqrt(d). By default (1, -1) for two
                tokens, the paper's p_1 = -p_2 of unit norm.
            teacher: Q*^T Q* / d: a number, or a (t, t) positive definite matrix. It is one in the paper. To compare the
                theory with one finite instance, give the realised value. For untied attention a number is that of each
                of two columns, one query and one key; a matrix has the queries first.
            rank: number of columns of the student; for untied attention that of its queries, and of its keys.
            penalty: penalty of the weights besides the ridge; ``L1(0.02)``, for instance, makes the elastic net.
            spectrum: law of the data, instead of sigma, encodings and teacher; for instance
                `SpectralLaw.from_matrices`.
            dtype: dtype of all numbers; by default that of `lam` if it is an array of jax, else that of jax for Python
                floats (float32 unless x64 is enabled).
            extra_fields: further fields of a subclass, by name, such as `tied_teacher` of `UntiedDotProduct`; numbers
                become arrays of the dtype.

        Raises:
            InputError: an argument is out of range; the error names it.
        """
        require_promotion()
        if dtype is None and isinstance(lam, jax.Array) and jnp.issubdtype(lam.dtype, jnp.floating):
            dtype = lam.dtype
        dtype = float_dtype(dtype)
        values = {**self._with_defaults(extra_fields), "rank": rank, "penalty": penalty, "spectrum": spectrum}
        values |= {"omega": as_number(omega, "omega", dtype), "lam": as_number(lam, "lam", dtype)}
        A = as_array(self.default_mixing if mixing is None else mixing, "mixing", dtype)
        if A.ndim != 2 or A.shape[0] != A.shape[1] or A.shape[0] < 2:
            raise InputError("mixing", f"must be a square L x L matrix with L >= 2, got shape {A.shape}")
        if penalty is not None:
            require_kind(penalty, "penalty", Penalty, "a tiedattn_jax.Penalty, such as L1(0.01), or None")
        if spectrum is not None:
            require_kind(spectrum, "spectrum", SpectralLaw, "a SpectralLaw, such as SpectralLaw.from_matrices(...)")
            given = {"sigma": (sigma, 0.5), "encodings": (encodings, None), "teacher": (teacher, 1.0)}
            for name, (value, default) in given.items():
                if not (value is None or (isinstance(value, float) and value == default)):
                    text = f"must be left out beside spectrum, which says what it is, got {name}={value!r}"
                    raise InputError(name, text)
            sigma = encodings = gram = None
        else:
            if encodings is None:
                if len(A) != 2:
                    raise InputError("encodings", f"must be given for L = {len(A)} tokens: an (L, e) matrix")
                encodings = ((1.0,), (-1.0,))
            sigma, gram = as_number(sigma, "sigma", dtype), as_array(teacher, "teacher", dtype)
            gram = jnp.atleast_2d(gram) if gram.ndim else gram * np.eye(self._default_teachers(values), dtype=dtype)
        values |= {"mixing": A, "sigma": sigma, "encodings": encodings, "teacher": gram}
        for field in dataclasses.fields(self):
            value = values[field.name]
            if not field.metadata.get("static", False):  # all numbers have one dtype, also those of a penalty
                convert = partial(as_array, argument=field.name, dtype=dtype)
                value = jax.tree.map(convert, value) if isinstance(value, eqx.Module | None) else convert(value)
            setattr(self, field.name, value)

    def _with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the fields of a subclass by name.

        Raises:
            TypeError: a name is that of no field, or a field without a default is missing.
        """
        known = {field.name for field in dataclasses.fields(AttentionLayer)} - {"kind"}
        added = (field for field in dataclasses.fields(self) if field.name not in known)
        copies = [(f.name, Any, dataclasses.field(default=f.default, default_factory=f.default_factory)) for f in added]
        return vars(dataclasses.make_dataclass(type(self).__name__, copies, kw_only=True)(**given))

    @classmethod
    def _default_teachers(cls, extra_fields: dict[str, Any]) -> int:
        """Return the number of columns of a teacher that is given as a number."""
        return 1

    def __check_init__(self) -> None:
        require_count(self.rank, "rank")
        L = len(self.mixing)
        if self.spectrum is not None:
            if self.spectrum.tokens != L:
                requirement = f"must be of as many tokens as mixing, L = {L}"
                raise InputError("spectrum", f"{requirement}, got L = {self.spectrum.tokens}")
            return
        _, encodings, gram = self._isotropic
        if encodings.ndim != 2 or not encodings.size or len(encodings) != L or self.mixing.shape != (L, L):
            requirement = f"of shape (L, e) with L = {L} as in mixing, e > 0"
            raise InputError("encodings", f"must be {requirement}, got shape {encodings.shape}")
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
            raise InputError("teacher", f"must be a number or a (t, t) matrix, got shape {gram.shape}")

    def in_range(self) -> Ranges:
        omega, lam, A = self.omega, self.lam, self.mixing
        least = lam >= 0 if self.penalty is not None else lam > 0
        is_stochastic = (A >= 0) & (abs(A.sum(1, keepdims=True) - 1) < 1e-5)
        ranges = [
            ("omega", (omega >= 0) & (omega <= 1), "in [0, 1]"),
            ("lam", least & (lam < np.inf), "positive and finite"),
            ("mixing", is_stochastic, "row-stochastic (entries >= 0, every row summing to 1)"),
        ]
        if self.spectrum is not None:
            return ranges
        sigma, encodings, gram = self._isotropic
        smallest, largest = (float(getattr(np.finfo(sigma.dtype), k)) ** 0.5 for k in ("tiny", "max"))
        is_definite = (abs(gram - gram.T) <= 1e-8 + 1e-5 * abs(gram)) & eigenvalues_exceed(gram[None], 0.0)
        return [
            *ranges,
            ("sigma", (sigma > smallest) & (sigma < largest), "positive, with a finite square"),
            ("encodings", abs(encodings) < np.inf, "finite"),
            ("teacher", is_definite, "positive, a matrix symmetric and positive definite"),
        ]

    @abc.abstractmethod
    def attention(self, fields: Float[Array, "L k"]) -> Float[Array, "L L"]:
        """Return the attention matrix of the fields of a sentence; it must be even in the fields."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.mixing), self.rank, self._teachers

    @property
    def _isotropic(self) -> tuple[Any, Float[StateArray, "L e"], Float[StateArray, "t t"]]:
        """`sigma`, `encodings` and `teacher`, which a layer without `spectrum` has."""
        assert self.sigma is not None and self.encodings is not None and self.teacher is not None
        return self.sigma, self.encodings, self.teacher

    @property
    def _teachers(self) -> int:
        """Number of columns of the teacher."""
        return (self._isotropic[2] if self.spectrum is None else self.spectrum.pi).shape[-1]

    @property
    def rotation_invariant(self) -> bool:
        return True

    @precise
    def student(self, Z: Float[Array, "L r"]) -> Float[Array, "L L"]:
        """Return the attention matrix of the student."""
        return self.attention(Z)

    @precise
    def target(self, Y: Float[Array, "L t"], *noise: Float[Array, "L noise"]) -> Float[Array, "L L"]:
        """Return the attention matrix of the target; it does not depend on fields of noise."""
        return (1 - self.omega) * self.attention(Y) + self.omega * self.mixing

    def with_teacher(self, gram: Float[Array, "t t"]) -> Model:
        if self.spectrum is None:
            return eqx.tree_at(lambda m: m.teacher, self, gram.astype(self.lam.dtype))
        return eqx.tree_at(lambda m: m.spectrum, self, self.spectrum.with_teacher(gram))

    @precise
    def loss(self, Z: Float[Array, "L r"], Y: Float[Array, "L t"], *noise: Float[Array, "L noise"]) -> Float[Array, ""]:
        error = (self.student(Z) - self.target(Y, *noise)) ** 2
        if self.spectrum is not None:
            return 0.5 * jnp.sum(self.trace * error)
        sigma, _, _ = self._isotropic
        return 0.5 * sigma**2 * jnp.sum(error)

    @eqx.filter_jit
    @precise
    def law(self) -> SpectralLaw:
        if self.spectrum is not None:
            return self.spectrum
        (L, _, t), (sigma, encodings, gram) = self.shape, self._isotropic
        return SpectralLaw(
            weights=jnp.ones((1,), sigma.dtype),
            gamma=sigma**2 * jnp.ones((1, L), sigma.dtype),
            tau=(encodings @ encodings.T)[None],
            pi=gram[None],
            cross=jnp.zeros((1, L, t), sigma.dtype),
            # The first direction of the encodings is 1_d / sqrt(d); the others and the teacher are Gaussian.
            tau_mean=None if self.penalty is None else encodings[None, :, 0],
            pi_mean=None if self.penalty is None else jnp.zeros((1, t), sigma.dtype),
        )


class DotProduct(AttentionLayer):
    """The dot-product attention of Section 5, for any number of tokens and any rank.

    ``S(Z) = softmax(Z Z^T)`` and ``T(Y) = (1 - omega) softmax(Y Y^T) + omega A``, rows summing to one. Attributes as in
    `AttentionLayer`.
    """

    __init__ = AttentionLayer.__init__  # seen by type checkers, which derive another one from the fields

    def attention(self, fields: Float[Array, "L k"]) -> Float[Array, "L L"]:
        return jax.nn.softmax(fields @ fields.T)

    def preimages(self, Y: Float[Array, "L t"]) -> Preimages:
        return _softmax_preimages(Y)


class CausalDotProduct(AttentionLayer):
    """Dot-product attention with a causal mask, in student and target: a token attends to itself and to earlier ones.

    The positional part A of the target is causal as well: lower triangular. Attributes as in `AttentionLayer`.
    """

    __init__ = AttentionLayer.__init__

    default_mixing = ((1.0, 0.0), (0.4, 0.6))

    def in_range(self) -> Ranges:
        is_causal = self.mixing * np.tril(np.ones(self.mixing.shape)) == self.mixing
        requirement = "lower triangular, zero where a token would attend to a later one"
        return [*super().in_range(), ("mixing", is_causal, requirement)]

    def attention(self, fields: Float[Array, "L k"]) -> Float[Array, "L L"]:
        mask = np.tril(np.ones(2 * fields.shape[:1], bool))
        return jax.nn.softmax(jnp.where(mask, fields @ fields.T, -jnp.inf))

    def preimages(self, Y: Float[Array, "L t"]) -> Preimages:
        L, t = Y.shape
        # Two tokens show the one number y_2 (y_2 - y_1), which many fields share.
        _require_preimages(t == 1 and L > 2, "a teacher of one column and three tokens or more", f"t = {t}, L = {L}")
        return orbit(Y)


class UntiedDotProduct(AttentionLayer):
    """Dot-product attention with queries and keys of their own, ``softmax(Z^Q (Z^K)^T)``.

    The columns of the student are those of the queries, then those of the keys, `rank` of each, so that r = 2 `rank`.
    The columns of the teacher have the same order, unless it is tied. A common rotation of queries and keys changes
    nothing. Attributes as in `AttentionLayer`, and

    Attributes:
        tied_teacher: whether the target is tied, ``(1 - omega) softmax(Y Y^T) + omega A``.
    """

    __init__ = AttentionLayer.__init__

    tied_teacher: bool = eqx.field(static=True, default=False)

    @classmethod
    def _default_teachers(cls, extra_fields: dict[str, Any]) -> int:
        return 1 if extra_fields["tied_teacher"] else 2

    def __check_init__(self) -> None:
        as_flag(self.tied_teacher, "tied_teacher")
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
    def generators(self) -> Float[np.ndarray, "G r r"]:
        return np.kron(np.eye(2), rotations_of(self.rank))

    @precise
    def start_columns(self, combined: bool) -> tuple[Float[Array, "r t"], Float[Array, " r"]]:
        k, t, law = self.rank, self._teachers, self.law()
        query = np.eye(k, t if self.tied_teacher else t // 2)
        semantic = np.concatenate([query, query]) if self.tied_teacher else np.kron(np.eye(2), query)
        column = np.eye(k)[k - 1 if combined else 0]
        # Query and key get opposite signs if the target attends to other positions rather than to its own.
        gram = jnp.einsum("k,kij->ij", law.weights, law.tau)
        alignment = jnp.sum((self.mixing - 1 / len(gram)) * gram)
        sign = jnp.where(alignment < 0, -1.0, 1.0).astype(self.lam.dtype)
        return jnp.asarray(semantic, self.lam.dtype), jnp.concatenate([column, sign * column])

    def attention(self, fields: Float[Array, "L k"]) -> Float[Array, "L L"]:
        queries, keys = jnp.split(fields, 2, axis=1)
        return jax.nn.softmax(queries @ keys.T)

    def preimages(self, Y: Float[Array, "L t"]) -> Preimages:
        _require_preimages(self.tied_teacher, "tied_teacher=True", "queries and keys")
        return _softmax_preimages(Y)

    def target(self, Y: Float[Array, "L t"], *noise: Float[Array, "L noise"]) -> Float[Array, "L L"]:
        return super().target(jnp.concatenate([Y, Y], 1) if self.tied_teacher else Y)


class LinearAttention(AttentionLayer):
    """Normalised linear attention: the softmax's exponential expanded to second order.

    ``S_kl = k(s_kl) / sum_j k(s_kj)`` with the scores ``s = Z Z^T`` and the kernel ``k(s) = 1 + s + s^2 / 2``. The
    kernel is an inner product of features of single tokens, ``(1, z, z z^T / sqrt(2))``, hence the name. It is at least
    one half, so no denominator vanishes, and rows sum to one. Attributes as in `AttentionLayer`.
    """

    __init__ = AttentionLayer.__init__

    def attention(self, fields: Float[Array, "L k"]) -> Float[Array, "L L"]:
        scores = fields @ fields.T
        kernel = 1 + scores + 0.5 * scores**2
        return kernel / jnp.sum(kernel, 1, keepdims=True)


class ReLUAttention(AttentionLayer):
    """ReLU attention, not normalised: ``S(Z) = max(Z Z^T, 0) / L``.

    Rows need not sum to one; divided by their sum they would have no limit at ``Z = 0``. The gradient of the loss jumps
    where a score changes its sign. Attributes as in `AttentionLayer`.
    """

    __init__ = AttentionLayer.__init__

    @property
    def nonsmooth(self) -> bool:
        return True

    def attention(self, fields: Float[Array, "L k"]) -> Float[Array, "L L"]:
        return jnp.maximum(fields @ fields.T, 0) / fields.shape[0]

    def preimages(self, Y: Float[Array, "L t"]) -> Preimages:
        _require_preimages(Y.shape[1] == 1, "a teacher of one column", f"t = {Y.shape[1]}")
        return orbit(Y)


def _softmax_preimages(Y: Float[Array, "L t"]) -> Preimages:
    """Return the preimages of ``softmax(Y Y^T)``: it gives Y Y^T up to one constant, which its rank fixes if t < L."""
    L, t = Y.shape
    _require_preimages(t < L, "fewer columns of the teacher than tokens", f"t = {t}, L = {L}")
    return orbit(Y)


def _require_preimages(condition: bool, requirement: str, value: str) -> None:
    if not condition:
        text = f"must have {requirement} for its own preimages, got {value}: declare `preimages(Y)` in a subclass"
        raise InputError("model", text)


# The shipped layers by the names that the command line takes.
LAYERS: dict[str, type[AttentionLayer]] = {
    "dot_product": DotProduct,
    "causal_dot_product": CausalDotProduct,
    "untied_dot_product": UntiedDotProduct,
    "linear_attention": LinearAttention,
    "relu_attention": ReLUAttention,
}
