"""Wide layers in finite dimension: training by two methods, message passing, and the theory."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.wide.finite import _training_of, scores

layer = partial(ta.wide.DotProduct, tau=0.05)
KEY = jax.random.key(0)


@jax.jit
def losses_of(S, data):
    return jax.vmap(layer().loss)(scores(layer(), (data.x, data.x), S), data.scores)


@pytest.fixture(scope="module")
def data():
    return ta.wide.sample_data(layer(), 40, 1.0, KEY)


@pytest.fixture(scope="module")
def trained(data):
    return ta.wide.train(layer(), data)


def test_scores_have_the_variance_of_the_theory(data):
    law = layer().teacher
    np.testing.assert_allclose(np.trace(data.teacher) / 40, np.mean(law.eigenvalues(40)), rtol=1e-9)
    noisy = ta.wide.sample_data(layer(noise=0.3), 40, 1.0, KEY)
    h, rho = np.asarray(data.scores), float(law.rho)
    added = np.asarray(noisy.scores) - h
    np.testing.assert_allclose(h[:, 0, 0].mean(), 0, atol=0.15)
    spread = h.var(0)
    np.testing.assert_allclose([spread[0, 0], spread[1, 1], spread[0, 1]], [2 * rho, 2 * rho, rho], rtol=0.2)
    np.testing.assert_allclose([added[:, 0, 0].var(), added[:, 0, 1].var()], [0.6, 0.3], rtol=0.1)
    np.testing.assert_allclose(added[:, 0, 1], added[:, 1, 0], atol=1e-12)
    assert not np.isin(np.round(added[:, 1, 0], 9), np.round(data.x, 9)).any()  # drawn from other numbers
    basis = np.linalg.qr(np.ravel(data.x)[: 40 * 40].reshape(40, 40))[0]
    assert not np.allclose((basis * law.eigenvalues(40)) @ basis.T, data.teacher, atol=0.1)


def test_the_minimum_satisfies_its_conditions(data, trained):
    """The gradient of the loss is tau on the eigenvectors of S, and at most tau beyond."""
    gradient = -np.asarray(jax.jit(jax.grad(lambda S: jnp.sum(losses_of(S, data))))(trained.S)) / 40
    gradient = (gradient + gradient.T) / 2
    values, vectors = np.linalg.eigh(trained.S)
    slopes = np.einsum("ik,ij,jk->k", vectors, gradient, vectors)
    np.testing.assert_allclose(slopes[values > 1e-3], 0.05, rtol=1e-5)
    assert np.linalg.eigvalsh(gradient)[-1] < 0.05 * (1 + 1e-5)
    np.testing.assert_allclose(trained.share, np.mean(values > 1e-6))


@pytest.mark.parametrize("kappa", [pytest.param(1.0, marks=pytest.mark.full), 0.6])
def test_training_the_factor_ends_at_the_same_matrix(data, trained, kappa):
    other = ta.wide.train(layer(kappa=kappa), data, over="Q", key=jax.random.key(1))
    assert other.status_name == "converged"
    np.testing.assert_allclose(other.S, trained.S, atol=1e-6)
    np.testing.assert_allclose(other.energy, trained.energy, rtol=1e-9)


@pytest.mark.full
def test_a_bound_on_the_rank_costs_energy(data, trained):
    bounded = ta.wide.train(layer(kappa=0.3), data, over="Q")
    assert float(bounded.share) <= 0.3 + 1e-12
    assert float(bounded.energy) > 1.05 * float(trained.energy)
    assert np.isclose(ta.wide.train(layer(kappa=0.01), data, over="Q", steps=3).share, 1 / 40)  # one column at least


def test_message_passing_ends_at_the_minimum(data, trained):
    for damping in (0.0, 0.3):
        passed = ta.wide.gamp(layer(), data, damping=damping)
        assert passed.status_name == "converged"
        np.testing.assert_allclose(passed.S, trained.S, atol=1e-6)


@pytest.mark.full
def test_an_empty_matrix_is_no_end_while_damped_messages_grow(data):
    """The first messages, damped, push no eigenvalue above tau."""
    model = layer(tau=0.6)
    passed = ta.wide.gamp(model, data, damping=0.7)
    assert passed.status_name == "converged" and float(passed.q) > 0.05
    np.testing.assert_allclose(passed.S, ta.wide.train(model, data).S, atol=1e-6)
    empty = ta.wide.gamp(layer(tau=50.0), data, damping=0.3)
    assert empty.status_name == "converged" and float(empty.q) == 0


def test_fresh_sentences_are_not_those_of_training(data, trained):
    """Also with the key that drew the training sentences, and its overfitting shows."""
    same_key = ta.wide.train(layer(), data, key=KEY)
    assert float(same_key.gen_error) == float(trained.gen_error)  # zero is the default
    np.testing.assert_allclose([trained.train_loss, trained.gen_error], [0.00408, 0.00583], rtol=0.06)
    theory = {"q": 0.86877, "m": 1.13669, "trace": 0.513916, "energy": 0.0297804}  # for d to infinity
    for name, number in theory.items():
        np.testing.assert_allclose(getattr(trained, name), number, rtol=0.06, err_msg=name)


@pytest.mark.full
def test_long_encodings_are_learned_beside_the_content():
    model = layer(tau=0.03, omega=0.4, mixing=[[0.8, 0.2], [0.3, 0.7]], encodings="long")
    data = ta.wide.sample_data(model, 40, 1.0, KEY)
    trained = ta.wide.train(model, data)
    assert trained.status_name == "converged"
    assert int(trained.iterations) < 500
    T = trained.offset
    assert 0.3 < float(T[0, 0] - T[0, 1]) < 0.54  # .46 at d = 60, .54 in the limit
    np.testing.assert_allclose(trained.q, 0.2315, rtol=0.1)
    np.testing.assert_allclose(data.encodings @ data.encodings.T, 40 * np.eye(2), atol=1e-9)
    np.testing.assert_allclose(data.x.mean(0), data.encodings, atol=0.12)  # of 1,600 sentences: 5 standard deviations
    np.testing.assert_allclose(T, data.encodings @ trained.S @ data.encodings.T / np.sqrt(40))
    np.testing.assert_allclose([trained.alpha, data.alpha], 1.0)


@pytest.mark.full
def test_encodings_of_length_of_order_one_have_a_spike():
    """Deviations from the limit are of order d^(-1/2): for q .119(9), .117(7), .109(8) of it at d = 40, 60, 100."""
    model = layer(tau=0.03, omega=0.4, mixing=[[0.75, 0.25], [0.25, 0.75]], encodings=1.5)
    datasets = [ta.wide.sample_data(model, 40, 1.0, jax.random.key(k)) for k in range(4)]
    p = datasets[0].encodings
    np.testing.assert_allclose(p @ p.T, [[2.25, -2.25], [-2.25, 2.25]], rtol=1e-12)
    runs = [ta.wide.train(model, data) for data in datasets]
    assert all(run.status_name == "converged" for run in runs)
    q, R = np.mean([(run.q, run.offset[0, 0] / 2.25) for run in runs], 0)
    assert 0.07 < (0.2357 - q) * np.sqrt(40) < 0.17
    assert 0 < (0.0448 - R) * np.sqrt(40) < 0.05


@pytest.mark.full
def test_single_precision(data, trained):
    with jax.enable_x64(False):
        model = ta.wide.DotProduct(tau=0.05)
        same = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float32), data)
        for run in (ta.wide.train(model, same), ta.wide.gamp(model, same)):
            assert run.status_name == "converged" and int(run.iterations) < 100
            np.testing.assert_allclose(run.q, trained.q, rtol=1e-4)
        empty = ta.wide.train(ta.wide.DotProduct(tau=50.0), same)
        assert empty.status_name == "converged" and float(empty.q) == 0


@pytest.mark.full
def test_the_smallest_data():
    data = ta.wide.sample_data(layer(), 2, 1e-3, KEY)
    assert data.x.shape == (1, 2, 2) and data.alpha == 0.25
    assert ta.wide.sample_data(layer(tokens=3), 3, 1.0, KEY).x.shape == (9, 3, 3)


@pytest.fixture(scope="module")
def few():
    return ta.wide.sample_data(layer(), 6, 0.5, KEY)


def test_numbers_of_a_matrix(few):
    """Eigenvalues below a millionth of the largest one count as zero."""
    values = np.array([0.0, 0.8e-6, 1.2e-6, 0.3, 0.5, 1.0])
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0]
    S, p = (basis * values) @ basis.T, np.random.default_rng(1).standard_normal((2, 6))
    data = eqx.tree_at(lambda data: data.encodings, few, jnp.asarray(p))
    n, key, model = len(few.x), jax.random.key(3), layer()
    found, bad = (
        _training_of(model, data, jnp.asarray(A), jnp.asarray(7), jnp.asarray(False), key)
        for A in (S, np.full((6, 6), np.nan))
    )
    losses = np.asarray(losses_of(S, data))
    expected = {
        "alpha": n / 36, "q": np.sum(values**2) / 6, "m": np.vdot(S, data.teacher) / 6, "trace": values.sum() / 6,
        "train_loss": losses.mean(), "energy": losses.sum() / 36 + 0.05 * values.sum() / 6, "share": 4 / 6,
        "largest": 1.0, "offset": p @ S @ p.T / np.sqrt(6), "iterations": 7, "status": 2,
        "gen_error": ta.wide.heldout_error(model, data, jnp.asarray(S), key, sentences=n).value,
    }  # fmt: skip
    for name, number in expected.items():
        np.testing.assert_allclose(getattr(found, name), number, rtol=1e-9, err_msg=name)
    title, *_, steps = str(found).splitlines()
    assert title == "Wide layer, d = 6, alpha = 0.5: max steps" and steps.split() == ["iterations", "7"]
    assert bad.status_name == "nonfinite"


@pytest.mark.full
@pytest.mark.parametrize("run", [ta.wide.train, partial(ta.wide.train, over="Q"), ta.wide.gamp], ids=["S", "Q", "gamp"])
def test_steps_are_counted_and_bounded(data, run):
    result = run(layer(kappa=0.6), data, steps=3)
    assert int(result.iterations) == 3 and result.status_name == "max steps"
    if run is ta.wide.gamp:  # it has no damping by default
        assert run(layer(kappa=0.6), data, steps=3, damping=0.0) == result


def test_error_on_fresh_sentences(few):
    """They come in blocks of 256. Without a key the sentences of the data are taken, which must be two for a bar."""
    S = few.teacher / 2
    error, losses = partial(ta.wide.heldout_error, layer(), few, S), np.asarray(losses_of(S, few))
    np.testing.assert_allclose(
        [error().value, error().stderr], [losses.mean(), ta.results.error_bar(losses)], rtol=1e-9
    )
    least, block, many = (error(jax.random.key(1), sentences=n) for n in (2, 256, 256 * 64))
    assert least.value == block.value != many.value
    assert block.stderr / many.stderr == pytest.approx(8, rel=0.2)
    assert abs(error().value - many.value) < 3 * error().stderr and abs(block.value - many.value) < 3 * block.stderr
    one = eqx.tree_at(lambda data: (data.x, data.scores), few, (few.x[:1], few.scores[:1]))
    with pytest.raises(ta.InputError, match="data must be two sentences or more for an error bar, got data=1"):
        ta.wide.heldout_error(layer(), one, S)
