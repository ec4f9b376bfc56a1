"""Bad input to solves raises one sentence: the argument and what to give, before anything is compiled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import rule

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import branch_of
from tiedattn_jax.theory.observables import second_minimum_share
from tiedattn_jax.theory.potentials import prior
from tiedattn_jax.theory.states import check_start

MODEL, TWO_COLUMNS = ta.DotProduct(), ta.DotProduct(rank=2)
NAN = float("nan")
START = [*(jnp.asarray(np.full((2, 1, 1), v)) for v in (0.1, 10.0, 0.0)), jnp.asarray(np.zeros((2, 1)))]
OUTSIDE = ta.Overlaps(*(jnp.asarray(-np.asarray(a)) for a in START))
HATS = ta.results.Conjugates(*(jnp.ones((2, 5, k)) for k in (5, 5, 1)), jnp.ones((2, 5)))


# Arguments of `solve`; alpha is 1 if it is not given. What a real number is, is tested in `base/test_errors.py`.
SOLVES = [
    ({"alpha": -1.0}, "alpha must be positive and finite, got alpha=-1.0"), ({"alpha": 0.0}, "alpha must be positive"),
    ({"alpha": NAN}, "alpha must be positive and finite, got alpha=nan"),
    ({"alpha": [1.0, 2.0]}, r"alpha must be one number, got shape \(2,\): use sweep for a branch"),
    ({"alpha": "2"}, "alpha must be a real number or an array of them, got alpha='2'"),
    ({"branch": "x"}, "branch must be one of positional, semantic, uninformed, None"),
    ({"branch": ["semantic"]}, "branch must be one of"),
    ({"nodes": 1000.0}, r"nodes must be a recipe such as Lines\(9\).*got nodes=1000"),
    ({"settings": 1e-5}, "settings must be a Settings"), ({"start": 1.0}, "start must be Overlaps or a FixedPoint"),
    ({"start": OUTSIDE}, "start must be finite, with q, V and q - theta"),
    ({"rtol": "1e-3"}, "rtol must be a real number"), ({"rtol": 1e-16}, "rtol must be at least 2.2e-14 in float64"),
    *(({"rtol": rtol}, "rtol must be") for rtol in (0.0, -1.0, NAN)),
    ({"rtol": 1e-3, "nodes": ta.Lines(5)}, "either nodes or rtol"),
    ({"rtol": 1e-6, "model": ta.DotProduct(dtype=jnp.float32)}, "float32"),
]  # fmt: skip
STATES = [
    ({"alpha": -1.0}, "alpha must be positive"), ({"count": True}, "count must be an integer"),
    ({"count": 0}, "count must be an integer of at least 1, got count=0"),
    ({"seed": -1}, "seed must be an integer of at least 0"),
]  # fmt: skip
PATH = {"alpha": 1.0, "start": "semantic"}
PATHS = [
    ({"alpha": -1.0}, "alpha"), ({"steps": 0}, "steps"), ({"start": "semantc"}, "start must be one of"),
    ({"start": OUTSIDE}, "start"), ({"branch": "other"}, "branch"),
    ({"start": jax.tree.map(lambda a: np.asarray(a)[None], ta.Overlaps(*START))}, "start"),
]  # fmt: skip
CALLS = [
    *((partial(ta.solve, **{"model": MODEL, "alpha": 1.0} | arguments), message) for arguments, message in SOLVES),
    *((partial(ta.find_states, MODEL, **{"alpha": 1.0} | arguments), message) for arguments, message in STATES),
    *((partial(ta.state_evolution, MODEL, **PATH | arguments), message) for arguments, message in PATHS),
    (lambda: jax.jit(lambda a: ta.find_states(MODEL, a, rule("points")))(1.0), "model must have concrete numbers here"),
    (lambda: jax.jit(lambda: ta.sweep(ta.solve, MODEL, alpha=[1.0], nodes=rule("points")))(), "concrete numbers"),
    (lambda: jax.jit(lambda a: ta.solve(MODEL, a, start=OUTSIDE))(1.0), "start must be finite"),
    (lambda: jax.jit(lambda a: ta.solve(MODEL, a, rtol=1e-3).train_loss)(2.0), "jax transformation"),
    (lambda: ta.solve(MODEL, 1.0, start=ta.Overlaps(*(1j * a for a in START))), "start must be a real number or an ar"),
    (lambda: ta.solve(MODEL, 1.0, start=ta.Overlaps(*(np.ones((2, 2, k)) for k in (2, 2, 1)), np.ones((2, 2)))),
     r"start must have q of shape \(2, 1, 1\), got shape \(2, 2, 2\)"),
    (lambda: ta.solve(MODEL, 1.0, nodes=ta.MonteCarlo(64).rule(TWO_COLUMNS)), "nodes must be made for this model"),
    (lambda: ta.sweep(ta.critical_alpha, MODEL, rank=[1, 2]), "rank must be a number of the setting"),
    (lambda: ta.sample_data(MODEL, 20, 1.0, jnp.zeros(1, jnp.uint32)), "key must be one key, as jax.random.key"),
    (lambda: second_minimum_share(MODEL, ta.Overlaps(*START), rule("points"), 0.0), "gap must be positive"),
    (lambda: jax.eval_shape(prior, ta.DotProduct(rank=5, penalty=ta.L1(0.01)), HATS),
     "penalty must be None for a student of more than 4 columns, got 5"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_calls(call, message):
    with pytest.raises(ta.InputError, match=message):
        call()


def test_names_of_numpy_are_text():
    assert type(branch_of(np.str_("semantic")).name) is str


@pytest.mark.usefixtures("unchecked")
def test_a_start_of_another_dtype():
    single = [a.astype(jnp.float32) for a in START]
    integers = [np.ones(a.shape, int) * k for a, k in zip(START, (1, 1, 0, 0), strict=True)]
    for arrays in (single, integers):
        assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(check_start(MODEL, ta.Overlaps(*arrays))))
