"""The model: one scalar loss of the local fields, and the law of the data. Everything else follows from these."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .errors import InputError, require, require_count, require_kind, require_takes, with_values
from .linalg import precise
from .penalties import Penalty, check_penalty
from .printing import Description, Printed, entries
from .spectra import atoms, eigenbasis, floats, positive

_CHANCE = 0.2  # largest cosine of a drawn class mean with an encoding: three standard deviations at d = 225


class Sentences(Printed):
    """Kinds of sentences whose tokens are of several classes, and so are correlated (Result C.2).

    The kind of a sentence fixes the classes of its tokens, which are then independent. The token at position l has the
    mean ``mu_s`` and the covariance ``Sigma_s`` of its class s. If a covariance depends on the position, positions do
    not share classes.

    Attributes:
        weights: shares of the kinds, (C,), summing to one.
        classes: the class of every token in a sentence of each kind, C tuples of L.
    """

    weights: jax.Array
    classes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def of(cls, shares: Any) -> Sentences:
        """Make kinds from their shares, such as ``{(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.05, (1, 0): 0.05}``.

        Raises:
            InputError: `shares` is no such dictionary, a class is no index, or the shares are not positive or do not
                sum to one.
        """
        if isinstance(shares, Sentences):
            return shares
        want = "a dictionary of shares by the classes of the tokens, such as {(0, 0): 0.5, (1, 1): 0.5}"
        require_kind(shares, "sentences", dict, want)
        classes = tuple(k if isinstance(k, tuple) else (k,) for k in shares)
        good = all(isinstance(s, int) and s >= 0 for k in classes for s in k) and len({len(k) for k in classes}) == 1
        require(good, "sentences", str(list(shares)), want)
        weights = floats(list(shares.values()), "sentences", "C", {})
        one = np.all(weights > 0) and abs(weights.sum() - 1) < 1e-6
        require(one, "sentences", weights, "shares > 0 that sum to one")
        return cls(jnp.asarray(weights / weights.sum()), classes)

    @property
    def table(self) -> np.ndarray:
        """Indicator of the class of every token in every kind, (C, L, S): one at the class, zero elsewhere."""
        classes = np.asarray(self.classes)
        return (classes[..., None] == np.arange(classes.max() + 1)).astype(float)

    def describe(self) -> Description:
        return Description("", numbers=[(str(k), entries(w)) for k, w in zip(self.classes, self.weights, strict=True)])


def _array(value: Any) -> Any:
    """Return a list of numbers as an array, and anything else unchanged; `check` refuses it if it is no array."""
    return jnp.asarray(value, float) if isinstance(value, (list, tuple)) else value


class SpectralLaw(Printed):
    """Joint law of (gamma_l, tau_l, pi) over the common eigenvectors of the covariances (Assumption 4.1), by its atoms.

    ``gamma_l`` are the eigenvalues of Sigma_l, ``tau_l = sqrt(d) e_i . p_l`` the projections of the encodings and
    ``pi = e_i . Q*`` those of the teacher. A ridge needs only their second moments at each atom. A penalty needs their
    law, which is Gaussian at each atom, with these second moments and the means `tau_mean` and `pi_mean`. A Gaussian
    teacher has zero means. A projection that is a single number has this number as its mean, and its square as second
    moment. Several atoms may have the same gamma: a sparse teacher has one for the entries that are zero, and samples
    have one each.

    All these numbers are of order one: encodings have norm O(1) and entries O(1 / sqrt(d)), and the teacher has entries
    O(1). The law does not contain d. It cannot tell encodings that were not divided by sqrt(d) from strong ones.

    With `sentences` the tokens are of S classes. There is then a gamma for each class instead of each token, and tau
    are the projections of J = L + S vectors: the encodings, followed by the means of the classes. The teacher sees
    these means as well: ``cross`` contains the means of its fields, ``Q*^T mu_s / sqrt(d)``. Otherwise S = J = L.

    Lists of numbers become arrays.

    Attributes:
        weights: (K,) shares of the spectrum, summing to one.
        gamma: (K, S) eigenvalues at each atom.
        tau: (K, J, J) second moments E[tau_k tau_l]; their mean over the spectrum is p_k . p_l.
        pi: (K, t, t) second moments E[pi pi^T]; their mean over the spectrum is Q*^T Q* / d.
        cross: (K, J, t) moments E[tau_l pi]; zero for a teacher orthogonal to the encodings.
        tau_mean: (K, J) means E[tau_l], or None if they are not given.
        pi_mean: (K, t) means E[pi], or None.
        sentences: kinds of sentences, or None if the tokens are independent.
    """

    weights: jax.Array = eqx.field(converter=_array)
    gamma: jax.Array = eqx.field(converter=_array)
    tau: jax.Array = eqx.field(converter=_array)
    pi: jax.Array = eqx.field(converter=_array)
    cross: jax.Array = eqx.field(converter=_array)
    tau_mean: jax.Array | None = eqx.field(converter=_array, default=None)
    pi_mean: jax.Array | None = eqx.field(converter=_array, default=None)
    sentences: Sentences | None = None

    @property
    def means(self) -> tuple[jax.Array, jax.Array]:
        """(`tau_mean`, `pi_mean`), which a penalty needs.

        Raises:
            InputError: the law does not have both.
        """
        if self.tau_mean is None or self.pi_mean is None:
            missing = "tau_mean" if self.tau_mean is None else "pi_mean"
            raise InputError(f"law().{missing}", "must be given for a penalty, got None: zeros for a law of mean zero")
        return self.tau_mean, self.pi_mean

    @classmethod
    def from_matrices(
        cls,
        covariances: Any,
        encodings: Any,
        teacher: Any,
        *,
        means: Any = None,
        sentences: Any = None,
        dtype: Any = None,
    ) -> SpectralLaw:
        """Return the law of given matrices: an atom for each distinct set of eigenvalues, with its second moments.

        A drawn teacher overlaps with the encodings by chance. Named branches, which hold m or theta at zero, then have
        no exact symmetry; `branch=None` holds neither.

        Args:
            covariances: Sigma_l, (L, d, d), which commute; or their eigenvalues, (L, d), if the coordinates are the
                common eigenvectors.
            encodings: the vectors p_l, (L, d), of norm O(1).
            teacher: Q*, (d, t), entries O(1).
            means: means of the token classes, mu_s, (S, d), of norm O(1); the covariances are then those of the
                classes.
            sentences: shares of the kinds of sentences by the classes of their tokens, see `Sentences.of`; given
                together with `means`.
            dtype: dtype of the law; by default that of jax for Python floats.

        Raises:
            InputError: shapes do not fit; covariances are not symmetric, do not commute or are not positive; or
                encodings were not divided by sqrt(d).
        """
        sizes: dict[str, int] = {}
        whole = np.ndim(covariances) == 3
        require((means is None) == (sentences is None), "means", means, "given together with sentences")
        own = "L" if sentences is None else "S"
        covariances = floats(covariances, "covariances", f"{own} d d" if whole else f"{own} d", sizes)
        encodings, teacher = floats(encodings, "encodings", "L d", sizes), floats(teacher, "teacher", "d t", sizes)
        if means is not None:
            encodings = np.concatenate([encodings, floats(means, "means", "S d", sizes)])
        d = sizes["d"]
        norm = np.sum(encodings**2, 1).max()
        want = "of norm of order one, as means are: divide vectors of entries of order one by sqrt(d)"
        require(norm <= max(10, d**0.5), "encodings", f"|p_l|^2 = {norm:.3g}", want)
        gamma, vectors = eigenbasis(covariances) if whole else (covariances.T, np.eye(d))
        gamma = positive(gamma, "covariances")
        tau = d**0.5 * vectors.T @ encodings.T
        return cls.from_samples(gamma, tau, vectors.T @ teacher, sentences=sentences, dtype=dtype)

    @classmethod
    def from_samples(
        cls, gamma: Any, tau: Any, pi: Any, weights: Any = None, *, sentences: Any = None, dtype: Any = None
    ) -> SpectralLaw:
        """Return the law of N samples of (gamma, tau, pi): an atom for each distinct gamma, with its second moments.

        Args:
            gamma: eigenvalues, (N, L), or (N, S) for classes.
            tau: projections of the encodings, ``sqrt(d) e_i . p_l``, (N, L); for classes followed by those of the class
                means, (N, L + S).
            pi: projections of the teacher, ``e_i . Q*``, (N, t).
            weights: shares of the samples, (N,), summing to one; by default equal.
            sentences: as in `from_matrices`.
            dtype: dtype of the law; by default that of jax for Python floats.

        Raises:
            InputError: shapes do not fit, numbers are not finite, eigenvalues are negative, or weights are not shares.
        """
        sizes: dict[str, int] = {}
        gamma = positive(floats(gamma, "gamma", "N L" if sentences is None else "N S", sizes), "gamma")
        tau, pi = floats(tau, "tau", "N L" if sentences is None else "N J", sizes), floats(pi, "pi", "N t", sizes)
        kinds = None if sentences is None else Sentences.of(sentences)
        shares = np.full(sizes["N"], 1 / sizes["N"]) if weights is None else floats(weights, "weights", "N", sizes)
        one = abs(shares.sum() - 1) < 1e-6 and np.all(shares >= 0)
        require(one, "weights", shares, "shares >= 0 that sum to one")
        which = atoms(gamma)
        own = np.bincount(which, shares)
        dtype = jnp.dtype(dtype or jnp.result_type(float))

        def mean(values: np.ndarray) -> jax.Array:
            """Return the mean of values (N, ...) at every atom."""
            total = np.zeros((len(own), *values.shape[1:]))
            np.add.at(total, which, shares.reshape(-1, *[1] * (values.ndim - 1)) * values)
            return jnp.asarray(total / own.reshape(-1, *[1] * (values.ndim - 1)), dtype)

        return cls(
            weights=jnp.asarray(own / own.sum(), dtype),
            gamma=mean(gamma),
            tau=mean(tau[:, :, None] * tau[:, None]),
            pi=mean(pi[:, :, None] * pi[:, None]),
            cross=mean(tau[:, :, None] * pi[:, None]),
            sentences=jax.tree.map(lambda a: a.astype(dtype), kinds),
        )

    @classmethod
    def of_classes(
        cls,
        variances: Any,
        sentences: Any,
        *,
        encodings: Any = ((1.0,), (-1.0,)),
        means: Any = None,
        teacher: Any = 1.0,
        teacher_means: Any = None,
        dtype: Any = None,
    ) -> SpectralLaw:
        """Return the law of correlated tokens (Result C.2): S classes with covariances ``variance_s I``.

        Args:
            variances: variances of the classes, (S,), positive.
            sentences: shares of the kinds of sentences by the classes of their tokens, see `Sentences.of`.
            encodings: (L, e) coefficients on e orthonormal directions, of norm O(1), as in `dot_product`.
            means: mu_s, (S, e), on the same directions; by default zero.
            teacher: Q*^T Q* / d: a number, or a (t, t) positive definite matrix.
            teacher_means: means of the teacher's fields, ``Q*^T mu_s / sqrt(d)``, (S, t), or (S,) for t = 1; by default
                zero.
            dtype: dtype of the law; by default that of jax for Python floats.

        Raises:
            InputError: shapes do not fit, variances are not positive, or shares are refused by `Sentences.of`. The
                check of the model refuses impossible moments: teacher means larger than its norm and the means allow.
        """
        dtype = jnp.dtype(dtype or jnp.result_type(float))
        kinds, sizes = Sentences.of(sentences), {"S": len(np.atleast_1d(np.asarray(variances)))}
        gamma = positive(floats(variances, "variances", "S", sizes), "variances")
        encodings = floats(encodings, "encodings", "L e", sizes)
        means = np.zeros((sizes["S"], sizes["e"])) if means is None else floats(means, "means", "S e", sizes)
        gram = floats(np.atleast_2d(np.asarray(teacher, float)), "teacher", "t t", sizes)
        shift = np.zeros((sizes["S"], len(gram)))
        if teacher_means is not None:
            given = np.asarray(teacher_means, float)
            shift = floats(given[:, None] if given.ndim == 1 else given, "teacher_means", "S t", sizes)
        vectors = np.concatenate([encodings, means])
        cross = np.concatenate([np.zeros((len(encodings), len(gram))), shift])
        atom = {"weights": 1.0, "gamma": gamma, "tau": vectors @ vectors.T, "pi": gram, "cross": cross}
        arrays = {name: jnp.asarray(a, dtype)[None] for name, a in atom.items()}
        return cls(**arrays, sentences=jax.tree.map(lambda a: a.astype(dtype), kinds))

    @precise
    def with_teacher(self, gram: jax.Array) -> SpectralLaw:
        """Return the law of a teacher whose columns are mixed so that ``Q*^T Q* / d`` is `gram`, (t, t)."""
        own = jnp.einsum("k,kst->st", self.weights, self.pi)
        mix = jnp.linalg.cholesky(gram.astype(own.dtype)) @ jnp.linalg.inv(jnp.linalg.cholesky(own))
        pi_mean = None if self.pi_mean is None else self.pi_mean @ mix.T
        moments = mix @ self.pi @ mix.T, self.cross @ mix.T
        return SpectralLaw(self.weights, self.gamma, self.tau, *moments, self.tau_mean, pi_mean, self.sentences)

    def describe(self) -> Description:
        numbers = [(name, entries(a)) for name, a in vars(self).items() if eqx.is_array(a)]
        return Description("", numbers=[*numbers, *(self.sentences.describe().numbers if self.sentences else ())])


class Model(Printed):
    """A tied attention layer and its data. Subclass it, and write `shape`, `loss` and `law`.

    Numbers that theory should be differentiable in must be array fields of the subclass.

    Attributes:
        lam: ridge strength lambda of the empirical risk; given by keyword.
        penalty: penalty p of the weights besides the ridge, or None; given by keyword. The risk contains
            ``lam / 2 ||Q||_F^2 + sum_i p(Q_i)``.
        kind: the kind of sentences that the model is restricted to, as a unit vector (C,), or None; see `given`.
    """

    of_one = "lam", 0
    lam: jax.Array = eqx.field(kw_only=True)
    penalty: Penalty | None = eqx.field(kw_only=True, default=None)
    kind: jax.Array | None = eqx.field(kw_only=True, default=None)

    def describe(self) -> Description:
        shown = {name: entries(a) if eqx.is_array(a) else repr(a) for name, a in vars(self).items() if a is not None}
        return Description("", numbers=list(shown.items()))

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(L, r, t): tokens of a sentence, rank of the student, rank of the teacher."""

    @property
    def noise(self) -> int:
        """Number of noise fields of a token: standard normals, independent of everything else.

        If there are any, `loss` and `target` take them as their last argument, (L, noise).
        """
        return 0

    @property
    def columns(self) -> tuple[int, int]:
        """Numbers of student fields and of label fields of a token; label fields are those of teacher and noise."""
        _, r, t = self.shape
        return r, t + self.noise

    def label(self, fields: jax.Array) -> tuple[jax.Array, ...]:
        """Split a sentence's label fields (L, t + noise) into those of the teacher and, if there are any, of noise."""
        t = self.shape[2]
        return (fields[:, :t], fields[:, t:]) if self.noise else (fields,)

    @abc.abstractmethod
    def loss(self, Z: jax.Array, Y: jax.Array) -> jax.Array:
        """Loss of one sentence as a function of its local fields.

        For student and teacher attention matrices S and T it is ``1/2 Tr[(S(Z) - T(Y)) D (S(Z) - T(Y))^T]`` with
        ``D = diag(Tr Sigma_l / d)``. It must not change under ``Z -> -Z`` nor under ``Y -> -Y``. A model with `noise`
        has ``loss(Z, Y, noise)``, even in Y alone or in Y and the noise together.

        Args:
            Z: student fields, (L, r).
            Y: teacher fields, (L, t).
        """

    @abc.abstractmethod
    def law(self) -> SpectralLaw:
        """Joint spectral law of covariances, encodings and teacher."""

    @property
    @precise
    def rho(self) -> jax.Array:
        """Covariance of the teacher's fields, ``Q*^T Sigma_l Q* / d``, (L, t, t), or (S, t, t) for classes."""
        law = self.law()
        return self.of_tokens(jnp.einsum("k,kl,kst->lst", law.weights, law.gamma, law.pi))

    @property
    @precise
    def trace(self) -> jax.Array:
        """``Tr Sigma_l / d``, the diagonal of D, (L,), or (S,) for classes; inside `loss` it is that of the tokens."""
        law = self.law()
        return self.of_tokens(law.weights @ law.gamma)

    @property
    @precise
    def teacher_mean(self) -> jax.Array | None:
        """Means of the teacher's fields, ``Q*^T mu_s / sqrt(d)``, (L, t), or (S, t) for classes; None means zero."""
        law, L = self.law(), self.shape[0]
        return None if law.sentences is None else self.of_tokens(jnp.tensordot(law.weights, law.cross[:, L:], 1))

    @property
    def kinds(self) -> jax.Array | None:
        """Unit vectors of the kinds of sentences, (C, C); None if there is only one kind."""
        sentences = self.law().sentences
        return None if sentences is None else jnp.asarray(np.eye(len(sentences.classes), dtype=self.lam.dtype))

    def given(self, kind: jax.Array | None) -> Model:
        """Return the model restricted to one kind of sentences.

        Its `rho`, `trace` and `teacher_mean` are those of the kind's tokens, and `share` is that of the kind.
        """
        return self if kind is None else eqx.tree_at(lambda m: m.kind, self, kind, is_leaf=lambda a: a is None)

    def of_all(self) -> Model:
        """Return the model of all kinds of sentences, as before `given`."""
        return self if self.kind is None else eqx.tree_at(lambda m: m.kind, self, None)

    @property
    @precise
    def share(self) -> jax.Array | float:
        """Share of the kind of sentences that the model is restricted to; one without such a kind."""
        sentences = self.law().sentences
        return 1.0 if self.kind is None or sentences is None else self.kind @ sentences.weights

    @property
    @precise
    def drawn(self) -> jax.Array | None:
        """Indicator of the class of every token of the given kind, (L, S); None without a kind."""
        sentences = self.law().sentences
        if self.kind is None or sentences is None:
            return None
        return jnp.tensordot(self.kind, jnp.asarray(sentences.table, self.kind.dtype), 1)

    @precise
    def of_tokens(self, classes: jax.Array) -> jax.Array:
        """Turn arrays over the classes, (S, ...), into arrays over the tokens of the given kind, (L, ...).

        Without a kind they are returned unchanged.
        """
        drawn = self.drawn
        return classes if drawn is None else jnp.tensordot(drawn, classes, 1)

    @precise
    def to_classes(self, tokens: jax.Array, axis: int = 0) -> jax.Array:
        """Apply the transpose of `of_tokens` along an axis: sum over the tokens of each class."""
        drawn = self.drawn
        return tokens if drawn is None else jnp.moveaxis(jnp.tensordot(drawn, tokens, ((0,), (axis,))), 0, axis)

    @property
    def rotation_invariant(self) -> bool:
        """Whether loss(Z O, Y) = loss(Z, Y) for rotations O of the student's columns; solvers must fix this gauge."""
        return False

    def penalty_of(self, Q: jax.Array) -> jax.Array | float:
        """Return the penalty of weights besides the ridge, ``sum_i p(Q_i)``; zero without a penalty."""
        return 0.0 if self.penalty is None else jnp.sum(self.penalty.value(Q))

    @property
    def kinked(self) -> bool:
        """Whether the gradient of the loss jumps where a token's fields change their sign.

        The proximal minima are then also searched for beyond these places, at every node, and the default rule has
        single nodes instead of lines.
        """
        return False

    @property
    def field_scale(self) -> Any:
        """Size of a token's fields at which attention is neither flat nor hard; one unless a layer says otherwise.

        The search for the minima of the proximal problem uses it as its unit.
        """
        return 1.0

    @property
    def generators(self) -> np.ndarray:
        """Antisymmetric generators (G, r, r) of the rotations of columns that leave the loss unchanged.

        These are all rotations if the loss is `rotation_invariant`, and none otherwise; a layer with only some of them
        overrides this.
        """
        every = rotations_of(self.shape[1])
        return every if self.rotation_invariant else every[:0]

    def start_columns(self, both: bool) -> tuple[jax.Array, jax.Array]:
        """Return the student's columns that a named start aligns with the teacher, (r, t), and the encodings, (r,).

        Args:
            both: whether the start uses both; the encodings then get a column of their own if there is one.
        """
        _, r, t = self.shape
        column = r - 1 if both and r > 1 else 0
        return jnp.eye(r, t, dtype=self.lam.dtype), jnp.eye(r, dtype=self.lam.dtype)[column]

    # Optional methods of a layer; `provides` says whether a class has written one.

    def target(self, Y: jax.Array) -> jax.Array:
        """Return the target attention matrix T(Y), (L, L).

        Its mean is the linear baseline, and sampled data take their exact labels from it.
        """
        raise NotImplementedError(self._missing("target(Y)"))

    def student(self, Z: jax.Array) -> jax.Array:
        """Return the attention matrix S(Z) of the student, (L, L), for the squared error on exact labels."""
        raise NotImplementedError(self._missing("student(Z)"))

    def with_teacher(self, gram: jax.Array) -> Model:
        """Return the model at another ``Q*^T Q* / d``, (t, t), such as that drawn by an instance of finite size."""
        raise NotImplementedError(self._missing("with_teacher(gram)"))

    @classmethod
    def provides(cls, method: str) -> bool:
        """Return whether the layer has written an optional method, such as "target", "student" or "with_teacher"."""
        return getattr(cls, method) is not getattr(Model, method)

    def _missing(self, method: str) -> str:
        return f"{type(self).__name__} must have a method `{method}` for this: see tiedattn_jax.Model"


def rotations_of(r: int) -> np.ndarray:
    """Return the generators of the rotations of r columns, one for each pair of them, (r (r - 1) / 2, r, r)."""
    later, earlier = (np.eye(r)[k] for k in np.tril_indices(r, -1))
    return later[:, :, None] * earlier[:, None] - earlier[:, :, None] * later[:, None]


def over_kinds(model: Model, fn: Callable[[Model], Any]) -> Any:
    """Sum `fn` of the model given each kind of its sentences, one kind at a time; without kinds return `fn(model)`."""
    if model.kinds is None:
        return fn(model)
    return jax.tree.map(lambda a: jnp.sum(a, 0), lax.map(lambda kind: fn(model.given(kind)), model.kinds))


def check_numbers(model: Model) -> None:
    """Check the numbers of a model by `__check_init__` of its class and of all base classes."""
    for base in type(model).__mro__:
        base.__dict__.get("__check_init__", lambda model: None)(model)


def check_provides(model: Model, method: str, why: str) -> None:
    """Raise an `InputError` unless the model has written an optional method; the message says `why` it is needed."""
    if not model.provides(method):
        name = type(model).__name__
        raise InputError("model", f"must have a method `{method}` {why}, got {name} without it: see tiedattn_jax.Model")


def check(model: Model, *, even: bool = True) -> None:
    """Check a model whose numbers are concrete, as every solve does, for the usual mistakes in a new layer.

    Args:
        model: a layer and its data.
        even: whether the loss must be even in Z and in Y, as it must for the branches that a symmetry defines.

    Raises:
        InputError: one of these is wrong.
            Fields: one is no array of the dtype of `lam`, or the model itself refuses its value.
            `shape`: it is not three counts.
            Methods: one takes other arguments than it is given (for instance `loss` does not take the declared
            `noise`), or has almost the name of a method of `Model`.
            `law`: it has other shapes, its weights do not sum to one, or no matrices have such a law.
            `loss`: it is not a finite real number, is not even, has no second derivative, or changes under rotations
            that are declared to leave it unchanged.
            `target`, `student`: it is not a finite (L, L) matrix.
            `penalty`: it is not convex, lacks its proximal operator, or the law lacks the means.
    """
    if not isinstance(model, Model):
        raise InputError("model", f"must be a tiedattn_jax.Model, such as dot_product(), got {model!r}")
    # The check also works inside a jitted function if the model is concrete. It runs on the host, whatever the device.
    with with_values(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        _check_fields(model)
        model = jax.tree.map(jnp.asarray, jax.device_get(model))
        _check_names(model)
        _check_arguments(model)
        check_numbers(model)
        if model.penalty is not None:
            check_penalty(model.penalty, model.lam, even)
        _check_law(model)
        _check_functions(model, even)


def _check_fields(model: Model) -> None:
    names = [f.name for f in dataclasses.fields(model) if not f.metadata.get("static", False)]
    leaves = [(name, leaf) for name in names for leaf in jax.tree.leaves(getattr(model, name))]
    for name, leaf in leaves:
        if not hasattr(leaf, "dtype"):
            raise InputError(name, f"must hold jax arrays, got {leaf!r}: write jnp.asarray({leaf!r}, float)")
    dtype = model.lam.dtype
    if dtype not in (jnp.float32, jnp.float64):
        raise InputError("lam", f"must be float32 or float64, got {dtype}: write jnp.asarray(lam, float)")
    for name, leaf in leaves:
        if leaf.dtype != dtype:
            text = f"must be {dtype} like lam, got {leaf.dtype}: what is no number is eqx.field(static=True)"
            raise InputError(name, text)
    lam = np.asarray(model.lam)
    held = np.all(lam >= 0 if model.penalty is not None else lam > 0)
    require(lam.shape == () and held and lam < np.inf, "lam", lam, "one positive number")
    if not isinstance(model.shape, tuple) or len(model.shape) != 3:
        raise InputError("shape", f"must be a tuple (L, r, t), got shape={model.shape!r}")
    for count in model.shape:
        require_count(count, "shape")
    require_count(model.noise, "noise", 0)
    scale = np.asarray(model.field_scale)
    require(scale.shape == () and 0 < scale < np.inf, "field_scale", scale, "one positive number")


def _check_arguments(model: Model) -> None:
    noise = ("noise",) if model.noise else ()
    why = f" of a model with noise = {model.noise}"
    require_takes(model.law, "law", ())
    require_takes(model.loss, "loss", ("Z", "Y", *noise), why)
    for name, wanted in {"target": ("Y", *noise), "student": ("Z",), "with_teacher": ("gram",)}.items():
        if model.provides(name):
            require_takes(getattr(model, name), name, wanted, why if name == "target" else "")


def _check_names(model: Model) -> None:
    for kind in (kind for kind in type(model).__mro__ if kind not in Model.__mro__):
        own = [name for name in vars(kind) if not name.startswith("_")]
        for name in ("target", "student", "with_teacher", "rotation_invariant", "start_columns"):
            meant = difflib.get_close_matches(name, own, 1, cutoff=0.8)
            if meant and name not in own:
                raise InputError(meant[0], f"must be called {name} if it is what a Model calls so, else another name")


def _check_law(model: Model) -> None:
    (L, _, t), law = model.shape, _computed("law", model.law)
    require_kind(law, "law", SpectralLaw, "a method that returns a SpectralLaw")
    K = np.shape(law.weights)[:1] or (1,)
    S, J = (L, L) if law.sentences is None else _check_sentences(law.sentences, L)
    shapes = {"weights": K, "gamma": (*K, S), "tau": (*K, J, J), "pi": (*K, t, t), "cross": (*K, J, t)}
    asked = model.penalty is not None or law.tau_mean is not None or law.pi_mean is not None
    means = law.means if asked else ()
    of_means = {"tau_mean": (*K, J), "pi_mean": (*K, t)} if asked else {}
    for name, shape in (shapes | of_means).items():
        value = getattr(law, name)
        if not isinstance(value, (np.ndarray, jax.Array)):
            text = f"must be an array, got one of {type(value)}: write jnp.asarray({name}, float)"
            raise InputError(f"law().{name}", text)
        value = np.asarray(value)
        if value.shape != shape:
            raise InputError(f"law().{name}", f"must be of shape {shape}, got shape {value.shape}")
        require(np.isfinite(value), f"law().{name}", value, "finite")
        if value.dtype.kind == "f" and value.dtype.itemsize > model.lam.dtype.itemsize:
            raise InputError(f"law().{name}", f"must be {model.lam.dtype} like lam, got {value.dtype}")
    weights, gamma, tau, pi, cross = (np.asarray(getattr(law, name), float) for name in shapes)
    rounding = 100 * float(jnp.finfo(model.lam.dtype).eps)
    one = abs(weights.sum() - 1) < rounding and np.all(weights >= 0)
    require(one, "law().weights", weights, "shares >= 0 that sum to one")
    require((gamma >= 0) & (weights @ gamma > 0), "law().gamma", gamma, "eigenvalues >= 0, not all zero")
    moments = np.block([[tau, cross], [cross.swapaxes(1, 2), pi]])
    least, size = np.linalg.eigvalsh(moments)[:, 0], np.abs(moments).max()
    symmetric = np.allclose(moments, moments.swapaxes(1, 2), rtol=rounding, atol=rounding * size)
    if not symmetric or np.any(least < -rounding * size):
        raise InputError("law()", "must have [[tau, cross], [cross^T, pi]] symmetric and positive semidefinite")
    if means:
        mean = np.concatenate([np.asarray(a, float) for a in means], 1)
        if np.any(np.linalg.eigvalsh(moments - mean[:, :, None] * mean[:, None])[:, 0] < -rounding * size):
            raise InputError("law()", "must have second moments that are no smaller than those of its means alone")
    rho = np.asarray(model.rho, float)
    require(np.linalg.eigvalsh(rho)[:, 0] > 0, "rho", rho, "positive definite for every token: see law().pi and gamma")


def _check_sentences(sentences: Any, L: int) -> tuple[int, int]:
    """Check the kinds of sentences; return the number of classes S, and that of vectors in the law, L + S."""
    require_kind(sentences, "law().sentences", Sentences, "Sentences.of({(0, 0): 0.5, (1, 1): 0.5}), or None")
    classes, weights = np.asarray(sentences.classes), np.asarray(sentences.weights)
    S = int(classes.max()) + 1
    want = f"the classes of {L} tokens for every kind of sentence, each of 0 to {S - 1} somewhere"
    good = classes.ndim == 2 and classes.shape[1] == L and np.array_equal(np.unique(classes), np.arange(S))
    require(good, "law().sentences.classes", sentences.classes, want)
    good = weights.shape == classes.shape[:1] and np.all(weights > 0) and abs(weights.sum() - 1) < 1e-5
    require(good, "law().sentences.weights", weights, "shares > 0 of the kinds that sum to one")
    return S, L + S


def _check_exchange(model: Model, Z: jax.Array, *labels: jax.Array) -> None:
    """Check that named branches have their symmetry: an exchange of tokens that changes the sign of the encodings.

    The check concerns classes with means. These must then be orthogonal to the encodings, up to the overlaps that drawn
    matrices have by chance.
    """
    L, law = model.shape[0], model.law()
    tau = np.asarray(law.tau, float)
    if law.sentences is None or not np.any(tau[:, L:, L:]):
        return
    gram = np.tensordot(np.asarray(law.weights), tau, 1)
    along = np.abs(gram[:L, L:]) / np.sqrt(np.outer(np.diag(gram)[:L], np.diag(gram)[L:]) + np.finfo(float).tiny)
    want = "means of classes orthogonal to the encodings for a branch by name: or branch=None with a start"
    require(along < _CHANCE, "law().tau", along, want)
    classes, weights, kinds = law.sentences.classes, np.asarray(law.sentences.weights), np.asarray(model.kinds)
    for order in map(np.array, itertools.permutations(range(L))):
        exchanged = [tuple(np.array(k)[order].tolist()) for k in classes]
        sums = [tau[:, i, i] + 2 * tau[:, i, j] + tau[:, j, j] for i, j in enumerate(order)]  # |p_i + p_j|^2
        if set(exchanged) != set(classes) or not np.allclose(sums, 0.0, atol=1e-5):
            continue
        image = [classes.index(k) for k in exchanged]
        turned = [a[order] for a in (Z, *labels)]
        new = [model.given(kind).loss(*turned) for kind in kinds[image]]
        old = [model.given(kind).loss(Z, *labels) for kind in kinds]
        if np.allclose(weights[image], weights, rtol=1e-3) and np.allclose(new, old, rtol=1e-3):
            return
    want = "must have an exchange of tokens that turns the sign of the encodings and changes nothing else"
    raise InputError("law().sentences", f"{want}, for a branch by name: use branch=None with a start")


def _computed(name: str, function: Callable[..., Any], *fields: jax.Array) -> Any:
    """Return what a method computes from fields; if it fails, raise an `InputError` with the reason."""
    try:
        return function(*fields)
    except InputError:
        raise
    except Exception as problem:
        shapes = f", for fields of shapes {', '.join(str(a.shape) for a in fields)}" if fields else ""
        want = f"must be written in jax.numpy, with derivatives{shapes}"
        first_line = str(problem).partition("\n")[0]
        raise InputError(name, f"{want}, got {type(problem).__name__}: {first_line}") from problem


@eqx.filter_jit
@precise
def _losses(model: Model, turn: jax.Array | None, Z: jax.Array, Y: jax.Array, *noise: jax.Array) -> tuple[Any, ...]:
    """Return the loss of the fields; of a Z rotated by `turn`, if given; and of Z, Y, and Y with the noise mirrored."""
    fields = [(Z, Y, *noise), (-Z, Y, *noise), (Z, -Y, *noise)]
    if noise:
        fields.append((Z, -Y, *(-a for a in noise)))
    values = tuple(model.loss(*each) for each in fields)
    turned = values[0] if turn is None else model.loss(Z @ turn, Y, *noise)
    if isinstance(values[0], jax.Array) and values[0].shape == () and jnp.issubdtype(values[0].dtype, jnp.floating):
        jax.eval_shape(jax.hessian(lambda Z: model.loss(Z, Y, *noise)), Z)  # raises if there is no Hessian
    return values[0], turned, *values[1:]


def _check_functions(model: Model, even: bool) -> None:
    L, r, t = model.shape
    rng = np.random.default_rng(0)
    widths = (r, t, model.noise) if model.noise else (r, t)
    Z, *labels = (jnp.asarray(rng.standard_normal((L, k)), model.lam.dtype) for k in widths)
    if even:
        _check_exchange(model, Z, *labels)
    model = model if model.kinds is None else model.given(model.kinds[0])
    turn = None
    if len(model.generators):
        tangent = np.tensordot(rng.standard_normal(len(model.generators)), model.generators, 1)
        turn = jnp.asarray(np.linalg.solve(np.eye(r) - tangent, np.eye(r) + tangent), Z.dtype)
    value, turned, *mirrored = _computed("loss", partial(_losses, model, turn), Z, *labels)
    real = np.asarray(value).dtype.kind in "iuf" and np.shape(value) == ()
    if not real or not np.isfinite(value):
        raise InputError("loss", f"must return a finite real scalar, got {value!r}: see Model.loss")
    same = [np.allclose(a, value, rtol=1e-3) for a in mirrored]
    if even and not (same[0] and any(same[1:])):
        raise InputError("loss", "must be even in Z and in Y for a branch by name: use branch=None with a start")
    if not np.allclose(turned, value, rtol=1e-3):
        what = "rotation_invariant" if model.rotation_invariant else "generators"
        raise InputError(what, "must be left out for a loss that changes when the columns of Z are rotated")
    for name, given in {"student": [Z], "target": labels}.items():
        if not model.provides(name):
            continue
        matrix = _computed(name, eqx.filter_jit(getattr(model, name)), *given)
        if np.shape(matrix) != (L, L):
            raise InputError(name, f"must return an ({L}, {L}) matrix, got shape {np.shape(matrix)}")
        real = isinstance(matrix, (np.ndarray, jax.Array)) and matrix.dtype.kind in "iuf"
        if not real or not np.all(np.isfinite(matrix)):
            raise InputError(name, f"must return an array of finite real numbers, got {' '.join(repr(matrix).split())}")
