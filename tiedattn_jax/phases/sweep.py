"""Sweeps: one question asked of many settings, all in one pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from ..averages.recipes import SIZES, SOBOL_SIZES, AnyNodes, Sobol, make_rule
from ..averages.rules import Fields
from ..base.arrays import GivenArray
from ..base.errors import InputError, as_flag, require, require_choice, require_kind, require_positive
from ..base.kinds import with_other_forms
from ..base.progress import Progress, Report, reporter
from ..base.results import Settings
from ..model.checks import check_numbers
from ..model.model import Model
from ..model.overlaps import BRANCHES, branch_of
from ..model.parameters import MODELS, AnyModel, Axis, axes_of, names_of
from ..theory.engine import run, run_one
from ..theory.paths import Call, Failure, Path
from ..theory.solve import default_path
from ..theory.states import FixedPoint
from .best import best_of, best_path, prepared_task
from .events import ALPHA_L, EVENTS, event_of
from .follow import CURVE_SETTINGS, check_top_level, prepared, walk
from .locate import Family, Start
from .questions import BEST, LANDSCAPE, QUESTIONS, kind_of
from .table import Missing, Table
from .trace import TRACE_SETTINGS, trace_path
from .transitions import THRESHOLDS, transition_path


@with_other_forms
def sweep(
    model: Model | Sequence[Model | tuple[Model, Any]],
    question: str | None,
    *axes: Axis,
    nodes: AnyNodes = None,
    follow: bool | None = None,
    branch: str | None = "semantic",
    bracket: tuple[float, float] | None = None,
    start: Start | None = None,
    sensitivities: bool = False,
    kappa: Any = 0.0,
    size: Any = None,
    settings: Settings | None = None,
    progress: Progress = None,
    **numbers: float | Sequence[float] | Real[GivenArray, "..."],
) -> Table:
    """Ask one question of many settings: states, events, best values or landscapes, over no axis, one or two.

        sweep(model, "semantic", alpha=[0.5, 1.0, 2.0])         a branch, followed through alpha
        sweep(model, "semantic", alpha=2.0, sigma=values)       states through another number
        sweep(model, "alpha_c", sigma=values, follow=True)      an event, followed from value to value
        sweep(model, "alpha_c", omega=values, sigma=values)     an event over two numbers
        sweep(models, "best lam", alpha=1.0)                    the best ridge of every model in a list

    Every setting is computed independently, as by `solve`, `critical_alpha` or `best_ridge`; a failure at one does not
    affect the others. A branch through alpha alone is instead followed from the largest alpha down to the first one
    beyond its end. An event through one number is followed with ``follow=True``: the points before predict the next
    one, which then takes a single evaluation. "alpha_l" costs as much as the three events that it may be.

    Args:
        model: a model, or a list of models of one kind or of pairs (model, alpha): their places are an axis "model".
        question: a branch, or None for any state; a name in `EVENTS` or "alpha_l"; a threshold of the optimal learner,
            "weak_recovery" or "perfect_recovery", or of small starts of gradient descent, "encodings separate" or
            "teacher separates"; "best " and the name of a number, as in `best_ridge`; or "landscape".
        axes: what a keyword cannot name, see `Axis`: an entry of an array, or a number of your own.
        numbers: alpha and numbers of the model by name. A single value fixes the number, several increasing ones are an
            axis; those that are followed may decrease. States and best values need alpha, other questions refuse it.
        nodes: recipe of the averages, or number of nodes; by default as in the function for one setting, for a branch
            that is followed `SIZES["curve"]`, for landscapes with a `size` 2^14 Sobol points.
        follow: whether to follow; by default only a branch through alpha alone.
        branch, bracket: branch of the best value, None for the global minimum, and its range, as in `best_ridge`.
        start: where an event that is followed is expected at the first value, as in `find_event`; by default the alphas
            `SEARCH` are searched.
        sensitivities: whether every slope of an event that is followed is exact. This may compile one more program.
        kappa, size: as in `landscape`.
        settings: tolerances; by default `Settings()`, and looser ones for what is followed from predicted starts.
        progress: None, True for a bar, or a function of the numbers of finished and of all settings.

    Raises:
        InputError: a question, number, option or model cannot be used, which the message explains; an event that is
            followed is a fold or does not happen at the first value; or the search failed at all settings.
    """
    number = question.removeprefix(BEST) if isinstance(question, str) and question.startswith(BEST) else None
    events = *EVENTS, ALPHA_L, *THRESHOLDS
    if number is None:
        called = (name for name, kind in QUESTIONS.items() if kind.call is not None)
        question = require_choice(question, "question", [*BRANCHES, *events, *called])
    is_state, is_landscape, is_event = question in BRANCHES, question == LANDSCAPE, question in events
    names = names_of(model, axes, numbers)
    in_alpha = is_state and names == ["alpha"]
    follow = in_alpha if follow is None else as_flag(follow, "follow")
    if follow and not (in_alpha or (is_event and len(names) == 1 and names != [MODELS])):
        raise InputError("follow", "must be left out but for a branch through alpha and an event through one number")
    sensitivities = as_flag(sensitivities, "sensitivities")
    for name, given, belongs, owner in (
        ("branch", branch != "semantic", number is not None, 'the best value of a number, such as "best lam"'),
        ("bracket", bracket is not None, number is not None, 'the best value of a number, such as "best lam"'),
        ("start", start is not None, is_event and follow, "an event with follow=True"),
        ("sensitivities", sensitivities, is_event and follow, "an event with follow=True"),
        ("kappa", np.any(kappa), is_landscape, 'the question "landscape"'),
        ("size", size is not None, is_landscape, 'the question "landscape"'),
    ):
        if given and not belongs:
            raise InputError(name, f"must be left out but for {owner}")
    grid = Grid.of(model, axes, numbers, follow, with_alpha=kind_of(question).with_alpha)
    report = reporter(progress, "settings")
    if follow and is_state:
        return _followed_branch(grid, question, nodes, settings, report)
    if is_event:
        event = str(question)
        if follow and event not in THRESHOLDS:
            rule, tolerances = prepared(grid.models[0], nodes, settings, TRACE_SETTINGS)
            axis = grid.axes[0]
            return run_one(trace_path(event, grid.models[0], axis, rule, tolerances, start, sensitivities, report))
        require_kind(start, "start", type(None), f'None for "{event}"')
        return _events(grid, event, nodes, settings, report)
    if number is not None:
        return _best(grid, number, branch, nodes, bracket, settings, report)
    if is_state:
        return _states(grid, question, nodes, settings, report)
    require_kind(settings, "settings", type(None), f'None for "{question}"')
    options = {"kappa": kappa, "size": size} if is_landscape else {}
    if size is not None:  # one rule for all cells
        nodes = make_rule(nodes, Fields.of(grid.models[0], student=1), Sobol(SOBOL_SIZES["sphere map"]))
    return _called(grid, str(question), nodes, options, report)


class Grid(NamedTuple):
    """All settings: the axes, and a model and an alpha (or None) for every cell, the last axis running fastest."""

    axes: list[Axis]
    models: list[AnyModel]
    alphas: list[Any]

    @classmethod
    def of(
        cls,
        model: Any,
        axes: Sequence[Axis],
        numbers: dict[str, Any],
        follow: bool = False,
        *,
        with_alpha: bool,
        kind: type = Model,
        planar: bool = False,
    ) -> Grid:
        """Check what a caller gave, and build the settings of all cells.

        Args:
            follow: whether the settings are followed along their axis.
            with_alpha: whether the question is about given alphas.
            kind: class of the models.
            planar: whether there must be two axes.
        """
        listed = isinstance(model, (list, tuple))
        require(not listed or len(model) > 0, "model", model if listed else None, "one model or more")
        pairs = [m if isinstance(m, tuple) and len(m) == 2 else (m, None) for m in (model if listed else [model])]
        kinds = "a list of models, such as [DotProduct(), DotProduct(sigma=0.4)]" if listed else "a Model or a list"
        for each, _ in pairs:
            require_kind(each, "model", kind, kinds)
        check_top_level([each for each, _ in pairs])
        order = "increasing" if not follow else "any" if with_alpha else "monotonic"
        checked = [axes_of(each, axes, numbers, order) for each, _ in pairs]
        places = [Axis(MODELS, np.arange(len(pairs), dtype=float))] if listed else []
        axes = [*places, *checked[0][2]]
        sides = "two, such as alpha=alphas, omega=omegas" if planar else "none, one or two"
        require(len(axes) == 2 or (len(axes) < 2 and not planar), "axes", [axis.name for axis in axes], sides)
        cells: list[tuple[AnyModel, Any]] = []
        for (_, own_alpha), (base, alpha, its_axes) in zip(pairs, checked, strict=True):
            for values in itertools.product(*(axis.values for axis in its_axes)):
                setting: tuple[AnyModel, Any] = base, own_alpha if alpha is None else alpha
                for axis, value in zip(its_axes, values, strict=True):
                    setting = axis.parameter.set(*setting, value)
                cells.append(setting)
        models = [each for each, _ in cells]
        _check_one_kind(models, kind)
        for other in models[1:]:  # they are of one kind, so that only the first one is checked in full, later
            check_numbers(other)
        alpha = next((alpha for _, alpha in cells if (alpha is None) == with_alpha), False)
        if alpha is None:
            raise InputError("alpha", "must be given for states and best values, as a number or as an axis")
        if alpha is not False:
            raise InputError("alpha", f"must be left out but for states and best values, got alpha={alpha}")
        return cls(axes, models, [require_positive(a, "alpha", m.lam.dtype) if with_alpha else None for m, a in cells])

    @property
    def labels(self) -> tuple[tuple[str, ...], tuple[Float[np.ndarray, " _"], ...]]:
        """Names and values of the axes."""
        return tuple(axis.name for axis in self.axes), tuple(axis.values for axis in self.axes)

    def run(self, paths: list[Path], progress: Report) -> list[Any]:
        """Run the path of every cell; a failure in one cell is its result, and does not affect the others.

        Raises:
            Exception: that of the first cell, with its setting in a note, if all cells fail.
        """
        done = 0

        def report(number: int, result: Any) -> None:
            nonlocal done
            done += 1
            progress(done, len(paths))

        progress(0, len(paths))
        values = itertools.product(*(axis.values for axis in self.axes))
        names = [", ".join(f"{a.name} = {v:g}" for a, v in zip(self.axes, place, strict=True)) for place in values]
        return run(paths, names=names if self.axes else ["the only setting"], done=report, keep=True)

    def call(self, fn: Callable[..., Any], progress: Report) -> tuple[Any, ...]:
        """Return the cells of a function of the model and alpha of every setting, computed in the pool."""

        def path(*setting: Any) -> Path:
            return (yield Call(fn, setting))

        paths = [path(*setting) for setting in zip(self.models, self.alphas, strict=True)]
        return cells_of(self.run(paths, progress))

    def table_of_event(self, event: str, cells: Sequence[Any]) -> Table:
        """Return the table of an event, along one axis with its slopes."""
        names, values = self.labels
        if len(names) != 1:
            return Table(event, names, values, tuple(cells))
        (axis,), slopes = self.axes, np.full(len(cells), np.nan)
        for k, (model, cell) in enumerate(zip(self.models, cells, strict=True)):
            is_exact = not isinstance(cell, Missing) and not cell.reason and cell.sensitivities is not None
            if is_exact and axis.name != MODELS and axis.put is None:
                slopes[k] = axis.parameter.slope(cell.sensitivities, model, axis.values[k])
        return Table.of_event(event, axis.name, axis.values, cells, slopes)


def _check_one_kind(models: Sequence[AnyModel], kind: type) -> None:
    """Check that all models are of one class, with arrays of the same shapes."""
    shapes = []
    for number, model in enumerate(models):
        require_kind(model, "put", kind, "a function that returns a model")
        leaves, structure = jax.tree.flatten(model)
        shapes.append((structure, [(jnp.shape(a), jnp.result_type(a)) for a in leaves]))
        if shapes[-1] != shapes[0]:
            text = f"must give models of one class with arrays of the same shapes, number {number} differs"
            raise InputError("model", f"{text} from number 0: treat them apart")


def cells_of(results: Sequence[Any]) -> tuple[Any, ...]:
    """Return results as the cells of a table; a `Failure` becomes `Missing`."""
    return tuple(Missing.of(result) if isinstance(result, Failure) else result for result in results)


def _states(grid: Grid, branch: str | None, nodes: AnyNodes, settings: Settings | None, progress: Report) -> Table:
    """Solve the states of all cells."""
    rule, tolerances = prepared(grid.models[0], nodes, settings, even=branch is not None)

    def path(model: Model, alpha: Float[Array, ""]) -> Path:
        states, _, _ = yield from default_path(model, alpha, branch, rule, None, tolerances, fallback=nodes is None)
        return FixedPoint(model, alpha, states, branch)

    results = grid.run([path(*setting) for setting in zip(grid.models, grid.alphas, strict=True)], progress)
    return Table(branch, *grid.labels, cells_of(results))


def _followed_branch(
    grid: Grid, branch: str | None, nodes: AnyNodes, settings: Settings | None, progress: Report
) -> Table:
    """Follow a branch from the largest alpha down to where it ends."""
    model, branch = grid.models[0], branch_of(branch).name
    nodes, settings = prepared(model, nodes, settings, CURVE_SETTINGS, size=SIZES["curve"], even=branch is not None)
    alphas = np.sort(grid.axes[0].values)
    points: list[FixedPoint] = []

    def path() -> Path:
        for step in walk(model, list(alphas[::-1]), branch, nodes, settings):
            points.append((yield step))
            progress(len(points), alphas.size)
            if not points[-1].exists and len(points) > 1 and points[-2].exists:
                break

    progress(0, alphas.size)
    run([path()])
    progress(alphas.size, alphas.size)
    return Table(branch, ("alpha",), (alphas[alphas.size - len(points) :],), tuple(points[::-1]))


def _events(grid: Grid, event: str, nodes: AnyNodes, settings: Settings | None, progress: Report) -> Table:
    """Find an event in every cell, without a guess."""
    if event in THRESHOLDS:
        cells = grid.call(lambda model, _: THRESHOLDS[event](model, nodes), progress)
    else:
        rule, tolerances = prepared(grid.models[0], nodes, settings)
        event_of("semantic baseline" if event == ALPHA_L else event, grid.models[0])
        cells = cells_of(grid.run([transition_path(event, Family(m, rule, tolerances)) for m in grid.models], progress))
    return grid.table_of_event(event, cells)


def _best(
    grid: Grid,
    number: str,
    branch: str | None,
    nodes: AnyNodes,
    bracket: tuple[float, float] | None,
    settings: Settings | None,
    progress: Report,
) -> Table:
    """Find the best value of a number in every cell."""
    if number in grid.labels[0]:
        raise InputError("question", f"must be about another number than those that change, got number={number!r}")
    task = prepared_task(grid.models[0], branch, nodes, number, bracket, settings, SIZES["curve"])
    tasks = [task.at(m, a) for m, a in zip(grid.models, grid.alphas, strict=True)]
    results = grid.run([best_path(each) for each in tasks], progress)
    cells = [
        result if isinstance(result, Failure) else best_of(each, result)
        for each, result in zip(tasks, results, strict=True)
    ]
    return Table(f"{BEST}{number}", *grid.labels, cells_of(cells))


def _called(grid: Grid, question: str, nodes: AnyNodes, options: dict[str, Any], progress: Report) -> Table:
    """Answer a question in every cell by its own function, see `Question.call`."""
    call = kind_of(question).call
    assert call is not None
    return Table(question, *grid.labels, grid.call(partial(call, nodes=nodes, **options), progress))
