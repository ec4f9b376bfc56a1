"""Compare theory and training for every layer and option: the table in `benchmarks/NOTES.md`.

    python benchmarks/layers.py [--instances 50] [--d 800] [--case WORDS]

Every layer is compared at two or three states. Training is L-BFGS from the start named after the branch. Teachers have
exactly the model's norm and are exactly orthogonal to the encodings. Takes about forty minutes on one core.
`correlated.py` does the same for classes of tokens, `penalties.py` for penalties.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import tiedattn_jax as ta
from tiedattn_jax.base.report import with_error

COLUMNS = {"training loss": "train_loss", "test error": "gen_error", "q": "q"}


class Noisy(ta.DotProduct):
    """A layer whose target sees the teacher's fields with added noise."""

    noise = 1

    def target(self, Y: Float[Array, "L t"], noise: Float[Array, "L noise"]) -> Float[Array, "L L"]:
        return super().target(Y + 0.3 * noise)


class Sampled(ta.DotProduct):
    """A layer with cross-entropy loss: every token draws one token from its row of the target as a label."""

    noise = 1

    def loss(self, Z: Float[Array, "L r"], Y: Float[Array, "L t"], noise: Float[Array, "L noise"]) -> Float[Array, ""]:
        uniform = jax.scipy.special.ndtr(noise)
        label = jnp.sum(jnp.cumsum(self.target(Y), 1)[:, :-1] < uniform, 1)
        return -0.25 * jnp.sum(jax.nn.log_softmax(Z @ Z.T) * jax.nn.one_hot(label, len(Z)))


def tokens(L: int, omega: float) -> ta.DotProduct:
    """Return a layer with L tokens whose positional target gives .6 to the token itself."""
    mixing = np.full((L, L), 0.4 / (L - 1)) + (0.6 - 0.4 / (L - 1)) * np.eye(L)
    return ta.DotProduct(omega, mixing=mixing, encodings=np.linspace(-1, 1, L)[:, None])


def matrices(omega: float) -> ta.CausalDotProduct:
    """Return a causal layer whose two tokens have commuting covariances with different spectra.

    Every eigenvalue occurs twice, with opposite teachers. The teacher thus has no accidental overlap with the
    encodings, and the branches have exactly the symmetry of their names.
    """
    d, rng = 100, np.random.default_rng(0)
    spectra = np.tile(np.stack([0.5 * np.exp(-1.5 * np.arange(d) / d), rng.uniform(0.1, 0.4, d)]), 2)
    encodings = np.stack([np.ones(2 * d), -np.ones(2 * d)]) / (2 * d) ** 0.5
    covariances = np.stack([np.diag(spectrum) for spectrum in spectra])
    teacher = np.kron([[1.0], [-1.0]], rng.standard_normal((d, 1)))
    law = ta.SpectralLaw.from_matrices(covariances, encodings, teacher)
    return ta.CausalDotProduct(omega, spectrum=law)


def cases() -> list[tuple[str, ta.Model, str, float]]:
    """Return name, model, branch and alpha of every case."""
    untied = partial(ta.UntiedDotProduct, mixing=[[0.3, 0.7], [0.8, 0.2]], teacher=np.eye(2))
    tied = partial(ta.UntiedDotProduct, tied_teacher=True)
    sampled = {"lam": 0.3, "teacher": 4.0}
    return [
        ("causal", ta.CausalDotProduct(), "semantic", 2.0),
        ("causal", ta.CausalDotProduct(0.6), "positional", 4.0),
        ("linear", ta.LinearAttention(), "semantic", 2.0),
        ("linear", ta.LinearAttention(0.6), "positional", 4.0),
        ("untied", untied(0.1), "semantic", 5.0),
        ("untied", untied(0.6), "positional", 4.0),
        ("untied, tied target", tied(0.1), "semantic", 4.0),
        ("untied, tied target", tied(0.6), "positional", 4.0),
        ("ReLU", ta.ReLUAttention(), "semantic", 20.0),
        ("ReLU", ta.ReLUAttention(), "semantic", 5.0),
        ("rank 2", ta.DotProduct(0.1, rank=2, teacher=np.eye(2)), "semantic", 4.0),
        ("rank 2", ta.DotProduct(0.1, rank=2, teacher=np.eye(2)), "semantic", 6.0),
        ("3 tokens", tokens(3, 0.3), "semantic", 3.0),
        ("3 tokens", tokens(3, 0.6), "positional", 4.0),
        ("3 tokens", tokens(3, 0.3), "semantic", 5.0),
        ("4 tokens", tokens(4, 0.3), "semantic", 3.0),
        ("4 tokens", tokens(4, 0.6), "positional", 4.0),
        ("4 tokens", tokens(4, 0.3), "semantic", 5.0),
        ("given matrices, causal", matrices(0.3), "semantic", 3.0),
        ("given matrices, causal", matrices(0.6), "positional", 4.0),
        ("noisy fields", Noisy(), "semantic", 3.0),
        ("noisy fields", Noisy(0.6), "positional", 4.0),
        ("sampled tokens", Sampled.of(0.1, **sampled), "semantic", 10.0),
        ("sampled tokens", Sampled.of(0.6, **sampled), "positional", 10.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=50)
    parser.add_argument("--d", type=int, default=800)
    parser.add_argument("--case", default="", help="those whose name contains it")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("| layer, state | in this branch | " + " | ".join([*COLUMNS, "overlap"]) + " |", "|---" * 6 + "|", sep="\n")
    for name, model, branch, alpha in (case for case in cases() if args.case in case[0]):
        run = partial(train, model, branch)
        keys = jax.random.split(jax.random.key(0), args.instances)
        result = ta.run_instances(model, args.d, alpha, run, keys, normalise=True)
        gaps = result.difference(branch)
        cells = []
        for quantity in (*COLUMNS.values(), "m" if branch == "positional" else "theta"):
            mean, theory, gap, bar = gaps[quantity]
            theory_bar = float(np.mean(result.stderr(f"theory.{quantity}")[result.values("branch") == branch]))
            simulation_bar = max(bar**2 - theory_bar**2, 0.0) ** 0.5
            cells.append(f"{with_error(theory, theory_bar)}; {with_error(mean, simulation_bar)} ({gap / bar:+.1f})")
        state = f"{name}, $\\omega = {float(model.omega):g}$, {branch}, $\\alpha = {alpha:g}$"
        print("|", " | ".join([state, f"{result.groups.get(branch, 0)} of {args.instances}", *cells]), "|", flush=True)
        print(
            f"{name}: {result.groups}, largest gradient {np.nanmax(result.values('gradient_norm')):.1e}",
            file=sys.stderr,
        )


def train(model: ta.Model, branch: str, data: ta.Data, key: PRNGKeyArray) -> ta.results.Training:
    """Train to a critical point of the risk."""
    return ta.train(model, data, branch, optimizer="lbfgs", steps=3000, tol=1e-8, key=key)


if __name__ == "__main__":
    main()
