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
from tiedattn_jax.finite.data import Data
from tiedattn_jax.finite.on_demand import Dice
from tiedattn_jax.finite.training import risk_and_gradient

sample_on_demand = partial(ta.sample_data, stored=False)
product, transposed_product = jax.jit(Dice.product), jax.jit(Dice.transposed_product)


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
        for vectors in np.swapaxes(np.asarray(side.basis), 0, 1):
            basis = vectors.reshape(-1, size)[:size]
            np.testing.assert_allclose(basis @ basis.T, np.eye(size), atol=1e-12)


@pytest.mark.full
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


@pytest.mark.full
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
    stored, drawn = (sample(model, 40, 1.5, jax.random.key(3)) for sample in (ta.sample_data, sample_on_demand))
    np.testing.assert_allclose(drawn.teacher, stored.teacher, atol=1e-14)
    np.testing.assert_allclose(drawn.encodings, stored.encodings, atol=1e-14)
    np.testing.assert_allclose(drawn.rho, stored.rho, rtol=1e-13)
    np.testing.assert_allclose(ta.finite.realised(model, drawn).rho, drawn.rho, rtol=1e-12)
    assert drawn.shape == stored.shape and drawn.alpha == 1.5 and "drawn on demand" in str(drawn)
    error = ta.finite.heldout_error(model, drawn, drawn.teacher, jax.random.key(1))
    assert error.value == ta.finite.heldout_error(model, stored, stored.teacher, jax.random.key(1)).value


@pytest.mark.parametrize("kind", ["two atoms", pytest.param("isotropic", marks=pytest.mark.full)])
def test_products_on_both_sides_are_of_the_same_inputs(models, kind):
    """For fields X Q and the transpose X^T g of two columns each, <g, X Q> = <X^T g, Q>.

    The variance of 2,400 fields of every token of the teacher is that of its law, up to chance of 3 %.
    """
    draws = [sample_on_demand(models[kind], 40, 1.5, key) for key in jax.random.split(jax.random.key(1), 40)]
    squares = np.mean([np.mean(np.asarray(data.y) ** 2, 0)[:, 0] for data in draws], 0)
    np.testing.assert_allclose(squares, np.mean([np.asarray(data.rho)[:, 0, 0] for data in draws], 0), rtol=0.13)
    data, rng = draws[0], np.random.default_rng(0)
    Q, g = rng.standard_normal((40, 2)), rng.standard_normal((2, 2, 60))

    @jax.jit
    def products(data, Q, g):
        fields, memory = data.student_fields(Q, data.memory(10, 1))
        back, memory = data.back_project(g, memory)
        of_teacher, memory = data.student_fields(data.teacher, memory)
        return fields, back, of_teacher, data.mean_squares()

    fields, back, of_teacher, squares = jax.tree.map(np.asarray, products(data, Q, g))
    encodings, teacher, y = map(np.asarray, (data.encodings, data.teacher, data.y))
    np.testing.assert_allclose(np.einsum("lan,lbn->ab", g, fields), back.T @ Q, rtol=1e-10)
    shift = encodings @ teacher / 40**0.5
    np.testing.assert_allclose(of_teacher - shift[:, :, None], np.transpose(y, (1, 2, 0)), atol=1e-12)
    np.testing.assert_allclose(squares, [np.mean(data.gamma), np.mean(y**2)], rtol=1e-12)


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


@pytest.mark.full
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


@pytest.mark.full
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
error = ta.finite.heldout_error(model, stored, stored.teacher, jax.random.key(1)).value
arrays = {"x": stored.x, "y": drawn.y, "w": found.Q, "V": found.overlaps.V, "Q": trained.Q, "loss": trained.train_loss}
arrays |= {"error": error, "drawn Q": short.Q, "drawn losses": short.losses, "drawn w": passed.Q}
"""


@pytest.mark.full
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
