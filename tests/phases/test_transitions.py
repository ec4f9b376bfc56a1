"""alpha_c and alpha_l: reference values, derivatives against differences, the range; and the ends of branches."""

import equinox as eqx
import jax
import made
import numpy as np
import pytest
import twins
from cases import ALPHA_C, ALPHA_C_SENSITIVITIES, ALPHA_L
from numpy.polynomial import Polynomial
from toy import Toy

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import PAIR
from tiedattn_jax.phases import arclength, transitions
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.phases.family import Family
from tiedattn_jax.phases.follow import CURVE_SETTINGS, along_alpha, walk
from tiedattn_jax.phases.locate import Guess, event_path, transition_of
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.paths import Call
from tiedattn_jax.theory.setting import branch_start


@pytest.fixture(scope="module")
def critical(model, lines):
    return ta.critical_alpha(model, lines)


@pytest.fixture(scope="module")
def start(critical):
    """The states at the transition, which make the search on coarse averages unnecessary."""
    return critical.branches


def test_critical_alpha(critical):
    assert int(critical.status) <= ta.Status.stalled
    assert abs(critical.alpha - ALPHA_C) <= 3 * critical.stderr
    assert critical.stderr < 5e-3
    positional, semantic = critical.branches
    assert (positional.label, semantic.label) == ("positional", "semantic")
    np.testing.assert_allclose(positional.train_loss, semantic.train_loss, rtol=1e-4)
    for k, v in ALPHA_C_SENSITIVITIES.items():
        np.testing.assert_allclose(getattr(critical.sensitivities, k), v, rtol=1e-2)


@pytest.mark.full
def test_transition_lines(lines):
    """Ends of the lines in docs/results.md, whose own errors are below 3e-4."""
    for omega, alpha_c, alpha_l in ((0.0, 0.6147, 0.74624), (0.43, 2.0078, 2.75342)):
        model = ta.DotProduct(omega=omega)
        critical = ta.critical_alpha(model, lines)
        crossing = ta.linear_crossing(model, critical, lines)
        for transition, expected in ((critical, alpha_c), (crossing, alpha_l)):
            assert abs(transition.alpha - expected) < 3 * transition.stderr + 3e-4 < 4e-3


def test_sensitivities_are_those_of_differences(model, lines, critical, start):
    """Sensitivities equal central differences on the same nodes: the envelope formula is exact at frozen nodes."""
    models = [eqx.tree_at(lambda m: m.lam, model, model.lam + step) for step in (2e-4, -2e-4)]
    above, below = (float(ta.critical_alpha(moved, lines, start=start).alpha) for moved in models)
    np.testing.assert_allclose((above - below) / 4e-4, critical.sensitivities.lam, rtol=1e-2)


def test_gradient_is_the_sensitivity(model, lines, start):
    def alpha_c(model):
        return ta.critical_alpha(model, lines, start=start).alpha

    gradient, found = jax.grad(alpha_c)(model), ta.critical_alpha(model, lines, start=start)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(found.sensitivities), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    _, tangent = jax.jvp(lambda s: alpha_c(eqx.tree_at(lambda m: m.sigma, model, s)), (model.sigma,), (1.0,))
    np.testing.assert_allclose(tangent, gradient.sigma, rtol=1e-9)
    with pytest.raises(TypeError, match="first derivatives"):
        jax.grad(jax.grad(lambda s: alpha_c(eqx.tree_at(lambda m: m.sigma, model, s))))(model.sigma)


def test_linear_crossing(model, lines, critical, start):
    crossing = ta.linear_crossing(model, critical, lines)
    assert int(crossing.status) <= ta.Status.stalled
    assert abs(crossing.alpha - ALPHA_L) <= 3 * crossing.stderr
    (state,) = crossing.branches
    np.testing.assert_allclose(state.gen_error, state.gen_error_linear, rtol=1e-3)
    step = 0.01
    moved = eqx.tree_at(lambda m: m.omega, model, model.omega + step)
    neighbour = ta.linear_crossing(moved, ta.critical_alpha(moved, lines, start=start), lines, start=[state])
    slope = 0.5 * (crossing.sensitivities.omega + neighbour.sensitivities.omega)
    np.testing.assert_allclose((neighbour.alpha - crossing.alpha) / step, slope, rtol=3e-2)
    gradient = jax.grad(lambda m: ta.linear_crossing(m, critical, lines, start=[state]).alpha)(model)
    np.testing.assert_allclose(gradient.omega, crossing.sensitivities.omega, rtol=1e-4)


def test_a_crossing_of_two_given_states(model, lines, critical, start):
    """alpha_c by states without a name, whose theta and m are both free; and followed through a number."""
    crossing = ta.find_event(model, "crossing", lines, start=start)
    np.testing.assert_allclose(crossing.alpha, critical.alpha, rtol=1e-3)
    for k in ALPHA_C_SENSITIVITIES:
        np.testing.assert_allclose(getattr(crossing.sensitivities, k), getattr(critical.sensitivities, k), rtol=1e-2)
    assert crossing.ok and [state.branch for state in crossing.branches] == [None, None]
    np.testing.assert_allclose(crossing.rs_shift.value, critical.rs_shift.value, rtol=0.2)
    options = {"event": "crossing", "nodes": lines, "follow": True}
    with pytest.raises(ta.InputError, match="start must be two different states, got one twice"):
        ta.find_event(model, "crossing", lines, start=start[:1] * 2)
    with pytest.raises(ta.InputError, match=r"start must have q of shape \(2, 2, 2\), got shape \(2, 1, 1\)"):
        ta.find_event(ta.DotProduct(rank=2, teacher=np.eye(2)), "crossing", ta.Sobol(64), start=start)
    curve = ta.sweep(ta.find_event, model, start=crossing.branches, omega=[0.3, 0.31], **options)
    np.testing.assert_allclose(np.diff(curve.alpha) / 0.01, critical.sensitivities.omega, rtol=3e-2)


@pytest.mark.full
def test_a_crossing_of_the_only_branch(lines):
    """At sigma = .675 one branch begins where the other has ended: there is an alpha_l, .79872(33), but no alpha_c."""
    model = ta.DotProduct(sigma=0.675)
    critical = ta.critical_alpha(model, lines, bracket=(0.4, 1.0))
    assert int(critical.status) == ta.Status.absent
    crossing = ta.linear_crossing(model, critical, lines)
    state = ta.solve(model, 0.8, "semantic", lines)
    event = ta.find_event(model, "semantic baseline", lines, start=state)
    np.testing.assert_allclose(crossing.alpha, event.alpha, rtol=1e-5)
    assert abs(crossing.alpha - 0.79872) <= 3 * crossing.stderr < 0.015


@pytest.mark.parametrize("c", [0.3, 3.0])
def test_starts_have_the_units_of_the_model(c):
    """In exact twins all searches begin at the same place: V has the unit of fields squared over losses."""
    for branch in ("positional", "semantic", "uninformed", None):
        start, twin = (branch_start(twins.isotropic(twins.Unit(1 / c, loss=c**2)), branch) for c in (1.0, c))
        for name, a in vars(start).items():
            np.testing.assert_allclose(getattr(twin, name) * (c**2 if name == "V" else 1), a, rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("c", [0.1, 0.3])
def test_one_alpha_c_in_all_units(c):
    """At a weak ridge the search of the semantic branch depends on its start, which had another V in every unit."""
    standard = {"encodings": [[1.0], [-1.0]], "mixing": ta.DotProduct().mixing, "lam": 0.003}
    a, b = (ta.critical_alpha(twins.isotropic(twins.Unit(1 / u, loss=u**2), **standard)) for u in (1.0, c))
    assert a.status_name == b.status_name == "converged"
    np.testing.assert_allclose(b.alpha, a.alpha, rtol=1e-9)
    np.testing.assert_allclose(b.alpha, 0.743159, atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("alphas", [[0.6, 0.7, 0.8, 1.1, 2.0], [0.05, 3.0], [3.0, 0.05], [0.3, 2.0]])
def test_how_the_semantic_branch_ends(model, lines, alphas):
    """The semantic branch is unstable towards m below .826469(4) and ends in a pitchfork at .719178(23).

    The values come from lines of order 15. The grid may fall, and the instability lie between the fork and a point.
    """
    ends = ta.branch_ends(ta.sweep(ta.solve, model, branch="semantic", follow=True, alpha=alphas, nodes=lines), lines)
    kinds = [("pitchfork", "theta", "lower"), ("instability", "m", "lower")]
    assert [(e.kind, e.direction, e.side) for e in ends] == kinds
    for end, alpha in zip(ends, (0.719178, 0.826469), strict=True):
        assert abs(end.alpha - alpha) <= 3 * end.stderr < 0.01 and end.sensitivities is None


# Ends of a branch in closed form


class Landau(Toy):
    """A semantic branch on which alpha is ``fork + b theta^2 + c theta^4``, to one side of the fork at .7.

    Args:
        b, c: with a negative b the branch turns back in a fold, at ``fork - b^2 / 4 c``.
        side: "lower", or "upper" for a branch that exists below the fork.
        growth_m: function of alpha that returns the growth of m on the semantic branch.
        growth_at_fork: the growth of m on the uninformed state.
        has_arc: whether the branch can be followed through the fold.
    """

    fork = 0.7

    def __init__(self, b=1.0, c=1.0, side="lower", growth_m=lambda a: 0.5, growth_at_fork=0.5, has_arc=True, **options):
        sign = 1 if side == "lower" else -1
        self.f, self.has_arc = Polynomial([self.fork, 0.0, sign * b, 0.0, sign * c]), has_arc

        def square(m, a):
            inside = b**2 + 4 * c * sign * (float(a) - self.fork)
            return (np.sqrt(max(inside, 0)) - b) / (2 * c) if inside > -1e-9 else -1.0

        where = {"semantic": lambda m, a: square(m, a) > 0 and options.get("is_there", lambda a: True)(a)}
        growth = {
            "semantic": lambda m, a: (0.5, growth_m(a)),
            "uninformed": lambda m, a: (1 + sign * (a - self.fork), growth_at_fork),
        }
        losses = dict.fromkeys(("semantic", "uninformed"), lambda m, a: 0.0 * a)
        theta = {"semantic": lambda m, a: np.sqrt(square(m, a))}
        super().__init__(losses, growth=growth, theta=theta, where=where, status=int(ta.Status.absent))

    def answer(self, request):
        if isinstance(request, Call) and request.function is arclength._expand:
            return self.expansion(np.asarray(request.arguments[-1]))
        return super().answer(request)

    def expansion(self, u):
        """Return F(x) - x at coordinates q, V, theta and m of two tokens, and alpha; its Jacobian; whether x may be."""
        theta, alpha = u[4], u[8]
        r, J = np.array([0.15, 0.15, 15.0, 15.0, 0.0, theta, 0.0, 0.0]) - u[:8], -np.eye(8, 9)
        r[4], J[4, 4], J[4, 8], J[5, 4] = alpha - self.f(theta), -self.f.deriv()(theta), 1.0, 1.0
        return r, J, np.array(self.has_arc)


LOW, HIGH = [0.3, 0.5, 0.62, 0.8, 1.0, 2.0], [0.3, 0.5, 0.62, 0.8, 1.0]
FORK, LOST = "pitchfork theta lower", "instability m lower"


@pytest.mark.parametrize(
    ("toy", "alphas", "expected"),
    [
        (Landau(), LOW, {FORK: 0.7}),
        (Landau(), [0.05, 3.0], {FORK: 0.7}),  # points are added between these
        (Landau(), [3.0, 0.05], {FORK: 0.7}),
        (Landau(), [0.8, 1.0], {}),
        (Landau(side="upper"), HIGH, {"pitchfork theta upper": 0.7}),
        (Landau(-0.4, 1.0), [0.5, 0.62, 0.8, 1.0], {"fold theta lower": 0.66}),  # it turns back beyond the fork
        (Landau(-0.4, 1.0, "upper"), [0.5, 0.6, 0.8, 1.0], {"fold theta upper": 0.74}),
        (Landau(growth_m=lambda a: 1.9 - a, growth_at_fork=1.2), LOW, {FORK: 0.7, LOST: 0.9}),
        # Stability is lost between the fork and the next point.
        (Landau(growth_m=lambda a: 1.76 - a, growth_at_fork=1.06), [0.5, 0.65, 0.8, 1.0], {FORK: 0.7, LOST: 0.76}),
        (Landau(side="upper", growth_m=lambda a: a + 0.36, growth_at_fork=1.06), HIGH,
         {"instability m upper": 0.64, "pitchfork theta upper": 0.7}),
    ],
)  # fmt: skip
def test_ends_of_a_branch(model, rule, toy, alphas, expected):
    found = ends_of(toy, model, rule, alphas)
    assert [f"{e.kind} {e.direction} {e.side}" for e in found] == list(expected) and all(e.ok for e in found)
    np.testing.assert_allclose([e.alpha for e in found], list(expected.values()), rtol=1e-3)


def ends_of(toy, model, rule, alphas):
    points = [
        toy.run(step) for step in walk(Family(model, rule, CURVE_SETTINGS), along_alpha(model, alphas), "semantic")
    ]
    family = Family(model, rule, CURVE_SETTINGS)
    return toy.run(transitions._Ends(Table.of_states("semantic", points), family, False).find_all())


@pytest.mark.parametrize(
    ("toy", "alphas", "kind", "alpha", "stderr"),
    [
        (Landau(-0.4, 1.0, has_arc=False), [1.0, 0.8, 0.68, 0.6, 0.5], "fold", 0.64, 0.04),
        (Landau(growth_m=lambda a: 1.5 if a < 0.9 else 0.5, is_there=lambda a: a < 0.81 or a > 0.99), [0.8, 1.0],
         "instability", 0.9, 0.1),
    ],
)  # fmt: skip
def test_an_end_that_is_not_found_lies_between_two_points(model, rule, toy, alphas, kind, alpha, stderr):
    """It is reported midway, with half of the distance as the error bar."""
    (end,) = ends_of(toy, model, rule, alphas)
    assert (end.kind, end.status, end.side) == (kind, ta.Status.max_steps, "lower")
    np.testing.assert_allclose((end.alpha, end.stderr), (alpha, stderr), rtol=1e-9)


@pytest.mark.parametrize(
    ("start", "limits", "expected"),
    [(0.8, {}, 0.66), (1.4, {}, np.nan), (1.4, {"low": 0.6, "high": 2.0}, 0.66), (0.8, {"low": 0.67}, np.nan)],
)
def test_a_fold_is_looked_for_within_limits(model, rule, start, limits, expected):
    """By default these are half of the guess and one and a half times it."""
    toy, event = Landau(-0.4, 1.0), EVENTS["semantic fold"]
    (point,) = [
        toy.run(step) for step in walk(Family(model, rule, CURVE_SETTINGS), along_alpha(model, [start]), "semantic")
    ]
    guess = Guess(start, (point.overlaps,), **limits)
    zero = toy.run(event_path(event, Family(model, rule, ta.Settings()), guess, exact=False))
    fold = transition_of(event, model, zero)
    np.testing.assert_allclose(fold.alpha, expected, rtol=1e-5)
    assert fold.status == (ta.Status.absent if np.isnan(expected) else ta.Status.converged)


class Recording(Toy):
    """A toy that keeps the lanes that it was asked for."""

    def __init__(self, *numbers, **options):
        super().__init__(*numbers, **options)
        self.lanes = []

    def state(self, lane):
        self.lanes.append(lane)
        return super().state(lane)


DOORS = {
    "critical_alpha": lambda states, **o: ta.critical_alpha(states[0].model, start=states, **o),
    "linear_crossing": lambda states, **o: ta.linear_crossing(states[0].model, **o),
    "find_event": lambda states, **o: ta.find_event(states[0].model, "semantic baseline", start=states[1], **o),
    "branch_ends": lambda states, **o: ta.branch_ends(Table.of_states("semantic", states[1:]), **o)[0],
}


@pytest.mark.parametrize("door", DOORS)
def test_the_options_of_a_door_arrive(theory, model, rule, door):
    """Averages and settings are those of the caller, and derivatives are left out on request."""
    loss, zero = (lambda m, a: a - 1.5), (lambda m, a: 0.0 * a)
    losses = {"positional": loss, "semantic": zero, "uninformed": zero}
    errors = {"positional": lambda m, a: 9 - a, "semantic": lambda m, a: 2.8 - a}
    growth = {"semantic": lambda m, a: (0.5, 2.4 - a), "uninformed": lambda m, a: (1.5, 0.5)}
    toy = Recording(losses, errors, growth=growth)
    theory(toy)
    states = [made.point(1.3, 1.1, branch) for branch in PAIR]
    states += [made.point(1.6, 0.8)] if door == "branch_ends" else []
    found = DOORS[door](states, nodes=rule, settings=ta.Settings(tol=3e-7))
    alpha = {"critical_alpha": 1.5, "linear_crossing": 1.8, "find_event": 1.8, "branch_ends": 1.4}[door]
    np.testing.assert_allclose(found.alpha, alpha, rtol=1e-5)
    assert {float(lane.setting.settings.tol) for lane in toy.lanes} == {3e-7} and all(
        lane.setting.nodes is rule for lane in toy.lanes
    )
    assert (found.sensitivities is None) == (door == "branch_ends")
    if door in ("find_event", "branch_ends"):
        other = DOORS[door](states, nodes=rule, sensitivities=door == "branch_ends")
        assert (other.sensitivities is None) == (door == "find_event")
