"""Custom derivatives, of any order and inside loops, for values that a search found.

The rule is attached by a primitive, because `jax.custom_jvp` can lose it. In a reverse pass through `lax.scan`, and so
through `lax.map`, jax (0.10.2) replaces the call of a `custom_jvp` by its body. The outputs of the loop keep their
values but lose the rule, and a further derivative of that pass differentiates the body: a searched value then counts as
a constant, and a rule that raises an error does not raise it. A checkpoint around the call defers the loss by one pass.
A primitive keeps its rule.

`lax.custom_root` and `jnp.linalg.pinv` are built on `jax.custom_jvp` and lose their rules, too: use `with_root` and
`pseudo_inverse`. A `custom_jvp` is safe where its body has the same derivatives as its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, PyTree, PyTreeDef

from .arrays import precise

_HALVINGS = 60  # of an interval; a float has no more digits


def with_tangent(rule: Callable[[tuple, tuple], PyTree]) -> Callable[..., Any]:
    """Return a function ``attach(z, *args)`` that returns the tree `z` and whose derivative is given by `rule`.

    Args:
        rule: returns the tangent of `z` from `primals` ``(z, *args)`` and `tangents`, which are None for leaves that do
            not move; see `derivative_along`. The z in `primals` carries the same rule, for higher derivatives. Leaves
            of the result may be None for zero. Those of integers and booleans do not matter.
    """

    exact = precise(rule)

    def attach(z: PyTree, *args: PyTree) -> PyTree:
        (values, z_tree), (leaves, tree) = jax.tree.flatten(z), jax.tree.flatten(args)
        arrays, tree_rule = map(jnp.asarray, values + leaves), _TreeRule(exact, z_tree, tree)
        return jax.tree.unflatten(z_tree, _attach.bind(*arrays, rule=tree_rule, count=len(values)))

    attach.__doc__ = rule.__doc__
    return attach


def derivative_along(fn: Callable[..., Array], primals: tuple, tangents: tuple) -> Float[Array, "..."]:
    """Return the derivative of `fn` along tangents of a rule; leaves whose tangent is None or symbolic do not move."""
    directions = jax.tree.map(
        lambda d: None if isinstance(d, SymbolicZero) else d, tangents, is_leaf=lambda d: isinstance(d, SymbolicZero)
    )
    value, derivative = eqx.filter_jvp(fn, primals, directions)
    return jnp.zeros_like(value) if derivative is None else derivative


def instantiated(primals: PyTree, tangents: PyTree) -> PyTree:
    """Return tangents of a rule with zeros for those that are None; all leaves are arrays of floats."""
    return jax.tree.map(lambda a, d: jnp.zeros_like(a) if d is None else d, primals, tangents)


# Returns the x with ``(d fn / dz) x = change`` from the change, the root z and the other arguments of fn.
RootSolve = Callable[..., Array]


def with_root(
    fn: Callable[..., Array], z: Float[Array, "*z"], *args: PyTree, solve: RootSolve | None = None
) -> Float[Array, "*z"]:
    """Return a root z of ``fn(z, *args)`` that a search found, with its implicit derivatives.

    Args:
        fn: a function of its arguments alone; like `solve`, it must not hold what jax traces.
        solve: ``solve(change, z, *args)`` returns the x with ``(d fn / dz) x = change``. By default it divides by the
            slope of `fn`, element by element.
    """

    def rule(primals: tuple, tangents: tuple) -> Float[Array, "*z"]:
        z, *args = primals
        change = derivative_along(lambda *args: fn(z, *args), tuple(args), tangents[1:])
        if solve is None:
            return -change / jax.jvp(lambda z: fn(z, *args), (z,), (jnp.ones_like(z),))[1]
        return -solve(change, z, *args)

    return with_tangent(rule)(lax.stop_gradient(z), *args)


class Closure(eqx.Module):
    """A function of an array, together with what it holds, as a tree: `lax.stop_gradient` of it holds constants."""

    arrays: PyTree
    rest: PyTree = eqx.field(static=True)

    def __init__(self, fn: Callable[[Array], Array], z: Float[Array, "..."]):
        self.arrays, self.rest = eqx.partition(eqx.filter_closure_convert(fn, z), eqx.is_array)

    def __call__(self, z: Float[Array, "..."]) -> Float[Array, "..."]:
        return eqx.combine(self.arrays, self.rest)(z)


def implicit_root(fn: Closure, z: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return a root z of ``fn(z)`` that a search found, a number or a vector, with its implicit derivatives."""

    def solve(change: Array, z: Array, fn: Closure) -> Array:
        return jnp.linalg.solve(jax.jacfwd(fn)(z), change)

    return with_root(lambda z, fn: fn(z), z, fn, solve=solve if z.ndim else None)


def bisected_root(fn: Callable[[Array], Array], low: Float[Array, ""], high: Float[Array, ""]) -> Float[Array, ""]:
    """Return the root of a function that is negative at `low` and positive at `high`, with its implicit derivatives."""
    low, high = lax.stop_gradient((low, high))
    closed = Closure(fn, low)
    frozen = lax.stop_gradient(closed)

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (ends[0] + ends[1])
        above = frozen(middle) > 0
        return jnp.where(above, ends[0], middle), jnp.where(above, middle, ends[1])

    return implicit_root(closed, 0.5 * sum(lax.fori_loop(0, _HALVINGS, halve, (low, high))))


@with_tangent
def _moving_pseudo_inverse(primals: tuple, tangents: tuple) -> Float[Array, "n m"]:
    (P, a), change = primals, tangents[1]
    within = P @ change @ P
    rows = P @ P.T @ change.T
    columns = change.T @ P.T @ P
    return rows - rows @ a @ P + columns - P @ a @ columns - within


def pseudo_inverse(a: Float[Array, "m n"], **options: Any) -> Float[Array, "n m"]:
    """Return `jnp.linalg.pinv` of a matrix; its derivatives are for changes that keep the rank."""
    return _moving_pseudo_inverse(lax.stop_gradient(jnp.linalg.pinv(lax.stop_gradient(a), **options)), a)


class _TreeRule(NamedTuple):
    """A rule for pytrees that is called with their leaves: those of the value first, then those of the arguments."""

    rule: Callable[[tuple, tuple], PyTree]
    value: PyTreeDef
    args: PyTreeDef

    def __call__(self, leaves: list, tangents: list) -> list:
        count = self.value.num_leaves
        trees = ((self.value.unflatten(a[:count]), *self.args.unflatten(a[count:])) for a in (leaves, tangents))
        return self.value.flatten_up_to(self.rule(*trees))


class _BatchRule(NamedTuple):
    """A rule under `jax.vmap`: some leaves have a batch axis, and those of the value have it in front."""

    rule: TangentRule
    axes: tuple[int | None, ...]

    def __call__(self, leaves: list, tangents: list) -> list:
        tangent_axes = [None if d is None else axis for axis, d in zip(self.axes, tangents, strict=True)]
        return jax.vmap(self.rule.__call__, (list(self.axes), tangent_axes))(leaves, tangents)


# Maps leaves and their tangents, None for zero, to the tangents of the value, whose leaves are the first `count`.
TangentRule = _TreeRule | _BatchRule

_attach = Primitive("attach")
_attach.multiple_results = True
_attach.def_impl(lambda *leaves, rule, count: list(leaves[:count]))
_attach.def_abstract_eval(lambda *leaves, rule, count: list(leaves[:count]))
mlir.register_lowering(_attach, lambda ctx, *leaves, rule, count: leaves[:count])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, rule: TangentRule, count: int) -> tuple[list, list]:
    values = _attach.bind(*primals, rule=rule, count=count)
    moved = rule([*values, *primals[count:]], [None if isinstance(d, ad.Zero) else d for d in tangents])
    return values, [
        d if d is not None and jnp.issubdtype(a.dtype, jnp.inexact) else ad.Zero(jax.typeof(a).to_tangent_aval())
        for a, d in zip(values, moved, strict=True)
    ]


def _batched(leaves: Sequence[Any], axes: Sequence[int | None], *, rule: TangentRule, count: int) -> tuple[list, list]:
    size = next(a.shape[k] for a, k in zip(leaves, axes, strict=True) if k is not None)
    values = [
        jnp.broadcast_to(z, (size, *z.shape)) if k is None else jnp.moveaxis(z, k, 0)
        for z, k in zip(leaves[:count], axes, strict=False)
    ]
    batch_axes = (0,) * count
    batch_rule = _BatchRule(rule, (*batch_axes, *axes[count:]))
    return _attach.bind(*values, *leaves[count:], rule=batch_rule, count=count), list(batch_axes)


ad.primitive_jvps[_attach] = _jvp
batching.primitive_batchers[_attach] = _batched
