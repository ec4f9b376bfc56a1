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


def planted(name, level):
    """Sentences that differ in one property by a given level; chance is smaller than all of these."""
    x = np.random.default_rng(6).standard_normal((N, 2, D))
    if name == "variance":
        x *= (level * D * N / np.sum(x**2, (0, 2), keepdims=True)) ** 0.5
    elif name == "mean":
        x += (level / (1 - level)) ** 0.5 - x.mean(0)
    elif name == "correlation":
        x[:, 1] = level * x[:, 0] + (1 - level**2) ** 0.5 * x[:, 1]
    elif name == "norms":
        x *= np.exp(0.5 * np.log(1 + level) ** 0.5 * np.random.default_rng(7).standard_normal((N, 2, 1)))
        x /= np.mean(x**2) ** 0.5
    elif name == "dimension":
        x *= (1 + level**0.5 * np.where(np.arange(D) % 2, 1, -1)) ** 0.5
    elif name == "kurtosis":
        x *= (np.random.default_rng(7).random(x.shape) < 3 / level) * (level / 3) ** 0.5
    return jnp.asarray(0.5 * x)


@pytest.mark.parametrize(
    ("name", "none", "some"),
    [
        ("variance", 1.04, 1.06), ("variance", 0.96, 0.94), ("mean", 0.008, 0.012), ("correlation", 0.015, 0.025),
        ("correlation", -0.015, -0.025), ("norms", 0.04, 0.06), ("dimension", 0.08, 0.12), ("kurtosis", 12.5, 17.5),
    ],
)  # fmt: skip
def test_what_differs_by_enough_to_change_losses(model, name, none, some):
    """The level from which on a property is flagged, and the value and the expectation that are shown."""
    results = [ta.diagnose(model, ta.Data.from_sentences(x := planted(name, level), x)) for level in (none, some)]
    assert [getattr(result, name).flagged for result in results] == [False, True]
    expected = {"variance": 1.0, "dimension": 1.0, "norms": 2 / D, "kurtosis": 3.0}.get(name, 0.0)
    for result, level in zip(results, (none, some), strict=True):
        value, shown = getattr(result, name)[:2]
        np.testing.assert_allclose(shown, expected, rtol=0.07)
        measured = {"norms": value - shown, "dimension": 1 / value - 1}.get(name, value)
        np.testing.assert_allclose(
            measured, level, rtol=0.25 if name in ("norms", "dimension", "correlation") else 0.05
        )


def test_words_in_single_precision():
    model = ta.DotProduct(dtype=jnp.float32)
    x = made("words", np.random.default_rng(5), jnp.float32)
    encodings = jnp.stack([jnp.ones(D), -jnp.ones(D)]).astype(jnp.float32) / D**0.5
    result = ta.diagnose(model, ta.Data.from_sentences(x, x, encodings=encodings))
    assert result.flagged == ("vocabulary",)
    np.testing.assert_allclose(result.vocabulary.value, 2.0, rtol=0.1)


def by_matrices(*spectra):
    """A model of given eigenvalues, with mean 1/4, of each token."""
    d = len(spectra[0])
    e, teacher = np.ones(d) / d**0.5, np.random.default_rng(0).standard_normal((d, 1))
    covariances = np.stack([0.25 * w / w.mean() for w in spectra])
    return ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(covariances, np.stack([e, -e]), teacher))


def by_classes(shares, variances, **means):
    law = ta.SpectralLaw.of_classes(variances, shares, encodings=[[1.0, 0.0], [-1.0, 0.0]], **means)
    return ta.DotProduct(spectrum=law)


def falling(d):
    return 1 / np.arange(1.0, d + 1)


MEANS = {"means": [[0.0, 1.0], [0.0, -1.0]], "teacher_means": [0.3, -0.3]}
# Models, with dimension and alpha of their samples.
LAWS = {
    "standard": (ta.DotProduct, 120, 3.0),
    "falling spectrum": (lambda: by_matrices(falling(120), falling(120)), 120, 3.0),
    "falling spectrum, large": (lambda: by_matrices(falling(400), falling(400)), 400, 1.5),
    "two spectra": (lambda: by_matrices(falling(200) ** 2, np.ones(200)), 200, 2.0),
    "classes": (lambda: by_classes({(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.1}, [0.25, 0.36], **MEANS), 200, 2.0),
    "rare class": (lambda: by_classes({(0, 0): 0.98, (0, 1): 0.01, (1, 0): 0.01}, [0.25, 4.0]), 200, 2.0),
    "strong encodings": (
        lambda: ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=[[5.0], [0.0], [-5.0]]), 150, 2.0
    ),
    "small rho": (lambda: ta.DotProduct(teacher=1e-4, sigma=0.01), 150, 2.0),
    "few tokens": (ta.DotProduct, 60, 0.1),
    "few tokens, falling": (lambda: by_matrices(falling(60), falling(60) ** 1.5), 60, 0.15),
    "few dimensions": (ta.DotProduct, 12, 40.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "draws"),
    [*((name, 4) for name in LAWS), *(pytest.param(name, 200, marks=pytest.mark.slow) for name in LAWS)],
)
def test_samples_of_a_law_agree_with_it(name, draws):
    """At most 2 % of the draws are flagged, and none of the first four."""
    make, d, alpha = LAWS[name]
    model, keys = make(), jax.random.split(jax.random.key(7), draws)
    results = [ta.diagnose(model, ta.sample_data(model, d, alpha, key)) for key in keys]
    flagged = [result.flagged for result in results if not result.ok]
    assert len(flagged) <= 0.02 * draws, flagged
    for number in ("variance", "dimension", "norms"):  # without bias
        values, expected = np.array([getattr(result, number)[:2] for result in results]).T
        np.testing.assert_allclose(np.median(values), np.median(expected), rtol=0.25 if d * alpha > 100 else 1.0)


@pytest.mark.parametrize("kind", ["words", "norms", "correlated", "spectrum"])
def test_other_laws_are_told_from_a_falling_spectrum(kind):
    """Chance allows more where few directions carry the variance, and other laws are flagged nevertheless."""
    model, rng = by_matrices(falling(D), falling(D)), np.random.default_rng(3)
    root = np.sqrt(falling(D) / falling(D).mean())
    x = made(kind, rng) * (1 if kind == "spectrum" else root)
    flagged = ta.diagnose(model, ta.Data.from_sentences(x, x)).flagged
    assert {"words": "vocabulary", "correlated": "correlation", "spectrum": "dimension"}.get(kind, kind) in flagged
    assert kind == "spectrum" or "dimension" not in flagged


def test_the_advice_on_directions_helps(model):
    """Data of another spectrum are flagged, and agree once the model has their law."""
    other = by_matrices(falling(200), falling(200))
    data = ta.sample_data(other, 200, 2.0, jax.random.key(2))
    assert ta.diagnose(model, data).flagged == ("dimension",) and ta.diagnose(other, data).ok
    assert "spectrum=SpectralLaw.from_matrices" in ta.diagnose(model, data).dimension.text


def test_data_that_say_nothing_of_a_law_are_refused(model, two_atoms):
    classes = LAWS["classes"][0]()
    data = ta.sample_data(classes, 60, 2.0, jax.random.key(2))
    with pytest.raises(ta.InputError, match="data must have the tokens and classes of the model"):
        ta.diagnose(model, data)
    with pytest.raises(ta.InputError, match="data must have two sentences or more"):
        ta.diagnose(two_atoms, ta.sample_data(two_atoms, 40, 1 / 40, jax.random.key(2)))


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
