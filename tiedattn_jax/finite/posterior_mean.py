"""Message passing of the Bayes-optimal learner on the rows of a data matrix.

# notation: Q (d, t) the estimate of the teacher and C its variance, V_l the variance of a field given the other labels,
# w_l its mean, g_l the score of a label, see `bayes.channel`.

The loop is that of `gamp` with two other lines: the score takes the place of the proximal operator, and the Gaussian
prior of the teacher that of the ridge.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

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
from ..base.linalg import apply, precise
from ..base.printing import Description, rows_of
from ..base.results import Result, Status
from ..bayes.channel import curvature, labels_at_nodes, score
from ..bayes.fixed_points import check_bayes
from ..bayes.potentials import solve_general
from ..model.model import Model
from ..model.overlaps import symmetric
from ..model.preimages import Preimages
from .data import Data
from .estimate import check_fit
from .products import back_project, covariances, student_fields

_SCALE = 0.1  # size of the entries of a random start


class PosteriorMean(Result):
    """The estimate of the teacher by message passing of the Bayes-optimal learner.

    Attributes:
        Q: estimate of the mean of the posterior, (d, t); its sign, or rotation, is arbitrary.
        C: variance of its coordinates, (d, t, t) or (1, t, t).
        q: overlap of the estimate with itself, ``Q^T Sigma_l Q / d``, (S, t, t).
        theta: overlap with the teacher, (S, t, t); NaN if the data have no teacher.
        iterations: number of steps taken.
        residual: relative change of Q in the last step.
        status: a `Status`, as an integer.
        history: q before every step and at the end, (steps + 1, S, t, t); NaN after the end.
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


class _Step(eqx.Module):
    Q: Array
    C: Array
    g: Array
    count: Array
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

    One step, with ``Var(X_li) = gamma_li / d`` and the encodings, which are known, taken out of the inputs::

        V_l = sum_i Var(X_li) C_i      w_l = X_l Q - V_l g_l      g_l = d log Z(O, w) / dw_l
        A_i = -sum_l Var(X_li) sum_mu dg_l/dw_l      C_i = (P^{-1} + A_i)^{-1}
        Q_i = C_i (sum_l X_li^T g_l + A_i Q_i)

    P is the second moment of the teacher's entries in the law of the model. Works under `jit` and `vmap`.

    Args:
        model: the target and the laws of data and teacher; what its labels say is declared by `Model.preimages`.
        data: the instance. Of the teacher's fields only what the labels reveal is used.
        init: "random", small and random; "teacher", the informed start; or an array (d, t).
        steps: largest number of steps.
        tol: relative change of Q at which to stop; at least 20 roundings of the dtype.
        key: random key of the start; by default that of seed 0.

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
        random = _SCALE * jax.random.normal(key, (d, t), data.x.dtype)
        Q = random if init == "random" else data.known_teacher("for init='teacher'")
    else:
        Q = shaped_array("init", init, "d t", {"d": d, "t": t}, data.x.dtype)
    return _run(model, data, Q, int(steps), jnp.maximum(jnp.asarray(tol, Q.dtype), 20 * jnp.finfo(Q.dtype).eps))


@eqx.filter_jit
@precise
def _run(model: Model, data: Data, Q: Array, steps: int, tol: Array) -> PosteriorMean:
    d, t = Q.shape
    P, eye, encodings = model.law().pi[0], jnp.eye(t, dtype=Q.dtype), data.encodings / d**0.5
    labels = labels_at_nodes(model, data.fields)

    def scores(label: Preimages, w: Array, V: Array) -> tuple[Array, Array]:
        return score(label, w, V), curvature(label, w, V)

    def step(s: _Step) -> _Step:
        V = jnp.mean(data.gamma[:, :, None, None] * s.C, 1)
        w = student_fields(data.x, s.Q) - (encodings @ s.Q)[..., None] - apply(V, s.g)
        g, slope = jax.vmap(scores, (0, -1, None), (-1, 0))(labels, w, V)
        A = -jnp.einsum("li,lab->iab", data.gamma, symmetric(jnp.einsum("nlalb->lab", slope))) / d
        b = back_project(data.x, g) - jnp.einsum("li,la->ia", encodings, jnp.sum(g, -1))
        C = solve_general(eye + P @ A, jnp.broadcast_to(P, A.shape))
        new = jnp.einsum("iab,ib->ia", jnp.broadcast_to(C, (d, t, t)), b + jnp.einsum("iab,ib->ia", A, s.Q))
        change = jnp.linalg.norm(new - s.Q) / jnp.linalg.norm(new)
        history = s.history.at[s.count + 1].set(covariances(data.gamma, new, new))
        return _Step(new, C, g, s.count + 1, change, history)

    q = covariances(data.gamma, Q, Q)
    history = jnp.full((steps + 1, *q.shape), jnp.nan, Q.dtype).at[0].set(q)
    C = P[None] * jnp.ones((data.gamma.shape[1], 1, 1), Q.dtype)
    g = jnp.zeros((data.shape[0], t, data.shape[1]), Q.dtype)
    first = _Step(Q, C, g, jnp.asarray(0), jnp.asarray(jnp.inf, Q.dtype), history)
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
