"""The population risk as a landscape: which minimum is global, how many there are, and where descent begins.

There are two geometries. With a ridge, the student has any size, and its minima are those of `population`. On a
sphere, its size is fixed, as in the analysis of single-index sequence models (arXiv:2506.02651): the candidates are
then the student along the teacher and the student along the encodings.
"""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..averages.program import program
from ..averages.recipes import SOBOL_SIZES, AnyNodes, Sobol, make_rule
from ..averages.rules import Fields, Replicate, Rule, average
from ..base.arrays import cholesky
from ..base.errors import InputError, require_not_negative, require_positive
from ..base.report import Row
from ..base.results import LINE_FIGURE, InTable, Replicated, Status
from ..model.model import Model
from ..model.overlaps import Overlaps
from ..theory.observables import error_in_block
from .flow import directions_of, needs_span, span_of
from .population import Risk, span_rule, states_of

CANDIDATES = "semantic", "positional"


class Heights(eqx.Module):
    """Numbers of a `Landscape` in every replicate of the averages."""

    semantic: Float[Array, "*R"]
    positional: Float[Array, "*R"]
    curvature_semantic: Float[Array, "*R"]
    curvature_positional: Float[Array, "*R"]
    slope_semantic: Float[Array, "*R"]
    slope_positional: Float[Array, "*R"]
    together: Bool[Array, "*R"]  # whether both candidates are the student of size zero
    status: Int[Array, "*R"]


class Landscape(Replicated):
    """The population risk at its candidates for a minimum, and at the origin. Numbers are means over replicates.

    The origin is a student without overlaps of the fixed size, or a student of size zero.

    Attributes:
        model, kappa: the setting.
        size: fixed size R of the student, or None if the ridge kappa limits it.
        replicates: the numbers in every replicate of the averages.
        semantic, positional: risks of the two candidates.
        curvature_semantic, curvature_positional: smallest curvatures there.
        slope_semantic, slope_positional: second derivatives of the risk at the origin towards teacher and encodings.
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
    def in_table(self) -> InTable:
        figures = LINE_FIGURE, "diagrams.landscape_figure"
        return InTable("label", drawn=CANDIDATES[::-1], figures=figures, summary=_count_labels)

    @property
    def differences(self) -> dict[str, Float[Array, "*batch"]]:
        """Numbers that change sign where a label changes.

        "global": positive where the positional candidate has the smaller risk. "steepest": positive where the descent
        from the origin is steepest towards the encodings. "several": positive where both candidates are minima, and
        not both the student of size zero.
        """
        h = self.mean
        curvature = jnp.minimum(h.curvature_semantic, h.curvature_positional)
        return {
            "global": h.semantic - h.positional,
            "steepest": h.slope_semantic - h.slope_positional,
            "several": jnp.where(h.together > 0.5, -jnp.abs(curvature), curvature),
        }

    @property
    def label(self) -> Int[Array, "*batch"]:
        """One if the global minimum is positional, plus 2 if the steepest descent is, plus 4 for two minima."""
        signs = [(d > 0).astype(jnp.int32) for d in self.differences.values()]
        return signs[0] + 2 * signs[1] + 4 * signs[2]

    @property
    def title(self) -> str:
        where = f"kappa = {self.kappa:g}" if self.size is None else f"size {self.size:g}"
        text = "both candidates are the student of size zero" if self.mean.together > 0.5 else words_of(int(self.label))
        return f"Population risk at {where}: {text}"


def words_of(label: int) -> str:
    """Return the meaning of a label in words."""
    minimum, steepest = CANDIDATES[label % 2], CANDIDATES[label // 2 % 2]
    return f"{minimum} minimum, {steepest} descent, {'two minima' if label >= 4 else 'one minimum'}"


def _count_labels(table: Any) -> list[Row]:
    labels, counts = np.unique(table.values()[table.found].astype(int), return_counts=True)
    return [(str(k), str(count), words_of(int(k))) for k, count in zip(labels, counts, strict=True)]


def landscape(model: Model, kappa: Any = 0.0, *, size: Any = None, nodes: AnyNodes = None) -> Landscape:
    """Return the population risk at its candidates for a minimum, and its curvatures at the origin.

    The function works under `jit`, `vmap` and `grad`.

    Args:
        model: any smooth, even layer with independent tokens whose covariances have one eigenvalue each.
        kappa: ridge per sample.
        size: fixed size ``R = Q^T Q / d`` of a student on a sphere, for rank one and one direction of the encodings;
            the ridge then changes nothing. By default the ridge limits the student.
        nodes: as in `population`; by default 2^18 Sobol points for a student on a sphere, where the tokens are often
            too large for a grid. A `sweep` over many cells needs fewer, such as 2^14.

    Raises:
        InputError: as `population`; also if tokens have classes, or if size is not positive, or is given while the
            ranks are not one.
    """
    model = needs_span(model, "the landscape of the population risk")
    kappa = require_not_negative(kappa, "kappa", model.lam.dtype)
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
    # A candidate of size zero is absent as a branch; it is then the origin, and its numbers hold.
    first, second = (jnp.where(s.status == Status.absent, Status.converged, s.status) for s in (semantic, positional))
    together = jnp.all((semantic.R == 0) & (positional.R == 0), (-1, -2))
    teacher, encodings = _slopes_at_zero(model, kappa, rule)
    curvatures = semantic.curvature, positional.curvature
    status = jnp.maximum(first, second)
    return Heights(semantic.risk, positional.risk, *curvatures, teacher, encodings, together, status)


@program
def _slopes_at_zero(model: Model, kappa: Array, rule: Rule) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """Return the smallest curvatures of the risk of a student of size zero, towards teacher and encodings."""
    (_, r, t), e = model.shape, rule.stack.shape[1]

    def slopes(replicate: Replicate) -> tuple[Array, Array]:
        zero = jnp.zeros(r * (t + e), model.lam.dtype)
        risk = Risk.of(model, kappa, replicate, jnp.ones(2, zero.dtype))
        hessian = jax.hessian(lambda v: risk.value(v))(zero)
        along_teacher, along_encodings = hessian[: r * t, : r * t], hessian[r * t :, r * t :]
        return jnp.linalg.eigvalsh(along_teacher)[0], jnp.linalg.eigvalsh(along_encodings)[0]

    return rule.each(slopes)


@program
def _on_sphere(model: Model, size: Float[Array, ""], rule: Rule) -> Heights:
    law, radius = span_of(model), jnp.sqrt(size)
    gamma = law.gamma[:, None, None]

    def heights(replicate: Replicate) -> Heights:
        risk = Risk.of(model, jnp.zeros_like(size), replicate, jnp.ones(2, size.dtype))
        unit = cholesky(law.pi)

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
            q = gamma * jnp.full((1, 1), size)
            x = Overlaps(q, jnp.zeros_like(q), gamma * (unit * v[0]), risk.encodings * v[1])
            return average(replicate, lambda block: error_in_block(model, x, replicate, block))

        hessian = jax.hessian(at_fixed_size)(jnp.zeros(2, size.dtype))
        (semantic, bend_semantic), (positional, bend_positional) = candidate(0.0), candidate(np.pi / 2)
        numbers = jnp.stack([semantic, positional, bend_semantic, bend_positional])
        finite = jnp.all(jnp.isfinite(numbers)) & jnp.all(jnp.isfinite(hessian))
        status = jnp.where(finite, Status.converged, Status.nonfinite).astype(jnp.int32)
        slopes = hessian[0, 0], hessian[1, 1]
        return Heights(semantic, positional, bend_semantic, bend_positional, *slopes, jnp.asarray(False), status)

    return rule.each(heights)
