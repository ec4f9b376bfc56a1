"""The model: one scalar loss of the local fields, and the law of the data. Everything else follows from these."""

from __future__ import annotations

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class SpectralLaw(eqx.Module):
    """Joint law of (gamma_l, tau_l, pi) over the common eigenvectors of the covariances (Assumption 4.1), by its atoms.

    ``gamma_l`` are the eigenvalues of Sigma_l, ``tau_l = sqrt(d) e_i . p_l`` the projections of the encodings and
    ``pi = e_i . Q*`` those of the teacher. A ridge prior asks only for the second moments at each atom of gamma.

    Attributes:
        weights: (K,) shares of the spectrum, summing to one.
        gamma: (K, L) eigenvalues at each atom.
        tau: (K, L, L) second moments E[tau_k tau_l].
        pi: (K, t, t) second moments E[pi pi^T].
        cross: (K, L, t) moments E[tau_l pi]; zero for a teacher orthogonal to the encodings.
    """

    weights: jax.Array
    gamma: jax.Array
    tau: jax.Array
    pi: jax.Array
    cross: jax.Array


class Model(eqx.Module):
    """A tied attention layer and its data. Subclass it, and write `shape`, `loss` and `law`.

    Numbers that theory should be differentiable in are array fields of the subclass.

    Attributes:
        lam: ridge strength lambda of the empirical risk; given by keyword.
    """

    lam: jax.Array = eqx.field(kw_only=True)

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(L, r, t): tokens of a sentence, rank of the student, rank of the teacher."""

    @abc.abstractmethod
    def loss(self, Z: jax.Array, Y: jax.Array) -> jax.Array:
        """Loss of one sentence as a function of its local fields.

        For student and teacher attention matrices S and T it is ``1/2 Tr[(S(Z) - T(Y)) D (S(Z) - T(Y))^T]`` with
        ``D = diag(Tr Sigma_l / d)``. It must not change under ``Z -> -Z`` nor under ``Y -> -Y``.

        Args:
            Z: student fields, (L, r).
            Y: teacher fields, (L, t).
        """

    @abc.abstractmethod
    def law(self) -> SpectralLaw:
        """Joint spectral law of covariances, encodings and teacher."""

    @property
    def rho(self) -> jax.Array:
        """Covariance of the teacher's fields, ``Q*^T Sigma_l Q* / d``, (L, t, t)."""
        law = self.law()
        return jnp.einsum("k,kl,kst->lst", law.weights, law.gamma, law.pi)

    @property
    def trace(self) -> jax.Array:
        """``Tr Sigma_l / d``, the diagonal of D, (L,)."""
        law = self.law()
        return law.weights @ law.gamma

    @property
    def rotation_invariant(self) -> bool:
        """Whether loss(Z O, Y) = loss(Z, Y) for rotations O of the student's columns: a gauge that solvers must fix."""
        return False

    def target(self, Y: jax.Array) -> jax.Array:
        """Target attention matrix T(Y), (L, L), whose mean is the linear baseline. Optional."""
        raise AttributeError(f"{type(self).__name__} has no linear baseline: give it a method `target(Y)`")


class DotProduct(Model):
    """The dot-product attention of Section 5, for any number of tokens and any rank.

    ``S(Z) = softmax(Z Z^T)`` and ``T(Y) = (1 - omega) softmax(Y Y^T) + omega A``, rows summing to one; isotropic
    covariances ``Sigma_l = sigma^2 I``; positional encodings that span a few directions orthogonal to the teacher.

    Attributes:
        omega: positional share of the target, in [0, 1].
        sigma: standard deviation of the tokens.
        lam: ridge strength.
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
        L = self.encodings.shape[0]
        require(isinstance(self.rank, int) and self.rank >= 1, "rank", self.rank, "an integer of at least 1")
        if self.encodings.ndim != 2 or self.mixing.shape != (L, L):
            raise ValueError(
                f"encodings must have shape (L, e) with L = {self.mixing.shape[0]} as in mixing, "
                f"got shape {self.encodings.shape}"
            )
        if self.teacher.ndim != 2 or self.teacher.shape[0] != self.teacher.shape[1]:
            raise ValueError(f"teacher must be a number or a (t, t) matrix, got shape {self.teacher.shape}")
        if not is_concrete(self):
            return
        require(np.isfinite(self.omega) & (0 <= self.omega) & (self.omega <= 1), "omega", self.omega, "in [0, 1]")
        require(np.isfinite(self.sigma) & (self.sigma > 0), "sigma", self.sigma, "positive and finite")
        require(np.isfinite(self.lam) & (self.lam > 0), "lam", self.lam, "positive and finite")
        A = np.asarray(self.mixing, float)
        stochastic = np.isfinite(A) & (A >= 0) & (np.abs(A.sum(1, keepdims=True) - 1) < 1e-5)
        require(stochastic, "mixing", A, "row-stochastic (entries >= 0, every row summing to 1)")
        require(np.isfinite(self.encodings), "encodings", self.encodings, "finite")
        positive = np.all(np.isfinite(self.teacher)) and np.all(np.linalg.eigvalsh(np.asarray(self.teacher)) > 0)
        require(positive, "teacher", self.teacher, "positive (definite)")

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
    dtype: Any = None,
) -> DotProduct:
    """The dot-product attention of Section 5 of the paper; by default its standard setting.

    Args:
        omega: positional share of the target, in [0, 1].
        sigma: standard deviation of the tokens, positive.
        lam: ridge strength, positive.
        mixing: positional part A of the target, L x L, entries in [0, 1], rows summing to one.
        encodings: (L, e) coefficients of the positional encodings p_l on e orthonormal directions. By default
            (1, -1) for two tokens, the paper's p_1 = -p_2 of unit norm.
        teacher: Q*^T Q* / d: a number, or a (t, t) positive definite matrix. One in the paper; the realised value when
            the theory is compared with one finite instance.
        rank: columns of the student.
        dtype: of all numbers; by default what jax gives to Python floats (float32 unless x64 is enabled).

    Raises:
        ValueError: naming the argument that is out of range.
    """
    dtype = jnp.dtype(dtype or jnp.result_type(float))
    omega, sigma, lam, mixing = (jnp.asarray(v, dtype) for v in (omega, sigma, lam, mixing))
    if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1] or mixing.shape[0] < 2:
        raise ValueError(f"mixing must be a square L x L matrix with L >= 2, got shape {mixing.shape}")
    if encodings is None:
        if mixing.shape[0] != 2:
            raise ValueError(f"encodings must be given for L = {mixing.shape[0]} tokens: an (L, e) matrix")
        encodings = ((1.0,), (-1.0,))
    return DotProduct(
        omega=omega,
        sigma=sigma,
        lam=lam,
        mixing=mixing,
        encodings=jnp.asarray(encodings, dtype),
        teacher=jnp.atleast_2d(jnp.asarray(teacher, dtype)),
        rank=rank,
    )


def is_concrete(*values: Any) -> bool:
    """Whether all arrays have values, so that they can be checked: not while jax traces."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def _entry(name: str) -> tuple[str, tuple[int, ...]]:
    """Field and index that a name like "sigma" or "mixing[0,1]" means."""
    field, _, index = name.partition("[")
    return field, tuple(int(k) for k in index.removesuffix("]").split(",")) if index else ()


def scalar(model: Model, name: str, argument: str, also: str = "") -> float:
    """A number of a concrete model: a scalar field, or an entry of an array, as in "mixing[0,1]".

    Args:
        argument: of the caller, which gave the name.
        also: what that argument may be besides, for the message.

    Raises:
        ValueError: the model has no such number.
    """
    try:
        field, index = _entry(name)
        value = np.asarray(getattr(model, field, None), float)[index]
    except (ValueError, IndexError, TypeError):
        value = np.zeros(1)
    if np.ndim(value) or not np.isfinite(value):
        raise ValueError(
            f"{argument} must name {also}a scalar number of the model or an entry like mixing[0,1], got {argument}={name!r}"
        )
    return float(value)


def with_scalar(model: Model, value: Any, name: str) -> Model:
    """The model with one of its numbers at another value; the rest of a row of `mixing` makes room in proportion."""
    field, index = _entry(name)
    old, value = getattr(model, field), jnp.asarray(value, model.lam.dtype)
    new = old.at[index].set(value) if index else value
    if field == "mixing" and index:
        i, j = index
        new = new.at[i].multiply(jnp.where(jnp.arange(old.shape[1]) == j, 1.0, (1 - value) / (1 - old[i, j])))
    return eqx.tree_at(lambda m: getattr(m, field), model, new)


def require(ok: Any, name: str, value: Any, want: str) -> None:
    """Raise the library's one form of ValueError unless `ok`."""
    if not np.all(np.asarray(ok)):
        shown = np.asarray(value).tolist() if not isinstance(value, str) else repr(value)
        raise ValueError(f"{name} must be {want}, got {name}={shown}")
