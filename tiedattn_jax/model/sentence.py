"""One kind of sentences, seen from its tokens."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.linalg import precise


class Sentence(eqx.Module):
    """One kind of sentences: its share, and two maps between numbers of the classes and numbers of its tokens.

    `Sentence()` is that of a law without classes: its share is one, and both maps leave the numbers unchanged.

    Attributes:
        indicator: one at the class of every token, zero elsewhere; None without classes.
        share: share of this kind among all sentences.
    """

    indicator: Float[Array, "L S"] | None = None
    share: Float[Array, ""] | float = 1.0

    @precise
    def to_tokens(self, classes: Float[Array, " S *rest"]) -> Float[Array, " _ *rest"]:
        """Turn arrays over the classes into arrays over the tokens."""
        return classes if self.indicator is None else jnp.tensordot(self.indicator, classes, 1)

    @precise
    def to_classes(self, tokens: Float[Array, " ..."], axis: int = 0) -> Float[Array, " ..."]:
        """Apply the transpose of `to_tokens` along an axis: sum over the tokens of each class."""
        if self.indicator is None:
            return tokens
        return jnp.moveaxis(jnp.tensordot(self.indicator, tokens, ((0,), (axis,))), 0, axis)
