"""Starts of message passing and training: named ones, and the spectral one, which needs neither teacher nor luck."""

from __future__ import annotations

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse.linalg import lobpcg_standard
from jaxtyping import Array, Float, PRNGKeyArray, Real

from ..base.errors import InputError, is_concrete, require, require_key, require_positive
from ..base.linalg import precise
from ..base.types import AnyArray, Number
from ..bayes.channel import labels_at_nodes
from ..bayes.fixed_points import averages_of, has_closed_form
from ..bayes.recovery import thresholds
from ..bayes.spectral import check_spectral, label_matrix
from ..model.checks import check
from ..model.model import Model
from .data import Data, Sample
from .estimate import check_estimate, check_fit
from .products import back_project, student_fields

STARTS = "semantic", "positional", "random", "spectral"
_STEPS = 200  # of the eigenvalue solver


def start(
    model: Model,
    data: Sample,
    init: str | Real[AnyArray, "d r"],
    key: PRNGKeyArray | None = None,
    scale: Number | None = None,
) -> Float[Array, "d r"]:
    """Return a start for GAMP or training, (d, r).

    Args:
        init: "semantic", the teacher; "positional", along the first principal direction of the encodings; "spectral",
            along a direction that is computed from inputs and labels alone, see `spectral_direction`; "random",
            Gaussian; or an array (d, r). Columns that a named start does not set are small and random.
        key: random key; by default that of seed 0.
        scale: norm of the columns divided by sqrt(d); by default .25 for "positional" and 1 otherwise. The published
            positional start has norm one: ``scale=d**-0.5``.

    Raises:
        InputError: if the name is unknown, the array has the wrong shape, or the start needs a teacher or encodings
            that the data lack; or as `spectral_direction`.
    """
    if not isinstance(init, str):
        return check_estimate("init", model, data, init)
    if init not in STARTS:
        names = ", ".join(map(repr, STARTS))
        raise InputError("init", f"must be {names} or a (d, r) array, got init={init!r}")
    init = str(init)
    check_fit(model, data)
    if init != "spectral":  # the spectral start has its own checks
        check(model, even=False)
    key = jax.random.key(0) if key is None else key
    require_key(key)
    size = scale if scale is not None else 0.25 if init == "positional" else 1.0
    require_positive(size, "scale")
    if init == "positional" and is_concrete(data.encodings):
        has_encodings = np.any(np.asarray(data.encodings) != 0)
        require(has_encodings, "init", init, "'semantic', 'random' or an array for data without encodings")
    threshold = None
    if init == "spectral":
        threshold = _weak_recovery(model, data.stored("for a spectral start"))
    return _named_start(model, data, init, key, jnp.asarray(size, data.dtype), threshold)


@eqx.filter_jit
@precise
def _named_start(
    model: Model,
    data: Sample,
    init: str,
    key: PRNGKeyArray,
    size: Float[Array, ""],
    threshold: Float[Array, ""] | None,
) -> Float[Array, "d r"]:
    d, r = data.shape[2], model.shape[1]
    noise = jax.random.normal(key, (d, r), data.dtype)
    if init == "random":
        return noise * size
    semantic, positional = model.start_columns(combined=False)
    if init == "semantic":
        otherwise = ", or another start, such as init='random'"
        directions, columns = data.known_teacher("for init='semantic'", otherwise), semantic
    elif threshold is not None:  # the spectral start
        directions = _leading_direction(model, data.stored("for a spectral start"), noise[:, :1], threshold)
        columns = semantic
    else:
        coefficients = jnp.linalg.eigh(data.encodings @ data.encodings.T)[1][:, -1]
        direction = coefficients @ data.encodings * jnp.where(coefficients[0] < 0, -1.0, 1.0)
        directions, columns = (direction / jnp.linalg.norm(direction) * d**0.5)[:, None], positional[:, None]
    return directions @ columns.T * size + jnp.where(jnp.any(columns, 1), 0.0, 0.1 * noise)


def _weak_recovery(model: Model, data: Data) -> Float[Array, ""]:
    """Return the alpha of weak recovery, and warn if the data have less: a spectral start is then blind.

    Raises:
        InputError: as `tiedattn_jax.spectral_overlap`.
    """
    check_spectral(model)
    threshold = jnp.mean(thresholds(model, averages_of(model, None), has_closed_form(model)))
    if is_concrete(threshold) and data.alpha <= float(threshold):
        message = f"the spectral start is blind at alpha = {data.alpha:.4g}, below weak recovery at {threshold:.4g}"
        warnings.warn(f"{message}: it is a random direction", stacklevel=3)
    return threshold


def spectral_direction(model: Model, data: Sample, key: PRNGKeyArray | None = None) -> Float[Array, "d 1"]:
    """Return a direction of norm sqrt(d) that overlaps with the teacher, from inputs and labels alone.

    It is the leading eigenvector of ``sum_mu sum_{l l'} x_l T(O^mu)_{l l'} x_{l'}^T / d``, where T processes what the
    label O says of the teacher's fields, see `tiedattn_jax.bayes.spectral`. The matrix is never built: its products
    with a vector take two passes over the data. The sign is arbitrary. For large d the cosine with the teacher is
    `tiedattn_jax.spectral_overlap`.

    Args:
        key: random key of the first vector; by default that of seed 0.

    Raises:
        InputError: as `tiedattn_jax.spectral_overlap`.
    """
    check_fit(model, data)
    data = data.stored("for a spectral start")
    threshold = _weak_recovery(model, data)
    first = jax.random.normal(jax.random.key(0) if key is None else key, (data.shape[2], 1), data.x.dtype)
    return _leading_direction(model, data, first, threshold)


@eqx.filter_jit
@precise
def _leading_direction(
    model: Model, data: Data, first: Float[Array, "d 1"], threshold: Float[Array, ""]
) -> Float[Array, "d 1"]:
    d = data.shape[2]
    c = jnp.sqrt(jnp.maximum(data.alpha / threshold, 1.01))  # c + G stays positive
    matrices = jax.vmap(lambda label: label_matrix(model, label, c), out_axes=-1)(labels_at_nodes(model, data.fields))
    encodings = data.encodings / d**0.5

    def product(v: Array) -> Array:
        fields = student_fields(data.x, v) - (encodings @ v)[..., None]
        u = jnp.einsum("kln,lan->kan", matrices, fields)
        return back_project(data.x, u) - jnp.einsum("li,lan->ia", encodings, u)

    direction = lobpcg_standard(product, first, m=_STEPS)[1]
    return direction * d**0.5
