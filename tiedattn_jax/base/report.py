"""Results: how they print, are saved and drawn, and what they share: status, settings, replicates and error bars.

A result that was averaged over replicates lists what it shows in class variables, see `Replicated`; its `to_dict`, its
line and its page follow from them. `picture` makes its `plot`.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import html
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Real, Shaped
from scipy import special

from .arrays import AnyArray, Number
from .errors import InputError, require, require_kind
from .files import load, pack, write_whole

_ENTRIES = 4  # number of entries of an axis that are shown
_LEAST_POWER = -4  # smallest power of ten of a number with an error bar that is written without an exponent
_MOST_ERROR = 1e4  # error bar from which on a number is written with an exponent
# Meanings of the names, as tables show them.
WORDS = {
    "q": "overlap of the student with itself",
    "V": "response of the student",
    "theta": "semantic overlap, with the teacher",
    "m": "positional overlap, with the encodings",
    "train_loss": "training loss / d",
    "gen_error": "test error",
    "gen_error_linear": "test error of the best linear attention",
    "gradient_norm": "largest entry of the gradient of the empirical risk",
    "shift": "distance of the value matrix from the identity",
}
Row = tuple[str, ...]
T = TypeVar("T")
_ARRAYS = (jax.Array, np.ndarray, np.generic)
Numbers: TypeAlias = Shaped[ArrayLike, "..."] | Sequence  # what `numpy.asarray` makes an array of numbers


class Description(NamedTuple):
    """Contents of the printed line and page of a result.

    Attributes:
        what: kind of the result, in a few words.
        status: how the computation ended, in words, if it can fail.
        numbers: rows (name, number) or (name, number, meaning) of the line and of the page.
        details: further rows, for the page only.
        tables: tables of the page, each with a heading.
    """

    what: str
    status: str = ""
    numbers: Sequence[Row] = ()
    details: Sequence[Row] = ()
    tables: Sequence[tuple[str, Sequence[Row]]] = ()

    @property
    def title(self) -> str:
        """The kind of the result, and how the computation ended."""
        return ": ".join(filter(None, (self.what, self.status)))


class Printed(eqx.Module):
    """Base of modules that print their numbers: `repr` gives one line, `print` and notebooks a page.

    While jax traces, and for a batch of results, the shapes of the arrays are printed instead.
    """

    @abc.abstractmethod
    def describe(self) -> Description:
        """Return the contents of the line and the page; called only if `readable`."""

    batch_probe: ClassVar[tuple[str, int] | None] = None  # (field name, ndim) that tells a result from a batch

    @property
    def readable(self) -> bool:
        """Whether the numbers are known, and those of one result rather than of a batch."""
        is_known = all(map(_is_known, jax.tree.leaves(self)))
        return is_known and (
            self.batch_probe is None or np.ndim(getattr(self, self.batch_probe[0])) == self.batch_probe[1]
        )

    def summary(self) -> str:
        """Return a page of text: the outcome, numbers with error bars in units of the last digits, and tables."""
        if not self.readable:
            return eqx.tree_pformat(self)
        description = self.describe()
        tables = [("", [*description.numbers, *description.details]), *description.tables]
        parts = [
            description.title or type(self).__name__,
            *(part for head, rows in tables for part in (head, table(rows))),
        ]
        return "\n".join(filter(None, parts))

    def save(self, path: Path | str) -> None:
        """Write the result to one .npz file, whole or not at all; `tiedattn_jax.load` reads it.

        Raises:
            InputError: a part of it, such as a function in a model of the user's, cannot be saved.
        """
        write_whole(Path(path), pack(self))

    @classmethod
    def load(cls: type[T], path: Path | str) -> T:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, damaged, or holds something else; or it needs a class of the user's that
                has not been defined.
        """
        result: Any = load(path)
        require_kind(result, "path", cls, f"a file of a {cls.__name__}")
        return result

    def __eq__(self, other: object) -> Any:
        """Whether all numbers are the same; NaN equals NaN. While jax traces, equality is that of equinox."""
        is_known = all(map(_is_known, jax.tree.leaves((self, other))))
        return _same(self, other) if is_known else super().__eq__(other)

    __hash__ = eqx.Module.__hash__

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        try:
            description = self.describe() if self.readable else None
        except Exception:  # jax puts other objects into modules of this structure, and these must print, too
            description = None
        if description is None:
            return eqx.tree_pformat(self)
        numbers = ", ".join(f"{name}={number}" for name, number, *_ in description.numbers)
        return f"{type(self).__name__}({'; '.join(filter(None, (description.what, numbers, description.status)))})"

    def _repr_html_(self) -> str:
        if not self.readable:
            return f"<pre>{html.escape(eqx.tree_pformat(self))}</pre>"
        description = self.describe()
        parts = [f"<b>{type(self).__name__}</b> {html.escape(description.title)}"]
        for head, rows in [("", [*description.numbers, *description.details]), *description.tables]:
            cells = ("".join(f"<td style='text-align:left'>{html.escape(c)}</td>" for c in row) for row in rows)
            body = "".join(f"<tr>{row}</tr>" for row in cells)
            parts.append(f"{html.escape(head)}<table>{body}</table>" if body else "")
        return "\n".join(filter(None, parts))


def _is_known(leaf: Any) -> bool:
    """Return whether the values of a leaf are known: not while jax traces, nor if other processes hold part of them."""
    if isinstance(leaf, jax.Array):
        return not isinstance(leaf, jax.core.Tracer) and leaf.is_fully_addressable and not leaf.is_deleted()
    return isinstance(leaf, (np.ndarray, np.generic, bool, int, float, str))


def _same(a: Any, b: Any) -> bool:
    """Return whether two results, or parts of them, are equal; NaN equals NaN, and arrays have the same dtype."""
    if isinstance(a, _ARRAYS) and isinstance(b, _ARRAYS):
        x, y = np.asarray(a), np.asarray(b)
        return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
    if type(a) is not type(b):
        return False
    if isinstance(a, eqx.Module):  # cached properties do not count
        return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))


def with_error(value: Number, error: Number = 0.0) -> str:
    """Write a number with its error bar as two last digits, 1.25154(12) or 3.14(14)e-7; without one, in six digits."""
    value, error = float(value), float(error)
    if not (math.isfinite(value) and math.isfinite(error)) or error <= 0:
        return f"{value:.6g}"
    power = math.floor(math.log10(max(abs(value), error)))
    if power < _LEAST_POWER or error >= _MOST_ERROR:
        return f"{with_error(value / 10.0**power, error / 10.0**power)}e{power}"
    digits = max(0, 1 - int(f"{error:.1e}".partition("e")[2]))
    return f"{value:z.{digits}f}({round(error * 10**digits)})"


def by_token(values: Numbers, *others: Numbers) -> list[Shaped[Any, "..."]]:
    """Reduce arrays (L, ...) to their first token if all tokens have the same values up to sign.

    Axes of a student and a teacher of rank one are dropped.

    Args:
        values: array that decides whether the tokens are alike; a scalar is not changed.
        others: arrays of the same shape, such as error bars, which are reduced in the same way.
    """
    arrays = [np.asarray(a) for a in (values, *others)]
    values = arrays[0]
    if not values.ndim:
        return arrays
    tolerance = math.sqrt(np.finfo(values.dtype).eps)
    tokens_agree = np.allclose(np.abs(values), np.abs(values[:1]), rtol=tolerance, atol=0, equal_nan=True)
    shape = () if math.prod(values.shape[1:]) == 1 else values.shape[1:]  # a student and a teacher of rank one
    return [a[0].reshape(shape) if tokens_agree else a.reshape(-1, *shape) for a in arrays]


def entries(values: Numbers, errors: Numbers | None = None) -> str:
    """Write an array as text, with error bars if they are given, and only the first entries of long axes."""
    values = np.asarray(values)
    errors = np.zeros(values.shape) if errors is None else np.asarray(errors)
    if not values.ndim:
        return with_error(values, errors)
    texts = [entries(value, error) for value, error in zip(values[:_ENTRIES], errors[:_ENTRIES], strict=True)]
    return f"[{', '.join(texts)}{', ...' * (len(values) > _ENTRIES)}]"


def rows_of(
    values: Mapping[str, Numbers],
    errors: Mapping[str, Numbers] | None = None,
    *,
    meanings: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return rows (name, numbers, meaning) for scalars or arrays (L, ...) over the tokens; meanings as in `WORDS`."""
    bars = errors or {name: np.zeros(np.shape(a)) for name, a in values.items()}
    words = WORDS | {name: word for name, word in (meanings or {}).items() if word}
    return [(name, entries(*by_token(a, bars[name])), words.get(name, "")) for name, a in values.items()]


def plain(value: Any) -> Any:
    """Return arrays as numbers or lists, and modules and dictionaries as dictionaries of these, ready for JSON."""
    if isinstance(value, (eqx.Module, Mapping)):
        fields = value if isinstance(value, Mapping) else vars(value)
        return {name: plain(item) for name, item in fields.items()}
    return np.asarray(value).tolist() if isinstance(value, _ARRAYS) else value


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Write rows of cells as lines, each column as wide as its widest cell; missing cells at the end are empty."""
    cells = [[str(cell) for cell in row] for row in rows]
    count = max(map(len, cells), default=0)
    cells = [row + [""] * (count - len(row)) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(f"  {line}".rstrip() for line in lines)


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

    @classmethod
    def name_of(cls, value: Number) -> str:
        """Return the readable name of a concrete status."""
        return {1: "stalled at the accuracy of the averages"}.get(int(value), cls(int(value)).name.replace("_", " "))


class Result(Printed):
    """Result of a computation that can fail. Its `status` is a `Status` as an integer, or an array of them."""

    @property
    def status_name(self: Any) -> Any:
        """The status in words; a list if `status` is an array."""
        return np.vectorize(Status.name_of, otypes=[object])(self.status).tolist()

    @property
    def ok(self: Any) -> bool | Bool[Any, "..."]:
        """Whether the result can be used: it converged, or stalled at the accuracy of the averages."""
        return self.status <= Status.stalled


Value = TypeVar("Value")


class MeanField(Generic[Value]):
    """Descriptor that makes a field of ``result.mean`` a field of the result itself: ``s = MeanField[jax.Array]()``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: Any, owner: type) -> Value:
        return getattr(result.mean, self.name)


class Replicated(Result):
    """A result that was computed in every replicate of the averages, and whose numbers are means over these.

    Subclasses have the numbers of all replicates in `replicates`. Under `vmap` all arrays lead with the axis of the
    settings, which `batch_probe` recognises. Class variables list what the result shows:

        SETTING   names of fields that say where it was computed
        SHOWN     names of the numbers in `mean` and `stderr`, each with its meaning; if empty, that of `WORDS`
        FLAGS     names of properties that the numbers decide
    """

    SETTING: ClassVar[tuple[str, ...]] = ()
    SHOWN: ClassVar[Mapping[str, str]] = {}
    FLAGS: ClassVar[tuple[str, ...]] = ()

    @property
    def replicate_axis(self: Any) -> int:
        """Position of the replicate axis in the arrays of `replicates`."""
        name, unbatched = self.batch_probe
        return jnp.ndim(getattr(self, name)) - unbatched

    @property
    def mean(self: Any) -> Any:
        """Means of all numbers over the replicates."""
        return jax.tree.map(lambda a: jnp.mean(a, self.replicate_axis), self.replicates)

    @property
    def stderr(self: Any) -> Any:
        """Error bars of the means; see `error_bar`. Booleans count as zero and one, as in the means."""
        return jax.tree.map(lambda a: error_bar(jnp.moveaxis(1.0 * a, self.replicate_axis, 0)), self.replicates)

    @property
    def status(self: Any) -> Int[Array, "*batch"]:
        """The worst `Status` over the replicates."""
        return jnp.max(self.replicates.status, -1)

    @property
    def title(self) -> str:
        """The kind of the result and its setting, in a few words."""
        return type(self).__name__

    def numbers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the numbers of `SHOWN` and their error bars, by name."""
        mean, bars = self.mean, self.stderr
        return {name: getattr(mean, name) for name in self.SHOWN}, {name: getattr(bars, name) for name in self.SHOWN}

    def details(self) -> list[Row]:
        """Return further rows of the page."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return setting, numbers, flags, status and error bars; valid JSON if all numbers are finite."""
        setting, flags = ({name: plain(getattr(self, name)) for name in names} for names in (self.SETTING, self.FLAGS))
        numbers, bars = map(plain, self.numbers())
        return {**setting, **numbers, **flags, "status": self.status_name, "stderr": bars}

    def describe(self) -> Description:
        rows = rows_of(*self.numbers(), meanings=self.SHOWN)
        return Description(self.title, self.status_name, rows, self.details())


def picture(figure: str, contents: str, *panels: str, many: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Return a method `plot` that draws a result.

    Args:
        figure: function of `tiedattn_jax.plotting`, such as "theory.branch_figure"; it takes the result, `ax` and
            further options.
        contents: what it draws, in words.
        panels: names of its panels; none for a single one.
        many: makes of the result what a figure of several results takes.
    """

    def plot(self: Any, *, ax: Any = None, **options: Any) -> Any:
        module, name = figure.split(".")
        draw = getattr(importlib.import_module(f"tiedattn_jax.plotting.{module}"), name)
        return draw(self if many is None else many(self), ax=ax, **options)

    axes = f": one for each of the panels {', '.join(panels)}, or a dict of some of them" if panels else ""
    plot.__doc__ = f"""Plot {contents}; see `plotting.{figure}`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure{axes}.
            options: further options of the figure.

        Returns:
            The figure, or `ax`.
        """
    return plot


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

    def describe(self) -> Description:
        return Description("", numbers=rows_of(vars(self)))


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
    weight = weight.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.sum(jnp.where(weight, values, 0.0), 0) / jnp.sum(weight)


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
    # Factors by the number of replicates. The entries for zero and one replicate are not used.
    factors = np.concatenate([[np.inf, np.inf], special.stdtrit(np.arange(1, max(values.shape[0], 2)), 0.97725) / 2])
    bar = jnp.sqrt(square / (safe_count - 1) / safe_count) * jnp.asarray(factors, mean.dtype)[safe_count]
    return jnp.where(count > 1, bar, jnp.where(count == 1, jnp.inf, jnp.nan))


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
