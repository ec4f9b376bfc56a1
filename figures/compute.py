"""Computes the data of the figures of finite size, each into a CSV file that `draw.py` reads.

    python figures/compute.py minimum --out minimum.csv    # Fig. 2: the global minimum, theory and simulation
    python figures/compute.py scaling --out scaling.csv    # Figs. 3 (left) and 7: the approach to the theory with d
    python figures/compute.py adam    --out adam.csv       # Fig. 15: where random starts with Adam end

Sizes are options; their defaults are those of the paper's figures or larger, and take a while on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import tiedattn_jax as ta
from tiedattn_jax.store import csv_of, write_whole

NAMES = ("train_loss", "gen_error", "q", "theta", "m")
ADAM_RATE = 0.03


def trained(model: ta.Model, init: str, optimizer: str = "lbfgs", **options: Any) -> Any:
    """A run for `run_instances`: training from a start."""
    return lambda data, key: ta.train(model, data, optimizer, init, key=key, **options)


def numbers(point: ta.FixedPoint) -> dict[str, float]:
    """Losses and order parameters of a fixed point of the dot-product model."""
    x = point.overlaps
    values = (point.train_loss, point.gen_error, x.q.mean(), abs(x.theta).mean(), abs(x.m).mean())
    return dict(zip(NAMES, map(float, values), strict=True))


def minimum(a: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Theory on both branches, and simulations from the start of the lower one, against alpha."""
    model = ta.dot_product()
    nodes = ta.line_nodes(model, a.order)
    loss: dict[str, np.ndarray] = {}
    for branch in ("positional", "semantic"):
        points = [ta.solve(model, alpha, branch, nodes) for alpha in tqdm(a.alphas, desc=branch)]
        loss[branch] = np.array([float(p.train_loss) if bool(p.ok) else np.inf for p in points])
        for alpha, point in zip(a.alphas, points, strict=True):
            if bool(point.ok):
                row = {"kind": "theory", "branch": branch, "alpha": alpha, **numbers(point)}
                yield {**row, "gen_error_linear": float(point.gen_error_linear)}
    for alpha, semantic in zip(tqdm(a.alphas, desc="simulation"), loss["semantic"] < loss["positional"], strict=True):
        branch = "semantic" if semantic else "positional"
        keys = jax.random.split(jax.random.key(a.seed), a.instances)
        found = ta.run_instances(model, a.d[0], alpha, trained(model, branch, steps=a.steps), keys, theory=False)
        row = {"kind": "simulation", "branch": branch, "alpha": alpha, "d": a.d[0], "instances": int(found.ok.sum())}
        for name in NAMES:
            values = np.asarray(getattr(found.found, name))[found.ok]
            row |= {name: values.mean(), f"{name}_stderr": values.std(ddof=1) / values.size**0.5}
        yield row


def scaling(a: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Mean and scatter over instances against d, at a teacher of exactly the model's norm, next to the theory."""
    model = ta.dot_product()
    nodes = ta.line_nodes(model, a.order)
    for branch in ("positional", "semantic"):
        point = numbers(ta.solve(model, a.alphas[0], branch, nodes))
        for d in tqdm(a.d, desc=branch):
            count = int(np.clip(a.instances * a.d[-1] / d, a.instances, 10 * a.instances))
            keys = jax.random.split(jax.random.key(a.seed), count)
            run = trained(model, branch, steps=a.steps)
            found = ta.run_instances(model, d, a.alphas[0], run, keys, theory=False, normalise=True)
            for name in NAMES:
                values = np.asarray(getattr(found.found, name))[found.ok]
                row = {"branch": branch, "alpha": a.alphas[0], "d": d, "instances": values.size, "name": name}
                yield {**row, "mean": values.mean(), "scatter": values.std(ddof=1), "theory": point[name]}


def adam(a: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Overlaps and losses at the end of Adam from random starts, and of the minima from both informed starts."""
    model = ta.dot_product()
    for alpha in tqdm(a.alphas, desc="alpha"):
        keys = jax.random.split(jax.random.key(a.seed), a.instances)
        simulate = partial(ta.run_instances, model, a.d[0], alpha, keys=keys, theory=False, sentences=1000)
        random = simulate(trained(model, "random", "adam", rate=ADAM_RATE, steps=a.steps, tol=1e-7))
        informed = {b: simulate(trained(model, b, steps=a.steps)).found for b in ("positional", "semantic")}
        for k in range(a.instances):
            yield {
                "alpha": alpha,
                "d": a.d[0],
                "branch": random.branch[k],
                "status": int(random.status[k]),
                **{name: float(getattr(random.found, name)[k]) for name in NAMES},
                **{f"{b}_loss": float(informed[b].train_loss[k]) for b in informed},
            }


FIGURES = {"minimum": minimum, "scaling": scaling, "adam": adam}
DEFAULTS: dict[str, dict[str, Any]] = {
    "minimum": {"d": [1000], "alphas": np.linspace(0.25, 2.25, 9), "instances": 8, "steps": 2000},
    "scaling": {"d": [10, 20, 50, 100, 200, 500, 1000], "alphas": [2.0], "instances": 20, "steps": 2000},
    "adam": {"d": [500], "alphas": [0.5, 1.0, 1.5, 2.0], "instances": 20, "steps": 3000},
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--d", type=int, nargs="+")
    parser.add_argument("--alphas", type=float, nargs="+")
    parser.add_argument("--instances", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--order", type=int, default=7, help="of the lines of the theory")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(argv)
    for name, value in DEFAULTS[a.figure].items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    jax.config.update("jax_enable_x64", True)
    write_whole(a.out, csv_of(list(FIGURES[a.figure](a))))


if __name__ == "__main__":
    main()
