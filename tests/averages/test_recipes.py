"""Recipes of averages: values that make the nodes for the fields of a model, and the argument `nodes`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import Noisy

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import SIZES, SMOOTH, default_recipe, make_rule, smooth_recipe
from tiedattn_jax.averages.rules import REPLICATES, Fields

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
