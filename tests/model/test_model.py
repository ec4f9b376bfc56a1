import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.theory.observables import gen_error_linear


def test_two_token_softmax_is_the_sigmoid_form(model):
    z, y = jnp.array([[0.7], [-0.3]]), jnp.array([[0.4], [0.9]])
    sig = jax.nn.sigmoid
    S = sig(z[0] * (z[0] - z[1])), sig(z[1] * (z[1] - z[0]))
    T = 0.7 * sig(y[0] * (y[0] - y[1])) + 0.3 * 0.6, 0.7 * sig(y[1] * (y[1] - y[0])) + 0.3 * 0.6
    expected = 0.25 * ((S[0] - T[0]) ** 2 + (S[1] - T[1]) ** 2)
    np.testing.assert_allclose(model.loss(z, y), expected[0], rtol=1e-14)


def test_law_of_the_preset(model):
    assert model.shape == (2, 1, 1)
    np.testing.assert_allclose(model.rho, np.full((2, 1, 1), 0.25))
    np.testing.assert_allclose(model.trace, [0.25, 0.25])
    np.testing.assert_allclose(model.law().tau[0], [[1, -1], [-1, 1]])
    np.testing.assert_allclose(ta.DotProduct(teacher=1.06).rho[:, 0, 0], 0.25 * 1.06)
    converted = ta.SpectralLaw(*(a.tolist() for a in jax.tree.leaves(model.law())))  # a law of lists
    jax.tree.map(np.testing.assert_array_equal, converted, model.law())
    assert ta.DotProduct(dtype=jnp.float32).law().gamma.dtype == jnp.float32


def test_what_a_layer_offers_is_declared(model):
    class Bare(ta.Model):
        shape = (2, 1, 1)

        def loss(self, Z, Y):
            return jnp.sum(Z**2)

        def law(self):
            return model.law()

    class Misspelt(ta.DotProduct):
        def target(self, Y):
            return self.omga * Y  # an error inside an optional method is not taken for its absence

    bare, methods, nodes = Bare(lam=jnp.array(0.01)), ("target", "student", "with_teacher"), ta.Sobol(64).rule(model)
    assert all(map(model.provides, methods)) and not any(map(bare.provides, methods))
    with pytest.raises(NotImplementedError, match="target"):
        bare.target(jnp.ones((2, 1)))
    with pytest.raises(ta.InputError, match="target"):
        gen_error_linear(bare, nodes)
    with pytest.raises(AttributeError, match="omga"):
        gen_error_linear(Misspelt(**vars(model)), nodes)
