"""Compiled programs that are kept in a folder from one process to the next.

jax caches compiled programs under a hash of their text (StableHLO). To look one up it has to produce the text by
tracing a Python function, which takes two to five seconds for a program that averages, in every process. This module
therefore stores the text too (`jax.export`). It is stored under a hash of everything it depends on: the source of this
library, the function, the structure and the shapes of its arguments, versions, and the settings of jax.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxtyping import PyTree

from .arrays import ARRAYS
from .errors import InputError, is_concrete, is_tracing
from .files import make_private, packed, unpacked, write_whole
from .kernels import kernels_in_use
from .saved import as_json, from_json, is_own, name_of, own_class

_LOCK = threading.Lock()
_LOOK_INSIDE = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")  # jax then runs a function step by step
_SETTINGS = (
    *_LOOK_INSIDE,
    *"jax_enable_x64 jax_default_device jax_default_matmul_precision jax_log_compiles jax_transfer_guard".split(),
    *"jax_numpy_dtype_promotion jax_numpy_rank_promotion".split(),
)
# jax does not store kernels of Triton, because their form may differ in its next version; the key holds the version.
_STORABLE = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]


def source(package: Any) -> str | None:
    """Hash the Python files of a package, which may lie in a zip file; None if there are none to be read.

    Args:
        package: its folder, as `importlib.resources.files` gives it.
    """

    def texts(folder: Any) -> Iterator[bytes]:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                yield from texts(entry)
            elif entry.name.endswith(".py"):
                yield entry.read_bytes()

    digest, count = hashlib.sha256(), 0
    for text in texts(package):
        digest.update(text)
        count += 1
    return digest.hexdigest() if count else None


class Traced:
    """Folder of the traced programs, None if they are not kept, and the hash of this library's source.

    The source is hashed when this module is imported. A file that changes later is not the code that runs. Without
    sources, as where there is only bytecode, no traced program is kept: it could be that of another version.
    """

    folder: Path | None = None
    source = source(resources.files(__name__.partition(".")[0]))


def use_compilation_cache(folder: Path | str | None = None) -> None:
    """Keep compiled programs in a folder, so that later processes need not compile them again.

    The first solve of a process spends its time compiling, not computing. The command line calls this function. The
    setting is one of jax: it holds for the rest of the process, and for programs outside this library as well. For this
    library's models and rules, programs that average are also stored as traced text, so that later processes skip
    tracing. A changed source file invalidates the stored text; code that is replaced at run time does not.

    Programs in the folder are executed, so only this user may be able to write to it. A stored text that is damaged is
    replaced. For a compiled program that is damaged jax warns, and compiles it in every process: delete the folder.

    Args:
        folder: folder of the programs; by default the value of the environment variable TIEDATTN_CACHE, where "0" means
            to keep nothing, or ``~/.cache/tiedattn_jax`` if it is not set. Without a home directory nothing is kept,
            with a warning.

    Raises:
        InputError: a folder that was named cannot be made, or others can write to the folder.
    """
    named = folder or os.environ.get("TIEDATTN_CACHE")
    argument = "TIEDATTN_CACHE" if named and not folder else "folder"
    try:
        location = named or Path.home() / ".cache" / "tiedattn_jax"
    except RuntimeError:  # neither HOME nor an entry of the user
        location = "0"
        warnings.warn("programs are not kept without a home directory: set TIEDATTN_CACHE to a folder", stacklevel=2)
    if str(location) != "0":
        traced = Path(location) / "traced"
        for private in (Path(location), traced):
            make_private(private, argument)
            if named and not private.is_dir():
                raise InputError(argument, f"must be a folder that can be made, got {argument}='{location}'")
        if jax.config.values["jax_compilation_cache_dir"] != str(location):
            jax.config.update("jax_compilation_cache_dir", str(location))
            reset_cache()  # jax keeps the folder that it opened first
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        Traced.folder = None if Traced.source is None else traced
        if Traced.source is None:
            text = "traced programs are not kept, because the Python files of tiedattn_jax cannot be read"
            warnings.warn(f"{text}; compiled ones are kept", stacklevel=2)


def settings() -> dict[str, str]:
    """Return the settings of jax in this thread; those of context managers are not visible in other threads."""
    return {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}


def default_device() -> jax.Device:
    """Return the device on which jax computes in this thread, unless an argument says otherwise."""
    configured = jax.config.values["jax_default_device"]
    return configured if isinstance(configured, jax.Device) else jax.local_devices(backend=configured)[0]


def stored_program(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a module-level function as by `eqx.filter_jit`, with the traced program shared by the cache folder.

    One process traces the program for all. The function is plain `eqx.filter_jit` while jax traces, if no folder is
    set, for types of other libraries, on several devices, on a device whose platform is not jax's default, and if jax
    does not store the program: on a GPU it does not store eigenvalues of matrices that are not symmetric.

    Args:
        options: options of `jax.jit`.
    """
    jitted, programs = eqx.filter_jit(fn, **options), {}

    def call(*args: PyTree) -> PyTree:
        if Traced.folder is None or is_tracing() or not is_concrete(args):
            return jitted(*args)
        arrays, static = eqx.partition(args, lambda a: isinstance(a, ARRAYS))
        (leaves, tree), (constants, static_tree) = map(jax.tree.flatten, (arrays, static))
        devices, jax_settings = {d for a in leaves if isinstance(a, jax.Array) for d in a.devices()}, settings()
        on_default_device = [d.platform for d in devices] == [default_device().platform] == [jax.default_backend()]
        if not on_default_device or any(jax_settings[name] == "True" for name in _LOOK_INSIDE):
            return jitted(*args)
        shapes = ((a.shape, str(a.dtype)) for a in leaves)
        context = (jax.default_backend(), kernels_in_use(), *jax_settings.values(), *shapes)
        key = Traced.folder, tree, static_tree, *constants, *context
        with _LOCK:
            if key not in programs:
                with contextlib.suppress(TypeError):  # a class of the user's would live as long as the key
                    programs[key] = traced_in(Traced.folder, context, fn, arrays, static, options)
            run = programs.get(key)
        return jitted(*args) if run is None else run(leaves)

    return call


def traced_in(
    folder: Path, context: tuple, fn: Callable[..., Any], arrays: PyTree, static: PyTree, options: dict[str, Any]
) -> Callable[[list[Any]], PyTree] | None:
    """Read a program from a folder, or trace it and write it there; None if it cannot be kept.

    The returned function maps the leaves of `arrays` to the result of `fn`.

    Raises:
        TypeError: a class or a function is not one of this library.
    """
    leaves, tree = jax.tree.flatten(arrays)
    versions = jax.__version__, eqx.__version__
    key = [Traced.source, *versions, _own_name(fn), described(arrays), described(static)]
    name = hashlib.sha256(json.dumps([key, context]).encode()).hexdigest()
    path = folder / f"{name}.npz"
    try:
        about, contents = unpacked(path, InputError("folder", "must hold programs"))
        if about["name"] != name:  # the file of another program under this name
            raise ValueError
        traced = export.deserialize(bytearray(contents["program"]))
        out_tree = jax.tree.structure(example(about["result"]))
    except Exception:  # whatever is wrong with the file, tracing makes a new one
        results = []  # with tracers as leaves

        def flat(*leaves: Any) -> list[Any]:
            results.append(fn(*eqx.combine(jax.tree.unflatten(tree, leaves), static)))
            return jax.tree.leaves(results[-1])

        try:
            traced = export.export(jax.jit(flat), disabled_checks=_STORABLE)(*leaves)
        except ValueError:  # of jax, which cannot store it, or of the function, which raises it again when called
            return None
        out_tree = jax.tree.structure(results[0])
        with contextlib.suppress(OSError, TypeError):
            about = {"name": name, "result": described(results[0])}
            write_whole(path, packed(about, {"program": np.frombuffer(traced.serialize(), np.uint8)}))

    def run(*leaves: Any) -> Any:
        return traced.call(*leaves)

    run.__name__ = fn.__name__  # the name of the compiled program
    compiled = jax.jit(run, **options)
    # Results of an exported program are committed to a device. A copy through numpy is uncommitted, like other results.
    return lambda leaves: jax.tree.unflatten(out_tree, [jnp.asarray(np.asarray(a)) for a in compiled(*leaves)])


def _own_name(thing: Any) -> str:
    """Return the name of a function or class of this library.

    Raises:
        TypeError: if it is defined elsewhere, or inside a function.
    """
    if not is_own(name := name_of(thing)):
        raise TypeError(f"{name} may be another thing in another process")
    return name


def described(tree: PyTree) -> Any:
    """Return a tree as JSON, with 0 for every array.

    Raises:
        TypeError: if a class, or a function among the leaves, is not one of this library; or if a leaf is of another
            kind.
    """

    # An array in a static field is no leaf: it stays, and is refused.
    structure = jax.tree.map(lambda a: 0 if isinstance(a, ARRAYS) else a, tree)
    return as_json(structure, lambda value, place: {"name": _own_name(value)}, _own_name, "")


def example(tree: Any) -> PyTree:
    """Return the tree that `described` wrote, with 0 for every array.

    Raises:
        ValueError: a node is no container of Python and no module or named tuple of this library.
    """

    def class_of(name: str) -> type:
        if (cls := own_class(name)) is None:
            raise ValueError(f"{name} is no node of a tree")
        return cls

    def leaf(value: Any) -> Any:
        raise ValueError(f"{value} is no node of a tree")

    return from_json(tree, leaf, class_of)
