"""Endless data: the minima of the population risk, which training reaches for alpha to infinity.

# notation: P = Q*^T Q* / d = C C^T; encodings p_l = sum_e P_le e_e on orthonormal directions; v, eta standard normals.

A minimum lies in the span of teacher and encodings, ``Q = Q* C^{-T} b^T + sqrt(d) sum_e e_e c_e^T``. The fields are
``h_l = sqrt(gamma_l) (b v_l + c^T eta_l) + m_l`` with ``m_l = sum_e P_le c_e``. In these coordinates nothing is
singular: the covariance of h given y, ``gamma_l c^T c``, has no smooth root at c = 0. Means of classes are further
rows of P.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from ..averages.moreau import expansion_at_nodes, gradient_at_nodes, loss_at_nodes
from ..averages.program import program
from ..averages.recipes import AnyNodes, make_rule, smooth_recipe
from ..averages.rules import Fields, Replicate, Rule, teacher_fields
from ..base.arrays import cholesky, either, indexed, precise
from ..base.derivatives import pseudo_inverse, with_root
from ..base.errors import Condition, InputError, require_kind, require_not_negative, settle, within
from ..base.results import Replicated, Status
from ..model.model import Model
from ..model.overlaps import Overlaps, branch_of, symmetric, vanished
from ..theory.potentials import over_nodes
from .flow import directions_of, encodings_on_directions, most_directions, needs_span, span_of, start_overlaps

_MOST_STEPS = 100
_SIZES = 2.0 ** np.arange(-16, 9)  # sizes of a start's fields, in units of `Model.field_scale`, that are tried
_KICK = 0.1  # step away from a saddle, relative to the student


class PopulationState(eqx.Module):
    """A minimum in every replicate of the averages: all arrays lead with that axis. See `PopulationPoint`."""

    R: Float[Array, "*R r r"]
    Theta: Float[Array, "*R r t"]
    m: Float[Array, "*R L r"]
    risk: Float[Array, "*R"]
    gen_error: Float[Array, "*R"]
    curvature: Float[Array, "*R"]
    residual: Float[Array, "*R"]
    status: Int[Array, "*R"]


class PopulationPoint(Replicated):
    """A minimum of the population risk. Numbers are means over replicates; see `error_bar` for their bars.

    Attributes:
        model, kappa: the setting.
        branch: "semantic", "positional", or None.
        replicates: the minimum in every replicate of the averages.
        R: Q^T Q / d. The q of `solve` is gamma_l R.
        Theta: Q^T Q* / d. The theta of `solve` is gamma_l Theta.
        m: Q^T p_l / sqrt(d).
        risk: ``E loss + kappa / 2 tr R``; the training loss of `solve` over alpha for large alpha.
        gen_error: test error, ``E loss``.
        curvature: smallest eigenvalue of the Hessian in directions of norm sqrt(d), inside and outside the span of
            teacher and encodings; rotations of the columns that change nothing are left out. It counts as a constant
            under `jax.grad`.
    """

    model: Model
    kappa: Float[Array, ""]
    replicates: PopulationState
    branch: str | None = eqx.field(static=True)
    batch_probe = "kappa", 0
    SETTING = "kappa", "branch"
    SHOWN: ClassVar = {
        "R": "Q^T Q / d",
        "Theta": "Q^T Q* / d",
        "m": "overlap with the encodings",
        "risk": "population risk, with the ridge",
        "gen_error": "",
        "curvature": "smallest eigenvalue of the Hessian, all directions included",
    }
    FLAGS = ("stable",)

    @property
    def stable(self) -> Bool[Array, "*batch"]:
        """Whether it is a minimum in all directions, not only in those of its branch."""
        return self.curvature > 0

    @property
    def title(self) -> str:
        kind = "minimum" if self.stable else "saddle"
        branch = f"{self.branch} " if self.branch else ""
        return f"{branch}{kind} of the population risk, kappa = {self.kappa:g}"


def population(
    model: Model, kappa: Any = 0.0, branch: str | None = "semantic", *, nodes: AnyNodes = None, start: Any = None
) -> PopulationPoint:
    """Return a minimum of the population risk ``E loss + kappa / 2 tr(Q^T Q) / d``, which is training on endless data.

    It is the limit of `solve` for alpha to infinity at ``lam = kappa alpha``; `lam` of the model does not matter. The
    fixed points of one-pass gradient descent with a small step are the same. Works under `jit`, `vmap` and `grad`;
    derivatives of every order in the model's numbers and in kappa follow from the implicit function theorem.

    Args:
        model: any smooth layer whose covariances have one eigenvalue each; a branch by name needs an even loss.
        kappa: ridge per sample, at least zero.
        branch: "semantic" (m is zero), "positional" (Theta is zero), or None, which leaves both free.
        nodes: recipe of the averages, or number of nodes; by default a tensor grid for at most four fields, else 2^15
            Sobol points. The student's fields are the tokens' fluctuations along the encodings. A rule for `model` fits
            if these have as many orthonormal directions as the student has columns, as at the standard setting.
        start: (Theta, m) as in `sgd`, or a `PopulationPoint`, from which descent begins. By default it begins at a
            minimum on the ray towards teacher and encodings. A student whose columns have tasks of their own needs a
            start for each of its minima.

    Returns:
        A `PopulationPoint`. Its status is `absent` if the student is zero in the directions of the branch, or if it
        overlaps with nothing there: without a teacher in the target (omega = 1) its direction is arbitrary. Theta has
        the sign of a student along the teacher, and m that of `solve`.

    Raises:
        InputError: kappa is negative; the branch has another name; the loss has kinks, or is not even for a branch by
            name; the model has a penalty or several eigenvalues; the teacher overlaps with encodings or means of
            classes; or no student has the overlaps of the start.
    """
    model = needs_span(model, "the population risk", even=branch is not None, independent=False)
    kappa, rule = require_not_negative(kappa, "kappa", model.lam.dtype), span_rule(model, nodes)
    return PopulationPoint(model, kappa, states_of(model, kappa, rule, branch, start), branch)


def states_of(
    model: Model, kappa: Float[Array, ""], rule: Rule, branch: str | None, start: Any = None
) -> PopulationState:
    """Return the minimum of a branch in every replicate of the averages."""
    if branch == "uninformed":
        raise InputError("branch", "must be 'semantic', 'positional' or None, got 'uninformed': minima lie in the span")
    named = branch_of(branch)
    free, place = named.free(model), None
    if start is not None:
        given = (start.mean.Theta, start.mean.m) if isinstance(start, PopulationPoint) else start
        requirement = "(Theta, m), numbers or arrays (r, t) and (L, r), with the means of classes (L + S, r)"
        require_kind(given, "start", tuple, requirement)
        if len(given) != 2:
            raise InputError("start", f"must be {requirement}, got {len(given)} entries")
        place = lax.stop_gradient(_place_of(model, kappa, rule, free, *start_overlaps(model, *given)))
        size, most = jnp.max(jnp.abs(place)), _SIZES[-1] * model.field_scale
        text = f"must overlap with what the branch leaves free, by fields of size at most {_SIZES[-1]:g}"
        place = within(place, settle([Condition((size > 0) & (size <= most), "start", problem=text)]))
    return _minima(model, kappa, rule, free, named.start(model).m, place)


@eqx.filter_jit
def _place_of(
    model: Model, kappa: Array, rule: Rule, free: Array, Theta: Float[Array, "r t"], m: Float[Array, "r J"]
) -> Float[Array, " n"]:
    """Return the coordinates of overlaps Theta and m^T in units of `Risk.unit`; zero in those that are not free."""
    risk = Risk.of(model, kappa, rule.replicate(0), free)
    b = solve_triangular(cholesky(span_of(model).pi), Theta.T, lower=True).T
    c = pseudo_inverse(risk.encodings, rtol=1e-6) @ m.T
    return risk.free * jnp.concatenate([jnp.ravel(b), jnp.ravel(c)]) / risk.unit


def span_rule(model: Model, nodes: AnyNodes) -> Rule:
    """Return the averages of `population`: over fluctuations along the encodings, and the teacher's fields."""
    # While jax traces the encodings, a rule that was made says how many directions they have.
    most = nodes.stack.shape[1] if isinstance(nodes, Rule) else most_directions(model)
    directions = directions_of(model) or most
    fields = Fields.of(model, student=directions)
    return make_rule(nodes, fields, smooth_recipe(fields, "population"))


class Risk(eqx.Module):
    """The population risk in one replicate of the averages, as a function of the coordinates (b, c) in one vector.

    Attributes:
        model, kappa, replicate: the setting.
        encodings: P, the encodings on orthonormal directions.
        unit: b and c in units of these make fields of size one, so that no search depends on the units of the data.
        free: one at the coordinates that the branch leaves free, zero at the others.
    """

    model: Model
    kappa: Float[Array, ""]
    replicate: Replicate
    encodings: Float[Array, "J e"]
    unit: Float[Array, " n"]
    free: Float[Array, " n"]

    @classmethod
    def of(cls, model: Model, kappa: Float[Array, ""], replicate: Replicate, free: Float[Array, " 2"]) -> Risk:
        """Make the risk with encodings on as many directions as the nodes of the replicate have."""
        law, (_, r, t), e = span_of(model), model.shape, replicate.shape[1]
        P, gamma = encodings_on_directions(law.tau, e), jnp.mean(law.gamma)
        sizes = jnp.concatenate([jnp.full(r * t, gamma), jnp.repeat(gamma + jnp.mean(P**2, 0), r)])
        is_free = jnp.concatenate([jnp.full(r * t, free[0]), jnp.full(e * r, free[1])])
        return cls(model, kappa, replicate, P, lax.stop_gradient(sizes**-0.5), is_free)

    def split(self, v: Float[Array, " n"]) -> tuple[Float[Array, "r t"], Float[Array, "e r"]]:
        """Return b and c of a vector of coordinates."""
        _, r, t = self.model.shape
        return v[: r * t].reshape(r, t), v[r * t :].reshape(-1, r)

    def at_nodes(self, model: Model, v: Float[Array, " n"], block: Any) -> tuple[Array, Array, Array]:
        """Return the student's fields, the teacher's, and the weights of one block, for the `model` of one kind."""
        (b, c), (L, _, t), sentence = self.split(v), model.shape, model.sentence
        eta, normals, weight = self.replicate.quadrature(block)
        h = jnp.einsum("at,ltn->lan", b, normals[:, :t]) + jnp.einsum("ea,len->lan", c, eta)
        m = self.encodings @ c
        m = m if len(m) == L else m[:L] + sentence.to_tokens(m[L:])
        h = jnp.sqrt(sentence.to_tokens(span_of(model).gamma))[:, None, None] * h + m[..., None]
        return h, teacher_fields(model, normals), sentence.share * weight

    @precise
    def error(self, v: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the test error."""

        def block_error(model: Model, block: Any) -> Array:
            h, y, weight = self.at_nodes(model, v, block)
            return jnp.sum(weight * loss_at_nodes(model, h, y))

        return over_nodes(self.model, self.replicate, block_error)

    def value(self, v: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the risk; v @ v is tr R."""
        return self.error(v) + 0.5 * self.kappa * (v @ v)

    def slope(self, w: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return the gradient in units of `unit` in the free coordinates, and the others, which are to be zero."""
        return self.free * jax.grad(lambda w: self.value(self.unit * w))(self.free * w) + (1 - self.free) * w

    def start(self, m: Float[Array, "J r"]) -> Float[Array, " n"]:
        """Return the lowest of the minima along a ray: towards the teacher, and the encodings in the direction of m.

        Without a minimum on the ray it is the end with the lower risk, in units of `unit` like the result.
        """
        semantic, _ = self.model.start_columns(combined=False)
        positional = pseudo_inverse(self.encodings, rtol=1e-6) @ m
        positional /= jnp.maximum(jnp.max(jnp.abs(positional)), jnp.finfo(m.dtype).tiny)
        ray = self.model.field_scale * self.free * jnp.concatenate([jnp.ravel(semantic), jnp.ravel(positional)])
        sizes = jnp.asarray(_SIZES, m.dtype)
        risks = lax.map(lambda size: self.value(self.unit * size * ray), sizes)
        padded = jnp.pad(risks, 1, constant_values=-jnp.inf)  # the ends of the ray are no minima
        is_minimum = (risks <= padded[:-2]) & (risks <= padded[2:])
        return ray * sizes[jnp.argmin(jnp.where(is_minimum | ~jnp.any(is_minimum), risks, jnp.inf))]

    def minimum(self, start: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return the minimum that descent reaches from a start, with its implicit derivatives, in units of `unit`.

        A student that vanishes is exactly zero.
        """
        w = _descended(lax.stop_gradient(self).at, lax.stop_gradient(start))
        return with_root(lambda w, risk: risk.slope(w), w, self, solve=_slope_solve)

    def at(self, w: Float[Array, " n"]) -> _Expansion:
        """Return the risk to second order in the free coordinates, in units of `unit`; see `without_rotations`."""

        def slope(w: Array) -> tuple[Array, tuple[Array, Array]]:
            value, gradient = jax.value_and_grad(lambda w: self.value(self.unit * w))(w)
            return gradient, (value, gradient)

        hessian, (value, gradient) = jax.jacfwd(slope, has_aux=True)(w)
        hessian = self.free[:, None] * symmetric(hessian) * self.free
        return _Expansion(value, self.free * gradient, self.without_rotations(w, hessian))

    @precise
    def outside(self, v: Float[Array, " n"]) -> Float[Array, "r r"]:
        """Return the Hessian of the risk in directions outside the span."""
        L, r, _ = self.model.shape

        def block_curvature(model: Model, block: Any) -> Array:
            h, y, weight = self.at_nodes(model, v, block)
            hessian = expansion_at_nodes(model, h, y)[2].reshape(L, r, L, r, -1)
            return jnp.einsum("l,lalbn,n->ab", model.sentence.to_tokens(span_of(model).gamma), hessian, weight)

        return over_nodes(self.model, self.replicate, block_curvature) + self.kappa * jnp.eye(r, dtype=v.dtype)

    def curvature(self, v: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the smallest eigenvalue of the Hessian in all directions, without rotations of the columns."""
        inside = self.without_rotations(v, jax.hessian(lambda v: self.value(v))(v))
        return jnp.minimum(jnp.linalg.eigvalsh(inside)[0], jnp.linalg.eigvalsh(self.outside(v))[0])

    def without_rotations(self, v: Float[Array, " n"], hessian: Float[Array, "n n"]) -> Float[Array, "n n"]:
        """Return a Hessian with a large curvature along the rotations of the columns that change nothing."""
        b, c = self.split(lax.stop_gradient(v))
        rotations = [jnp.concatenate([jnp.ravel(A @ b), jnp.ravel(c @ A.T)]) for A in self.model.generators]
        if not rotations:
            return hessian
        vectors, sizes, _ = jnp.linalg.svd(jnp.stack(rotations, 1), full_matrices=False)
        vectors = jnp.where(sizes > _null(v) * jnp.max(sizes), vectors, 0.0)
        return hessian + jnp.linalg.norm(hessian) * vectors @ vectors.T

    def sees_teacher(self, v: Float[Array, " n"]) -> Bool[Array, ""]:
        """Return whether the loss depends on the teacher; else a student along it has an arbitrary direction."""

        def block_changes(model: Model, block: Any) -> tuple[Array, Array]:
            h, y, weight = self.at_nodes(model, v, block)
            t = model.shape[2]
            scaling = jnp.concatenate([y[:, :t], jnp.zeros_like(y[:, t:])], 1)
            u, change = jax.jvp(lambda y: gradient_at_nodes(model, h, y), (y,), (scaling,))
            return jnp.sum(weight * u**2), jnp.sum(weight * change**2)

        size, change = over_nodes(self.model, self.replicate, block_changes)
        return change > jnp.finfo(v.dtype).eps ** 1.5 * size


def _slope_solve(change: Float[Array, " n"], w: Float[Array, " n"], risk: Risk) -> Float[Array, " n"]:
    """Return the step that changes the slope of the risk at w by `change`, without rotations that change nothing."""
    linear = jax.linearize(risk.slope, w)[1]

    # Its own derivatives are those of a solution of the linear equation: the Hessian here counts as constant.
    def solve(_: Any, y: Array) -> Array:
        hessian = risk.without_rotations(w, jax.jacfwd(linear)(jnp.zeros_like(y)))
        values, vectors = jnp.linalg.eigh(lax.stop_gradient(hessian))
        return _inverse_times(values, vectors, y)

    return lax.custom_linear_solve(linear, change, solve, symmetric=True)


class _Expansion(NamedTuple):
    """A function at one place, with its derivatives."""

    value: Float[Array, ""]
    gradient: Float[Array, " n"]
    hessian: Float[Array, "n n"]


def _descended(at: Any, start: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return the minimum that Newton's method reaches downhill, or zero if it shrinks to nothing.

    Steps take the curvature as positive, so that they lead away from saddles. Lengths are relative to the student, and
    risks to each other: nothing depends on units. Near zero the risk is even, and a Newton step cubes a small student.
    """
    eps, size = jnp.finfo(start.dtype).eps, jnp.linalg.norm(start)

    def body(s: tuple) -> tuple:
        w, here, radius, _, count = s
        values, vectors = jnp.linalg.eigh(here.hessian)
        step = -_inverse_times(jnp.abs(values), vectors, here.gradient)
        is_saddle = (values[0] < -(eps**0.5) * jnp.max(jnp.abs(values))) & (_length(step) < eps**0.25 * _length(w))
        kick = _KICK * _length(w) * vectors[:, 0]
        step = jnp.where(is_saddle, kick * jnp.where(kick @ here.gradient > 0, -1, 1), step)
        length = _length(step)
        trial = w + step * jnp.minimum(1.0, radius / jnp.maximum(length, jnp.finfo(w.dtype).tiny))
        there = at(trial)
        # Near the minimum the risk is constant up to rounding.
        is_down = there.value <= here.value + 100 * eps * jnp.abs(here.value)
        moved = (trial, there, 2 * radius, length / _length(w), count + 1)
        return either(is_down, moved, (w, here, jnp.minimum(radius, length) / 4, jnp.inf, count + 1))

    def unfinished(s: tuple) -> Array:
        w, *_, change, count = s
        return (change > eps**0.5) & (count < _MOST_STEPS) & (_length(w) > eps**0.5 * size)

    first = start, at(start), size / 2, jnp.asarray(jnp.inf, start.dtype), jnp.asarray(0)
    w = lax.while_loop(unfinished, body, first)[0]
    return jnp.where(_length(w) <= eps**0.5 * size, 0.0, w)


_length = jnp.linalg.norm


@program
def _minima(
    model: Model,
    kappa: Array,
    rule: Rule,
    free: Float[Array, " 2"],
    m: Float[Array, "J r"],
    place: Float[Array, " n"] | None,
) -> PopulationState:
    """Return the minima from a place, in units of `Risk.unit`, or from the ray towards the teacher and this m."""
    law, dtype = span_of(model), model.lam.dtype
    C = cholesky(law.pi)
    first = lax.stop_gradient(Risk.of(model, kappa, rule.replicate(0), free).start(m)) if place is None else place
    tiny, root = jnp.finfo(dtype).tiny, jnp.finfo(dtype).eps ** 0.5

    def state(start: Float[Array, " n"], replicate: Replicate) -> tuple[Array, PopulationState]:
        """Return the next start, which is this minimum with the signs of the first, and the minimum."""
        risk = Risk.of(model, kappa, replicate, free)
        frozen = lax.stop_gradient(risk)  # what is computed of it counts as constant under `jax.grad`
        w = risk.minimum(start)
        here = frozen.at(lax.stop_gradient(w))
        w = jnp.where(jnp.isfinite(here.value), w, jnp.nan)
        fixed, v = lax.stop_gradient(w), w * risk.unit
        (b, c), error = risk.split(v), risk.error(v)
        R, value = b @ b.T + c.T @ c, error + 0.5 * kappa * (v @ v)
        curvatures, vectors = jnp.linalg.eigh(here.hessian)
        residual = _length(_inverse_times(curvatures, vectors, here.gradient)) / jnp.maximum(_length(fixed), tiny)
        is_minimum = (residual < root) & (curvatures[0] > -root * curvatures[-1])
        gamma = law.gamma[:, None, None]
        x = Overlaps(gamma * (R + tiny), 0 * gamma * R, gamma * (b @ C.T), risk.encodings @ c)
        is_arbitrary = vanished(model, x, free) | (free[1] == 0) & ~frozen.sees_teacher(v)
        status = jnp.where(is_minimum, Status.converged, Status.max_steps)
        status = jnp.where(jnp.all(fixed == 0) | is_arbitrary, Status.absent, status)
        status = jnp.where(jnp.all(jnp.isfinite(fixed)), status, Status.nonfinite)
        numbers = R, b @ C.T, risk.encodings @ c, value, error, frozen.curvature(fixed * risk.unit), residual, status
        columns = zip(risk.split(fixed), risk.split(first), strict=True)
        # A start that was given is near its minimum, and another sign may be no minimum.
        is_ray = place is None
        signs = jnp.concatenate(
            [jnp.full(a.size, jnp.where(is_ray & (jnp.sum(a * at) < 0), -1, 1)) for a, at in columns]
        )
        is_start = jnp.any(fixed != 0) & jnp.all(jnp.isfinite(fixed))
        return jnp.where(is_start, signs * fixed, start), PopulationState(*numbers)

    # Teacher and encodings have no signs, and columns can be rotated. Every replicate therefore starts at the minimum
    # of the one before, and the first one twice.
    stack = jax.tree.map(lambda a: jnp.concatenate([a[:1], a]), rule.stack)
    return indexed(lax.scan(state, first, stack)[1], slice(1, None))


def _null(v: Float[Array, " n"]) -> float:
    """Return the relative size below which a number is zero."""
    return max(1e-9, 100 * float(jnp.finfo(v.dtype).eps))


def _inverse_times(
    values: Float[Array, " n"], vectors: Float[Array, "n n"], gradient: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Apply the inverse of a matrix with these eigenvalues and vectors, without directions in which nothing changes."""
    is_null = jnp.abs(values) <= _null(values) * jnp.max(jnp.abs(values))
    return (vectors / jnp.where(is_null, jnp.inf, values)) @ (vectors.T @ gradient)
