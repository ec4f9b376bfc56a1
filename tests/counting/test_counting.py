"""The counting task: the layer against its formula, shares against least squares, training against steps by hand."""

import itertools
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tiedattn_jax import counting as task
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.results import Status
from tiedattn_jax.counting import training as training_module
from tiedattn_jax.plotting.simulations import attention_figure, learning_figure

pytestmark = pytest.mark.usefixtures("fast_compilation")

PAIR = ["semantic", "positional"]
SIZES = {"width": 8, "hidden": 16}


@pytest.fixture(scope="module")
def data():
    """All 243 sequences of length 5 over three tokens."""
    return task.sample(jax.random.key(0), 5000, length=5, tokens=3)


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(1), 2)


@pytest.fixture(scope="module")
def frozen(data, keys):
    return task.train(keys, data, PAIR, epochs=3, **SIZES)


@pytest.fixture(scope="module")
def free(data, keys, frozen):
    return task.unfreeze(keys, frozen, data, epochs=2)


def equal_trees(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_sample():
    data = task.sample(jax.random.key(0), 3000)
    x = np.concatenate([data.train, data.test])
    assert x.shape == (3000, 10) and data.train.shape == (2100, 10) and data.tokens == 15
    assert len(np.unique(x, axis=0)) == len(x)
    frequency = np.bincount(x.ravel(), minlength=15) / x.size
    assert np.all(np.abs(frequency - 1 / 15) < 5 * (14 / 15**2 / x.size) ** 0.5)
    assert not np.array_equal(x, np.sort(x, axis=0))  # the split does not follow the sorted sequences
    assert abs(np.mean(data.train[:, 0]) - 7) < 1
    other = task.sample(jax.random.key(1), 3000)
    assert not np.array_equal(x, np.concatenate([other.train, other.test]))


def test_adam_is_the_papers():
    optimizer, memory = task.OPTIMIZERS["adam"], task.OPTIMIZERS["adam"].init(jnp.zeros(()))
    mean = square = 0.0
    for k, gradient in enumerate((1.0, -2.0, 1e-9), 1):
        step, memory = optimizer.update(jnp.asarray(gradient), memory)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        expected = mean / (1 - 0.9**k) / ((square / (1 - 0.98**k)) ** 0.5 + 1e-9)
        np.testing.assert_allclose(step, expected, rtol=1e-9)


def test_duplicates_are_dropped_and_no_sequence_is_in_both_parts(data):
    assert len(task.sample(jax.random.key(0), 5000, length=5, tokens=3, train_share=0.5).train) == 121
    parts = [set(map(tuple, np.asarray(part).tolist())) for part in (data.train, data.test)]
    assert [len(p) for p in parts] == [170, 73] == [len(data.train), len(data.test)]
    assert parts[0] | parts[1] == set(itertools.product(range(3), repeat=5))


def test_examples_go_from_the_median_to_the_most_repetitions(data):
    repetitions = np.sort(np.sum(task.counts(data.test), 1))
    shown = np.sum(task.counts(data.examples(5)), 1)
    assert (shown[0], shown[-1]) == (repetitions[(len(repetitions) - 1) // 2], repetitions[-1])
    assert np.all(np.diff(shown) >= 0)


def test_counts(data):
    for x, y in zip(np.asarray(data.test[:20]), task.counts(data.test[:20]), strict=True):
        assert [Counter(x.tolist())[token] for token in x.tolist()] == y.tolist()


def test_the_layer_is_its_formula():
    w = task.Transformer(jax.random.key(0), length=6, tokens=4, width=8, hidden=12, dtype=jnp.float64)
    w = eqx.tree_at(lambda w: (w.norm.weight, w.norm.bias), w, tuple(jax.random.normal(jax.random.key(1), (2, 8))))
    x = np.array([0, 3, 1, 1, 2, 0])
    X = np.asarray(w.tokens)[x] + np.asarray(w.positions)
    scores = np.exp((X @ w.query) @ (X @ w.key).T / 8**0.5)
    S = scores / scores.sum(axis=1, keepdims=True)
    h = S @ X @ w.value
    h = (h - h.mean(axis=1, keepdims=True)) / np.sqrt(h.var(axis=1, keepdims=True) + 1e-5)
    h = np.maximum((h * w.norm.weight + w.norm.bias) @ w.hidden.weight.T + w.hidden.bias, 0)
    logits, attention = w(jnp.asarray(x))
    np.testing.assert_allclose(attention, S, atol=1e-14)
    np.testing.assert_allclose(logits, h @ w.readout.weight.T + w.readout.bias, atol=1e-13)
    assert logits.shape == (6, 7)
    np.testing.assert_allclose(task.attention(w, np.stack([[x, x[::-1]]] * 3))[2, 0], S, atol=1e-14)


def test_initialisation_is_pytorch_s():
    w = task.Transformer(jax.random.key(0))
    assert w.tokens.shape == (15, 64) and w.positions.shape == (10, 64) and w.query.dtype == jnp.float32
    assert abs(float(jnp.std(w.tokens)) - 1) < 0.1 and abs(float(jnp.std(w.positions)) - 1) < 0.1
    uniform = [w.query, w.key, w.value, w.hidden.weight, w.hidden.bias, w.readout.weight]
    for array, fan_in in zip(uniform, [64] * 5 + [128], strict=True):
        assert 0.8 * fan_in**-0.5 < float(jnp.max(jnp.abs(array))) <= fan_in**-0.5
    assert not np.array_equal(w.query, w.key)


@pytest.mark.parametrize("mechanism", task.MECHANISMS)
def test_what_attention_reads(mechanism):
    w = task.Transformer(jax.random.key(0), length=6, tokens=4, width=8, dtype=jnp.float64)
    w = jax.jit(lambda w: jax.tree.map(jnp.multiply, w, task.mask(w, mechanism)))(w)
    x, order = np.array([0, 3, 1, 1, 2, 0]), np.array([3, 1, 0, 5, 4, 2])
    S = np.asarray(task.attention(w, x))
    blind_to_tokens = np.allclose(S, task.attention(w, x[order]), atol=1e-12)
    blind_to_positions = np.allclose(S[order][:, order], task.attention(w, x[order]), atol=1e-12)
    assert (blind_to_tokens, blind_to_positions) == (mechanism == "positional", mechanism == "semantic")


def test_masks_are_the_published_ones():
    w = task.Transformer(jax.random.key(0), length=5, tokens=3, width=4)
    masks = {name: task.mask(w, name) for name in task.MECHANISMS}
    zeros = jax.tree.map(lambda m: np.argwhere(np.asarray(m) == 0), masks)
    for name, rows in (("semantic", {2, 3}), ("positional", {0, 1})):
        zero_entries = zeros[name]
        assert set(zero_entries.tokens[:, 1]) == {2, 3} and len(zero_entries.tokens) == 6
        assert set(zero_entries.positions[:, 1]) == {0, 1} and len(zero_entries.positions) == 10
        for array in (zero_entries.query, zero_entries.key):
            assert set(array[:, 0]) == rows and len(array) == 8
        assert sum(len(a) for a in jax.tree.leaves(zero_entries)) == 6 + 10 + 2 * 8
    assert not any(len(a) for a in jax.tree.leaves(zeros["free"]))


def test_shares_are_r_squared_of_least_squares():
    n, L = 40, 4
    x = np.asarray(jax.random.randint(jax.random.key(0), (n, L), 0, 3))
    i, j = np.nonzero(~np.eye(L, dtype=bool))
    equal = x[:, i] == x[:, j]
    S = jax.random.uniform(jax.random.key(1), (n, L, L)) + jax.random.uniform(jax.random.key(2), (L, L))
    S += 0.3 * (x[:, :, None] == x[:, None, :])
    y = np.asarray(S)[:, i, j].ravel()
    positions, tokens = np.tile(np.eye(len(i)), (n, 1)), np.stack([equal.ravel(), ~equal.ravel()], axis=1) * 1.0
    for share, design in zip(task.shares(S, x), (positions, tokens), strict=True):
        residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
        np.testing.assert_allclose(share, 1 - np.var(residual) / np.var(y), atol=1e-12)
        assert 0.05 < share < 0.95
    assert np.allclose(task.shares(S + 5 * jnp.eye(L), x), task.shares(S, x))


def test_shares_of_pure_mechanisms():
    x = jax.random.randint(jax.random.key(0), (4000, 6), 0, 5)
    by_position = jnp.broadcast_to(jax.random.uniform(jax.random.key(1), (6, 6)), (4000, 6, 6))
    by_token = jax.nn.softmax(2.0 * (x[:, :, None] == x[:, None, :]), axis=-1)
    positional, semantic = task.shares(by_position, x)
    assert abs(positional - 1) < 1e-12 and semantic < 1e-3
    positional, semantic = task.shares(by_token, x)
    assert positional < 1e-3 and 0.8 < semantic < 1  # a row with more equal tokens gives less to each of them
    assert [float(s) for s in task.shares(jnp.full((4000, 6, 6), 1 / 6), x)] == [0, 0]


def test_one_step_of_each_optimiser_by_hand(data, keys):
    one_batch = {"batch": len(data.train), "epochs": 1}  # with one batch the order plays no role
    frozen = task.train(keys[:1], data, "semantic", dtype=jnp.float64, **one_batch, **SIZES)

    @jax.jit
    @jax.value_and_grad
    def risk(w):
        logits = jax.vmap(w)(data.train)[0]
        target = jax.nn.one_hot(task.counts(data.train), 6)
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), axis=-1))

    def first_run(tree):
        return jax.tree.map(lambda a: np.asarray(a)[0], tree)

    start, zeros = first_run(frozen.start), first_run(frozen.mask)
    value, gradient = jax.tree.map(np.asarray, risk(start))
    np.testing.assert_allclose(frozen.history.train_loss, [[value]], rtol=1e-12)
    adam = jax.tree.map(lambda w, g, m: w - 1e-3 * m * g / (np.abs(g) + 1e-9), start, gradient, zeros)
    for result, expected in zip(jax.tree.leaves(frozen.run(0)), jax.tree.leaves(adam), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-12)
    free = task.unfreeze(keys[:1], frozen, data, rate=0.3, noise=0.2, **one_batch)
    noise = jax.tree.map(np.subtract, first_run(free.start), first_run(frozen.weights))
    noisy = (noise.tokens, noise.positions, noise.query, noise.key)
    assert all(0.1 < np.std(a) < 0.3 for a in noisy)
    assert sum(np.count_nonzero(a) for a in jax.tree.leaves(noise)) == sum(a.size for a in noisy)
    sgd = jax.tree.map(lambda w, g: w - 0.3 * np.asarray(g), first_run(free.start), risk(first_run(free.start))[1])
    for result, expected in zip(jax.tree.leaves(free.run(0)), jax.tree.leaves(sgd), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-12)
    logits = np.asarray(jax.jit(jax.vmap(free.run(0)))(data.test)[0])
    accuracy = np.mean(np.argmax(logits, axis=-1) == np.asarray(task.counts(data.test)))
    np.testing.assert_allclose(free.history.test_accuracy, [[accuracy]], rtol=1e-12)
    loss = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, task.counts(data.test)).mean()
    np.testing.assert_allclose(free.history.test_loss, [[loss]], rtol=1e-12)


def test_every_sequence_once_and_a_small_last_batch(data, keys):
    small = task.Data(data.train[:5], data.test, 3)
    trained = task.train(keys[:1], small, batch=4, epochs=4, rate=1e-12, dtype=jnp.float64, **SIZES)
    logits = jax.jit(jax.vmap(jax.tree.map(lambda a: np.asarray(a)[0], trained.start)))(small.train)[0]
    losses = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, task.counts(small.train))
    losses = np.asarray(losses).mean(axis=1)
    candidates = [(losses[k] + (losses.sum() - losses[k]) / 4) / 2 for k in range(5)]  # k is the last batch
    nearest = [int(np.argmin(np.abs(np.array(candidates) - value))) for value in trained.history.train_loss[0]]
    np.testing.assert_allclose(trained.history.train_loss[0], np.array(candidates)[nearest], rtol=1e-9)
    assert len(set(nearest)) > 1  # the order differs between epochs


def test_a_run_draws_everything_from_keys_of_its_own(data, keys, frozen, monkeypatch):
    """Start and order of `train`, noise and order of `unfreeze`: `unfreeze` may be given the keys of `train`."""
    used, roles = [], training_module.roles
    monkeypatch.setattr(training_module, "roles", lambda keys, *names: used.extend(names) or roles(keys, *names))
    task.unfreeze(keys, task.train(keys, data, PAIR, epochs=1, **SIZES), data, epochs=1)
    assert len(used) == len(set(used)) == 4
    drawn = np.concatenate([jax.random.key_data(k) for k in roles(keys, *used)])
    assert len(np.unique(drawn, axis=0)) == 4 * len(keys)


def test_frozen_weights_stay_zero_and_all_others_move(frozen, free):
    trees = jax.tree.map(np.asarray, (frozen.weights, frozen.start, frozen.mask, free.weights))
    for w, start, m, after in zip(*map(jax.tree.leaves, trees), strict=True):
        assert np.all(w[m == 0] == 0) and np.all(start[m == 0] == 0)
        assert np.mean(w[m == 1] != start[m == 1]) > 0.7  # some hidden units are dead
        assert np.mean(w != after) > 0.7


def test_what_training_measures(data, frozen):
    history = frozen.history
    assert all(c.shape == (2, 3) and c.dtype == np.float32 for c in jax.tree.leaves(history))
    assert np.all(np.diff(history.train_loss) < 0)
    np.testing.assert_allclose(history.positional_share[1], 1, atol=1e-5)
    for k in range(2):
        shares = task.shares(task.attention(frozen.run(k), data.test), data.test)
        np.testing.assert_allclose([history.positional_share[k, -1], history.semantic_share[k, -1]], shares, atol=1e-5)
    assert history.semantic_share[0, -1] > 10 * history.positional_share[0, -1]


def test_runs_do_not_depend_on_each_other(data, keys, frozen):
    single = task.train(keys[1:], data, "positional", epochs=3, **SIZES)
    for weight, paired in zip(jax.tree.leaves(single.weights), jax.tree.leaves(frozen.weights), strict=True):
        np.testing.assert_allclose(weight[0], paired[1], atol=1e-5)
    assert not np.allclose(frozen.start.value[0], frozen.start.value[1])


def test_status(data, keys, frozen):
    assert frozen.status.tolist() == [Status.max_steps] * 2 and not frozen.ok.any()
    curves = np.array([[0.1, 0.992], [0.995, 0.985], [0.1, 0.995]])
    losses = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, np.inf]])
    assert task.History(curves, losses, *[curves] * 3).status().tolist() == [0, Status.max_steps, Status.nonfinite]
    diverged = task.train(keys, data, PAIR, epochs=3, rate=1e30, **SIZES)
    assert diverged.status.tolist() == [Status.nonfinite] * 2


def test_a_small_transformer_learns_to_count(keys):
    data = task.sample(jax.random.key(0), 20_000, length=6, tokens=8)
    trained = task.train(keys[:1], data, "semantic", epochs=2, rate=3e-3, width=32, hidden=64)
    accuracy = trained.history.test_accuracy[0, -1]
    assert accuracy > 0.95 and trained.history.semantic_share[0, -1] > 0.3
    assert bool(trained.ok[0]) == (accuracy >= task.SOLVED)


def test_a_rate_is_no_new_program(data, keys, monkeypatch):
    traced, counts = [], task.counts
    monkeypatch.setattr("tiedattn_jax.counting.training.counts", lambda x: traced.append(x.shape) or counts(x))
    sizes = SIZES | {"hidden": SIZES["hidden"] + 1}  # no other test has compiled it
    task.train(keys[:1], data, epochs=2, **sizes)
    before = len(traced)
    task.train(keys[:1], data, epochs=2, rate=2e-3, **sizes)
    assert len(traced) == before and 0 < before <= 3  # traced for a batch, and twice for the test


def test_interrupted_training_resumes_bit_by_bit(data, keys, frozen, free, tmp_path):
    def interrupt(done, total):
        if done == 1:
            raise KeyboardInterrupt

    for stage, expected in (("frozen", frozen), ("free", free)):
        file = tmp_path / "new folder" / stage
        epochs, steps = expected.history.train_loss.shape[1], []

        def run(epochs, progress, stage=stage, file=file):
            options = {"epochs": epochs, "checkpoint": file, "progress": progress}
            if stage == "frozen":
                return task.train(keys, data, PAIR, **options, **SIZES)
            return task.unfreeze(keys, frozen, data, **options)

        def record(done, total, steps=steps):
            steps.append((done, total))

        with pytest.raises(KeyboardInterrupt):
            run(epochs, interrupt)
        assert equal_trees(run(epochs, record), expected) and steps == [(k, epochs) for k in range(1, epochs + 1)]
        assert equal_trees(run(epochs, record), expected) and steps[epochs:] == [(epochs, epochs)]
        with pytest.raises(ValueError, match="epochs must be at least the"):
            run(epochs - 1, record)
    assert sorted(p.name for p in file.parent.iterdir()) == ["free", "frozen"]


def test_a_checkpoint_of_another_configuration_is_refused(data, keys, frozen, tmp_path):
    file = tmp_path / "checkpoint"
    task.train(keys, data, PAIR, epochs=1, checkpoint=file, **SIZES)
    content = file.read_bytes()
    options = {"epochs": 1, "checkpoint": file, **SIZES}
    reversed_data = task.Data(data.train[::-1], data.test, 3)
    for call, message in [
        (lambda: task.train(keys, data, PAIR[::-1], **options), "mechanism=.'semantic', 'positional'. instead of"),
        (lambda: task.train(keys, data, PAIR, **(options | {"width": 6})), "width=8 instead of 6"),
        (lambda: task.train(keys, data, PAIR, **(options | {"hidden": 12})), "hidden=16 instead of 12"),
        (lambda: task.train(keys, data, PAIR, **(options | {"batch": 16})), "batch=32 instead of 16"),
        (lambda: task.train(keys, data, PAIR, **(options | {"rate": 0.1})), "rate=0.001 instead of 0.1"),
        (lambda: task.train(keys[::-1], data, PAIR, **options), "keys="),
        (lambda: task.train(keys, reversed_data, PAIR, **options), "data="),
        (lambda: task.unfreeze(keys, frozen, data, epochs=1, checkpoint=file), "optimizer='adam' instead of 'sgd'"),
    ]:
        with pytest.raises(ValueError, match="checkpoint must be of this configuration.*" + message):
            call()
    assert file.read_bytes() == content
    for damaged in (b"", b"\x93 something else", content[: len(content) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=f"checkpoint must be whole and written by this library.*{file}"):
            task.train(keys, data, PAIR, **options)


def test_a_checkpoint_of_fewer_epochs_trains_on(data, keys, frozen, tmp_path):
    options = {"checkpoint": tmp_path / "checkpoint", **SIZES}
    steps = []
    for epochs in (1, 2, 3):
        trained = task.train(keys, data, PAIR, epochs=epochs, progress=lambda *step: steps.append(step), **options)
    assert equal_trees(trained, frozen) and steps == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)]
    with pytest.raises(InputError, match=r"epochs must be at least the 3 that the checkpoint .* has, or name another"):
        task.train(keys, data, PAIR, epochs=2, **options)


def test_a_checkpoint_is_whole_or_the_old_one(data, keys, tmp_path, monkeypatch):
    file = tmp_path / "checkpoint"
    task.train(keys, data, PAIR, epochs=1, checkpoint=file, **SIZES)
    content = file.read_bytes()

    def disk_full(file):
        raise OSError("no space left")

    monkeypatch.setattr("tiedattn_jax.base.files.os.fsync", disk_full)
    with pytest.raises(OSError, match="no space left"):
        task.train(keys, data, PAIR, epochs=2, checkpoint=file, **SIZES)
    monkeypatch.undo()
    assert file.read_bytes() == content
    task.train(keys, data, PAIR, epochs=2, checkpoint=file, **SIZES)
    assert list(tmp_path.iterdir()) == [file]


def test_compare(frozen, free):
    comparison = task.compare(frozen, free)
    for k in range(2):

        def total(change, k=k):
            return sum(np.linalg.norm(np.asarray(a[k], float).ravel()) for a in jax.tree.leaves(change))

        difference = jax.tree.map(jnp.subtract, free.weights, frozen.weights)
        formerly_zero = jax.tree.map(lambda a, m: jnp.where(m == 0, a, 0), difference, frozen.mask)
        first = jax.tree.map(jnp.subtract, frozen.weights, frozen.start)
        np.testing.assert_allclose(comparison["distance_frozen_to_sgd"][k], total(difference), rtol=1e-5)
        np.testing.assert_allclose(comparison["distance_formerly_zero"][k], total(formerly_zero), rtol=1e-5)
        np.testing.assert_allclose(comparison["distance_init_to_frozen"][k], total(first), rtol=1e-5)
    for history, end in ((frozen.history, ""), (free.history, "_after_unfreezing")):
        for name in ("accuracy", "positional_share", "semantic_share"):
            values = getattr(history, name.replace("accuracy", "test_accuracy"))[:, -1]
            assert np.array_equal(comparison[name + end], values)
    mean, std = training_module.mean_and_std(comparison["accuracy"])
    np.testing.assert_allclose(std, abs(np.subtract(*comparison["accuracy"])) / 2**0.5, atol=1e-7)
    lines = task.table({"mixed": comparison}).splitlines()
    assert lines[0] == "|  | mixed, 2 runs |" and len(lines) == 2 + len(comparison)
    assert f"{mean:.4f} ± {std:.4f}" in lines[2]


def test_figures(data, frozen, free):
    sequences = data.examples()
    repeated = [len(set(x)) for x in sequences.tolist()]
    assert repeated == sorted(repeated, reverse=True) and repeated[-1] < repeated[0]
    matrices = {k: task.attention(t.run(0), sequences) for k, t in (("frozen", frozen), ("free", free))}
    figure = attention_figure(matrices, sequences)
    panels = figure.axes[:6]
    for axis, x in zip(panels, np.tile(sequences, (2, 1)), strict=True):
        assert len(axis.patches) == np.sum(x[:, None] == x) and len(axis.texts) == 25
        assert [t.get_text() for t in axis.get_xticklabels()] == ["ABC"[token] for token in x]
    S = task.attention(free.run(0), sequences[2])
    assert panels[5].texts[1].get_text() == f"{S[0, 1]:.2f}".lstrip("0")
    np.testing.assert_array_equal(panels[5].images[0].get_array(), S)
    lines = learning_figure({"semantic": [frozen, free]}).axes[1].lines
    np.testing.assert_allclose(lines[1].get_ydata()[:3], 1 - frozen.history.test_accuracy[1])
    assert len(lines[1].get_ydata()) == 5
