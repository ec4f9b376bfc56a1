"""Products with sentences on demand against one another: those on both sides are of the same inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.mark.parametrize("kind", ["isotropic", "two atoms"])
def test_products_on_both_sides_are_of_the_same_inputs(kind, model, two_atoms):
    """For fields X Q and the transpose X^T g of two columns each, <g, X Q> = <X^T g, Q>."""
    data = ta.sample_data(model if kind == "isotropic" else two_atoms, 16, 0.5, jax.random.key(0), stored=False)
    rng = np.random.default_rng(0)
    Q, g = jnp.asarray(rng.standard_normal((16, 2))), jnp.asarray(rng.standard_normal((2, 2, 8)))

    @jax.jit
    def products(Q, g):
        fields, memory = data.student_fields(Q, data.memory(10, 1))
        back, memory = data.back_project(g, memory)
        of_teacher, memory = data.student_fields(data.teacher, memory)
        return fields, back, of_teacher

    fields, back, of_teacher = products(Q, g)
    np.testing.assert_allclose(np.einsum("lan,lbn->ab", g, fields), back.T @ Q, rtol=1e-10)
    shift = data.encodings @ data.teacher / 16**0.5
    np.testing.assert_allclose(of_teacher - shift[:, :, None], np.transpose(data.y, (1, 2, 0)), atol=1e-12)
    assert data.mean_squares()[0] == pytest.approx(float(jnp.mean(data.gamma)))
    assert data.mean_squares()[1] == pytest.approx(float(jnp.mean(data.y**2)))


@pytest.mark.parametrize("kind", ["isotropic", "two atoms"])
def test_the_teacher_s_fields_have_their_variance(kind, model, two_atoms):
    """The variance of 2,000 fields of every token is that of the teacher, up to chance of 3 %."""
    data = ta.sample_data(model if kind == "isotropic" else two_atoms, 16, 125.0, jax.random.key(1), stored=False)
    assert data.y.shape == (2000, 2, 1) and data.noise is None
    np.testing.assert_allclose(jnp.mean(data.y**2, 0)[:, 0], data.rho[:, 0, 0], rtol=0.13)
