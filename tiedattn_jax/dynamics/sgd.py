"""One-pass stochastic gradient descent in the limit of high dimension: a student in time, and the times of events.

The equations are those of `flow`. `sgd` integrates them, and a `Trajectory` holds the student at every time; its
`crossing` gives the time at which an event happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ..averages.program import at_top_level, entry_by_entry, program
from ..averages.recipes import AnyNodes, make_rule, smooth_recipe
from ..averages.rules import Replicate, Rule
from ..base.arrays import StateArray, indexed, precise, repeated
from ..base.derivatives import pseudo_inverse
from ..base.errors import (
    InputError,
    as_number,
    require_choice,
)
from ..base.progress import Progress
from ..base.report import Description, picture, rows_of, with_error
from ..base.results import Status
from ..model.checks import needs
from ..model.law import SpectralLaw
from ..model.model import Model
from ..model.parameters import scalar_parameters
from ..theory.quantities import Quantity
from .crossings import first_crossing
from .flow import (
    Integrated,
    Moments,
    OnePass,
    at_atoms,
    checked_run,
    drift,
    forces,
    gram_of,
    integrated,
    inverse_gram,
    overlaps_of,
    refined,
    start_moments,
)

_TOL = 1e-5  # error of the steps, relative to the size of the student, above which they do not resolve the trajectory
_MOST, _TRACED = 64, 4  # steps between two points: the most that are tried, and those inside a trace
_STEADY = 0.01  # distance to the steady state, relative to the student, below which the end is steady
_NOTHING = 1e-9  # share of the student below which its overlap is printed as zero: what decays becomes rounding
_SQUARINGS = 32  # of an exponential: the powers of t beside exp(growth t) then count less than 1e-8
_NULL = 1e-9  # relative rate below which a perturbation does not move, as a rotation of the columns

CROSSINGS: dict[str, Callable[[Any, Any], Any]] = {
    "theta overtakes m": lambda s, value: s.along_teacher - s.along_encodings - value,
    "m overtakes theta": lambda s, value: s.along_encodings - s.along_teacher - value,
    "risk below": lambda s, value: value - s.risk,
    "gen_error below": lambda s, value: value - s.gen_error,
}


class Student(eqx.Module):
    """A student at every time of a trajectory; all arrays lead with the axis of the times.

    Attributes:
        R: Q^T Q / d.
        Theta: Q^T Q* / d.
        m: Q^T p_l / sqrt(d), and with the means of classes if there are any.
        q, theta: overlaps of the library, Q^T Sigma_l Q / d and Q^T Sigma_l Q* / d.
        along_teacher, along_encodings: squared sizes of the student's projections on the teacher and on the encodings,
            parts of tr R.
        gen_error: test error, the mean loss of a fresh sentence.
        risk: the objective, ``gen_error + kappa / 2 tr R``.
    """

    R: Float[StateArray, "*T r r"]
    Theta: Float[StateArray, "*T r t"]
    m: Float[StateArray, "*T J r"]
    q: Float[StateArray, "*T S r r"]
    theta: Float[StateArray, "*T S r t"]
    along_teacher: Float[StateArray, "*T"]
    along_encodings: Float[StateArray, "*T"]
    gen_error: Float[StateArray, "*T"]
    risk: Float[StateArray, "*T"]


class StudentRun(Integrated):
    """A trajectory in every replicate of the averages.

    Attributes:
        student: the student at every time of the trajectory.
        moments: second moments at every atom of the spectrum, at the times of the trajectory.
        step_error: error of the steps, relative to the size of the student; see `sgd`.
        remaining: distance of the end to the steady state of the linearised flow, relative to the student.
        growth: rate at which the fastest perturbation of the end grows, the largest real part of the eigenvalues of the
            linearised flow.
    """

    student: Student
    moments: Moments
    step_error: Float[Array, "*R"]
    remaining: Float[Array, "*R"]
    growth: Float[Array, "*R"]


class Trajectory(OnePass):
    """A student that learns by one-pass stochastic gradient descent, in the limit of high dimension.

    Numbers are means over the replicates of the averages; `stderr` has their error bars, see `error_bar`. All arrays
    lead with the axis of the times. For two tokens and rank one they have no other axis, and m is that of the first
    token; `mean` has the full arrays.

    Attributes:
        model, eta, kappa: arguments of `sgd`.
        t: times, steps / d.
        replicates: the trajectory in every replicate.
        R: Q^T Q / d.
        Theta: Q^T Q* / d.
        m: Q^T p_l / sqrt(d).
        q, theta: overlaps of the library, for every token, Q^T Sigma_l Q / d and Q^T Sigma_l Q* / d.
        gen_error: test error.
        risk: the objective, ``gen_error + kappa / 2 tr R``.
    """

    replicates: StudentRun

    @property
    def measured(self) -> Student:
        """The student of all replicates, at every time."""
        return self.replicates.student

    @property
    def named_means(self) -> dict[str, Float[Array, "..."]]:
        return self.reduced(self.mean)

    def reduced(self, student: Student) -> dict[str, Float[Array, "..."]]:
        """Return the fields of a student by name; for two tokens and rank one as numbers, of the first token."""
        fields = dict(vars(student))
        if student.m.shape[-2:] == (2, 1) and student.Theta.shape[-1] == 1:  # a batched model has other shapes
            for name, axes in {"R": 2, "Theta": 2, "m": 2, "q": 3, "theta": 3}.items():
                fields[name] = fields[name][(..., *[0] * axes)]
        return fields

    @property
    def status_name(self) -> Any:
        """The status in words, such as "steady state" for `converged`; a list if it is an array."""
        names = {0: "steady state", 2: "time over", 4: "blown up", 8: "the steps do not resolve it: pass more `steps`"}
        return np.vectorize(lambda s: names[int(s)], otypes=[object])(self.status).tolist()

    @property
    def ok(self) -> bool | Bool[Any, "..."]:
        """Whether the trajectory can be used: it is finite, and the steps resolve it."""
        return self.status <= Status.max_steps

    def crossing(self, event: str | Callable[[Student], Any], value: Any = 0.0) -> Quantity:
        """Return the first time after the start at which a quantity becomes positive; it can be differentiated.

        It is looked for in every step of the integration, so that it does not depend on the number of points. An event
        that holds from the start on has no such time; the `reason` of the result then says so.

        Args:
            event: one of "theta overtakes m" (the student's projection on the teacher becomes larger than that on the
                encodings), "m overtakes theta", "risk below", "gen_error below"; or a function of a `Student` at one
                time.
            value: the level of the last two events.

        Returns:
            A `Quantity`, whose `t` is a mean over the replicates in which the event happens. Its status is `absent` if
            the event does not happen in half of them, and `imprecise` if the steps do not resolve the trajectory.

        Raises:
            InputError: no event has this name.
        """
        if isinstance(event, str):
            name = require_choice(event, "event", CROSSINGS)
            quantity = CROSSINGS[name]
        else:
            quantity, name = (lambda s, _: event(s)), getattr(event, "__name__", "event")
        value = as_number(value, "value", self.eta.dtype)
        if "below" in name and isinstance(event, str):
            name = f"{name} {value:g}" if at_top_level(value) else name
        return first_crossing(lambda s: quantity(s, value), self.replicates, self.t, name)

    def shown(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.named_means, self.reduced(self.stderr)

    def to_dict(self) -> dict[str, Any]:
        return scalar_parameters(self.model) | super().to_dict()

    def describe(self) -> Description:
        names = "R", "Theta", "m", "gen_error", "risk"
        mean, bars = (indexed(curves, -1) for curves in self.shown())
        words = "size of the student", "overlap with the teacher", "overlap with the encodings", "", "objective"
        parts = {"Theta": mean["along_teacher"], "m": mean["along_encodings"]}
        size = np.trace(np.atleast_2d(mean["R"]))
        numbers, errors = (
            {name: np.where(parts.get(name, size) < _NOTHING**2 * size, 0.0, values[name]) for name in names}
            for values in (mean, bars)
        )
        rows = rows_of(numbers, errors, meanings=dict(zip(names, words, strict=True)))
        details = [("step error", f"{np.max(self.replicates.step_error):.0e}", "of the integration, relative")]
        for event in ("theta overtakes m", "m overtakes theta"):
            crossing = self.crossing(event)
            if crossing.ok:
                details.append((event, "", f"at t = {with_error(crossing.t, crossing.stderr)}"))
        what = f"One-pass SGD, eta = {self.eta:g}, kappa = {self.kappa:g}, at t = {self.t[-1]:g}"
        return Description(what, self.status_name, rows, details)

    plot = picture("simulations.trajectory_figure", "order parameters and risk against time", "order", "loss")


def sgd(
    model: Model,
    start: Any,
    eta: Any,
    until: Any,
    *,
    kappa: Any = 0.0,
    nodes: AnyNodes = None,
    points: int = 101,
    steps: int | None = None,
    progress: Progress = None,
) -> Trajectory:
    """Follow a student that learns by one-pass stochastic gradient descent, in the limit of high dimension.

    Every step takes a fresh sentence,
    ``Q <- Q - eta [ sum_l (x_l + p_l) u_l^T / sqrt(d) + kappa / d Q ]`` with the gradients u_l of the loss in the
    student's fields, and time is t = steps / d. The overlaps then obey ordinary differential equations. The mean step
    descends ``E loss + kappa / 2 tr R``. The empirical risk at alpha has kappa = lam / alpha; `model.lam` itself does
    not matter here.

    The equations are integrated by Runge-Kutta steps of fourth order, and once more with half as many steps. The
    difference, over 15, is `step_error`. If it exceeds 1e-5 there are four times as many steps; inside `jit`, `vmap`
    and `grad` there are four between two points unless `steps` says otherwise, and the status says if they are too few.
    The result can be differentiated in everything: eta, kappa, until, the start, and the numbers of the model.

    Args:
        model: the data, the target, and the loss.
        start: (R, Theta, m), the overlaps ``Q^T Q / d``, ``Q^T Q* / d`` and ``Q^T p_l / sqrt(d)`` at t = 0, as arrays
            (r, r), (r, t) and (L, r). A number R stands for R times the identity, and a number Theta for a student
            whose columns are along the teacher's. A number m, or an array (r,), is the overlap with the first encoding
            of a student in its direction. The rest of the student, which teacher and encodings do not explain, is
            random, with the same variance at every eigenvalue of the covariance. A `Trajectory` continues at its end,
            every replicate at its own.
        eta: learning rate.
        until: time at the end.
        kappa: ridge per sample.
        nodes: recipe of the averages, or number of nodes; by default a tensor grid for up to four fields, else 2^13
            Sobol points.
        points: number of times, from zero to `until`.
        steps: Runge-Kutta steps between two of them, a power of two.
        progress: None, True for a bar, or a function of the numbers of finished and of known runs.

    Returns:
        A `Trajectory`; `crossing` gives the times of events on it. Its status is "steady state" if the end is within
        1 % of a steady state in which no perturbation grows, and "time over" else.

    Raises:
        InputError: eta or until is not positive, or kappa negative; the model has a penalty, or a loss with kinks; no
            student has the overlaps of the start, or `nodes` other replicates; or another argument is not as described.
    """
    model = needs(model, "one-pass SGD", even=False, smooth=True)
    eta, kappa, until = numbers = checked_run(model, eta, kappa, until, points, steps)
    if steps is not None and (steps & (steps - 1) or steps > _MOST * 16):
        raise InputError("steps", f"must be a power of two up to {_MOST * 16}, got steps={steps}")
    rule = make_rule(nodes, model, smooth_recipe(model, "sgd"))
    moments = _first_moments(model, start, rule)
    least = 1 if points % 2 else 2  # the number of all steps must be even

    def run(steps: int) -> StudentRun:
        return entry_by_entry(_student_runs)(model, moments, numbers, rule, points, max(steps, least))

    first, most = (least, _MOST) if steps is None and at_top_level(model, moments, numbers) else (steps or _TRACED,) * 2
    replicates = _after(start, refined(run, first, most, progress))
    return Trajectory(model, eta, kappa, until * jnp.linspace(0, 1, points, dtype=eta.dtype), replicates)


def _first_moments(model: Model, start: Any, rule: Rule) -> Moments:
    """Return the moments of a start in every replicate: those of given overlaps, or those at a trajectory's end."""
    if not isinstance(start, Trajectory):
        return repeated(start_moments(model, start), rule.replicates)
    end = indexed(start.replicates.moments, (slice(None), -1))
    (_, r, t), (K, J) = model.shape, model.law().tau.shape[:2]
    if {a.shape[1:] for a in jax.tree.leaves(end)} != {(K, r, r), (K, r, t), (K, r, J)}:
        raise InputError("start", "must be a trajectory of a model of the same shapes, or (R, Theta, m)")
    if (count := len(end.R)) != rule.replicates:
        text = f"must be a trajectory of {rule.replicates} replicates, as many as `nodes` have, got one of {count}"
        raise InputError("start", f"{text}: its error bars would be lost. Pass `nodes` of {count} replicates")
    return jax.tree.map(lambda a: a.astype(model.lam.dtype), end)


def _after(start: Any, run: StudentRun) -> StudentRun:
    """Return a run with the error of the steps, and a failure, of a trajectory that it continues."""
    if not isinstance(start, Trajectory):
        return run
    before = start.replicates
    error = jnp.maximum(before.step_error, run.step_error)
    failed = before.status > Status.max_steps
    status = jnp.where(failed, jnp.maximum(before.status, run.status), run.status)
    return eqx.tree_at(lambda r: (r.step_error, r.status), run, (error, status))


@program
def _student_runs(
    model: Model, starts: Moments, numbers: tuple[Array, Array, Array], rule: Rule, points: int, steps: int
) -> StudentRun:
    def run(pair: tuple[Replicate, Moments]) -> StudentRun:
        replicate, start = pair
        (eta, kappa, until), fixed = numbers, lax.stop_gradient((model, start, numbers))

        def state(s: Moments) -> tuple[Student, Student]:
            """Return the student and its rate."""
            f = forces(model, overlaps_of(model, s), replicate)
            velocity = drift(model, s, f, eta, kappa)
            slope = overlaps_of(model, velocity)
            error_rate = jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: jnp.sum(a * b), f.gradient, slope))
            return jax.jvp(lambda s, e: _student(model, s, e, kappa), (s, f.error), (velocity, error_rate))

        flow = _flow(model, eta, kappa, replicate)
        moments, (every, rates) = integrated(flow, start, until, points, steps, jax.checkpoint(state))
        student = indexed(every, slice(None, None, steps))
        # The same with half as many steps; if there is one between two points, it then spans two intervals.
        stride = 1 if steps > 1 else 2
        still = _flow(fixed[0], *fixed[2][:2], replicate)
        rough, _ = integrated(still, fixed[1], fixed[2][2], (points - 1) // stride + 1, stride * steps // 2)
        fine, law = indexed(lax.stop_gradient(moments), slice(None, None, stride)), fixed[0].law()
        step_error = _largest_change(jax.tree.map(jnp.subtract, fine, rough), rough, law) / 15
        end = lax.stop_gradient(indexed(moments, -1))
        jump, growth, size = _linearised(still, end)
        remaining = _largest_change(jump, end, law)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves((moments, every))]))
        is_steady = (remaining < _STEADY) & (growth < 10 * jnp.finfo(eta.dtype).eps ** 0.5 * size)
        status = jnp.where(is_steady, Status.converged, Status.max_steps)
        status = jnp.where(step_error < jnp.maximum(_TOL, 100 * jnp.finfo(eta.dtype).eps), status, Status.unresolved)
        status = jnp.where(finite, status, Status.nonfinite)
        return StudentRun(every, rates, status, student, moments, step_error, remaining, growth)

    return lax.map(run, (rule.stack, starts))


def _flow(model: Model, eta: Array, kappa: Array, replicate: Replicate) -> Callable[[Moments], Moments]:
    """Return the velocity of the moments as a function of them; reverse passes compute it again."""
    return jax.checkpoint(lambda s: drift(model, s, forces(model, overlaps_of(model, s), replicate), eta, kappa))


def _largest_change(change: Moments, s: Moments, law: SpectralLaw) -> Float[Array, ""]:
    """Return the largest change of moments s, relative to the lengths of student, teacher and encodings."""

    def largest(a: Float[Array, "*batch K a b"]) -> Float[Array, "*batch"]:
        return jnp.maximum(jnp.max(jnp.abs(a), (-1, -2, -3)), jnp.finfo(a.dtype).tiny)

    student = jnp.sqrt(largest(s.R))
    others = student, *(jnp.sqrt(largest(a)) for a in at_atoms(law, (law.pi, law.tau)))
    return jnp.max(
        jnp.stack([largest(a) / (student * b) for a, b in zip(jax.tree.leaves(change), others, strict=True)])
    )


@precise
def _linearised(flow: Callable[[Moments], Moments], s: Moments) -> tuple[Moments, Float[Array, ""], Float[Array, ""]]:
    """Return the way to the fixed point of the flow linearised at s, its fastest growth, and the size of its rates."""
    vector, unravel = ravel_pytree(s)
    velocity, along = jax.linearize(lambda v: ravel_pytree(flow(unravel(v)))[0], vector)
    rows = lax.map(along, jnp.eye(vector.size, dtype=vector.dtype))
    rows = jnp.where(jnp.all(jnp.isfinite(rows)), rows, 0.0)
    jump = -velocity @ pseudo_inverse(rows, rtol=_NULL)
    return unravel(jump), *_fastest_growth(rows)


def _fastest_growth(A: Float[Array, "n n"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the largest real part of an eigenvalue of A, and the norm of A.

    It is the limit of ``log |exp(t A)| / t``, which squaring reaches at t = 2^32 / |A|. A TPU has no routine for the
    eigenvalues of a matrix that is not symmetric.
    """
    size = jnp.linalg.norm(A)
    tiny = jnp.finfo(A.dtype).tiny

    def squared(_: Int[Array, ""], scaled: tuple[Array, Array]) -> tuple[Array, Array]:
        power, logarithm = scaled  # the matrix over a number, and the logarithm of that number
        power = power @ power
        largest = jnp.maximum(jnp.max(jnp.abs(power)), tiny)
        return power / largest, 2 * logarithm + jnp.log(largest)

    propagator = jax.scipy.linalg.expm(A / jnp.maximum(size, tiny))
    logarithm = lax.fori_loop(0, _SQUARINGS, squared, (propagator, jnp.zeros_like(size)))[1]
    return size * logarithm / 2.0**_SQUARINGS, size


@precise
def _student(model: Model, s: Moments, error: Array, kappa: Array) -> Student:
    """Return the student with given moments and test error."""
    (L, _, t), law, x = model.shape, model.law(), overlaps_of(model, s)
    R, Theta = jnp.tensordot(law.weights, s.R, 1), jnp.tensordot(law.weights, s.Theta, 1)
    gram = gram_of(model)
    along_teacher, along_encodings = (
        jnp.einsum("ai,ij,aj->", a, inverse_gram(g), a)
        for a, g in ((Theta, gram[:t, :t]), (x.m[:L].T, gram[t : t + L, t : t + L]))
    )
    risk = error + 0.5 * kappa * jnp.trace(R)
    return Student(R, Theta, x.m, x.q, x.theta, along_teacher, along_encodings, error, risk)
