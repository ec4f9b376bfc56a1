"""How programs that average are compiled."""

import os
import threading
import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
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
    monkeypatch.setattr(how, "kept", filter_jit)
    return partial(how.program, lambda rule, scale: scale * jnp.sum(rule.stack.weight)), seen


@pytest.mark.parametrize("nested", [True, False])
def test_what_is_compiled_with_less_effort(compiled, model, monkeypatch, nested):
    """Lines, at top level, where the compiler has the option; single nodes would run slower. Loops around a solve."""
    total, seen = compiled[0](nested=nested), compiled[1]
    monkeypatch.setattr(how, "_known", lambda: True)
    lines = ta.line_nodes(model, 1, replicates=2)
    single = ta.sobol_nodes(model, 4, replicates=2)
    emitters, all_of_it = {"xla_cpu_use_fusion_emitters": False}, {}
    loops = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"} if nested else {}
    for rule, options in ((lines, emitters | loops), (single, loops)):
        assert float(total(rule, 1.0)) == pytest.approx(2) and seen.pop() == {"compiler_options": options}
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


def test_replicates_one_by_one(model):
    """Each with what is its own, in their order; in threads, but where a context of jax would be lost there."""
    rule, scale = ta.monte_carlo_nodes(model, 5, replicates=3), jnp.array([1.0, 10.0, 100.0])
    threads = set()

    def total(nodes, scale):
        threads.add(threading.get_ident())
        return {"sum": scale * jnp.sum(nodes.stack.student, (1, 2, 3)), "one": nodes.stack.weight[:, 0]}

    whole, found = total(rule, scale), how.over_replicates(total, rule, scale)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    assert found["sum"].shape == (3,) and (len(threads) > 1 or os.cpu_count() == 1)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda s: how.over_replicates(total, rule, s))(scale), whole)
    threads.clear()
    with jax.debug_infs(True):
        how.over_replicates(total, rule, scale)
    assert threads == {threading.get_ident()}
    assert how.at_once(str, []) == [] and how.at_once(str, [1, 2]) == ["1", "2"]


def test_a_failure_ends_the_rest():
    """Of many calls those are waited for that are in progress: an interrupt, too, ends soon."""
    begun = []

    def fail(item):
        begun.append(item)
        time.sleep(0.05)
        raise ValueError

    with pytest.raises(ValueError):
        how.at_once(fail, [jnp.zeros(1)] * 50 * (os.cpu_count() or 1))
    assert len(begun) <= 5 * (os.cpu_count() or 1)


def test_of_several_threads_one_compiles(model):
    traced = []

    @how.program
    def total(nodes, own):
        traced.append(nodes)
        time.sleep(0.1)  # for the others to come
        return jnp.sum(nodes.stack.student, (1, 2, 3))

    how.over_replicates(total, ta.monte_carlo_nodes(model, 5, replicates=8), ())
    assert len(traced) == 1


def test_an_option_that_the_compiler_does_not_know(monkeypatch):
    for name in ("_QUICK", "_AS_WRITTEN"):
        how._known.cache_clear()
        monkeypatch.setattr(how, name, {"xla_no_such_option": True})
        assert not how._known()
        monkeypatch.undo()
    how._known.cache_clear()
    assert how._known() == (jax.default_backend() == "cpu" and _works())
    how._known.cache_clear()


def _works():
    try:
        eqx.filter_jit(lambda: 0, compiler_options={"xla_cpu_use_fusion_emitters": False})()
    except jax.errors.JaxRuntimeError:
        return False
    return True
