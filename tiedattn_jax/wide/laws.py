"""Laws of the eigenvalues or singular values of a wide layer's teacher, with their integrals near the real axis.

A law of singular values is symmetric: every value s stands in it as s and as -s, with half of its weight. The free
convolution of that law with a semicircle is the symmetric law of the singular values of the matrix plus a Gaussian one
with independent entries, so both kinds of layers share their equations.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex, Float

from ..base.arrays import AnyArray, Number, precise
from ..base.derivatives import with_root
from ..base.errors import as_array, is_concrete, require, require_positive, shaped_array
from ..base.report import Description, Printed

# The islands of many eigenvalues lie between the widest gaps. Their number bounds the cost of an integral over all.
_LEAST_ISLANDS, _MOST_ISLANDS, _ISLANDS_TIMES_EIGENVALUES = 64, 256, 2**18
_POLISH = 3  # Newton steps after the closed form of a cubic root


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
        return _factors_resolvent(u, s, M, self.kappa)

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
        # In the interval two roots of the equation for X, see `_factors_root`, are complex.
        s = low + (high - low) * (1 - np.cos(np.linspace(0, np.pi, 20_001))) / 2
        Z = k * s[1:-1].astype(complex) ** 2
        roots = np.asarray(_cubic_roots(k - 1, -Z, Z, np))
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
        return jnp.mean((after - first) / atoms.size)

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
        InputError: the factors are no matrices of the same shape, or have a number that is not finite.
    """
    sizes: dict[str, int] = {}
    factors = [shaped_array(name, W, "d d_head", sizes) for name, W in (("W_Q", W_Q), ("W_K", W_K))]
    Q, K = (jnp.asarray(W, jnp.promote_types(W.dtype, jnp.float32)) for W in factors)  # also those in half precision
    return _values_of_product(Q, K)


@jax.jit
@precise
def _values_of_product(Q: Float[Array, "d h"], K: Float[Array, "d h"]) -> Float[Array, " d"]:
    triangle_Q, triangle_K = (jnp.linalg.qr(W, mode="r") for W in (Q, K))
    values = jnp.linalg.svd(triangle_Q @ triangle_K.T, compute_uv=False)[::-1]
    return jnp.concatenate([jnp.zeros(len(Q) - len(values), values.dtype), values])


# A number a + i v b is a pair (a, b), of which an array has the parts along its first axis. With z = (u, 1) and the
# resolvent G = (P, -F), an equation for G with real coefficients has no 0 / 0 on the axis, where v = 0.


def _times(x: AnyArray, y: AnyArray, s: AnyArray) -> Float[Array, "2 *shape"]:
    """Return the product of two pairs, s = v^2."""
    return jnp.stack([x[0] * y[0] - s * x[1] * y[1], x[0] * y[1] + x[1] * y[0]])


def _constant(value: Any, like: Any) -> Float[Array, "2 *shape"]:
    """Return a real number as a pair."""
    return jnp.zeros_like(like).at[0].set(value)


# An equation for the resolvent returns its value and its derivative from G, z, s and the numbers of the law.
_Equation = Callable[..., tuple[Float[Array, "2 *shape"], Float[Array, "2 *shape"]]]


def _step(change: AnyArray, slope: AnyArray, s: AnyArray) -> Float[Array, "2 *shape"]:
    """Return change / slope; zero where two roots meet."""
    size = slope[0] ** 2 + s * slope[1] ** 2
    conjugate = jnp.stack([slope[0], -slope[1]])
    return _times(change, conjugate, s) / jnp.where(size == 0, jnp.inf, size)


def _resolvent_of(equation: _Equation, G: AnyArray, u: AnyArray, s: AnyArray, *numbers: AnyArray) -> Resolvent:
    """Return the resolvent with its derivatives from the root G of its equation."""

    def parts(G: Any, u: Any, s: Any, *numbers: Any) -> tuple[Array, Array]:
        return equation(G, jnp.stack([u, jnp.ones_like(u)]), s, *numbers)

    def residual(*at: Any) -> Array:
        return parts(*at)[0]

    def solve(change: Array, *at: Any) -> Array:
        return _step(change, parts(*at)[1], at[2])

    G = with_root(residual, jnp.asarray(G), u, s, *numbers, solve=solve)
    by_s = jax.jvp(lambda s: residual(G, u, s, *numbers), (s,), (jnp.ones_like(s),))[1]
    B, minus_A = solve(by_s, G, u, s, *numbers)
    return Resolvent(G[0], -G[1], -minus_A, B)


# Under `jit` jax traces a function once for all places and derivatives in which it stands.
@jax.jit
def _wishart_resolvent(u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Resolvent:
    return _resolvent_of(_wishart_equation, _wishart_root(u, s, c, k), u, s, c, k)


def _wishart_equation(G: Any, z: Any, s: AnyArray, c: AnyArray, k: AnyArray) -> tuple[Array, Array]:
    zG, shift = _times(z, G, s), (k - 1) * c
    return c * _times(zG, G, s) + shift * G - zG + _constant(1.0, G), 2 * c * zG + _constant(shift, G) - z


def _wishart_root(u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Float[Array, "2 *shape"]:
    """Return the closed form of the resolvent."""
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
    return jnp.stack([G.real, -jnp.where(inside, -G.imag / jnp.where(inside, z.imag, 1.0), F.real)])


@jax.jit
def _factors_resolvent(u: AnyArray, s: AnyArray, M: AnyArray, k: AnyArray) -> Resolvent:
    return _resolvent_of(_factors_equation, _factors_root(u, s, M, k), u, s, M, k)


def _factors_equation(G: Any, z: AnyArray, s: AnyArray, M: AnyArray, k: AnyArray) -> tuple[Array, Array]:
    zG, MG = _times(z, G, s), M * G
    square = _times(MG, MG, s)
    value = _times(zG, square, s) - (1 - k) * square - k * zG + _constant(k, G)
    return value, 3 * _times(z, square, s) - 2 * (1 - k) * M * MG - k * z


def _factors_root(u: AnyArray, s: AnyArray, M: AnyArray, k: AnyArray) -> Float[Array, "2 *shape"]:
    """Return the resolvent from the roots X = z G of X^3 - (1 - k) X^2 = Z (X - 1) with Z = k (z / M)^2.

    For z in the first quadrant the resolvent is the root for which -X, -X / Z and (1 - k - X) X / Z have positive
    imaginary parts. On the axes we choose at a place nearby.
    """
    u, s, M, k = lax.stop_gradient((u, s, M, k))
    eps = jnp.finfo(M.dtype).eps
    near = eps ** (2 / 3) * jnp.maximum(jnp.sqrt(u**2 + s), M)
    v = jnp.maximum(jnp.sqrt(s), near)
    z = lax.complex(jnp.maximum(jnp.abs(u), near), v)
    inverse = (M / z) ** 2 / k  # 1 / Z
    is_far = jnp.abs(inverse) * jnp.maximum(k, 1.0) < eps**0.5
    Z = 1 / jnp.where(is_far, 1.0, inverse)
    roots = _cubic_roots(k - 1, -Z, Z)
    tests = jnp.stack([-roots, -roots / Z, (1 - k - roots) * roots / Z])
    best = jnp.argmax(jnp.min(tests.imag / jnp.abs(tests), 0), 0)
    X = jnp.where(is_far, 1 + k * inverse, jnp.take_along_axis(roots, best[None], 0)[0])
    G = X / z
    G = jnp.stack([jnp.where(u < 0, -G.real, G.real), G.imag / v])
    place = jnp.stack([u, jnp.ones_like(u)])

    def polished(_: Any, G: Array) -> Array:
        value, slope = _factors_equation(G, place, s, M, k)
        return G - _step(value, slope, s)

    return lax.fori_loop(0, _POLISH, polished, G)


def _cubic_roots(b: Any, c: Any, d: Any, xp: Any = jnp) -> Complex[AnyArray, "3 *shape"]:
    """Return the roots of x^3 + b x^2 + c x + d by Cardano's formula, as arrays of jax or of numpy."""
    first, second = b**2 - 3 * c, 2 * b**3 - 9 * b * c + 27 * d
    root = xp.sqrt(second**2 - 4 * first**3)
    larger = xp.where(xp.abs(second + root) >= xp.abs(second - root), second + root, second - root)
    cube = (larger / 2) ** (1 / 3)
    safe = xp.where(cube == 0, 1.0, cube)
    unit = np.exp(2j * np.pi / 3 * np.arange(3)).reshape(3, *[1] * xp.ndim(cube)).astype(cube.dtype)
    return -(b + unit * cube + first / (unit * safe)) / 3
