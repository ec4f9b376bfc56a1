"""Bad input to averaging rules raises one sentence that names the argument."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe, make_rule
from tiedattn_jax.averages.rules import Fields, check_rule
from tiedattn_jax.base.errors import InputError

SOBOL, PLAIN, GRID, LINES = ta.Sobol, ta.MonteCarlo, ta.GaussHermite, ta.Lines
BAD = [  # refused when the recipe is made
    (SOBOL, {"n": 8}, "n must be an integer of at least 16, got n=8"),
    (SOBOL, {"n": 1000}, "n must be a power of two for Sobol points, got n=1000: use 512 or 1024"),
    (SOBOL, {"n": 0}, "n must be an integer of at least 1"), (SOBOL, {"n": 64.0}, "n must be an integer"),
    (SOBOL, {"n": True}, "n must be an integer"), (SOBOL, {"n": "64"}, "n must be an integer"),
    (SOBOL, {"n": 2**40}, "n must be at most 2.30"),
    (SOBOL, {"n": 64, "seed": -1}, "seed must be an integer of at least 0"),
    (SOBOL, {"n": 64, "seed": 2**63}, "seed must be below 2.63"),
    (SOBOL, {"n": 64, "seed": 1.5}, "seed must be an integer"),
    (SOBOL, {"n": 64, "replicates": 0}, "replicates must be"),
    (SOBOL, {"n": 64, "replicates": None}, "replicates must be"), (SOBOL, {"n": 64, "block": 0}, "block must be"),
    (SOBOL, {"n": 64, "block": 2.0}, "block must be"), (SOBOL, {"n": jnp.array(64)}, "n must be an integer"),
    (PLAIN, {"n": -5}, "n must be"), (PLAIN, {"n": 64, "block": 0}, "block must be"),
    (PLAIN, {"n": 64, "seed": 2**64}, "seed must be below"),
    (GRID, {"order": 0}, "order must be"), (GRID, {"order": 2.5}, "order must be"),
    (GRID, {"order": 4, "seed": "a"}, "seed must be"), (GRID, {"least_weight": -1.0}, "least_weight must be from 0 to"),
    (GRID, {"least_weight": 1e-3}, "least_weight must be"), (GRID, {"least_weight": "0"}, "least_weight must be"),
    (LINES, {"order": 0}, "order must be"),
    (LINES, {"order": -3}, "order must be"), (LINES, {"order": 2.5}, "order must be an integer"),
    (LINES, {"order": "7"}, "order must be"),
    (LINES, {"lines": 0}, "lines must be an integer of at least 1"),
    (LINES, {"lines": 1000}, "lines must be a power of two"), (LINES, {"lines": -8}, "lines must be"),
    (LINES, {"lines": 2**40}, "lines must be at most"), (LINES, {"points": 0}, "points must be"),
    (LINES, {"points": 3}, "points must be from 4 to 256, with jumps=1"),
    (LINES, {"points": 8, "jumps": 4}, "points must be from 10"),
    (LINES, {"points": 257}, "points must be from 4 to 256"), (LINES, {"points": 24.0}, "points must be an integer"),
    (LINES, {"jumps": 0}, "jumps must be"), (LINES, {"jumps": -1}, "jumps must be"),
    (LINES, {"jumps": "two"}, "jumps must be"), (LINES, {"even": "yes"}, "even must be True or False"),
    (LINES, {"direction": [[0.0], [0.0]]}, "direction must be finite, not zero and of shape"),
    (LINES, {"direction": [[np.nan], [0.0]]}, "direction must be"), (LINES, {"direction": "x"}, "direction must be"),
    (LINES, {"direction": 1.0}, "direction must be"), (LINES, {"direction": [[1j], [0.0]]}, "direction must be"),
    (LINES, {"seed": 2**63}, "seed must be below"), (LINES, {"block": -1}, "block must be"),
    (LINES, {"block": "big"}, "block must be"),
]  # fmt: skip
UNFIT = [  # refused when the rule is made for a model
    (SOBOL, {"n": 64, "replicates": 10**12}, "replicates must be smaller, .* GiB"),
    (PLAIN, {"n": 10**15}, "n must be smaller, got n=1000000000000000: .* GiB"),
    (GRID, {"order": 200}, "order must be at most 64"),
    (GRID, {"order": 4, "replicates": 10**12}, "replicates must be smaller"),
    (LINES, {"order": 200}, "order must be smaller, or lines=2048 given"),
    (LINES, {"order": 5, "replicates": 10**12}, "replicates must be smaller"),
    (LINES, {"jumps": 10**9}, "points must be from 2000000002"),
    (LINES, {"direction": [[1.0], [1.0], [1.0]]}, r"direction must be of shape \(2, 1\) for this model, got \(3, 1\)"),
]  # fmt: skip
NUMBERS = [
    ({"n": 0}, "n must be"), ({"n": 2**25}, "nodes must be at most 16777216 on lines"),
    ({"n": 1e4}, "n must be an integer"), ({"seed": -1}, "seed must be"), ({"block": "big"}, "block must be"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arguments", "message"), BAD, ids=lambda v: getattr(v, "__name__", str(v)[:40]))
@pytest.mark.usefixtures("unchecked")
def test_bad_input(kind, arguments, message):
    with pytest.raises(InputError, match=message) as raised:
        kind(**arguments)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(raised.value.argument)


@pytest.mark.parametrize(("kind", "arguments", "message"), UNFIT, ids=lambda v: getattr(v, "__name__", str(v)[:40]))
def test_bad_input_for_a_model(model, kind, arguments, message):
    recipe = kind(**arguments)
    with pytest.raises(InputError, match=message) as raised:
        recipe.rule(model)
    assert "\n" not in str(raised.value) and str(raised.value).startswith(raised.value.argument)


@pytest.mark.usefixtures("unchecked")
def test_bad_nodes(model):
    fields = Fields.of(model, student=0)
    for call, message in (
        (lambda: make_rule(0, model), "nodes must be an integer of at least 1"),
        (lambda: make_rule(True, model), "nodes must be an integer"),
        (lambda: make_rule(8, model, SOBOL()), "nodes must be at least 16 for Sobol points, got nodes=8"),
        *(
            (partial(make_rule, nodes, model), "nodes must be a recipe such as Lines")
            for nodes in (2.0, "lines", SOBOL)
        ),
        (lambda: make_rule(ta.Lines(3), fields), r"nodes must be single nodes, such as .* got nodes=.Lines"),
        *((partial(kind(16).rule, 2.0), "model must be a tiedattn_jax") for kind in (SOBOL, PLAIN, GRID, LINES)),
        *((partial(default_recipe, model, **arguments), message) for arguments, message in NUMBERS),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("rule", [ta.Sobol(16).rule, ta.Lines(2).rule, ta.Lines(lines=4).rule])
def test_a_rule_fits_its_model(model, rule):
    rank_two, single = ta.DotProduct(rank=2), ta.DotProduct(dtype=jnp.float32)
    shapes = r"nodes must be made for this model, of shape .* \(2, 1, 1\), got .* \(2, 2, 1\)"
    check_rule(rule(model), model)
    check_rule(rule(rank_two), rank_two)
    for nodes, other, message in (
        (rule(rank_two), model, shapes), (rule(single), model, "nodes must be float64 like the model, got float32"),
        (rule(model), single, "nodes must be float32"),
        (rule(model).replicate(0), model, "nodes must be an averaging rule"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            check_rule(nodes, other)
    traced = jax.eval_shape(lambda m: check_rule(eqx.tree_at(lambda r: r.coarse, rule(m), None), m) or m.lam, model)
    assert traced.shape == ()
