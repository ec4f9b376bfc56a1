"""The attention layers that the library ships, each a `Model`."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .errors import InputError, as_array, as_number, is_concrete, require, require_count, require_kind
from .model import Model, SpectralLaw
from .penalties import Penalty


class DotProduct(Model):
    """The dot-product attention of Section 5, for any number of tokens and any rank.

    ``S(Z) = softmax(Z Z^T)`` and ``T(Y) = (1 - omega) softmax(Y Y^T) + omega A``, rows summing to one; isotropic
    covariances ``Sigma_l = sigma^2 I``; positional encodings that span a few directions orthogonal to the teacher.

    Attributes:
        omega: positional share of the target, in [0, 1].
        sigma: standard deviation of the tokens.
        lam: ridge strength.
        penalty: of the weights besides the ridge, or None.
        mixing: the positional part A of the target, (L, L), rows summing to one.
        encodings: coefficients of p_l on orthonormal directions, (L, e).
        teacher: ``Q*^T Q* / d``, (t, t).
        rank: rank r of the student.
    """

    omega: jax.Array
    sigma: jax.Array
    mixing: jax.Array
    encodings: jax.Array
    teacher: jax.Array
    rank: int = eqx.field(static=True, default=1)

    def __check_init__(self) -> None:
        L = len(self.encodings)
        require_count(self.rank, "rank")
        if self.encodings.ndim != 2 or not self.encodings.size or self.mixing.shape != (L, L):
            want = f"of shape (L, e) with L = {self.mixing.shape[0]} as in mixing, e > 0"
            raise InputError("encodings", f"must be {want}, got shape {self.encodings.shape}")
        if self.teacher.ndim != 2 or self.teacher.shape[0] != self.teacher.shape[1]:
            raise InputError("teacher", f"must be a number or a (t, t) matrix, got shape {self.teacher.shape}")
        if not is_concrete(self):
            return
        require(np.isfinite(self.omega) & (0 <= self.omega) & (self.omega <= 1), "omega", self.omega, "in [0, 1]")
        least, most = (float(getattr(np.finfo(self.sigma.dtype), k)) ** 0.5 for k in ("tiny", "max"))
        require((self.sigma > least) & (self.sigma < most), "sigma", self.sigma, "positive, with a finite square")
        held = self.lam >= 0 if self.penalty is not None else self.lam > 0
        require(np.isfinite(self.lam) & held, "lam", self.lam, "positive and finite")
        A = np.asarray(self.mixing, float)
        stochastic = np.isfinite(A) & (A >= 0) & (np.abs(A.sum(1, keepdims=True) - 1) < 1e-5)
        require(stochastic, "mixing", A, "row-stochastic (entries >= 0, every row summing to 1)")
        require(np.isfinite(self.encodings), "encodings", self.encodings, "finite")
        gram = np.asarray(self.teacher)
        positive = np.all(np.isfinite(gram)) and np.allclose(gram, gram.T) and np.all(np.linalg.eigvalsh(gram) > 0)
        require(positive, "teacher", gram, "positive, a matrix symmetric and positive definite")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.encodings.shape[0], self.rank, self.teacher.shape[0]

    @property
    def rotation_invariant(self) -> bool:
        return True

    def student(self, Z: jax.Array) -> jax.Array:
        """Attention matrix of the student, (L, L)."""
        return jax.nn.softmax(Z @ Z.T)

    def target(self, Y: jax.Array) -> jax.Array:
        """Attention matrix of the target, (L, L)."""
        return (1 - self.omega) * jax.nn.softmax(Y @ Y.T) + self.omega * self.mixing

    def with_teacher(self, gram: jax.Array) -> DotProduct:
        return eqx.tree_at(lambda m: m.teacher, self, gram.astype(self.lam.dtype))

    def loss(self, Z: jax.Array, Y: jax.Array) -> jax.Array:
        return 0.5 * self.sigma**2 * jnp.sum((self.student(Z) - self.target(Y)) ** 2)

    def law(self) -> SpectralLaw:
        L, _, t = self.shape
        one = jnp.ones((1,), self.sigma.dtype)
        return SpectralLaw(
            weights=one,
            gamma=self.sigma**2 * jnp.ones((1, L), self.sigma.dtype),
            tau=(self.encodings @ self.encodings.T)[None],
            pi=self.teacher[None],
            cross=jnp.zeros((1, L, t), self.sigma.dtype),
            # The first direction of the encodings is 1_d / sqrt(d), the others and the teacher are Gaussian.
            tau_mean=None if self.penalty is None else self.encodings[None, :, 0],
            pi_mean=None if self.penalty is None else jnp.zeros((1, t), self.sigma.dtype),
        )


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
    dtype: Any = None,
) -> DotProduct:
    """The dot-product attention of Section 5 of the paper; by default its standard setting.

    Args:
        omega: positional share of the target, in [0, 1].
        sigma: standard deviation of the tokens, positive.
        lam: ridge strength, positive; it may be zero beside a penalty.
        mixing: positional part A of the target, L x L, entries in [0, 1], rows summing to one.
        encodings: (L, e) coefficients of the positional encodings p_l on e orthonormal directions, of norm O(1) like
            p_l itself: vectors (L, d) of entries O(1) must be divided by sqrt(d). By default (1, -1) for two tokens,
            the paper's p_1 = -p_2 of unit norm.
        teacher: Q*^T Q* / d: a number, or a (t, t) positive definite matrix. One in the paper; the realised value when
            the theory is compared with one finite instance.
        rank: columns of the student.
        penalty: of the weights besides the ridge, for instance ``L1(0.02)``; with the ridge that is the elastic net.
        dtype: of all numbers; by default what jax gives to Python floats (float32 unless x64 is enabled).

    Raises:
        ValueError: naming the argument that is out of range.
    """
    dtype = jnp.dtype(dtype or jnp.result_type(float))
    if dtype not in (jnp.float32, jnp.float64):
        raise InputError("dtype", f"must be float32 or float64, got dtype={dtype}")
    omega, sigma, lam = (as_number(v, k, dtype) for k, v in {"omega": omega, "sigma": sigma, "lam": lam}.items())
    mixing = as_array(mixing, "mixing", dtype)
    if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1] or mixing.shape[0] < 2:
        raise InputError("mixing", f"must be a square L x L matrix with L >= 2, got shape {mixing.shape}")
    if penalty is not None:
        require_kind(penalty, "penalty", Penalty, "a tiedattn_jax.Penalty, such as L1(0.01), or None")
        penalty = jax.tree.map(lambda a: a.astype(dtype), penalty)
    if encodings is None:
        if mixing.shape[0] != 2:
            raise InputError("encodings", f"must be given for L = {mixing.shape[0]} tokens: an (L, e) matrix")
        encodings = ((1.0,), (-1.0,))
    return DotProduct(
        omega=omega,
        sigma=sigma,
        lam=lam,
        mixing=mixing,
        encodings=as_array(encodings, "encodings", dtype),
        teacher=jnp.atleast_2d(as_array(teacher, "teacher", dtype)),
        rank=rank,
        penalty=penalty,
    )
