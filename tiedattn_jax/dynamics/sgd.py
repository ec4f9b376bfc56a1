"""One-pass stochastic gradient descent: integration of its equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ..averages.default import smooth_nodes
from ..averages.program import at_top_level, lane_by_lane, program
from ..averages.rule import Replicate, Rule, check_rule
from ..base.errors import INT32, InputError, as_number, require_count, require_not_negative, require_positive
from ..base.linalg import precise
from ..base.results import Status
from ..base.trees import indexed
from ..model.model import Model
from .flow import Moments, drift, forces, gram_of, overlaps_of, start_moments
from .integrate import integrated, moved, refined
from .spans import check_smooth
from .trajectory import Run, Student, Trajectory

_ORDER, _REPLICATES = 10, 2  # a grid of order 10 gives the end of a trajectory to 2e-6
_LEAST_WEIGHT = 1e-10  # of nodes of the grid; without the others the end moves by 2e-8
_NODES = 2**13
_TOL = 1e-5  # error of the steps, relative to the size of the student, above which they do not resolve the trajectory
_MOST, _TRACED = 64, 4  # steps between two points: the most that are tried, and those inside a trace
_STEADY = 0.01  # relative change in a time as long as the trajectory, below which its end is steady


def sgd(
    model: Model,
    start: Any,
    eta: Any,
    until: Any,
    *,
    kappa: Any = 0.0,
    nodes: Rule | None = None,
    points: int = 101,
    steps: int | None = None,
) -> Trajectory:
    """Follow a student that learns by one-pass stochastic gradient descent, in the limit of high dimension.

    Every step takes a fresh sentence,
    ``Q <- Q - eta [ sum_l (x_l + p_l) u_l^T / sqrt(d) + kappa / d Q ]`` with the gradients u_l of the loss in the
    student's fields, and time is t = steps / d. The overlaps then obey ordinary differential equations. The mean step
    descends ``E loss + kappa / 2 tr R``. The empirical risk at alpha has kappa = lam / alpha; `model.lam` itself does
    not matter here.

    The equations are integrated by Runge-Kutta steps of fourth order, and once more with half as many steps. The
    difference, over 15, is `step_error`. If it exceeds 1e-5 the steps are doubled; inside `jit`, `vmap` and `grad`
    there are four between two points unless `steps` says otherwise, and the status says if they are too few. The result
    can be differentiated in everything: eta, kappa, until, the start, and the numbers of the model.

    Args:
        model: the data, the target, and the loss.
        start: (R, Theta, m), the overlaps ``Q^T Q / d``, ``Q^T Q* / d`` and ``Q^T p_l / sqrt(d)`` at t = 0, as arrays
            (r, r), (r, t) and (L, r). A number R stands for R times the identity, and a number Theta for a student
            whose columns are along the teacher's. A number m, or an array (r,), is the overlap with the first encoding
            of a student in its direction. The rest of the student, which teacher and encodings do not explain, is
            random, with the same variance at every eigenvalue of the covariance. A `Trajectory` continues at its end.
        eta: learning rate.
        until: time at the end.
        kappa: ridge per sample.
        nodes: averages; by default a tensor grid for up to four fields, else 2^13 Sobol points.
        points: number of times, from zero to `until`.
        steps: Runge-Kutta steps between two of them, a power of two.

    Returns:
        A `Trajectory`; `crossing` gives the times of events on it.

    Raises:
        InputError: eta or until is not positive, or kappa negative; the model has a penalty, or a loss with kinks; no
            student has the overlaps of the start; or another argument is not as described.
    """
    check_smooth(model, "one-pass SGD", even=False)
    require_positive(eta, "eta")
    require_positive(until, "until")
    require_not_negative(kappa, "kappa")
    require_count(points, "points", 2, INT32)
    if steps is not None:
        require_count(steps, "steps", maximum=INT32)
        if steps & (steps - 1) or steps > _MOST * 16:
            raise InputError("steps", f"must be a power of two up to {_MOST * 16}, got steps={steps}")
    if nodes is not None:
        check_rule(nodes, model)
    options: dict[str, Any] = {"least_weight": _LEAST_WEIGHT, "replicates": _REPLICATES, "one_block": True}
    rule = smooth_nodes(model, _ORDER, _NODES, **options) if nodes is None else nodes
    numbers = tuple(
        as_number(a, name, model.lam.dtype) for a, name in ((eta, "eta"), (kappa, "kappa"), (until, "until"))
    )
    moments = _end_of(model, start) if isinstance(start, Trajectory) else start_moments(model, start)
    least = 1 if points % 2 else 2  # the number of all steps must be even

    def run(steps: int) -> Run:
        return lane_by_lane(_runs)(model, moments, numbers, rule, points, max(steps, least))

    is_fixed = steps is not None or not at_top_level(model, moments, numbers)
    replicates = run(steps or _TRACED) if is_fixed else refined(run, least, _MOST)
    eta, kappa, until = numbers[0], numbers[1], numbers[2]
    return Trajectory(model, eta, kappa, until * jnp.linspace(0, 1, points, dtype=eta.dtype), replicates)


def _end_of(model: Model, before: Trajectory) -> Moments:
    end = jax.tree.map(lambda a: jnp.mean(a[:, -1], 0), before.replicates.moments)
    shapes, law = {a.shape for a in jax.tree.leaves(end)}, model.law()
    (_, r, t), (K, J) = model.shape, law.tau.shape[:2]
    if shapes != {(K, r, r), (K, r, t), (K, r, J)}:
        raise InputError("start", "must be a trajectory of a model of the same shapes, or (R, Theta, m)")
    return end


@program
def _runs(
    model: Model, start: Moments, numbers: tuple[Array, Array, Array], rule: Rule, points: int, steps: int
) -> Run:
    return rule.each(lambda replicate: _run(model, start, numbers, replicate, points, steps))


def _run(
    model: Model,
    start: Moments,
    numbers: tuple[Array, Array, Array],
    replicate: Replicate,
    points: int,
    steps: int,
) -> Run:
    (eta, kappa, until), fixed = numbers, lax.stop_gradient((model, start, numbers))
    moments = integrated(_flow(model, eta, kappa, replicate), start, until, points, steps)

    def state(s: Moments) -> tuple[Student, Student, Moments]:
        """Return the student, its rate, and the velocity of its moments."""
        f = forces(model, overlaps_of(model, s), replicate)
        velocity = drift(model, s, f, eta, kappa)
        slope = overlaps_of(model, velocity)
        error_rate = jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: jnp.sum(a * b), f.gradient, slope))
        return *jax.jvp(lambda s, e: _student(model, s, e, kappa), (s, f.error), (velocity, error_rate)), velocity

    student, rate, velocity = lax.map(jax.checkpoint(state), moments)
    # The same with half as many steps; if there is one between two points, it then spans two intervals.
    stride = 1 if steps > 1 else 2
    still = _flow(fixed[0], *fixed[2][:2], replicate)
    rough = integrated(still, fixed[1], fixed[2][2], (points - 1) // stride + 1, stride * steps // 2)
    path, velocity = lax.stop_gradient((moments, velocity))
    step_error = _distance(indexed(path, slice(None, None, stride)), rough) / 15
    end = indexed(path, -1)
    change = _distance(moved(end, indexed(velocity, -1), 1.0), end)
    growth = _growth(still, end)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves((moments, student))]))
    is_steady = (change * until < _STEADY) & (growth * until < 1)
    status = jnp.where(is_steady, Status.converged, Status.max_steps)
    status = jnp.where(step_error < jnp.maximum(_TOL, 100 * jnp.finfo(eta.dtype).eps), status, Status.unresolved)
    return Run(student, rate, moments, step_error, change, growth, jnp.where(finite, status, Status.nonfinite))


def _flow(model: Model, eta: Array, kappa: Array, replicate: Replicate) -> Callable[[Moments], Moments]:
    """Return the velocity of the moments as a function of them; reverse passes compute it again."""
    return jax.checkpoint(lambda s: drift(model, s, forces(model, overlaps_of(model, s), replicate), eta, kappa))


def _distance(a: Moments, b: Moments) -> Float[Array, ""]:
    """Return the largest difference, relative to the student: R to its size, Theta and M to the root of that."""
    size = jnp.max(jnp.abs(b.R), (-1, -2, -3))
    differences = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b), (-1, -2, -3)), a, b)
    return jnp.max(jnp.stack([differences.R / size, differences.Theta / size**0.5, differences.M / size**0.5]))


@precise
def _growth(flow: Callable[[Moments], Moments], s: Moments) -> Float[Array, ""]:
    """Return the largest real part of the eigenvalues of the linearised flow."""
    vector, unravel = ravel_pytree(s)
    _, along = jax.linearize(lambda v: ravel_pytree(flow(unravel(v)))[0], vector)
    rows = lax.map(along, jnp.eye(vector.size, dtype=vector.dtype))
    rows = jnp.where(jnp.all(jnp.isfinite(rows)), rows, 0.0)
    return jnp.max(jnp.real(jnp.linalg.eigvals(rows)))


@precise
def _student(model: Model, s: Moments, error: Array, kappa: Array) -> Student:
    """Return the student with given moments and test error."""
    (L, _, t), law, x = model.shape, model.law(), overlaps_of(model, s)
    R, Theta = jnp.tensordot(law.weights, s.R, 1), jnp.tensordot(law.weights, s.Theta, 1)
    gram = gram_of(model)
    along_teacher, along_encodings = (
        jnp.einsum("ai,ij,aj->", a, jnp.linalg.pinv(g, hermitian=True), a)
        for a, g in ((Theta, gram[:t, :t]), (x.m[:L].T, gram[t : t + L, t : t + L]))
    )
    risk = error + 0.5 * kappa * jnp.trace(R)
    return Student(R, Theta, x.m, x.q, x.theta, along_teacher, along_encodings, error, risk)
