import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.parameters import Parameter, axis_of, scalar_parameters


def test_read_and_set(model):
    assert Parameter("sigma").read(model, 2.0, "x") == 0.5
    assert Parameter("mixing[1,0]").read(model, 2.0, "x") == 0.4
    assert Parameter("alpha").read(model, 2.0, "x") == 2.0
    changed, alpha = Parameter("sigma").set(model, 2.0, 0.7)
    np.testing.assert_allclose((changed.sigma, alpha), (0.7, 2.0))
    changed, alpha = Parameter("alpha").set(model, 2.0, 0.7)
    assert changed is model and float(alpha) == 0.7


def test_a_number_of_the_penalty():
    net, number = ta.dot_product(penalty=ta.L1(0.02)), Parameter("penalty.strength")
    assert number.read(net, 2.0, "x") == 0.02 and scalar_parameters(net)["penalty.strength"] == 0.02
    changed = number.set(net, 2.0, 0.03)[0]
    assert float(changed.penalty.strength) == 0.03 and changed.omega == net.omega
    with pytest.raises(ta.InputError, match="x must name one of alpha, lam, omega, sigma, or an entry"):
        number.read(ta.dot_product(), 2.0, "x")


def test_the_rest_of_a_row_makes_room():
    model = ta.dot_product(mixing=[[0.5, 0.3, 0.2]] * 3, encodings=[[1.0], [0.0], [-1.0]])
    mixing = Parameter("mixing[2,1]").set(model, None, 0.65)[0].mixing
    np.testing.assert_allclose(mixing[2], [0.25, 0.65, 0.1])
    np.testing.assert_array_equal(mixing[:2], model.mixing[:2])


def test_rows_stay_stochastic(model):
    last = Parameter("mixing[-1,-1]").set(model, None, 0.5)[0].mixing
    np.testing.assert_allclose(last, [[0.6, 0.4], [0.5, 0.5]], rtol=1e-15)
    identity = ta.dot_product(mixing=np.eye(3), encodings=[[1.0], [0.0], [-1.0]])
    number = Parameter("mixing[0,0]")  # the other entries were zero, so they share equally
    np.testing.assert_allclose(number.set(identity, None, 0.5)[0].mixing[0], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(number.direction(identity, 1.0).mixing[0], [1.0, -0.5, -0.5])


def test_direction_is_the_derivative(model):
    step = 1e-6
    for name, value in (("omega", 0.3), ("mixing[0,1]", 0.4)):
        number = Parameter(name)
        direction = number.direction(model, value)
        up, down = (number.set(model, None, value + s * step)[0] for s in (1, -1))
        np.testing.assert_allclose(direction.omega, (up.omega - down.omega) / (2 * step), atol=1e-9)
        np.testing.assert_allclose(direction.mixing, (up.mixing - down.mixing) / (2 * step), atol=1e-9)


def test_axes(model):
    axis = axis_of([0.5, 1.0], "alpha", "x", model)
    assert axis.parameter.name == "alpha" and axis.values.tolist() == [0.5, 1.0]
    custom = axis_of(("norm", [1.0, 2.0], lambda m, v: ta.dot_product(teacher=v)), "alpha", "x", model)
    np.testing.assert_allclose(custom.parameter.set(model, None, 2.0)[0].teacher, [[2.0]])


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ([], "x must be one or more"),
        (["one"], "x must be one or more finite"),
        (("alpha",), "x must be .name, values."),
        ([1.0, 0.5], "x must be one or more finite, increasing"),
        ([0.0, 1.0], "x must be positive for alpha"),
        (("mixing", [0.1]), "x must name one of alpha, lam, omega, sigma, or an entry"),
        (("mixing[0,2]", [0.1]), "x must name"),
        (("omega", [0.1, 1.2]), "omega must be in"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_axes(model, axis, message):
    with pytest.raises(ta.InputError, match=message):
        axis_of(axis, "alpha", "x", model)
