"""The value of a number with the smallest test error: against brute force, and its derivatives against differences."""

import importlib
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.report import with_error
from tiedattn_jax.model.overlaps import BRANCHES, PAIR
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases import best as best_module
from tiedattn_jax.phases.best import Optimum, numbers_of, prepared_task
from tiedattn_jax.phases.locate import Zero
from tiedattn_jax.phases.places import Place, Walk, places_of
from tiedattn_jax.plotting.style import COLOURS

sweep_module = importlib.import_module("tiedattn_jax.phases.sweep")  # the module; `sweep` of the package is a function

# The proximal operator jumps in both states. The ranges are narrow, so that the tests are fast.
SETTINGS = {"semantic": ([1.23, 1.25, 1.27], (2e-4, 2e-3)), "positional": ([0.98, 1.0, 1.02], (8e-3, 8e-2))}


@pytest.fixture(scope="module", params=list(SETTINGS))
def branch(request):
    return request.param


@pytest.fixture(scope="module")
def curve(model, lines, branch):
    alphas, bracket = SETTINGS[branch]
    return ta.sweep(model, "best lam", alpha=sorted(alphas), branch=branch, nodes=lines, bracket=bracket)


@pytest.mark.long
def test_against_brute_force(curve, model, lines, branch):
    """Errors of independent solves, along a grid of ridges, have their minimum there in every replicate."""
    best = curve.cells[1]
    assert bool(best.ok) and best.place == "inside" and best.reason == "" and bool(best.state.jumps)
    x = np.log(float(best.value)) + np.linspace(-0.3, 0.3, 7)
    scan = ta.sweep(model, branch, lam=np.exp(x), alpha=float(best.alpha), nodes=lines)
    errors = np.array([p.replicates.gen_error for p in scan.points])
    minima, values = [], []
    for error in errors.T:
        fit = np.polynomial.Polynomial.fit(x, error, 4)
        root = min(fit.deriv().roots().real, key=lambda r: abs(r - x[3]))
        minima.append(np.exp(root))
        values.append(fit(root))
    np.testing.assert_allclose(best.value, np.mean(minima), rtol=2e-3)
    # The jumps make the errors of a replicate uneven, so that the minimum of their fit is off by .005 %.
    np.testing.assert_allclose(best.stderr, ta.error_bar(np.array(minima)), rtol=0.1, atol=1e-4 * best.value)
    np.testing.assert_allclose(best.gen_error.value, np.mean(values), rtol=1e-4)
    np.testing.assert_allclose(best.gen_error.stderr, ta.error_bar(np.array(values)), rtol=0.1)
    np.testing.assert_allclose(best.state.gen_error, best.gen_error.value, rtol=1e-4)
    np.testing.assert_allclose(best.state.model.lam, best.value, rtol=1e-12)


def test_slopes_against_differences(curve):
    a, b, c = curve.cells
    width = curve.at[2] - curve.at[0]
    np.testing.assert_allclose(b.by_alpha.value, (c.value - a.value) / width, rtol=0.04)
    np.testing.assert_allclose(b.gen_error.by_alpha.value, (c.gen_error.value - a.gen_error.value) / width, rtol=5e-3)
    assert 0 < b.by_alpha.stderr < 0.05 * abs(b.by_alpha.value)


def test_sensitivities_against_differences(curve, model, lines, branch):
    best, step = curve.cells[1], 0.01
    _, bracket = SETTINGS[branch]
    models = [eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(0.5 + d)) for d in (-step, step)]
    below, above = ta.sweep(
        models, "best lam", nodes=lines, branch=branch, alpha=float(best.alpha), bracket=bracket
    ).cells
    slope = (above.value - below.value) / (2 * step)
    np.testing.assert_allclose(best.sensitivities.sigma, slope, rtol=0.04, atol=3 * best.sensitivities_stderr.sigma)
    slope = (above.gen_error.value - below.gen_error.value) / (2 * step)
    np.testing.assert_allclose(best.gen_error.sensitivities.sigma, slope, rtol=0.02)
    assert best.sensitivities.lam == 0 and best.gen_error.sensitivities.lam == 0


def test_curve(curve, branch):
    assert (curve.question, curve.points[0].branch, curve.parameter, curve.jumps) == ("best lam", branch, "alpha", [])
    np.testing.assert_array_equal(curve.at, SETTINGS[branch][0])
    np.testing.assert_array_equal(curve.values(), [float(p.value) for p in curve.cells])
    np.testing.assert_array_equal(curve.stderr("gen_error"), [float(p.gen_error.stderr) for p in curve.cells])
    assert np.all(np.diff(curve.values("gen_error")) < 0)
    text = curve.summary()
    assert (
        text.startswith(f"best lam of the {branch} branch at 3 alphas from ")
        and "found at 3" in text
        and "inside" in text
    )
    report = curve.to_dict()
    assert report["axes"] == {"alpha": SETTINGS[branch][0]} and report["place"][1] == "inside"
    assert report["lam"][1] == float(curve.cells[1].value) and curve.cells[1].to_dict()["sensitivities"]["lam"] == 0


def test_limit_at_the_transition(lines):
    """At the best ridge the critical alpha is the alpha, and its sensitivities give those of the ridge."""
    model, alpha = ta.DotProduct(omega=0.5), 1.5
    best = ta.best_ridge(model, alpha, None, lines, bracket=(3e-3, 5e-3))
    assert bool(best.ok) and best.place == "transition" and best.state.branch == "semantic"
    at, pair = best.state.model, best.branches[::-1]
    critical = ta.critical_alpha(at, lines, start=pair)
    np.testing.assert_allclose(critical.alpha, alpha, rtol=1e-5)
    by_lam = critical.sensitivities.lam
    np.testing.assert_allclose(best.by_alpha.value, 1 / by_lam, rtol=2e-3)
    np.testing.assert_allclose(best.sensitivities.sigma, -critical.sensitivities.sigma / by_lam, rtol=2e-3)
    page = 0.00402, 0.00222, 0.00306  # docs/howto/best_ridge.md: the ridge, and the errors on both sides
    np.testing.assert_allclose([best.value, *(state.gen_error for state in best.branches)], page, rtol=5e-3)
    np.testing.assert_allclose(best.gen_error.value, pair[1].gen_error, rtol=1e-4)
    step, errors = 0.01, []
    for d in (-step, step):
        moved = eqx.tree_at(lambda m: m.lam, model, best.value + d * best.by_alpha.value)
        errors.append(ta.solve(moved, alpha + d, "semantic", lines, start=best.state).gen_error)
    np.testing.assert_allclose(best.gen_error.by_alpha.value, (errors[1] - errors[0]) / (2 * step), rtol=0.02)


def walk(branch, x, error, loss):
    """A walk whose errors and losses are functions of x; NaN where there is no state."""
    return Walk(branch, x, error(x), np.where(np.isnan(error(x)), np.nan, loss(x)), [None] * x.size)


X = np.linspace(-10.0, 0.0, 14)
STEPS = np.array([-0.01, 0.01, -0.02, 0.02])


def test_place_inside():
    (place,) = places_of([walk("semantic", X, lambda x: 1 + (x + 6.3) ** 2, np.zeros_like)])
    assert (place.kind, place.branch, place.low, place.high, place.crossings) == ("inside", 0, -10.0, 0.0, ())
    np.testing.assert_allclose([place.x, place.error, place.curvature], [-6.3, 1.0, 2.0], rtol=0.05)


@pytest.mark.parametrize(("slope", "kind", "x"), [(1.0, "lower end", X[3]), (-1.0, "upper end", X[-4])])
def test_place_at_the_last_state(slope, kind, x):
    def error(x):
        return np.where((x < X[3] - 0.1) | (x > X[-4] + 0.1), np.nan, np.exp(slope * x))

    (place,) = places_of([walk("semantic", X, error, np.zeros_like)])
    assert (place.kind, place.x) == (kind, x)


@pytest.mark.parametrize(("crossing", "kind", "x"), [(-3.1, "inside", -5.0), (-6.2, "transition", -6.2)])
def test_place_where_the_global_minimum_changes(crossing, kind, x):
    """The semantic state has the lower loss below the crossing, and its error is smallest at -5."""
    positional = walk("positional", X, lambda x: 9 + (x + 1) ** 2, np.zeros_like)
    semantic = walk("semantic", X, lambda x: 1 + (x + 5) ** 2, lambda x: x - crossing)
    best, other = places_of([positional, semantic])
    assert (best.kind, best.branch, best.low) == (kind, 1, -10.0)
    np.testing.assert_allclose([best.x, best.high, *best.crossings], [x, crossing, crossing], atol=0.01)
    assert (other.branch, other.kind, other.high) == (0, "inside", 0.0)
    np.testing.assert_allclose([other.x, other.low, other.error], [-1.0, crossing, 9.0], rtol=0.01)


@pytest.mark.parametrize(
    ("kind", "outcome", "expected"),
    [
        ("transition", -1.0, "transition"),  # the error falls towards the transition
        ("transition", 1.0, "inside"),
        ("inside", 0.1, "inside"),
        ("inside", -0.1, "transition"),  # the other branch has the lower loss
    ],
)
def test_what_all_replicates_decide(model, lines, monkeypatch, kind, outcome, expected):
    """On all replicates a minimum may lie beyond the transition, and a limit may turn out to be a minimum before it."""
    task = prepared_task(model, None, lines, "lam", (1e-4, 1.0), None)
    starts = [BRANCHES[b].start(model) for b in PAIR]
    walks = [
        walk(b, X, np.ones_like, np.zeros_like)._replace(overlaps=[x] * X.size)
        for b, x in zip(PAIR, starts, strict=True)
    ]
    error = Zero(np.exp(-5.2), (), np.ones(4), None, np.full(4, outcome))
    optima = {k: SimpleNamespace(kind=k, error=error, value=np.exp(-5.2)) for k in ("inside", "transition")}

    def losses(event, family, value, xs):
        assert event.name == "alpha_c" and value == np.exp(-5.2) and xs == starts and family is task.family
        return made.finished_path(Zero(value, (), np.full(4, outcome), None, np.ones(4)))

    monkeypatch.setattr(best_module, "_inside", lambda *_: made.finished_path(optima["inside"]))
    monkeypatch.setattr(best_module, "_at_transition", lambda *_: made.finished_path(optima["transition"]))
    monkeypatch.setattr(best_module, "event_number", losses)
    place = Place(1, -5.0, 1.0, 1.0, kind, -9.0, -5.0, (-5.0,))
    result = made.answer_path(best_module._located(task, walks, place), None)
    assert result.kind == expected


def test_minima_of_parabolas(model, lines, semantic_states, monkeypatch):
    """Errors a + c (x - b - 2 p)^2 / 2 + 3 p have their minimum at b, and it moves with the other number p.

    Every replicate has its own a, b and c, which all must come back, and the derivatives 2 and 3 in p.
    """
    a, b, c = np.array([1.0, 1.2, 0.9, 1.1]), np.array([-5.0, -5.1, -4.9, -4.8]), np.array([0.5, 1.0, 2.0, 1.5])

    def error(task, branch, value, start, *, coarse=False):
        x, rows = np.log(value), slice(0, 1) if coarse else slice(None)
        slope = c * (x - b)
        numbers = a + slope * (x - b) / 2, [(3 - 2 * slope)[rows]], slope / value
        return made.finished_path(
            Zero(np.asarray(value), (semantic_states,), numbers[0][rows], numbers[1], numbers[2][rows])
        )

    monkeypatch.setattr(best_module, "_error", error)
    task = prepared_task(model, "semantic", lines, "lam", (1e-4, 1.0), None)
    overlaps = jax.tree.map(lambda a: a[0], semantic_states.overlaps)
    start = walk("semantic", X, np.ones_like, np.zeros_like)._replace(overlaps=[overlaps] * X.size)
    place = Place(0, -6.0, 1.0, 1.0, "inside", -9.0, 0.0, ())
    found = made.answer_path(best_module._located(task, [start], place), None)
    assert found.zero.converged and found.kind == "inside"
    (values, (rates,)), (errors, (error_rates,)) = numbers_of(found)
    numbers = values, rates / values, errors, error_rates
    np.testing.assert_allclose(numbers, [np.exp(b), np.full(4, 2.0), a, np.full(4, 3.0)], rtol=1e-12)


def test_places_without_states():
    nothing = walk("semantic", X, lambda x: np.full_like(x, np.nan), np.zeros_like)
    assert places_of([nothing]) == []
    (alone,) = places_of([nothing, walk("positional", X, lambda x: np.where(x == X[2], 1.0, np.nan), np.zeros_like)])
    assert (alone.branch, alone.x) == (1, X[2])


@pytest.mark.parametrize("name", ["lam", "sigma", "mixing[0,1]"])
def test_slopes_of_a_number(model, lines, name):
    """A function of the model is differentiated in log(number), in the other numbers at a fixed value, and in alpha."""
    task = prepared_task(model, "semantic", lines, name, (0.01, 0.3), None)
    weights = jax.tree.map(lambda a: jnp.linspace(1.0, 2.0, a.size).reshape(a.shape), model)
    x = -2.0

    def fn(model, x):
        at = Parameter(name).set(model, None, jnp.exp(x))[0]
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, weights, at)))

    by_model = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), weights)
    (rates, by_alpha), slope = task.family.derivatives(np.exp(x), by_model, np.array([3.0, 4.0]))
    expected = jax.grad(fn, (0, 1))(model, x)
    np.testing.assert_allclose(np.exp(x) * slope, expected[1] * np.array([1.0, 2.0]), rtol=1e-12)
    for a, b in zip(jax.tree.leaves(rates), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a[1], 2 * b, atol=1e-12)
    np.testing.assert_array_equal(by_alpha, [3.0, 4.0])


def test_a_number_of_the_callers(model, lines):
    """Along a number whose square is the ridge, slopes are those of the ridge by the chain rule."""
    own = ta.Axis("root", 0.1, lambda m, v: eqx.tree_at(lambda m: m.lam, m, v**2))
    task = prepared_task(model, "semantic", lines, own, (0.01, 0.3), None)
    ridge = prepared_task(model, "semantic", lines, "lam", (1e-4, 0.09), None)
    assert task.family.number.read(model, None, "number") == 0.1
    by_model, by_alpha = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), model), np.array([3.0, 4.0])
    (_, own_alpha), own_slope = task.family.derivatives(0.2, by_model, by_alpha)
    (_, lam_alpha), lam_slope = ridge.family.derivatives(0.04, by_model, by_alpha)
    np.testing.assert_allclose(own_slope, 0.4 * lam_slope, rtol=1e-12)
    np.testing.assert_array_equal(own_alpha, lam_alpha)


def optimum(model, states, kind="inside", branch=0, value=0.002, converged=True, count=1):
    """A place on four replicates, whose x moves by 2 with every number of the model, and whose error by 3.

    The common value is off by steps of -.01, .01, -.02 and .02 in x. The slopes of the number are -4 in x.
    """
    rates = jax.tree.map(lambda a: np.full((4, *a.shape), 8.0), (model, jnp.ones(())))
    zero = Zero(np.asarray(value), (states,), 4.0 * STEPS, rates, np.full(4, -4.0 / value), converged=converged)
    zero = zero._replace(rates=jax.tree.map(np.asarray, rates))
    error_rates = jax.tree.map(lambda a: np.full_like(a, 3.0), rates)
    error = Zero(zero.at, (states,), 1e-3 * np.array([1.0, 1.1, 0.9, 1.0]), error_rates, np.zeros(4))
    return Optimum(kind, branch, zero, error, dict.fromkeys(PAIR[:: 1 - 2 * branch][:count], states))


@pytest.fixture
def located(model, semantic_states, monkeypatch):
    """Replace searches by places made by hand; the function returns the tasks that were asked for."""

    def replace(*optima):
        tasks, answers = [], iter(optima)

        def path(task):
            tasks.append(task)
            return made.finished_path(next(answers))

        monkeypatch.setattr(best_module, "best_path", path)
        monkeypatch.setattr(sweep_module, "best_path", path)
        return tasks

    return replace


def test_result(located, model, lines, semantic_states):
    settings = ta.Settings(tol=1e-3)
    tasks = located(optimum(model, semantic_states))
    best = ta.best_ridge(model, 1.5, "positional", lines, bracket=(1e-3, 1e-2), settings=settings)
    (task,) = tasks
    family = task.family
    assert (task.branches, task.bracket, float(family.alpha)) == (("positional",), (1e-3, 1e-2), 1.5)
    assert family.nodes is lines and family.settings is settings and family.number.name == "lam"
    values = 0.002 * np.exp(STEPS)
    np.testing.assert_allclose([best.value, best.stderr], [values.mean(), ta.error_bar(values)], rtol=1e-12)
    np.testing.assert_allclose(best.gen_error.value, 1e-3, rtol=1e-12)
    np.testing.assert_allclose([best.sensitivities.sigma, best.by_alpha.value], 2 * values.mean(), rtol=1e-12)
    np.testing.assert_allclose([best.gen_error.sensitivities.sigma, best.gen_error.by_alpha.value], 3.0, rtol=1e-12)
    np.testing.assert_allclose(best.sensitivities_stderr.sigma, 2 * best.stderr, rtol=1e-12)
    assert best.state.branch == "positional" and best.ok and best.reason == ""
    np.testing.assert_allclose(best.state.model.lam, best.value, rtol=1e-12)
    assert best.summary().startswith(f"best lam = {with_error(best.value, best.stderr)}: converged\n")
    assert "the test error of the positional branch is smallest there; the states there:" in best.summary()
    report = best.to_dict()
    assert report["by_alpha"] == float(best.by_alpha.value) and report["sensitivities"]["sigma"] == report["by_alpha"]


def test_gradients(located, model, lines, semantic_states):
    """`jax.grad` gives the sensitivities, in the model and in alpha."""
    located(*[optimum(model, semantic_states)] * 3)
    best = ta.best_ridge(model, 1.5, nodes=lines)
    grad = jax.grad(lambda m, a: ta.best_ridge(m, a, nodes=lines).value, (0, 1))(model, jnp.asarray(1.5))
    np.testing.assert_allclose([grad[0].sigma, grad[1]], [best.sensitivities.sigma, best.by_alpha.value], rtol=1e-12)
    grad = jax.grad(lambda m: ta.best_ridge(m, 1.5, nodes=lines).gen_error.value)(model)
    np.testing.assert_allclose(grad.omega, 3.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "value", "converged", "text"),
    [
        ("transition", 0.002, True, "the global minimum changes its branch there, and the test error falls up to it"),
        ("lower end", 1e-5, True, "no smallest error: it falls down to there, the end of the bracket"),
        ("upper end", 0.002, True, "no smallest error: it falls up to there, beyond which no state was found"),
        ("inside", 0.002, False, "the search near lam = 0.002 did not settle: max steps"),
    ],
)
def test_reasons(located, model, lines, semantic_states, kind, value, converged, text):
    located(optimum(model, semantic_states, kind, 1, value, converged, count=2))
    best = ta.best_ridge(model, 1.5, None, lines)
    assert best.reason.startswith(text) and text in best.summary() and best.place == kind
    assert [s.branch for s in best.branches] == ["semantic", "positional"] and bool(best.ok) == converged


def test_no_state(located, model, lines):
    located(None)
    best = ta.best_ridge(model, 0.2, "semantic", lines)
    assert np.isnan(best.value) and best.place == "nowhere" and best.status == ta.Status.absent
    assert best.summary().endswith("not found, as there is no semantic state from 1e-05 to 1")
    located(None)
    assert ta.best_ridge(model, 0.2, None, lines).reason.startswith("there is no positional, semantic or uninformed st")
    with pytest.raises(ta.InputError, match="best lam must have a state, but there is no semantic state"):
        _ = best.state
    assert best.to_dict()["sensitivities"] is None


def test_the_uninformed_state_is_global_where_no_branch_exists(lines):
    """There is no gap in a sweep: the smallest error is that of the uninformed state, by independent solves as well."""
    layer = ta.DotProduct(omega=0.02)
    (best,) = ta.sweep(layer, "best lam", alpha=[0.3], nodes=lines, branch=None, bracket=(1e-3, 4e-3)).cells
    assert best.state.branch == "uninformed" and best.place == "inside" and bool(best.ok)
    lams = float(best.value) * np.array([0.7, 1.0, 1.4])
    scan = ta.sweep(layer, "uninformed", lam=lams, alpha=0.3, nodes=lines).values("gen_error")
    np.testing.assert_allclose(best.gen_error.value, scan[1], rtol=1e-4)
    assert scan[1] < min(scan[0], scan[2])


def test_sweep_with_a_jump_and_a_failure(located, model, lines, semantic_states, monkeypatch):
    """The best value jumps where the state changes its branch: there the tangents of the error meet."""
    low, high = optimum(model, semantic_states, value=0.03), optimum(model, semantic_states, "transition", 1, count=2)
    low = low._replace(error=low.error._replace(rates=jax.tree.map(np.zeros_like, low.error.rates)))
    rates = jax.tree.map(lambda a: 0 * a - 0.01, high.error.rates)
    high = high._replace(error=high.error._replace(value=high.error.value - 1e-3, rates=rates))
    located(low, high)
    calls = []
    curve = ta.sweep(model, "best lam", alpha=[1.0, 1.3], branch=None, nodes=lines, progress=lambda *c: calls.append(c))
    np.testing.assert_allclose(curve.values(), [0.03, 0.002], rtol=1e-3)
    np.testing.assert_allclose(curve.jumps, [1.2], rtol=1e-9)  # 0.001 = -0.01 (alpha - 1.3)
    assert "that jumps at alpha = 1.2" in curve.summary() and calls == [(0, 2), (1, 2), (2, 2)]
    figure = curve.plot()
    assert {axis.get_xlabel() for axis in figure.axes} == {r"sample complexity $\alpha$"}
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"positional", "semantic", "minimum", "limit at the transition"} <= set(labels)
    assert {line.get_color() for line in figure.axes[0].get_lines()} >= {COLOURS["positional"], COLOURS["semantic"]}

    def path(task):
        if task.family.alpha > 1.2:
            raise ZeroDivisionError("of the loss")
        return (yield from made.finished_path(low))

    monkeypatch.setattr(sweep_module, "best_path", path)
    curve = ta.sweep(model, "best lam", alpha=[1.0, 1.3], branch=None, nodes=lines)
    assert curve.failures == ("alpha = 1.3: ZeroDivisionError: of the loss",) and np.isnan(curve.values()[1])
    assert curve.status_name[1] == "nonfinite" and "failed at 1" in curve.summary()
    assert len(curve.plot().axes) == 2


def test_sweep_through_other_settings(located, model, lines, semantic_states):
    tasks = located(*[optimum(model, semantic_states)] * 4)
    sigmas = [0.5, 0.55]
    curve = ta.sweep(model, "best lam", sigma=sigmas, alpha=2.0, nodes=lines, bracket=(1e-3, 1e-1))
    assert [float(t.family.model.sigma) for t in tasks] == sigmas and {float(t.family.alpha) for t in tasks} == {2.0}
    assert (curve.parameter, curve.points[0].branch, tasks[0].bracket) == ("sigma", "semantic", (1e-3, 1e-1))
    curve = ta.sweep([(model, 1.0), (model, 2.0)], "best lam", nodes=lines, branch="positional")
    assert [float(t.family.alpha) for t in tasks[2:]] == [1.0, 2.0] and tasks[2].branches == ("positional",)
    assert curve.parameter == "model" and curve.jumps == []


BAD = [
    ({"alpha": -1.0}, "alpha must be positive and finite"),
    ({"alpha": [1.0, 2.0]}, "alpha must be one number, got shape (2,): use sweep"),
    ({"branch": "uninformed"}, "branch must be one of positional, semantic, None"),
    ({"number": "rank"}, "number must name one of"),
    ({"number": "alpha"}, "number must be a number of the model"),
    ({"number": "omega"}, "bracket must be given for another number than lam"),
    ({"number": "omega", "bracket": (0.1, 1.2)}, "omega must be"),
    ({"bracket": (0.0, 0.1)}, "bracket must be two numbers 0 < low < high"),
    ({"bracket": (0.2, 0.1)}, "bracket must be two numbers 0 < low < high"),
    ({"nodes": 5.0}, "nodes must be"),
    ({"settings": 5}, "settings must be"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "sentence"), BAD)
def test_one_sentence_about_the_argument(model, lines, change, sentence):
    with pytest.raises(ta.InputError) as caught:
        ta.best_ridge(**{"model": model, "alpha": 1.0, "nodes": lines, **change})
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_concrete_numbers_only(model, lines):
    with pytest.raises(ta.InputError, match="model must have concrete numbers here"):
        jax.jit(lambda a: ta.best_ridge(model, a, nodes=lines).value)(1.0)
