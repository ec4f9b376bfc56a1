"""The average within a cluster of one step of replica symmetry breaking, against dense quadrature and differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.prox import search
from tiedattn_jax.base.arrays import apply
from tiedattn_jax.rsb.cluster_law import ClusterLaw
from tiedattn_jax.rsb.clusters import cluster_at, find_jumps, find_rough_jump, find_smooth, update_minima
from tiedattn_jax.theory.potentials import stationary

S = 700.0
V = jnp.full((2, 1, 1), 14.0)
SPREAD = jnp.full((2, 1, 1), 0.0013**0.5)
# Fields with a jump within five standard deviations, two of them close to a cusp; one field whose second minimum
# exists only in a small part of the line; one with a steep step; two without a jump.
H = jnp.array([
    [-0.1153, 0.0410, 0.3214, 0.2601, 0.2178, 0.0822, 0.3460, 0.0915, 0.2501, 0.5],
    [-0.1263, -0.0538, 0.2370, -0.1623, 0.0248, -0.0314, 0.2667, 0.0926, -0.0281, 0.4],
])[:, None]  # fmt: skip
Y = jnp.array([
    [0.8051, -0.7092, 0.5006, 0.7666, 0.2942, 0.6469, 0.5377, -0.1238, -1.2636, 0.1],
    [-0.8853, 0.7726, -0.9029, -1.1544, -0.7624, -0.6819, -0.8311, 0.9821, 0.2417, 0.2],
])[:, None]  # fmt: skip


def _energies(law, cluster):
    """The Moreau envelope at the nodes, (K, N)."""
    return law.energy(cluster.z, cluster.normals).reshape(len(cluster.log_weight), -1)


# The tests share these jitted functions, because most of their time goes into compiling.
@partial(jax.jit, static_argnames="find")
def _minima(law, s, find=find_jumps):
    return find(law, s, find_rough_jump(law, s))


@jax.jit
def _tilted(law, s, minima):
    cluster = cluster_at(law, minima)
    exponents = cluster.log_weight - s * _energies(law, cluster)
    return -jax.scipy.special.logsumexp(exponents, axis=0) / s


@pytest.fixture(scope="module")
def law(model) -> ClusterLaw:
    return ClusterLaw(model, V, SPREAD, H, Y)


@pytest.fixture(scope="module")
def minima(law):
    """The clusters that `find_jumps` returns around the fields `H` at s = S."""
    return _minima(law, S)


@jax.jit
def _dense(law, s):
    g = np.linspace(-7, 7, 225)
    xi = jnp.asarray(np.stack(np.meshgrid(g, g, indexing="ij")).reshape(2, 1, -1))
    log_weight = -0.5 * jnp.sum(xi**2, (0, 1)) + 2 * np.log(g[1] - g[0]) - np.log(2 * np.pi)

    def at_field(h, y):
        fields, teacher = h[..., None] + apply(law.spread, xi), jnp.broadcast_to(y[..., None], (2, 1, xi.shape[-1]))
        problem = ProxProblem(law.model, law.V, teacher)
        energy = problem.energy(search(problem, fields).z, fields)
        return -jax.scipy.special.logsumexp(log_weight - s * energy) / s

    return jax.lax.map(lambda p: at_field(*p), (jnp.moveaxis(law.h, -1, 0), jnp.moveaxis(law.y, -1, 0)))


@pytest.mark.full
@pytest.mark.parametrize("s", [S, 50.0])
def test_against_dense_quadrature(law, s):
    minima = _minima(law, s)
    assert np.any(minima.breaks) and not np.all(minima.breaks)
    assert np.max(np.abs(_tilted(law, s, minima) - _dense(law, s))) < 5e-8 + 2e-5 / s


def test_the_weight_of_a_sheet_expands_its_exponent(law):
    """Differences of -|xi|^2 / 2 - s E on the sheet say where its maximum is, and how it bends there."""
    step, eye = 0.01, np.eye(2)
    low = jax.jit(lambda law: law.search(jnp.zeros((2, H.shape[-1]))).z)(law)
    weight_at = jax.jit(lambda s: law.weight_of(low, s))
    weight = weight_at(S)

    @jax.jit
    def exponent(xi):
        xi = jnp.tile(step * xi[:, None], H.shape[-1])
        return -0.5 * jnp.sum(xi**2, 0) - S * law.follow(low, xi)[1]

    slope = np.array([exponent(e) - exponent(-e) for e in eye]) / (2 * step)
    bend = np.array(
        [[exponent(a + b) + exponent(-a - b) - exponent(a - b) - exponent(b - a) for a in eye] for b in eye]
    )
    precision = -np.moveaxis(bend / (4 * step**2), -1, 0)
    values = np.linalg.eigvalsh(precision)
    exact = values[:, 0] > 0.35  # smaller curvatures are raised
    assert exact.sum() >= 5
    root, centre = np.moveaxis(np.asarray(weight.inverse_root), -1, 0), np.asarray(weight.centre).T
    np.testing.assert_allclose((root @ root)[exact], precision[exact], rtol=1e-2, atol=1e-2)
    expected = np.linalg.solve(precision, slope.T[..., None])[..., 0]
    np.testing.assert_allclose(centre[exact], expected[exact], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(weight.log_det[exact], -0.5 * np.log(values).sum(1)[exact], atol=1e-2)
    steep = np.moveaxis(np.asarray(weight_at(20 * S).inverse_root), -1, 0)
    assert np.min(np.linalg.eigvalsh(steep @ steep)) == pytest.approx(0.3, rel=1e-6)


@pytest.mark.full
def test_a_flip_of_the_student_changes_nothing(law, minima):
    """The loss is even, so fields of opposite sign have the same average, with mirrored jumps."""
    flipped = law._replace(h=-H)
    mirrored = _minima(flipped, S)
    np.testing.assert_array_equal(mirrored.breaks, minima.breaks)
    np.testing.assert_allclose(_tilted(law, S, minima), _tilted(flipped, S, mirrored), rtol=1e-8)


@pytest.mark.full
def test_without_tilt_it_is_the_average_envelope(law):
    """At s = 0 the nodes, whose rule is broken at the jumps, average the Moreau envelope itself."""

    @jax.jit
    def averaged(law, minima):
        cluster = cluster_at(law, minima)
        share = jnp.exp(cluster.log_weight)
        return jnp.sum(share, 0), jnp.sum(share * _energies(law, cluster), 0) / jnp.sum(share, 0)

    total, mean = averaged(law, _minima(law, 0.0))
    np.testing.assert_allclose(total, 1.0, atol=3e-5)
    np.testing.assert_allclose(mean, _dense(law, 1e-3), atol=2e-7)


@pytest.mark.full
def test_smooth_rule_where_nothing_jumps(law, minima):
    """The cheaper smooth rule agrees at fields without a jump within reach, and not at the others."""
    value, smooth = (_tilted(law, S, f) for f in (minima, _minima(law, S, find_smooth)))
    error = np.abs(smooth - value)
    assert error[-1] < 1e-7 and np.max(error) > 1e-5


@pytest.mark.full
@pytest.mark.parametrize("find", [find_jumps, find_smooth])
def test_found_again(law, minima, find):
    """Continuing from the clusters of a neighbouring state gives the averages of a new search."""
    near, s = law._replace(V=1.01 * V, spread=0.7 * SPREAD), 1.2 * S
    found = minima if find is find_jumps else _minima(law, S, find)
    continued = jax.jit(update_minima)(near, s, found)
    continued, fresh = (_tilted(near, s, f) for f in (continued, _minima(near, s, find)))
    valid = np.array([9]) if find is find_smooth else np.arange(10)
    np.testing.assert_allclose(continued[valid], fresh[valid], atol=8e-9, rtol=0)


@pytest.mark.full
def test_derivatives_contain_the_moving_jump(law, minima):
    """The derivative of the gradient in the fields equals finite differences, because jumps move with the fields."""

    def total(cluster, h):
        exponents = cluster.log_weight - S * _energies(law._replace(h=h), cluster)
        return -jnp.sum(jax.scipy.special.logsumexp(exponents, axis=0)) / S

    @jax.jit
    def gradient(h, minima):
        return jax.grad(lambda h: stationary(total)(cluster_at(law._replace(h=h), minima), h))(h)

    direction, step = jnp.array([1.0, -0.5])[:, None, None] * jnp.ones_like(H), 1e-4
    _, moving = jax.jvp(lambda h: gradient(h, minima), (H,), (direction,))
    ahead, behind = (gradient(h, _minima(law._replace(h=h), S)) for h in (H + step * direction, H - step * direction))
    differences = (ahead - behind) / (2 * step)
    valid = np.arange(H.shape[-1]) != 5  # close to the cusp neither derivative is accurate
    np.testing.assert_allclose(moving[..., valid], differences[..., valid], atol=2e-3 * float(jnp.max(jnp.abs(moving))))


def test_the_pull_is_the_gradient_of_the_quadratic_part():
    """The quadratic part is (z + C xi) V^{-1} (z + C xi) / 2; the root C of several columns is not symmetric."""
    rng = np.random.default_rng(0)
    root, a, z = np.tril(rng.normal(size=(2, 3, 3))), rng.normal(size=(2, 3, 3)), rng.normal(size=(2, 3, 4))
    V, zero = a @ a.swapaxes(1, 2) + np.eye(3), np.zeros_like(z)
    pull = jax.jit(lambda V, root, z: ClusterLaw(None, V, root, zero, zero).pull(z))(V, root, z)

    @jax.jit
    @jax.grad
    def slope(xi):
        shift = z + jnp.einsum("lab,lbn->lan", root, xi)
        return 0.5 * jnp.sum(shift * jnp.linalg.solve(V, shift))

    np.testing.assert_allclose(pull, slope(zero).reshape(6, 4), rtol=1e-9)
