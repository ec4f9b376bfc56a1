"""Fig. 15: where Adam ends from random starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.plotting.style import COLOURS, LABELS, panels

from .data import Columns, Task, filled, read, where
from .page import Row
from .simulation import BRANCHES, TRAIN

ALPHA = 2.0
# Start, rate and steps are those of the published code, github.com/SPOC-group/positional-and-semantic-attention.
SIZES: dict[str, Any] = {"d": [50, 100, 200, 500], "runs": 40, "steps": 2500}
REDUCED: dict[str, Any] = {"d": [50, 100, 200], "runs": 12, "steps": 2500}
RATE, SCALE = 0.01, 0.1
TOLERANCE = 0.05  # largest relative distance in loss, and distance in an overlap, from a minimum that a run has found
ELSEWHERE = "0.65"
NUMBERS = ("theta", "m", "train_loss")
# Numbers of the end of a run, and of the minima from both informed starts on its instance.
COLUMNS = ("d", "seed", *NUMBERS, *(f"{branch}_{name}" for branch in BRANCHES for name in NUMBERS))
ENDS = (*BRANCHES, "elsewhere")


def compute(task: Task) -> None:
    """Train every instance: Adam from a random start, and L-BFGS from both informed starts."""
    sizes, model = SIZES if task.full else REDUCED, ta.DotProduct()
    points = [(d, seed) for d in sizes["d"] for seed in range(sizes["runs"])]

    def row(d: int, seed: int) -> list[float]:
        key, start = jax.random.split(jax.random.key(seed))
        data = ta.sample_data(model, d, ALPHA, key, normalise=True)
        options = {"optimizer": "adam", "rate": RATE, "steps": sizes["steps"], "tol": 1e-7}
        end = ta.train(model, data, "random", key=start, scale=SCALE, **options)
        minima = [TRAIN(model, data, branch) for branch in BRANCHES]
        return [d, seed, *(value for run in (end, *minima) for value in _numbers(run))]

    path, bar = task.folder / "adam.npz", task.bar("Adam from random starts")
    filled(path, {**sizes, "rate": RATE, "scale": SCALE, "alpha": ALPHA}, COLUMNS, points, row, bar)


def load(folder: Path) -> Columns:
    """Read the runs, one row each."""
    return read(folder / "adam.npz")[1]


def _numbers(run: ta.results.Training) -> list[float]:
    x = run.overlaps
    return [float(np.abs(np.asarray(x.theta)).mean()), float(np.abs(np.asarray(x.m)).mean()), float(run.train_loss)]


def ends(runs: Columns) -> Shaped[np.ndarray, " rows"]:
    """Classify the end of every run as "positional", "semantic" or "elsewhere", by loss and overlaps of the minima."""
    out = np.full(len(runs["d"]), "elsewhere", object)
    for branch in BRANCHES:
        matches = np.abs(runs["train_loss"] / runs[f"{branch}_train_loss"] - 1) < TOLERANCE
        for name in ("theta", "m"):
            matches &= np.abs(runs[name] - runs[f"{branch}_{name}"]) < TOLERANCE
        out[matches] = branch
    return out


def draw(runs: Columns) -> Figure:
    """Plot the overlaps at the end of every run, and the share of runs in each minimum, for every dimension."""
    sizes = np.unique(runs["d"])
    titles = [*(f"$d$ = {d:.0f}" for d in sizes), ""]
    colours = {**COLOURS, "elsewhere": ELSEWHERE}
    with panels(2.7 * len(sizes) + 3.2, 3.6, titles, xlabel=LABELS["theta"].replace(r"\theta", r"|\theta|")) as (
        figure,
        axes,
    ):
        *planes, shares = axes[0]
        bottom = np.zeros(len(sizes))
        for name in ENDS:
            for axis, d in zip(planes, sizes, strict=True):
                group = where(runs, d=d)
                mask = ends(group) == name
                axis.plot(group["theta"][mask], group["m"][mask], "o", ms=4, alpha=0.7, color=colours[name], label=name)
                axis.set(xlim=(-0.01, 0.25), ylim=(-0.02, 0.4))
            height = np.array([np.mean(ends(where(runs, d=d)) == name) for d in sizes])
            shares.bar([f"{d:.0f}" for d in sizes], height, bottom=bottom, color=colours[name])
            bottom += height
        planes[0].set_ylabel(LABELS["m"].replace("m$", "|m|$"))
        shares.set_ylabel("share of runs")
    shares.set_xlabel("dimension $d$")
    return figure


def rows(runs: Columns) -> list[Row]:
    """Return the shares with their binomial standard errors."""
    out = []
    for d in np.unique(runs["d"]):
        labels = ends(where(runs, d=d))
        for name in ENDS:
            share = float(np.mean(labels == name))
            # One additional run of either outcome keeps the error from vanishing when all runs agree.
            smooth = (share * labels.size + 1) / (labels.size + 2)
            error = float(np.sqrt(smooth * (1 - smooth) / labels.size))
            location = f"in the {name} minimum" if name in BRANCHES else name
            text = f"share of runs that end {location}, d = {d:.0f}, alpha = 2"
            out.append(Row(text, None, None, share, error, f"{labels.size} runs; the paper gives no number"))
    return out
