"""A branch from one setting to the next: the step that grids and curves share."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.overlaps import BRANCHES, own_size
from tiedattn_jax.phases.follow import Searching, Warm, learn, predict, search, settle
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


@pytest.fixture(scope="module")
def state(curve):
    return curve.points[-1].replicates


SEMANTIC = jnp.array([1.0, 0.0])
BRANCH, BARE, ANEW, DONE = range(4)


def settled(model, state, stage, *, before=None, **changes):
    """The stage after a solve at one stage ended in a state with some numbers changed."""
    for name, value in changes.items():
        where = (lambda s: s.diagnostics.growth_theta) if name == "growth_theta" else (lambda s, n=name: getattr(s, n))
        state = eqx.tree_at(where, state, jnp.full_like(where(state), value))
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
    for growth, status in ((0.95, Status.absent), (1.05, None)):  # of theta on the uninformed state
        stage, found = settled(model, state, BARE, before=missing, growth_theta=growth)
        assert (stage, found) == ((DONE, status) if status else (ANEW, Status.max_steps))
    rho = float(model.rho.mean())
    for q, status in ((0.008, Status.absent), (0.012, Status.max_steps)):  # a student that shrinks to nothing
        small = eqx.tree_at(lambda s: s.overlaps.q, state, jnp.full_like(state.overlaps.q, q * rho))
        assert settled(model, small, ANEW, **lost) == (DONE, status)


def test_the_uninformed_branch_is_never_absent(model, lines):
    curve = ta.sweep(model, [0.3, 0.5], "uninformed", lines)
    assert curve.exists.all() and {p.label for p in curve.points} == {"uninformed"}


def test_prediction_is_the_secant(model, state):
    x = state.overlaps
    warm = Warm(scaled(state, theta=0.98).overlaps, x, jnp.zeros(4), jnp.ones(4), jnp.full(4, 2))
    ahead = predict(model, warm, jnp.array(2.0))
    np.testing.assert_allclose(ahead.theta, 1.02 * x.theta)
    for other in (
        eqx.tree_at(lambda w: w.count, warm, jnp.ones(4, int)),  # one state only
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
    np.testing.assert_array_equal(learn(warm, jnp.array(1.0), gone).count, 0)
    none = eqx.tree_at(lambda s: s.status, state, jnp.full(4, int(Status.nonfinite)))
    np.testing.assert_array_equal(learn(warm, jnp.array(1.0), none).place, warm.place)


def test_traced_and_concrete_searches_agree(model, lines):
    """The scan over a row of a grid and the loop over a curve make the same step."""
    start, free, alpha = BRANCHES["semantic"].start(model), SEMANTIC, jnp.array(0.6)
    near = jax.tree.map(lambda a: jnp.broadcast_to(a, (4, *a.shape)), start)
    arguments = model, alpha, lines, near, start, free, ta.Settings(tol=1e-4), jnp.array(True)
    one, other = search(*arguments), eqx.filter_jit(search)(*arguments)
    np.testing.assert_array_equal(one.status, other.status)
    np.testing.assert_allclose(one.train_loss, other.train_loss, rtol=1e-10)
    assert set(one.numbers()) >= {"q", "V", "theta", "m", "train_loss", "replicon", "train_loss_by_alpha"}


def test_bad_alphas(model, nodes):
    for bad in ([], [1.0, -1.0], [np.nan]):
        with pytest.raises(ValueError, match="alphas"):
            ta.sweep(model, bad, "semantic", nodes)
    with pytest.raises(ValueError, match="branch"):
        ta.sweep(model, [1.0], "lexical", nodes)
