"""Generalised approximate message passing (Algorithm 1) on the rows of a data matrix.

# notation: Q (d, r) the estimate, the paper's w, C its variance, V_l the responses,
# g_l = V_l^{-1} (prox(h_l) - h_l) the messages.

The algorithm uses the same `loss` and the same `prox` as the theory. At a fixed point ``g`` is minus the gradient of
the loss with respect to the fields, and ``lambda Q = sum_l X_l^T g_l``. The fixed points are therefore exactly the
critical points of the empirical risk. State evolution predicts their V and overlaps for large d.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Real

from ..averages.minima import descend
from ..averages.moreau import ProxProblem, gradient_at_nodes
from ..averages.prox import prox
from ..base.arrays import (
    AnyArray,
    Number,
    apply,
    either,
    indexed,
    inner_products,
    inverse,
    positive_definite,
    precise,
    solve,
)
from ..base.errors import require_choice, require_count, require_memory, require_number, require_positive, shaped_array
from ..base.report import Status
from ..model.model import Model, over_kinds
from ..model.overlaps import Overlaps, symmetric
from ..model.penalties import minimiser_and_response
from .data import Sample, kind_mask, map_kinds
from .estimate import Estimate, check_estimate
from .evaluation import sentence_losses
from .sampling import start
from .training import gradient_norm, risk_and_gradient

# Number of first steps in which the minimisers are searched for globally; afterwards each sentence stays in its well.
# A sentence near the surface where the minimiser jumps could otherwise alternate between two wells for ever. On the
# positional branch at d = 1000, alpha = 2, about one sentence in a thousand does, which keeps the residual at 1e-2 to
# 1e-1.
# After these steps each sentence descends to the bottom of its well in every step. Of 40 runs at d = 500 and 1000 (both
# branches, alpha from 1 to 2) 37 settle and none diverges. With one unguarded step of Newton's method in its place, 33
# settle, 6 diverge, and one stops at a point that is not critical.
_BURN_IN = 20
_RISES = 3  # so many rises of the residual in a row mean an instability; one rise is a sentence that changes wells
_COLLINEAR = 10  # first steps take derivatives: fields of the student may be multiples of the teacher's (singular fit)
# Constants of the automatic damping. Without damping the eigenvalues reach -5.5 on the positional branch at alpha = 2;
# there a share above .3 must fail, and in the first steps it leads away from the branch. The share starts lower and
# grows slowly until it finds the largest value that works. The floor is needed because an order parameter that grows
# out of an unstable state makes the residual grow at any damping.
_FIRST_DAMPING = 0.2
_MAX_DAMPING = 0.5
_FLOOR = 0.05
_MIN_DAMPING = 0.003
_RECOVERY = 1.03


class GAMP(Estimate):
    """The last state of a run of GAMP, and its history.

    Attributes:
        Q: estimate.
        overlaps: order parameters of the estimate on this instance.
        train_loss: empirical risk / d at `Q`.
        gradient_norm: largest entry of the gradient of the empirical risk at `Q`; with a penalty, of the proximal
            gradient.
        iterations: number of steps taken.
        status: a `Status`, as an integer.
        residual: undamped relative change of Q, C and g in the last step.
        damping: share of the new state for the next step.
        C: variance of the estimate; of size 1 along d if all coordinates have one variance and there is no penalty.
        g: messages of the sentences.
        history: overlaps before every step and at the end, arrays of leading size steps + 1; NaN after the end.
        residuals: residual of every step; NaN after the last one.
    """

    residual: Float[Array, ""]
    damping: Float[Array, ""]
    C: Float[Array, "#d r r"]
    g: Float[Array, "L r n"]
    history: Overlaps
    residuals: Float[Array, " steps"]

    def plot(self, ax: Any = None) -> Any:
        """Plot order parameters and residual, iteration by iteration; see `plotting.simulations.gamp_figure`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure: one for each of the panels "q", "theta", "m" and
                "residual", or a dict of some of them.

        Returns:
            The figure, or `ax`.
        """
        from ..plotting.simulations import gamp_figure

        return gamp_figure({"message passing": self}, ax=ax)


class _State(eqx.Module):
    Q: Float[Array, "d r"]
    C: Float[Array, "#d r r"]
    g: Float[Array, "L r n"]
    z: Float[Array, "L r n"]  # minimisers of the last step, the starts of the next search

    def finite(self) -> Bool[Array, ""]:
        return jnp.all(jnp.isfinite(self.Q)) & jnp.all(jnp.isfinite(self.C)) & jnp.all(jnp.isfinite(self.g))

    def positive(self, model: Model) -> Bool[Array, ""]:
        """Return whether the variances are positive definite; a weight that a penalty holds at zero may have none."""
        if model.penalty is not None:
            variances = jnp.diagonal(self.C, axis1=1, axis2=2)
            return jnp.all(variances >= 0) & jnp.any(variances > 0)
        return positive_definite(self.C)

    def distance(self, other: _State) -> Float[Array, ""]:
        """Return the largest change of Q, C and g from this state to another one, relative to this one."""
        pairs = ((self.Q, other.Q), (self.C, other.C), (self.g, other.g))
        tiny = jnp.finfo(self.Q.dtype).tiny
        return jnp.max(jnp.stack([jnp.sqrt(jnp.sum((a - b) ** 2) / (jnp.sum(a**2) + tiny)) for a, b in pairs]))


class _Options(eqx.Module):
    """Options of a run. The numbers are arrays, so that one compiled program serves all values."""

    steps: int = eqx.field(static=True)
    tol: Float[Array, ""]
    damping: Float[Array, ""]  # share of the new state in the first step
    automatic: Bool[Array, ""]  # whether the damping is chosen automatically
    derivative: Bool[Array, ""]  # whether A is computed from derivatives


class Damping(eqx.Module):
    """The damping, and the residuals by which it is chosen."""

    share: Float[Array, ""]  # share of the new state in the next step
    ceiling: Float[Array, ""]  # largest share allowed, because larger ones failed
    residual: Float[Array, ""]  # residual of the last step
    lowest: Float[Array, ""]  # smallest residual since the share was last cut
    rises: Int[Array, ""]  # number of steps in a row in which the residual rose

    def after(
        self,
        residual: Float[Array, ""],
        possible: Bool[Array, ""],
        search: Bool[Array, ""],
        automatic: Bool[Array, ""],
    ) -> Damping:
        """Return the damping of the next step.

        Args:
            residual: residual of this step, infinite if the step was impossible.
            possible: whether this step could be taken.
            search: whether minimisers are still searched for globally; the share does not grow during that search.
            automatic: whether the share may change.
        """
        rises = jnp.where(residual > self.residual, self.rises + 1, 0)
        unstable = possible & (rises >= _RISES) & (residual > 1.5 * self.lowest)
        recovered = jnp.where(search, 1.0, _RECOVERY) * self.share
        share = jnp.where(unstable, jnp.maximum(0.5 * self.share, _FLOOR), recovered)
        ceiling = jnp.where(unstable | ~possible, jnp.maximum(0.8 * self.share, _FLOOR), 1.002 * self.ceiling)
        ceiling = jnp.minimum(ceiling, _MAX_DAMPING)
        share = jnp.minimum(jnp.where(possible, share, 0.5 * self.share), ceiling)
        return Damping(
            share=jnp.where(automatic, share, self.share),
            ceiling=ceiling,
            residual=residual,
            lowest=jnp.where(unstable | ~possible, residual, jnp.minimum(self.lowest, residual)),
            rises=rises,
        )


class _Loop(eqx.Module):
    state: _State
    fallback: _State  # the last state from which a step was possible
    damping: Damping
    steps: Int[Array, ""]
    failure: Int[Array, ""]  # status that ended the run; `converged` while the run goes on
    history: Overlaps
    residuals: Float[Array, " steps"]
    memory: PyTree  # of the data


def gamp(
    model: Model,
    data: Sample,
    init: str | GAMP | Real[AnyArray, "d r"] = "semantic",
    *,
    steps: int = 1000,
    tol: Number = 1e-12,
    damping: Number | None = None,
    response: str = "regression",
    key: PRNGKeyArray | None = None,
    scale: Number | None = None,
) -> GAMP:
    """GAMP (Algorithm 1) with one Onsager term per token and variances of r x r.

    One step, with ``Var(X_li) = gamma_li / d``::

        V_l = sum_i Var(X_li) C_i        h_l = X_l Q - V_l g_l        g_l = V_l^{-1} (prox(h)_l - h_l)
        A_i = - sum_l Var(X_li) sum_mu dg_l/dh_l    b_i = sum_l X_li^T g_l + A_i Q_i
        C_i = (lambda I + A_i)^{-1}      Q_i = C_i b_i

    With a penalty p, the last line is ``Q_i = argmin_w w^T (lambda + A_i) w / 2 - b_i . w + sum_a p(w_a)`` and
    ``C_i = dQ_i / db_i``. Then Q, C and g move a share of the way to their new values; this share is the damping. Works
    under `jit` and under `vmap` over instances.

    Args:
        model: loss, ridge and penalty.
        data: the instance, `Data` or `DataOnDemand`. On sentences drawn on demand neither the spectral start nor going
            on from an earlier run is possible.
        init: "semantic", "positional", "random", "spectral", or an array (d, r), see
            `tiedattn_jax.finite.sampling.start`; or an earlier `GAMP` on the same data, to go on from its estimate,
            variances and messages.
        steps: largest number of steps.
        tol: undamped relative residual at which to stop; at least twenty roundings of the dtype.
        damping: share of the new state in a step, in (0, 1], kept fixed; 1 is the undamped algorithm. It starts with
            messages zero, and `state_evolution` predicts its order parameters. By default the share is chosen
            automatically. It starts at .2 and grows until the residual rises several times in a row or a step is
            impossible; it is then halved and stays below the value that failed.
        response: how to compute A: "regression", from the linear regression of g on the fields; or "derivative", from
            dg/dh sentence by sentence, as in Algorithm 1. Both agree for large d unless the proximal operator jumps:
            derivatives miss the jumps, and the theory's V includes them. With either, the fixed points are critical
            points of the risk. But V decides which well a sentence is in, and derivatives diverge at a sentence that
            comes to the end of its well, so with "derivative" some instances have no fixed point.
        key: random key of the start.
        scale: norm of a named start, as in `tiedattn_jax.finite.sampling.start`.

    Returns:
        A `GAMP`. If a run diverges, its status is `nonfinite` or `left_domain` and the state is the last one that was
        possible. A state is possible if it is finite, its variances are positive, and the ridge and penalty of its Q
        alone do not exceed the larger of the risk at zero and the risk at the start; no minimum lies farther out.

    Raises:
        InputError: if an argument is out of range or of the wrong shape; the error names it.
    """
    require_count(steps, "steps")
    require_positive(tol, "tol")
    if damping is not None:
        requirement = "in (0, 1], or None for an automatic choice"
        require_number(damping, "damping", requirement, lambda v: 0 < v <= 1)
    response = require_choice(response, "response", ("regression", "derivative"))
    warm_start = None
    if isinstance(init, GAMP):
        data.stored("to go on from an earlier run")
        Q, (L, r, _) = check_estimate("init.Q", model, data, init.Q), model.shape
        count = data.gamma.shape[1] if model.penalty is None else data.shape[2]
        sizes = {"L": L, "n": data.shape[1], "r": r, "i": count}
        C = shaped_array("init.C", init.C, "i r r", sizes, Q.dtype)
        g = shaped_array("init.g", init.g, "L r n", sizes, Q.dtype)
        warm_start = C, g
    else:
        Q = start(model, data, init, key, scale)
    L, r, t = model.shape
    require_memory(float(steps) * L * (2 * r * r + r * t + r) * Q.dtype.itemsize, "steps", steps, "their history")
    options = _Options(
        steps=int(steps),
        tol=jnp.asarray(tol, Q.dtype),
        damping=jnp.asarray(_FIRST_DAMPING if damping is None else damping, Q.dtype),
        automatic=jnp.asarray(damping is None),
        derivative=jnp.asarray(response == "derivative"),
    )
    return _run(model, data, Q, warm_start, options)


def responses(data: Sample, C: Float[Array, "#d r r"]) -> Float[Array, "S r r"]:
    """Return the responses ``V_l = sum_i Var(X_li) C_i``."""
    return jnp.mean(data.gamma[:, :, None, None] * C, 1)


def _regression_slope(
    data: Sample, h: Float[Array, "L r n"], g: Float[Array, "L r n"], mask: Bool[Array, " n"] | float
) -> Float[Array, "L r r"]:
    """Estimate ``sum_mu dg_l/dh_l`` as n times the coefficient of h_l in a regression of g_l on h_l, y_l.

    By Gaussian integration by parts, the coefficients of the linear regression of a function of Gaussian fields are the
    means of its derivatives, jumps included.

    Args:
        mask: marks the sentences that count, those of one kind; 1.0 if all count.
    """
    r, n = h.shape[1], jnp.sum(mask * jnp.ones_like(h[0, 0]))
    regressors = jnp.concatenate([h, data.fields], 1)
    regressors, g = (mask * (a - jnp.sum(mask * a, -1, keepdims=True) / n) for a in (regressors, g))
    gram = inner_products(regressors, regressors)
    return n * jnp.swapaxes(solve(gram, inner_products(regressors, g))[:, :r], 1, 2)


def _derivative_slope(
    model: Model, data: Sample, z: Float[Array, "L r n"], V: Float[Array, "L r r"], mask: Bool[Array, " n"] | float
) -> Float[Array, "L r r"]:
    """Return ``sum_mu dg_l/dh_l`` from derivatives of the proximal operator at the sentences that count."""
    (L, r, _), n = z.shape, jnp.sum(mask * jnp.ones_like(z[0, 0]))
    jacobian = ProxProblem(model, V, data.fields).jacobian(z).reshape(L, r, L, r, -1)
    slope = jnp.stack([jnp.sum(mask * jacobian[l, :, l], -1) for l in range(L)]) - n * jnp.eye(r, dtype=z.dtype)
    return inverse(V) @ slope


def _step(
    model: Model, data: Sample, s: _State, memory: PyTree, search: Bool[Array, ""], derivative: Bool[Array, ""]
) -> tuple[_State, PyTree]:
    """Return the undamped image of a state, with the lowest minimisers if `search`, else those of the same wells.

    The memory of the data after the step is returned, too.
    """
    d, r = s.Q.shape
    V, y = responses(data, s.C), data.fields
    by_kind = partial(map_kinds, model, data.classes)
    Z, memory = data.student_fields(s.Q, memory)
    h = Z - by_kind(lambda m: apply(m.sentence.to_tokens(V), s.g))
    tol = 4 * float(jnp.finfo(h.dtype).eps) ** 0.5

    def problem(m: Model) -> ProxProblem:
        return ProxProblem(m, m.sentence.to_tokens(V), y)

    z = lax.cond(
        search,
        lambda: by_kind(lambda m: prox(problem(m), h, extra_starts=s.z[None]).z.astype(h.dtype)),
        lambda: by_kind(lambda m: descend(problem(m), s.z, h, tol)[0]),
    )
    g = by_kind(lambda m: apply(inverse(m.sentence.to_tokens(V)), z - h))

    def slope_of(m: Model) -> Float[Array, "S r r"]:
        mask = kind_mask(m, data.classes)
        slope = lax.cond(
            derivative,
            lambda: _derivative_slope(m, data, z, m.sentence.to_tokens(V), mask),
            lambda: _regression_slope(data, h, g, mask),
        )
        return m.sentence.to_classes(slope)

    slope = over_kinds(model, slope_of)
    A = -jnp.einsum("li,lab->iab", data.gamma, symmetric(slope)) / d
    Lam = model.lam * jnp.eye(r, dtype=h.dtype) + A
    product, memory = data.back_project(g, memory)
    b = product + jnp.einsum("iab,ib->ia", A, s.Q)
    if model.penalty is not None:
        return _State(*minimiser_and_response(model.penalty, Lam, b), g, z), memory
    C = inverse(Lam)
    return _State(jnp.einsum("iab,ib->ia", C, b), C, g, z), memory


def _history_with(history: Overlaps, k: Int[Array, ""], data: Sample, s: _State) -> Overlaps:
    """Write the overlaps of a state into entry k of the history, those before step k."""
    overlaps = data.overlaps(s.Q, responses(data, s.C))
    return jax.tree.map(lambda a, v: a.at[k].set(v), history, overlaps)


def _first(
    model: Model,
    data: Sample,
    memory: PyTree,
    Q: Float[Array, "d r"],
    Z: Float[Array, "L r n"],
    warm_start: tuple[Float[Array, "#d r r"], Float[Array, "L r n"]] | None,
    options: _Options,
) -> _Loop:
    """Return the loop before the first step, with the variances and messages of an earlier run if given.

    Otherwise the messages of a damped run are minus the gradient of the loss at X Q. The proximal operator then maps h
    to X Q, so a start that is a critical point of the risk does not move. Messages of an undamped run are zero, so that
    it follows state evolution from the first iteration on. The variances are half the prior's, as if the data added
    as much curvature as the ridge.
    """
    r, dtype = Q.shape[1], Q.dtype
    if warm_start is None:
        curvature, count = model.lam, data.gamma.shape[1]
        if model.penalty is not None:  # add its average curvature over weights of order one
            curvature, count = curvature + jax.grad(model.penalty.value)(jnp.ones((), dtype)), Q.shape[0]
        C = jnp.broadcast_to(jnp.eye(r, dtype=dtype) / (2 * curvature), (count, r, r))
        g = -map_kinds(model, data.classes, lambda m: gradient_at_nodes(m, Z, data.fields))
        warm_start = C, jnp.where(options.automatic | (options.damping < 1), g, 0.0)
    first = _State(Q, *warm_start, Z)
    blank = jax.tree.map(lambda a: jnp.full((options.steps + 1, *a.shape), jnp.nan, dtype), data.overlaps(Q))
    inf, zero = jnp.asarray(jnp.inf, dtype), jnp.array(0, jnp.int32)
    return _Loop(
        state=first,
        fallback=first,
        damping=Damping(options.damping, jnp.asarray(_MAX_DAMPING, dtype), inf, inf, zero),
        steps=zero,
        failure=jnp.asarray(Status.converged, jnp.int32),
        history=_history_with(blank, zero, data, first),
        residuals=jnp.full(options.steps, jnp.nan, dtype),
        memory=memory,
    )


@eqx.filter_jit
@precise
def _run(
    model: Model,
    data: Sample,
    Q: Float[Array, "d r"],
    warm_start: tuple[Float[Array, "#d r r"], Float[Array, "L r n"]] | None,
    options: _Options,
) -> GAMP:
    tol = jnp.maximum(options.tol, 20 * jnp.finfo(Q.dtype).eps)
    burn_in, collinear = (_BURN_IN, _COLLINEAR) if warm_start is None else (0, 0)
    # Every step takes a product on each side; one more comes before the first step, and one or two after the last one.
    memory = data.memory(Q.shape[1] * (options.steps + 3), options.steps)
    Z, memory = data.student_fields(Q, memory)

    def cost(Q: Float[Array, "d r"]) -> Float[Array, ""]:
        return 0.5 * model.lam * jnp.sum(Q**2) + model.penalty_of(Q)

    def risk(Q: Float[Array, "d r"], Z: Float[Array, "L r n"]) -> Float[Array, ""]:
        return jnp.sum(sentence_losses(model, data, Z)) + cost(Q)

    bound = jnp.maximum(risk(Q, Z), risk(0 * Q, 0 * Z))

    def body(p: _Loop) -> _Loop:
        search = p.steps < burn_in
        derivative = options.derivative | (p.steps < collinear)
        image, memory = _step(model, data, p.state, p.memory, search, derivative)
        trial = jax.tree.map(lambda a, b: a + p.damping.share * (b - a), p.state, image)
        trial = eqx.tree_at(lambda s: s.z, trial, image.z)
        finite = image.finite()
        possible = finite & image.positive(model) & ~(cost(trial.Q) > bound)
        residual = jnp.where(possible, image.distance(p.state), jnp.inf)
        damping = p.damping.after(residual, possible, search, options.automatic)
        state, fallback = (either(possible, *pair) for pair in ((trial, p.fallback), (p.state, p.fallback)))
        failed = ~possible & (~options.automatic | (damping.share < _MIN_DAMPING))
        failure = jnp.where(finite, Status.left_domain, Status.nonfinite)
        return _Loop(
            state=state,
            fallback=fallback,
            damping=damping,
            steps=p.steps + 1,
            failure=jnp.where(failed, failure, Status.converged).astype(jnp.int32),
            history=_history_with(p.history, p.steps + 1, data, state),
            residuals=p.residuals.at[p.steps].set(residual),
            memory=memory,
        )

    def unfinished(p: _Loop) -> Bool[Array, ""]:
        return (p.failure == Status.converged) & ~(p.damping.residual <= tol) & (p.steps < options.steps)

    p = lax.while_loop(unfinished, body, _first(model, data, memory, Q, Z, warm_start, options))
    s = p.state
    value, gradient, memory = risk_and_gradient(model, data, False, s.Q, p.memory)
    if model.penalty is not None:  # damped weights reach a kink up to rounding only; a proximal step puts them on it
        proximal = model.penalty.prox(s.Q - gradient, jnp.ones_like(s.Q))
        s = eqx.tree_at(lambda s: s.Q, s, jnp.where(p.damping.residual <= tol, proximal, s.Q))
        value, gradient, _ = risk_and_gradient(model, data, False, s.Q, memory)
    status = jnp.where(p.failure != Status.converged, p.failure, Status.max_steps)
    return GAMP(
        Q=s.Q,
        overlaps=indexed(p.history, p.steps),
        train_loss=(value + model.penalty_of(s.Q)) / s.Q.shape[0],
        gradient_norm=gradient_norm(model, s.Q, gradient),
        iterations=p.steps,
        status=jnp.where(p.damping.residual <= tol, Status.converged, status).astype(jnp.int32),
        residual=p.damping.residual,
        damping=p.damping.share,
        C=s.C,
        g=s.g,
        history=p.history,
        residuals=p.residuals,
    )
