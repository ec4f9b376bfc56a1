"""Relations between sweeps, diagrams and single solves, and between what a diagram says and its cells."""

from functools import cache

import made
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status
from tiedattn_jax.model.overlaps import PAIR
from tiedattn_jax.phases.diagram import REGIONS
from tiedattn_jax.theory.states import DIAGNOSTICS

# Examples that fail are not made smaller, which takes minutes.
DRAWN = settings(max_examples=20, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
SOLVED = settings(DRAWN, max_examples=5)
TIGHT = ta.Settings(tol=1e-7)
ALPHAS, OMEGAS, SIGMAS = [1.25, 1.6, 2.0], [0.28, 0.34], [0.46, 0.5]
NUMBERS = "q", "V", "theta", "m", "train_loss", "gen_error", "train_loss_by_alpha"


# Rules are no fixtures: hypothesis would print all their nodes.
@cache
def lines():
    return ta.Lines(5, replicates=2).rule(ta.DotProduct())


@cache
def whole(branch):
    return ta.sweep(ta.DotProduct(), branch, alpha=ALPHAS, nodes=lines(), settings=TIGHT)


def same(points, others, rtol=0.0):
    for a, b in zip(points, others, strict=True):
        for name in NUMBERS:
            first, second = (p.replicates.numbers()[name] for p in (a, b))
            np.testing.assert_allclose(first, second, rtol=rtol, atol=1e-9 if rtol else 0, err_msg=name)


@SOLVED
@given(st.permutations(ALPHAS), st.sampled_from(PAIR))
def test_alphas_in_another_order(alphas, branch):
    """A sweep through alpha does not depend on the order of its alphas."""
    curve = ta.sweep(ta.DotProduct(), branch, alpha=alphas, nodes=lines(), settings=TIGHT)
    same(curve.points, whole(branch).points)


@SOLVED
@given(st.sets(st.sampled_from(ALPHAS), min_size=1, max_size=2).map(sorted), st.sampled_from(PAIR))
def test_some_of_the_alphas(alphas, branch):
    """States are those of a sweep through other alphas, and of `solve`, to the tolerance."""
    curve = ta.sweep(ta.DotProduct(), branch, alpha=alphas, nodes=lines(), settings=TIGHT)
    same(curve.points, [p for p in whole(branch).points if float(p.alpha) in alphas], 1e-5)
    same(curve.points, [ta.solve(ta.DotProduct(), a, branch, lines(), settings=TIGHT) for a in alphas], 1e-5)


@SOLVED
@given(st.permutations([(0.28, 0.46), (0.3, 0.5), (0.34, 0.47)]), st.sampled_from(PAIR))
def test_a_model_among_others(settings_of_models, branch):
    """The state of a model in a list is, bit by bit, that of `solve`, wherever it stands."""
    models = [ta.DotProduct(*numbers) for numbers in settings_of_models]
    curve = ta.sweep(models, branch, alpha=2.0, nodes=lines())
    same(curve.points, [ta.solve(m, 2.0, branch, lines()) for m in models])


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


def test_axes_swapped():
    """A diagram with swapped axes is the transpose: the same tracks along alpha, other ones along other numbers."""
    first, second = diagram(("alpha",), ("omega",)), diagram(("omega",), ("alpha",))
    assert_cells(second, {k: np.swapaxes(a, 1, 2) for k, a in made.cells_of(first).items()})
    for name in ("region", "winner", "trusted", "beats_linear"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name).T)
    np.testing.assert_allclose(first.alpha_c().alpha, second.alpha_c().alpha, rtol=1e-12)
    across, along = diagram(("omega",), ("sigma",), alpha=2.0), diagram(("sigma",), ("omega",), alpha=2.0)
    assert_cells(along, {k: np.swapaxes(a, 1, 2) for k, a in made.cells_of(across).items()}, 1e-5)


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

STATUS = st.sampled_from([0, 1, 2, 3, 6, 8])


CELLS = st.integers(0, 2**31), st.lists(st.one_of(st.just(0), STATUS), min_size=36, max_size=36)


def drawn_diagram(seed, status):
    """A diagram of 2 x 3 cells of three replicates; those of the first row have one status in all replicates."""
    rng, grid = np.random.default_rng(seed), (2, 2, 3, 3)
    shapes = {"q": (2, 1, 1), "V": (2, 1, 1), "theta": (2, 1, 1), "m": (2, 1)}
    names = "train_loss", "gen_error", "gen_error_linear", "residual", "status", *DIAGNOSTICS, "train_loss_by_alpha"
    values = {k: rng.uniform(0.1, 1, (*grid, *s)) for k, s in {**shapes, **dict.fromkeys(names, ())}.items()}
    values["status"] = np.reshape(status, grid).astype(float)
    values["status"][:, 0] = values["status"][:, 0, :, :1]
    values["residual"] *= 0.2
    return made.diagram(("alpha", np.arange(1.0, 4.0)), ("omega", np.array([0.1, 0.2])), values)


@DRAWN
@given(*CELLS)
def test_cells_are_those_of_single_states(seed, status):
    """Means, error bars, existence and status of a cell are those of a state with its numbers."""
    diagram = drawn_diagram(seed, status)
    cells, (means, bars) = made.cells_of(diagram), made.means_of(diagram, "train_loss")
    for b, j, i in np.ndindex(2, 2, 3):
        status, loss, residual = (cells[k][b, j, i] for k in ("status", "train_loss", "residual"))
        has_state = (status <= Status.stalled) | (status == Status.max_steps) & (residual < 0.1)
        assert diagram.exists[b, j, i] == (has_state.mean() >= 0.5)
        assert np.isnan(means[b, j, i]) == (has_state.mean() < 0.5)
        if has_state.mean() >= 0.5:
            np.testing.assert_allclose(means[b, j, i], loss[has_state].mean())
            np.testing.assert_allclose(bars[b, j, i], ta.error_bar(loss[has_state]), rtol=1e-6)
        if not (status == Status.absent).any():
            assert diagram.status[b, j, i] == status.max()


@DRAWN
@given(*CELLS)
def test_winners(seed, status):
    """A branch that exists alone is the winner; of two the one with the lower training loss is; of none, none."""
    diagram = drawn_diagram(seed, status)
    exists, winner, loss = diagram.exists, diagram.winner, made.means_of(diagram, "train_loss")[0]
    for b in range(2):
        np.testing.assert_array_equal(winner[exists[b] & ~exists[1 - b]], b)
    both = exists.all(0)
    np.testing.assert_array_equal(winner[both], (loss[1] < loss[0])[both])
    np.testing.assert_array_equal(winner[~exists.any(0)], -1)
    np.testing.assert_array_equal(np.isnan(diagram.loss_difference[0]), ~both)
    assert not np.any(diagram.trusted & ~diagram.solved)
    np.testing.assert_array_equal(diagram.region == 0, ~diagram.solved)


@DRAWN
@given(*CELLS, st.sampled_from([0, 1]), st.sampled_from(NUMBERS))
def test_a_branch_has_its_own_error_bar(seed, status, branch, name):
    """The scatter of one branch enlarges the error bars of this branch alone."""
    diagram = drawn_diagram(seed, status)
    before = made.means_of(diagram, name)[1]
    changed = made.cells_of(diagram)
    changed[name][branch] *= 1 + np.arange(3.0).reshape(3, *[1] * (changed[name].ndim - 4))
    after = made.means_of(made.diagram(diagram.x, diagram.y, changed), name)[1]
    np.testing.assert_array_equal(after[1 - branch], before[1 - branch])
    known = np.isfinite(before[branch])
    assert not known.any() or np.any(after[branch][known] != before[branch][known])


@settings(DRAWN, max_examples=5)
@given(*CELLS)
def test_what_else_says_the_numbers(seed, status):
    """Table, dataset and file say what the arrays say, each at its own place."""
    diagram = drawn_diagram(seed, status)
    pytest.importorskip("xarray")
    data, rows = diagram.to_xarray(), diagram.table()
    for k, (j, i) in enumerate(np.ndindex(2, 3)):
        row = rows[k]
        assert (row["omega"], row["alpha"]) == (diagram.y[1][j], diagram.x[1][i])
        assert row["region"] == REGIONS[diagram.region[j, i]] and row["trusted"] == diagram.trusted[j, i]
        cell = data.sel(omega=row["omega"], alpha=row["alpha"])
        assert cell.region == row["region"]
        for b, branch in enumerate(PAIR):
            labelled = cell.sel(branch=branch)
            for name in ("train_loss", "gen_error", "replicon", "q"):
                mean, bar = (part[b, j, i] for part in made.means_of(diagram, name))
                np.testing.assert_array_equal(labelled[name], mean)
                np.testing.assert_array_equal(labelled[f"{name}_stderr"], bar)
                if name == "q":
                    np.testing.assert_array_equal([row[f"{branch}_q_{l}"] for l in range(2)], mean.ravel())
                else:
                    said = row[f"{branch}_{name}"], row[f"{branch}_{name}_stderr"]
                    np.testing.assert_array_equal(said, (mean, bar))
            assert row[f"{branch}_status"] == Status.name_of(diagram.status[b, j, i])


def test_what_else_says_a_curve():
    """Table and dataset of a curve say what its points say."""
    pytest.importorskip("xarray")
    curve = whole("semantic")
    data = curve.to_xarray()
    for k, (point, row) in enumerate(zip(curve.points, curve.table(), strict=True)):
        assert row["alpha"] == float(point.alpha) == float(data.alpha[k])
        for name in ("train_loss", "gen_error"):
            expected = [getattr(point, name), getattr(point.stderr, name)]
            np.testing.assert_allclose([row[name], row[f"{name}_stderr"]], expected, rtol=1e-12)
            np.testing.assert_allclose([data[name][k], data[f"{name}_stderr"][k]], expected, rtol=1e-12)
        np.testing.assert_array_equal(data.q[k], point.overlaps.q)
        np.testing.assert_array_equal([row["theta_0"], row["theta_1"]], np.ravel(point.overlaps.theta))
    drawn = [line.get_xydata() for axes in curve.plot().axes for line in axes.get_lines()]
    expected = np.stack([curve.at, curve.values("train_loss")], 1)
    assert any(a.shape == expected.shape and np.allclose(a, expected, rtol=1e-12) for a in drawn)
