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


class Classes(ta.DotProduct):
    """A layer of two classes of tokens with means, whose covariances have two atoms."""

    def law(self):
        root = np.random.default_rng(0).standard_normal((2, 5, 7))
        second = jnp.asarray(root @ np.swapaxes(root, 1, 2) / 7)  # of two encodings, two means and the teacher
        return ta.SpectralLaw(
            jnp.array([0.4, 0.6]), jnp.array([[0.3, 0.5], [0.9, 0.2]]), second[:, :4, :4], second[:, 4:, 4:],
            second[:, :4, 4:], sentences=ta.TokenClassMixture.of({(0, 0): 0.5, (1, 1): 0.3, (0, 1): 0.2}),
        )  # fmt: skip


def test_growths_of_classes_of_tokens():
    """Theta and the overlaps with the means of the classes grow together, m of the encodings grows by itself.

    The field of a weight is linear in the conjugates, so their response is that of the ridge: Lam^{-1} times the second
    moments of what multiplies them, gamma_s pi and the projections of the means.
    """
    model, rng, alpha, r, S = Classes(rank=2), np.random.default_rng(1), 1.7, 2, 2
    law, roots = model.law(), rng.standard_normal((2, S, r, r))
    q, V = (0.1 * a @ np.swapaxes(a, 1, 2) for a in roots)
    theta, m = rng.standard_normal((S, r, 1)), rng.standard_normal((4, r))
    hats = ta.results.Conjugates(*map(jnp.asarray, (q, V, theta, m)))
    g, gy = (a + a.T for a in (rng.standard_normal((4, 4)), rng.standard_normal((8, 8))))
    sums = {"g_score": jnp.asarray(g), "gy_score": jnp.asarray(gy)}
    to_theta, to_m, rho = np.zeros((S, r, 2, S, r, 2)), np.zeros((2, r, 2, r)), np.zeros(S)
    for share, gamma, tau, pi, cross in zip(law.weights, law.gamma, law.tau, law.pi, law.cross, strict=True):
        response = np.linalg.inv(0.01 * np.eye(r) + np.einsum("s,sab->ab", gamma, V))
        factors = np.block([[np.outer(gamma, gamma) * pi, gamma[:, None] * cross[2:, 0]],
                            [(gamma[:, None] * cross[2:, 0]).T, tau[2:, 2:]]]).reshape(2, S, 2, S)  # fmt: skip
        to_theta += share * np.einsum("jsku,ab->sajubk", factors, response)
        to_m += share * np.einsum("lk,ab->lakb", tau[:2, :2], response)
        rho += share * gamma * pi[0, 0]
    spread = np.zeros((S, r, 2, S, r, 2))
    for s in range(S):
        spread[s, :, 0, s, :, 0] = V[s] / rho[s]
    expected = [np.linalg.eigvals(P @ M).real.max() for P, M in (
        (to_theta.reshape(8, 8), alpha * gy + spread.reshape(8, 8)), (to_m.reshape(4, 4), alpha * g))]  # fmt: skip
    growths = observables.growths(model, jnp.asarray(alpha), hats, sums)
    np.testing.assert_allclose(growths, expected, rtol=1e-9)


@pytest.mark.parametrize(("kind", "tokens", "share"), [(1, [1, 1], 0.3), (2, [0, 1], 0.2)])
def test_moments_of_growths_of_one_kind_of_sentences(kind, tokens, share):
    """The sums of a kind are those of its tokens, added up by class, with the share of the kind in the weights."""
    rng, N, base = np.random.default_rng(2), 5, Classes()
    law = base.law()
    model = base.condition_on(jnp.eye(3)[kind])
    q, V, theta = np.array([0.9, 1.3]), np.array([2.0, 3.0]), np.array([0.1, -0.2])
    m = rng.standard_normal(4)
    x = ta.Overlaps(*(jnp.asarray(a).reshape(2, 1, 1) for a in (q, V, theta)), jnp.asarray(m)[:, None])
    student, z, teacher = (jnp.asarray(a) for a in rng.standard_normal((3, 2, 1, N)))
    weight = jnp.asarray(rng.random(N))
    points = Points(student, teacher, weight, z, weight > 0, weight, Jumps(weight, z))
    sums = observables.growth_moments(model, x, points)
    weights, gamma = np.asarray(law.weights), np.asarray(law.gamma)
    rho = np.einsum("n,ns,n->s", weights, gamma, law.pi[:, 0, 0])
    mean = np.einsum("n,ns->s", weights, law.cross[:, 2:, 0])  # of the teacher's fields
    assert np.all(np.abs(mean) > 1e-3)
    m_tokens, rho, q, V, theta = m[:2] + m[2:][tokens], *(a[tokens] for a in (rho, q, V, theta))
    root = np.sqrt(q - theta**2 / rho)
    u = np.asarray(teacher)[:, 0] / np.sqrt(rho)[:, None]  # rho^{-1} (y - mean)
    h = m_tokens[:, None] + theta[:, None] * u + root[:, None] * np.asarray(student)[:, 0]
    g, score = (np.asarray(z)[:, 0] - h) / V[:, None], np.asarray(student)[:, 0] / root[:, None]
    w = share * np.asarray(weight)
    np.testing.assert_allclose(sums["g_score"], (w * g) @ score.T, rtol=1e-9)
    factors = np.stack([u, np.ones_like(u)], 1)  # of theta, and of the overlap with the mean of the class
    classes = np.eye(2)[tokens]
    gy, score_y = (np.einsum("ls,ljN->sjN", classes, a[:, None] * factors).reshape(4, N) for a in (g, score))
    np.testing.assert_allclose(sums["gy_score"], (w * gy) @ score_y.T, rtol=1e-9)


@pytest.mark.parametrize("degenerate", [False, True])
def test_the_largest_eigenvalue_of_a_product(degenerate):
    """P S has the derivative l (dP S + P dS) r; directions in the null space of P do not count."""
    rng = np.random.default_rng(3)
    root, S, dP, dS = rng.standard_normal((4, 3, 3))
    root = root * (np.array([1.0, 1.0, 0.0]) if degenerate else 1.0)
    P, S, dP, dS = root @ root.T, S + S.T, root @ (dP + dP.T) @ root.T, dS + dS.T

    def exact(t):
        return np.linalg.eigvals((P + t * dP) @ (S + t * dS)).real.max()

    fn = observables.largest_eigenvalue
    value, slope = jax.jvp(lambda t: fn(P + t * dP, S + t * dS), (0.0,), (1.0,))
    np.testing.assert_allclose(value, exact(0.0), rtol=1e-9)
    np.testing.assert_allclose(slope, (exact(1e-5) - exact(-1e-5)) / 2e-5, rtol=1e-5)
    skew = np.array([[0, 1.0, 0], [-1.0, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(fn(jnp.asarray(P), jnp.asarray(S + skew)), value, rtol=1e-9)  # the symmetric part counts
    negative = -np.eye(3)
    assert float(fn(jnp.asarray(np.diag([1.0, 2.0, 0.0])), jnp.asarray(negative))) == pytest.approx(-1.0)
    assert float(fn(jnp.eye(3), jnp.zeros((3, 3)))) == 0


def test_a_gap_and_a_target_are_asked_for(model, nodes):
    class WithoutTarget(ta.DotProduct):
        target = ta.Model.target

    with pytest.raises(ta.InputError, match="model must have a method `target"):
        gen_error_linear(WithoutTarget(), nodes)
    assert np.isnan(gen_error_linear_in(WithoutTarget(), nodes.replicate(0)))
    for gap in (0.0, -1.0):
        with pytest.raises(ta.InputError, match="gap must be positive"):
            second_minimum_share(model, state(CASES[0]), nodes, gap)
