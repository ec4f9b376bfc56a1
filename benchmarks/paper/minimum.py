"""Fig. 2: training loss, order parameters and test error of the global minimum against the sample complexity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.phases.transitions import branch_ends
from tiedattn_jax.plotting.style import COLOURS, ERROR, LABELS, LOSS, MARKS, ORDERS, SYMBOLS, line, panels

from .data import Columns, Task, filled, keep, known, read, where
from .page import Row
from .simulation import BRANCHES, MEASURED, NUMBERS, informed, measured, numbers, stable, standard_error

SIZES: dict[str, Any] = {"d": 1000, "instances": 4, "alphas": 25}
REDUCED: dict[str, Any] = {"d": 200, "instances": 4, "alphas": 9}
HIGHEST = 2.0  # largest alpha
CURVE_POINTS = 40
CURVE = ("branch", "alpha", *NUMBERS, "stable")


def compute(task: Task) -> None:
    """Compute both branches down to their ends, the transitions, the states at alpha = 2, and simulations."""
    model = ta.DotProduct()
    _curves(task, model)
    _transitions(task, model)
    sizes = SIZES if task.full else REDUCED
    alphas = np.linspace(0.01 if task.full else 0.25, HIGHEST, sizes["alphas"])
    points = [(alpha, branch) for alpha in alphas for branch in range(len(BRANCHES))]

    def row(alpha: float, branch: int) -> list[float]:
        start = informed(BRANCHES[branch])
        return [alpha, branch, *measured(model, sizes["d"], alpha, start, sizes["instances"])]

    path, bar = task.folder / "minimum_simulation.npz", task.bar("simulation")
    filled(path, sizes, ("alpha", "branch", *MEASURED), points, row, bar)


def _curves(task: Task, model: ta.DotProduct) -> None:
    path, metadata = task.folder / "minimum_curves.npz", {"points": CURVE_POINTS, "highest": HIGHEST}
    if known(path, metadata):
        return
    rows: list[list[float]] = []
    for k, branch in enumerate(BRANCHES):
        coarse = ta.sweep(
            ta.solve,
            model,
            branch=branch,
            follow=True,
            alpha=np.linspace(0.02, HIGHEST, 12),
            progress=task.bar(f"{branch}, roughly"),
        )
        ends = [end.alpha for end in branch_ends(coarse) if end.kind == "pitchfork" and end.side == "lower"]
        lowest = max(ends, default=0.0)
        # Order parameters grow like the square root of the distance to the pitchfork, so points are denser there.
        alphas = lowest + (HIGHEST - lowest) * np.linspace(0, 1, CURVE_POINTS)[1:] ** 2
        curve = ta.sweep(ta.solve, model, branch=branch, follow=True, alpha=alphas, progress=task.bar(branch))
        rows += [[k, float(p.alpha), *numbers(p), stable(p)] for p in curve.points if bool(p.exists)]
    keep(path, metadata, dict(zip(CURVE, np.array(rows).T, strict=True)))


def _transitions(task: Task, model: ta.DotProduct) -> None:
    path, metadata = task.folder / "minimum_transitions.npz", {"alpha": HIGHEST}
    if known(path, metadata):
        return
    bar = task.bar("transitions")
    bar(0, 4)
    critical = ta.critical_alpha(model)
    bar(1, 4)
    crossing = ta.linear_crossing(model, critical)
    bar(2, 4)
    columns: dict[str, Any] = {
        "alpha_c": [critical.alpha, critical.stderr],
        "alpha_l": [crossing.alpha, crossing.stderr],
    }
    for k, branch in enumerate(BRANCHES):
        point = ta.solve(model, HIGHEST, branch)
        response = np.mean(point.overlaps.V), np.mean(point.stderr.overlaps.V)
        columns |= {branch: [*numbers(point), *response], "baseline": [point.gen_error_linear]}
        bar(3 + k, 4)
    keep(path, metadata, columns)


def load(folder: Path) -> dict[str, Any]:
    """Read curves, transitions and simulations, and the sizes of the simulations."""
    metadata, simulation = read(folder / "minimum_simulation.npz")
    curves, transitions = (read(folder / f"minimum_{name}.npz")[1] for name in ("curves", "transitions"))
    return {"about": metadata, "simulation": simulation, "curves": curves, "transitions": transitions}


def draw(data: dict[str, Any]) -> Figure:
    """Plot theory (lines) and simulations from both starts (points; hollow if the start leads to the higher loss)."""
    transitions = data["transitions"]
    quantities = (("train_loss", "train_loss"), ("m", "theta"), ("gen_error", "gen_error"))  # of either branch
    with panels(11, 3.8, [""] * 3, xlabel=LABELS["alpha"], ylabels=(LOSS, ORDERS, ERROR)) as (figure, axes):
        for axis, names in zip(axes[0], quantities, strict=True):
            for k, (branch, name) in enumerate(zip(BRANCHES, names, strict=True)):
                label = f"{SYMBOLS[name]}, {branch}" if name in SYMBOLS else branch
                curve, points = (where(data[part], branch=k) for part in ("curves", "simulation"))
                line(axis, curve["alpha"], curve[name], COLOURS[branch], label, stable=curve["stable"] > 0)
                lower = (points["alpha"] > transitions["alpha_c"][0]) == (branch == "semantic")
                for mask, filling, suffix in ((lower, None, ""), (~lower, "white", ", the higher loss")):
                    style: Any = {"fmt": "o", "ms": 3.5, "lw": 1, "color": COLOURS[branch], "mfc": filling}
                    text = f"training, {branch} start{suffix}"
                    bars = 2 * standard_error(points, name)[mask]
                    axis.errorbar(points["alpha"][mask], points[name][mask], bars, label=text, **style)
            for name in ("alpha_c", "alpha_l"):
                axis.axvline(transitions[name][0], label=SYMBOLS[name], **{**MARKS[name], "lw": 0.9})
            axis.set(xlim=(0, HIGHEST * 1.02), ylim=(0, None))
        style = {"color": COLOURS["baseline"], "ls": "-.", "lw": 1.2, "label": "linear baseline"}
        axes[0, 2].axhline(transitions["baseline"][0], **style)
    return figure


# Published theory at alpha = 2, and published gradient descent there (mean and scatter over its instances).
_THEORY = {
    "positional": {"q": 0.05001, "V": 11.036, "m": 0.25857, "train_loss": 0.0045153, "gen_error": 0.0034905},
    "semantic": {"q": 0.11415, "V": 12.328, "theta": 0.15856, "train_loss": 0.0035994, "gen_error": 0.0013965},
}
_DESCENT = {
    "positional": {"train_loss": (0.00458, 0.00034), "gen_error": (0.00349, 0.00028), "m": (0.2618, 0.0071)},
    "semantic": {"train_loss": (0.00365, 0.00011), "gen_error": (0.001443, 0.000074)},
}
_WORDS = {"train_loss": "training loss / d", "gen_error": "test error"}


def rows(data: dict[str, Any]) -> list[Row]:
    """Return the transitions, and the states and simulations at alpha = 2."""
    transitions = data["transitions"]
    read_off, nodes = "published: read off its curves, of 12 x 12 nodes", "published: 12 x 12 nodes, stopped at 1e-4"
    out = [
        Row(name, value, None, transitions[name][0], transitions[name][1], read_off)
        for name, value in (("alpha_c", 1.241), ("alpha_l", 1.451))
    ]
    baseline = transitions["baseline"][0]
    out.append(Row("test error of the baseline", 0.0019905, None, baseline, None, "published: read off"))
    names = [*NUMBERS, "V", "V_stderr"]
    for branch, published in _THEORY.items():
        state = dict(zip(names, transitions[branch], strict=True))
        for name, value in published.items():
            text = f"{_WORDS.get(name, name)}, {branch}, alpha = 2"
            out.append(Row(text, value, None, state[name], state[f"{name}_stderr"], nodes))
    for k, branch in enumerate(BRANCHES):
        last: Columns = where(data["simulation"], branch=k, alpha=HIGHEST)
        if not len(last["alpha"]):
            continue
        sizes = f"here: d = {data['about']['d']}, {int(last['instances'][0])} instances"
        reason = f"published: gradient descent, d = 1000, random norm of the teacher; {sizes}"
        for name, (value, scatter) in _DESCENT[branch].items():
            text = f"{_WORDS.get(name, name)}, {branch} start, alpha = 2, simulation (scatter)"
            out.append(Row(text, value, scatter, last[name][0], last[f"{name}_scatter"][0], reason))
    return out
