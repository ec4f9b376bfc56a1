"""States with one step of replica symmetry breaking (1RSB)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ..averages.lines import LineNodes
from ..averages.program import program
from ..averages.recipes import Lines
from ..averages.rules import REPLICATES, Replicate, Rule
from ..base.arrays import Number, cholesky, indexed, inverse, one_by_one, precise
from ..base.derivatives import instantiated, with_tangent
from ..base.errors import InputError, is_concrete, require_choice, require_count, require_number
from ..base.progress import Progress, in_parts
from ..base.report import Description, Row
from ..base.results import Replicated, Status, error_bar
from ..model.checks import check_alpha, needs
from ..model.model import Model
from ..model.overlaps import PAIR, Conjugates, Overlaps, branch_of
from ..theory import potentials
from ..theory.engine import run_one
from ..theory.equations import first_order
from ..theory.observables import gen_error_in
from ..theory.paths import Call, Path
from ..theory.solve import Request, solve_checked
from ..theory.states import FixedPoint, State
from .newton import Equations1RSB, Moving, Solution, fixed_point
from .potentials import Averages, OneRSBOverlaps, averages_at

ORDER = 5  # order of the rule of lines: the elevation is good to 1 % (four replicates, alpha_c of the standard setting)
_POINTS = 64  # points on a line, along which the RS potential has to be exact
_MIN_JUMP_MASS = 0.02  # jump mass above which breaking is tried even if the averages cannot tell the mass from zero
_SHARE = 1e-3, 0.5  # range to which a start clips the jumps' share of the response
_START = 1.2  # s (q1 - q0) at the start, over the part of the response that the jumps carry
_WIDEST, _NARROWEST = 0.5, 0.1  # q1 - q0 at the start: at most over q, at least over its own widest direction
_MAX_LAYOUTS, _MAX_GROWTH = 3, 1.1  # how often nodes are laid; growth of the clusters above which they are laid again
_GROUND = 2.0  # s at the start, times the training loss


class BrokenState(eqx.Module):
    """A 1RSB state in every replicate of the averages: all arrays lead with the replicate axis; or that in one of them.

    `loss_by_model` holds the derivatives of the training loss in the numbers of the model, as a `Model`.
    """

    overlaps: OneRSBOverlaps
    conjugates: OneRSBOverlaps
    s: Float[Array, "*R"]
    train_loss: Float[Array, "*R"]
    elevation: Float[Array, "*R"]
    gen_error: Float[Array, "*R"]
    loss_by_model: Model
    loss_by_alpha: Float[Array, "*R"]
    loss_by_log_s: Float[Array, "*R"]
    residual: Float[Array, "*R"]
    status: Int[Array, "*R"]

    @property
    def energy(self) -> Float[Array, "*R"]:
        """Training loss / d of the minima that s selects, ``d (s loss) / ds``."""
        return self.train_loss + self.loss_by_log_s

    @property
    def complexity(self) -> Float[Array, "*R"]:
        """Complexity Sigma of these minima, the logarithm of their number over d: ``s^2 d loss / ds``."""
        return self.s * self.loss_by_log_s

    def numbers(self) -> dict[str, Float[Array, "*R ..."]]:
        """Return all numbers that are shown of a state, by name."""
        names = ("s", "train_loss", "elevation", "gen_error", "energy", "complexity")
        return {**vars(self.overlaps), **{name: getattr(self, name) for name in names}}


class OneRSBPoint(Replicated):
    """A state with one step of replica symmetry breaking, and the replica-symmetric (RS) state that it comes from.

    Numbers are means over independent replicates of the averages; error bars are those of these means. If a replicate
    has no state, losses, energy and complexity are NaN, and it adds nothing to their derivatives.

    Attributes:
        model, alpha, branch: the arguments of `rsb.solve`.
        ground: whether s is that of the ground state.
        rs: the RS state, on the same lines.
        replicates: the state in every replicate.
        overlaps: order parameters.
        s: Parisi parameter, an inverse energy.
        train_loss: training loss / d.
        elevation: training loss / d minus that of the RS state on the same averages.
        gen_error: test error eps_g of the minima that s selects. The linear baseline has `rs.gen_error_linear`.
    """

    batch_probe = "alpha", 0
    SETTING = "alpha", "branch"
    FLAGS = ("broken",)
    model: Model
    alpha: Float[Array, ""]
    rs: FixedPoint
    replicates: BrokenState
    branch: str = eqx.field(static=True)
    ground: bool = eqx.field(static=True)

    @property
    def broken(self) -> Bool[Array, ""]:
        """Whether minima fall into clusters. If they do not, and the state is `ok`, the RS state is exact (q1 = q0)."""
        x = self.replicates.overlaps
        return jnp.any(x.q1 != x.q0)

    @property
    def energy(self) -> Float[Array, ""]:
        """Training loss / d of the minima that s selects; see `BrokenState`."""
        return jnp.mean(self.replicates.energy)

    @property
    def complexity(self) -> Float[Array, ""]:
        """Complexity of these minima; see `BrokenState`."""
        return jnp.mean(self.replicates.complexity)

    @property
    def title(self) -> str:
        kind = "ground state" if self.ground else "state"
        return f"{self.branch} branch at alpha = {self.alpha:g}, 1RSB {kind}"

    def shown(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the means of all numbers that are shown of the state, and their error bars."""
        values = self.replicates.numbers()
        return {name: jnp.mean(a, 0) for name, a in values.items()}, {name: error_bar(a) for name, a in values.items()}

    def details(self) -> list[Row]:
        row = ("not broken", "", "q1 = q0: the replica-symmetric state is exact")
        return [row] if self.ok and not self.broken else []

    def describe(self) -> Description:
        residual = f"residual {float(jnp.max(self.replicates.residual)):.1e}"
        return super().describe()._replace(status=f"{self.status_name}, {residual}")


def solve(
    model: Model,
    alpha: Number,
    branch: str = "positional",
    *,
    s: Number | None = None,
    order: int = ORDER,
    lines: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
    progress: Progress = None,
) -> OneRSBPoint:
    """Solve for a state with one step of replica symmetry breaking; it shows how far off the replica-symmetric one is.

    The RS state is solved first; then its minima may fall into clusters. If the proximal operator does not jump
    (`FixedPoint.jumps` is false and the jump mass is below 2 %), nothing can break: q1 = q0, and the elevation is zero.
    The numbers have to be concrete, and in float64 because the elevation is a small part of the loss. Inner averages
    take 24 * 3^(L r - 1) nodes; they were checked for two fields.

    All numbers of the state have first derivatives in the model and alpha, in both modes, and these contain the jumps.
    Those of the training loss and of the elevation follow from the envelope theorem, the others from the implicit
    function theorem.

    Args:
        model: attention layer and data.
        alpha: samples per dimension, n / d.
        branch: "positional", "semantic" or "uninformed".
        s: Parisi parameter, an inverse energy; by default that of the ground state, ``d loss / d s = 0``. A smaller s
            selects more numerous minima of higher energy.
        order, lines, seed: parameters of the rule of lines; see `Lines`.
        replicates: independent replicates of the averages; their scatter is the error bar.
        progress: as in `tiedattn_jax.solve`.

    Raises:
        InputError: as `tiedattn_jax.solve`; the model is in float32, or has traced numbers, a penalty or classes of
            tokens; `s` is not positive.
    """
    needs(model, "rsb.solve", float64=True, independent=True)
    branch = require_choice(branch, "branch", (*PAIR, "uninformed"))
    alpha = check_alpha(model, alpha)
    primals = lax.stop_gradient((model, alpha))
    if not is_concrete(primals):
        raise InputError("model", "must have concrete numbers for rsb.solve, got traced ones: call it outside jax.jit")
    require_count(replicates, "replicates", 2)
    if s is not None:
        s = require_number(s, "s", "positive", lambda v: v > 0, model.lam.dtype)
    rule = lines_1rsb(model, order, lines, replicates, seed)
    progress = in_parts(progress)
    rs = solve_checked(Request(model, alpha, branch, rule), progress)
    rs_primal, is_differentiated = lax.stop_gradient(rs), not is_concrete((model, alpha))
    solutions = run_one(_replicates(rs_primal, rule, s, is_differentiated), progress)
    states = []
    for k in range(replicates):
        rs_replicate = indexed(rs.replicates, k)
        if k in solutions:
            states.append(_broken(rs, rs_replicate, rule.replicate(k), *solutions[k]))
        else:
            states.append(_unbroken(rs_replicate, s, not _breaks(rs_primal)))
    state = jax.tree.map(lambda *a: jnp.stack(a), *states)
    found = state.status <= Status.stalled
    names = "train_loss", "elevation", "gen_error", "loss_by_log_s"
    state = dataclasses.replace(state, **{name: jnp.where(found, getattr(state, name), jnp.nan) for name in names})
    return OneRSBPoint(model, alpha, rs, state, branch, s is None)


def lines_1rsb(model: Model, order: int, lines: int | None, replicates: int, seed: int) -> Rule:
    """Return the rule of lines of `rsb.solve`; its RS state is solved on the same lines."""
    return Lines(order, lines=lines, points=_POINTS, seed=seed, replicates=replicates).rule(model)


class _Neighbour(NamedTuple):
    """Start of a replicate from the solution of another one."""

    shift: OneRSBOverlaps  # change of the order parameters by breaking
    s: Float[Array, ""]
    matrix: Float[np.ndarray, "n n"]  # matrix of Newton's method at the solution


def _breaks(rs: FixedPoint) -> bool:
    """Return whether the proximal operator jumps, so that minima may fall into clusters."""
    return bool(rs.jumps) or float(rs.diagnostics.jump_mass) > _MIN_JUMP_MASS


def _replicates(rs: FixedPoint, rule: Rule, s: Float[Array, ""] | None, is_differentiated: bool) -> Path:
    """Path of the searches in all replicates; returns the solutions, and their motion if asked for, by replicate.

    Replicates are searched one after the other until one is solved. From its solution the remaining ones, and those
    that failed, are then searched at once.
    """
    results: dict[int, Solution | None] = {}
    pending = [k for k in range(rule.replicates) if _breaks(rs) and rs.replicates.status[k] <= Status.stalled]
    layouts = dict(zip(pending, (yield [Call(_lay, (rs, s, k, rule.replicate(k))) for k in pending]), strict=True))
    guess = None
    while pending and guess is None:
        k = pending.pop(0)
        results[k] = yield from _newton_path(rs, s, None, k, layouts[k])
        guess = _guess_from(rs, k, results[k])
    if guess is not None:
        retried = [*pending, *(k for k in results if _guess_from(rs, k, results[k]) is None)]
        for k, retry in zip(retried, (yield [_newton_path(rs, s, guess, k, layouts[k]) for k in retried]), strict=True):
            candidates = [result for result in (results.get(k), retry) if result is not None]
            results[k] = min(candidates, key=lambda result: result.residual, default=None)
    solved = {k: result for k, result in results.items() if result is not None}
    motions = [None] * len(solved)
    if is_differentiated:
        motions = yield [Call(Solution.moving, (result,)) for result in solved.values()]
    return dict(zip(solved, zip(solved.values(), motions, strict=True), strict=True))


class _Layout(NamedTuple):
    """Averages, and the state that their nodes were laid for."""

    x: OneRSBOverlaps
    s: Float[Array, ""]
    averages: Averages


def _lay(rs: FixedPoint, s: Float[Array, ""] | None, k: int, lines: LineNodes) -> _Layout:
    """Lay the nodes of replicate k for a start of its own, whose clusters are wider than those of the state."""
    state = indexed(rs.replicates, k)
    x, s_start = _start(rs.model, state, s, branch_of(rs.branch).free(rs.model))
    return _Layout(x, s_start, averages_at(rs.model, state.overlaps, x, s_start, lines))


def _newton_path(rs: FixedPoint, s: Float[Array, ""] | None, guess: _Neighbour | None, k: int, layout: _Layout) -> Path:
    """Path of Newton's method in replicate k; returns a `Solution` or None.

    If clusters become wider than those that the nodes were laid for, jumps have come near to other fields, and nodes
    are laid again.

    Args:
        guess: start of the search; by default the state that the nodes were laid for.
    """
    model, state = rs.model, indexed(rs.replicates, k)
    x, s_start, matrix = layout.x, layout.s, None
    if guess is not None:
        x, s_start, matrix = (
            jax.tree.map(jnp.add, _unbroken_overlaps(state.overlaps), guess.shift),
            guess.s,
            guess.matrix,
        )
    free = branch_of(rs.branch).free(model)
    for attempt in range(_MAX_LAYOUTS):
        if attempt:
            averages = yield Call(averages_at, (model, state.overlaps, x, s_start, layout.averages.lines))
            layout = _Layout(x, s_start, averages)
        problem = Equations1RSB(model, rs.alpha, layout.averages, free, jnp.asarray(s is None), state.train_loss)
        result = yield from fixed_point(problem, x, s_start, matrix)
        if result is None or _traces(result.x.q1 - result.x.q0) <= _MAX_GROWTH * _traces(layout.x.q1 - layout.x.q0):
            break
        x, s_start, matrix = result.x, result.s, result.matrix
    return result


def _guess_from(rs: FixedPoint, k: int, result: Solution | None) -> _Neighbour | None:
    """Return the start that a replicate gives to the others, or None if it was not solved."""
    if result is None or result.status > Status.stalled:
        return None
    unbroken = _unbroken_overlaps(indexed(rs.replicates.overlaps, k))
    return _Neighbour(jax.tree.map(jnp.subtract, result.x, unbroken), result.s, result.matrix)


def _broken(
    rs: FixedPoint, rs_replicate: State, lines: Replicate, result: Solution, moving: Moving | None
) -> BrokenState:
    """Return the solution of one replicate as a `BrokenState`, with its derivatives if `moving` is given."""
    look = jax.tree.map(jnp.asarray, result.look)
    zero = jnp.zeros_like(look.loss)
    state = BrokenState(
        overlaps=result.x,
        conjugates=look.hats,
        s=result.s,
        train_loss=look.loss,
        elevation=zero,
        gen_error=zero,
        loss_by_model=look.loss_by_model,
        loss_by_alpha=look.loss_by_alpha,
        loss_by_log_s=look.loss_by_log_s,
        residual=jnp.asarray(result.residual),
        status=jnp.asarray(int(result.status)),
    )
    state = state if moving is None else with_derivatives(state, (rs.model, rs.alpha), moving)
    numbers = state.train_loss - rs_replicate.train_loss, _test_error(rs.model, state.overlaps, lines)
    return eqx.tree_at(lambda b: (b.elevation, b.gen_error), state, numbers)


@program
def _test_error(model: Model, x: OneRSBOverlaps, lines: Replicate) -> Float[Array, ""]:
    return gen_error_in(model, Overlaps(x.q1, x.V, x.theta, x.m), lines)


@with_tangent
def with_derivatives(primals: tuple, tangents: tuple) -> BrokenState:
    """Return the first argument of ``(state, numbers, moving)``, a state of one replicate, with first derivatives.

    They are derivatives in the numbers, the model and alpha. A number without a known derivative, such as
    `loss_by_model`, has the derivative NaN. Second derivatives raise an error.
    """
    state, numbers, moving = primals
    slopes, moving = first_order(((state.loss_by_model, state.loss_by_alpha), moving), numbers)
    directions = instantiated(numbers, tangents[1])
    terms = jax.tree.map(lambda a, d: jnp.sum(a * d), slopes, directions)
    loss = sum(jax.tree.leaves(terms), jnp.zeros_like(state.train_loss))
    direction = ravel_pytree(directions)[0]
    undefined = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan) * loss if eqx.is_inexact_array(a) else a, state)
    motion = jax.tree.map(lambda a: a @ direction, moving)
    return eqx.tree_at(
        lambda s: (s.train_loss, s.overlaps, s.s, s.conjugates, s.loss_by_alpha, s.loss_by_log_s),
        undefined,
        (loss, *motion),
    )


@precise
def _start(
    model: Model, state: State, s: Float[Array, ""] | None, free: Float[Array, "2"]
) -> tuple[OneRSBOverlaps, Float[Array, ""]]:
    """Return the order parameters and s at the start of a replicate: jumps do not respond within a cluster.

    If s is not given, clusters are not narrower than the estimated elevation has them, because nodes do not resolve
    narrower ones. The elevation is ``v^2 (1 - replicon) / 8 s`` at its maximum, with v = s (q1 - q0) / V; s is at most
    the value at which this equals the estimate.
    """
    x, diagnostics = state.overlaps, state.diagnostics
    # If the mass is above one, the jumps turn the sign of Vhat, and little of it remains without them.
    factor = jnp.where(
        diagnostics.jump_mass < 1, 1 / (1 - jnp.clip(diagnostics.jump_mass, *_SHARE)), 1 - diagnostics.jump_mass
    )
    hats = eqx.tree_at(lambda h: h.V, state.conjugates, factor * state.conjugates.V)
    V = potentials.overlaps(model, hats).V
    response = _START * (x.V - V)
    if s is None:
        s = _GROUND / state.train_loss
        v = _traces(response) / _traces(x.V)
        from_elevation = v**2 * (1 - diagnostics.replicon) / (8 * diagnostics.rs_error)
        s = jnp.where(from_elevation > 0, jnp.minimum(s, from_elevation), s)
    # Units of q keep q0 positive. With several columns the jumps may carry part of the response in one direction only.
    root = cholesky(x.q)
    inverse_root = inverse(root)
    values, vectors = one_by_one(jnp.linalg.eigh, inverse_root @ (response / s) @ jnp.swapaxes(inverse_root, -1, -2))
    widest = jnp.minimum(jnp.max(jnp.abs(values), -1, keepdims=True), _WIDEST)
    spread = root @ (vectors * jnp.sqrt(jnp.clip(jnp.abs(values), _NARROWEST * widest, widest))[..., None, :])
    return OneRSBOverlaps(x.q, x.q - spread @ jnp.swapaxes(spread, -1, -2), V, free[0] * x.theta, free[1] * x.m), s


def _traces(a: Float[Array, "L r r"]) -> Float[Array, ""]:
    """Return the trace of a matrix of every token, summed over the tokens."""
    return jnp.sum(jnp.trace(a, axis1=1, axis2=2))


def _unbroken_overlaps(x: Overlaps | Conjugates) -> OneRSBOverlaps:
    """Return RS order parameters, or their hats, as those of 1RSB without breaking."""
    return OneRSBOverlaps(x.q, x.q, x.V, x.theta, x.m)


def _unbroken(state: State, s: Float[Array, ""] | None, is_exact: bool) -> BrokenState:
    """Return the RS state as a 1RSB state; its status is at least `max_steps` unless the RS state `is_exact`."""
    zero = jnp.zeros_like(state.train_loss)
    return BrokenState(
        overlaps=_unbroken_overlaps(state.overlaps),
        conjugates=_unbroken_overlaps(state.conjugates),
        s=_GROUND / lax.stop_gradient(state.train_loss) if s is None else s,
        train_loss=state.train_loss,
        elevation=zero,
        gen_error=state.gen_error,
        loss_by_model=state.train_loss_partials[0],
        loss_by_alpha=state.train_loss_partials[1],
        loss_by_log_s=zero,
        residual=state.residual,
        status=state.status if is_exact else jnp.maximum(state.status, int(Status.max_steps)),
    )
