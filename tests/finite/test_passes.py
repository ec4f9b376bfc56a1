"""A step of message passing or training reads the sentences twice and needs little extra memory; nothing is run."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import tiedattn_jax as ta

pytestmark = pytest.mark.usefixtures("fast_compilation")

RUNS = {
    "gamp": partial(ta.gamp, steps=10),
    "gd": partial(ta.train, optimizer="gd", steps=10),
    "adam": partial(ta.train, optimizer="adam", steps=10),
    "lbfgs": partial(ta.train, optimizer="lbfgs", steps=10),
}


@pytest.fixture(scope="module")
def instance(model):
    """Shapes of an instance."""
    return jax.eval_shape(lambda key: ta.sample_data(model, 500, 2.0, key), jax.random.key(0))


def inner(eqn):
    """Programs inside of an equation."""
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda a: hasattr(a, "eqns") or hasattr(a, "jaxpr"))
    return [getattr(a, "jaxpr", a) for a in leaves if hasattr(a, "eqns") or hasattr(a, "jaxpr")]


def passes(jaxpr, L, tokens, cpu):
    """Count how often a program reads L arrays of `tokens` entries, in products or in the sums used on accelerators."""
    count = 0.0
    for eqn in jaxpr.eqns:
        programs = inner(eqn)
        if eqn.primitive.name == "cond":
            if eqn.params.get("branches_platforms"):
                programs = [programs[0] if cpu else programs[-1]]
            count += max(passes(program, L, tokens, cpu) for program in programs)
        elif programs:
            count += sum(passes(program, L, tokens, cpu) for program in programs)
        elif eqn.primitive.name == "dot_general":
            count += any(v.aval.size == L * tokens for v in eqn.invars)
        elif eqn.primitive.name == "mul":
            count += (eqn.outvars[0].aval.size == tokens) / L
    return count


def loops(jaxpr):
    """Yield the bodies of the outermost loops of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            yield eqn.params["body_jaxpr"].jaxpr
        else:
            for program in inner(eqn):
                yield from loops(program)


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("name", ["gamp", "gd", "adam"])
def test_a_step_reads_the_sentences_twice(model, instance, name, cpu):
    L, n, d, _ = instance.shape
    program = jax.make_jaxpr(partial(RUNS[name], model))(instance, jax.ShapeDtypeStruct((d, 1), jnp.float64)).jaxpr
    counts = [count for loop in loops(program) if (count := passes(loop, L, n * d, cpu))]
    assert counts == [2]
    assert passes(program, L, n * d, cpu) == (5 if name == "gamp" else 4)  # with the reads before and after the loop


@pytest.mark.parametrize("name", RUNS)
def test_memory_besides_the_sentences(model, instance, name):
    start = jax.ShapeDtypeStruct((instance.shape[2], 1), jnp.float64)
    memory = jax.jit(partial(RUNS[name], model)).lower(instance, start).compile().memory_analysis()
    workspace = 0 if jax.default_backend() == "cpu" else 2 * 2**22  # 4 MiB for each kind of matrix product on a GPU
    assert memory.temp_size_in_bytes < 0.2 * instance.x.size * 8 + workspace
