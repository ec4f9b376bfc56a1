"""Newton's method of 1RSB: single steps, their matrix, and how a search ends."""

import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status
from tiedattn_jax.rsb import newton
from tiedattn_jax.rsb.potentials import OneRSBOverlaps
from tiedattn_jax.theory.engine import run_one


def _look(residual):
    n, rng = len(residual), np.random.default_rng(0)
    sizes = dict(zip(("columns", "rows"), np.exp(rng.standard_normal((2, n))), strict=True))
    matrix = np.eye(n) + 0.2 * rng.standard_normal((n, n))
    return newton.Look(np.ones(n), residual, matrix, **sizes, loss=1.0, loss_by_model=None, loss_by_alpha=0.0,
                       loss_by_log_s=0.0, hats=None)  # fmt: skip


@pytest.mark.parametrize("uphill", [1.0, -1.0])
def test_a_step_solves_the_equations_and_goes_uphill_in_s(uphill):
    """A step solves the linear equations. Where the loss is steep in log s, log s moves uphill by the longest step.

    The other coordinates then solve their equations at this log s. A long step keeps its direction.
    """
    look = _look(1e-3 * np.array([1.0, -2.0, 0.5, -uphill]))
    step = newton._newton_step(look, look.matrix, 4, 0.0) * look.columns
    np.testing.assert_allclose(look.matrix @ step, look.residual, rtol=1e-9)
    held = newton._newton_step(look, look.matrix, 3, 0.0) * look.columns
    np.testing.assert_allclose(look.matrix[:3, :3] @ held[:3], look.residual[:3], rtol=1e-9)
    assert held[3] == 0
    assert step[3] * uphill < 0  # Newton's method alone goes downhill
    move = newton._newton_step(look, look.matrix, 4, uphill)
    assert move[3] * uphill > 0 and np.max(np.abs(move)) == pytest.approx(0.5)
    cut = move[3] / (0.5 * uphill)  # all coordinates are cut together
    target = look.residual[:3] - look.matrix[:3, 3] * 0.5 * uphill * look.columns[3]
    np.testing.assert_allclose(look.matrix[:3, :3] @ (move * look.columns)[:3], cut * target, rtol=1e-9)
    np.testing.assert_array_equal(newton._newton_step(look, look.matrix, 4, -uphill) * look.columns, step)
    np.testing.assert_array_equal(newton._newton_step(look, look.matrix, 4, 0.05 * uphill) * look.columns, step)
    far = _look(np.array([10.0, -20.0, 5.0, uphill]))
    long_move = newton._newton_step(far, far.matrix, 4, 0.0)
    long_step = far.matrix @ (long_move * far.columns)
    assert np.max(np.abs(long_move)) == pytest.approx(0.5)
    np.testing.assert_allclose(long_step / long_step[0], far.residual / far.residual[0], rtol=1e-9)


def _problem(free):
    return newton.Problem(ta.DotProduct(), jnp.asarray(1.0), None, jnp.asarray(free), True, 0.5)


@pytest.mark.parametrize(("moved", "cut"), [("q0", 0.5), ("V", 0.25), ("q1", 0.5), ("theta", 0.5), ("q0", 0.0)])
def test_a_step_is_halved_until_it_lies_in_the_domain(moved, cut):
    """The domain is q1 > q0 > theta rho^{-1} theta^T and V > 0. A step that never gets there is not taken."""
    ones = jnp.ones((2, 1, 1))
    x = OneRSBOverlaps(1.5 * ones, ones, ones, 0.1 * ones, jnp.zeros((2, 1)))
    s = jnp.asarray(2.0)
    size = {"q0": 0.7, "V": -3.0, "q1": -0.7, "theta": 0.6}[moved]
    end = OneRSBOverlaps(**{**vars(x), moved: getattr(x, moved) + (size if cut else 1e3) * ones})
    if moved == "q1":
        end = OneRSBOverlaps(**{**vars(end), "q0": x.q0})
    v, unpack = newton.coordinates(x, s)
    move = np.asarray(newton.coordinates(end, 1.1 * s)[0] - v)
    new, new_s = _problem([1.0, 1.0]).step_from(x, s, move)
    expected, expected_s = unpack(v + cut * move)
    np.testing.assert_allclose(new_s, expected_s, rtol=1e-12)
    for name, a in vars(expected).items():
        np.testing.assert_allclose(getattr(new, name), a, rtol=1e-12)
    held, _ = _problem([0.0, 1.0]).step_from(x, s, move)
    assert cut == 0 or np.all(held.theta == 0)


@pytest.fixture
def search(monkeypatch):
    """Newton's method at a place that stays, whose residuals are given; returns the solution."""

    def found(residuals):
        x = OneRSBOverlaps(*(jnp.ones((1, 1, 1)) * a for a in (2.0, 1.0, 1.0, 0.0)), jnp.zeros((1, 1)))

        def look(self, x, s, needs_slopes):
            v = np.asarray(newton.coordinates(x, s)[0])
            residual, unit = np.full(len(v), next(residuals)), np.asarray(1.0)
            numbers = residual, np.eye(len(v)), 1 + 0 * v, 1 + 0 * v, unit, None, unit, 0 * unit, x
            return made.finished_path(newton.Look(v, *numbers))

        monkeypatch.setattr(newton.Problem, "look", look)
        monkeypatch.setattr(newton.Problem, "step_from", lambda self, x, s, move: (x, s))
        return run_one(newton.fixed_point(_problem([0.0, 0.0]), x, jnp.asarray(500.0), None))

    return found


def test_newton_ends_where_the_equations_are_not_finite(search):
    result = search(iter([0.5, np.nan]))
    assert result.residual == 0.5 and np.all(np.isfinite(result.matrix))
    for residual, status in ((1e-4, Status.converged), (3e-3, Status.stalled), (4e-3, Status.max_steps)):
        assert newton.Solution(None, None, None, None, residual, None).status == status


@pytest.mark.parametrize(("residual", "idle"), [(0.5, 5), (2e-3, 3)])
def test_newton_ends_after_steps_that_do_not_halve_the_residual(search, residual, idle):
    """There are fewer of them where the residual is small. They are counted anew when log s begins to move."""
    asked = iter([residual] * 60)
    assert search(asked).residual == residual
    assert 60 - len(list(asked)) == newton._FIRST_S_STEP + 1 + idle
    asked = iter([residual, *[residual] * (newton._FIRST_S_STEP + idle - 1), *[0.4 * residual] * 60])
    search(asked)
    assert 60 + newton._FIRST_S_STEP + idle - len(list(asked)) == newton._FIRST_S_STEP + 2 * idle + 1


def test_corrected_matrix_knows_the_last_move():
    """It maps the last move to the change that was seen; moves across it, in units of the coordinates, as before."""
    matrix, sizes = np.arange(9.0).reshape(3, 3), np.array([1.0, 10.0, 0.1])
    move, change = np.array([0.5, 2.0, 0.03]), np.array([1.0, -1.0, 2.0])
    corrected = newton.corrected_matrix(matrix, move, change, sizes)
    np.testing.assert_allclose(corrected @ move, change, rtol=1e-12)
    across = sizes * np.cross(move / sizes, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(corrected @ across, matrix @ across, rtol=1e-9)
    np.testing.assert_array_equal(newton.corrected_matrix(matrix, 0 * move, change, sizes), matrix)
