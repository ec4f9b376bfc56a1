"""One protocol of progress: nothing, a bar, or a function that is told what is done and of how much."""

import contextlib

import jax
import numpy as np
import problems
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.progress import counter, in_parts, one_search, reporter, silent
from tiedattn_jax.dynamics.flow import Integrated, refined
from tiedattn_jax.theory.engine import run
from tiedattn_jax.theory.paths import Call


def squares(number):
    """A path that asks for a call, and then for `number` of them at once."""
    (yield Call(pow, (number, 2)))
    return (yield [Call(pow, (k, 2)) for k in range(number)])


@pytest.fixture
def counts():
    """A list of counts, and the function that adds to it."""
    found = []
    return found, lambda *count: found.append(count)


def test_searches_are_counted_once(counts):
    """Counts of consecutive searches add up."""
    found, tell = counts
    assert run([squares(2), squares(3)], width=1, progress=tell) == [[0, 1], [0, 1, 4]]
    assert [done for done, _ in found] == list(range(1, 8)) and found[-1] == (7, 7)
    assert all(done <= total for done, total in found)
    found.clear()
    progress = in_parts(tell)
    for number in (1, 2):
        run([squares(number)], width=1, progress=progress)
    assert found[-1] == (5, 5) and [done for done, _ in found] == list(range(1, 6)) and in_parts(None) is None
    found.clear()
    with one_search(tell):
        assert found == [(0, 1)]
    assert found == [(0, 1), (1, 1)]


def test_a_counter_adds_up_and_stays_within_the_total(counts):
    found, tell = counts
    count = counter(tell, 5, done=1)
    for more in (1, 2, 3):
        count(more)
    assert found == [(1, 5), (2, 5), (4, 5), (5, 5)]


UNRESOLVED, CONVERGED = int(ta.Status.unresolved), int(ta.Status.converged)


@pytest.mark.parametrize(
    ("statuses", "least", "most", "expected"),
    [
        ([UNRESOLVED, UNRESOLVED, CONVERGED], 1, 64, [1, 4, 16]), ([UNRESOLVED] * 9, 1, 4, [1, 4]),
        ([int(ta.Status.nonfinite), UNRESOLVED, CONVERGED], 2, 64, [2, 8, 32]), ([UNRESOLVED] * 9, 8, 8, [8]),
        ([int(ta.Status.max_steps)], 1, 64, [1]), ([CONVERGED], 1, 64, [1]),
    ],
)  # fmt: skip
def test_runs_are_counted_until_one_is_resolved(statuses, least, most, expected, counts):
    """Every run has four times as many steps as the one before; the last one need not be resolved."""
    (found, tell), steps, total = counts, [], len(expected)

    def run(count):
        steps.append(count)
        return Integrated(None, None, np.array([CONVERGED, statuses[len(steps) - 1]]))

    refined(run, least, most, tell)
    assert steps == expected and found == [*((k, k + 1) for k in range(total)), (total, total)]


def test_bar_says_that_something_compiles_until_the_first_result(capsys):
    bar = reporter(True, "cells")
    assert "compiling" in capsys.readouterr().err
    bar.begin -= 5
    for done in range(4):
        bar(done, 3)
    text = capsys.readouterr().err
    assert "3/3" in text and "first result after 5 s" in text and "compiling" not in text.rpartition("3/3")[0][-60:]


def test_a_line_tells_of_a_long_compilation(capsys):
    event = "/jax/core/compile/backend_compile_duration"
    reporter(True, "cells")(1, 1)
    capsys.readouterr()
    for seconds in (9.0, 34.6):
        jax.monitoring.record_event_duration_secs(event, seconds, fun_name="jit(gradient)")
    jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 20.0, fun_name="gradient")
    assert capsys.readouterr().err.strip() == "tiedattn_jax: compiled jit(gradient) in 35 s"


def test_progress_of_no_kind_is_refused():
    assert reporter(None, "cells") is reporter(False, "cells") is silent
    with contextlib.redirect_stderr(None):  # as in services and under pythonw
        assert reporter(True, "cells") is silent
    for wrong in ("yes", 3):
        with pytest.raises(ta.InputError, match="progress must be None, True or a function"):
            reporter(wrong, "cells")


def searches(m, lines, tell):
    """All functions that search, by name."""
    points, start = ta.Sobol(2**6, replicates=2), (0.2, 0.1, 0.1)
    return {
        "solve": lambda: ta.solve(m, 2.0, nodes=lines, progress=tell),
        "find_states": lambda: ta.find_states(m, 2.0, lines, count=4, progress=tell),
        "critical_alpha": lambda: ta.critical_alpha(m, lines, progress=tell),
        "linear_crossing": lambda: ta.linear_crossing(m, nodes=lines, progress=tell),
        "find_event": lambda: ta.find_event(
            m, "semantic baseline", lines, start=ta.solve(m, 1.5, nodes=lines), progress=tell
        ),
        "trace_branch": lambda: ta.trace_branch(m, "alpha", (1.9, 2.1), nodes=lines, points=3, progress=tell),
        "best_ridge": lambda: ta.best_ridge(m, 1.0, nodes=lines, bracket=(1e-3, 3e-3), progress=tell),
        "sgd": lambda: ta.dynamics.sgd(m, start, 0.5, 1.0, nodes=points, points=3, progress=tell),
        "emergence": lambda: ta.dynamics.emergence(m, 0.1, 0.5, 1.0, nodes=points, points=3, progress=tell),
        "branch_ends": lambda: ta.branch_ends(
            ta.sweep(ta.solve, m, branch="semantic", follow=True, alpha=[0.9, 2.0], nodes=lines), lines, progress=tell
        ),
    }


@pytest.mark.full
@pytest.mark.parametrize("name", list(searches(None, None, None)))
def test_every_function_tells_its_progress(name, counts):
    """The counts rise by one up to the total, also where a call makes several searches."""
    found, tell = counts
    searches(problems.PROBLEMS["standard"].model, problems.rule("lines"), tell)[name]()
    first = found[0][0]  # some tell that they begin
    assert [done for done, _ in found] == list(range(first, first + len(found))) and first in (0, 1)
    assert found[-1][0] == found[-1][1]
