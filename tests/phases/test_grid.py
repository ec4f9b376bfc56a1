"""Grids of settings: their cells, what is tried again, and what is kept when a run ends early."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES
from toy import Toy, branch_of

import tiedattn_jax as ta
from tiedattn_jax.phases.pair import REGIONS

ALPHAS, OMEGAS = np.array([0.5, 1.0, 1.25, 2.0]), np.array([0.3, 0.35])
SETTINGS = ta.Settings(tol=4e-4, max_steps=16, warm_steps=1, damping=0.21)


def with_sigma(model, sigma):
    return eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(sigma))


def solve_grid(model, nodes, **options):
    return ta.phase_diagram(
        model, **{"alpha": ALPHAS, "omega": OMEGAS, "nodes": nodes, "devices": 1, "settings": SETTINGS, **options}
    )


@pytest.fixture(scope="module")
def diagram(model, lines, tmp_path_factory):
    """A solved diagram and its folder."""
    out = tmp_path_factory.mktemp("grid")
    progress = []
    result = solve_grid(model, lines, out=out, progress=lambda *c: progress.append(c))
    repeated = len(list(out.glob("retry-*")))
    assert progress == [*((k, 16) for k in range(17)), *((k, 16 + repeated) for k in range(16, 17 + repeated))]
    return result, out


def test_cells_are_the_states_of_the_theory(diagram):
    result, _ = diagram
    assert result.solved[0].all()
    for case in CASES:
        i, b = ALPHAS.tolist().index(case.alpha), ("positional", "semantic").index(case.branch)
        for name in ("train_loss", "gen_error"):
            mean, bar = (part[b, 0, i] for part in made.means_of(result, name))
            assert abs(mean - getattr(case, name)) < 3 * (bar + 2e-3 * getattr(case, name))
    assert result.branch_status[1, 0, 0] == ta.Status.absent  # the semantic branch ends at .716
    critical = result.alpha_c()
    assert abs(critical.alpha[0] - 1.25154) < 3 * critical.stderr()[0] + 0.005
    assert critical.alpha[1] > critical.alpha[0]


def test_what_a_diagram_says_of_its_making(diagram, lines):
    attrs = dict(diagram[0].attrs)
    assert attrs.pop("version") == ta.__version__ and len(attrs.pop("fingerprint")) > 8
    numbers = attrs.pop("numbers")
    assert numbers["lam"] == 0.01 and numbers["mixing"] == [[0.6, 0.4], [0.4, 0.6]] and "omega" not in numbers
    assert attrs == {
        "model": "DotProduct",
        "alpha": None,
        "nodes": {"rule": "lines", "size": lines.size, "replicates": 4},
        "settings": {"tol": 4e-4, "max_steps": 16, "warm_steps": 1, "damping": 0.21},
    }


def test_a_finished_run_is_read_from_its_folder(diagram, model, lines):
    reference, out = diagram
    assert list(out.glob("retry-*.npz"))
    stamps, calls = {p: p.stat().st_mtime_ns for p in out.iterdir()}, []
    resumed = solve_grid(model, lines, out=out, resume=True, progress=lambda *c: calls.append(c))
    assert resumed == reference and calls[:5] == [(k, 16) for k in (0, 4, 8, 12, 16)]
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == stamps


def test_other_settings_are_not_mixed_in(diagram, model, lines):
    _, out = diagram
    with pytest.raises(ta.InputError, match="out must not hold the pieces"):
        solve_grid(model, lines, out=out)
    moved = eqx.tree_at(lambda n: n.stack.across, lines, lines.stack.across + 1e-12)
    for other_model, nodes, options in (
        (with_sigma(model, 0.51), lines, {}),
        (model, moved, {}),
        (model, lines, {"alpha": [0.51, *ALPHAS[1:]]}),
        *((model, lines, {"settings": dataclasses.replace(SETTINGS, **{name: 2 * value})})
          for name, value in vars(SETTINGS).items()),
    ):  # fmt: skip
        with pytest.raises(ta.InputError, match="out must hold pieces of the same"):
            solve_grid(other_model, nodes, out=out, resume=True, **options)


@pytest.mark.full
def test_cells_without_branches_hold_the_uninformed_state(lines):
    """It is that of `solve`; where a large ridge keeps the student at zero, the loss is alpha times the error there."""
    layer = ta.DotProduct(omega=0.02)
    result = ta.phase_diagram(layer, alpha=[0.2, 0.3], lam=[0.003, 0.3], nodes=lines, devices=1)
    assert np.all(result.region == REGIONS.index("uninformed")) and result.trusted.all()
    loss, error = (ta.results.Average(*result.global_minimum.numbers()[k]) for k in ("train_loss", "gen_error"))
    direct = ta.solve(eqx.tree_at(lambda m: m.lam, layer, jnp.asarray(0.003)), 0.3, "uninformed", lines)
    np.testing.assert_allclose(loss.value[0, 1], direct.train_loss, rtol=1e-6)
    np.testing.assert_allclose(error.value[0, 1], direct.gen_error, rtol=1e-5)
    np.testing.assert_allclose(loss.stderr[0, 1], direct.stderr.train_loss, rtol=1e-2)
    np.testing.assert_allclose(loss.value[1], np.array([0.2, 0.3]) * error.value[1], rtol=1e-6)
    assert np.all(result.global_minimum.overlaps.q[1] < 1e-6)


# On theories in closed form


def losses(m, a):
    return 100 * m.sigma + 10 * m.omega + a


A, O, S = ALPHAS, OMEGAS, np.array([0.4, 0.5, 0.6])
MODELS = [ta.DotProduct(sigma=s) for s in S]
PLACES = ta.Axis("place", [0.0, 1.0, 2.0], lambda m, v: with_sigma(m, S[int(v)]))
# Model, axes and numbers; the names of the axes of the diagram; alpha, omega and sigma in its cells.
LAYOUTS = {
    "alpha to the right": ((MODELS[1], {"alpha": A, "omega": O}), "alpha omega", (A, O[:, None], 0.5)),
    "alpha upwards": ((MODELS[1], {"omega": O, "alpha": A}), "omega alpha", (A[:, None], O, 0.5)),
    "two numbers": ((MODELS[1], {"omega": O, "sigma": S, "alpha": 2.0}), "omega sigma", (2.0, O, S[:, None])),
    "axes": ((MODELS[1], ta.Axis("sigma", S), ta.Axis("alpha", A), {}), "sigma alpha", (A[:, None], 0.3, S)),
    "models": ((MODELS, {"alpha": A, "lam": 0.02}), "model alpha", (A[:, None], 0.3, S)),
    "pairs": ((list(zip(MODELS, A[:3], strict=True)), {"omega": O}), "model omega", (A[:3], O[:, None], S)),
    "a number of the caller's": ((MODELS[1], PLACES, {"alpha": A}), "place alpha", (A[:, None], 0.3, S)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_cell_has_its_setting(theory, name):
    (*arguments, numbers), names, (alpha, omega, sigma) = LAYOUTS[name]
    theory(Toy({"positional": losses, "semantic": lambda m, a: 2 * losses(m, a)}))
    result = ta.phase_diagram(*arguments, **numbers, nodes=ta.Lines(3, replicates=2), devices=1)
    assert [result.x[0], result.y[0]] == names.split()
    for state, factor in ((result.positional, 1), (result.semantic, 2)):
        numbers_of = state.alpha, state.model.omega, state.model.sigma, state.train_loss / factor
        for a, expected in zip(numbers_of, (alpha, omega, sigma, 100 * sigma + 10 * omega + alpha), strict=True):
            np.testing.assert_allclose(a, np.broadcast_to(expected, (result.y[1].size, result.x[1].size)), rtol=1e-12)
    constant = result.attrs["numbers"]
    assert result.attrs["alpha"] == (2.0 if np.ndim(alpha) == 0 else None)
    assert [k in constant for k in ("omega", "sigma")] == [np.ndim(omega) == 0, np.ndim(sigma) == 0]


class Narrow(Toy):
    """States with q = alpha. The semantic ones at alpha = .5 and 1.25 are found from q = 1 only."""

    def state(self, lane):
        state, q = super().state(lane), float(np.mean(np.asarray(lane.start.q)))
        if branch_of(lane.setting.free) == "semantic" and lane.setting.alpha in (0.5, 1.25) and abs(q - 1) > 1e-9:
            state = dataclasses.replace(state, status=np.asarray(2), residual=np.asarray(1.0))
        x = dataclasses.replace(state.overlaps, q=np.full_like(state.overlaps.q, lane.setting.alpha))
        return dataclasses.replace(state, overlaps=x)


def test_cells_are_tried_again_from_their_neighbours(theory, model, rule, tmp_path):
    """At alpha = 1.25 the track fails, and at .5 it finds the uninformed state; the neighbour at 1 leads to both."""
    toy = Narrow({"positional": losses, "semantic": losses, "uninformed": losses}, where={
        "uninformed": lambda m, a: a < 1})  # fmt: skip
    theory(toy)
    counts = []
    result = solve_grid(model, rule, out=tmp_path, omega=[0.3], progress=lambda *c: counts.append(c))
    assert np.all(result.branch_status == 0)
    np.testing.assert_allclose(result.semantic.train_loss, [53 + A], rtol=1e-12)
    assert counts == [*((k, 8) for k in range(9)), (8, 10), (9, 10), (10, 10)]  # repetitions count, too
    asked = len(toy.settings)
    assert solve_grid(model, rule, omega=[0.3], out=tmp_path, resume=True) == result
    assert len(toy.settings) == asked


class Broken(Toy):
    def state(self, lane):
        if (
            branch_of(lane.setting.free) == "semantic"
            and lane.setting.model.omega == 0.35
            and lane.setting.alpha == 1.0
        ):
            raise ZeroDivisionError("of the loss")
        return super().state(lane)


@pytest.mark.parametrize("how", ["a track fails", "interrupted", "interrupted without a folder"])
def test_what_is_kept_of_a_run_that_ended_early(theory, model, rule, tmp_path, how):
    """The error names the track, and all others are kept; an interrupt tells whether the call can go on."""

    def interrupt(done, total):
        if done > 4:
            raise KeyboardInterrupt

    numbers = {"positional": losses, "semantic": losses}
    options = {} if how.endswith("folder") else {"out": tmp_path}
    error, kept, words = {
        "a track fails": (ZeroDivisionError, 3, "This happened at the semantic branch in row 1, alpha = 0.5 to 2."),
        "interrupted": (KeyboardInterrupt, 1, f"out='{tmp_path}': the same call with resume=True goes on from there"),
        "interrupted without a folder": (KeyboardInterrupt, 0, "nothing is kept"),
    }[how]
    theory(Broken(numbers) if error is ZeroDivisionError else Toy(numbers))
    progress = interrupt if error is KeyboardInterrupt else None
    with pytest.raises(error) as raised:
        solve_grid(model, rule, progress=progress, width=1, **options)
    (note,) = raised.value.__notes__
    assert words in note and len(list(tmp_path.glob("piece-*.npz"))) == kept
    if kept:
        theory(Toy(numbers))
        calls = []
        resumed = solve_grid(model, rule, resume=True, progress=lambda *c: calls.append(c), **options)
        assert calls == [(k, 16) for k in (*range(0, 4 * kept, 4), *range(4 * kept, 17))] and np.all(
            resumed.branch_status == 0
        )


# Processes and devices


def launch(setup: str, body: str, *arguments: str, stderr: int | None = None, **environment: str) -> subprocess.Popen:
    """Start a process that solves the grid of these tests."""
    script = f"""
import sys, time, jax
jax.config.update("jax_enable_x64", True)
{setup}
import tiedattn_jax as ta
ta.use_compilation_cache()
model = ta.DotProduct()
nodes = ta.Lines(5).rule(model)
settings = ta.Settings({SETTINGS.tol}, {SETTINGS.max_steps}, {SETTINGS.warm_steps}, {SETTINGS.damping})
def go(**options):
    axes = {{"alpha": {ALPHAS.tolist()}, "omega": {OMEGAS.tolist()}}}
    return ta.phase_diagram(model, **axes, nodes=nodes, settings=settings, **options)
{body}
"""
    root = str(Path(ta.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": jax.default_backend(), **environment}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=env, stderr=stderr)


def assert_same(a: ta.results.PhaseDiagram, b: ta.results.PhaseDiagram, rtol: float) -> None:
    assert a.attrs["fingerprint"] == b.attrs["fingerprint"]
    for first, second in ((a.positional, b.positional), (a.semantic, b.semantic)):
        np.testing.assert_array_equal(first.replicates.status, second.replicates.status)
        has_state = np.all(first.replicates.status <= ta.Status.stalled, -1)
        for name in ("train_loss", "gen_error", "q", "V"):
            numbers = (np.asarray(p.replicates.numbers()[name])[has_state] for p in (first, second))
            np.testing.assert_allclose(*numbers, rtol=rtol)


@pytest.mark.full
def test_eight_devices_give_the_same(diagram, tmp_path):
    file = str(tmp_path / "eight.npz")
    body = f"assert jax.device_count() == 8\ngo(devices=8, out={str(tmp_path)!r}).save({file!r})"
    assert launch("", body, XLA_FLAGS="--xla_force_host_platform_device_count=8").wait(300) == 0
    assert_same(ta.results.PhaseDiagram.load(file), diagram[0], 1e-9)


def joined(options="", arguments=""):
    """Lines that join one of two processes, whose index is the argument of the script."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return f"{options}\njax.distributed.initialize({address!r}, 2, int(sys.argv[1]){arguments})"


@pytest.mark.full
def test_two_processes_give_the_same(diagram, tmp_path):
    folder = str(tmp_path)  # only with a folder does the fingerprint contain what the model computes
    setup, body = joined(), f"go(devices=1, out={folder!r}).save({folder!r} + '/' + sys.argv[1] + '.npz')"
    processes = [launch(setup, body, str(i)) for i in range(2)]
    assert [p.wait(300) for p in processes] == [0, 0]
    for i in range(2):
        assert_same(ta.results.PhaseDiagram.load(tmp_path / f"{i}.npz"), diagram[0], 1e-9)


@pytest.mark.full
def test_one_of_two_processes_killed(diagram, model, lines, tmp_path):
    """If one of two processes is killed, the other one finishes its share and says how to go on, and that works."""
    options = 'import os\njax.config.update("jax_enable_recoverability", True)'
    setup = joined(options, ", heartbeat_timeout_seconds=10")
    body = f"""
def progress(done, total):
    if sys.argv[1] == "1" and os.path.exists({str(tmp_path / "piece-00001.npz")!r}):
        os.kill(os.getpid(), 9)
go(devices=1, out={str(tmp_path)!r}, progress=progress)"""
    processes = [launch(setup, body, str(i), stderr=subprocess.PIPE) for i in range(2)]
    messages = [p.communicate(timeout=300)[1].decode() for p in processes]
    assert [p.returncode for p in processes] == [1, -signal.SIGKILL]
    sentence = f"process 1 ended before all was done; finished pieces are in out='{tmp_path}'"
    assert messages[0].strip().endswith(f"RuntimeError: {sentence}: the same call with resume=True goes on from there")
    assert len(list(tmp_path.glob("piece-*.npz"))) == 3  # two of this process, one of the other
    calls = []
    resumed = solve_grid(model, lines, out=tmp_path, resume=True, progress=lambda *c: calls.append(c))
    assert_same(resumed, diagram[0], 1e-9)
    assert calls[:4] == [(k, 16) for k in (0, 4, 8, 12)]


@pytest.mark.full
def test_one_search_at_a_time_gives_the_same(diagram, model, lines, tmp_path):
    assert_same(solve_grid(model, lines, width=1, out=tmp_path), diagram[0], 1e-12)
