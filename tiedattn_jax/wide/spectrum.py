"""Spectra of wide layers: laws of the teacher's eigenvalues, their free convolution with a semicircle, the prior.

The trained matrix of a wide layer is S = (Y - tau)_+ / Lam with Y = M S* + sqrt(N) G, where S* is the teacher's matrix
and G a symmetric Gaussian matrix whose spectrum has radius 2. The density of Y follows from the resolvent of M S* along
a curve above the real axis (Biane 1997): for z = u + i v(u), with v^2 = s(u),

    F(u, s) = int mu(dx) / ((u - M x)^2 + s) = 1 / N,   y(u) = u + N P(u, s),   rho_Y(y(u)) = v / (pi N),

where P - i v F is the resolvent at z. Everything that the equations need is an integral over u, smooth up to the edges.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from ..base.arrays import AnyArray, Number
from ..base.derivatives import bisected_root, derivative_along, with_root, with_tangent
from ..base.errors import as_array, require, require_positive
from ..base.report import Description, Printed

_SECTIONS = 64  # parts into which a round of a search for a root divides the interval
_ROUNDS = 10  # rounds of such a search
_FEW_ROUNDS, _POLISH = 3, 4  # rounds before Newton's method, and its steps
_NEWTON = 40  # steps for s(u); they converge quadratically
_SHRINK = 0.01  # least ratio of s after and before a step
_NODES = 100  # of an interval between two edges, for at most `_FEW` islands; the integrals are then right to 1e-10
_NODES_OF_MANY = 24
_FEW = 4


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
    def zeros(self) -> Float[Array, ""]:
        """Share of the eigenvalues that are zero."""

    @abc.abstractmethod
    def islands(self, M: Float[Array, ""]) -> Float[Array, "K 2"]:
        """Return the intervals of the support of M S*, in increasing order; a point is an interval of length zero."""

    @abc.abstractmethod
    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        """Return the `Resolvent` of M S* at u and s."""

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
    def trace(self) -> Float[Array, ""]:
        return jnp.sqrt(self.kappa)

    @property
    def rho(self) -> Float[Array, ""]:
        return 1 + self.kappa

    @property
    def zeros(self) -> Float[Array, ""]:
        return jnp.maximum(1 - self.kappa, 0.0)

    def islands(self, M: Float[Array, ""]) -> Float[Array, "2 2"]:
        root = jnp.sqrt(self.kappa)
        low, high = (M / root * (root + sign) ** 2 for sign in (-1, 1))
        lowest = jnp.where(self.kappa < 1, 0.0, low)  # below one, a share 1 - kappa of the eigenvalues is zero
        return jnp.stack([jnp.stack([lowest, lowest]), jnp.stack([low, high])])

    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        """Return the resolvent, the root G of c z G^2 + ((kappa - 1) c - z) G + 1 = 0 with c = M / sqrt(kappa)."""
        u, s = jnp.broadcast_arrays(u, s)
        return _wishart_resolvent(u, s, M / jnp.sqrt(self.kappa), self.kappa)

    def eigenvalues(self, d: int) -> Float[np.ndarray, " d"]:
        kappa, levels = float(self.kappa), (np.arange(d) + 0.5) / d
        low, high = (np.sqrt(kappa) - 1) ** 2, (np.sqrt(kappa) + 1) ** 2
        # x = low + (high - low) (1 - cos angle) / 2 makes the density smooth at both edges; it is known up to a factor.
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
        if not isinstance(values, jax.core.Tracer):
            require(jnp.isfinite(values) & (values >= 0), "eigenvalues", values, "finite and at least zero")
            require(jnp.any(values > 0), "eigenvalues", values, "positive for at least one")
        self.values = jnp.sort(values)

    @property
    def trace(self) -> Float[Array, ""]:
        return jnp.mean(self.values)

    @property
    def rho(self) -> Float[Array, ""]:
        return jnp.mean(self.values**2)

    @property
    def zeros(self) -> Float[Array, ""]:
        return jnp.mean(jnp.where(self.values == 0, 1.0, 0.0))

    def islands(self, M: Float[Array, ""]) -> Float[Array, "K 2"]:
        return jnp.stack([M * self.values] * 2, 1)

    def resolvent(
        self, u: Float[AnyArray, "*#shape"], s: Float[AnyArray, "*#shape"], M: Float[AnyArray, ""]
    ) -> Resolvent:
        u, s = jnp.broadcast_arrays(u, s)
        offset = u[..., None] - M * self.values
        weight = 1 / (offset**2 + s[..., None])
        means = (jnp.mean(a, -1) for a in (offset * weight, weight, weight**2, offset * weight**2))
        return Resolvent(*means)

    def eigenvalues(self, d: int) -> Float[np.ndarray, " d"]:
        return np.quantile(np.asarray(self.values), (np.arange(d) + 0.5) / d, method="inverted_cdf")

    def describe(self) -> Description:
        return Description(f"{self.values.size} eigenvalues from {self.values[0]:.4g} to {self.values[-1]:.4g}")


# jax traces a function under `jit` once for all places, and for all derivatives, in which it stands.
@jax.jit
def _wishart_resolvent(u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Resolvent:
    args = u, s, c, k
    parts = _attach_parts(lax.stop_gradient(jnp.stack(_wishart_parts(*args))), *args)
    P, F = parts
    by_s = jnp.stack([c * (2 * P * F - u * F**2) - F, -c * F**2])  # of the residuals
    B, A = -_wishart_change(parts, by_s, *args)
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
    # F = -(G(z) - G(z*)) / (z - z*), from the difference of the equations for z and its conjugate z*; no 1 / v is left.
    F = (c * G**2 - G) / (2 * c * jnp.conj(z) * G.real + (k - 1) * c - jnp.conj(z))
    return G.real, F.real


def _wishart_residual(parts: AnyArray, u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Array:
    """Return the real part and the imaginary part over v of the equation for G = P - i v F; zero at the resolvent."""
    P, F = parts
    square, twice = P**2 - s * F**2, 2 * P * F
    real = c * (u * square + s * twice + (k - 1) * P) - u * P - s * F + 1
    imaginary = c * (square - u * twice - (k - 1) * F) - P + u * F
    return jnp.stack([real, imaginary])


def _wishart_change(parts: AnyArray, change: AnyArray, u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Array:
    """Return the change of P and F that undoes a change of `_wishart_residual`, to first order."""
    P, F = parts
    # The derivatives of the residuals in P and F are those of a complex number: a Cauchy-Riemann pair.
    by_P = c * (2 * u * P + 2 * s * F + k - 1) - u
    by_F = 2 * c * s * (P - u * F) - s
    across = 2 * c * (P - u * F) - 1
    along = -c * (2 * s * F + 2 * u * P + k - 1) + u
    determinant = by_P * along - by_F * across
    return jnp.stack([by_F * change[1] - along * change[0], across * change[0] - by_P * change[1]]) / determinant


@with_tangent
def _attach_parts(primals: tuple, tangents: tuple) -> Float[Array, "2 *shape"]:
    parts, *args = primals
    change = derivative_along(lambda *args: _wishart_residual(parts, *args), tuple(args), tangents[1:])
    return _wishart_change(parts, change, *args)


class Nodes(NamedTuple):
    """Nodes of the spectrum of Y; integrals over the density are sums over the weights.

    Attributes:
        u: subordination variable at every node, (n,), increasing.
        y: eigenvalue of Y there.
        density: rho_Y(y).
        weight: share of the eigenvalues that the node stands for.
    """

    u: Float[Array, " n"]
    y: Float[Array, " n"]
    density: Float[Array, " n"]
    weight: Float[Array, " n"]


class Convolution(NamedTuple):
    """The curve u of the spectrum of Y = M S* + sqrt(N) G, in one interval for every island of the teacher's spectrum.

    Attributes:
        law, M, N: what Y is made of.
        low, high: ends of the intervals, (K,).
    """

    law: SpectrumLaw
    M: Float[Array, ""]
    N: Float[Array, ""]
    low: Float[Array, " K"]
    high: Float[Array, " K"]

    @property
    def top(self) -> Float[Array, ""]:
        """The largest eigenvalue of Y."""
        return self.high[-1] + self.N * self.law.resolvent(self.high[-1], jnp.zeros_like(self.M), self.M).P

    def eigenvalue(self, u: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        """Return y(u) and its derivative."""
        _, y, slope = self._at(u, _s(self.law, u, self.M, self.N))
        return y, slope

    def _at(self, u: Array, s: Array) -> tuple[Array, Array, Array]:
        P, _, A, B = self.law.resolvent(u, s, self.M)
        return jnp.sqrt(s) / (np.pi * self.N), u + self.N * P, 2 * self.N * (B**2 / A + s * A)

    def nodes(self, start: Float[Array, ""] | None = None, end: Float[Array, ""] | None = None) -> Nodes:
        """Return the nodes between two places u, see `place`; by default those of the whole spectrum.

        Every interval is integrated by Gauss-Legendre nodes in the angle theta of
        u = low + (high - low) (1 - cos theta) / 2, which makes the square roots at the edges smooth.
        """
        low, high = (jnp.clip(a, start, end) for a in (self.low, self.high))
        dtype = self.M.dtype
        x, weights = np.polynomial.legendre.leggauss(_NODES if low.size <= _FEW else _NODES_OF_MANY)
        angle = jnp.asarray((x + 1) * np.pi / 2, dtype)
        width = (high - low)[:, None]
        u = (low[:, None] + width * (1 - jnp.cos(angle)) / 2).ravel()
        du = (width * jnp.sin(angle) * jnp.asarray(weights, dtype) * np.pi / 4).ravel()
        s = jnp.maximum(_s(self.law, u, self.M, self.N), jnp.finfo(dtype).tiny)
        density, y, slope = self._at(u, s)
        return Nodes(u, y, density, density * slope * du)

    def place(self, y: Float[Array, ""]) -> Float[Array, ""]:
        """Return u with y(u) = y, or the end of the spectrum on its side."""

        def gap(u: Array, y: Array, curve: Convolution) -> Array:
            return curve.eigenvalue(u)[0] - y

        y_, curve = frozen = lax.stop_gradient((y, self))

        def step(_: Any, u: Array) -> Array:  # Newton's, from the middle of a short interval
            at, slope = curve.eigenvalue(u)
            return jnp.clip(u - (at - y_) / slope, curve.low[0], curve.high[-1])

        u = _root(lambda u: gap(u, *frozen), self.low[0], self.high[-1], _FEW_ROUNDS)
        u = lax.fori_loop(0, _POLISH, step, u)
        return with_root(gap, u, y, self, slope=lambda u, y, curve: curve.eigenvalue(u)[1])

    def quantile(self, share: Float[Array, ""]) -> Float[Array, ""]:
        """Return u such that a share of the eigenvalues of Y lies above y(u)."""

        def excess(u: Array, share: Array, curve: Convolution) -> Array:
            return share - jnp.sum(curve.nodes(u).weight)

        def slope(u: Array, share: Array, curve: Convolution) -> Array:
            density, _, slope = curve._at(u, _s(curve.law, u, curve.M, curve.N))
            return density * slope

        frozen = lax.stop_gradient((share, self))
        u = bisected_root(lambda u: excess(u, *frozen), self.low[0], self.high[-1])
        return with_root(excess, u, share, self, slope=slope)

    def first_place(self, tau: Array, kappa: Array, binds: Bool[Array, ""] | None) -> Float[Array, ""]:
        """Return the place u from which on eigenvalues count: that of tau, or a higher one if kappa bounds the rank."""
        start = self.place(tau)
        if binds is None:
            return start
        return lax.cond(binds, lambda: jnp.maximum(start, self.quantile(jnp.minimum(kappa, 1.0))), lambda: start)


@jax.jit
def convolution(law: SpectrumLaw, M: Float[Array, ""], N: Float[Array, ""]) -> Convolution:
    """Return the free convolution of the law of M S* with a semicircle of radius 2 sqrt(N).

    Outside the islands F(u, 0) is convex in every gap. The spectrum of Y has a gap where its minimum is below 1 / N;
    otherwise the neighbouring intervals meet at the minimum.
    """
    law_, M_, N_ = lax.stop_gradient((law, M, N))
    islands, zero = law_.islands(M_), jnp.zeros((), M.dtype)

    def excess(u: Array) -> Array:  # positive inside the support of Y
        return N_ * law_.resolvent(u, zero, M_).F - 1

    left, right, reach = islands[:-1, 1], islands[1:, 0], jnp.sqrt(N_)
    lowest = _root(lambda u: -law_.resolvent(u, zero, M_).B, left, right)
    # Ends of the search for every edge: outwards from each island, to the middle of the gap or as far as Y can reach.
    middles = jnp.concatenate([islands[:1, 0] - reach, lowest, islands[-1:, 1] + reach])
    outer, inner = jnp.concatenate([middles[:-1], middles[1:]]), jnp.concatenate([islands[:, 0], islands[:, 1]])
    edges = inner + (outer - inner) * _root(lambda x: -excess(inner + (outer - inner) * x), 0 * inner, 0 * inner + 1)
    is_edge = jnp.abs(edges - outer) > 0
    is_edge &= excess(outer) < 0
    outside = islands[-1, 1] + 2 * reach  # a place where all is finite, for what is no edge
    edges = with_root(
        lambda u, law, M, N: N * law.resolvent(u, jnp.zeros_like(M), M).F - 1,
        jnp.where(is_edge, edges, outside),
        law,
        M,
        N,
        slope=lambda u, law, M, N: -2 * N * law.resolvent(u, jnp.zeros_like(M), M).B,
    )
    edges = jnp.where(is_edge, edges, outer)
    return Convolution(law, M, N, *jnp.split(edges, 2))


def _root(fn: Callable[[Array], Array], low: Array, high: Array, rounds: int = _ROUNDS) -> Array:
    """Return the root of a function that is negative at `low` and positive at `high`, elementwise.

    Every round evaluates the function at `_SECTIONS` - 1 points between the ends at once.
    """
    parts = jnp.arange(1, _SECTIONS) / _SECTIONS

    def shrink(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, width = ends
        points = low + width * parts.astype(low.dtype).reshape(-1, *[1] * low.ndim)
        return low + width / _SECTIONS * jnp.sum(fn(points) < 0, axis=0), width / _SECTIONS

    low, high = lax.stop_gradient(jnp.broadcast_arrays(low, high))
    low, width = lax.fori_loop(0, rounds, shrink, (low, high - low))
    return low + 0.5 * width


@jax.jit
def _s(law: SpectrumLaw, u: Array, M: Array, N: Array) -> Array:
    """Return s(u), the root of F(u, s) = 1 / N; nearly zero outside the support of Y."""
    law_, u_, M_, N_ = lax.stop_gradient((law, u, M, N))

    def step(_: Any, s: Array) -> Array:
        # Newton's step for the concave function 1 / F - N of s; from above it can overshoot, from below it cannot.
        at = law_.resolvent(u_, s, M_)
        return jnp.maximum(s - (1 / at.F - N_) * at.F**2 / at.A, _SHRINK * s)

    s = lax.fori_loop(0, _NEWTON, step, jnp.full_like(u_, N_))

    def excess(s: Array, law: SpectrumLaw, u: Array, M: Array, N: Array) -> Array:
        return N * law.resolvent(u, s, M).F - 1

    return with_root(excess, s, law, u, M, N, slope=lambda s, law, u, M, N: -N * law.resolvent(u, s, M).A)


class Prior(NamedTuple):
    """The prior's potential Phi(M, N, tau) = 1/2 int rho_Y f^2 with f(y) = (y - tau)_+, and its derivatives.

    Attributes:
        phi: the potential.
        by_M: d phi / d M, which is tr S* f(Y).
        by_N: d phi / d N.
        trace: int rho_Y f, which is minus d phi / d tau.
        share: share of the eigenvalues that count.
    """

    phi: Float[Array, ""]
    by_M: Float[Array, ""]
    by_N: Float[Array, ""]
    trace: Float[Array, ""]
    share: Float[Array, ""]


def prior(curve: Convolution, tau: Float[Array, ""], start: Float[Array, ""]) -> Prior:
    """Return the prior's potential and its derivatives.

    Args:
        start: place u from which on eigenvalues count: that of tau, or a higher one if the rank is bounded.
    """
    Y = curve.nodes(start)
    f = jnp.maximum(Y.y - tau, 0.0)

    def mean(values: Array) -> Array:
        return jnp.sum(Y.weight * values)

    by_M, by_N = mean(f * (2 * Y.u - Y.y)) / curve.M, mean(f * (Y.y - Y.u)) / curve.N
    return Prior(0.5 * mean(f**2), by_M, by_N, mean(f), mean(jnp.ones_like(f)))


def stability(curve: Convolution, tau: Float[Array, ""], start: Float[Array, ""]) -> Float[Array, ""]:
    """Return 1/2 int int rho rho f[x, y]^2, the prior's factor of the replicon; f[x, y] is the divided difference.

    Args:
        start: the place u of tau.
    """
    above, below = curve.nodes(start), curve.nodes(end=start)
    f = jnp.maximum(above.y - tau, 0.0)
    # Both above: f[x, y] = 1. One below, which counts twice: f[x, y] = f(x) / (x - y).
    gap = above.y[:, None] - below.y
    mixed = jnp.where(gap > 0, f[:, None] / jnp.where(gap > 0, gap, 1.0), 0.0) ** 2
    return 0.5 * jnp.sum(above.weight) ** 2 + above.weight @ mixed @ below.weight
