"""Where a wide layer's content appears, and what the optimal learner knows of the teacher.

Labels that are an injective function of the scores that the loss sees reveal n fields of a sentence, as softmax rows
do. The Bayes-optimal error e = ||<S> - S*||^2 / d then is that of a matrix that is observed with Gaussian noise,

    e = Delta - (4 pi^2 / 3) Delta^2 int rho_Y^3,   Y = S* + sqrt(Delta) G,   Delta = (e + noise) / (2 alpha n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from ..averages.program import program
from ..base.arrays import Number, precise
from ..base.derivatives import bisected_root, with_root
from ..base.errors import InputError, is_concrete, require_choice, require_positive
from ..base.kinds import form_of
from ..base.report import Description, rows_of
from ..base.results import Result, Status
from ..theory.quantities import Quantity
from .channel import WideNodes, wide_nodes
from .layer import WideLayer
from .solve import without_content
from .spectrum import SpectrumLaw, Wishart, convolution

_RANGE = 1e-8, 1e4  # of alpha, in which the onset is searched
_DELTAS = 1e-12, 1e6  # of Delta over rho


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

    def describe(self) -> Description:
        meanings = {
            "distance": "||<S> - S*||^2 / d of the posterior mean",
            "q": "overlap of the posterior mean with the teacher",
            "perfect_alpha": "from here on the teacher is known",
        }
        numbers = rows_of({name: getattr(self, name) for name in meanings}, meanings=meanings)
        return Description(f"Bayes-optimal wide layer at alpha = {float(self.alpha):g}", self.status_name, numbers)


def _log_root(fn: Callable[..., Array], low: Array, high: Array, *args: PyTree) -> Float[Array, ""]:
    """Return the root x of ``fn(x, *args)``, which increases in x > 0, with its implicit derivatives."""
    frozen = lax.stop_gradient(args)
    return with_root(fn, jnp.exp(bisected_root(lambda t: fn(jnp.exp(t), *frozen), jnp.log(low), jnp.log(high))), *args)


@form_of("bayes", WideLayer)
def bayes_wide(model: WideLayer, alpha: Number, *, nodes: Any = None, start: str | None = None) -> WideOptimum:
    """Solve for the Bayes-optimal learner of a wide layer; this is `bayes` for a `WideLayer`.

    The labels must reveal the scores that the loss sees, as softmax rows do. Neither omega nor the encodings matter as
    long as omega is below one, because they are known.

    Raises:
        InputError: alpha is not positive, omega is one, or `nodes` or `start` are given: there is nothing to average,
            and one state only.
    """
    for name, value in (("nodes", nodes), ("start", start)):
        if value is not None:
            raise InputError(name, f"must be left out for a wide layer, got {name}={value!r}")
    omega = getattr(model, "omega", 0.0)
    if is_concrete(omega) and float(omega) >= 1:
        raise InputError("omega", f"must be below one for the optimal learner, got omega={float(omega)}")
    return _optimum(model, require_positive(alpha, "alpha", model.tau.dtype))


def error_of_noise(law: SpectrumLaw, Delta: Float[Array, ""]) -> Float[Array, ""]:
    """Return the least mean squared error of S* that is observed as S* + sqrt(Delta) G."""
    Y = convolution(law, jnp.ones_like(Delta), Delta).nodes()
    return Delta - 4 * np.pi**2 / 3 * Delta**2 * jnp.sum(Y.weight * Y.density**2)


@program
@precise
def _optimum(layer: WideLayer, alpha: Float[Array, ""]) -> WideOptimum:
    law, n = layer.teacher, layer.seen
    # The error over Delta tends to 1 - p^2, where p is the share of the teacher's eigenvalues that are zero.
    perfect = jnp.where(layer.noise > 0, jnp.inf, (1 - law.zeros**2) / (2 * n))

    def excess(Delta: Array, layer: WideLayer, alpha: Array) -> Array:  # increases with Delta
        return 2 * alpha * n - (error_of_noise(layer.teacher, Delta) + layer.noise) / Delta

    low, high = (law.rho * bound for bound in _DELTAS)
    Delta = _log_root(excess, low, high, layer, alpha)
    known = alpha >= perfect
    Delta = jnp.where(known, 0.0, Delta)
    distance = jnp.where(known, 0.0, error_of_noise(law, jnp.where(known, law.rho, Delta)))
    status = jnp.where(jnp.isfinite(distance), Status.converged, Status.nonfinite)
    return WideOptimum(alpha, distance, law.rho - distance, Delta, perfect, status)


@form_of("critical_alpha", WideLayer)
def onset(model: WideLayer, nodes: Any = None, *, settings: Any = None, bracket: Any = None) -> Quantity:
    """Return the alpha at which a wide layer begins to attend to content; `critical_alpha` for a `WideLayer`.

    Below it the trained S has no part besides that of the encodings: S = 0 is the minimum as long as the largest
    eigenvalue of alpha m S* + sqrt(alpha n) G is at most tau, with m and n from the channel at S = 0. The onset is
    continuous and soft: with eps = alpha / alpha_c - 1 the share of non-zero eigenvalues grows as eps^(3/2), the trace
    as eps^(5/2), q as eps^(7/2). Position and meaning do not compete: the offsets of the encodings are free.

    Returns:
        A `Quantity` with its error bar and its derivatives in all numbers of the layer.

    Raises:
        InputError: `settings` or `bracket` are given; there is no search for a state.
    """
    for name, value in (("settings", settings), ("bracket", bracket)):
        if value is not None:
            raise InputError(name, f"must be left out for a wide layer, got {name}={value!r}")
    rule = wide_nodes(model, nodes)
    meaning = "from here on a wide layer attends to content"

    def alphas(layer: Any) -> Array:
        return _onsets(layer, rule)

    return Quantity.of_model(alphas, model, name="alpha", event="alpha_c", meaning=meaning)


@program
@precise
def _onsets(layer: WideLayer, nodes: WideNodes) -> Float[Array, " R"]:
    def one(nodes: WideNodes) -> Array:
        signal, force = without_content(layer, nodes)

        def excess(alpha: Array, layer: WideLayer, signal: Array, force: Array) -> Array:
            return convolution(layer.teacher, alpha * signal, alpha * force / 2).top - layer.tau

        low, high = (jnp.asarray(bound, layer.tau.dtype) for bound in _RANGE)
        alpha = _log_root(excess, low, high, layer, signal, force)
        exists = (alpha > low * 1.01) & (alpha < high / 1.01)
        return jnp.where(exists, alpha, jnp.nan)

    return lax.map(one, nodes)


@form_of("threshold", WideLayer)
def threshold_wide(model: WideLayer, name: str, *, nodes: Any = None) -> Quantity:
    """Return a threshold of a wide layer; this is `threshold` for a `WideLayer`.

    "perfect_recovery": from here on labels without noise reveal the teacher to the optimal learner, by counting.
    "ridge_recovery": from here on training finds the teacher for tau -> 0. It is the statistical dimension of the cone
    of directions along which the trace of a positive semidefinite matrix does not grow (Amelunxen et al. 2014).

    Both need labels without noise that reveal the scores that the loss sees, and a `Wishart` teacher.

    Raises:
        InputError: the name is another one, `nodes` are given, or the layer has noise or another teacher.
    """
    name = require_choice(name, "name", tuple(_THRESHOLDS))
    if nodes is not None:
        raise InputError("nodes", f"must be left out for a wide layer, got nodes={nodes!r}")
    if not isinstance(model.teacher, Wishart):
        raise InputError("teacher", f"must be a Wishart law for thresholds, got {model.teacher!r}")
    if is_concrete(model.noise) and float(model.noise) > 0:
        raise InputError("noise", f"must be zero for recovery, got noise={float(model.noise)}")
    value, meaning = _THRESHOLDS[name]

    def alphas(layer: Any) -> Array:  # an exact number has two equal replicates
        return jnp.broadcast_to(value(layer.teacher.kappa) / layer.seen, (2,))

    return Quantity.of_model(alphas, model, name="alpha", event=name, meaning=meaning)


def _counting(kappa: Float[Array, ""]) -> Float[Array, ""]:
    kappa = jnp.minimum(kappa, 1.0)
    return kappa - kappa**2 / 2


def _statistical_dimension(kappa: Float[Array, ""]) -> Float[Array, ""]:
    """Return k - k^2/2 + (1-k)/2 min_s [k s^2 + (1-k) E (x-s)_+^2], x of a semicircle of radius 2."""
    k = jnp.minimum(kappa, 1.0)
    x, weights = np.polynomial.legendre.leggauss(200)

    def cost(s: Array) -> Array:
        # x = 2 - (2 - s) (1 - y) / 2 between s and 2, in an angle that smooths the edge
        angle = (x + 1) * np.pi / 4
        points = 2 - (2 - s) * np.cos(angle) ** 2
        jacobian = (2 - s) * 2 * np.cos(angle) * np.sin(angle) * weights * np.pi / 4
        density = jnp.sqrt(jnp.maximum(4 - points**2, 0.0)) / (2 * np.pi)
        return k * s**2 + (1 - k) * jnp.sum(jacobian * density * (points - s) ** 2)

    def golden(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        left = cost(a) < cost(b)
        return jnp.where(left, low, a), jnp.where(left, b, high)

    zero = jnp.zeros_like(k)
    # The cost is stationary in s, so the best s needs no derivative.
    s = lax.stop_gradient(0.5 * sum(lax.fori_loop(0, 100, golden, (zero, zero + 2))))
    return k - k**2 / 2 + (1 - k) / 2 * cost(s)


_THRESHOLDS = {
    "perfect_recovery": (_counting, "from here on the optimal learner knows the teacher"),
    "ridge_recovery": (_statistical_dimension, "from here on training finds the teacher for tau -> 0"),
}
