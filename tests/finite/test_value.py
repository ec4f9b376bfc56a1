"""Training with a value matrix: its risk against raw arrays, its minimum against closed-form ridge regression."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.errors import InputError
from tiedattn_jax.base.results import Status
from tiedattn_jax.finite.evaluation import best_value, heldout_error, value_risk
from tiedattn_jax.finite.instances import run_instances
from tiedattn_jax.finite.sampling import sample_data
from tiedattn_jax.finite.training import risk, train

pytestmark = pytest.mark.usefixtures("fast_compilation")
D, KEYS = 40, jax.random.split(jax.random.key(0), 2)


@pytest.fixture(scope="module")
def data(model):
    return sample_data(model, D, 1.5, jax.random.key(0), normalise=True)


@pytest.fixture(scope="module")
def trained(model, data):
    return train(model, data, "semantic", value=0.05)


def matrices(seed=1):
    """Weights and a value matrix away from any minimum."""
    rng = np.random.default_rng(seed)
    return 0.7 * rng.standard_normal((D, 1)), np.eye(D) + 0.1 * rng.standard_normal((D, D))


@eqx.filter_jit
def raw_risk(model, data, labels, Q, W, ridge):
    """The risk from raw arrays, sentence by sentence."""

    def sentence_loss(x, label):
        inputs = x + data.encodings
        return jnp.sum((label - model.student(inputs @ Q / D**0.5) @ inputs @ W) ** 2) / (2 * D)

    penalty = 0.5 * model.lam * jnp.sum(Q**2) + 0.5 * ridge * jnp.sum((W - jnp.eye(D)) ** 2)
    return jnp.sum(jax.vmap(sentence_loss)(data.inputs(), labels)) + penalty


def test_risk_and_gradients_equal_those_of_the_raw_arrays(model, data):
    labels = data.raw_labels(model) + 0.1  # not the model's own labels
    functions = (jax.jit(jax.value_and_grad(f, (3, 4))) for f in (value_risk, raw_risk))
    pairs = [function(model, data, labels, *matrices(), 0.3) for function in functions]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), *pairs)


def test_gradients_against_finite_differences(model, data):
    labels, point, direction = data.raw_labels(model), matrices(), matrices(2)
    gradients = jax.jit(jax.grad(value_risk, (3, 4)))(model, data, labels, *point, 0.3)
    slope = sum(np.vdot(g, u) for g, u in zip(gradients, direction, strict=True))
    forward, backward = (
        jax.jit(value_risk)(model, data, labels, *(a + step * u for a, u in zip(point, direction, strict=True)), 0.3)
        for step in (1e-5, -1e-5)
    )
    np.testing.assert_allclose((forward - backward) / 2e-5, slope, rtol=1e-8)


def test_at_the_identity_it_is_the_exact_risk_of_the_layer_without(model, data):
    Q, labels = matrices()[0], data.raw_labels(model)
    value, gradient = jax.jit(jax.value_and_grad(lambda Q: value_risk(model, data, labels, Q, jnp.eye(D), 0.3)))(Q)
    value_without, gradient_without = jax.jit(jax.value_and_grad(lambda Q: risk(model, data, Q, exact=True)))(Q)
    np.testing.assert_allclose(value, value_without, rtol=1e-12)
    np.testing.assert_allclose(gradient, gradient_without, atol=1e-12)


def test_the_minimum_is_a_critical_point_of_the_raw_risk(model, data, trained):
    assert bool(trained.ok) and float(trained.gradient_norm) <= 1e-10
    labels = data.raw_labels(model)
    value, gradients = jax.jit(jax.value_and_grad(raw_risk, (3, 4)))(model, data, labels, trained.Q, trained.W, 0.05)
    assert max(np.max(np.abs(g)) for g in gradients) < 2e-10
    np.testing.assert_allclose(trained.train_loss, value / D, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(trained.losses)[trained.iterations], trained.train_loss, rtol=0)
    np.testing.assert_allclose(trained.overlaps.m, data.encodings @ trained.Q / D**0.5, atol=1e-14)


def test_the_value_matrix_is_a_ridge_regression(model, data, trained):
    """The trained value matrix is the ridge regression at the weights Q, in closed form."""
    inputs, labels = np.asarray(data.inputs() + data.encodings), np.asarray(data.raw_labels(model))
    S = np.asarray(jax.jit(jax.vmap(model.student))(inputs @ np.asarray(trained.Q) / D**0.5))
    mixed, labels = (np.reshape(a, (-1, D)) / D**0.5 for a in (S @ inputs, labels))
    gram, cross = (mixed.T @ b + 0.05 * np.eye(D) for b in (mixed, labels))
    np.testing.assert_allclose(trained.W, np.linalg.solve(gram, cross), atol=2e-9)
    assert trained.shift == pytest.approx(np.linalg.norm(trained.W - np.eye(D)) / D**0.5) and trained.shift > 0.03


@pytest.mark.parametrize(("alpha", "ridge"), [(1.5, 0.3), (1.5, 0.0), (0.25, 0.3)])
def test_the_best_value_matrix_of_any_weights(model, alpha, ridge):
    """The risk is flat at the best value matrix of any weights, with more rows than dimensions and with fewer."""
    data = sample_data(model, D, alpha, jax.random.key(0))
    labels, Q = data.raw_labels(model) + 0.1, matrices()[0]
    W = jax.jit(best_value)(model, data, labels, Q, ridge)
    gradient = jax.jit(jax.grad(raw_risk, 4))(model, data, labels, Q, W, ridge)
    assert float(jnp.max(jnp.abs(gradient))) < 1e-11 < 1e-4 * float(jnp.max(jnp.abs(W - jnp.eye(D))))


def test_l_bfgs_has_the_value_matrix_at_its_best_after_any_step(model, data):
    end = train(model, data, value=0.05, steps=2)
    best = jax.jit(best_value)(model, data, data.raw_labels(model), end.Q, 0.05)
    np.testing.assert_allclose(end.W, best, atol=1e-12)


@pytest.mark.parametrize("times", [1, 2])
def test_without_a_ridge_the_best_value_matrix_is_the_one_nearest_to_the_identity(model, times):
    """It is given by the pseudo-inverse: rows are fewer than dimensions, every sentence occurs `times` times."""
    data = sample_data(model, D, 0.2, jax.random.key(0))
    x = jnp.tile(data.inputs(), (times, 1, 1))
    data = ta.Data.from_sentences(x, teacher=data.teacher, encodings=data.encodings)
    labels, Q = data.raw_labels(model) + 0.1, D**0.5 * np.asarray(data.encodings)[:1].T  # tokens attend to themselves
    W = jax.jit(best_value)(model, data, labels, Q, 0.0)
    inputs = np.asarray(data.inputs() + data.encodings)
    S = np.asarray(jax.jit(jax.vmap(model.student))(inputs @ Q / D**0.5))
    mixed, y = (np.reshape(a, (-1, D)) for a in (S @ inputs, np.asarray(labels)))
    assert len(mixed) < D
    np.testing.assert_allclose(W, np.eye(D) + np.linalg.pinv(mixed, rcond=1e-10) @ (y - mixed), atol=1e-11)


def test_l_bfgs_ends_in_the_minimum_that_gradient_descent_finds(model, data, trained):
    descended = train(model, data, "semantic", value=0.05, optimizer="gd", rate=0.4, steps=20_000, tol=1e-7)
    assert bool(descended.ok)
    np.testing.assert_allclose(trained.W, descended.W, atol=1e-5)
    np.testing.assert_allclose(trained.Q, descended.Q, atol=1e-4)


def test_a_strong_ridge_holds_the_layer_without(model, data):
    """With a strong ridge on W, weights differ from those of the layer without W by the inverse of the ridge."""
    plain = train(model, data, "semantic", optimizer="lbfgs", exact=True)
    gaps, shifts = [], []
    for ridge in (100.0, 1000.0):
        trained = train(model, data, plain.Q, value=ridge, tol=1e-9)
        assert bool(trained.ok)
        gaps.append(float(jnp.max(jnp.abs(trained.Q - plain.Q))))
        shifts.append(float(trained.shift))
    np.testing.assert_allclose([gaps[0] / gaps[1], shifts[0] / shifts[1]], 10, rtol=0.05)


def test_the_ridge_is_that_of_the_value_matrix(model, data):
    strong, weak = (train(model, data, steps=5, value=ridge) for ridge in (model.lam, 0.05))
    assert float(jnp.max(jnp.abs(weak.W - strong.W))) > 1e-3
    plain = train(model, data, steps=1)
    assert plain.W is None and plain.shift is None and "shift" not in plain.to_dict()


def test_gradient_descent_by_hand(model, data):
    labels = data.raw_labels(model) + 0.1
    weights, gradient = (np.asarray(data.teacher), np.eye(D)), jax.jit(jax.grad(raw_risk, (3, 4)))
    for _ in range(3):
        gradients = gradient(model, data, labels, *weights, 0.3)
        weights = [a - 0.15 * np.asarray(g) for a, g in zip(weights, gradients, strict=True)]
    end = train(model, data, value=0.3, labels=labels, optimizer="gd", steps=3)
    assert int(end.iterations) == 3 and int(end.status) == Status.max_steps
    np.testing.assert_allclose(end.Q, weights[0], atol=1e-13)
    np.testing.assert_allclose(end.W, weights[1], atol=1e-13)


def test_held_out_error_against_sentences_at_hand(model, data):
    Q, W = matrices()
    measured = heldout_error(model, data, Q, jax.random.key(3), sentences=4000, W=W)
    key, x = jax.random.key(4), 0.5 * np.random.default_rng(0).standard_normal((4000, 2, D))
    fresh = ta.Data.from_sentences(x, teacher=data.teacher, encodings=data.encodings)
    direct = raw_risk(model, fresh, fresh.raw_labels(model), Q, W, 0.0) - 0.5 * model.lam * jnp.sum(Q**2)
    assert abs(float(measured.value - direct / 4000)) < 4 * 2**0.5 * float(measured.stderr)
    plain, identity = (heldout_error(model, data, Q, key, sentences=500, exact=True, W=W) for W in (None, jnp.eye(D)))
    np.testing.assert_allclose(identity.value, plain.value, rtol=1e-12)


@pytest.mark.long
def test_instances(model):
    """The test error of instances is that with their value matrix, under vmap and one by one."""

    def run(data, key):
        return train(model, data, "semantic", value=model.lam, steps=20)

    options = {"theory": False, "sentences": 300}
    separate, batched = (run_instances(model, D, 1.0, run, KEYS, batch=batch, **options) for batch in (1, 2))
    np.testing.assert_allclose(*(result.values("gen_error") for result in (separate, batched)), rtol=1e-6)
    key_data, _, key_test = jax.random.split(KEYS[0], 3)
    data = sample_data(model, D, 1.0, key_data)
    end = run(data, None)
    test = heldout_error(model, data, end.Q, key_test, sentences=300, W=end.W)
    np.testing.assert_allclose(separate.values("gen_error")[0], test.value, rtol=1e-9)


def test_there_is_no_theory(model, nodes):
    with pytest.raises(InputError, match="theory must be False for a value matrix, of which there is none"):
        run_instances(model, D, 1.0, lambda data, key: train(model, data, value=model.lam, steps=1), KEYS, nodes=nodes)


def test_it_prints_itself(trained):
    assert repr(trained).startswith("Training(Q of shape (40, 1) after ")
    assert trained.to_dict()["shift"] == pytest.approx(float(trained.shift))
    assert "distance of the value matrix from the identity" in str(trained)
