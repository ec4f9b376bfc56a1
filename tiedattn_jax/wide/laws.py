"""Laws of the eigenvalues of a wide layer's teacher, with their integrals near the real axis."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex, Float

from ..base.arrays import AnyArray, Number
from ..base.derivatives import with_root
from ..base.errors import as_array, is_concrete, require, require_positive
from ..base.report import Description, Printed

# The islands of many eigenvalues lie between the widest gaps. Their number bounds the cost of an integral over all.
_LEAST_ISLANDS, _MOST_ISLANDS, _ISLANDS_TIMES_EIGENVALUES = 64, 256, 2**18


def is_positive(number: Float[Array, ""]) -> Bool[Array, ""]:
    """Return whether a number, which jax may trace, is positive and finite."""
    return (number > 0) & jnp.isfinite(number)


class Resolvent(NamedTuple):
    """Integrals over the law mu of the eigenvalues x of M S*, at every u and s, with D = (u - x)^2 + s.

    The resolvent at z = u + i v with v^2 = s is P - i v F. Its derivatives are dF/ds = -A, dF/du = -2 B, dP/ds = -B.

    Attributes:
        P: int (u - x) / D.
        F: int 1 / D.
        A: int 1 / D^2.
        B: int (u - x) / D^2.
    """

    P: Float[Array, "*shape"]
    F: Float[Array, "*shape"]
    A: Float[Array, "*shape"]
    B: Float[Array, "*shape"]

    def at(self, v: Float[AnyArray, "*#shape"]) -> Complex[Array, "*shape"]:
        """Return the resolvent."""
        return lax.complex(self.P, -v * self.F)

    def slope(self, v: Float[AnyArray, "*#shape"]) -> Complex[Array, "*shape"]:
        """Return the derivative of the resolvent in z."""
        return lax.complex(2 * v**2 * self.A - self.F, 2 * v * self.B)


class SpectrumLaw(Printed):
    """Law of the eigenvalues of the teacher's matrix S*, which is positive semidefinite."""

    @property
    @abc.abstractmethod
    def trace(self) -> Float[Array, ""]:
        """Mean eigenvalue, Tr S* / d."""

    @property
    @abc.abstractmethod
    def rho(self) -> Float[Array, ""]:
        """Mean squared eigenvalue, Tr S*^2 / d."""

    @property
    @abc.abstractmethod
    def in_range(self) -> Bool[Array, ""]:
        """Whether the numbers of the law, which jax may trace, can be used."""

    @property
    @abc.abstractmethod
    def largest(self) -> Float[Array, ""]:
        """Largest eigenvalue."""

    @property
    @abc.abstractmethod
    def ties(self) -> Float[Array, ""]:
        """Probability that two eigenvalues drawn from the law are equal: the sum of the squared shares of its atoms."""

    @abc.abstractmethod
    def islands(self, M: Float[Array, ""]) -> Float[Array, "K 2"]:
        """Return intervals that cover the support of M S*, in increasing order; a point is one of length zero."""

    @abc.abstractmethod
    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        """Return the `Resolvent` of M S* at u and s."""

    @abc.abstractmethod
    def overlap(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Complex[Array, "*shape"]:
        """Return tr S* / (z - M S*), for z in the upper half-plane."""

    @abc.abstractmethod
    def argument(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Float[Array, "*shape"]:
        """Return the mean argument of z - x over the eigenvalues x of M S*, for z in the upper half-plane.

        On the axis it is pi times the share of the eigenvalues that lie above.
        """

    @abc.abstractmethod
    def eigenvalues(self, d: int) -> Float[np.ndarray, " d"]:
        """Return d eigenvalues that represent the law: its quantiles, in increasing order."""


class Wishart(SpectrumLaw):
    """Teacher S* = W W^T / (d sqrt(kappa)) with a Gaussian W of d x (kappa d) entries: a head of width kappa d.

    Attributes:
        kappa: width of the teacher's head over the dimension.

    Raises:
        InputError: kappa is not one positive number.
    """

    kappa: Float[Array, ""]

    def __init__(self, kappa: Number):
        self.kappa = require_positive(kappa, "kappa", jnp.result_type(float))

    def __check_init__(self) -> None:
        require_positive(self.kappa, "kappa")

    @property
    def in_range(self) -> Bool[Array, ""]:
        return is_positive(self.kappa)

    @property
    def trace(self) -> Float[Array, ""]:
        return jnp.sqrt(self.kappa)

    @property
    def rho(self) -> Float[Array, ""]:
        return 1 + self.kappa

    @property
    def largest(self) -> Float[Array, ""]:
        return (jnp.sqrt(self.kappa) + 1) ** 2 / jnp.sqrt(self.kappa)

    @property
    def ties(self) -> Float[Array, ""]:
        return jnp.maximum(1 - self.kappa, 0.0) ** 2  # below one, a share 1 - kappa of the eigenvalues is zero

    def islands(self, M: Float[Array, ""]) -> Float[Array, "2 2"]:
        root = jnp.sqrt(self.kappa)
        low, high = (M / root * (root + sign) ** 2 for sign in (-1, 1))
        lowest = jnp.where(self.kappa < 1, 0.0, low)
        return jnp.stack([jnp.stack([lowest, lowest]), jnp.stack([low, high])])

    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        """Return the resolvent, the root G of c z G^2 + ((kappa - 1) c - z) G + 1 = 0 with c = M / sqrt(kappa)."""
        u, s = jnp.broadcast_arrays(u, s)
        return _wishart_resolvent(u, s, M / jnp.sqrt(self.kappa), self.kappa)

    def overlap(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Complex[Array, "*shape"]:
        """Return (z G - 1) / M, by the equation for G."""
        G = self.resolvent(z.real, z.imag**2, M).at(z.imag)
        return G * (z * G + self.kappa - 1) / jnp.sqrt(self.kappa)

    def argument(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Float[Array, "*shape"]:
        """Return the imaginary part of int G dz = -log G + kappa (log(1 - c G) + 1 / (1 - c G) - 1)."""
        k, c, v = self.kappa, M / jnp.sqrt(self.kappa), z.imag
        P, F, _, _ = self.resolvent(z.real, v**2, M)
        along, across = 1 - c * P, c * v * F
        return jnp.arctan2(v * F, P) + k * (jnp.arctan2(across, along) - across / (along**2 + across**2))

    def eigenvalues(self, d: int) -> Float[np.ndarray, " d"]:
        kappa, levels = float(self.kappa), (np.arange(d) + 0.5) / d
        low, high = (np.sqrt(kappa) - 1) ** 2, (np.sqrt(kappa) + 1) ** 2
        # x = low + (high - low) (1 - cos angle) / 2 makes the density smooth at both edges. Its factor follows below.
        angle = np.linspace(0, np.pi, 20_001)
        x = low + (high - low) * (1 - np.cos(angle)) / 2
        density = np.sin(angle) ** 2 / np.maximum(x, 1e-300)
        mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angle))])
        mass = max(0.0, 1 - kappa) + mass / mass[-1] * min(1.0, kappa)
        return np.where(levels < 1 - kappa, 0.0, np.interp(levels, mass, x)) / np.sqrt(kappa)

    def describe(self) -> Description:
        return Description(f"Wishart matrix of width {float(self.kappa):g} d")


class Eigenvalues(SpectrumLaw):
    """A law of given eigenvalues with equal weights, such as those of a trained Q K^T made symmetric.

    Attributes:
        values: eigenvalues in increasing order, (K,).

    Raises:
        InputError: an eigenvalue is negative or not finite, or all are zero.
    """

    values: Float[Array, " K"]

    def __init__(self, values: Any):
        values = as_array(values, "eigenvalues", jnp.result_type(float))
        require(values.ndim == 1 and values.size > 0, "eigenvalues", values.shape, "a vector of at least one number")
        if is_concrete(values):
            known = np.asarray(values)  # jax would trace the comparisons, too
            require(np.isfinite(known) & (known >= 0), "eigenvalues", known, "finite and at least zero")
            require(np.any(known > 0), "eigenvalues", known, "positive for at least one")
        self.values = jnp.sort(values)

    @property
    def in_range(self) -> Bool[Array, ""]:
        return jnp.all(jnp.isfinite(self.values) & (self.values >= 0)) & jnp.any(self.values > 0)

    @property
    def trace(self) -> Float[Array, ""]:
        return jnp.mean(self.values)

    @property
    def rho(self) -> Float[Array, ""]:
        return jnp.mean(self.values**2)

    @property
    def largest(self) -> Float[Array, ""]:
        return self.values[-1]

    @property
    def ties(self) -> Float[Array, ""]:
        first, after = (jnp.searchsorted(self.values, self.values, side=side) for side in ("left", "right"))
        return jnp.mean((after - first) / self.values.size)

    def islands(self, M: Float[Array, ""]) -> Float[Array, "K 2"]:
        x = M * self.values
        before: AnyArray = np.arange(x.size - 1)  # the places before a gap between two islands
        most = max(_LEAST_ISLANDS, min(_MOST_ISLANDS, _ISLANDS_TIMES_EIGENVALUES // x.size))
        if x.size > most:
            before = jnp.sort(lax.top_k(jnp.diff(x), most - 1)[1])
        return jnp.stack([jnp.concatenate([x[:1], x[before + 1]]), jnp.concatenate([x[before], x[-1:]])], 1)

    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        u, s = jnp.broadcast_arrays(u, s)
        offset = u[..., None] - M * self.values
        weight = 1 / (offset**2 + s[..., None])
        means = (jnp.mean(a, -1) for a in (offset * weight, weight, weight**2, offset * weight**2))
        return Resolvent(*means)

    def overlap(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Complex[Array, "*shape"]:
        offset, v = z.real[..., None] - M * self.values, z.imag
        share = self.values / (offset**2 + v[..., None] ** 2)
        return lax.complex(jnp.mean(offset * share, -1), -v * jnp.mean(share, -1))

    def argument(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Float[Array, "*shape"]:
        return jnp.mean(jnp.arctan2(z.imag[..., None], z.real[..., None] - M * self.values), -1)

    def eigenvalues(self, d: int) -> Float[np.ndarray, " d"]:
        return np.quantile(np.asarray(self.values), (np.arange(d) + 0.5) / d, method="inverted_cdf")

    def describe(self) -> Description:
        return Description(f"{self.values.size} eigenvalues from {self.values[0]:.4g} to {self.values[-1]:.4g}")


# Under `jit` jax traces the function once for all places and derivatives in which it stands.
@jax.jit
def _wishart_resolvent(u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Resolvent:
    args = u, s, c, k
    parts = with_root(_wishart_residual, jnp.stack(_wishart_parts(*args)), *args, solve=_wishart_solve)
    P, F = parts
    by_s = jnp.stack([c * (2 * P * F - u * F**2) - F, -c * F**2])  # of the residuals
    B, A = _wishart_solve(by_s, parts, *args)
    return Resolvent(P, F, A, B)


def _wishart_parts(u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> tuple[Any, Any]:
    """Return P and F from the closed form of the resolvent."""
    z = lax.complex(u, jnp.sqrt(s))
    middle, radius = (k + 1) * c, 2 * jnp.sqrt(k) * c
    x = z - (k - 1) * c
    root = jnp.sqrt(z - middle - radius) * jnp.sqrt(z - middle + radius)  # positive where z is large
    # Two forms are equal; we take the one without cancellation.
    sum_, difference = x + root, x - root
    is_large = jnp.abs(sum_) >= jnp.abs(difference)
    safe = jnp.where(is_large, 1.0, 2 * c * z)
    G = jnp.where(is_large, 2 / jnp.where(is_large, sum_, 1.0), difference / safe)
    # F = -(G(z) - G(z*)) / (z - z*). Inside the support this quotient has no cancellation. Outside it Im G is as small
    # as v; there the difference of the equations for z and its conjugate z* gives F without 1 / v.
    F = (c * G**2 - G) / (2 * c * jnp.conj(z) * G.real + (k - 1) * c - jnp.conj(z))
    inside = jnp.abs(G.imag) > jnp.finfo(u.dtype).eps ** 0.5 * jnp.abs(G)
    return G.real, jnp.where(inside, -G.imag / jnp.where(inside, z.imag, 1.0), F.real)


def _wishart_residual(parts: AnyArray, u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Array:
    """Return the real part and the imaginary part over v of the equation for G = P - i v F; zero at the resolvent."""
    P, F = parts
    square, twice = P**2 - s * F**2, 2 * P * F
    real = c * (u * square + s * twice + (k - 1) * P) - u * P - s * F + 1
    imaginary = c * (square - u * twice - (k - 1) * F) - P + u * F
    return jnp.stack([real, imaginary])


def _wishart_solve(change: AnyArray, parts: AnyArray, u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Array:
    """Return the step of P and F that changes `_wishart_residual` by `change`, to first order."""
    P, F = parts
    # The derivatives of the residuals in P and F are those of a complex number: a Cauchy-Riemann pair.
    by_P = c * (2 * u * P + 2 * s * F + k - 1) - u
    by_F = 2 * c * s * (P - u * F) - s
    across = 2 * c * (P - u * F) - 1
    along = -c * (2 * s * F + 2 * u * P + k - 1) + u
    determinant = by_P * along - by_F * across
    return jnp.stack([along * change[0] - by_F * change[1], by_P * change[1] - across * change[0]]) / determinant
