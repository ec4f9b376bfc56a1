"""The potentials of 1RSB against closed forms, the equations that make them stationary, and the nodes to average on."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Signs, channel_of_signs, state
from scipy.stats import norm

import tiedattn_jax as ta
from tiedattn_jax.averages.rules import teacher_fields, whiten
from tiedattn_jax.model.overlaps import Conjugates
from tiedattn_jax.rsb import potentials
from tiedattn_jax.rsb.clusters import Cluster
from tiedattn_jax.rsb.fixed_points import lines_1rsb
from tiedattn_jax.rsb.potentials import OneRSBOverlaps, Outer
from tiedattn_jax.theory import potentials as rs_potentials

S = jnp.asarray(500.0)
# One program each instead of one for every operation.
free_energy, overlaps, prior = map(
    eqx.filter_jit, (potentials.free_energy_1rsb, potentials.overlaps_1rsb, potentials.prior_1rsb)
)


def _state(q1, q0, V):
    q1, q0, V = (jnp.reshape(a, (1, 1, 1)) for a in (q1, q0, V))
    return OneRSBOverlaps(q1, q0, V, jnp.zeros((1, 1, 1)), jnp.zeros((1, 1)))


def _channel_by_hand(q1, q0, V, s):
    """M_s of `Signs`."""
    q1, q0, V = (jnp.reshape(a, (1, 1)) for a in (q1, q0, V))
    return channel_of_signs(1 / (1 + V), jnp.ones(1), q1, q0, s, 120)


def _remainder_by_hand(q1, q0, V, s):
    """M_s minus the average envelope over all fields at the response V + s (q1 - q0)."""
    unbroken = (1 + q1 - 2 * jnp.sqrt(2 * q1 / jnp.pi)) / (2 * (1 + V + s * (q1 - q0)))
    return _channel_by_hand(q1, q0, V, s) - unbroken


def _nodes_of_signs(laid, at):
    """The fields of clusters, laid for the overlaps `laid`, and nodes within them that end at the jump."""
    x, weight = np.polynomial.hermite_e.hermegauss(120)
    h = np.sqrt(laid[1]) * x
    log_density = -0.5 * x**2 - 0.5 * np.log(laid[1])
    outer = Outer(*(jnp.asarray(a) for a in (h[None, None], 0 * h[None, None], weight / weight.sum(), log_density)))
    t, share = np.polynomial.legendre.leggauss(60)
    q1, q0, V, s = at
    spread, jump = np.sqrt(q1 - q0), np.clip(-h / np.sqrt(q1 - q0), -9, 9)
    xi = np.concatenate([-10 + (jump + 10) * (t[:, None] + 1) / 2, jump + (10 - jump) * (t[:, None] + 1) / 2])
    widths = np.concatenate([share[:, None] * (jump + 10) / 2, share[:, None] * (10 - jump) / 2])
    log_weight = np.log(widths) - 0.5 * xi**2 - 0.5 * np.log(2 * np.pi)
    field = h + spread * xi

    def cluster(V):
        z = (field + V * np.sign(field)) / (1 + V)
        return Cluster(*(jnp.asarray(a) for a in (xi.reshape(1, -1), log_weight, z.reshape(1, 1, -1))))

    return outer, cluster(V), cluster(V + s * (q1 - q0))


def test_channel_potential_of_signs():
    """The remainder of M_s and its gradients agree with a closed form, also away from where the fields were laid."""
    at, laid = (0.31, 0.17, 0.92, 2.9), (0.3, 0.15)
    points, model = _nodes_of_signs(laid, at), Signs(lam=jnp.asarray(1.0))

    @jax.jit
    def remainder(at, points):
        return jax.value_and_grad(lambda at: potentials._remainder(points, (model, _state(*at[:3]), at[3])))(at)

    value, gradient = remainder(jnp.array(at), points)
    expected, slopes = jax.jit(jax.value_and_grad(lambda at: _remainder_by_hand(*at)))(jnp.array(at))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5)
    # The average over all fields is a mean: a factor of its weights changes nothing.
    outer, cluster, unbroken = points
    points = outer, cluster, eqx.tree_at(lambda c: c.log_weight, unbroken, unbroken.log_weight + 0.3)
    np.testing.assert_allclose(remainder(jnp.array(at), points)[0], value, rtol=1e-9)


@pytest.mark.full
def test_channel_potential_by_a_search_for_jumps():
    """M_s with its first and second derivatives, on nodes that are laid by a search, away from where they were laid."""
    model, laid = Signs(lam=jnp.asarray(1.0)), jnp.array([0.3, 0.15, 0.9, 3.0])
    at, (x, s) = jnp.array([0.31, 0.17, 0.92, 2.9]), (_state(*laid[:3]), laid[3])
    lines = lines_1rsb(model, 3, 4, 2, 0).replicate(0)
    averages = potentials.averages_at(model, ta.Overlaps(x.q1, x.joined(s).V, x.theta, x.m), x, s, lines)

    @jax.jit
    def expansion(at, with_slopes):
        def setting(u):
            return model, jnp.ones(()), _state(*u[:3]), u[3]

        return potentials.channel_expansion(setting, averages, at, with_slopes)[:2]

    def gradient(by_x, by_s):
        return jnp.stack([*(a.reshape(-1, *a.shape[3:])[0] for a in (by_x.q1, by_x.q0, by_x.V)), by_s])

    def by_hand(at):
        return _channel_by_hand(*at)

    (value, *slopes), (slope, *bends) = expansion(at, jnp.asarray(True))
    np.testing.assert_allclose(value, by_hand(at), rtol=1e-4)
    np.testing.assert_allclose(gradient(*slopes), jax.grad(by_hand)(at), rtol=1e-3)
    np.testing.assert_allclose(slope, gradient(*slopes), rtol=1e-9)
    np.testing.assert_allclose(gradient(*bends), jax.hessian(by_hand)(at), rtol=0.02, atol=1e-5)
    values, zeros = expansion(at, jnp.asarray(False))
    # The mean of the slope with theta is zero: atol is the rounding of its terms.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15), values, (value, *slopes))
    assert not any(np.any(a) for a in jax.tree.leaves(zeros))


@pytest.mark.parametrize("rank", [1, 2])
def test_without_breaking_potentials_are_those_of_replica_symmetry(rank, random_hats):
    model, hats = ta.DotProduct(rank=rank), random_hats(rank)
    hats = eqx.tree_at(lambda h: h.q1, hats, hats.q0)
    rs = Conjugates(hats.q0, hats.V, hats.theta, hats.m)
    np.testing.assert_allclose(prior(model, hats, S), eqx.filter_jit(rs_potentials.prior)(model, rs), rtol=1e-12)
    q, M, alpha = 0.05 * jnp.stack([jnp.eye(rank)] * 2), jnp.asarray(0.002), jnp.asarray(1.3)
    x, between = OneRSBOverlaps(q, q, hats.V, hats.theta, hats.m), ta.Overlaps(q, hats.V, hats.theta, hats.m)
    expected = eqx.filter_jit(rs_potentials.free_energy)(model, alpha, between, rs, M)
    np.testing.assert_allclose(free_energy(model, alpha, x, hats, S, M), expected, rtol=1e-12)


def test_prior_is_a_gaussian_average(random_hats):
    """psi_s = (1/s) E log E exp(s (b + g)^2 / (2 Lam)), where g splits into a part that clusters share and the rest."""
    model, hats = ta.DotProduct(), random_hats()
    x, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    gamma, shared = 0.25, np.sqrt(0.25 * np.sum(hats.q0))
    separate = np.sqrt(gamma * np.sum(hats.q1 - hats.q0))
    Lam = 0.01 + gamma * np.sum(hats.V)
    inner = np.exp(float(S) * (np.add.outer(shared * x, separate * x)) ** 2 / (2 * Lam)) @ w
    centred = eqx.tree_at(lambda h: (h.theta, h.m), hats, (0 * hats.theta, 0 * hats.m))
    np.testing.assert_allclose(prior(model, centred, S), np.log(inner) @ w / float(S), rtol=1e-9)


def test_order_parameters_of_isotropic_data(random_hats):
    """For isotropic data V = gamma / Lam, q0 = gamma (b^2 + gamma qhat0) / D^2 and q1 - q0 = gamma c2 / (Lam D)."""
    model, hats = ta.DotProduct(), random_hats()
    x = overlaps(model, hats, S)
    x, hats, gamma = *(jax.tree.map(np.asarray, a) for a in (x, hats)), 0.25
    Lam, c2 = 0.01 + gamma * np.sum(hats.V), gamma * np.sum(hats.q1 - hats.q0)
    D = Lam - float(S) * c2
    encoded, semantic = hats.m[0, 0] - hats.m[1, 0], gamma * np.sum(hats.theta)
    np.testing.assert_allclose(x.V, gamma / Lam, rtol=1e-9)
    np.testing.assert_allclose(x.q1 - x.q0, gamma * c2 / (Lam * D), rtol=1e-6)
    np.testing.assert_allclose(x.q0, gamma * (encoded**2 + semantic**2 + gamma * np.sum(hats.q0)) / D**2, rtol=1e-6)
    np.testing.assert_allclose(x.m[0, 0], encoded / D, rtol=1e-9)


def test_prior_by_the_ridge_is_the_norm_of_the_weights(random_hats):
    """d psi_s / d lam is -tr(Q^T Q) / (2 d), or -q1 / (2 sigma^2) for one token, whatever the conjugates."""
    model, hats = ta.DotProduct(sigma=0.6), random_hats()
    slope = jax.grad(prior)(model, hats, S).lam
    np.testing.assert_allclose(slope, -overlaps(model, hats, S).q1[0, 0, 0] / (2 * 0.36), rtol=1e-9)


@pytest.mark.parametrize("rank", [1, 2])
def test_the_equations_make_the_free_energy_stationary(rank, random_hats):
    """`overlaps` and `conjugates` are the conditions that Phi_s does not change to first order in either of them."""
    model, s, alpha = ta.DotProduct(rank=rank), S, jnp.asarray(1.3)

    def channel(x):  # any smooth function of symmetric matrices
        return sum(jnp.sum(jnp.sin(a + jnp.swapaxes(a, 1, 2))) for a in (x.q1, x.q0, x.V)) + jnp.sum(x.theta**2 - x.m)

    @jax.jit
    def slopes(hats):
        x = potentials.overlaps_1rsb(model, hats, s)
        images = [
            potentials.conjugates_1rsb(alpha, s, jax.grad(channel)(x), free)
            for free in jnp.array([[1, 1], [0, 1], [1, 0.0]])
        ]
        by_hats = jax.grad(lambda hats: potentials.free_energy_1rsb(model, alpha, x, hats, s, jnp.zeros(())))(hats)
        by_x = jax.grad(lambda x: potentials.free_energy_1rsb(model, alpha, x, images[0], s, channel(x)))(x)
        return by_hats, by_x, images, x.V

    by_hats, by_x, (image, *held), V = slopes(random_hats(rank))
    for name, slope in vars(by_hats).items():
        assert np.max(np.abs(slope)) < 1e-9 * float(s) * np.max(np.abs(V)), name
        assert np.max(np.abs(getattr(by_x, name))) < 1e-12 * float(s), name
    for name, at_zero in zip(("theta", "m"), held, strict=True):  # what a branch holds at zero has no conjugate
        assert np.all(getattr(at_zero, name) == 0) and np.any(getattr(image, name) != 0)


@pytest.mark.parametrize("jumps", [[], [0.4], [-1.0, 0.2], [5.9], [8.0]])
def test_a_line_integrates_the_gaussian(jumps):
    nodes, weights = potentials.nodes_on_line(np.asarray(jumps), -6.0, 6.5, 0.1)
    density = np.exp(-0.5 * nodes**2) / (2 * np.pi) ** 0.5
    moments = [np.sum(weights * density * nodes**k) for k in range(5)]
    np.testing.assert_allclose(moments, [1, 0, 1, 0, 3], atol=2e-6)
    assert all(np.sum(np.abs(nodes - j) < 0.6) >= 18 for j in jumps if j < 5)
    if jumps == [0.4]:  # exact, because the kink is an end of pieces
        broken = np.sum(weights * density * np.abs(nodes - 0.4))
        np.testing.assert_allclose(broken, 2 * norm.pdf(0.4) + 0.4 * (2 * norm.cdf(0.4) - 1), atol=1e-6)
    for place in (-1.9, -0.3, 0.9, 2.2) if not jumps else ():
        # A width of .33 is resolved everywhere: beyond the end of a jump the minimiser is still steep.
        np.testing.assert_allclose(weights @ norm.pdf(nodes, place, 0.33), 1.0, atol=1e-3)


@pytest.mark.full
def test_laid_fields_have_the_law(model, lines):
    x = state(CASES[1])
    laid = potentials.lay_fields(model, x, lines.replicate(0), 0.17)
    student, _ = whiten(model, x, laid.h, teacher_fields(model, laid.teacher))
    normals = np.concatenate([student, laid.teacher])[:, 0]
    np.testing.assert_allclose(laid.weight.sum(), 1.0, atol=1e-12)
    np.testing.assert_allclose(normals @ laid.weight, 0, atol=0.02)
    np.testing.assert_allclose((normals * laid.weight) @ normals.T, np.eye(4), atol=0.02)


@pytest.mark.full
def test_laid_fields_of_signs():
    """A line of `Signs` holds the whole law of its field. The weights sum to one. Pieces end at the jump, at zero."""
    model, q = Signs(lam=jnp.asarray(1.0)), 0.3
    x = _state(q, q, 0.9).between
    lines = lines_1rsb(model, 3, 4, 2, 0).replicate(0)
    laid = potentials.lay_fields(model, x, lines, 0.2)
    h, weight = np.asarray(laid.h)[0, 0], np.asarray(laid.weight)
    np.testing.assert_allclose([weight @ h**k for k in (0, 1, 2, 4)], [1, 0, q, 3 * q**2], atol=4e-6)
    np.testing.assert_allclose(weight @ np.abs(h), (2 * q / np.pi) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(laid.log_density, norm.logpdf(h, 0, q**0.5) + 0.5 * np.log(2 * np.pi), atol=1e-9)
    reached = np.array([-np.min(h), np.max(h)]) / (np.asarray(lines.reach) * q**0.5)
    assert np.all(reached < 1) and np.all(reached > 0.99) and np.min(weight) > 1e-14
    assert laid.teacher.shape == (1, 1, h.size) and np.unique(h).size == h.size // 4
