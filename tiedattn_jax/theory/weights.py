"""The fields that one weight feels: their moments at every atom of the spectral law,
and nodes of averages over them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..base.errors import InputError
from ..base.linalg import cholesky, solve
from ..model.model import Model
from ..model.overlaps import Conjugates
from ..model.penalties import Penalty, minimiser


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


_RANGE = 7.5  # of the averages over zeta, in standard deviations
_ORDERS = 48, 18, 12, 12  # nodes on a piece, for one to four columns: right to rounding, to 1e-9 for two
_SPACING = {3: 0.5, 4: 0.75}  # of the lines, by columns: overlaps are right to 3e-5, and to 1e-4
_HALVINGS = 14  # of the range where a column comes to a kink, before the last step: 1e-3 are left


def weight_law(model: Model, hats: Conjugates) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lam (K, r, r), and the mean (K, r) and the covariance (K, r, r) of the Gaussian fields b~ at every atom."""
    law = model.law()
    tau_mean, pi_mean = law.means
    Lam, square = weight_moments(model, hats)
    theta = jnp.einsum("nk,kat->nat", law.gamma, hats.theta)
    mean = tau_mean @ hats.m + jnp.einsum("nt,nat->na", pi_mean, theta)
    return Lam, mean, square - mean[:, :, None] * mean[:, None, :]


def weight_fields(
    penalty: Penalty, Lam: jax.Array, mean: jax.Array, covariance: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Nodes of the averages over the Gaussian fields b~ of the columns of one weight, at every atom, with a penalty.

    They lie on lines: one for one column, and for several columns parallel ones, along which their sum changes, in
    units of their standard deviations and with the signs of their correlations. A line is broken where the minimiser of
    a column comes to a kink of the penalty or leaves it, with Gauss-Legendre nodes on every piece. Lines of two columns
    are at such nodes themselves, of an axis that is broken where both columns do; those of three and four are equally
    spaced.

    Args:
        Lam, mean, covariance: as `weight_law` gives them.

    Returns:
        b~ (K, N, r); shares of the nodes (K, N), which sum to one at every atom.

    Raises:
        InputError: more than four columns.
    """
    if (r := mean.shape[1]) > len(_ORDERS):
        raise InputError("penalty", f"must be None for a student of more than {len(_ORDERS)} columns, got {r}")
    root = _root(covariance)
    edges = _edges(penalty, mean.dtype)
    across, share = _lines(Lam, mean, root, edges)
    middle = mean[:, None] + jnp.einsum("kac,kmc->kma", root[:, :, 1:], across)
    zeta, of_line = _pieces(_crossings(penalty, Lam, root[:, :, 0], middle, edges), share, r)
    fields = middle[:, :, None] + zeta[..., None] * root[:, None, None, :, 0]
    return fields.reshape(len(mean), -1, r), (share[..., None] * of_line).reshape(len(mean), -1)


def _root(covariance: jax.Array) -> jax.Array:
    """A root of covariances (K, r, r), whose first column has the covariances of the fields with the sum that lines
    follow.
    """
    root = cholesky(covariance)
    if root.shape[1] == 1:
        return root
    spread = jnp.sqrt(jnp.diagonal(covariance, axis1=1, axis2=2))
    sign = jnp.where(covariance[:, 0] < 0, -1.0, 1.0)
    turned = jnp.einsum("kab,ka->kb", root, sign / spread)
    turned = turned / jnp.linalg.norm(turned, axis=1, keepdims=True)
    normal = turned.at[:, 0].add(1.0)  # of the mirror that takes the first axis to minus the turned one
    mirrored = 2 * jnp.einsum("kab,kb->ka", root, normal) / jnp.sum(normal**2, 1, keepdims=True)
    return mirrored[:, :, None] * normal[:, None, :] - root


def _lines(Lam: jax.Array, mean: jax.Array, root: jax.Array, edges: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Standard normals across the lines, (K, M, r - 1), and shares of the lines (K, M)."""
    atoms, r = mean.shape
    one = jnp.ones_like(mean[:, 0])
    if r == 1:
        return mean[:, None, 1:], one[:, None]
    if r == 2:
        corners = [Lam @ jnp.stack([k, l]) + jnp.stack([s, t]) - mean for k, s in edges.T for l, t in edges.T]
        places, share = _pieces([solve(root, corner[..., None])[:, 1, 0] for corner in corners], one, r)
        return places[..., None], share
    half = int(5.5 / _SPACING[r])
    grid = _SPACING[r] * np.mgrid[(slice(-half, half + 1),) * (r - 1)].reshape(r - 1, -1).T
    density = np.exp(-0.5 * np.sum(grid**2, 1))
    return jnp.tile(jnp.asarray(grid, mean.dtype), (atoms, 1, 1)), one[:, None] * (density / density.sum())


def _edges(penalty: Penalty, dtype: Any) -> jax.Array:
    """The kinks of a penalty, and its slopes on either side of them, (2, places)."""
    kinks = jnp.repeat(jnp.asarray([*penalty.kinks], dtype), 2)
    aside = jnp.finfo(dtype).eps * jnp.maximum(jnp.abs(kinks), 1e-9)
    sides = jnp.tile(jnp.array([-1, 1], dtype), len(penalty.kinks))
    return jnp.stack([kinks, jax.vmap(jax.grad(penalty.value))(kinks + sides * aside)])


def _pieces(places: Iterable[jax.Array], like: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Standard normals (..., N) and their shares on lines, of the shape of `like` (...), that are broken at some
    places.

    And in the middle: where nothing else breaks a line, its nodes would be too few for all of the range.
    """
    inside = (jnp.clip(jnp.where(jnp.isnan(place), _RANGE, place), -_RANGE, _RANGE) for place in places)
    ends = jnp.sort(jnp.stack([*(jnp.full_like(like, side * _RANGE) for side in (-1, 0, 1)), *inside], -1), -1)
    nodes, shares = (jnp.asarray(a, like.dtype) for a in np.polynomial.legendre.leggauss(_ORDERS[columns - 1]))
    centre, half = 0.5 * (ends[..., 1:] + ends[..., :-1]), 0.5 * (ends[..., 1:] - ends[..., :-1])
    zeta = (centre[..., None] + half[..., None] * nodes).reshape(*like.shape, -1)
    return zeta, (half[..., None] * shares).reshape(zeta.shape) * jnp.exp(-0.5 * zeta**2) / (2 * np.pi) ** 0.5


def _crossings(penalty: Penalty, Lam: jax.Array, along: jax.Array, middle: jax.Array, edges: jax.Array) -> jax.Array:
    """Where on the lines a column comes to a kink or leaves it, (places, K, M): ``(Lam w)_a + slope = b~_a``,
    w_a the kink.
    """
    if not edges.size:
        return jnp.zeros((0, *middle.shape[:2]), middle.dtype)
    kinks, slopes = edges[..., None, None, None, None]
    own = jnp.diagonal(Lam, axis1=1, axis2=2)[:, None]
    if along.shape[1] == 1:
        return ((own * kinks + slopes - middle) / along[:, None])[:, 0, :, :, 0]

    def beyond(zeta: jax.Array, Lam: jax.Array, along: jax.Array, middle: jax.Array) -> jax.Array:
        """What is left of the field of column a, for every edge, column and line; the other columns are minimised."""
        b = middle + zeta[..., None] * along[:, None]
        w = minimiser(penalty, Lam[:, None], b)
        left = b - jnp.einsum("kab,eckmb->eckma", Lam, w) + own * (w - kinks) - slopes
        return jnp.einsum("eakma->eakm", left)

    given = Lam, along, middle
    held = lax.stop_gradient(given)
    high = jnp.full((len(kinks), along.shape[1], *middle.shape[:2]), _RANGE, Lam.dtype)
    rising = beyond(high, *held) > 0

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, top = ends
        at = 0.5 * (low + top)
        above = (beyond(at, *held) > 0) == rising
        return jnp.where(above, low, at), jnp.where(above, at, top)

    at = lax.stop_gradient(0.5 * sum(lax.fori_loop(0, _HALVINGS, halve, (-high, high))))
    _, slope = jax.jvp(lambda zeta: beyond(zeta, *held), (at,), (jnp.ones_like(at),))
    step = beyond(at, *given) / lax.stop_gradient(jnp.where(slope == 0, 1.0, slope))
    return (at - step).reshape(-1, *middle.shape[:2])
