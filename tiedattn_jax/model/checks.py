"""Checks of a model: the usual mistakes in a new layer (`check`), and the kind that a computation takes (`needs`).

The loss is probed along random lines through the fields. The Moreau envelope of a loss has no minimum if the loss falls
faster than a square rises. At a kink that opens upwards, as that of ``|z|``, minima sit in the kink, where Newton's
method does not end. At a kink that opens downwards, as that of ``-|z|``, there is no minimum; but minima on both sides
have to be looked for, see `Model.nonsmooth`.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.arrays import precise
from ..base.errors import (
    InputError,
    are_real,
    as_flag,
    is_concrete,
    require,
    require_count,
    require_kind,
    require_precision,
    require_promotion,
    require_takes,
    with_values,
)
from .law import SpectralLaw, TokenClassMixture
from .model import Model
from .penalties import check_penalty

_SAME = 1e-6  # relative difference below which atoms agree
_OVERLAP = 1e-6  # overlap of the teacher with an encoding below which they count as orthogonal
_CHANCE = 0.2  # largest cosine of a drawn class mean with an encoding: three standard deviations at d = 225


def check_numbers(model: eqx.Module) -> None:
    """Check the numbers of a model and of its parts by `__check_init__` of their classes and of all base classes."""
    for base in type(model).__mro__:
        base.__dict__.get("__check_init__", lambda model: None)(model)
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
    provides: Mapping[str, str] | None = None,
    float64: bool = False,
    smooth: bool = False,
    ridge_only: bool = False,
    independent: bool = False,
    orthogonal: bool = False,
    same: tuple[str, ...] = (),
) -> None:
    """Check a model, and that it is of the kind that a computation takes.

    Args:
        model: a layer and its data.
        purpose: name of the computation, which messages say.
        even: as in `check`.
        provides: optional methods that the model must have written, each with what it is for.
        float64: whether numbers must be in double precision.
        smooth: whether the loss must have no kinks.
        ridge_only: whether there must be no penalty besides the ridge.
        independent: whether tokens must have no classes.
        orthogonal: whether the teacher must be orthogonal to the encodings.
        same: names of arrays of the law that must be the same at all atoms of positive weight: "gamma", so that every
            token's covariance is a multiple of the identity, or "pi".

    Raises:
        InputError: as `check`; or the model is of another kind. The message says what it must be, and `purpose`.
    """
    check(model, even=even)
    for method, reason in (provides or {}).items():
        check_provides(model, method, reason)
    if float64 and model.lam.dtype != jnp.float64:
        text = f"must be in float64 for {purpose}: use jax.config.update('jax_enable_x64', True)"
        raise InputError("model", f"{text}, got {model.lam.dtype}")
    if smooth and model.nonsmooth:
        raise InputError("model", f"must have a loss without kinks for {purpose}, got {type(model).__name__}")
    if ridge_only and model.penalty is not None:
        raise InputError("model", f"must have no penalty besides the ridge for {purpose}, got {model.penalty!r}")
    if not (independent or orthogonal or same):
        return
    law = model.law()
    if independent and law.sentences is not None:
        raise InputError("model", f"must have tokens without classes for {purpose}, got a law with sentences")
    if same and len(law.weights) > 1:
        requirement = f"a model whose covariances have one eigenvalue each for {purpose}"
        require(is_concrete(law), "model", f"{len(law.weights)} atoms", requirement)
        with with_values():
            for name in same:
                values = np.asarray(getattr(law, name))[np.asarray(law.weights) > 0]
                requirement = f"the same at all atoms of positive weight, with one eigenvalue each for {purpose}"
                require(np.ptp(values, 0) <= _SAME * np.abs(values[0]), f"law.{name}", values, requirement)
    if orthogonal and is_concrete(model):
        with with_values():
            cross = np.asarray(model.law().cross)
        require(
            np.abs(cross) < _OVERLAP, "law.cross", cross, f"zero, a teacher orthogonal to the encodings, for {purpose}"
        )


def check(model: Model, *, even: bool = True) -> None:
    """Check a model for the usual mistakes in a new layer, as every solve does, unless jax traces its numbers.

    Args:
        model: a layer and its data.
        even: whether the loss must be even in Z and in Y, as it must for the branches that a symmetry defines.

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
    if not isinstance(model, Model):
        raise InputError("model", f"must be a tiedattn_jax.Model, such as DotProduct(), got {model!r}")
    even = as_flag(even, "even")
    require_promotion()
    if isinstance(getattr(model, "lam", None), (np.ndarray, jax.Array)):
        require_precision(model.lam.dtype, "lam")
    if not is_concrete(model):
        return
    # The check also works inside a jitted function if the model is concrete. It runs on the host, whatever the device.
    with with_values(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        _check_fields(model, even)
        model = jax.tree.map(jnp.asarray, jax.device_get(model))
        for test in _CHECKS:
            test(model, even)


def _check_fields(model: Model, even: bool) -> None:
    names = [f.name for f in dataclasses.fields(model) if not f.metadata.get("static", False)]
    leaves = [(name, leaf) for name in names for leaf in jax.tree.leaves(getattr(model, name))]
    for name, leaf in leaves:
        if not hasattr(leaf, "dtype"):
            raise InputError(name, f"must hold jax arrays, got {leaf!r}: write jnp.asarray({leaf!r}, float)")
    dtype = model.lam.dtype
    if dtype not in (jnp.float32, jnp.float64):
        raise InputError("lam", f"must be float32 or float64, got {dtype}: write jnp.asarray(lam, float)")
    for name, leaf in leaves:
        if leaf.dtype != dtype:
            text = f"must be {dtype} like lam, got {leaf.dtype}: what is no number is eqx.field(static=True)"
            raise InputError(name, text)


def _check_sizes(model: Model, even: bool) -> None:
    lam = np.asarray(model.lam)
    in_range = np.all(lam >= 0 if model.penalty is not None else lam > 0)
    require(lam.shape == () and in_range and lam < np.inf, "lam", lam, "one positive number")
    if not isinstance(model.shape, tuple) or len(model.shape) != 3:
        raise InputError("shape", f"must be a tuple (L, r, t), got shape={model.shape!r}")
    for count in model.shape:
        require_count(count, "shape")
    require_count(model.noise, "noise", 0)
    scale = np.asarray(model.field_scale)
    require(scale.shape == () and 0 < scale < np.inf, "field_scale", scale, "one positive number")


def _check_arguments(model: Model, even: bool) -> None:
    noise = ("noise",) if model.noise else ()
    suffix = f" of a model with noise = {model.noise}"
    require_takes(model.law, "law", ())
    require_takes(model.loss, "loss", ("Z", "Y", *noise), suffix)
    for name, parameters in {"target": ("Y", *noise), "student": ("Z",), "with_teacher": ("gram",)}.items():
        if model.provides(name):
            require_takes(getattr(model, name), name, parameters, suffix if name == "target" else "")


def _check_names(model: Model, even: bool) -> None:
    for kind in (kind for kind in type(model).__mro__ if kind not in Model.__mro__):
        attributes = [name for name in vars(kind) if not name.startswith("_")]
        for name in ("target", "student", "preimages", "with_teacher", "rotation_invariant", "start_columns"):
            matches = difflib.get_close_matches(name, attributes, 1, cutoff=0.8)
            if matches and name not in attributes:
                raise InputError(matches[0], f"must be called {name} if it is what a Model calls so, else another name")


def _check_law(model: Model, even: bool) -> None:
    (L, _, t), law = model.shape, _computed("law", model.law)
    require_kind(law, "law", SpectralLaw, "a method that returns a SpectralLaw")
    K = np.shape(law.weights)[:1] or (1,)
    S, J = (L, L) if law.sentences is None else _check_sentences(law.sentences, L)
    shapes = {"weights": K, "gamma": (*K, S), "tau": (*K, J, J), "pi": (*K, t, t), "cross": (*K, J, t)}
    needs_means = model.penalty is not None or law.tau_mean is not None or law.pi_mean is not None
    means = law.means if needs_means else ()
    mean_shapes = {"tau_mean": (*K, J), "pi_mean": (*K, t)} if needs_means else {}
    for name, shape in (shapes | mean_shapes).items():
        value = getattr(law, name)
        if not isinstance(value, (np.ndarray, jax.Array)):
            text = f"must be an array, got one of {type(value)}: write jnp.asarray({name}, float)"
            raise InputError(f"law().{name}", text)
        value = np.asarray(value)
        if value.shape != shape:
            raise InputError(f"law().{name}", f"must be of shape {shape}, got shape {value.shape}")
        if not are_real(value):
            raise InputError(f"law().{name}", f"must be an array of real numbers, got {value.dtype}")
        require(np.isfinite(value), f"law().{name}", value, "finite")
        if value.dtype.kind == "f" and value.dtype.itemsize > model.lam.dtype.itemsize:
            raise InputError(f"law().{name}", f"must be {model.lam.dtype} like lam, got {value.dtype}")
    weights, gamma, tau, pi, cross = (np.asarray(getattr(law, name), float) for name in shapes)
    rounding = 100 * float(jnp.finfo(model.lam.dtype).eps)
    is_distribution = abs(weights.sum() - 1) < rounding and np.all(weights >= 0)
    require(is_distribution, "law().weights", weights, "shares >= 0 that sum to one")
    require((gamma >= 0) & (weights @ gamma > 0), "law().gamma", gamma, "eigenvalues >= 0, not all zero")
    moments = np.block([[tau, cross], [cross.swapaxes(1, 2), pi]])
    smallest, size = np.linalg.eigvalsh(moments)[:, 0], np.abs(moments).max()
    is_symmetric = np.allclose(moments, moments.swapaxes(1, 2), rtol=rounding, atol=rounding * size)
    if not is_symmetric or np.any(smallest < -rounding * size):
        raise InputError("law()", "must have [[tau, cross], [cross^T, pi]] symmetric and positive semidefinite")
    if means:
        mean = np.concatenate([np.asarray(a, float) for a in means], 1)
        if np.any(np.linalg.eigvalsh(moments - mean[:, :, None] * mean[:, None])[:, 0] < -rounding * size):
            raise InputError("law()", "must have second moments that are no smaller than those of its means alone")
    rho = np.asarray(model.rho, float)
    require(np.linalg.eigvalsh(rho)[:, 0] > 0, "rho", rho, "positive definite for every token: see law().pi and gamma")


def _check_sentences(sentences: Any, L: int) -> tuple[int, int]:
    """Check the kinds of sentences; return the number of classes S, and that of vectors in the law, L + S."""
    require_kind(
        sentences, "law().sentences", TokenClassMixture, "TokenClassMixture.of({(0, 0): 0.5, (1, 1): 0.5}), or None"
    )
    classes, weights = np.asarray(sentences.classes), np.asarray(sentences.weights)
    S = int(classes.max()) + 1
    requirement = f"the classes of {L} tokens for every kind of sentence, each of 0 to {S - 1} somewhere"
    valid = classes.ndim == 2 and classes.shape[1] == L and np.array_equal(np.unique(classes), np.arange(S))
    require(valid, "law().sentences.classes", sentences.classes, requirement)
    valid = weights.shape == classes.shape[:1] and np.all(weights > 0) and abs(weights.sum() - 1) < 1e-5
    require(valid, "law().sentences.weights", weights, "shares > 0 of the kinds that sum to one")
    return S, L + S


def _check_exchange(model: Model, Z: Float[Array, "L r"], *labels: Float[Array, "L _"]) -> None:
    """Check that named branches have their symmetry: an exchange of tokens that changes the sign of the encodings.

    The check concerns classes with means. These must then be orthogonal to the encodings, up to the overlaps that drawn
    matrices have by chance.
    """
    L, law = model.shape[0], model.law()
    tau = np.asarray(law.tau, float)
    if law.sentences is None or not np.any(tau[:, L:, L:]):
        return
    gram = np.tensordot(np.asarray(law.weights), tau, 1)
    cosines = np.abs(gram[:L, L:]) / np.sqrt(np.outer(np.diag(gram)[:L], np.diag(gram)[L:]) + np.finfo(float).tiny)
    requirement = "means of classes orthogonal to the encodings for a branch by name: or branch=None with a start"
    require(cosines < _CHANCE, "law().tau", cosines, requirement)
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


def _computed(name: str, function: Callable[..., Any], *fields: Float[Array, "L _"]) -> Any:
    """Return what a method computes from fields; if it fails, raise an `InputError` with the reason."""
    try:
        return function(*fields)
    except InputError:
        raise
    except Exception as problem:
        shapes = f", for fields of shapes {', '.join(str(a.shape) for a in fields)}" if fields else ""
        requirement = f"must be written in jax.numpy, with derivatives{shapes}"
        first_line = str(problem).partition("\n")[0]
        raise InputError(name, f"{requirement}, got {type(problem).__name__}: {first_line}") from problem


@eqx.filter_jit
@precise
def _losses(
    model: Model,
    rotation: Float[Array, "r r"] | None,
    Z: Float[Array, "L r"],
    Y: Float[Array, "L t"],
    *noise: Float[Array, "L noise"],
) -> tuple[Any, ...]:
    """Return the loss, and its values for Z rotated, Z mirrored, Y mirrored, and Y and the noise mirrored.

    Without a `rotation` the second value is the loss itself.
    """
    fields = [(Z, Y, *noise), (-Z, Y, *noise), (Z, -Y, *noise)]
    if noise:
        fields.append((Z, -Y, *(-a for a in noise)))
    values = tuple(model.loss(*arguments) for arguments in fields)
    rotated = values[0] if rotation is None else model.loss(Z @ rotation, Y, *noise)
    if isinstance(values[0], jax.Array) and values[0].shape == () and jnp.issubdtype(values[0].dtype, jnp.floating):
        jax.eval_shape(jax.hessian(lambda Z: model.loss(Z, Y, *noise)), Z)  # raises if there is no Hessian
    return values[0], rotated, *values[1:]


def _check_functions(model: Model, even: bool) -> None:
    L, r, t = model.shape
    rng = np.random.default_rng(0)
    widths = (r, t, model.noise) if model.noise else (r, t)
    Z, *labels = (jnp.asarray(rng.standard_normal((L, k)), model.lam.dtype) for k in widths)
    if even:
        _check_exchange(model, Z, *labels)
    sentences = model.law().sentences
    model = model if sentences is None else model.condition_on(sentences.kinds[0])
    rotation = None
    if len(model.generators):
        tangent = np.tensordot(rng.standard_normal(len(model.generators)), model.generators, 1)
        rotation = jnp.asarray(np.linalg.solve(np.eye(r) - tangent, np.eye(r) + tangent), Z.dtype)
    value, rotated, *mirrored = _computed("loss", partial(_losses, model, rotation), Z, *labels)
    is_real = np.asarray(value).dtype.kind in "iuf" and np.shape(value) == ()
    if not is_real or not np.isfinite(value):
        raise InputError("loss", f"must return a finite real scalar, got {value!r}: see Model.loss")
    unchanged = [np.allclose(a, value, rtol=1e-3) for a in mirrored]
    if even and not (unchanged[0] and any(unchanged[1:])):
        raise InputError("loss", "must be even in Z and in Y for a branch by name: use branch=None with a start")
    if not np.allclose(rotated, value, rtol=1e-3):
        argument = "rotation_invariant" if model.rotation_invariant else "generators"
        raise InputError(argument, "must be left out for a loss that changes when the columns of Z are rotated")
    check_shape(model, Z, labels)
    for name, fields in {"student": [Z], "target": labels}.items():
        if not model.provides(name):
            continue
        matrix = _computed(name, eqx.filter_jit(getattr(model, name)), *fields)
        if np.shape(matrix) != (L, L):
            raise InputError(name, f"must return an ({L}, {L}) matrix, got shape {np.shape(matrix)}")
        is_real = isinstance(matrix, (np.ndarray, jax.Array)) and matrix.dtype.kind in "iuf"
        if not is_real or not np.all(np.isfinite(matrix)):
            raise InputError(name, f"must return an array of finite real numbers, got {' '.join(repr(matrix).split())}")


# The checks of a model whose fields are arrays on the host, in their order; each may rely on those before it.
_CHECKS: tuple[Callable[[Model, bool], None], ...] = (
    _check_sizes,
    _check_names,
    _check_arguments,
    lambda model, even: check_numbers(model),
    lambda model, even: None if model.penalty is None else check_penalty(model.penalty, model.lam, even),
    _check_law,
    _check_functions,
)


_LINES = 4
_POINTS = 257  # places on a line; each zoom divides an interval into one less
_LENGTH = 4.0  # a line goes so far to both sides, in units of the fields at which the loss bends
_SIZES = 1e2, 1e3  # factors of the fields between which a loss may fall like a square, but not faster
_FASTER = 5.0  # ratio of loss / |Z|^2 at these sizes that counts as faster; that of a cubic loss is 10


@eqx.filter_jit
@precise
def _slopes(
    model: Model,
    origin: Float[Array, "lines L r"],
    direction: Float[Array, "lines L r"],
    s: Float[Array, "lines points"],
    *labels: Float[Array, "L _"],
) -> tuple[Float[Array, "lines points"], Float[Array, "lines points"]]:
    """Return the first and the second derivative of the loss along lines, at places s."""

    def at(origin: Float[Array, "L r"], direction: Float[Array, "L r"], s: Float[Array, ""]) -> tuple[Array, Array]:
        slope = jax.grad(lambda s: model.loss(origin + s * direction, *labels))
        return slope(s), jax.jvp(slope, (s,), (jnp.ones_like(s),))[1]

    return jax.vmap(jax.vmap(at, (None, None, 0)))(origin, direction, s)


def kink(model: Model, labels: list[Float[Array, "L _"]], sign: int) -> tuple[float, Float[np.ndarray, "L r"]]:
    """Return the largest jump of the slope of the loss along random lines, and its place.

    Args:
        model: gives `loss`.
        labels: fields of the teacher, and of the noise if there is any.
        sign: 1 for jumps upwards, -1 for jumps downwards.

    Returns:
        The jump relative to the largest slope on its line, never negative; it is zero, to rounding, without such a
        kink. The second value is the fields of the student at its place.
    """
    (L, r, _), dtype = model.shape, model.lam.dtype
    lines = np.random.default_rng(1).standard_normal((2, _LINES, L, r)) * float(model.field_scale)
    low, width, scale = np.full(_LINES, -_LENGTH), 2 * _LENGTH, np.zeros(_LINES)
    resolution = 1e3 * float(jnp.finfo(dtype).eps)
    while width >= resolution:  # each pass zooms into the interval with the largest jump on every line
        s = low[:, None] + width * np.linspace(0, 1, _POINTS)
        arrays = (jnp.asarray(a, dtype) for a in (*lines, s))
        slope, bend = (np.nan_to_num(np.asarray(a, float)) for a in _slopes(model, *arrays, *labels))
        scale, width = np.maximum(scale, np.max(np.abs(slope), 1)), width / (_POINTS - 1)
        # The change of the slope from one place to the next, less what its derivatives there explain.
        excess = sign * (np.diff(slope) - 0.5 * width * (bend[:, 1:] + bend[:, :-1]))
        low = s[np.arange(_LINES), np.argmax(excess, 1)]
    jump = np.maximum(np.max(excess, 1), 0.0) / np.where(scale > 0, scale, 1.0)
    k = np.argmax(jump)
    return float(jump[k]), lines[0, k] + low[k] * lines[1, k]


@eqx.filter_jit
@precise
def _at_sizes(model: Model, Z: Float[Array, "L r"], *labels: Float[Array, "L _"]) -> Float[Array, " sizes"]:
    """Return loss / size^2 for fields that are multiples of Z."""
    return jnp.stack([model.loss(size * Z, *labels) / size**2 for size in _SIZES])


def check_shape(model: Model, Z: Float[Array, "L r"], labels: list[Float[Array, "L _"]]) -> None:
    """Check that the loss has a proximal operator that Newton's method finds.

    Raises:
        InputError: the loss falls faster than a square; it has a kink that opens upwards; or it has one that opens
            downwards and `nonsmooth` does not say so.
    """
    small, large = np.asarray(_at_sizes(model, Z, *labels), float)
    if small < 0 and large < _FASTER * small:
        values = ", ".join(f"{v * size**2:.3g}" for v, size in zip((small, large), _SIZES, strict=True))
        text = f"must not fall faster than -|Z|^2, or it has no proximal operator, got {values} for fields of size"
        raise InputError("loss", f"{text} {_SIZES[0]:g}, {_SIZES[1]:g}")
    tolerance = float(jnp.finfo(model.lam.dtype).eps) ** 0.5
    for sign in (1, -1):
        jump, place = kink(model, labels, sign)
        where = f"as it does at Z = {np.array2string(place.ravel(), precision=2)}"
        if jump > tolerance and sign > 0:
            text = f"must not have a slope that jumps upwards, {where}: minima would sit in the kink"
            raise InputError("loss", f"{text}; smooth it, as softplus(8 * x) / 8 does relu(x)")
        if jump > tolerance and not model.nonsmooth:
            raise InputError("nonsmooth", f"must be True for a loss whose slope jumps, {where}")
