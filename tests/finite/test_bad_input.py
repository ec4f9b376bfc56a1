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
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.counting import training as counting_training
from tiedattn_jax.finite import evaluation, message_passing, sampling, training
from tiedattn_jax.finite.data import Data, Labels
from tiedattn_jax.finite.diagnosis import check_fit
from tiedattn_jax.finite.evaluation import heldout_error, linear_baseline, sentence_losses
from tiedattn_jax.finite.instances import run_instances
from tiedattn_jax.finite.message_passing import GAMP, gamp
from tiedattn_jax.finite.sampling import realised, sample_data, start
from tiedattn_jax.finite.training import Training, risk, train
from tiedattn_jax.model.layers import LAYERS
from tiedattn_jax.model.overlaps import Overlaps

pytestmark = pytest.mark.usefixtures("fast_compilation")

NAN = float("nan")
D, N = 200, 40


@pytest.fixture(scope="module")
def case(model, two_atoms):
    """Good input, which every row spoils in its own way."""
    key = jax.random.key(0)
    rng = np.random.default_rng(0)
    x, y, teacher = (rng.standard_normal(shape) for shape in ((2, N, D), (N, 2, 1), (D, 1)))
    x *= 0.5 / D**0.5
    labels = Labels(jnp.ones(N), jnp.ones((2, 2, N)), jnp.ones((2, 2, N)))
    words = task.Data(np.zeros((4, 3), np.int32), np.ones((2, 3), np.int32), 3)
    w = task.Transformer(key, length=3, tokens=3, width=4, hidden=2)
    stacked, history = jax.tree.map(lambda a: jnp.stack([a, a]), w), task.History(*[np.zeros((2, 0))] * 5)
    return SimpleNamespace(
        model=model,
        other=two_atoms,
        key=key,
        keys=jax.random.split(key, 2),
        x=x,
        y=y,
        teacher=teacher,
        labels=labels,
        data=Data(x, y, teacher, labels=labels),
        plain=Data(x, y, teacher),
        small=Data(np.float32(x), y, teacher),
        nameless=Data(x, y),
        single=Data(x[:, :1], y[:1], labels=Labels(jnp.ones(1), jnp.ones((2, 2, 1)), jnp.ones((2, 2, 1)))),
        three=Data(np.ones((3, N, D)), np.ones((N, 3, 1)), labels=Labels(jnp.ones(N), *jnp.ones((2, 3, 3, N)))),
        wide=Data(np.full((2, 1, 10**3 * D), 0.5 / (10**3 * D) ** 0.5), y[:1], np.ones((10**3 * D, 1))),
        words=words,
        w=w,
        frozen=task.Training(stacked, stacked, stacked, history, np.zeros(2, int)),
    )


def encoded(c, entries):
    """Good data, but with encodings whose entries all equal `entries`."""
    return Data(c.x, c.y, c.teacher, encodings=np.full((2, D), entries), gamma=np.full((2, 1), 0.25))


@pytest.mark.filterwarnings("ignore:data have")
def test_strong_encodings_fit_a_model_that_has_them(case):
    check_fit(case.model, encoded(case, 3 * D**-0.5))
    check_fit(ta.DotProduct(encodings=[[D**0.5], [0.0]]), encoded(case, 1.0))


@pytest.mark.parametrize("layer", LAYERS)
def test_sampled_data_have_the_model_s_scale(layer):
    """Sampled data fit their model, even one sentence in few dimensions with strong encodings, or without a teacher."""
    model = LAYERS[layer](sigma=0.1, encodings=[[3.0, 1.0], [9.0, -1.0]])
    for seed in range(5):
        data = sample_data(model, 6, 1 / 6, jax.random.key(seed))
        check_fit(model, data)
        small = eqx.tree_at(lambda s: (s.teacher, s.y), data, (None, 0.05 * data.y))
        check_fit(model, small)  # with two numbers y may be that small by chance


def scaled(c, x=1.0, y=1.0, teacher=True):
    """Good data of the model, with inputs scaled by `x` and fields by `y`."""
    fields = jnp.einsum("lnd,dt->nlt", c.x, c.teacher)
    return Data(x * c.x, y * fields, c.teacher if teacher else None)


def earlier_run(c, n, **parts):
    """A result of message passing on n sentences."""
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(GAMP)), jnp.zeros(()))
    overlaps = Overlaps(*(jnp.zeros((1, 1, 1)),) * 3, m=jnp.zeros((1, 1)))
    known = {"Q": c.teacher, "C": jnp.ones((1, 1, 1)), "g": jnp.ones((2, 1, n)), "overlaps": overlaps}
    return GAMP(**{**zeros, **known, **parts})


def value_run(c):
    """A result of training with a value matrix."""
    names = ("Q", "W", "overlaps", "train_loss", "gradient_norm", "iterations", "status", "losses", "gradient_norms")
    zeros = dict.fromkeys(names, jnp.zeros(()))
    return Training(**{**zeros, "Q": c.teacher, "W": jnp.eye(D), "overlaps": c.data.overlaps(c.teacher)})


def traced(call):
    return jax.jit(call)(1.0)


ROWS = [
    # the user's own sentences
    (lambda c: Data(c.x[0], c.y), "x", r"must have shape \(L, n, d\), got shape \(40, 200\)"),
    (lambda c: Data(np.swapaxes(c.x, 0, 1), c.y), "x", "tokens first, .* got sentences first, .* Data.from_sentences"),
    (lambda c: Data(c.x, c.y[:-1]), "y", r"must have shape \(n, L, t\) with n = 40, L = 2, got"),
    (lambda c: Data(c.x, c.y, c.teacher[:-1]), "teacher", r"must have shape \(d, t\) with d = 200, t = 1"),
    (lambda c: Data(c.x, c.y, encodings=c.x[0]), "encodings", r"must have shape \(L, d\)"),
    (lambda c: Data(np.where(c.x == c.x[0, 3, 2], NAN, c.x), c.y), "x", "must be finite, got 1 entries"),
    (lambda c: Data(c.x, np.inf * c.y), "y", "must be finite, got 80 entries"),
    (lambda c: Data(c.x, c.y, gamma=jnp.zeros((2, 1))), "gamma", "must be positive"),
    (lambda c: Data(c.x, c.y, gamma=jnp.ones((3, 1))), "gamma", r"must have shape \(L, d\)"),
    (lambda c: Data("sentences", c.y), "x", "must be an array of real numbers"),
    (lambda c: Data(c.x * 1j, c.y), "x", "must be an array of real numbers"),
    (lambda c: Data([[[1.0], [2.0, 3.0]]], c.y), "x", "must be an array of real numbers"),
    (lambda c: Data(c.x[:, :0], c.y[:0]), "x", "must be an .* array of n >= 1 sentences"),
    (lambda c: Data(c.x[..., :1], c.y), "x", "in d >= 2 dimensions"),
    (lambda c: Data(c.x, c.y, labels=c.y), "labels", r"must be Labels: see Data.from_sentences"),
    (lambda c: Data(c.x, c.y, labels=eqx.tree_at(lambda o: o.gram, c.labels, np.ones((2, 2, 3)))), "labels.gram", "sh"),
    (lambda c: Data.from_sentences(c.data.inputs()), "labels", "must be given"),
    (lambda c: Data.from_sentences(c.data.inputs(), fields=c.y[1:]), "fields", "must have shape"),
    (lambda c: Data.from_sentences(c.data.inputs(), c.y, fields=c.y), "labels", "must have shape"),
    (
        lambda c: Data.from_sentences(c.data.inputs(), np.ones((40, 2, 2))),
        "labels",
        r"\(40, 2, 200\), got \(n, L, L\), the shape of at",
    ),
    (lambda c: c.nameless.rho, "teacher", "must be known for its overlaps"),
    (lambda c: c.nameless.teacher_gram, "teacher", "must be known for its norm"),
    # sentences sampled from a model
    (lambda c: sample_data(c.model, 2, 1.0, c.key), "d", "must be an integer of at least 4"),
    (lambda c: sample_data(c.model, 0, 1.0, c.key), "d", "must be an integer of at least 4"),
    (lambda c: sample_data(c.model, -5, 1.0, c.key), "d", "must be an integer of at least 4, got d=-5"),
    (lambda c: sample_data(c.model, 100.0, 1.0, c.key), "d", "must be an integer of at least 4, got d=100.0"),
    (lambda c: sample_data(c.model, True, 1.0, c.key), "d", "must be an integer"),
    (lambda c: sample_data(c.other, 8, 1.0, c.key), "d", r"must leave L \+ t \+ 1 = 4 coordinates"),
    (lambda c: sample_data(c.model, 10**7, 1000.0, c.key), "d", r"1e\+10 sentences would take [\d.]+e\+09 GiB"),
    (lambda c: sample_data(c.model, 100, 1e306, c.key), "d", "must be smaller"),
    (lambda c: sample_data(c.model, 100, 0.001, c.key), "alpha", "must be at least 1 / d = 0.01"),
    (lambda c: sample_data(c.model, 100, -1.0, c.key), "alpha", "must be positive and finite, got alpha=-1.0"),
    (lambda c: sample_data(c.model, 100, NAN, c.key), "alpha", "must be positive and finite, got alpha=nan"),
    (lambda c: sample_data(c.model, 100, np.inf, c.key), "alpha", "must be positive and finite"),
    (lambda c: sample_data(c.model, 100, [1.0, 2.0], c.key), "alpha", "must be one number"),
    (lambda c: sample_data(c.model, 100, "2", c.key), "alpha", "must be a real number .*got alpha='2'"),
    (lambda c: traced(lambda a: sample_data(c.model, 100, a, c.key)), "alpha", "must be a Python number"),
    (lambda c: sample_data(c.model, 100, 1.0, 3), "key", r"must be one key, as jax.random.key\(0\) is, got key=3"),
    (lambda c: sample_data(c.model, 100, 1.0, c.keys), "key", "must be one key"),
    (lambda c: sample_data(c.model, 100, 1.0, np.zeros(5, np.uint32)), "key", "must be one key"),
    (lambda c: sample_data(c.model, 100, 1.0, c.key, normalise="no"), "normalise", "must be True or False"),
    (lambda c: train(c.model, c.data, exact="no"), "exact", "must be True or False, got exact='no'"),
    (lambda c: risk(c.model, c.data, c.teacher, exact=1), "exact", "must be True or False"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, c.key, exact="no"), "exact", "must be True or False"),
    (lambda c: Data(1j * c.x, c.y), "x", "must be an array of real numbers"),
    (lambda c: Data(np.ma.array(c.x, mask=True), c.y), "x", "must be an array of real numbers"),
    (lambda c: Data(c.x, np.ma.array(c.y, mask=True)), "y", "must be an array of real numbers"),
    (lambda c: c.data.raw_labels(c.other), "model", "must have a method `target` .*TwoAtoms"),
    (lambda c: realised(c.other, c.data), "model", "must have a method `with_teacher` .*TwoAtoms"),
    (lambda c: realised(c.model, c.nameless), "teacher", "must be known for its norm"),
    # starts, and data that do not fit the model
    (lambda c: start(c.model, c.data, "sematic"), "init", "must be 'semantic', 'positional', 'random'"),
    (lambda c: start(c.model, c.data, np.ones((199, 1))), "init", r"must have shape \(d, r\) with d = 200, r = 1"),
    *((lambda c, v=v: start(c.model, c.data, "random", scale=v), "scale", "must be positive") for v in (0.0, NAN)),
    (lambda c: start(c.model, c.data, "random", scale=[1.0, 2.0]), "scale", "must be one number"),
    (lambda c: start(c.model, c.data, "random", key=1), "key", "must be one key"),
    (lambda c: start(c.model, c.nameless, "semantic"), "teacher", "init='semantic', .* or another start, such as "),
    (lambda c: start(c.model, c.plain, "positional"), "init", "must be 'semantic', 'random' or an array"),
    (lambda c: train(ta.DotProduct(teacher=jnp.eye(2)), c.data), "data", "must have .* t = 2 teacher fields"),
    (lambda c: gamp(c.model, c.small), "data", "must be float64 as the model is, .* got float32"),
    (lambda c: train(ta.DotProduct(dtype=jnp.float32), c.data), "data", "must be float32 as the model is, .*float64"),
    (lambda c: heldout_error(c.model, c.small, c.teacher, c.key), "data", "must be float64"),
    (
        lambda c: gamp(c.model, Data(c.x * D**0.5, c.y, c.teacher)),
        "data",
        r"/ d, x / sqrt\(d\) for .*got 199 times that",
    ),
    (lambda c: risk(c.model, Data(c.x * D**0.5, c.y), c.teacher), "data", r"got 199 times|got 200 times|got 201 times"),
    (lambda c: gamp(c.model, scaled(c, D**-0.5, D**-0.5)), "data", r"x / sqrt\(d\) for .*, got 0.0049. times that"),
    (lambda c: gamp(c.model, scaled(c, y=D**0.5)), "data", r"must have fields y = .*got 200 times .* of its teacher"),
    (lambda c: gamp(c.model, scaled(c, y=D**-0.5)), "data", r"must have fields y = .*got 0.005 times"),
    (lambda c: gamp(c.model, scaled(c, y=D**0.5, teacher=False)), "data", "fields y = .* the variance of the model"),
    (lambda c: gamp(c.model, scaled(c, y=D**-0.5, teacher=False)), "data", "fields y = .* the variance of the model"),
    (lambda c: gamp(ta.DotProduct(sigma=0.5 * D**0.5), scaled(c, D**0.5, D**-0.5)), "data", "y = .*2.5e-05 .* teacher"),
    (lambda c: gamp(c.model, encoded(c, 1.0)), "data", r"encodings .*law has them \(1\), got 200: divide"),
    (lambda c: gamp(c.model, c.x), "data", "must be a tiedattn_jax.Data"),
    (lambda c: gamp("dot product", c.data), "model", "must be a tiedattn_jax.Model"),
    # message passing
    (lambda c: gamp(c.model, c.data, steps=0), "steps", "must be an integer of at least 1"),
    (lambda c: gamp(c.model, c.data, steps=2.5), "steps", "must be an integer of at least 1, got steps=2.5"),
    (lambda c: gamp(c.model, c.data, steps=10**12), "steps", "must be smaller"),
    *((lambda c, v=v: gamp(c.model, c.data, tol=v), "tol", "must be positive") for v in (0.0, NAN)),
    (lambda c: gamp(c.model, c.data, tol="1e-3"), "tol", "must be a real number"),
    (lambda c: gamp(c.model, c.data, damping=1.5), "damping", r"must be in \(0, 1\], or None"),
    (lambda c: gamp(c.model, c.data, damping=0.0), "damping", r"must be in \(0, 1\]"),
    (lambda c: gamp(c.model, c.data, damping=[0.1, 0.2]), "damping", "must be one number"),
    (lambda c: gamp(c.model, c.data, response="stein"), "response", "must be one of regression, derivative"),
    (
        lambda c: gamp(c.model, c.data, earlier_run(c, N, damping=None)),
        "init",
        "of `gamp`, got one of `posterior_mean`",
    ),
    (lambda c: gamp(c.model, c.data, earlier_run(c, N + 1)), "init.g", r"must have shape \(L, r, n\) with .*n = 40"),
    (lambda c: gamp(c.model, c.data, "random", scale=0.0), "scale", "must be positive"),
    (lambda c: gamp(c.model, c.data, "random", key=1), "key", "must be one key"),
    # training
    (lambda c: train(c.model, c.data, "gd"), "init", "'positional', 'random', 'spectral' .*got init='gd'"),
    (lambda c: train(c.model, c.data, optimizer="sgd"), "optimizer", "must be one of gd, adam, lbfgs"),
    (lambda c: train(c.model, c.data, steps=0), "steps", "must be an integer of at least 1"),
    (lambda c: train(c.model, c.data, steps=-3), "steps", "must be an integer of at least 1, got steps=-3"),
    (lambda c: train(c.model, c.data, steps=10**12), "steps", r"must be smaller, .*would take 1.49e\+04 GiB"),
    *((lambda c, v=v: train(c.model, c.data, rate=v), "rate", "must be positive") for v in (-0.1, NAN)),
    (lambda c: train(c.model, c.data, rate=[0.1, 0.2]), "rate", "must be one number"),
    *((lambda c, v=v: train(c.model, c.data, tol=v), "tol", "must be zero or positive") for v in (-1.0, NAN)),
    (lambda c: train(c.model, c.data, init=np.ones(200)), "init", "must have shape"),
    (lambda c: train(c.model, c.data, init=NAN * c.teacher), "init", "must be finite, got 200 entries"),
    (lambda c: train(c.model, c.data, init=earlier_run(c, N)), "init", "must be an array of real .* of type GAMP"),
    (lambda c: train(c.model, c.data, "random", optimizer="gd", scale=-1.0), "scale", "must be positive"),
    (lambda c: train(c.model, c.data, "random", optimizer="gd", key=1.5), "key", "must be one key"),
    (lambda c: risk(c.model, c.data, np.ones((3, 1))), "Q", "must have shape"),
    (lambda c: risk(c.model, c.plain, c.teacher, exact=True), "data", "must have labels for exact=True"),
    # a value matrix
    (lambda c: train(c.model, c.data, "gd", value=1.0), "init", "must be 'semantic', 'positional', 'random'"),
    (lambda c: train(c.model, c.data, value=-1.0), "value", "must be zero or positive, .* got value=-1.0"),
    (lambda c: train(c.model, c.data, value=NAN), "value", "must be zero or positive"),
    (lambda c: train(c.model, c.data, value=[0.1, 0.2]), "value", "must be one number"),
    (lambda c: train(c.model, c.data, labels=c.data.inputs()), "labels", "must be None unless a value matrix"),
    (lambda c: train(c.model, c.data, value=1.0, labels=c.x), "labels", r"shape \(n, L, d\) with n = 40, L = 2"),
    (lambda c: train(c.model, c.data, value=1.0, labels=NAN * c.data.inputs()), "labels", "must be finite"),
    (lambda c: train(c.model, c.data, value=1.0, optimizer="newton"), "optimizer", "must be one of gd, adam, lbfgs"),
    (lambda c: train(c.model, c.data, value=1.0, steps=10**12), "steps", "must be smaller"),
    (lambda c: train(c.model, c.data, value=1.0, rate=0.0), "rate", "must be positive"),
    (lambda c: train(c.model, c.data, value=1.0, tol=-1.0), "tol", "must be zero or positive"),
    (lambda c: train(c.model, c.x, value=1.0), "data", "must be a tiedattn_jax.Data"),
    (lambda c: train(c.other, c.data, value=1.0), "model", "must have a method `student` for a value matrix"),
    (lambda c: train(ta.DotProduct(penalty=ta.L1(0.1)), c.data, value=1.0), "model", "have no penalty .* penalty=None"),
    (lambda c: train(c.model, c.wide, value=1.0), "data", r"smaller, got data=\(2, 1, 200000, 1\): .* 2.38e\+03"),
    (lambda c: gamp(c.model, c.data, value_run(c)), "init", "must be an array of real .* of type Training"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, c.key, W=np.eye(3)), "W", r"shape \(d, d\) with d = 200"),
    (lambda c: heldout_error(c.other, c.data, c.teacher, c.key, W=np.eye(D)), "model", "a method `target`"),
    # measurements
    (lambda c: linear_baseline(c.plain), "data", "must have labels for the linear baseline"),
    (lambda c: linear_baseline(c.x), "data", "must be a tiedattn_jax.Data"),
    (lambda c: linear_baseline(c.data, test=c.plain), "test", "must have labels for the linear baseline"),
    (lambda c: linear_baseline(c.data, test=c.three), "test", "must be 2 tokens of float64 as data"),
    *((lambda c, v=v: linear_baseline(c.data, ridge=v), "ridge", "must be zero or positive") for v in (-1.0, NAN)),
    (lambda c: linear_baseline(c.single), "data", "must have two sentences or more"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, c.key, sentences=1), "sentences", "an integer of at least 2"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, c.key, sentences=9.5), "sentences", "an integer of at least"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, c.key, sentences=2**31), "sentences", "below 2"),
    (lambda c: heldout_error(c.model, c.data, c.teacher[:-1], c.key), "Q", r"must have shape \(d, r\)"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, W=np.eye(D)), "key", "must be given beside W"),
    (lambda c: heldout_error(c.model, Data(c.x[:, :1], c.y[:1]), c.teacher), "data", "two sent"),
    (lambda c: heldout_error(c.model, c.data, c.teacher, 0), "key", "must be one key"),
    (lambda c: heldout_error(c.model, c.nameless, c.teacher, c.key), "teacher", "must be known to label"),
    (lambda c: heldout_error(c.other, c.data, c.teacher, c.key, exact=True), "model", "a method `target`"),
    (lambda c: sentence_losses(c.other, c.data, c.x, exact=True), "model", "must have a method `student`"),
    (lambda c: run_instances(c.model, 60, 1.0, None, c.keys, batch=0), "batch", "must be an integer of at least 1"),
    (lambda c: run_instances(c.model, 60, 1.0, None, c.key), "keys", "must be typed PRNG keys of shape"),
    (lambda c: run_instances(c.model, 60, 1.0, "train", c.keys), "run", r"must take \(data, key\)"),
    (lambda c: run_instances(c.model, 60, 1.0, None, [0, 1]), "keys", "must be typed PRNG keys of shape"),
    (lambda c: run_instances(c.model, 10**7, 1e3, None, c.keys), "d", "must be smaller"),
    (lambda c: run_instances(c.model, 999, 9, None, jax.random.split(c.key, 10**6), batch=10**6), "d", "be smaller"),
    (lambda c: run_instances(c.model, 60, NAN, None, c.keys), "alpha", "must be positive"),
    (lambda c: run_instances(c.other, 60, 1.0, None, c.keys), "model", "must have a method `with_teacher`"),
    # the counting task
    (lambda c: task.sample(c.key, 100, length=1), "length", "must be an integer of at least 2"),
    (lambda c: task.sample(c.key, 100, tokens=1), "tokens", "must be an integer of at least 2"),
    (lambda c: task.sample(c.key, 1), "n", "must be an integer of at least 2, got n=1"),
    (lambda c: task.sample(c.key, 10**13), "n", "must be smaller"),
    (lambda c: task.sample(0, 100), "key", "must be one key"),
    (lambda c: task.sample(c.key, 100, train_share=1.0), "train_share", "must be between 0 and 1"),
    (lambda c: task.sample(c.key, 100, train_share=NAN), "train_share", "must be between 0 and 1"),
    (lambda c: task.sample(c.key, 5, train_share=0.01), "train_share", "must be such that both parts"),
    (lambda c: task.Data(np.zeros(3, int), np.zeros((2, 3), int), 3), "train", r"must be of shape \(n, L\)"),
    (lambda c: task.Data(np.zeros((3, 3), int), np.zeros((3, 2), int), 3), "test", r"must be of shape \(n, L\)"),
    (lambda c: task.Data(np.full((3, 3), 3), np.zeros((2, 3), int), 3), "train", "must be tokens between 0 and 2"),
    (lambda c: task.Data(np.zeros((3, 3)), np.zeros((2, 3), int), 3), "train", "must be tokens between 0 and 2"),
    (lambda c: task.Transformer(c.key, width=7), "width", "must be an even integer of at least 2, got width=7"),
    (lambda c: task.Transformer(c.key, width=-2), "width", "must be an even integer of at least 2"),
    (lambda c: task.Transformer(c.key, hidden=0), "hidden", "must be an integer of at least 1"),
    (lambda c: task.mask(c.w, "lexical"), "mechanism", "must be one of semantic, positional, free"),
    (lambda c: task.train(c.keys, c.words, "lexical"), "mechanism", "must be one of semantic, positional, free"),
    (lambda c: task.train(c.keys, c.words, ["free"] * 3), "mechanism", "must be one name, or one for each of the 2"),
    (lambda c: task.train(c.key, c.words), "keys", "must be typed PRNG keys of shape"),
    (lambda c: task.train(0, c.words), "keys", "must be typed PRNG keys of shape"),
    (lambda c: task.train(c.keys, c.data), "data", "must be Data of `sample`"),
    (lambda c: task.train(c.keys, c.words, epochs=0), "epochs", "must be an integer of at least 1"),
    (lambda c: task.train(c.keys, c.words, epochs=1.5), "epochs", "must be an integer of at least 1"),
    (lambda c: task.train(c.keys, c.words, batch=0), "batch", "must be an integer of at least 1"),
    *((lambda c, v=v: task.train(c.keys, c.words, rate=v), "rate", "must be positive and finite") for v in (-1.0, NAN)),
    (lambda c: task.train(c.keys, c.words, rate=[1.0, 2.0]), "rate", "must be one number"),
    (lambda c: task.train(c.keys, c.words, width=0), "width", "must be an even integer of at least 2"),
    (lambda c: task.train(c.keys, c.words, width=10**7), "width", "must be smaller"),
    (lambda c: task.train(c.keys, c.words, hidden=-1), "hidden", "must be an integer of at least 1"),
    (lambda c: task.train(c.keys, c.words, dtype=int), "dtype", "must be float32 or float64"),
    (lambda c: task.train(c.keys, c.words, dtype="double precision"), "dtype", "must be float32 or float64"),
    (lambda c: task.Data(np.ma.array([[0, 1]], mask=True), c.words.test, 3), "train", "must be tokens between 0 and 2"),
    (lambda c: task.sample(c.key, 100, tokens=2**31), "tokens", "must be an integer of at most 2147483647"),
    (lambda c: task.train(c.keys, c.words, checkpoint=3), "checkpoint", "must be the path of a file, or None"),
    (lambda c: task.unfreeze(c.keys[:1], c.frozen, c.words), "keys", "must be one for each of the 2 runs"),
    (lambda c: task.unfreeze(c.keys, None, c.words), "frozen", "must be a Training of `train`"),
    (lambda c: task.unfreeze(c.keys, c.frozen, c.words, noise=-1.0), "noise", "must be zero or positive"),
    (lambda c: task.unfreeze(c.keys, c.frozen, c.words, noise=NAN), "noise", "must be zero or positive"),
    (lambda c: task.unfreeze(c.keys, c.frozen, task.Data(c.words.train, c.words.test, 4)), "data", "out of 3 tokens"),
    (lambda c: task.compare(c.frozen, task.Training(c.w, c.w, c.w, None, np.zeros(1))), "free", "must be what became"),
    (lambda c: task.attention(c.w, [0] * 9), "x", "must be of a shape that ends with L = 3"),
    (lambda c: task.attention(c.w, [0, 1, 3]), "x", "must be tokens between 0 and 2"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("row", ROWS, ids=[f"{argument}-{k}" for k, (_, argument, _) in enumerate(ROWS)])
def test_bad_input(case, row, monkeypatch):
    def fail_late(*args, **options):
        raise AssertionError("bad input was met while a program was compiled")

    for module in (message_passing, training, counting_training):
        monkeypatch.setattr(module, "_run", fail_late)
    monkeypatch.setattr(evaluation, "_heldout", fail_late)
    monkeypatch.setattr(sampling, "_draw", fail_late)
    call, argument, message = row
    with pytest.raises(InputError, match=message) as raised:
        call(case)
    assert raised.value.argument == argument and str(raised.value).startswith(f"{argument} must")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
