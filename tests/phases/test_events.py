"""Events: the search for a zero, and sensitivities against central differences."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_L

import tiedattn_jax as ta
from tiedattn_jax.overlaps import BRANCHES, PAIR
from tiedattn_jax.phases.events import EVENTS, crossings, near_of
from tiedattn_jax.phases.secant import Secant, zero_between
from tiedattn_jax.phases.transitions import baseline_owner


def find(fn, alpha, exists=lambda a: True, **near):
    """The places that a search looks at, until its step is below 1e-9."""
    near = ta.Near(alpha, (), **near)
    s = Secant.begin(near.there, near.slope, near.low, near.high, jnp.float64)
    trial, places = jnp.asarray(alpha, float), []
    for _ in range(60):
        places.append(float(trial))
        if not exists(float(trial)):
            s = s.blocked(trial)
        else:
            s = s.learn(trial, jnp.asarray(fn(float(trial))))
            if abs(float(s.step)) < 1e-9:
                break
        trial = s.next()
    return float(s.alpha), places


@pytest.mark.parametrize(
    "near",
    [
        {"alpha": 1.0},
        {"alpha": 3.0},
        {"alpha": 1.0, "slope": 0.5},
        {"alpha": 1.0, "low": 0.1, "high": 4.0},
        {"alpha": 1.5, "slope": 2.0, "low": 1.4, "high": 1.6},
    ],
)
def test_a_rising_number(near):
    root, places = find(lambda a: a**3 - 1.55**3, **near)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert len(places) < 16 and all(near.get("low", 0) < a < near.get("high", np.inf) for a in places)


def test_a_falling_number():
    root, _ = find(lambda a: 1.55 - a, 1.2, slope=-0.7)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)


def test_the_bracket_shrinks_where_the_secant_would_leave_it():
    root, places = find(lambda a: np.arctan(50 * (a - 1.55)), 3.0, low=0.1, high=4.0)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert len(places) < 30


def test_beyond_the_end_of_a_branch():
    """States exist below 1.6 only; the search comes back from the places where there are none."""
    root, places = find(lambda a: a - 1.55, 1.8, lambda a: a < 1.6, low=1.5, high=2.0, there=1.5)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert places[0] == 1.8 and max(places[2:]) <= 1.7


def test_traced_in_a_bracket():
    @jax.jit
    def run(place):
        return zero_between(lambda a, k: (a**3 - place**3, k + 1), (jnp.array(0.1), jnp.array(4.0)), 0, 1e-9)

    root, looks, met = run(1.55)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert bool(met) and int(looks) < 16
    assert not bool(run(5.0)[2])  # beyond the bracket


@pytest.fixture(scope="module")
def curves(model, lines):
    return [ta.sweep(model, [1.1, 1.4, 1.6], branch, lines) for branch in PAIR]


def test_places_on_curves(curves, model, lines):
    (near,) = crossings(EVENTS["alpha_c"], curves)
    assert near.low == 1.1 and near.high == 1.4 and near.slope > 0
    np.testing.assert_allclose(near.alpha, ALPHA_C, atol=0.02)
    critical = ta.critical_alpha(model, lines, start=curves)
    assert abs(critical.alpha - ALPHA_C) <= 3 * critical.stderr and bool(critical.ok)
    crossing = ta.linear_crossing(model, critical, lines, start=curves)
    assert abs(crossing.alpha - ALPHA_L) <= 3 * crossing.stderr and crossing.event == "alpha_l"
    assert near_of(EVENTS["semantic instability"], curves) is None
    with pytest.raises(ta.InputError, match="start must enclose"):
        ta.locate(model, "semantic instability", lines, start=curves)
    with pytest.raises(ta.InputError, match="start must be one FixedPoint"):
        ta.locate(model, "alpha_c", lines, start=curves[0].points[:1])
    with pytest.raises(ta.InputError, match="event must be one of"):
        ta.locate(model, "alpha", lines, start=curves)


@pytest.mark.parametrize(("event", "alpha"), [("semantic instability", 0.8265), ("semantic pitchfork", 0.7192)])
def test_sensitivities_of_growth_events(model, lines, event, alpha):
    """Where the proximal operator jumps: implicit derivatives against central differences."""
    (branch,) = EVENTS[event].branches
    start = [ta.solve(model, 1.01 * alpha, branch, lines, start=BRANCHES["semantic"].start(model))]
    tight = ta.Settings(tol=1e-8, warm_steps=20)
    found = ta.locate(model, event, lines, start=start, settings=tight)
    assert bool(found.ok) and abs(found.alpha - alpha) < 1e-3
    at = []
    for step in (0.01, -0.01):
        moved = eqx.tree_at(lambda m: m.omega, model, model.omega + step)
        other = ta.locate(moved, event, lines, start=found.branches, settings=tight, sensitivities=False)
        at.append(float(other.alpha))
    np.testing.assert_allclose((at[0] - at[1]) / 0.02, found.sensitivities.omega, rtol=0.02)
    assert 0 < found.sensitivities_stderr.omega < 0.01


# Derivatives are those of many nodes, differences those of these: lines of order 5 leave 12 % at a fold.
@pytest.mark.parametrize(("order", "tol"), [(5, 0.15), pytest.param(7, 0.03, marks=pytest.mark.slow)])
def test_a_fold_and_its_sensitivities(order, tol):
    """The positional branch at omega = .235 turns back at alpha = 2.174(1)."""
    model = ta.dot_product(omega=0.235)
    rule = ta.line_nodes(model, order, replicates=1, even=True)
    x = ta.solve(model, 2.1, "positional", rule, start=START).overlaps
    near = ta.Near(2.1, (x,), low=2.05, high=2.3)
    found = ta.locate(model, "positional fold", rule, start=near)
    assert bool(found.ok) and abs(found.alpha - 2.174) < 0.03
    at = []
    for step in (1e-3, -1e-3):
        moved = ta.dot_product(omega=0.235 + step)
        at.append(float(ta.locate(moved, "positional fold", rule, start=near, sensitivities=False).alpha))
    np.testing.assert_allclose((at[0] - at[1]) / 2e-3, found.sensitivities.omega, rtol=tol)


START = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.04, 11.0, 0.0)), 0.21 * jnp.array([[1.0], [-1.0]]))


def test_no_fold_is_absent(model, lines, curves):
    rule = ta.Rule(jax.tree.map(lambda a: a[:1], lines.stack), lines.coarse)
    near = ta.Near(1.4, (curves[1].points[1].overlaps,), low=1.2, high=1.6)
    found = ta.locate(model, "semantic fold", rule, start=near)
    assert int(found.status) == ta.Status.absent and np.isnan(float(found.alpha))


@pytest.mark.parametrize(("early", "late", "owner"), [(0, 0, 2), (0, 1, 1), (1, 0, 0), (1, 1, 0)])
def test_which_state_beats_the_baseline_first(early, late, owner):
    assert int(baseline_owner(bool(early), bool(late))) == owner


def test_alpha_l_is_alpha_c_where_the_exchange_beats_the_baseline(model, lines):
    """At omega = .5 the semantic state is below the baseline already where it becomes global."""
    critical = ta.critical_alpha(model, lines, start=[ta.solve(model, 1.25, b, lines) for b in PAIR])
    states = list(critical.branches)
    better = eqx.tree_at(lambda s: s.replicates.gen_error, states[1], 0.5 * states[1].replicates.gen_error)
    known = eqx.tree_at(lambda t: t.branches, critical, (states[0], better))
    found = ta.linear_crossing(model, known, lines, start=[states[1]])
    np.testing.assert_array_equal(found.alpha, critical.alpha)
    np.testing.assert_array_equal(found.sensitivities.omega, critical.sensitivities.omega)
