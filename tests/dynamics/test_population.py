"""Minima of the population risk against reference numbers, other averages, limits and differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.dynamics.population import Risk
from tiedattn_jax.theory.observables import gen_error

REFERENCE = {  # R, Theta, |m|, risk
    (0.005, "semantic"): (0.575802, 0.758816, 0.0, 0.00209029),
    (0.005, "positional"): (0.077702, 0.0, 0.278752, 0.0030053),
    (0.0, "semantic"): (0.835395, 0.913999, 0.0, 3.4598e-4),
    (0.0, "positional"): (0.083390, 0.0, 0.288774, 2.80395e-3),
}


@pytest.fixture(scope="module")
def minima(model):
    return {key: ta.dynamics.population(model, *key) for key in REFERENCE}


def numbers(point):
    R, Theta, m, risk = map(np.asarray, (point.R, point.Theta, point.m, point.risk))
    return np.array([R[0, 0], Theta[0, 0], abs(m[0, 0]), risk])


@pytest.mark.parametrize("key", REFERENCE)
def test_minima_of_the_standard_setting(minima, key):
    point = minima[key]
    np.testing.assert_allclose(numbers(point), REFERENCE[key], atol=1e-6)
    assert point.ok and np.max(point.replicates.residual) < 1e-12
    assert np.asarray(point.stderr.R)[0, 0] < 1e-6
    ridge = 0.5 * key[0] * numbers(point)[0]
    assert float(point.risk) == pytest.approx(float(point.gen_error) + ridge, rel=1e-12)
    assert f"{key[1]} {'minimum' if point.stable else 'saddle'}" in str(point)


@pytest.mark.full
@pytest.mark.parametrize("branch", ["semantic", "positional"])
def test_minima_by_other_averages(model, nodes, minima, branch):
    point = ta.dynamics.population(model, 0.005, branch, nodes=nodes)
    bars = numbers(dataclasses.replace(point, replicates=jax.tree.map(lambda a: a[None], point.stderr)))
    difference = np.abs(numbers(point) - numbers(minima[0.005, branch]))
    assert np.all(difference <= 3 * bars) and np.all(bars < 1e-4)


def test_limit_of_many_samples(model, lines, minima):
    """States at lam = kappa alpha go to the minimum like 1 / alpha."""
    alphas, limit = (100.0, 400.0), minima[0.005, "semantic"]
    points = [ta.solve(dataclasses.replace(model, lam=jnp.asarray(0.005 * a)), a, "semantic", lines) for a in alphas]
    rows = [(jax.tree.map(np.asarray, p.overlaps), p.train_loss / a) for p, a in zip(points, alphas, strict=True)]
    values = np.array([[4 * x.q[0, 0, 0], 4 * x.theta[0, 0, 0], loss] for x, loss in rows])
    expected = numbers(limit)[[0, 1, 3]]
    gaps = values - expected
    np.testing.assert_allclose(gaps[0] / gaps[1], 4.0, rtol=0.05)
    np.testing.assert_allclose((4 * values[1] - values[0]) / 3, expected, rtol=1e-4)


@pytest.mark.full
def test_derivatives(model):
    """Implicit derivatives along a direction in omega and kappa against finite differences."""

    def values(step):
        point = ta.dynamics.population(
            dataclasses.replace(model, omega=model.omega + step), 0.005 + 0.01 * step, "semantic"
        )
        return jnp.stack([point.R[0, 0], point.Theta[0, 0], point.risk])

    _, slopes = jax.jvp(values, (jnp.zeros(()),), (jnp.ones(()),))
    step = 1e-5
    np.testing.assert_allclose(slopes, (values(step) - values(-step)) / (2 * step), rtol=1e-6)


@pytest.mark.full
def test_curvature_by_the_test_error(model, nodes, minima):
    """Second differences of the test error in the directions of the teacher, of the encodings and of neither."""
    for key, step in (((0.0, "positional"), 0.02), ((0.005, "semantic"), 0.02)):
        point = minima[key]
        R, Theta, m = point.R, point.Theta, point.m

        def risk(b, c, outside, R=R, Theta=Theta, m=m, kappa=key[0]):
            """The risk of a student with more of the teacher, of the encodings and of another direction."""
            Theta, m = Theta + b, m + c * jnp.array([[1.0], [-1.0]])
            R = Theta**2 + m[:1] ** 2 + outside**2 + 1e-9
            q, theta = (jnp.broadcast_to(0.25 * a, (2, 1, 1)) for a in (R, Theta))
            x = ta.Overlaps(q, jnp.ones_like(q), theta, m)
            return float(gen_error(model, x, nodes).value) + 0.5 * kappa * float(R[0, 0])

        origin = risk(0, 0, 0)
        curvatures = [(risk(*(step * e)) + risk(*(-step * e)) - 2 * origin) / step**2 for e in np.eye(3)]
        assert float(point.curvature) == pytest.approx(min(curvatures), rel=0.02)
        assert bool(point.stable) == (key == (0.005, "semantic"))


@pytest.mark.full
def test_two_columns_learn_both_mechanisms():
    """One column along the teacher, one along the encodings, up to a rotation; the risk is below that of one column."""
    model = ta.DotProduct(rank=2)
    point = ta.dynamics.population(model, 0.005, None)
    theta, m = point.Theta[:, 0], point.m[0]
    assert point.ok and point.stable and float(point.risk) < 0.00209
    np.testing.assert_allclose(point.R, jnp.outer(theta, theta) + jnp.outer(m, m), atol=1e-9)
    assert abs(float(theta @ m)) < 1e-6 and float(jnp.linalg.norm(m)) > 0.05


@pytest.mark.parametrize(
    ("options", "kappa", "R", "Theta", "risk"),
    [
        ({"sigma": 5, "teacher": 0.01}, 0.312, 0.008334, 0.009129, 0.03590),
        ({"sigma": 0.02}, 0.0, 8.7441**2, 8.7441, 5.3925e-7),
    ],
    ids=["small-teacher", "small-fields"],
)
def test_minima_in_other_units(options, kappa, R, Theta, risk):
    """Minima far from the standard units, by minimisation of the risk in another program."""
    point = ta.dynamics.population(ta.DotProduct(**options), kappa)
    assert point.ok
    np.testing.assert_allclose(numbers(point)[[0, 1, 3]], [R, Theta, risk], rtol=1e-4)


def test_the_sign_of_a_replicate_is_that_of_the_start():
    """Tokens with large fields: m and Theta have the signs of the start in every replicate."""
    positional = ta.dynamics.population(ta.DotProduct(sigma=5), 0.0, "positional").replicates
    semantic = ta.dynamics.population(ta.DotProduct(sigma=5, teacher=0.1), 0.0).replicates
    assert np.all(np.asarray(positional.m)[:, 0] > 0.05) and np.all(np.asarray(semantic.Theta) > 0.05)


@pytest.mark.parametrize("unit", [1.0, 1e30])
def test_a_ray_starts_at_its_minimum_in_any_unit_of_the_risk(model, unit):
    """The start has size one here, though the smallest size has a lower risk."""

    class Ray(Risk):
        def value(self, v):
            square = jnp.sum((v / self.unit) ** 2)
            return unit * jnp.where(square < 1e-3, square, 1 + (square - 1) ** 2)

    @jax.jit
    def start(model, replicate):
        return Ray.of(model, jnp.zeros(()), replicate, jnp.array([1.0, 0.0])).start(jnp.zeros((2, 1)))

    replicate = ta.GaussHermite(2, replicates=1).rule(model).replicate(0)
    assert np.linalg.norm(start(model, replicate)) == pytest.approx(1.0)


def test_a_traced_start_that_no_student_has(model):
    @jax.jit
    def found(Theta, m):
        nodes = ta.GaussHermite(8, replicates=1)
        return ta.dynamics.population(model, 0.005, None, nodes=nodes, start=(Theta, m)).replicates

    for start in ((0.5, jnp.full((2, 1), 0.1)), (jnp.nan, jnp.zeros((2, 1)))):
        state = found(*start)
        assert state.status.tolist() == [ta.Status.nonfinite] and np.isnan(state.risk).all()
    assert found(0.5, jnp.array([[0.1], [-0.1]])).status.tolist() == [ta.Status.converged]


def test_absent(model):
    """At omega = 1 any student orthogonal to the encodings has the same risk, and its direction is arbitrary.

    Where tokens are to attend to each other the encodings do not help: p_1 = -p_2 has each attend to itself.
    """
    layer = dataclasses.replace(model, omega=jnp.asarray(1.0))
    assert ta.dynamics.population(layer, 0.0, "semantic").status_name == "absent"
    assert ta.dynamics.population(layer, 0.001, "positional").ok
    crossed = dataclasses.replace(model, omega=jnp.asarray(0.9), mixing=jnp.array([[0.3, 0.7], [0.7, 0.3]]))
    assert ta.dynamics.population(crossed, 0.005, "positional").status_name == "absent"


@pytest.mark.full
def test_spectral_law(model, minima):
    """A law instead of encodings: its root has the derivative of the encodings, |p|^2 = tau_11."""
    law = model.law()

    def risk(size):
        scaled = dataclasses.replace(law, tau=size * law.tau)
        return ta.dynamics.population(ta.DotProduct(spectrum=scaled), 0.005, "positional", nodes=nodes).risk

    nodes = ta.GaussHermite(12, replicates=2).rule(model)
    value, slope = jax.value_and_grad(risk)(jnp.asarray(1.0))
    assert float(value) == pytest.approx(float(minima[0.005, "positional"].risk), abs=1e-6)
    step = 1e-4
    assert float(slope) == pytest.approx(float(risk(1 + step) - risk(1 - step)) / (2 * step), rel=1e-5)
