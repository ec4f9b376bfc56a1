"""Comparison of frozen and free training, run by run (Table 1 of the paper)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..base.errors import (
    require,
)
from ..base.printing import Description
from ..base.results import Result
from ..base.trees import indexed
from .task import Transformer
from .training import Training, counted, mean_and_std, spread


class Comparison(Result):
    """Comparison of K frozen solutions with the solutions after training with all weights free.

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

    accuracy: Float[np.ndarray, " K"]
    accuracy_after_unfreezing: Float[np.ndarray, " K"]
    distance_frozen_to_sgd: Float[np.ndarray, " K"]
    distance_formerly_zero: Float[np.ndarray, " K"]
    distance_init_to_frozen: Float[np.ndarray, " K"]
    positional_share: Float[np.ndarray, " K"]
    positional_share_after_unfreezing: Float[np.ndarray, " K"]
    semantic_share: Float[np.ndarray, " K"]
    semantic_share_after_unfreezing: Float[np.ndarray, " K"]
    status: Int[np.ndarray, " K"]

    def _numbers(self) -> dict[str, Float[np.ndarray, " K"]]:
        """Return every field but `status`."""
        return {name: values for name, values in vars(self).items() if name != "status"}

    def to_dict(self) -> dict[str, float]:
        """Return the mean and the standard deviation over the runs (NaN for one run) of every field but `status`."""
        out = {}
        for name, values in self._numbers().items():
            out[f"{name}_mean"], out[f"{name}_std"] = mean_and_std(values)
        return out

    def describe(self) -> Description:
        return Description(f"{len(self.status)} runs", counted(self.status), tables=[("", _rows([self]))])


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
    before, after = (indexed(training.history, np.s_[:, -1]) for training in (frozen, free))
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
def _distance(a: Transformer, b: Transformer, mask: Transformer | None = None) -> Float[Array, ""]:
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
    return [(name.replace("_", " "), *(spread(getattr(c, name)) for c in comparisons)) for name in names]
