"""Preimages of a label: the teacher's fields that are compatible with it."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import InputError

_ANGLES = 128  # rotations of a teacher of two columns, on a grid


class Preimages(eqx.Module):
    """The teacher's fields that a label leaves possible: with probability ``weight_k`` they are near ``fields_k``.

    A label O that an optimal learner sees is a function of noisy fields ``U = Y + noise``. Then
    ``p(O | Y) = sum_k weight_k prod_l N(fields_kl; Y_l, noise I)`` up to a factor that does not depend on Y.

    Attributes:
        fields: the possible values of U, (K, L, t). Every one of them must lead to the same set.
        log_weight: logarithms of their weights, which contain the Jacobian of the target, (K,).
        noise: variance of the noise of a field; zero if labels are exact.
        spacing: distance of neighbouring fields over the size of a field, for a grid on a continuous set; zero for a
            finite set. States whose V is smaller than the grid resolves have the status `unresolved`.
        signs: whether the set is U and -U, for a teacher of one column. Averages then have a closed form.
    """

    fields: Float[Array, "K L t"]
    log_weight: Float[Array, " K"]
    noise: Float[Array, ""]
    spacing: float = eqx.field(static=True, default=0.0)
    signs: bool = eqx.field(static=True, default=False)


def orbit(U: Float[Array, "L t"], noise: float | Float[Array, ""] = 0.0) -> Preimages:
    """Return the preimages of a target that is injective up to rotations and reflections of the teacher's columns.

    For one column these are U and -U. For two columns they are the group O(2), on a grid of angles.

    Args:
        U: the teacher's fields, with their noise if there is any.
        noise: variance of this noise.

    Raises:
        InputError: the teacher has more than two columns.
    """
    t = U.shape[1]
    if t > 2:
        raise InputError("model", f"must declare `preimages(Y)` for a teacher of more than two columns, got t = {t}")
    if t == 1:
        rotations = np.array([[[1.0]], [[-1.0]]])
    else:
        angle = 2 * np.pi * np.arange(_ANGLES) / _ANGLES
        turns = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(-1, 2, 2)
        rotations = np.concatenate([turns, turns @ np.diag([1.0, -1.0])])
    fields = jnp.einsum("la,kab->klb", U, jnp.asarray(rotations, U.dtype))
    weight = jnp.full(len(rotations), -np.log(len(rotations)), U.dtype)
    spacing = 0.0 if t == 1 else 2 * np.pi / _ANGLES
    return Preimages(fields, weight, jnp.asarray(noise, U.dtype), spacing, signs=t == 1)
