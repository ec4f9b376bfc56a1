"""The spectrum of Y = M S* + sqrt(N) G: moments, the prior's derivatives by two routes, and random matrices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiedattn_jax as ta
from tiedattn_jax.wide.laws import Eigenvalues, GaussianFactors, SingularValues, Wishart, singular_values
from tiedattn_jax.wide.spectrum import convolution, spectral_prior, stability

LAWS = {
    "few": Wishart(0.5),
    "square": Wishart(1.0),
    "many": Wishart(2.0),
    "thin": Wishart(0.01),
    "atoms": Eigenvalues([0.3, 0.0, 2.5, 0.3, 0.0, 1.0]),
    "few factors": GaussianFactors(0.5),
    "square factors": GaussianFactors(1.0),
    "many factors": GaussianFactors(2.0),
    "singular values": SingularValues([0.3, 0.0, 2.5, 0.3, 0.0, 1.0]),
}
GAPS = Eigenvalues([0.0, 0.0, 1.0, 2.0])


@jax.jit
def at(law, M, N, tau):
    """The largest eigenvalue of Y, the height of the place of tau above the axis, the prior, and its stability."""
    curve = convolution(law, M, N)
    place = curve.place(tau)
    return curve.top, place.imag, spectral_prior(curve, tau, place), stability(curve, tau, place)


@jax.jit
def moments(law, M, N):
    Y = convolution(law, M, N).nodes()
    return jnp.stack([jnp.sum(Y.weight * Y.y**k) for k in range(4)])


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_eigenvalues_have_the_moments_of_their_law(law):
    x = law.eigenvalues(60_000)
    assert np.all(np.diff(x) >= 0)
    x = np.concatenate([-x[::-1], x]) if law.SYMMETRIC else x
    ties = np.sum((np.unique(x, return_counts=True)[1] / len(x)) ** 2)
    np.testing.assert_allclose([np.mean(x**2), ties], [law.rho, law.ties], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(x[-1], law.largest, rtol=5e-3)
    assert law.ties.dtype == x.dtype


def test_quantiles_at_a_hard_edge():
    np.testing.assert_allclose(np.mean(Wishart(1.0).eigenvalues(60_000) ** 2), 2.0, rtol=1e-6)


@pytest.mark.parametrize("N", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_the_density_has_the_moments_of_a_free_sum(law, N):
    """Free cumulants add, and a semicircle has the second one only."""
    M, found = 0.3, moments(law, 0.3, N)
    first = 0.0 if law.SYMMETRIC else np.sqrt(law.kappa) if isinstance(law, Wishart) else np.mean(law.values)
    mean, square = M * first, M**2 * float(law.rho)
    third = 0.0 if law.SYMMETRIC else M**3 * float(np.mean(law.eigenvalues(60_000) ** 3)) + 3 * mean * N
    np.testing.assert_allclose(found[:3], [1, mean, square + N], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[3], third, rtol=1e-3, atol=1e-12)  # by the quantiles of the law


ARGS = np.array([0.25, 0.01, 0.05])
gradient = jax.jit(jax.grad(lambda args, law: at(law, *args)[2].phi))
hessian = jax.jit(jax.jacfwd(lambda args, law: jnp.stack([at(law, *args)[2].by_M, at(law, *args)[2].by_N])))


DEFAULT = "atoms", "few factors"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n not in DEFAULT)) for n in LAWS])
def test_averages_are_the_gradient_of_the_potential_and_have_derivatives(name):
    P, found = at(LAWS[name], *ARGS)[2], hessian(ARGS, LAWS[name])
    np.testing.assert_allclose(gradient(ARGS, LAWS[name]), [P.by_M, P.by_N, -P.trace], rtol=1e-9)
    for k, step in enumerate(1e-4 * ARGS):
        high, low = (at(LAWS[name], *(ARGS + sign * step * np.eye(3)[k]))[2] for sign in (1, -1))
        slopes = [(high.by_M - low.by_M) / (2 * step), (high.by_N - low.by_N) / (2 * step)]
        np.testing.assert_allclose(found[:, k], slopes, rtol=1e-4)


@pytest.mark.full
def test_derivative_in_the_width_of_the_teacher():
    def phi(kappa):
        return at(Wishart(kappa), 0.25, 0.01, 0.05)[2].phi

    slope = (phi(0.5 + 1e-4) - phi(0.5 - 1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(phi)(0.5), slope, rtol=1e-6)


@pytest.mark.parametrize(
    "law, M, N, tau",
    [
        pytest.param(Wishart(0.5), 0.3, 0.01, 0.1, id="few"),
        pytest.param(Wishart(2.0), 0.3, 0.01, 0.1, id="many"),
        pytest.param(Wishart(0.5), 0.9, 1e-3, 0.1, id="null gap"),
        pytest.param(Wishart(2.0), 0.9, 1e-3, 0.02, id="below all"),
        pytest.param(GAPS, 0.5, 1e-3, 0.25, id="first gap"),
        pytest.param(GAPS, 0.5, 1e-3, 0.7, id="second gap"),
        pytest.param(GAPS, 0.5, 1e-3, 0.48, id="lump"),
        pytest.param(GaussianFactors(0.5), 0.3, 0.01, 0.1, id="few factors"),
        pytest.param(GaussianFactors(2.0), 0.3, 0.01, 0.1, id="many factors"),
        pytest.param(SingularValues(GAPS.values), 0.5, 1e-3, 0.25, id="singular values"),
    ],
)
def test_the_prior_agrees_with_random_matrices(law, M, N, tau):
    """The threshold lies in the bulk, or in the first or second gap of the spectrum."""
    d = 600
    G, S = np.random.default_rng(0).standard_normal((d, d)), np.diag(M * law.eigenvalues(d))
    if law.SYMMETRIC:
        Y = np.linalg.svd(S + np.sqrt(N / d) * G, compute_uv=False)[::-1]
    else:
        Y = np.linalg.eigvalsh(S + np.sqrt(N / d / 2) * (G + G.T))
    top, height, P, stable = at(law, *np.array([M, N, tau]))
    f = np.maximum(Y - tau, 0)
    np.testing.assert_allclose([P.trace, 2 * P.phi, P.share], [f.mean(), (f**2).mean(), (f > 0).mean()], rtol=0.01)
    if float(height) == 0:  # no eigenvalue fluctuates across a gap
        np.testing.assert_allclose(P.share, (f > 0).mean(), rtol=1e-12)
    np.testing.assert_allclose(top, Y[-1], rtol=0.03)
    same = np.eye(len(Y))
    squares = np.where(same > 0, f > 0, (f[:, None] - f) / (Y[:, None] - Y + same)) ** 2
    if law.SYMMETRIC:
        squares += ((f[:, None] + f) / (Y[:, None] + Y)) ** 2
    np.testing.assert_allclose(stable, 0.5 * squares.mean(), rtol=0.01)


@jax.jit
def bounded(law, share):
    """The place where a bound of the rank cuts, the eigenvalue there, the stability, and the spectrum."""
    curve = convolution(law, jnp.asarray(1.0), jnp.asarray(1e-3))
    start = curve.first_place(jnp.asarray(0.05), share, jnp.asarray(True))
    Y, least = curve.nodes(), curve.at(start.real, start.imag)[1]
    return start.imag, least, stability(curve, jnp.asarray(0.05), start, True), Y.y, Y.weight


@pytest.mark.parametrize("law, share", [(GAPS, 0.25), (SingularValues(GAPS.values), 0.5), (Wishart(0.05), 0.05)])
def test_the_stability_of_a_rank_bound_in_a_gap(law, share):
    """The eigenvalue at which the bound cuts is above tau, so that f jumps inside the gap."""
    height, least, found, y, weight = map(np.asarray, bounded(law, share))
    assert height == 0
    counts = (np.abs(y) if law.SYMMETRIC else y) > least
    f, same = np.where(counts, y - 0.05 * np.sign(y), 0.0), y[:, None] == y
    ratio = np.where(same, counts, (f[:, None] - f) / (y[:, None] - y + same))
    np.testing.assert_allclose(found, (1 if law.SYMMETRIC else 0.5) * weight @ ratio**2 @ weight, rtol=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("law, atoms", [(Wishart(0.5), Eigenvalues), (GaussianFactors(0.5), SingularValues)])
def test_the_closed_form_agrees_with_its_quantiles(law, atoms):
    exact, atoms = (at(one, 0.28, 8e-4, 0.05)[2] for one in (law, atoms(law.eigenvalues(300))))
    np.testing.assert_allclose(np.stack(atoms), np.stack(exact), rtol=2e-3)


@jax.jit
def above_quantile(law, M, N, share):
    curve = convolution(law, M, N)
    place = curve.quantile(share)
    return (
        spectral_prior(curve, jnp.asarray(0.01), place),
        curve.above(place),
        place.imag,
        curve.nodes(place.real).weight.sum(),
    )


@pytest.mark.full
@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_a_share_of_the_eigenvalues_lies_above_its_quantile(share):
    _, above, _, weight = above_quantile(Wishart(0.5), 0.3, 0.01, share)
    np.testing.assert_allclose([above, weight], share, rtol=1e-10)


def test_a_quantile_in_a_gap():
    """Half of the eigenvalues lie above the gap, wherever in it the place is; there its share has no slope."""
    values = partial(above_quantile, GAPS, N=1e-3, share=0.5)
    P, above, height, _ = values(0.5)
    by_M = jax.grad(lambda M: values(M)[0].phi)(0.5)
    np.testing.assert_allclose([above, height, by_M], [0.5, 0.0, P.by_M], rtol=1e-9)
    np.testing.assert_allclose([P.trace, P.by_M], [0.5 * (0.75 - 0.01), 0.5 * 1.25 - 0.01 * 0.75], rtol=0.02)


def largest(program):
    """Return the number of entries of the largest array in a program."""
    parts = jax.tree.leaves([e.params for e in program.eqns], is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    inner = [largest(part) for part in parts if hasattr(part, "eqns")]
    return max([1, *inner, *(variable.aval.size for e in program.eqns for variable in e.outvars)])


@pytest.mark.parametrize("binds", [None, True])
def test_an_evaluation_costs_some_hundred_numbers_for_every_eigenvalue(binds):
    def by_M(values, M, N, tau, kappa):
        curve = convolution(Eigenvalues(values), M, N)
        place = curve.first_place(tau, kappa, binds if binds is None else jnp.asarray(binds))
        return spectral_prior(curve, tau, place).by_M + stability(curve, tau, place)

    d = 4096
    program = jax.make_jaxpr(jax.grad(by_M))(jnp.ones(d), 0.3, 0.01, 0.1, 0.2)
    assert d < largest(program) <= 100 * d


def test_every_eigenvalue_stands_for_the_middle_of_its_share():
    for law in (Wishart(0.5), Wishart(2.0)):
        np.testing.assert_allclose(law.eigenvalues(3), law.eigenvalues(9)[1::3], rtol=1e-12)
    atoms = Eigenvalues([3.0, 1.0, 2.0])
    assert atoms.eigenvalues(2).tolist() == [1, 3] and atoms.eigenvalues(6).tolist() == [1, 1, 2, 2, 3, 3]
    one = Eigenvalues([0.5])
    assert [float(number) for number in (one.rho, one.ties)] == [0.25, 1.0]
    assert str(Wishart(0.5)) == "Wishart matrix of width 0.5 d"
    assert str(Eigenvalues([2.5, 0.25, 1.0])) == "3 eigenvalues from 0.25 to 2.5"


def test_singular_values_of_a_product_need_no_product():
    for shape in ((6, 2), (6, 6)):
        W_Q, W_K = np.random.default_rng(0).standard_normal((2, *shape))
        product = np.linalg.svd(W_Q @ W_K.T, compute_uv=False)[::-1]
        np.testing.assert_allclose(singular_values(W_Q, W_K), product, atol=1e-12)
    with pytest.raises(ta.InputError, match="W_K must have shape"):
        singular_values(np.ones((4, 2)), np.ones((4, 3)))


@pytest.mark.parametrize("kappa", [0.01, 0.5, 20.0])
def test_quantiles_of_gaussian_factors_fill_their_interval(kappa):
    values = GaussianFactors(kappa).eigenvalues(20_000)
    assert np.all(np.diff(values) >= 0)
    np.testing.assert_allclose(np.mean(values**2), 1, rtol=1e-3)
    np.testing.assert_allclose(values[-1], GaussianFactors(kappa).largest, rtol=5e-3)


@pytest.mark.parametrize("kappa", [0.2, 1.0, 3.0])
def test_gaussian_factors_have_the_singular_values_of_their_law(kappa):
    d = 600
    Q, K = np.random.default_rng(0).standard_normal((2, d, int(kappa * d)))
    values = np.linalg.svd(Q @ K.T, compute_uv=False)[::-1] / (d * np.sqrt(kappa))
    assert np.mean(np.abs(values - GaussianFactors(kappa).eigenvalues(d))) < 0.006  # half of it at d = 1,200


@jax.jit
def resolvent(law, u, s):
    return law.resolvent(u, s, jnp.asarray(0.7))


@pytest.mark.parametrize("kappa", [1e-3, 0.3, 20.0])
def test_resolvents_of_gaussian_factors_near_zero_and_far(kappa):
    """They are those of many quantiles; near zero a thin law is seen as its share of zeros."""
    law = GaussianFactors(kappa)
    atoms = SingularValues(law.eigenvalues(20_000))
    for z in (1e-9 + 1e-9j, 1e-3 + 1e-4j, 50.0 + 0.1j, 1e6 + 1e3j):
        found, expected = (resolvent(one, z.real, z.imag**2) for one in (law, atoms))
        if abs(z) > 1 or kappa < 1:  # without zeros, atoms are too coarse near zero
            np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=2e-3)
