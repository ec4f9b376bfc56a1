"""Averages for the Bayes-optimal learner: nodes of two draws of the teacher's fields."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..averages.default import smooth_nodes
from ..averages.nodes import sobol_nodes
from ..averages.rule import Rule
from ..model.law import SpectralLaw
from ..model.model import Model

# A tensor grid without its smallest weights. At the standard setting the test error is then
# accurate to 3e-6.
_ORDER, _LEAST_WEIGHT = 12, 1e-10
_NODES, _GRID_NODES = 2**13, 2**11  # fewer where each label has a grid of preimages


class PosteriorPair(Model):
    """A model whose student is a second teacher: another draw from the posterior of the first one.

    It gives averaging rules their fields: ``ta.sobol_nodes(ta.posterior_pair(model), 2**16)``. Its loss is the squared
    difference of two targets; on average over two such draws it is twice the test error of the optimal predictor.
    """

    base: Model

    @property
    def shape(self) -> tuple[int, int, int]:
        L, _, t = self.base.shape
        return L, t + self.base.noise, t

    @property
    def noise(self) -> int:
        return self.base.noise

    def loss(self, Z: Float[Array, "L r"], Y: Float[Array, "L t"], *noise: Float[Array, "L k"]) -> Float[Array, ""]:
        difference = self.base.target(*self.base.label(Z)) - self.base.target(Y, *noise)
        return 0.5 * jnp.sum(self.base.trace * difference**2)

    def law(self) -> SpectralLaw:
        return self.base.law()


def posterior_pair(model: Model) -> PosteriorPair:
    """Return the pair of teachers that averaging rules for `bayes` are made for."""
    return PosteriorPair(base=model, lam=model.lam)


def default_rule(model: Model, closed_form: bool, spacing: float) -> Rule:
    """Return the default averages: a tensor grid where only smooth functions of few fields are averaged, else Sobol."""
    pair = posterior_pair(model)
    if closed_form:
        return smooth_nodes(pair, _ORDER, _NODES, least_weight=_LEAST_WEIGHT, replicates=3)
    return sobol_nodes(pair, _GRID_NODES if spacing else _NODES)
