"""Derivatives of fixed points contain the motion of the jumps, on both kinds of averages and in both modes.

One program gives values and forward derivatives in any direction and on any branch, because it takes long to compile.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DERIVATIVES, state
from jax import lax
from jax.flatten_util import ravel_pytree
from made import numbers_of, overlaps_of, states_near

import tiedattn_jax as ta
from tiedattn_jax.averages import prox
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.rules import fields
from tiedattn_jax.base.derivatives import derivative_along, with_tangent
from tiedattn_jax.model.overlaps import BRANCHES
from tiedattn_jax.theory.equations import Equations
from tiedattn_jax.theory.potentials import points_in

pytestmark = pytest.mark.usefixtures("fast_compilation")
MODES = jax.jacfwd, jax.jacrev
JUMPS = [c for c in CASES if (c.alpha, c.branch) in DERIVATIVES]
NAMES = ("q", "V", "theta", "m", "train_loss", "gen_error")
TIGHT, FEW = ta.Settings(tol=1e-10, max_steps=8), ta.Settings(warm_steps=0, max_steps=4)


@jax.jit
def forward(point, tangent, free, start, nodes, settings):
    """Numbers at (model, alpha), and their derivatives along a direction in both."""

    def values(model, alpha):
        return numbers_of(states_near(model, alpha, nodes, start, free, settings))

    return jax.jvp(values, point, tangent)


def direction(model, name=None, alpha=0.0):
    """The direction of one number of the model, or of alpha."""
    zero = jax.tree.map(jnp.zeros_like, model)
    tangent = zero if name is None else eqx.tree_at(lambda m: getattr(m, name), zero, jnp.ones(()))
    return tangent, jnp.asarray(alpha, float)


def moved(point, tangent, step):
    return jax.tree.map(lambda a, d: a + step * d, point, tangent)


@pytest.mark.parametrize("case", [CASES[0], *JUMPS], ids=lambda c: f"{c.branch} {c.alpha}")
def test_lines(model, case):
    """On lines fixed points equal the reference to 1e-5, and derivatives the reference and central differences."""
    nodes = ta.Lines(15, replicates=1).rule(model)
    point, tangent = (model, jnp.asarray(case.alpha, float)), direction(model, alpha=1.0)
    arguments = BRANCHES[case.branch].free(model), state(case), nodes, ta.Settings()
    value, slopes = (a[0] for a in forward(point, tangent, *arguments))
    np.testing.assert_allclose(value, [getattr(case, k) for k in NAMES], rtol=1e-5, atol=1e-12)
    if case not in JUMPS:
        return
    step = 2e-3 * case.alpha
    up, down = (forward(moved(point, tangent, s * step), tangent, *arguments)[0][0] for s in (1, -1))
    for k, exact in DERIVATIVES[case.alpha, case.branch].items():
        i = NAMES.index(k)
        tol = 5e-3 if k == "q" and case.branch == "positional" else 1e-3  # dq/dalpha is 80 times smaller than q / alpha
        np.testing.assert_allclose(slopes[i], exact, rtol=tol)
        np.testing.assert_allclose(slopes[i], (up[i] - down[i]) / (2 * step), rtol=tol)


@pytest.mark.long
@pytest.mark.parametrize("case", JUMPS, ids=lambda c: f"{c.branch} {c.alpha}")
def test_jumps_on_single_nodes(model, nodes, case):
    """Derivatives on single nodes equal the exact ones; node by node, dV/dalpha at alpha = 1 would be -8."""
    point, tangent = (model, jnp.asarray(case.alpha, float)), direction(model, alpha=1.0)
    slopes = forward(point, tangent, BRANCHES[case.branch].free(model), state(case), nodes, ta.Settings())[1]
    for k, exact in DERIVATIVES[case.alpha, case.branch].items():
        estimates = slopes[:, NAMES.index(k)]
        bar = jnp.std(estimates, ddof=1) / 2
        assert abs(jnp.mean(estimates) - exact) <= max(4 * bar, 0.05 * abs(exact)), (k, estimates)
        assert bar < 0.08 * abs(exact) or k == "q"


def test_a_smooth_state(model, nodes):
    """Derivatives estimate those of many nodes, differences are of the nodes at hand: they agree to 2 %."""
    point = model, jnp.asarray(2.0, float)
    arguments = BRANCHES["semantic"].free(model), state(CASES[0]), nodes, TIGHT
    smooth = jnp.array([NAMES.index(k) for k in ("q", "train_loss", "gen_error")])
    for tangent, step in ((direction(model, "omega"), 1e-4), (direction(model, alpha=1.0), 1e-3)):
        up, down = (forward(moved(point, tangent, s * step), tangent, *arguments)[0].mean(0) for s in (1, -1))
        slopes, difference = forward(point, tangent, *arguments)[1].mean(0), (up - down) / (2 * step)
        np.testing.assert_allclose(slopes[smooth], difference[smooth], rtol=2e-2)
        if step == 1e-4:  # the training loss is stationary, so its derivative is that of the frozen nodes
            np.testing.assert_allclose(slopes[4], difference[4], rtol=1e-4)


@pytest.mark.long
def test_reverse_mode_under_vmap_and_a_bad_lane_spoils_nothing(model, nodes):
    alphas = jnp.array([1e-9, 2.0, jnp.nan])  # there is no proper fixed point at the first, and none at the last
    weights, start = jnp.array([1.0, 1e-3, 1.0, 0.0, 30.0, 30.0]), state(CASES[0])

    def lane(lam, alpha):
        fp = ta.solve(eqx.tree_at(lambda m: m.lam, model, lam), alpha, "semantic", nodes, start=start, settings=FEW)
        return numbers_of(fp.replicates).mean(0), fp.status

    def total(lam):
        values, status = jax.vmap(lane, (None, 0))(lam, alphas)
        good = status <= ta.Status.stalled
        return jnp.sum(jnp.where(good, (values @ weights) ** 2, 0.0)), (values, good)

    gradient, (values, good) = jax.jit(jax.grad(total, has_aux=True))(model.lam)
    assert good.tolist() == [False, True, False]
    arguments = BRANCHES["semantic"].free(model), start, nodes, FEW
    value, slope = forward((model, alphas[1]), direction(model, "lam"), *arguments)
    np.testing.assert_allclose(values[1], value.mean(0), rtol=1e-8)
    np.testing.assert_allclose(gradient, 2 * (value.mean(0) @ weights) * (slope.mean(0) @ weights), rtol=1e-6)


@with_tangent
def root(primals, tangents):
    """Solution z of z + z^3 = p; the body returns its tangent."""
    return derivative_along(lambda p: p, primals[1:], tangents[1:]) / (1 + 3 * primals[0] ** 2)


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_a_searched_value_keeps_its_derivative_in_loops(checkpoints):
    """In all modes, where a `jax.custom_jvp` would lose its rule, also for a value that a loop hands on."""

    def slope(p, dp, loop=lax.map):
        def block(scale, shift):
            target = scale * p + shift
            z = lax.stop_gradient(lax.fori_loop(0, 40, lambda _, z: z - (z + z**3 - target) / (1 + 3 * z**2), target))
            return root(z, target), jax.jvp(lambda p: root(z, scale * p + shift) ** 2, (p,), (dp,))[1]

        def replicate(scale):
            fn = partial(block, scale)
            roots, block_slopes = loop(jax.checkpoint(fn) if checkpoints else fn, jnp.array([0.625, 2.0, 10.0]))
            return jnp.sum(roots) * jnp.sum(block_slopes)

        return jnp.sum(loop(replicate, jnp.array([1.0, 2.0])))

    @jax.custom_jvp
    def fn(p):
        return p

    fn.defjvp(lambda primals, tangents: (primals[0], slope(*primals, *tangents)))

    @jax.jit
    @jax.vmap
    def derivatives(p):
        exact = jax.jacfwd(lambda p: slope(p, 1.0, lambda fn, xs: jax.vmap(fn)(xs)))
        seconds = exact, *(a(b(fn)) for a in MODES for b in MODES)
        return jnp.stack([jnp.stack(jax.jvp(second, (p,), (1.0,))) for second in seconds])

    expected, *results = derivatives(jnp.array([0.3, 0.1])).swapaxes(0, 1)
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-10)


class OneToken(ta.Model):
    """A layer of one token with one field, so that programs are small."""

    shape = (1, 1, 1)
    width: jax.Array

    def loss(self, Z, Y):
        return 0.5 * jnp.sum((jnp.tanh(self.width * Z) - Y) ** 2)

    def law(self):
        unit = jnp.ones((1, 1, 1))
        return ta.SpectralLaw(unit[0, 0], unit[0], unit, unit, 0.3 * unit)


class Tilted(OneToken):
    """A layer with unequal wells at -1 and 1: the minimiser jumps by 2 V / (1 + V), where h = width V."""

    def loss(self, Z, Y):
        return jnp.sum(0.5 * (jnp.sqrt(Z**2 + 1e-8) - 1) ** 2 + self.width * Z)


class Descending(type(ta.Sobol(16).rule(ta.DotProduct()).stack)):
    """Nodes at the minimum that a descent from the field finds: a search that compiles quickly."""

    def search(self, model, x, block):
        h, y = fields(model, x, block.student, block.teacher)
        z, _, done = prox.descend(ProxProblem(model, x.V, y), h, h, 1e-10)
        return prox.Prox(z, done, z, jnp.full(z.shape[-1], jnp.inf))


def test_second_derivatives_in_all_modes():
    """Second derivatives of training loss, q and theta of a moving state equal central differences, on two blocks."""
    model = OneToken(lam=jnp.asarray(0.1), width=jnp.asarray(0.7))
    nodes = ta.Sobol(2**5, replicates=1, block=2**4).rule(model).replicate(0)
    replicate, x = Descending(**vars(nodes)), overlaps_of(0.6, 1.3, 0.5, tokens=1)

    def setting(p):
        return eqx.tree_at(lambda m: (m.width, m.lam), model, (p, 0.2 * p**2)), 2 * p

    @jax.jit
    def first(p):
        point, direction = jax.jvp(setting, (p,), (jnp.ones(()),))
        moving = jax.tree.map(lambda a: a * p**0.5, x)  # any motion of the state will do
        partials = Equations(*point, replicate, BRANCHES["semantic"].free(model)).derivatives(moving)
        slopes = jax.tree.map(lambda a: a @ ravel_pytree(direction)[0], partials)
        return jnp.stack([slopes["train_loss"], slopes["overlaps"].q[0, 0, 0], slopes["overlaps"].theta[0, 0, 0]])

    p, step = model.width, 1e-4
    difference = (first(p + step) - first(p - step)) / (2 * step)
    for mode in MODES:
        np.testing.assert_allclose(jax.jit(mode(first))(p), difference, rtol=1e-5)  # differences are right to 2e-6


def test_second_derivative_of_an_average_over_jumps():
    """Second derivatives of the means of z and z^2 on lines equal those of the exact means over the two sides."""
    model = Tilted(lam=jnp.asarray(0.1), width=jnp.asarray(0.2))
    replicate = ta.Lines(lines=2, points=24, replicates=1).rule(model).replicate(0)
    block = jax.tree.map(lambda a: a[0], replicate.blocks())

    def setting(p):
        tilt, q, V, m = p
        x = ta.Overlaps(q.reshape(1, 1, 1), V.reshape(1, 1, 1), jnp.zeros((1, 1, 1)), m.reshape(1, 1))
        return eqx.tree_at(lambda m: m.width, model, tilt), x

    def exact(p):
        """Means of z and z^2: z = (h - V tilt + V sign(h - V tilt)) / (1 + V), h normal of mean m and variance q."""
        tilt, q, V, m = p
        mean = m - V * tilt
        share, density = jax.scipy.stats.norm.cdf(mean / q**0.5), jax.scipy.stats.norm.pdf(mean / q**0.5)
        size = mean * (2 * share - 1) + 2 * q**0.5 * density  # E |h - V tilt|
        return jnp.stack([mean + V * (2 * share - 1), (q + mean**2 + 2 * V * size + V**2) / (1 + V)]) / (1 + V)

    def on_lines(p):
        points = points_in(*setting(p), replicate, block)
        return jnp.stack([jnp.sum(points.weight * points.z[0, 0] ** k) for k in (1, 2)])

    p = jnp.array([0.2, 0.4, 0.8, 0.1])

    @jax.jit
    def derivatives(p):
        return [(fn(p), jax.jacfwd(fn)(p), jax.hessian(fn)(p)) for fn in (on_lines, exact)]

    for result, expected in zip(*derivatives(p), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("modes", [(a, b) for a in MODES for b in MODES], ids=["ff", "fr", "rf", "rr"])
def test_second_derivative(model, modes):
    """Second derivatives of a solve in sigma and alpha equal differences of first derivatives."""
    nodes, start = ta.Lines(5, replicates=1).rule(model), state(CASES[0])
    arguments = BRANCHES["semantic"].free(model), start, nodes, TIGHT

    def loss(numbers):
        changed_model = eqx.tree_at(lambda m: m.sigma, model, numbers[0])
        return ta.solve(changed_model, numbers[1], "semantic", nodes, start=start, settings=TIGHT).train_loss

    second = jax.jit(modes[0](modes[1](loss)))(jnp.array([model.sigma, 2.0]))
    directions = direction(model, "sigma"), direction(model, alpha=1.0)
    for outer, step, row in zip(directions, (2e-3, 0.02), second, strict=True):
        points = [moved((model, jnp.array(2.0)), outer, s * step) for s in (1, -1)]
        for inner, value in zip(directions, row, strict=True):
            up, down = (forward(point, inner, *arguments)[1][0, 4] for point in points)
            np.testing.assert_allclose(value, (up - down) / (2 * step), rtol=1e-2)


@pytest.mark.long
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
