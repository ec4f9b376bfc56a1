"""Fixed points of wide layers: the equations, their solution with implicit derivatives, and the results.

The potential of order parameters (q, m, V) and their conjugates (Lam, M, N) is

    e = alpha moreau(q, m, V) - Phi(M, N, tau) / Lam + M m + N V - Lam q / 2.

Its six derivatives vanish at the state, where e is the least risk over d^2.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from ..averages.program import lane_by_lane, program
from ..base.arrays import Number, either, precise, solve
from ..base.derivatives import derivative_along, with_tangent
from ..base.errors import InputError, is_concrete, require_kind, require_positive
from ..base.kinds import form_of
from ..base.progress import Progress, one_search
from ..base.report import Description, Printed, Row, picture, rows_of
from ..base.results import MeanField, Replicated, Status
from .channel import Averages, WideNodes, averages, fields, second_start, test_error, wide_nodes
from .layer import WideLayer, require_none, require_smooth
from .spectrum import convolution, prior, stability

_TOL = 1e-7  # relative change of the unknowns in the last step; Newton's method leaves the square of this
_ROUNDING = 1e3  # units in the last place of such a change in single precision
_MOST_STEPS = 100
_JUMPS = 1e-6  # share of sentences with several proximal points from which on a state is unresolved
_PATIENCE = 12  # steps after which the map is damped, because it may alternate between two places
_LONGEST = 0.5  # relative length of a Newton step
_START = 0.5, 0.4, 0.7  # q, m, V over rho


class WideState(eqx.Module):
    """A fixed point on the averages of one replicate.

    Attributes:
        q: Tr S^2 / d.
        m: Tr S S* / d.
        V: response.
        Lam, M, N: conjugates; the trained matrix is (Y - tau)_+ / Lam with Y = M S* + sqrt(N) G.
        offset: numbers of the encodings, (k,): the shift of the scores in the directions that the loss sees if the
            encodings are long, the spike R if their length is of order one.
        slack: distance of the offset from the boundary of the cone, see `_cone`; negative if it would cross it freely.
        trace: Tr S / d.
        train_loss: loss of a training sentence.
        gen_error: loss on fresh sentences without noise.
        energy: least risk over d^2.
        distance: ||S - S*||^2 / d.
        share: share of the eigenvalues of S that are not zero.
        largest: largest eigenvalue of S.
        replicon: below one in a state of stable replica symmetry; infinite where the bound on the rank binds.
        margin: least determinant of the proximal equations; proximal points are minima where it is positive.
        jumps: share of sentences at which two starts of the proximal operator differ; the lower point is taken.
        binds: whether the bound on the rank binds.
        residual: relative change of the order parameters in a step.
        status: `Status` as an integer.
    """

    q: Float[Array, "*R"]
    m: Float[Array, "*R"]
    V: Float[Array, "*R"]
    Lam: Float[Array, "*R"]
    M: Float[Array, "*R"]
    N: Float[Array, "*R"]
    offset: Float[Array, "*R k"]
    slack: Float[Array, "*R"]
    trace: Float[Array, "*R"]
    train_loss: Float[Array, "*R"]
    gen_error: Float[Array, "*R"]
    energy: Float[Array, "*R"]
    distance: Float[Array, "*R"]
    share: Float[Array, "*R"]
    largest: Float[Array, "*R"]
    replicon: Float[Array, "*R"]
    margin: Float[Array, "*R"]
    jumps: Float[Array, "*R"]
    binds: Array
    residual: Float[Array, "*R"]
    status: Int[Array, "*R"]


class WidePoint(Replicated):
    """The state of a wide layer at one alpha. Numbers are means over the replicates of the averages."""

    model: WideLayer
    alpha: Float[Array, "*batch"]
    replicates: WideState
    batch_probe = "alpha", 0
    SETTING = ("alpha",)
    SHOWN: ClassVar = {
        "q": "Tr S^2 / d",
        "m": "Tr S S* / d, overlap with the teacher",
        "V": "response",
        "trace": "Tr S / d",
        "train_loss": "loss of a training sentence",
        "gen_error": "loss on fresh sentences without noise",
        "energy": "least risk over d^2",
        "distance": "||S - S*||^2 / d",
        "share": "share of the eigenvalues of S that are not zero",
        "largest": "largest eigenvalue of S",
        "replicon": "stability, below one",
    }
    q, m, V = MeanField[Array](), MeanField[Array](), MeanField[Array]()
    Lam, M, N = MeanField[Array](), MeanField[Array](), MeanField[Array]()
    offset, slack, trace = MeanField[Array](), MeanField[Array](), MeanField[Array]()
    train_loss, gen_error, energy = MeanField[Array](), MeanField[Array](), MeanField[Array]()
    distance, share, largest, replicon = MeanField[Array](), MeanField[Array](), MeanField[Array](), MeanField[Array]()

    @property
    def title(self) -> str:
        return f"{type(self.model).__name__} at alpha = {self.alpha:g}"

    @property
    def R(self) -> Float[Array, "*batch"]:
        """Spike of encodings whose length is of order one: sqrt(d) R is the eigenvalue of S along their line."""
        if self.model.length is None:
            raise InputError("encodings", f"must be a number for a spike R, got {self.model.encodings!r}")
        return self.offset[..., 0]

    def details(self) -> list[Row]:
        name, part = ("offset", ...) if self.model.length is None else ("R", 0)
        numbers, bars = ({name: a.offset[part]} for a in (self, self.stderr))
        rows = rows_of(numbers, bars) if self.offset.size else []
        bound = "rank", "bounded by kappa", "replica symmetry is weakly broken: the replicon is infinite"
        return [*rows, *[bound] * bool(self.replicates.binds.any())]

    def spectrum(self) -> WideSpectrum:
        """Return the density of the eigenvalues of the trained matrix that are not zero, and the share of zeros.

        Raises:
            InputError: the result is a batch.
        """
        if jnp.ndim(self.alpha):
            raise InputError("alpha", "must be one number for a spectrum, got a batch: index it first")
        return _spectrum(self)


class WideSpectrum(Printed):
    """Spectrum of the trained matrix S of a wide layer.

    Attributes:
        values: eigenvalues at the nodes of the density, (n,), increasing.
        density: density there; it integrates to one minus `zeros`.
        weight: share of the eigenvalues that a node stands for.
        zeros: share of the eigenvalues that are zero.
        edge: largest eigenvalue.
    """

    values: Float[Array, " n"]
    density: Float[Array, " n"]
    weight: Float[Array, " n"]
    zeros: Float[Array, ""]
    edge: Float[Array, ""]

    def quantile(self, level: ArrayLike) -> Float[Array, "..."]:
        """Return the eigenvalues below which shares `level` of all eigenvalues lie; zero up to `zeros`."""
        mass = self.zeros + jnp.cumsum(self.weight) - 0.5 * self.weight
        return jnp.interp(jnp.asarray(level), mass, self.values, left=0.0, right=self.edge)

    def describe(self) -> Description:
        return Description("spectrum of the trained matrix", numbers=rows_of({"zeros": self.zeros, "edge": self.edge}))

    plot = picture("theory.spectrum_figure", "the density of the eigenvalues")


@program
def _spectrum(point: WidePoint) -> WideSpectrum:
    tau, curve = point.model.tau, convolution(point.model.teacher, point.M, point.N)
    Y = curve.nodes(curve.first_place(tau, point.model.kappa, jnp.any(point.replicates.binds)))
    return WideSpectrum((Y.y - tau) / point.Lam, Y.density * point.Lam, Y.weight, 1 - point.share, point.largest)


class _Setting(NamedTuple):
    """The layer, its data and the constraints in a search on one replicate.

    Attributes:
        points: proximal points at the nodes, from which those nearby are searched.
        binds: whether the rank is bounded by kappa d; None if it cannot be.
        held: whether the offsets stay on the boundary of the cone, see `_cone`.
    """

    layer: WideLayer
    alpha: Float[Array, ""]
    nodes: WideNodes
    points: Float[Array, "n N"]
    binds: Bool[Array, ""] | None
    held: Bool[Array, ""]

    @classmethod
    def free(cls, layer: WideLayer, alpha: Float[Array, ""], nodes: WideNodes, can_bind: bool = False) -> _Setting:
        """Return a setting without constraints."""
        binds, held = jnp.asarray(False) if can_bind else None, jnp.asarray(False)
        return cls(layer, alpha, nodes, jnp.zeros_like(nodes.student), binds, held)

    def at(self, v: Float[Array, " k"]) -> tuple:  # the arguments of `averages` and `second_start`
        return self.layer, self.nodes, v[0], v[1], v[2], v[3:], self.points

    def channel(self, v: Float[Array, " k"]) -> tuple[Averages, Float[Array, "n N"]]:
        return averages(*self.at(v))

    def conjugates(self, A: Averages) -> tuple[Array, Array, Array]:
        return self.alpha * A.information, self.alpha * A.signal, self.alpha * A.force / 2

    def hats(self, v: Float[Array, " k"]) -> tuple[Float[Array, " k"], Float[Array, "n N"]]:
        """Return the conjugates of (q, m, V) and the next offsets, and the proximal points."""
        A, h = self.channel(v)
        return jnp.concatenate([jnp.stack(self.conjugates(A)), self.offsets(v[3:], A)]), h

    def orders(self, u: Float[Array, " k"]) -> tuple[Float[Array, " k"], Float[Array, ""]]:
        """Return (q, m, V) and the offsets, and the share of the eigenvalues that are not zero."""
        Lam, M, N = u[:3]
        tau, curve = self.layer.tau, convolution(self.layer.teacher, M, N)
        P = prior(curve, tau, curve.first_place(tau, self.layer.kappa, self.binds))
        return jnp.concatenate([jnp.stack([2 * P.phi / Lam**2, P.by_M / Lam, P.by_N / Lam]), u[3:]]), P.share

    def map(self, u: Float[Array, " k"]) -> tuple[Array, tuple[Array, Array, Array, Array]]:
        """Return the right-hand sides of the equations for the conjugates (Lam, M, N) and the offsets.

        The second result has them, too, and (q, m, V) with the offsets, the share of eigenvalues that are not zero, and
        the proximal points.
        """
        v, share = self.orders(u)
        image, h = self.hats(v)
        return image, (image, v, share, h)

    def offsets(self, t: Float[Array, " k"], A: Averages) -> Float[Array, " k"]:
        """Return the offsets after a Newton step for a vanishing push, under the constraint of the setting."""
        if not t.size:
            return t
        held = jnp.zeros_like(t)  # on the boundary of the cone a spike is zero, and long encodings move along it
        if self.layer.is_long:
            along = jnp.asarray(_cone(self.layer)[::-1] * [-1, 1], t.dtype)
            held = along * (along @ t + along @ A.push / (along @ A.stiffness @ along))
        return jnp.where(self.held, held, _unconstrained(t, A))


def _unconstrained(t: Float[Array, " k"], A: Averages) -> Float[Array, " k"]:
    """Return the offsets after a Newton step for a vanishing push."""
    return t + solve(A.stiffness, A.push[:, None])[:, 0] if t.size else t


def _cone(layer: WideLayer) -> Float[np.ndarray, " k"]:
    """Return the vector whose product with the numbers of the encodings is at least zero.

    Encodings of length of order one have a spike R, which is positive. Long ones shift the scores by a positive
    semidefinite matrix T. The loss of two tokens does not see a common shift of all scores, so all that is left of the
    condition is that T_11 + T_22 - 2 T_12 is at least zero.
    """
    if not layer.is_long:
        return np.ones(1)
    c = np.array([1.0, -1.0])
    normal = np.einsum("nab,a,b->n", layer.basis, c, c)
    return normal / np.linalg.norm(normal)


def _height(layer: WideLayer, t: Float[Array, " k"]) -> Float[Array, ""]:
    """Return the distance of the offsets from the boundary of the cone, negative outside; zero without encodings."""
    return jnp.asarray(_cone(layer), t.dtype) @ t if t.size else jnp.zeros((), t.dtype)


def _tolerance(v: Float[Array, " k"]) -> float:
    return max(_TOL, _ROUNDING * float(jnp.finfo(v.dtype).eps))


def _size(u: Float[Array, " k"], rho: Float[Array, ""]) -> Float[Array, " k"]:
    """Return the scale of every unknown; offsets are measured in units of the teacher's scores."""
    return jnp.abs(u) + jnp.where(jnp.arange(len(u)) < 3, 0.0, jnp.sqrt(rho))


def _search(setting: _Setting, start: Float[Array, " k"]) -> tuple[Array, _Setting, Array, Array]:
    """Return the orders v at a root of ``map(u) = u``, the setting there, the last relative change, and `jumps`.

    The unknowns are the conjugates: near the onset of content they hardly move, while q changes by orders of magnitude.
    The map contracts nearly everywhere. Newton's step is taken where it is short and stays admissible. If the root
    violates a constraint, the constraint is imposed. If proximal points from zero are lower, the search goes on there.
    """
    frozen = lax.stop_gradient(setting)
    rho, tol = frozen.layer.teacher.rho + frozen.layer.noise, _tolerance(start)

    def body(state: tuple) -> tuple:
        u, points, binds, held, jumps, _, count = state
        now = frozen._replace(points=points, binds=binds, held=held)
        J, (image, v, share, points) = jax.jacfwd(now.map, has_aux=True)(u)
        r = image - u
        newton = jnp.linalg.solve(jnp.eye(len(u), dtype=u.dtype) - J, r)
        after = u + newton
        length, change = (jnp.max(jnp.abs(a) / _size(u, rho)) for a in (newton, r))
        is_good = (length < _LONGEST) & jnp.all(after[:3] > 0)
        ended = change <= tol
        must_hold = held | (_height(setting.layer, u[3:]) < 0)
        must_bind = None if binds is None else binds | (share > frozen.layer.kappa)
        at = now._replace(points=points).at(v)
        lower, weight = lax.cond(ended, second_start, lambda *at: (at[-1], 0 * at[2]), *at)
        goes_on = ended & ((must_hold != held) | (must_bind != binds) | jnp.any(lower != points))
        binds, held = either(ended, (must_bind, must_hold), (binds, held))
        image = u + jnp.where(count < _PATIENCE, 1.0, 0.5) * r
        length, jumps = jnp.where(goes_on, jnp.inf, change), jnp.maximum(jumps, weight)
        return jnp.where(is_good, after, image), lower, binds, held, jumps, length, count + 1

    v = lax.stop_gradient(start)
    w, _ = fields(frozen.nodes, v[0], v[1], rho)
    u, points = frozen._replace(points=w).hats(v)
    first = (u, points, setting.binds, setting.held, 0 * v[0], jnp.asarray(jnp.inf, start.dtype), 0)
    found = lax.while_loop(lambda s: (s[-2] > tol) & (s[-1] < _MOST_STEPS), body, first)
    u, points, binds, held, jumps, length, _ = found
    setting = setting._replace(points=points, binds=binds, held=held)
    return setting.orders(_attach_root(u, setting))[0], setting, length, jumps


@with_tangent
def _attach_root(primals: tuple, tangents: tuple) -> Float[Array, " k"]:
    u, setting = primals
    change = derivative_along(lambda s: s.map(u)[0], (setting,), tangents[1:])
    return jnp.linalg.solve(jnp.eye(len(u), dtype=u.dtype) - jax.jacfwd(setting.map, has_aux=True)(u)[0], change)


def _without_content(setting: _Setting) -> tuple[Float[Array, " k"], _Setting]:
    """Return the unknowns at q = m = V = 0, with the best offsets, and the constraint that holds there."""
    zeros = jnp.zeros(3 + setting.layer.shifts, setting.alpha.dtype)
    if not setting.layer.shifts:
        return zeros, setting
    frozen, tol = lax.stop_gradient(setting), _tolerance(zeros)
    unit = jnp.sqrt(frozen.layer.teacher.rho)

    def body(state: tuple) -> tuple:
        v, held, _, count = state
        now = frozen._replace(held=held)
        t = now.offsets(v[3:], now.channel(v)[0])
        length = jnp.max(jnp.abs(t - v[3:])) / unit
        must_hold = held | ((length <= tol) & (_height(setting.layer, t) < 0))
        return jnp.concatenate([v[:3], t]), must_hold, jnp.where(must_hold == held, length, jnp.inf), count + 1

    first = (zeros, setting.held, jnp.asarray(jnp.inf, zeros.dtype), 0)
    v, held, _, _ = lax.while_loop(lambda s: (s[2] > tol) & (s[3] < _MOST_STEPS), body, first)
    setting = setting._replace(held=held)
    return _attach_offsets(v, setting), setting


@with_tangent
def _attach_offsets(primals: tuple, tangents: tuple) -> Float[Array, " k"]:
    """Newton's steps have derivative zero in the offsets, so the tangent is that of one step."""
    v, setting = primals
    change = derivative_along(lambda s: s.offsets(v[3:], s.channel(v)[0]), (setting,), tangents[1:])
    return jnp.concatenate([jnp.zeros_like(v[:3]), change])


def without_content(layer: WideLayer, nodes: WideNodes) -> tuple[Array, Array]:
    """Return signal and force of the channel at S = 0, with the best offsets; see `Averages`."""
    v, setting = _without_content(_Setting.free(layer, jnp.ones_like(layer.tau), nodes))
    A, _ = setting.channel(v)
    return A.signal, A.force


@program
def states(layer: WideLayer, alpha: Array, nodes: WideNodes, start: Float[Array, " k"], can_bind: bool) -> WideState:
    """Return the states of all replicates, each search from the state before; if kappa cannot bind, compile less."""

    def one(start: Array, nodes: WideNodes) -> tuple[Array, WideState]:
        state = _state(_Setting.free(layer, alpha, nodes, can_bind), start)
        v = lax.stop_gradient(jnp.concatenate([jnp.stack([state.q, state.m, state.V]), state.offset]))
        return jnp.where(state.q > 0, v, start), state

    return lax.scan(one, start, nodes)[1]


@precise
def _state(free: _Setting, start: Array) -> WideState:
    zero, empty = _without_content(free)
    _, M, N = empty.conjugates(empty.channel(zero)[0])
    has_content = lax.stop_gradient(convolution(free.layer.teacher, M, N).top > free.layer.tau)
    none = zero, empty, jnp.zeros_like(free.alpha), jnp.zeros_like(free.alpha)
    return _report(*lax.cond(has_content, lambda: _search(free, start), lambda: none))


def _report(v: Float[Array, " k"], setting: _Setting, residual: Array, jumps: Array) -> WideState:
    """Return the state at the unknowns v; q = 0 is the layer without content."""
    layer, law = setting.layer, setting.layer.teacher
    A, _ = setting.channel(v)
    Lam, M, N = setting.conjugates(A)
    q, m, V, offset = v[0], v[1], v[2], v[3:]
    curve, binds = convolution(law, M, N), jnp.asarray(False) if setting.binds is None else setting.binds
    place = curve.place(layer.tau)
    P = prior(curve, layer.tau, curve.first_place(layer.tau, layer.kappa, setting.binds))
    trace = jnp.where(q > 0, P.trace / Lam, 0.0)
    replicon = A.curvature / (setting.alpha * A.information**2) * stability(curve, layer.tau, place)
    energy = setting.alpha * A.train_loss + layer.tau * trace
    status = jnp.where(residual <= _tolerance(v), Status.converged, Status.max_steps)
    status = jnp.where(jnp.all(jnp.isfinite(v)) & jnp.isfinite(energy), status, Status.nonfinite)
    status = jnp.where(((A.margin <= 0) | (jumps > _JUMPS)) & (status == Status.converged), Status.unresolved, status)
    return WideState(
        *(q, m, V, Lam, M, N),
        offset=offset,
        slack=_height(layer, _unconstrained(offset, A)),
        trace=trace,
        train_loss=A.train_loss,
        gen_error=test_error(layer, setting.nodes, q, m, offset),
        energy=energy,
        distance=law.rho - 2 * m + q,
        share=jnp.where(q > 0, P.share, 0.0),
        largest=jnp.where(q > 0, (curve.top - layer.tau) / Lam, 0.0),
        replicon=jnp.where(binds, jnp.inf, replicon),
        margin=A.margin,
        jumps=jumps,
        binds=binds,
        residual=residual,
        status=status,
    )


@form_of("solve", WideLayer)
def solve_wide(
    model: WideLayer,
    alpha: Number,
    branch: str | None = None,
    nodes: Any = None,
    *,
    start: WidePoint | None = None,
    rtol: Number | None = None,
    settings: Any = None,
    progress: Progress = None,
) -> WidePoint:
    """Solve the equations of a wide layer; this is `solve` for a `WideLayer`.

    Args:
        model: the layer.
        alpha: sentences per squared dimension, n / d^2.
        nodes: averages over the scores, see `wide_nodes`.
        start: a state nearby, from which the search starts; `progress` is as for other models.

    Returns:
        A `WidePoint`. Below the onset of content (`critical_alpha`) its matrix is zero. Where the proximal point is not
        unique at some nodes the status is `unresolved`.

    Raises:
        InputError: alpha is not positive; `branch`, `rtol` or `settings` are given, which have no meaning here.
    """
    require_none(branch=branch, rtol=rtol, settings=settings)
    require_smooth(model)
    alpha = require_positive(alpha, "alpha", model.tau.dtype)
    if start is None:
        orders, offset = jnp.asarray(_START) * model.teacher.rho, jnp.zeros(model.shifts)
    else:
        require_kind(start, "start", WidePoint, "a state of a wide layer")
        orders, offset = jnp.stack([start.q, start.m, start.V]), start.offset
        if offset.shape != (model.shifts,):
            raise InputError("start", f"must have {model.shifts} offsets like the layer, got {offset.shape[0]}")
    first = lax.stop_gradient(jnp.concatenate([orders, offset.astype(alpha.dtype)]))
    can_bind = not is_concrete(model.kappa) or float(model.kappa) < 1
    with one_search(progress):
        return WidePoint(model, alpha, lane_by_lane(states)(model, alpha, wide_nodes(model, nodes), first, can_bind))
