import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state
from problems import rule

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import prox
from tiedattn_jax.theory import potentials
from tiedattn_jax.theory.potentials import channel_gradient, conjugates, overlaps

prior, gradient_of = jax.jit(potentials.prior), jax.jit(channel_gradient)


@jax.jit
def stein(model, x, alpha, xi, u):
    """Conjugates by Stein's lemma, with the student's field xi drawn first: y = theta/sqrt(q) xi + ... u."""
    q, theta, rho = x.q[0, 0, 0], x.theta[0, 0, 0], 0.25
    h, spread = jnp.sqrt(q) * xi + x.m[..., None], jnp.sqrt(rho - theta**2 / q)
    g = (prox(ProxProblem(model, x.V, theta / jnp.sqrt(q) * xi + spread * u), h).z - h) / x.V
    square, along_u, along_xi = (jnp.mean(jnp.sum(g * a, (0, 1))) for a in (g, u, xi))
    qhat, thetahat = alpha * square, alpha * along_u / spread
    Vhat = -alpha * along_xi / jnp.sqrt(q) + theta * thetahat / q
    return jnp.array([qhat, Vhat, thetahat, alpha * jnp.mean(g[0, 0] - g[1, 0])])


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.branch} {c.alpha}")
def test_gradient_is_the_stein_form(model, case):
    pairs, rule, x = [], ta.Sobol(2**10, replicates=8).rule(model), state(case)
    for replicate in map(rule.replicate, range(8)):
        hats = jax.tree.map(np.asarray, conjugates(case.alpha, gradient_of(model, x, replicate)[1]))
        gradient = [hats.q.sum(), hats.V.sum(), hats.theta.sum(), hats.m[0, 0] - hats.m[1, 0]]
        pairs.append((gradient, stein(model, x, case.alpha, replicate.student, replicate.teacher)))
    gradient, oracle = np.moveaxis(np.array(pairs), 1, 0)
    gap, bar = np.mean(gradient - oracle, 0), np.std(gradient - oracle, 0, ddof=1) / 8**0.5
    assert np.all(np.abs(gap) <= 4 * bar + 1e-15), (gap, bar)
    signal = np.array([True, True, case.theta != 0, case.m != 0])
    assert np.all(bar[signal] < 0.08 * np.abs(oracle.mean(0))[signal])


def test_hats_are_the_gradient_of_the_discretised_potential(model):
    """At frozen nodes the reported gradient is that of the reported M, by central differences of M itself."""
    coarse, x, rng = rule("points").coarse, state(CASES[0]), np.random.default_rng(0)
    d = jax.tree.map(lambda a: 1e-5 * rng.standard_normal(a.shape), x)
    above, below = (gradient_of(model, jax.tree.map(lambda a, b, s=s: a + s * b, x, d), coarse)[0] for s in (1, -1))
    leaves = zip(*map(jax.tree.leaves, (gradient_of(model, x, coarse)[1], d)), strict=True)
    np.testing.assert_allclose(sum(np.sum(np.asarray(a) * b) for a, b in leaves), (above - below) / 2, rtol=1e-5)


def hats_of(q, V, theta, m):
    matrices = [np.zeros((2, 1, 1)) + np.reshape(a, (-1, 1, 1)) for a in (q, V, theta)]
    return ta.results.Conjugates(*map(jnp.asarray, (*matrices, np.reshape(m, (2, 1)))))


def test_ridge_prior_is_the_written_out_form(model):
    x = jax.jit(overlaps)(model, hats_of(1.3e-4, 0.024, 0.011, [0.003, -0.003]))
    s2, Lam = 0.25, 0.01 + 0.25 * 0.048
    qhat, mhat, thetahat = 2.6e-4, 0.006, 0.022
    np.testing.assert_allclose(x.V, s2 / Lam, rtol=1e-12)
    np.testing.assert_allclose(x.m[:, 0], [mhat / Lam, -mhat / Lam], rtol=1e-12)
    np.testing.assert_allclose(x.theta, s2 * s2 * thetahat / Lam, rtol=1e-12)
    np.testing.assert_allclose(x.q, s2 * (s2 * qhat + mhat**2 + s2 * s2 * thetahat**2) / Lam**2, rtol=1e-12)


def test_a_teacher_along_the_encodings(model):
    """The prior needs E b^2 of b = sum_k mhat_k tau_k + sum_k gamma_k thetahat_k pi, with the cross moments."""

    class Crossed(ta.DotProduct):
        def law(self):
            return dataclasses.replace(super().law(), cross=jnp.array([[[0.3], [-0.2]]]))

    mhat, thetahat, qhat, Vhat = np.array([0.003, -0.001]), np.array([0.02, 0.01]), 1e-4, 0.024
    theta, tau = 0.25 * thetahat.sum(), np.array([[1.0, -1.0], [-1.0, 1.0]])
    b2 = mhat @ tau @ mhat + theta**2 + 2 * theta * mhat @ [0.3, -0.2]
    value = prior(Crossed(**vars(model)), hats_of(qhat, Vhat, thetahat, mhat))
    np.testing.assert_allclose(value, 0.5 * (0.5 * qhat + b2) / (0.01 + 0.5 * Vhat), rtol=1e-12)


class TwoPoints(ta.DotProduct):
    def law(self):
        twice = jax.tree.map(lambda a: jnp.repeat(a, 2, 0), super().law())
        gamma = twice.gamma * jnp.array([[0.3], [1.3]])
        return ta.SpectralLaw(jnp.array([0.3, 0.7]), gamma, twice.tau, twice.pi, twice.cross)


def test_two_point_spectrum_averages_over_its_atoms(model):
    two_points, expected = TwoPoints(**vars(model)), 0.0
    for share, g in ((0.3, 0.075), (0.7, 0.325)):
        expected += share * 0.5 * (g * 2e-4 + (0.003 + 0.001) ** 2 + (g * 0.02) ** 2) / (0.01 + g * 0.04)
    value = prior(two_points, hats_of(1e-4, 0.02, 0.01, [0.003, -0.001]))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(two_points.rho, np.full((2, 1, 1), 0.25), rtol=1e-12)
    np.testing.assert_allclose(two_points.trace, 0.25, rtol=1e-12)
