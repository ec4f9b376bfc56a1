"""Relations between instances: every use of a key draws anew, and a run knows the symmetries of its data."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

import tiedattn_jax as ta
from tiedattn_jax.finite import evaluation
from tiedattn_jax.finite.on_demand import Dice
from tiedattn_jax.finite.sampling import draw_sentences, start

pytestmark = pytest.mark.usefixtures("fast_compilation")

DRAWN = settings(max_examples=8, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
SEEDS = st.integers(0, 2**31)
D, N = 40, 60
KEY = jax.random.key(1)


class Noisy(ta.DotProduct):
    """A target that sees the teacher's fields with noise on them."""

    noise = 1

    def target(self, Y, noise):
        return super().target(Y + 0.1 * noise)


def noisy():
    return Noisy(**vars(ta.DotProduct()))


def assert_independent(*arrays):
    """Assert that the arrays are uncorrelated, entry by entry, as far as they have as many entries."""
    flat = [np.ravel(np.asarray(a)) for a in arrays]
    for k, a in enumerate(flat):
        for b in flat[:k]:
            size = min(a.size, b.size)
            assert abs(np.corrcoef(a[:size], b[:size])[0, 1]) < 5 / size**0.5


def tokens(data):
    """Standard normals of all tokens, (L, n, d)."""
    return (data.x * data.shape[2] ** 0.5 - data.encodings[:, None]) / 0.5


@DRAWN
@given(SEEDS)
def test_one_key_draws_everything_anew(seed):
    """Teacher, tokens, noise, starts and matrices on demand of one key are uncorrelated, and those of the next too."""
    model, draws = noisy(), []
    for key in jax.random.key(seed), jax.random.key(seed + 1):
        data, on_demand = (ta.sample_data(model, D, N / D, key, stored=stored) for stored in (True, False))
        x, noise = tokens(data), np.swapaxes(data.noise, 0, 1)
        assert_independent(x[0].T, x[1].T)
        draws += [data.teacher, *x, *noise, start(model, data, "random", key), *np.swapaxes(on_demand.y, 0, 1)]
    assert_independent(*draws)


@DRAWN
@given(SEEDS)
def test_rows_are_independent(seed):
    """Sentences are uncorrelated, and so are coordinates."""
    data = ta.sample_data(noisy(), D, N / D, jax.random.key(seed))
    for rows in (*tokens(data), *np.swapaxes(tokens(data), 1, 2)):
        correlations = np.corrcoef(rows) - np.eye(len(rows))
        assert abs(correlations).max() < 6 / rows.shape[1] ** 0.5
    np.testing.assert_allclose([np.std(tokens(data)), np.std(data.noise)], 1, rtol=0.15)


@cache
def matrices(seed, count):
    """Matrices (2, n, d) on demand, multiplied by an orthogonal matrix, one vector after the other."""
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((D, count)))[0]
    dice, columns = Dice.new(2, N, D, True, jax.random.key(seed), jnp.float64).with_room(2 * count), []
    product = jax.jit(lambda dice, w: dice.product(w))
    back = jax.jit(lambda dice, u: dice.transposed_product(u))
    for k in range(count):
        image, dice = product(dice, jnp.asarray(basis[:, k])[None])
        columns.append(np.asarray(image))
        transposed, dice = back(dice, jnp.ones((2, N)) * jnp.cos(jnp.arange(N) * (k + 1.0)))
    return np.stack(columns), np.asarray(transposed), basis


@settings(DRAWN, max_examples=5)
@given(SEEDS)
def test_matrices_on_demand(seed):
    """Products with orthonormal vectors are independent normals, for every matrix and every key."""
    columns, transposed, _ = matrices(seed, 5)
    assert_independent(*columns.reshape(10, N), *matrices(seed + 1, 5)[0].reshape(10, N))
    np.testing.assert_allclose(np.std(columns), 1, rtol=0.15)
    assert_independent(*transposed, matrices(seed + 1, 5)[1])


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


@pytest.mark.parametrize("name", RUNS)
@settings(DRAWN, max_examples=5)
@given(SEEDS)
def test_symmetries_of_a_run(name, seed):
    """A run on data that are transformed ends at the transformed weights, with the losses that follow."""
    model, run, rng = ta.DotProduct(**MODEL), RUNS[name], np.random.default_rng(seed)
    data = ta.sample_data(model, D, N / D, jax.random.key(seed))
    Q = data.teacher + jnp.asarray(rng.standard_normal((D, 1)))
    result = run(model, changed(data), Q)

    def check(data, Q, sign=1.0):
        other = run(model, data, Q)
        np.testing.assert_allclose(other.Q, sign * result.Q, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(other.train_loss, result.train_loss, rtol=1e-8)

    assert np.max(np.abs(result.Q - Q)) > 0.01
    check(changed(data), -Q, -1.0)
    check(changed(data, y=-data.y, teacher=-data.teacher), Q)
    order = rng.permutation(N)
    check(changed(data, x=data.x[:, order], y=data.y[order]), Q)


def in_units(data, c):
    """The model and its data in other units of the inputs: fields of the teacher stay, losses scale with c^2."""
    options = {"sigma": c * 0.5, "encodings": [[c], [-c]], "teacher": c**-2}
    model = ta.DotProduct(**{**MODEL, "lam": c**4 * MODEL["lam"]}, **options)
    arrays = {"teacher": data.teacher / c, "encodings": c * data.encodings, "gamma": c**2 * data.gamma}
    scaled = changed(data, x=c * data.x, **arrays)
    return model, ta.Data.from_sentences(scaled.inputs(), scaled.raw_labels(model), **arrays)


@pytest.mark.parametrize("c", [1e-3, 30.0])
def test_one_minimum_in_all_units(c):
    """Training ends at one minimum at any sigma, and message passing beside it; an absolute tolerance stops at once."""
    data = ta.sample_data(ta.DotProduct(**MODEL), D, N / D, jax.random.key(5))
    (model, one), (scaled, twin) = in_units(data, 1.0), in_units(data, c)
    expected = ta.train(model, one, one.teacher)
    for result in (ta.train(scaled, twin, twin.teacher), ta.gamp(scaled, twin, expected.Q / c, steps=3000)):
        assert bool(result.ok) and int(result.iterations) > 5
        np.testing.assert_allclose(result.train_loss / c**2, expected.train_loss, rtol=1e-11)
        np.testing.assert_allclose(c * result.Q, expected.Q, rtol=1e-6, atol=1e-6)


def test_fresh_sentences_are_none_of_the_data(monkeypatch):
    """Sentences that test a student are not those of the data, even with the key of the data."""
    model, key, drawn = ta.DotProduct(), jax.random.key(0), []
    data = ta.sample_data(model, D, 256 / D, key)

    def note(*arguments):
        sample = draw_sentences(*arguments)
        jax.debug.callback(lambda x: drawn.append(np.asarray(x)), tokens(sample))
        return sample

    monkeypatch.setattr(evaluation, "draw_sentences", note)
    ta.heldout_error(model, data, data.teacher, key, sentences=1024, exact=True)
    jax.effects_barrier()
    assert len(drawn) == 4
    assert_independent(tokens(data), *drawn)
