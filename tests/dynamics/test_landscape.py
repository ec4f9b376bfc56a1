"""Labels of the population risk against reference numbers, minima, and finite differences."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.dynamics.landscape import CANDIDATES, Heights, Landscape, words_of

GRID = ta.GaussHermite(5, replicates=1)


def sequence_model(omega, a):
    """The setting of arXiv:2506.02651: tokens of variance one, and a mixing matrix that a^2 makes sharper."""
    scores = np.exp(a**2 * np.array([[1.0, -1.0], [-1.0, 1.0]]))
    return ta.DotProduct(omega=omega, sigma=1.0, mixing=scores / scores.sum(1, keepdims=True))


def sharpened(model, a):
    return dataclasses.replace(model, mixing=sequence_model(0.0, a).mixing)


@pytest.fixture(scope="module")
def nodes():
    return ta.Sobol(2**15)


def test_reference_curvatures_at_the_origin(nodes):
    """H_ee = .13326 at omega = 0 and H_mm = -.2205 (1 - omega), by two-dimensional averages in another program."""
    for omega in (0.0, 0.5):
        point = ta.dynamics.landscape(sequence_model(omega, 0.75), size=1.0, nodes=nodes)
        expected = -0.2205 * (1 - omega)
        assert abs(point.mean.slope_semantic - expected) < 3 * point.stderr.slope_semantic + 5e-5
        if omega == 0:
            assert abs(point.mean.slope_positional - 0.13326) < 3 * point.stderr.slope_positional + 5e-6
        assert point.stderr.slope_semantic < 2e-3


@pytest.mark.parametrize(("a", "corners", "origin"), [(0.75, 0.98475, 0.94614), (0.95, 0.77151, 0.67933)])
def test_reference_boundaries(nodes, a, corners, origin):
    """Between the two the global minimum is semantic and the steepest descent positional: label 2 or 6."""
    for change, expected in (("global", corners), ("steepest", origin)):
        at = expected + np.array([-0.01, 0.01])
        points = [ta.dynamics.landscape(sequence_model(omega, a), size=1.0, nodes=nodes) for omega in at]
        low, high = (float(point.differences[change]) for point in points)
        assert low < 0 < high and at[0] - low * 0.02 / (high - low) == pytest.approx(expected, abs=5e-4)
    between = ta.dynamics.landscape(sequence_model((corners + origin) / 2, a), size=1.0, nodes=nodes)
    assert int(between.label) % 4 == 2
    assert "semantic minimum, positional descent" in str(between) and "size 1" in str(between)
    json.dumps(between.to_dict())


@pytest.mark.full
def test_corners_by_sampled_fields(nodes):
    """Risks and curvatures at the corners, from sampled fields and differences."""
    model, samples, step = sequence_model(0.4, 0.8), 200_000, 0.05
    v, eta, w = jax.random.normal(jax.random.key(0), (3, samples, 2))
    loss = jax.jit(jax.vmap(lambda h, y: model.loss(h[:, None], y[:, None])))

    def losses(angle, inside=0.0):
        """Losses of a student of size one, a part `inside` of which has no overlaps."""
        b, c = np.sqrt(1 - inside) * np.cos(angle), np.sqrt(1 - inside) * np.sin(angle)
        return np.asarray(loss(b * v + c * eta + np.sqrt(inside) * w + c * jnp.array([1.0, -1.0]), v))

    point = ta.dynamics.landscape(model, size=1.0, nodes=nodes).mean
    corners = {"semantic": (0.0, point.curvature_semantic), "positional": (np.pi / 2, point.curvature_positional)}
    for name, (angle, curvature) in corners.items():
        centre = losses(angle)
        bar = np.std(centre) / samples**0.5
        assert abs(np.mean(centre) - getattr(point, name)) < 4 * bar
        along_circle = (losses(angle + step) + losses(angle - step) - 2 * centre) / step**2
        inwards = 2 * (losses(angle, step**2) - centre) / step**2
        differences = [np.mean(along_circle), np.mean(inwards)]
        smaller = (along_circle, inwards)[int(np.argmin(differences))]
        assert abs(np.min(differences) - curvature) < 4 * np.std(smaller) / samples**0.5 + 0.02 * abs(curvature)


@pytest.mark.full
def test_ridge(model):
    """The labels follow from the minima of `population`, and from small starts of endless data."""
    point = ta.dynamics.landscape(model, 0.005)
    semantic, positional = (ta.dynamics.population(model, 0.005, name) for name in ("semantic", "positional"))
    assert (float(point.mean.semantic), float(point.mean.positional)) == (float(semantic.risk), float(positional.risk))
    assert semantic.stable and positional.stable and int(point.label) == 6
    # At alpha = 1e5 a small student grows at alpha times minus the curvatures, with the ridge kappa alpha.
    alpha = 1e5
    start = ta.dynamics.small_start(ta.DotProduct(lam=0.005 * alpha), alpha)
    np.testing.assert_allclose(start.encodings / alpha, -point.mean.slope_positional, rtol=1e-3)
    np.testing.assert_allclose(start.teacher / alpha, -point.mean.slope_semantic, rtol=1e-2)
    one = ta.dynamics.landscape(model, 0.0)
    assert not bool(one.mean.curvature_positional > 0) and int(one.label) < 4


def test_above_the_ridge_there_is_one_minimum(model):
    """Both candidates are then the student of size zero, whose curvatures are positive."""
    below, above = (ta.dynamics.landscape(model, kappa, nodes=GRID) for kappa in (0.005, 0.2))
    assert int(below.label) == 6 and int(above.label) < 4 and above.ok
    assert "two minima" in str(below) and "both candidates are the student of size zero" in str(above)
    assert above.mean.curvature_semantic > 0 and above.differences["several"] < 0 < below.differences["several"]


@pytest.mark.full
def test_map(nodes):
    axes = ta.Axis("omega", [0.6, 0.8, 0.95]), ta.Axis("a", [0.75, 0.95], sharpened)
    table = ta.sweep(ta.dynamics.landscape, sequence_model(0.6, 0.75), *axes, size=1.0, nodes=nodes)
    assert table.values().shape == (3, 2) and np.all(table.status == 0) and table.found.all()
    single = ta.dynamics.landscape(sequence_model(0.8, 0.95), size=1.0, nodes=nodes)
    assert int(table.values()[1, 1]) == int(single.label) and int(table.values()[1, 1]) % 4 == 3
    assert table.values("semantic")[1, 1] == float(single.mean.semantic)
    assert table.stderr("semantic")[1, 1] == float(single.stderr.semantic)
    (line,) = table.contours(lambda cell: cell.differences["steepest"])
    upper = line[np.argmax(line[:, 1])]
    assert upper[1] == 0.95 and upper[0] == pytest.approx(0.67933, abs=0.02)
    assert "landscape at 3 x 2 settings of omega and a: found at 6" in str(table)


@pytest.mark.full
def test_derivatives():
    model, rule = sequence_model(0.5, 0.8), ta.Sobol(2**9)

    def gap(omega):
        return ta.dynamics.landscape(dataclasses.replace(model, omega=omega), size=1.0, nodes=rule).differences[
            "global"
        ]

    slope = (gap(jnp.asarray(0.51)) - gap(jnp.asarray(0.49))) / 0.02
    np.testing.assert_allclose(jax.grad(gap)(jnp.asarray(0.5)), slope, rtol=1e-3)


@pytest.mark.parametrize("label", range(8))
def test_labels_of_a_landscape(model, label):
    """It counts 1 for a global minimum that is positional, 2 for the steepest descent, 4 for two minima."""
    minimum, descent, two = label % 2, label // 2 % 2, label // 4
    numbers = {
        "semantic": 0.3 + 0.1 * minimum, "positional": 0.35,
        "slope_semantic": -0.3 + 0.1 * descent, "slope_positional": -0.25,
        "curvature_semantic": 0.5, "curvature_positional": 0.2 if two else -0.2,
    }  # fmt: skip

    def landscape(numbers):
        arrays = {name: jnp.full(2, value) for name, value in numbers.items()}
        heights = Heights(**arrays, together=jnp.zeros(2, bool), status=jnp.zeros(2, int))
        return Landscape(model, jnp.asarray(0.005), None, heights)

    found, words = landscape(numbers), ("semantic", "positional")
    assert int(found.label) == label and int(landscape(dict.fromkeys(numbers, 0.0)).label) == 0
    text = f"{words[minimum]} minimum, {words[descent]} descent, {'two minima' if two else 'one minimum'}"
    assert words_of(label) == text and found.title == f"Population risk at kappa = 0.005: {text}"
    expected = 0.1 * minimum - 0.05, 0.1 * descent - 0.05, 0.2 if two else -0.2
    np.testing.assert_allclose([found.differences[k] for k in ("global", "steepest", "several")], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (("converged", "absent"), "converged"), (("max_steps", "converged"), "max_steps"),
        (("absent", "max_steps"), "max_steps"),
    ],
)  # fmt: skip
def test_candidates_of_a_landscape(model, monkeypatch, statuses, status):
    """A candidate that is absent is the origin, and no failure; it does not hide one."""
    module, given = sys.modules["tiedattn_jax.dynamics.landscape"], dict(zip(CANDIDATES, statuses, strict=True))
    states_of = module.states_of

    def told(model, kappa, rule, name):
        return dataclasses.replace(states_of(model, kappa, rule, name), status=jnp.full(1, int(ta.Status[given[name]])))

    monkeypatch.setattr(module, "states_of", told)
    assert ta.dynamics.landscape(model, 0.005, nodes=GRID).replicates.status.tolist() == [int(ta.Status[status])]
