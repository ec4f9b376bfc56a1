import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse.linalg import LinearOperator, eigsh

import tiedattn_jax as ta
from tiedattn_jax.dynamics import small_start as module

SHARES = np.array([0.5, 0.5])


class Quadratic(ta.Model):
    """A loss whose second derivative at zero is minus one in every token: the bulk is that of Marchenko and Pastur."""

    scale: jax.Array
    shape = (2, 1, 1)

    def loss(self, Z, Y):
        return -0.5 * jnp.sum(Z**2) + jnp.sum(Z**4) + jnp.sum(Y**2)

    def law(self):
        tau = self.scale**2 * jnp.array([[[1.0, -1.0], [-1.0, 1.0]]])
        return ta.SpectralLaw(jnp.ones(1), jnp.ones((1, 2)) / 4, tau, jnp.ones((1, 1, 1)), jnp.zeros((1, 2, 1)))


class Unbounded(Quadratic):
    """A target that grows with the teacher's fields."""

    def loss(self, Z, Y):
        return jnp.sum((Z @ Z.T - Y @ Y.T) ** 2)


def anisotropic() -> ta.DotProduct:
    """Two eigenvalues of the covariance, tokens of different variance, encodings in unequal shares."""
    gamma = np.array([[0.4, 0.1], [0.2, 0.05]])
    p = np.array([1.0, -1.0])
    tau = np.array([0.6, 1.6])[:, None, None] * np.outer(p, p)
    pi, cross = np.array([1.2, 0.7])[:, None, None], np.zeros((2, 2, 1))
    return ta.DotProduct(spectrum=ta.SpectralLaw(*map(jnp.asarray, (SHARES, gamma, tau, pi, cross))))


def eigenvalues(model, d, alpha, key, count):
    """The largest eigenvalues of minus the Hessian of the risk at zero, and how their vectors overlap.

    The squared overlaps are those with the span of the encodings and of the teacher.
    """
    data = ta.sample_data(model, d, alpha, key, normalise=True)
    shape = (d, model.shape[1])

    @jax.jit
    def product(v, data):
        slope = jax.grad(lambda Q: ta.risk(model, data, Q))
        return -jax.jvp(slope, (jnp.zeros(shape),), (v.reshape(shape),))[1].ravel()

    size = shape[0] * shape[1]
    operator = LinearOperator((size, size), lambda v: np.asarray(product(jnp.asarray(v.ravel()), data)), dtype=float)
    values, vectors = eigsh(operator, count, which="LA", v0=np.ones(size))
    columns = vectors.reshape(*shape, count)
    overlaps = [
        np.sum(np.einsum("ip,iac->pac", np.linalg.qr(np.asarray(a))[0], columns) ** 2, (0, 1))
        for a in (data.encodings.T[:, :1], data.teacher)
    ]
    return values[::-1], np.array(overlaps)[:, ::-1]


@pytest.fixture(scope="module")
def start(model):
    return ta.small_start(model, 2.0)


def test_rates_of_the_standard_setting(model, start):
    rates = np.array([start.encodings, start.teacher, start.bulk])
    np.testing.assert_allclose(rates + model.lam, [0.173689, 0.080679, 0.07618], atol=1e-6)
    assert start.ok and start.first == "encodings" and np.asarray(start.separates).tolist() == [True, True]
    assert all(float(getattr(start.stderr, name)) < 1e-7 for name in ("encodings", "teacher", "bulk"))
    assert start.to_dict()["separates"] == {"encodings": True, "teacher": True}
    assert "encodings first" in str(start)


def test_rates_by_other_averages(model, start, nodes):
    other = ta.small_start(model, 2.0, nodes=nodes)
    for name in ("encodings", "teacher", "bulk"):
        bar = float(getattr(other.stderr, name))
        assert abs(float(getattr(other, name) - getattr(start, name))) < 3 * bar < 1e-3


def test_eigenvalues_of_a_sampled_matrix(model, start):
    """Minus the Hessian of the risk of four instances; the edge is approached from below like d^(-2/3)."""
    draws = [eigenvalues(model, 1000, 2.0, jax.random.key(k), 3) for k in range(4)]
    values, overlaps = (np.array(a) for a in zip(*draws, strict=True))
    mean, bars = values.mean(0), values.std(0, ddof=1) / 2
    rates = np.array([start.encodings, start.teacher])
    assert np.all(np.abs(mean[:2] - rates) < 3 * bars[:2]) and np.all(bars[:2] < 0.05 * rates)
    assert 0.9 < mean[2] / float(start.bulk) < 1.01
    assert np.all(overlaps[:, 0, 0] > 0.5) and np.all(overlaps[:, 1, 1:].sum(1) > 0.05)


def test_eigenvalues_of_anisotropic_tokens():
    model = anisotropic()
    theory = ta.small_start(model, 4.0)
    values = np.array([eigenvalues(model, 600, 4.0, jax.random.key(k), 3)[0] for k in range(4)])
    mean, bars = values.mean(0), values.std(0, ddof=1) / 2
    rates = np.array([theory.encodings, theory.teacher])
    assert np.all(np.asarray(theory.separates))
    assert np.all(np.abs(mean[:2] - rates) < 3 * bars[:2]) and np.all(bars[:2] < 0.05 * rates)
    assert 0.88 < mean[2] / float(theory.bulk) < 1.02


@pytest.mark.long
def test_three_tokens_and_two_columns():
    """Both columns of the student have the same rates; those of the encodings are of two directions."""
    encodings = np.array([[1.0, 0.2], [0.0, -0.8], [-1.0, 0.3]])
    model = ta.DotProduct(mixing=np.full((3, 3), 0.2) + 0.4 * np.eye(3), encodings=encodings, rank=2)
    theory = ta.small_start(model, 4.0, nodes=ta.Sobol(2**10, replicates=2).rule(model))
    values = np.array([eigenvalues(model, 400, 4.0, jax.random.key(k), 1)[0] for k in range(6)])
    bar = values.std(ddof=1) / 6**0.5
    assert abs(values.mean() - float(theory.encodings)) < 3 * bar < 0.05 * values.mean()
    assert theory.first == "encodings"


@pytest.mark.parametrize("name", ["encodings", "teacher", "bulk"])
def test_a_rate_that_is_not_finite_is_told(start, name):
    lost = eqx.tree_at(lambda s: getattr(s.replicates, name), start, jnp.full_like(start.replicates.bulk, jnp.nan))
    assert start.status_name == "converged" and lost.status_name == "nonfinite" and not lost.ok


@pytest.mark.parametrize(
    ("encodings", "teacher", "separates", "first"),
    [
        (0.3, 0.2, (True, True), "encodings"),
        (0.2, 0.3, (True, True), "teacher"),
        (0.1, 0.3, (False, True), "teacher"),
        (0.3, 0.1, (True, False), "encodings"),
        (0.1, 0.1, (False, False), "bulk"),
    ],
)
def test_the_direction_of_the_largest_rate_is_first(start, encodings, teacher, separates, first):
    """A direction that does not separate has the rate of the bulk, here .1."""
    ones = jnp.ones_like(start.replicates.bulk)
    flags = jnp.broadcast_to(jnp.array(separates), (len(ones), 2))
    rates = (encodings * ones, teacher * ones, 0.1 * ones, flags)
    other = eqx.tree_at(
        lambda s: (s.replicates.encodings, s.replicates.teacher, s.replicates.bulk, s.replicates.separates),
        start,
        rates,
    )
    assert other.first == first and other.to_dict()["first"] == first


def test_closed_form():
    """Bulk (1 + sqrt(n L / d))^2; the encodings as in a spiked covariance."""
    model = Quadratic(jnp.asarray(0.5), lam=jnp.asarray(0.01))
    start = ta.small_start(model, 3.0)
    samples, x, lam = 6.0, 0.25 / 3.0 / 0.5, 0.01  # |s|^2 = 0.5
    assert float(start.bulk) == pytest.approx(0.25 * (1 + samples**0.5) ** 2 - lam, rel=1e-9)
    assert np.asarray(start.separates).tolist() == [True, False] and float(start.teacher) == float(start.bulk)
    assert float(start.encodings) == pytest.approx(0.25 * (1 + x) * (1 / x + samples) - lam, rel=1e-9)
    weak = ta.small_start(dataclasses.replace(model, scale=jnp.asarray(0.3)), 3.0)
    assert weak.first == "bulk" and "does not separate" in str(weak)


def test_eigenvalues_of_zero():
    """Tokens in a share w of the dimensions: a smaller problem, with all of lam + rate times w^2."""
    w, p, one = 0.6, np.array([[1.0, -1.0], [-1.0, 1.0]]), np.ones((1, 1, 1))

    def law(weights, gamma, size, teacher):
        tau, pi = (np.multiply.outer(np.array(a), b) for a, b in ((size, p), (teacher, one[0])))
        return ta.DotProduct(spectrum=ta.SpectralLaw(weights, np.outer(gamma, [1, 1]), tau, pi, 0 * pi[:, [0, 0]]))

    part = ta.small_start(law([w, 1 - w], [0.25, 0.0], [1 / w, 0.0], [1 / w, 0.0]), 2.0)
    whole = ta.small_start(law([1.0], [0.25], [1.0], [1.0]), 2.0 / w)
    for name in ("encodings", "teacher", "bulk"):
        assert float(getattr(part, name)) == pytest.approx(w**2 * (float(getattr(whole, name)) + 0.01) - 0.01, rel=1e-8)


def test_separation(model):
    names = "encodings separate", "teacher separates"
    encodings, teacher = alphas = [ta.threshold(model, name) for name in names]
    assert float(encodings.alpha) == pytest.approx(0.41904, abs=1e-5)
    assert float(teacher.alpha) == pytest.approx(1.20866, abs=1e-5)
    for alpha in alphas:
        assert alpha.ok and alpha.stderr < 1e-7 and alpha.sensitivities_stderr.sigma < 1e-5
    for factor, separates in ((0.97, [False, False]), (1.03, [True, False])):
        assert np.asarray(ta.small_start(model, factor * encodings.alpha).separates).tolist() == separates
    for factor in (0.97, 1.03):
        assert bool(ta.small_start(model, factor * teacher.alpha).separates[1]) == (factor > 1)
    step = 1e-4
    for name, alpha in zip(names, alphas, strict=True):
        low, high = (ta.threshold(ta.DotProduct(sigma=0.5 + s), name).alpha for s in (-step, step))
        assert float(alpha.sensitivities.sigma) == pytest.approx(float(high - low) / (2 * step), rel=1e-5)


def test_derivatives(model):
    """Implicit derivatives of the rates against finite differences."""

    def rates(omega):
        start = ta.small_start(dataclasses.replace(model, omega=omega), 2.0)
        return jnp.stack([start.encodings, start.teacher, start.bulk])

    _, slopes = jax.jvp(rates, (model.omega,), (jnp.ones_like(model.omega),))
    step = 1e-4
    differences = (rates(model.omega + step) - rates(model.omega - step)) / (2 * step)
    np.testing.assert_allclose(slopes, differences, rtol=1e-5)


def test_teacher_that_overlaps_is_refused():
    law = ta.DotProduct().law()
    law = dataclasses.replace(law, cross=jnp.full_like(law.cross, 0.1) * jnp.array([[1.0], [-1.0]]))
    with pytest.raises(ta.InputError, match=r"law\.cross must be zero"):
        ta.small_start(ta.DotProduct(spectrum=law), 2.0)


@pytest.mark.parametrize(
    ("layer", "alpha", "problem"),
    [
        (ta.DotProduct(), 0.0, "alpha must be positive"),
        (ta.DotProduct(penalty=ta.L1(0.1)), 2.0, "model must have no penalty"),
        (ta.ReLUAttention(), 2.0, "model must have a loss without kinks"),
        (Unbounded(jnp.asarray(0.5), lam=jnp.asarray(0.01)), 2.0, "model must have a bounded target"),
        (ta.UntiedDotProduct(), 2.0, "model must have a loss with the same second derivative"),
    ],
)
def test_bad_input(layer, alpha, problem):
    with pytest.raises(ta.InputError, match=problem):
        ta.small_start(layer, alpha)


def sentences(count=5, L=2, t=2, seed=0):
    """Sentences with random matrices T, normals and weights, and the end of the range of V."""
    rng = np.random.default_rng(seed)
    T = rng.standard_normal((count, L, L))
    T = T + np.swapaxes(T, 1, 2)
    eigenvalues = np.linalg.eigvalsh(T)
    weight = rng.uniform(0.5, 1, count)
    arrays = T, eigenvalues, rng.standard_normal((count, L, t)), weight / weight.sum(), (1 - 1e-12) / eigenvalues.max()
    return module._Sentences(*map(jnp.asarray, arrays))


def test_averages_of_sentences():
    """They are those of G = T (1 - V T)^-1, sentence by sentence, and g has its slope in V."""
    data, V = sentences(), 0.1
    g, encodings, teacher = 0.0, 0.0, 0.0
    for T, v, weight in zip(data.T, data.normals, data.weight, strict=True):
        G = np.asarray(T) @ np.linalg.inv(np.eye(2) - V * np.asarray(T))
        g, encodings = g + weight * np.trace(G), encodings + weight * G
        teacher = teacher + weight * (v.T @ G @ v - np.trace(G) * np.eye(2))
    found = module._moments(data, jnp.asarray(V))
    for a, b in ((found.g, g), (found.encodings, encodings), (found.teacher, teacher)):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    value, slope = module._g(data, jnp.asarray(V))
    sides = [float(module._g(data, jnp.asarray(V + s))[0]) for s in (-1e-5, 1e-5)]
    np.testing.assert_allclose([value, slope], [g, (sides[1] - sides[0]) / 2e-5], rtol=1e-6)


@pytest.mark.parametrize("g", [0.7, -0.7, 0.0])
@pytest.mark.parametrize("atoms", [1, 3])
def test_the_eigenvalue_of_a_response(atoms, g):
    """It solves V = sum_a w_a c_a / (zeta - alpha c_a g) above all poles; an atom of eigenvalue zero has no part."""
    w, c = (np.ones(1), np.array([0.25])) if atoms == 1 else (np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.1, 0.0]))
    tau = np.array([[1.0, -1.0], [-1.0, 1.0]]) * np.ones((atoms, 1, 1))
    law = ta.SpectralLaw(w, np.repeat(c[:, None], 2, 1), tau, np.ones((atoms, 1, 1)), np.zeros((atoms, 2, 1)))
    model, alpha, V = ta.DotProduct(spectrum=law), jnp.asarray(2.0), jnp.asarray(0.3)
    zeta = float(module._eigenvalue(model, alpha, V, jnp.asarray(g)))
    responses = 1 / (zeta - 2 * c * g)
    assert float(w @ (c * responses)) == pytest.approx(0.3, rel=1e-9) and np.all(responses[c > 0] > 0)
    np.testing.assert_allclose(module._responses(model, alpha, V, jnp.asarray(g)), responses, rtol=1e-9)


def test_the_edge_is_where_the_eigenvalue_is_least():
    data, model = sentences(), anisotropic()
    for alpha in (0.3, 3.0):
        edge = float(module._edge(model, jnp.asarray(alpha), data))
        V = np.linspace(0.2, min(1.0, 0.999 * float(data.end) / edge), 9) * edge
        zeta = [module._eigenvalue(model, jnp.asarray(alpha), v, module._g(data, v)[0]) for v in map(jnp.asarray, V)]
        assert np.all(np.array(zeta) >= zeta[int(np.argmin(abs(V - edge)))] * (1 - 1e-9))
    assert 0 < edge < float(data.end)


def test_the_first_of_several_roots():
    """It lies between the last negative point and the first positive one; a point at a root counts as none."""
    points = jnp.linspace(0.0, 3.0, 7)
    root, exists = module._first_root(lambda x: (x - 0.7) * (x - 1.2) * (x - 2.1), points)
    assert bool(exists) and float(root) == pytest.approx(0.7, rel=1e-9)
    assert not bool(module._first_root(lambda x: x - 3.1, points)[1])
    assert bool(module._first_root(lambda x: x - 2.9, points)[1])
    small, exists = module._first_root(lambda x: 0.1 * (x - 0.2), points)
    assert bool(exists) and float(small) == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize(("change", "refused"), [(0.0, False), (1e-7, False), (1e-5, True), (0.5, True)])
def test_covariances_are_to_be_proportional(change, refused):
    """The covariances of all tokens are multiples of one matrix, up to one in a million."""
    law = anisotropic().law()
    other = dataclasses.replace(law, gamma=law.gamma * jnp.array([[1.0, 1.0], [1.0, 1.0 + change]]))
    model = ta.DotProduct(spectrum=other)
    if refused:
        with pytest.raises(ta.InputError, match=r"law\.gamma must be those of covariances Sigma_l = s_l Sigma"):
            module._check(model)
    else:
        module._check(model)
    scales = module._token_scales(model)
    np.testing.assert_allclose(scales / scales[0], [1.0, 0.25], rtol=0.2)
    np.testing.assert_allclose(jnp.mean(scales), 1.0)
