"""Parts of data against numpy: variances of classes, mean squares, shapes, and how sentences are spread."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tiedattn_jax as ta
from tiedattn_jax.finite.data import Data, Spread
from tiedattn_jax.finite.sampling import draw_classes

pytestmark = pytest.mark.usefixtures("fast_compilation")
L, N, D = 2, 7, 5


def arrays(seed=0):
    """Random sentences with strong encodings, a teacher of two columns, noise, and classes with means."""
    rng = np.random.default_rng(seed)
    shapes = {"inputs": (N, L, D), "teacher": (D, 2), "encodings": (L, D), "means": (3, D), "noise": (N, L, 1)}
    made = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    classes = np.zeros((N, L), int)
    classes[:, 1], classes[3, 1] = 1, 2  # one token is of class 2
    return made | {"labels": jnp.asarray(rng.standard_normal((N, L, D))), "classes": classes}


def sentences(**parts):
    given = arrays() | parts
    return Data.from_sentences(given.pop("inputs"), **given)


def test_variances_of_classes():
    """They are those about the means, also of a class of one token."""
    data, given = sentences(), arrays()
    deviations = np.asarray(given["inputs"] - given["means"][given["classes"]])
    expected = [np.mean(deviations[given["classes"] == s] ** 2) for s in range(3)]
    np.testing.assert_allclose(data.gamma, np.array(expected)[:, None], rtol=1e-12)
    plain = sentences(means=None, classes=None)
    np.testing.assert_allclose(plain.gamma, np.mean(given["inputs"] ** 2, (0, 2))[:, None], rtol=1e-12)


def test_mean_squares_leave_the_encodings_out():
    given = arrays()
    inputs, fields = sentences().mean_squares()
    assert float(inputs) == pytest.approx(float(jnp.mean(given["inputs"] ** 2)), rel=1e-12)
    assert float(fields) == pytest.approx(float(jnp.mean((given["inputs"] @ given["teacher"]) ** 2) / D), rel=1e-12)
    inputs, fields = sentences(teacher=None).mean_squares()
    assert float(inputs) == pytest.approx(float(jnp.mean(given["inputs"] ** 2)), rel=1e-12) and fields is None


def test_overlaps_of_classes_and_without_a_teacher():
    """The overlaps q and theta are those of the classes, m those of encodings and means."""
    given, Q = arrays(), jnp.asarray(np.random.default_rng(1).standard_normal((D, 1)))
    x, gamma = sentences().overlaps(Q), np.asarray(sentences().gamma)[:, :, None]
    np.testing.assert_allclose(x.q, gamma * np.asarray(Q.T @ Q) / D, rtol=1e-12)
    np.testing.assert_allclose(x.theta, gamma * np.asarray(Q.T @ given["teacher"]) / D, rtol=1e-12)
    vectors = np.concatenate([given["encodings"], given["means"]])
    np.testing.assert_allclose(x.m, vectors @ np.asarray(Q) / D**0.5, rtol=1e-12)
    unknown = sentences(teacher=None)
    assert unknown.shape == (L, N, D, 1) and unknown.contents == "with labels only"
    assert unknown.overlaps(Q).theta.shape == (3, 1, 1) and np.all(np.isnan(unknown.overlaps(Q).theta))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"means": None}, "means must"),
        ({"classes": None}, "classes must be integers from 0 to 2"),
        ({"classes": np.full((N, L), "a")}, "classes must be integers from 0 to 2"),
        ({"labels": jnp.ones((N, L, L))}, r"labels must be exact labels, .* got \(n, L, L\)"),
    ],
    ids=["no means", "no classes", "names", "attention"],
)
def test_parts_that_do_not_fit(parts, message):
    with pytest.raises(ta.InputError, match=message):
        sentences(**parts)


def test_the_smallest_data():
    """One sentence in two dimensions will do, and labels of shape (n, L, L) where L = d."""
    x = jnp.asarray([[[0.1, 0.2]], [[0.3, 0.4]]])
    assert Data(x, jnp.ones((1, 2, 1))).shape == (2, 1, 2, 1)
    data = Data.from_sentences(x, jnp.ones((2, 1, 2)))
    assert data.shape == (1, 2, 2, 1)
    square = Data.from_sentences(jnp.ones((3, 2, 2)), jnp.ones((3, 2, 2)))
    np.testing.assert_allclose(square.labels.energy, 2.0)


def test_nothing_is_spread_over_one_device():
    """Seven sentences are on one device wherever there are fewer than seven."""
    data = sentences()
    assert data.shard() is data


def specs(tree):
    return [a.sharding.spec for a in jax.tree.leaves(tree)]


def test_what_is_spread_over_devices():
    """Sentences are spread along their axis; the rest, and the numbers, stay."""
    data, n = sentences(), PartitionSpec("sentences")
    spread = data.spread_over(Spread(1))
    assert [*specs((spread.x, spread.y, spread.noise)), *specs(spread.labels)] == [
        PartitionSpec(None, "sentences"), n, n, n, *[PartitionSpec(None, None, "sentences")] * 2
    ]  # fmt: skip
    assert spread == data
    plain = sentences(noise=None, labels=None).spread_over(Spread(1))
    assert plain.noise is None and plain.labels is None and plain.y is not None
    labelled = sentences(teacher=None, means=None, classes=None).spread_over(Spread(1))
    assert labelled.y is None and specs(labelled.x) == [PartitionSpec(None, "sentences")]


@pytest.mark.parametrize("noisy", [True, False])
def test_what_of_sentences_on_demand_is_spread(noisy):
    data = ta.sample_data(ta.DotProduct(), 5, 2.0, jax.random.key(0), stored=False)
    if noisy:
        data = eqx.tree_at(lambda s: s.noise, data, jnp.ones((10, 2, 1)), is_leaf=lambda leaf: leaf is None)
    spread, last = data.spread_over(Spread(1)), PartitionSpec(None, None, None, "sentences")
    assert specs((spread.y, spread.noise)) == [PartitionSpec("sentences")] * (1 + noisy)
    assert spread.spread == Spread(1)
    for dice in (spread.dice, spread.memory(3, 3)):
        assert specs((dice.right.images, dice.left.basis)) == [last, last]
    np.testing.assert_array_equal(spread.y, data.y)


def test_sentences_of_a_kind_have_its_share():
    """The number of sentences of each kind is its share of n, up to one."""
    shares = {(0, 0): 0.5, (0, 1): 0.3, (1, 1): 0.2}
    law = ta.SpectralLaw.of_classes([0.25, 0.36], shares, encodings=[[1.0, 0.0], [-1.0, 0.0]])
    classes = np.asarray(draw_classes(ta.DotProduct(spectrum=law), 101, jax.random.key(0)))
    assert classes.shape == (101, 2)
    for kind, share in shares.items():
        assert abs(np.sum(np.all(classes == kind, 1)) - 101 * share) <= 1
