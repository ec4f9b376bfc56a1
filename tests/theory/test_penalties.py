"""The theory of penalties on the weights besides the ridge."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm
from made import numbers_of, overlaps_of, states_near
from penalties import Quadratic, sparse

import tiedattn_jax as ta
from tiedattn_jax.model.overlaps import BRANCHES, Coordinates
from tiedattn_jax.model.penalties import minimiser, minimiser_and_response
from tiedattn_jax.theory.observables import diagnose
from tiedattn_jax.theory.potentials import overlaps, prior, weight_fields, weight_law
from tiedattn_jax.theory.setting import branch_start


def conjugates_of(*arrays):
    return ta.results.Conjugates(*(jnp.asarray(np.asarray(a, float)) for a in arrays))


TOKENS = np.ones((2, 1, 1))
HATS = conjugates_of(1.3e-4 * TOKENS, 0.024 * TOKENS, 0.011 * TOKENS, [[3e-3], [-2e-3]])
UNTIED = ta.UntiedDotProduct(tied_teacher=True, penalty=ta.L1(4e-3))
averages = jax.jit(lambda model, hats: (prior(model, hats), overlaps(model, hats)))


def hats_of(correlation, theta=(0.011, 0.006), m=(3e-3, 1e-3)):
    """Conjugates of two columns whose fields have this correlation, apart from what theta adds."""
    correlations, signs = np.array([[1.0, correlation], [correlation, 1.0]]), np.array([[1.0, -0.2], [-0.2, 1.0]])
    m = np.array([m, np.negative(m)])
    return conjugates_of(
        [1.3e-4 * correlations] * 2, [0.024 * correlations * signs] * 2, [np.array(theta)[:, None]] * 2, m
    )


def with_another(hats, m):
    """Add a column with independent fields and without a share in the teacher."""
    wider = [(0, 0), (0, 1), (0, 1)]
    q, V = (np.pad(a, wider) + np.diag([0.0, 0.0, a[0, 0, 0]]) for a in map(np.asarray, (hats.q, hats.V)))
    return conjugates_of(q, V, np.pad(hats.theta, [*wider[:2], (0, 0)]), np.c_[np.asarray(hats.m), m])


def columns_of(hats, k):
    return ta.results.Conjugates(hats.q[:, k, k], hats.V[:, k, k], hats.theta[:, k], hats.m[:, k])


def assert_close(results, expected, **tolerances):
    for a, b in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        np.testing.assert_allclose(a, b, **tolerances)


def exact_prior(model, hats):
    """The elastic net's prior for the dot product: a soft threshold of a Gaussian field of mean tau . mhat."""
    gamma, t = model.sigma**2, model.penalty.strength
    Lam, mean = model.lam + gamma * hats.V.sum(), model.encodings[:, 0] @ hats.m[:, 0]
    variance = gamma * hats.q.sum() + model.teacher[0, 0] * (gamma * hats.theta.sum()) ** 2
    s, sides = jnp.sqrt(variance), (mean - t, -mean - t)
    return sum((variance + a**2) * norm.cdf(a / s) + a * s * norm.pdf(a / s) for a in sides) / (2 * Lam)


@jax.jit
def slopes(model, hats):
    """Values and gradients in model and hats, and their derivatives along the hats, of `prior` and `exact_prior`."""
    gradients = [jax.value_and_grad(form, (0, 1)) for form in (prior, exact_prior)]
    return [jax.jvp(lambda h, g=g: g(model, h), (hats,), (hats,)) for g in gradients]


def made_sums():
    """Made-up averages over the channel for `diagnose`, of no particular state."""
    g, gy = np.random.default_rng(0).standard_normal((2, 2, 2))
    sums = dict.fromkeys(("response", "loss", "second", "unresolved"), jnp.asarray(0.1))
    sums |= {"g_score": g @ g.T, "gy_score": gy @ gy.T, "replicon": np.eye(2).reshape(2, 1, 1, 2, 1, 1)}
    return jax.tree.map(jnp.asarray, {**sums, "soft": np.full(2, 0.1), "slopes": np.full(4, 0.1)})


diagnosed = jax.jit(lambda model, hats: diagnose(model, jnp.asarray(2.0), overlaps(model, hats), hats, made_sums()))


@pytest.mark.parametrize("strength", [1e-3, 8e-3, 0.02])
def test_closed_form_of_the_elastic_net(strength):
    """Values, gradients and second derivatives equal the closed form; a fifth to nearly all of the weights are zero."""
    model = ta.DotProduct(penalty=ta.L1(strength))
    values, exact = slopes(model, HATS)
    assert_close(values, exact, rtol=1e-10, atol=1e-18)
    # The response of a weight is 1 / Lam or zero, so that the mean of its square is V / (gamma Lam).
    diagnostics, V = diagnosed(model, HATS), averages(model, HATS)[1].V[0, 0, 0]
    np.testing.assert_allclose(diagnostics.replicon, 2.0 * 2 * 0.25 * V / (0.01 + 0.25 * 0.048), rtol=1e-10)
    cost = -0.01 * exact[0][1][0].lam - strength * exact[0][1][0].penalty.strength
    np.testing.assert_allclose(diagnostics.train_loss_direct, 2.0 * 0.1 + cost, rtol=1e-12)


@pytest.mark.full
def test_single_precision():
    model = ta.DotProduct(penalty=ta.L1(8e-3))
    single = averages(*jax.tree.map(lambda a: a.astype(jnp.float32), (model, HATS)))
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(single))
    assert_close(single, averages(model, HATS), rtol=1e-4)


def test_ridge_as_a_penalty():
    """A quadratic penalty acts as a larger ridge in every prediction; an L1 penalty of strength zero does nothing."""
    ridge, no_penalty = ta.DotProduct(lam=0.014), ta.DotProduct(lam=0.014, penalty=ta.L1(0.0))
    quadratic = ta.DotProduct(lam=0.01, penalty=Quadratic(jnp.asarray(0.004)))
    ta.check(quadratic)
    expected, *results = ((averages(m, HATS), diagnosed(m, HATS)) for m in (ridge, quadratic, no_penalty))
    for result in results:
        assert_close(result, expected, rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("columns", [2, 3])
def test_a_quadratic_penalty_of_several_columns_is_a_ridge(columns):
    hats, kind, options = hats_of(0.5), ta.UntiedDotProduct, {"tied_teacher": True}
    if columns == 3:
        hats, kind, options = with_another(hats, [2e-3, -2e-3]), ta.DotProduct, {"rank": 3}
    ridge = averages(kind(lam=0.014, **options), hats)
    quadratic = averages(kind(lam=0.01, penalty=Quadratic(jnp.asarray(0.004)), **options), hats)
    for result, expected in zip(*map(jax.tree.leaves, (quadratic, ridge)), strict=True):
        tol = {"rtol": 1e-8} if columns == 2 else {"atol": 3e-6 * np.max(np.abs(expected)), "rtol": 1e-7}
        np.testing.assert_allclose(result, expected, **tol)


@pytest.mark.full
def test_columns_apart_are_weights_of_their_own():
    """Columns with independent fields behave as separate weights: one sees the teacher, the other one the encodings."""
    hats, single = hats_of(0.0, (0.011, 0.0), (0.0, 3e-3)), ta.DotProduct(penalty=ta.L1(4e-3))
    psi, joint = averages(UNTIED, hats)
    singles = [averages(single, columns_of(hats, slice(k, k + 1))) for k in range(2)]
    np.testing.assert_allclose(psi, sum(value for value, _ in singles), rtol=1e-10)
    for k, (_, expected) in enumerate(singles):
        part = columns_of(joint, slice(k, k + 1))
        assert_close((part.q, part.V), (expected.q, expected.V), rtol=1e-7)
        assert_close((part.theta, part.m), (expected.theta, expected.m), atol=1e-9)


@jax.jit
def weights(model, hats):
    """Shares of the nodes of the weights' fields, and the weights and their responses there."""
    Lam, *field = weight_law(model, hats)
    b, share = weight_fields(model.penalty, Lam, *field)
    return share, *minimiser_and_response(model.penalty, Lam[:, None], b)


slope_of_overlaps = jax.jit(lambda model, *pair: jax.jvp(lambda h: overlaps(model, h), *((a,) for a in pair))[1])


@pytest.mark.full
@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.98])
def test_averages_over_two_columns(correlation):
    """V is the mean response of a weight (Stein's identity), and the slopes of the overlaps equal differences.

    V is a second derivative of psi in the fields, and a first one of `prior` in the conjugates.
    """
    hats = hats_of(correlation)
    share, w, R = map(np.asarray, weights(UNTIED, hats))
    np.testing.assert_allclose(share.sum(), 1, rtol=1e-9)
    np.testing.assert_allclose(np.einsum("kn,knab->ab", share, R) * 0.25, averages(UNTIED, hats)[1].V[0], atol=1e-8)
    assert 0.05 < np.sum(share * np.all(w == 0, -1)) < np.sum(share * np.any(w == 0, -1)) < 0.95
    tangent = conjugates_of(*(f * np.asarray(a) for f, a in zip((1, 0.5, 0.3, 0), vars(hats).values(), strict=True)))
    slope = slope_of_overlaps(UNTIED, hats, tangent)
    up, down = (averages(UNTIED, jax.tree.map(lambda a, d, s=s: a + s * d, hats, tangent))[1] for s in (1e-4, -1e-4))
    assert_close(slope, jax.tree.map(lambda a, b: (a - b) / 2e-4, up, down), rtol=1e-5, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("correlation", [-0.9, 0.5])
def test_a_column_apart_of_three(correlation):
    """A third, independent column leaves the other two unchanged and acts as a single weight, in prior and overlaps."""
    pair = hats_of(correlation)
    hats = with_another(pair, [0.0, 0.0])
    parts = (3, hats), (2, pair), (1, columns_of(hats, slice(2, 3)))
    models = [(ta.DotProduct(rank=k, penalty=ta.L1(4e-3)), part) for k, part in parts]
    (psi, joint), (of_pair, a), (of_third, b) = (averages(*c) for c in models)
    np.testing.assert_allclose(psi, of_pair + of_third, rtol=1e-5)
    for result, of_two, of_one in ((joint.q, a.q, b.q), (joint.V, a.V, b.V)):
        expected = np.pad(of_two, [(0, 0), (0, 1), (0, 1)])
        expected[:, 2, 2] = of_one[:, 0, 0]
        np.testing.assert_allclose(result, expected, atol=1e-4 * np.max(expected))
    np.testing.assert_allclose(joint.theta, np.concatenate([a.theta, b.theta], 1), atol=1e-5)
    np.testing.assert_allclose(joint.m, np.concatenate([a.m, b.m], 1), atol=1e-5)


fields_of = jax.jit(lambda *law: weight_fields(ta.L1(4e-3), *law)[0])


@pytest.mark.parametrize(("correlation", "moves"), [(1e-17, False), (-1e-17, False), (-1e-6, True)])
def test_rounding_does_not_turn_the_lines(correlation, moves):
    """The lines follow the sign of correlations. That of independent columns is the sign of a rounding error."""
    Lam, mean, covariances = 0.01 * np.eye(3)[None], np.array([[3e-3, 1e-3, 2e-3]]), np.array([np.eye(3)] * 2)
    covariances[1, 0, 2] = covariances[1, 2, 0] = correlation
    independent, related = (np.asarray(fields_of(Lam, mean, 1e-4 * a[None])) for a in covariances)
    assert (np.max(np.abs(related - independent)) > 1e-3) == moves


@pytest.mark.full
def test_derivatives_of_three_columns():
    """Derivatives of overlaps in conjugates and strength, from second derivatives of psi, equal differences."""
    hats, model = with_another(hats_of(0.5), [2e-3, -2e-3]), ta.DotProduct(rank=3, penalty=ta.L1(4e-3))

    @jax.jit
    def value_at(s):
        """Overlaps, and their derivative in s."""

        def scaled(s):
            changed = eqx.tree_at(lambda m: m.penalty.strength, model, 4e-3 * (1 - 2 * s))
            return overlaps(changed, jax.tree.map(lambda a: (1 + s) * a, hats))

        return jax.jvp(scaled, (s,), (jnp.ones_like(s),))

    (_, slope), (above, _), (below, _) = (value_at(jnp.asarray(s)) for s in (0.0, 1e-3, -1e-3))
    for derivative, up, down in zip(*map(jax.tree.leaves, (slope, above, below)), strict=True):
        np.testing.assert_allclose(derivative, (up - down) / 2e-3, atol=1e-3 * np.max(np.abs(derivative)))


@pytest.mark.parametrize(("penalty", "turns"), [(None, 1), (ta.L1(0.01), 0)])
def test_columns_that_are_turned_have_another_penalty(penalty, turns):
    model = ta.DotProduct(rank=2, penalty=penalty)
    coordinates, x = Coordinates(model, BRANCHES["semantic"].free(model)), branch_start(model, "semantic")
    gauge = jax.jit(lambda x: coordinates.gauge(x, jnp.ones_like(coordinates.pack(x))))(x)
    assert len(gauge) == turns and np.all(np.linalg.norm(gauge, axis=1) > 0.9)


def test_minimiser_of_several_columns():
    """The subgradient is zero, and derivatives in the field and in the numbers of the penalty equal differences."""
    rng, penalty = np.random.default_rng(0), ta.L1(0.7)
    root, b, push, move = (rng.standard_normal(shape) for shape in ((20, 3, 3), (20, 3), (20, 3), (20, 3, 3)))
    Lam, b, move = root @ root.swapaxes(1, 2) + np.eye(3), 2 * b, move + move.swapaxes(1, 2)
    w, R = map(np.asarray, jax.jit(minimiser_and_response)(penalty, jnp.asarray(Lam), jnp.asarray(b)))
    pull, zero = b - np.einsum("nab,nb->na", Lam, w), w == 0
    assert 0.2 < zero.mean() < 0.8 and np.all(np.abs(pull) <= 0.7 + 1e-12)
    np.testing.assert_allclose(np.where(zero, 0, pull - 0.7 * np.sign(w)), 0, atol=1e-12)

    @jax.jit
    def value_and_slopes(s):
        def value(s, t):
            return minimiser(ta.L1(0.7 + 0.5 * s), Lam + s * move, b + (s + t) * push)

        return value(s, 0.0), *jax.jacfwd(value, (0, 1))(s, 0.0)

    (_, slope, field_slope), (above, *_), (below, *_) = map(value_and_slopes, (0.0, 1e-6, -1e-6))
    np.testing.assert_allclose(slope, (above - below) / 2e-6, atol=1e-7)
    np.testing.assert_allclose(np.einsum("nab,nb->na", R, push), field_slope, atol=1e-12)


@pytest.mark.full
def test_a_law_of_samples_is_the_law_that_they_are_drawn_from():
    """A sparse teacher given by atoms, the nodes of a Gauss-Hermite rule, has the overlaps of the sparse law itself."""

    class Sampled(ta.DotProduct):
        def law(self):
            nodes, weights = np.polynomial.hermite_e.hermegauss(40)
            pi = jnp.asarray(np.append(0.0, 5**0.5 * nodes)[:, None])
            law = jax.tree.map(lambda a: jnp.repeat(a, len(pi), 0), super().law())
            weights = jnp.asarray(np.append(0.8, 0.2 * weights / weights.sum()))
            cross = law.tau_mean[:, :, None] * pi[:, None]
            return dataclasses.replace(law, weights=weights, pi=(pi**2)[..., None], cross=cross, pi_mean=pi)

    model = ta.DotProduct(penalty=ta.L1(8e-3))
    sampled = Sampled(**vars(model))
    ta.check(sampled)
    result, expected, gaussian = (averages(m, HATS)[1] for m in (sampled, sparse(model), model))
    assert_close(result, expected, rtol=1e-7)
    for b, c in zip(*map(jax.tree.leaves, (expected, gaussian)), strict=True):
        assert np.all(np.abs(np.asarray(c) / np.asarray(b) - 1) > 0.01)  # a Gaussian teacher gives other overlaps


@pytest.mark.full
@pytest.mark.parametrize("rule", [ta.Sobol(2**12, replicates=1), ta.Lines(15, replicates=1)])
def test_a_solved_state(rule):
    """Two routes give the same training loss; derivatives in both strengths equal central differences.

    The partial derivatives are those of the frozen nodes; all derivatives are, on lines.
    """
    nodes, on_lines = rule.rule(ta.DotProduct()), isinstance(rule, ta.Lines)
    net, branch = ta.DotProduct(lam=0.005, penalty=ta.L1(0.005)), BRANCHES["semantic"]

    @jax.jit
    def solved(model, start):
        settings, alpha = ta.Settings(tol=1e-10, max_steps=8), jnp.array(3.0)
        states = states_near(model, alpha, nodes, start, branch.free(model), settings)
        return numbers_of(states).mean(0), states.diagnostics.train_loss_direct[0], states.train_loss_partials[0]

    start = overlaps_of(*solved(net, branch.start(net))[0][:3])
    value, direct, partials = solved(net, start)
    np.testing.assert_allclose(direct, value[4], rtol=1e-7)
    slopes = jax.jit(lambda tangent: jax.jvp(lambda m: solved(m, start)[0], (net,), (tangent,))[1])
    for place in ((lambda m: m.lam), (lambda m: m.penalty.strength)):
        up, down = (solved(eqx.tree_at(place, net, place(net) + s), start)[0] for s in (1e-5, -1e-5))
        np.testing.assert_allclose(place(partials)[0], (up[4] - down[4]) / 2e-5, rtol=1e-3 if on_lines else 1e-6)
        if on_lines:
            tangent = eqx.tree_at(place, jax.tree.map(jnp.zeros_like, net), jnp.ones(()))
            np.testing.assert_allclose(slopes(tangent), (up - down) / 2e-5, rtol=1e-3, atol=1e-9)
