"""Parts of data against numpy, the two ways to make them, and how sentences are spread over devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, model_of
from jax.sharding import PartitionSpec

import tiedattn_jax as ta
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.finite.data import Data, Spread
from tiedattn_jax.finite.diagnosis import check_estimate, check_fit
from tiedattn_jax.finite.evaluation import sentence_losses
from tiedattn_jax.finite.products import student_fields

L, N, D = 2, 7, 5


def arrays():
    """Random sentences with strong encodings, a teacher of two columns, noise, and classes with means."""
    rng = np.random.default_rng(0)
    shapes = {"inputs": (N, L, D), "teacher": (D, 2), "encodings": (L, D), "means": (3, D), "noise": (N, L, 1)}
    made = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    classes = np.zeros((N, L), int)
    classes[:, 1], classes[3, 1] = 1, 2  # one token is of class 2
    return made | {"labels": rng.standard_normal((N, L, D)), "classes": classes}


def sentences(**parts):
    given = arrays() | parts
    return Data.from_sentences(given.pop("inputs"), **given)


def test_shapes_and_fields(data):
    assert data.shape == (2, 600, 400, 1) and data.alpha == 1.5
    x, encodings, teacher = map(np.asarray, (data.inputs(), data.encodings, data.teacher))
    np.testing.assert_allclose(data.x, np.swapaxes(x + encodings, 0, 1) / 20, atol=1e-14)
    np.testing.assert_allclose(data.y, x @ teacher / 20, atol=1e-13)
    # 480,000 independent entries of variance sigma^2 = .25; the relative error of a variance is sqrt(2 / N) = .2 %
    np.testing.assert_allclose(np.var(x), 0.25, rtol=0.01)
    assert abs(np.mean(x)) < 5 * 0.5 / x.size**0.5


@pytest.mark.full
def test_a_rare_kind_of_sentences_counts_with_its_share():
    """The mean variance of the classes is 80 times that of nearly all sentences, of inputs and of labels."""
    rare, frequent = (
        ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.25, 40.0], {(1, 1): share, (0, 0): 1 - share}))
        for share in (1e-3, 0.5)
    )
    data = ta.sample_data(rare, 40, 1.5, jax.random.key(1))
    for part in (data, eqx.tree_at(lambda d: d.teacher, data, None)):
        check_fit(rare, part)
    with pytest.raises(InputError, match=r"got 0\.012\d times that variance"):
        check_fit(frequent, data)


def test_data_from_raw_sentences(model, data):
    known = {name: getattr(data, name) for name in ("teacher", "encodings", "gamma")}
    rebuilt = Data.from_sentences(data.inputs(), data.raw_labels(model), **known)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), data, rebuilt)
    estimate = check_estimate("Q", model, data, np.ones((400, 1), np.float32))
    assert estimate.dtype == data.x.dtype


def test_variances():
    """They are those about the means of classes, also of a class of one token; encodings are left out."""
    data, given = sentences(), arrays()
    inputs, classes = given["inputs"], given["classes"]
    deviations = inputs - given["means"][classes]
    expected = [np.mean(deviations[classes == s] ** 2) for s in range(3)]
    np.testing.assert_allclose(data.gamma, np.array(expected)[:, None], rtol=1e-12)
    np.testing.assert_array_equal(data.classes, classes)
    plain = sentences(means=None, classes=None)
    np.testing.assert_allclose(plain.gamma, np.mean(inputs**2, (0, 2))[:, None], rtol=1e-12)
    square, of_fields = np.mean(inputs**2), np.mean((inputs @ given["teacher"]) ** 2) / D
    np.testing.assert_allclose(data.mean_squares(), [square, of_fields], rtol=1e-12)
    without, fields = sentences(teacher=None).mean_squares()
    assert float(without) == pytest.approx(square, rel=1e-12) and fields is None


@pytest.mark.parametrize("plain", [False, True])
def test_overlaps(plain):
    """The overlaps q and theta are those of tokens or classes, m those of encodings and means."""
    given, Q = arrays(), np.random.default_rng(1).standard_normal((D, 1))
    data = sentences(means=None, classes=None) if plain else sentences()
    x, gamma = data.overlaps(Q), np.asarray(data.gamma)[:, :, None]
    np.testing.assert_allclose(x.q, gamma * (Q.T @ Q) / D, rtol=1e-12)
    np.testing.assert_allclose(x.theta, gamma * (Q.T @ given["teacher"]) / D, rtol=1e-12)
    vectors = np.concatenate([given["encodings"], given["means"]])[: 2 if plain else None]
    np.testing.assert_allclose(x.m, vectors @ Q / D**0.5, rtol=1e-12)
    V = jnp.ones((len(gamma), 1, 1))
    assert np.all(np.isnan(x.V)) and np.all(np.asarray(data.overlaps(Q, V).V) == 1)
    unknown = sentences(teacher=None)
    assert unknown.shape == (L, N, D, 1) and unknown.contents == "with labels only" and unknown.y is None
    assert unknown.overlaps(Q).theta.shape == (3, 1, 1) and np.all(np.isnan(unknown.overlaps(Q).theta))


def test_the_smallest_data():
    """One sentence in two dimensions will do, labels of shape (n, L, L) where L = d, and a class without tokens."""
    x = np.array([[[0.1, 0.2]], [[0.3, 0.4]]])
    assert Data(x, np.ones((1, 2, 1))).shape == (2, 1, 2, 1)
    assert Data.from_sentences(x, np.ones((2, 1, 2))).shape == (1, 2, 2, 1)
    square = Data.from_sentences(np.ones((3, 2, 2)), np.ones((3, 2, 2)))
    np.testing.assert_allclose(square.labels.energy, 2.0)
    given = {"means": np.zeros((2, 2)), "classes": np.zeros((1, 2), int), "gamma": np.ones((2, 1))}
    assert Data(x, np.ones((1, 2, 1)), **given).shape == (2, 1, 2, 1)


def test_training_on_exact_labels_alone(model):
    """Without teacher and fields, training on exact labels does the same; what it does not know it says."""
    whole = ta.sample_data(model, 40, 1.5, jax.random.key(0))
    inputs, labels = whole.inputs(), whole.raw_labels(model)
    alone = Data.from_sentences(inputs, labels, encodings=whole.encodings)
    assert "with labels only" in repr(alone) and "with teacher and labels" in repr(whole)
    expected, result = (
        ta.train(model, s, 0.3 * np.asarray(whole.teacher), optimizer="gd", steps=5, exact=True) for s in (whole, alone)
    )
    np.testing.assert_allclose(result.Q, expected.Q, rtol=1e-10)
    np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-10)
    assert np.isnan(result.overlaps.theta).all() and np.isfinite(expected.overlaps.theta).all()
    assert "not known without the teacher" in str(result) and "not known" not in str(expected)
    assert "theta" not in result.to_dict()
    np.testing.assert_allclose(*(ta.finite.linear_baseline(s).W for s in (whole, alone)), rtol=1e-10)


def test_data_carry_the_noise(unchecked):
    """Sentences and teacher are those of the model without noise."""
    noisy = model_of(Noisy)
    data, plain = (ta.sample_data(m, 40, 1.5, jax.random.key(0)) for m in (noisy, ta.DotProduct()))
    assert data.noise.shape == (60, 2, 1) and data.fields.shape == (2, 2, 60) and data.y.shape == (60, 2, 1)
    for name in ("x", "y"):
        np.testing.assert_allclose(getattr(data, name), getattr(plain, name), rtol=1e-12, atol=1e-14)
    noise = np.asarray(data.noise)
    np.testing.assert_allclose([np.mean(noise), np.std(noise)], [0, 1], atol=0.2)
    targets = jax.jit(jax.vmap(noisy.target))(data.y, data.noise)
    np.testing.assert_allclose(data.raw_labels(noisy), np.asarray(targets) @ np.asarray(data.inputs()), atol=1e-13)
    known = {name: getattr(data, name) for name in ("teacher", "encodings", "gamma", "noise")}
    rebuilt = Data.from_sentences(data.inputs(), data.raw_labels(noisy), **known)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), data, rebuilt)
    losses = eqx.filter_jit(sentence_losses)(noisy, data, student_fields(data.x, data.teacher))
    Z = np.asarray(data.x)[:, 7] @ np.asarray(data.teacher)
    np.testing.assert_allclose(losses[7], eqx.filter_jit(noisy.loss)(Z, np.asarray(data.y)[7], noise[7]))
    with pytest.raises(InputError, match="data must have 1 fields of noise a token as the model has, got 0"):
        check_fit(noisy, plain)


def specs(tree):
    return [a.sharding.spec for a in jax.tree.leaves(tree)]


def test_what_is_spread_over_devices():
    """Sentences are spread along their axis; the rest, and the numbers, stay. One device has all of them."""
    data, n = sentences(), PartitionSpec("sentences")
    assert data.shard() is data
    spread = data.spread_over(Spread(1))
    assert [*specs((spread.x, spread.y, spread.noise)), *specs(spread.labels)] == [
        PartitionSpec(None, "sentences"), n, n, n, *[PartitionSpec(None, None, "sentences")] * 2
    ]  # fmt: skip
    assert spread == data
    plain = sentences(noise=None, labels=None).spread_over(Spread(1))
    assert plain.noise is None and plain.labels is None and plain.y is not None
    labelled = sentences(teacher=None, means=None, classes=None).spread_over(Spread(1))
    assert labelled.y is None and specs(labelled.x) == [PartitionSpec(None, "sentences")]


def test_what_of_sentences_on_demand_is_spread():
    data = ta.sample_data(model_of(Noisy), 40, 1.5, jax.random.key(0), stored=False)
    spread, last = data.spread_over(Spread(1)), PartitionSpec(None, None, None, "sentences")
    assert specs((spread.y, spread.noise)) == [PartitionSpec("sentences")] * 2 and spread.spread == Spread(1)
    for dice in (spread.dice, spread.memory(3, 3)):
        assert specs((dice.right.images, dice.left.basis)) == [last, last]
    np.testing.assert_array_equal(spread.y, data.y)
