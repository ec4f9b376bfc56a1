"""Derivatives of fixed points, which contain the jumps, on both kinds of averages and in both modes.

One program gives values and forward derivatives, in any direction and on any branch: it takes long to compile.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DERIVATIVES, state
from made import states_near

import tiedattn_jax as ta
from tiedattn_jax.overlaps import BRANCHES

pytestmark = pytest.mark.usefixtures("quick_programs")
JUMPS = [c for c in CASES if (c.alpha, c.branch) in DERIVATIVES]
NAMES = ("q", "V", "theta", "m", "train_loss", "gen_error")
TIGHT, FEW = ta.Settings(tol=1e-10, max_steps=8), ta.Settings(warm_steps=0, max_steps=4)


def numbers(fp):
    """Of every replicate of a fixed point, (R, 6)."""
    s = fp.replicates
    x = s.overlaps
    return jnp.stack(
        [x.q[:, 0, 0, 0], x.V[:, 0, 0, 0], x.theta[:, 0, 0, 0], x.m[:, 0, 0], s.train_loss, s.gen_error], 1
    )


@jax.jit
def forward(at, along, free, start, nodes, settings):
    """Numbers at (model, alpha), and their derivatives along a direction of these."""

    def values(model, alpha):
        return numbers(ta.FixedPoint(model, alpha, states_near(model, alpha, nodes, start, free, settings), None))

    return jax.jvp(values, at, along)


def direction(model, name=None, alpha=0.0):
    """One number of the model, or alpha."""
    zero = jax.tree.map(jnp.zeros_like, model)
    along = zero if name is None else eqx.tree_at(lambda m: getattr(m, name), zero, jnp.ones(()))
    return along, jnp.asarray(alpha, float)


def moved(at, along, step):
    return jax.tree.map(lambda a, d: a + step * d, at, along)


@pytest.mark.parametrize("case", [CASES[0], *JUMPS], ids=lambda c: f"{c.branch} {c.alpha}")
def test_lines(model, case):
    """Fixed points to 1e-5; derivatives against the reference, and against central differences."""
    nodes = ta.line_nodes(model, 15, replicates=1)
    at, along = (model, jnp.asarray(case.alpha, float)), direction(model, alpha=1.0)
    rest = BRANCHES[case.branch].free(model), state(case), nodes, ta.Settings()
    value, got = (a[0] for a in forward(at, along, *rest))
    np.testing.assert_allclose(value, [getattr(case, k) for k in NAMES], rtol=1e-5, atol=1e-12)
    if case not in JUMPS:
        return
    step = 2e-3 * case.alpha
    up, down = (forward(moved(at, along, s * step), along, *rest)[0][0] for s in (1, -1))
    for k, exact in DERIVATIVES[case.alpha, case.branch].items():
        i = NAMES.index(k)
        tol = 5e-3 if k == "q" and case.branch == "positional" else 1e-3  # 80 times smaller than q / alpha
        np.testing.assert_allclose(got[i], exact, rtol=tol)
        np.testing.assert_allclose(got[i], (up[i] - down[i]) / (2 * step), rtol=tol)


@pytest.mark.parametrize("case", JUMPS, ids=lambda c: f"{c.branch} {c.alpha}")
def test_jumps_on_single_nodes(model, nodes, case):
    """Against the exact derivatives: node by node, dV/dalpha at alpha = 1 would come out at -8."""
    at, along = (model, jnp.asarray(case.alpha, float)), direction(model, alpha=1.0)
    each = forward(at, along, BRANCHES[case.branch].free(model), state(case), nodes, ta.Settings())[1]
    for k, exact in DERIVATIVES[case.alpha, case.branch].items():
        got = each[:, NAMES.index(k)]
        bar = jnp.std(got, ddof=1) / 2
        assert abs(jnp.mean(got) - exact) <= max(4 * bar, 0.05 * abs(exact)), (k, got)
        assert bar < 0.08 * abs(exact) or k == "q"


def test_a_smooth_state(model, nodes):
    """Against central differences: the derivative is that of many nodes, the difference that of these."""
    at = model, jnp.asarray(2.0, float)
    rest = BRANCHES["semantic"].free(model), state(CASES[0]), nodes, TIGHT
    smooth = jnp.array([NAMES.index(k) for k in ("q", "train_loss", "gen_error")])
    for along, step in ((direction(model, "omega"), 1e-4), (direction(model, alpha=1.0), 1e-3)):
        up, down = (forward(moved(at, along, s * step), along, *rest)[0].mean(0) for s in (1, -1))
        got, difference = forward(at, along, *rest)[1].mean(0), (up - down) / (2 * step)
        np.testing.assert_allclose(got[smooth], difference[smooth], rtol=2e-2)
        if step == 1e-4:  # the training loss is stationary: its derivative is that of the frozen nodes
            np.testing.assert_allclose(got[4], difference[4], rtol=1e-4)


def test_reverse_mode_under_vmap_and_a_bad_lane_spoils_nothing(model, nodes):
    alphas = jnp.array([1e-9, 2.0])  # no fixed point worth the name at the first
    weights = jnp.array([1.0, 1e-3, 1.0, 0.0, 30.0, 30.0])

    def lane(lam, alpha):
        fp = ta.solve(eqx.tree_at(lambda m: m.lam, model, lam), alpha, "semantic", nodes, start=start, settings=FEW)
        return numbers(fp).mean(0), fp.status

    def total(lam):
        values, status = jax.vmap(lane, (None, 0))(lam, alphas)
        good = status <= ta.Status.stalled
        return jnp.sum(jnp.where(good, values @ weights, 0.0)), (values, good)

    start = state(CASES[0])
    gradient, (values, good) = jax.jit(jax.grad(total, has_aux=True))(model.lam)
    assert good.tolist() == [False, True]
    rest = BRANCHES["semantic"].free(model), start, nodes, FEW
    value, slope = forward((model, alphas[1]), direction(model, "lam"), *rest)
    np.testing.assert_allclose(values[1], value.mean(0), rtol=1e-8)
    np.testing.assert_allclose(gradient, slope.mean(0) @ weights, rtol=1e-6)


@pytest.mark.slow
def test_second_derivative(model):
    """Forward over reverse, against the difference of first derivatives."""
    nodes, start = ta.line_nodes(model, 5, replicates=1), state(CASES[0])

    def loss(alpha):
        return ta.solve(model, alpha, "semantic", nodes, start=start, settings=TIGHT).train_loss

    at, along = (model, jnp.array(2.0)), direction(model, alpha=1.0)
    rest = BRANCHES["semantic"].free(model), start, nodes, TIGHT
    up, down = (forward(moved(at, along, 0.02 * s), along, *rest)[1][0, 4] for s in (1, -1))
    np.testing.assert_allclose(jax.jit(jax.hessian(loss))(at[1]), (up - down) / 0.04, rtol=1e-2)
