"""All states at one setting: those of the branches, those of random starts, and when two of them are the same."""

import itertools

import made
import numpy as np
import pytest
from cases import CASES
from problems import rule, solved

import tiedattn_jax as ta


@pytest.mark.full  # the notebook on phase diagrams does the same
def test_random_starts_find_both_branches(model):
    states = ta.find_states(model, 2.0, ta.Lines(5, replicates=1, even=True).rule(model), count=24)
    assert {"semantic", "positional", "mixed"} <= {f.label for f in states}
    losses = [float(f.train_loss) for f in states]
    assert losses == sorted(losses) and states[0].label == "semantic"
    mixed = next(f for f in states if f.label == "mixed")  # docs/results.md
    np.testing.assert_allclose(np.abs([mixed.m, mixed.theta]), [0.195, 0.0391], rtol=0.02)


def test_branches_and_random_starts(model):
    """The branches are found whatever the random starts reach; these depend on the seed alone.

    Every state exists and counts once, up to its sign: no two have the same size and the same shares of both kinds.
    """
    one, again, more = (ta.find_states(model, 2.0, rule("lines"), count=n, seed=s) for n, s in ((1, 3), (1, 3), (4, 0)))
    for states in (one, more):
        losses = [float(f.train_loss) for f in states]
        assert losses == sorted(losses) and all(f.exists for f in states)
        for branch in ("semantic", "positional"):
            found = next(f for f in states if f.branch == branch)
            np.testing.assert_allclose(found.train_loss, solved("standard", branch, "lines").train_loss, rtol=1e-5)
        sizes = [[f.q / CASES[0].q, abs(f.theta) / f.q**0.5 / 0.5, abs(f.m) / f.q**0.5] for f in states]
        assert all(np.max(np.abs(np.subtract(a, b))) > 0.01 for a, b in itertools.combinations(sizes, 2))
    assert [float(f.train_loss) for f in one] == [float(f.train_loss) for f in again]


def test_a_second_positional_state(model):
    """Beyond the subcritical pitchfork of the uninformed state a saddle lies between it and the positional minimum."""
    settings, guess = ta.Settings(max_steps=60, warm_steps=0), made.overlaps_of(0.0993, 16.02, m=0.1459)
    saddle = ta.solve(model, 3.0, "positional", rule("lines"), start=guess, settings=settings)
    np.testing.assert_allclose(saddle.m, 0.1459, rtol=0.02)
    np.testing.assert_allclose(saddle.train_loss, 0.0072699, rtol=5e-4)
    assert bool(saddle.ok) and saddle.label == "positional"
    for branch, loss in (("uninformed", 0.0072341), ("positional", 0.0071072)):
        other = solved("standard", branch, "lines", 3.0)
        np.testing.assert_allclose(other.train_loss, loss, rtol=5e-4)
        assert bool(other.ok) and other.train_loss < saddle.train_loss
        assert branch != "uninformed" or other.diagnostics.growth_m < 1


@pytest.mark.full  # a model of its own
def test_a_loss_that_is_not_even_has_no_branches():
    class Odd(ta.DotProduct):
        def loss(self, Z, Y):
            return super().loss(Z, Y) + 0.1 * Z.sum()

    branches = {f.branch for f in ta.find_states(Odd(), 2.0, ta.Sobol(2**5, replicates=2).rule(Odd()), count=1)}
    assert branches <= {None}
