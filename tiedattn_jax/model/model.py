"""The model: one scalar loss of the local fields, and the law of the data. Everything else follows from these.

A model may also say which fields of the teacher are compatible with a label, its `Preimages`. `identity` is a text of
what a model computes.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from ..base.arrays import AnyArray, precise
from ..base.errors import InputError, Ranges, conditions_of, is_concrete, require_kind, settle
from ..base.files import without_addresses
from ..base.report import Description, Printed, entries
from .law import Sentence, SpectralLaw
from .penalties import Penalty

_ANGLES = 128  # rotations of a teacher of two columns, on a grid


class Preimages(eqx.Module):
    """The teacher's fields that a label leaves possible: with probability ``weight_k`` they are near ``fields_k``.

    A label O that an optimal learner sees is a function of noisy fields ``U = Y + noise``. Then
    ``p(O | Y) = sum_k weight_k prod_l N(fields_kl; Y_l, noise_l I)`` up to a factor that does not depend on Y.

    Attributes:
        fields: the possible values of U, (K, L, t). Every one of them must lead to the same set.
        log_weight: logarithms of their weights, which contain the Jacobian of the target, (K,).
        noise: variance of the noise of a field, of all tokens or of each; zero if labels are exact, infinite for a
            token that they do not show.
        spacing: distance of neighbouring fields over the size of a field, for a grid on a continuous set; zero for a
            finite set. States whose V is smaller than the grid resolves have the status `unresolved`.
        signs: whether the set is U and -U, for a teacher of one column. Averages then have a closed form.
    """

    fields: Float[Array, "K L t"]
    log_weight: Float[Array, " K"]
    noise: Float[Array, "*tokens"]
    spacing: float = eqx.field(static=True, default=0.0)
    signs: bool = eqx.field(static=True, default=False)


def orbit(U: Float[Array, "L t"], noise: float | Float[Array, "*tokens"] = 0.0) -> Preimages:
    """Return the preimages of a target that is injective up to rotations and reflections of the teacher's columns.

    For one column these are U and -U. For two columns they are the group O(2), on a grid of angles.

    Args:
        U: the teacher's fields, with their noise if there is any.
        noise: variance of this noise, of all tokens or of each.

    Raises:
        InputError: the teacher has more than two columns.
    """
    t = U.shape[1]
    if t > 2:
        raise InputError("model", f"must declare `preimages(Y)` for a teacher of more than two columns, got t = {t}")
    if t == 1:
        rotations = np.array([[[1.0]], [[-1.0]]])
    else:
        angle = 2 * np.pi * np.arange(_ANGLES) / _ANGLES
        turns = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(-1, 2, 2)
        rotations = np.concatenate([turns, turns @ np.diag([1.0, -1.0])])
    fields = jnp.einsum("la,kab->klb", U, jnp.asarray(rotations, U.dtype))
    weight = jnp.full(len(rotations), -np.log(len(rotations)), U.dtype)
    spacing = 0.0 if t == 1 else 2 * np.pi / _ANGLES
    return Preimages(fields, weight, jnp.asarray(noise, U.dtype), spacing, signs=t == 1)


T = TypeVar("T")


def _short(part: Any) -> str:
    """Return a part of a model as text; one with many numbers, such as a spectral law, is said in words."""
    what = part.describe().what if isinstance(part, Printed) and part.readable else ""
    return f"{type(part).__name__}({what})" if what else repr(part)


class Model(Printed):
    """A tied attention layer and its data. Subclass it, and write `shape`, `loss` and `law`.

    Numbers that theory should be differentiable in must be array fields of the subclass.

    Attributes:
        lam: ridge strength lambda of the empirical risk; given by keyword.
        penalty: penalty p of the weights besides the ridge, or None; given by keyword. The risk contains
            ``lam / 2 ||Q||_F^2 + sum_i p(Q_i)``.
        kind: the kind of sentences that the model is restricted to, as a unit vector, or None; see
            `condition_on`.
    """

    batch_probe = "lam", 0
    lam: Float[Array, ""] = eqx.field(kw_only=True)
    penalty: Penalty | None = eqx.field(kw_only=True, default=None)
    kind: Float[Array, " C"] | None = eqx.field(kw_only=True, default=None)

    def __check_init__(self) -> None:
        settle(conditions_of(self))

    def describe(self) -> Description:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        texts = {name: entries(a) if eqx.is_array(a) else _short(a) for name, a in fields.items() if a is not None}
        return Description("", numbers=list(texts.items()))

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(L, r, t): tokens of a sentence, rank of the student, rank of the teacher."""

    @property
    def noise(self) -> int:
        """Number of noise fields of a token: standard normals, independent of everything else.

        If there are any, `loss` and `target` take them as their last argument, (L, noise).
        """
        return 0

    @property
    def columns(self) -> tuple[int, int]:
        """Numbers of student fields and of label fields of a token; label fields are those of teacher and noise."""
        _, r, t = self.shape
        return r, t + self.noise

    def label(self, fields: Float[Array, "L columns"]) -> tuple[Float[Array, "L _"], ...]:
        """Split a sentence's label fields into those of the teacher and, if there are any, of noise."""
        t = self.shape[2]
        return (fields[:, :t], fields[:, t:]) if self.noise else (fields,)

    @abc.abstractmethod
    def loss(self, Z: Float[Array, "L r"], Y: Float[Array, "L t"]) -> Float[Array, ""]:
        """Loss of one sentence as a function of its local fields.

        For student and teacher attention matrices S and T it is ``1/2 Tr[(S(Z) - T(Y)) D (S(Z) - T(Y))^T]`` with
        ``D = diag(Tr Sigma_l / d)``. It must not change under ``Z -> -Z`` nor under ``Y -> -Y``. A model with `noise`
        has ``loss(Z, Y, noise)``, even in Y alone or in Y and the noise together.

        Args:
            Z: student fields.
            Y: teacher fields.
        """

    @abc.abstractmethod
    def law(self) -> SpectralLaw:
        """Joint spectral law of covariances, encodings and teacher."""

    @property
    @precise
    def rho(self) -> Float[Array, "S t t"]:
        """Covariance of the teacher's fields, ``Q*^T Sigma_l Q* / d``, by tokens, or by classes if there are any."""
        law = self.law()
        return self.sentence.to_tokens(jnp.einsum("k,kl,kst->lst", law.weights, law.gamma, law.pi))

    @property
    @precise
    def trace(self) -> Float[Array, " S"]:
        """``Tr Sigma_l / d``, the diagonal of D, by tokens or classes; inside `loss` it is that of the tokens."""
        law = self.law()
        return self.sentence.to_tokens(law.weights @ law.gamma)

    @property
    @precise
    def encoding_strength(self) -> Float[Array, ""]:
        """Largest ``|m| / sqrt(q)``, ``(sum_l |p_l|^2 / sum_l Tr Sigma_l / d)^{1/2}`` up to a factor of order one."""
        law, L = self.law(), self.shape[0]
        norms = jnp.trace(law.tau[:, :L, :L], axis1=1, axis2=2)
        return jnp.sqrt(law.weights @ norms / (law.weights @ jnp.sum(law.gamma, 1)))

    @property
    @precise
    def teacher_mean(self) -> Float[Array, "S t"] | None:
        """Means of the teacher's fields, ``Q*^T mu_s / sqrt(d)``, by tokens or classes; None means zero."""
        law, L = self.law(), self.shape[0]
        if law.sentences is None:
            return None
        return self.sentence.to_tokens(jnp.tensordot(law.weights, law.cross[:, L:], 1))

    def condition_on(self, kind: Float[AnyArray, " C"] | None) -> Model:
        """Return the model restricted to one kind of sentences, see `sentence`; None stands for all kinds."""
        return eqx.tree_at(lambda m: m.kind, self, kind, is_leaf=lambda a: a is None)

    @property
    @precise
    def sentence(self) -> Sentence:
        """The kind that the model is restricted to; `rho`, `trace` and `teacher_mean` are those of its tokens."""
        if self.kind is None or (sentences := self.law().sentences) is None:
            return Sentence()
        return sentences.given(self.kind)

    @property
    def rotation_invariant(self) -> bool:
        """Whether loss(Z O, Y) = loss(Z, Y) for rotations O of the student's columns; solvers must fix this gauge."""
        return False

    def penalty_of(self, Q: PyTree[Float[Array, " ..."]]) -> Float[Array, ""] | float:
        """Return the penalty of weights besides the ridge, ``sum_i p(Q_i)``; zero without a penalty.

        With a penalty Q is one matrix, (d, r).
        """
        return 0.0 if self.penalty is None else jnp.sum(self.penalty.value(Q))

    @property
    def nonsmooth(self) -> bool:
        """Whether the gradient of the loss jumps where a token's fields change their sign.

        The proximal minima are then also searched for beyond these places, at every node, and the default rule has
        single nodes instead of lines.
        """
        return False

    @property
    def field_scale(self) -> Float[Array, ""] | float:
        """Size of a token's fields at which attention is neither flat nor hard; one unless a layer says otherwise.

        The search for the minima of the proximal problem uses it as its unit.
        """
        return 1.0

    @property
    def generators(self) -> Float[np.ndarray, "G r r"]:
        """Antisymmetric generators of the rotations of columns that leave the loss unchanged.

        These are all rotations if the loss is `rotation_invariant`, and none otherwise; a layer with only some of them
        overrides this.
        """
        rotations = rotations_of(self.shape[1])
        return rotations if self.rotation_invariant else rotations[:0]

    def start_columns(self, combined: bool) -> tuple[Float[Array, "r t"], Float[Array, " r"]]:
        """Return the student's columns that a named start aligns with the teacher, and with the encodings.

        Args:
            combined: whether the start uses both; the encodings then get a column of their own if there is one.
        """
        _, r, t = self.shape
        column = r - 1 if combined and r > 1 else 0
        return jnp.eye(r, t, dtype=self.lam.dtype), jnp.eye(r, dtype=self.lam.dtype)[column]

    def in_range(self) -> Ranges:
        """Return names of numbers, whether these are in their range, and the range in words.

        A layer whose number `gain` must be positive returns ``[("gain", self.gain > 0, "positive")]``. A model out of
        range is refused. Where jax traces its numbers, results are NaN and their status is `nonfinite`.
        """
        return []

    def identity_text(self) -> str:
        """Return the `identity` of the model; models of a batch share one."""
        batch = (0,) * (jnp.ndim(self.lam) - self.batch_probe[1])
        return identity(jax.tree.map(lambda a: a[batch], self) if batch else self)

    # Optional methods of a layer; `provides` says whether a class has written one.

    def target(self, Y: Float[Array, "L t"]) -> Float[Array, "L L"]:
        """Return the target attention matrix T(Y).

        Its mean is the linear baseline, and sampled data take their exact labels from it.
        """
        raise NotImplementedError(self._missing("target(Y)"))

    def student(self, Z: Float[Array, "L r"]) -> Float[Array, "L L"]:
        """Return the attention matrix S(Z) of the student, for the squared error on exact labels."""
        raise NotImplementedError(self._missing("student(Z)"))

    def preimages(self, Y: Float[Array, "L t"]) -> Preimages:
        """Return the teacher's fields that a label leaves possible, for the Bayes-optimal learner.

        Write ``return tiedattn_jax.bayes.orbit(Y)`` if T is injective up to rotations of the teacher's columns, which
        for one column are the sign. A model with noise has ``preimages(Y, noise)``.
        """
        raise NotImplementedError(self._missing("preimages(Y)"))

    def with_teacher(self, gram: Float[Array, "t t"]) -> Model:
        """Return the model at another ``Q*^T Q* / d``, such as that drawn by an instance of finite size."""
        raise NotImplementedError(self._missing("with_teacher(gram)"))

    @classmethod
    def provides(cls, method: str) -> bool:
        """Return whether the layer has written an optional method, such as "target", "student" or "with_teacher"."""
        return getattr(cls, method) is not getattr(Model, method)

    def _missing(self, method: str) -> str:
        return f"{type(self).__name__} must have a method `{method}` for this: see tiedattn_jax.Model"


def require_model(model: Any) -> None:
    """Raise an `InputError` unless this is a `Model`."""
    text = "a tiedattn_jax.Model, such as DotProduct(), or use the functions of tiedattn_jax.wide for its layers"
    require_kind(model, "model", Model, text)


def rotations_of(r: int) -> Float[np.ndarray, "G {r} {r}"]:
    """Return the generators of the rotations of r columns, one for each pair of them."""
    later, earlier = (np.eye(r)[k] for k in np.tril_indices(r, -1))
    return later[:, :, None] * earlier[:, None] - earlier[:, :, None] * later[:, None]


def over_kinds(model: Model, fn: Callable[[Model], T]) -> T:
    """Sum `fn` of the model given each kind of its sentences, one kind at a time; without kinds return `fn(model)`."""
    sentences = model.law().sentences
    if sentences is None:
        return fn(model)
    return jax.tree.map(lambda a: jnp.sum(a, 0), lax.map(lambda kind: fn(model.condition_on(kind)), sentences.kinds))


def one_kind(model: Model) -> Model:
    """Return the model given the first kind of its sentences; the model itself if there are no kinds."""
    sentences = model.law().sentences
    return model if sentences is None else model.condition_on(sentences.kinds[0])


def require_no_closures(model: Model) -> None:
    """Raise an `InputError` if `law` or `loss` use a number that jax traces and that is none of the model's."""
    L, *widths = model.shape
    fields = [jnp.zeros((L, k), model.lam.dtype) for k in (*widths, model.noise) if k]
    require_fields("law", eqx.filter_make_jaxpr(lambda model: model.law())(model)[0].consts)
    require_fields("loss", eqx.filter_make_jaxpr(lambda model, *a: one_kind(model).loss(*a))(model, *fields)[0].consts)


def require_fields(name: str, values: Any) -> Any:
    """Return what a method of a model uses or returns; raise an `InputError` if jax traces it."""
    if not is_concrete(values):
        text = "must take every number that jax traces from the fields of the class: add one, as `width: jax.Array`"
        raise InputError(name, f"{text}, got a number of the function around the class")
    return values


def identity(model: Model) -> str:
    """Return the compiled text (StableHLO) of everything that a model computes, for numbers of these shapes and dtypes.

    The text contains the loss with its derivatives, the law, target, student and penalty, with all constants
    in them. It does not contain the numbers of the model. It may change with the version of jax.
    """
    statics = []
    arrays, structure = eqx.partition(model, eqx.is_array)

    def computed(arrays: Any, Z: Float[Array, "L r"], fields: Float[Array, "L columns"]) -> Any:
        model = eqx.combine(arrays, structure)
        law = model.law()
        given = one_kind(model)
        labels = given.label(fields)
        values: dict[str, Any] = {
            "law": law,
            "loss": [f(lambda *x: given.loss(x[0], *given.label(x[1])), (0, 1))(Z, fields) for f in _DERIVATIVES],
            "scale": given.field_scale,
        }
        for name, arguments in {"target": labels, "student": (Z,)}.items():
            if given.provides(name):
                values[name] = getattr(given, name)(*arguments)
        if given.penalty is not None:
            w = Z.ravel()
            values["penalty"] = given.penalty.value(w), given.penalty.prox(w, jnp.ones_like(w)), given.penalty.kinks
        dynamic, static = eqx.partition(values, lambda a: eqx.is_array_like(a))
        statics.append((model.shape, model.nonsmooth, jax.tree.structure(values), jax.tree.leaves(static)))
        return dynamic

    fields = [jax.ShapeDtypeStruct((model.shape[0], k), model.lam.dtype) for k in model.columns]
    lowered = jax.jit(computed).trace(arrays, *fields).lower(lowering_platforms=("cpu",))
    return f"{type(model).__qualname__} {without_addresses(statics[0])} {lowered.as_text()}"


_DERIVATIVES = (lambda fn, argnums: fn, jax.grad, jax.hessian)  # custom derivatives are in the text of these only
