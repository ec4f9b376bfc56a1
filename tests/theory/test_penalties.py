"""The theory of penalties on the weights besides the ridge."""

import dataclasses
from functools import partial

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

pytestmark = pytest.mark.usefixtures("fast_compilation")
HATS = ta.results.Conjugates(
    jnp.full((2, 1, 1), 1.3e-4), jnp.full((2, 1, 1), 0.024), jnp.full((2, 1, 1), 0.011), jnp.array([[3e-3], [-2e-3]])
)


def exact_prior(model, hats):
    """The elastic net's prior for the dot product: a soft threshold of a Gaussian field of mean tau . mhat."""
    gamma, t = model.sigma**2, model.penalty.strength
    Lam, mean = model.lam + gamma * hats.V.sum(), model.encodings[:, 0] @ hats.m[:, 0]
    variance = gamma * hats.q.sum() + model.teacher[0, 0] * (gamma * hats.theta.sum()) ** 2
    s = jnp.sqrt(variance)

    def side(mean):
        x = (mean - t) / s
        return (variance + (mean - t) ** 2) * norm.cdf(x) + (mean - t) * s * norm.pdf(x)

    return (side(mean) + side(-mean)) / (2 * Lam)


def test_single_precision():
    model = ta.DotProduct(penalty=ta.L1(8e-3))
    single = jax.tree.map(lambda a: a.astype(jnp.float32), (model, HATS))
    for a, b in zip(*(jax.tree.leaves(averages(*t)) for t in (single, (model, HATS))), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-4)


@jax.jit
def slopes(model, hats):
    """Values and gradients in model and hats, and their derivatives along the hats, of `prior` and `exact_prior`."""
    results = []
    for form in (prior, exact_prior):
        gradient = jax.value_and_grad(form, (0, 1))
        results.append(jax.jvp(lambda h, g=gradient: g(model, h), (hats,), (hats,)))
    return results


def made_sums():
    """Made-up averages over the channel for `diagnose`, of no particular state."""
    g, gy = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 2)))
    sums = dict.fromkeys(("response", "loss", "second", "unresolved"), jnp.asarray(0.1))
    sums |= {"g_score": g @ g.T, "gy_score": gy @ gy.T, "replicon": jnp.eye(2).reshape(2, 1, 1, 2, 1, 1)}
    return {**sums, "soft": jnp.full(2, 0.1), "slopes": jnp.full(4, 0.1)}


diagnosed = jax.jit(lambda model, hats: diagnose(model, jnp.asarray(2.0), overlaps(model, hats), hats, made_sums()))


@pytest.mark.parametrize("strength", [1e-3, 8e-3, 0.02])
def test_closed_form_of_the_elastic_net(strength):
    """Values, gradients and second derivatives equal the closed form; a fifth to nearly all of the weights are zero."""
    model = ta.DotProduct(penalty=ta.L1(strength))
    values, exact = slopes(model, HATS)
    for a, b in zip(jax.tree.leaves(values), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-18)
    # The response of a weight is 1 / Lam or zero, so that the mean of its square is V / (gamma Lam).
    diagnostics, V = diagnosed(model, HATS), overlaps(model, HATS).V[0, 0, 0]
    np.testing.assert_allclose(diagnostics.replicon, 2.0 * 2 * 0.25 * V / (0.01 + 0.25 * 0.048), rtol=1e-10)
    cost = -0.01 * exact[0][1][0].lam - strength * exact[0][1][0].penalty.strength
    np.testing.assert_allclose(diagnostics.train_loss_direct, 2.0 * 0.1 + cost, rtol=1e-12)


def test_ridge_as_a_penalty():
    """A quadratic penalty acts as a larger ridge in every prediction; an L1 penalty of strength zero does nothing."""
    ridge, no_penalty = ta.DotProduct(lam=0.014), ta.DotProduct(lam=0.014, penalty=ta.L1(0.0))
    quadratic = ta.DotProduct(lam=0.01, penalty=Quadratic(jnp.asarray(0.004)))
    ta.check(quadratic)
    expected, *results = ((averages(m, HATS), diagnosed(m, HATS)) for m in (ridge, quadratic, no_penalty))
    for result in results:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), result, expected)


@pytest.mark.parametrize("columns", [2, 3])
def test_a_quadratic_penalty_of_several_columns_is_a_ridge(columns):
    hats, kind, options = hats_of(0.5), ta.UntiedDotProduct, {"tied_teacher": True}
    if columns == 3:
        hats, kind, options = with_another(hats, jnp.array([2e-3, -2e-3])), ta.DotProduct, {"rank": 3}
    ridge = averages(kind(lam=0.014, **options), hats)
    quadratic = averages(kind(lam=0.01, penalty=Quadratic(jnp.asarray(0.004)), **options), hats)
    for result, expected in zip(*map(jax.tree.leaves, (quadratic, ridge)), strict=True):
        tol = {"rtol": 1e-8} if columns == 2 else {"atol": 3e-6 * jnp.max(jnp.abs(expected))}
        np.testing.assert_allclose(result, expected, **{"rtol": 1e-7} | tol)


def hats_of(correlation, theta=(0.011, 0.006), m=(3e-3, 1e-3)):
    """Conjugates of two columns whose fields have this correlation, apart from what theta adds."""
    correlations = jnp.array([[1.0, correlation], [correlation, 1.0]])
    q, V = (jnp.stack([scale * correlations] * 2) for scale in (1.3e-4, 0.024))
    V = V * jnp.array([[1.0, -0.2], [-0.2, 1.0]])
    m = jnp.array([m, [-x for x in m]])
    return ta.results.Conjugates(q, V, jnp.stack([jnp.asarray(theta)[:, None]] * 2), m)


untied = ta.UntiedDotProduct(tied_teacher=True, penalty=ta.L1(4e-3))
averages = jax.jit(lambda model, hats: (prior(model, hats), overlaps(model, hats)))


def test_columns_apart_are_weights_of_their_own():
    """Columns with independent fields behave as separate weights: one sees the teacher, the other one the encodings."""
    hats, single = hats_of(0.0, (0.011, 0.0), (0.0, 3e-3)), ta.DotProduct(penalty=ta.L1(4e-3))
    psi, joint = averages(untied, hats)
    singles = [averages(single, columns_of(hats, slice(k, k + 1))) for k in range(2)]
    np.testing.assert_allclose(psi, sum(value for value, _ in singles), rtol=1e-10)
    for k, (_, expected) in enumerate(singles):
        np.testing.assert_allclose(joint.q[:, k, k], expected.q[:, 0, 0], rtol=1e-7)
        np.testing.assert_allclose(joint.V[:, k, k], expected.V[:, 0, 0], rtol=1e-7)
        np.testing.assert_allclose(joint.theta[:, k], expected.theta[:, 0], atol=1e-9)
        np.testing.assert_allclose(joint.m[:, k], expected.m[:, 0], atol=1e-9)


@jax.jit
def weights(model, hats):
    """Shares of the nodes of the weights' fields, and the weights and their responses there."""
    Lam, *field = weight_law(model, hats)
    b, share = weight_fields(model.penalty, Lam, *field)
    return share, *minimiser_and_response(model.penalty, Lam[:, None], b)


@jax.jit
def slope_of_overlaps(model, hats, tangent):
    return jax.jvp(lambda h: overlaps(model, h), (hats,), (tangent,))[1]


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.5, 0.98])
def test_averages_over_two_columns(correlation):
    """V is the mean response of a weight (Stein's identity), and the slopes of the overlaps equal differences.

    V is a second derivative of psi in the fields, and a first one of `prior` in the conjugates.
    """
    hats, zeros = hats_of(correlation), jax.tree.map(jnp.zeros_like, hats_of(correlation))
    share, w, R = weights(untied, hats)
    np.testing.assert_allclose(jnp.sum(share), 1, rtol=1e-9)
    np.testing.assert_allclose(jnp.einsum("kn,knab->ab", share, R) * 0.25, averages(untied, hats)[1].V[0], atol=1e-8)
    assert 0.05 < jnp.sum(share * jnp.all(w == 0, -1)) < jnp.sum(share * jnp.any(w == 0, -1)) < 0.95
    tangent = dataclasses.replace(zeros, q=hats.q, theta=0.3 * hats.theta, V=0.5 * hats.V)
    slope = slope_of_overlaps(untied, hats, tangent)
    up, down = (averages(untied, jax.tree.map(lambda a, d, s=s: a + s * d, hats, tangent))[1] for s in (1e-4, -1e-4))
    for a, b, c in zip(*map(jax.tree.leaves, (slope, up, down)), strict=True):
        np.testing.assert_allclose(a, (b - c) / 2e-4, rtol=1e-5, atol=1e-9)


def with_another(hats, m):
    """Add a column with independent fields and without a share in the teacher."""
    wider = [(0, 0), (0, 1), (0, 1)]
    q, V = (jnp.pad(a, wider) + jnp.diag(jnp.array([0.0, 0.0, a[0, 0, 0]])) for a in (hats.q, hats.V))
    return ta.results.Conjugates(q, V, jnp.pad(hats.theta, [*wider[:2], (0, 0)]), jnp.column_stack([hats.m, m]))


def columns_of(hats, k):
    return ta.results.Conjugates(hats.q[:, k, k], hats.V[:, k, k], hats.theta[:, k], hats.m[:, k])


@pytest.mark.parametrize("correlation", [-0.9, 0.5])
def test_a_column_apart_of_three(correlation):
    """A third, independent column leaves the other two unchanged and acts as a single weight, in prior and overlaps."""
    pair = hats_of(correlation)
    hats = with_another(pair, jnp.zeros(2))
    parts = (3, hats), (2, pair), (1, columns_of(hats, slice(2, 3)))
    models = [(ta.DotProduct(rank=k, penalty=ta.L1(4e-3)), part) for k, part in parts]
    (psi, joint), (of_pair, a), (of_third, b) = (averages(*c) for c in models)
    np.testing.assert_allclose(psi, of_pair + of_third, rtol=1e-5)
    for result, of_two, of_one in ((joint.q, a.q, b.q), (joint.V, a.V, b.V)):
        expected = jnp.pad(of_two, [(0, 0), (0, 1), (0, 1)]).at[:, 2, 2].set(of_one[:, 0, 0])
        np.testing.assert_allclose(result, expected, atol=1e-4 * jnp.max(expected))
    np.testing.assert_allclose(joint.theta, jnp.concatenate([a.theta, b.theta], 1), atol=1e-5)
    np.testing.assert_allclose(joint.m, jnp.concatenate([a.m, b.m], 1), atol=1e-5)


@pytest.mark.parametrize(("correlation", "moves"), [(1e-17, False), (-1e-17, False), (-1e-6, True)])
def test_rounding_does_not_turn_the_lines(correlation, moves):
    """The lines follow the sign of correlations. That of independent columns is the sign of a rounding error."""
    fields = jax.jit(partial(weight_fields, ta.L1(4e-3)))
    covariance = 1e-4 * jnp.eye(3)[None]
    Lam, mean = 0.01 * jnp.eye(3)[None], jnp.array([[3e-3, 1e-3, 2e-3]])
    independent = fields(Lam, mean, covariance)[0]
    related = fields(Lam, mean, covariance.at[0, 0, 2].set(1e-4 * correlation).at[0, 2, 0].set(1e-4 * correlation))[0]
    assert (np.max(np.abs(related - independent)) > 1e-3) == moves


def test_derivatives_of_three_columns():
    """Derivatives of overlaps in conjugates and strength, from second derivatives of psi, equal differences."""
    hats = with_another(hats_of(0.5), jnp.array([2e-3, -2e-3]))
    model = ta.DotProduct(rank=3, penalty=ta.L1(4e-3))

    @jax.jit
    def value_at(s):
        """Overlaps, and their derivative in s."""

        def scaled(s):
            changed = eqx.tree_at(lambda m: m.penalty.strength, model, 4e-3 * (1 - 2 * s))
            return overlaps(changed, jax.tree.map(lambda a: (1 + s) * a, hats))

        return jax.jvp(scaled, (s,), (jnp.ones_like(s),))

    (_, slope), (above, _), (below, _) = (value_at(jnp.asarray(s)) for s in (0.0, 1e-3, -1e-3))
    for derivative, up, down in zip(*map(jax.tree.leaves, (slope, above, below)), strict=True):
        np.testing.assert_allclose(derivative, (up - down) / 2e-3, atol=1e-3 * jnp.max(jnp.abs(derivative)))


def test_columns_that_are_turned_have_another_penalty():
    for penalty, turns in ((None, 1), (ta.L1(0.01), 0)):
        model = ta.DotProduct(rank=2, penalty=penalty)
        branch = BRANCHES["semantic"]
        coordinates = Coordinates(model, branch.free(model))
        x = branch.start(model)
        gauge = coordinates.gauge(x, jnp.ones_like(coordinates.pack(x)))
        assert len(gauge) == turns and np.all(np.linalg.norm(gauge, axis=1) > 0.9)


def test_minimiser_of_several_columns():
    """The subgradient is zero, and derivatives in the field and in the numbers of the penalty equal differences."""
    rng, penalty = np.random.default_rng(0), ta.L1(0.7)
    root, b, push, move = (rng.standard_normal(shape) for shape in ((20, 3, 3), (20, 3), (20, 3), (20, 3, 3)))
    Lam, b, push = jnp.asarray(root @ root.swapaxes(1, 2) + np.eye(3)), 2 * jnp.asarray(b), jnp.asarray(push)
    move = jnp.asarray(move + move.swapaxes(1, 2))
    w, R = minimiser_and_response(penalty, Lam, b)
    pull, zero = b - jnp.einsum("nab,nb->na", Lam, w), w == 0
    assert 0.2 < zero.mean() < 0.8 and jnp.all(jnp.abs(pull) <= 0.7 + 1e-12)
    np.testing.assert_allclose(jnp.where(zero, 0, pull - 0.7 * jnp.sign(w)), 0, atol=1e-12)

    def value_at(s):
        return minimiser(ta.L1(0.7 + 0.5 * s), Lam + s * move, b + s * push)

    slope = jax.jvp(value_at, (0.0,), (1.0,))[1]
    np.testing.assert_allclose(slope, (value_at(1e-6) - value_at(-1e-6)) / 2e-6, atol=1e-7)
    field_slope = jax.jvp(lambda b: minimiser(penalty, Lam, b), (b,), (push,))[1]
    np.testing.assert_allclose(jnp.einsum("nab,nb->na", R, push), field_slope, atol=1e-12)


def test_a_law_of_samples_is_the_law_that_they_are_drawn_from():
    """A sparse teacher given by atoms, the nodes of a Gauss-Hermite rule, has the overlaps of the sparse law itself."""

    class Sampled(ta.DotProduct):
        def law(self):
            base = super().law()
            nodes, weights = np.polynomial.hermite_e.hermegauss(40)
            pi = jnp.concatenate([jnp.zeros(1), 5**0.5 * nodes])[:, None]
            law = jax.tree.map(lambda a: jnp.repeat(a, len(pi), 0), base)
            weights = jnp.concatenate([jnp.array([0.8]), 0.2 * weights / weights.sum()])
            cross = law.tau_mean[:, :, None] * pi[:, None]
            return dataclasses.replace(law, weights=weights, pi=(pi**2)[..., None], cross=cross, pi_mean=pi)

    model = ta.DotProduct(penalty=ta.L1(8e-3))
    sampled = Sampled(**vars(model))
    ta.check(sampled)
    result, expected, gaussian = (averages(m, HATS)[1] for m in (sampled, sparse(model), model))
    for a, b, c in zip(*map(jax.tree.leaves, (result, expected, gaussian)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7)
        assert np.all(np.abs(c / b - 1) > 0.01)  # a Gaussian teacher gives other overlaps


def numbers(model, nodes, start):
    """Numbers of the semantic state at alpha = 3, and the fixed point."""
    free = BRANCHES["semantic"].free(model)
    settings, alpha = ta.Settings(tol=1e-10, max_steps=8), jnp.array(3.0)
    fp = ta.results.FixedPoint(model, alpha, states_near(model, alpha, nodes, start, free, settings), None)
    return numbers_of(fp.replicates).mean(0), fp


def solved(nodes, program):
    """A model, a start at its state on `nodes`, and a unit change of each of its two strengths."""
    net = ta.DotProduct(lam=0.005, penalty=ta.L1(0.005))
    start = overlaps_of(*program(net, nodes, BRANCHES["semantic"].start(net))[0][:3])
    zeros = jax.tree.map(jnp.zeros_like, net)
    places = (lambda m: m.lam), (lambda m: m.penalty.strength)
    return net, start, [(place, eqx.tree_at(place, zeros, jnp.ones(()))) for place in places]


def test_training_loss_of_a_solved_state():
    """Two routes give the same training loss; its partial derivatives in both strengths equal central differences."""
    nodes, program = ta.Sobol(2**12, replicates=1).rule(ta.DotProduct()), jax.jit(numbers)
    net, start, changes = solved(nodes, program)
    value, fp = program(net, nodes, start)
    np.testing.assert_allclose(fp.diagnostics.train_loss_direct, value[4], rtol=1e-7)
    for place, _ in changes:
        up, down = (program(eqx.tree_at(place, net, place(net) + s), nodes, start)[0] for s in (1e-5, -1e-5))
        np.testing.assert_allclose(place(fp.mean.train_loss_partials[0]), (up[4] - down[4]) / 2e-5, rtol=1e-6)


@pytest.mark.slow
def test_derivatives_of_a_fixed_point():
    nodes = ta.Lines(15, replicates=1).rule(ta.DotProduct())
    program = jax.jit(lambda *a: (numbers(*a)[0],))
    net, start, changes = solved(nodes, program)
    slopes = jax.jit(lambda net, tangent: jax.jvp(lambda m: numbers(m, nodes, start)[0], (net,), (tangent,))[1])
    for place, tangent in changes:
        up, down = (program(eqx.tree_at(place, net, place(net) + s), nodes, start)[0] for s in (1e-5, -1e-5))
        np.testing.assert_allclose(slopes(net, tangent), (up - down) / 2e-5, rtol=1e-3, atol=1e-9)
