"""Fixtures of the tests at finite size: one instance, and a model without the optional methods."""

import jax
import jax.numpy as jnp
import pytest

from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.model.law import SpectralLaw
from tiedattn_jax.model.model import Model


class TwoAtoms(Model):
    """A model whose tokens have two variances, with encodings and teacher that correlate on one of them."""

    lam: jax.Array

    @property
    def shape(self):
        return 2, 1, 1

    def loss(self, Z, Y):
        return 0.5 * jnp.sum((jax.nn.softmax(Z @ Z.T) - jax.nn.softmax(Y @ Y.T)) ** 2)

    def law(self):
        return SpectralLaw(
            weights=jnp.array([0.25, 0.75]),
            gamma=jnp.array([[0.5, 0.2], [0.1, 0.3]]),
            tau=jnp.array([[[1.0, 0.3], [0.3, 2.0]], [[0.5, 0.0], [0.0, 0.5]]]),
            pi=jnp.array([[[2.0]], [[0.5]]]),
            cross=jnp.array([[[0.4], [0.2]], [[0.0], [0.0]]]),
        )


@pytest.fixture(scope="session")
def two_atoms():
    return TwoAtoms(jnp.array(0.01))


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, 400, 1.5, jax.random.key(3))
