"""Bad input: one form of error, which knows the argument that it is about, and what is asked of arguments."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MANY = 12  # names, more than which are not listed


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
    """Raise an `InputError` unless `value` is one of some names; of many names it tells the nearest."""
    if not isinstance(value, (str, type(None))) or value not in choices:
        names, many = [str(c) for c in choices], ""
        if len(names) > _MANY:
            many = f"{len(names)} names, of which the nearest are "
            names = difflib.get_close_matches(str(value), names, cutoff=0.0)
        raise InputError(argument, f"must be one of {many}{', '.join(names)}, got {argument}={value!r}")


def require_kind(value: Any, argument: str, kind: Any, want: str) -> None:
    """Raise an `InputError` unless `value` is an instance of a class."""
    if not isinstance(value, kind):
        shown = " ".join(repr(value).split())
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise InputError(argument, f"must be {want}, got {argument}={shown} of {type(value)}")


def require_takes(function: Callable[..., Any], argument: str, wanted: tuple[str, ...], why: str = "") -> None:
    """Raise an `InputError` unless a function that was given takes what is wanted, by position; says why it must."""
    got = "one that cannot be called so"
    try:
        signature = inspect.signature(function)
        got = f"({', '.join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())})"
        signature.bind(*wanted)
    except (TypeError, ValueError):
        raise InputError(argument, f"must take ({', '.join(wanted)}){why}, got {got}") from None


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
        several = "sweep for a branch at several alphas, or jax.vmap" if argument == "alpha" else "jax.vmap for several"
        raise InputError(argument, f"must be one number, got shape {number.shape}: use {several}")
    return number


def require_count(value: Any, argument: str, least: int = 1) -> None:
    """Raise an `InputError` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(argument, f"must be an integer of at least {least}, got {argument}={value!r}")


def require_number(value: Any, argument: str, want: str, holds: Callable[[Any], Any]) -> None:
    """Raise an `InputError` unless `value` is one real number and, if it is known, finite and such that it `holds`."""
    as_number(value, argument, float)
    if is_concrete(value):
        require(np.isfinite(value) and holds(value), argument, value, want)


def require_positive(value: Any, argument: str) -> None:
    """Raise an `InputError` unless `value` is a positive number."""
    require_number(value, argument, "positive and finite", lambda v: v > 0)


def require_not_negative(value: Any, argument: str) -> None:
    """Raise an `InputError` unless `value` is a number that is zero or positive."""
    require_number(value, argument, "zero or positive, and finite", lambda v: v >= 0)


def require_key(key: Any) -> None:
    """Raise an `InputError` unless the argument `key` is one key of random numbers, of either kind that jax has."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    raw = isinstance(key, (np.ndarray, jax.Array)) and key.dtype == np.uint32 and key.ndim == 1
    if not (typed or raw):
        got = " ".join(str(key).split())
        raise InputError("key", f"must be one key, as jax.random.key(0) is, got key={got:.80}")


def require_keys(keys: Any) -> None:
    """Raise an `InputError` unless the argument `keys` is an array of one key or more."""
    typed = isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not (typed and keys.ndim == 1 and len(keys)):
        want = "must be typed PRNG keys of shape (K,), as jax.random.split(key, K) gives"
        got = "one key" if typed and not keys.ndim else f"shape {np.shape(keys)}" if np.ndim(keys) else repr(keys)
        raise InputError("keys", f"{want}, got {got}")


def array_of(values: Any, argument: str, want: str, holds: Callable[[np.ndarray], Any], ndim: int = 1) -> np.ndarray:
    """Finite numbers as an array that is not empty.

    Raises:
        InputError: they are none, or something else that is wanted does not hold of them.
    """
    try:
        array = np.asarray(values, float)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim != ndim or not array.size or not np.all(np.isfinite(array)) or not np.all(holds(array)):
        raise InputError(argument, f"must be {want}, got {argument}={values!r}")
    return array


def shaped_array(name: str, a: Any, axes: str, sizes: dict[str, int], dtype: Any = None) -> jax.Array:
    """An argument as an array of floats.

    Args:
        name: of the argument.
        axes: names of its axes, as in "L n d".
        sizes: those that are known, by axis; the others are added.
        dtype: its type; by default its own, or jax's default for what are no floats.

    Raises:
        InputError: not an array of real numbers, of another shape, or not finite.
    """
    try:
        given = jnp.asarray(a)
        real = jnp.issubdtype(given.dtype, jnp.floating) or jnp.issubdtype(given.dtype, jnp.integer)
    except (TypeError, ValueError):
        real = False
    if not real:
        raise InputError(name, f"must be an array of real numbers, got something else, of type {type(a).__name__}")
    names = axes.split()
    known = ", ".join(f"{k} = {sizes[k]}" for k in dict.fromkeys(names) if k in sizes)
    if given.ndim != len(names) or any(sizes.setdefault(k, s) != s for k, s in zip(names, given.shape, strict=True)):
        want = f"({', '.join(names)})" + (f" with {known}" if known else "")
        raise InputError(name, f"must have shape {want}, got shape {given.shape}")
    with with_values():  # known numbers are checked inside of programs, too
        if is_concrete(given) and (bad := int(_not_finite(given))):
            raise InputError(name, f"must be finite, got {bad} entries that are not")
    if dtype is None and not jnp.issubdtype(given.dtype, jnp.floating):
        dtype = jnp.result_type(float)
    return given if dtype is None else given.astype(dtype)


def require_memory(size: float, argument: str, value: Any, what: str) -> None:
    """Raise an `InputError` unless so many bytes fit into the memory that there is; says what would take them."""
    room = _memory()
    if size > room:
        there = f"{what} would take {size / 2**30:.3g} GiB of memory, of which there are {room / 2**30:.3g}"
        raise InputError(argument, f"must be smaller, got {argument}={value}: {there}")


def _memory() -> float:
    """Bytes of memory of all devices, or of this machine where they have none of their own; infinite if unknown."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in one for one in stats):
        return float(sum(one["bytes_limit"] for one in stats))
    known = getattr(os, "sysconf_names", {})
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if "SC_PHYS_PAGES" in known else np.inf


@jax.jit
def _not_finite(a: jax.Array) -> jax.Array:
    """How many entries are not: counted where the array lies, which may be large."""
    return jnp.sum(~jnp.isfinite(a))


def is_concrete(*values: Any) -> bool:
    """Whether all arrays have values, so that they can be checked: not while jax traces."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def is_tracing() -> bool:
    """Whether jax traces a function: what is computed then has no value, even of numbers that have one."""
    return not is_concrete(jnp.zeros(()) + 1)


def with_values() -> AbstractContextManager[None]:
    """A context in which what is computed of known numbers has a value, also while jax traces a function."""
    # At top level it would only make jax compile the constants of every program operation by operation.
    return jax.ensure_compile_time_eval() if is_tracing() else nullcontext()
