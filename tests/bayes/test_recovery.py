"""Thresholds of the Bayes-optimal learner and the overlap of the spectral start, against closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, NoisyPlain, PhaseRetrieval, Plain

import tiedattn_jax as ta
from tiedattn_jax.bayes import thresholds
from tiedattn_jax.bayes.fixed_points import averages_of


@pytest.mark.parametrize("L", [2, pytest.param(3, marks=pytest.mark.full)])
def test_weak_recovery_of_exact_labels(L):
    model = ta.DotProduct(mixing=np.full((L, L), 1 / L), encodings=np.eye(L))
    alpha = float(ta.bayes.weak_recovery(model).alpha)
    assert alpha == pytest.approx(1 / (L * (L + 1)), rel=1e-9)
    below, above = (np.ravel(ta.bayes.solve(model, factor * alpha).mean.q)[0] for factor in (0.98, 1.02))
    assert below == 0 and above > 5e-4


@pytest.mark.full
def test_single_precision():
    model = ta.DotProduct(dtype=jnp.float32)
    weak, perfect = (ask(model) for ask in (ta.bayes.weak_recovery, ta.bayes.perfect_recovery))
    numbers = weak.alpha, perfect.alpha, perfect.algorithmic, ta.bayes.spectral_overlap(model, 0.3).value
    assert {a.dtype for a in numbers} == {jnp.dtype("float32")}
    np.testing.assert_allclose(numbers, (1 / 6, 0.5, 0.5, 0.38702), rtol=3e-5)


DELTA = 0.36  # noise / sigma^2, of which the threshold is (1 + Delta)^2 / 6
SLOPE = 2 * (1 + DELTA) / 6 * (-2 * DELTA / 0.5)  # in sigma


def test_noise_delays_weak_recovery():
    threshold = ta.bayes.weak_recovery(Noisy())
    assert float(threshold.alpha) == pytest.approx((1 + DELTA) ** 2 / 6, rel=1e-9)
    assert float(threshold.sensitivities.sigma) == pytest.approx(SLOPE, rel=1e-9)
    assert float(threshold.sensitivities.omega) == 0


@pytest.mark.full
def test_derivatives_of_weak_recovery():
    def alpha(sigma):
        return ta.bayes.weak_recovery(dataclasses.replace(Noisy(), sigma=sigma)).alpha

    assert float(jax.grad(alpha)(0.5)) == pytest.approx(SLOPE, rel=1e-9)
    bend = (2 * DELTA / 0.5) ** 2 / 3 + 2 * (1 + DELTA) * DELTA / 0.5**2
    assert float(jax.grad(jax.grad(alpha))(0.5)) == pytest.approx(bend, rel=1e-9)


def test_weak_recovery_by_averages_over_labels():
    threshold = ta.bayes.weak_recovery(Plain(), nodes=ta.Sobol(2**12))
    assert abs(float(threshold.alpha) - 1 / 6) < 3 * float(threshold.stderr) < 0.01


@pytest.mark.full
def test_two_columns_of_the_teacher():
    """O(2) as a grid: three tokens show more than one column of the teacher, and no less than the bound allows."""
    model = ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=np.eye(3), teacher=np.eye(2), rank=2)
    threshold = ta.bayes.weak_recovery(model, nodes=ta.Sobol(2**8))
    assert 1 / 12 < float(threshold.alpha) < 0.5 and threshold.ok


def test_perfect_recovery(model):
    """1 / L; with one token (real phase retrieval) message passing needs 1.128 (Barbier et al., PNAS 2019)."""
    two = ta.bayes.perfect_recovery(model)
    assert (float(two.alpha), float(two.algorithmic)) == (0.5, pytest.approx(0.5, abs=1e-9))
    assert float(ta.bayes.solve(model, 0.49).gen_error) > 1e-5 > float(ta.bayes.solve(model, 0.51).gen_error)
    retrieval = PhaseRetrieval(lam=jnp.asarray(0.01))
    one = ta.bayes.perfect_recovery(retrieval)
    assert (float(one.alpha), float(one.algorithmic)) == (1.0, pytest.approx(1.12845, abs=1e-4))
    assert float(ta.bayes.weak_recovery(retrieval).alpha) == pytest.approx(0.5)


@pytest.mark.parametrize(("alpha", "expected"), [(0.1, 0.0), (0.3, 0.38702), (0.75, 0.70964), (1.25, 0.81796)])
def test_spectral_overlap(model, alpha, expected):
    assert float(ta.bayes.spectral_overlap(model, alpha).value) == pytest.approx(expected, abs=1e-5)


@pytest.mark.full
def test_the_spectral_overlap_grows_from_zero(model):
    """Its square is linear in alpha above weak recovery, at 1 / 6."""
    near, twice = (float(ta.bayes.spectral_overlap(model, (1 + e) / 6).value) for e in (0.005, 0.01))
    assert 0 < near < 0.1 and (twice / near) ** 2 == pytest.approx(2, rel=0.02)
    for derive in (jax.jacfwd, jax.grad):  # below weak recovery it is zero, with its derivatives in both modes
        assert float(derive(lambda alpha: ta.bayes.spectral_overlap(model, alpha).value)(0.1)) == 0.0


@pytest.mark.full
@pytest.mark.parametrize("kinds", [(Plain, ta.DotProduct), (NoisyPlain, Noisy)], ids=["exact", "noisy"])
def test_spectral_overlap_by_averages_over_labels(kinds):
    plain, model = (kind() for kind in kinds)
    averaged, closed = (
        ta.bayes.spectral_overlap(plain, 1.0, nodes=ta.Sobol(2**12)),
        ta.bayes.spectral_overlap(model, 1.0),
    )
    assert float(averaged.value) == pytest.approx(float(closed.value), abs=5e-3)
    assert 0 < float(averaged.stderr) < 5e-3 and closed.stderr == 0


@pytest.mark.full
def test_thresholds_have_the_error_bars_of_means_over_replicates():
    """And so have their derivatives, here beside derivatives in forward mode."""
    noisy = NoisyPlain()
    nodes = averages_of(noisy, ta.Sobol(2**8))
    values, threshold = thresholds.thresholds(noisy, nodes, False), ta.bayes.weak_recovery(noisy, nodes=nodes)
    np.testing.assert_allclose(
        [threshold.alpha, threshold.stderr], [np.mean(values), ta.results.error_bar(values)], rtol=1e-12
    )
    rates = jax.jacfwd(lambda s: thresholds.thresholds(dataclasses.replace(noisy, sigma=s), nodes, False))(noisy.sigma)
    slopes = [getattr(threshold, name).sigma for name in ("sensitivities", "sensitivities_stderr")]
    np.testing.assert_allclose(slopes, [np.mean(rates), ta.results.error_bar(rates)], rtol=1e-9)
    assert threshold.stderr > 0 and slopes[1] > 0


def test_overlaps_of_many_alphas_under_jit():
    model, alphas = ta.DotProduct(), jnp.array([0.2, 0.5])
    together = jax.jit(jax.vmap(lambda alpha: ta.bayes.spectral_overlap(model, alpha).value))(alphas)
    assert float(together[1]) == pytest.approx(float(ta.bayes.spectral_overlap(model, 0.5).value), rel=1e-9)
