"""Default averaging rules: of functions of the proximal operator, and of smooth functions."""

from __future__ import annotations

import math
from typing import Any

from ..base.errors import require
from ..model.model import Model
from .lines import MAX_NODES, line_nodes
from .nodes import gauss_hermite_nodes, sobol_nodes
from .rules import REPLICATES, SIZES, Rule, check_arguments

_GRID_FIELDS = 4


def default_nodes(
    model: Model, n: int = SIZES["solve"], *, seed: int = 0, replicates: int = REPLICATES, block: int | None = None
) -> Rule:
    """Return the default rule, with about `n` nodes in a replicate.

    It is `line_nodes` of order 5 or more if student and teacher have two fields each and the loss has no kinks, and
    `sobol_nodes` for other models, with the power of two that is nearest to `n`.

    Raises:
        InputError: as in these two functions, or if `n` is above 2^24 for lines.
    """
    check_arguments(model, block, n=n, replicates=replicates, seed=seed)
    L, (r, t) = model.shape[0], model.columns
    if model.nonsmooth or not L * r == L * t == 2:
        power = 2 ** round(math.log2(n))  # Sobol points come in powers of two
        return sobol_nodes(model, power, seed=seed, replicates=replicates, block=block)
    require(n <= MAX_NODES, "n", n, f"at most {MAX_NODES} on lines: use sobol_nodes for more")
    order = max(k for k in range(5, 64, 2) if k == 5 or 1.5 * k**3 * (k + 15) <= n)
    return line_nodes(model, order, seed=seed, replicates=replicates, block=block)


def smooth_nodes(model: Model, order: int, n: int, *, one_block: bool = False, **options: Any) -> Rule:
    """Return averages of smooth functions: a tensor grid of `order` for up to four fields, else `n` Sobol points.

    Args:
        one_block: whether all nodes are evaluated at once.
        options: further arguments of `gauss_hermite_nodes`.
    """
    fields = model.shape[0] * sum(model.columns)
    if fields > _GRID_FIELDS:
        return sobol_nodes(model, n, block=n if one_block else None)
    return gauss_hermite_nodes(model, order, block=order**fields if one_block else None, **options)
