"""The label channel and its potentials against closed forms, for teachers of two columns and tokens of classes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy, PhaseRetrieval, Plain
from scipy.special import logsumexp
from scipy.stats import chi, multivariate_normal

import tiedattn_jax as ta
from tiedattn_jax.bayes import channel
from tiedattn_jax.bayes.thresholds import _curvature, label_matrix

RNG = np.random.default_rng(0)
HATS = jnp.array([[[0.7, 0.3], [0.3, 1.9]]])
sign_information = jax.jit(channel.sign_information, static_argnums=0)
sign_evidence = jax.jit(channel.sign_evidence, static_argnums=0)


def _covariances(size):
    a = RNG.standard_normal((size, 2, 2))
    return a @ a.swapaxes(1, 2) + 0.3 * np.eye(2)


def test_the_evidence_of_a_label_is_a_mixture_of_normals():
    """Every preimage has a normal density, whose covariance is that of the fields and the noise."""
    fields, weights, V, noise = RNG.standard_normal((4, 3, 2)), np.array([0.1, 0.2, 0.3, 0.4]), _covariances(3), 0.7
    w = RNG.standard_normal((3, 2))
    label = ta.bayes.Preimages(*map(jnp.asarray, (fields, np.log(weights), noise)))
    densities = [
        sum(multivariate_normal(w[l], V[l] + noise * np.eye(2)).logpdf(one[l]) for l in range(3)) for one in fields
    ]
    value = eqx.filter_jit(channel.log_evidence)(label, w, V)
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


@eqx.filter_jit
def numbers_of(model, hats):
    """The overlaps, psi and its gradient, and the free entropy at alpha = 1.7 for an evidence of 0.9."""
    x, (psi, slope) = (
        channel.posterior(model, hats),
        jax.value_and_grad(lambda h: channel.teacher_prior(model, h))(hats),
    )
    return x, psi, slope, channel.free_entropy(model, jnp.asarray(1.7), x, hats, jnp.asarray(0.9))


def test_overlaps_of_two_columns_are_the_gradient_of_the_prior(squares):
    x, psi, slope, entropy = numbers_of(squares, HATS)
    np.testing.assert_allclose(x.q, slope + np.swapaxes(slope, 1, 2), rtol=1e-10)
    np.testing.assert_allclose(x.q + x.V, squares.rho, rtol=1e-12)
    np.testing.assert_array_equal(x.q, np.swapaxes(x.q, 1, 2))
    # By hand: psi is the mean of tr(pi S) / 2 - log det(1 + pi S) / 2.
    law, hats = jax.tree.map(np.asarray, squares.law()), np.asarray(HATS)
    products = law.pi @ (law.gamma[:, :, None] * hats)
    expected = 0.5 * np.trace(products, axis1=1, axis2=2) - 0.5 * np.log(np.linalg.det(np.eye(2) + products))
    np.testing.assert_allclose(psi, expected @ law.weights, rtol=1e-12)
    np.testing.assert_allclose(entropy, 1.7 * 0.9 + psi - 0.5 * np.trace(hats[0] @ x.q[0]), rtol=1e-12)


def test_the_error_of_a_square_by_moments(squares):
    """Two draws of covariance rho and cross-covariance q have ``E(|y|^2 - |y'|^2)^2 = 4 tr(rho^2 - q^2)``."""
    x, *_ = numbers_of(squares, HATS)
    rule = ta.GaussHermite(6, replicates=2).rule(squares)
    error = eqx.filter_jit(channel.posterior_error)(squares, x, rule.replicate(0))
    rho, q = np.asarray(squares.rho[0]), np.asarray(x.q[0])
    expected = float(squares.trace[0]) * np.trace(rho @ rho - q @ q)
    np.testing.assert_allclose(error, expected, rtol=1e-9)


@pytest.mark.parametrize("L", [1, 2, 3, 5])
def test_limits_of_labels_up_to_a_sign(L):
    """At small c the information is L (L + 1) c with a relative correction of order c, at large c it is L.

    Fields around zero have the density of W; those far from zero have one half of it, because of the sign.
    """
    small, large = (float(sign_information(L, c)) for c in (1e-7, 1e8))
    assert small == pytest.approx(L * (L + 1) * 1e-7, rel=1e-4) and large == pytest.approx(L, rel=1e-3)
    assert float(sign_information(L, 1.0 - 1e-12) - sign_information(L, 1.0)) == pytest.approx(0, abs=1e-9)
    W, entropy = 0.37, 0.5 * L * (1 + np.log(2 * np.pi * 0.37))
    # A field is near zero with a probability of order c^{-L / 2}.
    limits = [sign_evidence(L, 1e-12, W), sign_evidence(L, 1e6, W)]
    np.testing.assert_allclose(limits, [-entropy, -entropy - np.log(2)], atol=2e-3 if L == 1 else 1e-5)


@pytest.mark.parametrize(("L", "c"), [(1, 0.05), (2, 0.7), (3, 4.0)])
def test_information_is_the_mean_square_of_the_score(L, c):
    """w has L entries of variance c, U = w + xi (W = 1); the score is summed over draws."""
    rng = np.random.default_rng(0)
    w = np.sqrt(c) * rng.standard_normal((L, 400_000))
    U = w + rng.standard_normal(w.shape)
    square = np.sum((U * np.tanh(np.sum(U * w, 0)) - w) ** 2, 0)
    assert abs(sign_information(L, c) - np.mean(square)) < 4 * np.std(square) / np.sqrt(square.size)


@pytest.mark.parametrize("c", [1e-6, 0.05, 0.7, 1.0, 4.0, 300.0])
def test_finer_rules_change_nothing(c):
    """The averages over x, which is sqrt(c) times a chi variable, and over a normal number a, on more nodes."""
    L, (unit, weight), a = 2, np.polynomial.legendre.leggauss(400), np.arange(-12.0, 12.0, 0.02)
    reach = min(11.0, 60 / np.sqrt(c))
    radius = reach * (unit + 1) / 2
    x = np.sqrt(c) * radius[:, None]
    w = (0.5 * reach * weight * chi(L).pdf(radius))[:, None] * 0.02 * np.exp(-(a**2) / 2) / np.sqrt(2 * np.pi)
    factor, argument = (x + a) ** 2 + L - 1, x * (x + a)
    information = np.sum(w * factor * np.tanh(argument) ** 2) - L * c if c < 1 else L
    if c >= 1:
        information -= np.sum(w * factor / np.cosh(np.minimum(abs(argument), 300)) ** 2)
    evidence = np.sum(w * np.logaddexp(0, -2 * argument)) - np.log(2) - L / 2 * (1 + np.log(2 * np.pi))
    found = sign_information(L, c), sign_evidence(L, c, 1.0)
    np.testing.assert_allclose(found, [information, evidence], rtol=1e-9)


def test_classes_collect_what_the_labels_say_of_their_tokens():
    """Classes of equal law: numbers of the tokens are summed over the tokens of each class, weighted with the shares.

    Averages of the evidence and of the error are those of tokens without classes.
    """
    plain, sentences = Plain(), {(0, 1): 0.25, (2, 1): 0.75}
    split = Plain(spectrum=ta.SpectralLaw.of_classes([0.25] * 3, sentences, encodings=np.eye(2)))
    nodes, of_classes = (ta.Sobol(2**6, replicates=2).rule(m).replicate(0) for m in (plain, split))
    x, y = (channel.Posterior(*(jnp.full((size, 1, 1), a) for a in (0.1, 0.15))) for size in (2, 3))
    tokens, classes = (
        eqx.filter_jit(channel.label_channel)(*case) for case in ((plain, x, nodes), (split, y, of_classes))
    )
    information, expected = np.asarray(tokens.information), np.zeros((3, 1, 1))
    curvature, in_classes = (eqx.filter_jit(_curvature)(*case) for case in ((plain, nodes), (split, of_classes)))
    curvature, collected = np.asarray(curvature)[:, 0, 0, :, 0, 0], np.zeros((3, 3))
    for kind, share in sentences.items():
        for l, s in enumerate(kind):
            expected[s] += share * information[l]
            for k, other in enumerate(kind):
                collected[s, other] += share * curvature[l, k]
    np.testing.assert_allclose(classes.information, expected, rtol=1e-9)
    np.testing.assert_allclose(classes.log_evidence, tokens.log_evidence, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(in_classes)[:, 0, 0, :, 0, 0], collected, rtol=1e-9)
    errors = (eqx.filter_jit(channel.posterior_error)(*case) for case in ((plain, x, nodes), (split, y, of_classes)))
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
    np.testing.assert_allclose(eqx.filter_jit(label_matrix)(model, label, np.asarray(c)), expected, rtol=1e-9)
