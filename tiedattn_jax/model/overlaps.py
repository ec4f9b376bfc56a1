"""Order parameters and their conjugates: branches, admissible values, and coordinates in one vector."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from ..base.arrays import StateArray, positive_definite, precise, solve
from ..base.errors import InputError, require_choice
from ..base.report import Description, Printed, rows_of
from .model import Model, over_kinds

# An order parameter below this share of its largest possible size counts as zero. It falls like a square root towards
# the pitchfork in which its branch ends: at the standard setting a semantic state below this share lies within 2e-4 of
# the pitchfork.
ZERO = 0.02
_LOSS = 0.24  # mean loss at standard normal fields, for tokens of variance one: .05 to 1 in the layers of this library
_START_V = 3.75  # V at the start of a branch times the variance of the tokens: 15 at the standard setting


class _Order(Printed):
    """Arrays over the tokens, named like the order parameters."""

    batch_probe = "m", 2
    q: Float[StateArray, "*batch S r r"]
    V: Float[StateArray, "*batch S r r"]
    theta: Float[StateArray, "*batch S r t"]
    m: Float[StateArray, "*batch J r"]

    def describe(self) -> Description:
        return Description("", numbers=[row[:2] for row in rows_of(vars(self))])


class Overlaps(_Order):
    """Order parameters of a student Q (eq. (6) of the paper).

    If the tokens are of S classes (`TokenClassMixture`), q, V and theta are those of the classes. In m the overlaps
    with the encodings are then followed by those with the means of the classes, ``Q^T mu_s / sqrt(d)``: m is
    (L + S, r).

    Attributes:
        q: Q^T Sigma_l Q / d.
        V: response of the student.
        theta: Q^T Sigma_l Q* / d.
        m: Q^T p_l / sqrt(d).
    """

    @property
    def encoded(self) -> Float[StateArray, "*batch L r"]:
        """Overlaps with the encodings alone."""
        return self.m[..., : _encoding_count(self), :]


class OrderNumber:
    """Descriptor of an order parameter of two tokens and rank one: the mean over the tokens, or m of the first one.

    Args:
        source: name of the attribute of a result that has the order parameter of all tokens, under the same name.
    """

    def __init__(self, source: str = "overlaps") -> None:
        self.source = source

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: Any, owner: type) -> Float[Array, "*batch"]:
        values = jnp.asarray(getattr(getattr(result, self.source), self.name))
        expected = (2, 1) if self.name == "m" else (2, 1, 1)
        if (shape := values.shape[-len(expected) :]) != expected:
            requirement = f"two tokens and rank one for the number {self.name}, got {self.name} of shape {shape}"
            raise InputError("model", f"must have {requirement}: use {self.source}.{self.name}")
        tokens = values.reshape((*values.shape[: -len(expected)], 2))
        return tokens[..., 0] if self.name == "m" else jnp.mean(tokens, -1)


class Conjugates(_Order):
    """Conjugate order parameters, the paper's hats; shapes as in `Overlaps`."""


class Branch(NamedTuple):
    """A family of states, defined by the order parameters that a symmetry sets to zero.

    Attributes:
        name: the name that users write; None stands for any state, with nothing imposed.
        theta, m: one if this order parameter is free, else zero; they are numbers because jitted code takes a branch
            as data.
        order: the order parameter by which the branch differs from the uninformed state, or None.
        size: q of its start, in units of rho.
    """

    name: str | None
    theta: float
    m: float
    order: str | None
    size: float

    def free(self, model: Model) -> Float[Array, " 2"]:
        """Return which of (theta, m) the branch leaves free: the branch as data."""
        return jnp.asarray([self.theta, self.m], model.lam.dtype)

    @precise
    def start(self, model: Model) -> Overlaps:
        """Return a point from which damped iteration reaches the branch, for models whose scores are of order one."""
        L, r, t = model.shape
        law, S = model.law(), len(model.rho)
        dtype = law.gamma.dtype
        scale = jnp.trace(model.rho, axis1=1, axis2=2)[:, None, None] / t
        # The principal direction of the encodings over the tokens, scaled to entries of order one.
        tau = jnp.einsum("k,kij->ij", law.weights, law.tau)[:L, :L]
        direction = jnp.linalg.eigh(tau)[1][:, -1] * jnp.sqrt(L)
        direction = jnp.where(direction[0] < 0, -direction, direction)
        eye = jnp.broadcast_to(jnp.eye(r, dtype=dtype), (S, r, r))
        semantic, positional = model.start_columns(combined=bool(self.theta))
        # Columns of the student along the same column of the teacher share its signal, and one along a weak column has
        # little: theta is scaled so that q - theta rho^{-1} theta^T is positive.
        signal = scale * semantic @ solve(model.rho, jnp.broadcast_to(semantic.T, (S, t, r)))
        size = jnp.max(jnp.sum(jnp.abs(signal), 2, keepdims=True), 1, keepdims=True)  # at least its eigenvalues
        theta = 0.5 * self.theta * scale * semantic / jnp.sqrt(jnp.maximum(size / 2, 1.0))
        m = 0.25 * self.m * model.field_scale * direction[:, None] * positional
        if model.teacher_mean is not None:
            # A student along the teacher sees the means of the classes as the teacher does.
            m = jnp.concatenate([m, (theta @ solve(model.rho, model.teacher_mean[..., None]))[..., 0]])
        # V has the unit of fields squared over losses.
        V = (_START_V * model.field_scale**2 / _loss_scale(model)).astype(dtype)
        return Overlaps(self.size * scale * eye, V * eye, theta, m)


def _loss_scale(model: Model) -> Float[Array, ""]:
    """Return the size of the loss: the variance of the tokens, as for the layers of this library, times a power of 64.

    A loss in another unit is recognised at standard normal fields, in units of `Model.field_scale`.
    """
    L, _, _ = model.shape
    normals = np.random.default_rng(0).standard_normal((64, L, sum(model.columns)))
    Z, Y = jnp.split(jnp.asarray(normals, model.lam.dtype) * model.field_scale, [model.columns[0]], 2)

    def sizes(conditioned: Model) -> Float[Array, " 2"]:
        losses = jax.vmap(lambda Z, Y: conditioned.loss(Z, *conditioned.label(Y)))(Z, Y)
        return conditioned.sentence.share * jnp.stack([jnp.mean(conditioned.trace), jnp.mean(jnp.abs(losses))])

    unit, loss = over_kinds(model, sizes)
    return unit * 64 ** jnp.round(jnp.log(loss / (_LOSS * unit)) / np.log(64))


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
# The name of a direction of the student, by whether it has theta and whether it has m.
_NAMES = {(True, False): "semantic", (False, True): "positional", (True, True): "mixed", (False, False): "uninformed"}


def branch_of(name: str | None) -> Branch:
    """Return the branch with a name.

    Raises:
        InputError: no branch has this name.
    """
    require_choice(name, "branch", BRANCHES)
    return BRANCHES[name]


def symmetric(a: Float[Array, "*batch r r"]) -> Float[Array, "*batch r r"]:
    """Return the symmetric part over the last two axes."""
    return 0.5 * (a + jnp.swapaxes(a, -1, -2))


@precise
def sentence_overlaps(model: Model, x: Overlaps) -> Overlaps:
    """Return the overlaps of the tokens of the kind of sentences that a model is restricted to.

    The m of a token is its overlap with its encoding, plus that with the mean of its class, minus
    ``theta rho^{-1} E[y]``. This is m at ``y = 0``, so that h - m is linear in y.
    """
    mean, sentence = model.teacher_mean, model.sentence
    if model.kind is None or mean is None:
        return x
    q, V, theta = map(sentence.to_tokens, (x.q, x.V, x.theta))
    L = model.shape[0]
    m = x.m[:L] + sentence.to_tokens(x.m[L:]) - (theta @ solve(model.rho, mean[..., None]))[..., 0]
    return Overlaps(q, V, theta, m)


def _encoding_count(x: Overlaps | Conjugates) -> int:
    """Return the number of rows of m that belong to the encodings; rows of the classes, if any, follow them."""
    rows, classes = x.m.shape[-2], x.q.shape[-3]
    return rows if rows == classes else rows - classes


@runtime_checkable
class HasTeacher(Protocol):
    """A model, or `Coordinates` made of one: an object that says how large theta and m can be."""

    @property
    def rho(self) -> Float[Array, "S t t"]:
        """Covariance of the teacher's fields."""

    @property
    def encoding_strength(self) -> Float[Array, ""]:
        """Largest ``|m| / sqrt(q)``."""


@precise
def explained_covariance(model: HasTeacher, theta: Float[StateArray, "S r t"]) -> Float[Array, "S r r"]:
    """Return the covariance of the student fields that the teacher explains, ``theta rho^{-1} theta^T``."""
    return theta @ solve(model.rho, jnp.swapaxes(theta, -1, -2))


def residual_covariance(model: HasTeacher, x: Overlaps) -> Float[Array, "S r r"]:
    """Return the covariance of the student fields given the teacher's, ``q - theta rho^{-1} theta^T``."""
    return x.q - explained_covariance(model, x.theta)


def admissible(model: HasTeacher, x: Overlaps) -> Bool[Array, ""]:
    """Return whether q, V and ``q - theta rho^{-1} theta^T`` are positive definite for all tokens."""
    return positive_definite(jnp.concatenate([x.q, x.V, residual_covariance(model, x)]))


def _unit_of_m(model: HasTeacher) -> Float[Array, ""]:
    """Return the size of m in units of sqrt(tr q): one, or what encodings allow that are shorter than a token."""
    strength = model.encoding_strength
    return jnp.where(strength > 0, jnp.minimum(strength, 1.0), 1.0)


@eqx.filter_jit
def magnitudes(model: HasTeacher, x: Overlaps) -> tuple[Float[Array, " *batch"], Float[Array, " *batch"]]:
    """Return how semantic and how positional a state is: |theta| / sqrt(tr q tr rho) and |m| / sqrt(tr q), O(1).

    With encodings that are shorter than a token, |m| is divided by the largest one that they allow.
    """
    q = jnp.sum(jnp.trace(x.q, axis1=-2, axis2=-1), -1)
    rho = jnp.sum(jnp.trace(model.rho, axis1=-2, axis2=-1), -1) / x.q.shape[-3]
    m = jnp.sqrt(jnp.sum(x.encoded**2, (-1, -2)) / q)
    return jnp.sqrt(jnp.sum(x.theta**2, (-1, -2, -3)) / (q * rho)), m / _unit_of_m(model)


def order_size(model: HasTeacher, x: Overlaps, free: Float[StateArray, " 2"]) -> Float[Array, " ..."]:
    """Return the size of the one order parameter that is `free`, relative to the largest possible size."""
    theta, m = magnitudes(model, x)
    return free[0] * theta + free[1] * m


def vanished(model: HasTeacher, x: Overlaps, free: Float[StateArray, " 2"]) -> Bool[Array, " ..."]:
    """Return whether the one order parameter that a branch leaves free is zero, so that the branch does not exist."""
    return (jnp.sum(free) == 1) & (order_size(model, x, free) < ZERO)


def label(model: Model, x: Overlaps) -> str:
    """Return the name of the branch of a concrete state, see `BRANCHES`, or "mixed" if both overlaps are present.

    For a student of rank above one the name says what its directions do, as in "semantic + positional"; directions that
    do nothing are left out. The directions are those that theta spans, rotated so that the fewest have m, and the
    remaining ones. The name therefore does not change under rotations of the columns.
    """
    sizes, basis, m = _directions(model, x)
    names = set()
    for semantic in (False, True):
        projected = m @ basis[:, (sizes > ZERO**2) == semantic]
        names |= {_NAMES[semantic, positional] for positional in np.linalg.eigvalsh(projected.T @ projected) > ZERO**2}
    return " + ".join(name for name in _NAMES.values() if name in names - {"uninformed"}) or "uninformed"


def learned_directions(model: Model, x: Overlaps) -> int:
    """Return the number of directions in which a concrete student overlaps with the teacher."""
    return int(np.sum(_directions(model, x)[0] > ZERO**2))


def _directions(
    model: Model, x: Overlaps
) -> tuple[Float[np.ndarray, " r"], Float[np.ndarray, "r r"], Float[np.ndarray, "L r"]]:
    """Return orthonormal directions of the whitened student, how much theta each has, squared, and the whitened m."""
    q, theta, m = (np.asarray(a, float) for a in (x.q, x.theta, x.encoded))
    rho = np.trace(np.asarray(model.rho), axis1=-2, axis2=-1).sum() / len(q)
    values, vectors = np.linalg.eigh(np.nan_to_num(q.sum(0)))
    unit = vectors / np.sqrt(np.maximum(values, ZERO**2 * max(values[-1], np.finfo(float).tiny)))  # unit^T q unit = 1
    theta, m = np.nan_to_num(unit.T @ theta), np.nan_to_num(m @ unit) / float(_unit_of_m(model))
    return *np.linalg.eigh(np.einsum("lat,lbt->ab", theta, theta) / rho), m


Orders = TypeVar("Orders", Overlaps, Conjugates)


def impose(x: Orders, free: Float[StateArray, " 2"]) -> Orders:
    """Set the order parameters to zero that the symmetry of a branch sets to zero.

    A conjugate that is zero by symmetry differs from zero on frozen nodes, which are not symmetric; this removes the
    difference. The overlaps with the means of classes are free if theta is, because the teacher sees these means.
    """
    is_encoding = np.arange(x.m.shape[-2])[:, None] < _encoding_count(x)
    return type(x)(x.q, x.V, free[0] * x.theta, jnp.where(is_encoding, free[1], free[0]) * x.m)


class Coordinates(eqx.Module):
    """Coordinates of the order parameters, as one vector in which those that a branch sets to zero stay zero.

    They keep only the parts of a model that Newton's method needs: shapes, sizes, and the gauge.

    Attributes:
        rho: covariance of the teacher's fields.
        encoding_strength: largest ``|m| / sqrt(q)``.
        free: which of (theta, m) the branch leaves free.
        generators: tangents of the rotations that change no state.
        shapes: shapes of q, V, theta and m.
    """

    rho: Float[Array, "S t t"]
    encoding_strength: Float[Array, ""]
    free: Float[StateArray, " 2"]
    generators: Float[Array, "G r r"]
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __init__(self, model: Model, free: Float[StateArray, " 2"]):
        dtype = model.lam.dtype
        self.rho, self.free = model.rho.astype(dtype), free
        self.encoding_strength = model.encoding_strength.astype(dtype)
        # A penalty changes when the columns are rotated, so these rotations are then no gauge.
        self.generators = jnp.asarray(model.generators[: 0 if model.penalty is not None else None], dtype)
        self.shapes = tuple(shapes_of(model).values())

    @property
    def order(self) -> Float[Array, " n"]:
        """Vector that is one at the coordinates of theta and m that are free, and zero elsewhere."""
        zeros, ones = (Overlaps(*(jnp.full(shape, v, self.rho.dtype) for shape in self.shapes)) for v in (0.0, 1.0))
        return self.pack(Overlaps(zeros.q, zeros.V, ones.theta, ones.m))

    def pack(self, x: Overlaps) -> Float[Array, " n"]:
        """Return overlaps as a vector."""
        return ravel_pytree(impose(x, self.free))[0].astype(self.rho.dtype)

    def unpack(self, v: Float[StateArray, " n"]) -> Overlaps:
        """Return a vector as overlaps."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = zip(jnp.split(v, ends), self.shapes, strict=True)
        return Overlaps(*(part.reshape(shape) for part, shape in parts))

    def scale(self, x: Overlaps) -> Float[Array, " n"]:
        """Return the size of every coordinate, by which residuals are made relative.

        The sizes of theta and m are those of the state, and at least `ZERO` of the largest possible ones: near a
        pitchfork, where they fall to zero, a residual that is small on a larger scale says nothing.
        """
        q = jnp.sqrt(jnp.mean(jnp.trace(x.q, axis1=1, axis2=2)))
        V = jnp.mean(jnp.trace(x.V, axis1=1, axis2=2))
        rho = jnp.sqrt(jnp.mean(jnp.trace(self.rho, axis1=1, axis2=2)))
        largest = (x.theta, q * rho), (x.m, q * _unit_of_m(self))
        theta, m = (jnp.maximum(jnp.sqrt(jnp.mean(a**2)), ZERO * s) for a, s in largest)
        return jnp.concatenate([jnp.full(a.size, s) for a, s in ((x.q, q**2), (x.V, V), (x.theta, theta), (x.m, m))])

    @precise
    def gauge(self, x: Overlaps, scale: Float[Array, " n"]) -> Float[Array, "G n"]:
        """Return unit tangents, in scaled coordinates, of the orbit of a state under Q -> Q O."""
        if not len(self.generators):
            return jnp.zeros((0, scale.shape[0]), scale.dtype)
        # An infinitesimal rotation of the student's columns.
        tangents = (Overlaps(A @ x.q - x.q @ A, A @ x.V - x.V @ A, A @ x.theta, x.m @ A.T) for A in self.generators)
        rows = jnp.stack([self.pack(tangent) / scale for tangent in tangents])
        size = jnp.linalg.norm(rows, axis=1, keepdims=True)
        return jnp.where(size > 1e-6, rows / jnp.maximum(size, 1e-6), 0.0)


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the order parameters by name."""
    (_, r, t), law = model.shape, model.law()
    S, J = law.gamma.shape[1], law.tau.shape[1]
    return {"q": (S, r, r), "V": (S, r, r), "theta": (S, r, t), "m": (J, r)}


def check_shapes(model: Model, start: Overlaps, lead: int = 0) -> None:
    """Check that overlaps have the shapes of the model's, after `lead` axes."""
    for name, expected in shapes_of(model).items():
        actual = jnp.shape(getattr(start, name))[lead:]
        if actual != expected:
            raise InputError("start", f"must have {name} of shape {expected}, got shape {actual}")
