"""Predictions of a state, each checked by a second route."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest
from cases import CASES, state
from channels import NOISE, Noisy, model_of

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import prox
from tiedattn_jax.averages.rules import Jumps, Points, Rule, fields
from tiedattn_jax.model.overlaps import BRANCHES, Coordinates
from tiedattn_jax.theory import observables
from tiedattn_jax.theory.equations import Equations
from tiedattn_jax.theory.observables import (
    gen_error,
    gen_error_in,
    gen_error_linear,
    gen_error_linear_in,
    growths_in,
    second_minimum_share,
)
from tiedattn_jax.theory.potentials import channel, points_in
from tiedattn_jax.theory.solve import branch_start

pytestmark = pytest.mark.usefixtures("fast_compilation")


def test_errors_against_plain_monte_carlo(model, nodes, solved):
    x = state(CASES[0])
    draws = np.random.default_rng(0).standard_normal((2, 2, 1, 100_000))
    h, y = fields(model, x, *map(jnp.asarray, draws))
    losses = jax.vmap(model.loss, in_axes=-1)(h, y)
    error = gen_error(model, x, nodes)
    assert abs(error.value - losses.mean()) < 4 * losses.std() / 100_000**0.5 + 3 * error.stderr
    T = jax.vmap(model.target, in_axes=-1)(y)
    spread = 0.5 * 0.25 * jnp.sum((T - T.mean(0)) ** 2, (1, 2))
    linear = gen_error_linear(model, nodes)
    assert abs(linear.value - spread.mean()) < 4 * spread.std() / 100_000**0.5 + 3 * linear.stderr
    fp = solved(2.0, "semantic")
    np.testing.assert_allclose(fp.gen_error_linear, linear.value, rtol=1e-10)
    np.testing.assert_allclose(fp.gen_error, gen_error(model, fp.overlaps, nodes).value, rtol=1e-3)


def test_replicon_is_the_mean_square_of_the_response(model, nodes, solved):
    """The replicon of one column and equal tokens is alpha E ||dz/dh - I||^2, here with central differences."""
    fp = solved(2.0, "semantic")
    replicate = nodes.replicate(0)
    x = jax.tree.map(lambda a: a[0], fp.replicates.overlaps)
    h, y = fields(model, x, replicate.student[..., :2048], replicate.teacher[..., :2048])
    step, columns = 1e-4, []
    run = jax.jit(lambda h: prox(ProxProblem(model, x.V, y), h).z)
    for k in range(2):
        e = jnp.zeros_like(h).at[k].set(step)
        columns.append((run(h + e) - run(h - e))[:, 0] / (2 * step))
    G = jnp.stack(columns, 1) - jnp.eye(2)[..., None]
    expected = 2.0 * jnp.mean(jnp.sum(G**2, (0, 1)))
    np.testing.assert_allclose(fp.replicates.diagnostics.replicon[0], expected, rtol=0.03)


def test_the_replicon_is_iterated_until_it_is_the_largest_eigenvalue():
    """Tokens that differ: the start of the iteration is then no eigenvector of the map."""
    positive_map = np.array([[1.0, 0.1], [0.3, 0.7]])
    radius = observables._radius(jnp.asarray(positive_map), jnp.ones(2))
    np.testing.assert_allclose(radius, np.linalg.eigvals(positive_map).max(), rtol=1e-10)


@pytest.mark.parametrize("rank", [1, 2])
def test_moments_of_growths_at_given_nodes(rank):
    """The sums that growths need are E[g s^T] and E[g y (s y)^T], here in numpy.

    g = V^{-1} (z - h), and s = Sigma^{-1} (h - mean) with the law of the fields h given those of the teacher, y.
    """
    rng, N, model = np.random.default_rng(0), 7, ta.DotProduct(rank=rank, teacher=0.7)
    root, response = rng.standard_normal((2, 2, rank, rank)) + 2 * np.eye(rank)
    x = ta.Overlaps(*(jnp.asarray(a @ np.swapaxes(a, 1, 2)) for a in (root, response)),
                    *(jnp.asarray(0.1 * rng.standard_normal((2, rank, *shape))) for shape in ((1,), ())))  # fmt: skip
    student, z = (jnp.asarray(a) for a in rng.standard_normal((2, 2, rank, N)))
    teacher, weight = jnp.asarray(rng.standard_normal((2, 1, N))), jnp.asarray(rng.random(N))
    points = Points(student, teacher, weight, z, weight > 0, weight, Jumps(weight, z))
    sums = observables.growth_moments(model, x, points)
    h, y = map(np.asarray, fields(model, x, student, teacher))
    g, s, u = np.zeros_like(h), np.zeros_like(h), np.zeros_like(y)
    for token in range(2):
        q, V, theta, m, rho = (np.asarray(a[token]) for a in (x.q, x.V, x.theta, x.m, model.rho))
        u[token] = np.linalg.solve(rho, y[token])
        g[token] = np.linalg.solve(V, z[token] - h[token])
        s[token] = np.linalg.solve(q - theta @ theta.T / rho, h[token] - m[:, None] - theta @ u[token])
    pairs = {"g_score": (g, s), "gy_score": (g * u, s * u)}
    for name, (a, b) in pairs.items():
        expected = (a.reshape(-1, N) * np.asarray(weight)) @ b.reshape(-1, N).T
        np.testing.assert_allclose(sums[name], expected, rtol=1e-9, atol=1e-12)


def test_growths_are_eigenvalues_of_the_map(model):
    """Growths are eigenvalues of the map's Jacobian on the uninformed state, where theta and m decouple."""
    nodes = ta.Lines(9, replicates=1, even=True).rule(model)
    alpha, free = jnp.array(1.0), BRANCHES[None].free(model)
    fp = ta.solve(model, alpha, "uninformed", nodes, start=BRANCHES["uninformed"].start(model))
    v = Coordinates(model, free).pack(fp.overlaps)
    DF = np.asarray(Equations(model, alpha, nodes.replicate(0), free).answer(v).jacobian)
    for part, growth in ((slice(4, 6), fp.diagnostics.growth_theta), (slice(6, 8), fp.diagnostics.growth_m)):
        np.testing.assert_allclose(np.linalg.eigvals(DF[part, part]).real.max(), growth, rtol=3e-3)


@jax.jit
def moved_growths(s, x, alpha, replicate):
    """Growths with sigma, q, V and alpha multiplied by 1 + s, where s has shape (4,)."""
    model = ta.DotProduct(sigma=0.5 * (1 + s[0]))
    overlaps = ta.Overlaps(x.q * (1 + s[1]), x.V * (1 + s[2]), x.theta, x.m)
    return jnp.stack(growths_in(model, alpha * (1 + s[3]), overlaps, replicate, jnp.array([1.0, 0.0])))


growth_slopes = jax.jit(lambda *arguments: jax.jacfwd(moved_growths)(jnp.zeros(4), *arguments))


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=lambda c: f"{c.branch} {c.alpha}")
def test_derivatives_of_growths(model, case):
    arguments = state(case), jnp.asarray(case.alpha, float), ta.Lines(9, replicates=1).rule(model).replicate(0)
    slopes = growth_slopes(*arguments)
    for k in range(4):
        step = 2e-3 * jnp.eye(4)[k]
        difference = (moved_growths(step, *arguments) - moved_growths(-step, *arguments)) / 4e-3
        np.testing.assert_allclose(slopes[:, k], difference, rtol=5e-3, atol=5e-4)


def test_implicit_gradient_of_a_function_of_the_state(model):
    """The implicit gradient d (alpha V) / d omega along the semantic branch equals central differences of solves."""
    case, alpha, free = CASES[0], jnp.array(2.0), BRANCHES["semantic"].free(model)
    rule = ta.Lines(9, replicates=1, even=True).rule(model)
    settings = ta.Settings(tol=1e-9)

    def V(omega):
        changed_model = ta.DotProduct(omega=omega)
        return ta.solve(changed_model, alpha, "semantic", rule, start=state(case), settings=settings).overlaps

    x = V(0.3)
    gradient = jax.jit(lambda equations, x: equations.gradient(x, lambda m, a, x: a * x.V[0, 0, 0]))
    value, by_model, by_alpha = gradient(Equations(model, alpha, rule.replicate(0), free), x)
    np.testing.assert_allclose(value, 2 * x.V[0, 0, 0])
    slope = 2 * (V(0.301).V - V(0.299).V)[0, 0, 0] / 2e-3
    np.testing.assert_allclose(by_model.omega, slope, rtol=1e-3)
    assert np.isfinite(by_alpha)


def test_second_minima_below_a_gap(model, nodes):
    x, gap = state(CASES[4]), 3e-3
    points = jax.jit(points_in)(model, x, nodes.coarse, jax.tree.map(lambda a: a[0], nodes.coarse.blocks()))
    expected = (points.gap < gap) @ points.weight
    rule = Rule(jax.tree.map(lambda a: a[None], nodes.coarse), nodes.coarse)
    share = second_minimum_share(model, x, rule, gap).value
    np.testing.assert_allclose(share, expected, rtol=1e-10)
    assert 0.003 < share < 0.9 * second_minimum_share(model, x, rule, 2 * gap).value
    point = made.fixed_point(CASES[4])
    point = eqx.tree_at(lambda p: p.replicates.overlaps, point, jax.tree.map(lambda a: jnp.stack([a] * 4), x))
    assert point.second_minimum_share(rule, gap).value == pytest.approx(float(share), rel=1e-12)


def test_the_baseline_is_weighted_by_the_traces(model):
    """The baseline weights tokens by their traces and nodes by their weights, if unequal, and does not see blocks."""

    class Unequal(ta.DotProduct):
        trace = property(lambda self: jnp.array([0.1, 0.2]))

    rule = ta.Lines(5, replicates=1).rule(model)
    replicate = rule.replicate(0)
    blocks = [jax.tree.map(lambda a, k=k: a[k], replicate.blocks()) for k in range(len(replicate.blocks()[0]))]
    parts = [replicate.quadrature(block)[1:] for block in blocks]
    teacher, weight = (jnp.concatenate(a, -1) for a in zip(*parts, strict=True))
    T = jax.vmap(model.target, in_axes=-1)(0.5 * teacher)
    mean, square = (jnp.tensordot(weight, a, 1) for a in (T, T**2))
    expected = 0.5 * jnp.sum((square - mean**2) * jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(gen_error_linear(Unequal(**vars(model)), rule).value, expected, rtol=1e-8)
    whole, split = (ta.Sobol(2**10, replicates=1, block=size).rule(model) for size in (2**10, 2**8))
    np.testing.assert_allclose(*(gen_error_linear(model, nodes).value for nodes in (whole, split)), rtol=1e-10)


def test_noise_on_the_fields_of_the_teacher_is_a_teacher_of_larger_fields():
    """Noise on the teacher's fields acts as larger fields: the theory knows the teacher by its fields' law alone."""
    x, equivalent = branch_start(ta.DotProduct(), None), ta.DotProduct(teacher=1 + NOISE**2 / 0.25)
    x = dataclasses.replace(x, q=0.4 * x.q, V=0.8 * x.V, theta=0.7 * x.theta)

    def numbers(model):
        def parts(r):
            return jnp.stack([channel(model, x, r), gen_error_in(model, x, r), gen_error_linear_in(model, r)])

        return ta.Sobol(2**12, replicates=8).rule(model).each(parts)

    result, expected = numbers(model_of(Noisy)), numbers(equivalent)
    bar = np.hypot(result.std(0), expected.std(0)) / 7**0.5
    assert np.all(np.abs(result.mean(0) - expected.mean(0)) < 3 * bar) and np.all(bar < 2e-3 * expected.mean(0))
    assert np.all(NOISE**2 * expected.mean(0) > 30 * bar)  # the noise changes the numbers by more than their error bars
