from types import SimpleNamespace

import equinox as eqx
import jax
import made
import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_C_SENSITIVITIES, ALPHA_L
from channels import NOISE, Noisy

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES, PAIR
from tiedattn_jax.phases import locate, trace as tracing
from tiedattn_jax.phases.events import Event
from tiedattn_jax.phases.locate import Family, Guess, Zero, event_path, guess_among
from tiedattn_jax.theory.engine import run_one

OMEGAS = [0.3, 0.33, 0.36]


@pytest.fixture(scope="module")
def trace(model, lines):
    def trace_event(event, guess, values=OMEGAS, **options):
        start = [ta.solve(model, guess, b, lines, start=BRANCHES[b].start(model)) for b in ta.EVENTS[event].branches]
        return ta.sweep(model, event, omega=values, nodes=lines, follow=True, start=start, **options)

    return trace_event


@pytest.fixture(scope="module")
def critical(trace):
    return trace("alpha_c", 1.25)


def test_alpha_c(critical):
    assert abs(critical.alpha[0] - ALPHA_C) < 3 * critical.stderr()[0]
    np.testing.assert_allclose(critical.slope[0], ALPHA_C_SENSITIVITIES["omega"], rtol=1e-2)
    # The slopes are those of the curve on the same nodes: its rise agrees with Simpson's rule.
    rise = 0.06 / 6 * (critical.slope[0] + 4 * critical.slope[1] + critical.slope[2])
    np.testing.assert_allclose(critical.alpha[2] - critical.alpha[0], rise, rtol=2e-3)
    np.testing.assert_allclose(critical.interpolant(0.33), critical.alpha[1])


@pytest.mark.parametrize(
    ("name", "guess", "alpha", "tolerance"),
    [
        ("semantic baseline", 1.5, ALPHA_L, 0.0),
        ("semantic pitchfork", 0.72, 0.7192, 0.002),
    ],
)
def test_baseline_and_pitchfork(trace, critical, name, guess, alpha, tolerance):
    boundary = trace(name, guess, OMEGAS[:2])
    assert abs(boundary.alpha[0] - alpha) < 3 * boundary.stderr()[0] + tolerance
    assert np.all(boundary.stderr() < 0.05)
    assert boundary.intersections(critical) == []


def test_the_first_place_may_lie_past_the_end_of_the_branch(monkeypatch, model, lines, semantic_states):
    """The first place may lie past the branch's end, as `there` is an alpha with a state.

    If the search ends without a state, the error says so.
    """
    guesses = []

    def search(event, family, guess, *, exact):
        guesses.append(guess)
        absent = eqx.tree_at(lambda s: s.status, semantic_states, semantic_states.status + int(ta.Status.absent))
        return made.finished_path(Zero(np.array(0.55), (absent,), np.full(4, np.nan), None, np.full(4, np.nan)))

    monkeypatch.setattr(tracing, "event_path", search)
    guess = Guess(0.6, (BRANCHES["semantic"].start(model),), low=0.5, high=0.7, there=0.7)
    text = "got none at the first near alpha = 0.6: there is no semantic branch at alpha = 0.55, where the search ended"
    with pytest.raises(ta.InputError, match=f"values must begin where the event happens, {text}"):
        ta.sweep(model, "semantic instability", omega=[0.3, 0.2], nodes=lines, follow=True, start=guess)
    assert guesses == [guess]


def test_what_is_missing_says_why(monkeypatch, model, lines, semantic_states):
    """A boundary says why a value is missing: the branch is gone at the second value, and a search finds nothing."""

    zero = Zero(np.array(0.7), (semantic_states,), np.zeros(4), None, np.full(4, np.nan), 1.0, True)
    absent = eqx.tree_at(lambda s: s.status, semantic_states, semantic_states.status + int(ta.Status.absent))
    zeros = iter([zero, zero._replace(at=np.array(0.55), states=(absent,), converged=False)])
    monkeypatch.setattr(tracing, "event_path", lambda *args, **options: made.finished_path(next(zeros)))
    monkeypatch.setattr(tracing, "guess_among", lambda *args: made.finished_path(None))
    guess = Guess(0.7, (BRANCHES["semantic"].start(model),))
    boundary = ta.sweep(model, "semantic instability", omega=[0.3, 0.2], nodes=lines, follow=True, start=guess)
    reason = "there is no semantic branch at alpha = 0.55, where the search ended"
    assert boundary.reason.tolist() == [reason, ""] and boundary.status_name == ["absent", "converged"]
    assert boundary.failures == (f"omega = 0.2: {reason}",) and f"  absent: {reason}\n" in boundary.summary()


def test_an_entry_of_the_mixing(model, lines, critical):
    values = [0.38, 0.4, 0.42]
    start = [ta.solve(model, 1.25, b, lines, start=BRANCHES[b].start(model)) for b in ("positional", "semantic")]
    calls = []
    axis, options = ta.Axis("mixing[0,1]", values), {"start": start, "progress": lambda *c: calls.append(c)}
    boundary = ta.sweep(model, "alpha_c", axis, nodes=lines, follow=True, **options)
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert abs(boundary.alpha[1] - ALPHA_C) < 3 * boundary.stderr()[1]
    rise = 0.04 / 6 * (boundary.slope[0] + 4 * boundary.slope[1] + boundary.slope[2])
    np.testing.assert_allclose(boundary.alpha[2] - boundary.alpha[0], rise, rtol=1e-2)


def test_thresholds_of_the_optimal_learner():
    """(1 + Delta)^2 / 6 with Delta = noise / sigma^2 and exact slopes, traced or swept, and 1 / L."""
    sigma = np.array([0.4, 0.5])
    delta = NOISE**2 / sigma**2
    traced = ta.sweep(Noisy(), "weak_recovery", sigma=sigma, follow=True)
    swept = ta.sweep(Noisy(), "weak_recovery", sigma=sigma)
    for boundary in (traced, swept):
        np.testing.assert_allclose(boundary.alpha, (1 + delta) ** 2 / 6, rtol=1e-9)
        np.testing.assert_allclose(boundary.slope, -2 * (1 + delta) * delta / sigma / 3, rtol=1e-9)
        assert boundary.exact.all() and boundary.ok.all()
    listed = ta.sweep([ta.DotProduct(sigma=s) for s in sigma], "perfect_recovery")
    np.testing.assert_array_equal(listed.alpha, [0.5, 0.5])
    assert np.isnan(listed.slope).all()
    one_fails = ta.sweep(ta.DotProduct(), "weak_recovery", omega=[0.3, 1.0])
    np.testing.assert_allclose(one_fails.alpha, [1 / 6, np.nan])
    assert "omega below one" in one_fails.reason[1]
    with pytest.raises(ta.InputError, match="alpha must be left out"):
        ta.sweep(Noisy(), "weak_recovery", sigma=sigma, alpha=1.0)
    with pytest.raises(ta.InputError, match="start must be None"):
        ta.sweep(Noisy(), "weak_recovery", sigma=sigma, follow=True, start=[])


@pytest.mark.usefixtures("unchecked")
def test_between_neighbours_and_between_the_last_state_and_the_next_alpha(monkeypatch):
    """A first change lies between neighbours in the list, or between the last state and the next alpha.

    The branch ends at 1.6 and has states at 1.5, 1.2 and 1.1; nothing is solved beyond the place that is found.
    """
    alphas, solved = np.array([3.0, 2.0, 1.5, 1.2, 1.1]), []

    def walk(model, places, branch, nodes, settings):
        assert (model, places, branch, nodes, settings) == ("model", list(alphas), "semantic", "nodes", "settings")

        def step(alpha):
            solved.append(alpha)
            exists = alpha < 1.6
            state = SimpleNamespace(overlaps=np.array([alpha]), has_state=np.array([exists]))
            return made.finished_path(SimpleNamespace(alpha=alpha, exists=exists, replicates=state))

        return (step(alpha) for alpha in places)

    monkeypatch.setattr(locate, "walk", walk)

    def search(crossing):
        event = Event("an event", ("semantic",), lambda s: s.overlaps - crossing)
        solved.clear()
        return run_one(guess_among(event, Family("model", "nodes", "settings"), alphas))

    guess = search(1.3)
    np.testing.assert_allclose((guess.at, guess.slope, guess.low, guess.high), (1.3, 1.0, 1.2, 1.5))
    assert solved == [3.0, 2.0, 1.5, 1.2]
    guess = search(1.55)  # no neighbours in the list enclose it, because the branch ends at 1.6
    assert (guess.low, guess.high, guess.there) == (1.5, 2.0, 1.5) and np.isnan(guess.slope)
    assert search(1.0) is None
    monkeypatch.setattr(locate, "SEARCH", alphas)
    event = Event("an event", ("semantic",), lambda s: s.overlaps - 1.0)
    with pytest.raises(ta.InputError, match=r"event must happen, there is none for alpha from 1\.1 to 3"):
        run_one(event_path(event, Family("model", "nodes", "settings")))


@pytest.mark.usefixtures("unchecked")
def test_the_branches_of_an_event_are_walked_at_once(monkeypatch):
    requests = []

    def walk(model, places, branch, nodes, settings):
        return (made.finished_path(requests.append((branch, alpha))) for alpha in places)

    monkeypatch.setattr(locate, "walk", walk)
    path = guess_among(ta.EVENTS["alpha_c"], Family("model", "nodes", "settings"), np.array([3.0, 2.0]))
    steps = next(path)
    assert isinstance(steps, list) and len(steps) == 2 and requests == [("positional", 3.0), ("semantic", 3.0)]
    path.close()
    for step in steps:
        step.close()


def test_alpha_l_is_one_of_three(model, lines, monkeypatch):
    values, calls = np.array([0.1, 0.2, 0.3]), []

    def boundary(event, alpha):
        return made.events(event, "omega", values, np.array(alpha), np.full(3, 0.1), np.array(alpha) / 2)

    parts = {
        "alpha_c": boundary("alpha_c", [1.0, 1.0, 1.0]),
        "semantic baseline": boundary("semantic baseline", [1.5, 0.5, 0.4]),
        "positional baseline": boundary("positional baseline", [1.2, 1.3, 0.7]),
    }
    parts["positional baseline"] = eqx.tree_at(lambda b: b.exact, parts["positional baseline"], np.zeros(3, bool))

    class Tracer:
        def __init__(self, event, model, parameter, nodes, settings, exact):
            calls.append((event.name, parameter.name, exact))
            self.event = event.name

        def boundary(self, places, guess, report):
            assert guess is None
            np.testing.assert_array_equal(places, values)
            report(0, 3)
            if self.event not in parts:
                raise ta.InputError("event", "must happen")
            report(3, 3)
            yield from ()
            return parts[self.event]

    monkeypatch.setattr(tracing, "_Tracer", Tracer)
    reports = []
    result = ta.sweep(
        model, "alpha_l", omega=values, nodes=lines, follow=True, sensitivities=True,
        progress=lambda *c: reports.append(c),
    )  # fmt: skip
    assert calls == [(name, "omega", True) for name in parts]
    assert reports[0] == (0, 9) and reports[-1] == (9, 9) and sorted(reports) == reports
    assert result.question == "alpha_l"
    np.testing.assert_array_equal(result.alpha, [1.5, 1.0, 0.7])  # semantic baseline, alpha_c, positional baseline
    np.testing.assert_array_equal(result.slope, [0.75, 0.5, 0.35])
    np.testing.assert_array_equal(result.exact, [True, True, False])
    assert [cell.event for cell in result.cells] == ["semantic baseline", "alpha_c", "positional baseline"]
    del parts["positional baseline"]  # the positional state nowhere beats the baseline
    alone = ta.sweep(model, "alpha_l", omega=values, nodes=lines, follow=True)
    np.testing.assert_array_equal(alone.alpha, [1.5, 1.0, 1.0])
    assert calls[-3:] == [("alpha_c", "omega", True), *((f"{b} baseline", "omega", False) for b in PAIR[::-1])]
    del parts["semantic baseline"]
    with pytest.raises(ta.InputError, match="event must happen"):
        ta.sweep(model, "alpha_l", omega=values, nodes=lines, follow=True)
    with pytest.raises(ta.InputError, match='start must be None for "alpha_l"'):
        ta.sweep(model, "alpha_l", omega=values, nodes=lines, follow=True, start=Guess(1.5, ()))


def test_where_small_starts_separate_is_a_boundary():
    omegas = np.array([0.2, 0.3])
    traced = ta.sweep(ta.DotProduct(), "encodings separate", omega=omegas, follow=True)
    np.testing.assert_allclose(traced.alpha[1], 0.41904, atol=1e-5)  # from another program
    teacher = ta.sweep(ta.DotProduct(), "teacher separates", omega=omegas)
    np.testing.assert_allclose(teacher.alpha[1], 1.20866, atol=1e-5)
    assert np.all(teacher.exact) and np.all(teacher.status == ta.Status.converged)
    step = np.diff(teacher.alpha) / np.diff(omegas)
    np.testing.assert_allclose(np.mean(teacher.slope), step, rtol=0.02)
    with pytest.raises(ta.InputError, match="without kinks"):
        ta.sweep(ta.ReLUAttention(), "encodings separate", omega=omegas)


OMEGA = np.array([0.3, 0.32, 0.35, 0.36, 0.4])


def parabola(v):
    return 1 + 2 * v + 30 * v**2


@pytest.mark.parametrize("exact", [False, True])
def test_the_next_point_is_extrapolated(monkeypatch, model, lines, semantic_states, exact):
    """The last three points predict the next one by a parabola; one point does by its slope, if that is known.

    A point that is not found from its prediction is searched for at alphas around the last one.
    """
    guesses, searches = [], []

    def search(event, family, guess, *, exact):
        value = float(family.model.omega)
        guesses.append((value, float(guess.at), float(guess.slope), exact, family.settings))
        found = not (value == 0.36 and len([g for g in guesses if g[0] == 0.36]) == 1)
        alpha, rates, slopes = np.array(parabola(value)), None, np.full(4, np.nan)
        if exact:  # d alpha / d omega is minus the rate over the slope
            rates, slopes = jax.tree.map(lambda a: np.zeros((4, *np.shape(a))), model), np.full(4, 2.0)
            rates = eqx.tree_at(lambda m: m.omega, rates, np.full(4, -2.0 * (2 + 60 * value)))
        return made.finished_path(Zero(alpha, (semantic_states,), np.zeros(4), rates, slopes, 7.0, found))

    def around(event, family, alphas):
        searches.append(alphas)
        return made.finished_path(Guess(5.0, guess.overlaps))

    monkeypatch.setattr(tracing, "event_path", search)
    monkeypatch.setattr(tracing, "guess_among", around)
    guess = Guess(4.0, (BRANCHES["semantic"].start(model),))
    table = ta.sweep(
        model, "semantic instability", omega=OMEGA, nodes=lines, follow=True, start=guess, sensitivities=exact
    )
    np.testing.assert_allclose(table.alpha, parabola(OMEGA), rtol=1e-12)
    slope = 2 + 60 * OMEGA[0]
    second = parabola(0.3) + 0.02 * slope if exact else parabola(0.3)
    third = parabola(0.32) + 0.03 * (parabola(0.32) - parabola(0.3)) / 0.02
    expected = [4.0, second, third, parabola(0.36), 5.0, parabola(0.4)]
    np.testing.assert_allclose([at for _, at, *_ in guesses], expected, rtol=1e-9)
    assert [value for value, *_ in guesses] == [0.3, 0.32, 0.35, 0.36, 0.36, 0.4]
    assert [s for _, _, s, *_ in guesses[1:4]] == [7.0] * 3 and {e for *_, e, _ in guesses} == {exact}
    np.testing.assert_allclose(searches, [parabola(0.35) * np.geomspace(1.8, 0.4, 9)], rtol=1e-12)
    settings = guesses[0][-1]
    assert (float(settings.tol), int(settings.warm_steps), int(settings.max_steps)) == (
        1e-4, 20, int(ta.Settings().max_steps),
    )  # fmt: skip
    assert table.exact.all() == exact
    np.testing.assert_allclose(table.slope, 2 + 60 * OMEGA, rtol=1e-6)
