"""Full-batch gradient descent from small starts: which of encodings, teacher and noise grows first, and how fast.

# notation: T = -Hess_z loss(0, Y) of a sentence, (L, L), with the student's fields z and the teacher's fields Y. The
# response V is a number, G(V) = T (1 - V T)^{-1}, and g = E tr G. Covariances are Sigma_l = s_l Sigma: the factors s_l
# are part of T, and the atoms of Sigma have weights w_a and eigenvalues c_a.

For small weights Q of the student the gradient of the risk is linear: ``dQ/dtau = (M - lambda) Q`` at time tau, with
the ridge lambda and the random matrix ``M = sum_mu X^T T(Y) X``. Here mu numbers the sentences, and the rows of X are
the tokens ``(x_l + p_l) / sqrt(d)``, with the encodings p_l. The spectrum of M has a bulk, and at most a few
eigenvalues above it: those of the encodings and those of the teacher.

For large d these eigenvalues, and the upper edge of the bulk, are values of one function zeta(V), which solves
``V = sum_a w_a c_a / (zeta - alpha c_a g(V))``. The edge is the minimum of zeta, or zeta at the end of the range
of V. Each direction has a condition on V, see `_signal`. If it holds at a V below that of the edge, zeta(V) is the
direction's eigenvalue, and it *separates* from the bulk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..averages.program import program
from ..averages.recipes import AnyNodes, make_rule, smooth_recipe
from ..averages.rules import Fields, Replicate, Rule, teacher_fields
from ..base.arrays import cholesky, inverse, one_by_one, precise
from ..base.derivatives import bisected_root
from ..base.errors import InputError, is_concrete, require, require_choice, with_values
from ..base.report import Description
from ..base.results import Replicated, Status
from ..model.checks import check_alpha, needs
from ..model.model import Model
from ..theory.observables import largest_eigenvalue
from ..theory.quantities import Quantity

DIRECTIONS = "encodings", "teacher"
_SCAN = 48  # intervals of V, or of log(alpha), in which the first root of a direction's condition is searched for
# Thresholds are searched in intervals of the range; an interval on either side of it reaches to the ends.
_ALPHA_RANGE, _ALPHA_ENDS = (1e-3, 1e4), (1e-12, 1e12)
_STRETCHES = 3.0, 10.0, 100.0  # factors of the nodes, on which the largest eigenvalue of T is searched for, too
# T counts as bounded if its largest eigenvalue grows at most by this ratio from far to very far fields, which are
# standard normals times these factors.
_FAR_FACTORS = 1e2, 1e4
_LARGEST_RATIO = 1.5


class SmallRates(eqx.Module):
    """Rates of `SmallStart` in every replicate of the averages, and whether the two `DIRECTIONS` separate."""

    encodings: Float[Array, "*R"]
    teacher: Float[Array, "*R"]
    bulk: Float[Array, "*R"]
    separates: Bool[Array, "*R 2"]


class SmallStart(Replicated):
    """Growth rates of a small student under full-batch gradient descent at one alpha.

    A component of the student grows as ``exp(rate tau)`` under ``dQ/dtau = -grad risk``. Its rate is an eigenvalue of
    the matrix M of the linearised gradient, minus lambda. Numbers are means over replicates; see `error_bar` for their
    bars.

    Attributes:
        model, alpha: the setting.
        replicates: the rates in every replicate of the averages.
        encodings: rate of the overlap with the encodings; that of the bulk if it does not separate.
        teacher: rate of the overlap with the teacher; that of the bulk if it does not separate.
        bulk: largest rate of a direction that overlaps with neither encodings nor teacher.
    """

    model: Model
    alpha: Float[Array, ""]
    replicates: SmallRates
    batch_probe = "alpha", 0
    SETTING = ("alpha",)
    SHOWN: ClassVar = {
        "encodings": "growth rate of this overlap, lam subtracted",
        "teacher": "growth rate of this overlap, lam subtracted",
        "bulk": "growth rate of a student without overlaps, lam subtracted",
    }
    FLAGS = "separates", "first"

    @property
    def separates(self) -> Bool[Array, "*batch 2"]:
        """Whether the eigenvalue of the encodings, and that of the teacher, lies outside the bulk."""
        return self.mean.separates > 0.5

    @property
    def first(self) -> str:
        """Direction that grows fastest: "encodings", "teacher", or "bulk" if neither of these separates."""
        if not bool(jnp.any(self.separates)):
            return "bulk"
        return "encodings" if bool(self.encodings >= self.teacher) else "teacher"

    @property
    def status(self) -> Int[Array, "*batch"]:
        """`converged` if all rates are finite."""
        rates = self.mean
        finite = jnp.isfinite(rates.encodings) & jnp.isfinite(rates.teacher) & jnp.isfinite(rates.bulk)
        return jnp.where(finite, Status.converged, Status.nonfinite)

    @property
    def title(self) -> str:
        return f"small start at alpha = {self.alpha:g}, {self.first} first"

    def to_dict(self) -> dict[str, Any]:
        separates = np.asarray(self.separates).tolist()
        return super().to_dict() | {"separates": dict(zip(DIRECTIONS, separates, strict=True))}

    def describe(self) -> Description:
        description = super().describe()
        separates = dict(zip(DIRECTIONS, self.separates, strict=True)) | {"bulk": True}
        rows = [r if separates[r[0]] else (*r[:2], "does not separate from the bulk") for r in description.numbers]
        return description._replace(numbers=rows)


def small_start(model: Model, alpha: Any, *, nodes: AnyNodes = None) -> SmallStart:
    """Return the growth rates of a small student under full-batch gradient descent, for large d.

    For small weights Q the gradient flow is linear, ``dQ/dtau = (M - lambda) Q``. The eigenvalues of the matrix M of
    the data form a bulk. With enough samples one eigenvalue of the encodings and one of the teacher lie above it. The
    direction with the largest rate emerges first if d is large and the start is small. Averages are over the teacher's
    fields alone. Works under `jit`, `vmap` and `grad`.

    Args:
        model: any smooth layer with covariances that are proportional to each other. At zero fields, its loss must have
            the same second derivative for all columns of the student and none between columns.
        alpha: samples per dimension, n / d.
        nodes: recipe of the averages, or number of nodes. By default a tensor grid over the teacher's fields if these
            are at most four, else 2^15 Sobol points.

    Returns:
        A `SmallStart` with the rates of encodings, teacher and bulk.

    Raises:
        InputError: alpha is not positive; the loss has kinks, is not even, couples or distinguishes the student's
            columns at zero, or its second derivative there is unbounded; the model has a penalty or classes of tokens;
            covariances are not proportional; or the teacher overlaps with the encodings.
    """
    model = _check(model)
    alpha = check_alpha(model, alpha)
    return SmallStart(model, alpha, _rates(model, alpha, _rule(model, nodes)))


def separation(model: Model, direction: str, *, nodes: AnyNodes = None) -> Quantity:
    """Return the alpha above which encodings or teacher separate from the bulk of a small start.

    Above it this overlap of a small student grows faster than noise under full-batch gradient descent, see
    `small_start`. It is searched between 0.001 and 10,000.

    Args:
        model, nodes: as in `small_start`.
        direction: "encodings" or "teacher".

    Returns:
        A `Quantity`; its status is `absent` if there is none.

    Raises:
        InputError: as in `small_start`; or there is no such direction.
    """
    model, direction = _check(model), str(require_choice(direction, "direction", DIRECTIONS))
    rule, index = _rule(model, nodes), jnp.asarray(DIRECTIONS.index(direction))
    event = {"encodings": "encodings separate", "teacher": "teacher separates"}[direction]
    meaning = f"{event} from the bulk of a small start"
    return Quantity.of_model(lambda m: _separations(m, rule, index), model, name="alpha", event=event, meaning=meaning)


def _rule(model: Model, nodes: AnyNodes) -> Rule:
    """Return the averages: of the teacher's fields alone by default, else over those of the student as well."""
    fields = Fields.of(model, student=0 if nodes is None else None)
    return make_rule(nodes, fields, smooth_recipe(fields, "population"))


def _check(model: Model) -> Model:
    """Check that the closed form holds for `model`, see `small_start`; return it as `check` does."""
    model = needs(model, "small starts", smooth=True, independent=True, orthogonal=True)
    if not is_concrete(model):
        return model
    with with_values():
        law = model.law()
        gamma = np.asarray(law.gamma)[np.asarray(law.weights) > 0]
        expected = np.mean(gamma, 1, keepdims=True) * np.asarray(_token_scales(model))
        is_product = np.abs(gamma - expected) <= 1e-6 * expected
        require(is_product, "law.gamma", gamma, "those of covariances Sigma_l = s_l Sigma")
        (L, r, _), (_, columns) = model.shape, model.columns
        normals = np.random.default_rng(0).standard_normal((64, L, columns))
        H, tops = jax.device_get(_curvatures(model, jnp.asarray(normals, model.lam.dtype)))
        alike = np.einsum("nlk,ab->nlakb", H[:, :, 0, :, 0], np.eye(r))
        if not np.allclose(H, alike, rtol=1e-4, atol=1e-6 * np.abs(H).max()):
            text = "must have a loss with the same second derivative at zero for all columns of the student, and none"
            raise InputError("model", f"{text} between columns, got {type(model).__name__}: use rank=1")
        far, very_far = tops
        if not very_far <= _LARGEST_RATIO * max(far, np.abs(H).max()):
            text = "must have a bounded target for small starts, as softmax attention does: the bulk else has no edge"
            raise InputError("model", f"{text}, got {type(model).__name__}")
    return model


def _hessian_at_zero(model: Model, y: Float[Array, "L _"]) -> Float[Array, "L r L r"]:
    """Return the second derivative of the loss at zero student fields.

    Args:
        y: fields of the teacher, followed by those of the noise if the labels have noise.
    """
    L, r, _ = model.shape
    return jax.hessian(lambda Z: model.loss(Z, *model.label(y)))(jnp.zeros((L, r), y.dtype))


def _T(model: Model, Y: Float[Array, "N L _"]) -> Float[Array, "N L L"]:
    """Return T of sentences with teacher fields Y, with rows and columns scaled by sqrt(s_l)."""
    scale = jnp.sqrt(_token_scales(model))
    T = -jax.vmap(lambda y: _hessian_at_zero(model, y)[:, 0, :, 0])(Y)
    return scale[:, None] * scale * T


def _eigenvalues(model: Model) -> Float[Array, " K"]:
    """Return the eigenvalues c of Sigma; an atom without weight gets their mean, so that it does not matter."""
    law = model.law()
    c = jnp.mean(law.gamma, 1)
    return jnp.where(law.weights > 0, c, law.weights @ c)


def _token_scales(model: Model) -> Float[Array, " L"]:
    """Return the factors s_l of the covariances, of mean one."""
    return model.trace / jnp.mean(model.trace)


@jax.jit
def _curvatures(model: Model, Y: Float[Array, "N L _"]) -> tuple[Float[Array, "N L r L r"], Float[Array, " 2"]]:
    """Return the numbers of `_check`: second derivatives at zero, and top eigenvalues of T far out and very far out.

    Args:
        Y: standard normals in place of the fields; `_FAR_FACTORS` stretch them for the eigenvalues.
    """
    tops = lax.map(lambda stretch: jnp.max(_top_eigenvalues(model, stretch * Y)), jnp.asarray(_FAR_FACTORS, Y.dtype))
    return jax.vmap(lambda y: _hessian_at_zero(model, y))(Y), tops


@jax.jit
def _top_eigenvalues(model: Model, Y: Float[Array, "N L _"]) -> Float[Array, " N"]:
    """Return the largest eigenvalue of T of every sentence."""
    return one_by_one(jnp.linalg.eigvalsh, _T(model, Y))[:, -1]


class _Sentences(NamedTuple):
    """The sentences at the nodes of one replicate."""

    T: Float[Array, "N L L"]
    eigenvalues: Float[Array, "N L"]  # of T
    normals: Float[Array, "N L t"]  # standard normals from which the teacher's fields are made
    weight: Float[Array, " N"]  # weights of the nodes
    end: Float[Array, ""]  # upper end of the range of V, where 1 - V T is positive definite for all sentences


@precise
def _sentences(model: Model, replicate: Replicate) -> _Sentences:
    """Evaluate T at the nodes of a replicate, and find where the range of V ends.

    It ends at 1 / sup T, over the fields of all sentences that are possible. The nodes alone may miss this supremum, so
    they are also stretched by `_STRETCHES`.
    """
    t = model.shape[2]

    def at_block(block: Any) -> tuple[Array, ...]:
        _, normals, weight = replicate.quadrature(block)

        def label_fields(stretch: float) -> Array:
            return jnp.moveaxis(teacher_fields(model, stretch * normals), 2, 0)

        own, far = label_fields(1.0), lax.stop_gradient(jnp.concatenate([label_fields(s) for s in _STRETCHES]))
        T = _T(model, own)
        eigenvalues = one_by_one(jnp.linalg.eigvalsh, T)
        tops = lax.stop_gradient(jnp.concatenate([eigenvalues[:, -1], _top_eigenvalues(model, far)]))
        fields = lax.stop_gradient(jnp.concatenate([own, far]))[jnp.argmax(tops)]
        return T, eigenvalues, jnp.moveaxis(normals[:, :t], 2, 0), weight, fields, jnp.max(tops)

    T, eigenvalues, normals, weight, fields, tops = lax.map(at_block, replicate.blocks())
    T, eigenvalues, normals = (a.reshape(-1, *a.shape[2:]) for a in (T, eigenvalues, normals))
    # Where T is largest its derivative in the fields is zero, so the fields count as constants.
    top = _top_eigenvalues(model, fields[jnp.argmax(tops)][None])[0]
    # Slightly below 1 / top, where G would be infinite.
    end = (1 - 100 * jnp.finfo(top.dtype).eps) / jnp.maximum(top, jnp.finfo(top.dtype).tiny)
    return _Sentences(T, eigenvalues, normals, weight.ravel(), end)


def _g(data: _Sentences, V: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return g(V) and its slope, from the eigenvalues of T alone: searches for the edge need nothing else."""
    G = data.eigenvalues / (1 - V * data.eigenvalues)
    return data.weight @ jnp.sum(G, 1), data.weight @ jnp.sum(G**2, 1)


def _first_zero(fn: Callable[[Array], Array], points: Float[Array, " N"]) -> tuple[Array, Array]:
    """Return the first root of a function, and whether there is one.

    Args:
        fn: a function that is negative at the first point, where it is not evaluated.
        points: ascending; a root is found if the function is positive at one of them.
    """
    above = lax.map(fn, lax.stop_gradient(points[1:])) > 0
    first = jnp.argmax(above)
    return bisected_root(fn, points[first], points[first + 1]), jnp.any(above)


def _eigenvalue(model: Model, alpha: Array, V: Array, g: Array) -> Float[Array, ""]:
    """Return zeta(V), the solution of ``V = sum_a w_a c_a / (zeta - alpha c_a g)``.

    Args:
        V: response.
        g: E tr G at V.
    """
    law, c = model.law(), _eigenvalues(model)
    mean = law.weights @ c
    if len(c) == 1:
        return c[0] / V + alpha * c[0] * g
    pole = jnp.max(jnp.where(c > 0, alpha * c * g, -jnp.inf))  # an atom of eigenvalue zero has no part in the sum

    # Above the pole the sum falls from infinity, and is at most (sum_a w_a c_a) / (zeta - pole).
    def excess(zeta: Array) -> Array:
        return V - law.weights @ (c / (zeta - alpha * c * g))

    return bisected_root(excess, pole, pole + mean / V * (1 + 1e-6))


def _responses(model: Model, alpha: Array, V: Array, g: Array) -> Float[Array, " K"]:
    """Return the responses of the atoms of Sigma, ``1 / (zeta - alpha c_a g)``."""
    return 1 / (_eigenvalue(model, alpha, V, g) - alpha * _eigenvalues(model) * g)


def _edge(model: Model, alpha: Array, data: _Sentences) -> Float[Array, ""]:
    """Return the response V at the edge of the bulk: where zeta(V) is least, or the end of the range of V."""
    law, c = model.law(), _eigenvalues(model)

    # Has the sign of d zeta / d V, by the derivative of the equation that zeta solves.
    def slope(V: Array) -> Array:
        g, g_slope = _g(data, V)
        return alpha * g_slope * (law.weights @ (c * _responses(model, alpha, V, g)) ** 2) - 1

    V = bisected_root(slope, jnp.zeros_like(alpha), data.end)
    return jnp.where(slope(lax.stop_gradient(data.end)) > 0, V, data.end)


@precise
def _signal(model: Model, alpha: Array, data: _Sentences, direction: Array, V: Array) -> Float[Array, ""]:
    """Return the number that must be one for zeta(V) to be the eigenvalue of a direction; it is less at small V.

    Args:
        direction: index in `DIRECTIONS`.
        V: response, at most that of the edge of the bulk.
    """
    law, c, scale = model.law(), _eigenvalues(model), jnp.sqrt(_token_scales(model))
    L, t = data.normals.shape[1:]
    G = data.T @ inverse(jnp.eye(L, dtype=V.dtype) - V * data.T)
    g = jnp.einsum("nll,n->", G, data.weight)
    responses = _responses(model, alpha, V, g)

    def encodings() -> Array:
        gram = jnp.einsum("a,akl,a->kl", law.weights, law.tau, responses) / (scale[:, None] * scale)
        return largest_eigenvalue(gram, alpha * jnp.einsum("nkl,n->kl", G, data.weight))

    def teacher() -> Array:
        whiten = inverse(cholesky(jnp.einsum("a,a,ast->st", law.weights, c, law.pi)))
        gram = whiten @ jnp.einsum("a,a,ast,a->st", law.weights, c**2, law.pi, responses) @ whiten.T
        # E sum_kl G_kl v_k v_l^T, with the teacher's normals v
        signal = jnp.einsum("nkl,nka,nlb,n->ab", G, data.normals, data.normals, data.weight)
        return largest_eigenvalue(gram, alpha * (signal - g * jnp.eye(t, dtype=V.dtype)))

    return lax.cond(direction == 0, encodings, teacher)


@program
def _rates(model: Model, alpha: Array, rule: Rule) -> SmallRates:
    """Return the rates of `small_start` in every replicate."""

    def rate(data: _Sentences, V: Array) -> Array:
        return _eigenvalue(model, alpha, V, _g(data, V)[0]) - model.lam

    def rates(replicate: Replicate) -> SmallRates:
        data = _sentences(model, replicate)
        edge = _edge(model, alpha, data)
        bulk = rate(data, edge)
        points = edge * jnp.linspace(0.0, 1.0, _SCAN + 1, dtype=edge.dtype)

        def rate_of(direction: Array) -> tuple[Array, Array]:
            V, separates = _first_zero(lambda V: _signal(model, alpha, data, direction, V) - 1, points)
            return jnp.where(separates, rate(data, V), bulk), separates

        values, separates = lax.map(rate_of, jnp.arange(len(DIRECTIONS)))
        return SmallRates(values[0], values[1], bulk, separates)

    return rule.each(rates)


@program
def _separations(model: Model, rule: Rule, direction: Array) -> Float[Array, " R"]:
    """Return the alpha of a threshold in every replicate; NaN if there is none.

    At this alpha the eigenvalue of the direction reaches the edge of the bulk.

    Args:
        direction: index in `DIRECTIONS`.
    """

    def threshold(replicate: Replicate) -> Array:
        data = _sentences(model, replicate)

        def excess(log_alpha: Array) -> Array:
            alpha = jnp.exp(log_alpha)
            return _signal(model, alpha, data, direction, _edge(model, alpha, data)) - 1

        low, high = np.log(_ALPHA_RANGE)
        first, last = np.log(_ALPHA_ENDS)
        points = np.concatenate([[first - 1, first], np.linspace(low, high, _SCAN + 1), [last]])
        log_alpha, exists = _first_zero(excess, jnp.asarray(points, model.lam.dtype))
        # If the direction separates already at the first end, its threshold lies below the range.
        return jnp.where(exists & (log_alpha > first), jnp.exp(log_alpha), jnp.nan)

    return rule.each(threshold)
