"""Bounds of what a law may be made of, its defaults, and the kinds of sentences."""

import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.law import atoms, eigenbasis, positive
from tiedattn_jax.model.parameters import Parameter, arrays_of, scalar_parameters

EYE = np.eye(3)
SAMPLES = np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 1))
of, samples, classes = ta.TokenClassMixture.of, ta.SpectralLaw.from_samples, ta.SpectralLaw.of_classes


def from_values(values, encodings=None, d=3):
    encodings = np.zeros((2, d)) if encodings is None else encodings
    return ta.SpectralLaw.from_matrices(values, encodings, np.ones((d, 1)))


def off(size):
    """A pair of commuting matrices, the second of which has one entry that is off by a size."""
    return np.stack([EYE, np.diag([1.0, 2.0, 3.0]) + size * np.eye(3, k=1)])


def turned(size):
    """A pair of symmetric matrices that commute up to a size."""
    mixed = np.zeros((3, 3))
    mixed[0, 1] = mixed[1, 0] = size
    return np.stack([np.diag([3.0, 2.0, 1.0]), np.diag([1.0, 2.0, 3.0]) + mixed])


# An argument just within a bound, one just beyond it, and the message.
BOUNDS = [
    (lambda: eigenbasis(off(2e-8)), lambda: eigenbasis(off(4e-8)), "covariances must be symmetric, got Sigma_1 off by"),
    (lambda: eigenbasis(turned(1e-8)), lambda: eigenbasis(turned(1e-5)), "covariances must commute, with eigenvectors"),
    (lambda: eigenbasis(off(0.0)), lambda: eigenbasis(off(0.0) * [[[1.0]], [[0.0]]]), "covariances must be not zero"),
    (lambda: positive(np.array([[1.0], [-0.9e-8]]), "x"), lambda: positive(np.array([[1.0], [-1.1e-8]]), "x"),
     "x must be positive semidefinite, got an eigenvalue of -1.1e-08"),
    (lambda: positive(np.array([[1.0, 0.0], [0.0, 1.0]]), "x"),
     lambda: positive(np.array([[1.0, 0.0], [2.0, 0.0]]), "x"),
     "x must be not zero"),
    (lambda: from_values(np.ones((2, 3)), 9.9**0.5 * np.eye(2, 3)),
     lambda: from_values(np.ones((2, 3)), 3.2 * np.eye(2, 3)),
     "encodings must be of norm of order one"),
    (lambda: from_values(np.ones((2, 400)), 19.9**0.5 * np.eye(2, 400), 400),
     lambda: from_values(np.ones((2, 400)), 20.1**0.5 * np.eye(2, 400), 400), "encodings must be of norm of order one"),
    (lambda: samples(*SAMPLES, [0.5, 0.5 + 5e-7]), lambda: samples(*SAMPLES, [0.5, 0.5 + 2e-6]), "weights must be"),
    (lambda: samples(*SAMPLES, [1.0 - 1e-9, 1e-9]), lambda: samples(*SAMPLES, [1.1, -0.1]), "weights must be shares"),
    (lambda: of({(0, 0): 0.5, (1, 1): 0.5 + 5e-7}), lambda: of({(0, 0): 0.5, (1, 1): 0.5 + 2e-6}), "sum to one"),
    (lambda: of({(0, 0): 1.0}), lambda: of({(0, 0): 1.0, (1, 1): 0.0}), "sentences must be shares > 0"),
    (lambda: of({0: 0.5, 1: 0.5}), lambda: of({0: 0.5, -1: 0.5}), "sentences must be a dictionary"),
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
    groups = [set(np.flatnonzero(labels == k).tolist()) for k in range(labels.max() + 1)]
    assert sorted(map(sorted, groups)) == [[0, 1, 2], [3, 5], [4]]
    assert len(set(atoms(np.array([[1.0], [1.0 + 2.5e-9], [2.0]])).tolist())) == 3
    np.testing.assert_array_equal(positive(np.array([[1.0], [-0.5e-8]]), "x"), [[1.0], [0.0]])


def test_defaults_of_a_law_of_classes():
    law, shares = classes([0.2, 0.3], {(0, 1): 0.25, (1, 0): 0.75}), [0.25, 0.75]
    np.testing.assert_allclose(law.weights, [1.0])
    np.testing.assert_allclose(law.gamma, [[0.2, 0.3]])
    expected = np.zeros((4, 4))
    expected[:2, :2] = [[1, -1], [-1, 1]]
    np.testing.assert_array_equal(law.tau[0], expected)
    np.testing.assert_array_equal(law.pi, [[[1.0]]])
    np.testing.assert_array_equal(law.cross, np.zeros((1, 4, 1)))
    np.testing.assert_allclose(law.sentences.weights, shares)
    assert law.tau_mean is None and law.pi_mean is None and law.tokens == 2 and ta.DotProduct().law().tokens == 2
    assert repr(law).endswith("(0, 1)=0.25, (1, 0)=0.75)") and ta.TokenClassMixture.of(law.sentences) is law.sentences
    assert repr(law.sentences) == "TokenClassMixture((0, 1)=0.25, (1, 0)=0.75)"
    wide = classes([0.2, 0.3], {(0, 1): 1.0}, teacher=np.eye(2), teacher_means=[[0.1, 0.2], [0.3, 0.4]])
    np.testing.assert_allclose(wide.cross[0], [[0, 0], [0, 0], [0.1, 0.2], [0.3, 0.4]])
    single = classes([0.2, 0.3], {(0, 1): 1.0}, teacher=2.0, dtype="float32", means=[[0.5], [0.25]])
    assert single.gamma.dtype == single.sentences.weights.dtype == jnp.float32 and float(single.pi[0, 0, 0]) == 2.0
    np.testing.assert_allclose(single.tau[0, 2:], [[0.5, -0.5, 0.25, 0.125], [0.25, -0.25, 0.125, 0.0625]])


def test_maps_between_classes_and_tokens():
    kind = of({(2, 0): 0.4, (1, 1): 0.6}).given(jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(kind.to_tokens(jnp.array([1.0, 2.0, 3.0])), [3, 1])
    np.testing.assert_allclose(kind.to_classes(jnp.array([[1.0, 2.0]]), 1), [[2, 0, 1]])
    np.testing.assert_allclose(kind.share, 0.4)
    plain = ta.DotProduct().sentence
    values = jnp.arange(2.0)
    assert plain.to_tokens(values) is values and plain.to_classes(values) is values


def test_fields_and_slopes_of_a_model(model):
    """The slope in an entry of mixing contains that of the rest of its row."""
    assert scalar_parameters(model) == pytest.approx({"lam": 0.01, "omega": 0.3, "sigma": 0.5})
    assert {name: a.shape for name, a in arrays_of(model).items()} == {
        "mixing": (2, 2), "encodings": (2, 1), "teacher": (1, 1)
    }  # fmt: skip
    slopes = ta.DotProduct(omega=0.5, mixing=[[0.7, 0.3], [0.1, 0.9]])  # derivatives in all numbers, as a model
    assert Parameter("omega").slope(slopes, model, 0.3) == pytest.approx(0.5)
    assert Parameter("mixing[0,1]").slope(slopes, model, 0.4) == pytest.approx(0.3 - 0.7)
    assert Parameter("alpha").read(model, 2.5, "x") == 2.5 and Parameter("own", None, 7.0).read(model, None, "x") == 7.0
    number = Parameter("omega")
    number.check(model, np.array([0.0, 1.0]), "omega")
    Parameter("alpha").check(model, np.array([1e-9]), "alpha")
    for name, values in (("omega", [0.5, 1.01]), ("omega", [-0.01, 0.5]), ("alpha", [0.0, 1.0])):
        with pytest.raises(ta.InputError, match=f"{name} must be"):
            Parameter(name).check(model, np.array(values), name)


def test_what_a_layer_is_made_with():
    """Values that are the defaults are taken beside a spectrum; a layer has the dtype of an array `lam`."""
    law = classes([0.2, 0.3], {(0, 1): 1.0})
    assert ta.DotProduct(sigma=0.5, teacher=1.0, spectrum=law).sigma is None
    assert ta.DotProduct(sigma=None, teacher=None, spectrum=law).teacher is None
    assert ta.DotProduct(lam=jnp.float32(0.1)).omega.dtype == jnp.float32
    assert ta.DotProduct(lam=np.float32(0.1)).omega.dtype == jnp.float64
    for name, value in {"omega": 0.3, "sigma": 0.5, "lam": 0.01, "rank": 1}.items():
        assert getattr(ta.DotProduct(), name) == value
    np.testing.assert_array_equal(ta.DotProduct().encodings, [[1], [-1]])
    np.testing.assert_array_equal(ta.DotProduct().teacher, [[1]])
    means = ta.DotProduct(penalty=ta.L1(0.1), encodings=[[0.5, 0.1], [-0.3, 0.2]]).law()
    np.testing.assert_allclose(means.tau_mean, [[0.5, -0.3]])
    np.testing.assert_allclose(means.pi_mean, [[0.0]])
    assert ta.UntiedDotProduct(tied_teacher=True).shape == (2, 2, 1) and ta.UntiedDotProduct().shape == (2, 2, 2)
    with pytest.raises(ta.InputError, match="L >= 2"):
        ta.DotProduct(mixing=[[1.0]], encodings=[[1.0]])
