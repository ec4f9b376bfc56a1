"""What the functions of this wing are given: checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..averages.default import default_nodes
from ..averages.rule import Rule, check_rule
from ..averages.sizes import REPLICATES, SIZES
from ..errors import InputError, is_concrete, require_kind
from ..model import Model
from ..results import Settings


def prepared(
    model: Model,
    nodes: Rule | None,
    settings: Settings | None,
    default: Settings | None = None,
    *,
    size: int = SIZES["solve"],
    replicates: int = REPLICATES,
    traced: bool = False,
) -> tuple[Rule, Settings]:
    """The averaging rule and the tolerances that a caller gave for a model, or the defaults.

    Args:
        traced: whether the caller can work under a jax transformation.

    Raises:
        InputError: one of the three is of another kind, or the model has no values where it must.
    """
    require_kind(model, "model", Model, "a Model such as dot_product()")
    require_kind(settings, "settings", (Settings, type(None)), "Settings, for instance Settings(tol=1e-4)")
    if not (traced or is_concrete(model)):
        raise InputError("model", "must have concrete numbers here, got one under a jax transformation such as jit")
    rule = default_nodes(model, size, replicates=replicates) if nodes is None else nodes
    check_rule(rule, model)
    return rule, settings or default or Settings()


def array_of(
    values: Any, argument: str, want: str, holds: Callable[[np.ndarray], Any] = lambda a: True, ndim: int = 1
) -> np.ndarray:
    """Finite numbers as an array that is not empty.

    Raises:
        InputError: they are none, or something else that is wanted does not hold of them.
    """
    try:
        array = np.asarray(values, float)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim != ndim or not array.size or not np.all(np.isfinite(array)) or not np.all(holds(array)):
        raise InputError(argument, f"must be {want}, got {argument}={values!r}")
    return array
