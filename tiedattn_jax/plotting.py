"""Figures, drawn from results; nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .histogram import attention

if TYPE_CHECKING:
    from .branches import Curve
    from .diagram import PhaseDiagram, Reading
    from .histogram import Training, Transformer
    from .transitions import Transition

COLOURS = {"positional": "#c8552b", "semantic": "#1f6fb2"}


def branch_figure(
    curves: dict[str, Curve], alpha_c: Transition | None = None, alpha_l: Transition | None = None
) -> Figure:
    """Order parameters, training loss and test error of the branches against alpha (the content of the paper's Fig. 2).

    Dotted stretches are unstable towards the other branch's order parameter. Bands are two error bars wide.

    Args:
        curves: of `branches.sweep`, by the name of their branch.
        alpha_c, alpha_l: transitions to mark.
    """
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        overlaps, losses, errors = figure.subplots(1, 3)
        for name, curve in curves.items():
            colour = COLOURS[name]
            order = "m" if name == "positional" else "theta"
            _line(
                overlaps,
                curve,
                lambda p, o=order: getattr(p.overlaps, o).ravel()[0],
                lambda p, o=order: getattr(p.stderr.overlaps, o).ravel()[0],
                colour,
                r"$m$, positional" if order == "m" else r"$\theta$, semantic",
            )
            _line(losses, curve, lambda p: p.train_loss, lambda p: p.stderr.train_loss, colour, name)
            _line(errors, curve, lambda p: p.gen_error, lambda p: p.stderr.gen_error, colour, name)
        baseline = float(next(iter(curves.values())).points[-1].gen_error_linear)
        if np.isfinite(baseline):
            errors.axhline(baseline, color="0.45", lw=1, ls="-.", label="linear baseline")
        for axis, title in (
            (overlaps, "order parameters"),
            (losses, "training loss / d"),
            (errors, r"test error $\epsilon_g$"),
        ):
            axis.set_title(title, loc="left")
            axis.set_xlabel(r"sample complexity $\alpha = n/d$")
            for transition, text, style in ((alpha_c, r"$\alpha_c$", "--"), (alpha_l, r"$\alpha_l$", ":")):
                if transition is not None and int(transition.status) <= 1:
                    axis.axvline(float(transition.alpha), color="0.2", lw=0.9, ls=style, label=text)
            axis.set_ylim(bottom=0)
            axis.set_xlim(left=0)
            axis.legend(frameon=False, fontsize=8)
    return figure


def _line(axis: Any, curve: Curve, get: Any, bar: Any, colour: str, label: str) -> None:
    alpha, value, width = curve.alphas, curve.values(get), 2 * curve.values(bar)
    other = "m" if curve.branch == "semantic" else "theta"
    stable = curve.values(lambda p: getattr(p.diagnostics, f"growth_{other}")) < 1
    axis.plot(alpha, np.where(stable, value, np.nan), color=colour, lw=1.6, label=label)
    axis.plot(alpha, np.where(stable & np.roll(stable, 1), np.nan, value), color=colour, lw=1.2, ls=":")
    if np.all(np.isfinite(width[np.isfinite(value)])):
        axis.fill_between(alpha, value - width, value + width, color=colour, alpha=0.2, lw=0)


def attention_figure(transformers: dict[str, Transformer], sequences: Any) -> Figure:
    """Attention matrices with their values, equal tokens framed (the paper's Figs. 1, 4, 5 and 6).

    Args:
        transformers: rows of the figure, by name.
        sequences: its columns, (n, L).
    """
    with matplotlib.rc_context({"font.size": 8}):
        rows, (n, L) = len(transformers), np.shape(sequences)
        side = 0.34 * L + 0.4
        figure = Figure(figsize=(side * n + 1.1, side * rows + 0.3), layout="constrained")
        axes = figure.subplots(rows, n, squeeze=False)
        for row, (name, transformer) in zip(axes, transformers.items(), strict=True):
            row[0].set_ylabel(name, fontsize=11)
            for axis, x, S in zip(row, np.asarray(sequences), attention(transformer, sequences), strict=True):
                image = axis.imshow(S, cmap="Blues", vmin=0, vmax=1)
                letters = [token_name(token) for token in x]
                axis.set_xticks(range(L), letters)
                axis.set_yticks(range(L), letters)
                axis.tick_params(length=0)
                for (i, j), value in np.ndenumerate(S):
                    shade = "white" if value > 0.6 else "0.15"
                    axis.text(j, i, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=6, color=shade)
                    if x[i] == x[j]:
                        frame = Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, ec=COLOURS["positional"], lw=1)
                        axis.add_patch(frame)
        figure.colorbar(image, ax=axes, label="attention", fraction=0.05 / n)
    return figure


def token_name(token: int) -> str:
    """A letter; a number in alphabets longer than the letters."""
    return chr(ord("A") + int(token)) if token < 26 else str(int(token))


def learning_figure(trainings: dict[str, Sequence[Training]]) -> Figure:
    """Training loss, test error and what attention depends on, epoch by epoch, one line per run.

    Args:
        trainings: stages that followed each other, by name; a dashed line marks where the next one began.
    """
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        loss, error, share = axes = figure.subplots(1, 3)
        for name, stages in trainings.items():

            def line(axis: Any, get: Any, label: str, style: str = "-", name: str = name, stages: Any = stages) -> None:
                values = np.concatenate([get(stage.curves) for stage in stages], axis=1)
                colour = COLOURS.get(name, "0.35")
                for k, run in enumerate(values):
                    axis.plot(1 + np.arange(len(run)), run, style, color=colour, lw=1, label="" if k else label)

            line(loss, lambda c: c.train_loss, name)
            line(error, lambda c: 1 - c.test_accuracy, name)
            line(share, lambda c: c.positional_share, f"positional share, {name}", "--")
            line(share, lambda c: c.semantic_share, f"semantic share, {name}")
            for end in np.cumsum([stage.curves.train_loss.shape[1] for stage in stages])[:-1]:
                for axis in axes:
                    axis.axvline(end + 0.5, color="0.6", lw=0.8, ls=":")
        for axis, title in ((loss, "training loss"), (error, "test error"), (share, "share of the variance of S")):
            axis.set_title(title, loc="left")
            axis.set_xlabel("epoch")
            axis.legend(frameon=False, fontsize=8)
        loss.set_yscale("log")
        error.set_yscale("log")
        share.set_ylim(-0.03, 1.03)
    return figure


SYMBOLS = {
    "alpha": r"sample complexity $\alpha = n/d$",
    "omega": r"$\omega$",
    "sigma": r"$\sigma$",
    "lam": r"$\lambda$",
}
PALE = {2: "#f3d9cd", 3: "#cfe0f0"}


def diagram_figure(diagram: PhaseDiagram) -> Figure:
    """The phase diagram (the content of the paper's Figs. 3 and 9): which minimum is global, and whether it beats the baseline.

    Left, the difference of the training losses, positional minus semantic; plain colour where only one of the two is a
    minimum. Right, the test error of the global minimum minus that of the linear baseline. Cells that are unsolved, or where
    the averages do not tell which minimum is lower, are hatched.
    """
    curves = []
    if "alpha" in (diagram.x[0], diagram.y[0]):
        curves = [(diagram.alpha_c(), "-", r"$\alpha_c$"), (diagram.alpha_l(), "--", r"$\alpha_l$")]
    region, trusted = diagram.region, diagram.trusted
    bistable = region >= 4
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(9.5, 4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        edges = _edges(diagram.x[1]), _edges(diagram.y[1])
        for axis, values, shown, title in (
            (left, diagram.loss_difference[0], bistable, "training loss / d: positional minus semantic"),
            (right, diagram.gen_difference[0], region > 1, "test error: global minimum minus linear baseline"),
        ):
            masked = np.ma.masked_where(~shown, values)
            limit = float(np.ma.max(np.abs(masked))) if masked.count() else 1.0
            picture = axis.pcolormesh(
                *edges, masked, cmap="RdBu_r" if axis is right else "RdBu", vmin=-limit, vmax=limit
            )
            figure.colorbar(picture, ax=axis, shrink=0.9)
            if axis is left:
                for code, colour in PALE.items():
                    only = np.ma.masked_where(region != code, np.ones(region.shape))
                    axis.pcolormesh(*edges, only, cmap=matplotlib.colors.ListedColormap([colour]))
                    axis.plot([], [], "s", color=colour, label=("only positional", "only semantic")[code - 2])
            _hatch(axis, *edges, ~trusted)
            for curve, style, name in curves:
                _boundary(axis, diagram, curve, style, name)
            axis.set(xlim=edges[0][[0, -1]], ylim=edges[1][[0, -1]], xlabel=SYMBOLS.get(diagram.x[0], diagram.x[0]))
            axis.set_title(title, loc="left", fontsize=9)
        left.set_ylabel(SYMBOLS.get(diagram.y[0], diagram.y[0]))
        left.legend(loc="lower right", fontsize=8)
        if curves:
            right.legend(loc="upper right", fontsize=8)
    return figure


def slice_figure(diagram: PhaseDiagram, rows: list[int]) -> Figure:
    """Training loss and test error of both branches along x, at some rows of the diagram (the content of Fig. 8)."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.2 * len(rows), 5), layout="constrained")
        panels = figure.subplots(2, len(rows), sharex=True, sharey="row", squeeze=False)
        x, exists = diagram.x[1], diagram.exists
        for column, row in enumerate(rows):
            for axis, name, label in zip(
                panels[:, column],
                ("train_loss", "gen_error"),
                ("training loss / d", r"test error $\epsilon_g$"),
                strict=True,
            ):
                for b, (branch, colour) in enumerate(COLOURS.items()):
                    value = np.where(exists[b, row], diagram.mean(name)[b, row], np.nan)
                    width = 2 * diagram.stderr(name)[b, row]
                    axis.plot(x, value, color=colour, lw=1.6, label=branch)
                    axis.fill_between(x, value - width, value + width, color=colour, alpha=0.2, lw=0)
                if name == "gen_error":
                    linear = np.nanmean(diagram.mean("gen_error_linear")[:, row], 0)
                    axis.plot(x, linear, color="0.45", lw=1, ls="-.", label="linear baseline")
                    axis.set_xlabel(SYMBOLS.get(diagram.x[0], diagram.x[0]))
                if column == 0:
                    axis.set_ylabel(label)
            panels[0, column].set_title(
                f"{SYMBOLS.get(diagram.y[0], diagram.y[0])} = {diagram.y[1][row]:.3g}", loc="left"
            )
        panels[1, 0].legend(frameon=False, fontsize=8)
    return figure


def _boundary(axis: Any, diagram: PhaseDiagram, curve: Reading, style: str, name: str) -> None:
    band = np.where(np.isfinite(curve.stderr), 2 * curve.stderr, 0.0)
    if diagram.x[0] == "alpha":
        axis.plot(curve.alpha, curve.values, "k", ls=style, lw=1.3, label=name)
        axis.fill_betweenx(curve.values, curve.alpha - band, curve.alpha + band, color="k", alpha=0.2, lw=0)
    else:
        axis.plot(curve.values, curve.alpha, "k", ls=style, lw=1.3, label=name)
        axis.fill_between(curve.values, curve.alpha - band, curve.alpha + band, color="k", alpha=0.2, lw=0)


def _hatch(axis: Any, x: np.ndarray, y: np.ndarray, cells: np.ndarray) -> None:
    """Hatch the cells (y, x) that are marked."""
    corners = [Rectangle((x[i], y[j]), x[i + 1] - x[i], y[j + 1] - y[j]) for j, i in np.argwhere(cells)]
    axis.add_collection(PatchCollection(corners, hatch="/////", facecolor="none", edgecolor="0.45", lw=0))


def _edges(centres: np.ndarray) -> np.ndarray:
    """Edges of the cells around increasing centres."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middle = 0.5 * (centres[1:] + centres[:-1])
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])
