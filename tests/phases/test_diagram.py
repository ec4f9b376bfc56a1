"""Reading a diagram, from cells whose curves are known."""

import csv
import json

import jax
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.phases import diagram as reading
from tiedattn_jax.phases.diagram import REGIONS
from tiedattn_jax.phases.questions import numbers_of_states

ALPHA, OMEGA = np.linspace(0.2, 2.0, 10), np.array([0.1, 0.3, 0.5])
CRITICAL, LINEAR = 0.6 + 2 * OMEGA, 0.9 + 2 * OMEGA  # in the middle row alpha_l is above alpha_c, as in the model


def known_diagram(turned: bool = False) -> ta.results.PhaseDiagram:
    """Losses that cross at `CRITICAL`, and test errors that cross the baseline at `LINEAR` on the semantic branch."""
    a, r = ALPHA[None, :, None], np.arange(2)
    zero = np.zeros((3, 10, 2))
    critical = CRITICAL[:, None, None] + 0.01 * (r - 0.5)
    difference = 1e-3 * ((a - critical) + 0.3 * (a - critical) ** 3)
    slope = 1e-3 * (1 + 0.9 * (a - critical) ** 2)
    linear = LINEAR[:, None, None] + 0.02 * (r - 0.5)
    ones = zero + 1
    cells = {
        "train_loss": np.stack([2e-3 * a + difference, 2e-3 * a + zero]),
        "train_loss_by_alpha": np.stack([2e-3 + slope, 2e-3 * ones]),
        "gen_error": np.stack([3e-3 * ones, 2e-3 - 1e-3 * (1 - linear / a)]),
        "gen_error_linear": np.stack([2e-3 * ones, 2e-3 * ones]),
        "status": np.stack([zero, np.where(a < 0.5, 6.0, zero)]),
        "growth_m": np.stack([ones, np.where(a < 0.7, 1.2, 0.5 * ones)]),
        "growth_theta": np.stack([0.5 * ones, ones]),
        "q": np.full((2, 3, 10, 2, 2, 1, 1), 0.1),
        "V": np.full((2, 3, 10, 2, 2, 1, 1), 9.0),
        "theta": np.full((2, 3, 10, 2, 2, 1, 1), 0.2),
        "m": np.full((2, 3, 10, 2, 2, 1), 0.3),
        **{k: np.stack([zero, zero]) for k in ("replicon", "jump_mass", "second_minimum", "unresolved", "residual")},
    }
    axes = ("alpha", ALPHA), ("omega", OMEGA)
    if turned:
        return made.diagram(*axes[::-1], {k: np.swapaxes(v, 1, 2) for k, v in cells.items()}, {"version": "0"})
    return made.diagram(*axes, cells, {"version": "0"})


@pytest.mark.parametrize("turned", [False, True])
def test_curves(turned):
    diagram = known_diagram(turned)
    critical, linear = diagram.alpha_c(), diagram.alpha_l()
    assert critical.parameter == "omega" and critical.question == "alpha_c"
    np.testing.assert_allclose(critical.alpha, CRITICAL, rtol=1e-9)  # exact, because the difference is cubic
    np.testing.assert_allclose(linear.alpha, LINEAR, rtol=1e-9)  # exact, because the test error is linear in 1 / alpha
    assert np.all((critical.stderr() > 0.005) & (critical.stderr() < linear.stderr()))


def test_error_bars_contain_what_cells_are_too_few_for():
    """Error bars contain the error of too few cells.

    The test error is no cubic in 1 / alpha, and every other cell is read.
    """
    diagram, r = known_diagram(), np.arange(2)
    error = 2e-3 - 1e-3 * (ALPHA[None, :, None] ** 2 - LINEAR[:, None, None] ** 2 + 0 * r)
    cells = made.cells_of(made.changed(diagram, "gen_error", 1, error))
    half = made.diagram(("alpha", ALPHA[1::2]), diagram.y, {k: a[:, :, 1::2] for k, a in cells.items()})
    boundary = half.alpha_l()
    error = np.abs(boundary.alpha - LINEAR)
    assert np.all(error > 1e-6) and np.all(error < 2 * boundary.stderr()) and np.all(boundary.stderr() < 0.1)


def test_an_event_that_is_not_found_in_the_grid():
    """Below the crossings there is neither event, and the tables say so; nor is there one without alpha."""
    cells = {k: a[:, :, :4] for k, a in made.cells_of(known_diagram()).items()}
    diagram = made.diagram(("alpha", ALPHA[:4]), ("omega", OMEGA[1:]), {k: a[:, 1:] for k, a in cells.items()})
    for table in (diagram.alpha_c(), diagram.alpha_l()):
        assert np.isnan(table.alpha).all() and table.status_name == ["absent"] * 2
        assert table.failures[0] == f"omega = 0.3: there is no {table.question} between the cells"
    other = made.diagram(("sigma", ALPHA[:4]), ("omega", OMEGA), cells)
    with pytest.raises(ta.InputError, match="alpha must be one of the axes"):
        other.alpha_c()


def test_alpha_l_at_the_exchange():
    """If the semantic branch beats the baseline wherever it exists, alpha_l is alpha_c."""
    diagram = known_diagram()
    diagram = made.changed(diagram, "gen_error", np.s_[1], 1e-3)
    np.testing.assert_allclose(diagram.alpha_l().alpha, CRITICAL)
    np.testing.assert_array_equal(diagram.alpha_l().stderr(), diagram.alpha_c().stderr())


def test_regions():
    diagram = known_diagram()
    names = np.array(REGIONS)[diagram.region]
    assert np.all(names[:, ALPHA < 0.7] == "unique positional")  # the semantic branch is absent, or unstable towards m
    for row, critical in zip(names, CRITICAL, strict=True):
        assert np.all(row[(ALPHA > 0.7) & (critical > ALPHA)] == "bistable, positional global")
        assert np.all(row[critical < ALPHA] == "bistable, semantic global")
    np.testing.assert_array_equal(diagram.beats_linear, ALPHA[None] > LINEAR[:, None])


def without_branches() -> ta.results.PhaseDiagram:
    """Three cells lack both branches: the searches end in the same loss in the first two, in the second one by half."""
    diagram = known_diagram()
    cells = made.cells_of(diagram)
    cells["status"][:, 1, :3] = ta.Status.absent
    for name, number in (("train_loss", 0.01), ("gen_error", 0.02), ("theta", 0.0), ("m", 0.0), ("replicon", 0.4)):
        cells[name][:, 1, :3] = number
    cells["train_loss"][:, 1, 0] += np.array([-1e-3, 1e-3])
    cells["train_loss"][1, 1, 1, 1] *= 1.1
    cells["train_loss"][1, 1, 2] *= 1.1
    return made.diagram(diagram.x, diagram.y, cells, diagram.attrs)


def test_the_uninformed_state_where_no_branch_exists():
    diagram = without_branches()
    assert np.argwhere(diagram.uninformed).tolist() == [[1, 0], [1, 1]]
    assert diagram.winner[1, :4].tolist() == [2, 2, -1, 0] and np.all(diagram.winner[[0, 2]] >= 0)
    assert [REGIONS[k] for k in diagram.region[1, :4]] == ["uninformed"] * 2 + ["neither", REGIONS[4]]
    minimum = diagram.global_minimum
    np.testing.assert_allclose(minimum.train_loss[1, 0], 0.01)
    np.testing.assert_allclose(minimum.stderr.train_loss[1, 0], error_bar(np.array([-1e-3, 1e-3])))
    np.testing.assert_allclose(minimum.gen_error[1, :2], 0.02)
    assert np.isnan(minimum.train_loss[1, 2]) and np.isnan(minimum.gen_error[1, 2])
    assert not minimum.exists[1, 2] and minimum.exists[1, [0, 1, 3]].all()
    np.testing.assert_allclose(diagram.gen_difference[0][1, :2], 0.018)
    np.testing.assert_array_equal(minimum.overlaps.theta[1, 0], 0.0)
    assert np.isnan(made.means_of(diagram, "train_loss")[0][:, 1, :3]).all()  # the branches are still absent
    assert diagram.trusted[1, 0] and not diagram.beats_linear[1, 0]
    assert not made.changed(diagram, "replicon", np.s_[:, 1, 0], 1.2).trusted[1, 0]
    diagram = made.changed(diagram, "status", (0, 1, 1), ta.Status.max_steps)
    diagram = made.changed(diagram, "residual", (0, 1, 1), 1.0)
    assert not diagram.uninformed[1, 1] and diagram.region[1, 1] == 0


def test_the_global_minimum_elsewhere():
    """It is the branch with the lower training loss, with its error bar."""
    diagram = without_branches()
    for name in ("train_loss", "q"):
        (value, stderr), (means, bars) = numbers_of_states(diagram.global_minimum)[name], made.means_of(diagram, name)
        for cell in ((1, 5), (1, 9), (0, 9), (2, 4)):
            np.testing.assert_array_equal(value[cell], means[diagram.winner[cell]][cell])
            np.testing.assert_array_equal(stderr[cell], bars[diagram.winner[cell]][cell])
    assert {int(diagram.winner[cell]) for cell in ((1, 5), (1, 9))} == {0, 1}


def test_the_uninformed_state_in_tables_and_pictures():
    diagram = without_branches()
    row = diagram.table()[10]
    assert row["region"] == row["global_minimum"] == "uninformed" and row["positional_status"] == "absent"
    assert row["global_minimum_train_loss"] == pytest.approx(0.01) and row["global_minimum_gen_error"] == 0.02
    assert diagram.table()[12]["global_minimum"] == "" and diagram.table()[15]["global_minimum"] == "positional"
    assert "     2  uninformed" in str(diagram) and diagram.to_dict()["regions"]["uninformed"] == 2
    legend = [text.get_text() for text in diagram.plot().legends[0].get_texts()]
    assert "uninformed" in legend


def test_cells_that_failed_are_marked():
    diagram = known_diagram()
    diagram = made.changed(
        diagram, "status", np.s_[0, 1, 3, 1], 3
    )  # one replicate of two failed: the state is not trusted
    assert diagram.region[1, 3] == 4 and not diagram.trusted[1, 3] and diagram.trusted[1, 4]
    diagram = made.changed(diagram, "status", np.s_[0, 1, 4], 3)
    assert diagram.region[1, 4] == 0 and not diagram.trusted[1, 4]
    assert diagram.solved.sum() == 29
    assert np.isnan(diagram.loss_difference[0][1, 4])
    np.testing.assert_allclose(diagram.alpha_c().alpha, CRITICAL, rtol=1e-9)  # the other cells suffice


def test_states_that_did_not_settle_are_counted():
    """A search that ran out of steps near a state counts as one, but the diagram does not say that it converged."""
    diagram = known_diagram()
    untrusted = int((~diagram.trusted).sum())
    assert diagram.settled.all() and diagram.to_dict()["untrusted"] == untrusted
    assert f"{untrusted:6d}  not trusted, in any region" in diagram.summary().splitlines()[8]
    diagram = made.changed(diagram, "status", np.s_[0, 1, [6, 7]], ta.Status.max_steps)
    diagram = made.changed(diagram, "residual", np.s_[0, 1, [6, 7]], 0.02)
    assert diagram.solved.all() and diagram.exists[0, 1, [6, 7]].all()
    numbers = diagram.to_dict()
    assert numbers["unsettled"] == 2 and numbers["untrusted"] == untrusted + 2
    assert numbers["status"] == "2 of 30 cells not settled"
    assert diagram.summary().startswith("alpha x omega: 10 x 3 cells: 2 of 30 cells not settled")
    np.testing.assert_array_equal(np.argwhere(~diagram.settled), [[1, 6], [1, 7]])


def test_trusted_asks_for_a_difference_beyond_the_error_bars():
    diagram = known_diagram()
    spread = np.array([-1.0, 1.0]) * 1e-2
    assert diagram.trusted.mean() > 0.5
    diagram = made.changed(diagram, "train_loss", 0, made.cells_of(diagram)["train_loss"][0] + spread)
    assert not diagram.trusted[diagram.exists.all(0)].any()


def test_what_trusted_asks_for():
    def trusted(name, index, value):
        return made.changed(known_diagram(), name, index, value).trusted[
            1, 6
        ]  # alpha = 1.4, omega = .3: both branches exist, and the semantic one is global

    spread = 1e-5 * np.array([-1.0, 1.0])
    for bars, decided in ((1.9, False), (2.1, True)):
        assert trusted("train_loss", np.s_[0, 1, 6], 2.8e-3 + bars * error_bar(spread) + spread) == decided
    assert not trusted("replicon", np.s_[1, 1, 6], 1.01) and trusted("replicon", np.s_[0, 1, 6], 1.01)
    assert not trusted("status", np.s_[0, 1, 6, 0], ta.Status.max_steps)


def test_nodes_that_see_nothing_settle_nothing():
    diagram = known_diagram()
    diagram = made.changed(
        diagram, "status", np.s_[1, 1, [1, 5]], ta.Status.unresolved
    )  # the first of them was absent before
    assert diagram.region[1, 1] == diagram.region[1, 5] == 0 and not diagram.trusted[1, [1, 5]].any()
    np.testing.assert_array_equal(diagram.status[1, 1, :6], [6, 8, 0, 0, 0, 8])
    assert not diagram.absent[1, 1, 1] and diagram.absent[1, 1, 0] and not diagram.solved[1, 1]


def test_a_difference_that_rises_twice():
    """If the difference of the losses rises through zero twice, the last time counts.

    The semantic branch stays the global minimum beyond it.
    """
    diagram = known_diagram()
    for name, values in (("train_loss", np.sin(8 * ALPHA)), ("train_loss_by_alpha", 8 * np.cos(8 * ALPHA))):
        diagram = made.changed(diagram, name, slice(None), np.stack([values, 0 * values])[:, None, :, None])
    np.testing.assert_allclose(diagram.alpha_c().alpha, np.pi / 2, atol=0.01)


def test_error_bars_are_those_of_the_library():
    diagram = known_diagram()
    losses = np.random.default_rng(0).normal(size=(2, 3, 10, 2))
    diagram = made.changed(diagram, "train_loss", slice(None), losses)
    np.testing.assert_allclose(diagram.positional.stderr.train_loss, error_bar(np.moveaxis(losses, 3, 0))[0])
    diagram = made.changed(diagram, "status", (0, 1, 3, 1), 3)
    assert diagram.positional.stderr.train_loss[1, 3] == np.inf  # only one replicate is left
    assert diagram.positional.train_loss[1, 3] == losses[0, 1, 3, 0]


def test_file_round_trip(tmp_path):
    diagram = known_diagram()
    diagram.save(tmp_path / "a.npz")
    loaded = ta.results.PhaseDiagram.load(tmp_path / "a.npz")
    assert loaded.x[0] == "alpha" and loaded.attrs == diagram.attrs
    np.testing.assert_array_equal(loaded.y[1], OMEGA)
    assert loaded == diagram and made.changed(diagram, "q", (0, 0, 0, 0), 1.0) != diagram
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_csv(tmp_path):
    text = known_diagram().to_csv(tmp_path / "a.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert (tmp_path / "a.csv").read_text() == text and len(rows) == 30
    assert float(rows[13]["alpha"]) == ALPHA[3] and float(rows[13]["omega"]) == OMEGA[1]
    assert rows[13]["region"] == "bistable, positional global"
    np.testing.assert_allclose(float(rows[13]["positional_train_loss"]), known_diagram().positional.train_loss[1, 3])
    assert rows[0]["semantic_status"] == "absent"


def test_every_column_of_the_table_is_a_name_for_values():
    diagram = known_diagram()
    rows = diagram.table()
    for name in rows[0]:
        values = diagram.values(name)
        assert values.shape == (3, 10)
        np.testing.assert_array_equal(values[1, 4], np.asarray(rows[14][name]))
    np.testing.assert_array_equal(diagram.values("semantic_train_loss"), diagram.semantic.train_loss)
    np.testing.assert_array_equal(diagram.values("region"), diagram.region_names)
    with pytest.raises(ta.InputError, match=r"nearest are.*semantic_train_loss"):
        diagram.values("semantic_train_los")


def test_xarray():
    pytest.importorskip("xarray")
    diagram = known_diagram()
    data = diagram.to_xarray()
    cell = data.sel(omega=0.3, branch="semantic").isel(alpha=4)
    assert float(cell.train_loss) == diagram.semantic.train_loss[1, 4]
    assert json.loads(data.attrs["version"]) == "0"
    assert data.region.sel(omega=0.1).dims == ("alpha",)
    grid = "branch", "omega", "alpha"
    assert data.q.dims == data.V_stderr.dims == (*grid, "token", "column", "other_column")
    assert data.theta.dims == (*grid, "token", "column", "teacher_column") and data.m.dims == (*grid, "token", "column")
    names = dict(zip(data.status.flag_values, data.status.flag_meanings.split(), strict=True))
    assert names[0] == "converged" and names[8] == "unresolved" and data.status.dims == grid
    assert str(cell.global_minimum.item()) == "positional"
    assert float(cell.global_minimum_gen_error) == diagram.positional.gen_error[1, 4]
    assert data.train_loss.dims == grid and float(cell.theta.isel(token=1).squeeze()) == 0.2


def test_figures():
    from tiedattn_jax.plotting.diagrams import slice_figure

    diagram = known_diagram()
    left, right = diagram.plot().axes[:2]
    assert [line.get_label() for line in right.get_lines()] == [r"$\alpha_c$", r"$\alpha_l$"]
    np.testing.assert_allclose(left.get_lines()[-2].get_xdata(), CRITICAL)
    hatched = next(cells for cells in left.collections if cells.get_gid() == "not trusted")
    assert len(hatched.get_paths()) == (~diagram.trusted).sum()
    assert len(slice_figure(diagram, [0, 2]).axes) == 4


def test_what_is_told_of_a_diagram():
    diagram = known_diagram()
    lines = diagram.summary().splitlines()
    assert lines[0] == "alpha x omega: 10 x 3 cells: converged" and [line.split()[0] for line in lines[-4:]] == [
        "omega", "0.1", "0.3", "0.5"
    ]  # fmt: skip
    assert lines[-3].split()[1].startswith(f"{CRITICAL[0]:.2f}"[:3]) and "10 x 3" in repr(diagram)
    numbers = json.loads(json.dumps(diagram.to_dict()).replace("NaN", "null"))
    assert sum(numbers["regions"].values()) == 30 and numbers["status"] == "converged" and len(numbers["alpha_c"]) == 3
    assert numbers["regions"] == {name: int((diagram.region == k).sum()) for k, name in enumerate(REGIONS)}
    cells = made.cells_of(diagram)
    unsolved = {**cells, "status": cells["status"] + 4 * (np.arange(10) == 3)[:, None]}
    assert made.diagram(diagram.x, diagram.y, unsolved, diagram.attrs).to_dict()["status"] == "some cells unsolved"
    elsewhere = made.diagram(("sigma", ALPHA), diagram.y, cells, diagram.attrs)
    assert "alpha_c" not in elsewhere.to_dict() and "alpha_c" not in elsewhere.summary()


def test_error_bars_have_the_dtype_of_the_means():
    """Also in a process without `jax_enable_x64`, and with the same digits."""
    diagram = known_diagram()
    rng = np.random.default_rng(1)
    losses = made.cells_of(diagram)["train_loss"]
    losses[:] += 1e-9 * rng.normal(size=losses.shape)
    diagram = made.changed(diagram, "train_loss", slice(None), losses)
    differences, critical = diagram.loss_difference, diagram.alpha_c()
    same = made.changed(diagram, "train_loss", slice(None), losses)
    jax.config.update("jax_enable_x64", False)
    try:
        pairs = [same.loss_difference, same.gen_difference]
        boundary = same.alpha_c()
    finally:
        jax.config.update("jax_enable_x64", True)
    assert boundary.alpha.dtype == boundary.stderr().dtype == np.float64
    assert all(value.dtype == bar.dtype == np.float64 for value, bar in pairs)
    np.testing.assert_allclose(boundary.alpha, critical.alpha, rtol=1e-12)
    for single, double in zip(pairs[0], differences, strict=True):
        np.testing.assert_allclose(
            single, double, rtol=1e-5
        )  # of losses in float32 a bar would be .1 of their rounding


def test_a_table_is_a_data_frame():
    """One row per cell, of plain numbers and texts: what `pandas.DataFrame` takes."""
    rows = known_diagram().table()
    assert len({tuple(row) for row in rows}) == 1 and len(rows) == 30
    assert all(np.ndim(value) == 0 for row in rows for value in row.values())


def test_curves_need_some_cells():
    """A spline needs four values, or two with their slopes; values that are not finite are left out."""
    x = np.linspace(0.0, 2.0, 5)
    values, rates = x**3 - x, 3 * x**2 - 1
    for count in (1, 2, 3, 4, 5):
        known = np.where(np.arange(5) < count, values, np.nan)
        plain, sloped = reading._spline(x, known), reading._spline(x, known, rates)
        assert (plain is None) == (count < 4) and (sloped is None) == (count < 2)
        for spline in (plain, sloped):
            if spline is not None and count > 3:
                np.testing.assert_allclose([spline(0.7), spline(0.7, 1)], [0.7**3 - 0.7, 3 * 0.49 - 1], rtol=1e-9)
    np.testing.assert_allclose(reading._rise(reading._spline(x, values)), 1.0)
    assert np.isnan(reading._rise(None)) and np.isnan(reading._rise(reading._spline(x, -1 - x)))
    assert np.isnan(reading._rise(reading._spline(x, 1 - x)))  # it falls there


def test_curves_need_alpha_as_an_axis():
    diagram = known_diagram()
    other = made.diagram(("sigma", ALPHA), diagram.y, made.cells_of(diagram), {})
    for ask in (other.alpha_c, other.alpha_l):
        with pytest.raises(
            ta.InputError, match=r"alpha must be one of the axes for curves in alpha, got axes=\('sigma'"
        ):
            ask()
    assert "alpha_c" not in other.to_dict() and "alpha_c" not in other.summary()
    assert "alpha_c" in diagram.to_dict() and "alpha_c" in diagram.summary()


def test_a_page_of_a_diagram_is_an_html_file(tmp_path):
    diagram = known_diagram()
    for name in ("diagram.html", "diagram.htm"):
        diagram.to_html(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(ta.InputError, match=r"path must be that of an \.html file"):
        diagram.to_html(tmp_path / "diagram.txt")
    with pytest.raises(ta.InputError, match="path must be a file that can be written"):
        diagram.to_html(tmp_path / "diagram.html" / "inside.html")
    batch = jax.tree.map(lambda a: np.stack([a, a]), diagram)
    with pytest.raises(ta.InputError, match="diagram must be one diagram, got a batch with states of shape"):
        batch.to_html(tmp_path / "batch.html")
