"""Solve the theory of the dot-product model by plain Monte Carlo in NumPy, as a comparator for this library.

The damped iteration, equations, stop test and starts are those of `published_method`. Averages are over frozen Gaussian
draws. All proximal problems are solved in one array, by Newton's method with a Levenberg shift from several starts.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from jaxtyping import Float

from .published_method import Overlaps, Problem, Result, solve as damped, stein

_STEPS = 30
_CURVATURE = np.array([[[2.0, -1.0], [-1.0, 0.0]], [[0.0, -1.0], [-1.0, 2.0]]])[..., None]  # second derivatives of a_k


def solve(alpha: float, branch: str = "semantic", draws: int = 2**13, seed: int = 0) -> Result:
    """Solve for the fixed point at the standard setting, with `draws` samples of the fields."""
    normals = np.random.default_rng(seed).standard_normal((2, 2, draws))
    return damped(alpha, branch=branch, hats=partial(conjugates, normals=normals))


def conjugates(x: Overlaps, p: Problem, normals: Float[np.ndarray, "2 2 n"]) -> Overlaps:
    """Return the conjugates of the overlaps from draws of xi and u; see `published_method.conjugates`."""
    xi, u = normals
    h = math.sqrt(x.q) * xi + x.m * np.array([[1.0], [-1.0]])
    y = x.theta / math.sqrt(x.q) * xi + math.sqrt(p.sigma**2 - x.theta**2 / x.q) * u
    g = (prox(h, y, x.V, p) - h) / x.V
    moments = (np.sum(g * g, 0), g[0] - g[1], np.sum(g * xi, 0), np.sum(g * u, 0))
    return stein(x, p, *(float(moment.mean()) for moment in moments))


def prox(h: Float[np.ndarray, "2 n"], y: Float[np.ndarray, "2 n"], V: float, p: Problem) -> Float[np.ndarray, "2 n"]:
    """Return the minimisers of `energy` at fields of the student and of the teacher."""
    # Minima lie near h and near the teacher's fields of either sign. The axes are token, start and node.
    starts = np.stack([h, y, -y, np.zeros_like(h)], 1)
    T = (1 - p.omega) * attention(y) + p.omega * np.diag(p.mixing)[:, None]
    count, shape = starts.shape[1], starts.reshape(2, -1).shape
    h, T = (np.broadcast_to(a[:, None], starts.shape).reshape(shape) for a in (h, T))
    z, shift = starts.reshape(shape), np.zeros(shape[1])
    value = energy(z, h, T, V, p)
    for _ in range(_STEPS):
        s = attention(z)
        inner = np.stack([[2 * z[0] - z[1], -z[0]], [-z[1], 2 * z[1] - z[0]]])  # d a_k / d z_l, a_k = z_k (z_k - z_l)
        first, second = s * (1 - s), s * (1 - s) * (1 - 2 * s)
        error, outer = s - T, inner[:, :, None] * inner[:, None]
        slope = (z - h) / V + 2 * p.sigma**2 * np.sum((error * first)[:, None] * inner, 0)
        curvature = (first**2 + error * second)[:, None, None] * outer + (error * first)[:, None, None] * _CURVATURE
        H = np.eye(2)[..., None] / V + 2 * p.sigma**2 * np.sum(curvature, 0)
        lowest = (H[0, 0] + H[1, 1]) / 2 - np.hypot((H[0, 0] - H[1, 1]) / 2, H[0, 1])  # lowest eigenvalue of H
        damping = np.maximum(shift, 1e-3 / V - lowest)  # shift that makes H positive definite
        a, d, b = H[0, 0] + damping, H[1, 1] + damping, H[0, 1]
        trial = z - np.stack([d * slope[0] - b * slope[1], a * slope[1] - b * slope[0]]) / (a * d - b * b)
        trial_value = energy(trial, h, T, V, p)
        improved = trial_value <= value
        z, value = np.where(improved, trial, z), np.where(improved, trial_value, value)
        shift = np.where(improved, shift / 4, np.maximum(4 * damping, 1e-2 / V))
    best = np.argmin(value.reshape(count, -1), 0)
    return z.reshape(2, count, -1)[:, best, np.arange(len(best))]


def energy(
    z: Float[np.ndarray, "2 n"], h: Float[np.ndarray, "2 n"], T: Float[np.ndarray, "2 n"], V: float, p: Problem
) -> Float[np.ndarray, " n"]:
    """Return |z - h|^2 / (2 V) + sigma^2 sum_k (S(z)_kk - T_k)^2 of fields z; T is the diagonal of the target."""
    return np.sum((z - h) ** 2 / (2 * V) + p.sigma**2 * (attention(z) - T) ** 2, 0)


def attention(z: Float[np.ndarray, "2 *n"]) -> Float[np.ndarray, "2 *n"]:
    """Return the diagonal of softmax(z z^T); for two tokens it determines the rest, as rows sum to one."""
    return 0.5 + 0.5 * np.tanh(z * (z - z[::-1]) / 2)
