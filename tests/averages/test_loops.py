"""The two kinds of loops in an evaluation: with a condition, or with a fixed count of steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state
from jax import export
from made import overlaps_of

import tiedattn_jax as ta
from tiedattn_jax.averages import program
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import descend, local_minima
from tiedattn_jax.base.kernels import loop_kernel
from tiedattn_jax.model.overlaps import Coordinates
from tiedattn_jax.theory.equations import Equations

pytestmark = pytest.mark.usefixtures("fast_compilation")

STANDARD = ta.DotProduct()
APART = ta.DotProduct(mixing=((1.0, 0.0), (0.0, 1.0)))
THREE = ta.DotProduct(0.3, 0.5, mixing=0.4 * np.eye(3) + 0.2, encodings=[[1.0], [0.0], [-1.0]])


SETTINGS = {
    "lines": (STANDARD, lambda m: ta.Lines(3, replicates=1, block=600).rule(m), state(CASES[1])),
    "lines, several jumps": (APART, lambda m: ta.Lines(3, replicates=1).rule(m), overlaps_of(0.33, 18.85, 0.025)),
    "lines, no jumps": (STANDARD, lambda m: ta.Lines(3, replicates=1).rule(m), overlaps_of(0.1, 0.5, 0.05)),
    "lines, searched": (APART, lambda m: ta.Lines(3, replicates=1, jumps=1).rule(m), overlaps_of(0.33, 18.85, 0.025)),
    "nodes": (STANDARD, lambda m: ta.Sobol(2**10, replicates=1).rule(m), state(CASES[0])),
    "nodes, no jumps": (STANDARD, lambda m: ta.Sobol(2**10, replicates=1).rule(m), overlaps_of(0.1, 0.5, 0.05)),
    "three tokens": (THREE, lambda m: ta.Sobol(2**9, replicates=1).rule(m), overlaps_of(0.1, 15.0, 0.1, tokens=3)),
}


def evaluation(name):
    """Return the function that evaluates the averages of a setting, and its arguments."""
    model, make, x = SETTINGS[name]
    free = jnp.ones(2)
    v = Coordinates(model, free).pack(x)

    def evaluate(model, alpha, replicate, v):
        answer = Equations(model, alpha, replicate, free).answer(v)
        return answer.image, answer.jacobian

    return evaluate, (model, jnp.asarray(2.0), make(model).replicate(0), v)


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_both_ways_give_the_same_numbers(name):
    """Both kinds of loops give the same minimisers to the search's tolerance, 6e-8, and sums over nodes closer."""
    evaluate, args = evaluation(name)
    results = []
    for counted in (False, True):
        with program.counted_loops(counted):
            results.append(jax.tree.map(np.asarray, jax.jit(lambda *a: evaluate(*a))(*args)))
    for first, second in zip(*results, strict=True):
        assert np.all(np.isfinite(first))
        np.testing.assert_allclose(first, second, rtol=1e-9, atol=2e-8 * np.max(np.abs(first)))


@pytest.mark.parametrize("name", ["lines", pytest.param("three tokens", marks=pytest.mark.long)])
def test_kernels_give_the_same_numbers(name, monkeypatch):
    """The loops of an evaluation as kernels, run operation by operation, against `lax.scan`."""
    evaluate, args = evaluation(name)
    kernels = []

    def interpreted(*arguments):
        kernels.append(loop_kernel(*arguments, interpret=True))
        return kernels[-1]

    def chosen(*arguments, cpu=None, cuda=None, default=None):
        return (cuda or cpu or default)(*arguments)

    with program.counted_loops():
        expected = jax.tree.map(np.asarray, jax.jit(lambda *a: evaluate(*a))(*args))
    monkeypatch.setattr(program, "loop_kernel", interpreted)
    monkeypatch.setattr(program.lax, "platform_dependent", chosen)
    with program.counted_loops():
        results = jax.jit(lambda *a: evaluate(*a))(*args)
    assert len(kernels) > 2 and all(kernels)
    for first, second in zip(results, expected, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-9, atol=2e-8 * np.max(np.abs(second)))


def primitives(jaxpr):
    """Yield the names of all primitives of a program and of the programs in it, but of no kernels."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name == "pallas_call":
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


@pytest.mark.parametrize("name", ["lines", "nodes", "three tokens"])
def test_counted_loops_ask_no_condition(name):
    """With counted loops only the loop over groups of stragglers on lines has a condition; otherwise more loops do."""
    evaluate, args = evaluation(name)
    counts = []
    for counted in (True, False):
        with program.counted_loops(counted):
            names = list(primitives(jax.make_jaxpr(evaluate)(*args).jaxpr))
        # A condition on the platform is decided when the program is lowered.
        counts.append(names.count("while") + names.count("cond") - names.count("platform_index"))
    assert counts[0] == (name == "lines") < counts[1]


def conditions(text):
    """Conditions of the loops of a StableHLO program: the program up to each, and the text of its block."""
    found = re.finditer(r"stablehlo\.while\(.*?\bcond \{(.*?)\} do \{", text, re.DOTALL)
    return [(text[: match.start(1)], match[1]) for match in found]


def is_constant(name, before):
    """Return whether a value of a StableHLO program is a constant, or a constant in another type."""
    kind, operand = re.findall(rf"{re.escape(name)} = stablehlo\.(\w+)(?: (%\w+))?", before)[-1]
    return kind == "constant" or (kind in ("convert", "optimization_barrier") and is_constant(operand, before))


@pytest.mark.parametrize("name", ["nodes", "three tokens"])  # on lines the loop over groups has a condition
def test_lowered_for_an_accelerator_every_loop_has_a_constant_count(name):
    evaluate, args = evaluation(name)
    with program.counted_loops():
        checks = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        text = export.export(jax.jit(evaluate), platforms=("cuda",), disabled_checks=checks)(*args).mlir_module()
    blocks = conditions(text)
    assert len(blocks) == text.count("stablehlo.while(") > 0
    assert text.count("__gpu$xla.gpu.triton") > 2  # the other loops are kernels
    for before, condition in blocks:  # every condition compares a counter with a constant
        comparison = re.search(r"stablehlo\.compare\s+LT, %iterArg\w*, (%\w+)", condition)
        assert comparison and is_constant(comparison[1], before), condition


def test_what_is_done_keeps_its_value():
    """A node keeps its value once it is done, in both kinds of loops; the device decides which kind there is.

    Nodes need 0 to 5 halvings; each takes its own number, at least `least` and at most the number allowed.
    """
    start, half = 2.0 ** jnp.arange(6), jnp.full(6, 0.5)

    def halved(**options):
        return program.repeat(lambda half, x: half * x, half, start, lambda x: x > 1, 4, count=3, **options)

    assert program.counted() is (jax.default_backend() != "cpu")
    with program.counted_loops():
        assert program.counted()
        with program.counted_loops(False):
            assert not program.counted()
            np.testing.assert_array_equal(halved(), [1, 1, 1, 1, 1, 2])
            np.testing.assert_array_equal(halved(least=1), [0.5, 1, 1, 1, 1, 2])
            np.testing.assert_array_equal(halved(least=5), start / 32)
        assert program.counted()
        np.testing.assert_array_equal(halved(), [1, 1, 1, 1, 2, 4])
        np.testing.assert_array_equal(halved(least=1), [0.5, 1, 1, 1, 2, 4])


def test_counted_steps_do_for_the_slowest_starts():
    """A fixed count of steps converges at every node, from starts far away, and finds the minimum next to a start."""
    model, make, x = SETTINGS["nodes"]
    replicate = make(model).replicate(0)
    h, y = 3 * replicate.student, 0.5 * replicate.teacher
    for counted in (False, True):
        with program.counted_loops(counted):
            z, energy, converged = jax.jit(lambda h, y: descend(ProxProblem(model, x.V, y), 5.0 * h, h, 1e-7))(h, y)
            assert bool(jnp.all(converged))
            minima, lower = jax.jit(lambda z, h, y: local_minima(ProxProblem(model, x.V, y), z + 0.01, h))(z, h, y)
        np.testing.assert_allclose(jnp.median(jnp.abs(minima - z)), 0, atol=1e-9)
        assert float(jnp.mean(lower <= energy + 1e-9)) > 0.99
