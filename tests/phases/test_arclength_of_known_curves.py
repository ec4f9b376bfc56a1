"""Continuation along curves that are known in closed form: no state is solved."""

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from numpy.polynomial import Polynomial

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import COARSE
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases import arclength
from tiedattn_jax.theory.paths import Call

THETA = 0.125  # at the start of every curve, where alpha is 2
CENTRE = np.array([0.15, 0.15, 15.0, 15.0, THETA, THETA, 0.0, 0.0])  # q, V, theta and m of two tokens
FREE = np.array([1.0, 0.0])
SIZE = Polynomial([-1.0, 1 / THETA])  # theta relative to the start, less one
TWO_FOLDS = 2 * (1 + 0.3 * SIZE - SIZE**3)
FOLDS = 2 + np.array([-0.4, 0.4]) * np.sqrt(0.1)
FORK = 2.1 - 0.1 * (1 + SIZE) ** 2  # theta falls to zero at 2.1
CONSTANT = Polynomial([-0.7])
BLANK = jax.tree.map(lambda a: np.asarray(np.asarray(a)[0]), made.states(ta.DotProduct()))


class Curve:
    """A curve alpha = f(theta of the first token), along which q of the first token is linear in theta.

    The Jacobian of F is triangular in the coordinates, but for a rotation of both V. So its eigenvalues are known:
    1 - f'(theta), +-2i of both V, `second(theta)` of q of the second token, and -0.5 and -0.2 of the others.
    """

    def __init__(self, f, second=CONSTANT):
        self.f, self.second, self.lanes = f, second, []

    def eigenvalues(self, theta):
        return np.array([1 - self.f.deriv()(theta), 2j, -2j, self.second(theta), -0.5, -0.2])

    def expansion(self, u):
        """Return F(x) - x, its Jacobian, and whether x is admissible."""
        theta, alpha = u[4], u[8]
        gap = u[:8] - CENTRE
        gap[0] -= 0.2 * (theta - THETA)
        gap[5] -= theta - THETA
        diagonal = np.diag([-1.5, self.second(theta) - 1, -1.0, -1.0, 0.0, -1.2, -1.0, -1.0])
        diagonal[2, 3], diagonal[3, 2] = 2.0, -2.0
        J = np.pad(diagonal, ((0, 0), (0, 1)))
        J[0, 4], J[5, 4] = -0.2 * diagonal[0, 0], -diagonal[5, 5]
        J[1, 4] = self.second.deriv()(theta) * gap[1]
        J[4, 4], J[4, 8] = -self.f.deriv()(theta), 1.0
        r = diagonal @ gap
        r[4] = alpha - self.f(theta)
        return jnp.asarray(r), jnp.asarray(J), jnp.asarray(True)

    def answer(self, request):
        if isinstance(request, Call):
            return self.expansion(np.asarray(request.arguments[-1]))
        self.lanes.append(request)
        return dataclasses.replace(BLANK, overlaps=request.start, train_loss=np.asarray(request.alpha))

    def run(self, paths, progress=None):
        return [made.answer_path(path, self.answer) for path in paths]


@pytest.fixture
def overlaps(model):
    return arclength.Coordinates(model, jnp.asarray(FREE)).unpack(jnp.asarray(CENTRE))


@pytest.fixture(scope="module")
def rule(model):
    return ta.Lines(3, replicates=1).rule(model)


@pytest.fixture
def trace(monkeypatch, model, rule, overlaps):
    """A function that traces a known curve from alpha = 2."""

    def along(curve, limits=(1.7, 2.3), **options):
        monkeypatch.setattr(arclength, "run", curve.run)
        return ta.trace_branch(model, "alpha", limits, **{"nodes": rule, "start": overlaps, **options})

    return along


def test_a_curve_with_two_folds(trace):
    curve = Curve(TWO_FOLDS)
    (path,) = trace(curve, settings=ta.Settings(tol=1e-7))
    theta = path.overlaps.theta[:, 0, 0, 0]
    np.testing.assert_allclose(path.values, TWO_FOLDS(theta), atol=1e-5)
    np.testing.assert_allclose(path.overlaps.q[:, 0, 0, 0], 0.15 + 0.2 * (theta - THETA), rtol=1e-5)
    np.testing.assert_allclose(path.overlaps.theta[:, 1, 0, 0], theta, rtol=1e-4)
    np.testing.assert_array_equal(path.train_loss, path.values)
    assert np.all(np.diff(theta) > 0) and np.all(path.overlaps.m == 0)
    # The first value beyond a limit is the last one, on either side.
    assert path.ends == ("limit of the parameter",) * 2 and path.values[0] > 2.3 and path.values[-1] < 1.7
    assert np.all((path.values[1:-1] >= 1.7) & (path.values[1:-1] <= 2.3))
    steps = np.hypot(np.diff(theta) / THETA, np.diff(path.values) / 2)
    assert np.all(steps < 0.25) and steps.max() > 0.1 and theta[0] < THETA < theta[-1]
    np.testing.assert_allclose(path.folds, FOLDS, rtol=1e-7)
    np.testing.assert_allclose([s.train_loss[0] for s in path.fold_states], FOLDS, rtol=1e-7)
    folded = [s.overlaps.theta[0, 0, 0, 0] for s in path.fold_states]
    np.testing.assert_allclose(folded, THETA * (1 + np.sqrt(0.1) * np.array([-1, 1])), rtol=1e-6)
    assert path.pitchforks == path.pitchfork_states == path.crossings == ()
    assert path.parameter == "alpha" and set(path.labels) == {"semantic"} and len(path.labels) == len(theta)
    for t, values in zip(theta, path.eigenvalues, strict=True):
        expected = curve.eigenvalues(t)
        np.testing.assert_allclose(values.real, np.sort(expected.real)[::-1], atol=1e-4)
        np.testing.assert_allclose(np.sort(values.imag), [-2, 0, 0, 0, 0, 2], atol=1e-6)
    assert [fold for fold, _ in path.mean_folds(path)] == pytest.approx(FOLDS)
    headline = f"{len(theta)} points from alpha = {path.values[0]:g} to {path.values[-1]:g}"
    assert repr(path).startswith(f"BranchPath({headline}") and "ends" in path.summary()
    # The first state is solved. The others are evaluated where the curve is.
    firsts = [lane for lane in curve.lanes if float(lane.settings.tol) == 1e-7]
    assert [(lane.replicate, float(lane.alpha)) for lane in firsts] == [(0, 2.0)]
    for lane in curve.lanes:
        assert lane in firsts or [float(lane.settings.tol), lane.settings.max_steps, lane.settings.warm_steps] == [
            1e-4, 0, 0,
        ]  # fmt: skip
        assert lane.free.tolist() == [1.0, 0.0] and lane.attempts == 1


def test_a_curve_through_a_pitchfork(trace):
    path = trace(Curve(FORK))[0]
    assert path.folds == () and len(path.pitchfork_states) == 1
    np.testing.assert_allclose(path.pitchforks, 2.1, rtol=1e-7)
    np.testing.assert_allclose(path.pitchfork_states[0].overlaps.theta, 0, atol=1e-6)
    assert path.values[0] < 1.7 and path.values[-1] < 1.7 and set(path.labels) - {"uninformed"} == {"semantic"}


def test_another_branch_is_born_between_two_points(trace):
    """The second eigenvalue passes one at theta = .16, and again from the other side at theta = .2."""
    second = 1 + 30 * Polynomial.fromroots([0.16, 0.2])
    path = trace(Curve(Polynomial([1.5, 4.0]), second), (1.7, 2.45), step=0.02)[0]
    sides = second(path.overlaps.theta[:, 0, 0, 0]) > 1
    expected = [(a + b) / 2 for (a, b), (s, t) in zip(pairwise(path.values), pairwise(sides), strict=True) if s != t]
    assert len(expected) == 2 and path.folds == path.pitchforks == ()
    np.testing.assert_allclose(path.crossings, expected, rtol=1e-12)
    np.testing.assert_allclose(path.crossings, [1.5 + 4 * 0.16, 1.5 + 4 * 0.2], atol=0.1)


def test_the_defaults_of_a_path(trace, model, overlaps, monkeypatch):
    """By default there are two replicates, the semantic branch at alpha = 2, a first step of .05 and 200 points."""
    curve = Curve(TWO_FOLDS)
    first, second = trace(curve, nodes=None)
    assert [lane.replicate for lane in curve.lanes if lane.settings.max_steps > 0] == [0, 1]
    assert first.values.tolist() == second.values.tolist()
    (spelled,) = trace(Curve(TWO_FOLDS), branch="semantic", alpha=2.0, step=0.05, points=200, settings=ta.Settings())
    assert spelled.values.tolist() == first.values.tolist()


def test_the_branch_is_searched_for_on_the_coarse_replicate(trace, model, monkeypatch, overlaps):
    curve, asked = Curve(TWO_FOLDS), []

    def run_one(path, progress):
        asked.append(next(path))
        return [dataclasses.replace(made.states(model), overlaps=overlaps)]

    monkeypatch.setattr(arclength, "run_one", run_one)
    path = trace(curve, start=None)[0]
    np.testing.assert_allclose(path.folds, FOLDS, rtol=1e-7)
    ((lane,),) = asked
    assert lane.replicate == COARSE and float(lane.alpha) == 2.0 and lane.free.tolist() == [1.0, 0.0]
    states = dataclasses.replace(made.states(model), overlaps=jax.tree.map(lambda a: jnp.stack([a] * 4), overlaps))
    again = trace(curve, start=ta.results.FixedPoint(model, jnp.asarray(2.0), states, "semantic"))[0]
    assert again.values.tolist() == path.values.tolist() and len(asked) == 1


@pytest.mark.parametrize(
    ("limits", "value", "expected"),
    [
        ((1.7, 2.3), 1.99, FOLDS[0]),
        ((1.7, 2.3), 2.01, FOLDS[1]),
        ((1.95, 2.3), 1.99, FOLDS[1]),  # the nearer fold lies beyond the limits
        ((1.7, 2.05), 2.01, FOLDS[0]),
        ((1.95, 2.05), 2.01, None),
    ],
)
def test_the_nearest_fold_within_limits(model, rule, overlaps, limits, value, expected):
    curve = Curve(TWO_FOLDS)
    setting = arclength.Setting(model, jnp.asarray(value), Parameter("alpha"), FREE)
    found = made.answer_path(arclength.fold_near(setting, rule, overlaps, ta.Settings(), limits), curve.answer)
    if expected is None:
        assert found is None
    else:
        np.testing.assert_allclose(found[0], [expected], rtol=1e-7)
        np.testing.assert_allclose(found[1].train_loss, [expected], rtol=1e-7)


@pytest.fixture
def continuation(model, rule, overlaps):
    setting = arclength.Setting(model, jnp.asarray(2.0), Parameter("alpha"), FREE)
    return arclength._Continuation(setting, rule, 0, overlaps)


LIMITS = (1.7, 2.3)
ALONG = np.eye(7)[-1]


def marched(continuation, monkeypatch, answers, step=0.05, limits=(0.0, 100.0), count=8):
    """March along a straight line; `answers` gives the Newton steps and the cosine of each point in turn, or None."""
    tried = []

    def correct(w, direction):
        tried.append(continuation.value(w))
        found = answers[len(tried) - 1] if len(tried) <= len(answers) else (0, 1.0)
        if found is None:
            return made.finished_path(None)
        steps, cosine = found
        turned = cosine * ALONG + np.sqrt(1 - cosine**2) * np.eye(7)[0]
        return made.finished_path(arclength._ArcPoint(w, np.zeros((6, 7)), turned if cosine < 1 else ALONG, steps))

    monkeypatch.setattr(continuation, "correct", correct)
    first = arclength._ArcPoint(continuation.start, np.zeros((6, 7)), ALONG, 0)
    points, end = made.answer_path(continuation.march(first, step, limits, count), None)
    return np.array([continuation.value(p.w) for p in points]), end, tried


def test_the_steps_along_the_arc(continuation, monkeypatch):
    """A step grows after few steps of Newton's method and shrinks after many, relative to alpha = 2 at the start."""
    values, end, _ = marched(continuation, monkeypatch, [(steps, 1.0) for steps in (0, 3, 4, 5, 6, 0, 0, 0)])
    steps = 0.05 * np.cumprod([1, 1.5, 1.5, 1, 1, 0.7, 1.5])
    np.testing.assert_allclose(values, 2 * (1 + np.append(0, np.cumsum(steps))), rtol=1e-12)
    assert end == "number of points"
    values, _, _ = marched(continuation, monkeypatch, [], step=0.1)
    np.testing.assert_allclose(np.diff(values) / 2, [0.1, 0.15, *[0.2] * 5], rtol=1e-12)
    values, end, _ = marched(continuation, monkeypatch, [], count=1)
    assert values.tolist() == [2.0] and end == "number of points"
    values, end, _ = marched(continuation, monkeypatch, [], step=0.1, limits=(1.5, 2.3))
    np.testing.assert_allclose(values, [2.0, 2.2, 2.5])
    assert end == "limit of the parameter"
    assert marched(continuation, monkeypatch, [], step=0.1, limits=(2.3, 3.0))[0].size == 2


def test_a_step_without_a_point_is_halved(continuation, monkeypatch):
    values, end, tried = marched(continuation, monkeypatch, [None, (0, 0.65), (0, 0.75)], step=0.1, count=2)
    np.testing.assert_allclose(tried, [2.2, 2.1, 2.05], rtol=1e-12)
    assert end == "number of points" and values[-1] == tried[-1]
    values, end, tried = marched(continuation, monkeypatch, [None] * 20, step=2.6e-4)
    assert end == "no further point was found" and values.tolist() == [2.0]
    np.testing.assert_allclose(tried, [2 + 5.2e-4, 2 + 2.6e-4], rtol=1e-12)


def corrected(continuation, expansion, w=None):
    """The result of Newton's method in the plane of constant alpha, and its number of expansions."""
    asked = []

    def answer(call):
        asked.append(np.asarray(call.arguments[-1]))
        return expansion(asked[-1])

    w = continuation.start if w is None else w
    return made.answer_path(continuation.correct(w, ALONG), answer), len(asked)


def test_where_newtons_method_gives_up(continuation):
    linear = Curve(Polynomial([2 - 0.1, 0.1 / THETA]))
    near, far = (continuation.start + np.eye(7)[0] * a for a in (0.45, 0.55))
    point, count = corrected(continuation, linear.expansion, near)
    np.testing.assert_allclose(point.w, continuation.start, atol=1e-12)
    assert count == 2 and point.steps == 1
    assert corrected(continuation, linear.expansion, far) == (None, 2)
    assert corrected(continuation, lambda u: (*linear.expansion(u)[:2], False)) == (None, 1)
    assert corrected(continuation, lambda u: (np.nan * linear.expansion(u)[0], *linear.expansion(u)[1:])) == (None, 1)
    point, _ = corrected(continuation, linear.expansion)
    assert point.tangent[-1] > 0 and np.linalg.norm(point.tangent) == pytest.approx(1)
    np.testing.assert_allclose(point.J @ point.tangent, 0, atol=1e-12)
    signs = iter([1, -1] * 10)

    def alternating(u):
        r, J, _ = linear.expansion(u)
        return r + 1e-3 * next(signs), J, True

    assert corrected(continuation, alternating) == (None, 8)
    with pytest.raises(ta.InputError, match="start must be near a state, Newton's method found none from it"):
        made.answer_path(
            continuation.march_both_ways((1.7, 2.3), 0.05, 3),
            lambda call: (np.ones(8), np.ones((8, 9)), False),
        )


def test_a_parameter_that_begins_at_zero_has_the_scale_one(continuation):
    x, setting = continuation.overlaps(continuation.start), continuation.setting
    for alpha, scale in ((0.0, 1.0), (0.5, 0.5)):
        other = arclength._Continuation(setting._replace(alpha=jnp.asarray(alpha)), continuation.nodes, 0, x)
        assert other.scale[-1] == scale and other.value(other.start) == alpha
