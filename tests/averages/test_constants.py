"""A layer may hold any constant that jax promotes, although the first search for minima runs in single precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages import prox as px
from tiedattn_jax.averages.moreau import ProxProblem

MIXING = np.array([[0.6, 0.4], [0.4, 0.6]])


class UserLayer(ta.Model):
    """The standard layer as written by a user who does not think of float types."""

    omega: jax.Array
    shape = (2, 1, 1)

    def loss(self, Z, Y):
        S = jax.nn.softmax(jnp.einsum("ik,jk,ij->ij", np.eye(2, dtype=int) @ Z, Z, np.ones((2, 2))), -1)
        T = (1 - self.omega) * jax.nn.softmax(Y @ Y.T) + self.omega * MIXING
        return 0.5 * jnp.sum(self.trace * (S.astype(jnp.float64) - T) ** 2) * np.float64(1)

    def law(self):
        halves, tau = jnp.array([0.5, 0.5]), jnp.array([[[1.0, -1.0], [-1.0, 1.0]]] * 2)
        return ta.SpectralLaw(halves, 0.25 * jnp.ones((2, 2)), tau, jnp.ones((2, 1, 1)), jnp.zeros((2, 2, 1)))


@pytest.mark.full
def test_the_proximal_operator_is_that_of_the_library(model):
    h, y = 0.5 * np.random.default_rng(0).standard_normal((2, 2, 1, 256))
    V, prox = jnp.full((2, 1, 1), 12.0), jax.jit(lambda m: px.prox(ProxProblem(m, V, jnp.asarray(y)), jnp.asarray(h)))
    result, expected = (prox(m) for m in (UserLayer(lam=model.lam, omega=model.omega), model))
    np.testing.assert_allclose(result.z, expected.z, atol=1e-10)
    assert result.z.dtype == h.dtype and np.all(result.converged)
