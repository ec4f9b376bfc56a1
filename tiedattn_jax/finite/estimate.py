"""Estimates of the student on data: what message passing and training share, and whether data fit a model."""

from __future__ import annotations

import warnings
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from ..base.arrays import AnyArray, precise
from ..base.errors import (
    InputError,
    is_concrete,
    require,
    require_kind,
    require_precision,
    require_promotion,
    shaped_array,
    with_values,
)
from ..base.report import Description, Result, Status, by_token, rows_of
from ..model.model import Model
from ..model.overlaps import Overlaps
from .data import Sample

_WARN_RATIO = 1.5  # warn when the variance of the inputs and that of the model differ by more than this factor
_LARGE_SAMPLE = 1000  # with more numbers than this, chance does not change their variance noticeably


class Estimate(Result):
    """Weights at the end of a run on data, with the fields that message passing and training have in common."""

    batch_probe = "train_loss", 0
    Q: Float[Array, "d r"]
    overlaps: Overlaps
    train_loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    iterations: Int[Array, ""]
    status: Int[Array, ""]

    @property
    def ok(self) -> Bool[Any, "*batch"]:
        """Whether the run converged: to a fixed point of message passing, or a critical point of the risk."""
        return self.status == Status.converged

    def _numbers(self) -> dict[str, Float[AnyArray, "..."]]:
        """Return the known numbers by name. Weights of training have no V; without a teacher there is no theta."""
        numbers = {**vars(self.overlaps), "train_loss": self.train_loss, "gradient_norm": self.gradient_norm}
        return {name: a for name, a in numbers.items() if not np.all(np.isnan(a))}

    def to_dict(self) -> dict[str, Any]:
        """Return overlaps, loss, gradient, iterations and status, as JSON if all numbers are finite.

        Arrays are written as in `FixedPoint.to_dict`.
        """
        numbers = {name: (by_token(a)[0] if a.ndim else a).tolist() for name, a in self._numbers().items()}
        return {**numbers, "iterations": int(self.iterations), "status": self.status_name}

    def describe(self) -> Description:
        d, r = self.Q.shape
        title = f"Q of shape ({d}, {r}) after {self.iterations} iterations"
        unknown = bool(np.all(np.isnan(self.overlaps.theta))) and bool(np.all(np.isfinite(self.Q)))
        details = [("theta", "", "not known without the teacher")] if unknown else []
        return Description(title, self.status_name, rows_of(self._numbers()), details)


def check_estimate(name: str, model: Model, data: Sample, Q: Real[AnyArray, "d r"]) -> Float[Array, "d r"]:
    """Return an estimate as an array of the data's dtype.

    Args:
        name: name of the argument, for the error message.

    Raises:
        InputError: if the estimate does not have shape (d, r) or is not finite, or the data do not fit the model.
    """
    check_fit(model, data)
    return shaped_array(name, Q, "d r", {"d": data.shape[2], "r": model.shape[1]}, data.dtype)


def check_fit(model: Model, data: Sample) -> None:
    """Raise an `InputError` if the data differ from the model in tokens, fields, token classes, dtype or scale."""
    require_kind(model, "model", Model, "a tiedattn_jax.Model, such as dot_product()")
    require_kind(data, "data", Sample, "a tiedattn_jax.Data")
    require_promotion()
    require_precision(model.lam.dtype, "lam")
    (L, _, t), dims = model.shape, (data.shape[0], data.shape[3])
    if dims[0] != L or (data.y is not None and dims[1] != t):
        requirement = f"must have L = {L} tokens and t = {t} teacher fields as the model has"
        raise InputError(
            "data", f"{requirement}, got L = {dims[0]}, t = {dims[1]}: inputs of from_sentences are (n, L, d)"
        )
    noise = 0 if data.noise is None else data.noise.shape[2]
    if noise != model.noise and data.y is not None:
        raise InputError("data", f"must have {model.noise} fields of noise a token as the model has, got {noise}")
    _check_classes(model, data)
    dtype = jnp.result_type(model.lam)
    if data.dtype != dtype:
        requirement = f"must be {dtype} as the model is, or the model as the data are"
        raise InputError("data", f"{requirement}, got {data.dtype}: see dot_product(dtype=...)")
    if is_concrete(model, data):
        with with_values():
            _check_scale(model, data)


def _check_classes(model: Model, data: Sample) -> None:
    sentences = model.law().sentences
    if (sentences is None) != (data.classes is None):
        requirement = "must have classes of tokens where the model's law has kinds of sentences, and only there"
        raise InputError("data", f"{requirement}, got {'none' if data.classes is None else 'classes'}")
    if sentences is not None and data.classes is not None and is_concrete(data.classes):
        kinds, allowed = np.unique(np.asarray(data.classes), axis=0).tolist(), [list(k) for k in sentences.classes]
        unknown = [k for k in kinds if k not in allowed]
        require(not unknown, "data.classes", unknown[:3], f"among the kinds of sentences of the model's law, {allowed}")


def _check_scale(model: Model, data: Sample) -> None:
    """Raise an `InputError` if a factor sqrt(d) is missing or one too many, so that a variance is wrong by a factor d.

    A variance may differ from the model's by a factor of max(10, sqrt(d)), or more if it is estimated from few numbers.
    If the variance of many inputs differs by more than `_WARN_RATIO`, a warning says that theory and data have
    different settings.
    """
    L, n, d, t = data.shape
    factor = max(10, d**0.5)

    def deviates(ratio: float, count: int) -> bool:
        bound = factor ** (1 + 20 / count)
        return not 1 / bound < ratio < bound

    norm, law_norm, inputs, fields = map(float, _scales(model, data))
    if norm > factor * max(1.0, law_norm):
        requirement = f"must have encodings with |p_l|^2 of order one, as the model's law has them ({law_norm:.3g})"
        raise InputError("data", f"{requirement}, got {norm:.3g}: divide encodings of entries of order one by sqrt(d)")
    if deviates(inputs, L * n * d):
        requirement = "must have inputs of the model's variance / d, x / sqrt(d) for tokens x"
        hint = "Data.from_sentences divides tokens by sqrt(d), Data does not"
        raise InputError("data", f"{requirement}, got {inputs:.3g} times that variance: {hint}")
    if deviates(fields, min(L * n, d) * t):
        requirement = "must have fields y = Q*^T x / sqrt(d) of tokens x that are not divided yet"
        reference = "the model" if data.teacher is None else "those of its teacher"
        raise InputError("data", f"{requirement}, got {fields:.3g} times the variance of {reference}")
    if n * d > _LARGE_SAMPLE and not 1 / _WARN_RATIO < inputs < _WARN_RATIO:
        message = f"data have {inputs:.3g} times the model's variance of inputs: "
        message += "theory and simulation are then of two settings"
        warnings.warn(message, stacklevel=2)


@eqx.filter_jit
@precise
def _scales(model: Model, data: Sample) -> tuple[Float[Array, ""], ...]:
    """Return the largest ``|p_l|^2`` of the data and of the law, and the variances of x and y over the expected ones.

    The last ratio is one if the expected variance of y is zero.
    """
    (inputs, variance), law = data.mean_squares(), model.law()
    norm, law_norm = jnp.max(jnp.sum(data.encodings**2, 1)), jnp.max(jnp.einsum("k,kll->l", law.weights, law.tau))
    if variance is None:
        variance = jnp.mean(jnp.trace(model.rho, axis1=1, axis2=2)) / data.shape[3]
    fields = jnp.ones(()) if data.y is None else jnp.where(variance > 0, jnp.mean(data.y**2) / variance, 1.0)
    return norm, law_norm, inputs / jnp.mean(model.trace), fields
