"""What the functions of this wing are given: checked before anything is compiled."""

from __future__ import annotations

from ..averages.default import default_nodes
from ..averages.rule import Rule, check_rule
from ..averages.sizes import REPLICATES, SIZES
from ..errors import InputError, is_concrete, is_tracing, require_kind
from ..model import Model, check
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
    even: bool = True,
) -> tuple[Rule, Settings]:
    """The averaging rule and the tolerances that a caller gave for a model, or the defaults.

    Args:
        traced: whether the caller can work under a jax transformation.
        even: whether the model's loss must be even, as for branches by name.

    Raises:
        InputError: one of the three is of another kind, or the model has no values where it must, or fails its `check`.
    """
    require_kind(model, "model", Model, "a Model such as dot_product()")
    require_kind(settings, "settings", (Settings, type(None)), "Settings, for instance Settings(tol=1e-4)")
    if not traced and (is_tracing() or not is_concrete(model)):
        raise InputError("model", "must have concrete numbers here, got one under a jax transformation such as jit")
    if is_concrete(model):
        check(model, even=even)
    rule = default_nodes(model, size, replicates=replicates) if nodes is None else nodes
    check_rule(rule, model)
    return rule, settings or default or Settings()
