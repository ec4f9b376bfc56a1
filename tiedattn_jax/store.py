"""Files that are whole or not there at all, and the finished pieces of a long computation kept in them."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

_PIECE = "track-{:05d}.npz"


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


class Store:
    """Finished pieces of one computation in a folder, each a file of its own that carries the fingerprint.

    Args:
        folder: where; None keeps nothing.
        mark: fingerprint of the computation.
        resume: whether pieces that are there already are taken over.

    Raises:
        ValueError: pieces of another computation are there, or of this one without `resume`, or nothing can be
            written there.
    """

    def __init__(self, folder: Path | str | None, mark: str, resume: bool):
        self.folder = None if folder is None else Path(folder)
        self.mark = mark
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ValueError(f"out must be a folder, got out='{folder}' ({problem.strerror})") from None
        if not os.access(self.folder, os.W_OK):
            raise ValueError(f"out must be a folder that can be written, got out='{folder}'")
        found = sorted(self.folder.glob("track-*.npz"))
        if found and not resume:
            raise ValueError(
                f"out must not hold the pieces of an earlier run unless resume is asked for, got out='{folder}' "
                f"with {len(found)} of them"
            )
        for path in found:
            with np.load(path, allow_pickle=False) as file:
                if str(file["fingerprint"]) != mark:
                    raise ValueError(
                        f"out must hold pieces of the same model, nodes, axes and version only, got out='{folder}' "
                        f"with {path.name} of others: use another folder"
                    )

    def load(self) -> dict[int, dict[str, np.ndarray]]:
        """The finished pieces, by their number."""
        if self.folder is None:
            return {}
        pieces = {}
        for path in sorted(self.folder.glob("track-*.npz")):
            with np.load(path, allow_pickle=False) as file:
                arrays = {k: file[k] for k in file.files if k != "fingerprint"}
            pieces[int(path.stem.removeprefix("track-"))] = arrays
        return pieces

    def put(self, number: int, arrays: dict[str, np.ndarray]) -> None:
        """Keep a finished piece."""
        if self.folder is not None:
            path = self.folder / _PIECE.format(number)
            write_whole(path, packed({**arrays, "fingerprint": np.array(self.mark)}))
