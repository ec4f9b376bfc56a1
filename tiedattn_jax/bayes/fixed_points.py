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

from ..averages.program import lane_by_lane, program
from ..averages.recipes import SOBOL_SIZES, AnyNodes, Sobol, make_rule, smooth_recipe
from ..averages.rules import Fields, Replicate, Rule
from ..base.arrays import either, positive_definite, precise
from ..base.errors import InputError, is_concrete, require, require_choice, require_takes, with_values
from ..base.kinds import with_other_forms
from ..base.report import Description, Row, picture
from ..base.results import MeanField, Replicated, Status
from ..model.checks import needs
from ..model.model import Model, Preimages
from ..model.overlaps import OrderNumber, symmetric
from ..theory.solve import check_alpha
from .channel import Channel, Posterior, channel, free_entropy, gen_error, posterior, sign_channel

_TOL = 1e-11  # relative change of the conjugates in a step of the map at which a search ends
_MAX_STEPS = 400
# Conjugates of the starts, and those at which a search ends with zero and with perfect overlap, in units of 1 / rho.
STARTS = {"uninformed": 1e-7, "informed": 1e7}
_ZERO, _PERFECT = 1e-8, 1e13
# Relative length of steps away from an unstable state, and where the conjugates are so small or so large, in units of
# 1 / rho, that no other state is near.
_GROWTH, _FAR_GROWTH, _FAR = 0.3, 9.0, (1e-2, 1e2)
_CUT = 0.9  # largest relative length of Newton's step
_RESOLUTION = 2.0  # sqrt(V / rho) over the spacing of a grid of preimages, below which the grid is too coarse
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
    gen_error = MeanField[Array]()
    free_entropy = MeanField[Array]()
    batch_probe = "alpha", 0
    SETTING = ("alpha",)
    SHOWN: ClassVar = {"q": "", "gen_error": "", "free_entropy": ""}
    FLAGS = ("hard",)

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


@with_other_forms
def bayes(model: Model, alpha: Any, *, nodes: AnyNodes = None, start: str | None = None) -> BayesPoint:
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
            depend on the teacher (omega is one); the teacher's fields do not have mean zero; or a teacher of two
            columns comes without nodes.
    """
    check_bayes(model)
    alpha = check_alpha(model, alpha)
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
        return lane_by_lane(_states)(model, alpha, rule, size, has_closed_form(model))

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
    provides = {
        "target": "for the Bayes-optimal learner",
        "preimages": "that says which fields of the teacher a label allows",
    }
    needs(model, purpose, even=False, provides=provides, ridge_only=True, **kind)
    require_takes(
        model.preimages, "preimages", ("Y", *["noise"] * bool(model.noise)), f" of a model with noise = {model.noise}"
    )
    if is_concrete(model):
        with with_values():
            _check_numbers(model)


def _check_numbers(model: Model) -> None:
    law, (L, _, t) = model.law(), model.shape
    if law.sentences is not None and np.any(np.abs(np.asarray(law.cross[:, L:])) > 1e-6):
        raise InputError("law.cross", "must be zero: the Bayes-optimal learner needs teacher's fields of mean zero")
    Y = np.random.default_rng(0).standard_normal((L, t + model.noise))
    Y[:, :t] *= float(model.field_scale)
    label, slope, error = _tried(model, jnp.asarray(Y, model.lam.dtype))
    depends = np.max(np.abs(np.asarray(slope))) * float(model.field_scale) > 1e-6
    require(depends, "model.target", "a constant", "a function of the teacher's fields, as with omega below one")
    require(np.asarray(label.noise) >= 0, "preimages(Y).noise", label.noise, "a variance, at least zero")
    require(np.asarray(error) < 1e-3, "preimages(Y).fields", label.fields, "fields of the same target as Y")


@eqx.filter_jit
def _tried(model: Model, Y: Float[Array, "L _"]) -> tuple[Preimages, Array, Array | float]:
    """Return the label of fields Y, the slope of their target, and the error of the targets of the preimages."""
    label = model.preimages(*model.label(Y))
    slope = jax.jacfwd(lambda Y: model.target(*model.label(Y)))(Y)
    return label, slope, 0.0 if model.noise else jnp.abs(jax.vmap(model.target)(label.fields) - model.target(Y))


def _label(model: Model) -> Preimages:
    """Return the preimages of the label of zero fields; only their kind and their noise are of interest."""
    return model.preimages(*model.label(jnp.zeros((model.shape[0], model.shape[2] + model.noise), model.lam.dtype)))


def noise_of(model: Model) -> Float[Array, ""]:
    """Return the variance of the noise of the teacher's fields in the labels."""
    return _label(model).noise


def has_closed_form(model: Model) -> bool:
    """Return whether labels give the fields up to a sign, and all tokens have the same law."""
    if not jax.eval_shape(_label, model).signs or model.law().sentences is not None:
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
def _states(model: Model, alpha: Array, rule: Rule, start: Array, closed_form: bool) -> BayesState:
    noise, spacing = noise_of(model), jax.eval_shape(_label, model).spacing

    def state(replicate: Replicate, solution: _Solution) -> BayesState:
        x, hats = posterior(model, solution.hats), solution.hats
        averages = sign_channel(model, x, noise) if closed_form else channel(model, x, replicate)
        entropy = free_entropy(model, alpha, x, hats, averages.log_evidence)
        entropy = jnp.where(solution.is_perfect, jnp.inf, entropy)
        is_coarse = jnp.min(jnp.linalg.eigvalsh(x.V)) <= (_RESOLUTION * spacing) ** 2 * jnp.max(model.rho)
        status = jnp.where((spacing > 0) & is_coarse, Status.unresolved, solution.status)
        x = either(solution.is_zero, Posterior(0 * x.q, x.q + x.V), x)
        # The roots that the error needs have no derivative at V = 0.
        error = jnp.where(solution.is_perfect, 0.0, gen_error(model, x, replicate))
        x = either(solution.is_perfect, Posterior(x.q + x.V, 0 * x.V), x)
        return BayesState(x.q, x.V, hats, error, entropy, solution.residual, status)

    if closed_form:
        solution = _search(model, alpha, start, lambda x: sign_channel(model, x, noise), alike=True)
        return rule.each(lambda replicate: state(replicate, solution))
    return rule.each(
        lambda replicate: state(replicate, _search(model, alpha, start, lambda x: channel(model, x, replicate)))
    )


class _Solution(NamedTuple):
    hats: Array
    residual: Array
    status: Array
    is_zero: Array
    is_perfect: Array


@precise
def _search(
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

    def iterate(change: Callable[[Array], Array], first: Array) -> tuple[Array, tuple[Array, Array]]:
        def body(s: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            v, _, count = s
            J, r = jax.jacfwd(lambda v: (change(v),) * 2, has_aux=True)(v)
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
        return v, (length, jnp.linalg.norm(v) / unit)

    def tangent_solve(linear: Callable[[Array], Array], y: Array) -> Array:
        return jnp.linalg.solve(jax.jacfwd(linear)(jnp.zeros_like(y)), y)

    first = (start * unit * jnp.broadcast_to(jnp.eye(t, dtype=dtype), shape)).ravel()
    v, (length, size) = lax.custom_root(change, first, iterate, tangent_solve, has_aux=True)
    is_zero, is_perfect = size <= _ZERO, size >= _PERFECT
    status = jnp.where((length <= tol) | is_zero | is_perfect, Status.converged, Status.max_steps)
    status = jnp.where(jnp.all(jnp.isfinite(v)), status, Status.nonfinite)
    return _Solution(conjugates(v), jnp.where(is_zero | is_perfect, 0.0, length), status, is_zero, is_perfect)
