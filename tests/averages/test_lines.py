"""The rule that breaks lines where the proximal operator jumps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DERIVATIVES, state

import tiedattn_jax as ta
from tiedattn_jax.averages.fields import fields
from tiedattn_jax.averages.prox import prox, prox_gradient
from tiedattn_jax.results import error_bar
from tiedattn_jax.theory import fixed_points

pytestmark = pytest.mark.usefixtures("quick_programs")
JUMPS = [c for c in CASES if (c.alpha, c.branch) in DERIVATIVES]
NAMES = ("q", "V", "theta", "m", "train_loss")


def numbers(s):
    """Of every replicate of a `State`, (R, 5)."""
    x = s.overlaps
    return jnp.stack([x.q[:, 0, 0, 0], x.V[:, 0, 0, 0], x.theta[:, 0, 0, 0], x.m[:, 0, 0], s.train_loss], 1)


def one_block(rule):
    one = rule.replicate(0)
    return one, jax.tree.map(lambda a: a[0], one.blocks())


@jax.jit
def at_nodes(model, x, rule, block):
    """Points of a rule, their fields, and the minima there that are found from several starts."""
    points = rule.points(model, x, block)
    h, y = fields(model, x, points.student, points.teacher)
    return points, h, y, prox(model, h, x.V, y)


@pytest.mark.parametrize("case", JUMPS, ids=lambda c: f"{c.branch} {c.alpha}")
def test_every_node_is_at_the_global_minimum(model, case):
    """Against the search from several starts at the same fields; so no line is broken in the wrong place."""
    nodes, x = ta.line_nodes(model, 7, points=24, replicates=1), state(case)
    points, h, y, found = at_nodes(model, x, *one_block(nodes))
    np.testing.assert_allclose(points.z, found.z, atol=1e-7)
    assert float(jnp.max(jnp.abs(prox_gradient(model, points.z, h, x.V, y)))) < 1e-8
    np.testing.assert_allclose(jnp.sum(points.weight), 1, rtol=1e-5)
    both = jnp.isfinite(points.gap) & jnp.isfinite(found.gap)
    assert int(jnp.sum(both)) > 50
    shares = [float(ta.second_minimum_share(model, x, nodes, gap).value) for gap in (1e-3, jnp.inf)]
    near, every = (jnp.sum(points.weight * (found.gap < gap)) for gap in (1e-3, jnp.inf))
    np.testing.assert_allclose(shares, [near, every], rtol=0.1)
    assert 0 < shares[0] < shares[1]
    with pytest.raises(ValueError, match="gap"):
        ta.second_minimum_share(model, x, nodes, 0.0)
    np.testing.assert_allclose(points.gap[both], found.gap[both], rtol=0.05, atol=1e-6)


def test_smooth_averages(model):
    rule, block = one_block(ta.line_nodes(model, 7, replicates=1))
    x = state(CASES[0])
    student, teacher, weight = rule.quadrature(model, x, block)
    h, y = fields(model, x, student, teacher)
    for a, b, exact in ((h, h, x.q), (h, y, x.theta), (y, y, model.rho)):
        for token in range(2):
            np.testing.assert_allclose(jnp.sum(weight * a[token, 0] * b[token, 0]), exact[token, 0, 0], rtol=1e-4)
    np.testing.assert_allclose(jnp.sum(weight * h[0, 0] * h[1, 0]), 0, atol=1e-5)


def test_sobol_lines_and_a_fixed_direction(model):
    """Other lines through the same space, in a direction that the wells hardly have."""
    case = CASES[4]
    rule = ta.line_nodes(model, lines=2**9, replicates=4, direction=[[1.0], [0.2]], jumps=2)
    fp = fixed_points.solve_from(model, case.alpha, case.branch, rule, state(case))
    assert bool(fp.ok)
    value, bar = numbers(fp.replicates).mean(0), error_bar(numbers(fp.replicates))
    for i, k in enumerate(NAMES):
        assert abs(value[i] - getattr(case, k)) <= 4 * bar[i] + 1e-12, k


def test_single_precision():
    model = ta.dot_product(dtype=jnp.float32)
    start = jax.tree.map(jnp.float32, state(CASES[4]))
    fp = ta.solve(model, 1.0, "semantic", ta.line_nodes(model, 5, replicates=2), start=start)
    assert fp.overlaps.q.dtype == jnp.float32 and bool(fp.ok)
    np.testing.assert_allclose(fp.overlaps.V[0, 0, 0], CASES[4].V, rtol=3e-3)


def test_precision_on_request(model, monkeypatch):
    case = CASES[1]
    monkeypatch.setattr(fixed_points, "LADDER", {2**12: 2e-3, 2**14: 1e-3})
    fp = ta.solve(model, case.alpha, case.branch, rtol=1e-3, start=state(case))
    assert int(fp.status) == ta.Status.converged
    assert fp.replicates.status.shape == (4,)
    bars = numbers(jax.tree.map(lambda a: a[None], fp.stderr))[0]
    exact = np.array([getattr(case, k) for k in NAMES])
    assert np.all(np.asarray(bars) <= 1e-3 * np.abs(exact))
    assert np.all(np.abs(numbers(fp.replicates).mean(0) - exact) <= 4 * bars)
    short = ta.solve(model, case.alpha, case.branch, rtol=1e-7, start=state(case))
    assert int(short.status) == ta.Status.imprecise and not bool(short.ok)
    assert ta.Status.name_of(short.status) == "imprecise"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"order": 0}, "order"), ({"order": 2.5}, "order"), ({"lines": 1000}, "lines"), ({"lines": -8}, "lines"),
        ({"points": 3}, "points"), ({"jumps": -1}, "jumps"), ({"replicates": 0}, "replicates"),
        ({"direction": [[1.0], [1.0], [1.0]]}, "direction"), ({"direction": [[0.0], [0.0]]}, "direction"),
        ({"direction": [[np.nan], [0.0]]}, "direction"), ({"order": 200}, "order"),
    ],
)  # fmt: skip
def test_bad_rules(model, arguments, named):
    with pytest.raises(ValueError, match=named):
        ta.line_nodes(model, **arguments)


def test_bad_precision(model):
    for bad in (0.0, -1.0, float("nan"), 1e-15):
        with pytest.raises(ValueError, match="rtol"):
            ta.solve(model, 2.0, rtol=bad)
    with pytest.raises(ValueError, match="either nodes or rtol"):
        ta.solve(model, 2.0, nodes=ta.line_nodes(model, 5), rtol=1e-3)
    with pytest.raises(ValueError, match="jax transformation"):
        jax.jit(lambda a: ta.solve(model, a, rtol=1e-3).train_loss)(2.0)
    single = eqx.tree_at(lambda m: m.lam, model, jnp.float32(0.01))
    with pytest.raises(ValueError, match="float32"):
        ta.solve(single, 2.0, rtol=1e-6)
