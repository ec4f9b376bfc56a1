"""A branch from one setting to the next: the step that grids and curves share."""

import operator
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.errors import is_concrete
from tiedattn_jax.overlaps import BRANCHES, own_size
from tiedattn_jax.phases import follow as how
from tiedattn_jax.phases.follow import Follower, Searching, Warm, learn, pair_free, pair_start, predict, settle
from tiedattn_jax.results import Status


@pytest.fixture(scope="module")
def curve(model, lines):
    return ta.sweep(model, [0.6, 0.7, 0.8, 1.1, 2.0], "semantic", lines)


def test_curve(curve, model, lines):
    np.testing.assert_allclose(curve.alphas, [0.7, 0.8, 1.1, 2.0])  # the end is met at .7, and nothing sought below
    np.testing.assert_array_equal(curve.exists, [False, True, True, True])
    assert int(curve.points[0].status) == ta.Status.absent
    assert np.all(np.diff(curve.values(lambda p: p.train_loss)[1:]) > 0)
    direct = ta.solve(model, 2.0, "semantic", lines)
    np.testing.assert_allclose(curve.points[-1].overlaps.q, direct.overlaps.q, rtol=1e-4)
    assert len(curve.plot().axes) == 3


@pytest.fixture
def state(known):
    return known


SEMANTIC = jnp.array([1.0, 0.0])
BRANCH, BARE, ANEW, DONE = range(4)


def settled(model, state, stage, *, before=None, **changes):
    """The stage after a solve at one stage ended in a state with some numbers changed."""
    for name, value in changes.items():
        part = operator.attrgetter(f"diagnostics.{name}" if hasattr(state.diagnostics, name) else name)
        state = eqx.tree_at(part, state, jnp.full_like(part(state), value))
    after = settle(model, Searching(jnp.array(stage), before or state), state, SEMANTIC)
    return int(after.stage), int(after.found.status[0])


def scaled(state, theta=1.0, q=1.0):
    return eqx.tree_at(
        lambda s: (s.overlaps.theta, s.overlaps.q), state, (theta * state.overlaps.theta, q * state.overlaps.q)
    )


def test_what_a_search_settles(model, state):
    lost = {"status": Status.max_steps, "residual": 1.0}
    assert settled(model, state, BRANCH) == (DONE, Status.converged)
    assert settled(model, state, BRANCH, **lost)[0] == BARE
    size = float(jnp.mean(jax.vmap(lambda x: own_size(model, x, SEMANTIC))(state.overlaps)))
    for share, stage in ((0.22, DONE), (0.18, BARE)):  # of the largest possible order parameter
        assert settled(model, scaled(state, theta=share / size), BRANCH)[0] == stage
    missing = eqx.tree_at(lambda s: (s.status, s.residual), state, (state.status + 2, state.residual + 1))
    for growth, status in ((0.99, Status.absent), (1.01, None)):  # of theta on the uninformed state
        stage, found = settled(model, state, BARE, before=missing, growth_theta=growth)
        assert (stage, found) == ((DONE, status) if status else (ANEW, Status.max_steps))
    # Nodes that see nothing say nothing about growth.
    for missed, stage in ((0.04, DONE), (0.06, ANEW)):
        assert settled(model, state, BARE, before=missing, growth_theta=0.95, unresolved=missed)[0] == stage
    rho = float(model.rho.mean())
    for q, status in ((0.008, Status.absent), (0.012, Status.max_steps)):  # a student that shrinks to nothing
        small = eqx.tree_at(lambda s: s.overlaps.q, state, jnp.full_like(state.overlaps.q, q * rho))
        assert settled(model, small, ANEW, **lost) == (DONE, status)


def test_the_pair(model):
    np.testing.assert_array_equal(pair_free(model), [[0.0, 1.0], [1.0, 0.0]])
    starts = pair_start(model)
    assert not starts.theta[0].any() and starts.m[0].all() and starts.theta[1].all() and not starts.m[1].any()


def test_the_uninformed_branch_is_never_absent(model, lines):
    curve = ta.sweep(model, [0.3, 0.5], "uninformed", lines)
    assert curve.exists.all() and {p.label for p in curve.points} == {"uninformed"}


def test_prediction_is_the_secant(model, state):
    x = state.overlaps
    warm = Warm(scaled(state, theta=0.98).overlaps, x, jnp.zeros(4), jnp.ones(4), jnp.full(4, 2))
    ahead = predict(model, warm, jnp.array(2.0))
    np.testing.assert_allclose(ahead.theta, 1.02 * x.theta)
    absent = eqx.tree_at(lambda w: w.count, warm, jnp.full(4, -2))  # two uninformed states in a row
    np.testing.assert_array_equal(predict(model, absent, jnp.array(2.0)).theta, ahead.theta)
    for other in (
        eqx.tree_at(lambda w: w.count, warm, jnp.ones(4, int)),  # one state only
        eqx.tree_at(lambda w: w.count, warm, -jnp.ones(4, int)),
        eqx.tree_at(lambda w: w.before, warm, scaled(state, theta=3.0).overlaps),  # theta would change its sign
        eqx.tree_at(lambda w: w.before, warm, scaled(state, q=3.0).overlaps),  # q would be negative
    ):
        np.testing.assert_array_equal(predict(model, other, jnp.array(2.0)).theta, x.theta)


def test_a_replicate_that_lost_the_branch_joins_the_others(model, state):
    warm = Warm.begin(BRANCHES["semantic"].start(model), jnp.array(0.0), 4)
    one = eqx.tree_at(lambda s: s.status, state, jnp.array([0, 0, 0, int(Status.left_domain)]))
    after = learn(warm, jnp.array(1.0), one)
    np.testing.assert_allclose(after.last.q[3], one.overlaps.q[:3].mean(0))
    np.testing.assert_array_equal(after.count, [2, 2, 2, 1])
    gone = eqx.tree_at(lambda s: s.status, state, jnp.full(4, int(Status.absent)))
    once = learn(warm, jnp.array(1.0), gone)
    twice = learn(once, jnp.array(2.0), gone)
    back = learn(twice, jnp.array(3.0), state)
    for after, count in ((once, -1), (twice, -2), (learn(twice, jnp.array(3.0), gone), -2), (back, 1)):
        np.testing.assert_array_equal(after.count, count)
    none = eqx.tree_at(lambda s: s.status, state, jnp.full(4, int(Status.nonfinite)))
    np.testing.assert_array_equal(learn(warm, jnp.array(1.0), none).place, warm.place)


def test_a_learnt_state_is_the_last(model, state):
    start = BRANCHES["semantic"].start(model)
    after = learn(Warm.begin(start, jnp.array(0.5), 4), jnp.array(1.0), state)
    np.testing.assert_array_equal(after.last.q, state.overlaps.q)
    np.testing.assert_array_equal(after.before.q, jnp.broadcast_to(start.q, after.before.q.shape))
    np.testing.assert_array_equal((after.place_before, after.place, after.count), [[0.5] * 4, [1.0] * 4, [2] * 4])


def test_the_stages_of_a_search(model, state, monkeypatch):
    """Near, then the uninformed state, then anew from the start with damped steps; what each is solved with."""
    lost = eqx.tree_at(lambda s: (s.status, s.residual), state, (state.status + 2, state.residual + 1))
    start = BRANCHES["semantic"].start(model)

    def searched(found, expected, settings):
        growth = jnp.full(4, 1.05 if expected == 3 else 0.95)
        bare = eqx.tree_at(lambda s: s.diagnostics.growth_theta, state, growth)
        calls = []

        def solve(model, alpha, nodes, xs, free, settings):
            if not is_concrete(alpha):
                return state
            calls.append((float(xs.q.mean()), float(free[0]), int(settings.warm_steps)))
            return {0.0: bare, 1.0: found if len(calls) == 3 else lost}[calls[-1][1]]

        monkeypatch.setattr(how, "solve_replicates", solve)
        follower = Follower(None, settings, SEMANTIC, jax.tree.map(lambda a: jnp.stack([a] * 4), start))
        after = follower.search(model, jnp.array(2.0), state.overlaps, jnp.array(False))
        assert len(calls) == expected
        near, far = float(state.overlaps.q.mean()), float(start.q.mean())
        steps = int(settings.warm_steps)
        assert calls == [(near, 1.0, steps), (near, 0.0, steps), (far, 1.0, max(60, steps))][:expected]
        return int(after.status[0])

    few, many = ta.Settings(warm_steps=5), ta.Settings(warm_steps=200)
    assert searched(state, 3, few) == searched(state, 3, many) == Status.converged
    assert searched(lost, 3, few) == Status.max_steps
    assert searched(state, 2, few) == Status.absent


def test_where_tracks_begin(model, lines, monkeypatch):
    """At what the coarse search found, the vanished state of an absent branch included; else at the branch's start."""
    start = BRANCHES["positional"].start(model)
    asked = []

    def coarsely(model, alpha, nodes, x, free, settings):
        if free[1] == 1:  # the positional branch; they come in threads
            asked.append(float(x.q.mean()) / float(start.q.mean()))
        moved = jax.tree.map(lambda a: 2 * a, start)
        return SimpleNamespace(status=jnp.array([0, 2, 6, 0])[int(alpha)], overlaps=moved)

    monkeypatch.setattr(how, "solve_coarsely", coarsely)
    models = jax.tree.map(lambda a: jnp.stack([a] * 4), model)
    near = how._first_cells(models, jnp.arange(4.0), lines, ta.Settings())
    np.testing.assert_allclose(near.q[0].mean((1, 2, 3)) / start.q.mean(), [2, 1, 2, 2])
    np.testing.assert_allclose(asked, [1, 2, 1, 1])  # from the row before, if the branch was there


def test_damped_steps_are_for_the_first_point(model, state, lines, monkeypatch):
    seen = []

    def search(self, model, alpha, near, lost):
        seen.append((int(self.settings.warm_steps), float(self.settings.tol), float(near.theta.mean())))
        return state

    monkeypatch.setattr(Follower, "search", search)
    curve = ta.sweep(model, [1.0, 3.0, 2.0], "semantic", lines, settings=ta.Settings(tol=1e-3, warm_steps=7))
    np.testing.assert_array_equal(curve.alphas, [1.0, 2.0, 3.0])
    first, last = (float(x.theta.mean()) for x in (BRANCHES["semantic"].start(model), state.overlaps))
    np.testing.assert_allclose(seen, [(7, 1e-3, first), (0, 1e-3, last), (0, 1e-3, last)])


def test_a_sweep_stops_beyond_the_end(model, lines, monkeypatch):
    """Not before the branch was met, and with the first point at which it is not there any more."""
    there = {6.0: False, 5.0: False, 4.0: True, 3.0: True, 2.0: False, 1.0: True}

    def walk(model, alphas, *_):
        return (SimpleNamespace(alpha=a, exists=there[a], size=10 * a) for a in alphas)

    monkeypatch.setattr(how, "walk", walk)
    curve = ta.sweep(model, list(there), "semantic", lines)
    np.testing.assert_array_equal(curve.alphas, [2.0, 3.0, 4.0, 5.0, 6.0])
    for size in (lambda p: p.size, "size"):
        np.testing.assert_array_equal(curve.values(size), [np.nan, 30.0, 40.0, np.nan, np.nan])


def test_the_room_of_a_track(model):
    """Sixteen cells, or the next power of two; what is behind the last cell is a copy of it."""
    for cells, room in ((1, 16), (16, 16), (17, 32), (33, 64)):
        each = jnp.arange(2.0 * cells).reshape(2, cells)
        models = jax.tree.map(lambda a, cells=cells: jnp.broadcast_to(a, (2, cells, *a.shape)), model)
        longer = how._with_room(
            how.Track(models, each, each, pair_start(model), pair_start(model), pair_free(model)), cells
        )
        assert longer.alphas.shape == longer.models.sigma.shape == (2, room)
        np.testing.assert_array_equal(longer.places[:, :cells], each)
        np.testing.assert_array_equal(longer.places[:, cells:], np.repeat(each[:, -1:], room - cells, 1))
