"""The kinds of questions of `sweep`: how a table reads, prints and draws the answers to each of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from itertools import combinations, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.interpolate import CubicHermiteSpline

from ..averages.recipes import AnyNodes
from ..base.arrays import spread_to
from ..base.errors import InputError, require
from ..base.report import Description, Row
from ..base.results import Status, error_bar
from ..dynamics.landscape import Landscape, landscape, words_of
from ..model.model import Model
from ..model.overlaps import BRANCHES, PAIR
from ..model.parameters import Parameter
from ..theory.states import FixedPoint

BEST = "best "  # begins the question for the best value of a number
LANDSCAPE = "landscape"
INSTANCES = "instances"  # the cells are runs on data, see `finite.instances.Instance`
# Numbers of a state that mean something where there is none.
_ALWAYS = "residual", "gen_error_linear"
# Functions of `plotting`: pictures of any number along one axis and over two.
FIGURES = "theory.table_figure", "diagrams.map_figure"
# Meaning of the points where the curves of two events intersect.
INTERSECTIONS = {
    frozenset(("alpha_c", "semantic baseline")): "from here on attention beats the linear baseline at alpha_c",
    frozenset(("alpha_c", "positional baseline")): "from here on attention beats the linear baseline before alpha_c",
    frozenset(("alpha_c", "semantic instability")): "the semantic state is stable only where it is global",
    frozenset(("alpha_c", "positional instability")): "the positional state is stable only where it is global",
    frozenset(("semantic instability", "positional instability")): "end of the bistable region",
    frozenset(("semantic pitchfork", "positional pitchfork")): "the uninformed state turns unstable to both at once",
}
# Names of the axes of order parameters, (L, r, r), (L, r, t) or (L, r).
ORDER_AXES = {
    "q": ("token", "column", "other_column"),
    "V": ("token", "column", "other_column"),
    "theta": ("token", "column", "teacher_column"),
    "m": ("token", "column"),
}
Column = tuple[Any, Any]  # a number with its error bar, or a label with None
Reader: TypeAlias = str | Callable[[Any], Any]  # a dotted name, or a function of a cell


class Question(NamedTuple):
    """How a table reads the answers to one kind of question; its cells are those with an answer.

    Attributes:
        main: number that is read, printed and drawn unless another one is named.
        read: function of a cell and the question that returns the columns of the cell by name.
        has_result: function of a cell that says whether it has what was asked for.
        figures: pictures of a table along one axis and over two, functions of `plotting`.
        shown: columns that are printed; all if there are none.
        headline: function of a table that returns the question in words.
        summary: function of a table over two axes that returns what is printed in place of its main number.
        page: function of a table that returns all that is printed, in place of the common page.
        usable: the last `Status` of a result that can be used.
        with_alpha: whether the question is about given alphas.
        call: function of a model, an alpha (or None), the averages and the options of the question that returns the
            answer; None for questions that `sweep` answers by paths of states.
    """

    main: str
    read: Callable[[Any, str | None], dict[str, Column]]
    has_result: Callable[[Any], bool]
    figures: tuple[str, str] = FIGURES
    shown: tuple[str, ...] = ()
    headline: Callable[[Any], str] = lambda table: str(table.question)
    summary: Callable[[Any], list[Row]] | None = None
    page: Callable[[Any], Description] | None = None
    usable: Status = Status.stalled
    with_alpha: bool = False
    call: Callable[..., Any] | None = None


def numbers_of_states(states: FixedPoint) -> dict[str, tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]]:
    """Return all numbers of a state, or of a batch (*batch, ...), by name: means and error bars.

    They are NaN where there is no state, but for those in `_ALWAYS`.
    """
    missing, means, bars = ~np.asarray(states.exists), states.mean.numbers(), states.stderr.numbers()

    def column(name: str, values: Any) -> Float[np.ndarray, "..."]:
        values = np.asarray(values, float)
        return values if name in _ALWAYS else np.where(spread_to(missing, values), np.nan, values)

    return {name: (column(name, means[name]), column(name, bars[name])) for name in means if name != "status"}


def has_number(cell: Any, number: str) -> bool:
    """Return whether a cell has a number of this dotted name."""
    try:
        attrgetter(number)(cell)
    except (AttributeError, InputError):  # such as a scalar of more than two tokens
        return False
    return True


def reader_of(number: Reader) -> Callable[[Any], Any]:
    """Return the function that reads a number from a cell."""
    return attrgetter(number) if isinstance(number, str) else number


def entries_by_name(name: str, values: Any) -> dict[str, Any]:
    """Return the entries of an order parameter by name, or the one number that it has."""
    flat = np.ravel(values)
    return {name + (f"_{n}" if flat.size > 1 else ""): value for n, value in enumerate(flat)}


def dataset(
    coordinates: Mapping[str, Any],
    numbers: Mapping[str, tuple[Any, ...]],
    labels: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> Any:
    """Return an xarray dataset of means, error bars (suffix _stderr) and labels; needs the extra `xarray`.

    The attributes of `status` explain its integers as the CF conventions prescribe.

    Args:
        coordinates: values of the axes that all numbers have, by name; those of order parameters follow.
        numbers: means and error bars by name.
        labels: what has no error bar, over all coordinates, or as (dimensions, values).
        attrs: what JSON can hold.
    """
    try:
        import xarray
    except ImportError as error:
        raise ImportError("to_xarray needs xarray: pip install 'tiedattn_jax[xarray]'") from error

    dims, data = tuple(coordinates), dict[str, Any]()
    for name, (means, bars) in numbers.items():
        axes = dims + ORDER_AXES.get(name, ())[: np.ndim(means) - len(dims)]  # those of a wide layer are scalars
        data |= {name: (axes, means), f"{name}_stderr": (axes, bars)}
    flags = {"flag_values": [*map(int, Status)], "flag_meanings": " ".join(s.name for s in Status)}
    for name, values in labels.items():
        label_dims, array = values if isinstance(values, tuple) else (dims, values)
        data[name] = (label_dims, array, flags if name == "status" else {})
    return xarray.Dataset(data, dict(coordinates), {name: json.dumps(value) for name, value in attrs.items()})


def _state(cell: FixedPoint, branch: str | None) -> dict[str, Column]:
    labels = {"alpha": float(cell.alpha), "branch": branch or cell.label, "exists": bool(cell.exists)}
    return {name: (value, None) for name, value in labels.items()} | numbers_of_states(cell)


def _branches(table: Any) -> str:
    labels = dict.fromkeys(point.label for point in table.points if point.exists)
    return f"{table.question or ', '.join(labels) or 'any'} branch"


class Intersection(NamedTuple):
    """Intersection of two events (a codimension-two point): both events, parameter value, alpha, and meaning."""

    events: tuple[str, str]
    value: float
    alpha: float
    meaning: str


def intersections_of(*tables: Any) -> list[Intersection]:
    """Return all intersections among events along one axis, in the order of its values; see `Table.intersections`."""
    for other in tables[1:]:
        require(
            other.names == tables[0].names, "names", list(other.names), f"{tables[0].names[0]} as in the first table"
        )
    meetings = []
    for a, b in combinations(tables, 2):
        meaning = INTERSECTIONS.get(frozenset((a.question, b.question)), "")
        meetings += [Intersection((a.question, b.question), *point, meaning) for point in _meets(a, b)]
    return sorted(meetings, key=lambda meeting: meeting.value)


def _meets(a: Any, b: Any) -> list[tuple[float, float]]:
    """Return the intersections of two events as pairs (value, alpha), the value increasing."""
    if min(a.found.sum(), b.found.sum()) < 2:
        return []
    first, second = a.interpolant, b.interpolant
    knots = np.union1d(first.x, second.x)
    knots = knots[(knots >= max(first.x[0], second.x[0])) & (knots <= min(first.x[-1], second.x[-1]))]
    if len(knots) < 2:
        return []
    difference = CubicHermiteSpline(knots, first(knots) - second(knots), first(knots, 1) - second(knots, 1))
    roots = difference.roots(discontinuity=False, extrapolate=False)
    return [(float(v), float(first(v))) for v in np.unique(roots[np.isfinite(roots)])]


def _best(cell: Any, question: str | None) -> dict[str, Column]:
    error, branch = cell.gen_error, str(cell.state.branch) if cell.branches else ""
    numbers = {
        cell.name: (float(cell.value), float(cell.stderr)),
        "gen_error": (float(error.value), float(error.stderr)),
    }
    return {**numbers, "branch": (branch, None), "place": (cell.place, None)}


def _best_words(table: Any) -> str:
    places = ", ".join(f"{place:.4g}" for place in table.jumps) if len(table.names) == 1 else ""
    branch = next((point.branch for point in table.points), None)
    words = f"{branch} branch" if branch else "global minimum"
    return f"{table.question} of the {words}{places and f' that jumps at {table.parameter} = {places}'}"


def jumps_of(table: Any) -> list[float]:
    """Return the places along the only axis at which the best state changes its branch; see `Table.jumps`."""

    def slope(point: Any, value: float) -> float:
        """Return the derivative of the smallest test error along the axis; NaN if that is no number of the model."""
        if table.parameter == "alpha":
            return float(point.gen_error.by_alpha.value)
        with contextlib.suppress(InputError):
            Parameter(table.parameter).read(point.state.model, None, "axis")
            return Parameter(table.parameter).slope(point.gen_error.sensitivities, point.state.model, value)
        return np.nan

    places = []
    for (x, a, has_a), (y, b, has_b) in pairwise(zip(table.at, table.cells, table.found, strict=True)):
        if has_a and has_b and a.state.branch != b.state.branch:
            (e, s), (f, t) = ((float(p.gen_error.value), slope(p, v)) for p, v in ((a, x), (b, y)))
            place = x + (f - e + t * (x - y)) / (s - t) if s != t else np.nan
            places.append(float(place) if x <= place <= y else float(0.5 * (x + y)))
    return places


def _landscape(model: Model, alpha: None, nodes: AnyNodes, kappa: Any, size: Any) -> Landscape:
    return landscape(model, kappa, size=size, nodes=nodes)


def _risks(cell: Any, question: str | None) -> dict[str, Column]:
    values, bars = cell.numbers()
    return {"label": (int(cell.label), None), **{k: (float(a), float(bars[k])) for k, a in values.items()}}


def _count_labels(table: Any) -> list[Row]:
    labels, counts = np.unique(table.values()[table.found].astype(int), return_counts=True)
    return [(str(k), str(count), words_of(int(k))) for k, count in zip(labels, counts, strict=True)]


# Instances: runs on data, each beside its theory


def _run(cell: Any, question: str | None) -> dict[str, Column]:
    measured = {name: (float(a), None) for name, a in vars(cell.simulation).items()}
    bars = vars(cell.theory_stderr)
    theory = {f"theory.{name}": (float(a), float(bars[name])) for name, a in vars(cell.theory).items()}
    distances = {f"distance.{name}": (float(a), None) for name, a in zip(PAIR, cell.distance, strict=True)}
    labels = {name: (getattr(cell, name), None) for name in ("rho", "gradient_norm", "iterations", "finished")}
    return {"branch": (cell.branch, None), **measured, **theory, **distances, **labels}


def differences_of(table: Any, branch: str | None) -> dict[str, tuple[float, ...]]:
    """Return the rows of `Table.difference`."""
    solved = [c for c in table.cells if branch in (c.branch, None) and c.theory_status <= Status.stalled]
    differences = {}
    for name in vars(table.cells[0].simulation):
        columns = [[getattr(n, name) for n in (cell.simulation, cell.theory, cell.theory_stderr)] for cell in solved]
        values = np.reshape(np.array(columns, float), (-1, 3)).T
        values = values[:, np.isfinite(values[0])]
        # Counts, such as the share of zeros, can be equal in all instances; their error is then not known.
        scatter = (float(error_bar(values[0] - values[1])) or np.nan) if values.shape[1] > 1 else np.nan
        simulation, theory, bar = np.mean(values, 1) if values.size else [np.nan] * 3  # all share the nodes
        differences[name] = tuple(map(float, (simulation, theory, simulation - theory, np.hypot(scatter, bar))))
    return differences


def _page_of_instances(table: Any) -> Description:
    tables = []
    for branch, count in table.groups.items():
        cells = [cell for cell in table.cells if cell.branch == branch]
        critical, finished = sum(cell.status == Status.converged for cell in cells), sum(c.finished for c in cells)
        head = f"{branch}: {count} of {len(table.cells)} instances, {critical} at a critical point"
        has_theory = any(cell.point for cell in cells)
        rows = beside_theory(table.difference(branch)) if has_theory else _alone([c for c in cells if not c.reason])
        tables.append((f"{head} ({finished} finished by L-BFGS)", rows if len(rows) > 1 else []))
    gradient = max(cell.gradient_norm for cell in table.cells)
    status = f"{Status.name_of(table.status.max())}, largest gradient {gradient:.1e}"
    return Description(f"{len(table.cells)} instances", status, tables=tables)


def beside_theory(differences: dict[str, tuple[float, ...]]) -> list[Row]:
    """Return the rows of a page that compares instances with their theory."""
    rows: list[Row] = [("", "simulation", "theory", "difference", "error bar", "in bars")]
    for name, (simulation, theory, gap, bar) in differences.items():
        if np.isfinite(simulation):
            # An order parameter that vanishes for large d is not zero at finite d, so no deviation is shown.
            sigmas = f"{gap / bar:+.1f}" if np.isfinite(bar) and theory != 0 else ""
            rows.append((name, f"{simulation:.6g}", f"{theory:.6g}", f"{gap:+.2g}", f"{bar:.2g}", sigmas))
    return rows


def _alone(cells: list[Any]) -> list[Row]:
    """Return rows with the quantities of instances without theory, and their distance to either branch."""
    rows: list[Row] = [("", "simulation", "lowest", "highest")]
    columns = {
        name: [getattr(cell.simulation, name) for cell in cells]
        for name in (vars(cells[0].simulation) if cells else ())
    }
    columns |= {f"distance, {name}": [cell.distance[k] for cell in cells] for k, name in enumerate(PAIR)}
    for name, column in columns.items():
        known = np.array(column, float)
        if (known := known[~np.isnan(known)]).size:
            digits = ".2g" if name.startswith("distance") else ".6g"
            rows.append((name, *(f"{f(known):{digits}}" for f in (np.mean, np.min, np.max))))
    return rows


_STATES = Question(
    "train_loss",
    _state,
    lambda cell: bool(cell.exists),
    ("theory.branch_figure", FIGURES[1]),
    ("branch", "q", "V", "theta", "m", "train_loss", "gen_error", "replicon", "jump_mass"),
    _branches,
    with_alpha=True,
)
_EVENT = Question(
    "alpha",
    lambda cell, event: {str(event): (float(cell.alpha), float(cell.stderr))},
    lambda cell: not cell.reason,
    ("theory.boundary_figure", FIGURES[1]),
)
# To add a question it is enough to add its line here: `sweep` answers it by its `call`.
# Rooms above this one add theirs.
QUESTIONS: dict[str | None, Question] = {
    **dict.fromkeys(BRANCHES, _STATES),
    BEST: Question(
        "value",
        _best,
        lambda cell: bool(cell.branches),
        ("theory.best_figure", FIGURES[1]),
        headline=_best_words,
        with_alpha=True,
    ),
    LANDSCAPE: Question(
        "label",
        _risks,
        lambda cell: bool(cell.ok),
        (FIGURES[0], "diagrams.landscape_figure"),
        summary=_count_labels,
        call=_landscape,
    ),
    INSTANCES: Question(
        "train_loss",
        _run,
        lambda cell: not cell.reason,
        ("simulations.instances_figure", FIGURES[1]),
        page=_page_of_instances,
        usable=Status.converged,  # at a critical point of its risk
    ),
}


def kind_of(question: str | None) -> Question:
    """Return the kind of a question; one that is not listed is an event."""
    return QUESTIONS.get(BEST if str(question).startswith(BEST) else question, _EVENT)
