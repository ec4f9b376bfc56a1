"""Events: the search for a zero, and sensitivities against central differences."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_L

import tiedattn_jax as ta
from tiedattn_jax.overlaps import BRANCHES, PAIR
from tiedattn_jax.phases import boundaries, events as how, transitions
from tiedattn_jax.phases.events import EVENTS, Zero, crossings, near_of, number_of, transition_of, zero_near
from tiedattn_jax.phases.secant import Secant, zero_between
from tiedattn_jax.phases.transitions import baseline_owner
from tiedattn_jax.results import error_bar


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
    root, _ = find(lambda a: a - 1.55, 1.2, lambda a: a > 1.5, low=1.0, high=1.6, there=1.6)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)


def test_steps_without_a_bracket_are_short():
    _, places = find(lambda a: np.arctan(a - 1.55), 3.0, slope=0.1)
    assert max(abs(np.diff(places)) / places[:-1]) < 0.2 + 1e-9


def test_traced_in_a_bracket():
    @jax.jit
    def run(place):
        return zero_between(lambda a, k: (a**3 - place**3, k + 1), (jnp.array(0.1), jnp.array(4.0)), 0, 1e-9)

    root, looks, met = run(1.55)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert bool(met) and int(looks) < 16
    assert not bool(run(5.0)[2]) and not bool(run(0.05)[2])  # beyond the bracket


def state_with(alpha=1.0, theta=1.0, m=1.0, loss=0.0, error=0.0, linear=0.0, there=(True, True, True)):
    """What events look at in a state."""
    three = jnp.ones(3)
    return SimpleNamespace(
        overlaps=ta.Overlaps(*(alpha * jnp.ones((3, 2, 1, 1)),) * 3, alpha * jnp.ones((3, 2, 1))),
        diagnostics=SimpleNamespace(growth_theta=theta * three, growth_m=m * three),
        train_loss=loss * three,
        gen_error=error * three,
        gen_error_linear=linear * three,
        has_state=jnp.array(there),
        status=jnp.array([0, 2, 0]),
    )


def test_the_number_of_every_event():
    state = state_with(theta=1.2, m=0.7, error=0.3, linear=0.4)
    numbers = {
        "semantic baseline": 0.1,
        "positional baseline": 0.1,
        "semantic instability": 0.3,  # stable, as is above it
        "positional instability": 0.2,
        "semantic pitchfork": 0.2,
        "positional pitchfork": -0.3,
    }
    for name, number in numbers.items():
        np.testing.assert_allclose(EVENTS[name].value(state), number)
    np.testing.assert_allclose(EVENTS["alpha_c"].value(state_with(loss=0.5), state_with(loss=0.2)), 0.3)
    assert EVENTS["alpha_c"].branches == ("positional", "semantic")
    looked_at = {name: event.branches for name, event in EVENTS.items() if len(event.branches) == 1}
    for name, (branch,) in looked_at.items():
        assert branch == ("uninformed" if "pitchfork" in name else name.split()[0])


def test_what_most_replicates_lack_has_no_number():
    for there, expected in (((True, True, False), 0.1), ((True, False, False), np.nan)):
        points = [SimpleNamespace(replicates=state_with(error=0.3, linear=0.4, there=there))]
        np.testing.assert_allclose(number_of(EVENTS["semantic baseline"], points), expected)


def test_roots_and_sensitivities_of_the_replicates():
    """Each replicate's zero is one Newton step away from the place that they share."""
    event = EVENTS["alpha_c"]
    good = SimpleNamespace(status=jnp.zeros(3, int), has_state=jnp.ones(3, bool))
    value, by_alpha = jnp.array([0.1, 0.3, 0.2]), jnp.array([2.0, 2.0, 4.0])
    zero = Zero(jnp.array(1.0), (state_with(), good), value, None, by_alpha, slope=2.0, met=jnp.array(True))
    found = transition_of(event, ta.dot_product(), zero)
    roots = 1 - value / 2
    np.testing.assert_allclose((found.alpha, found.stderr), (roots.mean(), error_bar(roots)))
    assert int(found.status) == 2 and found.sensitivities is None and found.event == event.name
    lost = transition_of(event, ta.dot_product(), zero._replace(met=jnp.array(False)))
    assert int(lost.status) == ta.Status.absent and float(lost.alpha) == 1.0
    failed = SimpleNamespace(status=jnp.full(3, ta.Status.unresolved), has_state=jnp.zeros(3, bool))
    unknown = transition_of(event, ta.dot_product(), zero._replace(states=(state_with(), failed), met=False))
    assert int(unknown.status) == ta.Status.unresolved and jnp.isnan(unknown.alpha)
    gone = SimpleNamespace(status=jnp.full(3, ta.Status.absent), has_state=jnp.zeros(3, bool))
    for pair in ((gone, state_with()), (gone, gone)):
        assert transition_of(event, ta.dot_product(), zero._replace(states=pair, met=False)).status == ta.Status.absent
    exact = transition_of(event, ta.dot_product(), zero._replace(by_model={"sigma": jnp.array([4.0, 6.0, 8.0])}))
    np.testing.assert_allclose(exact.alpha, np.mean([0.95, 0.85, 0.95]))
    np.testing.assert_allclose(exact.sensitivities["sigma"], np.mean([-2.0, -3.0, -2.0]))
    np.testing.assert_allclose(exact.sensitivities_stderr["sigma"], error_bar(jnp.array([-2.0, -3.0, -2.0])))


def searched(monkeypatch, number, alpha, exists=lambda a: True, **near):
    """`zero_near` of a number of alpha, with states that cost nothing, and the places that it looks at."""
    places = []

    def solve(model, alpha, nodes, x, free, settings):
        assert settings == "tight" and nodes.replicates == 3
        places.append(float(alpha))
        there = exists(float(alpha))
        return state_with(float(alpha), linear=number(float(alpha)), there=(there,) * 3)

    monkeypatch.setattr(how, "solve_replicates", solve)
    here, model = ta.Near(alpha, (state_with().overlaps,), **near), ta.dot_product()
    rule = SimpleNamespace(replicates=3)
    return zero_near(EVENTS["semantic baseline"], model, here, rule, "tight", exact=False, tol=1e-5), places


def test_a_zero_of_states(monkeypatch):
    zero, places = searched(monkeypatch, lambda a: a**3 - 1.55**3, 1.4)
    np.testing.assert_allclose(zero.alpha, 1.55, rtol=1e-4)
    assert bool(zero.met) and len(places) < 9
    np.testing.assert_allclose(zero.states[0].overlaps.q, zero.alpha)
    zero, places = searched(monkeypatch, lambda a: 1.0 + a, 1.4)
    assert not bool(zero.met) and len(places) == 12
    zero, places = searched(monkeypatch, lambda a: a - 1.55, 1.4, lambda a: False)
    assert zero.met is False and len(places) == 1
    zero, _ = searched(monkeypatch, lambda a: a - 1.55, 1.7, lambda a: a < 1.6, low=1.5, high=2.0, there=1.5)
    np.testing.assert_allclose(zero.alpha, 1.55, rtol=1e-4)


def curve_with(numbers, branch="semantic", name="error"):
    """A curve with test errors or losses at alpha = 1, 2, ...; states only where they are finite."""

    def point(alpha, number):
        there = bool(np.isfinite(number))
        state = state_with(alpha, **{name: number}, there=(there,) * 3)
        return SimpleNamespace(alpha=jnp.array(alpha), ok=there, replicates=state)

    return ta.Curve(branch, tuple(point(1.0 + k, n) for k, n in enumerate(numbers)))


def test_the_first_place_on_a_curve_within_limits():
    event, curve = EVENTS["semantic baseline"], curve_with([1.0, -3.0, -1.0, 1.0, np.nan, -1.0])
    first = near_of(event, [curve])
    np.testing.assert_allclose((first.alpha, first.slope, first.low, first.high), (1.25, 4.0, 1.0, 2.0))
    np.testing.assert_allclose(first.overlaps[0].q, 1.25)
    second = near_of(event, curve, 2.0, 5.0)
    np.testing.assert_allclose((second.alpha, second.there), (3.5, 4.0))
    third = near_of(event, curve, 4.0)  # between points that are no neighbours: the state between them is left out
    np.testing.assert_allclose((third.alpha, third.low, third.high), (5.0, 4.0, 6.0))
    assert near_of(event, curve, 5.5) is None


def test_where_alpha_c_is_looked_for(monkeypatch, model, lines):
    """The first crossing of the curves in the range; if there is none, anywhere in the range."""
    seen = []

    def stop(*arguments, **_):
        seen.append(arguments[2])
        raise InterruptedError

    monkeypatch.setattr(transitions, "zero_near", stop)
    monkeypatch.setattr(transitions, "_coarse_alpha_c", stop)
    curves = [curve_with(n, b, "loss") for b, n in (("semantic", [0.0] * 4), ("positional", [-1.0, 1.0, -1.0, -1.0]))]
    for bracket, expected in (((0.1, 4.0), 1.5), ((2.0, 4.0), 2.5), ((2.7, 4.0), (2.7, 4.0))):
        with pytest.raises(InterruptedError):
            ta.critical_alpha(model, lines, start=curves, bracket=bracket)
        np.testing.assert_allclose(getattr(seen[-1], "alpha", seen[-1]), expected)


def test_alpha_c_between_the_ends_of_branches(monkeypatch, model):
    """On coarse averages, where one branch exists only that one wins: here the semantic one from .8 on."""

    def coarsely(model, alpha, nodes, x0, free, settings):
        semantic = free[0] == 1
        loss = jnp.where(semantic, 2.25 - alpha, 1.0)
        there = ~(semantic & (alpha < 0.8))
        status = jnp.where(there, 0, int(ta.Status.absent))
        return SimpleNamespace(train_loss=loss, has_state=there, status=status, overlaps=x0)

    def stop(event, model, near, *_, **__):
        found.append(float(near.alpha))
        raise InterruptedError

    found = []
    monkeypatch.setattr(transitions, "solve_coarsely", coarsely)
    monkeypatch.setattr(transitions, "zero_near", stop)
    with pytest.raises(InterruptedError):
        ta.critical_alpha(model, ta.sobol_nodes(model, 64, replicates=3))
    np.testing.assert_allclose(found, 1.25, rtol=2e-3)


def test_where_alpha_l_is_looked_for(monkeypatch, model, lines, known):
    """On the positional branch below alpha_c where it beats the baseline there, on the semantic one above it else."""
    seen = []

    def stop(model, coarse, x0, free, ends, settings):
        seen.append((free.tolist(), float(x0.q[0, 0, 0]), *map(float, ends)))
        raise InterruptedError

    monkeypatch.setattr(transitions, "_coarse_alpha_l", stop)
    at = jnp.asarray(1.25)
    for baseline, expected in ((1.0, ([0.0, 1.0], 1.0, 0.1, 1.25)), (0.0, ([1.0, 0.0], 2.0, 1.25, 4.0))):
        branches = []
        for q, name in enumerate(PAIR, 1):
            new = q * jnp.ones_like(known.overlaps.q), baseline * jnp.ones(4)
            found = eqx.tree_at(lambda s: (s.overlaps.q, s.gen_error_linear), known, new)
            branches.append(ta.FixedPoint(model, at, found, name))
        critical = ta.Transition(at, at, None, None, jnp.array(0), tuple(branches), "alpha_c")
        with pytest.raises(InterruptedError):
            ta.linear_crossing(model, critical, lines)
        np.testing.assert_allclose(np.hstack(seen[-1]), np.hstack(expected))


def test_the_options_of_a_search_arrive(monkeypatch, model, lines):
    """Settings, limits and what is exact, in every function that looks for an event."""
    seen = []

    class Stop(Exception):
        pass

    def stop(event, model, near, nodes, settings, *, exact, tol=None, frees=None, looks=None):
        seen.append((event.name, float(near.alpha), nodes is lines, settings, exact))
        raise Stop

    tight, rough = ta.Settings(tol=1e-9), ta.Settings(tol=1e-3)
    near = ta.Near(1.3, (BRANCHES["semantic"].start(model),))
    pair = ta.Near(1.3, near.overlaps * 2)
    for module in (how, transitions, boundaries):
        monkeypatch.setattr(module, "zero_near", stop)
    for call, expected in (
        (lambda **k: ta.locate(model, "semantic baseline", lines, start=near, **k), True),
        (lambda **k: ta.locate(model, "semantic baseline", lines, start=near, sensitivities=False, **k), False),
        (lambda **k: ta.critical_alpha(model, lines, start=pair, **k), True),
        (lambda **k: ta.trace_boundary(model, "semantic baseline", "omega", [0.3], lines, start=near, **k), False),
        (lambda **k: ta.trace_boundary(model, "alpha_c", "omega", [0.3], lines, start=pair, **k), True),
    ):
        for settings in (tight, rough):
            with pytest.raises(Stop):
                call(settings=settings)
            assert seen[-1][1:3] == (1.3, True) and seen[-1][3] is settings and seen[-1][4] is expected
    with pytest.raises(Stop):
        ta.trace_boundary(model, "semantic baseline", "omega", [0.3], lines, start=near, sensitivities=True)
    assert seen[-1][4] is True and float(seen[-1][3].tol) == 1e-4


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
    with pytest.raises(ta.InputError, match="start must be a FixedPoint"):
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


def one_replicate(model, order):
    """The averages of test_arclength.py, for its programs."""
    return ta.line_nodes(model, order, replicates=1, even=True)


def test_a_fold_is_looked_for_on_both_sides(monkeypatch, model, lines):
    seen = []
    monkeypatch.setattr(how, "fold_near", lambda *arguments: seen.append(arguments))
    settings, x = ta.Settings(tol=1e-9), BRANCHES["semantic"].start(model)
    for limits, expected in (({}, (1.0, 3.0)), ({"low": 1.5, "high": 2.1}, (1.5, 2.1))):
        found = ta.locate(model, "semantic fold", lines, start=ta.Near(2.0, (x,), **limits), settings=settings)
        assert int(found.status) == ta.Status.absent and seen[-1][4] == expected and seen[-1][3] is settings
    np.testing.assert_array_equal(seen[-1][0].free, [1.0, 0.0])


# Derivatives are those of many nodes, differences those of these: lines of order 5 leave 12 % at a fold.
@pytest.mark.parametrize(("order", "tol"), [(5, 0.15), pytest.param(7, 0.03, marks=pytest.mark.slow)])
def test_a_fold_and_its_sensitivities(order, tol):
    """The positional branch at omega = .235 turns back at alpha = 2.174(1)."""
    model = ta.dot_product(omega=0.235)
    rule = one_replicate(model, order)
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


def test_no_fold_is_absent(model, curves):
    near = ta.Near(1.4, (curves[1].points[1].overlaps,), low=1.2, high=1.6)
    found = ta.locate(model, "semantic fold", one_replicate(model, 5), start=near)
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
    # Where no alpha_c was found, nobody knows which minimum is global.
    lost = eqx.tree_at(lambda t: t.status, critical, jnp.asarray(int(ta.Status.max_steps)))
    near = ta.Near(ALPHA_L, (states[1].replicates.overlaps,))
    assert int(ta.linear_crossing(model, lost, lines, start=near).status) == ta.Status.max_steps


@pytest.mark.slow
def test_without_alpha_c_a_traced_alpha_l_says_so(model, lines):
    states = [ta.solve(model, 1.25, b, lines) for b in PAIR]
    lost = ta.critical_alpha(model, lines, start=states)
    lost = eqx.tree_at(lambda t: t.status, lost, jnp.asarray(int(ta.Status.max_steps)))
    near = ta.Near(ALPHA_L, (states[1].replicates.overlaps,))
    found = eqx.filter_jit(ta.linear_crossing)(model, lost, lines, start=near)
    assert int(found.status) == ta.Status.max_steps and np.isfinite(found.alpha)
