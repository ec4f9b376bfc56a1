"""Reports of results: how they print, are saved and drawn: one line, one page, tables, files, pictures."""

from __future__ import annotations

import dataclasses
import html
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Shaped

from .arrays import ARRAYS, Number
from .errors import require_kind
from .files import write_whole
from .saved import load, pack

_ENTRIES = 4  # number of entries of an axis that are shown
_LEAST_POWER = -4  # smallest power of ten of a number with an error bar that is written without an exponent
_MOST_ERROR = 1e4  # error bar from which on a number is written with an exponent
_ROUNDING = 100 * np.finfo(float).eps  # relative error bar below which replicates differ by rounding only
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
    "replicon": "below 1: stable",
    "jump_mass": "share of the jumps of the proximal operator in Vhat",
    "second_minimum": "share of the nodes that have one",
    "unresolved": "share of the nodes",
    "growth_m": "factor by which a small m grows in a step of the map",
    "growth_theta": "factor by which a small theta grows in a step of the map",
    "train_loss_direct": "training loss / d from the average loss",
    "rs_error": "estimated rise by replica symmetry breaking: add it to train_loss",
    "shift": "distance of the value matrix from the identity",
}
Row = tuple[str, ...]
T = TypeVar("T")
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

    @property
    def sections(self) -> list[tuple[str, Sequence[Row]]]:
        """All rows of the page: the numbers, and the tables with their headings."""
        return [("", [*self.numbers, *self.details]), *self.tables]


class Printed(eqx.Module):
    """Base of modules that print their numbers: `repr` gives one line, `print` and notebooks a page.

    While jax traces, and for a batch of results, the shapes of the arrays are printed instead.
    """

    def describe(self) -> Description:
        """Return the contents of the line and the page, by default all fields; called only if `readable`."""
        return Description("", numbers=rows_of(vars(self)))

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
        parts = [part for head, rows in description.sections for part in (head, table(rows))]
        return "\n".join(filter(None, [description.title or type(self).__name__, *parts]))

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
        for head, rows in description.sections:
            cells = ("".join(f"<td style='text-align:left'>{html.escape(c)}</td>" for c in row) for row in rows)
            body = "".join(f"<tr>{row}</tr>" for row in cells)
            parts.append(html.escape(head) + f"<table>{body}</table>" * bool(body))
        return "\n".join(filter(None, parts))


def _is_known(leaf: Any) -> bool:
    """Return whether the values of a leaf are known: not while jax traces, nor if other processes hold part of them."""
    if isinstance(leaf, jax.Array):
        return not isinstance(leaf, jax.core.Tracer) and leaf.is_fully_addressable and not leaf.is_deleted()
    return isinstance(leaf, (np.ndarray, np.generic, bool, int, float, str))


def _same(a: Any, b: Any) -> bool:
    """Return whether two results, or parts of them, are equal; NaN equals NaN, and arrays have the same dtype."""
    if isinstance(a, ARRAYS) and isinstance(b, ARRAYS):
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
    """Write a number with its error bar as two last digits, 1.25154(12) or 3.14(14)e-7.

    If the error bar is not known, as for a single replicate, where it is infinite, two digits of the number are
    written, 0.81(?). A number without one (NaN), or one that is known up to rounding, is written in six digits.
    """
    value, error = float(value), float(error)
    error = error if error > _ROUNDING * abs(value) else 0.0
    scale = error if math.isfinite(error) else abs(value)
    if not math.isfinite(value) or scale <= 0:
        return f"{value:.6g}"
    power = math.floor(math.log10(max(abs(value), scale)))
    if power < _LEAST_POWER or scale >= _MOST_ERROR:
        return f"{with_error(value / 10.0**power, error / 10.0**power)}e{power}"
    digits = max(0, 1 - int(f"{scale:.1e}".partition("e")[2]))
    return f"{value:z.{digits}f}({round(error * 10**digits) if scale is error else '?'})"


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
    return np.asarray(value).tolist() if isinstance(value, ARRAYS) else value


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Write rows of cells as lines, each column as wide as its widest cell; missing cells at the end are empty."""
    cells = [[str(cell) for cell in row] for row in rows]
    count = max(map(len, cells), default=0)
    cells = [row + [""] * (count - len(row)) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def figure_of(name: str) -> Callable[..., Any]:
    """Return a function of `tiedattn_jax.plotting` by its name, such as "theory.branch_figure"."""
    module, function = name.split(".")
    return getattr(importlib.import_module(f"tiedattn_jax.plotting.{module}"), function)


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
        return figure_of(figure)(self if many is None else many(self), ax=ax, **options)

    axes = f": one for each of the panels {', '.join(panels)}, or a dict of some of them" if panels else ""
    plot.__doc__ = f"""Plot {contents}; see `plotting.{figure}`.

        Args:
            ax: matplotlib axes to draw on instead of a new figure{axes}.
            options: further options of the figure; label, color and other options of lines.

        Returns:
            The figure, or `ax`.
        """
    return plot
