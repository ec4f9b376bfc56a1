"""Solve the theory of the dot-product model by the published method, as a comparator for this library.

The method is damped state evolution for L = 2 tokens, rank one and isotropic covariances:

- averages over the fields by the rule of Stroud and Secrest (1963) for the weight exp(-r^2) on the plane, degree 7 with
  12 nodes, once for xi and, nested in it, once for u: 144 fixed nodes;
- one proximal problem per node, solved by `scipy.optimize.minimize` (BFGS, finite differences for gradients) from h;
- conjugates from their Stein forms;
- damping .8, which is the share of the *old* state. The converse (.8 of the new state) diverges on the positional
  branch at alpha = 2, where the undamped map has an eigenvalue of -5.4 on these nodes. On the semantic branch the
  converse passes the stop test after 12 iterations, but only because the instability towards m (-2.7) has no time to
  grow;
- a stop test on the undamped change of q, m and theta, which must be below 1e-4. V is not tested and still changes by
  1e-2 then.

With these choices the published points at alpha = 2 are reproduced to a relative accuracy of 3e-4. Two variants have
equal results. By default every integral solves its proximal problems anew with numpy arrays in the objective, thus each
problem four times per iteration, like the published runs. `economical` solves each problem once, with scalar arithmetic
in the objective.

As a script it prints one JSON object: order parameters, time and accuracy of this method and, if `tiedattn_jax` can be
imported, of the library on the same problem; the machine and the versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import OptimizeResult, minimize

Objective = Callable[[Float[np.ndarray, "2"]], float]


class Overlaps(NamedTuple):
    """Order parameters of one token, or their conjugates: both tokens share q, V and theta, and have means m and -m."""

    q: float
    m: float
    V: float
    theta: float


class Problem(NamedTuple):
    """Numbers of the model, and alpha."""

    alpha: float
    omega: float
    sigma: float
    lam: float
    mixing: Float[np.ndarray, "2 2"]  # rows summing to one


class Result(NamedTuple):
    """Result of a run of the iteration."""

    overlaps: Overlaps
    iterations: int
    seconds: float
    change: Overlaps  # undamped change in the last iteration
    converged: bool


def problem(alpha: float, omega: float = 0.3, sigma: float = 0.5, lam: float = 0.01) -> Problem:
    """Return a problem; the defaults are the paper's setting."""
    return Problem(alpha, omega, sigma, lam, np.array([[0.6, 0.4], [0.4, 0.6]]))


DAMPING = 0.8  # share of the old state
STARTS = {
    "semantic": Overlaps(q=0.9, m=0.0, V=14.6, theta=0.35),
    "positional": Overlaps(q=0.02, m=0.2, V=14.6, theta=0.0),
}


def stroud_secrest_7() -> tuple[Float[np.ndarray, "12 2"], Float[np.ndarray, "12"]]:
    """Return the rule of degree 7 with 12 nodes for averages with density exp(-|x|^2) / pi on the plane.

    The nodes are three squares of four, one on the axes and two on the diagonals. All odd moments vanish by symmetry.
    The moments of 1, x^2, x^4, x^2 y^2, x^6 and x^4 y^2 fix the three radii and the three weights.

    Returns:
        Nodes (12, 2) and weights (12,), which sum to one.
    """
    on_axes = [(1, 0), (-1, 0), (0, 1), (0, -1)]
    on_diagonals = list(itertools.product((1, -1), repeat=2))
    root = math.sqrt(5)
    squares = (
        (on_axes, math.sqrt(3), 1 / 36),
        (on_diagonals, math.sqrt((9 - 3 * root) / 8), (5 + 2 * root) / 45),
        (on_diagonals, math.sqrt((9 + 3 * root) / 8), (5 - 2 * root) / 45),
    )
    nodes = np.concatenate([scale * np.array(corners) for corners, scale, _ in squares])
    weights = np.repeat([weight for *_, weight in squares], 4)
    assert exact_degree(nodes, weights) == 7
    return nodes, weights


def exact_degree(nodes: Float[np.ndarray, "n 2"], weights: Float[np.ndarray, " n"]) -> int:
    """Return the largest degree up to which all monomials are averaged exactly under exp(-|x|^2) / pi."""

    def moment(k: int) -> float:  # E x^k for x ~ N(0, 1/2)
        return 0.0 if k % 2 else math.prod(range(1, k, 2)) / 2 ** (k // 2)

    for degree in itertools.count():
        for k in range(degree + 1):
            value = weights @ (nodes[:, 0] ** k * nodes[:, 1] ** (degree - k))
            if abs(value - moment(k) * moment(degree - k)) > 1e-12:
                return degree - 1


def attention(z: Float[np.ndarray, "2"]) -> Float[np.ndarray, "2 2"]:
    """Return the row-wise softmax(z z^T) of two tokens."""
    scores = np.outer(z, z)
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def target(y: Float[np.ndarray, "2"], p: Problem) -> Float[np.ndarray, "2 2"]:
    """Return the attention matrix of the teacher."""
    return (1 - p.omega) * attention(y) + p.omega * p.mixing


def matrix_objective(h: Float[np.ndarray, "2"], y: Float[np.ndarray, "2"], V: float, p: Problem) -> Objective:
    """Return |z - h|^2 / (2 V) + sigma^2 / 2 |S(z) - T(y)|_F^2 as a function of z, written with matrices."""
    T = target(y, p)

    def objective(z: Float[np.ndarray, "2"]) -> float:
        return np.sum((z - h) ** 2) / (2 * V) + p.sigma**2 / 2 * np.sum((attention(z) - T) ** 2)

    return objective


def scalar_objective(h: Float[np.ndarray, "2"], y: Float[np.ndarray, "2"], V: float, p: Problem) -> Objective:
    """Return the function of `matrix_objective` in scalar arithmetic, simplified because rows of S and T sum to one."""
    t1, t2 = map(float, np.diag(target(y, p)))
    h1, h2 = map(float, h)
    variance = p.sigma**2

    def objective(z: Float[np.ndarray, "2"]) -> float:
        z1, z2 = float(z[0]), float(z[1])
        s1 = 0.5 + 0.5 * math.tanh(z1 * (z1 - z2) / 2)
        s2 = 0.5 + 0.5 * math.tanh(z2 * (z2 - z1) / 2)
        return ((z1 - h1) ** 2 + (z2 - h2) ** 2) / (2 * V) + variance * ((s1 - t1) ** 2 + (s2 - t2) ** 2)

    return objective


def gaussian_average(integrand: Callable[[Float[np.ndarray, "2"], Float[np.ndarray, "2"]], Any]) -> Any:
    """Return the average of integrand(xi, u) over standard normal xi and u in the plane, by the nested rule."""
    nodes, weights = stroud_secrest_7()
    nodes = math.sqrt(2) * nodes  # from density exp(-r^2) / pi to exp(-r^2 / 2) / (2 pi)
    pairs = itertools.product(zip(nodes, weights, strict=True), repeat=2)
    return sum(w_xi * w_u * integrand(xi, u) for (xi, w_xi), (u, w_u) in pairs)


def proximal(
    x: Overlaps,
    p: Problem,
    build: Callable[..., Objective],
    xi: Float[np.ndarray, "2"],
    u: Float[np.ndarray, "2"],
) -> tuple[Float[np.ndarray, "2"], OptimizeResult]:
    """Return the student's fields h at a node, and the minimum of the proximal problem there.

    notation: h = sqrt(q) xi + m (1, -1), y = theta / sqrt(q) xi + c u, c^2 = rho - theta^2 / q.

    Args:
        build: `matrix_objective` or `scalar_objective`.
    """
    h = math.sqrt(x.q) * xi + x.m * np.array([1.0, -1.0])
    y = x.theta / math.sqrt(x.q) * xi + math.sqrt(p.sigma**2 - x.theta**2 / x.q) * u
    return h, minimize(build(h, y, x.V, p), h, method="BFGS")


def conjugates(x: Overlaps, p: Problem, economical: bool = False) -> Overlaps:
    """Return the conjugates of the overlaps by their Stein forms."""

    def moments(xi: Float[np.ndarray, "2"], u: Float[np.ndarray, "2"]) -> Float[np.ndarray, "4"]:
        h, minimum = proximal(x, p, scalar_objective if economical else matrix_objective, xi, u)
        g = (minimum.x - h) / x.V
        return np.array([g @ g, g[0] - g[1], g @ xi, g @ u])

    if economical:
        averages = gaussian_average(moments)
    else:
        averages = [gaussian_average(lambda xi, u, k=k: moments(xi, u)[k]) for k in range(4)]
    return stein(x, p, *map(float, averages))


def stein(x: Overlaps, p: Problem, gg: float, gp: float, gxi: float, gu: float) -> Overlaps:
    """Return the conjugates from the averages of g.g, g_1 - g_2, g.xi and g.u."""
    theta = p.alpha * gu / math.sqrt(p.sigma**2 - x.theta**2 / x.q)
    return Overlaps(
        q=p.alpha * gg, m=p.alpha * gp, V=-p.alpha * gxi / math.sqrt(x.q) + x.theta * theta / x.q, theta=theta
    )


def train_loss(x: Overlaps, p: Problem) -> float:
    """Return the training loss / d, which is minus the free energy, on the same nodes."""
    hats = conjugates(x, p, economical=True)
    envelope = gaussian_average(lambda xi, u: proximal(x, p, scalar_objective, xi, u)[1].fun)
    s2 = rho = p.sigma**2
    prior = 0.5 * (s2 * hats.q + hats.m**2 + s2 * rho * hats.theta**2) / (p.lam + s2 * hats.V)
    pairing = 0.5 * (hats.V * x.q - hats.q * x.V) - hats.m * x.m - hats.theta * x.theta
    return p.alpha * float(envelope) - pairing - prior


def critical_alpha(
    omega: float, guess: float, loss: Callable[[Overlaps, Problem], float] = train_loss, tol: float = 1e-3
) -> float:
    """Find where the training losses of the two branches cross, by the secant method from a guess.

    Args:
        loss: function that averages the training loss at the method's overlaps; the published curves use more nodes.
    """
    starts: dict[str, Overlaps] = dict(STARTS)

    def difference(alpha: float) -> float:
        losses = {}
        for branch, start in starts.items():
            run = solve(alpha, omega, branch=branch, start=start, economical=True)
            starts[branch] = run.overlaps
            losses[branch] = loss(run.overlaps, problem(alpha, omega))
        return losses["positional"] - losses["semantic"]

    a, b = 0.98 * guess, guess
    f, g = difference(a), difference(b)
    while abs(b - a) > tol * b:
        a, b, f = b, b - g * (b - a) / (g - f), g
        g = difference(b)
    return b


def overlaps(hats: Overlaps, p: Problem) -> Overlaps:
    """Return the overlaps of the ridge estimator in the effective problem that the conjugates describe."""
    s2 = rho = p.sigma**2
    stiffness = p.lam + s2 * hats.V
    return Overlaps(
        q=s2 * (s2 * hats.q + hats.m**2 + s2 * rho * hats.theta**2) / stiffness**2,
        m=hats.m / stiffness,
        V=s2 / stiffness,
        theta=s2 * rho * hats.theta / stiffness,
    )


def solve(
    alpha: float,
    omega: float = 0.3,
    sigma: float = 0.5,
    lam: float = 0.01,
    branch: str = "semantic",
    *,
    start: Overlaps | None = None,
    tol: float = 1e-4,
    max_steps: int = 500,
    economical: bool = False,
    hats: Callable[[Overlaps, Problem], Overlaps] | None = None,
) -> Result:
    """Find the fixed point of state evolution on a branch by the published method.

    Args:
        alpha: samples per dimension.
        omega, sigma, lam: numbers of the model.
        branch: "semantic" or "positional"; chooses the start.
        start: overlaps to start from instead.
        tol: undamped change of q, m and theta below which the iteration stops.
        max_steps: maximum number of iterations.
        economical: whether to solve each proximal problem once per iteration, with the cheaper objective.
        hats: function from overlaps to conjugates; by default `conjugates`.
    """
    hats = hats or partial(conjugates, economical=economical)
    p = problem(alpha, omega, sigma, lam)
    x = STARTS[branch] if start is None else start
    start_time = time.perf_counter()
    change = Overlaps(*[math.inf] * 4)
    iterations, converged = 0, False
    while not converged and iterations < max_steps:
        image = overlaps(hats(x, p), p)
        change = Overlaps(*(abs(a - b) for a, b in zip(image, x, strict=True)))
        x = Overlaps(*(DAMPING * previous + (1 - DAMPING) * value for previous, value in zip(x, image, strict=True)))
        converged = max(change.q, change.m, change.theta) < tol
        iterations += 1
    return Result(x, iterations, time.perf_counter() - start_time, change, converged)


def library_solve(alpha: float, omega: float, sigma: float, lam: float, branch: str) -> dict[str, Any] | None:
    """Solve for the same fixed point with the library: values, error bars, time of the first and of a warm call."""
    try:
        import jax

        import tiedattn_jax as ta
    except ImportError as error:
        print(f"library left out: {error}", file=sys.stderr)
        return None
    jax.config.update("jax_enable_x64", True)
    model = ta.DotProduct(omega=omega, sigma=sigma, lam=lam)

    def timed() -> tuple[Any, float]:
        start_time = time.perf_counter()
        fp = ta.solve(model, alpha=alpha, branch=branch)
        jax.block_until_ready(fp.overlaps)
        return fp, time.perf_counter() - start_time

    _, first = timed()
    fp, warm = timed()

    def token(x: Any) -> dict[str, float]:
        return Overlaps(float(x.q[0, 0, 0]), float(x.m[0, 0]), float(x.V[0, 0, 0]), float(x.theta[0, 0, 0]))._asdict()

    return {
        "overlaps": token(fp.overlaps),
        "stderr": token(fp.stderr.overlaps),
        "status": int(fp.status),
        "seconds_first_call": first,
        "seconds": warm,
    }


def machine() -> dict[str, Any]:
    """Return what the times depend on: CPU, cores, system and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions = {"python": platform.python_version()}
    for package in ("numpy", "scipy", "jax", "jaxlib", "tiedattn_jax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "versions": versions,
    }


def main() -> None:
    """Run both methods and print their results."""
    parser = argparse.ArgumentParser(description="The published method against the library.")
    numbers = {"alpha": 2.0, "omega": 0.3, "sigma": 0.5, "lam": 0.01}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--branch", choices=STARTS, action="append", help="default: both")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--economical", action="store_true", help="each proximal problem once, scalar objective")
    args = parser.parse_args()
    setting = {name: getattr(args, name) for name in numbers}
    branches = {}
    for branch in args.branch or STARTS:
        library = library_solve(**setting, branch=branch)  # first, so that a missing library is reported at once
        published = solve(**setting, branch=branch, max_steps=args.max_steps, economical=args.economical)
        row: dict[str, Any] = {
            "published_method": published._asdict()
            | {"overlaps": published.overlaps._asdict(), "change": published.change._asdict()},
            "library": library,
        }
        if library is not None:
            row["published_method_minus_library_relative"] = {
                name: getattr(published.overlaps, name) / value - 1
                for name, value in library["overlaps"].items()
                if value != 0
            }
            row["seconds_ratio"] = published.seconds / library["seconds"]
        branches[branch] = row
    report = {**setting, "economical": args.economical, "branches": branches, "machine": machine()}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
