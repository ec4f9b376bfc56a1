from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import CASES, state

import tiedattn_jax as ta
from tiedattn_jax.results import Settings
from tiedattn_jax.theory import multistart


@pytest.mark.slow  # the notebook on phase diagrams does the same
def test_random_starts_find_both_branches(model):
    rule = ta.line_nodes(model, 5, replicates=1, even=True)
    found = ta.find_states(model, 2.0, rule, count=24)
    assert {"semantic", "positional", "mixed"} <= {f.label for f in found}
    losses = [float(f.train_loss) for f in found]
    assert losses == sorted(losses) and found[0].label == "semantic"


def test_states_count_once_and_failures_do_not(model, lines, monkeypatch):
    """What the starts find: one state twice up to its sign, another one, one that failed, and one lost on all nodes."""
    one = state(CASES[0])
    mirrored = ta.Overlaps(1.001 * one.q, one.V, -one.theta, one.m)
    other = ta.Overlaps(1.1 * one.q, one.V, one.theta, one.m)
    lost = ta.Overlaps(3 * one.q, one.V, one.theta, one.m)
    xs = one, mirrored, other, ta.Overlaps(2 * one.q, *jax.tree.leaves(one)[1:]), lost
    losses, statuses = iter([0.3, 0.4, 0.5, 0.1, 0.2]), iter([0, 1, 2, 4, 0])
    found = iter([SimpleNamespace(overlaps=x, train_loss=next(losses), status=next(statuses)) for x in xs])
    nowhere, named = SimpleNamespace(status=int(ta.Status.absent)), []

    def coarsely(model, alpha, nodes, x, free, settings):
        if settings.warm_steps == 0:  # from a random start
            assert free.tolist() == [1, 1]
            return next(found)
        named.append((free.tolist(), float(x.q[0, 0, 0]) / float(model.rho[0, 0, 0])))
        return nowhere

    monkeypatch.setattr(multistart, "solve_coarsely", coarsely)
    solved = []

    def solve(model, alpha, branch, nodes, x, settings):
        solved.append(float(x.q[0, 0, 0]))
        return SimpleNamespace(overlaps=x, exists=len(solved) > 1, train_loss=-float(x.q[0, 0, 0]))

    monkeypatch.setattr(multistart, "solve_from", solve)
    states = ta.find_states(model, 2.0, lines, count=5)
    q, p = CASES[0].q, 1.1 * CASES[0].q
    np.testing.assert_allclose(solved, [3 * q, q, p])
    np.testing.assert_allclose([float(s.overlaps.q[0, 0, 0]) for s in states], [p, q])  # the lowest loss first
    assert named == [([0, 1], 0.1), ([1, 0], 0.6), ([0, 0], 0.4)]  # the branches, each from its own start


def test_branches_are_found_whatever_the_random_starts_reach(model, lines, monkeypatch):
    """On each branch its state, with the symmetry imposed; where the loss has none, nothing is imposed."""

    def coarsely(model, alpha, nodes, x, free, settings):
        status = 0 if settings.warm_steps == Settings().warm_steps else int(ta.Status.nonfinite)
        return SimpleNamespace(overlaps=x, train_loss=0.0, status=status)

    def solve(model, alpha, branch, nodes, x, settings):
        return SimpleNamespace(overlaps=x, exists=True, train_loss=0.0, branch=branch)

    monkeypatch.setattr(multistart, "solve_coarsely", coarsely)
    monkeypatch.setattr(multistart, "solve_from", solve)
    found = ta.find_states(model, 2.0, lines, count=2)
    assert [state.branch for state in found] == ["positional", "semantic", "uninformed"]

    class Odd(ta.DotProduct):
        def loss(self, Z, Y):
            return super().loss(Z, Y) + 0.1 * Z.sum()

    odd = Odd(**{k: getattr(model, k) for k in ("omega", "sigma", "lam", "mixing", "encodings", "teacher")})
    assert ta.find_states(odd, 2.0, lines, count=2) == []
