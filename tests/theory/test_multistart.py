import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.base.results import Settings
from tiedattn_jax.model.overlaps import BRANCHES, admissible
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

    template = jax.tree.map(lambda a: np.asarray(a)[0], made.states(ta.DotProduct(), scatter=(0.0,)))

    def answer_by(end):
        def answer(lane):
            x, status, loss = end(lane)
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


def test_the_random_starts(model, lines, monkeypatch):
    """Their q and V are log-normal in units of the start of no branch, their theta and m uniform beside sqrt(q)."""
    calls = []

    def distinct(searches, settings):
        calls.append((searches, settings))
        return made.finished_path([])

    monkeypatch.setattr(multistart, "_distinct", distinct)
    monkeypatch.setattr(multistart, "admissible", jax.jit(admissible))
    assert ta.find_states(model, 2.0, lines) == []
    ((searches, settings),) = calls
    assert [(branch, len(starts)) for _, branch, starts in searches] == [
        *((name, 1) for name in ("positional", "semantic", "uninformed")), (None, 64)
    ]  # fmt: skip
    *named, random = [problem.settings for problem, *_ in searches]
    assert random is settings and (int(settings.max_steps), int(settings.warm_steps)) == (60, 0)
    assert [(int(s.max_steps), int(s.warm_steps)) for s in named] == [(60, int(Settings().warm_steps))] * 3
    reference, rng, expected = BRANCHES[None].start(model), np.random.default_rng(0), []
    while len(expected) < 64:
        q, V = np.exp(-1.5 + rng.standard_normal()), np.exp(0.5 * rng.standard_normal())
        theta, m = -1.2 + 2.4 * rng.random(2)
        if reference.q[0, 0, 0] > (theta * reference.theta[0, 0, 0]) ** 2 / model.rho[0, 0, 0]:
            expected.append((q, V, q**0.5 * theta, q**0.5 * m))
    for x, factors in zip(searches[-1][-1], expected, strict=True):
        for name, factor in zip(("q", "V", "theta", "m"), factors, strict=True):
            np.testing.assert_allclose(getattr(x, name), factor * getattr(reference, name), rtol=1e-9)
    own = ta.Settings(tol=1e-3, warm_steps=7)
    ta.find_states(model, 2.0, lines, count=3, seed=1, settings=own)
    searches, settings = calls[-1]
    assert settings is own and len(searches[-1][-1]) == 3 and float(searches[0][0].settings.tol) == 1e-3
    assert not np.isclose(searches[-1][-1][0].q[0, 0, 0] / reference.q[0, 0, 0], expected[0][0])
    ta.find_states(model, 2.0, lines, count=1, seed=0)
    np.testing.assert_allclose(calls[-1][0][-1][-1][0].q / reference.q, expected[0][0], rtol=1e-9)
    with pytest.raises(ta.InputError, match="seed must be an integer of at least 0"):
        ta.find_states(model, 2.0, lines, seed=-1)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"q": 1.04}, True),
        ({"q": 1.06}, False),
        ({"q": 0.94}, False),
        ({"V": 9.0}, True),  # V is not compared
        ({"theta": -1.0}, True),  # the sign does not count
        ({"m": 0.04}, True),
        ({"m": 0.06}, False),
        ({"theta": 1.04 / 0.93}, False),  # theta is .93 of its largest size
        ({"theta": 1.045}, True),
    ],
)
def test_when_two_states_are_the_same(model, changes, same):
    """States are compared by the size of q, relative to each other, and by how semantic and how positional they are."""
    x = state(CASES[0])
    factor = {"q": 1.0, "V": 1.0, "theta": 1.0, "m": 0.0} | changes
    m = factor["m"] * jnp.sqrt(x.q[:, :, 0]) * jnp.array([[1.0], [-1.0]])
    y = ta.Overlaps(factor["q"] * x.q, factor["V"] * x.V, factor["q"] ** 0.5 * factor["theta"] * x.theta, m)
    assert multistart._same_state(model, y, x, 0.05) == same


def test_states_that_are_almost_the_same_on_all_averages_count_once(model, lines, searches):
    """Coarse states further apart than 5 % are solved on all averages; there 2 % decide, and the lower one is kept."""
    first = state(CASES[0])
    coarse = iter([1.0, 1.2, 1.4, 1.6, 1.7])
    exact = {1.0: 1.0, 1.2: 1.025, 1.4: 1.015, 1.6: 1.6, 1.7: 2.0}
    losses = {1.0: 0.1, 1.2: 0.2, 1.4: 0.3, 1.6: 0.05, 1.7: 0.06}

    def scaled(factor):
        return ta.Overlaps(factor * first.q, first.V, factor**0.5 * first.theta, first.m)

    def end(lane):
        if lane.settings.warm_steps > 0:
            return lane.start, ta.Status.nonfinite, 0.0
        if lane.replicate < 0:
            factor = next(coarse)
            return scaled(factor), 2, losses[factor]
        factor = min(exact, key=lambda k: abs(k * first.q[0, 0, 0] - lane.start.q[0, 0, 0]))
        return scaled(exact[factor]), 0, losses[factor]

    searches(end)
    states = ta.find_states(model, 2.0, lines, count=5)
    np.testing.assert_allclose(
        [s.overlaps.q[0, 0, 0] / first.q[0, 0, 0] for s in states], [1.6, 2.0, 1.0, 1.025], rtol=1e-9
    )
    np.testing.assert_allclose([s.train_loss for s in states], [0.05, 0.06, 0.1, 0.2])
