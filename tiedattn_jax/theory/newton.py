"""Newton's method for the fixed points of a map F: one step of one search, or of many searches under `jax.vmap`.

The map is evaluated elsewhere, where its averages run fastest. A `Search` names the place `trial` at which it asks for
the map; `Newton.advance` takes the `Answer`, decides on the next trial, and says when the search has ended and how.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..base.results import Settings, Status, classify
from ..model.overlaps import Coordinates, admissible, explained_covariance, order_size, vanished

# The residual below which Newton's method takes over from damped steps. Chosen on 300 branches at random settings: .03
# and .06 give the same outcome for 298 (two fail with both); .1 turns one absent branch into a state of q = 1e-5.
_NEAR = 0.06
# A stalled state is no fixed point if the relative Newton step from it is longer than this: near a bifurcation the
# residual is small far from the solution.
_FAR = 0.05
_QUIET = 6  # steps without halving the residual after which it will not fall further
_SINGULAR = 1e4  # ratio of a Newton step to its residual from which on I - DF counts as singular
_FALL = 0.9  # factor by which a Newton step must reduce the residual; otherwise the step is cut
_CUT = 0.4
_LEAST_CUT = 0.2  # below this cut a damped step of the map is taken instead
_LONGEST = 0.5  # part of its size by which a damped step moves a coordinate: the map can have eigenvalues of -30
_LEAST_DAMPING = 1e-3  # share of a damped step below which the search gives up
# Near a pitchfork a small order parameter grows or decays by a few per cent in a step of the map. A damped step then
# goes further by the factor `_AHEAD`.
_SMALL = 0.3  # share of its largest possible size
_SLOW = 0.1
_AHEAD = 50.0
# A branch that does not exist is left along its order parameter, which the map shrinks while all else is near its end.
# Newton's step leads the same way: down, to the state or to nothing. The damped phase then takes this share of it, and
# goes on until the step is short. A lane without a state takes 15 to 25 evaluations so, and 40 to 160 with the damping
# of the settings.
_DOWN = 0.95
_SHORT = 0.3
_GONE = 1e-6  # tr q / tr rho below which a shrinking student counts as Q = 0; the smallest states have 3e-4
# Scale factors (V, q) of the start that are tried in turn: unchanged, small V, large q. The map gives a negative V for
# a small student where the loss is strongly concave at zero.
ATTEMPTS = np.array([[1.0, 1.0], [0.03, 1.0], [1.0, 4.0]])


class Answer(NamedTuple):
    """The map at one place, as Newton's method asks for it."""

    image: jax.Array  # F(v), (n,)
    jacobian: jax.Array  # DF, (n, n)
    unresolved: jax.Array  # share of the nodes whose proximal problem is not resolved
    seen: jax.Array  # all else that the evaluation gives, (k,): it goes where the place goes


class Look(NamedTuple):
    """What Newton's method makes of an answer; an infinite residual and no step where the answer is of no use."""

    v: jax.Array  # the place
    image: jax.Array  # F(v)
    residual: jax.Array  # relative, undamped
    step: jax.Array  # Newton's
    damped: jax.Array  # step of the damped map
    length: jax.Array  # of Newton's step, relative
    singular: jax.Array
    sinks: jax.Array  # whether the one free order parameter falls, and all else is near its end
    unresolved: jax.Array
    seen: jax.Array


class Outcome(NamedTuple):
    """Where a search came to: the place, its residual, its `Status`, and what was seen there."""

    v: jax.Array
    residual: jax.Array
    status: jax.Array
    seen: jax.Array


class Search(NamedTuple):
    """A search on its way."""

    trial: jax.Array  # the place at which the map is asked for
    ended: jax.Array
    outcome: Outcome  # the best of the attempts that ended
    start: jax.Array
    attempt: jax.Array  # index of the start that is tried
    here: Look  # where the next step starts
    best: Look  # the place with the smallest residual of this attempt
    cut: jax.Array
    damping: jax.Array  # share of a damped step
    mark: jax.Array  # the residual has to fall to half of it next
    quiet: jax.Array  # steps since it did
    steps: jax.Array
    warm: jax.Array  # damped steps of the first phase
    far: jax.Array  # whether the search is still in the damped phase
    outside: jax.Array  # whether the last step left the domain

    @property
    def damped(self) -> jax.Array:
        """Whether the next step is one of the damped map."""
        return (self.cut < _LEAST_CUT) | self.far


class Newton(eqx.Module):
    """Newton's method on the undamped residual F(v) - v, safeguarded.

    Far from the solution the map is damped. Near it, a Newton step that leaves the domain or does not reduce the
    residual is cut; where cutting does not help, a damped step of the map is taken instead. A damped step that leaves
    the domain is cut, too. At frozen nodes the map has steps of the size of a node's weight wherever the proximal
    operator jumps, so the residual may stop falling: such a state is `stalled`, and its error bar says how far it can
    be off. A search from a rough start that leads nowhere is tried again from other starts.

    Attributes:
        coordinates: of the order parameters.
        settings: tolerances.
        stall: the residual that the scatter of the nodes may leave, see `stall_of`.
        attempts: number of starts that are tried.
    """

    coordinates: Coordinates
    settings: Settings
    stall: Any
    attempts: Any

    @property
    def tol(self) -> jax.Array:
        """Residual at which a search has converged."""
        dtype = self.coordinates.rho.dtype
        return jnp.maximum(jnp.asarray(self.settings.tol, dtype), 20 * jnp.finfo(dtype).eps)

    def begin(self, start: jax.Array, unseen: jax.Array) -> Search:
        """A search from a place, before the first answer, with `unseen` in the place of `Answer.seen`."""
        outcome = Outcome(start, jnp.full((), jnp.inf, start.dtype), jnp.asarray(int(Status.nonfinite)), unseen)
        return self._attempt(start, jnp.asarray(0), outcome)

    def _attempt(self, start: jax.Array, attempt: jax.Array, outcome: Outcome) -> Search:
        """The search from one of the starts: any residual is below the first one, which is infinite."""
        x = self.coordinates.unpack(start)
        by_V, by_q = jnp.asarray(ATTEMPTS, start.dtype)[attempt]
        trial = self.coordinates.pack(eqx.tree_at(lambda x: (x.V, x.q), x, (by_V * x.V, by_q * x.q)))
        inf, one, zero = jnp.full((), jnp.inf, start.dtype), jnp.ones((), start.dtype), jnp.zeros((), start.dtype)
        no, count, still = jnp.array(False), jnp.array(0), jnp.zeros_like(start)
        nothing = Look(trial, trial, inf, still, still, inf, no, no, zero, jnp.full_like(outcome.seen, jnp.nan))
        return Search(
            trial, no, outcome, start, attempt, nothing, nothing, one, one, inf, count, count, count, no, no
        )  # fmt: skip

    def advance(self, s: Search, answer: Answer) -> Search:
        """The search after an answer: with its next trial, or ended."""
        s = self._taken(s, self.look(s.trial, answer, s.here), jnp.array(True))

        def outside(s: Search) -> jax.Array:
            return self.unfinished(s) & ~admissible(self.coordinates, self.coordinates.unpack(self.next_trial(s)))

        # A trial outside of the domain costs no evaluation.
        s = lax.while_loop(outside, lambda s: self._taken(s, s.here, jnp.array(False)), s)
        going, new = self.unfinished(s), self._outcome(s)
        replaced = ~going & (settled_well(new.status) | (new.residual <= s.outcome.residual))
        outcome = either(replaced, new, s.outcome)
        more = ~going & ~settled_well(outcome.status) & (s.attempt + 1 < self.attempts)
        again = self._attempt(s.start, s.attempt + more, outcome)
        return either(more, again, s._replace(trial=self.next_trial(s), ended=~going, outcome=outcome))

    def look(self, v: jax.Array, answer: Answer, before: Look) -> Look:
        """An answer at v, and Newton's step from there."""
        eps, x = jnp.finfo(v.dtype).eps, self.coordinates.unpack(v)
        scale = self.coordinates.scale(x)
        F, DF, unresolved, seen = answer
        matrix = jnp.eye(v.shape[0], dtype=v.dtype) - DF * scale[None, :] / scale[:, None]
        r = (F - v) / scale
        # The Jacobian is that of the averages' limit. A secant correction (Broyden's) makes it that of the frozen nodes
        # along the last step.
        last = (v - before.v) / scale
        missed = ((before.image - before.v) / scale - r) - matrix @ last
        matrix = matrix + jnp.outer(missed, last) / jnp.maximum(jnp.sum(last**2), eps)
        gauge = self.coordinates.gauge(x, scale)
        # Along the orbit of the gauge nothing but the scatter of the nodes pulls.
        across = r - gauge.T @ jnp.linalg.lstsq(gauge.T, r)[0] if len(gauge) else r
        step = scale * deflated_solve(matrix, gauge, across)
        sinks = self.sinks(v, F, step, scale)
        damped = scale * self.damped_step(matrix, gauge, across, jnp.where(sinks, _DOWN, self.settings.damping))
        residual = jnp.max(jnp.abs(across))
        ok = jnp.isfinite(residual) & admissible(self.coordinates, x) & jnp.all(jnp.isfinite(step))
        length = jnp.max(jnp.abs(step / scale))
        singular = ok & (length > _SINGULAR * residual) & (residual > self.tol)
        return Look(
            v=v,
            image=F,
            residual=jnp.where(ok, residual, jnp.inf),
            step=jnp.where(ok, step, 0.0),
            damped=jnp.where(ok, damped, 0.0),
            length=length,
            singular=singular,
            sinks=sinks,
            unresolved=unresolved,
            seen=seen,
        )

    def damped_step(self, matrix: jax.Array, gauge: jax.Array, r: jax.Array, damping: jax.Array) -> jax.Array:
        """For a residual r and I - DF: the step ``a (I - a DF)^{-1} r`` of the damped map, a the damping.

        It is implicit: where the map has eigenvalues of -30, it goes to the solution instead of beyond. Where an
        eigenvalue above 1 / a turns it round, the explicit step ``a r`` is taken.
        """
        a = damping.astype(r.dtype)
        step = deflated_solve((1 - a) * jnp.eye(r.shape[0], dtype=r.dtype) + a * matrix, gauge, a * r)
        return jnp.where(jnp.vdot(step, r) > 0, step, a * r)

    def sinks(self, v: jax.Array, image: jax.Array, step: jax.Array, scale: jax.Array) -> jax.Array:
        """Whether the map and Newton's step both shrink the one free order parameter, and all else is near its end."""
        order = self.coordinates.order
        here, there, end = (jnp.sum((order * at) ** 2) for at in (v, image, v + step))
        rest = jnp.max(jnp.abs((1 - order) * (image - v)) / scale)
        return (jnp.sum(self.coordinates.free) == 1) & (there < here) & (end < here) & (rest < _NEAR)

    def next_trial(self, s: Search) -> jax.Array:
        """Where the next step leads."""
        return jnp.where(s.damped, s.here.v + self.limited_step(s), self.moved(s.here.v, s.cut * s.here.step))

    def _taken(self, s: Search, there: Look, inside: jax.Array) -> Search:
        """The search after a step to a place inside of the domain, or one outside that was not looked at."""
        good = inside & jnp.isfinite(there.residual) & ((there.residual < _FALL * s.here.residual) | s.damped)
        better = inside & ((there.residual < s.best.residual) | self.gone(there))
        halved = inside & (there.residual < 0.5 * s.mark)
        rough = (there.residual > _NEAR) | (there.sinks & (there.length > _SHORT))
        cut = jnp.where(good, 1.0, jnp.where(s.damped, s.cut, _CUT * s.cut))
        return s._replace(
            here=either(good, there, s.here),
            best=either(better, there, s.best),
            cut=jnp.where(s.far, 1.0, cut),
            damping=jnp.where(good, 1.0, jnp.where(s.damped, _CUT * s.damping, s.damping)),
            mark=jnp.where(halved, there.residual, s.mark),
            quiet=jnp.where(halved | s.far, 0, s.quiet + 1),
            steps=s.steps + ~s.far,
            warm=s.warm + s.far,
            far=rough & (s.warm < self.settings.warm_steps) & (s.far | (s.steps == 0)),
            outside=~inside,
        )

    def moved(self, v: jax.Array, step: jax.Array) -> jax.Array:
        """Overlaps after a step in theta, m, V and q - theta rho^{-1} theta^T, in which the domain has a straight edge.

        To first order it is the step in q; a student close to its teacher would leave the domain by the second.
        """
        bend = explained_covariance(self.coordinates, self.coordinates.unpack(step).theta)
        zero = self.coordinates.unpack(jnp.zeros_like(v))
        return v + step + self.coordinates.pack(eqx.tree_at(lambda x: x.q, zero, bend))

    def limited_step(self, s: Search) -> jax.Array:
        """The damped step; more of it along a small order parameter that moves slowly, less of a long one."""
        order = self.coordinates.order
        before, after = jnp.sum((order * s.here.v) ** 2), jnp.sum((order * s.here.image) ** 2)
        x, free = self.coordinates.unpack(s.here.v), self.coordinates.free
        small = (jnp.sum(free) == 1) & (order_size(self.coordinates, x, free) < _SMALL)
        slow = small & ((1 - _SLOW) ** 2 * before < after) & (after < (1 + _SLOW) ** 2 * before)
        step = jnp.where(slow & ~s.here.sinks & (order > 0), _AHEAD, 1.0) * s.here.damped
        longest = jnp.where(s.here.sinks, 1.0, _LONGEST) * self.coordinates.scale(x)
        return s.damping * jnp.clip(step, -longest, longest)

    def gone(self, look: Look) -> jax.Array:
        """Whether the student has shrunk to nothing, and still shrinks, at a V that stays.

        Where the map makes V negative, cut steps lead to V = 0, and to q = 0 with it: there is no state there.
        """
        here, image = self.coordinates.unpack(look.v), self.coordinates.unpack(look.image)
        q, V, next_q, next_V = (jnp.trace(a, axis1=1, axis2=2) for a in (here.q, here.V, image.q, image.V))
        share = jnp.sum(q) / here.theta.shape[1] / jnp.sum(jnp.trace(self.coordinates.rho, axis1=1, axis2=2))
        shrinks = (here.theta.shape[2] * share < _GONE) & (jnp.sum(next_q) < jnp.sum(q))
        return shrinks & jnp.all(jnp.abs(next_V - V) < 0.5 * V)

    def unfinished(self, s: Search) -> jax.Array:
        """Whether this attempt goes on."""
        stalled = (s.quiet >= _QUIET) & (s.best.residual < self.stall) & (s.best.length < _FAR)
        dead = jnp.isinf(s.here.residual) | (s.damping < _LEAST_DAMPING) | self.gone(s.here)
        return (s.steps <= self.settings.max_steps) & (s.best.residual > self.tol) & ~stalled & ~dead

    def ending(self, s: Search) -> jax.Array:
        """The status: the first condition that holds names the end."""
        ends = (
            (self.gone(s.here), Status.absent),
            (s.best.residual <= self.tol, Status.converged),
            ((s.best.residual < self.stall) & (s.best.length < _FAR), Status.stalled),
            (jnp.isinf(s.best.residual), Status.nonfinite),
            (s.here.singular, Status.singular),
            (s.outside, Status.left_domain),
            (jnp.array(True), Status.max_steps),
        )
        return jnp.select([c for c, _ in ends], [jnp.asarray(int(n)) for _, n in ends])

    def _outcome(self, s: Search) -> Outcome:
        """Where this attempt came to: `absent` where the one free order parameter has vanished, or the student."""
        x, status = self.coordinates.unpack(s.best.v), self.ending(s)
        gone = (status <= Status.stalled) & vanished(self.coordinates, x, self.coordinates.free)
        status = classify(jnp.where(gone, Status.absent, status), s.best.unresolved)
        return Outcome(s.best.v, s.best.residual, status, s.best.seen)


def settled_well(status: jax.Array) -> jax.Array:
    """Whether an attempt found a state, or that there is none."""
    return (status <= Status.stalled) | (status == Status.absent)


def stall_of(size: int) -> float:
    """The Monte Carlo error of an average over so many nodes: a residual below it may be all that there is."""
    return 2.0 / size**0.5


def either(condition: jax.Array, a: Any, b: Any) -> Any:
    """One of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def deflated_solve(matrix: jax.Array, gauge: jax.Array, b: jax.Array) -> jax.Array:
    """Solve ``(I - DF + sum_a tau_a tau_a^T) d = b``: I - DF is singular along the orbit of a gauge, tau its tangents.

    A matrix with entries that are not finite is replaced by the identity: the derivatives of a lane that failed are
    then finite, and cannot spoil the sum that another lane's gradient is taken of.
    """
    matrix = matrix + gauge.T @ gauge
    matrix = jnp.where(jnp.all(jnp.isfinite(matrix)), matrix, jnp.eye(matrix.shape[0], dtype=matrix.dtype))
    return jnp.linalg.solve(matrix, b)
