"""The walk along a number on the coarse replicate, and where its splines expect the smallest error."""

import dataclasses

import jax
import made
import numpy as np
import pytest
from numpy.polynomial import Polynomial

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import COARSE
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.phases.best import prepared_task
from tiedattn_jax.phases.places import Walk, places_of, walk_path

BLANK = jax.tree.map(lambda a: np.asarray(np.asarray(a)[0]), made.states(ta.DotProduct()))


def walked(model, lines, has_state, bracket=(1e-5, 1.0), lam=0.01, status=0):
    """Walk the semantic branch; errors and losses are functions of the ridge. Return the walk and the lanes."""
    task = prepared_task(model, "semantic", lines, "lam", bracket, None)
    own = dataclasses.replace(model, lam=np.asarray(lam))
    family, lanes = task.at(own, np.asarray(1.5)).family, []

    def answer(lane):
        ridge = float(lane.model.lam)
        is_there = has_state(ridge)
        lanes.append((ridge, lane.attempts, float(lane.start.q[0, 0, 0])))
        assert lane.replicate == COARSE and float(lane.alpha) == 1.5 and lane.free.tolist() == [1.0, 0.0]
        numbers = {"gen_error": np.asarray(2 * ridge), "train_loss": np.asarray(3 * ridge)}
        x = ta.Overlaps(*(np.full((2, 1, 1), a) for a in (1 + ridge, 10.0, 0.1)), np.zeros((2, 1)))
        return dataclasses.replace(BLANK, overlaps=x, status=np.asarray(status if is_there else 6), **numbers)

    return made.answer_path(walk_path(family, bracket, "semantic"), answer), lanes


def test_a_walk_to_both_sides(model, lines):
    """It begins at the value that is nearest to the model's own, with three values in a factor of ten."""
    walk, lanes = walked(model, lines, lambda ridge: True)
    ridges = 10 ** np.linspace(-5, 0, 16)
    assert walk.branch == "semantic"
    np.testing.assert_allclose(walk.x, np.log(ridges), rtol=1e-12)
    np.testing.assert_allclose([walk.error, walk.loss], [2 * ridges, 3 * ridges], rtol=1e-12)
    np.testing.assert_allclose([x.q[0, 0, 0] for x in walk.overlaps], 1 + ridges, rtol=1e-12)
    visited = [ridge for ridge, *_ in lanes]
    np.testing.assert_allclose(visited, [*ridges[9:], *ridges[8::-1]], rtol=1e-9)
    assert [attempts for _, attempts, _ in lanes] == [3] + [1] * 15
    start = float(BRANCHES["semantic"].start(model).q[0, 0, 0])
    first, above, *_ = (q for *_, q in lanes)
    np.testing.assert_allclose([first, above], [start, 1 + ridges[9]], rtol=1e-9)
    # From the third value on, the start is on the secant through the two states before, in log(ridge).
    np.testing.assert_allclose(lanes[2][2], 1 + 2 * ridges[10] - ridges[9], rtol=1e-9)
    np.testing.assert_array_equal(walk.nearest(np.log(2.2e-3)).q, walk.overlaps[7].q)
    narrow, _ = walked(model, lines, lambda ridge: True, (0.01, 0.02))
    np.testing.assert_allclose(np.exp(narrow.x), np.geomspace(0.01, 0.02, 4), rtol=1e-12)


def test_a_walk_ends_at_the_first_value_without_a_state(model, lines):
    """A value without a state is tried from the last state and from the start of the branch; none follows."""
    walk, lanes = walked(model, lines, lambda ridge: 1e-4 < ridge < 0.3)
    ridges = 10 ** np.linspace(-5, 0, 16)
    is_there = (ridges > 1.01e-4) & (ridges < 0.3)
    assert np.isfinite(walk.error).tolist() == np.isfinite(walk.loss).tolist() == is_there.tolist()
    assert [x is not None for x in walk.overlaps] == is_there.tolist()
    failed = [(ridge, attempts) for ridge, attempts, _ in lanes if not 1.01e-4 < ridge < 0.3]
    np.testing.assert_allclose(failed, [(ridges[14], 1), (ridges[14], 3), (1e-4, 1), (1e-4, 3)], rtol=1e-9)
    np.testing.assert_array_equal(walk.nearest(0.0).q, walk.overlaps[13].q)


def test_a_walk_begins_where_there_is_a_state(model, lines):
    """Without a state at the model's own value every third value is tried, the nearest first."""
    ridges = 10 ** np.linspace(-5, 0, 16)
    order = np.argsort(np.abs(np.log(ridges) - np.log(0.012)))[::3]
    for end in (3e-3, 3e-4):
        walk, lanes = walked(model, lines, lambda ridge, end=end: ridge < end, lam=0.012)
        count = 1 + int(np.argmax(ridges[order] < end))
        tried = [ridge for ridge, attempts, _ in lanes if attempts == 3]
        assert count > 2
        np.testing.assert_allclose(tried[:count], ridges[order[:count]], rtol=1e-9)
        assert np.isfinite(walk.error).tolist() == (ridges < end).tolist()
    _, lanes = walked(model, lines, lambda ridge: True, (1e-3, 1.0), lam=1e-7)
    np.testing.assert_allclose(lanes[0][0], 1e-3)  # the model's own value lies below the range
    rough, lanes = walked(model, lines, lambda ridge: True, status=2)  # states that did not settle start no walk
    assert len(lanes) == 6 == np.isfinite(rough.error).sum()
    stalled, _ = walked(model, lines, lambda ridge: True, status=1)
    assert np.isfinite(stalled.error).all()


X = np.linspace(-9.0, 0.0, 10)


def walk(log_error, loss=None, known=slice(None), x=X):
    """A walk with a given logarithm of the error; a spline through it is exact for cubic functions."""
    error, losses = np.full((2, x.size), np.nan)
    error[known] = np.exp(log_error(x[known]))
    losses[known] = (loss or (lambda x: 0 * x))(x[known])
    return Walk("semantic", x, error, losses, [None] * x.size)


CUBIC = Polynomial.fromroots([-6.3, -6.3]) * Polynomial([0.5, 0.02])  # smallest at -6.3


def test_the_smallest_error_of_a_spline():
    (place,) = places_of([walk(CUBIC)])
    assert (place.kind, place.branch, place.low, place.high, place.crossings) == ("inside", 0, -9.0, 0.0, ())
    np.testing.assert_allclose(place.x, -6.3, atol=0.006)
    np.testing.assert_allclose(100 * place.x, np.round(100 * place.x), atol=1e-6)  # one of 100 points per unit
    slope, second = CUBIC.deriv()(place.x), CUBIC.deriv(2)(place.x)
    error = np.exp(CUBIC(place.x))
    np.testing.assert_allclose([place.error, place.curvature], [error, error * (second + slope**2)], rtol=1e-9)
    for slope, kind, x in ((0.5, "lower end", -9.0), (-0.5, "upper end", 0.0)):
        (end,) = places_of([walk(Polynomial([1.0, slope]))])
        assert (end.kind, end.x) == (kind, x)
        np.testing.assert_allclose(end.curvature, end.error * slope**2, rtol=1e-6)
        np.testing.assert_allclose(end.error, np.exp(1 + slope * x), rtol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_walk_of_few_states(count):
    """One state is an end. Two or three are joined by a natural spline, which is linear for a linear function."""
    line = Polynomial([0.5, -0.25])
    (place,) = places_of([walk(line, known=slice(3, 3 + count))])
    assert (place.low, place.high) == (X[3], X[2 + count])
    if count == 1:
        assert (place.kind, place.x) == ("lower end", X[3]) and np.isnan(place.curvature)
    else:
        assert (place.kind, place.x) == ("upper end", X[2 + count])
        np.testing.assert_allclose(place.curvature, place.error * 0.25**2, rtol=1e-9)
    np.testing.assert_allclose(place.error, np.exp(line(place.x)), rtol=1e-12)
    if count == 4:  # a spline through four points is a cubic function
        (cubic,) = places_of([walk(CUBIC, known=slice(1, 5))])
        slope, second = CUBIC.deriv()(cubic.x), CUBIC.deriv(2)(cubic.x)
        np.testing.assert_allclose(cubic.curvature, cubic.error * (second + slope**2), rtol=1e-9)
    bent = Polynomial.fromroots([-5.0, -5.0])  # the second derivative at the ends of a natural spline is zero
    if count == 3:
        (natural,) = places_of([walk(bent, known=slice(3, 6))])
        assert natural.kind == "inside" and natural.x == pytest.approx(-5.0)
        np.testing.assert_allclose(natural.curvature, 3.0, rtol=1e-9)


def test_where_the_global_minimum_changes():
    """Losses cross where the lines between their values do; where one of them is lacking, half-way between places."""
    first, second = walk(Polynomial([2.0, 0.1])), walk(Polynomial([0.0, -0.1]), lambda x: x + 3.25)
    low, high = sorted(places_of([first, second]), key=lambda place: place.low)
    assert (low.branch, high.branch) == (1, 0) and low.high == high.low == pytest.approx(-3.25)
    assert low.crossings == high.crossings == (low.high,)
    assert (low.kind, low.x) == ("transition", pytest.approx(-3.25)) and high.kind == "transition"
    assert [place.branch for place in places_of([first, second])] == [1, 0]  # the smaller error first
    cut = walk(Polynomial([0.0, -0.1]), lambda x: 0 * x - 1.0, known=slice(0, 4))
    low, high = sorted(places_of([first, cut]), key=lambda place: place.low)
    assert (low.branch, low.high, high.low) == (1, -5.5, -5.5)
    single = walk(Polynomial([0.0, -0.1]), lambda x: 0 * x - 1.0, known=slice(0, 1))
    low, high = sorted(places_of([first, single]), key=lambda place: place.low)
    assert (low.branch, low.high, high.low, low.crossings) == (1, -8.5, -8.5, (-8.5,))
    nothing = walk(CUBIC, known=slice(0, 0))
    assert places_of([nothing, nothing]) == []
    gap = walk(CUBIC, known=slice(0, 3))
    (alone,) = places_of([nothing, gap])  # where there is no state no branch takes over
    assert (alone.branch, alone.high, alone.crossings) == (1, X[2], ())
    parts = np.r_[0:4, 6:10]
    both = sorted(places_of([walk(CUBIC, known=parts)]), key=lambda place: place.low)
    assert [(place.low, place.high) for place in both] == [(X[0], X[3]), (X[6], X[9])]
    assert [place.kind for place in both] == ["inside", "lower end"]
