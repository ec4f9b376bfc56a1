"""Steps of Newton's method and the status at its end; other tests of the theory check the states it finds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES, Coordinates, admissible, residual_covariance
from tiedattn_jax.theory.newton import Answer, Newton, deflated_solve, stall_of

FREE = jnp.array([1.0, 0.0])


@pytest.fixture(scope="module")
def newton(model):
    return newton_for(model)


def newton_for(model, attempts=1, **settings):
    """Newton's method for the semantic branch, with the stall threshold of 2^13 nodes."""
    return Newton(
        Coordinates(model, FREE), ta.Settings(**settings), jnp.asarray(stall_of(2**13)), jnp.asarray(attempts)
    )


NO_EVALUATION = jnp.full(1, jnp.nan)
BEST, CURRENT = {"best_residual": "residual", "best_length": "length"}, ("v", "image", "damped_step", "is_singular")


def iterate(**values):
    """An iterate of the semantic branch with some numbers set: of the best place, of the current one, or of neither."""
    s = newton_for(ta.DotProduct()).begin(Coordinates(ta.DotProduct(), FREE).pack(state(CASES[0])), NO_EVALUATION)
    values = {name: jnp.asarray(value) for name, value in values.items()}
    best = {BEST[name]: values.pop(name) for name in list(values) if name in BEST}
    current = {name: values.pop(name) for name in list(values) if name in CURRENT}
    return s._replace(best=s.best._replace(**best), current=s.current._replace(**current), **values)


def test_endings(newton):
    stall = 2 / 2**6.5  # for 2^13 nodes
    assert newton.stall == pytest.approx(stall)
    faint, small = (newton.coordinates.pack(shrunk(share)) for share in (1e-7, 1e-5))
    for expected, numbers in (
        ("converged", {"best_residual": 0.99e-5}),
        ("stalled", {"best_residual": 1.01e-5, "best_length": 0.0}),
        ("stalled", {"best_residual": 0.99 * stall, "best_length": 0.049}),
        # Near a bifurcation the residual is small far from the solution.
        ("max_steps", {"best_residual": 0.99 * stall, "best_length": 0.051}),
        ("max_steps", {"best_residual": 1.01 * stall, "best_length": 0.01}),
        ("nonfinite", {"best_residual": jnp.inf, "left_domain": True}),
        ("singular", {"is_singular": True, "left_domain": True}), ("left_domain", {"left_domain": True}),
        ("absent", {"v": faint, "image": 0.9 * faint, "best_residual": 0.0}),
        ("converged", {"v": faint, "image": 1.1 * faint, "best_residual": 0.0}),  # it grows again
        ("converged", {"v": small, "image": 0.9 * small, "best_residual": 0.0}),
    ):  # fmt: skip
        values = {"best_residual": 1.0, "best_length": 1.0, "is_singular": False, "left_domain": False} | numbers
        assert ta.Status(int(newton.ending(iterate(**values)))) == ta.Status[expected], numbers
    for in_damped_phase, cut, is_damped in ((True, 1.0, True), (False, 0.21, False), (False, 0.19, True)):
        assert bool(iterate(in_damped_phase=in_damped_phase, cut=cut).is_damped) is is_damped


def shrunk(share):
    """The semantic state with a student of tr q = share tr rho."""
    x = state(CASES[0])
    size = (share * 0.25 / x.q) ** 0.5
    return ta.Overlaps(x.q * size**2, x.V, x.theta * size, x.m)


def test_damped_steps(newton):
    """A damped step is at most half of a coordinate, and longer along a small order parameter."""
    coordinates = newton.coordinates
    x = state(CASES[0])
    v = coordinates.pack(x)

    def limited(v, factor, **changes):
        """Limit an explicit step from v to `factor v`."""
        return newton.limited_step(iterate(v=v, image=factor * v, damped_step=0.2 * (factor - 1) * v, **changes))

    step = limited(v, 1.1)
    np.testing.assert_allclose(step, 0.02 * v, rtol=1e-12)
    np.testing.assert_allclose(limited(v, 1.1, damping=0.4), 0.4 * step, rtol=1e-12)
    np.testing.assert_allclose(limited(v, -30), -0.5 * v, rtol=1e-12)
    np.testing.assert_allclose(limited(v, 1.04), 0.008 * v, rtol=1e-12)  # theta is .9 of its largest size
    v = coordinates.pack(ta.Overlaps(x.q, x.V, x.theta / 4, x.m))
    step, order = limited(v, 1.04), coordinates.order > 0
    np.testing.assert_allclose(step[order], 50 * 0.008 * v[order], rtol=1e-12)
    np.testing.assert_allclose(step[~order], 0.008 * v[~order], rtol=1e-12)
    # An order parameter that decays steps as far as one that grows.
    np.testing.assert_allclose(limited(v, 0.96), np.where(order, 50, 1) * -0.008 * v, rtol=1e-12)
    for factor in (1.12, 0.88):  # it grows or falls fast by itself
        np.testing.assert_allclose(limited(v, factor), 0.2 * (factor - 1) * v)


def test_damped_steps_are_implicit(model):
    """Damped steps are implicit: a r / (1 - a lambda) along an eigenvector of the map, with the damping a.

    Where that would go backwards, the step is the explicit a r.
    """
    values = jnp.array([0.0, 0.5, 1.0, 1.5, -40.0])
    r, no_gauge = jnp.array([1.0, -2.0, 0.3, 0.1, 5.0]), jnp.zeros((0, 5))
    target = newton_for(model).coordinates.pack(state(CASES[0]))
    v, jacobian = 0.98 * target, 0.3 * jnp.eye(len(target))  # an order parameter that grows
    image = target + 0.3 * (v - target)
    for a in (0.2, 0.4):
        method = newton_for(model, damping=a)
        step = method.damped_step(jnp.diag(1 - values), no_gauge, r, jnp.asarray(a))
        np.testing.assert_allclose(step, a * r / (1 - a * values), rtol=1e-12)
        backwards = method.damped_step(-9 * jnp.eye(5), no_gauge, r, jnp.asarray(a))  # lambda = 10
        np.testing.assert_allclose(backwards, a * r, rtol=1e-12)
        answer = Answer(image, jacobian, jnp.asarray(0.0), NO_EVALUATION)
        look = method.look(v, answer, method.begin(v, NO_EVALUATION).current)
        np.testing.assert_allclose(look.damped_step, a * (image - v) / (1 - 0.3 * a), rtol=1e-9)


def test_steps_are_straight_where_the_domain_is(model, newton):
    """Steps are straight in q - theta rho^{-1} theta^T, which must stay positive: it changes by its first order."""
    v = iterate().current.v
    step = jnp.linspace(0.1, 0.2, len(v))

    def residual_change(factor):
        after, before = (newton.coordinates.unpack(a) for a in (newton.step_from(v, factor * step), v))
        return residual_covariance(model, after) - residual_covariance(model, before)

    np.testing.assert_allclose(residual_change(2.0), 2 * residual_change(1.0), rtol=1e-9)
    _, slope = jax.jvp(lambda v: residual_covariance(model, newton.coordinates.unpack(v)), (v,), (step,))
    np.testing.assert_allclose(residual_change(1.0), slope, rtol=1e-9)


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
def test_starts_far_from_the_state(lines, numbers, alpha, branch, expected):
    point = ta.solve(ta.DotProduct(*numbers), alpha, branch, lines)
    assert bool(point.ok) if expected else int(point.status) == ta.Status.absent
    for name, (value, rtol) in expected.items():
        np.testing.assert_allclose(abs(getattr(point.overlaps, name)), value, rtol=rtol)
    if branch is None:
        assert int(point.status) == ta.Status.converged and float(point.diagnostics.growth_m) < -30


@pytest.mark.long
def test_a_student_that_cut_steps_shrink_is_not_absent():
    """At small q the map makes V negative, but the state exists.

    Training (d = 800) ends at m = .482, .491, .490 and losses .0495, .0496, .0491.
    """
    model = ta.DotProduct(0.6, mixing=0.4 * np.eye(3) + 0.2, encodings=np.linspace(-1, 1, 3)[:, None])
    point = ta.solve(model, 4.0, "positional", ta.Sobol(2**10, replicates=1).rule(model))
    assert bool(point.ok)
    np.testing.assert_allclose(abs(point.overlaps.m[0]), 0.486, rtol=0.01)
    np.testing.assert_allclose(point.train_loss, 0.0494, rtol=0.01)


def test_an_order_parameter_that_scatter_keeps_alive(lines, nodes):
    """Single nodes must report it as absent; lines, half of which have too many jumps, report an unresolved state."""
    model = ta.DotProduct(0.47121183, 0.470216305, 0.003503289, ((0.75582889, 0.24417111), (0.074889422, 0.925110578)))
    for rule, status in ((lines, ta.Status.unresolved), (nodes, ta.Status.absent)):
        assert ta.solve(model, 1.4717455734, "semantic", rule).status == status


def test_the_start_does_not_matter(model, nodes):
    settings = ta.Settings(tol=1e-10)
    starts = state(CASES[0]), BRANCHES["semantic"].start(model)
    first, second = (ta.solve(model, 2.0, "semantic", nodes, start=x, settings=settings) for x in starts)
    assert int(first.status) == int(second.status) == ta.Status.converged
    assert max(float(jnp.max(a.residual)) for a in (first, second)) <= settings.tol
    np.testing.assert_allclose(first.overlaps.q, second.overlaps.q, rtol=1e-6)


def test_a_lane_that_failed_has_finite_derivatives():
    bad = jnp.full((2, 2), jnp.nan)
    np.testing.assert_array_equal(deflated_solve(bad, jnp.zeros((0, 2)), jnp.ones(2)), 1.0)
    gauge = jnp.array([[0.6, 0.8]])
    singular = jnp.eye(2) - gauge.T @ gauge
    np.testing.assert_allclose(deflated_solve(singular, gauge, jnp.array([0.8, -0.6])), [0.8, -0.6])


_ALL_RESOLVED = itertools.repeat(0.0)


def searched(newton, image, start, shares=_ALL_RESOLVED):
    """Run Newton's method on a map of the coordinates to its end; return the search and the places it asked for.

    An evaluation observes the first coordinate of its place. `shares` are those of unresolved nodes, place by place.
    """
    jacobian, advance = jax.jacfwd(image), jax.jit(lambda *a: newton.advance(*a))
    s, places = newton.begin(start, NO_EVALUATION), []
    while not s.ended:
        places.append(np.asarray(s.trial))
        s = advance(s, Answer(image(s.trial), jacobian(s.trial), jnp.asarray(next(shares)), s.trial[:1]))
        assert len(places) < 400
    return s, np.array(places)


@pytest.mark.parametrize(("share", "status"), [(0.0, "converged"), (0.04, "converged"), (0.06, "unresolved")])
def test_a_search_by_hand(newton, share, status):
    """From a start within reach of Newton's method a search finds the known fixed point of a map.

    Nodes that are not resolved settle nothing if they are more than 5 %.
    """
    target, shares = newton.coordinates.pack(state(CASES[0])), itertools.repeat(share)
    s, places = searched(newton, lambda v: target + 0.3 * (v - target) ** 2, 1.02 * target, shares)
    assert ta.Status(int(s.outcome.status)).name == status and len(places) < 8
    np.testing.assert_allclose(s.outcome.v, target, rtol=1e-5)
    np.testing.assert_array_equal(places[0], 1.02 * target)
    np.testing.assert_array_equal(s.outcome.evaluation, s.outcome.v[:1])


@pytest.mark.parametrize("growth", [0.3, 0.8, 0.95, 0.99, 1.02, 1.05, 1.15])
def test_a_branch_that_does_not_exist_is_left_in_few_steps(newton, growth):
    """An order parameter that sinks is followed by nearly Newton's steps, not by damped ones, down to a state or none.

    The map multiplies theta by ``growth - .2 theta^2 / theta_0^2``; all else goes to the state theta_0 of a case. Above
    a growth of one there is a state at theta^2 = 5 (growth - 1) theta_0^2, below it there is none.
    """
    target, order = newton.coordinates.pack(state(CASES[0])), newton.coordinates.order > 0
    unit = jnp.where(order, target, 1.0)

    def image(v):
        return jnp.where(order, v * (growth - 0.2 * (v / unit) ** 2), target + 0.3 * (v - target))

    s, places = searched(newton, image, jnp.where(order, 1.0, 1.2) * target)
    if growth < 1:
        assert int(s.outcome.status) == ta.Status.absent and len(places) < 36
        np.testing.assert_allclose(s.outcome.v[~order], target[~order], rtol=1e-4)
    else:
        assert int(s.outcome.status) == ta.Status.converged
        np.testing.assert_allclose(s.outcome.v[order], (5 * (growth - 1)) ** 0.5 * target[order], rtol=1e-4)


@pytest.mark.parametrize(
    ("shares", "is_lost"),
    [([0.55], True), ([0.45], False), ([0.0] + [0.55] * 11, False)],
    ids=["most nodes unresolved", "fewer", "not twelve times in a row"],
)
def test_a_search_is_lost_among_nodes_that_are_not_resolved(model, shares, is_lost):
    """After twelve places with most nodes unresolved a search that goes nowhere ends, and tries no other start."""
    newton = newton_for(model, 3, warm_steps=20, max_steps=10)
    target = newton.coordinates.pack(state(CASES[0]))
    s, places = searched(newton, lambda v: jnp.where(v[0] < target[0], 1.2, 0.8) * v, target, itertools.cycle(shares))
    assert int(s.outcome.status) != ta.Status.converged
    assert len(places) == 12 if is_lost else len(places) > 30


def test_a_trial_outside_of_the_domain_is_not_asked_for(newton):
    """A step that would make V negative is cut before the map is evaluated there."""
    x = state(CASES[0])
    target = newton.coordinates.pack(x)
    outside = newton.coordinates.pack(ta.Overlaps(x.q, -x.V, x.theta, x.m))
    s, places = searched(newton, lambda v: outside + 0.99 * (v - target), target)
    inside = [bool(admissible(newton.coordinates, newton.coordinates.unpack(v))) for v in places]
    assert all(inside) and int(s.outcome.status) != ta.Status.converged


@pytest.mark.parametrize("attempts", [1, 3])
def test_other_starts_are_tried_where_the_first_led_nowhere(model, attempts):
    """Other starts are tried if the first one leads nowhere: the map is finite only at small V, near .03 of its V."""
    newton = newton_for(model, attempts)
    x = state(CASES[0])
    target = newton.coordinates.pack(ta.Overlaps(x.q, 0.03 * x.V, x.theta, x.m))

    def image(v):
        has_small_V = newton.coordinates.unpack(v).V[0, 0, 0] < 0.1 * x.V[0, 0, 0]
        return jnp.where(has_small_V, target + 0.3 * (v - target), jnp.nan)

    s, places = searched(newton, image, newton.coordinates.pack(x))
    assert int(s.outcome.status) == (ta.Status.converged if attempts == 3 else ta.Status.nonfinite)
    assert len(places) == (1 if attempts == 1 else 2)
    np.testing.assert_array_equal(s.outcome.evaluation, s.outcome.v[:1] if attempts == 3 else np.nan)
