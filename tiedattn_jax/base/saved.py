"""Results as files: the structure of a result as JSON, and its arrays by their place in it, in one .npz file.

Nothing in a file is executed. A class of this library is imported by its name; a class of the user's, such as a model,
must exist when the file is read.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .errors import InputError
from .store import VERSION, packed, unpacked

_PACKAGE = __name__.partition(".")[0]


def pack(result: Any) -> bytes:
    """Return the content of an .npz file that `load` reads.

    Raises:
        InputError: the result contains something else than numbers, texts, arrays, and modules and containers of them.
    """
    arrays: dict[str, np.ndarray] = {}
    header = json.dumps({"version": VERSION, "result": _written(result, type(result).__name__, arrays)})
    return packed({**arrays, "about": np.array(header)})


def load(path: Path | str) -> Any:
    """Read a result from a file.

    Raises:
        InputError: the file is missing, damaged or of another kind, or a class of the user's is not there.
    """
    hint = "" if Path(path).exists() else ", where there is no file"
    refusal = InputError("path", f"must be a whole file that `save` of a result wrote, got path='{path}'{hint}")
    header, arrays = unpacked(Path(path), refusal)
    if "result" not in header:
        raise refusal
    return _read(header["result"], arrays)


def _written(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value as JSON; its arrays are added to `arrays` under their place."""
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        return int(value) if isinstance(value, enum.IntEnum) else value
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.dtype.kind in "biufcU":
        arrays[place] = np.asarray(value)
        return {"array": place, "jax": isinstance(value, jax.Array)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _written(item, f"{place}.{key}", arrays) for key, item in value.items()}}
    if isinstance(value, list) or type(value) is tuple:
        items = [_written(item, f"{place}.{k}", arrays) for k, item in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, eqx.Module) or isinstance(value, tuple):
        fields = {name: _written(getattr(value, name), f"{place}.{name}", arrays) for name in _fields(type(value))}
        return {"class": [type(value).__module__, type(value).__qualname__], "fields": fields}
    raise InputError("result", f"must consist of numbers, texts and arrays to be saved, got {value!r} in {place}")


def _read(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return what `_written` wrote; fields are set as they were, without the checks of a new object."""
    if not isinstance(value, dict):
        return value
    if "array" in value:
        array = arrays[value["array"]]
        return jnp.asarray(array) if value["jax"] else array
    if "dict" in value:
        return {key: _read(item, arrays) for key, item in value["dict"].items()}
    if "list" in value:
        return [_read(item, arrays) for item in value["list"]]
    if "tuple" in value:
        return tuple(_read(item, arrays) for item in value["tuple"])
    cls, fields = _class(*value["class"]), {name: _read(item, arrays) for name, item in value["fields"].items()}
    if set(fields) != set(_fields(cls)):
        raise InputError("path", f"must be of this version of {cls.__name__}, got other fields: save it again")
    if issubclass(cls, tuple):
        return cls(**fields)
    result = object.__new__(cls)
    for name, item in fields.items():
        object.__setattr__(result, name, item)
    return result


def _fields(cls: type) -> tuple[str, ...]:
    """Return the names of the fields of a module, or of a named tuple."""
    names = getattr(cls, "_fields", None)  # of a named tuple
    return names if names is not None else tuple(field.name for field in dataclasses.fields(cls))


def _class(module: str, name: str) -> type:
    """Return a class of this library, or a module class of the user's that was defined before.

    Raises:
        InputError: there is no such class.
    """
    candidates: Any = _subclasses(eqx.Module)
    if module.partition(".")[0] == _PACKAGE:
        candidates = [getattr(importlib.import_module(module), name, None)]
    for cls in candidates:
        if isinstance(cls, type) and (cls.__module__, cls.__qualname__) == (module, name):
            return cls
    raise InputError("path", f"needs the class {name} of {module}: define or import it before loading, got none")


def _subclasses(cls: Any) -> Iterator[Any]:
    """Yield all classes derived from a class, the latest first: a class may have been defined twice."""
    for derived in reversed(cls.__subclasses__()):
        yield derived
        yield from _subclasses(derived)
