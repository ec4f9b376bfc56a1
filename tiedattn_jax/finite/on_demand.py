"""Sentences whose inputs are never stored: message passing and training draw the products that they ask for.

# notation: as in `data`; X_l = W_l diag(gamma_l / d)^{1/2} + p_l / sqrt(d), with L independent matrices W_l (n, d) of
# independent standard normal entries

A product ``W_l w`` reveals W_l along one direction, and leaves the rest of it Gaussian. So an algorithm that touches
W_l only through products can draw them one by one, with the exact law for every n and d ("Householder dice", Y. M. Lu,
IEEE Trans. Inf. Theory 2021). Directions that products have revealed are stored with their images, as orthonormal
vectors: e_k of w with ``W_l e_k``, and f_k of u with ``W_l^T f_k``. A new w has a part a in the span of the e_k, and a
rest. Then

    W_l w = sum_k a_k W_l e_k + |rest| g_l,    g_l = sum_k f_k <W_l^T f_k, e> + (1 - sum_k f_k f_k^T) normals

with e = rest / |rest|, and e and g_l are stored. Products with the transpose exchange the roles of e and f.

A vector that lies in the span up to rounding reveals nothing, and is not stored. Vectors are stored in blocks of
`BLOCK`, and a product reads only the blocks that are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..base.arrays import precise
from ..base.errors import InputError, require_memory
from .data import Population, Sample, Spread

# A product copies one block after the other. Small blocks have more overhead, and large ones leave the cache of a core.
# Blocks of 32 took the least time among 4, 8, 16, 32 and 64, for vectors of 20,000 numbers.
BLOCK = 32


class Revealed(eqx.Module):
    """Directions that products on one side of the matrices have revealed, and their images under the matrices.

    Attributes:
        basis: orthonormal vectors, in blocks; zero beyond `count`. All matrices have the same if S = 1.
        images: their images under every matrix.
        count: number of vectors so far. A product that reveals nothing new adds none.
    """

    basis: Float[Array, "blocks S block a"]
    images: Float[Array, "blocks L block b"]
    count: Int[Array, ""]

    @classmethod
    def none(cls, S: int, L: int, a: int, b: int, dtype: DTypeLike) -> Revealed:
        return cls(jnp.zeros((0, S, BLOCK, a), dtype), jnp.zeros((0, L, BLOCK, b), dtype), jnp.array(0, jnp.int32))

    def with_room(self, count: int) -> Revealed:
        """Return the same vectors, with room for `count` further ones behind those blocks that have room already."""

        def grown(a: Array) -> Array:
            return jnp.concatenate([a, jnp.zeros((-(-count // BLOCK), *a.shape[1:]), a.dtype)])

        return Revealed(grown(self.basis), grown(self.images), self.count)

    def fold(self, fn: Callable[[Array, Array, tuple], tuple], start: tuple) -> tuple:
        """Return ``fn(basis, images, state)`` after all blocks that are in use, one after the other."""

        def body(k: Int[Array, ""], state: tuple) -> tuple:
            basis, images = (lax.dynamic_index_in_dim(a, k, 0, False) for a in (self.basis, self.images))
            return fn(basis, images, state)

        return lax.fori_loop(0, (self.count + BLOCK - 1) // BLOCK, body, start)

    def extended(self, direction: Float[Array, "S a"], image: Float[Array, "L b"], is_new: Bool[Array, ""]) -> Revealed:
        """Return the vectors with one more, which is zero and does not count unless `is_new`."""
        zero = jnp.zeros_like(self.count)
        place = self.count // BLOCK, zero, self.count % BLOCK, zero

        def put(a: Array, v: Array) -> Array:
            return lax.dynamic_update_slice(a, v[None, :, None], place)

        return Revealed(put(self.basis, direction), put(self.images, image), self.count + is_new)


class Dice(eqx.Module):
    """Gaussian matrices, as far as products have revealed them.

    Attributes:
        right: what products with W_l have revealed. Its basis is one for all matrices (S = 1) where every w is the same
            for all of them.
        left: what products with the transposes have revealed.
        key: key of the normals; those of a product depend on the number of vectors before it, and on nothing else.
    """

    right: Revealed
    left: Revealed
    key: PRNGKeyArray

    @classmethod
    def new(cls, L: int, n: int, d: int, shared: bool, key: PRNGKeyArray, dtype: DTypeLike) -> Dice:
        """Return matrices of which nothing is revealed, without room for products.

        Args:
            shared: whether every w is the same for all matrices.
        """
        return cls(Revealed.none(1 if shared else L, L, d, n, dtype), Revealed.none(L, L, n, d, dtype), key)

    def with_room(self, count: int) -> Dice:
        """Return the same matrices, with room for `count` further products on each side."""
        return Dice(self.right.with_room(count), self.left.with_room(count), self.key)

    def product(self, w: Float[Array, "S d"]) -> tuple[Float[Array, "L n"], Dice]:
        """Return ``W_l w_l`` for every matrix, and what is revealed after it."""
        image, right = _product(self.right, self.left, w, jax.random.fold_in(self.key, 0))
        return image, Dice(right, self.left, self.key)

    def transposed_product(self, u: Float[Array, "L n"]) -> tuple[Float[Array, "L d"], Dice]:
        """Return ``W_l^T u_l`` for every matrix, and what is revealed after it."""
        image, left = _product(self.left, self.right, u, jax.random.fold_in(self.key, 1))
        return image, Dice(self.right, left, self.key)


@precise
def _product(
    side: Revealed, other: Revealed, v: Float[Array, "S a"], key: PRNGKeyArray
) -> tuple[Float[Array, "L b"], Revealed]:
    """Return the images of a vector, or of one for every matrix, and what this side has revealed after it.

    Args:
        side: what products on this side have revealed.
        other: what products with the transposes have revealed.
        v: the vector that all matrices multiply, or one for every matrix.
        key: key of this side.
    """

    def project(basis: Array, images: Array, state: tuple) -> tuple:
        rest, image = state
        a = _coefficients(basis, rest)
        return rest - _combined(a, basis), image + _combined(a, images)

    def reproject(basis: Array, _: Array, rest: tuple) -> tuple:
        return (rest[0] - _combined(_coefficients(basis, rest[0]), basis),)

    def condition(basis: Array, images: Array, fresh: tuple) -> tuple:
        a = _coefficients(images, direction) - _coefficients(basis, fresh[0])
        return (fresh[0] + _combined(a, basis),)

    L, b = side.images.shape[1], side.images.shape[3]
    normals = jax.random.normal(jax.random.fold_in(key, side.count), (L, b), v.dtype)
    rest, image = side.fold(project, (v, jnp.zeros_like(normals)))
    # One projection leaves rounding errors of the size of v along the basis, which may be much larger than the rest.
    (rest,) = side.fold(reproject, (rest,))
    size, norm = (jnp.linalg.norm(a, axis=1, keepdims=True) for a in (v, rest))
    is_new = norm > _ROUNDINGS * jnp.finfo(v.dtype).eps * size
    direction = jnp.where(is_new, rest / jnp.where(is_new, norm, 1.0), 0.0)
    (fresh,) = other.fold(condition, (normals,))
    fresh = jnp.where(is_new, fresh, 0.0)
    return image + norm * fresh, side.extended(direction, fresh, jnp.any(is_new))


# A rest of less than so many roundings of its vector is none. A larger number would not save vectors: in gradient
# descent the rests of later steps are a few times the least one that counts, whatever that is.
_ROUNDINGS = 100


def _coefficients(vectors: Float[Array, "S block a"], v: Float[Array, "R a"]) -> Float[Array, "L block"]:
    """Return the inner products of stored vectors with a vector; one set, or one vector, serves all matrices."""
    count = max(len(vectors), len(v))
    return jnp.stack([vectors[l % len(vectors)] @ v[l % len(v)] for l in range(count)])


def _combined(a: Float[Array, "R block"], vectors: Float[Array, "S block b"]) -> Float[Array, "L b"]:
    """Return linear combinations of stored vectors; one set, or one list of coefficients, serves all matrices."""
    count = max(len(vectors), len(a))
    return jnp.stack([a[l % len(a)] @ vectors[l % len(vectors)] for l in range(count)])


class DataOnDemand(Sample):
    """n sentences of L tokens in d dimensions, whose inputs are drawn while a run asks for their products.

    ``sample_data(..., stored=False)`` makes them. Every run starts with what the products with the teacher have
    revealed, and draws the rest of the sentences itself: runs from two starts share the teacher, the encodings, the
    teacher's fields and the noise, and have different sentences apart from that. A run that is repeated with more steps
    repeats its steps.

    Attributes:
        y, teacher, encodings, gamma, noise: as in `Data`.
        means, classes: None.
        dice: the matrices W_l, as far as the products with the teacher reveal them.
        spread: the devices that the sentences are spread over, or None.
    """

    y: Float[Array, "n L t"]
    dice: Dice
    spread: Spread | None = eqx.field(static=True, default=None)

    @classmethod
    def of(
        cls,
        teacher: Float[Array, "d t"],
        population: Population,
        noise: Float[Array, "L noise n"] | None,
        n: int,
        key: PRNGKeyArray,
    ) -> DataOnDemand:
        """Draw the teacher's fields of n sentences of a population, and leave the rest of their inputs open."""
        (d, t), gamma = teacher.shape, population.gamma
        dice = Dice.new(len(population.encodings), n, d, gamma.shape[1] == 1, key, gamma.dtype).with_room(t)
        fields, dice = _token_fields(gamma, teacher, dice)
        noise = None if noise is None else jnp.transpose(noise, (2, 0, 1))
        y = jnp.transpose(fields, (2, 0, 1))
        return cls(y, teacher, population.encodings, gamma, noise, None, None, dice)

    @property
    def count(self) -> int:
        return len(self.y)

    def stored(self, reason: str) -> NoReturn:
        requirement = f"must be stored {reason}, as sample_data stores them"
        raise InputError("data", f"{requirement}, got sentences drawn on demand: a run draws them and forgets them")

    def memory(self, products: int, steps: int) -> Dice:
        L, n, d, _ = self.shape
        count = (len(self.dice.right.basis[0]) + L) * d + 2 * L * n
        size = float(count) * (products + BLOCK) * self.dtype.itemsize
        require_memory(size, "steps", steps, "the products of so many steps with sentences drawn on demand")
        return spread_dice(self.dice.with_room(products), self.spread)

    @precise
    def student_fields(self, Q: Float[Array, "d r"], memory: Dice) -> tuple[Float[Array, "L r n"], Dice]:
        fields, memory = _token_fields(self.gamma, Q, memory)
        return fields + (self.encodings @ Q / self.shape[2] ** 0.5)[:, :, None], memory

    @precise
    def back_project(self, g: Float[Array, "L r n"], memory: Dice) -> tuple[Float[Array, "d r"], Dice]:
        columns, scale = [], self.shape[2] ** -0.5
        for a in range(g.shape[1]):
            product, memory = memory.transposed_product(g[:, a])
            column = jnp.sum(jnp.sqrt(self.gamma) * product, 0) + jnp.sum(g[:, a], 1) @ self.encodings
            columns.append(scale * column)
        return jnp.stack(columns, 1), memory

    def mean_squares(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return jnp.mean(self.gamma), jnp.mean(self.y**2)

    def spread_over(self, spread: Spread) -> DataOnDemand:
        noise = None if self.noise is None else spread(self.noise, 0)
        dice = spread_dice(self.dice, spread)
        return replace(self, y=spread(self.y, 0), noise=noise, dice=dice, spread=spread)

    @property
    def contents(self) -> str:
        return "drawn on demand"


def spread_dice(dice: Dice, spread: Spread | None) -> Dice:
    """Spread the vectors with an entry for every sentence over devices, if there are several."""
    if spread is None:
        return dice
    return eqx.tree_at(lambda s: (s.right.images, s.left.basis), dice, replace_fn=lambda a: spread(a, 3))


def _token_fields(
    gamma: Float[Array, "L #d"], Q: Float[Array, "d r"], dice: Dice
) -> tuple[Float[Array, "L r n"], Dice]:
    """Return the fields ``x_l^T Q / sqrt(d)`` without those of the encodings, and what is revealed after them."""
    columns, scale = [], (gamma / len(Q)) ** 0.5
    for a in range(Q.shape[1]):
        # One vector serves all tokens if their covariances are multiples of the identity.
        w, factor = (Q[None, :, a], scale) if gamma.shape[1] == 1 else (scale * Q[:, a], 1.0)
        product, dice = dice.product(w)
        columns.append(factor * product)
    return jnp.stack(columns, 1), dice
