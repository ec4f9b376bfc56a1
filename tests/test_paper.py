"""The paper's figures: files of numbers, drawing from small made-up numbers, tables, the command."""

import sys
from pathlib import Path
from types import SimpleNamespace as Namespace

import made
import numpy as np
import pytest

from tiedattn_jax.base.errors import InputError
from tiedattn_jax.plotting.style import COLOURS

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are not part of the package

from benchmarks.paper import adam, counting, layers, minimum, plane, scaling
from benchmarks.paper.__main__ import main
from benchmarks.paper.data import filled, keep, known, read, where
from benchmarks.paper.figures import FIGURES, chosen
from benchmarks.paper.page import Row, page, section
from benchmarks.paper.simulation import MEASURED, NUMBERS, QUANTITIES, exchange, measured


def silent(done, total):
    pass


# Files of numbers


def test_rows_are_kept_and_gone_on_with(tmp_path):
    path, calls = tmp_path / "rows.npz", []

    def compute(a, b):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(a)
        return [a, a * b]

    points = [(1, 5), (2, 6), (3, 7)]
    with pytest.raises(KeyboardInterrupt):
        filled(path, {"size": 1}, ("a", "product"), points, compute, silent)
    assert read(path)[1]["product"].tolist() == [5, 12]  # the points finished before the interrupt
    progress = []
    filled(path, {"size": 1}, ("a", "product"), points, lambda a, b: [a, 100.0], lambda *step: progress.append(step))
    settings, columns = read(path)
    assert columns["product"].tolist() == [5, 12, 100] and progress == [(2, 3), (3, 3)]
    assert settings["size"] == 1 and settings["points"] == [[1, 5], [2, 6], [3, 7]]
    with pytest.raises(InputError, match="size=1 instead of 2"):
        filled(path, {"size": 2}, ("a", "product"), points, compute, silent)


def test_columns_are_kept_with_what_they_are_about(tmp_path):
    path = tmp_path / "columns.npz"
    assert not known(path, {"alpha": 2.0})
    keep(path, {"alpha": 2.0}, {"one": [1, 2], "number": 3.0})
    assert known(path, {"alpha": 2.0}) and not known(path, {"alpha": 1.0})
    assert read(path)[1]["one"].tolist() == [1, 2] and read(path)[1]["number"] == 3.0
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"whole file columns\.npz"):
        read(path)
    columns = {"a": np.array([0.1, 0.2, 0.1]), "b": np.array([1, 1, 2]), "c": np.array([5, 6, 7])}
    assert where(columns, a=0.1)["c"].tolist() == [5, 7]
    assert where(columns, a=0.3 - 0.2, b=2)["c"].tolist() == [7]  # up to rounding


# Tables and the page


def test_page():
    assert Row("q", 2.0, 0.1, 2.5, 0.02, "why").cells() == ["q", "2.00(10)", "2.500(20)", "+0.5 (+25.0%)", "why"]
    assert Row("q", None, None, 2.5, None).cells() == ["q", "-", "2.5", "-", ""]
    assert Row("q", 1.0, None, float("nan"), None).cells()[1:4] == ["-", "none in range", "-"]
    complete = section("Title", "Text.", "paper/figure_2.png", [Row("q", 1.0, None, 1.0, None, "none")])
    assert "![Title](paper/figure_2.png)" in complete and "| q | 1 | 1 | +0 (+0.0%) | none |" in complete
    empty = section("Other", "Not computed.", None, [])
    assert "!" not in empty and "|" not in empty
    assert page([complete, empty]).index("## Title") < page([complete, empty]).index("## Other")


# Drawing, from made-up numbers


def rows_of(points, first):
    """Rows of simulations at some (value, branch): all means are the value, and all scatters a tenth of it."""
    values, branches = np.array(points, float).T
    measured = dict.fromkeys(MEASURED, values) | {f"{name}_scatter": values / 10 for name in QUANTITIES}
    return {**measured, "instances": np.full(len(values), 4.0), first: values, "branch": branches}


def states_of(points):
    values, branches = np.array(points, float).T
    return dict.fromkeys(NUMBERS, values) | {"alpha": values, "branch": branches}


PAIRS = [(a, k) for a in (0.5, 1.0, 1.5, 2.0) for k in (0, 1)]


def test_minimum():
    curves = {**states_of(PAIRS), "stable": np.array([1, 0, 1, 1, 1, 1, 1, 1.0])}
    numbers = np.arange(len(NUMBERS) + 2.0)
    transitions = {"alpha_c": [1.2, 0.1], "alpha_l": [1.4, 0.1], "baseline": [0.3]}
    transitions |= {"positional": numbers, "semantic": numbers}
    data = {"curves": curves, "simulation": rows_of(PAIRS, "alpha"), "transitions": transitions, "about": {"d": 7}}
    losses, orders, errors = minimum.draw(data).axes
    filled_points = losses.containers[0][0].get_xdata(), losses.containers[2][0].get_xdata()
    assert [x.tolist() for x in filled_points] == [[0.5, 1.0], [1.5, 2.0]]  # where the branch's loss is lower
    np.testing.assert_allclose(losses.containers[0][2][0].get_segments()[0][:, 1], [0.45, 0.55])  # two standard errors
    assert any((line.get_gid() or "").endswith("unstable") for line in orders.lines) and losses.get_ylim()[0] == 0
    assert [line for line in errors.lines if len(line.get_ydata())][-1].get_ydata()[0] == 0.3
    table = minimum.rows(data)
    assert table[0].quantity == "alpha_c" and table[0].ours == 1.2 and table[0].published == 1.241
    simulated = [row for row in table if "start" in row.quantity]
    assert len(simulated) == 5 and all(row.ours == 2.0 and "d = 7" in row.reason for row in simulated)


def test_scaling():
    data = {"simulation": rows_of([(d, k) for d in (10, 40, 160) for k in (0, 1)], "d")}
    for name in QUANTITIES:
        data["simulation"][f"{name}_scatter"] = 3 * data["simulation"]["d"] ** -0.5
    data["theory"] = {name: np.array([1.0, 2.0]) for name in NUMBERS}
    axes = scaling.draw(data, scaling.LOSSES).axes
    assert axes[0].lines[1].get_ydata()[0] == 1.0 and axes[0].get_xscale() == "log" and len(axes) == 4
    table = scaling.rows(data, scaling.LEFT)
    assert table[0].ours == pytest.approx(-0.5) and "exponent" in table[0].quantity
    assert table[1].ours == 160 - 1.0 and table[1].error == pytest.approx(3 * 160**-0.5 / 2)
    d = np.array([10.0, 30.0, 100.0, 1000.0])
    amplitude, slope, error = scaling.power(d, 3 * d**-0.5, 0.1 * d**-0.5)
    assert amplitude == pytest.approx(3) and slope == pytest.approx(-0.5) and 0 < error < 0.02


def plane_rows():
    """Two alphas and two omegas, with the lower positional loss at the lower alpha."""
    points = [(alpha, omega, k) for alpha in (1.0, 2.0) for omega in (0.1, 0.2) for k in (0, 1)]
    alpha, omega, branch = np.array(points).T
    loss = np.where(branch == 0, alpha, 1.25 + 0.5 * omega)
    losses = {"train_loss": loss, "gen_error": branch, "linear": omega}
    return {"alpha": alpha, "omega": omega, "branch": branch, **losses, "theta": branch, "m": 1 - branch}


def test_simulated_plane():
    simulation = {"d": 5, "instances": 2, "layer": "tied"}, plane_rows()
    left, right = plane.draw_simulation(simulation).axes[:2]
    gap, excess = (axis.collections[0].get_array() for axis in (left, right))
    np.testing.assert_allclose(gap, [[-0.3, 0.7], [-0.35, 0.65]])
    np.testing.assert_allclose(excess, [[-0.1, 0.9], [-0.2, 0.8]])  # test error 0 on the positional branch, else 1
    np.testing.assert_allclose([row.ours for row in plane.rows_simulation(simulation)], [1.3, 1.35])
    theory = {"omega": np.array([0.1, 0.2]), "alpha": np.array([1.31, np.nan])}
    compared = plane.rows_simulation(simulation, theory)
    assert compared[0].reason.endswith("the theory here: 1.3100") and "theory" not in compared[1].reason
    axes = plane.draw_layers({"one": (simulation, {}), "other": (simulation, theory)}).axes
    assert len(axes[0].lines) == 1
    for line, points in zip(axes[1].lines, ([[1.3, 0.1], [1.35, 0.2]], [[1.31, 0.1], [np.nan, 0.2]]), strict=True):
        np.testing.assert_allclose(line.get_xydata(), points)
    unfinished = simulation[0], {name: values[:-1] for name, values in plane_rows().items()}
    gap = plane.draw_simulation(unfinished).axes[0].collections[0].get_array()
    assert np.ma.masked_invalid(gap).count() == 3


def test_numbers_of_a_grid():
    boundary = made.events("alpha_c", "omega", np.array([0.1, 0.3]), np.array([0.7, 1.2]), np.array([0.1, 0.1]))
    all_cells = np.full((2, 3), True)
    diagram = Namespace(alpha_c=lambda: boundary, alpha_l=lambda: boundary, solved=all_cells, trusted=all_cells)
    table = plane.rows_theory(diagram)
    assert [row.published for row in table] == [None, 1.241, None, 1.451, None] and table[-1].ours == 1


def test_exchange_of_the_minima():
    columns = {name: plane_rows()[name][[0, 1, 4, 5]] for name in ("alpha", "branch", "train_loss", "theta", "m")}
    assert exchange(columns) == pytest.approx(1.3)
    alphas, gaps = np.arange(5.0), np.array([-1.0, 3.0, 0.0, -1e-9, 1e-9])
    branch = np.repeat([0, 1], 5)
    ends = {"train_loss": np.append(gaps, 0 * gaps), "theta": branch, "m": 1 - branch}
    simulation = {"alpha": np.tile(alphas, 2), "branch": branch, **ends}
    assert exchange(simulation) == pytest.approx(0.25)  # a gap next to nothing does not count
    shifted = {**simulation, "train_loss": simulation["train_loss"] + 10_000}
    assert np.isnan(exchange(shifted))  # all minima are of one kind by their losses
    assert np.isnan(exchange({**columns, "theta": columns["theta"] / 3, "m": np.ones(4)}))  # and by their overlaps
    assert np.isnan(exchange({name: values[:2] for name, values in columns.items()}))


def layer_data(points, **parts):
    tied = {"about": {"d": 5, "instances": 4}, "tied": rows_of(PAIRS, "alpha")}
    return {**tied, "layer": rows_of(points, "alpha"), **parts}


def test_layers():
    points = [(a, k) for a in (1.0, 2.0) for k in (0, 1, 2)]
    data = layer_data(points, theory=states_of([(1.0, 0), (2.0, 0)]), kind="rank")
    containers = layers.draw(data).axes[0].containers
    colours = [COLOURS[name] for name in ("positional", "semantic", "positional", "semantic", "mixed")]
    assert [container[0].get_color() for container in containers] == colours
    assert [container[0].get_markerfacecolor() for container in containers][:2] == ["white"] * 2
    table = layers.rows(data)
    assert len(table) == 3 and all(row.ours == 2 and "the theory here: 2" in row.reason for row in table)


def test_a_value_matrix_stands_beside_the_layer_without():
    """A value matrix has no theory: its simulation stands beside that without."""
    data = layer_data(PAIRS, theory={}, kind="value")
    figure, table = layers.draw(data), layers.rows(data)
    assert not any(axis.lines[len(axis.containers) :] for axis in figure.axes)
    texts = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"positional start", "positional start, no value matrix"} < texts
    assert [row.quantity.partition(",")[2] for row in table[2:]] == [" simulation", " simulation, tied"]
    assert all(row.ours == 2 and row.reason == "d = 5, 4 instances" for row in table[:2])


@pytest.mark.full
def test_a_value_matrix_lowers_the_loss():
    model, start, index = layers.model_of("value"), layers.STARTS["value"][0], MEASURED.index("train_loss")
    runs = (layers.train_of(kind) for kind in ("value", "tied"))
    with_value, without_value = (measured(model, 20, 1.0, start, 1, run)[index] for run in runs)
    assert 0.3 * without_value < with_value < 0.95 * without_value


def test_untied_weights_are_not_tied(unchecked):
    model = layers.untied()
    Z = np.array([[1.0, 2.0], [3.0, -1.0]])
    scores = np.outer(Z[:, 0], Z[:, 1])
    np.testing.assert_allclose(model.student(Z), np.exp(scores) / np.exp(scores).sum(1, keepdims=True))
    assert model.shape == (2, 2, 1) and not model.rotation_invariant


def test_where_a_run_ends():
    runs = {
        "d": np.array([50.0, 50, 50, 50]),
        "m": np.array([0.3, 0.0, 0.3, 0.2]),
        "theta": np.array([0.0, 0.2, 0.0, 0.0]),
        "train_loss": np.array([1.02, 2.02, 1.5, 1.0]),
        **{f"positional_{name}": np.full(4, v) for name, v in (("theta", 0.01), ("m", 0.29), ("train_loss", 1.0))},
        **{f"semantic_{name}": np.full(4, v) for name, v in (("theta", 0.21), ("m", 0.01), ("train_loss", 2.0))},
    }
    assert adam.ends(runs).tolist() == ["positional", "semantic", "elsewhere", "elsewhere"]
    figure = adam.draw(runs)
    np.testing.assert_allclose([bar.get_height() for bar in figure.axes[-1].patches], [0.25, 0.25, 0.5])
    table = adam.rows(runs)
    assert [row.ours for row in table] == [0.25, 0.25, 0.5] and table[0].error == pytest.approx((2 / 9 / 4) ** 0.5)


def test_counting():
    S = np.full((3, 2, 2), 0.5)
    quantities = ("accuracy", "distance_frozen_to_sgd", "distance_formerly_zero", "positional_share", "semantic_share")

    def run(value):
        attention = {"attention_frozen": S, "attention_free": S / 2, "examples": np.array([[0, 1], [1, 1], [2, 2]])}
        return dict.fromkeys(quantities, np.array(value)) | attention

    runs = {name: [run(0.5), run(0.7)] for name in counting.MECHANISMS}
    assert len(counting.draw(runs, {"frozen": ("positional", "frozen")}, 1).axes) == 2
    free = counting.draw(runs, {"free": ("semantic", "free")}).axes
    assert len(free) == 4 and free[0].texts[0].get_text() == ".25"
    table = counting.rows(runs)
    assert table[0].ours == pytest.approx(0.6) and table[0].error == pytest.approx(0.02**0.5)


# The command


def test_every_figure_of_the_paper_is_listed_once():
    names, docs = [entry.name for entry in FIGURES], Path(__file__).parents[1] / "docs"
    text = (docs / "results.md").read_text()
    assert len(set(names)) == len(names) == len(chosen([]))
    assert {name.partition("-")[0] for name in names} == {*map(str, range(1, 16)), "table1"}
    assert [entry.name for entry in chosen(["3"])] == ["3-left", "3-theory", "3-simulation"]
    assert [entry.name for entry in chosen(["3-left", "15"])] == ["3-left", "15"]
    for entry in FIGURES:  # every picture is in the documentation, and small
        if entry.draw is not None:
            picture = f"paper/figure_{entry.name}.png"
            assert f"]({picture})" in text and 5_000 < (docs / picture).stat().st_size <= 120_000


def test_draw_needs_data(tmp_path, capsys):
    calls = [([entry.name, "--draw", "--out", str(tmp_path)], "compute the figure first") for entry in FIGURES]
    for arguments, message in [(["16"], "got '16'"), *calls]:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.full
def test_a_figure_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(adam, "REDUCED", {"d": [30], "runs": 2, "steps": 300})
    monkeypatch.setattr(adam, "SIZES", {"d": [40], "runs": 1, "steps": 300})
    assert main(["15", "--out", str(tmp_path)]) == 0
    settings, columns = read(tmp_path / "data" / "reduced" / "adam.npz")
    assert columns["d"].tolist() == [30, 30] and settings["steps"] == 300
    assert np.all(np.isfinite([columns[name] for name in adam.COLUMNS]))
    assert (tmp_path / "paper" / "figure_15.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "paper" / "figure_15.pdf").read_bytes()[:4] == b"%PDF"
    text = (tmp_path / "paper.md").read_text()
    assert "paper/figure_15.png" in text and "d = 30, alpha = 2" in text
    # The sizes are those of the entry before they were changed.
    assert "Simulations at reduced size" in text and "runs = 40" in text
    assert main(["15", "--full", "--out", str(tmp_path)]) == 0
    assert read(tmp_path / "data" / "full" / "adam.npz")[1]["d"].tolist() == [40]
    text = (tmp_path / "paper.md").read_text()
    assert "d = 40, alpha = 2" in text and "Simulations at full size" in text
