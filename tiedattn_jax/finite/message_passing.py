"""Generalised approximate message passing (GAMP, Algorithm 1), and the posterior mean of the Bayes-optimal learner.

# notation: as in `channels`. Q (d, r) the estimate, the paper's w, C its variance, V_l the responses, g_l the messages

Both are one loop. `gamp` runs it with the proximal operator of the loss and the ridge, `posterior_mean` with the score
of the labels and the Gaussian prior of the teacher. `channels` has the step.

`gamp` uses the same `loss` and the same `prox` as the theory. At a fixed point ``g`` is minus the gradient of the loss
with respect to the fields, and ``lambda Q = sum_l X_l^T g_l``. The fixed points are therefore exactly the critical
points of the empirical risk. State evolution predicts their V and overlaps for large d.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Real

from ..base.arrays import AnyArray, Number, either, indexed, precise
from ..base.errors import (
    INT32,
    InputError,
    is_concrete,
    require_choice,
    require_count,
    require_key,
    require_memory,
    require_number,
    require_positive,
    shaped_array,
)
from ..base.report import picture
from ..base.results import Status
from ..bayes.fixed_points import check_bayes
from ..model.model import Model
from ..model.overlaps import Overlaps
from .channels import Iterate, Learner, bayes_learner, responses, risk_minimiser, step, teacher_moment
from .data import Data, Sample
from .diagnosis import check_estimate, check_fit
from .evaluation import Estimate, Units, largest, loss_unit, proximal_gradient
from .products import weight_unit
from .sampling import start
from .training import risk_and_gradient

_START_SCALE = 0.1  # standard deviation of the entries of a random start of the posterior mean, over the teacher's
_RISES = 3  # so many rises of the residual in a row mean an instability; one rise is a sentence that changes wells
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
    """The last state of a run of message passing, `gamp` or `posterior_mean`, and its history.

    Attributes:
        Q: estimate. That of `posterior_mean` is the mean of the posterior; if the labels do not fix the sign of the
            teacher, or a rotation of its columns, those of the estimate are arbitrary.
        overlaps: order parameters of the estimate on this instance. V is the response, or the posterior variance of the
            fields.
        iterations: number of steps taken.
        status: a `Status`, as an integer.
        C: variance of the rows of the estimate, (d, r, r); of size 1 along d if all coordinates have one variance and
            there is no penalty.
        g: messages of the sentences, or scores of their labels.
        residual: undamped relative change of Q, C and g in the last step; of Q alone in `posterior_mean`.
        history: overlaps before every step and at the end, arrays of leading size steps + 1; NaN after the end.
        residuals: residual of every step; NaN after the last one.
        train_loss: empirical risk / d at `Q`; None for `posterior_mean`, as the next two.
        gradient_norm: largest entry of the gradient of the empirical risk at `Q`; with a penalty, of the proximal
            gradient.
        damping: share of the new state for the next step.
    """

    C: Float[Array, "#d r r"]
    g: Float[Array, "L r n"]
    residual: Float[Array, ""]
    history: Overlaps
    residuals: Float[Array, " steps"]
    train_loss: Float[Array, ""] | None = None
    gradient_norm: Float[Array, ""] | None = None
    damping: Float[Array, ""] | None = None

    plot = picture(
        "simulations.gamp_figure", "order parameters and residual, iteration by iteration", "q", "theta", "m",
        "residual", many=lambda run: {"message passing": run},
    )  # fmt: skip


class _Options(eqx.Module):
    """Options of a run. The numbers are arrays, so that one compiled program serves all values."""

    steps: int = eqx.field(static=True)
    tol: Float[Array, ""]
    damping: Float[Array, ""]  # share of the new state in the first step
    automatic: Bool[Array, ""]  # whether the damping is chosen automatically
    undamped: bool = eqx.field(static=True, default=False)  # whether every step is a whole one, up to the last digit

    @property
    def least_residual(self) -> Float[Array, ""]:
        """The residual at which a run has converged: the tolerance, or twenty roundings of the dtype."""
        return jnp.maximum(self.tol, 20 * jnp.finfo(self.tol.dtype).eps)


class Damping(eqx.Module):
    """The damping, and the residuals by which it is chosen."""

    share: Float[Array, ""]  # share of the new state in the next step
    ceiling: Float[Array, ""]  # largest share allowed, because larger ones failed
    residual: Float[Array, ""]  # residual of the last step
    lowest: Float[Array, ""]  # smallest residual since the share was last cut
    rises: Int[Array, ""]  # number of steps in a row in which the residual rose

    def after(
        self, residual: Float[Array, ""], possible: Bool[Array, ""], search: Bool[Array, ""], automatic: Bool[Array, ""]
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
    """Run GAMP (Algorithm 1) with one Onsager term per token and variances of r x r.

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
        require_number(damping, "damping", requirement, lambda v: (v > 0) & (v <= 1))
    response = require_choice(response, "response", ("regression", "derivative"))
    warm_start = None
    if isinstance(init, GAMP):
        if init.damping is None:
            raise InputError("init", "must be an earlier run of `gamp`, got one of `posterior_mean`: give its Q")
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
    )
    return _run_gamp(model, data, Q, warm_start, jnp.asarray(response == "derivative"), options)


@eqx.filter_jit
@precise
def _run_gamp(
    model: Model,
    data: Sample,
    Q: Float[Array, "d r"],
    warm_start: tuple[Float[Array, "#d r r"], Float[Array, "L r n"]] | None,
    derivative: Bool[Array, ""],
    options: _Options,
) -> GAMP:
    # Every step takes a product on each side; one more comes before the first step, and one or two after the last one.
    memory = data.memory(Q.shape[1] * (options.steps + 3), options.steps)
    Z, memory = data.student_fields(Q, memory)
    damped = options.automatic | (options.damping < 1)
    p = _iterate(*risk_minimiser(model, data, Q, Z, warm_start, damped, derivative), memory, options)
    Q = p.state.Q
    value, gradient, memory = risk_and_gradient(model, data, False, Q, p.memory)
    units = Units(weight_unit(model, data.variance), loss_unit(model, data))
    if model.penalty is not None:  # damped weights reach a kink up to rounding only; a proximal step puts them on it
        proximal = model.penalty.prox(Q - units.rate * gradient, jnp.full_like(Q, units.rate))
        Q = jnp.where(p.damping.residual <= options.least_residual, proximal, Q)
        value, gradient, _ = risk_and_gradient(model, data, False, Q, memory)
    return GAMP(
        **{**p.result(options), "Q": Q},
        train_loss=(value + model.penalty_of(Q)) / Q.shape[0],
        gradient_norm=largest(proximal_gradient(model, Q, gradient, units)),
        damping=p.damping.share,
    )


def posterior_mean(
    model: Model, data: Data, init: Any = "random", *, steps: int = 500, tol: float = 1e-8, key: Array | None = None
) -> GAMP:
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
        A `GAMP`. Near weak recovery the overlap grows slowly, and differs from one instance to the next.

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
    key = require_key(jax.random.key(0) if key is None else key)
    law = model.law()
    if is_concrete(law):
        moments = np.asarray(law.pi)[np.asarray(law.weights) > 0]
        if not np.allclose(moments, moments[:1]):
            raise InputError("model", "must have a teacher of one second moment pi at all eigenvalues")
    d, t = data.shape[2:]
    if isinstance(init, str):
        init = require_choice(init, "init", ("random", "teacher"))
        size = jnp.sqrt(jnp.trace(teacher_moment(model)) / t)
        random = _START_SCALE * size * jax.random.normal(key, (d, t), data.x.dtype)
        Q = random if init == "random" else data.known_teacher("for init='teacher'")
    else:
        Q = shaped_array("init", init, "d t", {"d": d, "t": t}, data.x.dtype)
    undamped = jnp.ones((), Q.dtype), jnp.asarray(False)
    return _run_posterior(model, data, Q, _Options(int(steps), jnp.asarray(tol, Q.dtype), *undamped, undamped=True))


@eqx.filter_jit
@precise
def _run_posterior(model: Model, data: Data, Q: Float[Array, "d t"], options: _Options) -> GAMP:
    return GAMP(**_iterate(*bayes_learner(model, data, Q), None, options).result(options))


class _MessageLoop(eqx.Module):
    state: Iterate
    fallback: Iterate  # the last state from which a step was possible
    damping: Damping
    steps: Int[Array, ""]
    failure: Int[Array, ""]  # status that ended the run; `converged` while the run goes on
    history: Overlaps
    residuals: Float[Array, " steps"]
    memory: PyTree  # of the data

    def result(self, options: _Options) -> dict[str, Any]:
        """Return the fields of a `GAMP`."""
        status = jnp.where(self.failure != Status.converged, self.failure, Status.max_steps)
        status = jnp.where(self.damping.residual <= options.least_residual, Status.converged, status)
        return {
            "Q": self.state.Q,
            "C": self.state.C,
            "g": self.state.g,
            "overlaps": indexed(self.history, self.steps),
            "iterations": self.steps,
            "status": status.astype(jnp.int32),
            "residual": self.damping.residual,
            "history": self.history,
            "residuals": self.residuals,
        }


def _iterate(learner: Learner, first: Iterate, memory: PyTree, options: _Options) -> _MessageLoop:
    """Run the loop from a first state until it converges, fails, or runs out of steps."""
    data, dtype = learner.data, first.Q.dtype

    def with_overlaps(history: Overlaps, k: Int[Array, ""], s: Iterate) -> Overlaps:
        """Write the overlaps of a state into entry k of the history, those before step k."""
        return jax.tree.map(lambda a, v: a.at[k].set(v), history, data.overlaps(s.Q, responses(data, s.C)))

    def body(p: _MessageLoop) -> _MessageLoop:
        image, memory = step(learner, p.state, p.memory, p.steps)
        trial = image
        if not options.undamped:
            trial = jax.tree.map(lambda a, b: a + p.damping.share * (b - a), p.state, image)
            trial = eqx.tree_at(lambda s: s.z, trial, image.z)
        residual, failure = learner.outcome(p.state, image, trial)
        possible = failure == Status.converged
        residual = jnp.where(possible, residual, jnp.inf)
        damping = p.damping.after(residual, possible, p.steps < learner.burn_in, options.automatic)
        state, fallback = (either(possible, *pair) for pair in ((trial, p.fallback), (p.state, p.fallback)))
        failed = ~possible & (~options.automatic | (damping.share < _MIN_DAMPING))
        return _MessageLoop(
            state=state,
            fallback=fallback,
            damping=damping,
            steps=p.steps + 1,
            failure=jnp.where(failed, failure, Status.converged).astype(jnp.int32),
            history=with_overlaps(p.history, p.steps + 1, state),
            residuals=p.residuals.at[p.steps].set(residual),
            memory=memory,
        )

    def unfinished(p: _MessageLoop) -> Bool[Array, ""]:
        converged = p.damping.residual <= options.least_residual
        return (p.failure == Status.converged) & ~converged & (p.steps < options.steps)

    blank = jax.tree.map(lambda a: jnp.full((options.steps + 1, *a.shape), jnp.nan, dtype), data.overlaps(first.Q))
    inf, zero = jnp.asarray(jnp.inf, dtype), jnp.array(0, jnp.int32)
    begin = _MessageLoop(
        state=first,
        fallback=first,
        damping=Damping(options.damping, jnp.asarray(_MAX_DAMPING, dtype), inf, inf, zero),
        steps=zero,
        failure=jnp.asarray(Status.converged, jnp.int32),
        history=with_overlaps(blank, zero, first),
        residuals=jnp.full(options.steps, jnp.nan, dtype),
        memory=memory,
    )
    return lax.while_loop(unfinished, body, begin)
