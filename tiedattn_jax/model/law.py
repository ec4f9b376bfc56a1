"""The law of the data: covariances and means of the tokens, in the eigenvectors that the covariances share.

`SpectralLaw` holds its numbers, by atoms of equal eigenvalues; it is made from matrices, from samples, or for classes
of tokens (`TokenClassMixture`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Real

from ..base.arrays import AnyArray, Number, precise, spread_to
from ..base.errors import InputError, as_array, float_dtype, require, require_kind, shaped_array
from ..base.report import Description, Printed, entries

_ATOM_TOLERANCE = 1e-9  # eigenvalues that differ by less than this, relative to the largest, are one atom


def eigenbasis(covariances: Float[np.ndarray, "L d d"]) -> tuple[Float[np.ndarray, "d L"], Float[np.ndarray, "d d"]]:
    """Return the eigenvalues of commuting covariances and, in columns, their eigenvectors.

    Raises:
        InputError: a covariance is zero or not symmetric, or they do not commute.
    """
    size = np.abs(covariances).max(axis=(1, 2), keepdims=True)
    require(size > 0, "covariances", size.ravel(), "not zero")
    skew = np.abs(covariances - covariances.swapaxes(1, 2)).max(axis=(1, 2)) / size.ravel()
    if np.any(skew > 1e-8):
        raise InputError("covariances", f"must be symmetric, got Sigma_{np.argmax(skew)} off by {skew.max():.1e}")
    # A random mixture of the covariances has the common eigenvectors and no others.
    share = np.random.default_rng(0).uniform(0.5, 1.5, len(covariances))
    vectors = np.linalg.eigh(np.einsum("l,lij->ij", share, covariances / size))[1]
    rotated = vectors.T @ covariances @ vectors
    values = np.diagonal(rotated, axis1=1, axis2=2)
    off_diagonal = np.abs(rotated - values[:, None] * np.eye(values.shape[1])).max(axis=(1, 2)) / size.ravel()
    if np.any(off_diagonal > 1e-7):
        text = "must commute, with eigenvectors in common (Assumption 4.1)"
        raise InputError("covariances", f"{text}, got an off-diagonal of {off_diagonal.max():.1e} in the best basis")
    return values.T, vectors


def positive(gamma: Float[np.ndarray, " N *tokens"], argument: str) -> Float[np.ndarray, " N *tokens"]:
    """Return eigenvalues with those that are negative by rounding set to zero.

    Raises:
        InputError: an eigenvalue is negative by more than rounding, or all eigenvalues of a token are zero.
    """
    size = np.abs(gamma).max(0)
    require(size > 0, argument, size, "not zero")
    if np.any(gamma < -1e-8 * size):
        raise InputError(argument, f"must be positive semidefinite, got an eigenvalue of {gamma.min():.3g}")
    return np.maximum(gamma, 0.0)


def atoms(gamma: Float[np.ndarray, "N L"]) -> Int[np.ndarray, " N"]:
    """Return the index of the atom of each row of eigenvalues; rows equal to rounding share an atom."""
    order = np.argsort(gamma, 0, kind="stable")
    rising = np.take_along_axis(gamma, order, 0)
    jumps = np.diff(rising, axis=0, prepend=rising[:1]) > _ATOM_TOLERANCE * gamma.max(0)
    labels = np.empty(gamma.shape, int)
    np.put_along_axis(labels, order, np.cumsum(jumps, 0), 0)
    return np.unique(labels, axis=0, return_inverse=True)[1].ravel()


Rows: TypeAlias = Sequence[Any]  # lists of numbers, or of lists of them
DType: TypeAlias = str | type[Any] | np.dtype
Shares: TypeAlias = Mapping[tuple[int, ...], Number] | Mapping[int, Number]


class Sentence(eqx.Module):
    """One kind of sentences: maps between numbers of the classes and numbers of its tokens, and its share.

    Attributes:
        indicator: one at the class of every token, zero elsewhere; None for maps that leave all numbers unchanged.
        share: share of this kind among all sentences.
    """

    indicator: Float[Array, "L S"] | None = None
    share: Float[Array, ""] | float = 1.0

    @precise
    def to_tokens(self, classes: Float[Array, " S *rest"]) -> Float[Array, " _ *rest"]:
        """Turn arrays over the classes into arrays over the tokens."""
        return classes if self.indicator is None else jnp.tensordot(self.indicator, classes, 1)

    @precise
    def to_classes(self, tokens: Float[Array, " ..."], axis: int = 0) -> Float[Array, " ..."]:
        """Apply the transpose of `to_tokens` along an axis: sum over the tokens of each class."""
        if self.indicator is None:
            return tokens
        return jnp.moveaxis(jnp.tensordot(self.indicator, tokens, ((0,), (axis,))), 0, axis)


class TokenClassMixture(Printed):
    """Kinds of sentences whose tokens are of several classes, and so are correlated (Result C.2).

    The kind of a sentence fixes the classes of its tokens, which are then independent. The token at position l has the
    mean ``mu_s`` and the covariance ``Sigma_s`` of its class s. If a covariance depends on the position, positions do
    not share classes.

    Attributes:
        weights: shares of the kinds, summing to one.
        classes: the class of every token in a sentence of each kind, C tuples of L.
    """

    weights: Float[Array, " C"]
    classes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @classmethod
    def of(cls, shares: TokenClassMixture | Shares) -> TokenClassMixture:
        """Make kinds from their shares, such as ``{(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.05, (1, 0): 0.05}``.

        Raises:
            InputError: `shares` is no such dictionary, a class is no index, or the shares are not positive or do not
                sum to one.
        """
        if isinstance(shares, TokenClassMixture):
            return shares
        requirement = "a dictionary of shares by the classes of the tokens, such as {(0, 0): 0.5, (1, 1): 0.5}"
        require_kind(shares, "sentences", dict, requirement)
        classes = tuple(k if isinstance(k, tuple) else (k,) for k in shares)
        valid = (
            all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for k in classes for s in k)
            and len({len(k) for k in classes}) == 1
        )
        require(valid, "sentences", str(list(shares)), requirement)
        weights = shaped_array("sentences", list(shares.values()), "C", {}, on_host=True)
        is_distribution = np.all(weights > 0) and abs(weights.sum() - 1) < 1e-6
        require(is_distribution, "sentences", weights, "shares > 0 that sum to one")
        return cls(jnp.asarray(weights / weights.sum()), classes)

    @property
    def kinds(self) -> Float[Array, "C C"]:
        """Unit vectors of the kinds."""
        return jnp.eye(len(self.classes), dtype=self.weights.dtype)

    def given(self, kind: Float[AnyArray, " C"]) -> Sentence:
        """Return one of the kinds by its unit vector."""
        classes = np.asarray(self.classes)
        indicators = jnp.asarray(classes[..., None] == np.arange(classes.max() + 1), kind.dtype)
        return Sentence(jnp.tensordot(kind, indicators, 1), jnp.dot(kind, self.weights))

    def describe(self) -> Description:
        return Description("", numbers=[(str(k), entries(w)) for k, w in zip(self.classes, self.weights, strict=True)])


def _array(value: Any) -> Any:
    """Return a list of numbers as an array, and anything else unchanged; `check` refuses it if it is no array."""
    return as_array(value, "law", float) if isinstance(value, (list, tuple)) else value


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
        weights: shares of the spectrum, summing to one.
        gamma: eigenvalues at each atom.
        tau: second moments E[tau_k tau_l]; their mean over the spectrum is p_k . p_l.
        pi: second moments E[pi pi^T]; their mean over the spectrum is Q*^T Q* / d.
        cross: moments E[tau_l pi]; zero for a teacher orthogonal to the encodings.
        tau_mean: means E[tau_l], or None if they are not given.
        pi_mean: means E[pi], or None.
        sentences: kinds of sentences, or None if the tokens are independent.
    """

    weights: Float[Array, " K"] = eqx.field(converter=_array)
    gamma: Float[Array, "K S"] = eqx.field(converter=_array)
    tau: Float[Array, "K J J"] = eqx.field(converter=_array)
    pi: Float[Array, "K t t"] = eqx.field(converter=_array)
    cross: Float[Array, "K J t"] = eqx.field(converter=_array)
    tau_mean: Float[Array, "K J"] | None = eqx.field(converter=_array, default=None)
    pi_mean: Float[Array, "K t"] | None = eqx.field(converter=_array, default=None)
    sentences: TokenClassMixture | None = None

    @property
    def means(self) -> tuple[Float[Array, "K J"], Float[Array, "K t"]]:
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
        covariances: Real[AnyArray, "S d d"] | Real[AnyArray, "S d"] | Rows,
        encodings: Real[AnyArray, "L d"] | Rows,
        teacher: Real[AnyArray, "d t"] | Rows,
        *,
        means: Real[AnyArray, "S d"] | Rows | None = None,
        sentences: TokenClassMixture | Shares | None = None,
        dtype: DType | None = None,
    ) -> SpectralLaw:
        """Return the law of given matrices: an atom for each distinct set of eigenvalues, with its second moments.

        A drawn teacher overlaps with the encodings by chance. Named branches, which hold m or theta at zero, then have
        no exact symmetry; `branch=None` holds neither.

        Args:
            covariances: Sigma_l, (L, d, d), which commute; or their eigenvalues, (L, d), if the coordinates are the
                common eigenvectors.
            encodings: the vectors p_l, of norm O(1).
            teacher: Q*, entries O(1).
            means: means of the token classes, mu_s, of norm O(1); the covariances are then those of the
                classes.
            sentences: shares of the kinds of sentences by the classes of their tokens, see `TokenClassMixture.of`;
                given together with `means`.
            dtype: dtype of the law; by default that of jax for Python floats.

        Raises:
            InputError: shapes do not fit; covariances are not symmetric, do not commute or are not positive; or
                encodings were not divided by sqrt(d).
        """
        sizes: dict[str, int] = {}
        fit = partial(shaped_array, sizes=sizes, on_host=True)
        are_matrices = np.ndim(covariances) == 3
        require((means is None) == (sentences is None), "means", means, "given together with sentences")
        axis = "L" if sentences is None else "S"
        Sigma = fit("covariances", covariances, f"{axis} d d" if are_matrices else f"{axis} d")
        p, Q = fit("encodings", encodings, "L d"), fit("teacher", teacher, "d t")
        if means is not None:
            p = np.concatenate([p, fit("means", means, "S d")])
        d = sizes["d"]
        norm = np.sum(p**2, 1).max()
        requirement = "of norm of order one, as means are: divide vectors of entries of order one by sqrt(d)"
        require(norm <= max(10, d**0.5), "encodings", f"|p_l|^2 = {norm:.3g}", requirement)
        gamma, vectors = eigenbasis(Sigma) if are_matrices else (Sigma.T, np.eye(d))
        gamma = positive(gamma, "covariances")
        tau = d**0.5 * vectors.T @ p.T
        return cls.from_samples(gamma, tau, vectors.T @ Q, sentences=sentences, dtype=dtype)

    @classmethod
    def from_samples(
        cls,
        gamma: Real[AnyArray, "N S"] | Rows,
        tau: Real[AnyArray, "N J"] | Rows,
        pi: Real[AnyArray, "N t"] | Rows,
        weights: Real[AnyArray, " N"] | Rows | None = None,
        *,
        sentences: TokenClassMixture | Shares | None = None,
        dtype: DType | None = None,
    ) -> SpectralLaw:
        """Return the law of N samples of (gamma, tau, pi): an atom for each distinct gamma, with its second moments.

        Args:
            gamma: eigenvalues, (N, L), or (N, S) for classes.
            tau: projections of the encodings, ``sqrt(d) e_i . p_l``, (N, L); for classes followed by those of the class
                means, (N, L + S).
            pi: projections of the teacher, ``e_i . Q*``.
            weights: shares of the samples, summing to one; by default equal. Samples without a share do not count.
            sentences: as in `from_matrices`.
            dtype: dtype of the law; by default that of jax for Python floats.

        Raises:
            InputError: shapes do not fit, numbers are not finite, eigenvalues are negative, or weights are not shares.
        """
        sizes: dict[str, int] = {}
        fit = partial(shaped_array, sizes=sizes, on_host=True)
        values = positive(fit("gamma", gamma, "N L" if sentences is None else "N S"), "gamma")
        p, Q = fit("tau", tau, "N L" if sentences is None else "N J"), fit("pi", pi, "N t")
        kinds = None if sentences is None else TokenClassMixture.of(sentences)
        shares = np.full(sizes["N"], 1 / sizes["N"]) if weights is None else fit("weights", weights, "N")
        is_distribution = abs(shares.sum() - 1) < 1e-6 and np.all(shares >= 0)
        require(is_distribution, "weights", shares, "shares >= 0 that sum to one")
        values, p, Q, shares = (a[shares > 0] for a in (values, p, Q, shares))
        atom_index = atoms(values)
        atom_weights = np.bincount(atom_index, shares)
        dtype = float_dtype(dtype)

        def mean(values: Float[np.ndarray, " N *rest"]) -> Float[Array, " K *rest"]:
            """Return the mean of values at every atom."""
            total = np.zeros((len(atom_weights), *values.shape[1:]))
            np.add.at(total, atom_index, spread_to(shares, values) * values)
            return jnp.asarray(total / spread_to(atom_weights, values), dtype)

        return cls(
            weights=jnp.asarray(atom_weights / atom_weights.sum(), dtype),
            gamma=mean(values),
            tau=mean(p[:, :, None] * p[:, None]),
            pi=mean(Q[:, :, None] * Q[:, None]),
            cross=mean(p[:, :, None] * Q[:, None]),
            sentences=jax.tree.map(lambda a: a.astype(dtype), kinds),
        )

    @classmethod
    def of_classes(
        cls,
        variances: Real[AnyArray, " S"] | Rows,
        sentences: TokenClassMixture | Shares,
        *,
        encodings: Real[AnyArray, "L e"] | Rows = ((1.0,), (-1.0,)),
        means: Real[AnyArray, "S e"] | Rows | None = None,
        teacher: Real[AnyArray, "t t"] | Rows | Number = 1.0,
        teacher_means: Real[AnyArray, "S t"] | Real[AnyArray, " S"] | Rows | None = None,
        dtype: DType | None = None,
    ) -> SpectralLaw:
        """Return the law of correlated tokens (Result C.2): S classes with covariances ``variance_s I``.

        Args:
            variances: variances of the classes, positive.
            sentences: shares of the kinds of sentences by the classes of their tokens, see `TokenClassMixture.of`.
            encodings: coefficients on e orthonormal directions, of norm O(1), as in `DotProduct`.
            means: mu_s on the same directions; by default zero.
            teacher: Q*^T Q* / d: a number, or a (t, t) positive definite matrix.
            teacher_means: means of the teacher's fields, ``Q*^T mu_s / sqrt(d)``, (S, t), or (S,) for t = 1; by default
                zero.
            dtype: dtype of the law; by default that of jax for Python floats.

        Raises:
            InputError: shapes do not fit, variances are not positive, or `TokenClassMixture.of` refuses the shares.
                The check of the model refuses impossible moments: teacher means larger than its norm and the means
                allow.
        """
        dtype = float_dtype(dtype)
        kinds, sizes = TokenClassMixture.of(sentences), {"S": len(np.atleast_1d(np.asarray(variances)))}
        fit = partial(shaped_array, sizes=sizes, on_host=True)
        gamma = positive(fit("variances", variances, "S"), "variances")
        encodings = fit("encodings", encodings, "L e")
        means = np.zeros((sizes["S"], sizes["e"])) if means is None else fit("means", means, "S e")
        gram = fit("teacher", teacher if np.ndim(teacher) else [[teacher]], "t t")
        shift = np.zeros((sizes["S"], len(gram)))
        if teacher_means is not None:
            shift = fit("teacher_means", teacher_means, "S" if np.ndim(teacher_means) == 1 else "S t")
            shift = shift.reshape(len(shift), -1)
        vectors = np.concatenate([encodings, means])
        cross = np.concatenate([np.zeros((len(encodings), len(gram))), shift])
        atom = {"weights": 1.0, "gamma": gamma, "tau": vectors @ vectors.T, "pi": gram, "cross": cross}
        arrays = {name: jnp.asarray(a, dtype)[None] for name, a in atom.items()}
        return cls(**arrays, sentences=jax.tree.map(lambda a: a.astype(dtype), kinds))

    @property
    def tokens(self) -> int:
        """Number L of tokens of a sentence."""
        return self.gamma.shape[-1] if self.sentences is None else len(self.sentences.classes[0])

    @precise
    def with_teacher(self, gram: Float[Array, "t t"]) -> SpectralLaw:
        """Return the law of a teacher whose columns are mixed so that ``Q*^T Q* / d`` is `gram`."""
        old_gram = jnp.einsum("k,kst->st", self.weights, self.pi)
        mix = jnp.linalg.cholesky(gram.astype(old_gram.dtype)) @ jnp.linalg.inv(jnp.linalg.cholesky(old_gram))
        pi_mean = None if self.pi_mean is None else self.pi_mean @ mix.T
        moments = mix @ self.pi @ mix.T, self.cross @ mix.T
        return SpectralLaw(self.weights, self.gamma, self.tau, *moments, self.tau_mean, pi_mean, self.sentences)

    def describe(self) -> Description:
        numbers = [(name, entries(a)) for name, a in vars(self).items() if eqx.is_array(a)]
        what = f"{len(self.weights)} atoms" if len(self.weights) > 1 else ""
        return Description(what, numbers=[*numbers, *(self.sentences.describe().numbers if self.sentences else ())])
