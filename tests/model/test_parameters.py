"""Numbers of a model by name: they are read, set and moved, and span axes."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.parameters import Parameter, arrays_of, axes_of, moved_number, names_of, scalar_parameters


def test_read_and_set(model):
    for name, value in (("sigma", 0.5), ("mixing[1,0]", 0.4), ("alpha", 2.0)):
        assert Parameter(name).read(model, 2.0, "x") == value
    changed, alpha = Parameter("sigma").set(model, 2.0, 0.7)
    np.testing.assert_allclose((changed.sigma, alpha), (0.7, 2.0))
    changed, alpha = Parameter("alpha").set(model, 2.0, 0.7)
    assert changed is model and float(alpha) == 0.7
    net, number = ta.DotProduct(penalty=ta.L1(0.02)), Parameter("penalty.strength")
    numbers = {"lam": 0.01, "omega": 0.3, "sigma": 0.5}
    assert number.read(net, 2.0, "x") == 0.02 and scalar_parameters(net) == {**numbers, "penalty.strength": 0.02}
    changed = number.set(net, 2.0, 0.03)[0]
    assert float(changed.penalty.strength) == 0.03 and changed.omega == net.omega
    assert {name: a.shape for name, a in arrays_of(model).items()} == {
        "mixing": (2, 2), "encodings": (2, 1), "teacher": (1, 1)
    }  # fmt: skip
    with pytest.raises(ta.InputError, match="x must name one of alpha, lam, omega, sigma, or an entry"):
        number.read(model, 2.0, "x")


def test_rows_stay_stochastic(model):
    """The rest of a row makes room for its number."""
    last = Parameter("mixing[-1,-1]").set(model, None, 0.5)[0].mixing
    np.testing.assert_allclose(last, [[0.6, 0.4], [0.5, 0.5]], rtol=1e-15)
    three = {"encodings": [[1.0], [0.0], [-1.0]]}
    rows = ta.DotProduct(mixing=[[0.5, 0.3, 0.2]] * 3, **three)
    mixing = Parameter("mixing[2,1]").set(rows, None, 0.65)[0].mixing
    np.testing.assert_allclose(mixing[2], [0.25, 0.65, 0.1])
    np.testing.assert_array_equal(mixing[:2], rows.mixing[:2])
    identity, number = ta.DotProduct(mixing=np.eye(3), **three), Parameter("mixing[0,0]")
    # The other entries were zero, so they share equally.
    np.testing.assert_allclose(number.set(identity, None, 0.5)[0].mixing[0], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(number.direction(identity, 1.0).mixing[0], [1.0, -0.5, -0.5])


def test_directions_and_slopes_are_derivatives(model):
    """The slope in an entry of mixing contains that of the rest of its row."""
    slopes, step = ta.DotProduct(omega=0.5, mixing=[[0.7, 0.3], [0.1, 0.9]]), 1e-6  # derivatives in all numbers
    for name, value, slope in (("omega", 0.3, 0.5), ("mixing[0,1]", 0.4, 0.3 - 0.7)):
        number = Parameter(name)
        direction = number.direction(model, value)
        up, down = (number.set(model, None, value + s * step)[0] for s in (1, -1))
        np.testing.assert_allclose(direction.omega, (up.omega - down.omega) / (2 * step), atol=1e-9)
        np.testing.assert_allclose(direction.mixing, (up.mixing - down.mixing) / (2 * step), atol=1e-9)
        assert number.slope(slopes, model, value) == pytest.approx(slope)


def test_axes(model):
    """A number with several values is an axis, and one with a single value is fixed; the order is the caller's."""
    custom = ta.Axis("norm", [1.0, 2.0], lambda m, v: ta.DotProduct(teacher=v))
    numbers = {"sigma": 0.4, "omega": np.array([0.2, 0.3]), "alpha": jnp.asarray(2.0)}
    fixed, alpha, (first, second) = axes_of(model, [custom], numbers)
    assert float(fixed.sigma) == 0.4 and float(alpha) == 2.0 and fixed.sigma.dtype == model.sigma.dtype
    assert (first.name, second.name) == ("norm", "omega") and second.values.tolist() == [0.2, 0.3]
    np.testing.assert_allclose(first.parameter.set(model, None, 2.0)[0].teacher, [[2.0]])
    for order, values in (("any", [2.0, 1.0, 1.5]), ("monotonic", [2.0, 1.5, 1.0]), ("increasing", [1.0, 1.5, 2.0])):
        assert axes_of(model, [], {"alpha": values}, order)[2][0].values.tolist() == values
        for other in {"any": [], "monotonic": [[2.0, 1.0, 1.5]], "increasing": [[2.0, 1.0]]}[order]:
            with pytest.raises(ta.InputError, match=f"alpha must be one or more finite, {order} values"):
                axes_of(model, [], {"alpha": other}, order)


def test_names_of_axes(model):
    numbers = {"sigma": 0.4, "omega": [0.2, 0.3], "lam": "0.1"}
    assert names_of(model, [ta.Axis("mixing[0,1]", [0.1])], numbers) == ["mixing[0,1]", "omega"]
    assert names_of([model, model], [], {"alpha": 2.0}) == ["model"]


def root(model, value):
    return eqx.tree_at(lambda m: m.omega, model, value**2)


def test_a_number_that_a_search_moves(model):
    """It is given by its name, or as an axis of the caller's own with the value at which the search begins."""
    assert moved_number("sigma", model, "x") == Parameter("sigma")
    number = moved_number(ta.Axis("root", 0.6, root), model, "x")
    assert number.name == "root" and number.read(model, 2.0, "x") == 0.6
    changed, alpha = number.set(model, 2.0, 0.5)
    assert (float(changed.omega), alpha, changed.omega.dtype) == (0.25, 2.0, model.omega.dtype)
    np.testing.assert_allclose(number.direction(model, 0.5).omega, 1.0)  # d (value^2) / d value


BAD_NUMBERS = [
    (3.0, "x must be the name of a number, for instance sigma, or Axis"),
    (ta.Axis("sigma", 0.5), "x must be the name of a number, .* got an Axis without a function put"),
    (lambda: ta.Axis(1, 0.5, root), "x must be the name of a number, .* or a name"),
    (ta.Axis("root", [0.5, 0.6], root), "x must be one number"),
    (ta.Axis("root", 0.5, lambda m, v: ta.DotProduct(omega=float(v))), "x must have a function put.*jax.numpy"),
    (ta.Axis("root", 0.5, lambda m: m), "x must have a function put.*TypeError"),
    (ta.Axis("rank", 0.5, lambda m, v: ta.DotProduct(rank=2)), "x must have .* a model like its argument"),
]
BAD_AXES = [
    ([], {"alpha": []}, "alpha must be one or more"), ([], {"alpha": ["one"]}, "alpha must be one or more finite"),
    ([], {"alpha": [[1.0], [2.0]]}, "alpha must be one or more"), ([], {"alpha": [0.0, 1.0]}, "alpha must be positive"),
    ([ta.Axis("alpha", [1.0])], {"alpha": 1.0}, "alpha must be given once"), ([], {"rank": 2}, "rank must name"),
    ([("alpha", [1.0])], {}, "axes must be made by Axis"), ([], {"omega": [0.1, 1.2]}, "omega must be in"),
    ([ta.Axis("mixing[0,2]", [0.1])], {}, r"mixing\[0,2\] must name"), ([], {"omega": "0.2"}, "omega must be a real"),
    ([], {"mixing": [0.1]}, "mixing must name one of alpha, lam, omega, sigma, or an entry"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD_NUMBERS)
@pytest.mark.usefixtures("unchecked")
def test_bad_numbers_that_a_search_moves(model, given, message):
    with pytest.raises(ta.InputError, match=message):
        moved_number(given() if callable(given) else given, model, "x")


@pytest.mark.parametrize(("axes", "numbers", "message"), BAD_AXES)
@pytest.mark.usefixtures("unchecked")
def test_bad_axes(model, axes, numbers, message):
    with pytest.raises(ta.InputError, match=message):
        axes_of(model, axes, numbers)
