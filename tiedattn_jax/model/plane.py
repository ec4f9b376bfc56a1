"""Planes of settings: a model at every cell of a grid of two numbers, and results over such a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float

from ..base.errors import InputError, array_of, require_takes
from ..base.results import Result
from .model import Model


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
