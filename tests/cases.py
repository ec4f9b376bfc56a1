"""Reference states of the standard model (omega = .3, sigma = .5, lambda = .01, A = [[.6, .4], [.4, .6]]).

Values are accurate to 3e-6 relative (V at alpha = 2 semantic: 2.4e-5). They come from an integration rule of another
kind than any in the library: lines through the student's fields, broken where the proximal operator jumps.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import tiedattn_jax as ta

# Largest relative difference between a result that is computed alone and one that is computed among others. On a CPU
# every search is computed alone; elsewhere the searches of one call are sums whose order depends on their number.
POOL_ROUNDING = 0.0 if jax.default_backend() == "cpu" else 1e-11


class Case(NamedTuple):
    alpha: float
    branch: str
    q: float
    m: float
    V: float
    theta: float
    train_loss: float
    gen_error: float


CASES = [
    Case(2.0, "semantic", 0.11481726, 0.0, 12.66853, 0.15815827, 0.0035906160, 0.00140421),
    Case(2.0, "positional", 0.05107095, 0.25822912, 11.368800, 0.0, 0.0045127629, 0.00347304),
    Case(1.25, "semantic", 0.08162476, 0.0, 18.321100, 0.11792644, 0.0027210584, 0.00234910),
    Case(1.25, "positional", 0.04710047, 0.25241127, 14.903453, 0.0, 0.0027197949, 0.00339511),
    Case(1.0, "semantic", 0.06808917, 0.0, 21.619534, 0.09458742, 0.0023288556, 0.00285575),
]

# d/d alpha of the overlaps, from the same rule with the jump as a differentiable limit of integration.
DERIVATIVES = {
    (2.0, "positional"): {"q": -3.282e-4, "m": 7.3634e-3, "V": -4.0473},
    (1.0, "semantic"): {"q": 0.056144, "V": -16.960, "theta": 0.11816},
}

ALPHA_C, ALPHA_C_SENSITIVITIES = 1.25154, {"omega": 3.84, "sigma": -13.03, "lam": 84.1}
ALPHA_L = 1.492272


def state(case: Case) -> ta.Overlaps:
    """Overlaps of a case in the library's shapes."""
    # A weak type, which `jnp.full` gives without a dtype, would need another program.
    matrices = [jnp.full((2, 1, 1), v, float) for v in (case.q, case.V, case.theta)]
    return ta.Overlaps(*matrices, case.m * jnp.array([[1.0], [-1.0]]))


class Signs(ta.Model):
    """Every sample picks the sign of its first field: ``(|z_1| - 1)^2 / 2``, and ``k z^2 / 2`` of a second one, if any.

    With a ridge of lam the minimum over the weights is ``s^T (1 + X X^T / lam)^{-1} s / 2`` for signs s. Few samples,
    alpha -> 0, have nearly orthogonal inputs, and the signs are the ground state of the Sherrington-Kirkpatrick (SK)
    model.
    """

    stiffness: float = eqx.field(static=True, default=0.0)

    @property
    def shape(self):
        return (2 if self.stiffness else 1), 1, 1

    def loss(self, Z, Y):
        return 0.5 * (jnp.sqrt(Z[0, 0] ** 2 + 1e-10) - 1) ** 2 + 0.5 * self.stiffness * jnp.sum(Z[1:] ** 2)

    def law(self):
        L, unit = self.shape[0], jnp.ones((1, 1, 1))
        return ta.SpectralLaw(unit[:, 0, 0], jnp.ones((1, L)), jnp.eye(L)[None], unit, jnp.zeros((1, L, 1)))


def channel_of_signs(B, a, q1, q0, s, count=60):
    """M_s in closed form for the envelope ``(h -+ a)^T B (h -+ a) / 2``, with either sign.

    The average within a cluster is Gaussian on either side of the plane ``h^T B a = 0``, where both signs are equally
    good. The one over clusters has `count` Gauss-Hermite nodes for each field.
    """
    xi, weight = np.polynomial.hermite_e.hermegauss(count)
    r, weight = len(a), weight / weight.sum()
    weight = np.prod(np.meshgrid(*[weight] * r), 0).ravel()
    h = jnp.linalg.cholesky(q0) @ np.stack(np.meshgrid(*[xi] * r)).reshape(r, -1)
    inner, across = jnp.linalg.inv(q1 - q0), B @ a
    precision, sides = inner + s * B, []
    for sign in (1, -1):
        centre = jnp.linalg.solve(precision, inner @ h + sign * s * across[:, None])
        exponent = jnp.sum(h * (inner @ h), 0) + s * a @ across - jnp.sum(centre * (precision @ centre), 0)
        size = jnp.linalg.slogdet((q1 - q0) @ precision)[1]
        spread = jnp.sqrt(across @ jnp.linalg.solve(precision, across))
        sides.append(-0.5 * (exponent + size) + jax.scipy.special.log_ndtr(sign * across @ centre / spread))
    return -weight @ jnp.logaddexp(*sides) / s


class Tempered(ta.AttentionLayer):
    """Dot-product attention at a low temperature: fields a fifth of the dot product's do the same."""

    field_scale = 0.2

    def attention(self, fields: jax.Array) -> jax.Array:
        return jax.nn.softmax(fields @ fields.T / self.field_scale**2)
