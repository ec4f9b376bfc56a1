"""Fluctuations of students without overlaps, against reference numbers and sampled sentences."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated import descend, setting

import tiedattn_jax as ta

SETTING = {"R": 0.5, "eta": 2.0, "until": 40.0, "kappa": 0.005, "points": 41, "steps": 2}


@pytest.fixture(scope="module")
def path():
    return ta.dynamics.emergence(ta.DotProduct(omega=0.3), orthogonal=True, **SETTING)


def test_reference_variances(path):
    """Variances in another program, with 18 nodes per dimension, at t = 10, 20, 30 and 40."""
    np.testing.assert_allclose(path.mean.encodings[10::10], [0.00897, 0.01666, 0.03303, 0.07559], rtol=0.005)
    np.testing.assert_allclose(path.mean.teacher[10::10], [0.00395, 0.00897, 0.01625, 0.02743], rtol=0.005)
    assert path.first == "encodings" and path.ok and path.t.shape == (41,)
    assert 0 < path.stderr.encodings[-1] < 1e-3 * path.mean.encodings[-1]
    assert "fastest growth along the encodings: converged" in str(path)
    json.dumps(path.to_dict())
    for row in str(path).splitlines()[1:6]:  # numbers at the end
        name, text, *_ = row.split()
        curve = path.mean.R[:, 0, 0] if name == "size" else getattr(path.mean, name)
        assert float(text.split("(")[0]) == pytest.approx(float(curve[-1]), rel=0.01), name


@pytest.mark.parametrize(
    ("omega", "kappa", "R", "rates"),
    [(0.1, 0.0, 0.255383, (0.007635, 0.016853)), (0.3, 0.005, 0.119906, (0.043735, 0.013305))],
)
def test_reference_rates(omega, kappa, R, rates):
    """Growth rates over eta on the stationary size; from 0.1 to 0.3 the encodings overtake the teacher."""
    path = ta.dynamics.emergence(ta.DotProduct(omega=omega), R, 1e-3, 1e-3, kappa=kappa, points=2, steps=1)
    measured = path.mean.growth_encodings[0], path.mean.growth_teacher[0]
    np.testing.assert_allclose(np.array(measured) / 1e-3, rates, rtol=1e-3)
    assert path.first == ("encodings" if rates[0] > rates[1] else "teacher")
    np.testing.assert_allclose(path.mean.R[:, 0, 0], R, rtol=1e-5)  # the reference R is stationary


@pytest.mark.full
def test_directions_that_do_not_exist_do_not_grow():
    """Under `jit` the rank of the encodings is not known: p and -p then have a second direction, which is empty."""

    def path(p):
        return ta.dynamics.emergence(ta.DotProduct(encodings=p), 0.12, 1e-3, 1e-3, kappa=0.005, points=2, steps=1).mean

    p = jnp.array([[0.6, 0.8], [-0.6, -0.8]])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), vars(jax.jit(path)(p)), vars(path(p)))


@pytest.mark.full
def test_variances_of_sampled_sentences(path):
    d, runs, every = 240, 200, 10
    model, Sigma, p, teacher, rest = setting(d, omega=0.3)
    arrays = (jnp.asarray(a) for a in (Sigma, p, teacher, np.sqrt(0.5) * rest))
    options = {"runs": runs, "steps": 20 * d, "every": every * d}
    samples = np.asarray(descend(model, *arrays, 2.0, 0.005, jax.random.key(1), **options))
    for column, name in ((2, "encodings"), (1, "teacher")):
        variances = d * np.mean(samples[:, :, column] ** 2, 1)
        predicted = np.asarray(getattr(path.mean, name))[10:21:10]
        assert np.all(np.abs(variances / predicted - 1) < 4 * np.sqrt(2 / runs)), (name, variances, predicted)


@pytest.mark.full
def test_times_of_emergence():
    """The time grows by log(d) over twice the rate, and its derivative is that of differences."""
    model = ta.DotProduct(omega=0.3)

    def path_at(eta):
        return ta.dynamics.emergence(model, 0.12, eta, 120.0, kappa=0.005, points=41, steps=2)

    path = path_at(1.0)
    small, large = (path.time("encodings", d) for d in (1e3, 1e4))
    growth = float(path.mean.growth_encodings[-1])
    np.testing.assert_allclose(large.t - small.t, np.log(10) / (2 * growth), rtol=0.03)
    assert small.ok and small.event == "encodings above 0.1 of tr R" and 10 < small.t < large.t < 120
    # A share of tr R, not of one, is reached there.
    variance, size = (np.interp(large.t, path.t, a) for a in (path.mean.encodings, path.mean.R[:, 0, 0]))
    np.testing.assert_allclose(variance / 1e4, 0.1 * size, rtol=0.05)
    assert path.time("teacher", 1e4).status_name == "absent"
    few = ta.dynamics.emergence(model, 0.12, 1.0, 120.0, kappa=0.005, points=3, steps=40)
    np.testing.assert_allclose(few.time("encodings", 1e3).t, small.t, rtol=1e-9)
    step = 1e-3
    difference = (path_at(1 + step).time("encodings", 1e3).t - path_at(1 - step).time("encodings", 1e3).t) / (2 * step)
    slope = jax.grad(lambda eta: path_at(eta).time("encodings", 1e3).t)(1.0)
    np.testing.assert_allclose(slope, difference, rtol=1e-3)


def test_a_random_start_has_fluctuations(path):
    random = ta.dynamics.emergence(ta.DotProduct(omega=0.3), **SETTING)
    np.testing.assert_allclose(random.mean.encodings[0], 0.5, rtol=1e-12)
    np.testing.assert_allclose(random.mean.R, path.mean.R, rtol=1e-12)
    # The teacher's fluctuations are still larger at the end, but those of the encodings grow faster.
    assert random.mean.teacher[-1] > random.mean.encodings[-1] and random.first == "encodings"
    # The linear equation adds what is left of the start to what the noise makes.
    gain = (random.mean.encodings - path.mean.encodings)[1:] / 0.5
    growth = np.asarray(path.mean.growth_encodings)
    exponent = np.cumsum((growth[1:] + growth[:-1]) / 2) * float(path.t[1])
    np.testing.assert_allclose(np.log(gain), 2 * exponent, atol=0.01)


def test_when_a_share_of_the_size_is_reached(path):
    """It is where the variance over d is this share of tr R, by default a tenth; the event has its name."""
    found = path.time("encodings", 1.0)
    variance, size = (np.interp(float(found.t), path.t, a) for a in (path.mean.encodings, path.mean.R[:, 0, 0]))
    assert found.ok and found.event == "encodings above 0.1 of tr R"
    np.testing.assert_allclose(variance, 0.1 * size, rtol=0.01)
    large = path.time("encodings", 10, share=0.999)
    assert large.event == "encodings above 0.999 of tr R" and large.status_name == "absent"


def test_rates_of_the_variances_are_derivatives_in_time(path):
    """They are differences of the values at three times, up to their third derivatives."""
    values, rates = path.replicates.fluctuations, jax.tree.map(lambda a: a[:, ::2], path.replicates.rate)
    for name in ("R", "encodings", "teacher"):
        a = np.asarray(getattr(values, name))
        middle = (a[:, 2:] - a[:, :-2]) / (2 * float(path.t[1]))
        np.testing.assert_allclose(np.asarray(getattr(rates, name))[:, 11:-1], middle[:, 10:], rtol=0.01, atol=1e-7)


@pytest.mark.full
def test_a_rotation_of_two_columns_changes_nothing():
    """Overlaps of a student of two columns, with a teacher of two, have the same squares after a rotation."""
    mixing, gram = [[0.6, 0.4], [0.35, 0.65]], np.array([[1.0, 0.3], [0.3, 0.6]])
    model = ta.DotProduct(omega=0.3, rank=2, teacher=gram, mixing=mixing, encodings=[[1.0, 0.0], [-0.8, 0.3]])
    nodes, rotation = ta.Sobol(2**9, replicates=1, block=2**9).rule(model), np.array([[0.6, 0.8], [-0.8, 0.6]])

    def path(R):
        return ta.dynamics.emergence(model, R, 1.0, 1.0, nodes=nodes, points=2, steps=1).mean

    R = np.array([[0.6, 0.1], [0.1, 0.4]])
    first, turned = path(R), path(rotation @ R @ rotation.T)
    np.testing.assert_allclose([first.encodings[0], first.teacher[0]], 2 * np.trace(R), rtol=1e-12)
    np.testing.assert_allclose(turned.R[-1], rotation @ first.R[-1] @ rotation.T, atol=5e-3)
    for name in ("encodings", "teacher", "growth_encodings", "growth_teacher"):
        np.testing.assert_allclose(getattr(turned, name), getattr(first, name), rtol=0.05, atol=2e-3, err_msg=name)


def test_steps_that_are_too_long_are_found_for_any_number_of_times():
    """One step to the end has nothing to compare with, and an odd number of steps says nothing of the last one."""
    model = ta.DotProduct()
    options = {"until": 60.0, "nodes": ta.GaussHermite(5, replicates=1)}
    for points, steps in ((2, None), (2, 1), (4, 1)):
        found = ta.dynamics.emergence(model, 1.0, 0.3, points=points, steps=steps, **options)
        exact = ta.dynamics.emergence(model, 1.0, 0.3, points=33, steps=64, **options)
        error = abs(found.mean.encodings[-1] / exact.mean.encodings[-1] - 1)
        assert error < 2e-3 or not found.ok, (points, steps, float(error))
