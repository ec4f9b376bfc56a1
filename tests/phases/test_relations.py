"""Relations between sweeps, diagrams and single solves, and between what a diagram says and its cells."""

import csv
import json
from functools import cache

import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status
from tiedattn_jax.model.overlaps import PAIR
from tiedattn_jax.phases.pair import REGIONS
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.states import DIAGNOSTICS

TIGHT = ta.Settings(tol=1e-7)
ALPHAS, OMEGAS, SIGMAS = [1.25, 1.6, 2.0], [0.28, 0.34], [0.46, 0.5]
NUMBERS = "q", "V", "theta", "m", "train_loss", "gen_error", "train_loss_by_alpha"


@cache
def lines():
    return ta.Lines(5, replicates=2).rule(ta.DotProduct())


def same(points, others, rtol=0.0):
    for a, b in zip(points, others, strict=True):
        for name in NUMBERS:
            first, second = (p.replicates.numbers()[name] for p in (a, b))
            np.testing.assert_allclose(first, second, rtol=rtol, atol=1e-9 if rtol else 0, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("branch", PAIR)
def test_order_and_choice_of_alphas(branch):
    """A sweep depends on its alphas to the tolerance, as `solve` does, and not on their order."""

    def swept(alphas):
        return ta.sweep(
            ta.solve, ta.DotProduct(), branch=branch, follow=True, alpha=alphas, nodes=lines(), settings=TIGHT
        ).points

    whole = swept(ALPHAS)
    same(swept([1.6, 2.0, 1.25]), whole)
    same(swept([1.25, 1.6]), whole[:2], 1e-5)
    same([ta.solve(ta.DotProduct(), 1.6, branch, lines(), settings=TIGHT)], whole[1:2], 1e-5)


@cache
def diagram(x, y, alpha=None):
    axes = {"alpha": ALPHAS, "omega": OMEGAS, "sigma": SIGMAS}
    numbers = {name: [axes[name][k] for k in keep] if keep else axes[name] for name, *keep in (x, y)}
    fixed = {} if alpha is None else {"alpha": alpha}
    return ta.phase_diagram(ta.DotProduct(), **numbers, **fixed, nodes=lines(), devices=1, settings=TIGHT)


def assert_cells(result, expected, rtol=0.0):
    for name in NUMBERS:
        a, b = made.cells_of(result)[name], expected[name]
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-9 if rtol else 0, err_msg=name)


@pytest.mark.full
def test_axes_swapped():
    """A diagram with swapped axes is the transpose: the tracks along alpha are the same."""
    first, second = diagram(("alpha",), ("omega",)), diagram(("omega",), ("alpha",))
    assert_cells(second, {k: np.swapaxes(a, 1, 2) for k, a in made.cells_of(first).items()})
    for name in ("region", "winner", "trusted", "beats_linear"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name).T)
    np.testing.assert_allclose(first.alpha_c().alpha, second.alpha_c().alpha, rtol=1e-12)


@pytest.mark.full
def test_axes_swapped_at_one_alpha():
    """The tracks are others then, and the cells agree to the tolerance."""
    across, along = diagram(("omega",), ("sigma",), alpha=2.0), diagram(("sigma",), ("omega",), alpha=2.0)
    assert_cells(along, {k: np.swapaxes(a, 1, 2) for k, a in made.cells_of(across).items()}, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_alone(row):
    """A row is that of the diagram with this row alone, and its cells are states of `solve`, to the tolerance."""
    whole_cells, alone = made.cells_of(diagram(("alpha",), ("omega",))), diagram(("alpha",), ("omega", row))
    assert_cells(alone, {k: a[:, row : row + 1] for k, a in whole_cells.items()}, 1e-5)
    for b, branch in enumerate(PAIR):
        point = ta.solve(ta.DotProduct(OMEGAS[row]), 1.6, branch, lines(), settings=TIGHT)
        for name in NUMBERS:
            numbers = point.replicates.numbers()[name]
            np.testing.assert_allclose(made.cells_of(alone)[name][b, 0, 1], numbers, rtol=1e-5, atol=1e-9, err_msg=name)


# Diagrams that are made by hand


@pytest.fixture(params=[0, *(pytest.param(k, marks=pytest.mark.full) for k in range(1, 6))])
def drawn(request):
    """A diagram of 2 x 3 cells of three replicates; those of the first row have one status in all replicates."""
    rng, grid = np.random.default_rng(request.param), (2, 2, 3, 3)
    shapes = {"q": (2, 1, 1), "V": (2, 1, 1), "theta": (2, 1, 1), "m": (2, 1)}
    names = "train_loss", "gen_error", "gen_error_linear", "residual", "status", *DIAGNOSTICS, "train_loss_by_alpha"
    values = {k: rng.uniform(0.1, 1, (*grid, *s)) for k, s in {**shapes, **dict.fromkeys(names, ())}.items()}
    values["status"] = rng.choice([0, 1, 2, 3, 6, 8], grid, p=[0.5, *[0.1] * 5]).astype(float)
    values["status"][:, 0] = values["status"][:, 0, :, :1]
    values["residual"] *= 0.2
    return made.diagram(("alpha", np.arange(1.0, 4.0)), ("omega", np.array([0.1, 0.2])), values)


def test_cells_are_those_of_single_states(drawn):
    """Means, error bars, existence and status of a cell are those of a state with its numbers."""
    cells, (means, bars) = made.cells_of(drawn), made.means_of(drawn, "train_loss")
    for at in np.ndindex(2, 2, 3):
        status, loss, residual = (cells[k][at] for k in ("status", "train_loss", "residual"))
        has_state = (status <= Status.stalled) | (status == Status.max_steps) & (residual < 0.1)
        exists = has_state.mean() >= 0.5
        assert drawn.exists[at] == exists == ~np.isnan(means[at])
        if exists:
            own = loss[has_state]
            np.testing.assert_allclose([means[at], bars[at]], [own.mean(), ta.results.error_bar(own)], rtol=1e-6)
        if not (status == Status.absent).any():
            assert drawn.branch_status[at] == status.max()


def test_winners(drawn):
    """A branch that exists alone wins if the other is absent; of two the one with the lower training loss does."""
    exists, winner, loss = drawn.exists, drawn.winner, made.means_of(drawn, "train_loss")[0]
    for b in range(2):
        alone = exists[b] & ~exists[1 - b]
        np.testing.assert_array_equal(winner[alone], np.where(drawn.solved, b, -1)[alone])
    both = exists.all(0)
    np.testing.assert_array_equal(winner[both], (loss[1] < loss[0])[both])
    np.testing.assert_array_equal(winner[~exists.any(0)], -1)
    np.testing.assert_array_equal(np.isnan(drawn.loss_difference[0]), ~both)
    assert not np.any(drawn.trusted & ~drawn.solved)
    np.testing.assert_array_equal(drawn.region == 0, ~drawn.solved)


def test_what_else_says_the_numbers(drawn):
    """Table and dataset say what the arrays say, each at its own place."""
    pytest.importorskip("xarray")
    data, rows = drawn.to_xarray(), drawn.table()
    for row, (j, i) in zip(rows, np.ndindex(2, 3), strict=True):
        assert (row["omega"], row["alpha"]) == (drawn.y[1][j], drawn.x[1][i])
        assert row["region"] == REGIONS[drawn.region[j, i]] and row["trusted"] == drawn.trusted[j, i]
        cell = data.sel(omega=row["omega"], alpha=row["alpha"])
        assert cell.region == row["region"]
        for b, branch in enumerate(PAIR):
            labelled = cell.sel(branch=branch)
            for name in ("train_loss", "gen_error", "replicon", "q"):
                mean, bar = (part[b, j, i] for part in made.means_of(drawn, name))
                np.testing.assert_array_equal(labelled[name], mean)
                np.testing.assert_array_equal(labelled[f"{name}_stderr"], bar)
                keys = [f"{branch}_q_0", f"{branch}_q_1"] if name == "q" else [f"{branch}_{name}"]
                np.testing.assert_array_equal([row[key] for key in keys], np.ravel(mean))
                if name != "q":
                    np.testing.assert_array_equal(row[f"{branch}_{name}_stderr"], bar)
            assert row[f"{branch}_status"] == Status.name_of(drawn.branch_status[b, j, i])


def test_what_else_says_a_curve(tmp_path):
    """Table, file, dataset and picture of a curve say what its points say; the second one has no state here."""
    pytest.importorskip("xarray")
    state = made.fixed_point(scatter=(0.0, 1e-3, -1e-3, 2e-3))
    gone = made.fixed_point(status=np.full(4, int(ta.Status.absent)))
    curve = Table("semantic", ("sigma",), (np.array([0.5, 0.6]),), (state, gone))
    data, (first, second) = curve.to_xarray(), curve.table()
    assert list(first) == list(second) and all(np.ndim(value) == 0 for value in first.values())
    assert (first["sigma"], first["alpha"], first["branch"], first["exists"]) == (0.5, 2.0, "semantic", True)
    assert (second["exists"], second["status"]) == (False, "absent") and np.isnan(second["train_loss"])
    for name in ("train_loss", "gen_error"):
        expected = [getattr(state, name), getattr(state.stderr, name)]
        np.testing.assert_allclose([first[name], first[f"{name}_stderr"]], expected, rtol=1e-12)
        np.testing.assert_allclose([data[name][0], data[f"{name}_stderr"][0]], expected, rtol=1e-12)
    assert first["theta_0"] == first["theta_1"] == float(state.theta)
    assert data.theta.dims == ("sigma", "token", "column", "teacher_column") and data.train_loss.dims == ("sigma",)
    np.testing.assert_array_equal(data.q[0], state.overlaps.q)
    assert np.isnan(data.sel(sigma=0.6).q).all() and not data.sel(sigma=0.6).exists
    assert int(data.sel(sigma=0.6).status) == ta.Status.absent and "absent" in data.status.flag_meanings
    assert json.loads(data.attrs["question"]) == "semantic" and data.branch.values.tolist() == ["semantic"] * 2
    rows = list(csv.DictReader(curve.to_csv(tmp_path / "curve.csv").splitlines()))
    assert rows == [{name: str(value) for name, value in row.items()} for row in (first, second)]
    drawn = [line.get_xydata() for axes in curve.plot().axes for line in axes.get_lines()]
    assert any(np.any(np.isclose(points, [0.5, float(state.train_loss)], rtol=1e-12).all(-1)) for points in drawn)
