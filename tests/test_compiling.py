"""What is compiled when, and that it lowers for accelerators."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax import export
from lowering import products

import tiedattn_jax as ta
from tiedattn_jax.phases.follow import Track, follow, pair_free, pair_start

CALLS = ("the gradient of solve", "critical_alpha", "a row of a grid", "gamp", "train")


def calls_on(nodes):
    """Public functions of two numbers, sigma and alpha."""
    data = ta.sample_data(ta.dot_product(), 16, 2.0, jax.random.key(0))

    def state(sigma, alpha):
        return ta.solve(ta.dot_product(sigma=sigma), alpha, "semantic", nodes).theta

    def row(sigma, alpha, cells=1):
        """The positional branch in one cell, or in some, as `phase_diagram` follows it."""
        model = ta.dot_product(sigma=sigma)
        start, free = jax.tree.map(lambda a: a[:1], (pair_start(model), pair_free(model)))
        models = jax.tree.map(lambda a: jnp.broadcast_to(a, (1, cells, *a.shape)), model)
        each = alpha + jnp.arange(cells)[None]
        return follow(Track(models, each, each, start, start, free), nodes, ta.Settings(), None, 1)["theta"]

    return {
        "the gradient of solve": jax.grad(state),
        "critical_alpha": lambda sigma, alpha: ta.critical_alpha(ta.dot_product(sigma=sigma), nodes=nodes).alpha,
        "a row of a grid": row,
        "gamp": lambda sigma, alpha: ta.gamp(ta.dot_product(sigma=sigma), data, steps=10).train_loss,
        "train": lambda sigma, alpha: ta.train(ta.dot_product(sigma=sigma), data, steps=10).train_loss,
    }


@pytest.fixture
def compiled(caplog):
    """Names of the programs that a function compiles, or takes from those of earlier processes."""

    def names(fn, *args):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "jax._src.interpreters.pxla"):
            jax.block_until_ready(fn(*args))
        words = (record.getMessage().split() for record in caplog.records)
        return [said[1] for said in words if said[0] == "Compiling"]

    return names


def numbers(sigma, alpha):
    return jnp.asarray(sigma), jnp.asarray(alpha)


@pytest.mark.parametrize("name", CALLS[1:])  # the first one below, on fewer nodes
def test_a_second_model_of_the_same_shape_compiles_nothing(name, lines, compiled):
    call = calls_on(lines)[name]
    jax.block_until_ready(call(*numbers(0.5, 2.0)))
    assert compiled(call, *numbers(0.51, 1.9)) == []


def test_rows_of_several_lengths_share_a_program(lines, compiled):
    row = calls_on(lines)["a row of a grid"]
    row(*numbers(0.5, 2.0))
    assert "jit(_follow)" not in compiled(lambda: row(*numbers(0.5, 2.0), 3))
    assert row(*numbers(0.5, 2.0), 3).shape[1] == 3


@pytest.mark.usefixtures("quick_programs")
def test_branches_share_the_program_that_solves_and_its_gradient_uses_it(model, compiled):
    nodes = ta.sobol_nodes(model, 16, replicates=1)  # of no other test

    def theta(alpha, branch="semantic"):
        return ta.solve(model, alpha, branch, nodes).theta

    assert "jit(_phases)" in compiled(theta, 2.0)
    for branch in ("positional", "uninformed"):
        assert "jit(_phases)" not in compiled(theta, 1.9, branch)
    gradient = calls_on(nodes)["the gradient of solve"]
    assert "jit(_phases)" not in compiled(gradient, *numbers(0.5, 2.0))
    assert compiled(gradient, *numbers(0.51, 1.9)) == []
    # Arrays made of Python numbers, of weak types, are no other arguments.
    weak = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.1, 16.0, 0.1)), jnp.full((2, 1), 0.0))
    assert weak.q.weak_type and "jit(_phases)" not in compiled(lambda: ta.solve(model, 2.0, start=weak, nodes=nodes).q)


@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CALLS)
def test_lowers_for_gpu_and_tpu(name, wide):
    with jax.enable_x64(wide):
        call = calls_on(ta.line_nodes(ta.dot_product(), 3, replicates=2))[name]
        program = export.export(jax.jit(call), platforms=("cuda", "tpu"))(*numbers(0.5, 2.0))
    text = program.mlir_module()
    assert "callback" not in text and ("f64" in text) == wide
    assert not products(text)[1]
