"""The numbers of a diagnosis against numpy, and what counts as chance where there are few numbers."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

import tiedattn_jax as ta
from tiedattn_jax.finite.diagnosis import check_fit

D, N = 6, 40  # so few that chance exceeds every deviation that changes losses
FLAT, FALLING = np.ones(D), D / np.arange(1, D + 1) / np.sum(1 / np.arange(1, D + 1))
SHARES = {(0, 0): 0.5, (0, 1): 0.3, (2, 2): 0.2}


def model_of(spectrum):
    """A model of tokens with given eigenvalues, in units of their mean 1/4."""
    e, teacher = np.ones(D) / D**0.5, np.arange(1.0, D + 1)[:, None]
    law = ta.SpectralLaw.from_matrices(0.25 * np.stack([spectrum] * 2), np.stack([e, -e]), teacher)
    return ta.DotProduct(spectrum=law)


def in_pairs(spectrum, rng):
    """Sentences in units of the model, each with its negative, so that their mean is exactly zero."""
    x = spectrum**0.5 * rng.standard_normal((N // 2, 2, D))
    return np.concatenate([x, -x])


def of_size(x, square):
    """Tokens of one position with a given mean square of their entries."""
    return x * (square / np.mean(x**2)) ** 0.5


def planted(name, spectrum, level):
    """Sentences that have a property to some degree, which grows with the level."""
    rng = np.random.default_rng(0)
    x = in_pairs(spectrum, rng)
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
        second = first = first * np.append(1 + level, np.ones(D - 1))
    elif name == "norms":
        factors = np.tile(np.exp(level * rng.standard_normal(N // 2)), 2)
        second = first = first * factors[:, None]
    return jnp.asarray(0.5 * np.stack([first, second], 1))


def deviation(name, finding):
    """Return by how much a property differs from the law."""
    value, expected = finding[:2]
    if name == "dimension":
        return expected / value - 1
    return value - expected


def largest_by_chance(name, g, expected):
    """The largest deviation that counts as chance, for eigenvalues g of mean one.

    A sum of squares exceeds the bounds of Laurent and Massart with probability exp(-8): for independent normals z and
    weights a, that of a z^2 exceeds its mean by ``2 sqrt(8) |a|_2 + 16 |a|_inf``. Others are four standard deviations.
    """
    square, fourth = np.mean(g**2), np.mean(g**4) / np.mean(g**2) ** 2 / D
    scatter = np.sqrt(8 * fourth / N + 4 / N**2 + 8 * square / (D * N))  # of the mean square of products of tokens
    return {
        "variance": 2 * np.sqrt(8 * square / (D * N)) + 16 * g.max() / (D * N),
        "mean": (1 + 2 * np.sqrt(8 * square / D) + 16 * g.max() / D) / N,
        "correlation": 4 * np.sqrt(square / (D * N)),
        "dimension": 4 * scatter,
        "norms": 4 * expected * np.sqrt((2 + 12 * fourth) / N + scatter**2),
    }[name]


@pytest.mark.parametrize("spectrum", [FLAT, FALLING], ids=["flat", "falling"])
@pytest.mark.parametrize("name", ["variance", "mean", "correlation", "dimension", "norms"])
def test_what_is_chance_in_few_numbers(name, spectrum):
    """Two per cent more than chance is flagged, two per cent less is not."""
    model = model_of(spectrum)

    def found(level):
        x = planted(name, spectrum, level)
        return getattr(ta.diagnose(model, ta.Data.from_sentences(x, x)), name)

    def excess(level, share):
        finding = found(level)
        return deviation(name, finding) / largest_by_chance(name, spectrum, finding.expected) - share

    for share in (0.98, 1.02):
        end = {"dimension": 20.0, "norms": 2.0}.get(name, 0.9)
        level = brentq(excess, 0.0, end, args=(share,), xtol=1e-4, rtol=1e-4)
        assert found(level).flagged == (share > 1)


def with_classes():
    """A model of three classes of tokens, one of which the sentences do not have, and its spectra (3, D)."""
    rng = np.random.default_rng(1)
    spectra, means = rng.uniform(0.1, 0.5, (3, D)), rng.standard_normal((3, D)) / D**0.5
    encodings, teacher = rng.standard_normal((2, D)) / D**0.5, np.arange(1.0, D + 1)[:, None]
    law = ta.SpectralLaw.from_matrices(spectra, encodings, teacher, means=means, sentences=SHARES)
    classes = np.stack([np.zeros(N, int), np.arange(N) % 3 == 0], 1).astype(int)
    normals = np.random.default_rng(2).standard_normal((N, 2, D))
    tokens = spectra[classes] ** 0.5 * normals + means[classes]
    return ta.DotProduct(spectrum=law), spectra, means, encodings, classes, tokens


def diagnosis_of(model, tokens, means, encodings, classes):
    x, fields = jnp.asarray(tokens), jnp.ones((N, 2, 1))
    known = {"encodings": jnp.asarray(encodings), "means": jnp.asarray(means), "classes": jnp.asarray(classes)}
    known["gamma"] = jnp.full((3, 1), 0.3)  # by default that of the tokens, of which one class has none
    return ta.diagnose(model, ta.Data.from_sentences(x, fields=fields, **known))


def test_the_numbers_of_tokens_with_classes():
    """Every number is that of the position, or pair or class, that differs most from the law."""
    model, spectra, means, encodings, classes, tokens = with_classes()
    result = diagnosis_of(model, tokens, means, encodings, classes)
    g = spectra / spectra.mean(1, keepdims=True)
    squares, shares = g @ g.T / D, np.stack([np.mean(classes == s, 0) for s in range(3)], 1)
    centred = tokens - means[classes]
    variances = np.array([np.mean(centred[classes == s] ** 2) for s in (0, 1)])
    v = centred / np.append(variances, 1.0)[classes][..., None] ** 0.5
    means_of_positions = v.mean(0)
    v = v - means_of_positions
    lengths = np.sum(v**2, -1)
    unit = v / np.sqrt(lengths)[..., None]
    share = np.empty(2)
    for l in range(2):
        products = (v[:, l] @ v[:, l].T)[~np.eye(N, dtype=bool)]
        share[l] = np.mean(lengths[:, l]) ** 2 / np.var(products) / D
    by_law = 1 / np.diag(shares @ squares @ shares.T)
    norms, gaussian = np.var(lengths, 0) / np.mean(lengths, 0) ** 2, 2 * shares @ np.diag(squares) / D * by_law / share
    kurtosis = D * np.mean(np.sum(unit**4, -1), 0)
    ratios = variances / spectra.mean(1)[:2]
    expected = {
        "variance": (ratios, np.ones(2), abs(np.log(ratios))),
        "mean": (np.sum(means_of_positions**2, 1) / D, np.zeros(2), np.sum(means_of_positions**2, 1)),
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
        bound = 2 * np.sqrt(8 * np.mean(g[s] ** 2) / (D * count)) + 16 * g.max() / (D * count)
        for share in (0.98, 1.02):
            moved = tokens.copy()
            for r in (0, 1):
                size = spectra[r].mean() * (1 + share * bound if r == s else 1.0)
                moved[classes == r] = of_size((tokens - means[classes])[classes == r], size) + means[r]
            finding = diagnosis_of(model, moved, means, encodings, classes).variance
            assert finding.value == pytest.approx(1 + share * bound) and finding.flagged == (share > 1)


def test_a_thousand_sentences_are_compared_with_one_another():
    """If there are more than a thousand sentences, every second one is taken."""
    x = np.repeat(np.random.default_rng(3).standard_normal((1001, 1, D)) * 0.5, 2, 1)
    result = ta.diagnose(ta.DotProduct(), ta.Data.from_sentences(x, x))
    v = x[:, 0] - x[:, 0].mean(0)
    some = v[::2]
    products = (some @ some.T)[~np.eye(501, dtype=bool)]
    np.testing.assert_allclose(result.dimension.value, np.mean(np.sum(v**2, 1)) ** 2 / np.var(products) / D, rtol=1e-9)


@pytest.mark.parametrize(("words", "times", "flagged"), [(1, 8, True), (4, 3, False), (5, 3, False), (6, 3, True)])
def test_words_count_where_they_are_few_and_repeated(words, times, flagged):
    """Fewer than 50 d effective words are flagged if more than one token in a hundred has occurred before."""
    n, d = 300, 200
    x = np.random.default_rng(4).standard_normal((2 * n, d))
    for k in range(words):
        x[k * times : (k + 1) * times] = x[k * times]
    x = 0.5 * x[np.random.default_rng(5).permutation(2 * n)].reshape(n, 2, d)
    finding = ta.diagnose(ta.DotProduct(), ta.Data.from_sentences(x, x)).vocabulary
    assert finding.flagged == flagged
    np.testing.assert_allclose(finding.value, 2 * n * (2 * n - 1) / (words * times * (times - 1)) / d, rtol=1e-9)


def test_a_diagnosis_as_text():
    """A line for every property: its value, that of the law, what follows, and whether it differs."""
    x = planted("variance", FLAT, 0.9)
    result = ta.diagnose(model_of(FLAT), ta.Data.from_sentences(x, x))
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
    x = of_size(x, 0.25 * inputs)
    q *= np.sqrt(d) / np.linalg.norm(q)
    y = x @ q / d**0.5
    known = np.mean(y**2) if teacher else 0.25
    y = of_size(y, fields * known)
    encodings = np.zeros((2, d))
    encodings[1, 0] = norm**0.5
    arrays = {"encodings": encodings, "gamma": np.full((2, 1), 0.25), "teacher": q if teacher else None}
    return ta.Data.from_sentences(*map(jnp.asarray, (x,)), fields=jnp.asarray(y), **arrays)


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
            with pytest.raises(ta.InputError, match=f"must have {name} ") as raised:
                check_fit(model, sentences(n, d, **{name: ratio**1.03}, teacher=teacher))
            assert re.search(rf"got {re.escape(f'{ratio**1.03:.3g}')} times", str(raised.value))
    # |p|^2 of the law is one, as is four times the variance of the tokens.
    check_fit(model, sentences(n, d, norm=0.97 * factor, teacher=teacher))
    with pytest.raises(ta.InputError, match=r"must have encodings with .* as the model's law has them"):
        check_fit(model, sentences(n, d, norm=1.03 * factor, teacher=teacher))


@pytest.mark.parametrize(
    ("ratio", "n", "warns"), [(1.45, 26, 0), (1.55, 26, 1), (1 / 1.55, 26, 1), (1 / 1.45, 26, 0), (2.0, 25, 0)]
)
def test_another_variance_of_many_numbers_is_told(model, recwarn, ratio, n, warns):
    """It is told from a factor of 1.5 on, of more than a thousand numbers a token."""
    check_fit(model, sentences(n, 40, inputs=ratio))
    assert [str(w.message)[:9] for w in recwarn] == ["data have"] * warns
