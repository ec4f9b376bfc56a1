"""All benchmarks of the suite, by name."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe
from tiedattn_jax.averages.rules import Rule
from tiedattn_jax.finite.sampling import start as start_of

from . import monte_carlo, published_method, pytorch_training
from .suite import Measurement, measure

Measured = Iterator[Measurement]
NUMBERS: dict[str | None, tuple[str, ...]] = {"semantic": ("q", "V", "theta"), "positional": ("q", "V", "m")}
RULES: dict[str, Callable[[ta.Model, int], Rule]] = {
    "lines": lambda model, n: default_recipe(model, n).rule(model),
    "Sobol": lambda model, n: ta.Sobol(n).rule(model),
    "Monte Carlo": lambda model, n: ta.MonteCarlo(n).rule(model),
    "Gauss-Hermite": lambda model, n: ta.GaussHermite(int((n + 0.5) ** 0.25)).rule(model),  # four fields
}
ALPHA = 2.0
_REFERENCE_ORDER = 15  # order of the lines of the reference values, which are accurate to 4e-6
_WIDE_REFERENCE, _LINE_NODES = 2**16, 32  # beyond two fields: nodes of the reference values, and nodes on a line
_STEP = 1e-3  # step in sigma of the central difference that is the reference of the derivative


def _reference_rule(model: ta.Model) -> Rule:
    return ta.Lines(_REFERENCE_ORDER, replicates=1).rule(model)


@functools.cache
def _reference(alpha: float, branch: str) -> Float[np.ndarray, "1 3"]:
    """Return the reference order parameters at the standard setting."""
    model = ta.DotProduct()
    return order_parameters(ta.solve(model, alpha, branch, _reference_rule(model), settings=ta.Settings(tol=1e-7)))


@functools.cache
def _alpha_c() -> float:
    """Return the reference alpha_c at the standard setting."""
    model = ta.DotProduct()
    return float(ta.critical_alpha(model, _reference_rule(model)).alpha)


def order_parameters(point: ta.results.FixedPoint) -> Float[np.ndarray, "R 3"]:
    """Return the order parameters `NUMBERS` of the first token in every replicate."""
    x = point.replicates.overlaps
    return np.stack([np.asarray(getattr(x, name)[:, 0]).reshape(-1) for name in NUMBERS[point.branch]], 1)


def worst(values: Float[np.ndarray, "R k"], reference: Float[np.ndarray, "#R k"]) -> float:
    """Return the largest relative error of order parameters, each the root mean square over the replicates."""
    return float(np.max(np.sqrt(np.mean((values / reference - 1) ** 2, 0))))


def _solve(sizes: Sequence[int], repeat: int) -> Measured:
    """Time a replicate of the semantic branch, next to other programs that find it."""
    model = ta.DotProduct()
    rules = [(rule, RULES[rule](model, size)) for size in sizes for rule in ("lines", "Sobol")]
    comparators = list(_comparators(min(sizes)))
    yield from comparators
    for rule, nodes in rules:
        yield _state("solve", rule, model, nodes, ALPHA, "semantic", repeat, against=comparators)


def _rules(sizes: Sequence[int], repeat: int) -> Measured:
    """Time a replicate on every averaging rule, at one state without and two with jumps of the proximal operator."""
    model = ta.DotProduct()
    rules = [(rule, make(model, size)) for size in sizes for rule, make in RULES.items()]
    for alpha, branch in ((ALPHA, "semantic"), (ALPHA, "positional"), (1.0, "semantic")):
        for rule, nodes in rules:
            yield _state("rules", f"{rule}, {branch}, {alpha:g}", model, nodes, alpha, branch, repeat)


def _wide(sizes: Sequence[int], repeat: int) -> Measured:
    """Time a replicate beyond two fields of the student, on the averaging rules that support it."""
    for name, model in _wide_models().items():
        reference = ta.solve(model, ALPHA, "semantic", ta.Sobol(_WIDE_REFERENCE, seed=1).rule(model))
        reference_values = np.mean(invariants(reference), 0)

        def error(point: ta.results.FixedPoint, reference_values: Float[np.ndarray, "1 4"] = reference_values) -> float:
            return worst(invariants(point), reference_values)

        for size in sizes:
            rules = {
                "Sobol": ta.Sobol(size).rule(model),
                "Sobol lines": ta.Lines(lines=size // _LINE_NODES, points=_LINE_NODES).rule(model),
                "Monte Carlo": ta.MonteCarlo(size).rule(model),
            }
            for rule, nodes in rules.items():
                yield _state("wide", f"{name}, {rule}", model, nodes, ALPHA, "semantic", repeat, error)


def _wide_models() -> dict[str, ta.Model]:
    """Return models with three and four tokens (.6 on the diagonal of A, encodings on a line), and of rank two."""
    models: dict[str, ta.Model] = {}
    for L in (3, 4):
        mixing = np.full((L, L), 0.4 / (L - 1)) + (0.6 - 0.4 / (L - 1)) * np.eye(L)
        models[f"L = {L}"] = ta.DotProduct(mixing=mixing, encodings=np.linspace(-1, 1, L)[:, None])
    return {**models, "r = 2": ta.DotProduct(rank=2, teacher=np.eye(2))}


def invariants(point: ta.results.FixedPoint) -> Float[np.ndarray, "R 4"]:
    """Return mean tr q and tr V over tokens, tr theta theta^T summed over them, and the training loss."""
    x, loss = point.replicates.overlaps, np.asarray(point.replicates.train_loss)
    q, V = (np.trace(np.asarray(a), axis1=2, axis2=3).mean(1) for a in (x.q, x.V))
    return np.stack([q, V, np.sum(np.asarray(x.theta) ** 2, (1, 2, 3)), loss], 1)


def _state(
    name: str,
    case: str,
    model: ta.Model,
    nodes: Rule,
    alpha: float,
    branch: str,
    repeat: int,
    error: Callable[[ta.results.FixedPoint], float] | None = None,
    against: Sequence[Measurement] = (),
) -> Measurement:
    """Measure the solve of a fixed point.

    Args:
        error: function that returns the error of a fixed point; by default that of its order parameters at the standard
            setting.
    """
    error = error or (lambda point: worst(order_parameters(point), _reference(alpha, branch)))
    call, options = (ta.solve, model, alpha, branch, nodes), _each_replicate(nodes, repeat)
    return measure(name, case, nodes.size, *call, error=error, against=against, **options)


def _each_replicate(nodes: Rule, repeat: int) -> dict[str, Any]:
    return {"repeat": repeat, "unit": "replicate", "units": nodes.replicates}


def _comparators(draws: int) -> Measured:
    """Time the published method and Monte Carlo in NumPy on the semantic branch, once each because they are slow."""

    def error(result: published_method.Result) -> float:
        x = np.array([[getattr(result.overlaps, name) for name in NUMBERS["semantic"]]])
        return worst(x, _reference(ALPHA, "semantic"))

    runs = {
        "published method": (144, partial(published_method.solve, ALPHA)),
        "NumPy Monte Carlo": (draws, partial(monte_carlo.solve, ALPHA, draws=draws)),
    }
    for case, (size, run) in runs.items():
        yield measure("solve", case, size, run, repeat=1, unit="replicate", compiled=False, error=error)


def _gradient(sizes: Sequence[int], repeat: int) -> Measured:
    """Time d (training loss) / d sigma on the semantic branch, next to the solve that it contains."""

    def loss(sigma: float | Float[Array, ""], nodes: Rule) -> Float[Array, ""]:
        return ta.solve(ta.DotProduct(sigma=sigma), ALPHA, "semantic", nodes).train_loss

    model = ta.DotProduct()
    sigma, nodes = float(model.sigma), _reference_rule(model)
    slope = float(loss(sigma + _STEP, nodes) - loss(sigma - _STEP, nodes)) / (2 * _STEP)
    for size in sizes:
        nodes = RULES["lines"](model, size)
        options = _each_replicate(nodes, repeat)
        solve = measure("gradient", "solve", nodes.size, loss, sigma, nodes, **options)
        yield solve
        options |= {"error": lambda value: abs(value / slope - 1), "against": [solve]}
        yield measure("gradient", "jax.grad", nodes.size, jax.grad(loss), sigma, nodes, **options)


def _critical_alpha(sizes: Sequence[int], repeat: int) -> Measured:
    """Time alpha_c with its derivatives in every number of the model, on four replicates."""
    model = ta.DotProduct()
    for size in sizes:
        nodes = RULES["lines"](model, size)
        yield measure(
            "critical_alpha",
            "lines",
            nodes.size,
            ta.critical_alpha,
            model,
            nodes,
            repeat=repeat,
            error=lambda transition: abs(transition.alpha / _alpha_c() - 1),
        )


def _grid(sizes: Sequence[int], repeat: int) -> Measured:
    """Time a row of a phase diagram at the standard omega; the error is that of alpha_c as read from the row."""
    model = ta.DotProduct()
    nodes, omega = ta.Lines(5).rule(model), [float(model.omega)]
    for size in sizes:
        yield measure(
            "grid",
            "row of cells",
            size,
            lambda alphas: ta.phase_diagram(model, alpha=alphas, omega=omega, nodes=nodes),
            np.linspace(0.1, 2.0, size),
            repeat=repeat,
            unit="cell",
            units=size,
            error=lambda diagram: abs(diagram.alpha_c().alpha[0] / _alpha_c() - 1),
        )


def _instance(
    name: str,
    run: Callable[[ta.Model, ta.Data], Callable[[], Any]],
    sizes: Sequence[int],
    repeat: int,
    peers: Callable[[ta.Model, ta.Data, int], Measured] = lambda *_: iter(()),
) -> Measured:
    """Time an iteration on an instance of finite size, next to the two passes over the data that it needs at least.

    Args:
        peers: function that measures other programs on the same instance.
    """
    for dtype in ("float64", "float32"):
        model = ta.DotProduct(dtype=dtype)
        for d in sizes:
            data = ta.sample_data(model, d, ALPHA, jax.random.key(0))
            rows, v = data.x.reshape(-1, d), data.known_teacher("the passes")[:, 0]
            passes = measure(
                name, f"two passes, {dtype}", d, _two_passes, rows, v, repeat=repeat, unit="iteration", units=_PASSES
            )
            comparators = [passes, *peers(model, data, repeat)]
            yield from comparators
            yield measure(
                name,
                dtype,
                d,
                run(model, data),
                repeat=repeat,
                unit="iteration",
                units=lambda estimate: int(estimate.iterations),
                against=comparators,
            )


_PASSES = 20  # pairs of passes in one measurement
_STEPS = 100  # steps of training in one measurement


@jax.jit
def _two_passes(rows: Float[Array, "Ln d"], v: Float[Array, " d"]) -> Float[Array, " d"]:
    """Multiply a vector by the data, and then by their transpose, `_PASSES` times."""

    def round_trip(_: Int[Array, ""], v: Float[Array, " d"]) -> Float[Array, " d"]:
        v = (rows @ v) @ rows
        return v / jnp.linalg.norm(v)

    return jax.lax.fori_loop(0, _PASSES, round_trip, v)


def _gamp(model: ta.Model, data: ta.Data) -> Callable[[], ta.results.GAMP]:
    """Return a function that runs 100 iterations of message passing.

    The first iterations, which search for the proximal operator from several starts, run here and are not timed.
    """
    first = ta.gamp(model, data, steps=20)
    return lambda: ta.gamp(model, data, first, steps=100, damping=0.02)


def _train(model: ta.Model, data: ta.Data) -> Callable[[], ta.results.Training]:
    """Return a function that runs `_STEPS` steps of gradient descent."""
    return lambda: ta.train(model, data, steps=_STEPS, tol=0.0)


def _pytorch(model: ta.Model, data: ta.Data, repeat: int) -> Measured:
    """Time gradient descent in PyTorch if installed; the error is the distance to our weights on exact labels."""
    if importlib.util.find_spec("torch") is None:
        return
    weights = np.asarray(ta.train(model, data, steps=_STEPS, tol=0.0, exact=True).Q)
    yield measure(
        "train",
        f"PyTorch, {data.x.dtype}",
        data.x.shape[-1],
        pytorch_training.Plain(model, data, start_of(model, data, "semantic")).run,
        _STEPS,
        repeat=repeat,
        unit="iteration",
        units=_STEPS,
        compiled=False,
        error=lambda Q: np.linalg.norm(Q - weights) / np.linalg.norm(weights),
    )


def _gamp_run(sizes: Sequence[int], repeat: int) -> Measured:
    """Time message passing from both starts until it converges."""
    model = ta.DotProduct()
    for d in sizes:
        data = ta.sample_data(model, d, ALPHA, jax.random.key(3))
        for start in ("semantic", "positional"):
            yield measure("gamp_run", start, d, ta.gamp, model, data, start, repeat=repeat, unit="run")


def _on_demand(sizes: Sequence[int], repeat: int) -> Measured:
    """Time `_STEPS` steps of gradient descent on sentences that are drawn on demand."""
    for dtype in ("float64", "float32"):
        model = ta.DotProduct(dtype=dtype)
        for d in sizes:
            data = ta.sample_data(model, d, ALPHA, jax.random.key(0), stored=False)
            run = partial(ta.train, model, data, "random", steps=_STEPS, rate=2.0, tol=0.0)
            yield measure("on_demand", dtype, d, run, repeat=repeat, unit="iteration", units=_STEPS)


class Benchmark(NamedTuple):
    """A benchmark of the suite.

    Attributes:
        run: function of sizes and a number of repeats that yields measurements.
        description: what the benchmark measures, in words.
        size: meaning of a size, in words.
        sizes: default sizes.
    """

    run: Callable[[Sequence[int], int], Measured]
    description: str
    size: str
    sizes: tuple[int, ...]


_NODES = "nodes of a replicate"
BENCHMARKS = {
    "solve": Benchmark(
        _solve, "a fixed point, next to the published method and Monte Carlo in NumPy", _NODES, (2**13, 2**15)
    ),
    "rules": Benchmark(_rules, "three fixed points on every averaging rule", _NODES, (2**13,)),
    "wide": Benchmark(_wide, "a fixed point of three and four tokens, and of rank two", _NODES, (2**11, 2**13, 2**15)),
    "gradient": Benchmark(_gradient, "the derivative of the training loss in sigma", _NODES, (2**13,)),
    "critical_alpha": Benchmark(_critical_alpha, "alpha_c with its sensitivities", _NODES, (2**13, 2**15)),
    "grid": Benchmark(_grid, "a row of a phase diagram, lines of order 5", "cells", (5, 25)),
    "gamp": Benchmark(partial(_instance, "gamp", _gamp), "an iteration of message passing", "d", (500, 1000)),
    "gamp_run": Benchmark(_gamp_run, "message passing until it converges", "d", (500, 1000)),
    "train": Benchmark(
        partial(_instance, "train", _train, peers=_pytorch),
        "a step of gradient descent, next to PyTorch where it can be imported",
        "d",
        (500, 1000),
    ),
    "on_demand": Benchmark(_on_demand, "a step of training on sentences drawn on demand", "d", (1000, 10_000)),
}
