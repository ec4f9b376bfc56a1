"""Training on sampled data, as rows of numbers for the figures of finite size.

Runs go to zero gradient with L-BFGS, whereas the published gradient descent stops after 5000 steps. Teachers have
exactly the model's norm, so that the scatter comes from the sentences alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Real

import tiedattn_jax as ta
from tiedattn_jax.finite.instances import Compared
from tiedattn_jax.finite.sampling import start as start_of

from .data import Columns, where

BRANCHES = ("positional", "semantic")  # a column `branch` holds the index in this list
QUANTITIES = ("train_loss", "gen_error", "q", "theta", "m")
STEPS = 2000
TRAIN = partial(ta.train, optimizer="lbfgs", steps=STEPS, tol=1e-8)
# Relative difference in loss below which two minima are of one kind. Where the proximal operator jumps, training finds
# different minima of one branch from different starts, and their losses differ by .2 %.
ONE_KIND = 2e-3
SENTENCES = 20_000  # fresh sentences for the test error of an instance
# Columns of `measured` and of `numbers`.
MEASURED = ("instances", *QUANTITIES, *(f"{name}_scatter" for name in QUANTITIES))
NUMBERS = (*QUANTITIES, *(f"{name}_stderr" for name in QUANTITIES))

Start = Callable[[ta.Data, PRNGKeyArray], Float[Array, "d r"]]  # weights from an instance and a key


def train_with_values(model: ta.Model, data: ta.Data, init: Float[Array, "d r"]) -> ta.results.Training:
    """Train with a value matrix.

    The tolerance is loose because every step needs linear algebra of the size of W. The training loss at the end is
    accurate to 1e-4 (d = 1000, alpha = 1).
    """
    return ta.train(model, data, init, value=model.lam, optimizer="lbfgs", steps=STEPS, tol=1e-5)


def informed(branch: str, columns: int = 1) -> Start:
    """Return a start with all columns at the teacher or along the encodings; noise distinguishes several columns."""

    def weights(data: ta.Data, key: PRNGKeyArray) -> Float[Array, "d r"]:
        single = ta.DotProduct(dtype=data.x.dtype)
        tokens = eqx.tree_at(lambda s: (s.means, s.classes), data, (None, None), is_leaf=lambda leaf: leaf is None)
        column = start_of(single, tokens, branch)
        if columns == 1:
            return column
        return jnp.tile(column, (1, columns)) + 0.01 * jax.random.normal(key, (len(column), columns), column.dtype)

    return weights


def measured(
    model: ta.Model,
    d: int,
    alpha: float,
    start: Start,
    instances: int,
    train: Callable[..., ta.results.Training] = TRAIN,
) -> list[float]:
    """Return mean and scatter over instances that did not diverge: the columns `MEASURED`.

    Args:
        train: function that trains, such as `TRAIN`.
    """

    def run(data: ta.Data, key: PRNGKeyArray) -> ta.results.Training:
        return train(model, data, start(data, key))

    keys = jax.random.split(jax.random.key(0), instances)
    result = ta.run_instances(model, d, alpha, run, keys, theory=False, normalise=True, sentences=SENTENCES)
    values = np.array([result.values(name)[result.found] for name in QUANTITIES])
    count = values.shape[1]
    scatter = values.std(axis=1, ddof=1) if count > 1 else np.full(len(QUANTITIES), np.nan)
    mean = values.mean(axis=1) if count else np.full(len(QUANTITIES), np.nan)
    return [count, *mean, *scatter]


def standard_error(columns: dict[str, Real[np.ndarray, " rows"]], name: str) -> Float[np.ndarray, " rows"]:
    """Return the standard error of the mean of a quantity in rows of `measured`."""
    return columns[f"{name}_scatter"] / np.sqrt(columns["instances"])


def numbers(point: ta.results.FixedPoint) -> list[float]:
    """Return losses and sizes of order parameters of a fixed point, with error bars: the columns `NUMBERS`."""
    states = (Compared.of(state.train_loss, state.gen_error, state.overlaps) for state in (point, point.stderr))
    return [float(getattr(state, name)) for state in states for name in QUANTITIES]


def stable(point: ta.results.FixedPoint) -> bool:
    """Return whether the order parameter that a branch lacks does not grow on its state."""
    growth = point.diagnostics.growth_theta if point.branch == "positional" else point.diagnostics.growth_m
    return bool(growth < 1)


def exchange(columns: Columns) -> float:
    """Return the alpha where the semantic start's training loss falls below the positional one's; NaN if nowhere.

    If both starts end in one minimum, or in two of one kind, their difference changes its sign by chance. Two kinds of
    points are therefore left out: those with a relative difference below `ONE_KIND`, and those where the ends are
    closer in (theta, m) than half the larger norm. Among the remaining sign changes the one with the largest change
    counts.
    """
    positional, semantic = (where(columns, branch=k) for k in range(2))
    alphas = np.intersect1d(positional["alpha"], semantic["alpha"])
    names = "train_loss", "theta", "m"
    ends = np.array(
        [[[where(rows, alpha=a)[name][0] for name in names] for rows in (positional, semantic)] for a in alphas]
    )
    losses, overlaps = ends[..., 0], ends[..., 1:]
    gap, sizes = losses[:, 0] - losses[:, 1], np.linalg.norm(overlaps, axis=2)
    distinct = np.linalg.norm(overlaps[:, 0] - overlaps[:, 1], axis=1) > 0.5 * sizes.max(axis=1)
    usable = np.isfinite(gap) & (np.abs(gap) > ONE_KIND * losses.mean(axis=1)) & distinct
    alphas, gap = alphas[usable], gap[usable]
    crossings = np.flatnonzero((gap[:-1] < 0) & (gap[1:] >= 0))
    if not crossings.size:
        return float("nan")
    k = crossings[np.argmax(gap[crossings + 1] - gap[crossings])]
    return float(alphas[k] - gap[k] * (alphas[k + 1] - alphas[k]) / (gap[k + 1] - gap[k]))
