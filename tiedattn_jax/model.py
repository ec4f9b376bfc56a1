"""The model: one scalar loss of the local fields, and the law of the data. Everything else follows from these."""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp


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

    # What a layer may offer besides, by writing the method; `provides` says whether it does.

    def target(self, Y: jax.Array) -> jax.Array:
        """Target attention matrix T(Y), (L, L). Its mean is the linear baseline; sampled data get exact labels."""
        raise NotImplementedError(self._missing("target(Y)"))

    def student(self, Z: jax.Array) -> jax.Array:
        """Attention matrix S(Z) of the student, (L, L), for the squared error on exact labels."""
        raise NotImplementedError(self._missing("student(Z)"))

    def with_teacher(self, gram: jax.Array) -> Model:
        """The model at another ``Q*^T Q* / d``, (t, t): the one that an instance of finite size has drawn."""
        raise NotImplementedError(self._missing("with_teacher(gram)"))

    @classmethod
    def provides(cls, method: str) -> bool:
        """Whether the layer has written one of the optional methods "target", "student" and "with_teacher"."""
        return getattr(cls, method) is not getattr(Model, method)

    def _missing(self, method: str) -> str:
        return f"{type(self).__name__} must have a method `{method}` for this: see tiedattn_jax.Model"
