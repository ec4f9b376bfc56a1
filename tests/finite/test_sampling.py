"""Sampled sentences follow the law that they are drawn from; starts along their teacher, encodings or at random."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import model_of

import tiedattn_jax as ta
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.diagnosis import check_fit
from tiedattn_jax.finite.sampling import atom_sizes, draw_classes, draw_population, realised, sample_data, start
from tiedattn_jax.model.law import SpectralLaw
from tiedattn_jax.model.layers import LAYERS


def population(model, d, seed=1, normalise=True):
    """Draw teacher, encodings and variances of a population, as arrays of numpy."""
    sizes = atom_sizes(model.law(), d)
    draw = jax.jit(lambda key: draw_population(model, sizes, key, normalise))
    teacher, drawn = jax.tree.map(np.asarray, draw(jax.random.key(seed)))
    return teacher, drawn.encodings, drawn.gamma


def assert_moments(teacher, encodings, law, k, part):
    """Assert that encodings and teacher have the moments of atom k of the law on its coordinates."""
    tau, pi = encodings[:, part].T * len(teacher) ** 0.5, teacher[part]
    for found, expected in ((tau.T @ tau, law.tau), (pi.T @ pi, law.pi), (tau.T @ pi, law.cross)):
        np.testing.assert_allclose(found / len(tau), np.asarray(expected)[k], atol=1e-12)


def test_encodings_are_the_models_and_the_teacher_is_orthogonal(model, data):
    encodings, teacher = np.asarray(data.encodings), np.asarray(data.teacher)
    np.testing.assert_allclose(encodings @ encodings.T, [[1, -1], [-1, 1]], atol=1e-13)
    np.testing.assert_allclose(encodings[0], np.full(400, 400**-0.5), atol=1e-14)
    np.testing.assert_allclose(encodings @ teacher, 0, atol=1e-12)
    np.testing.assert_allclose(realised(model, data).rho, data.rho, rtol=1e-12)


def test_second_moments_of_a_law_with_two_atoms(two_atoms):
    data, law = sample_data(two_atoms, 400, 1.0, jax.random.key(1), normalise=True), two_atoms.law()
    assert data.gamma.shape == (2, 400) and data.labels is None
    for k, part in enumerate((slice(0, 100), slice(100, 400))):
        assert_moments(np.asarray(data.teacher), np.asarray(data.encodings), law, k, part)
        x = 20 * np.asarray(data.x)[:, :, part]
        np.testing.assert_allclose(np.var(x - x.mean(1)[:, None], axis=(1, 2)), law.gamma[k], rtol=0.05)


@pytest.mark.full
def test_teachers_have_the_length_of_the_law_on_average():
    """Orthogonality to the encodings, atom by atom, shortens no teacher; overlaps stay exact, and empty atoms drop."""
    tau = np.array([[[1.0, -1.0], [-1.0, 1.0]], [[1.0, 0.3], [0.3, 2.0]], [[1.0, 0.0], [0.0, 1.0]]])
    pi, cross = np.array([[[2.0]], [[1.0]], [[1.0]]]), np.array([[[0.0], [0.0]], [[0.4], [0.2]], [[0.0], [0.0]]])
    law = SpectralLaw(*map(jnp.asarray, ([0.2, 0.8, 0.0], np.full((3, 2), 0.25), tau, pi, cross)))
    model, keys = ta.DotProduct(spectrum=law), jax.random.split(jax.random.key(0), 1000)
    sizes = atom_sizes(law, 25)
    draws = jax.jit(jax.vmap(lambda key: draw_population(model, sizes, key, False)))(keys)
    teachers, encodings = np.asarray(draws[0])[..., 0], np.asarray(draws[1].encodings)
    for k, part in enumerate((slice(0, 5), slice(5, 25))):
        squares = np.mean(teachers[:, part] ** 2, 1)
        assert abs(np.mean(squares) - pi[k, 0, 0]) < 4 * np.std(squares) / 1000**0.5
        overlaps = np.mean(5 * encodings[:, :, part] * teachers[:, None, part], 2)
        np.testing.assert_allclose(overlaps, np.broadcast_to(cross[k, :, 0], overlaps.shape), atol=1e-11)


@pytest.mark.full
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
    (teacher, encodings, _), law = population(model, 80), model.law()
    for k, part in enumerate((slice(0, 60), slice(60, 80))):
        assert_moments(teacher, encodings, law, k, part)
        np.testing.assert_allclose(80**0.5 * encodings[:, part].mean(1), law.tau_mean[k], atol=1e-12)
    np.testing.assert_array_equal(teacher[:60], 0)
    np.testing.assert_allclose(80**0.5 * encodings[:, :60], [[1.0] * 60, [-1.0] * 60], atol=1e-12)


def test_labels_are_inner_products_of_the_raw_ones(model, data):
    y, inputs, encodings = map(np.asarray, (data.raw_labels(model), data.inputs(), data.encodings))
    x = inputs + encodings
    np.testing.assert_allclose(data.labels.energy, np.sum(y**2, (1, 2)) / 400, rtol=1e-11)
    np.testing.assert_allclose(data.labels.cross, np.einsum("nki,nli->kln", y, x) / 400, atol=1e-12)
    np.testing.assert_allclose(data.labels.gram, np.einsum("nki,nli->kln", x, x) / 400, atol=1e-12)
    target = np.asarray(jax.jit(jax.vmap(model.target))(data.y))
    np.testing.assert_allclose(y, np.einsum("nkl,nli->nki", target, inputs), atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["threefry2x32", "unsafe_rbg"])
def test_instances_by_vmap(model, kind):
    keys = jax.random.split(jax.random.key(0, impl=kind), 3)
    batch = jax.vmap(lambda k: sample_data(model, 40, 1.5, k))(keys)
    single = sample_data(model, 40, 1.5, keys[1])
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(np.asarray(a)[1], b, atol=1e-13)
    raw = sample_data(model, 40, 1.5, jax.random.PRNGKey(3)), sample_data(model, 40, 1.5, jax.random.key(3))
    np.testing.assert_array_equal(*(data.x for data in raw))


def test_a_bug_in_a_target_is_not_taken_for_its_absence():
    class Wrong(ta.DotProduct):
        def target(self, Y):
            return self.omgea * Y

    with pytest.raises(ta.InputError, match=r"AttributeError: .*omgea"):
        sample_data(model_of(Wrong), 50, 1.0, jax.random.key(0))


def test_matrices_in_twice_their_dimensions():
    """Two coordinates of every eigenvector have the moments of the matrices, though they are fewer than L + t + 1."""
    rng = np.random.default_rng(0)
    arrays = rng.uniform(0.1, 0.5, (2, 5)), rng.standard_normal((2, 5)) / 5**0.5, rng.standard_normal((5, 1))
    model = ta.DotProduct(spectrum=SpectralLaw.from_matrices(*arrays))
    (teacher, encodings, gamma), law = population(model, 10, normalise=False), jax.tree.map(np.asarray, model.law())
    for k in range(5):
        part = slice(2 * k, 2 * k + 2)
        assert_moments(teacher, encodings, law, k, part)
        np.testing.assert_allclose(gamma[:, part], np.repeat(law.gamma[k][:, None], 2, 1), rtol=1e-12)


def test_the_fewest_dimensions_and_no_encodings():
    """Moments of small encodings are exact, too, in L + t + 1 dimensions; without encodings the teacher is random."""
    law = SpectralLaw([1.0], np.full((1, 2), 0.25), [[[0.3, 0.1], [0.1, 0.2]]], np.ones((1, 1, 1)), [[[0.2], [-0.1]]])
    assert_moments(*population(ta.DotProduct(spectrum=law), 4)[:2], law, 0, slice(None))
    np.testing.assert_allclose(population(ta.DotProduct(), 4)[1], [[0.5] * 4, [-0.5] * 4], atol=1e-14)
    teacher, encodings, _ = population(ta.DotProduct(encodings=[[0.0], [0.0]]), 4)
    np.testing.assert_array_equal(encodings, 0)
    np.testing.assert_allclose(np.sum(teacher**2) / 4, 1.0, rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("layer", LAYERS)
def test_sampled_data_have_the_model_s_scale(layer):
    """Sampled data fit their model, even one sentence in few dimensions with strong encodings, or without a teacher."""
    model = LAYERS[layer](sigma=0.1, encodings=[[3.0, 1.0], [9.0, -1.0]])
    for seed in range(5):
        data = sample_data(model, 6, 1 / 6, jax.random.key(seed))
        check_fit(model, data)
        small = eqx.tree_at(lambda s: (s.teacher, s.y), data, (None, 0.05 * np.asarray(data.y)))
        check_fit(model, small)  # with two numbers y may be that small by chance


def test_sentences_of_a_kind_have_its_share():
    """The number of sentences of each kind is its share of n, up to one."""
    shares = {(0, 0): 0.5, (0, 1): 0.3, (1, 1): 0.2}
    law = ta.SpectralLaw.of_classes([0.25, 0.36], shares, encodings=[[1.0, 0.0], [-1.0, 0.0]])
    classes = np.asarray(eqx.filter_jit(draw_classes)(ta.DotProduct(spectrum=law), 101, jax.random.key(0)))
    for kind, share in shares.items():
        assert abs(np.sum(np.all(classes == kind, 1)) - 101 * share) <= 1


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
        ((0.7, 0.3, 0.0), 40, (28, 12, 0)),  # an atom of weight zero needs none
    ],
)
def test_coordinates_are_shared_out_among_the_atoms(weights, d, sizes):
    tau = np.array([[[1.0, -1.0], [-1.0, 1.0]]] * 3)
    arrays = weights, np.full((3, 2), 0.25), tau, np.ones((3, 1, 1)), np.zeros((3, 2, 1))
    law = SpectralLaw(*map(jnp.asarray, arrays))
    if sizes is None:
        with pytest.raises(ta.InputError, match=r"d must leave L \+ t \+ 1 = 4 coordinates to every atom"):
            atom_sizes(law, d)
    else:
        assert atom_sizes(law, d) == sizes


def test_starts(model, data):
    """Starts have their directions, the unit of weights 1 as norm or a quarter of it, or norms relative to it."""
    teacher, encodings, key = np.asarray(data.teacher), np.asarray(data.encodings), jax.random.key(1)
    starts = {name: np.asarray(start(model, data, name, key)) for name in ("semantic", "positional", "random")}
    np.testing.assert_array_equal(starts["semantic"], teacher)
    np.testing.assert_allclose(starts["positional"], 5 * encodings[:1].T, atol=1e-13)
    np.testing.assert_allclose(np.linalg.norm(starts["random"]), 20.0, rtol=0.2)
    assert np.any(start(model, data, "random", jax.random.key(2)) != starts["random"])
    for name, unit in (("semantic", 1.0), ("positional", 0.25), ("random", 1.0)):
        halved = start(model, data, name, key, scale=0.5)
        np.testing.assert_allclose(halved, 0.5 / unit * starts[name], rtol=1e-14, atol=1e-14)


def test_starts_in_other_units_and_their_default_key():
    """Columns that are not set are random, of a tenth of the unit of weights, 1 / (2 sigma) here."""
    rng = np.random.default_rng(0)
    x, teacher = 0.125 * rng.standard_normal((20, 2, 400)), rng.standard_normal((400, 1))
    model = ta.DotProduct(rank=2, sigma=0.125)
    data = Data.from_sentences(x, teacher=teacher, encodings=np.outer([1.0, -1.0], np.full(400, 400**-0.5)))
    random = np.asarray(start(model, data, "random"))
    np.testing.assert_array_equal(random, start(model, data, "random", jax.random.key(0)))
    np.testing.assert_allclose(np.std(random), 4.0, rtol=0.1)
    semantic = np.asarray(start(model, data, "semantic"))
    np.testing.assert_array_equal(semantic[:, :1], teacher)
    np.testing.assert_allclose(semantic[:, 1], 0.1 * random[:, 1], rtol=1e-12)
