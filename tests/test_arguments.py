"""Every argument of a public function is tested.

`CHANGES` has, for functions that run in a moment, a base call and another value of each argument: the result has to
change. All other arguments have to be given by some test that does not test bad input. `WITHOUT` lists those that no
test gives, so that a new argument without a test fails.
"""

import ast
import inspect
import math
import pydoc
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import problems
import public
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.layers import LAYERS

HERE = Path(__file__).parent


def differ(a, b):
    """Whether two results differ in an array, in its type or shape, or in another field."""
    (first, fields), (second, others) = jax.tree.flatten(a), jax.tree.flatten(b)
    if fields != others:
        return True
    pairs = [(_values(x), _values(y)) for x, y in zip(first, second, strict=True)]
    return any(x.dtype != y.dtype or not np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)


def _values(a):
    is_key = isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(a) if is_key else a)


def model():
    return problems.PROBLEMS["standard"].model


@cache
def data(number=0):
    """Sentences with exact labels."""
    drawn = ta.sample_data(model(), 30, 1.5, key(number))
    known = {"teacher": drawn.teacher, "encodings": drawn.encodings}
    return ta.Data.from_sentences(drawn.inputs(), drawn.raw_labels(model()), **known)


def key(number):
    return jax.random.key(number)


def lines():
    return problems.rule("lines")


def weights():
    return jax.random.normal(key(7), (30, 1))


LAYER = (dict, {
    "omega": 0.4, "sigma": 0.6, "lam": 0.02, "mixing": [[0.7, 0.3], [0.2, 0.8]], "encodings": [[1.0], [-0.5]],
    "teacher": [[2.0]], "rank": 2, "penalty": ta.L1(0.1), "dtype": "float32",
    "spectrum": ta.SpectralLaw.from_matrices(np.ones((2, 8)), np.eye(2, 8), np.ones((8, 1))),
})  # fmt: skip
ROUGH = ta.Settings(tol=1e-2)
DESCENT = {"steps": 3, "rate": 0.03, "tol": 10.0, "key": key(3), "scale": 0.7}
GAMP = {"init": "positional", "steps": 3, "tol": 1e6, "damping": 0.4, "key": key(3)}

# By function: arguments of the base call, and another value of each argument that is to change the result.
CHANGES = {
    **dict.fromkeys((layer.__name__ for layer in LAYERS.values()), LAYER),
    "CausalDotProduct": (dict, {**LAYER[1], "mixing": [[1.0, 0.0], [0.2, 0.8]]}),
    "UntiedDotProduct": (dict, {k: v for k, v in LAYER[1].items() if k != "spectrum"} | {"teacher": 2 * np.eye(2)}),
    "bayes.orbit": (lambda: {"U": jnp.ones((2, 1))}, {"U": 2 * jnp.ones((2, 1)), "noise": 0.1}),
    "sample_data": (
        lambda: {"model": model(), "d": 20, "alpha": 1.0, "key": key(0)},
        {"model": ta.DotProduct(sigma=0.7), "d": 22, "alpha": 1.5, "key": key(1), "normalise": True, "stored": False},
    ),
    "finite.realised": (
        lambda: {"model": model(), "data": data()}, {"model": ta.DotProduct(omega=0.6), "data": data(2)}
    ),
    "bayes.spectral_direction": (  # the direction is the same for all omega
        lambda: {"model": model(), "data": data(), "key": key(0)}, {"data": data(2), "key": key(1)}
    ),
    "finite.risk": (
        lambda: {"model": model(), "data": data(), "Q": weights()},
        {"model": ta.DotProduct(lam=0.1), "data": data(2), "Q": 2 * weights(), "exact": True},
    ),
    "finite.linear_baseline": (lambda: {"data": data()}, {"data": data(2), "ridge": 0.1, "test": data(2)}),
    "finite.heldout_error": (
        lambda: {"model": model(), "data": data(), "Q": weights(), "key": key(0), "sentences": 50},
        {"model": ta.DotProduct(omega=0.6), "data": data(2), "Q": 2 * weights()}
        | {"key": key(1), "sentences": 60, "exact": True, "W": 0.1 * jnp.eye(30)},
    ),
    "train": (
        lambda: {"model": model(), "data": data(), "init": "random", "key": key(0), "steps": 2},
        {"model": ta.DotProduct(lam=0.1), "data": data(2), "init": "semantic"}
        | {"optimizer": "adam", "exact": True, "value": 0.3, **DESCENT},
    ),
    "gamp": (  # the first ten steps take derivatives
        lambda: {"model": model(), "data": data(), "init": "random", "key": key(0), "steps": 12},
        {"model": ta.DotProduct(lam=0.1), "data": data(2), "scale": 0.7, **GAMP},
    ),
    "best_ridge": (
        lambda: {"model": model(), "alpha": 1.0, "nodes": lines(), "bracket": (1e-3, 3e-3)},
        {"number": "omega", "settings": ROUGH},
    ),
    "critical_alpha": (lambda: {"model": model(), "nodes": lines()}, {"settings": ROUGH}),
    "linear_crossing": (lambda: {"model": model(), "nodes": lines()}, {"settings": ROUGH}),
    "find_states": (
        lambda: {"model": model(), "alpha": 2.0, "nodes": lines(), "count": 4}, {"seed": 1, "settings": ROUGH}
    ),
    "trace_branch": (
        lambda: {"model": model(), "parameter": "alpha", "limits": (1.9, 2.1), "nodes": lines(), "points": 3},
        {"settings": ROUGH},
    ),
    "dynamics.separation": (lambda: {"model": model(), "direction": "encodings"}, {"nodes": ta.Sobol(2**8)}),
    "dynamics.sgd": (lambda: {"model": model(), "start": (0.4, 0.3, 0.2), "eta": 0.1, "until": 1.0}, {"steps": 4}),
    "bayes.posterior_mean": (
        lambda: {"model": model(), "data": data(), "key": key(0), "steps": 3}, {"init": "teacher", "tol": 10.0}
    ),
}  # fmt: skip

# Arguments that no test gives to the public function. Some tests give them to what is behind it.
WITHOUT = {
    "bayes.perfect_recovery": "nodes",
    "branch_ends": "settings sensitivities",
    "gamp": "response",
    "linear_crossing": "bracket",
    "phase_diagram": "axes width out resume progress numbers",
    "rsb.solve": "seed progress",
    "rsb.transition": "lines replicates seed progress",
    "sweep": "given",
    "train": "labels",
    "wide.best_ridge": "nodes progress",
    "wide.gamp": "key",
    "wide.onset": "nodes progress",
    "wide.run_instances": "nodes",
    "wide.solve": "progress",
}


def public_functions():
    for name, function in public.functions():
        yield name, [p for p in inspect.signature(function).parameters if p != "extra_fields"]


@cache
def given():
    """Pairs of public functions and arguments that a test gives; tests of bad input do not count."""
    pairs, signatures = set(), dict(public_functions())
    for path in HERE.rglob("test_*.py"):
        for test in ast.walk(ast.parse(path.read_text())):
            if not isinstance(test, ast.FunctionDef) or "bad" in test.name or "refused" in test.name:
                continue
            for call in ast.walk(test):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                    continue
                name = ast.unparse(call.func).removeprefix("ta.")
                if ast.unparse(call.func).startswith("ta.") and name in signatures:
                    positional = signatures[name][: len(call.args)]
                    pairs |= {(name, a) for a in (*positional, *(k.arg for k in call.keywords))}
    return pairs


def test_every_argument_has_a_test():
    for name, arguments in public_functions():
        changed = CHANGES[name][1] if name in CHANGES else ()
        missing = {a for a in arguments if a not in changed and (name, a) not in given()}
        assert missing == set(WITHOUT.get(name, "").split()), name


QUICK = {
    *"bayes.orbit finite.realised finite.risk finite.linear_baseline".split(),
    *(layer.__name__ for layer in LAYERS.values()),
}
MARKED = [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in CHANGES]


@pytest.mark.parametrize("name", MARKED)
def test_every_argument_changes_the_result(name):
    make, changes = CHANGES[name]
    function, base = (getattr(ta, name, None) or public.names()[name]), make()
    result = function(**base)
    for argument, value in changes.items():
        assert differ(result, function(**{**base, argument: value})), argument


def test_help_fits_one_screen():
    """`help` of a public function takes at most 50 lines of 120 columns."""
    functions = dict(public.functions())
    assert len(functions) > 30
    for name, function in functions.items():
        text = pydoc.plain(pydoc.render_doc(function, title="%s"))
        assert sum(max(1, math.ceil(len(line) / 120)) for line in text.splitlines()) <= 50, name
