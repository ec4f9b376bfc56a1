"""Bad input: the error that names the argument at fault, and the checks of arguments that raise it."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from numbers import Real as RealNumber
from types import UnionType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, Num, PRNGKeyArray, PyTree, Real

from .machine import memory

INT32 = 2**31 - 1  # largest count that jax computes with; a larger one would become another number
_THREEFRY = "threefry2x32"
Tree = TypeVar("Tree")
Ranges: TypeAlias = Sequence[tuple[str, Any, str]]  # names of numbers, whether they are in range, the range in words
_MOST_NAMES = 12  # a message lists at most this many names; if there are more, it lists the closest matches


_LONGEST = 500  # characters of a value in a message


class InputError(ValueError):
    """An argument that cannot be used. The message names it, its value, and what to give instead.

    Attributes:
        argument: name of the argument.
        problem: the message after the name.
    """

    def __init__(self, argument: str, problem: str):
        super().__init__(f"{argument} {problem}")
        self.argument, self.problem = argument, problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.problem)  # processes send each other exceptions


def require(condition: Bool[ArrayLike, "..."], argument: str, value: Any, requirement: str) -> None:
    """Raise an `InputError`, "argument must be requirement, got argument=value", unless all of `condition` holds."""
    if not np.all(np.asarray(condition)):
        printable = repr(value) if isinstance(value, str) else str(np.asarray(value).tolist())
        if len(printable) > _LONGEST:
            printable = f"{printable[:_LONGEST]}... of shape {np.shape(value)}"
        raise InputError(argument, f"must be {requirement}, got {argument}={printable}")


class Condition(NamedTuple):
    """A condition that a number must satisfy.

    Attributes:
        holds: whether it does; an array of jax if jax traces the number.
        argument, value, requirement: as in `require`.
        problem: message after the name of the argument, if it is another one than that of `require`.
    """

    holds: Any
    argument: str
    value: Any = None
    requirement: str = ""
    problem: str = ""


def settle(conditions: Iterable[Condition]) -> list[Bool[Array, ""]]:
    """Raise an `InputError` for the first condition that is known not to hold; return the conditions that are traced.

    `within` does for the traced ones what the error does for the others.
    """
    traced = []
    for holds, argument, value, requirement, problem in conditions:
        if not is_concrete(holds):
            traced.append(jnp.all(holds))
        elif problem and not np.all(holds):
            raise InputError(argument, problem)
        else:
            require(holds, argument, value, requirement)
    return traced


def within(tree: Tree, traced: list[Bool[Array, ""]]) -> Tree:
    """Return a tree unless one of the `traced` conditions is violated; its real numbers that jax traces are then NaN.

    What is computed from NaN is NaN and has the status `nonfinite`, and its derivatives in the numbers of the tree are
    zero.
    """
    if not traced:
        return tree
    holds = jnp.all(jnp.stack(traced))

    def masked(a: Any) -> Any:
        is_traced = not is_concrete(a) and jnp.issubdtype(jnp.result_type(a), jnp.floating)
        return jnp.where(holds, a, jnp.nan) if is_traced else a

    return jax.tree.map(masked, tree)


def conditions_of(module: Any) -> Iterator[Condition]:
    """Yield the conditions of `in_range` on the numbers of a module and of its parts."""
    module = jax.tree.map(on_host, module)
    for name, holds, requirement in module.in_range():
        yield Condition(holds, name, getattr(module, name), requirement)
    for part in vars(module).values():
        if hasattr(part, "in_range"):
            yield from conditions_of(part)


def require_choice(value: Any, argument: str, choices: Collection[str | None]) -> Any:
    """Return `value`, which must be one of `choices`, as text of Python: jax takes that of numpy for an array.

    Raises:
        InputError: it is none of them; if these are many, the message lists the closest.
    """
    if not isinstance(value, (str, type(None))) or value not in choices:
        names, preamble = [str(c) for c in choices], ""
        if len(names) > _MOST_NAMES:
            preamble = f"{len(names)} names, of which the nearest are "
            names = difflib.get_close_matches(str(value), names, cutoff=0.0)
        raise InputError(argument, f"must be one of {preamble}{', '.join(names)}, got {argument}={value!r}")
    return None if value is None else str(value)


def require_kind(value: Any, argument: str, kind: type | tuple[type, ...] | UnionType, requirement: str) -> None:
    """Raise an `InputError` unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise InputError(argument, f"must be {requirement}, got {argument}={_shown(value)} of {type(value)}")


def _shown(value: Any) -> str:
    """Return the `repr` of a value on one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def require_takes(function: Callable[..., Any], argument: str, parameters: tuple[str, ...], suffix: str = "") -> None:
    """Raise an `InputError` unless `function` takes these positional `parameters`; `suffix` ends the requirement."""
    actual = "one that cannot be called so"
    try:
        signature = inspect.signature(function)
        actual = f"({', '.join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())})"
        signature.bind(*parameters)
    except (TypeError, ValueError):
        raise InputError(argument, f"must take ({', '.join(parameters)}){suffix}, got {actual}") from None


def are_real(value: PyTree) -> bool:
    """Return whether numbers, arrays, or lists of them consist of real numbers.

    Truth values, text, dates, complex numbers and masked entries are none, although numpy turns them into numbers.
    """

    def is_real(leaf: Any) -> bool:
        if np.ma.is_masked(leaf):
            return False
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if getattr(dtype, "kind", "") == "O":  # such as fractions
            entries = np.asarray(leaf).ravel().tolist()
            return all(isinstance(a, (RealNumber, Decimal)) and not isinstance(a, bool) for a in entries)
        is_time = getattr(dtype, "kind", "") == "m"  # numpy counts differences of dates as integers
        return jnp.issubdtype(dtype, jnp.floating) or (jnp.issubdtype(dtype, jnp.integer) and not is_time)

    return all(map(is_real, jax.tree.leaves(value)))


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return `convert(value)`; None if `value` does not consist of real numbers, or is no array of them."""
    try:
        return convert(value) if are_real(value) else None
    except (TypeError, ValueError, OverflowError):
        return None


def as_array(value: Any, argument: str, dtype: DTypeLike | None) -> Real[Array, "..."]:
    """Return real numbers as an array of `dtype`; they may be traced.

    Raises:
        InputError: `value` does not consist of real numbers.
    """
    array = _converted(value, lambda value: jnp.asarray(value, dtype))
    if array is None:
        raise InputError(argument, f"must be a real number or an array of them, got {argument}={_shown(value)}")
    return array


def as_number(value: Any, argument: str, dtype: DTypeLike | None) -> Real[Array, ""]:
    """Return one real number as an array of `dtype`; it may be traced.

    Raises:
        InputError: `value` is not a real number, or is several.
    """
    number = as_array(value, argument, dtype)
    if number.shape != ():
        advice = "sweep for a branch at several alphas, or jax.vmap" if argument == "alpha" else "jax.vmap for several"
        raise InputError(argument, f"must be one number, got shape {number.shape}: use {advice}")
    return number


def require_count(value: Any, argument: str, minimum: int = 1, maximum: int | None = None) -> None:
    """Raise an `InputError` unless `value` is an integer of at least `minimum`, and of at most `maximum` if given."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise InputError(argument, f"must be an integer of at least {minimum}, got {argument}={value!r}")
    if maximum is not None and value > maximum:
        raise InputError(argument, f"must be an integer of at most {maximum}, got {argument}={value!r}")


def as_flag(value: Any, argument: str) -> bool:
    """Return `value`, which must be True or False: any text, "no" as well, would count as True.

    Raises:
        InputError: it is something else.
    """
    require_kind(value, argument, (bool, np.bool_), "True or False")
    return bool(value)


def float_dtype(dtype: Any) -> np.dtype:
    """Return a caller's `dtype`, by default that of jax for Python floats.

    Raises:
        InputError: it is not float32 or float64, or jax has no float64 now.
    """
    try:
        known = jnp.dtype(jnp.result_type(float) if dtype is None else dtype)
    except TypeError:
        known = None
    if known not in (jnp.float32, jnp.float64):
        raise InputError("dtype", f"must be float32 or float64, got dtype={known or dtype!r}")
    require_precision(known, "dtype")
    return known


def require_precision(dtype: Any, argument: str) -> None:
    """Raise an `InputError` if `dtype` is float64 and jax is set to 32 bits, in which it would become float32."""
    if dtype == np.float64 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        text = 'must be float32 while jax has no double precision, or call jax.config.update("jax_enable_x64", True)'
        raise InputError(argument, f"{text} first, got float64")


def require_promotion() -> None:
    """Raise an `InputError` if jax is told not to promote dtypes or ranks, which this library leaves to jax."""
    for name, usual in (("jax_numpy_dtype_promotion", "standard"), ("jax_numpy_rank_promotion", "allow")):
        value = str(getattr(jax.config, name))
        if value not in (usual, "warn"):
            context = f"with {name.replace('jax_', 'jax.', 1)}({usual!r})"
            raise InputError(name, f"must be {usual!r} for this library, got {value!r}: call it {context}")


def require_number(
    value: Any, argument: str, requirement: str, holds: Callable[[Any], Any], dtype: DTypeLike = float
) -> Real[Array, ""]:
    """Return one real number as an array of `dtype`, which must be finite and satisfy `holds`.

    A traced number that does not becomes NaN, and so does what is computed from it.

    Raises:
        InputError: `value` is not a real number, or is several, or does not meet the requirement.
    """
    number = as_number(value, argument, dtype)
    if is_concrete(value):
        require(np.isfinite(value) and holds(value), argument, value, requirement)
        return number
    return jnp.where(jnp.isfinite(number) & holds(number), number, jnp.nan)


def require_positive(value: Any, argument: str, dtype: DTypeLike = float) -> Real[Array, ""]:
    """Return a positive number as an array of `dtype`; raises as `require_number`."""
    return require_number(value, argument, "positive and finite", lambda v: v > 0, dtype)


def require_not_negative(value: Any, argument: str, dtype: DTypeLike = float) -> Real[Array, ""]:
    """Return a number that is zero or positive as an array of `dtype`; raises as `require_number`."""
    return require_number(value, argument, "zero or positive, and finite", lambda v: v >= 0, dtype)


def require_key(key: Any) -> PRNGKeyArray:
    """Return one random key, a typed one or a raw uint32 vector, to draw with; see `_threefry`.

    Raises:
        InputError: it is something else.
    """
    is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))  # of the random numbers that jax is set to
    is_raw = isinstance(key, (np.ndarray, jax.Array)) and (key.shape, key.dtype) == (raw.shape, raw.dtype)
    if not (is_typed or is_raw):
        text = " ".join(str(key).split())
        raise InputError("key", f"must be one key, as jax.random.key(0) is, got key={text:.80}")
    return _threefry(key if is_typed else jax.random.wrap_key_data(key))


def require_keys(keys: Any) -> Key[Array, " K"]:
    """Return a vector of one or more typed random keys, to draw with; see `_threefry`.

    Raises:
        InputError: it is something else.
    """
    is_typed = isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not (is_typed and keys.ndim == 1 and len(keys)):
        requirement = "must be typed PRNG keys of shape (K,), as jax.random.split(key, K) gives"
        actual = "one key" if is_typed and not keys.ndim else f"shape {np.shape(keys)}" if np.ndim(keys) else repr(keys)
        raise InputError("keys", f"{requirement}, got {actual}")
    return jax.vmap(_threefry)(keys)


def _threefry(key: PRNGKeyArray) -> PRNGKeyArray:
    """Return a key of threefry, made of the words of a key of another generator.

    Under `vmap` only threefry draws for each key what it draws for that key alone. The keys "rbg" and "unsafe_rbg" of
    jax draw for all keys at once.
    """
    if jax.random.key_impl(key) == _THREEFRY:
        return key
    first, *others = jax.random.key_data(key)
    return functools.reduce(jax.random.fold_in, others, jax.random.key(first, impl=_THREEFRY))


def array_of(
    values: Any, argument: str, requirement: str, holds: Callable[[np.ndarray], Any], ndim: int = 1
) -> Float[np.ndarray, "..."]:
    """Return finite numbers as an array with `ndim` axes that is not empty.

    Raises:
        InputError: `values` is not such an array, or does not satisfy `holds`.
    """
    array = _converted(values, lambda values: np.asarray(values, float))
    is_valid = array is not None and array.ndim == ndim and array.size and np.all(np.isfinite(array))
    if not is_valid or not np.all(holds(array)):
        raise InputError(argument, f"must be {requirement}, got {argument}={_shown(values)}")
    return array


def shaped_array(
    name: str, a: Any, axes: str, sizes: dict[str, int], dtype: DTypeLike | None = None, on_host: bool = False
) -> Float[Any, "..."]:
    """Return an argument as an array of floats.

    Args:
        name: name of the argument.
        axes: names of its axes, as in "L n d".
        sizes: known sizes by axis; the sizes of the other axes are added to it.
        dtype: dtype of the result; by default that of the argument, or jax's default float for integers.
        on_host: whether the result is an array of numpy; it has doubles and must not be empty.

    Raises:
        InputError: the argument is not an array of real numbers, has another shape, or is not finite.
    """
    array = _converted(a, lambda a: np.asarray(a, float) if on_host else jnp.asarray(a))
    if array is None:
        raise InputError(name, f"must be an array of real numbers, got something else, of type {type(a).__name__}")
    names = axes.split()
    known_sizes = ", ".join(f"{k} = {sizes[k]}" for k in dict.fromkeys(names) if k in sizes)
    if array.ndim != len(names) or any(sizes.setdefault(k, s) != s for k, s in zip(names, array.shape, strict=True)):
        expected = f"({', '.join(names)})" + (f" with {known_sizes}" if known_sizes else "")
        raise InputError(name, f"must have shape {expected}, got shape {array.shape}")
    if on_host and not array.size:
        raise InputError(name, f"must not be empty, got shape {array.shape}")
    with with_values():  # concrete arrays are checked while jax traces, too
        count = np.sum(~np.isfinite(array)) if on_host else _not_finite(array) if is_concrete(array) else 0
        if bad_count := int(count):
            raise InputError(name, f"must be finite, got {bad_count} entries that are not")
    if dtype is None and not jnp.issubdtype(array.dtype, jnp.floating):
        dtype = jnp.result_type(float)
    return array if dtype is None else array.astype(dtype)


def require_memory(size: float, argument: str, value: Any, objects: str) -> None:
    """Raise an `InputError` unless `size` bytes fit into the memory; `objects` names what takes them."""
    available = memory()
    if size > available:
        problem = f"{objects} would take {size / 2**30:.3g} GiB of memory, of which there are {available / 2**30:.3g}"
        raise InputError(argument, f"must be smaller, got {argument}={value}: {problem}")


@jax.jit
def _not_finite(a: Num[Array, "..."]) -> Int[Array, ""]:
    """Count the entries that are not finite, on the device of the array, which may be large."""
    return jnp.sum(~jnp.isfinite(a))


def is_concrete(*values: PyTree) -> bool:
    """Return whether all arrays have values that can be checked, that is, none is traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def on_host(a: Any) -> Any:
    """Return an array as one of numpy, which compiles nothing for a comparison, unless jax traces it."""
    return np.asarray(a) if is_concrete(a) else a


def require_unchecked_axes(tree: PyTree) -> None:
    """Raise an `InputError` inside a `jax.shard_map` that checks which values differ between devices.

    jax then refuses loops whose first values are the same on all devices and whose last ones are not, as in a search.
    """
    kinds = [jax.typeof(leaf) for leaf in jax.tree.leaves(tree) if not is_concrete(leaf)]
    if any(getattr(k, "vma", ()) or getattr(getattr(k, "manual_axis_type", None), "varying", ()) for k in kinds):
        text = "must be False in a jax.shard_map around functions of this library, which search in loops"
        raise InputError("check_vma", f"{text}, got check_vma=True, which is jax's default")


def is_tracing() -> bool:
    """Return whether jax is tracing a function: even operations on concrete arrays then return no values."""
    return not is_concrete(jnp.zeros(()) + 1)


def with_values() -> AbstractContextManager[None]:
    """Return a context in which operations on concrete arrays return values, also while jax traces a function."""
    # Outside a trace, the context would only make jax compile the constants of every program one by one.
    return jax.ensure_compile_time_eval() if is_tracing() else nullcontext()
