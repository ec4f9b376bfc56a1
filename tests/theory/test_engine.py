"""The pool runs paths to their ends, and no lane waits for another one."""

import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from problems import rule
from toy import OneToken, descending

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.theory import engine
from tiedattn_jax.theory.engine import run, run_one
from tiedattn_jax.theory.paths import Call, Failure, Job, Scheduler, together
from tiedattn_jax.theory.setting import Lane, Setting, branch_start


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
        return (yield called(k, 0.2 if k == 0 else 0.0))

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


# Slots evaluate all lanes in one call, as on accelerators.


def lanes_of(width=0.7, alphas=(2.0,)):
    """Lanes of a layer whose programs are small."""
    model = OneToken(lam=jnp.asarray(0.1), width=jnp.asarray(width))
    nodes = descending(ta.Sobol(2**5, replicates=2).rule(model))
    free, start = BRANCHES[None].free(model), branch_start(model, None)
    return [Lane(Setting(model, jnp.asarray(a), nodes, free), start, 0) for a in alphas]


@pytest.mark.full
def test_lanes_that_end_leave_and_others_enter():
    """Lanes that wait replace lanes that end, and have the states of single lanes; a failure is that of all lanes."""
    lanes = [lane._replace(attempts=1 + k % 2) for k, lane in enumerate(lanes_of(alphas=np.geomspace(0.2, 20.0, 7)))]
    singles, slots = run_one(together(lanes)), engine.Slots(lanes[0], 2, jax.devices()[:1])
    for k, lane in enumerate(lanes):
        slots.waiting.append((Job(lane, None, k), engine._kind_and_row(lane)[1]))
    counts, ended = [], []
    while slots.waiting or slots.lanes:
        ended += slots.turn()
        counts.append(len(slots.lanes))
    assert max(counts) == 2 and np.mean(counts) > 1.3 and sorted(job.position for job, _ in ended) == list(range(7))
    for job, state in ended:
        single = singles[job.position]
        assert state.status == single.status <= ta.Status.stalled
        for a, b in zip(jax.tree.leaves(state.overlaps), jax.tree.leaves(single.overlaps), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(state.train_loss, single.train_loss, rtol=1e-8)
    for k, row in enumerate((engine._kind_and_row(lanes[0])[1], np.zeros(3))):
        slots.waiting.append((Job(lanes[0], None, k), row))
    assert all(isinstance(result, Failure) for _, result in slots.turn()) and not slots.lanes and slots.room == 2


@pytest.mark.usefixtures("unchecked")
def test_lanes_fill_the_memory(model):
    """Every device of several takes its share of the lanes; memory for no lane at all is refused."""
    start = branch_start(model, "semantic")
    lane = Lane(Setting.of(model, jnp.array(2.0), rule("points"), None, ta.Settings()), start)

    def lanes(size, count=1):
        return engine._max_lanes(lane, [SimpleNamespace(memory_stats=lambda: {"bytes_limit": size})] * count)

    assert 1 < lanes(1e8) < lanes(2e8) and lanes(1e8, 3) == lanes(3e8)
    with pytest.raises(ta.InputError, match="must fit into the memory of the device"):
        lanes(1000)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "width", "rtol"), [(float, None, 1e-8), (float, 3, 1e-8), (np.float32, None, 1e-5)])
def test_slots_do_as_threads_do(dtype, width, rtol):
    """Each state has its own setting, lines and replicate; one is absent, one the same as another on other lines.

    Tolerances are float64 beside a model in float32.
    """

    def branches():
        nodes, other = (ta.Lines(3, replicates=2, seed=k).rule(ta.DotProduct(dtype=dtype)) for k in (0, 1))
        for sigma, alpha, lines in ((0.5, 2.0, nodes), (0.5, 2.0, other), (0.5, 0.05, nodes), (0.45, 1.5, other)):
            model = ta.DotProduct(sigma=sigma, dtype=dtype)
            setting = Setting.of(model, jnp.asarray(alpha, dtype), lines, "semantic", ta.Settings())
            yield setting.solve_from_far(branch_start(model, "semantic"))

    scheduler = Scheduler(branches(), lambda number, result: None)
    engine.work_in_slots(scheduler, width, jax.devices()[:1])
    states = scheduler.results
    for single, state in zip(run(branches()), states, strict=True):
        np.testing.assert_array_equal(single.status, state.status)
        assert state.train_loss.dtype == dtype
        for a, b in zip(jax.tree.leaves(single.overlaps), jax.tree.leaves(state.overlaps), strict=True):
            np.testing.assert_allclose(a, b, rtol=100 * rtol, atol=rtol)
        np.testing.assert_allclose(single.train_loss, state.train_loss, rtol=rtol)
    assert np.all(states[2].status == ta.Status.absent)
    for state in states[:2]:
        np.testing.assert_allclose(np.mean(state.train_loss), CASES[0].train_loss, rtol=0.03)
