"""Measure the accuracy of float32: public numbers in both precisions, on the same nodes and the same data.

    python benchmarks/float32.py [--order 9] [--d 500]

Prints for each number its value in float64, the relative difference of float32, and the relative error bar of the
averages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Rule

Row = tuple[str, Float[np.ndarray, "..."], Float[np.ndarray, "..."] | None]  # name, values, error bars
STATES = (("semantic", 2.0), ("positional", 2.0), ("semantic", 1.0))


def states(model: ta.Model, nodes: Rule, d: int) -> Iterator[Row]:
    """Yield all stored numbers of three fixed points."""
    for branch, alpha in STATES:
        point = ta.solve(model, alpha, branch, nodes)
        bars = point.stderr.numbers()
        for name, value in point.mean.numbers().items():
            if name not in ("status", "residual"):
                yield f"{branch}, alpha = {alpha:g}: {name}", np.asarray(value), np.asarray(bars[name])


def transitions(model: ta.Model, nodes: Rule, d: int) -> Iterator[Row]:
    """Yield alpha_c and alpha_l with their sensitivities."""
    alpha_c = ta.critical_alpha(model, nodes)
    for name, event in (("alpha_c", alpha_c), ("alpha_l", ta.linear_crossing(model, alpha_c, nodes))):
        yield name, np.asarray(event.alpha), np.asarray(event.stderr)
        for field in ("omega", "sigma", "lam"):
            slope, bar = (getattr(tree, field) for tree in (event.sensitivities, event.sensitivities_stderr))
            yield f"d {name} / d {field}", np.asarray(slope), np.asarray(bar)


def derivatives(model: ta.Model, nodes: Rule, d: int) -> Iterator[Row]:
    """Yield derivatives of the semantic state at alpha = 2."""

    def numbers(model: ta.Model) -> tuple[Float[Array, ""], Float[Array, ""]]:
        point = ta.solve(model, 2.0, "semantic", nodes)
        return point.theta, point.gen_error

    for name, slopes in zip(("theta", "gen_error"), jax.jacrev(numbers)(model), strict=True):
        for field in ("omega", "sigma", "lam"):
            yield f"d {name} / d {field}", np.asarray(getattr(slopes, field)), None


def instances(model: ta.Model, nodes: Rule, d: int) -> Iterator[Row]:
    """Yield results of message passing and training on one instance."""
    data = ta.sample_data(ta.DotProduct(), d, 2.0, jax.random.key(0))
    data = jax.tree.map(lambda a: a.astype(model.lam.dtype) if a.dtype == np.float64 else a, data)
    runs = {"message passing": ta.gamp, "L-BFGS": lambda *a: ta.train(*a, optimizer="lbfgs")}
    for name, run in runs.items():
        for branch in ("semantic", "positional"):
            estimate = run(model, data, branch)
            yield f"{name}, {branch}: train_loss", np.asarray(estimate.train_loss), None
            yield f"{name}, {branch}: q", np.asarray(estimate.overlaps.q), None


PARTS: tuple[Callable[[ta.Model, Rule, int], Iterator[Row]], ...] = (states, transitions, derivatives, instances)


def differences(part: Callable[[ta.Model, Rule, int], Iterator[Row]], order: int, d: int) -> Iterator[str]:
    """Yield a line of the table for each number."""
    models = [ta.DotProduct(dtype=dtype) for dtype in ("float64", "float32")]
    rows = (part(model, ta.Lines(order).rule(model), d) for model in models)
    for (name, value, bar), (_, rounded, _) in zip(*rows, strict=True):
        size = np.max(np.abs(value))
        error, scatter = (
            np.max(np.abs(a)) / size if size else 0.0 for a in (rounded - value, 0 * value if bar is None else bar)
        )
        first = np.ravel(value)[0]
        yield f"{name:45} {first:+.8g}  {error:8.1e}  " + ("" if bar is None else f"{scatter:8.1e}")


def main() -> None:
    """Print the table."""
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", type=int, default=9, help="of the lines, 9 by default")
    parser.add_argument("--d", type=int, default=500, help="dimension of the instances, 500 by default")
    args = parser.parse_args()
    print(f"{'number':45} float64      off in float32, error bar")
    for part in PARTS:
        for line in differences(part, args.order, args.d):
            print(line, flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
