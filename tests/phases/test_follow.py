"""A branch followed from one setting to the next: the step that grids and curves share."""

import dataclasses

import jax
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.base.results import Status
from tiedattn_jax.model.overlaps import order_size
from tiedattn_jax.phases.follow import Follower, WarmStart, predict, update
from tiedattn_jax.theory.setting import branch_start

SEMANTIC, UNINFORMED, SETTINGS = np.array([1.0, 0.0]), np.zeros(2), ta.Settings()
CONVERGED, ABSENT, MAX_STEPS = Status.converged, Status.absent, Status.max_steps


@pytest.fixture(scope="module")
def state(semantic_states):
    return jax.tree.map(np.asarray, semantic_states)


@pytest.fixture(scope="module")
def rule(model):
    return ta.Lines(3).rule(model)


def changed(state, **changes):
    """A state with some of its numbers changed, in all replicates or in each of them."""
    parts = {"": {}, "diagnostics": {}, "overlaps": {}}
    for name, value in changes.items():
        owner = next((part for part in ("diagnostics", "overlaps") if hasattr(getattr(state, part), name)), "")
        old = getattr(getattr(state, owner) if owner else state, name)
        parts[owner][name] = np.broadcast_to(value, old.shape) + np.zeros_like(old)
    inner = {name: dataclasses.replace(getattr(state, name), **parts[name]) for name in ("diagnostics", "overlaps")}
    return dataclasses.replace(state, **parts[""], **inner)


def scaled(state, theta=1.0, q=1.0):
    return changed(state, theta=theta * state.overlaps.theta, q=q * state.overlaps.q)


LOST, STABLE, GROWS = {"status": MAX_STEPS, "residual": 1.0}, {"growth_theta": 0.5}, {"growth_theta": 1.5}
NOWHERE, BOTH = {"lost": True}, np.ones(2)
# Each row has the states that are found near the expected state, uninformed, and from the start of the branch, None
# where nothing is searched; options; status and number of searches. `share` is the order parameter over the largest
# one, `kept` is q over rho.
SEARCHES = [
    ({}, None, None, {}, CONVERGED, 1),
    ({"status": [0, 0, 2, 2], "residual": [0, 0, 1, 1]}, None, None, {}, CONVERGED, 1),  # half of the replicates do
    ({"status": [0, 2, 2, 2], "residual": [0, 1, 1, 1]}, STABLE, None, {}, ABSENT, 2),
    # A small order parameter is compared with the uninformed state.
    ({"share": 0.22}, None, None, {}, CONVERGED, 1),
    ({"share": 0.18}, {"growth_theta": 1.01}, None, {}, CONVERGED, 2),
    ({"share": 0.18}, {"growth_theta": 0.99}, None, {}, ABSENT, 2),
    # The branch is absent where nothing grows on the uninformed state.
    (LOST, {"growth_theta": 0.99}, None, {}, ABSENT, 2),
    (LOST, {"growth_theta": 1.01}, {}, {}, CONVERGED, 3),
    (LOST, {"growth_theta": 1.5, "growth_m": 0.5}, {}, {}, CONVERGED, 3),  # m is another order parameter
    (LOST, {"growth_theta": 0.95, "unresolved": 0.04}, None, {}, ABSENT, 2),
    (LOST, {"growth_theta": 0.95, "unresolved": 0.06}, {}, {}, CONVERGED, 3),  # such nodes say nothing about growth
    (LOST, {**STABLE, **LOST}, {}, {}, CONVERGED, 3),  # nor does a state that does not settle
    # So is one whose student shrinks to nothing.
    (LOST, GROWS, {"kept": 0.008, **LOST}, {}, ABSENT, 3),
    (LOST, GROWS, {"kept": 0.012, **LOST}, {}, MAX_STEPS, 3),
    (LOST, {"kept": 0.008, **GROWS, **LOST}, None, {}, ABSENT, 2),
    (LOST, {"kept": 0.012, **GROWS, **LOST}, LOST, {}, MAX_STEPS, 3),
    (LOST, GROWS, {"kept": 0.008}, {}, CONVERGED, 3),  # a state in its own right, however small
    (LOST, GROWS, {"kept": 0.008, "unresolved": 0.06, **LOST}, {}, MAX_STEPS, 3),
    # Where the branch is not expected the uninformed state comes first.
    (None, STABLE, None, NOWHERE, ABSENT, 1),
    (None, GROWS, {}, NOWHERE, CONVERGED, 2),
    (None, GROWS, {}, {"free": UNINFORMED, **NOWHERE}, CONVERGED, 2),
    # A branch without an order parameter is, or may be, the uninformed state itself: it is never absent.
    *(({"theta": 1e-3}, None, None, {"free": free}, CONVERGED, 1) for free in (UNINFORMED, BOTH)),
    *((LOST, None, {}, {"free": free}, CONVERGED, 2) for free in (UNINFORMED, BOTH)),
    *((LOST, None, {"q": 0.0, **STABLE, **LOST}, {"free": free}, MAX_STEPS, 2) for free in (UNINFORMED, BOTH)),
]


@pytest.mark.parametrize(("continued", "uninformed", "restarted", "options", "status", "count"), SEARCHES)
def test_where_a_branch_is_absent(model, state, rule, continued, uninformed, restarted, options, status, count):
    start, searches = branch_start(model, "semantic"), []
    free, lost = options.get("free", SEMANTIC), options.get("lost", False)

    def found(numbers):
        numbers = dict(numbers)
        if "share" in numbers:
            size = order_size(model, indexed(state.overlaps, 0), SEMANTIC)
            numbers["theta"] = numbers.pop("share") / float(size) * state.overlaps.theta
        if "kept" in numbers:
            numbers["q"] = numbers.pop("kept") * float(model.rho.mean())
        return changed(state, **numbers)

    def answer(lane):
        far = float(lane.start.theta[0, 0, 0]) == float(start.theta[0, 0, 0])
        if lane.replicate == 0:
            searches.append(lane)
        is_first = len(searches) == 1 and not lost
        assert far or lane.setting.free.tolist() == (free if is_first else UNINFORMED).tolist()
        return indexed(found(restarted if far else continued if is_first else uninformed), lane.replicate)

    path = Follower(rule, SETTINGS, free, start).search(model, np.asarray(2.0), state.overlaps, lost)
    result = made.answer_path(path, answer)
    assert (int(result.status[0]), len(searches)) == (status, count)
    if status == ABSENT and restarted is None:  # it holds the uninformed state
        np.testing.assert_array_equal(result.diagnostics.growth_theta, uninformed["growth_theta"])


def test_prediction_is_the_secant(model, state):
    x = state.overlaps
    warm = WarmStart(scaled(state, theta=0.98).overlaps, x, np.full(4, 0.5), np.ones(4), np.full(4, 2))
    ahead = predict(model, warm, 1.5)
    np.testing.assert_allclose(ahead.theta, 1.02 * x.theta)
    absent = warm._replace(count=np.full(4, -2))  # two uninformed states in a row
    np.testing.assert_array_equal(predict(model, absent, 1.5).theta, ahead.theta)
    for variant in (
        warm._replace(count=np.ones(4, int)),  # only one state
        warm._replace(count=-np.ones(4, int)),
        warm._replace(before=scaled(state, theta=3.0).overlaps),  # theta would change sign
        warm._replace(before=scaled(state, q=3.0).overlaps),  # q would become negative
    ):
        np.testing.assert_array_equal(predict(model, variant, 1.5).theta, x.theta)
    mixed = predict(model, warm._replace(count=np.array([2, 1, 2, -1])), 1.5).theta  # every replicate for itself
    np.testing.assert_allclose(mixed, x.theta * np.array([1.02, 1, 1.02, 1])[:, None, None, None])


def test_a_replicate_that_lost_the_branch_joins_the_others(model, state):
    warm = WarmStart.begin(branch_start(model, "semantic"), 0.0, 4)
    partial = changed(state, status=[0, 0, 0, Status.left_domain])
    after = update(warm, 1.0, partial)
    np.testing.assert_allclose(after.last.q[3], partial.overlaps.q[:3].mean(0))
    np.testing.assert_array_equal(after.last.q[:3], partial.overlaps.q[:3])
    np.testing.assert_array_equal(after.before.q, warm.last.q)
    np.testing.assert_array_equal((after.value_before, after.value, after.count), [[0] * 4, [1] * 4, [2, 2, 2, 1]])
    absent = changed(state, status=ABSENT)
    lost_once = update(warm, 1.0, absent)
    lost_twice = update(lost_once, 2.0, absent)
    returned = update(lost_twice, 3.0, state)
    for after, count in ((lost_once, -1), (lost_twice, -2), (update(lost_twice, 3.0, absent), -2), (returned, 1)):
        np.testing.assert_array_equal(after.count, count)
        assert after.was_absent is (count < 0)
    failed = changed(state, status=Status.nonfinite)
    np.testing.assert_array_equal(update(warm, 1.0, failed).value, warm.value)
