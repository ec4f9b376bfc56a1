"""Growth rates of a small start against reference numbers, closed forms, sampled matrices and differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse.linalg import LinearOperator, eigsh

import tiedattn_jax as ta
from tiedattn_jax.dynamics.small_start import (
    SmallRates,
    SmallStart,
    _check,
    _eigenvalue,
    _responses,
    _token_scales,
)

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
        slope = jax.grad(lambda Q: ta.finite.risk(model, data, Q))
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
    return ta.dynamics.small_start(model, 2.0)


def test_rates_of_the_standard_setting(model, start):
    rates = np.array([start.encodings, start.teacher, start.bulk])
    np.testing.assert_allclose(rates + model.lam, [0.173689, 0.080679, 0.07618], atol=1e-6)
    assert start.ok and start.first == "encodings" and np.asarray(start.separates).tolist() == [True, True]
    assert all(float(getattr(start.stderr, name)) < 1e-7 for name in ("encodings", "teacher", "bulk"))
    assert start.to_dict()["separates"] == {"encodings": True, "teacher": True}
    assert "encodings first" in str(start)


@pytest.mark.full
def test_rates_by_other_averages(model, start, nodes):
    other = ta.dynamics.small_start(model, 2.0, nodes=nodes)
    for name in ("encodings", "teacher", "bulk"):
        bar = float(getattr(other.stderr, name))
        assert abs(float(getattr(other, name) - getattr(start, name))) < 3 * bar < 1e-3


@pytest.mark.full
@pytest.mark.parametrize(("make", "d", "alpha"), [(ta.DotProduct, 1000, 2.0), (anisotropic, 600, 4.0)])
def test_eigenvalues_of_a_sampled_matrix(make, d, alpha):
    """Minus the Hessian of the risk of four instances; the edge is approached from below like d^(-2/3)."""
    model, start = make(), ta.dynamics.small_start(make(), alpha)
    draws = [eigenvalues(model, d, alpha, jax.random.key(k), 3) for k in range(4)]
    values, overlaps = (np.array(a) for a in zip(*draws, strict=True))
    mean, bars = values.mean(0), values.std(0, ddof=1) / 2
    rates = np.array([start.encodings, start.teacher])
    assert np.all(np.abs(mean[:2] - rates) < 3 * bars[:2]) and np.all(bars[:2] < 0.05 * rates)
    assert np.all(np.asarray(start.separates)) and 0.88 < mean[2] / float(start.bulk) < 1.02
    if make is ta.DotProduct:
        assert np.all(overlaps[:, 0, 0] > 0.5) and np.all(overlaps[:, 1, 1:].sum(1) > 0.05)


@pytest.mark.full
def test_three_tokens_and_two_columns():
    """Both columns of the student have the same rates; those of the encodings are of two directions."""
    encodings = np.array([[1.0, 0.2], [0.0, -0.8], [-1.0, 0.3]])
    model = ta.DotProduct(mixing=np.full((3, 3), 0.2) + 0.4 * np.eye(3), encodings=encodings, rank=2)
    theory = ta.dynamics.small_start(model, 4.0, nodes=ta.Sobol(2**10, replicates=2).rule(model))
    values = np.array([eigenvalues(model, 400, 4.0, jax.random.key(k), 1)[0] for k in range(6)])
    bar = values.std(ddof=1) / 6**0.5
    assert abs(values.mean() - float(theory.encodings)) < 3 * bar < 0.05 * values.mean()
    assert theory.first == "encodings"


@pytest.mark.parametrize(
    ("encodings", "teacher", "separates", "first"),
    [
        (0.3, 0.2, (1.0, 1.0), "encodings"), (0.2, 0.3, (1.0, 1.0), "teacher"), (0.1, 0.3, (0.5, 1.0), "teacher"),
        (0.3, 0.1, (0.75, 0.0), "encodings"), (0.1, 0.1, (0.25, 0.0), "bulk"),
    ],
)  # fmt: skip
def test_the_direction_of_the_largest_rate_is_first(model, encodings, teacher, separates, first):
    """A direction separates if it does in more than half of the replicates; else it has the rate of the bulk, here .1.

    A rate that is not finite is told.
    """
    flags = np.arange(4)[:, None] < 4 * np.array(separates)
    rates = {"encodings": encodings, "teacher": teacher, "bulk": 0.1}
    arrays = {name: jnp.full(4, rate) for name, rate in rates.items()}
    start = SmallStart(model, jnp.asarray(2.0), SmallRates(**arrays, separates=jnp.asarray(flags)))
    assert start.first == first and start.to_dict()["first"] == first and start.status_name == "converged"
    assert np.asarray(start.separates).tolist() == [share > 0.5 for share in separates]
    assert start.title == f"small start at alpha = 2, {first} first"
    rows = [row.split() for row in str(start).splitlines()[1:4]]
    words = ["growth rate of this overlap, lam subtracted" if share > 0.5 else "does not separate from the bulk"
             for share in separates]  # fmt: skip
    notes = [*words, "growth rate of a student without overlaps, lam subtracted"]
    expected = [[name, f"{rate:g}", *note.split()] for (name, rate), note in zip(rates.items(), notes, strict=True)]
    assert sorted(rows) == sorted(expected)
    for name in rates:
        lost = dataclasses.replace(start.replicates, **{name: jnp.full(4, jnp.nan)})
        lost = dataclasses.replace(start, replicates=lost)
        assert lost.status_name == "nonfinite" and not lost.ok


def test_closed_form():
    """Bulk (1 + sqrt(n L / d))^2; the encodings as in a spiked covariance."""
    model = Quadratic(jnp.asarray(0.5), lam=jnp.asarray(0.01))
    start = ta.dynamics.small_start(model, 3.0)
    samples, x, lam = 6.0, 0.25 / 3.0 / 0.5, 0.01  # |s|^2 = 0.5
    assert float(start.bulk) == pytest.approx(0.25 * (1 + samples**0.5) ** 2 - lam, rel=1e-9)
    assert np.asarray(start.separates).tolist() == [True, False] and float(start.teacher) == float(start.bulk)
    assert float(start.encodings) == pytest.approx(0.25 * (1 + x) * (1 / x + samples) - lam, rel=1e-9)
    weak = ta.dynamics.small_start(dataclasses.replace(model, scale=jnp.asarray(0.3)), 3.0)
    assert weak.first == "bulk" and "does not separate" in str(weak)


@pytest.mark.full
def test_eigenvalues_of_zero():
    """Tokens in a share w of the dimensions: a smaller problem, with all of lam + rate times w^2."""
    w, p, one = 0.6, np.array([[1.0, -1.0], [-1.0, 1.0]]), np.ones((1, 1, 1))

    def law(weights, gamma, size, teacher):
        tau, pi = (np.multiply.outer(np.array(a), b) for a, b in ((size, p), (teacher, one[0])))
        return ta.DotProduct(spectrum=ta.SpectralLaw(weights, np.outer(gamma, [1, 1]), tau, pi, 0 * pi[:, [0, 0]]))

    part = ta.dynamics.small_start(law([w, 1 - w], [0.25, 0.0], [1 / w, 0.0], [1 / w, 0.0]), 2.0)
    whole = ta.dynamics.small_start(law([1.0], [0.25], [1.0], [1.0]), 2.0 / w)
    for name in ("encodings", "teacher", "bulk"):
        assert float(getattr(part, name)) == pytest.approx(w**2 * (float(getattr(whole, name)) + 0.01) - 0.01, rel=1e-8)


THRESHOLDS = {"encodings": 0.41904, "teacher": 1.20866}


@pytest.mark.parametrize(("number", "alpha"), [*enumerate(THRESHOLDS.values())])
def test_a_direction_separates_from_its_threshold_on(model, number, alpha):
    for factor in (0.97, 1.03):
        separates = np.asarray(ta.dynamics.small_start(model, factor * alpha).separates)
        assert separates[number] == (factor > 1) and separates[1 - number] == bool(number)


@pytest.mark.full
@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds(model, name):
    found, step = ta.dynamics.separation(model, name), 1e-4
    assert found.ok and found.stderr < 1e-7 and found.sensitivities_stderr.sigma < 1e-5
    assert float(found.alpha) == pytest.approx(THRESHOLDS[name], abs=1e-5)
    low, high = (float(ta.dynamics.separation(ta.DotProduct(sigma=0.5 + s), name).alpha) for s in (-step, step))
    assert float(found.sensitivities.sigma) == pytest.approx((high - low) / (2 * step), rel=1e-5)


@pytest.mark.full
def test_a_threshold_at_no_end_of_its_range():
    """Strong encodings separate far below alpha = 1e-3, at an alpha like sigma^4; one below the range is none."""
    grid, sizes = ta.GaussHermite(6, replicates=1), (1e-3, 5e-4, 1e-8)
    alphas = [ta.dynamics.separation(ta.DotProduct(sigma=sigma), direction="encodings", nodes=grid) for sigma in sizes]
    assert float(alphas[0].alpha / alphas[1].alpha) == pytest.approx(16, rel=0.01) and alphas[1].ok
    for factor, separates in ((0.9, False), (1.1, True)):
        start = ta.dynamics.small_start(ta.DotProduct(sigma=5e-4), factor * alphas[1].alpha, nodes=grid)
        assert bool(start.separates[0]) == separates
    assert alphas[2].status_name == "absent"


@pytest.mark.full
def test_derivatives(model):
    """Implicit derivatives of the rates against finite differences."""

    def rates(omega):
        start = ta.dynamics.small_start(dataclasses.replace(model, omega=omega), 2.0)
        return jnp.stack([start.encodings, start.teacher, start.bulk])

    _, slopes = jax.jvp(rates, (model.omega,), (jnp.ones_like(model.omega),))
    step = 1e-4
    differences = (rates(model.omega + step) - rates(model.omega - step)) / (2 * step)
    np.testing.assert_allclose(slopes, differences, rtol=1e-5)


@pytest.mark.parametrize("g", [0.7, -0.7, 0.0])
@pytest.mark.parametrize("atoms", [1, 3])
def test_the_eigenvalue_of_a_response(atoms, g):
    """It solves V = sum_a w_a c_a / (zeta - alpha c_a g) above all poles; an atom of eigenvalue zero has no part."""
    w, c = (np.ones(1), np.array([0.25])) if atoms == 1 else (np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.1, 0.0]))
    tau = np.array([[1.0, -1.0], [-1.0, 1.0]]) * np.ones((atoms, 1, 1))
    law = ta.SpectralLaw(w, np.repeat(c[:, None], 2, 1), tau, np.ones((atoms, 1, 1)), np.zeros((atoms, 2, 1)))
    model, alpha, V = ta.DotProduct(spectrum=law), jnp.asarray(2.0), jnp.asarray(0.3)
    zeta, found = jax.jit(lambda *p: (_eigenvalue(*p), _responses(*p)))(model, alpha, V, jnp.asarray(g))
    responses = 1 / (float(zeta) - 2 * c * g)
    assert float(w @ (c * responses)) == pytest.approx(0.3, rel=1e-9) and np.all(responses[c > 0] > 0)
    np.testing.assert_allclose(found, responses, rtol=1e-9)


@pytest.mark.parametrize("change", [0.0, 1e-7])
def test_covariances_are_to_be_proportional(change):
    """The covariances of all tokens are multiples of one matrix, up to one in a million; others are refused."""
    law = anisotropic().law()
    model = ta.DotProduct(
        spectrum=dataclasses.replace(law, gamma=law.gamma * jnp.array([[1.0, 1.0], [1.0, 1.0 + change]]))
    )
    scales = np.asarray(_token_scales(_check(model)))
    np.testing.assert_allclose(scales, [1.6, 0.4], rtol=1e-6)
