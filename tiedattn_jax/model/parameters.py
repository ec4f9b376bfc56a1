"""Named numbers of a setting, which is a model and an alpha.

A number is "alpha", a field of the model ("sigma"), an entry of a field ("mixing[0,1]"), a number of the penalty
("penalty.strength"), or a caller's own. Boundaries, paths and grids use a `Parameter` to name the number that they
change.

Planes of settings: a model at every cell of a grid of two numbers, and results over such a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from ..base.arrays import AnyArray, Number
from ..base.errors import InputError, array_of, require, require_takes
from ..base.report import Result
from .checks import check_numbers
from .model import Model

Setter = Callable[[Model, Number], Model]
Values: TypeAlias = Real[AnyArray, " A"] | Sequence[Number] | Number
AxisLike: TypeAlias = Values | tuple[str, Values] | tuple[str, Values, Setter]  # what `axis_of` takes
Alpha = TypeVar("Alpha", bound=Number | None)


@dataclass(frozen=True)
class Parameter:
    """One named number of a setting.

    Attributes:
        name: "alpha", a scalar field of the model or of its penalty, or an entry such as "mixing[0,1]".
        put: a caller's own function ``put(model, value)`` that returns the model with this value, or None.
    """

    name: str
    put: Setter | None = None

    def set(self, model: Model, alpha: Alpha, value: Number) -> tuple[Model, Alpha | Float[Array, ""]]:
        """Return the setting with this number at another value.

        If the number is an entry of `mixing`, the other entries of its row are rescaled so that the row sums to one.
        """
        if self.put is not None:
            return self.put(model, value), alpha
        value = jnp.asarray(value, model.lam.dtype)
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

    def read(self, model: Model, alpha: Number | None, argument: str) -> float:
        """Return the value of the number in a concrete setting.

        Args:
            argument: the caller's argument that named the number; errors say it.

        Raises:
            InputError: the setting has no such number, or the number is a caller's own.
        """
        if self.name == "alpha":
            assert alpha is not None
            return float(alpha)
        try:
            field, index = _entry(self.name)
            value = attrgetter(field)(model)
            value = np.asarray(value)[index] if eqx.is_inexact_array(value) else np.nan
        except (AttributeError, ValueError, IndexError):
            value = np.nan
        if np.ndim(value) or not np.isfinite(value):
            names = ", ".join(("alpha", *scalar_parameters(model)))
            requirement = f"one of {names}, or an entry like mixing[0,1]"
            raise InputError(argument, f"must name {requirement}, got {argument}={self.name!r}")
        return float(value)

    def direction(self, model: Model, value: Number) -> Model:
        """Return d model / d value, for a number of the model."""
        unit = jnp.ones((), model.lam.dtype)
        return jax.jvp(lambda v: self.set(model, None, v)[0], (value * unit,), (unit,))[1]

    def slope(self, sensitivities: Model, model: Model, value: Number) -> float:
        """Return the derivative in this number of what has the given derivatives in all numbers of the model."""
        terms = jax.tree.map(jnp.vdot, sensitivities, self.direction(model, value))
        return float(sum(jax.tree.leaves(terms)))

    def check(self, model: Model, values: Float[np.ndarray, " A"], argument: str) -> None:
        """Raise an `InputError` unless the model accepts both ends of the range of `values`."""
        if self.name == "alpha":
            require(values.min() > 0, argument, values, "positive for alpha")
            return
        if self.put is None:
            self.read(model, None, argument)
        for end in (values.min(), values.max()):  # the model checks its own numbers
            check_numbers(self.set(model, None, end)[0])


@dataclass(frozen=True)
class Axis:
    """A parameter and its increasing values along one side of a grid."""

    parameter: Parameter
    values: Float[np.ndarray, " A"]


def axis_of(spec: AxisLike, default: str, argument: str, model: Model) -> Axis:
    """Return the axis that a caller gave: values of the parameter `default`, (name, values), or (name, values, put).

    Raises:
        InputError: the values are empty, not finite, not increasing or out of the model's range, or the name is
            unknown.
    """
    parameter, values = Parameter(default), spec
    if isinstance(spec, str):
        raise InputError(argument, f'must come with values, such as ("{spec}", [0.2, 0.3]), got {argument}={spec!r}')
    if isinstance(spec, tuple) and spec and isinstance(spec[0], str):
        if len(spec) not in (2, 3):
            raise InputError(argument, f"must be (name, values) or (name, values, put), got {argument}={spec!r}")
        name, values, *setter = spec
        parameter = Parameter(name, *setter)
    sequence = values if np.iterable(values) else [values]
    values = array_of(sequence, argument, "one or more finite, increasing values", lambda a: np.diff(a) > 0)
    parameter.check(model, values, argument)
    return Axis(parameter, values)


def scalar_parameters(model: Model) -> dict[str, float]:
    """Return the fields of a concrete model, and of its penalty, that are a single number, by name."""
    penalty = {} if model.penalty is None else {f"penalty.{name}": a for name, a in vars(model.penalty).items()}
    fields = vars(model) | penalty
    return {name: float(a) for name, a in fields.items() if eqx.is_inexact_array(a) and not a.ndim}


def arrays_of(model: Model) -> dict[str, Float[np.ndarray, " ..."]]:
    """Return the fields of a concrete model that are arrays with axes, by name."""
    return {name: np.asarray(a) for name, a in vars(model).items() if eqx.is_inexact_array(a) and a.ndim}


def _entry(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the field and the index of a name such as "sigma" or "mixing[0,1]"."""
    field, _, index = name.partition("[")
    return field, tuple(int(k) for k in index.removesuffix("]").split(",")) if index else ()


class PlaneResult(Result):
    """A result over two numbers, whose arrays lead with the axes (len(y), len(x)).

    Attributes:
        x, y: values along the axes.
        names: names of the two numbers.
    """

    x: Float[np.ndarray, " X"]
    y: Float[np.ndarray, " Y"]
    names: tuple[str, str] = eqx.field(static=True)
    batch_probe = "y", 1


def models_of_plane(
    model: Callable[[float, float], Model], x: Any, y: Any, names: tuple[str, str]
) -> tuple[Float[np.ndarray, " X"], Float[np.ndarray, " Y"], list[Model]]:
    """Return the values along both axes, and the models of all cells, row after row.

    Args:
        model: function of a value of x and a value of y that returns a model.
        x, y: values of the two numbers.
        names: names of the two numbers.

    Raises:
        InputError: x or y is not increasing or has fewer than two values; the names are not two different ones; model
            is not a function of two numbers that returns a Model.
    """
    requirement = "two increasing numbers or more"
    grid_x, grid_y = (
        array_of(values, name, requirement, lambda a: a.size > 1 and np.all(np.diff(a) > 0))
        for values, name in ((x, "x"), (y, "y"))
    )
    if not (isinstance(names, tuple) and len(set(names)) == 2 == len(names) and all(isinstance(n, str) for n in names)):
        raise InputError("names", f"must be two different names, got names={names!r}")
    require_takes(model, "model", ("x", "y"))
    models = [model(a, b) for b in grid_y.tolist() for a in grid_x.tolist()]
    for result in models:
        if not isinstance(result, Model):
            raise InputError("model", f"must be a function that returns a Model, got one that returns {type(result)}")
    return grid_x, grid_y, models
