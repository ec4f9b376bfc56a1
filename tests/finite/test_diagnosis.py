"""Sentences of other laws than the model's: each kind is told by the property that it lacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta

D, N = 300, 600


def made(kind, rng, dtype=float):
    """Sentences (n, L, d) of entries of variance 1/4, of one kind."""
    x = rng.standard_normal((N, 2, D))
    if kind == "signs":
        x = np.sign(x)
    elif kind == "Student":
        x = rng.standard_t(9, (N, 2, D)) * (7 / 9) ** 0.5
    elif kind == "norms":
        x *= np.exp(0.3 * rng.standard_normal((N, 2, 1)) - 0.09)
    elif kind == "words":
        x = rng.standard_normal((2 * D, D))[rng.integers(2 * D, size=(N, 2))]
    elif kind == "correlated":
        x[:, 1] = 0.3 * x[:, 0] + (1 - 0.09) ** 0.5 * x[:, 1]
    elif kind == "opposed":
        x[:, 1] = -0.1 * x[:, 0] + 0.99**0.5 * x[:, 1]
    elif kind == "sparse":
        x *= (rng.random(x.shape) < 0.05) / 0.05**0.5
    elif kind == "mean":
        x += 0.3
    elif kind == "spectrum":
        x *= np.where(np.arange(D) < D // 4, 2.5**0.5, 0.5**0.5)
    elif kind == "louder":
        x *= 1.2
    return jnp.asarray(0.5 * x, dtype)


# The properties that each kind of sentences is flagged for. Sparse entries also change the norms of tokens, and a mean
# changes their variance.
KINDS = {
    "Gaussian": (),
    "signs": (),
    "Student": (),
    "norms": ("norms",),
    "words": ("vocabulary",),
    "correlated": ("correlation",),
    "opposed": ("correlation",),
    "sparse": ("norms", "kurtosis"),
    "mean": ("variance", "mean"),
    "spectrum": ("dimension",),
    "louder": ("variance",),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_told(kind, model):
    x = made(kind, np.random.default_rng(3))
    result = ta.diagnose(model, ta.Data.from_sentences(x, x))  # only the inputs count
    expected = KINDS[kind]
    assert result.flagged == expected and result.ok == (not expected), str(result)
    assert str(result).count("differs: ") == len(expected)
    assert ("agree" in str(result).splitlines()[0]) == result.ok


@pytest.mark.parametrize("kind", [k for k, flags in KINDS.items() if "correlation" not in flags])
def test_the_worst_position_counts(kind, model):
    """A kind of sentences is told by one of the positions, the first or the second, from the same numbers."""
    x, rng = made(kind, np.random.default_rng(3)), np.random.default_rng(4)
    x = jnp.stack([x[:, 0], made("Gaussian", rng)[:, 1]], 1)
    first, second = (ta.diagnose(model, ta.Data.from_sentences(a, a)) for a in (x, x[:, ::-1]))
    assert first.flagged == second.flagged == KINDS[kind], str(first)
    for a, b in zip(vars(first).values(), vars(second).values(), strict=True):
        np.testing.assert_allclose(a[:2], b[:2], rtol=1e-9)


def test_values(model):
    """The numbers are those of the laws."""
    rng = np.random.default_rng(4)
    results = {kind: ta.diagnose(model, ta.Data.from_sentences(x := made(kind, rng), x)) for kind in KINDS}
    np.testing.assert_allclose(results["Gaussian"].norms.value, 2 / D, rtol=0.3)
    np.testing.assert_allclose(results["Gaussian"].kurtosis.value, 3 * D / (D + 2), rtol=0.02)
    np.testing.assert_allclose(results["norms"].norms.value, np.exp(0.36) - 1, rtol=0.3)
    np.testing.assert_allclose(results["words"].vocabulary.value, 2.0, rtol=0.1)
    np.testing.assert_allclose(results["correlated"].correlation.value, 0.3, atol=0.01)
    np.testing.assert_allclose(results["opposed"].correlation.value, -0.1, atol=0.01)
    np.testing.assert_allclose(results["louder"].variance.value, 1.44, rtol=0.02)
    np.testing.assert_allclose(results["spectrum"].dimension.value, 1 / (0.25 * 2.5**2 + 0.75 * 0.5**2), rtol=0.03)
    np.testing.assert_allclose(results["mean"].mean.value, 0.09 / 1.09, rtol=0.1)
    np.testing.assert_allclose(results["sparse"].kurtosis.value, 60, rtol=0.1)
    assert np.isinf(results["Gaussian"].vocabulary.value)


def test_words_in_single_precision():
    model = ta.DotProduct(dtype=jnp.float32)
    x = made("words", np.random.default_rng(5), jnp.float32)
    encodings = jnp.stack([jnp.ones(D), -jnp.ones(D)]).astype(jnp.float32) / D**0.5
    result = ta.diagnose(model, ta.Data.from_sentences(x, x, encodings=encodings))
    assert result.flagged == ("vocabulary",)
    np.testing.assert_allclose(result.vocabulary.value, 2.0, rtol=0.1)


def test_sampled_data_agree(model, two_atoms):
    """Data drawn from a model agree with it: also of several variances, and of correlated tokens with classes."""
    for law in (model, two_atoms):
        result = ta.diagnose(law, ta.sample_data(law, 400, 1.5, jax.random.key(2)))
        assert result.ok, str(result)
        for name in ("variance", "dimension", "norms", "kurtosis"):
            finding = getattr(result, name)
            np.testing.assert_allclose(finding.value, finding.expected, rtol=0.3)
    law = ta.SpectralLaw.of_classes(
        variances=[0.25, 0.36],
        sentences={(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.05, (1, 0): 0.05},
        encodings=[[1.0, 0.0], [-1.0, 0.0]],
        means=[[0.0, 1.0], [0.0, -1.0]],
        teacher_means=[0.3, -0.3],
    )
    classes = ta.DotProduct(spectrum=law)
    data = ta.sample_data(classes, 400, 2.0, jax.random.key(2))
    assert ta.diagnose(classes, data).ok
    with pytest.raises(ta.InputError, match="data must have the tokens and classes of the model"):
        ta.diagnose(model, data)


@pytest.mark.usefixtures("unchecked")
def test_arguments_in_another_order(model):
    x = made("Gaussian", np.random.default_rng(3))
    with pytest.raises(ta.InputError, match=r"model must be a tiedattn_jax\.Model"):
        ta.diagnose(ta.Data.from_sentences(x, x), model)


def test_few_sentences_differ_by_chance(model):
    """Norms of few sentences in few dimensions scatter; this is no property of their law."""
    findings = [
        ta.diagnose(model, ta.sample_data(model, 16, 2.0, key)).norms for key in jax.random.split(jax.random.key(5), 30)
    ]
    assert max(f.value - f.expected for f in findings) > 0.05 and not any(f.flagged for f in findings)
