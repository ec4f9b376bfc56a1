"""The loss of wide layers, the directions of the scores that it sees, defaults, bounds, and the printed layer."""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import sqrtm
from scipy.special import log_softmax, softmax

import tiedattn_jax as ta

MIXING = [[0.8, 0.2], [0.3, 0.7]]
layer = partial(ta.wide.DotProduct, tau=0.05)


class Own(ta.wide.Layer):
    """One score that is the sum of two, with an uneven loss."""

    def loss(self, H, Y):
        return (H[0, 0] + H[1, 1] / 3 - jnp.exp(0.1 * (Y[0, 0] + Y[1, 1] / 3))) ** 2


@pytest.mark.parametrize("target", ["softmax", "hardmax"])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_the_loss_is_its_formula(loss, target):
    draws = np.random.default_rng(0)
    mixing = softmax(draws.standard_normal((3, 3)), 1)
    model = layer(tokens=3, beta=1.7, omega=0.3, mixing=mixing, loss=loss, target=target)
    H, Y = draws.standard_normal((2, 3, 3)) + draws.standard_normal((2, 3, 3)).swapaxes(1, 2)
    rows = softmax(1.7 * Y, 1) if target == "softmax" else np.eye(3)[np.argmax(Y, 1)]
    wanted = 0.7 * rows + 0.3 * mixing
    squared = 0.5 * np.sum((softmax(1.7 * H, 1) - wanted) ** 2)
    expected = squared if loss == "squared" else -np.sum(wanted * log_softmax(1.7 * H, 1))
    np.testing.assert_allclose(eqx.filter_jit(model.loss)(H, Y), expected, rtol=1e-12)


def test_defaults_of_a_layer():
    model, options = layer(), {"tokens": 2, "loss": "squared", "target": "softmax", "teacher": ta.wide.Wishart(0.5)}
    assert model == layer(beta=1.0, kappa=1.0, omega=0.0, noise=0.0, encodings=None, **options)
    assert model == layer(tau=None, lam=0.1)
    np.testing.assert_array_equal(layer(tokens=3).mixing, np.full((3, 3), 1 / 3))
    own = Own(teacher=[0.5, 1.0], tau=0.05)
    assert own == Own(teacher=[0.5, 1.0], tau=0.05, kappa=1.0, noise=0.0, tokens=2, encodings=None)
    assert own.teacher.values.tolist() == [0.5, 1.0] and not own.is_hard


def test_the_ridge_of_the_factor():
    """lam / 2 ||Q||^2 is tau d Tr S for S = Q Q^T / (d sqrt(kappa))."""
    d, kappa = 8, 0.25
    Q = np.random.default_rng(0).standard_normal((d, 2))
    S, model = Q @ Q.T / (d * np.sqrt(kappa)), layer(tau=None, lam=0.3, kappa=kappa)
    np.testing.assert_allclose(model.tau * d * np.trace(S), 0.15 * np.sum(Q**2), rtol=1e-12)
    np.testing.assert_allclose([model.tau, model.lam], [0.075, 0.3], rtol=1e-12)


def test_the_directions_that_two_tokens_show():
    """Softmax rows show u_1 = h_11 - h_22 and u_2 = h_12 - h_22, of covariance [[4, 2], [2, 3]]."""
    root, H = sqrtm(np.array([[4.0, 2.0], [2.0, 3.0]])), np.array([[0.3, -1.1], [-1.1, 0.8]])
    expected = np.linalg.solve(root, [0.3 - 0.8, -1.1 - 0.8])
    stack = layer().coordinates(jnp.asarray(np.stack([H, 2 * H], -1)))
    np.testing.assert_allclose(stack[0], np.outer(expected, [1, 2]), rtol=1e-10)
    one = Own(teacher=ta.wide.Wishart(0.5), tau=0.05)
    np.testing.assert_allclose(abs(one.coordinates(jnp.asarray(H))), (0.3 + 0.8 / 3) / np.sqrt(2 + 2 / 9), rtol=1e-10)


@pytest.mark.parametrize("tokens, loss", [(2, "squared"), (3, "cross_entropy")])
def test_coordinates_hold_all_that_the_loss_sees(tokens, loss):
    """The coordinates of random scores are independent with variance one, and the loss follows from them."""
    model = layer(tokens=tokens, loss=loss, omega=0.3)
    a, b = np.triu_indices(tokens)
    units = np.zeros((len(a), tokens, tokens))
    units[range(len(a)), a, b] = units[range(len(a)), b, a] = np.where(a == b, np.sqrt(2), 1)
    C = np.asarray(model.coordinates(jnp.asarray(units.transpose(1, 2, 0))))[0]
    np.testing.assert_allclose(C @ C.T, np.eye(model.seen), atol=1e-9)
    draws = np.random.default_rng(0).standard_normal((2, len(a)))
    (w, y), (H, Y) = draws @ C.T, np.tensordot(draws, units, 1)
    np.testing.assert_allclose(
        eqx.filter_jit(model.node_loss)(w, y, np.ones(1)), eqx.filter_jit(model.loss)(H, Y), rtol=1e-9
    )


def test_whether_a_loss_is_even():
    """Half of every share is the same for both tokens, if the rows of the positional part are equal."""
    assert layer(omega=0.3).is_even
    for options in ({"omega": 0.3, "mixing": MIXING}, {"encodings": "long"}, {"encodings": 1.5}):
        assert not layer(**options).is_even


def test_traced_numbers_make_no_even_loss():
    """The directions that the loss sees are known while jax traces its numbers; that it is even is not."""
    found = []

    @jax.jit
    def loss(omega, mixing):
        model = layer(omega=omega, mixing=mixing)
        found.append((model.is_even, model.seen))
        return model.loss(jnp.eye(2), jnp.eye(2))

    expected = 0.5 * 0.3**2 * np.sum((softmax(np.eye(2), 1) - MIXING) ** 2)
    np.testing.assert_allclose(loss(0.3, np.array(MIXING)), expected, rtol=1e-12)
    assert found == [(False, 2)]


def test_numbers_on_their_bounds_are_good():
    for name, value in (("omega", 1.0), ("mixing", [[0.5, 0.5], [0.5 + 0.8e-6, 0.5]])):
        np.testing.assert_array_equal(getattr(layer(**{name: value}), name), value)


@pytest.mark.parametrize(
    "change, value",
    [("tau", 0.2), ("encodings", None), ("encodings", 2.0), ("loss", "squared"), ("teacher", [1.0, 2.0])],
)
def test_a_layer_with_one_number_changed(change, value):
    options = {"tau": 0.1, "omega": 0.3, "mixing": MIXING, "encodings": "long", "loss": "cross_entropy", "noise": 0.2}
    model = layer(**options)
    assert replace(model, **{change: value}) == layer(**options | {change: value}) != model
    assert replace(model) == model
    with pytest.raises(ta.InputError, match="tau must be positive"):
        replace(model, tau=-1.0)


def test_a_layer_prints_its_numbers():
    title, *rows = str(layer(omega=0.25, encodings=1.5, mixing=MIXING, teacher=[0.5, 1.0])).splitlines()
    expected = "beta 1; omega 0.25; mixing [[0.8, 0.2], [0.3, 0.7]]; tau 0.05; kappa 1; noise 0; encodings 1.5;"
    expected += " teacher 2 eigenvalues from 0.5 to 1; tokens 2"
    assert title == "DotProduct" and {" ".join(row.split()) for row in rows} == set(expected.split("; "))
