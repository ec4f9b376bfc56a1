"""A branch followed from one setting to the next: the step that grids and curves share."""

import csv
import json
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.results import Status
from tiedattn_jax.model.overlaps import BRANCHES, order_size
from tiedattn_jax.phases.follow import Follower, WarmStart, pair_free, pair_start, predict, update
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.solve import Problem


@pytest.fixture
def state(semantic_states):
    return semantic_states


SEMANTIC, UNINFORMED = np.array([1.0, 0.0]), np.zeros(2)


def changed(state, **changes):
    """A state with some of its numbers changed, in all replicates."""
    for name, value in changes.items():
        part = operator.attrgetter(f"diagnostics.{name}" if hasattr(state.diagnostics, name) else name)
        state = eqx.tree_at(part, state, jnp.full_like(part(state), value))
    return state


def scaled(state, theta=1.0, q=1.0):
    return eqx.tree_at(
        lambda s: (s.overlaps.theta, s.overlaps.q), state, (theta * state.overlaps.theta, q * state.overlaps.q)
    )


@pytest.fixture
def search(model, state, monkeypatch, unchecked):
    """A search whose solves return given states: it returns its state and the solved problems with their starts.

    The search gets `continued` from the expected state, `uninformed` on the uninformed branch, and `restarted` from the
    branch's own start.
    """

    def run(continued, uninformed=None, restarted=None, *, free=SEMANTIC, lost=False, settings=None):
        start, options, solved = BRANCHES["semantic"].start(model), ta.Settings() if settings is None else settings, []

        def solve_replicates(problem, x):
            solved.append((problem, x))
            if x is start:
                return made.finished_path(restarted)
            is_first = len(solved) == 1 and not lost
            np.testing.assert_array_equal(problem.free, free if is_first else UNINFORMED)
            assert x is state.overlaps and problem.settings is options
            return made.finished_path(continued if is_first else uninformed)

        monkeypatch.setattr(Problem, "solve_replicates", solve_replicates)
        path = Follower("rule", options, free, start).search(model, 2.0, state.overlaps, lost)
        result = run_one(path)
        assert all(p.model is model and p.alpha == 2.0 and p.nodes == "rule" for p, _ in solved)
        return result, solved

    return run


@pytest.fixture
def settled(search):
    """The status of a search with given states, and the number of states that it takes."""

    def run(*states, **options):
        result, solved = search(*states, **options)
        return int(result.status[0]), len(solved)

    return run


LOST = {"status": Status.max_steps, "residual": 1.0}


def test_a_state_near_the_expected_one_is_accepted(model, state, search, settled):
    assert search(state)[0] is state
    assert settled(state) == (Status.converged, 1)
    lost = changed(state, **LOST)
    assert settled(lost, changed(state, growth_theta=0.95)) == (Status.absent, 2)
    half = eqx.tree_at(lambda s: (s.status, s.residual), state, (jnp.array([0, 0, 2, 2]), jnp.array([0.0, 0, 1, 1])))
    assert search(half)[0] is half and len(search(half)[1]) == 1  # half of the replicates is enough
    quarter = eqx.tree_at(lambda s: (s.status, s.residual), state, (jnp.array([0, 2, 2, 2]), jnp.array([0.0, 1, 1, 1])))
    assert settled(quarter, changed(state, growth_theta=0.95)) == (Status.absent, 2)


def test_a_small_order_parameter_is_compared_with_the_uninformed_state(model, state, search, settled):
    size = float(jnp.mean(jax.vmap(lambda x: order_size(model, x, SEMANTIC))(state.overlaps)))
    stable, unstable = (changed(state, growth_theta=growth) for growth in (0.99, 1.01))
    for share, looks in ((0.22, 1), (0.18, 2)):  # as a share of the largest possible order parameter
        small = scaled(state, theta=share / size)
        assert settled(small, unstable) == (Status.converged, looks)
        assert search(small, unstable)[0] is small
        assert settled(small, stable) == (Status.absent if looks == 2 else Status.converged, looks)


def test_absent_where_nothing_grows_on_the_uninformed_state(state, search, settled):
    lost = changed(state, **LOST)
    for growth, expected in ((0.99, (Status.absent, 2)), (1.01, (Status.converged, 3))):  # growth of theta
        assert settled(lost, changed(state, growth_theta=growth), state) == expected
    result, _ = search(lost, changed(state, growth_theta=0.5), state)
    np.testing.assert_array_equal(result.diagnostics.growth_theta, 0.5)  # the uninformed state under that name
    assert settled(lost, changed(state, growth_m=0.5, growth_theta=1.5), state)[1] == 3  # m is another order parameter
    # Unresolved nodes say nothing about growth.
    for share, looks in ((0.04, 2), (0.06, 3)):
        assert settled(lost, changed(state, growth_theta=0.95, unresolved=share), state)[1] == looks
    # An uninformed state that does not settle says nothing about growth, either.
    assert settled(lost, changed(state, growth_theta=0.5, **LOST), state) == (Status.converged, 3)


def test_a_student_that_shrinks_to_nothing_is_absent(model, state, settled):
    lost, rho = changed(state, **LOST), float(model.rho.mean())
    grows = changed(state, growth_theta=1.5)

    def small(q, **changes):
        return changed(eqx.tree_at(lambda s: s.overlaps.q, state, jnp.full_like(state.overlaps.q, q * rho)), **changes)

    for q, status in ((0.008, Status.absent), (0.012, Status.max_steps)):
        assert settled(lost, grows, small(q, **LOST)) == (status, 3)
        assert settled(lost, small(q, growth_theta=1.5, **LOST), lost) == (status, 2 if q < 0.01 else 3)
    assert settled(lost, grows, small(0.008)) == (Status.converged, 3)  # a state in its own right, however small
    assert settled(lost, grows, small(0.008, unresolved=0.06, **LOST)) == (Status.max_steps, 3)


def test_where_the_branch_is_not_expected_the_uninformed_state_comes_first(state, search, settled):
    assert settled(None, changed(state, growth_theta=0.5), lost=True) == (Status.absent, 1)
    assert settled(None, changed(state, growth_theta=1.5), state, lost=True) == (Status.converged, 2)
    assert settled(None, changed(state, growth_theta=1.5), state, lost=True, free=UNINFORMED) == (Status.converged, 2)


def test_a_branch_without_an_order_parameter_is_never_absent(state, settled):
    """A branch without an order parameter is never absent: it is, or may be, the uninformed state itself."""
    lost = changed(state, **LOST)
    gone = changed(eqx.tree_at(lambda s: s.overlaps.q, state, 0 * state.overlaps.q), growth_theta=0.5, **LOST)
    for free in (UNINFORMED, np.ones(2)):
        assert settled(scaled(state, theta=0.01), free=free) == (Status.converged, 1)
        assert settled(lost, None, state, free=free) == (Status.converged, 2)
        assert settled(lost, None, gone, free=free) == (Status.max_steps, 2)


def test_the_stages_of_a_search(model, state, search):
    """A search tries the expected state, then the uninformed branch, then the branch's own start with damped steps.

    The test checks the settings of each stage.
    """
    lost, grows = changed(state, **LOST), changed(state, growth_theta=1.05)
    for warm_steps, steps in ((5, 60), (200, 200)):
        settings = ta.Settings(tol=3e-4, max_steps=11, warm_steps=warm_steps, damping=0.3)
        _, solved = search(lost, grows, state, settings=settings)
        assert [p.free.tolist() for p, _ in solved] == [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        assert [int(p.settings.warm_steps) for p, _ in solved] == [warm_steps, warm_steps, steps]
        for p, _ in solved:
            assert [float(a) for a in (p.settings.tol, p.settings.max_steps, p.settings.damping)] == [3e-4, 11, 0.3]


@pytest.mark.usefixtures("unchecked")
def test_a_step_starts_from_the_prediction_and_is_learnt(model, state, monkeypatch):
    """`Follower.advance` starts from the secant prediction and learns the state that is found.

    It also tells the search whether the branch was lost.
    """
    requests = []

    def finder(self, *arguments):
        requests.append(arguments)
        return made.finished_path(state)

    monkeypatch.setattr(Follower, "search", finder)
    warm = WarmStart(scaled(state, theta=0.98).overlaps, state.overlaps, np.zeros(4), np.ones(4), np.full(4, 2))
    for count in (2, -2):
        warm = warm._replace(count=np.full(4, count))
        after, result = run_one(Follower("rule", ta.Settings(), SEMANTIC, None).advance(model, 1.7, 2.0, warm))
        assert result is state and requests[-1][:2] == (model, 1.7) and requests[-1][3] is (count < 0)
        np.testing.assert_allclose(requests[-1][2].theta, 1.02 * state.overlaps.theta)
        np.testing.assert_array_equal((after.value_before, after.value), [[1.0] * 4, [2.0] * 4])
        np.testing.assert_array_equal(after.before.theta, state.overlaps.theta)


def test_the_pair(model):
    np.testing.assert_array_equal(pair_free(model), [[0.0, 1.0], [1.0, 0.0]])
    positional, semantic = pair_start(model)
    assert not positional.theta.any() and positional.m.all() and semantic.theta.all() and not semantic.m.any()


def test_the_uninformed_branch_is_there_at_every_alpha(model, lines):
    curve = ta.sweep(model, "uninformed", alpha=[0.3, 0.5], nodes=lines)
    assert curve.found.all() and {p.label for p in curve.points} == {"uninformed"}


def test_prediction_is_the_secant(model, state):
    x = state.overlaps
    warm = WarmStart(scaled(state, theta=0.98).overlaps, x, jnp.full(4, 0.5), jnp.ones(4), jnp.full(4, 2))
    ahead = predict(model, warm, 1.5)
    np.testing.assert_allclose(ahead.theta, 1.02 * x.theta)
    absent = warm._replace(count=jnp.full(4, -2))  # two uninformed states in a row
    np.testing.assert_array_equal(predict(model, absent, 1.5).theta, ahead.theta)
    for variant in (
        warm._replace(count=jnp.ones(4, int)),  # only one state
        warm._replace(count=-jnp.ones(4, int)),
        warm._replace(before=scaled(state, theta=3.0).overlaps),  # theta would change sign
        warm._replace(before=scaled(state, q=3.0).overlaps),  # q would become negative
    ):
        np.testing.assert_array_equal(predict(model, variant, 1.5).theta, x.theta)
    mixed = predict(model, warm._replace(count=np.array([2, 1, 2, -1])), 1.5).theta  # every replicate for itself
    np.testing.assert_allclose(mixed, x.theta * np.array([1.02, 1, 1.02, 1])[:, None, None, None])


def test_a_replicate_that_lost_the_branch_joins_the_others(model, state):
    warm = WarmStart.begin(BRANCHES["semantic"].start(model), 0.0, 4)
    partial = eqx.tree_at(lambda s: s.status, state, jnp.array([0, 0, 0, int(Status.left_domain)]))
    after = update(warm, 1.0, partial)
    np.testing.assert_allclose(after.last.q[3], partial.overlaps.q[:3].mean(0))
    np.testing.assert_array_equal(after.count, [2, 2, 2, 1])
    absent = eqx.tree_at(lambda s: s.status, state, jnp.full(4, int(Status.absent)))
    lost_once = update(warm, 1.0, absent)
    lost_twice = update(lost_once, 2.0, absent)
    returned = update(lost_twice, 3.0, state)
    for after, count in ((lost_once, -1), (lost_twice, -2), (update(lost_twice, 3.0, absent), -2), (returned, 1)):
        np.testing.assert_array_equal(after.count, count)
        assert after.was_absent is (count < 0)
    failed = eqx.tree_at(lambda s: s.status, state, jnp.full(4, int(Status.nonfinite)))
    np.testing.assert_array_equal(update(warm, 1.0, failed).value, warm.value)


def test_a_learnt_state_is_the_last(model, state):
    start = BRANCHES["semantic"].start(model)
    first = WarmStart.begin(start, 0.5, 4)
    np.testing.assert_array_equal((first.value_before, first.value, first.count), [[-0.5] * 4, [0.5] * 4, [1] * 4])
    assert WarmStart.begin(state.overlaps, 0.5, 4).last is state.overlaps  # one start per replicate
    after = update(first, 1.0, state)
    np.testing.assert_array_equal(after.last.q, state.overlaps.q)
    np.testing.assert_array_equal(after.before.q, jnp.broadcast_to(start.q, after.before.q.shape))
    np.testing.assert_array_equal((after.value_before, after.value, after.count), [[0.5] * 4, [1.0] * 4, [2] * 4])


def curve():
    """Two points in sigma, of which the second has no state."""
    state = made.fixed_point(scatter=(0.0, 1e-3, -1e-3, 2e-3))
    gone = made.fixed_point(status=jnp.full(4, int(ta.Status.absent)))
    return Table("semantic", ("sigma",), (np.array([0.5, 0.6]),), (state, gone))


def test_a_curve_as_a_table(tmp_path):
    line, state = curve(), curve().cells[0]
    first, second = line.table()
    assert list(first) == list(second) and all(np.ndim(value) == 0 for value in first.values())
    assert (first["sigma"], first["alpha"], first["branch"], first["exists"]) == (0.5, 2.0, "semantic", True)
    assert first["train_loss"] == float(state.train_loss) and first["theta_0"] == first["theta_1"] == float(state.theta)
    assert first["train_loss_stderr"] == float(state.stderr.train_loss) > 0
    assert (second["exists"], second["status"]) == (False, "absent") and np.isnan(second["train_loss"])
    assert line.stderr("q").shape == (2,) and line.stderr("theta")[0] > 0 and np.isnan(line.stderr("theta")[1])
    expected = float(ta.error_bar(state.replicates.overlaps.theta.mean((1, 2, 3))))
    np.testing.assert_allclose(
        line.stderr("theta")[0], expected, rtol=1e-12
    )  # of the scalar, which is a mean over tokens
    text = line.to_csv(tmp_path / "curve.csv")
    assert (tmp_path / "curve.csv").read_text() == text and line.to_csv() == text
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == 2 and float(rows[0]["theta_1"]) == first["theta_1"] and rows[1]["status"] == "absent"


def test_a_curve_as_a_dataset():
    pytest.importorskip("xarray")
    line = curve()
    data = line.to_xarray()
    assert data.theta.dims == ("sigma", "token", "column", "teacher_column") and data.train_loss.dims == ("sigma",)
    point = data.sel(sigma=0.5)
    assert float(point.train_loss) == float(line.cells[0].train_loss) and bool(point.exists)
    assert float(point.gen_error_stderr) == float(line.cells[0].stderr.gen_error)
    assert np.isnan(data.sel(sigma=0.6).q).all() and not data.sel(sigma=0.6).exists
    assert int(data.sel(sigma=0.6).status) == ta.Status.absent and "absent" in data.status.flag_meanings
    assert json.loads(data.attrs["question"]) == "semantic" and data.branch.values.tolist() == ["semantic"] * 2
