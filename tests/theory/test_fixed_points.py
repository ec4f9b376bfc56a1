import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.overlaps import BRANCHES
from tiedattn_jax.results import Status
from tiedattn_jax.theory import fixed_points
from tiedattn_jax.theory.fixed_points import solve_from
from tiedattn_jax.theory.newton import fixed_point

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
        assert bar[k] <= 0.03 * abs(value[k]), k  # 2^13 nodes
    for name in {"semantic": ("m",), "positional": ("theta",)}[case.branch]:
        assert not np.any(getattr(fp.overlaps, name)) and not np.any(getattr(fp.conjugates, name))
    for k in ("train_loss", "gen_error"):
        assert abs(getattr(fp, k) - getattr(case, k)) <= 4 * getattr(fp.stderr, k), k
    np.testing.assert_allclose(fp.diagnostics.train_loss_direct, fp.train_loss, rtol=1e-3)
    np.testing.assert_allclose(fp.gen_error_linear, 0.0039428 / 2, rtol=2e-3)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=lambda c: f"{c.branch} {c.alpha}")
def test_error_bars_are_honest(model, case):
    """Twenty independent runs of four replicates: the truth lies within two error bars nine times in ten."""
    inside = []
    for seed in range(20):
        fp = solve_from(model, case.alpha, case.branch, ta.line_nodes(model, 5, seed=seed), state(case))
        found = [
            *((numbers(fp.overlaps)[k], numbers(fp.stderr.overlaps)[k], getattr(case, k)) for k in names),
            (fp.train_loss, fp.stderr.train_loss, case.train_loss),
        ]
        inside.append([abs(value - exact) <= 2 * bar + 1e-15 for value, bar, exact in found])
    assert np.mean(inside) >= 0.9, np.mean(inside, 0)
    assert bool(fp.jumps) == (case is not CASES[0]) and float(fp.diagnostics.unresolved) < 1e-3


def test_absent_branch_is_said_to_be_absent(model, lines):
    """Below the pitchfork at alpha = .72 the semantic branch does not exist."""
    fp = ta.solve(model, 0.3, "semantic", lines)
    assert not bool(fp.ok)
    positional = ta.solve(model, 0.03, "positional", lines)
    assert int(positional.status) == ta.Status.absent


def test_uninformed_branch(solved):
    fp = solved(1.0, "uninformed")
    assert bool(fp.ok) and fp.label == "uninformed"
    assert float(fp.diagnostics.growth_m) > 1 and float(fp.diagnostics.growth_theta) > 1


def test_sign_quotient(model, nodes, solved):
    """Starts that differ by (m, theta) -> (-m, -theta) are the same state with the same losses within error bars."""
    fp = solved(2.0, "positional")
    x = fp.overlaps
    mirrored = ta.solve(model, 2.0, "positional", nodes, start=ta.Overlaps(x.q, x.V, x.theta, -x.m))
    np.testing.assert_allclose(mirrored.overlaps.m, -x.m, rtol=2e-2)
    assert abs(mirrored.train_loss - fp.train_loss) <= 4 * (mirrored.stderr.train_loss + fp.stderr.train_loss)


def test_swapping_the_tokens(nodes):
    """Relabelling the tokens with A's rows and columns leaves the losses and negates the roles of the encodings."""
    a = ta.dot_product(mixing=[[0.3, 0.7], [0.8, 0.2]])
    b = ta.dot_product(mixing=[[0.2, 0.8], [0.7, 0.3]])
    f, g = (ta.solve(m, 2.0, "positional", nodes) for m in (a, b))
    assert abs(f.train_loss - g.train_loss) <= 4 * (f.stderr.train_loss + g.stderr.train_loss)
    np.testing.assert_allclose(f.overlaps.q, g.overlaps.q, rtol=3e-2)


def test_purely_positional_target_has_no_semantic_state(nodes):
    fp = ta.solve(ta.dot_product(omega=1.0), 2.0, "semantic", nodes)
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
    four = eqx.tree_at(
        lambda p: (p.replicates.status, p.replicates.residual, p.replicates.diagnostics.jump_mass),
        point,
        (jnp.array([0, 3, 3, 1]), jnp.array([1e-6, 0.5, 0.5, 1e-3]), jnp.array([0.0, 9.0, 9.0, 0.01])),
    )
    assert bool(four.exists) and not bool(four.ok) and int(four.status) == 3 and float(four.residual) == 0.5
    found = np.asarray(point.replicates.overlaps.q)[[0, 3]]
    np.testing.assert_allclose(four.overlaps.q, found.mean(0), rtol=1e-12)
    bar = 0.5 * np.tan(np.pi * 0.47725) * 0.005  # Student's law with one degree of freedom is Cauchy's
    np.testing.assert_allclose(four.stderr.diagnostics.jump_mass, bar, rtol=1e-3)
    assert not bool(four.jumps)  # .005 is within the error bar
    assert not bool(eqx.tree_at(lambda p: p.replicates.status, four, jnp.array([0, 3, 3, 3])).exists)


WIDE = ta.dot_product(mixing=np.full((3, 3), 1 / 3), encodings=np.array([[-1.0], [0.0], [1.0]]))


def answers(monkeypatch, lines, points=(0, 0.0)):
    """`solve` as one that notes what it is asked, and returns a status and a relative error bar by the rule's kind."""
    asked = []

    def solve(model, alpha, branch, nodes, *, start, settings):
        kind = {"LineNodes": "L", "Nodes": "S"}[type(nodes.stack).__name__]
        asked.append((kind, nodes.size, start, float(settings.tol)))
        status, bar = lines if kind == "L" else points
        scatter = 1.05 * bar / len(asked) * np.array([1, -1, 1, -1])
        return made.fixed_point(scatter=scatter, status=[int(status)] * 4)

    monkeypatch.setattr(fixed_points, "solve", solve)
    return asked


def test_rtol_refines_until_the_bars_are_small(model, monkeypatch):
    asked = answers(monkeypatch, lines=(0, 1e-3))
    point = fixed_points._refined(model, jnp.array(2.0), "semantic", 4e-4, None, ta.Settings(tol=4e-5))
    assert [size for _, size, *_ in asked] == [ta.default_nodes(model, n).size for n in (2**14, 2**15, 2**16)]
    assert asked[0][2] is None and asked[1][2] is not None and point.ok
    monkeypatch.setattr(fixed_points, "_refined", lambda *a: a[-1])
    assert float(ta.solve(model, 2.0, rtol=1e-6).tol) == 1e-7 and float(ta.solve(model, 2.0, rtol=1e-3).tol) == 1e-5


@pytest.mark.parametrize(
    ("lines", "points", "kinds", "status"),
    [
        ((Status.unresolved, 1e-5), (0, 1e-3), "LSSS", 0),  # whatever their bars
        ((0, 0.1), (0, 1e-3), "LSSS", 0),
        ((0, 0.05), (0, 0.5), "LS" * 5, Status.imprecise),  # bars that a bifurcation enlarges: points do worse
        ((0, 0.0011), (0, 0.0), "LLLL", 0),  # not so bad
        ((Status.max_steps, 0.0), (Status.max_steps, 0.0), "LS", Status.max_steps),
    ],
)
def test_rtol_takes_sobol_points_where_they_do_better(model, monkeypatch, lines, points, kinds, status):
    asked = answers(monkeypatch, lines, points)
    point = fixed_points._refined(model, jnp.array(2.0), "semantic", 3e-4, None, ta.Settings())
    assert "".join(kind for kind, *_ in asked) == kinds and point.status == status


def test_sobol_points_where_the_default_lines_are_not_resolved(model, monkeypatch):
    solve = ta.solve
    for status, kinds, end in ((Status.unresolved, "LS", 1), (Status.max_steps, "L", 2)):
        asked = answers(monkeypatch, lines=(status, 0.0), points=(1, 0.0))
        found = solve(model, 2.0, start=state(CASES[0]))
        assert "".join(kind for kind, *_ in asked) == kinds and found.status == end
        assert all(start is not None for _, _, start, _ in asked)

    asked = answers(monkeypatch, lines=(0, 0.0), points=(Status.unresolved, 0.0))
    assert solve(WIDE, 2.0).status == solve(WIDE, 2.0, rtol=1e-3).status == Status.unresolved
    assert "".join(kind for kind, *_ in asked) == "SS"  # the default of three tokens: the same is not tried again


@pytest.mark.parametrize(
    ("size", "growth", "status", "frees"),
    [
        (0.1, 0.95, Status.absent, [1.0, 0.0]),
        (0.1, 1.05, Status.max_steps, [1.0, 0.0]),  # it grows there: it was not scatter
        (1.0, 0.95, Status.max_steps, [1.0]),  # too large to be scatter: not tried
    ],
)
def test_a_small_order_parameter_is_held_at_zero(model, nodes, monkeypatch, size, growth, status, frees):
    asked = []

    def anew(model, alpha, branch, nodes, free, settings):
        asked.append(float(free[0]))
        if free[0] == 0:
            return made.states(model, growth_theta=[growth] * 4)
        lost = made.states(model, status=[2] * 4)
        return eqx.tree_at(lambda s: s.overlaps.theta, lost, size * lost.overlaps.theta)

    monkeypatch.setattr(fixed_points, "solve_anew", anew)
    assert ta.solve(model, 2.0, "semantic", nodes).status == status and asked == frees


@pytest.mark.parametrize(
    ("scatter", "growth", "status", "frees"),
    [
        ((0.5, -2.0, -2.5, 0.0), 0.95, Status.absent, [1.0, 0.0]),  # theta of either sign
        ((0.5, -2.0, -2.5, 0.0), 1.05, Status.converged, [1.0, 0.0]),
        ((0.1, -0.1, -0.1, 0.1), 0.95, Status.converged, [1.0]),  # a state beside a stable uninformed one
        ((0.0,), 0.95, Status.converged, [1.0]),  # a single replicate, whose error bar is not known
    ],
)
def test_an_order_parameter_within_its_error_bar(model, monkeypatch, scatter, growth, status, frees):
    asked = []

    def anew(model, alpha, branch, nodes, free, settings):
        asked.append(float(free[0]))
        return made.states(model, scatter=scatter, growth_theta=[growth] * len(scatter))

    monkeypatch.setattr(fixed_points, "solve_anew", anew)
    rule = ta.sobol_nodes(model, 64, replicates=len(scatter))
    assert ta.solve(model, 2.0, "semantic", rule).status == status and asked == frees


def test_starts_under_vmap(model, nodes, monkeypatch):
    """What a concrete state is tried for besides is left out of lanes."""
    solved = made.fixed_point()

    def lane(model, alpha, branch, nodes, start, settings):
        return eqx.tree_at(
            lambda p: p.replicates.status, solved, jnp.where(start.m[0, 0] >= 0, 2, 0) * jnp.ones(4, int)
        )

    monkeypatch.setattr(fixed_points, "solve_from", lane)
    starts = jax.tree.map(lambda a: a[None], state(CASES[0]))
    status = jax.vmap(lambda start: ta.solve(model, 2.0, "semantic", nodes, start=start).status)(starts)
    np.testing.assert_array_equal(status, Status.max_steps)


def test_a_coarse_state_that_is_lost_ends_the_search(lines):
    """The replicates do not look for a state of which the coarse one resolves nothing."""
    model = ta.dot_product(0.33, 2.54, 4e-4, ((0.85, 0.15), (0.63, 0.37)))
    few = ta.Settings(max_steps=1, warm_steps=20)

    def solve(alpha):
        return ta.solve(model, alpha, "uninformed", lines, settings=few).replicates

    for found in (solve(6.2), jax.jit(solve)(6.2)):
        np.testing.assert_array_equal(found.status, Status.unresolved)
        np.testing.assert_array_equal(found.overlaps.V, jnp.broadcast_to(found.overlaps.V[:1], found.overlaps.V.shape))
        assert found.diagnostics.unresolved[0] > 0.3 and found.residual[0] > 0.01


def test_the_coarse_search_uses_the_settings(model, nodes, monkeypatch):
    seen, phases = [], fixed_points._phases
    monkeypatch.setattr(fixed_points, "_phases", lambda *a: seen.append(a) or phases(*a))
    mine, free = ta.Settings(damping=0.1), jnp.array([1.0, 0.0])
    solved = ta.solve(model, 2.0, "semantic", nodes, settings=mine).overlaps
    fixed_points.solve_coarsely(model, jnp.array(2.0), nodes, solved, free, mine)
    fixed_points.solve_from(model, 2.0, "semantic", nodes, solved, mine)
    assert all(settings is mine for *_, settings, _, _ in seen)
    each = [(False, True)] * nodes.replicates
    assert [tuple(map(bool, a[-2:])) for a in seen] == [(True, False), *each, (True, False), *each]


def test_a_start_whose_V_is_far_too_large(model, nodes):
    """The replicates start from the coarse state; that is looked for with less V only where it was not found."""
    alpha, free, settings = jnp.array(2.0), BRANCHES["semantic"].free(model), ta.Settings()
    start = BRANCHES["semantic"].start(model)

    def coarse(start, settings=settings):
        return fixed_points.solve_coarsely(model, alpha, nodes, start, free, settings)

    def once(start, settings=settings):
        x, residual, _, status = jax.jit(fixed_point)(model, alpha, nodes.coarse, start, free, settings)
        return x, float(residual), int(status)

    near, (x, _, status) = coarse(start), once(start)
    assert near.status == status == Status.converged
    np.testing.assert_allclose(near.overlaps.V, x.V, rtol=1e-11)
    anew = fixed_points.solve_anew(model, alpha, "semantic", nodes, free, settings)
    from_there = fixed_points.solve_from(model, alpha, "semantic", nodes, near.overlaps, settings).replicates
    np.testing.assert_array_equal(anew.overlaps.V, from_there.overlaps.V)
    traced = jax.jit(lambda alpha: fixed_points.solve_anew(model, alpha, "semantic", nodes, free, settings))(alpha)
    np.testing.assert_allclose(traced.overlaps.V, anew.overlaps.V, rtol=1e-12)

    few = ta.Settings(max_steps=1, warm_steps=0)  # too few for any of the starts: the best one is kept
    off = eqx.tree_at(lambda x: x.V, x, 3 * x.V)
    _, residual, status = once(off, few)
    assert status == Status.max_steps
    np.testing.assert_allclose(coarse(off, few).residual, residual, rtol=1e-6)
    far = eqx.tree_at(lambda x: x.V, start, 100 * start.V)
    some = ta.Settings(max_steps=6, warm_steps=10)
    assert once(far, some)[2] > Status.stalled
    found, less = coarse(far, some), once(eqx.tree_at(lambda x: x.V, far, 0.03 * far.V), some)
    assert found.status == less[2] == Status.converged
    np.testing.assert_allclose(found.overlaps.V, less[0].V, rtol=1e-11)


def test_a_loss_that_is_not_even_is_refused(nodes):
    class Odd(ta.DotProduct):
        def loss(self, Z, Y):
            return super().loss(Z + 0.3, Y)

    fields = ("omega", "sigma", "lam", "mixing", "encodings", "teacher")
    odd = Odd(**{k: getattr(ta.dot_product(), k) for k in fields})
    with pytest.raises(ValueError, match="even"):
        ta.solve(odd, 2.0, "semantic", nodes)
