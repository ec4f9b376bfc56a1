"""Newton's method for the equations of 1RSB, with s as a coordinate.

The derivatives of the averages are most of the work. The matrix is therefore corrected by Broyden's formula, and
computed anew where the correction does not suffice.

The method is not that of `theory.newton`, which accepts a step only if the largest residual falls. The equation of s
has a small weight in that norm, so the search creeps along a narrow valley. In the standard ground state (1.2515,
positional, four replicates) it needs 2 evaluations with derivatives and 8 to 25 without them, and s moves by up to .9
of its error bar. Here it needs 2 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from ..averages.program import program
from ..base.arrays import positive_definite
from ..base.results import Status
from ..model.model import Model
from ..model.overlaps import admissible
from ..theory.paths import Call, Path
from .potentials import (
    Averages,
    OneRSBOverlaps,
    PointAt,
    channel_expansion,
    conjugates_1rsb,
    free_energy_1rsb,
    overlaps_1rsb,
    prior_1rsb,
)

_TOL, _STALLED = 1e-4, 3e-3  # residuals at which a state has converged, and at which the nodes resolve it no further
# Weight of the steepness, d loss / d log s over the elevation, in the residual. The elevation is off by its square.
_SLOPE = 0.01
_STEEP = 0.1  # steepness above which its square counts, and s moves uphill
_NOISE = 1e-5  # smaller elevations, relative to the loss, say nothing
_STEPS, _FIRST_S_STEP = 16, 1  # largest number of Newton steps, and the index of the step in which s starts to move
_PATIENCE = 4, 2  # the search ends after so many steps that do not halve a large residual, and a small one
_SLOW_FALL = 0.5  # the matrix is computed anew if a step leaves more than this share of the residual
_MAX_STEP = 0.5  # longest Newton step, relative
_LONG_STEP = 0.02  # length of a step, relative, above which the matrix matters more than the roughness of the averages


Unpack = Callable[[Float[Array, " n"]], tuple[OneRSBOverlaps, Float[Array, ""]]]


def coordinates(x: OneRSBOverlaps, s: Float[Array, ""]) -> tuple[Float[Array, " n"], Unpack]:
    """Return a state as one vector (q1, s (q1 - q0), V, theta, m, log s), and the inverse function.

    s (q1 - q0) is the response of the clusters, which hardly depends on s.
    """
    v, unravel = ravel_pytree((x.q1, s * (x.q1 - x.q0), x.V, x.theta, x.m, jnp.log(s)))

    def unpack(v: Float[Array, " n"]) -> tuple[OneRSBOverlaps, Float[Array, ""]]:
        q1, response, V, theta, m, log_s = unravel(v)
        s = jnp.exp(log_s)
        return OneRSBOverlaps(q1, q1 - response / s, V, theta, m), s

    return v, unpack


class Residuals(NamedTuple):
    """The equations at one state, in jax or numpy: a residual for each coordinate and, last, d loss / d log s."""

    v: Float[Any, " n"]  # coordinates of the state
    residual: Float[Any, " n"]
    matrix: Float[Any, "n n"]  # matrix of Newton's method, if derivatives were asked for
    columns: Float[Any, " n"]  # sizes of the coordinates
    rows: Float[Any, " n"]  # sizes of the residuals
    loss: Float[Any, ""]
    loss_by_model: Model
    loss_by_alpha: Float[Any, ""]
    loss_by_log_s: Float[Any, ""]
    hats: OneRSBOverlaps


class _Values(NamedTuple):
    """Values of the equations at one state."""

    image: Float[Array, " n"]  # coordinates that the equations map the state to; the last one is d Phi_s / d log s
    channel: Float[Array, ""]  # M_s
    loss: Float[Array, ""]
    hats: OneRSBOverlaps


def _expansion(
    setting: PointAt, averages: Averages, u: Float[Array, " k"], free: Float[Array, "2"], with_slopes: Bool[Array, ""]
) -> tuple[_Values, _Values, Model]:
    """Return the equations at u, their derivatives in u, (..., k), zero unless `with_slopes`, and dM_s / d model."""
    values, slopes, by_model = channel_expansion(setting, averages, u, with_slopes)

    def equations(u: Float[Array, " k"], M: Float[Array, ""], by_x: OneRSBOverlaps, by_s: Float[Array, ""]) -> _Values:
        model, alpha, x, s = setting(u)
        hats = conjugates_1rsb(alpha, s, by_x, free)
        explicit = jax.grad(lambda s: free_energy_1rsb(model, alpha, x, hats, s, 0 * M))(s)
        image = coordinates(overlaps_1rsb(model, hats, s), s)[0].at[-1].set(s * (explicit - alpha * by_s))
        return _Values(image, M, -free_energy_1rsb(model, alpha, x, hats, s, M), hats)

    def column(*d: Array | OneRSBOverlaps) -> tuple[_Values, _Values]:
        return jax.jvp(equations, (u, *values), d)

    eye = jnp.eye(len(u), dtype=u.dtype)
    return *jax.vmap(column, in_axes=(0, -1, -1, -1), out_axes=(None, -1))(eye, *slopes), by_model


@program
def _look(problem: Equations1RSB, x: OneRSBOverlaps, s: Float[Array, ""], with_slopes: Bool[Array, ""]) -> Residuals:
    """Return the equations at a state, to first order if `with_slopes`."""
    model, alpha, averages, free, *_ = problem
    v, unpack = coordinates(x, s)
    (image, channel, loss, hats), slopes, M_by_model = _expansion(
        lambda v: (model, alpha, *unpack(v)), averages, v, free, with_slopes
    )
    sizes = [jnp.sqrt(jnp.mean(a**2)) * jnp.ones_like(a) for a in (x.q1, s * (x.q1 - x.q0), x.V)]
    free_sizes = [
        jnp.where(is_free > 0, jnp.sqrt(jnp.mean(a**2)), 1.0) * jnp.ones_like(a)
        for is_free, a in zip(free, (x.theta, x.m), strict=True)
    ]
    columns = ravel_pytree((*sizes, *free_sizes, jnp.ones_like(s)))[0]
    by_prior = jax.grad(prior_1rsb)(model, hats, s)
    return Residuals(
        v=v,
        residual=image - v.at[-1].set(0.0),
        matrix=jnp.diag(jnp.ones_like(v).at[-1].set(0.0)) - slopes.image,
        columns=columns,
        rows=columns.at[-1].set(0.5 * s * jnp.sum(hats.q1 * (x.q1 - x.q0))),
        loss=loss,
        # Partial derivatives suffice, because Phi_s is stationary in everything else.
        loss_by_model=jax.tree.map(lambda a, b: alpha * a - b, M_by_model, by_prior),
        loss_by_alpha=channel,
        loss_by_log_s=-image[-1],
        hats=hats,
    )


class Moving(NamedTuple):
    """Derivatives of a state in the k numbers of the model and alpha, along the last axis."""

    x: OneRSBOverlaps
    s: Float[Array, " k"]
    hats: OneRSBOverlaps
    loss_by_alpha: Float[Array, " k"]
    loss_by_log_s: Float[Array, " k"]


@program
def _moving(problem: Equations1RSB, x: OneRSBOverlaps, s: Float[Array, ""]) -> Moving:
    """Return the derivatives of a state by the implicit function theorem; s moves only if it is a ground state."""
    model, alpha, averages, free, ground, _ = problem
    (p, numbers), (v, unpack) = ravel_pytree((model, alpha)), coordinates(x, s)
    n, unit = len(v), jnp.zeros_like(v).at[-1].set(1.0)
    _, slopes, _ = _expansion(
        lambda u: (*numbers(u[n:]), *unpack(u[:n])), averages, jnp.concatenate([v, p]), free, jnp.asarray(True)
    )
    # If s is given, the last equation says that it stays.
    matrix = (jnp.diag(1 - unit) - slopes.image[:, :n]).at[-1].set(jnp.where(ground, -slopes.image[-1, :n], unit))
    force = slopes.image[:, n:].at[-1].multiply(ground)
    row_size = jnp.max(jnp.abs(matrix), 1, keepdims=True)
    # Least squares: the matrix is singular along the orbit of a gauge.
    motion = jnp.linalg.lstsq(matrix / row_size, force / row_size, rcond=1e-10)[0]

    def total(by_u: Float[Array, "*value u"]) -> Float[Array, "*value k"]:
        return by_u[..., n:] + by_u[..., :n] @ motion

    by_x, by_s = jax.vmap(lambda d: jax.jvp(unpack, (v,), (d,))[1], -1, -1)(motion)
    return Moving(by_x, by_s, jax.tree.map(total, slopes.hats), total(slopes.channel), -total(slopes.image)[-1])


class Equations1RSB(NamedTuple):
    """The equations of one replicate of the averages.

    Attributes:
        free: whether the branch leaves theta and m free.
        ground: whether s is solved for as well.
        rs_loss: training loss of the RS state.
    """

    model: Model
    alpha: Float[Array, ""]
    averages: Averages
    free: Float[Array, "2"]
    ground: Bool[Array, ""]
    rs_loss: Float[Array, ""]

    def look(self, x: OneRSBOverlaps, s: Float[Array, ""], with_slopes: bool) -> Path:
        """Path of the equations at a state, with their derivatives if `with_slopes`; returns a `Residuals`."""
        return jax.tree.map(np.asarray, (yield Call(_look, (self, x, s, jnp.asarray(with_slopes)))))

    def steepness(self, look: Residuals) -> float:
        """Return d loss / d log s over the elevation."""
        return float(look.loss_by_log_s / max(abs(look.loss - float(self.rs_loss)), _NOISE * look.loss))

    def step_from(
        self, x: OneRSBOverlaps, s: Float[Array, ""], move: Float[np.ndarray, " n"]
    ) -> tuple[OneRSBOverlaps, Float[Array, ""]]:
        """Return the state after a Newton step, cut until it lies in the domain; the old state if it never does."""
        v, unpack = coordinates(x, s)
        for cut in 0.5 ** np.arange(6):
            trial, trial_s = unpack(v + cut * move)
            constrained = self.free[0] * trial.theta, self.free[1] * trial.m
            trial = eqx.tree_at(lambda x: (x.theta, x.m), trial, constrained)
            if bool(positive_definite(trial.q1 - trial.q0)) and bool(admissible(self.model, trial.between)):
                return trial, trial_s
        return x, s


class Solution(NamedTuple):
    """Result of Newton's method: the state, the equations there, and the last matrix."""

    problem: Equations1RSB
    x: OneRSBOverlaps
    s: Float[Array, ""]
    look: Residuals
    residual: float
    matrix: Float[np.ndarray, "n n"]

    @property
    def status(self) -> Status:
        """`converged`, `stalled` at the accuracy of the averages, or `max_steps`."""
        if self.residual <= _TOL:
            return Status.converged
        return Status.stalled if self.residual <= _STALLED else Status.max_steps

    def moving(self) -> Moving:
        """Return the derivatives of the state in the numbers of the model and alpha."""
        return _moving(self.problem, self.x, self.s)


def fixed_point(
    problem: Equations1RSB, x: OneRSBOverlaps, s: Float[Array, ""], matrix: Float[np.ndarray, "n n"] | None
) -> Path:
    """Path of Newton's method; returns the `Solution` of smallest residual, or None if no residual is finite.

    Args:
        matrix: matrix of another replicate, or None. Without it, s does not move in the first step.
    """
    ground = bool(problem.ground)
    first_s_step, with_slopes = (_FIRST_S_STEP, True) if matrix is None else (0, False)
    best, last = None, None
    idle_steps, residual, size, target = 0, np.inf, np.inf, np.inf
    for step in range(_STEPS):
        look: Residuals = yield from problem.look(x, s, with_slopes)
        before, size = size, float(np.max(np.abs((look.residual / look.rows)[:-1])))
        if not np.isfinite(size):
            break
        s_moves = ground and step >= first_s_step
        if with_slopes or matrix is None:
            matrix = look.matrix
        elif last is not None and np.max(np.abs(look.v - last.v) / look.columns) > _LONG_STEP:
            matrix = corrected_matrix(matrix, look.v - last.v, last.residual - look.residual, look.columns)
        steepness = problem.steepness(look) if s_moves else 0.0
        size = max(size, _SLOPE * abs(steepness) * max(1.0, abs(steepness) / _STEEP))
        is_restart = s_moves and step == first_s_step
        if size < residual or is_restart:
            best, residual = Solution(problem, x, s, look, size, matrix), size
        idle_steps, target = (0, 0.5 * size) if size < target or is_restart else (idle_steps + 1, target)
        is_done = residual <= _TOL and s_moves == ground
        if is_done or idle_steps > _PATIENCE[residual <= _STALLED]:
            break
        with_slopes = step > first_s_step and size > max(_SLOW_FALL * before, _STALLED)
        last = look
        move = _newton_step(look, matrix, len(look.v) - (not s_moves), steepness) * look.columns
        x, s = problem.step_from(x, s, move)
    return None if best is None or matrix is None else best._replace(matrix=matrix)


def _newton_step(
    look: Residuals, matrix: Float[np.ndarray, "n n"], count: int, steepness: float
) -> Float[np.ndarray, " n"]:
    """Return a step in the first `count` coordinates, in units of their sizes.

    log s goes uphill if the loss is steep.
    """
    scaled = (matrix * look.columns / look.rows[:, None])[:count, :count]
    target = (look.residual / look.rows)[:count]
    # Least squares: the matrix is singular along the orbit of a gauge.
    move = np.linalg.lstsq(scaled, target, rcond=1e-10)[0]
    if abs(steepness) > _STEEP and move[-1] * steepness < 0:  # Newton's method would look for the smallest loss
        move[-1] = _MAX_STEP * np.sign(steepness)
        move[:-1] = np.linalg.lstsq(scaled[:-1, :-1], target[:-1] - scaled[:-1, -1] * move[-1], rcond=1e-10)[0]
    return np.append(move * min(1.0, _MAX_STEP / np.max(np.abs(move))), np.zeros(len(look.v) - count))


def corrected_matrix(
    matrix: Float[np.ndarray, "n n"],
    step: Float[np.ndarray, " n"],
    change: Float[np.ndarray, " n"],
    sizes: Float[np.ndarray, " n"],
) -> Float[np.ndarray, "n n"]:
    """Return Broyden's update of a matrix: it maps a move, in coordinates of these sizes, to the observed change."""
    dual = step / sizes**2
    length = dual @ step
    return matrix + np.outer(change - matrix @ step, dual) / length if length > 0 else matrix
