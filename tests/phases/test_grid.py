import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.phases import grid

ALPHAS, OMEGAS = [0.5, 1.0, 1.25, 2.0], [0.3, 0.35, 0.45]


@pytest.fixture(scope="module")
def diagram(model, lines, tmp_path_factory):
    out = tmp_path_factory.mktemp("grid")
    calls = []
    found = ta.phase_diagram(
        model, ALPHAS, OMEGAS, lines, devices=1, out=out, progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(4 * k, 24) for k in range(7)]
    return found, out


def test_cells_are_the_states_of_the_theory(diagram):
    found, _ = diagram
    assert found.solved[0].all()
    for case in CASES:
        i, b = ALPHAS.index(case.alpha), ("positional", "semantic").index(case.branch)
        for name in ("train_loss", "gen_error"):
            bar = found.stderr(name)[b, 0, i] + 2e-3 * getattr(case, name)
            assert abs(found.mean(name)[b, 0, i] - getattr(case, name)) < 3 * bar
    assert found.status[1, 0, 0] == ta.Status.absent  # the semantic branch ends at .716
    critical = found.alpha_c()
    assert abs(critical.alpha[0] - 1.25154) < 3 * critical.stderr[0] + 0.005
    assert critical.alpha[1] > critical.alpha[0] and np.isnan(critical.alpha[2])  # beyond the grid at omega = .45


def program(setup: str, body: str) -> str:
    """A script that solves the grid of these tests on its own."""
    return f"""
import sys, time, jax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", {os.environ["TIEDATTN_CACHE"]!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
{setup}
import tiedattn_jax as ta
model = ta.dot_product()
nodes = ta.line_nodes(model, 5)
def go(**options):
    return ta.phase_diagram(model, {ALPHAS}, {OMEGAS}, nodes, **options)
{body}
"""


def run(script: str, *arguments: str, **environment: str) -> subprocess.Popen:
    where = str(Path(ta.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": where, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=env)


def same(a: ta.PhaseDiagram, b: ta.PhaseDiagram, rtol: float) -> None:
    assert set(a.cells) == set(b.cells) and a.attrs["fingerprint"] == b.attrs["fingerprint"]
    np.testing.assert_array_equal(a.cells["status"], b.cells["status"])
    found = np.all(a.cells["status"] <= ta.Status.stalled, -1)
    for name in ("train_loss", "gen_error", "q", "V"):
        np.testing.assert_allclose(a.cells[name][found], b.cells[name][found], rtol=rtol)


def test_a_killed_run_goes_on_where_it_was(diagram, model, lines, tmp_path):
    whole, _ = diagram
    slow = program("", f"go(devices=1, out={str(tmp_path)!r}, progress=lambda done, total: time.sleep(0.3))")
    process = run(slow)
    deadline = time.monotonic() + 300
    while not (kept := sorted(tmp_path.glob("track-*.npz"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = sorted(tmp_path.glob("track-*.npz"))
    assert 0 < len(kept) < 6
    stamps = [p.stat().st_mtime_ns for p in kept]
    calls = []
    again = ta.phase_diagram(
        model, ALPHAS, OMEGAS, lines, devices=1, out=tmp_path, resume=True, progress=lambda *c: calls.append(c)
    )
    assert calls[0] == (4 * len(kept), 24) and len(calls) == 7 - len(kept)
    assert stamps == [p.stat().st_mtime_ns for p in kept]
    assert not list(tmp_path.glob(".*"))
    same(again, whole, 1e-12)


def test_cells_tried_again_are_kept(diagram, model, lines, monkeypatch):
    whole, out = diagram
    assert list(out.glob("retry-*.npz"))

    def forbidden(*_):
        raise AssertionError("a cell was tried again that had been before")

    monkeypatch.setattr(grid, "search", forbidden)
    again = ta.phase_diagram(model, ALPHAS, OMEGAS, lines, devices=1, out=out, resume=True)
    for name, values in whole.cells.items():
        np.testing.assert_array_equal(again.cells[name], values)


def test_retries_keep_the_settings_of_the_caller(model, lines):
    given = ta.Settings(tol=1e-4, max_steps=7, warm_steps=400, damping=0.1)
    patient = grid.patient(given)
    assert (float(patient.tol), int(patient.max_steps)) == (1e-4, 14)
    assert (int(patient.warm_steps), float(patient.damping)) == (400, 0.1)


def test_other_settings_are_not_mixed_in(diagram, model, lines):
    _, out = diagram
    with pytest.raises(ValueError, match="out must not hold the pieces"):
        ta.phase_diagram(model, ALPHAS, OMEGAS, lines, out=out)
    moved = eqx.tree_at(lambda n: n.stack.across, lines, lines.stack.across + 1e-12)
    other = eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(0.51))
    for arguments in (
        (other, ALPHAS, OMEGAS, lines),
        (model, [0.51, *ALPHAS[1:]], OMEGAS, lines),
        (model, ALPHAS, OMEGAS, moved),
    ):
        with pytest.raises(ValueError, match="out must hold pieces of the same"):
            ta.phase_diagram(*arguments, out=out, resume=True)


@pytest.mark.slow
def test_eight_devices_give_the_same(diagram, tmp_path):
    whole, _ = diagram
    file = str(tmp_path / "eight.npz")
    body = f"assert jax.device_count() == 8\ngo(devices=8).save({file!r})"
    assert run(program("", body), XLA_FLAGS="--xla_force_host_platform_device_count=8").wait(300) == 0
    same(ta.PhaseDiagram.load(file), whole, 1e-9)


@pytest.mark.slow
def test_two_processes_give_the_same(diagram, tmp_path):
    whole, _ = diagram
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    setup = f"jax.distributed.initialize({address!r}, 2, int(sys.argv[1]))"
    body = f"go(devices=1).save({str(tmp_path)!r} + '/' + sys.argv[1] + '.npz')"
    both = [run(program(setup, body), str(i)) for i in range(2)]
    assert [p.wait(300) for p in both] == [0, 0]
    for i in range(2):
        same(ta.PhaseDiagram.load(tmp_path / f"{i}.npz"), whole, 1e-9)


@pytest.mark.slow
def test_lanes_in_lockstep_give_the_same(diagram, model, lines):
    whole, _ = diagram
    found = ta.phase_diagram(model, ALPHAS, OMEGAS, lines, devices=1, lanes=4)
    same(found, whole, 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": []}, "x must be one or more"),
        ({"x": [1.0, 0.5]}, "x must be one or more finite, increasing"),
        ({"x": [1.0, np.nan]}, "x must be one or more finite"),
        ({"x": [0.0, 1.0]}, "x must be positive for alpha"),
        ({"y": [0.3, 1.2]}, "omega must be in"),
        ({"y": ("omegas", [0.3])}, "y must name alpha, a scalar number"),
        ({"y": ("mixing", [0.3])}, "y must name alpha, a scalar number"),
        ({"y": ("alpha", [0.3])}, "y must be another parameter"),
        ({"alpha": 1.0}, "alpha must be given if and only if"),
        ({"x": ("sigma", [0.5])}, "alpha must be given if and only if"),
        ({"devices": 99}, "devices must be between 1 and"),
        ({"out": "/dev/null/here"}, "out must be a folder"),
    ],
)
def test_bad_input(model, lines, change, message):
    arguments = {"x": ALPHAS, "y": OMEGAS, "nodes": lines, **change}
    with pytest.raises(ValueError, match=message):
        ta.phase_diagram(model, **arguments)
