"""Averages over the teacher's fields and fluctuations along encodings, for students in the span of these directions."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..averages.default import smooth_nodes
from ..averages.rule import Rule
from ..base.errors import InputError, is_concrete, require, with_values
from ..base.linalg import precise
from ..model.checks import check
from ..model.law import SpectralLaw
from ..model.model import Model

# Order of a tensor grid by the number of fields; beyond four of them there are Sobol points.
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


def span_fields(model: Model, directions: int | None = None) -> SpanFields:
    """Return the fields that averaging rules for `population` are made for: ``ta.sobol_nodes(ta.span_fields(model))``.

    Args:
        model: the model.
        directions: number of orthonormal directions of the encodings; by default that of the model's encodings.
    """
    if directions is None:
        directions = directions_of(model) or model.shape[0]
    return SpanFields(base=model, directions=directions, lam=model.lam)


def directions_of(model: Model) -> int | None:
    """Return the number of orthonormal directions of the encodings; None while jax traces the law that has them."""
    encodings = getattr(model, "encodings", None)
    if encodings is not None:
        return encodings.shape[1]
    tau = model.law().tau[0]
    if not is_concrete(tau):
        return None
    with with_values():
        gram = np.asarray(tau)
        return max(1, int(np.linalg.matrix_rank(gram, hermitian=True, tol=1e-6 * np.abs(gram).max())))


def smooth_rule(fields: SpanFields) -> Rule:
    """Return the default averages of smooth functions: a tensor grid for few fields, else Sobol points."""
    order = _ORDERS.get(fields.shape[0] * sum(fields.columns), 0)
    return smooth_nodes(fields, order, _NODES, replicates=3)


def check_smooth(model: Model, purpose: str, *, even: bool = True) -> None:
    """Raise an `InputError` unless `model` has a smooth loss, even if that is required, and no penalty."""
    check(model, even=even)
    if model.nonsmooth:
        raise InputError("model", f"must have a loss without kinks for {purpose}, got {type(model).__name__}")
    if model.penalty is not None:
        raise InputError("model", f"must have no penalty besides the ridge for {purpose}, got {model.penalty!r}")


def check_independent(model: Model, purpose: str) -> None:
    """Raise an `InputError` unless `model` has independent tokens, and a teacher without the encodings' directions."""
    law = model.law()
    if law.sentences is not None:
        raise InputError("model", f"must have independent tokens for {purpose}, got classes of tokens")
    if is_concrete(model):
        with with_values():
            cross = np.asarray(model.law().cross)
        require(np.abs(cross) < 1e-6, "law.cross", cross, "zero: a teacher that is orthogonal to the encodings")


def check_one_eigenvalue(model: Model) -> None:
    """Raise an `InputError` unless every covariance of `model` is a multiple of the identity."""
    atoms = len(model.law().weights)
    require(atoms == 1, "model", f"{atoms} atoms", "a model whose covariances have one eigenvalue each")


@jax.custom_jvp
def encodings_on_directions(tau: Float[Array, "L L"], directions: Float[Array, " e"]) -> Float[Array, "L e"]:
    """Return encodings on orthonormal directions: P with ``P P^T = tau``, of as many columns as `directions` has.

    The derivative is for changes of tau that keep its rank.
    """
    values, vectors = jnp.linalg.eigh(tau)
    e = directions.shape[0]
    return vectors[:, -e:] * jnp.sqrt(jnp.maximum(values[-e:], 0.0))


@encodings_on_directions.defjvp
@precise
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    P = encodings_on_directions(*primals)
    change = tangents[0] @ jnp.linalg.pinv(P, rtol=1e-6).T
    return P, change - 0.5 * P @ jnp.linalg.pinv(P, rtol=1e-6) @ change
