"""The equations of one-pass stochastic gradient descent: drift and noise of the student's second moments.

# notation: eta rate, kappa ridge per sample, t = steps / d. For every atom of the spectrum R (r, r), Theta (r, t) and
# M (r, J) are the second moments of the student's entries, with the teacher's, and with those of the encodings.
# w, gamma, tau, pi, cross are those of the law.

The overlaps are linear in these moments, and the test error E is a function of the overlaps. The chain rule gives the
mean step of an entry q_i of the student,

    -eta (A q_i + B pi_i + C tau_i),   A = 2 sum_l gamma_l dE/dq_l + kappa,  B = sum_l gamma_l dE/dtheta_l,  C = dE/dm,

and the moments move as this step says. A step also has noise; its variance eta^2 sum_l gamma_l E[u_l u_l^T], with the
gradients u_l of the loss in the fields, adds to R.

Before the equations come the classical Runge-Kutta method of fourth order, with equal steps, and the directions of the
encodings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from ..averages.moreau import gradient_at_nodes
from ..averages.rules import Replicate
from ..base.arrays import AnyArray, positive_definite, precise, spread_to
from ..base.derivatives import pseudo_inverse, with_root
from ..base.errors import (
    INT32,
    Condition,
    InputError,
    as_array,
    is_concrete,
    require_count,
    require_kind,
    require_not_negative,
    require_positive,
    settle,
    with_values,
    within,
)
from ..base.progress import Progress, reporter
from ..base.results import Replicated, Status
from ..model.checks import needs
from ..model.law import SpectralLaw
from ..model.model import Model
from ..model.overlaps import Overlaps, symmetric
from ..theory.observables import error_in_block, fields_in_block
from ..theory.potentials import over_nodes

StateT = TypeVar("StateT")
_SAME = 1e-6  # relative difference below which numbers agree
_NO_DIRECTION = 1e-6  # square of the encodings along a direction, relative to the largest, below which it is none


class Integrated(eqx.Module):
    """An integrated flow in every replicate of the averages: all arrays lead with that axis.

    Attributes:
        every, rate: the state after every step, and its derivative in time.
        status: `Status`, which says whether the steps resolve the states.
    """

    every: Any
    rate: Any
    status: Int[AnyArray, "*R"]


AnyRun = TypeVar("AnyRun", bound=Integrated)


class OnePass(Replicated):
    """A result of one-pass stochastic gradient descent with rate eta and ridge kappa, at times t."""

    batch_probe = "t", 1
    SETTING = "eta", "kappa", "t"
    model: Model
    eta: Float[Array, "*batch"]
    kappa: Float[Array, "*batch"]
    t: Float[Array, "*batch T"]


# The place of every stage, and its weight, in units of a step.
_STAGES = np.array([[0.0, 1 / 6], [1 / 2, 1 / 3], [1 / 2, 1 / 3], [1.0, 1 / 6]])


def integrated(
    flow: Callable[..., StateT],
    start: StateT,
    until: Float[Array, ""],
    points: int,
    steps: int,
    read: Callable[[StateT], Any] = lambda s: None,
    inputs: tuple = (),
) -> tuple[StateT, Any]:
    """Return the states at `points` equal times from zero to `until`, and what is read of every step.

    Args:
        flow: velocity of a state, a function of it and of the inputs.
        steps: number of steps between two of the times.
        read: function of the start, and of the state after every step.
        inputs: trees of what the velocity depends on at the four stages of every step, (points - 1, steps, 4, ...).
    """
    h = until / ((points - 1) * steps)

    def step(s: StateT, inputs: tuple) -> tuple[StateT, Any]:
        def stage(so_far: tuple[StateT, StateT], at: tuple) -> tuple[tuple[StateT, StateT], None]:
            coefficients, inputs = at
            place, weight = h * coefficients
            velocity = flow(optax.tree.add_scale(s, place, so_far[0]), *inputs)
            return (velocity, optax.tree.add_scale(so_far[1], weight, velocity)), None

        rest = jax.tree.map(jnp.zeros_like, s)
        return lax.scan(stage, (rest, s), (jnp.asarray(_STAGES, h.dtype), inputs))[0][1], read(s)

    def interval(s: StateT, inputs: tuple) -> tuple[StateT, tuple[StateT, Any]]:
        end, readings = lax.scan(step, s, inputs, length=steps)
        return end, (s, readings)

    end, (path, readings) = lax.scan(interval, start, inputs, length=points - 1)
    readings = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), readings)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), (path, readings), (end, read(end)))


def refined(run: Callable[[int], AnyRun], least: int, most: int, progress: Progress) -> AnyRun:
    """Return ``run(steps)`` for the first number of steps that resolves it: `least`, or four times as many, and so on.

    Args:
        run: function of the number of steps whose result has a status for every replicate.
        most: number of steps from which on the result is returned as it is.
        progress: as in `base.progress`; counts runs.
    """
    done, steps, report = 0, least, reporter(progress, "runs")
    while True:
        report(done, done + 1)
        result, done = run(steps), done + 1
        if steps >= most or not np.any(np.isin(result.status, (Status.unresolved, Status.nonfinite))):
            report(done, done)
            return result
        steps *= 4


class Span(NamedTuple):
    """Law of tokens whose covariances are multiples of the identity, with the atoms of the spectrum in one.

    Attributes:
        gamma: variances of the tokens, or of their classes.
        tau: inner products of the encodings, followed by the means of the classes.
        pi: inner products of the teacher's columns, over d.
    """

    gamma: Float[Array, " S"]
    tau: Float[Array, "J J"]
    pi: Float[Array, "t t"]


def span_of(model: Model) -> Span:
    """Return the law of a model that `needs_span` lets pass."""
    law = model.law()
    return Span(*(jnp.tensordot(law.weights, a, 1) for a in (law.gamma, law.tau, law.pi)))


def needs_span(model: Model, purpose: str, *, even: bool = True, independent: bool = True) -> Model:
    """Check that what a student learns lies in the span of teacher and encodings, and that its risk is smooth.

    Return the model as `check` does.

    Raises:
        InputError: as `needs`, whose message says `purpose`.
    """
    return needs(model, purpose, even=even, smooth=True, independent=independent, orthogonal=True, same=("gamma",))


def checked_run(
    model: Model, eta: Any, kappa: Any, until: Any, points: int, steps: int | None
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Check what one-pass gradient descent is asked for; return eta, kappa and the time at the end."""
    dtype = model.lam.dtype
    eta, until = require_positive(eta, "eta", dtype), require_positive(until, "until", dtype)
    kappa = require_not_negative(kappa, "kappa", dtype)
    require_count(points, "points", 2, INT32)
    if steps is not None:
        require_count(steps, "steps", maximum=INT32)
    return eta, kappa, until


def directions_of(model: Model) -> int | None:
    """Return the number of orthonormal directions of the encodings; None while jax traces the law that has them."""
    encodings = getattr(model, "encodings", None)
    tau = span_of(model).tau if encodings is None else encodings
    if not is_concrete(tau):
        return None
    with with_values():
        values = np.asarray(tau) if encodings is None else np.asarray(encodings) @ np.asarray(encodings).T
        return max(1, int(np.linalg.matrix_rank(values, hermitian=True, tol=_NO_DIRECTION * np.abs(values).max())))


def most_directions(model: Model) -> int:
    """Return the largest number of orthonormal directions that the encodings of a traced model can have."""
    encodings = getattr(model, "encodings", None)
    return span_of(model).tau.shape[0] if encodings is None else min(encodings.shape)


def encodings_on_directions(tau: Float[Array, "J J"], e: int) -> Float[Array, "J {e}"]:
    """Return encodings on e orthonormal directions: P with ``P P^T = tau``.

    The derivative is for changes of tau that keep its rank.
    """
    values, vectors = jnp.linalg.eigh(lax.stop_gradient(tau))
    P = vectors[:, -e:] * jnp.sqrt(jnp.maximum(values[-e:], 0.0))

    def solve(change: Array, P: Array, tau: Array) -> Float[Array, "L e"]:
        inverse_P = pseudo_inverse(P, rtol=1e-6)
        step = change @ inverse_P.T
        return step - 0.5 * P @ inverse_P @ step  # of all steps that are right, one without a rotation

    return with_root(lambda P, tau: P @ P.T - tau, P, tau, solve=solve)


def is_direction(P: Float[Array, "L e"]) -> Float[Array, " e"]:
    """Return one for the columns of `encodings_on_directions` that are not zero, and zero for the others."""
    squares = jnp.sum(P**2, 0)
    return (squares > _NO_DIRECTION * jnp.max(squares)).astype(P.dtype)


class Moments(eqx.Module):
    """Second moments of the student at every atom of the spectrum: with itself, the teacher and the encodings."""

    R: Float[Array, "*batch K r r"]
    Theta: Float[Array, "*batch K r t"]
    M: Float[Array, "*batch K r J"]


class Forces(NamedTuple):
    """Test error at some overlaps, its gradient, and the second moments of the gradients of the loss, (S, r, r)."""

    error: Float[Array, ""]
    gradient: Overlaps
    noise: Float[Array, "S r r"]


@precise
def overlaps_of(model: Model, s: Moments) -> Overlaps:
    """Return the overlaps of a student with given moments; its response V does not matter here and is zero."""
    law = model.law()
    share = law.weights[:, None] * law.gamma
    q = jnp.einsum("kl,kab->lab", share, s.R)
    theta, m = jnp.einsum("kl,kat->lat", share, s.Theta), jnp.einsum("k,kaj->ja", law.weights, s.M)
    return Overlaps(q, jnp.zeros_like(q), theta, m)


def forces(model: Model, x: Overlaps, replicate: Replicate) -> Forces:
    """Return the average over the nodes of a replicate of all that the equations need."""

    def block_sums(model: Model, block: Any) -> Forces:
        error, gradient = jax.value_and_grad(lambda x: error_in_block(model, x, replicate, block))(x)
        h, y, weight = fields_in_block(model, x, replicate, block)
        u = gradient_at_nodes(model, h, y)
        square = model.sentence.share * jnp.sum(u[:, :, None] * u[:, None] * weight, -1)
        return Forces(error, gradient, model.sentence.to_classes(square))

    return over_nodes(model, replicate, block_sums)


@precise
def drift(model: Model, s: Moments, f: Forces, eta: Float[Array, ""], kappa: Float[Array, ""]) -> Moments:
    """Return the derivatives of the moments in time t = steps / d."""
    law, g, eye = model.law(), f.gradient, jnp.eye(s.R.shape[-1], dtype=s.R.dtype)
    A = 2 * jnp.einsum("kl,lab->kab", law.gamma, symmetric(g.q)) + kappa * eye
    B = jnp.einsum("kl,lat->kat", law.gamma, g.theta)
    C = g.m.T
    Theta = A @ s.Theta + B @ law.pi + C @ law.cross
    M = A @ s.M + B @ jnp.swapaxes(law.cross, 1, 2) + C @ law.tau
    step = A @ s.R + B @ jnp.swapaxes(s.Theta, 1, 2) + C @ jnp.swapaxes(s.M, 1, 2)
    noise = jnp.einsum("kl,lab->kab", law.gamma, f.noise)
    return at_atoms(law, Moments(-2 * eta * symmetric(step) + eta**2 * noise, -eta * Theta, -eta * M))


def at_atoms(law: SpectralLaw, values: StateT) -> StateT:
    """Return values at every atom, and zero at atoms without weight: they do not matter, and stay at zero."""
    return jax.tree.map(lambda a: jnp.where(spread_to(law.weights > 0, a), a, 0.0), values)


def inverse_gram(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return the pseudo-inverse of inner products of vectors; the lengths of the vectors do not matter."""
    sizes = lengths_of(gram)
    unit = sizes[:, None] * sizes
    return pseudo_inverse(gram / unit, hermitian=True) / unit


def lengths_of(gram: Float[Array, "n n"]) -> Float[Array, " n"]:
    """Return the lengths of vectors from their inner products; one for a vector of length zero."""
    squares = jnp.diagonal(gram)
    return jnp.sqrt(jnp.where(squares > 0, squares, 1.0))


def gram_of(model: Model) -> Float[Array, "n n"]:
    """Return the inner products of the teacher's columns, over d, and of the encodings."""
    law = model.law()
    moments = jnp.block([[law.pi, jnp.swapaxes(law.cross, 1, 2)], [law.cross, law.tau]])
    return jnp.tensordot(law.weights, moments, 1)


@precise
def start_overlaps(model: Model, Theta: Any, m: Any) -> tuple[Float[Array, "r t"], Float[Array, "r J"]]:
    """Return the overlaps (Theta, m^T) of a start as arrays, from numbers or arrays as in `sgd`.

    They are NaN if jax traces them and no student has them.

    Raises:
        InputError: shapes do not fit, or no student has these overlaps.
    """
    (_, r, t), law, dtype, gram = model.shape, model.law(), model.lam.dtype, gram_of(model)
    Theta, m = (as_array(a, "start", dtype) for a in (Theta, m))
    semantic, positional = model.start_columns(combined=True)
    Theta = Theta if Theta.ndim else Theta * semantic
    if m.ndim < 2:  # a student in the direction of the first encoding
        along = jnp.where(gram[t, t] > 0, gram[t:, t] / jnp.where(gram[t, t] > 0, gram[t, t], 1.0), 1.0)
        m = along[:, None] * (m if m.ndim else m * positional)
    for name, a, shape in (("Theta", Theta, (r, t)), ("m", m, (law.tau.shape[1], r))):
        if a.shape != shape:
            raise InputError("start", f"must have {name} of shape {shape}, got shape {a.shape}")
    overlap, lengths = jnp.concatenate([Theta, m.T], 1), lengths_of(gram)
    gap, largest = (jnp.max(jnp.abs(a) / lengths) for a in (overlap @ inverse_gram(gram) @ gram - overlap, overlap))
    text = (
        "must have overlaps that a student can have (m_1 = -m_2 if p_1 = -p_2, and zero with a zero encoding): "
        "or give m of the first encoding alone"
    )
    holds = Condition(gap <= _SAME * largest, "start", overlap, problem=text)
    overlap = within(overlap, settle([holds]))
    return overlap[:, :t], overlap[:, t:]


@precise
def start_moments(model: Model, start: Any) -> Moments:
    """Return the moments of a student ``Q = Q* B^T + sqrt(d) p C^T + G`` with entries of G independent of the atom.

    Args:
        start: (R, Theta, m) as in `sgd`; they determine B, C and the covariance of G.

    Raises:
        InputError: `start` is no such tuple, or no student has these overlaps.
    """
    requirement = "(R, Theta, m), numbers or arrays (r, r), (r, t) and (L, r)"
    require_kind(start, "start", tuple, requirement)
    if len(start) != 3:
        raise InputError("start", f"must be {requirement}, got {len(start)} entries")
    (_, r, t), law, R = model.shape, model.law(), as_array(start[0], "start", model.lam.dtype)
    overlap = jnp.concatenate(start_overlaps(model, *start[1:]), 1)
    R = R if R.ndim else R * jnp.eye(r, dtype=R.dtype)
    if R.shape != (r, r):
        raise InputError("start", f"must have R of shape {(r, r)}, got shape {R.shape}")
    mix = overlap @ inverse_gram(gram_of(model))
    explained = mix @ overlap.T
    shown = [np.asarray(a).tolist() if is_concrete(a) else "" for a in (R, explained)]
    symmetric_text = f"must have R symmetric, got R={shown[0]}"
    larger_text = f"must have R larger than what Theta and m alone make of it, {shown[1]}, got R={shown[0]}"
    is_symmetric = jnp.max(jnp.abs(R - R.T)) <= _SAME * jnp.max(jnp.abs(R))
    traced = settle(
        [
            Condition(is_symmetric, "start", problem=symmetric_text),
            Condition(positive_definite(R - explained), "start", problem=larger_text),
        ]
    )
    rest = within(R - explained, traced)
    B, C = mix[:, :t], mix[:, t:]
    crossed = jnp.swapaxes(law.cross, 1, 2)
    Thetas, Ms = B @ law.pi + C @ law.cross, B @ crossed + C @ law.tau
    return at_atoms(law, Moments(Thetas @ B.T + Ms @ C.T + rest, Thetas, Ms))
