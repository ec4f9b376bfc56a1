"""Products of sentences and weights; a step of message passing or training takes two, and needs little memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.finite import products

RNG = np.random.default_rng(0)
X, DX, Q, DQ, G = (RNG.standard_normal(shape) for shape in ((2, 5, 4), (2, 5, 4), (4, 3), (4, 3), (2, 3, 5)))


def test_products_equal_those_of_the_whole_arrays():
    np.testing.assert_allclose(products.student_fields(X, Q), np.swapaxes(X @ Q, 1, 2), rtol=1e-11)
    np.testing.assert_allclose(jax.jit(products.back_project)(X, G), np.einsum("lni,lan->ia", X, G), rtol=1e-11)
    np.testing.assert_allclose(products.token_gram(X), np.einsum("kni,lni->kln", X, X), rtol=1e-11)


def test_products_by_sums_are_those_of_matrices(monkeypatch):
    """On accelerators products with few columns are sums, which a CPU can compute, too."""
    monkeypatch.setattr(products.lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))
    x, g = X[:, :3], G[..., :3]  # of a shape for which no other test has made the program
    fields, back = jax.jit(lambda x, Q, g: (products.student_fields(x, Q), products.back_project(x, g)))(x, Q, g)
    np.testing.assert_allclose(fields, np.einsum("lni,ia->lan", x, Q), rtol=1e-11)
    np.testing.assert_allclose(back, np.einsum("lni,lan->ia", x, g), rtol=1e-11)


@pytest.mark.parametrize(
    ("size", "power"), [(0.0, 1.0), (1.0, 1.0), (1.4, 1.0), (1.42, 2.0), (0.7, 0.5), (0.71, 1.0), (0.01, 2.0**-7)]
)
def test_the_nearest_power_of_two(size, power):
    assert float(jax.jit(products.power_of_two)(jnp.asarray(size))) == power


def test_covariances_of_every_token():
    gamma, a, b = RNG.uniform(0.1, 1, (2, 4)), RNG.standard_normal((4, 2)), RNG.standard_normal((4, 3))
    expected = np.einsum("li,ia,ib->lab", gamma, a, b) / 4
    np.testing.assert_allclose(products.covariances(gamma, a, b), expected, rtol=1e-11)


def test_derivatives_of_the_fields_in_sentences_and_weights():
    """Both tangents count; without one there is none."""

    @jax.jit
    def slopes(x, Q, dx, dQ):
        constant = jax.jvp(lambda t: products.student_fields(x, Q) + t, (0.0,), (1.0,))[1]
        return jax.jvp(products.student_fields, (x, Q), (dx, dQ))[1], constant

    slope, constant = slopes(X, Q, DX, DQ)
    np.testing.assert_allclose(slope, np.swapaxes(DX @ Q + X @ DQ, 1, 2), rtol=1e-11)
    np.testing.assert_array_equal(constant, np.ones((2, 3, 5)))


RUNS = {
    "risk": lambda model, data, Q: jax.value_and_grad(lambda Q: ta.finite.risk(model, data, Q))(Q),
    "exact risk": lambda model, data, Q: jax.value_and_grad(lambda Q: ta.finite.risk(model, data, Q, exact=True))(Q),
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


@pytest.mark.parametrize("exact", [False, True])
def test_a_gradient_reads_the_sentences_twice_and_builds_no_prediction(model, instance, exact):
    L, n, d, _ = instance.shape
    run, start = RUNS["exact risk" if exact else "risk"], jax.ShapeDtypeStruct((d, 1), jnp.float64)
    program = jax.make_jaxpr(partial(run, model))(instance, start).jaxpr
    assert passes(program, L, n * d, True) == 2
    # Outside of programs nothing as large as x is made, either; programs may return x itself.
    large = {eqn.primitive.name for eqn in program.eqns if any(v.aval.size >= L * n * d / 2 for v in eqn.outvars)}
    assert large <= {"jit", "pjit"}


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_memory_besides_the_sentences(model, instance, name):
    start = jax.ShapeDtypeStruct((instance.shape[2], 1), jnp.float64)
    memory = jax.jit(partial(RUNS[name], model)).lower(instance, start).compile().memory_analysis()
    workspace = 0 if jax.default_backend() == "cpu" else 2 * 2**22  # 4 MiB for each kind of matrix product on a GPU
    assert memory.temp_size_in_bytes < 0.2 * instance.x.size * 8 + workspace
