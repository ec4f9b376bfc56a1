"""Predictions of a state, each checked by a second route."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, state
from channels import NOISE, Noisy, model_of
from problems import rule, solved

import tiedattn_jax as ta
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import prox
from tiedattn_jax.averages.rules import Jumps, Points, Rule, fields
from tiedattn_jax.model.overlaps import BRANCHES, Coordinates
from tiedattn_jax.theory import observables as obs
from tiedattn_jax.theory.equations import Equations
from tiedattn_jax.theory.potentials import channel, points_in
from tiedattn_jax.theory.setting import branch_start

growth_moments = jax.jit(obs.growth_moments)
largest = jax.jit(obs.largest_eigenvalue)


def test_errors_against_plain_monte_carlo(model):
    x, nodes = state(CASES[0]), rule("lines")
    draws = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 1, 100_000)))
    h, y = map(np.asarray, jax.jit(fields)(model, x, *draws))

    def attention(fields):
        weights = np.exp(np.einsum("kan,lan->kln", fields, fields))
        return weights / weights.sum(1, keepdims=True)

    T = 0.7 * attention(y) + 0.3 * np.array([[0.6, 0.4], [0.4, 0.6]])[..., None]
    losses = 0.5 * 0.25 * np.sum((attention(h) - T) ** 2, (0, 1))
    spread = 0.5 * 0.25 * np.sum((T - T.mean(-1, keepdims=True)) ** 2, (0, 1))
    linear = obs.gen_error_linear(model, nodes)
    for average, values in ((obs.gen_error(model, x, nodes), losses), (linear, spread)):
        assert abs(average.value - values.mean()) < 4 * values.std() / 100_000**0.5 + 3 * average.stderr
    fp = solved("standard", name="lines")
    np.testing.assert_allclose(fp.gen_error_linear, linear.value, rtol=1e-10)
    np.testing.assert_allclose(fp.gen_error, obs.gen_error(model, fp.overlaps, nodes).value, rtol=1e-3)


def test_replicon_is_the_mean_square_of_the_response(model):
    """The replicon of one column and equal tokens is alpha E ||dz/dh - I||^2, here with central differences."""
    fp, replicate = solved("standard"), rule("points").replicate(0)
    x = jax.tree.map(lambda a: a[0], fp.replicates.overlaps)
    h, y = fields(model, x, replicate.student, replicate.teacher)
    run, step = jax.jit(lambda h: prox(ProxProblem(model, x.V, y), h).z), 1e-4
    shifts = step * np.eye(2)[:, :, None, None]
    columns = [np.asarray(run(h + e) - run(h - e))[:, 0] / (2 * step) for e in shifts]
    G = np.stack(columns, 1) - np.eye(2)[..., None]
    expected = 2.0 * np.mean(np.sum(G**2, (0, 1)))
    np.testing.assert_allclose(fp.replicates.diagnostics.replicon[0], expected, rtol=0.03)


def test_the_replicon_is_iterated_until_it_is_the_largest_eigenvalue():
    """Tokens that differ: the start of the iteration is then no eigenvector of the map."""
    positive_map = np.array([[1.0, 0.1], [0.3, 0.7]])
    radius = jax.jit(obs._radius)(positive_map, np.ones(2))
    np.testing.assert_allclose(radius, np.linalg.eigvals(positive_map).max(), rtol=1e-10)


def points_of(rng, r, N):
    """Points with random numbers."""
    student, z = map(jnp.asarray, rng.standard_normal((2, 2, r, N)))
    teacher, weight = jnp.asarray(rng.standard_normal((2, 1, N))), jnp.asarray(rng.random(N))
    return Points(student, teacher, weight, z, weight > 0, weight, Jumps(weight, z))


@pytest.mark.parametrize("rank", [1, 2])
def test_moments_of_growths_at_given_nodes(rank):
    """The sums that growths need are E[g s^T] and E[g y (s y)^T], here in numpy.

    g = V^{-1} (z - h), and s = Sigma^{-1} (h - mean) with the law of the fields h given those of the teacher, y.
    """
    rng, N, model = np.random.default_rng(0), 7, ta.DotProduct(rank=rank, teacher=0.7)
    root, response = rng.standard_normal((2, 2, rank, rank)) + 2 * np.eye(rank)
    x = ta.Overlaps(*(jnp.asarray(a @ np.swapaxes(a, 1, 2)) for a in (root, response)),
                    *(jnp.asarray(0.1 * rng.standard_normal((2, rank, *shape))) for shape in ((1,), ())))  # fmt: skip
    points = points_of(rng, rank, N)
    teacher, z, weight = map(np.asarray, (points.teacher, points.z, points.weight))
    sums = growth_moments(model, x, points)
    h = np.asarray(jax.jit(fields)(model, x, points.student, points.teacher)[0])
    rho = 0.25 * 0.7
    u = teacher / np.sqrt(rho)  # rho^{-1} y
    g, s = np.zeros_like(h), np.zeros_like(h)
    for token in range(2):
        q, V, theta, m = (np.asarray(a[token]) for a in (x.q, x.V, x.theta, x.m))
        g[token] = np.linalg.solve(V, z[token] - h[token])
        s[token] = np.linalg.solve(q - theta @ theta.T / rho, h[token] - m[:, None] - theta @ u[token])
    for name, (a, b) in {"g_score": (g, s), "gy_score": (g * u, s * u)}.items():
        expected = (a.reshape(-1, N) * weight) @ b.reshape(-1, N).T
        np.testing.assert_allclose(sums[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.full
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
    return jnp.stack(obs.growths_in(model, alpha * (1 + s[3]), overlaps, replicate, jnp.array([1.0, 0.0])))


growth_slopes = jax.jit(lambda *arguments: jax.jacfwd(moved_growths)(jnp.zeros(4), *arguments))


@pytest.mark.full
@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=lambda c: f"{c.branch} {c.alpha}")
def test_derivatives_of_growths(model, case):
    arguments = state(case), jnp.asarray(case.alpha, float), ta.Lines(9, replicates=1).rule(model).replicate(0)
    slopes = growth_slopes(*arguments)
    for k in range(4):
        step = 2e-3 * jnp.eye(4)[k]
        difference = (moved_growths(step, *arguments) - moved_growths(-step, *arguments)) / 4e-3
        np.testing.assert_allclose(slopes[:, k], difference, rtol=5e-3, atol=5e-4)


def test_second_minima_below_a_gap(model):
    """A share is that of the nodes with a smaller gap, and grows with the gap; all gaps give the diagnostic."""
    point, x, nodes = solved("standard", alpha=1.0), state(CASES[4]), rule("points")
    shares = [float(obs.second_minimum_share(model, x, nodes, gap).value) for gap in (3e-3, 6e-3, 1e3)]
    assert 0.003 < shares[0] < 0.9 * shares[1] < shares[2]
    replicates = [nodes.replicate(k) for k in (0, 1)]
    found = [jax.jit(points_in)(model, x, r, jax.tree.map(lambda a: a[0], r.blocks())) for r in replicates]
    expected = np.mean([(np.asarray(p.gap) < 3e-3) @ np.asarray(p.weight) for p in found])
    np.testing.assert_allclose(shares[0], expected, rtol=1e-10)
    share = point.second_minimum_share(nodes, 1e3).value
    np.testing.assert_allclose(share, np.mean(point.replicates.diagnostics.second_minimum), atol=5e-3)


def test_the_baseline_is_weighted_by_the_traces(model):
    """The baseline weights tokens by their traces and nodes by their weights, if unequal, and does not see blocks."""

    class Unequal(ta.DotProduct):
        trace = property(lambda self: jnp.array([0.1, 0.2]))

    replicate = rule("lines").replicate(0)
    teacher, weight = jax.jit(lambda r: jax.vmap(r.quadrature)(r.blocks())[1:])(replicate)
    T = np.asarray(jax.jit(jax.vmap(jax.vmap(model.target, -1)))(0.5 * np.asarray(teacher)))
    T, weight = T.reshape(-1, 2, 2), np.ravel(weight)
    mean, square = (np.tensordot(weight, a, 1) for a in (T, T**2))
    expected = 0.5 * np.sum((square - mean**2) * np.array([0.1, 0.2]))
    one = Rule(jax.tree.map(lambda a: a[:1], rule("lines").stack), rule("lines").coarse)
    np.testing.assert_allclose(obs.gen_error_linear(Unequal(**vars(model)), one).value, expected, rtol=1e-8)
    whole, split = (ta.Sobol(2**10, replicates=1, block=size).rule(model) for size in (2**10, 2**8))
    np.testing.assert_allclose(*(obs.gen_error_linear(model, nodes).value for nodes in (whole, split)), rtol=1e-10)


@pytest.mark.full  # a model of its own
def test_noise_on_the_fields_of_the_teacher_is_a_teacher_of_larger_fields():
    """Noise on the teacher's fields acts as larger fields: the theory knows the teacher by its fields' law alone."""
    x, equivalent = branch_start(ta.DotProduct(), None), ta.DotProduct(teacher=1 + NOISE**2 / 0.25)
    x = dataclasses.replace(x, q=0.4 * x.q, V=0.8 * x.V, theta=0.7 * x.theta)

    def numbers(model):
        def parts(r):
            return jnp.stack([channel(model, x, r), obs.gen_error_in(model, x, r), obs.gen_error_linear_in(model, r)])

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
    found = jax.jit(obs.growths)(model, alpha, hats, sums)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(("kind", "tokens", "share"), [(1, [1, 1], 0.3), (2, [0, 1], 0.2)])
def test_moments_of_growths_of_one_kind_of_sentences(kind, tokens, share):
    """The sums of a kind are those of its tokens, added up by class, with the share of the kind in the weights."""
    rng, N, base = np.random.default_rng(2), 5, Classes()
    law, model = base.law(), base.condition_on(jnp.eye(3)[kind])
    q, V, theta, m = np.array([0.9, 1.3]), np.array([2.0, 3.0]), np.array([0.1, -0.2]), rng.standard_normal(4)
    x = ta.Overlaps(*(jnp.asarray(a).reshape(2, 1, 1) for a in (q, V, theta)), jnp.asarray(m)[:, None])
    points = points_of(rng, 1, N)
    student, teacher, z, weight = map(np.asarray, (points.student, points.teacher, points.z, points.weight))
    sums = growth_moments(model, x, points)
    weights, gamma, pi, cross = (np.asarray(a) for a in (law.weights, law.gamma, law.pi, law.cross))
    assert np.all(np.abs(np.einsum("n,ns->s", weights, cross[:, 2:, 0])) > 1e-3)  # means of the teacher's fields
    rho = np.einsum("n,ns,n->s", weights, gamma, pi[:, 0, 0])
    m_tokens, rho, q, V, theta = m[:2] + m[2:][tokens], *(a[tokens] for a in (rho, q, V, theta))
    root = np.sqrt(q - theta**2 / rho)
    u = teacher[:, 0] / np.sqrt(rho)[:, None]  # rho^{-1} (y - mean)
    h = m_tokens[:, None] + theta[:, None] * u + root[:, None] * student[:, 0]
    g, score, w = (z[:, 0] - h) / V[:, None], student[:, 0] / root[:, None], share * weight
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

    value, slope = jax.jit(lambda pair, move: jax.jvp(obs.largest_eigenvalue, pair, move))((P, S), (dP, dS))
    np.testing.assert_allclose(value, exact(0.0), rtol=1e-9)
    np.testing.assert_allclose(slope, (exact(1e-5) - exact(-1e-5)) / 2e-5, rtol=1e-5)
    skew = np.array([[0, 1.0, 0], [-1.0, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(largest(P, S + skew), value, rtol=1e-9)  # the symmetric part counts
    assert float(largest(np.diag([1.0, 2.0, 0.0]), -np.eye(3))) == pytest.approx(-1.0)
    assert float(largest(np.eye(3), np.zeros((3, 3)))) == 0
    assert float(largest(np.zeros((3, 3)), -np.eye(3))) == 0  # as for m without encodings


def test_a_target_is_asked_for():
    class WithoutTarget(ta.DotProduct):
        target = ta.Model.target

    with pytest.raises(ta.InputError, match="model must have a method `target"):
        obs.gen_error_linear(WithoutTarget(), rule("points"))
    assert np.isnan(obs.gen_error_linear_in(WithoutTarget(), rule("points").replicate(0)))
