"""Sweeps: one question, a function of a model, asked at many settings, all in one pool."""

from __future__ import annotations

import inspect
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Real

from ..averages.recipes import SIZES, AnyNodes
from ..base import VERSION
from ..base.arrays import GivenArray
from ..base.errors import InputError, as_flag, is_concrete, require, require_kind, require_positive
from ..base.files import Store, fingerprint, identity_of
from ..base.pieces import PIECES, computed, cut
from ..base.progress import Progress, Report, counter, reporter
from ..base.results import Settings, Status
from ..model.checks import check_numbers
from ..model.overlaps import branch_of
from ..model.parameters import MODELS, AnyModel, Axis, axes_of, is_number_of, names_of, scalar_parameters
from ..theory.engine import run, run_one
from ..theory.paths import Call, Failure, Path
from ..theory.quantities import Quantity
from ..theory.solve import solve
from ..theory.states import FixedPoint
from .cells import Missing, cells_of
from .events import ALPHA_L, CROSSING
from .family import check_top_level, prepared
from .follow import CURVE_SETTINGS, walk
from .locate import Start
from .table import Table
from .trace import TRACE_SETTINGS, trace_path
from .transitions import critical_alpha, find_event, linear_crossing

_NO_SETTING = "start", "progress"  # options that change how an answer is found, and not what it is


def sweep(
    question: Callable[..., Any],
    model: AnyModel | Sequence[AnyModel | tuple[AnyModel, Any]],
    *axes: Axis,
    follow: bool = False,
    executor: Executor | None = None,
    out: pathlib.Path | str | None = None,
    resume: bool = False,
    progress: Progress = None,
    **given: float | Sequence[float] | Real[GivenArray, "..."] | Any,
) -> Table:
    """Ask one question of many settings, over no axis, one or two; a question is a function of a model.

        sweep(solve, model, alpha=[0.5, 1.0, 2.0], branch="semantic")            states
        sweep(solve, model, alpha=values, branch="semantic", follow=True)        a branch that is followed to its end
        sweep(critical_alpha, model, omega=values, sigma=values)                 an event over two numbers
        sweep(find_event, model, event="semantic pitchfork", sigma=values)       another event
        sweep(best_ridge, models, alpha=1.0)                                     the best ridge of every model in a list
        sweep(lambda model, alpha: solve(model, alpha).gen_error, model, alpha=values, sigma=values)

    A keyword that names alpha or a number of the model is a setting: a single value fixes the number, several are an
    axis. All others go to the function. Every setting is computed independently, in one pool; a failure at one does not
    affect the others.

    With ``follow=True`` the states before predict the next one. A branch (`solve`) is followed through one number, in
    alpha from the largest one down to the first one beyond its end, by default with fewer nodes and looser tolerances
    than `solve`. An event (`critical_alpha`, `linear_crossing`, `find_event`) is followed through one number of the
    model: a point then takes a single evaluation. It takes the options `nodes`, `settings`, `start`, where the event is
    expected at the first value, and `sensitivities`, whether every slope is exact, which may compile one more program.

    Args:
        question: a function of a model, or of a model and ``alpha``, that returns one number or a result with a method
            ``numbers() -> {name: (value, error bar)}``, as all results of this library.
        model: a model, or a list of models of one kind or of pairs (model, alpha): their places are an axis "model".
        axes: what a keyword cannot name, see `Axis`: an entry of an array, or a number of your own.
        follow: whether to follow the branch or the event.
        executor: any `concurrent.futures.Executor`, such as a ``ProcessPoolExecutor`` or that of a Dask client: its
            workers compute pieces of the settings. What they are sent must pickle. Without one, this process computes
            all; under `jax.distributed` the processes share the pieces, and every one returns the whole table.
        out: folder in which finished pieces are kept.
        resume: whether to continue from the content of `out`.
        progress: None, True for a bar, or a function of the numbers of finished and of all settings.
        given: settings and options by name.

    Raises:
        InputError: a question, setting, option or model cannot be used, which the message explains; an event that is
            followed is a fold or does not happen at the first value; the executor does not take the pieces; `out`
            holds pieces of another call. If the question failed at all settings, its first exception.
        RuntimeError: another process of `jax.distributed` ended early, see `phase_diagram`.
        KeyboardInterrupt: the user has interrupted the call; a note says what is kept and how to go on.
    """
    first, _ = pairs_of(model)[0]
    numbers = {name: value for name, value in given.items() if is_number_of(first, name)}
    options = {name: value for name, value in given.items() if name not in numbers}
    asked, follow = Asked.of(question), as_flag(follow, "follow")
    followed = next((fn for known, fn in FOLLOWED.items() if known is question), None) if follow else None
    names = names_of(model, axes, numbers)
    if follow and (followed is None or len(names) != 1 or names == [MODELS]):
        known = ", ".join(fn.__name__ for fn in FOLLOWED)
        raise InputError("follow", f"must be left out but for {known} along one number of the setting")
    asked.check(first, options, followed)
    grid = Grid.of(model, axes, numbers, follow, asked=asked.name, with_alpha=asked.with_alpha)
    report = reporter(progress, "settings")
    if followed is not None:
        if executor is not None or out is not None:
            raise InputError("follow", "must be left out beside executor and out: what is followed is computed in turn")
        return followed(grid, report, **options).of_setting(grid.setting(question, options))
    is_traced = not is_concrete(grid.models, grid.alphas, options)
    if is_traced and (executor is not None or out is not None):
        argument = "out" if executor is None else "executor"
        raise InputError(argument, "must be left out under jax.grad, which needs the states of this process")
    computation = {} if out is None else {"fingerprint": grid.fingerprint(question, options)}
    store = Store(out, computation, "out", PIECES)
    store.open_folder(resume)
    if is_traced or (executor is None and out is None and jax.process_count() == 1):
        cells = cells_of(grid.run(asked.paths(grid.models, grid.alphas, options), report))
    else:
        cells = grid.in_pieces(asked, options, store, executor, report)
    return grid.table(asked.name, cells).of_setting(grid.setting(question, options))


def pairs_of(model: Any) -> list[tuple[AnyModel, Any]]:
    """Return what a caller gave as pairs of a model and an alpha (or None), one or more.

    Raises:
        InputError: it is neither a model nor a list of models or of such pairs, or the list is empty.
    """
    if not isinstance(model, (list, tuple)):
        require_kind(model, "model", eqx.Module, "a Model or a list")
        return [(model, None)]
    require(len(model) > 0, "model", model, "one model or more")
    pairs = [each if isinstance(each, tuple) and len(each) == 2 else (each, None) for each in model]
    for each, _ in pairs:
        require_kind(each, "model", eqx.Module, "a list of models, such as [DotProduct(), DotProduct(sigma=0.4)]")
    return pairs


class Asked(NamedTuple):
    """A question: a function and its name, and whether it is about given alphas."""

    function: Callable[..., Any]
    name: str
    with_alpha: bool

    @classmethod
    def of(cls, question: Any) -> Asked:
        if not callable(question):
            raise InputError("question", f"must be a function of a model, such as critical_alpha, got {question!r}")
        names = list(inspect.signature(question).parameters)
        return cls(question, getattr(question, "__name__", type(question).__name__), "alpha" in names[1:2])

    def check(self, model: AnyModel, options: Mapping[str, Any], followed: Callable[..., Any] | None) -> None:
        """Check that the options are arguments of the function, or of the one that follows its answers."""
        first = ["the grid", "a report"] if followed else [model, 1.0][: 1 + self.with_alpha]
        signature = inspect.signature(followed or self.function)
        fixed = getattr(followed, "keywords", {})  # of a `partial`
        taken = [name for name in list(signature.parameters)[len(first) :] if name not in fixed]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for name in options:
            if name not in taken and not open_ended:
                known = ", ".join(["alpha", *scalar_parameters(model)]) if isinstance(model, eqx.Module) else "alpha"
                names = ", ".join(name for name in taken if name != "progress") or "none"
                text = f"must be a number of the setting ({known}) or an argument of {self.name} ({names})"
                raise InputError(name, f"{text}, got {name}={options[name]!r}")
        try:
            signature.bind(*first, **options)
        except TypeError as error:
            raise InputError("question", f"must be a function of a model, or of a model and alpha: {error}") from error

    def paths(self, models: Sequence[AnyModel], alphas: Sequence[Any], options: dict[str, Any]) -> list[Path]:
        """Return the paths of all cells: those of a search, or of calls of the function.

        An option that only the public function has, such as `rtol` of `solve`, makes every cell a call of it.
        """
        pairs = list(zip(models, alphas, strict=True))
        paths = getattr(self.function, "paths", None)
        if paths is not None and options.keys() <= inspect.signature(paths).parameters.keys():
            path = paths(*pairs[0][: 1 + self.with_alpha], **options)
            return [path(*setting) for setting in pairs]

        def call(*setting: Any) -> Path:
            return (yield Call(partial(self.function, **options), setting[: 1 + self.with_alpha]))

        return [call(*setting) for setting in pairs]


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
        asked: str,
        with_alpha: bool,
        planar: bool = False,
    ) -> Grid:
        """Check what a caller gave, and build the settings of all cells.

        Args:
            follow: whether the settings are followed along their axis.
            asked: name of the function that is asked.
            with_alpha: whether it is about given alphas.
            planar: whether there must be two axes.
        """
        pairs, listed = pairs_of(model), isinstance(model, (list, tuple))
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
        _check_one_kind(models)
        for other in models[1:]:  # they are of one kind, so that only the first one is checked in full, later
            check_numbers(other)
        alpha = next((alpha for _, alpha in cells if (alpha is None) == with_alpha), False)
        if alpha is None:
            raise InputError("alpha", f"must be given for {asked}, as a number or as an axis")
        if alpha is not False:
            raise InputError("alpha", f"must be left out for {asked}, got alpha={alpha}")
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
        values, count = itertools.product(*(axis.values for axis in self.axes)), counter(progress, len(paths))
        results = run(paths, done=lambda number, result: count(1), keep=True)
        if all(isinstance(result, Failure) for result in results):
            first = next(values)
            where = ", ".join(f"{a.name} = {v:g}" for a, v in zip(self.axes, first, strict=True)) or "the only setting"
            results[0].error.add_note(f"This happened at {where}.")
            raise results[0].error
        return results

    def fingerprint(self, question: Callable[..., Any], options: dict[str, Any]) -> str:
        """Return what identifies the answers: the question, what the models compute, all numbers, and the version."""
        text = self.models[0].identity_text() if hasattr(self.models[0], "identity_text") else ""
        return fingerprint(identity_of(question), text, self.models, self.alphas, sorted(options.items()), VERSION)

    def setting(self, question: Callable[..., Any], options: dict[str, Any]) -> str:
        """Return a hash of all that is the same in the cells, which parts of one table share.

        It is empty, as unknown, along models of a list and numbers of one's own.
        """
        if any(axis.put is not None or axis.name == MODELS for axis in self.axes):
            return ""
        place: tuple[AnyModel, Any] = self.models[0], self.alphas[0]
        for axis in self.axes:
            place = axis.parameter.set(*place, 0.5)
        known = {p.name: p.default for p in inspect.signature(question).parameters.values() if p.default is not p.empty}
        same = {name: value for name, value in (known | options).items() if name not in _NO_SETTING}
        without_slopes = partial(jax.tree.map, lambda a: lax.stop_gradient(a) if eqx.is_array(a) else a)
        return fingerprint(without_slopes((place, sorted(same.items()))))

    def in_pieces(
        self, asked: Asked, options: dict[str, Any], store: Store, executor: Executor | None, report: Report
    ) -> tuple[Any, ...]:
        """Compute the cells in pieces, on an executor, over processes, or here; those that are kept are read.

        Raises:
            RuntimeError: there is no answer at all; the message is that of the first setting.
        """
        asked.paths(self.models[:1], self.alphas[:1], options)  # options are refused here, not in a worker
        pieces, count = cut(len(self.models)), counter(report, len(self.models))
        arguments = [(asked, self.models[piece], self.alphas[piece], options) for piece in pieces]

        def here(numbers: Sequence[int], finish: Callable[[int, Any], None]) -> None:
            def done(place: int, answers: Any) -> None:
                if not isinstance(answers, Failure):
                    finish(numbers[place], answers)

            run([_piece(*arguments[k]) for k in numbers], done=done)

        cells = list[Any]()
        sizes = [len(self.models[piece]) for piece in pieces]
        place = arguments.__getitem__
        results = computed(_answers, place, len(pieces), store, executor, lambda k: count(sizes[k]), here)
        for piece, answers in zip(pieces, results, strict=True):
            if isinstance(answers, BaseException):
                lost = Missing(f"its worker was lost: {answers or type(answers).__name__}", int(Status.nonfinite))
                answers = [lost] * len(self.models[piece])
            cells += answers
        if all(isinstance(cell, Missing) for cell in cells):
            raise RuntimeError(f"{asked.name} has no answer at any setting; the first: {cells[0].reason}; {store.hint}")
        return tuple(cells)

    def table(self, name: str, cells: Sequence[Any]) -> Table:
        """Return the table of the answers; that of an event along one axis has its slopes.

        Args:
            name: what was asked for, if the results do not say it.
        """
        names, values = self.labels
        results = [cell for cell in cells if not isinstance(cell, Missing)]
        question = next((cell.question for cell in results if hasattr(cell, "question")), name)
        if len(names) != 1 or not all(isinstance(cell, Quantity) and cell.name == "alpha" for cell in results):
            return Table(question, names, values, tuple(cells))
        (axis,), slopes = self.axes, np.full(len(cells), np.nan)
        for k, (model, cell) in enumerate(zip(self.models, cells, strict=True)):
            is_exact = not isinstance(cell, Missing) and not cell.reason and cell.sensitivities is not None
            if is_exact and axis.name != MODELS and axis.put is None:
                slopes[k] = axis.parameter.slope(cell.sensitivities, model, axis.values[k])
        return Table.of_event(question, axis.name, axis.values, cells, slopes)


def _answers(asked: Asked, models: Sequence[AnyModel], alphas: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """Return the cells of a piece of the settings."""
    return run_one(_piece(asked, models, alphas, options))


def _piece(asked: Asked, models: Sequence[AnyModel], alphas: Sequence[Any], options: dict[str, Any]) -> Path:
    """Path of a piece of the settings; returns its cells."""

    def cell(path: Path) -> Path:
        try:
            result = yield from path
        except Exception as error:  # of this cell alone
            result = Failure(error)
        return cells_of([result])[0]

    return (yield [cell(path) for path in asked.paths(models, alphas, options)])


def _check_one_kind(models: Sequence[AnyModel]) -> None:
    """Check that all models are of one class, with arrays of the same shapes."""
    shapes = []
    for number, model in enumerate(models):
        require_kind(model, "put", eqx.Module, "a function that returns a model")
        leaves, structure = jax.tree.flatten(model)
        shapes.append((structure, [(jnp.shape(a), jnp.result_type(a)) for a in leaves]))
        if shapes[-1] != shapes[0]:
            text = f"must give models of one class with arrays of the same shapes, number {number} differs"
            raise InputError("model", f"{text} from number 0: treat them apart")


def _branch(
    grid: Grid,
    report: Report,
    branch: str | None = "semantic",
    nodes: AnyNodes = None,
    settings: Settings | None = None,
) -> Table:
    """Follow a branch; in alpha from the largest one down to where it ends, and in another number upwards."""
    branch, name = branch_of(branch).name, grid.axes[0].name
    family = prepared(grid.models[0], nodes, settings, CURVE_SETTINGS, size=SIZES["curve"], even=bool(branch))
    values = grid.axes[0].values
    order = np.argsort(-values if name == "alpha" else values)
    places = [(grid.models[k], grid.alphas[k], float(values[k])) for k in order]
    points: list[FixedPoint] = []

    def path() -> Path:
        for step in walk(family, places, branch):
            points.append((yield step))
            report(len(points), values.size)
            if name == "alpha" and not points[-1].exists and len(points) > 1 and points[-2].exists:
                break

    report(0, values.size)
    run_one(path())
    report(values.size, values.size)
    visited = order[: len(points)]
    rising = np.argsort(values[visited])
    return Table(branch, (name,), (values[visited[rising]],), tuple(points[k] for k in rising))


def _event(
    grid: Grid,
    report: Report,
    event: str,
    nodes: AnyNodes = None,
    *,
    start: Start | None = None,
    settings: Settings | None = None,
    sensitivities: bool = False,
) -> Table:
    """Follow an event through the values of a number of the model."""
    family = prepared(grid.models[0], nodes, settings, TRACE_SETTINGS, even=event != CROSSING)
    exact = as_flag(sensitivities, "sensitivities")
    return run_one(trace_path(event, family, grid.axes[0], start, exact, report))


# Functions of the grid and a report, with the options of the question, that follow its answers from value to value.
FOLLOWED: dict[Callable[..., Any], Callable[..., Table]] = {
    solve: _branch,
    critical_alpha: partial(_event, event="alpha_c"),
    linear_crossing: partial(_event, event=ALPHA_L),
    find_event: _event,
}
