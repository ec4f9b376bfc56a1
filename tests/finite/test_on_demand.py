"""Sentences drawn on demand: the products are those of one Gaussian matrix, and runs have the law of stored ones."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base import errors
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.on_demand import Dice
from tiedattn_jax.finite.training import risk_and_gradient

pytestmark = pytest.mark.usefixtures("fast_compilation")

sample_on_demand = partial(ta.sample_data, stored=False)
product, transposed_product = jax.jit(Dice.product), jax.jit(Dice.transposed_product)


# The matrices


@pytest.mark.parametrize("shared", [True, False])
def test_products_are_those_of_one_matrix(shared):
    """All pairs of products agree, vectors that are nearly alike or repeated included; directions are orthonormal."""
    L, n, d, rng = 2, 50, 40, np.random.default_rng(0)
    dice, S = Dice.new(L, n, d, shared, jax.random.key(1), jnp.float64).with_room(60), 1 if shared else L
    ws, us, fields, backs = [], [], [], []
    for k in range(60):
        w, u = rng.standard_normal((S, d)), rng.standard_normal((L, n))
        if 20 <= k < 30:
            w, u = ws[-1] + 1e-6 * w, us[-1] + 1e-6 * u
        if k in (12, 35):
            w, u = ws[3], us[4]
        z, dice = product(dice, w)
        h, dice = transposed_product(dice, u)
        for values, value in ((ws, w), (us, u), (fields, z), (backs, h)):
            values.append(np.asarray(value))
    inner = np.einsum("kln,mln->lkm", us, fields)
    np.testing.assert_allclose(np.einsum("kld,mld->lkm", backs, np.broadcast_to(ws, (60, L, d))), inner, atol=1e-11)
    for k in (12, 35):
        np.testing.assert_allclose(fields[k], fields[3], atol=1e-12)
        np.testing.assert_allclose(backs[k], backs[4], atol=1e-12)
    assert int(dice.right.count) == d and int(dice.left.count) == n  # then the matrices are known
    for side, size in ((dice.right, d), (dice.left, n)):
        for vectors in np.swapaxes(side.basis, 0, 1):
            basis = vectors.reshape(-1, size)[:size]
            np.testing.assert_allclose(basis @ basis.T, np.eye(size), atol=1e-12)


def test_matrices_are_gaussian_whatever_is_asked():
    """The entries are independent standard normals, also if each vector depends on the products before it."""
    n, d, runs = 3, 2, 20_000

    def matrix(key):
        dice = Dice.new(1, n, d, True, key, jnp.float64).with_room(8)
        z, dice = dice.product(jnp.array([[1.0, 2.0]]))
        h, dice = dice.transposed_product(jnp.tanh(z) + 0.2)
        z, dice = dice.product(h + jnp.array([[0.5, 0.0]]))
        _, dice = dice.transposed_product(z**2)
        rows = []
        for w in jnp.eye(d):
            z, dice = dice.product(w[None])
            rows.append(z[0])
        return jnp.concatenate(rows)

    entries = np.asarray(jax.jit(jax.vmap(matrix))(jax.random.split(jax.random.key(0), runs)))
    assert np.max(np.abs(np.mean(entries, 0))) < 4 / runs**0.5
    assert np.max(np.abs(np.cov(entries.T) - np.eye(n * d))) < 4 * (2 / runs) ** 0.5
    fourth = np.mean(entries[:, :, None] ** 2 * entries[:, None] ** 2, 0)
    assert np.max(np.abs(fourth - 1 - 2 * np.eye(n * d))) < 4 * (96 / runs) ** 0.5


# Runs


def revealed(data, memory):
    """Stored data with the sentences of the memory, all of which it is asked for."""
    x, _ = data.student_fields(jnp.eye(data.shape[2]), memory)
    return Data(jnp.swapaxes(x, 1, 2), data.y, data.teacher, data.encodings, data.gamma, noise=data.noise, means=None)


@pytest.fixture(scope="module")
def models(model, two_atoms):
    return {
        "isotropic": model,
        "two atoms": two_atoms,
        "rank two": ta.DotProduct(rank=2, teacher=np.eye(2), mixing=np.full((3, 3), 1 / 3), encodings=[[1], [0], [-1]]),
        "penalty": ta.DotProduct(penalty=ta.L1(0.002)),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["isotropic", "two atoms", "rank two", "penalty"])
def test_training_equals_training_on_the_sentences_that_were_drawn(models, name):
    """The sentences are drawn in training and then revealed: stored, they give the same products and the same run."""
    model, d, steps = models[name], 40, 12
    data = sample_on_demand(model, d, 1.5, jax.random.key(0))
    Q = 0.8 * jax.random.normal(jax.random.key(1), (d, model.shape[1]))
    run = ta.train(model, data, Q, steps=steps, rate=1.0)
    memory, weights = data.memory(steps + 10 * d, steps), Q
    gradient_of = jax.jit(lambda Q, memory: risk_and_gradient(model, data, False, Q, memory))
    for k in range(steps):
        value, gradient, memory = gradient_of(weights, memory)
        np.testing.assert_allclose(run.losses[k] * d, value + model.penalty_of(weights), rtol=1e-11)
        weights = weights - gradient
        if model.penalty is not None:
            weights = model.penalty.prox(weights, jnp.ones_like(weights))
    stored = revealed(data, memory)
    np.testing.assert_allclose(ta.train(model, stored, Q, steps=steps, rate=1.0).Q, run.Q, atol=1e-10)
    teacher_fields = jnp.einsum("lnd,dt->nlt", stored.x - stored.encodings[:, None] / d**0.5, data.teacher)
    np.testing.assert_allclose(teacher_fields, data.y, atol=1e-12)
    for got, expected in zip(jax.tree.leaves(run.overlaps), jax.tree.leaves(stored.overlaps(run.Q)), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-14)
    assert type(run) is ta.results.Training and run.losses.shape == (steps + 1,)
    assert np.all(np.isfinite(run.gradient_norms))


def test_the_same_key_has_the_teacher_of_stored_sentences(model):
    stored, drawn = (sample(model, 50, 2.0, jax.random.key(3)) for sample in (ta.sample_data, sample_on_demand))
    np.testing.assert_allclose(drawn.teacher, stored.teacher, atol=1e-14)
    np.testing.assert_allclose(drawn.encodings, stored.encodings, atol=1e-14)
    np.testing.assert_allclose(drawn.rho, stored.rho, rtol=1e-13)
    np.testing.assert_allclose(ta.realised(model, drawn).rho, drawn.rho, rtol=1e-12)
    assert drawn.shape == stored.shape and drawn.alpha == 2.0 and "drawn on demand" in str(drawn)
    normalised = sample_on_demand(model, 50, 2.0, jax.random.key(3), normalise=True)
    np.testing.assert_allclose(normalised.teacher_gram, 1.0, rtol=1e-12)
    error = ta.heldout_error(model, drawn, drawn.teacher, jax.random.key(1))
    assert error.value == ta.heldout_error(model, stored, stored.teacher, jax.random.key(1)).value


@pytest.mark.long
def test_a_run_with_more_steps_repeats_the_steps(model):
    data = sample_on_demand(model, 60, 2.0, jax.random.key(0))
    short, long = (ta.train(model, data, "random", steps=k, rate=1.0, key=jax.random.key(2)) for k in (10, 50))
    np.testing.assert_allclose(short.losses, long.losses[:11], rtol=1e-10)
    other = ta.train(model, sample_on_demand(model, 60, 2.0, jax.random.key(1)), "random", steps=10, rate=1.0)
    assert abs(float(other.losses[0] / short.losses[0]) - 1) > 1e-3


def samples(quantities, sample, d, alpha, model, count, seed):
    """Quantities of runs on independent samples: (count, quantities)."""
    keys = jax.random.split(jax.random.key(seed), count)
    instances = [sample(model, d, alpha, key, normalise=True) for key in keys]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *instances)
    return np.asarray(jax.jit(jax.vmap(quantities))(batch, jax.random.split(keys[0], count)))


def assert_same_mean(a, b, bars=3.0):
    bar = np.sqrt(np.var(a, 0, ddof=1) / len(a) + np.var(b, 0, ddof=1) / len(b))
    assert np.all(bar > 0) and np.all(np.abs(np.mean(a, 0) - np.mean(b, 0)) < bars * bar)


def start_with(data, R, theta, m, key):
    """Weights (d, 1) of mean square R that overlap with the teacher by theta and with the first encoding by m."""
    d = data.shape[2]
    directions = jnp.stack([data.teacher[:, 0] / d**0.5, data.encodings[0]])
    rest = jax.random.normal(key, (d,))
    rest = rest - directions.T @ (directions @ rest)
    rest = rest / jnp.linalg.norm(rest)
    return d**0.5 * (jnp.array([theta, m]) @ directions + (R - theta**2 - m**2) ** 0.5 * rest)[:, None]


def descent(model, steps, times):
    """Losses at some steps of gradient descent, and R, theta and m at the end."""

    def quantities(data, key):
        run = ta.train(model, data, start_with(data, 0.5, 0.2, 0.2, key), steps=steps, rate=2.0)
        x = run.overlaps
        return jnp.stack([*run.losses[jnp.array(times)], 4 * x.q[0, 0, 0], 4 * x.theta[0, 0, 0], x.m[0, 0]])

    return quantities


@pytest.mark.long
def test_gradient_descent_has_the_law_of_stored_sentences(model):
    runs = [
        samples(descent(model, 60, [1, 20, 60]), sample, 100, 2.0, model, 32, seed)
        for seed, sample in enumerate((ta.sample_data, sample_on_demand))
    ]
    assert_same_mean(*runs)


@pytest.mark.slow
def test_gradient_descent_at_larger_dimension(model):
    """At times 20, 60 and 120 losses agree with stored sentences, and with independent programs on both."""
    stored, drawn = (
        samples(descent(model, 60, [10, 30, 60]), sample, 400, 2.0, model, 16, seed)
        for seed, sample in enumerate((ta.sample_data, sample_on_demand))
    )
    assert_same_mean(stored, drawn)
    bars = np.std(drawn[:, :3], 0, ddof=1) / 4
    for reference, bar in (
        ([0.00726, 0.00563, 0.00482], [7e-5, 6e-5, 8e-5]),
        ([0.00734, 0.00571, 0.00481], [6e-5, 8e-5, 11e-5]),
    ):
        assert np.all(np.abs(np.mean(drawn[:, :3], 0) - reference) < 3 * np.hypot(bars, bar))


@pytest.mark.long
@pytest.mark.parametrize("name", ["two atoms", "rank two"])
def test_adam_has_the_law_of_stored_sentences(models, name):
    model = models[name]

    def quantities(data, key):
        run = ta.train(model, data, "semantic", optimizer="adam", steps=30, rate=0.05, key=key)
        x = run.overlaps
        squares = [jnp.sum(a.reshape(model.shape[0], -1) ** 2, 1) for a in (x.q, x.theta)]
        return jnp.concatenate([run.losses[jnp.array([0, 10, 30])], *squares])

    runs = [samples(quantities, f, 60, 2.0, model, 32, k) for k, f in enumerate((ta.sample_data, sample_on_demand))]
    assert_same_mean(*runs)


@pytest.mark.long
def test_message_passing_has_the_law_of_stored_sentences(model):
    def runs(sample, seed):
        rows = []
        for key in jax.random.split(jax.random.key(seed), 12):
            run = ta.gamp(model, sample(model, 150, 2.0, key, normalise=True), "semantic", steps=200, tol=1e-8)
            assert type(run) is ta.results.GAMP and run.ok and float(run.gradient_norm) < 1e-7
            x, k = run.history, int(run.iterations)
            ends = [x.q[k, 0, 0, 0], x.V[k, 0, 0, 0], x.theta[k, 0, 0, 0], run.train_loss]
            early = [a[j, 0, 0, 0] for j in (1, 2, 5) for a in (x.q, x.V, x.theta)]
            rows.append(np.array([*ends, *early]))
        return np.stack(rows)

    assert_same_mean(runs(ta.sample_data, 0), runs(sample_on_demand, 1))


SHARDED = """
import jax, numpy as np, tiedattn_jax as ta
jax.config.update("jax_enable_x64", True)
model = ta.DotProduct()
stored, drawn = (ta.sample_data(model, 60, 2.0, jax.random.key(0), stored=s) for s in (True, False))
memory = jax.jit(lambda: drawn.memory(10, 10))()
assert len(stored.x.sharding.device_set) == 8 and stored.x.addressable_shards[0].data.shape == (2, 15, 60)
for images in (drawn.dice.right.images, memory.right.images, memory.left.basis):
    assert images.addressable_shards[0].data.shape[3] == 15, images.sharding
"""
RUNS = """
passed, found = ta.gamp(model, drawn, "semantic", steps=5), ta.gamp(model, stored, "semantic", tol=1e-10)
short = ta.train(model, drawn, "positional", steps=30, rate=1.0)
trained = ta.train(model, stored, "positional", optimizer="lbfgs", steps=2000)
error = ta.heldout_error(model, stored, stored.teacher, jax.random.key(1)).value
arrays = {"x": stored.x, "y": drawn.y, "w": found.Q, "V": found.overlaps.V, "Q": trained.Q, "loss": trained.train_loss}
arrays |= {"error": error, "drawn Q": short.Q, "drawn losses": short.losses, "drawn w": passed.Q}
"""


@pytest.mark.long
def test_eight_devices_equal_one(model, tmp_path):
    """A program from the store may round differently."""
    out = tmp_path / "eight.npz"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    flags = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or ""}
    program = SHARDED + RUNS + f"np.savez(r'{out}', **arrays)"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **flags, **cache})
    stored, drawn = (ta.sample_data(model, 60, 2.0, jax.random.key(0), stored=s) for s in (True, False))
    names = {"ta": ta, "jax": jax, "model": model, "stored": stored, "drawn": drawn}
    exec(RUNS, names)
    bounds = {"x": (0, 1e-15), "y": (0, 1e-14), "V": (1e-8, 0), "loss": (1e-12, 0), "error": (1e-12, 0)}
    bounds["drawn losses"] = 1e-9, 0
    for name, array in np.load(out).items():
        rtol, atol = bounds.get(name, (0, 1e-8))
        np.testing.assert_allclose(array, names["arrays"][name], rtol=rtol, atol=atol, err_msg=name)


# Bad input


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m, s: ta.train(m, s, optimizer="lbfgs"), "data must be stored for L-BFGS"),
        (lambda m, s: ta.train(m, s, exact=True), "data must be stored for exact=True"),
        (lambda m, s: ta.train(m, s, "spectral"), "data must be stored for a spectral start"),
        (lambda m, s: ta.gamp(m, s, ta.gamp(m, s, steps=1)), "data must be stored to go on from an earlier run"),
        (lambda m, s: ta.risk(m, s, s.teacher), "data must be stored for the risk"),
        (lambda m, s: ta.spectral_direction(m, s), "data must be stored for a spectral start"),
        (lambda m, s: ta.posterior_mean(m, s), "data must be stored for `posterior_mean`"),
        (lambda m, s: ta.train(m, s, value=m.lam), "data must be stored for a value matrix"),
        (lambda m, s: s.raw_labels(m), "data must be stored for exact labels"),
        (lambda m, s: ta.linear_baseline(s), "data must be a tiedattn_jax.Data"),
        (lambda m, s: ta.train(ta.DotProduct(sigma=5.0), s), "data must have inputs of the model's variance"),
        (lambda m, s: sample_on_demand(m, 2, 1.0, jax.random.key(0)), "d must be an integer of at least 4"),
        (lambda m, s: sample_on_demand(m, 50, -1.0, jax.random.key(0)), "alpha must be positive"),
        (lambda m, s: sample_on_demand(m, 50, 1.0, 0), "key must be one key"),
    ],
)
def test_bad_input(model, unchecked, call, message):
    with pytest.raises(InputError, match=message):
        call(model, sample_on_demand(model, 40, 1.0, jax.random.key(0)))


def test_steps_that_do_not_fit_into_memory(model, monkeypatch):
    """A step takes 2 L n + (L + 1) d numbers; what stored sentences of this dimension would take does not matter."""
    monkeypatch.setattr(errors, "_memory", lambda: 2.0**20)
    data = sample_on_demand(model, 200, 1.0, jax.random.key(0))
    for run in (ta.train, ta.gamp):
        with pytest.raises(InputError, match="steps must be smaller, got steps=100: the products of so many steps"):
            run(model, data, steps=100)
    assert int(ta.train(model, data, steps=40).iterations) == 40


def test_token_classes_are_refused():
    law = ta.SpectralLaw.of_classes([0.25, 0.36], {(0, 0): 0.5, (0, 1): 0.5}, encodings=[[1.0], [-1.0]])
    with pytest.raises(InputError, match="model must have no classes of tokens"):
        sample_on_demand(ta.DotProduct(spectrum=law), 50, 1.0, jax.random.key(0))


def test_student_fields_contain_those_of_the_encodings():
    """They are p_l^T Q / sqrt(d) plus Gaussian fields of the tokens, which are small here."""
    data = sample_on_demand(ta.DotProduct(sigma=1e-4), 40, 0.5, jax.random.key(3))
    fields, _ = data.student_fields(data.encodings[:1].T, data.memory(1, 1))
    expected = data.encodings @ data.encodings[:1].T / 40**0.5
    assert np.min(np.abs(expected)) > 0.1
    np.testing.assert_allclose(fields, np.broadcast_to(expected[:, :, None], fields.shape), rtol=1e-3)
