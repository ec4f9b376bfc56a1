import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state
from channels import Noisy, model_of
from made import overlaps_of

import tiedattn_jax as ta
from tiedattn_jax.averages import nodes
from tiedattn_jax.averages.rules import WIDE_COARSE_NODES, average, average_of_weighted, fields, whiten
from tiedattn_jax.theory.potentials import channel_gradient, points_in

pytestmark = pytest.mark.usefixtures("fast_compilation")

RULES = [
    lambda m, **k: ta.Sobol(2**12, **k).rule(m),
    lambda m, **k: ta.MonteCarlo(2**14, **k).rule(m),
    lambda m, **k: ta.GaussHermite(8, **k).rule(m),
]
TOLERANCE = [5e-3, 8e-2, 1e-11]


@pytest.mark.parametrize(("rule", "tol"), list(zip(RULES, TOLERANCE, strict=True)), ids=["sobol", "mc", "gh"])
def test_moments_of_the_fields(model, rule, tol):
    nodes = rule(model, replicates=2)
    x = state(CASES[0])
    for k in range(2):
        replicate = nodes.replicate(k)
        h, y = fields(model, x, replicate.student, replicate.teacher)
        w = replicate.weight
        np.testing.assert_allclose(jnp.sum(w), 1, rtol=1e-12)
        for token in range(2):
            moments = [jnp.sum(w * a[token, 0] * b[token, 0]) for a, b in ((h, h), (h, y), (y, y))]
            np.testing.assert_allclose(moments, [x.q[0, 0, 0], x.theta[0, 0, 0], 0.25], rtol=tol)
            np.testing.assert_allclose(jnp.sum(w * y[token, 0] ** 4), 3 * 0.25**2, rtol=4 * tol)


def test_blocks_do_not_change_the_average(model):
    values = []
    for block, width in ((2**10, 2**10), (300, 2**8), (2**14, 2**10)):  # as few blocks as possible, of equal width
        rule = ta.Sobol(2**10, replicates=1, block=block).rule(model).replicate(0)
        assert rule.blocks().weight.shape[1] == width
        for total in (average, average_of_weighted):
            values.append(total(rule, lambda b: jnp.sum(b.weight * b.student[0, 0] ** 2)))
    np.testing.assert_allclose(values, values[0], rtol=1e-12)


@pytest.mark.parametrize("make", [*RULES, lambda m, **k: ta.Lines(**k).rule(m)], ids=["sobol", "mc", "gh", "lines"])
def test_the_coarse_replicate_is_a_rule(model, make):
    rule = make(model, replicates=2)
    coarse, blocks = rule.coarse, rule.coarse.blocks().weight
    np.testing.assert_allclose(jnp.sum(coarse.weight), 1, rtol=1e-12)
    # The shapes are equal, so that one program serves both.
    assert jax.tree.map(jnp.shape, coarse) == jax.tree.map(jnp.shape, rule.replicate(0))
    share = np.mean(np.asarray(blocks[0]) > 0)
    assert not np.any(blocks[1:]) and coarse.weighted == pytest.approx(share * coarse.size / len(blocks))

    def square(block):  # NaN in blocks without weight, if they were evaluated
        student, _, weight = coarse.quadrature(block)
        return jnp.sum(weight * student[0, 0] ** 2) / jnp.any(block.weight > 0)

    np.testing.assert_allclose(average_of_weighted(coarse, square), 1, rtol=0.1)


def test_beyond_two_fields_the_coarse_replicate_is_small():
    uniform = np.full((3, 3), 1 / 3)
    wide = ta.DotProduct(mixing=uniform, encodings=np.linspace(-1, 1, 3)[:, None])
    for model, count in ((ta.DotProduct(), 2**12), (wide, WIDE_COARSE_NODES)):
        assert ta.Sobol(2**12, replicates=1).rule(model).coarse.weighted == count


def test_gauss_hermite_is_exact_in_every_rotation(model):
    rule = ta.GaussHermite(4, replicates=2).rule(model)
    for k in range(2):
        student, teacher, weight = (getattr(rule.replicate(k), name) for name in ("student", "teacher", "weight"))
        np.testing.assert_allclose(jnp.sum(weight * student[0, 0] ** 6), 15, rtol=1e-10)
        np.testing.assert_allclose(jnp.sum(weight * student[0, 0] ** 2 * teacher[1, 0] ** 2), 1, rtol=1e-10)
    assert not np.allclose(student, rule.replicate(0).student)


def test_nodes_of_small_weight_can_be_left_out(model):
    whole, part = (ta.GaussHermite(10, least_weight=w, replicates=2).rule(model) for w in (0.0, 1e-9))
    assert part.size < 0.6 * whole.size
    for k in range(2):
        a, b = part.replicate(k), whole.replicate(k)
        assert float(jnp.sum(a.weight)) == pytest.approx(1, abs=1e-12)
        means = [jnp.sum(r.weight * jnp.cos(r.student[0, 0] - r.teacher[1, 0])) for r in (a, b)]
        np.testing.assert_allclose(*means, rtol=3e-6)


def test_whitening_undoes_fields(model):
    """`whiten` inverts `fields` and returns their normal log density given the teacher's, up to a constant."""
    replicate = ta.Sobol(64, replicates=1).rule(model).replicate(0)
    x = eqx.tree_at(lambda x: x.m, state(CASES[0]), jnp.array([[0.2], [-0.1]]))
    h, y = fields(model, x, replicate.student, replicate.teacher)
    student, log_density = whiten(model, x, h, y)
    np.testing.assert_allclose(student, replicate.student, atol=1e-12)
    variance = x.q[0, 0, 0] - x.theta[0, 0, 0] ** 2 / 0.25
    mean = x.m[:, 0, None] + x.theta[:, 0] / 0.25 * y[:, 0]
    expected = jnp.sum(-0.5 * (h[:, 0] - mean) ** 2 / variance - 0.5 * jnp.log(variance), 0)
    np.testing.assert_allclose(log_density, expected, rtol=1e-10)


def test_nodes_near_a_jump_share_their_weight():
    """A node within the bandwidth of a jump gives up to half of its weight to the other side, and no weight is lost."""
    model = ta.DotProduct(mixing=((1.0, 0.0), (0.0, 1.0)))  # a model with jumps at many nodes
    replicate = ta.Sobol(2**10, replicates=1).rule(model).replicate(0)
    x = overlaps_of(0.33, 18.85, 0.025)
    block = jax.tree.map(lambda a: a[0], replicate.blocks())
    points = jax.jit(points_in)(model, x, replicate, block)
    np.testing.assert_allclose(jnp.sum(points.weight), 1, rtol=1e-12)
    retained, crossed = points.weight[: 2**10] * 2**10, points.weight[2**10 :] * 2**10
    assert np.all((retained >= 0.5) & (retained <= 1)) and np.all((crossed >= 0) & (crossed <= 0.5))
    gaps = np.asarray(points.gap[: 2**10])
    order = np.argsort(gaps)[: int(np.sum(retained < 1))]
    assert 10 < order.size < 100 and retained[order[0]] < 0.6
    np.testing.assert_allclose(np.sum(1 - retained), np.sum(crossed), rtol=1e-9)
    # Fields change the gap by this much a standard deviation; a node gives weight within .8 N^(-1/4) of them.
    is_copy = np.asarray(points.jumps.density) > 0
    slope = (0.33 - 0.025**2 / 0.25) ** 0.5 / 18.85 * np.linalg.norm(points.jumps.step[:, 0], axis=0)
    width = 0.8 * 1024**-0.25 * slope[is_copy]
    u = np.asarray(points.gap[2**10 :])[is_copy] / width
    assert np.all((u >= 0) & (u < 1)) and abs(np.sum(is_copy) - order.size) <= 1
    np.testing.assert_allclose(crossed[is_copy], 0.5 - 0.75 * u + 0.25 * u**3, atol=2e-3)
    np.testing.assert_allclose(points.jumps.density[is_copy] * 1024, 0.75 * (1 - u**2) / width, rtol=0.02, atol=1e-2)


@pytest.mark.parametrize(("V", "tol"), [(2.0, 1e-7), (12.7, 0.2)], ids=["nothing jumps", "jumps"])
def test_derivatives_of_averages_where_nothing_jumps_are_those_of_the_nodes(model, V, tol):
    """With jumps the difference at the same nodes scatters, and the derivative does not."""
    replicate = ta.Sobol(2**10, replicates=1).rule(model).replicate(0)
    x = overlaps_of(0.05, V, m=0.19)

    @jax.jit
    def response(q):
        changed = eqx.tree_at(lambda x: x.q, x, q * jnp.ones((2, 1, 1)))
        return channel_gradient(model, changed, replicate)[1].q[0, 0, 0]

    step = 1e-5
    difference = (response(0.05 + step) - response(0.05 - step)) / (2 * step)
    slope = jax.jit(jax.jacfwd(response))(0.05)
    np.testing.assert_allclose(slope, difference, rtol=tol)
    assert tol < 1e-3 or abs(slope / difference - 1) > 1e-3


def test_how_much_nodes_carry():
    """Nodes carry the whole derivative if none is near a jump, and a tenth of it if one in a thousand is.

    Nodes without weight do not count.
    """
    weight, width = jnp.where(jnp.arange(2000) < 1000, 1e-3, 0.0), jnp.asarray(0.1)
    number = jnp.arange(2000)
    for near, share in ((number < 0, 1.0), (number < 1, 1 / (1 + 3.0**2)), (number > 1000, 1.0)):
        np.testing.assert_allclose(nodes._carried(near, weight, width), share, rtol=1e-12)
    assert nodes._carried(jnp.ones(4, bool), jnp.zeros(4), width) == 1  # a block of padding without weight


def test_the_share_beyond_a_jump_falls_as_its_delta_function():
    """The share of a node beyond a jump is one half at it and zero at the width; minus its slope integrates to that."""
    gap, width = jnp.linspace(0.0, 3.0, 301), jnp.full(301, 2.0)
    share, delta = (np.asarray(f(gap, width)) for f in (nodes._crossed_share, nodes._delta))
    slope = jax.grad(lambda gap: jnp.sum(nodes._crossed_share(gap, width)))(gap)
    np.testing.assert_allclose(share[[0, 100, 200, 300]], [0.5, 0.15625, 0, 0], atol=1e-15)
    np.testing.assert_allclose(delta[[0, 100, 200, 300]], [0.375, 0.28125, 0, 0], atol=1e-15)
    np.testing.assert_allclose(delta[1:200], -slope[1:200], rtol=1e-12)


def test_fields_of_noise_are_independent_of_all():
    noisy = model_of(Noisy)
    x = eqx.tree_at(lambda x: x.m, state(CASES[0]), jnp.array([[0.2], [-0.1]]))
    replicate = ta.Sobol(2**12, replicates=1).rule(noisy).replicate(0)
    assert replicate.shape == (2, 1, 2) and replicate.teacher.shape == (2, 2, 2**12)
    h, y = jax.jit(fields)(noisy, x, replicate.student, replicate.teacher)
    np.testing.assert_array_equal(y[:, 1], replicate.teacher[:, 1])
    moments = np.cov(np.concatenate([h[:, 0], y[:, 0], y[:, 1]]))
    np.testing.assert_allclose(moments[4:], np.eye(6)[4:], atol=0.01)
    np.testing.assert_allclose(moments[2, 2], 0.25, rtol=0.01)
    np.testing.assert_allclose(jax.jit(whiten)(noisy, x, h, y)[0], replicate.student, atol=1e-12)
