"""Compute how much further steps of replica symmetry breaking add to the training loss.

    python benchmarks/further_steps.py [--steps 4] [--order 5]

The estimate of `theory/elevation.py` has one step; here it has k steps, after docs/theory/breaking.md. The script
prints three tables. The first two are to leading order:

1. the largest elevation for jumps of one slope and constant curvature, where its growth with k is universal;
2. the elevations of one and two steps at three states of the standard model;
3. the full solution with up to three steps for a loss by which every sample chooses a sign.

Takes five minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize, root
from scipy.special import log_ndtr

import tiedattn_jax as ta
from tiedattn_jax.theory.observables import moments, softened, two_values
from tiedattn_jax.theory.potentials import channel_gradient

POSITIONS, REACH = np.linspace(-14.0, 14.0, 1401), 9.0  # positions across a jump; largest normal deviate
NORMAL_NODES, NORMAL_WEIGHTS = np.polynomial.legendre.leggauss(80)
LEGENDRE_NODES, LEGENDRE_WEIGHTS = np.polynomial.legendre.leggauss(24)
BEST_S = 2.109  # s times the slope of a jump, in units of the spread, at which the elevation of one step is largest
STATES = ((1.2515, "positional"), (2.0, "positional"), (1.0, "semantic"))
SIGNS = (0.01, 1e-4, 1e-5)  # alphas of the third table


def absolute(spread: float) -> Float[np.ndarray, " x"]:
    """Return E|x + spread xi| at `POSITIONS`."""
    x = POSITIONS / spread
    return POSITIONS * (1 - 2 * np.exp(log_ndtr(-x))) + spread * np.sqrt(2 / np.pi) * np.exp(-0.5 * x**2)


def cost(s: Float[np.ndarray, " k"], widths: Float[np.ndarray, " k"]) -> float:
    """Return the average energy of a jump -|x|/2 with the steps, minus the replica-symmetric one at their response.

    Args:
        s: Parisi parameters from the innermost step to the outermost one, decreasing.
        widths: increment of the overlap at each step; they sum to one.
    """
    tilt, width = 0.5 * s[0], widths[0]
    sides = [
        side * tilt * POSITIONS + 0.5 * tilt**2 * width + log_ndtr((side * POSITIONS + tilt * width) / width**0.5)
        for side in (1, -1)
    ]
    energy = -np.logaddexp(*sides) / s[0]
    normals = REACH * NORMAL_NODES
    log_weight = np.log(REACH * NORMAL_WEIGHTS) - 0.5 * normals**2 - 0.5 * np.log(2 * np.pi)
    for parisi, width in zip(s[1:], widths[1:], strict=True):
        points = POSITIONS[:, None] + np.sqrt(width) * normals
        clipped = np.clip(points, POSITIONS[0], POSITIONS[-1])
        outer = CubicSpline(POSITIONS, energy)(clipped) - 0.5 * np.abs(points - clipped)  # continued by a straight line
        energy = -np.logaddexp.reduce(log_weight - parisi * outer, axis=1) / parisi
    excess = energy + 0.5 * absolute(widths.sum() ** 0.5) + 0.125 * (s @ widths)
    return float(np.sum(excess) * (POSITIONS[1] - POSITIONS[0]))


def curvature(
    s: Float[np.ndarray, " k"],
    widths: Float[np.ndarray, " k"],
    weight: Callable[[Float[np.ndarray, " v"]], Float[np.ndarray, " v"]],
) -> float:
    """Return ``1/2 int v(u) weight(v(u)) du``, where v(u) is the response of the steps outside of u."""
    total, v = 0.0, 0.0
    for parisi, width in zip(s[::-1], widths[::-1], strict=True):
        responses = v + parisi * width * 0.5 * (LEGENDRE_NODES + 1)
        total += 0.25 * width * (LEGENDRE_WEIGHTS @ (responses * weight(responses)))
        v += parisi * width
    return total


def steps_of(parameters: Float[np.ndarray, " 2*k-1"]) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Map 2 k - 1 free numbers to decreasing s and widths that sum to one.

    The numbers are log s_1, then k - 1 that set the ratios of s, then k - 1 logarithms of ratios of widths.
    """
    k = (len(parameters) + 1) // 2
    s = np.exp(parameters[0] - np.append(0.0, np.cumsum(np.exp(parameters[1:k]))))
    widths = np.exp(np.append(0.0, parameters[k:]))
    return s, widths / widths.sum()


def universal(steps: int) -> list[float]:
    """Return the largest elevations of 1, 2, ... steps in units of ``(alpha rho a^2)^3 a^2 / (X^{-2} - alpha k)^2``."""
    point, values = np.array([np.log(BEST_S)]), []
    for k in range(1, steps + 1):
        if k > 1:  # add a step inside the innermost one
            point = np.concatenate([[point[0] + 0.7], [-0.5], point[1 : k - 1], [1.4], point[k - 1 :] + 1.4])

        def objective(parameters: Float[np.ndarray, " parameters"]) -> float:
            s, widths = steps_of(parameters)
            return -3 * np.log(cost(s, widths)) + 2 * np.log(curvature(s, widths, np.ones_like))

        best = minimize(objective, point, method="Nelder-Mead", options={"maxfev": 2000, "xatol": 1e-4, "fatol": 1e-8})
        point = best.x
        values.append(4 / 27 * np.exp(-best.fun))
    return values


def at_a_state(alpha: float, branch: str, order: int) -> tuple[float, float, float]:
    """Return the elevations of one and two steps at a state of the standard model, and the state's own `rs_error`."""
    model = ta.DotProduct()
    rule = ta.Lines(order).rule(model)
    state = ta.solve(model, alpha, branch, rule)
    x = jax.tree.map(lambda a: a[0], state.replicates.overlaps)
    sums = eqx.filter_jit(channel_gradient)(model, x, rule.replicate(0), moments)[2]
    slopes, weights = map(np.asarray, two_values(sums["slopes"]))

    def weight(v: Float[np.ndarray, " v"]) -> Float[np.ndarray, " v"]:
        """Return the weight in `curvature`: that of the isotropic prior minus that of the smooth parts.

        The latter is an average of e^2 / (1 + v e), which `softened` returns at 3 v / 2.
        """
        return 1 / (1 - v) - alpha * np.asarray(softened(sums["soft"], 1.5 * v))

    def elevation(parameters: Float[np.ndarray, " parameters"]) -> float:
        size = np.exp(parameters[0])  # total q1 - q0 in units of V
        s, widths = steps_of(parameters[1:])  # s is in units of size^{-1/2}
        if s @ widths * size**0.5 > 0.8:
            return -1.0
        jumps = sum(w / a * size * cost(a * s, widths) for a, w in zip(slopes, weights, strict=True))
        return alpha * jumps - curvature(s / size**0.5, size * widths, weight)

    mean = weights @ slopes / weights.sum()
    starts = [[np.log(d), np.log(BEST_S / mean)] for d in np.geomspace(1e-7, 1e-3, 30)]
    single = max(map(np.array, starts), key=elevation)
    elevations = []
    for start in (single, np.concatenate([single[:1], [single[1] + 0.8, 0.0, 1.4]])):
        minimum = minimize(lambda p: -1e7 * elevation(p), start, method="Nelder-Mead", options={"maxfev": 2000})
        elevations.append(-1e-7 * minimum.fun)
    return elevations[0], elevations[1], float(state.replicates.diagnostics.rs_error[0])


def signs_loss(
    alpha: float, q0: Float[Array, ""], widths: Float[Array, " k"], s: Float[Array, " k"], V: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the training loss of (|z| - 1)^2 / 2 with one token and ridge 1; it is stationary in all but `alpha`.

    Args:
        q0: overlap of two minima in different outermost clusters.
        widths: increment of the overlap at each step, from the outermost to the innermost one.
        s: Parisi parameters of the steps, increasing.
        V: response within the smallest clusters.
    """
    normals, weight = np.polynomial.hermite_e.hermegauss(60)
    log_weight = jnp.log(weight / weight.sum())
    W = V + jnp.append(jnp.cumsum((s * widths)[::-1])[::-1], 0.0)  # responses, from the whole one to V

    def energy(h: Float[Array, "*samples"], step: int) -> Float[Array, "*samples"]:
        """Return the energy of a sample, averaged over the clusters from a step inwards; conjugates are eliminated."""
        width, parisi = widths[step], s[step]
        if step < len(s) - 1:
            energies = energy(h[..., None] + jnp.sqrt(width) * normals, step + 1)
            return -jax.scipy.special.logsumexp(log_weight - parisi * energies, axis=-1) / parisi
        b = parisi / (1 + V)
        precision = 1 / width + b
        sides = []
        for sign in (1, -1):
            centre = (sign * h / width + b) / precision
            exponent = -0.5 * (h**2 / width + b - centre**2 * precision) - 0.5 * jnp.log(width * precision)
            sides.append(exponent + jax.scipy.special.log_ndtr(centre * jnp.sqrt(precision)))
        return -jnp.logaddexp(*sides) / parisi

    entropy = 0.5 * q0 / W[0] + jnp.sum(jnp.log(W[:-1] / W[1:]) / (2 * s))
    mean = jnp.exp(log_weight) @ energy(jnp.sqrt(q0) * normals, 0)
    return 0.5 * (q0 + jnp.sum(widths)) - entropy + alpha * mean


@jax.jit
def _scaled(u: Float[Array, " 2+2*k"], alpha: Float[Array, ""]) -> Float[Array, ""]:
    """Return `signs_loss` over alpha^{3/2} as a function of numbers of order one.

    Args:
        u: log of the total overlap over alpha / 4; V; logs of the shares of the steps relative to that of q0, (k,);
            logs of the Parisi parameters times alpha^{1/2}, (k,).
    """
    (size, V), (shares, s) = u[:2], u[2:].reshape(2, -1)
    q0, *widths = jnp.exp(size) * alpha / 4 * jax.nn.softmax(jnp.append(0.0, shares))
    return signs_loss(alpha, q0, jnp.stack(widths), jnp.exp(s) / alpha**0.5, V) / alpha**1.5


_slope = jax.jit(jax.grad(_scaled))


def signs(alpha: float, steps: int) -> list[float]:
    """Return the stationary values of `signs_loss` with 0 (replica-symmetric), 1, ..., `steps` steps, at most three.

    Raises:
        RuntimeError: a solution was not found.
    """

    def replica_symmetric(u: Float[Array, "2"]) -> Float[Array, ""]:
        """Return the replica-symmetric loss over alpha."""
        q, V = u[0] * alpha / 4, u[1]
        return (q / 2 - q / (2 * V)) / alpha + (1 + q - 2 * jnp.sqrt(2 * q / jnp.pi)) / (2 * (1 + V))

    share, V = point = root(jax.jit(jax.grad(replica_symmetric)), [1.0, 1.0 + alpha**0.5 / 4], tol=1e-13).x
    losses = [float(replica_symmetric(point)) * alpha]

    # Shares and Parisi parameters as `_scaled` takes them, near the solution for small alpha.
    starts = [([0.1], [1.7]), ([0.5, -0.76], [1.2, 2.4]), ([0.63, 0.0, -1.4], [0.93, 1.8, 2.87])]
    for k, (widths, parisi) in enumerate(starts[:steps], 1):
        point = root(lambda u: np.asarray(_slope(u, alpha)), np.array([np.log(share), V, *widths, *parisi]), tol=1e-11)
        if np.max(np.abs(point.fun)) > 1e-9:
            raise RuntimeError(f"{k} steps at alpha = {alpha:g} end at a slope of {np.max(np.abs(point.fun)):.1e}")
        losses.append(float(_scaled(point.x, alpha)) * alpha**1.5)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, metavar="K", help="of breaking, at most")
    parser.add_argument("--order", type=int, default=5, metavar="K", help="of the lines")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print("One slope: steps, elevation, over that of one step")
    values = universal(args.steps)
    for k, value in enumerate(values, 1):
        print(f"{k:>3} {value:.6f} {value / values[0]:.4f}")
    print("\nState, elevation of one step, of two, ratio, and the estimate of the state itself")
    for alpha, branch in STATES:
        single, double, estimate = at_a_state(alpha, branch, args.order)
        print(f"{alpha:>6} {branch:<10} {single:.3e} {double:.3e} {double / single:.4f} {estimate:.3e}")
    print(
        "\nEvery sample chooses a sign: alpha, elevation of one step, two and three over it, energies of a spin from RS"
    )
    for alpha in SIGNS:
        rs, *losses = signs(alpha, 3)
        ratios = " ".join(f"{(loss - rs) / (losses[0] - rs):.4f}" for loss in losses[1:])
        spins = " ".join(f"{(4 * loss / alpha - 1) / alpha**0.5:.5f}" for loss in (rs, *losses))
        print(f"{alpha:>6g} {losses[0] - rs:.5e} {ratios}   {spins}")


if __name__ == "__main__":
    main()
