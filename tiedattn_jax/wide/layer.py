"""Wide layers: a loss of symmetric scores, the law of the teacher's eigenvalues, and the scalings.

Tokens x_1 ... x_L have iid entries of variance sigma^2 = 1, and Q has kappa d columns. The student's and the teacher's
scores are

    h_ab = (x_a^T S x_b - delta_ab Tr S) / sqrt(d),   S = Q Q^T / (d sqrt(kappa)),

and the same with S*. There are n = alpha d^2 sentences. The risk is the sum of the losses and (lam / 2) ||Q||^2, which
is tau d Tr S with tau = lam sqrt(kappa) / 2. Another sigma is a rescaling: S -> sigma^2 S, S* -> sigma^2 S*,
tau -> tau / sigma^2.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from ..base.arrays import AnyArray, Number, either
from ..base.errors import (
    InputError,
    as_array,
    as_number,
    is_concrete,
    require,
    require_choice,
    require_count,
    require_kind,
    require_not_negative,
    require_number,
    require_positive,
)
from ..base.report import Description, Printed, entries
from ..base.results import Status
from .laws import Eigenvalues, SpectrumLaw, Wishart, is_positive

T = TypeVar("T")

LOSSES = "squared", "cross_entropy"
TARGETS = "softmax", "hardmax"
LONG = "long"
_SEEN = 1e-6  # singular value, relative to the largest, above which the loss sees a direction of the scores


class Long(eqx.Module):
    """Encodings whose length grows with d, as a field of a layer; they equal the text "long"."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Long) or (isinstance(other, str) and other == LONG)

    def __hash__(self) -> int:
        return hash(LONG)

    def __repr__(self) -> str:
        return repr(LONG)


class Layer(Printed):
    """A student and a teacher whose query-key matrices have extensive rank. Subclass it, and write `loss`.

    Attributes:
        tau: strength of the trace norm, lam sqrt(kappa) / 2.
        kappa: width of the student's head over the dimension.
        noise: variance of Gaussian noise on the teacher's scores; those of a token with itself have twice as much.
        teacher: law of the eigenvalues of the teacher's matrix S*.
        tokens: number of tokens L.
        encodings: length of the encodings p_1 = -p_2 if it is of order one; "long" for linearly independent encodings
            whose length grows with d; None without.
        basis: directions of the scores that the loss sees, (n, L, L): the scores that matter are sum_i w_i basis_i,
            where the w_i of random scores are independent and have the variance of S.
    """

    tau: Float[Array, ""]
    kappa: Float[Array, ""]
    noise: Float[Array, ""]
    teacher: SpectrumLaw
    encodings: Float[Array, ""] | Long | None
    tokens: int = eqx.field(static=True)
    _basis: str = eqx.field(static=True, init=False)  # equinox warns of numbers in such a field

    def __init__(
        self,
        *,
        teacher: SpectrumLaw | Any,
        tau: Number | None = None,
        lam: Number | None = None,
        kappa: Number = 1.0,
        noise: Number = 0.0,
        tokens: int = 2,
        encodings: str | Long | Number | None = None,
    ):
        self.kappa = require_positive(kappa, "kappa")
        if (tau is None) == (lam is None):
            raise InputError("tau", f"must be given, or lam in its place, got tau={tau} and lam={lam}")
        self.tau = (
            require_positive(tau, "tau") if lam is None else require_positive(lam, "lam") * jnp.sqrt(self.kappa) / 2
        )
        self.noise = require_not_negative(noise, "noise")
        self.teacher = teacher if isinstance(teacher, SpectrumLaw) else Eigenvalues(teacher)
        require_count(tokens, "tokens")
        self.tokens = tokens
        if isinstance(encodings, str):
            require_choice(encodings, "encodings", (LONG,))
            encodings = Long()
        if not (encodings is None or isinstance(encodings, Long)):
            encodings = require_positive(encodings, "encodings", self.tau.dtype)
        self.encodings = encodings
        self._basis = "[]"
        self._basis = _basis_of(self)
        if encodings is not None and (tokens, self.seen) != (2, 2):
            text = "two tokens and a loss that does not see a common shift of all scores"
            raise InputError("encodings", f"need {text}, got {tokens} tokens and {self.seen} directions")

    @abc.abstractmethod
    def loss(self, H: Float[Array, "L L"], Y: Float[Array, "L L"]) -> Float[Array, ""]:
        """Return the loss of a sentence from the symmetric scores of the student and of the teacher."""

    @property
    def is_long(self) -> bool:
        """Whether the length of the encodings grows with d."""
        return isinstance(self.encodings, Long)

    @property
    def length(self) -> Float[Array, ""] | None:
        """Length of the encodings if it is of order one."""
        return None if isinstance(self.encodings, Long) else self.encodings

    @property
    def in_range(self) -> Bool[Array, ""]:
        """Whether the numbers of the layer, which jax may trace, can be used."""
        numbers = [self.tau, self.kappa, *([] if self.length is None else [self.length])]
        are_positive = jnp.all(jnp.stack([is_positive(number) for number in numbers]))
        return are_positive & (self.noise >= 0) & jnp.isfinite(self.noise) & self.teacher.in_range

    @property
    def is_hard(self) -> bool:
        """Whether labels show only where the largest score of every row is, as those of a hardmax do."""
        return False

    @property
    def shifts(self) -> int:
        """Number of free numbers by which the encodings shift the scores: the offsets, or the spike."""
        return self.seen if self.is_long else int(self.length is not None)

    @property
    def shift_basis(self) -> Float[Array, "k L L"]:
        """Shifts of the scores for each of the free numbers of the encodings, up to what the loss does not see."""
        if self.length is None:
            return jnp.asarray(self.basis[: self.shifts], self.tau.dtype)
        signs = jnp.array([1.0, -1.0], self.tau.dtype)
        return self.length**2 * (signs[:, None] * signs)[None]

    @property
    def basis(self) -> Float[np.ndarray, "n L L"]:
        return np.array(json.loads(self._basis))

    @property
    def is_even(self) -> bool:
        """Whether the loss stays the same if all scores change their sign; half of the nodes is then enough.

        This is False for numbers that jax traces: a loss that is even can have odd derivatives in them.
        """
        if self.encodings is not None or not is_concrete(self):
            return False
        with jax.ensure_compile_time_eval():
            losses, draws = _probe(self)
            return bool(jnp.allclose(losses(draws), losses(-draws), rtol=1e-5, atol=0))

    @property
    def seen(self) -> int:
        """Number n of directions of the scores that the loss sees."""
        return len(self.basis)

    def node_loss(self, w: Float[Array, " n"], y: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the loss from the coordinates of the scores in the directions that it sees."""
        basis = jnp.asarray(self.basis, w.dtype)
        return self.loss(jnp.tensordot(w, basis, 1), jnp.tensordot(y, basis, 1))

    def coordinates(self, H: Float[Array, "L L *N"]) -> Float[Array, "n *N"]:
        """Return the coordinates of symmetric scores in the directions that the loss sees."""
        upper = np.triu_indices(self.tokens)
        return jnp.asarray(np.linalg.pinv(self.basis[:, *upper]).T, H.dtype) @ H[upper]

    @property
    def lam(self) -> Float[Array, ""]:
        """Ridge of Q, 2 tau / sqrt(kappa)."""
        return 2 * self.tau / jnp.sqrt(self.kappa)

    def __check_init__(self) -> None:
        require_positive(self.tau, "tau")
        require_positive(self.kappa, "kappa")
        require_not_negative(self.noise, "noise")
        if self.length is not None:
            require_positive(self.length, "encodings")

    def describe(self) -> Description:
        numbers = [(name, entries(value)) for name, value in vars(self).items() if isinstance(value, jax.Array)]
        numbers += [("encodings", LONG)] * self.is_long
        numbers.append(("teacher", self.teacher.describe().what))
        numbers.append(("tokens", str(self.tokens)))
        return Description(type(self).__name__, numbers=numbers)


class DotProduct(Layer):
    """Tied dot-product attention of extensive rank: row-wise softmax of beta times the scores.

    The target is (1 - omega) softmax(beta Y) + omega A. Hard attention has a hardmax in place of its softmax, one where
    a row has its largest score and zero elsewhere: `bayes`, `sample_data`, `train` and `gamp` take it.

    Attributes:
        beta: inverse temperature.
        omega: positional share of the target, in [0, 1].
        mixing: the positional part A of the target, (L, L), rows summing to one.
        loss_name: "squared", half the summed squares of the differences of the rows, or "cross_entropy"; as an argument
            it is called `loss`, too.
        target: "softmax" or "hardmax".

    Raises:
        InputError: a number is out of range, `tau` and `lam` are both given or both missing, the teacher has a
            negative or infinite eigenvalue or only zeros, or `encodings`, `loss` or `target` has another name.
    """

    beta: Float[Array, ""]
    omega: Float[Array, ""]
    mixing: Float[Array, "L L"]
    loss_name: str = eqx.field(static=True)
    target: str = eqx.field(static=True)

    def __init__(
        self,
        *,
        beta: Number = 1.0,
        tau: Number | None = None,
        lam: Number | None = None,
        kappa: Number = 1.0,
        omega: Number = 0.0,
        mixing: Any = None,
        encodings: str | Long | Number | None = None,
        noise: Number = 0.0,
        tokens: int = 2,
        loss: str | None = None,
        target: str = "softmax",
        teacher: SpectrumLaw | Any = None,
        loss_name: str = "squared",
    ):
        require_count(tokens, "tokens", minimum=2)
        L = tokens
        self.beta = require_positive(beta, "beta")
        self.omega = as_number(omega, "omega", float)
        self.mixing = as_array(np.full((L, L), 1 / L) if mixing is None else mixing, "mixing", jnp.result_type(float))
        require(self.mixing.shape == (L, L), "mixing", self.mixing.shape, f"of shape ({L}, {L})")
        self.loss_name = require_choice(loss_name if loss is None else loss, "loss", LOSSES)
        self.target = require_choice(target, "target", TARGETS)
        law = Wishart(0.5) if teacher is None else teacher
        super().__init__(teacher=law, tau=tau, lam=lam, kappa=kappa, noise=noise, tokens=L, encodings=encodings)

    def __check_init__(self) -> None:
        require_positive(self.beta, "beta")
        require_number(self.omega, "omega", "in [0, 1]", lambda v: (v >= 0) & (v <= 1))
        if is_concrete(self.mixing):
            known = np.asarray(self.mixing)  # jax would trace the comparisons, too
            require(_are_shares(known), "mixing", known, "rows of shares that sum to one")

    @property
    def in_range(self) -> Bool[Array, ""]:
        is_share = (self.omega >= 0) & (self.omega <= 1)
        return super().in_range & is_positive(self.beta) & is_share & jnp.all(_are_shares(self.mixing))

    @property
    def is_hard(self) -> bool:
        return self.target == "hardmax"

    def loss(self, H: Float[Array, "L L"], Y: Float[Array, "L L"]) -> Float[Array, ""]:
        if self.is_hard:
            rows = jax.nn.one_hot(jnp.argmax(Y, -1), self.tokens, dtype=Y.dtype)
        else:
            rows = jax.nn.softmax(self.beta * Y, -1)
        target = (1 - self.omega) * rows + self.omega * self.mixing
        if self.loss_name == "squared":
            return 0.5 * jnp.sum((jax.nn.softmax(self.beta * H, -1) - target) ** 2)
        return -jnp.sum(target * jax.nn.log_softmax(self.beta * H, -1))


def _are_shares(mixing: AnyArray) -> Any:
    """Return which entries of a matrix are positive, in rows that sum to one."""
    return (mixing >= 0) & (abs(mixing.sum(-1, keepdims=True) - 1) < 1e-6)


def require_layer(model: Any) -> None:
    """Raise an `InputError` unless the model is a wide layer."""
    require_kind(model, "model", Layer, "a wide layer such as wide.DotProduct(tau=0.1)")


def require_smooth(layer: Layer) -> None:
    """Refuse what is no wide layer, and labels that jump with the scores."""
    require_layer(layer)
    if layer.is_hard:
        text = "must be softmax for the theory of training, got hardmax: use `bayes`, or `train` in finite dimension"
        raise InputError("target", text)


def guarded(answer: Callable[..., T], layer: Layer, *numbers: Array, valid: Bool[ArrayLike, ""] = True) -> T:
    """Return ``answer(layer, *numbers)``; NaN and the status `nonfinite` where traced numbers are out of range.

    Args:
        numbers: further arguments, which must be positive.
        valid: a further condition.
    """
    if is_concrete(layer, numbers):
        return answer(layer, *numbers)  # its numbers have been checked
    in_range = layer.in_range & valid
    for number in numbers:
        in_range &= is_positive(number)
    # Every layer can be solved with all numbers .5. These replace bad numbers, so that no search meets NaN.
    good = jax.tree.map(lambda a: jnp.full_like(a, 0.5), (layer, *numbers))

    def masked(a: Array) -> Array:
        if jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.where(in_range, a, jnp.nan)
        return a & in_range if a.dtype == bool else jnp.where(in_range, a, Status.nonfinite)

    return jax.tree.map(masked, answer(*either(in_range, (layer, *numbers), good)))


def _echelon(rows: Float[np.ndarray, "n k"], digits: int) -> Float[np.ndarray, "n k"]:
    """Return the reduced echelon form: the same rows for equal spaces, so that equal losses share programs."""
    rows, n = rows.copy(), 0
    for column in rows.T:  # a view, which follows the rows
        pivot = n + np.argmax(np.abs(column[n:]))
        if abs(column[pivot]) > _SEEN:
            rows[np.array([n, pivot])] = rows[np.array([pivot, n])]
            rows[n] /= column[n]
            others = np.arange(len(rows)) != n
            rows[others] -= np.outer(column[others], rows[n])
            n += 1
        if n == len(rows):
            break
    return np.round(rows, digits)


def _probe(layer: Layer) -> tuple[Callable[[Array], Array], Array]:
    """Return a function of pairs of scores (K, 2, pairs of tokens) to losses, and random scores of the teacher's size.

    Traced numbers are replaced, because the form of the loss matters only.
    """
    units, variance = _units(layer.tokens)
    draws = np.random.default_rng(0).standard_normal((4 * len(units), 2, len(units))) * np.sqrt(variance)
    known = jax.tree.map(lambda a: 0.7 * jnp.ones(a.shape, a.dtype) if isinstance(a, jax.core.Tracer) else a, layer)

    def of_scores(pair: Array) -> Array:
        H, Y = jnp.tensordot(pair, jnp.asarray(units, pair.dtype), 1)
        return known.loss(H, Y)

    return jax.vmap(of_scores), jnp.asarray(draws * np.sqrt(float(known.teacher.rho)))


def _units(L: int) -> tuple[Float[np.ndarray, "K L L"], Float[np.ndarray, " K"]]:
    """Return the unit symmetric matrices, one for every pair a <= b, and the variances of random scores."""
    rows, columns = np.triu_indices(L)
    units = np.zeros((len(rows), L, L))
    units[np.arange(len(rows)), rows, columns] = units[np.arange(len(rows)), columns, rows] = 1.0
    return units, np.where(rows == columns, 2.0, 1.0)


def _basis_of(layer: Layer) -> str:
    """Return, as text, a basis, orthonormal in the metric of random scores, of the directions that the loss sees.

    These are the directions of its gradients at random scores.
    """
    units, variance = _units(layer.tokens)
    with jax.ensure_compile_time_eval():
        losses, draws = _probe(layer)
        values = losses(draws)
        if values.shape != (len(draws),):
            raise InputError("loss", f"must return one number, got shape {values.shape[1:]}")
        gradients = np.asarray(jax.grad(lambda draws: jnp.sum(losses(draws)))(draws)).reshape(-1, len(units))
    if not (np.all(np.isfinite(values)) and np.all(np.isfinite(gradients))):
        raise InputError("loss", "must be finite and smooth for all scores, got a value or slope that is not finite")
    _, sizes, seen = np.linalg.svd(gradients, full_matrices=False)
    if sizes[0] == 0:
        raise InputError("loss", "must depend on the scores, got a constant")
    B = _echelon(seen[sizes > _SEEN * sizes[0]], 12 if gradients.dtype == np.float64 else 5).T
    # Random scores have covariance diag(variance); u = B^T h has K = B^T diag(variance) B = C C^T, and h ~ B^+^T u.
    values_, vectors = np.linalg.eigh(B.T @ (variance[:, None] * B))
    C = vectors * np.sqrt(values_) @ vectors.T
    basis = np.einsum("in,iab->nab", np.linalg.pinv(B).T @ C, units)
    return json.dumps((np.round(basis, 15) + 0.0).tolist())  # no negative zeros
