"""Newton's method of 1RSB: single steps, their matrix, and searches on equations in closed form."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status
from tiedattn_jax.rsb import newton
from tiedattn_jax.rsb.potentials import OneRSBOverlaps


@pytest.mark.parametrize(
    ("moved", "size", "cut"),
    [("q0", 0.7, 0.5), ("V", -3.0, 0.25), ("q1", -0.7, 0.5), ("theta", 0.6, 0.5), ("q0", 1e3, 0)],
)
def test_a_step_is_halved_until_it_lies_in_the_domain(moved, size, cut):
    """The domain is q1 > q0 > theta rho^{-1} theta^T and V > 0. A step that never gets there is not taken."""
    ones, s = np.ones((2, 1, 1)), jnp.asarray(2.0)
    x = OneRSBOverlaps(*map(jnp.asarray, (1.5 * ones, ones, ones, 0.1 * ones, ones[..., 0])))
    end = eqx.tree_at(lambda x: getattr(x, moved), x, getattr(x, moved) + size * ones)
    v, move = (np.asarray(newton.coordinates(a, s)[0]) for a in (x, end))
    move = move - v
    free, held = (
        newton.Equations1RSB(ta.DotProduct(), None, None, jnp.asarray(free), True, None).step_from(x, s, move)
        for free in ((1.0, 1.0), (0.0, 0.0))
    )
    np.testing.assert_allclose(newton.coordinates(*free)[0], v + cut * move, rtol=1e-12)
    assert cut == 0 or not (np.any(held[0].theta) or np.any(held[0].m))  # a branch holds them at zero


def test_corrected_matrix_knows_the_last_move():
    """It maps the last move to the change that was seen; moves across it, in units of the coordinates, as before."""
    matrix, sizes = np.arange(9.0).reshape(3, 3), np.array([1.0, 10.0, 0.1])
    move, change = np.array([0.5, 2.0, 0.03]), np.array([1.0, -1.0, 2.0])
    corrected = newton.corrected_matrix(matrix, move, change, sizes)
    np.testing.assert_allclose(corrected @ move, change, rtol=1e-12)
    across = sizes * np.cross(move / sizes, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(corrected @ across, matrix @ across, rtol=1e-9)
    np.testing.assert_array_equal(newton.corrected_matrix(matrix, 0 * move, change, sizes), matrix)


def _solved(valley, ground=True, start=-1.5, matrix=None):
    """Search from clusters that are too wide, and from this log s, relative to its root."""
    s = jnp.asarray(valley.s * np.exp(start))
    return valley.run(newton.fixed_point(valley.problem(ground=ground), valley.state(0.1), s, matrix))


@pytest.mark.parametrize("start", [-1.5, 1.5])
def test_a_ground_state_has_the_largest_loss_in_s(valley, start):
    """Its search starts where the loss is convex in log s."""
    known = valley()
    solution, (x, v) = _solved(known, start=start), known.root(0)
    np.testing.assert_allclose(solution.look.v, v, atol=2e-3)  # a steepness of a hundredth counts as none
    np.testing.assert_allclose(solution.x.q0, x.q0, rtol=1e-4)
    assert solution.status == Status.converged and len(known.looks) < 12
    held = _solved(known, False, start)
    np.testing.assert_allclose(held.s, known.s * np.exp(start), rtol=1e-12)
    np.testing.assert_allclose(held.look.v[:-1], v[:-1], rtol=1e-4)


@pytest.mark.parametrize(("factor", "again"), [(1.2, False), (4.0, True)])
def test_a_matrix_that_is_not_that_of_the_equations(valley, factor, again):
    """Broyden's formula corrects it; where steps leave most of the residual, derivatives are computed anew."""
    known = valley()
    solution = _solved(known, False, 0.0, factor * np.eye(11))
    np.testing.assert_allclose(solution.look.v, known.root(0)[1], rtol=1e-3)
    assert solution.status == Status.converged and not known.looks[0] and any(known.looks) == again


def test_a_search_without_a_root_ends(valley):
    """It returns the place of smallest residual, or nothing where no residual is finite."""
    astray = _solved(valley(basin={0: -1.0}), start=0.0)
    assert astray.residual == pytest.approx(0.2) and astray.status == Status.max_steps
    assert _solved(valley(), start=np.nan) is None
    for residual, status in ((1e-4, Status.converged), (3e-3, Status.stalled), (4e-3, Status.max_steps)):
        assert newton.Solution(None, None, None, None, residual, None).status == status
