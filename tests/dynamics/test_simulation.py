"""Trajectories against reference numbers, and against stochastic gradient descent on sampled sentences."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from simulated import runs_of, setting

import tiedattn_jax as ta

START = 0.5, 0.15, 0.15


def test_the_end_point():
    """Reference values with 18 nodes per dimension and another integrator."""
    path = ta.sgd(ta.DotProduct(omega=0.3), START, 1.0, 60.0, kappa=0.005)
    ends = float(path.R[-1]), float(path.Theta[-1]), float(path.m[-1])
    np.testing.assert_allclose(ends, (0.242818, 0.208423, 0.095756), atol=1e-5)
    assert path.status_name == "time over" and path.ok and path.t.shape == (101,)
    assert float(jnp.max(path.replicates.step_error)) < 1e-7
    for name in ("R", "Theta", "m"):
        bar = path.reduced(path.stderr)[name][-1]
        assert 0 < bar < 1e-4, name
    np.testing.assert_allclose(path.q, 0.25 * path.R, rtol=1e-12)
    np.testing.assert_allclose(path.theta, 0.25 * path.Theta, rtol=1e-12)
    np.testing.assert_allclose(path.risk, path.gen_error + 0.0025 * path.R, rtol=1e-12)
    np.testing.assert_allclose([path.R[0], path.Theta[0], path.m[0]], START, rtol=1e-12)
    json.dumps(path.to_dict())


@pytest.mark.slow
def test_position_first_meaning_later():
    path = ta.sgd(ta.DotProduct(omega=0.1), (0.05, 0.003, 0.003), 1.0, 2400.0, kappa=0.005)
    plateau = np.asarray(path.m)[(path.t >= 160) & (path.t <= 720)]
    assert np.all((plateau > 0.245) & (plateau < 0.259))
    ends = float(path.R[-1]), float(path.Theta[-1]), float(path.m[-1])
    np.testing.assert_allclose(ends, (0.6697, 0.8181, 0.0), atol=1e-4)
    switch = path.crossing("theta overtakes m")
    assert switch.ok and 900 < float(switch.t) < 1200 and path.status_name == "steady state"
    assert "theta overtakes m" in str(path)


def agree(path, means, errors, every):
    theory = np.stack([path.R, path.Theta, path.m], 1)[every::every]
    deviations = (means - theory) / errors
    assert np.all(np.abs(deviations) < 3.5) and np.sqrt(np.mean(deviations**2)) < 1.8, deviations


@pytest.mark.parametrize("eigenvalues", [((0.25, 0.25),), ((0.1, 0.15), (0.5, 0.3))], ids=["one", "several"])
def test_sampled_sentences(eigenvalues):
    case = setting(240, eigenvalues, omega=0.3)
    means, errors = runs_of(case, START, 3.0, 0.005, 12.0, 4, runs=24)
    path = ta.sgd(case[0], START, 3.0, 12.0, kappa=0.005, points=9)
    agree(path, means, errors, 2)
    assert np.max(errors) < 0.02


@pytest.mark.slow
def test_sampled_sentences_of_five_hundred_dimensions():
    case = setting(500, omega=0.3)
    means, errors = runs_of(case, START, 1.0, 0.005, 57.0, 6, runs=16)
    agree(ta.sgd(case[0], START, 1.0, 57.0, kappa=0.005, points=61), means, errors, 10)
