"""State evolution in time: the order parameters of every iteration of undamped message passing.

Message passing that starts from weights Q_0 which do not depend on the data, with messages zero, has local fields that
are Gaussian given the past. Its order parameters then follow the map of the saddle-point equations, one application an
iteration (appendix B.3 of the paper). Fixed points of the map are what `solve` returns.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..averages.program import program
from ..averages.recipes import AnyNodes, make_rule
from ..averages.rules import Replicate, Rule
from ..base.arrays import Number, either, indexed
from ..base.errors import InputError, require_choice, require_count
from ..base.report import Description, rows_of
from ..base.results import Replicated, Status
from ..model.checks import check, check_alpha
from ..model.model import Model
from ..model.overlaps import BRANCHES, Overlaps, admissible, branch_of, impose, label
from .equations import Equations
from .setting import branch_start
from .states import FixedPoint, check_start

# A run has converged if its last iteration changes every order parameter by less than this: a relative change, or units
# of rounding, whichever is more. An m or theta below this share of its largest possible size is rounding.
_SETTLED, _ROUNDING = 1e-8, 20


class Iterates(eqx.Module):
    """Order parameters of every iteration, in every replicate of the averages.

    Attributes:
        overlaps: order parameters before every iteration and at the end; NaN after a step that left the domain.
        status: a `Status`.
    """

    overlaps: Overlaps
    status: Int[Array, "*R"]


class StateEvolution(Replicated):
    """Order parameters of undamped message passing, iteration by iteration, for d to infinity.

    Attributes:
        model, alpha: the setting.
        branch: order parameters that were free, as in `solve`.
        replicates: order parameters in every replicate of the averages.
        history: their means, of shapes (steps + 1, ...), before every iteration and at the end, like `GAMP.history`.
            The error bars are `stderr.overlaps`.
        status: `converged` if the last iteration changed nothing, `max_steps` if the order parameters still move,
            `left_domain` if an iteration led to a q or V that is not positive, `nonfinite`.
    """

    batch_probe = "alpha", 0
    SETTING = ("alpha",)
    model: Model
    alpha: Float[Array, "*batch"]
    branch: str | None = eqx.field(static=True)
    replicates: Iterates

    @property
    def history(self) -> Overlaps:
        """Means over the replicates."""
        return self.mean.overlaps

    def shown(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return vars(self.mean.overlaps), vars(self.stderr.overlaps)

    def describe(self) -> Description:
        final, bars = (indexed(x.overlaps, -1) for x in (self.mean, self.stderr))
        steps = self.replicates.overlaps.m.shape[1] - 1
        what = f"{steps} iterations of state evolution at alpha = {self.alpha:g}, {label(self.model, final)} at the end"
        return Description(what, self.status_name, rows_of(vars(final), vars(bars)))

    def plot(self, gamp: Any = None, ax: Any = None, **look: Any) -> Any:
        """Plot order parameters by iteration, beside those of a `GAMP` if one is given.

        Args:
            ax: matplotlib axes to draw on instead of a new figure: one for each of the panels "q", "theta", "m" and
                "residual", or a dict of some of them.
            look: label, color and other options of the lines.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.simulations import gamp_figure

        runs = {} if gamp is None else {"message passing": gamp}
        return gamp_figure(runs, theory=self, ax=ax, of_theory=True, **look)


def state_evolution(
    model: Model,
    alpha: Number,
    start: str | FixedPoint | Overlaps,
    steps: int = 30,
    *,
    branch: str | None = None,
    nodes: AnyNodes = None,
) -> StateEvolution:
    """Return the order parameters of undamped message passing in every iteration, for d to infinity.

    Simulations agree for ``gamp(model, data, Q_0, damping=1.0)`` from weights Q_0 that do not depend on the data, up to
    fluctuations of order 1 / sqrt(d). Where an overlap grows from zero, as m does from a student that does not know the
    encodings, the fluctuations grow with it. Works under `jit`, `vmap` and `grad`.

    Args:
        model: attention layer and data.
        alpha: samples per dimension.
        start: order parameters before the first iteration: `Overlaps`, for example ``data.overlaps(Q_0, V_0)`` or
            ``gamp.history`` at iteration 0; a `FixedPoint`; or the name of a branch, for the start of `solve`.
        steps: number of iterations.
        branch: order parameters that are free, as in `solve`: "semantic" keeps m at zero, "positional" keeps theta at
            zero, None keeps both.
        nodes: recipe of the averages, or number of nodes; see `make_rule`.

    Raises:
        InputError: alpha is not positive, shapes do not fit, or the start is outside of the domain.
    """
    model = check(model, even=branch is not None)
    alpha = check_alpha(model, alpha)
    require_count(steps, "steps")
    free = branch_of(branch).free(model)
    if isinstance(start, str):
        start = branch_start(model, require_choice(start, "start", [name for name in BRANCHES if name]))
    start = check_start(model, start)
    if start.m.ndim != 2:
        raise InputError("start", f"must be one set of overlaps, with m of shape (L, r), got shape {start.m.shape}")
    rule = make_rule(nodes, model)
    return StateEvolution(model, alpha, branch, _iterates(model, alpha, rule, impose(start, free), free, int(steps)))


@program
def _iterates(
    model: Model, alpha: Float[Array, ""], rule: Rule, start: Overlaps, free: Float[Array, " 2"], steps: int
) -> Iterates:
    def follow(replicate: Replicate) -> Iterates:
        equations = Equations(model, alpha, replicate, free)

        def iterate(carry: tuple[Overlaps, Int[Array, ""]], _: None) -> tuple[tuple, Overlaps]:
            x, status = carry
            image, _evaluation = equations.step(x)
            finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(image)]))
            failure = jnp.where(finite, Status.left_domain, Status.nonfinite)
            step_status = jnp.where(finite & admissible(model, image), Status.converged, failure).astype(jnp.int32)
            status = jnp.where(status == Status.converged, step_status, status)
            goes_on = status == Status.converged
            recorded = jax.tree.map(lambda a: jnp.where(goes_on, a, jnp.nan), image)
            return (either(goes_on, image, x), status), recorded

        begin = start, jnp.asarray(Status.converged, jnp.int32)
        (_, status), path = lax.scan(iterate, begin, None, length=steps)
        path = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, path)
        rounding = _ROUNDING * jnp.finfo(start.q.dtype).eps
        before, after = indexed(path, -2), indexed(path, -1)
        q, V, rho = (jnp.max(jnp.abs(a)) for a in (before.q, before.V, model.rho))
        is_settled = jnp.array(True)
        for a, b, size in zip(*map(jax.tree.leaves, (before, after)), (q, V, (q * rho) ** 0.5, q**0.5), strict=True):
            bound = jnp.maximum(_SETTLED, rounding) * jnp.max(jnp.abs(a)) + rounding * size
            is_settled &= jnp.max(jnp.abs(b - a)) <= bound
        moving = jnp.where(is_settled, Status.converged, Status.max_steps)
        return Iterates(path, jnp.where(status == Status.converged, moving, status).astype(jnp.int32))

    return rule.each(follow)
