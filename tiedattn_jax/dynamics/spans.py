"""Averages over the teacher's fields and fluctuations along encodings, for students in the span of these directions."""

from __future__ import annotations

import equinox as eqx
from jaxtyping import Array, Float

from ..averages.nodes import gauss_hermite_nodes, sobol_nodes
from ..averages.rule import Rule
from ..model.law import SpectralLaw
from ..model.model import Model

# Order of a tensor grid by the number of fields; beyond four of them Sobol points.
_ORDERS = {1: 96, 2: 64, 3: 32, 4: 18}
_NODES = 2**15


class SpanFields(Model):
    """A model whose student's fields are the tokens' fluctuations along some directions: it gives rules their fields.

    Attributes:
        base: the model.
        directions: number of directions.
    """

    base: Model
    directions: int = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, int, int]:
        L, _, t = self.base.shape
        return L, self.directions, t

    @property
    def noise(self) -> int:
        return self.base.noise

    def loss(self, Z: Float[Array, "L r"], Y: Float[Array, "L t"], *noise: Float[Array, "L k"]) -> Float[Array, ""]:
        raise NotImplementedError("these fields have no loss of their own")

    def law(self) -> SpectralLaw:
        return self.base.law()


def span_fields(model: Model, directions: int) -> SpanFields:
    """Return the fields of `model` that averages are over, for so many directions of the encodings."""
    return SpanFields(base=model, directions=directions, lam=model.lam)


def smooth_rule(model: Model, directions: int) -> Rule:
    """Return the default averages of smooth functions: a tensor grid for few fields, else Sobol points."""
    view = span_fields(model, directions)
    fields = view.shape[0] * sum(view.columns)
    order = _ORDERS.get(fields)
    return sobol_nodes(view, _NODES) if order is None else gauss_hermite_nodes(view, order, replicates=3)
