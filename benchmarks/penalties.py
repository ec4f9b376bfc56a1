"""Theory next to message passing with penalties besides the ridge: the table of `docs/howto/penalties.md`.

    python benchmarks/penalties.py [--instances 20] [--d 1000] [--case WORDS]

Message passing that does not settle is finished by training. Teachers have exactly the model's norm and are exactly
orthogonal to the encodings. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp

import tiedattn_jax as ta


class SparseTeacher(ta.DotProduct):
    """A fifth of the teacher's entries are N(0, 5), the others are zero."""

    def law(self) -> ta.SpectralLaw:
        two = jax.tree.map(lambda a: jnp.repeat(a, 2, 0), super().law())
        pi = jnp.stack([0 * self.teacher, 5 * self.teacher])
        return dataclasses.replace(two, weights=jnp.array([0.8, 0.2]), pi=pi)


def cases() -> dict[str, tuple[ta.Model, float, str]]:
    """Model, alpha and branch, by name."""
    l1 = ta.dot_product(lam=0.0, penalty=ta.L1(0.01))
    net = ta.dot_product(lam=0.01, penalty=ta.L1(0.01))
    untied = ta.untied_dot_product(lam=0.01, penalty=ta.L1(0.01), tied_teacher=True)
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
        nodes = ta.line_nodes(model, 15) if model.shape[1] == 1 else ta.sobol_nodes(model, 2**15)
        found = ta.run_instances(model, args.d, alpha, run, keys, nodes=nodes, normalise=True)
        settled = f"{(found.ok & (found.branch == branch)).sum()} of {args.instances}"
        for what, (mean, theory, gap, bar) in found.difference(branch).items():
            if theory != 0:
                cells = f"{theory:.6g}", f"{mean:.6g}", f"{gap:+.2g}({bar:.1g})", f"{gap / bar:+.1f}"
                print("|", " | ".join((name, settled, what, *cells)), "|")
                name = settled = ""
        print(f"largest proximal gradient {found.gradient_norm.max():.1e}", file=sys.stderr)
        sys.stdout.flush()


def critical_point(model: ta.Model, branch: str, data: ta.Data, key: jax.Array) -> ta.GAMP | ta.Training:
    """Of the risk, by message passing, or by training from where that did not settle."""
    found = ta.gamp(model, data, branch)
    return found if found.ok else ta.train(model, data, found.Q, steps=50_000, rate=0.5, tol=1e-8)


if __name__ == "__main__":
    main()
