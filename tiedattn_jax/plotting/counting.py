"""Pictures of the counting task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..base.types import AnyArray
from .style import COLOURS, FRAME, OTHER, Target, panels


def attention_figure(attention: Mapping[str, Float[AnyArray, "n L L"]], sequences: Int[AnyArray, "n L"]) -> Figure:
    """Plot attention matrices with their values, and frame pairs of equal tokens (the paper's Figs. 1, 4, 5 and 6).

    Args:
        attention: matrices of every row of the figure, by name, as from `histogram.attention`.
        sequences: tokens of the columns of the figure.
    """
    rows, (n, L) = len(attention), np.shape(sequences)
    side = 0.28 * L + 0.3
    largest = max(float(np.max(matrices)) for matrices in attention.values())
    with panels(side * n + 1.3, side * rows + 0.7, [""] * n, rows=rows, xlabel="attended token $j$") as (figure, axes):
        figure.set_layout_engine("compressed")  # keeps square panels close together
        for row, (name, matrices) in zip(axes, attention.items(), strict=True):
            row[0].set_ylabel(f"{name}\nattending token $i$")
            for axis, x, S in zip(row, np.asarray(sequences), np.asarray(matrices), strict=True):
                image = axis.imshow(S, cmap="Blues", vmin=0, vmax=largest)
                letters = [token_name(token) for token in x]
                axis.set_xticks(range(L), letters)
                axis.set_yticks(range(L), letters)
                axis.tick_params(length=0, labelsize=8)
                axis.spines[:].set_visible(True)
                for (i, j), value in np.ndenumerate(S):
                    shade = "white" if value > 0.6 * largest else "0.15"
                    axis.text(j, i, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=5.5, color=shade)
                    if x[i] == x[j]:
                        axis.add_patch(Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, **FRAME))
        axes[0, 0].plot([], [], "s", mfc="none", mec=FRAME["ec"], label="equal tokens")
        figure.colorbar(image, ax=axes, label="attention $S_{ij}$", fraction=0.05 / n)
    return figure


def token_name(token: int | Int[Any, ""]) -> str:
    """Return the letter of a token, or its number if there are not enough letters."""
    return chr(ord("A") + int(token)) if token < 26 else str(int(token))


def learning_figure(trainings: dict[str, Sequence[Any]], ax: Target = None) -> Any:
    """Plot training loss, test error and the shares of attention, epoch by epoch, with one line per run.

    Args:
        trainings: successive stages, `histogram.Training`, by name; a dotted line marks the beginning of the next
            stage.
        ax: axes for the panels "train_loss", "test_error" and "share", see `style.panels`.
    """
    ylabels = "training loss, cross-entropy", "test error, 1 - accuracy", "share of the variance of attention $S$"
    names = "train_loss", "test_error", "share"
    with panels(11, 3.6, [""] * 3, xlabel="epoch", ylabels=ylabels, names=names, ax=ax) as (drawing, axes):
        loss, error, share = axes[0]
        for name, stages in trainings.items():
            for axis, get, label, style in (
                (loss, lambda h: h.train_loss, name, "-"),
                (error, lambda h: 1 - h.test_accuracy, name, "-"),
                (share, lambda h: h.positional_share, f"positional share, {name}", "--"),
                (share, lambda h: h.semantic_share, f"semantic share, {name}", "-"),
            ):
                values = np.concatenate([get(stage.history) for stage in stages], axis=1)
                options: dict[str, Any] = {"color": COLOURS.get(name, OTHER), "lw": 1}
                if values.shape[1] == 1:  # a single epoch is a marker, as it makes no line
                    options |= {"marker": "o", "ms": 4, "mfc": "none" if style == "--" else None}
                lines = axis.plot(1 + np.arange(values.shape[1]), values.T, style, **options)
                lines[0].set_label(label)
                for drawn in lines:
                    drawn.set_gid(label)
            for end in np.cumsum([stage.history.train_loss.shape[1] for stage in stages])[:-1]:
                for axis in axes.flat:
                    axis.axvline(end + 0.5, color="0.6", lw=0.8, ls=":", label="next stage")
        loss.set_yscale("log")
        error.set_yscale("log")
        share.set_ylim(-0.03, 1.03)
        for axis in axes.flat:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return drawing
