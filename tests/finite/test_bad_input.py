"""Bad input at finite size or to the counting task raises one sentence that names the argument, before compiling."""

import dataclasses
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax import counting as task
from tiedattn_jax.base import errors
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.finite.data import Data, Labels
from tiedattn_jax.finite.evaluation import heldout_error, linear_baseline, sentence_losses
from tiedattn_jax.finite.instances import run_instances
from tiedattn_jax.finite.message_passing import GAMP, gamp, posterior_mean
from tiedattn_jax.finite.sampling import realised, sample_data, start
from tiedattn_jax.finite.training import Training, risk, train
from tiedattn_jax.model.overlaps import Overlaps

pytestmark = pytest.mark.usefixtures("unchecked")
NAN, INF = float("nan"), float("inf")
D, N = 200, 40


@pytest.fixture(scope="module")
def case(model, two_atoms):
    """Good input, which every row spoils in its own way."""
    key, rng, other = jax.random.key(0), np.random.default_rng(0), two_atoms
    keys = jax.random.split(key, 2)
    x, y, teacher = (rng.standard_normal(shape) for shape in ((2, N, D), (N, 2, 1), (D, 1)))
    x *= 0.5 / D**0.5
    labels, one, three = (
        Labels(*map(jnp.asarray, (np.ones(n), *np.ones((2, L, L, n))))) for L, n in ((2, N), (2, 1), (3, N))
    )
    data, plain, nameless = Data(x, y, teacher, labels=labels), Data(x, y, teacher), Data(x, y)
    small, noisy, alone = Data(np.float32(x), y, teacher), Data(x, y, teacher, noise=y), Data(x, None, labels=labels)
    single, three = Data(x[:, :1], y[:1], labels=one), Data(np.ones((3, N, D)), np.ones((N, 3, 1)), labels=three)
    wide = Data(np.full((2, 1, 10**3 * D), 0.5 / (10**3 * D) ** 0.5), y[:1], np.ones((10**3 * D, 1)))
    encoded = Data(x, y, teacher, np.ones((2, D)), np.full((2, 1), 0.25))
    means, classes = np.zeros((3, D)), np.zeros((N, 2), int)
    in_two, in_three = (
        Data(x, y, teacher, gamma=np.full((S, 1), 0.25), means=means[:S], classes=classes) for S in (2, 3)
    )
    drawn = sample_data(model, 40, 1.5, key, stored=False)
    words = task.Data(np.zeros((4, 3), np.int32), np.ones((2, 3), np.int32), 3)
    w = task.Transformer(key, length=3, tokens=3, width=4, hidden=2)
    stacked, history = jax.tree.map(lambda a: jnp.stack([a, a]), w), task.History(*[np.zeros((2, 0))] * 5)
    frozen = task.Training(stacked, stacked, stacked, history, np.zeros(2, int))
    return SimpleNamespace(**locals())


def earlier_run(c, n, **parts):
    """A result of message passing on n sentences."""
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(GAMP)), np.zeros(()))
    overlaps = Overlaps(*(np.zeros((1, 1, 1)),) * 3, m=np.zeros((1, 1)))
    known = {"Q": c.teacher, "C": np.ones((1, 1, 1)), "g": np.ones((2, 1, n)), "overlaps": overlaps}
    return GAMP(**{**zeros, **known, **parts})


def value_run(c):
    """A result of training with a value matrix."""
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(Training)), np.zeros(()))
    return Training(**{**zeros, "Q": c.teacher, "W": np.eye(D), "overlaps": c.data.overlaps(c.teacher)})


def instances_of(c, result):
    return run_instances(c.model, 40, 1.5, lambda data, key: result, c.keys, nodes=ta.Lines(5))


def of_classes():
    shares = {(0, 0): 0.5, (0, 1): 0.5}
    return ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.25, 0.36], shares, encodings=[[1.0], [-1.0]]))


def of_two_moments():
    """A model whose teacher knows the eigenvalues."""
    tau = np.array([[[1.0, -1.0], [-1.0, 1.0]]] * 2)
    law = [0.5, 0.5], [[0.4, 0.4], [0.1, 0.1]], tau, np.reshape([1.2, 0.8], (2, 1, 1)), np.zeros((2, 2, 1))
    return ta.DotProduct(spectrum=ta.SpectralLaw(*law))


# Calls with good arguments, into which the rows of OPTIONS and KINDS put a bad one.
CALLS = {
    "Data": lambda c, **o: Data(**{"x": c.x, "y": c.y} | o),
    "classes": lambda c, **o: Data(c.x, c.y, **{"means": c.means, "classes": c.classes} | o),
    "sample_data": lambda c, **o: sample_data(c.model, **{"d": 100, "alpha": 1.0, "key": c.key} | o),
    "on_demand": lambda c, **o: sample_data(c.model, **{"d": 50, "alpha": 1.0, "key": c.key, "stored": False} | o),
    "start": lambda c, init="random", **o: start(c.model, c.data, init, **o),
    "gamp": lambda c, **o: gamp(c.model, c.data, **o),
    "posterior_mean": lambda c, **o: posterior_mean(c.model, c.data, **o),
    "train": lambda c, **o: train(c.model, c.data, **o),
    "penalty": lambda c, **o: train(ta.DotProduct(penalty=ta.L1(0.1)), c.data, **o),
    "value": lambda c, **o: train(c.model, c.data, **{"value": 1.0} | o),
    "heldout_error": lambda c, **o: heldout_error(c.model, c.data, **{"Q": c.teacher, "key": c.key} | o),
    "linear_baseline": lambda c, **o: linear_baseline(c.data, **o),
    "run_instances": lambda c, **o: run_instances(
        c.model, **{"d": 60, "alpha": 1.0, "run": lambda data, key: None, "keys": c.keys} | o
    ),
    "task.sample": lambda c, **o: task.sample(**{"key": c.key, "n": 100} | o),
    "task.Transformer": lambda c, **o: task.Transformer(c.key, **o),
    "task.train": lambda c, **o: task.train(**{"keys": c.keys, "data": c.words} | o),
    "task.unfreeze": lambda c, **o: task.unfreeze(**{"keys": c.keys, "frozen": c.frozen, "data": c.words} | o),
}
REAL = "must be an array of real numbers"
CLASSES, ONLY_GD = "must be integers from 0 to 2, the class of every token", "must be gd for a model with a penalty"
ONE, POSITIVE, NOT_NEGATIVE = "must be one number", "must be positive", "must be zero or positive"
KEY, OTHER_KEY = "must be one key", r"must be one key, as jax.random.key\(0\) is, got key=3"
KEYS, AT_MOST = "must be typed PRNG keys of shape", "must be an integer of at most 2147483647"
SHARE = r"must be in \(0, 1\], or None"
# Bad values with the message, and the arguments of the calls that refuse them; a function makes a value of the case.
KINDS = [
    ([(0, "of at least 1, got .*=0"), (2.5, "must be an integer of at least 1, got .*=2.5")],
     "gamp.steps posterior_mean.steps run_instances.batch task.Transformer.hidden task.train.epochs"
     " task.train.batch task.train.hidden"),
    ([(-1, "of at least 0, got steps=-1"), (2.5, "must be an integer of at least 0, got .*=2.5")], "train.steps"),
    ([(1, "must be an integer of at least 2, got .*=1"), (9.5, "must be an integer of at least 2")],
     "heldout_error.sentences task.sample.length task.sample.tokens task.sample.n task.Transformer.length"),
    ([(2, "must be an integer of at least 4"), (-5, "of at least 4, got d=-5"), (True, "must be an integer")],
     "sample_data.d on_demand.d"),
    ([(n, "must be an even integer of at least 2, got width=") for n in (4.0, -2, 7)],
     "task.Transformer.width task.train.width"),
    ([(10**12, "must be smaller, .*would take")], "train.steps gamp.steps value.steps task.sample.n"),
    ([(2**31, AT_MOST)], "task.sample.tokens task.Transformer.hidden"),
    ([(0.0, POSITIVE), (NAN, POSITIVE), ([0.1, 0.2], ONE), ("1", "must be a real number .*got .*='1'")],
     "start.scale gamp.scale gamp.tol posterior_mean.tol train.rate value.rate sample_data.alpha on_demand.alpha"
     " run_instances.alpha task.train.rate"),
    ([(INF, "must be positive and finite, got .*=")], "sample_data.alpha task.train.rate"),
    ([(-1.0, f"{NOT_NEGATIVE}.*=-1.0"), (NAN, NOT_NEGATIVE), ([0.1, 0.2], ONE)],
     "train.tol value.tol value.value linear_baseline.ridge task.unfreeze.noise"),
    ([(1.0, "must be between 0 and 1"), (NAN, "must be between 0 and 1")], "task.sample.train_share"),
    ([(1.5, SHARE), (0.0, SHARE), ([0.1, 0.2], ONE)], "gamp.damping"),
    ([("no", "must be True or False, got .*='no'")], "sample_data.normalise train.exact heldout_error.exact"),
    ([(3, OTHER_KEY), (lambda c: c.keys, KEY), (np.zeros(5, np.uint32), KEY)],
     "sample_data.key on_demand.key start.key gamp.key heldout_error.key task.sample.key"),
    ([(lambda c: c.key, KEYS), ([0, 1], KEYS)], "run_instances.keys task.train.keys"),
]  # fmt: skip
OPTIONS = [
    ("Data", "x", ("sentences", REAL), ([[[1.0], [2.0, 3.0]]], REAL), (lambda c: c.x * 1j, REAL)),
    ("Data", "x", (lambda c: np.ma.array(c.x, mask=True), REAL)),
    ("Data", "y", (lambda c: np.ma.array(c.y, mask=True), REAL)),
    ("Data", "gamma", (np.zeros((2, 1)), POSITIVE), (np.ones((3, 1)), r"must have shape \(L, d\)")),
    ("Data", "labels", (lambda c: c.y, r"must be Labels: see Data.from_sentences")),
    ("classes", "classes", (None, CLASSES), (lambda c: c.classes[:2], CLASSES), (np.full((N, 2), "a"), CLASSES)),
    ("classes", "classes", (lambda c: c.classes - 1, CLASSES), (lambda c: c.classes + 3, CLASSES)),
    ("classes", "means", (None, "must")),
    ("sample_data", "alpha", (0.001, "must be at least 1 / d = 0.01")),
    ("start", "init", ("sematic", "must be 'semantic', 'positional', 'random'")),
    ("start", "init", (np.ones((199, 1)), r"must have shape \(d, r\) with d = 200, r = 1")),
    ("gamp", "response", ("stein", "must be one of regression, derivative")),
    ("gamp", "init", (lambda c: earlier_run(c, N, damping=None), "of `gamp`, got one of `posterior_mean`")),
    ("gamp", "init", (value_run, "must be an array of real .* of type Training")),
    ("posterior_mean", "init", ("semantic", "must be one of random, teacher")),
    ("train", "init", ("gd", "'positional', 'random', 'spectral' .*got init='gd'"), (np.ones(200), "must have shape")),
    ("train", "init", (np.full((D, 1), NAN), "must be finite, got 200 entries")),
    ("train", "init", (lambda c: earlier_run(c, N), "must be an array of real .* of type GAMP")),
    ("train", "optimizer", ("sgd", "must be one of gd, adam, lbfgs")),
    ("train", "labels", (lambda c: c.x, "must be None unless a value matrix")),
    ("penalty", "optimizer", ("adam", ONLY_GD), ("lbfgs", ONLY_GD)),
    ("value", "init", ("gd", "must be 'semantic', 'positional', 'random'")),
    ("value", "labels", (lambda c: c.x, r"shape \(n, L, d\) with n = 40, L = 2")),
    ("value", "labels", (np.full((N, 2, D), NAN), "must be finite")),
    ("value", "optimizer", ("newton", "must be one of gd, adam, lbfgs")),
    ("heldout_error", "sentences", (2**31, "below 2")),
    ("heldout_error", "Q", (np.ones((D - 1, 1)), r"must have shape \(d, r\)")),
    ("heldout_error", "W", (np.eye(3), r"shape \(d, d\) with d = 200")),
    ("linear_baseline", "test", (lambda c: c.plain, "must have labels for the linear baseline")),
    ("linear_baseline", "test", (lambda c: c.three, "must be 2 tokens of float64 as data")),
    ("run_instances", "run", ("train", r"must take \(data, key\)")),
    ("task.train", "mechanism", ("lexical", "must be one of semantic, positional, free")),
    ("task.train", "mechanism", (["free"] * 3, "must be one name, or one for each of the 2")),
    ("task.train", "data", (lambda c: c.data, "must be Data of `sample`")),
    ("task.train", "width", (10**7, "must be smaller, got width=10000000: 2 transformers of 128 hidden units would")),
    ("task.train", "dtype", (int, "must be float32 or float64"), ("double precision", "must be float32 or float64")),
    ("task.train", "checkpoint", (3, "must be the path of a file, or None")),
    ("task.unfreeze", "keys", (lambda c: c.keys[:1], "must be one for each of the 2 runs")),
    ("task.unfreeze", "frozen", (None, "must be a Training of `train`")),
    ("task.unfreeze", "data", (lambda c: task.Data(c.words.train, c.words.test, 4), "out of 3 tokens")),
]
OPTIONS += [(*place.rsplit(".", 1), *values) for values, places in KINDS for place in places.split()]

ESTIMATED = "must be given, .* to estimate it from"
ROWS = [
    # the user's own sentences
    (lambda c: Data(c.x[0], c.y), "x", r"must have shape \(L, n, d\), got shape \(40, 200\)"),
    (lambda c: Data(np.swapaxes(c.x, 0, 1), c.y), "x", "tokens first, .* got sentences first, .* Data.from_sentences"),
    (lambda c: Data(c.x, c.y[:-1]), "y", r"must have shape \(n, L, t\) with n = 40, L = 2, got"),
    (lambda c: Data(c.x, None), "y", "must be given, .* where there are no labels"),
    (lambda c: Data(c.x, None, c.teacher, labels=c.labels), "y", "must be given beside a teacher"),
    (lambda c: Data(c.x, c.y, c.teacher[:-1]), "teacher", r"must have shape \(d, t\) with d = 200, t = 1"),
    (lambda c: Data(c.x, c.y, encodings=c.x[0]), "encodings", r"must have shape \(L, d\)"),
    (lambda c: Data(c.x, c.y, noise=c.y[:5]), "noise", r"must have shape \(n, L, k\)"),
    (lambda c: Data(np.where(c.x == c.x[0, 3, 2], NAN, c.x), c.y), "x", "must be finite, got 1 entries"),
    (lambda c: Data(c.x, np.inf * c.y), "y", "must be finite, got 80 entries"),
    (lambda c: Data(0 * c.x, c.y), "gamma", rf"{ESTIMATED}, or zeros only"),
    (lambda c: Data(c.x[:, :0], c.y[:0]), "x", "must be an .* array of n >= 1 sentences"),
    (lambda c: Data(c.x[..., :1], c.y), "x", "in d >= 2 dimensions"),
    (lambda c: Data(c.x, c.y, labels=eqx.tree_at(lambda o: o.gram, c.labels, np.ones((2, 2, 3)))), "labels.gram", "sh"),
    (lambda c: Data(c.x, c.y, means=c.means, classes=c.classes), "gamma", rf"{ESTIMATED}.* \[0.0\]\]"),
    (lambda c: Data.from_sentences(c.data.inputs()), "labels", r"must be given, \(n, L, d\), or teacher, .*, got none"),
    (lambda c: Data.from_sentences(c.data.inputs(), fields=c.y[1:]), "fields", "must have shape"),
    (lambda c: Data.from_sentences(c.data.inputs(), c.y, fields=c.y), "labels", "must have shape"),
    (lambda c: Data.from_sentences(c.data.inputs(), np.ones((N, 2, 2))), "labels", r"\(40, 2, 200\), got \(n, L, L\)"),
    (lambda c: c.nameless.rho, "teacher", "must be known for its overlaps"),
    (lambda c: c.nameless.teacher_gram, "teacher", "must be known for its norm"),
    (lambda c: c.data.raw_labels(c.other), "model", "must have a method `target` .*TwoAtoms"),
    (lambda c: c.alone.raw_labels(c.model), "data", "must have a teacher or its fields .* got labels only"),
    (lambda c: c.drawn.raw_labels(c.model), "data", "must be stored for exact labels"),
    # sentences sampled from a model
    (lambda c: sample_data(c.model, 10**7, 1000.0, c.key), "d", r"1e\+10 sentences would take [\d.]+e\+09 GiB"),
    (lambda c: sample_data(c.model, 100, 1e306, c.key), "d", "must be smaller"),
    (lambda c: jax.jit(lambda a: sample_data(c.model, 100, a, c.key))(1.0), "alpha", "must be a Python number"),
    (lambda c: sample_data(of_classes(), 50, 1.0, c.key, stored=False), "model", "must have no classes of tokens"),
    (lambda c: realised(c.other, c.data), "model", "must have a method `with_teacher` .*TwoAtoms"),
    (lambda c: realised(c.model, c.nameless), "teacher", "must be known for its norm"),
    # starts, and data that do not fit the model
    (lambda c: start(c.model, c.nameless, "semantic"), "teacher", "init='semantic', .* or another start, such as "),
    (lambda c: start(c.model, c.plain, "positional"), "init", "must be 'semantic', 'random' or an array"),
    (lambda c: train(ta.DotProduct(teacher=np.eye(2)), c.data), "data", "must have .* t = 2 teacher fields"),
    (lambda c: train(c.model, c.noisy), "data", "must have 0 fields of noise a token as the model has, got 1"),
    (lambda c: train(c.model, c.in_three), "data", "must have classes of tokens where the model's .* got classes"),
    (lambda c: gamp(c.model, c.small), "data", "must be float64 as the model is, .* got float32"),
    (lambda c: train(ta.DotProduct(dtype=jnp.float32), c.data), "data", "must be float32 as the model is, .*float64"),
    (lambda c: heldout_error(c.model, c.small, c.teacher, c.key), "data", "must be float64"),
    (lambda c: gamp(c.model, c.encoded), "data", r"encodings .*law has them \(1\), got 200: divide"),
    (lambda c: train(ta.DotProduct(sigma=5.0), c.drawn), "data", "must have inputs of the model's variance"),
    (lambda c: gamp(c.model, c.x), "data", "must be a tiedattn_jax.Data"),
    (lambda c: gamp("dot product", c.data), "model", "must be a tiedattn_jax.Model"),
    (lambda c: ta.finite.diagnose(c.data, c.model), "model", r"must be a tiedattn_jax\.Model"),
    (lambda c: ta.finite.diagnose(c.model, c.in_three), "data", "must have the tokens and classes of the model"),
    (lambda c: ta.finite.diagnose(c.model, c.single), "data", "must have two sentences or more"),
    # runs
    (lambda c: gamp(c.model, c.data, earlier_run(c, N + 1)), "init.g", r"must have shape \(L, r, n\) with .*n = 40"),
    (lambda c: gamp(c.model, c.data, earlier_run(c, N, C=np.ones((D, 1, 1)))), "init.C", "shape .* with i = 1"),
    (lambda c: gamp(ta.DotProduct(penalty=ta.L1(0.1)), c.data, earlier_run(c, N)), "init.C", "shape .*i = 200"),
    (lambda c: posterior_mean(of_classes(), c.in_two), "data", "must have no classes of tokens"),
    (lambda c: posterior_mean(of_two_moments(), c.data), "law.pi", "must be the same at all atoms"),
    (lambda c: posterior_mean(c.model, c.drawn), "data", "must be stored for `posterior_mean`"),
    (lambda c: ta.bayes.spectral_direction(c.model, c.drawn), "data", "must be stored for a spectral start"),
    (lambda c: gamp(c.model, c.drawn, earlier_run(c, N)), "data", "must be stored to go on from an earlier run"),
    (lambda c: risk(c.model, c.drawn, c.drawn.teacher), "data", "must be stored for the risk"),
    (lambda c: train(c.model, c.drawn, optimizer="lbfgs"), "data", "must be stored for L-BFGS"),
    (lambda c: train(c.model, c.drawn, exact=True), "data", "must be stored for exact=True"),
    (lambda c: train(c.model, c.drawn, "spectral"), "data", "must be stored for a spectral start"),
    (lambda c: train(c.model, c.drawn, value=1.0), "data", "must be stored for a value matrix"),
    (lambda c: train(c.model, c.alone, np.ones((D, 1))), "data", "must have a teacher or its fields .*got labels only"),
    (lambda c: train(c.model, c.alone, exact=True), "teacher", "must be known"),
    (lambda c: risk(c.model, c.data, c.teacher, exact=1), "exact", "must be True or False"),
    (lambda c: risk(c.model, c.data, np.ones((3, 1))), "Q", "must have shape"),
    (lambda c: risk(c.model, c.plain, c.teacher, exact=True), "data", "must have labels for exact=True"),
    (lambda c: train(c.other, c.data, value=1.0), "model", "must have a method `student` for a value matrix"),
    (lambda c: train(ta.DotProduct(penalty=ta.L1(0.1)), c.data, value=1.0), "model", "have no penalty .* penalty=None"),
    (lambda c: train(c.model, c.wide, value=1.0), "data", r"smaller, got data=\(2, 1, 200000, 1\): .* 2.38e\+03"),
    # measurements
    (lambda c: heldout_error(c.other, c.data, c.teacher, c.key, W=np.eye(D)), "model", "a method `target`"),
    (lambda c: linear_baseline(c.x), "data", "must be a tiedattn_jax.Data"),
    (lambda c: linear_baseline(c.drawn), "data", "must be a tiedattn_jax.Data"),
    (lambda c: linear_baseline(c.single), "data", "must have two sentences or more"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, W=np.eye(D)), "key", "must be given beside W"),
    (lambda c: heldout_error(c.model, Data(c.x[:, :1], c.y[:1]), c.teacher), "data", "two sent"),
    (lambda c: heldout_error(c.model, c.nameless, c.teacher, c.key), "teacher", "must be known to label"),
    (lambda c: heldout_error(c.other, c.data, c.teacher, c.key, exact=True), "model", "a method `target`"),
    (lambda c: sentence_losses(c.other, c.data, c.x, exact=True), "model", "must have a method `student`"),
    (lambda c: run_instances(c.model, 10**7, 1e3, None, c.keys), "d", "must be smaller"),
    (lambda c: run_instances(c.model, 999, 9, None, jax.random.split(c.key, 10**6), batch=10**6), "d", "be smaller"),
    (lambda c: instances_of(c, value_run(c)), "theory", "must be False for a value matrix, of which there is none"),
    (lambda c: instances_of(c, earlier_run(c, N, train_loss=None)), "run", "must return a result of `gamp` or `train`"),
    (lambda c: run_instances(c.other, 60, 1.0, None, c.keys), "model", "must have a method `with_teacher`"),
    # the counting task
    (lambda c: task.sample(c.key, 5, train_share=0.01), "train_share", "must be such that both parts"),
    (lambda c: task.Data(np.zeros(3, int), np.zeros((2, 3), int), 3), "train", r"must be of shape \(n, L\)"),
    (lambda c: task.Data(np.zeros((3, 3), int), np.zeros((3, 2), int), 3), "test", r"must be of shape \(n, L\)"),
    (lambda c: task.Data(np.zeros((0, 3), int), np.zeros((2, 3), int), 3), "train", "must be of shape"),
    (lambda c: task.Data(np.zeros((2, 1), int), np.zeros((2, 1), int), 3), "train", "must be of shape"),
    (lambda c: task.Data(c.words.train, c.words.test, 1), "tokens", "must be an integer of at least 2, got tokens=1"),
    (lambda c: task.Data(c.words.train, c.words.test - 2, 3), "test", r"between 0 and 2, got test=\[\["),
    (lambda c: task.Data(c.words.train == 1, c.words.test, 3), "train", "must be tokens between 0 and 2"),
    (lambda c: task.Data(np.full((3, 3), 3), np.zeros((2, 3), int), 3), "train", "must be tokens between 0 and 2"),
    (lambda c: task.Data(np.zeros((3, 3)), np.zeros((2, 3), int), 3), "train", "must be tokens between 0 and 2"),
    (lambda c: task.Data(np.ma.array([[0, 1]], mask=True), c.words.test, 3), "train", "must be tokens between 0 and 2"),
    (lambda c: task.mask(c.w, "lexical"), "mechanism", "must be one of semantic, positional, free"),
    (lambda c: task.compare(c.frozen, task.Training(c.w, c.w, c.w, None, np.zeros(1))), "free", "must be what became"),
    (lambda c: task.attention(c.w, [0] * 9), "x", "must be of a shape that ends with L = 3"),
    (lambda c: task.attention(c.w, [0, 1, 3]), "x", r"must be tokens between 0 and 2, got x=\[0, 1, 3\]"),
    (lambda c: task.attention(c.w, np.array(1)), "x", r"must be of a shape that ends with L = 3, got x=\[\]"),
]


def with_option(name, argument, value):
    made = value if callable(value) and value is not int else lambda c: value
    return lambda c: CALLS[name](c, **{argument: made(c)})


ROWS += [(with_option(name, a, value), a, message) for name, a, *pairs in OPTIONS for value, message in pairs]


@pytest.mark.parametrize("row", ROWS, ids=[f"{argument}-{k}" for k, (_, argument, _) in enumerate(ROWS)])
def test_bad_input(case, row):
    call, argument, message = row
    with pytest.raises(InputError, match=message) as raised:
        call(case)
    assert raised.value.argument == argument and str(raised.value).startswith(f"{argument} must")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_steps_that_do_not_fit_into_memory(case, monkeypatch):
    """A step on demand takes 2 L n + (L + 1) d numbers; what stored sentences would take does not matter."""
    monkeypatch.setattr(errors, "memory", lambda: 2.0**18)
    for run in (train, gamp):
        with pytest.raises(InputError, match="steps must be smaller, got steps=100: the products of so many steps"):
            run(case.model, case.drawn, steps=100)
    jax.eval_shape(lambda data: train(case.model, data, steps=40), case.drawn)
