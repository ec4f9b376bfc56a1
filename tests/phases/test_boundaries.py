"""Events along an axis as curves: slopes, interpolation, and where they intersect."""

import made
import numpy as np
import pytest

import tiedattn_jax as ta


def test_where_curves_meet():
    values = np.linspace(0.0, 1.0, 5)

    def curve(event, f, slope, values=values):
        ones = np.ones(len(values))
        return made.events(event, "omega", values, f(values) * ones, 0 * ones, slope(values) * ones)

    first = curve("a", lambda v: 1 + v**2, lambda v: 2 * v)
    second = curve("b", lambda v: 1.16 + 0 * v, lambda v: 0 * v, np.linspace(-0.1, 0.9, 4))

    def meets(a, b):
        return [(meeting.value, meeting.alpha) for meeting in a.intersections(b)]

    np.testing.assert_allclose(meets(first, second), [(0.4, 1.16)], rtol=1e-9)
    third = curve("b", lambda v: 0.96 + 0.5 * v, lambda v: 0.5 + 0 * v, np.linspace(-0.1, 0.9, 4))
    np.testing.assert_allclose(meets(first, third), [(0.1, 1.01), (0.4, 1.16)], rtol=1e-9)
    assert first.intersections(curve("c", lambda v: 3 + v, lambda v: 1 + 0 * v)) == []
    assert first.intersections(curve("d", lambda v: np.nan + v, lambda v: np.nan + v)) == []
    assert first.intersections(curve("e", lambda v: 1.16 + 0 * v, lambda v: 0 * v, np.linspace(2.0, 3.0, 4))) == []
    pair = (
        curve("alpha_c", first.interpolant, first.interpolant.derivative()),
        curve("semantic baseline", lambda v: 1.16 + 0 * v, lambda v: 0 * v),
    )
    (meeting,) = pair[0].intersections(pair[1])
    assert meeting.events == ("alpha_c", "semantic baseline") and "beats the linear baseline" in meeting.meaning
    np.testing.assert_allclose((meeting.value, meeting.alpha), (0.4, 1.16), rtol=1e-9)
    events = {m.events for m in third.intersections(first, *pair)}
    assert {("b", "a"), ("b", "alpha_c"), ("a", "semantic baseline")} <= events


@pytest.mark.parametrize("end", [2.0, 4.0])
def test_curves_that_share_two_knots_only(end):
    """Curves intersect within the range of both, also where this holds two points."""

    def line(event, values, alphas):
        return made.events(event, "omega", values, np.array(alphas), np.zeros(len(values)))

    flat, rising = line("a", [-1.0, 0.0, end, 6.0], [1.0] * 4), line("b", [0.0, end], [0.0, end])
    for first, second in ((flat, rising), (rising, flat)):
        (meeting,) = first.intersections(second)
        np.testing.assert_allclose((meeting.value, meeting.alpha), (1.0, 1.0), rtol=1e-12)
    high = line("d", [end, end + 2], [0.0, 2.0])
    np.testing.assert_allclose([m.value for m in flat.intersections(high)], [end + 1], rtol=1e-12)


def test_points_in_any_order_and_slopes_of_a_spline():
    values = np.array([1.0, 0.0, 0.5, 0.25])
    boundary = made.events("alpha_c", "omega", values, values**2, 0 * values)
    np.testing.assert_allclose(boundary.at, [0, 0.25, 0.5, 1])
    np.testing.assert_allclose(boundary.slope, 2 * boundary.at, atol=1e-12)
    np.testing.assert_array_equal(boundary.status, ta.Status.converged)
    assert boundary.plot().axes[0].get_xlabel().endswith(r"$\omega$")
    gap = made.events("alpha_c", "omega", values, np.where(values > 0.7, np.nan, values**2), 0 * values)
    np.testing.assert_array_equal(gap.status, [0, 0, 0, ta.Status.absent])
    np.testing.assert_allclose(gap.slope[:3], 2 * gap.at[:3], atol=1e-12)
    sloped = made.events("alpha_c", "omega", values, values, 0 * values, 3 + values)
    np.testing.assert_array_equal(sloped.slope, 3 + sloped.at)
    assert [float(cell.alpha) for cell in sloped.cells] == sloped.at.tolist()
    assert sloped.exact.all() and not boundary.exact.any() and not gap.exact.any()


def test_nothing_runs_over_a_gap():
    """The middle of five values is missing: slopes are those of either pair, and the curves do not intersect there."""
    values = np.arange(6.0)
    alpha = np.array([1.0, 3.0, np.nan, 3.0, 2.0, np.nan])
    gap = made.events("alpha_c", "omega", values, alpha, 0 * values)
    np.testing.assert_allclose(gap.slope, [2, 2, np.nan, -1, -1, np.nan])
    at = [0.5, 1.0, 1.5, 2.0, 2.9, 3.0, 3.5, 4.0, 4.5]
    np.testing.assert_allclose(gap.interpolant(at), [2, 3, *[np.nan] * 3, 3, 2.5, 2, np.nan])
    flat = made.events("semantic baseline", "omega", values, np.full(6, 2.5), 0 * values, 0 * values)
    assert [m.value for m in gap.intersections(flat)] == pytest.approx([0.75, 3.5])
    steep = made.events("semantic baseline", "omega", values, 10 * (values - 1.7), 0 * values, 10 + 0 * values)
    assert gap.intersections(steep) == []
    lone = made.events("alpha_c", "omega", values, np.where(values % 2, values, np.nan), 0 * values)
    assert np.isnan(lone.slope).all()
