"""Products as other devices than CPUs compute them, and the units that are powers of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.finite import products

RNG = np.random.default_rng(0)


def test_products_by_sums_are_those_of_matrices(monkeypatch):
    """On accelerators products with few columns are sums, which a CPU can compute, too."""
    monkeypatch.setattr(products.lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))
    x, Q, g = (RNG.standard_normal(shape) for shape in ((2, 5, 4), (4, 3), (2, 3, 5)))
    fields = products._fields_by_platform(jnp.asarray(x), jnp.asarray(Q))
    np.testing.assert_allclose(fields, np.einsum("lni,ia->lan", x, Q), rtol=1e-11)
    back = products.back_project(jnp.asarray(x), jnp.asarray(g))
    np.testing.assert_allclose(back, np.einsum("lni,lan->ia", x, g), rtol=1e-11)


@pytest.mark.parametrize(
    ("size", "power"), [(0.0, 1.0), (1.0, 1.0), (1.4, 1.0), (1.42, 2.0), (0.7, 0.5), (0.71, 1.0), (0.01, 2.0**-7)]
)
def test_the_nearest_power_of_two(size, power):
    assert float(products.power_of_two(jnp.asarray(size))) == power


def test_covariances_of_every_token():
    gamma, a, b = RNG.uniform(0.1, 1, (2, 4)), RNG.standard_normal((4, 2)), RNG.standard_normal((4, 3))
    expected = np.einsum("li,ia,ib->lab", gamma, a, b) / 4
    np.testing.assert_allclose(products.covariances(*map(jnp.asarray, (gamma, a, b))), expected, rtol=1e-11)


def test_derivatives_of_the_fields_in_sentences_and_weights():
    """Both tangents count; without one there is none."""
    x, dx, Q, dQ = (jnp.asarray(RNG.standard_normal(shape)) for shape in ((2, 5, 4), (2, 5, 4), (4, 1), (4, 1)))
    _, slope = jax.jvp(products.student_fields, (x, Q), (dx, dQ))
    np.testing.assert_allclose(slope, np.swapaxes(dx @ Q + x @ dQ, 1, 2), rtol=1e-11)
    constant = jax.jvp(lambda t: products.student_fields(x, Q) + t, (0.0,), (1.0,))[1]
    np.testing.assert_array_equal(constant, np.ones((2, 1, 5)))
