"""Events: the search for a zero, and sensitivities against central differences."""

from functools import partial
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_L

import tiedattn_jax as ta
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.model.overlaps import BRANCHES, PAIR
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases import locate, transitions
from tiedattn_jax.phases.events import EVENTS, as_event, baseline_branch, rs_shift
from tiedattn_jax.phases.locate import (
    Family,
    Guess,
    Zero,
    crossings,
    event_number,
    event_path,
    find_zero,
    guess_of,
    number_of,
    transition_of,
    zero_path,
)
from tiedattn_jax.phases.secant import Secant, zero_between
from tiedattn_jax.phases.table import Table
from tiedattn_jax.phases.transitions import transition_path
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.paths import Call
from tiedattn_jax.theory.solve import Problem


def find(fn, alpha, exists=lambda a: True, **guess):
    """Search until the step is below 1e-9; return the last place and all places visited."""
    guess = Guess(alpha, (), **guess)
    s = Secant.begin(guess.there, guess.slope, guess.low, guess.high)
    trial, places = float(alpha), []
    for _ in range(60):
        places.append(trial)
        if not exists(trial):
            s = s.shrunk(trial)
        else:
            s = s.updated(trial, float(fn(trial)))
            if abs(s.step) < 1e-9:
                break
        trial = s.next()
    return s.x, places


@pytest.mark.parametrize(
    "guess",
    [
        {"alpha": 1.0},
        {"alpha": 3.0},
        {"alpha": 1.0, "slope": 0.5},
        {"alpha": 1.0, "low": 0.1, "high": 4.0},
        {"alpha": 1.5, "slope": 2.0, "low": 1.4, "high": 1.6},
    ],
)
def test_a_rising_number(guess):
    root, places = find(lambda a: a**3 - 1.55**3, **guess)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert len(places) < 16 and all(guess.get("low", 0) < a < guess.get("high", np.inf) for a in places)


def test_a_falling_number():
    root, _ = find(lambda a: 1.55 - a, 1.2, slope=-0.7)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)


def test_the_bracket_shrinks_where_the_secant_would_leave_it():
    root, places = find(lambda a: np.arctan(50 * (a - 1.55)), 3.0, low=0.1, high=4.0)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert len(places) < 30


def test_beyond_the_end_of_a_branch():
    """A search comes back from places beyond the end of the branch, here above 1.6, where there is no state."""
    root, places = find(lambda a: a - 1.55, 1.8, lambda a: a < 1.6, low=1.5, high=2.0, there=1.5)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert places[0] == 1.8 and max(places[2:]) <= 1.7
    root, _ = find(lambda a: a - 1.55, 1.2, lambda a: a > 1.5, low=1.0, high=1.6, there=1.6)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)


def test_steps_without_a_bracket_are_short():
    _, places = find(lambda a: np.arctan(a - 1.55), 3.0, slope=0.1)
    assert max(abs(np.diff(places)) / places[:-1]) < 0.2 + 1e-9


def test_a_step_from_where_nothing_is_known():
    """Without a slope the step goes to the middle of a bracket in logarithms, or 2 % to the side that the sign says."""
    for rising, side in ((1.0, -1), (-1.0, 1)):
        s = Secant(2.0, 0.5, np.nan, 0.0, np.inf, rising)
        np.testing.assert_allclose(s.next(), (1 + 0.02 * side) * 2.0)
    np.testing.assert_allclose(Secant(2.0, 0.5, np.nan, 1.0, 4.0, 1.0).next(), 2.0)
    s = Secant(2.0, 0.5, -1.0, 1.0, 4.0, 1.0)  # a slope of the wrong sign is ignored
    np.testing.assert_allclose(s.next(), 2.0)
    np.testing.assert_allclose(Secant(2.0, -0.5, 0.1, 1.0, 4.0, 1.0).next(), 3.0)  # half the way to the end
    np.testing.assert_allclose(Secant(2.0, 0.5, 0.1, 1.0, 4.0, 1.0).next(), 1.5)


def test_what_a_search_learns():
    s = Secant.begin(np.nan, np.nan, 1.0, 4.0)
    first = s.updated(2.0, -0.5)
    assert (first.x, first.value, first.low, first.high) == (2.0, -0.5, 2.0, 4.0) and np.isnan(first.slope)
    second = first.updated(3.0, 0.5)
    assert (second.slope, second.low, second.high) == (1.0, 2.0, 3.0)
    assert second.updated(3.0, 0.5).slope == 1.0  # a second look at the same place tells nothing about the slope
    assert first.updated(3.0, 0.5, 7.0).slope == 7.0
    falling = Secant.begin(np.nan, np.nan, 0.0, np.inf).updated(2.0, 0.5, -1.0)  # without a bracket the slope decides
    assert (falling.rising, falling.low, falling.high) == (-1.0, 2.0, np.inf)
    assert Secant.begin(np.nan, np.nan, 1.0, 4.0).updated(2.0, 0.5, -1.0).high == 2.0
    assert (second.shrunk(2.5).low, second.shrunk(2.5).high) == (2.5, 3.0)
    assert (first.shrunk(2.5).low, first.shrunk(2.5).high) == (2.0, 2.5)


def test_in_a_bracket():
    def search(place, low=0.1, high=4.0, tol=1e-9):
        def number(alpha, evaluations):
            places.append(alpha)
            return made.finished_path((alpha**3 - place**3, evaluations + 1))

        places = []
        root, evaluations, converged = run_one(zero_between(number, low, high, 0, tol))
        assert evaluations == len(places) and places[0] == np.sqrt(low * high)
        return root, evaluations, converged

    root, evaluations, converged = search(1.55)
    np.testing.assert_allclose(root, 1.55, rtol=1e-8)
    assert converged and evaluations < 16
    assert not search(5.0)[2] and not search(0.05)[2]  # the zeros lie beyond the bracket
    assert search(np.sqrt(0.4), tol=1e-9)[1] == 1  # exactly at the first look
    root, evaluations, converged = run_one(
        zero_between(lambda a, k: made.finished_path((np.nan, k + 1)), 0.1, 4.0, 0, 1e-9)
    )
    assert not converged and evaluations <= 40


@jax.tree_util.register_pytree_node_class
class PartialState(SimpleNamespace):
    """A pytree with some attributes of a state."""

    def tree_flatten(self):
        return tuple(vars(self).values()), tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(**dict(zip(names, values, strict=True)))


def solved(*status):
    """A state of three replicates with given status; those that ran out of steps have a state."""
    return made.states(ta.DotProduct(), scatter=(0.0,) * 3, status=[*map(int, status)], residual=[1e-3] * 3)


def state_with(alpha=1.0, theta=1.0, m=1.0, loss=0.0, error=0.0, linear=0.0, has_state=(True, True, True)):
    """The numbers of a state that events look at."""
    ones = jnp.ones(3)
    return PartialState(
        overlaps=ta.Overlaps(*(alpha * jnp.ones((3, 2, 1, 1)),) * 3, alpha * jnp.ones((3, 2, 1))),
        diagnostics=PartialState(growth_theta=theta * ones, growth_m=m * ones),
        train_loss=loss * ones,
        gen_error=error * ones,
        gen_error_linear=linear * ones,
        has_state=jnp.array(has_state),
        status=jnp.array([0, 2, 0]),
    )


def test_the_number_of_every_event():
    state = state_with(theta=1.2, m=0.7, error=0.3, linear=0.4)
    numbers = {
        "semantic baseline": 0.1,
        "positional baseline": 0.1,
        "semantic instability": 0.3,  # positive: the state is stable, as it is above the event
        "positional instability": 0.2,
        "semantic pitchfork": 0.2,
        "positional pitchfork": -0.3,
    }
    for name, number in numbers.items():
        np.testing.assert_allclose(EVENTS[name].value(state), number)
    np.testing.assert_allclose(EVENTS["alpha_c"].value(state_with(loss=0.5), state_with(loss=0.2)), 0.3)
    assert EVENTS["alpha_c"].branches == ("positional", "semantic")
    single_branches = {name: event.branches for name, event in EVENTS.items() if len(event.branches) == 1}
    for name, (branch,) in single_branches.items():
        assert branch == ("uninformed" if "pitchfork" in name else name.split()[0])


@pytest.mark.usefixtures("unchecked")
def test_what_most_replicates_lack_has_no_number():
    for has_state, expected in (((True, True, False), 0.1), ((True, False, False), np.nan)):
        points = [SimpleNamespace(replicates=state_with(error=0.3, linear=0.4, has_state=has_state))]
        np.testing.assert_allclose(number_of(EVENTS["semantic baseline"], points), expected)


@pytest.mark.usefixtures("unchecked")
def test_roots_and_sensitivities_of_the_replicates():
    """Each replicate's zero lies one Newton step away from the common place."""
    event = EVENTS["alpha_c"]
    good = solved(0, 0, 0)
    value, by_alpha = jnp.array([0.1, 0.3, 0.2]), jnp.array([2.0, 2.0, 4.0])
    zero = Zero(jnp.array(1.0), (solved(0, 2, 0), good), value, None, by_alpha, slope=2.0, converged=jnp.array(True))
    transition = transition_of(event, ta.DotProduct(), zero)
    roots = 1 - value / 2
    np.testing.assert_allclose((transition.alpha, transition.stderr), (roots.mean(), error_bar(roots)))
    assert int(transition.status) == 2 and transition.sensitivities is None and transition.event == event.name
    # A replicate that lacks the state does not count, which is said; if most lack it, there is no number.
    value = zero.value.at[1].set(jnp.nan)
    for first, status in (((0, 6, 0), 1), ((0, 3, 2), 2), ((6, 6, 0), 6), ((3, 3, 0), 3)):
        some = transition_of(event, ta.DotProduct(), zero._replace(states=(solved(*first), good), value=value))
        assert int(some.status) == status and np.isfinite([some.alpha, some.stderr]).all() == (status < 3)
    unmet = transition_of(event, ta.DotProduct(), zero._replace(converged=jnp.array(False)))
    assert int(unmet.status) == ta.Status.absent and float(unmet.ended_at) == 1.0
    assert np.isnan([float(unmet.alpha), float(unmet.stderr), float(transition.ended_at)]).all()
    failed = solved(*[ta.Status.unresolved] * 3)
    unknown = transition_of(event, ta.DotProduct(), zero._replace(states=(solved(0, 2, 0), failed), converged=False))
    assert int(unknown.status) == ta.Status.unresolved and jnp.isnan(unknown.alpha)
    absent = solved(*[ta.Status.absent] * 3)
    for pair in ((absent, solved(0, 2, 0)), (absent, absent)):
        assert (
            transition_of(event, ta.DotProduct(), zero._replace(states=pair, converged=False)).status
            == ta.Status.absent
        )
    exact = transition_of(event, ta.DotProduct(), zero._replace(rates={"sigma": jnp.array([4.0, 6.0, 8.0])}))
    np.testing.assert_allclose(exact.alpha, np.mean([0.95, 0.85, 0.95]))
    np.testing.assert_allclose(exact.sensitivities["sigma"], np.mean([-2.0, -3.0, -2.0]))
    np.testing.assert_allclose(exact.sensitivities_stderr["sigma"], error_bar(jnp.array([-2.0, -3.0, -2.0])))
    lost = zero._replace(rates={"sigma": jnp.array([4.0, 6.0, 8.0])}, converged=jnp.array(False))
    nothing = transition_of(event, ta.DotProduct(), lost)
    assert np.isnan([nothing.sensitivities["sigma"], nothing.sensitivities_stderr["sigma"]]).all()


@pytest.mark.usefixtures("unchecked")
def test_an_event_that_was_not_found_has_no_derivative():
    good = solved(0, 0, 0)
    gradients = jax.tree.map(lambda a: jnp.ones((3, *a.shape)), ta.DotProduct())

    def slope(converged):
        zero = Zero(jnp.array(1.0), (good, good), jnp.zeros(3), gradients, jnp.ones(3), 1.0, jnp.array(converged))
        return jax.grad(lambda m: transition_of(EVENTS["alpha_c"], m, zero).alpha)(ta.DotProduct()).sigma

    assert slope(True) == -1.0 and slope(False) == 0.0


def searched(monkeypatch, number, alpha, exists=lambda a: True, options=MappingProxyType({}), **limits):
    """Run `find_zero` on a number that depends on alpha, without solves; return the zero and the places visited."""
    places = []

    def solve_replicates(problem, x):
        assert problem.settings == "tight" and problem.nodes.replicates == 3 and problem.free.tolist() == [1.0, 0.0]
        alpha = float(problem.alpha)
        places.append(alpha)
        has_state = exists(alpha)
        return made.finished_path(state_with(alpha, linear=number(alpha), has_state=(has_state,) * 3))

    monkeypatch.setattr(Problem, "solve_replicates", solve_replicates)
    guess, model = Guess(alpha, (state_with().overlaps,), **limits), ta.DotProduct()
    family = Family(model, SimpleNamespace(replicates=3), "tight")
    look = partial(event_number, EVENTS["semantic baseline"], family, exact=False)
    return run_one(find_zero(look, guess, tol=1e-5, **options)), places


@pytest.mark.usefixtures("unchecked")
def test_a_zero_of_states(monkeypatch):
    zero, places = searched(monkeypatch, lambda a: a**3 - 1.55**3, 1.4)
    np.testing.assert_allclose(zero.at, 1.55, rtol=1e-4)
    assert bool(zero.converged) and len(places) < 9
    np.testing.assert_allclose(zero.states[0].overlaps.q, zero.at)
    zero, places = searched(monkeypatch, lambda a: 1.0 + a, 1.4)
    assert not bool(zero.converged) and len(places) == 12
    zero, places = searched(monkeypatch, lambda a: a - 1.55, 1.4, lambda a: False)
    assert zero.converged is False and len(places) == 1
    zero, places = searched(monkeypatch, lambda a: a**3 - 1.55**3, 1.4, options={"max_evaluations": 2})
    assert len(places) == 2 and zero.at == places[1] and bool(zero.converged)
    zero, _ = searched(monkeypatch, lambda a: a - 1.55, 1.7, lambda a: a < 1.6, low=1.5, high=2.0, there=1.5)
    np.testing.assert_allclose(zero.at, 1.55, rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_the_states_of_a_pair_are_asked_for_at_once(monkeypatch):
    """A pair's states are requested together, each from its last state and with its branch's free order parameters.

    Exact slopes come with the losses.
    """
    requests = []

    def solve_replicates(problem, x):
        requests.append((float(problem.alpha), problem.free.tolist(), float(jnp.mean(x.q))))
        alpha, semantic = float(problem.alpha), problem.free[0] == 1
        state = state_with(alpha + 10 * semantic, loss=(0.0 if semantic else (alpha - 1.25) ** 3 + alpha - 1.25))
        by_alpha = jnp.full(3, 0.0 if semantic else 3 * (alpha - 1.25) ** 2 + 1)
        state.train_loss_partials = ({"sigma": jnp.full(3, 2.0 * semantic)}, by_alpha)
        return made.finished_path(state)

    monkeypatch.setattr(Problem, "solve_replicates", solve_replicates)
    x = state_with().overlaps
    guess, rule = Guess(1.4, (x, jax.tree.map(lambda a: 2 * a, x))), SimpleNamespace(replicates=3)
    family = Family(ta.DotProduct(), rule, "tight")
    path = zero_path(EVENTS["alpha_c"], family, guess)
    (paths := next(path)) and path.close()
    assert len(paths) == 2  # both in one list
    requests.clear()
    zero = run_one(zero_path(EVENTS["alpha_c"], family, guess))
    np.testing.assert_allclose(zero.at, 1.25, atol=1e-5)
    np.testing.assert_allclose(zero.rates["sigma"], -2.0)
    np.testing.assert_allclose(zero.slopes, 1.0, atol=1e-5)
    assert requests[:2] == [(1.4, [0.0, 1.0], 1.0), (1.4, [1.0, 0.0], 2.0)]
    for k in (2, 3):
        np.testing.assert_allclose(requests[k][2], (1.4, 11.4)[k - 2])


def test_exact_slopes_are_asked_for_in_every_replicate_at_once(monkeypatch, model, lines, semantic_states):
    """Exact slopes are requested together, one call per replicate with its state; else the secant gives the slope."""
    monkeypatch.setattr(Problem, "solve_replicates", lambda problem, x: made.finished_path(semantic_states))
    guess, answered = Guess(1.4, (semantic_states.overlaps,)), []

    def answer(call):
        answered.append(call)
        k = len(answered) - 1
        return jnp.asarray(0.1), eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(2.0 + k)), jnp.asarray(3.0 + k)

    event = EVENTS["semantic instability"]
    look = partial(event_number, event, Family(model, lines, ta.Settings()))
    path = find_zero(look, guess, max_evaluations=1)
    next(path)  # the states
    calls = path.send([semantic_states])
    assert isinstance(calls, list) and len(calls) == 4 and all(isinstance(call, Call) for call in calls)
    path.close()
    zero = made.answer_path(find_zero(look, guess, max_evaluations=1), answer)
    np.testing.assert_array_equal(zero.slopes, [3.0, 4.0, 5.0, 6.0])
    np.testing.assert_array_equal(zero.rates.sigma, [2.0, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(zero.slope, 4.5)
    for k, call in enumerate(answered):
        equations, x, observable = call.arguments
        assert observable is event.observable and float(equations.alpha) == 1.4
        np.testing.assert_array_equal(equations.free, [1.0, 0.0])
        for a, b in zip(jax.tree.leaves(equations.replicate), jax.tree.leaves(lines.replicate(k)), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(x.q, semantic_states.overlaps.q[k])
    answered.clear()
    zero = made.answer_path(find_zero(partial(look, exact=False), guess, max_evaluations=1), answer)
    assert not answered and zero.rates is None and np.isnan(zero.slopes).all()


def curve_with(numbers, branch="semantic", name="error"):
    """A curve with test errors or losses at alpha = 1, 2, ...; states exist only where the numbers are finite."""

    def point(alpha, number):
        has_state = bool(np.isfinite(number))
        state = state_with(alpha, **{name: number}, has_state=(has_state,) * 3)
        return SimpleNamespace(alpha=jnp.array(alpha), ok=has_state, replicates=state)

    return Table.of_states(branch, tuple(point(1.0 + k, n) for k, n in enumerate(numbers)))


@pytest.mark.usefixtures("unchecked")
def test_the_first_place_on_a_curve_within_limits():
    event, curve = EVENTS["semantic baseline"], curve_with([1.0, -3.0, -1.0, 1.0, np.nan, -1.0])
    first = guess_of(event, [curve])
    np.testing.assert_allclose((first.at, first.slope, first.low, first.high), (1.25, 4.0, 1.0, 2.0))
    np.testing.assert_allclose(first.overlaps[0].q, 1.25)
    second = guess_of(event, curve, 2.0, 5.0)
    np.testing.assert_allclose((second.at, second.there), (3.5, 4.0))
    third = guess_of(event, curve, 4.0)  # between points that are not neighbours the state between them is left out
    np.testing.assert_allclose((third.at, third.low, third.high), (5.0, 4.0, 6.0))
    assert guess_of(event, curve, 5.5) is None


@pytest.mark.usefixtures("unchecked")
def test_where_alpha_c_is_looked_for(monkeypatch, model, lines):
    """alpha_c is looked for at the first crossing of the curves in the range; without one, anywhere in the range."""
    guesses = []

    def stop(look, guess, **_):
        guesses.append(guess.at)
        raise InterruptedError

    def stop_coarse(event, family, bracket, starts):
        guesses.append(bracket)
        raise InterruptedError

    monkeypatch.setattr(locate, "find_zero", stop)
    monkeypatch.setattr(locate, "_coarse_guess", stop_coarse)
    curves = [curve_with(n, b, "loss") for b, n in (("semantic", [0.0] * 4), ("positional", [-1.0, 1.0, -1.0, -1.0]))]
    for bracket, expected in (((0.1, 4.0), 1.5), ((2.0, 4.0), 2.5), ((2.7, 4.0), (2.7, 4.0))):
        with pytest.raises(InterruptedError):
            ta.critical_alpha(model, lines, start=curves, bracket=bracket)
        np.testing.assert_allclose(guesses[-1], expected)


def test_alpha_c_between_the_ends_of_branches(monkeypatch, model):
    """On coarse averages a branch wins where the other one does not exist: here the semantic one starts at .8."""

    def coarse_lane(problem, x0):
        alpha, semantic = float(problem.alpha), problem.free[0] == 1
        loss = 2.25 - alpha if semantic else 1.0
        has_state = not (semantic and alpha < 0.8)
        starts[bool(semantic)].append((alpha, float(x0.q[0, 0, 0])))
        status = 0 if has_state else int(ta.Status.absent)
        moved = jax.tree.map(lambda a: a + 1, x0)
        return made.finished_path(SimpleNamespace(train_loss=loss, has_state=has_state, status=status, overlaps=moved))

    def stop(look, guess, *, max_evaluations, **_):
        guesses.append((float(guess.at), max_evaluations))
        raise InterruptedError

    guesses, starts = [], {False: [], True: []}
    monkeypatch.setattr(Problem, "coarse_lane", coarse_lane)
    monkeypatch.setattr(locate, "find_zero", stop)
    for bracket in ((0.1, 4.0), (0.1, 0.9), (1.4, 4.0)):
        with pytest.raises(InterruptedError):
            ta.critical_alpha(model, ta.Sobol(64, replicates=3).rule(model), bracket=bracket)
    np.testing.assert_allclose([alpha for alpha, _ in guesses], [1.25, 0.9, 1.4], rtol=2e-3)
    assert [looks for _, looks in guesses] == [12, 1, 1]  # at the end of a bracket one look is enough
    # A branch continues from its last state, or from its start if it was absent before.
    first = float(BRANCHES["semantic"].start(model).q[0, 0, 0])
    for (before, x), (_, y) in pairwise(starts[True][:4]):
        assert y == (x + 1 if before >= 0.8 else first)


def test_where_alpha_l_is_looked_for(monkeypatch, model, lines, semantic_states):
    """alpha_l is looked for on the positional branch below alpha_c, or on the semantic one above.

    The first holds if the positional state beats the baseline at alpha_c.
    """
    searches = []

    def stop(event, family, ends, starts):
        searches.append((event.name, float(starts[0].q[0, 0, 0]), *map(float, ends)))
        raise InterruptedError

    monkeypatch.setattr(locate, "_coarse_guess", stop)
    alpha = jnp.asarray(1.25)
    for baseline, expected in (
        (1.0, ("positional baseline", 1.0, 0.1, 1.25)),
        (0.0, ("semantic baseline", 2.0, 1.25, 4.0)),
    ):
        branches = []
        for q, name in enumerate(PAIR, 1):
            new = q * jnp.ones_like(semantic_states.overlaps.q), baseline * jnp.ones(4)
            states = eqx.tree_at(lambda s: (s.overlaps.q, s.gen_error_linear), semantic_states, new)
            branches.append(ta.results.FixedPoint(model, alpha, states, name))
        critical = as_event(ta.results.Quantity(alpha, alpha, jnp.array(0)), "alpha_c", tuple(branches))
        with pytest.raises(InterruptedError):
            ta.linear_crossing(model, critical, lines)
        assert searches[-1] == pytest.approx(expected)


def test_the_options_of_a_search_arrive(monkeypatch, model, lines):
    """Settings, limits and the choice of exact slopes reach the search from every function that looks for an event."""
    calls = []

    class Stop(Exception):
        pass

    def stop(look, guess, **_):
        event, family = look.args
        calls.append((event.name, float(guess.at), family.nodes is lines, family.settings, look.keywords["exact"]))
        raise Stop

    tight, rough = ta.Settings(tol=1e-9), ta.Settings(tol=1e-3)
    guess = Guess(1.3, (BRANCHES["semantic"].start(model),))
    pair = Guess(1.3, guess.overlaps * 2)
    monkeypatch.setattr(locate, "find_zero", stop)
    for call, expected in (
        (lambda **k: ta.find_event(model, "semantic baseline", lines, start=guess, **k), True),
        (lambda **k: ta.find_event(model, "semantic baseline", lines, start=guess, sensitivities=False, **k), False),
        (lambda **k: ta.critical_alpha(model, lines, start=pair, **k), True),
        (
            lambda **k: ta.sweep(model, "semantic baseline", omega=[0.3], nodes=lines, follow=True, start=guess, **k),
            False,
        ),
        (lambda **k: ta.sweep(model, "alpha_c", omega=[0.3], nodes=lines, follow=True, start=pair, **k), True),
    ):
        for settings in (tight, rough):
            with pytest.raises(Stop):
                call(settings=settings)
            assert calls[-1][1:3] == (1.3, True) and calls[-1][3] is settings and calls[-1][4] is expected
    with pytest.raises(Stop):
        ta.sweep(model, "semantic baseline", omega=[0.3], nodes=lines, follow=True, start=guess, sensitivities=True)
    assert calls[-1][4] is True and float(calls[-1][3].tol) == 1e-4


@pytest.fixture(scope="module")
def curves(model, lines):
    return [ta.sweep(model, branch, alpha=[1.1, 1.4, 1.6], nodes=lines) for branch in PAIR]


def test_places_on_curves(curves, model, lines):
    (guess,) = crossings(EVENTS["alpha_c"], curves)
    assert guess.low == 1.1 and guess.high == 1.4 and guess.slope > 0
    np.testing.assert_allclose(guess.at, ALPHA_C, atol=0.02)
    critical = ta.critical_alpha(model, lines, start=curves)
    assert abs(critical.alpha - ALPHA_C) <= 3 * critical.stderr and bool(critical.ok)
    crossing = ta.linear_crossing(model, critical, lines, start=curves)
    assert abs(crossing.alpha - ALPHA_L) <= 3 * crossing.stderr and crossing.event == "alpha_l"
    assert guess_of(EVENTS["semantic instability"], curves) is None
    with pytest.raises(ta.InputError, match="start must enclose"):
        ta.find_event(model, "semantic instability", lines, start=curves)
    with pytest.raises(ta.InputError, match="start must be a FixedPoint"):
        ta.find_event(model, "alpha_c", lines, start=curves[0].points[:1])
    with pytest.raises(ta.InputError, match="event must be one of"):
        ta.find_event(model, "alpha", lines, start=curves)


@pytest.mark.long
@pytest.mark.parametrize(("event", "alpha"), [("semantic instability", 0.8265), ("semantic pitchfork", 0.7192)])
def test_sensitivities_of_growth_events(model, lines, event, alpha):
    """Implicit derivatives of growth events equal central differences where the proximal operator jumps."""
    (branch,) = EVENTS[event].branches
    start = [ta.solve(model, 1.01 * alpha, branch, lines, start=BRANCHES["semantic"].start(model))]
    settings = ta.Settings(tol=1e-8, warm_steps=20)
    transition = ta.find_event(model, event, lines, start=start, settings=settings)
    assert bool(transition.ok) and abs(transition.alpha - alpha) < 1e-3
    alphas = []
    for step in (0.01, -0.01):
        moved = eqx.tree_at(lambda m: m.omega, model, model.omega + step)
        neighbour = ta.find_event(
            moved, event, lines, start=transition.branches, settings=settings, sensitivities=False
        )
        alphas.append(float(neighbour.alpha))
    np.testing.assert_allclose((alphas[0] - alphas[1]) / 0.02, transition.sensitivities.omega, rtol=0.02)
    assert 0 < transition.sensitivities_stderr.omega < 0.01


def one_replicate(model, order):
    """Return the rule of test_arclength.py, so that both files share their compiled programs."""
    return ta.Lines(order, replicates=1, even=True).rule(model)


def test_a_fold_is_looked_for_on_both_sides(monkeypatch, model, lines):
    calls = []
    monkeypatch.setattr(locate, "fold_near", lambda *arguments: made.finished_path(calls.append(arguments)))
    settings, x = ta.Settings(tol=1e-9), BRANCHES["semantic"].start(model)
    for limits, expected in (({}, (1.0, 3.0)), ({"low": 1.5, "high": 2.1}, (1.5, 2.1))):
        transition = ta.find_event(model, "semantic fold", lines, start=Guess(2.0, (x,), **limits), settings=settings)
        assert int(transition.status) == ta.Status.absent and calls[-1][4] == expected and calls[-1][3] is settings
    np.testing.assert_array_equal(calls[-1][0].free, [1.0, 0.0])


# Derivatives estimate many nodes, differences belong to these: lines of order 5 differ by 12 % at a fold.
@pytest.mark.parametrize(("order", "tol"), [(5, 0.15), pytest.param(7, 0.03, marks=pytest.mark.slow)])
def test_a_fold_and_its_sensitivities(order, tol):
    """The positional branch at omega = .235 turns back at alpha = 2.174(1), and its derivatives equal differences."""
    model = ta.DotProduct(omega=0.235)
    rule = one_replicate(model, order)
    x = ta.solve(model, 2.1, "positional", rule, start=START).overlaps
    guess = Guess(2.1, (x,), low=2.05, high=2.3)
    transition = ta.find_event(model, "positional fold", rule, start=guess)
    assert bool(transition.ok) and abs(transition.alpha - 2.174) < 0.03
    alphas = []
    for step in (1e-3, -1e-3):
        moved = ta.DotProduct(omega=0.235 + step)
        alphas.append(float(ta.find_event(moved, "positional fold", rule, start=guess, sensitivities=False).alpha))
    np.testing.assert_allclose((alphas[0] - alphas[1]) / 2e-3, transition.sensitivities.omega, rtol=tol)


@pytest.mark.long
def test_a_fold_along_another_number():
    """The fold in alpha at omega = .235 is one in omega at its alpha, where d omega / d alpha is the inverse slope."""
    model, event = ta.DotProduct(omega=0.235), EVENTS["positional fold"]
    rule, settings = one_replicate(model, 5), ta.Settings()
    x = ta.solve(model, 2.1, "positional", rule, start=START).overlaps
    fold = run_one(event_path(event, Family(model, rule, settings), Guess(2.1, (x,), low=2.05, high=2.3)))
    alpha = jnp.asarray(fold.at[0])
    x = ta.solve(ta.DotProduct(omega=0.24), alpha, "positional", rule, start=x).overlaps
    family = Family(model, rule, settings, Parameter("omega"), alpha)
    other = run_one(event_path(event, family, Guess(0.24, (x,), low=0.23, high=0.25)))
    np.testing.assert_allclose(other.at, 0.235, rtol=1e-4)
    _, by_alpha = other.rates
    np.testing.assert_allclose(-by_alpha / other.slopes, -fold.slopes / fold.rates.omega, rtol=1e-3)


START = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.04, 11.0, 0.0)), 0.21 * jnp.array([[1.0], [-1.0]]))


def test_no_fold_is_absent(model, curves):
    guess = Guess(1.4, (curves[1].points[1].overlaps,), low=1.2, high=1.6)
    transition = ta.find_event(model, "semantic fold", one_replicate(model, 5), start=guess)
    assert int(transition.status) == ta.Status.absent and np.isnan(float(transition.alpha))


@pytest.mark.parametrize(("early", "late", "owner"), [(0, 0, 2), (0, 1, 1), (1, 0, 0), (1, 1, 0)])
def test_which_state_beats_the_baseline_first(early, late, owner):
    assert int(baseline_branch(bool(early), bool(late))) == owner


def test_alpha_l_is_alpha_c_where_the_exchange_beats_the_baseline(model, lines):
    """If the exchange of the minima beats the baseline, alpha_l is alpha_c.

    In the model this happens at omega = .5, where the semantic state beats the baseline as soon as it becomes global.
    """
    critical = ta.critical_alpha(model, lines, start=[ta.solve(model, 1.25, b, lines) for b in PAIR])
    states = list(critical.branches)
    better = eqx.tree_at(lambda s: s.replicates.gen_error, states[1], 0.5 * states[1].replicates.gen_error)
    changed = eqx.tree_at(lambda t: t.branches, critical, (states[0], better))
    crossing = ta.linear_crossing(model, changed, lines, start=[states[1]])
    np.testing.assert_array_equal(crossing.alpha, critical.alpha)
    np.testing.assert_array_equal(crossing.sensitivities.omega, critical.sensitivities.omega)
    # Without alpha_c nobody knows which minimum is global.
    failed = eqx.tree_at(lambda t: t.status, critical, jnp.asarray(int(ta.Status.max_steps)))
    guess = Guess(ALPHA_L, (states[1].replicates.overlaps,))
    assert int(ta.linear_crossing(model, failed, lines, start=guess).status) == ta.Status.max_steps


@pytest.mark.usefixtures("unchecked")
def test_without_alpha_c_there_is_no_alpha_l(model, lines, monkeypatch):
    """If a branch was not settled, nothing else is solved; without branches, the semantic baseline is looked for."""
    failed = made.transition(status=int(ta.Status.max_steps))
    crossing = ta.linear_crossing(model, failed, lines)
    assert (crossing.event, int(crossing.status), float(crossing.alpha)) == ("alpha_l", ta.Status.max_steps, 1.25)
    absent = solved(*[ta.Status.absent] * 3)
    searched = []

    def path(event, *_, **__):
        searched.append(event.name)
        states = (absent,) * len(event.branches)
        return made.finished_path(Zero(jnp.asarray(0.1), states, jnp.full(3, jnp.nan), None, jnp.ones(3)))

    monkeypatch.setattr(transitions, "zero_path", path)
    crossing = run_one(transition_path("alpha_l", Family(model, lines, ta.Settings())))
    assert (crossing.event, int(crossing.status), searched) == (
        "alpha_l",
        ta.Status.absent,
        ["alpha_c", "semantic baseline"],
    )


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (Secant(2.0, -0.5, 0.1, 1.0, 4.0, 1.0, 0.1), 2.2),  # the step is longer than the reach
        (Secant(2.0, 0.5, 0.1, 1.0, 4.0, 1.0, 0.1), 1.8),
        (Secant(2.0, -0.5, 0.1, 0.0, np.inf, 1.0, 0.1), 2.2),
        (Secant(2.0, -0.5, 0.1, 0.0, np.inf, 1.0), 2.4),  # a fifth without a bracket
        (Secant(2.0, -0.5, 0.1, 0.0, 4.0, 1.0), 2.4),  # one end is no bracket
        (Secant(2.0, -0.5, 0.1, 1.0, np.inf, 1.0), 2.4),
        (Secant(2.0, -0.5, np.nan, 0.0, 4.0, 1.0), 2.04),
        (Secant(2.0, -0.5, np.nan, 1.0, 9.0, 1.0), 3.0),
        (Secant(2.0, -0.5, -0.5, 1.0, 9.0, -1.0), 1.5),  # a falling number; 1 is no place inside of the bracket
        (Secant(2.0, -0.1, -0.5, 1.0, 9.0, -1.0), 1.8),
        (Secant(2.0, np.nan, 1.0, 1.0, 9.0, 1.0), 3.0),  # the number is not known
    ],
)
def test_where_a_search_looks_next(search, expected):
    np.testing.assert_allclose(search.next(), expected, rtol=1e-12)


def test_how_a_search_begins():
    for slope, rising in ((-2.0, -1.0), (0.5, 1.0), (0.0, 1.0), (np.nan, 1.0)):
        search = Secant.begin(2, slope, 1, 4, 0.3)
        assert (search.x, search.low, search.high, search.rising, search.reach) == (2.0, 1.0, 4.0, rising, 0.3)
        assert np.isnan(search.value) and np.isinf(Secant.begin(2, slope, 1, 4).reach)
    assert np.isnan(Secant(2.0, 0.5, 0.0, 1.0, 4.0, 1.0).step)
    assert Secant(2.0, 0.5, 0.25, 1.0, 4.0, 1.0).step == -2.0


@pytest.mark.parametrize(("zero", "inside"), [(0.1002, True), (0.10005, False), (3.99, True), (3.9985, False)])
def test_a_zero_at_the_end_of_a_bracket_is_none(zero, inside):
    """A zero within a thousandth of an end of the bracket may lie beyond it."""
    path = zero_between(lambda a, k: made.finished_path((a - zero, k + 1)), 0.1, 4.0, 0, 1e-9)
    root, evaluations, converged = run_one(path)
    assert converged == inside and evaluations <= 40
    np.testing.assert_allclose(root, zero, rtol=2e-3)


def test_the_shift_by_replica_symmetry_breaking(model):
    """It is minus the difference of the elevations over that of the slopes of the losses, where both states exist."""
    elevations = np.array([[4e-6, 5e-6, 6e-6, 9.0], [1e-6, 1e-6, 3e-6, 1.0]])
    slopes, statuses = np.array([[3e-3, 2e-3, 4e-3, 1.0], [1e-3, 1e-3, 1e-3, 2.0]]), ([0, 0, 1, 0], [0, 1, 0, 6])
    pair = []
    for rs_error, slope, status, branch in zip(elevations, slopes, statuses, PAIR, strict=True):
        states = made.states(model, rs_error=rs_error, status=status)
        states = eqx.tree_at(lambda s: s.train_loss_partials[1], states, jnp.asarray(slope))
        pair.append(ta.results.FixedPoint(model, jnp.asarray(1.25), states, branch))
    shifts = np.array([-1.5e-3, -4e-3, -1e-3, np.nan])
    shift = rs_shift(*pair)
    np.testing.assert_allclose([shift.value, shift.stderr], [np.nanmean(shifts), error_bar(shifts)], rtol=1e-9)
    number = ta.results.Quantity(jnp.asarray(1.25), jnp.asarray(0.01), jnp.array(0))
    found = as_event(number, "alpha_c", tuple(pair))
    np.testing.assert_allclose(found.rs_shift.value, shift.value)
    assert np.isnan(found.ended_at) and found.note == "" and found.name == "alpha" and found.event == "alpha_c"
    assert found.meaning == EVENTS["alpha_c"].meaning
    for event, states in (("alpha_l", tuple(pair)), ("semantic baseline", tuple(pair[1:])), ("alpha_c", ())):
        assert "rs_shift" not in as_event(number, event, states).further
    lost = as_event(eqx.tree_at(lambda n: n.value, number, jnp.asarray(jnp.nan)), "alpha_c", tuple(pair))
    assert float(lost.ended_at) == 1.25 and "rs_shift" not in lost.further and lost.note.startswith("the losses do not")
