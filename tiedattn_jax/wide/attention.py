"""Dot-product attention of extensive rank, tied and untied."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..base.arrays import AnyArray, Number
from ..base.errors import (
    InputError,
    as_array,
    as_number,
    is_concrete,
    require,
    require_choice,
    require_count,
    require_number,
    require_positive,
)
from .directions import other_tokens
from .laws import GaussianFactors, SpectrumLaw, Wishart, is_positive
from .layer import Layer, Long, UntiedLayer

LOSSES = "squared", "cross_entropy"
TARGETS = "softmax", "hardmax"


class SoftmaxRows(Layer):
    """The loss of dot-product attention: row-wise softmax of beta times the scores.

    The target is (1 - omega) softmax(beta Y) + omega A. Hard attention has a hardmax in place of its softmax, one where
    a row has its largest score and zero elsewhere: `bayes`, `sample_data`, `train` and `gamp` take it.

    Attributes:
        beta: inverse temperature.
        omega: positional share of the target, in [0, 1].
        mixing: the positional part A of the target, (L, L), rows summing to one.
        loss_name: "squared", half the summed squares of the differences of the rows, or "cross_entropy"; as an argument
            it is called `loss`, too.
        target: "softmax" or "hardmax".
    """

    beta: Float[Array, ""]
    omega: Float[Array, ""]
    mixing: Float[Array, "L L"]
    loss_name: str = eqx.field(static=True)
    target: str = eqx.field(static=True)

    def _set_rows(
        self, beta: Number, omega: Number, mixing: Any, tokens: int, loss: str, target: str, keys: np.ndarray
    ) -> None:
        """Set the fields of this class; `keys` has one where a row attends to a token."""
        L = tokens
        self.beta = require_positive(beta, "beta")
        self.omega = as_number(omega, "omega", float)
        even = keys / keys.sum(1, keepdims=True)
        self.mixing = as_array(even if mixing is None else mixing, "mixing", jnp.result_type(float))
        require(self.mixing.shape == (L, L), "mixing", self.mixing.shape, f"of shape ({L}, {L})")
        if is_concrete(self.mixing):
            require(np.isfinite(self.mixing), "mixing", self.mixing, "finite")
        self.loss_name = require_choice(loss, "loss", LOSSES)
        self.target = require_choice(target, "target", TARGETS)

    def __check_init__(self) -> None:
        require_positive(self.beta, "beta")
        require_number(self.omega, "omega", "in [0, 1]", lambda v: (v >= 0) & (v <= 1))
        if is_concrete(self.mixing):
            known = np.asarray(self.mixing)  # jax would trace the comparisons, too
            require(_are_shares(self.rows(known)), "mixing", known, "rows of shares that sum to one")

    @property
    def in_range(self) -> Bool[Array, ""]:
        is_share = (self.omega >= 0) & (self.omega <= 1)
        are_shares = jnp.all(_are_shares(self.rows(self.mixing)))
        return super().in_range & is_positive(self.beta) & is_share & are_shares

    @property
    def is_hard(self) -> bool:
        return self.target == "hardmax"

    def rows(self, H: AnyArray) -> Any:
        """Return the scores of every token with the tokens that it attends to, (L, K)."""
        return H

    def loss(self, H: Float[Array, "L L"], Y: Float[Array, "L L"]) -> Float[Array, ""]:
        H, Y, A = (self.rows(a) for a in (H, Y, self.mixing))
        if self.is_hard:
            rows = jax.nn.one_hot(jnp.argmax(Y, -1), Y.shape[-1], dtype=Y.dtype)
        else:
            rows = jax.nn.softmax(self.beta * Y, -1)
        target = (1 - self.omega) * rows + self.omega * A
        if self.loss_name == "squared":
            return 0.5 * jnp.sum((jax.nn.softmax(self.beta * H, -1) - target) ** 2)
        return -jnp.sum(target * jax.nn.log_softmax(self.beta * H, -1))


class DotProduct(SoftmaxRows):
    """Tied dot-product attention of extensive rank: queries and keys are the same, see `SoftmaxRows`.

    Raises:
        InputError: a number is out of range, `tau` and `lam` are both given or both missing, the teacher has a
            negative or infinite eigenvalue or only zeros, or `encodings`, `loss` or `target` has another name.
    """

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
        keys = np.ones((tokens, tokens))
        self._set_rows(beta, omega, mixing, tokens, loss_name if loss is None else loss, target, keys)
        law = Wishart(0.5) if teacher is None else teacher
        Layer.__init__(
            self, teacher=law, tau=tau, lam=lam, kappa=kappa, noise=noise, tokens=tokens, encodings=encodings
        )


class UntiedDotProduct(SoftmaxRows, UntiedLayer):
    """Dot-product attention of extensive rank with queries and keys of their own, see `SoftmaxRows` and `UntiedLayer`.

    Raises:
        InputError: as in `DotProduct`, or `sees` has another value.
    """

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
        sees: str = "cross",
        teacher: SpectrumLaw | Any = None,
        loss_name: str = "squared",
        target: str = "softmax",
    ):
        require_count(tokens, "tokens", minimum=2)
        keys = np.ones((tokens, tokens)) - (sees == "others") * np.eye(tokens)
        self._set_rows(beta, omega, mixing, tokens, loss_name if loss is None else loss, target, keys)
        law = GaussianFactors(0.5) if teacher is None else teacher
        numbers: dict[str, Any] = {"tau": tau, "lam": lam, "kappa": kappa, "noise": noise}
        UntiedLayer.__init__(self, teacher=law, tokens=tokens, encodings=encodings, sees=sees, **numbers)

    def __check_init__(self) -> None:
        if self.target != "softmax":
            raise InputError("target", f"must be softmax for an untied layer, got {self.target}")

    def rows(self, H: AnyArray) -> Any:
        if self.sees != "others":
            return H
        return H[other_tokens(self.tokens)]


def _are_shares(mixing: AnyArray) -> Any:
    """Return which entries of a matrix are positive, in rows that sum to one."""
    return (mixing >= 0) & (abs(mixing.sum(-1, keepdims=True) - 1) < 1e-6)
