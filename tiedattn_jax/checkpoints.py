"""Checkpoints: a line of JSON that says what they are of, and the array leaves of a pytree, in one file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx

from .store import write_whole


def save(path: Path, about: dict[str, Any], done: int, content: Any) -> None:
    """Write a checkpoint whole.

    Args:
        about: the configuration, of values that JSON keeps as they are.
        done: how far the work has come.
        content: pytree of arrays.
    """
    file = io.BytesIO()
    file.write(json.dumps({**about, "done": done}).encode() + b"\n")
    eqx.tree_serialise_leaves(file, content)
    write_whole(path, file.getvalue())


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
