"""The common parts of all results: status, settings, replicates, and the error bar.

A result that was averaged over replicates lists what it shows in class variables, see `Replicated`; its `to_dict`, its
line and its page follow from them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real, Shaped
from scipy import special

from .arrays import AnyArray, Number, spread_to
from .errors import InputError, require
from .report import Description, Printed, Row, entries, plain, rows_of


class Status(enum.IntEnum):
    """Outcome of a solve. Results that `converged` or `stalled` are usable. Jitted results carry the number."""

    converged = 0
    stalled = 1  # at the accuracy of the averages: independent nodes would change the residual by as much
    max_steps = 2
    left_domain = 3
    nonfinite = 4
    singular = 5  # I - DF is singular: a fold or another bifurcation
    absent = 6  # the requested branch does not exist here: its order parameter, or the whole student, vanished
    imprecise = 7  # a fixed point, but with error bars above the requested rtol even for the largest averages tried
    unresolved = 8  # the proximal operator is not resolved at too many nodes to tell whether a state exists
    failed = 9  # an exception ended the computation of this setting

    @classmethod
    def name_of(cls, value: Number) -> str:
        """Return the readable name of a concrete status."""
        return {1: "stalled at the accuracy of the averages"}.get(int(value), cls(int(value)).name.replace("_", " "))


# A number with its error bar, or a label with None.
Column = tuple[Any, Any]
# Functions of `plotting` that draw any number of a table along one axis and over two.
LINE_FIGURE, MAP_FIGURE = "theory.table_figure", "diagrams.map_figure"


class InTable(NamedTuple):
    """How a table of results of one class reads, prints and draws them.

    Attributes:
        main: number that is read, printed and drawn unless another one is named; by default the first one.
        drawn: numbers that are drawn together along one axis, in place of the main one.
        figures: pictures of a table along one axis and over two, functions of `plotting`.
        shown: columns that are printed; all if there are none.
        headline: function of a table that returns what was asked, in words.
        summary: function of a table over two axes that returns what is printed in place of its main number.
        page: function of a table that returns all that is printed, in place of the common page.
        always: numbers that mean something in a cell without a result.
    """

    main: str = ""
    drawn: tuple[str, ...] = ()
    figures: tuple[str, str] = (LINE_FIGURE, MAP_FIGURE)
    shown: tuple[str, ...] = ()
    headline: Callable[[Any], str] = lambda table: str(table.question)
    summary: Callable[[Any], list[Row]] | None = None
    page: Callable[[Any], Description] | None = None
    always: tuple[str, ...] = ()


class Result(Printed):
    """Result of a computation that can fail. Its `status` is a `Status` as an integer, or an array of them.

    A number that does not exist is NaN, and its derivatives in both modes of jax are zero. So
    ``jnp.where(result.ok, f(result), 0.0)`` has the gradient of the results that are `ok`, and an entry of a `vmap`
    that fails leaves the gradients of the others alone.
    """

    USABLE: ClassVar[Status] = Status.stalled  # the last status of a result that can be used

    @property
    def in_table(self) -> InTable:
        """How a table reads, prints and draws results of this class."""
        return InTable()

    @property
    def has_result(self: Any) -> Any:
        """Whether a cell of a table with this result has what was asked for."""
        return bool(self.ok)

    @property
    def status_name(self: Any) -> Any:
        """The status in words; a list if `status` is an array."""
        return np.vectorize(Status.name_of, otypes=[object])(self.status).tolist()

    @property
    def ok(self: Any) -> bool | Bool[Any, "..."]:
        """Whether the result can be used: it converged, or stalled at the accuracy of the averages.

        A run on data, and each run of a table, must have converged.
        """
        return self.status <= self.USABLE


def joined(dictionaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return dictionaries with the same keys, those of the entries of a batch, as one with lists of their values."""

    def of_batch(values: list[Any]) -> Any:
        return joined(values) if isinstance(values[0], dict) else values

    return {key: of_batch([each[key] for each in dictionaries]) for key in dictionaries[0]}


class Replicated(Result):
    """A result that was computed in every replicate of the averages, and whose numbers are means over these.

    Subclasses have the numbers of all replicates in `replicates`. Every field of `mean` is an attribute of the result,
    unless the class has another meaning for its name. Under `vmap` all arrays lead with the axis of the settings, which
    `batch_probe` recognises. Class variables list what the result shows:

        SETTING   names of fields that say where it was computed
        SHOWN     names of the numbers in `mean` and `stderr`, each with its meaning; if empty, that of `WORDS`
        FLAGS     names of properties that the numbers decide
    """

    SETTING: ClassVar[tuple[str, ...]] = ()
    SHOWN: ClassVar[Mapping[str, str]] = {}
    FLAGS: ClassVar[tuple[str, ...]] = ()

    def __getattr__(self, name: str) -> Any:
        """Return the number of the mean that has this name; Python asks for names that are not found otherwise."""
        if hasattr(type(self), name) or name in type(self).__dataclass_fields__ or name not in self._fields_of_mean:
            return object.__getattribute__(self, name)  # raises the error of Python, or that of a property
        return self.named_means[name]

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *self._fields_of_mean}

    @property
    def _fields_of_mean(self) -> Iterable[str]:
        """Names of the numbers that were measured; none while the result is being built."""
        return getattr(getattr(self, "measured", None), "__dict__", ())

    @property
    def named_means(self: Any) -> dict[str, Any]:
        """The fields of `mean` by name, in the form that they have as attributes of the result."""
        return vars(self.mean)

    @property
    def replicate_axis(self: Any) -> int:
        """Position of the replicate axis in the arrays of `replicates`."""
        name, unbatched = self.batch_probe
        return jnp.ndim(getattr(self, name)) - unbatched

    @property
    def measured(self: Any) -> Any:
        """The numbers of all replicates whose means and error bars are shown."""
        return self.replicates

    @property
    def mean(self: Any) -> Any:
        """Means of the measured numbers over the replicates."""
        return jax.tree.map(lambda a: jnp.mean(a, self.replicate_axis), self.measured)

    @property
    def stderr(self: Any) -> Any:
        """Error bars of the means; see `error_bar`. Booleans count as zero and one, as in the means."""
        return jax.tree.map(lambda a: error_bar(jnp.moveaxis(1.0 * a, self.replicate_axis, 0)), self.measured)

    @property
    def status(self: Any) -> Int[Array, "*batch"]:
        """The worst `Status` over the replicates; that of a search that failed, if others ended without a state."""
        statuses = self.replicates.status
        worst = jnp.max(jnp.where(statuses == Status.absent, Status.converged, statuses), -1)
        return jnp.where(worst > Status.stalled, worst, jnp.max(statuses, -1))

    @property
    def title(self) -> str:
        """The kind of the result and its setting, in a few words."""
        return type(self).__name__

    def shown(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the numbers of `SHOWN` and their error bars, by name."""
        mean, bars = self.mean, self.stderr
        return {name: getattr(mean, name) for name in self.SHOWN}, {name: getattr(bars, name) for name in self.SHOWN}

    def numbers(self) -> dict[str, Column]:
        """Return all numbers with their error bars, and the flags with None, by name."""
        numbers, bars = self.shown()
        return {name: (a, bars[name]) for name, a in numbers.items()} | {
            name: (plain(getattr(self, name)), None) for name in self.FLAGS
        }

    def details(self) -> list[Row]:
        """Return further rows of the page."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return setting, numbers, flags, status and error bars; valid JSON if all numbers are finite."""
        setting, flags = ({name: plain(getattr(self, name)) for name in names} for names in (self.SETTING, self.FLAGS))
        numbers, bars = map(plain, self.shown())
        return {**setting, **numbers, **flags, "status": self.status_name, "stderr": bars}

    def describe(self) -> Description:
        rows = rows_of(*self.shown(), meanings=self.SHOWN)
        return Description(self.title, self.status_name, rows, self.details())


_MOST_STEPS = 10**9  # twice as many still are an integer of 32 bits


def _number(value: Any) -> Any:
    """Return a number as an array; a masked one becomes text, which is refused, as its number is not meant."""
    return np.asarray("masked" if np.ma.is_masked(value) else value)


class Settings(Printed):
    """Tolerances of a solve. Other values do not need a new compilation.

    Attributes:
        tol: undamped relative residual below which a fixed point has converged.
        max_steps: largest number of Newton steps.
        warm_steps: largest number of damped steps that bring a rough start near the branch.
        damping: share of the new state in a damped step. The steps are implicit, so the share is smaller along fast
            directions.

    Raises:
        InputError: if one of them is not a number or is out of range.
    """

    tol: Number = eqx.field(converter=_number, default=1e-5)
    max_steps: Number = eqx.field(converter=_number, default=30)
    warm_steps: Number = eqx.field(converter=_number, default=300)
    damping: Number = eqx.field(converter=_number, default=0.2)

    def __check_init__(self) -> None:
        steps = f"at least 0, and {_MOST_STEPS} at most"
        for name, lower, upper, requirement in (
            ("tol", 1e-300, np.inf, "positive"),
            ("max_steps", 0, _MOST_STEPS, steps),
            ("warm_steps", 0, _MOST_STEPS, steps),
            ("damping", 1e-300, 1, "in (0, 1]"),
        ):
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iuf" or value.ndim:
                raise InputError(name, f"must be a real number, got {name}={value.tolist()!r}")
            require((value >= lower) & (value <= upper), name, value, requirement)


# A search that runs out of steps with a residual below this still counts as a state, which the nodes do not resolve.
# Its losses are stationary in the overlaps, so their error is of second order in the residual.
UNRESOLVED = 0.1


@jax.jit
def has_state(status: Real[AnyArray, "*shape"], residual: Float[AnyArray, "*shape"]) -> Bool[AnyArray, "*shape"]:
    """Return whether a replicate has a state: a usable one, or one that its nodes do not resolve, see `UNRESOLVED`."""
    return (status <= Status.stalled) | (status == Status.max_steps) & (residual < UNRESOLVED)


_UNRESOLVED_SHARE = 0.05  # share of unresolved nodes above which a replicate is inconclusive


def classify(
    status: int | Int[AnyArray, "*shape"], unresolved_share: Float[AnyArray, "*shape"]
) -> Int[Array, "*shape"]:
    """Return `status`, or `unresolved` if the `unresolved_share` of the nodes exceeds `_UNRESOLVED_SHARE`."""
    return jnp.where(unresolved_share > _UNRESOLVED_SHARE, Status.unresolved, status)


def quorum(exists: Bool[AnyArray, "*shape R"]) -> Bool[Any, "*shape"]:
    """Return whether at least half of the replicates, along the last axis, agree; this decides if there is a state."""
    return exists.mean(-1) >= 0.5


def mean_of_existing(values: Shaped[AnyArray, "R *shape"], exists: Bool[AnyArray, " R"]) -> Float[Array, "*shape"]:
    """Average over the leading axis of R replicates, those with a state (`exists`) only; over all if none has."""
    weight = jnp.where(jnp.any(exists), exists, True)
    return jnp.sum(jnp.where(spread_to(weight, values), values, 0.0), 0) / jnp.sum(weight)


@jax.jit
def error_bar(values: Real[AnyArray, "R *shape"]) -> Float[Array, "*shape"]:
    """Return the error bar of the mean over the leading replicate axis; entries that are NaN do not count.

    It is half of the half-width of the 95.4 % confidence interval. For many replicates it is the standard error of the
    mean. For few replicates Student's law makes it larger, so that the true value lies within two error bars in 95.4 %
    of the cases for any number of replicates. It is infinite for a single replicate and NaN for none. This is the
    meaning of every `stderr` of the library.
    """
    values = jnp.asarray(values)
    is_known = ~jnp.isnan(values)
    count = jnp.sum(is_known, 0)
    safe_count = jnp.maximum(count, 2)
    mean = jnp.sum(jnp.where(is_known, values, 0.0), 0) / jnp.maximum(count, 1)
    square = jnp.sum(jnp.where(is_known, values - mean, 0.0) ** 2, 0)
    factors = student_factor(np.arange(max(values.shape[0], 2) + 1))
    bar = jnp.sqrt(square / (safe_count - 1) / safe_count) * jnp.asarray(factors, mean.dtype)[safe_count]
    return jnp.where(count > 1, bar, jnp.where(count == 1, jnp.inf, jnp.nan))


def student_factor(count: int | Int[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return the factor from a standard error of the mean of so many numbers to its error bar; see `error_bar`."""
    return np.where(np.greater(count, 1), special.stdtrit(np.maximum(count, 2) - 1, 0.97725) / 2, np.inf)


class Average(Printed):
    """A mean over independent draws.

    Attributes:
        value: the mean.
        stderr: error bar of the mean, see `error_bar`.
    """

    value: Float[AnyArray, "*shape"]
    stderr: Float[AnyArray, "*shape"]

    def describe(self) -> Description:
        return Description(entries(self.value, self.stderr))

    def __format__(self, spec: str) -> str:
        return format(float(self.value), spec) if spec else str(self)

    def __float__(self) -> float:
        return float(self.value)
