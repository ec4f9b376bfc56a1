"""Labels with noise: a loss may depend on Z, Y and noise, in theory, data, message passing and training."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channels import NOISE, Noisy
from scipy import special
from simulated import assert_agrees

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import fields, whiten
from tiedattn_jax.finite.evaluation import sentence_losses
from tiedattn_jax.finite.products import student_fields
from tiedattn_jax.model.checks import check
from tiedattn_jax.theory.observables import gen_error, gen_error_in, gen_error_linear_in
from tiedattn_jax.theory.potentials import channel
from tiedattn_jax.theory.solve import branch_start

pytestmark = pytest.mark.usefixtures("fast_compilation")


class Sampled(ta.DotProduct):
    """Every token is labelled by one token, drawn from its row of the target, and the student pays cross-entropy."""

    noise = 1

    def loss(self, Z, Y, noise):
        token = jnp.sum(jnp.cumsum(self.target(Y), 1)[:, :-1] < jax.scipy.special.ndtr(noise), 1)
        return -(self.sigma**2) * jnp.sum(jax.nn.log_softmax(Z @ Z.T) * jax.nn.one_hot(token, len(Z)))


def model_of(kind, **options):
    return kind(**vars(ta.DotProduct(**options)))


@pytest.fixture(scope="module")
def noisy():
    return model_of(Noisy)


def point():
    x = branch_start(ta.DotProduct(), None)
    return dataclasses.replace(x, q=0.4 * x.q, V=0.8 * x.V, theta=0.7 * x.theta)


def test_noise_on_the_fields_of_the_teacher_is_a_teacher_of_larger_fields(noisy):
    """Noise on the teacher's fields acts as larger fields: the theory knows the teacher by its fields' law alone."""
    x, equivalent = point(), ta.DotProduct(teacher=1 + NOISE**2 / 0.25)

    def numbers(model):
        def parts(r):
            return jnp.stack([channel(model, x, r), gen_error_in(model, x, r), gen_error_linear_in(model, r)])

        return ta.Sobol(2**12, replicates=8).rule(model).each(parts)

    result, expected = numbers(noisy), numbers(equivalent)
    bar = np.hypot(result.std(0), expected.std(0)) / 7**0.5
    assert np.all(np.abs(result.mean(0) - expected.mean(0)) < 3 * bar) and np.all(bar < 2e-3 * expected.mean(0))
    assert np.all(NOISE**2 * expected.mean(0) > 30 * bar)  # the noise changes the numbers by more than their error bars


def test_fields_of_noise_are_independent_of_all(noisy):
    nodes = ta.Sobol(2**12, replicates=1).rule(noisy).replicate(0)
    assert nodes.shape == (2, 1, 2) and nodes.teacher.shape == (2, 2, 2**12)
    h, y = jax.jit(fields)(noisy, point(), nodes.student, nodes.teacher)
    np.testing.assert_array_equal(y[:, 1], nodes.teacher[:, 1])
    moments = np.cov(np.concatenate([h[:, 0], y[:, 0], y[:, 1]]))
    np.testing.assert_allclose(moments[4:], np.eye(6)[4:], atol=0.01)
    np.testing.assert_allclose(moments[2, 2], 0.25, rtol=0.01)
    np.testing.assert_allclose(jax.jit(whiten)(noisy, point(), h, y)[0], nodes.student, atol=1e-12)


def test_labels_drawn_from_a_row():
    """The sampled loss, averaged over its noise, is the cross-entropy of the target's rows."""
    model = model_of(Sampled, mixing=[[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.1, 0.2, 0.7]], encodings=np.eye(3))
    Z, Y = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 1)))
    levels = special.ndtri((np.arange(4000) + 0.5) / 4000)
    mean = np.mean(jax.jit(jax.vmap(lambda e: model.loss(Z, Y, jnp.full((3, 1), e))))(levels))
    exact = -0.25 * np.sum(eqx.filter_jit(model.target)(Y) * special.log_softmax(Z @ Z.T, 1))
    np.testing.assert_allclose(mean, exact, rtol=1e-3)
    check(model)


def test_data_carry_the_noise(unchecked, noisy):
    data, plain = (ta.sample_data(m, 60, 2.0, jax.random.key(0)) for m in (noisy, ta.DotProduct()))
    assert data.noise.shape == (120, 2, 1) and data.fields.shape == (2, 2, 120) and data.y.shape == (120, 2, 1)
    # Sentences and teacher are those of the model without noise.
    np.testing.assert_allclose(data.x, plain.x, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(data.y, plain.y, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose([data.noise.mean(), data.noise.std()], [0, 1], atol=0.2)
    targets = jax.jit(jax.vmap(noisy.target))(data.y, data.noise)
    np.testing.assert_allclose(data.raw_labels(noisy), targets @ data.inputs(), atol=1e-13)
    known = {name: getattr(data, name) for name in ("teacher", "encodings", "gamma", "noise")}
    rebuilt = ta.Data.from_sentences(data.inputs(), data.raw_labels(noisy), **known)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), data, rebuilt)
    losses = sentence_losses(noisy, data, student_fields(data.x, data.teacher))
    expected = eqx.filter_jit(noisy.loss)(data.x[:, 7] @ data.teacher, data.y[7], data.noise[7])
    np.testing.assert_allclose(losses[7], expected)
    for call, message in (
        (lambda: ta.train(noisy, plain), "data must have 1 fields of noise a token as the model has, got 0"),
        (lambda: ta.train(ta.DotProduct(), data), "data must have 0 fields of noise a token as the model has, got 1"),
        (lambda: ta.Data(data.x, data.y, noise=data.noise[:5]), r"noise must have shape \(n, L, k\)"),
    ):
        with pytest.raises(ta.InputError, match=message):
            call()


def test_held_out_sentences_have_noise_of_their_own(noisy):
    data, key = ta.sample_data(noisy, 60, 2.0, jax.random.key(0)), jax.random.key(1)
    Q = 0.5 * data.teacher + 0.5 * jax.random.normal(key, (60, 1))
    error = ta.heldout_error(noisy, data, Q, key, sentences=40_000)
    x = data.overlaps(Q, jnp.ones((2, 1, 1)))
    expected, noiseless = (
        gen_error(model_of(kind, teacher=data.teacher_gram), x, ta.Sobol(2**12).rule(model_of(kind)))
        for kind in (Noisy, ta.DotProduct)
    )
    bar = float(np.hypot(error.stderr, expected.stderr))
    assert abs(float(error.value - expected.value)) < 4 * bar < abs(float(error.value - noiseless.value))


def test_what_a_loss_with_noise_must_be():
    class Odd(Noisy):
        def loss(self, Z, Y, noise):
            return jnp.sum(Z * Y) + jnp.sum(noise**2)

    class Negative(Noisy):
        noise = -1

    other_nodes = ta.Sobol(64).rule(ta.DotProduct())
    check(model_of(Odd), even=False)
    for call, message in (
        (lambda: check(model_of(Odd)), "loss must be even in Z and in Y"),
        (lambda: check(model_of(Negative)), "noise must be an integer of at least 0"),
        (
            lambda: ta.solve(model_of(Noisy), 1.0, nodes=other_nodes),
            r"nodes must .* \(L, r, t\) = \(2, 1, 2\)",
        ),
    ):
        with pytest.raises(ta.InputError, match=message):
            call()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "alpha"), [(Noisy, {}, 3.0), (Sampled, {"omega": 0.1, "teacher": 4.0, "lam": 0.3}, 10.0)]
)
def test_theory_agrees_with_training_and_message_passing(kind, options, alpha):
    model = model_of(kind, **options)
    runs = None, lambda data, key: ta.gamp(model, data, "semantic", tol=1e-9)
    nodes = ta.Sobol(2**13).rule(model)
    results = [assert_agrees(model, 300, alpha, "semantic", nodes, run, bars=0.06, but=()) for run in runs]
    np.testing.assert_allclose(results[0].simulation.train_loss, results[1].simulation.train_loss, rtol=1e-3)
