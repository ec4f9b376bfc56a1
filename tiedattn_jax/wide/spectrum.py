"""Spectra of wide layers: the free convolution of the teacher's spectrum with a semicircle, and the prior's potential.

The trained matrix of a wide layer is S = (Y - tau)_+ / Lam with Y = M S* + sqrt(N) G, where S* is the teacher's matrix
and G a symmetric Gaussian matrix whose spectrum has radius 2. The resolvent of Y at y(z) = z + N g(z) is that of M S*
at z, g(z). Real y belong to a curve z = u + i v(u) above the axis (Biane 1997): with v^2 = s(u),

    F(u, s) = int mu(dx) / ((u - M x)^2 + s) = 1 / N,   y(u) = u + N P(u, s),   rho_Y(y(u)) = v / (pi N),

where g = P - i v F. In gaps of the spectrum of Y the curve runs on the axis, v = 0 and F < 1 / N.

For untied layers G has independent entries, and S = f(Y) / Lam with the soft threshold f(y) = (|y| - tau)_+ sign y of
singular values. All laws are then symmetric, and averages over singular values are twice those over one side.

The equations need integrals of rho_Y and a polynomial over all eigenvalues above some place. These are integrals of g
along an arc from that place to the axis beyond the largest eigenvalue. The arc stays away from the spectrum, so the
number of its nodes depends neither on the number of eigenvalues nor on the gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex, Float

from ..base.derivatives import with_root
from .laws import SpectrumLaw

_NEWTON = 100  # maximum number of steps of a search for a root
_HALVINGS = 24  # first steps of the search for a quantile
_ROUNDING = 8.0  # units in the last place of the last step
_SHRINK = 1e-4  # least ratio of s after and before a step
_ARC = 100  # nodes of an arc; its integrals are then right to 1e-10
_BEND = 1.0  # height of an arc over its width
# Number of nodes between two edges for at most `_FEW` islands. Integrals are then right to 1e-10, and to 7e-5 at a hard
# edge, as `Wishart(1)` has.
_NODES = 100
_NODES_OF_MANY = 24
_FEW = 4


class SpectrumNodes(NamedTuple):
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


class Arc(NamedTuple):
    """Nodes of an arc in the upper half-plane, from a place of the curve to the axis beyond the spectrum.

    Attributes:
        y: z + N g(z) at every node, (n,).
        dy: its change along the arc, with the weight of the node.
        resolvent: g(z).
        overlap: tr S* / (z - M S*).
    """

    y: Complex[Array, " n"]
    dy: Complex[Array, " n"]
    resolvent: Complex[Array, " n"]
    overlap: Complex[Array, " n"]


class Convolution(NamedTuple):
    """The curve of the spectrum of Y = M S* + sqrt(N) G.

    Attributes:
        law, M, N: what Y is made of.
        end: u of the largest eigenvalue of Y.
    """

    law: SpectrumLaw
    M: Float[Array, ""]
    N: Float[Array, ""]
    end: Float[Array, ""]

    @property
    def sides(self) -> int:
        """Number of sides of the spectrum that count: two for singular values, whose law is symmetric, else one."""
        return 2 if self.law.SYMMETRIC else 1

    @property
    def top(self) -> Float[Array, ""]:
        """The largest eigenvalue of Y."""
        return self.end + self.N * self.law.resolvent(self.end, jnp.zeros_like(self.M), self.M).P

    def at(self, u: Float[Array, "*shape"], s: Float[Array, "*shape"]) -> tuple[Array, Array, Array]:
        """Return the density, y(u) and its derivative from s(u)."""
        P, F, A, B = self.law.resolvent(u, s, self.M)
        slope = jnp.where(s > 0, 2 * self.N * (B**2 / A + s * A), 1 - self.N * F)
        return jnp.sqrt(s) / (np.pi * self.N), u + self.N * P, slope

    def above(self, z: Complex[Array, ""]) -> Float[Array, ""]:
        """Return the share of the eigenvalues of Y above a place, from int g dy = int log(z - x) mu(dx) + N g^2 / 2."""
        P, F, _, _ = self.law.resolvent(z.real, z.imag**2, self.M)
        return (self.law.argument(z, self.M) - self.N * P * F * z.imag) / np.pi

    def place(self, y: Float[Array, ""]) -> Complex[Array, ""]:
        """Return the place z of the curve with y(z) = y, for all real y."""
        y_, curve = lax.stop_gradient((y, self))
        reach = jnp.sqrt(curve.N)  # y and u differ by N |P|, and P^2 is at most F

        def excess(u: Array) -> tuple[Array, Array]:
            _, y, slope = curve.at(u, _s(curve.law, u, curve.M, curve.N))
            return y - y_, slope

        return _attach_place(curve.point(_bracketed_root(excess, y_ - reach, y_ + reach, jnp.abs(y_) + reach)), y, self)

    def point(self, u: Float[Array, ""]) -> Complex[Array, ""]:
        """Return the place u + i v(u), without derivatives."""
        return lax.complex(u, jnp.sqrt(lax.stop_gradient(_s(self.law, u, self.M, self.N))))

    def quantile(self, share: Float[Array, ""]) -> Complex[Array, ""]:
        """Return the place above which a share of the eigenvalues of Y lies; if it is a gap, one in the gap."""
        share_, curve = lax.stop_gradient((share, self))
        rounding = 2 * _ROUNDING * jnp.finfo(self.M.dtype).eps

        def excess(u: Array) -> tuple[Array, Array]:
            s = _s(curve.law, u, curve.M, curve.N)
            density, _, slope = curve.at(u, s)
            value = share_ - curve.above(lax.complex(u, jnp.sqrt(s)))
            return jnp.where(jnp.abs(value) <= rounding, 0.0, value), density * slope

        reach = jnp.sqrt(curve.N)
        z = curve.point(_bracketed_root(excess, -reach, curve.end, reach, _HALVINGS))

        def surplus(y: Any, z: Any, share: Any, curve: Convolution) -> Array:
            return curve.above(_attach_place(z, y, curve)) - share

        def solve(change: Any, y: Any, z: Any, share: Any, curve: Convolution) -> Array:
            return change / jnp.where(z.imag > 0, -z.imag / (np.pi * curve.N), jnp.inf)  # no eigenvalues in a gap

        y = curve.at(z.real, z.imag**2)[1]
        return _attach_place(z, with_root(surplus, y, z, share, self, solve=solve), self)

    def first_place(self, tau: Array, kappa: Array, binds: Bool[Array, ""] | None) -> Complex[Array, ""]:
        """Return the place from which on eigenvalues count: that of tau, or a higher one if kappa bounds the rank."""
        start = self.place(tau)
        if binds is None:
            return start

        def bound() -> Array:
            other = self.quantile(jnp.minimum(kappa, 1.0) / self.sides)
            return jnp.where(other.real > start.real, other, start)

        return lax.cond(binds, bound, lambda: start)

    def places_in_gap(self, z: Complex[Array, ""]) -> tuple[Complex[Array, ""], Complex[Array, ""]]:
        """Return a lower and a higher place in the gap of the spectrum of Y around z; z itself if it is in none."""
        u, (law, M, N, _) = lax.stop_gradient((z.real, self))
        islands, zero = law.islands(M), jnp.zeros((), M.dtype)
        inner = jnp.stack(
            [
                jnp.max(jnp.where(islands[:, 1] < u, islands[:, 1], -jnp.inf)),
                jnp.min(jnp.where(islands[:, 0] > u, islands[:, 0], jnp.inf)),
            ]
        )
        is_gap = jnp.isfinite(inner) & (z.imag == 0) & ~jnp.any((islands[:, 0] <= u) & (u <= islands[:, 1]))
        inner = jnp.where(is_gap, inner, u + 1)

        def outside(x: Array) -> tuple[Array, Array]:
            _, F, _, B = law.resolvent(inner + (u - inner) * x, zero, M)
            value, slope = _outside(N * F, N * B * (u - inner))
            return jnp.where(is_gap, value, x - 0.5), jnp.where(is_gap, slope, 1.0)

        x = _bracketed_root(outside, 0 * inner, 0 * inner + 1, 0 * inner + 1)
        low, high = jnp.where(is_gap, (inner - u) * (1 - x) / 2, 0.0)
        return z + low, z + high

    def arc(self, start: Complex[Array, ""], *, below: bool = False) -> Arc:
        """Return an arc from a place to the axis above the spectrum of Y, or to that below.

        Its nodes are Gauss-Legendre nodes of the logarithm of the distance from the start, in units of the distance of
        the start from the eigenvalues of M S*.
        """
        z0, curve = lax.stop_gradient((start, self))
        limit = -curve.end if below else curve.end
        width = jnp.maximum((z0.real - limit) if below else (limit - z0.real), 0.0)
        end = z0.real + (-2 * width if below else 2 * width)
        _, F, A, _ = curve.law.resolvent(z0.real, z0.imag**2, curve.M)
        reach = jnp.maximum(jnp.log1p(2 * width * jnp.sqrt(A / F)), 1e-3)
        nodes, weights = np.polynomial.legendre.leggauss(_ARC)
        x, dx = (jnp.asarray(a, width.dtype) for a in ((nodes + 1) / 2, weights / 2))
        t = jnp.expm1(reach * x) / jnp.expm1(reach)
        dt = dx * reach * jnp.exp(reach * x) / jnp.expm1(reach)
        height = 2 * _BEND * width
        z = start + t * (end - start) + 1j * height * t * (1 - t)
        dz = end - start + 1j * height * (1 - 2 * t)
        at = self.law.resolvent(z.real, z.imag**2, self.M)
        g = at.at(z.imag)
        dy = (1 + self.N * at.slope(z.imag)) * dz * dt
        return Arc(z + self.N * g, -dy if below else dy, g, self.law.overlap(z, self.M))

    def intervals(self) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
        """Return the ends of the intervals of u in which Y has eigenvalues, one for every island of the teacher.

        Outside the islands F(u, 0) is convex in every gap. The spectrum of Y has a gap where its minimum is below
        1 / N; otherwise the neighbouring intervals meet at the minimum.
        """
        law, M, N, _ = lax.stop_gradient(self)
        islands, zero = law.islands(M), jnp.zeros((), M.dtype)

        def flat(u: Array) -> tuple[Array, Array]:
            _, _, A, B = law.resolvent(u, zero, M)
            return -B, 3 * A

        left, right, reach = islands[:-1, 1], islands[1:, 0], jnp.sqrt(N)
        lowest = _bracketed_root(flat, left, right, right - left)
        # Every edge is searched outwards from its island, up to the lowest point of the gap or as far as Y can reach.
        middles = jnp.concatenate([islands[:1, 0] - reach, lowest, islands[-1:, 1] + reach])
        outer, inner = jnp.concatenate([middles[:-1], middles[1:]]), jnp.concatenate([islands[:, 0], islands[:, 1]])

        def outside(x: Array) -> tuple[Array, Array]:
            _, F, _, B = law.resolvent(inner + (outer - inner) * x, zero, M)
            return _outside(N * F, N * B * (outer - inner))

        x = _bracketed_root(outside, 0 * inner, 0 * inner + 1, 0 * inner + 1)
        is_edge = (jnp.abs(outer - inner) > 0) & (N * law.resolvent(outer, zero, M).F < 1) & (x < 1)
        safe = islands[-1, 1] + 2 * reach  # all is finite there; it stands in for what is no edge
        edges = _attach_edge(jnp.where(is_edge, inner + (outer - inner) * x, safe), self.law, self.M, self.N)
        low, high = jnp.split(jnp.where(is_edge, edges, outer), 2)
        return low, high

    def nodes(self, start: Float[Array, ""] | None = None) -> SpectrumNodes:
        """Return the nodes above a place u; by default those of the whole spectrum.

        Every interval is integrated by Gauss-Legendre nodes in the angle theta of
        u = low + (high - low) (1 - cos theta) / 2, which makes the square roots at the edges smooth.
        """
        low, high = (jnp.clip(a, start) for a in self.intervals())
        dtype = self.M.dtype
        x, weights = np.polynomial.legendre.leggauss(_NODES if low.size <= _FEW else _NODES_OF_MANY)
        angle = jnp.asarray((x + 1) * np.pi / 2, dtype)
        width = (high - low)[:, None]
        u = (low[:, None] + width * (1 - jnp.cos(angle)) / 2).ravel()
        du = (width * jnp.sin(angle) * jnp.asarray(weights, dtype) * np.pi / 4).ravel()
        s = jnp.maximum(_s(self.law, u, self.M, self.N), jnp.finfo(dtype).tiny)
        density, y, slope = self.at(u, s)
        return SpectrumNodes(u, y, density, density * slope * du)


@jax.jit
def convolution(law: SpectrumLaw, M: Float[Array, ""], N: Float[Array, ""]) -> Convolution:
    """Return the free convolution of the law of M S* with a semicircle of radius 2 sqrt(N)."""
    law_, M_, N_ = lax.stop_gradient((law, M, N))
    low, reach = M_ * law_.largest, jnp.sqrt(N_)

    def outside(u: Array) -> tuple[Array, Array]:
        _, F, _, B = law_.resolvent(u, jnp.zeros_like(M_), M_)
        return _outside(N_ * F, N_ * B)

    return Convolution(law, M, N, _attach_edge(_bracketed_root(outside, low, low + reach, reach), law, M, N))


def _outside(F: Array, B: Array) -> tuple[Array, Array]:
    """Return a concave function of u that is positive outside the spectrum, and its derivative."""
    return F**-0.5 - 1, B * F**-1.5


def _attach_edge(u: Array, law: SpectrumLaw, M: Array, N: Array) -> Array:
    """Return edges of the spectrum, where N F(u, 0) = 1, with their derivatives."""

    def excess(u: Any, law: SpectrumLaw, M: Any, N: Any) -> Array:
        return N * law.resolvent(u, jnp.zeros_like(M), M).F - 1

    def solve(change: Any, u: Any, law: SpectrumLaw, M: Any, N: Any) -> Array:
        return change / (-2 * N * law.resolvent(u, jnp.zeros_like(M), M).B)

    return with_root(excess, u, law, M, N, solve=solve)


def _attach_place(z: Complex[Array, ""], y: Array, curve: Convolution) -> Complex[Array, ""]:
    """Return a place z, where z + N g(z) = y, with its derivatives."""

    def excess(place: Array, y: Any, law: SpectrumLaw, M: Any, N: Any) -> Float[Array, "2"]:
        u, v = place
        P, F, _, _ = law.resolvent(u, v**2, M)
        return jnp.stack([u + N * P - y, v - N * v * F])

    def solve(change: Array, place: Array, y: Any, law: SpectrumLaw, M: Any, N: Any) -> Float[Array, "2"]:
        u, v = place
        slope = 1 + N * law.resolvent(u, v**2, M).slope(v)
        moved = lax.complex(*change) / jnp.where(slope == 0, jnp.inf, slope)
        return jnp.stack([moved.real, moved.imag])

    return lax.complex(*with_root(excess, jnp.stack([z.real, z.imag]), y, *curve[:3], solve=solve))


def _bracketed_root(
    fn: Callable[[Array], tuple[Array, Array]], low: Array, high: Array, unit: Array, halvings: int = 0
) -> Array:
    """Return the root of an increasing function, element by element.

    Newton's steps are taken where they stay between the ends and shrink by half, bisections elsewhere.

    Args:
        fn: the function; it returns its value and its slope.
        low, high: ends of the search; it is negative at the first and positive at the second.
        unit: a step of some units in the last place of this number is the last.
        halvings: number of first steps that are bisections. They end inside an interval of roots, Newton's at its end.
    """
    tol = _ROUNDING * jnp.finfo(low.dtype).eps * unit

    def body(state: tuple) -> tuple:
        low, high, u, last, _, count = state
        value, slope = fn(u)
        low, high = jnp.where(value <= 0, u, low), jnp.where(value >= 0, u, high)
        trial = u - value / slope
        is_good = (trial > low) & (trial < high) & (jnp.abs(trial - u) < 0.5 * last) & (count >= halvings)
        after = jnp.where(is_good, trial, 0.5 * (low + high))
        step = jnp.abs(after - u)
        return low, high, after, step, jnp.any(step > tol), count + 1

    state = low, high, 0.5 * (low + high), high - low, jnp.asarray(True), 0
    return lax.while_loop(lambda state: state[-2] & (state[-1] < _NEWTON), body, state)[2]


@jax.jit
def _s(law: SpectrumLaw, u: Array, M: Array, N: Array) -> Array:
    """Return s(u), the root of F(u, s) = 1 / N, and zero outside the support of Y."""
    law_, u_, M_, N_ = lax.stop_gradient((law, u, M, N))
    eps = jnp.finfo(M.dtype).eps
    least = eps**2 * N_

    def body(state: tuple) -> tuple:
        # Newton's step for the concave function 1 / F - N of s; from above it can overshoot, from below it cannot.
        s, _, count = state
        at = law_.resolvent(u_, s, M_)
        step = jnp.maximum(s - (1 / at.F - N_) * at.F**2 / at.A, _SHRINK * jnp.maximum(s, least))
        is_done = (jnp.abs(N_ * at.F - 1) <= _ROUNDING * eps) | (jnp.abs(step - s) <= _ROUNDING * eps * s)
        return step, ~jnp.all(is_done | (step <= least)), count + 1

    state = jnp.full_like(u_, N_), jnp.asarray(True), 0
    s = lax.while_loop(lambda state: state[1] & (state[2] < _NEWTON), body, state)[0]

    def excess(s: Any, law: SpectrumLaw, u: Any, M: Any, N: Any) -> Array:
        return N * law.resolvent(u, s, M).F - 1

    def solve(change: Any, s: Any, law: SpectrumLaw, u: Any, M: Any, N: Any) -> Array:
        return change / jnp.where(s > 0, -N * law.resolvent(u, s, M).A, jnp.inf)

    return with_root(excess, jnp.where(s > least, s, 0.0), law, u, M, N, solve=solve)


class Prior(NamedTuple):
    """The prior's potential Phi(M, N, tau) = 1/2 int rho_Y f^2 with f(y) = (y - tau)_+, and its derivatives.

    For untied layers f is the soft threshold, and the averages are those over singular values.

    Attributes:
        phi: the potential.
        by_M: d phi / d M, which is tr S* f(Y).
        by_N: d phi / d N.
        trace: int rho_Y |f|, which is minus d phi / d tau.
        share: share of the eigenvalues or singular values that count.
    """

    phi: Float[Array, ""]
    by_M: Float[Array, ""]
    by_N: Float[Array, ""]
    trace: Float[Array, ""]
    share: Float[Array, ""]


def spectral_prior(curve: Convolution, tau: Float[Array, ""], start: Complex[Array, ""]) -> Prior:
    """Return the prior's potential and its derivatives.

    Args:
        start: place from which on eigenvalues count: that of tau, or a higher one if the rank is bounded.
    """
    Y = curve.arc(start)
    f, g = (Y.y - tau) * Y.dy, Y.resolvent

    def mean(values: Array) -> Array:
        return -curve.sides * jnp.sum((f * values).imag) / np.pi

    phi = 0.5 * mean(g * (Y.y - tau))
    return Prior(phi, mean(Y.overlap), mean(0.5 * g**2), mean(g), curve.sides * curve.above(start))


def stability(
    curve: Convolution, tau: Float[Array, ""], start: Complex[Array, ""], bounded: bool = False
) -> Float[Array, ""]:
    """Return the prior's factor of the replicon: 1/2 int int rho rho f[x, y]^2 with the divided difference f[x, y].

    For singular values it is int int rho rho f[x, y]^2 over the symmetric law, with the soft threshold f.

    Args:
        start: place from which on eigenvalues count: that of tau, or a higher one in a gap of the spectrum.
        bounded: whether it can be a higher one. f then jumps in the gap, and the two arcs must not touch.
    """
    low, high = curve.places_in_gap(start) if bounded else (start, start)
    above, below = curve.arc(high), curve.arc(low, below=True)
    f, x, count = above.y - tau, above.y[:, None], above.resolvent * above.dy

    def pairs(y: Array, weights: Array, kernel: Callable[[Array], Array]) -> Array:
        """Integrate over x above and y; that over y is the difference of its arc and of the mirror image below."""
        inner = kernel(y) @ weights - kernel(y.conj()) @ weights.conj()
        return -jnp.sum((count * f * inner).real) / (2 * np.pi**2)

    # If x and y are both above tau, f[x, y] = 1. If y is below, f[x, y] = f(x) / (x - y), and such pairs count twice.
    one_side = 0.5 * curve.above(start) ** 2 + pairs(
        below.y, below.resolvent * below.dy, lambda y: f[:, None] / (x - y) ** 2
    )
    if curve.sides == 1:
        return one_side
    # Values y = -x' on the other side have f[x, y] = (f(x) + f(x')) / (x + x'), so f(x) f(x') is what is missing.
    other_side = pairs(above.y, count * f, lambda y: (x + y) ** -2)
    return 4 * (one_side + other_side)
