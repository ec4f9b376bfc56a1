"""Fig. 3 (left) and Fig. 7: convergence of simulations to the theory with the dimension, at alpha = 1.5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Real
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

import tiedattn_jax as ta
from tiedattn_jax.plotting.style import COLOURS, LABELS, SYMBOLS, panels

from .data import Task, filled, keep, known, read, where
from .page import Row
from .simulation import BRANCHES, MEASURED, NUMBERS, QUANTITIES, informed, measured, numbers, standard_error

ALPHA = 1.5
SIZES: dict[str, Any] = {"d": [10, 15, 23, 36, 56, 87, 135, 209, 323, 500, 1000], "instances": 10}
REDUCED: dict[str, Any] = {"d": [10, 23, 56, 135, 323], "instances": 6}
MAX_INSTANCES = 200  # largest number of instances, used at the smallest dimensions


def compute(task: Task) -> None:
    """Compute the theory, and simulate instances of every dimension; smaller dimensions have more instances."""
    model = ta.DotProduct()
    path, metadata = task.folder / "scaling_theory.npz", {"alpha": ALPHA}
    if not known(path, metadata):
        states = [numbers(ta.solve(model, ALPHA, branch)) for branch in BRANCHES]
        keep(path, metadata, dict(zip(NUMBERS, np.array(states).T, strict=True)))
    sizes = SIZES if task.full else REDUCED
    points = [(d, branch) for d in sizes["d"] for branch in range(len(BRANCHES))]

    def row(d: int, branch: int) -> list[float]:
        count = int(np.clip(sizes["instances"] * sizes["d"][-1] / d, sizes["instances"], MAX_INSTANCES))
        return [d, branch, *measured(model, d, ALPHA, informed(BRANCHES[branch]), count)]

    names, bar = ("d", "branch", *MEASURED), task.bar("simulation")
    filled(task.folder / "scaling_simulation.npz", {**sizes, "most": MAX_INSTANCES}, names, points, row, bar)


def load(folder: Path) -> dict[str, Any]:
    """Read the theory, one row per branch, and the simulation."""
    return {name: read(folder / f"scaling_{name}.npz")[1] for name in ("theory", "simulation")}


def draw(data: dict[str, Any], names: Sequence[str]) -> Figure:
    """Plot means and theory above, and the scatter over instances with a fitted power of d below."""
    scatters = [rf"scatter of {SYMBOLS.get(name, LABELS[name])}" for name in names]
    options: dict[str, Any] = {
        "rows": 2,
        "xlabel": "dimension $d$",
        "ylabels": [*(LABELS[name] for name in names), *scatters],
    }
    with panels(4.2 * len(names), 5.6, [""] * len(names), **options) as (figure, axes):
        for name, (above, below) in zip(names, axes.T, strict=True):
            for k, branch in enumerate(BRANCHES):
                rows, colour, theory = where(data["simulation"], branch=k), COLOURS[branch], data["theory"][name][k]
                bars = 2 * standard_error(rows, name)
                above.errorbar(rows["d"], rows[name], bars, fmt="o", ms=4, lw=1, color=colour)
                above.axhline(theory, color=colour, lw=1.4, label=f"theory, {branch}")
                above.errorbar([], [], [], fmt="o", ms=4, lw=1, color=colour, label=f"simulation, {branch} start")
                scatter, count = rows[f"{name}_scatter"], rows["instances"]
                below.errorbar(rows["d"], scatter, 2 * _error(scatter, count), fmt="o", ms=4, lw=1, color=colour)
                amplitude, slope, bar = power(rows["d"], scatter, _error(scatter, count))
                below.loglog(rows["d"], amplitude * rows["d"] ** slope, color=colour, lw=1)
                height = 0.12 if k else 0.04
                text = rf"$d^{{\,{slope:.2f} \pm {bar:.2f}}}$"
                below.text(0.04, height, text, color=colour, transform=below.transAxes)
            below.yaxis.set_minor_formatter(NullFormatter())
            above.set_xscale("log")
            above.set_ylim(bottom=0)
    return figure


def _error(scatter: Float[np.ndarray, " d"], count: Real[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
    """Return the standard error of a standard deviation."""
    return scatter / np.sqrt(2 * np.maximum(count - 1, 1))


def power(
    d: Real[np.ndarray, " d"], size: Float[np.ndarray, " d"], error: Float[np.ndarray, " d"]
) -> tuple[float, float, float]:
    """Fit ``size = amplitude d^exponent`` in logarithms; return amplitude, exponent and the exponent's error."""
    weight = size / error
    rows = np.stack([np.ones_like(d), np.log(d)], 1) * weight[:, None]
    (log_amplitude, slope), *_ = np.linalg.lstsq(rows, np.log(size) * weight, rcond=None)
    return float(np.exp(log_amplitude)), float(slope), float(np.linalg.inv(rows.T @ rows)[1, 1] ** 0.5)


def rows(data: dict[str, Any], names: Sequence[str]) -> list[Row]:
    """Return the exponents of the scatter, and the differences to the theory at the largest dimension."""
    out = []
    for name in names:
        for k, branch in enumerate(BRANCHES):
            sample = where(data["simulation"], branch=k)
            scatter = sample[f"{name}_scatter"]
            _, slope, bar = power(sample["d"], scatter, _error(scatter, sample["instances"]))
            label = {"train_loss": "training loss / d", "gen_error": "test error"}.get(name, f"\\|{name}\\|")
            text = f"exponent of the scatter of {label}, {branch} start"
            vanishes = (name == "m") == (branch == "semantic") and name in ("m", "theta")
            reason = "vanishes for large d" if vanishes else "-1/2 where fluctuations are Gaussian"
            out.append(Row(text, None, None, slope, bar, reason))
            theory = data["theory"][name][k]
            gap, error = sample[name][-1] - theory, standard_error(sample, name)[-1]
            text = f"{label}, {branch} start, d = {sample['d'][-1]:.0f} minus theory ({theory:.5g})"
            reason = f"{sample['instances'][-1]:.0f} instances"
            out.append(Row(text, None, None, gap, error, reason))
    return out


LEFT, LOSSES = ("m", "theta"), ("train_loss", "gen_error")  # quantities of Fig. 3 (left) and of Fig. 7
assert set(LEFT) | set(LOSSES) < set(QUANTITIES)
