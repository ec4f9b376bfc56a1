import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Tempered, state
from made import overlaps_of

import tiedattn_jax as ta
from tiedattn_jax.averages import moreau, prox as prox_module
from tiedattn_jax.averages.moreau import ProxProblem
from tiedattn_jax.averages.rules import fields
from tiedattn_jax.base import arrays, nodewise

pytestmark = pytest.mark.usefixtures("fast_compilation")


prox, energy_of, gradient = map(jax.jit, (prox_module.prox, ProxProblem.energy, ProxProblem.gradient))


@jax.jit
def descend(problem, start, h):
    """Run Newton's method from one start at all nodes."""
    return prox_module.descend(problem, jnp.broadcast_to(start[:, None, None], h.shape), h, 1e-7)


def problem_of(model, nodes, case, size=4096):
    """The proximal problem of a reference state, and the student's fields."""
    x = state(case)
    h, y = fields(model, x, nodes.stack.student[0, ..., :size], nodes.stack.teacher[0, ..., :size])
    return ProxProblem(model, x.V, y), h


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.branch} {c.alpha}")
def test_global_minimum_against_brute_force(model, nodes, case):
    problem, h = problem_of(model, nodes, case)
    minima = prox(problem, h)
    assert bool(jnp.all(minima.converged))
    energy = np.asarray(energy_of(problem, minima.z, h))
    best = np.full(energy.shape, np.inf)
    for a in np.linspace(-2.4, 2.4, 6):
        for b in np.linspace(-2.4, 2.4, 6):
            _, e, converged = descend(problem, jnp.array([a, b]), h)
            best = np.minimum(best, np.where(converged, e, np.inf))
    assert np.all(np.isfinite(best))
    assert np.mean(energy > best + 1e-11) <= 1e-4
    assert float(jnp.max(jnp.abs(gradient(problem, minima.z, h)))) < 1e-12


LARGE = (0.32, 1.34, 1e-4, ((0.92, 0.08), (0.11, 0.89)))


@pytest.mark.parametrize(
    ("numbers", "q", "V"), [(LARGE, 6.0, 24.0), ((0.196, 2.08, 6e-4, ((0.38, 0.62), (0.56, 0.44))), 43.8, 14.7)]
)
def test_the_minima_of_a_large_student_are_found(numbers, q, V):
    """`prox` misses the global minimum at less than .2 % of the nodes if large fields saturate the softmax.

    Starts at the fields and at the wells alone would miss it at 3 % or 12 % of the nodes.
    """
    model = ta.DotProduct(*numbers)
    x = overlaps_of(q, V)
    replicate = ta.Sobol(2**10, replicates=1).rule(model).replicate(0)
    h, y = fields(model, x, replicate.student, replicate.teacher)
    best, problem = jnp.full(h.shape[-1], jnp.inf), ProxProblem(model, x.V, y)
    for start in np.stack(np.meshgrid(*[np.linspace(-1.3, 1.3, 9) * q**0.5] * 2), -1).reshape(-1, 2):
        _, energy, converged = descend(problem, jnp.asarray(start), h)
        best = jnp.minimum(best, jnp.where(converged, energy, jnp.inf))
    above_best = energy_of(problem, prox(problem, h).z, h) > best + 1e-6
    assert float(jnp.mean(above_best)) < 2e-3


@pytest.mark.parametrize("model", [ta.UntiedDotProduct(0.3), ta.DotProduct(0.3, rank=2, teacher=np.eye(2))])
def test_starts_of_large_columns_are_left_out_only_where_they_find_nothing_lower(model):
    """Starts left out for large columns lose the minimum at less than .2 % of the nodes, compared with all starts.

    With the cost of both columns as the bound, .9 % of the nodes of untied weights would lose it.
    """
    L, r, t = model.shape
    keys, V = jax.random.split(jax.random.key(0)), jnp.broadcast_to(20.0 * jnp.eye(r), (L, r, r))
    h, y = 2**0.5 * jax.random.normal(keys[0], (L, r, 1024)), 0.5 * jax.random.normal(keys[1], (L, t, 1024))
    problem = ProxProblem(model, V, y)
    chosen, complete = (
        energy_of(problem, prox(problem, h, starts).z, h) for starts in (None, prox_module._flips(model, h))
    )
    assert float(jnp.mean(chosen > complete + 1e-9)) < 2e-3


def test_newton_descends(model, nodes):
    """Newton's method never ends above its start, and `proximal` finishes every start without refinement."""
    problem, h = problem_of(model, nodes, CASES[4])
    for a, b in ((0.3, -0.2), (1.2, -1.2), (-0.8, 0.1), (0.05, 0.0)):
        start = jnp.array([a, b])
        before = energy_of(problem, jnp.broadcast_to(start[:, None, None], h.shape), h)
        _, after, converged = descend(problem, start, h)
        assert bool(jnp.all(converged)) and float(jnp.max((after - before)[converged])) <= 1e-12
    problem, h = problem_of(model, nodes, CASES[1])
    z, converged = jax.jit(prox_module.proximal)(problem, h)
    assert bool(jnp.all(converged))
    np.testing.assert_allclose(z, prox(problem, h).z, atol=1e-9)


class Paraboloid(ta.DotProduct):
    """The loss ``|Z|^2 / 2``."""

    def loss(self, Z, Y):
        return 0.5 * jnp.sum(Z**2)


def test_axis_of_the_double_well(model, nodes):
    y = problem_of(model, nodes, CASES[0], 64)[0].y.at[..., 0].set(0.0)
    # At y = 0 the Hessian of a purely semantic target is zero; that of a paraboloid is the same along all axes.
    for layer in (model, ta.DotProduct(omega=0.0), Paraboloid(**vars(model))):
        axis = prox_module.well_axis(layer, y, 1, 32)
        np.testing.assert_allclose(jnp.sum(axis**2, (0, 1)), 1, rtol=1e-12)
        hessian = moreau.expansion_at_nodes(layer, 0 * axis, y)[2]
        flat = axis.reshape(2, -1)
        curvature = jnp.einsum("in,ijn,jn->n", flat, hessian, flat)
        n = np.moveaxis(np.asarray(hessian), -1, 0)
        np.testing.assert_allclose(curvature, np.linalg.eigvalsh(n)[:, 0], rtol=1e-3, atol=1e-9)


def test_derivatives_are_those_of_differences(model, nodes):
    def solve(p):
        return prox(*p).z

    point, rng = problem_of(model, nodes, CASES[0], 64), np.random.default_rng(0)
    direction = jax.tree.map(lambda a: jnp.asarray(0.1 * rng.standard_normal(a.shape)), point)
    move = lambda s: jax.tree.map(lambda a, d: a + s * d, point, direction)  # noqa: E731
    _, tangent = jax.jvp(solve, (point,), (direction,))
    step = 1e-5
    difference = (solve(move(step)) - solve(move(-step))) / (2 * step)
    np.testing.assert_allclose(tangent, difference, rtol=1e-5, atol=1e-8)
    weights = jnp.asarray(rng.standard_normal(tangent.shape))
    reverse = jax.grad(lambda p: jnp.sum(weights * solve(p)))(point)
    total = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(reverse), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(total, jnp.sum(weights * tangent), rtol=1e-10)
    problem, h = point
    jac = jax.jit(ProxProblem.jacobian)(problem, solve(point))
    dense = jax.jacfwd(lambda h: solve((problem, h)))(h)
    expected = jnp.einsum("lankbn->lakbn", dense).reshape(2, 2, 64)
    np.testing.assert_allclose(jac, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("r", [1, 2])
def test_arrays_and_entries_agree(monkeypatch, r):
    """Whole arrays with a loop over the pivots agree with entry-by-entry code, for three and for four fields."""
    L = 4 - r
    model = ta.DotProduct(mixing=np.full((L, L), 1 / L), encodings=np.linspace(-1, 1, L)[:, None], rank=r)
    normals = jnp.asarray(np.random.default_rng(0).normal(size=(2 * r + 1, L, 64)))
    h, y, V = jnp.moveaxis(normals[:r], 0, 1), normals[r:][:1].swapaxes(0, 1), 3.0 * jnp.eye(r) + jnp.zeros((L, r, r))

    def outputs(V):
        problem = ProxProblem(model, V, y)
        minima = prox_module.prox(problem, h)
        return minima.z, problem.jacobian(jax.lax.stop_gradient(minima.z)), minima.gap

    def results(limit, unrolled):
        monkeypatch.setattr(nodewise, "_MOST_ENTRIES", limit)
        monkeypatch.setattr(arrays, "_UNROLLED", unrolled)
        nodewise._run_at_nodes.clear_cache()
        return jax.jit(lambda V: jax.jvp(outputs, (V,), (V,)))(V)

    for a, b in zip(*(jax.tree.leaves(results(*sizes)) for sizes in ((99, 99), (0, 0))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_a_hessian_column_by_column(monkeypatch):
    L, size = moreau._MAX_COLUMNS + 1, 5
    model = ta.DotProduct(mixing=np.full((L, L), 1 / L), encodings=np.linspace(-1, 1, L)[:, None])
    Z, Y = 0.7 * jax.random.normal(jax.random.key(3), (2, L, 1, size))
    columns = jax.jit(moreau.expansion_at_nodes)(model, Z, Y)
    monkeypatch.setattr(moreau, "_MAX_COLUMNS", L)
    for by_column, at_once in zip(columns, moreau.expansion_at_nodes(model, Z, Y), strict=True):
        np.testing.assert_allclose(by_column, at_once, rtol=1e-12, atol=1e-14)
    node = jax.hessian(lambda z: model.loss(z[:, None], Y[..., 2]))(Z[:, 0, 2])
    np.testing.assert_allclose(columns[2][..., 2], node, rtol=1e-12, atol=1e-14)


def test_second_minimum_is_a_minimum_above(model, nodes):
    problem, h = problem_of(model, nodes, CASES[4])
    minima = prox(problem, h)
    has_second = np.isfinite(np.asarray(minima.gap))
    assert 0.01 < has_second.mean() < 0.1
    grad = np.abs(np.asarray(gradient(problem, minima.other, h)))[..., has_second]
    assert grad.max() < 1e-5
    rise = np.asarray(energy_of(problem, minima.other, h) - energy_of(problem, minima.z, h))
    assert np.all(rise[has_second] >= -1e-12)
    np.testing.assert_array_equal(minima.other[..., ~has_second], minima.z[..., ~has_second])


class TwoWells(ta.DotProduct):
    """A loss that is not even in the first token: wells at .1 and -1.2, and no barrier at zero."""

    def loss(self, Z, Y):
        a, b = Z[:, 0]
        return (a - 0.1) ** 2 * (a + 1.2) ** 2 + 5 * b**2


def test_wells_of_a_loss_that_is_not_even_are_looked_for():
    model = TwoWells(**vars(ta.DotProduct()))
    h = jnp.stack([jnp.linspace(-0.7, 0.4, 32), jnp.zeros(32)])[:, None]
    minima = prox(ProxProblem(model, jnp.full((2, 1, 1), 40.0), 0 * h), h)
    wells = np.sort(np.stack([minima.z[0, 0], minima.other[0, 0]]), 0)
    np.testing.assert_allclose(wells, [[-1.2] * 32, [0.1] * 32], atol=0.02)


def test_a_temperature_scales_what_a_large_student_is():
    h, y = np.random.default_rng(0).normal(size=(2, 2, 1, 512)) * np.array([6**0.5, 1.34])[:, None, None, None]

    def lowest(model, unit):
        problem = ProxProblem(model, jnp.full((2, 1, 1), 24.0 * unit**2), unit * jnp.asarray(y))
        minima = prox(problem, unit * jnp.asarray(h))
        return energy_of(problem, minima.z, unit * jnp.asarray(h)), minima.gap

    cold, plain = Tempered(*LARGE), ta.DotProduct(*LARGE)
    (energy, gap), (expected, expected_gap) = lowest(cold, cold.field_scale), lowest(plain, 1.0)
    np.testing.assert_allclose(energy, expected, rtol=1e-5)
    assert np.mean(np.isfinite(gap) != np.isfinite(expected_gap)) < 0.01


def test_single_precision(nodes):
    model = ta.DotProduct(dtype=jnp.float32)
    case = CASES[0]
    problem, h = jax.tree.map(lambda a: a.astype(jnp.float32), problem_of(ta.DotProduct(), nodes, case))
    minima = prox(problem._replace(model=model), h)
    exact = prox(*jax.tree.map(lambda a: a.astype(jnp.float64), (problem._replace(model=ta.DotProduct()), h)))
    assert minima.z.dtype == jnp.float32
    assert float(jnp.mean(minima.converged)) > 0.99
    np.testing.assert_allclose(minima.z, exact.z, atol=2e-3)


def at_one_node(*fields):
    """Student fields of tokens with one column, at one node."""
    return jnp.asarray(fields, float)[:, None, None]


def test_starts_where_attention_flips():
    """They are the projections of h on the planes z_l = 0 and z_k = z_l; beyond kinks they are its reflections."""
    three = {"mixing": np.full((3, 3), 1 / 3), "encodings": [[1.0], [0.0], [-1.0]]}
    h = at_one_node(1.0, 3.0, -2.0)
    projections = [[0, 3, -2], [1, 0, -2], [1, 3, 0], [2, 2, -2], [-0.5, 3, -0.5], [1, 0.5, 0.5]]
    np.testing.assert_allclose(prox_module._flips(ta.DotProduct(**three), h)[:, :, 0, 0], projections, atol=1e-14)
    reflections = [[-1, 3, -2], [1, -3, -2], [1, 3, 2], [3, 1, -2], [-2, 3, 1], [1, -2, 3], [-1, -3, 2]]
    np.testing.assert_allclose(prox_module._flips(ta.ReLUAttention(**three), h)[:, :, 0, 0], reflections, atol=1e-14)


@pytest.mark.parametrize(
    ("h", "V", "energy", "expected"),
    [
        ((3.0, 1.0), (1.0, 1.0), 0.6, (False, True, True)),  # the planes cost 4.5, 0.5 and 1
        ((3.0, 1.0), (1.0, 1.0), 0.5, (False, False, False)),  # none costs less than the energy
        ((3.0, 1.0), (1.0, 1.0), 1.12, (False, True, True)),  # the first costs four times the energy
        ((3.0, 1.0), (1.0, 1.0), 1.13, (True, True, True)),
        ((3.0, 1.0), (1.0, 3.0), 0.17, (False, True, True)),  # 4.5, 1 / 6 and 0.5
        ((3.0, 1.0), (1.0, 3.0), 0.16, (False, False, False)),
        ((1.7, 1.0), (1.0, 1.0), 9.0, (False, False, False)),  # the fields are not large: 1.7^2 < 3
        ((1.8, 0.9), (1.0, 1.0), 9.0, (True, True, True)),
        ((1.8, 0.5), (1.0, 1.0), 9.0, (True, False, True)),  # a score changes by 0.9 on the way to the second plane
    ],
)
def test_which_flips_may_lead_to_a_lower_minimum(h, V, energy, expected):
    """A low temperature changes the unit of the fields, and nothing else."""
    for model, unit in ((ta.DotProduct(), 1.0), (Tempered(), Tempered.field_scale)):
        problem = ProxProblem(model, unit**2 * at_one_node(*V), at_one_node(0, 0))
        relevant = prox_module._flips_matter(problem, unit * at_one_node(*h), jnp.array([energy]))
        np.testing.assert_array_equal(relevant[:, 0], expected)


def test_which_flips_may_lead_beyond_a_kink():
    """With kinks small fields count as well, and -h is tried where any plane is."""
    problem = ProxProblem(ta.ReLUAttention(), at_one_node(1.0, 1.0), at_one_node(0, 0))
    for energy, expected in ((0.01, [True] * 4), (0.0045, [False, True, True, True]), (0.0024, [False] * 4)):
        relevant = prox_module._flips_matter(problem, at_one_node(0.2, 0.1), jnp.array([energy]))
        np.testing.assert_array_equal(relevant[:, 0], expected)


@pytest.mark.parametrize(
    ("curvature", "slope", "h", "expected"),
    [
        ((-0.36, 0.0), 0.0, (0.1, 0.0), False),  # three quarters of 1 / V are 0.375
        ((-0.39, 0.0), 0.0, (0.1, 0.0), True),
        ((0.0, -0.39), 0.0, (0.1, 0.0), True),
        ((0.0, 0.0), 1e-9, (0.1, 0.0), True),  # the loss is not even
        ((0.0, 0.0), 0.0, (1.2, 0.0), False),  # 1.2^2 < 1.5
        ((0.0, 0.0), 0.0, (0.0, -1.25), True),
    ],
)
def test_which_nodes_may_have_a_double_well(model, curvature, slope, h, expected):
    problem = ProxProblem(model, at_one_node(2.0, 2.0), at_one_node(0, 0))
    origin = prox_module.Origin(at_one_node(0.0, slope), jnp.diag(jnp.array(curvature))[..., None], at_one_node(1, 0))
    assert bool(prox_module._wells_matter(problem, at_one_node(*h), origin)[0]) is expected
    kinked = ProxProblem(ta.ReLUAttention(), *problem[1:])
    assert bool(prox_module._wells_matter(kinked, at_one_node(*h), origin)[0])


def test_the_expansion_of_the_energy_of_several_columns():
    """Energy, gradient, Hessian and the proximal operator's Jacobian are those of the formula of the energy."""
    model, rng = ta.DotProduct(rank=2, teacher=np.eye(2)), np.random.default_rng(5)
    root, (Z, h, y) = rng.normal(size=(2, 2, 2)), jnp.asarray(rng.normal(size=(3, 2, 2, 3)))
    V = root @ root.swapaxes(1, 2) + 0.2 * np.eye(2)
    problem = ProxProblem(model, jnp.asarray(V), y)

    def energy(z, n):
        d = z.reshape(2, 2) - h[..., n]
        quadratic = 0.5 * jnp.einsum("la,lab,lb->", d, np.linalg.inv(V), d)
        return quadratic, model.loss(z.reshape(2, 2), y[..., n])

    values, slopes = problem.energy(Z, h), problem.gradient(Z, h)
    expansion = problem.expand(Z.reshape(4, 3), h.reshape(4, 3))
    hessian, precision = problem.hessian(Z)
    jacobian = problem.jacobian(Z)
    inverse = np.zeros((4, 4))
    inverse[:2, :2], inverse[2:, 2:] = np.linalg.inv(V)
    np.testing.assert_allclose(precision[..., 0], inverse, rtol=1e-10)
    np.testing.assert_allclose(problem.least_pivots(), 1e-3 * np.diag(inverse), rtol=1e-10)
    for n in range(3):
        z = Z[..., n].ravel()
        quadratic, loss = energy(z, n)
        slope, bend = (jax.jit(f(lambda z, n=n: sum(energy(z, n))))(z) for f in (jax.grad, jax.hessian))
        np.testing.assert_allclose(values[n], quadratic + loss, rtol=1e-10)
        np.testing.assert_allclose([expansion.quadratic[n], expansion.loss[n]], [quadratic, loss], rtol=1e-10)
        for actual in (slopes[..., n].ravel(), expansion.slope[:, n]):
            np.testing.assert_allclose(actual, slope, rtol=1e-9, atol=1e-12)
        for actual in (hessian[..., n], expansion.hessian[..., n]):
            np.testing.assert_allclose(actual, bend, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(jacobian[..., n], np.linalg.solve(bend, inverse), rtol=1e-8, atol=1e-10)
