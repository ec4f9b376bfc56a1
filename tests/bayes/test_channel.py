"""The label channel and its potentials against closed forms, for teachers of two columns and tokens of classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, PhaseRetrieval, Plain
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import tiedattn_jax as ta
from tiedattn_jax.bayes import channel
from tiedattn_jax.bayes.thresholds import _curvature, label_matrix

RNG = np.random.default_rng(0)


def _covariances(size):
    a = RNG.standard_normal((size, 2, 2))
    return a @ a.swapaxes(1, 2) + 0.3 * np.eye(2)


def test_the_evidence_of_a_label_is_a_mixture_of_normals():
    """Every preimage has a normal density, whose covariance is that of the fields and the noise."""
    fields, weights, V, noise = RNG.standard_normal((4, 3, 2)), np.array([0.1, 0.2, 0.3, 0.4]), _covariances(3), 0.7
    w = RNG.standard_normal((3, 2))
    label = ta.Preimages(*map(jnp.asarray, (fields, np.log(weights), noise)))
    densities = [
        sum(multivariate_normal(w[l], V[l] + noise * np.eye(2)).logpdf(one[l]) for l in range(3)) for one in fields
    ]
    value = channel.log_evidence(label, jnp.asarray(w), jnp.asarray(V))
    np.testing.assert_allclose(value, logsumexp(densities, b=weights), rtol=1e-12)


class Squares(PhaseRetrieval):
    """Phase retrieval with two columns: the target is ``|y|^2``."""

    shape = (1, 2, 2)

    def law(self):
        """Two atoms, with variances .6 and 1.4 and second moments of the teacher that do not commute."""
        pi = jnp.array([[[1.0, 0.4], [0.4, 0.5]], [[0.3, -0.2], [-0.2, 1.2]]])
        gamma, zero = jnp.array([[0.6], [1.4]]), jnp.zeros((2, 1, 2))
        return ta.SpectralLaw(jnp.array([0.25, 0.75]), gamma, jnp.ones((2, 1, 1)), pi, zero)


@pytest.fixture(scope="module")
def squares():
    return Squares(lam=jnp.asarray(0.01))


def test_overlaps_of_two_columns_are_the_gradient_of_the_prior(squares):
    hats = jnp.array([[[0.7, 0.3], [0.3, 1.9]]])
    x = channel.posterior(squares, hats)
    slope = jax.grad(lambda h: channel.prior(squares, h))(hats)
    np.testing.assert_allclose(x.q, slope + slope.swapaxes(1, 2), rtol=1e-10)
    np.testing.assert_allclose(x.q + x.V, squares.rho, rtol=1e-12)
    np.testing.assert_array_equal(x.q, x.q.swapaxes(1, 2))
    # By hand: psi is the mean of tr(pi S) / 2 - log det(1 + pi S) / 2.
    law = squares.law()
    products = np.asarray(law.pi @ (law.gamma[:, :, None] * hats))
    expected = 0.5 * np.trace(products, axis1=1, axis2=2) - 0.5 * np.log(np.linalg.det(np.eye(2) + products))
    np.testing.assert_allclose(channel.prior(squares, hats), expected @ np.asarray(law.weights), rtol=1e-12)


def test_the_error_of_a_square_by_moments(squares):
    """Two draws of covariance rho and cross-covariance q have ``E(|y|^2 - |y'|^2)^2 = 4 tr(rho^2 - q^2)``."""
    x = channel.posterior(squares, jnp.array([[[0.7, 0.3], [0.3, 1.9]]]))
    rule = ta.GaussHermite(6, replicates=2).rule(squares)
    error = channel.gen_error(squares, x, rule.replicate(0))
    rho, q = squares.rho[0], x.q[0]
    expected = float(squares.trace[0]) * np.trace(rho @ rho - q @ q)
    np.testing.assert_allclose(error, expected, rtol=1e-9)


def test_the_free_entropy_of_zero_and_of_other_conjugates(squares):
    hats = jnp.array([[[0.7, 0.3], [0.3, 1.9]]])
    x = channel.posterior(squares, hats)
    value = channel.free_entropy(squares, jnp.asarray(1.7), x, hats, jnp.asarray(0.9))
    expected = 1.7 * 0.9 + channel.prior(squares, hats) - 0.5 * np.trace(hats[0] @ x.q[0])
    np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_solving_divides_numbers_and_pivots_matrices():
    a, b = np.array([[[0.0, 2.0], [1.0, 3.0]]]), RNG.standard_normal((1, 2, 2))
    np.testing.assert_allclose(a @ channel.solve_general(jnp.asarray(a), jnp.asarray(b)), b, rtol=1e-12)
    np.testing.assert_array_equal(channel.solve_general(jnp.full((1, 1, 1), 3.0), jnp.full((1, 1, 1), 6.0)), [[[2.0]]])


@pytest.mark.parametrize("L", [1, 2, 3])
def test_limits_of_the_log_evidence(L):
    """Fields around zero have the density of W; those far from zero have one half of it, because of the sign."""
    W = 0.37
    entropy = 0.5 * L * (1 + np.log(2 * np.pi * W))
    small, large = (channel.sign_evidence(L, jnp.asarray(c), jnp.asarray(W)) for c in (1e-12, 1e6))
    # A field is near zero with a probability of order c^{-L / 2}.
    np.testing.assert_allclose([small, large], [-entropy, -entropy - np.log(2)], atol=2e-3 if L == 1 else 1e-5)


class PlainInClasses(Plain):
    """Averages over the nodes for tokens of classes."""


def _in_classes(variances):
    sentences = {(0, 1): 0.25, (2, 1): 0.75}
    law = ta.SpectralLaw.of_classes(variances, sentences, encodings=np.eye(2))
    return PlainInClasses(spectrum=law), sentences


def test_classes_collect_what_the_labels_say_of_their_tokens():
    """Classes of equal law: numbers of the tokens are summed over the tokens of each class, weighted with the shares.

    Averages of the evidence and of the error are those of tokens without classes.
    """
    plain, (split, sentences) = Plain(), _in_classes([0.25] * 3)
    rule = ta.Sobol(2**6, replicates=2)
    nodes, of_classes = (rule.rule(m).replicate(0) for m in (plain, split))
    x, y = (channel.Posterior(0.1 * jnp.ones((size, 1, 1)), 0.15 * jnp.ones((size, 1, 1))) for size in (2, 3))
    tokens, classes = channel.channel(plain, x, nodes), channel.channel(split, y, of_classes)
    information, expected = np.asarray(tokens.information), np.zeros((3, 1, 1))
    curvature, collected = np.asarray(_curvature(plain, nodes))[:, 0, 0, :, 0, 0], np.zeros((3, 3))
    for kind, share in sentences.items():
        for l, s in enumerate(kind):
            expected[s] += share * information[l]
            for k, other in enumerate(kind):
                collected[s, other] += share * curvature[l, k]
    np.testing.assert_allclose(classes.information, expected, rtol=1e-9)
    np.testing.assert_allclose(classes.log_evidence, tokens.log_evidence, rtol=1e-9)
    np.testing.assert_allclose(_curvature(split, of_classes)[:, 0, 0, :, 0, 0], collected, rtol=1e-9)
    errors = (channel.gen_error(m, v, n) for m, v, n in ((plain, x, nodes), (split, y, of_classes)))
    np.testing.assert_allclose(*errors, rtol=1e-9)


@pytest.mark.parametrize(("kind", "noise"), [(ta.DotProduct, 0.0), (Noisy, 0.3**2)], ids=["exact", "noisy"])
def test_the_matrix_of_a_label_shrinks_its_curvature(kind, noise):
    """It is ``rho^{-1/2} G (c + G)^{-1} rho^{-1/2}`` with the Hessian G of the log evidence in units of rho.

    For fields U up to a sign the Hessian is ``u u^T - 1 / W`` with u = U / W. The tokens have different variances.
    """
    gamma = np.repeat([[0.2], [0.6]], 4, 1)
    spectrum = ta.SpectralLaw.from_matrices(gamma, np.eye(2, 4), np.ones((4, 1)))
    model, U, c = kind(spectrum=spectrum), np.array([[0.7], [-0.4]]), 1.3
    label = model.preimages(jnp.asarray(U), *[jnp.zeros((2, 1))] * (noise > 0))
    rho = np.ravel(model.rho)
    u = U[:, 0] / (rho + noise)
    G = np.sqrt(np.outer(rho, rho)) * (np.outer(u, u) - np.diag(1 / (rho + noise)))
    expected = G @ np.linalg.inv(c * np.eye(2) + G) / np.sqrt(np.outer(rho, rho))
    np.testing.assert_allclose(label_matrix(model, label, jnp.asarray(c)), expected, rtol=1e-9)
