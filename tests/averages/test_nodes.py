import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.averages.fields import fields
from tiedattn_jax.averages.rule import average
from tiedattn_jax.theory.potentials import channel

pytestmark = pytest.mark.usefixtures("quick_programs")

RULES = [
    lambda m, **k: ta.sobol_nodes(m, 2**12, **k),
    lambda m, **k: ta.monte_carlo_nodes(m, 2**14, **k),
    lambda m, **k: ta.gauss_hermite_nodes(m, 8, **k),
]
TOLERANCE = [5e-3, 8e-2, 1e-11]


@pytest.mark.parametrize(("rule", "tol"), list(zip(RULES, TOLERANCE, strict=True)), ids=["sobol", "mc", "gh"])
def test_moments_of_the_fields(model, rule, tol):
    nodes = rule(model, replicates=2)
    x = state(CASES[0])
    for k in range(2):
        one = nodes.replicate(k)
        h, y = fields(model, x, one.student, one.teacher)
        w = one.weight
        np.testing.assert_allclose(jnp.sum(w), 1, rtol=1e-12)
        for token in range(2):
            second = [jnp.sum(w * a[token, 0] * b[token, 0]) for a, b in ((h, h), (h, y), (y, y))]
            np.testing.assert_allclose(second, [x.q[0, 0, 0], x.theta[0, 0, 0], 0.25], rtol=tol)
            np.testing.assert_allclose(jnp.sum(w * y[token, 0] ** 4), 3 * 0.25**2, rtol=4 * tol)


def test_two_rules_agree_on_the_channel(model):
    case = CASES[0]  # no jump: both converge fast
    values = []
    for rule in (ta.sobol_nodes(model, 2**13, replicates=2), ta.gauss_hermite_nodes(model, 10, replicates=1)):
        run = jax.jit(lambda r: channel(model, state(case), r.replicate(0)))
        values.append(float(run(rule)))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-3)


def test_blocks_do_not_change_the_average(model):
    values = []
    for block in (2**10, 300, 2**14):
        rule = ta.sobol_nodes(model, 2**10, replicates=1, block=block).replicate(0)
        assert rule.blocks()[2].shape[1] == min(block, 2**10)
        values.append(average(rule, lambda b: jnp.sum(b[2] * b[0][0, 0] ** 2)))
    np.testing.assert_allclose(values, values[0], rtol=1e-12)


def test_options_are_honoured(model):
    rule = ta.sobol_nodes(model, 64, seed=0, replicates=2)
    assert rule.replicates == 2 and rule.size == 64
    base = rule.stack
    assert not np.allclose(base.student, ta.sobol_nodes(model, 64, seed=1, replicates=2).stack.student)
    assert not np.allclose(base.student[0], base.student[1])
    np.testing.assert_array_equal(base.student, ta.sobol_nodes(model, 64, seed=0, replicates=2).stack.student)
