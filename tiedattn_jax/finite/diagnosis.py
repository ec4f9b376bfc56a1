"""Whether sentences fit a model: errors if they cannot, and what of the law of the model they fulfil.

# notation: v_l = x_l minus encoding, mean of its class and mean of its position, in units of its standard deviation.

The theory takes tokens as independent Gaussian vectors with the covariances of the law. Other laws with independent
entries give the same losses to a percent. Norms that fluctuate, and words that repeat, do not. The measured changes in
the sentences below are those of simulations at d = 600 and alpha = 2, means over ten instances, at the minima that
L-BFGS finds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from ..base.arrays import AnyArray, precise
from ..base.errors import (
    InputError,
    is_concrete,
    require,
    require_kind,
    require_precision,
    require_promotion,
    shaped_array,
    with_values,
)
from ..base.report import Description, Printed, Row
from ..model.model import Model, over_kinds, require_model
from .data import Data, Sample
from .products import student_fields, token_gram

_WARN_RATIO = 1.5  # warn when the variance of the inputs and that of the model differ by more than this factor
_LARGE_SAMPLE = 1000  # with more numbers than this, chance does not change their variance noticeably
_SENTENCES = 1000  # largest number of sentences whose tokens are compared with one another
_PROJECTIONS = 3  # directions whose projections tell words apart
_CHANCE = 4  # a deviation of fewer standard deviations is chance
_TAIL = 8  # a bound that is exceeded with probability exp(-8) bounds chance


def check_estimate(name: str, model: Model, data: Sample, Q: Real[AnyArray, "d r"]) -> Float[Array, "d r"]:
    """Return an estimate as an array of the data's dtype.

    Args:
        name: name of the argument, for the error message.

    Raises:
        InputError: if the estimate does not have shape (d, r) or is not finite, or the data do not fit the model.
    """
    check_fit(model, data)
    return shaped_array(name, Q, "d r", {"d": data.shape[2], "r": model.shape[1]}, data.dtype)


def check_fit(model: Model, data: Sample) -> None:
    """Raise an `InputError` if the data differ from the model in tokens, fields, token classes, dtype or scale."""
    require_model(model)
    require_kind(data, "data", Sample, "a tiedattn_jax.Data")
    require_promotion()
    require_precision(model.lam.dtype, "lam")
    (L, _, t), dims = model.shape, (data.shape[0], data.shape[3])
    if dims[0] != L or (data.y is not None and dims[1] != t):
        requirement = f"must have L = {L} tokens and t = {t} teacher fields as the model has"
        raise InputError(
            "data", f"{requirement}, got L = {dims[0]}, t = {dims[1]}: inputs of from_sentences are (n, L, d)"
        )
    noise = 0 if data.noise is None else data.noise.shape[2]
    if noise != model.noise and data.y is not None:
        raise InputError("data", f"must have {model.noise} fields of noise a token as the model has, got {noise}")
    _check_classes(model, data)
    dtype = jnp.result_type(model.lam)
    if data.dtype != dtype:
        requirement = f"must be {dtype} as the model is, or the model as the data are"
        raise InputError("data", f"{requirement}, got {data.dtype}: see DotProduct(dtype=...)")
    if is_concrete(model, data):
        with with_values():
            _check_scale(model, data)


def _check_classes(model: Model, data: Sample) -> None:
    sentences = model.law().sentences
    if (sentences is None) != (data.classes is None):
        requirement = "must have classes of tokens where the model's law has kinds of sentences, and only there"
        raise InputError("data", f"{requirement}, got {'none' if data.classes is None else 'classes'}")
    if sentences is not None and data.classes is not None and is_concrete(data.classes):
        kinds, allowed = np.unique(np.asarray(data.classes), axis=0).tolist(), [list(k) for k in sentences.classes]
        unknown = [k for k in kinds if k not in allowed]
        require(not unknown, "data.classes", unknown[:3], f"among the kinds of sentences of the model's law, {allowed}")


def _check_scale(model: Model, data: Sample) -> None:
    """Raise an `InputError` if a factor sqrt(d) is missing or one too many, so that a variance is wrong by a factor d.

    A variance may differ from the model's by a factor of max(10, sqrt(d)), or more if it is estimated from few numbers.
    If the variance of many inputs differs by more than `_WARN_RATIO`, a warning says that theory and data have
    different settings.
    """
    L, n, d, t = data.shape
    factor = max(10, d**0.5)

    def deviates(ratio: float, count: int) -> bool:
        bound = factor ** (1 + 20 / count)
        return not 1 / bound < ratio < bound

    norm, law_norm, trace, inputs, fields, teacher = map(float, _scales(model, data))
    if norm > factor * max(4 * trace, law_norm):
        requirement = f"must have encodings with |p_l|^2 of order one, as the model's law has them ({law_norm:.3g})"
        raise InputError("data", f"{requirement}, got {norm:.3g}: divide encodings of entries of order one by sqrt(d)")
    if deviates(inputs, L * n * d):
        requirement = "must have inputs of the model's variance / d, x / sqrt(d) for tokens x"
        hint = "Data.from_sentences divides tokens by sqrt(d), Data does not"
        raise InputError("data", f"{requirement}, got {inputs:.3g} times that variance: {hint}")
    if deviates(teacher, d * t):
        requirement = "must have a teacher with entries of order one, as the model's"
        raise InputError("data", f"{requirement}, got fields of {teacher:.3g} times the model's variance")
    if deviates(fields, min(L * n, d) * t):
        requirement = "must have fields y = Q*^T x / sqrt(d) of tokens x that are not divided yet"
        reference = "the model" if data.teacher is None else "those of its teacher"
        raise InputError("data", f"{requirement}, got {fields:.3g} times the variance of {reference}")
    if n * d > _LARGE_SAMPLE and not 1 / _WARN_RATIO < inputs < _WARN_RATIO:
        message = f"data have {inputs:.3g} times the model's variance of inputs: "
        message += "theory and simulation are then of two settings"
        warnings.warn(message, stacklevel=2)


@eqx.filter_jit
@precise
def _scales(model: Model, data: Sample) -> tuple[Float[Array, ""], ...]:
    """Return the largest ``|p_l|^2`` of data and law, the law's variance, and ratios of variances.

    These are that of x, of y, and of fields of the teacher, over the expected ones; one if nothing is expected.
    """
    (inputs, variance), law = data.mean_squares(), model.law()
    norm, law_norm = jnp.max(jnp.sum(data.encodings**2, 1)), jnp.max(jnp.einsum("k,kll->l", law.weights, law.tau))
    expected = _mean_over_tokens(model, lambda kind: jnp.trace(kind.rho, axis1=1, axis2=2)) / data.shape[3]
    variance = expected if variance is None else variance
    teacher = jnp.ones(())
    if data.teacher is not None:
        given = jnp.mean(jnp.trace(data.rho, axis1=1, axis2=2)) / data.shape[3]
        teacher = jnp.where(expected > 0, given / expected, 1.0)
    fields = jnp.ones(()) if data.y is None else jnp.where(variance > 0, jnp.mean(data.y**2) / variance, 1.0)
    trace = _mean_over_tokens(model, lambda conditioned: conditioned.trace)
    return norm, law_norm, trace, inputs / trace, fields, teacher


def _mean_over_tokens(model: Model, fn: Callable[[Model], Float[Array, " L"]]) -> Float[Array, ""]:
    """Return the mean of `fn` over the tokens of all sentences: every kind of sentences counts with its share."""
    return over_kinds(model, lambda conditioned: conditioned.sentence.share * jnp.mean(fn(conditioned)))


class Finding(NamedTuple):
    """One property of the sentences.

    Attributes:
        value: what was measured; the largest over tokens or pairs of tokens.
        expected: its value under the law of the model.
        flagged: whether it deviates by more than chance, and enough to change losses.
        text: what follows, in one sentence.
    """

    value: float
    expected: float
    flagged: bool
    text: str


class Diagnosis(Printed):
    """Comparison of sentences with the law of a model; each property is a `Finding`.

    Attributes:
        variance: variance of the entries over the model's.
        mean: squared norm of the mean token over that of a token.
        dimension: effective dimension over d, ``(tr Sigma)^2 / (d tr Sigma^2)``.
        correlation: cosine of two tokens of a sentence.
        norms: variance of the squared norms over their squared mean.
        kurtosis: fourth moment of the entries over their squared variance, given the norm of the token.
        vocabulary: effective number of different tokens over d; infinite if none is repeated.
    """

    variance: Finding
    mean: Finding
    dimension: Finding
    correlation: Finding
    norms: Finding
    kurtosis: Finding
    vocabulary: Finding

    @property
    def flagged(self) -> tuple[str, ...]:
        """Names of the properties that the law of the model does not have."""
        return tuple(name for name, finding in vars(self).items() if finding.flagged)

    @property
    def ok(self) -> bool:
        """Whether nothing is flagged."""
        return not self.flagged

    def describe(self) -> Description:
        rows: list[Row] = [("", "data", "model", "")]
        for name, finding in vars(self).items():
            mark = "differs: " if finding.flagged else ""
            rows.append((name, f"{finding.value:.3g}", f"{finding.expected:.3g}", mark + finding.text))
        outcome = "agree" if self.ok else f"differ in {', '.join(self.flagged)}"
        return Description("sentences and the law of the model", outcome, tables=[("", rows)])


def diagnose(model: Model, data: Data) -> Diagnosis:
    """Compare sentences with the law that the theory of a model takes them from.

    The checks see the inputs only, not the labels. They compare moments and repetitions; they do not see whether the
    coordinates are the eigenvectors of the covariances.

    Args:
        data: sentences; encodings, and classes with their means, are taken off.

    Raises:
        InputError: the data have another number of tokens, or other classes, than the model, or a single sentence.
    """
    require_model(model)
    require_kind(data, "data", Data, "a tiedattn_jax.Data")
    (L, n, d, _), law = data.shape, model.law()
    traces = np.asarray(law.weights @ law.gamma, float)
    if L != model.shape[0] or (data.classes is None) != (law.sentences is None) or len(data.gamma) != len(traces):
        requirement = f"must have the tokens and classes of the model, L = {model.shape[0]} and {len(traces)} laws"
        raise InputError("data", f"{requirement}, got L = {L} and {len(data.gamma)} laws")
    if n < 2:
        raise InputError("data", "must have two sentences or more, whose differences tell their law, got n=1")
    m = jax.tree.map(lambda a: np.asarray(a, float), _token_moments(data))
    # Samples of the law have these mean squares of cosines, times d, for two tokens of given laws, or positions. Its
    # further properties are the largest share of one direction, and the largest tr Sigma^4 / (tr Sigma^2)^2.
    weights, spectra = np.asarray(law.weights, float), np.asarray(law.gamma, float) / traces
    squares = np.einsum("k,ks,kt->st", weights, spectra, spectra)
    of_law, of_pair = np.diag(squares), m.shares @ squares @ m.shares.T
    by_position, largest = 1 / np.diag(of_pair), spectra[weights > 0].max() / d
    fourth = np.max(weights @ spectra**4 / of_law**2) / d
    tokens, pairs = n * m.shares.sum(0), min(n, _SENTENCES)
    # Chance: bounds of Laurent and Massart on sums of squares, each exceeded with probability exp(-`_TAIL`), and
    # standard deviations.
    sums = 2 * (_TAIL * of_law / (d * np.maximum(tokens, 1))) ** 0.5 + 2 * _TAIL * largest / np.maximum(tokens, 1)
    mean = (1 + 2 * (_TAIL / (d * by_position)) ** 0.5 + 2 * _TAIL * largest) / n
    spread = (8 * fourth / pairs + 4 / pairs**2 + 8 / (d * by_position * pairs)) ** 0.5
    variance, share = np.where(tokens > 0, m.variance / traces, 1.0), m.dimension / d
    ratio = by_position / share
    # Relative variance of the squared norms of Gaussian tokens of the measured dimension.
    gaussian = 2 * (m.shares @ of_law) / d * ratio
    scatter = ((2 + 12 * fourth) / n + spread**2) ** 0.5
    words, repeated = _vocabulary(data, m.projections)
    cosine, excess = abs(m.correlation), m.norms - gaussian
    # Values (one number, or one for each position, pair or law), values under the law of the model, what makes the
    # worst value, which is shown, the largest one, and whether a value differs by more than chance and enough to change
    # losses.
    rows = {
        "variance": (variance, 1.0, abs(np.log(variance)), abs(variance - 1) > np.maximum(0.05, sums)),
        "mean": (m.mean, 0.0, m.mean, m.mean > np.maximum(0.01, mean)),
        "dimension": (share, by_position, abs(np.log(ratio)), abs(ratio - 1) > np.maximum(0.1, _CHANCE * spread)),
        "correlation": (m.correlation, 0.0, cosine, cosine > np.maximum(0.02, _CHANCE * (of_pair / (n * d)) ** 0.5)),
        "norms": (m.norms, gaussian, excess, excess > np.maximum(0.05, _CHANCE * gaussian * scatter)),
        "kurtosis": (m.kurtosis, 3 / share, m.kurtosis * share, m.kurtosis > 15 / share),
        "vocabulary": (words / d, np.inf, 0.0, repeated > 0.01 and words < 50 * d),
    }
    findings = {}
    for name, columns in rows.items():
        values, expected, deviation, differs = np.broadcast_arrays(*columns)
        k = int(np.argmax(deviation))
        value, of_model, flag = float(values.flat[k]), float(expected.flat[k]), bool(differs.flat[k])
        text = _TOO_WIDE if name == "dimension" and flag and value > of_model else _TEXTS[name]
        findings[name] = Finding(value, of_model, flag, text)
    return Diagnosis(**findings)


# The advice of each property, for data that do not have it.
_TEXTS = {
    "variance": "theory and data are of one setting if this is one: give the model the variance of the data, as sigma",
    "mean": "a mean acts like an encoding: subtract it, or give it as encodings or as the mean of a class",
    "dimension": "variances of directions enter the theory: rotate to the eigenvectors, give the data their variances "
    "as gamma, and the model spectrum=SpectralLaw.from_matrices(...)",
    "correlation": "the theory takes tokens as independent, or as independent given their classes: see "
    "SpectralLaw.of_classes",
    "norms": "at .43 losses fall by 4 % (semantic) and 11 % (positional): classes of several variances model this, see "
    "SpectralLaw.of_classes",
    "kurtosis": "at 60 (one entry in 20 is not zero) losses fall by 2 % and 4 %: no theory here; 1 to 9 change 1 %",
    "vocabulary": "with 10 d words the semantic loss falls by 2 %, with 2 d by 13 % (positional 6 %): no theory here",
}
# The advice on the dimension where the spectrum of the model is the wider one.
_TOO_WIDE = (
    "the covariance of few sentences, or of words that repeat, has eigenvalues that scatter too far: pull those of the "
    "model towards their mean until its dimension is that of the data"
)


class _TokenMoments(NamedTuple):
    """Moments of the tokens; S laws of tokens, L positions, N = L n tokens."""

    shares: Float[Array, "L S"]  # of the laws of tokens at every position
    variance: Float[Array, " S"]
    mean: Float[Array, " L"]
    dimension: Float[Array, " L"]  # effective, not over d
    correlation: Float[Array, "L L"]
    norms: Float[Array, " L"]
    kurtosis: Float[Array, " L"]
    projections: Float[Array, "N k"]


@eqx.filter_jit
@precise
def _token_moments(data: Data) -> _TokenMoments:
    L, n, d, _ = data.shape
    tokens = data.x * d**0.5 - data.encodings[:, None]
    directions = jax.random.normal(jax.random.key(0), (d, _PROJECTIONS), tokens.dtype)
    projections = jnp.moveaxis(student_fields(tokens, directions), 2, 1).reshape(L * n, -1) / d**0.5
    variance = data.variances()[:, 0]
    if data.means is None or data.classes is None:
        scale, shares = jnp.broadcast_to(variance[:, None], (L, n)), jnp.eye(L, dtype=tokens.dtype)
    else:
        scale, tokens = variance[data.classes.T], tokens - data.means[data.classes.T]
        shares = jnp.mean(data.classes.T[..., None] == jnp.arange(len(variance)), 1, dtype=tokens.dtype)
    tokens = tokens / jnp.sqrt(scale)[..., None]
    mean = jnp.mean(tokens, 1)
    tokens = tokens - mean[:, None]
    square = jnp.sum(tokens**2, -1)  # (L, n)
    unit = tokens / jnp.sqrt(square)[..., None]
    cosines = jnp.mean(token_gram(unit), -1) * (1 - jnp.eye(L, dtype=unit.dtype))
    # For independent tokens the mean of (v . v')^2 is tr Sigma^2, also where norms and directions depend on each other.
    # The mean that was subtracted adds the square of the mean of v . v'. Kinds of sentences may lie in blocks.
    some = slice(None, None, -(-n // _SENTENCES))
    gram = jnp.einsum("lad,lbd->lab", tokens[:, some], tokens[:, some])
    norms = jnp.sqrt(square[:, some])
    # Pairs of one word, whose cosine is one, say nothing of the spectrum.
    pairs = (gram < 0.999 * norms[:, None] * norms[:, :, None]) & ~jnp.eye(gram.shape[1], dtype=bool)
    first, second = (jnp.mean(gram**k, (1, 2), where=pairs) for k in (1, 2))
    trace = jnp.mean(square, 1)
    floor = trace**2 / d  # of all spectra of this trace
    return _TokenMoments(
        shares=shares,
        variance=variance,
        mean=jnp.sum(mean**2, -1) / d,
        dimension=trace**2 / jnp.maximum(second - first**2, floor),
        correlation=cosines,
        norms=jnp.var(square, 1) / jnp.mean(square, 1) ** 2,
        kurtosis=d * jnp.mean(jnp.sum(unit**4, -1), 1),
        projections=projections,
    )


def _vocabulary(data: Data, projections: Float[np.ndarray, "N k"]) -> tuple[float, float]:
    """Return the effective number of different tokens, and the share of tokens that occur before.

    Equal tokens have equal projections up to rounding. The effective number is ``1 / sum f^2`` of the frequencies f,
    corrected for chance; it is infinite if no token is repeated.
    """
    cell = float(np.sqrt(np.finfo(data.x.dtype).eps)) * np.sqrt(np.mean(projections**2))
    counts = np.unique(np.round(projections / cell), axis=0, return_counts=True)[1]
    total = len(projections)
    pairs = float(np.sum(counts * (counts - 1.0)))
    return total * (total - 1) / pairs if pairs else np.inf, 1 - len(counts) / total
