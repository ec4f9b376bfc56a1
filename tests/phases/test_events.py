"""Events: the search for a zero of a number, the numbers of all events, and sensitivities against differences."""

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
from tiedattn_jax.phases.events import EVENTS, as_event, rs_shift
from tiedattn_jax.phases.family import Family
from tiedattn_jax.phases.locate import Guess, Reading, crossings, event_path, number_of, transition_of
from tiedattn_jax.phases.secant import zero_between
from tiedattn_jax.theory.engine import run_one

pytestmark = pytest.mark.usefixtures("unchecked")
ABSENT = int(ta.Status.absent)


def cubic(zero):
    return lambda a: a**3 - zero**3


@pytest.mark.parametrize(
    ("fn", "zero", "looks"),
    [
        (cubic(1.55), 1.55, 15),
        (lambda a: np.arctan(50 * (a - 1.55)), 1.55, 40),  # the bracket shrinks where the secant would leave it
        (cubic(np.sqrt(0.4)), np.sqrt(0.4), 1),  # exactly at the first reading
        (cubic(5.0), np.nan, 40),
        (cubic(0.05), np.nan, 40),
        (cubic(np.nan), np.nan, 40),
        (cubic(0.1002), 0.1002, 40),  # a zero within a thousandth of an end of the bracket may lie beyond it
        (cubic(0.10005), np.nan, 40),
        (cubic(3.99), 3.99, 40),
        (cubic(3.9985), np.nan, 40),
    ],
)
def test_a_zero_in_a_bracket(fn, zero, looks):
    path = zero_between(lambda a, k: made.finished_path((fn(a), k + 1)), 0.1, 4.0, 0, 1e-9)
    root, evaluations, converged = run_one(path)
    assert converged == np.isfinite(zero) and evaluations <= looks
    if converged:
        np.testing.assert_allclose(root, zero, rtol=1e-8)


def states(**numbers):
    """The states of three replicates, with given numbers; those that ran out of steps have a state."""
    return made.states(ta.DotProduct(), scatter=(0.0,) * 3, **{k: np.broadcast_to(a, 3) for k, a in numbers.items()})


def test_the_number_of_every_event():
    state = states(growth_theta=1.2, growth_m=0.7, gen_error=0.3, gen_error_linear=0.4)
    numbers = {
        "baseline": (0.1, 0.1),
        "instability": (0.3, 0.2),
        "pitchfork": (0.2, -0.3),
    }  # 0.3: stable above the event
    for name, pair in numbers.items():
        for branch, number in zip(("semantic", "positional"), pair, strict=True):
            np.testing.assert_allclose(EVENTS[f"{branch} {name}"].value(state), number)
    losses = states(train_loss=0.5, gen_error=0.3), states(train_loss=0.2, gen_error=0.4)
    for name in ("alpha_c", "crossing"):
        np.testing.assert_allclose(EVENTS[name].value(*losses), 0.3)
    assert np.all(np.isnan(EVENTS["crossing"].value(losses[0], losses[0])))  # one state
    assert EVENTS["alpha_c"].branches == ("positional", "semantic")
    single_branches = {name: event.branches for name, event in EVENTS.items() if len(event.branches) == 1}
    for name, (branch,) in single_branches.items():
        assert branch == ("uninformed" if "pitchfork" in name else name.split()[0])


@pytest.mark.parametrize(("status", "expected"), [([0, 2, ABSENT], 0.1), ([0, ABSENT, ABSENT], np.nan)])
def test_what_most_replicates_lack_has_no_number(model, status, expected):
    state = states(gen_error=[0.3, 0.3, 9.0], gen_error_linear=0.4, status=status)
    number = number_of(EVENTS["semantic baseline"], [ta.results.FixedPoint(model, jnp.ones(()), state, "semantic")])
    np.testing.assert_allclose(number, expected)


def transition(first=(0, 2, 0), second=(0, 0, 0), **changes):
    """alpha_c from a zero at one, in whose replicates the number has given values and slopes."""
    pair = tuple(states(status=s, residual=1e-3) for s in (first, second))
    numbers = np.array([0.1, 0.3, 0.2]), None, np.array([2.0, 2.0, 4.0])
    zero = Reading(np.array(1.0), pair, *numbers, slope=2.0, converged=True)
    return transition_of(EVENTS["alpha_c"], ta.DotProduct(), zero._replace(**changes))


RATES = {"sigma": np.array([4.0, 6.0, 8.0])}
LOST, PARTLY = {"converged": False, "rates": RATES}, {"value": np.array([0.1, np.nan, 0.2])}


def test_roots_and_sensitivities_of_the_replicates():
    """Each replicate's zero lies one Newton step away from the common place, which may have a slope of its own."""
    roots, found = np.array([0.95, 0.85, 0.9]), transition()
    np.testing.assert_allclose((found.alpha, found.stderr), (roots.mean(), error_bar(roots)))
    assert int(found.status) == 2 and found.sensitivities is None and np.isnan(found.ended_at)
    exact = transition(rates=RATES)
    np.testing.assert_allclose(exact.alpha, np.mean([0.95, 0.85, 0.95]))
    np.testing.assert_allclose(exact.sensitivities["sigma"], np.mean([-2.0, -3.0, -2.0]))
    np.testing.assert_allclose(exact.sensitivities_stderr["sigma"], error_bar(np.array([-2.0, -3.0, -2.0])))


@pytest.mark.parametrize(
    ("first", "second", "changes", "status"),
    [
        # A replicate that lacks the state does not count. If most lack it, there is no number.
        ((0, 6, 0), (0, 0, 0), PARTLY, 1),
        ((0, 3, 2), (0, 0, 0), PARTLY, 2),
        ((6, 6, 0), (0, 0, 0), PARTLY, 6),
        ((3, 3, 0), (0, 0, 0), PARTLY, 3),
        # An event that was not found is absent, unless a branch was not settled.
        ((0, 2, 0), (0, 0, 0), LOST, 6),
        ((0, 2, 0), (8, 8, 8), LOST, 8),
        ((6, 6, 6), (0, 2, 0), LOST, 6),
        ((6, 6, 6), (6, 6, 6), LOST, 6),
    ],
)
def test_the_status_of_an_event(first, second, changes, status):
    """One that was not found has no numbers but the place where the search ended."""
    event = transition(first, second, **changes)
    assert int(event.status) == status and np.isfinite([event.alpha, event.stderr]).all() == (status < 3)
    if changes is LOST:
        slopes = event.sensitivities["sigma"], event.sensitivities_stderr["sigma"]
        assert float(event.ended_at) == 1.0 and np.isnan([event.alpha, *slopes]).all()


@pytest.mark.parametrize("converged", [True, False])
def test_an_event_that_was_not_found_has_no_derivative(converged):
    gradients = jax.tree.map(lambda a: np.ones((3, *a.shape)), ta.DotProduct())
    zero = Reading(np.array(1.0), (states(residual=1e-3),) * 2, np.zeros(3), gradients, np.ones(3), 1.0, converged)
    gradient = jax.grad(lambda m: transition_of(EVENTS["alpha_c"], m, zero).alpha)(ta.DotProduct())
    assert gradient.sigma == (-1.0 if converged else 0.0)


@pytest.mark.full
def test_places_on_curves(model, lines):
    curves = [
        ta.sweep(ta.solve, model, branch=branch, follow=True, alpha=[1.1, 1.4, 1.6], nodes=lines) for branch in PAIR
    ]
    (guess,) = crossings(EVENTS["alpha_c"], curves)
    assert guess.low == 1.1 and guess.high == 1.4 and guess.slope > 0
    np.testing.assert_allclose(guess.at, ALPHA_C, atol=0.02)
    critical = ta.critical_alpha(model, lines, start=curves)
    assert abs(critical.alpha - ALPHA_C) <= 3 * critical.stderr and bool(critical.ok)
    crossing = ta.linear_crossing(model, critical, lines, start=curves)
    assert abs(crossing.alpha - ALPHA_L) <= 3 * crossing.stderr and crossing.event == "alpha_l"


@pytest.mark.full
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


# Derivatives estimate many nodes, differences belong to these: lines of order 5 differ by 12 % at a fold.
@pytest.mark.full
@pytest.mark.parametrize(("order", "tol"), [(5, 0.15), (7, 0.03)])
def test_a_fold_and_its_sensitivities(order, tol):
    """The positional branch at omega = .235 turns back at alpha = 2.174(1), and its derivatives equal differences."""
    rule = ta.Lines(order, replicates=1).rule(ta.DotProduct())
    x = ta.solve(ta.DotProduct(omega=0.235), 2.1, "positional", rule, start=START).overlaps
    guess = Guess(2.1, (x,), low=2.05, high=2.3)

    def fold(omega, sensitivities=False):
        model = ta.DotProduct(omega=omega)
        return ta.find_event(model, "positional fold", rule, start=guess, sensitivities=sensitivities)

    found = fold(0.235, True)
    assert bool(found.ok) and abs(found.alpha - 2.174) < 0.03
    difference = float(fold(0.236).alpha - fold(0.234).alpha) / 2e-3
    np.testing.assert_allclose(difference, found.sensitivities.omega, rtol=tol)


START = ta.Overlaps(*(jnp.full((2, 1, 1), v) for v in (0.04, 11.0, 0.0)), 0.21 * jnp.array([[1.0], [-1.0]]))


@pytest.mark.full
def test_a_fold_along_another_number():
    """The fold in alpha at omega = .235 is one in omega at its alpha, where d omega / d alpha is the inverse slope."""
    model, event = ta.DotProduct(omega=0.235), EVENTS["positional fold"]
    rule, settings = ta.Lines(5, replicates=1).rule(model), ta.Settings()
    x = ta.solve(model, 2.1, "positional", rule, start=START).overlaps
    fold = run_one(event_path(event, Family(model, rule, settings), Guess(2.1, (x,), low=2.05, high=2.3)))
    alpha = jnp.asarray(fold.at[0])
    x = ta.solve(ta.DotProduct(omega=0.24), alpha, "positional", rule, start=x).overlaps
    family = Family(model, rule, settings, Parameter("omega"), alpha)
    other = run_one(event_path(event, family, Guess(0.24, (x,), low=0.23, high=0.25)))
    np.testing.assert_allclose(other.at, 0.235, rtol=1e-4)
    _, by_alpha = other.rates
    np.testing.assert_allclose(-by_alpha / other.slopes, -fold.slopes / fold.rates.omega, rtol=1e-3)


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
