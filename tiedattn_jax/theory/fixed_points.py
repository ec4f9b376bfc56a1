"""Fixed points as results: solve a branch, with a status, error bars and diagnostics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from .. import overlaps as ov
from ..averages.default import default_nodes
from ..averages.lines import LineNodes
from ..averages.nodes import sobol_nodes
from ..averages.program import at_top_level, over_replicates, program
from ..averages.rule import Points, Replicate, Rule, check_rule, flattened
from ..errors import InputError, as_number, is_concrete, require, require_kind, require_number
from ..model import Model, check
from ..overlaps import Conjugates, Coordinates, Overlaps, admissible, branch_of, magnitudes
from ..parameters import numbers_of
from ..printing import WORDS, Description, by_token, rows_of, with_error
from ..results import OfMean, Result, Settings, Status, error_bar, has_state, mean_of_found, quorum, settled
from .implicit import followed
from .newton import either, fixed_point
from .observables import Diagnostics, diagnose, gen_error_in, gen_error_linear_in, moments
from .potentials import channel_by_model, train_loss_partials

_SMALL = 0.3  # of its largest possible size: an order parameter that the nodes' scatter may keep alive
_NOTHING = 1e-12  # an estimate below it is not worth digits: rounding of the loss
_SHOWN = 5e-4  # share of unresolved nodes that a state prints
_LOST = 0.01  # residual of an unresolved coarse state from which on the other replicates are not tried
# Factors of V and q of a start: as it is, and, where that led nowhere, with less V, and with more q: where the loss is
# steeply concave at zero, the map of a small student has negative V.
_ATTEMPTS = np.array([[1.0, 1.0], [0.03, 1.0], [1.0, 4.0]])


class State(eqx.Module):
    """A fixed point in every replicate of the averages: all arrays lead with the replicate axis."""

    overlaps: Overlaps
    conjugates: Conjugates
    train_loss: jax.Array
    gen_error: jax.Array
    gen_error_linear: jax.Array
    residual: jax.Array
    status: jax.Array
    diagnostics: Diagnostics
    train_loss_partials: tuple[Model, jax.Array]

    @property
    def has_state(self) -> jax.Array:
        """Whether each replicate has a state, (R,)."""
        return has_state(self.status, self.residual)

    def numbers(self) -> dict[str, jax.Array]:
        """Everything that is kept of a state, by name: what grids, paths, tables and reports list."""
        own = ("train_loss", "gen_error", "gen_error_linear", "residual", "status")
        return {
            **vars(self.overlaps),
            **{name: getattr(self, name) for name in own},
            **{name: getattr(self.diagnostics, name) for name in DIAGNOSTICS},
            "train_loss_by_alpha": self.train_loss_partials[1],
        }


@jax.jit
def _jumps(mass: jax.Array, bar: jax.Array) -> jax.Array:
    return jnp.abs(mass) > jnp.maximum(1e-3, jnp.where(jnp.isfinite(bar), 3 * bar, 0.0))


# What a jump makes infinite, or wrong where it is differentiated node by node.
AFFECTED = ("replicon", "d overlaps", "d gen_error", "d alpha_l", "spinodals")
DIAGNOSTICS = tuple(field.name for field in dataclasses.fields(Diagnostics))


class _Scalar(OfMean[jax.Array]):
    """An order parameter of two tokens and rank one as one number: mean over the tokens, but m of the first one."""

    def __get__(self, point: Any, owner: type) -> jax.Array:
        batch, x = jnp.shape(point.alpha), point.overlaps
        if (shape := x.theta.shape[len(batch) :]) != (2, 1, 1):
            want = f"of shape (2, 1, 1) for the scalar {self.name}, got {shape}: use overlaps.{self.name}"
            raise InputError("model", f"must be {want}")
        values = jnp.reshape(getattr(x, self.name), (*batch, 2))
        return values[..., 0] if self.name == "m" else jnp.mean(values, -1)


class FixedPoint(Result):
    """A fixed point of state evolution.

    The averages are done in R independent replicates, each solved to its own fixed point; numbers are means over those
    that have a state, over all if none has, and error bars those of these means, see `results.error_bar`.

    Attributes:
        model, alpha, branch: what was asked for.
        replicates: the fixed point of every replicate.
        overlaps: order parameters q, V (L, r, r), theta (L, r, t), m (L, r).
        conjugates: conjugate order parameters, shapes as the overlaps.
        train_loss: training loss / d, minus the free energy.
        gen_error: test error eps_g.
        gen_error_linear: test error of the linear baseline; NaN for a model without `target`.
        diagnostics: stability, jumps and the health of the proximal solves.
        q, V, theta, m: of two tokens and rank one, scalars: means over the tokens, m of the first one. In general see
            `overlaps`.
    """

    of_one = "alpha", 0
    model: Model
    alpha: jax.Array
    replicates: State
    branch: str | None = eqx.field(static=True)
    overlaps = OfMean[Overlaps]()
    conjugates = OfMean[Conjugates]()
    train_loss = OfMean[jax.Array]()
    gen_error = OfMean[jax.Array]()
    gen_error_linear = OfMean[jax.Array]()
    diagnostics = OfMean[Diagnostics]()
    q, V, theta, m = _Scalar(), _Scalar(), _Scalar(), _Scalar()

    @property
    def mean(self) -> State:
        """Means over the replicates, in the fields of `State`."""
        return self._each(_means)

    @property
    def stderr(self) -> State:
        """Error bars of these means, in the fields of `State`; see `results.error_bar`."""
        return self._each(_error_bars)

    def _each(self, summary: Callable[[State], State]) -> State:
        """What a function makes of the replicates, of every lane of a batch by itself."""
        for _ in range(jnp.ndim(self.alpha)):
            summary = jax.vmap(summary)
        return summary(self.replicates)

    @property
    def status(self) -> jax.Array:
        """The worst `Status` over the replicates, as an integer."""
        return jnp.max(self.replicates.status, -1)

    @property
    def residual(self) -> jax.Array:
        """The largest undamped relative residual over the replicates."""
        return jnp.max(self.replicates.residual, -1)

    @property
    def exists(self) -> jax.Array:
        """Whether there is a state, resolved by the nodes or not: in half of the replicates or more."""
        return quorum(self.replicates.has_state)

    @property
    def jumps(self) -> jax.Array:
        """Whether the proximal operator jumps at a share of the nodes that is more than the averages' error.

        Then the replicon is formally infinite, and derivatives taken node by node miss a term. Those of `solve` contain
        it, whatever the rule.
        """
        mass, bar = (s.diagnostics.jump_mass for s in (self.mean, self.stderr))
        return _jumps(mass, bar)

    @property
    def label(self) -> str:
        """Name of the branch found, for a concrete state; see `overlaps.label`."""
        return ov.label(self.model, self.overlaps)

    def to_dict(self) -> dict[str, Any]:
        """Setting, all that is kept of a state, and `stderr` with the error bars: JSON, where numbers are finite.

        Order parameters are numbers where all tokens have the same up to sign, that of the first one, else nested
        lists.
        """
        numbers, bars = self.mean.numbers(), self.stderr.numbers()
        pairs = {name: by_token(a, bars[name]) for name, a in numbers.items()}
        worst = {"status": self.status_name, "residual": float(self.residual)}
        return {
            "alpha": float(self.alpha),
            **numbers_of(self.model),
            "branch": self.label,
            **{name: value.tolist() for name, (value, _) in pairs.items()},
            **worst,
            "affected_by_jumps": list(AFFECTED) if self.jumps else [],
            "stderr": {name: bar.tolist() for name, (_, bar) in pairs.items() if name not in worst},
        }

    def describe(self) -> Description:
        mean, bars = self.mean.numbers(), self.stderr.numbers()
        shown = (*vars(self.overlaps), "train_loss", "gen_error")
        numbers = rows_of(*({name: a[name] for name in shown} for a in (mean, bars)))
        formal = "; formally infinite with the jumps" if self.jumps else ""
        details = []
        if self.model.provides("target"):
            details += [("gen_error_linear", f"{mean['gen_error_linear']:.7f}", WORDS["gen_error_linear"])]
        share, bar = 100 * abs(mean["jump_mass"]), 100 * bars["jump_mass"]
        mass = with_error(share, bar) if bar > 0 else f"{share:.1f}"
        details += [
            ("replicon", f"{mean['replicon']:.2f}", f"below 1: stable{formal}"),
            ("jump mass", f"{mass}%", "of Vhat, the share of the jumps of the proximal operator"),
        ]
        if not np.isnan(mean["rs_error"]):
            estimate = with_error(mean["rs_error"], bars["rs_error"]) if mean["rs_error"] > _NOTHING else "0"
            details += [("rs_error", estimate, "what replica symmetry breaking adds to train_loss, estimated")]
        details += [("second minimum", f"{mean['second_minimum']:.2%}", "of the nodes have one")]
        if self.jumps:
            details += [("jumps matter", "", "derivatives and spinodals contain them, the replicon does not")]
        if mean["unresolved"] >= _SHOWN:
            missed = f"{mean['unresolved']:.1%}"
            details += [("unresolved", missed, "of the nodes (Sobol points resolve more than lines)")]
        if self.model.lam.dtype == jnp.float32:
            details += [("float32", "", "about six digits; jax_enable_x64 gives the others")]
        what = f"{self.branch or self.label} branch at alpha = {self.alpha:g}"
        status = f"{self.status_name}, residual {self.residual:.1e}"
        if self.status == Status.absent:
            status = "absent; the numbers are of the state in which it has vanished"
        return Description(what, status, numbers, details)


def states_table(points: Sequence[FixedPoint], by: str) -> list[tuple[str, ...]]:
    """A head and a row for each fixed point: its "alpha" or its "branch", its numbers with error bars, its status."""
    rows: list[tuple[str, ...]] = []
    for point in points:
        said = point.describe()
        columns = [*said.numbers, *(row for row in said.details if row[0] in ("replicon", "jump mass"))]
        rows = rows or [(by, *(name for name, *_ in columns), "status")]
        first = f"{point.alpha:g}" if by == "alpha" else point.branch or point.label
        rows.append((first, *(number for _, number, *_ in columns), point.status_name))
    return rows


# Two programs: at a number that is zero in all replicates the error bar has no derivative, and a reverse pass through
# both would hand its NaN to the mean.
@eqx.filter_jit
def _means(states: State) -> State:
    return jax.tree.map(lambda a: mean_of_found(a, states.has_state), states)


@eqx.filter_jit
def _error_bars(states: State) -> State:
    found = jnp.where(jnp.any(states.has_state), states.has_state, True)

    def bar(a: jax.Array) -> jax.Array:
        return error_bar(jnp.where(found.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.nan))

    return jax.tree.map(bar, states)


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

    Works under `jit`, `vmap` over the numbers of the model and `alpha`, and `grad` in both modes; second derivatives in
    forward mode of either, such as `jax.hessian`. Derivatives contain the jumps of the proximal operator; how much
    there is of them says `diagnostics.jump_mass`.

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
    free = branch_of(branch).free(model)
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
    if nodes is None:
        nodes = default_nodes(model)
        point = solve(model, alpha, branch, nodes, start=start, settings=settings)
        if isinstance(nodes.stack, LineNodes) and is_concrete(point.replicates) and point.status == Status.unresolved:
            point = solve(model, alpha, branch, sobol_nodes(model), start=start, settings=settings)
        return point
    if start is None:
        point = FixedPoint(model, alpha, solve_anew(model, alpha, branch, nodes, free, settings), branch)
    else:
        point = solve_from(model, alpha, branch, nodes, start, settings)
    return _without_noise(point, nodes, settings) if is_concrete(point.replicates) else point


def _without_noise(point: FixedPoint, nodes: Rule, settings: Settings) -> FixedPoint:
    """A state with its order parameters that may be noise held at zero, if they do not grow there.

    The scatter of the nodes keeps an order parameter alive that vanishes: no residual is small relative to it, so that
    nothing settles, or every replicate settles at another value of it.
    """
    if np.all(point.replicates.status == Status.absent):
        return point
    model, alpha, branch = point.model, point.alpha, point.branch
    free = np.asarray(branch_of(branch).free(model))
    if point.ok and free.sum() != 1:
        return point
    noise = _within_bars(point) if point.ok else np.array(magnitudes(model, point.overlaps)) < _SMALL
    kept = np.where(noise, 0.0, free)
    if np.all(kept == free):
        return point
    other = FixedPoint(
        model, alpha, solve_anew(model, alpha, branch, nodes, jnp.asarray(kept, free.dtype), settings), branch
    )
    growth = jnp.stack([other.diagnostics.growth_theta, other.diagnostics.growth_m])
    if not other.ok or np.any((free > kept) & (growth >= 1)):
        return point
    if free.sum() != 1:
        return other
    status = jnp.full_like(other.replicates.status, Status.absent)
    return eqx.tree_at(lambda p: p.replicates.status, other, status)


def _within_bars(point: FixedPoint) -> np.ndarray:
    """Whether theta and m cannot be told from zero, (2,): known error bars are more than half as large."""
    both = jax.tree.map(np.asarray, (point.overlaps, point.stderr.overlaps))
    size, bar = (np.array([np.linalg.norm(a) for a in (x.theta, x.encoded)]) for x in both)
    return np.isfinite(bar) & (size < 2 * bar)


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


def solve_from(
    model: Model, alpha: Any, branch: str | None, nodes: Rule, start: Overlaps, settings: Settings | None = None
) -> FixedPoint:
    """`solve` without its checks and without the coarse averages first: from a start near the state.

    Args:
        start: overlaps, one for all replicates or with a leading replicate axis.
    """
    alpha = jnp.asarray(alpha, model.lam.dtype)
    states = solve_replicates(model, alpha, nodes, start, branch_of(branch).free(model), settings or Settings())
    return FixedPoint(model, alpha, states, branch)


def for_each(x: Overlaps, replicates: int) -> Overlaps:
    """Overlaps with a leading replicate axis, of overlaps that may have one."""
    return x if x.m.ndim == 3 else jax.tree.map(lambda a: jnp.broadcast_to(a, (replicates, *a.shape)), x)


@eqx.filter_jit
def branch_start(model: Model, branch: str | None) -> Overlaps:
    """The start of a branch."""
    return branch_of(branch).start(model)


def solve_anew(
    model: Model, alpha: jax.Array, branch: str | None, nodes: Rule, free: jax.Array, settings: Settings
) -> State:
    """`solve_replicates` from the start of a branch: on the coarse replicate, and from there on the others."""
    start = branch_start(lax.stop_gradient(model), branch)
    states = _held_phases((model, alpha, nodes, start, free), settings, coarsely=True, finely=True)
    return _followed(model, alpha, nodes, free, states)


def solve_coarsely(
    model: Model, alpha: jax.Array, nodes: Rule, start: Overlaps, free: jax.Array, settings: Settings
) -> State:
    """A state on the coarse replicate alone, from a start that may be far; it has no derivatives."""
    return _held_phases((model, alpha, nodes, start, free), settings, coarsely=True, finely=False)


def solve_replicates(
    model: Model, alpha: jax.Array, nodes: Rule, start: Overlaps, free: jax.Array, settings: Settings
) -> State:
    """The fixed point of every replicate, with all that it predicts, from a start near it, of its own or for all."""
    states = _held_phases((model, alpha, nodes, start, free), settings, coarsely=False, finely=True)
    return _followed(model, alpha, nodes, free, states)


def _held_phases(numbers: tuple, settings: Settings, *, coarsely: bool, finely: bool) -> State:
    """The last of what is wanted of `_phases`, of held numbers: under `jax.grad`, too, it is the program that solves.

    Of known numbers one program does all, called for the coarse replicate and then for each of the others.
    """
    model, alpha, nodes, start, free = numbers = lax.stop_gradient(numbers)
    starts = for_each(start, nodes.replicates)
    if not at_top_level(numbers):
        wanted = (jnp.asarray(True) if w else None for w in (coarsely, finely))
        near, states = _phases(model, alpha, nodes, starts, free, settings, *wanted)
        return states if finely else near

    def call(coarsely: bool, nodes: Rule, starts: Overlaps) -> State:
        flags = map(jnp.asarray, (coarsely, not coarsely))
        return _phases(model, alpha, nodes, starts, free, settings, *flags)[0 if coarsely else 1]

    if coarsely:
        near = call(True, nodes.only(0), jax.tree.map(lambda a: a[:1], starts))
        if not finely:
            return near
        if _lost(near):
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (nodes.replicates, *a.shape)), near)
        starts = for_each(near.overlaps, nodes.replicates)
    return over_replicates(partial(call, False), nodes, starts)


@jax.custom_jvp
def _followed(model: Model, alpha: jax.Array, nodes: Rule, free: jax.Array, states: State) -> State:
    """States of all replicates, which move with the model and alpha as fixed points do."""
    return states


@_followed.defjvp
def _(primals: Any, tangents: Any) -> tuple[State, State]:
    model, alpha, nodes, free, _ = primals
    *along, _, _, still = tangents
    states = _followed(*primals)
    moving = _tangents(model, alpha, nodes, free, states.overlaps, tuple(along))
    return states, dataclasses.replace(still, **moving)


@program
def _tangents(
    model: Model, alpha: jax.Array, nodes: Rule, free: jax.Array, xs: Overlaps, along: tuple[Model, jax.Array]
) -> dict[str, Any]:
    """Derivatives of the fields of `State` that have one, along a direction in (model, alpha)."""

    def one(args: tuple[Replicate, Overlaps]) -> dict[str, Any]:
        replicate, x = args
        dx, d_seen = followed(model, alpha, replicate, x, free, along)
        return {
            "overlaps": dx,
            "conjugates": d_seen.conjugates,
            "train_loss": d_seen.train_loss,
            "gen_error": jax.jvp(lambda m, x: gen_error_in(m, x, replicate), (model, x), (along[0], dx))[1],
            "gen_error_linear": jax.jvp(lambda m: gen_error_linear_in(m, replicate), (model,), along[:1])[1],
        }

    return lax.map(one, (nodes.stack, xs))


def no_state(like: State) -> State:
    """A state of which nothing is known, of the shapes of another."""
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    status, residual = jnp.full_like(zero.status, Status.nonfinite), jnp.full_like(zero.residual, jnp.inf)
    return dataclasses.replace(zero, status=status, residual=residual)


@program
def _phases(
    model: Model,
    alpha: jax.Array,
    nodes: Rule,
    starts: Overlaps,
    free: jax.Array,
    settings: Settings,
    coarsely: jax.Array | None,
    finely: jax.Array | None,
) -> tuple[State, State]:
    """The program that solves: fixed points one after the other, all by the same instructions.

    First the coarse replicate, from which the others then need two or three steps. A start leads nowhere where its V is
    far too large, or its q too small: then it is tried again with other ones.

    Args:
        starts: near the state, with a leading replicate axis; the first one is the start on the coarse replicate.
        coarsely, finely: whether there is a coarse phase, and one of all replicates; None leaves it out of the program.

    Returns:
        The state on the coarse replicate, and those of the replicates.
    """
    attempts = 0 if coarsely is None else len(_ATTEMPTS)

    def one(replicate: Replicate, x0: Overlaps) -> State:
        x, residual, seen, status = fixed_point(model, alpha, replicate, x0, free, settings, _sums)
        sums, M_by_model = seen.sums
        diagnostics = diagnose(model, alpha, x, seen.conjugates, sums)
        return State(
            overlaps=x,
            conjugates=seen.conjugates,
            train_loss=seen.train_loss,
            gen_error=gen_error_in(model, x, replicate),
            gen_error_linear=gen_error_linear_in(model, replicate),
            residual=residual,
            status=settled(status, diagnostics.unresolved),
            diagnostics=diagnostics,
            train_loss_partials=train_loss_partials(model, alpha, seen.channel, M_by_model, seen.conjugates),
        )

    x0 = jax.tree.map(lambda a: a[0], starts)
    traced, zero, unflatten = flattened(one, nodes.coarse, x0)

    def phase(flat: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        near, first, own = unflatten(flat), k < attempts, jnp.maximum(k - attempts, 0)
        replicate = either(first, nodes.coarse, jax.tree.map(lambda a: a[own], nodes.stack))
        x0, wanted = jax.tree.map(lambda a: a[own], starts), jnp.asarray(False if finely is None else finely)
        if coarsely is not None:
            by_V, by_q = jnp.asarray(_ATTEMPTS, x0.V.dtype)[jnp.minimum(k, attempts - 1)]
            other = eqx.tree_at(lambda x: (x.V, x.q), x0, (by_V * x0.V, by_q * x0.q))
            x0 = either(first, other, either(coarsely, near.overlaps, x0))
            wanted = jnp.where(first, coarsely & ~_ended(near), wanted & ~(coarsely & _lost(near)))
        found = lax.cond(wanted, traced, lambda *_: flat, replicate, x0)
        state = unflatten(found)
        better = first & wanted & (_ended(state) | (state.residual <= near.residual))
        return jnp.where(better, found, flat), found

    near = eqx.tree_at(lambda s: s.overlaps, no_state(unflatten(zero)), x0)
    order = jnp.arange(attempts + (0 if finely is None else nodes.replicates))
    flat, found = lax.scan(phase, ravel_pytree(near)[0], order)
    return unflatten(flat), jax.vmap(unflatten)(found[attempts:])


def _lost(near: State) -> jax.Array:
    """Whether the others need not look for a state, as the coarse replicate resolves nothing of it."""
    return (near.status == Status.unresolved) & (near.residual > _LOST)


def _ended(state: State) -> jax.Array:
    return (state.status <= Status.stalled) | (state.status == Status.absent)


def _sums(model: Model, x: Overlaps, points: Points) -> tuple[dict[str, jax.Array], Model]:
    return moments(model, x, points), channel_by_model(model, x, points)


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
    for name, want in Coordinates.shapes(model).items():
        got = jnp.shape(getattr(start, name))
        if got != want:
            raise InputError("start", f"must have {name} of shape {want}, got shape {got}")
    if is_concrete(model, start):
        finite = all(np.all(np.isfinite(a)) for a in jax.tree.leaves(start))
        with jax.ensure_compile_time_eval():  # alpha may be traced
            inside = finite and bool(admissible(model, start))
        if not inside:
            raise InputError("start", "must be finite, with q, V and q - theta rho^-1 theta^T positive definite")
