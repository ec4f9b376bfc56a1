"""Searches, best values and traces on a theory in closed form: no state is solved, and nothing is replaced."""

import dataclasses

import jax.numpy as jnp
import made
import numpy as np
import pytest
from numpy.polynomial import Polynomial
from toy import Toy

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import PAIR
from tiedattn_jax.phases import transitions
from tiedattn_jax.phases.best import best_of, best_path, prepared_task
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.phases.family import Family
from tiedattn_jax.phases.locate import Guess, event_path, guess_of, transition_of, zero_path
from tiedattn_jax.phases.table import Table
from tiedattn_jax.phases.trace import trace_path
from tiedattn_jax.theory.setting import branch_start

pytestmark = pytest.mark.usefixtures("unchecked")  # checks of types take most of the time here
SETTINGS, ABSENT = ta.Settings(), ta.Status.absent
BASELINE, INSTABILITY = "semantic baseline", "semantic instability"


@pytest.fixture
def family(model, rule):
    return Family(model, rule, SETTINGS)


def starts(model, *branches):
    return tuple(branch_start(model, b) for b in branches)


def nothing(model, alpha):
    return 0.0 * alpha


def pair(difference, **options):
    """Branches whose training losses differ, positional minus semantic, by a function of the model and alpha."""
    return Toy({"positional": difference, "semantic": nothing}, **options)


def semantic(number, **options):
    """A branch on which the number of the semantic instability is a function of the model and alpha."""
    growth = {"semantic": lambda m, a: (0.5, 1.0 - number(m, a)), "uninformed": lambda m, a: (1.5, 0.5)}
    return Toy({"semantic": nothing, "uninformed": nothing}, growth=growth, **options)


def located(event, toy, family, guess=None, **options):
    zero = toy.run(zero_path(EVENTS[event], family, guess, **options))
    return transition_of(EVENTS[event], family.model, zero)


@pytest.mark.parametrize(
    ("difference", "end", "alpha"),
    [
        (lambda m, a: a**3 - 1.5**3, 1.0, 1.5),
        (lambda m, a: a - 1.0005, 1.0, 1.0005),
        (lambda m, a: a - 0.97, 1.0, np.nan),  # the branch ends before the losses cross: the last step is 3 %
        (lambda m, a: 0.3 + np.sqrt(np.maximum(a - 1, 0)), 1.0, np.nan),  # slopes at a fold are infinite, steps short
        (lambda m, a: 0.02 + (a - 1.0) ** 2, 0.0, np.nan),  # no zero, and the smallest value is at 1
    ],
)
def test_a_zero_is_enclosed_or_next_to_the_last_step(family, difference, end, alpha):
    toy = pair(difference, where={"positional": lambda m, a: a > end})
    event = located("alpha_c", toy, family, Guess(1.1, starts(family.model, *PAIR)))
    np.testing.assert_allclose(event.alpha, alpha, rtol=1e-5)
    assert event.status == (ABSENT if np.isnan(alpha) else ta.Status.converged)


@pytest.mark.parametrize(
    ("number", "guess", "exists", "alpha", "looks"),
    [
        (lambda a: a**3 - 1.55**3, {"at": 1.4}, lambda a: True, 1.55, 8),
        (lambda a: a**3 - 1.55**3, {"at": 1.5, "slope": 2.0, "low": 1.4, "high": 1.6}, lambda a: True, 1.55, 8),
        (lambda a: 1.55 - a, {"at": 1.4, "slope": -0.7}, lambda a: True, 1.55, 8),
        # The first place may lie past the end of the branch if there is a state at another one.
        (lambda a: a - 1.55, {"at": 1.7, "low": 1.5, "high": 2.0, "there": 1.5}, lambda a: a < 1.6, 1.55, 8),
        (lambda a: a - 1.55, {"at": 1.3, "low": 1.0, "high": 1.6, "there": 1.6}, lambda a: a > 1.5, 1.55, 8),
        (lambda a: a + 1.0, {"at": 1.4}, lambda a: True, np.nan, 12),  # there is no zero
        (lambda a: a - 1.55, {"at": 1.4}, lambda a: False, np.nan, 1),  # there is no state
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_how_often_a_search_looks(family, number, guess, exists, alpha, looks, exact):
    toy = semantic(lambda m, a: number(a), where={"semantic": lambda m, a: exists(a)})
    guess = Guess(overlaps=starts(family.model, "semantic"), **guess)
    event = located(INSTABILITY, toy, family, guess, exact=exact)
    np.testing.assert_allclose(event.alpha, alpha, rtol=1e-4)
    count = len(toy.settings) // 2  # of two replicates
    assert count <= looks if np.isfinite(alpha) else count == looks
    assert (event.sensitivities is None) == (not exact)


def at(m, a):
    """A number that rises through zero at alpha = (.45 + omega) / sigma, which is 1.5."""
    return np.sinh(a * m.sigma - m.omega - 0.45)


@pytest.mark.parametrize(
    ("event", "toy"),
    [
        ("alpha_c", pair(at)),
        (BASELINE, Toy({"semantic": nothing}, {"semantic": lambda m, a: 1 - at(m, a)})),
        (INSTABILITY, semantic(at)),
        ("positional instability", Toy({"positional": nothing}, growth={"positional": lambda m, a: (1 + at(m, a), 9)})),
        ("positional pitchfork", Toy({"uninformed": nothing}, growth={"uninformed": lambda m, a: (9, 1 + at(m, a))})),
    ],
)
def test_sensitivities_are_derivatives_of_the_place(family, event, toy):
    found = located(event, toy, family, Guess(1.3, starts(family.model, *EVENTS[event].branches)))
    np.testing.assert_allclose(found.alpha, 1.5, rtol=1e-5)
    np.testing.assert_allclose((found.sensitivities.omega, found.sensitivities.sigma), (2.0, -3.0), rtol=1e-3)
    assert found.event == event and found.meaning == EVENTS[event].meaning and found.ok
    assert [state.branch for state in found.branches] == list(EVENTS[event].branches)


@pytest.mark.parametrize(
    ("bracket", "alpha", "end"),
    [((0.1, 4.0), 1.25, np.nan), ((0.1, 0.9), np.nan, 0.9), ((1.4, 4.0), np.nan, 1.4)],
)
def test_alpha_c_between_the_ends_of_branches(family, bracket, alpha, end):
    """Where only one branch has a state it counts as the lower one: the semantic branch starts at .8 here."""
    toy = pair(lambda m, a: a - 1.25, where={"semantic": lambda m, a: a > 0.8})
    event = located("alpha_c", toy, family, bracket=bracket, starts=starts(family.model, *PAIR))
    np.testing.assert_allclose([event.alpha, event.ended_at], [alpha, end], rtol=2e-3)
    assert event.status == (ABSENT if np.isnan(alpha) else ta.Status.converged)


def test_a_start_of_another_number_of_replicates(family):
    """The mean of a start of three replicates serves the two of the averages, and one of two serves them as it is."""
    toy = pair(lambda m, a: a - 1.5)
    for count in (1, 2, 3, 5):
        xs = [dataclasses.replace(x, **{k: np.stack([v] * count) for k, v in vars(x).items()})
              for x in starts(family.model, *PAIR)]  # fmt: skip
        zero = toy.run(zero_path(EVENTS["alpha_c"], family, Guess(1.4, tuple(xs))))
        assert zero.converged and zero.at == pytest.approx(1.5)


def curve(branch, alphas, **numbers):
    """The states of a branch along alpha, with given numbers; there is none where these are not finite."""
    points = []
    for k, alpha in enumerate(alphas):
        own = {name: np.full(2, values[k]) for name, values in numbers.items()}
        own["status"] = np.where(np.isfinite(next(iter(own.values()))), 0, int(ABSENT))
        point = made.point(alpha, 0.5, branch)
        points.append(dataclasses.replace(point, replicates=dataclasses.replace(point.replicates, **own)))
    return Table.of_states(branch, points)


def test_an_event_next_to_the_points_of_curves_of_other_averages(family):
    """The curves cross at 1.52, between points at 1.5 and 1.6. On the averages of the search they cross at 1.48."""
    alphas = np.array([1.4, 1.5, 1.6])
    curves = [curve("positional", alphas, train_loss=alphas - 1.52), curve("semantic", alphas, train_loss=0 * alphas)]
    guess = guess_of(EVENTS["alpha_c"], curves)
    assert guess.at == pytest.approx(1.52)
    assert located("alpha_c", pair(lambda m, a: a - 1.48), family, guess).alpha == pytest.approx(1.48)


def test_the_first_place_on_a_curve_within_limits(model, rule):
    excess = np.array([1.0, -3.0, -1.0, 1.0, np.nan, -1.0])
    curves = curve("semantic", np.arange(1.0, 7.0), gen_error=1 - excess, gen_error_linear=np.ones(6))
    first = guess_of(EVENTS[BASELINE], [curves])
    np.testing.assert_allclose((first.at, first.slope, first.low, first.high), (1.25, -4.0, 0.5, 3.0))
    np.testing.assert_allclose(np.mean(first.overlaps[0].theta), 1.25)
    second = guess_of(EVENTS[BASELINE], [curves], 2.0, 5.0)
    np.testing.assert_allclose((second.at, second.there), (3.5, 4.0))
    third = guess_of(EVENTS[BASELINE], [curves], 4.0)  # between points that are not neighbours: there is no state at 5
    np.testing.assert_allclose((third.at, third.low, third.high), (5.0, 2.0, 8.0))
    assert guess_of(EVENTS[BASELINE], [curves], 5.5) is None
    with pytest.raises(ta.InputError, match="start must enclose"):
        ta.find_event(model, INSTABILITY, rule, start=[curves])


@pytest.mark.parametrize(
    ("number", "exists", "status", "alpha"),
    [
        (lambda m, a: a - 1.3, lambda m, a: a < 1.6, ABSENT, 1.3),
        (lambda m, a: a - 1.55, lambda m, a: a < 1.6, ABSENT, 1.55),  # beyond the last state, which is at 1.518
        # The number keeps its sign down to alpha = 1, below which the search fails, or there is no state.
        (lambda m, a: -0.5 + 0 * a, lambda m, a: a > 1, ta.Status.max_steps, np.nan),
        (lambda m, a: -0.5 + 0 * a, lambda m, a: a > 1, ABSENT, None),
    ],
)
def test_an_event_about_which_nothing_is_known(family, number, exists, status, alpha):
    toy = semantic(number, where={"semantic": exists}, status=int(status))
    path = event_path(EVENTS[INSTABILITY], family)
    if alpha is None:
        with pytest.raises(ta.InputError, match=r"event must happen, there is none for alpha from 0\.05 to 3"):
            toy.run(path)
        return
    event = transition_of(EVENTS[INSTABILITY], family.model, toy.run(path))
    np.testing.assert_allclose(event.alpha, alpha, rtol=1e-5)
    assert event.status == (ta.Status.converged if event.ok else status) and ("not settled" in event.reason) != event.ok


@pytest.mark.parametrize(
    ("end", "best_value", "kind"), [(1e-5, 0.003, "inside"), (0.0046, 0.005, "inside"), (0.0035, 0.003, "lower end")]
)
def test_the_best_ridge_next_to_the_end_of_a_branch(model, rule, end, best_value, kind):
    """The state at .0045 that the second derivative asks for may not exist: one side then suffices."""

    def error(m, a):
        return np.exp(np.log(m.lam / (best_value * m.sigma / 0.5)) ** 2 / 9)

    toy = Toy({"semantic": nothing}, {"semantic": error}, where={"semantic": lambda m, a: m.lam > end})
    task = prepared_task(model, "semantic", rule, "lam", (1e-4, 1.0), None).at(model, jnp.asarray(1.5))
    best = best_of(task, toy.run(best_path(task)))
    assert best.place == kind and best.ok
    if kind == "inside":
        np.testing.assert_allclose([best.value, best.sensitivities.sigma], [best_value, best_value / 0.5], rtol=1e-3)
    else:
        assert "no state at lam = 0.002154" in best.reason


# alpha_l, which lies on one of three boundaries


def exchange(difference, positional, semantic, **options):
    """A pair whose branches beat the linear baseline above two alphas, functions of the model."""
    errors = {"positional": lambda m, a: 1 + positional(m) - a, "semantic": lambda m, a: 1 + semantic(m) - a}
    toy = pair(difference, **options)
    toy.numbers["gen_error"] = errors
    return toy


def crossing(m, a):
    return a - 1.25 - 2 * (m.omega - 0.3)


@pytest.mark.parametrize(
    ("difference", "positional", "semantic", "alpha", "slope"),
    [
        (crossing, 0.75, 2.0, 0.75, 1.0),  # the positional state beats the baseline before the exchange
        (crossing, 0.75, 1.0, 0.75, 1.0),
        (crossing, 2.0, 1.0, 1.25, 2.0),  # the exchange does
        (crossing, 2.0, 1.75, 1.75, 3.0),  # the semantic state does, after it
        (lambda m, a: nothing(m, a) - 1, 0.75, 0.5, 0.75, 1.0),  # the positional state is always the minimum
        (lambda m, a: nothing(m, a) + 1, 0.5, 1.75, 1.75, 3.0),
        (lambda m, a: np.where(a < 2, 1.0, -1.0), 0.5, 1.75, 1.75, 3.0),
        (lambda m, a: np.where(a < 2, 1.0, -1.0), 0.5, 2.5, np.nan, np.nan),  # the other branch is lower there
        (crossing, 9.0, 9.0, np.nan, np.nan),
    ],
)
def test_alpha_l(family, difference, positional, semantic, alpha, slope):
    def shifted(place, rate):
        return lambda m: place + rate * (m.omega - 0.3)

    toy = exchange(difference, shifted(positional, 1.0), shifted(semantic, 3.0))
    found = toy.run(ta.linear_crossing.paths(family.model, nodes=family.nodes)(family.model, None))
    np.testing.assert_allclose([found.alpha, found.sensitivities.omega], [alpha, slope], rtol=1e-5)
    assert found.event == "alpha_l" and found.status == (ABSENT if np.isnan(alpha) else ta.Status.converged)


def test_there_is_no_alpha_l_where_a_branch_was_not_settled(family):
    toy = exchange(crossing, lambda m: 0.75, lambda m: 2.0, where={"semantic": lambda m, a: False})
    found = toy.run(ta.linear_crossing.paths(family.model, nodes=family.nodes)(family.model, None))
    assert (found.event, found.status) == ("alpha_l", ta.Status.max_steps) and np.isnan(found.alpha)
    assert "the semantic branch was not settled" in found.reason


@pytest.mark.parametrize(
    ("bracket", "positional", "alpha"), [((2.0, 3.0), 1.245, 1.245), ((2.0, 3.0), 1.2, np.nan), ((0.1, 1.0), 2.0, 1.26)]
)
def test_a_bracket_that_does_not_contain_alpha_c(family, bracket, positional, alpha):
    """The range on either side of alpha_c, here 1.25, is one percent wide then."""
    toy = exchange(crossing, lambda m: positional, lambda m: 1.26)
    critical = toy.run(ta.critical_alpha.paths(family.model, family.nodes)(family.model, None))
    found = toy.run(transitions._alpha_l(family.model, critical, family, bracket))
    np.testing.assert_allclose(found.alpha, alpha, rtol=1e-5)


# Boundaries that are traced through omega

OMEGAS = np.array([0.1, 0.2, 0.3, 0.4])


def traced(event, toy, model, rule, omegas=OMEGAS, start=None, sensitivities=False, progress=lambda *_: None):
    axis = ta.Axis("omega", np.asarray(omegas))
    return toy.run(trace_path(event, Family(model, rule, SETTINGS), axis, start, sensitivities, progress))


@pytest.mark.parametrize("positional_is_global", [True, False])
def test_alpha_l_where_there_is_no_alpha_c(model, rule, positional_is_global):
    """At omega = .4 the losses do not cross. Alpha_l is there on the branch that is global: 1 + omega or 2 + omega."""
    sign = 1.0 if positional_is_global else -1.0

    def difference(m, a):
        return np.where(m.omega < 0.35, a - 1.5 - m.omega, -sign)

    toy = exchange(difference, lambda m: 1.0 + m.omega, lambda m: 2.0 + m.omega)
    table = traced("alpha_l", toy, model, rule)
    np.testing.assert_allclose(table.alpha, [1.1, 1.2, 1.3, 1.4 if positional_is_global else 2.4], rtol=1e-6)


def test_alpha_l_passes_from_boundary_to_boundary(model, rule):
    """It lies on the semantic baseline, at alpha_c, and on the positional baseline, at every place with its slope."""
    toy = exchange(lambda m, a: a - 1.5, lambda m: 2.45 - 3 * m.omega, lambda m: 2 - 3 * m.omega)
    reports = []
    table = traced("alpha_l", toy, model, rule, sensitivities=True, progress=lambda *c: reports.append(c))
    np.testing.assert_allclose(table.alpha, [1.7, 1.5, 1.5, 1.25], rtol=1e-6)
    np.testing.assert_allclose(table.slope, [-3.0, 0.0, 0.0, -3.0], atol=1e-6)
    assert [cell.event for cell in table.cells] == [BASELINE, "alpha_c", "alpha_c", "positional baseline"]
    assert table.exact.all() and table.question == "alpha_l"
    assert reports == sorted(reports) and (reports[0], reports[-1]) == ((0, 12), (12, 12))
    never = exchange(lambda m, a: a - 1.5, lambda m: 9.0, lambda m: 2 - 3 * m.omega)  # the positional state never does
    np.testing.assert_allclose(traced("alpha_l", never, model, rule).alpha, [1.7, 1.5, 1.5, 1.5], rtol=1e-6)
    with pytest.raises(ta.InputError, match="must begin where the event happens"):
        traced("alpha_l", exchange(lambda m, a: a - 1.5, lambda m: 9.0, lambda m: 9.0), model, rule)


def test_an_event_that_was_not_found_has_not_converged(model, rule):
    table = traced("alpha_c", pair(lambda m, a: np.where(m.omega < 0.35, a - 1.5, 1.0)), model, rule)
    assert table.status_name == ["converged"] * 3 + ["absent"]
    assert "the losses do not cross" in table.reason[3]


CURVE = Polynomial([1.0, 2.0, 30.0, 40.0])


@pytest.mark.parametrize("exact", [False, True])
def test_a_boundary_is_traced_with_its_slope(model, rule, exact):
    omegas = np.array([0.3, 0.32, 0.35, 0.36, 0.4])
    toy = semantic(lambda m, a: a - CURVE(m.omega))
    table = traced(INSTABILITY, toy, model, rule, omegas, Guess(4.0, starts(model, "semantic")), exact)
    np.testing.assert_allclose(table.alpha, CURVE(omegas), rtol=1e-7)
    np.testing.assert_allclose(table.slope, CURVE.deriv()(omegas), rtol=1e-6 if exact else 2e-2)
    assert (table.exact == exact).all()


def test_a_boundary_that_jumps_is_found_again(model, rule):
    """At omega = .35 it jumps from 1.5 to 2.2, and the branch begins at 2.0 from there on; at .5 there is no branch."""
    toy = semantic(
        lambda m, a: a - np.where(m.omega < 0.35, 1.5, 2.2),
        where={"semantic": lambda m, a: a > 2.0 if 0.35 < m.omega < 0.45 else m.omega < 0.45},
        status=int(ABSENT),
    )
    guess = Guess(1.45, starts(model, "semantic"))
    table = traced(INSTABILITY, toy, model, rule, [0.2, 0.3, 0.4, 0.5], guess)
    np.testing.assert_allclose(table.alpha, [1.5, 1.5, 2.2, np.nan], rtol=1e-5)
    reason = "there is no semantic branch at alpha = 3.6, where the search ended"
    assert table.reason.tolist() == ["", "", "", reason] and table.status_name[-1] == "absent"
    assert table.failures == (f"omega = 0.5: {reason}",) and f"absent: {reason}" in table.summary()
    with pytest.raises(ta.InputError, match=r"none at the first near alpha = 1\.45: there is no semantic branch at"):
        traced(INSTABILITY, toy, model, rule, [0.5, 0.6], guess)


def test_alpha_c_is_searched_between_cells_that_lack_a_branch(theory, model, rule):
    """The losses cross at 1 + omega. The semantic branch begins .1 below; a row with a cell in between is not searched.

    Where the searches for the semantic branch fail, instead of showing that it is absent, nothing follows.
    """
    omegas, begins = [0.05, 0.2, 0.4, 0.7], {"semantic": lambda m, a: a > 0.9 + m.omega}
    for status, expected in ((ABSENT, [np.nan, 1.2, 1.4, 1.7]), (ta.Status.max_steps, [np.nan] * 4)):
        theory(pair(lambda m, a: a - 1 - m.omega, where=begins, status=int(status)))
        result = ta.phase_diagram(model, alpha=[0.5, 1.0, 1.5, 2.0], omega=omegas, nodes=rule, devices=1)
        np.testing.assert_allclose(result.crossings[:, 0], np.outer(expected, [1, 1]), rtol=1e-6)
