"""Check finite instances: against the theory at their realised teacher, where runs end, undamped message passing.

    python benchmarks/finite_size.py theory    [--d 2000] [--alpha 2.0] [--instances 20] [--branch semantic]
    python benchmarks/finite_size.py ends      [--d 1000] [--alpha 1.0] [--instances 20] [--start random] [--scale 1]
    python benchmarks/finite_size.py undamped  [--d 1000]

Each prints JSON. `theory` gives, for every observable, the mean over instances and the mean of the theory at their
realised rho. `ends` names the state at which each run ended and tests whether it is a minimum: it computes the lowest
eigenvalue of the risk's Hessian, and where L-BFGS goes from there after random kicks. `undamped` starts undamped
message passing next to its fixed point and compares its growth with the eigenvalues of the state-evolution Jacobian and
the replicon.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.sparse.linalg import LinearOperator, eigsh

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES, PAIR, Coordinates
from tiedattn_jax.theory.equations import Equations


def theory(d: int, alpha: float, instances: int, branch: str, order: int, response: str) -> dict[str, Any]:
    """Compare message passing on instances with the theory at the realised norm of each teacher."""
    model = ta.DotProduct()
    result = ta.run_instances(
        model,
        d,
        alpha,
        lambda data, key: ta.gamp(model, data, branch, tol=1e-10, steps=400, response=response),
        jax.random.split(jax.random.key(1000), instances),
        nodes=ta.Lines(order).rule(model),
        sentences=400_000,
        progress=lambda done, total: print(f"{done} of {total}", file=sys.stderr),
    )
    print(result.summary(), file=sys.stderr)
    names = ("simulation", "theory", "difference", "stderr")
    return {
        "d": d,
        "alpha": alpha,
        "start": branch,
        "response": response,
        "finished_by_lbfgs": int(result.values("finished").sum()),
        "iterations": [cell.iterations for cell in result.cells],
        "largest_gradient": float(np.nanmax(result.values("gradient_norm"))),
        **{
            end: {"instances": count}
            | {name: dict(zip(names, row, strict=True)) for name, row in result.difference(end).items()}
            for end, count in result.groups.items()
        },
    }


KICKS = (1e-3, 1e-2, 1e-1, 5e-1)  # sizes of the random kicks, relative to the weights


def lowest_curvature(model: ta.Model, data: ta.Data, Q: Float[Array, "d r"]) -> float:
    """Return the lowest eigenvalue of the risk's Hessian, by the Lanczos method on Hessian-vector products."""

    @jax.jit
    def product(v: Float[Array, " n"]) -> Float[Array, " n"]:
        gradient = jax.grad(lambda Q: ta.finite.risk(model, data, Q))
        return jax.jvp(gradient, (Q,), (v.reshape(Q.shape),))[1].ravel()

    hessian = LinearOperator((Q.size, Q.size), matvec=lambda v: np.asarray(product(jnp.asarray(v))), dtype=float)
    return float(eigsh(hessian, k=1, which="SA", tol=1e-4, return_eigenvectors=False)[0])


def ends(d: int, alpha: float, instances: int, start: str, method: str, scale: float | None) -> dict[str, Any]:
    """Find where each run ends, whether that is a minimum, and whether other minima are near."""
    model, rows = ta.DotProduct(), []

    def lbfgs(data: ta.Data, Q: str | Float[Array, "d r"], **options: Any) -> ta.results.Training:
        return ta.train(model, data, Q, optimizer="lbfgs", steps=3000, **options)

    def run(data: ta.Data, key: PRNGKeyArray) -> ta.results.GAMP | ta.results.Training:
        options: dict[str, Any] = {"key": key, "scale": scale}
        first = ta.gamp(model, data, start, tol=1e-10, **options) if method == "gamp" else lbfgs(data, start, **options)
        end = first if first.ok else lbfgs(data, first.Q)
        size = jnp.linalg.norm(end.Q)
        kicked = {}
        for k, kick in enumerate((0.0, *KICKS)):
            direction = jax.random.normal(jax.random.fold_in(key, k), end.Q.shape)
            rerun = lbfgs(data, end.Q + kick * size * direction / jnp.linalg.norm(direction))
            distance = float(jnp.linalg.norm(rerun.Q - end.Q) / size)
            kicked[kick] = {"moved": distance, "loss": float(rerun.train_loss - end.train_loss)}
        row = {
            "status": first.status_name,
            "iterations": int(first.iterations),
            "residual": float(first.residual) if method == "gamp" else None,
            "lowest_curvature": lowest_curvature(model, data, end.Q),
            "kicked": kicked,
        }
        rows.append(row | {f"above_{b}": float(end.train_loss - lbfgs(data, b).train_loss) for b in PAIR})
        return end

    keys = jax.random.split(jax.random.key(1000), instances)
    nodes = ta.Lines(5).rule(model)
    progress = {"progress": lambda done, total: print(f"{done} of {total}", file=sys.stderr)}
    result = ta.run_instances(model, d, alpha, run, keys, nodes=nodes, normalise=True, **progress)
    print(result.summary(), file=sys.stderr)
    names = ("branch", "distance", "train_loss", "gen_error", "q", "V", "theta", "m", "gradient_norm")
    for row, instance in zip(rows, (cell.to_dict() for cell in result.cells), strict=True):
        row.update({name: instance[name] for name in names if name in instance})
    return {"d": d, "alpha": alpha, "start": start, "method": method, "scale": scale, "ends": rows}


def undamped(d: int) -> list[dict[str, Any]]:
    """Measure the growth per step of rounding errors at GAMP's fixed point, next to the stability in the theory."""
    rows = []
    for alpha in (0.9, 1.2, 2.0, 3.0):
        for branch in ("semantic", "positional"):
            model = ta.DotProduct()
            data = ta.sample_data(model, d, alpha, jax.random.key(0), normalise=True)
            fixed_point = ta.gamp(model, data, branch)
            run = ta.gamp(model, data, fixed_point, damping=1.0, steps=400, tol=1e-30)
            residuals = np.asarray(run.residuals)[: int(run.iterations)]
            first = residuals[: np.argmax(residuals > 1e-4)]  # empty where they never grow
            indices = np.flatnonzero(first > 1e-9)
            growth = np.polyfit(indices, np.log(residuals[indices]), 1)[0] if len(indices) > 2 else np.nan
            nodes = ta.Lines(9, replicates=1, even=True).rule(model)
            fp = ta.solve(model, alpha, branch, nodes)
            replicate, free = nodes.replicate(0), BRANCHES[None].free(model)
            v = Coordinates(model, free).pack(fp.overlaps)
            jacobian = jax.jit(Equations.answer)(Equations(model, jnp.asarray(alpha), replicate, free), v).jacobian
            eigenvalues = np.linalg.eigvals(np.asarray(jacobian))
            rows.append(
                {
                    "alpha": alpha,
                    "branch": branch,
                    "fixed_point_found": bool(fixed_point.ok),
                    "undamped_status": int(run.status),
                    "undamped_iterations": int(run.iterations),
                    "largest_residual": float(residuals.max()),
                    "growth_per_step": float(np.exp(growth)),
                    "jacobian_eigenvalues": sorted({round(float(e.real), 3) for e in eigenvalues}),
                    "replicon": float(fp.diagnostics.replicon),
                    "jump_mass": float(fp.diagnostics.jump_mass),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("theory", "ends", "undamped"))
    parser.add_argument("--d", type=int)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--branch", choices=("semantic", "positional"), default="semantic")
    parser.add_argument("--response", choices=("regression", "derivative"), default="regression")
    parser.add_argument("--start", choices=("semantic", "positional", "random"), default="random")
    parser.add_argument("--method", choices=("lbfgs", "gamp"), default="lbfgs")
    parser.add_argument("--scale", type=float, help="of the start")
    parser.add_argument("--order", type=int, default=7, help="of the lines of the theory")
    a = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if a.what == "theory":
        result: Any = theory(a.d or 2000, a.alpha or 2.0, a.instances, a.branch, a.order, a.response)
    elif a.what == "ends":
        result = ends(a.d or 1000, a.alpha or 1.0, a.instances, a.start, a.method, a.scale)
    else:
        result = undamped(a.d or 1000)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
