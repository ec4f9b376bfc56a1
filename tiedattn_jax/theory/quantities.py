"""A number of the theory with its error bar, its derivatives and a status.

Transitions, thresholds, ends of branches, best ridges and first times are `Quantity`, all one record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..base.arrays import StateArray, indexed, spread_to
from ..base.derivatives import instantiated, with_tangent
from ..base.errors import InputError
from ..base.report import WORDS, Description, Row, entries, picture, plain, with_error
from ..base.results import LINE_FIGURE, MAP_FIGURE, Average, Column, InTable, Result, Status, error_bar, joined, quorum
from ..model.model import Model
from ..model.parameters import arrays_of, scalar_parameters
from .equations import first_order
from .states import FixedPoint, states_table

# Meanings of further numbers, as pages show them.
_WORDS = WORDS | {
    "rs_shift": "estimated shift by replica symmetry breaking: add it to the number",
    "rs": "the same in the replica-symmetric theory",
    "shift": "from there, by one step of replica symmetry breaking",
    "algorithmic": "from here on by message passing from a random start",
    "W": "attention matrix, the same for all sentences",
    "train_error": "mean error over the sentences of the fit",
}
# Statuses that say that there is no state, and so no number that it defines.
_NOWHERE = (Status.left_domain, Status.nonfinite, Status.singular, Status.absent)
# A model alone, or a model and an alpha.
NumbersOf = Model | tuple[Model, Float[Array, ""]]


class Quantity(Result):
    """A number that was computed in every replicate of the averages, with its derivatives.

    The number is differentiable in the numbers of the setting from which it was made; its first derivatives are
    `sensitivities` and `by_alpha`.

    The number is an attribute under its name, too: `alpha` of a transition, `t` of a first time. So are further numbers
    and labels: `gen_error` and `place` of a best ridge.

    Attributes:
        value: mean over the replicates. If the number does not exist, this, all sensitivities and error bars are NaN,
            and the derivatives that jax computes are zero; see `Result`.
        stderr: error bar of `value`; zero if the number is known exactly.
        status: `Status` as an integer; `absent` if the number does not exist.
        sensitivities: d value / d (every number of the model), a pytree like the model; None if not computed.
        sensitivities_stderr: error bars of the sensitivities.
        by_alpha: d value / d alpha with its error bar, for a number that depends on alpha; else None.
        branches: the states that define the number; where none was found, those at which the search ended.
        further: further numbers by name: a `Quantity`, an `Average`, or an array.
        name: name of the number: "alpha", "t", or a number of the model.
        event: what happens there, such as "alpha_c" or "best lam".
        meaning: the same in words.
        note: why there is no such number, or what is special about it, in one sentence.
        labels: further labels, pairs of a name and a text.
    """

    batch_probe = "value", 0
    value: Float[StateArray, "*batch"]
    stderr: Float[StateArray, "*batch"]
    status: Int[StateArray, "*batch"]
    sensitivities: Any = None
    sensitivities_stderr: Any = None
    by_alpha: Average | None = None
    _: dataclasses.KW_ONLY
    branches: tuple[Any, ...] = ()
    further: dict[str, Any] = eqx.field(default_factory=dict)
    name: str = eqx.field(static=True, default="value")
    event: str = eqx.field(static=True, default="")
    meaning: str = eqx.field(static=True, default="")
    note: str = eqx.field(static=True, default="")
    labels: tuple[tuple[str, Any], ...] = eqx.field(static=True, default=())

    def __getattr__(self, name: str) -> Any:
        """Return what the record has under this name: the number, a further number or a label."""
        named = self._named
        if name in named:
            return named[name]
        if hasattr(type(self), name) or not named:
            return object.__getattribute__(self, name)  # raises the error of a property, or that of Python
        raise AttributeError(f"{self.event or self.name} has no {name!r}; its own names are {', '.join(named)}")

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *self._named}

    @property
    def _named(self) -> dict[str, Any]:
        """The number, further numbers and labels by name; none while the record is being built."""
        is_whole = {field.name for field in dataclasses.fields(self)} <= vars(self).keys()
        return {self.name: self.value, **self.further, **dict(self.labels)} if is_whole else {}

    @classmethod
    def of(
        cls,
        values: Float[Array, " R"],
        rates: PyTree[Float[Array, "R ..."]] | None = None,
        setting: NumbersOf | None = None,
        *,
        status: int | Int[Array, ""] = Status.converged,
        known: bool | Bool[Array, ""] = True,
        **fields: Any,
    ) -> Quantity:
        """Return the mean over R replicates, with error bars and derivatives.

        Args:
            values: the number in every replicate; NaN in those that lack it.
            rates: its derivatives in the numbers of the setting, leaves (R, ...): a model, or a model and an array for
                alpha. None if they are not known. Those of replicates that lack the number do not count.
            setting: the caller's model, or model and alpha, in which the result is differentiable. None if `values`
                have their own derivatives.
            status: see `Quantity.status`.
            known: whether the number exists. If not, or if the status says that there is no state, all numbers are NaN.
            fields: further fields of the record.
        """
        status = jnp.asarray(status)
        bar = error_bar(lax.stop_gradient(values))
        slopes: Sequence[Any] = (None, None, None)
        if rates is not None:
            values = values if setting is None else with_sensitivities(values, rates, setting)
            rates = jax.tree.map(lambda a: jnp.where(spread_to(jnp.isfinite(values), a), a, jnp.nan), rates)
            pair = rates if isinstance(rates, tuple) else (rates, None)
            (by_model, by_alpha), (bars, alpha_bar) = _mean_and_bar(pair)
            slopes = by_model, bars, None if by_alpha is None else Average(by_alpha, alpha_bar)
        value, bar, *slopes = if_known((jnp.nanmean(values), bar, *slopes), status, known)
        return cls(value, bar, status, *slopes, **fields)

    @classmethod
    def of_existing(
        cls, values: Float[Array, " R"], rates: PyTree[Float[Array, "R ..."]] | None = None, **fields: Any
    ) -> Quantity:
        """Return the mean over the replicates that have the number, where `values` are finite; see `of`.

        The number exists if at least half of the replicates have it. The values have their own derivatives.
        """
        exists = jnp.isfinite(values)
        known = quorum(exists)
        status = jnp.where(known, Status.converged, Status.absent)
        return cls.of(jnp.where(exists, values, jnp.nan), rates, status=status, known=known, **fields)

    @classmethod
    def of_model(cls, values: Callable[[Any], Float[Array, " R"]], model: Any, **fields: Any) -> Quantity:
        """Return a number and its sensitivities from its values in every replicate, a function of the model."""

        def twice(model: Any) -> tuple[Array, Array]:
            numbers = values(model)
            return numbers, numbers

        rates, numbers = jax.jacrev(twice, has_aux=True)(model)
        return cls.of_existing(numbers, rates, **fields)

    @property
    def reason(self) -> str:
        """The `note`; why there is no number if there is none; else empty. Needs a concrete result."""
        return self.note or ("" if np.isfinite(float(self.value)) else "it does not happen")

    @property
    def has_result(self) -> bool:
        return not self.reason if self.name == "alpha" else bool(np.isfinite(float(self.value)))

    @property
    def question(self) -> str:
        """The event, or else the number: a table of such results has this name."""
        return self.event or self.name

    @property
    def in_table(self) -> InTable:
        if "place" in dict(self.labels):
            return InTable("value", figures=("theory.best_figure", MAP_FIGURE), headline=_best_words)
        line = "theory.boundary_figure" if self.name == "alpha" else LINE_FIGURE
        return InTable(self.name, figures=(line, MAP_FIGURE))

    def numbers(self) -> dict[str, Column]:
        """Return the number under the name of its event, further ones, and labels in words, with their error bars."""
        numbers: dict[str, Any] = {self.event or self.name: self} if self.name == "alpha" else {self.name: self}
        numbers |= {name: number for name, number in self.further.items() if isinstance(number, Quantity)}
        labels = {name: text for name, text in self.labels if text is None or isinstance(text, str)}
        if "branch" in labels:
            labels["branch"] = str(self.state.branch) if self.branches else ""
        columns: dict[str, Column] = {name: (float(a.value), float(a.stderr)) for name, a in numbers.items()}
        return columns | {name: (text, None) for name, text in labels.items()}

    @property
    def state(self) -> Any:
        """The first of `branches`.

        Raises:
            InputError: there is none.
        """
        if not self.branches:
            raise InputError(self.event, f"must have a state, but {self.reason or 'it is computed without one'}")
        return self.branches[0]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers and labels, and the `to_dict` of every state; valid JSON if all numbers are finite.

        A batch has lists over its entries.
        """
        if jnp.ndim(self.value):
            return joined([indexed(self, k).to_dict() for k in range(len(self.value))])
        report: dict[str, Any] = {"event": self.event} if self.event else {}
        report |= plain(dict(self.labels)) | {self.name: float(self.value), "stderr": float(self.stderr)}
        report |= self.derivatives()
        for name, number in self.further.items():
            report |= {name: np.asarray(getattr(number, "value", number)).tolist()}
            if hasattr(number, "stderr"):
                report |= {f"{name}_stderr": float(number.stderr)}
            if isinstance(number, Quantity):
                report |= {f"{name}_{key}": value for key, value in number.derivatives().items()}
        if self.branches:
            report["branches"] = [branch.to_dict() for branch in self.branches]
        return report | {"status": self.status_name} | ({"reason": self.reason} if self.event else {})

    plot = picture(
        "diagrams.transition_figure",
        "the losses that cross, and how far each number of the model moves this one",
        "losses",
        "sensitivities",
    )

    def describe(self) -> Description:
        title = self.event or self.name
        if np.isnan(float(self.value)) or self.status == Status.absent:
            return Description(title + f" ({self.meaning})" * bool(self.meaning), f"not found, as {self.reason}")
        if self.event and self.name not in title.replace("_", " ").split():
            title += f" at {self.name}"
        numbers, details = list[Row](), self.sensitivity_rows(arrays_of)
        for name, number in self.further.items():
            value, bar = getattr(number, "value", number), getattr(number, "stderr", None)
            if np.all(np.isfinite(value)):
                rows = numbers if isinstance(number, Quantity) else details
                rows.append((name, entries(value, bar), _WORDS.get(name, "")))
        numbers += self.sensitivity_rows(scalar_parameters)
        details += [(name, str(label)) for name, label in self.labels if label is not None]
        states = states_table([b for b in self.branches if isinstance(b, FixedPoint)], "branch")
        head = (self.note or self.meaning) + "; the states there:" * bool(states)
        headline = f"{title} = {with_error(self.value, self.stderr)}"
        return Description(headline, self.status_name, numbers, details, [(head, states)])

    def derivatives(self) -> dict[str, Any]:
        """Return the derivatives and their error bars by the names of the numbers, ready for JSON."""
        trees = {name: getattr(self, name) for name in ("sensitivities", "sensitivities_stderr")}
        rates: dict[str, Any] = {name: None if tree is None else numbers_by_name(tree) for name, tree in trees.items()}
        if self.by_alpha is not None:
            rates |= {"by_alpha": float(self.by_alpha.value), "by_alpha_stderr": float(self.by_alpha.stderr)}
        return rates

    def sensitivity_rows(self, select: Callable[[Any], dict[str, Any]]) -> list[Row]:
        """Return printed rows of the derivatives in the numbers that `select` returns, and in alpha.

        Further numbers have a column each. The number itself is left out.
        """
        if self.sensitivities is None or self.sensitivities_stderr is None:
            return []
        values, bars = map(select, (self.sensitivities, self.sensitivities_stderr))
        rows: dict[str, Row] = {
            f"d/d{name}": (entries(value, bars[name]),) for name, value in values.items() if name != self.name
        }
        if self.by_alpha is not None and select is scalar_parameters:
            rows = {"d/dalpha": (str(self.by_alpha),)} | rows
        for name, number in self.further.items():
            for key, rate in number.sensitivity_rows(select) if isinstance(number, Quantity) else ():
                if key in rows:
                    rows[key] += (f"{name}: {rate}",)
        return [(key, *row) for key, row in rows.items()]


def _best_words(table: Any) -> str:
    jumps = table.jumps if len(table.names) == 1 else []
    places = ", ".join(f"between {low:.4g} and {high:.4g}" for low, high in jumps)
    branch = next((point.branch for point in table.points), None)
    words = f"{branch} branch" if branch else "global minimum"
    return f"{table.question} of the {words}{places and f' that jumps at {table.parameter} {places}'}"


def if_known(numbers: PyTree, status: Int[Array, "..."], known: bool | Bool[Array, ""] = True) -> PyTree:
    """Return numbers, or NaN if they are not known or the status says that there is no state.

    No number of what was not found may read like a result.
    """
    known &= ~jnp.any(status == jnp.asarray(_NOWHERE))
    return jax.tree.map(lambda a: jnp.where(known, a, jnp.nan), numbers)


def numbers_by_name(model: Any) -> dict[str, Any]:
    """Return all numbers of a model by name, arrays as lists."""
    return scalar_parameters(model) | {name: a.tolist() for name, a in arrays_of(model).items()}


@eqx.filter_jit
def _mean_and_bar(rates: PyTree[Float[Array, "R ..."]]) -> tuple[Any, Any]:
    """Return means and error bars over the replicates."""
    return jax.tree.map(lambda a: jnp.nanmean(a, 0), rates), jax.tree.map(error_bar, rates)


@with_tangent
def with_sensitivities(primals: tuple, tangents: tuple) -> Float[Array, " R"]:
    """Return the first argument of ``(values, rates, setting)``, numbers of R replicates.

    The rates (leading axis R) are their first derivatives in the numbers of the setting. The derivatives of values that
    are not finite are zero.
    """
    values, rates, setting = primals
    rates = jax.tree.map(lambda a: jnp.where(spread_to(jnp.isfinite(values), a), a, 0.0), rates)
    terms = jax.tree.map(
        lambda s, d: jnp.sum((s * d).reshape(values.shape[0], -1), 1),
        first_order(rates, setting),
        instantiated(setting, tangents[2]),
    )
    return sum(jax.tree.leaves(terms), jnp.zeros_like(values))
