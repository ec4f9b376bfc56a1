import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, state
from made import numbers_of

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.base.results import Status, error_bar
from tiedattn_jax.model.overlaps import BRANCHES, admissible
from tiedattn_jax.theory import solve as solving
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.paths import together
from tiedattn_jax.theory.solve import Problem


def exact_numbers(case):
    return np.array([getattr(case, k) for k in ("q", "V", "theta", "m", "train_loss", "gen_error")])


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.branch} {c.alpha}")
def test_reference_states(solved, case):
    fp = solved(case.alpha, case.branch)
    assert bool(fp.ok) and fp.label == case.branch
    value, bar, exact = numbers_of(fp.replicates).mean(0), ta.error_bar(numbers_of(fp.replicates)), exact_numbers(case)
    assert np.all(np.abs(value - exact) <= 4 * bar + 1e-12), (value, bar)
    assert np.all(bar[:4] <= 0.03 * np.abs(value[:4]))  # on 2^13 nodes
    held = {"semantic": "m", "positional": "theta"}[case.branch]
    assert not np.any(getattr(fp.overlaps, held)) and not np.any(getattr(fp.conjugates, held))
    np.testing.assert_allclose(fp.diagnostics.train_loss_direct, fp.train_loss, rtol=1e-3)
    np.testing.assert_allclose(fp.gen_error_linear, 0.0039428 / 2, rtol=2e-3)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=lambda c: f"{c.branch} {c.alpha}")
def test_error_bars_are_honest(model, case):
    """In twenty independent runs of four replicates the truth lies within two error bars nine times in ten."""
    within = []
    for seed in range(20):
        fp = ta.solve(model, case.alpha, case.branch, ta.Lines(5, seed=seed).rule(model), start=state(case))
        values = numbers_of(fp.replicates)[:, :5]
        within.append(np.abs(values.mean(0) - exact_numbers(case)[:5]) <= 2 * ta.error_bar(values) + 1e-15)
    assert np.mean(within) >= 0.9, np.mean(within, 0)
    assert bool(fp.jumps) == (case is not CASES[0]) and float(fp.diagnostics.unresolved) < 1e-3


@pytest.mark.long
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


def test_the_loss_moves_with_the_norm_of_the_teacher(model, lines):
    """A change of 4 % in the norm, the scatter of instances at d = 1000, moves the training loss by 3 to 5 %."""
    for case in CASES:
        fp = ta.solve(model.with_teacher(1.04 * model.teacher), case.alpha, case.branch, lines, start=state(case))
        assert 0.025 < fp.train_loss / case.train_loss - 1 < 0.055


def test_absent_branch_is_said_to_be_absent(model, lines, nodes):
    """The semantic branch ends at the pitchfork at alpha = .72, and a purely positional target has none."""
    fp = ta.solve(model, 0.3, "semantic", lines)
    positional = ta.solve(model, 0.03, "positional", lines)
    assert not bool(fp.ok) and int(positional.status) == ta.Status.absent
    for point in (fp, positional):
        assert np.isnan([point.train_loss, point.gen_error]).all() and np.isfinite([point.q, point.V]).all()
    without = ta.solve(ta.DotProduct(omega=1.0), 2.0, "semantic", nodes)
    assert not bool(without.ok)
    np.testing.assert_allclose(without.gen_error_linear, 0, atol=1e-15)


def test_what_is_not_there_has_no_derivative(model):
    """Numbers of an absent and of a failed state have derivatives of zero, in both modes, also behind `where`."""
    rule = ta.Sobol(2**8, replicates=2).rule(model)
    short = ta.Settings(max_steps=0, warm_steps=0)

    def numbers(alpha, settings, select):
        point = ta.solve(model, alpha, "semantic", rule, settings=settings)
        return select(point)

    def masked(point):
        return jnp.where(point.ok, (point.train_loss - 0.01) ** 2 + point.theta, 7.0)

    for alpha, settings, status in ((0.3, None, Status.absent), (2.0, short, Status.max_steps)):
        assert numbers(alpha, settings, lambda p: p.status) == status
        for select in (lambda p: p.train_loss, lambda p: p.gen_error, lambda p: p.theta, masked):
            value, slope = jax.value_and_grad(numbers)(alpha, settings, select)
            forward = jax.jvp(lambda a, s=settings, f=select: numbers(a, s, f), (alpha,), (1.0,))[1]
            assert slope == forward == 0 and (select is not masked or value == 7)
    assert jax.grad(numbers)(2.0, None, masked) != 0
    # NaN debugging stops where the loss that does not exist becomes NaN; docs/faq.md says what to write.
    point = ta.solve(model, 0.3, "semantic", rule)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            masked(point)
        with jax.debug_nans(False):
            loss = masked(point)
        assert loss + 1 == 8


def test_uninformed_branch(solved):
    fp = solved(1.0, "uninformed")
    assert bool(fp.ok) and fp.label == "uninformed"
    assert float(fp.diagnostics.growth_m) > 1 and float(fp.diagnostics.growth_theta) > 1


def test_options_are_honoured(model, nodes):
    options = {"tol": 1e-2}, {"tol": 1e-9}, {"max_steps": 0, "warm_steps": 0}
    rough, fine, short = (ta.solve(model, 2.0, "positional", nodes, settings=ta.Settings(**o)) for o in options)
    assert rough.residual > fine.residual and int(short.status) == ta.Status.max_steps


def kind_of(rule):
    return {"LineNodes": "L", "Nodes": "S"}[type(rule).__name__]


def stub_solve(monkeypatch, lines, points=(0, 0.0)):
    """Replace `solve_checked` by a stub that notes requests and returns a status and an error bar by kind of rule."""
    requests = []

    def solve_checked(request, progress=None):
        kind = kind_of(request.nodes.stack)
        requests.append((kind, request.nodes.size, request.start))
        status, bar = lines if kind == "L" else points
        scatter = 1.05 * bar / len(requests) * np.array([1, -1, 1, -1])
        return made.fixed_point(scatter=scatter, status=[int(status)] * 4)

    monkeypatch.setattr(solving, "solve_checked", solve_checked)
    return requests


def refined(model, rtol, **settings):
    request = solving.Request(model, jnp.array(2.0), "semantic", settings=ta.Settings(**settings))
    return solving._refined(request, rtol, None)


@pytest.mark.usefixtures("unchecked")
def test_rtol_refines_until_the_bars_are_small(model, monkeypatch):
    requests = stub_solve(monkeypatch, lines=(0, 1e-3))
    point, sizes = refined(model, 4e-4, tol=4e-5), (2**14, 2**15, 2**16)
    assert [size for _, size, *_ in requests] == [default_recipe(model, n).rule(model).size for n in sizes]
    assert requests[0][2] is None and requests[1][2] is not None and point.ok
    monkeypatch.setattr(
        solving, "_refined", lambda request, rtol, progress: request.settings
    )  # rtol sets the tolerance
    assert float(ta.solve(model, 2.0, rtol=1e-6).tol) == 1e-7 and float(ta.solve(model, 2.0, rtol=1e-3).tol) == 1e-5


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rtol", "log_n"),
    [(1e-3, 12), (9e-4, 14), (3e-4, 14), (2.9e-4, 15), (5.9e-5, 16), (2.9e-5, 18), (3.9e-6, 19), (1e-9, 19)],
)
def test_the_averages_on_which_refinement_begins(model, monkeypatch, rtol, log_n):
    requests = stub_solve(monkeypatch, lines=(0, 0.0))
    assert refined(model, rtol).ok
    assert [size for _, size, *_ in requests] == [default_recipe(model, 2**log_n).rule(model).size]


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
def test_rtol_takes_sobol_points_where_they_do_better(model, monkeypatch, lines, points, kinds, status):
    requests = stub_solve(monkeypatch, lines, points)
    point = refined(model, 3e-4)
    assert "".join(kind for kind, *_ in requests) == kinds and point.status == status


def answer_lanes(monkeypatch, answer):
    """Answer the lanes of `solve` by hand: `answer(lane)` makes the `State` of its replicates, which are returned."""
    lanes = []

    def noted(lane):
        lanes.append(lane)
        return indexed(jax.tree.map(np.asarray, answer(lane)), 0)

    monkeypatch.setattr(solving, "run_one", lambda path, progress=None: made.answer_path(path, noted))
    return lanes


@pytest.mark.parametrize(("status", "kinds", "end"), [(Status.unresolved, "LS", 1), (Status.max_steps, "L", 2)])
def test_sobol_points_where_the_default_lines_are_not_resolved(model, monkeypatch, status, kinds, end):
    def answer(lane):
        return made.states(model, scatter=(0.0,), status=[int(status) if kind_of(lane.rule.stack) == "L" else 1])

    lanes = answer_lanes(monkeypatch, answer)
    point = ta.solve(model, 2.0, start=state(CASES[0]))
    assert "".join(dict.fromkeys(kind_of(lane.rule.stack) for lane in lanes)) == kinds and point.status == end


@pytest.mark.parametrize(("share", "residual", "count"), [(0.19, 0.009, 5), (0.21, 0.009, 1), (0.19, 0.011, 1)])
def test_lines_that_resolve_too_little_are_left_at_once(model, monkeypatch, share, residual, count):
    """Replicates are not tried after a hopeless coarse state; nothing is held at zero among unresolved nodes."""
    bad = {"status": [int(Status.unresolved)], "unresolved": [share], "residual": [residual]}

    def answer(lane):
        states = made.states(model, scatter=(0.0,), **(bad if kind_of(lane.rule.stack) == "L" else {}))
        return eqx.tree_at(lambda s: s.overlaps.theta, states, 0.1 * states.overlaps.theta)

    lanes = answer_lanes(monkeypatch, answer)
    assert ta.solve(model, 2.0).ok
    assert [kind_of(lane.rule.stack) for lane in lanes] == ["L"] * count + ["S"] * 5


def test_the_same_points_are_not_tried_again(monkeypatch):
    """An unresolved state on Sobol points, the default rule of three tokens, is not tried again on the same points."""
    wide = ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=np.array([[-1.0], [0.0], [1.0]]))
    unresolved = made.states(wide, scatter=(0.0,), status=[int(Status.unresolved)])
    lanes = answer_lanes(monkeypatch, lambda lane: unresolved)
    assert ta.solve(wide, 2.0, start=made.overlaps_of(0.1, 12.0, 0.1, tokens=3)).status == Status.unresolved
    assert [kind_of(lane.rule.stack) for lane in lanes] == ["S"] * 4


@pytest.mark.parametrize(
    ("size", "growth", "status", "frees"),
    [
        (0.1, 0.95, Status.absent, [1.0, 0.0]),
        (0.1, 1.05, Status.max_steps, [1.0, 0.0]),  # it grows there, so it was no scatter
        (1.0, 0.95, Status.max_steps, [1.0]),  # too large to be scatter, so the uninformed state is not tried
    ],
)
def test_a_small_order_parameter_is_held_at_zero(model, nodes, monkeypatch, size, growth, status, frees):
    def answer(lane):
        if lane.free[0] == 0:
            return made.states(model, growth_theta=[growth] * 4)
        failed = made.states(model, status=[2] * 4)
        return eqx.tree_at(lambda s: s.overlaps.theta, failed, size * failed.overlaps.theta)

    lanes = answer_lanes(monkeypatch, answer)
    assert ta.solve(model, 2.0, "semantic", nodes).status == status
    assert list(dict.fromkeys(float(lane.free[0]) for lane in lanes)) == frees


@pytest.mark.parametrize(
    ("scatter", "growth", "status", "frees"),
    [
        ((0.5, -2.0, -2.5, 0.0), 0.95, Status.absent, [1.0, 0.0]),  # theta has either sign
        ((0.5, -2.0, -2.5, 0.0), 1.05, Status.converged, [1.0, 0.0]),
        ((0.1, -0.1, -0.1, 0.1), 0.95, Status.converged, [1.0]),  # a state beside a stable uninformed one
        ((0.0,), 0.95, Status.converged, [1.0]),  # a single replicate has no error bar
    ],
)
def test_an_order_parameter_within_its_error_bar(model, monkeypatch, scatter, growth, status, frees):
    states = made.states(model, scatter=scatter, growth_theta=[growth] * len(scatter))
    lanes = answer_lanes(monkeypatch, lambda lane: jax.tree.map(lambda a: a[max(lane.replicate, 0) :], states))
    rule = ta.Sobol(64, replicates=len(scatter)).rule(model)
    assert ta.solve(model, 2.0, "semantic", rule).status == status
    assert list(dict.fromkeys(float(lane.free[0]) for lane in lanes)) == frees


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_coarse_state_that_is_lost_ends_the_search(lines, jit):
    """Replicates do not look for what the coarse rule cannot resolve."""
    model = ta.DotProduct(0.33, 2.54, 4e-4, ((0.85, 0.15), (0.63, 0.37)))
    settings = ta.Settings(max_steps=1, warm_steps=20)
    solve = lambda alpha: ta.solve(model, alpha, "uninformed", lines, settings=settings).replicates  # noqa: E731
    states = (jax.jit(solve) if jit else solve)(6.2)
    np.testing.assert_array_equal(states.status, Status.unresolved)
    assert np.all(states.overlaps.V == states.overlaps.V[:1])
    assert states.diagnostics.unresolved[0] > 0.15 and states.residual[0] > 0.01


def test_which_searches_a_solve_makes(model, nodes, monkeypatch):
    """`solve` searches the coarse replicate from several starts, then the others from its state, as settings say."""
    coarse_state, settings = made.states(model, CASES[1], scatter=(0.0,)), ta.Settings(damping=0.1)
    lanes = answer_lanes(monkeypatch, lambda lane: coarse_state)
    ta.solve(model, 2.0, "semantic", nodes, settings=settings)
    assert [lane.replicate for lane in lanes] == [-1, 0, 1, 2, 3] and all(lane.settings is settings for lane in lanes)
    assert [lane.attempts for lane in lanes] == [3, 1, 1, 1, 1]
    np.testing.assert_array_equal(lanes[1].start.V, coarse_state.overlaps.V[0])
    lanes.clear()
    ta.solve(model, 2.0, "semantic", nodes, start=state(CASES[0]), settings=settings)
    assert [lane.replicate for lane in lanes] == [0, 1, 2, 3] and lanes[-1].settings is settings


def test_a_branch_that_vanishes_is_looked_for_again(model, nodes, solved):
    """The second search starts where the first one ended, with large overlaps; its state is used only if it is one."""
    problem = Problem(model, jnp.asarray(2.0), nodes, BRANCHES["semantic"].free(model), ta.Settings())
    start, state = solving.branch_start(model, "semantic"), indexed(solved(2.0, "semantic").replicates, 0)
    small = dataclasses.replace(state.overlaps, theta=1e-5 * state.overlaps.theta)
    vanished = dataclasses.replace(state, status=jnp.asarray(int(Status.absent)), overlaps=small)
    for second, expected in ((state, state.overlaps.theta), (vanished, small.theta)):
        path = problem.solve_from_far(start)
        assert next(path).start is start
        lane = path.send(vanished)
        share = lane.start.theta**2 / (lane.start.q * model.rho)
        np.testing.assert_allclose(share, 0.8, rtol=1e-6)
        np.testing.assert_allclose([lane.start.q, lane.start.V], [small.q, 0.5 * small.V])
        (first, *_) = path.send(second)
        np.testing.assert_array_equal(first.start.theta, expected)


def test_revived_starts_are_possible_students():
    for model in (
        ta.DotProduct(rank=2),
        ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=np.eye(3)),
        ta.UntiedDotProduct(),
    ):
        for branch in ("semantic", "positional", None):
            start = solving.branch_start(model, branch)
            student = solving.revived(model, start, dataclasses.replace(start, q=0.2 * start.q, theta=0 * start.theta))
            assert bool(admissible(model, student)), (model, branch)
            assert float(jnp.max(abs(student.theta))) >= 0.4 * float(jnp.max(abs(start.theta)))


def test_a_neighbour_of_larger_tokens_or_another_teacher_is_a_start(model):
    """The weights of the neighbour are the start. Its overlaps are not admissible where the tokens are smaller."""
    nodes = ta.Lines(3, replicates=2)
    large = ta.solve(ta.DotProduct(sigma=0.58, teacher=1.1), 2.6, "semantic", nodes)
    assert large.ok and not admissible(model, large.overlaps)
    with pytest.raises(ta.InputError, match="start must be finite"):
        ta.solve(model, 2.6, "semantic", nodes, start=large.overlaps)
    cold, warm = (ta.solve(model, 2.6, "semantic", nodes, start=start) for start in (None, large))
    assert warm.ok
    np.testing.assert_allclose(warm.gen_error, cold.gen_error, rtol=1e-5)


def test_a_branch_that_is_not_found_from_a_start_is_looked_for_from_its_own(model):
    nodes = ta.Lines(3, replicates=2)
    positional = state(CASES[1])  # theta is zero, and stays so
    found, expected = (ta.solve(model, 2.0, "semantic", nodes, start=start) for start in (positional, None))
    assert found.ok and found.label == "semantic"
    np.testing.assert_allclose(found.theta, expected.theta, rtol=1e-9)


@pytest.mark.slow
def test_a_branch_with_a_large_response_is_not_absent():
    """At lam = .0003 the first search misses the semantic state, which a neighbour's state leads to."""
    model = ta.DotProduct(lam=3e-4)
    neighbour = ta.solve(ta.DotProduct(lam=4e-4), 1.0, "semantic")
    cold, warm = ta.solve(model, 1.0, "semantic"), ta.solve(model, 1.0, "semantic", start=neighbour)
    jitted = jax.jit(lambda alpha: ta.solve(model, alpha, "semantic"))(1.0)
    assert cold.ok and warm.ok and jitted.ok
    np.testing.assert_allclose(jitted.theta, cold.theta, rtol=1e-4)
    assert abs(cold.theta - warm.theta) < 3 * cold.stderr.overlaps.theta[0, 0, 0] and abs(cold.theta - 0.1807) < 2e-3


@pytest.mark.long
def test_a_start_whose_V_is_far_too_large(model, nodes):
    """Replicates start from the coarse state, which is searched with a smaller V only if it was not found."""
    free, start = BRANCHES["semantic"].free(model), BRANCHES["semantic"].start(model)

    def coarse(start, settings=None, attempts=3):
        problem = Problem(model, jnp.array(2.0), nodes, free, settings or ta.Settings())
        return run_one(together([problem.lane(start, attempts=attempts)]))[0]

    def scaled(x, factor):
        return dataclasses.replace(x, V=factor * x.V)

    found, tried = coarse(start), coarse(start, attempts=1)
    assert found.status == tried.status == Status.converged
    np.testing.assert_array_equal(found.overlaps.V, tried.overlaps.V)
    point = ta.solve(model, 2.0, "semantic", nodes)
    continued = ta.solve(model, 2.0, "semantic", nodes, start=jax.tree.map(jnp.asarray, found.overlaps))
    np.testing.assert_array_equal(point.overlaps.V, continued.overlaps.V)
    traced = jax.jit(lambda alpha: ta.solve(model, alpha, "semantic", nodes))(2.0)
    np.testing.assert_allclose(traced.overlaps.V, point.overlaps.V, rtol=1e-9)

    hasty = ta.Settings(max_steps=1, warm_steps=0)  # too few steps for any start: the best one is kept
    first = coarse(scaled(found.overlaps, 3), hasty, 1)
    assert first.status == Status.max_steps
    np.testing.assert_allclose(coarse(scaled(found.overlaps, 3), hasty).residual, first.residual, rtol=1e-6)
    far, patient = scaled(start, 100), ta.Settings(max_steps=6, warm_steps=10)
    assert coarse(far, patient, 1).status > Status.stalled
    result, expected = coarse(far, patient), coarse(scaled(far, 0.03), patient, 1)
    assert result.status == expected.status == Status.converged
    np.testing.assert_allclose(result.overlaps.V, expected.overlaps.V, rtol=1e-11)


@pytest.mark.long
def test_lanes_of_a_batch_are_as_each_alone(model, nodes):
    """Lanes under `jax.vmap`, one after the other on a CPU, give what each gives alone, also beside an absent one."""
    rule, alphas = ta.Sobol(2**8, replicates=1).rule(model), jnp.array([2.0, 0.05, 1.5])

    def lane(alpha):
        return ta.solve(model, alpha, "semantic", rule).replicates

    batch, singles = jax.jit(jax.vmap(lane))(alphas), [jax.jit(lane)(alpha) for alpha in alphas]
    for k, single in enumerate(singles):
        np.testing.assert_array_equal(batch.status[k], single.status)
        np.testing.assert_allclose(batch.overlaps.q[k], single.overlaps.q, rtol=1e-9)
    assert batch.status.ravel().tolist()[0] <= Status.stalled


def test_a_revived_start(model):
    """Its teacher explains .8 of the vanished student, its response is half as large, and m scales with the student."""
    for layer, branch in ((model, "semantic"), (model, "positional"), (ta.DotProduct(rank=2, teacher=np.eye(2)), None)):
        start = solving.branch_start(layer, branch)
        vanished = dataclasses.replace(start, q=0.09 * start.q, V=3 * start.V, theta=0 * start.theta, m=0 * start.m)
        revived = solving.revived(layer, start, vanished)
        np.testing.assert_allclose([revived.q, revived.V], [0.09 * start.q, 1.5 * start.V], rtol=1e-12)
        np.testing.assert_allclose(revived.m, 0.3 * start.m, rtol=1e-12)
        shares = [
            np.linalg.eigvals(np.linalg.solve(q, theta @ np.linalg.solve(rho, theta.T))).real.max()
            for q, theta, rho in zip(revived.q, np.asarray(revived.theta), np.asarray(layer.rho), strict=True)
        ]
        np.testing.assert_allclose(np.max(shares), 0.0 if branch == "positional" else 0.8, rtol=1e-9)


@pytest.mark.parametrize(
    ("q", "V", "theta", "error"), [(0.0, 0.2, 0.1, 0.2), (0.3, 0.2, 0.1, 0.3), (0.1, 0.2, 0.4, 0.4)]
)
def test_the_largest_relative_error(model, q, V, theta, error):
    """It is over the entries of all order parameters and the training loss; zeros have none."""
    scatter = np.array([1.0, -1.0, 1.0, -1.0])
    unit = float(error_bar(scatter))
    states = made.states(model)
    for name, size in (("q", q), ("V", V), ("theta", theta)):
        moved = getattr(states.overlaps, name) * (1 + jnp.asarray(size / unit * scatter)[:, None, None, None])
        states = eqx.tree_at(lambda s, name=name: getattr(s.overlaps, name), states, moved)
    point = ta.results.FixedPoint(model, jnp.asarray(2.0), states, "semantic")
    np.testing.assert_allclose(solving._relative_error(point), error, rtol=1e-9)
    loss = eqx.tree_at(lambda p: p.replicates.train_loss, point, 3e-3 * (1 + jnp.asarray(0.5 / unit * scatter)))
    np.testing.assert_allclose(solving._relative_error(loss), 0.5, rtol=1e-9)
    failed = eqx.tree_at(lambda p: p.replicates.status, point, jnp.full(4, 2))
    assert np.isinf(solving._relative_error(failed))
