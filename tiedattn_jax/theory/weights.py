"""The fields that one weight feels: their moments at every atom of the spectral law, and nodes of averages over them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError
from ..model import Model
from ..overlaps import Conjugates
from ..penalties import Penalty


def weight_moments(model: Model, hats: Conjugates) -> tuple[jax.Array, jax.Array]:
    """Lam and ``E[b~ b~^T]`` at every atom of the spectrum, (K, r, r)."""
    law = model.law()
    eye = jnp.eye(hats.m.shape[-1], dtype=hats.m.dtype)

    def atom(gamma: jax.Array, tau: jax.Array, pi: jax.Array, cross: jax.Array) -> tuple[jax.Array, jax.Array]:
        Lam = model.lam * eye + jnp.einsum("k,kab->ab", gamma, hats.V)
        theta = jnp.einsum("k,kat->at", gamma, hats.theta)
        mixed = jnp.einsum("ka,kt,bt->ab", hats.m, cross, theta)
        bb = jnp.einsum("ka,kl,lb->ab", hats.m, tau, hats.m) + theta @ pi @ theta.T + mixed + mixed.T
        return Lam, jnp.einsum("k,kab->ab", gamma, hats.q) + bb

    return jax.vmap(atom)(law.gamma, law.tau, law.pi, law.cross)


_RANGE = 9.0  # of the averages over zeta, in standard deviations
_ORDERS = 48, 18  # nodes on a piece, for one and two columns: right to rounding, and to 1e-8


def weight_fields(model: Model, penalty: Penalty, hats: Conjugates) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Nodes of the averages over the Gaussian fields b~ of the columns of one weight, at every atom, with a penalty.

    They lie on lines: one for one column, and for two columns parallel ones, along which both fields change alike in
    units of their standard deviations. A line is broken where the minimiser of a column comes to a kink of the penalty
    or leaves it, and the sequence of lines where both do at once, with Gauss-Legendre nodes on every piece.

    Returns:
        Lam (K, r, r); b~ (K, N, r); shares of the nodes (K, N), which sum to one at every atom.

    Raises:
        InputError: more than two columns.
    """
    if (r := hats.m.shape[-1]) > 2:
        raise InputError("penalty", f"must be None for a student of more than two columns, got {r}")
    law = model.law()
    tau_mean, pi_mean = law.means
    Lam, square = weight_moments(model, hats)
    theta = jnp.einsum("nk,kat->nat", law.gamma, hats.theta)
    mean = tau_mean @ hats.m + jnp.einsum("nt,nat->na", pi_mean, theta)
    covariance = square - mean[:, :, None] * mean[:, None, :]
    edges = _edges(penalty, mean.dtype)
    along, middle, share = _lines(Lam, mean, covariance, edges)
    zeta, of_line = _pieces([_crossing(penalty, Lam, along, middle, a, *e) for e in edges for a in range(r)], share, r)
    fields = middle[:, :, None] + zeta[..., None] * along[:, None, None]
    return Lam, fields.reshape(len(mean), -1, r), (share[..., None] * of_line).reshape(len(mean), -1)


def _lines(
    Lam: jax.Array, mean: jax.Array, covariance: jax.Array, edges: list[tuple[jax.Array, jax.Array]]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lines of Gaussian fields: a standard deviation along them (K, r), their middles (K, M, r), their shares (K, M)."""
    spread = jnp.sqrt(jnp.diagonal(covariance, axis1=1, axis2=2))
    one = jnp.ones_like(mean[:, 0])
    if mean.shape[1] == 1:
        return spread, mean[:, None], one[:, None]
    correlation = covariance[:, 0, 1] / jnp.prod(spread, 1)
    sign = jnp.where(correlation < 0, -one, one)
    size = sign * correlation
    along = spread * jnp.stack([one, sign], 1) * jnp.sqrt(0.5 * (1 + size))[:, None]
    across = spread * jnp.stack([one, -sign], 1) * jnp.sqrt(0.5 * (1 - size))[:, None]
    corners = (Lam @ jnp.stack([k, l]) + jnp.stack([s, t]) - mean for k, s in edges for l, t in edges)
    places, share = _pieces([0.5 * jnp.sum(corner / across, 1) for corner in corners], one, 2)
    return along, mean[:, None] + places[..., None] * across[:, None], share


def _edges(penalty: Penalty, dtype: Any) -> list[tuple[jax.Array, jax.Array]]:
    """The kinks of a penalty with its slope on either side."""
    found = []
    for kink in (jnp.asarray(w, dtype) for w in penalty.kinks):
        aside = jnp.finfo(dtype).eps * jnp.maximum(jnp.abs(kink), 1e-9)
        found += [(kink, jax.grad(penalty.value)(kink + side)) for side in (-aside, aside)]
    return found


def _pieces(places: list[jax.Array], like: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Standard normals (..., N) and their shares on lines, of the shape of `like` (...), that are broken at some places.

    And in the middle: where nothing else breaks a line, its nodes would be too few for all of the range.
    """
    inside = (jnp.clip(jnp.where(jnp.isnan(place), _RANGE, place), -_RANGE, _RANGE) for place in places)
    ends = jnp.sort(jnp.stack([*(jnp.full_like(like, side * _RANGE) for side in (-1, 0, 1)), *inside], -1), -1)
    nodes, shares = (jnp.asarray(a, like.dtype) for a in np.polynomial.legendre.leggauss(_ORDERS[columns - 1]))
    centre, half = 0.5 * (ends[..., 1:] + ends[..., :-1]), 0.5 * (ends[..., 1:] - ends[..., :-1])
    zeta = (centre[..., None] + half[..., None] * nodes).reshape(*like.shape, -1)
    return zeta, (half[..., None] * shares).reshape(zeta.shape) * jnp.exp(-0.5 * zeta**2) / (2 * np.pi) ** 0.5


def _crossing(
    penalty: Penalty, Lam: jax.Array, along: jax.Array, middle: jax.Array, a: int, kink: jax.Array, slope: jax.Array
) -> jax.Array:
    """Where on the lines a column comes to a kink or leaves it, (K, M): there ``(Lam w)_a + slope = b~_a``, w_a the kink.

    With two columns the place is linear in the other weight, which makes that the minimiser of a problem of its own.
    """
    own = Lam[:, a, a, None] * kink + slope - middle[..., a]
    if along.shape[1] == 1:
        return own / along[:, a, None]
    b, ratio = 1 - a, along[:, 1 - a, None] / along[:, a, None]
    stiff = Lam[:, b, b, None] - ratio * Lam[:, a, b, None]
    field = middle[..., b] + ratio * own - Lam[:, a, b, None] * kink
    other = penalty.prox(field / stiff, jnp.broadcast_to(1 / stiff, field.shape))
    return (own + Lam[:, a, b, None] * other) / along[:, a, None]
