"""Sentences drawn from a model in finite dimension, and their exact labels.

# notation: as in `data`; pi and tau are the projections of teacher and encodings on an eigenvector of the covariances.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, is_concrete, require, require_count, require_key, require_memory, require_positive
from ..model import Model, SpectralLaw, check, check_provides
from ..theory.observables import target_at_nodes
from .data import Data, Labels, shard, student_fields, token_gram

# Of the inputs x, in memory together while they are drawn: on CPUs as measured, on others at the least.
_COPIES = {"cpu": 6}


def sample_data(model: Model, d: int, alpha: Any, key: jax.Array, *, normalise: bool = False) -> Data:
    """Sentences, positional encodings, teacher and labels of a model in d dimensions.

    Tokens are Gaussian with the covariances of the model. Encodings and teacher have exactly the inner products of the
    model's spectral law, and the teacher is exactly orthogonal to the encodings where the law says so. The means of the
    law lie along the vector of ones; where it says none, the first principal direction of the encodings does. The norm
    of the teacher is left to chance, as in the paper, unless `normalise`; most of the scatter between instances comes
    from it, see `realised`. With several devices the sentences are spread over them, see `shard`.

    Args:
        model: its law says what is drawn. Exact labels are kept where the model has `target`.
        d: dimension, at least L + t + 1.
        alpha: samples per dimension: n is the integer nearest to ``alpha d``. A Python number.
        key: of the draw; `vmap` over keys gives several instances.
        normalise: whether ``Q*^T Q* / d`` is exactly the model's.

    Raises:
        InputError: `d` or `alpha` too small or not a number; sentences that do not fit into memory.
    """
    if is_concrete(model):
        check(model, even=False)
    n = sentence_count(model, d, alpha)
    require_key(key)
    counts, least = _shares(model.law().weights, int(d)), model.shape[0] + model.shape[2] + 1
    if min(counts) < least:
        raise InputError(
            "d", f"must leave L + t + 1 = {least} coordinates to every atom of the spectral law, got d={d}"
        )
    return _draw(model, counts, n, key, normalise)


def sentence_count(model: Model, d: int, alpha: Any, instances: int = 1) -> int:
    """The integer nearest to ``alpha d``.

    Raises:
        InputError: as `sample_data`, also where so many instances together do not fit into memory.
    """
    L, _, t = model.shape
    require_count(d, "d", L + t + 1)
    require_positive(alpha, "alpha")
    if not is_concrete(alpha):
        raise InputError("alpha", "must be a Python number, got a traced array: it sets the shape of the data")
    n = float(alpha) * d
    size = _COPIES.get(jax.default_backend(), 2) * instances * n * L * d * model.lam.dtype.itemsize
    require_memory(size, "d", d, f"drawing alpha d = {n:.3g} sentences")
    require(round(n) >= 1, "alpha", alpha, f"at least 1 / d = {1 / d}, for one sentence or more")
    return round(n)


def _shares(weights: jax.Array, d: int) -> tuple[int, ...]:
    """How many of d coordinates each atom of the spectral law gets."""
    if weights.shape[0] == 1:
        return (d,)
    if not is_concrete(weights):
        raise InputError("weights", "of several atoms must be known when data are drawn, got traced ones")
    edges = np.round(np.cumsum(np.asarray(weights, float)) * d).astype(int)
    return tuple(int(c) for c in np.diff(edges, prepend=0))


@eqx.filter_jit
def _draw(model: Model, counts: tuple[int, ...], n: int, key: jax.Array, normalise: bool) -> Data:
    d, law = sum(counts), model.law()
    key_teacher, key_tokens = jax.random.split(key)
    keys = jax.random.split(key_teacher, len(counts))
    atoms = zip(keys, counts, _atoms(law), strict=True)
    tau, teacher = (jnp.concatenate(parts) for parts in zip(*(_directions(*a, normalise) for a in atoms), strict=True))
    encodings = tau.T / d**0.5
    gamma = law.gamma.T if len(counts) == 1 else jnp.repeat(law.gamma, np.array(counts), 0, total_repeat_length=d).T
    return shard(draw_sentences(model, teacher, encodings, gamma.astype(model.lam.dtype), n, key_tokens))


def _directions(key: jax.Array, size: int, atom: SpectralLaw, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """Projections of encodings (size, L) and teacher (size, t) on the `size` eigenvectors of one atom of the law."""
    L, t = atom.cross.shape
    normal = jax.random.normal(key, (size, L + t), atom.tau.dtype)
    # Ones, L - 1 normals for the encodings, t for the teacher, and one more for encodings with L random directions.
    columns = jnp.concatenate([jnp.ones((size, 1), normal.dtype), normal[:, 1:], normal[:, :1]], 1)
    basis, triangle = jnp.linalg.qr(columns)
    basis = basis * jnp.sign(jnp.diagonal(triangle)) * size**0.5
    tau_mean, pi_mean = atom.tau_mean, atom.pi_mean
    if tau_mean is None or pi_mean is None:
        values, vectors = _principal(atom.tau)
        tau_mean = vectors[:, 0] * jnp.sqrt(values[0])
        pi_mean = vectors[:, 0] @ atom.cross / jnp.sqrt(jnp.where(values[0] > 0, values[0], 1.0))
    values, vectors = _principal(atom.tau - jnp.outer(tau_mean, tau_mean))
    keep = values > 100 * jnp.finfo(values.dtype).eps * jnp.trace(atom.tau)
    values = jnp.where(keep, values, 0.0)
    random = jnp.concatenate([basis[:, 1:L], basis[:, -1:]], 1) @ (vectors * jnp.sqrt(values)).T
    cross = atom.cross - jnp.outer(tau_mean, pi_mean)
    slope = (vectors * jnp.where(keep, 1 / jnp.where(keep, values, 1.0), 0.0)) @ vectors.T @ cross
    span = basis[:, :L]
    free = normal[:, L:] - span @ (span.T @ normal[:, L:]) / size
    values, vectors = _principal(atom.pi - jnp.outer(pi_mean, pi_mean) - slope.T @ cross)
    root = jnp.linalg.qr((vectors * jnp.sqrt(values)).T)[1]  # Cholesky's, also of a singular matrix
    own = (basis[:, L:-1] if normalise else free) @ (jnp.sign(jnp.diagonal(root))[:, None] * root)
    return tau_mean + random, pi_mean + random @ slope + own


def _principal(moments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Principal values, the largest first, and directions of a positive semidefinite matrix."""
    values, vectors = jnp.linalg.eigh(moments)
    vectors = vectors[:, ::-1]
    return jnp.maximum(values[::-1], 0.0), vectors * jnp.where(vectors[0] < 0, -1.0, 1.0)


def _atoms(law: SpectralLaw) -> list[SpectralLaw]:
    """The law at each of its atoms, arrays without the leading axis."""
    return [jax.tree.map(lambda a, k=k: a[k], law) for k in range(len(law.weights))]


def draw_sentences(
    model: Model, teacher: jax.Array, encodings: jax.Array, gamma: jax.Array, n: int, key: jax.Array
) -> Data:
    """n sentences with the model's labels, of given teacher (d, t), encodings (L, d), variances (L, d) or (L, 1)."""
    L, d = encodings.shape
    noise = jax.random.normal(key, (L, n, d), gamma.dtype) * jnp.sqrt(gamma[:, None] / d)
    y = jnp.transpose(student_fields(noise, teacher), (2, 0, 1))
    x = noise + encodings[:, None] / d**0.5
    return Data(x, y, teacher, encodings, gamma, _labels(model, x, y, encodings))


def _labels(model: Model, x: jax.Array, y: jax.Array, encodings: jax.Array) -> Labels | None:
    """`Labels` of ``y = T(Y) x``, from inner products alone; None for a model without `target`."""
    if not model.provides("target"):
        return None
    target = target_at_nodes(model, jnp.transpose(y, (1, 2, 0)))
    d = x.shape[2]
    gram = token_gram(x)
    # p_k . x~_l / d, with the encodings in the place of an estimate.
    shift = jnp.swapaxes(student_fields(x, encodings.T), 0, 1) / d**0.5
    inner = gram - shift  # x_k . x~_l / d
    tokens = inner - jnp.swapaxes(shift, 0, 1) + (encodings @ encodings.T / d)[..., None]  # x_k . x_l / d
    return Labels(
        energy=jnp.einsum("akn,kln,aln->n", target, tokens, target),
        cross=jnp.einsum("akn,kln->aln", target, inner),
        gram=gram,
    )


def raw_labels(model: Model, data: Data) -> jax.Array:
    """Exact labels ``T(Y) x`` of the sentences, (n, L, d).

    Raises:
        InputError: the model has no `target`.
    """
    check_provides(model, "target", "for exact labels")
    target = target_at_nodes(model, data.fields)
    return jnp.einsum("kln,nli->nki", target, data.inputs())


def realised(model: Model, data: Data) -> Model:
    """The model with the teacher's norm that was drawn: what theory is to be compared with on this one instance.

    Overlaps of one instance fluctuate mostly through ``rho = Q*^T Sigma Q* / d``.

    Raises:
        InputError: the model has no `with_teacher`, or the data have no teacher.
    """
    check_provides(model, "with_teacher", "to be given the teacher that was drawn")
    return model.with_teacher(data.teacher_gram)
