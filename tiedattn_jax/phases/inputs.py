"""Checks and defaults of the arguments of this subpackage, before anything is compiled."""

from __future__ import annotations

from jax import lax
from jaxtyping import PyTree

from ..averages.recipes import SIZES, AnyNodes, default_recipe, make_rule
from ..averages.rules import REPLICATES, Rule
from ..base.errors import InputError, is_concrete, is_tracing, require_kind
from ..base.results import Settings
from ..model.checks import check
from ..model.model import Model


def prepared(
    model: Model,
    nodes: AnyNodes,
    settings: Settings | None,
    default: Settings | None = None,
    *,
    size: int = SIZES["solve"],
    replicates: int = REPLICATES,
    even: bool = True,
) -> tuple[Rule, Settings]:
    """Check a model; return the averaging rule and the tolerances that the caller gave, or the defaults.

    Args:
        even: whether the model's loss must be even, as the named branches require.

    Raises:
        InputError: one of the three is of the wrong kind, or the model is traced by jax or fails its `check`.
    """
    require_kind(model, "model", Model, "a Model such as DotProduct()")
    require_kind(settings, "settings", (Settings, type(None)), "Settings, for instance Settings(tol=1e-4)")
    check_top_level(model)
    check(lax.stop_gradient(model), even=even)
    rule = make_rule(nodes, model, default_recipe(model, size, replicates=replicates))
    return rule, settings or default or Settings()


def check_top_level(*values: PyTree) -> None:
    """Raise an `InputError` if numbers are traced: searches over settings are Python loops and need their values.

    `jax.grad` and `jax.jvp` of a search work, because its sensitivities are known when it returns.
    """
    if is_tracing() or not is_concrete(lax.stop_gradient(values)):
        text = "must have concrete numbers here, got one under a jax transformation such as jit or vmap"
        raise InputError("model", f"{text}: call this function outside of it, or sweep for many models at once")
