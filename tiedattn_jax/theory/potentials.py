"""The two scalar potentials of the theory, whose gradients are the saddle-point equations (7)-(8).

The channel potential M is a Gaussian average over the local fields of the Moreau envelope of the loss. The prior
potential psi is an average over the spectral law. For a ridge it is a closed form in the moments of the fields of one
weight; with a further penalty it is an average over these fields, on nodes that are laid here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from ..averages.moreau import ProxProblem
from ..averages.rules import Points, Replicate, average, fields, legendre, search_block
from ..base.arrays import Scalar, cholesky, precise, solve
from ..base.derivatives import derivative_along
from ..base.errors import InputError
from ..model.model import Model, over_kinds
from ..model.overlaps import Conjugates, Overlaps, sentence_overlaps, symmetric
from ..model.penalties import Penalty, minimiser


def stationary(fn: Callable[[PyTree, PyTree], Float[Array, "..."]]) -> Callable[[PyTree, PyTree], Float[Array, "..."]]:
    """Differentiate `fn(z, p)` by the envelope theorem.

    The function must be evaluated at a `z(p)` where it is stationary in `z`. Its value is `fn(z, p)`, and its
    derivative is the partial derivative in `p`. A second derivative includes the motion of `z(p)`.

    A loop in jax may lose this rule, see `base/derivatives.py`. The derivatives of `fn` itself are the same, as those
    in z vanish.
    """

    @jax.custom_jvp
    def value(z: PyTree, p: PyTree) -> Float[Array, "..."]:
        return fn(z, p)

    @partial(value.defjvp, symbolic_zeros=True)
    @precise
    def rule(primals: Any, tangents: Any) -> Any:
        z, p = primals
        # The value must again be stationary, so that an outer derivative does not include the motion of z either.
        return value(z, p), derivative_along(lambda p: fn(z, p), (p,), tangents[1:])

    return value


@stationary
def block_envelope(points: Points, args: tuple[Model, Overlaps]) -> Float[Array, ""]:
    """Return the contribution of one block to the channel potential, at the minimisers of its nodes."""
    model, x = args[0], sentence_overlaps(*args)
    h, y = fields(model, x, points.student, points.teacher)
    return model.sentence.share * jnp.sum(points.weight * ProxProblem(model, x.V, y).energy(points.z, h))


def over_nodes(model: Model, replicate: Replicate, fn: Callable[[Model, Any], PyTree]) -> PyTree:
    """Sum ``fn(model, block)`` over the blocks and over the kinds of sentences; `fn` gets the model of one kind."""
    return over_kinds(model, lambda model: average(replicate, partial(fn, model)))


def channel(model: Model, x: Overlaps, replicate: Replicate) -> Float[Array, ""]:
    """Compute the channel potential M(q, V, theta, m), the Gaussian average of the Moreau envelope of the loss.

    ``M = E min_Z { sum_l 1/2 (z_l - h_l)^T V_l^{-1} (z_l - h_l) + loss(Z, Y) }`` with
    ``(h_l - m_l, y_l) ~ N(0, [[q_l, theta_l], [theta_l^T, rho_l]])``, independent over the tokens. If there are several
    kinds of sentences, M is the mean over them.
    """

    def energy(model: Model, block: Any) -> Float[Array, ""]:
        return block_envelope(points_in(model, x, replicate, block), (model, x))

    return over_nodes(model, replicate, energy)


def points_in(model: Model, x: Overlaps, replicate: Replicate, block: Any) -> Points:
    """Return nodes, weights and minimisers of one block, for the kind of sentences that `model` is conditioned on."""
    x = sentence_overlaps(model, x)
    return replicate.points(model, x, block, search_block(replicate, model, x, block))


Sums = Callable[[Model, Overlaps, Points], PyTree]


def no_sums(model: Model, x: Overlaps, points: Points) -> tuple:
    """Return no further sums: the default of functions that take `Sums`."""
    return ()


def channel_gradient(
    model: Model, x: Overlaps, replicate: Replicate, extra_sums: Sums = no_sums
) -> tuple[Float[Array, ""], Overlaps, PyTree]:
    """Compute the channel potential M, its symmetrised gradient in the overlaps, and `extra_sums`, in one pass.

    Args:
        extra_sums: further sums over the nodes of a block, for the kind of sentences that its model is conditioned on.
    """

    def block_gradient(model: Model, block: Any) -> tuple[Float[Array, ""], Overlaps, PyTree]:
        return gradient_at(points_in(model, x, replicate, block), model, x, extra_sums)

    return over_nodes(model, replicate, block_gradient)


def gradient_at(
    points: Points, model: Model, x: Overlaps, extra_sums: Sums
) -> tuple[Float[Array, ""], Overlaps, PyTree]:
    """Return the contribution of the points of one block to `channel_gradient`."""
    M, g = jax.value_and_grad(lambda x: block_envelope(points, (model, x)))(x)
    return M, Overlaps(symmetric(g.q), symmetric(g.V), g.theta, g.m), extra_sums(model, x, points)


def channel_by_model(model: Model, x: Overlaps, points: Points) -> Model:
    """Return the contribution of one block to the partial derivatives of M in the model's numbers."""
    return jax.grad(lambda m: block_envelope(points, (m.condition_on(model.kind), x)))(model.condition_on(None))


def conjugates(alpha: Scalar, gradient: Overlaps) -> Conjugates:
    """Return the conjugates as gradients of ``alpha M``, eq. (7)."""
    return Conjugates(
        q=-2 * alpha * gradient.V, V=2 * alpha * gradient.q, theta=-alpha * gradient.theta, m=-alpha * gradient.m
    )


def overlaps(model: Model, hats: Conjugates) -> Overlaps:
    """Return the order parameters as gradients of psi, eq. (8)."""
    g = jax.grad(lambda h: prior(model, h))(hats)
    return Overlaps(q=-2 * symmetric(g.V), V=2 * symmetric(g.q), theta=g.theta, m=g.m)


def free_energy(model: Model, alpha: Scalar, x: Overlaps, hats: Conjugates, M: Float[Array, ""]) -> Float[Array, ""]:
    """Compute the free energy Phi at overlaps, conjugates and channel potential `M`.

    ``Phi = 1/2 sum_l tr(Vhat_l q_l - qhat_l V_l) - sum_l mhat_l . m_l - sum_l tr(thetahat_l theta_l^T) + psi
    - alpha M``. At a saddle point it is minus the training loss.
    """
    pairing = 0.5 * jnp.sum(hats.V * x.q - hats.q * x.V) - jnp.sum(hats.m * x.m) - jnp.sum(hats.theta * x.theta)
    return pairing + prior(model, hats) - alpha * M


def train_loss_partials(
    model: Model, alpha: Scalar, M: Float[Array, ""], M_by_model: Model, hats: Conjugates
) -> tuple[Model, Float[Array, ""]]:
    """Return the derivatives of the training loss in the model and in alpha.

    They are the partial derivatives, because Phi is stationary in the overlaps and conjugates.

    Args:
        M: channel potential.
        M_by_model: its partial derivatives in the model's numbers.
    """
    prior_by_model = jax.grad(prior)(model, hats)
    return jax.tree.map(lambda a, b: alpha * a - b, M_by_model, prior_by_model), M


def prior(model: Model, hats: Conjugates) -> Float[Array, ""]:
    """Compute the prior potential psi, an average over the joint spectral law.

    For the ridge it is ``psi = 1/2 E tr[Lam^{-1} (sum_k gamma_k qhat_k + b b^T)]``, with
    ``Lam = lambda I + sum_k gamma_k Vhat_k`` and ``b = sum_k tau_k mhat_k + sum_k gamma_k thetahat_k pi``.

    With a further penalty p it is ``psi = E max_w { b~ . w - w^T Lam w / 2 - sum_a p(w_a) }``, where
    ``b~ = b + (sum_k gamma_k qhat_k)^{1/2} zeta`` with standard normals zeta.
    """
    if model.penalty is None:
        Lam, square = weight_moments(model, hats)
        atom_values = 0.5 * jnp.trace(solve(Lam, square), axis1=1, axis2=2)
    else:
        law = weight_law(model, hats)
        # `_gains` takes all second derivatives at once. It compiles longer, which pays off for many nodes.
        atom_values = _gains(model.penalty, _packed(*law)) if hats.m.shape[1] > 2 else _mean_gain(model.penalty, *law)
    return model.law().weights @ atom_values


def _mean_gain(
    penalty: Penalty, Lam: Float[Array, "K r r"], mean: Float[Array, "K r"], covariance: Float[Array, "K r r"]
) -> Float[Array, " K"]:
    """Return ``E max_w { b~ . w - w^T Lam w / 2 - sum_a p(w_a) }`` at every atom."""
    b, share = weight_fields(penalty, Lam, mean, covariance)
    Lam = Lam[:, None]
    return jnp.sum(share * _gain(minimiser(penalty, Lam, b), (penalty, Lam, b)), 1)


@stationary
def _gain(
    w: Float[Array, "K N r"], args: tuple[Penalty, Float[Array, "K 1 r r"], Float[Array, "K N r"]]
) -> Float[Array, "K N"]:
    penalty, Lam, b = args
    pull = 0.5 * jnp.einsum("...ab,...b->...a", Lam, w)
    return jnp.sum((b - pull) * w - penalty.value(w), -1)


@jax.custom_jvp
def _gains(penalty: Penalty, packed: Float[Array, "K n"]) -> Float[Array, " K"]:
    """Return `_mean_gain`; its second derivatives in `packed` are computed as one Hessian, see `_slopes`.

    Loops may lose both rules, because they give the derivatives of the functions themselves.
    """
    return _mean_gain(penalty, *_unpacked(packed))


@partial(_gains.defjvp, symbolic_zeros=True)
@precise
def _(primals: Any, tangents: Any) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
    tangent = derivative_along(lambda packed: jnp.sum(_slopes(*primals) * packed, 1), primals[1:], tangents[1:])
    return _gains(*primals), tangent + derivative_along(lambda p: _gains.fun(p, primals[1]), primals[:1], tangents[:1])


@jax.custom_jvp
def _slopes(penalty: Penalty, packed: Float[Array, "K n"]) -> Float[Array, "K n"]:
    """Return the derivatives of `_gains` in `packed`."""
    return jax.grad(lambda packed: jnp.sum(_gains.fun(penalty, packed)))(packed)


@partial(_slopes.defjvp, symbolic_zeros=True)
@precise
def _(primals: Any, tangents: Any) -> tuple[Float[Array, "K n"], Float[Array, "K n"]]:
    """Compute the whole Hessian in `packed` once.

    `packed` has far fewer entries than the conjugates and the numbers of the model on which it depends.
    """
    penalty, packed = primals
    slopes, tangent_map = jax.linearize(lambda packed: _slopes.fun(penalty, packed), packed)
    axes = jnp.broadcast_to(jnp.eye(packed.shape[1], dtype=packed.dtype)[:, None], (packed.shape[1], *packed.shape))
    hessian = jax.vmap(tangent_map)(axes)
    tangent = derivative_along(lambda packed: jnp.einsum("jki,kj->ki", hessian, packed), primals[1:], tangents[1:])
    return slopes, tangent + derivative_along(lambda p: _slopes.fun(p, packed), primals[:1], tangents[:1])


def _packed(
    Lam: Float[Array, "K r r"], mean: Float[Array, "K r"], covariance: Float[Array, "K r r"]
) -> Float[Array, "K r*(r+2)"]:
    """Pack the numbers that a weight's gain depends on into one vector per atom."""
    rows, columns = np.tril_indices(mean.shape[1])
    return jnp.concatenate([symmetric(Lam)[:, rows, columns], mean, symmetric(covariance)[:, rows, columns]], 1)


def _unpacked(packed: Float[Array, "K n"]) -> tuple[Float[Array, "K r r"], Float[Array, "K r"], Float[Array, "K r r"]]:
    r = math.isqrt(packed.shape[1] + 1) - 1
    half = r * (r + 1) // 2
    index = np.zeros((r, r), int)
    index[np.tril_indices(r)] = np.arange(half)
    index = np.maximum(index, index.T)
    return packed[:, index], packed[:, half : half + r], packed[:, half + r + index]


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


_RANGE = 7.5  # limit of the averages over zeta on either side, in standard deviations
_ORDERS = 48, 18, 12, 12  # nodes per piece, for one to four columns: exact to rounding for one, to 1e-9 for two
_SPACING = {3: 0.5, 4: 0.75}  # spacing of the lines by number of columns; the overlaps are off by 3e-5 and by 1e-4
_HALVINGS = 14  # bisections for a crossing before the final Newton step; they leave an interval of 1e-3


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
    root = _square_root(covariance)
    edges = _kinks(penalty, mean.dtype)
    across, share = _lines(Lam, mean, root, edges)
    middle = mean[:, None] + jnp.einsum("kac,kmc->kma", root[:, :, 1:], across)
    zeta, node_share = _pieces(_crossings(penalty, Lam, root[:, :, 0], middle, edges), share, r)
    fields = middle[:, :, None] + zeta[..., None] * root[:, None, None, :, 0]
    return fields.reshape(len(mean), -1, r), (share[..., None] * node_share).reshape(len(mean), -1)


def _square_root(covariance: Float[Array, "K r r"]) -> Float[Array, "K r r"]:
    """Return a root of covariances whose first column is the direction of the lines.

    The first column contains the covariances of the fields with the sum that changes along the lines, see
    `weight_fields`.
    """
    root = cholesky(covariance)
    if root.shape[1] == 1:
        return root
    spread = jnp.sqrt(jnp.diagonal(covariance, axis1=1, axis2=2))
    # The correlation of independent fields is zero up to rounding, which shall not turn the lines.
    rounding = float(jnp.finfo(covariance.dtype).eps) ** 0.5
    sign = jnp.where(covariance[:, 0] < -rounding * spread[:, :1] * spread, -1.0, 1.0)
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
    nodes, shares = (jnp.asarray(a, template.dtype) for a in legendre(_ORDERS[columns - 1]))
    start, width = ends[..., :-1, None], jnp.diff(ends)[..., None]
    zeta = (start + width * nodes).reshape(*template.shape, -1)
    return zeta, (width * shares).reshape(zeta.shape) * jnp.exp(-0.5 * zeta**2) / (2 * np.pi) ** 0.5


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
