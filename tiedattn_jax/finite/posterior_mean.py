"""Message passing of the Bayes-optimal learner on the rows of a data matrix.

# notation: d dimension, t rank of the teacher; i, l and mu number coordinates, tokens and sentences. Q (d, t) is the
# estimate of the teacher and C_i (t, t) the posterior variance of its row i. Given the labels of all other sentences, a
# field of the teacher has the mean w_l and the variance V_l. O is a label, Z(O, w) its evidence, and g_l its score, see
# `bayes.channel`.

The loop is that of `gamp` with two replacements: the score of a label for the messages of the proximal operator, and
the Gaussian prior of the teacher for the ridge.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ..base.arrays import apply, precise
from ..base.errors import (
    INT32,
    InputError,
    is_concrete,
    require_choice,
    require_count,
    require_key,
    require_positive,
    shaped_array,
)
from ..base.report import Description, Result, Status, rows_of
from ..bayes.channel import curvature, labels_at_nodes, score, solve_general
from ..bayes.fixed_points import check_bayes
from ..model.model import Model, Preimages
from ..model.overlaps import symmetric
from .data import Data
from .estimate import check_fit
from .products import back_project, covariances, student_fields

_START_SCALE = 0.1  # standard deviation of the entries of a random start


class PosteriorMean(Result):
    """The estimate of the teacher by message passing of the Bayes-optimal learner.

    Attributes:
        Q: estimate of the mean of the posterior, (d, t). If the labels do not fix the sign of the teacher, or a
            rotation of its columns, those of the estimate are arbitrary.
        C: posterior variance of the rows of the teacher, (d, t, t), or (1, t, t) if it is the same for all rows.
        q: overlap of the estimate with itself, ``Q^T Sigma_l Q / d``, (S, t, t) for S covariances.
        theta: overlap of the estimate with the teacher, (S, t, t); NaN if the data have no teacher.
        iterations: number of steps taken.
        residual: relative change of Q in the last step.
        status: a `Status`, as an integer.
        history: q at the start and after every step, (steps + 1, S, t, t); NaN for steps that were not taken.
    """

    Q: Float[Array, "d t"]
    C: Float[Array, "i t t"]
    q: Float[Array, "S t t"]
    theta: Float[Array, "S t t"]
    iterations: Int[Array, ""]
    residual: Float[Array, ""]
    status: Int[Array, ""]
    history: Float[Array, "steps S t t"]
    batch_probe = "residual", 0

    def describe(self) -> Description:
        d, t = self.Q.shape
        numbers = {"q": self.q} if np.all(np.isnan(self.theta)) else {"q": self.q, "theta": self.theta}
        title = f"estimate of the teacher of shape ({d}, {t}) after {self.iterations} iterations"
        return Description(title, self.status_name, rows_of(numbers))


class _LoopState(eqx.Module):
    """What one step passes to the next."""

    Q: Array
    C: Array
    g: Array  # scores (L, t, n) of the labels
    count: Array  # number of steps taken
    residual: Array
    history: Array


def posterior_mean(
    model: Model,
    data: Data,
    init: Any = "random",
    *,
    steps: int = 500,
    tol: float = 1e-8,
    key: Array | None = None,
) -> PosteriorMean:
    """Estimate the teacher as well as its labels allow, by message passing; `bayes` predicts the overlap for large d.

    X_l (n, d) are the inputs of token l without the encodings, which are known, and ``Var(X_li) = gamma_li / d`` is the
    variance of column i. One step is::

        V_l = sum_i Var(X_li) C_i      w_l = X_l Q - V_l g_l      g_l = d log Z(O, w) / dw_l
        A_i = -sum_l Var(X_li) sum_mu dg_l/dw_l      C_i = (P^{-1} + A_i)^{-1}
        Q_i = C_i (sum_l X_li^T g_l + A_i Q_i)

    P (t, t) is the variance of a row of the teacher before the labels are seen: the second moment `pi` of the model's
    law. A_i is what the labels add to its precision P^{-1}. Works under `jit` and `vmap`.

    Args:
        model: the target and the laws of data and teacher. Its `Model.preimages` say which teacher fields have a label.
        data: the sentences. The run uses only what the labels reveal of the teacher's fields.
        init: the first Q: "random" for small random entries, "teacher" for the teacher of the data, or an array (d, t).
        steps: largest number of steps.
        tol: relative change of Q below which to stop; smaller values count as 20 times the rounding of the dtype.
        key: random key of a random start; by default that of seed 0.

    Returns:
        A `PosteriorMean`. Near weak recovery the overlap grows slowly, and differs from one instance to the next.

    Raises:
        InputError: as `bayes`; an argument is out of range or of the wrong shape; the teacher has other second
            moments at different eigenvalues; or the tokens have classes.
    """
    check_bayes(model)
    check_fit(model, data)
    data = data.stored("for `posterior_mean`")
    if data.classes is not None:
        raise InputError("data", "must have no classes of tokens for `posterior_mean`: `bayes` takes them")
    require_count(steps, "steps", maximum=INT32)
    require_positive(tol, "tol")
    key = jax.random.key(0) if key is None else key
    require_key(key)
    pi = model.law().pi
    if is_concrete(pi) and not np.allclose(pi, pi[:1]):
        raise InputError("model", "must have a teacher of one second moment pi at all eigenvalues")
    d, t = data.shape[2:]
    if isinstance(init, str):
        init = require_choice(init, "init", ("random", "teacher"))
        random = _START_SCALE * jax.random.normal(key, (d, t), data.x.dtype)
        Q = random if init == "random" else data.known_teacher("for init='teacher'")
    else:
        Q = shaped_array("init", init, "d t", {"d": d, "t": t}, data.x.dtype)
    return _run(model, data, Q, int(steps), jnp.maximum(jnp.asarray(tol, Q.dtype), 20 * jnp.finfo(Q.dtype).eps))


@eqx.filter_jit
@precise
def _run(model: Model, data: Data, Q: Array, steps: int, tol: Array) -> PosteriorMean:
    """Run the loop from the first estimate Q."""
    d, t = Q.shape
    P, eye, encodings = model.law().pi[0], jnp.eye(t, dtype=Q.dtype), data.encodings / d**0.5
    labels = labels_at_nodes(model, data.fields)

    def scores(label: Preimages, w: Array, V: Array) -> tuple[Array, Array]:
        return score(label, w, V), curvature(label, w, V)

    def step(s: _LoopState) -> _LoopState:
        V = jnp.mean(data.gamma[:, :, None, None] * s.C, 1)
        w = student_fields(data.x, s.Q) - (encodings @ s.Q)[..., None] - apply(V, s.g)
        g, slope = jax.vmap(scores, (0, -1, None), (-1, 0))(labels, w, V)
        A = -jnp.einsum("li,lab->iab", data.gamma, symmetric(jnp.einsum("nlalb->lab", slope))) / d
        b = back_project(data.x, g) - jnp.einsum("li,la->ia", encodings, jnp.sum(g, -1))
        C = solve_general(eye + P @ A, jnp.broadcast_to(P, A.shape))
        new = jnp.einsum("iab,ib->ia", jnp.broadcast_to(C, (d, t, t)), b + jnp.einsum("iab,ib->ia", A, s.Q))
        change = jnp.linalg.norm(new - s.Q) / jnp.linalg.norm(new)
        history = s.history.at[s.count + 1].set(covariances(data.gamma, new, new))
        return _LoopState(new, C, g, s.count + 1, change, history)

    q = covariances(data.gamma, Q, Q)
    history = jnp.full((steps + 1, *q.shape), jnp.nan, Q.dtype).at[0].set(q)
    C = P[None] * jnp.ones((data.gamma.shape[1], 1, 1), Q.dtype)
    g = jnp.zeros((data.shape[0], t, data.shape[1]), Q.dtype)
    first = _LoopState(Q, C, g, jnp.asarray(0), jnp.asarray(jnp.inf, Q.dtype), history)
    s = lax.while_loop(lambda s: (s.residual > tol) & (s.count < steps), step, first)
    status = jnp.where(s.residual <= tol, Status.converged, Status.max_steps)
    theta = jnp.full_like(q, jnp.nan) if data.teacher is None else covariances(data.gamma, s.Q, data.teacher)
    return PosteriorMean(
        Q=s.Q,
        C=s.C,
        q=covariances(data.gamma, s.Q, s.Q),
        theta=theta,
        iterations=s.count,
        residual=s.residual,
        status=jnp.where(jnp.isfinite(s.residual), status, Status.nonfinite),
        history=s.history,
    )
