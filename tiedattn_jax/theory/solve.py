"""Solve a branch at one setting: first on the coarse replicate of the averages, then from there on all replicates.

With known numbers, also under `jax.grad` alone, `solve` runs a path of the engine (`default_path`). Under `jit` and
`vmap` it runs the same searches in one traced program (`traced_states`). Either finds states without derivatives, which
`with_tangents` then attaches.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..averages.lines import LineNodes
from ..averages.program import at_top_level, entry_by_entry
from ..averages.recipes import SOBOL_SIZES, AnyNodes, Recipe, Sobol, default_recipe, make_rule
from ..averages.rules import Replicate, Rule
from ..base.arrays import (
    Number,
    either,
    indexed,
    precise,
    repeated,
)
from ..base.errors import InputError, is_concrete, require_kind, require_number
from ..base.progress import Progress, in_parts
from ..base.results import Settings, Status, error_bar
from ..model.checks import check, check_alpha
from ..model.model import Model
from ..model.overlaps import Coordinates, Overlaps, branch_of, magnitudes
from .engine import PathMaker, run_one, with_paths
from .equations import Equations, with_tangents
from .newton import ATTEMPTS, Newton, Outcome, is_hopeless, stall_of
from .setting import Path, Setting, branch_start, revived
from .states import FixedPoint, State, check_start


def _paths(
    model: Model,
    alpha: Number,
    branch: str | None = "semantic",
    nodes: AnyNodes = None,
    *,
    start: FixedPoint | Overlaps | None = None,
    settings: Settings | None = None,
) -> PathMaker[FixedPoint]:
    """Return the path of `solve` at any setting."""
    _, _, branch, rule, overlaps, tolerances = _checked(model, alpha, branch, nodes, None, start, settings)
    rule = make_rule(rule, model)

    def path(model: Model, alpha: Float[Array, ""]) -> Path:
        setting = Setting.of(*lax.stop_gradient((model, alpha)), rule, branch, tolerances)
        states, on, free = yield from default_path(setting, branch, overlaps, fallback=nodes is None)
        if not is_concrete((model, alpha)):  # jax differentiates the sweep
            states = with_tangents(jax.device_put(states), model, alpha, on, jnp.asarray(free))
        return FixedPoint(model, alpha, states, branch)

    return path


@with_paths(_paths)
def solve(
    model: Model,
    alpha: Number,
    branch: str | None = "semantic",
    nodes: AnyNodes = None,
    *,
    rtol: float | None = None,
    start: FixedPoint | Overlaps | None = None,
    settings: Settings | None = None,
    progress: Progress = None,
) -> FixedPoint:
    """Solve the saddle-point equations (7)-(8) on a branch.

    The function works under `jit`, under `vmap` over the numbers of the model and `alpha`, and under `grad` in both
    modes and to second order. On a CPU the entries of a `vmap` are solved one after the other; `sweep` runs many
    settings at once. A fit needs no ``jax.jit(jax.value_and_grad(jax.vmap(...)))``, which compiles once without and
    once with `start`. A loop over the settings in Python, with the last states as `start`, compiles once, as on the
    page on fitting.

    Derivatives contain the jumps of the proximal operator; `diagnostics.jump_mass` measures the jumps. At a state with
    jumps, second derivatives of order parameters are as rough as the averages. Example: the positional state at alpha =
    2 on lines of order 5. There the second derivatives of order parameters deviate by up to 10 % from finite
    differences, and those of the training loss by less than 1 %.

    Args:
        model: attention layer and data.
        alpha: samples per dimension, n / d.
        branch: "positional" (theta = 0), "semantic" (m = 0), "uninformed" (both zero), or None, which imposes nothing.
        nodes: recipe of the averages, or number of nodes; see `make_rule`. If the default ones leave the state
            `unresolved`, as lines do for a student much larger than the teacher, the state is solved on `Sobol` points
            (concrete numbers only).
        rtol: largest relative error bar of the order parameters and of the training loss. The averaging rule is then
            chosen and refined until this holds, so `nodes` must not be given. If the largest averages do not reach it,
            the status is `imprecise`. Not available under `jit`.
        start: a state nearby, such as the one before in a scan or a fit, or overlaps near the solution. By default the
            branch has its own start, and the search begins on coarse averages. A branch that is not found from `start`
            is looked for from its own start (concrete numbers only).
        settings: tolerances; by default `Settings()`.
        progress: None, True for a bar, or a function of the numbers of root searches that are done and known.

    Returns:
        A `FixedPoint` with the order parameters, the losses over d, their error bars, and a `status` that says whether
        it is a fixed point. Its `overlaps` have an axis of tokens first: q and V (L, r, r), theta (L, r, t), m (L, r).
        A branch that does not exist at this alpha has the status `absent`, after searches from two starts; another
        branch is never returned under its name. If there is no state, the losses are NaN and all derivatives are zero,
        so that ``jnp.where(state.ok, f(state), 0.0)`` has a finite gradient. An order parameter within two error bars
        of zero, or a small one in a search that does not settle, may come from the scatter of the nodes. It is held at
        zero, provided that it does not grow from there (concrete numbers only).

    Raises:
        InputError: if `alpha` is not positive, `branch` is unknown, shapes do not fit, or the loss is not even; also if
            the dtype does not allow `rtol`, or if `rtol` is given together with `nodes`.
    """
    request = _checked(model, alpha, branch, nodes, rtol, start, settings)
    return solve_checked(request, progress) if rtol is None else _refined(request, rtol, progress)


class Request(NamedTuple):
    """The arguments of `solve` after their checks."""

    model: Model
    alpha: Float[Array, ""]
    branch: str | None
    nodes: Rule | None = None
    start: Overlaps | None = None
    settings: Settings = Settings()


def solve_checked(request: Request, progress: Progress = None) -> FixedPoint:
    """Return the result of `solve`: search the states of held numbers, and attach their derivatives."""
    model, alpha, branch, nodes, start, settings = request
    primal, start = lax.stop_gradient(((model, alpha), start))
    rule = make_rule(None, primal[0]) if nodes is None else nodes
    if at_top_level(*primal, nodes, start):
        setting = Setting.of(*primal, rule, branch, settings)
        states, rule, free = run_one(default_path(setting, branch, start, fallback=nodes is None), progress)
        states, free = jax.device_put(states), jnp.asarray(free)
    else:
        free = branch_of(branch).free(primal[0])
        starts = branch_start(primal[0], branch) if start is None else start
        starts = starts if starts.m.ndim == 3 else repeated(starts, rule.replicates)
        states = entry_by_entry(traced_states)(*primal, rule, free, settings, starts, start is None)
    return FixedPoint(model, alpha, with_tangents(states, model, alpha, rule, free), branch)


def default_path(setting: Setting, branch: str | None, start: Overlaps | None, *, fallback: bool) -> Path:
    """Path of `solve` with concrete numbers; it returns the states, their rule, and which of theta and m are free.

    Args:
        fallback: whether a state that lines leave unresolved is solved on Sobol points; `solve` sets it if it was given
            no rule.
    """
    states, free = yield from _solved(setting, branch, start)
    if fallback and isinstance(setting.nodes.stack, LineNodes) and np.max(states.status) == Status.unresolved:
        setting = setting._replace(nodes=Sobol(SOBOL_SIZES["fallback"]).rule(setting.model))
        states, free = yield from _solved(setting, branch, start)
    return states, setting.nodes, free


# An order parameter may be due to the scatter of the nodes if it is below this share of its largest possible size.
_SMALL = 0.3


def _solved(setting: Setting, branch: str | None, start: Overlaps | None) -> Path:
    """Path of `solve` on given averages; it returns the states, and which of theta and m are free in them."""
    states = None if start is None else (yield from setting.solve_replicates(start))
    # A branch is defined without its start: if replicates lack it from there, they look for it from its own. A start
    # does not change what the nodes do not resolve.
    if states is None or (branch and not np.all(states.has_state | (states.status == Status.unresolved))):
        again = yield from setting.solve_from_far(branch_start(setting.model, branch))
        states = again if states is None or np.sum(again.has_state) >= np.sum(states.has_state) else states
    free = np.asarray(setting.free)
    if np.all(states.status == Status.unresolved):
        return states, setting.free
    reduced = np.where(_noise(setting.model, states, free), 0.0, free)
    if np.all(reduced == free):
        return states, setting.free
    # The scatter of the nodes can keep an order parameter alive that vanishes in the limit. No residual is small
    # relative to it, so either the search does not settle, or every replicate settles at another value. We hold it at
    # zero if it does not grow from there.
    reduced_setting = setting._replace(free=reduced)
    replicates = yield from reduced_setting.solve_from_far(branch_start(setting.model, branch))
    reduced_point = FixedPoint(setting.model, setting.alpha, replicates, branch)
    growth = np.stack([reduced_point.diagnostics.growth_theta, reduced_point.diagnostics.growth_m])
    if not reduced_point.ok or np.any((free > reduced) & (growth >= 1)):
        return states, setting.free
    if free.sum() == 1:
        replicates = dataclasses.replace(replicates, status=np.full_like(replicates.status, Status.absent))
    return replicates, reduced_setting.free


def _noise(model: Model, states: State, free: Float[np.ndarray, " 2"]) -> Bool[np.ndarray, " 2"]:
    """Return which of theta and m may be noise.

    If a replicate has not settled, these are the small ones; else those that are within two error bars of zero.
    """
    usable = bool(np.all(states.status <= Status.stalled))
    if np.all(states.status == Status.absent) or (usable and free.sum() != 1):
        return np.zeros(2, bool)
    if not usable:
        return np.array(magnitudes(model, FixedPoint(model, jnp.zeros(()), states, None).overlaps)) < _SMALL
    pair = states.overlaps.theta, states.overlaps.encoded
    size = np.array([np.linalg.norm(np.mean(a, 0)) for a in pair])
    bar = np.array([np.linalg.norm(error_bar(a)) for a in pair])
    return np.isfinite(bar) & (size < 2 * bar)  # they cannot be distinguished from zero


_FIRST, _SECOND = -2, -1  # the searches on the coarse replicate, before those on the replicates 0, 1, ...


@precise
def traced_states(
    model: Model,
    alpha: Float[Array, ""],
    nodes: Rule,
    free: Float[Array, " 2"],
    settings: Settings,
    starts: Overlaps,
    coarse_first: bool,
) -> State:
    """Return the states of all replicates in traced code: `Setting.solve_from_far` or `solve_replicates` as one loop.

    The program contains one copy of the evaluation. In a batch on an accelerator all entries wait for the slowest one
    in every search. That costs little: at 16 alphas from .5 to 2 a batch makes 95 evaluations of the semantic branch,
    where the slowest entry alone makes 92.

    Args:
        starts: overlaps from which the replicates start, with a leading axis. The coarse replicate uses the first.
        coarse_first: whether the coarse replicate is solved first, as in `Setting.solve_from_far`.
    """
    coordinates, stall = Coordinates(model, free), jnp.asarray(stall_of(nodes.size), model.lam.dtype)
    vectors = jax.vmap(coordinates.pack)(starts)

    def from_near(pair: tuple[Replicate, Float[Array, " n"]]) -> Outcome:
        replicate, v = pair
        return Equations(model, alpha, replicate, free).search(v, settings, 1, stall)

    def from_far(coarse: Outcome, k: Int[Array, ""]) -> tuple[Outcome, Outcome]:
        """Run search k after the `coarse` outcome; return the coarse outcome from then on, and that of this search.

        Search -2 is the first one on the coarse replicate, -1 the second one, and k >= 0 is that on replicate k. The
        coarse outcome stands for those of the searches that are left out.
        """
        is_first, is_second = k == _FIRST, k == _SECOND
        replicate = either(k < 0, nodes.coarse, indexed(nodes.stack, jnp.maximum(k, 0)))
        second_start = coordinates.pack(revived(model, indexed(starts, 0), coordinates.unpack(coarse.v)))
        v = jnp.where(is_first, vectors[0], jnp.where(is_second, second_start, coarse.v))
        hopeless = is_hopeless(coarse.status, coarse.residual, coarse.unresolved)
        skip = jnp.where(is_second, coarse.status != Status.absent, hopeless)
        attempts = jnp.where(skip, 0, jnp.where(is_first, len(ATTEMPTS), 1))
        outcome = Equations(model, alpha, replicate, free).search(v, settings, attempts, stall)
        outcome = either(skip | (is_second & (outcome.status > Status.stalled)), coarse, outcome)
        return either(k < 0, outcome, coarse), outcome

    if coarse_first:
        empty_evaluation = Equations(model, alpha, nodes.coarse, free).empty_evaluation(vectors[0])
        blank = Newton(coordinates, settings, stall, 1).begin(vectors[0], empty_evaluation).outcome
        outcomes = lax.scan(from_far, blank, jnp.arange(_FIRST, nodes.replicates))[1]
        outcomes = jax.tree.map(lambda a: a[-_FIRST:], outcomes)
    else:
        outcomes = lax.map(from_near, (nodes.stack, vectors))

    def state(pair: tuple[Replicate, Outcome]) -> State:
        replicate, outcome = pair
        return Equations(model, alpha, replicate, free).state(outcome)

    return lax.map(state, (nodes.stack, outcomes))


# Keys: numbers of nodes in a replicate. Values: largest relative error bars on lines of that many nodes, measured at
# the standard setting.
LADDER = {2**12: 1e-3, 2**14: 3e-4, 2**15: 6e-5, 2**16: 3e-5, 2**18: 4e-6, 2**19: 5e-7}
_POOR = 30  # factor above the error bar in `LADDER` from which on Sobol points are tried, too


def _refined(request: Request, rtol: float, progress: Progress) -> FixedPoint:
    """Solve on more and more nodes, until the error bars are at most `rtol`.

    The recipe is that of `default_recipe`. If these are lines whose error bars are large, Sobol points are tried as
    well, and the rule with the smaller error bar is kept.
    """

    def solved_on(recipe: Recipe) -> tuple[FixedPoint, float, bool]:
        """Return the state on the nodes of a recipe, its error, and whether the nodes are lines."""
        nodes = recipe.rule(request.model)
        point = solve_checked(request._replace(nodes=nodes), progress)
        return point, _relative_error(point), isinstance(nodes.stack, LineNodes)

    progress = in_parts(progress)
    first = next((k for k, error in enumerate(LADDER.values()) if error <= rtol), len(LADDER) - 1)
    recipe: Recipe = default_recipe(request.model)
    for n in list(LADDER)[first:]:
        point, error, on_lines = solved_on(recipe.about(n, request.model))
        if on_lines and error > max(rtol, _POOR * LADDER[n]):
            sobol_point, sobol_error, _ = solved_on(Sobol(n))
            if sobol_error < error:
                recipe, point, error = Sobol(), sobol_point, sobol_error
        if not point.ok or error <= rtol:
            return point
        request = request._replace(start=point.overlaps)
    return eqx.tree_at(lambda p: p.replicates.status, point, jnp.full_like(point.replicates.status, Status.imprecise))


def _relative_error(point: FixedPoint) -> float:
    """Return the largest relative error bar of order parameters and training loss; infinite for an unusable state."""
    numbers, bars = (jax.tree.leaves((s.train_loss, s.overlaps)) for s in (point.mean, point.stderr))
    relative = (jnp.where(a == 0, 0.0, bar / jnp.abs(a)) for a, bar in zip(numbers, bars, strict=True))
    error = max(float(jnp.max(a)) for a in relative)
    return error if point.ok else np.inf


def _checked(
    model: Model,
    alpha: Number,
    branch: str | None,
    nodes: AnyNodes,
    rtol: float | None,
    start: FixedPoint | Overlaps | None,
    settings: Settings | None,
) -> Request:
    """Check the arguments of `solve`; without settings, set a tolerance that allows for `rtol`."""
    model = check(model, even=branch is not None)
    require_kind(settings, "settings", (Settings, type(None)), "a Settings such as Settings(tol=1e-4)")
    request = Request(
        model,
        check_alpha(model, alpha),
        branch_of(branch).name,
        None if nodes is None else make_rule(nodes, model),
        None if start is None else check_start(model, start.seen_by(model) if isinstance(start, FixedPoint) else start),
    )
    tol, dtype = Settings.tol, model.lam.dtype
    if rtol is not None:
        smallest = 100 * float(jnp.finfo(dtype).eps)
        requirement = f"at least {smallest:.2g} in {dtype}"
        if dtype == jnp.float32:
            requirement += ', or a model in float64, after jax.config.update("jax_enable_x64", True)'
        require_number(rtol, "rtol", requirement, lambda v: v >= smallest)
        if nodes is not None:
            raise InputError("rtol", f"chooses the averages: give either nodes or rtol, got rtol={rtol} beside nodes")
        if not is_concrete((model, alpha)):
            raise InputError("rtol", f"needs concrete numbers, got rtol={rtol} under a jax transformation: give nodes")
        tol = min(tol, rtol / 10)
    return request._replace(settings=settings or Settings(tol=tol))
