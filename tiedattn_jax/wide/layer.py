"""Wide layers: a loss of scores, the law of the teacher's eigenvalues or singular values, and the scalings.

Tokens x_1 ... x_L have iid entries of variance sigma^2 = 1, and Q has kappa d columns. The student's and the teacher's
scores are

    h_ab = (x_a^T S x_b - delta_ab Tr S) / sqrt(d),   S = Q Q^T / (d sqrt(kappa)),

and the same with S*. There are n = alpha d^2 sentences. The risk is the sum of the losses and (lam / 2) ||Q||^2, which
is tau d Tr S with tau = lam sqrt(kappa) / 2. Another sigma is a rescaling: S -> sigma^2 S, S* -> sigma^2 S*,
tau -> tau / sigma^2.

Untied layers have S = Q K^T / (d sqrt(kappa)) and scores h_ab = x_a^T S y_b / sqrt(d) without a symmetry. The ridge
(lam / 2) (||Q||^2 + ||K||^2) is tau d ||S||_*, the trace norm, with tau = lam sqrt(kappa).

The loss sees some directions of the scores. Where it is a sum over the rows, the rows are independent in untied layers,
and the average over a sentence is a sum of averages over its rows; a `Layer` has one block of directions for each.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from ..base.arrays import Number, either
from ..base.errors import (
    InputError,
    is_concrete,
    require_choice,
    require_count,
    require_kind,
    require_not_negative,
    require_positive,
)
from ..base.report import Description, Printed, entries
from ..base.results import Status
from .directions import are_same, blocks_of, is_balanced, probe, sees_diagonal
from .laws import Eigenvalues, SingularValues, SpectrumLaw, is_positive

T = TypeVar("T")

SEES = "cross", "others", "all"
LONG = "long"
_DRAWS = 16  # of scores at which losses are compared


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

    A subclass with fields of its own sets them before it calls the constructor, which asks the loss what it sees.

    Attributes:
        tau: strength of the trace norm, lam sqrt(kappa) / 2.
        kappa: width of the student's head over the dimension.
        noise: variance of Gaussian noise on the teacher's scores; those of a token with itself have twice as much.
        teacher: law of the eigenvalues of the teacher's matrix S*.
        tokens: number of tokens L.
        encodings: length of the encodings p_1 = -p_2 if it is of order one; "long" for linearly independent encodings
            whose length grows with d; None without.
        blocks: directions of the scores that the loss sees, (B, n, L, L): the scores that matter are the sum over
            b and i of w_bi blocks_bi, where the w_bi of random scores are independent and have the variance of S.
            Up to a constant, see `excess`, the loss is a sum over the B blocks. Directions of zeros fill up a block of
            fewer than n.
    """

    LAW: ClassVar[type[Eigenvalues]] = Eigenvalues  # of a teacher that is given by numbers

    tau: Float[Array, ""]
    kappa: Float[Array, ""]
    noise: Float[Array, ""]
    teacher: SpectrumLaw
    encodings: Float[Array, ""] | Long | None
    tokens: int = eqx.field(static=True)
    _blocks: str = eqx.field(static=True, init=False)  # equinox warns of numbers in such a field

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
        scale = self.sides / 2 * jnp.sqrt(self.kappa)
        self.tau = require_positive(tau, "tau") if lam is None else require_positive(lam, "lam") * scale
        self.noise = require_not_negative(noise, "noise")
        self.teacher = teacher if isinstance(teacher, SpectrumLaw) else self.LAW(teacher)
        if self.teacher.SYMMETRIC != self.LAW.SYMMETRIC:
            raise InputError("teacher", f"must be a law of {self.LAW.NOUN} for this layer, got {teacher!r}")
        require_count(tokens, "tokens")
        self.tokens = tokens
        if isinstance(encodings, str):
            require_choice(encodings, "encodings", (LONG,))
            encodings = Long()
        if not (encodings is None or isinstance(encodings, Long)):
            encodings = require_positive(encodings, "encodings", self.tau.dtype)
        self.encodings = encodings
        self._blocks = "[]"
        self._blocks = blocks_of(self)
        if encodings is not None and self.sides == 1 and (tokens, self.seen) != (2, 2):
            text = "two tokens and a loss that does not see a common shift of all scores"
            raise InputError("encodings", f"need {text}, got {tokens} tokens and {self.seen} directions")

    @abc.abstractmethod
    def loss(self, H: Float[Array, "L L"], Y: Float[Array, "L L"]) -> Float[Array, ""]:
        """Return the loss of a sentence from the scores of the student and of the teacher, symmetric if tied."""

    @property
    def sides(self) -> int:
        """Number of sides of the spectrum that count: one for a tied layer, two for the singular values of others."""
        return 2 if self.LAW.SYMMETRIC else 1

    @property
    def pairs(self) -> tuple[np.ndarray, ...]:
        """The pairs of tokens a, b with a score of their own."""
        return np.triu_indices(self.tokens)

    @property
    def has_keys(self) -> bool:
        """Whether keys belong to other tokens than queries."""
        return False

    @property
    def has_own_scores(self) -> bool:
        """Whether there are scores of a token with itself, or of a query with the key in its place."""
        return True

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
            return jnp.asarray(self.blocks[self.directions][: self.shifts], self.tau.dtype)
        signs = jnp.array([1.0, -1.0], self.tau.dtype)
        return self.length**2 * (signs[:, None] * signs)[None]

    @property
    def blocks(self) -> Float[np.ndarray, "B n L L"]:
        return np.array(json.loads(self._blocks))

    @property
    def directions(self) -> tuple[np.ndarray, ...]:
        """Block and place of every direction that the loss sees."""
        return np.nonzero(np.any(self.blocks, (2, 3)))

    @property
    def is_even(self) -> bool:
        """Whether the loss stays the same if all scores change their sign; half of the nodes is then enough.

        This is False for numbers that jax traces: a loss that is even can have odd derivatives in them.
        """
        if self.encodings is not None or not is_concrete(self):
            return False
        with jax.ensure_compile_time_eval():
            losses, H, Y = probe(self)
            return are_same(losses(-H, -Y)[0], losses(H, Y)[0])

    @property
    def seen(self) -> int:
        """Number of directions of the scores that the loss sees."""
        return len(self.directions[0])

    def identity_text(self) -> str:
        """Return the compiled text of the loss and its derivatives; it does not contain the numbers of the layer."""
        arrays, structure = eqx.partition(self, eqx.is_array)

        def losses(arrays: Any, H: Array, Y: Array) -> Any:
            loss = eqx.combine(arrays, structure).loss
            return loss(H, Y), jax.grad(loss)(H, Y), jax.hessian(loss)(H, Y)

        scores = jax.ShapeDtypeStruct((self.tokens, self.tokens), self.tau.dtype)
        lowered = jax.jit(losses).trace(arrays, scores, scores).lower(lowering_platforms=("cpu",))
        return f"{type(self).__qualname__} {lowered.as_text()}"

    def node_loss(self, w: Float[Array, " n"], y: Float[Array, " n"], row: Float[Array, " B"]) -> Float[Array, ""]:
        """Return the loss from the coordinates of the scores in one block, the others being zero.

        Args:
            row: one for the block, zero for the others.
        """
        blocks = jnp.asarray(self.blocks, w.dtype)
        return self.loss(*(jnp.tensordot(row[:, None] * fields, blocks, 2) for fields in (w, y)))

    @property
    def equal_blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """The first of every set of blocks with the same loss, and the number of blocks in the set.

        Encodings tell all blocks apart.
        """
        B, n, *_ = self.blocks.shape
        if B == 1 or self.encodings is not None:
            return np.arange(B), np.ones(B)
        draws = np.random.default_rng(0).standard_normal((2, _DRAWS, n))
        w, y = jnp.asarray(draws * np.sqrt(float(self.teacher.rho)))
        with jax.ensure_compile_time_eval():
            losses = np.asarray(_block_losses(self, w, y, jnp.eye(B)))
        first = [next(a for a in range(b + 1) if are_same(losses[a], losses[b])) for b in range(B)]
        return np.unique(first, return_counts=True)

    @property
    def excess(self) -> Float[Array, ""]:
        """Sum of `node_loss` over the blocks, minus the loss: each of them has the loss of the others at zero."""
        zero = jnp.zeros((self.tokens, self.tokens), self.tau.dtype)
        others = len(self.blocks) - 1
        return others * self.loss(zero, zero) if others else jnp.zeros((), self.tau.dtype)

    def coordinates(self, H: Float[Array, "L L *N"]) -> Float[Array, "B n *N"]:
        """Return the coordinates of scores in the directions that the loss sees."""
        B, n, *_ = self.blocks.shape
        rows, columns = self.pairs
        parts = np.linalg.pinv(self.blocks.reshape(B * n, self.tokens, -1)[:, rows, columns]).T
        flat = jnp.asarray(parts, H.dtype) @ H[self.pairs]
        return flat.reshape(B, n, *flat.shape[1:])

    @property
    def lam(self) -> Float[Array, ""]:
        """Ridge of Q, and of K in an untied layer: 2 tau / sqrt(kappa), or tau / sqrt(kappa)."""
        return 2 / self.sides * self.tau / jnp.sqrt(self.kappa)

    def __check_init__(self) -> None:
        require_positive(self.tau, "tau")
        require_positive(self.kappa, "kappa")
        require_not_negative(self.noise, "noise")
        if self.length is not None:
            require_positive(self.length, "encodings")

    def _words(self) -> list[tuple[str, str]]:
        """Return further entries of the page."""
        return []

    def describe(self) -> Description:
        numbers = [(name, entries(value)) for name, value in vars(self).items() if isinstance(value, jax.Array)]
        numbers += [("encodings", LONG)] * self.is_long
        numbers += [("teacher", self.teacher.describe().what), ("tokens", str(self.tokens)), *self._words()]
        return Description(type(self).__name__, numbers=numbers)


class UntiedLayer(Layer):
    """A student and a teacher with queries and keys of their own. Subclass it, and write `loss` of unsymmetric scores.

    The equations are exact in the two cases "cross" and "others". Self-attention with its diagonal is for sentences of
    finite dimension only: x^T S x shows the symmetric part of S alone, so that its two parts have metrics of their own.

    Attributes:
        teacher: law of the singular values of S*, or an array of them.
        encodings: "long" for linearly independent encodings of queries and keys whose length grows with d; None
            without.
        sees: "cross" for queries and keys of different tokens; "others" for tokens that attend to each other and not
            to themselves, which needs three tokens and a loss that is a sum over rows; "all" for self-attention.

    Raises:
        InputError: as in `Layer`, `sees` has another value or is "others" for two tokens, or `encodings` have a length
            of order one.
    """

    LAW = SingularValues
    sees: str = eqx.field(static=True)

    def __init__(
        self, *, tokens: int = 2, encodings: str | Long | Number | None = None, sees: str = "cross", **numbers: Any
    ):
        self.sees = require_choice(sees, "sees", SEES)
        require_count(tokens, "tokens", minimum=3 if sees == "others" else 1)
        if not (encodings is None or isinstance(encodings, str | Long)):
            raise InputError("encodings", f'must be None or "long" for an untied layer, got encodings={encodings!r}')
        super().__init__(tokens=tokens, encodings=encodings, **numbers)

    @property
    def pairs(self) -> tuple[np.ndarray, ...]:
        return np.nonzero(np.ones([self.tokens] * 2) if self.has_own_scores else 1 - np.eye(self.tokens))

    @property
    def has_keys(self) -> bool:
        return self.sees == "cross"

    @property
    def has_own_scores(self) -> bool:
        return self.sees != "others"

    def _words(self) -> list[tuple[str, str]]:
        return [("sees", self.sees)]


@eqx.filter_jit
def _block_losses(layer: Layer, w: Array, y: Array, rows: Array) -> Float[Array, "B K"]:
    """Return the losses of K coordinates in every block."""
    at_fields = jax.vmap(layer.node_loss, (0, 0, None))
    return jax.vmap(at_fields, (None, None, 0))(w, y, rows)


def require_layer(model: Any) -> None:
    """Raise an `InputError` unless the model is a wide layer."""
    require_kind(model, "model", Layer, "a wide layer such as wide.DotProduct(tau=0.1)")


def require_numbers(*values: Any) -> None:
    """Refuse numbers that jax traces, where they set the sizes of arrays."""
    if not is_concrete(*values):
        raise InputError("model", "must have concrete numbers, which set the sizes of arrays, got one that jax traces")


def require_smooth(layer: Layer) -> None:
    """Refuse what is no wide layer, and labels that jump with the scores."""
    require_layer(layer)
    if layer.is_hard:
        text = "must be softmax for the theory of training, got hardmax: use `bayes`, or `train` in finite dimension"
        raise InputError("target", text)
    require_closed(layer)


def require_closed(layer: Layer) -> None:
    """Refuse untied layers that have no closed equations."""
    if not isinstance(layer, UntiedLayer) or layer.sees == "cross":
        return
    why = "the two parts of S, symmetric and antisymmetric, have metrics of their own"
    if layer.sees == "all":
        use = 'use sees="cross" or "others" for theory, or `train` in finite dimension'
        raise InputError("sees", f"must not be all for theory, because x^T S x sees half of S and {why}: {use}")
    if any(np.ptp(np.nonzero(block)[1]) for block in layer.blocks):  # it has scores of several rows
        raise InputError("loss", f'must be a sum over the rows for sees="others", because {why} otherwise')
    if sees_diagonal(layer):
        raise InputError("loss", 'must not depend on scores of a token with itself for sees="others", which have none')
    if layer.encodings is None and not is_balanced(layer):
        text = f'must be "long" for sees="others" and a loss that prefers some tokens, because {why} without encodings'
        raise InputError("encodings", text)


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
