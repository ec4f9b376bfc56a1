"""The proximal problem at nodes: the energy whose minimum is the proximal operator, and its derivatives.

Arrays carry the node axis last, `(L, r, N)`; see `nodewise`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..base.arrays import apply, inverse, ldl_solve, matvec, total
from ..base.derivatives import derivative_along, with_tangent
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


class Expansion(eqx.Module):
    """Expansion of the energy of a `ProxProblem` to second order at points z; n = L r."""

    loss: Float[Array, " N"]  # the energy is the sum of the loss and the quadratic part
    quadratic: Float[Array, " N"]
    slope: Float[Array, "n N"]  # gradient
    hessian: Float[Array, "n n N"]


class ProxProblem(NamedTuple):
    """The proximal problem at N nodes: the minimum over z of an energy, at given student fields h.

    The energy is ``1/2 sum_l (z_l - h_l)^T V_l^{-1} (z_l - h_l) + loss(z, y)``. Its minimum is the Moreau envelope of
    the loss.
    """

    model: Model  # gives `loss`
    V: Float[Array, "L r r"]  # response
    y: Float[Array, "L t N"]  # teacher fields

    def map_nodes(self, fn: Callable[[Array], Array]) -> ProxProblem:
        """Return the problem at other nodes: `fn` takes them out of an array (..., N)."""
        return self._replace(y=fn(self.y))

    def energy(self, z: Float[Array, "L r N"], h: Float[Array, "L r N"]) -> Float[Array, " N"]:
        """Return the objective whose minimum over `z` is the Moreau envelope."""
        d = z - h
        return 0.5 * total(total(d * apply(inverse(self.V), d))) + loss_at_nodes(self.model, z, self.y)

    def gradient(self, z: Float[Array, "L r N"], h: Float[Array, "L r N"]) -> Float[Array, "L r N"]:
        """Return the gradient of the energy in `z`; it is zero at the proximal operator."""
        return apply(inverse(self.V), z - h) + gradient_at_nodes(self.model, z, self.y)

    def hessian(self, z: Float[Array, "L r N"]) -> tuple[Float[Array, "L*r L*r N"], Float[Array, "L*r L*r 1"]]:
        """Return the Hessian of the energy in z, which is the same for all h, and its part V^{-1}."""
        precision = inverse_response(self.V)
        return expansion_at_nodes(self.model, z, self.y)[2] + precision, precision

    def expand(self, z: Float[Array, "n N"], h: Float[Array, "n N"]) -> Expansion:
        """Expand the energy to second order, by one evaluation of the loss, its gradient and its Hessian.

        Args:
            z, h: flattened over tokens and columns.
        """
        L, r, n = self.V.shape[0], self.V.shape[1], z.shape[0]
        value, grad, hess = expansion_at_nodes(self.model, z.reshape(L, r, -1), self.y)
        precision, d = inverse_response(self.V), z - h
        pull = matvec(precision, d)
        return Expansion(value, 0.5 * total(pull * d), grad.reshape(n, -1) + pull, hess + precision)

    def least_pivots(self) -> Float[Array, " n"]:
        """Return the least pivots of a Hessian of the energy: smaller ones are raised so that a step descends."""
        precision = inverse_response(self.V)[..., 0]
        return 1e-3 * jnp.stack([precision[k, k] for k in range(len(precision))])

    def jacobian(self, z: Float[Array, "L r N"]) -> Float[Array, "L*r L*r N"]:
        """Return dz/dh of the proximal operator on its own sheet, at its values z; tokens are outermost."""
        hess, precision = self.hessian(z)
        return ldl_solve(hess, jnp.broadcast_to(precision, hess.shape))


@with_tangent
def with_implicit_derivative(primals: tuple, tangents: tuple) -> Float[Array, "L r N"]:
    """Return solved minimisers z of a `ProxProblem` at fields h, ``(z, problem, h)``, with their derivatives."""
    z, problem, _ = primals
    force = derivative_along(lambda problem, h: problem.gradient(z, h), primals[1:], tangents[1:])
    hess, _ = problem.hessian(z)
    # Invert rather than solve: many tangents then share one inverse.
    unit = jnp.broadcast_to(jnp.eye(len(hess), dtype=z.dtype)[..., None], hess.shape)
    return -matvec(ldl_solve(hess, unit), force.reshape(len(hess), -1)).reshape(z.shape)


def inverse_response(V: Float[Array, "L r r"]) -> Float[Array, "L*r L*r 1"]:
    """Return V^{-1} of all tokens as one block-diagonal matrix."""
    return jax.scipy.linalg.block_diag(*inverse(V))[..., None]
