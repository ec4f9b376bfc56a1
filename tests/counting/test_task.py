"""The counting task: its sequences, the layer against its formula, masks, and shares against least squares."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax import counting as task

KEY = jax.random.key(0)
drawn, masked = eqx.filter_jit(task.Transformer), eqx.filter_jit(task.mask)
SEQUENCE, ORDER = np.array([0, 3, 1, 1, 2, 0]), np.array([3, 1, 0, 5, 4, 2])


@pytest.fixture(scope="module")
def small():
    return drawn(KEY, length=6, tokens=4, width=8, hidden=12, dtype=jnp.float64)


def test_sequences_are_uniform_and_drawn_once():
    data, other = (task.sample(jax.random.key(k), 3000) for k in (0, 1))
    x, y = (np.concatenate([d.train, d.test]) for d in (data, other))
    assert x.shape == (3000, 10) and data.train.shape == (2100, 10) and data.tokens == 15
    assert len(np.unique(x, axis=0)) == len(x) and not np.array_equal(x, y)
    frequency = np.bincount(x.ravel(), minlength=15) / x.size
    assert np.all(np.abs(frequency - 1 / 15) < 5 * (14 / 15**2 / x.size) ** 0.5)
    assert abs(np.mean(data.train[:, 0]) - 7) < 1  # the split does not follow the sorted sequences


def test_duplicates_are_dropped_and_no_sequence_is_in_both_parts():
    data = task.sample(KEY, 5000, length=5, tokens=3)
    parts = [set(map(tuple, np.asarray(part).tolist())) for part in (data.train, data.test)]
    assert [len(p) for p in parts] == [170, 73] == [len(data.train), len(data.test)]
    assert parts[0] | parts[1] == set(itertools.product(range(3), repeat=5))
    for x, y in zip(np.asarray(data.test).tolist(), task.counts(data.test).tolist(), strict=True):
        assert [x.count(token) for token in x] == y


@pytest.mark.parametrize("share, parts", [(0.25, (1, 3)), (0.5, (2, 2)), (0.99, (3, 1))])
def test_the_smallest_sequences_and_parts(share, parts):
    data = task.sample(KEY, 1000, length=2, tokens=2, train_share=share)
    assert (len(data.train), len(data.test)) == parts
    assert len(jax.tree.leaves(data)) == 2  # the number of tokens is static


def test_the_examples_are_ranks_of_repetition_from_the_median_on():
    """Five sequences with 9, 11, 13, 17 and 25 repetitions; the third is the median."""
    x = np.array([[0, 1, 1, 2, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 3], [0, 0, 0, 0, 1], [0, 0, 0, 1, 1]])
    assert np.sum(task.counts(task.Data(x, x, 4).examples()), 1).tolist() == [13, 17, 25]


def test_the_transformer_is_initialised_as_by_pytorch(small):
    w = drawn(KEY)
    assert (w.tokens.shape, w.positions.shape, w.query.shape) == ((15, 64), (10, 64), (64, 64))
    assert w.hidden.weight.shape == (128, 64) and w.readout.weight.shape == (11, 128)
    assert w.query.dtype == jnp.float32
    assert abs(np.std(w.tokens) - 1) < 0.1 and abs(np.std(w.positions) - 1) < 0.1
    uniform = [w.query, w.key, w.value, w.hidden.weight, w.hidden.bias, w.readout.weight]
    for array, fan_in in zip(uniform, [64] * 5 + [128], strict=True):
        assert 0.8 * fan_in**-0.5 < np.max(np.abs(array)) <= fan_in**-0.5
    for arrays in ([small.tokens, small.positions], [small.query, small.key, small.value, small.hidden.weight]):
        firsts = np.array([np.asarray(a).ravel()[:20] for a in arrays])
        assert len(np.unique(firsts)) == firsts.size  # all from different numbers


def test_the_layer_is_its_formula(small):
    norm = np.random.default_rng(0).standard_normal((2, 8))
    w = eqx.tree_at(lambda w: (w.norm.weight, w.norm.bias), small, tuple(map(jnp.asarray, norm)))
    X = np.asarray(w.tokens)[SEQUENCE] + np.asarray(w.positions)
    scores = np.exp((X @ w.query) @ (X @ w.key).T / 8**0.5)
    S = scores / scores.sum(axis=1, keepdims=True)
    h = S @ X @ w.value
    h = (h - h.mean(axis=1, keepdims=True)) / np.sqrt(h.var(axis=1, keepdims=True) + 1e-5)
    h = np.maximum((h * norm[0] + norm[1]) @ w.hidden.weight.T + w.hidden.bias, 0)
    logits, attention = w(jnp.asarray(SEQUENCE))
    np.testing.assert_allclose(attention, S, atol=1e-14)
    np.testing.assert_allclose(logits, h @ w.readout.weight.T + w.readout.bias, atol=1e-13)
    assert logits.shape == (6, 7)
    np.testing.assert_allclose(task.attention(w, np.stack([[SEQUENCE, SEQUENCE[::-1]]] * 3))[2, 0], S, atol=1e-14)


@pytest.mark.parametrize("mechanism", task.MECHANISMS)
def test_what_attention_reads(small, mechanism):
    w = jax.tree.map(lambda a, m: jnp.asarray(np.multiply(a, m)), small, masked(small, mechanism))
    S, moved = (np.asarray(task.attention(w, x)) for x in (SEQUENCE, SEQUENCE[ORDER]))
    blind_to_tokens = np.allclose(S, moved, atol=1e-12)
    blind_to_positions = np.allclose(S[ORDER][:, ORDER], moved, atol=1e-12)
    assert (blind_to_tokens, blind_to_positions) == (mechanism == "positional", mechanism == "semantic")


def test_masks_are_the_published_ones(small):
    masks = {name: masked(small, name) for name in task.MECHANISMS}
    frozen = jax.tree.map(lambda m: np.argwhere(np.asarray(m) == 0), masks)
    low, high = set(range(4)), set(range(4, 8))
    for name, rows in (("semantic", high), ("positional", low)):
        entries = frozen[name]
        assert set(entries.tokens[:, 1]) == high and len(entries.tokens) == 4 * 4
        assert set(entries.positions[:, 1]) == low and len(entries.positions) == 6 * 4
        for array in (entries.query, entries.key):
            assert set(array[:, 0]) == rows and len(array) == 4 * 8
        assert sum(len(a) for a in jax.tree.leaves(entries)) == 16 + 24 + 2 * 32
    assert not any(len(a) for a in jax.tree.leaves(frozen["free"]))


def test_shares_are_r_squared_of_least_squares():
    n, L, rng = 40, 4, np.random.default_rng(0)
    x = rng.integers(0, 3, (n, L))
    i, j = np.nonzero(~np.eye(L, dtype=bool))
    equal = x[:, i] == x[:, j]
    S = rng.uniform(size=(n, L, L)) + rng.uniform(size=(L, L)) + 0.3 * (x[:, :, None] == x[:, None, :])
    y = S[:, i, j].ravel()
    positions, tokens = np.tile(np.eye(len(i)), (n, 1)), np.stack([equal.ravel(), ~equal.ravel()], axis=1) * 1.0
    shares = task.shares(jnp.asarray(S), x)
    for share, design in zip(shares, (positions, tokens), strict=True):
        residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
        np.testing.assert_allclose(share, 1 - np.var(residual) / np.var(y), atol=1e-12)
        assert 0.05 < share < 0.95
    # Neither the diagonal nor the scale plays a role.
    np.testing.assert_allclose(task.shares(jnp.asarray(100 * S + 5 * np.eye(L)), x), shares, rtol=1e-10)


def test_shares_of_pure_mechanisms():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, (1000, 6))
    scores = np.exp(2.0 * (x[:, :, None] == x[:, None, :]))
    matrices = np.broadcast_to(rng.uniform(size=(6, 6)), scores.shape), scores / scores.sum(-1, keepdims=True)
    by_position, by_token = (task.shares(jnp.asarray(S), x) for S in matrices)
    assert abs(by_position[0] - 1) < 1e-12 and by_position[1] < 4e-3
    assert by_token[0] < 4e-3 and 0.8 < by_token[1] < 1  # a row with more equal tokens gives less to each of them
    assert [float(s) for s in task.shares(jnp.asarray(np.full((1000, 6, 6), 1 / 6)), x)] == [0, 0]


def test_data_without_known_tokens_are_taken():
    """While jax traces, tokens cannot be checked."""
    x = np.array([[0, 1], [1, 1]])
    np.testing.assert_array_equal(eqx.filter_jit(lambda x: task.Data(x, x, 2).train)(x), x)
