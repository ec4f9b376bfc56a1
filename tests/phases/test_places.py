"""The walk along a number, and where its splines expect the smallest error."""

import dataclasses

import numpy as np
import pytest
from numpy.polynomial import Polynomial
from toy import Toy

import tiedattn_jax as ta
from tiedattn_jax.phases.best import prepared_task
from tiedattn_jax.phases.places import Walk, places_of, walk_path

RIDGES = 10 ** np.linspace(-5, 0, 16)


@pytest.mark.parametrize(
    ("has_state", "lam", "known"),
    [
        (lambda ridge: True, 0.01, RIDGES > 0),
        (lambda ridge: 1.01e-4 < ridge < 0.3, 0.01, (RIDGES > 1.01e-4) & (RIDGES < 0.3)),
        (lambda ridge: not 0.2 < ridge < 0.3, 0.01, RIDGES < 0.2),  # nothing follows the first value without a state
        (lambda ridge: ridge < 3e-3, 0.012, RIDGES < 3e-3),  # there is none at the model's own value
        (lambda ridge: ridge < 3e-4, 0.012, RIDGES < 3e-4),
        (lambda ridge: True, 1e-7, RIDGES > 0),  # the model's own value lies below the range
    ],
)
def test_a_walk_along_the_ridge(model, rule, has_state, lam, known):
    """It begins at the model's own ridge, or near it where there is a state, and goes to both sides."""
    toy = Toy(
        {"semantic": lambda m, a: 3 * m.lam},
        {"semantic": lambda m, a: 2 * m.lam},
        theta={"semantic": lambda m, a: 0.1 + 0.01 * m.lam},
        where={"semantic": lambda m, a: has_state(float(m.lam))},
        status=int(ta.Status.absent),
    )
    task = prepared_task(model, "semantic", rule, "lam", (1e-5, 1.0), None)
    family = task.at(dataclasses.replace(model, lam=np.asarray(lam)), np.asarray(1.5)).family
    walk = toy.run(walk_path(family, (1e-5, 1.0), "semantic"))
    np.testing.assert_allclose(np.exp(walk.x), RIDGES, rtol=1e-12)
    expected = np.where(known, [2 * RIDGES, 3 * RIDGES], np.nan)
    np.testing.assert_allclose([walk.error, walk.loss], expected, rtol=1e-12)
    assert [x is not None for x in walk.overlaps] == known.tolist() and walk.branch == "semantic"
    np.testing.assert_allclose(walk.nearest(0.0).theta, 0.1 + 0.01 * RIDGES[known].max())


X = np.linspace(-9.0, 0.0, 10)


def walk(log_error, loss=lambda x: 0 * x, known=slice(None)):
    """A walk with a given logarithm of the error; a spline through it is exact for cubic functions."""
    error, losses = np.full((2, X.size), np.nan)
    error[known], losses[known] = np.exp(log_error(X[known])), loss(X[known])
    return Walk("semantic", X, error, losses, [None] * X.size)


def in_order(*walks):
    return sorted(places_of(walks), key=lambda place: place.low)


CUBIC = Polynomial.fromroots([-6.3, -6.3]) * Polynomial([0.5, 0.02])  # smallest at -6.3


def test_the_smallest_error_of_a_spline():
    (place,) = places_of([walk(CUBIC)])
    assert (place.kind, place.branch, place.low, place.high, place.crossings) == ("inside", 0, -9.0, 0.0, ())
    np.testing.assert_allclose(place.x, -6.3, atol=0.006)
    np.testing.assert_allclose(100 * place.x, np.round(100 * place.x), atol=1e-6)  # one of 100 points per unit
    slope, second, error = CUBIC.deriv()(place.x), CUBIC.deriv(2)(place.x), np.exp(CUBIC(place.x))
    np.testing.assert_allclose([place.error, place.curvature], [error, error * (second + slope**2)], rtol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("slope", [-0.25, 0.5])
def test_an_error_that_falls_towards_an_end(count, slope):
    """One state is an end. Two or three are joined by a natural spline, which is linear for a linear function."""
    line, first = Polynomial([0.5, slope]), 0 if count == 10 else 3
    (place,) = places_of([walk(line, known=slice(first, first + count))])
    low, high = X[first], X[first + count - 1]
    assert (place.low, place.high) == (low, high)
    kind, x = ("upper end", high) if slope < 0 and count > 1 else ("lower end", low)
    assert (place.kind, place.x) == (kind, x)
    curvature = place.error * slope**2 if count > 1 else np.nan
    np.testing.assert_allclose([place.error, place.curvature], [np.exp(line(x)), curvature], rtol=1e-6)


def test_splines_through_few_states():
    (cubic,) = places_of([walk(CUBIC, known=slice(1, 5))])  # one through four points is a cubic function
    slope, second = CUBIC.deriv()(cubic.x), CUBIC.deriv(2)(cubic.x)
    np.testing.assert_allclose(cubic.curvature, cubic.error * (second + slope**2), rtol=1e-9)
    (natural,) = places_of([walk(Polynomial.fromroots([-5.0, -5.0]), known=slice(3, 6))])
    assert natural.kind == "inside" and natural.x == pytest.approx(-5.0)
    np.testing.assert_allclose(natural.curvature, 3.0, rtol=1e-9)  # its second derivative is zero at the ends


def test_where_the_global_minimum_changes():
    """Losses cross where the lines between their values do; where one of them is lacking, half-way between places."""
    first, falling = walk(Polynomial([2.0, 0.1])), Polynomial([0.0, -0.1])
    second = walk(falling, lambda x: x + 3.25)
    low, high = in_order(first, second)
    assert (low.branch, high.branch) == (1, 0) and low.high == high.low == pytest.approx(-3.25)
    assert low.crossings == high.crossings == (low.high,)
    assert (low.kind, low.x) == ("transition", pytest.approx(-3.25)) and high.kind == "transition"
    assert [place.branch for place in places_of([first, second])] == [1, 0]  # the smaller error first
    for count, middle in ((4, -5.5), (1, -8.5)):
        low, high = in_order(first, walk(falling, lambda x: 0 * x - 1.0, known=slice(0, count)))
        assert (low.branch, low.high, high.low, low.crossings) == (1, middle, middle, (middle,))
    nothing = walk(CUBIC, known=slice(0, 0))
    assert places_of([nothing, nothing]) == []
    (alone,) = places_of([nothing, walk(CUBIC, known=slice(0, 3))])  # no branch takes over where there is no state
    assert (alone.branch, alone.high, alone.crossings) == (1, X[2], ())
    both = in_order(walk(CUBIC, known=np.r_[0:4, 6:10]))
    assert [(place.low, place.high, place.kind) for place in both] == [
        (X[0], X[3], "inside"),
        (X[6], X[9], "lower end"),
    ]
