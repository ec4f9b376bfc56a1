"""Resolvents of laws of Gaussian factors: roots of their equations, with derivatives up to the real axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float

from ..base.arrays import AnyArray
from ..base.derivatives import with_root

_POLISH = 3  # Newton steps after the closed form of a cubic root


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
def wishart_resolvent(u: AnyArray, s: AnyArray, c: AnyArray, k: AnyArray) -> Resolvent:
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
def factors_resolvent(u: AnyArray, s: AnyArray, M: AnyArray, k: AnyArray) -> Resolvent:
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
    roots = cubic_roots(k - 1, -Z, Z)
    tests = jnp.stack([-roots, -roots / Z, (1 - k - roots) * roots / Z])
    best = jnp.argmax(jnp.min(tests.imag / jnp.abs(tests), 0), 0)
    X = jnp.where(is_far, 1 + k * inverse, jnp.take_along_axis(roots, best[None], 0)[0])
    zeros = jnp.maximum(1 - k, 0.0)  # share of the law at zero, the only thing that is seen from nearby
    is_near = jnp.abs(Z) < eps**0.5 * zeros**3
    X = jnp.where(is_near & ~is_far, zeros - k * Z / jnp.where(zeros > 0, zeros, 1.0) ** 2, X)
    G = X / z
    G = jnp.stack([jnp.where(u < 0, -G.real, G.real), G.imag / v])
    place = jnp.stack([u, jnp.ones_like(u)])

    def polished(_: Any, G: Array) -> Array:
        value, slope = _factors_equation(G, place, s, M, k)
        return G - _step(value, slope, s)

    return lax.fori_loop(0, _POLISH, polished, G)


def cubic_roots(b: Any, c: Any, d: Any, xp: Any = jnp) -> Complex[AnyArray, "3 *shape"]:
    """Return the roots of x^3 + b x^2 + c x + d by Cardano's formula, as arrays of jax or of numpy."""
    first, second = b**2 - 3 * c, 2 * b**3 - 9 * b * c + 27 * d
    root = xp.sqrt(second**2 - 4 * first**3)
    larger = xp.where(xp.abs(second + root) >= xp.abs(second - root), second + root, second - root)
    cube = (larger / 2) ** (1 / 3)
    safe = xp.where(cube == 0, 1.0, cube)
    unit = np.exp(2j * np.pi / 3 * np.arange(3)).reshape(3, *[1] * xp.ndim(cube)).astype(cube.dtype)
    return -(b + unit * cube + first / (unit * safe)) / 3
