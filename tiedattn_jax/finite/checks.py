"""What is asked of arguments: one number, one key, an array of a shape, a size that fits into memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, as_number, is_concrete, require
from ..model import Model


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


def require_type(value: Any, argument: str, kind: Any, want: str) -> None:
    """Raise an `InputError` unless `value` is an instance of a class; says what it is instead."""
    require(isinstance(value, kind), argument, str(type(value)), want)


def require_key(key: Any, argument: str = "key") -> None:
    """Raise an `InputError` unless `key` is one key of random numbers, of either kind that jax has."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    raw = isinstance(key, (np.ndarray, jax.Array)) and key.dtype == np.uint32 and key.ndim == 1
    if not (typed or raw):
        got = " ".join(str(key).split())
        raise InputError(argument, f"must be one key, as jax.random.key(0) is, got {argument}={got:.80}")


def require_keys(keys: Any) -> None:
    """Raise an `InputError` unless the argument `keys` is an array of one key or more."""
    typed = isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not (typed and keys.ndim == 1 and len(keys)):
        want = "must be typed PRNG keys of shape (K,), as jax.random.split(key, K) gives"
        raise InputError("keys", f"{want}, got shape {np.shape(keys)}")


def array(name: str, a: Any, axes: str, sizes: dict[str, int], dtype: Any = None) -> jax.Array:
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
        raise InputError(name, f"must be an array of real numbers, got a {type(a).__name__} of others")
    names = axes.split()
    known = ", ".join(f"{k} = {sizes[k]}" for k in dict.fromkeys(names) if k in sizes)
    if given.ndim != len(names) or any(sizes.setdefault(k, s) != s for k, s in zip(names, given.shape, strict=True)):
        want = f"({', '.join(names)})" + (f" with {known}" if known else "")
        raise InputError(name, f"must have shape {want}, got shape {given.shape}")
    with jax.ensure_compile_time_eval():  # known numbers are checked inside of programs, too
        if is_concrete(given) and (bad := int(jnp.sum(~jnp.isfinite(given)))):
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


def check_provides(model: Model, method: str, why: str) -> None:
    """Raise an `InputError` unless the model has written one of its optional methods; says why it is asked for."""
    if not model.provides(method):
        name = type(model).__name__
        raise InputError("model", f"must have a method `{method}` {why}, got {name} without it: see tiedattn_jax.Model")
