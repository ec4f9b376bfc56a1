from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from scipy.interpolate import CubicSpline

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases import arclength
from tiedattn_jax.theory.engine import run_one


@pytest.fixture(scope="module")
def rule(model):
    return ta.Lines(5, replicates=1, even=True).rule(model)


@pytest.fixture(scope="module")
def path(model, rule):
    (branch_path,) = ta.trace_branch(model, "alpha", (1.2, 2.1), "semantic", nodes=rule, points=12)
    return branch_path


@pytest.mark.long
def test_points_are_fixed_points(path, model, rule):
    assert np.all(np.diff(path.values) > 0) and path.folds == () and set(path.labels) == {"semantic"}
    assert path.values[0] < 1.2 and path.values[-1] > 2.1 and set(path.ends) == {"limit of the parameter"}
    assert path.states.residual.max() < 1e-6
    assert len(path.plot().axes) == 2
    x = jax.tree.map(lambda a: a[1], path.overlaps)
    fixed = ta.solve(model, path.values[1], "semantic", rule, start=x)
    np.testing.assert_allclose(fixed.overlaps.q, x.q, rtol=1e-4)
    for name in ("train_loss", "gen_error", "residual"):
        np.testing.assert_allclose(getattr(fixed, name), getattr(path.states, name)[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fixed.diagnostics.replicon, path.states.diagnostics.replicon[1], rtol=1e-3)
    assert np.all(path.states.status == ta.Status.converged)


def test_eigenvalues(path):
    """At alpha = 2 the eigenvalues of q, V and theta that keep the symmetry of the tokens are -.983, .345 and .160."""
    k = np.argmin(np.abs(path.values - 2.0))
    real = path.eigenvalues[k].real
    for expected in (-0.983, 0.345, 0.160):
        assert np.min(np.abs(real - expected)) < 0.08


def test_another_branch_is_born(path, model, rule):
    """Another branch is born at .827, where the semantic one turns unstable towards m.

    The crossing shows only when both order parameters are free.
    """
    assert path.crossings == ()
    start = ta.solve(model, 0.85, "semantic", rule, start=jax.tree.map(lambda a: a[0], path.overlaps))
    (trace,) = ta.trace_branch(model, "alpha", (0.81, 0.86), None, alpha=0.85, nodes=rule, start=start, step=0.01)
    (birth,) = trace.crossings
    np.testing.assert_allclose(birth, 0.827, atol=0.015)
    assert trace.folds == () and np.any(trace.eigenvalues[:, 0].real > 1) and np.any(trace.eigenvalues[:, 0].real < 1)


def test_the_number_of_points(path, model, rule):
    start = jax.tree.map(lambda a: a[3], path.overlaps)
    (short_path,) = ta.trace_branch(
        model, "alpha", (0.5, 4.0), alpha=path.values[3], nodes=rule, start=start, points=2, step=0.01
    )
    assert len(short_path.values) == 3 and set(short_path.ends) == {"number of points"}
    assert np.ptp(short_path.values) < 0.04


@pytest.mark.long
def test_a_number_of_the_callers(model):
    """A branch through a number whose square is sigma is the branch through sigma, also where it begins elsewhere."""
    own = ta.Axis("root", 0.7, lambda m, v: eqx.tree_at(lambda m: m.sigma, m, v**2))
    at_start, nodes = eqx.tree_at(lambda m: m.sigma, model, jnp.asarray(0.49)), ta.Lines(3, replicates=1)
    (path,) = ta.trace_branch(model, own, (0.68, 0.72), nodes=nodes, points=5)
    (expected,) = ta.trace_branch(at_start, "sigma", (0.68**2, 0.72**2), nodes=nodes, points=20)
    assert path.parameter == "root" and path.values[0] < 0.69 and path.values[-1] > 0.71
    assert expected.values[0] < path.values[0] ** 2 and path.values[-1] ** 2 < expected.values[-1]
    theta, sigma = expected.overlaps.theta[:, 0, 0, 0], expected.values
    interpolant = CubicSpline(sigma, theta)
    np.testing.assert_allclose(path.overlaps.theta[:, 0, 0, 0], interpolant(path.values**2), rtol=1e-3)


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


@pytest.mark.parametrize(
    ("theta", "turn", "fork"),
    [
        ([0.2, 0.1, -0.1, -0.2], 0.0, True),  # into the mirror state
        ([-0.2, -0.1, 0.1, 0.2], 1e-4, True),
        ([0.2, 0.1, 2e-3, -0.1], 3e-3, True),  # the sign changes in the next step
        ([0.2, 0.1, 0.05, 0.15], 0.04, False),
        ([0.3, 0.2, 0.1, -0.1], 0.25, False),  # the sign changes elsewhere
        ([1e-9, -1e-9, 1e-9], 0.0, False),  # there is no theta
    ],
)
def test_a_branch_turns_into_its_mirror_image_at_a_pitchfork(model, theta, turn, fork):
    ones = jnp.ones((2, 1, 1))
    *points, there = (ta.Overlaps(ones, ones, v * ones, 0 * ones[..., 0]) for v in (*theta, turn))
    assert arclength._mirrored(model, points, there) is fork


@pytest.mark.usefixtures("unchecked")
def test_folds_of_unequal_paths():
    paths = [SimpleNamespace(folds=f) for f in ((1.0, 2.0), (1.2, 2.2), (1.1,))]
    (first, bar), (second, _) = ta.results.BranchPath.mean_folds(*paths)
    assert (first, second) == pytest.approx((1.1, 2.1)) and bar > 0.1
    assert ta.results.BranchPath.mean_folds(SimpleNamespace(folds=())) == []


def test_where_there_is_no_state_there_is_neither_path_nor_fold(model, lines):
    requests = []

    def answer(lane):
        requests.append((lane.replicate, float(lane.alpha), lane.attempts))
        return SimpleNamespace(has_state=False, status=int(ta.Status.max_steps))

    settings, x = ta.Settings(), BRANCHES["semantic"].start(model)
    setting = arclength.Setting(model, jnp.asarray(2.0), Parameter("alpha"), np.array([1.0, 0.0]))
    assert made.answer_path(arclength.fold_near(setting, lines, x, settings, (1.0, 3.0)), answer) is None
    assert requests == [(k, 2.0, 1) for k in range(4)]
    with pytest.raises(ta.InputError, match="start must be near a state, got one with status max steps"):
        made.answer_path(arclength._continuation(setting, lines, 0, x, settings), answer)


def test_a_fold_is_that_of_all_replicates(model, lines, semantic_states, monkeypatch):
    setting = arclength.Setting(model, jnp.asarray(2.0), Parameter("alpha"), np.array([1.0, 0.0]))
    states = [jax.tree.map(lambda a, k=k: a[k], semantic_states) for k in range(4)]

    def fold(lacking):
        def path(setting, nodes, number, *_):
            return made.finished_path(None if number == lacking else (2.0 + number, states[number]))

        monkeypatch.setattr(arclength, "_nearest_fold", path)
        return run_one(arclength.fold_near(setting, lines, semantic_states.overlaps, ta.Settings(), (1.0, 3.0)))

    alphas, fold_states = fold(None)
    np.testing.assert_array_equal(alphas, [2.0, 3.0, 4.0, 5.0])
    np.testing.assert_array_equal(fold_states.overlaps.q, semantic_states.overlaps.q)
    assert fold(2) is None
