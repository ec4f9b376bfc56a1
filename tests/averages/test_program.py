"""Compilation of the programs that average, and how they run in batches."""

import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tiedattn_jax as ta
from tiedattn_jax.averages import program as averaging
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.paths import Call, together


@pytest.fixture
def compiled(monkeypatch):
    """`program` of a function that sums weights, and the compiler options of each of its calls."""
    calls = []

    def filter_jit(fn, **options):
        def call(*args):
            calls.append(options)
            return fn(*args)

        return call

    monkeypatch.setattr(averaging, "eqx", type("", (), {"filter_jit": staticmethod(filter_jit)}))
    monkeypatch.setattr(averaging, "stored_program", filter_jit)
    return partial(averaging.program, lambda rule, scale: scale * jnp.sum(rule.stack.weight)), calls


def test_what_is_compiled_with_less_effort(compiled, model, monkeypatch):
    """Lines compile with less effort at top level, where the compiler has the option; single nodes would run slower."""
    total, calls = compiled[0](), compiled[1]
    monkeypatch.setattr(averaging, "_known", lambda: True)
    lines = ta.Lines(1, replicates=2).rule(model)
    single = ta.Sobol(16, replicates=2).rule(model)
    quick, default = {"compiler_options": {"xla_cpu_use_fusion_emitters": False}}, {}
    for rule, options in ((lines, quick), (single, default)):
        assert float(total(rule, 1.0)) == pytest.approx(2) and calls.pop() == options
    jax.jit(lambda scale: total(lines, scale))(1.0)
    assert calls.pop() == default
    jax.jit(lambda: total(lines, 1.0))()  # all arguments are concrete, but an outer program is being traced
    assert calls.pop() == default
    for transform in (jax.grad, lambda fn: lambda scale: jax.vmap(fn)(jnp.stack([scale]))):
        transform(lambda scale: total(lines, scale))(1.0)
        assert calls.pop() == default
    monkeypatch.setattr(averaging, "_known", lambda: False)
    total(lines, 1.0)
    assert calls.pop() == default


def test_of_several_threads_one_compiles(model):
    traced = []

    @averaging.program
    def total(replicate):
        traced.append(replicate)
        time.sleep(0.1)  # time for the other threads to arrive
        return jnp.sum(replicate.student)

    rule = ta.MonteCarlo(5, replicates=8).rule(model)
    run_one(together([Call(total, (rule.replicate(k),)) for k in range(8)]))
    assert len(traced) == 1


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_lanes_of_a_batch(monkeypatch, device):
    """On a CPU a batch is computed lane by lane, so that no lane runs the steps of another one."""
    monkeypatch.setattr(jax, "default_backend", lambda: device)

    def halvings(x):
        return lax.while_loop(lambda s: s[0] > 1, lambda s: (s[0] / 2, s[1] + 1), (x, 0))[1]

    batch = jax.vmap(averaging.lane_by_lane(halvings))
    np.testing.assert_array_equal(batch(jnp.array([1.0, 8.0])), [0, 3])
    assert ("scan" in str(jax.make_jaxpr(batch)(jnp.ones(2)))) == (device == "cpu")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators compute the lanes of a batch together")
def test_batches_of_equal_kind_are_traced_once():
    traced = []

    def fn(x, factor):
        traced.append(factor)
        return x * factor

    for x in (jnp.arange(3.0), 1 + jnp.arange(3.0)):
        np.testing.assert_array_equal(jax.vmap(lambda a: averaging.lane_by_lane(fn)(a, 2))(x), 2 * x)
    once = len(traced)
    np.testing.assert_array_equal(jax.vmap(lambda a: averaging.lane_by_lane(fn)(a, 3))(x), 3 * x)
    assert len(traced) == 2 * once and set(traced) == {2, 3}


def test_a_lane_inside_other_transformations():
    """Derivatives, nested batches and batches over a part of the arguments equal those of the function itself."""

    def fn(x, tree):
        return {"sum": jnp.sum(x * tree["a"] ** 2), "both": (jnp.sin(x), x * len(tree["b"]))}

    by_lane, x, tree = averaging.lane_by_lane(fn), jnp.arange(3.0), {"a": jnp.asarray(2.0), "b": "not an array"}
    xs = jnp.stack([x, x + 1])
    for transform in (
        lambda f: lambda x: f(x, tree)["sum"],
        lambda f: jax.vmap(lambda x: f(x, tree)["both"][0]),
        lambda f: jax.vmap(jax.vmap(lambda a: f(a, tree)["sum"])),
        lambda f: jax.vmap(lambda a: f(x, tree | {"a": a[0]})["sum"]),
        lambda f: jax.vmap(jax.grad(lambda x: f(x, tree)["sum"])),
        lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(lambda a: f(a, tree)["sum"])(x) ** 2)),
        lambda f: jax.jacfwd(jax.jacrev(lambda x: f(x**2, tree)["both"][0])),
        lambda f: jax.jit(jax.jacrev(jax.jacrev(lambda x: f(x**2, tree)["both"][0]))),
    ):
        np.testing.assert_allclose(transform(by_lane)(xs), transform(fn)(xs), rtol=1e-12)


def test_an_option_that_the_compiler_does_not_know(monkeypatch):
    averaging._known.cache_clear()
    monkeypatch.setattr(averaging, "_QUICK", {"xla_no_such_option": True})
    assert not averaging._known()
    monkeypatch.undo()
    averaging._known.cache_clear()
    try:
        eqx.filter_jit(lambda: 0, compiler_options={"xla_cpu_use_fusion_emitters": False})()
        is_known = True
    except jax.errors.JaxRuntimeError:
        is_known = False
    assert averaging._known() == (jax.default_backend() == "cpu" and is_known)
    averaging._known.cache_clear()
