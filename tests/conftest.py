"""Settings and fixtures of all tests: double precision, fast compilation, stored programs and shared averages.

Most of the time of the suite goes into compiling. Programs of equal shapes are compiled once for all tests, so a test
takes the averages `nodes` or `lines` unless other averages are its subject.
"""

import os
import subprocess
import sys
from pathlib import Path

import budget
import jax
import jaxtyping
import pytest
from changed import tests_since
from parts import part

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Rule
from tiedattn_jax.base import programs as compiled, progress

FAST = "--xla_cpu_use_fusion_emitters=false --xla_disable_hlo_passes=while-loop-invariant-code-motion"
if "PYTEST_XDIST_WORKER" not in os.environ and "XLA_FLAGS" not in os.environ:
    # A flag that this jaxlib does not know ends the process.
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    if subprocess.run(probe, env={**os.environ, "XLA_FLAGS": FAST}, capture_output=True).returncode == 0:
        os.environ["XLA_FLAGS"] = FAST  # the workers and the processes that tests start inherit it

jax.config.update("jax_enable_x64", True)
_CACHE = os.environ.get("TIEDATTN_CACHE", str(Path.home() / ".cache" / "tiedattn_jax_tests"))  # nobody else writes here
os.environ["TIEDATTN_CACHE"] = _CACHE  # the command line in the tests stores its programs here too
ta.use_compilation_cache()


def pytest_addoption(parser):
    parser.addoption("--part", type=part, metavar="K/N", help="run one of N parts of the selected tests, K from 1 to N")
    text = "run the tests of what changed since a commit, by default main; see tests/changed.py"
    parser.addoption("--changed", nargs="?", const="main", metavar="COMMIT", help=text)


def pytest_collection_modifyitems(config, items):
    chosen, commit = config.getoption("part"), config.getoption("changed")
    if chosen is not None:
        _select(config, items, chosen.contains)
    if commit is not None:
        try:
            tests = tests_since(commit)
        except ValueError as error:
            raise pytest.UsageError(f"--changed {error}") from error
        _select(config, items, lambda name: name.startswith(tests))


def _select(config, items, is_selected):
    """Keep the items whose names are selected."""
    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item.nodeid)])
    items[:] = [item for item in items if is_selected(item.nodeid)]


def pytest_sessionfinish(session, exitstatus):
    """Let a part without tests pass: the other parts have run what was selected. So does a change without tests."""
    is_narrowed = session.config.getoption("part") is not None or session.config.getoption("changed") is not None
    if is_narrowed and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def _clear_programs():
    """Clear the compiled programs if they use half of the memory maps that Linux gives a process, or 3 GB."""
    maps, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not maps.exists():
        return
    resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > 3e9 or maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


def _stop_telling():
    """Stop to tell of long compilations, which a process does once it has shown a bar."""
    if progress._tell_of_compilations.cache_info().currsize:
        jax.monitoring.unregister_event_duration_listener(progress._tell)
        progress._tell_of_compilations.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def clear_after_a_file():
    yield
    _clear_programs()
    _stop_telling()


@pytest.fixture(autouse=True)
def clear_after_a_full_test(request):
    """A single full test may compile a hundred programs, and a file of them more than a process can hold."""
    yield
    if "full" in request.keywords:
        _clear_programs()


@pytest.fixture
def unchecked():
    """Switch the checks of types and shapes off, for tests that call public functions with arguments of wrong types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def fresh_programs(monkeypatch):
    """Trace programs anew, for a test that replaces something which they contain: stored ones are not used or added."""
    monkeypatch.setattr(compiled, "traced_in", lambda *_: None)
    monkeypatch.setattr(compiled.Traced, "folder", None)


def pytest_runtest_setup(item):
    budget.charge(None if "full" in item.keywords else item.path)


@pytest.fixture(scope="module", autouse=True)
def keep_the_budget(request):
    """Fail the last test of a file that compiles more than `budget.toml` allows."""
    yield
    if text := budget.excess(request.path):
        pytest.fail(text)


@pytest.fixture(scope="session")
def model() -> ta.DotProduct:
    return ta.DotProduct()


@pytest.fixture(scope="session")
def nodes(model) -> Rule:
    return ta.Sobol(2**13, replicates=4).rule(model)


@pytest.fixture(scope="session")
def lines(model) -> Rule:
    """The smallest form of the default rule, which the command line uses with `--nodes 4096`."""
    return ta.Lines(5).rule(model)


@pytest.fixture(scope="session")
def solved(model, nodes):
    """Fixed points on the shared averages, by (alpha, branch), each solved once."""
    solutions: dict = {}

    def get(alpha: float, branch: str) -> ta.results.FixedPoint:
        if (alpha, branch) not in solutions:
            solutions[alpha, branch] = ta.solve(model, alpha, branch, nodes)
        return solutions[alpha, branch]

    return get
