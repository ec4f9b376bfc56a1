"""Order parameters, their conjugates and their branches; their form as one vector; what makes them admissible."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import require_choice
from ..base.linalg import positive_definite, precise, solve
from ..base.printing import Description, Printed, rows_of
from .model import Model

# Share of its largest possible size below which an order parameter counts as zero. It falls like a square root: at the
# standard setting a semantic state with less lies within 2e-4 of the pitchfork in which the branch ends.
ZERO = 0.02


class _Order(Printed):
    """Arrays over the tokens, by the names of the order parameters."""

    of_one = "m", 2
    q: jax.Array
    V: jax.Array
    theta: jax.Array
    m: jax.Array

    def describe(self) -> Description:
        return Description("", numbers=[row[:2] for row in rows_of(vars(self))])


class Overlaps(_Order):
    """Order parameters of a student Q (eq. (6) of the paper).

    Where the tokens are of S classes (`Sentences`) q, V and theta are those of the classes, and the overlaps with their
    means, ``Q^T mu_s / sqrt(d)``, stand behind those with the encodings: m is (L + S, r).

    Attributes:
        q: Q^T Sigma_l Q / d, (L, r, r).
        V: response of the student, (L, r, r).
        theta: Q^T Sigma_l Q* / d, (L, r, t).
        m: Q^T p_l / sqrt(d), (L, r).
    """

    @property
    def encoded(self) -> jax.Array:
        """Overlaps with the encodings alone, (..., L, r)."""
        return self.m[..., : _positions(self), :]


class Conjugates(_Order):
    """Conjugate order parameters, the paper's hats; shapes as in `Overlaps`."""


class Branch(NamedTuple):
    """A family of states, by what a symmetry sets to zero in them.

    Attributes:
        name: as users write it; None is any state, nothing imposed.
        theta, m: whether that order parameter is free, as numbers, since in jitted code a branch is data.
        order: the order parameter by which it differs from the uninformed state, if there is one.
        size: q of its start, in units of rho.
    """

    name: str | None
    theta: float
    m: float
    order: str | None
    size: float

    def free(self, model: Model) -> jax.Array:
        """What it leaves free of (theta, m), (2,): the branch as data."""
        return jnp.asarray([self.theta, self.m], model.lam.dtype)

    @precise
    def start(self, model: Model) -> Overlaps:
        """A point from which damped iteration reaches the branch, for models whose scores are of order one."""
        L, r, t = model.shape
        law, S = model.law(), len(model.rho)
        dtype = law.gamma.dtype
        scale = jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2)) / t
        # The encodings' principal direction over the tokens, of entries of order one.
        tau = jnp.einsum("k,kij->ij", law.weights, law.tau)[:L, :L]
        direction = jnp.linalg.eigh(tau)[1][:, -1] * jnp.sqrt(L)
        direction = jnp.where(direction[0] < 0, -direction, direction)
        eye = jnp.broadcast_to(jnp.eye(r, dtype=dtype), (S, r, r))
        semantic, positional = model.start_columns(both=bool(self.theta))
        # Columns that are all along one column of the teacher have it in common: q - theta rho^{-1} theta^T is
        # positive.
        size = jnp.max(jnp.sum(jnp.abs(semantic), 0)) * jnp.max(jnp.sum(jnp.abs(semantic), 1))  # above |semantic|^2
        semantic = semantic / jnp.sqrt(jnp.maximum(size / 2, 1.0))
        m = 0.25 * self.m * direction[:, None] * positional
        theta = jnp.broadcast_to(0.5 * self.theta * scale * semantic, (S, r, t))
        if model.teacher_mean is not None:
            # A student along the teacher sees the means of the classes as the teacher does.
            m = jnp.concatenate([m, (theta @ solve(model.rho, model.teacher_mean[..., None]))[..., 0]])
        return Overlaps(self.size * scale * eye, 15.0 * eye, theta, m)


BRANCHES = {
    branch.name: branch
    for branch in (
        Branch("positional", 0.0, 1.0, "m", 0.1),
        Branch("semantic", 1.0, 0.0, "theta", 0.6),
        Branch("uninformed", 0.0, 0.0, None, 0.4),
        Branch(None, 1.0, 1.0, None, 0.6),
    )
}
# The two minima that compete.
PAIR = ("positional", "semantic")
# What a direction of a student does, by whether it has theta and whether it has m.
_NAMES = {(True, False): "semantic", (False, True): "positional", (True, True): "mixed", (False, False): "uninformed"}


def branch_of(name: str | None) -> Branch:
    """The branch of a name.

    Raises:
        InputError: there is none.
    """
    require_choice(name, "branch", BRANCHES)
    return BRANCHES[name]


def symmetric(a: jax.Array) -> jax.Array:
    """Symmetric part over the last two axes."""
    return 0.5 * (a + jnp.swapaxes(a, -1, -2))


@precise
def of_sentence(model: Model, x: Overlaps) -> Overlaps:
    """Overlaps of the tokens of the kind that a model is given: with m at ``y = 0``, so that h - m is linear in y.

    The overlap m of a token is that with its encoding and with the mean of its class, less ``theta rho^{-1} E[y]``.
    """
    mean = model.teacher_mean
    if model.kind is None or mean is None:
        return x
    q, V, theta = map(model.of_tokens, (x.q, x.V, x.theta))
    L = model.shape[0]
    m = x.m[:L] + model.of_tokens(x.m[L:]) - (theta @ solve(model.rho, mean[..., None]))[..., 0]
    return Overlaps(q, V, theta, m)


def _positions(x: Overlaps | Conjugates) -> int:
    """Rows of m that are of the encodings: all of them, unless there are rows of classes behind."""
    rows, classes = x.m.shape[-2], x.q.shape[-3]
    return rows if rows == classes else rows - classes


class HasTeacher(Protocol):
    """A model, or `Coordinates` made of one: what knows the covariance of the teacher's fields."""

    @property
    def rho(self) -> Any:
        """Covariance of the teacher's fields, (S, t, t)."""


@precise
def explained_covariance(model: HasTeacher, theta: jax.Array) -> jax.Array:
    """The part of the covariance of the student fields that the teacher's explain, ``theta rho^{-1} theta^T``, (L,
    r, r).
    """
    return theta @ solve(model.rho, jnp.swapaxes(theta, -1, -2))


def residual_covariance(model: HasTeacher, x: Overlaps) -> jax.Array:
    """Covariance of the student fields given the teacher's, ``q - theta rho^{-1} theta^T``, (L, r, r)."""
    return x.q - explained_covariance(model, x.theta)


def admissible(model: HasTeacher, x: Overlaps) -> jax.Array:
    """Whether q, V and ``q - theta rho^{-1} theta^T`` are positive definite for every token: a boolean scalar."""
    return positive_definite(jnp.concatenate([x.q, x.V, residual_covariance(model, x)]))


@eqx.filter_jit
def magnitudes(model: HasTeacher, x: Overlaps) -> tuple[jax.Array, jax.Array]:
    """How semantic and how positional a state is: |theta| / sqrt(tr q tr rho) and |m| / sqrt(tr q), of order one."""
    q = jnp.sum(jnp.trace(x.q, axis1=-2, axis2=-1), -1)
    rho = jnp.sum(jnp.trace(model.rho, axis1=-2, axis2=-1), -1) / x.q.shape[-3]
    return (jnp.sqrt(jnp.sum(x.theta**2, (-1, -2, -3)) / (q * rho)), jnp.sqrt(jnp.sum(x.encoded**2, (-1, -2)) / q))


def own_size(model: HasTeacher, x: Overlaps, free: jax.Array) -> jax.Array:
    """Size of the order parameter of a branch that leaves one free, (2,), relative to the largest possible one."""
    theta, m = magnitudes(model, x)
    return free[0] * theta + free[1] * m


def vanished(model: HasTeacher, x: Overlaps, free: jax.Array) -> jax.Array:
    """Whether the one order parameter that a branch leaves free is zero, so that the branch does not exist."""
    return (jnp.sum(free) == 1) & (own_size(model, x, free) < ZERO)


def label(model: Model, x: Overlaps) -> str:
    """Name of the branch of a concrete state: of `BRANCHES`, or "mixed" when both overlaps are present.

    Of a student of rank above one it says what its directions do, as in "semantic + positional"; those that do nothing
    are left out. Directions are those that theta spans, turned so that the fewest have m, and those left over: the name
    does not change under rotations of the columns.
    """
    q, theta, m = (np.asarray(a, float) for a in (x.q, x.theta, x.encoded))
    rho = np.trace(np.asarray(model.rho), axis1=-2, axis2=-1).sum() / len(q)
    values, vectors = np.linalg.eigh(np.nan_to_num(q.sum(0)))
    unit = vectors / np.sqrt(np.maximum(values, ZERO**2 * max(values[-1], np.finfo(float).tiny)))  # unit^T q unit = 1
    theta, m = np.nan_to_num(unit.T @ theta), np.nan_to_num(m @ unit)
    sizes, basis = np.linalg.eigh(np.einsum("lat,lbt->ab", theta, theta) / rho)
    names = set()
    for semantic in (False, True):
        own = m @ basis[:, (sizes > ZERO**2) == semantic]
        names |= {_NAMES[semantic, positional] for positional in np.linalg.eigvalsh(own.T @ own) > ZERO**2}
    return " + ".join(name for name in _NAMES.values() if name in names - {"uninformed"}) or "uninformed"


State = TypeVar("State", Overlaps, Conjugates)


def impose(x: State, free: jax.Array) -> State:
    """Set to zero what the symmetry of a branch sets to zero.

    On conjugates it does to frozen nodes what symmetrising them would do. The overlaps with the means of classes belong
    to
    theta: the teacher sees them.
    """
    rows = np.arange(x.m.shape[-2])[:, None] < _positions(x)
    return type(x)(x.q, x.V, free[0] * x.theta, jnp.where(rows, free[1], free[0]) * x.m)


class Coordinates(eqx.Module):
    """Order parameters as one vector, with those that a branch sets to zero by symmetry held at zero.

    It knows of a model only what Newton's method has to: shapes, the teacher's covariance, and the gauge.

    Attributes:
        rho: covariance of the teacher's fields, (S, t, t).
        free: what the branch leaves free of (theta, m), (2,).
        generators: tangents of the rotations that change no state, (G, r, r).
        shapes: of q, V, theta and m.
    """

    rho: jax.Array
    free: jax.Array
    generators: jax.Array
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __init__(self, model: Model, free: jax.Array):
        dtype = model.lam.dtype
        self.rho, self.free = model.rho.astype(dtype), free
        # A penalty is another one for columns that are turned.
        self.generators = jnp.asarray(model.generators[: 0 if model.penalty is not None else None], dtype)
        self.shapes = tuple(shapes_of(model).values())

    @property
    def order(self) -> jax.Array:
        """One for every coordinate of theta and m that is free, zero for the others."""
        zero, one = (Overlaps(*(jnp.full(shape, v, self.rho.dtype) for shape in self.shapes)) for v in (0.0, 1.0))
        return self.pack(Overlaps(zero.q, zero.V, one.theta, one.m))

    def pack(self, x: Overlaps) -> jax.Array:
        """Overlaps as a vector."""
        parts = impose(x, self.free)
        return jnp.concatenate([jnp.ravel(a) for a in (parts.q, parts.V, parts.theta, parts.m)]).astype(self.rho.dtype)

    def unpack(self, v: jax.Array) -> Overlaps:
        """A vector as overlaps."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = zip(jnp.split(v, ends), self.shapes, strict=True)
        return Overlaps(*(part.reshape(shape) for part, shape in parts))

    def scale(self, x: Overlaps) -> jax.Array:
        """Size of every coordinate, by which residuals are made relative.

        That of theta and m is their own, not the larger one they could have: near a pitchfork, where they fall to
        zero, a residual that is small on any other scale says nothing.
        """
        q = jnp.sqrt(jnp.mean(jnp.trace(x.q, axis1=1, axis2=2)))
        V = jnp.mean(jnp.trace(x.V, axis1=1, axis2=2))
        rho = jnp.sqrt(jnp.mean(jnp.trace(self.rho, axis1=1, axis2=2)))
        theta, m = (jnp.maximum(jnp.sqrt(jnp.mean(a**2)), ZERO * s) for a, s in ((x.theta, q * rho), (x.m, q)))
        return jnp.concatenate([jnp.full(a.size, s) for a, s in ((x.q, q**2), (x.V, V), (x.theta, theta), (x.m, m))])

    @precise
    def gauge(self, x: Overlaps, scale: jax.Array) -> jax.Array:
        """Unit tangents, in scaled coordinates, of the orbit of a state under Q -> Q O: (generators, n)."""
        if not len(self.generators):
            return jnp.zeros((0, scale.shape[0]), scale.dtype)
        # An infinitesimal rotation of the student's columns.
        moves = (Overlaps(A @ x.q - x.q @ A, A @ x.V - x.V @ A, A @ x.theta, x.m @ A.T) for A in self.generators)
        rows = jnp.stack([self.pack(move) / scale for move in moves])
        size = jnp.linalg.norm(rows, axis=1, keepdims=True)
        return jnp.where(size > 1e-6, rows / jnp.maximum(size, 1e-6), 0.0)


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of the order parameters, by name."""
    (_, r, t), law = model.shape, model.law()
    S, J = law.gamma.shape[1], law.tau.shape[1]
    return {"q": (S, r, r), "V": (S, r, r), "theta": (S, r, t), "m": (J, r)}
