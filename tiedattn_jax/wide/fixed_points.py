"""Fixed points of wide layers: the equations, and their solution with implicit derivatives.

The potential of order parameters (q, m, V) and their conjugates (Lam, M, N) is

    e = alpha moreau(q, m, V) - Phi(M, N, tau) / Lam + M m + N V - Lam q / 2,

with N V / 2 in place of N V for untied layers, whose noise in Y has independent entries. Its six derivatives vanish at
the state, where e is the least risk over d^2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex, Float, Int

from ..averages.program import entry_by_entry, program
from ..base.arrays import Number, either, ldl_solve, solve as solve_entries
from ..base.derivatives import with_root
from ..base.errors import InputError, is_concrete, require_kind, require_positive
from ..base.progress import Progress, one_search
from ..base.results import Status
from .channel import ChannelAverages, WideNodes, channel_averages, second_start, test_error, tolerance, wide_nodes
from .layer import Layer, guarded, require_smooth
from .spectrum import Convolution, Prior, convolution, spectral_prior, stability
from .states import WidePoint, WideState

_TOL = 1e-9  # length of the last step
_ROUNDING = 200.0  # units in the last place of such a length in single precision
_MOST_STEPS = 100
_LEAST = 1e-11, 1e-7  # sizes of M S* and of the noise of Y, over tau, below which they are zero
_JUMPS = 1e-6  # share of sentences with several proximal points from which on a state is unresolved
_LONGEST = 1.0  # length of a step with content
_LEAST_PIVOT = 0.05  # of the stiffness of offsets, over its largest diagonal entry
# A search that fails is repeated from larger tau, where the map contracts faster, down by this factor in so many rungs.
_RUNG, _RUNGS = 3.0, 9


class _Rules(NamedTuple):
    """Constraints of a search.

    Attributes:
        content: whether S has a part besides that of the encodings; None if it shall have none.
        binds: whether the rank is bounded by kappa d; None if it cannot be.
    """

    content: Bool[Array, ""] | None
    binds: Bool[Array, ""] | None


class _SearchSetting(NamedTuple):
    """The layer, its data and the constraints in a search on one replicate.

    Attributes:
        points: proximal points at the nodes, from which those nearby are searched.
    """

    layer: Layer
    alpha: Float[Array, ""]
    nodes: WideNodes
    points: Float[Array, "n N"]
    rules: _Rules

    @classmethod
    def first(cls, layer: Layer, alpha: Array, nodes: WideNodes, content: bool, can_bind: bool) -> _SearchSetting:
        """Return the setting in which a search begins: S has no content."""
        no = jnp.asarray(False)
        rules = _Rules(no if content else None, no if can_bind else None)
        return cls(layer, alpha, nodes, jnp.zeros_like(nodes.student), rules)

    @property
    def has_content(self) -> Bool[Array, ""]:
        return jnp.asarray(False) if self.rules.content is None else self.rules.content

    def at(self, v: Float[Array, " k"]) -> tuple:  # the arguments of `channel_averages` and `second_start`
        return self.layer, self.nodes, v[0], v[1], v[2], v[3:], self.points

    def hats(self, v: Float[Array, " k"]) -> tuple[Float[Array, " k"], Float[Array, "n N"]]:
        """Return the conjugates of (q, m, V) and the next offsets, and the proximal points."""
        A, h = channel_averages(*self.at(v))
        conjugates = self.alpha * jnp.stack([A.information, A.signal, self.layer.sides / 2 * A.force])
        return jnp.concatenate([conjugates, self.offsets(v[3:], A)]), h

    def spectrum(self, u: Float[Array, " k"]) -> tuple[Convolution, Complex[Array, ""], Prior]:
        """Return the spectrum of Y, the place from which on its eigenvalues count, and the prior's numbers."""
        curve = convolution(self.layer.teacher, u[1], u[2])
        place = curve.first_place(self.layer.tau, self.layer.kappa, self.rules.binds)
        return curve, place, spectral_prior(curve, self.layer.tau, place)

    def with_content(self, u: Float[Array, " k"], P: Prior) -> Float[Array, " k"]:
        """Return (q, m, V), which vanish without content, and the offsets."""
        v = jnp.stack([2 * P.phi / u[0], P.by_M, self.layer.sides * P.by_N]) / u[0]
        return jnp.concatenate([jnp.where(self.has_content, v, 0.0), u[3:]])

    def orders(self, u: Float[Array, " k"]) -> tuple[Float[Array, " k"], _Rules]:
        """Return (q, m, V) and the offsets, and the constraints that they ask for."""
        content, binds = self.rules
        if content is None:
            return jnp.concatenate([jnp.zeros_like(u[:3]), u[3:]]), self.rules
        curve, _, P = self.spectrum(u)
        grows = curve.top > self.layer.tau
        if binds is not None:
            binds |= content & (P.share > self.layer.kappa * (1 + tolerance(_TOL, _ROUNDING, u)))
        return self.with_content(u, P), _Rules(content | grows, binds)

    def map(self, u: Float[Array, " k"]) -> Float[Array, " k"]:
        """Return the right-hand sides of the equations for the conjugates (Lam, M, N) and the offsets."""
        return self.hats(self.orders(u)[0])[0]

    def offsets(self, t: Float[Array, " k"], A: ChannelAverages) -> Float[Array, " k"]:
        """Return the offsets after a Newton step for a vanishing push, which may end on the boundary of the cone."""
        free = _unconstrained(t, A, _score_unit(self.layer))
        if not t.size or self.layer.sides == 2:
            return free
        bound = jnp.zeros_like(t)  # on the boundary of the cone a spike is zero, and long encodings move along it
        if self.layer.is_long:
            along = jnp.asarray(_cone(self.layer)[::-1] * [-1, 1], t.dtype)
            bound = along * (along @ t + along @ A.push / (along @ A.stiffness @ along))
        return jnp.where(_height(self.layer, free) < 0, bound, free)


def _unconstrained(t: Float[Array, " k"], A: ChannelAverages, longest: Any = np.inf) -> Float[Array, " k"]:
    """Return the offsets after a Newton step for a vanishing push.

    A squared loss bends down where a softmax is far from its target. The pivots of the stiffness are then made
    positive, and the entries of the step are bounded, so that it leads downhill.
    """
    if not t.size:
        return t
    floor = _LEAST_PIVOT * jnp.max(jnp.abs(jnp.diagonal(A.stiffness))) * jnp.ones_like(t)
    step = ldl_solve(A.stiffness[..., None], A.push[:, None], floor)[:, 0]
    return t + step * jnp.minimum(1.0, longest / jnp.maximum(jnp.max(jnp.abs(step)), jnp.finfo(t.dtype).tiny))


def _cone(layer: Layer) -> Float[np.ndarray, " k"]:
    """Return the vector whose product with the numbers of the encodings is at least zero.

    Encodings of length of order one have a spike R, which is positive. Long ones shift the scores by a positive
    semidefinite matrix T. The loss of two tokens does not see a common shift of all scores, so all that is left of the
    condition is that T_11 + T_22 - 2 T_12 is at least zero.
    """
    if not layer.is_long:
        return np.ones(1)
    c = np.array([1.0, -1.0])
    normal = np.einsum("nab,a,b->n", layer.blocks[0], c, c)
    return normal / np.linalg.norm(normal)


def _height(layer: Layer, t: Float[Array, " k"]) -> Float[Array, ""]:
    """Return the distance of the offsets from the boundary of the cone, negative outside.

    It is zero without encodings, and infinite for an untied layer, which has no cone.
    """
    if layer.sides == 2:
        return jnp.full((), jnp.inf, t.dtype)
    return jnp.asarray(_cone(layer), t.dtype) @ t if t.size else jnp.zeros((), t.dtype)


def _score_unit(layer: Layer) -> Float[Array, ""]:
    return lax.stop_gradient(jnp.sqrt(layer.teacher.rho + layer.noise))


def _unknowns(u: Float[Array, " k"], layer: Layer) -> Float[Array, " k"]:
    """Return the logarithms of the conjugates, and the offsets in units of the teacher's scores."""
    unit, tau, number = _score_unit(layer), lax.stop_gradient(layer.tau), jnp.finfo(u.dtype)
    # Without semantic part the target pushes no content: M and N are rounding errors. They do not matter where M S* and
    # the noise of Y are much smaller than tau.
    signal, noise = max(float(number.eps), _LEAST[0]), max(float(number.eps) ** 0.5, _LEAST[1])
    least = jnp.maximum(jnp.stack([0 * tau, signal * tau / unit, (noise * tau) ** 2]), number.tiny**0.5)
    return jnp.concatenate([jnp.log(jnp.maximum(u[:3], least)), u[3:] / unit])


def _conjugates(x: Float[Array, " k"], unit: Float[Array, ""]) -> Float[Array, " k"]:
    return jnp.concatenate([jnp.exp(x[:3]), x[3:] * unit])


# A place x where a search for content begins, NaN for that without content, and the inverse H of 1 - d map / dx.
_Start = tuple[Float[Array, " k"], Float[Array, "k k"]]


def _start_at(x: Float[Array, " k"]) -> _Start:
    return x, jnp.eye(len(x), dtype=x.dtype)  # the first step is one of the map


class _SearchState(NamedTuple):
    """A search before its next step.

    Attributes:
        guess: the place, and the inverse of 1 - d map / dx as far as it is known.
        step: last step; zero if the constraints or the proximal points changed.
        change: map(x) - x before that step.
        points, rules: as in `_SearchSetting`.
        jumps: as in `WideState`.
        length: of the last step; infinite if something else changed.
        steps: number of steps.
    """

    guess: _Start
    step: Float[Array, " k"]
    change: Float[Array, " k"]
    points: Float[Array, "n N"]
    rules: _Rules
    jumps: Float[Array, ""]
    length: Float[Array, ""]
    steps: Int[Array, ""]

    @classmethod
    def first(cls, setting: _SearchSetting, x: Float[Array, " k"]) -> _SearchState:
        """Return the search before its first step from x."""
        zero = jnp.zeros((), x.dtype)
        return cls(_start_at(x), 0 * x, 0 * x, setting.points, setting.rules, zero, zero + jnp.inf, jnp.asarray(0))


class _Climb(NamedTuple):
    """Searches from larger tau down; the first one, of rung zero, is at tau itself.

    Attributes:
        rung: the next rung.
        end: end of the last search.
        first: end of the first one.
        place: the last place with content; NaN before.
        guess: guess of the next search.
    """

    rung: Int[Array, ""]
    end: _SearchState
    first: _SearchState
    place: Float[Array, " k"]
    guess: _Start


def _broyden_search(setting: _SearchSetting, guess: _Start) -> tuple[Array, _SearchSetting, Array, Array, _Start]:
    """Find a root of ``map(u) = u`` by Broyden's method, from steps of the map, which contracts nearly everywhere.

    The unknowns x are the logarithms of the conjugates, which hardly move near the onset of content while q changes by
    orders of magnitude, and the offsets in units of the teacher's scores. The search begins without content. Where the
    largest eigenvalue of Y is then above tau, it goes on with content from the guess. If the root violates another
    constraint, that constraint is imposed. If other proximal points are lower, the search goes on there. For small tau
    the search can fail; then tau comes down in steps.

    Returns:
        u with its implicit derivatives, the setting there, the length of the last step, `jumps`, and the next guess.
    """
    frozen, guess = lax.stop_gradient((setting, guess))
    tol, x = tolerance(_TOL, _ROUNDING, guess[0]), jnp.zeros_like(guess[0])

    def has_content(end: _SearchState) -> Bool[Array, ""]:
        """Return whether a search found a state with content."""
        return (end.length <= tol) & frozen._replace(rules=end.rules).has_content

    def climb(state: _Climb) -> _Climb:
        factor = jnp.where(state.rung == 0, 1.0, _RUNG ** (_RUNGS - state.rung)).astype(x.dtype)
        at = frozen._replace(layer=eqx.tree_at(lambda layer: layer.tau, frozen.layer, factor * frozen.layer.tau))
        end = _broyden_steps(at, state.guess, tol)
        found = has_content(end)
        place, slope = end.guess
        step = jnp.where(jnp.all(jnp.isfinite(state.place)) & (state.rung > 1), place - state.place, 0.0)
        known, ahead = either(found, (place, (place + step, slope)), (state.place, state.guess))
        return _Climb(state.rung + 1, end, either(state.rung == 0, end, state.first), known, ahead)

    def goes_on(state: _Climb) -> Bool[Array, ""]:
        return (state.rung == 0) | ((state.rung <= _RUNGS) & ((state.end.length <= tol) == (state.rung > 1)))

    none = _SearchState.first(frozen, x)
    last = lax.while_loop(goes_on, climb, _Climb(jnp.asarray(0), none, none, x + jnp.nan, guess))
    end = either(last.rung > _RUNGS, last.end, last.first)  # a rung that fails is one of another tau
    guess = either(has_content(end), end.guess, guess)
    setting = setting._replace(points=end.points, rules=end.rules)
    # An entry of a batch that failed has no slope.
    setting = either(jnp.all(jnp.isfinite(end.guess[0])), setting, lax.stop_gradient(setting))
    u = _conjugates(end.guess[0], _score_unit(setting.layer))
    u = with_root(lambda u, setting: u - setting.map(u), u, setting, solve=_solve_map)
    return u, setting, end.length, end.jumps, guess


def _broyden_steps(frozen: _SearchSetting, guess: _Start, tol: float) -> _SearchState:
    """Return the end of a search by Broyden's method, without derivatives."""
    unit = _score_unit(frozen.layer)

    def body(search: _SearchState) -> _SearchState:
        (x, H), step, before, points, rules, jumps, _, count = search
        now = frozen._replace(points=points, rules=rules)
        v, asked = now.orders(_conjugates(x, unit))
        image, points = now.hats(v)
        r = _unknowns(image, frozen.layer) - x
        change = H @ (r - before)  # minus the step, if H were right
        scale = step @ change
        H -= jnp.outer(step + change, step @ H) / jnp.where(scale == 0, jnp.inf, scale)
        step = H @ r
        length = jnp.max(jnp.abs(step))
        ended = length <= tol
        # Without content the map does not depend on the conjugates, so the first step is right.
        step *= jnp.where(now.has_content, jnp.minimum(1.0, _LONGEST / length), 1.0)
        asked = either(ended, asked, rules)
        begins = jnp.asarray(asked.content != rules.content)
        changed = begins | (asked.binds != rules.binds)
        at = now._replace(points=points).at(v)
        lower, weight = lax.cond(ended & ~changed, second_start, lambda *at: (at[-1], 0 * at[2]), *at)
        changed |= jnp.any(lower != points)
        after = either(begins, _start_at(x + step), (x + step, H))
        after = either(begins & jnp.all(jnp.isfinite(guess[0])), guess, after)
        step, length = either(changed, (0 * step, jnp.full_like(length, jnp.inf)), (step, length))
        return _SearchState(after, step, r, lower, asked, jnp.maximum(jumps, weight), length, count + 1)

    first = _SearchState.first(frozen, jnp.zeros_like(guess[0]))
    return lax.while_loop(lambda search: (search.length > tol) & (search.steps < _MOST_STEPS), body, first)


def _solve_map(change: Float[Array, " k"], u: Float[Array, " k"], setting: _SearchSetting) -> Float[Array, " k"]:
    """Return the step that changes ``u - map(u)`` by `change`."""
    # jax 0.10.2 can lose the types of calls of LAPACK in a program with this search; XLA does not compile them then.
    slope = jnp.eye(len(u), dtype=u.dtype) - jax.jacfwd(setting.map)(u)
    return solve_entries(slope, change[:, None], unrolled=len(u))[:, 0]


def without_content(layer: Layer, nodes: WideNodes) -> tuple[Float[Array, "3"], Bool[Array, ""]]:
    """Return Lam, M and N over alpha at S = 0, with the best offsets, and whether the search for these converged."""
    setting = _SearchSetting.first(layer, jnp.ones_like(layer.tau), nodes, content=False, can_bind=False)
    start = _start_at(jnp.zeros(3 + layer.shifts, layer.tau.dtype))
    u, _, length, _, _ = _broyden_search(setting, start)
    return u[:3], length <= tolerance(_TOL, _ROUNDING, u)


@program
def states(layer: Layer, alpha: Array, nodes: WideNodes, start: Float[Array, " k"], can_bind: bool) -> WideState:
    """Return the states of all replicates, each search from the state before; if kappa cannot bind, compile less."""

    def one(guess: _Start, nodes: WideNodes) -> tuple[_Start, WideState]:
        setting = _SearchSetting.first(layer, alpha, nodes, content=True, can_bind=can_bind)
        u, setting, length, jumps, guess = _broyden_search(setting, guess)
        return guess, _state_at(u, setting, length, jumps)

    first = _start_at(_unknowns(start.astype(alpha.dtype), layer))
    return lax.scan(one, first, nodes)[1]


def _state_at(u: Float[Array, " k"], setting: _SearchSetting, residual: Array, jumps: Array) -> WideState:
    """Return the state at the unknowns u."""
    layer, law, (Lam, M, N), offset = setting.layer, setting.layer.teacher, u[:3], u[3:]
    curve, place, P = setting.spectrum(u)
    v, has_content = setting.with_content(u, P), setting.has_content
    q, m, V = v[:3]
    A, _ = channel_averages(*setting.at(v))
    eigenvalue = curve.at(place.real, place.imag**2)[1]  # the smallest one that counts
    tol = tolerance(_TOL, _ROUNDING, v)
    binds = jnp.asarray(False) if setting.rules.binds is None else setting.rules.binds
    binds &= eigenvalue > layer.tau * (1 + tol)
    trace = jnp.where(has_content, P.trace / Lam, 0.0)
    factor = stability(curve, layer.tau, place, setting.rules.binds is not None)
    replicon = A.curvature / (setting.alpha * A.information**2) * factor
    # The potential is stationary, so that errors of the state enter it squared; the risk has them as they are.
    energy = setting.alpha * A.moreau - P.phi / Lam + M * m + N * V / layer.sides - Lam * q / 2
    status = jnp.where(residual <= tol, Status.converged, Status.max_steps)
    status = jnp.where(jnp.all(jnp.isfinite(v)) & jnp.isfinite(energy), status, Status.nonfinite)
    status = jnp.where(((A.margin <= 0) | (jumps > _JUMPS)) & (status == Status.converged), Status.unresolved, status)
    return WideState(
        q=q,
        m=m,
        V=V,
        Lam=Lam,
        M=M,
        N=N,
        offset=offset,
        slack=_height(layer, _unconstrained(offset, A)),
        trace=trace,
        train_loss=A.train_loss,
        gen_error=test_error(layer, setting.nodes, q, m, offset),
        energy=energy,
        distance=law.rho - 2 * m + q,
        share=jnp.where(has_content, P.share, 0.0),
        largest=jnp.where(has_content, (curve.top - layer.tau) / Lam, 0.0),
        replicon=jnp.where(binds & (place.imag > 0), jnp.inf, replicon),
        margin=A.margin,
        jumps=jumps,
        binds=binds,
        residual=residual,
        status=status,
    )


def solve(
    model: Layer,
    alpha: Number,
    nodes: Any = None,
    *,
    start: WidePoint | None = None,
    progress: Progress = None,
) -> WidePoint:
    """Solve the equations of a wide layer.

    Args:
        model: the layer.
        alpha: sentences per squared dimension, n / d^2.
        nodes: averages over the scores, see `wide_nodes`.
        start: a state nearby, from which the search starts.
        progress: None, True for a bar, or a function of the numbers of searches that are done and known.

    Returns:
        A `WidePoint`. Below the `onset` of content its matrix is zero. Where the proximal point is not
        unique at some nodes the status is `unresolved`. Numbers out of range that jax traces give NaN, with the status
        `nonfinite`.

    Raises:
        InputError: alpha is not positive, the loss has kinks, or `nodes` or `start` are of the wrong kind.
    """
    require_smooth(model)
    alpha = require_positive(alpha, "alpha", model.tau.dtype)
    if start is None:
        first = jnp.full(3 + model.shifts, jnp.nan)
    else:
        require_kind(start, "start", WidePoint, "a state of a wide layer")
        if start.offset.shape != (model.shifts,):
            text = f"must be one state with {model.shifts} offsets like the layer"
            raise InputError("start", f"{text}, got offsets of shape {start.offset.shape}")
        first = jnp.concatenate([jnp.stack([start.Lam, start.M, start.N]), start.offset])
    first, rule = lax.stop_gradient(first), wide_nodes(model, nodes)
    can_bind = not is_concrete(model.kappa) or float(model.kappa) < 1

    def answer(model: Layer, alpha: Array) -> WideState:
        return entry_by_entry(states)(model, alpha, rule, first, can_bind)

    with one_search(progress):
        return WidePoint(model, alpha, guarded(answer, model, alpha))
