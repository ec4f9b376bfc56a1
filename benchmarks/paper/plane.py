"""Figs. 3 (centre, right), 8, 9 and 14: both branches over alpha and omega, in theory and simulation."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.plotting.diagrams import slice_figure
from tiedattn_jax.plotting.style import LABELS, MARKS, SYMBOLS, panels
from tiedattn_jax.theory.observables import gen_error_linear

from .data import Columns, Task, filled, missing, read, where
from .layers import STARTS, model_of, train_of
from .page import Row
from .simulation import BRANCHES, MEASURED, ONE_KIND, exchange, measured

MIXINGS = {"standard": ((0.6, 0.4), (0.4, 0.6)), "other": ((0.3, 0.7), (0.8, 0.2))}
CELLS, REDUCED_CELLS = (25, 25), (13, 9)  # numbers of alphas and omegas of the theory
NODES = 2**13  # nodes of a replicate, for alpha_c of the theory in Fig. 14
SIMULATED: dict[str, Any] = {"alphas": 25, "omegas": 25, "d": 1000, "instances": 1}
SIMULATED_LAYERS: dict[str, Any] = {"alphas": 13, "omegas": 13, "d": 500, "instances": 1}  # layers but the tied one
REDUCED: dict[str, Any] = {"alphas": 10, "omegas": 9, "d": 200, "instances": 2}
ALPHAS, OMEGAS = (0.05, 2.0), (0.02, 0.5)
SLICES, ROWS = 5, 8  # numbers of omegas in pictures and in tables
# Layers for which the theory has both branches and thus alpha_c. With rank two, a single state has both mechanisms.
EXCHANGES = ("tied", "untied", "correlated")
Simulation = tuple[dict[str, Any], Columns]  # a simulation: its `about` and its columns


class Plane(NamedTuple):
    """A plane of alpha and omega for a target in `MIXINGS` and a layer in `layers.STARTS`.

    The method `theory` is for the tied layer only.
    """

    name: str
    layer: str = "tied"

    def theory(self, task: Task) -> None:
        """Compute the phase diagram; an interrupted run resumes from its finished rows."""
        alphas, omegas = CELLS if task.full else REDUCED_CELLS
        pieces = task.folder / f"plane_{self.name}_pieces"
        progress = task.bar(f"theory, {self.name} A")
        axes = {"alpha": np.linspace(*ALPHAS, alphas), "omega": np.linspace(*OMEGAS, omegas)}
        model = ta.DotProduct(mixing=MIXINGS[self.name])
        diagram = ta.phase_diagram(model, **axes, out=pieces, resume=pieces.exists(), progress=progress)
        diagram.save(task.folder / f"plane_{self.name}.npz")

    def diagram(self, folder: Path) -> ta.results.PhaseDiagram:
        """Read the result of `theory`."""
        path = folder / f"plane_{self.name}.npz"
        if not path.exists():
            raise missing(path)
        return ta.results.PhaseDiagram.load(path)

    def model(self, omega: float) -> ta.AttentionLayer:
        """Return the layer with this target."""
        return eqx.tree_at(lambda m: m.mixing, model_of(self.layer, omega), jnp.asarray(MIXINGS[self.name]))

    def sizes(self, task: Task) -> dict[str, Any]:
        """Return the sizes of the simulation."""
        full = SIMULATED if self.layer == "tied" else SIMULATED_LAYERS
        return full if task.full else REDUCED

    def exchange(self, task: Task) -> None:
        """Compute alpha_c of the theory at the omegas of the simulation, each starting from the previous one.

        After the first omega without alpha_c, all values are NaN.
        """
        last: list[ta.results.Quantity] = []

        def row(omega: float) -> list[float]:
            model = self.model(omega)
            if not last or last[-1].ok:
                start = last[-1].branches if last else None
                last.append(ta.critical_alpha(model, NODES, bracket=ALPHAS, start=start))
            critical = last[-1]
            return [omega, float(critical.alpha), float(critical.stderr)] if critical.ok else [omega, np.nan, np.nan]

        omegas = np.linspace(*OMEGAS, self.sizes(task)["omegas"])
        path, bar = task.folder / f"plane_{self.name}_{self.layer}_exchange.npz", task.bar(f"theory, {self.layer}")
        metadata = {"mixing": self.name, "layer": self.layer, "nodes": NODES}
        filled(path, metadata, ("omega", "alpha", "stderr"), omegas[:, None], row, bar)

    def exchanged(self, folder: Path) -> Columns:
        """Read the result of `exchange`; empty for a layer without alpha_c in the theory."""
        return read(folder / f"plane_{self.name}_{self.layer}_exchange.npz")[1] if self.layer in EXCHANGES else {}

    def simulate(self, task: Task) -> None:
        """Train from both starts in every cell; omega varies fastest, because programs depend on alpha only."""
        sizes = self.sizes(task)
        alphas = np.linspace(0.2 if not task.full else ALPHAS[0], ALPHAS[1], sizes["alphas"])
        points = [
            (alpha, omega, branch)
            for alpha in alphas
            for omega in np.linspace(*OMEGAS, sizes["omegas"])
            for branch in range(len(BRANCHES))
        ]

        def row(alpha: float, omega: float, branch: int) -> list[float]:
            start = STARTS[self.layer][branch]
            results = measured(self.model(omega), sizes["d"], alpha, start, sizes["instances"], train_of(self.layer))
            return [alpha, omega, branch, linear(omega), *results]

        @cache
        def linear(omega: float) -> float:
            model = self.model(omega)
            return float(gen_error_linear(model, ta.Sobol(2**14).rule(model)).value)

        names, bar = (
            ("alpha", "omega", "branch", "linear", *MEASURED),
            task.bar(f"simulation, {self.name} A, {self.layer}"),
        )
        metadata = {**sizes, "mixing": self.name, "layer": self.layer}
        filled(self._simulation(task.folder), metadata, names, points, row, bar)

    def simulated(self, folder: Path) -> Simulation:
        """Read the result of `simulate`: its `about` and its columns."""
        return read(self._simulation(folder))

    def _simulation(self, folder: Path) -> Path:
        return folder / f"plane_{self.name}_{self.layer}.npz"


def draw_slices(diagram: ta.results.PhaseDiagram) -> Figure:
    """Plot training loss and test error of both branches along alpha, at `SLICES` omegas."""
    return slice_figure(diagram, list(np.linspace(0, len(diagram.y[1]) - 1, SLICES).astype(int)))


def draw_simulation(simulation: Simulation) -> Figure:
    """Plot the loss difference of both starts, and the test error of the lower one minus the baseline, cell by cell."""
    (positional, semantic), gap = (_cells(simulation, k) for k in range(2)), _gap(simulation)
    lower = np.where(gap < 0, positional["gen_error"], semantic["gen_error"])
    titles = "lower training loss: positional or semantic start", "lower minimum: worse or better than the baseline"
    with panels(9.5, 4.2, titles, **_AXES) as (figure, axes):
        _coloured(figure, axes[0, 0], simulation, gap, "RdBu", _GAP)
        excess = lower - positional["linear"]
        _coloured(figure, axes[0, 1], simulation, excess, "RdBu_r", "test error minus that of the baseline")
    return figure


def draw_layers(layers: dict[str, tuple[Simulation, Columns]]) -> Figure:
    """Plot the loss difference of both starts for every layer, its sign changes, and alpha_c of the theory."""
    with panels(4.8 * len(layers), 4.2, list(layers), **_AXES) as (figure, axes):
        for axis, (simulation, theory) in zip(axes[0], layers.values(), strict=True):
            _coloured(figure, axis, simulation, _gap(simulation), "RdBu", _GAP)
            axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())  # the theory's line extends beyond the cells
            omegas = np.unique(simulation[1]["omega"])
            crossings = [exchange(where(simulation[1], omega=omega)) for omega in omegas]
            axis.plot(
                crossings, omegas, "o", ms=3, color=MARKS["alpha_c"]["color"], label=f"{SYMBOLS['alpha_c']}, training"
            )
            if theory:
                axis.plot(theory["alpha"], theory["omega"], label=f"{SYMBOLS['alpha_c']}, theory", **MARKS["alpha_c"])
    return figure


_AXES: dict[str, Any] = {"xlabel": LABELS["alpha"], "ylabels": (LABELS["omega"],), "sharey": True}
_GAP = "positional minus semantic training loss / d"


def _cells(simulation: Simulation, branch: int) -> Columns:
    """Return the columns as arrays (omega, alpha), NaN in cells that are not simulated yet."""
    columns = simulation[1]
    alphas, omegas = np.unique(columns["alpha"]), np.unique(columns["omega"])
    rows = where(columns, branch=branch)
    indices = np.searchsorted(omegas, rows["omega"]), np.searchsorted(alphas, rows["alpha"])
    out = {name: np.full((len(omegas), len(alphas)), np.nan) for name in columns}
    for name, values in out.items():
        values[indices] = rows[name]
    return out


def _gap(simulation: Simulation) -> Float[np.ndarray, "omega alpha"]:
    """Return the positional minus the semantic training loss."""
    return _cells(simulation, 0)["train_loss"] - _cells(simulation, 1)["train_loss"]


def _coloured(
    figure: Figure,
    axis: Axes,
    simulation: Simulation,
    values: Float[np.ndarray, "omega alpha"],
    colours: str,
    label: str,
) -> None:
    """Plot cells in colours centred at zero, with a colour bar; cells whose minima are of one kind are nearly white."""
    alphas, omegas = np.unique(simulation[1]["alpha"]), np.unique(simulation[1]["omega"])
    limit = max(np.nanmax(np.abs(values)), ONE_KIND * np.nanmax(simulation[1]["train_loss"]))
    picture = axis.pcolormesh(alphas, omegas, values, cmap=colours, vmin=-limit, vmax=limit, shading="nearest")
    figure.colorbar(picture, ax=axis, shrink=0.9, label=label)


def rows_theory(diagram: ta.results.PhaseDiagram) -> list[Row]:
    """Return both transitions at some omegas, as read from the grid."""
    out = []
    for name, boundary in (("alpha_c", diagram.alpha_c()), ("alpha_l", diagram.alpha_l())):
        for omega in (0.1, 0.2, 0.3, 0.4):
            k = int(np.argmin(np.abs(boundary.at - omega)))
            if np.isclose(boundary.at[k], omega) and np.isfinite(boundary.alpha[k]):
                published = {("alpha_c", 0.3): 1.241, ("alpha_l", 0.3): 1.451}.get((name, omega))
                reason = "see Fig. 2" if published else "the paper gives no number"
                text = f"{name} at omega = {omega}, from the grid"
                out.append(Row(text, published, None, boundary.alpha[k], boundary.stderr()[k], reason))
    solved, trusted = float(np.mean(diagram.solved)), float(np.mean(diagram.trusted))
    out.append(Row("share of cells that are solved", None, None, solved, None, f"{trusted:.1%} are decided"))
    return out


def rows_simulation(simulation: Simulation, theory: Columns | None = None) -> list[Row]:
    """Return the alpha at which the training losses of both starts cross, at about `ROWS` omegas.

    Args:
        theory: columns of `Plane.exchange`, which are mentioned beside if given.
    """
    metadata, columns = simulation
    reason = f"{metadata['layer']}; d = {metadata['d']}, instances: {metadata['instances']}; interpolated"
    out = []
    omegas = np.unique(columns["omega"])
    for omega in omegas[:: max(1, round(len(omegas) / ROWS))]:
        crossing = exchange(where(columns, omega=omega))
        alpha_c = float(where(theory, omega=omega)["alpha"][0]) if theory else np.nan
        note = f"{reason}; the theory here: {alpha_c:.4f}" if np.isfinite(alpha_c) else reason
        out.append(Row(f"alpha_c at omega = {omega:.2g}, training", None, None, crossing, None, note))
    return out


STANDARD, OTHER = Plane("standard"), Plane("other")
RANK, UNTIED, VALUE, CORRELATED = (Plane("standard", layer) for layer in ("rank", "untied", "value", "correlated"))
