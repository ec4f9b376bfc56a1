"""Checkpoints: a line of JSON that says what they are of, and the array leaves of a pytree, in one file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np


def digest(tree: Any) -> str:
    """A short hash of the values of the arrays of a tree."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()[:16]


def save(path: Path, about: dict[str, Any], done: int, content: Any) -> None:
    """Write a checkpoint whole: under another name first, then moved into place.

    Args:
        about: the configuration, of values that JSON keeps as they are.
        done: how far the work has come.
        content: pytree of arrays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)
    try:
        with part:
            part.write(json.dumps({**about, "done": done}).encode() + b"\n")
            eqx.tree_serialise_leaves(part, content)
        os.chmod(part.name, 0o644)
        os.replace(part.name, path)
    except BaseException:
        os.unlink(part.name)
        raise


def load(path: Path, about: dict[str, Any], like: Callable[[int], Any]) -> tuple[int, Any]:
    """Read a checkpoint: how far the work had come, and the arrays.

    Args:
        about: the configuration that it has to be of.
        like: from how far it had come, a pytree of the structure, shapes and types of the content.

    Raises:
        ValueError: the file is no checkpoint, or one of another configuration; says in what they differ.
    """
    with open(path, "rb") as file:
        try:
            found = json.loads(file.readline())
            done = found.pop("done")
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f"checkpoint must be one that this library wrote, got checkpoint={path}") from None
        if found != about:
            names = [name for name in {**about, **found} if found.get(name) != about.get(name)]
            other = ", ".join(f"{name}={found.get(name)!r} instead of {about.get(name)!r}" for name in names)
            raise ValueError(
                f"checkpoint must be of this configuration, or another file, got checkpoint={path} with {other}"
            )
        return done, eqx.tree_deserialise_leaves(file, like(done))
