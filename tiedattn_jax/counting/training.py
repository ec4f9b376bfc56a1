"""Training of the transformer: many runs at once, frozen by a mask or free, and their comparison, run by run.

The comparison is Table 1 of the paper.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, PyTree

from ..base.arrays import AnyArray, Number, indexed, precise
from ..base.errors import (
    float_dtype,
    is_concrete,
    require,
    require_choice,
    require_kind,
    require_memory,
    require_not_negative,
    require_positive,
)
from ..base.files import Store, fingerprint
from ..base.progress import Progress, Report, reporter
from ..base.report import Description, picture
from ..base.results import Result, Status
from .task import MECHANISMS, Data, Transformer, check_sizes, counts, mask, masked, roles, shares

# Smallest test accuracy at which a run counts as converged: it solves the task.
SOLVED = 0.99


class History(eqx.Module):
    """Measurements after every epoch; those of K runs, or of one run after one epoch.

    Attributes:
        train_loss: mean over the batches of the epoch; the loss of a batch is that before its step.
        test_loss, test_accuracy: means over all places of the held-out sequences.
        positional_share, semantic_share: shares for the attention matrices of the held-out sequences; see `shares`.
    """

    train_loss: Float[AnyArray, "*epochs"]
    test_loss: Float[AnyArray, "*epochs"]
    test_accuracy: Float[AnyArray, "*epochs"]
    positional_share: Float[AnyArray, "*epochs"]
    semantic_share: Float[AnyArray, "*epochs"]

    def status(self) -> Int[np.ndarray, " K"]:
        """Return the status of every run; see `Training`."""
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
        status: a `Status` for every run, as integers: `converged` if the final test accuracy is at least
            `SOLVED`, `max_steps` if it is lower, `nonfinite` if the run diverged.
    """

    USABLE = Status.converged  # it solves the task
    start: Transformer
    weights: Transformer
    mask: Transformer
    history: History
    status: Int[np.ndarray, " K"]

    plot = picture(
        "simulations.learning_figure", "losses, accuracy and shares, epoch by epoch", "train_loss", "test_error",
        "share", many=lambda run: {"training": [run]},
    )  # fmt: skip

    def describe(self) -> Description:
        runs, epochs = self.history.train_loss.shape
        names = "train_loss", "test_loss", "test_accuracy"
        numbers = [(name, spread(getattr(self.history, name)[:, -1])) for name in names]
        return Description(f"{runs} runs of {epochs} epochs, mean ± standard deviation", counted(self.status), numbers)

    def run(self, k: int) -> Transformer:
        """Return the trained transformer of run k."""
        return indexed(self.weights, k)


def counted(status: Int[np.ndarray, " K"]) -> str:
    """Describe how many runs ended with which status."""
    return ", ".join(f"{np.sum(status == s)} {Status.name_of(s)}" for s in np.unique(status))


def train(
    keys: Key[Array, " K"],
    data: Data,
    mechanism: str | Sequence[str] = "free",
    *,
    width: int = 64,
    hidden: int = 128,
    epochs: int = 200,
    batch: int = 32,
    rate: Number = 1e-3,
    dtype: DTypeLike = jnp.float32,
    checkpoint: str | os.PathLike | None = None,
    progress: Progress = None,
) -> Training:
    """Train K transformers from their masked initialisation with Adam (betas .9 and .98, eps 1e-9), Appendix A.4.

    The last batch of an epoch holds the remaining sequences and may be smaller.

    Args:
        keys: random keys of initialisation and shuffling, one per run. A run does not depend on the others.
        mechanism: "semantic", "positional", "free", or a list with one of them for each run.
        width: d_m, even.
        hidden: p.
        batch: number of sequences in a step.
        rate: learning rate.
        checkpoint: file to write after every epoch, and to continue from if it exists. The results are then those of an
            uninterrupted run, bit by bit on the same machine. `epochs` may be larger than in the interrupted call.
        progress: None, True for a bar, or a function of the numbers of finished and of all epochs.

    Raises:
        InputError: if an argument is unknown, out of range or of the wrong shape (the error names it), or the
            checkpoint has another configuration or more epochs.
    """
    plan = _Plan(data, epochs, batch, rate, checkpoint, reporter(progress, "epochs"))
    init_keys, shuffle_keys = roles(keys, 0, 1)
    names = [mechanism] * len(keys) if isinstance(mechanism, str) else list(mechanism)
    require(len(names) == len(keys), "mechanism", names, f"one name, or one for each of the {len(keys)} keys")
    names = [require_choice(name, "mechanism", MECHANISMS) for name in names]
    dtype = float_dtype(dtype)
    sizes = {"length": data.train.shape[1], "tokens": data.tokens, "width": width, "hidden": hidden}
    check_sizes(**sizes)
    # Memory for the weights, their start, and two moments of the gradient.
    weights = 4.0 * len(keys) * width * (3 * width + hidden) * jnp.dtype(dtype).itemsize
    require_memory(weights, "width", width, f"{len(keys)} transformers of {hidden} hidden units")
    start, masks = _masked_starts(init_keys, names, sizes, dtype)
    return _run_epochs(start, masks, shuffle_keys, plan, {"optimizer": "adam", "mechanism": names})


@eqx.filter_jit
def _masked_starts(
    keys: Key[Array, " K"], mechanisms: list[str], sizes: dict[str, int], dtype: DTypeLike
) -> tuple[Transformer, Transformer]:
    """Return the masked initialisation of every run, and its mask."""
    weights = jax.vmap(lambda key: Transformer(key, **sizes, dtype=dtype))(keys)
    masks = [mask(indexed(weights, k), name) for k, name in enumerate(mechanisms)]
    stacked_masks = jax.tree.map(lambda *a: jnp.stack(a), *masks)
    return jax.tree.map(jnp.multiply, weights, stacked_masks), stacked_masks


def unfreeze(
    keys: Key[Array, " K"],
    frozen: Training,
    data: Data,
    *,
    epochs: int = 100,
    batch: int = 32,
    rate: Number = 1e-3,
    noise: Number = 1e-3,
    checkpoint: str | os.PathLike | None = None,
    progress: Progress = None,
) -> Training:
    """Continue to train frozen solutions with all weights free, by plain stochastic gradient descent, Appendix A.5.

    Args:
        keys: random keys of noise and shuffling, one per run. They may be the keys given to `train`.
        frozen: result of `train`.
        noise: standard deviation of the Gaussian noise that is added before training to the arrays with frozen entries
            (E, P, Q, K), as in the published code.

    The other arguments, and the errors, are those of `train`.
    """
    plan = _Plan(data, epochs, batch, rate, checkpoint, reporter(progress, "epochs"))
    noise_keys, shuffle_keys = roles(keys, 2, 3)
    require_kind(frozen, "frozen", Training, "a Training of `train`")
    runs = len(frozen.status)
    require(len(keys) == runs, "keys", keys.shape, f"one for each of the {runs} runs")
    L, T = (a.shape[1] for a in (frozen.start.positions, frozen.start.tokens))
    sizes = data.train.shape[1], data.tokens
    requirement = f"sequences of {L} out of {T} tokens, as `frozen` was trained on"
    require(sizes == (L, T), "data", "sequences of {} out of {}".format(*sizes), requirement)
    require_not_negative(noise, "noise")
    start, ones = _with_noise(frozen.weights, noise_keys, float(noise))
    return _run_epochs(start, ones, shuffle_keys, plan, {"optimizer": "sgd", "noise": float(noise)})


@jax.jit
@partial(jax.vmap, in_axes=(0, 0, None))
def _with_noise(weights: Transformer, key: PRNGKeyArray, noise: Float[Array, ""]) -> tuple[Transformer, Transformer]:
    """Add noise to the arrays with frozen entries. Return these weights, and a mask of ones."""
    draws = zip(masked(weights), jax.random.split(key, 4), strict=True)
    noisy = [a + noise * jax.random.normal(k, a.shape, a.dtype) for a, k in draws]
    return eqx.tree_at(masked, weights, noisy), mask(weights, "free")


OPTIMIZERS = {"adam": optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9), "sgd": optax.identity()}


class _Plan(eqx.Module):
    """Checked arguments that `train` and `unfreeze` have in common."""

    data: Data
    epochs: int
    batch: int
    rate: Number
    checkpoint: str | os.PathLike | None
    progress: Report

    def __check_init__(self) -> None:
        require_kind(self.data, "data", Data, "Data of `sample`")
        check_sizes(epochs=self.epochs, batch=self.batch)
        require_positive(self.rate, "rate")
        require(is_concrete(self.rate), "rate", str(self.rate), "a known number")
        kinds = (str, os.PathLike, type(None))
        require_kind(self.checkpoint, "checkpoint", kinds, "the path of a file, or None")


def _run_epochs(
    start: Transformer, masks: Transformer, keys: Key[Array, " K"], plan: _Plan, configuration: dict[str, Any]
) -> Training:
    """Train from a start, or continue from the checkpoint.

    Args:
        configuration: settings of the run besides the plan; they name the optimizer and identify the checkpoint.
    """
    data, epochs, batch, progress = plan.data, plan.epochs, plan.batch, plan.progress
    dtype, optimizer = start.query.dtype, configuration["optimizer"]
    configuration = {
        **configuration,
        **{"rate": float(plan.rate), "batch": int(batch), "runs": len(keys), "dtype": dtype.name},
        **{"sequences": list(data.train.shape), "tokens": data.tokens, "width": start.query.shape[1]},
        **{"hidden": start.hidden.weight.shape[1], "start": fingerprint(start)},
        **{"keys": fingerprint(jax.random.key_data(keys)), "data": fingerprint(data)},
    }
    initial = (start, _first_memory(start, optimizer)), History(*[np.zeros((len(keys), 0), dtype)] * 5)
    checkpoint = Store(plan.checkpoint, configuration, "checkpoint", "be of this configuration, or another file")
    done, (state, history) = checkpoint.latest(initial)
    requirement = f"at least the {done} that the checkpoint {plan.checkpoint} has, or name another file"
    require(done <= epochs, "epochs", epochs, requirement)
    progress(done, epochs)
    rate = jnp.asarray(plan.rate, dtype)
    for epoch in range(done, epochs):
        state, measurements = _epoch(state, masks, keys, data, rate, jnp.int32(epoch), optimizer, batch)
        history = jax.tree.map(lambda old, new: np.column_stack([old, new]), history, measurements)
        checkpoint.keep(epoch + 1, (state, history))
        progress(epoch + 1, epochs)
    return Training(start, state[0], masks, history, history.status())


_RunState = tuple[Transformer, PyTree]  # the weights, and the memory of the optimizer


@eqx.filter_jit
def _first_memory(weights: Transformer, optimizer: str) -> PyTree:
    """Return the memory of the optimizer before the first step of every run."""
    return jax.vmap(OPTIMIZERS[optimizer].init)(weights)


@eqx.filter_jit
@precise
def _epoch(
    state: _RunState,
    masks: Transformer,
    keys: Key[Array, " K"],
    data: Data,
    rate: Float[Array, ""],
    epoch: Int[Array, ""],
    optimizer: str,
    batch: int,
) -> tuple[_RunState, History]:
    """Train all runs for one epoch. Return their state and the measurements of every run."""
    n = len(data.train)
    steps = -(-n // batch)
    transform = OPTIMIZERS[optimizer]
    present = (jnp.arange(steps * batch) < n).astype(rate.dtype).reshape(steps, batch)

    def risk(weights: Transformer, x: Int[Array, "batch L"], present: Float[Array, " batch"]) -> Float[Array, ""]:
        logits, _ = jax.vmap(weights)(x)
        return jnp.sum(present * _cross_entropy(logits, x)) / jnp.sum(present)

    def train_run(state: _RunState, mask: Transformer, key: PRNGKeyArray) -> tuple[_RunState, History]:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), jnp.arange(n, dtype=jnp.int32))
        batches = data.train[jnp.resize(order, (steps, batch))]

        def step(
            state: _RunState, batch: tuple[Int[Array, "batch L"], Float[Array, " batch"]]
        ) -> tuple[_RunState, Float[Array, ""]]:
            weights, memory = state
            loss, gradient = jax.value_and_grad(risk)(weights, *batch)
            direction, memory = transform.update(jax.tree.map(jnp.multiply, gradient, mask), memory)
            return (jax.tree.map(lambda w, u: w - rate * u, weights, direction), memory), loss

        state, losses = lax.scan(step, state, (batches, present))
        return state, History(jnp.mean(losses), *_test(state[0], data.test))

    return jax.vmap(train_run)(state, masks, keys)


def _cross_entropy(logits: Float[Array, "*n L L+1"], x: Int[Array, "*n L"]) -> Float[Array, "*n"]:
    """Return the cross-entropy averaged over the places of a sequence."""
    target = jax.nn.one_hot(counts(x), logits.shape[-1], dtype=logits.dtype)
    return jnp.mean(optax.softmax_cross_entropy(logits, target), axis=-1)


def _test(weights: Transformer, x: Int[AnyArray, "m L"]) -> tuple[Float[Array, ""], ...]:
    """Return loss, accuracy, positional and semantic share on held-out sequences, in batches that fit into cache."""

    def test_sequence(x: Int[Array, " L"]) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, "L L"]]:
        logits, S = weights(x)
        is_correct = jnp.argmax(logits, axis=-1) == counts(x)
        return _cross_entropy(logits, x), jnp.mean(is_correct, dtype=logits.dtype), S

    losses, accuracy, S = lax.map(test_sequence, x, batch_size=min(500, len(x)))
    return jnp.mean(losses), jnp.mean(accuracy), *shares(S, x)


def mean_and_std(values: Float[np.ndarray, " K"]) -> tuple[float, float]:
    """Return the mean and the standard deviation over the runs, NaN for one run."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def spread(values: Float[np.ndarray, " K"]) -> str:
    mean, std = mean_and_std(values)
    return f"{mean:.4f} ± {std:.4f}".removesuffix(" ± nan")


def compare(frozen: Training, free: Training) -> dict[str, Float[np.ndarray, " K"]]:
    """Compare K frozen solutions with the solutions after training with all weights free.

    A distance is ``sum over arrays of ||change||_2``.

    Args:
        frozen: result of `train`.
        free: result of `unfreeze` on `frozen`.

    Returns:
        Numbers of every run, by name:

        - accuracy: test accuracy, here and in `_after_unfreezing`, as the shares.
        - distance_frozen_to_sgd: distance from the frozen solution to the end of the unfrozen training, noise included.
        - distance_formerly_zero: the same distance over the entries that were frozen at zero. The initial noise alone
          contributes .13: .09 in Q and K, and .04 in the embeddings, whose formerly frozen entries Table 1 leaves out.
        - distance_init_to_frozen: distance from the initialisation to the frozen solution, for scale.
        - positional_share, semantic_share: see `shares`.

    Raises:
        InputError: if the numbers of runs differ.
    """
    runs = len(frozen.status)
    require(len(free.status) == runs, "free", f"{len(free.status)} runs", f"what became of the {runs} frozen runs")
    before, after = (indexed(training.history, np.s_[:, -1]) for training in (frozen, free))
    numbers = {
        "accuracy": before.test_accuracy,
        "accuracy_after_unfreezing": after.test_accuracy,
        "distance_frozen_to_sgd": np.asarray(_distance(free.weights, frozen.weights)),
        "distance_formerly_zero": np.asarray(_distance(free.weights, frozen.weights, frozen.mask)),
        "distance_init_to_frozen": np.asarray(_distance(frozen.weights, frozen.start)),
    }
    for share in ("positional_share", "semantic_share"):
        numbers |= {share: getattr(before, share), f"{share}_after_unfreezing": getattr(after, share)}
    return numbers


@jax.jit
@jax.vmap
def _distance(a: Transformer, b: Transformer, mask: Transformer | None = None) -> Float[Array, ""]:
    """Return the distance between the weights of every run, or between the weights that a mask freezes."""
    change = jax.tree.map(jnp.subtract, a, b)
    if mask is not None:
        change = jax.tree.map(lambda a, m: a * (1 - m), change, mask)
    return jnp.asarray(sum(jnp.sqrt(jnp.sum(a**2)) for a in jax.tree.leaves(change)))


def table(comparisons: dict[str, dict[str, Float[np.ndarray, " K"]]]) -> str:
    """Return means and standard deviations over the runs as a Markdown table (the paper's Table 1, and more)."""
    columns = [*comparisons.values()]
    heads = [f"{name}, {len(comparison['accuracy'])} runs" for name, comparison in comparisons.items()]
    rows = [(name.replace("_", " "), *(spread(column[name]) for column in columns)) for name in columns[0]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [("", *heads), ("---",) * (1 + len(heads)), *rows])
