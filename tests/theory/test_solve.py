"""Solves of the branches: reference states, error bars, states that are not there, and which searches a solve makes."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, state
from made import numbers_of
from problems import PROBLEMS, rule, solved

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.base.results import Status, error_bar
from tiedattn_jax.model.overlaps import admissible
from tiedattn_jax.theory import solve as solving
from tiedattn_jax.theory.setting import Setting

IDS = {"ids": lambda c: f"{c.branch} {c.alpha}"}


def exact_numbers(case):
    return np.array([getattr(case, k) for k in ("q", "V", "theta", "m", "train_loss", "gen_error")])


@pytest.mark.parametrize("name", ["lines", "points"])
@pytest.mark.parametrize("case", CASES, **IDS)
def test_reference_states(case, name):
    """States on lines are right to a thousandth, those on a thousand points to a tenth."""
    fp, precision = solved("standard", case.branch, name, case.alpha), {"lines": 1e-3, "points": 0.1}[name]
    assert bool(fp.ok) and fp.label == case.branch
    value, exact = np.asarray(numbers_of(fp.replicates)).mean(0), exact_numbers(case)
    np.testing.assert_allclose(np.abs(value), exact, rtol=precision, atol=1e-12)
    held = {"semantic": "m", "positional": "theta"}[case.branch]
    assert not np.any(getattr(fp.overlaps, held)) and not np.any(getattr(fp.conjugates, held))
    np.testing.assert_allclose(fp.diagnostics.train_loss_direct, fp.train_loss, rtol=1e-3)
    np.testing.assert_allclose(fp.gen_error_linear, 0.0039428 / 2, rtol=2e-3 if name == "lines" else 0.05)


@pytest.mark.parametrize("case", [CASES[1], *(pytest.param(c, marks=pytest.mark.full) for c in CASES[::4])], **IDS)
def test_error_bars_are_honest(model, case):
    """In twenty independent runs of four replicates the truth lies within two error bars nine times in ten."""
    within = []
    for seed in range(20):
        fp = ta.solve(model, case.alpha, case.branch, ta.Lines(5, seed=seed).rule(model), start=state(case))
        values = np.asarray(numbers_of(fp.replicates))[:, :5]
        bars = 2 * np.asarray(error_bar(values)) + 1e-15
        within.append(np.abs(values.mean(0) - exact_numbers(case)[:5]) <= bars)
    assert np.mean(within) >= 0.9, np.mean(within, 0)
    assert bool(fp.jumps) == (case is not CASES[0]) and float(fp.diagnostics.unresolved) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize(("order", "error"), [(5, 5e-4), (7, 2e-4), (9, 4e-5)])
def test_errors_of_the_orders(model, order, error):
    """The docstring of `line_nodes` and the pages on precision and jumps state these errors of order parameters."""
    nodes, masses = ta.Lines(order).rule(model), []
    for case in CASES:
        fp = ta.solve(model, case.alpha, case.branch, nodes, start=state(case))
        names = "q", "V", "m" if case.m else "theta"
        found, expected = ([abs(getattr(a, name)) for name in names] for a in (fp, case))
        np.testing.assert_allclose(found, expected, rtol=error)
        masses.append(float(fp.diagnostics.jump_mass))
    np.testing.assert_allclose(masses, [0.0, 0.07, 0.03, 0.13, 0.30], atol=0.02)


@pytest.mark.full
@pytest.mark.parametrize("rtol", [1e-3, 3e-4])
def test_rtol_is_reached(model, rtol):
    for case in CASES[:2]:
        fp = ta.solve(model, case.alpha, case.branch, rtol=rtol)
        assert fp.ok and fp.stderr.train_loss <= rtol * fp.train_loss
        np.testing.assert_allclose([fp.q, fp.V, fp.train_loss], [case.q, case.V, case.train_loss], rtol=3 * rtol)


def test_the_loss_moves_with_the_norm_of_the_teacher(model):
    """A change of 4 % in the norm, the scatter of instances at d = 1000, moves the training loss by 3 to 5 %."""
    larger = model.with_teacher(1.04 * model.teacher)
    for case in CASES:
        fp = ta.solve(larger, case.alpha, case.branch, rule("lines"), start=state(case))
        assert 0.025 < fp.train_loss / case.train_loss - 1 < 0.055


def test_absent_branch_is_said_to_be_absent():
    """The semantic branch ends at the pitchfork at alpha = .72, and a purely positional target has none."""
    for branch, alpha in (("semantic", 0.3), ("positional", 0.03)):
        point = solved("standard", branch, "lines", alpha)
        assert int(point.status) == Status.absent and not bool(point.ok)
        assert np.isnan([point.train_loss, point.gen_error]).all() and np.isfinite([point.q, point.V]).all()
    without = ta.solve(ta.DotProduct(omega=1.0), 2.0, "semantic", rule("points"))
    assert not bool(without.ok)
    np.testing.assert_allclose(without.gen_error_linear, 0, atol=1e-15)


@pytest.mark.parametrize("forward", [False, pytest.param(True, marks=pytest.mark.full)], ids=["reverse", "forward"])
def test_what_is_not_there_has_no_derivative(model, forward):
    """Numbers of an absent and of a failed state have derivatives of zero, in both modes, also behind `where`."""

    def numbers(alpha, settings=None):
        point = ta.solve(model, alpha, "semantic", rule("points"), settings=settings)
        masked = jnp.where(point.ok, (point.train_loss - 0.01) ** 2 + point.theta, 7.0)
        return point.train_loss, point.gen_error, point.theta, masked

    for alpha, settings in ((0.3, None), (2.0, ta.Settings(max_steps=0, warm_steps=0))):
        if forward:
            assert not np.any(jax.jvp(lambda a, s=settings: numbers(a, s), (alpha,), (1.0,))[1])
        else:
            value, slope = jax.value_and_grad(lambda a, s=settings: sum(numbers(a, s)[2:]))(alpha)
            assert slope == 0 and value >= 7
    if not forward:
        assert jax.grad(lambda a: numbers(a)[3])(2.0) != 0


def test_debugging_of_nans():
    """It stops where the loss that does not exist becomes NaN; docs/faq.md says what to write."""
    point = solved("standard", alpha=0.3)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            _ = point.train_loss
        with jax.debug_nans(False):
            assert np.isnan(point.train_loss)


def test_uninformed_branch():
    fp = solved("standard", "uninformed", "lines", 1.0)
    assert bool(fp.ok) and fp.label == "uninformed"
    assert float(fp.diagnostics.growth_m) > 1 and float(fp.diagnostics.growth_theta) > 1


def test_options_are_honoured(model):
    few, damped = {"max_steps": 1, "warm_steps": 0}, {"max_steps": 1, "warm_steps": 3}
    options = {"tol": 1e-9}, {"tol": 1e-2}, few | {"max_steps": 0}, few, damped, damped | {"damping": 0.05}
    points = [ta.solve(model, 2.0, "positional", rule("points"), settings=ta.Settings(**o)) for o in options]
    residuals = [float(point.residual) for point in points]
    assert residuals[0] < residuals[1] and len(set(residuals)) == len(options)
    assert int(points[2].status) == int(points[3].status) == Status.max_steps


def kind_of(rule):
    return {"LineNodes": "L", "Nodes": "S"}[type(rule).__name__]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("lines", "points", "kinds", "status"),
    [
        ((Status.unresolved, 1e-5), (0, 1e-3), "LSSS", 0),  # whatever their error bars
        ((0, 0.1), (0, 1e-3), "LSSS", 0),
        ((0, 0.05), (0, 0.5), "LS" * 5, Status.imprecise),  # a bifurcation enlarges the error bars, and points do worse
        ((0, 0.0011), (0, 0.0), "LLLL", 0),  # an error bar small enough to go on with lines
        ((Status.max_steps, 0.0), (Status.max_steps, 0.0), "LS", Status.max_steps),
    ],
)
def test_rtol_takes_sobol_points_where_they_do_better(monkeypatch, lines, points, kinds, status):
    """Solves go on, on more and more nodes and from the last state, until the error bar is small enough."""
    requests = []

    def solve_checked(request, progress=None):
        requests.append(request)
        status, bar = lines if kind_of(request.nodes.stack) == "L" else points
        scatter = 1.05 * bar / len(requests) * np.array([1, -1, 1, -1])
        return made.fixed_point(scatter=scatter, status=[int(status)] * 4)

    monkeypatch.setattr(solving, "solve_checked", solve_checked)
    point = ta.solve(ta.DotProduct(), 2.0, rtol=3e-4)
    assert "".join(kind_of(r.nodes.stack) for r in requests) == kinds and point.status == status
    sizes = [r.nodes.size for r in requests[::2]]
    assert sizes == sorted(set(sizes)) and requests[0].start is None and all(r.start is not None for r in requests[2:])


def searched(answer, model=None, nodes=None, start=None):
    """Run the path of `solve` on lanes that are answered by hand; return the states, the lanes and what is free.

    Args:
        answer: function of a lane that makes the `State` of its replicates.
    """
    lanes, model = [], model or ta.DotProduct()

    def noted(lane):
        lanes.append(lane)
        return indexed(jax.tree.map(np.asarray, answer(lane)), 0)

    nodes, is_default = default_recipe(model).rule(model) if nodes is None else nodes, nodes is None
    setting = Setting.of(model, jnp.asarray(2.0), nodes, "semantic", ta.Settings())
    path = solving.default_path(setting, "semantic", start, fallback=is_default)
    states, _, free = made.answer_path(path, noted)
    return ta.results.FixedPoint(model, jnp.asarray(2.0), states, "semantic"), lanes, np.asarray(free).tolist()


def small(states, size):
    return eqx.tree_at(lambda s: s.overlaps.theta, states, size * states.overlaps.theta)


@pytest.mark.parametrize(
    ("problem", "bad", "kinds", "end"),
    [
        ("standard", {"status": [int(Status.unresolved)]}, "LLLLLSSSSS", Status.stalled),
        ("standard", {"status": [int(Status.max_steps)]}, "LLLLL", Status.max_steps),
        # Replicates are not tried after a hopeless coarse state.
        ("standard", {"status": [int(Status.unresolved)], "unresolved": [0.21], "residual": [0.02]}, "LSSSSS", 1),
        ("tokens", {"status": [int(Status.unresolved)]}, "SSSS", Status.unresolved),  # points are the default here
    ],
)
def test_sobol_points_where_the_default_lines_are_not_resolved(problem, bad, kinds, end):
    model = PROBLEMS[problem].model

    def answer(lane):
        is_bad = problem == "tokens" or kind_of(lane.setting.nodes.stack) == "L"
        return made.states(model, scatter=(0.0,), **(bad if is_bad else {"status": [1]}))

    start = made.overlaps_of(0.1, 12.0, 0.1, tokens=3) if problem == "tokens" else None
    point, lanes, _ = searched(answer, model, start=start)
    assert "".join(kind_of(lane.setting.nodes.stack) for lane in lanes) == kinds and point.status == end


SCATTER = (0.5, -2.0, -2.5, 0.0)  # theta has either sign


@pytest.mark.parametrize(
    ("searched_status", "size", "scatter", "growth", "status", "is_held"),
    [
        (2, 0.1, (0.0,) * 4, 0.95, Status.absent, True),
        (2, 0.1, (0.0,) * 4, 1.05, Status.max_steps, True),  # it grows there, so it was no scatter
        (2, 1.0, (0.0,) * 4, 0.95, Status.max_steps, False),  # too large to be scatter
        (0, 1.0, SCATTER, 0.95, Status.absent, True),
        (0, 1.0, SCATTER, 1.05, Status.converged, True),
        (0, 1.0, (0.1, -0.1, -0.1, 0.1), 0.95, Status.converged, False),  # beside a stable uninformed state
    ],
)
def test_a_small_order_parameter_is_held_at_zero(model, searched_status, size, scatter, growth, status, is_held):
    """It may be due to the scatter of the nodes, unless it grows on the uninformed state."""
    held = made.states(model, growth_theta=[growth] * 4)
    own = small(made.states(model, scatter=scatter, status=[searched_status] * 4), size)

    def answer(lane):
        return jax.tree.map(lambda a: a[max(lane.replicate, 0) :], own if lane.setting.free[0] else held)

    point, lanes, free = searched(answer, nodes=rule("lines"))
    assert point.status == status and any(lane.setting.free[0] == 0 for lane in lanes) == is_held
    assert free == [float(status != Status.absent), 0.0]


def test_a_branch_that_vanishes_is_looked_for_again(model):
    """The second search starts where the first one ended, with large overlaps; its state is used only if it is one."""
    state = indexed(solved("standard", name="lines").replicates, 0)
    vanished = dataclasses.replace(small(state, 1e-5), status=jnp.asarray(int(Status.absent)))
    for second in (state, vanished):
        answers = iter([vanished, second])
        _, lanes, _ = searched(
            lambda lane, a=answers: jax.tree.map(lambda a: a[None], next(a, state)), nodes=rule("lines")
        )
        revived, near = lanes[1].start, lanes[2].start
        np.testing.assert_allclose(revived.theta**2 / (revived.q * model.rho), 0.8, rtol=1e-6)
        np.testing.assert_allclose([revived.q, revived.V], [vanished.overlaps.q, 0.5 * vanished.overlaps.V])
        np.testing.assert_array_equal(near.theta, second.overlaps.theta)


def test_a_revived_start_of_several_columns():
    """Its teacher explains .8 of the vanished student in the best direction, and m scales with the student."""
    model = PROBLEMS["columns"].model
    start = solving.branch_start(model, None)
    vanished = dataclasses.replace(start, q=0.09 * start.q, V=3 * start.V, theta=0 * start.theta, m=0 * start.m)
    revived = solving.revived(model, start, vanished)
    assert bool(admissible(model, revived))
    np.testing.assert_allclose(revived.m, 0.3 * start.m, rtol=1e-12)
    q, theta, rho = map(np.asarray, (revived.q, revived.theta, model.rho))
    shares = np.linalg.eigvals(np.linalg.solve(q, theta @ np.linalg.solve(rho, theta.swapaxes(1, 2))))
    np.testing.assert_allclose(shares.real.max(), 0.8, rtol=1e-9)


def test_a_neighbour_of_larger_tokens_or_another_teacher_is_a_start(model):
    """The weights of the neighbour are the start. Its overlaps are not admissible where the tokens are smaller."""
    large = ta.solve(ta.DotProduct(sigma=0.58, teacher=1.1), 2.6, "semantic", rule("lines"))
    assert large.ok and not admissible(model, large.overlaps)
    with pytest.raises(ta.InputError, match="start must be finite"):
        ta.solve(model, 2.6, "semantic", rule("lines"), start=large.overlaps)
    cold, warm = (ta.solve(model, 2.6, "semantic", rule("lines"), start=start) for start in (None, large))
    assert warm.ok
    np.testing.assert_allclose(warm.gen_error, cold.gen_error, rtol=1e-5)


def test_a_branch_that_is_not_found_from_a_start_is_looked_for_from_its_own(model):
    positional = state(CASES[1])  # theta is zero, and stays so
    found = ta.solve(model, 2.0, "semantic", rule("lines"), start=positional)
    assert found.ok and found.label == "semantic"
    np.testing.assert_allclose(found.theta, solved("standard", name="lines").theta, rtol=1e-9)


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_coarse_state_that_is_lost_ends_the_search(jit):
    """Replicates do not look for what the coarse rule cannot resolve."""
    model = ta.DotProduct(0.33, 2.54, 4e-4, ((0.85, 0.15), (0.63, 0.37)))
    settings = ta.Settings(max_steps=1, warm_steps=20)

    def solve(alpha):
        return ta.solve(model, alpha, "uninformed", rule("lines"), settings=settings).replicates

    states = (jax.jit(solve) if jit else solve)(6.2)
    np.testing.assert_array_equal(states.status, Status.unresolved)
    assert np.all(states.overlaps.V == states.overlaps.V[:1])
    assert states.diagnostics.unresolved[0] > 0.15 and states.residual[0] > 0.01


@pytest.mark.full
def test_a_branch_with_a_large_response_is_not_absent():
    """At lam = .0003 the first search misses the semantic state, which a neighbour's state leads to."""
    model = ta.DotProduct(lam=3e-4)
    neighbour = ta.solve(ta.DotProduct(lam=4e-4), 1.0, "semantic")
    cold, warm = ta.solve(model, 1.0, "semantic"), ta.solve(model, 1.0, "semantic", start=neighbour)
    jitted = jax.jit(lambda alpha: ta.solve(model, alpha, "semantic"))(1.0)
    assert cold.ok and warm.ok and jitted.ok
    np.testing.assert_allclose(jitted.theta, cold.theta, rtol=1e-4)
    assert abs(cold.theta - warm.theta) < 3 * cold.stderr.overlaps.theta[0, 0, 0] and abs(cold.theta - 0.1807) < 2e-3


@pytest.mark.parametrize(
    ("bars", "error"),
    [({"V": 0.2, "theta": 0.1}, 0.2), ({"q": 0.3}, 0.3), ({"theta": 0.4, "m": 0.5}, 0.4), ({"train_loss": 0.5}, 0.5)],
)
def test_the_largest_relative_error(bars, error):
    """It is over the entries of all order parameters and the training loss; zeros have none, and a failure any."""
    scatter, point = np.array([1.0, -1.0, 1.0, -1.0]), made.fixed_point()
    for name, bar in bars.items():
        factor = 1 + bar * scatter / float(error_bar(scatter))

        def place(point, name=name):
            return getattr(point.replicates if name == "train_loss" else point.replicates.overlaps, name)

        point = eqx.tree_at(place, point, replace_fn=lambda a, f=factor: (np.asarray(a).T * f).T)
    np.testing.assert_allclose(solving._relative_error(point), error, rtol=1e-9)
    failed = eqx.tree_at(lambda p: p.replicates.status, point, np.full(4, 2))
    assert np.isinf(solving._relative_error(failed))
