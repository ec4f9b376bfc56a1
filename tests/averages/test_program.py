"""Compilation of the programs that average, and how they run in batches."""

import gc
import time
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tiedattn_jax as ta
from tiedattn_jax.averages import program as averaging
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.paths import Call, together


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


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators compute the entries of a batch together")
def test_entries_of_a_batch_take_their_own_steps_and_are_traced_once():
    traced = []

    def halvings(x, most):
        traced.append(most)
        return lax.while_loop(lambda s: (s[0] > 1) & (s[1] < most), lambda s: (s[0] / 2, s[1] + 1), (x, 0))[1]

    def steps(x, most):
        return jax.vmap(lambda a: averaging.entry_by_entry(halvings)(a, most))(jnp.array(x))

    np.testing.assert_array_equal(steps([1.0, 8.0], 5), [0, 3])
    once = len(traced)
    np.testing.assert_array_equal(steps([2.0, 4.0], 5), [1, 2])
    assert len(traced) == once
    np.testing.assert_array_equal(steps([2.0, 4.0], 1), [1, 1])
    assert len(traced) == 2 * once and set(traced) == {5, 1}


def test_entry_by_entry_inside_other_transformations():
    """Derivatives, nested batches and batches over a part of the arguments equal those of the function itself."""

    def fn(x, tree):
        return {"sum": jnp.sum(x * tree["a"] ** 2), "both": (jnp.sin(x), x * len(tree["b"]))}

    by_entry, x, tree = averaging.entry_by_entry(fn), jnp.arange(3.0), {"a": jnp.asarray(2.0), "b": "not an array"}
    xs = jnp.stack([x, x + 1])

    @partial(jax.jit, static_argnums=0)
    def results(f, xs):
        return [
            f(xs, tree)["sum"],
            jax.vmap(lambda x: f(x, tree)["both"][0])(xs),
            jax.vmap(jax.vmap(lambda a: f(a, tree)["sum"]))(xs),
            jax.vmap(lambda a: f(x, tree | {"a": a[0]})["sum"])(xs),
            jax.vmap(jax.grad(lambda x: f(x, tree)["sum"]))(xs),
            jax.grad(lambda x: jnp.sum(jax.vmap(lambda a: f(a, tree)["sum"])(x) ** 2))(xs),
            jax.jacfwd(jax.jacrev(lambda x: f(x**2, tree)["both"][0]))(xs),
            jax.jacrev(jax.jacrev(lambda x: f(x**2, tree)["both"][0]))(xs),
        ]

    for a, b in zip(results(by_entry, xs), results(fn, xs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    over_entries = jax.vmap(jax.grad(lambda x: by_entry(x, tree)["sum"]))(xs)  # outside of jit
    np.testing.assert_allclose(over_entries, 4.0, rtol=1e-12)


@pytest.mark.parametrize("wrap", [averaging.program, averaging.entry_by_entry])
def test_a_shard_map_that_checks_axes_is_refused(wrap):
    """Loops of searches begin with values that are the same on all devices, which jax refuses in its own words."""
    mesh, axis = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",)), jax.sharding.PartitionSpec("i")

    def halved(check_vma):
        root = jax.vmap(wrap(lambda x: lax.while_loop(lambda s: s > 1, lambda s: s / (2 + 0 * x), jnp.array(8.0))))
        return jax.shard_map(root, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=check_vma)(jnp.ones(2))

    assert np.all(halved(False) == 1)
    with pytest.raises(ta.InputError, match="check_vma must be False"):
        halved(True)


def test_an_option_that_the_compiler_does_not_know(monkeypatch):
    """Programs of lines are then compiled without it."""
    monkeypatch.setattr(averaging, "_QUICK", {"xla_no_such_option": True})
    averaging._known.cache_clear()
    assert not averaging._known()
    averaging._known.cache_clear()


@pytest.mark.full  # it clears the programs of the process
def test_what_jax_drops_is_freed():
    """Constants of a batch, such as layers of a user, live as long as the programs that jax keeps."""

    def fn(x, factor):
        return x * factor

    reference = weakref.ref(fn)
    np.testing.assert_array_equal(jax.vmap(lambda a: averaging.entry_by_entry(fn)(a, 2))(jnp.arange(3.0)), [0, 2, 4])
    del fn
    jax.clear_caches()
    gc.collect()
    assert reference() is None
