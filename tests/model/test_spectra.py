"""Spectral laws of matrices and of samples: what they keep, and the models and data made with them."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated import assert_agrees

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import loss_at_nodes

D = 24
RNG = np.random.default_rng(0)
BASIS = np.linalg.qr(RNG.standard_normal((D, D)))[0]
VALUES = np.stack([np.linspace(0.1, 0.6, D), RNG.uniform(0.1, 0.5, D)])
COVARIANCES = np.einsum("ij,lj,kj->lik", BASIS, VALUES, BASIS)
ENCODINGS = RNG.standard_normal((2, D)) / D**0.5
TEACHER = RNG.standard_normal((D, 2))


@pytest.fixture(scope="module")
def law():
    return ta.SpectralLaw.from_matrices(COVARIANCES, ENCODINGS, TEACHER)


@pytest.fixture(scope="module")
def on_matrices(law):
    return ta.UntiedDotProduct(spectrum=law)


def test_a_law_keeps_what_matrices_say(law, on_matrices):
    assert law.weights.shape == (D,)
    for l, covariance in enumerate(COVARIANCES):
        np.testing.assert_allclose(on_matrices.rho[l], TEACHER.T @ covariance @ TEACHER / D, rtol=1e-12)
        np.testing.assert_allclose(on_matrices.trace[l], np.trace(covariance) / D, rtol=1e-12)
        # The law keeps the moments of each covariance, too, because the prior potential needs them.
        weighted = np.einsum("k,k,kij->ij", law.weights, law.gamma[:, l], law.tau)
        np.testing.assert_allclose(weighted, ENCODINGS @ covariance @ ENCODINGS.T, rtol=1e-11)
        cross = np.einsum("k,k,klt->lt", law.weights, law.gamma[:, l], law.cross)
        np.testing.assert_allclose(cross, ENCODINGS @ covariance @ TEACHER / D**0.5, rtol=1e-10)
    np.testing.assert_allclose(np.einsum("k,kij->ij", law.weights, law.tau), ENCODINGS @ ENCODINGS.T, rtol=1e-12)
    ta.check(on_matrices)


def test_equal_eigenvalues_are_one_atom():
    values = np.stack([np.repeat([0.1, 0.3], 12), np.tile([0.2, 0.2 + 1e-13, 0.5], 8)])
    law = ta.SpectralLaw.from_matrices(np.einsum("ij,lj,kj->lik", BASIS, values, BASIS), ENCODINGS, TEACHER)
    np.testing.assert_allclose(law.weights, [1 / 3, 1 / 6, 1 / 3, 1 / 6])
    np.testing.assert_allclose(law.gamma, [[0.1, 0.2], [0.1, 0.5], [0.3, 0.2], [0.3, 0.5]], rtol=1e-12)
    subspace = BASIS[:, (values == [[0.3], [0.5]]).all(0)]  # of the last atom
    np.testing.assert_allclose(law.pi[3], TEACHER.T @ subspace @ subspace.T @ TEACHER / 4, rtol=1e-10)
    np.testing.assert_allclose(law.tau[3], D * ENCODINGS @ subspace @ subspace.T @ ENCODINGS.T / 4, rtol=1e-10)
    np.testing.assert_allclose(law.cross[3], D**0.5 * ENCODINGS @ subspace @ subspace.T @ TEACHER / 4, rtol=1e-10)


def test_isotropic_matrices_give_the_law_of_the_dot_product(model):
    p = np.stack([np.ones(D), -np.ones(D)]) / D**0.5
    teacher = TEACHER[:, :1] - TEACHER[:, :1].mean()
    teacher *= D**0.5 / np.linalg.norm(teacher)
    for covariances in (0.25 * np.stack([np.eye(D)] * 2), np.full((2, D), 0.25)):
        law = ta.SpectralLaw.from_matrices(covariances, p, teacher)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-14), law, model.law())
    isotropic = ta.DotProduct(spectrum=law)
    Z, Y = jnp.array([[0.7], [-0.3]]), jnp.array([[0.4], [0.9]])
    np.testing.assert_allclose(isotropic.loss(Z, Y), model.loss(Z, Y), rtol=1e-14)
    assert isotropic.shape == model.shape and isotropic.sigma is None and "sigma" not in repr(isotropic)


def test_covariances_whose_sum_is_isotropic_have_one_basis():
    """The sum of these two says nothing of their eigenvectors."""
    basis, values = np.array([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5, np.array([[1.0, 2.0], [2.0, 1.0]])
    law = ta.SpectralLaw.from_matrices(basis @ (values[:, :, None] * basis.T), 0.5 * np.eye(2), np.ones((2, 1)))
    np.testing.assert_allclose(sorted(law.gamma.tolist()), values.T[np.argsort(values[0])], rtol=1e-12)


def test_samples_and_their_weights():
    gamma, tau, pi = RNG.uniform(0.1, 1, (5, 2)), RNG.standard_normal((5, 2)), RNG.standard_normal((5, 1))
    shares = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
    law = ta.SpectralLaw.from_samples(gamma, tau, pi, shares)
    weighted = np.einsum("k,kl,kst->lst", law.weights, law.gamma, law.pi)[0, 0, 0]
    np.testing.assert_allclose(weighted, shares @ (gamma[:, 0] * pi[:, 0] ** 2))
    doubled = [np.repeat(a, 2, 0) for a in (gamma, tau, pi)]
    merged = ta.SpectralLaw.from_samples(*doubled, np.repeat(shares, 2) / 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), merged, law)
    assert ta.SpectralLaw.from_samples(gamma, tau, pi, dtype=jnp.float32).gamma.dtype == "float32"


def test_a_teacher_of_another_norm(on_matrices):
    original_gram = TEACHER.T @ TEACHER / D
    unchanged = on_matrices.with_teacher(jnp.asarray(original_gram))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), unchanged, on_matrices)
    # All that is linear in the teacher grows with it, and all that is quadratic grows twice as fast.
    before = eqx.tree_at(lambda s: s.pi_mean, on_matrices.law(), 0.1 * TEACHER, is_leaf=lambda a: a is None)
    after = before.with_teacher(4 * jnp.asarray(original_gram))
    for name in ("weights", "gamma", "tau", "pi", "cross", "pi_mean"):
        factor = {"pi": 4, "cross": 2, "pi_mean": 2}.get(name, 1)
        np.testing.assert_allclose(getattr(after, name), factor * getattr(before, name), rtol=1e-9, atol=1e-12)


def test_the_loss_weighs_tokens_by_their_trace(on_matrices):
    """The loss weights tokens by their trace; it sums over a law of many atoms once, not at every node."""
    model = eqx.tree_at(lambda m: m.mixing, on_matrices, jnp.array([[0.3, 0.7], [0.8, 0.2]]))
    rng = np.random.default_rng(1)
    Z, Y = (jnp.asarray(rng.standard_normal((2, 2, 7))) for _ in range(2))
    T = np.asarray(COVARIANCES.trace(axis1=1, axis2=2) / D)
    for n, loss in enumerate(loss_at_nodes(model, Z, Y)):
        error = model.student(Z[..., n]) - model.target(Y[..., n])
        np.testing.assert_allclose(loss, 0.5 * np.trace(error @ np.diag(T) @ error.T), rtol=1e-12)
    values, (Z, Y) = np.repeat(VALUES, 40, 1) * RNG.uniform(1, 2, (2, 40 * D)), (a[:, :1] for a in (Z, Y))
    law = ta.SpectralLaw.from_matrices(values, np.zeros((2, 40 * D)), np.ones((40 * D, 1)))
    standard, many = ta.DotProduct(), ta.DotProduct(spectrum=law)
    sizes = [str(jax.make_jaxpr(lambda m: loss_at_nodes(m, Z, Y))(m)).count("\n") for m in (standard, many)]
    assert many.law().weights.size == 40 * D and sizes[1] < 2 * sizes[0]
    slope = jax.grad(lambda m: jnp.sum(loss_at_nodes(m, Z, Y)))(many).spectrum.gamma
    parts = [(many.student(Z[..., n]) - many.target(Y[..., n])) ** 2 for n in range(7)]
    np.testing.assert_allclose(slope[3], 0.5 * sum(parts).sum(0) * many.law().weights[3], rtol=1e-10)


def test_data_have_the_matrices(on_matrices):
    for d in (D, 2 * D):
        data = ta.sample_data(on_matrices, d, 2.0, jax.random.key(0))
        np.testing.assert_allclose(data.rho, on_matrices.rho, rtol=1e-11)
        np.testing.assert_allclose(data.encodings @ data.encodings.T, ENCODINGS @ ENCODINGS.T, rtol=1e-10)
        np.testing.assert_allclose(data.encodings @ data.teacher * (D / d) ** 0.5, ENCODINGS @ TEACHER, rtol=1e-9)
        np.testing.assert_allclose(data.gamma[:, :: d // D], [VALUES[0], VALUES[1]], rtol=1e-11)
    for d in (D - 1, D + 5):
        with pytest.raises(ta.InputError, match=f"d must leave L .* or be that of the matrices .* got d={d}"):
            ta.sample_data(on_matrices, d, 2.0, jax.random.key(0))


def rotated(k):
    """Covariances, the last of which has other eigenvectors."""
    rotation = np.linalg.qr(np.random.default_rng(k).standard_normal((D, D)))[0]
    return np.stack([COVARIANCES[0], rotation @ COVARIANCES[1] @ rotation.T])


BAD = {
    "not commuting": ((rotated(1), ENCODINGS, TEACHER), "covariances must commute, with eigenvectors in common"),
    "asymmetric": ((COVARIANCES + np.eye(D, k=1), ENCODINGS, TEACHER), "covariances must be symmetric, got Sigma_"),
    "negative": ((COVARIANCES - 0.2 * np.eye(D), ENCODINGS, TEACHER), "covariances must be positive semidefinite, got"),
    "negative values": ((-VALUES, ENCODINGS, TEACHER), "covariances must be positive semidefinite, got"),
    "zero": ((0 * COVARIANCES, ENCODINGS, TEACHER), "covariances must be not zero"),
    "zero values": ((0 * VALUES, ENCODINGS, TEACHER), "covariances must be not zero"),
    "not square": ((COVARIANCES[:, :5], ENCODINGS, TEACHER), r"covariances must have shape \(L, d, d\), got"),
    "one matrix": ((COVARIANCES[0, 0], ENCODINGS, TEACHER), r"covariances must have shape \(L, d\), got"),
    "tokens": ((COVARIANCES, ENCODINGS[:1], TEACHER), r"encodings must have shape \(L, d\) with L = 2, d = 24"),
    "teacher": ((COVARIANCES, ENCODINGS, TEACHER[:5]), r"teacher must have shape \(d, t\) with d = 24, got shape"),
    "large encodings": ((COVARIANCES, D**0.5 * ENCODINGS, TEACHER), "encodings must be of norm of order one"),
    "NaN": ((COVARIANCES, ENCODINGS, np.nan * TEACHER), "teacher must be finite"),
    "text": ((COVARIANCES, "p", TEACHER), "encodings must be an array of real numbers, .* of type str"),
    "empty": ((COVARIANCES, ENCODINGS, TEACHER[:, :0]), r"teacher must not be empty, got shape \(24, 0\)"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("unchecked")
def test_bad_matrices(name):
    arguments, message = BAD[name]
    with pytest.raises(ta.InputError, match=message) as raised:
        ta.SpectralLaw.from_matrices(*arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("unchecked")
def test_bad_samples_and_laws(law):
    column, columns = np.ones((3, 1)), np.ones((3, 2))
    samples, shape = ta.SpectralLaw.from_samples, r"tau must have shape \(N, L\) with N = 3, L = 2"
    for arguments, message in (
        ((columns, columns, column, [0.5, 0.5, 0.5]), "weights must be shares >= 0"),
        ((columns, columns[:2], column), shape),
        ((-columns, columns, column), "gamma must be positive semidefinite"),
    ):
        with pytest.raises(ta.InputError, match=message):
            samples(*arguments)
    tokens = "spectrum must be of as many tokens as mixing, L = 3, got L = 2"
    for options, message in (
        ({"mixing": np.eye(3)}, tokens), ({"sigma": 0.4}, "sigma must be left out beside spectrum"),
        ({"teacher": [[1.0]]}, "teacher must be left out beside spectrum"),
        ({"encodings": columns}, "encodings must be left out beside spectrum"),
        ({"spectrum": 1.0}, "spectrum must be a SpectralLaw"),
    ):  # fmt: skip
        with pytest.raises(ta.InputError, match=message):
            ta.DotProduct(**{"spectrum": law} | options)


@pytest.mark.slow
def test_theory_on_matrices_agrees_with_training():
    d, rng = 300, np.random.default_rng(2)
    values = np.stack([0.4 * np.exp(-1.5 * np.arange(d) / d), rng.uniform(0.1, 0.4, d)])
    encodings = np.stack([np.ones(d), -np.ones(d)]) / d**0.5
    law = ta.SpectralLaw.from_matrices(values, encodings, rng.standard_normal((d, 1)))
    model = ta.DotProduct(spectrum=law)
    options = {"normalise": False, "slack": 0.0, "but": ("V", "m")}
    result = assert_agrees(model, d, 2.0, "semantic", ta.Lines(5).rule(model), **options)
    assert np.all(result.values("theory.m") > 0.005)  # the drawn teacher overlaps with the encodings


def test_a_law_with_another_teacher_is_that_of_its_matrices():
    """The columns of the teacher are mixed: second moments, those with the encodings, and means are of one teacher."""
    rng, d = np.random.default_rng(2), 40
    gamma, p, Q = rng.choice([0.5, 1.0], (2, d)), rng.standard_normal((2, d)) / d**0.5, rng.standard_normal((d, 2))
    law, gram = ta.SpectralLaw.from_matrices(gamma, p, Q), np.array([[1.0, 0.4], [0.4, 0.7]])
    roots = [np.linalg.cholesky(a) for a in (gram, Q.T @ Q / d)]
    mix = roots[0] @ np.linalg.inv(roots[1])
    means = {"tau_mean": jnp.zeros(law.cross.shape[:2]), "pi_mean": jnp.asarray(rng.standard_normal((len(law.pi), 2)))}
    mixed = dataclasses.replace(law, **means).with_teacher(jnp.asarray(gram))
    expected = ta.SpectralLaw.from_matrices(gamma, p, Q @ mix.T)
    for name in ("weights", "gamma", "tau", "pi", "cross"):
        np.testing.assert_allclose(getattr(mixed, name), getattr(expected, name), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mixed.pi_mean, means["pi_mean"] @ mix.T, rtol=1e-12)
    np.testing.assert_allclose(jnp.tensordot(mixed.weights, mixed.pi, 1), gram, rtol=1e-9)
