"""Sampled sentences follow the law that they are drawn from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.sampling import atom_sizes, realised, sample_data, start
from tiedattn_jax.model.law import SpectralLaw

pytestmark = pytest.mark.usefixtures("fast_compilation")


def test_encodings_are_the_models_and_the_teacher_is_orthogonal(data):
    np.testing.assert_allclose(data.encodings @ data.encodings.T, [[1, -1], [-1, 1]], atol=1e-13)
    np.testing.assert_allclose(data.encodings[0], np.full(400, 400**-0.5), atol=1e-14)
    np.testing.assert_allclose(data.encodings @ data.teacher, 0, atol=1e-12)


@pytest.mark.parametrize("normalise", [True, False])
def test_norm_of_the_teacher(model, normalise):
    data = sample_data(model, 300, 1.0, jax.random.key(0), normalise=normalise)
    deviation = abs(float(jnp.sum(data.teacher**2) / 300) - 1)
    assert deviation < 1e-12 if normalise else 1e-4 < deviation < 5 * (2 / 300) ** 0.5
    np.testing.assert_allclose(realised(model, data).rho, data.rho, rtol=1e-12)
    np.testing.assert_allclose(data.encodings @ data.teacher, 0, atol=1e-11)


def test_second_moments_of_a_law_with_two_atoms(two_atoms):
    data, law = sample_data(two_atoms, 400, 1.0, jax.random.key(1), normalise=True), two_atoms.law()
    assert data.gamma.shape == (2, 400) and data.labels is None
    for k, part in enumerate((slice(0, 100), slice(100, 400))):
        tau, pi = 20 * data.encodings[:, part].T, data.teacher[part]
        size = tau.shape[0]
        np.testing.assert_allclose(tau.T @ tau / size, law.tau[k], atol=1e-12)
        np.testing.assert_allclose(pi.T @ pi / size, law.pi[k], atol=1e-12)
        np.testing.assert_allclose(tau.T @ pi / size, law.cross[k], atol=1e-12)
        variance = np.var(
            20 * np.asarray(data.x)[:, :, part], axis=(1, 2), mean=20 * data.x[:, :, part].mean(1)[:, None]
        )
        np.testing.assert_allclose(variance, law.gamma[k], rtol=0.05)


def test_means_of_a_law():
    """Sampled encodings and teacher have the exact moments of a law with a mean, random directions and zero entries."""

    class Mixed(ta.DotProduct):
        def law(self):
            standard = super().law()
            doubled = jax.tree.map(lambda a: jnp.repeat(a, 2, 0), standard)
            mean, pi = jnp.array([[1.0, -1.0], [0.5, 0.0]]), jnp.array([[[0.0]], [[5.0]]])
            tau = mean[:, :, None] * mean[:, None] + jnp.array([[[0.0]], [[1.0]]]) * jnp.array([[2.0, 0.5], [0.5, 1.0]])
            return dataclasses.replace(doubled, weights=jnp.array([0.75, 0.25]), tau=tau, pi=pi, tau_mean=mean)

    model = Mixed(**vars(ta.DotProduct(penalty=ta.L1(0.01))))
    data, law = sample_data(model, 80, 1.0, jax.random.key(1), normalise=True), model.law()
    for k, part in enumerate((slice(0, 60), slice(60, 80))):
        tau, pi = 80**0.5 * data.encodings[:, part].T, data.teacher[part]
        np.testing.assert_allclose(tau.mean(0), law.tau_mean[k], atol=1e-12)
        np.testing.assert_allclose(tau.T @ tau / len(tau), law.tau[k], atol=1e-12)
        np.testing.assert_allclose(pi.T @ pi / len(tau), law.pi[k], atol=1e-12)
        np.testing.assert_allclose(tau.T @ pi, 0, atol=1e-11)
    np.testing.assert_array_equal(data.teacher[:60], 0)
    np.testing.assert_allclose(80**0.5 * data.encodings[:, :60], [[1.0] * 60, [-1.0] * 60], atol=1e-12)


def test_labels_are_inner_products_of_the_raw_ones(model, data):
    y, x = np.asarray(data.raw_labels(model)), np.asarray(data.inputs() + data.encodings)
    np.testing.assert_allclose(data.labels.energy, np.sum(y**2, (1, 2)) / 400, rtol=1e-11)
    np.testing.assert_allclose(data.labels.cross, np.einsum("nki,nli->kln", y, x) / 400, atol=1e-12)
    np.testing.assert_allclose(data.labels.gram, np.einsum("nki,nli->kln", x, x) / 400, atol=1e-12)
    target = jax.vmap(model.target)(data.y)
    np.testing.assert_allclose(y, np.einsum("nkl,nli->nki", target, data.inputs()), atol=1e-12)


def test_instances_by_vmap(model):
    keys = jax.random.split(jax.random.key(0), 3)
    batch = jax.vmap(lambda k: sample_data(model, 50, 1.0, k))(keys)
    single = sample_data(model, 50, 1.0, keys[1])
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(a[1], b, atol=1e-13)


def test_a_bug_in_a_target_is_not_taken_for_its_absence():
    class Wrong(ta.DotProduct):
        def target(self, Y):
            return self.omgea * Y

    standard = ta.DotProduct()
    misspelt = Wrong(
        **{name: getattr(standard, name) for name in ("omega", "sigma", "lam", "mixing", "encodings", "teacher")}
    )
    with pytest.raises(ta.InputError, match=r"AttributeError: .*omgea"):
        sample_data(misspelt, 50, 1.0, jax.random.key(0))


def test_matrices_in_twice_their_dimensions():
    """Two coordinates of every eigenvector have the moments of the matrices, though they are fewer than L + t + 1."""
    rng = np.random.default_rng(0)
    arrays = rng.uniform(0.1, 0.5, (2, 5)), rng.standard_normal((2, 5)) / 5**0.5, rng.standard_normal((5, 1))
    model = ta.DotProduct(spectrum=SpectralLaw.from_matrices(*arrays))
    data, law = sample_data(model, 10, 1.0, jax.random.key(0)), model.law()
    for k in range(5):
        tau, pi = 10**0.5 * data.encodings[:, 2 * k : 2 * k + 2].T, data.teacher[2 * k : 2 * k + 2]
        for found, expected in ((tau.T @ tau, law.tau), (pi.T @ pi, law.pi), (tau.T @ pi, law.cross)):
            np.testing.assert_allclose(found / 2, expected[k], atol=1e-12)
        np.testing.assert_allclose(data.gamma[:, 2 * k : 2 * k + 2], np.repeat(law.gamma[k][:, None], 2, 1), rtol=1e-12)


def test_small_encodings_that_overlap_with_the_teacher(two_atoms):
    """Their moments are exact, as are those of encodings of norm one."""

    class Small(type(two_atoms)):
        def law(self):
            tau, cross = jnp.array([[[0.3, 0.1], [0.1, 0.2]]]), jnp.array([[[0.2], [-0.1]]])
            return SpectralLaw(jnp.ones(1), jnp.full((1, 2), 0.25), tau, jnp.ones((1, 1, 1)), cross)

    model = Small(two_atoms.lam)
    data, law = sample_data(model, 4, 1.0, jax.random.key(1), normalise=True), model.law()
    tau = 2 * data.encodings.T
    np.testing.assert_allclose(tau.T @ tau / 4, law.tau[0], atol=1e-12)
    np.testing.assert_allclose(tau.T @ data.teacher / 4, law.cross[0], atol=1e-12)
    np.testing.assert_allclose(data.teacher_gram, law.pi[0], atol=1e-12)


def test_the_fewest_dimensions_and_no_encodings():
    """In L + t + 1 dimensions the encodings lie along the ones, too; without encodings the teacher is random."""
    data = sample_data(ta.DotProduct(), 4, 1.0, jax.random.key(0))
    np.testing.assert_allclose(data.encodings, [[0.5] * 4, [-0.5] * 4], atol=1e-14)
    without = sample_data(ta.DotProduct(encodings=[[0.0], [0.0]]), 4, 1.0, jax.random.key(0), normalise=True)
    np.testing.assert_array_equal(without.encodings, 0)
    np.testing.assert_allclose(without.teacher_gram, 1.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("weights", "d", "sizes"),
    [
        ((0.7, 0.2, 0.1), 40, (28, 8, 4)),
        ((0.6995, 0.2, 0.1005), 40, (28, 8, 4)),  # L + t + 1 coordinates will do for any weight
        ((0.7, 0.2, 0.1), 30, (21, 6, 3)),  # fewer only if their share is an integer
        ((0.6996, 0.2, 0.1004), 30, None),
        ((0.69975, 0.2, 0.10025), 30, (21, 6, 3)),
        ((0.7, 0.2, 0.1), 20, (14, 4, 2)),
        ((0.7, 0.2, 0.1), 10, None),  # and not fewer than the vectors span, two here
        ((0.7, 0.2, 0.1), 33, None),
    ],
)
def test_coordinates_are_shared_out_among_the_atoms(weights, d, sizes):
    tau = jnp.array([[[1.0, -1.0], [-1.0, 1.0]]] * 3)
    law = SpectralLaw(jnp.array(weights), jnp.full((3, 2), 0.25), tau, jnp.ones((3, 1, 1)), jnp.zeros((3, 2, 1)))
    if sizes is None:
        with pytest.raises(ta.InputError, match=r"d must leave L \+ t \+ 1 = 4 coordinates to every atom"):
            atom_sizes(law, d)
    else:
        assert atom_sizes(law, d) == sizes


def test_starts_in_other_units_and_their_default_key():
    """Small columns are a tenth of the unit of weights, 1 / (2 sigma) here; the positional start is a quarter of it."""
    rng = np.random.default_rng(0)
    x, teacher = 0.125 * rng.standard_normal((20, 2, 400)), rng.standard_normal((400, 1))
    encodings = jnp.asarray(np.outer([1.0, -1.0], np.full(400, 400**-0.5)))
    model = ta.DotProduct(rank=2, sigma=0.125)
    data = Data.from_sentences(jnp.asarray(x), teacher=jnp.asarray(teacher), encodings=encodings)
    random = start(model, data, "random")
    np.testing.assert_array_equal(random, start(model, data, "random", jax.random.key(0)))
    np.testing.assert_allclose(jnp.std(random), 4.0, rtol=0.1)
    np.testing.assert_allclose(start(model, data, "semantic")[:, 1], 0.1 * random[:, 1], rtol=1e-12)
    positional = start(model, data, "positional")
    np.testing.assert_allclose(positional[:, 0] if jnp.std(positional[:, 0]) < 1e-9 else positional[:, 1], 1.0)
