"""Solve one setting: a branch at one alpha, on the coarse replicate of the averages and from there on all of them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from ..averages.default import default_nodes
from ..averages.lines import LineNodes
from ..averages.nodes import sobol_nodes
from ..averages.program import at_top_level, lane_by_lane, program
from ..averages.rule import COARSE, Replicate, Rule, check_rule
from ..base.errors import InputError, as_number, is_concrete, require, require_kind, require_number
from ..base.linalg import precise
from ..base.results import Settings, Status, error_bar
from ..model.checks import check
from ..model.model import Model
from ..model.overlaps import Coordinates, Overlaps, admissible, branch_of, magnitudes, shapes_of
from .equations import Equations
from .newton import ATTEMPTS, Newton, Outcome, Search, either, stall_of
from .pool import Lane, Path, replicates_of, run_one, stacked
from .states import FixedPoint, State

_SMALL = 0.3  # share of its largest possible size below which an order parameter may be due to the nodes' scatter
_LOST = 0.01  # residual of an unresolved coarse state from which on the other replicates are not tried


class Problem(NamedTuple):
    """A branch at one setting: what `Lane` needs besides a start.

    Attributes:
        model, alpha: of concrete numbers.
        nodes: averaging rule.
        free: what the branch leaves free, (2,).
        settings: tolerances.
    """

    model: Model
    alpha: Any
    nodes: Rule
    free: Any
    settings: Settings

    def lane(self, start: Overlaps, replicate: int = COARSE, attempts: int = 1) -> Lane:
        """A root search on one replicate."""
        return Lane(self.model, self.alpha, self.nodes, replicate, self.free, start, self.settings, attempts)

    def coarsely(self, start: Overlaps) -> Lane:
        """The search on the coarse replicate, from a start that may be far."""
        return self.lane(start, COARSE, len(ATTEMPTS))

    def finely(self, start: Overlaps) -> Path:
        """Path of the states of all replicates, from a start near them, one for all or one for each."""
        lane = self.lane(start)
        own = start if start.m.ndim == 3 else None
        return stacked((yield replicates_of(lane, own)))

    def anew(self, start: Overlaps) -> Path:
        """Path of the states of all replicates, from a start that may be far: the coarse replicate comes first."""
        near = yield self.coarsely(start)
        if near.status == Status.unresolved and near.residual > _LOST:  # the other replicates would resolve nothing
            return stacked([near] * self.nodes.replicates)
        return (yield from self.finely(near.overlaps))


def solve(
    model: Model,
    alpha: Any,
    branch: str | None = "semantic",
    nodes: Rule | None = None,
    *,
    rtol: float | None = None,
    start: FixedPoint | Overlaps | None = None,
    settings: Settings | None = None,
) -> FixedPoint:
    """Fixed point of the saddle-point equations (7)-(8) on a branch.

    Works under `jit`, `vmap` over the numbers of the model and `alpha`, and `grad` in both modes and of second order.
    On a CPU the lanes of a `vmap` are solved one after the other; `sweep` runs many settings at once. Derivatives
    contain the jumps of the proximal operator; `diagnostics.jump_mass` says how much there is of them. At a state with
    jumps second derivatives of order parameters are as rough as the averages: those of q and m of the positional state
    at alpha = 2 on lines of order 5 are 10 % from differences, those of the training loss .6 %.

    Args:
        model: attention layer and data.
        alpha: samples per dimension, n / d.
        branch: "positional" (theta = 0), "semantic" (m = 0), "uninformed" (both zero), or None, which imposes nothing.
        nodes: averaging rule; by default `default_nodes`, and where they leave a state `unresolved`, as lines do for a
            student much larger than the teacher, `sobol_nodes` (concrete numbers only).
        rtol: instead of `nodes`: choose and refine them until the error bars of the order parameters and of the
            training loss are at most this, relative. Not under `jit`. When the largest averages leave larger ones, the
            status is `imprecise`.
        start: near the state, for instance a neighbour; by default the branch is looked for on coarse averages.
        settings: tolerances.

    Returns:
        A `FixedPoint`, whose `status` tells whether it is one. A branch that does not exist at this alpha comes back
        with status `absent`, never as another branch under its name. Order parameters that the scatter of the nodes
        can explain, small ones where nothing settles and those within their error bars, are held at zero if they do not
        grow there (concrete numbers only).

    Raises:
        InputError: `alpha` not positive, unknown `branch`, shapes that do not fit, a loss that is not even, an `rtol`
            that the dtype does not allow or that is given beside `nodes`.
    """
    check_model(model, branch)
    branch_of(branch)
    alpha = check_alpha(model, alpha)
    if nodes is not None:
        check_rule(nodes, model)
    require_kind(settings, "settings", (Settings, type(None)), "a Settings such as Settings(tol=1e-4)")
    start = start.overlaps if isinstance(start, FixedPoint) else start
    if start is not None:
        _check_start(model, start)
    if rtol is not None:
        _check_rtol(model, alpha, nodes, rtol)
        return _refined(model, alpha, branch, rtol, start, settings or Settings(tol=min(Settings.tol, rtol / 10)))
    settings = settings or Settings()
    states, rule, free = _states_of(*lax.stop_gradient((model, alpha)), branch, nodes, start, settings)
    return FixedPoint(model, alpha, followed(model, alpha, rule, free, states), branch)


def _states_of(
    model: Model, alpha: Any, branch: str | None, nodes: Rule | None, start: Overlaps | None, settings: Settings
) -> tuple[State, Rule, jax.Array]:
    """The states of `solve`, without derivatives, their rule, and what is left free in them."""
    start, rule = lax.stop_gradient(start), default_nodes(model) if nodes is None else nodes
    if at_top_level(model, alpha, nodes, start):
        path = default_path(model, alpha, branch, rule, start, settings, fallback=nodes is None)
        states, rule, free = run_one(path)
        return jax.device_put(states), rule, jnp.asarray(free)
    free = branch_of(branch).free(model)
    begin = branch_start(model, branch) if start is None else start
    if begin.m.ndim == 2:
        begin = jax.tree.map(lambda a: jnp.broadcast_to(a, (rule.replicates, *jnp.shape(a))), begin)
    numbers = model, alpha, rule, free, settings, begin
    return lane_by_lane(partial(traced_states, coarsely=start is None))(*numbers), rule, free


def _solved(problem: Problem, branch: str | None, start: Overlaps | None) -> Path:
    """Path of `solve` on given averages: the states, and what is left free in them."""
    begin = branch_start(problem.model, branch) if start is None else start
    states = yield from (problem.anew if start is None else problem.finely)(begin)
    free = np.asarray(problem.free)
    kept = np.where(_noise(problem.model, states, free), 0.0, free)
    if np.all(kept == free):
        return states, problem.free
    # The scatter of the nodes keeps an order parameter alive that vanishes: no residual is small relative to it, so
    # that nothing settles, or every replicate settles at another value of it. It is held at zero if it does not grow.
    held = problem._replace(free=kept)
    replicates = yield from held.anew(branch_start(problem.model, branch))
    other = FixedPoint(problem.model, problem.alpha, replicates, branch)
    growth = np.stack([other.diagnostics.growth_theta, other.diagnostics.growth_m])
    if not other.ok or np.any((free > kept) & (growth >= 1)):
        return states, problem.free
    if free.sum() == 1:
        replicates = dataclasses.replace(replicates, status=np.full_like(replicates.status, Status.absent))
    return replicates, held.free


def _noise(model: Model, states: State, free: np.ndarray) -> np.ndarray:
    """Which of theta and m may be noise, (2,): small ones where nothing settled, else those within their error bars."""
    usable = bool(np.all(states.status <= Status.stalled))
    if np.all(states.status == Status.absent) or (usable and free.sum() != 1):
        return np.zeros(2, bool)
    if not usable:
        return np.array(magnitudes(model, FixedPoint(model, jnp.zeros(()), states, None).overlaps)) < _SMALL
    pair = states.overlaps.theta, states.overlaps.encoded
    size = np.array([np.linalg.norm(np.mean(a, 0)) for a in pair])
    bar = np.array([np.linalg.norm(error_bar(a)) for a in pair])
    return np.isfinite(bar) & (size < 2 * bar)  # those that cannot be told from zero


def default_path(
    model: Model,
    alpha: Any,
    branch: str | None,
    rule: Rule,
    start: Overlaps | None,
    settings: Settings,
    *,
    fallback: bool,
) -> Path:
    """Path of `solve` of concrete numbers: the states, their rule, and what is left free in them.

    Args:
        fallback: whether a state that lines leave unresolved is solved on Sobol points, as where no rule was given.
    """
    problem = Problem(model, alpha, rule, branch_of(branch).free(model), settings)
    states, free = yield from _solved(problem, branch, start)
    if fallback and isinstance(rule.stack, LineNodes) and np.max(states.status) == Status.unresolved:
        problem = problem._replace(nodes=sobol_nodes(model))
        states, free = yield from _solved(problem, branch, start)
    return states, problem.nodes, free


# Nodes in a replicate, and the relative error bars that lines of so many leave at most at the standard setting.
LADDER = {2**12: 1e-3, 2**14: 3e-4, 2**15: 6e-5, 2**16: 3e-5, 2**18: 4e-6, 2**19: 5e-7}
_POOR = 30  # times as much: Sobol points may do better


def _refined(
    model: Model, alpha: jax.Array, branch: str | None, rtol: float, start: Overlaps | None, settings: Settings
) -> FixedPoint:
    """`solve` on more and more nodes, until the error bars are small enough; of the rule that has the smaller ones."""
    first = next((k for k, error in enumerate(LADDER.values()) if error <= rtol), len(LADDER) - 1)
    rule = default_nodes
    for n in list(LADDER)[first:]:
        nodes = rule(model, n)
        point = solve(model, alpha, branch, nodes, start=start, settings=settings)
        error = _relative_error(point)
        if isinstance(nodes.stack, LineNodes) and error > max(rtol, _POOR * LADDER[n]):
            other = solve(model, alpha, branch, sobol_nodes(model, n), start=start, settings=settings)
            other_error = _relative_error(other)
            if other_error < error:
                rule, point, error = sobol_nodes, other, other_error
        if not point.ok or error <= rtol:
            return point
        start = point.overlaps
    return eqx.tree_at(lambda p: p.replicates.status, point, jnp.full_like(point.replicates.status, Status.imprecise))


def _relative_error(point: FixedPoint) -> float:
    """Largest error bar of the order parameters and of the training loss, relative; infinite where nothing settled."""
    numbers, bars = (jax.tree.leaves((s.train_loss, s.overlaps)) for s in (point.mean, point.stderr))
    relative = (jnp.where(a == 0, 0.0, bar / jnp.abs(a)) for a, bar in zip(numbers, bars, strict=True))
    error = max(float(jnp.max(a)) for a in relative)
    return error if point.ok else np.inf


def _check_rtol(model: Model, alpha: jax.Array, nodes: Rule | None, rtol: float) -> None:
    least = 100 * float(jnp.finfo(model.lam.dtype).eps)
    want = f"at least {least:.2g} in {model.lam.dtype}"
    if model.lam.dtype == jnp.float32:
        want += ', or a model in float64, after jax.config.update("jax_enable_x64", True)'
    require_number(rtol, "rtol", want, lambda v: v >= least)
    if nodes is not None:
        raise InputError("rtol", f"chooses the averages: give either nodes or rtol, got rtol={rtol} beside nodes")
    if not is_concrete((model, alpha)):
        raise InputError("rtol", f"needs concrete numbers, got rtol={rtol} under a jax transformation: give nodes")


def for_each(x: Overlaps, replicates: int) -> Overlaps:
    """Overlaps with a leading replicate axis, of overlaps that may have one; on the host."""
    if x.m.ndim == 3:
        return x
    return jax.tree.map(lambda a: np.broadcast_to(np.asarray(a), (replicates, *np.shape(a))), x)


@eqx.filter_jit
def branch_start(model: Model, branch: str | None) -> Overlaps:
    """The start of a branch."""
    return branch_of(branch).start(model)


class _Queue(NamedTuple):
    """The searches of one setting in traced code, one after the other: the coarse replicate first, then the others."""

    number: jax.Array  # of the search that is on its way
    search: Search
    near: jax.Array  # where the replicates start, (R, n)
    outcomes: Outcome  # of the replicates, (R, ...)


@precise
def traced_states(
    model: Model, alpha: jax.Array, nodes: Rule, free: jax.Array, settings: Settings, starts: Overlaps, coarsely: bool
) -> State:
    """The states of all replicates where jax traces: `Problem.anew`, or `Problem.finely`, as one loop.

    Args:
        starts: of every replicate, with a leading axis; the first one is that of the coarse replicate.
    """
    coordinates, R, first = Coordinates(model, free), nodes.replicates, int(coarsely)
    stall = jnp.asarray(stall_of(nodes.size), model.lam.dtype)

    def newton(number: jax.Array) -> Newton:
        attempts = jnp.where(number < first, len(ATTEMPTS), 1)
        return Newton(coordinates, settings, stall, attempts)

    def equations(number: jax.Array) -> Equations:
        own = jax.tree.map(lambda a: a[jnp.maximum(number - first, 0)], nodes.stack)
        return Equations(model, alpha, either(number < first, nodes.coarse, own) if coarsely else own, free)

    def turn(q: _Queue) -> _Queue:
        search = newton(q.number).advance(q.search, equations(q.number).answer(q.search.trial))
        coarse, k = q.number < first, jnp.maximum(q.number - first, 0)
        outcome = search.outcome
        near = jnp.where(search.ended & coarse, outcome.v, q.near)
        lost = coarse & (outcome.status == Status.unresolved) & (outcome.residual > _LOST)
        # The coarse state is that of all replicates until they have their own.
        mine = search.ended & (coarse | (jnp.arange(R) == k))
        outcomes = jax.tree.map(
            lambda every, a: jnp.where(mine.reshape(-1, *[1] * a.ndim), a, every), q.outcomes, outcome
        )
        number = jnp.where(search.ended, jnp.where(lost, R + first, q.number + 1), q.number)
        start = near[jnp.clip(number - first, 0, R - 1)]
        search = either(search.ended, newton(number).begin(start, unseen), search)
        return _Queue(number, search, near, outcomes)

    near = jax.vmap(coordinates.pack)(starts)
    unseen = equations(jnp.asarray(0)).unseen(near[0])
    search = newton(jnp.asarray(0)).begin(near[0], unseen)
    outcomes = jax.tree.map(lambda a: jnp.broadcast_to(a, (R, *a.shape)), search.outcome)
    queue = _Queue(jnp.asarray(0), search, near, outcomes)
    queue = lax.while_loop(lambda q: q.number < R + first, turn, queue)

    def state(own: tuple[Replicate, Outcome]) -> State:
        replicate, outcome = own
        return Equations(model, alpha, replicate, free).state(outcome)

    return lax.map(state, (nodes.stack, queue.outcomes))


@jax.custom_jvp
def followed(model: Model, alpha: jax.Array, nodes: Rule, free: jax.Array, states: State) -> State:
    """States of all replicates, which move with the model and alpha as fixed points do."""
    return states


@followed.defjvp
@precise
def _(primals: Any, tangents: Any) -> tuple[State, State]:
    model, alpha, nodes, free, _ = primals
    *along, _, _, still = tangents
    states = followed(*primals)
    each = lane_by_lane(_derivatives)(model, alpha, nodes, free, states.overlaps)
    direction = ravel_pytree(tuple(along))[0]
    return states, dataclasses.replace(still, **jax.tree.map(lambda by_numbers: by_numbers @ direction, each))


@program
def _derivatives(model: Model, alpha: jax.Array, nodes: Rule, free: jax.Array, xs: Overlaps) -> dict[str, Any]:
    """`Equations.derivatives` in every replicate."""

    def one(own: tuple[Replicate, Overlaps]) -> dict[str, Any]:
        replicate, x = own
        return Equations(model, alpha, replicate, free).derivatives(x)

    return lax.map(one, (nodes.stack, xs))


def check_alpha(model: Model, alpha: Any) -> jax.Array:
    """alpha in the model's dtype.

    Raises:
        InputError: it is not one positive and finite number.
    """
    alpha = as_number(alpha, "alpha", model.lam.dtype)
    if is_concrete(alpha):
        require(np.isfinite(alpha) & (alpha > 0), "alpha", alpha, "positive and finite")
    return alpha


def check_model(model: Model, branch: str | None) -> None:
    """`check` of a model on a branch, where its numbers are concrete."""
    if is_concrete(model):
        check(model, even=branch is not None)


def _check_start(model: Model, start: Overlaps) -> None:
    require_kind(start, "start", Overlaps, "Overlaps or a FixedPoint")
    for name, want in shapes_of(model).items():
        got = jnp.shape(getattr(start, name))
        if got != want:
            raise InputError("start", f"must have {name} of shape {want}, got shape {got}")
    if is_concrete(model, start):
        finite = all(np.all(np.isfinite(a)) for a in jax.tree.leaves(start))
        with jax.ensure_compile_time_eval():  # alpha may be traced
            inside = finite and bool(admissible(model, start))
        if not inside:
            raise InputError("start", "must be finite, with q, V and q - theta rho^-1 theta^T positive definite")
