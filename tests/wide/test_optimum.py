"""Onset of content, thresholds and the optimal learner of wide layers, against closed forms and other numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

import tiedattn_jax as ta
from tiedattn_jax.wide.optimum import _below, error_of_noise, information

LONG = {"mixing": [[0.8, 0.2], [0.2, 0.8]], "encodings": "long"}
CROSS = {"loss": "cross_entropy", "tau": 0.3}
layer = partial(ta.wide.DotProduct, tau=0.1)


@pytest.mark.parametrize(
    "options, alpha",
    [
        (LONG, 0.0232751),
        pytest.param(LONG | {"omega": 0.8}, 0.315894, marks=pytest.mark.full),
        pytest.param(LONG | CROSS, 0.0457391, marks=pytest.mark.full),
        pytest.param(LONG | CROSS | {"omega": 0.8}, 0.371267, marks=pytest.mark.full),
    ],
)
def test_onset_of_content(options, alpha):
    onset = ta.wide.onset(layer(**options))
    np.testing.assert_allclose(onset.alpha, alpha, rtol=3e-6)
    assert 0 < onset.stderr < 1e-5 * alpha and onset.status_name == "converged"


@pytest.mark.full
def test_the_state_has_content_above_the_onset_only():
    model = layer(omega=0.4, **LONG | CROSS)
    alpha = float(ta.wide.onset(model).alpha)
    below, above = (ta.wide.solve(model, factor * alpha) for factor in (0.98, 1.4))
    assert float(below.q) == float(below.share) == float(below.largest) == float(below.trace) == 0
    np.testing.assert_allclose(below.distance, model.teacher.rho)
    np.testing.assert_allclose([above.share, above.q, above.trace], [0.0422, 0.00139, 0.00638], rtol=5e-3)


@pytest.mark.parametrize("tau", [1e6, pytest.param(1e-6, marks=pytest.mark.full)])
def test_beyond_the_range_of_the_search_there_is_no_onset(tau):
    onset = ta.wide.onset(layer(**LONG | {"tau": tau}))
    assert onset.status_name == "absent" and np.isnan(onset.alpha) and np.isnan(onset.sensitivities.tau)


def test_sensitivities_of_the_onset():
    onset, high, low = (ta.wide.onset(layer(omega=0.3 + h, **LONG)) for h in (0, 1e-4, -1e-4))
    np.testing.assert_allclose(onset.sensitivities.omega, (high.alpha - low.alpha) / 2e-4, rtol=1e-6)
    assert "teacher.kappa" in str(onset)


@pytest.mark.full
def test_derivative_of_the_onset():
    def alpha(value):
        return ta.wide.onset(layer(omega=value, **LONG)).alpha

    slope = (alpha(0.3 + 1e-4) - alpha(0.3 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(alpha)(0.3), slope, rtol=1e-6)


@pytest.mark.full
def test_sensitivities_where_the_loss_is_even():
    """The loss has no odd part, but its derivatives in omega and the mixing do."""
    mixing, h = [[0.8, 0.2], [0.3, 0.7]], 1e-5
    plain, moved = (ta.wide.onset(layer(omega=omega, mixing=mixing)) for omega in (0.0, h))
    np.testing.assert_allclose(plain.sensitivities.omega, (moved.alpha - plain.alpha) / h, rtol=1e-3)
    flat = ta.wide.onset(layer(omega=0.4)).sensitivities.mixing
    np.testing.assert_allclose(flat, 0.0, atol=1e-12)


class OneScore(ta.wide.Layer):
    """One score of one token."""

    def loss(self, H, Y):
        return jnp.sum((H - Y) ** 2)


@pytest.mark.parametrize("alpha, error", [(0.148244, 0.560969), (0.221866, 0.326078), (0.36911, 0.011049)])
def test_the_optimal_learner_of_a_quadratic_network(alpha, error):
    """The errors are published (ExtensiveWidthQuadraticSamples)."""
    model = OneScore(teacher=ta.wide.Wishart(0.5), tau=0.1, tokens=1)
    np.testing.assert_allclose(ta.wide.bayes(model, alpha).distance, error, atol=2e-6)


@pytest.mark.parametrize("ratio, distance", [(0.05, 0.95960), (0.5, 0.43161), (0.95, 0.03026), (0.99, 0.00721)])
def test_distance_of_the_optimal_learner(ratio, distance):
    np.testing.assert_allclose(ta.wide.bayes(layer(), ratio * 0.1875).distance, distance, atol=6e-6)


@pytest.mark.parametrize(
    "teacher, ties",
    [
        pytest.param(ta.wide.Wishart(0.5), 1 / 4, id="thin"),
        pytest.param(ta.wide.Wishart(2.0), 0.0, id="wide"),
        pytest.param([0.0, 1.0, 2.0, 1.0], 6 / 16, id="degenerate"),
        pytest.param(ta.wide.Wishart(0.5).eigenvalues(60), 1 / 4 + 30 / 60**2, id="quantiles", marks=pytest.mark.full),
    ],
)
def test_the_optimal_learner_in_its_own_numbers(teacher, ties):
    """The distance is the error of the noise, and the noise that of as many numbers as the labels reveal."""
    model = layer(teacher=teacher)
    optimum = ta.wide.bayes(model, 0.1)
    np.testing.assert_allclose(optimum.q + optimum.distance, model.teacher.rho)
    np.testing.assert_allclose(optimum.noise, optimum.distance / (2 * 0.1 * model.seen), rtol=1e-6)
    np.testing.assert_allclose(optimum.distance, jax.jit(error_of_noise)(model.teacher, optimum.noise), rtol=1e-9)
    counted = (1 - ties) / 4
    np.testing.assert_allclose(optimum.perfect_alpha, counted)
    below, above = (ta.wide.bayes(model, factor * counted) for factor in (0.98, 1.001))
    assert 1e-4 < float(below.distance) < 0.05 and float(above.distance) == 0
    if isinstance(teacher, ta.wide.Wishart):
        np.testing.assert_allclose(ta.wide.perfect_recovery(model).alpha, counted)


def test_the_optimal_learner_knows_the_teacher_from_the_threshold_on():
    for alpha in (0.1875, 0.19):
        known = ta.wide.bayes(layer(), alpha)
        assert float(known.distance) == float(known.noise) == 0
    title, *rows = str(known).splitlines()
    assert title == "Bayes-optimal wide layer at alpha = 0.19: converged"
    assert [row.split()[:2] for row in rows] == [["distance", "0"], ["q", "1.5"], ["perfect_alpha", "0.1875"]]
    noisy = ta.wide.bayes(layer(noise=0.1), 5.0)
    assert 0 < float(noisy.distance) < 0.05 and np.isinf(noisy.perfect_alpha)


@pytest.mark.full
def test_derivative_of_the_optimal_distance():
    def distance(alpha):
        return ta.wide.bayes(layer(noise=0.1), alpha).distance

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
    error = jax.jit(error_of_noise)(ta.wide.Wishart(0.5), Delta)
    np.testing.assert_allclose(error, oracle, rtol=0.02)  # one draw scatters by 1 %


@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.full)])
def test_error_of_a_thin_matrix_seen_with_little_noise(dtype):
    """In units of the noise it is the share of pairs that are not both null; NaN came out in single precision."""
    Delta = jnp.asarray(1e-4, dtype)
    thin = jax.tree.map(lambda a: a.astype(dtype), ta.wide.Wishart(0.05))
    np.testing.assert_allclose(jax.jit(error_of_noise)(thin, Delta) / Delta, 1 - 0.95**2, rtol=1e-3)


@pytest.mark.parametrize("r", [1 / 3, -1 / 3])
def test_probability_of_two_signs(r):
    a, b = np.array([[0.3, -2.0, 4.0, 0.0], [-1.0, -1.5, 0.2, 0.0]])
    expected = [multivariate_normal(cov=[[1, r], [r, 1]]).cdf(pair) for pair in zip(a, b, strict=True)]
    np.testing.assert_allclose(jax.jit(_below, static_argnums=2)(a, b, r), expected, atol=1e-10)


@pytest.mark.parametrize("error", [0.4, *(pytest.param(error, marks=pytest.mark.full) for error in (0.01, 1.3))])
def test_information_of_hard_attention(error):
    """The entropy of labels falls with what is known of the scores, by half of their Fisher information."""
    model = layer(target="hardmax")
    x = np.stack(np.meshgrid(*[np.linspace(-8, 8, 401)] * 2, indexing="ij"))
    weight = np.exp(-np.sum(x**2, 0) / 2)
    u, v = np.tensordot(np.linalg.cholesky([[3, 1], [1, 3]]), x, 1)

    @jax.jit
    def negative_entropy(error):
        scale = jnp.sqrt((model.teacher.rho - error) / (3 * error))
        P = [_below(scale * u, scale * sign * v, sign / 3) for sign in (1, -1)]  # the other signs contribute the same
        return 2 * sum(jnp.sum(weight / weight.sum() * p * jnp.log(jnp.maximum(p, 1e-30))) for p in P)

    slope = -jax.grad(negative_entropy)(error)
    np.testing.assert_allclose(jax.jit(information)(model, error), 2 * slope, rtol=1e-6)


def test_an_error_far_below_the_size_of_the_teacher():
    """The error is proportional to a tiny noise, and for hard labels to alpha^-2."""
    ratios = [ta.wide.bayes(layer(noise=noise), 1.0).distance / noise for noise in (1e-9, 1e-15)]
    np.testing.assert_allclose(ratios[1], ratios[0], rtol=1e-6)


@pytest.mark.full
def test_hard_attention_tells_less():
    far = [ta.wide.bayes(layer(target="hardmax"), alpha).distance * alpha**2 for alpha in (1e5, 1e8)]
    np.testing.assert_allclose(far[1], far[0], rtol=1e-4)
    hard, soft = (ta.wide.bayes(layer(target=target), 0.1) for target in ("hardmax", "softmax"))
    assert float(soft.distance) < float(hard.distance) < 1
    assert np.isinf(hard.perfect_alpha)


@pytest.mark.full
def test_derivative_of_the_optimal_distance_of_hard_attention():
    def distance(alpha):
        return ta.wide.bayes(layer(target="hardmax", noise=0.2), alpha).distance

    slope = (distance(1.0 + 1e-4) - distance(1.0 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(distance)(1.0), slope, rtol=1e-6)


@pytest.mark.full
def test_training_on_hard_labels_comes_close_to_the_optimal_learner():
    """The published curve, 0.22, is far above training; see `benchmarks/attention_indexed.py`."""
    model = layer(target="hardmax", loss="cross_entropy", tau=0.2)
    data = ta.wide.sample_data(model, 40, 1.63563, jax.random.key(0))
    trained = ta.wide.train(model, data)
    distance = float(jnp.sum(data.teacher**2) / 40 - trained.m**2 / trained.q)  # labels say nothing of the scale of S
    assert float(ta.wide.bayes(model, 1.63563).distance) < distance < 0.06


@pytest.mark.parametrize("kappa, alpha", [(0.5, 0.422175), (0.1, 0.157572), (2.0, 0.5)])
def test_recovery_by_a_vanishing_ridge(kappa, alpha):
    threshold = ta.wide.ridge_recovery(layer(teacher=ta.wide.Wishart(kappa)))
    np.testing.assert_allclose(2 * threshold.alpha, alpha, rtol=2e-6)  # two directions are seen
