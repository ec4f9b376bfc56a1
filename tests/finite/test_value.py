"""Training with a value matrix: its risk against raw arrays, its minimum against closed-form ridge regression."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.finite.evaluation import best_value, heldout_error, value_risk
from tiedattn_jax.finite.instances import run_instances
from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.finite.training import risk, train

D = 40
EYE, RIDGE = np.eye(D), np.array(0.3)
best = eqx.filter_jit(best_value)
risk_and_gradients = eqx.filter_jit(jax.value_and_grad(value_risk, (3, 4)))


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, D, 1.5, jax.random.key(0))


@pytest.fixture(scope="module")
def labels(model, data):
    return np.asarray(data.raw_labels(model))


@pytest.fixture(scope="module")
def trained(model, data):
    return train(model, data, "semantic", value=0.05)


def matrices(seed=1):
    """Weights and a value matrix away from any minimum."""
    rng = np.random.default_rng(seed)
    return 0.7 * rng.standard_normal((D, 1)), EYE + 0.1 * rng.standard_normal((D, D))


def few(data, times=1):
    """Eight sentences, whose rows are fewer than dimensions, each of them `times` times."""
    x = np.tile(np.asarray(data.inputs())[:8], (times, 1, 1))
    return ta.Data.from_sentences(x, teacher=data.teacher, encodings=data.encodings, gamma=data.gamma)


def attended(model, data, Q):
    """Rows ``S (x + p)`` of all tokens."""
    x = np.asarray(data.inputs()) + np.asarray(data.encodings)
    S = np.asarray(jax.jit(jax.vmap(model.student))(x @ np.asarray(Q) / D**0.5))
    return np.reshape(S @ x, (-1, D))


@eqx.filter_jit
def raw_risk(model, data, labels, Q, W, ridge):
    """The risk from raw arrays, sentence by sentence, and its gradients."""

    def sentence_loss(Q, W, x, label):
        inputs = x + data.encodings
        return jnp.sum((label - model.student(inputs @ Q / D**0.5) @ inputs @ W) ** 2) / (2 * D)

    def total(Q, W):
        penalty = 0.5 * model.lam * jnp.sum(Q**2) + 0.5 * ridge * jnp.sum((W - jnp.eye(D)) ** 2)
        return jnp.sum(jax.vmap(sentence_loss, (None, None, 0, 0))(Q, W, data.inputs(), labels)) + penalty

    return jax.value_and_grad(total, (0, 1))(Q, W)


def test_risk_and_gradients_equal_those_of_the_raw_arrays(model, data, labels):
    """Labels are not the model's own; at the identity it is the exact risk of the layer without."""
    pairs = [function(model, data, labels + 0.1, *matrices(), RIDGE) for function in (risk_and_gradients, raw_risk)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), *pairs)
    Q = matrices()[0]
    value, (gradient, _) = risk_and_gradients(model, data, labels, Q, EYE, RIDGE)
    without = eqx.filter_jit(jax.value_and_grad(lambda Q: risk(model, data, Q, exact=True)))(Q)
    np.testing.assert_allclose(value, without[0], rtol=1e-12)
    np.testing.assert_allclose(gradient, without[1], atol=1e-12)


def test_gradients_against_finite_differences(model, data, labels):
    point, direction = matrices(), matrices(2)
    _, gradients = risk_and_gradients(model, data, labels, *point, RIDGE)
    slope = sum(np.vdot(g, u) for g, u in zip(gradients, direction, strict=True))
    shifted = ([a + h * u for a, u in zip(point, direction, strict=True)] for h in (1e-5, -1e-5))
    forward, backward = (risk_and_gradients(model, data, labels, *moved, RIDGE)[0] for moved in shifted)
    np.testing.assert_allclose((forward - backward) / 2e-5, slope, rtol=1e-8)


def test_the_minimum_is_a_critical_point_of_the_raw_risk(model, data, labels, trained):
    """Its value matrix is the ridge regression at the weights Q, in closed form."""
    assert bool(trained.ok) and float(trained.gradient_norm) <= 4e-10  # in units of the gradient it is 1e-10
    Q, W = np.asarray(trained.Q), np.asarray(trained.W)
    value, gradients = raw_risk(model, data, labels, Q, W, np.array(0.05))
    assert max(np.max(np.abs(g)) for g in gradients) < 5e-10
    np.testing.assert_allclose(trained.train_loss, value / D, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(trained.losses)[trained.iterations], trained.train_loss, rtol=0)
    np.testing.assert_allclose(trained.overlaps.m, np.asarray(data.encodings) @ Q / D**0.5, atol=1e-14)
    mixed, y = attended(model, data, Q) / D**0.5, np.reshape(labels, (-1, D)) / D**0.5
    gram, cross = (mixed.T @ b + 0.05 * EYE for b in (mixed, y))
    np.testing.assert_allclose(W, np.linalg.solve(gram, cross), atol=2e-9)
    assert trained.shift == pytest.approx(np.linalg.norm(W - EYE) / D**0.5) and trained.shift > 0.03
    assert repr(trained).startswith("Training(Q of shape (40, 1) after ")
    assert trained.to_dict()["shift"] == pytest.approx(float(trained.shift))
    assert "distance of the value matrix from the identity" in str(trained)


@pytest.mark.parametrize(("all_of_them", "ridge"), [(True, 0.3), (True, 0.0), (False, 0.3)])
def test_the_best_value_matrix_of_any_weights(model, data, labels, all_of_them, ridge):
    """The risk is flat at the best value matrix of any weights, with more rows than dimensions and with fewer."""
    ridge = np.array(ridge)
    data, labels, Q = data if all_of_them else few(data), labels[: None if all_of_them else 8] + 0.1, matrices()[0]
    W = np.asarray(best(model, data, labels, Q, ridge))
    gradient = np.asarray(raw_risk(model, data, labels, Q, W, ridge)[1][1])
    assert np.max(abs(gradient)) < 1e-11 < 1e-4 * np.max(abs(W - EYE))


@pytest.mark.parametrize("times", [1, 2])
def test_without_a_ridge_the_best_value_matrix_is_the_one_nearest_to_the_identity(model, data, labels, times):
    """It is given by the pseudo-inverse: rows are fewer than dimensions, every sentence occurs `times` times."""
    data, labels = few(data, times), np.tile(labels[:8] + 0.1, (times, 1, 1))
    Q = D**0.5 * np.asarray(data.encodings)[:1].T  # tokens attend to themselves
    W, mixed, y = best(model, data, labels, Q, np.array(0.0)), attended(model, data, Q), np.reshape(labels, (-1, D))
    assert len(mixed) < D
    np.testing.assert_allclose(W, EYE + np.linalg.pinv(mixed, rcond=1e-10) @ (y - mixed), atol=1e-11)


def test_l_bfgs_has_the_value_matrix_at_its_best_after_any_step(model, data, labels, trained):
    ends = [train(model, data, value=ridge, tol=1e-2) for ridge in (0.05, float(model.lam))]
    assert 0 < int(ends[0].iterations) < int(trained.iterations)
    np.testing.assert_allclose(ends[0].W, best(model, data, labels, ends[0].Q, np.array(0.05)), atol=1e-12)
    assert np.max(abs(np.asarray(ends[0].W) - ends[1].W)) > 1e-3  # the ridge is not that of the weights


@pytest.mark.full
def test_gradient_descent(model, data, labels, trained):
    """Its first steps are those by hand, and it ends in the minimum of L-BFGS."""
    options = {"optimizer": "gd", "steps": 20_000, "tol": 1e-7}
    end = train(model, data, "semantic", value=0.05, rate=0.4, **options)
    assert bool(end.ok)
    np.testing.assert_allclose(trained.W, end.W, atol=1e-5)
    np.testing.assert_allclose(trained.Q, end.Q, atol=1e-4)
    weights, losses = (np.asarray(data.teacher), EYE), []
    for _ in range(4):
        value, gradients = raw_risk(model, data, labels + 0.1, *weights, RIDGE)
        losses.append(float(value) / D)
        weights = [a - 0.15 * np.asarray(g) for a, g in zip(weights, gradients, strict=True)]
    by_default = train(model, data, value=0.3, labels=labels + 0.1, **options)
    np.testing.assert_allclose(by_default.losses[:4], losses, rtol=1e-12)


@pytest.mark.full
def test_a_strong_ridge_holds_the_layer_without(model, data):
    """With a strong ridge on W, weights differ from those of the layer without W by the inverse of the ridge."""
    plain = train(model, data, "semantic", exact=True)
    assert plain.W is None and plain.shift is None and "shift" not in plain.to_dict()
    runs = [train(model, data, plain.Q, value=ridge, tol=1e-9) for ridge in (100.0, 1000.0)]
    gaps, shifts = np.array([[np.max(abs(np.asarray(run.Q) - plain.Q)), run.shift] for run in runs]).T
    assert all(run.ok for run in runs)
    np.testing.assert_allclose([gaps[0] / gaps[1], shifts[0] / shifts[1]], 10, rtol=0.05)


def test_held_out_error_against_sentences_at_hand(model, data):
    Q, W = matrices()
    measured = heldout_error(model, data, Q, jax.random.key(3), sentences=4000, W=W)
    x = 0.5 * np.random.default_rng(0).standard_normal((4000, 2, D))
    fresh = ta.Data.from_sentences(x, teacher=data.teacher, encodings=data.encodings, gamma=data.gamma)
    y = np.reshape(fresh.raw_labels(model), (-1, D))
    direct = np.sum((y - attended(model, fresh, Q) @ W) ** 2) / (2 * D) / 4000
    assert abs(float(measured.value) - direct) < 4 * 2**0.5 * float(measured.stderr)
    options = {"key": jax.random.key(4), "sentences": 4000, "exact": True}
    plain, identity = (heldout_error(model, data, Q, W=W, **options) for W in (None, EYE))
    np.testing.assert_allclose(identity.value, plain.value, rtol=1e-12)


@pytest.mark.full
def test_instances(model):
    """The test error of instances is that with their value matrix."""

    def run(data, key):
        return train(model, data, "semantic", value=model.lam, steps=20)

    keys = jax.random.split(jax.random.key(0), 2)
    instances = run_instances(model, D, 1.0, run, keys, theory=False, sentences=300)
    key_data, _, key_test = jax.random.split(keys[1], 3)
    data = sample_data(model, D, 1.0, key_data)
    end = run(data, None)
    test = heldout_error(model, data, end.Q, key_test, sentences=300, W=end.W)
    np.testing.assert_allclose(instances.values("gen_error")[1], test.value, rtol=1e-9)
