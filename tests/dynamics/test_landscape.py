"""Labels of the population risk against reference numbers, minima, and finite differences."""

import dataclasses
import importlib
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

import tiedattn_jax as ta


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
        point = ta.landscape(sequence_model(omega, 0.75), size=1.0, nodes=nodes)
        expected = -0.2205 * (1 - omega)
        assert abs(point.mean.slope_semantic - expected) < 3 * point.stderr.slope_semantic + 5e-5
        if omega == 0:
            assert abs(point.mean.slope_positional - 0.13326) < 3 * point.stderr.slope_positional + 5e-6
        assert point.stderr.slope_semantic < 2e-3


@pytest.mark.parametrize(("a", "corners", "origin"), [(0.75, 0.98475, 0.94614), (0.95, 0.77151, 0.67933)])
def test_reference_boundaries(nodes, a, corners, origin):
    """Between the two the global minimum is semantic and the steepest descent positional: label 2 or 6."""
    for change, expected in (("global", corners), ("steepest", origin)):

        def difference(omega, change=change):
            return float(ta.landscape(sequence_model(omega, a), size=1.0, nodes=nodes).differences[change])

        assert brentq(difference, 0.5, 0.999, xtol=1e-6) == pytest.approx(expected, abs=5e-4)
    between = ta.landscape(sequence_model((corners + origin) / 2, a), size=1.0, nodes=nodes)
    assert int(between.label) % 4 == 2
    assert "semantic minimum, positional descent" in str(between) and "size 1" in str(between)
    json.dumps(between.to_dict())


def test_corners_by_sampled_fields(nodes):
    """Risks and curvatures at the corners, from sampled fields and differences."""
    model, samples, step = sequence_model(0.4, 0.8), 200_000, 0.05
    v, eta, w = jax.random.normal(jax.random.key(0), (3, samples, 2))
    loss = jax.jit(jax.vmap(lambda h, y: model.loss(h[:, None], y[:, None])))

    def losses(angle, inside=0.0):
        """Losses of a student of size one, a part `inside` of which has no overlaps."""
        b, c = np.sqrt(1 - inside) * np.cos(angle), np.sqrt(1 - inside) * np.sin(angle)
        return np.asarray(loss(b * v + c * eta + np.sqrt(inside) * w + c * jnp.array([1.0, -1.0]), v))

    point = ta.landscape(model, size=1.0, nodes=nodes).mean
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


@pytest.mark.long
def test_ridge(model):
    """The labels follow from the minima of `population`, and from small starts of endless data."""
    point = ta.landscape(model, 0.005)
    semantic, positional = (ta.population(model, 0.005, name) for name in ("semantic", "positional"))
    assert (float(point.mean.semantic), float(point.mean.positional)) == (float(semantic.risk), float(positional.risk))
    assert semantic.stable and positional.stable and int(point.label) == 6
    # At alpha = 1e5 a small student grows at alpha times minus the curvatures, with the ridge kappa alpha.
    alpha = 1e5
    start = ta.small_start(ta.DotProduct(lam=0.005 * alpha), alpha)
    np.testing.assert_allclose(start.encodings / alpha, -point.mean.slope_positional, rtol=1e-3)
    np.testing.assert_allclose(start.teacher / alpha, -point.mean.slope_semantic, rtol=1e-2)
    one = ta.landscape(model, 0.0)
    assert not bool(one.mean.curvature_positional > 0) and int(one.label) < 4


@pytest.mark.long
@pytest.mark.parametrize("failing", ["semantic", "positional"])
def test_a_failure_of_either_candidate_is_told(model, monkeypatch, failing):
    """A candidate that is absent is the origin, and no failure."""
    module, outcome = importlib.import_module("tiedattn_jax.dynamics.landscape"), {}
    states_of = module.states_of

    def replaced(model, kappa, rule, name):
        states = states_of(model, kappa, rule, name)
        status = outcome["status"] if name == failing else ta.Status.converged
        return eqx.tree_at(lambda s: s.status, states, jnp.full_like(states.status, status))

    monkeypatch.setattr(module, "states_of", replaced)
    for status, name in ((ta.Status.max_steps, "max steps"), (ta.Status.absent, "converged")):
        outcome["status"] = status
        assert ta.landscape(model, 0.005).status_name == name


def test_map(nodes):
    axes = ta.Axis("omega", [0.6, 0.8, 0.95]), ta.Axis("a", [0.75, 0.95], sharpened)
    table = ta.sweep(sequence_model(0.6, 0.75), "landscape", *axes, size=1.0, nodes=nodes)
    assert table.values().shape == (3, 2) and np.all(table.status == 0) and table.found.all()
    single = ta.landscape(sequence_model(0.8, 0.95), size=1.0, nodes=nodes)
    assert int(table.values()[1, 1]) == int(single.label) and int(table.values()[1, 1]) % 4 == 3
    assert table.values("semantic")[1, 1] == float(single.mean.semantic)
    assert table.stderr("semantic")[1, 1] == float(single.stderr.semantic)
    (line,) = table.contours(lambda cell: cell.differences["steepest"])
    upper = line[np.argmax(line[:, 1])]
    assert upper[1] == 0.95 and upper[0] == pytest.approx(0.67933, abs=0.02)
    assert "landscape at 3 x 2 settings of omega and a: found at 6" in str(table)


def test_derivatives(nodes):
    def gap(omega):
        return ta.landscape(dataclasses.replace(model, omega=omega), size=1.0, nodes=nodes).differences["global"]

    model = sequence_model(0.5, 0.8)
    slope = (gap(jnp.asarray(0.51)) - gap(jnp.asarray(0.49))) / 0.02
    np.testing.assert_allclose(jax.grad(gap)(jnp.asarray(0.5)), slope, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": -1.0}, "size"),
        ({"kappa": -1.0}, "kappa"),
        ({"model": ta.ReLUAttention(), "size": 1.0}, "without kinks"),
        ({"model": ta.DotProduct(rank=2), "size": 1.0}, "one direction each"),
    ],
    ids=["size", "kappa", "kinks", "ranks"],
)
def test_bad_input(arguments, message):
    with pytest.raises(ta.InputError, match=message):
        ta.landscape(**{"model": ta.DotProduct(), **arguments})
    options = {"model": ta.DotProduct(), "omega": [0.3], **arguments}
    with pytest.raises(ta.InputError, match=message):
        ta.sweep(question="landscape", **options)
