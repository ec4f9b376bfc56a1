"""Bounds of what a law may be made of, its defaults, and the kinds of sentences."""

import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.law import atoms, positive

EYE = np.eye(3)
SAMPLES = np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 1))
of, samples, classes = ta.TokenClassMixture.of, ta.SpectralLaw.from_samples, ta.SpectralLaw.of_classes


def built(values, encodings=None, d=3):
    encodings = np.zeros((2, d)) if encodings is None else encodings
    return ta.SpectralLaw.from_matrices(values, encodings, np.ones((d, 1)))


def off(size):
    """A pair of commuting matrices, the second of which has one entry that is off by a size."""
    return np.stack([EYE, np.diag([1.0, 2.0, 3.0]) + size * np.eye(3, k=1)])


def turned(size):
    """A pair of symmetric matrices that commute up to a size."""
    return np.diag([1.0, 2.0, 3.0]) + np.stack([np.diag([2.0, 0.0, -2.0]), size * (np.eye(3, k=1) + np.eye(3, k=-1))])


# An argument just within a bound, one just beyond it, and the message.
BOUNDS = [
    (lambda: built(off(2e-8)), lambda: built(off(4e-8)), "covariances must be symmetric, got Sigma_1 off by"),
    (lambda: built(turned(1e-8)), lambda: built(turned(1e-5)), "covariances must commute, with eigenvectors"),
    (lambda: built(off(0.0)), lambda: built(off(0.0) * [[[1.0]], [[0.0]]]), "covariances must be not zero"),
    (lambda: positive(np.array([[1.0], [-0.9e-8]]), "x"), lambda: positive(np.array([[1.0], [-1.1e-8]]), "x"),
     "x must be positive semidefinite, got an eigenvalue of -1.1e-08"),
    (lambda: positive(np.eye(2), "x"), lambda: positive(np.array([[1.0, 0.0], [2.0, 0.0]]), "x"), "x must be not zero"),
    (lambda: built(np.ones((2, 3)), 9.9**0.5 * np.eye(2, 3)),
     lambda: built(np.ones((2, 3)), 3.2 * np.eye(2, 3)), "encodings must be of norm of order one"),
    (lambda: built(np.ones((2, 400)), 19.9**0.5 * np.eye(2, 400), 400),
     lambda: built(np.ones((2, 400)), 20.1**0.5 * np.eye(2, 400), 400), "encodings must be of norm of order one"),
    (lambda: samples(*SAMPLES, [0.5, 0.5 + 5e-7]), lambda: samples(*SAMPLES, [0.5, 0.5 + 2e-6]), "weights must be"),
    (lambda: of({(0, 0): 0.5, (1, 1): 0.5 + 5e-7}), lambda: of({(0, 0): 0.5, (1, 1): 0.5 + 2e-6}), "sum to one"),
    (lambda: of({(0, 0): 1.0}), lambda: of({(0, 0): 1.0, (1, 1): 0.0}), "sentences must be shares > 0"),
    (lambda: of({(0, 1): 1.0}), lambda: of({(0, 1.0): 1.0}), "sentences must be a dictionary of shares by the classes"),
    (lambda: classes([0.2], {(0, 0): 1.0}), lambda: classes([-0.2], {(0, 0): 1.0}), "variances must be positive semi"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("within", "beyond", "message"), BOUNDS, ids=[message for *_, message in BOUNDS])
def test_bounds_of_what_makes_a_law(within, beyond, message):
    within()
    with pytest.raises(ta.InputError, match=message):
        beyond()


def test_eigenvalues_equal_up_to_rounding_are_one_atom():
    """They differ by less than 1e-9 of the largest eigenvalue of their token; steps of that size add up to one atom."""
    gamma = np.array([[1.0, 5.0], [1.0 + 3e-9, 5.0], [1.0 + 1.9e-9, 5.0], [2.0, 5.0], [2.0, 4.0], [2.0, 5.0 + 4e-9]])
    labels = atoms(gamma)
    assert sorted(np.flatnonzero(labels == k).tolist() for k in range(labels.max() + 1)) == [[0, 1, 2], [3, 5], [4]]
    assert len(set(atoms(np.array([[1.0], [1.0 + 2.5e-9], [2.0]])).tolist())) == 3
    np.testing.assert_array_equal(positive(np.array([[1.0], [-0.5e-8]]), "x"), [[1.0], [0.0]])


def test_defaults_of_a_law_of_classes():
    law, tau = classes([0.2, 0.3], {(0, 1): 0.25, (1, 0): 0.75}), np.zeros((4, 4))
    tau[:2, :2] = [[1, -1], [-1, 1]]
    numbers = {"weights": [1.0], "gamma": [[0.2, 0.3]], "tau": [tau], "pi": [[[1.0]]], "cross": np.zeros((1, 4, 1))}
    for name, expected in numbers.items():
        np.testing.assert_allclose(getattr(law, name), expected, err_msg=name)
    np.testing.assert_allclose(law.sentences.weights, [0.25, 0.75])
    assert law.tau_mean is None and law.pi_mean is None and law.tokens == 2 and ta.DotProduct().law().tokens == 2
    assert repr(law).endswith("(0, 1)=0.25, (1, 0)=0.75)") and ta.TokenClassMixture.of(law.sentences) is law.sentences
    wide = classes([0.2, 0.3], {(0, 1): 1.0}, teacher=np.eye(2), teacher_means=[[0.1, 0.2], [0.3, 0.4]])
    np.testing.assert_allclose(wide.cross[0], [[0, 0], [0, 0], [0.1, 0.2], [0.3, 0.4]])
    single = classes([0.2, 0.3], {(0, 1): 1.0}, teacher=2.0, dtype="float32", means=[[0.5], [0.25]])
    assert single.gamma.dtype == single.sentences.weights.dtype == jnp.float32 and float(single.pi[0, 0, 0]) == 2.0
    np.testing.assert_allclose(single.tau[0, 2:], [[0.5, -0.5, 0.25, 0.125], [0.25, -0.25, 0.125, 0.0625]])


def test_what_a_layer_is_made_with():
    """Values that are the defaults are taken beside a spectrum; a layer has the dtype of an array `lam`."""
    law = classes([0.2, 0.3], {(0, 1): 1.0})
    for given in (ta.DotProduct(sigma=0.5, teacher=1.0, spectrum=law), ta.DotProduct(sigma=None, spectrum=law)):
        assert given.sigma is None and given.teacher is None
    assert ta.DotProduct(lam=jnp.float32(0.1)).omega.dtype == jnp.float32
    assert ta.DotProduct(lam=np.float32(0.1)).omega.dtype == jnp.float64
    means = ta.DotProduct(penalty=ta.L1(0.1), encodings=[[0.5, 0.1], [-0.3, 0.2]]).law()
    np.testing.assert_allclose(means.tau_mean, [[0.5, -0.3]])
    np.testing.assert_allclose(means.pi_mean, [[0.0]])
    with pytest.raises(ta.InputError, match="L >= 2"):
        ta.DotProduct(mixing=[[1.0]], encodings=[[1.0]])
