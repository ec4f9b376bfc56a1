"""Which averaging rule is used unless another is given."""

from __future__ import annotations

from ..model import Model
from .lines import line_nodes
from .nodes import sobol_nodes
from .rule import Rule, check_counts
from .sizes import REPLICATES, SIZES


def default_nodes(
    model: Model,
    n: int = SIZES["solve"],
    *,
    seed: int = 0,
    replicates: int = REPLICATES,
    block: int | None = None,
) -> Rule:
    """The rule that is used unless another is given, of about `n` nodes in a replicate.

    `line_nodes` of order 5 at least for a student and a teacher of two fields each, `sobol_nodes` for other models.

    Raises:
        InputError: a count that is not a positive integer; for other models, `n` not a power of two.
    """
    L, r, t = model.shape
    check_counts(block, n=n, replicates=replicates, seed=seed)
    if not L * r == L * t == 2:
        return sobol_nodes(model, n, seed=seed, replicates=replicates, block=block)
    order = max(k for k in range(5, 64, 2) if k == 5 or 1.5 * k**3 * (k + 15) <= n)
    return line_nodes(model, order, seed=seed, replicates=replicates, block=block)
