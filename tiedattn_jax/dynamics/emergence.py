"""Fluctuations of a student without overlaps, and which mechanism emerges from them, and when.

# notation: v = (b, c) the overlaps, ``Theta = b C^T`` with ``P = C C^T`` and ``m_l = sum_e P_le c_e`` on orthonormal
# directions of the encodings; u_l gradients of the loss in the fields; nu_l the whitened fields of the teacher.

A student that knows neither teacher nor encodings stays so in the limit of high dimension, though its size R changes.
In finite dimension v is of order 1 / sqrt(d). It obeys a linear equation with noise, and its covariance W / d moves as

    dW/dt = -eta (H W + W H) + eta^2 D,    H = d^2 (E loss + kappa / 2 tr R) / dv^2,    D = E S S^T,
    S = sum_l u_l (nu_l, xi_l + P_l),      xi_l the fluctuations of token l along the directions,

from ``W = R x 1`` for a random student. A negative eigenvalue of H makes the mechanism grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..averages.moreau import gradient_at_nodes
from ..averages.program import at_top_level, program
from ..averages.recipes import AnyNodes, make_rule, smooth_recipe
from ..averages.rules import Replicate, Rule
from ..base.arrays import cholesky, indexed, inverse, positive_definite
from ..base.errors import (
    InputError,
    as_array,
    as_flag,
    is_concrete,
    require_choice,
    require_number,
    require_positive,
)
from ..base.progress import Progress
from ..base.report import Description, picture, rows_of
from ..base.results import Status
from ..model.model import Model
from ..model.overlaps import Overlaps, symmetric
from ..theory.observables import error_in_block, fields_in_block
from ..theory.potentials import over_nodes
from ..theory.quantities import Quantity
from .crossings import first_crossing
from .flow import (
    Integrated,
    OnePass,
    Span,
    checked_run,
    directions_of,
    encodings_on_directions,
    forces,
    integrated,
    is_direction,
    most_directions,
    needs_span,
    refined,
    span_of,
)

MECHANISMS = "encodings", "teacher"
_TOL = 1e-4  # error of the steps, relative to the variances, above which they do not resolve them
_MOST = 64  # steps between two points: the most that are tried


class Fluctuations(eqx.Module):
    """A student without overlaps, at every time.

    Attributes:
        R: Q^T Q / d.
        encodings, teacher: d times the mean square of the student's projection on these directions, a part of tr R.
        growth_encodings, growth_teacher: rates at which a small overlap grows; eta kappa, of the ridge, is
            subtracted.
    """

    R: Float[Array, "*T r r"]
    encodings: Float[Array, "*T"]
    teacher: Float[Array, "*T"]
    growth_encodings: Float[Array, "*T"]
    growth_teacher: Float[Array, "*T"]


class FluctuationRun(Integrated):
    """An integrated student with its `fluctuations` at every time of the result."""

    fluctuations: Fluctuations


class Emergence(OnePass):
    """Fluctuations of a student without overlaps that learns by one-pass stochastic gradient descent.

    Numbers are means over the replicates of the averages; `stderr` has their error bars.

    Attributes:
        model, eta, kappa: arguments of `emergence`.
        t: times, steps / d.
        replicates: the fluctuations in every replicate.
    """

    SHOWN: ClassVar = {
        "R": "tr R",
        "encodings": "d times the mean square of the overlap",
        "growth_encodings": "growth rate of this overlap, eta kappa subtracted",
        "teacher": "d times the mean square of the overlap",
        "growth_teacher": "growth rate of this overlap, eta kappa subtracted",
    }
    FLAGS = ("first",)
    replicates: FluctuationRun

    @property
    def measured(self) -> Fluctuations:
        """The fluctuations of all replicates, at every time."""
        return self.replicates.fluctuations

    @property
    def first(self) -> str:
        """The mechanism that grows faster at the end, "encodings" or "teacher".

        It emerges first in the limit of large d. For one dimension compare `time` of both mechanisms.
        """
        end = indexed(self.mean, -1)
        return MECHANISMS[int(end.growth_teacher > end.growth_encodings)]

    def time(self, mechanism: str, d: Any, share: Any = 0.1) -> Quantity:
        """Return the time at which the projection of a typical run on a mechanism reaches a share of its size.

        In the linear equation the mean square of the projection over runs is the variance. The time at which it reaches
        ``share * tr R`` grows as ``log(d) / (2 growth)``. Single runs scatter around it by about ``1 / growth``.

        Args:
            mechanism: "encodings" or "teacher".
            d: dimension.
            share: share of tr R, between 0 and 1. The linear equation describes small shares.

        Returns:
            A `Quantity` with the name `t`; its status is `absent` if the variance does not get there, and `imprecise`
            if the steps do not resolve it. The time is looked for in every step, so it does not depend on `points`.

        Raises:
            InputError: the mechanism has another name, d is not positive, or the share is not between 0 and 1.
        """
        mechanism = require_choice(mechanism, "mechanism", MECHANISMS)
        d = require_positive(d, "d", self.eta.dtype)
        share = require_number(share, "share", "between 0 and 1", lambda v: (v > 0) & (v < 1), self.eta.dtype)

        def excess(s: Fluctuations) -> Array:
            return getattr(s, mechanism) / d - share * jnp.trace(s.R)

        event = f"{mechanism} above {share:g} of tr R" if at_top_level(share) else mechanism
        return first_crossing(excess, self.replicates, self.t, event)

    plot = picture(
        "simulations.emergence_figure",
        "the mean squares of the overlaps and their growth rates against time",
        "square",
        "growth",
    )

    @property
    def title(self) -> str:
        return (
            f"Fluctuations of a student without overlaps at t = {self.t[-1]:g}, fastest growth along the {self.first}"
        )

    def describe(self) -> Description:
        ends = ({name: curve[-1] for name, curve in curves.items()} for curves in self.shown())
        values, bars = ({"size": np.trace(end.pop("R"))} | end for end in ends)
        return Description(self.title, self.status_name, rows_of(values, bars, meanings={"size": "tr R"} | self.SHOWN))


def emergence(
    model: Model,
    R: Any,
    eta: Any,
    until: Any,
    *,
    kappa: Any = 0.0,
    orthogonal: bool = False,
    nodes: AnyNodes = None,
    points: int = 51,
    steps: int | None = None,
    progress: Progress = None,
) -> Emergence:
    """Follow the fluctuations of a student without overlaps under one-pass stochastic gradient descent.

    Args:
        model: any smooth, even layer with independent tokens whose covariances have one eigenvalue each.
        R: size of the random student at the start, ``Q^T Q / d``: a number, or an array (r, r).
        eta: learning rate.
        until: time at the end, steps / d.
        kappa: ridge per sample.
        orthogonal: whether the student starts exactly orthogonal to the teacher and the encodings, instead of with the
            overlaps of a random student.
        nodes: recipe of the averages, or number of nodes; by default a tensor grid for up to four fields, else 2^13
            Sobol points.
        points: number of times, from zero to `until`.
        steps: Runge-Kutta steps between two of them. By default as many as resolve the variances to 1e-4, at most 64;
            inside `jit`, `vmap` and `grad` there is one. If the number of all steps is odd, they are halved, because
            their error is that to steps twice as long.
        progress: as in `sgd`.

    Returns:
        An `Emergence`. Its `time` gives the time at which a mechanism emerges in dimension d.

    Raises:
        InputError: R is not positive definite, eta or until is not positive, kappa is negative; the loss has kinks or
            is not even; the model has a penalty, classes of tokens or several eigenvalues.
    """
    model = needs_span(model, "fluctuations of one-pass SGD")
    r, dtype = model.shape[1], model.lam.dtype
    eta, kappa, until = numbers = checked_run(model, eta, kappa, until, points, steps)
    rule = make_rule(nodes, model, smooth_recipe(model, "sgd"))
    R = as_array(R, "R", dtype)
    R = R * jnp.eye(r, dtype=dtype) if R.ndim == 0 else R
    if R.shape != (r, r):
        raise InputError("R", f"must be a number or of shape {(r, r)}, got shape {R.shape}")
    if is_concrete(R) and not (np.allclose(R, R.T) and np.linalg.eigvalsh(np.asarray(R))[0] > 0):
        raise InputError("R", f"must be positive definite, got R={np.asarray(R).tolist()}")
    if not is_concrete(R):
        R = jnp.where(jnp.allclose(R, R.T) & positive_definite(R), R, jnp.nan)
    directions = directions_of(model) or most_directions(model)

    is_random = jnp.asarray(0.0 if as_flag(orthogonal, "orthogonal") else 1.0, dtype)

    def run(steps: int) -> FluctuationRun:
        return _fluctuation_runs(model, R, is_random, numbers, directions, rule, points, steps)

    first = steps or 1
    if first * (points - 1) % 2:  # every second place must end a longer step
        first *= 2
    most = _MOST if steps is None and at_top_level(model, R, eta, kappa, until) else first
    replicates = refined(run, first, most, progress)
    return Emergence(model, eta, kappa, until * jnp.linspace(0, 1, points, dtype=dtype), replicates)


@program
def _fluctuation_runs(
    model: Model,
    R: Float[Array, "r r"],
    is_random: Float[Array, ""],
    numbers: tuple[Array, Array, Array],
    directions: int,
    rule: Rule,
    points: int,
    steps: int,
) -> FluctuationRun:
    """Return the fluctuations in every replicate.

    R is integrated first. Steps of the linear equation then span two intervals of the path of R, so that every stage of
    a Runge-Kutta step has its coefficients, and these are computed once for every point. In steps together with R they
    would be computed three times as often. At the standard setting this takes 1.6 times as long.
    """
    eta, kappa, until = numbers
    count, law = 2 * steps * (points - 1), span_of(model)
    P = encodings_on_directions(law.tau, directions)
    exist = jnp.concatenate([jnp.ones(model.shape[2], P.dtype), is_direction(P)])

    def run(replicate: Replicate) -> FluctuationRun:
        size_rate, coefficients_at, fluctuations = _equations(model, eta, kappa, replicate, law, P, exist)
        W = is_random * jnp.kron(R, jnp.diag(exist))
        sizes, _ = integrated(jax.checkpoint(size_rate), R, until, count + 1, 1)
        coefficients = lax.map(jax.checkpoint(coefficients_at), sizes)
        fine = _covariances(coefficients, W, 2 * until / count)
        R_path, at = indexed((sizes, coefficients), slice(None, None, 2))
        every, slopes = lax.map(lambda step: fluctuations(*step), (fine, R_path, at, lax.map(size_rate, R_path)))
        # The same with steps twice as long.
        rough = _covariances(indexed(coefficients, slice(None, None, 2)), W, 4 * until / count)
        error = jnp.max(jnp.abs(rough - fine[::2])) / jnp.max(jnp.abs(fine)) / 15
        resolved = error < jnp.maximum(_TOL, 100 * jnp.finfo(eta.dtype).eps)
        status = jnp.where(resolved, Status.converged, Status.unresolved)
        status = jnp.where(jnp.all(jnp.isfinite(fine)), status, Status.nonfinite)
        return FluctuationRun(every, slopes, status.astype(jnp.int32), indexed(every, slice(None, None, steps)))

    return rule.each(run)


class _Coefficients(NamedTuple):
    """The linear equation ``dW/dt = drift W + W drift + noise``."""

    drift: Float[Array, "*T n n"]
    noise: Float[Array, "*T n n"]

    def rate(self, W: Float[Array, "n n"]) -> Float[Array, "n n"]:
        return 2 * symmetric(self.drift @ W) + self.noise


def _covariances(coefficients: _Coefficients, W: Float[Array, "n n"], h: Float[Array, ""]) -> Float[Array, "T n n"]:
    """Return W at every second time of the coefficients, in steps whose stages fall on these times.

    Args:
        coefficients: coefficients at equal times.
        h: two intervals between these times.
    """
    count = (len(coefficients.drift) - 1) // 2
    stages = 2 * np.arange(count)[:, None, None] + [0, 1, 1, 2]
    inputs = (indexed(coefficients, stages),)
    return integrated(lambda W, at: at.rate(W), W, count * h, count + 1, 1, inputs=inputs)[0]


def _equations(
    model: Model,
    eta: Float[Array, ""],
    kappa: Float[Array, ""],
    replicate: Replicate,
    law: Span,
    P: Float[Array, "L e"],
    exist: Float[Array, " _"],
) -> tuple[Callable, Callable, Callable]:
    """Return the equations of the module's docstring in one replicate of the averages, as three functions.

    Args:
        P: encodings on orthonormal directions.
        exist: one at the directions of teacher and encodings; zero where dependent encodings have no direction.
    """
    (_, r, t), (_, e), gamma = model.shape, P.shape, law.gamma
    C, zero, eye = cholesky(law.pi), jnp.zeros(r * (t + e), P.dtype), jnp.eye(r, dtype=P.dtype)

    def overlaps(R: Float[Array, "r r"], v: Float[Array, " n"]) -> Overlaps:
        """Return the overlaps of a student whose part without overlaps has the size R."""
        v = v.reshape(r, -1)
        q = gamma[:, None, None] * (R + v @ v.T)
        return Overlaps(q, jnp.zeros_like(q), gamma[:, None, None] * (v[:, :t] @ C.T), P @ v[:, t:].T)

    def size_rate(R: Float[Array, "r r"]) -> Float[Array, "r r"]:
        """Return the derivative of R in time."""
        f = forces(model, overlaps(R, zero), replicate)
        A = 2 * jnp.einsum("l,lab->ab", gamma, symmetric(f.gradient.q)) + kappa * eye
        return -2 * eta * symmetric(A @ R) + eta**2 * jnp.einsum("l,lab->ab", gamma, f.noise)

    def coefficients(R: Float[Array, "r r"]) -> _Coefficients:
        """Return the coefficients of the linear equation for a student of size R."""
        whiten, is_encoding = inverse(C), jnp.diag(exist.at[:t].set(0.0))

        def block_sums(model: Model, block: Any) -> tuple[Array, Array]:
            def error(v: Float[Array, " n"]) -> Float[Array, ""]:
                return error_in_block(model, overlaps(R, v), replicate, block)

            h, y, weight = fields_in_block(model, overlaps(R, zero), replicate, block)
            u = gradient_at_nodes(model, h, y)
            S = jnp.einsum("lan,ltn->atn", u, jnp.einsum("st,ltn->lsn", whiten, y[:, :t]))
            S = jnp.concatenate([S, jnp.einsum("lan,le->aen", u, P)], 1).reshape(len(zero), -1)
            # The fluctuations of the tokens along the encodings do not depend on the fields of this student.
            square = jnp.einsum("l,lan,lbn,n->ab", gamma, u, u, weight)
            return jax.hessian(error)(zero), (weight * S) @ S.T + jnp.kron(square, is_encoding)

        hessian, D = over_nodes(model, replicate, block_sums)
        return _Coefficients(-eta * (hessian + kappa * jnp.eye(len(D), dtype=D.dtype)), eta**2 * D)

    def fluctuations(
        W: Float[Array, "n n"], R: Float[Array, "r r"], at: _Coefficients, rate: Float[Array, "r r"]
    ) -> tuple[Fluctuations, Fluctuations]:
        """Return variances and growth rates of the two mechanisms, and the derivatives of R and the variances."""
        W, slope, drift = (a.reshape(r, t + e, r, t + e) for a in (W, at.rate(W), at.drift))

        def growth(part: slice) -> Array:
            """Return the largest eigenvalue of the drift; directions that do not exist get the lowest one."""
            there = exist[part]
            block = there[:, None, None] * drift[:, part, :, part] * there
            block -= jnp.linalg.norm(drift) * jnp.einsum("ab,ij->aibj", eye, jnp.diag(1 - there))
            return jnp.linalg.eigvalsh(block.reshape(2 * (r * len(there),)))[-1]

        parts = slice(t, None), slice(t)
        variances, slopes = ([jnp.einsum("aiai->", a[:, part, :, part]) for part in parts] for a in (W, slope))
        zeros = [jnp.zeros_like(a) for a in slopes]
        return Fluctuations(R, *variances, *map(growth, parts)), Fluctuations(rate, *slopes, *zeros)

    return size_rate, coefficients, fluctuations
