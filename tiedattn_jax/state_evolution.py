"""State evolution: the saddle-point equations as a map, its fixed points, and their derivatives."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from .nodes import Points, Rule
from .overlaps import Conjugates, Overlaps, admissible, gauge_directions, impose, magnitudes
from .potentials import channel_gradient, conjugates, free_energy, overlaps

if TYPE_CHECKING:
    from .model import Model


class Status(enum.IntEnum):
    """How a solve ended. `converged` and `stalled` are usable; the number is what a jitted result carries."""

    converged = 0
    stalled = 1  # at the accuracy of the averages: the residual is one that independent nodes would scatter by
    max_steps = 2
    left_domain = 3
    nonfinite = 4
    singular = 5  # I - DF is singular: a fold or another bifurcation
    absent = 6  # the branch asked for does not exist here: its order parameter vanished
    imprecise = 7  # a fixed point, but the largest averages tried leave error bars above the rtol asked for

    @classmethod
    def name_of(cls, value: Any) -> str:
        """Readable name of a (concrete) status."""
        return {1: "stalled at the accuracy of the averages"}.get(int(value), cls(int(value)).name.replace("_", " "))


def has_state(status: Any, residual: Any, unresolved: float = 0.1) -> Any:
    """Whether there is a state: a usable one, or one of a residual below `unresolved` that the nodes do not resolve."""
    return (status <= Status.stalled) | (status == Status.max_steps) & (residual < unresolved)


class Settings(eqx.Module):
    """Tolerances of a solve: numbers, of which none asks for a new compilation.

    Attributes:
        tol: undamped residual, relative, below which a fixed point has converged.
        max_steps: Newton steps.
        warm_steps: damped steps that may bring a rough start near the branch.
        damping: share of the new state in a damped step. The undamped map has eigenvalues down to -5.5.
    """

    tol: Any = eqx.field(converter=np.asarray, default=1e-5)
    max_steps: Any = eqx.field(converter=np.asarray, default=30)
    warm_steps: Any = eqx.field(converter=np.asarray, default=300)
    damping: Any = eqx.field(converter=np.asarray, default=0.2)


class Evaluation(eqx.Module):
    """What an evaluation of the map sees besides the new overlaps.

    Attributes:
        conjugates: hats at the overlaps.
        channel: channel potential M.
        train_loss: minus the free energy; the training loss where the overlaps are a fixed point.
        sums: what was asked for, from the same pass over the nodes.
    """

    conjugates: Conjugates
    channel: jax.Array
    train_loss: jax.Array
    sums: Any


Sums = Callable[["Model", Overlaps, Points], Any]


def no_sums(model: Model, x: Overlaps, points: Points) -> tuple:
    """No further sums."""
    return ()


def saddle_map(
    model: Model, alpha: jax.Array, x: Overlaps, rule: Rule, free: jax.Array, sums: Sums = no_sums
) -> tuple[Overlaps, Evaluation]:
    """One undamped step of state evolution, eqs. (7)-(8): new overlaps, and what was seen on the way.

    Args:
        rule: one replicate of an averaging rule.
        free: the branch's pair of `FREE`; what it sets to zero in the overlaps is zero in the conjugates, too.
        sums: further sums over the nodes; they carry no derivative.
    """
    held = lax.stop_gradient((model, x))
    M, gradient, more = channel_gradient(model, x, rule, lambda points: sums(*held, lax.stop_gradient(points)))
    hats = impose(conjugates(alpha, gradient), free)
    return overlaps(model, hats), Evaluation(hats, M, -free_energy(model, alpha, x, hats, M), more)


class Coordinates:
    """Order parameters as one vector, with those that a branch sets to zero by symmetry held at zero."""

    def __init__(self, model: Model, free: jax.Array):
        L, r, t = model.shape
        self.dtype = model.lam.dtype
        shapes = Overlaps(*(jnp.zeros(s, self.dtype) for s in ((L, r, r), (L, r, r), (L, r, t), (L, r))))
        self.free = free
        self.unpack = ravel_pytree(shapes)[1]

    def pack(self, x: Overlaps) -> jax.Array:
        return ravel_pytree(impose(x, self.free))[0].astype(self.dtype)

    def scale(self, model: Model, x: Overlaps) -> jax.Array:
        """Size of every coordinate, by which residuals are made relative.

        That of theta and m is their own, not the larger one they could have: near a pitchfork, where they fall to
        zero, a residual that is small on any other scale says nothing.
        """
        q = jnp.sqrt(jnp.mean(jnp.trace(x.q, axis1=1, axis2=2)))
        V = jnp.mean(jnp.trace(x.V, axis1=1, axis2=2))
        rho = jnp.sqrt(jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2)))
        theta, m = (jnp.maximum(jnp.sqrt(jnp.mean(a**2)), 0.02 * s) for a, s in ((x.theta, q * rho), (x.m, q)))
        full = [jnp.full_like(a, s) for a, s in ((x.q, q**2), (x.V, V), (x.theta, theta), (x.m, m))]
        return ravel_pytree(Overlaps(*full))[0]


def deflated_solve(matrix: jax.Array, gauge: jax.Array, b: jax.Array) -> jax.Array:
    """Solve ``(I - DF + sum_a tau_a tau_a^T) d = b``: I - DF is singular along the orbit of a gauge, tau its tangents.

    A matrix with entries that are not finite is replaced by the identity, so that a lane that failed hands finite
    derivatives to nobody's harm.
    """
    matrix = matrix + gauge.T @ gauge
    matrix = jnp.where(jnp.all(jnp.isfinite(matrix)), matrix, jnp.eye(matrix.shape[0], dtype=matrix.dtype))
    return jnp.linalg.solve(matrix, b)


def _gauge(model: Model, x: Overlaps, scale: jax.Array, coordinates: Coordinates) -> jax.Array:
    """Unit tangents of the gauge orbit in scaled coordinates, (pairs, n)."""
    r = model.shape[1]
    if r == 1 or not model.rotation_invariant:
        return jnp.zeros((0, scale.shape[0]), scale.dtype)
    rows = jnp.stack([coordinates.pack(d) / scale for d in gauge_directions(x)])
    size = jnp.linalg.norm(rows, axis=1, keepdims=True)
    return jnp.where(size > 1e-6, rows / jnp.maximum(size, 1e-6), 0.0)


# A stalled state from which Newton's method still wants to go further than this, relative, is not a fixed point: near
# a bifurcation the residual is small far from the solution.
_FAR = 0.05


class _Newton(eqx.Module):
    v: jax.Array
    residual: jax.Array  # of v
    step: jax.Array  # Newton's, from v
    image: jax.Array  # F(v)
    cut: jax.Array
    best: jax.Array
    best_residual: jax.Array
    best_step: jax.Array  # how far Newton's method still wants to go from the best state, relative
    best_seen: Evaluation
    quiet: jax.Array  # steps since the best residual last halved
    k: jax.Array
    warm: jax.Array
    far: jax.Array  # still in the damped phase
    singular: jax.Array
    outside: jax.Array


def fixed_point(
    model: Model,
    alpha: jax.Array,
    rule: Rule,
    x0: Overlaps,
    free: jax.Array,
    settings: Settings,
    sums: Sums = no_sums,
) -> tuple[Overlaps, jax.Array, Evaluation, jax.Array]:
    """Fixed point of one replicate of the averages by Newton's method on the undamped residual F(x) - x.

    Far from the solution the map is damped. Near it, a Newton step that leaves the domain or does not reduce the
    residual is cut; when cutting does not help, a damped step of the map is taken instead. At frozen nodes the map has
    steps of the size of a node's weight wherever the proximal operator jumps, so the residual may stop falling: such a
    state is `stalled`, and its error bar says how far it can be off. Differentiable in the model and `alpha` by the
    implicit function theorem, in both modes.

    Args:
        sums: further sums over the nodes at the fixed point; they carry no derivative.

    Returns:
        The overlaps, the undamped relative residual, the evaluation of the map there, the status as an integer.
    """
    coordinates = Coordinates(model, free)
    v0, rule = lax.stop_gradient((coordinates.pack(x0), rule))
    v, residual, seen, status = _root(model, alpha, rule, v0, free, settings, sums)
    return coordinates.unpack(v), residual, seen, status


def _image(
    model: Model, alpha: jax.Array, rule: Rule, v: jax.Array, coordinates: Coordinates, sums: Sums = no_sums
) -> tuple[jax.Array, Evaluation]:
    """Undamped map on coordinates."""
    new, seen = saddle_map(model, alpha, coordinates.unpack(v), rule, coordinates.free, sums)
    return coordinates.pack(new), seen


@partial(jax.jit, static_argnames="sums")  # so that it is traced once for all its uses
def _image_and_jacobian(
    model: Model, alpha: jax.Array, rule: Rule, v: jax.Array, free: jax.Array, sums: Sums = no_sums
) -> tuple[jax.Array, jax.Array, Evaluation]:
    coordinates = Coordinates(model, free)

    def column(d: jax.Array) -> Any:
        return jax.jvp(lambda v: _image(model, alpha, rule, v, coordinates, sums), (v,), (d,), has_aux=True)

    F, DF, seen = jax.vmap(column, out_axes=(None, 1, None))(jnp.eye(v.shape[0], dtype=v.dtype))
    return F, DF, seen


@partial(jax.custom_jvp, nondiff_argnums=(6,))
def _root(
    model: Model, alpha: jax.Array, rule: Rule, v0: jax.Array, free: jax.Array, settings: Settings, sums: Sums
) -> tuple[jax.Array, jax.Array, Evaluation, jax.Array]:
    return _newton(model, alpha, rule, v0, free, settings, sums)


@_root.defjvp
def _root_jvp(sums: Sums, primals: Any, tangents: Any) -> Any:
    """Implicit function theorem with the dense Jacobian: dv = (I - DF)^{-1} d_p F dp."""
    model, alpha, rule, _, free, _ = primals
    v, residual, seen, status = _root(*primals, sums)
    coordinates = Coordinates(model, free)

    def image(model: Model, alpha: jax.Array, v: jax.Array) -> tuple[jax.Array, Evaluation]:
        return _image(model, alpha, rule, v, coordinates)

    force = jax.jvp(lambda m, a: image(m, a, v)[0], (model, alpha), tangents[:2])[1]
    _, DF, _ = _image_and_jacobian(model, alpha, rule, v, free)
    gauge = _gauge(model, coordinates.unpack(v), jnp.ones_like(v), coordinates)
    dv = deflated_solve(jnp.eye(v.shape[0], dtype=v.dtype) - DF, gauge, force)
    d_seen = jax.jvp(lambda *p: image(*p)[1], (model, alpha, v), (*tangents[:2], dv))[1]
    d_seen = eqx.tree_at(lambda e: e.sums, d_seen, jax.tree.map(jnp.zeros_like, seen.sums))
    quiet = jnp.zeros_like(residual), np.zeros(status.shape, jax.dtypes.float0)
    return (v, residual, seen, status), (dv, quiet[0], d_seen, quiet[1])


def _newton(
    model: Model, alpha: jax.Array, rule: Rule, v0: jax.Array, free: jax.Array, settings: Settings, sums: Sums
) -> tuple[jax.Array, jax.Array, Evaluation, jax.Array]:
    size = v0.shape[0]
    coordinates = Coordinates(model, free)
    eps = jnp.finfo(v0.dtype).eps
    tol, damping = (jnp.asarray(a, v0.dtype) for a in (settings.tol, settings.damping))
    tol = jnp.maximum(tol, 20 * eps)
    # A residual no larger than the Monte Carlo error of an average over as many nodes may be all there is to have.
    stall = 2.0 / rule.size**0.5

    def evaluate(v: jax.Array, v_before: jax.Array, r_before: jax.Array) -> tuple:
        x = coordinates.unpack(v)
        scale = coordinates.scale(model, x)
        F, DF, seen = _image_and_jacobian(model, alpha, rule, v, free, sums)
        matrix = jnp.eye(size, dtype=v.dtype) - DF * scale[None, :] / scale[:, None]
        r = (F - v) / scale
        # The Jacobian is that of the averages' limit; a secant correction (Broyden's) makes it the frozen nodes' own
        # along the last step.
        last = (v - v_before) / scale
        missed = (r_before / scale - r) - matrix @ last
        matrix = matrix + jnp.outer(missed, last) / jnp.maximum(jnp.sum(last**2), eps)
        step = scale * deflated_solve(matrix, _gauge(model, x, scale, coordinates), r)
        residual = jnp.max(jnp.abs(r))
        ok = jnp.isfinite(residual) & admissible(model, x) & jnp.all(jnp.isfinite(step))
        away = jnp.max(jnp.abs(step / scale))
        singular = ok & (away > 1e4 * residual) & (residual > tol)
        return F, jnp.where(ok, residual, jnp.inf), jnp.where(ok, step, 0.0), away, singular, seen

    def body(s: _Newton) -> _Newton:
        give_up = (s.cut < 0.2) | s.far
        trial = jnp.where(give_up, s.v + damping * (s.image - s.v), s.v + s.cut * s.step)
        inside = admissible(model, coordinates.unpack(trial))
        safe = jnp.where(inside, trial, s.v)
        F, residual, step, away, singular, seen = evaluate(safe, s.v, s.image - s.v)
        good = inside & jnp.isfinite(residual) & ((residual < 0.9 * s.residual) | give_up)
        better = inside & (residual < s.best_residual)
        halved = inside & (residual < 0.5 * s.best_residual)

        def pick(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(good, new, old)

        return _Newton(
            v=pick(safe, s.v),
            residual=pick(residual, s.residual),
            step=pick(step, s.step),
            image=pick(F, s.image),
            cut=jnp.where(s.far, 1.0, pick(jnp.ones_like(s.cut), jnp.where(give_up, s.cut, 0.4 * s.cut))),
            best=jnp.where(better, safe, s.best),
            best_residual=jnp.where(better, residual, s.best_residual),
            best_step=jnp.where(better, away, s.best_step),
            best_seen=jax.tree.map(lambda a, b: jnp.where(better, a, b), seen, s.best_seen),
            quiet=jnp.where(halved | s.far, 0, s.quiet + 1),
            k=s.k + ~s.far,
            warm=s.warm + s.far,
            far=(residual > 0.03) & (s.warm < settings.warm_steps) & (s.far | (s.k == 0)),
            singular=pick(singular, s.singular),
            outside=~inside,
        )

    def unfinished(s: _Newton) -> jax.Array:
        stalled = (s.quiet >= 4) & (s.best_residual < stall)
        dead = jnp.isinf(s.residual) | (s.outside & ((s.cut < 0.2) | s.far))
        return (s.k == 0) & ~s.far | ((s.k <= settings.max_steps) & (s.best_residual > tol) & ~stalled & ~dead)

    # The first pass of the loop only evaluates: its step is zero, and any residual is below infinity.
    inf, zero = jnp.full((), jnp.inf, v0.dtype), jnp.zeros_like(v0)
    one, no = jnp.ones_like(inf), jnp.array(False)
    count = jnp.array(0)
    blank = jax.eval_shape(lambda v: _image_and_jacobian(model, alpha, rule, v, free, sums)[2], v0)
    nothing = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), blank)
    s = _Newton(v0, inf, zero, v0, one, v0, inf, inf, nothing, count, count, count, no, no, no)
    s = lax.while_loop(unfinished, body, s)
    # The first condition that holds names the end.
    ends = (
        (s.best_residual <= tol, Status.converged),
        ((s.best_residual < stall) & (s.best_step < _FAR), Status.stalled),
        (jnp.isinf(s.best_residual), Status.nonfinite),
        (s.singular, Status.singular),
        (s.outside, Status.left_domain),
        (jnp.array(True), Status.max_steps),
    )
    status = jnp.select([c for c, _ in ends], [jnp.asarray(int(n)) for _, n in ends])
    return s.best, s.best_residual, s.best_seen, status


def implicit_gradient(
    model: Model, alpha: jax.Array, rule: Rule, x: Overlaps, free: jax.Array, fn: Callable[[Model, Overlaps], jax.Array]
) -> tuple[jax.Array, Model, jax.Array]:
    """Value of `fn(model, x)` at a fixed point, and its total derivatives in the model and in alpha along the branch.

    The derivative of every overlap, by the implicit function theorem with the dense Jacobian of the residual.
    """
    coordinates = Coordinates(model, free)
    v, (p, numbers) = coordinates.pack(x), ravel_pytree((model, alpha))
    size = v.shape[0]

    def column(d: jax.Array) -> jax.Array:
        def image(v: jax.Array, p: jax.Array) -> jax.Array:
            model, alpha = numbers(p)
            return _image(model, alpha, rule, v, coordinates)[0]

        return jax.jvp(image, (v, p), (d[:size], d[size:]))[1]

    columns = jax.vmap(column, out_axes=1)(jnp.eye(size + p.shape[0], dtype=v.dtype))
    gauge = _gauge(model, x, jnp.ones_like(v), coordinates)
    by_p = deflated_solve(jnp.eye(size, dtype=v.dtype) - columns[:, :size], gauge, columns[:, size:])
    value, (direct, by_v) = jax.value_and_grad(lambda p, v: fn(numbers(p)[0], coordinates.unpack(v)), (0, 1))(p, v)
    return value, *numbers(direct + by_v @ by_p)


def vanished(model: Model, x: Overlaps, free: jax.Array, tol: float = 0.02) -> jax.Array:
    """Whether the one order parameter that a branch leaves free is zero, so that the branch does not exist."""
    positional, semantic = magnitudes(model, x)
    return (jnp.sum(free) == 1) & (free[0] * semantic + free[1] * positional < tol)
