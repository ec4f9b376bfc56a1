"""Compare the optimal learner of wide layers with published state evolution.

    python -m benchmarks.attention_indexed DATA [--points 12]

DATA is the folder `data` of github.com/FabrizioBoncoraglio/BO_ExtensiveRankAttention, the code for Boncoraglio et al.,
"Bayes optimal learning of attention-indexed models" (arXiv 2506.01582). Its `rho` is our `kappa` of the teacher, its
`mmse` our `distance`.

Prints a row for each of its files SE_*: the largest differences over `points` of its values of alpha, in units of the
error of a learner without data. The last column compares its files on hard attention with its own formula: in place of
the derivative of the probability of the labels, that has the joint density at its end.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.interpolate import CubicSpline
from scipy.optimize import brentq

import tiedattn_jax as ta
from tiedattn_jax.wide.optimum import _below, error_of_noise

SMALL = 1e-4  # width of the teacher in place of zero; the file for zero has alpha over the width
HEAD = "| file | alphas | range of alpha | largest difference | where: theirs, ours | from its own formula |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--points", type=int, default=12, help="values of alpha from each file")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(HEAD, "|---|---|---|---|---|---|", sep="\n")
    for path in sorted(args.data.glob("SE_*/*.csv")):
        print(row(path, args.points), flush=True)


def row(path: Path, points: int) -> str:
    """Return the row of one file."""
    with path.open() as file:
        table = list(csv.DictReader(file))
    picked = np.unique(np.linspace(0, len(table) - 1, points).round().astype(int))
    alpha, published = (np.array([float(table[k][name]) for k in picked]) for name in ("alpha", "mmse"))
    kappa = float(re.search(r"rho=(\d+(?:\.\d+)?)", path.stem)[1])
    is_hard, scale = "hardmax" in path.stem, 1 if kappa else SMALL
    kappa = kappa or SMALL
    known = ta.wide.DotProduct(tau=1.0, teacher=ta.wide.Wishart(kappa), target="hardmax" if is_hard else "softmax")
    ours = np.array([float(ta.wide.bayes(known, scale * a).distance) for a in alpha])
    gap = np.abs(published - ours)
    worst = int(np.argmax(gap))
    own = f"{np.max(np.abs(published - of_density(kappa, scale * alpha))):.1e}" if is_hard else ""
    where = f"alpha = {alpha[worst]:.3g}: {published[worst]:.4f}, {ours[worst]:.4f}"
    return f"| {path.stem} | {len(table)} | {alpha[0]:.2g} to {alpha[-1]:.3g} | {gap[worst]:.1e} | {where} | {own} |"


def of_density(kappa: float, alpha: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return the errors that follow from the published formula for the information of hard attention."""
    law, rho = ta.wide.Wishart(kappa), 1 + kappa
    noises, errors = np.geomspace(1e-5, 1e6, 400) * rho, np.geomspace(1e-3, 1 - 1e-6, 80) * rho
    mmse = np.asarray(jax.lax.map(lambda Delta: error_of_noise(law, Delta), jnp.asarray(noises)))
    by_noise = CubicSpline(np.log(noises), np.log(mmse))
    by_error = CubicSpline(np.log(errors), np.log([float(density_information(rho - e, e)) for e in errors]))

    def excess(e: float, a: float) -> float:
        return np.exp(by_noise(-np.log(2 * a) - by_error(np.log(e)))) - e

    return np.array([brentq(excess, 1.01e-3 * rho, errors[-1], args=(a,)) for a in alpha])


@jax.jit
def density_information(q: Float[Array, ""], V: Float[Array, ""]) -> Float[Array, ""]:
    """Return what stands for the information of hard attention in the published code, `sum_G_squared_hard`."""
    x = jnp.linspace(-7, 7, 401)
    weight = jnp.exp(-(x[:, None] ** 2 + x**2) / 2)
    u, v = np.sqrt(3) * x[:, None] + 0 * x, (x[:, None] + np.sqrt(8) * x) / np.sqrt(3)
    value = 0.0
    for sign in (1, -1):  # the other signs contribute the same
        a, b, r = u * jnp.sqrt(q / (3 * V)), sign * v * jnp.sqrt(q / (3 * V)), sign / 3
        density = jnp.exp(-(a**2 - 2 * r * a * b + b**2) / (2 * (1 - r**2))) / (2 * np.pi * np.sqrt(1 - r**2))
        P = jnp.maximum(_below(a, b, r), 1e-12)
        value += 2 * jnp.sum(weight * (6 + 6 * r) * density**2 / P) / weight.sum()
    return value / (3 * V)


if __name__ == "__main__":
    main()
