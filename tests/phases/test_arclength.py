"""Continuation in arclength on the standard model; `test_arclength_of_known_curves` follows curves in closed form."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.interpolate import CubicSpline
from toy import OneToken, descending

import tiedattn_jax as ta


def test_a_path_of_a_layer_of_one_token():
    """Every point is a state, with a residual that another program computes."""
    model = OneToken(lam=jnp.asarray(0.1), width=jnp.asarray(0.7))
    nodes = descending(ta.GaussHermite(16, replicates=1).rule(model))
    (path,) = ta.trace_branch(model, "alpha", (1.5, 2.02), None, nodes=nodes, points=3, step=0.02)
    assert path.values[-1] == 2.02 and path.ends == ("number of points", "limit of the parameter")
    assert len(path.values) == 4 and np.all(np.diff(path.values) > 0) and path.values[0] > 1.8
    assert path.states.residual.max() < 1e-6 and path.crossings == path.folds == ()
    assert len(path.plot().axes) == 2


@pytest.mark.full
def test_a_short_path(model):
    """At alpha = 2 the eigenvalues of q, V and theta that keep the symmetry of the tokens are -.983, .345 and .160."""
    rule = ta.Lines(5, replicates=1).rule(model)
    (path,) = ta.trace_branch(model, "alpha", (1.5, 2.02), nodes=rule, points=3, step=0.02)
    assert path.states.residual.max() < 1e-6 and set(path.labels) == {"semantic"}
    real = path.eigenvalues[2].real
    for expected in (-0.983, 0.345, 0.160):
        assert np.min(np.abs(real - expected)) < 0.08
    first = ta.solve(model, path.values[0], "semantic", rule, start=jax.tree.map(lambda a: a[0], path.overlaps))
    np.testing.assert_allclose(first.overlaps.q, path.overlaps.q[0], rtol=1e-4)
    np.testing.assert_allclose(first.gen_error, path.states.gen_error[0], rtol=1e-4)


@pytest.fixture(scope="module")
def rule(model):
    return ta.Lines(5, replicates=1, even=True).rule(model)


@pytest.mark.full
def test_another_branch_is_born(model, rule):
    """Another branch is born at .827, where the semantic one turns unstable towards m.

    The crossing shows only when both order parameters are free.
    """
    start = ta.solve(model, 0.85, "semantic", rule)
    (trace,) = ta.trace_branch(model, "alpha", (0.81, 0.86), None, alpha=0.85, nodes=rule, start=start, step=0.01)
    (birth,) = trace.crossings
    np.testing.assert_allclose(birth, 0.827, atol=0.015)
    assert trace.folds == () and np.any(trace.eigenvalues[:, 0].real > 1) and np.any(trace.eigenvalues[:, 0].real < 1)


@pytest.mark.full
def test_a_number_of_the_callers(model):
    """A branch through a number whose square is sigma is the branch through sigma, also where it begins elsewhere."""
    own = ta.Axis("root", 0.7, lambda m, v: eqx.tree_at(lambda m: m.sigma, m, v**2))
    at_start, nodes = eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(0.49)), ta.Lines(3, replicates=1)
    (path,) = ta.trace_branch(model, own, (0.68, 0.72), nodes=nodes, points=5)
    (expected,) = ta.trace_branch(at_start, "sigma", (0.68**2, 0.72**2), nodes=nodes, points=20)
    assert path.parameter == "root" and path.values[0] < 0.69 and path.values[-1] > 0.71
    np.testing.assert_allclose(expected.values[[0, -1]], [0.68**2, 0.72**2], rtol=1e-12)
    theta, sigma = expected.overlaps.theta[:, 0, 0, 0], expected.values
    interpolant = CubicSpline(sigma, theta)
    np.testing.assert_allclose(path.overlaps.theta[:, 0, 0, 0], interpolant(path.values**2), rtol=1e-3)


@pytest.mark.full
def test_through_a_fold(rule):
    """At omega = .235 the positional branch turns back at alpha = 2.174(1) and meets the uninformed one at 1.978."""
    model = ta.DotProduct(omega=0.235)
    (path,) = ta.trace_branch(model, "alpha", (1.8, 2.4), "positional", alpha=1.9, nodes=rule, points=30)
    folds, (fork,) = [alpha for alpha, _ in path.mean_folds()], path.pitchforks
    np.testing.assert_allclose([folds[0], fork], [2.174, 1.978], rtol=0.03)
    np.testing.assert_allclose(folds[1:], folds[:1], rtol=3e-3)  # the path continues with -m
    assert not np.any(np.isclose(np.subtract.outer(path.crossings, folds), 0, atol=0.02))  # no branch is born at a fold
    assert abs(path.pitchfork_states[0].overlaps.m[0, 0, 0]) < 0.01 < abs(path.fold_states[0].overlaps.m[0, 0, 0])
    m = path.overlaps.m[:, 0, 0]
    assert m[0] * m[-1] < 0 and abs(m[np.argmax(path.values[: len(m) // 2])]) > 0.15
    leading = path.eigenvalues[:, 0].real
    assert np.any(leading[:-1] < 1) and np.any((leading[:-1] < 1) & (leading[1:] > 1))


@pytest.mark.full
def test_branch_born_where_the_semantic_one_turns_unstable(model, rule):
    """A mixed state is born at alpha = .827 with m = 0, subcritically: above it, with a loss above the semantic one.

    The nodes keep the parity of the loss, so the fork stays a fork. The state is a saddle, which Newton's method finds.
    """
    full = [jnp.full((2, 1, 1), v, float) for v in (0.0598, 25.1, 0.0660)]
    guess = ta.Overlaps(*full, 0.05 * jnp.array([[1.0], [-1.0]]))
    states = {}
    for alpha in (0.9, 0.85):
        fp = ta.solve(model, alpha, None, rule, start=guess, settings=ta.Settings(warm_steps=0))
        assert int(fp.status) == ta.Status.converged and fp.label == "mixed"
        np.testing.assert_allclose(fp.overlaps.m[0], -fp.overlaps.m[1], rtol=1e-3)
        guess, states[alpha] = fp.overlaps, fp
        semantic = ta.solve(model, alpha, "semantic", rule, start=fp.overlaps)
        assert fp.train_loss > semantic.train_loss and float(semantic.diagnostics.growth_m) < 1
    square = {alpha: float(fp.overlaps.m[0, 0]) ** 2 for alpha, fp in states.items()}  # m^2 is linear in alpha
    birth = 0.85 - 0.05 * square[0.85] / (square[0.9] - square[0.85])
    np.testing.assert_allclose(birth, 0.827, atol=4e-3)


@pytest.mark.usefixtures("unchecked")
def test_folds_of_unequal_paths():
    paths = [SimpleNamespace(folds=f) for f in ((1.0, 2.0), (1.2, 2.2), (1.1,))]
    (first, bar), (second, _) = ta.results.BranchPath.mean_folds(*paths)
    assert (first, second) == pytest.approx((1.1, 2.1)) and bar > 0.1
    assert ta.results.BranchPath.mean_folds(SimpleNamespace(folds=())) == []
