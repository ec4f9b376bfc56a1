"""Citations: BibTeX of the papers, equations, data and software that results and functions rest on.

`sources.bib` beside this module has all entries, and before each the names of what rests on it.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any

from .errors import InputError
from .saved import is_own, name_of

_SOURCES = resources.files(__package__).joinpath("sources.bib")
_MARK = "%% "  # begins a line that says what rests on the entry behind it
_PACKAGE = __name__.partition(".")[0]


def cite(*results: Any) -> str:
    """Return BibTeX of what results rest on: papers and their equations, data, and software.

    A comment before an entry says what rests on it. Without arguments these are the entries that every result has.

        print(ta.cite(table, ta.bayes.weak_recovery))

    Args:
        results: results, models, data and recipes of averages; functions and classes of this package; lists of them.

    Raises:
        InputError: a thing, or one in a list, does not come from this package.
    """
    parts = [part for result in results for part in _required(result)]
    entries = []
    for block in _SOURCES.read_text("utf-8").strip().split("\n\n"):
        lines = block.split("\n")
        marks = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
        reasons = [f"% {why}" for names, why in map(_read, marks) if not names or any(_is_in(p, names) for p in parts)]
        if reasons:
            entries.append("\n".join([*reasons, *(line for line in lines if not line.startswith(_MARK))]))
    return "\n\n".join(entries)


def _read(mark: str) -> tuple[list[str], str]:
    """Return the names of a line "names | why", none if it is "why" alone, and the reason."""
    names, _, why = mark.rpartition(" | ")
    return [name for name in names.split(", ") if name], why


def _required(thing: Any) -> list[Any]:
    """Return the parts of a thing.

    Raises:
        InputError: it has none.
    """
    if isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields"):
        return [part for item in thing for part in _required(item)]
    parts = [*_parts(thing)]
    if not parts:
        raise InputError("results", f"must be results, functions or classes of {_PACKAGE}, got results={thing!r}")
    return parts


def _parts(thing: Any) -> Iterator[Any]:
    """Yield the classes and functions of this package in a thing, and the events of its numbers."""
    is_named = isinstance(getattr(thing, "__qualname__", None), str)  # a function or a class, and no instance
    kinds = getattr(thing, "__mro__", (thing,)) if is_named else type(thing).__mro__
    yield from (kind for kind in kinds if is_own(name_of(kind)))
    if is_named:
        return
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    if dataclasses.is_dataclass(thing):
        values = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        yield from filter(None, [getattr(thing, "event", None)])
    for value in values:
        yield from _parts(value)


def _is_in(part: Any, names: list[str]) -> bool:
    """Return whether one of the names is that of a part, of a module that contains it, or of an event."""
    for name in names:
        named: Any = sys.modules[_PACKAGE]
        for word in name.split("."):
            named = getattr(named, word, None)
        if inspect.ismodule(named) and f"{getattr(part, '__module__', '')}.".startswith(f"{named.__name__}."):
            return True
        if part in (named, name):
            return True
    return False
