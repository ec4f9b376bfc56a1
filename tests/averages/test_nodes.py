"""Single nodes: the moments of their fields, blocks, and the weight that nodes near a jump share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state
from channels import Noisy, model_of
from made import overlaps_of
from problems import rule

import tiedattn_jax as ta
from tiedattn_jax.averages import nodes
from tiedattn_jax.averages.rules import average, average_of_weighted, fields, whiten
from tiedattn_jax.theory.potentials import channel_gradient, points_in

RULES = [
    lambda m, **k: ta.Sobol(2**12, **k).rule(m),
    lambda m, **k: ta.MonteCarlo(2**14, **k).rule(m),
    lambda m, **k: ta.GaussHermite(8, **k).rule(m),
]
TOLERANCE = [5e-3, 8e-2, 1e-11]


@pytest.mark.parametrize(("make", "tol"), list(zip(RULES, TOLERANCE, strict=True)), ids=["sobol", "mc", "gh"])
def test_moments_of_the_fields(model, make, tol):
    nodes, case = make(model, replicates=2), CASES[0]
    for k in range(2):
        replicate = nodes.replicate(k)
        h, y = (np.asarray(a)[:, 0] for a in jax.jit(fields)(model, state(case), replicate.student, replicate.teacher))
        w = np.asarray(replicate.weight)
        np.testing.assert_allclose(np.sum(w), 1, rtol=1e-12)
        for a, b, exact in ((h, h, case.q), (h, y, case.theta), (y, y, 0.25)):
            np.testing.assert_allclose((a * b) @ w, [exact, exact], rtol=tol)
        np.testing.assert_allclose(y**4 @ w, [3 * 0.25**2] * 2, rtol=4 * tol)


def square(block):
    return jnp.sum(block.weight * block.student[0, 0] ** 2)


averages_of_square = jax.jit(lambda rule: jnp.stack([total(rule, square) for total in (average, average_of_weighted)]))


def test_blocks_do_not_change_the_average(model):
    values = []
    for block, width in ((2**10, 2**10), (300, 2**8), (2**14, 2**10)):  # as few blocks as possible, of equal width
        rule = ta.Sobol(2**10, replicates=1, block=block).rule(model).replicate(0)
        assert rule.blocks().weight.shape[1] == width
        values.append(averages_of_square(rule))
    np.testing.assert_allclose(values, values[0][0], rtol=1e-12)


@pytest.mark.parametrize("make", [*RULES, lambda m, **k: ta.Lines(**k).rule(m)], ids=["sobol", "mc", "gh", "lines"])
def test_the_coarse_replicate_is_a_rule(model, make):
    rule = make(model, replicates=2)
    coarse, weight = rule.coarse, np.asarray(rule.coarse.blocks().weight)
    np.testing.assert_allclose(np.sum(coarse.weight), 1, rtol=1e-12)
    # The shapes are equal, so that one program serves both.
    assert jax.tree.map(np.shape, coarse) == jax.tree.map(np.shape, rule.replicate(0))
    share = np.mean(weight[0] > 0)
    assert not np.any(weight[1:]) and coarse.weighted == pytest.approx(share * coarse.size / len(weight))

    @jax.jit
    def second_moment(replicate):
        def square(block):  # NaN in blocks without weight, if they were evaluated
            student, _, weight = replicate.quadrature(block)
            return jnp.sum(weight * student[0, 0] ** 2) / jnp.any(block.weight > 0)

        return average_of_weighted(replicate, square)

    np.testing.assert_allclose(second_moment(coarse), 1, rtol=0.1)


def test_nodes_of_small_weight_can_be_left_out(model):
    stacks = [ta.GaussHermite(10, least_weight=w, replicates=2).rule(model).stack for w in (0.0, 1e-9)]
    weights = [np.asarray(a.weight) for a in stacks]
    assert weights[1].size < 0.6 * weights[0].size
    np.testing.assert_allclose(weights[1].sum(1), 1, rtol=1e-12)
    waves = [np.cos(np.asarray(a.student)[:, 0, 0] - a.teacher[:, 1, 0]) for a in stacks]
    np.testing.assert_allclose(*(np.sum(w * a, 1) for w, a in zip(weights, waves, strict=True)), rtol=3e-6)


def test_nodes_near_a_jump_share_their_weight():
    """A node within the bandwidth of a jump gives up to half of its weight to the other side, and no weight is lost."""
    model = ta.DotProduct(mixing=((1.0, 0.0), (0.0, 1.0)))  # a model with jumps at many nodes
    replicate, x = rule("points").replicate(0), overlaps_of(0.33, 18.85, 0.025)
    block = jax.tree.map(lambda a: a[0], replicate.blocks())
    points = jax.tree.map(np.asarray, jax.jit(points_in)(model, x, replicate, block))
    np.testing.assert_allclose(np.sum(points.weight), 1, rtol=1e-12)
    retained, crossed = points.weight[: 2**10] * 2**10, points.weight[2**10 :] * 2**10
    assert np.all((retained >= 0.5) & (retained <= 1)) and np.all((crossed >= 0) & (crossed <= 0.5))
    order = np.argsort(points.gap[: 2**10])[: int(np.sum(retained < 1))]
    assert 10 < order.size < 100 and retained[order[0]] < 0.6
    np.testing.assert_allclose(np.sum(1 - retained), np.sum(crossed), rtol=1e-9)


@jax.jit
def response_and_slope(model, x, replicate, q):
    def response(q):
        changed = eqx.tree_at(lambda x: x.q, x, q * jnp.ones((2, 1, 1)))
        return channel_gradient(model, changed, replicate)[1].q[0, 0, 0]

    return jax.jvp(response, (q,), (jnp.ones_like(q),))


@pytest.mark.parametrize(("V", "tol"), [(2.0, 1e-7), (12.7, 0.2)], ids=["nothing jumps", "jumps"])
def test_derivatives_of_averages_where_nothing_jumps_are_those_of_the_nodes(model, V, tol):
    """With jumps the difference at the same nodes scatters, and the derivative does not."""
    replicate, x, step = rule("points").replicate(0), overlaps_of(0.05, V, m=0.19), 1e-5
    (_, slope), (above, _), (below, _) = (response_and_slope(model, x, replicate, 0.05 + h) for h in (0.0, step, -step))
    difference = (above - below) / (2 * step)
    np.testing.assert_allclose(slope, difference, rtol=tol)
    assert tol < 1e-3 or abs(slope / difference - 1) > 1e-3


def test_the_share_beyond_a_jump_falls_as_its_delta_function():
    """The share of a node beyond a jump is one half at it and zero at the width; minus its slope integrates to that."""
    gap, width = np.linspace(0.0, 3.0, 301), np.full(301, 2.0)
    share, delta = (np.asarray(jax.jit(f)(gap, width)) for f in (nodes._crossed_share, nodes._delta))
    np.testing.assert_allclose(share[[0, 100, 200, 300]], [0.5, 0.15625, 0, 0], atol=1e-15)
    np.testing.assert_allclose(share[:200], np.cumsum(delta[::-1])[::-1][:200] * 0.01 - delta[:200] * 0.005, atol=1e-4)


def test_fields_of_noise_are_independent_of_all():
    noisy = model_of(Noisy)
    replicate = ta.Sobol(2**12, replicates=1).rule(noisy).replicate(0)
    assert replicate.shape == (2, 1, 2) and replicate.teacher.shape == (2, 2, 2**12)
    x = eqx.tree_at(lambda x: x.m, state(CASES[0]), jnp.array([[0.2], [-0.1]]))
    h, y = map(np.asarray, jax.jit(fields)(noisy, x, replicate.student, replicate.teacher))
    np.testing.assert_array_equal(y[:, 1], replicate.teacher[:, 1])
    moments = np.cov(np.concatenate([h[:, 0], y[:, 0], y[:, 1]]))
    np.testing.assert_allclose(moments[4:], np.eye(6)[4:], atol=0.01)
    np.testing.assert_allclose(moments[2, 2], 0.25, rtol=0.01)
    np.testing.assert_allclose(jax.jit(whiten)(noisy, x, h, y)[0], replicate.student, atol=1e-12)
