import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.program import counted_loops
from tiedattn_jax.averages.prox import prox
from tiedattn_jax.theory.potentials import channel, channel_gradient, conjugates, overlaps, prior

pytestmark = pytest.mark.usefixtures("fast_compilation")


def stein(model, x, alpha, student, teacher):
    """Conjugates by Stein's lemma, with the student's field drawn first: y = theta/sqrt(q) xi + ... u."""
    q, theta, rho = x.q[0, 0, 0], x.theta[0, 0, 0], 0.25
    xi, u = student, teacher
    h = jnp.sqrt(q) * xi + x.m[..., None]
    spread = jnp.sqrt(rho - theta**2 / q)
    y = theta / jnp.sqrt(q) * xi + spread * u
    g = (prox(ProxProblem(model, x.V, y), h).z - h) / x.V
    mean = lambda a: jnp.mean(jnp.sum(a, (0, 1)))  # noqa: E731
    qhat, thetahat = alpha * mean(g**2), alpha * mean(g * u) / spread
    Vhat = -alpha * mean(g * xi) / jnp.sqrt(q) + theta * thetahat / q
    return jnp.array([qhat, Vhat, thetahat, alpha * jnp.mean(g[0, 0] - g[1, 0])])


@jax.jit
def gradient_and_oracle(model, x, alpha, nodes):
    def pair(rule):
        _, g, _ = channel_gradient(model, x, rule)
        hats = conjugates(alpha, g)
        gradient = jnp.array([hats.q.sum(), hats.V.sum(), hats.theta.sum(), hats.m[0, 0] - hats.m[1, 0]])
        return gradient, stein(model, x, alpha, rule.student, rule.teacher)

    return nodes.each(pair)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.branch} {c.alpha}")
def test_gradient_is_the_stein_form(model, case):
    gradient, oracle = gradient_and_oracle(model, state(case), case.alpha, ta.Sobol(2**13, replicates=8).rule(model))
    gap = jnp.mean(gradient - oracle, 0)
    bar = jnp.std(gradient - oracle, 0, ddof=1) / 8**0.5
    assert np.all(np.abs(gap) <= 4 * bar + 1e-15), (gap, bar)
    signal = jnp.array([1, 1, case.theta != 0, case.m != 0])
    assert np.all(np.asarray(bar)[signal > 0] < 0.03 * np.abs(np.asarray(oracle.mean(0)))[signal > 0])


def test_a_reverse_pass_searches_no_more(model):
    """A reverse pass reuses the minimisers: it adds no loop with a condition, which only the search has."""
    x, replicate = state(CASES[0]), ta.Sobol(64).rule(model).coarse

    def value(model):
        return channel(model, x, replicate)

    with counted_loops(False):
        forward, reverse = (str(jax.make_jaxpr(fn)(model)) for fn in (value, jax.grad(value)))
    assert forward.count("while[") == reverse.count("while[") > 0


def test_hats_are_the_gradient_of_the_discretised_potential(model, nodes):
    """At frozen nodes the reported gradient is that of the reported M, by central differences of M itself."""
    rule, x = nodes.coarse, state(CASES[0])
    _, g, _ = jax.jit(channel_gradient)(model, x, rule)
    rng = np.random.default_rng(0)
    d = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape)) * 1e-3, x)
    value = jax.jit(lambda s: channel(model, jax.tree.map(lambda a, b: a + s * b, x, d), rule))
    difference = (value(1e-2) - value(-1e-2)) / 2e-2
    slope = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(d), strict=True))
    np.testing.assert_allclose(slope, difference, rtol=1e-5)


def test_single_precision(model, nodes):
    """M and its gradient on single nodes agree in both precisions; `test_lines` solves in single precision."""
    double = model, state(CASES[1]), nodes.coarse
    single = jax.tree.map(lambda a: a.astype(jnp.float32), double)
    results, expected = (jax.tree.leaves(jax.jit(channel_gradient)(*t)[:2]) for t in (single, double))
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-7)


def hats_of(q, V, theta, m):
    return ta.results.Conjugates(*(jnp.full((2, 1, 1), a) for a in (q, V)), jnp.zeros((2, 1, 1)) + jnp.reshape(
        jnp.asarray(theta), (-1, 1, 1)), jnp.asarray(m)[:, None])  # fmt: skip


def test_ridge_prior_is_the_written_out_form(model):
    x = overlaps(model, hats_of(1.3e-4, 0.024, 0.011, [0.003, -0.003]))
    s2, Lam = 0.25, 0.01 + 0.25 * 0.048
    qhat, mhat, thetahat = 2.6e-4, 0.006, 0.022
    np.testing.assert_allclose(x.V[0, 0, 0], s2 / Lam, rtol=1e-12)
    np.testing.assert_allclose(x.m[:, 0], [mhat / Lam, -mhat / Lam], rtol=1e-12)
    np.testing.assert_allclose(x.theta[1, 0, 0], s2 * s2 * thetahat / Lam, rtol=1e-12)
    np.testing.assert_allclose(x.q[0, 0, 0], s2 * (s2 * qhat + mhat**2 + s2 * s2 * thetahat**2) / Lam**2, rtol=1e-12)


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


def test_two_point_spectrum_averages_over_its_atoms(model):
    class TwoPoints(ta.DotProduct):
        def law(self):
            twice = jax.tree.map(lambda a: jnp.repeat(a, 2, 0), super().law())
            gamma = twice.gamma * jnp.array([[0.3], [1.3]])
            return ta.SpectralLaw(jnp.array([0.3, 0.7]), gamma, twice.tau, twice.pi, twice.cross)

    two_points, expected = TwoPoints(**vars(model)), 0.0
    for share, g in ((0.3, 0.075), (0.7, 0.325)):
        b2 = (0.003 + 0.001) ** 2 + (g * 0.02) ** 2
        expected += share * 0.5 * (g * 2e-4 + b2) / (0.01 + g * 0.04)
    value = prior(two_points, hats_of(1e-4, 0.02, 0.01, [0.003, -0.001]))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(two_points.rho, np.full((2, 1, 1), 0.25), rtol=1e-12)
    np.testing.assert_allclose(two_points.trace, 0.25, rtol=1e-12)
