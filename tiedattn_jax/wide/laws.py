"""Laws of the eigenvalues or singular values of a wide layer's teacher, with their integrals near the real axis.

A law of singular values is symmetric: every value s stands in it as s and as -s, with half of its weight. The free
convolution of that law with a semicircle is the symmetric law of the singular values of the matrix plus a Gaussian one
with independent entries, so both kinds of layers share their equations.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex, Float

from ..base.arrays import AnyArray, Number, precise
from ..base.errors import InputError, as_array, is_concrete, require, require_positive, shaped_array
from ..base.report import Description, Printed
from .resolvents import Resolvent, cubic_roots, factors_resolvent, wishart_resolvent

# The islands of many eigenvalues lie between the widest gaps. Their number bounds the cost of an integral over all.
_LEAST_ISLANDS, _MOST_ISLANDS, _ISLANDS_TIMES_EIGENVALUES = 64, 256, 2**18


def is_positive(number: Float[Array, ""]) -> Bool[Array, ""]:
    """Return whether a number, which jax may trace, is positive and finite."""
    return (number > 0) & jnp.isfinite(number)


class SpectrumLaw(Printed):
    """Law of the eigenvalues of the teacher's matrix S*, which is positive semidefinite, or of its singular values.

    Integrals of a law of singular values are those of the symmetric law, see the head of the file.
    """

    SYMMETRIC: ClassVar[bool] = False  # whether it is a law of singular values

    @property
    @abc.abstractmethod
    def rho(self) -> Float[Array, ""]:
        """Mean squared eigenvalue or singular value, Tr S* S*^T / d."""

    @property
    @abc.abstractmethod
    def in_range(self) -> Bool[Array, ""]:
        """Whether the numbers of the law, which jax may trace, can be used."""

    @property
    @abc.abstractmethod
    def largest(self) -> Float[Array, ""]:
        """Largest eigenvalue or singular value."""

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
        """Return d eigenvalues or singular values that represent the law: its quantiles, in increasing order."""


class GaussianLaw(SpectrumLaw):
    """Law of a matrix of Gaussian factors of width kappa d; below one, a share 1 - kappa of its values is zero.

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
    def ties(self) -> Float[Array, ""]:
        return jnp.maximum(1 - self.kappa, 0.0) ** 2


class Wishart(GaussianLaw):
    """Teacher S* = W W^T / (d sqrt(kappa)) with a Gaussian W of d x (kappa d) entries: a head of width kappa d."""

    def __init__(self, kappa: Number):
        super().__init__(kappa)

    @property
    def rho(self) -> Float[Array, ""]:
        return 1 + self.kappa

    @property
    def largest(self) -> Float[Array, ""]:
        return (jnp.sqrt(self.kappa) + 1) ** 2 / jnp.sqrt(self.kappa)

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
        return wishart_resolvent(u, s, M / jnp.sqrt(self.kappa), self.kappa)

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
        density = np.divide(np.sin(angle) ** 2, x, out=np.full_like(x, 4 / (high - low)), where=x > 0)
        mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(angle))])
        mass = max(0.0, 1 - kappa) + mass / mass[-1] * min(1.0, kappa)
        return np.where(levels < 1 - kappa, 0.0, np.interp(levels, mass, x)) / np.sqrt(kappa)

    def describe(self) -> Description:
        return Description(f"Wishart matrix of width {float(self.kappa):g} d")


class GaussianFactors(GaussianLaw):
    """Singular values of a teacher S* = Q K^T / (d sqrt(kappa)) with Gaussian Q and K of d x (kappa d) entries.

    Their mean square is one for every width.
    """

    SYMMETRIC = True

    def __init__(self, kappa: Number):
        super().__init__(kappa)

    @property
    def rho(self) -> Float[Array, ""]:
        return jnp.ones_like(self.kappa)

    @property
    def largest(self) -> Float[Array, ""]:
        return self._edges[1]

    @property
    def _edges(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Ends of the interval of positive singular values; squares times kappa are the roots of a quadratic."""
        k = self.kappa
        high = (27 - 18 * (1 - k) - (1 - k) ** 2 + jnp.sqrt(k * (8 + k) ** 3)) / 8
        low = jnp.where(k < 1, jnp.maximum(1 - k, 0.0) ** 3 / high, 1.0)
        return jnp.where(k < 1, jnp.sqrt(low / k), 0.0), jnp.sqrt(high / k)

    def islands(self, M: Float[Array, ""]) -> Float[Array, "3 2"]:
        low, high = (M * edge for edge in self._edges)
        zero = jnp.zeros_like(high)
        return jnp.stack([jnp.stack([-high, -low]), jnp.stack([zero, zero]), jnp.stack([low, high])])

    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        """Return the resolvent, the root of M^2 z G^3 - (1 - kappa) M^2 G^2 - kappa z G + kappa = 0."""
        u, s = jnp.broadcast_arrays(u, s)
        return factors_resolvent(u, s, M, self.kappa)

    def overlap(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Complex[Array, "*shape"]:
        """Return (z G - 1) / M, by the equation for G."""
        G = self.resolvent(z.real, z.imag**2, M).at(z.imag)
        return M * G**2 * (z * G - 1 + self.kappa) / self.kappa

    def argument(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Float[Array, "*shape"]:
        """Return the imaginary part of int G dz = X + ((1 - kappa) log(X - 1 + kappa) - log(X - 1)) / 2, X = z G."""
        u, v, k = z.real, z.imag, self.kappa
        P, F, _, _ = self.resolvent(u, v**2, M)
        X, down = u * P + v**2 * F, jnp.abs(v * (P - u * F))  # the law is symmetric; Im X is negative for u > 0
        half = ((1 - k) * jnp.arctan2(down, X - 1 + k) - jnp.arctan2(down, X - 1)) / 2
        return jnp.where(u < 0, np.pi + half + down, -half - down)

    def eigenvalues(self, d: int) -> Float[np.ndarray, " d"]:
        k, levels = float(self.kappa), (np.arange(d) + 0.5) / d
        low, high = (float(edge) for edge in self._edges)
        # In the interval two roots of the equation for X, see `resolvents`, are complex.
        s = low + (high - low) * (1 - np.cos(np.linspace(0, np.pi, 20_001))) / 2
        Z = k * s[1:-1].astype(complex) ** 2
        roots = np.asarray(cubic_roots(k - 1, -Z, Z, np))
        X = np.take_along_axis(roots, roots.imag.argmin(0)[None], 0)[0]
        above = (2 * X.imag + (1 - k) * np.angle(X - 1 + k) - np.angle(X - 1)) / np.pi
        below = np.maximum.accumulate(np.concatenate([[max(1 - k, 0.0)], 1 - above, [1.0]]))
        return np.where(levels < 1 - k, 0.0, np.interp(levels, below, s))

    def describe(self) -> Description:
        return Description(f"product of Gaussian factors of width {float(self.kappa):g} d")


class Eigenvalues(SpectrumLaw):
    """A law of given eigenvalues with equal weights, such as those of a trained Q K^T made symmetric.

    Attributes:
        values: eigenvalues in increasing order, (K,).

    Raises:
        InputError: an eigenvalue is negative or not finite, or all are zero.
    """

    NOUN: ClassVar[str] = "eigenvalues"
    values: Float[Array, " K"]

    def __init__(self, values: Any):
        values = as_array(values, self.NOUN, jnp.result_type(float))
        require(values.ndim == 1 and values.size > 0, self.NOUN, values.shape, "a vector of at least one number")
        if is_concrete(values):
            known = np.asarray(values)  # jax would trace the comparisons, too
            require(np.isfinite(known) & (known >= 0), self.NOUN, known, "finite and at least zero")
            require(np.any(known > 0), self.NOUN, known, "positive for at least one")
        self.values = jnp.sort(values)

    @property
    def atoms(self) -> Float[Array, " N"]:
        """Places of equal weight where the law is, in increasing order."""
        return jnp.concatenate([-self.values[::-1], self.values]) if self.SYMMETRIC else self.values

    @property
    def in_range(self) -> Bool[Array, ""]:
        return jnp.all(jnp.isfinite(self.values) & (self.values >= 0)) & jnp.any(self.values > 0)

    @property
    def rho(self) -> Float[Array, ""]:
        return jnp.mean(self.values**2)

    @property
    def largest(self) -> Float[Array, ""]:
        return self.values[-1]

    @property
    def ties(self) -> Float[Array, ""]:
        atoms = self.atoms
        # Values that rounding alone tells apart are equal, such as the zeros of a product of thin factors.
        same = atoms.size * jnp.finfo(atoms.dtype).eps * self.largest
        ends = zip((atoms - same, atoms + same), ("left", "right"), strict=True)
        first, after = (jnp.searchsorted(atoms, end, side=side) for end, side in ends)
        return jnp.mean((after - first).astype(atoms.dtype)) / atoms.size

    def islands(self, M: Float[Array, ""]) -> Float[Array, "K 2"]:
        x = M * self.atoms
        before: AnyArray = np.arange(x.size - 1)  # the places before a gap between two islands
        most = max(_LEAST_ISLANDS, min(_MOST_ISLANDS, _ISLANDS_TIMES_EIGENVALUES // x.size))
        if x.size > most:
            before = jnp.sort(lax.top_k(jnp.diff(x), most - 1)[1])
        return jnp.stack([jnp.concatenate([x[:1], x[before + 1]]), jnp.concatenate([x[before], x[-1:]])], 1)

    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        u, s = jnp.broadcast_arrays(u, s)
        offset = u[..., None] - M * self.atoms
        weight = 1 / (offset**2 + s[..., None])
        means = (jnp.mean(a, -1) for a in (offset * weight, weight, weight**2, offset * weight**2))
        return Resolvent(*means)

    def overlap(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Complex[Array, "*shape"]:
        offset, v = z.real[..., None] - M * self.atoms, z.imag
        share = self.atoms / (offset**2 + v[..., None] ** 2)
        return lax.complex(jnp.mean(offset * share, -1), -v * jnp.mean(share, -1))

    def argument(self, z: Complex[Array, "*shape"], M: Float[Array, ""]) -> Float[Array, "*shape"]:
        return jnp.mean(jnp.arctan2(z.imag[..., None], z.real[..., None] - M * self.atoms), -1)

    def eigenvalues(self, d: int) -> Float[np.ndarray, " d"]:
        return np.quantile(np.asarray(self.values), (np.arange(d) + 0.5) / d, method="inverted_cdf")

    def describe(self) -> Description:
        return Description(f"{self.values.size} {self.NOUN} from {self.values[0]:.4g} to {self.values[-1]:.4g}")


class SingularValues(Eigenvalues):
    """A law of given singular values with equal weights, such as those of a trained W_Q W_K^T.

    Attributes:
        values: singular values in increasing order, (K,).

    Raises:
        InputError: a value is negative or not finite, or all are zero.
    """

    SYMMETRIC = True
    NOUN = "singular values"


def singular_values(W_Q: Any, W_K: Any) -> Float[Array, " d"]:
    """Return the singular values of W_Q W_K^T in increasing order, without the matrix itself.

    Args:
        W_Q, W_K: the factors of a head, (d, d_head); where d_head is below d, d - d_head of the values are zero.

    Raises:
        InputError: the factors are no matrices of the same shape with d_head <= d, or have a number that is not finite.
    """
    sizes: dict[str, int] = {}
    factors = [shaped_array(name, W, "d d_head", sizes) for name, W in (("W_Q", W_Q), ("W_K", W_K))]
    if sizes["d_head"] > sizes["d"]:
        text = "must have shape (d, d_head) with d_head at most d: transpose weights that are stored as (out, in)"
        raise InputError("W_Q", f"{text}, got shape {factors[0].shape}")
    Q, K = (jnp.asarray(W, jnp.promote_types(W.dtype, jnp.float32)) for W in factors)  # also those in half precision
    return _values_of_product(Q, K)


@jax.jit
@precise
def _values_of_product(Q: Float[Array, "d h"], K: Float[Array, "d h"]) -> Float[Array, " d"]:
    triangle_Q, triangle_K = (jnp.linalg.qr(W, mode="r") for W in (Q, K))
    values = jnp.linalg.svd(triangle_Q @ triangle_K.T, compute_uv=False)[::-1]
    return jnp.concatenate([jnp.zeros(len(Q) - len(values), values.dtype), values])
