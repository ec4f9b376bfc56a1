"""Sentences of other laws than the model's are told by the property that they lack; numbers are those of numpy."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

import tiedattn_jax as ta
from tiedattn_jax.finite.diagnosis import check_fit

D, N = 300, 600


def made(kind, rng):
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
    return 0.5 * x


# The properties that each kind of sentences is flagged for, and a number of its law with the error of a sample. Sparse
# entries also change the norms of tokens, and a mean changes their variance.
KINDS = {
    "Gaussian": ((), "norms", 2 / D, 0.3),
    "signs": ((), "kurtosis", 1.0, 0.02),
    "Student": ((), "kurtosis", 3 * 7 / 5, 0.05),
    "norms": (("norms",), "norms", np.exp(0.36) - 1, 0.3),
    "words": (("vocabulary",), "vocabulary", 2.0, 0.1),
    "correlated": (("correlation",), "correlation", 0.3, 0.03),
    "opposed": (("correlation",), "correlation", -0.1, 0.1),
    "sparse": (("norms", "kurtosis"), "kurtosis", 60, 0.1),
    "mean": (("variance", "mean"), "mean", 0.09 / 1.09, 0.1),
    "spectrum": (("dimension",), "dimension", 1 / (0.25 * 2.5**2 + 0.75 * 0.5**2), 0.03),
    "louder": (("variance",), "variance", 1.44, 0.02),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_told(kind, model):
    """A kind is told by one of the positions, too, the first or the second, from the same numbers."""
    (flags, name, number, rtol), x = KINDS[kind], made(kind, np.random.default_rng(3))
    result = ta.finite.diagnose(model, ta.Data.from_sentences(x, x))  # only the inputs count
    assert result.flagged == flags and result.ok == (not flags), str(result)
    assert str(result).count("differs: ") == len(flags)
    assert ("agree" in str(result).splitlines()[0]) == result.ok
    np.testing.assert_allclose(getattr(result, name).value, number, rtol=rtol)
    assert np.isinf(result.vocabulary.value) == (kind != "words")
    if "correlation" not in flags:
        x = np.stack([x[:, 0], made("Gaussian", np.random.default_rng(4))[:, 1]], 1)
        first, second = (ta.finite.diagnose(model, ta.Data.from_sentences(a, a)) for a in (x, x[:, ::-1]))
        assert first.flagged == second.flagged == flags, str(first)
        for a, b in zip(vars(first).values(), vars(second).values(), strict=True):
            np.testing.assert_allclose(a[:2], b[:2], rtol=1e-9)


def test_words_in_single_precision():
    x = np.float32(made("words", np.random.default_rng(5)))
    encodings = np.full((2, D), D**-0.5, np.float32) * np.array([[1.0], [-1.0]], np.float32)
    result = ta.finite.diagnose(ta.DotProduct(dtype=jnp.float32), ta.Data.from_sentences(x, x, encodings=encodings))
    assert result.flagged == ("vocabulary",)
    np.testing.assert_allclose(result.vocabulary.value, 2.0, rtol=0.1)


def by_matrices(*spectra):
    """A model of given eigenvalues, with mean 1/4, of each token."""
    d = len(spectra[0])
    e, teacher = np.ones(d) / d**0.5, np.random.default_rng(0).standard_normal((d, 1))
    covariances = np.stack([0.25 * w / w.mean() for w in spectra])
    return ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(covariances, np.stack([e, -e]), teacher))


def by_classes(shares, variances, **means):
    return ta.DotProduct(spectrum=ta.SpectralLaw.of_classes(variances, shares, encodings=[[1, 0], [-1, 0]], **means))


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


@pytest.mark.parametrize(("name", "draws"), [
    *((name, 4) for name in ("classes", "few tokens, falling")),
    *(pytest.param(name, 200, marks=pytest.mark.full) for name in LAWS),
])  # fmt: skip
def test_samples_of_a_law_agree_with_it(name, draws):
    """At most 2 % of the draws are flagged, and none of the first four."""
    make, d, alpha = LAWS[name]
    model, keys = make(), jax.random.split(jax.random.key(7), draws)
    results = [ta.finite.diagnose(model, ta.sample_data(model, d, alpha, key)) for key in keys]
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
    flagged = ta.finite.diagnose(model, ta.Data.from_sentences(x, x)).flagged
    assert {"words": "vocabulary", "correlated": "correlation", "spectrum": "dimension"}.get(kind, kind) in flagged
    assert kind == "spectrum" or "dimension" not in flagged


def test_the_advice_on_directions_helps(model):
    """Data of another spectrum are flagged, and agree once the model has their law."""
    other = by_matrices(falling(200), falling(200))
    data = ta.sample_data(other, 200, 2.0, jax.random.key(2))
    assert ta.finite.diagnose(model, data).flagged == ("dimension",) and ta.finite.diagnose(other, data).ok
    assert "spectrum=SpectralLaw.from_matrices" in ta.finite.diagnose(model, data).dimension.text


def test_the_spectrum_of_few_sentences_is_too_wide():
    """Eigenvalues of their covariance scatter by chance; those that are pulled to their mean as advised agree."""
    x = np.random.default_rng(3).standard_normal((300, 2, 200)) * np.sqrt(falling(200) ** 0.5)
    values, vectors = np.linalg.eigh(np.einsum("nli,nlj->ij", x, x) / 600)
    data = ta.Data.from_sentences(x @ vectors, x @ vectors)
    wide = ta.finite.diagnose(by_matrices(values, values), data).dimension
    assert wide.flagged and "towards their mean" in wide.text
    pulled = values.mean() + ((1 / wide.value - 1) / (1 / wide.expected - 1)) ** 0.5 * (values - values.mean())
    result = ta.finite.diagnose(by_matrices(pulled, pulled), data)
    np.testing.assert_allclose(result.dimension.expected, wide.value, rtol=1e-6)
    assert "dimension" not in result.flagged


SMALL, FEW = 6, 40  # so few that chance exceeds every deviation that changes losses
SHARES = {(0, 0): 0.5, (0, 1): 0.3, (2, 2): 0.2}


def of_size(x, square):
    """Tokens of one position with a given mean square of their entries."""
    return x * (square / np.mean(x**2)) ** 0.5


def planted(name, n, spectrum, level):
    """Sentences of mean zero that have a property to some degree, which grows with the level."""
    rng = np.random.default_rng(0)
    x = spectrum**0.5 * rng.standard_normal((n, 2, len(spectrum)))
    x -= x.mean(0)
    first, second = of_size(x[:, 0], 1.0), of_size(x[:, 1], 1.0)
    if name == "variance":
        first *= (1 + level) ** 0.5
    elif name == "mean":
        first = (1 - level) ** 0.5 * first + level**0.5
    elif name == "correlation":
        second -= first * (np.sum(first * second, 1) / np.sum(first**2, 1))[:, None]
        second *= (np.sum(first**2, 1) / np.sum(second**2, 1))[:, None] ** 0.5
        second = level * first + (1 - level**2) ** 0.5 * second
    elif name == "dimension":
        second = first = first * np.where(np.arange(len(spectrum)) < 1 + len(spectrum) // 100, 1 + level, 1.0)
    elif name == "norms":
        second = first = first * np.exp(level * rng.standard_normal((n, 1)))
    return 0.5 * np.stack([first, second], 1)


def bound_of(name, n, g, expected):
    """The least deviation that changes losses, or the largest that counts as chance for eigenvalues g of mean one.

    A sum of squares exceeds the bounds of Laurent and Massart with probability exp(-8): for independent normals z and
    weights a, that of a z^2 exceeds its mean by ``2 sqrt(8) |a|_2 + 16 |a|_inf``. Others are four standard deviations.
    """
    square, fourth, size = np.mean(g**2), np.mean(g**4) / np.mean(g**2) ** 2 / len(g), len(g) * n
    scatter = np.sqrt(8 * fourth / n + 4 / n**2 + 8 * square / size)  # of the mean square of products of tokens
    bounds = {
        "variance": (0.05, 2 * np.sqrt(8 * square / size) + 16 * g.max() / size),
        "mean": (0.01, (1 + 2 * np.sqrt(8 * square / len(g)) + 16 * g.max() / len(g)) / n),
        "correlation": (0.02, 4 * np.sqrt(square / size)),
        "dimension": (0.1, 4 * scatter),
        "norms": (0.05, 4 * expected * np.sqrt((2 + 12 * fourth) / n + scatter**2)),
    }
    return max(bounds[name])


SAMPLES = {
    "few": (FEW, np.ones(SMALL)),
    "few, falling": (FEW, falling(SMALL) / falling(SMALL).mean()),
    "many": (400, np.ones(200)),
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("name", ["variance", "less variance", "mean", "correlation", "dimension", "norms"])
def test_what_is_more_than_chance_and_changes_losses(name, sample):
    """Two per cent more than the bound is flagged, two per cent less is not."""
    (n, spectrum), name, sign = SAMPLES[sample], name.split()[-1], -1 if name == "less variance" else 1
    model = by_matrices(spectrum, spectrum)

    def found(level):
        x = planted(name, n, spectrum, sign * level)
        return getattr(ta.finite.diagnose(model, ta.Data.from_sentences(x, x)), name)

    def excess(level, share):
        value, expected, *_ = found(level)
        deviation = expected / value - 1 if name == "dimension" else sign * (value - expected)
        return deviation / bound_of(name, n, spectrum, expected) - share

    for share in (0.98, 1.02):
        end = {"dimension": 20.0, "norms": 2.0}.get(name, 0.9)
        level = brentq(excess, 0.0, end, args=(share,), xtol=1e-4, rtol=1e-4)
        assert found(level).flagged == (share > 1)


@pytest.mark.parametrize(("level", "flagged"), [(12.5, False), (17.5, True)])
def test_how_sparse_entries_may_be(level, flagged):
    rng = np.random.default_rng(6)
    x = 0.5 * rng.standard_normal((600, 2, 300)) * (rng.random((600, 2, 300)) < 3 / level) * (level / 3) ** 0.5
    finding = ta.finite.diagnose(ta.DotProduct(), ta.Data.from_sentences(x, x)).kurtosis
    assert finding.flagged == flagged
    np.testing.assert_allclose(finding[:2], [level, 3.0], rtol=0.07)


def with_classes():
    """A model of three classes of tokens, one of which the sentences do not have, and its spectra (3, SMALL)."""
    rng = np.random.default_rng(1)
    spectra, means = rng.uniform(0.1, 0.5, (3, SMALL)), rng.standard_normal((3, SMALL)) / SMALL**0.5
    encodings, teacher = rng.standard_normal((2, SMALL)) / SMALL**0.5, np.arange(1.0, SMALL + 1)[:, None]
    law = ta.SpectralLaw.from_matrices(spectra, encodings, teacher, means=means, sentences=SHARES)
    classes = np.stack([np.zeros(FEW, int), np.arange(FEW) % 3 == 0], 1).astype(int)
    normals = np.random.default_rng(2).standard_normal((FEW, 2, SMALL))
    tokens = spectra[classes] ** 0.5 * normals + means[classes]
    return ta.DotProduct(spectrum=law), spectra, means, encodings, classes, tokens


def diagnosis_of(model, tokens, means, encodings, classes):
    known = {"fields": np.ones((FEW, 2, 1)), "encodings": encodings, "means": means, "classes": classes}
    # Gamma is by default that of the tokens, of which one class has none.
    return ta.finite.diagnose(model, ta.Data.from_sentences(tokens, **known, gamma=np.full((3, 1), 0.3)))


def test_the_numbers_of_tokens_with_classes():
    """Every number is that of the position, or pair or class, that differs most from the law."""
    model, spectra, means, encodings, classes, tokens = with_classes()
    result = diagnosis_of(model, tokens, means, encodings, classes)
    g = spectra / spectra.mean(1, keepdims=True)
    squares, shares = g @ g.T / SMALL, np.stack([np.mean(classes == s, 0) for s in range(3)], 1)
    centred = tokens - means[classes]
    variances = np.array([np.mean(centred[classes == s] ** 2) for s in (0, 1)])
    v = centred / np.append(variances, 1.0)[classes][..., None] ** 0.5
    means_of_positions = v.mean(0)
    v = v - means_of_positions
    lengths = np.sum(v**2, -1)
    unit = v / np.sqrt(lengths)[..., None]
    share = np.empty(2)
    for l in range(2):
        products = (v[:, l] @ v[:, l].T)[~np.eye(FEW, dtype=bool)]
        share[l] = np.mean(lengths[:, l]) ** 2 / np.var(products) / SMALL
    by_law = 1 / np.diag(shares @ squares @ shares.T)
    norms, gaussian = (
        np.var(lengths, 0) / np.mean(lengths, 0) ** 2,
        2 * shares @ np.diag(squares) / SMALL * by_law / share,
    )
    kurtosis = SMALL * np.mean(np.sum(unit**4, -1), 0)
    ratios = variances / spectra.mean(1)[:2]
    expected = {
        "variance": (ratios, np.ones(2), abs(np.log(ratios))),
        "mean": (np.sum(means_of_positions**2, 1) / SMALL, np.zeros(2), np.sum(means_of_positions**2, 1)),
        "dimension": (share, by_law, abs(np.log(share / by_law))),
        "correlation": ([np.mean(np.sum(unit[:, 0] * unit[:, 1], 1))], [0.0], [1.0]),
        "norms": (norms, gaussian, norms - gaussian),
        "kurtosis": (kurtosis, 3 / share, kurtosis * share),
        "vocabulary": ([np.inf], [np.inf], [0.0]),
    }
    for name, (values, by_model, worst) in expected.items():
        k = np.argmax(worst)
        np.testing.assert_allclose(getattr(result, name)[:2], [values[k], by_model[k]], rtol=1e-9, err_msg=name)


def test_chance_of_the_variance_of_a_class():
    """The fewer tokens a class has, the more its variance may differ by chance."""
    model, spectra, means, encodings, classes, tokens = with_classes()
    g = spectra / spectra.mean(1, keepdims=True)
    for s in (0, 1):
        count = np.sum(classes == s)
        bound = 2 * np.sqrt(8 * np.mean(g[s] ** 2) / (SMALL * count)) + 16 * g.max() / (SMALL * count)
        for share in (0.98, 1.02):
            moved = tokens.copy()
            for r in (0, 1):
                size = spectra[r].mean() * (1 + share * bound if r == s else 1.0)
                moved[classes == r] = of_size((tokens - means[classes])[classes == r], size) + means[r]
            finding = diagnosis_of(model, moved, means, encodings, classes).variance
            assert finding.value == pytest.approx(1 + share * bound) and finding.flagged == (share > 1)


def test_a_thousand_sentences_are_compared_with_one_another():
    """If there are more than a thousand sentences, every second one is taken."""
    x = np.repeat(np.random.default_rng(3).standard_normal((1001, 1, SMALL)) * 0.5, 2, 1)
    result = ta.finite.diagnose(ta.DotProduct(), ta.Data.from_sentences(x, x))
    v = x[:, 0] - x[:, 0].mean(0)
    products = (v[::2] @ v[::2].T)[~np.eye(501, dtype=bool)]
    np.testing.assert_allclose(
        result.dimension.value, np.mean(np.sum(v**2, 1)) ** 2 / np.var(products) / SMALL, rtol=1e-9
    )


@pytest.mark.parametrize(("words", "times", "flagged"), [(1, 8, True), (4, 3, False), (5, 3, False), (6, 3, True)])
def test_words_count_where_they_are_few_and_repeated(words, times, flagged):
    """Fewer than 50 d effective words are flagged if more than one token in a hundred has occurred before."""
    n, d = 300, 200
    x = np.random.default_rng(4).standard_normal((2 * n, d))
    for k in range(words):
        x[k * times : (k + 1) * times] = x[k * times]
    x = 0.5 * x[np.random.default_rng(5).permutation(2 * n)].reshape(n, 2, d)
    finding = ta.finite.diagnose(ta.DotProduct(), ta.Data.from_sentences(x, x)).vocabulary
    assert finding.flagged == flagged
    np.testing.assert_allclose(finding.value, 2 * n * (2 * n - 1) / (words * times * (times - 1)) / d, rtol=1e-9)


def test_a_diagnosis_as_text():
    """A line for every property: its value, that of the law, what follows, and whether it differs."""
    x = planted("variance", FEW, np.ones(SMALL), 0.9)
    result = ta.finite.diagnose(by_matrices(*np.ones((2, SMALL))), ta.Data.from_sentences(x, x))
    head, titles, *rows = str(result).splitlines()
    assert head == "sentences and the law of the model: differ in variance" and result.flagged == ("variance",)
    assert titles.split() == ["data", "model"] and len(rows) == 7
    for row, (name, finding) in zip(rows, vars(result).items(), strict=True):
        mark = "differs: " if name == "variance" else ""
        words = [name, f"{finding.value:.3g}", f"{finding.expected:.3g}", *(mark + finding.text).split()]
        assert row.split() == words


def sentences(n, d, inputs=1.0, fields=1.0, norm=0.0, teacher=True):
    """Sentences of the standard model whose mean squares differ by exact factors."""
    rng = np.random.default_rng(6)
    x, q = rng.standard_normal((n, 2, d)), rng.standard_normal((d, 1))
    x, q = of_size(x, 0.25 * inputs), of_size(q, 1.0)
    y = x @ q / d**0.5
    y = of_size(y, fields * (np.mean(y**2) if teacher else 0.25))
    encodings = np.zeros((2, d))
    encodings[1, 0] = norm**0.5
    arrays = {"encodings": encodings, "gamma": np.full((2, 1), 0.25), "teacher": q if teacher else None}
    return ta.Data.from_sentences(x, fields=y, **arrays)


@pytest.mark.filterwarnings("ignore:data have")
@pytest.mark.parametrize("teacher", [True, False], ids=["teacher", "no teacher"])
@pytest.mark.parametrize(("n", "d"), [(5, 4), (3, 400)])
def test_how_much_the_scale_may_differ(model, n, d, teacher):
    """A variance may differ by a factor of max(10, sqrt(d)), and more if it is of few numbers."""
    factor = max(10.0, d**0.5)
    of_inputs, of_fields = factor ** (1 + 20 / (2 * n * d)), factor ** (1 + 20 / min(2 * n, d))
    for name, bound in (("inputs", of_inputs), ("fields", of_fields)):
        for ratio in (bound, 1 / bound):
            check_fit(model, sentences(n, d, **{name: ratio**0.97}, teacher=teacher))
            got = re.escape(f"got {ratio**1.03:.3g} times")
            with pytest.raises(ta.InputError, match=f"must have {name} .*{got}"):
                check_fit(model, sentences(n, d, **{name: ratio**1.03}, teacher=teacher))
    # |p|^2 of the law is one, as is four times the variance of the tokens.
    check_fit(model, sentences(n, d, norm=0.97 * factor, teacher=teacher))
    with pytest.raises(ta.InputError, match=r"must have encodings with .* as the model's law has them"):
        check_fit(model, sentences(n, d, norm=1.03 * factor, teacher=teacher))


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
def test_a_teacher_of_another_scale_is_refused(model, factor):
    data = ta.sample_data(model, 400, 0.05, jax.random.key(0))
    with pytest.raises(ta.InputError, match="must have a teacher with entries of order one"):
        check_fit(model, eqx.tree_at(lambda data: data.teacher, data, factor * data.teacher))


@pytest.mark.parametrize(
    ("ratio", "n", "warns"), [(1.45, 26, 0), (1.55, 26, 1), (1 / 1.55, 26, 1), (1 / 1.45, 26, 0), (2.0, 25, 0)]
)
def test_another_variance_of_many_numbers_is_told(model, recwarn, ratio, n, warns):
    """It is told from a factor of 1.5 on, of more than a thousand numbers a token."""
    check_fit(model, sentences(n, 40, inputs=ratio))
    assert [str(w.message)[:9] for w in recwarn] == ["data have"] * warns
