"""The value of a number with the smallest test error: against brute force, and its derivatives against differences."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import Toy, differentiated

import tiedattn_jax as ta
from tiedattn_jax.base.report import with_error
from tiedattn_jax.model.overlaps import PAIR
from tiedattn_jax.phases.best import Optimum, best_of, best_path, prepared_task
from tiedattn_jax.phases.locate import Reading

# The proximal operator jumps in both states. The ranges are narrow, so that the tests are fast.
SETTINGS = {"semantic": ([1.23, 1.25, 1.27], (2e-4, 2e-3)), "positional": ([0.98, 1.0, 1.02], (8e-3, 8e-2))}


@pytest.fixture(scope="module", params=list(SETTINGS))
def branch(request):
    return request.param


@pytest.fixture(scope="module")
def curve(model, lines, branch):
    alphas, bracket = SETTINGS[branch]
    return ta.sweep(ta.best_ridge, model, alpha=sorted(alphas), branch=branch, nodes=lines, bracket=bracket)


@pytest.mark.full
def test_against_brute_force(curve, model, lines, branch):
    """Errors of independent solves, along a grid of ridges, have their minimum there in every replicate."""
    best = curve.cells[1]
    assert bool(best.ok) and best.place == "inside" and best.reason == "" and bool(best.state.jumps)
    x = np.log(float(best.value)) + np.linspace(-0.3, 0.3, 7)
    scan = ta.sweep(ta.solve, model, branch=branch, lam=np.exp(x), alpha=float(best.alpha), nodes=lines)
    errors = np.array([p.replicates.gen_error for p in scan.points])
    minima, values = [], []
    for error in errors.T:
        fit = np.polynomial.Polynomial.fit(x, error, 4)
        root = min(fit.deriv().roots().real, key=lambda r: abs(r - x[3]))
        minima.append(np.exp(root))
        values.append(fit(root))
    np.testing.assert_allclose(best.value, np.mean(minima), rtol=2e-3)
    # The jumps make the errors of a replicate uneven, so that the minimum of their fit is off by .005 %.
    np.testing.assert_allclose(best.stderr, ta.results.error_bar(np.array(minima)), rtol=0.1, atol=1e-4 * best.value)
    np.testing.assert_allclose(best.gen_error.value, np.mean(values), rtol=1e-4)
    np.testing.assert_allclose(best.gen_error.stderr, ta.results.error_bar(np.array(values)), rtol=0.1)
    np.testing.assert_allclose(best.state.gen_error, best.gen_error.value, rtol=1e-4)
    np.testing.assert_allclose(best.state.model.lam, best.value, rtol=1e-12)


@pytest.mark.full
def test_slopes_against_differences(curve, branch):
    a, b, c = curve.cells
    width = curve.at[2] - curve.at[0]
    np.testing.assert_allclose(b.by_alpha.value, (c.value - a.value) / width, rtol=0.04)
    np.testing.assert_allclose(b.gen_error.by_alpha.value, (c.gen_error.value - a.gen_error.value) / width, rtol=5e-3)
    assert 0 < b.by_alpha.stderr < 0.05 * abs(b.by_alpha.value)
    assert (curve.question, curve.points[0].branch, curve.parameter, curve.jumps) == ("best lam", branch, "alpha", [])
    np.testing.assert_array_equal(curve.at, SETTINGS[branch][0])
    np.testing.assert_array_equal(curve.stderr("gen_error"), [float(p.gen_error.stderr) for p in curve.cells])
    assert curve.summary().startswith(f"best lam of the {branch} branch at 3 alphas from ")
    report = curve.to_dict()
    assert report["place"][1] == "inside" and report["lam"][1] == float(b.value) == curve.values()[1]


@pytest.mark.full
def test_sensitivities_against_differences(curve, model, lines, branch):
    best, step = curve.cells[1], 0.01
    models = [eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(0.5 + d)) for d in (-step, step)]
    options = {"branch": branch, "alpha": float(best.alpha), "bracket": SETTINGS[branch][1]}
    below, above = ta.sweep(ta.best_ridge, models, nodes=lines, **options).cells
    slope = (above.value - below.value) / (2 * step)
    np.testing.assert_allclose(best.sensitivities.sigma, slope, rtol=0.04, atol=3 * best.sensitivities_stderr.sigma)
    slope = (above.gen_error.value - below.gen_error.value) / (2 * step)
    np.testing.assert_allclose(best.gen_error.sensitivities.sigma, slope, rtol=0.02)
    assert best.sensitivities.lam == 0 and best.gen_error.sensitivities.lam == 0


@pytest.mark.full
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


@pytest.mark.full
def test_the_uninformed_state_is_global_where_no_branch_exists(lines):
    """There is no gap in a sweep: the smallest error is that of the uninformed state, by independent solves as well."""
    layer = ta.DotProduct(omega=0.02)
    (best,) = ta.sweep(ta.best_ridge, layer, alpha=[0.3], nodes=lines, branch=None, bracket=(1e-3, 4e-3)).cells
    assert best.state.branch == "uninformed" and best.place == "inside" and bool(best.ok)
    lams = float(best.value) * np.array([0.7, 1.0, 1.4])
    scan = ta.sweep(ta.solve, layer, branch="uninformed", lam=lams, alpha=0.3, nodes=lines).values("gen_error")
    np.testing.assert_allclose(best.gen_error.value, scan[1], rtol=1e-4)
    assert scan[1] < min(scan[0], scan[2])


# On theories in closed form


def task_of(model, nodes, branch=None, number="lam", bracket=(1e-4, 1.0)):
    return prepared_task(model, branch, nodes, number, bracket, None).at(model, jnp.asarray(1.5))


ROOT = ta.Axis("root", 0.1, lambda m, v: eqx.tree_at(lambda m: m.lam, m, v**2))
CROSSING = 10 ** (-13 / 6)  # in the middle between two ridges of the walk


@pytest.mark.parametrize(
    ("shift", "bend", "kind"),
    [
        (-1.5, 0.01, "inside"),
        (1.5, 0.01, "transition"),
        # The losses cross at a larger or smaller ridge than they seem to on the steps of the walk.
        (-0.1, 3.0, "inside"),
        (0.1, -3.0, "transition"),
    ],
)
def test_the_best_ridge_of_the_global_minimum(model, rule, shift, bend, kind):
    """The semantic state has the lower loss below the crossing, and its error has its minimum at a shift from it."""

    def x(m):  # log(ridge / crossing); both the crossing and the minimum are proportional to sigma
        return np.log(m.lam * 0.5 / (CROSSING * m.sigma))

    losses = {"positional": lambda m, a: 0.0 * a, "semantic": lambda m, a: (np.exp(bend * x(m)) - 1) / bend}
    errors = {"positional": lambda m, a: 9.0 + a, "semantic": lambda m, a: a + (x(m) - shift) ** 2}
    task = task_of(model, rule)
    best = best_of(task, Toy(losses, errors).run(best_path(task)))
    value, error = (CROSSING * np.exp(shift), 1.5) if kind == "inside" else (CROSSING, 1.5 + shift**2)
    assert best.place == kind and best.ok and best.state.branch == "semantic"
    assert [state.branch for state in best.branches] == ["semantic", "positional"][: 1 + (kind == "transition")]
    np.testing.assert_allclose([best.value, best.gen_error.value], [value, error], rtol=2e-3)
    np.testing.assert_allclose(best.sensitivities.sigma, value / 0.5, rtol=0.01)
    slopes = best.by_alpha.value, best.gen_error.by_alpha.value, best.gen_error.sensitivities.omega
    np.testing.assert_allclose(slopes, [0.0, 1.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("number", ["lam", "mixing[0,1]", ROOT], ids=lambda n: getattr(n, "name", n))
def test_slopes_of_a_number(model, rule, number):
    """A function of the model is differentiated in the number, in the others at a fixed value, and in alpha."""
    family = task_of(model, rule, "semantic", number, (0.01, 0.3)).family
    weights = jax.tree.map(lambda a: np.linspace(1.0, 2.0, a.size).reshape(a.shape), model)
    at = jax.jit(lambda model, v: family.number.set(model, None, v)[0])

    def fn(model, v):
        return sum(float(np.vdot(w, a)) for w, a in zip(*map(jax.tree.leaves, (weights, at(model, v))), strict=True))

    by_model = jax.tree.map(lambda a: np.stack([a, 2 * a]), weights)
    (rates, by_alpha), slope = family.derivatives(0.2, by_model, np.array([3.0, 4.0]))
    _, by_others, by_number = differentiated(fn, model, 0.2)
    np.testing.assert_allclose(slope, by_number * np.array([1.0, 2.0]), rtol=1e-6)
    for a, b in zip(jax.tree.leaves(rates), jax.tree.leaves(by_others), strict=True):
        np.testing.assert_allclose(a[1], 2 * b, atol=1e-6)
    np.testing.assert_array_equal(by_alpha, [3.0, 4.0])


# Results of searches made by hand

STEPS = np.array([-0.01, 0.01, -0.02, 0.02])


def optimum(model, states, kind="inside", branch=0, value=0.002, converged=True, count=1):
    """A place on four replicates, whose x moves by 2 with every number of the model, and whose error by 3.

    The common value is off by steps of -.01, .01, -.02 and .02 in x. The slopes of the number are -4 in x.
    """
    rates = jax.tree.map(lambda a: np.full((4, *a.shape), 8.0), (model, np.ones(())))
    zero = Reading(np.asarray(value), (states,), 4.0 * STEPS, rates, np.full(4, -4.0 / value), converged=converged)
    error_rates = jax.tree.map(lambda a: np.full_like(a, 3.0), rates)
    error = Reading(zero.at, (states,), 1e-3 * np.array([1.0, 1.1, 0.9, 1.0]), error_rates, np.zeros(4))
    return Optimum(kind, branch, zero, error, dict.fromkeys(PAIR[:: 1 - 2 * branch][:count], states))


def test_result(model, rule, semantic_states):
    task, found = task_of(model, rule, "positional"), optimum(model, semantic_states)
    best = best_of(task, found)
    values = 0.002 * np.exp(STEPS)
    np.testing.assert_allclose([best.value, best.stderr], [values.mean(), ta.results.error_bar(values)], rtol=1e-12)
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
    # `jax.grad` gives the sensitivities, in the model and in alpha.
    gradients = jax.grad(lambda m, a: best_of(task.at(m, a), found).value, (0, 1))(model, jnp.asarray(1.5))
    np.testing.assert_allclose([gradients[0].sigma, gradients[1]], 2 * values.mean(), rtol=1e-12)
    gradient = jax.grad(lambda m: best_of(task.at(m, jnp.asarray(1.5)), found).gen_error.value)(model)
    np.testing.assert_allclose(gradient.omega, 3.0, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "value", "converged", "text"),
    [
        ("transition", 0.002, True, "the global minimum changes its branch there, and the test error falls up to it"),
        ("lower end", 1e-5, True, "no smallest error: it falls down to there, and the bracket ends there"),
        ("upper end", 0.002, True, "no smallest error: it falls up to there, and there is no state at lam = 0.004"),
        ("inside", 0.002, False, "the search near lam = 0.002 did not settle: max steps"),
    ],
)
def test_reasons(model, rule, semantic_states, kind, value, converged, text):
    beyond = 0.004 if kind == "upper end" else None
    found = optimum(model, semantic_states, kind, 1, value, converged, count=2)._replace(beyond=beyond)
    best = best_of(task_of(model, rule), found)
    assert best.reason.startswith(text) and text in best.summary() and best.place == kind
    assert [s.branch for s in best.branches] == ["semantic", "positional"] and bool(best.ok) == converged


def test_no_state(model, rule):
    task = task_of(model, rule, "semantic", bracket=(1e-5, 1.0))
    best = best_of(task, int(ta.Status.absent))
    assert np.isnan(best.value) and best.place == "nowhere" and best.status == ta.Status.absent
    assert best.summary().endswith("not found, as there is no semantic state from 1e-05 to 1")
    with pytest.raises(ta.InputError, match="best lam must have a state, but there is no semantic state"):
        _ = best.state
    assert best.to_dict()["sensitivities"] is None
    nowhere = best_of(task_of(model, rule), int(ta.Status.absent))
    assert nowhere.reason.startswith("there is no positional, semantic or uninformed st")
    failed = best_of(task, int(ta.Status.max_steps))
    assert failed.status == ta.Status.max_steps and "no semantic state was settled" in failed.reason
