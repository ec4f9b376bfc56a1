import operator

import equinox as eqx
import jax
import made
import numpy as np
import pytest
from cases import ALPHA_C, ALPHA_C_SENSITIVITIES, ALPHA_L

import tiedattn_jax as ta
from tiedattn_jax.phases import locate, transitions
from tiedattn_jax.phases.events import EVENTS


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
        model = ta.dot_product(omega=omega)
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

    def searched(search, bracket, guess=None):
        requests.append((search.nodes is lines, bracket, guess))
        return alpha_c(search, bracket, guess)

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
    crossing = ta.linear_crossing(model, absent, lines)
    assert crossing.event == "alpha_l" and not crossing.ok and crossing.reason == absent.reason
