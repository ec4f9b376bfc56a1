"""Cells of a table: how their numbers are read, and what follows from many of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise, product
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from scipy.interpolate import CubicHermiteSpline, PPoly

from ..base.arrays import indexed, spread_to
from ..base.errors import InputError, require
from ..base.report import Row
from ..base.results import Average, Column, Status, error_bar
from ..theory.paths import Failure
from ..theory.quantities import Quantity
from ..theory.states import FixedPoint

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
Reader: TypeAlias = str | Callable[[Any], Any]  # a dotted name, or a function of a cell


class Missing(eqx.Module):
    """A cell without a result.

    Attributes:
        reason: why there is none, in one sentence.
        status: `Status` as an integer.
    """

    has_result: ClassVar[bool] = False
    reason: str = eqx.field(static=True)
    status: int = eqx.field(static=True)

    @classmethod
    def of(cls, failure: Failure) -> Missing:
        """Return the cell of a search that an exception ended; an `InputError` says that there is nothing to find."""
        status = Status.absent if isinstance(failure.error, InputError) else Status.failed
        return cls(failure.reason, int(status))


class Batch(eqx.Module, Sequence):
    """Results at all settings as one batch. A table reads its numbers at once; an index (k or (j, i)) makes a cell.

    Attributes:
        results: one result whose arrays are (*shape, ...).
        shape: that of the table.
    """

    results: Any
    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def whole(self) -> Any:
        """A copy of the results, to read numbers from: jax takes what a property caches for a part of a structure."""
        return dataclasses.replace(self.results)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, index: Any) -> Any:
        place = index if isinstance(index, tuple) else np.unravel_index(range(len(self))[index], self.shape)
        return indexed(self.results, (*place, ...))  # with the dots numbers are arrays, too


def cells_of(results: Sequence[Any]) -> tuple[Any, ...]:
    """Return results as the cells of a table: a `Failure` becomes `Missing`, a number a `Quantity`.

    Raises:
        InputError: a result is neither a number nor has a method `numbers()`.
    """

    def cell(result: Any) -> Any:
        if isinstance(result, Failure):
            return Missing.of(result)
        if hasattr(result, "numbers"):
            return result
        if np.ndim(result) == 0 and np.asarray(result).dtype.kind in "biuf":
            value = jnp.asarray(result, float)
            status = Status.converged if np.isfinite(value) else Status.nonfinite
            return Quantity(value, jnp.full_like(value, jnp.nan), jnp.asarray(int(status)))
        text = f"must return one number, or a result with a method `numbers()`, got {type(result).__name__}"
        raise InputError("question", text)

    return tuple(map(cell, results))


def has_number(cell: Any, number: str) -> bool:
    """Return whether a cell has a number of this dotted name."""
    try:
        attrgetter(number)(cell)
    except (AttributeError, InputError):  # such as a scalar of more than two tokens
        return False
    return True


def is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and np.asarray(value).dtype.kind == "f"


def reader_of(number: Reader) -> Callable[[Any], Any]:
    """Return the function that reads a number from a cell; numbers of a state that a cell lacks are NaN."""

    def read(cell: Any) -> Any:
        if not isinstance(number, str):
            value = number(cell)
        else:
            value, (head, _, tail) = attrgetter(number)(cell), number.partition(".")
            if isinstance(state := getattr(cell, head), FixedPoint) and tail not in state.in_table.always:
                value = np.where(spread_to(state.exists, value), value, np.nan) if is_float(value) else value
        return value.value if isinstance(value, (Average, Quantity)) else value

    return read


def bar_of(cell: Any, number: Reader) -> Any:
    """Return the error bar of a number of a cell, or of a batch of cells."""
    if isinstance(number, str):
        value, (head, _, tail) = attrgetter(number)(cell), number.partition(".")
        if tail and isinstance(point := getattr(cell, head), FixedPoint):
            return bar_of(point, tail)
        if isinstance(value, (Average, Quantity)):
            return value.stderr
        if not is_float(value):  # a label is exact
            return np.zeros(())
        # Scalars of a state: its replicates as a batch of states have one each.
        if number in ORDER_AXES and isinstance(cell, FixedPoint):
            states, axis = cell.replicates, cell.replicate_axis
            one_each = jax.tree.map(lambda a: jnp.expand_dims(a, axis + 1), states)
            alpha = jnp.broadcast_to(jnp.expand_dims(cell.alpha, axis), states.status.shape)
            values = getattr(FixedPoint(cell.model, alpha, one_each, cell.branch), number)
            return error_bar(jnp.moveaxis(jnp.where(states.has_state, values, jnp.nan), axis, 0))
        if hasattr(cell, f"{head}_stderr"):  # such as sensitivities_stderr
            return attrgetter(number.replace(head, f"{head}_stderr", 1))(cell)
    bars = getattr(cell, "stderr", np.zeros(()))  # a result without error bars is exact
    if isinstance(number, str) and not hasattr(bars, "dtype") and not has_number(bars, number):
        return np.zeros(())
    return bars if hasattr(bars, "dtype") else reader_of(number)(bars)


def one_a_setting(table: Any, number: Reader) -> Float[np.ndarray, "*shape"]:
    """Return the values of a number of a table that can be drawn: one at every setting."""
    values = table.values(number)
    is_drawn = values.dtype.kind != "U" and values.shape == table.shape
    require(is_drawn, "number", number, "the name of one number per setting, such as q_0 for an entry of q")
    return values


def place_of(names: Sequence[str], axes: Sequence[Float[np.ndarray, " _"]], index: int) -> str:
    """Return the setting of a cell in words."""
    places = zip(axes, np.unravel_index(index, tuple(map(len, axes))), strict=True)
    return ", ".join(f"{name} = {axis[k]:g}" for name, (axis, k) in zip(names, places, strict=True))


def entries_by_name(name: str, values: Any) -> dict[str, Any]:
    """Return the entries of an order parameter by name, or the one number that it has."""
    flat = np.ravel(values)
    return {name + (f"_{n}" if flat.size > 1 else ""): value for n, value in enumerate(flat)}


def with_entries(columns: Mapping[str, Column], shape: tuple[int, ...]) -> dict[str, Column]:
    """Return columns (*shape, ...), the entries of order parameters, and the error bars of other numbers, by name."""
    named = dict[str, Column]()
    for name, (values, bars) in columns.items():
        named[name] = values, bars
        if values.ndim > len(shape):
            flat, flat_bars = (np.reshape(a, (*shape, -1)) for a in (values, 0 * values if bars is None else bars))
            entries_of = entries_by_name(name, np.arange(flat.shape[-1]))
            named |= {entry: (flat[..., n], flat_bars[..., n]) for entry, n in entries_of.items()}
        elif bars is not None:
            named[f"{name}_stderr"] = bars, None
    return named


def dataset(
    coordinates: Mapping[str, Any],
    numbers: Mapping[str, tuple[Any, ...]],
    labels: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> Any:
    """Return an xarray dataset of means, error bars (suffix _stderr) and labels; needs the extra `xarray`.

    The attributes of a status explain its integers as the CF conventions prescribe.

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
        data[name] = (label_dims, array, flags if name.endswith("status") else {})
    return xarray.Dataset(data, dict(coordinates), {name: json.dumps(value) for name, value in attrs.items()})


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
    points = set[tuple[float, float]]()
    for first, second in product(a.pieces, b.pieces):
        knots = np.union1d(first.x, second.x)
        knots = knots[(knots >= max(first.x[0], second.x[0])) & (knots <= min(first.x[-1], second.x[-1]))]
        if len(knots) > 1:
            slopes = first(knots, 1) - second(knots, 1)
            roots = CubicHermiteSpline(knots, first(knots) - second(knots), slopes).roots(False, extrapolate=False)
            points |= {(float(v), float(first(v))) for v in roots[np.isfinite(roots)]}
    return sorted(points)


def runs_of(found: Bool[np.ndarray, " A"]) -> list[slice]:
    """Return the runs of neighbouring points that were found, between which nothing may be interpolated."""
    return np.ma.clump_unmasked(np.ma.masked_array(found, ~found))


def joined_pieces(pieces: list[CubicHermiteSpline]) -> PPoly:
    """Return functions on separate intervals as one, which is NaN between them."""
    x, c = pieces[0].x, pieces[0].c
    for piece in pieces[1:]:
        # The last place of a piece belongs to it, so that the gap begins at the next floating-point number.
        last = np.zeros((4, 1))
        last[3] = np.polyval(c[:, -1], x[-1] - x[-2])
        c = np.hstack([c, last, np.full((4, 1), np.nan), piece.c])
        x = np.concatenate([x, [np.nextafter(x[-1], np.inf)], piece.x])
    return PPoly(c, x, extrapolate=False)


def jumps_of(table: Any) -> list[tuple[float, float]]:
    """Return the intervals of the only axis in which the best state changes its branch; see `Table.jumps`."""
    cells = zip(table.at.tolist(), table.cells, table.found, strict=True)
    known = [(value, cell.state.branch) for value, cell, found in cells if found]
    return [(low, high) for (low, before), (high, after) in pairwise(known) if before != after]


def numbers_beside_theory(run: Any) -> dict[str, Column]:
    """Return the numbers of a run, a cell of a table of instances, and those of its theory with their error bars."""
    bars = vars(run.theory_stderr)
    measured = {name: (float(a), None) for name, a in vars(run.simulation).items()}
    return measured | {f"theory.{name}": (float(a), float(bars[name])) for name, a in vars(run.theory).items()}


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


def beside_theory(differences: dict[str, tuple[float, ...]]) -> list[Row]:
    """Return the rows of a page that compares instances with their theory."""
    rows: list[Row] = [("", "simulation", "theory", "difference", "error bar", "in bars")]
    for name, (simulation, theory, gap, bar) in differences.items():
        if np.isfinite(simulation):
            # An order parameter that vanishes for large d is not zero at finite d, so no deviation is shown.
            sigmas = f"{gap / bar:+.1f}" if np.isfinite(bar) and theory != 0 else ""
            bar_text = f"{bar:.2g}" if np.isfinite(bar) else "unknown"  # one instance, or several with the same number
            rows.append((name, f"{simulation:.6g}", f"{theory:.6g}", f"{gap:+.2g}", bar_text, sigmas))
    return rows
