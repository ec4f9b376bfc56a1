"""Runge-Kutta steps against closed forms, numbers of points and steps, starts, and directions of the encodings."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.dynamics import flow
from tiedattn_jax.dynamics.emergence import _Coefficients, _covariances


def exponential(x):
    """The exponential to fourth order, by which a step of the method multiplies."""
    return 1 + x + x**2 / 2 + x**3 / 6 + x**4 / 24


@pytest.mark.parametrize(("points", "steps"), [(2, 1), (4, 1), (3, 4)])
def test_steps_have_the_fourth_order(points, steps):
    """A growth is a power of the exponential to fourth order, and a cubic velocity has an exact integral."""
    until = 1.2
    path = flow.integrated(lambda s: (s[0], s[2] ** 3, 1.0), (1.0, 0.5, 0.0), jnp.asarray(until), points, steps)[0]
    times = np.linspace(0, until, points)
    factor = exponential(until / ((points - 1) * steps))
    np.testing.assert_allclose(path[0], factor ** (steps * np.arange(points)), rtol=1e-12)
    np.testing.assert_allclose(path[1], 0.5 + times**4 / 4, rtol=1e-12)
    np.testing.assert_allclose(path[2], times, atol=1e-12)


def test_covariances_are_integrated_to_fourth_order():
    """A decay is a power of the exponential, a cubic noise has an exact integral, and a matrix acts from both sides."""
    integrated = jax.jit(_covariances)

    def end(drift, noise, start, h):
        return np.asarray(integrated(_Coefficients(drift, noise), start, h))[1]

    h, zero = 0.4, np.zeros((3, 2, 2))
    decay = end(zero - 0.5 * np.eye(2), zero, np.eye(2), h)
    np.testing.assert_allclose(decay, exponential(-h) * np.eye(2), rtol=1e-12)
    noise = np.arange(3.0)[:, None, None] ** 3 * np.eye(2)
    np.testing.assert_allclose(end(zero, noise, np.ones((2, 2)), 2.0), 1 + 4 * np.eye(2), rtol=1e-12)
    turning = np.array([[[0.0, 1.0], [0.0, 0.0]]] * 3)  # W + h (A W + W A^T) + h^2 A W A^T exactly
    np.testing.assert_allclose(end(turning, zero, np.eye(2), h), [[1 + h**2, h], [h, 1]], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "start", "default"), [("sgd", (0.5, 0.1, 0.1), (101, 4)), ("emergence", 0.5, (51, 1))]
)
def test_numbers_of_points_and_steps_inside_a_trace(model, name, start, default):
    """They are those that are asked for, or the default."""
    nodes = ta.GaussHermite(2, replicates=1).rule(model)
    for options in ({}, {"points": 4}, {"steps": 8}):
        shapes = jax.eval_shape(partial(getattr(ta.dynamics, name), model, start, nodes=nodes, **options), 1.0, 3.0)
        points, steps = ({"points": default[0], "steps": default[1]} | options).values()
        steps *= 1 + (points - 1) * steps % 2  # an odd number of all steps is doubled
        assert shapes.t.shape == (points,) and shapes.replicates.every.R.shape[1] == (points - 1) * steps + 1


@pytest.mark.parametrize(
    ("encodings", "directions"),
    [
        ([[1.0, 0.0], [-1.0, 0.0]], 1),
        ([[1.0, 0.0], [-1.0, 1e-2]], 2),
        ([[1.0, 0.0], [-1.0, 1e-4]], 1),  # a square of 1e-6 of the largest counts
        ([[0.0, 0.0], [0.0, 0.0]], 1),
        ([[10.0, 0.0], [-10.0, 5e-3]], 1),
        ([[0.1, 0.0], [-0.1, 1e-3]], 2),
    ],
)
def test_directions_of_encodings(encodings, directions):
    model, traced = ta.DotProduct(encodings=encodings), []
    for same in (model, ta.DotProduct(spectrum=model.law())):
        assert flow.directions_of(same) == directions and flow.most_directions(same) == 2
    jax.eval_shape(lambda p: traced.append(flow.directions_of(ta.DotProduct(encodings=p))), np.array(encodings))
    assert traced == [None] and flow.most_directions(ta.DotProduct(encodings=np.ones((2, 1)))) == 1


def test_encodings_on_their_directions():
    """They have the inner products of the encodings, in the directions of the largest ones first to be kept."""
    p = np.random.default_rng(0).standard_normal((3, 2))
    tau, change = p @ p.T, p @ np.array([[0.3, 0.1], [0.1, -0.2]]) @ p.T
    on = jax.jit(flow.encodings_on_directions, static_argnums=1)
    P, slope = map(np.asarray, jax.jvp(lambda tau: on(tau, 2), (tau,), (change,)))
    np.testing.assert_allclose(P @ P.T, tau, atol=1e-12)
    np.testing.assert_allclose(slope @ P.T + P @ slope.T, change, atol=1e-12)
    three = np.asarray(on(tau, 3))
    np.testing.assert_allclose(three @ three.T, tau, atol=1e-12)
    np.testing.assert_array_equal(flow.is_direction(jnp.asarray(three)), [0, 1, 1])
    few = jnp.array([[1.0, 1e-2, 1e-4], [1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(flow.is_direction(few), [1, 1, 0])
    np.testing.assert_array_equal(flow.is_direction(20 * few), [1, 1, 0])


def test_inner_products_of_vectors_of_any_length():
    """The pseudo-inverse is that of the vectors of unit length; a vector of length zero is left out."""
    v = np.array([[1e-6, 0.0], [2e5, 1e5], [0.0, 0.0]])
    gram = jnp.asarray(v @ v.T)
    np.testing.assert_allclose(flow.lengths_of(gram), [1e-6, 5e10**0.5, 1.0])
    found = np.asarray(flow.inverse_gram(gram))
    lengths = np.array([1e-6, 5e10**0.5])
    product = found[:2, :2] @ np.asarray(gram)[:2, :2]
    np.testing.assert_allclose(product * lengths[:, None] / lengths, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(found[2], 0, atol=1e-12)


@pytest.mark.parametrize("change", [0.5e-6, 2e-6])
def test_starts_that_agree_up_to_rounding(change):
    """R may be as symmetric, and m as opposite, as one in a million."""
    model = ta.DotProduct(rank=2)
    R = np.array([[50.0, 1.0], [1.0 + 50 * change, 50.0]])
    m = 0.2 * np.array([[1.0, 0.1], [-1 + change, -0.1]])
    for start, text in (((R, 0.1, 0.1), "R symmetric"), ((50.0, 0.01, m), "overlaps that a student can have")):
        refused = pytest.raises(ta.InputError, match=f"start must have {text}")
        with refused if change > 1e-6 else nullcontext():
            flow.start_moments(model, start)


def test_starts_of_several_columns():
    """A number R is that of every column, Theta goes along the teacher's, and m has a column of its own."""
    model = ta.DotProduct(rank=2)
    s = flow.start_moments(model, (0.5, 0.2, 0.1))
    np.testing.assert_allclose(s.R[0], 0.5 * np.eye(2), atol=1e-12)
    np.testing.assert_allclose(s.Theta[0], [[0.2], [0.0]], atol=1e-12)
    np.testing.assert_allclose(s.M[0], [[0.0, 0.0], [0.1, -0.1]], atol=1e-12)
