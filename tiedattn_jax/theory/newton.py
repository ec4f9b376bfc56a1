"""Fixed points of state evolution: Newton's method on the undamped residual."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from ..averages.rule import Replicate
from ..model import Model
from ..overlaps import Coordinates, Overlaps, admissible, explained_covariance, own_size, vanished
from ..results import Settings, Status
from .potentials import Sums, no_sums
from .state_evolution import Evaluation, deflated_solve, image_and_jacobian

# Residual from which on Newton's method takes over from damped steps. Of 300 branches at random settings .03 and .06
# settle the same but for two that neither settles; with .1 one that is absent ends as a state of q = 1e-5.
_NEAR = 0.06
# A stalled state from which Newton's method still wants to go further than this, relative, is not a fixed point: near
# a bifurcation the residual is small far from the solution.
_FAR = 0.05
_QUIET = 6  # steps in which the residual has not halved: it will not
_SINGULAR = 1e4  # length of a Newton step over its residual from which on I - DF counts as singular
_FALL = 0.9  # of the residual that a Newton step has to bring; otherwise it is cut
_CUT = 0.4
_LEAST_CUT = 0.2  # below it, a damped step of the map is taken instead
_LONGEST = 0.5  # part of its size by which a damped step moves a coordinate: the map can have eigenvalues of -30
_LEAST_DAMPING = 1e-3  # share of a damped step below which there is no way on
# Near a pitchfork a small order parameter grows, or decays, by a few per cent in a step of the map, and a damped one
# goes further:
_SMALL = 0.3  # of its largest possible size
_SLOW = 0.1
_AHEAD = 50.0
_GONE = 1e-6  # of tr q / tr rho, below which a student that shrinks is gone: its minimum is Q = 0; states go to 3e-4


def fixed_point(
    model: Model,
    alpha: jax.Array,
    replicate: Replicate,
    x0: Overlaps,
    free: jax.Array,
    settings: Settings,
    sums: Sums = no_sums,
) -> tuple[Overlaps, jax.Array, Evaluation, jax.Array]:
    """Fixed point of one replicate of the averages by Newton's method on the undamped residual F(x) - x.

    Far from the solution the map is damped. Near it, a Newton step that leaves the domain or does not reduce the
    residual is cut; when cutting does not help, a damped step of the map is taken instead. A damped step that leaves
    the domain is cut, too. At frozen nodes the map has steps of the size of a node's weight wherever the proximal
    operator jumps, so the residual may stop falling: such a state is `stalled`, and its error bar says how far it can
    be off. Not to be differentiated: see `implicit`.

    Args:
        free: what the branch leaves free, (2,).
        sums: further sums over the nodes at the fixed point.

    Returns:
        The overlaps, the undamped relative residual, the evaluation of the map there, the status as an integer:
            `absent` where the one order parameter that the branch leaves free has vanished, or the whole student.
    """
    problem = Problem(model, alpha, replicate, free, settings, sums)
    v0 = problem.coordinates.pack(x0)
    like = jax.eval_shape(lambda v: problem.at(v)[2], v0)
    nothing, unflatten = ravel_pytree(jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), like))
    s = lax.while_loop(problem.unfinished, problem.advance, begin(v0, nothing))
    x, status = problem.coordinates.unpack(s.best.v), problem.ending(s)
    gone = (status <= Status.stalled) & vanished(model, x, free)
    return x, s.best.residual, unflatten(s.best.seen), jnp.where(gone, Status.absent, status)


class Look(NamedTuple):
    """What the map says at one place; an infinite residual and no step where it says nothing."""

    v: jax.Array  # the place
    image: jax.Array  # F(v)
    residual: jax.Array
    step: jax.Array  # Newton's
    damped: jax.Array  # step
    length: jax.Array  # of Newton's step, relative
    singular: jax.Array
    seen: jax.Array  # the `Evaluation` as one vector


class Iterate(NamedTuple):
    here: Look  # where the next step starts
    best: Look  # that with the smallest residual so far
    cut: jax.Array
    damping: jax.Array  # share of a damped step
    mark: jax.Array  # half of it is what the residual has to fall to next
    quiet: jax.Array  # steps since it did
    k: jax.Array
    warm: jax.Array
    far: jax.Array  # still in the damped phase
    outside: jax.Array

    @property
    def damped(self) -> jax.Array:
        """Whether the next step is one of the damped map."""
        return (self.cut < _LEAST_CUT) | self.far


def begin(v0: jax.Array, nothing: jax.Array) -> Iterate:
    """The first pass of the loop only evaluates: its step is zero, and any residual is below infinity."""
    inf, one = jnp.full((), jnp.inf, v0.dtype), jnp.ones((), v0.dtype)
    no, count, still = jnp.array(False), jnp.array(0), jnp.zeros_like(v0)
    unseen = Look(v0, v0, inf, still, still, inf, no, nothing)
    return Iterate(unseen, unseen, one, one, inf, count, count, count, no, no)


def either(condition: jax.Array, a: Any, b: Any) -> Any:
    """One of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


class Problem(NamedTuple):
    model: Model
    alpha: jax.Array
    replicate: Replicate
    free: jax.Array
    settings: Settings
    sums: Sums

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(self.model, self.free)

    @property
    def tol(self) -> jax.Array:
        dtype = self.model.lam.dtype
        return jnp.maximum(jnp.asarray(self.settings.tol, dtype), 20 * jnp.finfo(dtype).eps)

    @property
    def stall(self) -> float:
        """A residual no larger than the Monte Carlo error of an average over as many nodes may be all there is."""
        return 2.0 / self.replicate.size**0.5

    def at(self, v: jax.Array) -> tuple[jax.Array, jax.Array, Evaluation]:
        return image_and_jacobian(self.model, self.alpha, self.replicate, v, self.free, self.sums)

    def look(self, v: jax.Array, before: Look) -> Look:
        """The map at v, and Newton's step from there."""
        eps = jnp.finfo(v.dtype).eps
        x = self.coordinates.unpack(v)
        scale = self.coordinates.scale(self.model, x)
        F, DF, seen = self.at(v)
        matrix = jnp.eye(v.shape[0], dtype=v.dtype) - DF * scale[None, :] / scale[:, None]
        r = (F - v) / scale
        # The Jacobian is that of the averages' limit; a secant correction (Broyden's) makes it the frozen nodes' own
        # along the last step.
        last = (v - before.v) / scale
        missed = ((before.image - before.v) / scale - r) - matrix @ last
        matrix = matrix + jnp.outer(missed, last) / jnp.maximum(jnp.sum(last**2), eps)
        gauge = self.coordinates.gauge(self.model, x, scale)
        # Along the orbit of the gauge nothing but the scatter of the nodes pulls.
        across = r - gauge.T @ jnp.linalg.lstsq(gauge.T, r)[0] if len(gauge) else r
        step, damped = (scale * d for d in self.steps(matrix, gauge, across))
        residual = jnp.max(jnp.abs(across))
        ok = jnp.isfinite(residual) & admissible(self.model, x) & jnp.all(jnp.isfinite(step))
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
            seen=ravel_pytree(seen)[0],
        )

    def steps(self, matrix: jax.Array, gauge: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        """For a residual r and I - DF: Newton's step, and one of the damped map, ``a (I - a DF)^{-1} r``, a the
        damping.

        The second is implicit: where the map has eigenvalues of -30, it goes to the solution instead of beyond. Where
        an eigenvalue above 1 / a turns it round, the explicit step ``a r`` is taken.
        """
        a = jnp.asarray(self.settings.damping, r.dtype)
        eye = jnp.eye(r.shape[0], dtype=r.dtype)
        matrices, sides = jnp.stack([matrix, (1 - a) * eye + a * matrix]), jnp.stack([r, a * r])
        newton, damped = jax.vmap(deflated_solve, (0, None, 0))(matrices, gauge, sides)
        return newton, jnp.where(jnp.vdot(damped, r) > 0, damped, a * r)

    def advance(self, s: Iterate) -> Iterate:
        here = s.here
        trial = jnp.where(s.damped, here.v + self.limited_step(s), self.moved(here.v, s.cut * here.step))
        inside = admissible(self.model, self.coordinates.unpack(trial))
        there = self.look(jnp.where(inside, trial, here.v), here)
        good = inside & jnp.isfinite(there.residual) & ((there.residual < _FALL * here.residual) | s.damped)
        better = inside & ((there.residual < s.best.residual) | self.gone(there))
        halved = inside & (there.residual < 0.5 * s.mark)
        cut = jnp.where(good, 1.0, jnp.where(s.damped, s.cut, _CUT * s.cut))
        return Iterate(
            here=either(good, there, here),
            best=either(better, there, s.best),
            cut=jnp.where(s.far, 1.0, cut),
            damping=jnp.where(good, 1.0, jnp.where(s.damped, _CUT * s.damping, s.damping)),
            mark=jnp.where(halved, there.residual, s.mark),
            quiet=jnp.where(halved | s.far, 0, s.quiet + 1),
            k=s.k + ~s.far,
            warm=s.warm + s.far,
            far=(there.residual > _NEAR) & (s.warm < self.settings.warm_steps) & (s.far | (s.k == 0)),
            outside=~inside,
        )

    def moved(self, v: jax.Array, step: jax.Array) -> jax.Array:
        """Overlaps after a step in theta, m, V and q - theta rho^{-1} theta^T, in which the domain has a straight edge.

        To first order it is the step in q; a student close to its teacher would leave the domain by the second.
        """
        bend = explained_covariance(self.model, self.coordinates.unpack(step).theta)
        zero = self.coordinates.unpack(jnp.zeros_like(v))
        return v + step + self.coordinates.pack(eqx.tree_at(lambda x: x.q, zero, bend))

    def limited_step(self, s: Iterate) -> jax.Array:
        """The damped step; more of it along a small order parameter that moves slowly, less of a long one."""
        order = self.coordinates.order
        before, after = (jnp.sum((order * v) ** 2) for v in (s.here.v, s.here.image))
        x = self.coordinates.unpack(s.here.v)
        small = (jnp.sum(self.free) == 1) & (own_size(self.model, x, self.free) < _SMALL)
        slow = small & ((1 - _SLOW) ** 2 * before < after) & (after < (1 + _SLOW) ** 2 * before)
        step = jnp.where(slow & (order > 0), _AHEAD, 1.0) * s.here.damped
        longest = _LONGEST * self.coordinates.scale(self.model, x)
        return s.damping * jnp.clip(step, -longest, longest)

    def gone(self, look: Look) -> jax.Array:
        """Whether the student has shrunk to nothing, and still shrinks, at a V that stays.

        Where the map makes V negative, cut steps lead to V = 0, and to q = 0 with it: there is no state there.
        """
        (_, r, t), rho = self.model.shape, jnp.sum(jnp.trace(self.model.rho, axis1=1, axis2=2))
        here, image = (self.coordinates.unpack(v) for v in (look.v, look.image))
        (q, V), (next_q, next_V) = ((jnp.trace(a, axis1=1, axis2=2) for a in (x.q, x.V)) for x in (here, image))
        shrinks = (jnp.sum(q) / r < _GONE * rho / t) & (jnp.sum(next_q) < jnp.sum(q))
        return shrinks & jnp.all(jnp.abs(next_V - V) < 0.5 * V)

    def unfinished(self, s: Iterate) -> jax.Array:
        stalled = (s.quiet >= _QUIET) & (s.best.residual < self.stall) & (s.best.length < _FAR)
        dead = jnp.isinf(s.here.residual) | (s.damping < _LEAST_DAMPING) | self.gone(s.here)
        going = (s.k <= self.settings.max_steps) & (s.best.residual > self.tol) & ~stalled & ~dead
        return (s.k == 0) & ~s.far | going

    def ending(self, s: Iterate) -> jax.Array:
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
