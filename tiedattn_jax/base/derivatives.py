"""Custom derivatives, of any order and inside loops, for values that a search found.

The rule is attached by a primitive, because `jax.custom_jvp` can lose it. In a reverse pass through `lax.scan`, and so
through `lax.map`, jax (0.10.2) replaces the call of a `custom_jvp` by its body. The outputs of the loop keep their
values but lose the rule, and a further derivative of that pass treats a searched value as a constant. A checkpoint
around the call defers the loss by one pass. A primitive keeps its rule.
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

# Maps leaves and their tangents, None for zero, to the tangent of the value.
TangentRule = Callable[[list, list], Array]


def with_tangent(rule: Callable[[tuple, tuple], Array]) -> Callable[..., Array]:
    """Return a function ``attach(z, *args)`` that returns the array `z` and whose derivative is given by `rule`.

    Args:
        rule: returns the tangent of `z` from `primals` ``(z, *args)`` and `tangents`, which are None for leaves that do
            not move; see `derivative_along`. The z in `primals` carries the same rule, for higher derivatives.
    """

    exact = precise(rule)

    def attach(z: Float[Array, "*z"], *args: PyTree) -> Float[Array, "*z"]:
        leaves, tree = jax.tree.flatten((z, *args))
        return _attach.bind(*map(jnp.asarray, leaves), rule=_TreeRule(exact, tree))

    attach.__doc__ = rule.__doc__
    return attach


def derivative_along(fn: Callable[..., Array], primals: tuple, tangents: tuple) -> Float[Array, "..."]:
    """Return the derivative of `fn` along tangents of a rule; leaves whose tangent is None or symbolic do not move."""
    directions = jax.tree.map(
        lambda d: None if isinstance(d, SymbolicZero) else d, tangents, is_leaf=lambda d: isinstance(d, SymbolicZero)
    )
    value, derivative = eqx.filter_jvp(fn, primals, directions)
    return jnp.zeros_like(value) if derivative is None else derivative


def with_root(
    fn: Callable[..., Array], z: Float[Array, "*z"], *args: PyTree, slope: Callable[..., Array] | None = None
) -> Float[Array, "*z"]:
    """Return a root z of ``fn(z, *args)`` that a search found, element by element, with its implicit derivatives.

    Args:
        fn: a function of its arguments alone; like `slope`, it must not hold what jax traces.
        slope: ``slope(z, *args)`` is the derivative of `fn` in z, if it is known in closed form.
    """

    def rule(primals: tuple, tangents: tuple) -> Float[Array, "*z"]:
        z, *args = primals
        change = derivative_along(lambda *args: fn(z, *args), tuple(args), tangents[1:])
        if slope is None:
            return -change / jax.jvp(lambda z: fn(z, *args), (z,), (jnp.ones_like(z),))[1]
        return -change / slope(z, *args)

    return with_tangent(rule)(lax.stop_gradient(z), *args)


def bisected_root(fn: Callable[[Array], Array], low: Float[Array, ""], high: Float[Array, ""]) -> Float[Array, ""]:
    """Return the root of a function that is negative at `low` and positive at `high`, with its implicit derivatives."""

    def search(fn: Callable[[Array], Array], _: Array) -> Array:
        def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            middle = 0.5 * (ends[0] + ends[1])
            above = fn(middle) > 0
            return jnp.where(above, ends[0], middle), jnp.where(above, middle, ends[1])

        return 0.5 * sum(lax.fori_loop(0, _HALVINGS, halve, (low, high)))

    low, high = lax.stop_gradient((low, high))
    return lax.custom_root(fn, high, search, lambda linear, y: y / linear(jnp.ones_like(y)))


class _TreeRule(NamedTuple):
    """A rule for pytrees that is called with their leaves."""

    rule: Callable[[tuple, tuple], Array]
    tree: PyTreeDef

    def __call__(self, leaves: list, tangents: list) -> Float[Array, "..."]:
        return self.rule(jax.tree.unflatten(self.tree, leaves), jax.tree.unflatten(self.tree, tangents))


class _BatchRule(NamedTuple):
    """A rule under `jax.vmap`: some leaves have a batch axis, and z has it in front."""

    rule: TangentRule
    axes: tuple[int | None, ...]

    def __call__(self, leaves: list, tangents: list) -> Float[Array, "batch ..."]:
        tangent_axes = [None if d is None else axis for axis, d in zip(self.axes, tangents, strict=True)]
        return jax.vmap(self.rule, (list(self.axes), tangent_axes))(leaves, tangents)


_attach = Primitive("attach")
_attach.def_impl(lambda z, *_, rule: z)
_attach.def_abstract_eval(lambda z, *_, rule: z)
mlir.register_lowering(_attach, lambda ctx, z, *_, rule: [z])


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, rule: TangentRule
) -> tuple[Float[Array, "*z"], Float[Array, "*z"]]:
    z = _attach.bind(*primals, rule=rule)
    return z, rule([z, *primals[1:]], [None if isinstance(d, ad.Zero) else d for d in tangents])


def _batched(
    leaves: Sequence[Any], axes: Sequence[int | None], *, rule: TangentRule
) -> tuple[Float[Array, "batch ..."], int]:
    z, size = leaves[0], next(a.shape[k] for a, k in zip(leaves, axes, strict=True) if k is not None)
    z = jnp.broadcast_to(z, (size, *z.shape)) if axes[0] is None else jnp.moveaxis(z, axes[0], 0)
    return _attach.bind(z, *leaves[1:], rule=_BatchRule(rule, (0, *axes[1:]))), 0


ad.primitive_jvps[_attach] = _jvp
batching.primitive_batchers[_attach] = _batched
