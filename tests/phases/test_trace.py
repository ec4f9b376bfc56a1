"""Events that are traced through a number of the model: reference values, and slopes against the curves themselves.

`test_searches_of_known_numbers` traces events of a theory in closed form.
"""

import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_C_SENSITIVITIES, ALPHA_L
from channels import NOISE, Noisy

import tiedattn_jax as ta
from tiedattn_jax.phases.events import EVENTS
from tiedattn_jax.theory.setting import branch_start

OMEGAS = [0.3, 0.33, 0.36]


@pytest.fixture(scope="module")
def trace(model, lines):
    def trace_event(event, guess, values=OMEGAS, **options):
        start = [ta.solve(model, guess, b, lines, start=branch_start(model, b)) for b in EVENTS[event].branches]
        options |= {"nodes": lines, "follow": True, "start": start}
        return ta.sweep(ta.find_event, model, event=event, omega=values, **options)

    return trace_event


@pytest.fixture(scope="module")
def critical(trace):
    return trace("alpha_c", 1.25)


@pytest.mark.full
def test_alpha_c(critical):
    assert abs(critical.alpha[0] - ALPHA_C) < 3 * critical.stderr()[0]
    np.testing.assert_allclose(critical.slope[0], ALPHA_C_SENSITIVITIES["omega"], rtol=1e-2)
    # The slopes are those of the curve on the same nodes: its rise agrees with Simpson's rule.
    rise = 0.06 / 6 * (critical.slope[0] + 4 * critical.slope[1] + critical.slope[2])
    np.testing.assert_allclose(critical.alpha[2] - critical.alpha[0], rise, rtol=2e-3)
    np.testing.assert_allclose(critical.interpolant(0.33), critical.alpha[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "guess", "alpha", "tolerance"),
    [
        ("semantic baseline", 1.5, ALPHA_L, 0.0),
        ("semantic pitchfork", 0.72, 0.7192, 0.002),
    ],
)
def test_baseline_and_pitchfork(trace, critical, name, guess, alpha, tolerance):
    boundary = trace(name, guess, OMEGAS[:2])
    assert abs(boundary.alpha[0] - alpha) < 3 * boundary.stderr()[0] + tolerance
    assert np.all(boundary.stderr() < 0.05)
    assert boundary.intersections(critical) == []


@pytest.mark.full
def test_an_entry_of_the_mixing(model, lines, critical):
    values = [0.38, 0.4, 0.42]
    start = [ta.solve(model, 1.25, b, lines, start=branch_start(model, b)) for b in ("positional", "semantic")]
    calls = []
    axis, options = ta.Axis("mixing[0,1]", values), {"start": start, "progress": lambda *c: calls.append(c)}
    boundary = ta.sweep(ta.critical_alpha, model, axis, nodes=lines, follow=True, **options)
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert abs(boundary.alpha[1] - ALPHA_C) < 3 * boundary.stderr()[1]
    rise = 0.04 / 6 * (boundary.slope[0] + 4 * boundary.slope[1] + boundary.slope[2])
    np.testing.assert_allclose(boundary.alpha[2] - boundary.alpha[0], rise, rtol=1e-2)


@pytest.mark.full
def test_thresholds_of_the_optimal_learner():
    """(1 + Delta)^2 / 6 with Delta = noise / sigma^2, and exact slopes."""
    sigma = np.array([0.4, 0.5])
    delta = NOISE**2 / sigma**2
    boundary = ta.sweep(ta.bayes.weak_recovery, Noisy(), sigma=sigma)
    np.testing.assert_allclose(boundary.alpha, (1 + delta) ** 2 / 6, rtol=1e-9)
    np.testing.assert_allclose(boundary.slope, -2 * (1 + delta) * delta / sigma / 3, rtol=1e-9)
    assert boundary.exact.all() and boundary.ok.all()
    one_fails = ta.sweep(ta.bayes.weak_recovery, ta.DotProduct(), omega=[0.3, 1.0])
    np.testing.assert_allclose(one_fails.alpha, [1 / 6, np.nan])
    assert "omega below one" in one_fails.reason[1]


def test_a_threshold_of_every_model():
    """Perfect recovery begins at 1 / L."""
    listed = ta.sweep(ta.bayes.perfect_recovery, [ta.DotProduct(sigma=s) for s in (0.4, 0.5)])
    np.testing.assert_array_equal(listed.alpha, [0.5, 0.5])
    assert np.isnan(listed.slope).all()
    with pytest.raises(ta.InputError, match="follow must be left out but for solve, critical_alpha"):
        ta.sweep(ta.bayes.weak_recovery, ta.DotProduct(), sigma=[0.4, 0.5], follow=True)


@pytest.mark.full
def test_where_small_starts_separate_is_a_boundary():
    omegas = np.array([0.2, 0.3])
    swept = ta.sweep(ta.dynamics.separation, ta.DotProduct(), direction="encodings", omega=omegas)
    np.testing.assert_allclose(swept.alpha[1], 0.41904, atol=1e-5)  # from another program
    teacher = ta.sweep(ta.dynamics.separation, ta.DotProduct(), direction="teacher", omega=omegas)
    np.testing.assert_allclose(teacher.alpha[1], 1.20866, atol=1e-5)
    assert np.all(teacher.exact) and np.all(teacher.status == ta.Status.converged)
    step = np.diff(teacher.alpha) / np.diff(omegas)
    np.testing.assert_allclose(np.mean(teacher.slope), step, rtol=0.02)
    with pytest.raises(ta.InputError, match="without kinks"):
        ta.sweep(ta.dynamics.separation, ta.ReLUAttention(), direction="encodings", omega=omegas)
