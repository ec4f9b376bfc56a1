"""Compare theory and training for correlated tokens, with and without jumps of the proximal operator.

    python benchmarks/correlated.py [--d 1000] [--instances 16] [--starts 1] [--case WORDS]

The tokens have two classes with unequal covariances and opposite means. With several starts, each instance is trained
from its named start and from points around the state of the theory; the table shows the minimum from the named start
and the lowest minimum on the branch. Teachers have exactly the model's norm and means. Takes ten minutes on two cores
with 17 starts of 16 instances.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import tiedattn_jax as ta
from tiedattn_jax.finite.sampling import start as start_of
from tiedattn_jax.model.overlaps import magnitudes

CASES = {"smooth, semantic": (0.1, 3.0), "smooth, positional": (0.6, 4.0), "jumps, positional": (0.6, 1.5)}
SHARES = {(0, 0): 0.45, (1, 1): 0.45, (0, 1): 0.05, (1, 0): 0.05}
VECTORS = {"encodings": [[1.0, 0.0], [-1.0, 0.0]], "means": [[0.0, 1.0], [0.0, -1.0]]}
FLOOR = 0.1  # least relative size of the branch's order parameter at a minimum that counts as on the branch


def model_of(omega: float) -> ta.DotProduct:
    """Return the model at an omega; the classes have sigma^2 = .25 and .36."""
    return ta.DotProduct(
        omega, spectrum=ta.SpectralLaw.of_classes([0.25, 0.36], SHARES, **VECTORS, teacher_means=[0.3, -0.3])
    )


def row(model: ta.Model, x: ta.Overlaps, train_loss: Float[Array, ""], gen_error: Float[Array, ""]) -> dict[str, float]:
    """Return the numbers of a state or an estimate by name, order parameters without signs."""
    orders = {
        f"{name} of class {k + 1}": np.abs(getattr(x, name)[k]).item() for name in ("q", "theta") for k in range(2)
    }
    m = {"m, encodings": abs(x.m[0, 0].item()), "m, means": abs(x.m[2, 0].item())}
    return {"training loss": float(train_loss), "test error": float(gen_error), **orders, **m}


def minima(
    model: ta.Model, branch: str, state: ta.results.FixedPoint, d: int, alpha: float, key: PRNGKeyArray, starts: int
) -> list:
    """Train one instance; return the minimum from the named start, and the lowest one on the branch from any start."""
    data = ta.sample_data(model, d, alpha, key, normalise=True)
    named_start = start_of(model, data, branch)
    mean = named_start * float(jnp.abs(state.overlaps.m[0, 0]) / 0.25 if branch == "positional" else 1.0)
    spread = float(jnp.sqrt(jnp.maximum(state.overlaps.q[0, 0, 0] / model.trace[0] - jnp.sum(mean**2) / d, 0.0)))
    sizes, keys = np.linspace(1, 2, starts - 1) * spread, jax.random.split(jax.random.key(1), starts - 1)
    random_starts = [mean + size * jax.random.normal(k, mean.shape) for size, k in zip(sizes, keys, strict=True)]
    runs = [ta.train(model, data, Q, optimizer="lbfgs", steps=3000, tol=1e-8) for Q in (named_start, *random_starts)]
    usable = [bool(run.ok) and float(magnitudes(model, run.overlaps)[branch == "positional"]) > FLOOR for run in runs]
    lowest = min((run for run, flag in zip(runs, usable, strict=True) if flag), key=lambda run: float(run.train_loss))
    test_key = jax.random.fold_in(key, 1)
    errors = [
        ta.finite.heldout_error(model, data, run.Q, test_key, sentences=100_000).value for run in (runs[0], lowest)
    ]
    return [row(model, run.overlaps, run.train_loss, e) for run, e in zip((runs[0], lowest), errors, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("d", 1000), ("instances", 16), ("starts", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", default="", help="those whose name contains it")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    columns = ("training", "difference, % (in errors)", "lowest", "difference, % (in errors)")
    print("|", " | ".join(("", "quantity", "theory", *columns)), "|\n" + "|---" * 7 + "|")
    for name, (omega, alpha) in ((k, v) for k, v in CASES.items() if args.case in k):
        model, branch = model_of(omega), name.partition(", ")[2]
        state = ta.solve(model, alpha, branch, ta.Lines(5, replicates=2).rule(model))
        theory = row(model, state.overlaps, state.train_loss, state.gen_error)
        keys = jax.random.split(jax.random.key(0), args.instances)
        results = [minima(model, branch, state, args.d, alpha, key, args.starts) for key in keys]
        title = f"{name}, jump mass {state.diagnostics.jump_mass:.3f}, rs_error {state.diagnostics.rs_error:.2g}"
        for quantity, value in theory.items():
            if value == 0:
                continue
            cells = [f"{value:.6g}"]
            for k in range(2):
                values = np.array([pair[k][quantity] for pair in results])
                bar = values.std(ddof=1) / len(values) ** 0.5
                gap = values.mean() - value
                cells += [f"{values.mean():.5g}({bar:.1g})", f"{100 * gap / value:+.2f} ({gap / bar:+.1f})"]
            print("|", " | ".join((title, quantity, *cells)), "|", flush=True)
            title = ""


if __name__ == "__main__":
    main()
