"""The saddle-point equations (7)-(8) as a map of the overlaps, at one setting and on one replicate of the averages.

`Equations` contains a model, an alpha, a replicate and the free order parameters of a branch. Its methods give the map
and its Jacobian to Newton's method. Other methods give what follows from a fixed point: its predictions, its
derivatives in the numbers of the model and alpha, and the total derivatives of any function of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from ..averages.program import entry_by_entry, program
from ..averages.rules import Points, Replicate, Rule, average, average_of_weighted, search_block
from ..base.arrays import Number, StateArray, spread_to, zeros
from ..base.derivatives import instantiated, with_tangent
from ..base.results import Settings
from ..model.model import Model, over_kinds
from ..model.overlaps import Conjugates, Coordinates, Overlaps, impose, sentence_overlaps
from .newton import Answer, Newton, Outcome, deflated_solve
from .observables import diagnose, gen_error_in, gen_error_linear_in, moments
from .potentials import (
    Sums,
    channel_by_model,
    channel_gradient,
    conjugates,
    free_energy,
    gradient_at,
    no_sums,
    overlaps,
    train_loss_partials,
)
from .states import State


class Evaluation(eqx.Module):
    """Results of an evaluation of the map at given overlaps, besides the new overlaps.

    Attributes:
        conjugates: conjugate order parameters at the overlaps.
        channel: channel potential M.
        train_loss: minus the free energy; at a fixed point this is the training loss.
        sums: the further sums over the nodes that the caller requested.
    """

    conjugates: Conjugates
    channel: Float[Array, ""]
    train_loss: Float[Array, ""]
    sums: PyTree


# A function of a vector that returns a setting and overlaps.
Places = Callable[[Float[Array, " k"]], tuple[Model, Float[StateArray, ""], Overlaps]]


class Equations(eqx.Module):
    """The map F of the overlaps at one setting; the equations of many lanes have an axis of lanes in every array.

    Attributes:
        model, alpha: the setting.
        replicate: replicate of the averages.
        free: 1.0 for theta and for m if the branch leaves them free, else 0.0. An order parameter that is not free
            is zero, and so is its conjugate.
    """

    model: Model
    alpha: Float[StateArray, "*lanes"]
    replicate: Replicate
    free: Float[StateArray, "*lanes 2"]

    @property
    def coordinates(self) -> Coordinates:
        """Coordinates of the overlaps on the branch."""
        return Coordinates(self.model, self.free)

    def image(
        self, x: Overlaps, averages: tuple[Float[Array, ""], Overlaps], sums: PyTree = ()
    ) -> tuple[Overlaps, Evaluation]:
        """Return the new overlaps, given the channel potential and its gradient at x."""
        M, gradient = averages
        hats = impose(conjugates(self.alpha, gradient), self.free)
        return overlaps(self.model, hats), Evaluation(hats, M, -free_energy(self.model, self.alpha, x, hats, M), sums)

    def step(self, x: Overlaps) -> tuple[Overlaps, Evaluation]:
        """Take one undamped step of state evolution from overlaps x."""
        M, gradient, _ = channel_gradient(self.model, x, self.replicate)
        return self.image(x, (M, gradient))

    def answer(self, v: Float[Array, " n"]) -> Answer:
        """Evaluate the map at coordinates v for Newton's method; the answer has the `Evaluation` as a vector."""
        F, DF, evaluation = _image_and_jacobian(self, v)
        return Answer(F, DF, evaluation.sums[0]["unresolved"], ravel_pytree(evaluation)[0])

    def empty_evaluation(self, v: Float[Array, " n"]) -> Float[Array, " k"]:
        """Return NaNs of the shape of `Answer.evaluation`: the value of that field before the first answer."""
        template = jax.eval_shape(self.answer, v).evaluation
        return jnp.full(template.shape, jnp.nan, template.dtype)

    def search(self, v: Float[Array, " n"], settings: Settings, attempts: Number, stall: Number) -> Outcome:
        """Run a whole search from coordinates v, see `Newton`.

        With zero attempts, or from coordinates that are not finite, it ends before its first step.
        """
        newton = Newton(self.coordinates, settings, stall, attempts)
        ended = (attempts == 0) | ~jnp.all(jnp.isfinite(v))
        first = newton.begin(v, self.empty_evaluation(v))._replace(ended=ended)
        return lax.while_loop(lambda s: ~s.ended, lambda s: newton.advance(s, self.answer(s.trial)), first).outcome

    def state(self, outcome: Outcome) -> State:
        """Return the state at the outcome of a search, from the evaluation that the outcome contains."""
        template = jax.eval_shape(lambda v: _image_and_jacobian(self, v)[2], outcome.v)
        unravel = ravel_pytree(zeros(template))[1]
        x, evaluation = self.coordinates.unpack(outcome.v), unravel(outcome.evaluation)
        sums, M_by_model = evaluation.sums
        return State(
            overlaps=x,
            conjugates=evaluation.conjugates,
            train_loss=evaluation.train_loss,
            gen_error=gen_error_in(self.model, x, self.replicate),
            gen_error_linear=gen_error_linear_in(self.model, self.replicate),
            residual=outcome.residual,
            status=outcome.status,
            diagnostics=diagnose(self.model, self.alpha, x, evaluation.conjugates, sums),
            train_loss_partials=train_loss_partials(
                self.model, self.alpha, evaluation.channel, M_by_model, evaluation.conjugates
            ),
        )

    def gradient(
        self, x: Overlaps, fn: Callable[[Model, Float[Array, ""], Overlaps], Float[Array, ""]]
    ) -> tuple[Float[Array, ""], Model, Float[Array, ""]]:
        """Return `fn(model, alpha, x)` at a fixed point x, and its total derivatives in the model and in alpha.

        The total derivatives include the motion of the overlaps along the branch. It follows from the implicit function
        theorem, with the dense Jacobian of the residual.
        """
        linearised = self._linearised(x)
        value, columns, _ = value_and_columns(lambda u: (fn(*linearised.setting(u)), ()), linearised.u)
        return value, *linearised.numbers(linearised.total(columns))

    def derivatives(self, x: Overlaps) -> dict[str, PyTree[Float[Array, "... k"]]]:
        """Return the derivatives of a fixed point and of its predictions, by field of `State`.

        They are derivatives in the k numbers of the setting: the numbers of the model, flattened, and alpha.
        """
        linearised = self._linearised(x)

        def errors(u: Float[Array, " k"]) -> tuple[dict[str, Float[Array, ""]], tuple[()]]:
            model, _, x = linearised.setting(u)
            values = gen_error_in(model, x, self.replicate), gen_error_linear_in(model, self.replicate)
            return dict(zip(("gen_error", "gen_error_linear"), values, strict=True)), ()

        _, columns, _ = value_and_columns(errors, linearised.u)
        predictions = {"conjugates": linearised.partials.conjugates, "train_loss": linearised.partials.train_loss}
        overlaps = jax.vmap(self.coordinates.unpack, -1, -1)(linearised.response)
        return {"overlaps": overlaps} | jax.tree.map(linearised.total, columns | predictions)

    def fold_gradient(self, x: Overlaps) -> tuple[Model, Float[Array, ""]]:
        """Return ``l . d_p F`` at a fold, for p the model and alpha, with l the left null vector of I - DF.

        Along the curve of folds in p, ``l . d_p F . dp = 0``.
        """
        linearised = self._linearised(x)
        null = jnp.linalg.svd(linearised.matrix + linearised.gauge.T @ linearised.gauge)[0][:, -1]
        return linearised.numbers(null @ linearised.columns)

    def _linearised(self, x: Overlaps) -> _Linearised:
        coordinates = self.coordinates
        v, (p, numbers) = coordinates.pack(x), ravel_pytree((self.model, self.alpha))
        n, u = v.shape[0], jnp.concatenate([v, p])

        def setting(u: Float[Array, " k"]) -> tuple[Model, Float[Array, ""], Overlaps]:
            return *numbers(u[n:]), coordinates.unpack(u[:n])

        _, columns, partials = expansion(setting, self.replicate, u, self.free, with_partials=True)
        gauge = coordinates.gauge(x, jnp.ones_like(v))
        return _Linearised(
            u, jnp.eye(n, dtype=v.dtype) - columns[:, :n], gauge, columns[:, n:], partials, setting, numbers
        )


class _Linearised(NamedTuple):
    """The map F at a fixed point, to first order in the n overlaps and in the k numbers of a setting.

    Attributes:
        u: the overlaps and the numbers.
        matrix: I - DF.
        gauge: tangents of the gauge orbit, along which `matrix` is singular.
        columns: dF / d numbers.
        partials: derivatives of the `Evaluation` in u, (..., n + k).
        setting: function that turns u into (model, alpha, overlaps).
        numbers: function that turns a vector into (model, alpha).
    """

    u: Float[Array, " n+k"]
    matrix: Float[Array, "n n"]
    gauge: Float[Array, "G n"]
    columns: Float[Array, "n k"]
    partials: Evaluation
    setting: Places
    numbers: Callable[[Float[Array, " k"]], tuple[Model, Float[Array, ""]]]

    @property
    def response(self) -> Float[Array, "n k"]:
        """Derivatives of the fixed point in the numbers, ``(I - DF)^{-1} d_p F``."""
        return deflated_solve(self.matrix, self.gauge, self.columns)

    def total(self, by_u: Float[Array, "*shape n_and_k"]) -> Float[Array, "*shape k"]:
        """Turn derivatives in u into total derivatives in the numbers along the branch."""
        n = len(self.matrix)
        return by_u[..., n:] + by_u[..., :n] @ self.response


@program
def searched_state(equations: Equations, start: Overlaps, settings: Settings, attempts: Number, stall: Number) -> State:
    """Run a whole search and return its state; on a CPU this is the work of a lane."""
    return equations.state(equations.search(equations.coordinates.pack(start), settings, attempts, stall))


@with_tangent
def with_tangents(primals: tuple, tangents: tuple) -> State:
    """Return the first argument, ``(states, model, alpha, nodes, free)``, with the derivatives of fixed points.

    They are derivatives in the numbers of the model and in alpha, and zero for a replicate without a state.
    """
    states, model, alpha, nodes, free = primals
    state_tangents, *setting_tangents = tangents[:3]
    derivatives = entry_by_entry(_derivatives)(model, alpha, nodes, free, states.overlaps)
    direction, exists = ravel_pytree(instantiated((model, alpha), tuple(setting_tangents)))[0], states.has_state

    def of_states(a: Float[Array, "R ..."]) -> Float[Array, "R ..."]:
        return jnp.where(spread_to(exists, a), a, 0.0)

    # Reverse mode multiplies slopes with cotangents, and either can be NaN without a state: both are set to zero.
    moving = jax.tree.map(lambda slope: of_states(of_states(slope) @ direction), derivatives)
    return eqx.tree_at(lambda s: [getattr(s, k) for k in moving], state_tangents, [*moving.values()], is_leaf=_is_none)


def _is_none(leaf: Any) -> bool:
    return leaf is None


@program
def _derivatives(
    model: Model, alpha: Float[Array, ""], nodes: Rule, free: Float[Array, " 2"], xs: Overlaps
) -> dict[str, PyTree[Float[Array, "R ... k"]]]:
    """Return `Equations.derivatives` of every replicate."""

    def replicate_derivatives(pair: tuple[Replicate, Overlaps]) -> dict[str, PyTree[Float[Array, "... k"]]]:
        replicate, x = pair
        return Equations(model, alpha, replicate, free).derivatives(x)

    return lax.map(replicate_derivatives, (nodes.stack, xs))


@with_tangent
def first_order(primals: tuple, tangents: tuple) -> Any:
    """Return the first argument of ``(tree, numbers)``, a function of the numbers; its derivatives raise a TypeError.

    Without this the derivatives would silently be zero.
    """
    text = "transitions and states with 1RSB have first derivatives only"
    raise TypeError(f"{text}: take differences of `sensitivities` or `loss_by_model` for the second")


def expansion(
    setting: Places,
    replicate: Replicate,
    u: Float[Array, " k"],
    free: Float[StateArray, " 2"],
    sums: Sums = no_sums,
    *,
    with_partials: bool = False,
) -> tuple[Float[Array, " n"], Float[Array, "n k"], Evaluation]:
    """Evaluate the undamped map on coordinates, F(u), and its derivatives dF/du.

    Args:
        setting: function that turns a vector u of numbers into model, alpha and overlaps.
        sums: further sums over the nodes; they carry no derivative.
        with_partials: whether the result can be differentiated again, in both modes, and contains the derivatives of
            the `Evaluation` in place of its values.

    Returns:
        F, dF/du, and the `Evaluation`, or its derivatives in u with the axis of u last.
    """
    averager = average if with_partials else average_of_weighted
    averages, slopes, extra_sums = averages_expansion(setting, replicate, u, sums, averager=averager)

    def finish(u: Float[Array, " k"], M: Float[Array, ""], gradient: Overlaps) -> tuple[Float[Array, " n"], Evaluation]:
        model, alpha, x = setting(u)
        equations = Equations(model, alpha, replicate, free)
        new, evaluation = equations.image(x, (M, gradient), extra_sums)
        return equations.coordinates.pack(new), evaluation

    def column(*d: PyTree) -> tuple[Float[Array, " n"], Float[Array, " n"], Evaluation]:
        if not with_partials:
            return jax.jvp(finish, (u, *averages), d, has_aux=True)
        (F, _), (derivative, partials) = jax.jvp(finish, (u, *averages), d)
        return F, derivative, partials

    out_axes = None, -1, -1 if with_partials else None
    return jax.vmap(column, (0, -1, -1), out_axes)(jnp.eye(u.shape[0], dtype=u.dtype), *slopes)


def value_and_columns(
    fn: Callable[[Float[Array, " k"]], tuple[PyTree, PyTree]], u: Float[Array, " k"]
) -> tuple[PyTree, PyTree[Float[Array, "... k"]], PyTree]:
    """Return the value of ``fn(u) = value, aux``, its derivatives in u (leaves (..., k)), and aux."""

    def column(d: Float[Array, " k"]) -> tuple[PyTree, PyTree, PyTree]:
        return jax.jvp(fn, (u,), (d,), has_aux=True)

    return jax.vmap(column, out_axes=(None, -1, None))(jnp.eye(u.shape[0], dtype=u.dtype))


def averages_expansion(
    setting: Places,
    replicate: Replicate,
    u: Float[Array, " k"],
    sums: Sums = no_sums,
    *,
    averager: Callable[[Replicate, Callable[[Any], PyTree]], PyTree] = average_of_weighted,
) -> tuple[PyTree, PyTree[Float[Array, "... k"]], PyTree]:
    """Return the averages in `expansion`: (M, dM / d overlaps), their derivatives in u, and `sums`.

    M is the channel potential. Every block is differentiated by itself, so that the programs that jax transforms are
    small.

    Args:
        averager: function that sums over the blocks of a replicate.
    """

    def block_sums(kind: Float[StateArray, " C"] | None, block: Any) -> tuple[PyTree, PyTree, PyTree]:
        def condition(u: Float[Array, " k"]) -> tuple[Model, Overlaps, Overlaps]:
            model, _, x = setting(u)
            model = model.condition_on(kind)
            return model, x, sentence_overlaps(model, x)

        model, x, tokens = lax.stop_gradient(condition(u))
        search_result = search_block(replicate, model, tokens, block)

        def gradients(u: Float[Array, " k"]) -> tuple[tuple[Float[Array, ""], Overlaps], PyTree]:
            moving_model, y, tokens = condition(u)
            points = replicate.points(moving_model, tokens, block, search_result)
            M, gradient, extra_sums = gradient_at(
                points, moving_model, y, lambda *_: sums(model, x, lax.stop_gradient(points))
            )
            return (M, gradient), extra_sums

        return value_and_columns(gradients, u)

    return over_kinds(setting(u)[0], lambda model: averager(replicate, partial(block_sums, model.kind)))


@jax.jit  # so that it is traced once for all its callers
def _image_and_jacobian(
    equations: Equations, v: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, "n n"], Evaluation]:
    """Return the undamped map on coordinates, its Jacobian DF, and the `Evaluation`."""
    model, alpha, unpack = equations.model, equations.alpha, equations.coordinates.unpack
    return expansion(lambda v: (model, alpha, unpack(v)), equations.replicate, v, equations.free, _state_sums)


def _state_sums(model: Model, x: Overlaps, points: Points) -> tuple[dict[str, Float[Array, "..."]], Model]:
    return moments(model, x, points), channel_by_model(model, x, points)
