"""Fixed points of the Bayes-optimal learner: the smallest error that any learner can reach.

# notation: as in `channel`; v are the conjugates qhat in one vector, F(v) their image.

The map of the conjugates is monotone, so iterating it from an uninformed start ends at the state with the smallest
overlap, which message passing reaches, and from an informed start at the one with the largest.
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

from ..averages.program import entry_by_entry, program
from ..averages.recipes import SOBOL_SIZES, AnyNodes, Sobol, make_rule, smooth_recipe
from ..averages.rules import Fields, Replicate, Rule
from ..base.arrays import definite, either, positive_definite, precise
from ..base.derivatives import Closure, implicit_root
from ..base.errors import InputError, is_concrete, require, require_choice, require_takes, with_values
from ..base.report import Description, Row, picture
from ..base.results import InTable, Replicated, Status
from ..model.checks import CHANCE, check_alpha, check_provides, needs
from ..model.model import Model, Preimages
from ..model.overlaps import OrderNumber, symmetric
from .channel import Channel, Posterior, free_entropy, label_channel, posterior, posterior_error, sign_channel

_TOL = 1e-11  # relative change of the conjugates in a step of the map at which a search ends
_MAX_STEPS = 400
# Conjugates of the starts, and those at which a search ends with zero and with perfect overlap, in units of 1 / rho.
STARTS = {"uninformed": 1e-7, "informed": 1e7}
_ZERO, _PERFECT = 1e-8, 1e13
# A search that settles at conjugates above this, in units of 1 / rho and over the tolerance, ends at infinity.
_KNOWN = 0.1
# Relative length of steps away from an unstable state, and where the conjugates are so small or so large, in units of
# 1 / rho, that no other state is near.
_GROWTH, _FAR_GROWTH, _FAR = 0.3, 9.0, (1e-2, 1e2)
_CUT = 0.9  # largest relative length of Newton's step
_RESOLUTION = 2.0  # sqrt(V / rho) over the spacing of a grid of preimages, below which the grid is too coarse
_SAME_PI = 1e-5  # relative difference of the teacher's second moments at two atoms that may be rounding
_BLIND = 1e-3  # change of a target along some direction of the fields, relative to the largest, that counts as none
_SAME = 1e-6  # relative difference of the overlaps of two starts above which they are two states


class BayesState(eqx.Module):
    """A state of the Bayes-optimal learner in every replicate of the averages: all arrays lead with that axis."""

    q: Float[Array, "*R S t t"]
    V: Float[Array, "*R S t t"]
    conjugates: Float[Array, "*R S t t"]
    gen_error: Float[Array, "*R"]
    free_entropy: Float[Array, "*R"]
    residual: Float[Array, "*R"]
    status: Int[Array, "*R"]


class BayesPoint(Replicated):
    """The Bayes-optimal learner at one alpha. Numbers are means over replicates; see `error_bar` for their bars.

    Under `vmap` all numbers lead with the axis of the settings.

    Attributes:
        model, alpha: the setting.
        replicates: the state in every replicate of the averages.
        other: the state from the other start, if both were asked for, else None.
        start: "uninformed" or "informed" if only this state was asked for, else None.
        q: overlap of the posterior mean with the teacher, ``<Q*>^T Sigma_l <Q*> / d``, a number for two tokens and one
            column, as in `FixedPoint`. `mean.q` contains those of all tokens, (S, t, t).
        gen_error: test error of the optimal predictor; no learner has a smaller one.
        free_entropy: free entropy per dimension, up to a constant of the target times alpha; infinite if the teacher
            is known.
    """

    model: Model
    alpha: Float[Array, ""]
    replicates: BayesState
    other: BayesState | None
    start: str | None = eqx.field(static=True)
    q = OrderNumber("mean")
    batch_probe = "alpha", 0
    SETTING = ("alpha",)
    SHOWN: ClassVar = {"q": "overlap of the posterior mean with the teacher", "gen_error": "", "free_entropy": ""}
    FLAGS = ("hard",)

    @property
    def in_table(self) -> InTable:
        return InTable("gen_error", headline=lambda table: "the optimal learner")

    @property
    def status(self) -> Int[Array, "*batch"]:
        """The worst `Status` over the replicates and, if there are two, over both starts."""
        states = [s.status for s in (self.replicates, self.other) if s is not None]
        return jnp.max(jnp.stack(states), (0, -1))

    @property
    def hard(self) -> Bool[Array, "*batch"]:
        """Whether the state from the other start differs: message passing then stays below the optimal overlap."""
        if self.other is None:
            return jnp.zeros(jnp.shape(self.alpha), bool)
        rho, axis = self.replicates.q + self.replicates.V, self.replicate_axis
        difference = jnp.abs(jnp.mean(self.replicates.q - self.other.q, axis))
        return jnp.max(difference, (-3, -2, -1)) > _SAME * jnp.max(rho, (-4, -3, -2, -1))

    @property
    def title(self) -> str:
        kind = "Bayes-optimal" if self.start is None else f"Bayes-optimal, {self.start} start"
        return f"{kind} at alpha = {self.alpha:g}"

    def describe(self) -> Description:
        description, is_known = super().describe(), np.isposinf(self.free_entropy)
        known = {
            "free_entropy": ("infinite", "the teacher is known"),
            "gen_error": ("0", "exact"),
            "q": ("rho", "exact"),
        }
        rows = [(row[0], *known[row[0]]) if is_known else row for row in description.numbers]
        return description._replace(numbers=rows)

    def details(self) -> list[Row]:
        if not self.hard or self.other is None:
            return []
        text = "hard phase: the state from the other start, which has the smaller free entropy"
        return [("q", f"{float(jnp.mean(self.other.q)):.6g}", text)]

    plot = picture(
        "theory.optimal_figure",
        "overlap and test error against alpha, for a result under `vmap`",
        "overlap",
        "gen_error",
    )


def solve(model: Model, alpha: Any, *, nodes: AnyNodes = None, start: str | None = None) -> BayesPoint:
    """Solve for the Bayes-optimal learner: it knows the law of the data and of the teacher, and the form of the target.

    Its test error is a lower bound for that of every learner. The labels reveal the target's attention matrix, so that
    the learner sees T(Y) of every sentence; what this says of Y is declared by `Model.preimages`. Neither omega nor A
    nor the encodings matter as long as omega is below one, because they are known. The teacher's entries are Gaussian
    with the second moments of the law.

    The function works under `jit`, `vmap` and `grad`. The implicit function theorem gives derivatives of every order.

    Args:
        model: the data and the target; `lam` and a ridge do not matter.
        alpha: samples per dimension, n / d.
        nodes: recipe of the averages over two draws of the teacher's fields, or number of nodes. By default a tensor
            grid if labels give the teacher's fields up to a sign and there are few fields, else 2^13 Sobol points. A
            teacher of two columns needs them, as it takes minutes.
        start: "uninformed" for the state that message passing reaches from a random start, "informed" for the one that
            it reaches from the teacher. By default both are solved, and the one with the larger free entropy, which is
            the optimal one, is returned; `hard` says whether they differ.

    Returns:
        A `BayesPoint`. Below weak recovery its overlap is zero; where the teacher is recovered exactly, q is rho.

    Raises:
        InputError: alpha is not positive; the model has a penalty, no `target` or no `preimages`; its target does not
            depend on the teacher (omega is one); the teacher's fields do not have mean zero; the teacher points along
            the encodings, or has other second moments at other atoms; preimages do not fit the target; or a teacher of
            two columns comes without nodes.
    """
    check_bayes(model)
    alpha = if_allowed(model, check_alpha(model, alpha))
    if start is not None:
        start = require_choice(start, "start", STARTS)
    if nodes is None and jax.eval_shape(_label, model).spacing:
        text = "must be given for a teacher of two columns: the default takes about seven minutes on two cores. Pass"
        raise InputError(
            "nodes", f"{text} nodes=Sobol(2**8, replicates=2) for one, Sobol({SOBOL_SIZES['label grids']}) for seven"
        )
    rule = averages_of(model, nodes)

    def state(name: str) -> BayesState:
        size = jnp.asarray(STARTS[name], alpha.dtype)
        return entry_by_entry(_bayes_states)(model, alpha, rule, size, has_closed_form(model))

    if start is not None:
        return BayesPoint(model, alpha, state(start), None, start)
    low, high = map(state, STARTS)
    has_high = jnp.mean(high.free_entropy) > jnp.mean(low.free_entropy)
    return BayesPoint(model, alpha, either(has_high, high, low), either(has_high, low, high), None)


def check_bayes(model: Model, purpose: str = "the Bayes-optimal learner", **kind: Any) -> None:
    """Raise an `InputError` unless the model has a Bayes-optimal learner that `bayes` can describe.

    Args:
        model: a layer and its data.
        purpose, kind: what else a computation needs, as in `needs`.
    """
    needs(model, purpose, even=False, **kind)
    check_provides(model, "target", "for the Bayes-optimal learner")
    _check_preimages(model)
    if is_concrete(model):
        with with_values():
            for condition, name, value, requirement in _requirements(model):
                require(condition, name, value, requirement)


def _check_preimages(model: Model) -> None:
    """Raise an `InputError` unless a class of the model says which fields of the teacher its labels allow."""
    name, t = type(model).__name__, model.shape[2]
    owner = next(kind for kind in type(model).__mro__ if "preimages" in vars(kind))
    arguments = ("Y", "noise") if model.noise else ("Y",)
    if model.noise and owner is not type(model):
        try:
            require_takes(model.preimages, "preimages", arguments)
        except InputError:
            text = f"must have a method `preimages(Y, noise)`, as its labels have noise, got {name}"
            text += "" if owner is Model else f" with that of {owner.__name__} for labels without noise"
            advice = (
                f"return tiedattn_jax.bayes.orbit(Y + s * noise, s**2)` for a target of Y + s * noise, with noise = {t}"
            )
            raise InputError("model", f"{text}. Write `{advice}; other labels have no Bayes-optimal learner") from None
    check_provides(model, "preimages", "that says which fields of the teacher a label allows")
    require_takes(model.preimages, "preimages", arguments, f" of a model with noise = {model.noise}")


def _requirements(model: Model) -> list[tuple[Array, str, Any, str]]:
    """Return what the numbers of a model must satisfy, each with the argument, its value and the requirement."""
    law, (L, _, t), dtype = model.law(), model.shape, model.lam.dtype
    mean = jnp.zeros(()) if law.sentences is None else law.cross[:, L:]
    pi, tau, cross = (jnp.tensordot(law.weights, a, 1) for a in (law.pi, law.tau, law.cross))
    has_weight = (law.weights > 0)[:, None, None]
    scatter = jnp.max(jnp.where(has_weight, jnp.abs(law.pi - pi), 0.0)) / jnp.max(jnp.abs(pi))
    lengths, sizes = (jnp.sqrt(jnp.maximum(jnp.diagonal(a), jnp.finfo(dtype).tiny)) for a in (tau, pi))
    cosine = jnp.max(jnp.abs(cross) / lengths[:, None] / sizes)
    Y = np.random.default_rng(0).standard_normal((L, t + model.noise))
    scale = jnp.concatenate([jnp.full(t, model.field_scale, dtype), jnp.ones(model.noise, dtype)])
    shape = jax.eval_shape(_label, model).noise.shape
    require(
        shape in ((), (L,)), "preimages(Y).noise", f"shape {shape}", f"one variance, or {L} of them, one of each token"
    )
    label, slope, error, spread = _tried(model, jnp.asarray(Y, dtype) * scale)
    J = slope.reshape(L * L, -1)
    J /= jnp.maximum(jnp.linalg.norm(J), jnp.finfo(dtype).tiny)
    is_seen = definite((J.T @ J - _BLIND**2 * jnp.eye(J.shape[1], dtype=dtype))[..., None])
    owner = next(kind for kind in type(model).__mro__ if "preimages" in vars(kind))
    remedy = "" if owner is type(model) else f": those of {owner.__name__} do not fit, write `preimages` of its own"
    learner = "the Bayes-optimal learner"
    return [
        (jnp.abs(mean) <= 1e-6, "law.cross", mean, f"zero for classes: {learner} needs teacher's fields of mean zero"),
        (cosine < CHANCE, "law.cross", f"cosines up to {_digits(cosine)}",
         f"zero up to chance: {learner} knows the encodings, and so the teacher along them"),
        (scatter <= _SAME_PI, "law.pi", f"relative differences up to {_digits(scatter)}",
         f"the same at all atoms: {learner} does not know the entries of a drawn teacher, nor which ones of a sparse "
         "teacher are zero. Pass the law with their mean, and cross zero"),
        (jnp.max(jnp.abs(slope)) * model.field_scale > 1e-6, "model.target", "a constant",
         "a function of the teacher's fields, as with omega below one"),
        (label.noise >= 0, "preimages(Y).noise", label.noise, "a variance, at least zero"),
        (error < 1e-3, "preimages(Y).fields", label.fields, f"fields of the same target as Y{remedy}"),
        ((not label.signs) | is_seen, "preimages(Y)", "two signs",
         "all fields of the same target, which many fields near Y have here"),
        (spread <= 1e-3 * jnp.maximum(label.noise, 1), "preimages(Y, noise).noise", label.noise,
         "the variance of the noise on the teacher's fields"),
    ]  # fmt: skip


def _digits(value: Array) -> str:
    return f"{value:.2g}" if is_concrete(value) else ""


def if_allowed(model: Model, numbers: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return numbers, or NaN where a model whose numbers jax traces has no Bayes-optimal learner."""
    if is_concrete(model):
        return numbers
    return jnp.where(jnp.all(jnp.stack([jnp.all(row[0]) for row in _requirements(model)])), numbers, jnp.nan)


@eqx.filter_jit
def _tried(model: Model, Y: Float[Array, "L _"]) -> tuple[Preimages, Array, Array, Array]:
    """Return the label of fields Y, the slope of their target, and errors of what the preimages say.

    These are the error of the targets of the preimages, without noise, and that of the variance of the noise if the
    preimages are two signs.
    """
    fields, *noise = model.label(Y)
    silent = [jnp.zeros_like(a) for a in noise]
    label = model.preimages(fields, *noise)
    slope = jax.jacfwd(lambda fields: model.target(fields, *noise))(fields)
    error = jnp.abs(jax.vmap(lambda U: model.target(U, *silent))(label.fields) - model.target(fields, *noise))
    spread = jnp.zeros(())
    if noise and label.signs:
        J = jax.jacfwd(lambda noise: model.preimages(*[fields, noise]).fields[0].ravel())(noise[0])
        J = J.reshape(fields.size, -1)
        spread = jnp.max(jnp.abs(J @ J.T - label.noise * jnp.eye(len(J))))
    return label, slope, error, spread


def _label(model: Model) -> Preimages:
    """Return the preimages of the label of zero fields; only their kind and their noise are of interest."""
    return model.preimages(*model.label(jnp.zeros((model.shape[0], model.shape[2] + model.noise), model.lam.dtype)))


def noise_of(model: Model) -> Float[Array, "*tokens"]:
    """Return the variance of the noise of the teacher's fields in the labels, of all tokens or of each."""
    return _label(model).noise


def has_closed_form(model: Model) -> bool:
    """Return whether labels give the fields up to a sign, and all tokens have the same law."""
    label = jax.eval_shape(_label, model)
    if not label.signs or label.noise.ndim or model.law().sentences is not None:
        return False
    if getattr(model, "spectrum", 0) is None:  # isotropic tokens, also while jax traces sigma
        return True
    gamma = model.law().gamma
    return is_concrete(gamma) and bool(np.all(np.asarray(gamma) == np.asarray(gamma)[:, :1]))


def averages_of(model: Model, nodes: AnyNodes) -> Rule:
    """Return the averages that `nodes` asks for, over two draws of the teacher's fields from the same posterior."""
    fields = Fields.of(model, student=model.columns[1])
    if has_closed_form(model):  # only the test error is averaged over nodes
        return make_rule(nodes, fields, smooth_recipe(fields, "optimal"))
    size = "label grids" if jax.eval_shape(_label, model).spacing else "labels"
    return make_rule(nodes, fields, Sobol(SOBOL_SIZES[size]))


@program
def _bayes_states(model: Model, alpha: Array, rule: Rule, start: Array, closed_form: bool) -> BayesState:
    noise, spacing = noise_of(model), jax.eval_shape(_label, model).spacing
    of_all = (
        _fixed_point(model, alpha, start, lambda x: sign_channel(model, x, noise), alike=True) if closed_form else None
    )

    def state(replicate: Replicate) -> BayesState:
        solution = of_all or _fixed_point(model, alpha, start, lambda x: label_channel(model, x, replicate))
        x, hats = posterior(model, solution.hats), solution.hats
        averages = sign_channel(model, x, noise) if closed_form else label_channel(model, x, replicate)
        entropy = free_entropy(model, alpha, x, hats, averages.log_evidence)
        entropy = jnp.where(solution.is_perfect, jnp.inf, entropy)
        is_coarse = jnp.min(jnp.linalg.eigvalsh(x.V)) <= (_RESOLUTION * spacing) ** 2 * jnp.max(model.rho)
        status = jnp.where((spacing > 0) & is_coarse, Status.unresolved, solution.status)
        x = either(solution.is_zero, Posterior(0 * x.q, x.q + x.V), x)
        # The roots that the error needs have no derivative at V = 0.
        error = jnp.where(solution.is_perfect, 0.0, posterior_error(model, x, replicate))
        x = either(solution.is_perfect, Posterior(x.q + x.V, 0 * x.V), x)
        return BayesState(x.q, x.V, hats, error, entropy, solution.residual, status)

    return rule.each(state)


class _Solution(NamedTuple):
    hats: Array
    residual: Array
    status: Array
    is_zero: Array
    is_perfect: Array


@precise
def _fixed_point(
    model: Model, alpha: Array, start: Array, averages: Callable[[Posterior], Channel], *, alike: bool = False
) -> _Solution:
    """Return the fixed point of ``qhat = alpha E[g g^T]`` that a start leads to, with its implicit derivatives.

    Args:
        start: size of the conjugates at the start, in units of 1 / rho.
        alike: whether all tokens have the same conjugates, of which v then contains those of the first.
    """
    t, dtype, rho = model.shape[2], alpha.dtype, lax.stop_gradient(model.rho)
    shape = (1 if alike else model.law().gamma.shape[1], t, t)
    unit, tol = 1 / jnp.max(rho), jnp.maximum(_TOL, 20 * jnp.finfo(dtype).eps)

    def conjugates(v: Array) -> Array:
        return jnp.broadcast_to(v.reshape(shape), (model.law().gamma.shape[1], t, t))

    def change(v: Array) -> Array:
        information = averages(posterior(model, conjugates(v))).information
        return alpha * information[: shape[0]].ravel() - v

    first = (start * unit * jnp.broadcast_to(jnp.eye(t, dtype=dtype), shape)).ravel()
    closed = Closure(change, first)
    frozen = lax.stop_gradient(closed)

    def body(s: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        v, _, count = s
        J, r = jax.jacfwd(lambda v: (frozen(v),) * 2, has_aux=True)(v)
        size = jnp.linalg.norm(v)
        newton = -jnp.linalg.solve(J, r)
        # Where the map contracts, Newton's step has the direction of the map's; elsewhere the map leads away from
        # an unstable state, and its steps are made longer.
        contracts = (jnp.vdot(newton, r) > 0) & jnp.all(jnp.isfinite(newton))
        length = jnp.linalg.norm(r) / size
        is_far = (size < _FAR[0] * unit) | (size > _FAR[1] * unit)
        step = jnp.where(contracts, newton, r * jnp.maximum(1.0, jnp.where(is_far, _FAR_GROWTH, _GROWTH) / length))
        longest = jnp.where(is_far & ~contracts, _FAR_GROWTH, _CUT)
        step = step * jnp.minimum(1.0, longest * size / jnp.linalg.norm(step))
        # The image of the map is positive definite; other steps may lead to conjugates that are not.
        step = jnp.where(positive_definite(symmetric((v + step).reshape(shape))), step, r)
        ended = length <= tol
        return jnp.where(ended, v, v + step), length, count + 1

    def unfinished(s: tuple[Array, Array, Array]) -> Array:
        size = jnp.linalg.norm(s[0]) / unit
        return (s[1] > tol) & (s[2] < _MAX_STEPS) & (size > _ZERO) & (size < _PERFECT)

    v, length, _ = lax.while_loop(unfinished, body, (first, jnp.asarray(jnp.inf, dtype), jnp.asarray(0)))
    size = jnp.linalg.norm(v) / unit
    v = jnp.where(jnp.isfinite(length), implicit_root(closed, v), jnp.nan)
    # Where a step of the map is as good as zero, conjugates as large as this are infinite, if labels are exact.
    is_settled = (length <= tol) & (tol * size >= _KNOWN) & (jnp.min(noise_of(model)) <= 0)
    is_zero, is_perfect = size <= _ZERO, (size >= _PERFECT) | is_settled
    status = jnp.where((length <= tol) | is_zero | is_perfect, Status.converged, Status.max_steps)
    status = jnp.where(jnp.all(jnp.isfinite(v)), status, Status.nonfinite)
    return _Solution(conjugates(v), jnp.where(is_zero | is_perfect, 0.0, length), status, is_zero, is_perfect)
