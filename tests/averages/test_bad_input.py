"""Bad input to averaging rules raises one sentence that names the argument."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe, make_rule
from tiedattn_jax.averages.rules import Fields, check_rule
from tiedattn_jax.base.errors import InputError

SOBOL, PLAIN, GRID, LINES = ta.Sobol, ta.MonteCarlo, ta.GaussHermite, ta.Lines
BAD = [  # refused when the recipe is made; what an integer is, is tested in `base/test_errors.py`
    (SOBOL, {"n": 8}, "n must be an integer of at least 16, got n=8"), (SOBOL, {"n": 64.0}, "n must be an integer"),
    (SOBOL, {"n": 1000}, "n must be a power of two for Sobol points, got n=1000: use 512 or 1024"),
    (SOBOL, {"n": 64, "seed": -1}, "seed must be an integer of at least 0"), (SOBOL, {"n": 2**31}, r"most 2\^30"),
    (SOBOL, {"n": 64, "seed": 2**63}, "seed must be below 2.63"), (SOBOL, {"n": 64, "block": 0}, "block must be"),
    (SOBOL, {"n": 64, "replicates": 0}, "replicates must be"), (PLAIN, {"n": 0}, "n must be"),
    (GRID, {"order": 0}, "order must be"), (GRID, {"order": 4, "seed": "a"}, "seed must be"),
    (GRID, {"least_weight": "0"}, "least_weight must be"), (GRID, {"least_weight": 1.2e-6}, "must be from 0 to 1e-6"),
    (LINES, {"order": 0}, "order must be"), (LINES, {"order": 2.5}, "order must be an integer"),
    (LINES, {"lines": 1000}, "lines must be a power of two"), (LINES, {"lines": 2**40}, "lines must be at most"),
    (LINES, {"points": 3}, "points must be from 4 to 256, with jumps=1"), (LINES, {"jumps": 0}, "jumps must be"),
    (LINES, {"points": 8, "jumps": 4}, "points must be from 10"), (LINES, {"points": 24.0}, "must be an integer"),
    (LINES, {"points": 257}, "points must be from 4 to 256"), (LINES, {"even": "yes"}, "even must be True or False"),
    (LINES, {"direction": [[0.0], [0.0]]}, "direction must be finite, not zero and of shape"),
    (LINES, {"direction": "x"}, "direction must be"), (LINES, {"block": "big"}, "block must be"),
]  # fmt: skip
# Refused when the rule is made for a model. A grid of 2^24 nodes and lines of order 53 are allowed: so many replicates
# that they do not fit into the memory show that a recipe has come so far.
UNFIT = [
    (SOBOL, {"n": 64, "replicates": 10**12}, "replicates must be smaller, .* GiB"),
    (PLAIN, {"n": 10**15}, "n must be smaller, got n=1000000000000000: .* GiB"),
    (GRID, {"order": 64, "replicates": 10**12}, r"must be smaller, got \w+=\d+: the nodes"),
    (GRID, {"order": 65}, "order must be at most 64"),
    (LINES, {"order": 53, "replicates": 10**12}, r"must be smaller, got \w+=\d+: the nodes"),
    (LINES, {"order": 54}, "order must be smaller, or lines=2048 given"),
    (LINES, {"jumps": 10**9}, "points must be from 2000000002"),
    (LINES, {"direction": [[1.0], [1.0], [1.0]]}, r"direction must be of shape \(2, 1\) for this model, got \(3, 1\)"),
]  # fmt: skip
NUMBERS = [
    ({"n": 0}, "n must be"), ({"n": 2**25}, "nodes must be at most 16777216 on lines"),
    ({"n": 1e4}, "n must be an integer"), ({"seed": -1}, "seed must be"), ({"block": "big"}, "block must be"),
]  # fmt: skip


def arguments_of(value):
    return getattr(value, "__name__", str(value)[:40])


@pytest.mark.parametrize(("kind", "arguments", "message"), [*BAD, *UNFIT], ids=arguments_of)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(model, kind, arguments, message):
    with pytest.raises(InputError, match=message) as raised:
        recipe = kind(**arguments)
        assert any(arguments is row[1] for row in UNFIT)
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
