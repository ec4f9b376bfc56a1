"""Figs. 3 (centre, right), 8 and 9: both branches over alpha and omega, theory beside simulation."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.plotting import COLOURS, LABELS, panels, slice_figure

from .data import Columns, Task, filled, read, where
from .page import Row
from .simulation import BRANCHES, MEASURED, exchange, informed, measured

MIXINGS = {"standard": ((0.6, 0.4), (0.4, 0.6)), "other": ((0.3, 0.7), (0.8, 0.2))}
CELLS, REDUCED_CELLS = (25, 25), (13, 9)  # alphas and omegas of the theory
SIMULATED: dict[str, Any] = {"alphas": 25, "omegas": 25, "d": 1000, "instances": 1}
REDUCED: dict[str, Any] = {"alphas": 10, "omegas": 9, "d": 200, "instances": 2}
ALPHAS, OMEGAS = (0.05, 2.0), (0.02, 0.5)
SLICES = 5


class Plane(NamedTuple):
    """A target: its name in `MIXINGS`."""

    name: str

    @property
    def model(self) -> ta.DotProduct:
        return ta.dot_product(mixing=MIXINGS[self.name])

    def theory(self, task: Task) -> None:
        """The phase diagram; rows that are finished are kept."""
        alphas, omegas = CELLS if task.full else REDUCED_CELLS
        pieces = task.folder / f"plane_{self.name}_pieces"
        done = task.bar(f"theory, {self.name} A")
        axes = np.linspace(*ALPHAS, alphas), np.linspace(*OMEGAS, omegas)
        diagram = ta.phase_diagram(self.model, *axes, out=pieces, resume=pieces.exists(), progress=done)
        diagram.save(task.folder / f"plane_{self.name}.npz")

    def diagram(self, folder: Path) -> ta.PhaseDiagram:
        """What `theory` found."""
        return ta.PhaseDiagram.load(folder / f"plane_{self.name}.npz")

    def simulate(self, task: Task) -> None:
        """Training from both starts in every cell, along omega first: programs depend on alpha alone."""
        sizes = SIMULATED if task.full else REDUCED
        alphas = np.linspace(0.2 if not task.full else ALPHAS[0], ALPHAS[1], sizes["alphas"])
        points = [
            (alpha, omega, branch)
            for alpha in alphas
            for omega in np.linspace(*OMEGAS, sizes["omegas"])
            for branch in range(len(BRANCHES))
        ]

        def one(alpha: float, omega: float, branch: int) -> list[float]:
            model = ta.dot_product(omega=jnp.asarray(omega), mixing=MIXINGS[self.name])
            start = informed(BRANCHES[branch])
            found = measured(model, sizes["d"], alpha, start, sizes["instances"])
            return [alpha, omega, branch, linear(omega), *found]

        @cache
        def linear(omega: float) -> float:
            model = ta.dot_product(omega=jnp.asarray(omega), mixing=MIXINGS[self.name])
            return float(ta.gen_error_linear(model, ta.sobol_nodes(model, 2**14)).value)

        names, bar = ("alpha", "omega", "branch", "linear", *MEASURED), task.bar(f"simulation, {self.name} A")
        path = task.folder / f"plane_{self.name}_simulation.npz"
        filled(path, {**sizes, "mixing": self.name}, names, points, one, bar)

    def simulated(self, folder: Path) -> tuple[dict[str, Any], Columns]:
        """What `simulate` found, and what it is about."""
        return read(folder / f"plane_{self.name}_simulation.npz")


def draw_slices(diagram: ta.PhaseDiagram) -> Figure:
    """Training loss and test error of both branches along alpha, at some omegas."""
    return slice_figure(diagram, list(np.linspace(0, len(diagram.y[1]) - 1, SLICES).astype(int)))


def draw_simulation(found: tuple[dict[str, Any], Columns]) -> Figure:
    """The loss difference of both starts, and the test error of the lower one minus the baseline, cell by cell."""
    columns = found[1]
    alphas, omegas = np.unique(columns["alpha"]), np.unique(columns["omega"])

    def cells(name: str, branch: int) -> np.ndarray:
        values = np.full((len(omegas), len(alphas)), np.nan)
        rows = where(columns, branch=branch)
        values[np.searchsorted(omegas, rows["omega"]), np.searchsorted(alphas, rows["alpha"])] = rows[name]
        return values

    gap = cells("train_loss", 0) - cells("train_loss", 1)
    lower = np.where(gap < 0, cells("gen_error", 0), cells("gen_error", 1))
    titles = "lower training loss: positional or semantic start", "lower minimum: worse or better than the baseline"
    how: Any = {"xlabel": LABELS["alpha"], "ylabels": (LABELS["omega"],), "sharey": True}
    with panels(9.5, 4.2, titles, **how) as (figure, axes):
        for axis, values, colours, label in zip(
            axes[0],
            (gap, lower - cells("linear", 0)),
            ("RdBu", "RdBu_r"),
            ("positional minus semantic training loss / d", "test error minus that of the baseline"),
            strict=True,
        ):
            limit = float(np.nanmax(np.abs(values)))
            picture = axis.pcolormesh(alphas, omegas, values, cmap=colours, vmin=-limit, vmax=limit, shading="nearest")
            figure.colorbar(picture, ax=axis, shrink=0.9, label=label)
    return figure


def rows_theory(diagram: ta.PhaseDiagram) -> list[Row]:
    """Both transitions at some omegas, as read from the grid."""
    out = []
    for name, boundary in (("alpha_c", diagram.alpha_c()), ("alpha_l", diagram.alpha_l())):
        for omega in (0.1, 0.2, 0.3, 0.4):
            k = int(np.argmin(np.abs(boundary.values - omega)))
            if np.isclose(boundary.values[k], omega) and np.isfinite(boundary.alpha[k]):
                published = {("alpha_c", 0.3): 1.241, ("alpha_l", 0.3): 1.451}.get((name, omega))
                reason = "see Fig. 2" if published else "the paper gives no number"
                text = f"{name} at omega = {omega}, from the grid"
                out.append(Row(text, published, None, boundary.alpha[k], boundary.stderr[k], reason))
    solved, trusted = float(np.mean(diagram.solved)), float(np.mean(diagram.trusted))
    out.append(Row("share of cells that are solved", None, None, solved, None, f"{trusted:.1%} are decided"))
    return out


def rows_simulation(found: tuple[dict[str, Any], Columns]) -> list[Row]:
    """alpha at which the training losses of both starts cross, at every omega that was simulated."""
    about, columns = found
    reason = f"d = {about['d']}, {about['instances']} instances; interpolated; theory: the figure before"
    out = []
    for omega in np.unique(columns["omega"]):
        crossing = exchange(where(columns, omega=omega))
        out.append(Row(f"alpha_c at omega = {omega:.2g}, training", None, None, crossing, None, reason))
    return out


assert set(BRANCHES) < set(COLOURS)
STANDARD, OTHER = Plane("standard"), Plane("other")
