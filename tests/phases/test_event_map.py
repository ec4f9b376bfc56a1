"""Events over two numbers: every cell is that of a single search, and a cell without the event says so."""

import csv
import importlib
import json

import made
import numpy as np
import pytest

import tiedattn_jax as ta

sweep_module = importlib.import_module("tiedattn_jax.phases.sweep")  # `sweep` itself is the function
A, B = [0.38, 0.4], [0.4, 0.42]


def layer(a, b):
    return ta.dot_product(mixing=[[1 - a, a], [b, 1 - b]])


@pytest.fixture(scope="module")
def solved_map(lines):
    calls = []
    result = ta.event_map(layer, A, B, names=("a", "b"), nodes=lines, progress=lambda *c: calls.append(c))
    assert calls == [(k, 4) for k in range(5)]
    return result


def test_cells_are_single_searches(solved_map, lines):
    assert solved_map.alpha.shape == solved_map.stderr.shape == (2, 2) and solved_map.failures == ()
    for j, i in ((0, 1), (1, 0)):
        single = ta.critical_alpha(layer(A[i], B[j]), lines)
        np.testing.assert_allclose(solved_map.alpha[j, i], single.alpha, rtol=1e-6)
        np.testing.assert_allclose(solved_map.stderr[j, i], single.stderr, rtol=1e-3)
    assert solved_map.status.tolist() == [[0, 0], [0, 0]] and np.all(solved_map.ok)


def test_a_threshold():
    """Thresholds need no search: they are those of the single models."""
    result = ta.event_map(
        lambda omega, sigma: ta.dot_product(omega=omega, sigma=sigma), [0.3, 0.4], [0.5, 0.6], "encodings separate"
    )
    single = ta.threshold(ta.dot_product(omega=0.3, sigma=0.6), "encodings separate")
    np.testing.assert_allclose(result.alpha[1, 0], single.alpha, rtol=1e-12)
    assert result.names == ("x", "y") and result.event == "encodings separate"


@pytest.fixture
def with_gap(lines, monkeypatch):
    """A map of 2 x 3 cells, made without a solve: alpha is 1 + a + b, one cell has no event, and one search fails."""
    seen = []

    def path(model, event, nodes, settings):
        seen.append((event, nodes, settings))
        a, b = (float(model.mixing[k, 1 - k]) for k in (0, 1))
        if (round(a, 6), round(b, 6)) == (0.3, 0.4):
            raise ta.InputError("event", "must happen, there is none")
        if (round(a, 6), round(b, 6)) == (0.1, 0.5):
            raise ZeroDivisionError("of the loss")
        return (yield from made.finished_path(made.transition(alpha=1 + a + b, event=event)))

    monkeypatch.setattr(sweep_module, "_event", path)
    settings = ta.Settings(tol=1e-4)
    x, y, event = [0.1, 0.2, 0.3], [0.4, 0.5], "semantic instability"
    result = ta.event_map(layer, x, y, event, names=("a", "b"), nodes=lines, settings=settings)
    assert seen == [("semantic instability", lines, settings)] * 6
    return result


def test_a_cell_without_the_event_leaves_the_others(with_gap):
    np.testing.assert_allclose(with_gap.alpha, [[1.5, 1.6, np.nan], [np.nan, 1.7, 1.8]], rtol=1e-12)
    np.testing.assert_allclose(with_gap.stderr, [[0.01, 0.01, np.nan], [np.nan, 0.01, 0.01]])
    absent, failed = int(ta.Status.absent), int(ta.Status.nonfinite)
    assert with_gap.status.tolist() == [[0, 0, absent], [failed, 0, 0]]
    assert with_gap.failures == (
        "a = 0.3, b = 0.4: event must happen, there is none",
        "a = 0.1, b = 0.5: ZeroDivisionError: of the loss",
    )


def test_what_is_told_of_a_map(with_gap):
    lines = str(with_gap).splitlines()
    assert lines[0] == (
        "semantic instability in 2 x 3 cells: found in 4; not found in 2, the first: "
        "a = 0.3, b = 0.4: event must happen, there is none"
    )
    assert lines[1].split() == ["smallest", "1.500(10)", "at", "a", "=", "0.1,", "b", "=", "0.4"]
    assert lines[-3].split() == ["b", "\\", "a", "0.1", "0.2", "0.3"]
    assert lines[-1].split() == ["0.5", "nan", "1.700(10)", "1.800(10)"]
    assert "2 x 3 cells" in repr(with_gap)
    wide = ta.EventMap(
        np.arange(9.0), np.arange(2.0), ("a", "b"), "alpha_c", *np.ones((2, 2, 9)), np.zeros((2, 9), int)
    )
    assert all(line.split()[-1] == "..." and len(line.split()) == 10 for line in str(wide).splitlines()[-2:])
    nowhere = ta.EventMap(wide.x, wide.y, wide.names, "alpha_c", *np.full((2, 2, 9), np.nan), np.full((2, 9), 6))
    assert "smallest" not in str(nowhere) and "found in 0" in str(nowhere)


def test_files(with_gap, tmp_path):
    with_gap.save(tmp_path / "map.npz")
    loaded = ta.load(tmp_path / "map.npz")
    assert type(loaded) is ta.EventMap and loaded == with_gap and str(loaded) == str(with_gap)
    assert ta.EventMap(*(getattr(with_gap, k) for k in ("x", "y", "names", "event")), *[with_gap.alpha] * 2,
                       with_gap.status, with_gap.failures) != with_gap  # fmt: skip
    text = with_gap.to_csv(tmp_path / "map.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert (tmp_path / "map.csv").read_text() == text and len(rows) == 6
    assert [rows[4][k] for k in ("a", "b", "status")] == ["0.2", "0.5", "converged"] and rows[2]["status"] == "absent"
    np.testing.assert_allclose(float(rows[4]["semantic instability"]), 1.7)
    assert float(rows[4]["semantic instability_stderr"]) == 0.01
    report = json.loads(json.dumps(with_gap.to_dict()).replace("NaN", "null"))
    assert report["alpha"][1][0] is None and report["status"][1][:2] == ["nonfinite", "converged"]


def test_xarray(with_gap):
    pytest.importorskip("xarray")
    data = with_gap.to_xarray()
    cell = data.sel(a=0.2, b=0.5)
    np.testing.assert_allclose(float(cell["semantic instability"]), 1.7)
    assert float(cell["semantic instability_stderr"]) == 0.01 and int(cell.status) == 0
    assert data["semantic instability"].dims == ("b", "a") and json.loads(data.attrs["event"]) == "semantic instability"
    assert len(json.loads(data.attrs["failures"])) == 2


def test_all_cells_fail(lines, monkeypatch):
    def path(*_):
        raise ta.InputError("event", "must happen, there is none")
        yield

    monkeypatch.setattr(sweep_module, "_event", path)
    with pytest.raises(ta.InputError, match="event must happen") as raised:
        ta.event_map(layer, A, B, names=("a", "b"), nodes=lines)
    assert raised.value.__notes__ == ["This happened at a = 0.38, b = 0.4."]
