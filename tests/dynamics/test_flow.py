"""Runge-Kutta steps against closed forms, how many steps are taken, and the directions of the encodings."""

import dataclasses
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.dynamics import flow
from tiedattn_jax.dynamics.emergence import _Coefficients, _integrated_covariance

pytestmark = pytest.mark.usefixtures("fast_compilation")
UNRESOLVED, CONVERGED, NONFINITE = int(ta.Status.unresolved), 0, int(ta.Status.nonfinite)


def exponential(x):
    """The exponential to fourth order, by which a step of the method multiplies."""
    return 1 + x + x**2 / 2 + x**3 / 6 + x**4 / 24


@pytest.mark.parametrize(("points", "steps"), [(2, 1), (4, 1), (3, 4)])
def test_steps_have_the_fourth_order(points, steps):
    """A growth is a power of the exponential to fourth order, and a cubic velocity has an exact integral."""
    until = 1.2
    path = flow.integrated(lambda s: (s[0], s[2] ** 3, 1.0), (1.0, 0.5, 0.0), jnp.asarray(until), points, steps)
    times = np.linspace(0, until, points)
    factor = exponential(until / ((points - 1) * steps))
    np.testing.assert_allclose(path[0], factor ** (steps * np.arange(points)), rtol=1e-12)
    np.testing.assert_allclose(path[1], 0.5 + times**4 / 4, rtol=1e-12)
    np.testing.assert_allclose(path[2], times, atol=1e-12)


def test_the_stages_of_a_step():
    """Velocities are taken at the start, twice in the middle and at the end, which a product of growths shows."""
    h = 0.3
    path = flow.integrated(lambda s: (s[0] * s[1], 1.0), (1.0, 2.0), jnp.asarray(h), 2, 1)
    a = 2.0
    first = a
    second = (a + h / 2) * (1 + h / 2 * first)
    third = (a + h / 2) * (1 + h / 2 * second)
    fourth = (a + h) * (1 + h * third)
    assert float(path[0][1]) == pytest.approx(1 + h / 6 * (first + 2 * second + 2 * third + fourth), rel=1e-12)


def test_covariances_are_integrated_to_fourth_order():
    """Steps take the coefficients at three times: those of growing drift, and of noise alone."""
    h, drift = 0.4, np.array([0.3, 0.5, 0.9, 0.6, 0.2])  # two steps
    zero = np.zeros(5)
    W = _integrated_covariance(
        _Coefficients(jnp.asarray(drift)[:, None, None], jnp.asarray(zero)[:, None, None]),
        jnp.full((1, 1), 2.0),
        jnp.asarray(h),
    )[:, 0, 0]
    expected = [2.0]
    for start, middle, end in (2 * drift[:3], 2 * drift[2:]):
        w = expected[-1]
        first = start * w
        second = middle * (w + h / 2 * first)
        third = middle * (w + h / 2 * second)
        expected.append(w + h / 6 * (first + 2 * second + 2 * third + end * (w + h * third)))
    np.testing.assert_allclose(W, expected, rtol=1e-12)
    constant = _Coefficients(jnp.full((3, 1, 1), -0.5), jnp.zeros((3, 1, 1)))
    assert float(_integrated_covariance(constant, jnp.ones((1, 1)), jnp.asarray(h))[1, 0, 0]) == pytest.approx(
        exponential(-h)
    )
    noise = _Coefficients(jnp.zeros((3, 2, 2)), jnp.arange(3.0)[:, None, None] ** 3 * jnp.eye(2))
    np.testing.assert_allclose(
        _integrated_covariance(noise, jnp.ones((2, 2)), jnp.asarray(2.0))[1], 1 + 4 * np.eye(2), rtol=1e-12
    )
    turning = jnp.array([[[0.0, 1.0], [0.0, 0.0]]] * 3)  # W + h (A W + W A^T) + h^2 A W A^T exactly
    W = _integrated_covariance(_Coefficients(turning, 0 * turning), jnp.eye(2), jnp.asarray(h))[1]
    np.testing.assert_allclose(W, [[1 + h**2, h], [h, 1]], rtol=1e-12)


@pytest.mark.parametrize(
    ("statuses", "least", "most", "taken"),
    [
        ([CONVERGED], 1, 64, [1]),
        ([UNRESOLVED, CONVERGED], 1, 64, [1, 4]),
        ([NONFINITE, UNRESOLVED, CONVERGED], 2, 64, [2, 8, 32]),
        ([UNRESOLVED] * 9, 1, 64, [1, 4, 16, 64]),
        ([UNRESOLVED] * 9, 8, 8, [8]),
        ([int(ta.Status.max_steps)], 1, 64, [1]),
    ],
)
def test_how_many_steps_are_taken(statuses, least, most, taken):
    """After a run that they do not resolve there are four times as many, up to the most. The runs are counted."""
    asked, counted = [], []

    def run(steps):
        asked.append(steps)
        return SimpleNamespace(status=np.array([CONVERGED, statuses[len(asked) - 1]]), steps=steps)

    result = flow.refined(run, least, most, lambda *numbers: counted.append(numbers))
    assert asked == taken and result.steps == taken[-1]
    assert counted == [*((k, k + 1) for k in range(len(taken))), (len(taken), len(taken))]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["sgd", "emergence"])
def test_steps_that_are_asked_for(monkeypatch, model, name):
    """By default as many as resolve it are asked for: an even number, at most 64. Inside of a trace it is fixed."""
    module = importlib.import_module(f"tiedattn_jax.dynamics.{name}")
    monkeypatch.setattr(module, "refined", lambda run, least, most, progress: (least, most))
    start = (0.5, 0.1, 0.1) if name == "sgd" else 0.5
    run = getattr(ta, name)
    nodes = ta.GaussHermite(2, replicates=1).rule(model)

    def asked(**options):
        result = run(model, start, 1.0, 3.0, nodes=nodes, **options)
        return result.replicates, len(result.t), float(result.t[0]), float(result.t[-1])

    points = 101 if name == "sgd" else 51
    assert asked() == ((1, 64), points, 0.0, 3.0)
    assert asked(points=4) == (((2 if name == "sgd" else 1), 64), 4, 0.0, 3.0)
    for steps in (1, 8, 1024):
        assert asked(steps=steps)[0] == (steps, steps)
    traced = []
    jax.make_jaxpr(lambda eta: traced.append(run(model, start, eta, 3.0, nodes=nodes).replicates) or eta)(1.0)
    assert traced == [(4, 4) if name == "sgd" else (1, 1)]
    if name == "sgd":
        for steps in (3, 6, 2048):
            with pytest.raises(ta.InputError, match=f"steps must be a power of two up to 1024, got steps={steps}"):
                asked(steps=steps)


@pytest.mark.parametrize(
    ("encodings", "directions"),
    [
        ([[1.0, 0.0], [-1.0, 0.0]], 1),
        ([[1.0, 0.0], [-1.0, 1e-2]], 2),
        ([[1.0, 0.0], [-1.0, 1e-4]], 1),  # a square of 1e-6 of the largest counts
        ([[0.0, 0.0], [0.0, 0.0]], 1),
        ([[10.0, 0.0], [-10.0, 5e-3]], 1),
        ([[0.1, 0.0], [-0.1, 1e-3]], 2),
    ],
)
def test_directions_of_encodings(encodings, directions):
    model = ta.DotProduct(encodings=encodings)
    assert flow.directions_of(model) == directions and flow.most_directions(model) == 2
    law = dataclasses.replace(model.law())
    assert flow.directions_of(ta.DotProduct(spectrum=law)) == directions
    traced = []
    jax.make_jaxpr(lambda p: traced.append(flow.directions_of(ta.DotProduct(encodings=p))) or p)(jnp.array(encodings))
    assert traced == [None]
    wide = ta.DotProduct(encodings=np.ones((2, 1)))
    assert flow.most_directions(wide) == 1 and flow.most_directions(ta.DotProduct(spectrum=law)) == 2


def test_encodings_on_their_directions():
    """They have the inner products of the encodings, in the directions of the largest ones first to be kept."""
    p = np.random.default_rng(0).standard_normal((3, 2))
    tau, change = jnp.asarray(p @ p.T), jnp.asarray(p @ np.array([[0.3, 0.1], [0.1, -0.2]]) @ p.T)
    P, slope = jax.jvp(lambda tau: flow.encodings_on_directions(tau, jnp.zeros(2)), (tau,), (change,))
    np.testing.assert_allclose(P @ P.T, tau, atol=1e-12)
    np.testing.assert_allclose(slope @ P.T + P @ slope.T, change, atol=1e-12)
    three = flow.encodings_on_directions(tau, jnp.zeros(3))
    np.testing.assert_allclose(three @ three.T, tau, atol=1e-12)
    np.testing.assert_array_equal(flow.is_direction(three), [0, 1, 1])
    few = jnp.array([[1.0, 1e-2, 1e-4], [1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(flow.is_direction(few), [1, 1, 0])
    np.testing.assert_array_equal(flow.is_direction(20 * few), [1, 1, 0])


def test_atoms_without_weight_stay_at_zero():
    shapes = (3, 2), (3, 2, 2), (3, 1, 1), (3, 2, 1)
    law, values = ta.SpectralLaw(jnp.array([0.4, 0.0, 0.6]), *map(jnp.ones, shapes)), jnp.arange(1.0, 7).reshape(3, 2)
    np.testing.assert_array_equal(flow.at_atoms(law, values), [[1, 2], [0, 0], [5, 6]])


def test_inner_products_of_vectors_of_any_length():
    """The pseudo-inverse is that of the vectors of unit length; a vector of length zero is left out."""
    v = np.array([[1e-6, 0.0], [2e5, 1e5], [0.0, 0.0]])
    gram = jnp.asarray(v @ v.T)
    np.testing.assert_allclose(flow.lengths_of(gram), [1e-6, 5e10**0.5, 1.0])
    found = np.asarray(flow.inverse_gram(gram))
    lengths = np.array([1e-6, 5e10**0.5])
    product = found[:2, :2] @ np.asarray(gram)[:2, :2]
    np.testing.assert_allclose(product * lengths[:, None] / lengths, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(found[2], 0, atol=1e-12)


@pytest.mark.parametrize("change", [0.5e-6, 2e-6])
def test_starts_that_agree_up_to_rounding(change):
    """R may be as symmetric, and m as opposite, as one in a million."""
    model = ta.DotProduct(rank=2)
    R = np.array([[50.0, 1.0], [1.0 + 50 * change, 50.0]])
    m = 0.2 * np.array([[1.0, 0.1], [-1 + change, -0.1]])
    for start, text in (((R, 0.1, 0.1), "R symmetric"), ((50.0, 0.01, m), "overlaps that a student can have")):
        if change < 1e-6:
            flow.start_moments(model, start)
        else:
            with pytest.raises(ta.InputError, match=f"start must have {text}"):
                flow.start_moments(model, start)


def test_starts_of_several_columns():
    """A number R is that of every column, Theta goes along the teacher's, and m has a column of its own."""
    model = ta.DotProduct(rank=2)
    s = flow.start_moments(model, (0.5, 0.2, 0.1))
    np.testing.assert_allclose(s.R[0], 0.5 * np.eye(2), atol=1e-12)
    np.testing.assert_allclose(s.Theta[0], [[0.2], [0.0]], atol=1e-12)
    np.testing.assert_allclose(s.M[0], [[0.0, 0.0], [0.1, -0.1]], atol=1e-12)
    with pytest.raises(ta.InputError, match=r"start must have m of shape \(2, 2\), got shape \(3, 2\)"):
        flow.start_moments(model, (0.5, 0.2, np.zeros((3, 2))))
    with pytest.raises(ta.InputError, match=r"start must have R of shape \(2, 2\), got shape \(1, 1\)"):
        flow.start_moments(model, (np.ones((1, 1)), 0.2, 0.1))
    with pytest.raises(ta.InputError, match=r"start must be .*, got 4 entries"):
        flow.start_moments(model, (0.5, 0.2, 0.1, 0.1))
