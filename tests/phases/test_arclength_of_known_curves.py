"""Continuation along curves that are known in closed form: no state is solved."""

import dataclasses

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from numpy.polynomial import Polynomial

import tiedattn_jax as ta
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases import arclength
from tiedattn_jax.phases.family import Family
from tiedattn_jax.theory.paths import Call

THETA = 0.125  # at the start of every curve, where alpha is 2
CENTRE = np.array([0.15, 0.15, 15.0, 15.0, THETA, THETA, 0.0, 0.0])  # q, V, theta and m of two tokens
FREE = np.array([1.0, 0.0])
SIZE = Polynomial([-1.0, 1 / THETA])  # theta relative to the start, less one
TWO_FOLDS = 2 * (1 + 0.3 * SIZE - SIZE**3)
FOLDS = 2 + np.array([-0.4, 0.4]) * np.sqrt(0.1)
FORK = 2.1 - 0.1 * (1 + SIZE) ** 2  # theta falls to zero at 2.1
CONSTANT = Polynomial([-0.7])
SETTINGS = ta.Settings()
BLANK = jax.tree.map(lambda a: np.asarray(np.asarray(a)[0]), made.states(ta.DotProduct()))


class Curve:
    """A curve alpha = f(theta of the first token), along which q of the first token is linear in theta.

    The Jacobian of F is triangular in the coordinates, but for a rotation of both V. So its eigenvalues are known:
    1 - f'(theta), +-2i of both V, `second(theta)` of q of the second token, and -0.5 and -0.2 of the others.
    """

    def __init__(self, f, second=CONSTANT):
        self.f, self.second, self.lanes, self.asked = f, second, [], []

    def eigenvalues(self, theta):
        return np.array([1 - self.f.deriv()(theta), 2j, -2j, self.second(theta), -0.5, -0.2])

    def expansion(self, u):
        """Return F(x) - x, its Jacobian, and whether x is admissible."""
        theta, alpha = u[4], u[8]
        self.asked.append(alpha)
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
        return r, J, np.array(True)

    def answer(self, request):
        if isinstance(request, Call):
            return self.expansion(np.asarray(request.arguments[-1]))
        self.lanes.append(request)
        return dataclasses.replace(BLANK, overlaps=request.start, train_loss=np.asarray(request.setting.alpha))

    result_of = answer


@pytest.fixture(scope="module")
def overlaps(model):
    return arclength.Coordinates(model, jnp.asarray(FREE)).unpack(jnp.asarray(CENTRE))


@pytest.fixture(scope="module")
def family(model, rule):
    return Family(model, rule, SETTINGS, Parameter("alpha"), jnp.asarray(2.0))


@pytest.fixture(scope="module")
def trace(family, overlaps):
    """A function that traces a known curve from alpha = 2."""

    def along(curve, limits=(1.7, 2.3), settings=SETTINGS, step=0.05, points=200):
        here = family._replace(settings=settings)
        path = arclength._branch_path(here, "semantic", 0, overlaps, limits, step, points)
        return made.answer_path(path, curve.answer)

    return along


def test_a_curve_with_two_folds(trace):
    curve = Curve(TWO_FOLDS)
    path = trace(curve, settings=ta.Settings(tol=1e-7))
    theta = path.overlaps.theta[:, 0, 0, 0]
    np.testing.assert_allclose(path.values, TWO_FOLDS(theta), atol=1e-5)
    np.testing.assert_allclose(path.overlaps.q[:, 0, 0, 0], 0.15 + 0.2 * (theta - THETA), rtol=1e-5)
    np.testing.assert_allclose(path.overlaps.theta[:, 1, 0, 0], theta, rtol=1e-4)
    np.testing.assert_array_equal(path.train_loss, path.values)
    assert np.all(np.diff(theta) > 0) and np.all(path.overlaps.m == 0)
    assert path.ends == ("limit of the parameter",) * 2
    assert path.values[0] == 2.3 and path.values[-1] == 1.7  # exactly
    assert 1.7 <= min(curve.asked) and max(curve.asked) <= 2.3
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


def test_a_curve_through_a_pitchfork(trace):
    path = trace(Curve(FORK))
    assert path.folds == () and len(path.pitchfork_states) == 1
    np.testing.assert_allclose(path.pitchforks, 2.1, rtol=1e-7)
    np.testing.assert_allclose(path.pitchfork_states[0].overlaps.theta, 0, atol=1e-6)
    assert path.values[0] == path.values[-1] == 1.7 and set(path.labels) - {"uninformed"} == {"semantic"}


def test_another_branch_is_born_between_two_points(trace):
    """The second eigenvalue passes one at theta = .16, and again from the other side at theta = .2."""
    second = 1 + 30 * Polynomial.fromroots([0.16, 0.2])
    path = trace(Curve(Polynomial([1.5, 4.0]), second), (1.7, 2.45), step=0.02)
    assert path.folds == path.pitchforks == ()
    np.testing.assert_allclose(path.crossings, [1.5 + 4 * 0.16, 1.5 + 4 * 0.2], rtol=1e-7)


@pytest.mark.parametrize(
    ("limits", "end", "fold"),
    [
        ((1.7, 2.12), 2.12, FOLDS[0]),  # the curve turns at 2.1265, beyond the limit, and comes back
        ((1.875, 2.3), 1.875, FOLDS[1]),
        ((2.0, 2.3), 2.0, FOLDS[1]),  # the start is on the limit
    ],
)
def test_a_path_ends_on_its_limit(trace, limits, end, fold):
    curve = Curve(TWO_FOLDS)
    path = trace(curve, limits)
    assert limits[0] <= min(curve.asked) and max(curve.asked) <= limits[1]
    assert path.values[0] == path.values[-1] == end and path.ends == ("limit of the parameter",) * 2
    assert np.all(np.diff(path.overlaps.theta[:, 0, 0, 0]) > 0)
    np.testing.assert_allclose(path.folds, [fold], rtol=1e-7)


def test_the_options_of_a_path_arrive(theory, model, rule, overlaps):
    """The first state is solved with the caller's settings and averages, the others are evaluated on the curve."""
    curve = Curve(TWO_FOLDS)
    theory(curve)
    options = {"branch": "semantic", "alpha": 2.0, "step": 0.05, "points": 200, "settings": ta.Settings(tol=1e-7)}
    first, second = ta.trace_branch(model, "alpha", (1.7, 2.3), nodes=rule, start=overlaps, **options)
    assert first.values.tolist() == second.values.tolist()
    np.testing.assert_allclose(first.folds, FOLDS, rtol=1e-7)
    solved = [lane for lane in curve.lanes if lane.setting.settings.max_steps > 0]
    assert sorted((lane.replicate, float(lane.setting.alpha), float(lane.setting.settings.tol)) for lane in solved) == [
        (k, 2.0, 1e-7) for k in (0, 1)
    ]
    assert all(lane.setting.free.tolist() == [1.0, 0.0] and lane.setting.nodes is rule for lane in curve.lanes)


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
def test_the_nearest_fold_within_limits(family, overlaps, limits, value, expected):
    curve = Curve(TWO_FOLDS)
    here = family._replace(alpha=jnp.asarray(value))
    found = made.answer_path(arclength.fold_near(here, "semantic", overlaps, limits), curve.answer)
    if expected is None:
        assert found is None
    else:
        np.testing.assert_allclose(found[0], [expected] * 2, rtol=1e-7)
        np.testing.assert_allclose(found[1].train_loss, [expected] * 2, rtol=1e-7)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_replicate_that_lacks_the_state(family, overlaps, lacking):
    """A fold is that of all replicates, and a path needs a state where it begins."""
    curve = Curve(TWO_FOLDS)

    def answer(request):
        state = curve.answer(request)
        is_lost = getattr(request, "replicate", None) == lacking
        return dataclasses.replace(state, status=np.asarray(int(ta.Status.absent))) if is_lost else state

    assert made.answer_path(arclength.fold_near(family, "semantic", overlaps, (1.7, 2.3)), answer) is None
    with pytest.raises(ta.InputError, match="start must be near a state, got one with status absent"):
        made.answer_path(arclength._branch_path(family, "semantic", lacking, overlaps, (1.7, 2.3), 0.05, 9), answer)


class Ending(Curve):
    """A curve without admissible points beyond alpha = 2.1."""

    def expansion(self, u):
        return *super().expansion(u)[:2], np.array(u[8] <= 2.1)


def test_a_path_ends_where_newtons_method_finds_nothing(trace):
    path = trace(Ending(Polynomial([1.5, 4.0])))
    assert set(path.ends) == {"limit of the parameter", "no further point was found"}
    assert 2.1 - 2e-4 < path.values.max() <= 2.1 and path.values.min() == 1.7


def test_newtons_method(family, overlaps):
    """It finds the point in the plane of constant alpha, with its tangent, from a place that is not far."""
    continuation = arclength._Continuation(family, "semantic", 0, overlaps, (0.5, 100.0))
    curve, along = Curve(Polynomial([2 - 0.1, 0.1 / THETA])), np.eye(7)[-1]

    def corrected(expansion, shift=0.0):
        path = continuation.correct(continuation.start + shift * np.eye(7)[0], along)
        return made.answer_path(path, lambda call: expansion(np.asarray(call.arguments[-1])))

    point = corrected(curve.expansion, 0.45)
    np.testing.assert_allclose(point.w, continuation.start, atol=1e-12)
    assert point.tangent[-1] > 0 and np.linalg.norm(point.tangent) == pytest.approx(1)
    np.testing.assert_allclose(point.J @ point.tangent, 0, atol=1e-12)
    assert corrected(curve.expansion, 0.55) is None
    assert corrected(lambda u: (np.nan * curve.expansion(u)[0], *curve.expansion(u)[1:])) is None
    with pytest.raises(ta.InputError, match="start must be near a state, Newton's method found none from it"):
        made.answer_path(
            continuation.march_both_ways(0.05, 3), lambda call: (np.ones(8), np.ones((8, 9)), np.array(False))
        )
    at_zero = family._replace(alpha=jnp.asarray(0.0))
    zero = arclength._Continuation(at_zero, "semantic", 0, overlaps, (0.0, 1.0))
    assert zero.scale[-1] == 1.0 and zero.value(zero.start) == 0.0  # a parameter that begins at zero has the scale one
