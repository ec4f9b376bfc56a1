"""How programs that average are compiled."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages import program as how


@pytest.fixture
def compiled(monkeypatch):
    """`program` of a function that sums weights, and with which options it was called."""
    seen = []

    def filter_jit(fn, **options):
        def call(*args):
            seen.append(options)
            return fn(*args)

        return call

    monkeypatch.setattr(how, "eqx", type("", (), {"filter_jit": staticmethod(filter_jit)}))
    return how.program(lambda rule, scale: scale * jnp.sum(rule.stack.weight)), seen


def test_what_is_compiled_with_less_effort(compiled, model, monkeypatch):
    """Lines in several blocks, at top level, where the compiler has the option; others would run slower."""
    total, seen = compiled
    monkeypatch.setattr(how, "_known", lambda: True)
    lines, few = (ta.line_nodes(model, 1, replicates=2, block=block) for block in (32, 2**12))
    single = ta.sobol_nodes(model, 4, replicates=2)
    less, all_of_it = {"compiler_options": {"xla_cpu_use_fusion_emitters": False}}, {}
    for rule, options in ((lines, less), (few, all_of_it), (single, all_of_it)):
        assert float(total(rule, 1.0)) == pytest.approx(2) and seen.pop() == options
    jax.jit(lambda scale: total(lines, scale))(1.0)
    assert seen.pop() == all_of_it
    jax.jit(lambda: total(lines, 1.0))()  # every argument has its value, but a program around it is being traced
    assert seen.pop() == all_of_it
    for transform in (jax.grad, lambda fn: lambda scale: jax.vmap(fn)(jnp.stack([scale]))):
        transform(lambda scale: total(lines, scale))(1.0)
        assert seen.pop() == all_of_it
    monkeypatch.setattr(how, "_known", lambda: False)
    total(lines, 1.0)
    assert seen.pop() == all_of_it


def test_an_option_that_the_compiler_does_not_know(monkeypatch):
    how._known.cache_clear()
    monkeypatch.setattr(how, "_QUICK", {"xla_no_such_option": True})
    assert not how._known()
    how._known.cache_clear()
    monkeypatch.undo()
    assert how._known() == (jax.default_backend() == "cpu" and _works())
    how._known.cache_clear()


def _works():
    try:
        eqx.filter_jit(lambda: 0, compiler_options={"xla_cpu_use_fusion_emitters": False})()
    except jax.errors.JaxRuntimeError:
        return False
    return True
