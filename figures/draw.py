"""Draws the figures of finite size from the files of `compute.py`; nothing is simulated here.

python figures/draw.py minimum minimum.csv minimum.png
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tiedattn_jax.plotting import COLOURS

TITLES = {
    "train_loss": "training loss / d",
    "gen_error": r"test error $\epsilon_g$",
    "q": r"$q$",
    "theta": r"$|\theta|$",
    "m": r"$|m|$",
}
NEAR = 0.05  # relative distance in loss within which a run has found a minimum
ENDS = {"positional": COLOURS["positional"], "semantic": COLOURS["semantic"], "elsewhere": "0.65"}


class Table:
    """Columns of a CSV file, with rows chosen by equality."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows = rows

    def where(self, **equal: Any) -> Table:
        return Table([r for r in self.rows if all(r[k] == str(v) for k, v in equal.items())])

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([float(r[name] or "nan") for r in self.rows])

    def distinct(self, name: str) -> list[str]:
        return list(dict.fromkeys(r[name] for r in self.rows))


def minimum(table: Table) -> Figure:
    """Fig. 2: lines are theory, dashed where the branch is not the lower one; points simulations, hollow for theta."""
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    panels = (("train_loss",), ("theta", "m"), ("gen_error",))
    theory = table.where(kind="theory")
    losses = {b: dict(zip(t["alpha"], t["train_loss"], strict=True)) for b, t in _branches(theory)}
    for axis, names in zip(figure.subplots(1, 3), panels, strict=True):
        for branch, t in _branches(theory):
            other = losses["semantic" if branch == "positional" else "positional"]
            lowest = np.array([x <= other.get(a, np.inf) for a, x in zip(t["alpha"], t["train_loss"], strict=True)])
            for name in names if len(names) == 1 else [{"positional": "m", "semantic": "theta"}[branch]]:
                label = branch if len(names) == 1 else f"{TITLES[name]}, {branch}"
                axis.plot(t["alpha"], t[name], color=COLOURS[branch], lw=1, ls="--")
                axis.plot(t["alpha"], np.where(lowest, t[name], np.nan), color=COLOURS[branch], lw=1.8, label=label)
        for branch, t in _branches(table.where(kind="simulation")):
            for name in names:
                style = {"color": COLOURS[branch], "mfc": "white" if name == "theta" else None}
                axis.errorbar(t["alpha"], t[name], 2 * t[f"{name}_stderr"], fmt="o", ms=4, capsize=2, **style)
        if names == ("gen_error",):
            axis.axhline(theory["gen_error_linear"][0], color="0.4", lw=1, ls="-.", label="linear baseline")
        axis.set_title(" and ".join(TITLES[n] for n in names), loc="left")
        axis.set_xlabel(r"$\alpha = n / d$")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    return figure


def _branches(table: Table) -> list[tuple[str, Table]]:
    return [(b, table.where(branch=b)) for b in table.distinct("branch")]


def exponent(d: np.ndarray, size: np.ndarray, error: np.ndarray) -> tuple[float, float, float]:
    """Amplitude, exponent and its standard error of ``size = amplitude d^exponent``, weighted, in logarithms."""
    weight = size / error
    rows = np.stack([np.ones_like(d), np.log(d)], 1) * weight[:, None]
    (log_amplitude, slope), *_ = np.linalg.lstsq(rows, np.log(size) * weight, rcond=None)
    return float(np.exp(log_amplitude)), float(slope), float(np.linalg.inv(rows.T @ rows)[1, 1] ** 0.5)


def scaling(table: Table) -> Figure:
    """Figs. 3 (left) and 7: means against theory above, scatter over instances with its fitted exponent below."""
    shown = ("train_loss", "gen_error", "q", "theta", "m")
    figure = Figure(figsize=(15, 6), layout="constrained")
    for column, name in zip(figure.subplots(2, len(shown)).T, shown, strict=True):
        mean, scatter = column
        for branch, t in _branches(table.where(name=name)):
            d, count, colour = t["d"], t["instances"], COLOURS[branch]
            mean.errorbar(d, t["mean"], 2 * t["scatter"] / count**0.5, fmt="o-", ms=4, lw=0.8, color=colour)
            mean.axhline(t["theory"][0], color=colour, lw=1.4, ls="--", label=f"theory, {branch}")
            _power(scatter, d, t["scatter"], t["scatter"] / (2 * (count - 1)) ** 0.5, colour)
        mean.set_title(TITLES[name], loc="left")
        mean.set_xscale("log")
        mean.set_ylim(bottom=0)
        scatter.set_title("scatter over instances", loc="left")
        scatter.set_xlabel("d")
        for axis in column:
            axis.legend(frameon=False, fontsize=8)
    return figure


def _power(axis: Any, d: np.ndarray, size: np.ndarray, error: np.ndarray, colour: str) -> None:
    amplitude, slope, bar = exponent(d, size, error)
    axis.errorbar(d, size, 2 * error, fmt="o", ms=4, color=colour)
    axis.loglog(d, amplitude * d**slope, color=colour, lw=1, label=rf"$d^{{{slope:.2f} \pm {bar:.2f}}}$")


def ends(table: Table) -> np.ndarray:
    """Where every run ended: "positional", "semantic" or "elsewhere", by the larger overlap and by the loss."""
    branch = np.array([r["branch"] for r in table.rows])
    reference = np.where(branch == "positional", table["positional_loss"], table["semantic_loss"])
    return np.where(np.abs(table["train_loss"] / reference - 1) < NEAR, branch, "elsewhere")


def adam(table: Table) -> Figure:
    """Fig. 15: overlaps at the end of every run, and the share of runs that end in each minimum."""
    alphas = table.distinct("alpha")
    figure = Figure(figsize=(2.6 * len(alphas) + 3.4, 3.2), layout="constrained")
    *planes, shares = figure.subplots(1, len(alphas) + 1)
    counts = {name: [] for name in ENDS}
    for axis, alpha in zip(planes, alphas, strict=True):
        t = table.where(alpha=alpha)
        where = ends(t)
        for name, colour in ENDS.items():
            here = where == name
            counts[name].append(here.mean())
            axis.plot(t["theta"][here], t["m"][here], "o", ms=4, alpha=0.7, color=colour, label=name)
        axis.set_title(rf"$\alpha$ = {float(alpha):g}", loc="left")
        axis.set_xlabel(TITLES["theta"])
        axis.set_xlim(-0.01, 0.25)
        axis.set_ylim(-0.02, 0.4)
    planes[0].set_ylabel(TITLES["m"])
    planes[0].legend(frameon=False, fontsize=8)
    bottom = np.zeros(len(alphas))
    for name, colour in ENDS.items():
        shares.bar(range(len(alphas)), counts[name], bottom=bottom, color=colour, label=name)
        bottom += counts[name]
    shares.set_xticks(range(len(alphas)), [f"{float(a):g}" for a in alphas])
    shares.set_xlabel(r"$\alpha$")
    shares.set_title("share of runs", loc="left")
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
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        FIGURES[a.figure](table).savefig(a.picture, dpi=150)


if __name__ == "__main__":
    main()
