"""Sequences and weights of the counting task: defaults, independent draws, and arguments within and beyond bounds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax import counting as task
from tiedattn_jax.base.errors import InputError

pytestmark = pytest.mark.usefixtures("fast_compilation")

KEY = jax.random.key(0)
PAIRS = np.array([[0, 1], [1, 1]])


def test_defaults_of_the_sequences_and_of_the_transformer():
    data = task.sample(KEY)
    assert data.train.shape == (35_000, 10) and data.test.shape == (15_000, 10) and data.tokens == 15
    assert data.examples().shape == (3, 10)
    w = task.Transformer(KEY)
    assert (w.tokens.shape, w.positions.shape, w.query.shape) == ((15, 64), (10, 64), (64, 64))
    assert w.hidden.weight.shape == (128, 64) and w.readout.weight.shape == (11, 128)


def test_the_examples_are_ranks_of_repetition_from_the_median_on():
    """Five sequences with 9, 11, 13, 17 and 25 repetitions; the third is the median."""
    x = np.array([[0, 1, 1, 2, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 3], [0, 0, 0, 0, 1], [0, 0, 0, 1, 1]])
    data = task.Data(x, x, 4)
    assert np.sum(task.counts(data.examples(3)), 1).tolist() == [13, 17, 25]


def test_weights_are_drawn_from_different_numbers():
    w = task.Transformer(KEY, length=6, tokens=6, width=8, hidden=8, dtype=jnp.float64)
    uniform = [w.query, w.key, w.value, w.hidden.weight, w.readout.weight]
    for arrays in ([w.tokens, w.positions], uniform):
        firsts = np.array([np.asarray(a).ravel()[:20] for a in arrays])
        assert len(np.unique(firsts)) == firsts.size


def test_only_the_sequences_are_leaves_of_the_data():
    assert len(jax.tree.leaves(task.Data(PAIRS, PAIRS, 2))) == 2


@pytest.mark.parametrize("share, parts", [(0.25, (1, 3)), (0.5, (2, 2)), (0.99, (3, 1))])
def test_the_smallest_sequences_and_parts(share, parts):
    data = task.sample(KEY, 1000, length=2, tokens=2, train_share=share)
    assert (len(data.train), len(data.test)) == parts


def test_the_smallest_transformer():
    w = task.Transformer(KEY, length=2, tokens=2, width=2, hidden=1)
    assert task.attention(w, PAIRS).shape == (2, 2, 2)
    assert task.attention(w, PAIRS[0]).shape == (2, 2)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: task.sample(KEY, 1), "n must be an integer of at least 2, got n=1"),
        (lambda: task.sample(KEY, length=1), "length must be an integer of at least 2, got length=1"),
        (lambda: task.sample(KEY, tokens=1), "tokens must be an integer of at least 2, got tokens=1"),
        (lambda: task.sample(KEY, tokens=2**31), f"tokens must be an integer of at most {2**31 - 1}"),
        (lambda: task.sample(3), "key must be one key"),
        (lambda: task.sample(KEY, train_share=0.0), "train_share must be between 0 and 1, got train_share=0.0"),
        (lambda: task.sample(KEY, train_share=1.0), "train_share must be between 0 and 1, got train_share=1.0"),
        (
            lambda: task.sample(KEY, 1000, length=2, tokens=2, train_share=0.2),
            "train_share must be such that both parts of 4 sequences have some, got train_share=0.2",
        ),
        (
            lambda: task.sample(KEY, 10**12),
            "n must be smaller, got n=1000000000000: sequences of 10, sorted, would take 1.86e+05 GiB of memory",
        ),
        (lambda: task.Transformer(KEY, length=1), "length must be an integer of at least 2, got length=1"),
        (lambda: task.Transformer(KEY, hidden=0), "hidden must be an integer of at least 1, got hidden=0"),
        (lambda: task.Transformer(KEY, hidden=2**31), f"hidden must be an integer of at most {2**31 - 1}"),
        (lambda: task.Transformer(KEY, width=3), "width must be an even integer of at least 2, got width=3"),
        (lambda: task.Transformer(KEY, width=0), "width must be an even integer of at least 2, got width=0"),
        (lambda: task.Transformer(KEY, width=4.0), "width must be an even integer of at least 2, got width=4.0"),
        (lambda: task.mask(_small(), "both"), "mechanism must be one of semantic, positional, free"),
        (lambda: task.attention(_small(), np.array(1)), "x must be of a shape that ends with L = 3, got x=[]"),
        (lambda: task.attention(_small(), PAIRS), "x must be of a shape that ends with L = 3, got x=[2, 2]"),
        (lambda: task.attention(_small(), np.array([0, 1, 2])), "x must be tokens between 0 and 1, got x=[0, 1, 2]"),
        (lambda: task.attention(_small(), np.array([0, 1, -1])), "x must be tokens between 0 and 1, got x=[0, 1, -1]"),
    ],
)
def test_bad_calls(unchecked, call, sentence):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value).startswith(sentence)


def _small():
    return task.Transformer(KEY, length=3, tokens=2, width=8, hidden=1)


SHAPE = "of shape (n, L), n >= 1 sequences of one length L >= 2"


@pytest.mark.parametrize(
    "train, test, tokens, sentence",
    [
        (PAIRS[0], PAIRS, 2, f"train must be {SHAPE}, got train=[2]"),
        (PAIRS[:0], PAIRS, 2, f"train must be {SHAPE}, got train=[0, 2]"),
        (PAIRS[:, :1], PAIRS[:, :1], 2, f"train must be {SHAPE}, got train=[2, 1]"),
        (PAIRS, np.zeros((4, 3), int), 2, f"test must be {SHAPE}, got test=[4, 3]"),
        (PAIRS, PAIRS[:0], 2, f"test must be {SHAPE}, got test=[0, 2]"),
        (PAIRS, PAIRS + 1, 2, "test must be tokens between 0 and 1, got test=[[1, 2], [2, 2]]"),
        (PAIRS - 1, PAIRS, 2, "train must be tokens between 0 and 1"),
        (PAIRS * 1.0, PAIRS, 2, "train must be tokens between 0 and 1"),
        (PAIRS == 1, PAIRS, 2, "train must be tokens between 0 and 1"),
        (PAIRS, PAIRS, 1, "tokens must be an integer of at least 2, got tokens=1"),
    ],
)
def test_bad_data(unchecked, train, test, tokens, sentence):
    with pytest.raises(InputError) as error:
        task.Data(train, test, tokens)
    assert str(error.value).startswith(sentence)


def test_data_without_known_tokens_are_taken():
    """While jax traces, tokens cannot be checked."""
    data = eqx.filter_jit(lambda x: task.Data(x, x, 2).train)(PAIRS)
    np.testing.assert_array_equal(data, PAIRS)


def test_shares_of_attention_of_much_variance():
    """The shares do not depend on the scale of the attention."""
    x = np.array([[0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1]])
    S = jax.random.uniform(KEY, (4, 3, 3), jnp.float64)
    np.testing.assert_allclose(task.shares(100 * S, x), task.shares(S, x), rtol=1e-12)
