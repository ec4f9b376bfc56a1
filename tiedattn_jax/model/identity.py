"""A text of the computations of a model: it is the same in every process, and tells losses of one name apart."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.store import without_addresses
from .model import Model


def identity(model: Model) -> str:
    """Return the compiled text (StableHLO) of everything that a model computes, for numbers of these shapes and dtypes.

    The text contains the loss with its derivatives, the law, target, student and penalty, with all constants
    in them. It does not contain the numbers of the model. It may change with the version of jax.
    """
    statics = []
    arrays, structure = eqx.partition(model, eqx.is_array)

    def computed(arrays: Any, Z: Float[Array, "L r"], fields: Float[Array, "L columns"]) -> Any:
        model = eqx.combine(arrays, structure)
        law = model.law()
        given = model if law.sentences is None else model.condition_on(law.sentences.kinds[0])
        labels = given.label(fields)
        values: dict[str, Any] = {
            "law": law,
            "loss": [f(lambda *x: given.loss(x[0], *given.label(x[1])), (0, 1))(Z, fields) for f in _DERIVATIVES],
            "scale": given.field_scale,
            "starts": [given.start_columns(combined) for combined in (False, True)],
            "generators": given.generators,
        }
        for name, arguments in {"target": labels, "student": (Z,)}.items():
            if given.provides(name):
                values[name] = getattr(given, name)(*arguments)
        if given.penalty is not None:
            w = Z.ravel()
            values["penalty"] = given.penalty.value(w), given.penalty.prox(w, jnp.ones_like(w)), given.penalty.kinks
        dynamic, static = eqx.partition(values, lambda a: eqx.is_array_like(a))
        statics.append((model.shape, model.nonsmooth, jax.tree.structure(values), jax.tree.leaves(static)))
        return dynamic

    fields = [jax.ShapeDtypeStruct((model.shape[0], k), model.lam.dtype) for k in model.columns]
    lowered = jax.jit(computed).trace(arrays, *fields).lower(lowering_platforms=("cpu",))
    return f"{type(model).__qualname__} {without_addresses(statics[0])} {lowered.as_text()}"


_DERIVATIVES = (lambda fn, argnums: fn, jax.grad, jax.hessian)  # custom derivatives are in the text of these only
