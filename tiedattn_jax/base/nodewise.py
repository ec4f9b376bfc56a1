"""Evaluate a function of a few numbers at very many nodes, the node axis last.

A user writes ``loss(Z, Y)`` for one node, with ``Z`` of shape (L, r). ``jax.vmap`` turns its 2 x 2 products and
softmaxes into batched kernels on tiny trailing axes, which compile to slow code: at 65,536 nodes the gradient and the
Hessian of the dot-product loss take 17-21 ms on two CPU cores. Here every *entry* of every small array becomes one
array over the nodes, so that what is left is a chain of elementwise operations that XLA fuses into a single vectorised
loop: .7 ms for the same numbers.

Programs of entries grow as the cube of the number of fields, and take minutes to compile beyond a few fields. Functions
of more fields are therefore computed with whole arrays (..., N). Only sums over small axes, which XLA would not
vectorise, are written term by term.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PyTree, Shaped


def _broadcast(x: np.ndarray, shape: tuple, broadcast_dimensions: tuple, **_: Any) -> np.ndarray:
    padded = [x.shape[broadcast_dimensions.index(k)] if k in broadcast_dimensions else 1 for k in range(len(shape))]
    return np.broadcast_to(x.reshape(padded), shape)


def _slice(x: np.ndarray, start_indices: tuple, limit_indices: tuple, strides: tuple | None) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


def _unstack(x: np.ndarray, axis: int) -> list[np.ndarray]:
    return [np.moveaxis(x, axis, 0)[k, ...] for k in range(x.shape[axis])]


def _pad(x: np.ndarray, value: np.ndarray, padding_config: Sequence[tuple]) -> np.ndarray:
    for axis, (low, high, inner) in enumerate(padding_config):
        place = low + (1 + inner) * np.arange(x.shape[axis])
        side = max(0, low + high + x.shape[axis] + inner * max(0, x.shape[axis] - 1))
        rows = dict(zip(place.tolist(), _unstack(x, axis), strict=True))
        empty = _fill(x.shape[:axis] + x.shape[axis + 1 :], lambda _: value.item())
        x = np.stack([rows.get(k, empty) for k in range(side)], axis)
    return x


# Operations that only rearrange entries.
_ENTRY_MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "copy": lambda x: x,
    "pad": _pad,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "slice": _slice,
    "split": lambda x, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "tile": lambda x, reps: np.tile(x, reps),
    "transpose": lambda x, permutation: x.transpose(permutation),
    "unstack": _unstack,
}
_ELEMENTWISE = set(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type cos cosh
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma digamma log log1p
    logistic lt max min mul ne neg nextafter not or pow rem round rsqrt select_n sign sin sinh sqrt
    square stop_gradient sub tan tanh xor""".split()
)
_NOT_IN_KERNELS = {"digamma", "erf", "erfc", "lgamma", "round"}  # operations that Triton lacks
_FOLDS = {
    "reduce_sum": ("add", lax.add),
    "reduce_max": ("max", lax.max),
    "reduce_min": ("min", lax.min),
    "reduce_prod": ("mul", lax.mul),
    "reduce_and": ("and", lax.bitwise_and),
    "reduce_or": ("or", lax.bitwise_or),
}
# Primitives that wrap a program, with the parameter that contains it.
_CALLS = {
    "checkpoint": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr", "jit": "jaxpr", "pjit": "jaxpr",
    "remat2": "jaxpr",
}  # fmt: skip
_MOST_SPLIT = 64  # largest array, shared by all nodes, that is split into entries before a node needs them
_MOST_ENTRIES = 4  # functions of at most this many numbers per node run entry by entry: 2 student, 2 teacher fields
# Constant folding by operand position: a neutral element (x + 0, x * 1) returns the other operand, an absorbing one
# (0 * x) returns itself.
_NEUTRAL = ({"add": 0, "add_any": 0, "mul": 1}, {"add": 0, "add_any": 0, "sub": 0, "mul": 1, "div": 1})
_ABSORBING = ({"mul": 0, "div": 0}, {"mul": 0})
_COMMUTING = {"add", "add_any", "and", "max", "min", "mul", "or", "xor"}


# Summed and shared axes of the two factors of a product, as `lax.dot_general` takes them.
Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
Equation: TypeAlias = Any  # a `jex.JaxprEqn`; its own types leave out that its variables have shapes


class _Array(NamedTuple):
    """A value (...) that all nodes share, or (..., N) with one at each node."""

    value: Shaped[Any, "..."]
    varies: bool


class _Entries(NamedTuple):
    """Values as object arrays of their entries, with a cache so that no entry is computed twice.

    A large array that all nodes share, such as a law of many atoms, is split only where entries are needed.
    """

    size: int
    cache: dict[Any, tuple[Any, tuple]]  # results and their operands, which must live as long as their ids are keys

    def lift(self, constant: Shaped[ArrayLike, "..."]) -> np.ndarray | _Array:
        return _split(constant, 0) if np.size(constant) <= _MOST_SPLIT else _Array(constant, False)

    def entries(self, x: np.ndarray | _Array) -> np.ndarray:
        return _split(x.value, 0) if isinstance(x, _Array) else x

    def cached(self, key: tuple, ops: tuple, make: Callable[[], Any]) -> Any:
        """Return the result of the operation `key` on entries; it is made only once."""
        operand_keys = [(o.dtype, o.tobytes()) if isinstance(o, np.generic) else id(o) for o in ops]
        cache_key = (key, *(sorted(operand_keys, key=str) if key[0] in _COMMUTING else operand_keys))
        if cache_key not in self.cache:
            self.cache[cache_key] = make(), ops
        return self.cache[cache_key][0]

    def spread(self, o: Any, size: tuple[int, ...]) -> Any:
        """Return an entry in the shape of the nodes, or as it is if it has this shape."""
        return o if np.shape(o) == size else self.cached(("spread",), (o,), lambda: lax.broadcast(jnp.asarray(o), size))

    def apply(self, eqn: Equation, xs: list[Any]) -> list[Any]:
        if any(isinstance(x, _Array) for x in xs) and not any(map(_varies, xs)):
            return [self.lift(o.value) for o in self.apply_whole(eqn, xs)]
        return _apply(eqn, [self.entries(x) for x in xs], self)

    def apply_whole(self, eqn: Equation, xs: list[Any]) -> list[_Array]:
        """Apply an operation to whole arrays; one without operands is known."""

        def whole(x: np.ndarray | _Array, dtype: DTypeLike) -> _Array:
            varies = _varies(x)
            return x if isinstance(x, _Array) else _Array(_join(x, (self.size,) if varies else (), dtype), varies)

        arrays = [whole(x, v.aval.dtype) for x, v in zip(xs, eqn.invars, strict=True)]
        with nullcontext() if xs else jax.ensure_compile_time_eval():
            return _Arrays(self.size).apply(eqn, arrays)


def _varies(x: np.ndarray | _Array) -> bool:
    """Return whether a value differs from node to node."""
    return x.varies if isinstance(x, _Array) else any(np.ndim(entry) for entry in x.flat)


class _Arrays(NamedTuple):
    """Values as whole arrays."""

    size: int

    def lift(self, constant: Shaped[ArrayLike, "..."]) -> _Array:
        return _Array(jnp.asarray(constant), False)

    def at_nodes(self, x: _Array, shape: tuple[int, ...]) -> Shaped[Array, "... N"]:
        """Return a value at all nodes, (*shape, N); a single number is broadcast to the shape."""
        value = x.value if x.varies else x.value[..., None]
        return lax.broadcast_in_dim(value, (*shape, self.size), tuple(range(1 + len(shape)))[-value.ndim :])

    def apply(self, eqn: Equation, xs: list[_Array]) -> list[_Array]:
        name, params, varies = eqn.primitive.name, eqn.params, [x.varies for x in xs]
        values, out = [x.value for x in xs], eqn.outvars[0].aval
        run = functools.partial(eqn.primitive.bind, **params)
        if not any(varies):
            outs = run(*values)
        elif name in _ELEMENTWISE:
            outs = run(*(self.at_nodes(x, out.shape) for x in xs))
        elif name in _ARRAY_MOVES:
            outs = _ARRAY_MOVES[name](values[0], (*out.shape, self.size), params)
        elif name in _FOLDS and all(values[0].shape[a] for a in params["axes"]):
            outs = values[0]
            for axis in sorted(map(int, params["axes"]), reverse=True):
                outs = functools.reduce(_FOLDS[name][1], _slices(outs, axis))
        elif name == "dot_general" and values[0].size and values[1].size:
            a, b = (self.at_nodes(x, v.aval.shape).astype(out.dtype) for x, v in zip(xs, eqn.invars, strict=True))
            a, b = _aligned(a, b, params["dimension_numbers"])
            outs = functools.reduce(lax.add, (p * q for p, q in zip(_slices(a, 0), _slices(b, 0), strict=True)))
        else:
            outs = jax.vmap(run, [-1 if s else None for s in varies], -1)(*values)
        return [_Array(o, any(varies)) for o in (outs if eqn.primitive.multiple_results else [outs])]


def nodewise(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Vectorise `fn(shared, *arrays)` over a trailing node axis of the arrays.

    Args:
        fn: a function of a pytree and of arrays of a few entries each that returns a pytree of such arrays. It is
            traced once for each function object and set of shapes: pass a function of a module, not a new closure.

    Returns:
        A function of the pytree, which all nodes share, and of arrays (..., N), that returns the same pytree as `fn`
        with leaves (..., N). It equals ``jax.vmap`` of `fn` over the last axes to rounding; derivatives flow to all
        arguments.
    """
    return functools.partial(_run_at_nodes, fn)


def interpreted(
    program: jex.ClosedJaxpr, constants: list[np.ndarray | Shaped[Array, "..."]], arguments: list[Any], size: int
) -> list[Shaped[Array, " {size}"]]:
    """Return the results of a program of `operations` on single entries, at N = `size` nodes.

    Args:
        constants: known arrays, or object arrays of the entries, which all nodes share.
        arguments: numbers that all nodes share, or entries (N,).
    """
    entries, jaxpr = _Entries(size, {}), program.jaxpr
    lifted = [c if isinstance(c, np.ndarray) and c.dtype == object else entries.lift(c) for c in constants]
    given = [np.fromiter([a], object, 1).reshape(v.aval.shape) for a, v in zip(arguments, jaxpr.invars, strict=True)]
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    outs = _interpret(entries, jaxpr, (), [*lifted, *given])
    return [
        lax.convert_element_type(entries.spread(entries.entries(o).item(), (size,)), v.aval.dtype)
        for o, v in zip(outs, jaxpr.outvars, strict=True)
    ]


def operations(program: jex.ClosedJaxpr | jex.Jaxpr) -> float:
    """Return the number of operations on entries in a program, infinite if it has others."""
    count = 0.0
    eqn: Equation
    for eqn in program.eqns:
        name, inner = eqn.primitive.name, eqn.params.get(_CALLS.get(eqn.primitive.name))
        if inner is not None:
            count += operations(inner)
        elif name in _ELEMENTWISE - _NOT_IN_KERNELS or name in _FOLDS:
            count += max(math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars))
        elif name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            count += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[a] for a in summed)
        elif name not in _ENTRY_MOVES and name != "iota":
            return math.inf
    return count


@functools.partial(jax.jit, static_argnums=0)
def _run_at_nodes(
    fn: Callable[..., Any], shared: PyTree, *args: Shaped[Array, "... N"]
) -> PyTree[Shaped[Array, "... N"]]:
    size = args[0].shape[-1]
    node_shapes = [jax.ShapeDtypeStruct(a.shape[:-1], a.dtype) for a in args]
    closed, shape = jax.make_jaxpr(functools.partial(fn, shared), return_shape=True)(*node_shapes)
    leaves, tree = jax.tree.flatten(shape)
    if sum(math.prod(a.shape[:-1]) for a in args) <= _MOST_ENTRIES:
        entries = _Entries(size, {})
        outs = _interpret(entries, closed.jaxpr, closed.consts, [_split(a, 1) for a in args])
        outs = [_join(entries.entries(o), (size,), leaf.dtype) for o, leaf in zip(outs, leaves, strict=True)]
    else:
        arrays = _Arrays(size)
        outs = _interpret(arrays, closed.jaxpr, closed.consts, [_Array(a, True) for a in args])
        outs = [arrays.at_nodes(o, leaf.shape) for o, leaf in zip(outs, leaves, strict=True)]
    return jax.tree.unflatten(tree, outs)


def _split(array: Shaped[ArrayLike, "..."], batch_axes: int) -> np.ndarray:
    """Return the entries of an array as an object array of its leading shape; a known array gives numpy scalars."""
    if batch_axes == 0 and not isinstance(array, jax.core.Tracer):
        known = np.asarray(array)
        return _fill(known.shape, known.__getitem__)
    array = jnp.asarray(array)
    shape = array.shape[: array.ndim - batch_axes]
    flat = lax.reshape(array, (math.prod(shape), *array.shape[array.ndim - batch_axes :]))
    return np.fromiter(_slices(flat, 0), object, len(flat)).reshape(shape)


def _bind(nodes: _Entries, name: str, operation: Callable[..., Any], *ops: Any, key: Any = ()) -> Any:
    """Apply an elementwise operation to entries, some of them shared by all nodes.

    Operations on known entries are evaluated while tracing, zeros and ones are folded, and a repeated operation returns
    its earlier result. The derivative of a small function has many of all three, and an operation that is not in the
    program need not be compiled.

    Args:
        key: parameters that the operation depends on besides its name.
    """
    is_known = [isinstance(o, np.generic) for o in ops]
    if all(is_known):
        with jax.ensure_compile_time_eval():
            return np.asarray(operation(*map(jnp.asarray, ops)))[()]
    for position in (0, 1) if len(ops) == 2 else ():
        if is_known[position] and ops[position] == _ABSORBING[position].get(name):
            return ops[position]
        if is_known[position] and ops[position] == _NEUTRAL[position].get(name):
            return ops[1 - position]

    size = max(map(np.shape, ops))
    return nodes.cached((name, key), ops, lambda: operation(*(jnp.asarray(nodes.spread(o, size)) for o in ops)))


def _join(entries: np.ndarray, batch: tuple[int, ...], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Invert `_split`, with trailing axes `batch`: (N,), or none for entries that all nodes share."""
    if entries.size == 0:
        return jnp.zeros((*entries.shape, *batch), dtype)
    flat = [jnp.asarray(e) for e in entries.ravel()]
    rows = [lax.broadcast_in_dim(e, (1, *batch), tuple(range(1, 1 + e.ndim))) for e in flat]
    return lax.reshape(lax.concatenate(rows, 0), (*entries.shape, *batch))


def _interpret(nodes: _Entries | _Arrays, jaxpr: jex.Jaxpr, consts: Sequence[Any], args: list) -> list:
    """Return the values of a program at the nodes; `nodes` represents them and applies the operations."""
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return nodes.lift(atom.val) if isinstance(atom, jex.Literal) else env[atom]

    env.update(zip([*jaxpr.constvars, *jaxpr.invars], [*map(nodes.lift, consts), *args], strict=True))
    eqn: Equation
    for eqn in jaxpr.eqns:
        xs, inner = [read(v) for v in eqn.invars], eqn.params.get(_CALLS.get(eqn.primitive.name))
        if inner is None:
            outs = nodes.apply(eqn, xs)
        else:
            outs = _interpret(nodes, getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), xs)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Equation, xs: list[np.ndarray], nodes: _Entries) -> list[np.ndarray]:
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.outvars[0].aval.shape
    if name in _ENTRY_MOVES:
        outs = _ENTRY_MOVES[name](*xs, **params)
        return outs if eqn.primitive.multiple_results else [outs]
    if name in _FOLDS:
        free = [a for a in range(xs[0].ndim) if a not in params["axes"]]
        rows = xs[0].transpose(*free, *params["axes"]).reshape(*shape, -1)
        if rows.shape[-1]:
            return [_fill(shape, lambda i: functools.reduce(functools.partial(_bind, nodes, *_FOLDS[name]), rows[i]))]
    if name == "dot_general" and xs[0].size and xs[1].size:
        return [_dot(nodes, xs, params["dimension_numbers"], eqn.outvars[0].aval)]
    if name in _ELEMENTWISE:
        xs = [np.broadcast_to(x, shape) for x in xs]
        operation = functools.partial(eqn.primitive.bind, **params)
        key = tuple((k, str(v)) for k, v in params.items() if v is not None)
        return [_fill(shape, lambda i: _bind(nodes, name, operation, *[x[i] for x in xs], key=key))]
    return [_split(o.value, int(o.varies)) for o in nodes.apply_whole(eqn, xs)]  # a sort, a loop, a gather, ...


def _fill(shape: tuple[int, ...], entry: Callable[[tuple[int, ...]], Any]) -> np.ndarray:
    out = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        out[index] = entry(index)
    return out


def _dot(nodes: _Entries, xs: list[np.ndarray], dims: Dimensions, out: jax.core.ShapedArray) -> np.ndarray:
    a, b = (_fill(x.shape, functools.partial(_cast, nodes, x, out.dtype))[..., None] for x in xs)
    a, b = (np.broadcast_to(x[..., 0], (len(x), *out.shape)) for x in _aligned(a, b, dims))

    def entry(i: tuple) -> Any:
        terms = [_bind(nodes, "mul", lax.mul, x[i], y[i]) for x, y in zip(a, b, strict=True)]
        return functools.reduce(functools.partial(_bind, nodes, "add", lax.add), terms)

    return _fill(out.shape, entry)


def _cast(nodes: _Entries, entries: np.ndarray, dtype: DTypeLike, index: tuple[int, ...]) -> Any:
    """Return an entry in the dtype of a product. Only products may have operands of two dtypes."""
    entry = entries[index]
    if entry.dtype == dtype:
        return entry
    return _bind(nodes, "cast", functools.partial(lax.convert_element_type, new_dtype=dtype), entry, key=dtype)


# The most common of `_ENTRY_MOVES`, for arrays with the node axis last; the second argument is the new shape (..., N).
_ARRAY_MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": lambda a, shape, p: lax.broadcast_in_dim(
        a, shape, (*p["broadcast_dimensions"], len(shape) - 1)
    ),
    "reshape": lambda a, shape, p: a.reshape(shape),
    "squeeze": lambda a, shape, p: a.reshape(shape),
    "transpose": lambda a, shape, p: a.transpose(*p["permutation"], len(shape) - 1),
}


def _slices(a: Shaped[Array, "..."], axis: int) -> list[Shaped[Array, "..."]]:
    return [lax.index_in_dim(a, k, axis, keepdims=False) for k in range(a.shape[axis])]


def _aligned(
    a: Shaped[Any, "..."], b: Shaped[Any, "..."], dims: Dimensions
) -> tuple[Shaped[Any, "..."], Shaped[Any, "..."]]:
    """Return operands (..., N) of a product with the summed axes first, as one, and then the axes of the result.

    Axes of the result that an operand lacks have size one.
    """
    (ca, cb), (ba, bb) = dims
    free_a = [k for k in range(a.ndim - 1) if k not in (*ca, *ba)]
    free_b = [k for k in range(b.ndim - 1) if k not in (*cb, *bb)]
    a = a.transpose(*ca, *ba, *free_a, a.ndim - 1).reshape(
        -1, *(a.shape[k] for k in (*ba, *free_a)), *[1] * len(free_b), a.shape[-1]
    )
    b = b.transpose(*cb, *bb, *free_b, b.ndim - 1).reshape(
        -1, *(b.shape[k] for k in bb), *[1] * len(free_a), *(b.shape[k] for k in free_b), b.shape[-1]
    )
    return a, b
