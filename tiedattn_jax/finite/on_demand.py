"""Sentences whose inputs are never stored: their products are drawn while message passing or training asks for them.

# notation: as in `data`; X_l = W_l diag(gamma_l / d)^{1/2} + p_l / sqrt(d), with standard normals W_l (n, d)
"""

from __future__ import annotations

from typing import NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..base.errors import InputError, as_flag, require_key, require_memory
from ..base.linalg import precise
from ..base.printing import Description
from ..base.types import Number
from ..model.checks import check
from ..model.model import Model
from .data import Sample, Spread, shard
from .dice import BLOCK, Dice
from .sampling import atom_sizes, draw_population, noise_fields, sentence_count


class DataOnDemand(Sample):
    """n sentences of L tokens in d dimensions, whose inputs are drawn while a run asks for their products.

    `sample_on_demand` makes them. Every run starts with what the products with the teacher have revealed, and draws the
    rest of the sentences itself: runs from two starts share the teacher, the encodings, the teacher's fields and the
    noise, and have different sentences apart from that. A run that is repeated with more steps repeats its steps.

    Attributes:
        y, teacher, encodings, gamma, noise: as in `Data`.
        means, classes: None.
        dice: the matrices W_l, as far as the products with the teacher reveal them.
        spread: the devices that the sentences are spread over, or None.
    """

    y: Float[Array, "n L t"]
    dice: Dice
    spread: Spread | None = eqx.field(static=True, default=None)

    @property
    def count(self) -> int:
        return len(self.y)

    def stored(self, reason: str) -> NoReturn:
        requirement = f"must be stored {reason}, as sample_data stores them"
        raise InputError("data", f"{requirement}, got sentences of sample_on_demand: a run draws them and forgets them")

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
        return DataOnDemand(
            spread(self.y, 0),
            self.teacher,
            self.encodings,
            self.gamma,
            noise,
            None,
            None,
            spread_dice(self.dice, spread),
            spread,
        )

    def describe(self) -> Description:
        L, n, d, _ = self.shape
        shape = f"{n} sentences of {L} tokens in {d} dimensions, alpha = {n / d:g}, {self.dtype}"
        return Description(f"{shape}, drawn on demand")


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


def sample_on_demand(
    model: Model, d: int, alpha: Number, key: PRNGKeyArray, *, normalise: bool = False
) -> DataOnDemand:
    """Draw a sample of a model in d dimensions whose sentences are not stored but drawn on demand.

    `gamp` and `train` take it in place of the `Data` of `sample_data`. They touch the inputs only through products with
    a few vectors, which can be drawn one by one, see `tiedattn_jax.finite.dice`. The law of a run is exactly that of
    one on stored sentences, for every n and d. A run of T steps with a student of r columns and t teacher fields needs
    ``(2 L n + (L + 1) d) (t + r T)`` numbers (2 L d in place of (L + 1) d if the covariances are not multiples of the
    identity), and a time that grows like T^2. Stored sentences need ``L n d`` numbers.

    Args:
        model: model whose law is drawn from; its tokens must have no classes.
        d, alpha, normalise: as in `sample_data`.
        key: random key of the sample and of all sentences; `vmap` over keys gives several instances.

    Raises:
        InputError: as `sample_data`, or if the tokens of the model have classes.
    """
    check(model, even=False)
    if model.law().sentences is not None:
        raise InputError("model", "must have no classes of tokens for sentences drawn on demand: use sample_data")
    n = sentence_count(model, d, alpha, stored=False)
    require_key(key)
    return _draw(model, atom_sizes(model.law(), int(d)), n, key, as_flag(normalise, "normalise"))


@eqx.filter_jit
@precise
def _draw(model: Model, counts: tuple[int, ...], n: int, key: PRNGKeyArray, normalise: bool) -> DataOnDemand:
    key_teacher, key_tokens = jax.random.split(key)
    teacher, population = draw_population(model, counts, key_teacher, normalise)
    (d, t), L, gamma = teacher.shape, model.shape[0], population.gamma
    dice = Dice.new(L, n, d, gamma.shape[1] == 1, jax.random.fold_in(key_tokens, 3), gamma.dtype).with_room(t)
    fields, dice = _token_fields(gamma, teacher, dice)
    noise = jnp.transpose(noise_fields(model, n, key_tokens), (2, 0, 1)) if model.noise else None
    y = jnp.transpose(fields, (2, 0, 1))
    return shard(DataOnDemand(y, teacher, population.encodings, gamma, noise, None, None, dice))
