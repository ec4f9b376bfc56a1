"""Sweeps and diagrams in pieces: on executors, over processes, in folders; and parts that are put together."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from toy import Toy

import tiedattn_jax as ta
from tiedattn_jax.base.pieces import cut

SIGMAS, LAMS = np.array([0.4, 0.5, 0.6]), np.array([0.01, 0.02])
PLANE = {"sigma": SIGMAS, "lam": LAMS}


def product(model, alpha=1.0, scale=1.0):
    return scale * model.sigma * model.lam * alpha


def sigma_of(model):
    return model.sigma


def broken(model):
    if model.sigma > 0.55:
        raise ZeroDivisionError("of the model")
    return model.sigma


def lost(model):
    if model.sigma > 0.55:
        os._exit(1)
    return model.sigma


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


def test_every_setting_is_in_one_piece():
    for count in (1, 5, 64, 65, 1000, 10_000):
        pieces = [list(range(count))[piece] for piece in cut(count)]
        assert [k for piece in pieces for k in piece] == list(range(count)) and max(map(len, pieces)) <= 32
    assert len(cut(64)) == 64 and len(cut(1000)) > 60


def test_processes_answer_as_this_one_does(processes):
    counts = []
    here = ta.sweep(product, ta.DotProduct(), scale=2.0, alpha=3.0, **PLANE)
    there = ta.sweep(
        product, ta.DotProduct(), scale=2.0, alpha=3.0, executor=processes,
        progress=lambda *c: counts.append(c), **PLANE,
    )  # fmt: skip
    np.testing.assert_array_equal(there.values(), here.values())
    assert there.values().dtype == float and counts == [(k, 6) for k in range(7)]
    np.testing.assert_allclose(there.values(), 6 * SIGMAS[:, None] * LAMS, rtol=1e-12)  # in double precision, as here


def test_a_failure_is_that_of_its_setting(processes):
    table = ta.sweep(broken, ta.DotProduct(), sigma=SIGMAS, executor=processes)
    assert table.found.tolist() == [True, True, False]
    assert table.failures == ("sigma = 0.6: ZeroDivisionError: of the model",)
    with pytest.raises(RuntimeError, match="broken has no answer at any setting; the first: ZeroDivisionError"):
        ta.sweep(broken, ta.DotProduct(), sigma=[0.6, 0.7], executor=processes)


def test_a_worker_that_dies_loses_no_more_than_was_not_done(tmp_path):
    """The folder keeps finished pieces, and the same call goes on from there."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        table = ta.sweep(lost, ta.DotProduct(), sigma=SIGMAS, executor=pool, out=tmp_path)
    assert table.found.tolist() == [True, True, False] and "its worker was lost" in table.reason[2]
    assert len(list(tmp_path.glob("piece-*.npz"))) == 2


def test_an_edited_function_does_not_go_on(tmp_path):
    """A folder knows a function of the caller's by its code, and by the numbers and functions that it names."""

    def sweep_of(factor, shift=lambda x: x, **options):
        return ta.sweep(lambda model: shift(factor * model.sigma), ta.DotProduct(), sigma=SIGMAS, **options)

    first = sweep_of(2.0, out=tmp_path)
    assert sweep_of(2.0, out=tmp_path, resume=True) == first
    for changed in ((3.0,), (2.0, lambda x: x + 1)):
        with pytest.raises(ta.InputError, match="with those of another call: give another folder"):
            sweep_of(*changed, out=tmp_path, resume=True)


@pytest.mark.parametrize("answer", [lambda model: model.sigma, broken], ids=["a lambda", "shut down"])
def test_what_an_executor_cannot_take(processes, answer):
    if answer is broken:
        pool = ThreadPoolExecutor(1)
        pool.shutdown()
        with pytest.raises(ta.InputError, match="executor must take tasks, got one that does not"):
            ta.sweep(answer, ta.DotProduct(), sigma=SIGMAS, executor=pool)
    else:
        with pytest.raises(ta.InputError, match="executor must be given what can be sent to it: functions and layers"):
            ta.sweep(answer, ta.DotProduct(), sigma=SIGMAS, executor=processes)


class Here(Executor):
    """An executor that calls at once, and is interrupted before its call `stop`."""

    def __init__(self, stop=None):
        self.calls, self.stop = 0, stop

    def submit(self, function, /, *arguments):
        future = Future()
        self.calls += 1
        if self.calls == self.stop:
            raise KeyboardInterrupt
        future.set_result(function(*arguments))
        return future


def test_an_interrupted_call_goes_on_from_its_folder(tmp_path):
    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        ta.sweep(product, ta.DotProduct(), **PLANE, alpha=1.0, out=tmp_path, progress=interrupt)
    assert f"out='{tmp_path}': the same call with resume=True" in raised.value.__notes__[0]
    (damaged, _) = sorted(tmp_path.glob("piece-*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-30])
    counts, pool = [], Here()
    with pytest.warns(UserWarning, match=f"computed again: {damaged.name}"):
        table = ta.sweep(
            product, ta.DotProduct(), **PLANE, alpha=1.0, out=tmp_path, resume=True, executor=pool,
            progress=lambda *c: counts.append(c),
        )  # fmt: skip
    assert pool.calls == 5 and counts[0] == (0, 6) and counts[-1] == (6, 6)
    np.testing.assert_allclose(table.values(), SIGMAS[:, None] * LAMS)
    again = ta.sweep(product, ta.DotProduct(), **PLANE, alpha=1.0, out=tmp_path, resume=True, executor=Here(1))
    np.testing.assert_array_equal(again.values(), table.values())
    for options, text in (
        ({}, "out must not hold the pieces of an earlier run"),
        ({"resume": True, "alpha": 2.0}, "out must hold pieces of the same question, settings, options and version"),
        ({"resume": True, "scale": 2.0}, "out must hold pieces of the same question"),
        ({"resume": True, "out": None}, "out must name the folder of the run to resume"),
    ):
        with pytest.raises(ta.InputError, match=text):
            ta.sweep(product, ta.DotProduct(), **PLANE | {"alpha": 1.0, "out": tmp_path} | options)
    with pytest.raises(ta.InputError, match="follow must be left out beside executor and out"):
        ta.sweep(ta.solve, ta.DotProduct(), alpha=[1.0, 2.0], follow=True, out=tmp_path)


def test_a_diagram_on_an_executor(theory, model, rule, tmp_path):
    """Workers follow the tracks; a thread has the theory of this process."""
    losses = {"positional": lambda m, a: 1.0 + m.omega + 0 * a, "semantic": lambda m, a: 2.0 - a}
    theory(Toy(losses))
    options = {"alpha": [0.5, 1.0, 2.0], "omega": [0.1, 0.2], "nodes": rule}
    here, there = (ta.phase_diagram(model, **options, executor=executor) for executor in (None, Here()))
    assert here == there
    np.testing.assert_array_equal(here.positional.train_loss[:, 0], [1.1, 1.2])


def test_what_jax_traces_stays_in_this_process(tmp_path):
    """Pieces are numbers; without an executor the states have derivatives."""

    def total(sigma, **options):
        layer = eqx.tree_at(lambda m: m.sigma, ta.DotProduct(), sigma)
        return sum(cell.value for cell in ta.sweep(sigma_of, layer, lam=LAMS, **options).cells)

    for name, value in {"executor": Here(), "out": tmp_path}.items():
        for transform, text in ((jax.jit, "must have concrete numbers"), (jax.grad, f"{name} must be left out under")):
            with pytest.raises(ta.InputError, match=text):
                transform(lambda sigma, name=name, value=value: total(sigma, **{name: value}))(0.5)


@pytest.mark.full
def test_wings_run_on_executors(tmp_path):
    layer, keys = ta.wide.DotProduct(tau=0.3), jax.random.split(jax.random.key(0), 2)
    options = {"theory": False, "sentences": 64}
    here, there = (
        ta.wide.run_instances(layer, 6, 1.0, two_steps, keys, **options, executor=executor)
        for executor in (None, Here())
    )
    assert here == there and np.ptp(here.values("q")) > 0
    counts = []
    for resume, executor in ((False, Here()), (True, Here(1))):
        kept = ta.wide.run_instances(
            layer, 6, 1.0, two_steps, keys, **options, out=tmp_path, resume=resume, executor=executor,
            progress=lambda *c: counts.append(c),
        )  # fmt: skip
        np.testing.assert_array_equal(kept.values("q"), here.values("q"))
    assert counts == 2 * [(k, 2) for k in range(3)]
    with pytest.raises(ta.InputError, match="out must hold pieces of the same question"):
        ta.wide.run_instances(layer, 7, 1.0, two_steps, keys, **options, out=tmp_path, resume=True)


def two_steps(data, key):
    return ta.wide.train(ta.wide.DotProduct(tau=0.3), data, steps=2)


@pytest.mark.full
@pytest.mark.parametrize("question", ["wide", "bayes"])
def test_questions_of_the_wings_in_processes(processes, question):
    layer = {"wide": ta.wide.DotProduct(tau=0.2), "bayes": ta.DotProduct()}[question]
    solve = getattr(ta, question).solve
    table = ta.sweep(solve, layer, alpha=[0.4, 1.0], executor=processes)
    assert table.found.all() and not table.failures
    np.testing.assert_allclose(table.values("q")[1], np.squeeze(solve(layer, 1.0).q), rtol=1e-9)


OWN = """
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import equinox as eqx
import jax
import tiedattn_jax as ta

class Own(ta.AttentionLayer):
    def attention(self, fields):
        return jax.nn.sigmoid(fields @ fields.T)

class Answer(eqx.Module):
    model: Own
    def numbers(self):
        return {"value": (self.model.sigma, None)}

def ask(executor, layer):
    table = ta.sweep(Answer, layer, sigma=[0.25, 0.5], executor=executor)
    assert all(type(cell) is Answer and type(cell.model) is type(layer) for cell in table.cells)
    print(table.values("value").tolist(), file=sys.stderr)

def pool(kind):
    if kind == "spawn":
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    if kind == "loky":
        import loky
        return loky.get_reusable_executor(1)
    import distributed
    cluster = distributed.LocalCluster(1, threads_per_worker=1, dashboard_address=None)
    return distributed.Client(cluster).get_executor()

if __name__ == "__main__":
    ask(pool(sys.argv[1]), Own())
"""
IMPORT = "executor must be given what its workers can import, which have ended: put functions and layers of a notebook"
INTO_MODULE = "executor must find its classes in modules: put Own of a script, a notebook or a function into one"


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "is_script", "answer"),
    [
        ("spawn", True, "[0.25, 0.5]"),
        ("spawn", False, IMPORT),
        ("loky", True, INTO_MODULE),
        ("loky", False, INTO_MODULE),
        ("distributed", True, INTO_MODULE),
    ],
)
def test_classes_of_a_script_and_of_a_notebook(tmp_path, kind, is_script, answer):
    """Spawned processes import the script; a notebook has none, as a command line has none. Classes by value fail."""
    if kind != "spawn":
        pytest.importorskip(kind, reason=f"{kind} is not installed")
    (tmp_path / "own.py").write_text(OWN)
    command = [sys.executable, *([str(tmp_path / "own.py")] if is_script else ["-c", OWN]), kind]
    env = {**os.environ, "PYTHONPATH": str(Path(ta.__file__).parent.parent), "JAX_PLATFORMS": jax.default_backend()}
    ended = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=300)
    assert answer in ended.stderr and (ended.returncode == 0) == (answer[0] == "[")


@pytest.mark.full
def test_an_interrupt_ends_in_seconds_and_says_what_is_kept(tmp_path):
    script = f"""
import sys, time
import tiedattn_jax as ta
def slow(model):
    time.sleep(1.0)
    return model.sigma
ta.sweep(slow, ta.DotProduct(), sigma=[k / 100 for k in range(1, 61)], out={str(tmp_path)!r}, progress=print)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(ta.__file__).parent.parent), "JAX_PLATFORMS": jax.default_backend()}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
    for _ in range(1000):
        if list(tmp_path.glob("piece-*.npz")):
            break
        time.sleep(0.1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert message.strip().endswith(f"finished pieces are in out='{tmp_path}': the same call with resume=True goes on "
                                    "from there")  # fmt: skip
    assert 0 < len(list(tmp_path.glob("piece-*.npz"))) < 60


# Parts


def test_parts_of_a_table_are_joined(tmp_path):
    model = ta.DotProduct()
    whole = ta.sweep(product, model, **PLANE, alpha=1.0)
    parts = [ta.sweep(product, model, sigma=s, lam=LAMS, alpha=1.0) for s in (SIGMAS[:2], SIGMAS[1:])]
    parts[1].save(tmp_path / "b.npz")
    joined = ta.join([parts[0], tmp_path / "b.npz"])
    np.testing.assert_array_equal(joined.values(), whole.values())
    assert joined.names == whole.names and joined.axes[0].tolist() == SIGMAS.tolist()
    holes = ta.join([
        ta.sweep(product, model, sigma=SIGMAS[:1], lam=LAMS[:1], alpha=1.0),
        ta.sweep(product, model, sigma=SIGMAS[1:2], lam=LAMS[1:], alpha=1.0),
    ])  # fmt: skip
    assert holes.found.tolist() == [[True, False], [False, True]] and "no part has" in holes.reason[0, 1]
    xarray = pytest.importorskip("xarray")
    apart = [ta.sweep(product, model, sigma=s, lam=LAMS, alpha=1.0) for s in (SIGMAS[:2], SIGMAS[2:])]
    assert_combine(xarray, apart, tmp_path)


def assert_combine(xarray, apart, folder):
    """Check that xarray combines parts to what `join` returns, also parts that were read from files."""
    for k, part in enumerate(apart):
        part.save(folder / f"{k}.npz")
    read = [ta.load(folder / f"{k}.npz") for k in range(len(apart))]
    for parts in (apart, read):
        combined = xarray.combine_by_coords([part.to_xarray() for part in parts], combine_attrs="identical")
        xarray.testing.assert_identical(combined, ta.join(parts).to_xarray())


def test_a_result_fills_what_another_part_lacks():
    failed = ta.sweep(broken, ta.DotProduct(), sigma=SIGMAS)
    other = ta.sweep(sigma_of, ta.DotProduct(), sigma=SIGMAS[2:])
    for parts in ([failed, other], [other, failed]):
        joined = ta.join(parts)
        assert joined.found.all() and joined.values().tolist() == [0.4, 0.5, 0.6]


def test_events_keep_their_slopes(theory, model, rule):
    theory(Toy({"positional": lambda m, a: 1 + m.omega + 0 * a, "semantic": lambda m, a: 2.0 - a}))
    omegas = np.array([0.1, 0.2, 0.3, 0.4])
    parts = [ta.sweep(ta.critical_alpha, model, omega=o, nodes=rule) for o in (omegas[2:], omegas[:2])]
    joined = ta.join(parts)
    np.testing.assert_allclose(joined.alpha, 1 - omegas, rtol=1e-6)
    np.testing.assert_allclose(joined.slope, -1.0, rtol=1e-6)
    assert joined.exact.all()


def test_parts_of_a_diagram_are_joined(theory, model, rule, tmp_path):
    theory(Toy({"positional": lambda m, a: 1 + m.omega + 0 * a, "semantic": lambda m, a: 2.0 - a}))
    alphas, omegas = [0.5, 1.0, 2.0], np.array([0.1, 0.2, 0.3])
    whole = ta.phase_diagram(model, alpha=alphas, omega=omegas, nodes=rule)
    parts = [ta.phase_diagram(model, alpha=alphas, omega=o, nodes=rule) for o in (omegas[:2], omegas[1:])]
    joined = ta.join(parts)
    np.testing.assert_array_equal(joined.region, whole.region)
    np.testing.assert_allclose(joined.alpha_c().alpha, whole.alpha_c().alpha)
    np.testing.assert_array_equal(joined.semantic.model.omega, whole.semantic.model.omega)
    apart = [parts[0], ta.phase_diagram(model, alpha=alphas, omega=omegas[2:], nodes=rule)]
    assert_combine(pytest.importorskip("xarray"), apart, tmp_path)
    quarter = ta.phase_diagram(model, alpha=alphas[:2], omega=omegas[:2], nodes=rule)
    rest = ta.phase_diagram(model, alpha=alphas[1:], omega=omegas[1:], nodes=rule)
    holes = ta.join([quarter, rest])
    assert holes.solved.tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    assert holes.failures[0].startswith("omega = 0.1, alpha = 2: the positional branch is not solved: nonfinite; the ")


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((), "parts must be tables, or diagrams, one or more of one kind, got none"),
        ((1, 2), "parts must be tables, or diagrams"),
        (("sigma", "lam"), "parts must have the same axes, got"),
        (("sigma", "other"), "parts must have the same setting, got"),
        (("sigma", "half"), "parts must have the same model, fixed numbers and options of sweep, got others in part 1"),
        (("sigma", "twice"), r"parts must agree where they overlap, got two values of value at sigma = 0\.4"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_parts_that_do_not_fit(parts, text):
    def table(part):
        if isinstance(part, int):
            return ta.DotProduct()
        values = {"lam": LAMS} if part == "lam" else {"sigma": SIGMAS[:1]}
        question = product if part != "twice" else lambda model, alpha=1.0, scale=1.0: 2 * product(model, alpha)
        found = ta.sweep(question, ta.DotProduct(), **values, alpha=0.5 if part == "half" else 1.0)
        return ta.results.Table("other", found.names, found.axes, found.cells) if part == "other" else found

    with pytest.raises(ta.InputError, match=text):
        ta.join([table(part) for part in parts])


# Processes of jax, and engines that users have


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3])
def test_processes_of_jax_share_a_sweep(tmp_path, count):
    script = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
sys.path.insert(0, sys.argv[4])
import tiedattn_jax as ta
from test_pieces import PLANE, product
table = ta.sweep(product, ta.DotProduct(), alpha=1.0, **PLANE)
assert jax.process_count() == int(sys.argv[2])
table.save(sys.argv[5] + "/" + sys.argv[3] + ".npz")
"""

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tests = Path(__file__).parent
    path = os.pathsep.join([str(Path(ta.__file__).parent.parent), str(tests.parent)])
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": jax.default_backend()}
    command = [sys.executable, "-c", script, address, str(count)]
    started = [subprocess.Popen([*command, str(k), str(tests), str(tmp_path)], env=env) for k in range(count)]
    assert [process.wait(300) for process in started] == [0] * count
    for k in range(count):
        np.testing.assert_allclose(ta.load(tmp_path / f"{k}.npz").values(), SIGMAS[:, None] * LAMS, rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_three_processes_of_jax_is_killed(tmp_path, killed):
    """The others finish their pieces and name it; if it is process 0, jax ends them. The folder has what was done."""
    script = """
import os
import sys
import jax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_enable_recoverability", True)
address, rank, killed, tests, out, *table = sys.argv[1:]
if not table:
    jax.distributed.initialize(address, 3, int(rank), heartbeat_timeout_seconds=10)
sys.path.insert(0, tests)
import tiedattn_jax as ta
from test_pieces import PLANE, product
def progress(done, total):
    if rank == killed and done == 1:
        os.kill(os.getpid(), 9)
found = ta.sweep(product, ta.DotProduct(), alpha=1.0, out=out, resume=bool(table), progress=progress, **PLANE)
found.save(table[0])
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tests = Path(__file__).parent
    path = os.pathsep.join([str(Path(ta.__file__).parent.parent), str(tests.parent)])
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": jax.default_backend()}
    out, table = tmp_path / "out", tmp_path / "table.npz"

    def process(rank, *more):
        command = [sys.executable, "-c", script, address, str(rank), str(killed), str(tests), str(out), *more]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    started = [process(rank) for rank in range(3)]
    messages = [each.communicate(timeout=120)[1] for each in started]
    assert started[killed].returncode == -signal.SIGKILL
    kept = len(list(out.glob("piece-*.npz")))
    if killed:
        assert kept == 5  # its second piece is missing
        for rank in {0, 1, 2} - {killed}:
            assert started[rank].returncode
            assert f"process {killed} ended before all was done; finished" in messages[rank]
    else:
        assert kept and all(each.returncode for each in started)
    process(-1, str(table)).communicate(timeout=300)
    np.testing.assert_allclose(ta.load(table).values(), SIGMAS[:, None] * LAMS, rtol=1e-12)
    assert len(list(out.glob("piece-*.npz"))) == 6


@pytest.mark.full
def test_a_dask_client():
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    with (
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        table = ta.sweep(product, ta.DotProduct(), **PLANE, alpha=1.0, executor=client.get_executor())
    np.testing.assert_allclose(table.values(), SIGMAS[:, None] * LAMS, rtol=1e-12)


@pytest.mark.full
def test_loky():
    loky = pytest.importorskip("loky", reason="loky is not installed")
    executor = loky.get_reusable_executor(2)
    table = ta.sweep(lambda model: model.sigma, ta.DotProduct(), sigma=SIGMAS, executor=executor)  # it sends lambdas
    assert table.values().tolist() == SIGMAS.tolist()


@pytest.mark.full
def test_an_mpi_pool(tmp_path):
    pytest.importorskip("mpi4py.futures", reason="mpi4py is not installed")
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mpiexec is None:
        pytest.skip("mpiexec is not installed")
    script = tmp_path / "script.py"
    script.write_text("""
import sys
from mpi4py.futures import MPIPoolExecutor
import jax
import tiedattn_jax as ta
from test_pieces import PLANE, product

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    with MPIPoolExecutor() as pool:
        ta.sweep(product, ta.DotProduct(), alpha=1.0, executor=pool, **PLANE).save(sys.argv[1])
""")
    tests = Path(__file__).parent
    path = os.pathsep.join([str(Path(ta.__file__).parent.parent), str(tests.parent), str(tests)])
    options = {"PYTHONPATH": path, "JAX_PLATFORMS": jax.default_backend()}
    options |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    command = [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures", str(script), str(tmp_path / "a.npz")]
    assert subprocess.run(command, env={**os.environ, **options}, timeout=300).returncode == 0
    np.testing.assert_allclose(ta.load(tmp_path / "a.npz").values(), SIGMAS[:, None] * LAMS, rtol=1e-12)
