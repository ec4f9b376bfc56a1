"""The rule that breaks lines where the proximal operator jumps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Signs, state
from made import numbers_of, overlaps_of

import tiedattn_jax as ta
from tiedattn_jax.averages.lines import shifts, vectors_across
from tiedattn_jax.averages.maxwell import FieldLines, Gaps, Section
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import prox
from tiedattn_jax.averages.rules import fields
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.theory.observables import second_minimum_share
from tiedattn_jax.theory.potentials import channel_gradient, points_in

# The target never looks at the other token: with the overlaps below most lines have two or three jumps.
APART = ta.DotProduct(mixing=((1.0, 0.0), (0.0, 1.0)))
MANY_JUMPS = overlaps_of(0.33, 18.85, 0.025)


RECIPE = ta.Lines(5, points=24, replicates=1)


def assert_is(fp, case):
    """A solution agrees with a reference state within its error bars."""
    values, exact = numbers_of(fp.replicates)[:, :5], [getattr(case, k) for k in ("q", "V", "theta", "m", "train_loss")]
    assert bool(fp.ok) and np.all(np.abs(values.mean(0) - np.array(exact)) <= 4 * error_bar(values) + 1e-12)


def one_block(rule):
    replicate = rule.replicate(0)
    return replicate, jax.tree.map(lambda a: a[0], replicate.blocks())


@jax.jit
def at_nodes(model, x, rule, block):
    """Points of a rule, with slope and energy there, and the global minima of searches from several starts."""
    points = points_in(model, x, rule, block)
    h, y = fields(model, x, points.student, points.teacher)
    problem = ProxProblem(model, x.V, y)
    minima = prox(problem, h)
    return points, minima, problem.gradient(points.z, h), problem.energy(points.z, h), problem.energy(minima.z, h)


LARGE = ta.Lines(7, points=24, replicates=1, block=2**15)


@pytest.mark.full
@pytest.mark.parametrize(("case", "recipe"), [(CASES[4], RECIPE), (CASES[1], LARGE)], ids=["semantic", "positional"])
def test_every_node_is_at_the_global_minimum(model, case, recipe):
    """Every node lies at the global minimum of a search from several starts, so no line is broken in a wrong place."""
    nodes, x = recipe.rule(model), state(case)
    points, minima, slope, *_ = at_nodes(model, x, *one_block(nodes))
    np.testing.assert_allclose(points.z, minima.z, atol=1e-7)
    assert np.max(np.abs(slope)) < 1e-8
    weight, gap, expected = (np.asarray(a) for a in (points.weight, points.gap, minima.gap))
    np.testing.assert_allclose(np.sum(weight), 1, rtol=1e-3)
    finite = np.isfinite(gap) & np.isfinite(expected)
    assert np.sum(finite) > 50
    np.testing.assert_allclose(gap[finite], expected[finite], rtol=0.05, atol=1e-6)
    shares = [float(second_minimum_share(model, x, nodes, gap).value) for gap in (1e-3, jnp.inf)]
    np.testing.assert_allclose(shares, [np.sum(weight[expected < gap]) for gap in (1e-3, np.inf)], rtol=0.1)
    assert 0 < shares[0] < shares[1]


@pytest.mark.full
@pytest.mark.parametrize(("jumps", "resolved"), [(None, 0.97), (1, 0.17)])
def test_lines_with_several_jumps(jumps, resolved):
    """All nodes lie at the global minimum, also on lines with more jumps than Maxwell's construction is allowed."""
    rule, block = one_block(dataclasses.replace(RECIPE, jumps=jumps).rule(APART))
    points, _, _, *energies = at_nodes(APART, MANY_JUMPS, rule, block)
    weight, energy, lowest = map(np.asarray, (points.weight, *energies))
    np.testing.assert_allclose(weight @ points.resolved, resolved, atol=0.01)
    excess = energy - lowest  # nonzero at a few nodes in the tails
    assert weight @ np.abs(excess) < 1e-12 and np.mean(excess > 1e-9) < 1e-3
    np.testing.assert_allclose(np.sum(weight), 1, rtol=1e-3)  # the weights of a resolved line miss up to 1 %
    # 300 lines, some of which have nodes at random offsets.
    np.testing.assert_allclose(np.asarray(points.student)[:, 0] ** 2 @ weight, [1, 1], rtol=1e-2)
    np.testing.assert_allclose(weight @ energy, 9.08e-3, rtol=0.01)  # with one jump allowed 9.03e-3, with three 9.14e-3


@pytest.mark.full
def test_lines_that_are_not_resolved_give_no_bias():
    """Unresolved lines with random offsets give the mean energy of single nodes; fixed nodes were .7 % off."""
    model, x = ta.DotProduct(0.33, 2.54, 4e-4, ((0.85, 0.15), (0.63, 0.37))), overlaps_of(0.3, 1.0)

    @jax.jit
    def energy(rule):
        return rule.each(lambda replicate: channel_gradient(model, x, replicate)[0])

    lines, single = (energy(recipe.rule(model)) for recipe in (ta.Lines(lines=2**11), ta.Sobol(2**13)))
    bar = np.hypot(*(np.std(a, ddof=1) / 2 for a in (lines, single)))
    assert bar < 1e-3 * np.mean(single)
    assert abs(np.mean(lines) - np.mean(single)) < 4 * bar


def test_nodes_move_with_the_jumps(model):
    """Nodes that move with jumps carry their weight along, so moments of the fields do not depend on V.

    A number that depends on the overlaps has the slope of central differences, also at a jump from one well to a
    shallower one.
    """
    rule, block = one_block(ta.Lines(3, points=48, replicates=1).rule(APART))

    def moments(model, x):
        p = points_in(model, x, rule, block)
        (s, t, z), w = (a[:, 0] for a in (p.student, p.teacher, p.z)), p.weight
        return jnp.stack([jnp.sum(w * a) for a in (s[0] ** 2, s[1] ** 2, s[0] * s[1], s[0] * t[0], 1.0, z[0] - z[1])])

    @jax.jit
    def run(model, x, change, h):
        return jax.jvp(lambda x: moments(model, x), (jax.tree.map(lambda a, b: a + h * b, x, change),), (change,))

    def along(**change):
        return dataclasses.replace(overlaps_of(0.0, 0.0), **change)

    values, slopes = run(APART, MANY_JUMPS, along(V=MANY_JUMPS.V), 0.0)
    np.testing.assert_allclose(values[:4], [1, 1, 0, 0], atol=2e-2)
    np.testing.assert_allclose(values[4], 1, rtol=3e-3)
    np.testing.assert_allclose(slopes[:5], 0, atol=1e-4)
    x, step = state(CASES[4]), 0.02
    for change in (along(q=x.q), along(V=x.V), along(theta=x.theta), along(m=jnp.array([[0.3], [-0.2]]))):
        (_, slope), (above, _), (below, _) = (run(model, x, change, h) for h in (0.0, step, -step))
        np.testing.assert_allclose(slope[5], (above - below)[5] / (2 * step), rtol=5e-3)


def test_size_of_the_product_rule(model):
    """Angles, radii and places across are integrated exactly up to a degree that grows with the order."""
    sizes = {(5, False): 7 * 15 * 3, (4, False): 7 * 12 * 3, (5, True): 14 * 15 * 3, (9, False): 11 * 27 * 5}
    for (order, even), count in sizes.items():
        rule = ta.Lines(order, even=even, replicates=2).rule(model)
        assert rule.size == count * (order + 15) and rule.stack.points_per_line == order + 15
        replicate = rule.replicate(1)
        y, w = np.asarray(replicate.teacher)[:, 0], np.asarray(replicate.weight)
        np.testing.assert_allclose(np.sum(w), 1, rtol=1e-12)
        moments = [np.sum(w * a) for a in (y[0] ** 2, y[1] ** 4, y[0] ** 2 * y[1] ** 2, replicate.across[0] ** 2)]
        np.testing.assert_allclose(moments, [1, 3, 1, 1], rtol=1e-3)
        assert not np.allclose(rule.stack.weight[0], rule.stack.weight[1])
        odd = np.sum(w * (y[0] + 1j * y[1]) ** {4: 7, 5: 7, 9: 11}[order])  # of as many angles as there are
        assert bool(abs(odd) < 1e-8) == even
        assert bool(replicate.reach[0] == replicate.reach[1]) == even


def test_smooth_averages(model):
    rule, block = one_block(ta.Lines(7, replicates=1, block=2**15).rule(model))
    x = state(CASES[0])
    student, teacher, weight = jax.jit(lambda rule, block: rule.quadrature(block))(rule, block)
    h, y = (np.asarray(a)[:, 0] for a in jax.jit(fields)(model, x, student, teacher))
    for a, b, exact in ((h, h, x.q), (h, y, x.theta), (y, y, model.rho)):
        np.testing.assert_allclose((a * b) @ weight, exact[:, 0, 0], rtol=1e-4)
    np.testing.assert_allclose((h[0] * h[1]) @ weight, 0, atol=1e-5)


@pytest.mark.full
def test_sobol_lines_and_a_fixed_direction(model):
    """Other lines, along a direction that the wells hardly have, give the reference state within error bars."""
    case = CASES[4]
    rule = ta.Lines(lines=2**9, replicates=4, direction=[[1.0], [0.2]], jumps=2).rule(model)
    assert_is(ta.solve(model, case.alpha, case.branch, rule, start=state(case)), case)


@pytest.mark.full
def test_single_precision():
    model = ta.DotProduct(dtype=jnp.float32)
    start = jax.tree.map(jnp.float32, state(CASES[4]))
    fp = ta.solve(model, 1.0, "semantic", ta.Lines(5, replicates=2).rule(model), start=start)
    assert fp.overlaps.q.dtype == jnp.float32 and bool(fp.ok)
    np.testing.assert_allclose(fp.overlaps.V[0, 0, 0], CASES[4].V, rtol=3e-3)


def test_a_jump_that_is_just_about_to_end_moves_nothing(model):
    """A jump of zero width between its two sides moves nothing, although its motion is 0 / 0."""
    ones, z = jnp.ones((1, 1)), jnp.full((1, 2, 1), 0.3)
    side = Section.of(ones, z, z, ones, ones, ones, ones)
    gaps = Gaps(side, side, jnp.ones((1, 1), bool), (0 * ones, 2 * ones))

    @jax.jit
    @jax.value_and_grad
    def total(V):
        problem = ProxProblem(model, V, jnp.full((2, 1, 1), 0.2))
        lines = FieldLines(problem, jnp.zeros((2, 1)), jnp.ones((2, 1)), jnp.ones((2, 1)))
        return sum(jnp.sum(a) for a in shifts(lines, gaps, jnp.array([[0.5], [1.5]])))

    value, slope = total(np.full((2, 1, 1), 12.0))
    assert value == 0 and not np.any(slope)


@pytest.mark.full
def test_one_field():
    """Lines average the Moreau envelope of one field exactly, up to the rounding of |z|.

    ``E min_z (|z| - 1)^2 / 2 + (z - h)^2 / (2 V) = E (|h| - 1)^2 / (2 (1 + V))``. No field lies across the lines.
    """
    model, q, V = Signs(lam=jnp.asarray(1.0)), 0.3, 0.8
    rule = ta.Lines(5, lines=4).rule(model).replicate(0)
    M = jax.jit(channel_gradient)(model, overlaps_of(q, V, tokens=1), rule)[0]
    np.testing.assert_allclose(M, (1 + q - 2 * np.sqrt(2 * q / np.pi)) / (2 * (1 + V)), rtol=1e-6)
    assert np.all(vectors_across(-jnp.ones((1, 3)), jnp.zeros((0, 3))) == 0)
