"""Every product of matrices has the precision of its dtype, also on GPUs and TPUs, which round factors by default.

jax writes the precision into a program while it traces it, so the tests read the text of the programs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import export
from lowering import products

import tiedattn_jax as ta
from tiedattn_jax import counting
from tiedattn_jax.base.arrays import precise

PLATFORMS = ("cpu", "cuda", "tpu")
D = 24


def text_of(fn, *args):
    return export.export(jax.jit(fn), platforms=PLATFORMS)(*args).mlir_module()


def model_and_data(kind="rank two", **options):
    tied = {"rank": 2, "teacher": [[1.0, 0.3], [0.3, 1.0]]} if kind == "rank two" else {}
    model = ta.DotProduct(**tied, **options)
    return model, ta.sample_data(model, D, 2.0, jax.random.key(0))


def heldout(scale, exact=False):
    model, data = model_and_data()
    return ta.finite.heldout_error(model, data, scale * data.teacher, jax.random.key(1), sentences=8, exact=exact).value


def trained(scale, optimizer, kind="rank two", values=False, **options):
    model, data = model_and_data(kind)
    value = {"value": model.lam} if values else {}
    return ta.train(model, data, scale * data.teacher, optimizer=optimizer, steps=3, **value, **options).train_loss


def message_passing(scale, **options):
    model, data = model_and_data(**options)
    return ta.gamp(model, data, scale * data.teacher, steps=3).train_loss


def from_sentences(scale):
    """Numbers that are computed outside of programs, at top level."""
    model, fresh = model_and_data("plain")
    known = {"teacher": scale * fresh.teacher, "encodings": fresh.encodings}
    data = ta.Data.from_sentences(fresh.inputs(), jnp.ones_like(fresh.inputs()), **known)
    Z = jnp.ones((2, 1), scale.dtype)
    numbers = data.overlaps(scale * data.teacher), data.teacher_gram, data.labels, data.rho, data.y
    return numbers, model.rho, model.trace, model.student(Z), model.target(Z), model.loss(Z, Z)


CALLS = {
    "data": lambda scale: model_and_data()[1].y * scale,
    "data of sentences": from_sentences,
    "linear_baseline": lambda ridge: ta.finite.linear_baseline(model_and_data("plain")[1], ridge=ridge).train_error,
    "heldout_error": heldout,
}
DEAR = {
    "gamp": message_passing,
    "gamp with a penalty": partial(message_passing, penalty=ta.L1(0.01)),
    "train gd": partial(trained, optimizer="gd"),
    "train adam": partial(trained, optimizer="adam", exact=True),
    "train lbfgs": partial(trained, optimizer="lbfgs"),
    "train with values adam": partial(trained, optimizer="adam", kind="plain", values=True),
    "train with values lbfgs": partial(trained, optimizer="lbfgs", kind="plain", values=True),
    "heldout_error exact": partial(heldout, exact=True),
}


@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(name, marks=pytest.mark.full) for name in DEAR)])
def test_products_in_single_precision_are_not_rounded(name):  # calls of the theory are in test_compiling
    with jax.enable_x64(False):
        all_products, rounded = products(text_of((CALLS | DEAR)[name], jnp.float32(1.0)))
    assert all_products and not rounded


@pytest.mark.full
def test_products_of_the_theory_with_a_penalty_are_not_rounded():
    """Products are not rounded in the gradient with a penalty, where jax traces functions' own derivative rules."""

    def theta(sigma):
        model = ta.DotProduct(sigma=sigma, penalty=ta.L1(0.01))
        return ta.solve(model, 2.0, "semantic", ta.Lines(3, replicates=1).rule(model)).theta.sum()

    with jax.enable_x64(False):
        all_products, rounded = products(text_of(jax.value_and_grad(theta), jnp.float32(0.5)))
    assert all_products and not rounded


@pytest.mark.full
def test_products_of_the_transformer_are_not_rounded(tmp_path):
    """Products are not rounded in any program that training the transformer compiles.

    The sizes occur in no other test, because jax would not compile the same programs again.
    """
    data = counting.sample(jax.random.key(0), 11, length=3, tokens=5)
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        with jax.enable_x64(False):
            trained = counting.train(jax.random.split(jax.random.key(1), 2), data, width=4, hidden=7, epochs=1, batch=3)
            counting.attention(jax.tree.map(lambda a: a[0], trained.weights), data.test)
    finally:
        jax.config.update("jax_dump_ir_to", "")
    all_products, rounded = products("\n".join(path.read_text() for path in tmp_path.rglob("*.mlir")))
    assert len(all_products) > 10 and not rounded


def test_a_product_is_rounded_unless_it_is_precise():
    """A product is rounded unless it is `precise`, so the tests above can fail.

    The decorator changes nothing outside of its function.
    """

    def square(a):
        return a @ a

    eye = jnp.eye(3, dtype=jnp.float32)
    all_products, rounded = products(text_of(square, eye))
    assert all_products and all_products == rounded
    all_products, rounded = products(text_of(lambda a: (precise(square)(a), square(a)), eye))
    assert len(all_products) == 2 * len(rounded) > 0
