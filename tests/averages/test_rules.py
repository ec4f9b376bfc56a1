"""The Gaussian law of the fields of several columns, and what a rule gives."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import tiedattn_jax as ta
from tiedattn_jax.averages import rules
from tiedattn_jax.averages.rules import COARSE, fields, legendre, log_volume, whiten

GRAM = np.array([[1.0, 0.4], [0.4, 0.7]])
SPECTRUM = ta.SpectralLaw.of_classes(
    (0.25, 0.36), {(0, 1): 1.0}, encodings=[[1.0, 0.0], [-1.0, 0.0]], means=[[0.0, 1.0], [0.0, -0.6]],
    teacher_means=(0.3, -0.18),
)  # fmt: skip


def columns_and_state():
    """A model with two columns of student and teacher, and overlaps without any symmetry."""
    model = ta.DotProduct(rank=2, teacher=GRAM)
    rng = np.random.default_rng(3)
    theta, m, root = 0.2 * rng.normal(size=(2, 2, 2)), rng.normal(size=(2, 2)), rng.normal(size=(2, 2, 2))
    rho = np.asarray(model.rho)
    q = theta @ np.linalg.inv(rho) @ theta.swapaxes(1, 2) + root @ root.swapaxes(1, 2) + 0.1 * np.eye(2)
    x = ta.Overlaps(*(jnp.asarray(a) for a in (q, np.stack([np.eye(2)] * 2), theta, m)))
    return model, x, rho


def test_fields_of_several_columns_have_the_moments_of_the_overlaps():
    """A tensor grid of order two integrates second moments exactly."""
    model, x, rho = columns_and_state()
    nodes = ta.GaussHermite(2, replicates=1).rule(model).replicate(0)
    h, y = map(np.asarray, jax.jit(fields)(model, x, nodes.student, nodes.teacher))
    weight, q, theta, m = map(np.asarray, (nodes.weight, x.q, x.theta, x.m))
    for l in range(2):
        both = np.concatenate([h[l], y[l]])
        mean = both @ weight
        second = (both * weight) @ both.T - np.outer(mean, mean)
        np.testing.assert_allclose(mean, [*m[l], 0, 0], atol=1e-12)
        expected = np.block([[q[l], theta[l]], [theta[l].T, rho[l]]])
        np.testing.assert_allclose(second, expected, rtol=1e-10, atol=1e-12)


def test_the_density_of_several_columns_is_that_of_their_normal_law():
    model, x, rho = columns_and_state()
    rng = np.random.default_rng(4)
    student, teacher = rng.normal(size=(2, 2, 2, 5))
    h, y = jax.jit(fields)(model, x, jnp.asarray(student), jnp.asarray(teacher))
    normals, log_density = jax.jit(whiten)(model, x, h, y)
    np.testing.assert_allclose(normals, student, rtol=1e-10)
    h, y, q, theta, m = map(np.asarray, (h, y, x.q, x.theta, x.m))
    expected, volume = np.zeros(5), 0.0
    for l in range(2):
        slope = theta[l] @ np.linalg.inv(rho[l])
        covariance = q[l] - slope @ theta[l].T
        for n in range(5):
            mean = m[l] + slope @ y[l, :, n]
            expected[n] += stats.multivariate_normal.logpdf(h[l, :, n], mean, covariance) + np.log(2 * np.pi)
        volume += 0.5 * np.linalg.slogdet(covariance)[1]
    np.testing.assert_allclose(log_density, expected, rtol=1e-10)
    np.testing.assert_allclose(jax.jit(log_volume)(model, x), volume, rtol=1e-12)


def test_fields_of_classes_have_the_means_of_their_tokens():
    model = ta.DotProduct(spectrum=SPECTRUM)
    kind = model.condition_on(model.law().sentences.kinds[0])
    recipe = ta.GaussHermite(2, replicates=1).rule(model).replicate(0)
    y = jax.jit(rules.teacher_fields)(kind, recipe.teacher)
    np.testing.assert_allclose(y[:, 0] @ recipe.weight, [0.3, -0.18], rtol=1e-6)
    assert rules.Fields.of(model).means and not rules.Fields.of(ta.DotProduct()).means


def test_replicates_of_a_rule_by_number(model):
    rule = ta.MonteCarlo(5, replicates=3).rule(model)
    for k in range(3):
        np.testing.assert_array_equal(rule.replicate(k).student, rule.stack.student[k])
    assert rule.replicate(COARSE) is rule.replicate(-1) is rule.coarse
    assert str(rule) == "3 replicates of 5 nodes, points, for (L, r, t) = (2, 1, 1)"
    assert (rule.replicates, rule.size, rule.stack.shape, rule.coarse.shape) == (3, 5, (2, 1, 1), (2, 1, 1))


def test_nodes_of_legendre_lie_between_zero_and_one():
    for count in (1, 4):
        node, weight = legendre(count)
        powers = [np.sum(weight * node**k) for k in range(2 * count)]
        np.testing.assert_allclose(powers, 1 / np.arange(1, 2 * count + 1), rtol=1e-12)
