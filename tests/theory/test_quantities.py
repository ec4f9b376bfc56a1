"""A number with its error bar, its derivatives and a status."""

import copy

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from scipy import special

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status, error_bar
from tiedattn_jax.theory.quantities import Quantity

VALUES, LACKING = jnp.array([1.0, 1.2, 1.1]), jnp.array([1.0, np.nan, 1.1])
TWICE, TENTH = jnp.array([2.0, 2.4, 2.2]), jnp.array([0.1, 0.12, 0.11])
BAR_OF_COUNT = special.stdtrit(2, 0.97725) / 2 / 3**0.5  # of the rates 0, 1 and 2
BAR = 0.1 * BAR_OF_COUNT


@pytest.fixture
def rates(model):
    """Derivatives in every number of the model, three replicates of each."""
    return jax.tree.map(lambda a: jnp.asarray(np.arange(3.0).reshape(3, *[1] * a.ndim) + np.zeros(a.shape)), model)


def test_means_bars_and_derivatives(model, rates):
    def number(model, alpha):
        return Quantity.of(VALUES, (rates, TWICE), (model, alpha))

    quantity = number(model, jnp.array(2.0))
    by_model, by_alpha = jax.jit(jax.grad(lambda *setting: number(*setting).value, (0, 1)))(model, jnp.array(2.0))
    jax.tree.map(np.testing.assert_allclose, by_model, quantity.sensitivities)
    found = quantity.value, quantity.stderr, quantity.by_alpha.value, quantity.by_alpha.stderr, by_alpha
    np.testing.assert_allclose(found, [1.1, BAR, 2.2, 2 * BAR, 2.2])
    np.testing.assert_allclose([quantity.sensitivities.sigma, quantity.sensitivities_stderr.sigma], [1.0, BAR_OF_COUNT])
    assert quantity.status == Status.converged and quantity.ok


@pytest.mark.parametrize("rate", [np.nan, 99.0])  # a search that failed can leave any number
def test_a_replicate_without_the_number_does_not_count(model, rates, rate):
    lacking = jax.tree.map(lambda a: a.at[1].set(rate), rates)
    quantity = Quantity.of(LACKING, lacking, model)
    assert float(quantity.value) == pytest.approx(1.05) and quantity.stderr == error_bar(np.array([1.0, 1.1]))
    assert float(quantity.sensitivities.lam) == 1.0 and quantity.by_alpha is None
    assert quantity.sensitivities_stderr.lam == error_bar(np.array([0.0, 2.0]))
    gradient = jax.jit(jax.grad(lambda m: Quantity.of(LACKING, lacking, m).value))(model)
    jax.tree.map(np.testing.assert_allclose, gradient, quantity.sensitivities)


def test_what_does_not_exist_is_nan_in_every_number(model, rates):
    absent = Quantity.of(VALUES, rates, model, status=Status.absent, known=False)
    assert not absent.ok
    assert all(np.all(np.isnan(a)) for a in jax.tree.leaves(absent) if a.dtype.kind == "f")
    for values, known in ((VALUES, False), (jnp.full(3, np.nan), True)):
        gradient = jax.jit(jax.grad(lambda m, v=values, k=known: Quantity.of(v, rates, m, known=k).value))(model)
        assert not any(np.any(a) for a in jax.tree.leaves(gradient))
    plain = Quantity.of(VALUES)
    assert plain.sensitivities is None and plain.sensitivity_rows(lambda m: {}) == []
    assert plain.derivatives() == {"sensitivities": None, "sensitivities_stderr": None}


def test_derivatives_by_name(model, rates):
    quantity = Quantity.of(VALUES, rates, model)
    numbers = quantity.derivatives()
    assert numbers["sensitivities"]["omega"] == 1.0 and np.shape(numbers["sensitivities"]["mixing"]) == (2, 2)
    assert quantity.sensitivity_rows(lambda m: {"sigma": m.sigma}) == [("d/dsigma", "1.0(13)")]
    text = str(quantity)
    assert text.startswith("value = 1.10(13): converged\n") and "d/dlam" in text and "d/dmixing" in text
    own = {"value": pytest.approx(1.1), "stderr": pytest.approx(BAR), "status": "converged"}
    assert quantity.to_dict() == numbers | own


def test_a_quantity_tells_all_that_it_has(model, rates):
    """Its further numbers, labels and states are attributes, entries of its report and lines of its page."""
    other = Quantity.of(TENTH, jax.tree.map(lambda a: 2 * a, rates), model)
    further = {
        "algorithmic": other,
        "error": ta.results.Average(jnp.array(0.5), jnp.array(0.01)),
        "ended_at": np.array(np.nan),
    }
    words = {"name": "alpha", "event": "weak_recovery", "meaning": "from here on", "note": ""}
    words |= {"labels": (("place", "inside"), ("side", None)), "branches": (made.fixed_point(),), "further": further}
    quantity = Quantity.of(VALUES, (rates, TWICE), (model, jnp.array(2.0)), **words)
    assert (quantity.alpha, quantity.algorithmic, quantity.place) == (quantity.value, other, "inside")
    assert quantity.state is words["branches"][0] and quantity.reason == ""
    message = "weak_recovery has no 'beta'; its own names are alpha, algorithmic, error"
    with pytest.raises(AttributeError, match=message):
        _ = quantity.beta
    assert {"alpha", "algorithmic", "place", "value", "to_dict"} <= set(dir(quantity)) and "beta" not in dir(quantity)
    unfinished = object.__new__(Quantity)
    assert "to_dict" in dir(unfinished) and not hasattr(unfinished, "alpha") and copy.copy(quantity) == quantity
    report = quantity.to_dict()
    numbers = {"alpha": 1.1, "stderr": BAR, "by_alpha": 2.2, "by_alpha_stderr": 2 * BAR}
    numbers |= {"algorithmic": 0.11, "algorithmic_stderr": 0.1 * BAR, "error": 0.5, "error_stderr": 0.01}
    assert {name: report[name] for name in numbers} == pytest.approx(numbers) and np.isnan(report["ended_at"])
    assert (report["event"], report["place"], report["side"], report["reason"]) == ("weak_recovery", "inside", None, "")
    assert report["algorithmic_sensitivities"]["lam"] == 2 * report["sensitivities"]["lam"] == 2.0
    assert [branch["branch"] for branch in report["branches"]] == ["semantic"]
    page = [" ".join(line.split()) for line in quantity.summary().splitlines()]
    assert page[:4] == [
        "weak_recovery at alpha = 1.10(13): converged",
        "algorithmic 0.110(13) from here on by message passing from a random start",
        "d/dalpha 2.20(26)",
        "d/dlam 1.0(13) algorithmic: 2.0(26)",
    ]
    assert {"error 0.500(10)", "place inside", "from here on; the states there:"} < set(page)
    assert not any(line.startswith(("side", "ended_at")) for line in page)
    assert any(line.startswith("d/dmixing [[1.0(13), 1.0(13)],") for line in page)


@pytest.mark.parametrize(("note", "reason"), [("", "it does not happen"), ("the branch ends", "the branch ends")])
def test_a_quantity_that_was_not_found_says_why(note, reason):
    absent = Quantity.of_existing(jnp.array([jnp.nan, jnp.nan, 1.0]), event="x", meaning="a thing", note=note)
    assert absent.status_name == "absent" and np.isnan(absent.value) and np.isnan(absent.stderr)
    assert absent.summary().strip() == f"x (a thing): not found, as {reason}" and absent.reason == reason
    with pytest.raises(ta.InputError, match=f"x must have a state, but {reason}"):
        _ = absent.state


def test_a_quantity_of_half_of_the_replicates():
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
