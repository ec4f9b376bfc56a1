"""Tables and diagrams of separate jobs, put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from ..base.arrays import spread_to
from ..base.errors import InputError
from ..base.results import Status
from ..base.saved import load
from ..model.overlaps import PAIR
from .cells import Batch, Missing
from .diagram import PhaseDiagram
from .table import Table

_SAME = 1e-5  # relative difference of two values of one setting that the tolerance of a solver explains


def join(parts: Iterable[Table | Path | str]) -> Any:
    """Put parts of one table or one diagram together, from memory or from files that `save` wrote.

        join(["part-1.npz", "part-2.npz"])
        join([sweep(critical_alpha, model, omega=first), sweep(critical_alpha, model, omega=second)])

    The axes of the whole have all values of the parts. A setting that several parts have must have the same result in
    all of them; a result fills what another part lacks. A setting that no part has is a hole: it is without a result in
    a table, and not solved in a diagram.

    Args:
        parts: tables of one question, or diagrams of one model, over the same axes.

    Raises:
        InputError: there are no parts, a file is not one of them, they belong to different questions, models or
            options, or differ at a setting, which the message names.
    """
    if isinstance(parts, (str, Path, Table)) or not isinstance(parts, Iterable):
        raise InputError(
            "parts", f"must be a list of tables, of diagrams, or of their files, got {type(parts).__name__}"
        )
    loaded: list[Any] = [load(part) if isinstance(part, (str, Path)) else part for part in parts]
    kinds = {type(part) for part in loaded}
    if kinds not in ({Table}, {PhaseDiagram}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise InputError("parts", f"must be tables, or diagrams, one or more of one kind, got {names}")
    first, is_diagram = loaded[0], kinds == {PhaseDiagram}
    for number, part in enumerate(loaded):
        for name, of in {"axes": lambda part: part.names, "setting": _setting}.items():
            if of(part) != of(first):
                raise InputError("parts", f"must have the same {name}, got {of(part)!r} beside {of(first)!r}")
        if part.setting and first.setting and part.setting != first.setting:
            text = "must have the same model, fixed numbers and options of sweep"
            raise InputError("parts", f"{text}, got others in part {number} than in part 0")
    axes = tuple(np.unique(np.concatenate([part.axes[k] for part in loaded])) for k in range(len(first.axes)))
    shape, places = tuple(map(len, axes)), [np.ix_(*map(np.searchsorted, axes, part.axes)) for part in loaded]
    _check_agreement(loaded, axes, places)
    owner = np.full(shape, -1)  # number of the part that a setting is taken from: one with a result if there is one
    for k, (part, place) in enumerate(zip(loaded, places, strict=True)):
        owner[place] = np.where((owner[place] < 0) | part.found, k, owner[place])

    def filled(*arrays: Any) -> np.ndarray:
        """Take the entries of all settings from arrays of the parts, (*shape, ...); a hole is NaN, and not solved."""
        blank: Any = {"f": np.nan, "i": int(Status.nonfinite)}.get(arrays[0].dtype.kind, False)
        whole = np.full((*shape, *arrays[0].shape[len(shape) :]), blank, arrays[0].dtype)
        for k, (array, place) in enumerate(zip(arrays, places, strict=True)):
            whole[place] = np.where(spread_to(owner[place] == k, array), array, whole[place])
        return whole

    if is_diagram:
        return _diagram(loaded, axes, filled)
    hole = Missing("no part has this setting", int(Status.nonfinite))
    indices = filled(*(np.arange(len(part.cells)).reshape(part.shape) for part in loaded)).ravel().tolist()
    cells = [hole if k < 0 else loaded[k].cells[n] for k, n in zip(owner.ravel().tolist(), indices, strict=True)]
    if first.slope is None:
        return Table(first.question, first.names, axes, tuple(cells), setting=first.setting)
    slope, exact = filled(*(part.slope for part in loaded)), filled(*(part.exact for part in loaded))
    slope = np.where(exact, slope, np.nan)
    return Table.of_event(first.question, first.names[0], axes[0], cells, slope).of_setting(first.setting)


def _setting(part: Table) -> Any:
    """Return what must be the same in all parts, besides their axes."""
    if isinstance(part, PhaseDiagram):
        return {name: value for name, value in part.attrs.items() if name != "fingerprint"}
    return part.question


def _check_agreement(parts: Sequence[Any], axes: tuple[Float[np.ndarray, " _"], ...], places: Sequence[Any]) -> None:
    """Check that the numbers for which the parts were made agree where they overlap."""
    is_diagram = isinstance(parts[0], PhaseDiagram)
    for name in [f"{branch}_train_loss" for branch in PAIR] if is_diagram else [parts[0].main]:
        known = np.full(tuple(map(len, axes)), np.nan)
        for part, place in zip(parts, places, strict=True):
            values = np.asarray(part.values(name), float)
            differ = np.abs(known[place] - values) > _SAME * np.abs(values)
            if differ.any():
                at = zip(part.names, part.axes, np.argwhere(differ)[0], strict=True)
                text = ", ".join(f"{axis} = {own[k]:g}" for axis, own, k in at)
                raise InputError("parts", f"must agree where they overlap, got two values of {name} at {text}")
            known[place] = np.where(np.isnan(values), known[place], values)


def _diagram(parts: Sequence[Any], axes: tuple[Any, ...], filled: Any) -> PhaseDiagram:
    """Return the diagram whose cells are `filled` from those of the parts."""
    first, crossings = parts[0], None
    if first.crossings is not None:
        rows = 1 - first.names.index("alpha")  # the axis of the rows, which lie along alpha
        crossings = np.full((len(axes[rows]), *first.crossings.shape[1:]), np.nan)
        for part in parts:
            at = np.searchsorted(axes[rows], part.axes[rows])
            crossings[at] = np.where(np.isnan(part.crossings), crossings[at], part.crossings)
    cells = Batch(jax.tree.map(filled, *(part.pair for part in parts)), tuple(map(len, axes)))
    return dataclasses.replace(first, axes=axes, cells=cells, attrs=_setting(first), crossings=crossings)
