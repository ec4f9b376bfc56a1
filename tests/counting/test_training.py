"""Training of the counting transformer against steps by hand, its checkpoints, comparison and pages."""

import inspect
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tiedattn_jax import counting as task
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.results import Status
from tiedattn_jax.counting import training

PAIR = ["semantic", "positional"]
SIZES = {"width": 8, "hidden": 16, "batch": 170, "dtype": jnp.float64}  # all sequences are one batch
KEYS = jax.random.split(jax.random.key(1), 2)
SQUARES = np.array([[0, 1], [1, 1], [1, 0], [0, 0]], np.int32)
FEW = task.Data(SQUARES, SQUARES, 2)


@pytest.fixture(scope="module")
def data():
    """All 243 sequences of length 5 over three tokens."""
    return task.sample(jax.random.key(0), 5000, length=5, tokens=3)


@pytest.fixture(scope="module")
def frozen(data):
    return task.train(KEYS, data, PAIR, epochs=3, **SIZES)


@pytest.fixture(scope="module")
def free(data, frozen):
    return task.unfreeze(KEYS, frozen, data, epochs=2, batch=170)


def made_up(runs, status=Status.converged):
    """A training of two epochs whose weights have not moved."""
    form = eqx.filter_eval_shape(task.Transformer, KEYS[0], length=2, tokens=2, width=2, hidden=1)
    w = jax.tree.map(lambda a: np.zeros((runs, *a.shape), a.dtype), form)
    curves = [np.linspace(k, k + 1, 2 * runs).reshape(runs, 2) for k in range(5)]
    return task.Training(w, w, w, task.History(*curves), np.full(runs, status))


def leaves(tree, run=None):
    return [np.asarray(a) if run is None else np.asarray(a)[run] for a in jax.tree.leaves(tree)]


def equal_trees(a, b):
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


@jax.jit
def losses_of(w, x):
    """The cross-entropy of every place of every sequence, and the logits."""
    logits = jax.vmap(w)(x)[0]
    return optax.softmax_cross_entropy_with_integer_labels(logits, task.counts(x)), logits


def test_defaults_are_those_of_the_paper():
    epochs = {"batch": 32, "rate": 1e-3, "checkpoint": None}
    adam = {"mechanism": "free", "width": 64, "hidden": 128, "epochs": 200, "dtype": jnp.float32}
    for call, expected in ((task.train, adam | epochs), (task.unfreeze, {"epochs": 100, "noise": 1e-3} | epochs)):
        defaults = {name: p.default for name, p in inspect.signature(call).parameters.items()}
        assert {name: defaults[name] for name in expected} == expected


def test_adam_is_the_papers():
    optimizer = task.OPTIMIZERS["adam"]
    update, memory = jax.jit(optimizer.update), optimizer.init(jnp.zeros(()))
    mean = square = 0.0
    for k, gradient in enumerate((1.0, -2.0, 1e-9), 1):
        step, memory = update(jnp.asarray(gradient), memory)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        expected = mean / (1 - 0.9**k) / ((square / (1 - 0.98**k)) ** 0.5 + 1e-9)
        np.testing.assert_allclose(step, expected, rtol=1e-9)


@pytest.mark.full
def test_one_step_of_each_optimiser_by_hand(data):
    frozen = task.train(KEYS, data, PAIR, epochs=1, **SIZES)
    free = task.unfreeze(KEYS, frozen, data, epochs=1, batch=170, rate=0.3, noise=0.2)
    risk = jax.jit(jax.value_and_grad(lambda w: jnp.mean(losses_of(w, data.train)[0])))
    for k in range(2):
        start, mask, first, noisy, last = (
            jax.tree.map(lambda a, k=k: np.asarray(a)[k], tree)
            for tree in (frozen.start, frozen.mask, frozen.weights, free.start, free.weights)
        )
        value, gradient = risk(start)
        np.testing.assert_allclose(frozen.history.train_loss[k], [value], rtol=1e-12)
        for result, w, g, m in zip(*map(leaves, (first, start, gradient, mask)), strict=True):
            np.testing.assert_allclose(result, w - 1e-3 * m * g / (np.abs(g) + 1e-9), atol=1e-12)
        for result, w, g in zip(*map(leaves, (last, noisy, risk(noisy)[1])), strict=True):
            np.testing.assert_allclose(result, w - 0.3 * g, atol=1e-12)
        noise = jax.tree.map(np.subtract, noisy, first)
        drawn = (noise.tokens, noise.positions, noise.query, noise.key)
        assert all(0.1 < np.std(a) < 0.3 for a in drawn)
        assert sum(np.count_nonzero(a) for a in jax.tree.leaves(noise)) == sum(a.size for a in drawn)
        # The noise is not that of the start, although the keys are the same.
        assert abs(np.corrcoef(noise.positions.ravel(), start.positions.ravel())[0, 1]) < 0.5
        losses, logits = map(np.asarray, losses_of(last, data.test))
        accuracy = np.mean(np.argmax(logits, axis=-1) == np.asarray(task.counts(data.test)))
        np.testing.assert_allclose(free.history.test_accuracy[k], [accuracy], rtol=1e-12)
        np.testing.assert_allclose(free.history.test_loss[k], [losses.mean()], rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("stages", [1, 2])
def test_every_sequence_once_and_a_small_last_batch(data, stages):
    """The order differs between epochs, and between `train` and `unfreeze` of the same keys."""
    small, options = task.Data(data.train[:5], data.test, 3), {"batch": 4, "epochs": 6, "rate": 1e-12}
    runs = [task.train(KEYS[:1], small, **SIZES | options)]
    start = jax.tree.map(lambda a: np.asarray(a)[0], runs[0].start)
    losses = np.asarray(losses_of(start, small.train)[0]).mean(axis=1)
    candidates = (losses + (losses.sum() - losses) / 4) / 2  # by the sequence that is the last batch
    if stages == 2:
        runs.append(task.unfreeze(KEYS[:1], runs[0], small, noise=0.0, **options))
    orders = [np.argmin(np.abs(candidates - run.history.train_loss[0][:, None]), 1) for run in runs]
    for run, last in zip(runs, orders, strict=True):
        np.testing.assert_allclose(run.history.train_loss[0], candidates[last], rtol=1e-9)
        assert len(set(last)) > 1
    assert len({tuple(last) for last in orders}) == stages


def test_frozen_weights_stay_zero_and_all_others_move(frozen, free):
    trees = frozen.weights, frozen.start, frozen.mask, free.weights
    for w, start, m, after in zip(*map(leaves, trees), strict=True):
        assert np.all(w[m == 0] == 0) and np.all(start[m == 0] == 0)
        assert np.mean(w[m == 1] != start[m == 1]) > 0.7  # some hidden units are dead
        assert np.mean(w != after) > 0.7


def test_what_training_measures(data, frozen):
    history = frozen.history
    assert all(c.shape == (2, 3) and c.dtype == np.float64 for c in jax.tree.leaves(history))
    assert np.all(np.diff(history.train_loss) < 0)
    np.testing.assert_allclose(history.positional_share[1], 1, atol=1e-5)
    for k in range(2):
        shares = task.shares(task.attention(frozen.run(k), data.test), data.test)
        np.testing.assert_allclose([history.positional_share[k, -1], history.semantic_share[k, -1]], shares, atol=1e-5)
    assert history.positional_share[0, -1] < 0.1  # of the run whose attention sees tokens only


@pytest.mark.full
def test_runs_do_not_depend_on_each_other():
    """This holds for keys of every generator, also for those that draw otherwise under `vmap`."""
    keys, options = jax.random.split(jax.random.key(0, impl="rbg"), 2), {"epochs": 1, "width": 2, "hidden": 1}
    both, second = (task.train(k, FEW, batch=1, **options) for k in (keys, keys[1:]))
    for a, b in zip(leaves(both.weights, 1), leaves(second.weights, 0), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    assert not np.allclose(both.start.value[0], both.start.value[1])


def test_status(data, frozen):
    """A run solves the task from an accuracy of .99 at its end on, and fails where a number is not finite."""
    assert frozen.status.tolist() == [Status.max_steps] * 2 and not frozen.ok.any()
    curves = np.array([[0.1, 0.99], [0.995, 0.9899], [0.1, 0.995]])
    losses = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, np.inf]])
    assert task.History(curves, losses, *[curves] * 3).status().tolist() == [0, Status.max_steps, Status.nonfinite]
    diverged = task.train(KEYS, data, PAIR, epochs=3, rate=1e200, **SIZES)
    assert diverged.status.tolist() == [Status.nonfinite] * 2
    assert training.counted(np.array([0, 2, 0, 4, 2, 0])) == "3 converged, 2 max steps, 1 nonfinite"


@pytest.mark.full
def test_a_small_transformer_learns_to_count():
    data = task.sample(jax.random.key(0), 20_000, length=6, tokens=8)
    trained = task.train(KEYS[:1], data, "semantic", epochs=2, rate=3e-3, width=32, hidden=64)
    accuracy = trained.history.test_accuracy[0, -1]
    assert accuracy > 0.95 and trained.history.semantic_share[0, -1] > 0.3
    assert bool(trained.ok[0]) == (accuracy >= task.SOLVED)


@pytest.mark.parametrize("stage", ["frozen", "free"])
def test_interrupted_training_resumes_bit_by_bit(data, frozen, free, tmp_path, stage):
    def interrupt(done, total):
        if done == 1:
            raise KeyboardInterrupt

    file, steps, expected = tmp_path / "new folder" / stage, [], {"frozen": frozen, "free": free}[stage]
    train, unfreeze = (
        partial(task.train, KEYS, data, PAIR, **SIZES),
        partial(task.unfreeze, KEYS, frozen, data, batch=170),
    )
    run = partial(train if stage == "frozen" else unfreeze, checkpoint=file)
    epochs = expected.history.train_loss.shape[1]
    with pytest.raises(KeyboardInterrupt):
        run(epochs=epochs, progress=interrupt)
    for count in (epochs, epochs + 1):  # the second run has nothing to do
        assert equal_trees(run(epochs=epochs, progress=lambda *step: steps.append(step)), expected)
        assert steps == [(min(k, epochs), epochs) for k in range(1, count + 1)]
    with pytest.raises(InputError, match=f"epochs must be at least the {epochs} that the checkpoint .* has, or name"):
        run(epochs=epochs - 1)
    assert list(file.parent.iterdir()) == [file]


def test_a_checkpoint_of_another_configuration_is_refused(data, frozen, tmp_path):
    file = tmp_path / "checkpoint"
    task.train(KEYS, data, PAIR, epochs=1, checkpoint=file, **SIZES)
    content, reversed_data = file.read_bytes(), task.Data(data.train[::-1], data.test, 3)
    train = partial(task.train, epochs=1, checkpoint=file)
    for call, message in [
        (lambda: train(KEYS, data, PAIR[::-1], **SIZES), "mechanism=.'semantic', 'positional'. instead of"),
        (lambda: train(KEYS, data, PAIR, rate=0.1, **SIZES), "rate=0.001 instead of 0.1"),
        (lambda: train(KEYS[::-1], data, PAIR, **SIZES), "keys="),
        (lambda: train(KEYS, reversed_data, PAIR, **SIZES), "data="),
        (
            lambda: task.unfreeze(KEYS, frozen, data, epochs=1, batch=170, checkpoint=file),
            "optimizer='adam' instead of 'sgd'",
        ),
    ]:
        with pytest.raises(InputError, match="checkpoint must be of this configuration.*" + message):
            call()
    assert file.read_bytes() == content
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=f"checkpoint must be whole and written by this library.*{file}"):
        train(KEYS, data, PAIR, **SIZES)


def test_compare(frozen, free):
    comparison = task.compare(frozen, free)
    for k in range(2):
        w, start, m, after = (leaves(t, k) for t in (frozen.weights, frozen.start, frozen.mask, free.weights))
        moves = {"distance_frozen_to_sgd": (w, after), "distance_init_to_frozen": (w, start)}
        moves["distance_formerly_zero"] = (*([a[z == 0] for a, z in zip(t, m, strict=True)] for t in (w, after)),)
        for name, pair in moves.items():
            expected = sum(np.linalg.norm(b - a) for a, b in zip(*pair, strict=True))
            np.testing.assert_allclose(comparison[name][k], expected, rtol=1e-5)
    for history, end in ((frozen.history, ""), (free.history, "_after_unfreezing")):
        for name in ("accuracy", "positional_share", "semantic_share"):
            values = getattr(history, name.replace("accuracy", "test_accuracy"))[:, -1]
            assert np.array_equal(comparison[name + end], values)


def test_pages_and_tables():
    """The last epochs of two runs have 1/3 and 1 in the first curve."""
    page = """2 runs of 2 epochs, mean ± standard deviation: 2 converged
        train_loss 0.6667 ± 0.4714 test_loss 1.6667 ± 0.4714 test_accuracy 2.6667 ± 0.4714"""
    assert str(made_up(2)).split() == page.split()
    title, first, *_ = str(made_up(1, Status.nonfinite)).splitlines()
    assert title.endswith(": 1 nonfinite") and first.split() == ["train_loss", "1.0000"]
    assert task.table({"one": {"accuracy": np.array([0.5])}}).splitlines()[-1] == "| accuracy | 0.5000 |"
    numbers = {"accuracy": np.array([0.25, 0.75]), "positional_share": np.array([1.0, 1.0])}
    assert task.table({"a": numbers, "b": numbers}).splitlines() == [
        "|  | a, 2 runs | b, 2 runs |",
        "| --- | --- | --- |",
        "| accuracy | 0.5000 ± 0.3536 | 0.5000 ± 0.3536 |",
        "| positional share | 1.0000 ± 0.0000 | 1.0000 ± 0.0000 |",
    ]
