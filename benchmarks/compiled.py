"""Compile the public programs for an H100 and a TPU v5e on a machine that has neither, and count what they will do.

    python -m benchmarks compiled                              # all programs, for all devices
    python -m benchmarks compiled solve gamp --devices h100    # two programs, for one device
    python -m benchmarks compiled --against FILE               # fail if a program got worse than in that file

Nothing runs. The compilers of NVIDIA GPUs and of TPUs decide what the devices will do: which programs compile at all,
kernels, loops, bytes that kernels write, and memory. Only times are not known. The compilers are the extra
`compile-only`, whose versions fit one version of jax. Every program is one line of the table and one record of
`DIR/DATE-compiled.json`. A later run of the same day replaces the records of its programs. The programs:
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.flatten_util import ravel_pytree
from jax.sharding import SingleDeviceSharding

import tiedattn_jax as ta
from tiedattn_jax.base.arrays import precise
from tiedattn_jax.base.errors import InputError, require_choice
from tiedattn_jax.base.files import write_whole
from tiedattn_jax.base.results import Settings
from tiedattn_jax.model.checks import needs
from tiedattn_jax.rsb.fixed_points import ORDER, _lay, lines_1rsb
from tiedattn_jax.rsb.newton import Equations1RSB, _look
from tiedattn_jax.theory.engine import _equations_all
from tiedattn_jax.theory.equations import Equations
from tiedattn_jax.theory.setting import branch_start

_H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352000000000
l2_cache_size: 52428800 clock_rate_ghz: 1.755 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Target(NamedTuple):
    """A device that programs are compiled for.

    Attributes:
        backend: jax's name of its kind.
        topology: arguments of `topologies.get_topology_desc`.
        dtypes: precisions that it computes in.
        memory: bytes of its memory.
        package: plugin that has its compiler.
    """

    backend: str
    topology: dict[str, str]
    dtypes: tuple[str, ...]
    memory: float
    package: str


TARGETS = {
    "h100": Target(
        "gpu",
        {"platform": "cuda", "topology_name": "h100", "topology": "1x1x1", "target_config": _H100},
        ("float64", "float32"),
        80e9,
        "jax-cuda12-plugin",
    ),
    "v5e": Target("tpu", {"platform": "tpu", "topology_name": "v5e:2x2"}, ("float32",), 16e9, "libtpu"),
}


@dataclass(frozen=True)
class Record:
    """Decisions of a compiler about one program.

    Attributes:
        program, device, dtype: what was compiled, for which device, and in which precision.
        compiles: whether there is a program for the device.
        refused: why there is none, in a sentence; empty if there is one.
        kernels: kernels that one run launches. A loop of unknown length counts once, here and below.
        bytes_written: bytes that the kernels write.
        bytes_read: bytes that they read, at most: a kernel that reads a slice counts the whole array.
        bytes_kept: bytes of arguments, results and intermediate arrays in the device's memory.
        loops: steps of every outermost loop, its kernels and the bytes that it writes in a step; the number of steps
            is None if the program decides it.
        seconds: time of tracing and compiling.
    """

    program: str
    device: str
    dtype: str
    compiles: bool
    refused: str = ""
    kernels: int | None = None
    bytes_written: int | None = None
    bytes_read: int | None = None
    bytes_kept: int | None = None
    loops: tuple[tuple[int | None, int, int], ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return a line of the table below `HEADER`."""
        counted = (self.refused,)
        if self.compiles:
            sizes = (f"{n / 1e9:.3g}" for n in (self.bytes_written, self.bytes_kept) if n is not None)
            counted = (*sizes, str(self.kernels), f"{self.seconds:.0f} s")
        return _LINE.format(self.program, self.device, self.dtype, " ".join(f"{c:>9}" for c in counted))


_LINE = "{:24} {:6} {:8} {}"
HEADER = _LINE.format(
    "program", "device", "dtype", f"{'GB written':>9} {'GB kept':>8} {'kernels':>9} {'compiled in':>9}"
)


# Bytes of an entry, by XLA's name of its type.
_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "s64": 8, "u64": 8, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
_KERNELS = {
    *("fusion", "sort", "custom-call", "copy", "dot", "convolution", "reduce", "scatter", "gather", "iota", "select"),
    *("dynamic-update-slice", "dynamic-slice", "cholesky", "triangular-solve", "transpose", "broadcast", "add"),
    "multiply",
}


def size_of(shape: str) -> int:
    """Return the bytes of an array, or of a tuple of arrays, with XLA's name of its shape, as f64[4,256]{1,0}."""
    total = 0
    for dtype, sides in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        size = _BYTES.get(dtype, 0)
        for side in filter(None, sides.split(",")):
            size *= int(side)
        total += size
    return total


class Cost(NamedTuple):
    """Kernels of a computation, the bytes that they write and read, and its loops as in `Record`."""

    kernels: int = 0
    written: int = 0
    read: int = 0
    loops: tuple[tuple[int | None, int, int], ...] = ()

    def plus(self, other: Cost, times: int = 1) -> Cost:
        counts = (a + times * b for a, b in zip(self[:3], other[:3], strict=True))
        return Cost(*counts, self.loops + other.loops)


def cost_of(text: str) -> Cost:
    """Return the cost of a compiled program from its text, in XLA's language HLO."""
    computations: dict[str, list[str]] = {}
    lines, entry = [], ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$", line):
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line.strip())

    @functools.cache
    def cost(name: str) -> Cost:
        total, shapes = Cost(), {}
        for line in computations[name]:
            if not (match := re.match(r"(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)", line)):
                continue
            result, shape, operation, operands = match.groups()
            shapes[result] = shape
            called = re.search(r"(?:body|to_apply|calls)=%([\w.\-]+)", line)
            if operation == "while" and called:
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                steps, step = int(known[1]) if known else None, cost(called[1])
                total = total.plus(step._replace(loops=((steps, step.kernels, step.written),)), steps or 1)
            elif operation in ("call", "async-start") and called:
                total = total.plus(cost(called[1]))
            elif operation == "conditional":
                listed = re.search(r"branch_computations=\{([^}]*)\}", line)
                branches = re.findall(
                    r"%([\w.\-]+)" if listed else r"(?:true|false)_computation=%([\w.\-]+)",
                    listed[1] if listed else line,
                )
                total = total.plus(max(map(cost, branches)))
            elif operation in _KERNELS:
                read = sum(size_of(shapes.get(operand, "")) for operand in re.findall(r"%([\w.\-]+)", operands))
                total = total.plus(Cost(1, size_of(shape), read))
        return total

    return cost(entry)


@contextlib.contextmanager
def _tracing_for(target: Target) -> Iterator[None]:
    """Let the library trace its functions as it does on the target's kind of device."""
    jax.clear_caches()
    with mock.patch.object(jax, "default_backend", return_value=target.backend):
        yield
    jax.clear_caches()


@functools.cache
def _device(name: str) -> jax.Device:
    """Return a device that can be compiled for.

    Raises:
        InputError: its plugin is missing, or it belongs to another version of jax.
    """
    target = TARGETS[name]
    settings = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ.update(settings, TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost")
    advice = "install the extra: pip install -e '.[compile-only]'"
    try:
        version = importlib.metadata.version(target.package)
    except importlib.metadata.PackageNotFoundError:
        raise InputError("devices", f"must have a compiler here, {name} needs {target.package}: {advice}") from None
    if target.package.startswith("jax") and version != jax.__version__:
        text = f"must have compilers for jax {jax.__version__}, {target.package} is {version}: {advice}"
        raise InputError("devices", text)
    try:
        return topologies.get_topology_desc(**target.topology).devices[0]
    except (RuntimeError, NotImplementedError) as error:
        message = str(error).splitlines()[0]
        raise InputError("devices", f"must have a compiler here, the one of {name} says: {message}") from None


def compiled(program: str, device: str, dtype: str) -> Record:
    """Compile a program of `PROGRAMS` for a device."""
    target, start = TARGETS[device], time.perf_counter()
    sharding = SingleDeviceSharding(_device(device))

    def shape(a: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    with jax.enable_x64(dtype == "float64"), _tracing_for(target):
        try:
            function, arguments = PROGRAMS[program]()
            executable = jax.jit(function).lower(*jax.tree.map(shape, arguments)).compile()
        except Exception as error:  # one failure must not lose the other rows
            return Record(program, device, dtype, False, refused=str(error).splitlines()[0])
    found, memory = cost_of(executable.as_text()), executable.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    if kept > target.memory:
        reason = f"it keeps {kept / 1e9:.3g} GB, and the device has {target.memory / 1e9:.3g}"
        return Record(program, device, dtype, False, refused=reason, bytes_kept=kept)
    seconds = time.perf_counter() - start
    return Record(program, device, dtype, True, "", *found[:3], kept, found.loops, seconds)


Traceable = tuple[Callable[..., Any], tuple[Any, ...]]


def _of_setting(ask: Callable[[Any, Any], Any], *, model: Any = ta.DotProduct) -> Callable[[], Traceable]:
    """Return a program of sigma and alpha, whose results are the arrays of what `ask` returns."""

    def make() -> Traceable:
        name = "sigma" if model is ta.DotProduct else "tau"

        def call(value: jax.Array, alpha: jax.Array) -> Any:
            return eqx.filter(ask(model(**{name: value}), alpha), eqx.is_array)

        return call, (jnp.asarray(0.5), jnp.asarray(2.0))

    return make


_LANES = 256  # lanes of one call of the pool, see `theory.engine.WIDTHS`
_D, _STEPS = 400, 16  # dimension of the data, and steps of message passing and of training


def _state(model: ta.Model, alpha: Any) -> Any:
    return ta.solve(model, alpha, "semantic")


def _theta(sigma: jax.Array, alpha: jax.Array) -> jax.Array:
    return ta.solve(ta.DotProduct(sigma=sigma), alpha, "semantic").theta


def _lanes(number: str) -> Callable[[], Traceable]:
    """Return the pool's call of a method of `Equations`, for 256 lanes of one replicate of order 5."""

    def make() -> Traceable:
        model, rule = ta.DotProduct(), ta.Lines(5).rule(ta.DotProduct())
        start = branch_start(model, "semantic")
        setting = model, jnp.asarray(2.0), jnp.ones(2), jnp.asarray(0)
        row, of_lane = ravel_pytree((setting, ()))
        lanes = jnp.broadcast_to(row, (_LANES, row.size))
        equations = jax.eval_shape(functools.partial(_equations_all, of_lane), rule, lanes)
        place = jax.eval_shape(jax.vmap(lambda e: e.coordinates.pack(start)), equations)
        if number == "state":
            place = jax.eval_shape(jax.vmap(lambda e, v: e.search(v, Settings(), 1, 1.0)), equations, place)
        return jax.vmap(precise(getattr(Equations, number))), (equations, place)

    return make


def _slopes() -> Traceable:
    """Return the derivatives of a number of a state in one replicate, as sensitivities of an event are made of."""
    model = ta.DotProduct()
    equations = Equations(model, jnp.asarray(2.0), ta.Lines(9).rule(model).replicate(0), jnp.ones(2))

    def call(equations: Equations, x: Any) -> Any:
        return equations.gradient(x, lambda model, alpha, x: x.theta.sum() + x.m.sum())

    return call, (equations, branch_start(model, "semantic"))


def _on_data(ask: Callable[..., Any]) -> Callable[[], Traceable]:
    """Return a program of sentences in 400 dimensions, whose text holds none of them."""

    def make() -> Traceable:
        model = ta.DotProduct()
        data = jax.eval_shape(lambda key: ta.sample_data(model, _D, 2.0, key), jax.random.key(0))

        def call(model: ta.Model, data: ta.Data, start: jax.Array) -> Any:
            return eqx.filter(ask(model, data, start, steps=_STEPS), eqx.is_array)

        return call, (model, data, jax.ShapeDtypeStruct((_D, 1), model.lam.dtype))

    return make


def _broken() -> Traceable:
    """Return the 1RSB equations to first order in one replicate, which Newton's method repeats."""
    model = ta.DotProduct()
    needs(model, "solve_1rsb", float64=True)
    rule = lines_1rsb(model, ORDER, None, 2, 0)
    rs = ta.solve(model, 2.0, "semantic", rule)
    x, s, averages = _lay(rs, None, 0, rule.replicate(0))
    problem = Equations1RSB(model, rs.alpha, averages, jnp.ones(2), jnp.asarray(True), rs.replicates.train_loss[0])
    return _look, (problem, x, s, jnp.asarray(True))


PROGRAMS: dict[str, Callable[[], Traceable]] = {
    "solve": _of_setting(_state),
    "gradient of solve": lambda: (jax.grad(_theta), (jnp.asarray(0.5), jnp.asarray(2.0))),
    "solve, batch of 8": lambda: (jax.vmap(_theta), (jnp.full(8, 0.5), jnp.full(8, 2.0))),
    "evaluation of 256 lanes": _lanes("answer"),
    "states of 256 lanes": _lanes("state"),
    "slopes of an event": _slopes,
    "gamp": _on_data(ta.gamp),
    "train": _on_data(ta.train),
    "bayes": _of_setting(ta.bayes.solve),
    "sgd": _of_setting(
        lambda model, alpha: ta.dynamics.sgd(model, (0.5, 0.15, 0.15), 1.0, 6 * alpha, points=5, steps=2)
    ),
    "emergence": _of_setting(lambda model, alpha: ta.dynamics.emergence(model, 0.5, 1.0, 6 * alpha, points=5, steps=2)),
    "population": _of_setting(lambda model, alpha: ta.dynamics.population(model, 0.005 * alpha)),
    "small_start": _of_setting(ta.dynamics.small_start),
    "1RSB equations": _broken,
    "wide": _of_setting(lambda model, alpha: ta.wide.solve(model, alpha), model=ta.wide.DotProduct),
}


def _key(record: Record) -> tuple[str, str, str]:
    return record.program, record.device, record.dtype


def rise(records: Sequence[Record], earlier: Sequence[Record]) -> list[str]:
    """Return what got worse, in sentences: programs that stopped compiling, and those that write a tenth more."""
    known = {_key(r): r for r in earlier if r.compiles}
    found = []
    for record in records:
        before = known.get(_key(record))
        name = f"{record.program} for {record.device} in {record.dtype}"
        if before is None:
            continue
        if not record.compiles:
            found.append(f"{name} does not compile any more: {record.refused}")
        elif record.bytes_written > 1.1 * before.bytes_written:
            found.append(f"{name} writes {record.bytes_written / 1e9:.3g} GB, before {before.bytes_written / 1e9:.3g}")
    return found


def read(path: Path) -> list[Record]:
    """Return the records of a file."""
    return [Record(**{**row, "loops": tuple(map(tuple, row["loops"]))}) for row in json.loads(path.read_text())]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table, write the file, and return 1 if something got worse."""
    listing = "".join(f"    {name}\n" for name in PROGRAMS)
    formatter: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks compiled", description=__doc__ + listing, formatter_class=formatter
    )
    parser.add_argument("programs", nargs="*", help="all by default")
    parser.add_argument("--devices", nargs="+", default=list(TARGETS), help=f"{' and '.join(TARGETS)} by default")
    parser.add_argument("--against", type=Path, metavar="FILE", help="records of an earlier run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # a plugin without its device must not start
    try:
        for name in args.programs:
            require_choice(name, "program", PROGRAMS)
        for name in args.devices:
            _device(require_choice(name, "devices", TARGETS))
        earlier = read(args.against) if args.against else []
    except (InputError, OSError) as problem:
        parser.error(str(problem))
    path = args.out / f"{datetime.date.today().isoformat()}-compiled.json"
    stored = {_key(r): r for r in (read(path) if path.exists() else [])}
    records: list[Record] = []
    print(HEADER)
    for device in args.devices:
        for dtype in TARGETS[device].dtypes:
            for program in args.programs or PROGRAMS:
                records.append(compiled(program, device, dtype))
                print(records[-1], flush=True)
                stored[_key(records[-1])] = records[-1]
                write_whole(path, (json.dumps([asdict(r) for r in stored.values()], indent=1) + "\n").encode())
    worse = rise(records, earlier)
    print("\n".join([str(path), *worse]))
    return int(bool(worse))


if __name__ == "__main__":
    raise SystemExit(main())
