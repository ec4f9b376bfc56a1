"""The shift of alpha_c and alpha_l by replica symmetry breaking."""

from types import SimpleNamespace as Namespace

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.phases.locate import Reading
from tiedattn_jax.rsb import transitions as rsb_transitions
from tiedattn_jax.rsb.fixed_points import BrokenState


def _numbers(by_sigma) -> ta.Model:
    """Derivatives in the numbers of the model, zero except for sigma."""
    zeros = jax.tree.map(lambda a: jnp.asarray(np.zeros((2, *a.shape))), ta.DotProduct())
    return eqx.tree_at(lambda m: m.sigma, zeros, jnp.asarray(by_sigma))


def _state(elevation, by_alpha: float, by_sigma=0.0, **numbers) -> BrokenState:
    ones, full = np.ones(2), jnp.asarray(np.ones((2, 2, 1, 1)))
    x = ta.results.OneRSBOverlaps(full, full, full, full, full[..., 0])
    arrays = dict.fromkeys(("s", "train_loss", "gen_error"), ones) | {"loss_by_log_s": 0 * ones, "residual": 0 * ones}
    arrays |= {"elevation": np.asarray(elevation, float), "loss_by_alpha": by_alpha * ones, "status": np.zeros(2, int)}
    arrays = {name: jnp.asarray(a) for name, a in (arrays | numbers).items()}
    return BrokenState(overlaps=x, conjugates=x, loss_by_model=_numbers(by_sigma * ones), **arrays)


def _point(state, alpha=1.2, branch="semantic", rs=None, model=None) -> ta.results.OneRSBPoint:
    model, rs = model or ta.DotProduct(), rs or made.fixed_point()
    return ta.results.OneRSBPoint(model, jnp.asarray(alpha), rs, state, branch, True)


def test_a_state_without_breaking_says_that_rs_is_exact():
    point, failed = (_point(_state([0, 0], 1.0, status=jnp.array([0, s]))) for s in (0, int(ta.Status.max_steps)))
    assert "replica-symmetric state is exact" in str(point) and "exact" not in str(failed)
    wide = eqx.tree_at(lambda p: p.replicates.overlaps.q1, point, 2 * point.replicates.overlaps.q1)
    assert wide.broken and not point.broken and "exact" not in str(wide)


def test_energy_and_complexity_of_a_loss():
    """For the loss 1 - .2 / s, the energy d (s loss) / ds is one, and the complexity s^2 d loss / ds is .2."""
    s = np.array([2.0, 5.0])
    state = _state([0, 0], 1.0, s=s, train_loss=1 - 0.2 / s, loss_by_log_s=0.2 / s)
    np.testing.assert_allclose([state.energy, state.complexity], [[1.0] * 2, [0.2] * 2], rtol=1e-12)
    np.testing.assert_allclose([_point(state).energy, _point(state).complexity], [1.0, 0.2], rtol=1e-12)


def _rs_state(by_alpha: float, by_sigma: float = 0.0) -> ta.results.FixedPoint:
    """An RS state of two replicates that agree, with given derivatives of the loss."""
    partials = _numbers(by_sigma * np.ones(2)), jnp.asarray(by_alpha * np.ones(2))
    return eqx.tree_at(lambda p: p.replicates.train_loss_partials, made.fixed_point(scatter=(0.0, 0.0)), partials)


def test_the_exchange_of_broken_minima(monkeypatch):
    """The losses differ by alpha^2 - 5 sigma, and breaking lifts the difference by 3e-4 sigma^4, at sigma = .5.

    alpha_c and its sensitivities are those of this sum. So is alpha_l if only the later minimum beats the baseline.
    """
    lift, sigma, scatter = 3e-4, 0.5, np.zeros(2)

    def roots(sigma):
        return (5 * sigma) ** 0.5, (5 * sigma - lift * sigma**4) ** 0.5

    def rs_state(request, _):
        is_first = request.branch == "positional"
        return _rs_state(2 * request.alpha, -5.0) if is_first else _rs_state(0.0)

    def solved(model, alpha, branch, progress, **rule):
        assert rule == {"order": 3, "lines": None, "replicates": 4, "seed": 0}
        state = _state([0.0, 0.0], 0.0)
        if branch == "positional":
            # The first replicate lifts it more, by the scatter, and the second one less.
            lifts = (1 + 0.1 * np.sign(scatter)) * lift * sigma**4
            state = _state(lifts, 2 * alpha, -5 + 4 * lift * sigma**3 + scatter)
        return _point(state, alpha, branch, rs_state(Namespace(alpha=alpha, branch=branch), None), model)

    monkeypatch.setattr(rsb_transitions, "solve", solved)
    monkeypatch.setattr(rsb_transitions, "solve_checked", rs_state)
    alpha, broken = roots(sigma)
    late = tuple(made.fixed_point(gen_error=jnp.full(4, a), gen_error_linear=jnp.ones(4)) for a in (2.0, 0.5))
    rs = made.transition(alpha=alpha, branches=late)  # d alpha / d sigma = 2(0.02)
    shifted = ta.rsb.transition(ta.DotProduct(), "alpha_c", rs, order=3)
    np.testing.assert_allclose([shifted.alpha, shifted.shift.value], [broken, broken - alpha], rtol=1e-4)
    assert shifted.shift.stderr == 0 and shifted.stderr == rs.stderr and shifted.ok and "1RSB" in str(shifted)
    slopes = np.subtract(*(np.array(roots(sigma + e)) for e in (1e-4, -1e-4))) / 2e-4
    np.testing.assert_allclose(shifted.sensitivities.sigma - rs.sensitivities.sigma, slopes[1] - slopes[0], rtol=1e-4)
    np.testing.assert_allclose(shifted.sensitivities_stderr.sigma, rs.sensitivities_stderr.sigma, rtol=1e-9)
    report = shifted.to_dict()
    assert [b["branch"] for b in report["branches"]] == ["positional", "semantic"]
    assert report["rs_sensitivities"]["sigma"] == 2.0 and "rs: 2.000(20)" in str(shifted)
    crossing = ta.rsb.transition(ta.DotProduct(), "alpha_l", rs, order=3)
    assert crossing.alpha == shifted.alpha and (crossing.rs.event, shifted.rs.event) == ("alpha_l", "alpha_c")

    def alpha_c(model):
        return ta.rsb.transition(model, "alpha_c", rs, order=3).alpha

    np.testing.assert_allclose(jax.grad(alpha_c)(ta.DotProduct()).sigma, shifted.sensitivities.sigma, rtol=1e-12)
    # Replicates that differ have the same mean, and an error bar beside that of the RS theory.
    scatter += [-0.05, 0.05]
    scattered = ta.rsb.transition(ta.DotProduct(), "alpha_c", rs, order=3)
    np.testing.assert_allclose(scattered.sensitivities.sigma, shifted.sensitivities.sigma, rtol=1e-9)
    shifts, spread = (broken - alpha) * np.array([0.9, 1.1]), scatter / (2 * alpha)
    bars = np.std([shifts, spread], 1) * float(ta.results.error_bar(np.array([-1.0, 1.0])))
    np.testing.assert_allclose(scattered.shift.stderr, bars[0], rtol=1e-3)
    np.testing.assert_allclose(scattered.stderr, np.hypot(rs.stderr, bars[0]), rtol=1e-6)
    np.testing.assert_allclose(scattered.sensitivities_stderr.sigma, np.hypot(0.02, bars[1]), rtol=1e-3)


FINE, STALLED, ABSENT = ta.Status.converged, ta.Status.stalled, ta.Status.absent


@pytest.mark.parametrize(
    "codes", [(STALLED, FINE, FINE), (FINE, STALLED, FINE), (FINE, FINE, STALLED), (FINE, FINE, ABSENT), (FINE,) * 3]
)
def test_a_failure_of_either_theory_is_told(codes):
    """The status is the worst of the RS transition and of both 1RSB states. Without a state there are no numbers."""
    rs = made.transition(status=int(codes[0]))
    branches = tuple(_point(_state([0, 0], 1.0, status=np.array([0, int(code)]))) for code in codes[1:])
    shifted = rsb_transitions._moved(ta.DotProduct(), rs, branches, jnp.zeros(2), _numbers(np.zeros(2)))
    numbers = shifted.alpha, shifted.stderr, shifted.shift.value, shifted.sensitivities.sigma
    np.testing.assert_array_equal(np.isnan(numbers), ABSENT in codes)
    assert shifted.status == max(codes) and shifted.to_dict()["status"] == shifted.status_name


@pytest.mark.parametrize("branch", ["semantic", "positional"])
def test_where_a_broken_branch_beats_the_baseline(monkeypatch, branch):
    """alpha_l of a 1RSB branch is the root of its excess over the baseline, and has the root's sensitivities.

    States beat it by 3 (alpha^2 - 5 sigma) in RS, with the root .5, and by 3 lift sigma more in 1RSB.
    """
    rs, lift, root = made.fixed_point(scatter=(0.0, 0.0)), 3e-3, 0.5
    model, found = ta.DotProduct(sigma=0.05), []

    def solved(model, alpha, name, progress, **rule):
        assert name == branch and rule["order"] == 3
        excess = 3 * (alpha**2 - 5 * model.sigma + lift * model.sigma)
        linear = eqx.tree_at(lambda p: p.replicates.gen_error_linear, rs, jnp.ones(2))
        return _point(_state([0.0, 0.0], 0.0, gen_error=1 - excess * jnp.ones(2)), alpha, name, linear, model)

    def zero_path(event, search, guess, tol):
        by_alpha, beside = 6 * root * jnp.ones(2), 1e-5  # the search ends beside the root of its own averages
        slopes = beside * by_alpha, _numbers(-15.0 * jnp.ones(2)), by_alpha
        return made.finished_path(Reading(jnp.asarray(root + beside), (), *slopes))

    monkeypatch.setattr(rsb_transitions, "solve", solved)
    monkeypatch.setattr(rsb_transitions, "zero_path", zero_path)
    monkeypatch.setattr(rsb_transitions, "linear_crossing", lambda *_, **__: found[0])
    error = 0.5 if branch == "positional" else 2.0
    beats = made.fixed_point(gen_error=np.full(4, error), gen_error_linear=np.ones(4))
    critical = made.transition(alpha=0.5, branches=(beats, beats))

    def alpha_l(model):
        return ta.rsb.transition(model, "alpha_l", critical, order=3)

    found[:] = [made.transition(status=int(ta.Status.absent), event="alpha_l")]
    with pytest.raises(ta.InputError, match=r"^transition must have an alpha_l beside alpha_c, got status absent"):
        alpha_l(model)
    unnamed = ta.results.FixedPoint(rs.model, rs.alpha, rs.replicates, None)
    found[:] = [made.transition(alpha=root, event="alpha_l", branches=(unnamed,))]
    crossing, broken = alpha_l(model), (0.05 * (5 - lift)) ** 0.5
    np.testing.assert_allclose(crossing.shift.value, broken - root, rtol=1e-3)
    np.testing.assert_allclose(crossing.alpha, broken, rtol=1e-7)
    by_sigma = (5 - lift) / (2 * broken) - 5 / (2 * root)
    np.testing.assert_allclose(crossing.sensitivities.sigma - crossing.rs.sensitivities.sigma, by_sigma, rtol=1e-3)
    assert crossing.ok and len(crossing.branches) == 1 and crossing.event == "alpha_l"
    gradient = jax.grad(lambda m: alpha_l(m).alpha)(model)
    np.testing.assert_allclose(gradient.sigma, crossing.sensitivities.sigma, rtol=1e-12)


@pytest.mark.full
def test_estimated_shift(model, lines):
    """The shift estimated from the two states agrees with that of `transition_1rsb` on these lines."""
    transition = ta.critical_alpha(model, lines)
    shift, report = transition.rs_shift, transition.to_dict()
    assert -1.2 * 4.01e-4 - 3 * shift.stderr < shift.value < -4.01e-4 + 3 * 0.20e-4
    assert report["rs_shift"] == shift.value and report["rs_shift_stderr"] == shift.stderr
    assert "rs_shift" in str(transition)


_UNKNOWN = eqx.tree_at(lambda t: t.sensitivities, made.transition(), None)
_IN_CLASSES = ta.SpectralLaw.of_classes([0.25] * 2, {(0, 1): 1.0})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "event", "transition", "message"),
    [
        ({}, "semantic end", made.transition(), "^event must be one of alpha_c, alpha_l, got event='semantic end'"),
        *(({}, event, bad, "^transition") for event in ("alpha_c", "alpha_l")
          for bad in (1.25, "alpha_c", made.transition(event="alpha_l"), made.transition(status=6))),
        ({}, "alpha_c", _UNKNOWN, "^transition must have been found"),
        # A model is refused before its transition is searched.
        ({"penalty": ta.L1(0.01)}, "alpha_c", None, "model must have no penalty"),
        ({"dtype": "float32"}, "alpha_c", None, "model must be in float64"),
        ({"spectrum": _IN_CLASSES}, "alpha_c", None, "model must have tokens without classes"),
    ],
)  # fmt: skip
def test_bad_input(options, event, transition, message):
    with pytest.raises(ta.InputError, match=message):
        ta.rsb.transition(ta.DotProduct(**options), event, transition)
