"""Recipes of averages: values that make the nodes for the fields of a model, and the argument `nodes`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import (
    SIZES,
    SMOOTH,
    SOBOL_SIZES,
    default_recipe,
    make_rule,
    smooth_recipe,
)  # fmt: skip
from tiedattn_jax.averages.rules import REPLICATES, Fields, hermite_grid
from tiedattn_jax.base import errors

COMMON = {"seed": 5, "replicates": 3, "block": 7}
# By kind: a recipe, and another value of each option.
OPTIONS = {
    ta.Sobol: (ta.Sobol(64), {"n": 128, **COMMON}),
    ta.MonteCarlo: (ta.MonteCarlo(60), {"n": 70, **COMMON}),
    ta.GaussHermite: (ta.GaussHermite(8), {"order": 5, "least_weight": 1e-6, **COMMON}),
    ta.Lines: (
        ta.Lines(3),
        {"order": 4, "lines": 16, "points": 9, "jumps": 1, "direction": [[1.0], [0.5]], "even": True, **COMMON},
    ),
}
CASES = [(kind, option) for kind, (_, options) in OPTIONS.items() for option in options]


def same(a, b):
    """Whether two rules have the same arrays and the same static numbers."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.shape == y.shape and x.dtype == y.dtype and bool(jnp.all(x == y)) for x, y in leaves)


def test_every_option_is_tested():
    for kind, (_, options) in OPTIONS.items():
        assert set(options) == {field.name for field in dataclasses.fields(kind)}, kind


@pytest.mark.parametrize(("kind", "option"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_an_option_changes_the_recipe_and_its_rule(model, kind, option):
    base, options = OPTIONS[kind]
    changed, again = (dataclasses.replace(base, **{option: options[option]}) for _ in range(2))
    assert changed == again and hash(changed) == hash(again) and changed != base
    assert len({base, changed, again}) == 2
    assert f"{option}=" in repr(changed) or option in ("n", "order")
    assert same(changed.rule(model), again.rule(model)) and not same(changed.rule(model), base.rule(model))


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_recipe_is_a_value(model, kind):
    base, options = OPTIONS[kind]
    changed, names = dataclasses.replace(base, **options), {kind.__name__: kind for kind in OPTIONS}
    for recipe in (base, changed):
        assert eval(repr(recipe), names) == recipe
    assert repr(ta.Lines()) == "Lines(9)" and repr(ta.Sobol(n=16, seed=1)) == "Sobol(16, seed=1)"
    assert repr(ta.Lines(5, direction=np.ones((2, 1)))) == "Lines(5, direction=((1.0,), (1.0,)))"
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.seed = 1
    assert base != ta.Sobol(2**20) and base != "a recipe"
    rule = base.rule(model)
    assert rule.replicates == REPLICATES and rule.stack.shape == (2, 1, 1) and rule.stack.weight.dtype == jnp.float64
    assert base.rule(ta.DotProduct(rank=2)).stack.shape == (2, 2, 1)
    assert base.rule(ta.DotProduct(dtype=jnp.float32)).stack.weight.dtype == jnp.float32


def test_jit_closes_over_a_recipe(model):
    """A recipe is no array: jit and vmap close over it, or take it as a static argument, and make the same nodes."""
    recipe = ta.Sobol(2**6, replicates=2)

    def weight(model, recipe):
        rule = recipe.rule(model)
        return jnp.sum(rule.stack.student**2 * rule.stack.weight[:, None, None]) * model.lam

    expected = float(weight(model, recipe))
    static = jax.jit(weight, static_argnums=1)
    assert float(static(model, recipe)) == pytest.approx(expected, rel=1e-14)
    assert float(static(model, ta.Sobol(2**6, replicates=2))) == pytest.approx(expected, rel=1e-14)
    assert static._cache_size() == 1
    assert float(jax.jit(lambda m: weight(m, recipe))(model)) == pytest.approx(expected, rel=1e-14)
    lanes = jax.vmap(lambda lam: weight(ta.DotProduct(lam=lam), recipe))(jnp.array([model.lam, 2 * model.lam]))
    np.testing.assert_allclose(lanes, [expected, 2 * expected], rtol=1e-14)


def test_fields_of_a_model(model):
    fields = Fields.of(model)
    assert fields == Fields(2, 1, 1, np.dtype("float64")) and fields.count == 4 and fields.shape == (2, 1, 1)
    assert Fields.of(fields) is fields and hash(fields) == hash(Fields.of(ta.DotProduct(omega=0.7)))
    assert Fields.of(model, student=3).shape == (2, 3, 1) and Fields.of(model, student=0).count == 2
    assert Fields.of(ta.ReLUAttention()).nonsmooth and not fields.nonsmooth
    noisy = Noisy()
    assert Fields.of(noisy).noise and Fields.of(noisy).teacher == noisy.shape[2] + noisy.noise
    assert same(ta.Sobol(16).rule(fields), ta.Sobol(16).rule(model))
    assert same(ta.Lines(3).rule(fields), ta.Lines(3).rule(model))


def test_what_nodes_may_be(model):
    """None, a number, a recipe or a rule; numbers change the size of the default recipe and nothing else of it."""
    rule, grid = ta.Sobol(16).rule(model), ta.GaussHermite(12, replicates=2, least_weight=1e-10)
    for made, expected in (
        (make_rule(None, model), ta.Lines(9)), (make_rule(None, model, ta.Sobol(32)), ta.Sobol(32)),
        (make_rule(ta.Lines(3), model, ta.Sobol(32)), ta.Lines(3)),
        (make_rule(2**14, model), ta.Lines(7)), (make_rule(np.int64(2**14), model), ta.Lines(7)),
        (make_rule(3000, model, ta.Sobol(32, seed=3, replicates=2)), ta.Sobol(2**12, seed=3, replicates=2)),
        (make_rule(3000, model, grid), ta.GaussHermite(7, replicates=2, least_weight=1e-10)),
    ):  # fmt: skip
        assert same(made, expected.rule(model)), expected
    assert make_rule(rule, model) is rule
    with pytest.raises(ta.InputError, match="nodes must be made for this model"):
        make_rule(rule, Fields.of(model, student=2))
    assert ta.MonteCarlo(5, seed=2).about(70, model) == ta.MonteCarlo(70, seed=2)


def test_public_functions_take_recipes(model, lines):
    """A recipe gives the same state as the rule that it makes, also beside averages over other fields."""
    by_recipe, by_rule = (ta.solve(model, 2.0, "semantic", nodes) for nodes in (ta.Lines(5), lines))
    assert same(by_recipe.replicates, by_rule.replicates)
    assert ta.bayes(model, 0.4, nodes=ta.GaussHermite(8, replicates=2)).replicates.q.shape[0] == 2
    assert ta.population(model, nodes=ta.GaussHermite(16, replicates=2)).replicates.risk.shape == (2,)


def test_default_recipes(model):
    assert default_recipe(model) == ta.Lines(9) and default_recipe(model, SIZES["transition"]) == ta.Lines(7)
    assert default_recipe(model, 1, **COMMON) == ta.Lines(5, **COMMON)
    for other in (ta.DotProduct(rank=2), ta.ReLUAttention(), Noisy()):
        assert default_recipe(other, 3000, **COMMON) == ta.Sobol(2**12, **COMMON)  # the nearest power of two
    assert smooth_recipe(model, "sgd") == ta.GaussHermite(10, least_weight=1e-10, replicates=2, block=10**4)
    assert smooth_recipe(model, "optimal") == ta.GaussHermite(12, least_weight=1e-10, replicates=3)
    assert smooth_recipe(model, "population") == ta.GaussHermite(18, replicates=3)
    assert smooth_recipe(Fields.of(model, student=0), "population") == ta.GaussHermite(64, replicates=3)
    wide = ta.DotProduct(rank=2)
    assert smooth_recipe(wide, "population") == ta.Sobol(SMOOTH["population"].n)
    assert smooth_recipe(wide, "sgd") == ta.Sobol(2**13, block=2**13)


DOUBLE = np.dtype("float64")
# A teacher's normal, a place across, an offset and the two ends of lines; a student's normal of each kind of nodes.
KNOWN = [
    0.05367634525000787, -0.991351888565087, -0.14250190066101942, 6.109696022628808, 6.241749270877305,
    1.157648683916793, -0.3522570104112305, -0.5233374111596013,
]  # fmt: skip
WIDE = Fields(2, 2, 1, DOUBLE)  # two student columns


def test_sizes_of_the_default_recipes_by_use():
    """Each use has its order of lines, or its number of Sobol points where lines do not serve."""
    orders = {"solve": 9, "transition": 7, "instances": 7, "path": 5, "curve": 5, "grid": 5}
    logs = {"solve": 15, "transition": 14, "instances": 14, "path": 13, "curve": 12, "grid": 11}
    for use, n in SIZES.items():
        assert default_recipe(Fields(2, 1, 1, DOUBLE), n) == ta.Lines(orders[use])
        assert default_recipe(WIDE, n) == ta.Sobol(2 ** logs[use])
    logs = {"fallback": 14, "labels": 13, "label grids": 11, "sphere": 18, "sphere map": 14}
    assert SOBOL_SIZES == {use: 2**k for use, k in logs.items()}
    assert {use: size.n for use, size in SMOOTH.items()} == {"sgd": 2**13, "population": 2**15, "optimal": 2**13}
    assert ta.Sobol() == ta.Sobol(2**16) and ta.MonteCarlo() == ta.MonteCarlo(2**16)
    assert ta.GaussHermite() == ta.GaussHermite(16, least_weight=0.0)
    orders = [smooth_recipe(Fields(1, k - 1, 1, DOUBLE), "population").order for k in range(1, 5)]
    assert orders == [96, 64, 32, 18]


def test_lines_serve_two_fields_of_the_student_and_two_of_the_teacher():
    assert default_recipe(Fields(1, 2, 2, DOUBLE)) == ta.Lines(9)
    for fields in (WIDE, Fields(2, 1, 2, DOUBLE), Fields(4, 1, 1, DOUBLE), Fields(2, 1, 1, DOUBLE, nonsmooth=True)):
        assert isinstance(default_recipe(fields), ta.Sobol)


def test_the_order_that_a_number_of_nodes_asks_for():
    """An order k takes 1.5 k^3 (k + 15) nodes: 11,319 for k = 7; 2^24 nodes allow order 53."""
    fields = Fields(2, 1, 1, DOUBLE)
    assert [default_recipe(fields, n).order for n in (11318, 11319, 2**24)] == [5, 7, 53]
    assert ta.Sobol().about(16, fields) == ta.Sobol(16) and ta.GaussHermite().about(81, fields) == ta.GaussHermite(3)


@pytest.mark.parametrize(
    ("recipe", "fields", "lines", "points", "jumps"),
    [
        (ta.Lines(4), Fields(2, 1, 1, DOUBLE), 7 * 12 * 3, 19, 3),
        (ta.Lines(4), Fields(2, 1, 1, DOUBLE, means=True), 14 * 12 * 3, 19, 3),  # averages are not even
        (ta.Lines(4), WIDE, 7 * 12 * 3**3, 19, 5),
        (ta.Lines(4), Fields(1, 2, 2, DOUBLE), 7 * 12 * 3, 19, 3),
        (ta.Lines(4, lines=8), Fields(2, 1, 1, DOUBLE), 8, 24, 3),
        (ta.Lines(4), Fields(2, 1, 1, DOUBLE, noise=True), 2**11, 24, 3),
        (ta.Lines(4), Fields(2, 2, 2, DOUBLE), 2**11, 24, 5),
        (ta.Lines(4), Fields(4, 1, 2, DOUBLE), 2**11, 24, 5),
        (ta.Lines(4, points=8, lines=1), WIDE, 1, 8, 3),
        (ta.Lines(4, points=4, lines=1), WIDE, 1, 4, 1),
        (ta.Lines(4, points=256, jumps=127, lines=1), WIDE, 1, 256, 127),
    ],
    ids=str,
)
def test_counts_of_lines_points_and_jumps(recipe, fields, lines, points, jumps):
    """Without options a product rule has order + 15 points on a line and Sobol lines have 24; there are L r + 1 jumps.

    Every piece of a line has at least two points, so a line with few points has fewer jumps.
    """
    rule = recipe.rule(fields)
    assert rule.stack.weight.shape == (4, lines) and rule.size == lines * points
    assert (rule.stack.points_per_line, rule.stack.jumps, rule.stack.shape) == (points, jumps, fields.shape)


@pytest.mark.parametrize(
    ("recipe", "count", "width"),
    [
        (ta.Lines(3), 5 * 9 * 2, 90),  # all lines fit into one block
        (ta.Lines(7, points=24, block=24), 3 * 3, 1),  # the product rule of order one
        (ta.Lines(7, points=24, block=1), 3 * 3, 1),
        (ta.Lines(lines=2**10, points=24, block=2**12), 2**7, 147),
        (ta.Lines(lines=2**4, points=24, block=1), 1, 1),
        (ta.GaussHermite(10), 10**4, 5000),
        (ta.Sobol(2**14), 2**13, 2**13),
        (ta.Sobol(2**14, block=100), 2**13, 100),
    ],
    ids=str,
)
def test_sizes_of_the_coarse_rule_and_of_the_blocks(model, recipe, count, width):
    """The coarse rule has as many of the first nodes as one block holds, or as many as make a rule."""
    rule = recipe.rule(model)
    assert np.count_nonzero(rule.coarse.weight) == count and rule.coarse.blocks().weight.shape[1] == width
    if not isinstance(recipe, ta.Lines) or recipe.lines:
        np.testing.assert_array_equal(rule.coarse.teacher[..., :count], rule.stack.teacher[0, ..., :count])


def test_random_numbers_of_lines_fill_their_ranges():
    """Ends of lines are 5.4 to 6.6 away, and the teacher's radii end at 5.7 to 7.2.

    Places across the lines move by up to a quarter of their spacing, or of a standard deviation if that is less.
    """
    fields = Fields(2, 1, 1, DOUBLE)
    lines, fine, even = (
        ta.Lines(order, even=even, replicates=100).rule(fields).stack
        for order, even in ((3, False), (22, False), (3, True))
    )
    spacing = np.min(np.diff(np.polynomial.hermite_e.hermegauss(12)[0]))
    assert 0.8 < spacing < 0.95
    largest_radius = (1 + np.polynomial.legendre.leggauss(9)[0][-1]) / 2
    ends = np.max(np.hypot(lines.teacher[:, 0, 0], lines.teacher[:, 1, 0]), 1) / largest_radius
    for numbers, low, high in (
        (lines.reach, 5.4, 6.6), (lines.offset, -0.49, 0.49), (ends, 5.7, 7.2),
        (np.mean(lines.across, (1, 2)), -0.25, 0.25),
        (np.mean(fine.across, (1, 2)), -0.25 * spacing, 0.25 * spacing),
    ):  # fmt: skip
        margin = 0.05 * (high - low)
        assert low <= np.min(numbers) < low + margin and high - margin < np.max(numbers) <= high
    assert not np.any(even.offset) and np.allclose(np.mean(even.across, (1, 2)), 0, atol=1e-14)


def test_least_weights():
    """A node of exactly the least weight stays, and the least weight is at most 1e-6."""
    weight = hermite_grid(9, 2)[1]
    least = np.max(weight[weight < 1e-6])
    rule = ta.GaussHermite(9, least_weight=least).rule(Fields(1, 1, 1, DOUBLE))
    assert rule.size == np.sum(weight >= least) < weight.size
    assert ta.GaussHermite(4, least_weight=1e-6).least_weight == 1e-6
    with pytest.raises(ta.InputError, match="least_weight must be from 0 to 1e-6"):
        ta.GaussHermite(4, least_weight=1.2e-6)


def test_the_largest_recipes(model):
    """A grid of 2^24 nodes, lines of order 53 and 2^30 Sobol points are allowed, and no more.

    So many replicates that they do not fit into the memory show that a recipe has come so far.
    """
    for kind, allowed, refused in ((ta.GaussHermite, 64, "order must be at most 64"), (ta.Lines, 53, "or lines=2048")):
        with pytest.raises(ta.InputError, match=r"must be smaller, got \w+=\d+: the nodes"):
            kind(allowed, replicates=10**12).rule(model)
        with pytest.raises(ta.InputError, match=refused):
            kind(allowed + 1, replicates=10**12).rule(model)
    assert ta.Sobol(2**30).n == 2**30 and ta.Lines(lines=1).lines == 1 and ta.Lines(points=256).points == 256
    with pytest.raises(ta.InputError, match=r"n must be at most 2\^30"):
        ta.Sobol(2**31)


@pytest.mark.parametrize(
    ("recipe", "name", "numbers"),
    [
        (ta.Sobol(16), "n", 4 * 16), (ta.MonteCarlo(10), "n", 4 * 10), (ta.GaussHermite(2), "order", 4 * 16),
        (ta.Lines(1), "order", 3 * 9), (ta.Lines(lines=4), "lines", 3 * 4),
    ],
)  # fmt: skip
def test_nodes_take_32_bytes_a_number(model, monkeypatch, recipe, name, numbers):
    """The four copies of all numbers of all replicates have to fit into the memory."""
    for memory, refused in ((4 * 32 * numbers, None), (4 * 32 * numbers - 1, "replicates"), (32 * numbers - 1, name)):
        monkeypatch.setattr(errors, "_memory", lambda memory=memory: memory)
        if refused is None:
            assert recipe.rule(model).replicates == 4
            continue
        with pytest.raises(ta.InputError, match=f"^{refused} must be smaller, got "):
            recipe.rule(model)


def test_a_seed_gives_the_same_nodes_in_every_version():
    """Results of a seed can be reproduced: these are the first numbers that its nodes have always had."""
    fields = Fields(2, 1, 1, DOUBLE)
    lines, sobol, plain, grid = (
        recipe.rule(fields).stack
        for recipe in (
            ta.Lines(3, seed=5), ta.Sobol(16, seed=2**33 + 5), ta.MonteCarlo(16, seed=5), ta.GaussHermite(2, seed=5),
        )
    )  # fmt: skip
    numbers = [lines.teacher[1, 0, 0, 0], lines.across[1, 0, 0], lines.offset[1, 0], *lines.reach[1]]
    numbers += [nodes.student[1, 0, 0, 0] for nodes in (sobol, plain, grid)]
    np.testing.assert_allclose(numbers, KNOWN, rtol=1e-9)
