"""Every status at 200 random settings, checked by independent witnesses; `-s` prints the table."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES, magnitudes
from tiedattn_jax.theory.engine import run_one
from tiedattn_jax.theory.paths import together
from tiedattn_jax.theory.solve import Problem

pytestmark = pytest.mark.slow
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
        coarse = Problem(model, alpha, rule, free, ta.Settings()).coarse_lane(trial)
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
    witness = ta.Sobol(2**14, seed=1, replicates=2).rule(standard)
    table = {}
    for k, (model, alpha, branch) in enumerate(draws()):
        start = time.perf_counter()
        rule = lines
        point = ta.solve(model, alpha, branch, rule)
        if point.status == ta.Status.unresolved:  # `solve` does so by itself when it chooses the rule
            rule = points
            point = ta.solve(model, alpha, branch, rule)
        jax.block_until_ready(point)
        duration = time.perf_counter() - start
        status = ta.Status(int(point.status))
        if status <= ta.Status.stalled:
            verdict = confirmed(point, witness)
        elif status == ta.Status.absent:
            verdict = confirmed_absent(point, rule)
        else:
            verdict = None
        table.setdefault(status, []).append((duration, verdict))
        if verdict is not True:
            numbers = [f"{float(getattr(model, name)):.4g}" for name in ("omega", "sigma", "lam")]
            sizes = [f"{float(jnp.abs(a).mean()):.3g}" for a in jax.tree.leaves(point.overlaps)]
            share = f"{float(point.diagnostics.unresolved):.2g}"
            print(k, status.name, verdict, branch, f"{float(alpha):.4g}", *numbers, "|", *sizes, share, flush=True)
    for status, rows in sorted(table.items()):
        seconds, rights = zip(*rows, strict=True)
        print(f"{status.name:12s} {len(rows):4d} {np.median(seconds):6.2f} s  right {sum(r is True for r in rights)}")
    rights = [verdict for rows in table.values() for _, verdict in rows]
    assert rights.count(False) == 0
    assert rights.count(True) >= 0.99 * COUNT
