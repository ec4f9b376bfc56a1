"""Draws the figures of finite size from the files of `compute.py`; nothing is simulated here.

python figures/draw.py minimum minimum.csv minimum.png
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tiedattn_jax.plotting import COLOURS, SYMBOLS, panels

TITLES = {**{k: SYMBOLS[k] for k in ("train_loss", "gen_error", "q")}, "theta": r"$|\theta|$", "m": r"$|m|$"}
NEAR = 0.05  # relative distance in loss within which a run has found a minimum
ENDS = {**COLOURS, "elsewhere": "0.65"}


class Table:
    """Columns of a CSV file, with rows chosen by equality."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows = rows

    def where(self, **equal: Any) -> Table:
        return Table([r for r in self.rows if all(r[k] == str(v) for k, v in equal.items())])

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([float(r[name] or "nan") for r in self.rows])

    def by(self, name: str) -> dict[str, Table]:
        """The rows of each value of a column."""
        return {value: self.where(**{name: value}) for value in dict.fromkeys(r[name] for r in self.rows)}


def minimum(table: Table) -> Figure:
    """Fig. 2: lines are theory, dashed where the branch is not the lower one; points simulations, hollow for theta."""
    shown = (("train_loss",), ("theta", "m"), ("gen_error",))
    theory = table.where(kind="theory")
    losses = {b: dict(zip(t["alpha"], t["train_loss"], strict=True)) for b, t in theory.by("branch").items()}
    titles = [" and ".join(TITLES[n] for n in names) for names in shown]
    with panels(11, 3.5, titles, xlabel=SYMBOLS["alpha"]) as (figure, axes):
        for axis, names in zip(axes[0], shown, strict=True):
            for branch, t in theory.by("branch").items():
                other = losses["semantic" if branch == "positional" else "positional"]
                lowest = np.array([x <= other.get(a, np.inf) for a, x in zip(t["alpha"], t["train_loss"], strict=True)])
                name, label = names[0], branch
                if len(names) > 1:
                    name = {"positional": "m", "semantic": "theta"}[branch]
                    label = f"{TITLES[name]}, {branch}"
                axis.plot(t["alpha"], t[name], color=COLOURS[branch], lw=1, ls="--")
                axis.plot(t["alpha"], np.where(lowest, t[name], np.nan), color=COLOURS[branch], lw=1.8, label=label)
            for branch, t in table.where(kind="simulation").by("branch").items():
                for name in names:
                    style: Any = {"color": COLOURS[branch], "mfc": "white" if name == "theta" else None}
                    axis.errorbar(t["alpha"], t[name], 2 * t[f"{name}_stderr"], fmt="o", ms=4, capsize=2, **style)
            axis.set_ylim(bottom=0)
        axes[0, 2].axhline(theory["gen_error_linear"][0], color="0.4", lw=1, ls="-.", label="linear baseline")
    return figure


def exponent(d: np.ndarray, size: np.ndarray, error: np.ndarray) -> tuple[float, float, float]:
    """Amplitude, exponent and its standard error of ``size = amplitude d^exponent``, weighted, in logarithms."""
    weight = size / error
    rows = np.stack([np.ones_like(d), np.log(d)], 1) * weight[:, None]
    (log_amplitude, slope), *_ = np.linalg.lstsq(rows, np.log(size) * weight, rcond=None)
    return float(np.exp(log_amplitude)), float(slope), float(np.linalg.inv(rows.T @ rows)[1, 1] ** 0.5)


def scaling(table: Table) -> Figure:
    """Figs. 3 (left) and 7: means against theory above, scatter over instances with its fitted exponent below."""
    with panels(15, 6, list(TITLES.values()), rows=2, xlabel="d") as (figure, axes):
        axes[1, 0].set_ylabel("scatter over instances")
        for name, (mean, scatter) in zip(TITLES, axes.T, strict=True):
            for branch, t in table.where(name=name).by("branch").items():
                d, count, colour, size = t["d"], t["instances"], COLOURS[branch], t["scatter"]
                mean.errorbar(d, t["mean"], 2 * size / count**0.5, fmt="o-", ms=4, lw=0.8, color=colour)
                mean.axhline(t["theory"][0], color=colour, lw=1.4, ls="--", label=f"theory, {branch}")
                error = size / (2 * (count - 1)) ** 0.5
                amplitude, slope, bar = exponent(d, size, error)
                scatter.errorbar(d, size, 2 * error, fmt="o", ms=4, color=colour)
                label = rf"$d^{{{slope:.2f} \pm {bar:.2f}}}$"
                scatter.loglog(d, amplitude * d**slope, color=colour, lw=1, label=label)
            mean.set_xscale("log")
            mean.set_ylim(bottom=0)
    return figure


def ends(table: Table) -> np.ndarray:
    """Where every run ended: "positional", "semantic" or "elsewhere", by the larger overlap and by the loss."""
    branch = np.array([r["branch"] for r in table.rows])
    reference = np.where(branch == "positional", table["positional_loss"], table["semantic_loss"])
    return np.where(np.abs(table["train_loss"] / reference - 1) < NEAR, branch, "elsewhere")


def adam(table: Table) -> Figure:
    """Fig. 15: overlaps at the end of every run, and the share of runs that end in each minimum."""
    runs = table.by("alpha")
    names = [f"{float(alpha):g}" for alpha in runs]
    titles = [*(rf"$\alpha$ = {name}" for name in names), "share of runs"]
    with panels(2.6 * len(runs) + 3.4, 3.2, titles, xlabel=TITLES["theta"], legends=False) as (figure, axes):
        *planes, shares = axes[0]
        bottom = np.zeros(len(runs))
        for name, colour in ENDS.items():
            here = [ends(t) == name for t in runs.values()]
            for axis, t, on in zip(planes, runs.values(), here, strict=True):
                axis.plot(t["theta"][on], t["m"][on], "o", ms=4, alpha=0.7, color=colour, label=name)
                axis.set(xlim=(-0.01, 0.25), ylim=(-0.02, 0.4))
            height = np.array([on.mean() for on in here])
            shares.bar(names, height, bottom=bottom, color=colour)
            bottom += height
        planes[0].set_ylabel(TITLES["m"])
        planes[0].legend(frameon=False, fontsize=8)
    shares.set_xlabel(r"$\alpha$")
    return figure


FIGURES: dict[str, Callable[[Table], Figure]] = {"minimum": minimum, "scaling": scaling, "adam": adam}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("data", type=Path, help="CSV file of compute.py")
    parser.add_argument("picture", type=Path, help="file to draw to")
    a = parser.parse_args(argv)
    with a.data.open(newline="") as file:
        table = Table(list(csv.DictReader(file)))
    FIGURES[a.figure](table).savefig(a.picture, dpi=150)


if __name__ == "__main__":
    main()
