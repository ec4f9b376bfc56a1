"""The public names: those of the package, and those of its wings with the name of the wing."""

import inspect
from collections.abc import Iterator
from typing import Any

import tiedattn_jax as ta

WINGS = "bayes", "dynamics", "finite", "rsb", "wide"


def names() -> dict[str, Any]:
    """Return what the public names stand for, without modules, and without the counting task and classes of results."""
    found = {name: getattr(ta, name) for name in dir(ta) if name[0] != "_"}
    for wing in WINGS:
        found |= {f"{wing}.{name}": value for name, value in vars(getattr(ta, wing)).items() if name[0] != "_"}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def functions() -> Iterator[tuple[str, Any]]:
    """Yield the public functions by name."""
    yield from ((name, value) for name, value in names().items() if inspect.isfunction(value))
