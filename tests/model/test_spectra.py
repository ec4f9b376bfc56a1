"""Spectral laws of matrices and of samples: what they keep, and the models and data made with them."""

import dataclasses
from functools import partial

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
def on_matrices():
    return ta.UntiedDotProduct(spectrum=ta.SpectralLaw.from_matrices(COVARIANCES, ENCODINGS, TEACHER))


def test_a_law_keeps_what_matrices_say(on_matrices):
    law = on_matrices.law()
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
    same = on_matrices.with_teacher(jnp.asarray(TEACHER.T @ TEACHER / D))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), same, on_matrices)
    ta.check(on_matrices, even=False)  # the teacher overlaps with the encodings by chance, by more than .2


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
    lists = ta.SpectralLaw(*(a.tolist() for a in jax.tree.leaves(model.law())))
    jax.tree.map(np.testing.assert_array_equal, lists, model.law())
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
    # Every sample twice, with half of its share, and one more with no share.
    more = [np.concatenate([a, a, 2 * a[:1]]) for a in (gamma, tau, pi)]
    same = ta.SpectralLaw.from_samples(*more, np.concatenate([shares / 2, shares / 2, [0.0]]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), same, law)
    assert ta.SpectralLaw.from_samples(gamma, tau, pi, dtype=jnp.float32).gamma.dtype == "float32"


def test_the_loss_weighs_tokens_by_their_trace(on_matrices):
    """The loss weights tokens by their trace; it sums over a law of many atoms once, not at every node."""
    model = eqx.tree_at(lambda m: m.mixing, on_matrices, jnp.array([[0.3, 0.7], [0.8, 0.2]]))
    rng, d = np.random.default_rng(1), 40 * D

    def squares(model, Z, Y):
        return jax.jit(jax.vmap(lambda z, y: (model.student(z) - model.target(y)) ** 2, -1))(Z, Y)

    Z, Y = rng.standard_normal((2, 2, 2, 7))
    losses = jax.jit(loss_at_nodes)(model, Z, Y)
    expected = 0.5 * np.einsum("nij,j->n", squares(model, Z, Y), COVARIANCES.trace(axis1=1, axis2=2) / D)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    Z, Y = Z[:, :1], Y[:, :1]
    values = np.repeat(VALUES, 40, 1) * rng.uniform(1, 2, (2, d))
    many = ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(values, np.zeros((2, d)), np.ones((d, 1))))
    sizes = [str(jax.make_jaxpr(loss_at_nodes)(m, Z, Y)).count("\n") for m in (ta.DotProduct(), many)]
    assert many.law().weights.size == d and sizes[1] < 2 * sizes[0]
    slope = jax.jit(jax.grad(lambda m: jnp.sum(loss_at_nodes(m, *map(jnp.asarray, (Z, Y))))))(many).spectrum.gamma
    np.testing.assert_allclose(np.asarray(slope)[3], 0.5 * np.sum(squares(many, Z, Y), (0, 1)) / d, rtol=1e-10)


def built(covariances=COVARIANCES, encodings=ENCODINGS, teacher=TEACHER, **options):
    return partial(ta.SpectralLaw.from_matrices, covariances, encodings, teacher, **options)


COLUMNS, LAW = np.ones((3, 2)), ta.DotProduct().law()
BAD = [
    (built(COVARIANCES[:, :5]), r"covariances must have shape \(L, d, d\), got"),
    (built(COVARIANCES[0, 0]), r"covariances must have shape \(L, d\), got"),
    (built(encodings=ENCODINGS[:1]), r"encodings must have shape \(L, d\) with L = 2, d = 24"),
    (built(encodings="p"), "encodings must be an array of real numbers, .* of type str"),
    (built(teacher=TEACHER[:5]), r"teacher must have shape \(d, t\) with d = 24, got shape"),
    (built(teacher=np.nan * TEACHER), "teacher must be finite"),
    (built(teacher=TEACHER[:, :0]), r"teacher must not be empty, got shape \(24, 0\)"),
    (built(dtype="half"), "dtype must be float32 or float64"),
    *((lambda d=d: ta.sample_data(ta.UntiedDotProduct(spectrum=built()()), d, 2.0, jax.random.key(0)),
       f"d must leave L .* or be that of the matrices .* got d={d}") for d in (D - 1, D + 5)),
    *((partial(ta.SpectralLaw.from_samples, *arguments), message) for arguments, message in (
        ((COLUMNS, COLUMNS[:2], COLUMNS[:, :1]), r"tau must have shape \(N, L\) with N = 3, L = 2"),
        ((-COLUMNS, COLUMNS, COLUMNS[:, :1]), "gamma must be positive semidefinite"),
    )),
    *((partial(ta.DotProduct, **{"spectrum": LAW} | options), message) for options, message in (
        ({"mixing": np.eye(3)}, "spectrum must be of as many tokens as mixing, L = 3, got L = 2"),
        ({"sigma": 0.4}, "sigma must be left out beside spectrum"),
        ({"teacher": [[1.0]]}, "teacher must be left out beside spectrum"),
        ({"encodings": [[1.0], [0.5]]}, "encodings must be left out beside spectrum"),
        ({"spectrum": 1.0}, "spectrum must be a SpectralLaw"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
@pytest.mark.usefixtures("unchecked")
def test_bad_laws(call, message):
    with pytest.raises(ta.InputError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.full
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
