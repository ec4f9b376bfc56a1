import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.bayes import channel

C = (1e-6, 0.05, 0.7, 1.0, 4.0, 300.0)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 400_000)), rng.standard_normal(400_000)


@pytest.mark.parametrize("L", [1, 2, 3])
@pytest.mark.parametrize("c", [0.05, 0.7, 4.0])
def test_information_is_the_mean_square_of_the_score(draws, L, c):
    """w has L entries of variance c, U = w + xi (W = 1); the score is summed over draws."""
    normals, _ = draws
    w = np.sqrt(c) * normals[:L]
    U = w + np.random.default_rng(1).standard_normal(w.shape)
    square = np.sum((U * np.tanh(np.sum(U * w, 0)) - w) ** 2, 0)
    error = np.std(square) / np.sqrt(square.size)
    assert abs(channel.sign_information(L, jnp.asarray(c)) - np.mean(square)) < 4 * error


@pytest.mark.parametrize("L", [1, 2, 3, 5])
def test_limits(L):
    """At small c the information is L (L + 1) c with a relative correction of order c, at large c it is L."""
    small, large = (float(channel.sign_information(L, jnp.asarray(c))) for c in (1e-7, 1e8))
    assert small == pytest.approx(L * (L + 1) * 1e-7, rel=1e-4)
    assert large == pytest.approx(L, rel=1e-3)
    c = jnp.asarray(1.0)
    assert float(channel.sign_information(L, c - 1e-12) - channel.sign_information(L, c)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("c", C)
def test_finer_rules_change_nothing(monkeypatch, c):
    coarse = [channel.sign_information(2, jnp.asarray(c)), channel.sign_evidence(2, jnp.asarray(c), jnp.asarray(1.0))]
    monkeypatch.setattr(channel, "_RADII", 200)
    monkeypatch.setattr(channel, "_STEP", 0.05)
    fine = [channel.sign_information(2, jnp.asarray(c)), channel.sign_evidence(2, jnp.asarray(c), jnp.asarray(1.0))]
    np.testing.assert_allclose(coarse, fine, rtol=1e-10)


@pytest.mark.parametrize("L", [1, 2])
@pytest.mark.parametrize("q", [0.01, 0.4, 0.9])
def test_information_is_the_slope_of_the_log_evidence(L, q):
    """Nishimori: d E log Z / dq = E|g|^2 / 2 with q + W fixed."""

    def evidence(q):
        W = 1.2 - q
        return channel.sign_evidence(L, q / W, W)

    W = 1.2 - q
    expected = 0.5 * channel.sign_information(L, jnp.asarray(q / W)) / W
    assert float(jax.grad(evidence)(q)) == pytest.approx(float(expected), rel=1e-8)
