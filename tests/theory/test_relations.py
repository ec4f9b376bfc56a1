"""Relations between states: symmetries, units, the order of things, aggregates, and derivatives.

The settings are drawn by hypothesis, as numbers of programs that are compiled once.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from problems import rule

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import Rule
from tiedattn_jax.base.results import Status
from tiedattn_jax.theory.states import DIAGNOSTICS

# Shrinking takes long.
DRAWN = settings(max_examples=5, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
TIGHT = ta.Settings(tol=1e-9)
BRANCHES = st.sampled_from(["semantic", "positional"])
SETTINGS = st.fixed_dictionaries(
    {"omega": st.floats(0.28, 0.36), "sigma": st.floats(0.45, 0.5), "lam": st.floats(0.01, 0.015)}
)
ALPHAS = st.floats(1.8, 2.4)  # both branches exist at all these settings


def solved(*arguments, **options):
    point = ta.solve(*arguments, **options, settings=TIGHT)
    assert np.all(np.asarray(point.replicates.status) <= Status.stalled)
    return point


def assert_states(point, expected, rtol=1e-7, **factors):
    """Assert that all numbers of two states are equal in every replicate, but for given factors or functions."""
    numbers, others = point.replicates.numbers(), expected.replicates.numbers()
    for name in ("q", "V", "theta", "m", "train_loss", "gen_error", "gen_error_linear", "train_loss_by_alpha"):
        change = factors.get(name, 1.0)
        value = change(others[name]) if callable(change) else change * others[name]
        np.testing.assert_allclose(numbers[name], value, rtol=rtol, atol=1e-12, err_msg=name)


def mirrored_rule():
    """A rule of the shape of "points" in which every node has mirror images of the student, the teacher and both."""

    def even(stack):
        student, teacher = (np.asarray(a)[..., : a.shape[-1] // 4] for a in (stack.student, stack.teacher))
        fields = (np.concatenate(a, -1) for a in ([student, -student] * 2, [teacher, teacher, -teacher, -teacher]))
        return eqx.tree_at(lambda s: (s.student, s.teacher), stack, tuple(map(jnp.asarray, fields)))

    return Rule(even(rule("points").stack), even(rule("points").coarse))


@DRAWN
@given(SETTINGS, ALPHAS, BRANCHES)
def test_the_mirrored_student(numbers, alpha, branch):
    """Starts with the opposite theta and m give the mirrored state, with equal losses, on a rule of this parity."""
    model, even = ta.DotProduct(**numbers), mirrored_rule()
    point = solved(model, alpha, branch, even)
    x = point.overlaps
    mirrored = solved(model, alpha, branch, even, start=ta.Overlaps(x.q, x.V, -x.theta, -x.m))
    assert_states(mirrored, point, theta=-1.0, m=-1.0)


@DRAWN
@given(st.permutations(range(2**10)), st.permutations(range(2)), BRANCHES)
def test_nodes_and_replicates_in_another_order(nodes_order, replicates_order, branch):
    """Permuted replicates have permuted states, bit by bit; permuted nodes of all replicates have equal states."""
    model, points = ta.DotProduct(), rule("points")
    point = solved(model, 2.0, branch, points)
    replicates_order, nodes_order = np.array(replicates_order), np.array(nodes_order)
    swapped = Rule(jax.tree.map(lambda a: a[replicates_order], points.stack), points.coarse)
    other = solved(model, 2.0, branch, swapped)
    for a, b in zip(jax.tree.leaves(other.replicates), jax.tree.leaves(point.replicates), strict=True):
        np.testing.assert_array_equal(a, b[replicates_order])
    np.testing.assert_allclose(other.stderr.train_loss, point.stderr.train_loss, rtol=1e-9)
    shuffled = Rule(jax.tree.map(lambda a: a[..., nodes_order], points.stack), points.coarse)
    assert_states(solved(model, 2.0, branch, shuffled, start=point.overlaps), point, rtol=1e-5)


@pytest.mark.full  # a model of its own
@settings(DRAWN, max_examples=3)
@given(st.floats(0.3, 1.3))
def test_rotated_columns(angle):
    model = ta.DotProduct(rank=2)
    nodes = ta.Sobol(2**10, replicates=4).rule(model)
    point = ta.solve(model, 2.0, "semantic", nodes)
    (c, s), x = (np.cos(angle), np.sin(angle)), point.overlaps
    O = jnp.array([[c, -s], [s, c]])
    turned = ta.Overlaps(O.T @ x.q @ O, O.T @ x.V @ O, O.T @ x.theta, x.m @ O)
    other = ta.solve(model, 2.0, "semantic", nodes, start=turned)
    assert point.ok and other.ok and abs(other.overlaps.theta[0, 1, 0]) > 0.03
    values = [(turned.q, other.overlaps.q, *(s.stderr.overlaps.q.max() for s in (point, other)))]
    for name in ("train_loss", "gen_error"):
        values.append([getattr(s, name) for s in (point, other, point.stderr, other.stderr)])
    for expected, value, *bars in values:
        assert np.all(abs(value - expected) < 4 * np.hypot(*bars)) and np.hypot(*bars) < 0.02 * np.max(expected)


STATUSES = st.lists(st.sampled_from([int(s) for s in Status]), min_size=4, max_size=4)


@settings(DRAWN, max_examples=20)
@given(STATUSES, st.lists(st.floats(-0.2, 0.2), min_size=4, max_size=4), st.integers(0, 3))
def test_what_replicates_say_together(status, scatter, lost):
    """Means and error bars are those of the replicates with a state, and NaN stay away.

    The status is the worst one; a failure is worse than absent. The loss is NaN if no replicate has a state.
    """
    residual, masses = np.array([1e-6, 1e-3, 1e-4, 1e-5]), np.array([1.0, 2.0, 4.0, 8.0])
    point = made.fixed_point(scatter=scatter, status=status, jump_mass=masses, residual=residual)
    failed = [s for s in status if s not in (Status.converged, Status.stalled, Status.absent)]
    assert int(point.status) == max(failed or status) and bool(point.ok) == (max(status) <= Status.stalled)
    assert float(point.residual) == 1e-3
    usable = np.array([s <= Status.max_steps for s in status])  # their residuals are small
    assert bool(point.exists) == (usable.sum() >= 2)
    counted = usable if usable.any() else np.ones(4, bool)
    values = np.asarray(point.replicates.train_loss)[counted]
    np.testing.assert_allclose(point.train_loss, values.mean() if usable.any() else np.nan)
    np.testing.assert_allclose(
        point.stderr.train_loss, ta.results.error_bar(values) if usable.any() else np.nan, rtol=1e-9
    )
    mass, bar = masses[counted].mean(), ta.results.error_bar(masses[counted])
    np.testing.assert_allclose([point.diagnostics.jump_mass, point.stderr.diagnostics.jump_mass], [mass, bar])
    assert bool(point.jumps) == (mass > 3 * bar if np.isfinite(bar) else True)
    if usable.any() and not usable[lost]:
        broken = eqx.tree_at(
            lambda p: [p.replicates.train_loss, *(getattr(p.replicates.diagnostics, k) for k in DIAGNOSTICS)],
            point,
            replace_fn=lambda a: a.at[lost].set(jnp.nan),
        )
        np.testing.assert_array_equal(broken.train_loss, point.train_loss)
        np.testing.assert_array_equal(broken.stderr.train_loss, point.stderr.train_loss)
        for name in DIAGNOSTICS:
            np.testing.assert_array_equal(getattr(broken.diagnostics, name), getattr(point.diagnostics, name))


@pytest.mark.parametrize(("name", "share"), [("points", 0.0), pytest.param("lines", 0.1, marks=pytest.mark.full)])
@settings(DRAWN, max_examples=3)
@given(st.floats(0.28, 0.36), st.floats(0.45, 0.5), st.floats(0.01, 0.015), ALPHAS)
def test_slopes_are_differences(name, share, omega, sigma, lam, alpha):
    """`jax.grad` equals central differences, along a direction in which all numbers change; on lines for q, too.

    The slopes of the training loss are those at fixed overlaps, which a state has as `train_loss_partials`.
    """
    place = np.array([omega, sigma, lam, alpha])

    def point(omega, sigma, lam, alpha):
        model = ta.DotProduct(omega, sigma, lam)
        return ta.solve(model, alpha, "semantic", rule(name), start=start, settings=TIGHT)

    def values(*place):
        states = point(*place).replicates
        return states.train_loss + share * states.overlaps.q[:, 0, 0, 0]

    start = ta.solve(ta.DotProduct(omega, sigma, lam), alpha, "semantic", rule(name)).overlaps
    slopes = np.array(jax.grad(lambda *place: jnp.mean(values(*place)), (0, 1, 2, 3))(*place))
    step = 1e-3 * place * [1, -1, 1, 1]
    differences = (values(*place + step) - values(*place - step)) / 2
    np.testing.assert_allclose(step @ slopes, differences.mean(), rtol=2e-2)
    if not share:
        partials, by_alpha = point(*place).mean.train_loss_partials
        np.testing.assert_allclose(slopes, [partials.omega, partials.sigma, partials.lam, by_alpha], rtol=1e-6)
