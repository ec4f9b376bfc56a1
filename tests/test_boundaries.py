from types import SimpleNamespace

import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_C_SENSITIVITIES, ALPHA_L

import tiedattn_jax as ta
from tiedattn_jax.boundaries import _first

OMEGAS = [0.3, 0.33, 0.36]


@pytest.fixture(scope="module")
def trace(model, lines):
    def go(name, guess, values=OMEGAS):
        return ta.trace_boundary(model, name, "omega", values, lines, guess=guess)

    return go


@pytest.fixture(scope="module")
def critical(trace):
    return trace("alpha_c", 1.25)


def test_alpha_c(critical):
    assert abs(critical.alpha[0] - ALPHA_C) < 3 * critical.stderr[0]
    np.testing.assert_allclose(critical.slope[0], ALPHA_C_SENSITIVITIES["omega"], rtol=1e-2)
    # The slopes are those of the curve on the same nodes: Hermite against Simpson.
    rise = 0.06 / 6 * (critical.slope[0] + 4 * critical.slope[1] + critical.slope[2])
    np.testing.assert_allclose(critical.alpha[2] - critical.alpha[0], rise, rtol=2e-3)
    np.testing.assert_allclose(critical.curve(0.33), critical.alpha[1])


@pytest.mark.parametrize(
    ("name", "guess", "alpha", "tolerance"),
    [
        ("semantic baseline", 1.5, ALPHA_L, 0.0),
        ("semantic end", 0.72, 0.716, 0.005),
    ],
)
def test_the_others(trace, critical, name, guess, alpha, tolerance):
    found = trace(name, guess, OMEGAS[:2])
    assert abs(found.alpha[0] - alpha) < 3 * found.stderr[0] + tolerance
    assert np.all(found.stderr < 0.05)
    assert found.meets(critical) == []


def test_an_entry_of_the_mixing(model, lines):
    values = [0.38, 0.4, 0.42]
    found = ta.trace_boundary(model, "alpha_c", "mixing[0,1]", values, lines, guess=1.25)
    assert abs(found.alpha[1] - ALPHA_C) < 3 * found.stderr[1]
    rise = 0.04 / 6 * (found.slope[0] + 4 * found.slope[1] + found.slope[2])
    np.testing.assert_allclose(found.alpha[2] - found.alpha[0], rise, rtol=1e-2)


def test_where_curves_meet():
    values = np.linspace(0.0, 1.0, 5)

    def curve(name, f, slope):
        one = np.ones(5)
        return ta.Boundary(name, "omega", values, f(values), 0 * one, slope(values), 0 * one)

    first = curve("a", lambda v: 1 + v**2, lambda v: 2 * v)
    second = curve("b", lambda v: 1.16 + 0 * v, lambda v: 0 * v)
    np.testing.assert_allclose(first.meets(second), [(0.4, 1.16)], rtol=1e-9)
    assert first.meets(curve("c", lambda v: 3 + v, lambda v: 1 + 0 * v)) == []
    assert first.meets(curve("d", lambda v: np.nan + v, lambda v: np.nan + v)) == []
    named = (
        curve("alpha_c", first.curve, first.curve.derivative()),
        curve("semantic baseline", second.curve, lambda v: 0 * v),
    )
    (meeting,) = ta.meetings(named)
    assert meeting.names == ("alpha_c", "semantic baseline") and "beats the linear baseline" in meeting.meaning
    np.testing.assert_allclose((meeting.value, meeting.alpha), (0.4, 1.16), rtol=1e-9)


def test_between_the_last_state_and_the_next_alpha():
    """A crossing that no neighbours in the list enclose, because the branch ends at 1.6; and none at all."""

    def evaluate(alpha, xs):
        status = ta.Status.converged if alpha < 1.6 else ta.Status.absent
        return (SimpleNamespace(status=np.array([status]), residual=np.zeros(1), overlaps=np.array([alpha])),)

    def crossing(place):
        return _first(evaluate, lambda s: s.overlaps - place, (np.zeros(1),), np.array([3.0, 2.0, 1.5, 1.2]))

    alpha, (x,) = crossing(1.55)
    np.testing.assert_allclose((alpha, x[0]), 1.55)
    with pytest.raises(ValueError, match="values must begin where"):
        crossing(1.7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alpha", "omega", OMEGAS), "name must be one of"),
        (("alpha_c", "mixing", OMEGAS), "parameter must name"),
        (("alpha_c", "mixing[0,2]", OMEGAS), "parameter must name"),
        (("alpha_c", "omega", [0.3, 0.3]), "values must be"),
        (("alpha_c", "omega", [0.3, np.inf]), "values must be"),
        (("alpha_c", "omega", []), "values must be"),
    ],
)
def test_bad_input(model, lines, arguments, message):
    with pytest.raises(ValueError, match=message):
        ta.trace_boundary(model, *arguments, lines)
