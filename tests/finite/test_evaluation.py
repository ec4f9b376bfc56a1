"""Losses and errors on sentences, checked against raw arrays, Gaussian averages and least squares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, model_of

import tiedattn_jax as ta
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.evaluation import heldout_error, linear_baseline, sentence_losses
from tiedattn_jax.finite.products import student_fields
from tiedattn_jax.finite.sampling import realised, sample_data, start
from tiedattn_jax.model.law import SpectralLaw
from tiedattn_jax.theory.observables import gen_error, gen_error_linear

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture(scope="module")
def rule(model):
    return ta.Sobol(2**13, replicates=1).rule(model)


def raw_losses(model, data, Q):
    """``||y - f||^2 / (2 d)`` of every sentence from inputs, labels and predictions in full."""
    x, d = data.inputs(), data.x.shape[2]
    z = (x + data.encodings) @ Q / d**0.5
    f = jax.vmap(model.student)(z) @ (x + data.encodings)
    return jnp.sum((data.raw_labels(model) - f) ** 2, (1, 2)) / (2 * d)


def test_exact_losses_equal_those_of_the_raw_arrays(model, data):
    Q = start(model, data, "random", jax.random.key(5))
    fast = sentence_losses(model, data, student_fields(data.x, Q), exact=True)
    np.testing.assert_allclose(fast, raw_losses(model, data, Q), rtol=1e-11)


def test_exact_and_limiting_losses_differ_by_one_over_root_d(model):
    def rms(d):
        data = sample_data(model, d, 1000 / d, jax.random.key(d), normalise=True)
        Z = student_fields(data.x, data.teacher * 0.5)
        gap = sentence_losses(model, data, Z, exact=True) - sentence_losses(model, data, Z)
        return float(jnp.sqrt(jnp.mean(gap**2)))

    # d grows by 16, so the difference falls by 4, +- 10 % from 1000 sentences and from corrections of higher order.
    assert rms(250) / rms(4000) == pytest.approx(4.0, rel=0.25)


def test_heldout_error_equals_the_gaussian_average(model, data, rule):
    Q = data.teacher * 0.6 + 20 * 0.2 * data.encodings[:1].T
    error = heldout_error(model, data, Q, jax.random.key(1), sentences=40_000)
    expected = gen_error(realised(model, data), data.overlaps(Q, jnp.ones((2, 1, 1))), rule).value
    assert abs(error.value - expected) < 4 * error.stderr and error.stderr < 0.01 * expected


def test_fresh_sentences_come_in_whole_blocks(model, data):
    few, many = (heldout_error(model, data, data.teacher, jax.random.key(1), sentences=n) for n in (257, 512))
    assert few.value == many.value and few.stderr == many.stderr


def test_heldout_error_on_whole_sentences(model, data):
    Q = data.teacher * 0.6 + 20 * 0.2 * data.encodings[:1].T
    limit = heldout_error(model, data, Q, jax.random.key(1), sentences=100_000)
    exact = heldout_error(model, data, Q, jax.random.key(2), sentences=8_000, exact=True)
    # The exact error of a sentence is larger by O(1/d): a few per cent at d = 400.
    assert abs(exact.value - limit.value) < 4 * exact.stderr + 0.03 * limit.value
    assert 0 < exact.stderr < 0.03 * exact.value


def test_error_on_given_sentences(model, data):
    """Without a key the sentences of the data are the test set: the mean of the losses, and no teacher is needed."""
    Q = data.teacher * 0.6
    alone = Data.from_sentences(data.inputs(), data.raw_labels(model), encodings=data.encodings)
    losses = raw_losses(model, data, Q)
    error = heldout_error(model, alone, Q, exact=True)
    assert float(error.value) == pytest.approx(float(losses.mean()), rel=1e-8)
    assert float(error.stderr) == pytest.approx(float(losses.std()) / (data.count - 1) ** 0.5, rel=1e-6)
    # The risk is n times this mean, and the ridge.
    risk = ta.risk(model, alone, Q, exact=True)
    ridge = 0.5 * model.lam * jnp.sum(Q**2)
    assert float(data.count * error.value + ridge) == pytest.approx(float(risk))
    fields = heldout_error(model, data, Q)
    mean = jnp.mean(sentence_losses(model, data, student_fields(data.x, Q)))
    assert float(fields.value) == pytest.approx(float(mean))


def test_memory_of_the_test_error(model):
    x, y, teacher, encodings = (jnp.ones(shape) for shape in ((2, 1, 1000), (1, 2, 1), (1000, 1), (2, 1000)))
    data = Data(x, y, teacher, encodings, jnp.ones((2, 1)))
    error = jax.jit(lambda data, Q: heldout_error(model, data, Q, jax.random.key(0), sentences=50_000, exact=True))
    assert error.lower(data, teacher).compile().memory_analysis().temp_size_in_bytes < 1e8


def test_linear_baseline(model, data, rule):
    inputs = data.inputs() + data.encodings
    rows = np.swapaxes(inputs, 1, 2).reshape(-1, 2)
    targets = np.swapaxes(data.raw_labels(model), 1, 2).reshape(-1, 2)
    W = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    fit = linear_baseline(data)
    np.testing.assert_allclose(fit.W, W, atol=1e-10)
    residual = targets - rows @ W.T
    np.testing.assert_allclose(fit.train_error, np.sum(residual**2) / (2 * 400 * 600), rtol=1e-9)
    assert float(jnp.linalg.norm(linear_baseline(data, ridge=1e3).W)) < float(jnp.linalg.norm(fit.W))
    theory = gen_error_linear(realised(model, data), rule).value
    assert abs(fit.gen_error - theory) < 4 * fit.stderr + 0.02 * theory
    fresh = sample_data(model, 400, 1.5, jax.random.key(4))
    assert linear_baseline(data, test=fresh).gen_error != fit.gen_error and fit.ok
    twice = np.repeat(np.eye(3)[:, None], 2, 1)  # both tokens of a sentence are the same
    alike = ta.Data.from_sentences(twice, twice)
    assert linear_baseline(alike).status_name == "singular" and linear_baseline(alike, ridge=0.1).ok


def test_cross_validation_of_the_linear_baseline(data):
    """The cross-validated baseline of ten sentences in eight folds equals fits that leave out each fold by hand."""
    labels = jax.tree.map(lambda a: np.asarray(a)[..., :10], data.labels)
    baseline = linear_baseline(Data(data.x[:, :10], data.y[:10], labels=labels), ridge=0.2)
    errors = np.zeros(10)
    for k in range(10):
        in_training = np.arange(10) % 8 != k % 8
        gram, cross = labels.gram[..., in_training].sum(-1) + 0.2 * np.eye(2), labels.cross[..., in_training].sum(-1)
        W = cross @ np.linalg.inv(gram)
        energy, cross, gram = labels.energy[k], labels.cross[..., k], labels.gram[..., k]
        errors[k] = energy / 2 - np.sum(W * cross) + np.trace(W @ gram @ W.T) / 2
    np.testing.assert_allclose(baseline.gen_error, errors.mean(), rtol=1e-10)
    np.testing.assert_allclose(baseline.stderr, errors.std(ddof=1) / 10**0.5, rtol=1e-8)


def test_held_out_sentences_have_noise_of_their_own():
    noisy = model_of(Noisy)
    data, key = ta.sample_data(noisy, 60, 2.0, jax.random.key(0)), jax.random.key(1)
    Q = 0.5 * data.teacher + 0.5 * jax.random.normal(key, (60, 1))
    error = ta.heldout_error(noisy, data, Q, key, sentences=40_000)
    x = data.overlaps(Q, jnp.ones((2, 1, 1)))
    expected, noiseless = (
        gen_error(model_of(kind, teacher=data.teacher_gram), x, ta.Sobol(2**12).rule(model_of(kind)))
        for kind in (Noisy, ta.DotProduct)
    )
    bar = float(np.hypot(error.stderr, expected.stderr))
    assert abs(float(error.value - expected.value)) < 4 * bar < abs(float(error.value - noiseless.value))


@pytest.fixture(scope="module")
def of_classes():
    """A model of two classes of tokens of different variance and mean, its sentences, and weights."""
    means = [[0.0, 1.0], [0.0, -2.0]]
    shares = {(0, 0): 0.3, (1, 1): 0.7}  # of losses that differ
    law = SpectralLaw.of_classes(
        [0.05, 0.5], shares, encodings=[[1.0, 0.0], [-1.0, 0.0]], means=means, teacher_means=[0.3, -0.6]
    )
    model = ta.DotProduct(spectrum=law)
    data = sample_data(model, 400, 5.0, jax.random.key(0))
    return model, data, 0.5 * data.teacher + 10 * data.encodings[:1].T + 4 * data.means[:1].T


def test_losses_of_kinds_of_sentences(of_classes):
    """The loss of a sentence is that of its kind: the exact one differs from it by O(1 / sqrt(d))."""
    model, data, Q = of_classes
    Z = student_fields(data.x, Q)
    limit, exact = (np.asarray(sentence_losses(model, data, Z, exact=flag)) for flag in (False, True))
    for kind in ((0, 0), (1, 1)):
        of_kind = np.all(data.classes == np.array(kind), 1)
        assert 500 < np.sum(of_kind) < 1500
        np.testing.assert_allclose(limit[of_kind].mean(), exact[of_kind].mean(), rtol=0.15)
    assert abs(np.corrcoef(limit, exact)[0, 1]) > 0.98


def test_fresh_sentences_of_classes(of_classes):
    """Their error is that of sampled sentences, by their fields and by whole sentences."""
    model, data, Q = of_classes
    given = heldout_error(model, data, Q)  # these weights have seen none of the data's sentences but for the teacher
    fields = heldout_error(model, data, Q, jax.random.key(1), sentences=20_000)
    assert abs(float(fields.value - given.value)) < 4 * float(np.hypot(fields.stderr, given.stderr))
    assert 0 < float(given.stderr) < 0.03 * float(given.value)


def test_two_sentences_will_do(data):
    """Two sentences give an error bar, and a baseline by cross-validation."""
    labels = jax.tree.map(lambda a: np.asarray(a)[..., :2], data.labels)
    two = Data(data.x[:, :2], data.y[:2], data.teacher, data.encodings, data.gamma, labels)
    model = ta.DotProduct()
    losses = sentence_losses(model, two, student_fields(two.x, data.teacher))
    error = heldout_error(model, two, data.teacher)
    np.testing.assert_allclose([error.value, error.stderr], [losses.mean(), losses.std()], rtol=1e-6)
    assert linear_baseline(two, ridge=0.1).ok
