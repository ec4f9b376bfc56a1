"""The fields of one weight: their moments at every atom of the spectral law, and nodes for averages over them."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..base.errors import InputError
from ..base.linalg import cholesky, solve
from ..model.model import Model
from ..model.overlaps import Conjugates
from ..model.penalties import Penalty, minimiser


def weight_moments(model: Model, hats: Conjugates) -> tuple[Float[Array, "K r r"], Float[Array, "K r r"]]:
    """Return Lam and ``E[b~ b~^T]`` at every atom of the spectrum."""
    law = model.law()
    eye = jnp.eye(hats.m.shape[-1], dtype=hats.m.dtype)

    def atom(
        gamma: Float[Array, " S"], tau: Float[Array, "J J"], pi: Float[Array, "t t"], cross: Float[Array, "J t"]
    ) -> tuple[Float[Array, "r r"], Float[Array, "r r"]]:
        Lam = model.lam * eye + jnp.einsum("k,kab->ab", gamma, hats.V)
        theta = jnp.einsum("k,kat->at", gamma, hats.theta)
        mixed = jnp.einsum("ka,kt,bt->ab", hats.m, cross, theta)
        bb = jnp.einsum("ka,kl,lb->ab", hats.m, tau, hats.m) + theta @ pi @ theta.T + mixed + mixed.T
        return Lam, jnp.einsum("k,kab->ab", gamma, hats.q) + bb

    return jax.vmap(atom)(law.gamma, law.tau, law.pi, law.cross)


_RANGE = 7.5  # limit of the averages over zeta on either side, in standard deviations
_ORDERS = 48, 18, 12, 12  # nodes per piece, for one to four columns: exact to rounding for one, to 1e-9 for two
_SPACING = {3: 0.5, 4: 0.75}  # spacing of the lines by number of columns; the overlaps are off by 3e-5 and by 1e-4
_HALVINGS = 14  # bisections for a crossing before the final Newton step; they leave an interval of 1e-3


def weight_law(
    model: Model, hats: Conjugates
) -> tuple[Float[Array, "K r r"], Float[Array, "K r"], Float[Array, "K r r"]]:
    """Return Lam, and mean and covariance of the Gaussian fields b~, at every atom."""
    law = model.law()
    tau_mean, pi_mean = law.means
    Lam, square = weight_moments(model, hats)
    theta = jnp.einsum("nk,kat->nat", law.gamma, hats.theta)
    mean = tau_mean @ hats.m + jnp.einsum("nt,nat->na", pi_mean, theta)
    return Lam, mean, square - mean[:, :, None] * mean[:, None, :]


def weight_fields(
    penalty: Penalty, Lam: Float[Array, "K r r"], mean: Float[Array, "K r"], covariance: Float[Array, "K r r"]
) -> tuple[Float[Array, "K N r"], Float[Array, "K N"]]:
    """Return nodes for averages over the Gaussian fields b~ of the columns of one weight with a penalty, at every atom.

    The nodes lie on one line for one column, and on parallel lines for several columns. Along a line the sum of the
    fields changes; in this sum each field is divided by its standard deviation and has the sign of its correlation with
    the first field. A line is broken where the minimiser of a column reaches or leaves a kink of the penalty. Every
    piece has Gauss-Legendre nodes.

    For two columns the lines themselves are at Gauss-Legendre nodes of the axis across them. That axis is broken where
    both columns reach or leave a kink. For three and four columns the lines are equally spaced.

    Args:
        Lam, mean, covariance: results of `weight_law`.

    Returns:
        b~; shares of the nodes, which sum to one at every atom.

    Raises:
        InputError: if there are more than four columns.
    """
    if (r := mean.shape[1]) > len(_ORDERS):
        raise InputError("penalty", f"must be None for a student of more than {len(_ORDERS)} columns, got {r}")
    root = _root(covariance)
    edges = _kinks(penalty, mean.dtype)
    across, share = _lines(Lam, mean, root, edges)
    middle = mean[:, None] + jnp.einsum("kac,kmc->kma", root[:, :, 1:], across)
    zeta, node_share = _pieces(_crossings(penalty, Lam, root[:, :, 0], middle, edges), share, r)
    fields = middle[:, :, None] + zeta[..., None] * root[:, None, None, :, 0]
    return fields.reshape(len(mean), -1, r), (share[..., None] * node_share).reshape(len(mean), -1)


def _root(covariance: Float[Array, "K r r"]) -> Float[Array, "K r r"]:
    """Return a root of covariances whose first column is the direction of the lines.

    The first column contains the covariances of the fields with the sum that changes along the lines, see
    `weight_fields`.
    """
    root = cholesky(covariance)
    if root.shape[1] == 1:
        return root
    spread = jnp.sqrt(jnp.diagonal(covariance, axis1=1, axis2=2))
    sign = jnp.where(covariance[:, 0] < 0, -1.0, 1.0)
    axis = jnp.einsum("kab,ka->kb", root, sign / spread)
    axis = axis / jnp.linalg.norm(axis, axis=1, keepdims=True)
    normal = axis.at[:, 0].add(1.0)  # normal of the mirror that maps the first axis to minus `axis`
    mirrored = 2 * jnp.einsum("kab,kb->ka", root, normal) / jnp.sum(normal**2, 1, keepdims=True)
    return mirrored[:, :, None] * normal[:, None, :] - root


def _lines(
    Lam: Float[Array, "K r r"], mean: Float[Array, "K r"], root: Float[Array, "K r r"], edges: Float[Array, "2 E"]
) -> tuple[Float[Array, "K M r-1"], Float[Array, "K M"]]:
    """Return standard normals across the lines, and shares of the lines."""
    atoms, r = mean.shape
    ones = jnp.ones_like(mean[:, 0])
    if r == 1:
        return mean[:, None, 1:], ones[:, None]
    if r == 2:
        corners = [Lam @ jnp.stack([k, l]) + jnp.stack([s, t]) - mean for k, s in edges.T for l, t in edges.T]
        places, share = _pieces([solve(root, corner[..., None])[:, 1, 0] for corner in corners], ones, r)
        return places[..., None], share
    half = int(5.5 / _SPACING[r])
    grid = _SPACING[r] * np.mgrid[(slice(-half, half + 1),) * (r - 1)].reshape(r - 1, -1).T
    density = np.exp(-0.5 * np.sum(grid**2, 1))
    return jnp.tile(jnp.asarray(grid, mean.dtype), (atoms, 1, 1)), ones[:, None] * (density / density.sum())


def _kinks(penalty: Penalty, dtype: DTypeLike) -> Float[Array, "2 E"]:
    """Return the kinks of a penalty, each twice, and its slopes on either side of them."""
    kinks = jnp.repeat(jnp.asarray([*penalty.kinks], dtype), 2)
    offset = jnp.finfo(dtype).eps * jnp.maximum(jnp.abs(kinks), 1e-9)
    sides = jnp.tile(jnp.array([-1, 1], dtype), len(penalty.kinks))
    return jnp.stack([kinks, jax.vmap(jax.grad(penalty.value))(kinks + sides * offset)])


def _pieces(
    breaks: Iterable[Float[Array, "*shape"]], template: Float[Array, "*shape"], columns: int
) -> tuple[Float[Array, "*shape N"], Float[Array, "*shape N"]]:
    """Return standard normals on lines that are broken at `breaks`, and their shares.

    Every line is also broken in the middle. Without another break, the nodes of one piece would be too few for the
    whole range.

    Args:
        breaks: positions on the lines; NaN stands for no break.
        columns: number of columns, which sets the number of nodes per piece.
    """
    clipped = (jnp.clip(jnp.where(jnp.isnan(position), _RANGE, position), -_RANGE, _RANGE) for position in breaks)
    ends = jnp.sort(jnp.stack([*(jnp.full_like(template, side * _RANGE) for side in (-1, 0, 1)), *clipped], -1), -1)
    nodes, shares = (jnp.asarray(a, template.dtype) for a in np.polynomial.legendre.leggauss(_ORDERS[columns - 1]))
    centre, half = 0.5 * (ends[..., 1:] + ends[..., :-1]), 0.5 * (ends[..., 1:] - ends[..., :-1])
    zeta = (centre[..., None] + half[..., None] * nodes).reshape(*template.shape, -1)
    return zeta, (half[..., None] * shares).reshape(zeta.shape) * jnp.exp(-0.5 * zeta**2) / (2 * np.pi) ** 0.5


def _crossings(
    penalty: Penalty,
    Lam: Float[Array, "K r r"],
    along: Float[Array, "K r"],
    middle: Float[Array, "K M r"],
    edges: Float[Array, "2 E"],
) -> Float[Array, "P K M"]:
    """Return the positions on the lines where a column reaches or leaves a kink.

    There ``(Lam w)_a + slope = b~_a``, with w_a at the kink.
    """
    if not edges.size:
        return jnp.zeros((0, *middle.shape[:2]), middle.dtype)
    kinks, slopes = edges[..., None, None, None, None]
    diagonal = jnp.diagonal(Lam, axis1=1, axis2=2)[:, None]
    if along.shape[1] == 1:
        return ((diagonal * kinks + slopes - middle) / along[:, None])[:, 0, :, :, 0]

    def excess_field(
        zeta: Float[Array, "E r K M"],
        Lam: Float[Array, "K r r"],
        along: Float[Array, "K r"],
        middle: Float[Array, "K M r"],
    ) -> Float[Array, "E r K M"]:
        """Return by how much the field of a column exceeds the one at an edge, for every edge, column and line.

        The weights of the other columns are at the minimum.
        """
        b = middle + zeta[..., None] * along[:, None]
        w = minimiser(penalty, Lam[:, None], b)
        excess = b - jnp.einsum("kab,eckmb->eckma", Lam, w) + diagonal * (w - kinks) - slopes
        return jnp.einsum("eakma->eakm", excess)

    operands = Lam, along, middle
    constants = lax.stop_gradient(operands)
    high = jnp.full((len(kinks), along.shape[1], *middle.shape[:2]), _RANGE, Lam.dtype)
    rising = excess_field(high, *constants) > 0

    def halve(_: Int[Array, ""], ends: tuple[Array, Array]) -> tuple[Float[Array, "E r K M"], Float[Array, "E r K M"]]:
        lower, upper = ends
        zeta = 0.5 * (lower + upper)
        is_above_root = (excess_field(zeta, *constants) > 0) == rising
        return jnp.where(is_above_root, lower, zeta), jnp.where(is_above_root, zeta, upper)

    crossing = lax.stop_gradient(0.5 * sum(lax.fori_loop(0, _HALVINGS, halve, (-high, high))))
    _, slope = jax.jvp(lambda zeta: excess_field(zeta, *constants), (crossing,), (jnp.ones_like(crossing),))
    step = excess_field(crossing, *operands) / lax.stop_gradient(jnp.where(slope == 0, 1.0, slope))
    return (crossing - step).reshape(-1, *middle.shape[:2])
