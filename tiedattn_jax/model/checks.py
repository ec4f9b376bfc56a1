"""Checks of a model: the usual mistakes in a new layer (`check`), and the kind that a computation takes (`needs`)."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..base.arrays import Number, eigenvalues_exceed, precise
from ..base.errors import (
    Condition,
    InputError,
    are_real,
    as_flag,
    conditions_of,
    is_concrete,
    on_host,
    require,
    require_count,
    require_kind,
    require_positive,
    require_precision,
    require_promotion,
    require_takes,
    settle,
    with_values,
    within,
)
from .kinks import SIZES, bounded, check_kinks
from .law import SpectralLaw, TokenClassMixture
from .model import Model, one_kind, require_fields, require_model, require_no_closures
from .penalties import penalty_conditions

_SAME = 1e-6  # relative difference below which atoms agree
_OVERLAP = 1e-6  # overlap of the teacher with an encoding below which they count as orthogonal
CHANCE = 0.2  # largest cosine of a drawn class mean or teacher with an encoding: three standard deviations at d = 225


def check_numbers(model: eqx.Module) -> None:
    """Check the numbers of a model and of its parts by `__check_init__` of their classes and of all base classes."""
    for base in type(model).__mro__:
        if check_init := vars(base).get("__check_init__"):
            check_init(model)
    for part in vars(model).values():
        if isinstance(part, eqx.Module):
            check_numbers(part)


def check_provides(model: Model, method: str, reason: str) -> None:
    """Raise an `InputError` unless the model has written an optional method; the message says `reason` it is needed."""
    if not model.provides(method):
        name = type(model).__name__
        raise InputError(
            "model", f"must have a method `{method}` {reason}, got {name} without it: see tiedattn_jax.Model"
        )


def needs(
    model: Model,
    purpose: str,
    *,
    even: bool = True,
    float64: bool = False,
    smooth: bool = False,
    independent: bool = False,
    orthogonal: bool = False,
    same: tuple[str, ...] = (),
) -> Model:
    """Check a model without a penalty, and that it is of the kind that a computation takes; return it as `check` does.

    Args:
        model: a layer and its data.
        purpose: name of the computation, which messages say.
        even: as in `check`.
        float64: whether numbers must be in double precision.
        smooth: whether the loss must have no kinks.
        independent: whether tokens must have no classes.
        orthogonal: whether the teacher must be orthogonal to the encodings.
        same: names of arrays of the law that must be the same at all atoms of positive weight: "gamma", so that every
            token's covariance is a multiple of the identity, or "pi".

    Raises:
        InputError: as `check`; or the model is of another kind. The message says what it must be, and `purpose`.
    """
    model = check(model, even=even)
    with with_values() if is_concrete(model) else nullcontext():
        law = model.law()
    dtype, penalty = model.lam.dtype, model.penalty
    to_double = ": use jax.config.update('jax_enable_x64', True)"
    for is_other, requirement, advice, actual in (
        (float64 and dtype != jnp.float64, "be in float64", to_double, dtype),
        (smooth and model.nonsmooth, "have a loss without kinks", "", type(model).__name__),
        (penalty is not None, "have no penalty besides the ridge", "", repr(penalty)),
        (independent and law.sentences is not None, "have tokens without classes", "", "a law with sentences"),
    ):
        if is_other:
            raise InputError("model", f"must {requirement} for {purpose}{advice}, got {actual}")
    if same and len(law.weights) > 1:
        requirement = f"a model whose covariances have one eigenvalue each for {purpose}"
        require(is_concrete(law), "model", f"{len(law.weights)} atoms", requirement)
        with with_values():
            for name in same:
                values = np.asarray(getattr(law, name))[np.asarray(law.weights) > 0]
                requirement = f"the same at all atoms of positive weight, with one eigenvalue each for {purpose}"
                require(np.ptp(values, 0) <= _SAME * np.abs(values[0]), f"law.{name}", values, requirement)
    if not orthogonal:
        return model
    cross = on_host(law.cross)
    requirement = f"zero, a teacher orthogonal to the encodings, for {purpose}"
    return within(model, settle([Condition(abs(cross) < _OVERLAP, "law.cross", cross, requirement)]))


# Models that passed their whole check, by identity and `even`; a model does not change, and a check takes 31 ms.
_passed: weakref.WeakValueDictionary[tuple[int, bool], Model] = weakref.WeakValueDictionary()
# Structures of models whose losses have no wrong kinks: looking for these takes half of this time. A model is new in
# every step of a fit, where only the first one is looked at.
_known_kinks: set[Any] = set()


def check(model: Model, *, even: bool = True) -> Model:
    """Check a model for the usual mistakes in a new layer, as every solve does.

    Args:
        model: a layer and its data.
        even: whether the loss must be even in Z and in Y, as it must for the branches that a symmetry defines.

    Returns:
        The model. If jax traces its numbers and they are out of range, they are NaN, see `Model.in_range`. The types of
        fields and the kinks of the loss are not checked then. Under `jax.grad` kinks are looked for once per class.

    Raises:
        InputError: one of these is wrong.
            Fields: one is no array of the dtype of `lam`, or the model itself refuses its value.
            `shape`: it is not three counts.
            Methods: one takes other arguments than it is given (for instance `loss` does not take the declared
            `noise`), or has almost the name of a method of `Model`.
            `law`: it has other shapes, its weights do not sum to one, or no matrices have such a law.
            `loss`: it is not a finite real number, is not even, has no second derivative, or changes under rotations
            that are declared to leave it unchanged; it falls faster than a square; its slope jumps upwards, or jumps
            without `nonsmooth`.
            `target`, `student`: it is not a finite (L, L) matrix.
            `penalty`: it is not convex, lacks its proximal operator, or the law lacks the means.
    """
    require_model(model)
    even = as_flag(even, "even")
    require_promotion()
    if isinstance(getattr(model, "lam", None), (np.ndarray, jax.Array)):
        require_precision(model.lam.dtype, "lam")
    values = model if is_concrete(model) else lax.stop_gradient(model)  # known even while jax differentiates
    if _passed.get((id(model), even)) is model:
        return model
    if not is_concrete(values):
        traced = settle(_conditions(values, even, kinks=False))
        require_no_closures(values)
        return within(model, traced)
    # The check also works inside a jitted function if the model is concrete. It runs on the host, whatever the device.
    with with_values(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        _check_fields(values)
        structure = jax.tree.structure(values)
        kinks = model is values or structure not in _known_kinks
        settle(_conditions(jax.tree.map(jnp.asarray, jax.device_get(values)), even, kinks))
    _known_kinks.add(structure)
    _passed[id(model), even] = model
    return model


def check_alpha(model: Model, alpha: Number) -> Float[Array, ""]:
    """Return alpha in the model's dtype.

    Raises:
        InputError: if alpha is not one positive and finite number.
    """
    return require_positive(alpha, "alpha", model.lam.dtype)


def _conditions(model: Model, even: bool, kinks: bool) -> Iterator[Condition]:
    """Yield the conditions on the numbers of a model; raise an `InputError` for all else that is wrong.

    Args:
        kinks: whether to look for kinks of the loss.
    """
    yield from _sizes(model)
    _check_methods(model)
    check_numbers(model)
    yield from conditions_of(model)
    if model.penalty is not None:
        yield from penalty_conditions(model.penalty, model.lam, even)
    yield from _law_conditions(model)
    yield from _function_conditions(model, even, kinks)


def _check_fields(model: Model) -> None:
    names = [f.name for f in dataclasses.fields(model) if not f.metadata.get("static", False)]
    leaves = [(name, leaf) for name in names for leaf in jax.tree.leaves(getattr(model, name))]
    for name, leaf in leaves:
        if not hasattr(leaf, "dtype"):
            text = f"must hold jax arrays, got {leaf!r}: write jnp.asarray({leaf!r}, float)"
            raise InputError(name, f"{text}, as a default eqx.field(default={leaf!r}, converter=jnp.asarray)")
    dtype = model.lam.dtype
    if dtype not in (jnp.float32, jnp.float64):
        raise InputError("lam", f"must be float32 or float64, got {dtype}: write jnp.asarray(lam, float)")
    for name, leaf in leaves:
        if leaf.dtype != dtype:
            text = f"must be {dtype} like lam, got {leaf.dtype}: what is no number is eqx.field(static=True)"
            raise InputError(name, text)


def _sizes(model: Model) -> Iterator[Condition]:
    lam, scale = on_host(model.lam), on_host(model.field_scale)
    for name, number, exceeds in (
        ("lam", lam, lam >= 0 if model.penalty is not None else lam > 0),
        ("field_scale", scale, scale > 0),
    ):
        yield Condition((number.shape == ()) & exceeds & (number < np.inf), name, number, "one positive number")
    if not isinstance(model.shape, tuple) or len(model.shape) != 3:
        raise InputError("shape", f"must be a tuple (L, r, t), got shape={model.shape!r}")
    for count in model.shape:
        require_count(count, "shape")
    require_count(model.noise, "noise", 0)


def _check_methods(model: Model) -> None:
    for kind in (kind for kind in type(model).__mro__ if kind not in Model.__mro__):
        attributes = [name for name in vars(kind) if not name.startswith("_")]
        for name in ("target", "student", "preimages", "with_teacher", "rotation_invariant", "start_columns"):
            matches = difflib.get_close_matches(name, attributes, 1, cutoff=0.8)
            if matches and name not in attributes:
                raise InputError(matches[0], f"must be called {name} if it is what a Model calls so, else another name")
    label = ("Y", "noise") if model.noise else ("Y",)
    arguments = {"law": (), "loss": ("Z", *label), "target": label, "student": ("Z",), "with_teacher": ("gram",)}
    for name, parameters in arguments.items():
        if model.provides(name):
            suffix = f" of a model with noise = {model.noise}" if "Y" in parameters else ""
            require_takes(getattr(model, name), name, parameters, suffix)


def _law_conditions(model: Model) -> Iterator[Condition]:
    (L, _, t), law = model.shape, _computed(model, "law", model.law)
    require_kind(law, "law", SpectralLaw, "a method that returns a SpectralLaw")
    K = np.shape(law.weights)[:1] or (1,)
    S, J = L, L
    if law.sentences is not None:
        yield from _sentence_conditions(law.sentences, L)
        S = int(np.max(law.sentences.classes)) + 1
        J = L + S
    shapes = {"weights": K, "gamma": (*K, S), "tau": (*K, J, J), "pi": (*K, t, t), "cross": (*K, J, t)}
    if model.penalty is not None or law.tau_mean is not None or law.pi_mean is not None:
        assert law.means  # raises an error unless there are both
        shapes |= {"tau_mean": (*K, J), "pi_mean": (*K, t)}
    for name, shape in shapes.items():
        value = getattr(law, name)
        if not isinstance(value, (np.ndarray, jax.Array)):
            text = f"must be an array, got one of {type(value)}: write jnp.asarray({name}, float)"
            raise InputError(f"law().{name}", text)
        value = on_host(value)
        if value.shape != shape:
            raise InputError(f"law().{name}", f"must be of shape {shape}, got shape {value.shape}")
        if not are_real(value):
            raise InputError(f"law().{name}", f"must be an array of real numbers, got {value.dtype}")
        yield Condition(abs(value) < np.inf, f"law().{name}", value, "finite")
        if value.dtype.kind == "f" and value.dtype.itemsize > model.lam.dtype.itemsize:
            raise InputError(f"law().{name}", f"must be {model.lam.dtype} like lam, got {value.dtype}")
    xp: Any = np if is_concrete(law) else jnp
    weights, gamma, tau, pi, cross, *means = (xp.asarray(getattr(law, name), float) for name in shapes)
    rounding = 100 * float(jnp.finfo(model.lam.dtype).eps)
    is_distribution = (abs(weights.sum() - 1) < rounding) & (weights >= 0)
    yield Condition(is_distribution, "law().weights", weights, "shares >= 0 that sum to one")
    yield Condition((gamma >= 0) & (weights @ gamma > 0), "law().gamma", gamma, "eigenvalues >= 0, not all zero")
    moments = xp.block([[tau, cross], [cross.swapaxes(1, 2), pi]])
    size, other = abs(moments).max(), moments.swapaxes(1, 2)
    is_symmetric = xp.all(abs(moments - other) <= rounding * (size + abs(other)))
    problem = "must have [[tau, cross], [cross^T, pi]] symmetric and positive semidefinite"
    yield Condition(is_symmetric & eigenvalues_exceed(moments, -rounding * size), "law()", problem=problem)
    if means:
        mean = xp.concatenate(means, 1)
        rest = moments - mean[:, :, None] * mean[:, None]
        problem = "must have second moments that are no smaller than those of its means alone"
        yield Condition(eigenvalues_exceed(rest, -rounding * size), "law()", problem=problem)
    rho = on_host(model.rho)
    requirement = "positive definite for every token: see law().pi and gamma"
    yield Condition(eigenvalues_exceed(rho, 0.0), "rho", rho, requirement)


def _sentence_conditions(sentences: Any, L: int) -> Iterator[Condition]:
    """Yield the conditions on the kinds of sentences of L tokens."""
    example = "TokenClassMixture.of({(0, 0): 0.5, (1, 1): 0.5}), or None"
    require_kind(sentences, "law().sentences", TokenClassMixture, example)
    classes, weights = np.asarray(sentences.classes), on_host(sentences.weights)
    last = int(classes.max())
    requirement = f"the classes of {L} tokens for every kind of sentence, each of 0 to {last} somewhere"
    valid = classes.ndim == 2 and classes.shape[1] == L and np.array_equal(np.unique(classes), np.arange(last + 1))
    require(valid, "law().sentences.classes", sentences.classes, requirement)
    valid = (weights.shape == (len(classes),)) & (weights > 0) & (abs(weights.sum() - 1) < 1e-5)
    yield Condition(valid, "law().sentences.weights", weights, "shares > 0 of the kinds that sum to one")


def _check_exchange(model: Model, Z: Float[Array, "L r"], *labels: Float[Array, "L _"]) -> None:
    """Check that named branches have their symmetry: an exchange of tokens that changes the sign of the encodings.

    Teacher and means of classes must be orthogonal to the encodings, up to the overlaps that drawn ones have by chance.
    Only classes with means need the exchange.
    """
    L, law = model.shape[0], model.law()
    shares, tau, pi, cross = (np.asarray(a, float) for a in (law.weights, law.tau, law.pi, law.cross))
    lengths = [np.sqrt(np.diagonal(np.tensordot(shares, a, 1))) for a in (tau, pi)]
    length, size = (np.maximum(a, 1e-8 * a.max() + 1e-150) for a in lengths)  # a zero vector has overlaps by rounding
    for name, what, products, sizes in (
        ("law().tau", "means of classes", tau[:, :L, L:], length[L:]),
        ("law().cross", "a teacher", cross[:, :L], size),
    ):
        cosines = np.abs(np.tensordot(shares, products, 1)) / np.outer(length[:L], sizes)
        requirement = f"{what} orthogonal to the encodings for a branch by name: or branch=None with a start"
        require(cosines < CHANCE, name, cosines, requirement)
    if law.sentences is None or not np.any(tau[:, L:, L:]):
        return
    classes, weights, kinds = law.sentences.classes, *map(np.asarray, (law.sentences.weights, law.sentences.kinds))
    for order in map(np.array, itertools.permutations(range(L))):
        exchanged = [tuple(np.array(k)[order].tolist()) for k in classes]
        sums = [tau[:, i, i] + 2 * tau[:, i, j] + tau[:, j, j] for i, j in enumerate(order)]  # |p_i + p_j|^2
        if set(exchanged) != set(classes) or not np.allclose(sums, 0.0, atol=1e-5):
            continue
        image = [classes.index(k) for k in exchanged]
        fields = [a[order] for a in (Z, *labels)]
        exchanged_losses = [model.condition_on(kind).loss(*fields) for kind in kinds[image]]
        losses = [model.condition_on(kind).loss(Z, *labels) for kind in kinds]
        if np.allclose(weights[image], weights, rtol=1e-3) and np.allclose(exchanged_losses, losses, rtol=1e-3):
            return
    requirement = "must have an exchange of tokens that turns the sign of the encodings and changes nothing else"
    raise InputError("law().sentences", f"{requirement}, for a branch by name: use branch=None with a start")


def _computed(model: Model, name: str, function: Callable[..., Any], *fields: Float[Array, "L _"]) -> Any:
    """Return what a method computes from fields; if it fails, raise an `InputError` with the reason."""
    try:
        values = function(*fields)
        return require_fields(name, values) if is_concrete(model) else values
    except InputError:
        raise
    except Exception as problem:
        shapes = f", for fields of shapes {', '.join(str(a.shape) for a in fields)}" if fields else ""
        requirement = f"must be written in jax.numpy, with derivatives{shapes}"
        first_line = str(problem).partition("\n")[0]
        raise InputError(name, f"{requirement}, got {type(problem).__name__}: {first_line}") from problem


@eqx.filter_jit
@precise
def _losses(model: Model, *fields: Float[Array, "probes L _"]) -> tuple[Any, Any]:
    """Return what `loss` returns for the first fields, and for all; it must have a second derivative."""
    values = jax.vmap(model.loss)(*fields)
    if isinstance(values, jax.Array) and values.ndim == 1 and jnp.issubdtype(values.dtype, jnp.floating):
        Z, *labels = (a[0] for a in fields)
        jax.eval_shape(jax.hessian(lambda Z: model.loss(Z, *labels)), Z)  # raises if there is no Hessian
    return jax.tree.map(lambda a: a[0], values), values


def _function_conditions(model: Model, even: bool, kinks: bool) -> Iterator[Condition]:
    (L, r, t), dtype = model.shape, model.lam.dtype
    rng, concrete = np.random.default_rng(0), is_concrete(model)
    draws = [rng.standard_normal((L, k)) for k in ((r, t, model.noise) if model.noise else (r, t))]
    Z, *labels = (jnp.asarray(a, dtype) for a in draws)
    if even and concrete:
        _check_exchange(model, Z, *labels)
    model, eye = one_kind(model), np.eye(r)
    tangent = np.tensordot(rng.standard_normal(len(model.generators)), model.generators, 1)
    rotation = np.linalg.solve(eye - tangent, eye + tangent)
    # Each probe multiplies Z by a matrix, and Y and the noise by a number.
    probes = [(eye, 1, 1), (rotation, 1, 1), (-eye, 1, 1), (eye, -1, 1), (eye, -1, -1)]
    turns, *signs = zip(*probes, *((size * eye, 1, 1) for size in SIZES), strict=True)
    fields = [jnp.asarray(a, dtype) for a in (draws[0] @ np.array(turns), *map(np.multiply.outer, signs, draws[1:]))]
    first, values = _computed(model, "loss", lambda *_: _losses(model, *fields), Z, *labels)
    is_real = isinstance(first, jax.Array) and first.shape == () and first.dtype.kind in "iuf"
    problem = f"must return a finite real scalar, got {first!r}: see Model.loss"
    yield Condition(abs(on_host(first)) < np.inf if is_real else False, "loss", problem=problem)
    value, *others = on_host(values)
    is_rotated, *is_mirrored = (abs(a - value) <= 1e-8 + 1e-3 * abs(value) for a in others[: -len(SIZES)])
    if even:
        problem = (
            "must be even in Z and in Y for a branch by name: for another loss there are check(model, even=False), "
            "find_states, solve(model, alpha, None, start=...) and find_event(model, 'crossing', start=...)"
        )
        yield Condition(is_mirrored[0] & (is_mirrored[1] | is_mirrored[2]), "loss", problem=problem)
    argument = "rotation_invariant" if model.rotation_invariant else "generators"
    problem = "must be left out for a loss that changes when the columns of Z are rotated"
    yield Condition(is_rotated, argument, problem=problem)
    yield bounded(others[-len(SIZES) :])
    if kinks:
        check_kinks(model, labels)
    for name, fields in {"student": [Z], "target": labels}.items():
        if not model.provides(name):
            continue
        matrix = _computed(model, name, eqx.filter_jit(getattr(model, name)), *fields)
        if np.shape(matrix) != (L, L):
            raise InputError(name, f"must return an ({L}, {L}) matrix, got shape {np.shape(matrix)}")
        is_real = isinstance(matrix, (np.ndarray, jax.Array)) and matrix.dtype.kind in "iuf"
        problem = f"must return an array of finite real numbers, got {' '.join(repr(matrix).split())}"
        yield Condition(abs(on_host(matrix)) < np.inf if is_real else False, name, problem=problem)
