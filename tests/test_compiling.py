"""Programs are compiled once for all models of a shape, and they lower for accelerators."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from lowering import products

import tiedattn_jax as ta


def calls_on(nodes):
    """Public functions of two numbers, sigma and alpha, by name."""

    def data():
        return ta.sample_data(ta.DotProduct(), 16, 2.0, jax.random.key(0))

    def state(sigma, alpha):
        return ta.solve(ta.DotProduct(sigma=sigma), alpha, "semantic", nodes).theta

    def diagram(sigma, alpha):
        alphas = [float(alpha), float(alpha) + 0.1]
        result = ta.phase_diagram(ta.DotProduct(sigma=sigma), alpha=alphas, omega=[0.3], nodes=nodes)
        return result.semantic.replicates.overlaps.theta

    return {
        "solve": state,
        "the gradient of solve": jax.grad(state),
        "critical_alpha": lambda sigma, alpha: ta.critical_alpha(ta.DotProduct(sigma=sigma), nodes=nodes).alpha,
        "a diagram": diagram,
        "gamp": lambda sigma, alpha: ta.gamp(ta.DotProduct(sigma=sigma), data(), steps=10).train_loss,
        "train": lambda sigma, alpha: ta.train(ta.DotProduct(sigma=sigma), data(), steps=10).train_loss,
    }


@pytest.fixture
def compiled(caplog):
    """A function that names the programs which a call compiles, or takes from earlier processes."""

    def names(fn, *args):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "jax._src.interpreters.pxla"):
            jax.block_until_ready(fn(*args))
        messages = (record.getMessage().split() for record in caplog.records)
        return [words[1] for words in messages if words[0] == "Compiling"]

    return names


def numbers(sigma, alpha):
    return jnp.asarray(sigma), jnp.asarray(alpha)


DEAR = [pytest.param(name, marks=pytest.mark.full) for name in ("critical_alpha", "gamp", "train")]


@pytest.mark.parametrize("name", ["solve", "a diagram", *DEAR])  # the test below has the gradient
def test_a_second_model_of_the_same_shape_compiles_nothing(name, lines, compiled):
    call = calls_on(lines)[name]
    jax.block_until_ready(call(*numbers(0.5, 2.0)))
    assert compiled(call, *numbers(0.51, 1.9)) == []


ENGINE = {"jit(search)"}


@pytest.mark.full
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators have other programs")
def test_everything_shares_the_programs_of_the_engine(model, compiled):
    """States, branches, transitions, diagrams and their gradients share the programs that `solve` has compiled."""
    nodes = ta.Sobol(16, replicates=1).rule(model)  # used in no other test

    def theta(alpha, branch="semantic", **options):
        return ta.solve(model, alpha, branch, nodes, **options).theta

    def engine(fn, *args, **options):
        return [name for name in compiled(lambda: fn(*args, **options)) if name in ENGINE]

    assert engine(theta, 2.0) == [*ENGINE]
    for branch in ("positional", "uninformed"):
        assert engine(theta, 1.9, branch) == []
    settings = ta.Settings(tol=1e-3, max_steps=20, warm_steps=100, damping=0.3)
    assert engine(theta, 1.9, settings=settings) == []
    calls = calls_on(nodes)
    for name in ("critical_alpha", "a diagram", "the gradient of solve"):
        assert engine(calls[name], *numbers(0.5, 2.0)) == [], name
    alphas = np.linspace(1.8, 2.0, 3)
    assert engine(lambda: ta.phase_diagram(model, alpha=alphas, omega=[0.2, 0.3], nodes=nodes).semantic.alpha) == []
    assert compiled(calls["the gradient of solve"], *numbers(0.51, 1.9)) == []
    # Weak types, as of arrays made from Python numbers, compile nothing new.
    weak = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.1, 16.0, 0.1)), jnp.full((2, 1), 0.0))
    assert weak.q.weak_type and engine(theta, 2.0, start=weak) == []


def test_searches_over_settings_do_not_run_inside_of_jit(lines):
    for transform in (jax.jit, lambda fn: lambda *a: jax.vmap(fn)(*(jnp.stack([x]) for x in a))):
        with pytest.raises(ta.InputError, match="sweep for many models at once"):
            transform(calls_on(lines)["critical_alpha"])(*numbers(0.5, 2.0))


@pytest.mark.full
@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ["the gradient of solve", "gamp", "train"])
def test_lowers_for_gpu_and_tpu(name, double):
    with jax.enable_x64(double):
        call = calls_on(ta.Lines(3, replicates=2).rule(ta.DotProduct()))[name]
        program = export.export(jax.jit(call), platforms=("cuda", "tpu"))(*numbers(0.5, 2.0))
    text = program.mlir_module()
    assert "callback" not in text and ("f64" in text) == double
    assert not products(text)[1]
