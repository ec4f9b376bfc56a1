"""Sweeps of many settings in one pool, through alpha, another number, or a list of models: states and events."""

import csv
import importlib
import json
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import POOL_ROUNDING

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.phases import locate, transitions
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.phases.follow import Follower
from tiedattn_jax.phases.locate import SEARCH, Family, Guess, Zero
from tiedattn_jax.phases.questions import QUESTIONS, Question
from tiedattn_jax.phases.table import Missing, Table
from tiedattn_jax.plotting.style import SYMBOLS
from tiedattn_jax.theory.quantities import Quantity

sweep_module = importlib.import_module("tiedattn_jax.phases.sweep")  # `sweep` itself is the function

SIGMAS = [0.5, 0.55]


def with_sigma(model, sigma):
    return eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(sigma))


@pytest.fixture(scope="module")
def curve(model, lines):
    return ta.sweep(model, "semantic", alpha=[0.6, 0.7, 0.8, 1.1, 2.0], nodes=lines)


def test_through_alpha(curve, model, lines):
    np.testing.assert_allclose(curve.alpha, [0.7, 0.8, 1.1, 2.0])  # the branch ends at .7, nothing below is tried
    np.testing.assert_array_equal(curve.found, [False, True, True, True])
    np.testing.assert_array_equal(curve.at, curve.alpha)
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
    curve = ta.sweep(
        model, "semantic", alpha=[1.0, 3.0, 2.0], nodes=lines, settings=ta.Settings(tol=1e-3, warm_steps=7)
    )
    np.testing.assert_array_equal(curve.alpha, [1.0, 2.0, 3.0])
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
    curve = ta.sweep(model, "semantic", alpha=list(has_state), nodes=lines, progress=lambda *c: calls.append(c))
    np.testing.assert_array_equal(curve.alpha, [2.0, 3.0, 4.0, 5.0, 6.0])
    assert calls == [(k, 6) for k in (0, 1, 2, 3, 4, 5, 6)]
    for size in (lambda p: p.size, "size"):
        np.testing.assert_array_equal(curve.values(size), [np.nan, 30.0, 40.0, np.nan, np.nan])


@pytest.fixture(scope="module")
def states(model, lines):
    calls = []
    result = ta.sweep(model, "semantic", sigma=SIGMAS, alpha=2.0, nodes=lines, progress=lambda *c: calls.append(c))
    assert calls == [(0, 2), (1, 2), (2, 2)]
    return result


def test_states_through_a_number(states, model, lines):
    assert (states.question, states.parameter) == ("semantic", "sigma")
    np.testing.assert_array_equal(states.at, SIGMAS)
    np.testing.assert_array_equal(states.alpha, 2.0)
    for sigma, point in zip(SIGMAS, states.points, strict=True):
        direct = ta.solve(with_sigma(model, sigma), 2.0, "semantic", lines)
        for a, b in zip(jax.tree.leaves(point), jax.tree.leaves(direct), strict=True):
            np.testing.assert_allclose(a, b, POOL_ROUNDING)  # the same searches were done
    report = states.to_dict()
    assert (report["question"], report["axes"]) == ("semantic", {"sigma": SIGMAS}) and len(report["train_loss"]) == 2
    assert states.summary().startswith("semantic branch at 2 values of sigma from 0.5 to 0.55: found at 2")
    assert states.describe().tables[0][1][0][:2] == ("sigma", "branch")


def test_states_of_a_list_of_models(states, model, lines):
    models = [with_sigma(model, SIGMAS[0]), (with_sigma(model, SIGMAS[1]), 2.0)]
    with pytest.raises(ta.InputError, match="alpha must be given for states"):
        ta.sweep(models, "semantic", nodes=lines)
    result = ta.sweep(models, "semantic", alpha=2.0, nodes=lines, settings=ta.Settings())
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
    pairs = [(with_sigma(model, s), a) for s, a in zip(SIGMAS, (1.0, 2.0), strict=True)]
    result = ta.sweep(pairs, "positional", nodes=lines, settings=settings)
    assert canned == [(s, a, "positional", lines, settings, False) for s, a in zip(SIGMAS, (1.0, 2.0), strict=True)]
    assert [float(p.alpha) for p in result.points] == [1.0, 2.0] and result.question == "positional"
    assert [float(p.model.sigma) for p in result.points] == SIGMAS
    canned.clear()
    ta.sweep(model, None, ta.Axis("mixing[0,1]", [0.4]), alpha=3.0)
    ((_, alpha, branch, rule, used_settings, fallback),) = canned
    assert (alpha, branch, fallback) == (3.0, None, True) and rule.size == default_recipe(model).rule(model).size
    assert float(used_settings.tol) == float(ta.Settings().tol)


def test_settings_of_all_cells(canned, model, lines):
    """Fixed numbers, axes and a caller's own axis: the last axis runs fastest, and keywords come after axes."""

    def put(model, value):
        return eqx.tree_at(lambda m: m.omega, model, jnp.asarray(value**2))

    root = ta.Axis("root", [0.5, 0.6], put)
    result = ta.sweep(model, "semantic", root, alpha=[1.0, 2.0, 3.0], sigma=0.4, nodes=lines)
    assert (result.names, result.shape) == (("root", "alpha"), (2, 3))
    assert [c[:2] for c in canned] == [(0.4, a) for _ in range(2) for a in (1.0, 2.0, 3.0)]
    np.testing.assert_allclose(result.values(lambda p: p.model.omega), [[0.25] * 3, [0.36] * 3])
    np.testing.assert_array_equal(result.alpha, [[1.0, 2.0, 3.0]] * 2)
    canned.clear()
    single = ta.sweep(model, "semantic", alpha=2.0, nodes=lines)
    assert single.shape == () and len(canned) == 1 and float(single.values("theta")) == float(single.cells[0].theta)
    assert str(single).startswith("semantic branch at 1 settings of the model: found at 1")
    canned.clear()  # every alpha for itself, instead of from one to the next
    assert ta.sweep(model, "semantic", alpha=[1.0, 2.0], nodes=lines, follow=False).shape == (2,) and len(canned) == 2


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
        model, "semantic", sigma=[0.3, 0.4, 0.5], alpha=2.0, nodes=lines, progress=lambda *c: calls.append(c)
    )
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert result.failures == ("sigma = 0.4: ZeroDivisionError: of the loss",)
    assert result.found.tolist() == [True, False, True] and result.at.tolist() == [0.3, 0.4, 0.5]
    np.testing.assert_allclose([float(p.model.sigma) for p in result.points], [0.3, 0.5])
    assert result.status_name == ["converged", "nonfinite", "converged"]
    for name in ("train_loss", "q", "replicon", lambda p: p.residual):
        np.testing.assert_array_equal(np.isnan(result.values(name)), [False, True, False])
    assert np.isnan(result.stderr("q")).tolist() == [False, True, False]
    row = result.table()[1]
    assert row["reason"] == "ZeroDivisionError: of the loss" and row["exists"] is False and np.isnan(row["q_1"])
    assert len(result.plot().axes) == 3
    assert "failed at 1, the first: sigma = 0.4: ZeroDivisionError: of the loss" in result.summary()
    bad |= {0.3, 0.5}
    with pytest.raises(ZeroDivisionError, match="of the loss") as raised:
        ta.sweep(model, "semantic", sigma=[0.3, 0.4, 0.5], alpha=2.0, nodes=lines)
    assert raised.value.__notes__ == ["This happened at sigma = 0.3."]


@pytest.fixture(scope="module")
def critical(model, lines):
    return ta.sweep(model, "alpha_c", sigma=SIGMAS, nodes=lines)


@pytest.fixture(scope="module")
def one_by_one(model, lines):
    return [ta.critical_alpha(with_sigma(model, sigma), lines) for sigma in SIGMAS]


def test_an_event_through_a_number(critical, one_by_one):
    assert (critical.question, critical.parameter) == ("alpha_c", "sigma") and critical.exact.all()
    np.testing.assert_array_equal(critical.at, SIGMAS)
    for k, single in enumerate(one_by_one):
        assert critical.alpha[k] == single.alpha and critical.stderr()[k] == single.stderr
        np.testing.assert_allclose(critical.slope[k], single.sensitivities.sigma, rtol=1e-12)
        assert critical.status[k] == single.status and critical.reason[k] == ""


def test_alpha_l_of_a_list_of_models(model, lines, one_by_one):
    models = [with_sigma(model, sigma) for sigma in SIGMAS]
    boundary = ta.sweep(models, "alpha_l", nodes=lines)
    assert (boundary.question, boundary.parameter) == ("alpha_l", "model") and not boundary.exact.any()
    for k, (variant, single) in enumerate(zip(models, one_by_one, strict=True)):
        np.testing.assert_allclose(boundary.alpha[k], ta.linear_crossing(variant, single, lines).alpha, rtol=1e-12)


@pytest.fixture
def located(semantic_states, monkeypatch):
    """Replace searches by zeros at alpha = .7, .8 and so on, and record the arguments of each search."""
    requests = []

    def path(event, family, guess, *, exact=True):
        model = family.model
        requests.append((event.name, float(model.sigma), guess, family.nodes, family.settings, exact))
        zeros = jax.tree.map(lambda a: jnp.zeros((4, *a.shape)), model)
        by_model = eqx.tree_at(lambda m: m.sigma, zeros, jnp.full(4, -6.0))
        zero = Zero(
            np.array(0.6 + 0.1 * len(requests)), (semantic_states,), np.zeros(4), by_model, np.full(4, 2.0), 2.0, True
        )
        return made.finished_path(zero)

    monkeypatch.setattr(locate, "zero_path", path)
    monkeypatch.setattr(locate, "_fold", lambda event, family, guess, exact: path(event, family, guess, exact=exact))
    return requests


def test_other_events_are_looked_for_from_nothing(located, model, lines, monkeypatch):
    guess, settings = Guess(0.9, ()), ta.Settings(tol=1e-3)

    def guess_among(event, family, alphas):
        sigma = float(family.model.sigma)
        if sigma > 0.68:
            raise ZeroDivisionError("of the loss")
        return made.finished_path(None if sigma > 0.58 else guess._replace(at=sigma))

    monkeypatch.setattr(locate, "guess_among", guess_among)
    name = "semantic instability"
    boundary = ta.sweep(model, name, sigma=[*SIGMAS, 0.6, 0.7], nodes=lines, settings=settings)
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
    boundary = ta.sweep(model, "positional fold", sigma=list(ends), nodes=lines)
    ((name, sigma, guess, *_),) = located
    above, below = min(a for a in SEARCH if a > 1.0), max(a for a in SEARCH if a <= 1.0)
    assert (name, sigma) == ("positional fold", 0.5) and np.all(guess.overlaps[0].q == above)
    assert (guess.at, guess.low, guess.high) == (above, 0.5 * below, 1.5 * above)
    np.testing.assert_allclose(boundary.alpha, [0.7, np.nan, np.nan])
    reason = "event must happen, the positional branch does not end for alpha from 0.05 to 3"
    assert boundary.reason.tolist() == ["", reason, reason] and boundary.status.tolist() == [0, 6, 6]


def test_an_event_that_is_not_found_has_no_place(model, lines, semantic_states, monkeypatch):
    absent = eqx.tree_at(lambda s: s.status, semantic_states, semantic_states.status + int(ta.Status.absent))

    def nowhere(event, *_, **__):
        states = (absent, semantic_states)[-len(event.branches) :]
        return made.finished_path(Zero(np.array(0.55), states, np.full(4, np.nan), None, np.full(4, np.nan)))

    monkeypatch.setattr(transitions, "zero_path", nowhere)
    for event, reason in (
        ("alpha_c", "there is no positional branch at alpha = 0.55, where the search ended"),
        ("alpha_l", "nothing changes in the range, up to the state at alpha = 0.55, where the search ended"),
    ):
        boundary = ta.sweep([model], event, nodes=lines)
        assert np.isnan(boundary.alpha).all() and boundary.status.tolist() == [ta.Status.absent]
        assert boundary.reason.tolist() == [reason]


def test_every_event_can_be_asked_for(model, lines, monkeypatch):
    requests = []

    def path(event, family):
        assert family == Family(model, lines, ta.Settings())._replace(model=family.model)
        requests.append(event)
        return made.finished_path(made.transition(status=int(ta.Status.absent)))

    monkeypatch.setattr(sweep_module, "transition_path", path)
    for event in (*EVENTS, "alpha_l"):
        ta.sweep(model, event, sigma=[0.5], nodes=lines)
    assert requests == [*EVENTS, "alpha_l"]


def test_curves_are_drawn_along_what_changes():
    points = tuple(made.fixed_point() for _ in range(2))
    axes = Table("semantic", ("sigma",), (np.array([0.4, 0.5]),), points).plot().axes
    assert {axis.get_xlabel() for axis in axes} == {SYMBOLS["sigma"]}  # the panels are too narrow for words
    for axis in axes:
        np.testing.assert_array_equal(axis.get_lines()[0].get_xdata(), [0.4, 0.5])


# Events over two numbers: every cell is that of a single search, and a cell without the event says so.

A, B = [0.38, 0.4], [0.4, 0.42]


def layer(a, b):
    return ta.DotProduct(mixing=[[1 - a, a], [b, 1 - b]])


def mixing(a, b):
    """Two axes of the mixing; the rest of a row follows."""
    return ta.Axis("mixing[0,1]", a), ta.Axis("mixing[1,0]", b)


@pytest.fixture(scope="module")
def solved_map(lines):
    calls = []
    result = ta.sweep(ta.DotProduct(), "alpha_c", *mixing(A, B), nodes=lines, progress=lambda *c: calls.append(c))
    assert calls == [(k, 4) for k in range(5)]
    return result


def test_cells_are_single_searches(solved_map, lines):
    assert solved_map.alpha.shape == solved_map.stderr().shape == (2, 2) and solved_map.failures == ()
    for i, j in ((0, 1), (1, 0)):
        single = ta.critical_alpha(layer(A[i], B[j]), lines)
        np.testing.assert_allclose(solved_map.alpha[i, j], single.alpha, rtol=1e-6)
        np.testing.assert_allclose(solved_map.stderr()[i, j], single.stderr, rtol=1e-3)
        assert solved_map.values("sensitivities.sigma")[i, j] == pytest.approx(
            float(single.sensitivities.sigma), rel=1e-3
        )
        bar = solved_map.stderr("sensitivities.sigma")[i, j]
        assert bar == pytest.approx(float(single.sensitivities_stderr.sigma), rel=0.1)
    assert solved_map.status.tolist() == [[0, 0], [0, 0]] and np.all(solved_map.ok)


def test_a_threshold_over_two_numbers():
    """Thresholds need no search: they are those of the single models."""
    result = ta.sweep(ta.DotProduct(), "encodings separate", omega=[0.3, 0.4], sigma=[0.5, 0.6])
    single = ta.threshold(ta.DotProduct(omega=0.3, sigma=0.6), "encodings separate")
    np.testing.assert_allclose(result.alpha[0, 1], single.alpha, rtol=1e-12)
    assert result.names == ("omega", "sigma") and result.question == "encodings separate"


@pytest.fixture
def with_gap(lines, monkeypatch):
    """Events at 3 x 2 settings without a solve: alpha is 1 + a + b, one has no event, and one search fails."""
    seen = []

    def path(event, family):
        seen.append((event, family.nodes, family.settings))
        a, b = (float(family.model.mixing[k, 1 - k]) for k in (0, 1))
        if (round(a, 6), round(b, 6)) == (0.3, 0.4):
            raise ta.InputError("event", "must happen, there is none")
        if (round(a, 6), round(b, 6)) == (0.1, 0.5):
            raise ZeroDivisionError("of the loss")
        return (yield from made.finished_path(made.transition(alpha=1 + a + b, event=event)))

    monkeypatch.setattr(sweep_module, "transition_path", path)
    settings = ta.Settings(tol=1e-4)
    axes = mixing([0.1, 0.2, 0.3], [0.4, 0.5])
    result = ta.sweep(ta.DotProduct(), "semantic instability", *axes, nodes=lines, settings=settings)
    assert seen == [("semantic instability", lines, settings)] * 6
    return result


def test_a_cell_without_the_event_leaves_the_others(with_gap):
    np.testing.assert_allclose(with_gap.alpha.T, [[1.5, 1.6, np.nan], [np.nan, 1.7, 1.8]], rtol=1e-12)
    np.testing.assert_allclose(with_gap.stderr().T, [[0.01, 0.01, np.nan], [np.nan, 0.01, 0.01]])
    absent, failed = int(ta.Status.absent), int(ta.Status.nonfinite)
    assert with_gap.status.T.tolist() == [[0, 0, absent], [failed, 0, 0]]
    assert with_gap.failures == (
        "mixing[0,1] = 0.1, mixing[1,0] = 0.5: ZeroDivisionError: of the loss",
        "mixing[0,1] = 0.3, mixing[1,0] = 0.4: event must happen, there is none",
    )
    assert with_gap.found.T.tolist() == [[True, True, False], [False, True, True]]


def test_what_is_told_of_a_map(with_gap):
    lines = str(with_gap).splitlines()
    assert lines[0] == (
        "semantic instability at 3 x 2 settings of mixing[0,1] and mixing[1,0]: found at 4; failed at 2, the first: "
        "mixing[0,1] = 0.1, mixing[1,0] = 0.5: ZeroDivisionError: of the loss"
    )
    assert lines[1].split() == ["smallest", "1.500(10)", "at", "mixing[0,1]", "=", "0.1,", "mixing[1,0]", "=", "0.4"]
    assert lines[2].split()[:2] == ["largest", "1.800(10)"]
    assert lines[-3].split() == ["mixing[1,0]", "\\", "mixing[0,1]", "0.1", "0.2", "0.3"]
    assert lines[-1].split() == ["0.5", "nan", "1.700(10)", "1.800(10)"]
    assert "3 x 2 settings" in repr(with_gap)
    cells = made.events("alpha_c", "a", np.arange(18.0), np.ones(18), np.ones(18), np.zeros(18)).cells
    axes = np.arange(9.0), np.arange(2.0)
    wide = Table("alpha_c", ("a", "b"), axes, cells)
    assert all(line.split()[-1] == "..." and len(line.split()) == 10 for line in str(wide).splitlines()[-2:])
    nowhere = Table("alpha_c", ("a", "b"), axes, (Missing("there is none", 6),) * 18)
    assert "smallest" not in str(nowhere) and "found at 0" in str(nowhere) and np.isnan(nowhere.alpha).all()
    assert [row["alpha_c_stderr"] for row in nowhere.table()] == pytest.approx([np.nan] * 18, nan_ok=True)


def test_files(with_gap, tmp_path):
    with_gap.save(tmp_path / "map.npz")
    loaded = ta.load(tmp_path / "map.npz")
    assert type(loaded) is Table and loaded == with_gap and str(loaded) == str(with_gap)
    assert ta.results.Table.load(tmp_path / "map.npz") == with_gap
    assert eqx.tree_at(lambda t: t.cells[0].value, with_gap, jnp.asarray(1.1)) != with_gap
    text = with_gap.to_csv(tmp_path / "map.csv")
    rows = list(csv.DictReader(text.splitlines()))
    assert (tmp_path / "map.csv").read_text() == text and len(rows) == 6
    (row,) = (r for r in rows if (r["mixing[0,1]"], r["mixing[1,0]"]) == ("0.2", "0.5"))
    assert row["status"] == "converged" and row["reason"] == "" and rows[1]["status"] == "nonfinite"
    np.testing.assert_allclose(float(row["semantic instability"]), 1.7)
    assert float(row["semantic instability_stderr"]) == 0.01 and rows[4]["reason"] == "event must happen, there is none"
    report = json.loads(json.dumps(with_gap.to_dict()).replace("NaN", "null"))
    assert report["semantic instability"][0][1] is None and report["status"][0] == ["converged", "nonfinite"]
    assert report["axes"]["mixing[1,0]"] == [0.4, 0.5] and report["stderr"]["semantic instability"][1][0] == 0.01


def test_xarray(with_gap):
    pytest.importorskip("xarray")
    data = with_gap.to_xarray()
    cell = data.sel({"mixing[0,1]": 0.2, "mixing[1,0]": 0.5})
    np.testing.assert_allclose(float(cell["semantic instability"]), 1.7)
    assert float(cell["semantic instability_stderr"]) == 0.01 and int(cell.status) == 0
    assert data["semantic instability"].dims == with_gap.names
    assert json.loads(data.attrs["question"]) == "semantic instability"
    assert len(json.loads(data.attrs["failures"])) == 2


def test_all_cells_fail(lines, monkeypatch):
    def path(*_):
        raise ta.InputError("event", "must happen, there is none")
        yield

    monkeypatch.setattr(sweep_module, "transition_path", path)
    with pytest.raises(ta.InputError, match="event must happen") as raised:
        ta.sweep(ta.DotProduct(), "alpha_c", *mixing(A, B), nodes=lines)
    assert raised.value.__notes__ == ["This happened at mixing[0,1] = 0.38, mixing[1,0] = 0.4."]


BAD = [
    ({"sigma": [0.5]}, "alpha must be given for states"),
    ({"sigma": [0.5], "alpha": 2.0, "question": "alpha_c"}, "alpha must be left out but for states"),
    ({"alpha": [1.0], "question": "weak_recovery"}, "alpha must be left out but for states"),
    ({"sigma": [0.5], "alpha": -1.0}, "alpha must be"),
    ({"sigma": [0.5], "question": "alpha"}, "question must be one of"),
    ({"sigma": [0.5], "alpha": 2.0, "question": "lexical"}, "question must be one of"),
    ({"question": 3}, "question must be one of"),
    ({"question": "best sigma", "alpha": 2.0}, "bracket must be given"),
    ({"question": "best lam", "alpha": 2.0, "lam": [0.1]}, "question must be about another number"),
    ({"question": "best lam", "sigma": [0.5]}, "alpha must be given for states and best values"),
    ({"question": "best lam", "alpha": [-1.0]}, "alpha must be positive"),
    ({"alpha": 2.0, "rank": [0.5]}, "rank must name one of"),
    ({"alpha": 2.0, "mixing": [0.5]}, "mixing must name one of"),
    ({"alpha": 2.0, "progres": 1}, "progres must name one of"),
    ({"alpha": 2.0, "sigma": [0.5, 0.4]}, "sigma must be one or more finite, increasing values"),
    ({"alpha": 2.0, "sigma": [0.5, np.nan]}, "sigma must be"),
    ({"alpha": 2.0, "sigma": []}, "sigma must be"),
    ({"alpha": 2.0, "sigma": "many"}, "sigma must be"),
    ({"alpha": 2.0, "omega": [0.5, 1.2]}, "omega must be"),
    ({"alpha": 2.0, "omega": 1.2}, "omega must be"),
    ({"alpha": [1.0], "sigma": [0.5], "lam": [0.1]}, "axes must be none, one or two"),
    ({"model": [], "alpha": 2.0}, "model must be one model or more"),
    ({"model": [0.3], "alpha": 2.0}, "model must be a list of models"),
    ({"model": "models", "alpha": 2.0}, "model must be a Model or a list"),
    ({"alpha": 2.0, "bracket": (0.1, 0.2)}, "bracket must be left out but for the best value"),
    ({"alpha": 2.0, "branch": None}, "branch must be left out but for the best value"),
    ({"alpha": 2.0, "kappa": 0.1}, "kappa must be left out but for the question"),
    ({"alpha": 2.0, "size": 1.0}, "size must be left out but for the question"),
    ({"question": "alpha_c", "sigma": [0.5], "start": []}, "start must be left out but for an event with follow"),
    ({"question": "alpha_c", "sigma": [0.5], "sensitivities": True}, "sensitivities must be left out but for an event"),
    ({"alpha": 2.0, "follow": True}, "follow must be left out but for"),
    ({"sigma": [0.5], "alpha": 2.0, "follow": True}, "follow must be left out but for"),
    ({"question": "alpha_c", "omega": [0.3], "sigma": [0.5], "follow": True}, "follow must be left out but for"),
    ({"question": "landscape", "settings": ta.Settings()}, "settings must be None"),
]


def test_a_question_is_one_line(model, monkeypatch):
    """A question with a `call` in the table of questions is asked at every setting, and read by its own columns."""

    def width(model, alpha, nodes):
        return Quantity(model.sigma * alpha, jnp.asarray(0.1 * nodes), jnp.asarray(0))

    def read(cell, question):
        return {question: (float(cell.value), float(cell.stderr))}

    monkeypatch.setitem(QUESTIONS, "width", Question("width", read, lambda cell: True, with_alpha=True, call=width))
    table = ta.sweep(model, "width", alpha=[1.0, 2.0], sigma=0.4, nodes=3)
    np.testing.assert_allclose([table.values(), table.stderr()], [[0.4, 0.8], [0.3, 0.3]])
    assert str(table).startswith("width at 2 alphas from 1 to 2: found at 2")
    with pytest.raises(ta.InputError, match='settings must be None for "width"'):
        ta.sweep(model, "width", alpha=1.0, settings=ta.Settings())
    with pytest.raises(ta.InputError, match="alpha must be given for"):
        ta.sweep(model, "width", sigma=[0.4, 0.5])


@pytest.mark.parametrize(("change", "sentence"), BAD)
@pytest.mark.usefixtures("unchecked")
def test_one_sentence_about_the_argument(model, lines, change, sentence):
    with pytest.raises(ta.InputError) as caught:
        ta.sweep(**{"model": model, "question": "semantic", "nodes": lines, **change})
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_models_of_a_list_are_of_one_kind(model, lines, monkeypatch):
    def forbidden(*_):
        raise AssertionError("something was solved before the models were checked")

    monkeypatch.setattr(sweep_module, "run", forbidden)
    foreign_models = (
        ta.DotProduct(rank=2),
        eqx.tree_at(lambda m: m.lam, model, model.lam.astype(jnp.float32)),
    )
    for foreign_model in foreign_models:
        with pytest.raises(ta.InputError, match=r"model must give models of one class .* number 1 differs"):
            ta.sweep([model, foreign_model], "semantic", nodes=lines, alpha=2.0)
    axis = ta.Axis("kind", [0.0, 1.0], lambda m, v: [model, foreign_models[0]][int(v)])
    with pytest.raises(ta.InputError, match="number 1 differs"):
        ta.sweep(model, "alpha_c", axis, nodes=lines)
    with pytest.raises(ta.InputError, match="sigma must be given once"):
        ta.sweep(model, "alpha_c", ta.Axis("sigma", [0.5]), sigma=[0.6], nodes=lines)
    bad = eqx.tree_at(lambda m: m.lam, model, -model.lam)
    for models in ([model, bad], [bad, model]):
        with pytest.raises(ta.InputError, match="lam must be "):
            ta.sweep(models, "semantic", nodes=lines, alpha=2.0)
    with pytest.raises(ta.InputError, match="model must have concrete numbers here"):
        jax.jit(lambda s: ta.sweep([model, with_sigma(model, s)], "semantic", nodes=lines, alpha=2.0).at)(0.5)


def test_a_baseline_of_models_without_target_is_refused(model, lines):
    class WithoutTarget(ta.DotProduct):
        target = ta.Model.target

        def loss(self, Z, Y):
            return jnp.sum(Z**2) + jnp.sum(Y**2)

    fields = {k: getattr(model, k) for k in ("omega", "sigma", "lam", "mixing", "encodings", "teacher")}
    for event in ("semantic baseline", "alpha_l"):
        with pytest.raises(ta.InputError, match="model must have a method `target"):
            ta.sweep([WithoutTarget(**fields)], event, nodes=lines)
