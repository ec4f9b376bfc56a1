"""One step of replica symmetry breaking: potentials, equations, limits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.overlaps import Conjugates
from tiedattn_jax.theory import potentials as rs_potentials
from tiedattn_jax.theory.rsb import fixed_points as rsb
from tiedattn_jax.theory.rsb.fixed_points import BrokenState, with_derivatives
from tiedattn_jax.theory.rsb.newton import Found, corrected_matrix
from tiedattn_jax.theory.rsb.potentials import BrokenOverlaps, free_energy, overlaps, prior

S = jnp.asarray(500.0)


def _hats(r: int = 1) -> BrokenOverlaps:
    key = jax.random.split(jax.random.key(0), 5)

    def positive(key, size):
        a = jax.random.normal(key, (2, r, r))
        return size * (a @ jnp.swapaxes(a, 1, 2) + jnp.eye(r))

    q0 = positive(key[0], 1e-4)
    q1 = q0 + positive(key[1], 1e-6)
    theta, m = 1e-3 * jax.random.normal(key[3], (2, r, 1)), 1e-3 * jax.random.normal(key[4], (2, r))
    return BrokenOverlaps(q1, q0, positive(key[2], 0.01), theta, m)


@pytest.mark.parametrize("rank", [1, 2])
def test_prior_without_breaking_is_that_of_replica_symmetry(rank):
    model, hats = ta.dot_product(rank=rank), _hats(rank)
    hats = eqx.tree_at(lambda h: h.q1, hats, hats.q0)
    rs = Conjugates(hats.q0, hats.V, hats.theta, hats.m)
    np.testing.assert_allclose(prior(model, hats, S), rs_potentials.prior(model, rs), rtol=1e-12)


def test_prior_is_a_gaussian_average():
    """psi_s = (1/s) E log E exp(s (b + g)^2 / (2 Lam)), with g split into what clusters share and what they do not."""
    model, hats = ta.dot_product(), _hats()
    x, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    gamma, shared = 0.25, np.sqrt(0.25 * np.sum(hats.q0))
    own = np.sqrt(gamma * np.sum(hats.q1 - hats.q0))
    Lam = 0.01 + gamma * np.sum(hats.V)
    inside = np.exp(float(S) * (np.add.outer(shared * x, own * x)) ** 2 / (2 * Lam)) @ w
    bare = eqx.tree_at(lambda h: (h.theta, h.m), hats, (0 * hats.theta, 0 * hats.m))
    np.testing.assert_allclose(prior(model, bare, S), np.log(inside) @ w / float(S), rtol=1e-9)


def test_order_parameters_of_isotropic_data():
    """V = gamma / Lam, q0 = gamma (b^2 + gamma qhat0) / D^2, q1 - q0 = gamma c2 / (Lam D)."""
    model, hats = ta.dot_product(), _hats()
    x = overlaps(model, hats, S)
    gamma = 0.25
    Lam, c2 = 0.01 + gamma * jnp.sum(hats.V), gamma * jnp.sum(hats.q1 - hats.q0)
    D = Lam - S * c2
    encoded, semantic = hats.m[0, 0] - hats.m[1, 0], gamma * jnp.sum(hats.theta)
    np.testing.assert_allclose(x.V, gamma / Lam, rtol=1e-9)
    np.testing.assert_allclose(x.q1 - x.q0, gamma * c2 / (Lam * D), rtol=1e-6)
    np.testing.assert_allclose(x.q0, gamma * (encoded**2 + semantic**2 + gamma * jnp.sum(hats.q0)) / D**2, rtol=1e-6)
    np.testing.assert_allclose(x.m[0, 0], encoded / D, rtol=1e-9)


def test_free_energy_without_breaking():
    model, hats = ta.dot_product(), _hats()
    hats = eqx.tree_at(lambda h: h.q1, hats, hats.q0)
    x = eqx.tree_at(lambda h: (h.q1, h.q0), _hats(), (0.05 * jnp.ones((2, 1, 1)), 0.05 * jnp.ones((2, 1, 1))))
    rs = ta.Overlaps(x.q0, x.V, x.theta, x.m), Conjugates(hats.q0, hats.V, hats.theta, hats.m)
    M, alpha = jnp.asarray(0.002), jnp.asarray(1.3)
    np.testing.assert_allclose(
        free_energy(model, alpha, x, hats, S, M), rs_potentials.free_energy(model, alpha, *rs, M), rtol=1e-12
    )


def test_prior_by_the_ridge_is_the_norm_of_the_weights():
    """d psi_s / d lam = -tr(Q^T Q) / (2 d), which is q1 / (2 sigma^2) of one token, whatever the conjugates."""
    model, hats = ta.dot_product(sigma=0.6), _hats()
    slope = jax.grad(prior)(model, hats, S).lam
    np.testing.assert_allclose(slope, -overlaps(model, hats, S).q1[0, 0, 0] / (2 * 0.36), rtol=1e-9)


def test_derivatives_of_a_state():
    """Those of the loss are the partial ones that came with it; what has none says so, and does not spoil the others."""
    model, hats, one = ta.dot_product(), _hats(), jnp.ones(())
    slopes = jax.tree.map(lambda a: 3 * jnp.ones_like(a), model)
    status = jnp.zeros((), int)
    state = BrokenState(hats, hats, one, one, one, slopes, 2 * one, one, one, status)

    def of(name):
        return lambda model, alpha: getattr(with_derivatives((model, alpha), state), name)

    by_model, by_alpha = jax.grad(of("train_loss"), (0, 1))(model, one)
    jax.tree.map(np.testing.assert_array_equal, by_model, slopes)
    assert by_alpha == 2 and jax.jvp(of("train_loss"), (model, one), (model, one))[1] > 2
    assert np.isnan(jax.grad(of("s"), 1)(model, one)) and np.isnan(jax.jvp(of("s"), (model, one), (model, one))[1])
    with pytest.raises(TypeError, match="first derivatives only"):
        jax.hessian(of("train_loss"), 1)(model, one)


def test_replicates_start_where_one_was_found(solved, nodes, monkeypatch):
    """One after the other until one is found; from there the others and those that failed, of which the better stays."""
    rs, asked = solved(2.0, "positional"), []
    x = BrokenOverlaps(
        *(rs.replicates.overlaps.q[0],) * 2, *(a[0] for a in list(vars(rs.replicates.overlaps).values())[1:])
    )
    residuals = {(0, False): 0.1, (1, False): 1e-5, (2, True): 1e-3, (3, True): 0.2, (0, True): 0.05}

    def found(rs, s, near, item):
        what = item[0], near is not None
        asked.append(what)
        return Found(x, S, None, residuals[what], None)

    monkeypatch.setattr(rsb, "_search", found)
    monkeypatch.setattr(rsb, "_broken", lambda moving, part, one: one.residual)
    assert rsb._solve_replicates(rs, nodes, None) == [0.05, 1e-5, 1e-3, 0.2]
    assert asked[:2] == [(0, False), (1, False)] and set(asked) == set(residuals) and len(asked) == 5
    residuals[0, True] = 0.5
    assert rsb._solve_replicates(rs, nodes, None)[0] == 0.1
    residuals[1, False] = residuals[2, False] = residuals[3, False] = 0.2
    assert rsb._solve_replicates(rs, nodes, None) == [0.1, 0.2, 0.2, 0.2]


def test_corrected_matrix_knows_the_last_move():
    """Along the move it gives the change that was seen; across it, in units of the coordinates, what it gave before."""
    matrix, sizes = np.arange(9.0).reshape(3, 3), np.array([1.0, 10.0, 0.1])
    move, change = np.array([0.5, 2.0, 0.03]), np.array([1.0, -1.0, 2.0])
    found = corrected_matrix(matrix, move, change, sizes)
    np.testing.assert_allclose(found @ move, change, rtol=1e-12)
    across = sizes * np.cross(move / sizes, [1.0, 2.0, 3.0])
    np.testing.assert_allclose(found @ across, matrix @ across, rtol=1e-9)
    np.testing.assert_array_equal(corrected_matrix(matrix, 0 * move, change, sizes), matrix)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"s": 0.0}, "s"),
        ({"s": -1.0}, "s"),
        ({"branch": "uninformed"}, "branch"),
        ({"replicates": 1}, "replicates"),
        ({"alpha": -1.0}, "alpha"),
        ({"model": ta.dot_product(dtype="float32")}, "model"),
        ({"model": ta.dot_product(penalty=ta.L1(0.01))}, "model"),
    ],
)
def test_bad_input(change, argument):
    given = {"model": ta.dot_product(dtype="float64"), "alpha": 1.2, **change}
    with pytest.raises(ta.InputError, match=rf"^{argument}"):
        ta.solve_1rsb(**given)


def test_refuses_traced_numbers():
    with pytest.raises(ta.InputError, match="concrete"):
        jax.jit(lambda alpha: ta.solve_1rsb(ta.dot_product(), alpha).s)(1.2)


@pytest.mark.slow
def test_without_jumps_there_is_nothing_to_break():
    """A weak mixing at large alpha: the semantic state of the standard model has no jumps at alpha = 4."""
    point = ta.solve_1rsb(ta.dot_product(), 4.0, "semantic", order=3, replicates=2)
    assert not point.rs.jumps and point.elevation == 0 and point.complexity == 0
    np.testing.assert_array_equal(point.overlaps.q1, point.overlaps.q0)


@pytest.mark.slow
def test_ground_state():
    """It lies above the RS state, and its loss is stationary in s."""
    model = ta.dot_product()
    ground = ta.solve_1rsb(model, 1.2515, "positional", order=3, replicates=2)
    assert np.all(ground.replicates.elevation > 1e-7)
    assert abs(ground.mean.loss_by_log_s) < 0.1 * ground.elevation
    estimated = ground.rs.replicates.diagnostics.rs_error
    np.testing.assert_allclose(estimated, ground.replicates.elevation, rtol=0.2)
    each = ground.replicates
    np.testing.assert_allclose(each.loss_by_model.lam, each.overlaps.q1.mean((1, 2, 3)) / (2 * 0.25), rtol=1e-3)

    def at(sigma):
        return ta.solve_1rsb(ta.dot_product(sigma=sigma), 1.2515, "positional", order=3, replicates=2)

    np.testing.assert_allclose(jax.grad(lambda sigma: at(sigma).train_loss)(0.5), each.loss_by_model.sigma.mean())
    slope = (at(0.505).replicates.train_loss - at(0.495).replicates.train_loss) / 0.01
    np.testing.assert_allclose(each.loss_by_model.sigma, slope, rtol=1e-3)
    assert "1RSB" in str(ground) and ground.to_dict()["status"] == ground.status_name
