"""The loss of wide layers, the directions of the scores that it sees, defaults, bounds, and the printed layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import sqrtm
from scipy.special import log_softmax, softmax

import tiedattn_jax as ta
from tiedattn_jax.wide.layer import require_none

MIXING = [[0.8, 0.2], [0.3, 0.7]]


def layer(**options):
    return ta.WideDotProduct(**{"tau": 0.05, **options})


class Own(ta.WideLayer):
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
    np.testing.assert_allclose(model.loss(jnp.asarray(H), jnp.asarray(Y)), expected, rtol=1e-12)


def test_defaults_of_a_layer():
    model = ta.WideDotProduct(tau=0.05)
    numbers = {"beta": 1.0, "tau": 0.05, "kappa": 1.0, "omega": 0.0, "noise": 0.0, "lam": 0.1}
    assert {name: float(getattr(model, name)) for name in numbers} == numbers
    assert (model.tokens, model.loss_name, model.target, model.encodings) == (2, "squared", "softmax", None)
    assert isinstance(model.teacher, ta.Wishart) and float(model.teacher.kappa) == 0.5
    np.testing.assert_array_equal(ta.WideDotProduct(tau=0.05, tokens=4).mixing, np.full((4, 4), 0.25))
    own = Own(teacher=[0.5, 1.0], tau=0.05)
    assert (float(own.kappa), float(own.noise), own.tokens, own.encodings, own.is_hard) == (1.0, 0.0, 2, None, False)
    assert own.teacher.values.tolist() == [0.5, 1.0]


def test_the_ridge_of_a_wider_factor():
    model = layer(tau=None, lam=0.3, kappa=0.25)
    np.testing.assert_allclose([model.tau, model.lam], [0.075, 0.3], rtol=1e-12)


def test_the_directions_that_two_tokens_show():
    """Softmax rows show u_1 = h_11 - h_22 and u_2 = h_12 - h_22, of covariance [[4, 2], [2, 3]]."""
    model = layer()
    root = sqrtm(np.array([[4.0, 2.0], [2.0, 3.0]]))
    H = np.array([[0.3, -1.1], [-1.1, 0.8]])
    expected = np.linalg.solve(root, [0.3 - 0.8, -1.1 - 0.8])
    np.testing.assert_allclose(model.coordinates(jnp.asarray(H)), expected, rtol=1e-10)
    stack = model.coordinates(jnp.asarray(np.stack([H, 2 * H], -1)))
    np.testing.assert_allclose(stack, np.outer(expected, [1, 2]), rtol=1e-10)
    one = Own(teacher=ta.Wishart(0.5), tau=0.05)
    np.testing.assert_allclose(abs(one.coordinates(jnp.asarray(H))), (0.3 + 0.8 / 3) / np.sqrt(2 + 2 / 9), rtol=1e-10)


@pytest.mark.parametrize("x64", [True, False])
def test_layers_that_see_the_same_share_their_directions(x64):
    """The directions are static, so that layers with other numbers share their programs."""
    with jax.enable_x64(x64):
        bases = {
            str(layer(**options).basis)
            for options in ({}, {"beta": 2.0, "omega": 0.4}, {"loss": "cross_entropy", "teacher": ta.Wishart(2.0)})
        }
    assert len(bases) == 1


def test_jax_traces_the_numbers_of_a_layer_only():
    leaves = jax.tree.leaves(layer(encodings=1.5, teacher=[1.0, 2.0], mixing=MIXING))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert sorted(leaf.shape for leaf in leaves) == [()] * 6 + [(2,), (2, 2)]


@pytest.mark.parametrize(
    "options, is_even",
    [
        ({}, True),
        ({"omega": 0.3}, True),  # half of every share is the same for both tokens
        ({"omega": 0.3, "mixing": MIXING}, False),
        ({"encodings": "long"}, False),
        ({"encodings": 1.5}, False),
    ],
)
def test_whether_a_loss_is_even(options, is_even):
    assert layer(**options).is_even is is_even


def test_traced_numbers_make_no_even_loss():
    """The directions that the loss sees are known while jax traces its numbers; that it is even is not."""
    found = []

    def size(omega, mixing):
        model = layer(omega=omega, mixing=mixing)
        found.append((model.is_even, model.seen))
        return model.loss(jnp.eye(2), jnp.eye(2))

    value = jax.jit(size)(0.3, jnp.asarray(MIXING))
    assert found == [(False, 2)]
    np.testing.assert_allclose(value, layer(omega=0.3, mixing=MIXING).loss(jnp.eye(2), jnp.eye(2)), rtol=1e-12)


@pytest.mark.parametrize(
    "encodings, shifts, basis",
    [
        (None, 0, np.zeros((0, 2, 2))),
        ("long", 2, None),
        (1.5, 1, [[[2.25, -2.25], [-2.25, 2.25]]]),
    ],
)
def test_numbers_of_the_encodings(encodings, shifts, basis):
    model = layer(encodings=encodings)
    assert model.encodings == encodings and model.shifts == shifts
    np.testing.assert_allclose(model.shift_basis, model.basis if basis is None else basis, rtol=1e-15)


@pytest.mark.parametrize("options", [{"omega": 0.0}, {"omega": 1.0}, {"noise": 0.0}, {"mixing": np.eye(2)}])
def test_numbers_on_their_bounds_are_good(options):
    ((name, value),) = options.items()
    np.testing.assert_array_equal(getattr(layer(**options), name), value)


@pytest.mark.parametrize("excess, is_good", [(0.8e-6, True), (1.2e-6, False), (-0.8e-6, True), (-1.2e-6, False)])
def test_shares_sum_to_one_within_a_millionth(excess, is_good):
    mixing = [[0.5, 0.5], [0.5 + excess, 0.5]]
    if is_good:
        layer(mixing=mixing)
    else:
        with pytest.raises(ta.InputError, match="mixing must be rows of shares that sum to one"):
            layer(mixing=mixing)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"omega": -0.1}, "omega must be in [0, 1], got omega=-0.1"),
        ({"mixing": [[1.1, -0.1], [0.5, 0.5]]}, "mixing must be rows of shares that sum to one"),
        ({"mixing": [[0.5, 0.5], [0.6, 0.6]]}, "mixing must be rows of shares that sum to one"),
        ({"mixing": [[0.8, 0.3], [0.2, 0.7]]}, "mixing must be rows of shares that sum to one"),  # columns do
        ({"tau": None}, "tau must be given, or lam in its place, got tau=None and lam=None"),
        ({"lam": 1.0, "tau": 0.1}, "tau must be given, or lam in its place, got tau=0.1 and lam=1.0"),
        ({"tau": None, "lam": 0.0}, "lam must be positive and finite"),
        ({"encodings": 0.0}, "encodings must be positive"),
    ],
)
def test_numbers_beyond_their_bounds_are_refused(options, sentence):
    with pytest.raises(ta.InputError) as error:
        layer(**options)
    assert str(error.value).startswith(sentence)


def test_encodings_need_two_tokens_and_a_loss_of_two_directions():
    with pytest.raises(ta.InputError) as error:
        Own(teacher=ta.Wishart(0.5), tau=0.05, encodings="long")
    text = "encodings need two tokens and a loss that does not see a common shift of all scores"
    assert str(error.value) == f"{text}, got 2 tokens and 1 directions"


@pytest.mark.parametrize("slope", [0.0, np.inf])
def test_a_loss_without_a_finite_slope_is_refused(slope):
    """The square root is finite everywhere, but its slope at zero is not."""

    def loss(self, H, Y):
        return jnp.sum(H) ** 2 + (jnp.sqrt(0 * jnp.sum(H**2)) if slope else 0.0)

    kind = type("Kind", (ta.WideLayer,), {"loss": loss})
    if slope:
        with pytest.raises(ta.InputError, match="loss must be finite and smooth for all scores"):
            kind(teacher=ta.Wishart(0.5), tau=0.1)
    else:
        assert kind(teacher=ta.Wishart(0.5), tau=0.1).seen == 1


def test_arguments_without_a_meaning_are_named():
    require_none(branch=None, rtol=None)
    with pytest.raises(ta.InputError) as error:
        require_none(branch=None, rtol=0.5)
    assert str(error.value) == "rtol must be left out for a wide layer, got rtol=0.5"


def test_a_layer_prints_its_numbers():
    model = layer(omega=0.25, encodings=1.5, mixing=MIXING, teacher=[0.5, 1.0])
    title, *rows = str(model).splitlines()
    assert title == "WideDotProduct"
    assert {row.split()[0]: row.split(maxsplit=1)[1] for row in rows} == {
        "beta": "1", "omega": "0.25", "mixing": "[[0.8, 0.2], [0.3, 0.7]]", "tau": "0.05", "kappa": "1", "noise": "0",
        "length": "1.5", "teacher": "2 eigenvalues from 0.5 to 1", "tokens": "2",
    }  # fmt: skip
