"""Endless data: the minima of the population risk, which training reaches for alpha to infinity.

# notation: P = Q*^T Q* / d = C C^T; encodings p_l = sum_e P_le e_e on orthonormal directions; v, eta standard normals.

A minimum lies in the span of teacher and encodings, ``Q = Q* C^{-T} b^T + sqrt(d) sum_e e_e c_e^T``. The fields are
``h_l = sqrt(gamma_l) (b v_l + c^T eta_l) + m_l`` with ``m_l = sum_e P_le c_e``. In these coordinates nothing is
singular: the covariance of h given y, ``gamma_l c^T c``, has no smooth root at c = 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.optimize import minimize
from jaxtyping import Array, Bool, Float, Int

from ..averages.fields import teacher_fields
from ..averages.moreau import expansion_at_nodes, loss_at_nodes
from ..averages.program import program
from ..averages.recipes import AnyNodes, make_rule, smooth_recipe
from ..averages.rules import Fields, Replicate, Rule, average
from ..base.arrays import cholesky, precise
from ..base.errors import InputError, as_number, require_not_negative
from ..base.results import MeanField, Replicated, Status
from ..model.checks import needs
from ..model.model import Model
from ..model.overlaps import branch_of
from .flow import directions_of, encodings_on_directions

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
    needs(
        model,
        "the population risk",
        smooth=True,
        ridge_only=True,
        independent=True,
        orthogonal=True,
        one_eigenvalue=True,
    )
    require_not_negative(kappa, "kappa")
    return as_number(kappa, "kappa", model.lam.dtype)


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
