"""Relations between trajectories of one-pass gradient descent: units, signs, pieces, replicates and seeds."""

import inspect
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

import tiedattn_jax as ta
from tiedattn_jax.theory.quantities import Quantity

pytestmark = pytest.mark.usefixtures("fast_compilation")

DRAWN = settings(max_examples=5, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
STARTS = st.tuples(st.floats(0.3, 0.8), st.floats(-0.3, 0.3), st.floats(-0.3, 0.3))


# Rules are no fixtures: hypothesis would print all their nodes.
@cache
def grid(replicates=2):
    return ta.GaussHermite(6, replicates=replicates).rule(ta.DotProduct())


def path(model, start, eta=1.0, until=12.0, kappa=0.005, nodes=None):
    return ta.sgd(model, start, eta, until, kappa=kappa, nodes=nodes or grid(), points=5, steps=2)


def numbers(path):
    """Moments and error at all times in every replicate."""
    s = path.replicates.moments
    return s.R, s.Theta, s.M, path.replicates.student.gen_error


def assert_paths(first, second, *factors):
    for a, b, factor in zip(numbers(first), numbers(second), factors, strict=True):
        np.testing.assert_allclose(a, factor * b, rtol=1e-9, atol=1e-12)


@DRAWN
@given(STARTS, st.sampled_from([(1, -1), (-1, 1), (-1, -1)]), st.floats(0.25, 0.4))
def test_the_mirrored_student(start, signs, omega):
    """A grid has the parity of the loss: students that differ in the signs of Theta or m stay mirrored."""
    (R, Theta, m), (s, p), model = start, signs, ta.DotProduct(omega)
    assert_paths(path(model, (R, s * Theta, p * m), nodes=grid(1)), path(model, start, nodes=grid(1)), 1, s, p, 1)


@pytest.mark.parametrize(
    ("times", "status", "mean"),
    [
        ([1.0, 2.0, 3.0, 6.0], "converged", 3.0),
        ([1.0, 3.0, np.nan, np.nan], "converged", 2.0),
        ([np.nan, 3.0, np.nan, np.nan], "absent", np.nan),
    ],
)
def test_a_time_is_the_mean_over_the_replicates_in_which_the_event_happens(times, status, mean):
    """It exists if the event happens in half of the replicates."""
    crossing, finite = (
        Quantity.of_existing(jnp.array(times), name="t", event="x"),
        np.array([t for t in times if np.isfinite(t)]),
    )
    assert crossing.status_name == status
    np.testing.assert_equal(float(crossing.t), mean)
    if status == "converged":
        np.testing.assert_allclose(crossing.stderr, ta.error_bar(jnp.asarray(finite)), rtol=1e-12)


def test_events_are_opposite():
    """Where the one projection overtakes the other, their order has changed; the opposite event is not there."""
    student = path(ta.DotProduct(omega=0.9), (0.5, 0.2, 0.15), until=60.0, nodes=grid(1))
    larger = np.asarray(student.mean.along_encodings > student.mean.along_teacher)
    time = float(student.crossing("m overtakes theta").t)
    np.testing.assert_array_equal(larger, np.asarray(student.t) > time)
    assert not larger[0] and larger[-1] and student.crossing("theta overtakes m").status_name == "absent"


@DRAWN
@given(STARTS)
def test_a_path_in_two_pieces(start):
    """A trajectory that continues at the end of another one ends where one run does."""
    model = ta.DotProduct()
    whole = path(model, start, until=12.0, nodes=grid(1))
    second = path(model, path(model, start, until=6.0, nodes=grid(1)), until=6.0, nodes=grid(1))
    for a, b in zip(numbers(second), numbers(whole), strict=True):
        np.testing.assert_allclose(a[:, -1], b[:, -1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "emergence"])
def test_error_bars_are_the_scatter_over_seeds(kind):
    """Error bars of four replicates agree with the scatter of their means over eight seeds, within a factor of 3."""
    model, ends = ta.DotProduct(), []
    for seed in range(8):
        nodes = ta.Sobol(2**8, seed=seed, replicates=4).rule(model)
        if kind == "sgd":
            s = path(model, (0.5, 0.15, 0.15), nodes=nodes).replicates.moments
            ends.append(jnp.stack([a[:, -1].ravel() for a in (s.R, s.Theta, s.M[..., :1])], 1))
        else:
            run = ta.emergence(model, 0.5, 1.0, 12.0, nodes=nodes, points=5, steps=1).replicates.fluctuations
            ends.append(jnp.stack([run.encodings[:, -1], run.teacher[:, -1], run.R[:, -1, 0, 0]], 1))
    bars = np.sqrt(np.mean([ta.error_bar(e) ** 2 for e in ends], 0))
    scatter = np.std([np.mean(e, 0) for e in ends], 0, ddof=1)
    assert np.all(scatter > 1e-6) and np.all((bars / scatter > 1 / 3) & (bars / scatter < 3)), (bars, scatter)


DEFAULTS = {
    "sgd": {"kappa": 0.0, "nodes": None, "points": 101, "steps": None, "progress": None},
    "emergence": {"kappa": 0.0, "orthogonal": False, "nodes": None, "points": 51, "steps": None, "progress": None},
    "population": {"kappa": 0.0, "branch": "semantic", "nodes": None},
    "landscape": {"kappa": 0.0, "size": None, "nodes": None},
    "small_start": {"nodes": None},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_endless_data_have_no_ridge_by_default(name):
    """Other arguments have defaults, too."""
    parameters = inspect.signature(getattr(ta, name)).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == DEFAULTS[name]
