"""Derivatives of fixed points contain the motion of the jumps, on both kinds of averages and in both modes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DERIVATIVES, state
from jax.flatten_util import ravel_pytree
from made import numbers_of, overlaps_of, states_near
from problems import rule
from scipy.stats import norm
from toy import OneToken, descending

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.theory.equations import Equations
from tiedattn_jax.theory.potentials import points_in

MODES = jax.jacfwd, jax.jacrev
JUMPS = [c for c in CASES if (c.alpha, c.branch) in DERIVATIVES]
IDS = {"ids": lambda c: f"{c.branch} {c.alpha}"}
NAMES = ("q", "V", "theta", "m", "train_loss", "gen_error")
TIGHT, FEW = ta.Settings(tol=1e-10, max_steps=8), ta.Settings(warm_steps=0, max_steps=4)


def numbers(name, case, place):
    """Numbers of a state at a place (omega, alpha) near a case, on a rule of `problems`: means over the replicates."""
    options = {"start": state(case), "settings": ta.Settings(tol=1e-9)}
    point = ta.solve(ta.DotProduct(place[0]), place[1], case.branch, rule(name), **options)
    return numbers_of(point.replicates).mean(0)


def slopes_and_differences(name, case, number, steps):
    """Derivatives of a number in omega and in alpha, and differences of the states on the same nodes."""
    i, place = NAMES.index(number), jnp.array([0.3, case.alpha])
    pairs = [(numbers(name, case, place + s)[i], numbers(name, case, place - s)[i]) for s in np.diag(steps)]
    differences = [float(up - down) / (2 * step) for (up, down), step in zip(pairs, steps, strict=True)]
    return jax.grad(lambda place: numbers(name, case, place)[i])(place), np.array(differences)


@pytest.mark.full  # the derivative of the nodes of lines is in `averages/test_lines.py`
@pytest.mark.parametrize("case", JUMPS, **IDS)
def test_jumps_on_lines(case):
    """On lines derivatives are those of the reference, and differences of the states on the same lines."""
    for k, exact in DERIVATIVES[case.alpha, case.branch].items():
        slopes, differences = slopes_and_differences("lines", case, k, (1e-4, 2e-3 * case.alpha))
        tol = 0.1 if k == "q" else 0.02  # dq/dalpha is 80 times smaller than q / alpha
        np.testing.assert_allclose([slopes[1], differences[1]], exact, rtol=tol)


@pytest.mark.full
@pytest.mark.parametrize(("number", "tol"), [("q", 0.1), ("train_loss", 1e-4), ("gen_error", 0.1)])
def test_a_smooth_state_on_points(number, tol):
    """Derivatives estimate those of many nodes, differences are of the nodes at hand: they agree to some per cent.

    The training loss is stationary, so its derivative is that of the frozen nodes.
    """
    slopes, differences = slopes_and_differences("points", CASES[0], number, (1e-4, 1e-3))
    np.testing.assert_allclose(slopes, differences, rtol=tol)


@jax.jit
def forward(point, tangent, free, start, nodes, settings):
    """Numbers at (model, alpha), and their derivatives along a direction in both, in one program for all branches."""

    def values(model, alpha):
        return numbers_of(states_near(model, alpha, nodes, start, free, settings))

    return jax.jvp(values, point, tangent)


def direction(model, name=None, alpha=0.0):
    """The direction of one number of the model, or of alpha."""
    zero = jax.tree.map(jnp.zeros_like, model)
    tangent = zero if name is None else eqx.tree_at(lambda m: getattr(m, name), zero, jnp.ones(()))
    return tangent, jnp.asarray(alpha, float)


@pytest.mark.full
@pytest.mark.parametrize("case", [CASES[0], *JUMPS], **IDS)
def test_fine_lines(model, case):
    """On fine lines fixed points equal the reference to 1e-5, and derivatives the reference to a thousandth."""
    nodes = ta.Lines(15, replicates=1).rule(model)
    point, tangent = (model, jnp.asarray(case.alpha, float)), direction(model, alpha=1.0)
    arguments = BRANCHES[case.branch].free(model), state(case), nodes, ta.Settings()
    value, slopes = (a[0] for a in forward(point, tangent, *arguments))
    np.testing.assert_allclose(value, [getattr(case, k) for k in NAMES], rtol=1e-5, atol=1e-12)
    for k, exact in DERIVATIVES.get((case.alpha, case.branch), {}).items():
        np.testing.assert_allclose(slopes[NAMES.index(k)], exact, rtol=5e-3 if k == "q" else 1e-3)


@pytest.mark.full
@pytest.mark.parametrize("case", JUMPS, **IDS)
def test_jumps_on_single_nodes(model, nodes, case):
    """Derivatives on single nodes equal the exact ones; node by node, dV/dalpha at alpha = 1 would be -8."""
    point, tangent = (model, jnp.asarray(case.alpha, float)), direction(model, alpha=1.0)
    slopes = forward(point, tangent, BRANCHES[case.branch].free(model), state(case), nodes, ta.Settings())[1]
    for k, exact in DERIVATIVES[case.alpha, case.branch].items():
        estimates = slopes[:, NAMES.index(k)]
        bar = jnp.std(estimates, ddof=1) / 2
        assert abs(jnp.mean(estimates) - exact) <= max(4 * bar, 0.05 * abs(exact)), (k, estimates)
        assert bar < 0.08 * abs(exact) or k == "q"


@pytest.mark.full
def test_reverse_mode_under_vmap_and_a_bad_entry_spoils_nothing(model, nodes):
    # There is no proper fixed point at the first alpha. At the last two an alpha and a number of the model are out of
    # their range.
    alphas, omegas = jnp.array([1e-9, 2.0, jnp.nan, -1.0, 2.0]), jnp.array([0.3, 0.3, 0.3, 0.3, 1.5])
    weights, start = jnp.array([1.0, 1e-3, 1.0, 0.0, 30.0, 30.0]), state(CASES[0])

    def entry(lam, alpha, omega):
        setting = eqx.tree_at(lambda m: (m.lam, m.omega), model, (lam, omega))
        fp = ta.solve(setting, alpha, "semantic", nodes, start=start, settings=FEW)
        return numbers_of(fp.replicates).mean(0), fp.status, fp.train_loss

    def total(lam):
        values, status, losses = jax.vmap(entry, (None, 0, 0))(lam, alphas, omegas)
        good = status <= ta.Status.stalled
        return jnp.sum(jnp.where(good, (values @ weights) ** 2, 0.0)), (values, status, losses)

    gradient, (values, status, losses) = jax.jit(jax.grad(total, has_aux=True))(model.lam)
    assert (status <= ta.Status.stalled).tolist() == [False, True, False, False, False]
    assert status[2:].tolist() == [ta.Status.nonfinite] * 3 and np.all(np.isnan(losses[2:]))
    arguments = BRANCHES["semantic"].free(model), start, nodes, FEW
    value, slope = forward((model, alphas[1]), direction(model, "lam"), *arguments)
    np.testing.assert_allclose(values[1], value.mean(0), rtol=1e-8)
    np.testing.assert_allclose(gradient, 2 * (value.mean(0) @ weights) * (slope.mean(0) @ weights), rtol=1e-6)


class Tilted(OneToken):
    """A layer with unequal wells at -1 and 1: the minimiser jumps by 2 V / (1 + V), where h = width V."""

    def loss(self, Z, Y):
        return jnp.sum(0.5 * (jnp.sqrt(Z**2 + 1e-8) - 1) ** 2 + self.width * Z)


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.full)])
def test_second_derivatives_in_all_modes(mode):
    """Second derivatives of training loss, q and theta of a moving state equal central differences, on two blocks."""
    model = OneToken(lam=jnp.asarray(0.1), width=jnp.asarray(0.7))
    nodes = descending(ta.Sobol(2**5, replicates=1, block=2**4).rule(model))
    replicate, x = nodes.replicate(0), overlaps_of(0.6, 1.3, 0.5, tokens=1)

    def setting(p):
        return eqx.tree_at(lambda m: (m.width, m.lam), model, (p, 0.2 * p**2)), 2 * p

    def first(p):
        point, direction = jax.jvp(setting, (p,), (jnp.ones(()),))
        moving = jax.tree.map(lambda a: a * p**0.5, x)  # any motion of the state will do
        partials = Equations(*point, replicate, BRANCHES["semantic"].free(model)).derivatives(moving)
        slopes = jax.tree.map(lambda a: a @ ravel_pytree(direction)[0], partials)
        numbers = slopes["train_loss"], slopes["overlaps"].q[0, 0, 0], slopes["overlaps"].theta[0, 0, 0]
        return jnp.stack(numbers), jnp.stack(numbers)

    step, both = 1e-4, jax.jit(mode(first, has_aux=True))
    (second, _), (_, above), (_, below) = (both(0.7 + h) for h in (0.0, step, -step))
    np.testing.assert_allclose(second, (above - below) / (2 * step), rtol=1e-5)  # differences are right to 2e-6


@pytest.mark.full
def test_second_derivative_of_an_average_over_jumps():
    """Derivatives of the means of z and z^2 on lines equal those of the exact means over the two sides.

    z = (h - V tilt + V sign(h - V tilt)) / (1 + V), with h normal of mean m and variance q.
    """
    model = Tilted(lam=jnp.asarray(0.1), width=jnp.asarray(0.2))
    replicate = ta.Lines(lines=2, points=24, replicates=1).rule(model).replicate(0)
    block = jax.tree.map(lambda a: a[0], replicate.blocks())

    def setting(p):
        tilt, q, V, m = p
        x = ta.Overlaps(q.reshape(1, 1, 1), V.reshape(1, 1, 1), jnp.zeros((1, 1, 1)), m.reshape(1, 1))
        return eqx.tree_at(lambda m: m.width, model, tilt), x

    def exact(p):
        tilt, q, V, m = p
        mean = m - V * tilt
        share, density = norm.cdf(mean / q**0.5), norm.pdf(mean / q**0.5)
        size = mean * (2 * share - 1) + 2 * q**0.5 * density  # E |h - V tilt|
        return np.stack([mean + V * (2 * share - 1), (q + mean**2 + 2 * V * size + V**2) / (1 + V)]) / (1 + V)

    def on_lines(p):
        points = points_in(*setting(p), replicate, block)
        return jnp.stack([jnp.sum(points.weight * points.z[0, 0] ** k) for k in (1, 2)])

    p, steps = np.array([0.2, 0.4, 0.8, 0.1]), 1e-3 * np.eye(4)
    slopes = np.stack([(exact(p + d) - exact(p - d)) / 2e-3 for d in steps], -1)
    corners = [
        [exact(p + d + e) - exact(p + d - e) - exact(p - d + e) + exact(p - d - e) for e in steps] for d in steps
    ]
    expected = exact(p), slopes, np.moveaxis(np.array(corners), -1, 0) / 4e-6
    found = jax.jit(lambda p: (on_lines(p), jax.jacfwd(on_lines)(p), jax.hessian(on_lines)(p)))(p)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("modes", [(a, b) for a in MODES for b in MODES], ids=["ff", "fr", "rf", "rr"])
def test_second_derivative(model, modes):
    """Second derivatives of a solve in sigma and alpha equal differences of first derivatives."""
    nodes, start = ta.Lines(5, replicates=1).rule(model), state(CASES[0])
    arguments = BRANCHES["semantic"].free(model), start, nodes, TIGHT

    def loss(numbers):
        changed_model = eqx.tree_at(lambda m: m.sigma, model, numbers[0])
        return ta.solve(changed_model, numbers[1], "semantic", nodes, start=start, settings=TIGHT).train_loss

    def moved(tangent, step):
        return jax.tree.map(lambda a, d: a + step * d, (model, jnp.array(2.0)), tangent)

    second = jax.jit(modes[0](modes[1](loss)))(jnp.array([model.sigma, 2.0]))
    directions = direction(model, "sigma"), direction(model, alpha=1.0)
    for outer, step, row in zip(directions, (2e-3, 0.02), second, strict=True):
        for inner, value in zip(directions, row, strict=True):
            up, down = (forward(moved(outer, s * step), inner, *arguments)[1][0, 4] for s in (1, -1))
            np.testing.assert_allclose(value, (up - down) / (2 * step), rtol=1e-2)


@pytest.mark.full
def test_the_map_on_lines_whose_nodes_are_searched():
    """A quarter of the lines has known jumps but no nodes in t; the map's slope in q is that of Sobol points.

    When these lines did not move with their jumps, the slope was -2.51 instead of -1.55.
    """
    model = ta.DotProduct(0.4, 1.54, 0.31, ((0.57, 0.43), (0.1, 0.9)))

    def image_and_slope(rule, q):
        answers = []
        for k in range(rule.replicates):
            equations = Equations(model, jnp.asarray(2.0), rule.replicate(k), jnp.array([1.0, 0.0]))
            answers.append(equations.answer(equations.coordinates.pack(overlaps_of(q, 0.556, 0.3))))
        image, jacobian = (np.mean([getattr(a, name) for a in answers], 0) for name in ("image", "jacobian"))
        return image[:6:2], jacobian[:6:2, :2].sum(1)  # q, V and theta of the first token, both q moving

    slope, points = image_and_slope(ta.Lines(9).rule(model), 0.74)[1], ta.Sobol(2**14).rule(model)
    differences = (image_and_slope(points, 0.78)[0] - image_and_slope(points, 0.70)[0]) / 0.08
    np.testing.assert_allclose(slope, differences, atol=0.12)
