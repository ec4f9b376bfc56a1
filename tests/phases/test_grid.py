import dataclasses
import operator
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, POOL_ROUNDING

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import COARSE
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.model.parameters import Axis
from tiedattn_jax.phases import grid
from tiedattn_jax.phases.diagram import REGIONS
from tiedattn_jax.phases.follow import Follower
from tiedattn_jax.phases.questions import numbers_of_states
from tiedattn_jax.phases.sweep import Grid
from tiedattn_jax.theory.engine import run, run_one
from tiedattn_jax.theory.paths import Lane
from tiedattn_jax.theory.solve import Problem

ALPHAS, OMEGAS = [0.5, 1.0, 1.25, 2.0], [0.3, 0.35]
SETTINGS = ta.Settings(tol=4e-4, max_steps=16, warm_steps=1, damping=0.21)


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
    assert progress[:17] == [(k, 16) for k in range(17)]
    repeated = len(list(out.glob("retry-*")))
    assert progress[17:] == [(k, 16 + repeated) for k in range(16, 17 + repeated)]  # they are counted, too
    return result, out


@pytest.fixture
def canned(semantic_states, model, monkeypatch):
    """Replace solves by a row of cells with known states, which tests change, and record every request."""
    row = jax.tree.map(lambda a: np.array(jnp.broadcast_to(a, (2, len(ALPHAS), *a.shape))), semantic_states)
    cells = row.numbers()
    requests = {"first": [], "tracks": [], "again": []}

    def coarse_lane(problem, x):
        requests["first"].append(problem.settings)
        return made.finished_path(SimpleNamespace(status=0, overlaps=x))

    class Follower:
        def __init__(self, nodes, settings, free, start):
            self.settings, self.branch, self.start, self.cells = settings, int(free[0]), start, 0

        def advance(self, cell_model, alpha, value, warm):
            if not self.cells:
                requests["tracks"].append(self.settings)
            self.cells += 1
            return made.finished_path((warm, indexed(row, (self.branch, ALPHAS.index(float(alpha))))))

        def search(self, cell_model, alpha, guess, was_absent):
            default = bool(jnp.all(guess.q == self.start.q))
            requests["again"].append((float(alpha), None if default else float(guess.q[0, 0, 0, 0]), self.settings))
            assert guess.q.shape[0] == 4 and was_absent is False
            state = jax.tree.map(jnp.asarray, indexed(row, (1, 2)))
            residual = state.residual * (1.0 if alpha > 1 else 0.05)  # not resolved, if it is a state
            return made.finished_path(dataclasses.replace(state, residual=residual))

    monkeypatch.setattr(Problem, "coarse_lane", coarse_lane)
    monkeypatch.setattr(grid, "Follower", Follower)
    return cells, requests


def test_cells_are_the_states_of_the_theory(diagram):
    result, _ = diagram
    assert result.solved[0].all()
    for case in CASES:
        i, b = ALPHAS.index(case.alpha), ("positional", "semantic").index(case.branch)
        for name in ("train_loss", "gen_error"):
            mean, bar = (part[b, 0, i] for part in made.means_of(result, name))
            assert abs(mean - getattr(case, name)) < 3 * (bar + 2e-3 * getattr(case, name))
    assert result.status[1, 0, 0] == ta.Status.absent  # the semantic branch ends at .716
    critical = result.alpha_c()
    assert abs(critical.alpha[0] - 1.25154) < 3 * critical.stderr()[0] + 0.005
    assert critical.alpha[1] > critical.alpha[0]


def test_cells_without_branches_hold_the_uninformed_state(lines):
    """It is that of `solve`; where a large ridge keeps the student at zero, the loss is alpha times the error there."""
    layer = ta.DotProduct(omega=0.02)
    result = ta.phase_diagram(layer, alpha=[0.2, 0.3], lam=[0.003, 0.3], nodes=lines, devices=1)
    assert np.all(result.region == REGIONS.index("uninformed")) and result.trusted.all()
    loss, error = (ta.Average(*numbers_of_states(result.global_minimum)[k]) for k in ("train_loss", "gen_error"))
    direct = ta.solve(eqx.tree_at(lambda m: m.lam, layer, jnp.asarray(0.003)), 0.3, "uninformed", lines)
    np.testing.assert_allclose(loss.value[0, 1], direct.train_loss, rtol=1e-6)
    np.testing.assert_allclose(error.value[0, 1], direct.gen_error, rtol=1e-5)
    np.testing.assert_allclose(loss.stderr[0, 1], direct.stderr.train_loss, rtol=1e-2)
    np.testing.assert_allclose(loss.value[1], np.array([0.2, 0.3]) * error.value[1], rtol=1e-6)
    assert np.all(result.global_minimum.overlaps.q[1] < 1e-6)


def program(setup: str, body: str) -> str:
    """A script that solves the grid of these tests in its own process."""
    return f"""
import sys, time, jax
jax.config.update("jax_enable_x64", True)
{setup}
import tiedattn_jax as ta
ta.use_compilation_cache()
model = ta.DotProduct()
nodes = ta.Lines(5).rule(model)
settings = ta.Settings({SETTINGS.tol}, {SETTINGS.max_steps}, {SETTINGS.warm_steps}, {SETTINGS.damping})
def go(**options):
    return ta.phase_diagram(model, alpha={ALPHAS}, omega={OMEGAS}, nodes=nodes, settings=settings, **options)
{body}
"""


def launch(script: str, *arguments: str, stderr: int | None = None, **environment: str) -> subprocess.Popen:
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


def test_a_killed_run_goes_on_where_it_was(diagram, model, lines, tmp_path):
    reference, _ = diagram
    slow = program("", f"go(devices=1, out={str(tmp_path)!r}, progress=lambda done, total: time.sleep(0.3))")
    process = launch(slow)
    deadline = time.monotonic() + 300
    while not (tracks := sorted(tmp_path.glob("track-*.npz"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    tracks = sorted(tmp_path.glob("track-*.npz"))
    assert 0 < len(tracks) < 4
    stamps = [p.stat().st_mtime_ns for p in tracks]
    calls = []
    resumed = solve_grid(model, lines, out=tmp_path, resume=True, progress=lambda *c: calls.append(c))
    assert calls[: 17 - 4 * len(tracks)] == [(k, 16) for k in range(4 * len(tracks), 17)]
    assert stamps == [p.stat().st_mtime_ns for p in tracks]
    assert not list(tmp_path.glob(".*"))
    assert_same(resumed, reference, 1e-9)  # the other process may have compiled with other options


def test_cells_tried_again_are_kept(diagram, model, lines):
    reference, out = diagram
    assert list(out.glob("retry-*.npz"))

    def forbidden(*_):
        raise AssertionError("a cell was tried again that had been before")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "Follower", forbidden)
        resumed = solve_grid(model, lines, out=out, resume=True)
    assert resumed == reference


def numbers(settings):
    return [float(v) for v in (settings.tol, settings.max_steps, settings.warm_steps, settings.damping)]


def test_what_is_tried_again_and_with_what(canned, model, lines):
    """A failed cell is tried again from its neighbours and the default start, an absent one from one neighbour."""
    cells, requests = canned
    cells["q"] *= np.arange(1.0, 5.0)[:, None, None, None, None]
    cells["status"][1, 0] = ta.Status.absent
    cells["status"][1, 2], cells["residual"][1, 2] = ta.Status.max_steps, 1.0
    counts = []
    result = solve_grid(model, lines, omega=[0.3], progress=lambda *c: counts.append(c))
    assert counts == [*((k, 8) for k in range(9)), (8, 10), (9, 10), (10, 10)]  # repetitions count, too
    q, usual, longer = cells["q"][1, :, 0, 0, 0, 0], numbers(SETTINGS), [4e-4, 32, 300, 0.21]
    expected = [(0.5, q[1], usual), (1.25, q[3], longer), (1.25, q[1], longer), (1.25, None, longer)]
    assert [(alpha, guess, numbers(settings)) for alpha, guess, settings in requests["again"]] == expected
    np.testing.assert_array_equal(made.cells_of(result)["status"][:, 0], cells["status"])
    assert [numbers(settings) for settings in requests["tracks"]] == [usual, usual]
    first = [[1e-3, 32, 300, 0.21]] * 2  # for both branches, on coarse averages, from far away
    assert [numbers(settings) for settings in requests["first"]] == first
    assert "omega" not in result.attrs["numbers"] and result.attrs["numbers"]["sigma"] == 0.5
    assert result.attrs["settings"] == {"tol": 4e-4, "max_steps": 16, "warm_steps": 1, "damping": 0.21}
    longer = grid.with_more_steps(ta.Settings(tol=1e-4, max_steps=7, warm_steps=400, damping=0.1))
    assert numbers(longer) == [1e-4, 14, 400, 0.1]


def test_the_default_settings(canned, model, lines):
    _, requests = canned
    ta.phase_diagram(model, alpha=ALPHAS, omega=[0.3], nodes=lines, devices=1)
    assert [numbers(settings) for settings in requests["tracks"]] == [[5e-4, 15, 0, 0.2]] * 2
    assert [numbers(settings) for settings in requests["first"]] == [[1e-3, 30, 300, 0.2]] * 2


@pytest.mark.parametrize("turned", [False, True])
def test_tracks_run_along_alpha_from_the_largest(canned, model, lines, turned):
    cells, _ = canned
    cells["q"] *= np.arange(1.0, 5.0)[:, None, None, None, None]
    axes = ta.Axis("alpha", ALPHAS), ta.Axis("sigma", [0.5, 0.6])
    result = ta.phase_diagram(model, *(axes[::-1] if turned else axes), nodes=lines, devices=1)
    q = made.cells_of(result)["q"]
    q = np.swapaxes(q, 1, 2) if turned else q
    for row in (0, 1):
        np.testing.assert_array_equal(q[:, row], cells["q"])


def test_a_diagram_of_models(canned, model, lines):
    """Models of a list are an axis, with numbers that they share; tracks run along the other one."""
    cells, _ = canned
    cells["q"] *= np.arange(1.0, 5.0)[:, None, None, None, None]
    models = [eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(s)) for s in (0.4, 0.5, 0.6)]
    result = ta.phase_diagram(models, alpha=ALPHAS, lam=0.02, nodes=lines, devices=1)
    assert result.x[0] == "model" and result.x[1].tolist() == [0, 1, 2] and result.y[0] == "alpha"
    np.testing.assert_allclose(result.semantic.model.sigma, [[0.4, 0.5, 0.6]] * len(ALPHAS))
    np.testing.assert_allclose(result.semantic.alpha, np.transpose([ALPHAS] * 3))
    q = made.cells_of(result)["q"]
    for column in range(3):
        np.testing.assert_array_equal(q[:, :, column], cells["q"])
    assert result.attrs["numbers"]["lam"] == 0.02 and "sigma" not in result.attrs["numbers"]
    pairs = [(m, a) for m, a in zip(models, (1.0, 2.0, 1.25), strict=True)]
    result = ta.phase_diagram(pairs, omega=[0.2, 0.3, 0.4, 0.5], nodes=lines, devices=1)
    np.testing.assert_allclose(result.semantic.alpha, [[1.0, 2.0, 1.25]] * 4)
    np.testing.assert_allclose(result.semantic.model.omega[:, 0], [0.2, 0.3, 0.4, 0.5])
    assert result.attrs["alpha"] is None


def test_a_number_of_the_callers_needs_no_jax(canned, model, lines):
    """The function of an axis is called with single values, as in `sweep`."""
    sigmas = ta.Axis("place", [0.0, 1.0], lambda m, v: eqx.tree_at(lambda m: m.sigma, m, jnp.array([0.4, 0.6][int(v)])))
    result = ta.phase_diagram(model, sigmas, alpha=ALPHAS, nodes=lines, devices=1)
    np.testing.assert_allclose(result.positional.model.sigma, [[0.4, 0.6]] * len(ALPHAS))


@pytest.fixture
def rows(model, lines):
    """The grid of these tests before anything is solved."""
    axes = Axis("omega", np.array(OMEGAS)), Axis("alpha", np.array(ALPHAS))
    return grid._Grid.of(Grid.of(model, axes, {}, with_alpha=True), lines, SETTINGS)


def test_a_track_alone_gives_the_same(diagram, rows):
    """A track in a pool of its own gives the same numbers as among other tracks."""
    result, _ = diagram
    calls = []
    firsts = run_one(rows.first_cells(1))
    track = run_one(rows.track(1, 0, firsts, lambda: calls.append(1)))
    assert len(calls) == 4
    expected = jax.tree.map(lambda a: a[0, ::-1], result.semantic.replicates)
    has_state = expected.status <= ta.Status.stalled  # other cells may have been tried again
    for values, others in zip(jax.tree.leaves(track), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(values[has_state], others[has_state], POOL_ROUNDING)


def test_the_steps_of_a_track(rows, semantic_states, monkeypatch):
    """A track starts at the largest alpha near the first cell, and goes on from each cell to the next."""
    steps, settings = [], []

    def advance(self, model, alpha, value, warm):
        steps.append((float(alpha), float(value), float(model.omega), warm))
        settings.append(self.settings)
        return made.finished_path((len(steps), semantic_states))

    monkeypatch.setattr(Follower, "advance", advance)
    firsts = [BRANCHES["semantic"].start(ta.DotProduct()), semantic_states.overlaps]
    done = []
    cells = run_one(rows.track(1, 1, firsts, lambda: done.append(len(steps))))
    assert [step[:3] for step in steps] == [(a, a, 0.35) for a in ALPHAS[::-1]] and done == [1, 2, 3, 4]
    assert [step[3] for step in steps[1:]] == [1, 2, 3] and all(used is SETTINGS for used in settings)
    origin = steps[0][3]
    assert (
        origin.last is semantic_states.overlaps
        and origin.value.tolist() == [2.0] * 4
        and origin.count.tolist() == [1] * 4
    )
    assert cells.overlaps.q.shape == (4, *semantic_states.overlaps.q.shape)


def test_where_tracks_begin(rows, model, lines):
    """A track begins at the state of the coarse search, even a vanished one of an absent branch, else at the start."""
    start, requests = BRANCHES["positional"].start(model), []
    statuses = iter([0, 2, 6, 0])

    def coarse_lane(lane):
        assert isinstance(lane, Lane) and lane.replicate == COARSE and lane.attempts > 1 and lane.rule is lines
        assert lane.free.tolist() == [0.0, 1.0] and float(lane.alpha) == 2.0
        requests.append((float(lane.model.omega), float(lane.start.q.mean() / start.q.mean())))
        return SimpleNamespace(status=next(statuses), overlaps=jax.tree.map(lambda a: 2 * a, start))

    omegas = np.array([0.3, 0.35, 0.4, 0.45])
    axes = Axis("omega", omegas), Axis("alpha", np.array(ALPHAS))
    longer = grid._Grid.of(Grid.of(model, axes, {}, with_alpha=True), lines, SETTINGS)
    first_states = made.answer_path(longer.first_cells(0), coarse_lane)
    np.testing.assert_allclose([x.q.mean() / start.q.mean() for x in first_states], [2, 1, 2, 2])
    np.testing.assert_allclose(requests, np.stack([omegas, [1, 2, 1, 1]], 1))  # starts from the row before, if found


def test_a_track_that_fails_is_named_and_the_others_are_kept(canned, model, lines, tmp_path, monkeypatch):
    advance = grid.Follower.advance

    def fails(self, cell_model, alpha, value, warm):
        if self.branch == 1 and cell_model.omega == 0.35 and alpha == 1.0:
            raise ZeroDivisionError("of the loss")
        return advance(self, cell_model, alpha, value, warm)

    monkeypatch.setattr(grid.Follower, "advance", fails)
    with pytest.raises(ZeroDivisionError, match="of the loss") as raised:
        solve_grid(model, lines, out=tmp_path)
    note = "This happened at the semantic branch in row 1, alpha = 0.5 to 2."
    assert raised.value.__notes__ == [note]
    assert sorted(p.name for p in tmp_path.glob("*.npz")) == [f"track-{k:05d}.npz" for k in (0, 1, 2)]
    monkeypatch.setattr(grid.Follower, "advance", advance)
    calls = []
    solve_grid(model, lines, out=tmp_path, resume=True, progress=lambda *c: calls.append(c))
    assert calls == [(k, 16) for k in (12, 13, 14, 15, 16)]


@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupt_says_what_is_kept(canned, model, lines, tmp_path, kept):
    """Ctrl-C reaches the caller, with a note; with a folder, finished tracks are there and the call goes on."""

    def interrupt(done, total):
        if done > 4:
            raise KeyboardInterrupt

    folder = {"out": tmp_path} if kept else {}
    with pytest.raises(KeyboardInterrupt) as raised:
        solve_grid(model, lines, progress=interrupt, **folder)
    (note,) = raised.value.__notes__
    assert ("resume=True goes on from there" in note and str(tmp_path) in note) == kept
    assert ("nothing is kept" in note) != kept
    if kept:
        assert len(list(tmp_path.glob("track-*"))) == 1
        done = []
        solve_grid(model, lines, resume=True, progress=lambda *c: done.append(c), **folder)
        assert done[0] == (4, 16) and done[-1] == (16, 16)


def test_searches_at_once_and_devices_arrive(canned, model, lines, monkeypatch):
    calls = []

    def runs(paths, *, width, devices, **options):
        calls.append((width, devices))
        return run(paths, **options)

    monkeypatch.setattr(grid.engine, "run", runs)
    solve_grid(model, lines, width=3)
    assert calls == [(3, jax.local_devices()[:1])] * 3  # first cells, tracks and retries


def test_other_settings_are_not_mixed_in(canned, model, lines, tmp_path):
    _, requests = canned
    result = solve_grid(model, lines, out=tmp_path)
    assert len(requests["tracks"]) == 4
    resumed = solve_grid(model, lines, out=tmp_path, resume=True)
    assert len(requests["tracks"]) == 4 and resumed.attrs == result.attrs
    with pytest.raises(ValueError, match="out must not hold the pieces"):
        solve_grid(model, lines, out=tmp_path)
    moved = eqx.tree_at(lambda n: n.stack.across, lines, lines.stack.across + 1e-12)
    other_model = eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(0.51))
    for trial_model, nodes, options in (
        (other_model, lines, {}),
        (model, moved, {}),
        (model, lines, {"alpha": [0.51, *ALPHAS[1:]]}),
        *(
            (model, lines, {"settings": eqx.tree_at(field, SETTINGS, field(SETTINGS) + field(SETTINGS))})
            for field in FIELDS
        ),
    ):
        with pytest.raises(ValueError, match="out must hold pieces of the same"):
            solve_grid(trial_model, nodes, out=tmp_path, resume=True, **options)
    assert len(requests["first"]) == 4  # nothing was solved before the folder was checked, nor where all is kept


def test_another_loss_of_the_same_name_is_not_mixed_in(canned, model, lines, tmp_path):
    """A loss counts by what it computes: not by the name of its class, nor by the address of a function in it."""

    def layer(factor):
        loss = lambda self, Z, Y: factor * ta.DotProduct.loss(self, Z, Y)  # noqa: E731
        return type("Layer", (ta.DotProduct,), {"loss": loss})(**vars(model))

    _, requests = canned
    first = solve_grid(layer(2.0), lines, out=tmp_path)
    assert solve_grid(layer(2.0), lines, out=tmp_path, resume=True).attrs == first.attrs
    assert len(requests["tracks"]) == 4
    with pytest.raises(ta.InputError, match="out must hold pieces of the same model"):
        solve_grid(layer(3.0), lines, out=tmp_path, resume=True)


def test_a_track_under_another_name_is_refused(canned, model, lines, tmp_path):
    solve_grid(model, lines, out=tmp_path)
    (tmp_path / "track-00002.npz").write_bytes((tmp_path / "track-00000.npz").read_bytes())
    with pytest.raises(ta.InputError, match=r"out must hold every piece .* track-00000 in track-00002.npz"):
        solve_grid(model, lines, out=tmp_path, resume=True)
    (tmp_path / "track-00002.npz").rename(tmp_path / "track-copy.npz")
    with pytest.raises(ta.InputError, match=r"out must hold every piece .* track-00000 in track-copy.npz"):
        solve_grid(model, lines, out=tmp_path, resume=True)


FIELDS = [operator.attrgetter(name) for name in ("tol", "max_steps", "warm_steps", "damping")]


@pytest.mark.slow
def test_eight_devices_give_the_same(diagram, tmp_path):
    reference, _ = diagram
    file = str(tmp_path / "eight.npz")
    body = f"assert jax.device_count() == 8\ngo(devices=8, out={str(tmp_path)!r}).save({file!r})"
    assert launch(program("", body), XLA_FLAGS="--xla_force_host_platform_device_count=8").wait(300) == 0
    assert_same(ta.results.PhaseDiagram.load(file), reference, 1e-9)


@pytest.mark.slow
def test_two_processes_give_the_same(diagram, tmp_path):
    reference, _ = diagram
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    setup = f"jax.distributed.initialize({address!r}, 2, int(sys.argv[1]))"
    body = f"go(devices=1).save({str(tmp_path)!r} + '/' + sys.argv[1] + '.npz')"
    processes = [launch(program(setup, body), str(i)) for i in range(2)]
    assert [p.wait(300) for p in processes] == [0, 0]
    for i in range(2):
        assert_same(ta.results.PhaseDiagram.load(tmp_path / f"{i}.npz"), reference, 1e-9)


@pytest.mark.slow
def test_one_of_two_processes_killed(diagram, model, lines, tmp_path):
    """If one of two processes is killed, the other one finishes its share and says how to go on, and that works."""
    reference, _ = diagram
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    setup = f"""
import os
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize({address!r}, 2, int(sys.argv[1]))"""
    body = f"""
def progress(done, total):
    if sys.argv[1] == "1" and os.path.exists({str(tmp_path / "track-00001.npz")!r}):
        os.kill(os.getpid(), 9)
go(devices=1, out={str(tmp_path)!r}, progress=progress)"""
    processes = [launch(program(setup, body), str(i), stderr=subprocess.PIPE) for i in range(2)]
    messages = [p.communicate(timeout=300)[1].decode() for p in processes]
    assert [p.returncode for p in processes] == [1, -signal.SIGKILL]
    sentence = f"another process ended before the grid was done; finished tracks are in out='{tmp_path}'"
    assert messages[0].strip().endswith(f"RuntimeError: {sentence}: start all processes again with resume=True")
    tracks = sorted(p.name for p in tmp_path.glob("track-*.npz"))
    assert len(tracks) == 3  # two of this process, one of the other
    calls = []
    assert_same(
        solve_grid(model, lines, out=tmp_path, resume=True, progress=lambda *c: calls.append(c)), reference, 1e-9
    )
    assert calls[0] == (12, 16)


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a file system of its own, and a function that sets its size in bytes."""

    def resize(size, *options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={size}"]), "tmpfs", str(tmp_path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")

    resize(2**20)
    yield tmp_path, lambda size: resize(size, "remount")
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is of Linux")
def test_a_full_disk(diagram, model, lines, small_disk):
    """On a full disk finished tracks stay, nothing is half-written, the error names the file, and a rerun goes on."""
    reference, out = diagram
    folder, resize = small_disk
    page = os.sysconf("SC_PAGESIZE")
    track = max(-(-p.stat().st_size // page) * page for p in out.glob("track-*.npz"))
    resize(2 * track + page)
    with pytest.raises(OSError, match="No space left on device") as raised:
        solve_grid(model, lines, out=folder)
    tracks = {p.name for p in folder.glob("track-*")}  # which two depends on the order in which threads end
    assert len(tracks) == 2 and Path(raised.value.filename).name in {p.name for p in out.glob("track-*")} - tracks
    assert not list(folder.glob(".*.part"))
    resize(2**24)
    assert_same(solve_grid(model, lines, out=folder, resume=True), reference, 1e-12)


@pytest.mark.slow
def test_one_search_at_a_time_gives_the_same(diagram, model, lines):
    assert_same(solve_grid(model, lines, width=1), diagram[0], 1e-12)


class Processes:
    """The module jax as one of two processes sees it."""

    def __init__(self, rank):
        self.process_count, self.process_index = (lambda: 2), (lambda: rank)

    def __getattr__(self, name):
        return getattr(jax, name)


def test_two_processes_share_the_tracks(canned, model, lines, tmp_path, monkeypatch):
    """Each process solves every second track, and both return all; the first one keeps the repeated cells."""
    cells, requests = canned
    cells["q"] *= np.arange(1.0, 5.0)[:, None, None, None, None]
    cells["status"][1, 0] = ta.Status.absent
    whole = solve_grid(model, lines)
    shares, counts = [], []

    def run_process(rank, gather):
        requests["tracks"].clear()
        counts.clear()
        monkeypatch.setattr(grid, "jax", Processes(rank))
        monkeypatch.setattr(grid.multihost_utils, "broadcast_one_to_all", lambda share: share)
        monkeypatch.setattr(grid.multihost_utils, "process_allgather", gather)
        result = solve_grid(model, lines, out=tmp_path / str(rank), progress=lambda *c: counts.append(c))
        assert len(requests["tracks"]) == 2
        return result, {path.stem for path in (tmp_path / str(rank)).glob("*.npz")}

    def pair(share, other):
        return jax.tree.map(lambda *a: np.stack(a), share, other)

    _, kept = run_process(1, lambda share: shares.append(share) or pair(share, share))
    assert kept == {"track-00001", "track-00003"}
    result, kept = run_process(0, lambda share: pair(share, shares[0]))
    assert kept > {"track-00000", "track-00002"} and all(
        name.startswith("retry-1-") for name in kept if "track" not in name
    )
    assert counts[:9] == [(0, 16), *((k, 16) for k in range(2, 17, 2))]
    for name, values in made.cells_of(whole).items():
        np.testing.assert_array_equal(made.cells_of(result)[name], values)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("place", "hint"),
    [
        (None, "nothing is kept: start all processes again, with a folder out"),
        ("here", "finished tracks are in out='here': start all processes again with resume=True"),
    ],
)
def test_what_is_said_if_another_process_ended(place, hint):
    def exchange(share):
        raise ValueError("gloo")

    with pytest.raises(RuntimeError) as raised:
        grid._together(exchange, {}, SimpleNamespace(place=place))
    assert str(raised.value) == f"another process ended before the grid was done; {hint}"
    together = grid._together(lambda share: share, {"q": jnp.ones(2)}, SimpleNamespace(place=None))
    assert isinstance(together["q"], np.ndarray)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ((1, 0, 0), [(1, 1, 0), (1, 0, 1)]),
        ((0, 1, 1), [(0, 2, 1), (0, 0, 1), (0, 1, 2), (0, 1, 0)]),
        ((0, 2, 3), [(0, 1, 3), (0, 2, 2)]),
        ((1, 0, 3), [(1, 1, 3), (1, 0, 2)]),
    ],
)
def test_the_neighbours_of_a_cell_are_those_of_its_branch(cell, expected):
    assert grid._neighbours(grid.CellIndex(*cell), (2, 3, 4)) == expected


def test_a_neighbour_without_all_replicates_gives_the_mean_of_the_others(semantic_states):
    q = semantic_states.overlaps.q * jnp.arange(1.0, 5.0)[:, None, None, None]
    states = eqx.tree_at(lambda s: (s.overlaps.q, s.status), semantic_states, (q, jnp.array([0, 6, 1, 4])))
    mean = grid._mean_overlaps(states)
    np.testing.assert_allclose(mean.q, 2 * semantic_states.overlaps.q[0], rtol=1e-12)
    np.testing.assert_allclose(mean.m, semantic_states.overlaps.m[0], rtol=1e-12)


def test_what_a_diagram_says_of_its_making(canned, model, lines):
    result = ta.phase_diagram(
        model, omega=[0.3, 0.35], sigma=[0.5, 0.6, 0.7], alpha=2.0, nodes=lines, settings=SETTINGS, devices=1
    )
    attrs = dict(result.attrs)
    assert attrs.pop("version") == ta.__version__ and len(attrs.pop("fingerprint")) > 8
    numbers = attrs.pop("numbers")
    assert numbers["lam"] == 0.01 and numbers["mixing"] == [[0.6, 0.4], [0.4, 0.6]] and "sigma" not in numbers
    assert attrs == {
        "model": "DotProduct",
        "alpha": 2.0,
        "nodes": {"rule": "LineNodes", "size": lines.size, "replicates": 4},
        "settings": {"tol": 4e-4, "max_steps": 16, "warm_steps": 1, "damping": 0.21},
    }
    np.testing.assert_allclose(result.semantic.model.omega, [[0.3, 0.35]] * 3)
    np.testing.assert_allclose(result.semantic.model.sigma, [[0.5] * 2, [0.6] * 2, [0.7] * 2])
    np.testing.assert_allclose(result.positional.alpha, np.full((3, 2), 2.0))
