"""alpha_c and alpha_l: reference values, derivatives against differences, the range; and the ends of branches."""

import operator
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
import twins
from cases import ALPHA_C, ALPHA_C_SENSITIVITIES, ALPHA_L, CASES

import tiedattn_jax as ta
from tiedattn_jax.model.parameters import Parameter
from tiedattn_jax.phases import locate, transitions
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.phases.locate import Family
from tiedattn_jax.phases.table import Table
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.solve import Problem, branch_start


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


@pytest.mark.long
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
    for name, step in (("omega", 0.01), ("lam", 2e-4)):
        alphas = []
        for s in (step, -step):
            moved = eqx.tree_at(operator.attrgetter(name), model, getattr(model, name) + s)
            alphas.append(float(ta.critical_alpha(moved, lines, start=start).alpha))
        np.testing.assert_allclose(
            (alphas[0] - alphas[1]) / (2 * step), getattr(critical.sensitivities, name), rtol=1e-2
        )


def test_gradient_is_the_sensitivity(model, lines, critical, start):
    gradient = jax.grad(lambda m: ta.critical_alpha(m, lines).alpha)(model)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(critical.sensitivities), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)

    def transition_at(sigma):
        return ta.critical_alpha(eqx.tree_at(lambda m: m.sigma, model, sigma), lines, start=start)

    _, tangent = jax.jvp(lambda sigma: transition_at(sigma).alpha, (model.sigma,), (1.0,))
    np.testing.assert_allclose(tangent, transition_at(model.sigma).sensitivities.sigma, rtol=1e-9)
    for derive in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(derive(lambda sigma: transition_at(sigma).alpha)(model.sigma), tangent, rtol=1e-9)
    with pytest.raises(TypeError, match="first derivatives"):
        jax.grad(jax.grad(lambda sigma: transition_at(sigma).alpha))(model.sigma)


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

    def transition_at(sigma):
        changed_model = eqx.tree_at(lambda m: m.sigma, model, sigma)
        return ta.linear_crossing(changed_model, critical, lines, start=[state])

    derivative = transition_at(model.sigma).sensitivities.sigma
    _, tangent = jax.jvp(lambda sigma: transition_at(sigma).alpha, (model.sigma,), (1.0,))
    np.testing.assert_allclose(tangent, derivative, rtol=1e-9)
    for derive in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(derive(lambda sigma: transition_at(sigma).alpha)(model.sigma), derivative, rtol=1e-9)


def test_linear_crossing_finds_the_transition_itself(model, lines, critical, monkeypatch):
    """alpha_c is searched with the rule and the bracket of alpha_l, whose number is also the one with alpha_c given."""
    requests, alpha_c = [], transitions._alpha_c

    def searched(family, bracket, guess=None):
        requests.append((family.nodes is lines, bracket, guess))
        return alpha_c(family, bracket, guess)

    monkeypatch.setattr(transitions, "_alpha_c", searched)
    crossing = ta.linear_crossing(model, nodes=lines, bracket=(0.5, 3.0))
    assert requests == [(True, (0.5, 3.0), None)] and abs(crossing.alpha - ALPHA_L) <= 3 * crossing.stderr
    np.testing.assert_allclose(crossing.alpha, ta.linear_crossing(model, critical, lines).alpha, rtol=1e-6)


def test_a_crossing_outside_the_range_is_absent(model, lines, critical, monkeypatch):
    """A crossing outside the range is absent if the search on coarse averages says so.

    This holds also if all nodes have a zero at the end where it stopped.
    """
    guess = locate.guess_of(EVENTS["alpha_c"], critical.branches, 0.1, 4.0)
    for converged, status in ((True, critical.status), (False, ta.Status.absent)):
        monkeypatch.setattr(
            locate, "_coarse_guess", lambda *_, converged=converged: made.finished_path((guess, converged))
        )
        assert int(ta.critical_alpha(model, lines).status) == int(status)


def test_no_crossing_in_the_range(model, lines):
    absent = ta.critical_alpha(model, lines, bracket=(1.6, 3.0))
    assert int(absent.status) == ta.Status.absent
    np.testing.assert_allclose(absent.ended_at, 1.6, rtol=2e-3)  # the end of the range beyond which it lies
    assert np.isnan([absent.alpha, absent.stderr, absent.sensitivities.sigma]).all()
    assert "the losses do not cross in the range: that of the semantic branch is lower at alpha = 1.60" in absent.reason
    crossing = ta.linear_crossing(model, absent, lines)  # the semantic state beats the baseline from 1.49 on
    assert crossing.event == "alpha_l" and int(crossing.status) == ta.Status.absent and np.isnan(crossing.alpha)
    assert "nothing changes in the range, up to the state at alpha = 1.60" in crossing.reason


def test_a_crossing_without_alpha_c(model, lines, monkeypatch):
    """Where the losses do not cross, alpha_l lies on the branch that wins; not if the other one is lower there."""
    absent = ta.critical_alpha(model, lines, bracket=(1.3, 1.4))  # above alpha_c, where the semantic branch wins
    crossing = ta.linear_crossing(model, absent, lines)
    assert crossing.ok and abs(crossing.alpha - ALPHA_L) <= 3 * crossing.stderr
    loss = transitions._loss

    def positional_wins_later(state):
        return -np.inf if state.branch == "positional" and state.alpha > 1.45 else loss(state)

    monkeypatch.setattr(transitions, "_loss", positional_wins_later)
    unknown = ta.linear_crossing(model, absent, lines)
    assert unknown.event == "alpha_l" and np.isnan(unknown.alpha) and unknown.reason == absent.reason


@pytest.mark.long
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


@pytest.mark.parametrize("c", [0.1, 0.3, 3.0])
def test_starts_have_the_units_of_the_model(c):
    """In exact twins all searches begin at the same place: V has the unit of fields squared over losses."""
    for branch in ("positional", "semantic", "uninformed", None):
        start, twin = (branch_start(twins.isotropic(twins.Unit(1 / c, loss=c**2)), branch) for c in (1.0, c))
        for name, a in vars(start).items():
            np.testing.assert_allclose(getattr(twin, name) * (c**2 if name == "V" else 1), a, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("c", [0.1, 0.3])
def test_one_alpha_c_in_all_units(c):
    """At a weak ridge the search of the semantic branch depends on its start, which had another V in every unit."""
    standard = {"encodings": [[1.0], [-1.0]], "mixing": ta.DotProduct().mixing, "lam": 0.003}
    a, b = (ta.critical_alpha(twins.isotropic(twins.Unit(1 / u, loss=u**2), **standard)) for u in (1.0, c))
    assert a.status_name == b.status_name == "converged"
    np.testing.assert_allclose(b.alpha, a.alpha, rtol=1e-9)
    np.testing.assert_allclose(b.alpha, 0.743159, atol=2e-6)


@pytest.mark.long
def test_ends_do_not_depend_on_the_grid(model, lines):
    """The instability lies between the fork and a point far above it, and the grid may fall."""
    for alphas in ([0.05, 3.0], [3.0, 0.05], [0.3, 2.0]):
        ends = ta.branch_ends(ta.sweep(model, "semantic", alpha=alphas, nodes=lines), lines)
        assert [(e.kind, e.direction, e.side) for e in ends] == [
            ("pitchfork", "theta", "lower"),
            ("instability", "m", "lower"),
        ]
        for end, alpha in zip(ends, (0.719178, 0.826469), strict=True):
            assert abs(end.alpha - alpha) <= 3 * end.stderr < 0.01


@pytest.fixture(scope="module")
def curve(model, lines):
    return ta.sweep(model, "semantic", alpha=[0.6, 0.7, 0.8, 1.1, 2.0], nodes=lines)


@pytest.fixture(scope="module")
def ends(curve, lines):
    return {e.kind: e for e in ta.branch_ends(curve, lines)}


def test_how_the_semantic_branch_ends(ends):
    """The semantic branch is unstable towards m below .826469(4) and ends in a pitchfork at .719178(23).

    The values come from lines of order 15.
    """
    fork, loss = ends["pitchfork"], ends["instability"]
    assert (fork.direction, loss.direction) == ("theta", "m") and fork.side == loss.side == "lower"
    assert abs(fork.alpha - 0.719178) <= 3 * fork.stderr < 0.01
    assert abs(loss.alpha - 0.826469) <= 3 * loss.stderr < 0.01
    assert fork.sensitivities is None


def growing(alpha):
    """The growth of theta on the uninformed state, which is one at the fork at .7."""
    return 1.0 + alpha - 0.7


def synthetic(alphas, theta, growth_m, growth_theta=growing):
    """A curve with given order parameters and stability; states exist only where theta is positive."""
    model = ta.DotProduct()
    ones = jnp.ones((2, 2, 1, 1))

    def point(alpha, theta, growth):
        status = jnp.full(2, int(ta.Status.converged if theta > 0 else ta.Status.absent))
        diagnostics = SimpleNamespace(growth_m=jnp.full(2, growth), growth_theta=jnp.full(2, growth_theta(alpha)))
        state = SimpleNamespace(
            overlaps=ta.Overlaps(ones, ones, theta * ones, 0 * ones[..., 0]),
            diagnostics=diagnostics,
            has_state=status <= 1,
        )
        return SimpleNamespace(
            alpha=jnp.asarray(alpha),
            exists=theta > 0,
            ok=theta > 0,
            overlaps=jax.tree.map(lambda a: a[0], state.overlaps),
            diagnostics=SimpleNamespace(growth_m=growth, growth_theta=growth_theta(alpha)),
            replicates=state,
            model=model,
        )

    return Table.of_states("semantic", tuple(map(point, alphas, theta, growth_m)))


def located(monkeypatch, lines, curve, growth_m, growth_theta=growing, **places):
    """Return the ends of a curve whose events lie at given places, and the events requested, in order."""
    requests = []

    def find_event(event, family, guess, *, exact):
        assert family == (curve.points[0].model, lines, options, Parameter("alpha"), None) and exact is True
        requests.append((event.name.removeprefix("semantic "), guess))
        alpha = places[requests[-1][0]]
        return made.finished_path(guess.at if alpha == "near" else alpha)

    def uninformed(self, point, guess):
        assert guess.exists and float(point.alpha) in curve.alpha
        return made.finished_path(synthetic([float(point.alpha)], [1.0], [growth_m], growth_theta).points[0])

    def transition(event, model, alpha):
        states = [synthetic([alpha], [1.0], [growth_m]).points[0]] if alpha and "pitchfork" in event.name else []
        return made.transition(alpha, 0, event.name, states) if alpha else made.transition(np.nan, 6)

    options = ta.Settings(tol=3e-4)
    monkeypatch.setattr(transitions, "_WIDEST", 100.0)  # no points are added to the curve
    monkeypatch.setattr(transitions, "event_path", find_event)
    monkeypatch.setattr(transitions, "transition_of", transition)
    monkeypatch.setattr(transitions._Ends, "uninformed", uninformed)
    return ta.branch_ends(curve, lines, settings=options, sensitivities=True), requests


@pytest.mark.parametrize(
    ("last", "fold", "kind"),
    [
        (0.6, 0.6, "pitchfork"),
        (0.8, 0.6, "fold"),
        (0.8, 0.72, "pitchfork"),
        (0.8, 0.65, "fold"),
        (0.8, 0.665, "pitchfork"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_fold_is_looked_for_next_to_a_large_order_parameter(monkeypatch, lines, last, fold, kind):
    """A fold is looked for if the order parameter next to the end is .8 of the largest along the curve, but not if .6.

    There is a fork at .7 in any case. A branch that turns back reaches further than the fork: else it is another one.
    """
    curve = synthetic([0.6, 0.8, 2.0], [0.0, last, 1.0], [0.5, 0.5, 0.5])
    (end,), requests = located(monkeypatch, lines, curve, 0.5, pitchfork=0.7, fold=fold)
    assert end.kind == kind and end.side == "lower" and end.direction == "theta"
    assert [name for name, _ in requests] == ["pitchfork"] + ["fold"] * (last == 0.8)
    if last == 0.8:
        assert (requests[1][1].low, requests[1][1].high) == pytest.approx((0.5, 0.9))


@pytest.mark.usefixtures("unchecked")
def test_a_fold_that_is_not_found_lies_in_the_bracket(monkeypatch, lines):
    """A fold that is not found is reported midway between two points, with half their distance as the error bar.

    The uninformed state is unstable on neither side, so there is no fork and a fold is looked for.
    """
    curve = synthetic([0.2, 0.6, 2.0], [0.0, 0.3, 1.0], [0.5, 0.5, 0.5])
    (end,), requests = located(monkeypatch, lines, curve, 0.5, fold=0.5)
    assert (end.kind, end.alpha, end.status_name) == ("fold", 0.5, "converged")
    (end,), requests = located(monkeypatch, lines, curve, 0.5, fold=None)
    assert [name for name, _ in requests] == ["fold"] and (requests[0][1].low, requests[0][1].high) == pytest.approx(
        (0.1, 0.8)
    )
    assert requests[0][1].at == 0.6
    assert (end.kind, end.side, end.direction) == ("fold", "lower", "theta")
    assert (end.alpha, end.stderr, end.status) == pytest.approx((0.4, 0.2, ta.Status.max_steps))


@pytest.mark.usefixtures("unchecked")
def test_a_branch_may_end_on_both_sides(monkeypatch, lines):
    """A branch may end on both sides: ends come in the order of alpha, and an upper fold counts above the fork."""
    curve = synthetic([0.2, 0.6, 1.0, 2.0], [0.0, 0.8, 1.0, 0.0], [0.5] * 4)
    ends, requests = located(monkeypatch, lines, curve, 0.5, fold="near")
    assert [(e.side, e.kind, e.alpha) for e in ends] == [("lower", "fold", 0.6), ("upper", "fold", 1.0)]
    assert [name for name, _ in requests] == ["fold", "fold"]
    np.testing.assert_allclose([(n.at, n.low, n.high) for _, n in requests], [(0.6, 0.1, 0.8), (1.0, 0.5, 2.5)])


@pytest.mark.usefixtures("unchecked")
def test_points_are_added_to_a_curve(monkeypatch, lines):
    """Gaps are filled from above by a factor of 1.26 at most, also those of a curve that falls."""
    curve, visited = synthetic([2.0, 1.0, 0.8], [1.0, 0.8, 0.6], [0.5] * 3), []

    def walk(model, alphas, *_):
        visited.extend(alphas)
        return [made.finished_path(synthetic([a], [1.0], [0.5]).points[0]) for a in alphas]

    monkeypatch.setattr(transitions, "walk", walk)
    ends = transitions._Ends(curve, Family(curve.points[0].model, lines, ta.Settings()), False)
    run_one(ends.fill())
    np.testing.assert_allclose(visited, [2 ** (2 / 3), 2 ** (1 / 3)])
    np.testing.assert_allclose(ends.curve.alpha, [0.8, 1.0, *visited[::-1], 2.0])


@pytest.mark.usefixtures("unchecked")
def test_where_stability_is_lost(monkeypatch, lines):
    """Stability is lost between two points of the curve, or between the fork at .7 and the first point at .8.

    In the second case the uninformed state is unstable at the fork.
    """
    curve = synthetic([0.6, 0.8, 1.0, 2.0], [0.0, 0.3, 0.5, 1.0], [0.5, 1.05, 0.95, 0.5])
    ends, requests = located(monkeypatch, lines, curve, 0.5, pitchfork=0.7, instability=0.9)
    assert [(e.kind, e.side, e.direction) for e in ends] == [
        ("pitchfork", "lower", "theta"),
        ("instability", "lower", "m"),
    ]
    assert [name for name, _ in requests] == ["instability", "pitchfork"]
    curve = synthetic([0.6, 0.8, 2.0], [0.0, 0.3, 1.0], [0.5, 0.5, 0.5])
    ends, requests = located(monkeypatch, lines, curve, 1.75, pitchfork=0.7, instability=0.76)
    assert [e.kind for e in ends] == ["pitchfork", "instability"]
    guess = requests[1][1]
    assert (guess.at, guess.low, guess.high, guess.there) == pytest.approx((0.76, 0.7, 0.8, 0.8))
    assert guess.slope == pytest.approx(12.5)  # the number of the event rises from -.75 to .5


@pytest.mark.usefixtures("unchecked")
def test_where_stability_is_lost_at_an_upper_end(monkeypatch, lines):
    """Between the fork at 1.5 and the last point below it, which is at 1.4."""

    def growth_theta(alpha):
        return 1.0 + 1.5 - alpha

    curve = synthetic([0.6, 1.0, 1.4, 2.0], [1.0, 0.5, 0.3, 0.0], [0.5] * 4, growth_theta)
    ends, requests = located(monkeypatch, lines, curve, 1.75, growth_theta, pitchfork=1.5, instability=1.44)
    assert [(e.kind, e.side) for e in ends] == [("instability", "upper"), ("pitchfork", "upper")]
    guess = requests[1][1]
    assert (guess.at, guess.low, guess.high, guess.there) == pytest.approx((1.44, 1.4, 1.5, 1.4))


@pytest.mark.usefixtures("unchecked")
def test_other_ends_that_are_not_found_lie_in_the_bracket(monkeypatch, lines):
    """A loss of stability that is not found lies between its points; without a fork, the end is that of the fold."""
    curve = synthetic([0.6, 0.8, 1.0, 2.0], [0.0, 0.3, 0.5, 1.0], [0.5, 1.5, 0.5, 0.5])
    ends, requests = located(monkeypatch, lines, curve, 0.5, pitchfork=None, fold=0.65, instability=None)
    assert [name for name, _ in requests] == ["instability", "pitchfork", "fold"]
    assert [(e.kind, e.alpha) for e in ends] == [("fold", 0.65), ("instability", pytest.approx(0.9))]
    assert (ends[1].stderr, ends[1].status) == pytest.approx((0.1, ta.Status.max_steps))


LINEAR = {
    "early": 0.01,
    "late": 0.003,
    "never": 0.001,
}  # beaten by both states, by one, by none


@pytest.fixture
def lookup(model, lines, monkeypatch):
    """Find alpha_l from an alpha_c with searches answered by hand; return the result, the searches and the rivals."""

    def find(when, alpha=1.25, status=0, bracket=(0.1, 4.0), rival_loss=1.0, losses=(0.0, 0.0), found=True):
        searches, rivals = [], []
        pair = tuple(
            made.fixed_point(case, gen_error_linear=[LINEAR[when]] * 4, train_loss=[case.train_loss + extra] * 4)
            for case, extra in zip((CASES[3], CASES[2]), losses, strict=True)
        )
        crossing = made.transition(
            0.75 if found else np.nan, 0 if found else 6, "alpha_l", (made.fixed_point(CASES[2]),)
        )

        def zero_path(event, family, guess, *, bracket, starts, tol):
            searches.append((event.name, bracket, guess, tol, starts))
            return made.finished_path(SimpleNamespace(at=np.asarray(0.75)))

        def solve_from_far(problem, start):
            rivals.append((float(problem.alpha), problem.free.tolist(), start))
            return made.finished_path(made.states(model, train_loss=[rival_loss] * 4))

        def transition_of(event, model, zero):
            assert event.branches == (None,)
            return crossing

        monkeypatch.setattr(transitions, "zero_path", zero_path)
        monkeypatch.setattr(transitions, "transition_of", transition_of)
        monkeypatch.setattr(Problem, "solve_from_far", solve_from_far)
        critical = made.transition(alpha, status, branches=pair)
        return ta.linear_crossing(model, critical, lines, bracket=bracket), searches, rivals

    return find


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("when", "bracket", "name", "ends", "alpha"),
    [
        ("early", (0.1, 4.0), "positional baseline", (0.1, 1.25), 0.75),
        ("late", (0.1, 4.0), "semantic baseline", (1.25, 4.0), 1.25),
        ("never", (0.1, 4.0), "semantic baseline", (1.25, 4.0), 0.75),
        ("early", (2.0, 3.0), "positional baseline", (0.99 * 1.25, 1.25), 0.75),
        ("never", (0.1, 1.0), "semantic baseline", (1.25, 1.01 * 1.25), 0.75),
    ],
)
def test_on_which_branch_alpha_l_lies(lookup, when, bracket, name, ends, alpha):
    """It is looked for on the side of alpha_c where its branch is global, in a range that is not empty."""
    result, ((event, searched, guess, tol, (start,)),), rivals = lookup(when, bracket=bracket)
    assert (event, searched) == (name, pytest.approx(ends)) and guess is None and tol == 1e-5 and rivals == []
    assert (result.event, float(result.alpha)) == ("alpha_l", alpha)
    case = CASES[3] if when == "early" else CASES[2]
    np.testing.assert_allclose(start.q, case.q)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("losses", "name", "free"),
    [((-0.1, 0.0), "positional baseline", [1.0, 0.0]), ((0.0, -0.1), "semantic baseline", [0.0, 1.0])],
)
def test_alpha_l_where_the_losses_do_not_cross(lookup, model, losses, name, free):
    """The branch that is global at the end of the search counts, unless the other one is lower at alpha_l."""
    state_loss = CASES[2].train_loss
    for rival, counts in ((2 * state_loss, True), (0.5 * state_loss, False)):
        result, ((event, ends, *_),), ((at, rival_free, start),) = lookup(
            "late", np.nan, 6, losses=losses, rival_loss=rival
        )
        assert event == name and (at, rival_free) == (0.75, free)
        assert ends == ((0.1, 1.25) if name.startswith("positional") else (1.25, 4.0))
        assert (start.theta[0, 0, 0] != 0) == (free[0] == 1)
        assert bool(result.ok) == counts and (float(result.alpha) == 0.75) == counts
    result, searches, rivals = lookup("late", np.nan, 6, losses=losses, found=False)
    assert result.status == ta.Status.absent and rivals == []
    result, searches, _ = lookup("late", 1.25, int(ta.Status.max_steps))  # the global minimum is not known
    assert searches == [] and result.status == ta.Status.max_steps and result.event == "alpha_l"


@pytest.mark.usefixtures("unchecked")
def test_the_default_range_of_alpha_c(model, lines, monkeypatch):
    calls = []

    def zero_path(event, family, guess, **options):
        calls.append((event.name, guess, options))
        raise InterruptedError
        yield

    monkeypatch.setattr(transitions, "zero_path", zero_path)
    for call in (
        lambda: ta.critical_alpha(model, lines),
        lambda: ta.linear_crossing(model, nodes=lines),
        lambda: run_one(transitions.transition_path("alpha_c", Family(model, lines, ta.Settings()))),
    ):
        with pytest.raises(InterruptedError):
            call()
        name, guess, options = calls[-1]
        assert (name, guess, options["bracket"], options["tol"]) == ("alpha_c", None, (0.1, 4.0), 1e-5)
        assert [bool(np.any(x.theta)) for x in options["starts"]] == [False, True]
