"""The saddle-point equations (7)-(8) at one setting, on one replicate of the averages: a map of the overlaps.

`Equations` holds a model, an alpha, a replicate and what a branch leaves free. Its methods give the map and its
Jacobian to Newton's method, and everything that follows from a fixed point: what it predicts, how it moves with the
numbers of the model, and the derivatives of any function of it.
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

from ..averages.program import program
from ..averages.rule import Points, Replicate, average, average_of_weighted, found_in
from ..base.results import Settings
from ..model.model import Model, over_kinds
from ..model.overlaps import Conjugates, Coordinates, Overlaps, impose, of_sentence
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
    """The results of an evaluation of the map besides the new overlaps.

    Attributes:
        conjugates: hats at the overlaps.
        channel: channel potential M.
        train_loss: minus the free energy; the training loss where the overlaps are a fixed point.
        sums: further sums over the nodes that were asked for.
    """

    conjugates: Conjugates
    channel: jax.Array
    train_loss: jax.Array
    sums: Any


Setting = Callable[[jax.Array], tuple[Model, jax.Array, Overlaps]]


class Equations(eqx.Module):
    """The map F of the overlaps at one setting.

    Attributes:
        model, alpha: the setting.
        replicate: of the averages.
        free: what the branch leaves free, (2,); what it sets to zero in the overlaps is zero in the conjugates, too.
    """

    model: Model
    alpha: jax.Array
    replicate: Replicate
    free: jax.Array

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of the overlaps."""
        return Coordinates(self.model, self.free)

    def image(self, x: Overlaps, averages: tuple[jax.Array, Overlaps], sums: Any = ()) -> tuple[Overlaps, Evaluation]:
        """New overlaps, of the averages at x: the channel potential and its gradient."""
        M, gradient = averages
        hats = impose(conjugates(self.alpha, gradient), self.free)
        return overlaps(self.model, hats), Evaluation(hats, M, -free_energy(self.model, self.alpha, x, hats, M), sums)

    def step(self, x: Overlaps) -> tuple[Overlaps, Evaluation]:
        """One undamped step of state evolution from overlaps x."""
        M, gradient, _ = channel_gradient(self.model, x, self.replicate)
        return self.image(x, (M, gradient))

    def answer(self, v: jax.Array) -> Answer:
        """The map at coordinates v, for Newton's method; the `Evaluation` of the same pass as a vector."""
        F, DF, seen = _image_and_jacobian(self, v)
        return Answer(F, DF, seen.sums[0]["unresolved"], ravel_pytree(seen)[0])

    def unseen(self, v: jax.Array) -> jax.Array:
        """NaN in the place of the `Answer.seen` at coordinates v, where there is no answer yet."""
        like = jax.eval_shape(self.answer, v).seen
        return jnp.full(like.shape, jnp.nan, like.dtype)

    def state(self, outcome: Outcome) -> State:
        """All that is predicted where a search came to, of what was seen there."""
        like = jax.eval_shape(lambda v: _image_and_jacobian(self, v)[2], outcome.v)
        unravel = ravel_pytree(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like))[1]
        x, at = self.coordinates.unpack(outcome.v), unravel(outcome.seen)
        sums, M_by_model = at.sums
        return State(
            overlaps=x,
            conjugates=at.conjugates,
            train_loss=at.train_loss,
            gen_error=gen_error_in(self.model, x, self.replicate),
            gen_error_linear=gen_error_linear_in(self.model, self.replicate),
            residual=outcome.residual,
            status=outcome.status,
            diagnostics=diagnose(self.model, self.alpha, x, at.conjugates, sums),
            train_loss_partials=train_loss_partials(self.model, self.alpha, at.channel, M_by_model, at.conjugates),
        )

    def gradient(
        self, x: Overlaps, fn: Callable[[Model, jax.Array, Overlaps], jax.Array]
    ) -> tuple[jax.Array, Model, jax.Array]:
        """Value of `fn(model, alpha, x)` at a fixed point x, and its total derivatives in the model and in alpha.

        The overlaps move along the branch, by the implicit function theorem with the dense Jacobian of the residual.
        """
        at = self._linearised(x)
        value, columns, _ = value_and_columns(lambda u: (fn(*at.setting(u)), ()), at.u)
        return value, *at.numbers(at.total(columns))

    def derivatives(self, x: Overlaps) -> dict[str, Any]:
        """Derivatives of a fixed point and of what is predicted there, by the fields of `State`; arrays (..., k).

        They are those in the k numbers of the setting: of the model, flattened, and alpha.
        """
        at = self._linearised(x)

        def errors(u: jax.Array) -> tuple[dict[str, jax.Array], tuple]:
            model, _, x = at.setting(u)
            both = gen_error_in(model, x, self.replicate), gen_error_linear_in(model, self.replicate)
            return dict(zip(("gen_error", "gen_error_linear"), both, strict=True)), ()

        _, columns, _ = value_and_columns(errors, at.u)
        seen = {"conjugates": at.seen.conjugates, "train_loss": at.seen.train_loss}
        overlaps = jax.vmap(self.coordinates.unpack, -1, -1)(at.moved)
        return {"overlaps": overlaps} | jax.tree.map(at.total, columns | seen)

    def fold_gradient(self, x: Overlaps) -> tuple[Model, jax.Array]:
        """At a fold: l . d_p F in the model and in alpha, l the left null vector of I - DF.

        Both vanish along the fold.
        """
        at = self._linearised(x)
        left = jnp.linalg.svd(at.matrix + at.gauge.T @ at.gauge)[0][:, -1]
        return at.numbers(left @ at.columns)

    def _linearised(self, x: Overlaps) -> _Linearised:
        coordinates = self.coordinates
        v, (p, numbers) = coordinates.pack(x), ravel_pytree((self.model, self.alpha))
        n, u = v.shape[0], jnp.concatenate([v, p])

        def setting(u: jax.Array) -> tuple[Model, jax.Array, Overlaps]:
            return *numbers(u[n:]), coordinates.unpack(u[:n])

        # Derivatives of the average, which have derivatives in their turn, in both modes.
        averages, slopes, _ = averages_expansion(setting, self.replicate, u, over=average)

        def image(u: jax.Array, *averages: Any) -> tuple[jax.Array, Evaluation]:
            model, alpha, x = setting(u)
            new, seen = Equations(model, alpha, self.replicate, self.free).image(x, averages)
            return coordinates.pack(new), seen

        def column(*d: Any) -> tuple[jax.Array, Evaluation]:
            return jax.jvp(image, (u, *averages), d)[1]

        columns, seen = jax.vmap(column, (0, -1, -1), -1)(jnp.eye(u.shape[0], dtype=u.dtype), *slopes)
        gauge = coordinates.gauge(x, jnp.ones_like(v))
        return _Linearised(u, jnp.eye(n, dtype=v.dtype) - columns[:, :n], gauge, columns[:, n:], seen, setting, numbers)


class _Linearised(NamedTuple):
    """The map F at a fixed point to first order in the n overlaps and in the k numbers of a setting.

    Attributes:
        u: the overlaps and the numbers, (n + k,).
        matrix: I - DF, (n, n).
        gauge: tangents of the orbit on which it is singular, (pairs, n).
        columns: dF / d numbers, (n, k).
        seen: derivatives of the `Evaluation` in u, (..., n + k).
        setting: the numbers and the overlaps of u.
        numbers: a vector (k,) as (model, alpha).
    """

    u: jax.Array
    matrix: jax.Array
    gauge: jax.Array
    columns: jax.Array
    seen: Evaluation
    setting: Setting
    numbers: Callable[[jax.Array], tuple[Model, jax.Array]]

    @property
    def moved(self) -> jax.Array:
        """How the fixed point moves with the numbers: ``(I - DF)^{-1} d_p F``, (n, k)."""
        return deflated_solve(self.matrix, self.gauge, self.columns)

    def total(self, by_u: jax.Array) -> jax.Array:
        """The derivatives in the numbers alone, (..., k), of a function of u, (..., n + k), at the fixed point."""
        n = len(self.matrix)
        return by_u[..., n:] + by_u[..., :n] @ self.moved


@program
def search(equations: Equations, start: Overlaps, settings: Settings, attempts: jax.Array, stall: jax.Array) -> State:
    """A whole search from a start, see `Newton`, to its state: what a CPU does of a lane."""
    coordinates = equations.coordinates
    newton, v = Newton(coordinates, settings, stall, attempts), coordinates.pack(start)
    end = lax.while_loop(
        lambda s: ~s.ended, lambda s: newton.advance(s, equations.answer(s.trial)), newton.begin(v, equations.unseen(v))
    )
    return equations.state(end.outcome)


def expansion(
    setting: Setting, replicate: Replicate, u: jax.Array, free: jax.Array, sums: Sums = no_sums
) -> tuple[jax.Array, jax.Array, Evaluation]:
    """The undamped map on coordinates F(u), its derivatives dF/du, and what the evaluation sees.

    Args:
        setting: model, alpha and overlaps as a function of some numbers u, (k,).
        sums: further sums over the nodes; they carry no derivative.

    Returns:
        F (n,), dF/du (n, k), and the `Evaluation`.
    """
    averages, slopes, more = averages_expansion(setting, replicate, u, sums)

    def finish(u: jax.Array, *averages: Any) -> Any:
        model, alpha, x = setting(u)
        here = Equations(model, alpha, replicate, free)
        new, seen = here.image(x, averages, more)
        return here.coordinates.pack(new), seen

    eye = jnp.eye(u.shape[0], dtype=u.dtype)
    return jax.vmap(
        lambda *d: jax.jvp(finish, (u, *averages), d, has_aux=True), in_axes=(0, -1, -1), out_axes=(None, -1, None)
    )(eye, *slopes)


def value_and_columns(fn: Callable[[jax.Array], Any], u: jax.Array) -> Any:
    """Value of ``fn(u) = value, aux``, its derivatives in u (leaves (..., k)), and aux."""

    def column(d: jax.Array) -> Any:
        return jax.jvp(fn, (u,), (d,), has_aux=True)

    return jax.vmap(column, out_axes=(None, -1, None))(jnp.eye(u.shape[0], dtype=u.dtype))


def averages_expansion(
    setting: Callable[[Any], tuple[Model, jax.Array, Overlaps]],
    replicate: Replicate,
    u: Any,
    sums: Sums = no_sums,
    *,
    over: Callable[[Replicate, Callable[[Any], Any]], Any] = average_of_weighted,
) -> Any:
    """The averages in `expansion`: channel potential M and its gradient in the overlaps; derivatives, (..., k); sums.

    Every block is differentiated by itself: what jax then transforms is small.

    Args:
        over: averages over the blocks.
    """

    def block_sums(kind: jax.Array | None, block: Any) -> Any:
        def given(u: Any) -> tuple[Model, Overlaps, Overlaps]:
            model, _, x = setting(u)
            model = model.given(kind)
            return model, x, of_sentence(model, x)

        model, x, tokens = lax.stop_gradient(given(u))
        found = found_in(replicate, model, tokens, block)

        def at(u: Any) -> Any:
            moving, y, tokens = given(u)
            points = replicate.points(moving, tokens, block, found)
            M, gradient, more = gradient_at(points, moving, y, lambda *_: sums(model, x, lax.stop_gradient(points)))
            return (M, gradient), more

        return value_and_columns(at, u)

    return over_kinds(setting(u)[0], lambda model: over(replicate, partial(block_sums, model.kind)))


@jax.jit  # traced once for all its uses
def _image_and_jacobian(equations: Equations, v: jax.Array) -> tuple[jax.Array, jax.Array, Evaluation]:
    """The undamped map on coordinates, its Jacobian DF, and what the evaluation sees."""
    model, alpha, unpack = equations.model, equations.alpha, equations.coordinates.unpack
    return expansion(lambda v: (model, alpha, unpack(v)), equations.replicate, v, equations.free, _moments)


def _moments(model: Model, x: Overlaps, points: Points) -> tuple[dict[str, jax.Array], Model]:
    return moments(model, x, points), channel_by_model(model, x, points)


@jax.custom_jvp
def first_order(tree: Any, numbers: Any) -> Any:
    """A function of some numbers, as a tree that refuses to be differentiated rather than to pass for a constant."""
    return tree


@first_order.defjvp
def _(primals: Any, tangents: Any) -> Any:
    text = "transitions and states with 1RSB have first derivatives only"
    raise TypeError(f"{text}: take differences of `sensitivities` or `loss_by_model` for the second")
