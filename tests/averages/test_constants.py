"""A layer may hold any constant that jax promotes, although the first search for minima runs in single precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages import prox as px
from tiedattn_jax.averages.moreau import ProxProblem

pytestmark = pytest.mark.usefixtures("fast_compilation")
MIXING = np.array([[0.6, 0.4], [0.4, 0.6]])


class UserLayer(ta.Model):
    """The standard layer as written by a user who does not think of float types."""

    omega: jax.Array
    shape = (2, 1, 1)

    def attention(self, Z):
        return jax.nn.softmax(Z @ Z.T)

    def loss(self, Z, Y):
        T = (1 - self.omega) * jax.nn.softmax(Y @ Y.T) + self.omega * MIXING
        return 0.5 * jnp.sum(self.trace * (self.attention(Z) - T) ** 2)

    def law(self):
        halves, tau = jnp.array([0.5, 0.5]), jnp.array([[[1.0, -1.0], [-1.0, 1.0]]] * 2)
        return ta.SpectralLaw(halves, 0.25 * jnp.ones((2, 2)), tau, jnp.ones((2, 1, 1)), jnp.zeros((2, 2, 1)))


class Integers(UserLayer):
    def attention(self, Z):
        return jax.nn.softmax((np.eye(2, dtype=int) @ Z) @ Z.T)


class Mixed(UserLayer):
    def attention(self, Z):
        return jax.nn.softmax(jnp.einsum("ik,jk,ij->ij", Z, Z, np.ones((2, 2))), -1)


class Double(UserLayer):
    def loss(self, Z, Y):
        return super().loss(Z.astype(jnp.float64), Y) * np.float64(1)


@pytest.mark.parametrize("layer", [UserLayer, Integers, Mixed, Double])
def test_the_proximal_operator_is_that_of_the_library(model, nodes, layer):
    custom = layer(lam=model.lam, omega=model.omega)
    h, y = 0.5 * nodes.stack.student[0, ..., :256], 0.5 * nodes.stack.teacher[0, ..., :256]
    V = jnp.full((2, 1, 1), 12.0)
    result, expected = (jax.jit(lambda m: px.prox(ProxProblem(m, V, y), h))(m) for m in (custom, model))
    np.testing.assert_allclose(result.z, expected.z, atol=1e-10)
    assert result.z.dtype == h.dtype and bool(jnp.all(result.converged))
