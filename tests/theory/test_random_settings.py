"""Every status at 200 random settings, checked by independent witnesses; `-s` prints the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES, magnitudes
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.paths import together
from tiedattn_jax.theory.setting import Setting

pytestmark = pytest.mark.full
COUNT = 200


def draws():
    """Draw settings: all omega, a factor of 30 in sigma, four decades of lambda, any mixing, alpha in [.05, 20]."""
    rng = np.random.default_rng(7)
    for _ in range(COUNT):
        omega, sigma, lam = rng.uniform(), 10 ** rng.uniform(-1, 0.5), 10 ** rng.uniform(-4, 0)
        mixing = rng.uniform(size=(2, 2))
        alpha = 10 ** rng.uniform(np.log10(0.05), np.log10(20))
        branch = list(BRANCHES)[rng.integers(4)]
        yield ta.DotProduct(omega, sigma, lam, mixing / mixing.sum(1, keepdims=True)), alpha, branch


def confirmed(point, witness):
    """Return whether a rule of another kind finds this state with the same numbers, and its two losses agree."""
    model, x = point.model, point.overlaps
    result = ta.solve(model, point.alpha, point.branch, witness, start=x)
    if not bool(result.exists):
        return False
    pairs = zip(jax.tree.leaves((x.q, x.V)), jax.tree.leaves((result.overlaps.q, result.overlaps.V)), strict=True)
    overlaps_agree = all(np.allclose(a, b, rtol=0.1) for a, b in pairs)
    sizes = np.asarray(magnitudes(model, x)), np.asarray(magnitudes(model, result.overlaps))
    losses = np.array([point.train_loss, result.train_loss, point.diagnostics.train_loss_direct])
    bar = 3 * float(point.stderr.train_loss) + 0.02 * abs(losses[0])
    return bool(overlaps_agree and np.allclose(*sizes, atol=0.05) and np.ptp(losses) <= bar)


def confirmed_absent(point, rule):
    """Return whether an order parameter decays on the uninformed state, and no other start finds the branch.

    Just beyond the end of a branch the scatter of the nodes keeps its order parameter alive in every replicate, with
    either sign: that is not the branch.
    """
    model, alpha, free = point.model, point.alpha, BRANCHES[point.branch].free(point.model)
    if free.sum() == 1:
        uninformed = ta.solve(model, alpha, "uninformed", rule)
        growth = uninformed.diagnostics.growth_theta if point.branch == "semantic" else uninformed.diagnostics.growth_m
        if bool(uninformed.ok) and growth > 1.05:
            return False
    start = BRANCHES[point.branch].start(model)
    for q, V in ((3.0, 1.0), (0.3, 0.3), (1.0, 0.03)):
        trial = ta.Overlaps(q * start.q, V * start.V, q**0.5 * start.theta, q**0.5 * start.m)
        coarse = Setting(model, alpha, rule, free).coarse_lane(trial)
        overlaps = run_one(together([coarse]))[0].overlaps
        state = ta.solve(model, alpha, point.branch, rule, start=jax.tree.map(jnp.asarray, overlaps))
        bars = state.stderr.overlaps
        nonzero = [
            jnp.any(jnp.abs(a) > 2 * b) for a, b in ((state.overlaps.theta, bars.theta), (state.overlaps.m, bars.m))
        ]
        if bool(state.ok) and (point.branch in ("uninformed", None) or any(map(bool, nonzero))):
            return False
    return True


def test_statuses():
    standard = ta.DotProduct()
    lines, points = ta.Lines(5).rule(standard), ta.Sobol(2**14).rule(standard)
    witness, table = ta.Sobol(2**14, seed=1, replicates=2).rule(standard), {}
    for k, (model, alpha, branch) in enumerate(draws()):
        rule, point = lines, ta.solve(model, alpha, branch, lines)
        if point.status == ta.Status.unresolved:  # `solve` does so by itself when it chooses the rule
            rule, point = points, ta.solve(model, alpha, branch, points)
        status, verdict = ta.Status(int(point.status)), None
        if status <= ta.Status.stalled:
            verdict = confirmed(point, witness)
        elif status == ta.Status.absent:
            verdict = confirmed_absent(point, rule)
        table.setdefault(status, []).append(verdict)
        if verdict is not True:
            numbers = [f"{float(a):.4g}" for a in (alpha, model.omega, model.sigma, model.lam)]
            sizes = [f"{float(jnp.abs(a).mean()):.3g}" for a in jax.tree.leaves(point.overlaps)]
            print(k, status.name, verdict, branch, *numbers, "|", *sizes, flush=True)
    for status, rights in sorted(table.items()):
        print(f"{status.name:12s} {len(rights):4d}  right {rights.count(True)}")
    rights = [verdict for row in table.values() for verdict in row]
    assert rights.count(False) == 0
    assert rights.count(True) >= 0.99 * COUNT
