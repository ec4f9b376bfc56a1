"""Compare the lowest of many positional minima of an instance with the theory.

    python -m benchmarks.minima [--d 250 500 1000] [--instances 8] [--alpha 2] [--rounds 4] [--lanes 50]

L-BFGS runs from the positional start (*training*), then from many starts at once. Starts of the first round have the
state's mean part along the encodings and a random rest of one to two times the state's size. Starts of later rounds are
the lowest minimum so far, moved by .03 to .8 of its own size. Only runs that end on the positional branch count.
Teachers have exactly the model's norm.

Prints one line per instance: the lowest minimum and that of training relative to the replica-symmetric (RS) state in
percent, the number of runs that end at the lowest minimum, and how far above it the next one lies. A table of the means
follows. An instance takes half a minute at d = 250 and two minutes at 500 on two cores, and a quarter of an hour at
1000 on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Replicate
from tiedattn_jax.base.report import with_error
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.finite.sampling import start
from tiedattn_jax.theory.observables import gen_error_in

SIZES = 1.0, 2.0  # range of the random rest of a start, relative to that of the state
KICKS = 0.03, 0.8  # range of the kicks of the lowest minimum, relative to its own size
SAME_LOSS = 1e-6  # relative difference in loss below which two runs ended in the same minimum
BOUNDS = 0.8, 0.3  # on the positional branch, m exceeds .8 of the state's m and theta is below .3 of its q^(1/2)


class Minima(NamedTuple):
    """Minima at which the runs of one instance ended; the leading axis is the run."""

    Q: Float[Array, "*k d 1"]
    loss: Float[Array, "*k"]
    q: Float[Array, "*k"]
    m: Float[Array, "*k"]
    on_branch: Bool[Array, "*k"]

    def select(self, k: int | Int[Array, ""]) -> Minima:
        return Minima(*(a[k] for a in self))


@eqx.filter_jit
def trained(model: ta.Model, data: ta.Data, starts: Float[Array, "k d 1"], state: ta.Overlaps) -> Minima:
    """Run L-BFGS from every start on one instance."""
    run = jax.vmap(lambda Q: ta.train(model, data, Q, optimizer="lbfgs", steps=3000, tol=1e-8))(starts)
    x = run.overlaps
    q, m, theta = x.q[:, 0, 0, 0], jnp.abs(x.m[:, 0, 0]), jnp.abs(x.theta[:, 0, 0, 0])
    close = (m > BOUNDS[0] * jnp.abs(state.m[0, 0])) & (theta < BOUNDS[1] * jnp.sqrt(state.q[0, 0, 0] / model.trace[0]))
    return Minima(run.Q, run.train_loss, q, m, run.ok & close)


def search(
    model: ta.Model, data: ta.Data, state: ta.Overlaps, rounds: int, lanes: int, key: PRNGKeyArray
) -> list[Minima]:
    """Return the minima of every round on one instance; the first entry is that of training alone."""
    mean, direction = jnp.abs(state.m[0, 0]), start(model, data, "positional", scale=1.0)
    spread = jnp.sqrt(state.q[0, 0, 0] / model.trace[0] - mean**2)
    minima = [trained(model, data, start(model, data, "positional")[None], state)]
    for k in range(rounds):
        noise = jax.random.normal(jax.random.fold_in(key, k), (lanes, *direction.shape))
        if k == 0:
            starts = mean * direction + spread * jnp.linspace(*SIZES, lanes)[:, None, None] * noise
        else:
            best = lowest(minima).Q
            size = jnp.linalg.norm(best) / jnp.sqrt(best.size)
            starts = best + size * jnp.geomspace(*KICKS, lanes)[:, None, None] * noise
        minima.append(trained(model, data, starts, state))
    return minima


def lowest(minima: list[Minima]) -> Minima:
    """Return the minimum of lowest loss on the branch."""
    joined = Minima(*(jnp.concatenate(a) for a in zip(*minima, strict=True)))
    if not np.any(joined.on_branch):
        raise RuntimeError("no run ended on the positional branch: give more --lanes, or a larger --d")
    return joined.select(jnp.argmin(jnp.where(joined.on_branch, joined.loss, jnp.inf)))


def row(rs: ta.results.FixedPoint, lines: Replicate, minima: list[Minima]) -> dict[str, Any]:
    """Return the numbers of one instance, relative to the RS state."""
    best, first = lowest(minima), minima[0].select(0)

    def relative(minimum: Minima) -> dict[str, float]:
        scaled = minimum.q * jnp.ones_like(rs.overlaps.q), minimum.m * jnp.sign(rs.overlaps.m)
        x = eqx.tree_at(lambda x: (x.q, x.m), rs.overlaps, scaled)
        test = gen_error_in(rs.model, x, lines) / gen_error_in(rs.model, rs.overlaps, lines)
        parts = {"loss": minimum.loss / rs.train_loss, "q": minimum.q / rs.overlaps.q[0, 0, 0], "eps_g": test}
        return {name: 100 * (float(value) - 1) for name, value in parts.items()}

    losses = np.concatenate([np.asarray(r.loss[r.on_branch]) for r in minima[1:]])
    last = minima[-1]
    excess = np.sort(losses / float(best.loss) - 1)
    higher = excess[excess > SAME_LOSS]
    return {
        "training": relative(first) if bool(first.on_branch) else None,
        "lowest": relative(best),
        "lowest after one round": relative(lowest(minima[:2])),
        "runs on the branch": len(losses),
        "runs at the lowest, last round": int(jnp.sum(last.on_branch & (last.loss < (1 + SAME_LOSS) * best.loss))),
        "distinct minima": 1 + int(np.sum(np.diff(excess) > SAME_LOSS)),
        "next above the lowest, relative": float(higher[0]) if len(higher) else None,
    }


def table(rows: dict[int, list[dict]]) -> str:
    """Return a table of means over the instances whose training ends on the branch, three rows per dimension."""
    lines = ["| d (instances) | quantity | training, % from RS | lowest | lowest - training |", "|---|---|---|---|---|"]
    for d, results in rows.items():
        usable = [r for r in results if r["training"] is not None]
        for name in ("loss", "q", "eps_g"):
            columns = {case: np.array([r[case][name] for r in usable]) for case in ("training", "lowest")}
            values = (columns["training"], columns["lowest"], columns["lowest"] - columns["training"])
            cells = (with_error(np.mean(v), error_bar(v)) for v in values)
            lines.append(" | ".join((f"| {d} ({len(usable)})", name, *cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, nargs="+", default=[250, 500, 1000])
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=50, help="starts of a round")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers of every instance")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    model = ta.DotProduct()
    rule = ta.Lines(7).rule(model)
    rs = ta.solve(model, args.alpha, "positional", rule)
    print(rs, flush=True)
    if not rs.exists:
        parser.error(
            f"argument --alpha: there must be a positional state, got --alpha {args.alpha:g}: {rs.status_name}"
        )
    rows: dict[int, list[dict]] = {}
    for d in args.d:
        rows[d] = []
        for k in range(args.instances):
            key = jax.random.key(k)
            data = ta.sample_data(model, d, args.alpha, key, normalise=True)
            minima = search(model, data, rs.overlaps, args.rounds, args.lanes, jax.random.fold_in(key, 1))
            rows[d].append(row(rs, rule.replicate(0), minima))
            print(f"d = {d}, instance {k}: {json.dumps(rows[d][-1])}", flush=True)
            if args.out:
                args.out.write_text(json.dumps({str(d): r for d, r in rows.items()}, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
