"""Statuses, what counts as a state, and the error bar."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.report import picture
from tiedattn_jax.base.results import Replicated, classify, error_bar, has_state, mean_of_existing, quorum


def test_error_bars_cover():
    """Two error bars contain the true mean in 95.4 % of draws at any number of replicates, by Student's law."""
    rng = np.random.default_rng(0)
    for r in (2, 4, 16):
        draws = rng.standard_normal((r, 20000))
        inside = np.abs(draws.mean(0)) <= 2 * np.asarray(error_bar(jnp.asarray(draws)))
        np.testing.assert_allclose(inside.mean(), 0.9545, atol=0.006)
    values = np.array([[1.0, 1.0, np.nan], [2.0, np.nan, np.nan], [4.0, 2.0, np.nan], [3.0, 4.0, np.nan]])
    bars = np.asarray(error_bar(values))  # what is missing is left out
    np.testing.assert_allclose(bars[1], error_bar(np.array([1.0, 2.0, 4.0])))
    np.testing.assert_array_equal(error_bar(values[:1]), [np.inf, np.inf, np.nan])
    assert np.isnan(bars[2])


@pytest.mark.parametrize(
    ("status", "residual", "expected"),
    [
        (ta.Status.converged, 1.0, True), (ta.Status.stalled, 1.0, True), (ta.Status.max_steps, 0.099, True),
        (ta.Status.max_steps, 0.101, False), (ta.Status.left_domain, 0.0, False), (ta.Status.absent, 0.0, False),
        (ta.Status.unresolved, 0.0, False),
    ],
)  # fmt: skip
def test_there_is_a_state(status, residual, expected):
    assert bool(has_state(status, residual)) is expected


def test_nodes_that_are_not_resolved_settle_nothing():
    status = jnp.array([0, 1, 4, 6, 2, 0, 6, 0])
    unresolved = jnp.array([0.06, 0.06, 0.06, 0.06, 0.06, 0.04, 0.04, jnp.nan])
    np.testing.assert_array_equal(classify(status, unresolved), [8, 8, 8, 8, 8, 0, 6, 0])


def test_means_are_of_the_replicates_that_have_a_state():
    values = jnp.array([[1.0, 2.0], [3.0, 4.0], [100.0, np.nan]])
    np.testing.assert_allclose(mean_of_existing(values, jnp.array([True, True, False])), [2.0, 3.0])
    assert np.isnan(mean_of_existing(values, jnp.zeros(3, bool))[1])
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
    plot = picture("style.drawing", "the width against q", "left", "right", many=lambda self: [self])

    @property
    def title(self):
        return f"thing at alpha = {self.alpha:g}"

    @property
    def wide(self):
        return self.mean.width > 1

    def details(self):
        return [("wide", "", "yes" if self.wide else "no")]


@pytest.mark.parametrize("status", ta.Status)
def test_one_bad_replicate_spoils_its_lane_and_no_other(status):
    zeros = jnp.zeros((2, 3))
    result = Listed(jnp.zeros(2), Numbers(zeros, zeros, jnp.array([[0, status, 0], [0, 0, 0]])))
    assert result.status.tolist() == [status, 0] and result.ok.tolist() == [status in (0, 1), True]


@pytest.fixture
def listed():
    return Listed(jnp.array(0.5), Numbers(jnp.array([1.0, 1.2]), jnp.array([2.0, 2.0]), jnp.array([0, 1])))


def test_a_result_reports_what_it_lists(listed):
    bar = float(error_bar(jnp.array([1.0, 1.2])))
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
    batch = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), listed)
    assert batch.status_name == [listed.status_name, ta.Status.name_of(2)] and batch.mean.q.shape == (2,)
    np.testing.assert_allclose(batch.stderr.q, [bar, 2 * bar])


def test_a_picture_is_drawn_by_its_figure(listed, monkeypatch):
    from tiedattn_jax.plotting import style

    monkeypatch.setattr(style, "drawing", lambda results, *, ax, **options: (results, ax, options), raising=False)
    assert listed.plot(ax="axes", size=3) == ([listed], "axes", {"size": 3})
    assert "`plotting.style.drawing`" in Listed.plot.__doc__ and "left, right" in Listed.plot.__doc__
