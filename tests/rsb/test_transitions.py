"""The shift of alpha_c and alpha_l by replica symmetry breaking."""

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.phases.events import rs_shift
from tiedattn_jax.phases.locate import Zero
from tiedattn_jax.rsb import transitions as rsb_transitions
from tiedattn_jax.rsb.fixed_points import BrokenState


@pytest.fixture(scope="module")
def transition(model, lines) -> ta.results.Quantity:
    return ta.critical_alpha(model, lines)


def _numbers(by_sigma: jax.Array) -> ta.Model:
    """Derivatives in the numbers of the model, zero except for sigma."""
    zeros = jax.tree.map(lambda a: jnp.zeros((*by_sigma.shape, *a.shape)), ta.DotProduct())
    return eqx.tree_at(lambda m: m.sigma, zeros, by_sigma)


def _state(elevation: list[float], by_alpha: float, by_sigma: float = 0.0, **numbers) -> BrokenState:
    ones = jnp.ones(len(elevation))
    full = jnp.ones((len(elevation), 2, 1, 1))
    x = ta.results.OneRSBOverlaps(full, full, full, full, full[..., 0])
    slopes = {"loss_by_model": _numbers(by_sigma * ones), "loss_by_alpha": by_alpha * ones, "loss_by_log_s": 0 * ones}
    elevation = jnp.asarray(elevation, float)
    known = {"overlaps": x, "conjugates": x, "s": ones, "train_loss": ones, "elevation": elevation, "gen_error": ones}
    return BrokenState(**known | slopes | {"residual": 0 * ones, "status": jnp.zeros(len(elevation), int)} | numbers)


def _point(state, alpha=1.2, branch="semantic", rs=None, model=None) -> ta.results.OneRSBPoint:
    model, rs = model or ta.DotProduct(), rs or made.fixed_point()
    return ta.results.OneRSBPoint(model, jnp.asarray(alpha), rs, state, branch, True)


def _replace_solves(monkeypatch, point, rs):
    """Let `transition_1rsb` take the points of a function of (model, alpha, branch), and the RS states of another."""
    monkeypatch.setattr(rsb_transitions, "solve_1rsb", lambda model, alpha, branch, **_: point(model, alpha, branch))
    monkeypatch.setattr(rsb_transitions, "solve_checked", lambda request, _: rs(request.alpha, request.branch))


def test_a_state_without_breaking_says_that_rs_is_exact():
    point, failed = (_point(_state([0, 0], 1.0, status=jnp.array([0, s]))) for s in (0, int(ta.Status.max_steps)))
    assert "replica-symmetric state is exact" in str(point) and "exact" not in str(failed)
    wide = eqx.tree_at(lambda p: p.replicates.overlaps.q1, point, 2 * point.replicates.overlaps.q1)
    assert wide.broken and not point.broken and "exact" not in str(wide)


def test_energy_and_complexity_of_a_loss():
    """For the loss 1 - .2 / s, the energy d (s loss) / ds is one, and the complexity s^2 d loss / ds is .2."""
    s = jnp.array([2.0, 5.0])
    state = _state([0, 0], 1.0, s=s, train_loss=1 - 0.2 / s, loss_by_log_s=0.2 / s)
    point = _point(state)
    np.testing.assert_allclose([point.energy, point.complexity], [1.0, 0.2], rtol=1e-12)
    np.testing.assert_allclose([state.energy, state.complexity], [[1.0] * 2, [0.2] * 2], rtol=1e-12)


def test_shift_is_elevation_over_slope(transition, monkeypatch):
    """The shift of alpha_c is minus elevation over slope.

    Losses cross with the slope .8e-3 - .5e-3, and the first one is lifted by 3e-7 and 5e-7: alpha_c falls.
    """
    states, rs = {"positional": _state([3e-7, 5e-7], 0.8e-3), "semantic": _state([0.0, 0.0], 0.5e-3)}, _rs_state(0.8e-3)

    def solved(model, alpha, branch, **rule):
        assert alpha == transition.alpha and rule["order"] == 7
        return _point(states[branch], alpha, branch, rs, model)

    monkeypatch.setattr(rsb_transitions, "solve_1rsb", solved)
    monkeypatch.setattr(rsb_transitions, "solve_checked", lambda *args: rs)
    shifted = ta.transition_1rsb(transition.branches[0].model, "alpha_c", transition, order=7)
    shifts = jnp.array([-1e-3, -5e-3 / 3])
    np.testing.assert_allclose(shifted.shift.value, -4e-3 / 3, rtol=1e-12)
    np.testing.assert_allclose(shifted.alpha, transition.alpha - 4e-3 / 3, rtol=1e-12)
    np.testing.assert_allclose(shifted.shift.stderr, ta.error_bar(shifts), rtol=1e-12)
    np.testing.assert_allclose(shifted.stderr, np.hypot(transition.stderr, shifted.shift.stderr), rtol=1e-12)
    assert shifted.ok and transition.stderr > 0 and "1RSB" in str(shifted)
    assert [b["branch"] for b in shifted.to_dict()["branches"]] == ["positional", "semantic"]


def _rs_state(by_alpha: float, by_sigma: float = 0.0) -> ta.results.FixedPoint:
    """An RS state of two replicates that agree, with given derivatives of the loss."""
    partials = _numbers(by_sigma * jnp.ones(2)), by_alpha * jnp.ones(2)
    return eqx.tree_at(lambda p: p.replicates.train_loss_partials, made.fixed_point(scatter=(0.0, 0.0)), partials)


def test_sensitivities_are_those_at_the_broken_alpha_c(monkeypatch):
    """The losses differ by alpha^2 - 5 sigma, and breaking lifts the difference by 3e-4 sigma^4, at sigma = .5."""
    lift, sigma = 3e-4, 0.5

    def roots(sigma):
        return (5 * sigma) ** 0.5, (5 * sigma - lift * sigma**4) ** 0.5

    alpha, _ = roots(sigma)
    by_sigma = {"positional": -5 + 4 * lift * sigma**3, "semantic": 0.0}

    def rs_state(alpha, branch):
        return _rs_state(2 * alpha, -5.0) if branch == "positional" else _rs_state(0.0)

    def point(model, alpha, branch):
        by_alpha, elevation = (2 * alpha, lift * sigma**4) if branch == "positional" else (0.0, 0.0)
        state = _state([elevation] * 2, by_alpha, by_sigma[branch])
        return _point(state, alpha, branch, rs_state(alpha, branch), model)

    _replace_solves(monkeypatch, point, rs_state)
    rs = made.transition(alpha=alpha)  # d alpha / d sigma = 2(0.02)
    shifted = ta.transition_1rsb(ta.DotProduct(), transition=rs)
    slopes = np.subtract(*(np.array(roots(sigma + e)) for e in (1e-4, -1e-4))) / 2e-4
    np.testing.assert_allclose(shifted.sensitivities.sigma - rs.sensitivities.sigma, slopes[1] - slopes[0], rtol=1e-4)
    np.testing.assert_allclose(shifted.sensitivities_stderr.sigma, rs.sensitivities_stderr.sigma, rtol=1e-9)
    report = shifted.to_dict()
    assert report["sensitivities"]["sigma"] == shifted.sensitivities.sigma
    assert report["rs_sensitivities"]["sigma"] == 2.0 and report["sensitivities_stderr"]["sigma"] == 0.02
    assert "d/dsigma" in str(shifted) and "rs: 2.000(20)" in str(shifted)
    gradient = jax.grad(lambda m: ta.transition_1rsb(m, transition=rs).alpha)(ta.DotProduct())
    np.testing.assert_allclose(gradient.sigma, shifted.sensitivities.sigma, rtol=1e-12)
    with pytest.raises(TypeError, match="first derivatives only"):
        jax.hessian(lambda m: ta.transition_1rsb(m, transition=rs).alpha)(ta.DotProduct())
    # Replicates that differ have the same mean, and an error bar beside that of the RS theory.
    scatter = jnp.array([-0.05, 0.05])
    by_sigma["positional"] += scatter
    scattered = ta.transition_1rsb(ta.DotProduct(), transition=rs)
    np.testing.assert_allclose(scattered.sensitivities.sigma, shifted.sensitivities.sigma, rtol=1e-12)
    bar = np.hypot(0.02, ta.error_bar(scatter) / (2 * alpha))
    np.testing.assert_allclose(scattered.sensitivities_stderr.sigma, bar, rtol=1e-3)


@pytest.mark.parametrize("failing", ["rs", "first", "second", "absent", None])
def test_a_failure_of_either_theory_is_told(failing):
    """The status is the worst of the RS transition and of every replicate of both 1RSB states.

    No number stands beside a status that says that there is none.
    """
    rs = made.transition(status=int(ta.Status.stalled if failing == "rs" else ta.Status.converged))
    codes = [int(ta.Status.max_steps if failing == name else ta.Status.converged) for name in ("first", "second")]
    codes[1] = int(ta.Status.absent) if failing == "absent" else codes[1]
    branches = tuple(_point(_state([0, 0], 1.0, status=jnp.array([0, code]))) for code in codes)
    shifted = rsb_transitions._moved(ta.DotProduct(), rs, branches, jnp.zeros(2), _numbers(jnp.zeros(2)))
    known = {"rs": ta.Status.stalled, "absent": ta.Status.absent, None: ta.Status.converged}
    expected = known.get(failing, ta.Status.max_steps)
    numbers = shifted.alpha, shifted.stderr, shifted.shift.value, shifted.sensitivities.sigma
    np.testing.assert_array_equal(np.isnan(numbers), failing == "absent")
    assert shifted.status == expected and shifted.to_dict()["status"] == shifted.status_name


_LIFT = 3e-3


def _baseline(monkeypatch, early, late):
    """States that beat the baseline by 3 (alpha^2 - 5 sigma) in RS, and by 3 _LIFT sigma more in 1RSB.

    The RS alpha_c and alpha_l lie at .5.
    """
    beaten, rs = 1.0, made.fixed_point(scatter=(0.0, 0.0))
    model, root = ta.DotProduct(sigma=0.05), 0.25**0.5

    def solved(model, alpha, branch, **rule):
        assert branch == ("positional" if early else "semantic") and rule["order"] == 7
        excess = 3 * (alpha**2 - 5 * model.sigma + _LIFT * model.sigma)
        linear = eqx.tree_at(lambda p: p.replicates.gen_error_linear, rs, beaten * jnp.ones(2))
        return _point(_state([0.0, 0.0], 0.0, gen_error=beaten - excess * jnp.ones(2)), alpha, branch, linear, model)

    def zero_path(event, search, guess, **options):
        assert event.name == ("positional baseline" if early else "semantic baseline") and options == {"tol": 1e-7}
        by_alpha, beside = 6 * root * jnp.ones(2), 1e-5  # the search ends beside the root of its own averages
        slopes = beside * by_alpha, _numbers(-15.0 * jnp.ones(2)), by_alpha
        return made.finished_path(Zero(jnp.asarray(root + beside), (), *slopes))

    def crossing(model, transition, **_):
        unnamed = ta.results.FixedPoint(rs.model, rs.alpha, rs.replicates, None)
        return made.transition(alpha=root, event="alpha_l", branches=(unnamed,))

    def state(beats):
        errors = (0.5 if beats else 2.0) * jnp.ones(4)
        return made.fixed_point(gen_error=errors, gen_error_linear=jnp.ones(4))

    for name, function in (("solve_1rsb", solved), ("zero_path", zero_path), ("linear_crossing", crossing)):
        monkeypatch.setattr(rsb_transitions, name, function)
    return model, made.transition(alpha=0.5, branches=(state(early), state(late)))


@pytest.mark.parametrize("early", [False, True], ids=["semantic", "positional"])
def test_where_a_broken_branch_beats_the_baseline(monkeypatch, early):
    """alpha_l of a 1RSB branch is the root of its excess over the baseline, and has the root's sensitivities."""
    model, transition = _baseline(monkeypatch, early, early)
    crossing = ta.transition_1rsb(model, "alpha_l", transition, order=7)
    root = (0.05 * (5 - _LIFT)) ** 0.5
    np.testing.assert_allclose(crossing.shift.value, root - 0.5, rtol=1e-3)
    np.testing.assert_allclose(crossing.alpha, root, rtol=1e-7)
    by_sigma = (5 - _LIFT) / (2 * root) - 5 / (2 * 0.5)
    np.testing.assert_allclose(crossing.sensitivities.sigma - crossing.rs.sensitivities.sigma, by_sigma, rtol=1e-3)
    assert crossing.ok and len(crossing.branches) == 1
    assert crossing.event == "alpha_l" and crossing.to_dict()["alpha"] == crossing.alpha
    gradient = jax.grad(lambda m: ta.transition_1rsb(m, "alpha_l", transition, order=7).alpha)(model)
    np.testing.assert_allclose(gradient.sigma, crossing.sensitivities.sigma, rtol=1e-12)


def test_the_exchange_of_the_minima_beats_the_baseline(monkeypatch):
    model, transition = _baseline(monkeypatch, False, True)
    states, rs = {"positional": _state([3e-7, 5e-7], 0.8e-3), "semantic": _state([0.0, 0.0], 0.5e-3)}, _rs_state(0.8e-3)
    _replace_solves(monkeypatch, lambda m, alpha, branch: _point(states[branch], alpha, branch, rs, m), lambda *_: rs)
    crossing, critical = (ta.transition_1rsb(model, e, transition, order=7) for e in ("alpha_l", "alpha_c"))
    assert crossing.alpha == critical.alpha and len(crossing.branches) == 2
    assert crossing.rs.event == "alpha_l" and critical.rs.event == "alpha_c"


def test_estimated_shift(model, transition):
    """The shift estimated from the two states agrees with that of `transition_1rsb` on these lines."""
    positional, semantic = (branch.mean for branch in transition.branches)
    lift = positional.diagnostics.rs_error - semantic.diagnostics.rs_error
    slope = positional.train_loss_partials[1] - semantic.train_loss_partials[1]
    shift = transition.rs_shift
    np.testing.assert_allclose(shift.value, -lift / slope, rtol=1e-4)
    assert -1.2 * 4.01e-4 - 3 * shift.stderr < shift.value < -4.01e-4 + 3 * 0.20e-4
    report = transition.to_dict()
    assert report["rs_shift"] == shift.value and report["rs_shift_stderr"] == shift.stderr
    assert "rs_shift" in str(transition)
    for variant in (made.transition(branches=transition.branches, event="semantic fold"), made.transition()):
        assert not hasattr(variant, "rs_shift") and "rs_shift" not in str(variant)
    status, excess = transition.branches[0].replicates.status, shift.value
    for k in range(len(status)):  # a replicate without a state has no share in the shift
        failed = eqx.tree_at(
            lambda b: b[0].replicates.status, transition.branches, status.at[k].set(int(ta.Status.nonfinite))
        )
        excess -= rs_shift(*failed).value / len(status)  # every replicate is in this many of the means over all but one
    np.testing.assert_allclose(excess, 0, atol=1e-12)
    assert rs_shift(*failed).value != shift.value


class _Asked(Exception):
    """The arguments of a solve."""


@pytest.mark.parametrize("options", [{}, {"order": 3, "lines": 8, "replicates": 2, "seed": 4}])
def test_states_are_solved_on_the_lines_that_were_asked_for(monkeypatch, options):
    def solve(model, alpha, branch, progress, **rule):
        raise _Asked(rule)

    monkeypatch.setattr(rsb_transitions, "solve_1rsb", solve)
    with pytest.raises(_Asked) as asked:
        ta.transition_1rsb(ta.DotProduct(), transition=made.transition(), **options)
    assert asked.value.args[0] == {"order": 5, "lines": None, "replicates": 4, "seed": 0} | options


@pytest.mark.usefixtures("unchecked")
def test_bad_input(model, monkeypatch):
    absent = made.transition(status=int(ta.Status.absent), event="alpha_l")
    monkeypatch.setattr(rsb_transitions, "critical_alpha", lambda model, **_: pytest.fail("searched"))
    monkeypatch.setattr(rsb_transitions, "linear_crossing", lambda *args, **_: absent)
    calls = [((model, "semantic end", made.transition()),
              "^event must be one of alpha_c, alpha_l, got event='semantic end'")]  # fmt: skip
    for event in ("alpha_c", "alpha_l"):
        for bad in (1.25, "alpha_c", made.transition(event="alpha_l"), made.transition(status=6)):
            calls.append(((model, event, bad), "^transition"))
    # A model is refused before its transition is searched.
    calls += [((ta.DotProduct(penalty=ta.L1(0.01)),), "model must have no penalty")]
    calls += [((ta.DotProduct(dtype="float32"),), "model must be in float64")]
    in_classes = ta.DotProduct(spectrum=ta.SpectralLaw.of_classes([0.25] * 2, {(0, 1): 1.0}))
    calls += [((in_classes,), "model must have tokens without classes")]
    unknown = eqx.tree_at(lambda t: t.sensitivities, made.transition(), None)
    calls += [((model, "alpha_c", unknown), "^transition must have been found")]
    branches = (made.fixed_point(gen_error=jnp.full(4, 2.0), gen_error_linear=jnp.ones(4)),) * 2
    without = "^transition must have an alpha_l beside alpha_c, got status absent"
    calls += [((model, "alpha_l", made.transition(alpha=0.5, branches=branches)), without)]
    for arguments, message in calls:
        with pytest.raises(ta.InputError, match=message):
            ta.transition_1rsb(*arguments)
