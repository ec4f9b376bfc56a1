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
from ..model import Model, check, check_provides
from ..theory.observables import target_at_nodes
from .data import Data, Labels, shard, student_fields, token_gram

# Of the inputs x, in memory together while they are drawn: on CPUs as measured, on others at the least.
_COPIES = {"cpu": 6}


def sample_data(model: Model, d: int, alpha: Any, key: jax.Array, *, normalise: bool = False) -> Data:
    """Sentences, positional encodings, teacher and labels of a model in d dimensions.

    Tokens are Gaussian with the covariances of the model. Encodings and teacher have exactly the inner products of the
    model's spectral law, the first encoding lies along the vector of ones, and the teacher is exactly orthogonal to
    the encodings where the law says so. The norm of the teacher is left to chance, as in the paper, unless `normalise`;
    most of the scatter between instances comes from it, see `realised`. With several devices the sentences are spread
    over them, see `shard`.

    Args:
        model: its law says what is drawn. Exact labels are kept where the model has `target`.
        d: dimension, at least L + t.
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
    counts, least = _shares(model.law().weights, int(d)), model.shape[0] + model.shape[2]
    if min(counts) < least:
        raise InputError("d", f"must leave L + t = {least} coordinates to every atom of the spectral law, got d={d}")
    return _draw(model, counts, n, key, normalise)


def sentence_count(model: Model, d: int, alpha: Any, instances: int = 1) -> int:
    """The integer nearest to ``alpha d``.

    Raises:
        InputError: as `sample_data`, also where so many instances together do not fit into memory.
    """
    L, _, t = model.shape
    require_count(d, "d", max(2, L + t))
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
    atoms = zip(keys, counts, law.tau, law.pi, law.cross, strict=True)
    tau, teacher = (jnp.concatenate(parts) for parts in zip(*(_directions(*a, normalise) for a in atoms), strict=True))
    encodings = tau.T / d**0.5
    gamma = law.gamma.T if len(counts) == 1 else jnp.repeat(law.gamma, np.array(counts), 0, total_repeat_length=d).T
    return shard(draw_sentences(model, teacher, encodings, gamma.astype(model.lam.dtype), n, key_tokens))


def _directions(
    key: jax.Array, size: int, tau: jax.Array, pi: jax.Array, cross: jax.Array, normalise: bool
) -> tuple[jax.Array, jax.Array]:
    """Projections of encodings (size, L) and teacher (size, t) on `size` eigenvectors, of the given second moments."""
    L, t = cross.shape
    normal = jax.random.normal(key, (size, L + t), tau.dtype).at[:, 0].set(1.0)
    basis, triangle = jnp.linalg.qr(normal)
    basis = basis * jnp.sign(jnp.diagonal(triangle)) * size**0.5
    values, vectors = jnp.linalg.eigh(tau)
    values, vectors = jnp.maximum(values[::-1], 0.0), vectors[:, ::-1]
    vectors = vectors * jnp.where(vectors[0] < 0, -1.0, 1.0)
    encodings = basis[:, :L] @ (vectors * jnp.sqrt(values)).T
    keep = values > 1e-6 * values[0]
    slope = (vectors * jnp.where(keep, 1 / jnp.where(keep, values, 1.0), 0.0)) @ vectors.T @ cross
    span = basis[:, :L]
    free = normal[:, L:] - span @ (span.T @ normal[:, L:]) / size
    own = (basis[:, L:] if normalise else free) @ jnp.linalg.cholesky(pi - slope.T @ tau @ slope).T
    return encodings, encodings @ slope + own


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
