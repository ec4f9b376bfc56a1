"""Relations between instances: every use of a key draws anew, and a run knows the symmetries of its data."""

import jax
import numpy as np
import pytest
from channels import Noisy, model_of
from hypothesis import Phase, given, settings, strategies as st

import tiedattn_jax as ta
from tiedattn_jax.finite.sampling import start

DRAWN = settings(max_examples=8, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
SEEDS = st.integers(0, 2**31)
D, N = 40, 60


def assert_independent(*arrays):
    """Assert that the arrays are uncorrelated, entry by entry, as far as they have as many entries."""
    flat = [np.ravel(np.asarray(a)) for a in arrays]
    for k, a in enumerate(flat):
        for b in flat[:k]:
            size = min(a.size, b.size)
            assert abs(np.corrcoef(a[:size], b[:size])[0, 1]) < 5 / size**0.5


def tokens(data):
    """Standard normals of all tokens, (L, n, d)."""
    x, encodings = np.asarray(data.x), np.asarray(data.encodings)
    return (x * data.shape[2] ** 0.5 - encodings[:, None]) / 0.5


@DRAWN
@given(SEEDS)
def test_one_key_draws_everything_anew(seed):
    """Teacher, tokens, noise, starts and matrices on demand of one key are uncorrelated, and those of the next too.

    So are sentences, and coordinates.
    """
    model, draws = model_of(Noisy), []
    for key in jax.random.key(seed), jax.random.key(seed + 1):
        data, on_demand = (ta.sample_data(model, D, N / D, key, stored=stored) for stored in (True, False))
        x, y, noise = tokens(data), np.asarray(on_demand.y), np.asarray(data.noise)
        assert_independent(x[0].T, x[1].T)
        draws += [data.teacher, *x, noise[:, 0], noise[:, 1], start(model, data, "random", key), y[:, 0], y[:, 1]]
        for rows in (*x, *np.swapaxes(x, 1, 2)):
            correlations = np.corrcoef(rows) - np.eye(len(rows))
            assert abs(correlations).max() < 6 / rows.shape[1] ** 0.5
        np.testing.assert_allclose([np.std(x), np.std(noise)], 1, rtol=0.15)
    assert_independent(*draws)


@pytest.mark.full
@DRAWN
@given(SEEDS)
def test_instances_are_independent(seed):
    """`run_instances` gives every instance its own data, and its run a key that draws neither data nor test."""
    instances, keys = [], jax.random.split(jax.random.key(seed), 3)

    def run(data, key):
        result = ta.train(model, data, "random", steps=1, rate=1e-9, key=key)
        instances.append((data.teacher, *tokens(data), result.Q))
        return result

    model = ta.DotProduct()
    result = ta.run_instances(model, D, N / D, run, keys, theory=False, sentences=256)
    assert_independent(*(a for instance in instances for a in instance))
    assert len(set(result.values("rho"))) == len(set(result.values("gen_error"))) == 3


def changed(data, **arrays):
    """The data with other arrays, whose exact labels are those of the model."""
    return ta.Data(**{k: getattr(data, k) for k in ("x", "y", "teacher", "encodings", "gamma")} | arrays)


MODEL = {"omega": 0.3, "lam": 0.05, "mixing": [[0.7, 0.3], [0.2, 0.8]]}
RUNS = {
    "gradient descent": lambda model, data, Q: ta.train(model, data, Q, steps=25, rate=0.1),
    "L-BFGS": lambda model, data, Q: ta.train(model, data, Q, steps=4, optimizer="lbfgs"),
    "message passing": lambda model, data, Q: ta.gamp(model, data, Q, steps=12, damping=0.5),
}


@pytest.mark.parametrize("name", [pytest.param(k, marks=[pytest.mark.full] * (k != "gradient descent")) for k in RUNS])
@settings(DRAWN, max_examples=5)
@given(SEEDS)
def test_symmetries_of_a_run(name, seed):
    """A run on data that are transformed ends at the transformed weights, with the losses that follow."""
    model, run, rng = ta.DotProduct(**MODEL), RUNS[name], np.random.default_rng(seed)
    data = ta.sample_data(model, D, N / D, jax.random.key(seed))
    x, y, teacher = map(np.asarray, (data.x, data.y, data.teacher))
    Q = teacher + rng.standard_normal((D, 1))
    result = run(model, changed(data), Q)

    def check(data, Q, sign=1.0):
        other = run(model, data, Q)
        np.testing.assert_allclose(other.Q, sign * np.asarray(result.Q), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(other.train_loss, result.train_loss, rtol=1e-8)

    assert np.max(np.abs(np.asarray(result.Q) - Q)) > 0.01
    check(changed(data), -Q, -1.0)
    check(changed(data, y=-y, teacher=-teacher), Q)
    order = rng.permutation(N)
    check(changed(data, x=x[:, order], y=y[order]), Q)


def in_units(data, c):
    """The model and its data in other units of the inputs: fields of the teacher stay, losses scale with c^2."""
    options = {"sigma": c * 0.5, "encodings": [[c], [-c]], "teacher": c**-2}
    model = ta.DotProduct(**{**MODEL, "lam": c**4 * MODEL["lam"]}, **options)
    teacher, encodings, gamma = map(np.asarray, (data.teacher, data.encodings, data.gamma))
    arrays = {"teacher": teacher / c, "encodings": c * encodings, "gamma": c**2 * gamma}
    scaled = changed(data, x=c * np.asarray(data.x), **arrays)
    return model, ta.Data.from_sentences(scaled.inputs(), scaled.raw_labels(model), **arrays)


@pytest.mark.parametrize("run", ["train", pytest.param("gamp", marks=pytest.mark.full)])
@pytest.mark.parametrize("c", [1e-3, pytest.param(30.0, marks=pytest.mark.full)])
def test_one_minimum_in_all_units(c, run):
    """Training ends at one minimum at any sigma, and message passing beside it; an absolute tolerance stops at once."""
    data = ta.sample_data(ta.DotProduct(**MODEL), D, N / D, jax.random.key(5))
    (model, one), (scaled, twin) = in_units(data, 1.0), in_units(data, c)
    expected = ta.train(model, one, one.teacher)
    if run == "train":
        result = ta.train(scaled, twin, twin.teacher)
    else:
        result = ta.gamp(scaled, twin, np.asarray(expected.Q) / c, steps=3000)
    assert bool(result.ok) and int(result.iterations) > 5
    np.testing.assert_allclose(float(result.train_loss) / c**2, expected.train_loss, rtol=1e-11)
    np.testing.assert_allclose(c * np.asarray(result.Q), expected.Q, rtol=1e-6, atol=1e-6)


@pytest.mark.full
def test_fresh_sentences_are_none_of_the_data():
    """With the key of the data, too, a student is tested on other sentences than those of the data."""
    model, key = ta.DotProduct(), jax.random.key(0)
    data = ta.sample_data(model, D, 256 / D, key)
    given, fresh = (
        ta.finite.heldout_error(model, data, data.teacher, key, sentences=256, exact=True) for key in (None, key)
    )
    assert abs(float(fresh.value / given.value) - 1) > 1e-6
