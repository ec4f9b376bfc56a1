"""The law of the fields within a cluster of minima, and the weight of a sheet of minimisers; see `clusters`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..averages.moreau import ProxProblem
from ..averages.prox import Prox, local_minima, search
from ..base.arrays import apply, inverse, matvec, one_by_one, precise, total
from ..model.model import Model

_MIN_CURVATURE = 0.3  # least curvature of the weight over that of the Gaussian law; smaller ones are raised to it


class ClusterLaw(NamedTuple):
    """N fields, and the law of the fields h + C xi in the clusters around them; n = L r, and M = K N for K places."""

    model: Model
    V: Float[Array, "L r r"]  # response
    spread: Float[Array, "L r r"]  # Cholesky root C of q1 - q0
    h: Float[Array, "L r N"]  # student fields
    y: Float[Array, "L t N"]  # teacher fields

    def at(self, xi: Float[Array, "n M"]) -> tuple[ProxProblem, Float[Array, "L r M"]]:
        """Return the proximal problem at standard normals, and the student's fields there."""
        count = xi.shape[-1] // self.h.shape[-1]
        shift = apply(self.spread, xi.reshape(*self.h.shape[:2], -1))
        return ProxProblem(self.model, self.V, jnp.tile(self.y, count)), jnp.tile(self.h, count) + shift

    def pull(self, z: Float[Array, "L r N"]) -> Float[Array, "n N"]:
        """Return C^T V^{-1} z.

        For z = h - (minimiser at h) this is the gradient of the envelope E in xi.
        """
        return apply(jnp.swapaxes(self.spread, -1, -2), apply(inverse(self.V), z)).reshape(-1, z.shape[-1])

    def search(self, xi: Float[Array, "n M"]) -> Prox:
        """Search for the global minimisers at standard normals."""
        return search(*self.at(xi))

    def follow(
        self, z: Float[Array, "L r M"], xi: Float[Array, "n M"]
    ) -> tuple[Float[Array, "L r M"], Float[Array, " M"]]:
        """Return the minimisers next to z at standard normals, and their energies."""
        problem, fields = self.at(xi)
        return local_minima(problem, z, fields)

    def energy(self, z: Float[Array, "L r M"], xi: Float[Array, "n M"]) -> Float[Array, " M"]:
        """Return the Moreau envelope E at standard normals, of which z are the minimisers."""
        problem, fields = self.at(xi)
        return problem.energy(z, fields)

    @precise
    def weight_of(self, low: Float[Array, "L r N"], s: Float[Array, ""]) -> SheetWeight:
        """Return the weight exp(-|xi|^2 / 2 - s E) of a sheet, with E expanded to second order around xi = 0.

        Args:
            low: minimisers of the sheet at xi = 0.
            s: Parisi parameter.
        """
        (L, r, N), n = self.h.shape, low.shape[0] * low.shape[1]
        eye, block = jnp.eye(n, dtype=low.dtype), jax.scipy.linalg.block_diag(*self.spread)[..., None]
        # The Hessian of E in the field is V^{-1} (I - dz/dh); in xi it is C^T V^{-1} (I - dz/dh) C.
        force_jacobian = eye[..., None] - ProxProblem(self.model, self.V, self.y).jacobian(low)
        hessian = apply(inverse(self.V), force_jacobian.reshape(L, r, -1)).reshape(n, n, N)
        hessian = jnp.einsum("abn,bcn,cdn->nad", jnp.swapaxes(block, 0, 1), hessian, block)
        values, vectors = one_by_one(jnp.linalg.eigh, eye + 0.5 * s * (hessian + jnp.swapaxes(hessian, 1, 2)))
        values = jnp.maximum(values, _MIN_CURVATURE)

        def power(exponent: float) -> Float[Array, "n n N"]:
            """Return a power of the weight's precision matrix."""
            return jnp.moveaxis((vectors * values[:, None] ** exponent) @ jnp.swapaxes(vectors, 1, 2), 0, -1)

        centre = -s * matvec(power(-1.0), self.pull(self.h - low))
        return SheetWeight(centre, power(-0.5), power(0.5), -0.5 * jnp.sum(jnp.log(values), 1))


class SheetWeight(NamedTuple):
    """The Gaussian weight of a sheet at N fields, in xi: that of xi = c + R eta with eta standard normal; n = L r."""

    centre: Float[Array, "n N"]  # c
    root: Float[Array, "n n N"]  # R, symmetric
    inverse_root: Float[Array, "n n N"]  # R^{-1}
    log_det: Float[Array, " N"]  # log det R

    def normals(self, eta: Float[Array, "n *places #N"]) -> Float[Array, "n *places N"]:
        """Return xi = c + R eta at eta."""
        n, N = self.centre.shape
        axes = (1,) * (eta.ndim - 2)
        return self.centre.reshape(n, *axes, N) + matvec(self.root.reshape(n, n, *axes, N), eta)

    def along(self, u: Float[Array, "n N"], xi: Float[Array, "n *places N"]) -> Float[Array, "*places N"]:
        """Return u . R^{-1} (xi - c): the coordinates of xi along directions u of eta."""
        n, N = self.centre.shape
        axes = (1,) * (xi.ndim - 2)
        return total(matvec(self.inverse_root, u).reshape(n, *axes, N) * (xi - self.centre.reshape(n, *axes, N)))

    def pulled(self, force: Float[Array, "n N"]) -> Float[Array, "n N"]:
        """Turn a gradient in xi into a gradient in eta."""
        return matvec(self.root, force)
