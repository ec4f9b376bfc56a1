"""The posterior mean of the teacher against the theory of optimal learning, and the spectral start."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy

import tiedattn_jax as ta


def instance(model, d, alpha, seed):
    data = ta.sample_data(model, d=d, alpha=alpha, key=jax.random.key(seed))
    return ta.finite.realised(model, data), data


@pytest.fixture(scope="module")
def small(model):
    model, data = instance(model, 40, 1.5, 1)
    return model, changed(data)


def cosine(v, teacher):
    v, teacher = np.ravel(v), np.ravel(teacher)
    return abs(v @ teacher / np.linalg.norm(v) / np.linalg.norm(teacher))


def changed(data, **arrays):
    return ta.Data(**{name: getattr(data, name) for name in ("x", "y", "teacher", "encodings", "gamma")} | arrays)


@pytest.mark.full
def test_message_passing_reaches_the_optimal_overlap():
    ratios = []
    for seed in range(3):
        model, data = instance(Noisy(), 600, 1.0, seed)
        estimate = ta.bayes.posterior_mean(model, data, key=jax.random.key(seed + 10))
        assert estimate.ok
        q, theta, optimum = (np.mean(np.asarray(a)) for a in (estimate.q, estimate.theta, ta.bayes.solve(model, 1.0).q))
        ratios.append(q / optimum)
        assert abs(theta) == pytest.approx(q, rel=0.05)
    assert np.mean(ratios) == pytest.approx(1, abs=0.06)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "d", "alpha", "seed", "bar"), [(Noisy, 600, 1.0, 2, 0.05), (ta.DotProduct, 1000, 0.75, 3, 0.04)]
)
def test_the_spectral_start_has_its_predicted_overlap(kind, d, alpha, seed, bar):
    model, data = instance(kind(), d, alpha, seed)
    direction = ta.bayes.spectral_direction(model, data)
    assert np.linalg.norm(direction) == pytest.approx(d**0.5)
    assert cosine(direction, data.teacher) == pytest.approx(
        float(ta.bayes.spectral_overlap(model, alpha).value), abs=bar
    )


def test_a_random_start_is_that_of_its_key(small):
    """By default it is that of seed 0; it has a tenth of the size of the teacher."""
    model, data = small

    def first(**options):
        return np.asarray(ta.bayes.posterior_mean(model, data, steps=5, **options).history.q)[0, :, 0, 0]

    normal = np.asarray(jax.random.normal(jax.random.key(0), (40, 1)))
    size = 0.1 * float(model.law().pi[0, 0, 0]) ** 0.5
    np.testing.assert_allclose(first(), 0.25 * np.mean((size * normal) ** 2), rtol=1e-12)
    assert np.all(first() != first(key=jax.random.key(1)))
    np.testing.assert_allclose(first(init="teacher"), data.rho[:, 0, 0], rtol=1e-12)


@pytest.mark.parametrize(("size", "status"), [(1.0, "max steps"), (1e200, "nonfinite")])
def test_an_estimate_that_overflows_says_so(small, size, status):
    estimate = ta.bayes.posterior_mean(*small, size * np.ones((40, 1)), steps=5)
    assert estimate.status_name == status and bool(np.isfinite(estimate.residual)) == (status == "max steps")


def test_exact_labels_give_the_teacher(model):
    model, data = instance(model, 300, 1.0, 0)
    estimate = ta.bayes.posterior_mean(model, data)
    assert cosine(estimate.Q, data.teacher) == pytest.approx(1, abs=1e-6)
    assert np.allclose(np.linalg.norm(estimate.Q), np.linalg.norm(data.teacher), rtol=1e-5)


@pytest.mark.parametrize("change", ["encodings", "signs"])
def test_what_carries_no_information(small, change):
    """Encodings in inputs and in the record of them change nothing, nor do the signs of the fields of a sentence."""
    model, data = small
    if change == "encodings":
        shift = np.asarray(data.encodings)
        other = changed(data, x=data.x + shift[:, None] / 40**0.5, encodings=2 * shift)
    else:
        other = changed(data, y=np.where(np.arange(60) % 2, 1.0, -1.0)[:, None, None] * np.asarray(data.y))
    estimates = [ta.bayes.posterior_mean(model, each, steps=5).q for each in (data, other)]
    np.testing.assert_allclose(*estimates, rtol=1e-8)


def test_the_matrix_of_the_spectral_start(small):
    """The direction is the leading eigenvector of the matrix written out."""
    model, data = small
    c = np.sqrt(data.alpha * 6)
    x, U = np.asarray(data.inputs()) / 40**0.5 / 0.5, np.asarray(data.y)[..., 0] / float(model.rho[0, 0, 0]) ** 0.5
    matrix = np.zeros((40, 40))
    for tokens, u in zip(x, U, strict=True):
        G = np.outer(u, u) - np.eye(2)
        matrix += tokens.T @ G @ np.linalg.inv(c * np.eye(2) + G) @ tokens
    leading = np.linalg.eigh(matrix)[1][:, -1]
    assert cosine(ta.bayes.spectral_direction(model, data), leading) == pytest.approx(1, abs=1e-6)


@pytest.mark.full
def test_the_spectral_start_knows_the_size_of_every_token(model):
    """Tokens of another variance say the same of the teacher, once inputs and fields are divided by their size."""
    model, data = instance(model, 100, 1.0, 8)
    scale = jnp.array([1.0, 4.0])
    other = ta.DotProduct(spectrum=dataclasses.replace(model.law(), gamma=model.law().gamma * scale**2))
    same = ta.Data(data.x, data.y, data.teacher)
    scaled = ta.Data(scale[:, None, None] * data.x, scale[:, None] * data.y, data.teacher)
    directions = ta.bayes.spectral_direction(other, scaled), ta.bayes.spectral_direction(model, same)
    assert cosine(*directions) == pytest.approx(1, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("run", [ta.gamp, ta.train], ids=["gamp", "train"])
def test_the_semantic_minimum_without_the_teacher(model, run):
    model, data = instance(model, 400, 2.0, 5)
    informed, blind = (run(model, data, init) for init in ("semantic", "spectral"))
    assert float(blind.train_loss) == pytest.approx(float(informed.train_loss), rel=2e-3)
    assert abs(float(blind.overlaps.theta[0, 0, 0])) > 0.1


def test_a_blind_start_says_so(small):
    model, data = small
    few = ta.Data(np.asarray(data.x)[:, :4], np.asarray(data.y)[:4], data.teacher)
    with pytest.warns(UserWarning, match="blind at alpha = 0.1"):
        ta.bayes.spectral_direction(model, few)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "alpha"), [(ta.DotProduct, 0.3), (ta.DotProduct, 0.4), (Noisy, 0.6), (Noisy, 1.0), (Noisy, 3.0)]
)
def test_twelve_instances(kind, alpha):
    differences = []
    for seed in range(12):
        model, data = instance(kind(), 2000, alpha, seed)
        estimate = ta.bayes.posterior_mean(model, data, key=jax.random.key(seed + 100), steps=1000)
        differences.append(float(jnp.mean(estimate.q) / jnp.mean(ta.bayes.solve(model, alpha).q)) - 1)
    assert abs(np.mean(differences)) < 2.5 * np.std(differences, ddof=1) / 12**0.5 + 0.005
