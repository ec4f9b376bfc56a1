"""The text of the computations of a model."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.model import identity


def scaled(factor, **numbers):
    """A layer with a function among its fields, whose address differs from one call to the next."""
    fields = {**vars(ta.DotProduct(**numbers)), "change": lambda a: a * factor}
    return type("Scaled", (ta.DotProduct,), {
        "__annotations__": {"change": object},
        "change": eqx.field(static=True, default=None),
        "loss": lambda self, Z, Y: self.change(ta.DotProduct.loss(self, Z, Y)),
    })(**fields)  # fmt: skip


def test_functions_count_by_what_they_compute():
    assert identity(scaled(2.0)) == identity(scaled(2.0)) == identity(scaled(2.0, sigma=0.7))
    assert identity(scaled(2.0)) != identity(scaled(3.0))
    assert identity(ta.DotProduct()) != identity(ta.DotProduct(dtype=jnp.float32))


def with_methods(**methods):
    return type("Layer", (ta.DotProduct,), methods)(**vars(ta.DotProduct()))


def of_array(c):
    weights = jnp.array([[c, 1.0], [2.0, 3.0]])
    return with_methods(loss=lambda self, Z, Y: jnp.sum(weights * (Z @ Y.T) ** 2))


def of_law(c):
    change = lambda law: eqx.tree_at(lambda a: a.gamma, law, c * law.gamma)  # noqa: E731
    return with_methods(law=lambda self: change(ta.DotProduct.law(self)))


def of_penalty(c):
    methods = {
        "value": lambda self, w: c * jnp.abs(w),
        "prox": lambda self, v, a: jnp.sign(v) * jnp.maximum(jnp.abs(v) - c * a, 0),
    }
    return ta.DotProduct(penalty=type("Own", (ta.Penalty,), methods)())


def with_derivative(factor):
    """The identity with `factor` as its derivative, which only the derivatives of a loss show."""
    function = jax.custom_jvp(lambda a: a)
    function.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
    return function


CHANGES = {
    "loss": lambda c: with_methods(loss=lambda self, Z, Y: ta.DotProduct.loss(self, Z, Y) + c),
    "array": of_array,
    "derivative": lambda c: with_methods(loss=lambda self, Z, Y: with_derivative(c)(ta.DotProduct.loss(self, Z, Y))),
    "law": of_law,
    "target": lambda c: with_methods(target=lambda self, Y: c * Y @ Y.T),
    "student": lambda c: with_methods(student=lambda self, Z: c * Z @ Z.T),
    "scale": lambda c: with_methods(field_scale=c),
    "penalty": of_penalty,
}


@pytest.mark.parametrize("name", CHANGES)
def test_all_that_a_model_computes_counts(name):
    texts = [identity(CHANGES[name](c)) for c in (1.5, 1.5, 2.5)]
    assert texts[0] == texts[1] != texts[2]


def test_another_process_gives_the_same_text():
    code = """
import jax
jax.config.update("jax_enable_x64", True)
import tiedattn_jax as ta
from tiedattn_jax.model.model import identity
print(identity(ta.DotProduct(rank=2)))
"""
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert text == identity(ta.DotProduct(rank=2)) + "\n"
