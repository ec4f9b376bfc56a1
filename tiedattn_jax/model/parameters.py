"""Named numbers of a setting, which is a model and an alpha.

A number is "alpha", a field of the model ("sigma"), an entry of a field ("mixing[0,1]"), a number of the penalty
("penalty.strength"), or a caller's own. Tables, paths and grids use a `Parameter` to name the number that they
change. An `Axis` is a parameter with values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.arrays import Number
from ..base.errors import InputError, array_of, as_number, require, require_kind, require_precision
from .checks import check_numbers

MODELS = "model"  # name of the axis of a list of models, whose values are their places in it
AnyModel: TypeAlias = Any  # a `Model` or a `wide.Layer`
Setter = Callable[[AnyModel, Number], AnyModel]
Alpha = TypeVar("Alpha", bound=Number | None)


@dataclass(frozen=True)
class Parameter:
    """One named number of a setting.

    Attributes:
        name: "alpha", a scalar field of the model or of its penalty, or an entry such as "mixing[0,1]".
        put: a caller's own function ``put(model, value)`` that returns the model with this value, or None.
        own: the value of a caller's own number in the setting, None if it is not known.
    """

    name: str
    put: Setter | None = None
    own: float | None = None

    def set(self, model: AnyModel, alpha: Alpha, value: Number) -> tuple[AnyModel, Alpha | Float[Array, ""]]:
        """Return the setting with this number at another value.

        If the number is an entry of `mixing`, the other entries of its row are rescaled so that the row sums to one.
        """
        value = jnp.asarray(value, model.lam.dtype)
        if self.put is not None:
            return self.put(model, value), alpha
        if self.name == "alpha":
            return model, value
        field, index = _entry(self.name)
        before = attrgetter(field)(model)
        after = before.at[index].set(value) if index else value
        if field == "mixing" and index:
            i, j = index
            other_entries = before[i].at[j].set(0.0)
            total = jnp.sum(other_entries)  # zero if the entry was the whole row; the others then share equally
            shares = jnp.where(total > 0, other_entries / jnp.where(total > 0, total, 1.0), 1 / (before.shape[1] - 1))
            after = before.at[i].set(((1 - value) * shares).at[j].set(value))
        return eqx.tree_at(attrgetter(field), model, after), alpha

    def read(self, model: AnyModel, alpha: Number | None, argument: str) -> float:
        """Return the value of the number in a concrete setting.

        Args:
            argument: the caller's argument that named the number; errors say it.

        Raises:
            InputError: the setting has no such number.
        """
        if self.own is not None:
            return self.own
        if self.name == "alpha":
            assert alpha is not None
            return float(alpha)
        try:
            field, index = _entry(self.name)
            value = reduce(lambda part, name: vars(part)[name], field.split("."), model)  # no properties
            value = np.asarray(value)[index] if eqx.is_inexact_array(value) else np.nan
        except (KeyError, TypeError, ValueError, IndexError):
            value = np.nan
        if np.ndim(value) or not np.isfinite(value):
            names = ", ".join(("alpha", *scalar_parameters(model)))
            requirement = f"one of {names}, or an entry like mixing[0,1]"
            raise InputError(argument, f"must name {requirement}, got {argument}={self.name!r}")
        return float(value)

    def direction(self, model: AnyModel, value: Number) -> AnyModel:
        """Return d model / d value, for a number of the model."""
        unit = jnp.ones((), model.lam.dtype)
        return jax.jvp(lambda v: self.set(model, None, v)[0], (value * unit,), (unit,))[1]

    def slope(self, sensitivities: AnyModel, model: AnyModel, value: Number) -> float:
        """Return the derivative in this number of what has the given derivatives in all numbers of the model."""
        terms = jax.tree.map(jnp.vdot, sensitivities, self.direction(model, value))
        return float(sum(jax.tree.leaves(terms)))

    def check(self, model: AnyModel, values: Float[np.ndarray, " A"], argument: str) -> None:
        """Raise an `InputError` unless the model accepts both ends of the range of `values`."""
        if self.name == "alpha":
            require(values.min() > 0, argument, values, "positive for alpha")
            return
        if self.put is None:
            self.read(model, None, argument)
        for end in (values.min(), values.max()):  # the model checks its own numbers
            check_numbers(self.set(model, None, end)[0])


@dataclass(frozen=True, eq=False)
class Axis:
    """A number of the setting and its values along one side of a table or of a diagram.

    `sweep` and `phase_diagram` take these axes:

        omega=values                        alpha, or a number of the model by name
        Axis("mixing[0,1]", values)         an entry of an array; that of a row of `mixing` rescales the rest of the row
        Axis("angle", values, put)          a number of the caller's own
        model=[first, second]               the models of a list, an axis "model" with their places as values

    `trace_branch` and `best_ridge` move one number and take its name, such as "omega" or "mixing[0,1]", or
    ``Axis("angle", value, put)`` with the value at which they begin. There `put` must be written with `jax.numpy`.

    Attributes:
        name: "alpha", a number of the model such as "sigma" or "mixing[0,1]", or the name of a caller's own number.
        values: its values.
        put: for a caller's own number, the function ``put(model, value)`` that returns the model with this value.
    """

    name: str
    values: Any
    put: Setter | None = None

    @property
    def parameter(self) -> Parameter:
        """The number."""
        return Parameter(self.name, self.put)

    def checked(self, model: AnyModel, order: str) -> Axis:
        """Return the axis with its values as an array.

        Args:
            order: a key of `ORDERS`.

        Raises:
            InputError: the values are empty, not finite, not in order or out of the model's range, or the name is
                unknown.
        """
        require_kind(self.name, "name", str, "the name of a number, for instance sigma")
        requirement, holds = ORDERS[order]
        values = array_of(self.values, self.name, f"one or more finite{requirement} values", holds)
        self.parameter.check(model, values, self.name)
        return replace(self, values=values)


def moved_number(given: str | Axis, model: AnyModel, argument: str) -> Parameter:
    """Return the number that a search moves, given by its name or as an `Axis` of the caller's own with one value.

    Raises:
        InputError: it is neither; the value is not one number; or `put` does not return a model like this one for a
            value that jax traces.
    """
    kinds = 'the name of a number, for instance sigma, or Axis("angle", value, put) for one of your own'
    require_kind(given, argument, (str, Axis), kinds)
    if isinstance(given, str):
        return Parameter(given)
    if given.put is None or not isinstance(given.name, str):
        raise InputError(argument, f"must be {kinds}, got an Axis without a function put or a name")
    value = float(as_number(given.values, argument, model.lam.dtype))
    number = Parameter(given.name, given.put, value)
    requirement = f"must have a function put(model, value) for {given.name} that is written with jax.numpy and returns"
    try:
        changed = jax.eval_shape(lambda value: number.set(model, None, value)[0], value)
    except (TypeError, jax.errors.JAXTypeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(argument, f"{requirement} a model, got {type(error).__name__}: {reason}") from error
    before, after = (
        (jax.tree.structure(m), [(a.shape, a.dtype) for a in jax.tree.leaves(m)])
        for m in (jax.eval_shape(lambda: model), changed)
    )
    if before != after:
        raise InputError(argument, f"{requirement} a model like its argument, got another {type(changed).__name__}")
    return number


# Orders of the values along an axis: how a message says it, and whether values are in this order.
ORDERS: dict[str, tuple[str, Callable[[Float[np.ndarray, " A"]], Any]]] = {
    "any": ("", lambda a: True),
    "monotonic": (", monotonic", lambda a: abs(np.sign(np.diff(a)).sum()) == a.size - 1),
    "increasing": (", increasing", lambda a: np.diff(a) > 0),
}


def names_of(model: Any, axes: Sequence[Axis], numbers: Mapping[str, Any]) -> list[str]:
    """Return the names of the axes that a caller gave, in their order: models, axes, and numbers with several values.

    Raises:
        InputError: one of the axes is not made by `Axis`.
    """
    for axis in axes:
        require_kind(axis, "axes", Axis, 'made by Axis, such as Axis("mixing[0,1]", [0.3, 0.4])')
    several = [name for name, values in numbers.items() if _is_several(values)]
    return [*([MODELS] if isinstance(model, (list, tuple)) else []), *(axis.name for axis in axes), *several]


def axes_of(
    model: AnyModel, axes: Sequence[Axis], numbers: Mapping[str, Any], order: str = "increasing"
) -> tuple[AnyModel, Any, list[Axis]]:
    """Return the model and the alpha of a caller, with the numbers that are fixed, and the axes in their order.

    Args:
        axes: axes that the caller made.
        numbers: values of named numbers: a single value fixes the number, several are an axis.
        order: order of the values along the axes, a key of `ORDERS`.

    Raises:
        InputError: an axis is none, see `Axis.checked`, or two have the same name; a fixed number is unknown, not one
            number, or out of the model's range.
    """
    if eqx.is_array(model.lam):
        require_precision(model.lam.dtype, "lam")
    names_of(model, axes, numbers)
    alpha, several = None, dict[str, Axis]()
    for name, values in numbers.items():
        if _is_several(values):
            several[name] = Axis(name, values)
        elif name == "alpha":
            alpha = values
        else:
            Parameter(name).read(model, None, name)
            model, _ = Parameter(name).set(model, None, as_number(values, name, model.lam.dtype))
            check_numbers(model)
    checked = [axis.checked(model, order) for axis in (*axes, *several.values())]
    names = [*(axis.name for axis in checked), *(name for name in numbers if name not in several)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(name, f"must be given once, got it twice among {', '.join(names)}")
    return model, alpha, checked


def is_number_of(model: Any, name: str) -> bool:
    """Return whether a name is that of alpha, of numbers of a model, or of an entry or a part of these."""
    field = name.partition("[")[0].partition(".")[0]
    return name == "alpha" or field != name or eqx.is_inexact_array(getattr(model, "__dict__", {}).get(field))


def scalar_parameters(model: Any) -> dict[str, float]:
    """Return the fields of a concrete model, and of its modules such as the penalty, that are one number, by name."""
    modules = {name: part for name, part in vars(model).items() if isinstance(part, eqx.Module)}
    fields = vars(model) | {f"{name}.{k}": a for name, part in modules.items() for k, a in vars(part).items()}
    return {name: float(a) for name, a in fields.items() if eqx.is_inexact_array(a) and not a.ndim}


def arrays_of(model: Any) -> dict[str, Float[np.ndarray, " ..."]]:
    """Return the fields of a concrete model that are arrays with axes, by name."""
    return {name: np.asarray(a) for name, a in vars(model).items() if eqx.is_inexact_array(a) and a.ndim}


def _is_several(values: Any) -> bool:
    """Return whether a number is given by several values, and not by one, or by a text."""
    return np.iterable(values) and not isinstance(values, str)


def _entry(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the field and the index of a name such as "sigma" or "mixing[0,1]"."""
    field, _, index = name.partition("[")
    return field, tuple(int(k) for k in index.removesuffix("]").split(",")) if index else ()
