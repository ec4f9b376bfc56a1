"""Compare theory and message passing with penalties besides the ridge: the table of `docs/howto/penalties.md`.

    python benchmarks/penalties.py [--instances 20] [--d 1000] [--case WORDS]

Training continues the runs of message passing that do not converge. Teachers have exactly the model's norm and are
exactly orthogonal to the encodings. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import tiedattn_jax as ta
from tiedattn_jax.finite.instances import Compared
from tiedattn_jax.finite.sampling import start
from tiedattn_jax.model.overlaps import PAIR


class SparseTeacher(ta.DotProduct):
    """A layer with a sparse teacher: a fifth of its entries are N(0, 5) for unit variance, the others zero."""

    def law(self) -> ta.SpectralLaw:
        atoms = jax.tree.map(lambda a: jnp.repeat(a, 2, 0), super().law())
        pi = jnp.stack([0 * self.teacher, 5 * self.teacher])
        return dataclasses.replace(atoms, weights=jnp.array([0.8, 0.2]), pi=pi)


class Heads(ta.DotProduct):
    """A student of three columns: one head for each column of a teacher of two columns, and one for positions.

    The weights of the heads are 4/7 (1 - omega), 3/7 (1 - omega) and omega, so that no rotation of the columns leaves
    the loss unchanged. With omega = .3 the last two weights are equal. There is then a state in which each of these two
    heads has one mechanism, but the loss is lower where both heads mix both mechanisms, with either relative sign. The
    start has such a mixture.
    """

    @property
    def rotation_invariant(self) -> bool:
        return False

    def start_columns(self, combined: bool) -> tuple[Float[Array, "r t"], Float[Array, " r"]]:
        return jnp.array([[1.0, 0.0], [0.0, 0.94], [0.0, 0.34]]), jnp.array([0.0, -0.34, 0.94])

    def attention(self, fields: Float[Array, "L 2"]) -> Float[Array, "L L"]:
        first, second = (jax.nn.softmax(jnp.outer(column, column)) for column in fields.T)
        return (4 * first + 3 * second) / 7

    def student(self, Z: Float[Array, "L r"]) -> Float[Array, "L L"]:
        positional = jax.nn.softmax(jnp.outer(Z[:, 2], Z[:, 2]))
        return (1 - self.omega) * self.attention(Z[:, :2]) + self.omega * positional


def cases() -> dict[str, tuple[ta.Model, float, str]]:
    """Return model, alpha and branch by name."""
    l1 = ta.DotProduct(lam=0.0, penalty=ta.L1(0.01))
    net = ta.DotProduct(lam=0.01, penalty=ta.L1(0.01))
    untied = ta.UntiedDotProduct(lam=0.01, penalty=ta.L1(0.01), tied_teacher=True)
    return {
        "l1, semantic": (l1, 4.0, "semantic"),
        "l1, positional": (l1, 4.0, "positional"),
        "elastic net, semantic": (net, 3.0, "semantic"),
        "elastic net, positional": (net, 3.0, "positional"),
        "l1, sparse teacher, semantic": (SparseTeacher(**vars(l1)), 3.0, "semantic"),
        "elastic net, query and key of their own, semantic": (untied, 5.0, "semantic"),
        "elastic net, query and key of their own, positional": (untied, 5.0, "positional"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--d", type=int, default=1000)
    parser.add_argument("--case", default="", help="those whose name contains it")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("| | in this branch | quantity | theory | simulation | difference | in errors |", "|---" * 7 + "|", sep="\n")
    for name, (model, alpha, branch) in ((k, v) for k, v in cases().items() if args.case in k):
        keys = jax.random.split(jax.random.key(0), args.instances)
        run = partial(critical_point, model, branch)
        nodes = ta.Lines(15).rule(model) if model.shape[1] == 1 else ta.Sobol(2**15).rule(model)
        result = ta.run_instances(model, args.d, alpha, run, keys, nodes=nodes, normalise=True)
        fraction = f"{(result.ok & (result.values('branch') == branch)).sum()} of {args.instances}"
        print_rows(name, fraction, {label: row for label, row in result.difference(branch).items() if row[1] != 0})
        print(f"largest proximal gradient {np.nanmax(result.values('gradient_norm')):.1e}", file=sys.stderr)
    if args.case in (name := "elastic net, three heads"):
        three_heads(name, args.d, args.instances)


def three_heads(name: str, d: int, instances: int) -> None:
    """Print the rows of the student with three heads; the theory is at the model's rho."""
    net = ta.DotProduct(lam=0.005, penalty=ta.L1(0.002), teacher=jnp.eye(2), rank=3)
    model, alpha = Heads(**vars(net)), 6.0

    def run(data: ta.Data, key: PRNGKeyArray) -> ta.results.GAMP:
        semantic, positional = (start(model, data, init, key) for init in PAIR[::-1])
        Q = 0.2 * semantic + positional
        # Message passing from this start leaves its domain, so a thousand steps of training come first.
        trained = ta.train(model, data, Q, steps=1000, rate=0.5)
        return ta.gamp(model, data, trained.Q, damping=0.1, steps=6000, tol=1e-7)

    result = ta.run_instances(
        model, d, alpha, run, jax.random.split(jax.random.key(0), instances), theory=False, normalise=True
    )
    state = ta.solve(model, alpha, None, ta.Sobol(2**15).rule(model))
    mean, bars = (Compared.of(p.train_loss, p.gen_error, p.overlaps) for p in (state.mean, state.stderr))
    fraction = f"{result.ok.sum()} of {instances}"
    rows = {}
    for quantity in vars(mean):
        values, theory = result.values(quantity)[result.ok], float(getattr(mean, quantity))
        bar = float(np.hypot(values.std(ddof=1) / len(values) ** 0.5, getattr(bars, quantity)))
        rows[quantity] = float(values.mean()), theory, float(values.mean()) - theory, bar
    print_rows(name, fraction, rows)
    print(
        f"theory: {state.status_name}; largest proximal gradient {np.nanmax(result.values('gradient_norm')):.1e}",
        file=sys.stderr,
    )


def print_rows(name: str, fraction: str, rows: dict[str, tuple[float, ...]]) -> None:
    """Print rows of the table.

    Args:
        rows: simulation, theory, difference and its error bar, for every quantity by name.
    """
    for quantity, (mean, theory, gap, bar) in rows.items():
        cells = f"{theory:.6g}", f"{mean:.6g}", f"{gap:+.2g}({bar:.1g})", f"{gap / bar:+.1f}"
        print("|", " | ".join((name, fraction, quantity, *cells)), "|", flush=True)
        name = fraction = ""


def critical_point(
    model: ta.Model, branch: str, data: ta.Data, key: PRNGKeyArray
) -> ta.results.GAMP | ta.results.Training:
    """Find a critical point of the risk by message passing; if that does not converge, train from where it ended."""
    estimate = ta.gamp(model, data, branch)
    return estimate if estimate.ok else ta.train(model, data, estimate.Q, steps=50_000, rate=0.5, tol=1e-8)


if __name__ == "__main__":
    main()
