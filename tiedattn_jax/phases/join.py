"""Tables and diagrams of separate jobs, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from ..base.errors import InputError
from ..base.results import Status
from ..base.saved import load
from ..model.overlaps import PAIR
from .cells import Missing
from .diagram import PhaseDiagram
from .table import Table

_SAME = 1e-5  # relative difference of two values of one setting that the tolerance of a solver explains


def join(parts: Iterable[Table | PhaseDiagram | Path | str]) -> Any:
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
    if isinstance(parts, (str, Path, Table, PhaseDiagram)) or not isinstance(parts, Iterable):
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
        if not is_diagram and part.setting and first.setting and part.setting != first.setting:
            text = "must have the same model, fixed numbers and options of sweep"
            raise InputError("parts", f"{text}, got others in part {number} than in part 0")
    axes = tuple(np.unique(np.concatenate([part.axes[k] for part in loaded])) for k in range(len(first.axes)))
    shape, places = tuple(map(len, axes)), [np.ix_(*map(np.searchsorted, axes, part.axes)) for part in loaded]
    _check_agreement(loaded, axes, places)
    owner = np.full(shape, -1)  # number of the part that a setting is taken from: one with a result if there is one
    for k, (part, place) in enumerate(zip(loaded, places, strict=True)):
        has_result = part.solved if is_diagram else part.found
        owner[place] = np.where((owner[place] < 0) | has_result, k, owner[place])
    sources = []
    for index, k in np.ndenumerate(owner):
        local = (np.searchsorted(own, axis[i]) for own, axis, i in zip(loaded[k].axes, axes, index, strict=True))
        sources.append(None if k < 0 else (k, tuple(map(int, local))))

    def filled(*arrays: Any) -> np.ndarray:
        """Take the entries of all settings from arrays of the parts; those of holes are NaN or zero."""
        entry = np.asarray(arrays[0])[(0,) * len(shape)]
        blank = np.full_like(entry, np.nan if entry.dtype.kind == "f" else 0)
        rows = [blank if source is None else np.asarray(arrays[source[0]])[source[1]] for source in sources]
        return np.stack(rows).reshape(*shape, *entry.shape)

    if is_diagram:
        return _diagram(loaded, axes, owner, filled)
    hole = Missing("no part has this setting", int(Status.nonfinite))
    cells = [hole if s is None else loaded[s[0]].cells[np.ravel_multi_index(s[1], loaded[s[0]].shape)] for s in sources]
    if first.slope is None:
        return Table(first.question, first.names, axes, tuple(cells), setting=first.setting)
    slope, exact = filled(*(part.slope for part in loaded)), filled(*(part.exact for part in loaded))
    slope = np.where(exact, slope, np.nan)
    return Table.of_event(first.question, first.names[0], axes[0], cells, slope).of_setting(first.setting)


def _setting(part: Table | PhaseDiagram) -> Any:
    """Return what must be the same in all parts, besides their axes."""
    if isinstance(part, Table):
        return part.question
    return {name: value for name, value in part.attrs.items() if name != "fingerprint"}


def _check_agreement(parts: Sequence[Any], axes: tuple[Float[np.ndarray, " _"], ...], places: Sequence[Any]) -> None:
    """Check that the numbers for which the parts were made agree where they overlap."""
    is_table = isinstance(parts[0], Table)
    for name in [parts[0].main] if is_table else [f"{branch}_train_loss" for branch in PAIR]:
        known = np.full(tuple(map(len, axes)), np.nan)
        for part, place in zip(parts, places, strict=True):
            values = np.asarray(part.values(name), float)
            differ = np.abs(known[place] - values) > _SAME * np.abs(values)
            if differ.any():
                at = zip(part.names, part.axes, np.argwhere(differ)[0], strict=True)
                text = ", ".join(f"{axis} = {own[k]:g}" for axis, own, k in at)
                raise InputError("parts", f"must agree where they overlap, got two values of {name} at {text}")
            known[place] = np.where(np.isnan(values), known[place], values)


def _diagram(parts: Sequence[Any], axes: tuple[Any, ...], owner: Any, filled: Any) -> PhaseDiagram:
    """Return the diagram whose cells are `filled` from those of the parts."""
    first = parts[0]
    positional, semantic = (jax.tree.map(filled, *(getattr(part, branch) for part in parts)) for branch in PAIR)
    for point in (positional, semantic):
        point.replicates.status[owner < 0] = int(Status.nonfinite)
    crossings = None
    if first.crossings is not None:
        rows = 1 - first.names.index("alpha")  # the axis of the rows, which lie along alpha
        crossings = np.full((len(axes[rows]), *first.crossings.shape[1:]), np.nan)
        for part in parts:
            at = np.searchsorted(axes[rows], part.axes[rows])
            crossings[at] = np.where(np.isnan(part.crossings), crossings[at], part.crossings)
    (y_name, x_name), (y, x) = first.names, axes
    return PhaseDiagram((x_name, x), (y_name, y), positional, semantic, _setting(first), crossings)
