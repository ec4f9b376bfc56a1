"""States with one step of replica symmetry breaking."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from ..averages.lines import line_nodes
from ..averages.program import program
from ..averages.rule import Replicate, Rule
from ..averages.sizes import REPLICATES
from ..base.errors import InputError, is_concrete, require_choice, require_count, require_number
from ..base.linalg import cholesky, inverse, precise
from ..base.printing import Description, rows_of
from ..base.results import OfMean, Result, Status, error_bar
from ..model.model import Model
from ..model.overlaps import PAIR, Conjugates, Overlaps, branch_of
from ..theory import potentials
from ..theory.equations import first_order
from ..theory.observables import gen_error_in
from ..theory.pool import Call, Path, run_one
from ..theory.solve import check_alpha, check_model, solve
from ..theory.states import FixedPoint
from .newton import Found, Moving, Problem, fixed_point
from .nodes import averages_at
from .potentials import Averages, BrokenOverlaps

ORDER = 5  # of the rule of lines: the elevation to about 1 % with four replicates at alpha_c of the standard setting
_POINTS = 64  # on a line: the RS potential has to be exact along them
_SEEN = 0.02  # jump mass above which jumps are broken at although the averages cannot tell them from their error
_SHARE = 1e-3, 0.5  # range of the jumps' share of the response that a start is made of
_START = 1.2  # times the part of the response that the jumps carry, at which q1 - q0 starts
_WIDEST, _NARROWEST = 0.5, 0.1  # q1 - q0 there: over q, at most, and over its widest direction, at least
_LAID, _WIDER = 3, 1.1  # times that nodes are laid, at most; by how much wider clusters ask for it
_GROUND = 2.0  # over the training loss, where s starts


class BrokenState(eqx.Module):
    """A 1RSB state in every replicate of the averages: all arrays lead with the replicate axis.

    `loss_by_model` are the derivatives of the training loss in the numbers of the model, as a `Model`.
    """

    overlaps: BrokenOverlaps
    conjugates: BrokenOverlaps
    s: jax.Array
    train_loss: jax.Array
    elevation: jax.Array
    gen_error: jax.Array
    loss_by_model: Model
    loss_by_alpha: jax.Array
    loss_by_log_s: jax.Array
    residual: jax.Array
    status: jax.Array

    @property
    def energy(self) -> jax.Array:
        """Training loss / d of the minima that s selects, ``d (s loss) / ds``."""
        return self.train_loss + self.loss_by_log_s

    @property
    def complexity(self) -> jax.Array:
        """Complexity Sigma of these minima, the logarithm of their number over d: ``s^2 d loss / ds``."""
        return self.s * self.loss_by_log_s

    def numbers(self) -> dict[str, jax.Array]:
        """Everything that is shown of a state, by name."""
        own = ("s", "train_loss", "elevation", "gen_error", "energy", "complexity")
        return {**vars(self.overlaps), **{name: getattr(self, name) for name in own}}


class BrokenPoint(Result):
    """A state with one step of replica symmetry breaking, beside the replica-symmetric (RS) one that it comes from.

    Numbers are means over independent replicates of the averages, and error bars those of these means.

    Attributes:
        model, alpha, branch: what was asked for.
        ground: whether s is that of the ground state.
        rs: the RS state, on the same lines.
        replicates: the state in every replicate.
        overlaps: order parameters.
        s: Parisi parameter, an inverse energy.
        train_loss: training loss / d.
        elevation: by how much the training loss lies above that of the RS state on the same averages.
        gen_error: test error eps_g of the minima that s selects; that of the linear baseline is `rs.gen_error_linear`.
    """

    model: Model
    alpha: jax.Array
    rs: FixedPoint
    replicates: BrokenState
    branch: str = eqx.field(static=True)
    ground: bool = eqx.field(static=True)
    overlaps = OfMean[BrokenOverlaps]()
    s = OfMean[jax.Array]()
    train_loss = OfMean[jax.Array]()
    elevation = OfMean[jax.Array]()
    gen_error = OfMean[jax.Array]()

    @property
    def mean(self) -> BrokenState:
        """Means over the replicates, in the fields of `BrokenState`."""
        return jax.tree.map(lambda a: jnp.mean(a, 0), self.replicates)

    @property
    def stderr(self) -> BrokenState:
        """Error bars of these means; see `results.error_bar`."""
        return jax.tree.map(error_bar, self.replicates)

    @property
    def status(self) -> jax.Array:
        """The worst `Status` over the replicates, as an integer."""
        return jnp.max(self.replicates.status)

    @property
    def broken(self) -> jax.Array:
        """Whether minima fall into clusters; if not, and the state is `ok`, q1 = q0 and the RS state is exact."""
        each = self.replicates.overlaps
        return jnp.any(each.q1 != each.q0)

    @property
    def energy(self) -> jax.Array:
        """Training loss / d of the minima that s selects; see `BrokenState`."""
        return jnp.mean(self.replicates.energy)

    @property
    def complexity(self) -> jax.Array:
        """Complexity of these minima; see `BrokenState`."""
        return jnp.mean(self.replicates.complexity)

    def numbers(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Means of all that is shown of the state, and their error bars."""
        each = self.replicates.numbers()
        return {name: jnp.mean(a, 0) for name, a in each.items()}, {name: error_bar(a) for name, a in each.items()}

    def to_dict(self) -> dict[str, Any]:
        """Setting, numbers and error bars, ready for JSON."""
        means, bars = ({k: np.asarray(a).tolist() for k, a in part.items()} for part in self.numbers())
        ends = {"broken": bool(self.broken), "status": self.status_name, "stderr": bars}
        return {"alpha": float(self.alpha), "branch": self.branch, **means, **ends}

    def describe(self) -> Description:
        kind = "ground state" if self.ground else "state"
        what = f"{self.branch} branch at alpha = {self.alpha:g}, 1RSB {kind}"
        status = f"{self.status_name}, residual {float(jnp.max(self.replicates.residual)):.1e}"
        row = ("not broken", "", "q1 = q0: the replica-symmetric state is exact")
        details = [row] if self.ok and not self.broken else []
        return Description(what, status, rows_of(*self.numbers()), details)


def solve_1rsb(
    model: Model,
    alpha: Any,
    branch: str = "positional",
    *,
    s: Any = None,
    order: int = ORDER,
    lines: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> BrokenPoint:
    """A state with one step of replica symmetry breaking: how far off the replica-symmetric one is.

    The RS state is solved first; its minima are then let fall into clusters. Without jumps of the proximal operator
    (`FixedPoint.jumps`, and a jump mass below 2 %) there is nothing to break: q1 = q0, and the elevation is zero. Takes
    concrete numbers in float64: the elevation is a small part of the loss. Inner averages take 24 * 3^(L r - 1) nodes;
    what was checked is two fields.

    All numbers of the state have first derivatives in the model and alpha, in both modes, which contain the jumps: the
    training loss and the elevation by the envelope theorem, the others by the implicit function theorem.

    Args:
        model: attention layer and data.
        alpha: samples per dimension, n / d.
        branch: "positional", "semantic" or "uninformed".
        s: Parisi parameter, an inverse energy; by default that of the ground state, ``d loss / d s = 0``. Smaller ones
            select more numerous minima of higher energy.
        order, lines, seed: of the rule of lines, see `line_nodes`.
        replicates: of the averages; their scatter is the error bar.

    Raises:
        InputError: as `solve`; a model in float32 or with traced numbers, an `s` that is not positive.
    """
    check_model(model, branch)
    require_choice(branch, "branch", (*PAIR, "uninformed"))
    alpha = check_alpha(model, alpha)
    held = lax.stop_gradient((model, alpha))
    if not is_concrete(held):
        raise InputError("model", "must have concrete numbers for solve_1rsb, got traced ones: call it outside jax.jit")
    if model.lam.dtype != jnp.float64:
        want = "must be in float64 for solve_1rsb: use jax.config.update('jax_enable_x64', True)"
        raise InputError("model", f"{want}, got {model.lam.dtype}")
    if model.penalty is not None:
        raise InputError("model", f"must have no penalty besides the ridge for solve_1rsb, got {model.penalty!r}")
    if model.kinds is not None:
        raise InputError("model", "must have tokens without classes for solve_1rsb, got a law with sentences")
    require_count(replicates, "replicates", 2)
    if s is not None:
        require_number(s, "s", "positive", lambda v: v > 0)
        s = jnp.asarray(s, model.lam.dtype)
    rule = lines_1rsb(model, order, lines, replicates, seed)
    rs = solve(model, alpha, branch, rule)
    searched, differentiated = lax.stop_gradient(rs), not is_concrete((model, alpha))
    found = run_one(_replicates(searched, rule, s, differentiated))
    states = []
    for k in range(replicates):
        part = jax.tree.map(lambda a, k=k: a[k], rs.replicates)
        if k in found:
            states.append(_broken(rs, part, rule.replicate(k), *found[k]))
        else:
            states.append(_unbroken(part, s, not _breaks(searched)))
    return BrokenPoint(model, alpha, rs, jax.tree.map(lambda *a: jnp.stack(a), *states), branch, s is None)


def lines_1rsb(model: Model, order: int, lines: int | None, replicates: int, seed: int) -> Rule:
    """The lines of `solve_1rsb`, on which its RS state is solved too."""
    return line_nodes(model, order, lines=lines, points=_POINTS, seed=seed, replicates=replicates)


class _Near(NamedTuple):
    """Where a replicate starts that others went before: what breaking did to one of them."""

    shift: BrokenOverlaps  # of the order parameters
    s: jax.Array
    matrix: np.ndarray  # of Newton's method there


def _breaks(rs: FixedPoint) -> bool:
    """Whether the proximal operator jumps, so that there may be something to break."""
    return bool(rs.jumps) or float(rs.diagnostics.jump_mass) > _SEEN


def _replicates(rs: FixedPoint, rule: Rule, s: jax.Array | None, differentiated: bool) -> Path:
    """Path of the searches in all replicates: what was found, and how it moves if that is asked for, by replicate.

    They run one after the other until one is found, and from there at once the others and those that failed.
    """
    found: dict[int, Found | None] = {}
    left = [k for k in range(rule.replicates) if _breaks(rs) and rs.replicates.status[k] <= Status.stalled]
    laid = dict(zip(left, (yield [Call(_lay, (rs, s, k, rule.replicate(k))) for k in left]), strict=True))
    near = None
    while left and near is None:
        k = left.pop(0)
        found[k] = yield from _search(rs, s, None, k, laid[k])
        near = _near(rs, k, found[k])
    if near is not None:
        again = [*left, *(k for k in found if _near(rs, k, found[k]) is None)]
        for k, new in zip(again, (yield [_search(rs, s, near, k, laid[k]) for k in again]), strict=True):
            every = [one for one in (found.get(k), new) if one is not None]
            found[k] = min(every, key=lambda one: one.residual, default=None)
    ends = {k: one for k, one in found.items() if one is not None}
    moves = [None] * len(ends)
    if differentiated:
        moves = yield [Call(Found.moving, (one,)) for one in ends.values()]
    return dict(zip(ends, zip(ends.values(), moves, strict=True), strict=True))


class _Laid(NamedTuple):
    """Averages, and the place that their nodes were laid for."""

    x: BrokenOverlaps
    s: jax.Array
    averages: Averages


def _lay(rs: FixedPoint, s: jax.Array | None, k: int, lines: Any) -> _Laid:
    """The nodes of replicate k for a start of its own, of clusters that are wider than the state's."""
    state = jax.tree.map(lambda a: a[k], rs.replicates)
    x, first = _start(rs.model, state, s, branch_of(rs.branch).free(rs.model))
    return _Laid(x, first, averages_at(rs.model, state.overlaps, x, first, lines))


def _search(rs: FixedPoint, s: jax.Array | None, near: _Near | None, k: int, laid: _Laid) -> Path:
    """Path to where Newton's method ends in replicate k, from its nodes: to a `Found`, or to None.

    Args:
        near: where to start, if not where the nodes were laid. Where clusters become wider than they were there, nodes
            are laid again, since jumps have come near to other fields.
    """
    model, state = rs.model, jax.tree.map(lambda a: a[k], rs.replicates)
    x, first, matrix = laid.x, laid.s, None
    if near is not None:
        x, first, matrix = jax.tree.map(jnp.add, _unbroken_overlaps(state.overlaps), near.shift), near.s, near.matrix
    free = branch_of(rs.branch).free(model)
    for again in range(_LAID):
        if again:
            averages = yield Call(averages_at, (model, state.overlaps, x, first, laid.averages.lines))
            laid = _Laid(x, first, averages)
        problem = Problem(model, rs.alpha, laid.averages, free, jnp.asarray(s is None), state.train_loss)
        found = yield from fixed_point(problem, x, first, matrix)
        if found is None or _trace(found.x.q1 - found.x.q0) <= _WIDER * _trace(laid.x.q1 - laid.x.q0):
            break
        x, first, matrix = found.x, found.s, found.matrix
    return found


def _near(rs: FixedPoint, k: int, found: Found | None) -> _Near | None:
    """What a replicate hands to the others, if it was found."""
    if found is None or found.status > Status.stalled:
        return None
    unbroken = _unbroken_overlaps(jax.tree.map(lambda a: a[k], rs.replicates.overlaps))
    return _Near(jax.tree.map(jnp.subtract, found.x, unbroken), found.s, found.matrix)


def _broken(rs: FixedPoint, part: Any, lines: Replicate, found: Found, moving: Moving | None) -> BrokenState:
    """What was found in one replicate, with its derivatives, beside its RS state."""
    seen = jax.tree.map(jnp.asarray, found.seen)
    zero = jnp.zeros_like(seen.loss)
    state = BrokenState(
        overlaps=found.x,
        conjugates=seen.hats,
        s=found.s,
        train_loss=seen.loss,
        elevation=zero,
        gen_error=zero,
        loss_by_model=seen.loss_by_model,
        loss_by_alpha=seen.loss_by_alpha,
        loss_by_log_s=seen.loss_by_log_s,
        residual=jnp.asarray(found.residual),
        status=jnp.asarray(int(found.status)),
    )
    state = state if moving is None else with_derivatives((rs.model, rs.alpha), state, moving)
    numbers = state.train_loss - part.train_loss, _test_error(rs.model, state.overlaps, lines)
    return eqx.tree_at(lambda b: (b.elevation, b.gen_error), state, numbers)


@program
def _test_error(model: Model, x: BrokenOverlaps, lines: Replicate) -> jax.Array:
    return gen_error_in(model, Overlaps(x.q1, x.V, x.theta, x.m), lines)


@jax.custom_jvp
def with_derivatives(numbers: tuple[Model, jax.Array], state: BrokenState, moving: Moving) -> BrokenState:
    """A state of one replicate, which moves with the model and alpha; second derivatives of the loss are NaN."""
    return state


@with_derivatives.defjvp
@precise
def _(primals: Any, tangents: Any) -> tuple[BrokenState, BrokenState]:
    numbers, state, moving = primals
    slopes, moving = first_order(((state.loss_by_model, state.loss_by_alpha), moving), numbers)
    terms = jax.tree.map(lambda a, d: jnp.sum(a * d), slopes, tangents[0])
    loss = sum(jax.tree.leaves(terms), jnp.zeros_like(state.train_loss))
    along = ravel_pytree(tangents[0])[0]
    unknown = jax.tree.map(
        lambda a, d: jnp.full_like(a, jnp.nan) * loss if eqx.is_inexact_array(a) else d, state, tangents[1]
    )
    known = jax.tree.map(lambda a: a @ along, moving)
    moved = eqx.tree_at(
        lambda s: (s.train_loss, s.overlaps, s.s, s.conjugates, s.loss_by_alpha, s.loss_by_log_s),
        unknown,
        (loss, *known),
    )
    return with_derivatives(*primals), moved


@precise
def _start(model: Model, state: Any, s: jax.Array | None, free: jax.Array) -> tuple[BrokenOverlaps, jax.Array]:
    """Where the first replicate starts: within a cluster jumps do not respond.

    Without a given s it is such that clusters are not much wider than the estimated elevation has them, which is
    ``v^2 (1 - replicon) / 8 s`` at its maximum, v = s (q1 - q0) / V: nodes do not resolve those that are.
    """
    x, told = state.overlaps, state.diagnostics
    # A mass above one is that of jumps which turn the sign of Vhat: little is left without them.
    without = jnp.where(told.jump_mass < 1, 1 / (1 - jnp.clip(told.jump_mass, *_SHARE)), 1 - told.jump_mass)
    hats = eqx.tree_at(lambda h: h.V, state.conjugates, without * state.conjugates.V)
    V = potentials.overlaps(model, hats).V
    apart = _START * (x.V - V)
    if s is None:
        s = _GROUND / state.train_loss
        v = _trace(apart) / _trace(x.V)
        from_elevation = v**2 * (1 - told.replicon) / (8 * told.rs_error)
        s = jnp.where(from_elevation > 0, jnp.minimum(s, from_elevation), s)
    # In units of q, for q0 to be positive; with several columns the jumps may carry part of the response in one
    # direction.
    root = cholesky(x.q)
    inside = inverse(root)
    values, vectors = jnp.linalg.eigh(inside @ (apart / s) @ jnp.swapaxes(inside, -1, -2))
    widest = jnp.minimum(jnp.max(jnp.abs(values), -1, keepdims=True), _WIDEST)
    ends = root @ (vectors * jnp.sqrt(jnp.clip(jnp.abs(values), _NARROWEST * widest, widest))[..., None, :])
    return BrokenOverlaps(x.q, x.q - ends @ jnp.swapaxes(ends, -1, -2), V, free[0] * x.theta, free[1] * x.m), s


def _trace(a: jax.Array) -> jax.Array:
    """Of a matrix of every token, (L, r, r), summed."""
    return jnp.sum(jnp.trace(a, axis1=1, axis2=2))


def _unbroken_overlaps(x: Overlaps | Conjugates) -> BrokenOverlaps:
    """RS order parameters, or hats, as those of 1RSB without breaking."""
    return BrokenOverlaps(x.q, x.q, x.V, x.theta, x.m)


def _unbroken(state: Any, s: jax.Array | None, ok: bool) -> BrokenState:
    """The RS state as one without breaking, with its own status; `max_steps` where breaking was not found."""
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
        status=state.status if ok else jnp.maximum(state.status, int(Status.max_steps)),
    )
