import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.averages.recipes import default_recipe
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.base.results import Status
from tiedattn_jax.model.overlaps import BRANCHES, admissible
from tiedattn_jax.theory import solve as solving
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.paths import together
from tiedattn_jax.theory.solve import Problem

names = ("q", "V", "theta", "m")


def numbers(x):
    return {"q": x.q[0, 0, 0], "V": x.V[0, 0, 0], "theta": x.theta[0, 0, 0], "m": x.m[0, 0]}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.branch} {c.alpha}")
def test_reference_states(solved, case):
    fp = solved(case.alpha, case.branch)
    assert bool(fp.ok) and fp.label == case.branch
    value, bar = numbers(fp.overlaps), numbers(fp.stderr.overlaps)
    for k in names:
        assert abs(value[k] - getattr(case, k)) <= 4 * bar[k] + 1e-12, k
        assert bar[k] <= 0.03 * abs(value[k]), k  # on 2^13 nodes
    for name in {"semantic": ("m",), "positional": ("theta",)}[case.branch]:
        assert not np.any(getattr(fp.overlaps, name)) and not np.any(getattr(fp.conjugates, name))
    for k in ("train_loss", "gen_error"):
        assert abs(getattr(fp, k) - getattr(case, k)) <= 4 * getattr(fp.stderr, k), k
    np.testing.assert_allclose(fp.diagnostics.train_loss_direct, fp.train_loss, rtol=1e-3)
    np.testing.assert_allclose(fp.gen_error_linear, 0.0039428 / 2, rtol=2e-3)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=lambda c: f"{c.branch} {c.alpha}")
def test_error_bars_are_honest(model, case):
    """In twenty independent runs of four replicates the truth lies within two error bars nine times in ten."""
    within = []
    for seed in range(20):
        fp = ta.solve(model, case.alpha, case.branch, ta.Lines(5, seed=seed).rule(model), start=state(case))
        comparisons = [
            *((numbers(fp.overlaps)[k], numbers(fp.stderr.overlaps)[k], getattr(case, k)) for k in names),
            (fp.train_loss, fp.stderr.train_loss, case.train_loss),
        ]
        within.append([abs(value - exact) <= 2 * bar + 1e-15 for value, bar, exact in comparisons])
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


def test_absent_branch_is_said_to_be_absent(model, lines):
    """A branch that does not exist is reported absent: the semantic one below the pitchfork at alpha = .72."""
    fp = ta.solve(model, 0.3, "semantic", lines)
    assert not bool(fp.ok)
    positional = ta.solve(model, 0.03, "positional", lines)
    assert int(positional.status) == ta.Status.absent
    for point in (fp, positional):
        assert np.isnan([point.train_loss, point.gen_error]).all() and np.isfinite([point.q, point.V]).all()


def test_uninformed_branch(solved):
    fp = solved(1.0, "uninformed")
    assert bool(fp.ok) and fp.label == "uninformed"
    assert float(fp.diagnostics.growth_m) > 1 and float(fp.diagnostics.growth_theta) > 1


def test_sign_quotient(model, nodes, solved):
    """Starts that differ by (m, theta) -> (-m, -theta) give the same state, with equal losses within error bars."""
    fp = solved(2.0, "positional")
    x = fp.overlaps
    mirrored = ta.solve(model, 2.0, "positional", nodes, start=ta.Overlaps(x.q, x.V, x.theta, -x.m))
    np.testing.assert_allclose(mirrored.overlaps.m, -x.m, rtol=2e-2)
    assert abs(mirrored.train_loss - fp.train_loss) <= 4 * (mirrored.stderr.train_loss + fp.stderr.train_loss)


def test_swapping_the_tokens(nodes):
    """Relabelling the tokens, with A's rows and columns, changes no loss; only the encodings change their sign."""
    a = ta.DotProduct(mixing=[[0.7, 0.3], [0.2, 0.8]])
    b = ta.DotProduct(mixing=[[0.8, 0.2], [0.3, 0.7]])
    f, g = (ta.solve(m, 2.0, "positional", nodes) for m in (a, b))
    assert f.ok and g.ok
    assert abs(f.train_loss - g.train_loss) <= 4 * (f.stderr.train_loss + g.stderr.train_loss)
    np.testing.assert_allclose(f.overlaps.q, g.overlaps.q, rtol=3e-2)


def test_purely_positional_target_has_no_semantic_state(nodes):
    fp = ta.solve(ta.DotProduct(omega=1.0), 2.0, "semantic", nodes)
    assert not bool(fp.ok)
    np.testing.assert_allclose(fp.gen_error_linear, 0, atol=1e-15)


def test_options_are_honoured(model, nodes):
    rough = ta.solve(model, 2.0, "positional", nodes, settings=ta.Settings(tol=1e-2))
    fine = ta.solve(model, 2.0, "positional", nodes, settings=ta.Settings(tol=1e-9))
    assert rough.residual > fine.residual
    short = ta.solve(model, 2.0, "positional", nodes, settings=ta.Settings(max_steps=0, warm_steps=0))
    assert int(short.status) == ta.Status.max_steps


def test_what_replicates_say_together(solved):
    point = solved(2.0, "semantic")
    mixed = eqx.tree_at(
        lambda p: (p.replicates.status, p.replicates.residual, p.replicates.diagnostics.jump_mass),
        point,
        (jnp.array([0, 3, 3, 1]), jnp.array([1e-6, 0.5, 0.5, 1e-3]), jnp.array([0.0, 9.0, 9.0, 0.01])),
    )
    assert bool(mixed.exists) and not bool(mixed.ok) and int(mixed.status) == 3 and float(mixed.residual) == 0.5
    expected = np.asarray(point.replicates.overlaps.q)[[0, 3]]
    np.testing.assert_allclose(mixed.overlaps.q, expected.mean(0), rtol=1e-12)
    bar = 0.5 * np.tan(np.pi * 0.47725) * 0.005  # Student's law with one degree of freedom is the Cauchy law
    np.testing.assert_allclose(mixed.stderr.diagnostics.jump_mass, bar, rtol=1e-3)
    assert not bool(mixed.jumps)  # .005 is less than the error bar
    assert not bool(eqx.tree_at(lambda p: p.replicates.status, mixed, jnp.array([0, 3, 3, 3])).exists)


WIDE = ta.DotProduct(mixing=np.full((3, 3), 1 / 3), encodings=np.array([[-1.0], [0.0], [1.0]]))


def stub_solve(monkeypatch, lines, points=(0, 0.0)):
    """Replace `solve_checked` by a stub that notes requests and returns a status and an error bar by kind of rule."""
    requests = []

    def solve_checked(model, alpha, branch, nodes, start, settings):
        kind = {"LineNodes": "L", "Nodes": "S"}[type(nodes.stack).__name__]
        requests.append((kind, nodes.size, start, float(settings.tol)))
        status, bar = lines if kind == "L" else points
        scatter = 1.05 * bar / len(requests) * np.array([1, -1, 1, -1])
        return made.fixed_point(scatter=scatter, status=[int(status)] * 4)

    monkeypatch.setattr(solving, "solve_checked", solve_checked)
    return requests


def test_rtol_refines_until_the_bars_are_small(model, monkeypatch):
    requests = stub_solve(monkeypatch, lines=(0, 1e-3))
    point = solving._refined(
        solving.Request(model, jnp.array(2.0), "semantic", None, None, ta.Settings(tol=4e-5)), 4e-4
    )
    assert [size for _, size, *_ in requests] == [
        default_recipe(model, n).rule(model).size for n in (2**14, 2**15, 2**16)
    ]
    assert requests[0][2] is None and requests[1][2] is not None and point.ok


@pytest.mark.usefixtures("unchecked")
def test_rtol_sets_the_tolerance_of_a_solve(model, monkeypatch):
    monkeypatch.setattr(solving, "_refined", lambda request, rtol: request.settings)
    assert float(ta.solve(model, 2.0, rtol=1e-6).tol) == 1e-7 and float(ta.solve(model, 2.0, rtol=1e-3).tol) == 1e-5


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
    point = solving._refined(solving.Request(model, jnp.array(2.0), "semantic", None, None, ta.Settings()), 3e-4)
    assert "".join(kind for kind, *_ in requests) == kinds and point.status == status


def answer_lanes(monkeypatch, answer):
    """Answer the lanes of `solve` by hand: `answer(lane)` makes the `State` of its replicate."""
    batches = []

    def run_one(path):
        message = None
        while True:
            try:
                message = path.send(message)
            except StopIteration as stop:
                return stop.value
            several = isinstance(message, list)
            lanes = message if several else [message]
            batches.append([lane.replicate for lane in lanes])
            results = [answer(lane) for lane in lanes]
            message = results if several else results[0]

    monkeypatch.setattr(solving, "run_one", run_one)
    return batches


def replicate_of(states, k=0):
    """The state of one replicate, on the host."""
    return jax.tree.map(lambda a: np.asarray(a)[k], states)


@pytest.mark.parametrize(("status", "kinds", "end"), [(Status.unresolved, "LS", 1), (Status.max_steps, "L", 2)])
def test_sobol_points_where_the_default_lines_are_not_resolved(model, monkeypatch, status, kinds, end):
    rule_kinds = []

    def answer(lane):
        kind = {"LineNodes": "L", "Nodes": "S"}[type(lane.rule.stack).__name__]
        rule_kinds.append(kind)
        return replicate_of(made.states(model, scatter=(0.0,), status=[int(status) if kind == "L" else 1]))

    answer_lanes(monkeypatch, answer)
    point = ta.solve(model, 2.0, start=state(CASES[0]))
    assert "".join(dict.fromkeys(rule_kinds)) == kinds and point.status == end


@pytest.mark.parametrize(("share", "residual", "lanes"), [(0.19, 0.009, 5), (0.21, 0.009, 1), (0.19, 0.011, 1)])
def test_lines_that_resolve_too_little_are_left_at_once(model, monkeypatch, share, residual, lanes):
    """Replicates are not tried after a hopeless coarse state; nothing is held at zero among unresolved nodes."""
    rule_kinds = []

    def answer(lane):
        is_line = type(lane.rule.stack).__name__ == "LineNodes"
        rule_kinds.append("L" if is_line else "S")
        numbers = {"status": [int(Status.unresolved)], "unresolved": [share], "residual": [residual]} if is_line else {}
        states = made.states(model, scatter=(0.0,), **numbers)
        return replicate_of(eqx.tree_at(lambda s: s.overlaps.theta, states, 0.1 * states.overlaps.theta))

    answer_lanes(monkeypatch, answer)
    assert ta.solve(model, 2.0).ok
    assert rule_kinds == ["L"] * lanes + ["S"] * 5


def test_the_same_points_are_not_tried_again(monkeypatch):
    """An unresolved state on Sobol points, the default rule of three tokens, is not tried again on the same points."""
    rule_kinds = []

    def answer(lane):
        rule_kinds.append(type(lane.rule.stack).__name__)
        return replicate_of(made.states(WIDE, scatter=(0.0,), status=[int(Status.unresolved)]))

    answer_lanes(monkeypatch, answer)
    start = ta.Overlaps(*(jnp.full((3, 1, 1), v) for v in (0.1, 12.0, 0.1)), jnp.zeros((3, 1)))
    assert ta.solve(WIDE, 2.0, start=start).status == Status.unresolved
    assert rule_kinds == ["Nodes"] * 4


@pytest.mark.parametrize(
    ("size", "growth", "status", "frees"),
    [
        (0.1, 0.95, Status.absent, [1.0, 0.0]),
        (0.1, 1.05, Status.max_steps, [1.0, 0.0]),  # it grows there, so it was no scatter
        (1.0, 0.95, Status.max_steps, [1.0]),  # too large to be scatter, so the uninformed state is not tried
    ],
)
def test_a_small_order_parameter_is_held_at_zero(model, nodes, monkeypatch, size, growth, status, frees):
    requests = []

    def answer(lane):
        requests.append(float(lane.free[0]))
        if lane.free[0] == 0:
            return replicate_of(made.states(model, growth_theta=[growth] * 4))
        failed = made.states(model, status=[2] * 4)
        return replicate_of(eqx.tree_at(lambda s: s.overlaps.theta, failed, size * failed.overlaps.theta))

    answer_lanes(monkeypatch, answer)
    assert ta.solve(model, 2.0, "semantic", nodes).status == status and list(dict.fromkeys(requests)) == frees


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
    requests = []
    states = made.states(model, scatter=scatter, growth_theta=[growth] * len(scatter))

    def answer(lane):
        requests.append(float(lane.free[0]))
        return replicate_of(states, max(lane.replicate, 0))

    answer_lanes(monkeypatch, answer)
    rule = ta.Sobol(64, replicates=len(scatter)).rule(model)
    assert ta.solve(model, 2.0, "semantic", rule).status == status and list(dict.fromkeys(requests)) == frees


def test_a_coarse_state_that_is_lost_ends_the_search(lines):
    """A coarse state that is lost ends the search: replicates do not look for what the coarse rule cannot resolve."""
    model = ta.DotProduct(0.33, 2.54, 4e-4, ((0.85, 0.15), (0.63, 0.37)))
    settings = ta.Settings(max_steps=1, warm_steps=20)

    def solve(alpha):
        return ta.solve(model, alpha, "uninformed", lines, settings=settings).replicates

    for states in (solve(6.2), jax.jit(solve)(6.2)):
        np.testing.assert_array_equal(states.status, Status.unresolved)
        np.testing.assert_array_equal(
            states.overlaps.V, jnp.broadcast_to(states.overlaps.V[:1], states.overlaps.V.shape)
        )
        assert states.diagnostics.unresolved[0] > 0.15 and states.residual[0] > 0.01


def test_which_searches_a_solve_makes(model, nodes, monkeypatch):
    """`solve` searches the coarse replicate from several starts, then the others from its state, as settings say."""
    lanes = []
    coarse_state = made.states(model, CASES[1], scatter=(0.0,))

    def answer(lane):
        lanes.append(lane)
        return replicate_of(coarse_state)

    batches = answer_lanes(monkeypatch, answer)
    settings = ta.Settings(damping=0.1)
    ta.solve(model, 2.0, "semantic", nodes, settings=settings)
    assert batches == [[-1], [0, 1, 2, 3]] and all(lane.settings is settings for lane in lanes)
    assert [lane.attempts for lane in lanes] == [3, 1, 1, 1, 1]
    np.testing.assert_array_equal(lanes[1].start.V, coarse_state.overlaps.V[0])
    batches.clear()
    ta.solve(model, 2.0, "semantic", nodes, start=state(CASES[0]), settings=settings)
    assert batches == [[0, 1, 2, 3]] and lanes[-1].settings is settings


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
    free = BRANCHES["semantic"].free(model)
    start = BRANCHES["semantic"].start(model)

    def coarse(start, settings=None, attempts=3):
        problem = Problem(model, jnp.array(2.0), nodes, free, settings or ta.Settings())
        return run_one(together([problem.lane(start, attempts=attempts)]))[0]

    def try_once(start, settings=None):
        return coarse(start, settings, 1)

    coarse_state = coarse(start)
    assert coarse_state.status == try_once(start).status == Status.converged
    np.testing.assert_array_equal(coarse_state.overlaps.V, try_once(start).overlaps.V)
    point = ta.solve(model, 2.0, "semantic", nodes)
    continued = ta.solve(model, 2.0, "semantic", nodes, start=jax.tree.map(jnp.asarray, coarse_state.overlaps))
    np.testing.assert_array_equal(point.overlaps.V, continued.overlaps.V)
    traced = jax.jit(lambda alpha: ta.solve(model, alpha, "semantic", nodes))(2.0)
    np.testing.assert_allclose(traced.overlaps.V, point.overlaps.V, rtol=1e-9)

    hasty = ta.Settings(max_steps=1, warm_steps=0)  # too few steps for any start: the best one is kept
    wrong_V = eqx.tree_at(lambda x: x.V, coarse_state.overlaps, 3 * coarse_state.overlaps.V)
    assert try_once(wrong_V, hasty).status == Status.max_steps
    np.testing.assert_allclose(coarse(wrong_V, hasty).residual, try_once(wrong_V, hasty).residual, rtol=1e-6)
    far_start = eqx.tree_at(lambda x: x.V, start, 100 * start.V)
    patient = ta.Settings(max_steps=6, warm_steps=10)
    assert try_once(far_start, patient).status > Status.stalled
    result, expected = (
        coarse(far_start, patient),
        try_once(eqx.tree_at(lambda x: x.V, far_start, 0.03 * far_start.V), patient),
    )
    assert result.status == expected.status == Status.converged
    np.testing.assert_allclose(result.overlaps.V, expected.overlaps.V, rtol=1e-11)


@pytest.mark.long
def test_lanes_of_a_batch_are_as_each_alone(model, nodes):
    """Lanes under `jax.vmap` give what each gives alone, and an absent one changes nothing in the others.

    On a CPU they run one after the other.
    """
    rule = ta.Sobol(2**8, replicates=1).rule(model)
    alphas = jnp.array([2.0, 0.05, 1.5])

    def lane(alpha):
        return ta.solve(model, alpha, "semantic", rule).replicates

    batch, singles = jax.jit(jax.vmap(lane))(alphas), [jax.jit(lane)(alpha) for alpha in alphas]
    for k, single in enumerate(singles):
        np.testing.assert_array_equal(batch.status[k], single.status)
        np.testing.assert_allclose(batch.overlaps.q[k], single.overlaps.q, rtol=1e-9)
    assert batch.status.ravel().tolist()[0] <= Status.stalled


def test_a_loss_that_is_not_even_is_refused(nodes):
    class Odd(ta.DotProduct):
        def loss(self, Z, Y):
            return super().loss(Z + 0.3, Y)

    fields = ("omega", "sigma", "lam", "mixing", "encodings", "teacher")
    odd = Odd(**{k: getattr(ta.DotProduct(), k) for k in fields})
    with pytest.raises(ValueError, match="even"):
        ta.solve(odd, 2.0, "semantic", nodes)
