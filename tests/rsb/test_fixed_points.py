"""States with one step of replica symmetry breaking (1RSB): starts, derivatives, limits and ground states."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, Signs, channel_of_signs
from jax.flatten_util import ravel_pytree
from scipy.optimize import fsolve

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import search
from tiedattn_jax.averages.rules import fields
from tiedattn_jax.model.overlaps import Conjugates
from tiedattn_jax.rsb import fixed_points as rsb, newton
from tiedattn_jax.rsb.fixed_points import BrokenState, with_derivatives
from tiedattn_jax.rsb.newton import Moving, Solution
from tiedattn_jax.rsb.potentials import Averages, OneRSBOverlaps
from tiedattn_jax.theory import potentials as rs_potentials
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.equations import value_and_columns

S = jnp.asarray(500.0)


def test_derivatives_of_a_state(random_hats):
    """Derivatives of the loss are the stored partial ones, those of other numbers the implicit ones, or NaN."""
    model, hats, unit = ta.DotProduct(), random_hats(), jnp.ones(())
    slopes = jax.tree.map(lambda a: 3 * jnp.ones_like(a), model)
    state = BrokenState(hats, hats, unit, unit, unit, unit, slopes, 2 * unit, unit, unit, jnp.zeros((), int))
    count = ravel_pytree((model, unit))[0].size
    rates = jnp.arange(1.0, count + 1)
    x = jax.tree.map(lambda a: a[..., None] * rates, hats)
    moving = Moving(x, 5 * rates, x, 7 * rates, 11 * rates)

    def of(name):
        return lambda model, alpha: getattr(with_derivatives((model, alpha), state, moving), name)

    by_model, by_alpha = jax.grad(of("train_loss"), (0, 1))(model, unit)
    jax.tree.map(np.testing.assert_array_equal, by_model, slopes)
    assert by_alpha == 2 and jax.jvp(of("train_loss"), (model, unit), (model, unit))[1] > 2
    for name, factor in (("s", 5), ("loss_by_alpha", 7), ("loss_by_log_s", 11)):
        gradient = ravel_pytree(jax.grad(of(name), (0, 1))(model, unit))[0]
        np.testing.assert_allclose(gradient, factor * rates)
    for name in ("overlaps", "conjugates"):
        moved = jax.jvp(of(name), (model, unit), (jax.tree.map(jnp.zeros_like, model), unit))[1]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, count * b), moved, hats)
    assert np.isnan(jax.grad(of("residual"), 1)(model, unit))
    with pytest.raises(TypeError, match="first derivatives only"):
        jax.hessian(of("train_loss"), 1)(model, unit)


class TwoColumns(ta.Model):
    """Loss ``(|z_1| - 1)^2 / 2 + k (z_2 - c z_1)^2 / 2``: every sample has a sign, and the second column follows."""

    k: float = eqx.field(static=True, default=2.0)
    c: float = eqx.field(static=True, default=1.0)
    shape = (1, 2, 1)

    def loss(self, Z, Y):
        first, second = Z[0]
        return 0.5 * (jnp.sqrt(first**2 + 1e-10) - 1) ** 2 + 0.5 * self.k * (second - self.c * first) ** 2

    def law(self):
        unit = jnp.ones((1, 1, 1))
        return ta.SpectralLaw(unit[0, 0], unit[0], unit, unit, 0 * unit)

    def envelope(self, V):
        """B = (K^{-1} + V)^{-1} and a: the envelope is ``(h -+ a)^T B (h -+ a) / 2`` for either sign."""
        K = jnp.array([[1 + self.k * self.c**2, -self.k * self.c], [-self.k * self.c, self.k]])
        return jnp.linalg.inv(jnp.linalg.inv(K) + V), jnp.array([1.0, self.c])


def _losses(lam, alpha, envelope, beside=lambda V: 0.0, count=60):
    """Training losses by hand: RS of (q, V), and 1RSB of (q1, q0, V, log s), with the conjugates eliminated.

    Args:
        envelope: B and a of the response V, as in `channel_of_signs`.
        beside: stiffness of the envelope of a second token with a convex loss.
    """
    inv, trace = jnp.linalg.inv, jnp.trace

    def unbroken(q, V):
        B, a = envelope(V)
        M = 0.5 * trace(B @ q) + 0.5 * a @ B @ a - jnp.sqrt(2 * (a @ B @ q @ B @ a) / jnp.pi)
        return -(0.5 * trace((inv(V) - lam * jnp.eye(len(a))) @ q) - alpha * (M + 0.5 * trace(beside(V) * q)))

    def broken(q1, q0, V, log_s):
        s, Lam, width, eye = jnp.exp(log_s), inv(V), q1 - q0, jnp.eye(len(V))
        D = inv(V + s * width)
        q0hat, difference = D @ q0 @ D, (Lam - D) / s
        pairing = 0.5 * trace((Lam - lam * eye) @ q1 - (q0hat + difference) @ V)
        pairing -= 0.5 * s * trace((q0hat + difference) @ q1 - q0hat @ q0)
        psi = 0.5 * trace(inv(D) @ q0hat) - jnp.linalg.slogdet(eye - s * V @ difference)[1] / (2 * s)
        M = channel_of_signs(*envelope(V), q1, q0, s, count)
        softened = 1 + s * trace(beside(V) * width)
        M += trace(beside(V) * q0) / (2 * softened) + jnp.log(softened) / (2 * s)
        return -(pairing + psi - alpha * M)

    return unbroken, broken


# The ground state at alpha = .05, lam = 1, by iteration of equations derived by hand.
_GROUND = (
    jnp.array([[0.0070888, 0.00517499], [0.00517499, 0.00378604]]),
    jnp.array([[0.0033409, 0.0024919], [0.0024919, 0.00185922]]),
    jnp.array([[1.00570229, 0.03708718], [0.03708718, 0.99187765]]),
    jnp.log(30.8478),
)


@pytest.fixture
def in_closed_form(monkeypatch):
    """Newton's method with the channel potential of `TwoColumns` in closed form instead of averages."""

    def expansion(setting, averages, u, needs_slopes):
        def at(u):
            model, _, x, s = setting(u)
            M, (by_x, by_s) = jax.value_and_grad(channel, (0, 1))(x, s, model)
            return (M, by_x, by_s), jax.tree.map(jnp.zeros_like, model)

        def channel(x, s, model):
            return channel_of_signs(*model.envelope(x.V[0]), x.q1[0], x.q0[0], s)

        return value_and_columns(at, u)

    monkeypatch.setattr(newton, "channel_expansion", expansion)
    monkeypatch.setattr(newton, "_TOL", 1e-9)

    def solved(lam=1.0, alpha=0.05, s=None):
        model, (q1, q0, V, log_s) = TwoColumns(lam=jnp.asarray(lam)), _GROUND
        x = OneRSBOverlaps(q1[None], q0[None], V[None], jnp.zeros((1, 2, 1)), jnp.zeros((1, 2)))
        no_averages = Averages((), (), ())
        problem = newton.Problem(model, jnp.asarray(alpha), no_averages, jnp.zeros(2), s is None, 0.013919103)
        return run_one(newton.fixed_point(problem, x, jnp.exp(log_s) if s is None else jnp.asarray(s), None))

    return solved


def test_equations_of_two_columns(in_closed_form):
    """Newton's method on matrices finds a stationary point of a potential derived by hand, and its loss."""
    solution = in_closed_form()
    envelope, broken = solution.problem.model.envelope, lambda alpha: _losses(1.0, alpha, envelope)[1]
    variables = solution.x.q1[0], solution.x.q0[0], solution.x.V[0], jnp.log(solution.s)
    loss, slopes = jax.jit(jax.value_and_grad(broken(0.05), (0, 1, 2, 3)))(*variables)
    np.testing.assert_allclose(solution.look.loss, loss, rtol=1e-9)
    for a, slope in zip(variables[:3], slopes[:3], strict=True):
        assert np.max(np.abs((slope + slope.T) @ a)) < 1e-9 * loss / 0.05
    assert abs(slopes[3]) < 1e-6 * (loss - 0.013919103) and solution.residual < 1e-7
    for a, expected in zip(variables, _GROUND, strict=True):
        np.testing.assert_allclose(a, expected, rtol=2e-3)
    # Partial derivatives of the loss: minus those of the free energy, at fixed order parameters.
    by_alpha = jax.grad(lambda alpha: broken(alpha)(*variables))(0.05)
    np.testing.assert_allclose(solution.look.loss_by_alpha, by_alpha, rtol=1e-9)
    np.testing.assert_allclose(solution.look.loss_by_model.lam, 0.5 * np.trace(variables[0]), rtol=1e-6)
    # Sizes of coordinates are root mean squares, and 1 for what the branch holds at zero.
    q1, q0, V, _ = (np.asarray(a) for a in variables)
    theta, m = 0.1 * np.arange(1.0, 3.0).reshape(1, 2, 1), 0.2 * np.arange(2.0, 4.0).reshape(1, 2)
    free = eqx.tree_at(lambda x: (x.theta, x.m), solution.x, tuple(map(jnp.asarray, (theta, m))))
    looks = solution.look, run_one(solution.problem._replace(free=jnp.ones(2)).look(free, solution.s, False))
    for look, others in zip(looks, ((1.0, 1.0), (theta, m)), strict=True):
        sizes = [np.mean(np.square(a)) ** 0.5 for a in (q1, solution.s * (q1 - q0), V, *others)]
        np.testing.assert_allclose(look.columns, np.append(np.repeat(sizes, [4, 4, 4, 2, 2]), 1.0), rtol=1e-9)
        np.testing.assert_array_equal(look.rows[:-1], look.columns[:-1])
        cluster = 0.5 * solution.s * np.sum(look.hats.q1[0] * (q1 - q0))
        np.testing.assert_allclose(look.rows[-1], cluster, rtol=1e-9)
        assert look.residual[-1] == -look.loss_by_log_s


@pytest.mark.long
@pytest.mark.parametrize("s", [None, 25.0], ids=["ground state", "at a given s"])
def test_derivatives_of_the_solution(in_closed_form, s):
    moving, step = in_closed_form(s=s).moving(), 1e-3
    for k, (name, size) in enumerate((("lam", 1.0), ("alpha", 0.05))):
        up, down = (in_closed_form(s=s, **{name: size * (1 + sign * step)}) for sign in (1, -1))
        states = [(f.x, f.s, f.look.hats, f.look.loss_by_alpha, f.look.loss_by_log_s) for f in (up, down)]
        differences = jax.tree.map(lambda a, b, size=size: (a - b) / (2 * step * size), *states)
        for derivative, difference in zip(jax.tree.leaves(tuple(moving)), jax.tree.leaves(differences), strict=True):
            np.testing.assert_allclose(derivative[..., k], difference, atol=3e-4 * np.max(np.abs(difference)) + 1e-7)


@pytest.mark.parametrize("s", [None, 40.0])
def test_a_state_that_does_not_break_is_that_of_rs(solved, s):
    """The RS state counts as a 1RSB state with q1 = q0; where breaking was looked for in vain, it is not converged."""
    state = jax.tree.map(lambda a: a[0], solved(2.0, "positional").replicates)
    exact, failed = (rsb._unbroken(state, s if s is None else jnp.asarray(s), is_exact) for is_exact in (True, False))
    assert exact.status == state.status and failed.status == int(ta.Status.max_steps)
    worse = eqx.tree_at(lambda x: x.status, state, jnp.asarray(int(ta.Status.nonfinite)))
    assert rsb._unbroken(worse, None, False).status == worse.status
    np.testing.assert_allclose(exact.s, 2 / state.train_loss if s is None else s, rtol=1e-12)
    assert exact.elevation == 0 and exact.loss_by_log_s == 0
    np.testing.assert_array_equal(exact.overlaps.q1, exact.overlaps.q0)
    pairs = [(exact.loss_by_alpha, state.train_loss_partials[1]), (exact.loss_by_model, state.train_loss_partials[0])]
    pairs += [(getattr(exact, name), getattr(state, name)) for name in ("train_loss", "gen_error", "residual")]
    pairs += [(getattr(exact.overlaps, name), getattr(state.overlaps, name)) for name in ("V", "theta", "m")]
    for a, b in pairs:
        jax.tree.map(np.testing.assert_array_equal, a, b)


def _broken_rs(scatter=(0.0,) * 4, **numbers):
    """An RS state whose proximal operator jumps."""
    return made.fixed_point(CASES[1], scatter=scatter, jump_mass=jnp.full(len(scatter), 0.3), **numbers)


def _stub_searches(monkeypatch, residuals):
    """Let searches return solutions with given residuals, by replicate and by whether they have a guess."""
    q, V, theta, m = (a[0] for a in vars(made.fixed_point(CASES[1]).replicates.overlaps).values())
    x, requests = OneRSBOverlaps(q, q, V, theta, m), []

    def stub(rs, s, guess, k, layout):
        requests.append((k, guess is not None))
        return made.finished_path(Solution(None, x, S, None, residuals[requests[-1]], None))

    monkeypatch.setattr(rsb, "_lay", lambda rs, s, k, lines: None)
    monkeypatch.setattr(rsb, "_search", stub)
    return requests


def test_replicates_start_where_one_was_found(nodes, monkeypatch):
    """Replicates are solved in turn until one is found; the others and the failed ones then start from it.

    Of two results for a replicate the better one stays.
    """
    residuals = {(0, False): 0.1, (1, False): 1e-5, (2, True): 1e-3, (3, True): 0.2, (0, True): 0.05}
    requests, rs = _stub_searches(monkeypatch, residuals), _broken_rs()

    def final_residuals():
        results = run_one(rsb._replicates(rs, nodes, None, False))
        return [solution.residual for _, (solution, _) in sorted(results.items())]

    assert final_residuals() == [0.05, 1e-5, 1e-3, 0.2]
    assert requests[:2] == [(0, False), (1, False)] and set(requests) == set(residuals) and len(requests) == 5
    residuals[0, True] = 0.5
    assert final_residuals()[0] == 0.1
    residuals[1, False] = residuals[2, False] = residuals[3, False] = 0.2
    assert final_residuals() == [0.1, 0.2, 0.2, 0.2]


def test_replicates_without_an_rs_state_are_not_searched(nodes, monkeypatch):
    """A stalled RS state counts. The motions of the solutions are computed only if they are asked for."""
    residuals = {(0, False): 1e-5, (1, True): 1e-4, (3, True): 3e-3}
    requests = _stub_searches(monkeypatch, residuals)
    codes = [ta.Status.converged, ta.Status.stalled, ta.Status.max_steps, ta.Status.converged]
    rs = _broken_rs(status=jnp.array([int(code) for code in codes]))
    monkeypatch.setattr(Solution, "moving", lambda solution: 2 * solution.residual)
    for is_differentiated in (False, True):
        results = run_one(rsb._replicates(rs, nodes, None, is_differentiated))
        assert sorted(results) == [0, 1, 3]
        for k, (solution, motion) in results.items():
            assert solution.residual == residuals[k, k > 0]
            assert motion == (2 * solution.residual if is_differentiated else None)
    del requests[:]
    smooth = made.fixed_point(CASES[1])
    assert run_one(rsb._replicates(smooth, nodes, None, False)) == {} and requests == []


@pytest.mark.parametrize(("mass", "breaks"), [(0.019, False), (0.021, True), (0.029, True)])
def test_breaking_is_tried_from_two_percent_of_jumps_on(mass, breaks):
    """Here the averages cannot tell the mass from zero."""
    rs = made.fixed_point(jump_mass=mass * jnp.array([0.0, 2.0, 0.0, 2.0]))
    assert not rs.jumps and rsb._breaks(rs) == breaks
    assert rsb._breaks(made.fixed_point(jump_mass=jnp.full(4, 0.005)))  # this mass is known


def test_a_replicate_gives_its_shift_to_the_others_if_it_was_solved():
    rs, width = _broken_rs(), 0.1
    x = jax.tree.map(lambda a: a[2], rs.replicates.overlaps)
    broken = OneRSBOverlaps(1.01 * x.q, (1 - width) * x.q, 0.9 * x.V, x.theta, x.m)
    matrix = np.eye(3)
    for residual in (1e-5, 3e-3):
        guess = rsb._guess_from(rs, 2, Solution(None, broken, S, None, residual, matrix))
        expected = OneRSBOverlaps(0.01 * x.q, -width * x.q, -0.1 * x.V, 0 * x.theta, 0 * x.m)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-14), guess.shift, expected)
        assert guess.s == S and guess.matrix is matrix
    assert rsb._guess_from(rs, 2, Solution(None, broken, S, None, 4e-3, matrix)) is None
    assert rsb._guess_from(rs, 2, None) is None


def _look(k, hats):
    """Equations at the solution of replicate k, with numbers of their own."""
    slopes = jax.tree.map(lambda a: (k + 1.0) * np.ones_like(a), ta.DotProduct())
    numbers = {"v": None, "residual": None, "matrix": None, "columns": None, "rows": None}
    loss = np.asarray(0.005 + 1e-3 * k)
    return newton.Look(**numbers, loss=loss, loss_by_model=slopes, loss_by_alpha=np.asarray(2.0 + k),
                       loss_by_log_s=np.asarray(1e-4 * (k + 1)), hats=hats)  # fmt: skip


@pytest.fixture
def solve(monkeypatch):
    """`solve_1rsb` on an RS state made by hand, with given solutions; returns the result and what was asked."""

    def solve(solutions, rs, alpha=2.0, branch="positional", moving=None, **options):
        asked = {}

        def replicates(rs, rule, s, is_differentiated):
            asked.update(rule=rule, s=s, is_differentiated=is_differentiated)
            return made.finished_path({k: (solution, moving) for k, solution in solutions.items()})

        def solved(request, progress):
            asked.update(request=request)
            return eqx.tree_at(lambda p: (p.model, p.alpha), rs, request[:2])

        monkeypatch.setattr(rsb, "solve_checked", solved)
        monkeypatch.setattr(rsb, "_replicates", replicates)
        monkeypatch.setattr(rsb, "_test_error", lambda model, x, lines: x.q1[0, 0, 0] + lines.offset[0])
        return ta.solve_1rsb(ta.DotProduct(), alpha, branch, **options), asked

    return solve


def _solutions(rs, *residuals):
    """Solutions of replicates by their residuals; None stands for a search that found nothing."""
    found = {}
    for k, residual in enumerate(residuals):
        if residual is not None:
            x = jax.tree.map(lambda a, k=k: a[k], rs.replicates.overlaps)
            x = OneRSBOverlaps((1.1 + k) * x.q, x.q, x.V, x.theta, x.m)
            found[k] = Solution(None, x, S + k, _look(k, x), residual, None)
    return found


def test_a_solve_holds_the_states_of_all_replicates(solve):
    """Numbers are those of the solutions. A replicate without one has the RS state's, but it is not converged."""
    rs = _broken_rs(scatter=(0.0, 0.1, 0.2, 0.3))
    solutions = _solutions(rs, 1e-5, 3e-3, 4e-3, None)
    point, asked = solve(solutions, rs)
    states = point.replicates
    assert states.status.tolist() == [ta.Status.converged, ta.Status.stalled, ta.Status.max_steps, ta.Status.max_steps]
    rs_loss = rs.replicates.train_loss
    np.testing.assert_allclose(states.train_loss, [0.005, 0.006, np.nan, np.nan], rtol=1e-12)
    np.testing.assert_allclose(states.elevation[:2], np.array([0.005, 0.006]) - rs_loss[:2], rtol=1e-12)
    np.testing.assert_allclose(states.loss_by_log_s, [1e-4, 2e-4, np.nan, np.nan], rtol=1e-12)
    q = rs.replicates.overlaps.q[0, 0, 0, 0]
    offsets = [asked["rule"].replicate(k).offset[0] for k in range(2)]
    np.testing.assert_allclose(states.gen_error[:2], [1.1 * q + offsets[0], 2.1 * q + offsets[1]], rtol=1e-12)
    assert np.isnan(states.elevation[2:]).all() and np.isnan(states.gen_error[2:]).all()
    np.testing.assert_allclose(states.s, [500, 501, 502, 2 / rs_loss[3]], rtol=1e-12)
    np.testing.assert_allclose(states.residual[:3], [1e-5, 3e-3, 4e-3])
    np.testing.assert_allclose(states.loss_by_alpha[:3], [2, 3, 4])
    np.testing.assert_allclose(states.loss_by_model.lam[:3], [1, 2, 3])
    np.testing.assert_allclose(states.overlaps.q1[:, 0, 0, 0] / q, [1.1, 2.1, 3.1, 1.0], rtol=1e-12)
    np.testing.assert_array_equal(states.conjugates.q1[:3], states.overlaps.q1[:3])
    assert point.ground and point.title == "positional branch at alpha = 2, 1RSB ground state" and point.broken
    request, rule = asked["request"], ta.Lines(5, points=64, seed=0, replicates=4).rule(ta.DotProduct())
    assert asked["s"] is None and asked["rule"] == rule and request.nodes == rule
    assert request.branch == "positional" and request.alpha == 2.0


def test_a_solve_at_a_given_s(solve):
    """A smaller s is no ground state, and neither is breaking found where the RS state does not jump."""
    rs = made.fixed_point(CASES[1], scatter=(0.0, 0.1))
    point, asked = solve({}, rs, s=40.0, order=3, lines=8, replicates=2, seed=3)
    assert asked["rule"] == ta.Lines(3, lines=8, points=64, seed=3, replicates=2).rule(ta.DotProduct())
    assert asked["s"] == 40 and not point.ground and point.title.endswith("1RSB state") and point.s == 40
    assert point.ok and not point.broken and point.elevation == 0 and "is exact" in str(point)
    np.testing.assert_array_equal(point.replicates.train_loss, rs.replicates.train_loss)
    assert point.status_name in point.describe().status and "residual 0.0e+00" in point.describe().status


def test_the_loss_has_the_stored_derivatives(solve):
    """Solutions give their derivatives only if the model or alpha is differentiated."""
    rs = _broken_rs(scatter=(0.0, 0.1))
    count = ravel_pytree((ta.DotProduct(), jnp.ones(())))[0].size
    x, zero, seen = _solutions(rs, 1e-5)[0].x, jnp.zeros(count), []
    hats = jax.tree.map(lambda a: jnp.zeros((*a.shape, count)), x)

    def loss(alpha):
        moving = Moving(hats, zero, hats, zero, zero) if isinstance(alpha, jax.core.Tracer) else None
        point, asked = solve(_solutions(rs, 1e-5, 1e-4), rs, alpha, moving=moving, replicates=2)
        seen.append(asked["is_differentiated"])
        return point.train_loss

    assert jax.grad(loss)(2.0) == 2.5  # the mean of 2 and 3
    assert float(loss(2.0)) == pytest.approx(0.0055) and seen == [True, False]


def test_numbers_of_a_state_are_means_with_error_bars(solve):
    rs = _broken_rs(scatter=(0.0, 0.1))
    point, _ = solve(_solutions(rs, 1e-5, 2e-5), rs, replicates=2)
    values, bars = point.numbers()
    names = ["q1", "q0", "V", "theta", "m", "s", "train_loss", "elevation", "gen_error", "energy", "complexity"]
    assert list(values) == list(bars) == names
    states = point.replicates
    for name in names:
        a = getattr(states.overlaps if name in names[:5] else states, name)
        np.testing.assert_allclose(values[name], np.mean(a, 0), rtol=1e-12)
        np.testing.assert_allclose(bars[name], ta.error_bar(a), rtol=1e-12)
    assert values["s"] == 500.5 and point.to_dict()["s"] == 500.5


def test_nodes_are_laid_again_where_clusters_become_wider(solved, lines, monkeypatch):
    """Nodes are laid again if clusters widen by over a tenth, three times at most; the search goes on from there."""
    rs, layouts = solved(2.0, "positional"), []
    x = jax.tree.map(lambda a: a[0], rs.replicates.overlaps)

    def with_width(width):
        return OneRSBOverlaps(x.q, (1 - width) * x.q, x.V, x.theta, x.m)

    def averages_at(model, between, x, s, lines):
        layouts.append((x, s))
        return Averages(None, None, lines)

    def search(*widths):
        layouts.clear()
        pending = iter(widths)

        def stub(problem, x, s, matrix):
            width = next(pending)
            solution = None if width is None else Solution(problem, with_width(width), s + 1, None, 1e-5, None)
            return made.finished_path(solution)

        monkeypatch.setattr(rsb, "_start", lambda *_: (with_width(0.1), S))
        monkeypatch.setattr(rsb, "averages_at", averages_at)
        monkeypatch.setattr(rsb, "fixed_point", stub)
        return run_one(rsb._search(rs, None, None, 0, rsb._lay(rs, None, 0, lines.replicate(0))))

    assert search(0.105).s == S + 1 and len(layouts) == 1
    assert search(None) is None and len(layouts) == 1
    assert search(0.2, 0.21).s == S + 2 and len(layouts) == 2
    np.testing.assert_allclose(layouts[1][0].q0, 0.8 * x.q, rtol=1e-12)
    assert layouts[1][1] == S + 1
    assert search(0.2, 0.4, 0.6).s == S + 3 and len(layouts) == 3


def _changed(state, overlaps=None, hats=None, **diagnostics):
    """A state with other overlaps and conjugates, if they are given, and other diagnostics."""
    numbers = {name: jnp.asarray(value) for name, value in diagnostics.items()}
    return dataclasses.replace(
        state,
        overlaps=overlaps or state.overlaps,
        conjugates=hats or state.conjugates,
        diagnostics=dataclasses.replace(state.diagnostics, **numbers),
    )


@pytest.mark.parametrize(("mass", "without"), [(0.1, 1 / 0.9), (0.9, 2.0), (1.07, -0.07), (-0.1, 1 / 0.999)])
def test_where_a_search_starts(solved, mass, without):
    """A search starts with the response without jumps in clusters, which take 1.2 times the rest of the response.

    s is that of the estimated elevation, but at most 2 / loss.
    """
    state = jax.tree.map(lambda a: a[0], solved(2.0, "positional").replicates)
    hats, model, q = state.conjugates, ta.DotProduct(), state.overlaps.q
    hats = dataclasses.replace(hats, V=hats.V * (1 if mass < 1 else -1))
    smooth_V = rs_potentials.overlaps(model, dataclasses.replace(hats, V=without * hats.V)).V
    part = float(1.2 * jnp.sum(state.overlaps.V - smooth_V) / jnp.sum(state.overlaps.V))
    for error, replicon in ((1e-8, 0.3), (1e-3, 0.3), (jnp.nan, 0.3), (0.0, 0.3), (1e-3, 1.2)):
        start = _changed(state, None, hats, jump_mass=mass, rs_error=error, replicon=replicon)
        x, s = rsb._start(model, start, None, jnp.ones(2))
        limit, estimated = 2 / float(state.train_loss), part**2 * (1 - replicon) / (8 * error) if error > 0 else np.inf
        np.testing.assert_allclose(s, min(limit, estimated) if estimated > 0 else limit, rtol=1e-9)
        np.testing.assert_allclose(x.V, smooth_V, rtol=1e-9)
        share = 1.2 * jnp.abs(state.overlaps.V - smooth_V) / (s * q)
        np.testing.assert_allclose(x.q1 - x.q0, q * jnp.minimum(share, 0.5), rtol=1e-6)


def test_clusters_of_a_start_lie_within_the_state(solved, random_hats):
    """Clusters are at most half as wide as the state, and in no direction less than a tenth as wide as in another."""
    state = jax.tree.map(lambda a: a[0], solved(2.0, "positional").replicates)
    x, _ = rsb._start(ta.DotProduct(), state, jnp.asarray(1e-3), jnp.ones(2))
    np.testing.assert_allclose(x.q0, 0.5 * x.q1, rtol=1e-9)
    model, hats = ta.DotProduct(rank=2), random_hats(2)
    q = jnp.array([[[2.0, 1.9], [1.9, 2.0]]] * 2)
    V = jnp.array([[[1.0, 0.5], [0.5, 1.0]]] * 2)
    between = ta.Overlaps(q, V, jnp.zeros((2, 2, 1)), jnp.zeros((2, 2)))
    rank_two = _changed(state, between, Conjugates(hats.q0, hats.V, hats.theta, hats.m), jump_mass=1.5)
    for s in (1.0, 1e3):
        x, _ = rsb._start(model, rank_two, jnp.asarray(s), jnp.ones(2))
        shares = np.linalg.eigvals(np.linalg.solve(q, x.q1 - x.q0)).real
        assert np.all(shares > 0) and np.all(shares <= 0.5 + 1e-9)
        assert np.all(shares.min(1) >= 0.1 * shares.max(1) * (1 - 1e-9))


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    model = ta.DotProduct(dtype="float64")
    for change, argument in (
        ({"s": 0.0}, "s"), ({"s": -1.0}, "s"), ({"branch": None}, "branch"), ({"replicates": 1}, "replicates"),
        ({"alpha": -1.0}, "alpha"), ({"model": ta.DotProduct(dtype="float32")}, "model"),
        ({"model": ta.DotProduct(penalty=ta.L1(0.01))}, "model must have no penalty"),
        ({"model": ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.25] * 2, {(0, 1): 1.0}))},
         "model must have tokens without classes"),
    ):  # fmt: skip
        with pytest.raises(ta.InputError, match=rf"^{argument}"):
            ta.solve_1rsb(**{"model": model, "alpha": 1.2, **change})
    with pytest.raises(ta.InputError, match="concrete"):
        jax.jit(lambda alpha: ta.solve_1rsb(model, alpha).s)(1.2)


def test_without_a_state_there_are_no_losses():
    """Where the RS branch is absent, the numbers of its 1RSB state are NaN."""
    point = ta.solve_1rsb(ta.DotProduct(), 0.3, "semantic", order=3, replicates=2)
    assert int(point.status) == ta.Status.absent and not point.broken
    assert np.isnan([point.train_loss, point.elevation, point.gen_error, point.energy, point.complexity]).all()


@pytest.mark.slow
def test_without_jumps_there_is_nothing_to_break():
    """Without jumps 1RSB equals RS: the standard model's semantic state has none at alpha = 4."""
    point = ta.solve_1rsb(ta.DotProduct(), 4.0, "semantic", order=3, replicates=2)
    assert not point.rs.jumps and point.elevation == 0 and point.complexity == 0
    np.testing.assert_array_equal(point.overlaps.q1, point.overlaps.q0)
    assert not point.broken and not point.to_dict()["broken"]


def _ground_states(sigma=0.5, alpha=1.2515):
    return ta.solve_1rsb(ta.DotProduct(sigma=sigma), alpha, "positional", order=3, replicates=2)


@pytest.mark.slow
def test_ground_state():
    """The ground state lies above the RS state, and its loss is stationary in s."""
    ground = _ground_states()
    states = ground.replicates
    assert np.all(states.elevation > 1e-7)
    assert abs(ground.mean.loss_by_log_s) < 0.1 * ground.elevation
    np.testing.assert_allclose(ground.rs.replicates.diagnostics.rs_error, states.elevation, rtol=0.2)
    # d loss / d lam is half the square of the weights, up to the residual of the equation for q1.
    half_square = states.overlaps.q1.mean((1, 2, 3)) / (2 * 0.25)
    assert np.all(np.abs(states.loss_by_model.lam / half_square - 1) <= states.residual)
    by_sigma = states.loss_by_model.sigma
    np.testing.assert_allclose(jax.grad(lambda sigma: _ground_states(sigma).train_loss)(0.5), by_sigma.mean())
    slope = (_ground_states(0.505).replicates.train_loss - _ground_states(0.495).replicates.train_loss) / 0.01
    np.testing.assert_allclose(by_sigma, slope, rtol=1e-3)
    page, numbers = str(ground), ground.to_dict()
    assert "1RSB" in page and "exact" not in page and "gen_error" in page and ground.broken
    assert numbers["status"] == ground.status_name and numbers["gen_error"] == ground.gen_error


@pytest.mark.slow
def test_derivatives_of_a_ground_state():
    """Derivatives of a ground state equal differences of solves on other nodes; s is found to a percent."""

    def numbers(alpha):
        states = _ground_states(alpha=alpha).replicates
        x = states.overlaps
        return jnp.stack([x.q1[:, 0, 0, 0], x.V[:, 0, 0, 0], x.m[:, 0, 0], states.gen_error, states.energy])

    alpha, step = jnp.asarray(1.2515), 5e-3
    _, slopes = jax.jvp(numbers, (alpha,), (jnp.ones(()),))
    np.testing.assert_allclose(slopes, (numbers(alpha + step) - numbers(alpha - step)) / (2 * step), rtol=5e-3)


@pytest.mark.slow
def test_conjugates_are_tilted_averages():
    """Conjugates are tilted averages of g = V^{-1} (prox - h), here over random fields and a grid within clusters.

    The averages of `solve_1rsb` are not used.
    """
    model, alpha, N = ta.DotProduct(), 1.2515, 40_000
    state = jax.tree.map(lambda a: a[0], _ground_states(alpha=alpha).replicates)
    x, hats, s = state.overlaps, state.conjugates, state.s
    xi, weight = np.polynomial.hermite_e.hermegauss(24)
    within = jnp.asarray(np.stack(np.meshgrid(xi, xi)).reshape(2, 1, -1))
    log_weight = jnp.log(jnp.outer(weight, weight).ravel() / (2 * np.pi))
    normals, teacher = jax.random.normal(jax.random.key(0), (2, 2, 1, N))

    @jax.jit
    def means(fields_between):
        """Tilted averages within a cluster: <g>, <g^2>."""
        normal, teacher = fields_between
        h, y = fields(model, x.between, normal[..., None], teacher[..., None])
        h, y = h + jnp.sqrt(x.q1 - x.q0) * within, jnp.broadcast_to(y, (2, 1, within.shape[-1]))
        problem = ProxProblem(model, x.V, y)
        z = search(problem, h).z
        share = jax.nn.softmax(log_weight - s * problem.energy(z, h))
        g = (z - h) / x.V
        return g[:, 0] @ share, g[:, 0] ** 2 @ share

    pairs = tuple(jnp.moveaxis(a, -1, 0) for a in (normals, teacher))
    first, second = (jnp.moveaxis(a, 0, -1) for a in jax.lax.map(means, pairs, batch_size=50))  # (2, N)
    q1, q0, m = alpha * second, alpha * first**2, alpha * first
    # Integration by parts in xi_0; the term with theta vanishes, because theta is zero.
    V = -alpha * first * normals[:, 0] / jnp.sqrt(x.q0[:, 0]) + s * (q1 - q0)
    for samples, expected in ((q1, hats.q1), (q0, hats.q0), (m, hats.m), (V, hats.V), (q1 - q0, hats.q1 - hats.q0)):
        bar = np.std(samples, axis=1) / N**0.5
        assert np.all(np.abs(np.mean(samples, 1) - np.ravel(expected)) < 4 * bar)
    assert np.all(bar < 0.08 * np.ravel(expected))


@pytest.mark.slow
def test_ground_state_of_two_columns():
    """The ground state of `TwoColumns`, with matrices far from RS, agrees with equations in closed form.

    The search starts by itself. Two fields across the lines are coarse at this order: residuals end at 5e-3.
    """
    model = TwoColumns(lam=jnp.asarray(1.0))
    unbroken, broken = _losses(1.0, 0.05, model.envelope)
    ground = ta.solve_1rsb(model, 0.05, "uninformed", order=3, lines=1024, replicates=2)
    x, bars = ground.overlaps, ground.stderr
    assert np.all(ground.replicates.residual < 0.01)
    elevation = broken(*_GROUND) - unbroken(ground.rs.overlaps.q[0], ground.rs.overlaps.V[0])
    # The loss is flat in s, and the width of a cluster moves with s.
    for value, error, expected, known in (
        (ground.elevation, bars.elevation, elevation, 0.01), (ground.s, bars.s, jnp.exp(_GROUND[3]), 0.3),
        (x.q1[0], bars.overlaps.q1[0], _GROUND[0], 0.01), (x.q0[0], bars.overlaps.q0[0], _GROUND[1], 0.3),
        (x.V[0], bars.overlaps.V[0], _GROUND[2], 0.1),
    ):  # fmt: skip
        size = np.max(np.abs(expected))
        assert np.max(error) < known * size, (value, error)
        assert np.all(np.abs(value - expected) < 3 * error + 1e-3 * size), (value, error, expected)


def _signs_by_hand(alpha, stiffness):
    """Training losses of `Signs`, RS and 1RSB, at lam = 1, and (q1, q0 / q1, V, log s), in closed form."""

    def envelope(V):
        return 1 / (1 + V), jnp.ones(1)

    losses = _losses(1.0, alpha, envelope, lambda V: stiffness / (1 + stiffness * V), count=150)

    def stationary(f, start):
        sizes = np.append(alpha / 4, np.ones(len(start) - 1))
        slope = jax.jit(jax.grad(f))
        root = fsolve(lambda u: np.asarray(slope(jnp.asarray(u * sizes))) * sizes / alpha, start / sizes, xtol=1e-13)
        return root * sizes, float(f(jnp.asarray(root * sizes)))

    def unbroken(v):
        return losses[0](*v.reshape(2, 1, 1))

    def broken(v):
        q1, share, V = v[:3].reshape(3, 1, 1)
        return losses[1](q1, share * q1, V, v[3])

    _, rs = stationary(unbroken, np.array([alpha / 4, 1.05]))
    x, loss = stationary(broken, np.array([alpha / 4, 0.47, 1.01, np.log(5.5 / alpha**0.5)]))
    return rs, loss, x


def test_few_samples_with_free_signs_are_the_sk_model():
    """Few samples with free signs are the SK model: at lam = 1 the loss is ``alpha (1 - alpha^{1/2} |e|) / 4``.

    The energy e of a spin is -.798 with RS and -.765 with 1RSB (-.7652: G. Parisi, J. Phys. A 13, L115, 1980).
    """
    rows = []
    for alpha in (1e-4, 1e-6):
        *losses, x = _signs_by_hand(alpha, 0.0)
        rows.append([*((1 - 4 * loss / alpha) / alpha**0.5 for loss in losses), x[1], np.exp(x[3]) * alpha**0.5 / 4])
    few, fewer = map(np.array, rows)
    limit = fewer + (fewer - few) / 9  # corrections are of order alpha^{1/2}
    np.testing.assert_allclose(limit[:2], [(2 / np.pi) ** 0.5, 0.7652], atol=1e-4)
    np.testing.assert_allclose(limit[2:], [0.477, 1.36], rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("stiffness", "lines", "exact"), [(0.0, 4, 1e-3), (20.0, 32, 0.02)])
def test_ground_state_of_random_signs(stiffness, lines, exact):
    """The ground state of `Signs`, far from RS, agrees with integrals in closed form.

    Clusters are half as wide as the state. Beside the line of the jumps there is a field to average over, or none.
    """
    *losses, (q1, share, V, log_s) = _signs_by_hand(0.01, stiffness)
    model = Signs(stiffness, lam=jnp.asarray(1.0))
    ground = ta.solve_1rsb(model, 0.01, "uninformed", order=3, lines=lines, replicates=2)
    assert ground.ok and abs(ground.rs.train_loss / losses[0] - 1) < 0.1 * exact
    assert abs(ground.elevation / (losses[1] - losses[0]) - 1) < exact
    x = ground.overlaps
    np.testing.assert_allclose(x.q1.ravel(), q1, rtol=exact)
    np.testing.assert_allclose(x.V.ravel(), V, rtol=exact)
    np.testing.assert_allclose((x.q0 / x.q1).ravel(), share, rtol=4 * exact)
    np.testing.assert_allclose(ground.s, np.exp(log_s), rtol=4 * exact)
