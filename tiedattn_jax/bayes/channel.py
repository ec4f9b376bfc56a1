"""The label channel: what one label tells a learner that knows the law of the data and of the teacher.

# notation: w (L, t) the mean and V (L, t, t) the covariance of the teacher's fields Y before the label O is seen,
# Z(O, w) = int dY N(Y; w, V) p(O | Y) the evidence, g = d log Z / dw = V^{-1} (E[Y | O, w] - w) the score.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..averages.fields import teacher_fields
from ..base.linalg import cholesky, solve
from ..model.model import Model
from ..model.preimages import Preimages


def log_evidence(label: Preimages, w: Float[Array, "L t"], V: Float[Array, "L t t"]) -> Float[Array, ""]:
    """Return log Z(O, w) of a label, up to a constant of the target."""
    covariance = V + label.noise * jnp.eye(V.shape[-1], dtype=V.dtype)
    distance = (label.fields - w)[..., None]  # (K, L, t, 1)
    square = jnp.sum(
        distance * solve(jnp.broadcast_to(covariance, (*distance.shape[:2], *V.shape[1:])), distance), (1, 2, 3)
    )
    log_volume = jnp.sum(jnp.log(jnp.diagonal(cholesky(covariance), axis1=-2, axis2=-1)))
    return jax.nn.logsumexp(label.log_weight - 0.5 * square) - log_volume - 0.5 * w.size * np.log(2 * np.pi)


score = jax.grad(log_evidence, argnums=1)
curvature = jax.jacfwd(score, argnums=1)  # Hessian of log Z in w, (L, t, L, t)


def labels_at_nodes(model: Model, Y: Float[Array, "L _ N"]) -> Preimages:
    """Return the preimages of the labels at all nodes, leaves (N, ...); fields of noise follow those of the teacher."""
    return jax.vmap(lambda y: model.preimages(*model.label(y)), -1)(Y)


def curvatures_at_zero(model: Model, normals: Float[Array, "L _ N"]) -> Float[Array, "N L t L t"]:
    """Return the Hessians at w = 0, where nothing is known yet, of the labels at all nodes of standard normals."""
    labels, rho = labels_at_nodes(model, teacher_fields(model, normals)), model.rho
    return jax.vmap(curvature, (0, None, None))(labels, jnp.zeros(rho.shape[:2], rho.dtype), rho)
