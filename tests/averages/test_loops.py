"""The two kinds of loops in an evaluation: with a condition, or with a fixed count of steps."""

import contextlib
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


@contextlib.contextmanager
def counted_loops(counted=True):
    """Trace functions with counted loops, or without them, inside this context, whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_choice", counted)
        jax.clear_caches()  # functions that jax has traced
        yield
    jax.clear_caches()


def evaluation(name):
    """Return the function that evaluates the averages of a setting, and its arguments."""
    model, make, x = SETTINGS[name]
    free = jnp.ones(2)
    v = Coordinates(model, free).pack(x)

    def evaluate(model, alpha, replicate, v):
        answer = Equations(model, alpha, replicate, free).answer(v)
        return answer.image, answer.jacobian

    return evaluate, (model, jnp.asarray(2.0), make(model).replicate(0), v)


def assert_close(expected, results):
    for a, b in zip(expected, results, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=2e-8 * np.max(np.abs(a)))


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_both_ways_give_the_same_numbers(name):
    """Both kinds of loops give the same minimisers to the search's tolerance, 6e-8, and sums over nodes closer."""
    evaluate, args = evaluation(name)
    results = []
    for counted in (False, True):
        with counted_loops(counted):
            results.append(jax.tree.map(np.asarray, jax.jit(lambda *a: evaluate(*a))(*args)))
    assert all(np.all(np.isfinite(a)) for a in results[0])
    assert_close(*results)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lines", "three tokens"])
def test_kernels_give_the_same_numbers(name, monkeypatch):
    """The loops of an evaluation as kernels, run operation by operation, against `lax.scan`."""
    evaluate, args = evaluation(name)
    kernels = []

    def interpreted(*arguments):
        kernels.append(loop_kernel(*arguments, interpret=True))
        return kernels[-1]

    def chosen(*arguments, cpu=None, cuda=None, default=None):
        return (cuda or cpu or default)(*arguments)

    with counted_loops():
        expected = jax.tree.map(np.asarray, jax.jit(lambda *a: evaluate(*a))(*args))
    monkeypatch.setattr(program, "loop_kernel", interpreted)
    monkeypatch.setattr(program.lax, "platform_dependent", chosen)
    with counted_loops():
        results = jax.jit(lambda *a: evaluate(*a))(*args)
    assert len(kernels) > 2 and all(kernels)
    assert_close(expected, results)


def conditions(text):
    """Conditions of the loops of a StableHLO program: the program up to each, and the text of its block."""
    found = re.finditer(r"stablehlo\.while\(.*?\bcond \{(.*?)\} do \{", text, re.DOTALL)
    return [(text[: match.start(1)], match[1]) for match in found]


def is_constant(name, before):
    """Return whether a value of a StableHLO program is a constant, or a constant in another type."""
    kind, operand = re.findall(rf"{re.escape(name)} = stablehlo\.(\w+)(?: (%\w+))?", before)[-1]
    return kind == "constant" or (kind in ("convert", "optimization_barrier") and is_constant(operand, before))


def is_counted(before, condition):
    """Return whether a condition compares a counter with a constant."""
    comparison = re.search(r"stablehlo\.compare\s+LT, %iterArg\w*, (%\w+)", condition)
    return bool(comparison) and is_constant(comparison[1], before)


@pytest.mark.full
@pytest.mark.parametrize("name", ["nodes", "lines", "three tokens"])
def test_lowered_for_an_accelerator_every_loop_has_a_constant_count(name):
    """On lines only the loop over groups of stragglers has a condition."""
    evaluate, args = evaluation(name)
    with counted_loops():
        checks = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
        text = export.export(jax.jit(evaluate), platforms=("cuda",), disabled_checks=checks)(*args).mlir_module()
    blocks = conditions(text)
    assert len(blocks) == text.count("stablehlo.while(") > 0
    assert text.count("__gpu$xla.gpu.triton") > 2  # the other loops are kernels
    assert sum(not is_counted(*block) for block in blocks) == (name == "lines")


def test_what_is_done_keeps_its_value():
    """A node keeps its value once it is done, in both kinds of loops; the device decides which kind there is.

    Nodes need 0 to 5 halvings; each takes its own number, at least `least` and at most the number allowed.
    """
    start, half = 2.0 ** jnp.arange(6), jnp.full(6, 0.5)

    def halved(**options):
        return program.repeat(lambda half, x: half * x, half, start, lambda x: x > 1, 4, count=3, **options)

    assert program.counted() is (jax.default_backend() != "cpu")
    with counted_loops():
        assert program.counted()
        with counted_loops(False):
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
    with counted_loops():
        z, energy, converged = jax.jit(lambda h, y: descend(ProxProblem(model, x.V, y), 5.0 * h, h, 1e-7))(h, y)
        minima, lower = jax.jit(lambda z, h, y: local_minima(ProxProblem(model, x.V, y), z + 0.01, h))(z, h, y)
    assert np.all(converged) and np.mean(np.asarray(lower) <= np.asarray(energy) + 1e-9) > 0.99
    np.testing.assert_allclose(np.median(np.abs(np.asarray(minima) - z)), 0, atol=1e-9)
