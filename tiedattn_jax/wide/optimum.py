"""Where a wide layer's content appears, and what the optimal learner knows of the teacher.

Labels that are an injective function of the scores that the loss sees reveal n fields of a sentence, as softmax rows
do. The Bayes-optimal error e = ||<S> - S*||^2 / d then is that of a matrix that is observed with Gaussian noise,

    e = Delta - (4 pi^2 / 3) Delta^2 int rho_Y^3,   Y = S* + sqrt(Delta) G,   Delta = (e + noise) / (2 alpha n).

For untied layers rho_Y is the symmetric law of singular values, and Delta is twice as large: a matrix without a
symmetry has twice as many entries.

Other labels have Delta = 1 / (2 alpha I), where I(e) is their Fisher information on the scores, of which the optimal
learner knows all but the variance e. Those of hard attention show the signs of h_11 - h_12 and h_22 - h_12 only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, Int

from ..averages.program import program
from ..base.arrays import Number, precise, total
from ..base.derivatives import bisected_root
from ..base.errors import InputError, is_concrete, require_positive
from ..base.progress import Progress, one_search
from ..base.report import Description, rows_of
from ..base.results import Column, InTable, Result, Status
from ..theory.quantities import Quantity
from .attention import DotProduct
from .channel import WideNodes, wide_nodes
from .fixed_points import without_content
from .laws import GaussianFactors, SpectrumLaw, Wishart
from .layer import Layer, guarded, require_closed, require_layer, require_smooth
from .spectrum import SpectrumNodes, convolution

_RANGE = 1e-8, 1e4  # of alpha, in which the onset is searched
_DELTAS = 1e-12, 1e3  # range of Delta: over its smallest order, and over rho + noise
_RESOLVED = 1e-4  # share of the eigenvalues that the nodes of a resolved spectrum may miss
_REACH = 8.0  # of an integral over a normal number
_PLACES, _ANGLES = 97, 12  # of the integrals for hard attention, which are then right to 1e-10
_LEAST = 1e-12  # probability of signs below which they contribute nothing


class WideOptimum(Result):
    """The Bayes-optimal learner of a wide layer at one alpha.

    Attributes:
        alpha: sentences per squared dimension.
        distance: ||<S> - S*||^2 / d of the posterior mean; no learner has a smaller one. Zero if the teacher is known.
        q: overlap of the posterior mean with the teacher, rho minus the distance.
        noise: Delta, the variance of the noise with which the teacher's matrix is as good as observed.
        perfect_alpha: alpha from which on labels without noise reveal the teacher; infinite with noise.
        status: `Status` as an integer.
    """

    batch_probe = "alpha", 0
    alpha: Float[Array, "*batch"]
    distance: Float[Array, "*batch"]
    q: Float[Array, "*batch"]
    noise: Float[Array, "*batch"]
    perfect_alpha: Float[Array, "*batch"]
    status: Int[Array, "*batch"]

    @property
    def in_table(self) -> InTable:
        return InTable("distance", headline=lambda table: "the optimal learner of a wide layer")

    def numbers(self) -> dict[str, Column]:
        """Return the numbers by name; they are exact."""
        names = "distance", "q", "noise", "perfect_alpha"
        return {name: (float(getattr(self, name)), 0.0) for name in names}

    def describe(self) -> Description:
        meanings = {
            "distance": "||<S> - S*||^2 / d of the posterior mean",
            "q": "overlap of the posterior mean with the teacher",
            "perfect_alpha": "from here on the teacher is known",
        }
        numbers = rows_of({name: getattr(self, name) for name in meanings}, meanings=meanings)
        return Description(f"Bayes-optimal wide layer at alpha = {float(self.alpha):g}", self.status_name, numbers)


def _log_root(fn: Callable[[Array], Array], low: Array, high: Array) -> Float[Array, ""]:
    """Return the root of a function that increases in x > 0, with its implicit derivatives."""
    return jnp.exp(bisected_root(lambda t: fn(jnp.exp(t)), jnp.log(low), jnp.log(high)))


def bayes(model: Layer, alpha: Number) -> WideOptimum:
    """Solve for the Bayes-optimal learner of a wide layer. There is nothing to average, and one state only.

    The labels must reveal the scores that the loss sees, as softmax rows do, or be those of hard attention
    (`target="hardmax"`). Neither omega nor the encodings matter as long as omega is below one, because they are known.

    Raises:
        InputError: alpha is not positive, omega is one, or hard attention has more than two tokens.
    """
    require_layer(model)
    omega = getattr(model, "omega", 0.0)
    if is_concrete(omega) and float(omega) >= 1:
        raise InputError("omega", f"must be below one for the optimal learner, got omega={float(omega)}")
    require_closed(model)
    if model.is_hard and model.tokens != 2:
        raise InputError("tokens", f"must be two for hard attention, got tokens={model.tokens}")
    return guarded(_optimum, model, require_positive(alpha, "alpha", model.tau.dtype), valid=jnp.less(omega, 1))


def error_of_noise(law: SpectrumLaw, Delta: Float[Array, ""]) -> Float[Array, ""]:
    """Return the least mean squared error of S* that is observed as S* + sqrt(Delta) G."""
    return _error_of(_noisy_spectrum(law, Delta), Delta)


def _noisy_spectrum(law: SpectrumLaw, Delta: Float[Array, ""]) -> SpectrumNodes:
    return convolution(law, jnp.ones_like(Delta), Delta).nodes()


def _error_of(Y: SpectrumNodes, Delta: Float[Array, ""]) -> Float[Array, ""]:
    return Delta - 4 * np.pi**2 / 3 * Delta**2 * jnp.sum(Y.weight * Y.density**2)


def information(layer: Layer, error: Float[Array, ""]) -> Float[Array, ""]:
    """Return the Fisher information of a sentence's labels on the scores, of which all but the variance is known."""
    V = error + layer.noise
    return _of_signs(layer.teacher.rho - error, V) if layer.is_hard else layer.seen / V


def _of_signs(q: Float[Array, ""], V: Float[Array, ""]) -> Float[Array, ""]:
    """Return E sum_s |dP_s|^2 / P_s: labels are the signs s of two fields of mean u and covariance V [[3, 1], [1, 3]].

    The mean has covariance q [[3, 1], [1, 3]]. With k = s u / sqrt(3 V), the probability of the signs is that of two
    normals of correlation r = s_1 s_2 / 3 below k. The integrand varies within |k| of order one, so u = sinh(t).
    """
    scale = jnp.sqrt(1 + q / V)
    reach = jnp.arcsinh(_REACH * scale)
    t = reach * jnp.linspace(-1, 1, _PLACES, dtype=V.dtype)
    x, density = jnp.sinh(t) / scale, jnp.cosh(t) / scale * (t[1] - t[0])  # u = sqrt(3 q) x
    x, y = x[:, None], x
    weight = (
        density[:, None] * density * jnp.exp(-(x**2 - 2 / 3 * x * y + y**2) / (16 / 9)) / (2 * np.pi * np.sqrt(8 / 9))
    )
    a, b = (jnp.sqrt(q / V) * field for field in (x, y))

    def of_pair(b: Array, r: float) -> Array:
        P = _below(a, b, r)
        by_a, by_b = (norm.pdf(one) * ndtr((other - r * one) / np.sqrt(1 - r**2)) for one, other in ((a, b), (b, a)))
        squares = 3 * by_a**2 + 3 * by_b**2 + 6 * r * by_a * by_b
        return jnp.sum(weight * jnp.where(_LEAST < P, squares / jnp.maximum(P, _LEAST), 0.0))

    # Signs that are all turned contribute the same.
    return 2 * (of_pair(b, 1 / 3) + of_pair(-b, -1 / 3)) / (3 * V)


def _below(a: Array, b: Array, r: float) -> Array:
    """Return the probability that two normals of correlation r lie below a and b (Plackett 1954)."""
    nodes, weights = np.polynomial.legendre.leggauss(_ANGLES)
    angle, weights = np.arcsin(r) * (nodes + 1) / 2, np.arcsin(r) * weights / 2
    terms = (
        w * jnp.exp(-(a**2 + b**2 - 2 * a * b * sine) / (2 * (1 - sine**2)))
        for w, sine in zip(weights, np.sin(angle), strict=True)
    )
    return ndtr(a) * ndtr(b) + total(terms) / (2 * np.pi)


@program
@precise
def _optimum(layer: Layer, alpha: Float[Array, ""]) -> WideOptimum:
    law = layer.teacher
    # The error over Delta tends to one minus the squared shares of equal eigenvalues of the teacher.
    perfect = jnp.where((layer.noise > 0) | layer.is_hard, jnp.inf, (1 - law.ties) * layer.sides / (2 * layer.seen))

    def excess(Delta: Array) -> Array:  # increases with Delta
        return 2 / layer.sides * alpha * Delta * information(layer, error_of_noise(law, Delta)) - 1

    # Delta is (error + noise) / (2 alpha n) at most, or (error + noise) / alpha of some order for signs.
    least = jnp.minimum(law.rho, law.rho / alpha**2)
    least = jnp.where(layer.noise > 0, jnp.minimum(least, layer.noise / (1 + alpha)), least)
    low, high = least * _DELTAS[0], (law.rho + layer.noise) * _DELTAS[1] * (1 + 1 / alpha)
    Delta = _log_root(excess, low, high)
    is_inside = (Delta > low * 1.01) & (Delta < high / 1.01)
    known = alpha >= perfect
    Delta = jnp.where(known, 0.0, Delta)
    variance = jnp.where(known, law.rho, Delta)
    Y = _noisy_spectrum(law, variance)
    distance = jnp.where(known, 0.0, _error_of(Y, variance))
    # The nodes are too few for a spectrum that consists of very many parts.
    is_resolved = known | (is_inside & (jnp.abs(jnp.sum(Y.weight) - 1) < _RESOLVED))
    status = jnp.where(is_resolved, Status.converged, Status.unresolved)
    status = jnp.where(jnp.isfinite(distance), status, Status.nonfinite)
    return WideOptimum(alpha, distance, law.rho - distance, Delta, perfect, status)


def onset(model: Layer, nodes: Any = None, *, progress: Progress = None) -> Quantity:
    """Return the alpha at which a wide layer begins to attend to content.

    Below it the trained S has no part besides that of the encodings: S = 0 is the minimum as long as the largest
    eigenvalue of alpha m S* + sqrt(alpha n) G is at most tau, with m and n from the channel at S = 0. The onset is
    continuous and soft: with eps = alpha / alpha_c - 1 the share of non-zero eigenvalues grows as eps^(3/2), the trace
    as eps^(5/2), q as eps^(7/2). Position and meaning do not compete: the offsets of the encodings are free.

    Returns:
        A `Quantity` with its error bar and its derivatives in all numbers of the layer. Its status is `absent` if there
        is no onset from 1e-8 to 1e4, and `max_steps` if the offsets of the encodings were not found.

    Raises:
        InputError: the loss has kinks, or `nodes` are of the wrong kind.
    """
    require_smooth(model)
    rule = wide_nodes(model, nodes, whole=True)
    meaning = "from here on a wide layer attends to content"

    with one_search(progress):
        alpha = Quantity.of_model(
            lambda m: guarded(lambda m: _onsets(m, rule), m), model, name="alpha", event="alpha_c", meaning=meaning
        )
        if is_concrete(alpha.status) and int(alpha.status) == Status.absent and is_concrete(model):
            failed = ~np.all(_have_offsets(model, rule))
            alpha = replace(alpha, status=jnp.where(failed, Status.max_steps, alpha.status))
        return alpha


@program
@precise
def _have_offsets(layer: Layer, nodes: WideNodes) -> Bool[Array, " R"]:
    """Return whether the best offsets without content were found."""
    return lax.map(lambda nodes: without_content(layer, nodes)[1], nodes)


@program
@precise
def _onsets(layer: Layer, nodes: WideNodes) -> Float[Array, " R"]:
    def one(nodes: WideNodes) -> Array:
        (_, M, N), _ = without_content(layer, nodes)

        def excess(alpha: Array) -> Array:
            return convolution(layer.teacher, alpha * M, alpha * N).top - layer.tau

        low, high = (jnp.asarray(bound, layer.tau.dtype) for bound in _RANGE)
        alpha = _log_root(excess, low, high)
        exists = (alpha > low * 1.01) & (alpha < high / 1.01)
        return jnp.where(exists, alpha, jnp.nan)

    return lax.map(one, nodes)


def perfect_recovery(model: Layer) -> Quantity:
    """Return the alpha from which on labels without noise reveal the teacher to the optimal learner, by counting.

    Raises:
        InputError: the layer has noise, hard attention, or another teacher than `Wishart` and `GaussianFactors`.
    """
    return _recovery(model, "perfect_recovery", _counting, "from here on the optimal learner knows the teacher")


def ridge_recovery(model: Layer) -> Quantity:
    """Return the alpha from which on training finds the teacher for tau -> 0.

    It is the statistical dimension of the cone of directions along which the trace of a positive semidefinite matrix
    does not grow (Amelunxen et al. 2014).

    Raises:
        InputError: as in `perfect_recovery`.
    """
    meaning = "from here on training finds the teacher for tau -> 0"
    return _recovery(model, "ridge_recovery", _statistical_dimension, meaning)


def _recovery(model: Layer, event: str, value: Callable[[Array, int], Array], meaning: str) -> Quantity:
    require_layer(model)
    require_closed(model)
    if not isinstance(model.teacher, Wishart | GaussianFactors):
        raise InputError("teacher", f"must be a law of Gaussian factors for thresholds, got {model.teacher!r}")
    if model.is_hard:
        raise InputError("target", "must be softmax for recovery, got target='hardmax'")
    if is_concrete(model.noise) and float(model.noise) > 0:
        raise InputError("noise", f"must be zero for recovery, got noise={float(model.noise)}")

    def alpha(layer: Any) -> Array:
        return value(jnp.minimum(layer.teacher.kappa, 1.0), layer.sides) / layer.seen

    return _exact(model, alpha, lambda layer: layer.noise == 0, name="alpha", event=event, meaning=meaning)


def position(model: Layer) -> Quantity:
    """Return the share A_11 of the target, at the A_22 of the layer, from which on position is learned.

    Tied attention is positive semidefinite: below A_11 + A_22 = 1 the target asks the tokens to attend to each other.
    Both losses stay the same if the scores change their sign and the columns of A are exchanged, so neither alpha nor
    tau, beta, omega or the encodings' length move this boundary. `WidePoint.slack` changes its sign there.

    Raises:
        InputError: the layer is no `DotProduct`, or has no encodings.
    """
    if not isinstance(model, DotProduct) or model.encodings is None:
        text = "must be a tied DotProduct with encodings for position, because untied layers learn every target"
        raise InputError("model", f"{text}, got {type(model).__name__}")
    meaning = "from here on position is learned"
    return _exact(model, lambda layer: 1 - layer.mixing[1, 1], None, name="A_11", event="position", meaning=meaning)


def _exact(
    model: Layer, value: Callable[[Any], Array], is_valid: Callable[[Any], Array] | None, **words: str
) -> Quantity:
    """Return a number that is known exactly: it has two equal replicates."""

    def values(layer: Any) -> Array:
        valid = True if is_valid is None else is_valid(layer)
        return guarded(lambda layer: jnp.broadcast_to(value(layer), (2,)), layer, valid=valid)

    return Quantity.of_model(values, model, **words)


def _counting(k: Float[Array, ""], sides: int) -> Float[Array, ""]:
    """Return the free numbers of a matrix of rank k d over d^2."""
    return sides * (k - k**2 / 2)


def _statistical_dimension(k: Float[Array, ""], sides: int) -> Float[Array, ""]:
    """Return sides (k - k^2/2 + (1-k)/2 min_s [k s^2 + (1-k) sides E (x-s)_+^2]), x of a semicircle of radius 2."""

    def moments(s: Array) -> tuple[Array, Array]:
        """Return E (x-s)_+ and E (x-s)_+^2, from the integrals of 1, x and x^2 over the density times 2 pi above s."""
        root, angle = jnp.sqrt(4 - s**2), jnp.arccos(s / 2)
        share, first, second = 2 * angle - s * root / 2, root**3 / 3, 2 * angle - s * (s**2 - 2) * root / 4
        scale = sides / (2 * np.pi)
        return (first - s * share) * scale, (second - 2 * s * first + s**2 * share) * scale

    s = bisected_root(lambda s: k * s - (1 - k) * moments(s)[0], jnp.zeros_like(k), jnp.full_like(k, 2.0))
    return sides * (k - k**2 / 2 + (1 - k) / 2 * (k * s**2 + (1 - k) * moments(s)[1]))
