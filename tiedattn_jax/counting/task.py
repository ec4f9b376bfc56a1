"""The sequences of the counting task, the transformer, and the masks of its weights; see the head of the package."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from ..base.arrays import AnyArray, Number, precise
from ..base.errors import (
    INT32,
    InputError,
    are_real,
    is_concrete,
    require,
    require_choice,
    require_count,
    require_key,
    require_keys,
    require_memory,
    require_number,
)

MECHANISMS = ("semantic", "positional", "free")


class Data(eqx.Module):
    """Sequences of tokens 0, ..., T - 1. The targets follow from them, see `counts`.

    Attributes:
        train: training sequences.
        test: held-out sequences. Data of `sample` have no sequence in both sets or twice in one.
        tokens: T.

    Raises:
        InputError: if an array has another shape, or tokens that are not in the alphabet.
    """

    train: Int[AnyArray, "n L"]
    test: Int[AnyArray, "m L"]
    tokens: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        check_sizes(tokens=self.tokens)
        for name, x in (("train", self.train), ("test", self.test)):
            fits = np.ndim(x) == 2 and len(x) and np.shape(x)[1] == np.shape(self.train)[-1] >= 2
            require(fits, name, np.shape(x), "of shape (n, L), n >= 1 sequences of one length L >= 2")
            _check_tokens(name, x, self.tokens)

    def examples(self, n: int = 3) -> Int[AnyArray, "n L"]:
        """Return held-out sequences to show, from one with the median number of repetitions to the maximum."""
        repetitions = jnp.sum(counts(self.test), axis=1)
        ranks = jnp.linspace(0.5, 1, n) * (len(self.test) - 1)
        return self.test[jnp.argsort(repetitions)[ranks.astype(int)]]


class Transformer(eqx.Module):
    """Weights of the transformer, initialised as PyTorch initialises embeddings and linear layers by default.

    Attributes:
        tokens: E, standard normal.
        positions: P, standard normal.
        query, key, value: Q, K, V, uniform in +-1 / sqrt(d).
        norm: layer norm over d with scale and offset.
        hidden: W_1 and b_1, d to p, uniform in +-1 / sqrt(d).
        readout: W_2 and b_2, p to L + 1 classes, uniform in +-1 / sqrt(p).
    """

    tokens: Float[Array, "T d"]
    positions: Float[Array, "L d"]
    query: Float[Array, "d d"]
    key: Float[Array, "d d"]
    value: Float[Array, "d d"]
    norm: eqx.nn.LayerNorm
    hidden: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(
        self,
        key: PRNGKeyArray,
        *,
        length: int = 10,
        tokens: int = 15,
        width: int = 64,
        hidden: int = 128,
        dtype: DTypeLike = jnp.float32,
    ):
        """Draw the weights.

        Raises:
            InputError: if the length or the alphabet is below 2, the width is odd, or there are no hidden units.
        """
        check_sizes(length=length, tokens=tokens, width=width, hidden=hidden)
        keys = jax.random.split(key, 7)
        bound = width**-0.5
        self.tokens = jax.random.normal(keys[0], (tokens, width), dtype)
        self.positions = jax.random.normal(keys[1], (length, width), dtype)
        self.query, self.key, self.value = jax.random.uniform(keys[2], (3, width, width), dtype, -bound, bound)
        self.norm = eqx.nn.LayerNorm(width, dtype=dtype)
        self.hidden = eqx.nn.Linear(width, hidden, dtype=dtype, key=keys[3])
        self.readout = eqx.nn.Linear(hidden, length + 1, dtype=dtype, key=keys[4])

    @precise
    def __call__(self, x: Int[AnyArray, " L"]) -> tuple[Float[Array, "L L+1"], Float[Array, "L L"]]:
        """Return logits and attention matrix of one sequence of tokens x. The rows of the matrix sum to one."""
        T, d = self.tokens.shape
        # X Q = (E Q)[x] + P Q, and likewise for K and V. Products of T + L rows thus suffice for a whole batch.
        embeddings = jnp.concatenate([self.tokens, self.positions])
        table = embeddings @ jnp.concatenate([self.query, self.key, self.value], axis=1)
        q, k, v = jnp.split(_looked_up(table[:T], x) + table[T:], 3, axis=-1)
        S = jax.nn.softmax(q @ k.T / d**0.5, axis=-1)
        h = jax.nn.relu(jax.vmap(self.hidden)(jax.vmap(self.norm)(S @ v)))
        return jax.vmap(self.readout)(h), S


def _looked_up(table: Float[Array, "T n"], x: Int[AnyArray, " L"]) -> Float[Array, "L n"]:
    """Return table[x]. On a GPU this is a product, because the derivative of table[x] is rounded anew in every run."""

    def product(table: Array, x: Array) -> Float[Array, "L n"]:
        return jax.nn.one_hot(x, len(table), dtype=table.dtype) @ table

    return lax.platform_dependent(table, x, cpu=lambda table, x: table[x], default=product)


def sample(
    key: PRNGKeyArray, n: int = 50_000, *, length: int = 10, tokens: int = 15, train_share: Number = 0.7
) -> Data:
    """Draw sequences of uniform independent tokens, drop duplicates, and split them at random.

    Args:
        n: number of sequences before duplicates are dropped.
        length: L.
        tokens: T.
        train_share: share of the sequences to train on; their number is rounded down.

    Raises:
        InputError: if the length or the alphabet is below 2, or so few sequences are left that one part of the split is
            empty.
    """
    check_sizes(length=length, tokens=tokens, n=n)
    key = require_key(key)
    require_number(train_share, "train_share", "between 0 and 1", lambda v: (v > 0) & (v < 1))
    require_memory(5.0 * n * length * 4, "n", n, f"sequences of {length}, sorted,")
    draw_key, split_key = jax.random.split(key)
    x = np.unique(np.asarray(jax.random.randint(draw_key, (n, length), 0, tokens, jnp.int32)), axis=0)
    cut = int(train_share * len(x))
    require(0 < cut < len(x), "train_share", train_share, f"such that both parts of {len(x)} sequences have some")
    x = x[np.asarray(jax.random.permutation(split_key, len(x)))]
    return Data(jnp.asarray(x[:cut]), jnp.asarray(x[cut:]), tokens)


def counts(x: Int[AnyArray, "*n L"]) -> Int[Array, "*n L"]:
    """Return the target, the number of times that each token occurs in its sequence."""
    return jnp.sum(x[..., :, None] == x[..., None, :], axis=-1, dtype=x.dtype)


def mask(transformer: Transformer, mechanism: str) -> Transformer:
    """Return the mask of one transformer: one if a weight exists, zero if it is frozen at zero.

    Raises:
        InputError: if the mechanism is unknown.
    """
    mechanism = require_choice(mechanism, "mechanism", MECHANISMS)
    ones = jax.tree.map(jnp.ones_like, transformer)
    if mechanism == "free":
        return ones
    d = transformer.query.shape[0]
    half = (jnp.arange(d) < d // 2).astype(transformer.query.dtype)
    readable = (half if mechanism == "semantic" else 1 - half)[:, None]
    halves = ones.tokens * half, ones.positions * (1 - half), ones.query * readable, ones.key * readable
    return eqx.tree_at(masked, ones, halves)


def masked(transformer: Transformer) -> tuple[Any, ...]:
    """Return the leaves that have frozen entries under some mask: E, P, Q, K."""
    return transformer.tokens, transformer.positions, transformer.query, transformer.key


def attention(transformer: Transformer, x: Int[AnyArray, "*n L"]) -> Float[Array, "*n L L"]:
    """Return attention matrices S of one transformer, those of sequences x of tokens.

    Raises:
        InputError: if `x` has the wrong length or tokens that are not in the alphabet.
    """
    x, T, L = jnp.asarray(x), transformer.tokens.shape[0], transformer.positions.shape[0]
    require(x.ndim and x.shape[-1] == L, "x", x.shape, f"of a shape that ends with L = {L}")
    _check_tokens("x", x, T)
    return _attention(transformer, x)


@eqx.filter_jit
@precise
def _attention(transformer: Transformer, x: Int[Array, "*n L"]) -> Float[Array, "*n L L"]:
    return jnp.vectorize(lambda x: transformer(x)[1], signature="(l)->(l,m)")(x)


def shares(S: Float[Array, "n L L"], x: Int[AnyArray, "n L"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the positional and the semantic share of the variance of attention matrices off the diagonal.

    With averages < > over the sequences mu and the pairs of different places i != j, s = <S_ij^mu>, and

        var        = <(S_ij^mu - s)^2>
        positional = <(p_ij - s)^2> / var,          p_ij = the mean of S_ij^mu over mu
        semantic   = <(e(x_i == x_j) - s)^2> / var,  e(1) and e(0) = the means of S_ij^mu over the pairs of equal
                                                    tokens, and over the pairs of different tokens

    Each share is the R^2 of the best prediction of S: from the pair of places alone, or from equality of the tokens
    alone. The diagonal is left out because there equality of the tokens and of the places cannot be told apart.
    Attention that depends on positions alone has a positional share of 1; attention that depends on equality alone has
    a semantic share of 1. If places play no role, noise still gives a positional share of about 1 / n. Both shares are
    zero for attention without variance.

    Args:
        S: attention matrices.
        x: tokens.
    """
    L = x.shape[-1]
    off_diagonal = ~jnp.eye(L, dtype=bool)
    pairs = L * (L - 1)
    s = jnp.sum(S, axis=(-2, -1), where=off_diagonal).mean() / pairs
    deviation = jnp.where(off_diagonal, S - s, 0)
    var = jnp.sum(jnp.mean(deviation**2, axis=0)) / pairs
    positional = jnp.sum(jnp.mean(deviation, axis=0) ** 2) / pairs
    equal = (x[:, :, None] == x[:, None, :]) & off_diagonal
    semantic = jnp.zeros_like(var)
    for group in (equal, ~equal & off_diagonal):
        size = jnp.mean(group, axis=0, dtype=S.dtype).sum() / pairs
        mean = jnp.mean(jnp.where(group, deviation, 0), axis=0).sum() / pairs
        semantic += mean**2 / jnp.maximum(size, jnp.finfo(S.dtype).tiny)
    scale = jnp.where(var > 0, var, 1)  # without variance the numerators are zero as well
    return positional / scale, semantic / scale


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if name == "width" and not (isinstance(value, (int, np.integer)) and value >= 2 and value % 2 == 0):
            raise InputError(name, f"must be an even integer of at least 2, got {name}={value!r}")
        require_count(value, name, 2 if name in ("length", "tokens", "n") else 1, None if name == "n" else INT32)


def _check_tokens(name: str, array: Any, tokens: int) -> None:
    if is_concrete(array):
        x = np.asarray(array)
        are_tokens = are_real(array) and x.dtype.kind in "iu" and np.all((x >= 0) & (x < tokens))
        require(are_tokens, name, x, f"tokens between 0 and {tokens - 1}")


def roles(keys: Key[Array, " K"], *roles: int) -> list[Key[Array, " K"]]:
    """Return for each role, such as noise or shuffling, an array of independent keys of the runs."""
    keys = require_keys(keys)
    return [jax.vmap(jax.random.fold_in, (0, None))(keys, role) for role in roles]
