"""Fig. 15: where Adam ends from random starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.plotting import COLOURS, LABELS, panels

from .data import Columns, Task, filled, read, where
from .page import Row
from .simulation import BRANCHES, STEPS

ALPHA = 2.0
SIZES: dict[str, Any] = {"d": [100, 300, 1000], "runs": 40, "steps": 5000}
REDUCED: dict[str, Any] = {"d": [50, 100, 200], "runs": 12, "steps": 3000}
RATE = 0.03
NEAR = 0.05  # relative distance in loss within which a run has found a minimum
ELSEWHERE = "0.65"
COLUMNS = ("d", "seed", "theta", "m", "train_loss", *BRANCHES)
ENDS = (*BRANCHES, "elsewhere")


def compute(task: Task) -> None:
    """One instance after the other: Adam from a random start, and L-BFGS from both informed ones."""
    sizes, model = SIZES if task.full else REDUCED, ta.dot_product()
    points = [(d, seed) for d in sizes["d"] for seed in range(sizes["runs"])]

    def one(d: int, seed: int) -> list[float]:
        key, start = jax.random.split(jax.random.key(seed))
        data = ta.sample_data(model, d, ALPHA, key, normalise=True)
        end = ta.train(model, data, "adam", "random", key=start, rate=RATE, steps=sizes["steps"], tol=1e-7)
        losses = [ta.train(model, data, "lbfgs", branch, steps=STEPS, tol=1e-8).train_loss for branch in BRANCHES]
        theta, m = (float(np.abs(np.asarray(getattr(end.overlaps, name))).mean()) for name in ("theta", "m"))
        return [d, seed, theta, m, float(end.train_loss), *map(float, losses)]

    path, bar = task.folder / "adam.npz", task.bar("Adam from random starts")
    filled(path, {**sizes, "rate": RATE, "alpha": ALPHA}, COLUMNS, points, one, bar)


def load(folder: Path) -> Columns:
    """A row for every run."""
    return read(folder / "adam.npz")[1]


def ends(runs: Columns) -> np.ndarray:
    """Where every run ended: "positional", "semantic" or "elsewhere", by the losses of the instance's two minima."""
    losses = np.stack([runs[branch] for branch in BRANCHES])
    distance = np.abs(runs["train_loss"] / losses - 1)
    nearest = np.array(BRANCHES)[distance.argmin(0)]
    larger = np.where(runs["m"] > runs["theta"], *BRANCHES)
    return np.where((distance.min(0) < NEAR) & (nearest == larger), nearest, "elsewhere")


def draw(runs: Columns) -> Figure:
    """Overlaps at the end of every run, and the share of runs that end in each minimum, for every dimension."""
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
                here = where(runs, d=d)
                on = ends(here) == name
                axis.plot(here["theta"][on], here["m"][on], "o", ms=4, alpha=0.7, color=colours[name], label=name)
                axis.set(xlim=(-0.01, 0.25), ylim=(-0.02, 0.4))
            height = np.array([np.mean(ends(where(runs, d=d)) == name) for d in sizes])
            shares.bar([f"{d:.0f}" for d in sizes], height, bottom=bottom, color=colours[name])
            bottom += height
        planes[0].set_ylabel(LABELS["m"].replace("m$", "|m|$"))
        shares.set_ylabel("share of runs")
    shares.set_xlabel("dimension $d$")
    return figure


def rows(runs: Columns) -> list[Row]:
    """Shares with their binomial standard errors."""
    out = []
    for d in np.unique(runs["d"]):
        found = ends(where(runs, d=d))
        for name in ENDS:
            share = float(np.mean(found == name))
            # With one run more of either outcome, so that it is not zero where all runs agree.
            smooth = (share * found.size + 1) / (found.size + 2)
            error = float(np.sqrt(smooth * (1 - smooth) / found.size))
            text = f"share of runs that end {'in the ' if name in BRANCHES else ''}{name}"
            text += f"{' minimum' if name in BRANCHES else ''}, d = {d:.0f}, alpha = 2"
            out.append(Row(text, None, None, share, error, f"{found.size} runs; the paper gives no number"))
    return out
