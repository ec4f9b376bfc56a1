"""Statuses, what counts as a state, the error bar, and what a result of replicates reports."""

import copy
import pickle

import equinox as eqx
import jax
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import Average, Replicated, classify, error_bar, has_state, mean_of_existing, quorum


def test_error_bars_cover():
    """Two error bars contain the true mean in 95.4 % of draws at any number of replicates, by Student's law."""
    rng = np.random.default_rng(0)
    for r in (2, 4, 16):
        draws = rng.standard_normal((r, 20000))
        inside = np.abs(draws.mean(0)) <= 2 * np.asarray(error_bar(draws))
        np.testing.assert_allclose(inside.mean(), 0.9545, atol=0.006)
    # For two values a and b it is |a - b| / 2 times half of Student's factor 13.97; for many the standard error.
    np.testing.assert_allclose(error_bar(np.array([1.0, 3.0])), 13.968 / 2, rtol=1e-3)
    values = rng.normal(size=2000)
    np.testing.assert_allclose(error_bar(values), values.std(ddof=1) / 2000**0.5, rtol=2e-3)


def test_error_bars_of_what_is_missing():
    values = np.array([[1.0, 1.0, np.nan], [2.0, np.nan, np.nan], [4.0, 2.0, np.nan], [3.0, 4.0, np.nan]])
    bars = np.asarray(error_bar(values))  # what is missing is left out
    np.testing.assert_allclose(bars[1], error_bar(np.array([1.0, 2.0, 4.0])))
    np.testing.assert_array_equal(error_bar(values[:1]), [np.inf, np.inf, np.nan])
    assert np.isnan(bars[2]) and np.isnan(error_bar(np.array([np.nan]))) and np.isinf(error_bar(np.array([1, np.nan])))


def test_an_average_is_a_number():
    average = Average(np.asarray(1.251537), np.asarray(0.000123))
    assert float(average) == 1.251537 and f"{average:.2f}" == "1.25" and f"{average}" == str(average) == "1.25154(12)"
    with pytest.raises(TypeError):
        float(Average(np.ones(2), np.ones(2)))


def test_there_is_a_state():
    """Nodes that are not resolved settle nothing."""
    rows = {
        ta.Status.converged: (1.0, True), ta.Status.stalled: (1.0, True), ta.Status.max_steps: (0.0999, True),
        ta.Status.left_domain: (0.0, False), ta.Status.absent: (0.0, False), ta.Status.unresolved: (0.0, False),
    }  # fmt: skip
    for status, (residual, expected) in rows.items():
        assert bool(has_state(status, residual)) is expected
    assert not has_state(ta.Status.max_steps, 0.1)
    status = np.array([0, 1, 4, 6, 2, 0, 6, 0, 0])
    unresolved = np.array([0.06, 0.06, 0.0501, 0.06, 0.06, 0.05, 0.04, np.nan, 0.04])
    np.testing.assert_array_equal(classify(status, unresolved), [8, 8, 8, 8, 8, 0, 6, 0, 0])


def test_means_are_of_the_replicates_that_have_a_state():
    values = np.array([[1.0, 2.0], [3.0, 4.0], [100.0, np.nan]])
    np.testing.assert_allclose(mean_of_existing(values, np.array([True, True, False])), [2.0, 3.0])
    np.testing.assert_allclose(mean_of_existing(values, np.zeros(3, bool)), [104 / 3, np.nan])
    exists = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(quorum(exists), [True, False, True])  # half of them


class Numbers(eqx.Module):
    q: jax.Array
    width: jax.Array
    status: jax.Array


class Listed(Replicated):
    """A result that lists what it shows."""

    batch_probe = "alpha", 0
    SETTING = ("alpha",)
    SHOWN = {"q": "", "width": "in metres"}  # noqa: RUF012
    FLAGS = ("wide",)
    alpha: jax.Array
    replicates: Numbers

    title = property(lambda self: f"thing at alpha = {self.alpha:g}")
    wide = property(lambda self: self.width > 1)
    faulty = property(lambda self: self.alpha.no_such_name)

    def details(self):
        return [("wide", "", "yes" if self.wide else "no")]


@pytest.mark.parametrize("status", ta.Status)
def test_one_bad_replicate_spoils_its_entry_and_no_other(status):
    zeros, replicates = np.zeros((2, 3)), np.array([[0, status, 0], [0, 0, 0]])
    result = Listed(np.zeros(2), Numbers(zeros, zeros, replicates))
    assert result.status.tolist() == [status, 0] and result.ok.tolist() == [status in (0, 1), True]
    failed = np.where(np.arange(3) == 2, int(ta.Status.max_steps), replicates)  # does not hide it
    worst = status if status in (3, 4, 5, 7, 8, 9) else ta.Status.max_steps
    assert Listed(np.zeros(2), Numbers(zeros, zeros, failed)).status.tolist() == [worst, 2]


@pytest.fixture
def listed():
    return Listed(np.array(0.5), Numbers(np.array([1.0, 1.2]), np.array([2.0, 2.0]), np.array([0, 1])))


def test_a_result_reports_what_it_lists(listed):
    bar = float(error_bar(np.array([1.0, 1.2])))
    assert listed.to_dict() == {
        "alpha": 0.5, "q": pytest.approx(1.1), "width": 2.0, "wide": True, "status": listed.status_name,
        "stderr": {"q": pytest.approx(bar), "width": 0.0},
    }  # fmt: skip
    title, q, width, wide = str(listed).splitlines()
    assert title == "thing at alpha = 0.5: stalled at the accuracy of the averages"
    assert q.split()[:2] == ["q", "1.10(70)"] and "overlap of the student with itself" in q  # a meaning of `WORDS`
    assert width.split() == ["width", "2", "in", "metres"] and wide.split() == ["wide", "yes"]
    assert repr(listed) == "Listed(thing at alpha = 0.5; q=1.10(70), width=2; stalled at the accuracy of the averages)"
    html = listed._repr_html_()
    assert "<td style='text-align:left'>1.10(70)</td>" in html and "Listed" in html
    batch = jax.tree.map(lambda a: np.stack([a, 2 * a]), listed)
    assert batch.status_name == [listed.status_name, ta.Status.name_of(2)] and batch.mean.q.shape == (2,)
    np.testing.assert_allclose(batch.stderr.q, [bar, 2 * bar])


def test_the_numbers_of_the_mean_are_attributes(listed):
    """A result has them as it has its fields; its own properties of the same name come first."""
    assert listed.q == pytest.approx(1.1) and listed.width == 2.0 and listed.status == 1
    assert {"q", "width", "status", "alpha", "wide", "to_dict"} <= set(dir(listed))
    assert len(dir(listed)) == len(set(dir(listed)))
    pickled = pickle.loads(pickle.dumps(listed))
    for same in (copy.copy(listed), copy.deepcopy(listed), pickled, jax.jit(lambda x: x)(listed)):
        assert same == listed and same.q == listed.q
    assert jax.grad(lambda x: x.q)(jax.tree.map(lambda a: 1.0 * a, listed)).replicates.q.tolist() == [0.5, 0.5]


def test_names_that_a_result_lacks(listed):
    """They are refused in Python's own words, and a fault inside a property keeps its own."""
    for name in ("energy", "_q", "__array__"):
        assert not hasattr(listed, name)
        with pytest.raises(AttributeError, match=f"'Listed' object has no attribute '{name}'") as error:
            getattr(listed, name)
        assert error.value.name == name and error.value.obj is listed
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = listed.faulty
    # Neither a result that is being built nor one that jax filled with other things has numbers.
    filled = jax.tree.map(lambda a: None, listed, is_leaf=lambda a: isinstance(a, Numbers))
    for other in (object.__new__(Listed), filled):
        assert "to_dict" in dir(other) and "q" not in dir(other)
        with pytest.raises(AttributeError, match="'Listed' object has no attribute 'q'"):
            _ = other.q
    with pytest.raises(AttributeError, match="'Listed' object has no attribute 'replicates'"):
        _ = object.__new__(Listed).mean
