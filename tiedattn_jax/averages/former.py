"""Functions that make a rule at once, by the names that they had before recipes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..model.model import Model
from .recipes import SIZES, GaussHermite, Lines, MonteCarlo, Recipe, Sobol, default_recipe
from .rules import REPLICATES, Rule


def _maker(recipe: type[Recipe], name: str) -> Callable[..., Rule]:
    def make(model: Model, *args: Any, **options: Any) -> Rule:
        return recipe(*args, **options).rule(model)

    model, *_ = inspect.signature(make).parameters.values()
    make.__signature__ = inspect.Signature([model, *inspect.signature(recipe).parameters.values()])  # type: ignore[attr-defined]
    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"Return ``{recipe.__name__}(...).rule(model)``."
    return make


line_nodes = _maker(Lines, "line_nodes")
sobol_nodes = _maker(Sobol, "sobol_nodes")
gauss_hermite_nodes = _maker(GaussHermite, "gauss_hermite_nodes")
monte_carlo_nodes = _maker(MonteCarlo, "monte_carlo_nodes")


def default_nodes(
    model: Model, n: int = SIZES["solve"], *, seed: int = 0, replicates: int = REPLICATES, block: int | None = None
) -> Rule:
    """Return ``default_recipe(model, n, ...).rule(model)``."""
    return default_recipe(model, n, seed=seed, replicates=replicates, block=block).rule(model)
