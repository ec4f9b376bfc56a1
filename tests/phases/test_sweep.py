"""Sweeps of many settings in one pool, through alpha, another number, or a list of models: states and events."""

import importlib
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import POOL_ROUNDING

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.phases import locate, transitions
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.phases.follow import Follower
from tiedattn_jax.phases.locate import SEARCH, Guess, Search, Zero
from tiedattn_jax.plotting.style import LABELS

sweep_module = importlib.import_module("tiedattn_jax.phases.sweep")  # `sweep` itself is the function

SIGMAS = [0.5, 0.55]


def with_sigma(model, sigma):
    return eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(sigma))


@pytest.fixture(scope="module")
def curve(model, lines):
    return ta.sweep(model, [0.6, 0.7, 0.8, 1.1, 2.0], "semantic", lines)


def test_through_alpha(curve, model, lines):
    np.testing.assert_allclose(curve.alphas, [0.7, 0.8, 1.1, 2.0])  # the branch ends at .7, nothing below is tried
    np.testing.assert_array_equal(curve.exists, [False, True, True, True])
    np.testing.assert_array_equal(curve.at, curve.alphas)
    assert int(curve.points[0].status) == ta.Status.absent and curve.parameter == "alpha"
    assert np.all(np.diff(curve.values(lambda p: p.train_loss)[1:]) > 0)
    direct = ta.solve(model, 2.0, "semantic", lines)
    np.testing.assert_allclose(curve.points[-1].overlaps.q, direct.overlaps.q, rtol=1e-4)
    assert len(curve.plot().axes) == 3


def test_damped_steps_are_for_the_first_point(model, semantic_states, lines, monkeypatch):
    calls = []

    def search(self, model, alpha, guess, was_absent):
        calls.append((float(alpha), int(self.settings.warm_steps), float(self.settings.tol), float(guess.theta.mean())))
        return made.finished_path(semantic_states)

    monkeypatch.setattr(Follower, "search", search)
    curve = ta.sweep(model, [1.0, 3.0, 2.0], "semantic", lines, settings=ta.Settings(tol=1e-3, warm_steps=7))
    np.testing.assert_array_equal(curve.alphas, [1.0, 2.0, 3.0])
    first, last = (float(x.theta.mean()) for x in (BRANCHES["semantic"].start(model), semantic_states.overlaps))
    np.testing.assert_allclose(calls, [(3.0, 7, 1e-3, first), (2.0, 0, 1e-3, last), (1.0, 0, 1e-3, last)])


@pytest.mark.usefixtures("unchecked")
def test_through_alpha_it_stops_beyond_the_end(model, lines, monkeypatch):
    """A sweep through alpha stops beyond the end of a branch once it was met, with one point where it is absent."""
    has_state = {6.0: False, 5.0: False, 4.0: True, 3.0: True, 2.0: False, 1.0: True}

    def walk(model, alphas, branch, nodes, settings):
        assert branch == "semantic" and nodes is lines and float(settings.tol) == 1e-4
        return (made.finished_path(SimpleNamespace(alpha=a, exists=has_state[a], size=10 * a)) for a in alphas)

    monkeypatch.setattr(sweep_module, "walk", walk)
    calls = []
    curve = ta.sweep(model, list(has_state), "semantic", lines, progress=lambda *c: calls.append(c))
    np.testing.assert_array_equal(curve.alphas, [2.0, 3.0, 4.0, 5.0, 6.0])
    assert calls == [(k, 6) for k in (0, 1, 2, 3, 4, 5, 6)]
    for size in (lambda p: p.size, "size"):
        np.testing.assert_array_equal(curve.values(size), [np.nan, 30.0, 40.0, np.nan, np.nan])
    assert ta.sweep(model, list(has_state), None, lines, branch="semantic").branch == "semantic"


@pytest.fixture(scope="module")
def states(model, lines):
    calls = []
    result = ta.sweep(model, "sigma", SIGMAS, lines, alpha=2.0, progress=lambda *c: calls.append(c))
    assert calls == [(0, 2), (1, 2), (2, 2)]
    return result


def test_states_through_a_number(states, model, lines):
    assert (states.branch, states.parameter) == ("semantic", "sigma")
    np.testing.assert_array_equal(states.at, SIGMAS)
    np.testing.assert_array_equal(states.alphas, 2.0)
    for sigma, point in zip(SIGMAS, states.points, strict=True):
        direct = ta.solve(with_sigma(model, sigma), 2.0, "semantic", lines)
        for a, b in zip(jax.tree.leaves(point), jax.tree.leaves(direct), strict=True):
            np.testing.assert_allclose(a, b, POOL_ROUNDING)  # the same searches were done
    report = states.to_dict()
    assert (report["parameter"], report["values"]) == ("sigma", SIGMAS) and len(report["points"]) == 2
    assert states.summary().startswith("semantic branch at 2 values of sigma from 0.5 to 0.55")
    assert "from 0.5 to 0.55" in states.describe().status and states.describe().tables[0][1][0][0] == "sigma"


def test_states_of_a_list_of_models(states, model, lines):
    result = ta.sweep([with_sigma(model, s) for s in SIGMAS], nodes=lines, alpha=[2.0, 2.0], settings=ta.Settings())
    assert result.parameter == "model" and result.at.tolist() == [0.0, 1.0]
    for a, b in zip(result.points, states.points, strict=True):
        np.testing.assert_array_equal(a.overlaps.q, b.overlaps.q)


@pytest.fixture
def canned(semantic_states, monkeypatch):
    """Replace solves by a known state, and record the requests: sigma, alpha, the branch and the other arguments."""
    requests = []

    def path(model, alpha, branch, rule, start, settings, *, fallback):
        requests.append((float(model.sigma), float(alpha), branch, rule, settings, fallback))
        return made.finished_path((semantic_states, rule, None))

    monkeypatch.setattr(sweep_module, "default_path", path)
    return requests


def test_what_states_are_solved_with(canned, model, lines):
    settings = ta.Settings(tol=1e-3)
    result = ta.sweep(model, "sigma", SIGMAS, lines, branch="positional", alpha=[1.0, 2.0], settings=settings)
    assert canned == [(s, a, "positional", lines, settings, False) for s, a in zip(SIGMAS, (1.0, 2.0), strict=True)]
    assert [float(p.alpha) for p in result.points] == [1.0, 2.0] and result.branch == "positional"
    assert [float(p.model.sigma) for p in result.points] == SIGMAS
    canned.clear()
    ta.sweep(model, "mixing[0,1]", [0.4], branch=None, alpha=3.0)
    ((_, alpha, branch, rule, used_settings, fallback),) = canned
    assert (alpha, branch, fallback) == (3.0, None, True) and rule.size == ta.default_nodes(model).size
    assert float(used_settings.tol) == float(ta.Settings().tol)


def test_a_setting_that_fails_leaves_the_others(model, lines, semantic_states, monkeypatch):
    """A setting that fails leaves the others and says why.

    If all of them fail, the first exception is raised, with the setting's name.
    """

    def path(model, alpha, branch, rule, start, settings, *, fallback):
        if round(float(model.sigma), 6) in bad:
            raise ZeroDivisionError("of the loss")
        return made.finished_path((jax.tree.map(np.asarray, semantic_states), rule, None))

    monkeypatch.setattr(sweep_module, "default_path", path)
    bad, calls = {0.4}, []
    result = ta.sweep(
        model, "sigma", [0.3, 0.4, 0.5], lines, alpha=[1.0, 2.0, 3.0], progress=lambda *c: calls.append(c)
    )
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert result.failures == ("sigma = 0.4: ZeroDivisionError: of the loss",)
    assert result.exists.tolist() == [True, False, True] and result.alphas.tolist() == [1.0, 2.0, 3.0]
    np.testing.assert_allclose([float(p.model.sigma) for p in result.points], [0.3, 0.4, 0.5])
    assert [p.status_name for p in result.points] == ["converged", "nonfinite", "converged"]
    np.testing.assert_array_equal(np.isnan(result.values("train_loss")), [False, True, False])
    assert result.points[1].branch == "semantic" and np.isnan(result.points[1].overlaps.q).all()
    assert "failed at 1, the first: sigma = 0.4: ZeroDivisionError: of the loss" in result.summary()
    bad |= {0.3, 0.5}
    with pytest.raises(ZeroDivisionError, match="of the loss") as raised:
        ta.sweep(model, "sigma", [0.3, 0.4, 0.5], lines, alpha=2.0)
    assert raised.value.__notes__ == ["This happened at sigma = 0.3."]


@pytest.fixture(scope="module")
def critical(model, lines):
    return ta.sweep(model, "sigma", SIGMAS, lines, event="alpha_c")


@pytest.fixture(scope="module")
def one_by_one(model, lines):
    return [ta.critical_alpha(with_sigma(model, sigma), lines) for sigma in SIGMAS]


def test_an_event_through_a_number(critical, one_by_one):
    assert (critical.event, critical.parameter) == ("alpha_c", "sigma") and critical.exact.all()
    np.testing.assert_array_equal(critical.values, SIGMAS)
    for k, single in enumerate(one_by_one):
        assert critical.alpha[k] == single.alpha and critical.stderr[k] == single.stderr
        np.testing.assert_allclose(critical.slope[k], single.sensitivities.sigma, rtol=1e-12)
        assert critical.status[k] == single.status and critical.reason[k] == ""


def test_alpha_l_of_a_list_of_models(model, lines, one_by_one):
    models = [with_sigma(model, sigma) for sigma in SIGMAS]
    boundary = ta.sweep(models, nodes=lines, event="alpha_l")
    assert (boundary.event, boundary.parameter) == ("alpha_l", "model") and not boundary.exact.any()
    for k, (variant, single) in enumerate(zip(models, one_by_one, strict=True)):
        np.testing.assert_allclose(boundary.alpha[k], ta.linear_crossing(variant, single, lines).alpha, rtol=1e-12)


@pytest.fixture
def located(semantic_states, monkeypatch):
    """Replace searches by zeros at alpha = .7, .8 and so on, and record the arguments of each search."""
    requests = []

    def path(event, search, guess, *, exact=True):
        model = search.model
        requests.append((event.name, float(model.sigma), guess, search.nodes, search.settings, exact))
        zeros = jax.tree.map(lambda a: jnp.zeros((4, *a.shape)), model)
        by_model = eqx.tree_at(lambda m: m.sigma, zeros, jnp.full(4, -6.0))
        zero = Zero(
            np.array(0.6 + 0.1 * len(requests)), (semantic_states,), np.zeros(4), by_model, np.full(4, 2.0), 2.0, True
        )
        return made.finished_path(zero)

    monkeypatch.setattr(locate, "zero_path", path)
    monkeypatch.setattr(locate, "_fold", lambda event, search, guess, exact: path(event, search, guess, exact=exact))
    return requests


def test_other_events_are_looked_for_from_nothing(located, model, lines, monkeypatch):
    guess, settings = Guess(0.9, ()), ta.Settings(tol=1e-3)

    def guess_among(event, search, alphas):
        sigma = float(search.model.sigma)
        if sigma > 0.68:
            raise ZeroDivisionError("of the loss")
        return made.finished_path(None if sigma > 0.58 else guess._replace(at=sigma))

    monkeypatch.setattr(locate, "guess_among", guess_among)
    name = "semantic instability"
    boundary = ta.sweep(model, "sigma", [*SIGMAS, 0.6, 0.7], lines, event=name, settings=settings)
    assert located == [(name, s, guess._replace(at=s), lines, settings, True) for s in SIGMAS]
    np.testing.assert_allclose(boundary.alpha, [0.7, 0.8, np.nan, np.nan])
    np.testing.assert_allclose(boundary.slope, [3.0, 3.0, np.nan, np.nan])
    assert boundary.status_name == ["converged", "converged", "absent", "nonfinite"]
    assert boundary.exact.tolist() == [True, True, False, False]
    reasons = ["event must happen, there is none for alpha from 0.05 to 3", "ZeroDivisionError: of the loss"]
    assert boundary.reason.tolist() == ["", "", *reasons]


def test_a_fold_is_looked_for_where_the_branch_is_lost(located, model, lines, monkeypatch):
    """A fold is looked for where the branch is lost on the way down in alpha; if it never is, the result says so."""
    ends = {0.5: 1.0, 0.55: 0.0, 0.6: 9.0}

    def walk(model, alphas, branch, nodes, settings):
        end = ends[round(float(model.sigma), 9)]
        assert branch == "positional" and list(alphas) == list(SEARCH)

        def point(alpha):
            overlaps = ta.Overlaps(*(jnp.full((4, 2, 1, 1), alpha) for _ in range(3)), jnp.full((4, 2, 1), alpha))
            return SimpleNamespace(alpha=alpha, exists=alpha > end, replicates=SimpleNamespace(overlaps=overlaps))

        return (made.finished_path(point(alpha)) for alpha in alphas)

    monkeypatch.setattr(locate, "walk", walk)
    boundary = ta.sweep(model, "sigma", list(ends), lines, event="positional fold")
    ((name, sigma, guess, *_),) = located
    above, below = min(a for a in SEARCH if a > 1.0), max(a for a in SEARCH if a <= 1.0)
    assert (name, sigma) == ("positional fold", 0.5) and np.all(guess.overlaps[0].q == above)
    assert (guess.at, guess.low, guess.high) == (above, 0.5 * below, 1.5 * above)
    np.testing.assert_allclose(boundary.alpha, [0.7, np.nan, np.nan])
    reason = "event must happen, the positional branch does not end for alpha from 0.05 to 3"
    assert boundary.reason.tolist() == ["", reason, reason] and boundary.status.tolist() == [0, 6, 6]


def test_an_event_that_is_not_found_has_no_place(model, lines, semantic_states, monkeypatch):
    absent = eqx.tree_at(lambda s: s.status, semantic_states, semantic_states.status + int(ta.Status.absent))
    zero = Zero(np.array(0.55), (absent, semantic_states), np.full(4, np.nan), None, np.full(4, np.nan))
    monkeypatch.setattr(transitions, "zero_path", lambda *_, **__: made.finished_path(zero))
    for event in ("alpha_c", "alpha_l"):
        boundary = ta.sweep([model], nodes=lines, event=event)
        assert np.isnan(boundary.alpha).all() and boundary.status.tolist() == [ta.Status.absent]
        assert boundary.reason.tolist() == ["there is no positional branch at alpha = 0.55, where the search ended"]


def test_every_event_can_be_asked_for(model, lines, monkeypatch):
    requests = []

    def path(event, search):
        assert search == Search(model, lines, ta.Settings())._replace(model=search.model)
        requests.append(event)
        return made.finished_path(made.transition(status=int(ta.Status.absent)))

    monkeypatch.setattr(sweep_module, "transition_path", path)
    for event in (*EVENTS, "alpha_l"):
        ta.sweep(model, "sigma", [0.5], lines, event=event)
    assert requests == [*EVENTS, "alpha_l"]


def test_curves_are_drawn_along_what_changes():
    points = tuple(made.fixed_point() for _ in range(2))
    axes = ta.Curve("semantic", points, "sigma", np.array([0.4, 0.5])).plot().axes
    assert {axis.get_xlabel() for axis in axes} == {LABELS["sigma"]}
    for axis in axes:
        np.testing.assert_array_equal(axis.get_lines()[0].get_xdata(), [0.4, 0.5])


BAD = [
    ({"along": "sigma", "values": [0.5]}, "alpha must be given for states, or event for an event"),
    ({"along": "sigma", "values": [0.5], "alpha": 2.0, "event": "alpha_c"}, "alpha must "),
    ({"along": "sigma", "values": [0.5], "alpha": -1.0}, "alpha must be"),
    ({"along": "sigma", "values": [0.5], "alpha": [1.0, 2.0]}, "alpha must be one number, or one for each of 1"),
    ({"along": "sigma", "values": [0.5], "event": "alpha"}, "event must be one of"),
    ({"along": "sigma", "values": [0.5], "alpha": 2.0, "branch": "lexical"}, "branch must be"),
    ({"along": "alpha", "values": [0.5], "alpha": 2.0}, "along must be the alphas themselves"),
    ({"along": "rank", "values": [0.5], "alpha": 2.0}, "along must name one of"),
    ({"along": "mixing", "values": [0.5], "alpha": 2.0}, "along must name one of"),
    ({"along": "sigma", "values": [0.5, 0.4], "alpha": 2.0}, "values must be one or more finite, increasing"),
    ({"along": "sigma", "values": [0.5, np.nan], "alpha": 2.0}, "values must be"),
    ({"along": "sigma", "values": None, "alpha": 2.0}, "values must be"),
    ({"along": "omega", "values": [0.5, 1.2], "alpha": 2.0}, "omega must be"),
    ({"model": [], "alpha": 2.0}, "model must be one model or more"),
    ({"model": [0.3], "alpha": 2.0}, "model must be a list of models"),
    ({"model": "models", "alpha": 2.0}, "model must be a Model or a list of models"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD)
@pytest.mark.usefixtures("unchecked")
def test_one_sentence_about_the_argument(model, lines, change, sentence):
    with pytest.raises(ta.InputError) as caught:
        ta.sweep(**{"model": model, "nodes": lines, **change})
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_models_of_a_list_are_of_one_kind(model, lines, monkeypatch):
    def forbidden(*_):
        raise AssertionError("something was solved before the models were checked")

    monkeypatch.setattr(sweep_module, "run_settings", forbidden)
    foreign_models = (
        ta.dot_product(rank=2),
        eqx.tree_at(lambda m: m.lam, model, model.lam.astype(jnp.float32)),
    )
    for foreign_model in foreign_models:
        with pytest.raises(ta.InputError, match=r"model must give models of one class .* number 1 differs"):
            ta.sweep([model, foreign_model], nodes=lines, alpha=2.0)
    for arguments in ({"along": "sigma"}, {"values": [0.5]}, {"along": [1.0]}):
        with pytest.raises(ta.InputError, match="along must be left out with a list of models"):
            ta.sweep([model], nodes=lines, alpha=2.0, **arguments)
    bad = eqx.tree_at(lambda m: m.lam, model, -model.lam)
    for models in ([model, bad], [bad, model]):
        with pytest.raises(ta.InputError, match="lam must be "):
            ta.sweep(models, nodes=lines, alpha=2.0)
    with pytest.raises(ta.InputError, match="model must have concrete numbers here"):
        jax.jit(lambda s: ta.sweep([model, with_sigma(model, s)], nodes=lines, alpha=2.0).at)(0.5)


def test_a_baseline_of_models_without_target_is_refused(model, lines):
    class WithoutTarget(ta.DotProduct):
        target = ta.Model.target

        def loss(self, Z, Y):
            return jnp.sum(Z**2) + jnp.sum(Y**2)

    fields = {k: getattr(model, k) for k in ("omega", "sigma", "lam", "mixing", "encodings", "teacher")}
    for event in ("semantic baseline", "alpha_l"):
        with pytest.raises(ta.InputError, match="model must have a method `target"):
            ta.sweep([WithoutTarget(**fields)], nodes=lines, event=event)
