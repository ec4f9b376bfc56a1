"""The Moreau envelope of the loss at nodes: the energy whose minimum is the proximal operator, and its derivatives.

Arrays carry the node axis last, `(L, r, N)`; see `nodewise`.
"""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..base.arrays import apply, inverse, matvec, total
from ..base.nodewise import nodewise
from ..model.model import Model

_MAX_COLUMNS = 8  # columns of the largest Hessian that is computed at once; of a larger one the caches hold one column


def _loss(model: Model, Z: Float[Array, "L r"], Y: Float[Array, "L t"]) -> Float[Array, ""]:
    # Constants of a layer may have another precision than the fields.
    return jnp.asarray(model.loss(Z, *model.label(Y))).astype(Z.dtype)


def _along(
    model: Model, Z: Float[Array, "L r"], Y: Float[Array, "L t"], d: Float[Array, "L r"]
) -> tuple[Float[Array, ""], Float[Array, "L r"], Float[Array, "L r"]]:
    """Return the loss, its gradient, and the derivative of the gradient along d."""
    (value, gradient), (_, change) = jax.jvp(lambda Z: jax.value_and_grad(_loss, 1)(model, Z, Y), (Z,), (d,))
    return value, gradient, change


def _loss_expansion(
    model: Model, Z: Float[Array, "L r"], Y: Float[Array, "L t"]
) -> tuple[Float[Array, ""], Float[Array, "L r"], Float[Array, "L*r L r"]]:
    """Return the loss, its gradient and its Hessian, from one pass."""
    column = functools.partial(_along, model, Z, Y)
    return jax.vmap(column, out_axes=(None, None, 0))(_basis(Z))


def _basis(Z: Float[Array, "L r ..."]) -> Float[Array, "L*r L r"]:
    """Return the L r unit vectors of the space of the fields."""
    shape = Z.shape[:2]
    return jnp.eye(math.prod(shape), dtype=Z.dtype).reshape(-1, *shape)


loss_at_nodes = nodewise(_loss)
gradient_at_nodes = nodewise(jax.grad(_loss, 1))
_along_at_nodes = nodewise(_along)
_expansion_at_nodes = nodewise(_loss_expansion)


def expansion_at_nodes(
    model: Model, Z: Float[Array, "L r N"], Y: Float[Array, "L t N"]
) -> tuple[Float[Array, " N"], Float[Array, "L r N"], Float[Array, "L*r L*r N"]]:
    """Return the loss, its gradient and its Hessian; a large one column by column."""
    n = Z.shape[0] * Z.shape[1]
    if n <= _MAX_COLUMNS:
        value, gradient, hessian = _expansion_at_nodes(model, Z, Y)
        return value, gradient, hessian.reshape(n, n, -1)

    def column(_: tuple, d: Float[Array, "L r"]) -> tuple[tuple[Array, Array], Float[Array, "n N"]]:
        value, gradient, change = _along_at_nodes(model, Z, Y, jnp.broadcast_to(d[..., None], Z.shape))
        return (value, gradient), change.reshape(n, -1)

    (value, gradient), hessian = lax.scan(column, (jnp.zeros_like(Z[0, 0]), jnp.zeros_like(Z)), _basis(Z))
    return value, gradient, hessian


def moreau(
    model: Model,
    z: Float[Array, "L r N"],
    h: Float[Array, "L r N"],
    V: Float[Array, "L r r"],
    y: Float[Array, "L t N"],
) -> Float[Array, " N"]:
    """Return the objective whose minimum over `z` is the Moreau envelope.

    Args:
        model: gives `loss`.
        z, h: student fields.
        V: response.
        y: teacher fields.
    """
    d = z - h
    return 0.5 * total(total(d * apply(inverse(V), d))) + loss_at_nodes(model, z, y)


def prox_gradient(
    model: Model,
    z: Float[Array, "L r N"],
    h: Float[Array, "L r N"],
    V: Float[Array, "L r r"],
    y: Float[Array, "L t N"],
) -> Float[Array, "L r N"]:
    """Return the gradient of `moreau` in `z`; it is zero at the proximal operator."""
    return apply(inverse(V), z - h) + gradient_at_nodes(model, z, y)


def moreau_hessian(
    model: Model, z: Float[Array, "L r N"], V: Float[Array, "L r r"], y: Float[Array, "L t N"]
) -> tuple[Float[Array, "L*r L*r N"], Float[Array, "L*r L*r 1"]]:
    """Return the Hessian of `moreau` in z, and its part V^{-1}."""
    precision = inverse_response(V)
    return expansion_at_nodes(model, z, y)[2] + precision, precision


class Expansion(eqx.Module):
    """Expansion of `moreau` to second order at points z; n = L r."""

    loss: Float[Array, " N"]  # `moreau` is the sum of the loss and the quadratic part
    quadratic: Float[Array, " N"]
    slope: Float[Array, "n N"]  # gradient
    hessian: Float[Array, "n n N"]


def expand(
    model: Model,
    z: Float[Array, "n N"],
    h: Float[Array, "n N"],
    V: Float[Array, "L r r"],
    y: Float[Array, "L t N"],
) -> Expansion:
    """Expand `moreau` to second order, by one evaluation of the loss, its gradient and its Hessian.

    Args:
        z, h: flattened over tokens and columns.
    """
    L, r, n = V.shape[0], V.shape[1], z.shape[0]
    value, grad, hess = expansion_at_nodes(model, z.reshape(L, r, -1), y)
    precision, d = inverse_response(V), z - h
    pull = matvec(precision, d)
    return Expansion(value, 0.5 * total(pull * d), grad.reshape(n, -1) + pull, hess + precision)


def least_pivots(V: Float[Array, "L r r"]) -> Float[Array, " L*r"]:
    """Return the least pivots of a Hessian of `moreau`: smaller ones are raised so that a step descends."""
    precision = inverse_response(V)[..., 0]
    return 1e-3 * jnp.stack([precision[k, k] for k in range(len(precision))])


def inverse_response(V: Float[Array, "L r r"]) -> Float[Array, "L*r L*r 1"]:
    """Return V^{-1} of all tokens as one block-diagonal matrix."""
    return jax.scipy.linalg.block_diag(*inverse(V))[..., None]
