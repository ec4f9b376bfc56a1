"""A number with its error bar, its derivatives and a status."""

import jax
import jax.numpy as jnp
import made
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


def test_a_quantity_tells_all_that_it_has(model, rates):
    """Its further numbers, labels and states are attributes, entries of its report and lines of its page."""
    other = Quantity.of(0.1 * VALUES, jax.tree.map(lambda a: 2 * a, rates), model)
    further = {"algorithmic": other, "error": ta.Average(jnp.array(0.5), jnp.array(0.01)), "ended_at": np.array(np.nan)}
    words = {"name": "alpha", "event": "weak_recovery", "meaning": "from here on", "note": ""}
    labels, states = (("place", "inside"), ("side", None)), (made.fixed_point(),)
    quantity = Quantity.of(
        VALUES, (rates, 2 * VALUES), (model, jnp.array(2.0)), branches=states, further=further, labels=labels, **words
    )
    assert (quantity.alpha, quantity.algorithmic, quantity.place) == (quantity.value, other, "inside")
    assert quantity.state is states[0] and quantity.reason == ""
    with pytest.raises(
        AttributeError, match="weak_recovery has no 'beta'; its own names are alpha, algorithmic, error"
    ):
        _ = quantity.beta
    report, bar = quantity.to_dict(), float(error_bar(VALUES))
    assert (report["event"], report["place"], report["side"], report["reason"]) == ("weak_recovery", "inside", None, "")
    assert [report[k] for k in ("alpha", "stderr", "by_alpha", "by_alpha_stderr")] == pytest.approx(
        [1.1, bar, 2.2, 2 * bar]
    )
    assert [report[k] for k in ("algorithmic", "algorithmic_stderr")] == pytest.approx([0.11, 0.1 * bar])
    assert report["algorithmic_sensitivities"]["lam"] == 2 * report["sensitivities"]["lam"] == 2.0
    assert (report["error"], report["error_stderr"]) == (0.5, 0.01) and np.isnan(report["ended_at"])
    assert [branch["branch"] for branch in report["branches"]] == ["semantic"]
    page = [" ".join(line.split()) for line in quantity.summary().splitlines()]
    assert page[:5] == [
        "weak_recovery at alpha = 1.10(13): converged",
        "algorithmic 0.110(13) from here on by message passing from a random start",
        "d/dalpha 2.20(26)",
        "d/dlam 1.0(13) algorithmic: 2.0(26)",
        "d/domega 1.0(13) algorithmic: 2.0(26)",
    ]
    for line in ("error 0.500(10)", "place inside", "from here on; the states there:"):
        assert line in page
    assert not any(line.startswith(("side", "ended_at")) for line in page)
    assert any(line.startswith("d/dmixing [[1.0(13), 1.0(13)],") for line in page)


def test_a_quantity_that_was_not_found_says_why(model):
    for note, reason in (("", "it does not happen"), ("the branch ends", "the branch ends")):
        absent = Quantity.of_existing(jnp.array([jnp.nan, jnp.nan, 1.0]), event="x", meaning="a thing", note=note)
        assert absent.status_name == "absent" and np.isnan(absent.value) and np.isnan(absent.stderr)
        assert absent.summary().strip() == f"x (a thing): not found, as {reason}" and absent.reason == reason
        with pytest.raises(ta.InputError, match=f"x must have a state, but {reason}"):
            _ = absent.state
    half = Quantity.of_existing(jnp.array([jnp.nan, 2.0]))
    assert half.ok and float(half.value) == 2.0 and np.isinf(half.stderr)
    with pytest.raises(ta.InputError, match="must have a state, but it is computed without one"):
        _ = half.state
    assert "reason" not in half.to_dict() and "event" not in half.to_dict()


def test_a_quantity_of_a_model_has_its_derivatives(model):
    quantity = Quantity.of_model(lambda m: m.sigma * jnp.array([1.0, 3.0]) + m.omega, model)
    assert float(quantity.value) == 2 * 0.5 + 0.3 and float(quantity.sensitivities.omega) == 1.0
    assert float(quantity.sensitivities.sigma) == 2.0
    assert quantity.sensitivities_stderr.sigma == error_bar(jnp.array([1.0, 3.0]))
