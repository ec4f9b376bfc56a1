"""Finite size: speed of training and message passing, and instances against the theory at their realised teacher.

    python benchmarks/finite_size.py speed     [--d 1000]
    python benchmarks/finite_size.py theory    [--d 2000] [--alpha 2.0] [--instances 20] [--branch semantic]
    python benchmarks/finite_size.py undamped  [--d 1000]

Each prints one JSON object. `speed` gives best times after compilation, next to those of the bare products with X.
`theory` gives, for every observable, the mean over instances next to that of the theory at their realised rho.
`undamped` compares the growth of undamped message passing, started
next to its fixed point, with the eigenvalues of the state-evolution Jacobian and the replicon.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiedattn_jax as ta
from tiedattn_jax.finite.data import back_project, student_fields
from tiedattn_jax.overlaps import BRANCHES, Coordinates
from tiedattn_jax.theory.state_evolution import image_and_jacobian


def best_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """Best time of a call in milliseconds, after a first one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def speed(d: int) -> dict[str, Any]:
    """One gradient step in float32 at alpha = 1.5; message passing in float64 at alpha = 2."""
    out: dict[str, Any] = {"d": d, "device": jax.devices()[0].device_kind, "machine": platform.processor()}
    small = ta.dot_product(dtype=jnp.float32)
    data = ta.sample_data(small, d, 1.5, jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda Q: ta.risk(small, data, Q)))
    out["gradient_float32_ms"] = best_ms(lambda: gradient(data.teacher))
    steps = 500
    descent = partial(ta.train, small, data, "gd", "semantic", steps=steps, tol=0.0)
    out["gradient_step_float32_ms"] = best_ms(lambda: descent().Q, 3) / steps
    for dtype in (jnp.float64, jnp.float32):
        model = ta.dot_product(dtype=dtype)
        data = ta.sample_data(model, d, 2.0, jax.random.key(3))
        forth, back = jax.jit(student_fields), jax.jit(back_project)
        g = forth(data.x, data.teacher)
        passes = [best_ms(lambda d=data, f=forth: f(d.x, d.teacher)), best_ms(lambda d=data, b=back, g=g: b(d.x, g))]
        entry: dict[str, Any] = {"two_passes_ms": sum(passes)}
        for init in ("semantic", "positional"):
            run = partial(ta.gamp, model, data, init)
            found = run()
            to_tolerance = best_ms(lambda r=run: r(tol=1e-7).Q, 3)
            loose = run(tol=1e-7)
            entry[init] = {
                "iterations": int(found.iterations),
                "gradient_norm": float(found.gradient_norm),
                "seconds": best_ms(lambda r=run: r().Q, 3) / 1e3,
                "seconds_to_residual_1e-7": to_tolerance / 1e3,
                "gradient_norm_there": float(loose.gradient_norm),
            }
            searches = best_ms(lambda r=run: r(tol=1e-30, steps=20).Q, 3) / 20
            whole, taken = entry[init]["seconds"] * 1e3, int(found.iterations)
            entry[init]["iteration_after_them_ms"] = (whole - 20 * searches) / (taken - 20)
        out[jnp.dtype(dtype).name] = entry
    return out


def theory(d: int, alpha: float, instances: int, branch: str, order: int, response: str) -> dict[str, Any]:
    """Instances of message passing against the theory, both at the realised norm of each teacher."""
    model = ta.dot_product()
    found = ta.run_instances(
        model,
        d,
        alpha,
        lambda data, key: ta.gamp(model, data, branch, tol=1e-10, steps=400, response=response),
        jax.random.split(jax.random.key(1000), instances),
        nodes=ta.line_nodes(model, order),
        sentences=400_000,
        progress=lambda done, total: print(f"{done} of {total}", file=sys.stderr),
    )
    print(found.summary(), file=sys.stderr)
    names = ("simulation", "theory", "difference", "stderr")
    return {
        "d": d,
        "alpha": alpha,
        "start": branch,
        "response": response,
        "finished_by_lbfgs": int(found.finished.sum()),
        "iterations": found.iterations.tolist(),
        "largest_gradient": float(found.gradient_norm.max()),
        **{
            end: {"instances": int((found.branch == end).sum())}
            | {name: dict(zip(names, row, strict=True)) for name, row in found.difference(end).items()}
            for end in np.unique(found.branch).tolist()
        },
    }


def undamped(d: int) -> list[dict[str, Any]]:
    """Growth per step of rounding errors at GAMP's fixed point, next to what theory says of the fixed point."""
    rows = []
    for alpha in (0.9, 1.2, 2.0, 3.0):
        for branch in ("semantic", "positional"):
            model = ta.dot_product()
            data = ta.sample_data(model, d, alpha, jax.random.key(0), normalise=True)
            fixed = ta.gamp(model, data, branch)
            run = ta.gamp(model, data, fixed, damping=1.0, steps=400, tol=1e-30)
            residuals = np.asarray(run.residuals)[: int(run.iterations)]
            first = residuals[: np.argmax(residuals > 1e-4)]  # empty where they never grow
            grown = np.flatnonzero(first > 1e-9)
            growth = np.polyfit(grown, np.log(residuals[grown]), 1)[0] if len(grown) > 2 else np.nan
            nodes = ta.line_nodes(model, 9, replicates=1, even=True)
            fp = ta.solve(model, alpha, branch, nodes)
            replicate, free = nodes.replicate(0), BRANCHES[None].free(model)
            v = Coordinates(model, free).pack(fp.overlaps)
            jacobian = image_and_jacobian(model, jnp.asarray(alpha), replicate, v, free)[1]
            eigenvalues = np.linalg.eigvals(np.asarray(jacobian))
            rows.append(
                {
                    "alpha": alpha,
                    "branch": branch,
                    "fixed_point_found": bool(fixed.ok),
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
    parser.add_argument("what", choices=("speed", "theory", "undamped"))
    parser.add_argument("--d", type=int)
    parser.add_argument("--alpha", type=float, default=2.0)
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--branch", choices=("semantic", "positional"), default="semantic")
    parser.add_argument("--response", choices=("regression", "derivative"), default="regression")
    parser.add_argument("--order", type=int, default=7, help="of the lines of the theory")
    a = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if a.what == "speed":
        result: Any = speed(a.d or 1000)
    elif a.what == "theory":
        result = theory(a.d or 2000, a.alpha, a.instances, a.branch, a.order, a.response)
    else:
        result = undamped(a.d or 1000)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
