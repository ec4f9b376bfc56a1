"""Files with the numbers of a figure: columns of equal length, written atomically, resumed after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.files import Store, packed, unpacked, write_whole

Columns = dict[str, Shaped[np.ndarray, " rows"]]
_MAPS = Path("/proc/self/maps")
Bar = Callable[[int, int], None]  # called with the amount that is done and the total


class Task(NamedTuple):
    """Options of a computation.

    Attributes:
        full: whether simulations have the published size.
        folder: folder of its files.
        bar: function that makes a progress bar from the name of what is computed.
    """

    full: bool
    folder: Path
    bar: Callable[[str], Bar]


def read(path: Path) -> tuple[dict[str, Any], Columns]:
    """Return the `about` of a file and its columns; for an unfinished file of `filled`, the rows that are done.

    Raises:
        InputError: the file is missing, damaged or of another kind.
    """
    metadata, columns = unpacked(path, missing(path))
    if "steps" in metadata:
        columns = {name: values[: metadata["steps"]] for name, values in columns.items()}
        metadata = metadata["computation"]
    return metadata, columns


def missing(path: Path) -> InputError:
    """Return the error for a file of numbers that is missing or of another kind."""
    return InputError("out", f"must hold the whole file {path.name}: compute the figure first, without --draw")


def keep(path: Path, metadata: dict[str, Any], columns: dict[str, Any]) -> None:
    """Write columns and their `about`."""
    write_whole(path, packed(metadata, columns))


def known(path: Path, metadata: dict[str, Any]) -> bool:
    """Return whether there is a file that `keep` wrote with the same `about`."""
    return path.exists() and read(path)[0] == metadata


def filled(
    path: Path,
    metadata: dict[str, Any],
    names: Sequence[str],
    points: Sequence[Sequence[float]],
    row: Callable[..., Sequence[float]],
    bar: Bar,
) -> None:
    """Compute rows of numbers and save each as soon as it is done; resume after the rows in the file.

    Args:
        names: names of the columns.
        points: arguments of `row`, one tuple per row.
        row: function that returns the numbers of a row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    computation = {**metadata, "points": [list(map(float, p)) for p in points]}
    checkpoint = Store(path, computation, "checkpoint", "be of this computation, or another file")
    done, columns = checkpoint.latest({name: np.full(len(points), np.nan) for name in names})
    bar(done, len(points))
    for k in range(done, len(points)):
        for name, value in zip(names, row(*points[k]), strict=True):
            columns[name][k] = value
        checkpoint.keep(k + 1, columns)
        bar(k + 1, len(points))
        _clear_programs()


def _clear_programs() -> None:
    """Clear jax's caches before a process reaches Linux's limit of 65,530 memory maps, which every program uses up."""
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


def where(columns: Columns, **equal: float) -> Columns:
    """Return the rows in which the named columns have the given values."""
    mask = np.all([np.isclose(columns[name], value) for name, value in equal.items()], axis=0)
    return {name: values[mask] for name, values in columns.items()}
