"""The counting task: one small transformer with a positional and a semantic solution (Appendix A, Fig. 1).

# notation: L length, T tokens, d = d_m width, p hidden units, n sequences, K runs; E (T, d) and P (L, d) the
# embeddings, Q, K, V (d, d) query, key and value, S (L, L) the attention matrix of a sequence x (L,).

    X_i = E[x_i] + P_i,    S = softmax(X Q (X K)^T / sqrt(d)),    logits = W_2 relu(W_1 norm(S X V) + b_1) + b_2

The target at a place is the number of times that its token occurs in the sequence. The loss is the cross-entropy
averaged over the places. The first half of the coordinates belongs to the tokens, the second half to the positions. A
mask of zeros and ones with the shapes of the weights says which weights exist. The mask "free" is all ones; the others:

    semantic      E, P in their own halves; Q and K read the tokens' half
    positional    E, P in their own halves; Q and K read the positions' half

A masked weight starts at zero and its gradient is set to zero, so that it stays zero under any optimiser. Frozen and
free training therefore share one code path. An epoch (shuffling, batches, test) is one compiled scan, and several runs
are its `vmap`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .errors import (
    InputError,
    is_concrete,
    require,
    require_choice,
    require_count,
    require_key,
    require_keys,
    require_kind,
    require_memory,
    require_not_negative,
    require_number,
    require_positive,
)
from .linalg import precise
from .printing import Description, pictures
from .results import Result, Status
from .store import Checkpoint, fingerprint

MECHANISMS = ("semantic", "positional", "free")
# Smallest test accuracy at which a run counts as converged: it solves the task.
SOLVED = 0.99


class Data(eqx.Module):
    """Sequences of tokens 0, ..., T - 1. The targets follow from them, see `counts`.

    Attributes:
        train: training sequences, (n, L), int32.
        test: held-out sequences, (m, L). Data of `sample` have no sequence in both sets or twice in one.
        tokens: T.

    Raises:
        InputError: if an array has another shape, or tokens that are not in the alphabet.
    """

    train: jax.Array
    test: jax.Array
    tokens: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        _check_sizes(tokens=self.tokens)
        for name, x in (("train", self.train), ("test", self.test)):
            fits = np.ndim(x) == 2 and len(x) and np.shape(x)[1] == np.shape(self.train)[-1] >= 2
            require(fits, name, np.shape(x), "of shape (n, L), n >= 1 sequences of one length L >= 2")
            _check_tokens(name, x, self.tokens)

    def examples(self, n: int = 3) -> jax.Array:
        """Return held-out sequences to show, (n, L), from one with the median number of repetitions to the maximum."""
        repetitions = jnp.sum(counts(self.test), axis=1)
        ranks = jnp.linspace(0.5, 1, n) * (len(self.test) - 1)
        return self.test[jnp.argsort(repetitions)[ranks.astype(int)]]


class Transformer(eqx.Module):
    """Weights of the transformer, initialised as PyTorch initialises embeddings and linear layers by default.

    Attributes:
        tokens: E, (T, d), standard normal.
        positions: P, (L, d), standard normal.
        query, key, value: Q, K, V, (d, d), uniform in +-1 / sqrt(d).
        norm: layer norm over d with scale and offset.
        hidden: W_1 and b_1, d to p, uniform in +-1 / sqrt(d).
        readout: W_2 and b_2, p to L + 1 classes, uniform in +-1 / sqrt(p).
    """

    tokens: jax.Array
    positions: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array
    norm: eqx.nn.LayerNorm
    hidden: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(
        self,
        key: jax.Array,
        *,
        length: int = 10,
        tokens: int = 15,
        width: int = 64,
        hidden: int = 128,
        dtype: Any = jnp.float32,
    ):
        """Draw the weights.

        Raises:
            InputError: if the length or the alphabet is below 2, the width is odd, or there are no hidden units.
        """
        _check_sizes(length=length, tokens=tokens, width=width, hidden=hidden)
        keys = jax.random.split(key, 7)
        bound = width**-0.5
        self.tokens = jax.random.normal(keys[0], (tokens, width), dtype)
        self.positions = jax.random.normal(keys[1], (length, width), dtype)
        self.query, self.key, self.value = jax.random.uniform(keys[2], (3, width, width), dtype, -bound, bound)
        self.norm = eqx.nn.LayerNorm(width, dtype=dtype)
        self.hidden = eqx.nn.Linear(width, hidden, dtype=dtype, key=keys[3])
        self.readout = eqx.nn.Linear(hidden, length + 1, dtype=dtype, key=keys[4])

    @precise
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits and attention matrix of one sequence.

        Args:
            x: tokens, (L,).

        Returns:
            Logits (L, L + 1) and attention matrix S (L, L), whose rows sum to one.
        """
        T, d = self.tokens.shape
        # X Q = (E Q)[x] + P Q, and likewise for K and V. Products of T + L rows thus suffice for a whole batch.
        embeddings = jnp.concatenate([self.tokens, self.positions])
        table = embeddings @ jnp.concatenate([self.query, self.key, self.value], axis=1)
        q, k, v = jnp.split(table[x] + table[T:], 3, axis=-1)
        S = jax.nn.softmax(q @ k.T / d**0.5, axis=-1)
        h = jax.nn.relu(jax.vmap(self.hidden)(jax.vmap(self.norm)(S @ v)))
        return jax.vmap(self.readout)(h), S


class History(eqx.Module):
    """Measurements after every epoch, (K, epochs) each.

    Attributes:
        train_loss: mean over the batches of the epoch; the loss of a batch is that before its step.
        test_loss, test_accuracy: means over all places of the held-out sequences.
        positional_share, semantic_share: shares for the attention matrices of the held-out sequences; see `shares`.
    """

    train_loss: Any
    test_loss: Any
    test_accuracy: Any
    positional_share: Any
    semantic_share: Any

    def status(self) -> np.ndarray:
        """Return the status of every run, (K,); see `Training`."""
        finite = np.all([np.isfinite(c).all(axis=1) for c in jax.tree.leaves(self)], axis=0)
        solved = np.where(self.test_accuracy[:, -1] >= SOLVED, Status.converged, Status.max_steps)
        return np.where(finite, solved, Status.nonfinite)


class Training(Result):
    """K trained transformers; every array leaf has a leading axis of runs.

    Attributes:
        start: weights before the first step.
        weights: weights after the last one.
        mask: zero for every weight that is frozen at zero, one for the others.
        history: `History`.
        status: a `Status` for every run, as integers, (K,): `converged` if the final test accuracy is at least
            `SOLVED`, `max_steps` if it is lower, `nonfinite` if the run diverged.
    """

    start: Transformer
    weights: Transformer
    mask: Transformer
    history: History
    status: np.ndarray

    @property
    def ok(self) -> np.ndarray:
        """Whether a run solves the task, (K,)."""
        return self.status == Status.converged

    def plot(self) -> Any:
        """Plot losses, accuracy and shares epoch by epoch; see `plotting.learning_figure`."""
        return pictures().learning_figure({"training": [self]})

    def describe(self) -> Description:
        runs, epochs = self.history.train_loss.shape
        names = "train_loss", "test_loss", "test_accuracy"
        numbers = [(name, _spread(getattr(self.history, name)[:, -1])) for name in names]
        return Description(f"{runs} runs of {epochs} epochs, mean ± standard deviation", _counted(self.status), numbers)

    def run(self, k: int) -> Transformer:
        """Return the trained transformer of run k."""
        return jax.tree.map(lambda a: a[k], self.weights)


class Comparison(Result):
    """Comparison of K frozen solutions with the solutions after training with all weights free; each (K,).

    A distance is ``sum over arrays of ||change||_2``.

    Attributes:
        accuracy: test accuracy.
        distance_frozen_to_sgd: distance from the frozen solution to the end of the unfrozen training, noise included.
        distance_formerly_zero: the same distance over the entries that were frozen at zero. The initial noise alone
            contributes .13: .09 in Q and K, and .04 in the embeddings, whose formerly frozen entries Table 1 leaves
            out.
        distance_init_to_frozen: distance from the initialisation to the frozen solution, for scale.
        positional_share, semantic_share: see `shares`.
        status: the worse status of the two trainings.
    """

    accuracy: np.ndarray
    accuracy_after_unfreezing: np.ndarray
    distance_frozen_to_sgd: np.ndarray
    distance_formerly_zero: np.ndarray
    distance_init_to_frozen: np.ndarray
    positional_share: np.ndarray
    positional_share_after_unfreezing: np.ndarray
    semantic_share: np.ndarray
    semantic_share_after_unfreezing: np.ndarray
    status: np.ndarray

    def _numbers(self) -> dict[str, np.ndarray]:
        """Return every field but `status`."""
        return {name: values for name, values in vars(self).items() if name != "status"}

    def to_dict(self) -> dict[str, float]:
        """Return the mean and the standard deviation over the runs (NaN for one run) of every field but `status`."""
        out = {}
        for name, values in self._numbers().items():
            out[f"{name}_mean"], out[f"{name}_std"] = _mean_and_std(values)
        return out

    def describe(self) -> Description:
        return Description(f"{len(self.status)} runs", _counted(self.status), tables=[("", _rows([self]))])


def _counted(status: np.ndarray) -> str:
    """Describe how many runs ended with which status."""
    return ", ".join(f"{np.sum(status == s)} {Status.name_of(s)}" for s in np.unique(status))


def sample(key: jax.Array, n: int = 50_000, *, length: int = 10, tokens: int = 15, train_share: float = 0.7) -> Data:
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
    _check_sizes(length=length, tokens=tokens, n=n)
    require_key(key)
    require_number(train_share, "train_share", "between 0 and 1", lambda v: 0 < v < 1)
    require_memory(5.0 * n * length * 4, "n", n, f"sequences of {length}, sorted,")
    draw, split = jax.random.split(key)
    x = np.unique(np.asarray(jax.random.randint(draw, (n, length), 0, tokens, jnp.int32)), axis=0)
    cut = int(train_share * len(x))
    require(0 < cut < len(x), "train_share", train_share, f"such that both parts of {len(x)} sequences have some")
    x = x[np.asarray(jax.random.permutation(split, len(x)))]
    return Data(jnp.asarray(x[:cut]), jnp.asarray(x[cut:]), tokens)


def counts(x: jax.Array) -> jax.Array:
    """Return the target, the number of times that each token occurs in its sequence: (..., L) -> (..., L)."""
    return jnp.sum(x[..., :, None] == x[..., None, :], axis=-1, dtype=x.dtype)


def mask(transformer: Transformer, mechanism: str) -> Transformer:
    """Return the mask of one transformer: one if a weight exists, zero if it is frozen at zero.

    Raises:
        InputError: if the mechanism is unknown.
    """
    require_choice(mechanism, "mechanism", MECHANISMS)
    ones = jax.tree.map(jnp.ones_like, transformer)
    if mechanism == "free":
        return ones
    d = transformer.query.shape[0]
    half = (jnp.arange(d) < d // 2).astype(transformer.query.dtype)
    read = (half if mechanism == "semantic" else 1 - half)[:, None]
    halves = ones.tokens * half, ones.positions * (1 - half), ones.query * read, ones.key * read
    return eqx.tree_at(_masked, ones, halves)


def _masked(transformer: Transformer) -> tuple[jax.Array, ...]:
    """Return the arrays that have frozen entries under some mask: E, P, Q, K."""
    return transformer.tokens, transformer.positions, transformer.query, transformer.key


def attention(transformer: Transformer, x: Any) -> jax.Array:
    """Return attention matrices of one transformer.

    Args:
        x: tokens, (..., L).

    Returns:
        S, (..., L, L).

    Raises:
        InputError: if `x` has the wrong length or tokens that are not in the alphabet.
    """
    x, T, L = jnp.asarray(x), transformer.tokens.shape[0], transformer.positions.shape[0]
    require(x.ndim and x.shape[-1] == L, "x", x.shape, f"of a shape that ends with L = {L}")
    _check_tokens("x", x, T)
    return _attention(transformer, x)


@eqx.filter_jit
@precise
def _attention(transformer: Transformer, x: jax.Array) -> jax.Array:
    return jnp.vectorize(lambda x: transformer(x)[1], signature="(l)->(l,m)")(x)


def shares(S: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
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
        S: attention matrices, (n, L, L).
        x: tokens, (n, L).
    """
    L = x.shape[-1]
    off = ~jnp.eye(L, dtype=bool)
    pairs = L * (L - 1)
    s = jnp.sum(S, axis=(-2, -1), where=off).mean() / pairs
    deviation = jnp.where(off, S - s, 0)
    var = jnp.sum(jnp.mean(deviation**2, axis=0)) / pairs
    positional = jnp.sum(jnp.mean(deviation, axis=0) ** 2) / pairs
    equal = (x[:, :, None] == x[:, None, :]) & off
    semantic = jnp.zeros_like(var)
    for group in (equal, ~equal & off):
        size = jnp.mean(group, axis=0, dtype=S.dtype).sum() / pairs
        mean = jnp.mean(jnp.where(group, deviation, 0), axis=0).sum() / pairs
        semantic += mean**2 / jnp.maximum(size, jnp.finfo(S.dtype).tiny)
    some = jnp.where(var > 0, var, 1)  # without variance the numerators are zero as well
    return positional / some, semantic / some


def train(
    keys: jax.Array,
    data: Data,
    mechanism: str | Sequence[str] = "free",
    *,
    width: int = 64,
    hidden: int = 128,
    epochs: int = 200,
    batch: int = 32,
    rate: Any = 1e-3,
    dtype: Any = jnp.float32,
    checkpoint: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Training:
    """Train K transformers from their masked initialisation with Adam (betas .9 and .98, eps 1e-9), Appendix A.4.

    The last batch of an epoch holds the remaining sequences and may be smaller.

    Args:
        keys: random keys of initialisation and shuffling, one per run, (K,). A run does not depend on the others.
        mechanism: "semantic", "positional", "free", or a list with one of them for each run.
        width: d_m, even.
        hidden: p.
        batch: number of sequences in a step.
        rate: learning rate.
        checkpoint: file to write after every epoch, and to continue from if it exists. The results are then those of an
            uninterrupted run, bit by bit on the same machine. `epochs` may be larger than in the interrupted call.
        progress: called with the numbers of finished and of all epochs, before the first and after each.

    Raises:
        InputError: if an argument is unknown, out of range or of the wrong shape (the error names it), or the
            checkpoint has another configuration or more epochs.
    """
    plan = _Plan(data, epochs, batch, rate, checkpoint, progress)
    first, shuffle = _roles(keys, 0, 1)
    names = [mechanism] * len(keys) if isinstance(mechanism, str) else list(mechanism)
    require(len(names) == len(keys), "mechanism", names, f"one name, or one for each of the {len(keys)} keys")
    for name in names:
        require_choice(name, "mechanism", MECHANISMS)
    require(jnp.issubdtype(dtype, jnp.floating), "dtype", str(dtype), "a type of floats")
    sizes = {"length": data.train.shape[1], "tokens": data.tokens, "width": width, "hidden": hidden}
    _check_sizes(**sizes)
    # Memory for the weights, their start, and two moments of the gradient.
    weights = 4.0 * len(keys) * width * (3 * width + hidden) * jnp.dtype(dtype).itemsize
    require_memory(weights, "width", width, f"{len(keys)} transformers of {hidden} hidden units")
    start, masks = _stacked([_masked_start(key, name, sizes, dtype) for key, name in zip(first, names, strict=True)])
    return _run(start, masks, shuffle, plan, {"optimizer": "adam", "mechanism": names})


@eqx.filter_jit
def _masked_start(key: jax.Array, mechanism: str, sizes: dict[str, int], dtype: Any) -> tuple[Transformer, Transformer]:
    """Return the masked initialisation of a run, and its mask."""
    fresh = Transformer(key, **sizes, dtype=dtype)
    own = mask(fresh, mechanism)
    return jax.tree.map(jnp.multiply, fresh, own), own


@jax.jit
def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)


def unfreeze(
    keys: jax.Array,
    frozen: Training,
    data: Data,
    *,
    epochs: int = 100,
    batch: int = 32,
    rate: Any = 1e-3,
    noise: Any = 1e-3,
    checkpoint: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Training:
    """Continue to train frozen solutions with all weights free, by plain stochastic gradient descent, Appendix A.5.

    Args:
        keys: random keys of noise and shuffling, one per run, (K,). They may be the keys given to `train`.
        frozen: result of `train`.
        noise: standard deviation of the Gaussian noise that is added before training to the arrays with frozen entries
            (E, P, Q, K), as in the published code.

    The other arguments, and the errors, are those of `train`.
    """
    plan = _Plan(data, epochs, batch, rate, checkpoint, progress)
    shaking, shuffle = _roles(keys, 2, 3)
    require_kind(frozen, "frozen", Training, "a Training of `train`")
    runs = len(frozen.status)
    require(len(keys) == runs, "keys", keys.shape, f"one for each of the {runs} runs")
    L, T = (a.shape[1] for a in (frozen.start.positions, frozen.start.tokens))
    own = data.train.shape[1], data.tokens
    want = f"sequences of {L} out of {T} tokens, as `frozen` was trained on"
    require(own == (L, T), "data", "sequences of {} out of {}".format(*own), want)
    require_not_negative(noise, "noise")
    start, ones = _shaken(frozen.weights, shaking, float(noise))
    return _run(start, ones, shuffle, plan, {"optimizer": "sgd", "noise": float(noise)})


@jax.jit
@partial(jax.vmap, in_axes=(0, 0, None))
def _shaken(weights: Transformer, key: jax.Array, noise: float) -> tuple[Transformer, Transformer]:
    """Add noise to the arrays with frozen entries. Return these weights, and a mask of ones."""
    draws = zip(_masked(weights), jax.random.split(key, 4), strict=True)
    moved = [a + noise * jax.random.normal(k, a.shape, a.dtype) for a, k in draws]
    return eqx.tree_at(_masked, weights, moved), mask(weights, "free")


def compare(frozen: Training, free: Training) -> Comparison:
    """Compare solutions before and after unfreezing.

    Args:
        frozen: result of `train`.
        free: result of `unfreeze` on `frozen`.

    Raises:
        InputError: if the numbers of runs differ.
    """
    runs = len(frozen.status)
    require(len(free.status) == runs, "free", f"{len(free.status)} runs", f"what became of the {runs} frozen runs")
    before, after = (jax.tree.map(lambda curve: curve[:, -1], training.history) for training in (frozen, free))
    return Comparison(
        accuracy=before.test_accuracy,
        accuracy_after_unfreezing=after.test_accuracy,
        distance_frozen_to_sgd=np.asarray(_distance(free.weights, frozen.weights)),
        distance_formerly_zero=np.asarray(_distance(free.weights, frozen.weights, frozen.mask)),
        distance_init_to_frozen=np.asarray(_distance(frozen.weights, frozen.start)),
        positional_share=before.positional_share,
        positional_share_after_unfreezing=after.positional_share,
        semantic_share=before.semantic_share,
        semantic_share_after_unfreezing=after.semantic_share,
        status=np.maximum(frozen.status, free.status),
    )


@jax.jit
@jax.vmap
def _distance(a: Transformer, b: Transformer, mask: Transformer | None = None) -> jax.Array:
    """Return the distance between the weights of every run, or between the weights that a mask freezes."""
    change = jax.tree.map(jnp.subtract, a, b)
    if mask is not None:
        change = jax.tree.map(lambda a, m: a * (1 - m), change, mask)
    return jnp.asarray(sum(jnp.sqrt(jnp.sum(a**2)) for a in jax.tree.leaves(change)))


def table(comparisons: dict[str, Comparison]) -> str:
    """Return means and standard deviations over the runs as a Markdown table (the paper's Table 1, and more)."""
    heads = [f"{name}, {len(comparison.status)} runs" for name, comparison in comparisons.items()]
    rows = [("", *heads), ("---",) * (1 + len(heads)), *_rows([*comparisons.values()])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(comparisons: list[Comparison]) -> list[tuple[str, ...]]:
    """Return a row of cells for each number that is compared."""
    names = comparisons[0]._numbers()
    return [(name.replace("_", " "), *(_spread(getattr(c, name)) for c in comparisons)) for name in names]


def _mean_and_std(values: np.ndarray) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _spread(values: np.ndarray) -> str:
    mean, std = _mean_and_std(values)
    return f"{mean:.4f} ± {std:.4f}".removesuffix(" ± nan")


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if name == "width" and not (isinstance(value, (int, np.integer)) and value >= 2 and value % 2 == 0):
            raise InputError(name, f"must be an even integer of at least 2, got {name}={value!r}")
        require_count(value, name, 2 if name in ("length", "tokens", "n") else 1)


def _check_tokens(name: str, x: Any, tokens: int) -> None:
    if is_concrete(x):
        x = np.asarray(x)
        require(x.dtype.kind in "iu" and np.all((x >= 0) & (x < tokens)), name, x, f"tokens between 0 and {tokens - 1}")


def _roles(keys: jax.Array, *roles: int) -> list[jax.Array]:
    """Return for each role, such as noise or shuffling, an array of independent keys of the runs."""
    require_keys(keys)
    return [jax.vmap(jax.random.fold_in, (0, None))(keys, role) for role in roles]


OPTIMIZERS = {"adam": optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9), "sgd": optax.identity()}


class _Plan(eqx.Module):
    """Checked arguments that `train` and `unfreeze` have in common."""

    data: Data
    epochs: int
    batch: int
    rate: Any
    checkpoint: str | os.PathLike | None
    progress: Callable[[int, int], None]

    def __check_init__(self) -> None:
        require_kind(self.data, "data", Data, "Data of `sample`")
        _check_sizes(epochs=self.epochs, batch=self.batch)
        require_positive(self.rate, "rate")
        require(is_concrete(self.rate), "rate", str(self.rate), "a known number")
        kinds = (str, os.PathLike, type(None))
        require_kind(self.checkpoint, "checkpoint", kinds, "the path of a file, or None")


def _run(start: Transformer, masks: Transformer, keys: jax.Array, plan: _Plan, about: dict[str, Any]) -> Training:
    """Train from a start, or continue from the checkpoint.

    Args:
        about: configuration of the run besides the plan, which identifies the checkpoint; it names the optimizer.
    """
    data, epochs, batch, progress = plan.data, plan.epochs, plan.batch, plan.progress
    dtype, optimizer = start.query.dtype, about["optimizer"]
    about = {
        **about,
        **{"rate": float(plan.rate), "batch": int(batch), "runs": len(keys), "dtype": dtype.name},
        **{"sequences": list(data.train.shape), "tokens": data.tokens, "width": start.query.shape[1]},
        **{"hidden": start.hidden.weight.shape[1], "start": fingerprint(start)},
        **{"keys": fingerprint(jax.random.key_data(keys)), "data": fingerprint(data)},
    }
    memory = jax.jit(jax.vmap(OPTIMIZERS[optimizer].init))(start)
    fresh = (start, memory), History(*[np.zeros((len(keys), 0), dtype)] * 5)
    kept = Checkpoint(plan.checkpoint, about)
    done, (state, history) = kept.load(fresh)
    want = f"at least the {done} that the checkpoint {plan.checkpoint} has, or name another file"
    require(done <= epochs, "epochs", epochs, want)
    progress(done, epochs)
    rate = jnp.asarray(plan.rate, dtype)
    for epoch in range(done, epochs):
        state, measured = _epoch(state, masks, keys, data, rate, jnp.int32(epoch), optimizer, batch)
        history = jax.tree.map(lambda old, new: np.column_stack([old, new]), history, measured)
        kept.save(epoch + 1, (state, history))
        progress(epoch + 1, epochs)
    return Training(start, state[0], masks, history, history.status())


@eqx.filter_jit
@precise
def _epoch(
    state: tuple[Transformer, Any],
    masks: Transformer,
    keys: jax.Array,
    data: Data,
    rate: jax.Array,
    epoch: jax.Array,
    optimizer: str,
    batch: int,
) -> tuple[tuple[Transformer, Any], History]:
    """Train all runs for one epoch. Return their state and the measurements, (K,) each."""
    n = len(data.train)
    steps = -(-n // batch)
    tool = OPTIMIZERS[optimizer]
    present = (jnp.arange(steps * batch) < n).astype(rate.dtype).reshape(steps, batch)

    def risk(weights: Transformer, x: jax.Array, present: jax.Array) -> jax.Array:
        logits, _ = jax.vmap(weights)(x)
        return jnp.sum(present * _cross_entropy(logits, x)) / jnp.sum(present)

    def one(state: tuple[Transformer, Any], mask: Transformer, key: jax.Array) -> tuple[Any, History]:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), jnp.arange(n, dtype=jnp.int32))
        batches = data.train[jnp.resize(order, (steps, batch))]

        def step(state: tuple[Transformer, Any], batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            weights, memory = state
            loss, gradient = jax.value_and_grad(risk)(weights, *batch)
            direction, memory = tool.update(jax.tree.map(jnp.multiply, gradient, mask), memory)
            return (jax.tree.map(lambda w, u: w - rate * u, weights, direction), memory), loss

        state, losses = lax.scan(step, state, (batches, present))
        return state, History(jnp.mean(losses), *_test(state[0], data.test))

    return jax.vmap(one)(state, masks, keys)


def _cross_entropy(logits: jax.Array, x: jax.Array) -> jax.Array:
    """Return the cross-entropy averaged over the places of a sequence: logits (..., L, L + 1), x (..., L) -> (...)."""
    target = jax.nn.one_hot(counts(x), logits.shape[-1], dtype=logits.dtype)
    return jnp.mean(optax.softmax_cross_entropy(logits, target), axis=-1)


def _test(weights: Transformer, x: jax.Array) -> tuple[jax.Array, ...]:
    """Return loss, accuracy, positional and semantic share on held-out sequences, in batches that fit into cache."""

    def each(x: jax.Array) -> tuple[jax.Array, ...]:
        logits, S = weights(x)
        right = jnp.argmax(logits, axis=-1) == counts(x)
        return _cross_entropy(logits, x), jnp.mean(right, dtype=logits.dtype), S

    losses, right, S = lax.map(each, x, batch_size=min(500, len(x)))
    return jnp.mean(losses), jnp.mean(right), *shares(S, x)
