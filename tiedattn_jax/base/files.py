"""Files that are written whole or not at all: arrays, tables, and what a long computation resumes from.

A file of arrays is an .npz, whose zip format has a checksum (CRC) of every array. It also has a line of JSON among its
arrays, `about`, that says what they belong to. A `Store` keeps what a computation resumes from: its finished pieces, or
its latest state.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import inspect
import io
import itertools
import json
import os
import re
import secrets
import stat
import types
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from . import VERSION
from .arrays import ARRAYS, AnyArray
from .errors import InputError, as_flag, require_kind

_ABOUT = "about"  # name of the JSON among the arrays
_KINDS = ("piece", "retry")  # kinds of pieces, which begin the file names: a folder may hold other files


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


def packed(about: Any, arrays: Mapping[str, Any], *, compressed: bool = True) -> bytes:
    """Return the content of one .npz file of arrays and of the JSON that says what they belong to; pickle is not used.

    Raises:
        TypeError: if an array holds Python objects.
    """
    for name, array in arrays.items():
        if np.asarray(array).dtype.hasobject:
            raise TypeError(f"{name} must be an array of numbers or of text, got {array!r}")
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, **{_ABOUT: np.array(json.dumps(about)), **arrays})
    return out.getvalue()


def unpacked(file: Path | io.BytesIO, refusal: InputError) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a file of `packed` arrays. Return what they belong to, and the arrays by name.

    Args:
        refusal: error to raise if the file cannot be read, is damaged or of another kind.
    """
    try:
        with zipfile.ZipFile(file) as archive:  # it compares the checksum of every entry that is read to its end
            entries = {name.removesuffix(".npy"): io.BytesIO(archive.read(name)) for name in archive.namelist()}
        arrays = {name: np.load(entry, allow_pickle=False) for name, entry in entries.items()}
        about = json.loads(str(arrays.pop(_ABOUT)))
        if not isinstance(about, dict):
            raise TypeError("another header")
        return about, arrays
    except Exception:  # the content can be anything, and can fail in any way
        raise refusal from None


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


def fingerprint(*parts: PyTree) -> str:
    """Hash pytrees: their structure, shapes, dtypes and every bit of their arrays; the same in every process.

    Functions in the structure count by their names only, see `identity_of`; `model.identity` says what models compute.
    """
    digest = hashlib.sha256()
    for part in parts:
        leaves, structure = jax.tree.flatten(part)
        digest.update(without_addresses(structure).encode())
        for leaf in leaves:
            array = np.asarray(leaf)
            is_number = array.dtype.kind in "biufcUV"
            content = array.tobytes() if is_number else without_addresses(leaf).encode()
            digest.update(f"{array.dtype}{array.shape}".encode() + content)
    return digest.hexdigest()


def identity_of(function: Any) -> str:
    """Return the name of a function and a hash of what it computes, the same in every process of one Python version.

    The hash has the code of the function, and the functions, numbers, texts, arrays and modules (`eqx.Module`) that it
    encloses or names in its own file. Other things, such as functions of other files and lists, count by their names.
    """
    digest, known, function = hashlib.sha256(), set[int](), inspect.unwrap(function)
    home = getattr(function, "__module__", None)

    def add(thing: Any) -> None:
        thing = inspect.unwrap(thing) if callable(thing) else thing
        if isinstance(thing, tuple):
            for part in thing:
                add(part)
        elif isinstance(thing, functools.partial):
            add((thing.func, thing.args, *sorted(thing.keywords.items())))
        elif isinstance(thing, types.CodeType):
            digest.update(thing.co_code + repr(thing.co_names).encode())
            add(thing.co_consts)
        elif isinstance(thing, types.FunctionType) and thing.__module__ == home:
            if id(thing) not in known:
                known.add(id(thing))
                add((thing.__code__, thing.__defaults__, *sorted((thing.__kwdefaults__ or {}).items())))
                add(tuple((name, thing.__globals__[name]) for name in _names_in(thing.__code__, thing.__globals__)))
                for cell in thing.__closure__ or ():
                    with contextlib.suppress(ValueError):  # a cell may be empty
                        add(cell.cell_contents)
        elif isinstance(thing, (int, float, complex, str, bytes, type(None), eqx.Module, *ARRAYS)):
            digest.update(fingerprint(thing).encode())
            if callable(thing):
                add(type(thing).__call__)
        elif isinstance(thing, frozenset):
            add(tuple(sorted(map(repr, thing))))
        else:
            name = getattr(thing, "__qualname__", type(thing).__qualname__)
            digest.update(f"{getattr(thing, '__module__', '')}:{name}".encode())

    add(function)
    return f"{home}:{getattr(function, '__qualname__', type(function).__qualname__)} {digest.hexdigest()}"


def _names_in(code: types.CodeType, known: Mapping[str, Any]) -> list[str]:
    """Return the names in a code, and in the functions that it defines, that are known."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names_in(part, known)]
    return sorted({*(name for name in code.co_names if name in known), *inner})


def without_addresses(thing: Any) -> str:
    """Return the `repr` of a thing without the addresses in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))


def make_folder(folder: Path, argument: str) -> None:
    """Make a folder, or check that one can be written to.

    Raises:
        InputError: it cannot; the error names `argument`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except (OSError, ValueError) as problem:
        raise folder_error(folder, problem, argument) from None


def folder_error(folder: Path, why: Exception, argument: str = "out") -> InputError:
    """Return the error for a folder that cannot be written."""
    reason = getattr(why, "strerror", None) or why
    return InputError(argument, f"must be a folder that can be written, got {argument}='{folder}' ({reason})")


class _Damaged(InputError):
    """A file is damaged, or was not written by this library."""


class Store:
    """Place from which a computation resumes: a folder with its finished pieces, or one file with its latest state.

    Every file is written whole, and says which computation it belongs to. A piece does not depend on who computes it:
    two runs that share a folder write equal pieces.

    Args:
        place: the folder or the file; None keeps nothing.
        computation: what identifies the computation; its values must survive a round trip through JSON.
        argument: name of the argument `place` in errors.
        requirement: end of the sentence "`argument` must ..." for a file that belongs to another computation.
    """

    def __init__(
        self, place: str | os.PathLike | None, computation: dict[str, Any], argument: str, requirement: str
    ) -> None:
        require_kind(place, argument, (str, os.PathLike, type(None)), "a folder")
        self.place = None if place is None else Path(place)
        self.computation = {**computation, "version": VERSION}
        self.argument, self.requirement = argument, requirement

    @property
    def hint(self) -> str:
        """How to go on after a computation that ended early."""
        if self.place is None:
            return f"nothing is kept: a folder {self.argument}= keeps finished pieces"
        return (
            f"finished pieces are in {self.argument}='{self.place}': the same call with resume=True goes on from there"
        )

    def open_folder(self, resume: Any) -> None:
        """Make the folder of the pieces.

        Raises:
            InputError: the folder cannot be written, or has pieces although the computation does not `resume`; or there
                is none to resume from.
        """
        resume = as_flag(resume, "resume")
        if self.place is None:
            if resume:
                text = f"must name the folder of the run to resume, got {self.argument}=None with resume=True"
                raise InputError(self.argument, text)
            return
        make_folder(self.place, self.argument)
        if not resume and (count := len(self._paths())):
            text = "must not hold the pieces of an earlier run unless resume is asked for"
            raise InputError(self.argument, f"{text}, got {self.argument}='{self.place}' with {count} of them")

    def pieces(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the finished pieces by name; each is a dictionary of arrays by name.

        Damaged pieces are left out with a warning. They are computed again, which overwrites them.

        Raises:
            InputError: if a piece belongs to another computation, or is a copy of another piece.
        """
        pieces, damaged = {}, []
        for path in self._paths():
            try:
                about, pieces[path.stem] = self._read(path)
            except _Damaged:
                damaged.append(path.name)
                continue
            if (piece := about.get("piece")) != path.stem:
                text = "must hold every piece under its own name"
                actual = f"got {self.argument}='{self.place}' with {piece} in {path.name}: delete this file"
                raise InputError(self.argument, f"{text}, {actual}")
        if damaged:
            warnings.warn(f"damaged pieces in '{self.place}' are computed again: {', '.join(damaged)}", stacklevel=2)
        return pieces

    def put(self, piece: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Write a finished piece; its name must start with one of `_KINDS`. The file contains its name, too."""
        assert piece.partition("-")[0] in _KINDS, piece
        if self.place is not None:
            self._write(self.place / f"{piece}.npz", {"piece": piece}, arrays)

    def latest(self, initial: PyTree) -> tuple[int, PyTree]:
        """Return the number of finished steps and the state after them; zero and `initial` if there is no file.

        Args:
            initial: state before the computation, with the structure and types of every later state.

        Raises:
            InputError: if the file is damaged or of another kind, or belongs to another computation.
        """
        if self.place is None or not os.path.exists(self.place):
            return 0, initial
        about, arrays = self._read(self.place)
        if "steps" not in about or set(arrays) != set(named(initial)):
            raise self._damaged(self.place)
        return about["steps"], _filled(initial, arrays)

    def keep(self, steps: int, state: PyTree) -> None:
        """Write the state after so many `steps` in place of an earlier one."""
        if self.place is not None:
            self._write(self.place, {"steps": steps}, named(state))

    def _paths(self) -> list[Path]:
        return [] if self.place is None else sorted(p for k in _KINDS for p in self.place.glob(f"{k}-*.npz"))

    def _damaged(self, path: Path) -> _Damaged:
        text = f"must be whole and written by this library, got {self.argument}='{self.place}'"
        return _Damaged(self.argument, f"{text} with {path.name} damaged or of another kind: delete this file")

    def _write(self, path: Path, about: dict[str, Any], arrays: Mapping[str, ArrayLike]) -> None:
        # Without compression, which is slow.
        write_whole(path, packed({"computation": self.computation, **about}, arrays, compressed=False))

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the JSON and the arrays of a file of this computation."""
        about, arrays = unpacked(path, self._damaged(path))
        if not isinstance(actual := about.get("computation"), dict):
            raise self._damaged(path)
        expected = self.computation
        if actual != expected:
            names = [name for name in {**expected, **actual} if actual.get(name) != expected.get(name)]
            differences = [f"{name}={actual.get(name)!r} instead of {expected.get(name)!r}" for name in names]
            if names == ["fingerprint"]:
                differences = ["those of another call: give another folder, or delete this one"]
            text = f"must {self.requirement}, got {self.argument}='{self.place}' with {', '.join(differences)}"
            raise InputError(self.argument, text)
        return about, arrays


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
