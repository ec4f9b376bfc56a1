"""What an averaging rule is: replicates of a set of nodes, and the points that each gives at a state.

A `Rule` holds independent replicates, whose scatter is the error bar. One `Replicate` answers two questions: into which
blocks its nodes fall (memory is bounded by a block, not by the number of nodes), and, for one block at one state, the
`Points`: standard normal fields, weights and proximal minimisers. All of `Points` may depend on the state, and what a
fixed point differentiates is that dependence: a replicate of a new kind has to say how its points move.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree

from ..errors import InputError, require, require_count, require_kind, require_memory
from ..model import Model
from ..overlaps import Overlaps
from ..printing import Description, Printed
from .loops import counted


class Jumps(eqx.Module):
    """The surface on which the minimiser jumps, for averages of delta(energy difference) times a function of it."""

    density: jax.Array  # weights of the places, (P,), of that delta function; zero where there is none
    step: jax.Array  # by which the minimiser jumps there, (L, r, P)


class Points(eqx.Module):
    """One block of an average."""

    student: jax.Array  # standard normal fields of the student given the teacher, (L, r, N)
    teacher: jax.Array  # standard normal fields of the teacher, (L, t, N)
    weight: jax.Array  # (N,)
    z: jax.Array  # proximal minimisers, (L, r, N)
    resolved: jax.Array  # whether the proximal solve, and what the rule makes of its node, met their tolerance, (N,)
    gap: jax.Array  # energy of the next minimum above the global one, (N,), infinite where there is none
    jumps: Jumps  # where the minimiser jumps; not differentiated


class Replicate(eqx.Module):
    """One set of nodes. In a `Rule` every array has a leading axis more.

    Attributes:
        weight: of nodes, or of lines of them, (N,), summing to one.
    """

    weight: eqx.AbstractVar[jax.Array]

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of nodes."""

    @property
    def weighted(self) -> jax.Array:
        """Number of nodes that have a weight."""
        return self.size * jnp.mean(self.weight != 0, dtype=self.weight.dtype)

    @property
    def quick(self) -> bool:
        """Whether its programs are compiled with less effort; see `program`."""
        return False

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(L, r, t) of the models that they are for."""

    @abc.abstractmethod
    def blocks(self) -> Any:
        """A named tuple with a `weight`, whose arrays lead with the block axis."""

    @abc.abstractmethod
    def quadrature(self, block: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For one block: normals (L, r, N) and (L, t, N) and weights (N,), for smooth averages."""

    @abc.abstractmethod
    def search(self, model: Model, x: Overlaps, block: Any) -> Any:
        """What has to be looked for in one block at the state `x`, and has no derivative by itself: minimisers,
        jumps.
        """

    @abc.abstractmethod
    def points(self, model: Model, x: Overlaps, block: Any, found: Any) -> Points:
        """Nodes, weights and minimisers of one block at the state `x`, of what `search` found there.

        Their derivatives are whole: how they move with the state and with the model's numbers.
        """


COARSE = -1  # number of a rule's coarse replicate


class Rule(Printed):
    """An averaging rule, as `solve` takes it.

    Attributes:
        stack: independent replicates; every array leads with the replicate axis.
        coarse: one cheap replicate, to come near a fixed point with: of the shape of the others, for one program to
            serve both, but beyond its first nodes nothing has weight.
    """

    stack: Replicate
    coarse: Replicate

    @property
    def replicates(self) -> int:
        """Number of independent replicates."""
        return jax.tree.leaves(self.stack)[0].shape[0]

    @property
    def size(self) -> int:
        """Nodes in a replicate."""
        return self.stack.size

    def describe(self) -> Description:
        each = f"{self.replicates} replicates of {self.size} nodes, {type(self.stack).__name__}"
        return Description(f"{each} for (L, r, t) = {self.stack.shape}")

    def replicate(self, k: int) -> Replicate:
        """One of them; the coarse one where k is `COARSE`."""
        return self.coarse if k == COARSE else _one(self.stack, k)

    def each(self, fn: Callable[[Replicate], Any]) -> Any:
        """`fn` of every replicate, one after the other: leaves lead with the replicate axis."""
        return lax.map(fn, self.stack)


@jax.jit
def _one(stack: Replicate, k: Any) -> Replicate:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, k, keepdims=False), stack)


def average(replicate: Replicate, fn: Callable[[Any], Any]) -> Any:
    """Sum of `fn(block)` over the blocks of a replicate, one block in memory at a time, in both modes.

    A reverse pass keeps what was `found_in` the blocks, about a dozen numbers a node, and computes the rest again.
    """
    sums = lax.map(jax.checkpoint(fn, policy=_KEEP), replicate.blocks())
    return jax.tree.map(lambda a: jnp.sum(a, 0), sums)


_FOUND = "found"
_KEEP = jax.checkpoint_policies.save_only_these_names(_FOUND)


def found_in(replicate: Replicate, model: Model, x: Overlaps, block: Any) -> Any:
    """What a replicate's `search` finds in a block at the state `x`; it has no derivative."""
    return checkpoint_name(replicate.search(*lax.stop_gradient((model, x)), block), _FOUND)


def average_of_weighted(replicate: Replicate, fn: Callable[[Any], Any]) -> Any:
    """`average`, without the last blocks if they have no weight, and not differentiable in reverse."""
    return sum_of_weighted(replicate.blocks(), fn)


def sum_of_weighted(blocks: Any, fn: Callable[[Any], Any]) -> Any:
    """Sum of `fn(block)` over blocks, a tree of arrays that lead with the block axis,
    but for the last without weight.
    """
    count = len(blocks.weight) if counted() else jnp.sum(jnp.any(blocks.weight != 0, 1))
    traced, zero, unflatten = flattened(fn, jax.tree.map(lambda a: a[0], blocks))

    def add(k: jax.Array, sums: jax.Array) -> jax.Array:
        return sums + traced(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, k, keepdims=False), blocks))

    return unflatten(lax.fori_loop(0, count, add, zero))


def flattened(
    fn: Callable[..., Any], *args: Any
) -> tuple[Callable[..., jax.Array], jax.Array, Callable[[jax.Array], Any]]:
    """A function as one that returns a vector, a vector of zeros, and the way back; traced once, at arguments like
    these.

    Results of loops travel as one vector because every array of a loop takes kernels to compile.
    """
    traced = eqx.filter_closure_convert(fn, *args)
    like = jax.eval_shape(lambda *args: traced(*args), *args)  # of a bare closure jax would print the program
    zero, unflatten = ravel_pytree(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like))
    return lambda *args: ravel_pytree(traced(*args))[0], zero, unflatten


def in_blocks(arrays: tuple[jax.Array, ...], width: int) -> tuple[jax.Array, ...]:
    """Arrays (..., N), padded with zeros, as (B, ..., W) with W of at most `width`, and no larger than it has to be."""
    size = arrays[0].shape[-1]
    width = block_width(size, width)
    count = -(-size // width)

    def split(a: jax.Array) -> jax.Array:
        pad = [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)]
        return jnp.moveaxis(jnp.pad(a, pad).reshape(*a.shape[:-1], count, width), -2, 0)

    return tuple(map(split, arrays))


def block_width(size: int, most: int) -> int:
    """Width of the fewest blocks, all of one width, of at most `most` each."""
    return -(-size // -(-size // most))


def check_rule(rule: Any, model: Model) -> None:
    """Raise an InputError, about "nodes", unless an averaging rule is one and is made for such a model."""
    require_kind(rule, "nodes", Rule, "an averaging rule, such as default_nodes(model)")
    got, want = rule.stack.shape, (model.shape[0], *model.columns)
    if got != want:
        raise InputError("nodes", f"must be made for this model, of shape (L, r, t) = {want}, got nodes for {got}")
    dtype = jax.tree.leaves(rule.stack)[0].dtype
    if dtype != model.lam.dtype:
        raise InputError("nodes", f"must be {model.lam.dtype} like the model, got {dtype}: make them with this model")


def check_arguments(model: Any, block: Any, **counts: Any) -> None:
    """Raise an InputError for what all rules are asked for.

    That is: no `model`; a count that is not a positive integer, or a seed not in [0, 2^63); a `block` that is neither
    None nor a positive integer.
    """
    require_kind(model, "model", Model, "a tiedattn_jax.Model, such as dot_product()")
    for name, value in counts.items():
        require_count(value, name, 0 if name == "seed" else 1)
    require(counts["seed"] < 2**63, "seed", counts["seed"], "below 2^63")
    if block is not None:
        require_count(block, "block")


def check_memory(numbers: int, replicates: int, argument: str, value: int) -> None:
    """Raise an InputError, about an argument or the replicates, unless so many numbers in each can be drawn."""
    each = 32.0 * numbers  # four copies
    require_memory(each, argument, value, "the nodes of a replicate")
    require_memory(each * replicates, "replicates", replicates, "the nodes")
