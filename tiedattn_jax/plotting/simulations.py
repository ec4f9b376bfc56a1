"""Pictures of simulations at finite size, of learning dynamics and of the counting task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..base.arrays import AnyArray
from ..base.errors import require
from ..model.overlaps import PAIR
from .style import (
    COLOURS,
    ERROR,
    FRAME,
    GROUND,
    INK,
    LABELS,
    LOSS,
    OTHER,
    ROOM,
    Target,
    frame,
    line,
    panels,
    points,
)

_THEORY = "theory"  # the name, in legends, of what is drawn beside simulations


def training_figure(trainings: dict[str, Any], ax: Target = None, **look: Any) -> Any:
    """Plot training loss and gradient, step by step.

    Args:
        trainings: `finite.training.Training` by name; one with the name of a branch has the colour of the branch.
        ax: axes for the panels "train_loss" and "gradient_norm", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    ylabels = {"train_loss": LOSS, "gradient_norm": "largest entry of the gradient"}
    with panels(8, 3.6, xlabel="step", ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        loss, gradient = axes[0]
        for name, training in trainings.items():
            _by_step(loss, training.losses, name)
            _by_step(gradient, training.gradient_norms, name)
        gradient.set_yscale("log")
        for axis in axes[0]:
            axis.set_xscale("symlog", linthresh=1)
            axis.set_xlim(left=0)
    return drawing


def _by_step(axis: Axes, values: Float[AnyArray, " n"], name: str, first: int = 0, *, beside: bool = False) -> None:
    """Draw a number of every step, with NaN for steps that were not taken; the first step has index `first`."""
    steps = np.flatnonzero(np.isfinite(values))
    is_theory = name == _THEORY
    colour, dash = INK if is_theory else COLOURS.get(name, COLOURS["simulation"]), (0, (4, 2)) if is_theory else "-"
    line(axis, first + steps, np.asarray(values)[steps], colour, name, dash=dash, beside=beside)


def gamp_figure(
    runs: dict[str, Any], theory: Any = None, ax: Target = None, *, of_theory: bool = False, **look: Any
) -> Any:
    """Plot order parameters of the estimate and residual of message passing, iteration by iteration.

    With one column of the student and of the teacher, q and theta are means over the tokens, and m is that of the first
    token, as in `FixedPoint`. Otherwise these are means over the tokens of tr q and of the norms of theta and m.

    Args:
        runs: `finite.message_passing.GAMP` by name; one with the name of a branch has the colour of the branch.
        theory: `theory.state_evolution.StateEvolution` to draw beside them, dashed.
        ax: axes for the panels "q", "theta", "m" and "residual", see `style.panels`.
        of_theory: whether the picture is that of the theory, beside which runs are drawn.
        look: options of the lines, see `style.panels`.
    """
    histories = {name: run.history for name, run in runs.items()}
    if theory is not None:
        histories[_THEORY] = theory.history
    is_one = all(x.theta.shape[2:] == (1, 1) for x in histories.values())
    ylabels = {name: name if is_one or name == "q" else f"norm of the {LABELS[name]}" for name in ("q", "theta", "m")}
    ylabels["residual"] = "residual of the step"
    with panels(12, 3.6, xlabel="iteration", ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        q, theta, m, residual = axes[0]
        for name, x in histories.items():
            beside = (name == _THEORY) != of_theory
            _by_step(q, np.trace(x.q, axis1=2, axis2=3).mean(axis=1), name, beside=beside)
            rows = np.asarray(x.theta)[..., 0] if is_one else np.linalg.norm(x.theta, axis=(2, 3))[..., None]
            _by_step(theta, rows.mean(axis=(1, 2)), name, beside=beside)
            _by_step(m, x.m[:, 0, 0] if is_one else np.linalg.norm(x.m, axis=2).mean(axis=1), name, beside=beside)
        for name, run in runs.items():
            _by_step(residual, run.residuals, name, first=1, beside=of_theory)
        residual.set_yscale("log")
    return drawing


def instances_figure(instances: Any, ax: Target = None, **look: Any) -> Any:
    """Plot every instance against the theory at its own teacher, in the colour of its branch.

    Points on the diagonal line agree with the theory. Bars are two error bars of the theory. Hollow points ran out of
    steps. Instances that are unsettled or ended on neither branch have no theory and are left out.

    Args:
        instances: the `phases.table.Table` of `run_instances`, with its theory.
        ax: axes for the panels "train_loss", "gen_error", "q", "theta" and "m", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    names = "train_loss", "gen_error", "q", "theta", "m"
    titles, ylabels = [LABELS[name] for name in names], {**dict.fromkeys(names, ""), names[0]: "instance"}
    branches, ok = instances.values("branch"), instances.ok
    with panels(13, 3.4, titles, xlabel="theory", ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        for axis, name in zip(axes[0], names, strict=True):
            measured, theory = instances.values(name), instances.values(f"theory.{name}")
            bars = instances.stderr(f"theory.{name}")
            for branch in PAIR:
                for ended, label, fill in ((ok, branch, None), (~ok, f"{branch}, out of steps", GROUND)):
                    here = ended & (branches == branch)
                    if here.any():
                        style: dict[str, Any] = {"fmt": "o", "ms": 4, "mfc": fill, "color": COLOURS[branch]}
                        points(axis, theory[here], measured[here], bars[here], label, along="x", label=label, **style)
            axis.axline((0, 0), slope=1, color=OTHER, lw=0.8, zorder=0)
            shown = np.stack([measured, theory])[:, np.isin(branches, PAIR)]
            if shown.size:
                low, high = np.nanmin(shown), np.nanmax(shown)
                margin = ROOM * (high - low or 1)
                axis.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
    return drawing


def trajectory_figure(path: Any, ax: Target = None, **look: Any) -> Any:
    """Plot the student's order parameters, and its risk and test error, against time.

    Overlaps are drawn as sizes of projections: the root of what the teacher, or the encodings, explain of tr R. With
    one column of the student and of the teacher they have the sign of theta, or of m of the first token.

    Args:
        path: `dynamics.sgd.Trajectory`.
        ax: axes for the panels "order" and "loss", see `style.panels`.
        look: options of the lines, see `style.panels`.

    Raises:
        InputError: it is a batch of trajectories.
    """
    require(np.ndim(path.t) == 1, "t", path.t, "one trajectory, not a batch of them")
    mean, bars, t = path.mean, path.stderr, np.asarray(path.t)
    curves = {
        "size $\\sqrt{\\mathrm{tr}\\,R}$": (np.trace(mean.R, axis1=-2, axis2=-1), OTHER),
        "along the teacher": (mean.along_teacher, COLOURS["semantic"]),
        "along the encodings": (mean.along_encodings, COLOURS["positional"]),
    }
    signs = dict.fromkeys(curves, np.ones_like(t))
    if np.shape(mean.Theta)[1:] == (1, 1):
        first = np.asarray(mean.Theta)[:, 0, 0], np.asarray(mean.m)[:, 0, 0]
        signs |= dict(zip([*curves][1:], (np.where(a < 0, -1.0, 1.0) for a in first), strict=True))
    ylabels = {"order": "size of the student", "loss": "loss"}
    with panels(7.6, 3.4, xlabel="time $t$ = steps / $d$", ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        sizes, losses = axes[0]
        for label, (square, colour) in curves.items():
            line(sizes, t, signs[label] * np.sqrt(np.maximum(square, 0.0)), colour, label)
        line(losses, t, np.asarray(mean.risk), OTHER, "risk", bar=np.asarray(bars.risk), dash="--")
        line(losses, t, np.asarray(mean.gen_error), COLOURS["mixed"], ERROR, bar=np.asarray(bars.gen_error))
        for axis in axes[0]:
            frame(axis)
    return drawing


def emergence_figure(path: Any, ax: Target = None, **look: Any) -> Any:
    """Draw the variances of the overlaps of a student without overlaps against time, and their growth rates.

    Args:
        path: `dynamics.emergence.Emergence`.
        ax: axes for the panels "square" and "growth", see `style.panels`.
        look: options of the lines, see `style.panels`.

    Raises:
        InputError: it is a batch.
    """
    require(np.ndim(path.t) == 1, "t", path.t, "those of one run, not of a batch")
    mean, bars, t = path.mean, path.stderr, np.asarray(path.t)
    ylabels = {"square": "mean square overlap times $d$", "growth": "growth rate of the overlap"}
    with panels(7.6, 3.4, xlabel="time $t$ = steps / $d$", ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        for name, branch in (("teacher", "semantic"), ("encodings", "positional")):
            for axis, number in zip(axes[0], (name, f"growth_{name}"), strict=True):
                value, bar = (np.asarray(getattr(s, number)) for s in (mean, bars))
                line(axis, t, value, COLOURS[branch], f"along the {name}", bar=bar)
        axes[0][0].set_yscale("log")
        for axis in axes[0]:
            frame(axis)
    return drawing


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


def learning_figure(trainings: dict[str, Sequence[Any]], ax: Target = None, **look: Any) -> Any:
    """Plot training loss, test error and the shares of attention, epoch by epoch, with one line per run.

    Args:
        trainings: successive stages, `histogram.Training`, by name; a dotted line marks the beginning of the next
            stage.
        ax: axes for the panels "train_loss", "test_error" and "share", see `style.panels`.
        look: options of the lines, see `style.panels`.
    """
    ylabels = {
        "train_loss": "training loss, cross-entropy",
        "test_error": "test error, 1 - accuracy",
        "share": "share of attention's variance",
    }
    with panels(11, 3.6, xlabel="epoch", ylabels=ylabels, ax=ax, look=look) as (drawing, axes):
        loss, error, share = axes[0]
        for name, stages in trainings.items():
            for axis, get, label, style in (
                (loss, lambda h: h.train_loss, name, "-"),
                (error, lambda h: 1 - h.test_accuracy, name, "-"),
                (share, lambda h: h.positional_share, f"positional share, {name}", "--"),
                (share, lambda h: h.semantic_share, f"semantic share, {name}", "-"),
            ):
                values = np.concatenate([get(stage.history) for stage in stages], axis=1)
                options: dict[str, Any] = {"color": COLOURS.get(name, COLOURS["simulation"]), "lw": 1, "gid": label}
                if values.shape[1] == 1:  # a single epoch is a marker, as it makes no line
                    options |= {"marker": "o", "ms": 4, "mfc": "none" if style == "--" else None}
                axis.plot(1 + np.arange(values.shape[1]), values.T, style, label=label, **options)
            for end in np.cumsum([stage.history.train_loss.shape[1] for stage in stages])[:-1]:
                for axis in axes.flat:
                    axis.axvline(end + 0.5, color="0.6", lw=0.8, ls=":", label="next stage")
        loss.set_yscale("log")
        error.set_yscale("log")
        share.set_ylim(-0.03, 1.03)
        for axis in axes.flat:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return drawing
