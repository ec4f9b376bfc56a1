"""Training of the counting transformer: defaults, arguments beyond their bounds, and how results print."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax import counting as task
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.results import Status
from tiedattn_jax.counting import training

pytestmark = pytest.mark.usefixtures("fast_compilation")

KEYS = jax.random.split(jax.random.key(0), 2)


@pytest.fixture(scope="module")
def data():
    x = np.array([[0, 1], [1, 1], [1, 0], [0, 0]], np.int32)
    return task.Data(x, x, 2)


def made_up(runs, status=Status.converged):
    """A training of two epochs whose weights have not moved."""
    w = task.Transformer(jax.random.key(0), length=2, tokens=2, width=2, hidden=1)
    w = jax.tree.map(lambda a: jnp.stack([a] * runs), w)
    curves = [np.linspace(k, k + 1, 2 * runs).reshape(runs, 2) for k in range(5)]
    return task.Training(w, w, w, task.History(*curves), np.full(runs, status))


def test_defaults_are_those_of_the_paper(data, monkeypatch):
    seen = []

    def capture(start, masks, keys, plan, configuration):
        seen.append((start, plan, configuration))
        return made_up(len(keys))

    monkeypatch.setattr(training, "_run", capture)
    task.train(KEYS[:1], data)
    task.unfreeze(KEYS, made_up(2), data)
    (start, first, adam), (_, second, sgd) = seen
    assert start.query.shape == (1, 64, 64) and start.hidden.weight.shape == (1, 128, 64)
    assert start.query.dtype == jnp.float32
    assert (first.epochs, first.batch, first.rate, first.checkpoint) == (200, 32, 1e-3, None)
    assert (second.epochs, second.batch, second.rate, second.checkpoint) == (100, 32, 1e-3, None)
    assert adam == {"optimizer": "adam", "mechanism": ["free"]} and sgd == {"optimizer": "sgd", "noise": 1e-3}


def test_the_page_of_several_runs():
    title, *rows = str(made_up(2)).splitlines()
    assert title == "2 runs of 2 epochs, mean ± standard deviation: 2 converged"
    # The last epochs have 1/3 and 1 in the first curve.
    assert [row.split() for row in rows] == [
        ["train_loss", *"0.6667 ± 0.4714".split()],
        ["test_loss", *"1.6667 ± 0.4714".split()],
        ["test_accuracy", *"2.6667 ± 0.4714".split()],
    ]


def test_one_run_has_no_standard_deviation():
    title, *rows = str(made_up(1, Status.nonfinite)).splitlines()
    assert title == "1 runs of 2 epochs, mean ± standard deviation: 1 nonfinite"
    assert rows[0].split() == ["train_loss", "1.0000"]
    assert task.table({"one": {"accuracy": np.array([0.5])}}).splitlines() == [
        "|  | one, 1 runs |",
        "| --- | --- |",
        "| accuracy | 0.5000 |",
    ]


def test_a_table_has_a_column_for_every_comparison():
    numbers = {"accuracy": np.array([0.25, 0.75]), "positional_share": np.array([1.0, 1.0])}
    lines = task.table({"a": numbers, "b": numbers}).splitlines()
    assert lines == [
        "|  | a, 2 runs | b, 2 runs |",
        "| --- | --- | --- |",
        "| accuracy | 0.5000 ± 0.3536 | 0.5000 ± 0.3536 |",
        "| positional share | 1.0000 ± 0.0000 | 1.0000 ± 0.0000 |",
    ]


def test_every_status_is_counted():
    assert training.counted(np.array([0, 2, 0, 4, 2, 0])) == "3 converged, 2 max steps, 1 nonfinite"


@pytest.mark.parametrize("accuracy, status", [(0.99, Status.converged), (0.9899, Status.max_steps)])
def test_a_run_is_solved_from_an_accuracy_on(accuracy, status):
    curve = np.array([[0.0, accuracy, accuracy], [0.0, 1.0, accuracy]])
    assert task.History(curve, curve, curve, curve, curve).status().tolist() == [status] * 2


@pytest.mark.parametrize(
    "call, sentence",
    [
        (
            lambda d: task.train(KEYS, d, ["free"]),
            "mechanism must be one name, or one for each of the 2 keys, got mechanism=['free']",
        ),
        (lambda d: task.train(KEYS, d, "both"), "mechanism must be one of semantic, positional, free"),
        (lambda d: task.train(KEYS, d, width=7), "width must be an even integer"),
        (
            lambda d: task.train(KEYS, d, width=2 * 10**6, hidden=10**6),
            "width must be smaller, got width=2000000: 2 transformers of 1000000 hidden units would take 4.17e+05 GiB",
        ),
        (lambda d: task.train(KEYS, d, epochs=0), "epochs must be an integer of at least 1, got epochs=0"),
        (lambda d: task.train(KEYS, d, batch=0), "batch must be an integer of at least 1, got batch=0"),
        (lambda d: task.train(KEYS, d, rate=0.0), "rate must be positive and finite, got rate=0.0"),
        (lambda d: task.train(KEYS, d, checkpoint=3), "checkpoint must be the path of a file, or None"),
        (lambda d: task.train(KEYS, d.train), "data must be Data of `sample`"),
        (lambda d: task.train(KEYS, d, dtype="int32"), "dtype must be float32 or float64"),
        (lambda d: task.unfreeze(KEYS, d, d), "frozen must be a Training of `train`"),
        (lambda d: task.unfreeze(KEYS, made_up(3), d), "keys must be one for each of the 3 runs, got keys=[2]"),
        (
            lambda d: task.unfreeze(KEYS, made_up(2), task.Data(d.train, d.test, 3)),
            "data must be sequences of 2 out of 2 tokens, as `frozen` was trained on, got data='sequences of 2 out",
        ),
        (lambda d: task.unfreeze(KEYS, made_up(2), d, noise=-0.1), "noise must be zero or positive"),
        (
            lambda d: task.compare(made_up(2), made_up(3)),
            "free must be what became of the 2 frozen runs, got free='3 runs'",
        ),
    ],
)
def test_bad_calls(data, unchecked, call, sentence):
    with pytest.raises(InputError) as error:
        call(data)
    assert str(error.value).startswith(sentence)
