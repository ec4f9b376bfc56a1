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

from ..averages.program import program
from ..base.linalg import positive_definite
from ..base.results import Status
from ..model.model import Model
from ..model.overlaps import admissible
from ..theory.pool import Call, Path
from .potentials import Averages, BrokenOverlaps, Setting, channel_expansion, conjugates, free_energy, overlaps, prior

_TOL, _STALLED = 1e-4, 3e-3  # residuals at which a state has converged, and at which the nodes resolve it no further
_SLOPE = 0.01  # weight, in the residual, of d loss / d log s over the elevation, which is off by the square of that
_STEEP = 0.1  # of that derivative over the elevation: above, it counts by its square, and s moves uphill
_NOISE = 1e-5  # of the loss: elevations below say nothing
_STEPS, _FIRST = 16, 1  # Newton steps, and at which s starts to move
_PATIENCE = 4, 2  # steps in which the residual has not halved: it will not, if it is large, and if it is small
_SLOW = 0.5  # a residual that falls by less asks for a new matrix
_LONGEST = 0.5  # relative, of a Newton step
_FAR = 0.02  # likewise, above which it says more of the matrix than of how rough the averages are


Unpack = Callable[[jax.Array], tuple[BrokenOverlaps, jax.Array]]


def coordinates(x: BrokenOverlaps, s: jax.Array) -> tuple[jax.Array, Unpack]:
    """A state as one vector: q1, s (q1 - q0), V, theta, m and log s; and the way back.

    s (q1 - q0) is the response of the clusters, which hardly depends on s.
    """
    v, back = ravel_pytree((x.q1, s * (x.q1 - x.q0), x.V, x.theta, x.m, jnp.log(s)))

    def unpack(v: jax.Array) -> tuple[BrokenOverlaps, jax.Array]:
        q1, response, V, theta, m, log_s = back(v)
        s = jnp.exp(log_s)
        return BrokenOverlaps(q1, q1 - response / s, V, theta, m), s

    return v, unpack


class Look(NamedTuple):
    """The equations at one place: a residual for each coordinate and, last, d loss / d log s."""

    v: jax.Array  # the place
    residual: jax.Array
    matrix: jax.Array  # of Newton's method, where it was asked for
    columns: jax.Array  # sizes of the coordinates
    rows: jax.Array  # and of the residuals
    loss: jax.Array
    loss_by_model: Model
    loss_by_alpha: jax.Array
    loss_by_log_s: jax.Array
    hats: BrokenOverlaps


class _Seen(NamedTuple):
    """What the equations give at one place."""

    image: jax.Array  # the coordinates; the last one is d Phi_s / d log s
    channel: jax.Array  # M_s
    loss: jax.Array
    hats: BrokenOverlaps


def _expansion(
    setting: Setting, averages: Averages, u: jax.Array, free: jax.Array, wanted: jax.Array
) -> tuple[_Seen, _Seen, Model]:
    """The equations at u, their derivatives in it, (..., k), where they are `wanted`, and dM_s / d model."""
    values, slopes, by_model = channel_expansion(setting, averages, u, wanted)

    def equations(u: jax.Array, M: jax.Array, by_x: BrokenOverlaps, by_s: jax.Array) -> _Seen:
        model, alpha, x, s = setting(u)
        hats = conjugates(alpha, s, by_x, free)
        explicit = jax.grad(lambda s: free_energy(model, alpha, x, hats, s, 0 * M))(s)
        image = coordinates(overlaps(model, hats, s), s)[0].at[-1].set(s * (explicit - alpha * by_s))
        return _Seen(image, M, -free_energy(model, alpha, x, hats, s, M), hats)

    def column(*d: Any) -> Any:
        return jax.jvp(equations, (u, *values), d)

    eye = jnp.eye(len(u), dtype=u.dtype)
    return *jax.vmap(column, in_axes=(0, -1, -1, -1), out_axes=(None, -1))(eye, *slopes), by_model


@program
def _look(problem: Problem, x: BrokenOverlaps, s: jax.Array, wanted: jax.Array) -> Look:
    """The equations around a place, to first order where that is `wanted`."""
    model, alpha, averages, free, *_ = problem
    v, unpack = coordinates(x, s)
    (image, channel, loss, hats), slopes, M_by_model = _expansion(
        lambda v: (model, alpha, *unpack(v)), averages, v, free, wanted
    )
    sizes = [jnp.sqrt(jnp.mean(a**2)) * jnp.ones_like(a) for a in (x.q1, s * (x.q1 - x.q0), x.V)]
    order = [
        jnp.where(kept > 0, jnp.sqrt(jnp.mean(a**2)), 1.0) * jnp.ones_like(a)
        for kept, a in zip(free, (x.theta, x.m), strict=True)
    ]
    columns = ravel_pytree((*sizes, *order, jnp.ones_like(s)))[0]
    by_prior = jax.grad(prior)(model, hats, s)
    return Look(
        v=v,
        residual=image - v.at[-1].set(0.0),
        matrix=jnp.diag(jnp.ones_like(v).at[-1].set(0.0)) - slopes.image,
        columns=columns,
        rows=columns.at[-1].set(0.5 * s * jnp.sum(hats.q1 * (x.q1 - x.q0))),
        loss=loss,
        # Partial derivatives, since Phi_s is stationary elsewhere.
        loss_by_model=jax.tree.map(lambda a, b: alpha * a - b, M_by_model, by_prior),
        loss_by_alpha=channel,
        loss_by_log_s=-image[-1],
        hats=hats,
    )


class Moving(NamedTuple):
    """Derivatives, (..., k), of a state in the k numbers of the model and alpha."""

    x: BrokenOverlaps
    s: jax.Array
    hats: BrokenOverlaps
    loss_by_alpha: jax.Array
    loss_by_log_s: jax.Array


@program
def _moving(problem: Problem, x: BrokenOverlaps, s: jax.Array) -> Moving:
    """By the implicit function theorem, with all of the matrix; s moves where the state is a ground state."""
    model, alpha, averages, free, ground, _ = problem
    (p, numbers), (v, unpack) = ravel_pytree((model, alpha)), coordinates(x, s)
    n, last = len(v), jnp.zeros_like(v).at[-1].set(1.0)
    _, slopes, _ = _expansion(
        lambda u: (*numbers(u[n:]), *unpack(u[:n])), averages, jnp.concatenate([v, p]), free, jnp.asarray(True)
    )
    # At a given s the last equation is that it stays.
    matrix = (jnp.diag(1 - last) - slopes.image[:, :n]).at[-1].set(jnp.where(ground, -slopes.image[-1, :n], last))
    force = slopes.image[:, n:].at[-1].multiply(ground)
    size = jnp.max(jnp.abs(matrix), 1, keepdims=True)
    # Least squares: the matrix is singular along the orbit of a gauge.
    moved = jnp.linalg.lstsq(matrix / size, force / size, rcond=1e-10)[0]

    def total(by_u: jax.Array) -> jax.Array:
        return by_u[..., n:] + by_u[..., :n] @ moved

    by_x, by_s = jax.vmap(lambda d: jax.jvp(unpack, (v,), (d,))[1], -1, -1)(moved)
    return Moving(by_x, by_s, jax.tree.map(total, slopes.hats), total(slopes.channel), -total(slopes.image)[-1])


class Problem(NamedTuple):
    """The equations of one replicate of the averages.

    Attributes:
        free: what the branch leaves free, (2,).
        ground: whether s is looked for as well.
        rs_loss: training loss of the RS state.
    """

    model: Model
    alpha: jax.Array
    averages: Averages
    free: jax.Array
    ground: jax.Array
    rs_loss: jax.Array

    def look(self, x: BrokenOverlaps, s: jax.Array, wanted: bool) -> Path:
        """Path of the equations at a place, with their derivatives where they are `wanted`."""
        return jax.tree.map(np.asarray, (yield Call(_look, (self, x, s, jnp.asarray(wanted)))))

    def steepness(self, seen: Look) -> float:
        """d loss / d log s over the elevation."""
        return float(seen.loss_by_log_s / max(abs(seen.loss - float(self.rs_loss)), _NOISE * seen.loss))

    def moved(self, x: BrokenOverlaps, s: jax.Array, move: np.ndarray) -> tuple[BrokenOverlaps, jax.Array]:
        """The place after a Newton step, cut until it lies in the domain; the old one where it never does."""
        v, unpack = coordinates(x, s)
        for cut in 0.5 ** np.arange(6):
            trial, t = unpack(v + cut * move)
            kept = self.free[0] * trial.theta, self.free[1] * trial.m
            trial = eqx.tree_at(lambda x: (x.theta, x.m), trial, kept)
            if bool(positive_definite(trial.q1 - trial.q0)) and bool(admissible(self.model, trial.between)):
                return trial, t
        return x, s


class Found(NamedTuple):
    """Where Newton's method came to, what it saw there, and its last matrix."""

    problem: Problem
    x: BrokenOverlaps
    s: jax.Array
    seen: Look
    residual: float
    matrix: np.ndarray

    @property
    def status(self) -> Status:
        """Converged, stalled at the accuracy of the averages, or neither."""
        if self.residual <= _TOL:
            return Status.converged
        return Status.stalled if self.residual <= _STALLED else Status.max_steps

    def moving(self) -> Moving:
        """How the state moves with the numbers of the model and alpha."""
        return _moving(self.problem, self.x, self.s)


def fixed_point(problem: Problem, x: BrokenOverlaps, s: jax.Array, matrix: Any) -> Path:
    """Path to the place with the smallest residual that Newton's method comes to; to None if there is none.

    Args:
        matrix: that of another replicate, or None; s does not move in the first step without it.
    """
    ground = bool(problem.ground)
    first, renew = (_FIRST, True) if matrix is None else (0, False)
    best, last = None, None
    waiting, residual, size, half = 0, np.inf, np.inf, np.inf
    for step in range(_STEPS):
        seen: Any = yield from problem.look(x, s, renew)
        before, size = size, float(np.max(np.abs((seen.residual / seen.rows)[:-1])))
        if not np.isfinite(size):
            break
        vary = ground and step >= first
        if renew or matrix is None:
            matrix = seen.matrix
        elif last is not None and np.max(np.abs(seen.v - last.v) / seen.columns) > _FAR:
            matrix = corrected_matrix(matrix, seen.v - last.v, last.residual - seen.residual, seen.columns)
        steep = problem.steepness(seen) if vary else 0.0
        size = max(size, _SLOPE * abs(steep) * max(1.0, abs(steep) / _STEEP))
        anew = vary and step == first
        if size < residual or anew:
            best, residual = Found(problem, x, s, seen, size, matrix), size
        waiting, half = (0, 0.5 * size) if size < half or anew else (waiting + 1, half)
        done = residual <= _TOL and vary == ground
        if done or waiting > _PATIENCE[residual <= _STALLED]:
            break
        renew = step > first and size > max(_SLOW * before, _STALLED)
        last = seen
        x, s = problem.moved(x, s, _newton_step(seen, matrix, len(seen.v) - (not vary), steep) * seen.columns)
    return None if best is None else best._replace(matrix=matrix)


def _newton_step(seen: Look, matrix: np.ndarray, n: int, steep: float) -> np.ndarray:
    """A step in the first n coordinates, in units of the sizes of all; log s goes uphill where the loss is `steep`."""
    scaled, target = (matrix * seen.columns / seen.rows[:, None])[:n, :n], (seen.residual / seen.rows)[:n]
    # Least squares: the matrix is singular along the orbit of a gauge.
    move = np.linalg.lstsq(scaled, target, rcond=1e-10)[0]
    if abs(steep) > _STEEP and move[-1] * steep < 0:  # Newton's method would look for the smallest loss
        move[-1] = _LONGEST * np.sign(steep)
        move[:-1] = np.linalg.lstsq(scaled[:-1, :-1], target[:-1] - scaled[:-1, -1] * move[-1], rcond=1e-10)[0]
    return np.append(move * min(1.0, _LONGEST / np.max(np.abs(move))), np.zeros(len(seen.v) - n))


def corrected_matrix(matrix: np.ndarray, moved: np.ndarray, change: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """A matrix with which a move, in coordinates of these sizes, gives the change that was seen: Broyden's update."""
    along = moved / sizes**2
    length = along @ moved
    return matrix + np.outer(change - matrix @ moved, along) / length if length > 0 else matrix
