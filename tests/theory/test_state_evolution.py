"""State evolution in time against message passing, fixed points, and finite differences."""

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from problems import rule

import tiedattn_jax as ta
from tiedattn_jax.base.arrays import indexed

STEPS = 5  # jax keeps a program for every number of steps
WEAK = ta.DotProduct(lam=0.1)


def start_of(theta=0.1, m=0.16):
    return made.overlaps_of(0.11, 1.25, theta, m)


def evolved(alpha=2.0, start=None, branch=None):
    return ta.state_evolution(WEAK, alpha, start or start_of(), STEPS, branch=branch, nodes=rule("points"))


@pytest.mark.full
def test_every_iteration_of_message_passing():
    """Damped messages do not follow state evolution, others do in every iteration."""
    d, model = 3000, WEAK
    data = ta.sample_data(model, d, 2.0, key=jax.random.key(3))
    along = data.encodings[0, :, None] / jnp.linalg.norm(data.encodings[0])
    Q = 0.4 * data.teacher + 0.5 * jax.random.normal(jax.random.key(5), (d, 1)) + 0.15 * d**0.5 * along
    run = ta.gamp(model, data, Q, steps=STEPS, damping=1.0)
    nodes, start = ta.Sobol(2**11, replicates=2), indexed(run.history, 0)
    theory = ta.state_evolution(ta.finite.realised(model, data), 2.0, start, STEPS, nodes=nodes).history
    for name, size in (("q", 0.11), ("V", 2.5), ("theta", 0.1), ("m", 0.2)):
        measured, predicted = (np.asarray(getattr(x, name)) for x in (run.history, theory))
        np.testing.assert_allclose(measured, predicted, atol=5 * size / d**0.5, err_msg=name)
    # The student loses the teacher and finds the encodings, with the other sign in the first iteration.
    assert np.all(np.diff(theory.theta[:, 0, 0, 0]) < 0) and theory.m[1, 0, 0] < 0 < theory.m[0, 0, 0]
    damped = ta.gamp(model, data, Q, steps=STEPS, damping=0.5).history
    assert abs(damped.theta[3, 0, 0, 0] - theory.theta[3, 0, 0, 0]) > 0.02


@pytest.mark.full
def test_other_starts_go_to_a_fixed_point():
    nodes = ta.Sobol(2**11, replicates=2).rule(WEAK)
    state = ta.solve(WEAK, 2.0, "positional", nodes, settings=ta.Settings(tol=1e-11))
    path, early = (
        ta.state_evolution(WEAK, 2.0, start_of(theta=0.0), steps, branch="positional", nodes=nodes)
        for steps in (60, 10)
    )
    assert path.status_name == path.to_dict()["status"] == "converged" and np.all(path.history.theta == 0)
    # Single nodes jump, so that the map of few nodes has several fixed points near each other.
    np.testing.assert_allclose(abs(path.history.m[-1]), abs(state.overlaps.m), rtol=5e-3)
    assert "60 iterations" in str(path) and "positional at the end: converged" in str(path)
    # A run that is cut off while it still moves says so.
    np.testing.assert_allclose(early.history.q, path.history.q[:11], rtol=1e-12)
    assert 1e-7 < np.max(np.abs(early.history.q[-1] / early.history.q[-2] - 1)) < 1e-2
    assert early.status_name == "max steps"


def test_a_fixed_point_stays():
    """It is that of `solve`, replicate by replicate; a state a thousandth beside it moves."""
    point = ta.solve(WEAK, 2.0, "positional", rule("points"), settings=ta.Settings(tol=1e-11))
    own = indexed(point.replicates.overlaps, 0)
    for factor, settles in ((1.0, True), (1.001, False)):
        start = ta.Overlaps(factor * own.q, own.V, own.theta, own.m)
        path = evolved(start=start, branch="positional").replicates.overlaps
        for name in ("q", "V", "m"):
            values = np.asarray(getattr(path, name))[0]
            np.testing.assert_allclose(values, np.broadcast_to(getattr(own, name), values.shape), rtol=1e-2)
        assert (np.max(np.abs(np.diff(np.asarray(path.q)[0], axis=0))) < 1e-6 * own.q[0, 0, 0]) == settles


@pytest.mark.full
def test_derivative_and_batch():
    def overlap(alpha):
        return evolved(alpha=alpha).history.m[-1, 0, 0]

    step = 1e-4
    difference = (overlap(2.0 + step) - overlap(2.0 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(overlap)(2.0), difference, rtol=1e-5)
    batch = jax.vmap(lambda a: evolved(alpha=a))(jnp.array([1.0, 2.0, -1.0]))
    assert batch.history.m.shape == (3, STEPS + 1, 2, 1) and batch.status.tolist() == [2, 2, ta.Status.nonfinite]
    assert np.all(np.isnan(batch.history.q[2, 1:]))  # where an alpha is out of its range
    np.testing.assert_allclose(batch.history.m[1, -1, 0, 0], overlap(2.0), rtol=1e-12)


@pytest.mark.full
def test_a_step_out_of_the_domain_has_a_status():
    """Every replicate has numbers up to its last step in the domain, and none after it."""
    nodes = ta.Sobol(2**11, replicates=2)
    path = ta.state_evolution(ta.DotProduct(lam=0.001), 2.0, start_of(), 60, branch="positional", nodes=nodes)
    known = np.isfinite(np.asarray(path.replicates.overlaps.q[:, :, 0, 0, 0]))
    assert path.status_name == "left domain"
    assert np.all(np.diff(known.astype(int), axis=1) <= 0) and np.all(known[:, 0]) and not np.any(known[:, -1])


def test_a_branch_holds_its_zeros_from_the_start():
    held, zero, named = (
        evolved(start=start, branch=branch).history
        for start, branch in ((start_of(0.1), "positional"), (start_of(0.0), "positional"), ("positional", None))
    )
    jax.tree.map(np.testing.assert_array_equal, held, zero)
    np.testing.assert_allclose(named.m[0], [[0.25], [-0.25]], atol=0.01)
    assert not np.any(held.theta) and np.all(held.m[-1])
