import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, NoisyPlain, PhaseRetrieval, Plain

import tiedattn_jax as ta
from tiedattn_jax.bayes import thresholds
from tiedattn_jax.bayes.fixed_points import averages_of


@pytest.mark.parametrize("L", [2, 3])
def test_weak_recovery_of_exact_labels(L):
    model = ta.DotProduct(mixing=np.full((L, L), 1 / L), encodings=np.eye(L))
    threshold = ta.threshold(model, "weak_recovery")
    assert float(threshold.alpha) == pytest.approx(1 / (L * (L + 1)), rel=1e-9)
    assert float(ta.bayes(model, 0.98 * threshold.alpha).mean.q[0, 0, 0]) == 0
    assert float(ta.bayes(model, 1.02 * threshold.alpha).mean.q[0, 0, 0]) > 5e-4


def test_single_precision():
    model = ta.DotProduct(dtype=jnp.float32)
    perfect = ta.threshold(model, "perfect_recovery")
    numbers = (
        ta.threshold(model, "weak_recovery").alpha,
        perfect.alpha,
        perfect.algorithmic,
        ta.spectral_overlap(model, 0.3).value,
    )
    assert {a.dtype for a in numbers} == {jnp.dtype("float32")}
    np.testing.assert_allclose(numbers, (1 / 6, 0.5, 0.5, 0.38702), rtol=3e-5)


def test_noise_delays_weak_recovery():
    """(1 + Delta)^2 / 6 with Delta = noise / sigma^2, and its derivative in sigma."""
    threshold, delta = ta.threshold(Noisy(), "weak_recovery"), 0.36
    assert float(threshold.alpha) == pytest.approx((1 + delta) ** 2 / 6, rel=1e-9)
    slope = 2 * (1 + delta) / 6 * (-2 * delta / 0.5)
    assert float(threshold.sensitivities.sigma) == pytest.approx(slope, rel=1e-9)
    assert float(threshold.sensitivities.omega) == 0

    def alpha(sigma):
        return ta.threshold(dataclasses.replace(Noisy(), sigma=sigma), "weak_recovery").alpha

    sigma = Noisy().sigma
    assert float(jax.grad(alpha)(sigma)) == pytest.approx(slope, rel=1e-9)
    bend = (2 * delta / 0.5) ** 2 / 3 + 2 * (1 + delta) * delta / 0.5**2  # and the second derivative
    assert float(jax.grad(jax.grad(alpha))(sigma)) == pytest.approx(bend, rel=1e-9)


def test_weak_recovery_by_averages_over_labels():
    plain = Plain()
    threshold = ta.threshold(plain, "weak_recovery", nodes=ta.Sobol(2**12))
    assert abs(float(threshold.alpha) - 1 / 6) < 3 * float(threshold.stderr) < 0.01


def test_two_columns_of_the_teacher():
    """O(2) as a grid: three tokens show more than one column of the teacher, and no less than the bound allows."""
    model = ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=np.eye(3), teacher=np.eye(2), rank=2)
    nodes = ta.Sobol(2**8)
    threshold = ta.threshold(model, "weak_recovery", nodes=nodes)
    assert 1 / 12 < float(threshold.alpha) < 0.5 and threshold.ok


def test_perfect_recovery(model):
    """1 / L; with one token (real phase retrieval) message passing needs 1.128 (Barbier et al., PNAS 2019)."""
    two = ta.threshold(model, "perfect_recovery")
    assert (float(two.alpha), float(two.algorithmic)) == (0.5, pytest.approx(0.5, abs=1e-9))
    retrieval = PhaseRetrieval(lam=jnp.asarray(0.01))
    one = ta.threshold(retrieval, "perfect_recovery")
    assert (float(one.alpha), float(one.algorithmic)) == (1.0, pytest.approx(1.12845, abs=1e-4))
    assert float(ta.threshold(retrieval, "weak_recovery").alpha) == pytest.approx(0.5)
    assert float(ta.bayes(model, 0.49).gen_error) > 1e-5 > float(ta.bayes(model, 0.51).gen_error)


@pytest.mark.parametrize("alpha", [np.inf, np.nan])
def test_an_alpha_that_is_not_finite_is_no_threshold(model, alpha):
    threshold = ta.results.Quantity.of_model(
        lambda model: jnp.array([0, 1]) * model.lam + alpha, model, name="alpha", event="x", meaning="x"
    )
    assert threshold.status_name == "absent" and not threshold.ok and threshold.reason == "it does not happen"
    assert np.isnan(threshold.alpha) and np.isnan(threshold.sensitivities.lam)


@pytest.mark.parametrize(("alpha", "expected"), [(0.1, 0.0), (0.3, 0.38702), (0.75, 0.70964), (1.25, 0.81796)])
def test_spectral_overlap(model, alpha, expected):
    assert float(ta.spectral_overlap(model, alpha).value) == pytest.approx(expected, abs=1e-5)


def test_the_spectral_overlap_grows_from_zero(model):
    """Its square is linear in alpha above weak recovery, at 1 / 6."""
    near, twice = (float(ta.spectral_overlap(model, (1 + e) / 6).value) for e in (0.005, 0.01))
    assert 0 < near < 0.1 and (twice / near) ** 2 == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("kinds", [(Plain, ta.DotProduct), (NoisyPlain, Noisy)], ids=["exact", "noisy"])
def test_spectral_overlap_by_averages_over_labels(kinds):
    plain, model = (kind() for kind in kinds)
    nodes = ta.Sobol(2**12)
    averaged, closed = ta.spectral_overlap(plain, 1.0, nodes=nodes), ta.spectral_overlap(model, 1.0)
    assert float(averaged.value) == pytest.approx(float(closed.value), abs=5e-3)
    assert 0 < float(averaged.stderr) < 5e-3 and closed.stderr == 0


def test_default_averages():
    """2^13 points where every label has finitely many preimages."""
    assert averages_of(NoisyPlain(), None).size == 2**13


def test_thresholds_have_the_error_bars_of_means_over_replicates():
    """And so have their derivatives, here beside derivatives in forward mode."""
    noisy = NoisyPlain()
    nodes = averages_of(noisy, ta.Sobol(2**8))
    values, threshold = thresholds.thresholds(noisy, nodes, False), ta.threshold(noisy, "weak_recovery", nodes=nodes)
    np.testing.assert_allclose([threshold.alpha, threshold.stderr], [np.mean(values), ta.error_bar(values)], rtol=1e-12)
    rates = jax.jacfwd(lambda s: thresholds.thresholds(dataclasses.replace(noisy, sigma=s), nodes, False))(noisy.sigma)
    slopes = [getattr(threshold, name).sigma for name in ("sensitivities", "sensitivities_stderr")]
    np.testing.assert_allclose(slopes, [np.mean(rates), ta.error_bar(rates)], rtol=1e-9)
    assert threshold.stderr > 0 and slopes[1] > 0
