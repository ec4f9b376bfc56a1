"""Reading a diagram, from cells whose curves are known."""

import csv
import dataclasses
import functools
import json

import jax
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.phases.boundaries import hermite_spline, last_rise, natural_spline
from tiedattn_jax.phases.pair import REGIONS

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
    """The test error is no cubic in 1 / alpha, and every other cell is read."""
    diagram, r = known_diagram(), np.arange(2)
    error = 2e-3 - 1e-3 * (ALPHA[None, :, None] ** 2 - LINEAR[:, None, None] ** 2 + 0 * r)
    cells = made.cells_of(made.changed(diagram, "gen_error", 1, error))
    cells = {k: a[:, 1:, 1::2] for k, a in cells.items()}  # alpha_c of the first row lies next to an absent cell
    boundary = made.diagram(("alpha", ALPHA[1::2]), ("omega", OMEGA[1:]), cells).alpha_l()
    error = np.abs(boundary.alpha - LINEAR[1:])
    assert np.all(error > 1e-6) and np.all(error < 2 * boundary.stderr()) and np.all(boundary.stderr() < 0.1)


def test_an_event_that_is_not_found_in_the_grid():
    """Below the crossings there is neither event, and the tables say so; nor is there one without alpha."""
    cells = {k: a[:, :, :4] for k, a in made.cells_of(known_diagram()).items()}
    diagram = made.diagram(("alpha", ALPHA[:4]), ("omega", OMEGA[1:]), {k: a[:, 1:] for k, a in cells.items()})
    for table in (diagram.alpha_c(), diagram.alpha_l()):
        assert np.isnan(table.alpha).all() and table.status_name == ["absent"] * 2
        assert table.failures[0] == f"omega = 0.3: there is no {table.question} from alpha = 0.2 to 0.8"
    other = made.diagram(("sigma", ALPHA[:4]), ("omega", OMEGA), cells)
    for ask in (other.alpha_c, other.alpha_l):
        with pytest.raises(ta.InputError, match=r"alpha must be one of the axes for curves in alpha, got axes=\('sig"):
            ask()


def test_an_interval_is_told_where_a_branch_ends():
    """The losses cross at 1.2, the fifth cell of ten, below which there is no semantic branch."""
    diagram = made.changed(known_diagram(), "status", np.s_[1, 1, :6], ta.Status.absent)
    critical, linear = diagram.alpha_c(), diagram.alpha_l()
    assert critical.status_name == ["converged", "max steps", "converged"]
    assert "alpha_c lies between alpha = 1.2 and 1.4 and was not located" in critical.reason[1]
    assert np.isnan(critical.slope[1]) and np.isnan(critical.slope).all()  # no slope is a chord over the gap
    found = np.full((3, 3, 2), np.nan)
    found[1] = [[1.2, 1.3], [-1.0, -1.0], [-0.5, -0.5]]  # both branches are above the baseline
    searched = dataclasses.replace(diagram, crossings=found)
    np.testing.assert_allclose(searched.alpha_c().alpha, [CRITICAL[0], 1.25, CRITICAL[2]])
    np.testing.assert_allclose(searched.alpha_l().alpha, LINEAR)
    found[1, 2] = 0.5  # the semantic branch beats the baseline
    searched = dataclasses.replace(diagram, crossings=found)
    np.testing.assert_allclose(searched.alpha_l().alpha, [LINEAR[0], 1.25, LINEAR[2]])
    assert linear.status_name[1] == "max steps" and "was not located" in linear.reason[1]


def test_a_cell_that_failed_leaves_the_row_open():
    """A row without an event is not `absent` if one of its cells is not solved, and its global minimum is not known."""
    cells = {k: a[:, :, :4] for k, a in made.cells_of(known_diagram()).items()}
    diagram = made.diagram(("alpha", ALPHA[:4]), ("omega", OMEGA), cells)
    diagram = made.changed(diagram, "status", np.s_[1, 1, 1], ta.Status.left_domain)
    for table in (diagram.alpha_c(), diagram.alpha_l()):
        assert table.status_name[1:] == ["left domain", "absent"]
        assert table.reason[1] == "the cell at alpha = 0.4 is not solved"
    assert diagram.winner[1].tolist() == [0, -1, 0, 0] and diagram.table()[5]["global_minimum"] == ""
    assert diagram.global_minimum.status[1, 1] == ta.Status.left_domain


@pytest.mark.parametrize("branch", [0, 1])
def test_alpha_l_without_alpha_c_is_on_the_global_branch(branch):
    """The losses nowhere cross: alpha_l is 1 + omega on the positional branch, and 1.3 + omega on the semantic one."""
    diagram = made.changed(known_diagram(), "status", np.s_[:], 0)  # both branches exist everywhere
    a, omega = ALPHA[None, :, None], OMEGA[:, None, None]
    error = 2e-3 - 1e-3 * (1 - (1 + omega + 0.3 * np.arange(2)[:, None, None, None]) / a)
    diagram = made.changed(diagram, "gen_error", np.s_[:], np.broadcast_to(error, (2, 3, 10, 2)))
    loss = made.cells_of(diagram)["train_loss"][1]
    diagram = made.changed(diagram, "train_loss", 0, loss + (1e-3 if branch else -1e-3))
    assert diagram.alpha_c().status_name == ["absent"] * 3
    np.testing.assert_allclose(diagram.alpha_l().alpha, 1 + OMEGA + 0.3 * branch, rtol=1e-9)


def test_alpha_l_at_the_exchange():
    """If the semantic branch beats the baseline wherever it exists, alpha_l is alpha_c."""
    diagram = known_diagram()
    diagram = made.changed(diagram, "gen_error", np.s_[1], 1e-3)
    np.testing.assert_allclose(diagram.alpha_l().alpha, CRITICAL)
    np.testing.assert_array_equal(diagram.alpha_l().stderr(), diagram.alpha_c().stderr())


def test_the_page_says_why_a_row_lacks_a_boundary():
    page = str(made.changed(known_diagram(), "gen_error", np.s_[1], 9.0))  # the baseline is better everywhere
    assert "nan" not in page and page.endswith("  0.5    1.600(35)  absent")


def test_a_diagram_is_a_table_of_pairs():
    """A cell is made on demand, and what a table reads of all cells at once is what the cells say one by one."""
    diagram = made.changed(without_branches(), "status", np.s_[0, 1, 4], ta.Status.left_domain)
    assert isinstance(diagram, ta.results.Table) and diagram.names == ("omega", "alpha")
    assert diagram.shape == (3, 10) and len(diagram.cells) == len(diagram.points) == 30
    table = ta.results.Table(diagram.question, diagram.names, diagram.axes, tuple(diagram.cells))
    for name in ("found", "status", "reason", "ok"):
        np.testing.assert_array_equal(getattr(diagram, name), getattr(table, name), name)
    assert diagram.columns.keys() <= table.columns.keys()  # a single state also has its alpha and its label
    for name, column in diagram.columns.items():
        for whole, one_by_one in zip(column, table.columns[name], strict=True):
            if whole is not None and whole.dtype.kind == "f":
                np.testing.assert_allclose(whole, one_by_one, rtol=1e-12, atol=1e-18, err_msg=name)
            else:
                np.testing.assert_array_equal(whole, one_by_one, name)
    for number in ("positional.train_loss", "semantic.gen_error", "semantic.theta", "positional.overlaps.q"):
        for read in ("values", "stderr"):
            whole, one_by_one = (getattr(t, read)(number) for t in (diagram, table))
            np.testing.assert_allclose(whole, one_by_one, rtol=1e-12, err_msg=number)
    cell = diagram.cells[-1]
    assert cell == diagram.cells[2, 9] == diagram.cells[29]
    assert cell.semantic.theta == diagram.semantic.theta[2, 9] and cell.region == diagram.region[2, 9]
    assert str(cell).startswith("bistable, semantic global at alpha = 1: converged\n")
    with pytest.raises(IndexError):
        diagram.cells[30]


def test_numbers_by_name():
    """A dotted name is that of an array of a branch, and any other name is that of a column."""
    diagram = known_diagram()
    for name in ("gen_error", "theta", "diagnostics.replicon"):  # numbers of a branch that is absent are NaN
        expected = np.where(diagram.exists[1], functools.reduce(getattr, name.split("."), diagram.semantic), np.nan)
        np.testing.assert_array_equal(diagram.values(f"semantic.{name}"), expected)
    np.testing.assert_array_equal(diagram.alpha, diagram.positional.alpha)


def test_functions_of_a_cell():
    """A function gets one cell at a time, so that it may reduce or branch."""
    diagram = known_diagram()
    for read in (
        lambda pair: pair.semantic.gen_error,
        lambda pair: np.abs(pair.semantic.overlaps.theta).max(),
        lambda pair: 1.0 if pair.region == 4 else 0.0,
    ):
        np.testing.assert_array_equal(diagram.values(read).ravel(), [read(cell) for cell in diagram.cells])
    bars = diagram.stderr(lambda bars: bars.semantic.gen_error)
    np.testing.assert_array_equal(bars, diagram.stderr("semantic.gen_error"))


def test_reading_a_diagram_does_not_change_it():
    diagram, other = known_diagram(), known_diagram()
    assert diagram.region.shape == diagram.found.shape and diagram.columns
    assert jax.tree.structure(diagram.pair) == jax.tree.structure(other.pair)
    assert "tiedattn" in ta.cite(diagram.cells[0])


def test_error_bars_by_name():
    diagram = known_diagram()
    np.testing.assert_array_equal(diagram.stderr("semantic.gen_error"), diagram.semantic.stderr.gen_error)
    bars = diagram.stderr("semantic.theta")  # all replicates have the same theta where they have a state
    np.testing.assert_array_equal(bars, np.where(diagram.exists[1], 0.0, np.nan))
    np.testing.assert_array_equal(diagram.stderr("loss_difference"), diagram.loss_difference[1])
    np.testing.assert_array_equal(diagram.values(), diagram.region_names)
    assert {"winner", "semantic", "alpha_c"} <= set(dir(diagram)) and not hasattr(diagram, "semantics")
    with pytest.raises(ta.InputError, match="of which the nearest are semantic_gen_error"):
        diagram.values("semantic.gen_eror")
    with pytest.raises(ta.InputError, match=r"number must be the name of one number .*got number='region'"):
        diagram.contours()


def test_a_branch_that_is_absent_is_no_failure():
    diagram = known_diagram()
    assert diagram.found.all() and diagram.ok.all() and not diagram.failures
    assert (diagram.branch_status[1] == ta.Status.absent).any() and not diagram.status.any()
    diagram = made.changed(diagram, "status", np.s_[1, 1, 4], ta.Status.left_domain)
    diagram = made.changed(diagram, "status", np.s_[0, 2, 9, 0], ta.Status.max_steps)
    assert diagram.failures == ("omega = 0.3, alpha = 1: the semantic branch is not solved: left domain",)
    both = made.changed(diagram, "status", np.s_[0, 1, 4], ta.Status.nonfinite)
    texts = (f"the {branch} branch is not solved: {status}" for branch, status in (
        ("positional", "nonfinite"), ("semantic", "left domain")))  # fmt: skip
    assert both.reason[1, 4] == "; ".join(texts)
    np.testing.assert_array_equal(diagram.found, diagram.solved)
    assert np.argwhere(~diagram.ok).tolist() == [[1, 4], [2, 9]]  # the second one exists in the other replicate
    assert np.isnan(diagram.values("positional.gen_error")[1, 4]) and diagram.status[2, 9] == ta.Status.max_steps
    row = diagram.table()[14]
    assert (row["status"], row["reason"]) == ("left domain", "the semantic branch is not solved: left domain")


@pytest.mark.usefixtures("unchecked")
def test_a_map_of_a_number_has_the_axes_of_the_diagram():
    diagram = known_diagram()
    axis = diagram.plot("semantic.gen_error").axes[0]
    assert axis.get_xlabel().endswith(r"$\alpha$") and axis.get_ylabel().endswith(r"$\omega$")
    assert axis.figure.legends[0].get_texts()[0].get_text() == "no semantic.gen_error"
    drawn = axis.collections[0].get_array()
    np.testing.assert_array_equal(drawn, diagram.values("semantic.gen_error"))
    for number in ("region", [diagram.alpha_c()]):
        with pytest.raises(ta.InputError, match="number must be the name of one number per setting"):
            diagram.plot(number)


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
    np.testing.assert_allclose(minimum.train_loss[1, [0, 2]], [0.01, np.nan])
    np.testing.assert_allclose(minimum.stderr.train_loss[1, 0], error_bar(np.array([-1e-3, 1e-3])))
    np.testing.assert_allclose(minimum.gen_error[1, :3], [0.02, 0.02, np.nan])
    assert minimum.exists[1, :4].tolist() == [True, True, False, True]
    np.testing.assert_allclose(diagram.gen_difference[0][1, :2], 0.018)
    np.testing.assert_array_equal(minimum.overlaps.theta[1, 0], 0.0)
    assert np.isnan(made.means_of(diagram, "train_loss")[0][:, 1, :3]).all()  # the branches are still absent
    assert diagram.trusted[1, 0] and not diagram.beats_linear[1, 0]
    assert not made.changed(diagram, "replicon", np.s_[:, 1, 0], 1.2).trusted[1, 0]
    rows = diagram.table()
    assert rows[10]["region"] == "uninformed" and rows[10]["positional_status"] == "absent"
    assert [rows[k]["global_minimum"] for k in (10, 12, 15)] == ["uninformed", "", "positional"]
    assert (rows[10]["global_minimum_train_loss"], rows[10]["global_minimum_gen_error"]) == pytest.approx((0.01, 0.02))
    assert "     2  uninformed" in str(diagram) and diagram.to_dict()["regions"]["uninformed"] == 2
    assert "uninformed" in [text.get_text() for text in diagram.plot().legends[0].get_texts()]
    diagram = made.changed(diagram, "status", (0, 1, 1), ta.Status.max_steps)
    diagram = made.changed(diagram, "residual", (0, 1, 1), 1.0)
    assert not diagram.uninformed[1, 1] and diagram.region[1, 1] == 0


def test_cells_that_failed_are_marked():
    diagram = known_diagram()
    diagram = made.changed(diagram, "status", np.s_[0, 1, 3, 1], 3)  # one replicate of two failed: it is not trusted
    assert diagram.positional.stderr.train_loss[1, 3] == np.inf  # only one replicate is left
    assert diagram.positional.train_loss[1, 3] == made.cells_of(diagram)["train_loss"][0, 1, 3, 0]
    assert diagram.region[1, 3] == 4 and not diagram.trusted[1, 3] and diagram.trusted[1, 4]
    diagram = made.changed(diagram, "status", np.s_[0, 1, 4], 3)
    assert diagram.region[1, 4] == 0 and not diagram.trusted[1, 4]
    assert diagram.solved.sum() == 29
    assert np.isnan(diagram.loss_difference[0][1, 4])
    critical = diagram.alpha_c()  # one replicate crosses next to the failed cell, so the mean of the others is biased
    np.testing.assert_allclose(critical.alpha, [CRITICAL[0], np.nan, CRITICAL[2]], rtol=1e-9)
    assert critical.failures == ("omega = 0.3: the cell at alpha = 1 is not solved",)


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


def test_what_trusted_asks_for():
    def trusted(name, index, value):
        """Ask at alpha = 1.4, omega = .3: both branches exist, and the semantic one is global."""
        return made.changed(known_diagram(), name, index, value).trusted[1, 6]

    spread = 1e-5 * np.array([-1.0, 1.0])
    for bars, decided in ((1.9, False), (2.1, True)):
        assert trusted("train_loss", np.s_[0, 1, 6], 2.8e-3 + bars * error_bar(spread) + spread) == decided
    assert not trusted("replicon", np.s_[1, 1, 6], 1.01) and trusted("replicon", np.s_[0, 1, 6], 1.01)
    assert not trusted("status", np.s_[0, 1, 6, 0], ta.Status.max_steps)


def test_nodes_that_see_nothing_settle_nothing():
    diagram = known_diagram()
    diagram = made.changed(diagram, "status", np.s_[1, 1, [1, 5]], ta.Status.unresolved)  # the first was absent before
    assert diagram.region[1, 1] == diagram.region[1, 5] == 0 and not diagram.trusted[1, [1, 5]].any()
    np.testing.assert_array_equal(diagram.branch_status[1, 1, :6], [6, 8, 0, 0, 0, 8])
    assert not diagram.absent[1, 1, 1] and diagram.absent[1, 1, 0] and not diagram.solved[1, 1]


def test_a_difference_that_rises_twice():
    """The last time counts: the semantic branch stays the global minimum beyond it."""
    diagram = known_diagram()
    for name, values in (("train_loss", np.sin(8 * ALPHA)), ("train_loss_by_alpha", 8 * np.cos(8 * ALPHA))):
        diagram = made.changed(diagram, name, slice(None), np.stack([values, 0 * values])[:, None, :, None])
    np.testing.assert_allclose(diagram.alpha_c().alpha, np.pi / 2, atol=0.01)


def test_files(tmp_path):
    diagram = known_diagram()
    diagram.save(tmp_path / "a.npz")
    loaded = ta.results.PhaseDiagram.load(tmp_path / "a.npz")
    assert loaded.x[0] == "alpha" and loaded.attrs == diagram.attrs
    assert loaded == diagram and made.changed(diagram, "q", (0, 0, 0, 0), 1.0) != diagram
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    text = diagram.to_csv(tmp_path / "a.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert (tmp_path / "a.csv").read_text() == text
    assert rows == [{name: str(value) for name, value in row.items()} for row in diagram.table()]


def test_every_column_of_the_table_is_a_name_for_values():
    """There is one row per cell, of plain numbers and texts: what `pandas.DataFrame` takes."""
    diagram = known_diagram()
    rows = diagram.table()
    assert len({tuple(row) for row in rows}) == 1 and len(rows) == 30
    assert all(np.ndim(value) == 0 for row in rows for value in row.values())
    cells = {k: a[:, :1, 3:5] for k, a in made.cells_of(diagram).items()}
    small = made.diagram(("alpha", ALPHA[3:5]), ("omega", OMEGA[:1]), cells)
    for name, number in small.table()[1].items():
        values = small.values(name)
        assert values.shape == (1, 2)
        np.testing.assert_array_equal(values[0, 1], np.asarray(number), name)
    with pytest.raises(ta.InputError, match=r"nearest are.*semantic_train_loss"):
        diagram.values("semantic_train_los")


def test_xarray():
    """Parts of a diagram differ in their fingerprints, and still combine by the defaults of xarray."""
    xarray = pytest.importorskip("xarray")
    diagram = known_diagram()
    cells, data = made.cells_of(diagram), diagram.to_xarray()
    assert json.loads(data.attrs["version"]) == "0" and data.region.sel(omega=0.1).dims == ("alpha",)
    grid = "branch", "omega", "alpha"
    assert data.q.dims == data.V_stderr.dims == (*grid, "token", "column", "other_column")
    assert data.theta.dims == (*grid, "token", "column", "teacher_column") and data.m.dims == (*grid, "token", "column")
    status = data.branch_status
    names = dict(zip(status.flag_values, status.flag_meanings.split(), strict=True))
    assert names[0] == "converged" and names[8] == "unresolved" and status.dims == data.train_loss.dims == grid
    assert data.status.attrs == status.attrs and data.status.dims == data.reason.dims == grid[1:]
    cell = data.sel(omega=0.3, branch="semantic").isel(alpha=4)
    assert cell.global_minimum.item() == "positional" and float(cell.theta.isel(token=1).squeeze()) == 0.2
    assert float(cell.global_minimum_gen_error) == diagram.positional.gen_error[1, 4]

    def part(rows, name):
        own = {k: a[:, rows, :3] for k, a in cells.items()}
        attrs = {"model": "DotProduct", "fingerprint": name}
        return made.diagram(("alpha", ALPHA[:3]), ("omega", OMEGA[rows]), own, attrs).to_xarray()

    whole = xarray.combine_by_coords([part(slice(0, 1), "a"), part(slice(1, 3), "b")])
    assert whole.equals(part(slice(0, 3), "c")) and whole.attrs == {"model": '"DotProduct"'}


def test_what_is_told_of_a_diagram():
    diagram = known_diagram()
    lines = diagram.summary().splitlines()
    assert lines[0] == "alpha x omega: 10 x 3 cells: converged" and "10 x 3" in repr(diagram)
    assert [line.split()[0] for line in lines[-4:]] == ["omega", "0.1", "0.3", "0.5"]
    assert lines[-3].split()[1].startswith(f"{CRITICAL[0]:.2f}"[:3])
    numbers = json.loads(json.dumps(diagram.to_dict()).replace("NaN", "null"))
    assert sum(numbers["regions"].values()) == 30 and numbers["status"] == "converged" and len(numbers["alpha_c"]) == 3
    assert numbers["regions"] == {name: int((diagram.region == k).sum()) for k, name in enumerate(REGIONS)}
    cells = made.cells_of(diagram)
    unsolved = {**cells, "status": cells["status"] + 4 * (np.arange(10) == 3)[:, None]}
    assert made.diagram(diagram.x, diagram.y, unsolved, diagram.attrs).to_dict()["status"] == "some cells unsolved"
    elsewhere = made.diagram(("sigma", ALPHA), diagram.y, cells, diagram.attrs)
    assert "alpha_c" not in elsewhere.to_dict() and "alpha_c" not in elsewhere.summary()


def test_error_bars_have_the_dtype_of_the_means():
    """Also in a process without `jax_enable_x64`, and with the same digits: in float32 a bar would be a rounding."""
    diagram = known_diagram()
    losses = made.cells_of(diagram)["train_loss"]
    losses += 1e-9 * np.random.default_rng(1).normal(size=losses.shape)
    diagram, same = (made.changed(diagram, "train_loss", slice(None), losses) for _ in range(2))
    differences, critical = diagram.loss_difference, diagram.alpha_c()
    jax.config.update("jax_enable_x64", False)
    try:
        pairs, boundary = [same.loss_difference, same.gen_difference], same.alpha_c()
    finally:
        jax.config.update("jax_enable_x64", True)
    assert boundary.alpha.dtype == boundary.stderr().dtype == np.float64
    assert all(value.dtype == bar.dtype == np.float64 for value, bar in pairs)
    np.testing.assert_allclose(boundary.alpha, critical.alpha, rtol=1e-12)
    np.testing.assert_allclose(pairs[0], differences, rtol=1e-5)


def test_curves_need_some_cells():
    """A spline needs two values; those that are not finite are left out. No root lies next to an absent branch."""
    x, nowhere = np.linspace(0.0, 2.0, 5), np.zeros(5, bool)
    values, rates = x**3 - x, 3 * x**2 - 1
    for count in (1, 2, 4, 5):
        known = np.where(np.arange(5) < count, values, np.nan)
        for spline in (natural_spline(x, known), hermite_spline(x, known, rates)):
            assert (spline is None) == (count < 2)
            if count > 3:
                np.testing.assert_allclose([spline(0.7), spline(0.7, 1)], [0.7**3 - 0.7, 3 * 0.49 - 1], rtol=1e-9)
    gap = np.arange(5) == 2
    around = natural_spline(x, np.where(gap, np.nan, x - 1.1))
    for spline, absent, root in (
        (natural_spline(x, values), nowhere, 1.0),
        (None, nowhere, np.nan),
        (natural_spline(x, -1 - x), nowhere, np.nan),
        (natural_spline(x, 1 - x), nowhere, np.nan),  # it falls there
        (around, gap, np.nan),
        (around, nowhere, 1.1),
    ):
        np.testing.assert_allclose(last_rise(spline, x, absent), root)
