"""Files that are written whole or not at all, and that keep the state of a long computation.

A file of arrays is an .npz whose comment is the SHA-256 of everything before it, so that a single flipped bit is
detected. A file from which a computation resumes also has a line of JSON among its arrays, `about`, that identifies the
computation. A `Store` keeps the finished pieces of a computation, one file each. A `Checkpoint` keeps its latest state.

Results as files: the structure of a result as JSON, and its arrays by their place in it, in one .npz file.

Nothing in a file is executed. A class of this library is imported by its name; a class of the user's, such as a model,
must exist when the file is read.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import enum
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import re
import secrets
import stat
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from .arrays import AnyArray
from .errors import InputError

try:
    import fcntl
except ImportError:  # Windows has no locks on folders
    fcntl = None  # type: ignore[assignment]

VERSION = "0.1.0"  # version of the package, which pyproject.toml reads here
_ABOUT = "about"  # name of the JSON among the arrays
_PIECE = "piece"  # name of a piece in its own JSON, so that a copy under another name is noticed
_KINDS = ("track", "retry")  # kinds of pieces, which begin the file names: a folder may hold other files
_DIGEST = 64  # length of the checksum in characters
_INFLATED = 100  # largest ratio of the arrays to the file that contains them
_SMALL_FILE = 2**26  # bytes that the arrays of any file may take, however small the file is


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a unique temporary name and move it into place.

    No reader or other writer meets a part of the file, and no crash leaves a part under its name.

    Raises:
        OSError: if the file cannot be written; the error names `path`, which is then unchanged.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(problem, OSError) and problem.errno:
            problem.filename = str(path)
            del problem.filename2  # if it were None, the message would show it
        raise


def packed(arrays: Mapping[str, Any], *, compressed: bool = True) -> bytes:
    """Return the content of one .npz file of arrays with its checksum; pickle is not used.

    Raises:
        TypeError: if an array holds Python objects.
    """
    for name, array in arrays.items():
        if np.asarray(array).dtype.hasobject:
            raise TypeError(f"{name} must be an array of numbers or of text, got {array!r}")
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, **arrays)
    # A zip file ends with its comment, here the checksum. Two bytes before the comment hold its length.
    body = out.getvalue()[:-2] + _DIGEST.to_bytes(2, "little")
    return body + _digest(body)


def unpacked(path: Path, refusal: InputError) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a file of `packed` arrays. Return the JSON of `about`, which says what they belong to, and arrays by name.

    The sizes that the file announces are checked before memory is taken for them.

    Args:
        refusal: error to raise if the file cannot be read, is damaged or of another kind.
    """
    try:
        content = path.read_bytes()
        if _digest(content[:-_DIGEST]) != content[-_DIGEST:]:
            raise ValueError("another checksum")
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(entry.file_size for entry in file.infolist()) > max(_INFLATED * len(content), _SMALL_FILE):
                raise ValueError("larger arrays than this library packs")
            arrays = {entry.filename.removesuffix(".npy"): _array(file.read(entry)) for entry in file.infolist()}
        header = json.loads(str(arrays.pop(_ABOUT)))
        if not isinstance(header, dict):
            raise TypeError("another header")
        return header, arrays
    except Exception:  # the content can be anything, and can fail in any way
        raise refusal from None


def _array(content: bytes) -> np.ndarray:
    """Return the array of one .npy file.

    Raises:
        ValueError: the content has another size than its header announces, or consists of Python objects.
    """
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError("another size")
    return np.load(io.BytesIO(content), allow_pickle=False)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def make_private(folder: Path, argument: str) -> None:
    """Make a folder to which only this user can write, or check one that exists; one that cannot be made is left out.

    Raises:
        InputError: the folder belongs to somebody else, or others can write to it or replace it; names `argument`.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid") or not folder.exists():  # Windows has other permissions
        return
    path = folder.resolve()
    facts = path.stat()
    # Nobody can replace the files of others in a folder with the sticky bit, such as /tmp.
    open_parents = [p for p in path.parents if p.stat().st_mode & (0o002 | stat.S_ISVTX) == 0o002]
    if facts.st_mode & 0o022 or facts.st_uid not in (0, os.getuid()) or open_parents:
        place, facts = (open_parents[0], open_parents[0].stat()) if open_parents else (path, facts)
        actual = f"where {place} has the owner {facts.st_uid} and the mode {facts.st_mode & 0o7777:04o}"
        text = "must be a folder to which only you can write, because its programs are executed"
        raise InputError(argument, f"{text}: chmod 700 it or use another, got {argument}='{folder}', {actual}")


def csv_of(rows: list[dict[str, Any]]) -> bytes:
    """Return rows, dictionaries by column, as the content of a CSV file; missing entries stay empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


class Tabular:
    """A result with a `table`: a list of rows, dictionaries by column."""

    def to_csv(self: Any, path: Path | str | None = None) -> str:
        """Return the `table` as CSV, and write it to `path` if given."""
        content = csv_of(self.table())
        if path is not None:
            write_whole(Path(path), content)
        return content.decode()


def fingerprint(*parts: PyTree) -> str:
    """Hash pytrees: their structure, shapes, dtypes and every bit of their arrays; the same in every process.

    Functions in the structure count by their names only. `model.identity` says what a model computes.
    """
    digest = hashlib.sha256()
    for part in parts:
        leaves, structure = jax.tree.flatten(part)
        digest.update(without_addresses(structure).encode())
        for leaf in leaves:
            array = np.asarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def without_addresses(thing: Any) -> str:
    """Return the `repr` of a thing without the addresses in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


class Claim:
    """Lock by which this process claims a folder; the system releases it when the process ends, however it ends."""

    def __init__(self, folder: Path):
        self.locked = False
        if fcntl is None:
            return
        lock = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
        except BlockingIOError:
            text = f"must be a folder that no other run is filling: wait for it or use another, got out='{folder}'"
            raise InputError("out", text) from None
        except OSError:  # a file system without locks on folders, such as NFS: the folder stays unprotected
            pass


_CLAIMS: weakref.WeakValueDictionary[Path, Claim] = weakref.WeakValueDictionary()


def claim(folder: Path) -> Claim:
    """Make a folder and lock it against other processes while the caller keeps the returned `Claim`.

    Partial files that a killed process left there are removed.

    Raises:
        InputError: if the folder cannot be made or written, or another process fills it; the error names `out`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except (OSError, ValueError) as problem:
        raise folder_error(folder, problem) from None
    path = folder.resolve()
    lock = _CLAIMS.get(path)
    if lock is None:
        lock = _CLAIMS[path] = Claim(folder)
        for part in folder.glob(".*.part") if lock.locked else ():
            part.unlink(missing_ok=True)
    return lock


def folder_error(folder: Path, why: Exception) -> InputError:
    """Return the error for a folder `out` that cannot be written."""
    reason = getattr(why, "strerror", None) or why
    return InputError("out", f"must be a folder that can be written, got out='{folder}' ({reason})")


class Store:
    """Finished pieces of one computation in a folder, each a file of its own that carries the fingerprint.

    While the store exists no other computation can open one in the same folder. The processes of one computation share
    the folder.

    Args:
        folder: folder of the pieces; None keeps nothing.
        mark: fingerprint of the computation.
        resume: whether to take over pieces that are there already.

    Raises:
        InputError: if the folder has pieces and `resume` is False, the folder cannot be written, or another run fills
            it.
    """

    def __init__(self, folder: str | os.PathLike | None, mark: str, resume: bool):
        self.folder = None if folder is None else Path(folder)
        self.header = {"fingerprint": mark, "version": VERSION}
        if self.folder is None:
            return
        if jax.process_index() == 0:
            self._claim = claim(self.folder)
        if not resume and (piece_count := len(self._paths())):
            text = "must not hold the pieces of an earlier run unless resume is asked for"
            raise InputError("out", f"{text}, got out='{folder}' with {piece_count} of them")

    def load(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the finished pieces by name; each is a dictionary of arrays by name.

        Raises:
            InputError: if a piece is damaged, belongs to another computation, or is a copy of another piece.
        """
        pieces = {}
        for path in self._paths():
            text = f"must hold whole pieces only, got out='{self.folder}' with {path.name} damaged: delete this file"
            header, pieces[path.stem] = unpacked(path, InputError("out", text))
            piece = header.pop(_PIECE, None)
            if header != self.header:
                text = "must hold pieces of the same model, nodes, axes and version only"
                raise InputError("out", f"{text}, got out='{self.folder}' with pieces of others: use another folder")
            if piece != path.stem:
                text = "must hold every piece under its own name"
                actual = f"got out='{self.folder}' with {piece} in {path.name}: delete this file"
                raise InputError("out", f"{text}, {actual}")
        return pieces

    def put(self, name: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Write a finished piece; its name must start with "track-" or "retry-". The file contains its name, too."""
        assert name.partition("-")[0] in _KINDS, name
        if self.folder is not None:
            _save(self.folder / f"{name}.npz", {**self.header, _PIECE: name}, arrays)

    def _paths(self) -> list[Path]:
        return [] if self.folder is None else sorted(p for k in _KINDS for p in self.folder.glob(f"{k}-*.npz"))


class Checkpoint:
    """The latest state of one computation, a pytree of arrays, in one file.

    Args:
        path: path of the file; None keeps nothing.
        header: configuration that the state belongs to; its values must survive a round trip through JSON.
    """

    def __init__(self, path: str | os.PathLike | None, header: dict[str, Any]):
        self.path = None if path is None else Path(path)
        self.header = {**header, "version": VERSION}

    def load(self, initial: PyTree) -> tuple[int, PyTree]:
        """Return the number of finished steps and the state after them; zero and `initial` if there is no file.

        Args:
            initial: state before the computation, with the structure and types of every later state.

        Raises:
            InputError: if the file is damaged or no checkpoint, or has another configuration or version. The error
                names `checkpoint` and says what differs.
        """
        if self.path is None or not os.path.exists(self.path):
            return 0, initial
        text = f"must be one that this library wrote: delete it or name another file, got checkpoint={self.path}"
        refusal = InputError("checkpoint", text)
        header, arrays = unpacked(self.path, refusal)
        steps = header.pop("done", None)
        if header != self.header:
            names = [name for name in {**self.header, **header} if header.get(name) != self.header.get(name)]
            mismatch = ", ".join(f"{name}={header.get(name)!r} instead of {self.header.get(name)!r}" for name in names)
            text = f"must be of this configuration, or another file, got checkpoint={self.path} with {mismatch}"
            raise InputError("checkpoint", text)
        if steps is None or set(arrays) != set(named(initial)):
            raise refusal
        return steps, _filled(initial, arrays)

    def save(self, steps: int, state: PyTree) -> None:
        """Write the state after so many `steps` in place of an earlier one."""
        if self.path is not None:
            _save(self.path, {**self.header, "done": steps}, named(state))


def _save(path: Path, header: dict[str, Any], arrays: Mapping[str, ArrayLike]) -> None:
    """Write named arrays, with the JSON of what they belong to, as one whole file."""
    write_whole(path, packed({_ABOUT: np.array(json.dumps(header)), **arrays}, compressed=False))  # compressing is slow


def named(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a pytree by their path in it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _filled(template: PyTree, arrays: dict[str, np.ndarray]) -> PyTree:
    """Return a pytree with the structure and types of `template` and with named arrays as its leaves."""

    def leaf(name: str, reference: Any) -> AnyArray:
        # Types that numpy does not know, such as bfloat16, are read back as plain bytes.
        array = arrays[name].view(reference.dtype) if arrays[name].dtype.kind == "V" else arrays[name]
        return (jnp if isinstance(reference, jax.Array) else np).asarray(array)

    return jax.tree.unflatten(jax.tree.structure(template), itertools.starmap(leaf, named(template).items()))


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
