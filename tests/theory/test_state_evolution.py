"""State evolution in time against message passing, fixed points, and finite differences."""

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.theory import state_evolution


@pytest.fixture(scope="module")
def setting():
    model = ta.DotProduct(lam=0.1)
    return model, ta.Sobol(2**11, replicates=2).rule(model)


def start_of(theta=0.1, m=0.16):
    return made.overlaps_of(0.11, 1.25, theta, m)


@pytest.mark.long
def test_every_iteration_of_message_passing(setting):
    """Damped messages do not follow state evolution, others do in every iteration."""
    model, nodes = setting
    d, steps = 3000, 5
    data = ta.sample_data(model, d, 2.0, key=jax.random.key(3))
    along = data.encodings[0, :, None] / jnp.linalg.norm(data.encodings[0])
    Q = 0.4 * data.teacher + 0.5 * jax.random.normal(jax.random.key(5), (d, 1)) + 0.15 * d**0.5 * along
    run = ta.gamp(model, data, Q, steps=steps, damping=1.0)
    theory = ta.state_evolution(ta.realised(model, data), 2.0, indexed(run.history, 0), steps, nodes=nodes).history
    for name, size in (("q", 0.11), ("V", 2.5), ("theta", 0.1), ("m", 0.2)):
        measured, predicted = (np.asarray(getattr(x, name)) for x in (run.history, theory))
        np.testing.assert_allclose(measured, predicted, atol=5 * size / d**0.5, err_msg=name)
    # The student loses the teacher and finds the encodings, with the other sign in the first iteration.
    assert np.all(np.diff(theory.theta[:, 0, 0, 0]) < 0) and theory.m[1, 0, 0] < 0 < theory.m[0, 0, 0]
    damped = ta.gamp(model, data, Q, steps=steps, damping=0.5).history
    assert abs(damped.theta[3, 0, 0, 0] - theory.theta[3, 0, 0, 0]) > 0.02


@pytest.mark.long
def test_a_fixed_point_stays_and_others_go_to_it(setting):
    model, nodes = setting
    state = ta.solve(model, 2.0, "positional", nodes, settings=ta.Settings(tol=1e-11))
    path = ta.state_evolution(model, 2.0, state, 60, branch="positional", nodes=nodes)
    for a, b in zip(jax.tree.leaves(path.history), jax.tree.leaves(state.overlaps), strict=True):
        np.testing.assert_allclose(a, np.broadcast_to(b, a.shape), atol=1e-4)
    path = ta.state_evolution(model, 2.0, start_of(theta=0.0), 60, branch="positional", nodes=nodes)
    assert path.status_name == "converged"
    # Single nodes jump, so that the map of few nodes has several fixed points near each other.
    np.testing.assert_allclose(abs(path.history.m[-1]), abs(state.overlaps.m), rtol=5e-3)
    assert np.all(path.history.theta == 0)
    assert "60 iterations" in str(path) and "positional at the end: converged" in str(path)
    assert path.to_dict()["status"] == "converged"
    # A run that is cut off while it still moves says so.
    early = ta.state_evolution(model, 2.0, start_of(theta=0.0), 10, branch="positional", nodes=nodes)
    np.testing.assert_allclose(early.history.q, path.history.q[:11], rtol=1e-12)
    assert 1e-7 < np.max(np.abs(early.history.q[-1] / early.history.q[-2] - 1)) < 1e-2
    assert early.status_name == "max steps"


def test_derivative_and_batch(setting):
    model, nodes = setting

    def overlap(alpha):
        return ta.state_evolution(model, alpha, start_of(), 5, nodes=nodes).history.m[-1, 0, 0]

    step = 1e-4
    difference = (overlap(2.0 + step) - overlap(2.0 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(overlap)(2.0), difference, rtol=1e-5)
    batch = jax.vmap(lambda a: ta.state_evolution(model, a, start_of(), 5, nodes=nodes))(jnp.array([1.0, 2.0]))
    assert batch.history.m.shape == (2, 6, 2, 1) and batch.status.shape == (2,)
    np.testing.assert_allclose(batch.history.m[1, -1, 0, 0], overlap(2.0), rtol=1e-12)


def test_a_step_out_of_the_domain_has_a_status():
    model = ta.DotProduct(lam=0.001)
    nodes = ta.Sobol(2**11, replicates=2).rule(model)
    path = ta.state_evolution(model, 2.0, start_of(), 60, branch="positional", nodes=nodes)
    known = np.isfinite(np.asarray(path.replicates.overlaps.q[:, :, 0, 0, 0]))
    assert path.status_name == "left domain"
    # Every replicate has numbers up to its last step in the domain, and none after it.
    assert np.all(np.diff(known.astype(int), axis=1) <= 0) and np.all(known[:, 0]) and not np.any(known[:, -1])


@pytest.mark.parametrize(
    ("steps", "change", "status"),  # jax keeps a program for every number of steps and nodes
    [
        (2, {}, "converged"), (3, {"q": 1.01}, "max steps"), (4, {"V": 0.99}, "max steps"),
        (5, {"q": np.nan}, "nonfinite"), (6, {"m": np.inf}, "nonfinite"),
        (7, {"q": -1.0}, "left domain"), (8, {"V": -1.0}, "left domain"), (9, {"V": 1e-3}, "max steps"),
    ],
)  # fmt: skip
def test_status_is_that_of_the_last_iteration(model, monkeypatch, steps, change, status):
    """A map that multiplies one of the order parameters by a factor in every iteration."""

    class Factors:
        def __init__(self, *args):
            pass

        def step(self, x):
            return ta.Overlaps(**{name: a * change.get(name, 1.0) for name, a in vars(x).items()}), None

    monkeypatch.setattr(state_evolution, "Equations", Factors)
    path = ta.state_evolution(model, 2.0, start_of(), steps, nodes=ta.Sobol(2**5, replicates=3).rule(model))
    assert path.status_name == status
    for name, a in vars(path.history).items():
        is_whole = status in ("converged", "max steps")
        factors = change.get(name, 1.0) ** np.arange(steps + 1) if is_whole else [1.0, *[np.nan] * steps]
        np.testing.assert_allclose(a, np.multiply.outer(factors, a[0]), rtol=1e-12)


def test_a_branch_holds_its_zeros_from_the_start(setting):
    model, nodes = setting
    held, zero, named = (
        ta.state_evolution(model, 2.0, start, 5, branch=branch, nodes=nodes).history
        for start, branch in ((start_of(0.1), "positional"), (start_of(0.0), "positional"), ("positional", None))
    )
    jax.tree.map(np.testing.assert_array_equal, held, zero)
    np.testing.assert_allclose(named.m[0], [[0.25], [-0.25]], atol=0.01)


def test_bad_input(setting):
    model, nodes = setting
    batch = jax.tree.map(lambda a: a[None], start_of())
    for change, message in (
        ({"alpha": -1.0}, "alpha"), ({"steps": 0}, "steps"), ({"start": "semantc"}, "start must be one of"),
        ({"start": start_of(theta=3.0)}, "start"), ({"start": batch}, "start"), ({"branch": "other"}, "branch"),
    ):  # fmt: skip
        arguments = {"alpha": 2.0, "start": start_of(), "steps": 2} | change
        with pytest.raises(ta.InputError, match=message):
            ta.state_evolution(model, nodes=nodes, **arguments)


def test_the_defaults(setting, monkeypatch):
    """By default there are 30 iterations, in which all order parameters are free."""
    model, nodes = setting
    calls = []

    def iterates(model, alpha, rule, start, free, steps):
        calls.append((rule, start, free, steps))
        raise InterruptedError

    monkeypatch.setattr(state_evolution, "_iterates", iterates)
    for options in ({}, {"steps": 30, "branch": None}, {"steps": 1, "branch": "semantic"}):
        with pytest.raises(InterruptedError):
            ta.state_evolution(model, 2.0, start_of(), nodes=nodes, **options)
    assert [steps for *_, steps in calls] == [30, 30, 1] and all(rule is nodes for rule, *_ in calls)
    assert [free.tolist() for _, _, free, _ in calls] == [[1, 1], [1, 1], [1, 0]]
    assert np.any(calls[0][1].m) and not np.any(calls[2][1].m)
