"""Losses and errors on sentences, checked against raw arrays, Gaussian averages and least squares."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from channels import Noisy, model_of

import tiedattn_jax as ta
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.evaluation import heldout_error, linear_baseline, sentence_losses
from tiedattn_jax.finite.products import student_fields
from tiedattn_jax.finite.sampling import realised, sample_data
from tiedattn_jax.model.law import SpectralLaw
from tiedattn_jax.theory.observables import gen_error, gen_error_linear

losses_of = eqx.filter_jit(sentence_losses)


@pytest.fixture(scope="module")
def Q(data):
    return 0.6 * np.asarray(data.teacher) + 20 * 0.2 * np.asarray(data.encodings)[:1].T


def raw_losses(model, data, Q):
    """``||y - f||^2 / (2 d)`` of every sentence from inputs, labels and predictions in full."""
    x, d = np.asarray(data.inputs()) + np.asarray(data.encodings), data.shape[2]
    f = np.asarray(jax.jit(jax.vmap(model.student))(x @ Q / d**0.5)) @ x
    return np.sum((np.asarray(data.raw_labels(model)) - f) ** 2, (1, 2)) / (2 * d)


@pytest.mark.full
def test_exact_and_limiting_losses_differ_by_one_over_root_d(model):
    def rms(d):
        data = sample_data(model, d, 1000 / d, jax.random.key(d), normalise=True)
        Z = student_fields(data.x, 0.5 * np.asarray(data.teacher))
        exact, limit = (np.asarray(losses_of(model, data, Z, exact=exact)) for exact in (True, False))
        return np.mean((exact - limit) ** 2) ** 0.5

    # d grows by 16, so the difference falls by 4, +- 10 % from 1000 sentences and from corrections of higher order.
    assert rms(250) / rms(4000) == pytest.approx(4.0, rel=0.25)


def test_heldout_error_equals_the_gaussian_average(model, data, Q):
    error = heldout_error(model, data, Q, jax.random.key(1))
    expected = gen_error(realised(model, data), data.overlaps(Q, jnp.ones((2, 1, 1))), problems.rule("points"))
    assert abs(error.value - expected.value) < 4 * np.hypot(error.stderr, expected.stderr)
    assert error.stderr < 0.01 * expected.value
    # The exact error of a sentence is larger by O(1/d): a few per cent at d = 400.
    exact = heldout_error(model, data, Q, jax.random.key(2), sentences=8_000, exact=True)
    assert abs(exact.value - error.value) < 4 * exact.stderr + 0.03 * error.value
    assert 0 < exact.stderr < 0.03 * exact.value


def test_error_on_given_sentences(model, data, Q):
    """Without a key the sentences of the data are the test set: the mean of the losses, and no teacher is needed."""
    alone = Data.from_sentences(data.inputs(), data.raw_labels(model), encodings=data.encodings)
    losses, error = raw_losses(model, data, Q), heldout_error(model, alone, Q, exact=True)
    fast = losses_of(model, data, student_fields(data.x, Q), exact=True)
    np.testing.assert_allclose(fast, losses, rtol=1e-11)
    assert float(error.value) == pytest.approx(losses.mean(), rel=1e-8)
    assert float(error.stderr) == pytest.approx(float(ta.results.error_bar(losses)), rel=1e-6)
    mean = np.mean(np.asarray(losses_of(model, data, student_fields(data.x, Q))))
    assert float(heldout_error(model, data, Q).value) == pytest.approx(mean)
    # Fresh sentences come in whole blocks.
    few, many = (heldout_error(model, data, Q, jax.random.key(1), sentences=n) for n in (257, 512))
    assert few.value == many.value and few.stderr == many.stderr


@pytest.mark.full
def test_memory_of_the_test_error(model):
    x, y, teacher, encodings = (np.ones(shape) for shape in ((2, 1, 1000), (1, 2, 1), (1000, 1), (2, 1000)))
    data = Data(x, y, teacher, encodings, np.ones((2, 1)))
    error = jax.jit(lambda data, Q: heldout_error(model, data, Q, jax.random.key(0), sentences=50_000, exact=True))
    assert error.lower(data, teacher).compile().memory_analysis().temp_size_in_bytes < 1e8


def test_linear_baseline(model, data):
    inputs = np.asarray(data.inputs()) + np.asarray(data.encodings)
    rows, targets = (np.swapaxes(a, 1, 2).reshape(-1, 2) for a in (inputs, np.asarray(data.raw_labels(model))))
    W = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    fit = linear_baseline(data)
    np.testing.assert_allclose(fit.W, W, atol=1e-10)
    residual = targets - rows @ W.T
    np.testing.assert_allclose(fit.train_error, np.sum(residual**2) / (2 * 400 * 600), rtol=1e-9)
    assert np.linalg.norm(np.asarray(linear_baseline(data, ridge=1e3).W)) < np.linalg.norm(np.asarray(fit.W))
    theory = gen_error_linear(realised(model, data), problems.rule("points")).value
    assert abs(fit.gen_error - theory) < 4 * fit.stderr + 0.02 * theory
    fresh = sample_data(model, 400, 1.5, jax.random.key(4))
    assert linear_baseline(data, test=fresh).gen_error != fit.gen_error and fit.ok
    twice = np.repeat(np.eye(3)[:, None], 2, 1)  # both tokens of a sentence are the same
    alike = Data.from_sentences(twice, twice)
    assert linear_baseline(alike).status_name == "singular" and linear_baseline(alike, ridge=0.1).ok


def test_cross_validation_of_the_linear_baseline(data):
    """The cross-validated baseline of ten sentences in eight folds equals fits that leave out each fold by hand."""
    labels = jax.tree.map(lambda a: np.asarray(a)[..., :10], data.labels)
    ten = Data(np.asarray(data.x)[:, :10], np.asarray(data.y)[:10], labels=labels)
    baseline, errors = linear_baseline(ten, ridge=0.2), np.zeros(10)
    for k in range(10):
        in_training = np.arange(10) % 8 != k % 8
        gram, cross = labels.gram[..., in_training].sum(-1) + 0.2 * np.eye(2), labels.cross[..., in_training].sum(-1)
        W = cross @ np.linalg.inv(gram)
        energy, cross, gram = labels.energy[k], labels.cross[..., k], labels.gram[..., k]
        errors[k] = energy / 2 - np.sum(W * cross) + np.trace(W @ gram @ W.T) / 2
    np.testing.assert_allclose(baseline.gen_error, errors.mean(), rtol=1e-10)
    np.testing.assert_allclose(baseline.stderr, ta.results.error_bar(errors), rtol=1e-8)


def test_held_out_sentences_have_noise_of_their_own():
    noisy, key = model_of(Noisy), jax.random.key(1)
    data = sample_data(noisy, 40, 1.5, jax.random.key(0))
    Q = 0.5 * np.asarray(data.teacher) + 0.5 * np.random.default_rng(1).standard_normal((40, 1))
    error, x = heldout_error(noisy, data, Q, key), data.overlaps(Q, jnp.ones((2, 1, 1)))
    expected, noiseless = (
        gen_error(model_of(kind, teacher=data.teacher_gram), x, problems.RULES["points"].rule(model_of(kind)))
        for kind in (Noisy, ta.DotProduct)
    )
    bar = float(np.hypot(error.stderr, expected.stderr))
    assert abs(float(error.value - expected.value)) < 4 * bar < abs(float(error.value - noiseless.value))


@pytest.mark.full
def test_sentences_of_classes():
    """The loss of a sentence is that of its kind, from the exact one by O(1 / sqrt(d)); fresh ones have the same."""
    shares = {(0, 0): 0.3, (1, 1): 0.7}  # of losses that differ
    means = {"means": [[0.0, 1.0], [0.0, -2.0]], "teacher_means": [0.3, -0.6]}
    law = SpectralLaw.of_classes([0.05, 0.5], shares, encodings=[[1.0, 0.0], [-1.0, 0.0]], **means)
    model = ta.DotProduct(spectrum=law)
    data = sample_data(model, 400, 5.0, jax.random.key(0))
    teacher, encodings, means = map(np.asarray, (data.teacher, data.encodings, data.means))
    Q = 0.5 * teacher + 10 * encodings[:1].T + 4 * means[:1].T
    Z = student_fields(data.x, Q)
    limit, exact = (np.asarray(losses_of(model, data, Z, exact=flag)) for flag in (False, True))
    for kind in ((0, 0), (1, 1)):
        of_kind = np.all(np.asarray(data.classes) == kind, 1)
        assert 500 < np.sum(of_kind) < 1500
        np.testing.assert_allclose(limit[of_kind].mean(), exact[of_kind].mean(), rtol=0.15)
    assert abs(np.corrcoef(limit, exact)[0, 1]) > 0.98
    given = heldout_error(model, data, Q)  # these weights have seen none of the data's sentences but for the teacher
    fields = heldout_error(model, data, Q, jax.random.key(1), sentences=20_000)
    assert abs(float(fields.value - given.value)) < 4 * float(np.hypot(fields.stderr, given.stderr))
    assert 0 < float(given.stderr) < 0.03 * float(given.value)


def test_two_fresh_sentences_have_an_error_bar(model, data):
    """It is that of Student's law."""
    keys = jax.random.split(jax.random.key(0), 50)
    fresh = [heldout_error(model, data, data.teacher, key, sentences=2) for key in keys]
    mean = heldout_error(model, data, data.teacher, keys[0]).value
    gaps = [abs(float(a.value - mean)) for a in fresh]
    assert sum(gap < 2 * float(a.stderr) for gap, a in zip(gaps, fresh, strict=True)) > 42  # plain ones: about half
