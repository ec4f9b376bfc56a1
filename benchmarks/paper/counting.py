"""Figs. 1, 4, 5, 6 and Table 1: attention in the counting task, and the effect of unfreezing weights (Appendix A)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from tiedattn_jax import counting
from tiedattn_jax.plotting.simulations import attention_figure

from .data import Columns, Task, keep, known, read
from .page import Row

MECHANISMS = ("positional", "semantic")
SIZES = {"runs": 10, "epochs": 200, "free_epochs": 100, "samples": 50_000}
REDUCED = {"runs": 1, "epochs": 30, "free_epochs": 10, "samples": 50_000}
SEED = 0


def compute(task: Task) -> None:
    """Train every run with frozen weights, then with all weights free; write one file per run and mechanism.

    An interrupted training resumes from its last epoch.
    """
    sizes = SIZES if task.full else REDUCED
    sampling, running = jax.random.split(jax.random.key(SEED))
    data = counting.sample(sampling, sizes["samples"])
    examples = data.examples()
    for k, key in enumerate(jax.random.split(running, sizes["runs"])):
        for name in MECHANISMS:
            path = _path(task.folder, name, k)
            metadata = {**sizes, "seed": SEED, "mechanism": name, "run": k}
            if known(path, metadata):
                continue

            def options(stage: str, name: str = name, k: int = k) -> dict[str, Any]:
                path = task.folder / f"counting_{name}_{k}_{stage}.checkpoint"
                return {"checkpoint": path, "progress": task.bar(f"run {k}, {name}, {stage}")}

            frozen = counting.train(key[None], data, name, epochs=sizes["epochs"], **options("frozen"))
            free = counting.unfreeze(key[None], frozen, data, epochs=sizes["free_epochs"], **options("free"))
            comparison = {name: values[0] for name, values in counting.compare(frozen, free).items()}
            matrices = {
                f"attention_{stage}": counting.attention(training.run(0), examples)
                for stage, training in (("frozen", frozen), ("free", free))
            }
            keep(path, metadata, {**comparison, **matrices, "examples": examples})


def load(folder: Path) -> dict[str, list[Columns]]:
    """Read the finished runs, by mechanism.

    Raises:
        InputError: the first run of a mechanism is not finished.
    """
    runs = {}
    for name in MECHANISMS:
        first, *later = (_path(folder, name, k) for k in range(SIZES["runs"]))
        runs[name] = [read(path)[1] for path in (first, *(path for path in later if path.exists()))]
    return runs


def draw(runs: dict[str, list[Columns]], parts: dict[str, tuple[str, str]], count: int = 3) -> Figure:
    """Plot the attention of the first run on held-out sequences, those with the most repetitions last.

    Args:
        parts: rows of the picture by name, each a mechanism and a stage.
        count: number of sequences.
    """
    matrices = {name: runs[mechanism][0][f"attention_{stage}"][-count:] for name, (mechanism, stage) in parts.items()}
    return attention_figure(matrices, runs[MECHANISMS[0]][0]["examples"][-count:])


# Values of Table 1, mean and standard deviation over ten runs.
_PUBLISHED = {
    "positional": {
        "distance_formerly_zero": (0.115, None),
        "accuracy": (0.9988, 0.0004),
        "distance_frozen_to_sgd": (0.61, 0.13),
    },
    "semantic": {
        "distance_formerly_zero": (0.103, None),
        "accuracy": (0.9989, 0.0012),
        "distance_frozen_to_sgd": (0.46, 0.24),
    },
}
_REASONS = {"distance_formerly_zero": "published: without the embeddings, of which the noise alone makes .04"}


def rows(runs: dict[str, list[Columns]]) -> list[Row]:
    """Return Table 1, and the fractions of the variance of attention that positions and tokens explain."""
    out = []
    for name, group in runs.items():
        note = f"{len(group)} run{'s' if len(group) > 1 else ''}; in brackets standard deviations over the runs"
        for quantity, published in {**_PUBLISHED[name], f"{name}_share": (None, None)}.items():
            values = np.array([float(run[quantity]) for run in group]).round(6)  # numbers are of single precision
            spread = (float(values.std(ddof=1)) or None) if values.size > 1 else None
            reason = "; ".join(filter(None, (_REASONS.get(quantity), note)))
            text = f"{quantity.replace('_', ' ')}, {name}"
            out.append(Row(text, *published, float(values.mean()), spread, reason))
    return out


def _path(folder: Path, mechanism: str, run: int) -> Path:
    return folder / f"counting_{mechanism}_{run}.npz"
