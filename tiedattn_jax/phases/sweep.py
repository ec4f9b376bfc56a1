"""Sweeps: a branch through many alphas, and states or events of many models, all in one pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from ..averages.recipes import SIZES, AnyNodes
from ..averages.rules import Rule
from ..base.arrays import GivenArray
from ..base.errors import InputError, array_of, require, require_choice, require_kind
from ..base.report import Settings, Status
from ..model.checks import check_numbers
from ..model.model import Model
from ..model.overlaps import branch_of
from ..model.parameters import Parameter
from ..theory.engine import run
from ..theory.paths import Failure, Path
from ..theory.solve import check_alpha, default_path
from ..theory.states import FixedPoint
from ..theory.thresholds import Threshold
from .best_curve import BestCurve
from .best_places import best_path
from .best_ridge import best_of, prepared_search
from .boundaries import ALPHA_L, MODELS, Boundary
from .events import EVENTS, Transition, event_of
from .follow import CURVE_SETTINGS, Curve, Progress, silent, walk
from .independent import THRESHOLDS, collected, run_settings, thresholds_of
from .inputs import check_top_level, prepared
from .locate import Guess, locate_path, transition_of
from .trace import SEARCH, first_sign_change
from .transitions import RANGE, critical_path, crossing_path

_SEARCHED = f"for alpha from {SEARCH[-1]:g} to {SEARCH[0]:g}"
# Numbers in a list, a range or an array.
Numbers: TypeAlias = Sequence[float] | Real[GivenArray, " A"]


def sweep(
    model: Model | Sequence[Model],
    along: str | Numbers | None = None,
    values: str | Numbers | None = None,
    nodes: AnyNodes = None,
    *,
    branch: str | None = "semantic",
    alpha: float | Real[GivenArray, ""] | Numbers | None = None,
    event: str | None = None,
    best: str | None = None,
    bracket: tuple[float, float] | None = None,
    settings: Settings | None = None,
    progress: Progress = silent,
) -> Curve | Boundary | BestCurve:
    """Compute states, events or best ridges of many settings, all in one pool.

        sweep(model, [0.5, 1.0, 2.0], "positional")          a branch through alpha: a `Curve`
        sweep(model, "sigma", values, alpha=2.0)             states through another number: a `Curve`
        sweep(model, "sigma", values, event="alpha_c")       an event through another number: a `Boundary`
        sweep(models, alpha=2.0)                             states of a list of models: a `Curve`
        sweep(models, event="alpha_c")                       an event of a list of models: a `Boundary`
        sweep(model, [0.5, 1.0, 2.0], best="lam")            the best ridge through alpha: a `BestCurve`
        sweep(model, "sigma", values, alpha=2.0, best="lam") the best ridge through another number: a `BestCurve`

    In a sweep through alpha the branch is followed from the largest alpha down to where it ends. The first alpha below
    the end is kept, all smaller ones are left out. In all other sweeps every setting is solved independently, as by
    `solve`, `critical_alpha`, `linear_crossing` or `best_ridge`; a failure at one setting does not affect the others.

    Args:
        model: attention layer and data, or a list of models of one kind.
        along: alphas in any order, which the curve has in increasing order; or the name of a number of the model, such
            as "sigma" or "mixing[0,1]". Leave it out for a list of models.
        values: values of that number, increasing. After alphas, this may be the name of the branch.
        nodes: recipe of the averages, or number of nodes; in a sweep through alpha by default `SIZES["curve"]`.
        branch: branch of the states. With `best`, None stands for the global minimum of the training loss, as in
            `best_ridge`.
        alpha: samples per dimension of the states, one for all settings or one for each.
        event: a name in `EVENTS`, "alpha_l", a threshold of the optimal learner, "weak_recovery" or
            "perfect_recovery", or of small starts of gradient descent, "encodings separate" or "teacher separates".
        best: name of the number whose value with the smallest test error is searched, as in `best_ridge`.
        bracket: range of values of that number, as in `best_ridge`.
        settings: tolerances; by default `CURVE_SETTINGS` in a sweep through alpha, otherwise `Settings()`.
        progress: called with the number of finished settings and the number of all settings.

    Raises:
        InputError: alphas or values are not finite and in range, or values are not increasing; the branch, event or
            number is unknown; the models are of different kinds; alpha is given beside an event, or is missing for
            states; nodes or settings are of the wrong kind; best is given beside an event, or bracket without best.
    """
    if best is None and bracket is not None:
        raise InputError("bracket", f"must be left out without best, got bracket={bracket}")
    if best is not None and event is not None:
        raise InputError("best", f"must be left out beside an event, got best={best!r} and event={event!r}")
    parameter: str
    if isinstance(model, Model) and not isinstance(along, str):
        if event is not None:
            raise InputError("event", f"must be left out where along has the alphas, got event={event!r}")
        named: Any = branch if values is None else values
        if best is None:
            return _through_alpha(model, along, named, nodes, settings, progress)
        if alpha is not None:
            raise InputError("alpha", f"must be left out where along has the alphas, got alpha={alpha}")
        parameter, branch, grid = "alpha", named, _alpha_grid(along)
        models, alpha = [model] * grid.size, grid
    elif isinstance(model, Model):
        assert isinstance(along, str)
        parameter, grid, models = _number_models(model, along, values)
    else:
        parameter, grid, models = MODELS, *_listed_models(model, along, values)
    if event is not None and alpha is not None:
        raise InputError("alpha", f"must be left out where an event is looked for in it, got alpha={alpha}")
    if best is not None:
        return _best(parameter, grid, models, alpha, branch, nodes, best, bracket, settings, progress)
    names = [f"{parameter} = {value:g}" for value in grid]
    if event is not None:
        results = events_of(event, models, names, nodes, settings, progress)
        return collected(event, parameter, grid, models, results)
    rule, tolerances = prepared(models[0], nodes, settings, even=branch is not None)
    _check_others(models)
    alphas = _alphas(models[0], alpha, len(models))
    paths = [
        _solved_point(m, a, branch_of(branch).name, rule, tolerances, nodes is None)
        for m, a in zip(models, alphas, strict=True)
    ]
    results = run_settings(paths, names, progress)
    solved = next(point for point in results if not isinstance(point, Failure))
    states = [
        _nan_point(solved, m, a) if isinstance(r, Failure) else r
        for r, m, a in zip(results, models, alphas, strict=True)
    ]
    failures = [f"{name}: {r.reason}" for name, r in zip(names, results, strict=True) if isinstance(r, Failure)]
    return Curve(branch, tuple(states), parameter, grid, tuple(failures))


def events_of(
    event: str,
    models: list[Model],
    names: Sequence[str],
    nodes: AnyNodes,
    settings: Settings | None,
    progress: Progress,
) -> Sequence[Transition | Threshold | Failure]:
    """Find an event of every model, each for itself.

    Args:
        models: models of one kind, see `check_one_kind`.
        names: names of the settings, for exceptions.

    Raises:
        InputError: the event is unknown; nodes or settings are of the wrong kind; or the search failed for all models.
    """
    event = require_choice(event, "event", [*EVENTS, ALPHA_L, *THRESHOLDS])
    if event in THRESHOLDS:
        check_top_level(models)
        return thresholds_of(event, models, names, nodes, progress)
    rule, tolerances = prepared(models[0], nodes, settings)
    _check_others(models)
    event_of("semantic baseline" if event == ALPHA_L else event, models[0])
    return run_settings([_event(m, event, rule, tolerances) for m in models], names, progress)


def _check_others(models: list[Model]) -> None:
    """Check the models behind the first one: they are of one kind, so that only the first one is checked in full."""
    check_top_level(models)
    for listed in models[1:]:
        check_numbers(listed)


def _best(
    parameter: str,
    grid: Float[np.ndarray, " A"],
    models: list[Model],
    alpha: float | Real[GivenArray, ""] | Numbers | None,
    branch: str | None,
    nodes: AnyNodes,
    best: str,
    bracket: tuple[float, float] | None,
    settings: Settings | None,
    progress: Progress,
) -> BestCurve:
    """Find the best value of a number at every setting."""
    if best == parameter:
        raise InputError("best", f"must be another number than the one that changes, got best={best!r}")
    task = prepared_search(models[0], branch, nodes, best, bracket, settings, SIZES["curve"])
    _check_others(models)
    alphas = _alphas(models[0], alpha, len(models))
    tasks = [task._replace(model=m, alpha=a) for m, a in zip(models, alphas, strict=True)]
    names = [f"{parameter} = {value:g}" for value in grid]
    results = run_settings([best_path(each) for each in tasks], names, progress)
    points = [best_of(each, branch, r) for each, r in zip(tasks, results, strict=True)]
    failures = [f"{name}: {r.reason}" for name, r in zip(names, results, strict=True) if isinstance(r, Failure)]
    return BestCurve(best, branch, tuple(points), parameter, grid, tuple(failures))


def _nan_point(solved: FixedPoint, model: Model, alpha: Float[Array, ""]) -> FixedPoint:
    """Return a `FixedPoint` full of NaN, with the shapes of another one and status `nonfinite`."""
    blank = jax.tree.map(lambda a: np.full(a.shape, np.nan, a.dtype) if a.dtype.kind == "f" else a, solved.replicates)
    status = np.full_like(blank.status, Status.nonfinite)
    states = dataclasses.replace(blank, status=status, residual=np.full_like(blank.residual, np.inf))
    return FixedPoint(model, alpha, states, solved.branch)


def _through_alpha(
    model: Model,
    alphas: Numbers | None,
    branch: Any,
    nodes: AnyNodes,
    settings: Settings | None,
    progress: Progress,
) -> Curve:
    """Follow a branch from the largest alpha down to where it ends."""
    branch = branch_of(branch).name
    nodes, settings = prepared(model, nodes, settings, CURVE_SETTINGS, size=SIZES["curve"], even=branch is not None)
    grid = _alpha_grid(alphas)
    points: list[FixedPoint] = []

    def follow() -> Path:
        for step in walk(model, list(grid[::-1]), branch, nodes, settings):
            points.append((yield step))
            progress(len(points), grid.size)
            if not points[-1].exists and len(points) > 1 and points[-2].exists:
                break

    progress(0, grid.size)
    run([follow()])
    progress(grid.size, grid.size)
    return Curve(branch, tuple(points[::-1]))


def _alpha_grid(alphas: Numbers | None) -> Float[np.ndarray, " A"]:
    """Return alphas in increasing order."""
    return np.sort(array_of(alphas, "alphas", "one or more positive, finite numbers", lambda a: a > 0))


def _number_models(
    model: Model, name: str, values: str | Numbers | None
) -> tuple[str, Float[np.ndarray, " A"], list[Model]]:
    """Return name, values and models of a sweep through a number of the model."""
    number = Parameter(name)
    if name == "alpha":
        raise InputError("along", 'must be the alphas themselves, or another number than "alpha"')
    number.read(model, None, "along")
    grid = array_of(values, "values", "one or more finite, increasing values", lambda a: np.diff(a) > 0)
    number.check(model, grid, "values")
    return name, grid, [number.set(model, None, value)[0] for value in grid]


def _listed_models(
    models: Sequence[Model], along: str | Numbers | None, values: str | Numbers | None
) -> tuple[Float[np.ndarray, " A"], list[Model]]:
    """Check that the models of a list are of one kind; return their indices and the list."""
    require_kind(models, "model", (list, tuple), "a Model or a list of models")
    require(len(models) > 0, "model", list(models), "one model or more")
    if along is not None or values is not None:
        raise InputError("along", "must be left out with a list of models, which says what changes")
    for model in models:
        require_kind(model, "model", Model, "a list of models, such as [dot_product(), dot_product(sigma=0.4)]")
    check_one_kind(models)
    return np.arange(len(models), dtype=float), list(models)


def check_one_kind(models: Sequence[Model]) -> None:
    """Check that all models are of one class, with arrays of the same shapes."""
    shapes = []
    for model in models:
        leaves, structure = jax.tree.flatten(model)
        shapes.append((structure, [(jnp.shape(a), jnp.result_type(a)) for a in leaves]))
    for k, shape in enumerate(shapes):
        if shape != shapes[0]:
            text = f"must give models of one class with arrays of the same shapes, number {k} differs"
            raise InputError("model", f"{text} from number 0: treat them apart")


def _alphas(model: Model, alpha: float | Real[GivenArray, ""] | Numbers | None, count: int) -> list[Float[Array, ""]]:
    """Return one alpha for every setting."""
    if alpha is None:
        raise InputError("alpha", "must be given for states, or event for an event, got neither")
    alphas = np.broadcast_to(alpha, count) if np.ndim(alpha) == 0 else np.asarray(alpha)
    require(alphas.shape == (count,), "alpha", alpha, f"one number, or one for each of {count} settings")
    return [check_alpha(model, a) for a in alphas]


def _solved_point(
    model: Model, alpha: Float[Array, ""], branch: str | None, rule: Rule, settings: Settings, fallback: bool
) -> Path:
    """Path of `solve` at one setting; returns a `FixedPoint`."""
    states, _, _ = yield from default_path(model, alpha, branch, rule, None, settings, fallback=fallback)
    return FixedPoint(model, alpha, states, branch)


def _event(model: Model, event: str, nodes: Rule, settings: Settings) -> Path:
    """Path that finds an event of one model without a guess; returns a `Transition`.

    Raises:
        InputError: the event does not happen.
    """
    if event in ("alpha_c", ALPHA_L):
        zero = yield from critical_path(model, nodes, RANGE, None, settings)
        critical = transition_of(EVENTS["alpha_c"], model, zero)
        return (yield from crossing_path(model, critical, nodes, RANGE, settings)) if event == ALPHA_L else critical
    definition = event_of(event, model)
    if definition.value is None:
        guess = yield from _fold_guess(definition.branches[0], model, nodes, settings)
    else:
        try:
            guess = yield from first_sign_change(definition, model, SEARCH, nodes, settings)
        except InputError:
            raise InputError("event", f"must happen, there is none {_SEARCHED}") from None
    zero = yield from locate_path(definition, model, guess, nodes, settings, True)
    return transition_of(definition, model, zero)


def _fold_guess(branch: str | None, model: Model, nodes: Rule, settings: Settings) -> Path:
    """Path that follows a branch down in alpha until it is lost; returns a `Guess` for the fold expected there.

    Raises:
        InputError: the branch is not lost.
    """
    last: FixedPoint | None = None
    for step in walk(model, list(SEARCH), branch, nodes, settings):
        point = yield step
        if last is not None and last.exists and not point.exists:
            low, high = float(point.alpha), float(last.alpha)
            return Guess(high, (last.replicates.overlaps,), low=0.5 * low, high=1.5 * high)
        last = point
    raise InputError("event", f"must happen, the {branch} branch does not end {_SEARCHED}")
