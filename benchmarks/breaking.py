"""Estimate the error of replica symmetry over the plane of sample complexity and omega.

    python benchmarks/breaking.py [--alphas 24] [--omegas 12] [--order 5] [--out DIR]

The estimate has one step of replica symmetry breaking. For every cell of a grid it gives the relative increase of the
training loss of a branch (`Diagnostics.rs_error`), and for every omega the shift of alpha_c (`rs_shift`).
Prints a table and writes DIR/rs_error.png. The grid is kept in DIR, and an interrupted run resumes from it. Takes five
minutes on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float
from matplotlib.colors import LogNorm

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Rule
from tiedattn_jax.base.report import with_error
from tiedattn_jax.model.overlaps import PAIR
from tiedattn_jax.plotting.style import panels

FLOOR = 1e-7  # fraction of the loss below which the estimate is comparable to its error, or exactly zero


def transitions(omegas: Float[np.ndarray, " A"], nodes: Rule) -> list[ta.results.Quantity]:
    """Find alpha_c at every omega, each search starting from the previous transition."""
    events: list[ta.results.Quantity] = []
    for omega in omegas:
        start = events[-1].branches if events and events[-1].ok else None
        events.append(ta.critical_alpha(ta.DotProduct(omega), nodes, start=start))
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alphas", type=int, default=24, metavar="N", help="columns of the grid")
    parser.add_argument("--omegas", type=int, default=12, metavar="N", help="its rows")
    parser.add_argument("--order", type=int, default=5, metavar="K", help="of the lines")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the picture goes")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    alphas, omegas = np.linspace(0.2, 4.0, args.alphas), np.linspace(0.05, 0.5, args.omegas)
    model = ta.DotProduct()
    nodes = ta.Lines(args.order).rule(model)
    grid = ta.phase_diagram(model, alpha=alphas, omega=omegas, nodes=nodes, out=args.out / "rs_error_grid", resume=True)
    branches = [branch.numbers() for branch in (grid.positional, grid.semantic)]
    loss, elevation, mass = (np.stack([b[k][0] for b in branches]) for k in ("train_loss", "rs_error", "jump_mass"))
    share = elevation / loss
    events = transitions(omegas, nodes)

    print("Where the share of the loss is largest, at every omega:")
    print(f"{'branch':>10} {'omega':>6} {'alpha':>6} {'jump mass':>10} {'share':>9}")
    for b, branch in enumerate(PAIR):
        for k, omega in enumerate(omegas):
            if np.any(np.isfinite(share[b, k])):
                top = int(np.nanargmax(share[b, k]))
                print(f"{branch:>10} {omega:6.3f} {alphas[top]:6.2f} {mass[b, k, top]:10.3f} {share[b, k, top]:9.2e}")
    print(f"\n{'omega':>6} {'alpha_c':>16} {'moved by':>14} {'relative':>9}")
    for omega, event in zip(omegas, events, strict=True):
        if event.ok:
            shift = event.rs_shift
            cells = with_error(event.alpha, event.stderr), with_error(shift.value, shift.stderr)
            print(f"{omega:6.3f} {cells[0]:>16} {cells[1]:>14} {float(shift.value / event.alpha):9.1e}")

    with panels(11, 3.6, (*PAIR, "shift of alpha_c, estimated"), ylabels=(r"$\omega$",)) as (figure, axes):
        line = np.array([[float(e.alpha), omega] for e, omega in zip(events, omegas, strict=True) if e.ok])
        for axis, values in zip(axes.flat, share, strict=False):
            axis.set(facecolor="0.85", xlabel=r"sample complexity $\alpha$")  # grey where there is no state
            mesh = axis.pcolormesh(
                alphas, omegas, np.maximum(values, FLOOR), norm=LogNorm(FLOOR, 1e-2), cmap="viridis", shading="nearest"
            )
            axis.plot(*line.T, "w-", lw=1.5)
            axis.plot(*line.T, "k--", lw=1.5, label=r"$\alpha_c$" if axis is axes.flat[0] else None)
        figure.colorbar(mesh, ax=list(axes.flat[:2]), label="estimate over training loss", extend="both")
        shifts = np.array([[float(e.rs_shift.value), float(e.rs_shift.stderr)] for e in events if e.ok])
        last = axes.flat[2]
        last.errorbar(line[:, 1], shifts[:, 0] / line[:, 0], shifts[:, 1] / line[:, 0], fmt="ko-", ms=3, lw=1)
        last.axhline(0, color="0.6", lw=0.8)
        last.set(xlabel=r"$\omega$", ylabel=r"shift over $\alpha_c$")
        last.ticklabel_format(axis="y", scilimits=(0, 0))
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "rs_error.png", dpi=110)


if __name__ == "__main__":
    main()
