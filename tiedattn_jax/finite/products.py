"""Products of the data with matrices of few columns: fields, their transpose, and overlaps."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..base.arrays import inner_products, precise, total
from ..model.model import Model


@jax.jit
def covariances(gamma: Float[Array, "S #d"], a: Float[Array, "d i"], b: Float[Array, "d j"]) -> Float[Array, "S i j"]:
    """Return ``a^T Sigma_l b / d`` for every token or class, whose variances are `gamma`."""
    return inner_products(gamma[:, None] * a.T, jnp.broadcast_to(b.T, (len(gamma), *b.T.shape))) / len(a)


@jax.jit
@precise
@partial(jax.checkpoint, prevent_cse=False)  # a gradient keeps the arguments only, and no copies of x
def student_fields(x: Float[Array, "L n d"], Q: Float[Array, "d r"]) -> Float[Array, "L r n"]:
    """Return the local fields of the student, ``x_l Q``, in one pass over `x`.

    The product is computed column by column. A product of a matrix and a vector runs at the speed of memory, a batched
    product of thin matrices at a fraction of it. On GPUs XLA has no fast product of a matrix and a vector: it may pad
    the vector to a matrix of 16 columns. There the product is written as sums, token by token, which XLA computes in
    one kernel. The sums are not written with a token axis, because XLA gives such arrays another order of axes in
    memory and would then copy x.
    """

    def products(x: Array, Q: Array) -> Float[Array, "L r n"]:
        return jnp.stack([jnp.tensordot(x, Q[:, a], 1) for a in range(Q.shape[1])], 1)

    def by_sums(x: Array, Q: Array) -> Float[Array, "L r n"]:
        return jnp.stack([jnp.stack([jnp.sum(rows * Q[:, a], 1) for a in range(Q.shape[1])]) for rows in x])

    return lax.platform_dependent(x, Q, cpu=products, default=by_sums)


@precise
def back_project(x: Float[Array, "L n d"], g: Float[Array, "L r n"]) -> Float[Array, "d r"]:
    """Apply the transpose of `student_fields`, ``sum_l x_l^T g_l``."""

    def products(x: Array, g: Array) -> Float[Array, "d r"]:
        return jnp.stack([jnp.tensordot(g[:, a], x, 2) for a in range(g.shape[1])], 1)

    def by_sums(x: Array, g: Array) -> Float[Array, "d r"]:
        tokens = range(len(x))
        return jnp.stack([total(g[l, a, :, None] * x[l] for l in tokens).sum(0) for a in range(g.shape[1])], 1)

    return lax.platform_dependent(x, g, cpu=products, default=by_sums)


def power_of_two(size: Float[Array, ""]) -> Float[Array, ""]:
    """Return the power of two nearest to a positive number; one for zero."""
    exponent = jnp.round(jnp.log2(jnp.where(size > 0, size, 1.0)))
    return jnp.ldexp(jnp.ones_like(size), exponent.astype(jnp.int32))


def weight_unit(model: Model, variance: Float[Array, ""]) -> Float[Array, ""]:
    """Return the unit of weights: the power of two nearest to ``field_scale / (2 sigma)``, for the `variance` sigma^2.

    Searches measure weights in it and losses in `evaluation.loss_unit`. They therefore do the same in all units of the
    inputs. Both units are one in the standard setting, and arithmetic with powers of two is exact.
    """
    return power_of_two(0.5 * model.field_scale / jnp.sqrt(variance))


@jax.jit
def token_gram(x: Float[Array, "L n d"]) -> Float[Array, "L L n"]:
    """Return the inner products ``x_k . x_l`` of the tokens of every sentence."""
    L = x.shape[0]
    upper = {(k, l): jnp.sum(x[k] * x[l], -1) for k in range(L) for l in range(k, L)}
    return jnp.stack([jnp.stack([upper[min(k, l), max(k, l)] for l in range(L)]) for k in range(L)])
