"""One protocol of progress: nothing, a bar, or a function that is told what is done and of how much."""

import os
from types import SimpleNamespace

import pytest
from jax._src import compilation_cache

import tiedattn_jax as ta
from tiedattn_jax.base import programs
from tiedattn_jax.base.progress import in_parts, one_search, reporter, silent
from tiedattn_jax.dynamics.flow import refined
from tiedattn_jax.theory.engine import run
from tiedattn_jax.theory.paths import Call


def squares(number):
    """A path that asks for a call, and then for `number` of them at once."""
    (yield Call(pow, (number, 2)))
    return (yield [Call(pow, (k, 2)) for k in range(number)])


def test_searches_are_counted_once():
    counts = []
    assert run([squares(2), squares(3)], width=1, progress=lambda *c: counts.append(c)) == [[0, 1], [0, 1, 4]]
    assert [done for done, _ in counts] == list(range(1, 8)) and counts[-1] == (7, 7)
    assert all(done <= total for done, total in counts)


def test_counts_of_consecutive_searches_add_up():
    counts = []
    progress = in_parts(lambda *c: counts.append(c))
    for number in (1, 2):
        run([squares(number)], width=1, progress=progress)
    assert counts[-1] == (5, 5) and [done for done, _ in counts] == list(range(1, 6))
    assert in_parts(None) is None


def test_bar_says_that_something_compiles_until_the_first_result(capsys, monkeypatch):
    from tiedattn_jax.base import progress

    monkeypatch.setattr(progress, "_SLOW", 0.0)
    bar = reporter(True, "cells")
    assert "compiling" in capsys.readouterr().err
    for done in range(4):
        bar(done, 3)
    text = capsys.readouterr().err
    assert "3/3" in text and "first result after 0 s" in text and "compiling" not in text.rpartition("3/3")[0][-60:]


def test_progress_of_no_kind_is_refused():
    assert reporter(None, "cells") is reporter(False, "cells") is silent
    for wrong in ("yes", 3):
        with pytest.raises(ta.InputError, match="progress must be None, True or a function"):
            reporter(wrong, "cells")


def every_function(model, lines, progress):
    """Calls of all functions that search, with their progress."""
    state, points = ta.solve(model, 1.5, nodes=lines), ta.Sobol(2**6, replicates=2)
    return [
        lambda: ta.solve(model, 2.0, nodes=lines, progress=progress),
        lambda: ta.find_states(model, 2.0, lines, count=4, progress=progress),
        lambda: ta.critical_alpha(model, lines, progress=progress),
        lambda: ta.linear_crossing(model, nodes=lines, progress=progress),
        lambda: ta.find_event(model, "semantic baseline", lines, start=state, progress=progress),
        lambda: ta.trace_branch(model, "alpha", (1.9, 2.1), nodes=lines, points=3, progress=progress),
        lambda: ta.best_ridge(model, 1.0, nodes=lines, bracket=(1e-3, 3e-3), progress=progress),
        lambda: ta.sgd(
            model, (0.2, 0.1, 0.1), 0.5, 1.0, nodes=ta.Sobol(2**6, replicates=2), points=3, progress=progress
        ),
        lambda: ta.emergence(model, 0.1, 0.5, 1.0, nodes=points, points=3, progress=progress),
        lambda: ta.branch_ends(ta.sweep(model, "semantic", alpha=[0.9, 2.0], nodes=lines), lines, progress=progress),
    ]


def test_runs_are_counted_until_one_is_resolved():
    """Every run has four times as many steps as the one before; the last one need not be resolved."""
    for resolved, most, expected in ((16, 64, [1, 4, 16]), (1, 64, [1]), (99, 4, [1, 4]), (99, 1, [1])):
        counts, steps = [], []

        def run(count, resolved=resolved, steps=steps):
            steps.append(count)
            return SimpleNamespace(status=ta.Status.converged if count >= resolved else ta.Status.unresolved)

        refined(run, 1, most, lambda *c, counts=counts: counts.append(c))
        total = len(expected)
        assert steps == expected and counts == [*((k, k + 1) for k in range(total)), (total, total)]


def test_one_search():
    counts = []
    with one_search(lambda *c: counts.append(c)):
        assert counts == [(0, 1)]
    assert counts == [(0, 1), (1, 1)]


def test_every_function_tells_its_progress():
    """The counts rise by one up to the total, also where a call makes several searches, and results are the same."""
    lines, counts = ta.Lines(3, replicates=2), []
    for call in every_function(ta.DotProduct(), lines, lambda *c: counts.append(c)):
        counts.clear()
        call()
        first = counts[0][0]  # some tell that they begin
        assert [done for done, _ in counts] == list(range(first, first + len(counts))) and first in (0, 1)
        assert counts[-1][0] == counts[-1][1]


def test_bar_names_what_compiles_with_the_seconds_of_last_time(tmp_path, capsys, monkeypatch):
    """The newest file of the name counts. Quick programs, unknown ones and damaged files change nothing."""

    def keep(name, seconds, time):
        content = compilation_cache.combine_executable_and_time(b"program", seconds)
        path = tmp_path / f"{name}-cache"
        path.write_bytes(compilation_cache.compress_executable(content))
        os.utime(path, (time, time))

    def miss(name):
        assert programs._read_or_remove(f"{name}-0", None) == (None, None)
        return capsys.readouterr().err

    monkeypatch.setattr(programs, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(programs, "_READ", lambda *_: (None, None))
    keep("jit__stage-1", 3, 1), keep("jit__stage-2", 12, 3), keep("jit__stage-3", 4, 2), keep("jit_quick-1", 2, 1)
    (tmp_path / "jit_broken-1-cache").write_bytes(b"no program")
    assert miss("jit__stage") == ""  # nobody shows progress
    bar = reporter(True, "cells")
    bar(0, 2)
    capsys.readouterr()
    assert "compiling stage, 12 s last time" in miss("jit__stage")
    assert miss("jit_quick") == miss("jit_broken") == miss("jit_other") == ""
    bar(1, 2)
    assert "compiling stage" in miss("jit__stage")  # also after the first result
    bar(2, 2)
    assert "last time" not in capsys.readouterr().err.rpartition("2/2")[0][-60:]
    del bar  # the call is over
    capsys.readouterr()
    assert miss("jit__stage") == ""
