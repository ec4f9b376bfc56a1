"""A number with its error bar, its derivatives and a status."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status, error_bar
from tiedattn_jax.theory.quantities import Quantity, with_sensitivities

VALUES = jnp.array([1.0, 1.2, 1.1])


@pytest.fixture
def rates(model):
    """Derivatives in every number of the model, three replicates of each."""
    return jax.tree.map(lambda a: jnp.arange(3.0).reshape(3, *[1] * a.ndim) + jnp.zeros(a.shape), model)


def test_means_bars_and_derivatives(model, rates):
    def number(model, alpha):
        return Quantity.of(VALUES, (rates, 2 * VALUES), (model, alpha))

    quantity = number(model, jnp.array(2.0))
    assert float(quantity.value) == pytest.approx(1.1) and quantity.stderr == error_bar(VALUES)
    by_model, by_alpha = jax.grad(lambda *setting: number(*setting).value, (0, 1))(model, jnp.array(2.0))
    jax.tree.map(np.testing.assert_allclose, by_model, quantity.sensitivities)
    assert float(by_alpha) == pytest.approx(float(quantity.by_alpha.value)) == 2.2
    assert float(quantity.sensitivities.sigma) == 1.0
    assert float(quantity.sensitivities_stderr.sigma) == pytest.approx(float(error_bar(jnp.arange(3.0))))
    assert float(quantity.by_alpha.stderr) == pytest.approx(2 * float(quantity.stderr))
    assert quantity.status == Status.converged and quantity.ok


def test_what_is_missing(model, rates):
    """A replicate without the number does not count; what does not exist is NaN in every number."""
    values, lacking = VALUES.at[1].set(jnp.nan), jax.tree.map(lambda a: a.at[1].set(jnp.nan), rates)
    quantity = Quantity.of(values, lacking, model)
    assert float(quantity.value) == pytest.approx(1.05) and quantity.stderr == error_bar(values)
    assert float(quantity.sensitivities.lam) == 1.0 and quantity.by_alpha is None
    gradient = jax.grad(lambda m: Quantity.of(values, lacking, m).value)(model)
    jax.tree.map(np.testing.assert_allclose, gradient, quantity.sensitivities)
    absent = Quantity.of(VALUES, rates, model, status=Status.absent, known=False)
    assert not absent.ok
    assert all(np.all(np.isnan(a)) for a in jax.tree.leaves(absent) if a.dtype.kind == "f")
    for values, known in ((VALUES, False), (jnp.nan * VALUES, True)):
        gradient = jax.grad(lambda m, v=values, k=known: Quantity.of(v, rates, m, known=k).value)(model)
        assert not any(np.any(a) for a in jax.tree.leaves(gradient))
    plain = Quantity.of(VALUES)
    assert plain.sensitivities is None and plain.sensitivity_rows(lambda m: {}) == []
    assert plain.derivatives() == {"sensitivities": None, "sensitivities_stderr": None}


def test_derivatives_by_name(model, rates):
    numbers = Quantity.of(VALUES, rates, model).derivatives()
    assert numbers["sensitivities"]["omega"] == 1.0 and np.shape(numbers["sensitivities"]["mixing"]) == (2, 2)
    rows = Quantity.of(VALUES, rates, model).sensitivity_rows(lambda m: {"sigma": m.sigma})
    assert rows == [("d/dsigma", "1.0(13)")]
    text = str(Quantity.of(VALUES, rates, model))
    assert text.startswith("value = 1.10(13): converged\n") and "d/dlam" in text and "d/dmixing" in text
    assert Quantity.of(VALUES, rates, model).to_dict() == numbers | {
        "value": pytest.approx(1.1), "stderr": pytest.approx(float(error_bar(VALUES))), "status": "converged"
    }  # fmt: skip


def test_rates_are_the_first_derivatives():
    model, rates = ta.DotProduct(), jax.tree.map(lambda a: jnp.ones((2, *a.shape)), ta.DotProduct())
    values = with_sensitivities(jnp.zeros(2), rates, model)
    assert np.all(values == 0)
    slope = jax.jacrev(lambda m: with_sensitivities(jnp.zeros(2), rates, m))(model)
    np.testing.assert_array_equal(slope.mixing, np.ones((2, 2, 2)))
