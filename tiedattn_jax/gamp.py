"""Generalised approximate message passing (Algorithm 1) on the rows of a data matrix.

# notation: w (d, r) the estimate, C its variance, V_l the responses, g_l = V_l^{-1} (prox(h_l) - h_l) the messages.

The algorithm runs on the same `loss` and the same `prox` as the theory. Where it stands still, ``g`` is minus the
gradient of the loss in the fields and ``lambda w = sum_l X_l^T g_l``: its fixed points are exactly the critical points
of the empirical risk, and its V and overlaps are what state evolution predicts for large d.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .data import Data, back_project, check_estimate, sentence_losses, start, student_fields
from .model import Model, is_concrete, require
from .overlaps import Overlaps, symmetric
from .prox import _apply, _descend, gradient_at_nodes, prox, prox_jacobian
from .state_evolution import Status

# Minimisers are searched for globally in the first steps only; then each sentence stays in its well. Sentences near the
# surface where the minimiser jumps would otherwise go to and fro between two wells for ever: on the positional branch
# at d = 1000, alpha = 2, about one sentence in a thousand does, which keeps the residual at 1e-2 .. 1e-1.
_BURN_IN = 20
_RISES = 3  # of the residual in a row are an instability; one is a sentence that changes wells
_COLLINEAR = 10  # steps in which the student's fields may still be a multiple of the teacher's
_WELL_STEPS = 60  # of Newton's method
# The automatic damping. Undamped, the eigenvalues reach -5.5 on the positional branch at alpha = 2, where any share
# above .3 must fail, and in the first steps leads away from it. Slow recovery after these finds the largest that works.
# An order parameter growing out of an unstable state makes the residual grow at any damping: hence a floor.
_FIRST_DAMPING = 0.2
_MOST_DAMPING = 0.5
_FLOOR = 0.05
_LEAST_DAMPING = 0.003
_RECOVERY = 1.03


class GAMP(eqx.Module):
    """Where GAMP ended.

    Attributes:
        w: estimate, (d, r).
        overlaps: q, V (L, r, r), theta (L, r, t), m (L, r) of the estimate on this instance.
        train_loss: empirical risk / d at `w`.
        gradient_norm: largest entry of the gradient of the empirical risk at `w`.
        iterations: steps taken.
        status: a `Status`, as an integer.
        residual: undamped relative change of w, C and g in the last step.
        damping: share of the new state in the last step.
        C: variance of the estimate, (1, r, r) where all coordinates are alike and (d, r, r) otherwise.
        g: the messages of the sentences, (L, r, n).
        history: overlaps before every step, arrays of leading size steps + 1; NaN after the last one.
        residuals: residual of every step, (steps,); NaN after the last one.
    """

    w: jax.Array
    overlaps: Overlaps
    train_loss: jax.Array
    gradient_norm: jax.Array
    iterations: jax.Array
    status: jax.Array
    residual: jax.Array
    damping: jax.Array
    C: jax.Array
    g: jax.Array
    history: Overlaps
    residuals: jax.Array

    @property
    def ok(self) -> jax.Array:
        """Whether this is a fixed point."""
        return self.status == Status.converged


class _State(eqx.Module):
    w: jax.Array
    C: jax.Array
    g: jax.Array
    z: jax.Array  # minimisers of the last step, from which the next ones start


class _Loop(eqx.Module):
    now: _State
    safe: _State  # the last state from which a step was possible
    damping: jax.Array
    ceiling: jax.Array  # of the damping: it has failed above
    residual: jax.Array
    least: jax.Array  # residual since the last cut of the damping
    rises: jax.Array  # steps in a row in which the residual rose
    steps: jax.Array
    failure: jax.Array  # what ended the run, or `converged` while nothing has
    history: Overlaps
    residuals: jax.Array


def gamp(
    model: Model,
    data: Data,
    init: Any = "semantic",
    *,
    steps: int = 1000,
    tol: float = 1e-12,
    damping: float | None = None,
    response: str = "regression",
    key: jax.Array | None = None,
    scale: float | None = None,
) -> GAMP:
    """GAMP (Algorithm 1) with one Onsager term per token and variances of r x r.

    One step, with ``Var(X_li) = gamma_li / d``::

        V_l = sum_i Var(X_li) C_i        h_l = X_l w - V_l g_l        g_l = V_l^{-1} (prox(h)_l - h_l)
        A_i = - sum_l Var(X_li) sum_mu dg_l/dh_l    b_i = sum_l X_li^T g_l + A_i w_i
        C_i = (lambda I + A_i)^{-1}      w_i = C_i b_i

    and then w, C and g move by a share of the way, the damping. Works under `jit` and under `vmap` over instances.

    Args:
        model: loss and ridge.
        data: the instance.
        init: "semantic", "positional", "random", or an array (d, r), see `tiedattn_jax.data.start`; or an earlier
            `GAMP` on the same data, to go on from its estimate, variances and messages.
        steps: at most so many.
        tol: undamped relative residual at which to stop; not below twenty roundings of the dtype.
        damping: share of the new state in a step, in (0, 1], kept fixed; 1 is the undamped algorithm. By default it is
            found: it starts at .2 and grows, until the residual rises several times in a row or a step is impossible;
            then it is halved, and kept below what failed.
        response: how A is found: "regression", from the linear regression of g on the fields; or "derivative", from
            dg/dh sentence by sentence, as in Algorithm 1. They are equal for large d unless the proximal operator
            jumps: derivatives miss the jumps, and the theory's V includes them. Either way the fixed points are
            critical points of the risk; but V decides which well a sentence is in, and derivatives diverge where a
            sentence comes to the end of its well, so that not every instance has a fixed point then.
        key: of random starts.
        scale: of a named start.

    Returns:
        A `GAMP`. When a fixed damping diverges, its status says so and the state is the last finite one.

    Raises:
        ValueError: naming the argument that is out of range or of the wrong shape.
    """
    require(isinstance(steps, (int, np.integer)) and steps >= 1, "steps", steps, "an integer of at least 1")
    if is_concrete(tol):
        require(np.isfinite(tol) and tol > 0, "tol", tol, "positive")
    if damping is not None and is_concrete(damping):
        require(
            np.isfinite(damping) and 0 < damping <= 1, "damping", damping, "in (0, 1], or None for an automatic choice"
        )
    if response not in ("regression", "derivative"):
        raise ValueError(f"response must be 'regression' or 'derivative', got response={response!r}")
    state: tuple[jax.Array, jax.Array | None, jax.Array | None]
    if isinstance(init, GAMP):
        state = check_estimate("init.w", model, data, init.w), init.C, init.g
    else:
        state = start(model, data, init, key, scale), None, None
    dtype = data.x.dtype
    share = jnp.asarray(_FIRST_DAMPING if damping is None else damping, dtype)
    w, C, g = state
    options = jnp.asarray(damping is None), jnp.asarray(response == "derivative")  # arrays: one program for all
    return _run(model, data, w, C, g, int(steps), jnp.asarray(tol, dtype), share, *options)


def responses(data: Data, C: jax.Array) -> jax.Array:
    """``V_l = sum_i Var(X_li) C_i``: (1 or d, r, r) -> (L, r, r)."""
    size = max(C.shape[0], data.gamma.shape[1])
    gamma = jnp.broadcast_to(data.gamma, (data.gamma.shape[0], size))
    return jnp.einsum("li,iab->lab", gamma, jnp.broadcast_to(C, (size, *C.shape[1:]))) / size


def _regression_slope(data: Data, h: jax.Array, g: jax.Array) -> jax.Array:
    """``sum_mu dg_l/dh_l`` without a derivative, (L, r, r): n times the coefficient of h_l in the regression on h_l, y_l.

    By Gaussian integration by parts the coefficients of the linear regression of a function of Gaussian fields are the
    means of its derivatives, jumps included.
    """
    _, r, n = h.shape
    regressors = jnp.concatenate([h, data.fields], 1)
    regressors, g = (a - jnp.mean(a, -1, keepdims=True) for a in (regressors, g))
    gram = jnp.einsum("lan,lbn->lab", regressors, regressors)
    return n * jnp.swapaxes(jnp.linalg.solve(gram, jnp.einsum("lan,lbn->lab", regressors, g))[:, :r], 1, 2)


def _step(model: Model, data: Data, s: _State, search: jax.Array, derivative: jax.Array) -> _State:
    """The undamped image of a state: with the lowest minimisers if `search`, else with those of the same wells."""
    L, n, d, _ = data.shape
    r = s.w.shape[1]
    V = responses(data, s.C)
    inverse = jnp.linalg.inv(V) if r > 1 else 1 / V
    h = student_fields(data.x, s.w) - _apply(V, s.g)
    y = data.fields
    tol = 4 * float(jnp.finfo(h.dtype).eps) ** 0.5
    z = lax.cond(
        search,
        lambda: prox(model, h, V, y, near=s.z[None]).z.astype(h.dtype),
        lambda: _descend(model, s.z, h, V, y, _WELL_STEPS, tol)[0],
    )
    g = _apply(inverse, z - h)
    jacobian = prox_jacobian(model, z, V, y).reshape(L, r, L, r, n)
    slope = jnp.stack([jnp.sum(jacobian[l, :, l], -1) for l in range(L)]) - n * jnp.eye(r, dtype=h.dtype)
    slope = inverse @ slope
    slope = symmetric(jnp.where(derivative, slope, _regression_slope(data, h, g)))
    A = -jnp.einsum("li,lab->iab", data.gamma, slope) / d
    precision = model.lam * jnp.eye(r, dtype=h.dtype) + A
    C = jnp.linalg.inv(precision) if r > 1 else 1 / precision
    b = back_project(data.x, g) + jnp.einsum("iab,ib->ia", jnp.broadcast_to(A, (d, r, r)), s.w)
    return _State(jnp.einsum("iab,ib->ia", jnp.broadcast_to(C, (d, r, r)), b), C, g, z)


def _possible(s: _State) -> jax.Array:
    """Whether a state is finite with positive definite variances."""
    if s.C.shape[-1] == 1:
        positive = jnp.all(s.C > 0)
    else:
        positive = jnp.all(jnp.isfinite(jnp.linalg.cholesky(s.C)))
    return positive & _finite(s)


def _finite(s: _State) -> jax.Array:
    return jnp.all(jnp.isfinite(s.w)) & jnp.all(jnp.isfinite(s.C)) & jnp.all(jnp.isfinite(s.g))


def _distance(a: _State, b: _State) -> jax.Array:
    """Largest relative change of w, C and g."""
    pairs = ((a.w, b.w), (a.C, b.C), (a.g, b.g))
    tiny = jnp.finfo(a.w.dtype).tiny
    return jnp.max(jnp.stack([jnp.sqrt(jnp.sum((p - q) ** 2) / (jnp.sum(p**2) + tiny)) for p, q in pairs]))


@eqx.filter_jit
def _run(
    model: Model,
    data: Data,
    w: jax.Array,
    C: jax.Array | None,
    g: jax.Array | None,
    steps: int,
    tol: jax.Array,
    damping: jax.Array,
    automatic: jax.Array,
    by_derivative: jax.Array,
) -> GAMP:
    L, _, _, t = data.shape
    r, dtype = w.shape[1], w.dtype
    tol = jnp.maximum(tol, 20 * jnp.finfo(dtype).eps)

    def field_gradient(Z: jax.Array) -> jax.Array:
        return gradient_at_nodes(model, Z, data.fields)

    # Messages that agree with the start: h is then the point whose proximal operator is X w, and a start that is a
    # critical point of the risk stays where it is. Variances: the prior's, halved by as much data.
    Z = student_fields(data.x, w)
    resumed = C is not None
    if not resumed:
        C = jnp.broadcast_to(jnp.eye(r, dtype=dtype) / (2 * model.lam), (data.gamma.shape[1], r, r))
        g = -field_gradient(Z)
    burn_in, collinear = (0, 0) if resumed else (_BURN_IN, _COLLINEAR)
    assert C is not None and g is not None
    first = _State(w, C, g, Z)
    blank = Overlaps(*(jnp.full((steps + 1, L, *s), jnp.nan, dtype) for s in ((r, r), (r, r), (r, t), (r,))))
    inf = jnp.asarray(jnp.inf, dtype)
    zero = jnp.array(0, jnp.int32)
    none = jnp.asarray(Status.converged, jnp.int32)

    def measure(s: _State) -> Overlaps:
        return data.overlaps(s.w, responses(data, s.C))

    def record(history: Overlaps, k: jax.Array, s: _State) -> Overlaps:
        return jax.tree.map(lambda a, v: a.at[k].set(v), history, measure(s))

    def body(p: _Loop) -> _Loop:
        search = p.steps < burn_in
        image = _step(model, data, p.now, search, by_derivative | (p.steps < collinear))
        possible = _possible(image)
        residual = jnp.where(possible, _distance(image, p.now), inf)
        rises = jnp.where(residual > p.residual, p.rises + 1, 0)
        moved = jax.tree.map(lambda a, b: a + p.damping * (b - a), p.now, image)
        moved = eqx.tree_at(lambda s: s.z, moved, image.z)
        grown = possible & (rises >= _RISES) & (residual > 1.5 * p.least)
        higher = jnp.where(search, 1.0, _RECOVERY) * p.damping
        share = jnp.where(grown, jnp.maximum(0.5 * p.damping, _FLOOR), higher)
        ceiling = jnp.where(grown | ~possible, jnp.maximum(0.8 * p.damping, _FLOOR), 1.002 * p.ceiling)
        ceiling = jnp.minimum(ceiling, _MOST_DAMPING)
        share = jnp.minimum(jnp.where(possible, share, 0.5 * p.damping), ceiling)
        share = jnp.where(automatic, share, p.damping)
        failed = ~possible & (~automatic | (share < _LEAST_DAMPING))
        least = jnp.where(grown | ~possible, residual, jnp.minimum(p.least, residual))
        what = jnp.where(_finite(image), Status.left_domain, Status.nonfinite)
        now = jax.tree.map(lambda a, b: jnp.where(possible, a, b), moved, p.safe)
        return _Loop(
            now=now,
            safe=jax.tree.map(lambda a, b: jnp.where(possible, a, b), p.now, p.safe),
            damping=share,
            ceiling=ceiling,
            residual=residual,
            least=least,
            rises=rises,
            steps=p.steps + 1,
            failure=jnp.where(failed, what, none).astype(jnp.int32),
            history=record(p.history, p.steps + 1, now),
            residuals=p.residuals.at[p.steps].set(residual),
        )

    def unfinished(p: _Loop) -> jax.Array:
        return (p.failure == none) & (p.residual > tol) & (p.steps < steps)

    p = _Loop(
        now=first,
        safe=first,
        damping=damping,
        ceiling=jnp.asarray(_MOST_DAMPING, dtype),
        residual=inf,
        least=inf,
        rises=zero,
        steps=zero,
        failure=none,
        history=record(blank, zero, first),
        residuals=jnp.full(steps, jnp.nan, dtype),
    )
    p = lax.while_loop(unfinished, body, p)
    s = p.now
    Z = student_fields(data.x, s.w)
    gradient = back_project(data.x, field_gradient(Z)) + model.lam * s.w
    return GAMP(
        w=s.w,
        overlaps=measure(s),
        train_loss=(jnp.sum(sentence_losses(model, data, Z)) + 0.5 * model.lam * jnp.sum(s.w**2)) / s.w.shape[0],
        gradient_norm=jnp.max(jnp.abs(gradient)),
        iterations=p.steps,
        status=jnp.where(p.residual <= tol, none, jnp.where(p.failure != none, p.failure, Status.max_steps)),
        residual=p.residual,
        damping=p.damping,
        C=s.C,
        g=s.g,
        history=p.history,
        residuals=p.residuals,
    )
