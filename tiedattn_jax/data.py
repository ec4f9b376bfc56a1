"""Sentences of finite dimension: sampled from a model or the caller's own, their labels, and what is measured on them.

# notation: d dimension, n = alpha d sentences, L tokens, r and t ranks of student and teacher, Q (d, r) an estimate,
# Q* (d, t) the teacher, p_l the positional encodings. Coordinates are the common eigenvectors of the covariances.

A sentence enters the learning problem through two things only: the rows ``(x_l + p_l) / sqrt(d)``, whose products with
Q are the student's local fields, and the teacher's local fields. `Data` holds these two. What the *exact* labels need
on top of them is a few inner products of vectors of each sentence, `Labels`, so nothing here ever builds a prediction
of the size of the inputs.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .model import Model, is_concrete, require
from .nodewise import nodewise
from .observables import target_at_nodes
from .overlaps import Overlaps
from .prox import loss_at_nodes

TEST_BLOCK = 256  # sentences in memory at a time: 256 x 2 x 1000 normals are 4 MB in float64


class Average(eqx.Module):
    """A mean over independent draws.

    Attributes:
        value: the mean.
        stderr: its standard error.
    """

    value: jax.Array
    stderr: jax.Array


class Labels(eqx.Module):
    """All that the squared error of an attention layer asks of the exact labels ``y``, (n, L, d), of n sentences.

    With ``x~ = x + p`` the inputs of the student, ``||y - S x~||_F^2 / d = energy - 2 tr(S^T cross) + tr(S gram S^T)``.

    Attributes:
        energy: ``||y||_F^2 / d``, (n,).
        cross: ``y_k . x~_l / d``, (L, L, n).
        gram: ``x~_k . x~_l / d``, (L, L, n).
    """

    energy: jax.Array
    cross: jax.Array
    gram: jax.Array


class Data(eqx.Module):
    """n sentences of L tokens in d dimensions.

    Attributes:
        x: standardised inputs of the student, ``(x_l + p_l) / sqrt(d)``, (L, n, d).
        y: local fields of the teacher, ``Q*^T x_l / sqrt(d)``, (n, L, t).
        teacher: Q*, (d, t), or None where it is not known: the overlap theta is then NaN.
        encodings: the vectors p_l, of norm O(1), (L, d). Zero unless given.
        gamma: variances of the coordinates of a token, the eigenvalues of Sigma_l, (L, d), or (L, 1) where Sigma_l is a
            multiple of the identity. By default the latter, estimated from `x`.
        labels: inner products of the exact labels, or None where there are none.
    """

    x: jax.Array
    y: jax.Array
    teacher: jax.Array | None
    encodings: jax.Array
    gamma: jax.Array
    labels: Labels | None

    def __init__(
        self,
        x: Any,
        y: Any,
        teacher: Any = None,
        encodings: Any = None,
        gamma: Any = None,
        labels: Labels | None = None,
    ):
        x = _float(x)
        _check_shape("x", x, ("L", "n", "d"), {})
        L, n, d = x.shape
        require(
            n >= 1 and d >= 2, "x", f"shape {x.shape}", "an (L, n, d) array of n >= 1 sentences in d >= 2 dimensions"
        )
        sizes = {"L": L, "n": n, "d": d}
        y = _float(y, x.dtype)
        sizes["t"] = _check_shape("y", y, ("n", "L", "t"), sizes)[-1]
        teacher = None if teacher is None else _float(teacher, x.dtype)
        if teacher is not None:
            _check_shape("teacher", teacher, ("d", "t"), sizes)
        encodings = jnp.zeros((L, d), x.dtype) if encodings is None else _float(encodings, x.dtype)
        _check_shape("encodings", encodings, ("L", "d"), sizes)
        if gamma is None:
            gamma = jnp.mean((x * d**0.5 - encodings[:, None]) ** 2, (1, 2))[:, None]
        gamma = _float(gamma, x.dtype)
        if gamma.shape != (L, 1):
            _check_shape("gamma", gamma, ("L", "d"), sizes)
        if labels is not None:
            _check_shape("labels.energy", labels.energy, ("n",), sizes)
            _check_shape("labels.cross", labels.cross, ("L", "L", "n"), sizes)
            _check_shape("labels.gram", labels.gram, ("L", "L", "n"), sizes)
        for name, value in {"x": x, "y": y, "teacher": teacher, "encodings": encodings, "gamma": gamma}.items():
            _check_finite(name, value)
        if is_concrete(gamma):
            require(gamma > 0, "gamma", gamma[:, :4], "positive")
        for name in ("energy", "cross", "gram") if labels is not None else ():
            _check_finite(f"labels.{name}", getattr(labels, name))
        self.x, self.y, self.teacher, self.encodings, self.gamma, self.labels = x, y, teacher, encodings, gamma, labels

    @classmethod
    def from_sentences(
        cls,
        inputs: Any,
        labels: Any = None,
        *,
        teacher: Any = None,
        fields: Any = None,
        encodings: Any = None,
        gamma: Any = None,
    ) -> Data:
        """Data from raw sentences, as the paper writes them.

        Args:
            inputs: the sentences x without their positional encodings, (n, L, d).
            labels: the exact labels, (n, L, d), if there are any.
            teacher: Q*, (d, t).
            fields: local fields of the teacher, (n, L, t); by default ``x Q* / sqrt(d)``.
            encodings, gamma: as in `Data`.

        Raises:
            ValueError: shapes that do not fit, entries that are not finite, or neither `teacher` nor `fields`.
        """
        inputs = _float(inputs)
        n, L, d = _check_shape("inputs", inputs, ("n", "L", "d"), {})
        _check_finite("inputs", inputs)
        sizes = {"n": n, "L": L, "d": d}
        encodings = jnp.zeros((L, d), inputs.dtype) if encodings is None else _float(encodings, inputs.dtype)
        _check_shape("encodings", encodings, ("L", "d"), sizes)
        if fields is None:
            if teacher is None:
                raise ValueError(
                    "fields must be given, (n, L, t), where there is no teacher, (d, t), to compute them from"
                )
            teacher = _float(teacher, inputs.dtype)
            _check_shape("teacher", teacher, ("d", "t"), sizes)
            fields = inputs @ teacher / d**0.5
        x = jnp.swapaxes(inputs + encodings, 0, 1) / d**0.5
        products = None
        if labels is not None:
            labels = _float(labels, inputs.dtype)
            _check_shape("labels", labels, ("n", "L", "d"), sizes)
            _check_finite("labels", labels)
            products = Labels(
                energy=jnp.sum(labels**2, (1, 2)) / d,
                cross=jnp.einsum("nki,lni->kln", labels, x) / d**0.5,
                gram=_gram(x),
            )
        return cls(x, fields, teacher, encodings, gamma, products)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(L, n, d, t)."""
        L, n, d = self.x.shape
        return L, n, d, self.y.shape[-1]

    @property
    def alpha(self) -> float:
        """Samples per dimension, n / d."""
        return self.x.shape[1] / self.x.shape[2]

    def known_teacher(self, why: str) -> jax.Array:
        """The teacher, (d, t).

        Raises:
            ValueError: it is not known; says why it is asked for.
        """
        if self.teacher is None:
            raise ValueError(f"teacher must be known {why}, got teacher=None: give Data(..., teacher=...)")
        return self.teacher

    @property
    def rho(self) -> jax.Array:
        """Realised covariance of the teacher's fields, ``Q*^T Sigma_l Q* / d``, (L, t, t).

        Raises:
            ValueError: the teacher is not known.
        """
        teacher = self.known_teacher("for its overlaps")
        return jnp.einsum("ia,li,ib->lab", teacher, self._gamma(), teacher) / self.x.shape[2]

    @property
    def teacher_gram(self) -> jax.Array:
        """``Q*^T Q* / d``, (t, t).

        Raises:
            ValueError: the teacher is not known.
        """
        teacher = self.known_teacher("for its norm")
        return teacher.T @ teacher / self.x.shape[2]

    @property
    def fields(self) -> jax.Array:
        """Local fields of the teacher in the layout of `prox`, (L, t, n)."""
        return jnp.transpose(self.y, (1, 2, 0))

    def inputs(self) -> jax.Array:
        """Raw sentences x without their positional encodings, (n, L, d)."""
        return jnp.swapaxes(self.x, 0, 1) * self.x.shape[2] ** 0.5 - self.encodings

    def overlaps(self, Q: jax.Array, V: jax.Array | None = None) -> Overlaps:
        """Order parameters of an estimate Q (d, r), eq. (6).

        Args:
            V: response, (L, r, r), where the estimate comes with one. An estimate alone has none: NaN.
        """
        gamma, (L, _, d, t), r = self._gamma(), self.shape, Q.shape[1]
        theta = jnp.full((L, r, t), jnp.nan, Q.dtype)
        if self.teacher is not None:
            theta = jnp.einsum("ia,li,ib->lab", Q, gamma, self.teacher) / d
        return Overlaps(
            q=jnp.einsum("ia,li,ib->lab", Q, gamma, Q) / d,
            V=jnp.full((L, r, r), jnp.nan, Q.dtype) if V is None else V,
            theta=theta,
            m=self.encodings @ Q / d**0.5,
        )

    def _gamma(self) -> jax.Array:
        return jnp.broadcast_to(self.gamma, (self.x.shape[0], self.x.shape[2]))


def student_fields(x: jax.Array, Q: jax.Array) -> jax.Array:
    """Local fields of the student, ``x_l Q``: (L, n, d), (d, r) -> (L, r, n), in one pass over `x`.

    Column by column: a product of a matrix and a vector runs at the speed of memory, a batched product of thin
    matrices at a fraction of it.
    """
    return jnp.stack([jnp.tensordot(x, Q[:, a], 1) for a in range(Q.shape[1])], 1)


def back_project(x: jax.Array, g: jax.Array) -> jax.Array:
    """The transpose of `student_fields`, ``sum_l x_l^T g_l``: (L, n, d), (L, r, n) -> (d, r)."""
    return jnp.stack([jnp.tensordot(g[:, a], x, 2) for a in range(g.shape[1])], 1)


def shard(data: Data) -> Data:
    """The same data with the sentences, the rows of X, spread over all devices that jax sees.

    Over as many of them as divide the number of sentences; with one device nothing changes. All that takes `Data` then
    runs on these devices, each on its own rows, and sums over them.
    """
    n, devices = data.shape[1], jax.devices()
    count = max(k for k in range(1, len(devices) + 1) if n % k == 0)
    if count == 1:
        return data
    mesh = jax.make_mesh((count,), ("sentences",), devices=devices[:count], axis_types=(AxisType.Auto,))

    def put(a: jax.Array, axis: int) -> jax.Array:
        return lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec(*(None,) * axis, "sentences")))

    return eqx.tree_at(
        lambda s: (s.x, s.y, *jax.tree.leaves(s.labels)),
        data,
        (put(data.x, 1), put(data.y, 0), *(put(a, a.ndim - 1) for a in jax.tree.leaves(data.labels))),
    )


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
        ValueError: `d` or `alpha` too small or not a number.
    """
    L, _, t = model.shape
    require(isinstance(d, (int, np.integer)) and d >= max(2, L + t), "d", d, f"an integer of at least L + t = {L + t}")
    if not is_concrete(alpha):
        raise ValueError(
            "alpha must be a Python number in sample_data, got a traced array: it sets the shape of the data"
        )
    require(np.isfinite(alpha) and float(alpha) > 0, "alpha", alpha, "positive and finite")
    n = round(float(alpha) * d)
    require(n >= 1, "alpha", alpha, f"at least 1 / d = {1 / d}, for one sentence or more")
    law = model.law()
    counts = _shares(law.weights, int(d))
    if min(counts) < L + t:
        raise ValueError(f"d must leave L + t = {L + t} coordinates to every atom of the spectral law, got d={d}")
    return _draw(model, counts, n, key, normalise)


def _shares(weights: jax.Array, d: int) -> tuple[int, ...]:
    """How many of d coordinates each atom of the spectral law gets."""
    if weights.shape[0] == 1:
        return (d,)
    if not is_concrete(weights):
        raise ValueError(
            "weights of a spectral law of several atoms must be known when data are drawn, got traced ones"
        )
    edges = np.round(np.cumsum(np.asarray(weights, float)) * d).astype(int)
    return tuple(int(c) for c in np.diff(edges, prepend=0))


@eqx.filter_jit
def _draw(model: Model, counts: tuple[int, ...], n: int, key: jax.Array, normalise: bool) -> Data:
    L = model.shape[0]
    d, dtype, law = sum(counts), model.lam.dtype, model.law()
    key_teacher, key_tokens = jax.random.split(key)
    keys = jax.random.split(key_teacher, len(counts))
    parts = [
        _directions(keys[k], count, law.tau[k], law.pi[k], law.cross[k], normalise) for k, count in enumerate(counts)
    ]
    encodings = jnp.concatenate([tau for tau, _ in parts]).T / d**0.5
    teacher = jnp.concatenate([pi for _, pi in parts])
    gamma = law.gamma.T if len(counts) == 1 else jnp.repeat(law.gamma, np.array(counts), 0, total_repeat_length=d).T
    gamma = gamma.astype(dtype)
    noise = jax.random.normal(key_tokens, (L, n, d), dtype) * jnp.sqrt(gamma[:, None] / d)
    y = jnp.transpose(student_fields(noise, teacher), (2, 0, 1))
    x = noise + encodings[:, None] / d**0.5
    return shard(Data(x, y, teacher, encodings, gamma, _model_labels(model, x, y, encodings)))


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


def _gram(x: jax.Array) -> jax.Array:
    """``x_k . x_l`` for every sentence: (L, n, d) -> (L, L, n)."""
    L = x.shape[0]
    upper = {(k, l): jnp.sum(x[k] * x[l], -1) for k in range(L) for l in range(k, L)}
    return jnp.stack([jnp.stack([upper[min(k, l), max(k, l)] for l in range(L)]) for k in range(L)])


def _target(model: Model, y: jax.Array) -> jax.Array | None:
    """Target attention of every sentence, (L, L, n), or None for a model that has none."""
    try:
        return target_at_nodes(model, jnp.transpose(y, (1, 2, 0)))
    except AttributeError:
        return None


def _model_labels(model: Model, x: jax.Array, y: jax.Array, encodings: jax.Array) -> Labels | None:
    """`Labels` of ``y = T(Y) x``, from inner products alone."""
    target = _target(model, y)
    if target is None:
        return None
    d = x.shape[2]
    gram = _gram(x)
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
        AttributeError: the model has no `target`.
    """
    target = target_at_nodes(model, data.fields)
    return jnp.einsum("kln,nli->nki", target, data.inputs())


def _exact_loss(model: Any, Z: jax.Array, energy: jax.Array, cross: jax.Array, gram: jax.Array) -> jax.Array:
    S = model.student(Z)
    return 0.5 * energy - jnp.sum(S * cross) + 0.5 * jnp.sum((S @ gram) * S)


_exact_at_nodes = nodewise(_exact_loss)


def sentence_losses(model: Model, data: Data, Z: jax.Array, exact: bool = False) -> jax.Array:
    """Loss of every sentence at the student's fields `Z` (L, r, n): (n,).

    Args:
        exact: the squared error ``||y - f||_F^2 / (2 d)`` on the exact labels, instead of the model's `loss`, which is
            its limit for large d.

    Raises:
        ValueError: `exact` without labels in the data, or for a model without a method `student`.
    """
    if not exact:
        return loss_at_nodes(model, Z, data.fields)
    if data.labels is None:
        raise ValueError("exact=True needs data with labels: give them to Data.from_sentences(inputs, labels, ...)")
    if not hasattr(model, "student"):
        raise ValueError(
            f"exact=True needs the attention matrix of {type(model).__name__}: give it a method `student(Z)`"
        )

    labels = data.labels
    return _exact_at_nodes(model, Z, labels.energy, labels.cross, labels.gram)


def realised(model: Model, data: Data) -> Model:
    """The model with the teacher's norm that was drawn: what theory is to be compared with on this one instance.

    Overlaps of one instance fluctuate mostly through ``rho = Q*^T Sigma Q* / d``.

    Raises:
        ValueError: the model has no field `teacher` for Q*^T Q* / d, or the data have no teacher.
    """
    if not hasattr(model, "teacher"):
        raise ValueError(
            f"{type(model).__name__} must have a field `teacher`, Q*^T Q* / d, to be given the realised one"
        )
    return eqx.tree_at(lambda m: m.teacher, model, data.teacher_gram.astype(model.lam.dtype))


class LinearBaseline(eqx.Module):
    """The best linear attention ``f(x) = W (x + p)`` on the data, eqs. (17)-(18).

    Attributes:
        W: (L, L) weights, the minimiser of ``sum ||y - W (x + p)||_F^2 / (2 d) + ridge / 2 ||W||_F^2``.
        train_loss: ``||y - f||_F^2 / (2 d)`` per sentence on the data, without the ridge.
        gen_error: the same on sentences that W has not seen: those of `test`, or by cross-validation in eight folds.
    """

    W: jax.Array
    train_loss: jax.Array
    gen_error: Average


def linear_baseline(data: Data, ridge: Any = 0.0, test: Data | None = None) -> LinearBaseline:
    """Linear attention fitted to the exact labels; its W tends to E T(Y), its error to Result 5.1.

    Args:
        data: at least two sentences, with labels.
        ridge: strength of the penalty on W, zero or more.
        test: other sentences to test on.

    Raises:
        ValueError: no labels, a single sentence and no `test`, or a negative `ridge`.
    """
    for name, one in (("data", data), ("test", test)):
        if one is not None and one.labels is None:
            raise ValueError(
                f"{name} must have labels for the linear baseline: see Data.from_sentences(inputs, labels, ...)"
            )
    if is_concrete(ridge):
        require(np.isfinite(ridge) and float(ridge) >= 0, "ridge", ridge, "zero or positive")
    if test is None and data.shape[1] < 2:
        raise ValueError("data must have two sentences or more for cross-validation, got n=1: or give test=...")
    return _fit_linear(data, jnp.asarray(ridge, data.x.dtype), test)


@eqx.filter_jit
def _fit_linear(data: Data, ridge: jax.Array, test: Data | None) -> LinearBaseline:
    labels, n = data.labels, data.shape[1]
    assert labels is not None  # checked by the caller

    def fit(weight: jax.Array) -> jax.Array:  # weight (n,): zero for the sentences left out
        gram = labels.gram @ weight + ridge * jnp.eye(labels.gram.shape[0], dtype=weight.dtype)
        return jnp.linalg.solve(gram, (labels.cross @ weight).T).T

    def errors(W: jax.Array, on: Labels) -> jax.Array:
        square = jnp.einsum("ak,kln,al->n", W, on.gram, W)
        return 0.5 * on.energy - jnp.einsum("kl,kln->n", W, on.cross) + 0.5 * square

    W = fit(jnp.ones(n, ridge.dtype))
    if test is not None:
        assert test.labels is not None
        unseen = errors(W, test.labels)
    else:
        folds = min(8, n)
        fold = jnp.arange(n) % folds
        each = lax.map(lambda k: errors(fit((fold != k).astype(ridge.dtype)), labels), jnp.arange(folds))
        unseen = each[fold, jnp.arange(n)]
    return LinearBaseline(W, jnp.mean(errors(W, labels)), _average(jnp.sum(unseen), jnp.sum(unseen**2), unseen.size))


def heldout_error(
    model: Model, data: Data, Q: Any, key: jax.Array, *, sentences: int = 50_000, exact: bool = False
) -> Average:
    """Test error of an estimate on fresh sentences of the population the data came from: eps_g, with its error bar.

    Sentences are drawn in blocks of a few hundred, and only sums are kept.

    Args:
        Q: estimate, (d, r).
        key: of the fresh sentences.
        sentences: how many, rounded up to whole blocks.
        exact: the squared error ``||y - f||_F^2 / (2 d)`` of every sentence in full, instead of the model's `loss`.
            The latter needs the local fields only, which are drawn from their exact Gaussian law.

    Raises:
        ValueError: `Q` of the wrong shape, no teacher, `sentences` below two.
    """
    Q = check_estimate("Q", model, data, Q)
    teacher = data.known_teacher("to label fresh sentences")
    require(
        isinstance(sentences, (int, np.integer)) and sentences >= 2, "sentences", sentences, "an integer of at least 2"
    )
    block = min(int(sentences), TEST_BLOCK)
    return _heldout(model, teacher, data.encodings, data.gamma, Q, key, block, -(-int(sentences) // block), exact)


@eqx.filter_jit
def _heldout(
    model: Model,
    teacher: jax.Array,
    encodings: jax.Array,
    gamma: jax.Array,
    Q: jax.Array,
    key: jax.Array,
    block: int,
    count: int,
    exact: bool,
) -> Average:
    (L, d), r = encodings.shape, Q.shape[1]
    both = jnp.concatenate([Q, teacher], 1)
    covariance = jnp.einsum("ia,li,ib->lab", both, jnp.broadcast_to(gamma, (L, d)), both) / d
    values, vectors = jnp.linalg.eigh(covariance)  # singular where Q and Q* are parallel
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None]
    m = encodings @ Q / d**0.5

    def losses(key: jax.Array) -> jax.Array:
        if not exact:
            normal = jax.random.normal(key, (L, both.shape[1], block), Q.dtype)
            fields = jnp.einsum("lab,lbn->lan", root, normal)
            return loss_at_nodes(model, fields[:, :r] + m[..., None], fields[:, r:])
        noise = jax.random.normal(key, (L, block, d), Q.dtype) * jnp.sqrt(gamma[:, None] / d)
        y = jnp.transpose(student_fields(noise, teacher), (2, 0, 1))
        x = noise + encodings[:, None] / d**0.5
        fresh = Data(x, y, teacher, encodings, gamma, _model_labels(model, x, y, encodings))
        return sentence_losses(model, fresh, student_fields(x, Q), exact=True)

    def body(k: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        loss = losses(jax.random.fold_in(key, k))
        return sums[0] + jnp.sum(loss), sums[1] + jnp.sum(loss**2)

    zero = jnp.zeros((), Q.dtype)
    total, square = lax.fori_loop(0, count, body, (zero, zero))
    return _average(total, square, count * block)


def _average(total: jax.Array, square: jax.Array, n: int) -> Average:
    mean = total / n
    return Average(mean, jnp.sqrt(jnp.maximum(square / n - mean**2, 0.0) / (n - 1)))


def start(model: Model, data: Data, init: Any, key: jax.Array | None = None, scale: float | None = None) -> jax.Array:
    """A start for GAMP or training, (d, r).

    Args:
        init: "semantic", the teacher; "positional", along the first principal direction of the encodings; "random",
            Gaussian; or an array (d, r). Columns that a named start leaves open are small and random.
        key: of the random numbers; by default that of seed 0.
        scale: norm of the columns divided by sqrt(d), .25 ("positional") or 1 (otherwise) by default. The published
            positional start, of norm one, is ``scale=d**-0.5``.

    Raises:
        ValueError: an unknown name, an array of the wrong shape, a start without the teacher or encodings it needs.
    """
    if not isinstance(init, str):
        return check_estimate("init", model, data, init)
    d, r = data.shape[2], model.shape[1]
    if init not in ("semantic", "positional", "random"):
        raise ValueError(f"init must be 'semantic', 'positional', 'random' or a (d, r) array, got init={init!r}")
    _check_fit(model, data)
    if scale is not None and is_concrete(scale):
        require(np.isfinite(scale) and scale > 0, "scale", scale, "positive")
    noise = jax.random.normal(jax.random.key(0) if key is None else key, (d, r), data.x.dtype)
    if init == "random":
        return noise * (1.0 if scale is None else scale)
    if init == "semantic":
        given = data.known_teacher("for init='semantic'")[:, :r] * (1.0 if scale is None else scale)
    else:
        if is_concrete(data.encodings):
            require(
                jnp.any(data.encodings != 0),
                "init",
                init,
                "'semantic', 'random' or an array for data without encodings",
            )
        coefficients = jnp.linalg.eigh(data.encodings @ data.encodings.T)[1][:, -1]
        direction = coefficients @ data.encodings * jnp.where(coefficients[0] < 0, -1.0, 1.0)
        given = (direction / jnp.linalg.norm(direction) * d**0.5 * (0.25 if scale is None else scale))[:, None]
    return jnp.concatenate([given, 0.1 * noise[:, given.shape[1] :]], 1)


def check_estimate(name: str, model: Model, data: Data, Q: Any) -> jax.Array:
    """An estimate as an array of the data's dtype.

    Raises:
        ValueError: not of shape (d, r), or not finite, or data that do not fit the model.
    """
    _check_fit(model, data)
    Q = _float(Q, data.x.dtype)
    shape = data.shape[2], model.shape[1]
    if Q.shape != shape:
        raise ValueError(f"{name} must have shape (d, r) = {shape}, got shape {Q.shape}")
    _check_finite(name, Q)
    return Q


def _check_fit(model: Model, data: Data) -> None:
    want, got = (model.shape[0], model.shape[2]), (data.shape[0], data.shape[3])
    if want != got:
        raise ValueError(
            f"data must have L = {want[0]} tokens and t = {want[1]} teacher fields as the model has, "
            f"got L = {got[0]}, t = {got[1]}"
        )


def _float(a: Any, dtype: Any = None) -> jax.Array:
    a = jnp.asarray(a, dtype)
    return a if jnp.issubdtype(a.dtype, jnp.floating) else a.astype(jnp.result_type(float))


def _check_shape(name: str, a: jax.Array, axes: tuple[str, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    fits = jnp.ndim(a) == len(axes) and all(sizes.get(k, s) == s for k, s in zip(axes, a.shape, strict=True))
    if not fits:
        known = ", ".join(f"{k} = {sizes[k]}" for k in dict.fromkeys(axes) if k in sizes)
        want = f"({', '.join(axes)})" + (f" with {known}" if known else "")
        raise ValueError(f"{name} must have shape {want}, got shape {jnp.shape(a)}")
    return a.shape


def _check_finite(name: str, a: jax.Array | None) -> None:
    if a is not None and is_concrete(a) and not bool(jnp.all(jnp.isfinite(a))):
        raise ValueError(f"{name} must be finite, got {int(jnp.sum(~jnp.isfinite(a)))} entries that are not")
