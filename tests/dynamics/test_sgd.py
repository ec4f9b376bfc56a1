import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.dynamics import flow
from tiedattn_jax.dynamics.sgd import _fastest_growth
from tiedattn_jax.theory.observables import gen_error_in

pytestmark = pytest.mark.usefixtures("fast_compilation")

START = 0.5, 0.15, 0.15


@pytest.fixture(scope="module")
def grid(model):
    """A small grid: its error, 3e-4 at t = 60, does not matter where two computations with it are compared."""
    return ta.GaussHermite(6, replicates=2).rule(model)


def short(model, nodes, start=START, eta=1.0, until=12.0, kappa=0.005, **options):
    return ta.sgd(model, start, eta, until, kappa=kappa, nodes=nodes, **{"points": 7, "steps": 2, **options})


def explicit(model, R, Theta, m, eta, kappa, order=40):
    """Equations for one column and opposite encodings, with the encodings' own fluctuation written out."""
    z, w = np.polynomial.hermite_e.hermegauss(order)
    w = w / w.sum()
    variance = float(model.sigma) ** 2
    y, eps = np.sqrt(variance) * z, np.sqrt(variance * (R - Theta**2)) * z
    index = np.indices((order,) * 4).reshape(4, -1)
    weight = np.prod(w[index], 0)
    Y = y[index[:2]]
    h = Theta * Y + eps[index[2:]]
    zs = h + np.array([[m], [-m]])
    u = np.asarray(jax.vmap(jax.grad(model.loss), -1, -1)(jnp.asarray(zs)[:, None], jnp.asarray(Y)[:, None])[:, 0])
    xi = m / (R - Theta**2) * np.sum(u * (h - Theta * Y), 0)
    return (
        -2 * eta * (weight @ np.sum(zs * u, 0) + kappa * R) + eta**2 * variance * (weight @ np.sum(u**2, 0)),
        -eta * (weight @ np.sum(u * Y, 0) + kappa * Theta),
        -eta * (weight @ (xi + u[0] - u[1]) + kappa * m),
    )


def velocity(model, moments, nodes, eta, kappa):
    f = flow.forces(model, flow.overlaps_of(model, moments), nodes.replicate(0))
    return flow.drift(model, moments, f, jnp.asarray(eta), jnp.asarray(kappa))


def test_the_equations_are_those_written_out(model):
    """Among them the term of the encodings' own fluctuation, which is part of a derivative here."""
    nodes = ta.GaussHermite(18, replicates=1, block=18**4).rule(model)
    v = velocity(model, flow.start_moments(model, (0.4, 0.3, 0.2)), nodes, 1.5, 0.02)
    expected = explicit(model, 0.4, 0.3, 0.2, 1.5, 0.02, 18)
    np.testing.assert_allclose([v.R[0, 0, 0], v.Theta[0, 0, 0], v.M[0, 0, 0]], expected, rtol=1e-5)


def classes():
    shares = {(0, 0): 0.3, (1, 1): 0.3, (0, 1): 0.2, (1, 0): 0.2}
    d, rng = 6, np.random.default_rng(1)
    means, encodings = rng.standard_normal((2, d)) / d**0.5, rng.standard_normal((2, d)) / d**0.5
    Sigma, teacher = rng.uniform(0.1, 0.5, (2, d)), rng.standard_normal((d, 1))
    law = ta.SpectralLaw.from_matrices(Sigma, encodings, teacher, means=means, sentences=shares)
    return ta.DotProduct(spectrum=law), Sigma, np.concatenate([encodings, means]), teacher


def several(r=2, t=1):
    d, rng = 6, np.random.default_rng(2)
    encodings, Sigma = rng.standard_normal((2, d)) / d**0.5, rng.uniform(0.1, 0.5, (2, d))
    teacher = rng.standard_normal((d, t))
    return (
        ta.DotProduct(spectrum=ta.SpectralLaw.from_matrices(Sigma, encodings, teacher), rank=r),
        Sigma,
        encodings,
        teacher,
    )


@pytest.mark.parametrize("build", [several, classes])
def test_the_mean_step_is_the_gradient_of_the_test_error_in_the_weights(build):
    """The other route: entries of a student in six dimensions, each an atom of its own, descend by their gradient."""
    model, _, encodings, teacher = build()
    d, r, law = 6, model.shape[1], model.law()
    nodes = ta.Sobol(2**9, replicates=1, block=2**9).rule(model)
    assert len(law.weights) == d
    # Atoms come in another order than coordinates: they are told apart by the teacher's entries.
    atom_of = [int(np.argmin(np.abs(np.asarray(law.pi)[:, 0, 0] - q**2))) for q in teacher[:, 0]]
    assert sorted(atom_of) == list(range(d))
    Q = jnp.asarray(np.random.default_rng(3).standard_normal((d, r)))
    tau = jnp.asarray(np.sqrt(d) * encodings)

    def moments(Q):
        inverse = np.argsort(atom_of)
        R, Theta, M = (jnp.einsum("ia,ib->iab", Q, b)[inverse] for b in (Q, jnp.asarray(teacher), tau.T))
        return flow.Moments(R, Theta, M)

    def objective(Q):
        error = gen_error_in(model, flow.overlaps_of(model, moments(Q)), nodes.replicate(0))
        return error + 0.01 * jnp.sum(Q**2) / d

    _, expected = jax.jvp(moments, (Q,), (-d * jax.grad(objective)(Q),))
    f = flow.forces(model, flow.overlaps_of(model, moments(Q)), nodes.replicate(0))
    f = f._replace(noise=0 * f.noise)
    v = flow.drift(model, moments(Q), f, jnp.asarray(1.0), jnp.asarray(0.02))
    for a, b in zip(jax.tree.leaves(v), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)


def test_the_noise_is_that_of_every_eigenvalue():
    """Steps of a random student in six dimensions: the mean square of the random part of a step, by sampling."""
    model, Sigma, encodings, teacher = several(r=1)
    d, eta, draws = 6, 1.0, 2**14
    nodes = ta.Sobol(2**12, replicates=1, block=2**12).rule(model)
    law, rng = model.law(), np.random.default_rng(5)
    Q, x = rng.standard_normal((d, 1)), rng.standard_normal((draws, *Sigma.shape)) * np.sqrt(Sigma)
    inverse = np.argsort([int(np.argmin(np.abs(np.asarray(law.pi)[:, 0, 0] - q**2))) for q in teacher[:, 0]])
    R, Theta, M = (np.einsum("ia,ib->iab", Q, b)[inverse] for b in (Q, teacher, np.sqrt(d) * encodings.T))
    moments = flow.Moments(*map(jnp.asarray, (R, Theta, M)))
    f = flow.forces(model, flow.overlaps_of(model, moments), nodes.replicate(0))
    f = f._replace(gradient=jax.tree.map(jnp.zeros_like, f.gradient))
    noise = flow.drift(model, moments, f, jnp.asarray(eta), jnp.asarray(0.0)).R[:, 0, 0]
    u = jax.vmap(jax.grad(model.loss))((x + encodings) @ Q / d**0.5, x @ teacher / d**0.5)[..., 0]
    sampled = np.mean(np.asarray(u) ** 2, 0) @ Sigma
    np.testing.assert_allclose(noise, sampled[inverse], rtol=0.05)
    assert np.max(sampled) > 1.3 * np.min(sampled)


def test_signs_and_rotations(model, grid):
    path = short(model, grid)
    for Theta, m in ((-0.15, 0.15), (0.15, -0.15)):
        other = short(model, grid, (0.5, Theta, m))
        np.testing.assert_allclose(other.Theta, np.sign(Theta) * path.Theta, rtol=1e-3)
        np.testing.assert_allclose(other.m, np.sign(m) * path.m, rtol=1e-3)
    two = several(r=2)[0]
    rotation = np.array([[0.6, 0.8], [-0.8, 0.6]])
    R, Theta, m = np.array([[0.6, 0.1], [0.1, 0.4]]), np.array([[0.2], [0.1]]), np.array([0.1, -0.05])
    nodes = ta.Sobol(2**10, replicates=2, block=2**10).rule(two)
    first = short(two, nodes, (R, Theta, m))
    turned = short(two, nodes, (rotation @ R @ rotation.T, rotation @ Theta, rotation @ m))
    assert first.R.shape == (7, 2, 2) and first.m.shape == (7, 2, 2) and first.Theta.shape == (7, 2, 1)
    np.testing.assert_allclose(turned.R[-1], rotation @ first.R[-1] @ rotation.T, rtol=0.02, atol=2e-3)
    np.testing.assert_allclose(turned.m[-1], first.m[-1] @ rotation.T, atol=2e-3)
    assert float(jnp.max(jnp.abs(first.R[-1] - first.R[0]))) > 0.02


def end(eta, kappa, omega, R, until, nodes, steps=2):
    path = short(ta.DotProduct(omega=omega), nodes, (R, 0.15, 0.15), eta, until, kappa, steps=steps)
    return path.R[-1] + path.Theta[-1] + path.m[-1] + 100 * path.risk[-1]


def test_derivatives_in_everything(grid):
    at, step = (1.0, 0.005, 0.3, 0.5, 12.0), 1e-4
    slopes = jax.grad(end, range(5))(*at, grid)
    forward = jax.jit(jax.jacfwd(end, range(5)))(*at, grid)
    np.testing.assert_allclose(slopes, forward, rtol=1e-8)
    for k, slope in enumerate(slopes):
        sides = [end(*(a + s * step * (i == k) for i, a in enumerate(at)), grid) for s in (1, -1)]
        assert float(slope) == pytest.approx(float(sides[0] - sides[1]) / (2 * step), rel=1e-5), k


@pytest.mark.long
def test_many_rates_in_one_call(model, grid):
    etas = jnp.array([0.5, 1.0, 2.0])
    paths = jax.jit(jax.vmap(lambda eta: short(model, grid, eta=eta)))(etas)
    each = [short(model, grid, eta=eta) for eta in etas]
    np.testing.assert_allclose(paths.R, [p.R for p in each], rtol=1e-10)
    np.testing.assert_allclose(paths.stderr.gen_error, [p.stderr.gen_error for p in each], rtol=1e-6)
    assert paths.status_name == ["time over"] * 3
    level = 0.00395
    times = paths.crossing("gen_error below", level)
    np.testing.assert_allclose(times.t, [p.crossing("gen_error below", level).t for p in each], rtol=1e-8)
    assert times.t.shape == (3,) and "Trajectory" in repr(paths)


def test_times_of_events(model, grid):
    path = short(model, grid)
    level = float(path.gen_error[2] + path.gen_error[3]) / 2
    crossing = path.crossing("gen_error below", level)
    assert crossing.ok and path.t[2] < crossing.t < path.t[3] and "gen_error below" in str(crossing)
    at_that_time = short(model, grid, until=float(crossing.t))
    assert float(at_that_time.gen_error[-1]) == pytest.approx(level, rel=1e-6)
    reversed_order = path.crossing(lambda s: level - s.gen_error)
    assert float(reversed_order.t) == float(crossing.t)
    never = path.crossing("gen_error below", 0.0)
    assert not never.ok and never.status_name == "absent" and np.isnan(never.t) and "does not happen" in str(never)
    assert not path.crossing("m overtakes theta").ok  # the start has both of one size
    before = short(model, grid, (0.5, 0.3, 0.1))
    for event, value in (("gen_error below", 1.0), ("theta overtakes m", 0.0)):
        crossing = before.crossing(event, value)
        assert crossing.status_name == "absent" and "holds before the first time" in str(crossing)

    def time(eta, level):
        return short(model, grid, eta=eta).crossing("gen_error below", level).t

    slopes, step = jax.grad(time, (0, 1))(1.0, level), 1e-4
    by_eta = (time(1 + step, level) - time(1 - step, level)) / (2 * step)
    by_level = (time(1.0, level * (1 + step)) - time(1.0, level * (1 - step))) / (2 * step * level)
    np.testing.assert_allclose(slopes, [by_eta, by_level], rtol=1e-4)
    assert np.all(np.isfinite(jax.grad(lambda eta: jnp.nan_to_num(time(eta, 0.0)))(1.0)))


def test_statuses(model, grid):
    assert short(ta.DotProduct(omega=0.9), grid, (0.1, 0.01, 0.2), until=600.0, steps=64).status_name == "steady state"
    # Slow and short trajectories end near their start, which is not steady: an overlap grows.
    for start, options in (((0.05, 0.01, 0.003), {"eta": 1e-3, "until": 100.0}), (START, {"until": 1e-12})):
        path = short(ta.DotProduct(omega=0.1), grid, start, **options)
        assert path.status_name == "time over" and float(path.replicates.growth[0]) > 0
    lost = short(model, grid, eta=1e160)  # the losses are bounded: a trajectory blows up where eta^2 overflows
    assert lost.status_name == "blown up" and not lost.ok


def test_a_state_that_something_still_leaves_is_not_steady(grid):
    """On the plateau of m nothing moves, but a small overlap with the teacher grows."""
    layer = ta.DotProduct(omega=0.1)
    path = short(layer, grid, (0.05, 1e-9, 0.05), until=600.0, steps=64)
    first = indexed(path.replicates, 0)  # the grid that is not rotated has the symmetry of theta
    assert int(first.status) == ta.Status.max_steps and float(path.m[-1]) > 0.2
    assert float(first.remaining) < 0.01 and float(first.growth) * 600 > 1


def test_a_trajectory_continues(model, grid):
    one = short(model, ta.GaussHermite(6, replicates=1).rule(model))
    nodes = ta.GaussHermite(6, replicates=1).rule(model)
    two = short(model, nodes, short(model, nodes, until=6.0), until=6.0)
    for name in ("R", "Theta", "m", "risk"):
        assert float(getattr(two, name)[-1]) == pytest.approx(float(getattr(one, name)[-1]), rel=1e-7)


@pytest.mark.long
def test_steps_are_doubled_until_they_resolve_the_trajectory(model, grid):
    few, chosen = (short(model, grid, eta=10.0, steps=steps) for steps in (1, None))
    assert few.status_name.startswith("the steps") and chosen.ok
    assert float(chosen.replicates.step_error[0]) < 1e-5 < float(few.replicates.step_error[0])
    fine = short(model, grid, eta=10.0, steps=64)
    assert float(chosen.R[-1]) == pytest.approx(float(fine.R[-1]), rel=1e-4)


def test_single_precision(model, grid):
    single = ta.DotProduct(dtype=jnp.float32)
    path = short(single, ta.GaussHermite(6, replicates=2).rule(single))
    assert path.ok and path.R.dtype == jnp.float32
    np.testing.assert_allclose(path.R, short(model, grid).R, rtol=1e-5)


def test_starts_at_several_eigenvalues():
    """The start has the overlaps that were asked for, and at every atom a student exists that has its moments."""
    model, *_ = several(r=2, t=1)
    law = model.law()
    R, Theta, m = np.array([[0.6, 0.1], [0.1, 0.4]]), np.array([[0.2], [0.1]]), np.array([[0.1, 0.05], [0.02, 0.0]])
    s = flow.start_moments(model, (R, Theta, m))
    for expected, moments in ((R, s.R), (Theta, s.Theta), (m.T, s.M)):
        np.testing.assert_allclose(jnp.tensordot(law.weights, moments, 1), expected, atol=1e-12)
    known = np.concatenate([np.asarray(s.Theta), np.asarray(s.M)], 2)
    given = np.block([[np.asarray(law.pi), np.swapaxes(law.cross, 1, 2)], [np.asarray(law.cross), np.asarray(law.tau)]])
    gram = np.block([[np.asarray(s.R), known], [np.swapaxes(known, 1, 2), given]])
    assert np.min(np.linalg.eigvalsh(gram)) > -1e-10
    number = flow.start_moments(model, (0.5, 0.1, 0.1))
    assert float(jnp.tensordot(law.weights, number.M, 1)[1, 0]) == pytest.approx(0.1)


@pytest.mark.parametrize(("size", "R"), [(2e-4, 250.0), (0.0, 0.5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_small_encodings_keep_their_start(size, R, dtype):
    """The start has the overlaps that were asked for; those that no student has are refused."""
    model = ta.DotProduct(encodings=[[size], [-size]], dtype=dtype)
    s = flow.start_moments(model, (R, 0.01, 0.003 * bool(size)))
    np.testing.assert_allclose(s.M.ravel(), [0.003 * bool(size), -0.003 * bool(size)], rtol=1e-5)
    with pytest.raises(ta.InputError, match="R larger" if size else "zero with a zero encoding"):
        flow.start_moments(model, (0.05, 0.01, 0.003))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: ta.sgd(ta.ReLUAttention(), START, 1.0, 1.0), "without kinks"),
        (lambda m: ta.sgd(ta.DotProduct(penalty=ta.L1(0.01)), START, 1.0, 1.0), "no penalty"),
        (lambda m: ta.sgd(m, START, 0.0, 1.0), "eta must be positive"),
        (lambda m: ta.sgd(m, START, 1.0, -1.0), "until must be positive"),
        (lambda m: ta.sgd(m, START, 1.0, 1.0, kappa=-0.1), "kappa must be zero or positive"),
        (lambda m: ta.sgd(m, START, 1.0, 1.0, points=1), "points"),
        (lambda m: ta.sgd(m, START, 1.0, 1.0, steps=3), "steps must be a power of two"),
        (lambda m: ta.sgd(m, START, 1.0, 1.0, nodes=ta.Sobol(16).rule(ta.DotProduct(teacher=np.eye(2)))), "nodes"),
        (lambda m: ta.sgd(m, (0.04, 0.2, 0.1), 1.0, 1.0), "R larger than"),
        (lambda m: ta.sgd(m, (0.5, 0.2), 1.0, 1.0), "start must be"),
        (lambda m: ta.sgd(m, 0.5, 1.0, 1.0), "start must be"),
        (lambda m: ta.sgd(m, (0.5, 0.2, [[0.1], [0.1]]), 1.0, 1.0), "m_1 = -m_2"),
        (lambda m: ta.sgd(m, (0.5, [[0.2, 0.1]], 0.1), 1.0, 1.0), "Theta of shape"),
        (lambda m: ta.sgd(ta.DotProduct(rank=2), ([[0.5, 0.1], [0.2, 0.5]], 0.1, 0.1), 1.0, 1.0), "symmetric"),
    ],
)
def test_bad_input(model, build, message, unchecked):
    with pytest.raises(ta.InputError, match=message):
        build(model)


def test_unknown_events_are_refused(model, grid):
    with pytest.raises(ta.InputError, match="theta overtakes m"):
        short(model, grid).crossing("m vanishes")


@pytest.mark.long
def test_the_ridge_of_the_model_does_not_matter(model, grid):
    other = dataclasses.replace(model, lam=10 * model.lam)
    np.testing.assert_allclose(short(other, grid).R, short(model, grid).R, rtol=1e-12)
    assert float(short(model, grid, kappa=0.05).R[-1]) < float(short(model, grid).R[-1]) - 0.05


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
def test_growth_of_a_linear_flow(double):
    """The fastest growth is the largest real part of the eigenvalues, for any matrix and in any unit of time."""
    A, B = np.random.default_rng(0).normal(size=(2, 6, 6))
    turning, decaying, shear = A - A.T, -A @ A.T, np.triu(A, 1)
    with jax.enable_x64(double):
        dtype, accuracy = (np.float64, 1e-7) if double else (np.float32, 1e-3)
        for matrix in (A, turning, decaying, decaying + 30 * shear, A @ B, shear, A[:1, :1], np.zeros((2, 2))):
            for unit in (1.0, 1e-6, 1e6):
                growth, size = _fastest_growth(jnp.asarray(unit * matrix, dtype))
                expected = np.max(np.linalg.eigvals(matrix).real)
                np.testing.assert_allclose(size, unit * np.linalg.norm(matrix), rtol=1e-6)
                np.testing.assert_allclose(growth, unit * expected, atol=accuracy * max(float(size), 1e-30))
