"""The count of what a compiled program will do, and what `benchmarks.compiled` refuses. No device's compiler runs."""

import importlib.metadata
import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are not part of the package

from benchmarks import __main__ as command, compiled
from benchmarks.compiled import TARGETS, Cost, Record, cost_of, read, rise, size_of

# One kernel, a loop of 24 steps of two kernels each, a loop of unknown length, and a condition with a longer side.
TEXT = """HloModule jit_call, entry_computation_layout={(f64[4]{0})->f64[4]{0}}

%step (s: f64[4]) -> f64[4] {
  %s = f64[4]{0} parameter(0)
  %half = f64[4]{0} fusion(%s), kind=kLoop, calls=%fused
  ROOT %done = (f64[4]{0}, pred[]) fusion(%half, %s), kind=kLoop, calls=%fused
}

%wait (s: f64[4]) -> f64[4] {
  %s = f64[4]{0} parameter(0)
  ROOT %copy = f64[4]{0} copy(%s)
}

%short (s: f64[4]) -> f64[4] {
  ROOT %s = f64[4]{0} parameter(0)
}

ENTRY %main (x: f64[4]) -> f64[4] {
  %x = f64[4]{0} parameter(0)
  %first = f64[2,4]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %loop = f64[4]{0} while(%first), condition=%c, body=%step, backend_config={"known_trip_count":{"n":"24"}}
  %other = f64[4]{0} while(%loop), condition=%c, body=%wait
  ROOT %sides = f64[4]{0} conditional(%p, %other, %other), branch_computations={%short, %wait}
}
"""


def test_a_program_is_counted_loop_by_loop():
    assert size_of("f64[4,256]{1,0}") == 8192 and size_of("(f32[3], pred[], s32[2]{0})") == 12 + 1 + 8
    assert size_of("f64[]") == 8 and size_of("token[]") == 0
    a = 4 * 8
    step = 2, a + a + 1  # kernels and bytes written
    loops = (24, *step), (None, 1, a)
    expected = Cost(1 + 24 * 2 + 1 + 1, 2 * a + 24 * step[1] + 2 * a, a + 24 * (a + 2 * a) + a + a, loops)
    assert cost_of(TEXT) == expected
    # The text of a real program is understood: that of a loop on this machine's CPU.
    real = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda _, a: (a @ a).T + x, x)).lower(jax.numpy.eye(5)).compile()
    counted = cost_of(real.as_text())
    assert [steps for steps, *_ in counted.loops] == [7] and counted.written >= 7 * 200


@pytest.mark.full
@pytest.mark.parametrize("program", ["sgd", "small_start", "gamp"])
def test_programs_can_be_traced_for_accelerators(program):
    """Programs are lowered for a GPU and for a TPU, which finds what has no rule there."""
    for target, platform in ((TARGETS["h100"], "cuda"), (TARGETS["v5e"], "tpu")):
        with jax.enable_x64(False), compiled._tracing_for(target):
            call, arguments = compiled.PROGRAMS[program]()
            jax.jit(call).trace(*arguments).lower(lowering_platforms=(platform,))


def test_what_got_worse_is_named(tmp_path):
    good = Record("gamp", "h100", "float64", True, "", 10, 1000, 2000, 500, ((4, 2, 30),), 1.0)
    path = tmp_path / "records.json"
    path.write_text(json.dumps([vars(good)]))
    assert read(path) == [good]

    def changed(**fields):
        return [Record(**{**vars(good), **fields})]

    assert rise(changed(bytes_written=1099), [good]) == rise(changed(program="new"), [good]) == []
    assert rise(changed(bytes_written=1101), [good]) == ["gamp for h100 in float64 writes 1.1e-06 GB, before 1e-06"]
    (lost,) = rise(changed(compiles=False, refused="no rule"), [good])
    assert lost == "gamp for h100 in float64 does not compile any more: no rule"
    assert "no rule" in str(changed(compiles=False, refused="no rule")[0]) and " 10 " in str(good)


def test_bad_input(capsys, monkeypatch):
    def fails(*argv):
        with pytest.raises(SystemExit, match="2"):
            command.main(["compiled", *argv])
        return capsys.readouterr().err.splitlines()[-1]

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert "program must be one of 15 names, of which the nearest are solve, " in fails("solved")
    assert "devices must be one of h100, v5e, got devices='a100'" in fails("--devices", "a100")
    compiled._device.cache_clear()
    for version, told in (
        (absent, "devices must have a compiler here, h100 needs jax-cuda12-plugin"),
        (lambda name: "0.1.0", f"must have compilers for jax {jax.__version__}, jax-cuda12-plugin is 0.1.0"),
    ):
        monkeypatch.setattr(importlib.metadata, "version", version)
        message = fails("--devices", "h100")
        assert told in message and message.endswith("install the extra: pip install -e '.[compile-only]'")


def test_a_program_that_is_refused_is_a_record(monkeypatch):
    monkeypatch.setattr(compiled, "_device", lambda name: jax.devices()[0])
    record = compiled.compiled("1RSB equations", "v5e", "float32")
    assert not record.compiles and record.refused.startswith("model must be in float64 for solve_1rsb")


def test_the_stored_records_are_of_these_programs():
    (*_, path) = sorted((Path(compiled.__file__).parent / "results").glob("*-compiled.json"))
    records = read(path)
    assert {r.program for r in records} <= set(compiled.PROGRAMS) and {r.device for r in records} == set(TARGETS)
    assert all(r.compiles != bool(r.refused) for r in records)
