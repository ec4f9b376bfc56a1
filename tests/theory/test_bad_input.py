"""Bad input to solves raises one sentence: the argument and what to give, before anything is compiled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES, branch_of
from tiedattn_jax.theory.observables import second_minimum_share
from tiedattn_jax.theory.potentials import prior
from tiedattn_jax.theory.solve import check_start

MODEL = ta.DotProduct()
NAN = float("nan")


START = jnp.full((2, 1, 1), 0.1), jnp.full((2, 1, 1), 10.0), jnp.zeros((2, 1, 1)), jnp.zeros((2, 1))
OUTSIDE = ta.Overlaps(*(-a for a in START))
HATS = ta.results.Conjugates(*(jnp.ones((2, 5, k)) for k in (5, 5, 1)), jnp.ones((2, 5)))
MASKED = np.ma.array([[0.6, 0.4], [0.4, 0.6]], mask=[[True, False], [False, False]])


# Arguments of `solve`; alpha is 1 if it is not given.
SOLVES = [
    ({"alpha": -1.0}, "alpha must be positive and finite, got alpha=-1.0"), ({"alpha": 0.0}, "alpha must be positive"),
    ({"alpha": NAN}, "alpha must be positive and finite, got alpha=nan"),
    ({"alpha": np.inf}, "alpha must be positive and finite"),
    ({"alpha": [1.0, 2.0]}, r"alpha must be one number, got shape \(2,\): use sweep for a branch"),
    ({"alpha": "2"}, "alpha must be a real number or an array of them, got alpha='2'"),
    ({"alpha": None}, "alpha must be a real number or an array of them, got alpha=None"),
    ({"alpha": 1j}, "alpha must be a real number"),
    ({"alpha": np.timedelta64(2, "s")}, "alpha must be a real number .*timedelta64"),
    ({"alpha": np.datetime64("2020-01-01")}, "alpha must be a real number"),
    ({"alpha": True}, "alpha must be a real number .*, got alpha=True"),
    ({"alpha": MASKED[0, 0]}, "alpha must be a real number .*, got alpha=masked"),
    ({"branch": "x"}, "branch must be one of positional, semantic, uninformed, None"),
    ({"branch": ["semantic"]}, "branch must be one of"),
    ({"nodes": 1000.0}, r"nodes must be a recipe such as Lines\(9\).*got nodes=1000"),
    ({"settings": 1e-5}, "settings must be a Settings"), ({"start": 1.0}, "start must be Overlaps or a FixedPoint"),
    ({"start": ta.Overlaps(*(NAN * a for a in START))}, "start must be finite"),
    ({"start": OUTSIDE}, "start must be finite, with q, V and q - theta"),
    ({"rtol": "1e-3"}, "rtol must be a real number"), ({"rtol": 1e-16}, "rtol must be at least 2.2e-14 in float64"),
]  # fmt: skip
STATES = [
    ({"alpha": -1.0}, "alpha must be positive"),
    ({"count": 0}, "count must be an integer of at least 1, got count=0"),
    ({"count": True}, "count must be an integer"), ({"seed": -1}, "seed must be an integer of at least 0"),
]  # fmt: skip
CALLS = [
    *((partial(ta.solve, MODEL, **{"alpha": 1.0} | arguments), message) for arguments, message in SOLVES),
    *((partial(ta.find_states, MODEL, **{"alpha": 1.0} | arguments), message) for arguments, message in STATES),
    (lambda: jax.jit(lambda a: ta.find_states(MODEL, a, count=1))(1.0), "model must have concrete numbers here"),
    (lambda: jax.jit(lambda: ta.sweep(MODEL, "semantic", alpha=[1.0]))(), "model must have concrete numbers here"),
    (lambda: jax.jit(lambda a: ta.solve(MODEL, a, start=OUTSIDE))(1.0), "start must be finite"),
    (lambda: ta.solve(MODEL, 1.0, start=ta.Overlaps(*(1j * a for a in START))), "start must be a real number or an ar"),
    (lambda: ta.solve(MODEL, 1.0, start=BRANCHES["semantic"].start(ta.DotProduct(rank=2))),
     r"start must have q of shape \(2, 1, 1\), got shape \(2, 2, 2\)"),
    (lambda: ta.solve(MODEL, 1.0, nodes=ta.Sobol(64).rule(ta.DotProduct(rank=2))),
     r"nodes must be made for this model, of shape \(L, r, t\) = \(2, 1, 1\), got nodes for \(2, 2, 1\)"),
    (lambda: ta.solve(MODEL, 1.0, nodes=ta.Sobol(64).rule(ta.DotProduct(dtype=jnp.float32))),
     "nodes must be float64 like the model, got float32"),
    (lambda: ta.sweep(MODEL, "alpha_c", rank=[1, 2]), "rank must name one of alpha, lam, omega, sigma, or an entry"),
    (lambda: ta.sample_data(MODEL, 20, 1.0, jnp.zeros(1, jnp.uint32)), "key must be one key, as jax.random.key"),
    (lambda: second_minimum_share(MODEL, ta.Overlaps(*START), ta.Sobol(64).rule(MODEL), 0.0), "gap"),
    (lambda: prior(ta.DotProduct(rank=5, penalty=ta.L1(0.01)), HATS),
     "penalty must be None for a student of more than 4 columns, got 5"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_calls(call, message):
    with pytest.raises(ta.InputError, match=message):
        call()


_KEY = jax.random.key(0)


def test_names_of_numpy_are_text(nodes, solved):
    assert type(branch_of(np.str_("semantic")).name) is str
    data = ta.sample_data(MODEL, 20, 1.0, _KEY)
    starts = [ta.train(MODEL, data, kind("positional"), optimizer=kind("gd"), steps=1).Q for kind in (str, np.str_)]
    np.testing.assert_array_equal(*starts)
    point = ta.solve(MODEL, 1.0, np.str_("uninformed"), nodes)
    assert type(point.branch) is str and point.train_loss == solved(1.0, "uninformed").train_loss


@pytest.mark.usefixtures("unchecked")
def test_a_start_of_another_dtype():
    single = [a.astype(jnp.float32) for a in START]
    integers = [np.ones(a.shape, int) * k for a, k in zip(START, (1, 1, 0, 0), strict=True)]
    for arrays in (single, integers):
        assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(check_start(MODEL, ta.Overlaps(*arrays))))
