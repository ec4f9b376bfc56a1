"""One-pass gradient descent: its equations by other routes, relations between trajectories, events and ends."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from hypothesis import Phase, given, settings, strategies as st
from scipy.integrate import solve_ivp
from simulated import runs_of, setting

import tiedattn_jax as ta
from tiedattn_jax.base.arrays import indexed
from tiedattn_jax.base.report import with_error
from tiedattn_jax.dynamics import crossings, flow
from tiedattn_jax.dynamics.sgd import CROSSINGS, _fastest_growth, _largest_change, _student
from tiedattn_jax.theory.observables import gen_error_in

START, D = (0.5, 0.15, 0.15), 6


def short(model, nodes=None, start=START, eta=1.0, until=12.0, kappa=0.005, **options):
    nodes = problems.rule("grid") if nodes is None else nodes
    return ta.dynamics.sgd(model, start, eta, until, kappa=kappa, nodes=nodes, **{"points": 5, "steps": 2, **options})


@pytest.fixture(scope="module")
def path(model):
    return short(model)


# The equations


def explicit(model, eta, kappa, order):
    """Equations for one column and opposite encodings, with the encodings' own fluctuation written out."""
    gradient = jax.jit(jax.vmap(jax.grad(model.loss), -1, -1))
    z, w = np.polynomial.hermite_e.hermegauss(order)
    w = w / w.sum()
    variance = float(model.sigma) ** 2
    index = np.indices((order,) * 4).reshape(4, -1)
    weight = np.prod(w[index], 0)
    Y, normals = np.sqrt(variance) * z[index].reshape(2, 2, -1)

    def velocity(R, Theta, m):
        h = Theta * Y + np.sqrt(R - Theta**2) * normals
        zs = h + np.array([[m], [-m]])
        u = np.asarray(gradient(zs[:, None], Y[:, None]))[:, 0]
        xi = m / (R - Theta**2) * np.sum(u * (h - Theta * Y), 0)
        return (
            -2 * eta * (weight @ np.sum(zs * u, 0) + kappa * R) + eta**2 * variance * (weight @ np.sum(u**2, 0)),
            -eta * (weight @ np.sum(u * Y, 0) + kappa * Theta),
            -eta * (weight @ (xi + u[0] - u[1]) + kappa * m),
        )

    return velocity


@eqx.filter_jit
def velocity(model, moments, nodes, eta, kappa, **changes):
    f = flow.forces(model, flow.overlaps_of(model, moments), nodes.replicate(0))
    f = f._replace(**{name: jax.tree.map(jnp.zeros_like, getattr(f, name)) for name in changes.get("without", ())})
    return flow.drift(model, moments, f, jnp.asarray(eta), jnp.asarray(kappa))


def test_the_equations_are_those_written_out(model):
    """Among them the term of the encodings' own fluctuation, which is part of a derivative here."""
    nodes = ta.GaussHermite(18, replicates=1, block=18**4).rule(model)
    v = velocity(model, flow.start_moments(model, (0.4, 0.3, 0.2)), nodes, 1.5, 0.02)
    expected = explicit(model, 1.5, 0.02, 18)(0.4, 0.3, 0.2)
    np.testing.assert_allclose([v.R[0, 0, 0], v.Theta[0, 0, 0], v.M[0, 0, 0]], expected, rtol=1e-5)


def test_a_trajectory_by_another_integrator(model, path):
    """The equations written out, integrated by scipy."""
    equations = explicit(model, 1.0, 0.005, 12)
    other = solve_ivp(lambda t, y: equations(*y), (0, 12), START, t_eval=path.t, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(np.stack([path.R, path.Theta, path.m]), other.y, rtol=1e-4)


def classes():
    shares = {(0, 0): 0.3, (1, 1): 0.3, (0, 1): 0.2, (1, 0): 0.2}
    rng = np.random.default_rng(1)
    means, encodings = rng.standard_normal((2, 2, D)) / D**0.5
    Sigma, teacher = rng.uniform(0.1, 0.5, (2, D)), rng.standard_normal((D, 1))
    law = ta.SpectralLaw.from_matrices(Sigma, encodings, teacher, means=means, sentences=shares)
    return ta.DotProduct(spectrum=law), Sigma, np.concatenate([encodings, means]), teacher


def several(r=2, t=1):
    rng = np.random.default_rng(2)
    encodings, Sigma = rng.standard_normal((2, D)) / D**0.5, rng.uniform(0.1, 0.5, (2, D))
    teacher = rng.standard_normal((D, t))
    law = ta.SpectralLaw.from_matrices(Sigma, encodings, teacher)
    return ta.DotProduct(spectrum=law, rank=r), Sigma, encodings, teacher


def in_atoms(law, teacher):
    """The coordinates in the order of the atoms, which are told apart by the teacher's entries."""
    atom_of = [int(np.argmin(np.abs(np.asarray(law.pi)[:, 0, 0] - q**2))) for q in teacher[:, 0]]
    assert sorted(atom_of) == list(range(D))
    return np.argsort(atom_of)


@pytest.mark.parametrize("build", [several, pytest.param(classes, marks=pytest.mark.full)])
def test_the_mean_step_is_the_gradient_of_the_test_error_in_the_weights(build):
    """The other route: entries of a student in six dimensions, each an atom of its own, descend by their gradient."""
    model, _, encodings, teacher = build()
    nodes, order = ta.Sobol(2**9, replicates=1, block=2**9).rule(model), in_atoms(model.law(), teacher)
    Q, tau = np.random.default_rng(3).standard_normal((D, model.shape[1])), np.sqrt(D) * encodings

    @jax.jit
    def moments(Q):
        return flow.Moments(*(jnp.einsum("ia,ib->iab", Q, b)[order] for b in (Q, teacher, tau.T)))

    def objective(Q):
        error = gen_error_in(model, flow.overlaps_of(model, moments(Q)), nodes.replicate(0))
        return error + 0.01 * jnp.sum(Q**2) / D

    Q = jnp.asarray(Q)
    expected = jax.jit(lambda Q: jax.jvp(moments, (Q,), (-D * jax.grad(objective)(Q),))[1])(Q)
    v = velocity(model, moments(Q), nodes, 1.0, 0.02, without=("noise",))
    for a, b in zip(jax.tree.leaves(v), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)


def test_the_noise_is_that_of_every_eigenvalue():
    """Steps of a random student in six dimensions: the mean square of the random part of a step, by sampling."""
    model, Sigma, encodings, teacher = several(r=1)
    nodes, rng = ta.Sobol(2**12, replicates=1, block=2**12).rule(model), np.random.default_rng(5)
    Q, x = rng.standard_normal((D, 1)), rng.standard_normal((2**14, *Sigma.shape)) * np.sqrt(Sigma)
    order = in_atoms(model.law(), teacher)
    arrays = (np.einsum("ia,ib->iab", Q, b)[order] for b in (Q, teacher, np.sqrt(D) * encodings.T))
    noise = velocity(model, flow.Moments(*map(jnp.asarray, arrays)), nodes, 1.0, 0.0, without=("gradient",)).R[:, 0, 0]
    gradient = jax.jit(jax.vmap(jax.grad(model.loss)))
    u = np.asarray(gradient((x + encodings) @ Q / D**0.5, x @ teacher / D**0.5)[..., 0])
    sampled = np.mean(u**2, 0) @ Sigma
    np.testing.assert_allclose(noise, sampled[order], rtol=0.05)
    assert np.max(sampled) > 1.3 * np.min(sampled)


def test_a_student_in_six_dimensions():
    """Its numbers are those of its weights, of which every coordinate is an atom."""
    rng = np.random.default_rng(0)
    Sigma, teacher = rng.uniform(0.1, 0.5, (2, D)), rng.standard_normal((D, 2))
    encodings, Q = rng.standard_normal((2, D)) / D**0.5, rng.standard_normal((D, 3))
    law = ta.SpectralLaw.from_matrices(Sigma, encodings, teacher)
    model = ta.DotProduct(spectrum=law, rank=3)
    arrays = (np.einsum("ia,ib->iab", Q, b)[in_atoms(law, teacher)] for b in (Q, teacher, D**0.5 * encodings.T))
    student = eqx.filter_jit(_student)(
        model, flow.Moments(*map(jnp.asarray, arrays)), jnp.asarray(0.3), jnp.asarray(0.2)
    )
    expected = {
        "R": Q.T @ Q / D,
        "Theta": Q.T @ teacher / D,
        "m": encodings @ Q / D**0.5,
        "q": np.einsum("ia,li,ib->lab", Q, Sigma, Q) / D,
        "theta": np.einsum("ia,li,ib->lab", Q, Sigma, teacher) / D,
        "gen_error": 0.3,
        "risk": 0.3 + 0.1 * np.trace(Q.T @ Q / D),
    }
    for name, vectors in (("along_teacher", teacher), ("along_encodings", encodings.T)):
        basis = np.linalg.qr(vectors)[0]
        expected[name] = np.sum((basis.T @ Q) ** 2) / D
    assert set(expected) == set(vars(student))
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(student, name), value, rtol=1e-10, err_msg=name)
    # A change of the moments counts relative to the lengths of student, teacher and encodings.
    relative = eqx.filter_jit(_largest_change)
    moments = [np.full((D, 3, n), size) for n, size in ((3, 4.0), (2, 1.0), (2, 1.0))]
    for k, size in enumerate(np.max(np.abs(a)) ** 0.5 for a in (moments[0], law.pi, law.tau)):
        change = [0 * a for a in moments]
        change[k][2, 1, 0] = -0.7
        found = relative(*(flow.Moments(*map(jnp.asarray, a)) for a in (change, moments)), law)
        assert float(found) == pytest.approx(0.7 / (2 * size), rel=1e-12)


def test_starts_at_several_eigenvalues():
    """The start has the overlaps that were asked for, and at every atom a student exists that has its moments."""
    model, *_ = several(r=2, t=1)
    law = model.law()
    R, Theta, m = np.array([[0.6, 0.1], [0.1, 0.4]]), np.array([[0.2], [0.1]]), np.array([[0.1, 0.05], [0.02, 0.0]])
    s = flow.start_moments(model, (R, Theta, m))
    for expected, moments in ((R, s.R), (Theta, s.Theta), (m.T, s.M)):
        np.testing.assert_allclose(np.tensordot(law.weights, moments, 1), expected, atol=1e-12)
    known = np.concatenate([np.asarray(s.Theta), np.asarray(s.M)], 2)
    given = np.block([[np.asarray(law.pi), np.swapaxes(law.cross, 1, 2)], [np.asarray(law.cross), np.asarray(law.tau)]])
    gram = np.block([[np.asarray(s.R), known], [np.swapaxes(known, 1, 2), given]])
    assert np.min(np.linalg.eigvalsh(gram)) > -1e-10
    number = flow.start_moments(model, (0.5, 0.1, 0.1))
    assert np.tensordot(law.weights, number.M, 1)[1, 0] == pytest.approx(0.1)


@pytest.mark.parametrize(("size", "R", "dtype"), [(2e-4, 250.0, jnp.float64), (0.0, 0.5, jnp.float32)])
def test_small_encodings_keep_their_start(size, R, dtype):
    """The start has the overlaps that were asked for; those that no student has are refused."""
    model = ta.DotProduct(encodings=[[size], [-size]], dtype=dtype)
    s = flow.start_moments(model, (R, 0.01, 0.003 * bool(size)))
    np.testing.assert_allclose(s.M.ravel(), [0.003 * bool(size), -0.003 * bool(size)], rtol=1e-5)
    with pytest.raises(ta.InputError, match="R larger" if size else "zero with a zero encoding"):
        flow.start_moments(model, (0.05, 0.01, 0.003))


# Relations

DRAWN = settings(max_examples=5, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
STARTS = st.tuples(st.floats(0.3, 0.8), st.floats(-0.3, 0.3), st.floats(-0.3, 0.3))


def numbers(path):
    """Moments and error at all times in every replicate."""
    s = path.replicates.moments
    return s.R, s.Theta, s.M, path.replicates.student.gen_error


@DRAWN
@given(STARTS, st.sampled_from([(1, -1), (-1, 1), (-1, -1)]), st.floats(0.25, 0.4))
def test_the_mirrored_student(start, signs, omega):
    """A grid has the parity of the loss: students that differ in the signs of Theta or m stay mirrored.

    So it is in the first replicate, whose grid is not rotated.
    """
    (R, Theta, m), (s, p), model = start, signs, ta.DotProduct(omega)
    mirrored, expected = short(model, start=(R, s * Theta, p * m)), short(model, start=start)
    for a, b, factor in zip(numbers(mirrored), numbers(expected), (1, s, p, 1), strict=True):
        np.testing.assert_allclose(a[0], factor * b[0], rtol=1e-9, atol=1e-12)


def test_events_are_opposite():
    """Where the one projection overtakes the other, their order has changed; the opposite event is not there."""
    student = short(ta.DotProduct(omega=0.9), start=(0.5, 0.2, 0.15), until=60.0)
    larger = np.asarray(student.mean.along_encodings > student.mean.along_teacher)
    time = float(student.crossing("m overtakes theta").t)
    np.testing.assert_array_equal(larger, np.asarray(student.t) > time)
    assert not larger[0] and larger[-1] and np.isnan(student.crossing("theta overtakes m").t)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sgd", "emergence"])
def test_error_bars_are_the_scatter_over_seeds(kind):
    """Error bars of four replicates agree with the scatter of their means over eight seeds, within a factor of 3."""
    model, ends = ta.DotProduct(), []
    for seed in range(8):
        nodes = ta.Sobol(2**8, seed=seed, replicates=4).rule(model)
        if kind == "sgd":
            s = short(model, nodes).replicates.moments
            ends.append(jnp.stack([a[:, -1].ravel() for a in (s.R, s.Theta, s.M[..., :1])], 1))
        else:
            run = ta.dynamics.emergence(model, 0.5, 1.0, 12.0, nodes=nodes, points=5, steps=1).replicates.fluctuations
            ends.append(jnp.stack([run.encodings[:, -1], run.teacher[:, -1], run.R[:, -1, 0, 0]], 1))
    bars = np.sqrt(np.mean([ta.results.error_bar(e) ** 2 for e in ends], 0))
    scatter = np.std([np.mean(e, 0) for e in ends], 0, ddof=1)
    assert np.all(scatter > 1e-6) and np.all((bars / scatter > 1 / 3) & (bars / scatter < 3)), (bars, scatter)


@pytest.mark.full
def test_rotations_of_two_columns():
    two, rotation = several(r=2)[0], np.array([[0.6, 0.8], [-0.8, 0.6]])
    R, Theta, m = np.array([[0.6, 0.1], [0.1, 0.4]]), np.array([[0.2], [0.1]]), np.array([0.1, -0.05])
    nodes = ta.Sobol(2**10, replicates=2, block=2**10).rule(two)
    first = short(two, nodes, (R, Theta, m))
    turned = short(two, nodes, (rotation @ R @ rotation.T, rotation @ Theta, rotation @ m))
    assert first.R.shape == (5, 2, 2) and first.m.shape == (5, 2, 2) and first.Theta.shape == (5, 2, 1)
    np.testing.assert_allclose(turned.R[-1], rotation @ first.R[-1] @ rotation.T, rtol=0.02, atol=2e-3)
    np.testing.assert_allclose(turned.m[-1], first.m[-1] @ rotation.T, atol=2e-3)
    assert np.max(np.abs(first.R[-1] - first.R[0])) > 0.02


def end(eta, kappa, omega, R, until, nodes):
    path = short(ta.DotProduct(omega=omega), nodes, (R, 0.15, 0.15), eta, until, kappa)
    return path.R[-1] + path.Theta[-1] + path.m[-1] + 100 * path.risk[-1]


@pytest.mark.full
@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_derivatives_in_everything(derivative):
    at, step = (1.0, 0.005, 0.3, 0.5, 12.0), 1e-4
    grid = problems.rule("grid")
    slopes = jax.jit(derivative(end, range(5)))(*at, grid)
    for k, slope in enumerate(slopes):
        sides = [end(*(a + s * step * (i == k) for i, a in enumerate(at)), grid) for s in (1, -1)]
        assert float(slope) == pytest.approx(float(sides[0] - sides[1]) / (2 * step), rel=1e-5), k


@pytest.mark.full
def test_many_rates_in_one_call(model):
    etas = jnp.array([0.5, 1.0, 2.0])
    paths = jax.jit(jax.vmap(lambda eta: short(model, eta=eta)))(etas)
    each = [short(model, eta=eta) for eta in etas]
    np.testing.assert_allclose(paths.R, [p.R for p in each], rtol=1e-10)
    np.testing.assert_allclose(paths.stderr.gen_error, [p.stderr.gen_error for p in each], rtol=1e-6)
    assert paths.status_name == ["time over"] * 3
    times = paths.crossing("gen_error below", level := 0.00395)
    np.testing.assert_allclose(times.t, [p.crossing("gen_error below", level).t for p in each], rtol=1e-8)
    assert times.t.shape == (3,) and "Trajectory" in repr(paths)


def test_times_of_events(model, path):
    level = float(np.mean(path.gen_error[2:4]))
    crossing = path.crossing("gen_error below", level)
    assert crossing.ok and path.t[2] < crossing.t < path.t[3] and "gen_error below" in str(crossing)
    at_that_time = short(model, until=float(crossing.t))
    assert float(at_that_time.gen_error[-1]) == pytest.approx(level, rel=1e-5)
    assert float(path.crossing(lambda s: level - s.gen_error).t) == float(crossing.t)
    never = path.crossing("gen_error below", 0.0)
    assert not never.ok and never.status_name == "absent" and np.isnan(never.t) and "does not happen" in str(never)
    assert not path.crossing("m overtakes theta").ok  # the start has both of one size
    before = short(model, start=(0.5, 0.3, 0.1))
    for event, value in (("gen_error below", 1.0), ("theta overtakes m", 0.0)):
        crossing = before.crossing(event, value)
        assert crossing.status_name == "absent" and "holds before the first time" in str(crossing)
    with pytest.raises(ta.InputError, match="theta overtakes m"):
        path.crossing("m vanishes")


@pytest.mark.full
def test_derivatives_of_times_of_events(model):
    def time(eta, level):
        return short(model, eta=eta).crossing("gen_error below", level).t

    level, step = float(np.mean(short(model).gen_error[2:4])), 1e-4
    slopes = jax.grad(time, (0, 1))(1.0, level)
    by_eta = (time(1 + step, level) - time(1 - step, level)) / (2 * step)
    by_level = (time(1.0, level * (1 + step)) - time(1.0, level * (1 - step))) / (2 * step * level)
    np.testing.assert_allclose(slopes, [by_eta, by_level], rtol=1e-4)
    assert np.all(np.isfinite(jax.grad(lambda eta: jnp.nan_to_num(time(eta, 0.0)))(1.0)))


@pytest.mark.full
def test_statuses(model):
    """On the plateau of m nothing moves, but a small overlap with the teacher grows: that is not steady."""
    layer = ta.DotProduct(omega=0.1)
    assert short(ta.DotProduct(omega=0.9), start=(0.1, 0.01, 0.2), until=600.0, steps=64).status_name == "steady state"
    plateau = short(layer, start=(0.05, 1e-9, 0.05), until=600.0, steps=64)
    first = indexed(plateau.replicates, 0)  # the grid that is not rotated has the symmetry of theta
    assert int(first.status) == ta.Status.max_steps and float(plateau.m[-1]) > 0.2
    assert float(first.remaining) < 0.01 and float(first.growth) * 600 > 1
    # Slow and short trajectories end near their start, which is not steady: an overlap grows.
    for start, options in (((0.05, 0.01, 0.003), {"eta": 1e-3, "until": 100.0}), (START, {"until": 1e-12})):
        path = short(layer, start=start, **options)
        assert path.status_name == "time over" and float(path.replicates.growth[0]) > 0
    lost = short(model, eta=1e160)  # the losses are bounded: a trajectory blows up where eta^2 overflows
    assert lost.status_name == "blown up" and not lost.ok


def test_a_trajectory_continues(model, path):
    """Every replicate at its own end, so that the error bars are those of one run; and a failure remains one."""

    def numbers(path):
        parts = [np.asarray(getattr(s, name)) for name in ("R", "Theta", "risk") for s in (path.mean, path.stderr)]
        return [a.ravel()[-1] for a in parts]

    first = short(model, until=6.0)
    np.testing.assert_allclose(numbers(short(model, start=first, until=6.0)), numbers(path), rtol=1e-4)
    lost = eqx.tree_at(lambda p: p.replicates.status, first, first.replicates.status.at[1].set(ta.Status.unresolved))
    assert not short(model, start=lost, until=6.0).ok
    with pytest.raises(ta.InputError, match="start must be a trajectory of 1 replicates"):
        short(model, ta.GaussHermite(6, replicates=1), first)
    with pytest.raises(ta.InputError, match="start must be a trajectory of a model of the same shapes"):
        ta.dynamics.sgd(ta.DotProduct(rank=2), first, 1.0, 1.0)


@pytest.mark.full
def test_there_are_more_steps_until_they_resolve_the_trajectory(model):
    few, chosen = (short(model, eta=10.0, points=7, steps=steps) for steps in (1, None))
    assert few.status_name.startswith("the steps") and chosen.ok
    assert float(chosen.replicates.step_error[0]) < 1e-5 < float(few.replicates.step_error[0])
    fine = short(model, eta=10.0, points=7, steps=64)
    assert float(chosen.R[-1]) == pytest.approx(float(fine.R[-1]), rel=1e-4)


@pytest.mark.full
def test_single_precision(path):
    model = ta.DotProduct(dtype=jnp.float32)
    single = short(model, ta.GaussHermite(8, replicates=2).rule(model))
    assert single.ok and single.R.dtype == jnp.float32
    np.testing.assert_allclose(single.R, path.R, rtol=1e-5)


@pytest.mark.full
def test_the_ridge_of_the_model_does_not_matter(model, path):
    np.testing.assert_allclose(short(ta.DotProduct(lam=10 * model.lam)).R, path.R, rtol=1e-12)
    assert float(short(model, kappa=0.05).R[-1]) < float(path.R[-1]) - 0.05


@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.full)], ids=["float64", "float32"])
def test_growth_of_a_linear_flow(double):
    """The fastest growth is the largest real part of the eigenvalues, for any matrix and in any unit of time."""
    A, B = np.random.default_rng(0).normal(size=(2, 6, 6))
    turning, decaying, shear = A - A.T, -A @ A.T, np.triu(A, 1)
    with jax.enable_x64(double):
        dtype, accuracy, growth_of = (
            *((np.float64, 1e-7) if double else (np.float32, 1e-3)),
            jax.jit(_fastest_growth),
        )
        for matrix in (A, turning, decaying, decaying + 30 * shear, A @ B, shear, A[:1, :1], np.zeros((2, 2))):
            for unit in (1.0, 1e-6, 1e6):
                growth, size = growth_of(np.asarray(unit * matrix, dtype))
                expected = np.max(np.linalg.eigvals(matrix).real)
                np.testing.assert_allclose(size, unit * np.linalg.norm(matrix), rtol=1e-6)
                np.testing.assert_allclose(growth, unit * expected, atol=accuracy * max(float(size), 1e-30))


# Events, ends and texts


@pytest.mark.full
def test_the_error_of_the_steps_is_that_of_half_as_many(model, path):
    """It is the difference to a run with half as many steps, over 15, relative to the lengths; most lengths are one."""

    def moments(path, stride=1):
        return [np.asarray(a[0, ::stride]) for a in jax.tree.leaves(path.replicates.moments)]

    single, few = short(model, steps=1), short(model, points=3, steps=1)
    for fine, rough, stride in ((path, single, 1), (single, few, 2)):
        size = np.max(np.abs(moments(rough)[0]), (1, 2, 3)) ** 0.5
        gaps = [np.max(np.abs(a - b), (1, 2, 3)) for a, b in zip(moments(fine, stride), moments(rough), strict=True)]
        expected = max(np.max(gap / (size * other)) for gap, other in zip(gaps, (size, 1.0, 1.0), strict=True)) / 15
        np.testing.assert_allclose(fine.replicates.step_error[0], expected, rtol=1e-6)


def test_rates_are_derivatives_in_time(model, path):
    """The rate of every number of the student is its derivative; here that of a parabola through three times."""
    brief = short(model, start=path, until=0.02).replicates
    values, rates = brief.student, brief.rate
    for name, a in vars(values).items():
        middle = (np.asarray(a)[:, 3] - np.asarray(a)[:, 1]) / 0.01
        np.testing.assert_allclose(np.asarray(getattr(rates, name))[:, 4], middle, rtol=1e-4, atol=1e-9, err_msg=name)


def test_the_root_of_a_cubic():
    """The time of an event is exact for a cubic, the first of several; what is rounding is not below zero."""
    first_root, t = jax.jit(crossings._first_root), np.linspace(1.0, 4.0, 7)
    roots = 2.2, 3.1, 3.7
    f = (t - roots[0]) * (t - roots[1]) * (t - roots[2])
    slope = sum((t - a) * (t - b) for a, b in ((roots[0], roots[1]), (roots[0], roots[2]), (roots[1], roots[2])))
    assert float(first_root(f, slope, t)) == pytest.approx(2.2, rel=1e-9)
    assert float(first_root(-f, -slope, t)) == pytest.approx(3.1, rel=1e-9)
    assert np.isnan(first_root(-np.ones(7), np.zeros(7), t))
    # A cubic that rises above zero and falls again between two times, or does not quite get there.
    hill, fall = -((t - 2.2) ** 2) * (1 + 0.1 * t), -2 * (t - 2.2) * (1 + 0.1 * t) - 0.1 * (t - 2.2) ** 2
    for top, root in ((1e-4, 2.2 - (1e-4 / 1.22) ** 0.5), (-1e-4, np.nan)):
        np.testing.assert_allclose(first_root(top + hill, fall, t), root, rtol=1e-5)
    for start, happens in ((0.0, False), (-1e-15, False), (-1e-14, True), (1e-13, False)):
        for size in (1.0, 1e3):
            line = size * np.array([start, *np.arange(1.0, 7) / 6])
            assert bool(np.isfinite(first_root(line, size * np.full(7, 1 / 3), t))) == happens
    # Many times in single precision, some of which fall on the event; and a growth long after it.
    many, starts = np.linspace(0, 1, 25_601, dtype=np.float32), np.linspace(0.3, 0.7, 50, dtype=np.float32)
    roots = jax.vmap(lambda t0: first_root((many - t0) / 10, np.full_like(many, 0.1), many))(starts)
    np.testing.assert_allclose(roots, starts, atol=1e-5)
    late = np.linspace(0, 40, 4_001)
    growth = 1e-4 * np.exp(late)
    assert float(first_root(growth - 0.1, growth, late)) == pytest.approx(np.log(1e3), rel=1e-6)
    small = np.array([-0.5, 0.5, *[0.7] * 5])  # an end below one counts
    assert float(first_root(small, np.full(7, 2.0), t)) == pytest.approx(1.25, rel=1e-9)


def test_events_of_a_student(path):
    """The level of an event is what is to be crossed; by default there is none."""
    student = eqx.tree_at(
        lambda s: (s.along_teacher, s.along_encodings, s.risk, s.gen_error),
        jax.tree.map(lambda a: a[0, 0], path.replicates.student),
        (0.5, 0.2, 0.7, 0.6),
    )
    expected = {"theta overtakes m": 0.2, "m overtakes theta": -0.4, "risk below": -0.6, "gen_error below": -0.5}
    assert {name: round(float(f(student, 0.1)), 9) for name, f in CROSSINGS.items()} == expected
    level = float(np.mean(path.risk[2:4]))
    assert path.crossing("risk below", level).event == f"risk below {level:g}"
    assert not path.crossing("risk below").ok and not path.crossing(lambda s: s.risk - 1e9).ok


def test_a_trajectory_as_text(path):
    """There is a line for every number of the end, with its meaning. Overlaps of a vanishing share are zero."""
    head, *rows = str(path).splitlines()
    assert head == "One-pass SGD, eta = 1, kappa = 0.005, at t = 12: time over"
    names = {"R": "size of the student", "Theta": "overlap with the teacher", "m": "overlap with the encodings",
             "gen_error": "test error", "risk": "objective"}  # fmt: skip
    for row, (name, words) in zip(rows, names.items(), strict=False):
        bar = path.reduced(path.stderr)[name][-1]
        assert row.split() == [name, with_error(getattr(path, name)[-1], bar), *words.split()]
    error = f"{np.max(path.replicates.step_error):.0e}"
    assert rows[5].split() == ["step", "error", error, *"of the integration, relative".split()]
    R = path.replicates.student.R[..., 0, 0]
    for share, shown in ((0.9e-18, True), (1.1e-18, False)):
        lost = eqx.tree_at(lambda s: s.replicates.student.along_teacher, path, share * R)
        assert (str(lost).splitlines()[2].split()[:2] == ["Theta", "0"]) == shown
    larger = path.replicates.every.along_encodings * np.array([0.5] * 4 + [2.0] * 5)
    event = eqx.tree_at(lambda s: s.replicates.every.along_teacher, path, larger)
    crossing = event.crossing("theta overtakes m")
    assert 3 < crossing.t < 6 and not event.crossing("m overtakes theta").ok
    words = f"theta overtakes m at t = {with_error(crossing.t, crossing.stderr)}"
    assert str(event).splitlines()[-1].split() == words.split() and len(str(event).splitlines()) == 8


@pytest.mark.parametrize("status", ["converged", "max_steps", "nonfinite", "unresolved"])
def test_how_a_trajectory_ended(path, status):
    words = {"converged": "steady state", "max_steps": "time over", "nonfinite": "blown up"}
    other = eqx.tree_at(lambda s: s.replicates.status, path, np.full(2, int(ta.Status[status])))
    assert other.status_name == words.get(status, "the steps do not resolve it: pass more `steps`")
    assert other.ok == (status in ("converged", "max_steps"))
    crossing = other.crossing("risk below", float(np.mean(path.risk[2:4])))
    assert crossing.status_name == ("converged" if other.ok else "imprecise") and crossing.t > 0


def test_full_arrays_where_there_are_several_numbers(path):
    """For two tokens and rank one the curves are numbers, those of the first token; else they are arrays."""
    student = path.replicates.student
    assert path.R.shape == path.m.shape == path.q.shape == (5,)
    np.testing.assert_array_equal(path.m, np.mean(student.m[..., 0, 0], 0))
    np.testing.assert_array_equal(path.theta, np.mean(student.theta[..., 0, 0, 0], 0))
    for m, theta in (((3, 1), 1), ((2, 2), 1), ((2, 1), 2)):
        wide = eqx.tree_at(lambda s: (s.m, s.Theta), student, (np.ones((5, *m)), np.ones((5, 1, theta))))
        assert path.reduced(wide)["m"].shape == (5, *m) and path.reduced(wide)["R"].shape == student.R.shape


# Reference numbers and sampled sentences


@pytest.mark.full
def test_the_end_point():
    """Reference values with 18 nodes per dimension and another integrator."""
    path = ta.dynamics.sgd(ta.DotProduct(omega=0.3), START, 1.0, 60.0, kappa=0.005)
    ends = [np.asarray(a)[-1] for a in (path.R, path.Theta, path.m)]
    np.testing.assert_allclose(ends, (0.242818, 0.208423, 0.095756), atol=1e-5)
    assert path.status_name == "time over" and path.ok and path.t.shape == (101,)
    assert np.max(path.replicates.step_error) < 1e-7
    for name in ("R", "Theta", "m"):
        assert 0 < np.asarray(path.reduced(path.stderr)[name])[-1] < 1e-4, name
    np.testing.assert_allclose(path.q, 0.25 * path.R, rtol=1e-12)
    np.testing.assert_allclose(path.theta, 0.25 * path.Theta, rtol=1e-12)
    np.testing.assert_allclose(path.risk, path.gen_error + 0.0025 * path.R, rtol=1e-12)
    np.testing.assert_allclose([path.R[0], path.Theta[0], path.m[0]], START, rtol=1e-12)
    json.dumps(path.to_dict())


@pytest.mark.full
def test_position_first_meaning_later():
    path = ta.dynamics.sgd(ta.DotProduct(omega=0.1), (0.05, 0.003, 0.003), 1.0, 2400.0, kappa=0.005)
    plateau = np.asarray(path.m)[(path.t >= 160) & (path.t <= 720)]
    assert np.all((plateau > 0.245) & (plateau < 0.259))
    ends = float(path.R[-1]), float(path.Theta[-1]), float(path.m[-1])
    np.testing.assert_allclose(ends, (0.6697, 0.8181, 0.0), atol=1e-4)
    switch = path.crossing("theta overtakes m")
    assert switch.ok and 900 < float(switch.t) < 1200 and path.status_name == "steady state"
    assert "theta overtakes m" in str(path)


def agree(path, means, errors, every):
    theory = np.stack([path.R, path.Theta, path.m], 1)[every::every]
    deviations = (means - theory) / errors
    assert np.all(np.abs(deviations) < 3.5) and np.sqrt(np.mean(deviations**2)) < 1.8, deviations


@pytest.mark.full
@pytest.mark.parametrize("eigenvalues", [((0.25, 0.25),), ((0.1, 0.15), (0.5, 0.3))], ids=["one", "several"])
def test_sampled_sentences(eigenvalues):
    case = setting(240, eigenvalues, omega=0.3)
    means, errors = runs_of(case, START, 3.0, 0.005, 12.0, 4, runs=24)
    path = ta.dynamics.sgd(case[0], START, 3.0, 12.0, kappa=0.005, points=9)
    agree(path, means, errors, 2)
    assert np.max(errors) < 0.02


@pytest.mark.full
def test_sampled_sentences_of_five_hundred_dimensions():
    case = setting(500, omega=0.3)
    means, errors = runs_of(case, START, 1.0, 0.005, 57.0, 6, runs=16)
    agree(ta.dynamics.sgd(case[0], START, 1.0, 57.0, kappa=0.005, points=61), means, errors, 10)
