"""Figs. 10 to 14: correlated tokens, a student of rank two, query and key of their own, and a trained value matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure

import tiedattn_jax as ta
from tiedattn_jax.plotting.style import COLOURS, LABELS, OTHER, line, panels

from .data import Task, filled, read, where
from .page import Row
from .simulation import (
    BRANCHES,
    MEASURED,
    NUMBERS,
    TRAIN,
    exchange,
    informed,
    measured,
    numbers,
    stable,
    standard_error,
    train_with_values,
)

SIZES: dict[str, Any] = {"alphas": 25, "d": 1000, "instances": 4}
SIZES_VALUE: dict[str, Any] = {**SIZES, "alphas": 13}  # for a value matrix, which takes an hour
REDUCED: dict[str, Any] = {"alphas": 7, "d": 200, "instances": 3}
CURVE_ALPHAS, NODES = 16, 2**13  # alphas of the theory's curves, and nodes of a replicate


def untied(omega: float = 0.3) -> ta.UntiedDotProduct:
    """Return the standard setting with untied weights and the paper's tied target."""
    return ta.UntiedDotProduct(omega, tied_teacher=True)


def correlated() -> ta.SpectralLaw:
    """Return a law with two classes of tokens; both tokens of a sentence share a class with probability .9.

    The classes have opposite means of unit norm, with which the teacher overlaps.
    """
    shares = {(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.05, (1, 0): 0.05}
    vectors = {"encodings": [[1.0, 0.0], [-1.0, 0.0]], "means": [[0.0, 1.0], [0.0, -1.0]]}
    return ta.SpectralLaw.of_classes([0.25, 0.25], shares, **vectors, teacher_means=[0.3, -0.3])


def mixed(data: ta.Data, key: PRNGKeyArray) -> Float[Array, "d r"]:
    """Return weights with one column at each of the two starts."""
    return jnp.concatenate([informed(branch)(data, key) for branch in BRANCHES], axis=1)


# Starts of every layer, functions from an instance and a key to weights.
STARTS = {
    **dict.fromkeys(("tied", "value", "correlated"), tuple(informed(branch) for branch in BRANCHES)),
    "untied": tuple(informed(branch, 2) for branch in BRANCHES),
    "rank": (*(informed(branch, 2) for branch in BRANCHES), mixed),
}
NAMES = (*(f"{branch} start" for branch in BRANCHES), "start with one of each")
_COLOURS = (*(COLOURS[branch] for branch in BRANCHES), COLOURS["mixed"])
_OFFSET = 0.02  # shift in alpha between points of different starts, so that they do not hide each other


def model_of(kind: str, omega: float = 0.3) -> ta.AttentionLayer:
    """Return the layer of a name in `STARTS`; for "value" it is the tied one, see `train_of`."""
    if kind == "correlated":
        return ta.DotProduct(omega=omega, spectrum=correlated())
    return untied(omega) if kind == "untied" else ta.DotProduct(omega=omega, rank=2 if kind == "rank" else 1)


def train_of(kind: str) -> Callable[..., ta.results.Training]:
    """Return the function that trains the layer of a name in `STARTS`."""
    return train_with_values if kind == "value" else TRAIN


def compute(task: Task, kind: str) -> None:
    """Simulate a layer and the tied layer of rank one from every start, and compute the theory of the layer."""
    for name in ("tied", kind):
        sizes = (SIZES_VALUE if name == "value" else SIZES) if task.full else REDUCED
        alphas = np.linspace(0.01 if task.full else 0.5, 2.0, sizes["alphas"])
        points = [(alpha, start) for alpha in alphas for start in range(len(STARTS[name]))]

        def row(alpha: float, start: int, name: str = name, sizes: dict[str, Any] = sizes) -> list[float]:
            run = STARTS[name][start], sizes["instances"], train_of(name)
            return [alpha, start, *measured(model_of(name), sizes["d"], alpha, *run)]

        names, bar = ("alpha", "branch", *MEASURED), task.bar(f"simulation, {name}")
        filled(task.folder / f"layer_{name}.npz", {**sizes, "layer": name}, names, points, row, bar)
    if kind != "value":  # there is no theory of a value matrix
        _theory(task, kind)


def _theory(task: Task, kind: str) -> None:
    """Solve the states of the layer from the largest alpha down, each starting from the previous state.

    The first state starts as follows. A student of rank two has one positional and one semantic column, because all
    simulations end there. Untied weights have query and key alike, in the state of either branch. The other layers use
    the start of the branch.
    """
    model = model_of(kind)
    nodes = ta.Sobol(NODES).rule(model)
    alphas = np.linspace(2.0, 0.5, CURVE_ALPHAS)
    branches = (None,) if kind == "rank" else BRANCHES
    points = [(k, alpha) for k in range(len(branches)) for alpha in alphas]
    last: dict[int, Any] = {}

    def row(k: int, alpha: float) -> list[float]:
        if k not in last:
            last[k] = None if kind == "correlated" else _columns(model, alphas[0], branches[k])
        point = ta.solve(model, alpha, branches[k], nodes, start=last[k])
        if not bool(point.exists):
            return [k, alpha, *np.full(len(names) - 2, np.nan)]
        last[k] = point.overlaps
        return [k, alpha, *numbers(point), *([stable(point)] if "stable" in names else [])]

    # For rank two no symmetry is imposed, so that no direction of growth is left to test for stability.
    names = ("branch", "alpha", *NUMBERS, *(() if kind == "rank" else ("stable",)))
    path, bar = task.folder / f"layer_{kind}_theory.npz", task.bar(f"theory, {kind}")
    filled(path, {"layer": kind, "nodes": NODES}, names, points, row, bar)


def _columns(model: ta.AttentionLayer, alpha: float, branch: str | None) -> ta.Overlaps:
    """Return overlaps of two columns: both near the state of one branch of the tied layer, or one near each state."""
    single = ta.DotProduct(omega=model.omega)
    rule = ta.Lines(5, replicates=1).rule(single)
    states = [ta.solve(single, alpha, b, rule).overlaps for b in (BRANCHES if branch is None else (branch, branch))]
    eye = jnp.eye(2)

    def diagonal(name: str) -> Float[Array, "L 2 2"]:
        return jnp.stack([getattr(x, name)[:, 0, 0] for x in states], axis=-1)[:, :, None] * eye

    q = diagonal("q")
    if branch is not None:  # query and key have the correlation .8
        q = q + 0.8 * q[:, :1, :1] * (1 - eye)
    theta = jnp.stack([x.theta[:, 0] for x in states], axis=1)
    return ta.Overlaps(q=q, V=diagonal("V"), theta=theta, m=jnp.stack([x.m[:, 0] for x in states], axis=1))


def load(folder: Path, kind: str) -> dict[str, Any]:
    """Read the simulations of both layers and the theory of the layer."""
    metadata, simulation = read(folder / f"layer_{kind}.npz")
    tied = read(folder / "layer_tied.npz")[1]
    theory = {} if kind == "value" else read(folder / f"layer_{kind}_theory.npz")[1]
    return {"about": metadata, "layer": simulation, "tied": tied, "theory": theory, "kind": kind}


def draw(data: dict[str, Any]) -> Figure:
    """Plot training loss, test error and overlaps against alpha.

    Hollow points are the tied layer of rank one on independent tokens. Points of different starts are shifted a little
    in alpha.
    """
    names = ("train_loss", "gen_error", "m", "theta")
    plain = {"value": "no value matrix", "correlated": "independent tokens"}.get(data["kind"], "rank one, tied")
    with panels(14, 3.9, [""] * 4, xlabel=LABELS["alpha"], ylabels=[LABELS[name] for name in names]) as (figure, axes):
        for axis, name in zip(axes[0], names, strict=True):
            for part, filling in (("tied", "white"), ("layer", None)):
                for k, start in enumerate(NAMES):
                    rows = where(data[part], branch=k)
                    if not len(rows["alpha"]):
                        continue
                    style: Any = {"fmt": "o", "ms": 4, "lw": 1, "color": _COLOURS[k], "mfc": filling}
                    label = start if filling is None else f"{start}, {plain}"
                    alphas = rows["alpha"] + _OFFSET * (k - 1)
                    axis.errorbar(alphas, rows[name], 2 * standard_error(rows, name), label=label, **style)
            for k in np.unique(data["theory"].get("branch", [])).astype(int):
                rows = where(data["theory"], branch=k)
                is_rank_two = data["kind"] == "rank"
                colour = OTHER if is_rank_two else COLOURS[BRANCHES[k]]
                label = "theory" if is_rank_two else f"theory, {BRANCHES[k]}"
                solid = rows["stable"] > 0 if "stable" in rows else None
                line(axis, rows["alpha"], rows[name], colour, label, stable=solid)
            axis.set(xlim=(0, 2.05), ylim=(0, None))
    return figure


def rows(data: dict[str, Any]) -> list[Row]:
    """Return the losses at the largest alpha, and the alpha at which the minima exchange."""
    out = []
    metadata, theory = data["about"], data["theory"]
    sizes = f"d = {metadata['d']}, {metadata['instances']} instances"
    for k, start in enumerate(NAMES):
        last = {name: values[-1:] for name, values in where(data["layer"], branch=k).items()}
        if not len(last["alpha"]):
            continue
        state = where(theory, branch=0 if data["kind"] == "rank" else k, alpha=last["alpha"][0]) if theory else {}
        text = f"training loss / d, {start}, alpha = {last['alpha'][0]:g}"
        error = float(standard_error(last, "train_loss")[0])
        reason = f"{sizes}; the theory here: {state['train_loss'][0]:.5g}" if len(state.get("alpha", ())) else sizes
        out.append(Row(text, None, None, last["train_loss"][0], error, reason))
    if data["kind"] != "rank":
        names = {"theory": theory} if theory else {}
        names |= {"simulation": data["layer"], "simulation, tied": data["tied"]}
        for case, columns in names.items():
            reason = f"where the losses cross, interpolated; {sizes}"
            out.append(Row(f"alpha_c, {case}", None, None, exchange(columns), None, reason))
    return out
