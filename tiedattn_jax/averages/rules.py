"""Averaging rules: independent replicates of a set of nodes, and the points that each replicate gives at a state.

A `Rule` holds independent replicates, whose scatter gives the error bar. A `Replicate` splits its nodes into blocks, so
that a block bounds the memory and not the number of nodes. For one block at one state it gives the `Points`: standard
normal fields, weights and proximal minimisers. All of `Points` may depend on the state, and the derivative of a fixed
point contains this dependence. A new kind of replicate therefore has to say how its points move.

At the end stands the Gaussian law of the local fields: from the standard normals of a rule to fields, and back.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree
from scipy import special

from ..base.arrays import apply, cholesky, indexed, inverse, solve, zeros
from ..base.errors import InputError, require_kind, require_memory
from ..base.report import Description, Printed
from ..model.model import Model, require_model
from ..model.overlaps import Overlaps, residual_covariance
from .program import counted

REPLICATES = 4  # the fewest that give a useful error bar: by Student's law it is 1.65 standard errors
# Nodes in memory together. A CPU takes as many as its caches hold; with twice as many it takes 20 % longer. The number
# for accelerators is a guess. To measure it, time one `Equations.answer` per node of `Sobol(2**20)` for blocks of 2^15
# to 2^20, and take the smallest block within 10 % of the fastest.
BLOCK, ACCELERATOR_BLOCK = 2**13, 2**17
WIDE_BLOCK = 2**10  # beyond two fields, to be divided by their number, so that Hessians stay in the caches
# Nodes of the coarse replicate. It is smaller beyond two fields, where its 25 evaluations, far from the state, cost
# more than all the others.
COARSE_NODES, WIDE_COARSE_NODES = 2**13, 2**10


def block_size(fields: int = 2) -> int:
    """Return the default number of nodes in a block for so many student fields, on the present devices."""
    if jax.default_backend() != "cpu":
        return ACCELERATOR_BLOCK
    return BLOCK if fields <= 2 else WIDE_BLOCK // fields


def coarse_size(fields: int) -> int:
    """Return the most nodes of a coarse replicate for so many student fields."""
    return COARSE_NODES if fields <= 2 else WIDE_COARSE_NODES


class Jumps(eqx.Module):
    """Points on the surface where the minimiser jumps, for averages of delta(energy difference) times a function."""

    density: Float[Array, " P"]  # weights of the points in the delta function; zero where there is no jump
    step: Float[Array, "L r P"]  # jump of the minimiser at these points


class Points(eqx.Module):
    """Points of one block of an average."""

    student: Float[Array, "L r N"]  # standard normal fields of the student given the teacher
    teacher: Float[Array, "L t N"]  # standard normal fields of the teacher
    weight: Float[Array, " N"]
    z: Float[Array, "L r N"]  # proximal minimisers
    resolved: Bool[Array, " N"]  # whether the proximal solve and the rule's treatment of the node met their tolerance
    gap: Float[Array, " N"]  # energy of the next minimum above the global one; infinite where there is none
    jumps: Jumps  # jumps of the minimiser; not differentiated


class Replicate(eqx.Module):
    """One set of nodes. In a `Rule` every array has one more leading axis.

    Attributes:
        KIND: what the nodes are, in words.
        weight: weights of the nodes, or of lines of nodes, summing to one.
    """

    KIND: ClassVar[str] = "points"
    weight: eqx.AbstractVar[Float[Array, "*R N"]]

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of nodes."""

    @property
    def weighted(self) -> Float[Array, ""]:
        """Number of nodes whose weight is not zero."""
        return self.size * jnp.mean(self.weight != 0, dtype=self.weight.dtype)

    @property
    def fast_compile(self) -> bool:
        """Whether its programs are compiled with less effort; see `program`."""
        return False

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(L, r, t) of the models that the nodes are for."""

    @abc.abstractmethod
    def blocks(self) -> Any:
        """Return the blocks: a named tuple with a `weight`, whose arrays lead with the block axis."""

    @abc.abstractmethod
    def quadrature(self, block: Any) -> tuple[Float[Array, "L r N"], Float[Array, "L t N"], Float[Array, " N"]]:
        """Return normals of student and teacher and weights of one block, for smooth averages."""

    @abc.abstractmethod
    def search(self, model: Model, x: Overlaps, block: Any) -> Any:
        """Search one block at the state `x` for minimisers and jumps; the result has no derivative by itself."""

    @abc.abstractmethod
    def points(self, model: Model, x: Overlaps, block: Any, result: Any) -> Points:
        """Return nodes, weights and minimisers of one block at the state `x`, given the result of `search` there.

        Their derivatives are complete: they contain how the points move with the state and the model's numbers.
        """


COARSE = -1  # index of a rule's coarse replicate


class Rule(Printed):
    """An averaging rule, as `solve` takes it.

    Attributes:
        stack: independent replicates; every array leads with the replicate axis.
        coarse: one cheap replicate, used to come near a fixed point. It has the shape of the others, so that one
            program serves both, but only its first nodes have weight.
    """

    stack: Replicate
    coarse: Replicate

    @property
    def replicates(self) -> int:
        """Number of independent replicates."""
        return jax.tree.leaves(self.stack)[0].shape[0]

    @property
    def size(self) -> int:
        """Number of nodes in a replicate."""
        return self.stack.size

    def describe(self) -> Description:
        summary = f"{self.replicates} replicates of {self.size} nodes, {self.stack.KIND},"
        return Description(f"{summary} for (L, r, t) = {self.stack.shape}")

    def described(self) -> dict[str, Any]:
        """Return the kind, the size and the number of replicates for reports."""
        return {"rule": self.stack.KIND, "size": self.size, "replicates": self.replicates}

    def replicate(self, k: int) -> Replicate:
        """Return replicate `k`; the coarse one if `k` is `COARSE`."""
        return self.coarse if k == COARSE else _select(self.stack, k)

    def each(self, fn: Callable[[Replicate], PyTree]) -> PyTree:
        """Apply `fn` to one replicate after the other; leaves of the result lead with the replicate axis."""
        return lax.map(fn, self.stack)


@jax.jit
def _select(stack: Replicate, k: Int[Array, ""]) -> Replicate:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, k, keepdims=False), stack)


def average(replicate: Replicate, fn: Callable[[Any], PyTree]) -> PyTree:
    """Sum `fn(block)` over the blocks of a replicate, with one block in memory at a time, also in a reverse pass.

    A reverse pass stores the results of `search_block`, about a dozen numbers a node, and recomputes the rest.
    """
    sums = lax.map(jax.checkpoint(fn, policy=_SAVE_SEARCHES), replicate.blocks())
    return jax.tree.map(lambda a: jnp.sum(a, 0), sums)


_SEARCH_RESULT = "found"
_SAVE_SEARCHES = jax.checkpoint_policies.save_only_these_names(_SEARCH_RESULT)


def search_block(replicate: Replicate, model: Model, x: Overlaps, block: Any) -> Any:
    """Return what a replicate's `search` finds in a block at the state `x`; it has no derivative."""
    result = replicate.search(*lax.stop_gradient((model, x)), block)
    return jax.tree.map(lambda a: checkpoint_name(a, _SEARCH_RESULT), result)


def average_of_weighted(replicate: Replicate, fn: Callable[[Any], PyTree]) -> PyTree:
    """Return `average` without trailing blocks of zero weight; it has no reverse-mode derivative."""
    return sum_of_weighted(replicate.blocks(), fn)


def sum_of_weighted(blocks: Any, fn: Callable[[Any], PyTree]) -> PyTree:
    """Sum `fn(block)` over blocks; blocks of zero weight come last and are skipped, except by counted loops.

    Args:
        blocks: a tree of arrays that lead with the block axis.
    """
    count = len(blocks.weight) if counted() else jnp.sum(jnp.any(blocks.weight != 0, 1))
    traced, zero, unflatten = flattened(fn, indexed(blocks, 0))

    def add(k: Int[Array, ""], sums: Float[Array, " n"]) -> Float[Array, " n"]:
        return sums + traced(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, k, keepdims=False), blocks))

    return unflatten(lax.fori_loop(0, count, add, zero))


def flattened(
    fn: Callable[..., PyTree], *args: PyTree
) -> tuple[Callable[..., Array], Float[Array, " n"], Callable[[Array], PyTree]]:
    """Return `fn` with its result flattened to a vector, a zero vector of that size, and the inverse of the flattening.

    `fn` is traced once, at arguments like `args`. Loops carry their results as one vector because each array of a loop
    costs kernels to compile.
    """
    traced = eqx.filter_closure_convert(fn, *args)
    shapes = jax.eval_shape(lambda *args: traced(*args), *args)  # jax would print the program of a bare closure
    zero, unflatten = ravel_pytree(zeros(shapes))
    return lambda *args: ravel_pytree(traced(*args))[0], zero, unflatten


def in_blocks(arrays: tuple[Float[Array, "... N"], ...], width: int) -> tuple[Float[Array, "B ... W"], ...]:
    """Split arrays, padded with zeros, into blocks of the least width W for this number of blocks.

    The number of blocks B is the fewest with W of at most `width`.
    """
    size = arrays[0].shape[-1]
    width = block_width(size, width)
    count = -(-size // width)

    def split(a: Float[Array, "... N"]) -> Float[Array, "B ... W"]:
        pad = [(0, 0)] * (a.ndim - 1) + [(0, count * width - size)]
        return jnp.moveaxis(jnp.pad(a, pad).reshape(*a.shape[:-1], count, width), -2, 0)

    return tuple(map(split, arrays))


def block_width(size: int, most: int) -> int:
    """Return the width of the fewest equal blocks for `size` nodes, with at most `most` nodes each."""
    return -(-size // -(-size // most))


@dataclass(frozen=True)
class Fields:
    """The fields of a sentence that an average is over: all that the makers of nodes need of a model."""

    tokens: int
    student: int  # fields of a token: columns of the student
    teacher: int  # columns of the teacher, and fields of noise
    dtype: np.dtype
    nonsmooth: bool = False  # whether the loss has kinks
    noise: bool = False  # whether some of the teacher's fields are noise
    means: bool = False  # whether the teacher's fields have means; averages are then not even in their normals

    @classmethod
    def of(cls, model: Model | Fields, student: int | None = None) -> Fields:
        """Return the fields of a model.

        Args:
            student: other number of student fields, for averages over other fields than those of the model's student.
        """
        if isinstance(model, Fields):
            return model
        require_model(model)
        r, t = model.columns
        means = model.teacher_mean is not None
        student = r if student is None else student
        return cls(model.shape[0], student, t, model.lam.dtype, model.nonsmooth, model.noise > 0, means)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, r, t): tokens, student fields and teacher fields."""
        return self.tokens, self.student, self.teacher

    @property
    def count(self) -> int:
        """Number of fields of a sentence, L (r + t)."""
        return self.tokens * (self.student + self.teacher)


def check_rule(rule: Any, model: Model | Fields) -> None:
    """Raise an `InputError` about "nodes" unless `rule` is an averaging rule that is made for such a model."""
    require_kind(rule, "nodes", Rule, "an averaging rule, such as Lines(9).rule(model)")
    fields = Fields.of(model)
    if rule.stack.shape != fields.shape:
        text = f"must be made for this model, of shape (L, r, t) = {fields.shape}, got nodes for {rule.stack.shape}"
        raise InputError("nodes", text)
    dtype = jax.tree.leaves(rule.stack)[0].dtype
    if dtype != fields.dtype:
        raise InputError("nodes", f"must be {fields.dtype} like the model, got {dtype}: make them with this model")


def check_memory(numbers: int, replicates: int, argument: str, value: int) -> None:
    """Raise an `InputError` about `argument` or the replicates unless memory can hold `numbers` for each replicate."""
    replicate_bytes = 32.0 * numbers  # four copies
    require_memory(replicate_bytes, argument, value, "the nodes of a replicate")
    require_memory(replicate_bytes * replicates, "replicates", replicates, "the nodes")


@functools.cache
def legendre(count: int) -> tuple[Float[np.ndarray, " {count}"], Float[np.ndarray, " {count}"]]:
    """Return Gauss-Legendre nodes and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(count)
    return 0.5 * (x + 1), 0.5 * w


def hermite(count: int) -> tuple[Float[np.ndarray, " {count}"], Float[np.ndarray, " {count}"]]:
    """Return Gauss-Hermite nodes and weights of the standard normal law; the sum of the weights is not one."""
    return special.roots_hermitenorm(count)


def hermite_grid(
    order: int, dimension: int
) -> tuple[Float[np.ndarray, "{dimension} {order**dimension}"], Float[np.ndarray, " {order**dimension}"]]:
    """Return the normals of a tensor Gauss-Hermite rule, and weights that sum to one."""
    x, w = hermite(order)
    index = np.indices((order,) * dimension).reshape(dimension, order**dimension)
    return x[index], np.prod((w / w.sum())[index], 0)


def fields(
    model: Model, x: Overlaps, student: Float[Array, "L r N"], teacher: Float[Array, "L t N"]
) -> tuple[Float[Array, "L r N"], Float[Array, "L t N"]]:
    """Return fields h and y from standard normals: the teacher's, and the student's given these.

    They are ``y = rho^{1/2} v``, plus its mean where tokens have classes, and
    ``h = m + theta rho^{-1} y + (q - theta rho^{-1} theta^T)^{1/2} eta``, with Cholesky roots. The target attention of
    a node is then the same for every state.
    """
    y = teacher_fields(model, teacher)
    slope, spread = conditional(model, x)
    return x.m[..., None] + apply(slope, y) + apply(spread, student), y


def teacher_fields(model: Model, teacher: Float[Array, "L t N"]) -> Float[Array, "L t N"]:
    """Return teacher fields from standard normals; fields of noise, if any, follow them unchanged."""
    t, mean = model.shape[2], model.teacher_mean
    y = apply(cholesky(model.rho), teacher[:, :t])
    y = y if mean is None else y + mean[..., None]
    return jnp.concatenate([y, teacher[:, t:]], 1) if model.noise else y


def conditional(model: Model, x: Overlaps) -> tuple[Float[Array, "L r t"], Float[Array, "L r r"]]:
    """Return the regression theta rho^{-1} of h on y, and the root of the residual covariance.

    The root is the Cholesky factor. The regression is zero on fields of noise.
    """
    slope = jnp.swapaxes(solve(model.rho, jnp.swapaxes(x.theta, -1, -2)), -1, -2)
    slope = jnp.pad(slope, ((0, 0), (0, 0), (0, model.noise))) if model.noise else slope
    return slope, cholesky(residual_covariance(model, x))


def whiten(
    model: Model, x: Overlaps, h: Float[Array, "L r N"], y: Float[Array, "L t N"]
) -> tuple[Float[Array, "L r N"], Float[Array, " N"]]:
    """Return the standard normals of student fields, and their log density given the teacher's.

    The log density lacks its constant, a power of 2 pi.
    """
    slope, spread = conditional(model, x)
    student = apply(inverse(spread), h - x.m[..., None] - apply(slope, y))
    return student, -0.5 * jnp.sum(student**2, (0, 1)) - log_volume(model, x)


def log_volume(model: Model, x: Overlaps) -> Float[Array, ""]:
    """Return the logarithm of the volume of student fields that corresponds to a unit volume of standard normals."""
    return jnp.sum(jnp.log(jnp.diagonal(conditional(model, x)[1], axis1=1, axis2=2)))
