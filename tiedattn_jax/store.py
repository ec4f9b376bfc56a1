"""Files that are whole or not there at all, and the state of a long computation kept in them.

A file that a computation resumes from is an .npz of named arrays with a line of JSON, `about`, that says what they
belong to. A `Store` keeps the finished pieces of a computation, one file each; a `Checkpoint` keeps its latest state.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import InputError

_ABOUT = "about"  # name of the JSON among the arrays
_KINDS = ("track", "retry")  # of pieces: a folder may hold other files


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name and move it into place, so that no reader and no crash meets a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def packed(arrays: dict[str, Any]) -> bytes:
    """Arrays as the content of one .npz file, without pickle."""
    out = io.BytesIO()
    np.savez_compressed(out, allow_pickle=False, **arrays)
    return out.getvalue()


def fingerprint(*parts: Any) -> str:
    """Hash of pytrees: their structure, shapes, dtypes and every bit of their arrays."""
    digest = hashlib.sha256()
    for part in parts:
        leaves, structure = jax.tree.flatten(part)
        digest.update(repr(structure).encode())
        for leaf in leaves:
            array = np.asarray(leaf)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


# What reading an .npz raises, depending on where the damage is.
_DAMAGE = (ValueError, TypeError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def _save(path: Path, about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write named arrays and what they belong to, whole."""
    out = io.BytesIO()
    np.savez(out, **{_ABOUT: np.array(json.dumps(about)), **arrays})  # packing is slow
    write_whole(path, out.getvalue())


def _load(path: Path, refusal: InputError) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What arrays belong to, and the arrays by name.

    Args:
        refusal: raised where the file is damaged or of another kind.
    """
    content = path.read_bytes()
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop(_ABOUT)))
        return dict(about), arrays
    except _DAMAGE as problem:
        raise refusal from problem


class Store:
    """Finished pieces of one computation in a folder, each a file of its own that carries the fingerprint.

    Args:
        folder: where; None keeps nothing.
        mark: fingerprint of the computation.
        resume: whether pieces that are there already are taken over.

    Raises:
        InputError: pieces are there and `resume` is not asked for, or nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike | None, mark: str, resume: bool):
        self.folder = None if folder is None else Path(folder)
        self.about = {"fingerprint": mark}
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError("out", f"must be a folder, got out='{folder}' ({problem.strerror})") from None
        if not os.access(self.folder, os.W_OK):
            raise InputError("out", f"must be a folder that can be written, got out='{folder}'")
        if not resume and (found := len(self._paths())):
            raise InputError(
                "out",
                f"must not hold the pieces of an earlier run unless resume is asked for, got out='{folder}' "
                f"with {found} of them",
            )

    def load(self) -> dict[str, dict[str, np.ndarray]]:
        """The finished pieces, by name: arrays by name.

        Raises:
            InputError: one of them is damaged, or of another computation.
        """
        pieces = {}
        for path in self._paths():
            text = f"must hold whole pieces only, got out='{self.folder}' with {path.name} damaged: delete this file"
            about, pieces[path.stem] = _load(path, InputError("out", text))
            if about != self.about:
                raise InputError(
                    "out",
                    f"must hold pieces of the same model, nodes, axes and version only, got out='{self.folder}' "
                    f"with {path.name} of others: use another folder",
                )
        return pieces

    def put(self, name: str, arrays: dict[str, Any]) -> None:
        """Keep a finished piece; its name starts with "track-" or "retry-"."""
        assert name.partition("-")[0] in _KINDS, name
        if self.folder is not None:
            _save(self.folder / f"{name}.npz", self.about, arrays)

    def _paths(self) -> list[Path]:
        return [] if self.folder is None else sorted(p for k in _KINDS for p in self.folder.glob(f"{k}-*.npz"))


class Checkpoint:
    """The latest state of one computation, a pytree of arrays, in one file.

    Args:
        path: the file; None keeps nothing.
        about: the configuration that the state belongs to, of values that JSON keeps as they are.
    """

    def __init__(self, path: str | os.PathLike | None, about: dict[str, Any]):
        self.path = None if path is None else Path(path)
        self.about = about

    def load(self, fresh: Any) -> tuple[int, Any]:
        """How far the computation had come, and its state; zero and `fresh` where there is no file.

        Args:
            fresh: the state before the computation; every state has its structure and types.

        Raises:
            InputError: about the argument `checkpoint`: the file is damaged or no checkpoint, or one of another
                configuration; says in what they differ.
        """
        if self.path is None or not self.path.exists():
            return 0, fresh
        refusal = InputError("checkpoint", f"must be one that this library wrote, got checkpoint={self.path}")
        found, arrays = _load(self.path, refusal)
        done = found.pop("done", None)
        if found != self.about:
            names = [name for name in {**self.about, **found} if found.get(name) != self.about.get(name)]
            other = ", ".join(f"{name}={found.get(name)!r} instead of {self.about.get(name)!r}" for name in names)
            text = f"must be of this configuration, or another file, got checkpoint={self.path} with {other}"
            raise InputError("checkpoint", text)
        if done is None or set(arrays) != set(_named(fresh)):
            raise refusal
        return done, _filled(fresh, arrays)

    def save(self, done: int, state: Any) -> None:
        """Keep a state, in the place of an earlier one."""
        if self.path is not None:
            _save(self.path, {**self.about, "done": done}, _named(state))


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their path in it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _filled(like: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A pytree of the structure and types of another one, with named arrays as its leaves."""

    def leaf(name: str, old: Any) -> Any:
        # Types that numpy does not know come back as plain bytes.
        array = arrays[name].view(old.dtype) if arrays[name].dtype.kind == "V" else arrays[name]
        return (jnp if isinstance(old, jax.Array) else np).asarray(array)

    leaves = [leaf(name, old) for name, old in _named(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
