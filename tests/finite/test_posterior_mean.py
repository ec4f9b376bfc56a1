import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy

import tiedattn_jax as ta


def instance(model, d, alpha, seed):
    data = ta.sample_data(model, d=d, alpha=alpha, key=jax.random.key(seed))
    return ta.realised(model, data), data


def cosine(v, teacher):
    return abs(float(jnp.vdot(v, teacher) / jnp.linalg.norm(v) / jnp.linalg.norm(teacher)))


def test_message_passing_reaches_the_optimal_overlap():
    ratios = []
    for seed in range(3):
        model, data = instance(Noisy(), 600, 1.0, seed)
        estimate = ta.posterior_mean(model, data, key=jax.random.key(seed + 10))
        assert estimate.ok
        ratios.append(float(jnp.mean(estimate.q) / jnp.mean(ta.bayes(model, 1.0).q)))
        assert abs(float(jnp.mean(estimate.theta))) == pytest.approx(float(jnp.mean(estimate.q)), rel=0.05)
    assert np.mean(ratios) == pytest.approx(1, abs=0.06)


def test_a_random_start_is_that_of_its_key(model):
    data = ta.sample_data(model, d=40, alpha=1.0, key=jax.random.key(0))

    def first(**options):
        return np.asarray(ta.posterior_mean(model, data, steps=1, **options).history.q[0])

    np.testing.assert_array_equal(first(), first(key=jax.random.key(0)))
    assert np.all(first() != first(key=jax.random.key(1)))


@pytest.mark.parametrize(("size", "status"), [(1.0, "max steps"), (1e200, "nonfinite")])
def test_an_estimate_that_overflows_says_so(model, size, status):
    data = ta.sample_data(model, d=40, alpha=1.0, key=jax.random.key(0))
    estimate = ta.posterior_mean(model, data, size * jnp.ones((40, 1)), steps=2)
    assert estimate.status_name == status and bool(jnp.isfinite(estimate.residual)) == (status == "max steps")


def test_exact_labels_give_the_teacher(model):
    model, data = instance(model, 300, 1.0, 0)
    estimate = ta.posterior_mean(model, data)
    assert cosine(estimate.Q, data.teacher) == pytest.approx(1, abs=1e-6)
    assert np.allclose(jnp.linalg.norm(estimate.Q), jnp.linalg.norm(data.teacher), rtol=1e-5)


def test_encodings_carry_no_information(model):
    """Adding encodings to the inputs and to the record of them changes nothing."""
    model, data = instance(model, 200, 0.4, 1)
    shift = data.encodings
    moved = ta.Data(data.x + shift[:, None] / 200**0.5, data.y, data.teacher, data.encodings + shift, data.gamma)
    estimates = [ta.posterior_mean(model, each, steps=20).q for each in (data, moved)]
    np.testing.assert_allclose(*estimates, rtol=1e-8)


def test_only_the_preimages_are_used(model):
    """The learner does not know the sign of the fields of a sentence."""
    model, data = instance(model, 200, 0.5, 2)
    signs = jnp.where(jnp.arange(len(data.y)) % 2, 1.0, -1.0)[:, None, None]
    other = ta.Data(data.x, signs * data.y, data.teacher, data.encodings, data.gamma)
    estimates = [ta.posterior_mean(model, each, steps=20).q for each in (data, other)]
    np.testing.assert_allclose(*estimates, rtol=1e-8)


def test_the_spectral_start_has_its_predicted_overlap():
    for kind, alpha in ((ta.DotProduct, 0.75), (Noisy, 1.0)):
        model, data = instance(kind(), 1000, alpha, 3)
        direction = ta.spectral_direction(model, data)
        assert float(jnp.linalg.norm(direction)) == pytest.approx(1000**0.5)
        assert cosine(direction, data.teacher) == pytest.approx(
            float(ta.spectral_overlap(model, alpha).value), abs=0.04
        )


def test_the_matrix_of_the_spectral_start(model):
    """The direction is the leading eigenvector of the matrix written out."""
    model, data = instance(model, 40, 1.0, 4)
    c = np.sqrt(data.alpha * 6)
    x, U = data.inputs() / 40**0.5 / 0.5, np.asarray(data.y[..., 0] / jnp.sqrt(model.rho[0, 0, 0]))
    matrix = np.zeros((40, 40))
    for tokens, u in zip(np.asarray(x), U, strict=True):
        G = np.outer(u, u) - np.eye(2)
        matrix += tokens.T @ G @ np.linalg.inv(c * np.eye(2) + G) @ tokens
    leading = np.linalg.eigh(matrix)[1][:, -1]
    assert cosine(ta.spectral_direction(model, data), leading) == pytest.approx(1, abs=1e-6)


@pytest.mark.long
def test_the_spectral_start_knows_the_size_of_every_token(model):
    """Tokens of another variance say the same of the teacher, once inputs and fields are divided by their size."""
    model, data = instance(model, 100, 1.0, 8)
    scale = jnp.array([1.0, 4.0])
    other = ta.DotProduct(spectrum=dataclasses.replace(model.law(), gamma=model.law().gamma * scale**2))
    same = ta.Data(data.x, data.y, data.teacher)
    scaled = ta.Data(scale[:, None, None] * data.x, scale[:, None] * data.y, data.teacher)
    directions = ta.spectral_direction(other, scaled), ta.spectral_direction(model, same)
    assert cosine(*directions) == pytest.approx(1, abs=1e-6)


@pytest.mark.long
def test_single_precision():
    model, data = instance(ta.DotProduct(dtype=jnp.float32), 300, 1.0, 0)
    estimate = ta.posterior_mean(model, data)
    assert estimate.ok and estimate.Q.dtype == jnp.float32
    assert cosine(estimate.Q, data.teacher) == pytest.approx(1, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("run", [ta.gamp, ta.train], ids=["gamp", "train"])
def test_the_semantic_minimum_without_the_teacher(model, run):
    options = {"optimizer": "lbfgs"} if run is ta.train else {}
    model, data = instance(model, 400, 2.0, 5)
    informed, blind = (run(model, data, init, **options) for init in ("semantic", "spectral"))
    assert float(blind.train_loss) == pytest.approx(float(informed.train_loss), rel=2e-3)
    assert abs(float(blind.overlaps.theta[0, 0, 0])) > 0.1


def test_a_blind_start_says_so(model):
    _, data = instance(model, 200, 0.1, 6)
    with pytest.warns(UserWarning, match="blind at alpha = 0.1"):
        ta.spectral_direction(model, data)


def test_bad_input(model):
    _, data = instance(model, 50, 1.0, 7)
    for options, message in (({"steps": 0}, "steps"), ({"tol": -1.0}, "tol"), ({"init": "semantic"}, "init")):
        with pytest.raises(ta.InputError, match=message):
            ta.posterior_mean(model, data, **options)
    with pytest.raises(ta.InputError, match="one column"):
        two = ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=np.eye(3), teacher=np.eye(2), rank=2)
        ta.spectral_overlap(two, 1.0)
    law = ta.SpectralLaw.of_classes(
        (0.25, 0.36), {(0, 0): 0.5, (1, 1): 0.5}, encodings=np.eye(2), means=np.zeros((2, 2)), teacher_means=(0.0, 0.0)
    )
    kinds = ta.DotProduct(spectrum=law)
    with pytest.raises(ta.InputError, match="no classes of tokens"):
        ta.posterior_mean(kinds, ta.sample_data(kinds, 50, 1.0, jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "alpha"), [(ta.DotProduct, 0.3), (ta.DotProduct, 0.4), (Noisy, 0.6), (Noisy, 1.0), (Noisy, 3.0)]
)
def test_twelve_instances(kind, alpha):
    differences = []
    for seed in range(12):
        model, data = instance(kind(), 2000, alpha, seed)
        estimate = ta.posterior_mean(model, data, key=jax.random.key(seed + 100), steps=1000)
        differences.append(float(jnp.mean(estimate.q) / jnp.mean(ta.bayes(model, alpha).q)) - 1)
    assert abs(np.mean(differences)) < 2.5 * np.std(differences, ddof=1) / 12**0.5 + 0.005
