"""Onset of content, thresholds and the optimal learner of wide layers, against closed forms and other numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

import tiedattn_jax as ta
from tiedattn_jax.wide.optimum import _below, error_of_noise, information

MIXING = [[0.8, 0.2], [0.2, 0.8]]

pytestmark = pytest.mark.usefixtures("fast_compilation")


def layer(**options):
    return ta.WideDotProduct(**{"teacher": ta.Wishart(0.5), "tau": 0.1, **options})


@pytest.mark.parametrize(
    "options, alpha",
    [
        ({}, 0.0232751),
        ({"omega": 0.8}, 0.315894),
        ({"loss": "cross_entropy", "tau": 0.3}, 0.0457391),
        ({"loss": "cross_entropy", "tau": 0.3, "omega": 0.8}, 0.371267),
    ],
)
def test_onset_of_content(options, alpha):
    model = layer(mixing=MIXING, encodings="long", **options)
    onset = ta.critical_alpha(model)
    np.testing.assert_allclose(onset.alpha, alpha, rtol=3e-6)
    assert 0 < onset.stderr < 1e-5 * alpha
    assert onset.status_name == "converged"


def test_the_state_has_content_above_the_onset_only():
    model = layer(tau=0.3, loss="cross_entropy", omega=0.4, mixing=MIXING, encodings="long")
    alpha = float(ta.critical_alpha(model).alpha)
    below, above = (ta.solve(model, factor * alpha) for factor in (0.98, 1.4))
    assert float(below.q) == float(below.share) == float(below.largest) == float(below.trace) == 0
    np.testing.assert_allclose(below.distance, model.teacher.rho)
    np.testing.assert_allclose([above.share, above.q, above.trace], [0.0422, 0.00139, 0.00638], rtol=5e-3)


@pytest.mark.parametrize("tau", [1e6, 1e-6])
def test_beyond_the_range_of_the_search_there_is_no_onset(tau):
    onset = ta.critical_alpha(layer(tau=tau, mixing=MIXING, encodings="long"))
    assert onset.status_name == "absent" and np.isnan(onset.alpha) and np.isnan(onset.sensitivities.tau)


def test_sensitivities_of_the_onset():
    onset, high, low = (
        ta.critical_alpha(layer(omega=0.3 + h, mixing=MIXING, encodings="long")) for h in (0, 1e-4, -1e-4)
    )
    np.testing.assert_allclose(onset.sensitivities.omega, (high.alpha - low.alpha) / 2e-4, rtol=1e-6)
    assert "teacher.kappa" in str(onset)


@pytest.mark.long
def test_derivative_of_the_onset():
    def alpha(value):
        return ta.critical_alpha(layer(omega=value, mixing=MIXING, encodings="long")).alpha

    slope = (alpha(0.3 + 1e-4) - alpha(0.3 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(alpha)(0.3), slope, rtol=1e-6)


def test_sensitivities_where_the_loss_is_even():
    """The loss has no odd part, but its derivatives in omega and the mixing do."""
    mixing, h = [[0.8, 0.2], [0.3, 0.7]], 1e-5
    plain, moved = (ta.critical_alpha(layer(omega=omega, mixing=mixing)) for omega in (0.0, h))
    np.testing.assert_allclose(plain.sensitivities.omega, (moved.alpha - plain.alpha) / h, rtol=1e-3)
    flat = ta.critical_alpha(layer(omega=0.4)).sensitivities.mixing
    np.testing.assert_allclose(flat, 0.0, atol=1e-12)


@pytest.mark.parametrize("ratio, distance", [(0.05, 0.95960), (0.5, 0.43161), (0.95, 0.03026), (0.99, 0.00721)])
def test_distance_of_the_optimal_learner(ratio, distance):
    model = layer()
    perfect = ta.threshold(model, "perfect_recovery").alpha
    np.testing.assert_allclose(perfect, 0.1875)
    np.testing.assert_allclose(ta.bayes(model, ratio * float(perfect)).distance, distance, atol=6e-6)


@pytest.mark.parametrize(
    "teacher", [ta.Wishart(0.5), ta.Wishart(2.0), ta.Wishart(0.5).eigenvalues(60)], ids=["thin", "wide", "quantiles"]
)
def test_the_optimal_learner_in_its_own_numbers(teacher):
    """The distance is the error of the noise, and the noise that of as many numbers as the labels reveal."""
    model = layer(teacher=teacher)
    optimum = ta.bayes(model, 0.1)
    np.testing.assert_allclose(optimum.q + optimum.distance, model.teacher.rho)
    np.testing.assert_allclose(optimum.noise, optimum.distance / (2 * 0.1 * model.seen), rtol=1e-6)
    np.testing.assert_allclose(optimum.distance, error_of_noise(model.teacher, optimum.noise), rtol=1e-9)
    counted = 0.1875 if model.teacher.zeros > 0 else 0.25  # (1 - p^2) / 4 with a share p of zeros
    np.testing.assert_allclose(optimum.perfect_alpha, counted)
    if isinstance(teacher, ta.Wishart):
        np.testing.assert_allclose(ta.threshold(model, "perfect_recovery").alpha, counted)


def test_the_optimal_learner_knows_the_teacher_from_the_threshold_on():
    known = ta.bayes(layer(), 0.19)
    assert float(known.distance) == float(known.noise) == 0
    at_threshold = ta.bayes(layer(), 0.1875)
    assert float(at_threshold.distance) == float(at_threshold.noise) == 0
    title, *rows = str(known).splitlines()
    assert title == "Bayes-optimal wide layer at alpha = 0.19: converged"
    assert [row.split()[:3] for row in rows] == [
        ["distance", "0", "||<S>"], ["q", "1.5", "overlap"], ["perfect_alpha", "0.1875", "from"],
    ]  # fmt: skip
    noisy = ta.bayes(layer(noise=0.1), 5.0)
    assert 0 < float(noisy.distance) < 0.05
    assert np.isinf(noisy.perfect_alpha)


def test_derivative_of_the_optimal_distance():
    def distance(alpha):
        return ta.bayes(layer(noise=0.1), alpha).distance

    slope = (distance(0.1 + 1e-5) - distance(0.1 - 1e-5)) / 2e-5
    np.testing.assert_allclose(jax.grad(distance)(0.1), slope, rtol=1e-5)


@pytest.mark.parametrize("Delta", [0.2, 1.0])
def test_error_of_a_matrix_seen_with_noise(Delta):
    """The best estimator that keeps the eigenvectors, on random matrices."""
    d, draws = 500, np.random.default_rng(1)
    W, G = draws.standard_normal((d, d // 2)), draws.standard_normal((d, d))
    teacher = W @ W.T / (d * np.sqrt(0.5))
    _, vectors = np.linalg.eigh(teacher + np.sqrt(Delta / d / 2) * (G + G.T))
    kept = np.einsum("ik,ij,jk->k", vectors, teacher, vectors)
    oracle = (np.sum(teacher**2) - np.sum(kept**2)) / d
    np.testing.assert_allclose(
        error_of_noise(ta.Wishart(0.5), jnp.asarray(Delta)), oracle, rtol=0.02
    )  # one draw scatters by 1 %


@pytest.mark.parametrize("r", [1 / 3, -1 / 3])
def test_probability_of_two_signs(r):
    a, b = jnp.array([0.3, -2.0, 4.0, 0.0]), jnp.array([-1.0, -1.5, 0.2, 0.0])
    joint = multivariate_normal(cov=[[1, r], [r, 1]])
    np.testing.assert_allclose(_below(a, b, r), [joint.cdf(pair) for pair in zip(a, b, strict=True)], atol=1e-10)


@pytest.mark.parametrize("error", [0.01, 0.4, 1.3])
def test_information_of_hard_attention(error):
    """The entropy of labels falls with what is known of the scores, by half of their Fisher information."""
    model = layer(target="hardmax")
    x = np.linspace(-8, 8, 401)
    weight = np.exp(-(x[:, None] ** 2 + x**2) / 2)
    root = np.linalg.cholesky([[3, 1], [1, 3]])
    u, v = jnp.asarray(root[0, 0] * x[:, None] + 0 * x), jnp.asarray(root[1, 0] * x[:, None] + root[1, 1] * x)

    @jax.jit
    def negative_entropy(error):
        scale = jnp.sqrt((model.teacher.rho - error) / (3 * error))
        P = [_below(scale * u, scale * sign * v, sign / 3) for sign in (1, -1)]  # the other signs contribute the same
        return 2 * sum(jnp.sum(weight / weight.sum() * p * jnp.log(jnp.maximum(p, 1e-30))) for p in P)

    slope = -jax.grad(negative_entropy)(error)
    np.testing.assert_allclose(information(model, jnp.asarray(error)), 2 * slope, rtol=1e-6)


def test_hard_attention_tells_less():
    hard, soft = (ta.bayes(layer(target=target), 0.1) for target in ("hardmax", "softmax"))
    assert float(soft.distance) < float(hard.distance) < 1
    assert np.isinf(hard.perfect_alpha)

    def distance(alpha):
        return ta.bayes(layer(target="hardmax", noise=0.2), alpha).distance

    slope = (distance(1.0 + 1e-4) - distance(1.0 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(distance)(1.0), slope, rtol=1e-6)


@pytest.mark.long
def test_training_on_hard_labels_comes_close_to_the_optimal_learner():
    """The published curve, 0.22, is far above training; see `benchmarks/attention_indexed.py`."""
    model = layer(target="hardmax", loss="cross_entropy", tau=0.2)
    data = ta.sample_data(model, 40, 1.63563, jax.random.key(0))
    trained = ta.train(model, data)
    distance = float(jnp.sum(data.teacher**2) / 40 - trained.m**2 / trained.q)  # labels say nothing of the scale of S
    assert float(ta.bayes(model, 1.63563).distance) < distance < 0.06


@pytest.mark.parametrize("kappa, alpha", [(0.5, 0.422175), (0.1, 0.157572), (2.0, 0.5)])
def test_recovery_by_a_vanishing_ridge(kappa, alpha):
    threshold = ta.threshold(layer(teacher=ta.Wishart(kappa)), "ridge_recovery")
    np.testing.assert_allclose(2 * threshold.alpha, alpha, rtol=2e-6)  # two directions are seen


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: ta.bayes(layer(omega=1.0), 1.0), "omega must be below one"),
        (lambda: ta.bayes(layer(target="hardmax", tokens=3), 1.0), "tokens must be two for hard attention"),
        (lambda: ta.threshold(layer(target="hardmax"), "ridge_recovery"), "target must be softmax"),
        (lambda: ta.threshold(layer(noise=0.1), "perfect_recovery"), "noise must be zero"),
        (lambda: ta.threshold(layer(teacher=[1.0, 2.0]), "ridge_recovery"), "teacher must be a Wishart"),
        (lambda: ta.critical_alpha(layer(), settings=ta.Settings()), "settings must be left out"),
    ],
)
def test_bad_calls(unchecked, call, sentence):
    with pytest.raises(ta.InputError, match=sentence):
        call()
