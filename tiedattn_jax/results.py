"""What every solve shares: how it ended, its settings, whether there is a state, and its error bar."""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from .errors import InputError, require
from .printing import Description, Printed, entries, rows_of


class Status(enum.IntEnum):
    """How a solve ended. `converged` and `stalled` are usable; the number is what a jitted result carries."""

    converged = 0
    stalled = 1  # at the accuracy of the averages: the residual is one that independent nodes would scatter by
    max_steps = 2
    left_domain = 3
    nonfinite = 4
    singular = 5  # I - DF is singular: a fold or another bifurcation
    absent = 6  # the branch asked for does not exist here: its order parameter vanished, or the whole student
    imprecise = 7  # a fixed point, but the largest averages tried leave error bars above the rtol asked for
    unresolved = 8  # the averages miss too much of what the proximal operator does to tell a state from its absence

    @classmethod
    def name_of(cls, value: Any) -> str:
        """Readable name of a (concrete) status."""
        return {1: "stalled at the accuracy of the averages"}.get(int(value), cls(int(value)).name.replace("_", " "))


class Result(Printed):
    """What a computation that can fail hands back, with its `status`: a `Status` as an integer, or an array of them."""

    @property
    def status_name(self: Any) -> Any:
        """The status in words; a list of them where there are several."""
        return np.vectorize(Status.name_of, otypes=[object])(self.status).tolist()

    @property
    def ok(self: Any) -> Any:
        """Whether it can be used: converged, or stalled at the accuracy of the averages, in all of its parts."""
        return self.status <= Status.stalled


Value = TypeVar("Value")


class OfMean(Generic[Value]):
    """A field of the `mean` of a result, as one of the result itself: ``s = OfMean[jax.Array]()``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: Any, owner: type) -> Value:
        return getattr(result.mean, self.name)


class Settings(Printed):
    """Tolerances of a solve: numbers, of which none asks for a new compilation.

    Attributes:
        tol: undamped residual, relative, below which a fixed point has converged.
        max_steps: Newton steps.
        warm_steps: damped steps that may bring a rough start near the branch.
        damping: share of the new state in a damped step, which is implicit: less of it along fast directions.

    Raises:
        InputError: one of them is no number or out of range.
    """

    tol: Any = eqx.field(converter=np.asarray, default=1e-5)
    max_steps: Any = eqx.field(converter=np.asarray, default=30)
    warm_steps: Any = eqx.field(converter=np.asarray, default=300)
    damping: Any = eqx.field(converter=np.asarray, default=0.2)

    def __check_init__(self) -> None:
        for name, least, want in (
            ("tol", 1e-300, "positive"),
            ("max_steps", 0, "at least 0"),
            ("warm_steps", 0, "at least 0"),
            ("damping", 1e-300, "in (0, 1]"),
        ):
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iuf" or value.ndim:
                raise InputError(name, f"must be a real number, got {name}={value.tolist()!r}")
            require((value >= least) & (value <= (1 if name == "damping" else np.inf)), name, value, want)

    def describe(self) -> Description:
        return Description("", numbers=rows_of(vars(self)))


# A residual below which the nodes fail to resolve a state that is there: its losses, being stationary, are then still
# good to the square of this.
UNRESOLVED = 0.1


@jax.jit
def has_state(status: Any, residual: Any) -> Any:
    """Whether there is a state in a replicate: a usable one, or one that its nodes do not resolve."""
    return (status <= Status.stalled) | (status == Status.max_steps) & (residual < UNRESOLVED)


_MISSED = 0.05  # share of the nodes that are not resolved from which on they settle nothing


def settled(status: Any, missed: Any) -> Any:
    """A status of a replicate in which a share `missed` of the nodes is not resolved: too many settle nothing."""
    return jnp.where(missed > _MISSED, Status.unresolved, status)


def quorum(found: Any) -> Any:
    """Whether half of the replicates or more, along the last axis, agree: then there is a state, or there is none."""
    return found.mean(-1) >= 0.5


def mean_of_found(values: jax.Array, found: jax.Array) -> jax.Array:
    """Mean over the leading replicate axis, of the replicates that have a state, (R,); of all where none has one."""
    weight = jnp.where(jnp.any(found), found, True)
    weight = weight.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.sum(jnp.where(weight, values, 0.0), 0) / jnp.sum(weight)


@jax.jit
def error_bar(values: Any) -> jax.Array:
    """Half of the 95.4 % confidence interval of the mean over the leading replicate axis, of what is not NaN.

    With many replicates this is the standard error of the mean; with a few, Student's law makes it larger, so that
    the truth lies within two error bars 95 % of the time whatever their number. Infinite for a single replicate, NaN
    for none. This is the meaning of every `stderr` of the library.
    """
    values = jnp.asarray(values)
    known = ~jnp.isnan(values)
    count = jnp.sum(known, 0)
    some = jnp.maximum(count, 2)
    mean = jnp.sum(jnp.where(known, values, 0.0), 0) / jnp.maximum(count, 1)
    square = jnp.sum(jnp.where(known, values - mean, 0.0) ** 2, 0)
    # Of one, two, ... degrees of freedom; the first entries are never used.
    student = np.concatenate([[np.inf, np.inf], special.stdtrit(np.arange(1, max(values.shape[0], 2)), 0.97725) / 2])
    bar = jnp.sqrt(square / (some - 1) / some) * jnp.asarray(student, mean.dtype)[some]
    return jnp.where(count > 1, bar, jnp.where(count == 1, jnp.inf, jnp.nan))


class Average(Printed):
    """A mean over independent draws.

    Attributes:
        value: the mean.
        stderr: its error bar, see `error_bar`.
    """

    value: jax.Array
    stderr: jax.Array

    def describe(self) -> Description:
        return Description(entries(self.value, self.stderr))

    def __format__(self, spec: str) -> str:
        return format(float(self.value), spec) if spec else str(self)
