"""Recipes of averages: values that make the nodes for the fields of a model, and the argument `nodes`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe, make_rule
from tiedattn_jax.averages.rules import REPLICATES, Fields, hermite_grid

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
    pairs = [map(np.asarray, pair) for pair in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


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
    assert set(options) == {field.name for field in dataclasses.fields(kind)}  # every option is tested
    changed, names = dataclasses.replace(base, **options), {kind.__name__: kind for kind in OPTIONS}
    assert eval(repr(base), names) == base and eval(repr(changed), names) == changed
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.seed = 1
    assert base != ta.Sobol(2**20) and base != "a recipe"
    assert (base.rule(model).replicates, base.rule(model).stack.weight.dtype) == (REPLICATES, jnp.float64)
    assert base.rule(ta.DotProduct(rank=2)).stack.shape == (2, 2, 1)
    assert base.rule(ta.DotProduct(dtype=jnp.float32)).stack.weight.dtype == jnp.float32


def test_how_recipes_are_written():
    assert repr(ta.Lines()) == "Lines(9)" and repr(ta.Sobol(n=16, seed=1)) == "Sobol(16, seed=1)"
    assert repr(ta.Lines(5, direction=np.ones((2, 1)))) == "Lines(5, direction=((1.0,), (1.0,)))"


def test_jit_closes_over_a_recipe(model):
    """A recipe is no array: jit and vmap close over it, or take it as a static argument, and make the same nodes."""
    recipe = ta.Sobol(2**6, replicates=2)
    expected, static = recipe.rule(model), jax.jit(lambda model, recipe: recipe.rule(model), static_argnums=1)
    batch = jax.jit(jax.vmap(lambda lam: recipe.rule(ta.DotProduct(lam=lam))))(np.array([0.01, 0.02]))
    made = [static(model, recipe), static(model, ta.Sobol(2**6, replicates=2)), jax.jit(recipe.rule)(model)]
    made += [jax.tree.map(lambda a, k=k: a[k], batch) for k in (0, 1)]
    assert static._cache_size() == 1
    for rule in made:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-13), rule, expected)


def test_fields_of_a_model(model):
    fields = Fields.of(model)
    assert fields == PLAIN and fields.count == 4 and fields.shape == (2, 1, 1)
    assert Fields.of(fields) is fields and hash(fields) == hash(Fields.of(ta.DotProduct(omega=0.7)))
    assert Fields.of(model, student=3).shape == (2, 3, 1) and Fields.of(model, student=0).count == 2
    assert Fields.of(ta.ReLUAttention()).nonsmooth and not fields.nonsmooth
    assert Fields.of(Noisy()) == Fields(2, 1, 2, DOUBLE, noise=True)
    assert same(ta.Sobol(16).rule(fields), ta.Sobol(16).rule(model))


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


DOUBLE = np.dtype("float64")
# A teacher's normal, a place across, an offset and the two ends of lines; a student's normal of each kind of nodes.
KNOWN = [
    0.05367634525000787, -0.991351888565087, -0.14250190066101942, 6.109696022628808, 6.241749270877305,
    1.157648683916793, -0.3522570104112305, -0.5233374111596013,
]  # fmt: skip
PLAIN, WIDE = Fields(2, 1, 1, DOUBLE), Fields(2, 2, 1, DOUBLE)  # of one and of two student columns


@pytest.mark.parametrize(
    ("fields", "n", "expected"),
    [
        *((PLAIN, n, ta.Lines(k)) for n, k in ((1, 5), (11318, 5), (11319, 7), (2**14, 7), (2**15, 9), (2**24, 53))),
        (Fields(1, 2, 2, DOUBLE), 2**15, ta.Lines(9)),
        *((WIDE, n, ta.Sobol(m)) for n, m in ((3000, 2**12), (2**15, 2**15))),
        *((fields, 3000, ta.Sobol(2**12)) for fields in (  # lines serve two fields of the student and of the teacher
            Fields(2, 1, 2, DOUBLE), Fields(4, 1, 1, DOUBLE), Fields(2, 1, 1, DOUBLE, nonsmooth=True),
            Fields.of(ta.ReLUAttention()), Fields.of(Noisy()),
        )),
    ],
)  # fmt: skip
def test_default_recipes(fields, n, expected):
    """An order k of lines takes 1.5 k^3 (k + 15) nodes, 11,319 for k = 7; of Sobol points there is a power of two."""
    assert default_recipe(fields, n) == expected
    assert default_recipe(fields, n, **COMMON) == dataclasses.replace(expected, **COMMON)


@pytest.mark.parametrize(
    ("recipe", "fields", "lines", "points", "jumps"),
    [
        (ta.Lines(4), Fields(2, 1, 1, DOUBLE, means=True), 14 * 12 * 3, 19, 3),  # averages are not even
        (ta.Lines(4), WIDE, 7 * 12 * 3**3, 19, 5),
        (ta.Lines(4, lines=8), PLAIN, 8, 24, 3),
        (ta.Lines(4), Fields(2, 1, 1, DOUBLE, noise=True), 2**11, 24, 3),
        (ta.Lines(4, points=4, lines=1), WIDE, 1, 4, 1),
        (ta.Lines(4, points=256, jumps=127, lines=1), WIDE, 1, 256, 127),
    ],
    ids=str,
)
def test_counts_of_lines_points_and_jumps(recipe, fields, lines, points, jumps):
    """Without options a product rule has order + 15 points on a line and Sobol lines have 24; there are L r + 1 jumps.

    Every piece of a line has at least two points, so a line with few points has fewer jumps.
    """
    stack = recipe.rule(fields).stack
    found = stack.weight.shape, stack.points_per_line, stack.jumps, stack.shape
    assert found == ((4, lines), points, jumps, fields.shape)


def test_a_node_of_exactly_the_least_weight_stays():
    weight = hermite_grid(9, 2)[1]
    least = np.max(weight[weight < 1e-6])
    rule = ta.GaussHermite(9, least_weight=least).rule(Fields(1, 1, 1, DOUBLE))
    assert rule.size == np.sum(weight >= least) < weight.size
    assert ta.GaussHermite(4, least_weight=1e-6).least_weight == 1e-6  # the largest that is allowed


def test_the_largest_and_the_smallest_recipes():
    assert ta.Sobol(2**30).n == 2**30 and ta.Lines(lines=1).lines == 1 and ta.Lines(points=256).points == 256


def test_a_seed_gives_the_same_nodes_in_every_version():
    """Results of a seed can be reproduced: these are the first numbers that its nodes have always had."""
    lines, sobol, plain, grid = (
        recipe.rule(PLAIN).stack
        for recipe in (
            ta.Lines(3, seed=5), ta.Sobol(16, seed=2**33 + 5), ta.MonteCarlo(16, seed=5), ta.GaussHermite(2, seed=5),
        )
    )  # fmt: skip
    numbers = [lines.teacher[1, 0, 0, 0], lines.across[1, 0, 0], lines.offset[1, 0], *lines.reach[1]]
    numbers += [nodes.student[1, 0, 0, 0] for nodes in (sobol, plain, grid)]
    np.testing.assert_allclose(numbers, KNOWN, rtol=1e-9)
