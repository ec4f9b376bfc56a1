"""The pool runs paths to their ends, and no lane waits for another one."""

import itertools
import os
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import block_size
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.theory import engine
from tiedattn_jax.theory.engine import run, run_one
from tiedattn_jax.theory.newton import Answer
from tiedattn_jax.theory.paths import Call, together
from tiedattn_jax.theory.solve import Problem, branch_start


def called(value, wait=0.0):
    """A call that gives a value after a while."""

    def give(a):
        time.sleep(wait)
        return a

    return Call(give, (value,))


def test_what_a_path_is_sent():
    """A path is sent a result for a request, an ordered list for a list, and for a path what that path returns."""

    def child(value):
        return (yield called(value)) + 1

    def path():
        single = yield called(1)
        several = yield [called(2, 0.05), child(3), called(4)]
        nothing = yield []
        return single, several, nothing, (yield child(5)), (yield from together([called(6)]))

    assert run_one(path()) == (1, [2, 4, 4], [], 6, [6])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="calls run side by side on CPUs only")
def test_results_come_in_the_order_of_the_paths():
    """Results come in the order of the paths; a slow path holds up no other, and `done` reports each one as it ends."""
    order = []

    def path(k):
        yield called(k, 0.2 if k == 0 else 0.0)
        return k

    assert run((path(k) for k in range(4)), width=2, done=lambda number, result: order.append(number)) == [0, 1, 2, 3]
    assert sorted(order) == [0, 1, 2, 3] and order[0] != 0


def test_calls_run_on_the_default_device_in_the_thread_of_the_caller():
    """The host's CPU runs Newton's method of a pool on accelerators, not the calls of its paths.

    Settings of context managers keep their effect only in the caller's thread.
    """
    device, threads = jax.devices()[0], []

    def path():
        inside = yield Call(lambda: jax.config.jax_default_device, ())
        return inside, jax.config.jax_default_device

    assert run([path()], devices=[device, device]) == [(None, jax.local_devices(backend="cpu")[0])]
    with jax.debug_infs(True):
        run_one(together([Call(lambda: threads.append(threading.get_ident()) or 0, ())] * 3))
    assert set(threads) == {threading.get_ident()}


def test_paths_start_when_there_is_room():
    started = []

    def path(k):
        started.append(k)
        return (yield called(k, 0.05))

    def interrupt(number, _):
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run((path(k) for k in range(50)), width=2, done=interrupt)
    assert len(started) < 10


def fail(k):
    raise ZeroDivisionError(k)


def test_an_exception_ends_its_own_path():
    """An exception ends only its own path and then says which path it was; a path may also go on."""
    finished = []

    def path(k):
        if k == 1:
            yield Call(fail, (k,))
        yield called(k)
        return k

    def patient():
        try:
            yield [called(1), Call(fail, (0,))]
        except ZeroDivisionError:
            return (yield called("after"))

    with pytest.raises(ZeroDivisionError) as caught:
        run(map(path, range(4)), names=[f"sigma = {k}" for k in range(4)], done=lambda n, _: finished.append(n))
    assert sorted(finished) == [0, 1, 2, 3] and "sigma = 1" in caught.value.__notes__[0]
    results = run(map(path, range(4)), keep=True)
    assert results[0] == 0 and results[1].reason == "ZeroDivisionError: 1" and results[2:] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        run([path(1)], keep=True)
    assert run_one(patient()) == "after"


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    def path():
        yield "a string"

    with pytest.raises(ta.InputError, match="must yield lanes, calls or paths, got str"):
        run_one(path())
    for width in (0, -1, 1.5):
        with pytest.raises(ta.InputError, match="width"):
            run([], width=width)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity of processes")
def test_a_process_takes_the_cores_that_it_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert engine.cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert engine.cores() == 64


@pytest.fixture(scope="module")
def problem(model):
    rule = ta.Lines(3, replicates=2).rule(model)
    return Problem(model, jnp.array(2.0), rule, BRANCHES["semantic"].free(model), ta.Settings())


def branches(problem):
    """Paths of a state that exists, the same on other lines, of an absent one and of another model."""
    other_lines = ta.Lines(3, replicates=2, seed=1).rule(problem.model)
    settings = (0.5, 2.0, problem.nodes), (0.5, 2.0, other_lines), (0.5, 0.05, problem.nodes), (0.45, 1.5, other_lines)
    for sigma, alpha, lines in settings:
        model = ta.DotProduct(sigma=sigma)
        variant = problem._replace(model=model, alpha=jnp.asarray(alpha), nodes=lines)
        yield variant.solve_from_far(branch_start(model, "semantic"))


@pytest.mark.long
def test_slots_do_as_threads_do(problem, monkeypatch):
    """Slots, which evaluate all lanes in one call as on accelerators, give the states of single lanes, at any width."""
    singles = run(branches(problem))
    monkeypatch.setattr(engine, "_in_threads", engine.work_in_slots)
    monkeypatch.setattr(engine, "WIDTHS", (2, 4))
    for width in (None, 3):
        for single, result in zip(singles, run(branches(problem), width=width), strict=True):
            np.testing.assert_array_equal(single.status, result.status)
            for a, b in zip(jax.tree.leaves(single.overlaps), jax.tree.leaves(result.overlaps), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(single.train_loss, result.train_loss, rtol=1e-8)


@pytest.mark.long
def test_slots_in_single_precision(problem, monkeypatch):
    """In float32 slots give the state of single lanes, also where tolerances are float64."""
    model = ta.DotProduct(dtype=jnp.float32)
    rule = ta.Lines(3, replicates=2).rule(model)
    single = problem._replace(model=model, alpha=jnp.float32(2.0), nodes=rule, free=jnp.ones(2, jnp.float32))
    start = branch_start(model, "semantic")
    expected = run_one(single.solve_from_far(start))
    monkeypatch.setattr(engine, "_in_threads", engine.work_in_slots)
    state = run_one(single.solve_from_far(start))
    assert state.train_loss.dtype == np.float32 and state.status.tolist() == expected.status.tolist()
    np.testing.assert_allclose(state.train_loss, expected.train_loss, rtol=1e-5)


def test_searches_that_cannot_begin_fail(problem, monkeypatch):
    """An exception reaches lanes that are on their way into the slots."""
    monkeypatch.setattr(engine, "_in_threads", engine.work_in_slots)
    monkeypatch.setattr(engine, "_begin_all", lambda *_: fail(0))
    with pytest.raises(ZeroDivisionError):
        run(branches(problem))


def test_lanes_that_end_leave_and_others_enter(problem, monkeypatch):
    """Lanes that wait replace lanes that end, so calls stay filled and a slow lane is not alone at the end."""
    monkeypatch.setattr(engine, "_in_threads", engine.work_in_slots)
    monkeypatch.setattr(engine, "WIDTHS", (2, 4))
    counts, turn = [], engine.Slots.turn

    def counted(self):
        result = turn(self)
        counts.append(len(self.lanes) + len(result))
        return result

    monkeypatch.setattr(engine.Slots, "turn", counted)
    states = run(itertools.chain(branches(problem), branches(problem)), width=2)
    assert max(counts) == 2 and np.mean(counts) > 1.5
    # Every lane has its own setting, lines and replicate.
    first, other_lines, absent, other_model, *again = states
    for a, b in zip(states[:4], again, strict=True):
        np.testing.assert_allclose(a.overlaps.q, b.overlaps.q, rtol=1e-9)
    assert np.all(absent.status == ta.Status.absent)
    for state, loss in ((first, CASES[0].train_loss), (other_lines, CASES[0].train_loss)):
        assert np.all(state.status <= ta.Status.stalled)
        np.testing.assert_allclose(np.mean(state.train_loss), loss, rtol=0.03)
        assert state.overlaps.q.shape == (2, 2, 1, 1) and np.ptp(state.train_loss) > 0
    assert not np.isin(other_lines.train_loss, first.train_loss).any()
    assert np.all(other_model.status <= ta.Status.stalled) and np.ptp(other_model.train_loss) > 0
    assert np.all(np.abs(other_model.train_loss / CASES[0].train_loss - 1) > 0.05)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("count", [1, 3])
def test_lanes_fill_half_of_the_memory(problem, count):
    """Ten lanes fit if half of the memory holds all nodes and ten times a lane, which has a replicate of its own."""
    points = problem._replace(nodes=ta.Sobol(2**12, replicates=2).rule(problem.model))
    lane = points.lane(branch_start(problem.model, "semantic"))
    rule = sum(a.nbytes for a in jax.tree.leaves(lane.rule.stack))
    enough = 2 * (rule + 10 * (1024 * min(lane.rule.size, block_size()) + rule / 2)) / count

    def lanes(size):
        device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": size})
        return engine._max_lanes(lane, [device] * count)

    assert lanes(enough + 9) == 10 and lanes(enough - 9) == 9
    with pytest.raises(ta.InputError, match="must fit into the memory of the device"):
        lanes(1000)


@pytest.mark.usefixtures("unchecked")
def test_the_numbers_of_lanes_in_a_call(problem, monkeypatch):
    """A call takes one of three numbers of lanes, of those that fit into the memory; or the one that was asked for."""
    lane, number = problem.lane(branch_start(problem.model, "semantic")), np.zeros(1)
    assert engine._max_lanes(lane, [SimpleNamespace(memory_stats=lambda: None)]) == 256
    monkeypatch.setattr(engine, "_examples", lambda *_: (Answer(*[number] * 4), number, number))
    for fit, width, expected in (
        (256, None, [4, 32, 256]),
        (255, None, [4, 32]),
        (4, None, [4]),
        (3, None, [3]),
        (3, 5, [5]),
        (256, 7, [7]),
    ):
        monkeypatch.setattr(engine, "_max_lanes", lambda lane, devices, fit=fit: fit)
        slots = engine.Slots(lane, width, jax.devices()[:1])
        assert slots.widths == expected and slots.room == expected[-1]
        for count, padded in ((1, expected[0]), (expected[-1], expected[-1]), (expected[0], expected[0])):
            rows = slots._padded(np.arange(float(count))[:, None])
            assert rows[:, 0].tolist() == [*range(count), *[count - 1] * (padded - count)]
        slots.lanes = [None, None]
        assert slots.room == expected[-1] - 2
    assert engine.WIDTHS == tuple(2**k for k in (2, 5, 8))


def test_what_progress_is_told():
    """Progress counts what is done and what is known; a path asks for one thing after the other."""
    calls = []

    def path():
        yield [called(1), called(2)]
        yield called(3)

    run([path()], width=1, progress=lambda *numbers: calls.append(numbers))
    assert calls[-1] == (3, 3) and [done for done, _ in calls if done] == [1, 2, 3]
    assert calls[-2] == (2, 2)


def test_a_system_that_does_not_know_its_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert engine.cores() == 1
