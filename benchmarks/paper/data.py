"""Numbers of a figure in files: columns of equal length, written whole, and gone on with after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tiedattn_jax.errors import InputError
from tiedattn_jax.store import Checkpoint, packed, unpacked, write_whole

Columns = dict[str, np.ndarray]
_MAPS = Path("/proc/self/maps")
Bar = Callable[[int, int], None]  # called with how much is done, and of how much


class Task(NamedTuple):
    """What a computation is told.

    Attributes:
        full: whether simulations have the published size.
        folder: where its files are.
        bar: a progress bar, made from what is being done.
    """

    full: bool
    folder: Path
    bar: Callable[[str], Bar]


def read(path: Path) -> tuple[dict[str, Any], Columns]:
    """What a file says about itself, and its columns; those of `filled` as far as they have come.

    Raises:
        InputError: it is missing, damaged or of another kind.
    """
    about, columns = unpacked(path, missing(path))
    if "done" in about:
        columns = {name: values[: about["done"]] for name, values in columns.items()}
    return about, columns


def missing(path: Path) -> InputError:
    """The error about a file of numbers that is not there, or no such file."""
    return InputError("out", f"must hold the whole file {path.name}: compute the figure first, without --draw")


def keep(path: Path, about: dict[str, Any], columns: dict[str, Any]) -> None:
    """Write columns and what they are about."""
    write_whole(path, packed({**columns, "about": np.array(json.dumps(about))}))


def known(path: Path, about: dict[str, Any]) -> bool:
    """Whether a file is there that `keep` wrote about the same."""
    return path.exists() and read(path)[0] == about


def filled(
    path: Path,
    about: dict[str, Any],
    names: Sequence[str],
    points: Sequence[Sequence[float]],
    one: Callable[..., Sequence[float]],
    bar: Bar,
) -> None:
    """Rows of numbers, each kept as soon as it is there; goes on after the rows that the file has.

    Args:
        names: of the columns.
        points: what `one` is called with, row by row.
        one: the numbers of a row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = Checkpoint(path, {**about, "points": [list(map(float, p)) for p in points]})
    done, columns = kept.load({name: np.full(len(points), np.nan) for name in names})
    bar(done, len(points))
    for k in range(done, len(points)):
        for name, value in zip(names, one(*points[k]), strict=True):
            columns[name][k] = value
        kept.save(k + 1, columns)
        bar(k + 1, len(points))
        _few_programs()


def _few_programs() -> None:
    """Every program takes maps of memory, of which Linux gives a process 65,530: before that they are given back."""
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


def where(columns: Columns, **equal: float) -> Columns:
    """The rows in which some columns have some values."""
    on = np.all([np.isclose(columns[name], value) for name, value in equal.items()], axis=0)
    return {name: values[on] for name, values in columns.items()}
