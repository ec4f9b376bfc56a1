"""The rule that breaks lines where the proximal operator jumps."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DERIVATIVES, Signs, state
from channels import Noisy
from made import numbers_of, overlaps_of
from scipy.stats import norm

import tiedattn_jax as ta
from tiedattn_jax.averages import maxwell
from tiedattn_jax.averages.lines import cuts, directions, lay, shifts, vectors_across
from tiedattn_jax.averages.maxwell import FieldLines, Gaps, Section, common_tangents, energy_profile
from tiedattn_jax.averages.moreau import ProxProblem, loss_at_nodes
from tiedattn_jax.averages.prox import prox
from tiedattn_jax.averages.recipes import default_recipe
from tiedattn_jax.averages.rules import fields, teacher_fields
from tiedattn_jax.base.results import error_bar
from tiedattn_jax.theory import solve as solving
from tiedattn_jax.theory.observables import second_minimum_share
from tiedattn_jax.theory.potentials import channel_gradient, points_in

pytestmark = pytest.mark.usefixtures("fast_compilation")
JUMPS = [c for c in CASES if (c.alpha, c.branch) in DERIVATIVES]
# The target never looks at the other token: with the overlaps below most lines have two or three jumps.
APART = ta.DotProduct(mixing=((1.0, 0.0), (0.0, 1.0)))
MANY_JUMPS = overlaps_of(0.33, 18.85, 0.025)


def exact_numbers(case):
    return np.array([getattr(case, k) for k in ("q", "V", "theta", "m", "train_loss")])


def lay_lines(model, x, replicate):
    """Lay all lines of a replicate."""
    y = teacher_fields(model, replicate.teacher)
    return lay(model, x, y, replicate.across, *directions(model, x, y, replicate.direction))


def one_block(rule):
    replicate = rule.replicate(0)
    return replicate, jax.tree.map(lambda a: a[0], replicate.blocks())


@jax.jit
def at_nodes(model, x, rule, block):
    """Points of a rule, their fields, and the global minima there, searched from several starts."""
    points = points_in(model, x, rule, block)
    h, y = fields(model, x, points.student, points.teacher)
    return points, h, y, prox(ProxProblem(model, x.V, y), h)


@pytest.mark.parametrize("case", JUMPS, ids=lambda c: f"{c.branch} {c.alpha}")
def test_every_node_is_at_the_global_minimum(model, case):
    """Every node lies at the global minimum of a search from several starts, so no line is broken in a wrong place."""
    nodes, x = ta.Lines(7, points=24, replicates=1, block=2**15).rule(model), state(case)
    points, h, y, minima = at_nodes(model, x, *one_block(nodes))
    np.testing.assert_allclose(points.z, minima.z, atol=1e-7)
    assert float(jnp.max(jnp.abs(ProxProblem(model, x.V, y).gradient(points.z, h)))) < 1e-8
    np.testing.assert_allclose(jnp.sum(points.weight), 1, rtol=1e-5)
    finite = jnp.isfinite(points.gap) & jnp.isfinite(minima.gap)
    assert int(jnp.sum(finite)) > 50
    shares = [float(second_minimum_share(model, x, nodes, gap).value) for gap in (1e-3, jnp.inf)]
    close_share, total_share = (jnp.sum(points.weight * (minima.gap < gap)) for gap in (1e-3, jnp.inf))
    np.testing.assert_allclose(shares, [close_share, total_share], rtol=0.1)
    assert 0 < shares[0] < shares[1]
    np.testing.assert_allclose(points.gap[finite], minima.gap[finite], rtol=0.05, atol=1e-6)


@pytest.mark.parametrize(("jumps", "resolved"), [(None, 0.97), (1, 0.17)], ids=["jumps found", "nodes searched for"])
def test_lines_with_several_jumps(jumps, resolved):
    """All nodes lie at the global minimum, also on lines with more jumps than Maxwell's construction is allowed."""
    rule, block = one_block(ta.Lines(5, points=24, replicates=1, jumps=jumps).rule(APART))
    points, h, y, minima = at_nodes(APART, MANY_JUMPS, rule, block)
    np.testing.assert_allclose(jnp.sum(points.weight * points.resolved), resolved, atol=0.01)
    problem = ProxProblem(APART, MANY_JUMPS.V, y)
    energy = problem.energy(points.z, h)
    excess = energy - problem.energy(minima.z, h)  # nonzero at a few nodes in the tails
    assert jnp.sum(points.weight * jnp.abs(excess)) < 1e-12 and jnp.mean(excess > 1e-9) < 1e-3
    np.testing.assert_allclose(jnp.sum(points.weight), 1, rtol=1e-3)  # the weights of a resolved line miss up to 1 %
    for token in range(2):  # 300 lines, some of which have nodes at random offsets
        np.testing.assert_allclose(jnp.sum(points.weight * points.student[token, 0] ** 2), 1, rtol=1e-2)
    # With one jump allowed the mean is 9.03e-3, with three 9.14e-3.
    np.testing.assert_allclose(jnp.sum(points.weight * energy), 9.08e-3, rtol=0.01)


@pytest.mark.parametrize(
    ("setting", "q", "V", "share"),
    [
        # Two Newton steps converge on 17 % of the lines.
        ((0.2, 0.73, 0.036, ((0.86, 0.14), (0.51, 0.49))), 0.28, 3.5, 1.0),
        # The fields change too fast for 24 nodes.
        ((0.4, 1.54, 0.31, ((0.57, 0.43), (0.1, 0.9))), 0.74, 0.556, 0.85),
    ],
)
def test_nodes_in_t_serve_on_a_line_if_their_weights_sum_to_one(setting, q, V, share):
    """On the other lines the nodes are searched for; these lines count as resolved, because their jumps are known."""
    model = ta.DotProduct(*setting)
    rule, block = one_block(ta.Lines(5, points=24, replicates=1).rule(model))
    points = at_nodes(model, overlaps_of(q, V), rule, block)[0]
    weight = (points.weight / jnp.tile(block.weight, 24)).reshape(24, -1)
    is_searched = np.all(np.abs(weight - 1 / 24) < 1e-9, 0)
    np.testing.assert_allclose(jnp.sum(block.weight * ~is_searched), share, atol=0.01)
    np.testing.assert_allclose(weight.sum(0), 1, atol=0.01)
    np.testing.assert_allclose(jnp.sum(points.weight * points.resolved), 1, atol=0.01)
    if not is_searched.any():
        return
    # On these lines nodes lie in parts of equal weight, at an offset that differs from line to line.
    positions = np.asarray(points.student).reshape(2, 24, -1)[..., is_searched & np.asarray(block.weight > 0)]
    direction = positions[:, 1] - positions[:, 0]
    s = np.sum(positions * (direction / np.linalg.norm(direction, axis=0))[:, None], 0)
    offset = 24 * norm.cdf(s) - 0.5 - np.arange(24)[:, None]
    np.testing.assert_allclose(offset, np.broadcast_to(offset[:1], offset.shape), atol=1e-6)
    assert np.std(offset[0]) > 0.2


@pytest.mark.parametrize("steps", [16, 0])
def test_a_line_is_resolved_if_its_tangents_converged(steps, monkeypatch):
    monkeypatch.setattr(maxwell, "_TANGENT_STEPS", steps)
    replicate = ta.Lines(3, points=24, replicates=1).rule(APART).replicate(0)
    lines = lay_lines(APART, MANY_JUMPS, replicate)
    profile = jax.jit(energy_profile)(lines, replicate.reach)
    gaps, resolved = jax.jit(lambda *a: common_tangents(*a, replicate.jumps))(lines, profile)
    jump = gaps.real.any(0)
    assert jnp.mean(jump) > 0.5
    assert jnp.mean(resolved[jump]) > 0.9 if steps else not resolved[jump].any()


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


def test_a_profile_is_the_lower_one_of_two():
    """The energy profile is never below the lowest energy in the plane, and reaches it at three places of four.

    The student is much larger than its teacher.
    """
    model, student = ta.DotProduct(0.32, 1.34, 1e-4, ((0.92, 0.08), (0.11, 0.89))), overlaps_of(6.0, 24.0)
    replicate = ta.Lines(3, points=24, replicates=1).rule(model).replicate(0)
    lines = lay_lines(model, student, replicate)
    profile = jax.jit(energy_profile)(lines, replicate.reach)
    c, size = lines.normal, jnp.sum(lines.normal**2, 0)
    along, in_plane = profile.t[:, None] * c / size, jnp.stack([-c[1], c[0]]) / jnp.sqrt(size)

    def energy(u):
        z = along + u * in_plane
        loss = jax.vmap(lambda z: loss_at_nodes(model, z.reshape(2, 1, -1), lines.problem.y))(z)
        return 0.5 * jnp.sum((z - lines.origin) ** 2, 1) / student.V[0, 0, 0] + loss

    lowest = jnp.min(jax.lax.map(energy, jnp.linspace(-12, 12, 2401)), 0)
    assert float(jnp.min(profile.energy - lowest)) > -1e-3
    np.testing.assert_allclose(jnp.mean(profile.energy - lowest > 1e-3), 0.258, atol=0.01)


def test_every_piece_of_a_line_has_its_nodes():
    """Every piece of a line has at least two nodes however short it is, next to the ends and between jumps."""
    reach, total = jnp.array([6.0, 6.0]), 10
    rows = ((-9.0, 0.0, 0.0), 3), ((0.0, 0.01, 0.02), 3), ((-1.0, 8.0, 0.0), 2), ((3.0, 0.0, 0.0), 1), ((0.0,) * 3, 0)
    for places, jump_count in rows:
        cut = np.asarray(cuts(jnp.array(places)[:, None], jnp.arange(3)[:, None] < jump_count, reach, total))[:, 0]
        assert cut[0] == 0 and np.all(cut[jump_count + 1 :] == total)
        assert np.all(np.diff(cut[: jump_count + 2]) >= 2)
    even = cuts(jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1), bool), reach, 24)[:, 0]
    np.testing.assert_array_equal(even, [0, 6, 18, 24])


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

    def along(name, a):
        return eqx.tree_at(lambda x: getattr(x, name), jax.tree.map(jnp.zeros_like, MANY_JUMPS), a)

    run = jax.jit(lambda model, x, change: jax.jvp(lambda x: moments(model, x), (x,), (change,)))
    values, slopes = run(APART, MANY_JUMPS, along("V", MANY_JUMPS.V))
    np.testing.assert_allclose(values[:4], [1, 1, 0, 0], atol=2e-2)
    np.testing.assert_allclose(values[4], 1, rtol=3e-3)
    np.testing.assert_allclose(slopes[:5], 0, atol=1e-4)
    x, step = state(CASES[4]), 0.02
    changes = along("q", x.q), along("V", x.V), along("theta", x.theta), along("m", jnp.array([[0.3], [-0.2]]))
    for change in changes:
        below, above = (
            run(model, jax.tree.map(lambda a, b, h=h: a + h * b, x, change), change)[0] for h in (-step, step)
        )
        np.testing.assert_allclose(run(model, x, change)[1][5], (above - below)[5] / (2 * step), rtol=5e-3)


def as_rows(*columns):
    """The numbers of nodes as sorted and rounded rows (N, k), to compare nodes as sets."""
    table = np.concatenate([np.asarray(c).reshape(-1, np.shape(c)[-1]) for c in columns]).T.round(9) + 0.0
    return table[np.lexsort(table.T)]


def test_parity_of_the_product_rule(model):
    """An even rule is invariant under y -> -y and under reflections of the places across the lines and along them."""
    for even in (True, False):
        replicate = ta.Lines(3, even=even, replicates=2).rule(model).replicate(1)
        y, across, weight = replicate.teacher, replicate.across, replicate.weight
        for mirrored in ((-y, across, weight), (y, -across, weight)):
            assert np.allclose(as_rows(y, across, weight), as_rows(*mirrored)) == even
        assert bool(replicate.reach[0] == replicate.reach[1]) == even
        assert np.all((replicate.reach > 5.4) & (replicate.reach < 6.6))


def test_size_of_the_product_rule(model):
    """Angles, radii and places across are integrated exactly up to a degree that grows with the order."""
    sizes = {(5, False): 7 * 15 * 3, (4, False): 7 * 12 * 3, (5, True): 14 * 15 * 3, (9, False): 11 * 27 * 5}
    for (order, even), count in sizes.items():
        rule = ta.Lines(order, even=even, replicates=2).rule(model)
        assert rule.size == count * (order + 15) and rule.stack.points_per_line == order + 15
        replicate = rule.replicate(1)
        y, w = replicate.teacher[:, 0], replicate.weight
        np.testing.assert_allclose(np.sum(w), 1, rtol=1e-12)
        moments = [np.sum(w * a) for a in (y[0] ** 2, y[1] ** 4, y[0] ** 2 * y[1] ** 2, replicate.across[0] ** 2)]
        np.testing.assert_allclose(moments, [1, 3, 1, 1], rtol=1e-3)
        assert not np.allclose(rule.stack.weight[0], rule.stack.weight[1])
    assert ta.Lines(5).rule(model).stack.jumps == 3 and ta.Lines(lines=2).rule(ta.DotProduct(rank=2)).stack.jumps == 5


def test_default_rule_is_as_large_as_asked(model):
    sizes = {1: 6300, 2**12: 6300, 2**14: 16632, 2**15: 35640, 2**16: 66924}
    assert {n: default_recipe(model, n).rule(model).size for n in sizes} == sizes
    for other in (ta.DotProduct(rank=2), ta.ReLUAttention(), Noisy()):  # single nodes, all of one weight
        single = default_recipe(other, 2**10, replicates=2).rule(other)
        np.testing.assert_allclose(single.stack.weight, single.stack.weight.ravel()[0], rtol=1e-12)
        assert single.size == 2**10 and single.replicates == 2


def test_smooth_averages(model):
    rule, block = one_block(ta.Lines(7, replicates=1, block=2**15).rule(model))
    x = state(CASES[0])
    student, teacher, weight = rule.quadrature(block)
    h, y = fields(model, x, student, teacher)
    for a, b, exact in ((h, h, x.q), (h, y, x.theta), (y, y, model.rho)):
        for token in range(2):
            np.testing.assert_allclose(jnp.sum(weight * a[token, 0] * b[token, 0]), exact[token, 0, 0], rtol=1e-4)
    np.testing.assert_allclose(jnp.sum(weight * h[0, 0] * h[1, 0]), 0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"even": True}, {"lines": 2**10}, {"block": 24}], ids=str)
def test_the_coarse_lines_fill_one_block(model, options):
    """The coarse rule, of lower order or fewer Sobol lines, fills one block; its other lines have no weight."""
    rule = ta.Lines(7, replicates=2, points=24, **{"block": 2**12, **options}).rule(model)
    first, *unused_blocks = rule.coarse.blocks().weight
    weighted = np.count_nonzero(rule.coarse.weight)
    assert rule.coarse.weight.shape == rule.stack.weight[0].shape and weighted == rule.coarse.weighted / 24
    np.testing.assert_allclose(jnp.sum(rule.coarse.weight), 1, rtol=1e-12)
    if options != {"block": 24}:  # with one line in a block no rule is smaller than order one
        assert not np.any(unused_blocks) and weighted > 0.3 * first.size
        assert not np.array_equal(rule.coarse.reach, rule.stack.reach[0])


def test_sobol_lines_and_a_fixed_direction(model):
    """Other lines, along a direction that the wells hardly have, give the reference state within error bars."""
    case = CASES[4]
    rule = ta.Lines(lines=2**9, replicates=4, direction=[[1.0], [0.2]], jumps=2).rule(model)
    fp = ta.solve(model, case.alpha, case.branch, rule, start=state(case))
    values = numbers_of(fp.replicates)[:, :5]
    assert bool(fp.ok) and np.all(np.abs(values.mean(0) - exact_numbers(case)) <= 4 * error_bar(values) + 1e-12)


def test_single_precision():
    model = ta.DotProduct(dtype=jnp.float32)
    start = jax.tree.map(jnp.float32, state(CASES[4]))
    fp = ta.solve(model, 1.0, "semantic", ta.Lines(5, replicates=2).rule(model), start=start)
    assert fp.overlaps.q.dtype == jnp.float32 and bool(fp.ok)
    np.testing.assert_allclose(fp.overlaps.V[0, 0, 0], CASES[4].V, rtol=3e-3)


def test_precision_on_request(model, monkeypatch):
    case = CASES[1]
    monkeypatch.setattr(solving, "LADDER", {2**11: 4e-3, 2**12: 2e-3})  # the lines of the other tests
    fp = ta.solve(model, case.alpha, case.branch, rtol=3e-3, start=state(case))
    values, exact = numbers_of(fp.replicates)[:, :5], exact_numbers(case)
    assert int(fp.status) == ta.Status.converged and fp.replicates.status.shape == (4,)
    assert np.all(np.asarray(error_bar(values)) <= 3e-3 * np.abs(exact))
    assert np.all(np.abs(values.mean(0) - exact) <= 4 * error_bar(values))
    imprecise = ta.solve(model, case.alpha, case.branch, rtol=1e-7, start=state(case))
    assert int(imprecise.status) == ta.Status.imprecise and not bool(imprecise.ok)
    assert ta.Status.name_of(imprecise.status) == "imprecise"


def test_bad_precision(model, lines):
    single = eqx.tree_at(lambda m: m.lam, model, jnp.float32(0.01))
    for call, message in (
        *((partial(ta.solve, model, 2.0, rtol=rtol), "rtol") for rtol in (0.0, -1.0, float("nan"), 1e-15)),
        (partial(ta.solve, model, 2.0, nodes=lines, rtol=1e-3), "either nodes or rtol"),
        (lambda: jax.jit(lambda a: ta.solve(model, a, rtol=1e-3).train_loss)(2.0), "jax transformation"),
        (partial(ta.solve, single, 2.0, rtol=1e-6), "float32"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_jump_that_is_just_about_to_end_moves_nothing(model):
    """A jump of zero width between its two sides moves nothing, although its motion is 0 / 0."""
    ones, z = jnp.ones((1, 1)), jnp.full((1, 2, 1), 0.3)
    side = Section.of(ones, z, z, ones, ones, ones, ones)
    gaps = Gaps(side, side, jnp.ones((1, 1), bool), (0 * ones, 2 * ones))

    def total(V):
        problem = ProxProblem(model, V, jnp.full((2, 1, 1), 0.2))
        lines = FieldLines(problem, jnp.zeros((2, 1)), jnp.ones((2, 1)), jnp.ones((2, 1)))
        return sum(jnp.sum(a) for a in shifts(lines, gaps, jnp.array([[0.5], [1.5]])))

    value, slope = jax.value_and_grad(total)(jnp.full((2, 1, 1), 12.0))
    assert value == 0 and not np.any(slope)


def test_one_field():
    """Lines average the Moreau envelope of one field exactly, up to the rounding of |z|.

    ``E min_z (|z| - 1)^2 / 2 + (z - h)^2 / (2 V) = E (|h| - 1)^2 / (2 (1 + V))``. No field lies across the lines.
    """
    model, q, V = Signs(lam=jnp.asarray(1.0)), 0.3, 0.8
    M = channel_gradient(model, overlaps_of(q, V, tokens=1), ta.Lines(5, lines=4).rule(model).replicate(0))[0]
    np.testing.assert_allclose(M, (1 + q - 2 * np.sqrt(2 * q / np.pi)) / (2 * (1 + V)), rtol=1e-6)
    assert np.all(vectors_across(-jnp.ones((1, 3)), jnp.zeros((0, 3))) == 0)
