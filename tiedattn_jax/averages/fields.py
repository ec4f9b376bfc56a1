"""The Gaussian law of the local fields: from standard normals to fields, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..linalg import apply, cholesky, inverse, solve
from ..model import Model
from ..overlaps import Overlaps, residual_covariance


def fields(model: Model, x: Overlaps, student: jax.Array, teacher: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fields h (L, r, N) and y (L, t, N) of standard normals: first the teacher's, then the student's given it.

    ``y = rho^{1/2} v``, plus its mean where tokens have classes, and ``h = m + theta rho^{-1} y + (q - theta rho^{-1}
    theta^T)^{1/2} eta``, Cholesky roots. The target attention of a node is then the same for every state.
    """
    y = teacher_fields(model, teacher)
    slope, spread = conditional(model, x)
    return x.m[..., None] + apply(slope, y) + apply(spread, student), y


def teacher_fields(model: Model, teacher: jax.Array) -> jax.Array:
    """Fields y (L, t, N) of standard normals; those of noise, where a model has them,
    stay what they are behind them.
    """
    t, mean = model.shape[2], model.teacher_mean
    y = apply(cholesky(model.rho), teacher[:, :t])
    y = y if mean is None else y + mean[..., None]
    return jnp.concatenate([y, teacher[:, t:]], 1) if model.noise else y


def conditional(model: Model, x: Overlaps) -> tuple[jax.Array, jax.Array]:
    """Regression theta rho^{-1} of h on y, (L, r, t), zero on noise, and Cholesky root of what it leaves, (L, r, r)."""
    slope = jnp.swapaxes(solve(model.rho, jnp.swapaxes(x.theta, -1, -2)), -1, -2)
    slope = jnp.pad(slope, ((0, 0), (0, 0), (0, model.noise))) if model.noise else slope
    return slope, cholesky(residual_covariance(model, x))


def whiten(model: Model, x: Overlaps, h: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Standard normals of given student fields, and the log density of these fields given the teacher's, (N,)."""
    slope, spread = conditional(model, x)
    student = apply(inverse(spread), h - x.m[..., None] - apply(slope, y))
    return student, -0.5 * jnp.sum(student**2, (0, 1)) - log_volume(model, x)


def log_volume(model: Model, x: Overlaps) -> jax.Array:
    """Logarithm of the volume in the space of the student's fields that a unit of standard normals takes."""
    return jnp.sum(jnp.log(jnp.diagonal(conditional(model, x)[1], axis1=1, axis2=2)))
