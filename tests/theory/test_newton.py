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


LOOK = jax.jit(lambda newton, *arguments: newton.look(*arguments))


def test_a_step_corrects_the_jacobian_along_the_last_one(newton):
    """Newton's step solves M d = r with M = I - DF in scaled coordinates, corrected by Broyden's formula.

    A step from a first place leads to v. M then maps this step to the change of the residual along it.
    """
    rng, coordinates = np.random.default_rng(0), newton.coordinates
    target = np.asarray(coordinates.pack(state(CASES[0])))
    free = target != 0  # m is zero on this branch
    first, v = (target * (1 + 0.01 * rng.standard_normal(8)) for _ in range(2))
    scale = np.asarray(coordinates.scale(coordinates.unpack(jnp.asarray(v))))
    jacobian, image_before, image = (
        a * np.multiply.outer(free, free) if a.ndim == 2 else a * free
        for a in (rng.standard_normal((8, 8)) * np.divide.outer(scale, scale), 1.01 * first, 1.02 * v + 1e-3 * scale)
    )
    blank = newton.begin(jnp.asarray(first), NO_EVALUATION).current
    before = blank._replace(v=jnp.asarray(first), image=jnp.asarray(image_before))
    answer = Answer(jnp.asarray(image), jnp.asarray(jacobian), jnp.asarray(0.01), NO_EVALUATION)
    look = LOOK(newton, jnp.asarray(v), answer, before)
    r, last = (image - v) / scale, (v - first) / scale
    M = np.eye(8) - jacobian * scale / scale[:, None]
    change = (image_before - first) / scale - r
    M += np.outer(change - M @ last, last) / (last @ last)
    np.testing.assert_allclose(M @ last, change, atol=1e-12)
    np.testing.assert_allclose(look.step / scale, np.linalg.solve(M, r), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(look.residual, np.abs(r).max(), rtol=1e-12)
    np.testing.assert_allclose(look.length, np.abs(look.step / scale).max(), rtol=1e-12)
    a = 0.2
    implicit = np.linalg.solve((1 - a) * np.eye(8) + a * M, a * r)
    expected = implicit if implicit @ r > 0 else a * r
    np.testing.assert_allclose(look.damped_step / scale, expected, rtol=1e-8, atol=1e-12)
    assert float(look.unresolved) == 0.01 and not look.is_singular and not look.sinks


@pytest.mark.parametrize(("ratio", "is_singular"), [(0.9e4, False), (1.1e4, True)])
def test_a_long_step_from_a_small_residual_is_singular(newton, ratio, is_singular):
    v = newton.coordinates.pack(state(CASES[0]))
    blank = newton.begin(v, NO_EVALUATION).current
    for residual in (1e-4, 1e-6):  # where a search has converged nothing is singular
        answer = Answer((1 + residual) * v, (1 - 1 / ratio) * jnp.eye(8), jnp.asarray(0.0), NO_EVALUATION)
        look = LOOK(newton, v, answer, blank)
        np.testing.assert_allclose(look.length, ratio * look.residual, rtol=1e-6)
        assert bool(look.is_singular) == (is_singular and residual == 1e-4)
    bad = LOOK(newton, v, Answer(jnp.nan * v, jnp.eye(8), jnp.asarray(0.0), NO_EVALUATION), blank)
    assert np.isinf(bad.residual) and not np.any(bad.step) and not np.any(bad.damped_step)


@pytest.mark.parametrize(
    ("theta", "newton_theta", "other", "sinks"),
    [
        (0.9, 0.9, 0.05, True),
        (0.9, 0.9, 0.07, False),  # the other coordinates are not near their fixed point
        (1.1, 0.9, 0.05, False),  # the map does not shrink theta
        (0.9, 1.1, 0.05, False),  # Newton's step does not
        (-0.9, -0.9, -0.05, True),
        (0.9, -1.1, 0.05, False),
    ],
)
def test_when_a_search_sinks(model, newton, theta, newton_theta, other, sinks):
    v = newton.coordinates.pack(state(CASES[0]))
    scale, order = newton.coordinates.scale(newton.coordinates.unpack(v)), newton.coordinates.order > 0
    image = jnp.where(order, theta * v, v + other * scale * (v != 0))
    step = jnp.where(order, (newton_theta - 1) * v, 0.0)
    assert bool(newton.sinks(v, image, step, scale)) == sinks
    free = Newton(Coordinates(model, jnp.ones(2)), newton.settings, newton.stall, newton.attempts)
    assert not bool(free.sinks(v, image, step, scale))  # a state of no branch has no order parameter to lose


def after(newton, s, is_inside=True, **look):
    """The search after an answer whose look has these numbers."""
    numbers = {name: jnp.asarray(value) for name, value in look.items()}
    return newton._after_trial(
        s, s.current._replace(**{"unresolved": jnp.asarray(0.0)} | numbers), jnp.asarray(is_inside)
    )


def test_what_a_search_learns_from_an_answer(model):
    """A step of Newton's method must reduce the residual to nine tenths, otherwise it is cut to two fifths."""
    newton = newton_for(model, warm_steps=3)
    s = iterate(best_residual=1e-2, reference=1e-2, cut=0.5, idle_steps=2, steps=4, damping=0.5)
    s = s._replace(current=s.current._replace(residual=jnp.asarray(1e-2)))
    for residual, cut, current in ((0.89e-2, 1.0, 0.89e-2), (0.91e-2, 0.2, 1e-2)):
        learnt = after(newton, s, residual=residual)
        np.testing.assert_allclose([learnt.cut, learnt.current.residual], [cut, current], rtol=1e-12)
        np.testing.assert_allclose(learnt.best.residual, residual)
        assert (int(learnt.steps), int(learnt.damped_steps), int(learnt.idle_steps)) == (5, 0, 3)
        np.testing.assert_allclose(learnt.damping, 1.0 if cut == 1 else 0.5)
        assert not learnt.in_damped_phase and not learnt.left_domain
    for residual, idle in ((0.49e-2, 0), (0.51e-2, 3)):
        learnt = after(newton, s, residual=residual)
        assert int(learnt.idle_steps) == idle
        np.testing.assert_allclose(learnt.reference, 0.49e-2 if idle == 0 else 1e-2)
    outside = after(newton, s, False, residual=1e-9)
    assert bool(outside.left_domain) and int(outside.idle_steps) == 3
    np.testing.assert_allclose([outside.cut, outside.best.residual, outside.current.residual], [0.2, 1e-2, 1e-2])
    damped = s._replace(cut=jnp.asarray(0.1))  # a damped step is accepted whatever its residual
    np.testing.assert_allclose(after(newton, damped, residual=0.5).current.residual, 0.5)
    np.testing.assert_allclose(after(newton, damped, False).damping, 0.2)
    lost = s._replace(lost_steps=jnp.asarray(3))
    assert [int(after(newton, lost, unresolved=u).lost_steps) for u in (0.51, 0.49)] == [4, 0]
    assert int(after(newton, lost, False, unresolved=0.51).lost_steps) == 3


def test_how_long_the_damped_phase_lasts(model):
    """It begins with the first answer if this is rough or sinks slowly, and lasts for a number of steps at most."""
    newton = newton_for(model, warm_steps=3)
    rough = {"sinks": False, "length": 1.0}
    first = iterate(steps=0, damped_steps=0)
    for residual, look, lasts in (
        (0.07, rough, True),
        (0.05, rough, False),
        (0.05, {"sinks": True, "length": 0.31}, True),
        (0.05, {"sinks": True, "length": 0.29}, False),
    ):
        assert bool(after(newton, first, residual=residual, **look).in_damped_phase) == lasts
    assert not after(newton, first._replace(steps=jnp.asarray(1)), residual=0.07, **rough).in_damped_phase
    for count, lasts in ((2, True), (3, False)):
        s = iterate(steps=0, damped_steps=count, in_damped_phase=True, idle_steps=5, cut=0.4)
        learnt = after(newton, s, residual=0.07, **rough)
        assert bool(learnt.in_damped_phase) == lasts and int(learnt.damped_steps) == count + 1
        assert int(learnt.idle_steps) == 0 and float(learnt.cut) == 1.0 and int(learnt.steps) == 0


def test_when_an_attempt_ends(newton):
    """It ends where the residual no longer falls, among unresolved nodes, and where damped steps became too short."""
    going = {"best_residual": 1e-3, "best_length": 0.01, "idle_steps": 0, "steps": 5, "damping": 1.0}
    for change, goes_on in (
        ({}, True),
        ({"best_residual": 1.01e-5}, True),
        ({"best_residual": 0.99e-5}, False),
        ({"idle_steps": 5}, True),
        ({"idle_steps": 6}, False),
        ({"idle_steps": 6, "best_length": 0.051}, True),
        ({"idle_steps": 6, "best_residual": 1.01 * 2 / 2**6.5}, True),
        ({"damping": 1.01e-3}, True),
        ({"damping": 0.99e-3}, False),
        ({"lost_steps": 11}, True),
        ({"lost_steps": 12}, False),
        ({"steps": int(newton.settings.max_steps)}, True),
        ({"steps": int(newton.settings.max_steps) + 1}, False),
    ):
        s = iterate(**going | change)
        s = s._replace(current=s.current._replace(residual=jnp.asarray(1e-3)))
        assert bool(newton.unfinished(s)) == goes_on, change
    s = iterate(**going)
    assert not newton.unfinished(s)  # no answer was usable


@pytest.mark.parametrize(
    ("change", "vanishes"),
    [
        ({}, True),
        ({"share": 1.2e-6}, False),
        ({"shrinks": 1.01}, False),
        ({"V": 1.45}, True),
        ({"V": 1.55}, False),
        ({"V": 0.55}, True),
        ({"V": 0.45}, False),
    ],
)
def test_a_student_that_has_vanished(newton, change, vanishes):
    """It is below a millionth of the teacher and shrinks further, at a V that the map changes by half at most."""
    numbers = {"share": 0.9e-6, "shrinks": 0.99, "V": 1.0} | change
    x = shrunk(numbers["share"])
    image = ta.Overlaps(numbers["shrinks"] * x.q, numbers["V"] * x.V, x.theta, x.m)
    blank = newton.begin(newton.coordinates.pack(x), NO_EVALUATION).current
    assert bool(newton.has_vanished(blank._replace(image=newton.coordinates.pack(image)))) == vanishes


def test_small_order_parameters_take_longer_steps(newton):
    """An order parameter is small below three tenths of its largest size."""
    x, order = state(CASES[0]), newton.coordinates.order > 0
    largest = (x.q * 0.25) ** 0.5
    for share, factor in ((0.29, 50), (0.31, 1)):
        v = newton.coordinates.pack(ta.Overlaps(x.q, x.V, share * largest, x.m))
        step = newton.limited_step(iterate(v=v, image=1.04 * v, damped_step=1e-4 * v))
        np.testing.assert_allclose(step, np.where(order, factor, 1) * 1e-4 * v, rtol=1e-12)
    sinking = iterate(v=v, image=1.04 * v, damped_step=-0.9 * v)
    sinking = sinking._replace(current=sinking.current._replace(sinks=jnp.array(True)))
    np.testing.assert_allclose(newton.limited_step(sinking), -0.9 * v, rtol=1e-12)  # at most the whole of a coordinate


def test_the_starts_of_the_attempts(model):
    """The second start has a smaller V, the third one a larger q. The tolerance is at least 20 roundings."""
    newton, x = newton_for(model, 3, tol=1e-30), state(CASES[0])
    v = newton.coordinates.pack(x)
    np.testing.assert_allclose(newton.tol, 20 * np.finfo(float).eps, rtol=1e-12)
    outcome = newton.begin(v, NO_EVALUATION).outcome
    for k, (by_V, by_q) in enumerate(((1.0, 1.0), (0.03, 1.0), (1.0, 4.0))):
        s = newton._attempt(v, jnp.asarray(k), outcome)
        expected = newton.coordinates.pack(ta.Overlaps(by_q * x.q, by_V * x.V, x.theta, x.m))
        np.testing.assert_allclose(s.trial, expected, rtol=1e-12)
        assert (int(s.steps), int(s.damped_steps), int(s.idle_steps), int(s.lost_steps)) == (0,) * 4
        assert not any((s.ended, s.in_damped_phase, s.left_domain, s.is_damped)) and int(s.attempt) == k
    assert int(newton.begin(v, NO_EVALUATION).attempt) == 0
