"""Searches by Newton's method: their ends on known maps, and states that are hard to reach."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state
from problems import rule, solved

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import Coordinates, admissible
from tiedattn_jax.theory.newton import Answer, Newton, deflated_solve, stall_of
from tiedattn_jax.theory.setting import branch_start

NO_EVALUATION = np.full(1, np.nan)
ORDER = np.repeat([0, 0, 1, 0], 2) > 0  # the coordinates are q, V, theta and m of both tokens; m is zero
TARGET = np.repeat([CASES[0].q, CASES[0].V, CASES[0].theta, 0.0], 2)
UNIT = np.where(ORDER, TARGET, 1.0)
begin = jax.jit(lambda newton, start: newton.begin(start, jnp.full(1, jnp.nan)))
advance = jax.jit(lambda newton, s, answer: newton.advance(s, answer))
solved_by = jax.jit(deflated_solve)


@cache
def newton_for(attempts=1, **settings):
    """Newton's method for the semantic branch, with the stall threshold of 2^13 nodes."""
    coordinates = Coordinates(ta.DotProduct(), jnp.array([1.0, 0.0]))
    return Newton(coordinates, ta.Settings(**settings), np.asarray(stall_of(2**13)), np.asarray(attempts))


def scaled(q=1.0, V=1.0, theta=1.0):
    """Return the place of the semantic state with scaled order parameters."""
    return TARGET * np.repeat([q, V, theta, 1.0], 2)


def slope_of(image, v):
    """Return the Jacobian of a map by central differences."""
    steps = np.diag(1e-6 * (1e-2 + np.abs(v)))
    return np.stack([(image(v + d) - image(v - d)) / (2 * d.sum()) for d in steps], 1)


def searched(image, start, newton=None, shares=(0.0,), jacobian=None):
    """Run a search on a map of the coordinates to its end; return its outcome and the places that it asked for.

    An evaluation observes the first coordinate of its place. `shares` are those of unresolved nodes, place by place.
    """
    newton, shares, places = newton or newton_for(), itertools.cycle(shares), []
    s = begin(newton, start)
    while not s.ended:
        v = np.asarray(s.trial)
        places.append(v)
        DF = slope_of(image, v) if jacobian is None else jacobian(v)
        s = advance(newton, s, Answer(image(v), DF, np.asarray(next(shares)), v[:1]))
        assert len(places) < 400
    return jax.tree.map(np.asarray, s.outcome), np.array(places)


def towards(target, rate=0.3):
    return lambda v: target + rate * (v - target)


def curved(v):
    return TARGET + 0.3 * (v - TARGET) ** 2


def jumping(size):
    """A map whose first coordinate jumps across its fixed point, by twice the `size`; it has no fixed point."""
    return lambda v: np.where(np.arange(8) == 0, TARGET * (1 + size * np.where(v > TARGET, -1, 1)), TARGET)


LARGE = scaled(1.3, 1.3, 1.3**0.5)
ENDS = [
    ("converged", curved, 1.02 * TARGET, {}),
    ("converged", curved, 1.02 * TARGET, {"shares": (0.04,)}),
    ("unresolved", curved, 1.02 * TARGET, {"shares": (0.06,)}),  # more than 5 % of the nodes settle nothing
    ("converged", towards(TARGET, -50.0), LARGE, {}),  # explicit damped steps go back and forth for ever
    ("converged", towards(TARGET, 0.99), LARGE, {}),
    ("stalled", jumping(1e-3), 1.1 * TARGET, {}),
    ("max_steps", jumping(0.03), 1.1 * TARGET, {}),  # above the threshold of 2 / 2^6.5
    ("max_steps", towards(TARGET, 0.9), LARGE, {"max_steps": 0, "warm_steps": 0}),
    ("nonfinite", lambda v: np.nan * v, TARGET, {}),
    ("absent", lambda v: np.where(np.arange(8) < 2, 0.2, np.where(ORDER, 0.4, 1.0)) * v, TARGET, {}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "image", "start", "options"), ENDS)
def test_ends_on_known_maps(status, image, start, options):
    shares = options.get("shares", (0.0,))
    outcome, places = searched(image, start, newton_for(**{k: v for k, v in options.items() if k != "shares"}), shares)
    assert ta.Status(int(outcome.status)).name == status
    np.testing.assert_array_equal(places[0], start)
    if status == "converged":
        np.testing.assert_allclose(outcome.v, TARGET, rtol=2e-5)
        np.testing.assert_array_equal(outcome.evaluation, outcome.v[:1])
        assert len(places) < (8 if image is curved else 40)
    if status == "stalled":
        np.testing.assert_allclose(outcome.residual, 1e-3, rtol=0.5)


def test_a_jacobian_that_is_not_that_of_the_nodes():
    """Frozen nodes have another Jacobian than the one that is known; the last step corrects it."""
    wrong = np.diag(np.linspace(0.0, 0.5, 8))
    outcome, places = searched(lambda v: TARGET + 0.3 * (v - TARGET), 1.02 * TARGET, jacobian=lambda v: wrong)
    assert outcome.status == ta.Status.converged and len(places) < 12
    np.testing.assert_allclose(outcome.v, TARGET, rtol=2e-5)


@pytest.mark.parametrize("growth", [0.3, 0.95, 0.99, 1.02, 1.15])
def test_a_branch_that_does_not_exist_is_left_in_few_steps(growth):
    """An order parameter that sinks is followed by nearly Newton's steps, not by damped ones, down to a state or none.

    The map multiplies theta by ``growth - .2 theta^2 / theta_0^2``; all else goes to the state theta_0 of a case. Above
    a growth of one there is a state at theta^2 = 5 (growth - 1) theta_0^2, below it there is none.
    """

    def image(v):
        return np.where(ORDER, v * (growth - 0.2 * (v / UNIT) ** 2), TARGET + 0.3 * (v - TARGET))

    outcome, places = searched(image, np.where(ORDER, 1.0, 1.2) * TARGET)
    if growth < 1:
        assert outcome.status == ta.Status.absent and len(places) < 36
        np.testing.assert_allclose(outcome.v[~ORDER], TARGET[~ORDER], rtol=1e-4)
    else:
        assert outcome.status == ta.Status.converged
        np.testing.assert_allclose(outcome.v[ORDER], (5 * (growth - 1)) ** 0.5 * TARGET[ORDER], rtol=1e-4)


def test_a_trial_outside_of_the_domain_is_not_asked_for():
    """A step that would make V negative is cut before the map is evaluated there."""
    outcome, places = searched(lambda v: scaled(V=-1) + 0.99 * (v - TARGET), TARGET)
    is_inside = jax.jit(lambda newton, v: admissible(newton.coordinates, newton.coordinates.unpack(v)))
    assert all(is_inside(newton_for(), v) for v in places)
    assert outcome.status != ta.Status.converged


@pytest.mark.parametrize(("attempts", "places"), [(1, 1), (2, 2), (3, 3)])
def test_other_starts_are_tried_where_the_first_led_nowhere(attempts, places):
    """The map is finite only at a large q; the starts are the given one, one of .03 of its V and one of 4 times q."""
    target, wide = scaled(q=4.0), newton_for(attempts)
    outcome, asked = searched(lambda v: towards(target)(v) if v[0] > 2 * TARGET[0] else np.nan * v, TARGET, wide)
    for v, start in zip(asked, (TARGET, scaled(V=0.03), target), strict=False):
        np.testing.assert_allclose(v, start, rtol=1e-12)
    found = ta.Status.converged if attempts == 3 else ta.Status.nonfinite
    assert len(asked) == places and outcome.status == found
    np.testing.assert_array_equal(outcome.evaluation, outcome.v[:1] if attempts == 3 else np.nan)


def test_a_search_that_failed_has_finite_derivatives():
    bad = np.full((2, 2), np.nan)
    np.testing.assert_array_equal(solved_by(bad, np.zeros((0, 2)), np.ones(2)), 1.0)
    gauge = np.array([[0.6, 0.8]])
    singular = np.eye(2) - gauge.T @ gauge
    np.testing.assert_allclose(solved_by(singular, gauge, np.array([0.8, -0.6])), [0.8, -0.6])


@pytest.mark.parametrize(
    ("numbers", "alpha", "branch", "expected"),
    [
        # The student shrinks to nothing.
        ((0.3, 0.5, 1.0), 1.0, "semantic", {}),
        # Damped steps leave the domain from V = 15; the state is found from V / 10 of the start.
        ((0.55, 0.36, 0.0012, [[0.2, 0.8], [0.15, 0.85]]), 16.5, "semantic",
         {"q": (0.1071, 0.01), "theta": (0.0578, 0.05)}),
        # A small order parameter grows slowly near a pitchfork. Lines of order 15 give .062628(26), 2^16 Sobol points
        # .0623(15).
        ((0.19, 0.481, 0.00077, [[0.56, 0.44], [0.12, 0.88]]), 0.0859, "positional", {"m": (0.06263, 0.01)}),
        # A student close to its teacher: q - theta^2 / rho is a thousandth of q.
        ((0.045885131, 3.0594143, 0.020732636,
          [[0.0963201506, 0.9036798494], [0.5365711661, 0.4634288339]]), 14.9368379664, "semantic",
         {"q": (8.39, 0.01), "theta": (8.86, 0.01)}),
        # A map whose eigenvalue along m is -50: explicit damped steps, .2 of the way, go back and forth for ever.
        ((0.897, 0.154, 0.000546, [[0.55, 0.45], [0.42, 0.58]]), 13.9, None, {"m": (0.337, 0.02)}),
    ],
    ids=["no student", "V of the start", "pitchfork", "close", "violent map"],
)  # fmt: skip
def test_starts_far_from_the_state(numbers, alpha, branch, expected):
    point = ta.solve(ta.DotProduct(*numbers), alpha, branch, rule("lines"))
    assert bool(point.ok) if expected else int(point.status) == ta.Status.absent
    for name, (value, rtol) in expected.items():
        np.testing.assert_allclose(abs(getattr(point.overlaps, name)), value, rtol=rtol)
    if branch is None:
        assert int(point.status) == ta.Status.converged and float(point.diagnostics.growth_m) < -30


@pytest.mark.full
def test_a_student_that_cut_steps_shrink_is_not_absent():
    """At small q the map makes V negative, but the state exists.

    Training (d = 800) ends at m = .482, .491, .490 and losses .0495, .0496, .0491.
    """
    model = ta.DotProduct(0.6, mixing=0.4 * np.eye(3) + 0.2, encodings=np.linspace(-1, 1, 3)[:, None])
    point = ta.solve(model, 4.0, "positional", ta.Sobol(2**10, replicates=1).rule(model))
    assert bool(point.ok)
    np.testing.assert_allclose(abs(point.overlaps.m[0]), 0.486, rtol=0.01)
    np.testing.assert_allclose(point.train_loss, 0.0494, rtol=0.01)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lines", "nodes"])
def test_an_order_parameter_that_scatter_keeps_alive(request, name):
    """Single nodes must report it as absent; lines, half of which have too many jumps, report an unresolved state."""
    model = ta.DotProduct(0.47121183, 0.470216305, 0.003503289, ((0.75582889, 0.24417111), (0.074889422, 0.925110578)))
    status = ta.Status.unresolved if name == "lines" else ta.Status.absent
    assert ta.solve(model, 1.4717455734, "semantic", request.getfixturevalue(name)).status == status


def test_the_start_does_not_matter():
    settings = ta.Settings(tol=1e-10)
    starts = state(CASES[0]), branch_start(ta.DotProduct(), "semantic")
    first, second = (
        ta.solve(ta.DotProduct(), 2.0, "semantic", rule("points"), start=x, settings=settings) for x in starts
    )
    assert int(first.status) == int(second.status) == ta.Status.converged
    assert max(np.max(a.residual) for a in (first, second)) <= settings.tol
    np.testing.assert_allclose(first.overlaps.q, second.overlaps.q, rtol=1e-6)
    np.testing.assert_allclose(first.overlaps.q, solved("standard").overlaps.q, rtol=1e-3)
