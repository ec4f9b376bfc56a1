"""Compiled programs, kept in a folder from one process to the next.

jax keeps what the compiler makes of a program's text. To find it there, it has to write the text: to trace a function
of Python, which takes two to five seconds for a program that averages, again in every process. So the text is kept here
too (`jax.export`), under the hash of all that it depends on: the source of this library, the function, the structure
and the shapes of its arguments, versions and the settings of jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from .errors import InputError
from .store import packed, unpacked, write_whole

_LOCK = threading.Lock()
_LOOK_INSIDE = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")  # settings that take a function apart
_SETTINGS = (
    *_LOOK_INSIDE,
    *"jax_enable_x64 jax_default_device jax_default_matmul_precision jax_log_compiles jax_transfer_guard".split(),
    *"jax_numpy_dtype_promotion jax_numpy_rank_promotion".split(),
)


class Traced:
    """Where traced programs are kept, once that is asked for, and the hash of the files that they come from."""

    folder: Path | None = None
    source = ""


def use_compilation_cache(folder: Path | str | None = None) -> None:
    """Keep compiled programs in a folder, for this process to leave and for later ones to find.

    Compiling and not computing is what the first solve of a process takes its time for. The command line does this by
    itself. jax does it for the rest of the process, and for other programs than this library's. Programs that average,
    for models and rules of this library, are kept as they are before compiling, too, so that later processes need not
    trace them; that notices when a file of this library changes, but not what is put in its place at run time.

    Args:
        folder: by default the value of the environment variable TIEDATTN_CACHE, where "0" means to keep nothing, or
            ``~/.cache/tiedattn_jax``.
    """
    where = folder or os.environ.get("TIEDATTN_CACHE") or Path.home() / ".cache" / "tiedattn_jax"
    if str(where) != "0":
        jax.config.update("jax_compilation_cache_dir", str(where))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        Traced.folder, Traced.source = Path(where) / "traced", source()


def settings() -> dict[str, str]:
    """Settings of jax in this thread, those of context managers with them, which other threads do not see."""
    return {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}


def kept(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`eqx.filter_jit` of a function of a module, for calls at top level, which is traced in one process for all.

    Where nothing is kept, for types that are not this library's and on several devices it is no more than that.

    Args:
        options: of `jax.jit`.
    """
    plain, found = eqx.filter_jit(fn, **options), {}

    def call(*args: Any) -> Any:
        arrays, static = eqx.partition(args, lambda a: isinstance(a, (jax.Array, np.ndarray, np.generic)))
        (leaves, tree), (fixed, around) = map(jax.tree.flatten, (arrays, static))
        devices, here = {d for a in leaves if isinstance(a, jax.Array) for d in a.devices()}, settings()
        usual = [d.platform for d in devices] == [jax.default_backend()]
        if Traced.folder is None or not usual or any(here[name] == "True" for name in _LOOK_INSIDE):
            return plain(*args)
        about = (jax.default_backend(), *here.values(), *((a.shape, str(a.dtype)) for a in leaves))
        key = Traced.folder, tree, around, *fixed, *about
        with _LOCK:
            if key not in found:
                found[key] = traced_in(Traced.folder, about, fn, arrays, static, options)
        run = found[key]
        return plain(*args) if run is None else run(leaves)

    return call


def traced_in(
    folder: Path, about: tuple, fn: Callable[..., Any], arrays: Any, static: Any, options: dict[str, Any]
) -> Callable[[list[Any]], Any] | None:
    """The program from a folder, or traced and left there; None for what is not kept."""
    leaves, tree = jax.tree.flatten(arrays)
    try:
        fixed, around = jax.tree.flatten(static)
        versions = jax.__version__, eqx.__version__
        of = [Traced.source, *versions, _name(fn), described(tree), described(around), *map(_static, fixed)]
    except TypeError:
        return None
    path = folder / f"{hashlib.sha256(json.dumps([of, about]).encode()).hexdigest()}.npz"
    try:
        result, text = unpacked(path, InputError("folder", "must hold programs"))
        traced, out = export.deserialize(bytearray(text["program"])), jax.tree.structure(example(result["structure"]))
    except InputError:
        outs = []

        def flat(*leaves: Any) -> list[Any]:
            values, out = jax.tree.flatten(fn(*eqx.combine(jax.tree.unflatten(tree, leaves), static)))
            outs.append(out)
            return values

        traced, (out, *_) = export.export(jax.jit(flat))(*leaves), outs
        with contextlib.suppress(OSError, TypeError):
            kind = json.dumps({"structure": described(out)})
            write_whole(path, packed({"about": kind, "program": np.frombuffer(traced.serialize(), np.uint8)}))

    def run(*leaves: Any) -> Any:
        return traced.call(*leaves)

    run.__name__ = fn.__name__  # that of the compiled program
    compiled = jax.jit(run, **options)
    # jax commits what it gives to a device. Once more through numpy it is free again, as other results are.
    return lambda leaves: jax.tree.unflatten(out, [jnp.asarray(np.asarray(a)) for a in compiled(*leaves)])


def source() -> str:
    """Hash of this library's files."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _name(thing: Any) -> str:
    """Where a function or class of this library, or a type of Python's, is found.

    Raises:
        TypeError: it is of another kind.
    """
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", "<")
    if module.partition(".")[0] not in ("builtins", __package__) or "<" in name:
        raise TypeError
    return f"{module}:{name}"


def _static(value: Any) -> Any:
    return value if type(value) in (type(None), bool, int, float, str) else _name(value)


def described(tree: Any) -> Any:
    """The structure of a tree as JSON: 0 for a leaf; the type of a node, what is static in it, and its children."""
    node = tree.node_data()
    if node is None:
        return 0
    kind, about = node
    if issubclass(kind, eqx.Module):
        wraps, *about = about
        if wraps:
            raise TypeError
        about = [_static(value) for value in about]
    return [_name(kind), about, [described(child) for child in tree.children()]]


def example(structure: Any) -> Any:
    """A tree of a structure."""
    if structure == 0:
        return 0
    (module, _, name), about, values = structure[0].partition(":"), structure[1], map(example, structure[2])
    if name == "NoneType":
        return None
    kind: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if issubclass(kind, dict):
        return dict(zip(about, values, strict=True))
    if issubclass(kind, eqx.Module):
        node, static = object.__new__(kind), iter(about)
        for field in dataclasses.fields(kind):
            object.__setattr__(node, field.name, next(static if field.metadata.get("static") else values))
        return node
    return kind(*values) if hasattr(kind, "_fields") else kind(values)
