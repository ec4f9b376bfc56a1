"""Compare the hot loops with the limits of this machine (roofline), and estimate their times on another device.

    python -m benchmarks.roofline                    # the loops on this machine
    python -m benchmarks.roofline --device h100      # and an estimate for a device, from its data sheet

`operations` counts the operations of every loop. The peak rates are measured in the same run, on all cores, with one
kernel compiled by XLA for each class of operation. The limit of a loop is the larger of two times: that of its
operations at these peak rates, and that of reading its bytes at the peak bandwidth. The estimate for another device
assumes that a loop reaches the same share of its limit there as here. This was not checked on another
device. The counting takes some minutes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import Coordinates, branch_of
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.equations import Equations
from tiedattn_jax.theory.paths import Call, together

from .operations import Operations, operations
from .published_method import machine

_ALPHA, _BRANCH = 2.0, "semantic"
_CORES = machine()["cores"] or 1
_REPEAT = 5
_CHAIN, _CHAINS = 16, 8  # dependent operations in a chain of a kernel, and independent chains
_ROUNDS, _WIDTH = 200, 4096  # iterations of the kernel, and numbers that it works on, which fit into a cache
_READ = 2**25  # numbers that are read to measure the bandwidth


class Device(NamedTuple):
    """Data sheet of a device: simple operations per second by bits, bytes per second, bytes of memory."""

    simple: dict[int, float]
    bandwidth: float
    memory: float


# Rates of the vector units, because these loops do not use matrix units. A division counts as 16 simple operations and
# a transcendental function as 40, which is about the number of their instructions on a GPU.
DEVICES = {
    "a100": Device({64: 9.7e12, 32: 19.5e12}, 2.04e12, 80e9),  # NVIDIA A100 80GB SXM
    "h100": Device({64: 34e12, 32: 67e12}, 3.35e12, 80e9),  # NVIDIA H100 SXM
}
_COST = {"simple": 1, "division": 16, "transcendental": 40}


class Loop(NamedTuple):
    """A hot loop; every core runs one copy at the same time.

    Attributes:
        unit, units: what a copy processes, such as nodes, and how many.
        bytes: least number of bytes that a copy reads.
    """

    name: str
    unit: str
    units: int
    run: Callable[..., Any]
    args: tuple[Any, ...]
    bytes: int


class Timed(NamedTuple):
    """A loop with its operations, the seconds of a copy with all cores at work, and the limit of these seconds."""

    loop: Loop
    operations: Operations
    seconds: float
    limit: float

    def __str__(self) -> str:
        rates = {key: value / self.loop.units for key, value in sorted(self.operations.items())}
        counts = ", ".join(f"{value:.3g} {kind} ({bits})" for (kind, bits), value in rates.items())
        ns = 1e9 / self.loop.units
        times = f"{self.seconds * ns:9.4g} ns, limit {self.limit * ns:9.4g} ns, share {self.limit / self.seconds:.2f}"
        return f"{self.loop.name:28} a {self.loop.unit:6} {times}; {counts or 'bytes'}"


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Return the median seconds of simultaneous calls, one per core, after a first round."""
    times = []
    for _ in range(_REPEAT + 1):
        start = time.perf_counter()
        run_one(together([Call(fn, tuple(args))] * _CORES))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def peaks() -> dict[tuple[str, int], float]:
    """Measure operations per second and core, by class and bits, with all cores at work."""
    steps: dict[str, tuple[int, Callable[[Float[Array, " n"]], Float[Array, " n"]]]] = {
        "simple": (2, lambda x: 0.5 * x + 0.25),
        "division": (1, lambda x: 1.5 / (0.5 + x)),
        "transcendental": (1, lambda x: jnp.exp(-x)),
    }
    rates = {}
    for kind, (count, step) in steps.items():

        @jax.jit
        def kernel(x: Float[Array, " n"], step: Callable[[Array], Array] = step) -> Float[Array, " n"]:
            def body(_: int, x: Float[Array, " n"]) -> Float[Array, " n"]:
                # The chains are independent, so that their operations overlap.
                chains = [x + 0.1 * k for k in range(_CHAINS)]
                for _ in range(_CHAIN):
                    chains = [step(chain) for chain in chains]
                return sum(chains[1:], chains[0]) / _CHAINS

            return jax.lax.fori_loop(0, _ROUNDS, body, x)

        for bits in (32, 64):
            x = jnp.linspace(0.5, 1.5, _WIDTH, dtype=f"float{bits}")
            rates[kind, bits] = count * _ROUNDS * _CHAIN * _CHAINS * _WIDTH / seconds(kernel, x)
    return rates


def bandwidth() -> float:
    """Measure bytes read per second and core, with all cores at work."""
    x = jnp.ones(_READ, jnp.float32)
    return x.nbytes / seconds(jax.jit(jnp.max), x)


def loops() -> list[Loop]:
    """Return the loops: prox search, line tracing, an evaluation of Newton's method, and two passes over the data."""
    model = ta.DotProduct()
    point = ta.solve(model, _ALPHA, _BRANCH, ta.Lines(5).rule(model))
    free, x = branch_of(_BRANCH).free(model), point.overlaps
    single, lines = (rule.replicate(0) for rule in (ta.Sobol(2**13).rule(model), ta.Lines(5).rule(model)))
    data = ta.sample_data(model, 1000, _ALPHA, jax.random.key(0))
    rows = data.x.reshape(-1, data.x.shape[-1])
    v = Coordinates(model, free).pack(x)

    def searched(replicate: Any) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
        block = jax.tree.map(lambda a: a[0], replicate.blocks())
        search = jax.jit(lambda *args: replicate.search(*args))
        return search, (model, x, block), sum(a.nbytes for a in jax.tree.leaves(block))

    prox_search, line_search = searched(single), searched(lines)

    def evaluation(v: Float[Array, " n"]) -> Any:
        return Equations(model, point.alpha, lines, free).answer(v)

    return [
        Loop("prox search, Sobol points", "node", single.size, *prox_search),
        Loop("line tracing, order 5", "node", lines.size, *line_search),
        Loop("Newton evaluation, order 5", "node", lines.size, jax.jit(evaluation), (v,), line_search[2]),
        Loop("two passes over X, d = 1000", "number", rows.size, _passes, (rows, rows[0]), 2 * rows.nbytes),
    ]


@jax.jit
def _passes(rows: Float[Array, "Ln d"], v: Float[Array, " d"]) -> Float[Array, " d"]:
    return (rows @ v) @ rows


def limit(counted: Operations, read: int, rates: dict[tuple[str, int], float], bytes_a_second: float) -> float:
    """Return the larger of the seconds for the operations and for the bytes, each at its peak rate."""
    return max(sum(count / rates[key] for key, count in counted.items()), read / bytes_a_second)


def timed() -> list[Timed]:
    """Measure and print the peak rates and every loop."""
    rates, reading = peaks(), bandwidth()
    for (kind, bits), rate in rates.items():
        print(f"peak of a core: {rate / 1e9:7.2f} e9 {kind} operations a second, {bits} bits")
    print(f"peak of a core: {reading / 1e9:7.2f} e9 bytes a second", flush=True)
    results = []
    for loop in loops():
        duration, counted = seconds(loop.run, *loop.args), operations(loop.run, *loop.args)
        results.append(Timed(loop, counted, duration, limit(counted, loop.bytes, rates, reading)))
        print(results[-1], flush=True)
    return results


def plan(device: Device, results: Sequence[Timed]) -> list[str]:
    """Return lines of a table: bytes, operations and expected seconds of typical tasks on a device."""
    rates = {(kind, bits): rate / _COST[kind] for bits, rate in device.simple.items() for kind in _COST}
    *_, evaluation, passes = results
    model = ta.DotProduct()
    lines = ["task                              nodes      bytes  operations  seconds at the limit, expected"]
    tasks = {
        "solve, lines of order 9": ta.Lines(9).rule(model),
        "solve, lines of order 15": ta.Lines(15).rule(model),
        "solve, 2^18 Sobol nodes": ta.Sobol(2**18).rule(model),
    }
    for name, nodes in tasks.items():
        total, stored = nodes.size * nodes.replicates, sum(a.nbytes for a in jax.tree.leaves(nodes))
        cost = seconds(ta.solve, model, _ALPHA, _BRANCH, nodes) / evaluation.seconds * evaluation.loop.units / total
        scale = cost * total / evaluation.loop.units
        counted = {key: scale * value for key, value in evaluation.operations.items()}
        bound = limit(counted, int(cost * stored), rates, device.bandwidth)
        share = evaluation.limit / evaluation.seconds
        lines.append(_row(name, total, stored, sum(counted.values()), bound, bound / share, device))
    for d in (1000, 10_000):
        read = int(_ALPHA * d * 2 * d * 8)
        bound = 2 * read / device.bandwidth
        share = min(1.0, passes.limit / passes.seconds)
        lines.append(_row(f"message passing, d = {d}, a step", d, read, 2 * read / 4, bound, bound / share, device))
    return lines


def _row(name: str, nodes: int, stored: int, count: float, bound: float, expected: float, device: Device) -> str:
    note = "" if stored < device.memory else f"; needs {math.ceil(stored / device.memory)} devices"
    return f"{name:32} {nodes:8} {stored:9.2g} {count:11.2g}  {bound:.2g}, {expected:.2g}{note}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, help="whose plan is printed")
    args = parser.parse_args()
    host = machine()
    print(f"{host['cpu']}, {host['cores']} cores, jax {host['versions']['jax']}")
    results = timed()
    if args.device:
        print(f"plan for {args.device}, from its data sheet; not measured there")
        print("\n".join(plan(DEVICES[args.device], results)))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
