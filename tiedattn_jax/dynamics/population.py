"""Endless data: the minima of the population risk, which training reaches for alpha to infinity.

# notation: P = Q*^T Q* / d = C C^T; encodings p_l = sum_e P_le e_e on orthonormal directions; v, eta standard normals.

A minimum lies in the span of teacher and encodings, ``Q = Q* C^{-T} b^T + sqrt(d) sum_e e_e c_e^T``. The fields are
``h_l = sqrt(gamma_l) (b v_l + c^T eta_l) + m_l`` with ``m_l = sum_e P_le c_e``. In these coordinates nothing is
singular: the covariance of h given y, ``gamma_l c^T c``, has no smooth root at c = 0.

`landscape` looks at the population risk as a whole: which minimum is global, how many there are, and where descent
begins. There are two geometries. With a ridge, the student has any size, and its minima are those of `population`. On a
sphere, its size is fixed, as in the analysis of single-index sequence models (arXiv:2506.02651): the candidates are
then the student along the teacher and the student along the encodings.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.optimize import minimize
from jaxtyping import Array, Bool, Float, Int

from ..averages.moreau import expansion_at_nodes, loss_at_nodes
from ..averages.program import program
from ..averages.recipes import SOBOL_SIZES, AnyNodes, Sobol, make_rule, smooth_recipe
from ..averages.rules import Fields, Replicate, Rule, average, teacher_fields
from ..base.arrays import cholesky, precise
from ..base.errors import InputError, require_not_negative, require_positive
from ..base.results import MeanField, Replicated, Status
from ..model.model import Model
from ..model.overlaps import Overlaps, branch_of
from ..theory.observables import error_in_block
from .flow import directions_of, encodings_on_directions, needs_span

_POLISHES = 8  # Newton steps behind the search; each squares the error
_TOL = 1e-9  # gradient, in units of the risk of a student of zero, below which a minimum has converged
_ZERO = 1e-3  # size of the student in the directions of a branch below which the branch is absent
_START = 0.8  # share of the teacher in a semantic start


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
    R = MeanField[Array]()
    Theta = MeanField[Array]()
    m = MeanField[Array]()
    risk = MeanField[Array]()
    gen_error = MeanField[Array]()
    curvature = MeanField[Array]()
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
    model: Model, kappa: Any = 0.0, branch: str | None = "semantic", *, nodes: AnyNodes = None
) -> PopulationPoint:
    """Return a minimum of the population risk ``E loss + kappa / 2 tr(Q^T Q) / d``, which is training on endless data.

    It is the limit of `solve` for alpha to infinity at ``lam = kappa alpha``; `lam` of the model does not matter. The
    fixed points of one-pass gradient descent with a small step are the same. Works under `jit`, `vmap` and `grad`;
    first derivatives in the model's numbers and in kappa follow from the implicit function theorem.

    Args:
        model: any smooth, even layer whose covariances have one eigenvalue each.
        kappa: ridge per sample, at least zero.
        branch: "semantic" (m is zero), "positional" (Theta is zero), or None, which leaves both free.
        nodes: recipe of the averages, or number of nodes; by default a tensor grid for at most four fields, else 2^15
            Sobol points. The student's fields are the tokens' fluctuations along the encodings. A rule for `model` fits
            if these have as many orthonormal directions as the student has columns, as at the standard setting.

    Returns:
        A `PopulationPoint`. Its status is `absent` if the student is zero in the directions of the branch.

    Raises:
        InputError: kappa is negative; the branch has another name; the loss has kinks or is not even; the model has a
            penalty, classes of tokens or several eigenvalues; or the teacher overlaps with the encodings.
    """
    kappa = checked_ridge(model, kappa)
    states = states_of(model, kappa, span_rule(model, nodes), branch)
    return PopulationPoint(model, kappa, states, branch)


def checked_ridge(model: Model, kappa: Any) -> Float[Array, ""]:
    """Check model and ridge as `population` does, and return the ridge."""
    needs_span(model, "the population risk")
    return require_not_negative(kappa, "kappa", model.lam.dtype)


def states_of(model: Model, kappa: Float[Array, ""], rule: Rule, branch: str | None) -> PopulationState:
    """Return the minimum of a branch in every replicate of the averages."""
    if branch == "uninformed":
        raise InputError("branch", "must be 'semantic', 'positional' or None, got 'uninformed': minima lie in the span")
    named = branch_of(branch)
    return _states(model, kappa, rule, named.free(model), named.start(model).m)


def span_rule(model: Model, nodes: AnyNodes) -> Rule:
    """Return the averages of `population`: over fluctuations along the encodings, and the teacher's fields."""
    # While jax traces the law, a rule that was made says how many directions the encodings have.
    directions = directions_of(model) or (nodes.stack.shape[1] if isinstance(nodes, Rule) else model.shape[0])
    fields = Fields.of(model, student=directions)
    return make_rule(nodes, fields, smooth_recipe(fields, "population"))


class Risk(eqx.Module):
    """The population risk in one replicate of the averages, as a function of coordinates (b, c) in one vector.

    Attributes:
        model, kappa, replicate: the setting.
        encodings: P, the encodings on orthonormal directions.
        free: one at the coordinates that the branch leaves free, zero at the others.
    """

    model: Model
    kappa: Float[Array, ""]
    replicate: Replicate
    encodings: Float[Array, "L e"]
    free: Float[Array, " n"]

    @classmethod
    def of(cls, model: Model, kappa: Float[Array, ""], replicate: Replicate, free: Float[Array, " n"]) -> Risk:
        """Make the risk with encodings on as many directions as the nodes of the replicate have."""
        directions = jnp.zeros(replicate.shape[1], model.lam.dtype)
        return cls(model, kappa, replicate, encodings_on_directions(model.law().tau[0], directions), free)

    def split(self, v: Float[Array, " n"]) -> tuple[Float[Array, "r t"], Float[Array, "e r"]]:
        """Return b and c of a vector of coordinates."""
        _, r, t = self.model.shape
        return v[: r * t].reshape(r, t), v[r * t :].reshape(-1, r)

    def at_nodes(self, v: Float[Array, " n"], block: Any) -> tuple[Array, Array, Array]:
        """Return the student's fields, the teacher's, and the weights of one block."""
        (b, c), t, gamma = self.split(v), self.model.shape[2], self.model.law().gamma[0]
        eta, normals, weight = self.replicate.quadrature(block)
        h = jnp.einsum("at,ltn->lan", b, normals[:, :t]) + jnp.einsum("ea,len->lan", c, eta)
        h = jnp.sqrt(gamma)[:, None, None] * h + (self.encodings @ c)[..., None]
        return h, teacher_fields(self.model, normals), weight

    @precise
    def error(self, v: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the test error."""

        def block_error(block: Any) -> Array:
            h, y, weight = self.at_nodes(v, block)
            return jnp.sum(weight * loss_at_nodes(self.model, h, y))

        return average(self.replicate, block_error)

    def value(self, v: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the risk; v @ v is tr R."""
        return self.error(v) + 0.5 * self.kappa * (v @ v)

    def slope(self, v: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return the gradient in the free coordinates, and the others themselves, which are to be zero."""
        return self.free * jax.grad(lambda v: self.value(v))(self.free * v) + (1 - self.free) * v

    def minimum(self, start: Float[Array, " n"], unit: Float[Array, ""]) -> Float[Array, " n"]:
        """Return the minimum that the search reaches from a start, with its implicit derivatives."""

        def search(slope: Any, v: Array) -> Array:
            frozen = lax.stop_gradient(self)
            rough = minimize(lambda v: frozen.value(frozen.free * v) / unit, v, method="BFGS").x
            step = partial(_solve_symmetric, matrix_of=slope)
            return self.free * lax.fori_loop(0, _POLISHES, lambda _, v: v - step(v, slope(v)), rough)

        def tangent(linear: Any, y: Array) -> Array:
            return _solve_symmetric(jnp.zeros_like(y), y, matrix_of=linear)

        return lax.custom_root(lambda v: self.slope(v), self.free * start, search, tangent)

    @precise
    def outside(self, v: Float[Array, " n"]) -> Float[Array, "r r"]:
        """Return the Hessian of the risk in directions outside the span."""
        (L, r, _), gamma = self.model.shape, self.model.law().gamma[0]

        def block_curvature(block: Any) -> Array:
            h, y, weight = self.at_nodes(v, block)
            hessian = expansion_at_nodes(self.model, h, y)[2].reshape(L, r, L, r, -1)
            return jnp.einsum("l,lalbn,n->ab", gamma, hessian, weight)

        return average(self.replicate, block_curvature) + self.kappa * jnp.eye(r, dtype=v.dtype)

    def curvature(self, v: Float[Array, " n"]) -> Float[Array, ""]:
        """Return the smallest eigenvalue of the Hessian in all directions."""
        inside = jnp.linalg.eigvalsh(jax.hessian(lambda v: self.value(v))(v))
        is_gauge = jnp.abs(inside) < _null(v) * jnp.max(jnp.abs(inside))
        inside = jnp.where(is_gauge & (len(self.model.generators) > 0), jnp.inf, inside)
        return jnp.minimum(jnp.min(inside), jnp.min(jnp.linalg.eigvalsh(self.outside(v))))


@program
def _states(
    model: Model, kappa: Array, rule: Rule, free: Float[Array, " 2"], m: Float[Array, "L r"]
) -> PopulationState:
    (_, r, t), e, law = model.shape, rule.stack.shape[1], model.law()
    C, P = cholesky(law.pi[0]), encodings_on_directions(law.tau[0], jnp.zeros(e, model.lam.dtype))
    semantic, _ = model.start_columns(combined=False)
    start = jnp.concatenate([_START * jnp.ravel(semantic), jnp.ravel(jnp.linalg.pinv(P, rtol=1e-6) @ m)])
    free = jnp.concatenate([jnp.full(r * t, free[0]), jnp.full(e * r, free[1])])

    def state(replicate: Replicate) -> PopulationState:
        risk = Risk.of(model, kappa, replicate, free)
        frozen = lax.stop_gradient(risk)  # what is computed of it counts as constant under `jax.grad`
        unit = frozen.error(jnp.zeros_like(free))
        v = risk.minimum(lax.stop_gradient(start), unit)
        fixed = lax.stop_gradient(v)
        residual = jnp.max(jnp.abs(frozen.slope(fixed))) / unit
        tol = jnp.maximum(_TOL, 100 * jnp.finfo(v.dtype).eps)
        status = jnp.where(residual < tol, Status.converged, Status.max_steps)
        status = jnp.where(jnp.sum(fixed**2) < _ZERO**2, Status.absent, status)
        status = jnp.where(jnp.all(jnp.isfinite(fixed)), status, Status.nonfinite)
        (b, c), error = risk.split(v), risk.error(v)
        R, value = b @ b.T + c.T @ c, error + 0.5 * kappa * (v @ v)
        return PopulationState(R, b @ C.T, P @ c, value, error, frozen.curvature(fixed), residual, status)

    return rule.each(state)


def _null(v: Float[Array, " n"]) -> float:
    """Return the relative curvature below which a direction is that of a rotation of the columns."""
    return max(1e-9, 100 * float(jnp.finfo(v.dtype).eps))


def _solve_symmetric(v: Float[Array, " n"], y: Float[Array, " n"], *, matrix_of: Any) -> Float[Array, " n"]:
    """Solve with the symmetric Jacobian of a function at v, without the rotations of the columns."""
    matrix = lax.stop_gradient(jax.jacfwd(matrix_of)(v))
    return jnp.linalg.pinv(matrix, rtol=_null(v), hermitian=True) @ y


CANDIDATES = "semantic", "positional"


class Heights(eqx.Module):
    """Numbers of a `Landscape` in every replicate of the averages."""

    semantic: Float[Array, "*R"]
    positional: Float[Array, "*R"]
    curvature_semantic: Float[Array, "*R"]
    curvature_positional: Float[Array, "*R"]
    slope_semantic: Float[Array, "*R"]
    slope_positional: Float[Array, "*R"]
    status: Int[Array, "*R"]


class Landscape(Replicated):
    """The population risk at its candidates for a minimum, and at the origin.

    Attributes:
        model, kappa: the setting.
        size: fixed size R of the student, or None if the ridge kappa limits it.
        replicates: the numbers in every replicate of the averages.
        mean: means: `semantic` and `positional` are the risks of the two candidates, `curvature_semantic` and
            `curvature_positional` the smallest curvatures there, `slope_semantic` and `slope_positional` the second
            derivatives of the risk at the origin towards teacher and encodings. The origin is a student without
            overlaps of the fixed size, or a student of size zero.
    """

    model: Model
    kappa: Float[Array, "*batch"]
    size: Float[Array, "*batch"] | None
    replicates: Heights
    batch_probe = "kappa", 0
    SETTING = "kappa", "size"
    SHOWN: ClassVar = {
        "semantic": "risk of the student that follows the teacher",
        "positional": "risk of the student that follows the encodings",
        "curvature_semantic": "smallest curvature there; positive at a minimum",
        "curvature_positional": "smallest curvature there; positive at a minimum",
        "slope_semantic": "curvature at the origin towards the teacher",
        "slope_positional": "curvature at the origin towards the encodings",
    }
    FLAGS = ("label",)

    @property
    def differences(self) -> dict[str, Float[Array, "*batch"]]:
        """Numbers that change sign where a label changes.

        "global": positive where the positional candidate has the smaller risk. "steepest": positive where the descent
        from the origin is steepest towards the encodings. "several": positive where both candidates are minima.
        """
        h = self.mean
        return {
            "global": h.semantic - h.positional,
            "steepest": h.slope_semantic - h.slope_positional,
            "several": jnp.minimum(h.curvature_semantic, h.curvature_positional),
        }

    @property
    def label(self) -> Int[Array, "*batch"]:
        """One if the global minimum is positional, plus 2 if the steepest descent is, plus 4 for two minima."""
        signs = [(d > 0).astype(jnp.int32) for d in self.differences.values()]
        return signs[0] + 2 * signs[1] + 4 * signs[2]

    @property
    def title(self) -> str:
        where = f"kappa = {self.kappa:g}" if self.size is None else f"size {self.size:g}"
        return f"Population risk at {where}: {words_of(int(self.label))}"


def words_of(label: int) -> str:
    """Return the meaning of a label in words."""
    minimum, steepest = CANDIDATES[label % 2], CANDIDATES[label // 2 % 2]
    return f"{minimum} minimum, {steepest} descent, {'two minima' if label >= 4 else 'one minimum'}"


def landscape(model: Model, kappa: Any = 0.0, *, size: Any = None, nodes: AnyNodes = None) -> Landscape:
    """Return the population risk at its candidates for a minimum, and its curvatures at the origin.

    The function works under `jit`, `vmap` and `grad`.

    Args:
        model: any smooth, even layer with independent tokens whose covariances have one eigenvalue each.
        kappa: ridge per sample.
        size: fixed size ``R = Q^T Q / d`` of a student on a sphere, for rank one and one direction of the encodings;
            the ridge then changes nothing. By default the ridge limits the student.
        nodes: as in `population`; by default 2^18 Sobol points for a student on a sphere, where the tokens are often
            too large for a grid.

    Raises:
        InputError: as `population`; also if size is not positive, or if it is given and the ranks are not one.
    """
    kappa = checked_ridge(model, kappa)
    if size is None:
        return Landscape(model, kappa, None, _with_ridge(model, kappa, span_rule(model, nodes)))
    size = require_positive(size, "size", model.lam.dtype)
    ranks = *model.shape[1:], directions_of(model) or 1
    if ranks != (1, 1, 1):
        requirement = "must be None unless student, teacher and encodings have one direction each"
        raise InputError("size", f"{requirement}, got {ranks} directions")
    rule = make_rule(nodes, Fields.of(model, student=1), Sobol(SOBOL_SIZES["sphere"]))
    return Landscape(model, kappa, size, _on_sphere(model, size, rule))


def _with_ridge(model: Model, kappa: Float[Array, ""], rule: Rule) -> Heights:
    semantic, positional = (states_of(model, kappa, rule, branch) for branch in CANDIDATES)
    worst = jnp.maximum(semantic.status, positional.status)
    # A candidate of size zero is absent as a branch; it is then the origin, and its numbers hold.
    status = jnp.where(worst == Status.absent, Status.converged, worst)
    teacher, encodings = _slopes_at_zero(model, kappa, rule)
    return Heights(semantic.risk, positional.risk, semantic.curvature, positional.curvature, teacher, encodings, status)


@program
def _slopes_at_zero(model: Model, kappa: Array, rule: Rule) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """Return the smallest curvatures of the risk of a student of size zero, towards teacher and encodings."""
    (_, r, t), e = model.shape, rule.stack.shape[1]

    def slopes(replicate: Replicate) -> tuple[Array, Array]:
        zero = jnp.zeros(r * (t + e), model.lam.dtype)
        risk = Risk.of(model, kappa, replicate, jnp.ones_like(zero))
        hessian = jax.hessian(lambda v: risk.value(v))(zero)
        along_teacher, along_encodings = hessian[: r * t, : r * t], hessian[r * t :, r * t :]
        return jnp.linalg.eigvalsh(along_teacher)[0], jnp.linalg.eigvalsh(along_encodings)[0]

    return rule.each(slopes)


@program
def _on_sphere(model: Model, size: Float[Array, ""], rule: Rule) -> Heights:
    gamma, radius = model.law().gamma[0], jnp.sqrt(size)

    def heights(replicate: Replicate) -> Heights:
        risk = Risk.of(model, jnp.zeros_like(size), replicate, jnp.ones(2, size.dtype))
        unit = cholesky(model.law().pi[0])

        def on_circle(angle: Array) -> Float[Array, ""]:
            """Return the risk of a student that teacher and encodings span."""
            return risk.error(radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)]))

        def candidate(angle: float) -> tuple[Array, Array]:
            """Return the risk there, and the smaller of the curvature along the circle and the slope into the disc."""
            place = jnp.asarray(angle, size.dtype)
            v = radius * jnp.stack([jnp.cos(place), jnp.sin(place)])
            inwards = size * risk.outside(v)[0, 0] - v @ jax.grad(lambda v: risk.error(v))(v)
            return on_circle(place), jnp.minimum(jax.grad(jax.grad(on_circle))(place), inwards)

        def at_fixed_size(v: Float[Array, " 2"]) -> Float[Array, ""]:
            """Return the risk near the origin, where most of the student has no overlaps."""
            q = gamma[:, None, None] * jnp.full((1, 1), size)
            x = Overlaps(q, jnp.zeros_like(q), gamma[:, None, None] * (unit * v[0]), risk.encodings * v[1])
            return average(replicate, lambda block: error_in_block(model, x, replicate, block))

        hessian = jax.hessian(at_fixed_size)(jnp.zeros(2, size.dtype))
        (semantic, bend_semantic), (positional, bend_positional) = candidate(0.0), candidate(np.pi / 2)
        numbers = jnp.stack([semantic, positional, bend_semantic, bend_positional])
        finite = jnp.all(jnp.isfinite(numbers)) & jnp.all(jnp.isfinite(hessian))
        status = jnp.where(finite, Status.converged, Status.nonfinite).astype(jnp.int32)
        return Heights(semantic, positional, bend_semantic, bend_positional, hessian[0, 0], hessian[1, 1], status)

    return rule.each(heights)
