"""Sampled sentences against the law they are drawn from, and sums over them against the raw arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.data import (
    Data,
    _heldout,
    heldout_error,
    linear_baseline,
    raw_labels,
    realised,
    sample_data,
    sentence_losses,
    start,
    student_fields,
)
from tiedattn_jax.model import Model, SpectralLaw
from tiedattn_jax.observables import gen_error_linear
from tiedattn_jax.observables import test_error as error_of_overlaps
from tiedattn_jax.overlaps import Overlaps

pytestmark = pytest.mark.usefixtures("quick_programs")


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


def raw_losses(model, data, Q):
    """``||y - f||^2 / (2 d)`` of every sentence from inputs, labels and predictions in full."""
    x, d = data.inputs(), data.x.shape[2]
    z = (x + data.encodings) @ Q / d**0.5
    f = jax.vmap(model.student)(z) @ (x + data.encodings)
    return jnp.sum((raw_labels(model, data) - f) ** 2, (1, 2)) / (2 * d)


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, 400, 1.5, jax.random.key(3))


def test_shapes_and_fields(model, data):
    assert data.shape == (2, 600, 400, 1) and data.alpha == 1.5
    x = data.inputs()
    np.testing.assert_allclose(data.x, np.swapaxes(x + data.encodings, 0, 1) / 20, atol=1e-14)
    np.testing.assert_allclose(data.y, x @ data.teacher / 20, atol=1e-13)
    # 480,000 independent entries of variance sigma^2 = .25; the relative error of a variance is sqrt(2 / N) = .2 %
    np.testing.assert_allclose(jnp.var(x), 0.25, rtol=0.01)
    assert abs(np.mean(x)) < 5 * 0.5 / x.size**0.5


def test_encodings_are_the_models_and_the_teacher_is_orthogonal(model, data):
    np.testing.assert_allclose(data.encodings @ data.encodings.T, [[1, -1], [-1, 1]], atol=1e-13)
    np.testing.assert_allclose(data.encodings[0], np.full(400, 400**-0.5), atol=1e-14)
    np.testing.assert_allclose(data.encodings @ data.teacher, 0, atol=1e-12)


@pytest.mark.parametrize("normalise", [True, False])
def test_norm_of_the_teacher(model, normalise):
    data = sample_data(model, 300, 1.0, jax.random.key(0), normalise=normalise)
    off = abs(float(jnp.sum(data.teacher**2) / 300) - 1)
    assert off < 1e-12 if normalise else 1e-4 < off < 5 * (2 / 300) ** 0.5
    np.testing.assert_allclose(realised(model, data).rho, data.rho, rtol=1e-12)
    np.testing.assert_allclose(data.encodings @ data.teacher, 0, atol=1e-11)


def test_second_moments_of_a_law_with_two_atoms():
    data = sample_data(TwoAtoms(jnp.array(0.01)), 400, 1.0, jax.random.key(1), normalise=True)
    law = TwoAtoms(jnp.array(0.01)).law()
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


def test_exact_losses_equal_those_of_the_raw_arrays(model, data):
    Q = start(model, data, "random", jax.random.key(5))
    fast = sentence_losses(model, data, student_fields(data.x, Q), exact=True)
    np.testing.assert_allclose(fast, raw_losses(model, data, Q), rtol=1e-11)


def test_data_from_raw_sentences(model, data):
    again = Data.from_sentences(
        data.inputs(), raw_labels(model, data), teacher=data.teacher, encodings=data.encodings, gamma=data.gamma
    )
    for a, b in zip(jax.tree.leaves(data), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    estimated = Data.from_sentences(data.inputs(), fields=data.y, encodings=data.encodings)
    np.testing.assert_allclose(estimated.gamma, 0.25, rtol=0.02)
    assert estimated.teacher is None and np.all(np.isnan(estimated.overlaps(data.teacher).theta))


def test_exact_and_limiting_losses_differ_by_one_over_root_d(model):
    def rms(d):
        data = sample_data(model, d, 1000 / d, jax.random.key(d), normalise=True)
        Z = student_fields(data.x, data.teacher * 0.5)
        gap = sentence_losses(model, data, Z, exact=True) - sentence_losses(model, data, Z)
        return float(jnp.sqrt(jnp.mean(gap**2)))

    # A factor of 16 in d: 4 in the difference, +- 10 % from 1000 sentences and from corrections of higher order.
    assert rms(250) / rms(4000) == pytest.approx(4.0, rel=0.25)


def test_heldout_error_equals_the_gaussian_average(model, data):
    Q = data.teacher * 0.6 + 20 * 0.2 * data.encodings[:1].T
    found = heldout_error(model, data, Q, jax.random.key(1), sentences=40_000)
    x = data.overlaps(Q, jnp.ones((2, 1, 1)))
    x = Overlaps(x.q, x.V, x.theta, x.m)
    rule = jax.tree.map(lambda a: a[0], ta.sobol_nodes(model, 2**13, replicates=1))
    expected = error_of_overlaps(realised(model, data), x, rule)
    assert abs(found.value - expected) < 4 * found.stderr and found.stderr < 0.01 * expected


def test_heldout_error_on_whole_sentences(model, data):
    Q = data.teacher * 0.6 + 20 * 0.2 * data.encodings[:1].T
    limit = heldout_error(model, data, Q, jax.random.key(1), sentences=100_000)
    exact = heldout_error(model, data, Q, jax.random.key(2), sentences=8_000, exact=True)
    # The exact error of a sentence is larger by O(1/d): a few per cent at d = 400.
    assert abs(exact.value - limit.value) < 4 * exact.stderr + 0.03 * limit.value
    assert 0 < exact.stderr < 0.03 * exact.value


def test_memory_of_the_test_error():
    model = ta.dot_product()
    args = [jnp.ones(shape) for shape in ((1000, 1), (2, 1000), (2, 1), (1000, 1))]
    compiled = _heldout.lower(model, *args, jax.random.key(0), 256, 196, True).compile()
    assert compiled.compiled.memory_analysis().temp_size_in_bytes < 1e8


def test_linear_baseline(model, data):
    inputs = data.inputs() + data.encodings
    rows = np.swapaxes(inputs, 1, 2).reshape(-1, 2)
    targets = np.swapaxes(raw_labels(model, data), 1, 2).reshape(-1, 2)
    W = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    fit = linear_baseline(data)
    np.testing.assert_allclose(fit.W, W, atol=1e-10)
    residual = targets - rows @ W.T
    np.testing.assert_allclose(fit.train_loss, np.sum(residual**2) / (2 * 400 * 600), rtol=1e-9)
    assert float(jnp.linalg.norm(linear_baseline(data, ridge=1e3).W)) < float(jnp.linalg.norm(fit.W))
    rule = jax.tree.map(lambda a: a[0], ta.sobol_nodes(model, 2**13, replicates=1))
    theory = gen_error_linear(realised(model, data), rule)
    assert abs(fit.gen_error.value - theory) < 4 * fit.gen_error.stderr + 0.02 * theory
    fresh = sample_data(model, 400, 1.5, jax.random.key(4))
    assert linear_baseline(data, test=fresh).gen_error.value != fit.gen_error.value


def test_instances_by_vmap(model):
    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.vmap(lambda k: sample_data(model, 50, 1.0, k))(keys)
    one = sample_data(model, 50, 1.0, keys[1])
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a[1], b, atol=1e-13)


def test_starts(model, data):
    np.testing.assert_array_equal(start(model, data, "semantic"), data.teacher)
    Q = start(model, data, "positional", scale=400**-0.5)
    np.testing.assert_allclose(Q, data.encodings[:1].T, atol=1e-13)
    np.testing.assert_allclose(jnp.linalg.norm(start(model, data, "positional")), 5.0)
    assert jnp.any(start(model, data, "random", jax.random.key(1)) != start(model, data, "random", jax.random.key(2)))
    wide = eqx.tree_at(lambda m: m.lam, ta.dot_product(rank=2), jnp.array(0.01))
    assert start(wide, data, "semantic").shape == (400, 2)


def test_bad_input(model, data):
    x, y = data.x, data.y
    cases = [
        (lambda: sample_data(model, 2, 1.0, jax.random.key(0)), "d must be an integer of at least"),
        (lambda: sample_data(model, 100, 0.001, jax.random.key(0)), "alpha must be at least"),
        (lambda: sample_data(model, 100, -1.0, jax.random.key(0)), "alpha must be positive"),
        (lambda: sample_data(model, 100.0, 1.0, jax.random.key(0)), "d must be an integer"),
        (lambda: Data(x[0], y), r"x must have shape \(L, n, d\)"),
        (lambda: Data(x, y[:-1]), r"y must have shape \(n, L, t\) with n = 600, L = 2"),
        (lambda: Data(x, y, data.teacher[:-1]), r"teacher must have shape \(d, t\) with d = 400"),
        (lambda: Data(x, y, encodings=x[0]), r"encodings must have shape \(L, d\)"),
        (lambda: Data(x.at[0, 3, 2].set(jnp.nan), y), "x must be finite, got 1 entries"),
        (lambda: Data(x, y, gamma=jnp.zeros((2, 1))), "gamma must be positive"),
        (lambda: Data.from_sentences(data.inputs()), "fields must be given"),
        (lambda: Data.from_sentences(data.inputs(), y, fields=y), "labels must have shape"),
        (lambda: start(model, data, "sematic"), "init must be 'semantic'"),
        (lambda: start(model, data, jnp.ones((399, 1))), r"init must have shape \(d, r\) = \(400, 1\)"),
        (lambda: start(model, Data(x, y), "semantic"), "teacher must be known"),
        (lambda: start(model, Data(x, y), "positional"), "init must be"),
        (lambda: linear_baseline(Data(x, y)), "data must have labels"),
        (lambda: heldout_error(model, data, data.teacher, jax.random.key(0), sentences=1), "sentences must be"),
        (lambda: sentence_losses(model, Data(x, y), x[:, None, :, 0], exact=True), "exact=True needs data with labels"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
