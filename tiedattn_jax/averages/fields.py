"""The Gaussian law of the local fields: from standard normals to fields, and back."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.arrays import apply, cholesky, inverse, solve
from ..model.model import Model
from ..model.overlaps import Overlaps, residual_covariance


def fields(
    model: Model, x: Overlaps, student: Float[Array, "L r N"], teacher: Float[Array, "L t N"]
) -> tuple[Float[Array, "L r N"], Float[Array, "L t N"]]:
    """Return fields h and y from standard normals: the teacher's, and the student's given these.

    They are ``y = rho^{1/2} v``, plus its mean where tokens have classes, and
    ``h = m + theta rho^{-1} y + (q - theta rho^{-1} theta^T)^{1/2} eta``, with Cholesky roots. The target attention of
    a node is then the same for every state.
    """
    y = teacher_fields(model, teacher)
    slope, spread = conditional(model, x)
    return x.m[..., None] + apply(slope, y) + apply(spread, student), y


def teacher_fields(model: Model, teacher: Float[Array, "L t N"]) -> Float[Array, "L t N"]:
    """Return teacher fields from standard normals; fields of noise, if any, follow them unchanged."""
    t, mean = model.shape[2], model.teacher_mean
    y = apply(cholesky(model.rho), teacher[:, :t])
    y = y if mean is None else y + mean[..., None]
    return jnp.concatenate([y, teacher[:, t:]], 1) if model.noise else y


def conditional(model: Model, x: Overlaps) -> tuple[Float[Array, "L r t"], Float[Array, "L r r"]]:
    """Return the regression theta rho^{-1} of h on y, and the root of the residual covariance.

    The root is the Cholesky factor. The regression is zero on fields of noise.
    """
    slope = jnp.swapaxes(solve(model.rho, jnp.swapaxes(x.theta, -1, -2)), -1, -2)
    slope = jnp.pad(slope, ((0, 0), (0, 0), (0, model.noise))) if model.noise else slope
    return slope, cholesky(residual_covariance(model, x))


def whiten(
    model: Model, x: Overlaps, h: Float[Array, "L r N"], y: Float[Array, "L t N"]
) -> tuple[Float[Array, "L r N"], Float[Array, " N"]]:
    """Return the standard normals of student fields, and their log density given the teacher's.

    The log density lacks its constant, a power of 2 pi.
    """
    slope, spread = conditional(model, x)
    student = apply(inverse(spread), h - x.m[..., None] - apply(slope, y))
    return student, -0.5 * jnp.sum(student**2, (0, 1)) - log_volume(model, x)


def log_volume(model: Model, x: Overlaps) -> Float[Array, ""]:
    """Return the logarithm of the volume of student fields that corresponds to a unit volume of standard normals."""
    return jnp.sum(jnp.log(jnp.diagonal(conditional(model, x)[1], axis1=1, axis2=2)))
