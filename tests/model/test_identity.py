"""The text of the computations of a model."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.model import identity

MODEL = ta.DotProduct()


def layer(**methods):
    return type("Layer", (ta.DotProduct,), methods)(**vars(ta.DotProduct()))


def of_field(c):
    """A layer with a function among its fields, whose address differs from one call to the next."""
    return type("Scaled", (ta.DotProduct,), {
        "__annotations__": {"change": object},
        "change": eqx.field(static=True, default=None),
        "loss": lambda self, Z, Y: self.change(ta.DotProduct.loss(self, Z, Y)),
    })(**vars(MODEL), change=lambda a: a * c)  # fmt: skip


def of_array(c):
    weights = np.array([[c, 1.0], [2.0, 3.0]])
    return layer(loss=lambda self, Z, Y: jnp.sum(weights * (Z @ Y.T) ** 2))


def of_derivative(c):
    """The loss itself, with derivatives c times as large."""
    same = jax.custom_jvp(lambda a: a)
    same.defjvp(lambda primals, tangents: (primals[0], c * tangents[0]))
    return layer(loss=lambda self, Z, Y: same(ta.DotProduct.loss(self, Z, Y)))


def of_penalty(c):
    value, prox = lambda self, w: c * jnp.abs(w), lambda self, v, a: jnp.maximum(v - c * a, 0)
    return ta.DotProduct(penalty=type("Own", (ta.Penalty,), {"value": value, "prox": prox})())


CHANGES = {
    "loss": lambda c: layer(loss=lambda self, Z, Y: ta.DotProduct.loss(self, Z, Y) + c),
    "field": of_field,
    "array": of_array,
    "derivative": of_derivative,
    "law": lambda c: layer(law=lambda self: eqx.tree_at(lambda a: a.gamma, MODEL.law(), c * MODEL.law().gamma)),
    "target": lambda c: layer(target=lambda self, Y: c * Y @ Y.T),
    "student": lambda c: layer(student=lambda self, Z: c * Z @ Z.T),
    "scale": lambda c: layer(field_scale=c),
    "penalty": of_penalty,
}


MARKED = [pytest.param(name, marks=[pytest.mark.full] * (name in ("target", "student", "scale"))) for name in CHANGES]


@pytest.mark.parametrize("name", MARKED)
def test_all_that_a_model_computes_counts(name):
    text = identity(CHANGES[name](1.5))
    assert text != identity(CHANGES[name](2.5))
    assert name not in ("field", "array", "derivative") or text == identity(CHANGES[name](1.5))


def test_numbers_do_not_count_and_types_do():
    assert identity(MODEL) == identity(ta.DotProduct(sigma=0.7)) != identity(ta.DotProduct(dtype=jnp.float32))


@pytest.mark.full
def test_another_process_gives_the_same_text():
    code = (
        "import jax; jax.config.update('jax_enable_x64', True); import tiedattn_jax as ta;"
        "from tiedattn_jax.model.model import identity; print(identity(ta.DotProduct(rank=2)))"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert text == identity(ta.DotProduct(rank=2)) + "\n"
