"""The value of a number with the smallest test error: against brute force, and its derivatives against differences."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases.best_ridge import prepared_search
from tiedattn_jax.phases.best_search import Walk, places_of

sweep_module = importlib.import_module("tiedattn_jax.phases.sweep")  # `sweep` itself is the function

# The proximal operator jumps in both states. The ranges are narrow, so that the tests are fast.
SETTINGS = {"semantic": ([1.2, 1.25, 1.3], (2e-4, 2e-3)), "positional": ([0.95, 1.0, 1.05], (8e-3, 8e-2))}


@pytest.fixture(scope="module", params=list(SETTINGS))
def branch(request):
    return request.param


@pytest.fixture(scope="module")
def curve(model, lines, branch):
    alphas, bracket = SETTINGS[branch]
    return ta.sweep(model, alphas[::-1], branch, lines, best="lam", bracket=bracket)


def test_against_brute_force(curve, model, lines, branch):
    """Errors of independent solves, along a grid of ridges, have their minimum there in every replicate."""
    best = curve.points[1]
    assert bool(best.ok) and best.place == "inside" and best.reason == "" and bool(best.state.jumps)
    x = np.log(float(best.value)) + np.linspace(-0.3, 0.3, 7)
    scan = ta.sweep(model, "lam", np.exp(x), lines, branch=branch, alpha=float(best.alpha))
    errors = np.array([p.replicates.gen_error for p in scan.points])
    minima, values = [], []
    for error in errors.T:
        fit = np.polynomial.Polynomial.fit(x, error, 4)
        root = min(fit.deriv().roots().real, key=lambda r: abs(r - x[3]))
        minima.append(np.exp(root))
        values.append(fit(root))
    np.testing.assert_allclose(best.value, np.mean(minima), rtol=2e-3)
    np.testing.assert_allclose(best.stderr, ta.error_bar(np.array(minima)), rtol=0.1)
    np.testing.assert_allclose(best.gen_error.value, np.mean(values), rtol=1e-4)
    np.testing.assert_allclose(best.gen_error.stderr, ta.error_bar(np.array(values)), rtol=0.1)
    np.testing.assert_allclose(best.state.gen_error, best.gen_error.value, rtol=1e-4)
    np.testing.assert_allclose(best.state.model.lam, best.value, rtol=1e-12)


def test_slopes_against_differences(curve):
    a, b, c = curve.points
    width = curve.at[2] - curve.at[0]
    np.testing.assert_allclose(b.by_alpha.value, (c.value - a.value) / width, rtol=0.04)
    np.testing.assert_allclose(b.gen_error_by_alpha.value, (c.gen_error.value - a.gen_error.value) / width, rtol=5e-3)
    assert 0 < b.by_alpha.stderr < 0.05 * abs(b.by_alpha.value)


def test_sensitivities_against_differences(curve, model, lines, branch):
    best, step = curve.points[1], 0.01
    _, bracket = SETTINGS[branch]
    models = [eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(0.5 + d)) for d in (-step, step)]
    below, above = ta.sweep(
        models, None, None, lines, branch=branch, alpha=float(best.alpha), best="lam", bracket=bracket
    ).points
    slope = (above.value - below.value) / (2 * step)
    np.testing.assert_allclose(best.sensitivities.sigma, slope, rtol=0.04, atol=3 * best.sensitivities_stderr.sigma)
    slope = (above.gen_error.value - below.gen_error.value) / (2 * step)
    np.testing.assert_allclose(best.gen_error_sensitivities.sigma, slope, rtol=0.02)
    assert best.sensitivities.lam == 0 and best.gen_error_sensitivities.lam == 0


def test_curve(curve, branch):
    assert (curve.number, curve.branch, curve.parameter, curve.jumps) == ("lam", branch, "alpha", [])
    np.testing.assert_array_equal(curve.at, SETTINGS[branch][0])
    np.testing.assert_array_equal(curve.best, [float(p.value) for p in curve.points])
    assert np.all(np.diff(curve.gen_error) < 0)
    text = curve.summary()
    assert text.startswith(f"best lam of the {branch} branch at 3 alphas: states at 3") and "inside" in text
    report = curve.to_dict()
    assert report["values"] == SETTINGS[branch][0] and report["points"][1]["place"] == "inside"
    assert report["points"][1]["sensitivities"]["lam"] == 0


def walk(branch, x, error, loss):
    """A walk whose errors and losses are functions of x; NaN where there is no state."""
    return Walk(branch, x, error(x), np.where(np.isnan(error(x)), np.nan, loss(x)), [None] * x.size)


X = np.linspace(-10.0, 0.0, 14)


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


def test_places_without_states():
    nothing = walk("semantic", X, lambda x: np.full_like(x, np.nan), np.zeros_like)
    assert places_of([nothing]) == []
    (alone,) = places_of([nothing, walk("positional", X, lambda x: np.where(x == X[2], 1.0, np.nan), np.zeros_like)])
    assert (alone.branch, alone.x) == (1, X[2])


@pytest.mark.parametrize("name", ["lam", "sigma", "mixing[0,1]"])
def test_slopes_of_a_number(model, lines, name):
    """A function of the model is differentiated in log(number), in the other numbers at a fixed value, and in alpha."""
    task = prepared_search(model, "semantic", lines, name, (0.01, 0.3), None)
    weights = jax.tree.map(lambda a: jnp.linspace(1.0, 2.0, a.size).reshape(a.shape), model)
    x = -2.0

    def fn(model, x):
        at = Parameter(name).set(model, None, jnp.exp(x))[0]
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, weights, at)))

    by_model = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), weights)
    slope, (rates, by_alpha) = task.slopes(x, by_model, np.array([3.0, 4.0]))
    expected = jax.grad(fn, (0, 1))(model, x)
    np.testing.assert_allclose(slope, expected[1] * np.array([1.0, 2.0]), rtol=1e-12)
    for a, b in zip(jax.tree.leaves(rates), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a[1], 2 * b, atol=1e-12)
    np.testing.assert_array_equal(by_alpha, [3.0, 4.0])
