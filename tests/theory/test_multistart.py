import equinox as eqx
import jax
import made
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.base.results import Settings
from tiedattn_jax.theory import multistart


@pytest.mark.slow  # the notebook on phase diagrams does the same
def test_random_starts_find_both_branches(model):
    rule = ta.Lines(5, replicates=1, even=True).rule(model)
    states = ta.find_states(model, 2.0, rule, count=24)
    assert {"semantic", "positional", "mixed"} <= {f.label for f in states}
    losses = [float(f.train_loss) for f in states]
    assert losses == sorted(losses) and states[0].label == "semantic"
    mixed = next(f for f in states if f.label == "mixed")  # docs/results.md
    np.testing.assert_allclose(np.abs([mixed.m, mixed.theta]), [0.195, 0.0391], rtol=0.02)


def test_a_second_positional_state(model, lines):
    """Beyond the subcritical pitchfork of the uninformed state a saddle lies between it and the positional minimum."""
    settings, guess = ta.Settings(max_steps=60, warm_steps=0), made.overlaps_of(0.0993, 16.02, m=0.1459)
    saddle = ta.solve(model, 3.0, "positional", lines, start=guess, settings=settings)
    np.testing.assert_allclose(saddle.m, 0.1459, rtol=0.02)
    np.testing.assert_allclose(saddle.train_loss, 0.0072699, rtol=5e-4)
    assert bool(saddle.ok) and saddle.label == "positional"
    for branch, loss in (("uninformed", 0.0072341), ("positional", 0.0071072)):
        other = ta.solve(model, 3.0, branch, lines)
        np.testing.assert_allclose(other.train_loss, loss, rtol=5e-4)
        assert bool(other.ok) and other.train_loss < saddle.train_loss
        assert branch != "uninformed" or other.diagnostics.growth_m < 1


@pytest.fixture
def searches(monkeypatch):
    """Let `find_states` take the ends of its searches from a function of (lane): overlaps, status and training loss."""

    def answer_by(end):
        def answer(lane):
            x, status, loss = end(lane)
            template = jax.tree.map(lambda a: np.asarray(a)[0], made.states(lane.model, scatter=(0.0,)))
            parts = jax.tree.map(np.asarray, x), np.asarray(loss), np.asarray(int(status))
            return eqx.tree_at(lambda s: (s.overlaps, s.train_loss, s.status), template, parts)

        monkeypatch.setattr(multistart, "run_one", lambda path, progress=None: made.answer_path(path, answer))

    return answer_by


def test_states_count_once_and_failures_do_not(model, lines, searches):
    """A state counts once, up to its sign; failed starts and states that are lost on all nodes do not count."""
    first = state(CASES[0])
    mirrored = ta.Overlaps(1.001 * first.q, first.V, -first.theta, first.m)
    second, failed, lost = (ta.Overlaps(c * first.q, first.V, first.theta, first.m) for c in (1.1, 2, 3))
    ends = iter(zip((first, mirrored, second, failed, lost), (0, 1, 2, 4, 0), (0.3, 0.4, 0.5, 0.1, 0.2), strict=True))
    branch_lanes, solved = [], []

    def end(lane):
        x = lane.start
        if lane.replicate >= 0:  # on the full rule; the first state is lost there
            solved.append(float(x.q[0, 0, 0]))
            return x, 4 if len(solved) <= lines.replicates else 0, -float(x.q[0, 0, 0])
        if lane.settings.warm_steps == 0:  # from a random start
            assert lane.free.tolist() == [1, 1]
            return next(ends)
        branch_lanes.append((lane.free.tolist(), float(x.q[0, 0, 0]) / float(model.rho[0, 0, 0])))
        return x, ta.Status.nonfinite, 0.0

    searches(end)
    states = ta.find_states(model, 2.0, lines, count=5)
    q, p = CASES[0].q, 1.1 * CASES[0].q
    np.testing.assert_allclose(solved[:: lines.replicates], [3 * q, q, p])
    np.testing.assert_allclose([float(s.overlaps.q[0, 0, 0]) for s in states], [p, q])  # lowest loss first
    assert branch_lanes == [([0, 1], 0.1), ([1, 0], 0.6), ([0, 0], 0.4)]  # every branch from its own start


def test_branches_are_found_whatever_the_random_starts_reach(model, lines, searches):
    """Each branch's start finds its state, with the symmetry imposed; a loss without symmetry has no such starts."""

    def end(lane):
        is_damped = lane.settings.warm_steps == Settings().warm_steps
        return lane.start, 0 if is_damped or lane.replicate >= 0 else ta.Status.nonfinite, 0.0

    class Odd(ta.DotProduct):
        def loss(self, Z, Y):
            return super().loss(Z, Y) + 0.1 * Z.sum()

    searches(end)
    states = ta.find_states(model, 2.0, lines, count=2)
    assert [state.branch for state in states] == ["positional", "semantic", "uninformed"]
    assert ta.find_states(Odd(**vars(model)), 2.0, lines, count=2) == []
