"""Results in files: `pack` and `load` write and read their structure as JSON, and their arrays by their place in it.

Nothing in a file is executed. A class of this library is looked up by its name; a class of the user's, such as a model,
must exist when the file is read. The file has the hash of what a model of the user's computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import VERSION
from .arrays import ARRAYS, AnyArray
from .errors import InputError
from .files import packed, unpacked

# Trees as JSON: of results in files, and of arguments and results of stored programs.


def as_json(
    value: Any,
    leaf: Callable[[Any, str], Any],
    name_of: Callable[[type], str],
    place: str,
    mark: Callable[[Any], dict[str, str]] = lambda node: {},
) -> Any:
    """Return a tree of containers, modules and named tuples as JSON.

    Args:
        leaf: writes what is neither plain Python nor a node, given its place in the tree.
        name_of: returns the name of the class of a module or named tuple, for `from_json`.
        place: name of the tree, which begins all places in it.
        mark: further entries of a module or named tuple.
    """

    def written(value: Any, place: str) -> Any:
        if isinstance(value, (bool, str, type(None))):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, np.generic):
            return int(value) if isinstance(value, enum.IntEnum) else value
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: written(item, f"{place}.{key}") for key, item in value.items()}}
        if isinstance(value, list) or type(value) is tuple:
            return {type(value).__name__: [written(item, f"{place}.{k}") for k, item in enumerate(value)]}
        if isinstance(value, (eqx.Module, tuple)):
            fields = {name: written(getattr(value, name), f"{place}.{name}") for name in _fields(type(value))}
            return {"class": name_of(type(value)), "fields": fields, **mark(value)}
        return leaf(value, place)

    return written(value, place)


def from_json(
    value: Any,
    leaf: Callable[[Any], Any],
    class_of: Callable[[str], type],
    on_module: Callable[[Any, dict[str, Any]], None] = lambda node, written: None,
) -> Any:
    """Return the tree that `as_json` wrote; fields are set as they were, without the checks of a new object.

    Args:
        leaf: reads what the `leaf` of `as_json` wrote.
        class_of: returns the class of a name.
        on_module: called with every module and with what was written of it.

    Raises:
        InputError: a class has other fields now.
    """
    if not isinstance(value, dict):
        return value
    read = functools.partial(from_json, leaf=leaf, class_of=class_of, on_module=on_module)
    if "dict" in value:
        return {key: read(item) for key, item in value["dict"].items()}
    if "list" in value or "tuple" in value:
        return [*map(read, value["list"])] if "list" in value else tuple(map(read, value["tuple"]))
    if "class" not in value:
        return leaf(value)
    cls, fields = class_of(value["class"]), {name: read(item) for name, item in value["fields"].items()}
    if set(fields) != set(_fields(cls)):
        raise InputError("path", f"must be of this version of {cls.__name__}, got other fields: save it again")
    if issubclass(cls, tuple):
        return cls(**fields)
    result = object.__new__(cls)
    for name, item in fields.items():
        object.__setattr__(result, name, item)
    on_module(result, value)
    return result


def _fields(cls: type) -> tuple[str, ...]:
    """Return the names of the fields of a module, or of a named tuple."""
    names = getattr(cls, "_fields", None)  # of a named tuple
    return names if names is not None else tuple(field.name for field in dataclasses.fields(cls))


def name_of(thing: Any) -> str:
    """Return "module:name" of a class or function, by which a file refers to it."""
    return f"{getattr(thing, '__module__', None) or ''}:{getattr(thing, '__qualname__', '<')}"


def is_own(name: str) -> bool:
    """Return whether the thing of this name is defined in this library, and not inside a function."""
    return name.partition(".")[0] == _PACKAGE and "<" not in name


_PACKAGE = __name__.partition(".")[0]


def own_class(name: str) -> type | None:
    """Return the module or named tuple of this library with this name; None if there is none.

    Nothing is imported or called, because a file chooses the name.
    """
    module, _, path = name.partition(":")
    thing: Any = functools.reduce(lambda a, part: getattr(a, part, None), path.split("."), sys.modules.get(module))
    is_node = isinstance(thing, type) and (issubclass(thing, eqx.Module) or hasattr(thing, "_fields"))
    return thing if is_node and is_own(name) and name_of(thing) == name else None


def pack(result: Any) -> bytes:
    """Return the content of an .npz file that `load` reads.

    Raises:
        InputError: the result contains something else than numbers, texts, arrays, and modules and containers of them.
    """
    arrays: dict[str, np.ndarray] = {}

    def leaf(value: Any, place: str) -> Any:
        if isinstance(value, ARRAYS) and value.dtype.kind in "biufcU":
            arrays[place] = np.asarray(value)
            return {"array": place, "jax": isinstance(value, jax.Array)}
        raise InputError("result", f"must consist of numbers, texts and arrays to be saved, got {value!r} in {place}")

    codes: dict[Any, str] = {}

    def mark(node: Any) -> dict[str, str]:
        return {"code": code} if (code := _code_of(node, codes)) else {}

    tree = as_json(result, leaf, name_of, type(result).__name__, mark)
    return packed({"version": VERSION, "jax": _jax(), "result": tree}, arrays)


def _jax() -> str:
    """Return the version and the precision of jax, which texts of losses depend on."""
    return f"{jax.__version__}, {jnp.result_type(float)}"


def _code_of(module: Any, known: dict[Any, str]) -> str:
    """Return the hash of what a module of the user's computes, by its `identity_text`; empty if there is no such text.

    The text depends on the class, the shapes and the static fields, and not on the numbers. It is made once for all
    modules of a file that share these, because it takes about a second.

    Args:
        known: the hashes of the file by what they depend on; a new one is added.
    """
    parts = jax.tree.leaves(module, is_leaf=lambda part: part is not module and isinstance(part, eqx.Module))
    modules = [module, *(part for part in parts if isinstance(part, eqx.Module))]
    if not hasattr(type(module), "identity_text") or all(is_own(name_of(type(part))) for part in modules):
        return ""
    leaves, structure = jax.tree.flatten(module)
    key = structure, tuple((np.shape(a), str(getattr(a, "dtype", type(a)))) for a in leaves)
    if key not in known:
        known[key] = ""
        with contextlib.suppress(Exception):  # a gradient is an object of the model's class with other parts
            known[key] = hashlib.sha256(module.identity_text().encode()).hexdigest()
    return known[key]


def load(path: Path | str) -> Any:
    """Read a result from a file.

    A warning says that the loss of a model of the user's was changed after the result was computed, or that numbers
    lost digits because jax is set to 32 bits. Another version or precision of jax describes losses by other texts;
    they are then not compared.

    Raises:
        InputError: the file is missing, damaged or of another kind, or a class of the user's is not there.
    """
    hint = "" if Path(path).exists() else ", where there is no file"
    refusal = InputError("path", f"must be a whole file that `save` of a result wrote, got path='{path}'{hint}")
    return unpack(Path(path), str(path), refusal)


def unpack(file: Path | io.BytesIO, path: str, refusal: InputError) -> Any:
    """Return what `pack` wrote; warnings are those of `load`.

    Args:
        path: where it was, for warnings.
        refusal: error to raise if the content is of another kind.
    """
    about, arrays = unpacked(file, refusal)
    if "result" not in about:
        raise refusal

    changed, rounded, codes = set[str](), set[str](), dict[Any, str]()

    def leaf(value: Any) -> AnyArray:
        array = arrays[value["array"]]
        if not value["jax"]:
            return array
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype != array.dtype and array.dtype.kind in "fc":
            rounded.add(str(dtype))
        return jnp.asarray(array, dtype)

    def check_code(node: Any, written: dict[str, Any]) -> None:
        if "code" in written and about.get("jax") == _jax() and _code_of(node, codes) != written["code"]:
            changed.add(type(node).__name__)

    result = from_json(about["result"], leaf, _class_named, check_code)
    if changed:
        text = f"computes something else than when path='{path}' was saved: its numbers are those of the earlier loss"
        warnings.warn(f"{', '.join(sorted(changed))} {text}", stacklevel=2)
    if rounded:
        text = f"the numbers of path='{path}' were rounded to {', '.join(sorted(rounded))}"
        warnings.warn(f"{text}: call jax.config.update('jax_enable_x64', True) before loading", stacklevel=2)
    return result


def _class_named(name: str) -> type:
    """Return a class of this library, or a module class of the user's that was defined before.

    Raises:
        InputError: there is no such class.
    """
    if (cls := own_class(name)) is not None:
        return cls
    for cls in _subclasses(eqx.Module):
        if name_of(cls) == name and not is_own(name):
            return cls
    module, _, path = name.partition(":")
    raise InputError("path", f"needs the class {path} of {module}: define or import it before loading, got none")


def _subclasses(cls: Any) -> Iterator[Any]:
    """Yield all classes derived from a class, the latest first: a class may have been defined twice."""
    for derived in reversed(cls.__subclasses__()):
        yield derived
        yield from _subclasses(derived)
