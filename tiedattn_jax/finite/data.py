"""Sentences of finite dimension, sampled from a model or the caller's own, and estimates of the teacher on them.

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

from ..errors import InputError, is_concrete, require
from ..model import Model
from ..overlaps import Overlaps


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

    Raises:
        InputError: shapes that do not fit, entries that are not finite, variances that are not positive.
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
            InputError: shapes that do not fit, entries that are not finite, or neither `teacher` nor `fields`.
        """
        inputs = _float(inputs)
        n, L, d = _check_shape("inputs", inputs, ("n", "L", "d"), {})
        _check_finite("inputs", inputs)
        sizes = {"n": n, "L": L, "d": d}
        encodings = jnp.zeros((L, d), inputs.dtype) if encodings is None else _float(encodings, inputs.dtype)
        _check_shape("encodings", encodings, ("L", "d"), sizes)
        if fields is None:
            if teacher is None:
                raise InputError(
                    "fields", "must be given, (n, L, t), where there is no teacher, (d, t), to compute them from"
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
                gram=token_gram(x),
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
            InputError: it is not known; says why it is asked for.
        """
        if self.teacher is None:
            raise InputError("teacher", f"must be known {why}, got teacher=None: give Data(..., teacher=...)")
        return self.teacher

    def known_labels(self, why: str, argument: str = "data") -> Labels:
        """What is kept of the exact labels.

        Args:
            argument: name of these data where they were passed.

        Raises:
            InputError: there are none; says why they are asked for.
        """
        if self.labels is None:
            raise InputError(argument, f"must have labels {why}: see Data.from_sentences(inputs, labels, ...)")
        return self.labels

    @property
    def rho(self) -> jax.Array:
        """Realised covariance of the teacher's fields, ``Q*^T Sigma_l Q* / d``, (L, t, t).

        Raises:
            InputError: the teacher is not known.
        """
        teacher = self.known_teacher("for its overlaps")
        return jnp.einsum("ia,li,ib->lab", teacher, self._gamma(), teacher) / self.x.shape[2]

    @property
    def teacher_gram(self) -> jax.Array:
        """``Q*^T Q* / d``, (t, t).

        Raises:
            InputError: the teacher is not known.
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


def token_gram(x: jax.Array) -> jax.Array:
    """``x_k . x_l`` for every sentence: (L, n, d) -> (L, L, n)."""
    L = x.shape[0]
    upper = {(k, l): jnp.sum(x[k] * x[l], -1) for k in range(L) for l in range(k, L)}
    return jnp.stack([jnp.stack([upper[min(k, l), max(k, l)] for l in range(L)]) for k in range(L)])


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


def start(model: Model, data: Data, init: Any, key: jax.Array | None = None, scale: float | None = None) -> jax.Array:
    """A start for GAMP or training, (d, r).

    Args:
        init: "semantic", the teacher; "positional", along the first principal direction of the encodings; "random",
            Gaussian; or an array (d, r). Columns that a named start leaves open are small and random.
        key: of the random numbers; by default that of seed 0.
        scale: norm of the columns divided by sqrt(d), .25 ("positional") or 1 (otherwise) by default. The published
            positional start, of norm one, is ``scale=d**-0.5``.

    Raises:
        InputError: an unknown name, an array of the wrong shape, a start without the teacher or encodings it needs.
    """
    if not isinstance(init, str):
        return check_estimate("init", model, data, init)
    d, r = data.shape[2], model.shape[1]
    if init not in ("semantic", "positional", "random"):
        raise InputError("init", f"must be 'semantic', 'positional', 'random' or a (d, r) array, got init={init!r}")
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
        InputError: not of shape (d, r), or not finite, or data that do not fit the model.
    """
    _check_fit(model, data)
    Q = _float(Q, data.x.dtype)
    shape = data.shape[2], model.shape[1]
    if Q.shape != shape:
        raise InputError(name, f"must have shape (d, r) = {shape}, got shape {Q.shape}")
    _check_finite(name, Q)
    return Q


def check_provides(model: Model, method: str, why: str) -> None:
    """Raise an `InputError` unless the model has written one of its optional methods; says why it is asked for."""
    if not model.provides(method):
        name = type(model).__name__
        raise InputError("model", f"must have a method `{method}` {why}, got {name} without it: see tiedattn_jax.Model")


def _check_fit(model: Model, data: Data) -> None:
    want, got = (model.shape[0], model.shape[2]), (data.shape[0], data.shape[3])
    if want != got:
        raise InputError(
            "data",
            f"must have L = {want[0]} tokens and t = {want[1]} teacher fields as the model has, "
            f"got L = {got[0]}, t = {got[1]}",
        )


def _float(a: Any, dtype: Any = None) -> jax.Array:
    a = jnp.asarray(a, dtype)
    return a if jnp.issubdtype(a.dtype, jnp.floating) else a.astype(jnp.result_type(float))


def _check_shape(name: str, a: jax.Array, axes: tuple[str, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    fits = jnp.ndim(a) == len(axes) and all(sizes.get(k, s) == s for k, s in zip(axes, a.shape, strict=True))
    if not fits:
        known = ", ".join(f"{k} = {sizes[k]}" for k in dict.fromkeys(axes) if k in sizes)
        want = f"({', '.join(axes)})" + (f" with {known}" if known else "")
        raise InputError(name, f"must have shape {want}, got shape {jnp.shape(a)}")
    return a.shape


def _check_finite(name: str, a: jax.Array | None) -> None:
    if a is not None and is_concrete(a) and not bool(jnp.all(jnp.isfinite(a))):
        raise InputError(name, f"must be finite, got {int(jnp.sum(~jnp.isfinite(a)))} entries that are not")
