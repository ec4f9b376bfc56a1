"""Newton's method of 1RSB: single steps, their matrix, and how a search ends."""

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

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


@pytest.mark.parametrize("ground", [True, False])
def test_the_motion_of_a_state_follows_from_the_implicit_function_theorem(monkeypatch, ground):
    """Coordinates v move so that v = F(v, p). At the ground state the last equation says F = 0; else s stays."""
    rng, alpha, s = np.random.default_rng(0), 1.3, 2.0
    blocks = [jnp.asarray(rng.uniform(1, 2, (2, 1, 1))) for _ in range(3)]
    x = OneRSBOverlaps(blocks[0] + 1, blocks[0], *blocks[1:], jnp.asarray(rng.uniform(1, 2, (2, 1))))
    n, k = 11, ravel_pytree((ta.DotProduct(), alpha))[0].size
    image, channel = 0.2 * rng.standard_normal((n, n + k)), rng.standard_normal(n + k)
    hats = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal((*a.shape, n + k))), x)

    def expansion(setting, averages, u, free, with_slopes):
        _, at_alpha, _, at_s = setting(u)
        scale = jnp.where(with_slopes, at_alpha / alpha * at_s / s, jnp.nan)
        return None, newton._Values(scale * image, jnp.asarray(channel), None, hats), None

    monkeypatch.setattr(newton, "_expansion", expansion)
    problem = _problem([1.0, 1.0])._replace(alpha=jnp.asarray(alpha), ground=jnp.asarray(ground))
    moving = newton.Solution(problem, x, jnp.asarray(s), None, 0.0, None).moving()
    matrix, force = np.eye(n) - image[:, :n], image[:, n:].copy()
    matrix[-1] = -image[-1, :n] if ground else np.eye(n)[-1]
    force[-1] *= ground
    v = np.linalg.solve(matrix, force)
    q1, response, V, theta, m, log_s = np.split(v, [2, 4, 6, 8, 10])
    np.testing.assert_allclose(moving.s, s * log_s[0], atol=1e-9)
    q0 = q1 - response / s + np.ravel(x.q1 - x.q0)[:, None] * log_s  # of q1 - (s (q1 - q0)) / s
    for name, expected in {"q1": q1, "q0": q0, "V": V, "theta": theta, "m": m}.items():
        np.testing.assert_allclose(np.reshape(getattr(moving.x, name), (2, k)), expected, atol=1e-9, err_msg=name)

    def total(a):
        return a[..., n:] + a[..., :n] @ v

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, total(b), atol=1e-9), moving.hats, hats)
    np.testing.assert_allclose(moving.loss_by_alpha, total(channel), atol=1e-9)
    np.testing.assert_allclose(moving.loss_by_log_s, -total(image)[-1], atol=1e-9)
    assert np.all(np.abs(moving.loss_by_log_s) < 1e-9) == ground


@pytest.fixture
def linear_search(monkeypatch):
    """Newton's method on linear equations with a matrix that is not theirs; returns the solution and its requests."""

    def found(rate, length, ground=False, matrix=None, log_s=0.0):
        x = OneRSBOverlaps(*(jnp.ones((1, 1, 1)) * a for a in (2.0, 1.0, 4.0, 0.0)), jnp.zeros((1, 1)))
        start, unpack = newton.coordinates(x, jnp.asarray(0.5))
        columns = np.array([2.0, 0.5, 4.0, 1.0, 1.0, 1.0])
        end = np.asarray(start) + np.array([0.0, 0.0, length * columns[2] / rate, 0.0, 0.0, log_s / rate])
        asked = []

        def look(self, x, s, with_slopes):
            asked.append(with_slopes)
            v, zero = np.asarray(newton.coordinates(x, s)[0]), np.asarray(0.0)
            numbers = np.eye(6), columns, columns, np.asarray(1.0), None, zero, zero, x
            return made.finished_path(newton.Look(v, rate * (end - v), *numbers))

        monkeypatch.setattr(newton.Problem, "look", look)
        monkeypatch.setattr(
            newton.Problem, "step_from", lambda self, x, s, move: unpack(newton.coordinates(x, s)[0] + move)
        )
        problem = _problem([0.0, 0.0])._replace(ground=ground)
        solution = run_one(newton.fixed_point(problem, x, jnp.asarray(0.5), matrix))
        assert solution.residual <= newton._TOL
        return solution, asked

    return found


@pytest.mark.parametrize(("length", "is_corrected"), [(0.019, False), (0.021, True), (0.029, True)])
def test_long_steps_correct_the_matrix(linear_search, length, is_corrected):
    """A step of more than two percent of a coordinate tells the matrix, here seven tenths of the one that was given."""
    solution, asked = linear_search(0.7, length)
    assert asked == [True] + [False] * (len(asked) - 1)
    assert (len(asked) == 3) == is_corrected
    np.testing.assert_allclose(solution.matrix[2, 2], 0.7 if is_corrected else 1.0, rtol=1e-9)


@pytest.mark.parametrize(("fall", "asked"), [(0.45, []), (0.6, [3, 4]), (0.7, [3, 4, 5])])
def test_the_matrix_is_computed_anew_where_residuals_fall_slowly(linear_search, fall, asked):
    """A step asks for it if it leaves more than half of the residual, and .003. The first two never do."""
    _, flags = linear_search(1 - fall, 0.015)
    assert [k for k, flag in enumerate(flags) if flag] == [0, *asked]


def test_s_moves_at_once_with_the_matrix_of_another_replicate(linear_search):
    """Without it, s stays where it is in the first step. A given s stays anyway."""
    cases = (
        (True, None, [True, False], 0.0),
        (True, np.eye(6), [False, False], 0.03),
        (False, np.eye(6), [False] * 2, 0.0),
    )
    for ground, matrix, asked, moved in cases:
        solution, flags = linear_search(1.0, 0.01, ground, matrix, 0.03)
        assert flags == asked
        np.testing.assert_allclose(solution.look.v[-1], np.log(0.5) + moved, rtol=1e-9)


def test_steepness_is_relative_to_the_elevation():
    """An elevation below a hundred-thousandth of the loss says nothing. The residual contains the steepness."""
    problem, look = _problem([1.0, 1.0]), _look(np.zeros(3))
    for loss, expected in ((0.6, 0.2), (0.4, -0.2), (0.5, 4000.0), (0.5 + 0.8e-5, 0.02 / 0.8e-5)):
        sign = np.sign(expected)
        steepness = problem.steepness(look._replace(loss=loss, loss_by_log_s=sign * 0.02))
        np.testing.assert_allclose(steepness, expected, rtol=1e-3)


@pytest.mark.parametrize(("steepness", "residual"), [(0.05, 5e-4), (-0.05, 5e-4), (0.12, 1.44e-3), (-0.5, 0.025)])
def test_the_residual_of_s_is_its_steepness(monkeypatch, steepness, residual):
    """It is a hundredth of the steepness, and above a tenth the square of it."""
    x = OneRSBOverlaps(*(jnp.ones((1, 1, 1)) * a for a in (2.0, 1.0, 1.0, 0.0)), jnp.zeros((1, 1)))

    def look(self, x, s, with_slopes):
        v = np.asarray(newton.coordinates(x, s)[0])
        numbers = (
            1e-6 + 0 * v,
            np.eye(len(v)),
            1 + 0 * v,
            1 + 0 * v,
            np.asarray(0.6),
            None,
            0.0,
            np.asarray(0.1 * steepness),
            x,
        )
        return made.finished_path(newton.Look(v, *numbers))

    monkeypatch.setattr(newton.Problem, "look", look)
    monkeypatch.setattr(newton.Problem, "step_from", lambda self, x, s, move: (x, s))
    result = run_one(newton.fixed_point(_problem([0.0, 0.0]), x, jnp.asarray(500.0), None))
    np.testing.assert_allclose(result.residual, residual, rtol=1e-9)


@pytest.mark.parametrize(("size", "cut"), [(15.0, 1 / 32), (20.0, 0.0)])
def test_a_step_is_halved_five_times_at_most(size, cut):
    ones = jnp.ones((2, 1, 1))
    x = OneRSBOverlaps(1.5 * ones, ones, ones, 0.1 * ones, jnp.ones((2, 1)))
    s = jnp.asarray(2.0)
    end = eqx.tree_at(lambda x: (x.q0, x.m), x, (x.q0 + size * ones, 3 * x.m))
    v = newton.coordinates(x, s)[0]
    move = np.asarray(newton.coordinates(end, s)[0] - v)
    new, _ = _problem([1.0, 0.0]).step_from(x, s, move)
    np.testing.assert_allclose(new.q0 - x.q0, cut * size * ones, rtol=1e-9)
    np.testing.assert_allclose(new.theta, x.theta, rtol=1e-12)
    np.testing.assert_array_equal(new.m, 0 * x.m if cut else x.m)  # held at zero by a step that is taken
