"""How Newton's method names its end; what it finds is the subject of the other tests of the theory."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.overlaps import BRANCHES
from tiedattn_jax.theory.fixed_points import solve_from
from tiedattn_jax.theory.newton import Iterate, Problem
from tiedattn_jax.theory.state_evolution import deflated_solve, no_sums

FREE = jnp.array([1.0, 0.0])


@pytest.fixture(scope="module")
def problem(model, nodes):
    return Problem(model, jnp.array(2.0), nodes.replicate(0), FREE, ta.Settings(), no_sums)


def ended(problem, **found):
    values = {"best_residual": 1.0, "best_length": 1.0, "singular": False, "outside": False} | found
    blank, names = Iterate(*[jnp.zeros(())] * len(Iterate.__dataclass_fields__)), list(values)
    filled = eqx.tree_at(lambda s: [getattr(s, n) for n in names], blank, [jnp.asarray(values[n]) for n in names])
    return ta.Status(int(problem.ending(filled)))


def test_endings(problem):
    stall = 2 / 2**6.5  # of 2^13 nodes
    assert problem.stall == pytest.approx(stall)
    assert ended(problem, best_residual=0.99e-5) == ta.Status.converged
    assert ended(problem, best_residual=0.99 * stall, best_length=0.049) == ta.Status.stalled
    # Near a bifurcation the residual is small far from the solution.
    assert ended(problem, best_residual=0.99 * stall, best_length=0.051) == ta.Status.max_steps
    assert ended(problem, best_residual=1.01 * stall, best_length=0.01) == ta.Status.max_steps
    assert ended(problem, best_residual=jnp.inf, outside=True) == ta.Status.nonfinite
    assert ended(problem, singular=True, outside=True) == ta.Status.singular
    assert ended(problem, outside=True) == ta.Status.left_domain


def test_damped_steps_end_near_the_solution(problem):
    far = eqx.tree_at(lambda s: s.far, Iterate(*[jnp.zeros(())] * len(Iterate.__dataclass_fields__)), jnp.array(True))
    assert bool(far.damped)
    for cut, damped in ((0.21, False), (0.19, True)):
        near = eqx.tree_at(lambda s: (s.far, s.cut), far, (jnp.array(False), jnp.array(cut)))
        assert bool(near.damped) is damped


def test_the_start_does_not_matter(model, nodes):
    tight = ta.Settings(tol=1e-8)
    starts = state(CASES[0]), BRANCHES["semantic"].start(model)
    one, other = (solve_from(model, 2.0, "semantic", nodes, x, tight) for x in starts)
    assert int(one.status) == int(other.status) == ta.Status.converged
    np.testing.assert_allclose(one.overlaps.q, other.overlaps.q, rtol=1e-6)


def test_a_lane_that_failed_has_finite_derivatives():
    bad = jnp.full((2, 2), jnp.nan)
    np.testing.assert_array_equal(deflated_solve(bad, jnp.zeros((0, 2)), jnp.ones(2)), 1.0)
    gauge = jnp.array([[0.6, 0.8]])
    singular = jnp.eye(2) - gauge.T @ gauge
    np.testing.assert_allclose(deflated_solve(singular, gauge, jnp.array([0.8, -0.6])), [0.8, -0.6])
