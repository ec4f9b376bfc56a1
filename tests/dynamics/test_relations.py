"""Relations between trajectories of one-pass gradient descent: units, signs, pieces, replicates and seeds."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

import tiedattn_jax as ta

pytestmark = pytest.mark.usefixtures("fast_compilation")

DRAWN = settings(max_examples=5, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
STARTS = st.tuples(st.floats(0.3, 0.8), st.floats(-0.3, 0.3), st.floats(-0.3, 0.3))


# Rules are no fixtures: hypothesis would print all their nodes.
@cache
def grid(replicates=2):
    return ta.gauss_hermite_nodes(ta.dot_product(), 6, replicates=replicates)


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
    (R, Theta, m), (s, p), model = start, signs, ta.dot_product(omega)
    assert_paths(path(model, (R, s * Theta, p * m), nodes=grid(1)), path(model, start, nodes=grid(1)), 1, s, p, 1)


@DRAWN
@given(STARTS, st.floats(0.6, 1.6))
def test_units(start, c):
    """Tokens and encodings c times as large, teacher and student 1 / c times: errors are c^2 times as large."""
    R, Theta, m = start
    scaled = ta.dot_product(sigma=c * 0.5, encodings=[[c], [-c]], teacher=c**-2)
    other = path(scaled, (R / c**2, Theta / c**2, m), eta=c**-4, kappa=0.005 * c**4)
    assert_paths(other, path(ta.dot_product(), start), c**-2, c**-2, 1, c**2)


@DRAWN
@given(STARTS)
def test_a_path_in_two_pieces(start):
    """A trajectory that continues at the end of another one ends where one run does."""
    model = ta.dot_product()
    whole = path(model, start, until=12.0, nodes=grid(1))
    second = path(model, path(model, start, until=6.0, nodes=grid(1)), until=6.0, nodes=grid(1))
    for a, b in zip(numbers(second), numbers(whole), strict=True):
        np.testing.assert_allclose(a[:, -1], b[:, -1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sgd", "emergence"])
def test_error_bars_are_the_scatter_over_seeds(kind):
    """Error bars of four replicates agree with the scatter of their means over eight seeds, within a factor of 3."""
    model, ends = ta.dot_product(), []
    for seed in range(8):
        nodes = ta.sobol_nodes(model, 2**8, seed=seed, replicates=4)
        if kind == "sgd":
            s = path(model, (0.5, 0.15, 0.15), nodes=nodes).replicates.moments
            ends.append(jnp.stack([a[:, -1].ravel() for a in (s.R, s.Theta, s.M[..., :1])], 1))
        else:
            run = ta.emergence(model, 0.5, 1.0, 12.0, nodes=nodes, points=5, steps=1).replicates.fluctuations
            ends.append(jnp.stack([run.encodings[:, -1], run.teacher[:, -1], run.R[:, -1, 0, 0]], 1))
    bars = np.sqrt(np.mean([ta.error_bar(e) ** 2 for e in ends], 0))
    scatter = np.std([np.mean(e, 0) for e in ends], 0, ddof=1)
    assert np.all(scatter > 1e-6) and np.all((bars / scatter > 1 / 3) & (bars / scatter < 3)), (bars, scatter)
