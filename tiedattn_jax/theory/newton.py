"""Newton's method for the fixed points of a map F: one step of one search, or of many searches under `jax.vmap`.

The map is evaluated elsewhere, where its averages run fastest. A `Search` names the place `trial` at which it asks for
the map; `Newton.advance` takes the `Answer`, decides on the next trial, and says when the search has ended and how.

A place v is the vector (n,) of the order parameters q, V, theta and m, see `Coordinates`. A branch leaves theta, m,
both or none free, and sets the others to zero. Below, "the order parameter" is the one that the branch leaves free, if
there is exactly one; if it vanishes, the branch does not exist. The averages in F are sums over nodes that stay fixed
during a search ("frozen"); they scatter around the true averages. The domain is that of `admissible` places: q, V and
q - theta rho^{-1} theta^T are positive definite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..base.arrays import Number, either
from ..base.results import Settings, Status, classify
from ..model.overlaps import Coordinates, admissible, explained_covariance, order_size, vanished

# The residual below which Newton's method takes over from damped steps. Chosen on 300 branches at random settings: .03
# and .06 give the same outcome for 298 (two fail with both); .1 turns one absent branch into a state of q = 1e-5.
_ROUGH_RESIDUAL = 0.06
# A state whose residual stopped falling counts as `stalled` only if the relative Newton step from it is shorter than
# this: near a bifurcation the residual is small far from the solution.
_STALLED_LENGTH = 0.05
_STALLED_STEPS = 6  # steps without halving the residual after which it will not fall further
# A search is lost after so many steps in a row with more than this share of the nodes unresolved: it ends, and no other
# start is tried. On lines such a search wanders until its last step.
_LOST_STEPS, _LOST_SHARE = 12, 0.5
# An unresolved coarse state is hopeless if its residual, or its share of unresolved nodes, is above these. Coarse lines
# leave up to 2.4 times the nodes unresolved that finer ones do.
_HOPELESS_RESIDUAL, _HOPELESS_SHARE = 0.01, 0.2
_SINGULAR_RATIO = 1e4  # ratio of a Newton step to its residual from which on I - DF counts as singular
_REDUCTION = 0.9  # factor by which a Newton step must reduce the residual; otherwise the step is cut
_CUT_FACTOR = 0.4  # factor of each cut
_LEAST_CUT = 0.2  # below this cut a damped step of the map is taken instead
# Largest move of a coordinate in a damped step, relative to its size: the map can have eigenvalues of -30.
_MAX_DAMPED_STEP = 0.5
_LEAST_DAMPING = 1e-3  # share of a damped step below which the search gives up
# Near a pitchfork a small order parameter grows or decays by a few per cent in a step of the map. A damped step then
# goes further along the order parameter, by the factor `_SLOW_FACTOR`.
_SMALL_ORDER = 0.3  # an order parameter is small below this share of its largest possible size
_SLOW_CHANGE = 0.1  # it moves slowly if one step of the map changes its norm by less than this share
_SLOW_FACTOR = 50.0
# A search sinks if the map and Newton's step both shrink the order parameter while all other coordinates are almost at
# their fixed point. It then ends at a state with a smaller order parameter, or at none: the branch does not exist. A
# sinking search takes damped steps with the share `_SINKING_DAMPING` instead of `Settings.damping`, until Newton's step
# is shorter than `_SINKING_LENGTH`. Finding that a branch does not exist takes 15 to 25 evaluations this way, and 40 to
# 160 with `Settings.damping`.
_SINKING_DAMPING = 0.95
_SINKING_LENGTH = 0.3
# A shrinking student counts as Q = 0 if (tr q / r) / (tr rho / t) is below this; the smallest states have 3e-4.
_VANISHED_SIZE = 1e-6
# Scale factors (V, q) of the start that are tried in turn: unchanged, small V, large q. Other starts are needed because
# the map gives a negative V for a small student where the loss is strongly concave at zero.
ATTEMPTS = np.array([[1.0, 1.0], [0.03, 1.0], [1.0, 4.0]])


class Answer(NamedTuple):
    """The map at one place, as Newton's method asks for it."""

    image: Float[Array, " n"]  # F(v)
    jacobian: Float[Array, "n n"]  # DF
    unresolved: Float[Array, ""]  # share of the nodes whose proximal problem is not resolved
    evaluation: Float[Array, " k"]  # all other numbers of the evaluation; a search carries them along with the place


class Look(NamedTuple):
    """An answer at v and the steps that follow from it.

    The answer is unusable if v is outside of the domain, or if the residual or Newton's step is not finite. The
    residual is then infinite, and the steps are zero.
    """

    v: Float[Array, " n"]  # the place
    image: Float[Array, " n"]  # F(v)
    residual: Float[Array, ""]  # largest entry of (F(v) - v) / scale, without its part along the gauge orbit
    step: Float[Array, " n"]  # Newton's step
    damped_step: Float[Array, " n"]  # step of the damped map
    length: Float[Array, ""]  # largest entry of Newton's step / scale
    is_singular: Bool[Array, ""]  # whether I - DF counts as singular
    sinks: Bool[Array, ""]  # whether the order parameter shrinks and the other coordinates are near their fixed point
    unresolved: Float[Array, ""]  # as in `Answer`
    evaluation: Float[Array, " k"]  # as in `Answer`


class Outcome(NamedTuple):
    """Result of a search: the place where it ended, and what is known there."""

    v: Float[Array, " n"]
    residual: Float[Array, ""]
    status: Int[Array, ""]  # a `Status`
    unresolved: Float[Array, ""]  # as in `Answer`
    evaluation: Float[Array, " k"]  # as in `Answer`


class Search(NamedTuple):
    """State of a search: a sequence of attempts from scaled starts."""

    trial: Float[Array, " n"]  # the place at which the map is asked for
    ended: Bool[Array, ""]  # whether the whole search has ended
    outcome: Outcome  # the best of the attempts that ended
    start: Float[Array, " n"]  # the start before it is scaled
    attempt: Int[Array, ""]  # row of `ATTEMPTS` that scales the start
    current: Look  # where the next step starts
    best: Look  # the place with the smallest residual of this attempt
    cut: Float[Array, ""]  # share of Newton's step that is tried next
    damping: Float[Array, ""]  # share of a damped step that is tried next
    reference: Float[Array, ""]  # residual that has to be halved next
    idle_steps: Int[Array, ""]  # steps since the residual was last halved
    lost_steps: Int[Array, ""]  # steps since most nodes were last resolved
    steps: Int[Array, ""]  # number of steps of this attempt after the damped phase, which comes first
    damped_steps: Int[Array, ""]  # number of steps of the damped phase
    in_damped_phase: Bool[Array, ""]  # whether the damped phase lasts, in which all steps are damped
    left_domain: Bool[Array, ""]  # whether the last step left the domain

    @property
    def is_damped(self) -> Bool[Array, ""]:
        """Whether the next step is a step of the damped map."""
        return (self.cut < _LEAST_CUT) | self.in_damped_phase


class Newton(eqx.Module):
    """Newton's method on the undamped residual F(v) - v, safeguarded.

    Far from the solution all steps are damped steps of the map. Near it, a Newton step that leaves the domain or does
    not reduce the residual is cut; where cutting does not help, a damped step of the map is taken instead. A damped
    step that leaves the domain is cut, too. At frozen nodes the map is discontinuous wherever the proximal operator
    jumps at a node, by about the weight of the node, so the residual may stop falling. Such a state is `stalled`, and
    its error bar says how far it can be off. A search from a rough start that leads nowhere is tried again from other
    starts.

    Attributes:
        coordinates: coordinates of the order parameters.
        settings: tolerances.
        stall: residual below which a search that stopped falling counts as `stalled`, see `stall_of`.
        attempts: number of starts that are tried, at most ``len(ATTEMPTS)``.
    """

    coordinates: Coordinates
    settings: Settings
    stall: Number
    attempts: Number

    @property
    def tol(self) -> Float[Array, ""]:
        """Residual at which a search has converged."""
        dtype = self.coordinates.rho.dtype
        return jnp.maximum(jnp.asarray(self.settings.tol, dtype), 20 * jnp.finfo(dtype).eps)

    def begin(self, start: Float[Array, " n"], empty_evaluation: Float[Array, " k"]) -> Search:
        """Return a search before its first answer.

        Args:
            start: the place that `ATTEMPTS` scales.
            empty_evaluation: evaluation of the outcome until an attempt has ended.
        """
        inf, zero = jnp.full((), jnp.inf, start.dtype), jnp.zeros((), start.dtype)
        outcome = Outcome(start, inf, jnp.asarray(int(Status.nonfinite)), zero, empty_evaluation)
        return self._attempt(start, jnp.asarray(0), outcome)

    def _attempt(self, start: Float[Array, " n"], attempt: Int[Array, ""], outcome: Outcome) -> Search:
        """Return the search at the beginning of an attempt: it asks for the map at the scaled start.

        Its `current` and `best` looks are blank, with an infinite residual. The first usable answer therefore replaces
        both.
        """
        x = self.coordinates.unpack(start)
        by_V, by_q = jnp.asarray(ATTEMPTS, start.dtype)[attempt]
        trial = self.coordinates.pack(eqx.tree_at(lambda x: (x.V, x.q), x, (by_V * x.V, by_q * x.q)))
        inf, one, zero = jnp.full((), jnp.inf, start.dtype), jnp.ones((), start.dtype), jnp.zeros((), start.dtype)
        false, zero_count, zero_step = jnp.array(False), jnp.array(0), jnp.zeros_like(start)
        blank_look = Look(
            trial, trial, inf, zero_step, zero_step, inf, false, false, zero, jnp.full_like(outcome.evaluation, jnp.nan)
        )
        return Search(
            trial=trial,
            ended=false,
            outcome=outcome,
            start=start,
            attempt=attempt,
            current=blank_look,
            best=blank_look,
            cut=one,
            damping=one,
            reference=inf,
            idle_steps=zero_count,
            lost_steps=zero_count,
            steps=zero_count,
            damped_steps=zero_count,
            in_damped_phase=false,
            left_domain=false,
        )

    def advance(self, s: Search, answer: Answer) -> Search:
        """Return the search after an answer: it has a new trial, or it has ended."""
        s = self._after_trial(s, self.look(s.trial, answer, s.current), jnp.array(True))

        def is_outside(s: Search) -> Bool[Array, ""]:
            return self.unfinished(s) & ~admissible(self.coordinates, self.coordinates.unpack(self.next_trial(s)))

        # The map is not asked for outside of the domain: the step is cut here until its trial lies inside.
        s = lax.while_loop(is_outside, lambda s: self._after_trial(s, s.current, jnp.array(False)), s)
        is_unfinished, new_outcome = self.unfinished(s), self._outcome(s)
        is_better = ~is_unfinished & (settled_well(new_outcome.status) | (new_outcome.residual <= s.outcome.residual))
        outcome = either(is_better, new_outcome, s.outcome)
        may_retry = ~settled_well(outcome.status) & ~self.is_lost(s) & (s.attempt + 1 < self.attempts)
        has_retry = ~is_unfinished & may_retry
        retry = self._attempt(s.start, s.attempt + has_retry, outcome)
        return either(has_retry, retry, s._replace(trial=self.next_trial(s), ended=~is_unfinished, outcome=outcome))

    def look(self, v: Float[Array, " n"], answer: Answer, previous: Look) -> Look:
        """Compute the steps from an answer at v.

        Args:
            v: the place.
            answer: the map there.
            previous: the look from which a step led to v. A blank one at v itself leaves the Jacobian as it is.
        """
        eps, x = jnp.finfo(v.dtype).eps, self.coordinates.unpack(v)
        scale = self.coordinates.scale(x)
        F, DF, unresolved, evaluation = answer
        matrix = jnp.eye(v.shape[0], dtype=v.dtype) - DF * scale[None, :] / scale[:, None]
        r = (F - v) / scale
        # The Jacobian is that of infinitely many nodes. A secant correction (Broyden's) makes it that of the frozen
        # nodes along the last step.
        last_step = (v - previous.v) / scale
        discrepancy = ((previous.image - previous.v) / scale - r) - matrix @ last_step
        matrix = matrix + jnp.outer(discrepancy, last_step) / jnp.maximum(jnp.sum(last_step**2), eps)
        gauge = self.coordinates.gauge(x, scale)
        # Rotations of the student's columns change no state. Along this gauge orbit the residual is only the scatter of
        # the nodes, so this part of it is dropped.
        transverse = r - gauge.T @ jnp.linalg.lstsq(gauge.T, r)[0] if len(gauge) else r
        step = scale * deflated_solve(matrix, gauge, transverse)
        sinks = self.sinks(v, F, step, scale)
        damped_step = scale * self.damped_step(
            matrix, gauge, transverse, jnp.where(sinks, _SINKING_DAMPING, self.settings.damping)
        )
        residual = jnp.max(jnp.abs(transverse))
        is_usable = jnp.isfinite(residual) & admissible(self.coordinates, x) & jnp.all(jnp.isfinite(step))
        length = jnp.max(jnp.abs(step / scale))
        is_singular = is_usable & (length > _SINGULAR_RATIO * residual) & (residual > self.tol)
        return Look(
            v=v,
            image=F,
            residual=jnp.where(is_usable, residual, jnp.inf),
            step=jnp.where(is_usable, step, 0.0),
            damped_step=jnp.where(is_usable, damped_step, 0.0),
            length=length,
            is_singular=is_singular,
            sinks=sinks,
            unresolved=unresolved,
            evaluation=evaluation,
        )

    def damped_step(
        self, matrix: Float[Array, "n n"], gauge: Float[Array, "G n"], r: Float[Array, " n"], damping: Float[Array, ""]
    ) -> Float[Array, " n"]:
        """Return the implicit step ``(I - a DF)^{-1} a r`` of the damped map, in scaled coordinates.

        Where DF has eigenvalues of -30, an explicit step ``a r`` would go beyond the solution; the implicit step does
        not. An eigenvalue of DF above 1 / a may turn the implicit step against the residual; the step is then explicit.

        Args:
            matrix: I - DF.
            gauge: unit tangents of the gauge orbit.
            r: residual.
            damping: the share a, in (0, 1].
        """
        a = damping.astype(r.dtype)
        step = deflated_solve((1 - a) * jnp.eye(r.shape[0], dtype=r.dtype) + a * matrix, gauge, a * r)
        return jnp.where(jnp.vdot(step, r) > 0, step, a * r)

    def sinks(
        self, v: Float[Array, " n"], image: Float[Array, " n"], step: Float[Array, " n"], scale: Float[Array, " n"]
    ) -> Bool[Array, ""]:
        """Return whether the map and Newton's step shrink the order parameter, and all else is near its fixed point."""
        order = self.coordinates.order
        size, image_size, end_size = (jnp.sum((order * x) ** 2) for x in (v, image, v + step))
        other_residual = jnp.max(jnp.abs((1 - order) * (image - v)) / scale)
        return (
            (jnp.sum(self.coordinates.free) == 1)
            & (image_size < size)
            & (end_size < size)
            & (other_residual < _ROUGH_RESIDUAL)
        )

    def next_trial(self, s: Search) -> Float[Array, " n"]:
        """Return the place to which the next step leads."""
        return jnp.where(
            s.is_damped, s.current.v + self.limited_step(s), self.step_from(s.current.v, s.cut * s.current.step)
        )

    def _after_trial(self, s: Search, look: Look, is_inside: Bool[Array, ""]) -> Search:
        """Return the search after a step, without its next trial.

        Args:
            s: the search before the step.
            look: the look at the trial; not used if the trial is outside of the domain, where the map is not evaluated.
            is_inside: whether the trial is inside.
        """
        accepted = (
            is_inside & jnp.isfinite(look.residual) & ((look.residual < _REDUCTION * s.current.residual) | s.is_damped)
        )
        is_best = is_inside & ((look.residual < s.best.residual) | self.has_vanished(look))
        is_halved = is_inside & (look.residual < 0.5 * s.reference)
        is_rough = (look.residual > _ROUGH_RESIDUAL) | (look.sinks & (look.length > _SINKING_LENGTH))
        cut = jnp.where(accepted, 1.0, jnp.where(s.is_damped, s.cut, _CUT_FACTOR * s.cut))
        return s._replace(
            current=either(accepted, look, s.current),
            best=either(is_best, look, s.best),
            cut=jnp.where(s.in_damped_phase, 1.0, cut),
            damping=jnp.where(accepted, 1.0, jnp.where(s.is_damped, _CUT_FACTOR * s.damping, s.damping)),
            reference=jnp.where(is_halved, look.residual, s.reference),
            idle_steps=jnp.where(is_halved | s.in_damped_phase, 0, s.idle_steps + 1),
            lost_steps=jnp.where(look.unresolved > _LOST_SHARE, s.lost_steps + is_inside, 0),
            steps=s.steps + ~s.in_damped_phase,
            damped_steps=s.damped_steps + s.in_damped_phase,
            in_damped_phase=is_rough
            & (s.damped_steps < self.settings.warm_steps)
            & (s.in_damped_phase | (s.steps == 0)),
            left_domain=~is_inside,
        )

    def step_from(self, v: Float[Array, " n"], step: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return the place after a step that is straight in theta, m, V and R = q - theta rho^{-1} theta^T.

        The domain requires that q, V and R are positive definite. A step straight in q would change R by the
        second-order term ``-dtheta rho^{-1} dtheta^T``. A student close to its teacher has a small R and would
        leave the domain, so q gets this term with the opposite sign in addition to its step.
        """
        second_order = explained_covariance(self.coordinates, self.coordinates.unpack(step).theta)
        zero = self.coordinates.unpack(jnp.zeros_like(v))
        return v + step + self.coordinates.pack(eqx.tree_at(lambda x: x.q, zero, second_order))

    def limited_step(self, s: Search) -> Float[Array, " n"]:
        """Return the next damped step: extended along a small order parameter that moves slowly, then clipped."""
        order = self.coordinates.order
        before, after = jnp.sum((order * s.current.v) ** 2), jnp.sum((order * s.current.image) ** 2)
        x, free = self.coordinates.unpack(s.current.v), self.coordinates.free
        is_small = (jnp.sum(free) == 1) & (order_size(self.coordinates, x, free) < _SMALL_ORDER)
        is_slow = is_small & ((1 - _SLOW_CHANGE) ** 2 * before < after) & (after < (1 + _SLOW_CHANGE) ** 2 * before)
        step = jnp.where(is_slow & ~s.current.sinks & (order > 0), _SLOW_FACTOR, 1.0) * s.current.damped_step
        max_step = jnp.where(s.current.sinks, 1.0, _MAX_DAMPED_STEP) * self.coordinates.scale(x)
        return s.damping * jnp.clip(step, -max_step, max_step)

    def has_vanished(self, look: Look) -> Bool[Array, ""]:
        """Return whether the student has shrunk to nothing and still shrinks, at a V that the map changes little.

        The condition on V excludes searches that ran into the edge of the domain: where the map makes V negative, cut
        steps lead to V = 0 and q = 0, whether or not the branch exists.
        """
        x, image = self.coordinates.unpack(look.v), self.coordinates.unpack(look.image)
        q, V, next_q, next_V = (jnp.trace(a, axis1=1, axis2=2) for a in (x.q, x.V, image.q, image.V))
        # tr q / r over tr rho; the factor t follows below.
        share = jnp.sum(q) / x.theta.shape[1] / jnp.sum(jnp.trace(self.coordinates.rho, axis1=1, axis2=2))
        shrinks = (x.theta.shape[2] * share < _VANISHED_SIZE) & (jnp.sum(next_q) < jnp.sum(q))
        return shrinks & jnp.all(jnp.abs(next_V - V) < 0.5 * V)

    def is_lost(self, s: Search) -> Bool[Array, ""]:
        """Return whether the search stays where the nodes do not resolve the proximal operator."""
        return s.lost_steps >= _LOST_STEPS

    def unfinished(self, s: Search) -> Bool[Array, ""]:
        """Return whether this attempt goes on."""
        is_stalled = (
            (s.idle_steps >= _STALLED_STEPS) & (s.best.residual < self.stall) & (s.best.length < _STALLED_LENGTH)
        )
        is_stuck = jnp.isinf(s.current.residual) | (s.damping < _LEAST_DAMPING) | self.has_vanished(s.current)
        is_stuck |= self.is_lost(s)
        return (s.steps <= self.settings.max_steps) & (s.best.residual > self.tol) & ~is_stalled & ~is_stuck

    def ending(self, s: Search) -> Int[Array, ""]:
        """Return the status of this attempt if it ends now: that of the first condition that holds."""
        ends = (
            (self.has_vanished(s.current), Status.absent),
            (s.best.residual <= self.tol, Status.converged),
            ((s.best.residual < self.stall) & (s.best.length < _STALLED_LENGTH), Status.stalled),
            (jnp.isinf(s.best.residual), Status.nonfinite),
            (s.current.is_singular, Status.singular),
            (s.left_domain, Status.left_domain),
            (jnp.array(True), Status.max_steps),
        )
        return jnp.select([c for c, _ in ends], [jnp.asarray(int(n)) for _, n in ends])

    def _outcome(self, s: Search) -> Outcome:
        """Return the outcome of this attempt.

        It is `absent` if the order parameter, or the whole student, has vanished.
        """
        x, status = self.coordinates.unpack(s.best.v), self.ending(s)
        is_absent = (status <= Status.stalled) & vanished(self.coordinates, x, self.coordinates.free)
        status = classify(jnp.where(is_absent, Status.absent, status), s.best.unresolved)
        return Outcome(s.best.v, s.best.residual, status, s.best.unresolved, s.best.evaluation)


def is_hopeless(status: Number, residual: Number, unresolved: Number) -> Any:
    """Return whether a coarse state is so badly unresolved that the other replicates of its rule settle nothing."""
    return (status == Status.unresolved) & ((residual > _HOPELESS_RESIDUAL) | (unresolved > _HOPELESS_SHARE))


def settled_well(status: Int[Array, ""]) -> Bool[Array, ""]:
    """Return whether an attempt found a state, or found that there is none."""
    return (status <= Status.stalled) | (status == Status.absent)


def stall_of(size: int) -> float:
    """Return twice the Monte Carlo error of an average over `size` nodes with unit variance.

    The scatter of the nodes can keep the residual of a search from falling below about this value.
    """
    return 2.0 / size**0.5


def deflated_solve(
    matrix: Float[Array, "n n"], gauge: Float[Array, "G n"], b: Float[Array, "n *k"]
) -> Float[Array, "n *k"]:
    """Solve ``(matrix + sum_a tau_a tau_a^T) d = b`` for d, where tau_a are the rows of `gauge`.

    Without the added term the matrix, I - DF, would be singular along the gauge orbit. A matrix with entries that are
    not finite is replaced by the identity. The derivatives of a search that failed are then finite, and cannot
    spoil the gradient of a sum over searches.

    Args:
        matrix: I - DF.
        gauge: unit tangents of the gauge orbit.
        b: right-hand side, or several.
    """
    matrix = matrix + gauge.T @ gauge
    matrix = jnp.where(jnp.all(jnp.isfinite(matrix)), matrix, jnp.eye(matrix.shape[0], dtype=matrix.dtype))
    return jnp.linalg.solve(matrix, b)
