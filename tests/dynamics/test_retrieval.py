"""The risk of the single-location task and its gradient are those that the code of its authors prints."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import erf

import tiedattn_jax as ta
from tiedattn_jax.dynamics.flow import forces
from tiedattn_jax.model.overlaps import Overlaps

VARIANCE = 0.5


class SingleLocation(ta.Model):
    """Sentences of an answer and a distractor, and of two distractors, as on the page on retrieval."""

    strength: jax.Array  # d / 2, the square of the answer's mean
    shape = (2, 2, 1)

    def loss(self, Z, Y):
        g, m = erf(0.1 * Z[:, 0]) * Z[:, 1], 9
        error = Y[0, 0] - g[0]
        answer = error**2 - 2 * m * error * g[1] + m * g[1] ** 2
        return 2 * jnp.where(self.trace[0] < self.trace[1], answer, m * (m - 1) * g[0] * g[1])

    def law(self):
        sentences, zero = {(0, 1): 0.5, (1, 1): 0.5}, [[0.0], [0.0]]
        law = ta.SpectralLaw.of_classes([VARIANCE, 1.0], sentences, encodings=zero, means=zero)
        return eqx.tree_at(lambda law: law.tau, law, law.tau.at[0, 2, 2].set(self.strength))


# d, k, v, risk, and its gradients in k and v without their parts along k and v, which projected descent takes.
PUBLISHED = [
    (
        400, (0.3, 0.1, 0.5, 0.8), (0.05, 0.4, 0.6, 0.2), 1.8767704543117985,
        (2.1065100239589527, 1.0455530789435965, 0.7767264307511599, -1.4060894130720318),
        (15.718898675029788, -1.5594563545315658, -0.7424053618706057, 1.4164041259175022),
    ),
    (
        80, (0.2, -0.1, 0.5, 0.0), (0.02, 0.5, 0.1, 0.4), 0.4590362011664889,
        (-0.28747583653894837, 0.06415659409665048, 0.12782165343490945, 0.08497756690712856),
        (0.39351532678358675, -0.13765227240582054, 0.15420305410970522, 0.11383881064066993),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("d", "k", "v", "risk", "slope_k", "slope_v"), PUBLISHED)
def test_risk_and_gradient_are_the_published_ones(d, k, v, risk, slope_k, slope_v):
    model = SingleLocation(lam=jnp.array(0.01), strength=jnp.array(d / 2))
    ta.check(model, even=False)
    Q = np.stack([np.array(a) / np.linalg.norm(a) for a in (k, v)], 1)  # the first rows are along k* and v*
    gamma, means = np.array([VARIANCE, 1.0])[:, None, None], np.zeros((4, 4))
    means[2, 0] = (d / 2) ** 0.5
    q, theta = gamma * (Q.T @ Q), gamma * Q[1][:, None]
    x = jax.tree.map(jnp.asarray, Overlaps(q, 0 * q, theta, means @ Q))
    nodes = ta.GaussHermite(6, replicates=1).rule(model)
    found = eqx.filter_jit(forces)(model, x, nodes.replicate(0))
    g = jax.tree.map(np.asarray, found.gradient)
    slope = Q @ np.sum(gamma * (g.q + g.q.swapaxes(1, 2)), 0) + means.T @ g.m
    slope[1] += np.sum(gamma * g.theta, 0)[:, 0]
    slope -= Q * np.sum(Q * slope, 0)
    assert float(found.error) == pytest.approx(risk, abs=1e-6)
    np.testing.assert_allclose(slope, np.stack([slope_k, slope_v], 1), atol=1e-6)


# Minima of the closed risk on the page with a ridge, by BFGS: the risk, and what k and v have along k* and v*.
MINIMA = [((0.1, 0.3), (0.0, 0.3), (0.5845, 0.0), (0.0, 1.0077), 0.13579694281852484),
          ((0.01, 0.3), (0.1, 0.03), (0.0, 0.7345), (0.7342, 0.0), 0.09786717195143918)]  # fmt: skip


def retrieval_overlaps(k, v, strength=200.0):
    Q = np.stack([k, v], 1)
    return Q.T @ Q, Q[1][:, None], np.zeros((4, 2)) + [[0], [0], [strength**0.5], [0]] * Q[0]


@pytest.mark.parametrize(("k", "v", "best_k", "best_v", "risk"), MINIMA, ids=["as-the-teacher", "exchanged"])
def test_minima_are_those_of_the_closed_risk(k, v, best_k, best_v, risk):
    model = SingleLocation(lam=jnp.array(0.01), strength=jnp.array(200.0))
    nodes = ta.GaussHermite(6, replicates=1)
    point = ta.dynamics.population(model, 0.1, None, nodes=nodes, start=retrieval_overlaps(k, v)[1:])
    assert point.ok and point.stable
    assert float(point.risk) == pytest.approx(risk, abs=1e-8)
    for found, expected in zip((point.R, point.Theta, point.m), retrieval_overlaps(best_k, best_v), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-3)
    # The derivative of the minimum in kappa is tr R / 2, and the next minimum begins here.
    further = ta.dynamics.population(model, 0.1001, None, nodes=nodes, start=point)
    assert float(further.risk - point.risk) == pytest.approx(0.5e-4 * np.trace(point.R), rel=1e-3)


@pytest.mark.full
def test_classes_that_are_alike_change_no_minimum():
    class Classes(ta.DotProduct):
        def law(self):
            sentences = {(0, 0): 0.3, (0, 1): 0.2, (1, 0): 0.2, (1, 1): 0.3}
            return ta.SpectralLaw.of_classes([0.25, 0.25], sentences)

    nodes = ta.GaussHermite(8, replicates=1)
    for branch in ("semantic", "positional"):
        alone, mixed = (ta.dynamics.population(kind(), 0.005, branch, nodes=nodes) for kind in (ta.DotProduct, Classes))
        assert mixed.ok
        for a, b in ((alone.R, mixed.R), (alone.m, mixed.m[:2]), (alone.risk, mixed.risk),
                     (alone.curvature, mixed.curvature)):  # fmt: skip
            np.testing.assert_allclose(b, a, rtol=1e-8, atol=1e-8)
