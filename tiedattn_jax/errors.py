"""Bad input: one form of error, which knows the argument that it is about."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class InputError(ValueError):
    """An argument that cannot be used; the message names it, its value, and what to give instead.

    Attributes:
        argument: its name.
        problem: the message after the name.
    """

    def __init__(self, argument: str, problem: str):
        super().__init__(f"{argument} {problem}")
        self.argument, self.problem = argument, problem


def require(ok: Any, argument: str, value: Any, want: str) -> None:
    """Raise an `InputError`, "argument must be want, got argument=value", unless all of `ok` holds."""
    if not np.all(np.asarray(ok)):
        shown = repr(value) if isinstance(value, str) else np.asarray(value).tolist()
        raise InputError(argument, f"must be {want}, got {argument}={shown}")


def require_choice(value: Any, argument: str, choices: Any) -> None:
    """Raise an `InputError` unless `value` is one of some names."""
    if not isinstance(value, (str, type(None))) or value not in choices:
        names = ", ".join(str(c) for c in choices)
        raise InputError(argument, f"must be one of {names}, got {argument}={value!r}")


def require_kind(value: Any, argument: str, kind: Any, want: str) -> None:
    """Raise an `InputError` unless `value` is an instance of a class."""
    if not isinstance(value, kind):
        raise InputError(argument, f"must be {want}, got {argument}={value!r:.80} of type {type(value).__name__}")


def as_array(value: Any, argument: str, dtype: Any) -> jax.Array:
    """Real numbers as an array of a dtype, traced or not.

    Raises:
        InputError: they are none.
    """
    try:
        if np.iscomplexobj(value) or isinstance(value, (str, bytes)):
            raise TypeError
        return jnp.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError):
        raise InputError(argument, f"must be a real number or an array of them, got {argument}={value!r}") from None


def as_number(value: Any, argument: str, dtype: Any) -> jax.Array:
    """One real number as an array of a dtype, traced or not.

    Raises:
        InputError: it is none, or several.
    """
    number = as_array(value, argument, dtype)
    if number.shape != ():
        raise InputError(argument, f"must be one number, got shape {number.shape}: use jax.vmap for several")
    return number


def require_count(value: Any, argument: str, least: int = 1) -> None:
    """Raise an `InputError` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(argument, f"must be an integer of at least {least}, got {argument}={value!r}")


def is_concrete(*values: Any) -> bool:
    """Whether all arrays have values, so that they can be checked: not while jax traces."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
