"""Sentences drawn from a model in finite dimension, and the starts of runs on them.

# notation: as in `data`; pi and tau are the projections of teacher and encodings on an eigenvector of the covariances.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse.linalg import lobpcg_standard
from jaxtyping import Array, Float, Int, PRNGKeyArray, Real

from ..base.arrays import AnyArray, Number, indexed, precise
from ..base.errors import (
    InputError,
    as_flag,
    is_concrete,
    require,
    require_count,
    require_key,
    require_memory,
    require_positive,
)
from ..bayes.channel import labels_at_nodes
from ..bayes.thresholds import label_matrix, spectral_threshold
from ..model.checks import check, check_provides
from ..model.law import SpectralLaw
from ..model.model import Model
from ..theory.observables import target_at_nodes
from .data import Data, Labels, Population, Sample
from .diagnosis import check_estimate, check_fit
from .on_demand import DataOnDemand
from .products import student_fields, token_gram, weight_unit

# Peak number of copies of the inputs x in memory while they are drawn: measured on CPUs; 2, a lower bound, elsewhere.
_COPIES = {"cpu": 6}


@overload
def sample_data(
    model: Model, d: int, alpha: Number, key: PRNGKeyArray, *, normalise: bool = ..., stored: Literal[True] = ...
) -> Data: ...


@overload
def sample_data(
    model: Model, d: int, alpha: Number, key: PRNGKeyArray, *, normalise: bool = ..., stored: Literal[False]
) -> DataOnDemand: ...


def sample_data(
    model: Model, d: int, alpha: Number, key: PRNGKeyArray, *, normalise: bool = False, stored: bool = True
) -> Data | DataOnDemand:
    """Draw sentences, positional encodings, teacher and labels of a model in d dimensions.

    Tokens are Gaussian with the covariances of the model. The inner products of the encodings with each other and with
    the teacher are exactly those of the model's spectral law. The norm of the teacher is random, as in the paper,
    unless `normalise` is set; its mean square is the model's. It causes most of the scatter between instances, see
    `realised`. The means `tau_mean` and `pi_mean` of the law lie along the vector of ones; for a law without them the
    first principal direction of the encodings lies along it. With several devices the sentences are spread over them,
    see `Data.shard`.

    Args:
        model: model whose law is drawn from. Exact labels are kept if the model has `target`.
        d: dimension. Every atom of the law must get L + t + 1 coordinates or more. If the law was made from matrices,
            their dimension or a multiple of it will do as well; encodings and teacher are then those of the matrices,
            in the basis of the eigenvectors.
        alpha: samples per dimension, a Python number; n is the integer nearest to ``alpha d``.
        key: random key; `vmap` over keys gives several instances.
        normalise: whether ``Q*^T Q* / d`` is exactly the model's.
        stored: whether the inputs are stored. If not, the sentences are drawn on demand: `gamp` and `train` touch the
            inputs through products with a few vectors only, and these products are drawn one by one, with exactly the
            law of stored sentences for every n and d (see `tiedattn_jax.finite.on_demand`). A run of T steps with a
            student of r columns and t teacher fields then needs ``(2 L n + (L + 1) d) (t + r T)`` numbers (2 L d in
            place of (L + 1) d if the covariances are not multiples of the identity), and a time that grows like T^2.
            Stored sentences need ``L n d`` numbers. Tokens with classes cannot be drawn on demand.

    Raises:
        InputError: if `d` or `alpha` is too small or not a number, the coordinates cannot be shared out among the atoms
            of the spectral law, the sentences do not fit into memory, or `stored` is not set for tokens with classes.
    """
    check(model, even=False)
    if not as_flag(stored, "stored") and model.law().sentences is not None:
        raise InputError("model", "must have no classes of tokens for sentences drawn on demand: use stored=True")
    n = sentence_count(model, d, alpha, stored=stored)
    key = require_key(key)
    return _draw(model, atom_sizes(model.law(), int(d)), n, key, as_flag(normalise, "normalise"), stored)


@eqx.filter_jit
@precise
def _draw(
    model: Model, counts: tuple[int, ...], n: int, key: PRNGKeyArray, normalise: bool, stored: bool
) -> Data | DataOnDemand:
    key_teacher, key_tokens = jax.random.split(key)
    teacher, population = draw_population(model, counts, key_teacher, normalise)
    if stored:
        return draw_sentences(model, teacher, population, n, key_tokens).shard()
    noise = noise_fields(model, n, key_tokens) if model.noise else None
    return DataOnDemand.of(teacher, population, noise, n, jax.random.fold_in(key_tokens, 3)).shard()


def sentence_count(model: Model, d: int, alpha: Number, instances: int = 1, stored: bool = True) -> int:
    """Return the number of sentences, the integer nearest to ``alpha d``.

    Args:
        instances: number of instances that are in memory together.
        stored: whether the inputs are stored.

    Raises:
        InputError: as `sample_data`, also if so many instances together do not fit into memory.
    """
    L, _, t = model.shape
    require_count(d, "d", L + t + 1)
    require_positive(alpha, "alpha")
    if not is_concrete(alpha):
        raise InputError("alpha", "must be a Python number, got a traced array: it sets the shape of the data")
    n = float(alpha) * d
    size = _COPIES.get(jax.default_backend(), 2) * instances * n * L * d * model.lam.dtype.itemsize
    require_memory(size if stored else 0.0, "d", d, f"drawing alpha d = {n:.3g} sentences")
    require(round(n) >= 1, "alpha", alpha, f"at least 1 / d = {1 / d}, for one sentence or more")
    return round(n)


def atom_sizes(law: SpectralLaw, d: int) -> tuple[int, ...]:
    """Return the number of the d coordinates that each atom of the spectral law gets."""
    if law.weights.shape[0] == 1:
        return (d,)
    if not is_concrete(law):
        raise InputError("weights", "of several atoms must be known when data are drawn, got traced ones")
    exact = np.asarray(law.weights, float) * d
    edges = np.round(np.cumsum(exact)).astype(int)
    counts = np.diff(edges, prepend=0)
    # Laws made from matrices have atoms of few coordinates. Such an atom needs as many coordinates as its vectors span.
    moments = np.asarray(_second_moments(law.tau, law.pi, law.cross), float)
    values = np.linalg.eigvalsh(moments)
    rank = np.sum(values > 1e-6 * np.maximum(values[:, -1:], np.finfo(float).tiny), 1)
    floor = moments.shape[1] + 1
    is_small = (counts < floor) & (exact > 0)
    if np.any(is_small & ((counts < np.maximum(rank, 1)) | (np.abs(exact - counts) > 0.01))):
        requirement = (
            f"must leave L + t + 1 = {floor} coordinates to every atom of the spectral law, or be that of the matrices"
        )
        requirement += " that it is made of"
        raise InputError("d", f"{requirement}, got d={d}")
    return tuple(map(int, counts))


def _second_moments(
    tau: Float[Array, "*K J J"], pi: Float[Array, "*K t t"], cross: Float[Array, "*K J t"]
) -> Float[Array, "*K J+t J+t"]:
    """Return the second moments of encodings and teacher."""
    return jnp.block([[tau, cross], [jnp.swapaxes(cross, -1, -2), pi]])


def draw_population(
    model: Model, counts: tuple[int, ...], key: PRNGKeyArray, normalise: bool
) -> tuple[Float[Array, "d t"], Population]:
    """Draw a teacher, and the encodings, variances and class means of the law of the sentences.

    Args:
        counts: number of coordinates of every atom of the model's spectral law.
    """
    d, law = sum(counts), model.law()
    atoms = jax.random.split(key, len(counts)), law
    sizes, starts = np.array(counts), np.cumsum(counts) - counts
    tau, teacher = (jnp.zeros((d, a.shape[-1]), a.dtype) for a in (law.tau, law.pi))
    # Atoms with the same number of coordinates are drawn together; those of weight zero have none.
    for size in sorted(set(counts) - {0}):
        group = np.flatnonzero(sizes == size)
        parts = jax.vmap(partial(_atom_directions, size, normalise))(*indexed(atoms, group))
        rows = (starts[group][:, None] + np.arange(size)).ravel()
        tau, teacher = (a.at[rows].set(b.reshape(-1, b.shape[-1])) for a, b in zip((tau, teacher), parts, strict=True))
    encodings, means = jnp.split(tau.T / d**0.5, [model.shape[0]])
    gamma = law.gamma.T if len(counts) == 1 else jnp.repeat(law.gamma, sizes, 0, total_repeat_length=d).T
    return teacher, Population(encodings, gamma.astype(model.lam.dtype), None if law.sentences is None else means)


def _atom_directions(
    size: int, normalise: bool, key: PRNGKeyArray, atom: SpectralLaw
) -> tuple[Float[Array, "size J"], Float[Array, "size t"]]:
    """Draw the projections of encodings and teacher on the `size` eigenvectors of one atom."""
    L, t = atom.cross.shape
    if size < L + t + 1:  # then the moments have rank `size` or less, and only a rotation is random
        values, vectors = jnp.linalg.eigh(_second_moments(atom.tau, atom.pi, atom.cross))
        root = vectors[:, -size:] * jnp.sqrt(jnp.maximum(values[-size:], 0.0))
        rotation = jnp.linalg.qr(jax.random.normal(key, (size, size), atom.tau.dtype))[0]
        rows = size**0.5 * rotation @ root.T
        return rows[:, :L], rows[:, L:]
    normal = jax.random.normal(key, (size, L + t), atom.tau.dtype)
    # The columns are ones, L - 1 normals for the encodings, t for the teacher, and one more normal for encodings that
    # need L random directions.
    columns = jnp.concatenate([jnp.ones((size, 1), normal.dtype), normal[:, 1:], normal[:, :1]], 1)
    basis, triangle = jnp.linalg.qr(columns)
    basis = basis * jnp.sign(jnp.diagonal(triangle)) * size**0.5
    tau_mean, pi_mean = atom.tau_mean, atom.pi_mean
    if tau_mean is None or pi_mean is None:
        values, vectors = _principal(atom.tau)
        tau_mean = vectors[:, 0] * jnp.sqrt(values[0])
        pi_mean = vectors[:, 0] @ atom.cross / jnp.sqrt(jnp.where(values[0] > 0, values[0], 1.0))
    values, vectors = _principal(atom.tau - jnp.outer(tau_mean, tau_mean))
    nonzero = values > 100 * jnp.finfo(values.dtype).eps * jnp.trace(atom.tau)
    values = jnp.where(nonzero, values, 0.0)
    random = jnp.concatenate([basis[:, 1:L], basis[:, -1:]], 1) @ (vectors * jnp.sqrt(values)).T
    cross = atom.cross - jnp.outer(tau_mean, pi_mean)
    slope = (vectors * jnp.where(nonzero, 1 / jnp.where(nonzero, values, 1.0), 0.0)) @ vectors.T @ cross
    span = basis[:, :L]
    # The teacher loses the L directions of the encodings. Its length makes up for them, so that its mean square is pi.
    free = (normal[:, L:] - span @ (span.T @ normal[:, L:]) / size) * (size / (size - L)) ** 0.5
    values, vectors = _principal(atom.pi - jnp.outer(pi_mean, pi_mean) - slope.T @ cross)
    root = jnp.linalg.qr((vectors * jnp.sqrt(values)).T)[1]  # Cholesky factor, also of a singular matrix
    independent = (basis[:, L:-1] if normalise else free) @ (jnp.sign(jnp.diagonal(root))[:, None] * root)
    return tau_mean + random, pi_mean + random @ slope + independent


def _principal(moments: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Return the eigenvalues, largest first, and eigenvectors of a positive semidefinite matrix."""
    values, vectors = jnp.linalg.eigh(moments)
    vectors = vectors[:, ::-1]
    return jnp.maximum(values[::-1], 0.0), vectors * jnp.where(vectors[0] < 0, -1.0, 1.0)


@precise
def draw_sentences(
    model: Model, teacher: Float[Array, "d t"], population: Population, n: int, key: PRNGKeyArray
) -> Data:
    """Draw n sentences of a population, with the model's labels for a given teacher."""
    encodings, gamma, means = population.encodings, population.gamma, population.means
    (L, d), classes = encodings.shape, draw_classes(model, n, key)
    tokens = jax.random.normal(key, (L, n, d), gamma.dtype)
    if classes is None or means is None:
        tokens = tokens * jnp.sqrt(gamma[:, None] / d)
    else:
        tokens = tokens * jnp.sqrt(gamma / d)[classes.T] + (means / d**0.5)[classes.T]
    # The teacher's fields are those of x minus those of the encodings. Fields of `tokens` would keep both large arrays
    # in memory.
    x = tokens + encodings[:, None] / d**0.5
    y = student_fields(x, teacher) - student_fields(encodings[:, None], teacher) / d**0.5
    noise = noise_fields(model, n, key)
    labels = _labels(model, x, jnp.concatenate([y, noise], 1), encodings)
    data_noise = jnp.transpose(noise, (2, 0, 1)) if model.noise else None
    return Data(x, jnp.transpose(y, (2, 0, 1)), teacher, encodings, gamma, labels, data_noise, means, classes)


def draw_classes(model: Model, n: int, key: PRNGKeyArray) -> Int[Array, "n L"] | None:
    """Draw the classes of the tokens of n sentences; None for a law without classes.

    The number of sentences of each kind is its share of n, up to one.
    """
    sentences = model.law().sentences
    if sentences is None:
        return None
    quantiles = (jnp.arange(n) + jax.random.uniform(jax.random.fold_in(key, 2))) / n
    ends = jnp.cumsum(sentences.weights)[:-1].astype(quantiles.dtype)
    return jnp.asarray(sentences.classes)[jnp.searchsorted(ends, quantiles, side="right")]


def noise_fields(model: Model, n: int, key: PRNGKeyArray) -> Float[Array, "L noise n"]:
    """Draw the fields of noise of n sentences."""
    return jax.random.normal(jax.random.fold_in(key, 1), (model.shape[0], model.noise, n), model.lam.dtype)


@precise
def _labels(
    model: Model, x: Float[Array, "L n d"], fields: Float[Array, "L t n"], encodings: Float[Array, "L d"]
) -> Labels | None:
    """Compute the `Labels` of ``y = T(Y) x`` from inner products alone; None for a model without `target`.

    Args:
        fields: fields of teacher and noise.
    """
    if not model.provides("target"):
        return None
    target = target_at_nodes(model, fields)
    d = x.shape[2]
    gram = token_gram(x)
    # p_k . x~_l / d: the encodings take the place of an estimate.
    shift = jnp.swapaxes(student_fields(x, encodings.T), 0, 1) / d**0.5
    inner = gram - shift  # x_k . x~_l / d
    tokens = inner - jnp.swapaxes(shift, 0, 1) + (encodings @ encodings.T / d)[..., None]  # x_k . x_l / d
    return Labels(
        energy=jnp.einsum("akn,kln,aln->n", target, tokens, target),
        cross=jnp.einsum("akn,kln->aln", target, inner),
        gram=gram,
    )


def realised(model: Model, data: Sample) -> Model:
    """Return the model with the teacher's Gram matrix that was drawn; its theory is the one to compare with these data.

    Overlaps of one instance fluctuate mostly through ``rho = Q*^T Sigma Q* / d``.

    Raises:
        InputError: if the model has no `with_teacher`, or the teacher of the data is not known.
    """
    check_provides(model, "with_teacher", "to be given the teacher that was drawn")
    return model.with_teacher(data.teacher_gram)


STARTS = "semantic", "positional", "random", "spectral"
_EIGEN_STEPS = 200  # of the eigenvalue solver


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
        scale: norm of the columns divided by sqrt(d), for "semantic" relative to the teacher, where it is 1 by default.
            Otherwise the default is the unit of weights (see `tiedattn_jax.finite.products.weight_unit`), and a quarter
            of it for "positional". The published positional start has norm one: ``scale=d**-0.5``.

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
    key = require_key(jax.random.key(0) if key is None else key)
    if scale is not None:
        require_positive(scale, "scale")
    if init == "positional" and is_concrete(data.encodings):
        has_encodings = np.any(np.asarray(data.encodings) != 0)
        require(has_encodings, "init", init, "'semantic', 'random' or an array for data without encodings")
    threshold = None
    if init == "spectral":
        threshold = _weak_recovery(model, data.stored("for a spectral start"))
    scale = None if scale is None else jnp.asarray(scale, data.dtype)
    return _named_start(model, data, init, key, scale, threshold)


@eqx.filter_jit
@precise
def _named_start(
    model: Model,
    data: Sample,
    init: str,
    key: PRNGKeyArray,
    scale: Float[Array, ""] | None,
    threshold: Float[Array, ""] | None,
) -> Float[Array, "d r"]:
    d, r = data.shape[2], model.shape[1]
    noise, unit = jax.random.normal(key, (d, r), data.dtype), weight_unit(model, data.variance)
    sizes = {"semantic": jnp.ones_like(unit), "positional": 0.25 * unit}
    size = sizes.get(init, unit) if scale is None else scale
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
    return directions @ columns.T * size + jnp.where(jnp.any(columns, 1), 0.0, 0.1 * unit * noise)


def _weak_recovery(model: Model, data: Data) -> Float[Array, ""]:
    """Return the alpha of weak recovery, and warn if the data have less: a spectral start is then blind.

    Raises:
        InputError: as `tiedattn_jax.spectral_overlap`.
    """
    threshold = spectral_threshold(model)
    if is_concrete(threshold) and data.alpha <= float(threshold):
        message = f"the spectral start is blind at alpha = {data.alpha:.4g}, below weak recovery at {threshold:.4g}"
        warnings.warn(f"{message}: it is a random direction", stacklevel=3)
    return threshold


def spectral_direction(model: Model, data: Sample, key: PRNGKeyArray | None = None) -> Float[Array, "d 1"]:
    """Return a direction of norm sqrt(d) that overlaps with the teacher, from inputs and labels alone.

    It is the leading eigenvector of ``sum_mu sum_{l l'} x_l T(O^mu)_{l l'} x_{l'}^T / d``, where T processes what the
    label O says of the teacher's fields, see `tiedattn_jax.bayes.thresholds`. The matrix is never built: its products
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
    key = require_key(jax.random.key(0) if key is None else key)
    first = jax.random.normal(key, (data.shape[2], 1), data.x.dtype)
    return _leading_direction(model, data, first, threshold)


@eqx.filter_jit
@precise
def _leading_direction(
    model: Model, data: Data, first: Float[Array, "d 1"], threshold: Float[Array, ""]
) -> Float[Array, "d 1"]:
    d = data.shape[2]
    c = jnp.sqrt(jnp.maximum(data.alpha / threshold, 1.01))  # c + G stays positive
    matrices = jax.vmap(lambda label: label_matrix(model, label, c), out_axes=-1)(labels_at_nodes(model, data.fields))

    def product(v: Array) -> Array:
        return data.token_projection(jnp.einsum("kln,lan->kan", matrices, data.token_fields(v)))

    direction = lobpcg_standard(product, first, m=_EIGEN_STEPS)[1]
    return direction * d**0.5
